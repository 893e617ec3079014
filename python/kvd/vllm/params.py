# SPDX-License-Identifier: Apache-2.0
"""kv_transfer_params. Pull: what prefill sends to decode for a request, under `kvd`:

room, ticket   the room's number, in decimal, and the secret that its daemons require
tokens         number of the prompt's tokens
tp, pp         prefill's ranks
layers         of all pipeline stages, {view: numbers}
sources        [endpoint, pool, rank] of each, those of a pipeline stage together

Push: what the proxy sends to both, under SGLang's names: bootstrap_room, and to decode also
bootstrap_host and bootstrap_port."""
import re
from collections import namedtuple

from .. import _check
from ..rooms import Source
from ..route import layers_of, number

RANKS = 1024
TEXT = 256

Remote = namedtuple("Remote", "room ticket tokens tp pp sources push layers",
                    defaults=(False, None))


def params_of(request):
    """A request's kv_transfer_params. A client can send them if no proxy removes them, also as one
    of vLLM's vllm_xargs: values that are not objects are ignored."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def layers_of_all(rows):
    """{view: layers} of all pipeline stages."""
    layers = {}
    for row in rows:
        for view, numbers in row["layers"].items():
            layers[view] = sorted({*layers.get(view, ()), *numbers})
    return layers


def write(room, ticket, tokens, tp, pp, ranks):
    """ranks: {(stage, rank): row of route.py}"""
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvd": {
        "room": str(room), "ticket": ticket, "tokens": tokens, "tp": tp, "pp": pp,
        "sources": [[ranks[key][word] for word in ("endpoint", "pool", "rank")]
                    for key in sorted(ranks)], "layers": layers_of_all(ranks.values())}}


def _text(name, value, pattern):
    if not isinstance(value, str) or len(value) > TEXT or not re.fullmatch(pattern, value):
        raise ValueError("kvd.%s: %s is not valid" % (name, _check.came(value)))
    return value


def read(params):
    """A Remote; ValueError names the invalid field."""
    told = params.get("kvd")
    if not isinstance(told, dict):
        raise ValueError("`kvd` is missing: prefill must run KvdConnector, too")
    tp, pp = (number("kvd." + name, told.get(name), 1, RANKS) for name in ("tp", "pp"))
    rows = told.get("sources")
    if not isinstance(rows, list) or len(rows) != tp * pp or len(rows) > RANKS:
        raise ValueError("kvd.sources: not a list of tp x pp, %d" % (tp * pp))
    sources = []
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 3:
            raise ValueError("kvd.sources[%d]: not [endpoint, pool, rank]" % i)
        sources.append(Source(_text("sources[%d][0]" % i, row[0], r"[!-~]+"),
                              _text("sources[%d][1]" % i, row[1], r"[!-~]+"), None,
                              number("kvd.sources[%d][2]" % i, row[2], 0, _check.U32)))
    room = number("kvd.room", int(_text("room", told.get("room"), "[0-9]{1,19}")), 0,
                   (1 << 63) - 1)
    return Remote(room, _text("ticket", told.get("ticket"), "[!-~]+"),
                  number("kvd.tokens", told.get("tokens"), 1, (1 << 40)), tp, pp, sources,
                  layers=layers_of(told.get("layers")))


def room_of(params):
    """The number of a push, None: it is not a push; ValueError."""
    room = params.get("bootstrap_room")
    if isinstance(room, str) and re.fullmatch("[0-9]{1,19}", room):
        room = int(room)
    return None if room is None else number("bootstrap_room", room, 0, (1 << 63) - 1)


def address_of(params):
    """host:port of prefill's bootstrap server."""
    host, port = params.get("bootstrap_host"), params.get("bootstrap_port")
    if not isinstance(host, str) or not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,253}", host):
        raise ValueError("bootstrap_host: %s is not a name or address" % _check.came(host))
    if isinstance(port, str) and re.fullmatch("[0-9]{1,5}", port):
        port = int(port)
    if ":" in host and not host.startswith("["):
        host = "[%s]" % host
    return "%s:%d" % (host, number("bootstrap_port", port, 1, 65535))


def sources_of(remote, tp, rank):
    """(the sources of a decode rank, the number of decode ranks that each of them has)."""
    if max(tp, remote.tp) % min(tp, remote.tp):
        raise ValueError("prefill has %d tensor-parallel ranks, decode %d: one must divide the "
                         "other" % (remote.tp, tp))
    if remote.tp >= tp:
        ratio, receivers = remote.tp // tp, 1
        ranks = range(rank * ratio, (rank + 1) * ratio)
    else:
        receivers = tp // remote.tp
        ranks = (rank // receivers,)
    return [remote.sources[stage * remote.tp + r] for stage in range(remote.pp)
            for r in ranks], receivers
