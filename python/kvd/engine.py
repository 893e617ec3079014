# SPDX-License-Identifier: Apache-2.0
"""Rooms for a scheduler: on its one thread, which must not wait for a daemon.

Every call is posted: written to shared memory, without a reply. turn() does deferred work: an
opening while an old room has the number or no session exists, a chunk whose event has not
happened, a call that found that memory full. After follow_cuda() the daemon waits for CUDA
events. A room's state is a read of shared memory, and version() shows by one read whether the
rooms may have changed. Only wait_still(), wait_read(), and the query for a failure's message
wait; the latter WORDS_S at most.

A Handle outlives its room: the room is closed, and its number free, as soon as it has ended."""
import logging
import time
from collections import deque

import numpy as np

from . import _kvd
from .errors import Error
from .rooms import (BOOTSTRAPPING, FAILED, OFFER, PULL, RECV, SEND, SUCCESS, room_pack,
                    sources_pack, views_pack, wait_pack)
from .timeline import Timeline

log = logging.getLogger("kvd.engine")
WORDS_S = 0.05
MUTE_S = 1.0  # no such query after a daemon that did not answer in time
RETRY_S = 5.0  # without a session
TURN_S = 100e-6
REFRESH_S = 0.25  # also without a change: the session may have ended, or a timeout passed
DAY_MS = 24 * 3600 * 1000
DONE_MAX = 65535  # largest value of a room's counter of chunks
LATER = ("EFULL", "EBUSY", "ENOMEM")  # the same call later
SESSION = ("ELOST", "ENODAEMON", "EDEAD", "EDRAIN")


def text_of(error):
    """An exception's message with its code."""
    return "%s (%s)" % (error.message, error.code) if isinstance(error, Error) else \
        "%s: %s" % (type(error).__name__, error)


class Met:
    """The offers know of a puller. Before that its end would not be reported to them, and they
    would wait for it until their lease ends."""

    def __init__(self, handle):
        self.handle = handle

    def query(self):
        return self.handle.peek() != BOOTSTRAPPING


