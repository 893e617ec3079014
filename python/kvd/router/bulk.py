# SPDX-License-Identifier: Apache-2.0
"""Contents of a request's body, and the bodies that are sent to engines.

Small bodies are parsed here, large ones by separate processes. A thread would not do: json holds
the interpreter's lock from the first byte to the last, and all streams would stall meanwhile."""
import asyncio
import ctypes
import multiprocessing
import signal
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from . import engines, prefix
from .errors import Refused

HERE_MAX = 64 << 10  # bytes: takes some milliseconds
WORKERS = 2
PR_SET_PDEATHSIG = 1

# alone: {engine: decode must compute it}; wrong: {engine: None, or (status, why)}; chain: of
# kvd.router.prefix
Facts = namedtuple("Facts", "tokens alone wrong chain")


def _wrong(engine, path, body):
    try:
        engine.check(path, body)
    except Refused as why:
        return why.status, str(why)
    return None


def facts(path, body, size, key=None):
    """key: of the chain; None: it is not needed."""
    each = engines.BY_NAME.items()
    return Facts(engines.estimate(body, size), {name: e.alone(path, body) for name, e in each},
                 {name: _wrong(e, path, body) for name, e in each},
                 prefix.chain(path, body, key) if key else ())


CALLS = {
    "facts": lambda engine, path, body, size, key: facts(path, body, size, key),
    "lone": lambda engine, path, body: engine.lone(body),
    "bodies": lambda engine, path, body, spec: engine.bodies(path, body, spec),
    "follow": lambda engine, path, body, answer: engine.follow(body, answer),
}


def _worker_begin():
    """It ends with the router, however that ends, and not before."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(call, engine, path, text, args):
    """(result, None), or (None, the arguments of a Refused)."""
    try:
        return CALLS[call](engines.BY_NAME.get(engine), path, engines.parse(text), *args), None
    except Refused as why:
        return None, (why.status, str(why))


class Body:
    """A client's body. ask(): call one of CALLS."""

    def __init__(self, bulk, path, text):
        self.bulk, self.path, self.text, self.parsed = bulk, path, text, None

    async def ask(self, call, engine, *args):
        size = len(self.text) + sum(len(a) for a in args if isinstance(a, bytes))
        if size > HERE_MAX:
            return await self.bulk.ask(call, engine, self.path, self.text, args)
        if self.parsed is None:
            self.parsed = engines.parse(self.text)
        return CALLS[call](engines.BY_NAME.get(engine), self.path, self.parsed, *args)

    async def facts(self, key):
        return await self.ask("facts", None, len(self.text), key)


class Bulk:
    def __init__(self):
        self.pool = None  # started for the first large body

    async def ask(self, *call):
        if self.pool is None:
            self.pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"),
                                            _worker_begin)
        pool = self.pool
        try:
            got, refused = await asyncio.get_running_loop().run_in_executor(pool, _work, *call)
        except BrokenProcessPool:
            if self.pool is pool:  # the next large body starts another
                self.pool = None
            raise Refused(503, "the process that parses large bodies has ended (out of memory?)",
                          retry_after=1) from None
        if refused:
            raise Refused(*refused)
        return got

    def stop(self):
        if self.pool is not None:
            # without waiting, Python's own end and that of its processes race
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None
