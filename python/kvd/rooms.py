# SPDX-License-Identifier: Apache-2.0
"""Rooms: the transfer of one request's KV cache. States are the numbers that SGLang polls."""
import logging
import time
from collections import namedtuple
from collections.abc import Mapping

import numpy as np

from . import _check, _kvd
from .errors import StateError, TimeoutError, error_make

log = logging.getLogger("kvd.rooms")
FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
STATES = ("failed", "bootstrapping", "waiting for input", "transferring", "success")
CLOSED = -1  # in Client.states() only: closed, or of a session whose slot was reused
ABORTING = 1  # flag: will fail, but bytes may be in motion
REMOTE = 16  # flag: the other side failed the room and reported it
SEND, RECV, OFFER, PULL = range(4)
ROLES = ("send", "recv", "offer", "pull")
WHY_S = 5  # timeout of the query for a failed room's message, in seconds
NOREPLY = 515  # of a room that is not over: the own daemon does not answer
LOOK_S = 1.0  # interval of checks for that, in seconds
SILENT = "the local daemon does not respond (no heartbeat)"

Status = namedtuple("Status", "state flags error retryable bytes total first_token done rows "
                    "moved_us")
Status.__doc__ = """State and counters of a room. flags: ABORTING, REMOTE. error: number of the
code, 0 unless failed or aborting (ENOREPLY: the own daemon does not answer). bytes: received or
sent so far. total: expected bytes, 0 while unknown (a sender knows it at the end).
first_token: of a sender, as Room.first_token(), -1 while unknown. done: of a sender, number of
its chunks that the daemon has finished reading (at most 65535). rows: rows of the plans made on
this side. moved_us: time from the first chunk to the last byte moved so far, in microseconds."""


class View(namedtuple("View", "pages first_token tokens layers select")):
    """Pages of one view. first_token: the request's token in the first slot of pages[0];
    tokens: (begin, end) of the request, or None for all tokens of the pages; layers:
    (begin, end), or None for all. select (Hold.fetch() only): numbers of the request's tokens,
    ascending; number i of the list is at place i of the pages. None: no selection."""

    def __new__(cls, pages, first_token=0, tokens=None, layers=None, select=None):
        return super().__new__(cls, pages, first_token, tokens, layers, select)


class Source(namedtuple("Source", "endpoint pool room rank views group worker ranks session")):
    """Source of pages. endpoint: address of the source's daemon, None: this engine's own.
    pool: its name, if the source has several. room: its number at the source, if that
    differs. rank: of the pool, if several have the name. session: `client.session` of the
    engine that owns the pool, if the daemon serves several. views (pull): pages to fetch,
    None: the whole offer. Instead of endpoint and session, group: the engine at a member
    address of that group in the cluster's directory; worker: which engine of the group, None:
    its only one; ranks: (tp, pp, dp, cp), trailing zeros may be omitted.

    Exactly one pool must match, else the room fails with InvalidError."""

    def __new__(cls, endpoint=None, pool=None, room=None, rank=None, views=None, *,
                group=None, worker=None, ranks=(), session=None):
        return super().__new__(cls, endpoint, pool, room, rank, views, group, worker,
                               tuple(ranks), session)

    def __getnewargs_ex__(self):
        """For pickle and copy: __new__() takes at most five positional arguments."""
        return (), self._asdict()


def views_pack(views, name="views"):
    """{name: View or pages} in the form that _kvd takes."""
    if not isinstance(views, Mapping):
        raise _check.wrong(name, views, "a dict {view name: pages or kvd.View}")
    packed = []
    for key, view in views.items():
        if not isinstance(key, str):
            raise _check.wrong("%s: the name of a view" % name, key, "a str")
        where = "%s[%r]" % (name, key)
        if not isinstance(view, View):
            view = View(view)
        packed.append((key, _check.u32s(where + ".pages", view.pages),
                       _check.integer(where + ".first_token", view.first_token)) +
                      _check.span(where + ".tokens", view.tokens) +
                      _check.span(where + ".layers", view.layers, _check.U32) +
                      (_check.u32s(where + ".select", view.select)
                       if view.select is not None else None,))
    return tuple(packed)


