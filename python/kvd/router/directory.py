# SPDX-License-Identifier: Apache-2.0
"""Members from a kvd's directory: group.query of the two groups, each second.

While the daemon or its directory is unavailable or not synchronised, and while a group is empty
just after the daemon's start, the members are kept; their health checks find those that ended."""
import asyncio
import logging
import time

from ..aio import AsyncClient
from ..errors import Error, NotFoundError
from .config import ENGINES, ROLES, base_url, host_port, spec_of
from .pick import Load

log = logging.getLogger("kvd.router")
POLL_S = 1
AWAY_S = 1
START_S = 10  # engines have published again by then
TIMEOUT_S = 5
RANKS_MAX = 1 << 16
AXES = ("dp_rank", "pp_rank", "tp_rank", "cp_rank")


def place(rank):
    """The identity of an entry; ValueError."""
    worker = rank.get("worker", "")
    axes = tuple(rank.get(axis, 0) for axis in AXES)
    if not isinstance(worker, str) or not all(type(a) is int for a in axes):
        raise ValueError("entry without ranks: %.100r" % (rank,))
    return (worker,) + axes


def _number(told, name):
    value = told.get(name) if isinstance(told, dict) else None
    known = type(value) in (int, float) and 0 <= value < 1e18  # neither infinite nor NaN
    return float(value) if known else -1


def load_of(ranks):
    """The load of a worker, from its ranks: sums of the daemons' traffic, and the report of the
    first engine that has one. None: no load."""
    loads = [r["load"] for r in ranks if isinstance(r.get("load"), dict)]
    if not loads:
        return None

    def total(part, name):
        known = [n for n in (_number(load.get(part) if part else load, name) for load in loads)
                 if n >= 0]
        return sum(known) if known else -1
    engine = next((load["engine"] for load in loads if load.get("engine")), None)
    return Load(int(max(0, total(None, "seq"))) & (1 << 63) - 1, total("rooms", "waiting"),
                total("rooms", "running"), total("bytes", "queued"), total(None, "gbps"),
                total(None, "failed"), *(_number(engine, name) for name in Load._fields[6:]))


def worker_spec(role, worker, ranks, engine, sampled=None):
    """From a worker's entries, by rank: the first that has a URL speaks for it. ValueError."""
    told = next((r for _, r in sorted(ranks.items()) if r.get("url")), None)
    if told is None:
        raise ValueError("worker %.64r: no rank has a url" % worker)
    if not isinstance(told["url"], str):
        raise ValueError("worker %.64r: url is not a string" % worker)
    engine = told.get("engine") or engine
    if engine not in ENGINES:
        raise ValueError("worker %.64r: engine %.64r: not one of %s" % (
            worker, engine, ", ".join(ENGINES)))
    bootstrap = told.get("bootstrap")
    if bootstrap is not None:
        bootstrap = host_port(str(bootstrap), "bootstrap")
    draining = any(r.get("state") == "draining" for r in ranks.values())
    return spec_of(role, base_url(told["url"]), engine, bootstrap, draining=draining,
                   worker=worker, load=load_of(ranks.values()), sampled=sampled)


class Group:
    """State of one group."""

    def __init__(self, name, role, engine):
        self.name, self.role, self.engine = name, role, engine
        self.revision, self.ranks, self.told = None, {}, set()
        self.sampled = None

    def take(self, answer):
        """From a reply of group.query; ValueError if it is not one."""
        ranks, gone = answer.get("ranks", []), answer.get("gone", [])
        revision = answer.get("revision")
        if not isinstance(ranks, list) or not isinstance(gone, list) or not all(
                isinstance(one, dict) for one in ranks + gone):
            raise ValueError("group.query: ranks and gone are not lists of objects")
        if self.revision is None or revision is None or answer.get("whole"):
            self.ranks.clear()
        for rank in gone:
            self.ranks.pop(place(rank), None)
        for rank in ranks:
            self.ranks[place(rank)] = rank
        if len(self.ranks) > RANKS_MAX:
            raise ValueError("group %s: more than %d ranks" % (self.name, RANKS_MAX))
        self.revision, self.sampled = revision, time.monotonic()

    def specs(self):
        workers, out = {}, []
        for where, rank in self.ranks.items():
            workers.setdefault(where[0], {})[where] = rank
        for worker, ranks in sorted(workers.items()):
            try:
                out.append(worker_spec(self.role, worker, ranks, self.engine, self.sampled))
            except ValueError as why:
                self.tell(str(why))
        return out

    def tell(self, why):
        """Logs each of the first hundred once."""
        if why not in self.told and len(self.told) < 100:
            self.told.add(why)
            log.warning("group %s: %s", self.name, why)


class Directory:
    def __init__(self, config, members):
        self.config, self.members, self.task = config, members, None
        self.groups = [Group(getattr(config, role + "_group"), role, config.engine)
                       for role in ROLES]
        self.up = self.begin = None

    def start(self):
        self.task = asyncio.ensure_future(self._run())

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self):
        while True:
            try:
                async with AsyncClient(self.config.socket, client="kvd.router",
                                       timeout=TIMEOUT_S) as client:
                    self.begin = time.monotonic()
                    while True:
                        for group in self.groups:
                            await self.ask(client, group)
                        self._state(None)
                        await asyncio.sleep(POLL_S)
            except (Error, OSError, ValueError) as why:
                self._state(str(why))
            for group in self.groups:
                group.revision = None  # another daemon counts from another number
            await asyncio.sleep(AWAY_S)

    async def ask(self, client, group):
        args = {"group": group.name, "loads": True}
        if group.revision is not None:
            args["since"] = group.revision
        try:
            answer = await client.command("group.query", **args)
        except NotFoundError:  # the group is empty
            answer = {"whole": True}
        empty = answer.get("whole") and not answer.get("ranks")
        early = time.monotonic() - self.begin < START_S
        if group.ranks and ((empty and early) or answer.get("synced") is False):
            return
        group.take(answer)
        self.members.source(("directory", group.role), group.specs())

    def _state(self, why):
        if self.up != (why is None):
            self.up = why is None
            if why:
                log.warning("directory of %s: %s; members are kept", self.config.socket,
                            why)
            else:
                log.info("directory of %s is available", self.config.socket)