class Handle:
    """A room of this rank, from before its opening until after its end."""

    def __init__(self, desk, role, number, open_s, pack):
        self.desk, self.role, self.number = desk, role, number
        self._pack, self._room = pack, None
        self._calls = deque()  # (start, events)
        self._until = desk.clock() + open_s
        self._retry_until = None
        self._words, self.ended_s = None, 0.0
        self._first = None
        self.code = None  # of the room's end
        self.end = None  # FAILED or SUCCESS: no byte of it moves any more
        self.stopped = False
        self.given = 0  # chunks passed to the daemon
        self.on_end = None
        self.bytes = self.rows = self.moved_us = 0

    # ---- calls ----

    def bind(self, views, aux=None):
        packed = views_pack(views)
        self._call(lambda room: room.bind(packed, aux))

    def send(self, views, seq, last, aux=None, events=(), listed=None, wait=None):
        """A chunk, read once all events have happened. An event has query(). views: may be a
        function, which is called when the event `listed` has happened. wait: the daemon's, as
        in Room.send()."""
        events = [e for e in events if e is not None]
        if wait is None:
            wait, events = self.desk.behind(events)
        packed = None if callable(views) else views_pack(views)

        def start(room):
            room.send(seq, views_pack(views()) if packed is None else packed, last, aux, wait)
            self.given += 1
        self._call(start, events if listed is None else events + [listed])

    def _call(self, start, events=()):
        self.desk.changes += 1
        if self.end is not None or self.stopped:
            return
        self._calls.append((start, events))
        self.desk.parked[id(self)] = self
        self.flush()

    def flush(self):
        """Do the deferred work that is possible now."""
        if self._room is None:
            self._open()
        while self._room is not None and self._calls:
            start, events = self._calls[0]
            if not all(e.query() for e in events):
                return
            try:
                start(self._room)
            except (Error, TypeError, ValueError) as error:
                if getattr(error, "code", None) in LATER:
                    return
                if not self.stopped:
                    self.stop(text_of(error))
                    return
            self._calls.popleft()
        if self._room is not None:
            self.desk.parked.pop(id(self), None)

    def _open(self):
        desk, now = self.desk, self.desk.clock()
        if desk.live.get((self.role, self.number), self) is not self:
            if now > self._until:
                self._over("room %d: the number is in use by an abandoned transfer"
                           % self.number)
            return
        args, kwargs = self._pack
        try:
            self._room = _kvd.Room(*args, post=True, **kwargs)
        except (Error, ValueError) as error:
            if self._retry_until is None:
                self._retry_until = min(self._until, now + RETRY_S)
            if getattr(error, "code", None) not in LATER + SESSION or now > self._retry_until:
                self._over(text_of(error))
            return
        desk.live[self.role, self.number] = self
        desk.changed()

    # ---- its end ----

    def stop(self, reason):
        """No byte of it shall move. It has ended when `end` is set; the first reason is
        kept."""
        self.desk.changes += 1
        if self.end is not None or self.stopped:
            return
        self.stopped, self._words = True, reason
        self._calls.clear()
        if self._room is None:
            self._over(reason)
            return
        self.desk.left[id(self)] = self
        met = (Met(self),) if self.role == PULL else ()
        self._calls.append((lambda room: room.abort(reason[:200]), met))
        self.desk.parked[id(self)] = self
        self.flush()

    def _over(self, words):
        """Without a room in the daemon."""
        self.end, self._words = FAILED, self._words or words
        self.ended_s = self.desk.clock()
        self._gone()

    def _gone(self):
        desk = self.desk
        self._calls.clear()
        desk.parked.pop(id(self), None)
        desk.left.pop(id(self), None)
        if desk.live.get((self.role, self.number)) is self:
            del desk.live[self.role, self.number]
        desk.changed()
        if self.on_end:
            self.on_end()

    def peek(self):
        """look() without side effects, from any thread."""
        room, end = self._room, self.end
        if end is not None:
            return end
        try:
            return BOOTSTRAPPING if room is None else room.state()
        except Error:  # closed concurrently
            return BOOTSTRAPPING if self.end is None else self.end

    def look(self):
        """The state in shared memory."""
        if self.end is not None:
            return self.end
        if self._room is None:
            return BOOTSTRAPPING
        try:
            now = self._room.state()
        except Error:
            now = FAILED
        if now in (FAILED, SUCCESS):
            self._ended(now)
            return self.end
        return now

    def _ended(self, now):
        """Query the message, close it."""
        room, desk = self._room, self.desk
        self.first_token()
        self.end = FAILED if self.stopped else now
        self.ended_s = desk.clock()
        try:
            _, _, error, _, self.bytes, _, _, _, self.rows, self.moved_us = room.read()
            self.code = _kvd.code_name(error) if error else None
            if self.end == FAILED and self._words is None:
                self._words = "%s (%s)" % (desk.words(room), self.code)
            room.close()
        except Error as why:  # libkvd closes unreferenced rooms
            self._words = self._words or text_of(why)
        self._room = None
        self._gone()

    @property
    def reason(self):
        return self._words or "room %d failed (%s)" % (self.number, self.code)

    def wait_still(self, seconds):
        """Wait until no byte of it moves; whether that was so in time."""
        return self._wait(lambda: self.look() in (FAILED, SUCCESS), seconds)

    def _wait(self, holds, seconds):
        """Wait until holds(); whether it did in time."""
        desk, pause = self.desk, 20e-6
        until = desk.clock() + seconds
        while not holds():
            if desk.clock() > until:
                return False
            desk.turn(True)
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
        return True

    # ---- a sender's ----

    def wait_read(self, seconds):
        """Wait until the daemon has read all chunks passed to it; whether it did in time."""
        return self._wait(self._all_read, seconds)

    def _all_read(self):
        if self.look() in (FAILED, SUCCESS) or self._room is None:
            return True
        return not self._calls and self._room.read()[7] >= min(self.given, DONE_MAX)

    def first_token(self):
        """The first token that a receiver needs; None: not known yet."""
        if self._first is None and self._room is not None:
            try:
                first = self._room.read()[6]
            except Error:  # its slot was reused
                first = -1
            self._first = first if first >= 0 else None
        return self._first


