# SPDX-License-Identifier: Apache-2.0
"""The addresses of a prefill engine's ranks, over HTTP in the format of SGLang's bootstrap server,
so either engine may be on either side of a push."""
import asyncio
import json
import threading
import time
import urllib.request
from collections import namedtuple

from .. import _check
from ..route import row_of

RANKS = 1024
ANSWER = 1 << 20  # bytes
ANSWER_S = 5.0
AGAIN_S = 1.0  # before a retry of a server that did not answer
ASKED, KNOWN = 32, 1024  # servers

Prefill = namedtuple("Prefill", "tp pp rows")
Prefill.__doc__ = "From a bootstrap server. rows: of route.py, those of a pipeline stage together."
QUERY = "prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d"


# ---- prefill ---------------------------------------------------------------------------

class Server:
    """ranks(): {(stage, rank): row}; secret: of all rows."""

    def __init__(self, host, port, tp, pp, ranks, secret):
        self._at, self._sizes, self._ranks, self._secret = (host, port), (tp, pp), ranks, secret
        self._loop, up = asyncio.new_event_loop(), threading.Event()
        self._failed = None
        self._thread = threading.Thread(target=self._run, args=(up,), name="kvd-bootstrap",
                                        daemon=True)
        self._thread.start()
        up.wait()
        if self._failed:
            raise RuntimeError("kvd.vllm: no bootstrap server on %s:%d (kv_connector_extra_config"
                               ".bootstrap): %s" % (host, port, self._failed))

    def _run(self, up):
        from aiohttp import web
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.add_routes([web.get("/route", self._route), web.get("/health", self._health)])
        runner = web.AppRunner(app, access_log=None)
        try:
            self._loop.run_until_complete(runner.setup())
            self._loop.run_until_complete(web.TCPSite(runner, *self._at).start())
        except OSError as error:
            self._failed = error
        up.set()
        if not self._failed:
            self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _health(self, request):
        from aiohttp import web
        return web.Response(text="OK")

    async def _route(self, request):
        from aiohttp import web
        try:
            dp, cp, tp, pp = (int(request.query[word.split("=")[0]])
                              for word in QUERY.split("&"))
        except (KeyError, ValueError):
            return web.Response(status=400, text="missing or bad: " + QUERY)
        if (dp, cp, tp, pp) == (-1, -1, -1, -1):
            return web.json_response({
                "attn_tp_size": self._sizes[0], "attn_cp_size": 1, "dp_size": 1,
                "pp_size": self._sizes[1], "page_size": None, "kv_cache_dtype": None,
                "follow_bootstrap_room": True})
        row = self._ranks().get((pp, tp)) if (dp, cp) == (0, 0) else None
        if row is None:
            return web.Response(status=404, text="no such rank")
        return web.json_response({"rank_ip": self._at[0], "rank_port": self._at[1],
                                  "kvd": dict(row, secret=self._secret)})

    def close(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


# ---- decode ----------------------------------------------------------------------------

def _get(address, *ranks):
    url = "http://%s/route?" % address + QUERY % ranks
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=ANSWER_S) as answer:
        told = json.loads(answer.read(ANSWER))
    if not isinstance(told, dict):
        raise ValueError("%s: not an object" % url)
    return told


def _size(told, name):
    return _check.integer("GET /route: " + name, told.get(name), 1, RANKS)


def fetch(address, room):
    """A Prefill; exceptions have the reason why there is none."""
    told = _get(address, -1, -1, -1, -1)
    tp, pp, dp = (_size(told, name) for name in ("attn_tp_size", "pp_size", "dp_size"))
    if tp * pp > RANKS:
        raise ValueError("GET /route: %d x %d ranks, at most %d" % (tp, pp, RANKS))
    if dp > 1 and not told.get("follow_bootstrap_room"):
        raise ValueError("prefill has %d data-parallel ranks that are not chosen by the room's "
                         "number "
                         "(--load-balance-method follow_bootstrap_room)" % dp)
    return Prefill(tp, pp, [row_of(_get(address, room % dp, 0, t, stage))
                            for stage in range(pp) for t in range(tp)]), dp


class Lookups:
    """Queries bootstrap servers in threads, which end with the answer: a scheduler cannot wait."""

    def __init__(self):
        self._known, self._failed, self._asked = {}, {}, set()
        self._sizes = {}  # data-parallel ranks, by address

    def of(self, address, room):
        """A Prefill; None: unknown so far; ValueError: the query failed, with the reason."""
        key = address, room % self._sizes.get(address, 1)
        found = self._known.get(key)
        if found is not None:
            return found
        words, until = self._failed.get(key, (None, 0.0))
        if time.monotonic() < until:
            raise ValueError("bootstrap server %s: %s" % (address, words))
        if key not in self._asked and len(self._asked) < ASKED:
            self._asked.add(key)
            threading.Thread(target=self._ask, args=(key, address, room), name="kvd-lookup",
                             daemon=True).start()
        return None

    def _ask(self, key, address, room):
        try:
            found, dp = fetch(address, room)
            if len(self._known) >= KNOWN:
                self.forget()
            self._sizes[address] = dp
            self._known[address, room % dp] = found
        except Exception as error:  # for any answer of an untrusted server
            if len(self._failed) >= KNOWN:
                self._failed.clear()
            self._failed[key] = str(error)[:300], time.monotonic() + AGAIN_S
        finally:
            self._asked.discard(key)

    def forget(self):
        """The cached entry may belong to a prefill engine that has ended."""
        self._known.clear()
        self._sizes.clear()
