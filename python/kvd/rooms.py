# SPDX-License-Identifier: Apache-2.0
"""Rooms: one request's handover. States are the numbers that SGLang polls."""
import time
from collections import namedtuple

import numpy as np

from . import _kvd
from .errors import TimeoutError, error_make

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
ABORTING = 1  # flag: told to fail, not yet proven quiesced
SEND, RECV, OFFER, PULL = range(4)

Status = namedtuple("Status", "state flags error retryable bytes total")


class View(namedtuple("View", "pages first_token tokens layers")):
    """Pages of one view. tokens: (begin, end) of the request, or None for all that the
    pages hold; layers: (begin, end), or None for all."""

    def __new__(cls, pages, first_token=0, tokens=None, layers=None):
        return super().__new__(cls, pages, first_token, tokens, layers)


class Source(namedtuple("Source", "endpoint pool room rank views")):
    """Where pages come from; endpoint None is the own daemon."""

    def __new__(cls, endpoint=None, pool=None, room=None, rank=None, views=None):
        return super().__new__(cls, endpoint, pool, room, rank, views)


def views_pack(views):
    """{name: View or pages} as _kvd wants them."""
    packed = []
    for name, view in (views or {}).items():
        if not isinstance(view, View):
            view = View(view)
        pages = np.asarray(view.pages if not isinstance(view.pages, range)
                           else list(view.pages))
        if pages.size and (pages.min() < 0 or pages.max() > 0xffffffff):
            raise ValueError("view %r: a page number outside 32 bits" % name)
        begin, end = view.tokens or (0, 0)
        first, last = view.layers or (0, 0)
        packed.append((name, pages.astype(np.uint32).tobytes(), view.first_token, begin, end,
                       first, last))
    return tuple(packed)


def sources_pack(sources):
    packed = []
    for source in sources or ():
        if not isinstance(source, Source):
            source = Source(source)
        packed.append((source.endpoint, source.pool, source.room, source.rank,
                       views_pack(source.views)))
    return tuple(packed)


class Room:
    """Of Client.send(), recv(), offer() or pull()."""

    def __init__(self, client, number, role, pool, **args):
        self._client = client
        self.number = number
        args["sources"] = sources_pack(args.get("sources"))
        args["views"] = views_pack(args.get("views"))
        self._room = _kvd.Room(client._kvd, number, role, pool._pool, **args)

    def bind(self, views, aux=None, wait=None, timeout=None):
        """recv: where the bytes shall land."""
        self._room.bind(views_pack(views), aux, _wait(wait), timeout)

    def send(self, views, seq=0, last=True, aux=None, wait=None, timeout=None):
        """send: one chunk; the same seq twice is one chunk."""
        self._room.send(seq, views_pack(views), last, aux, _wait(wait), timeout)

    def abort(self, reason="aborted", timeout=None):
        """The state becomes FAILED once nothing of the room can move."""
        self._room.abort(reason, timeout)

    def close(self, timeout=None):
        """Rooms that have ended only."""
        self._room.close(timeout)

    @property
    def state(self):
        """A read of shared memory: no system call."""
        return self._room.state()

    def read(self):
        """State and figures, from shared memory."""
        return Status(*self._room.read())

    def error(self):
        """Why it failed, as an exception; None if it did not."""
        status = self.read()
        if not status.error:
            return None
        record = self._client.command("room.show", room=str(self.number)) \
            if not self._client.lost else {}
        told = record.get("error") or {}
        return error_make(status.error, _kvd.code_name(status.error), status.retryable,
                          told.get("scope", "room"), told.get("message", ""))

    def wait(self, state=SUCCESS, timeout=None):
        """Until the state is reached, or a later one; raises when the room failed."""
        until = None if timeout is None else time.monotonic() + timeout
        pause = 20e-6
        while True:
            now = self.state
            if now >= state:
                return now
            if now == FAILED:
                raise self.error()
            if until is not None and time.monotonic() >= until:
                raise TimeoutError("room %d: still in state %d" % (self.number, now),
                                   "ENOREPLY", 515, "op", True)
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def first_token(self):
        """send: the first token that a receiver wants."""
        return self._room.first_token()

    def landed(self, pages, view=None):
        """A failed recv or pull: which of `pages` bound pages are whole, as booleans."""
        bits = np.frombuffer(self._room.landed(view, pages), np.uint8)
        return np.unpackbits(bits, bitorder="little")[:pages].astype(bool)


def _wait(wait):
    if wait is None:
        return None
    region, offset, value = wait
    return region, offset, value