def source_pack(source, name):
    """An endpoint or a Source in the form that _kvd takes."""
    if source is None or isinstance(source, str):
        source = Source(source)
    _check.instance(name, source, Source, "an endpoint (str) or a kvd.Source")
    _check.text(name + ".endpoint", source.endpoint)
    _check.text(name + ".pool", source.pool)
    if source.room is not None:
        _check.integer(name + ".room", source.room)
    if source.rank is not None:
        _check.integer(name + ".rank", source.rank, 0, _check.U32)
    views = () if source.views is None else views_pack(source.views, name + ".views")
    _check.text(name + ".group", source.group)
    _check.text(name + ".worker", source.worker)
    if source.session is not None:
        _check.integer(name + ".session", source.session)
    if len(source.ranks) > 4:
        raise _check.wrong(name + ".ranks", source.ranks, "(tp, pp, dp, cp)")
    ranks = tuple(_check.integer("%s.ranks[%d]" % (name, i), n, 0, _check.U32)
                  for i, n in enumerate(source.ranks))
    return (source.endpoint, source.pool, source.room, source.rank, views, source.group,
            source.worker, ranks + (0,) * (4 - len(ranks)), source.session or 0)


def sources_pack(sources):
    if not isinstance(sources, (list, tuple)) or isinstance(sources, Source):
        raise _check.wrong("sources", sources, "a list of endpoints (str) or kvd.Source")
    return tuple(source_pack(s, "sources[%d]" % i) for i, s in enumerate(sources))


def wait_pack(wait):
    """(region, offset, value): wait until the u64 at that offset is at least value."""
    if wait is None:
        return None
    if not isinstance(wait, tuple) or len(wait) != 3:
        raise _check.wrong("wait", wait, "a tuple (region, offset, value) or None")
    return (_check.instance("wait[0]", wait[0], _kvd.Region, "a kvd.Region"),
            _check.integer("wait[1]", wait[1]), _check.integer("wait[2]", wait[2]))


def aux_pack(aux):
    return None if aux is None else _check.integer("aux", aux, 0, _check.U32)


def peers_pack(peers):
    if not isinstance(peers, (list, tuple)) or not all(isinstance(p, str) for p in peers):
        raise _check.wrong("peers", peers, "a list of names (str) of the allow-list")
    return tuple(peers)


def pull_sources(sources):
    """One source, or a list of them."""
    if sources is None or isinstance(sources, (str, Source)):
        source_pack(sources, "sources")
        return [sources]
    return sources


def room_pack(client, number, role, pool, sources, receivers, views, aux, wait, times, names,
              peers, timeout, receivers_from_pullers=False):
    """(args, kwargs) for _kvd.Room; times: arguments ending in _ms; names: request_id,
    traceparent, ticket."""
    from .client import Pool
    number = _check.integer("room", number)
    _check.instance("pool", pool, Pool, "a pool of Client.pool()")
    kwargs = {name: _check.integer(name, ms, 0, _check.U32) for name, ms in times.items()}
    kwargs.update({name: _check.text(name, text) for name, text in names.items()})
    wanted = role == OFFER or views is not None
    kwargs.update(
        sources=sources, peers=peers_pack(peers), views=views_pack(views) if wanted else (),
        receivers=_check.integer("receivers", receivers, 0, _check.U32),
        receivers_from_pullers=_check.flag("receivers_from_pullers", receivers_from_pullers),
        aux=aux_pack(aux), wait=wait_pack(wait), timeout=_check.seconds("timeout", timeout))
    return (client, number, role, pool._pool), kwargs


def room_error(number, status, reply):
    """An exception from a room's status and the daemon's reply about it."""
    reply = reply or {}
    message = reply.get("message") or "room %d failed" % number
    return error_make(status.error, _kvd.code_name(status.error),
                      reply.get("retryable", status.retryable), reply.get("scope", "room"),
                      message)


class Silence:
    """Logs, during a wait for a room or move, that the own daemon does not answer. The wait
    continues, for the daemon may recover; so this is no error."""

    def __init__(self, awaited):
        self._of, self._told, self._next = awaited, False, time.monotonic() + LOOK_S

    def look(self):
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        silent = self._of.read().error == NOREPLY
        if silent and not self._told:
            log.warning("%s: %s", self._of, SILENT)
        self._told = silent