class Desk:
    """All rooms of a rank."""

    def __init__(self, client, clock=time.monotonic):
        self.client, self.kvd, self.clock = client, client._kvd, clock
        self.live = {}  # (role, number): the handle that has it in the daemon
        self.parked = {}  # handles with deferred work, by id
        self.left = {}  # stopped, not ended
        self.timeline = None
        self.changes = 0
        self._rooms = self._states = self._at = self._shown = None
        self._turn_s = self._refresh_s = self._mute_s = 0.0

    def _handle(self, role, number, pool, open_s, *, sources=(), receivers=0, views=None,
                lease_ms=0, wait=None, **names):
        times = {"bootstrap_ms": min(int(open_s * 1000), DAY_MS), "waiting_ms": DAY_MS,
                 "lease_ms": lease_ms}
        try:  # numbers are taken from requests; an exception would end the engine's scheduler
            pack = room_pack(self.kvd, number, role, pool, sources_pack(sources), receivers,
                             views, None, wait, times, names, (), None, role == OFFER)
        except (TypeError, ValueError) as error:
            return self.refused(role, number, text_of(error))
        handle = Handle(self, role, number, open_s, pack)
        self.parked[id(handle)] = handle
        handle.flush()
        return handle

    def send(self, number, pool, *, open_s, ticket, request_id=None):
        return self._handle(SEND, number, pool, open_s, ticket=ticket, request_id=request_id)

    def recv(self, number, pool, sources, *, receivers, open_s, ticket, request_id=None):
        return self._handle(RECV, number, pool, open_s, sources=sources, receivers=receivers,
                            ticket=ticket, request_id=request_id)

    def offer(self, number, pool, views, *, lease_ms, ticket, request_id=None, wait=None):
        """Offer to as many pullers as the first one reports. wait: as of a chunk."""
        return self._handle(OFFER, number, pool, lease_ms / 1000, views=views,
                            lease_ms=lease_ms, ticket=ticket, request_id=request_id, wait=wait)

    def pull(self, number, pool, sources, *, receivers, open_s, ticket, request_id=None):
        """bind() sets the destination."""
        return self._handle(PULL, number, pool, open_s, sources=sources, receivers=receivers,
                            ticket=ticket, request_id=request_id)

    def follow_cuda(self):
        """Let the daemon wait for CUDA events (torch.cuda.Event), instead of turn()."""
        try:
            self.timeline = Timeline(self.client)
        except Error as error:
            log.warning("chunks wait for their events in the scheduler: %s", text_of(error))

    def behind(self, events):
        """(what the daemon waits for, the events left to turn())"""
        wait, left = None, []
        for event in events:
            try:
                if self.timeline is None or not getattr(event, "cuda_event", None):
                    left.append(event)
                else:  # after those before it, too
                    wait = wait_pack(self.timeline.after(event))
            except Error as error:
                log.warning("a chunk waits for its event in the scheduler: %s", text_of(error))
                left.append(event)
        return wait, left

    def refused(self, role, number, words):
        """A room that failed before it was opened."""
        handle = Handle(self, role, number, 0, None)
        handle.stop(words)
        return handle

    def words(self, room):
        """Why it failed; the meaning of its code while the daemon is too slow to answer."""
        begun, why = self.clock(), None
        if begun >= self._mute_s:
            why = room.why(WORDS_S)
            if self.clock() >= begun + WORDS_S:
                self._mute_s = self.clock() + MUTE_S
        return why[-1] if why else "room failed"

    def turn(self, now=False):
        """Do deferred work."""
        clock = self.clock()
        if now or clock >= self._turn_s:
            self._turn(clock)

    def version(self):
        """turn(). -> a number that changes if a room's look() may have another result than at
        the last call, and every REFRESH_S."""
        clock = self.clock()
        if clock >= self._turn_s:
            self._turn(clock)
        return self.changes

    def changed(self):
        """Other rooms are live, or one has ended."""
        self._rooms = self._shown = None
        self.changes += 1

    def _turn(self, clock):
        late = clock >= self._refresh_s
        if late or self.live or self.parked:
            self.kvd.poll()
        for handle in list(self.parked.values()):
            handle.flush()
        for handle in list(self.left.values()):
            handle.look()
        shown = self._read()
        if late or shown != self._shown:
            self._shown, self._refresh_s = shown, clock + REFRESH_S
            self.changes += 1
        self._turn_s = self.clock() + TURN_S

    def _read(self):
        """The states of all rooms, by one call."""
        if self._rooms is None:
            self._rooms = [handle._room for handle in self.live.values()]
            self._states = np.empty(len(self._rooms), np.int32)
            self._at = self._states.ctypes.data
        if not self._rooms:
            return b""
        _kvd.states(self._rooms, self._at)
        return self._states.tobytes()

    def still(self, role, number):
        """Whether no stopped room of this number can move any more."""
        self.turn()
        return not any(h.number == number and h.role == role for h in self.left.values())