class Awaited:
    """Common to rooms and moves: state, read(), error(), and a readable name."""

    def wait(self, state=SUCCESS, timeout=None):
        """Wait until the state is reached or passed. Raises error() if the room failed, and
        TimeoutError (ENOREPLY) after timeout seconds. A daemon that does not answer is
        logged."""
        state = _check.integer("state", state, BOOTSTRAPPING, SUCCESS)
        timeout = _check.seconds("timeout", timeout)
        until = None if timeout is None else time.monotonic() + timeout
        pause, silence = 20e-6, Silence(self)
        while True:
            now = self.state
            if now >= state:
                return now
            if now == FAILED:
                raise self.error()
            if until is not None and time.monotonic() >= until:
                why = ": " + SILENT if self.read().error == NOREPLY else ""
                raise TimeoutError("%s: still %s after %g s%s" %
                                   (self, STATES[now], timeout, why),
                                   "ENOREPLY", NOREPLY, "op", True)
            silence.look()
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)


class Room(Awaited):
    """Made by Client.send(), recv(), offer() or pull(). With post=True all calls are written to
    shared memory and return without a reply: none of them waits. A call that the daemon refuses
    makes the room FAILED instead of raising; error() has the reason. BusyError: that memory is
    full."""

    def __init__(self, client, number, role, pool, *, sources=(), receivers=0, views=None,
                 aux=None, wait=None, lease_ms=0, bootstrap_ms=0, waiting_ms=0, stall_ms=0,
                 request_id=None, traceparent=None, ticket=None, peers=(), timeout=None,
                 receivers_from_pullers=False, post=False):
        times = {"lease_ms": lease_ms, "bootstrap_ms": bootstrap_ms,
                 "waiting_ms": waiting_ms, "stall_ms": stall_ms}
        names = {"request_id": request_id, "traceparent": traceparent, "ticket": ticket}
        args, kwargs = room_pack(client._kvd, number, role, pool, sources_pack(sources),
                                 receivers, views, aux, wait, times, names, peers, timeout,
                                 receivers_from_pullers)
        self.number = args[1]
        self._room = _kvd.Room(*args, post=_check.flag("post", post), **kwargs)

    def bind(self, views, aux=None, wait=None, timeout=None):
        """recv, and a pull without views: set the destination of the bytes. views: {name: pages
        or View}; aux: a slot of the view "aux"; wait: (region, offset, value), no byte is written
        before the u64 at that offset of the region is at least value."""
        self._room.bind(views_pack(views), aux_pack(aux), wait_pack(wait),
                        _check.seconds("timeout", timeout))

    def extend(self, lease_ms, timeout=None):
        """offer: set the lease, from now on and from each extension by a puller."""
        self._room.extend(_check.integer("lease_ms", lease_ms, 1, _check.U32),
                          _check.seconds("timeout", timeout))

    def send(self, views, seq=0, last=True, aux=None, wait=None, timeout=None):
        """send: post one chunk, numbered 0, 1, …; a repeated seq is ignored. wait as in bind():
        no byte is read before."""
        self._room.send(_check.integer("seq", seq), views_pack(views),
                        _check.flag("last", last), aux_pack(aux), wait_pack(wait),
                        _check.seconds("timeout", timeout))

    def abort(self, reason="aborted", timeout=None):
        """Abort the room. The state becomes FAILED once no byte of it can move."""
        self._room.abort(_check.text("reason", reason), _check.seconds("timeout", timeout))

    def close(self, timeout=None):
        """Close a room that has ended. With post a room in any state: it is aborted first if
        needed, and its number may be opened again at once."""
        self._room.close(_check.seconds("timeout", timeout))

    @property
    def state(self):
        """The state: a read of shared memory, without a system call."""
        return self._room.state()

    def read(self):
        """State and counters, from shared memory."""
        return Status(*self._room.read())

    def error(self):
        """Why the room failed or is aborting, as an exception; None otherwise. The first call
        queries the daemon for the message."""
        why = self._room.why(WHY_S)
        return error_make(*why) if why else None

    def __str__(self):
        return "room %d" % self.number

    def first_token(self):
        """send: first token that a receiver needs of the pool's first view (it has the earlier
        ones)."""
        token = self._room.read()[6]
        if token < 0:
            raise StateError("no receiver has bound its pages yet", "ESTATE", 11)
        return token

    def landed(self, pages, view=None):
        """A failed recv or pull: which of the `pages` bound pages are complete, as booleans."""
        pages = _check.integer("pages", pages, 0, _check.U32)
        bits = np.frombuffer(self._room.landed(_check.text("view", view), pages), np.uint8)
        return np.unpackbits(bits, bitorder="little")[:pages].astype(bool)
