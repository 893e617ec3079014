# SPDX-License-Identifier: Apache-2.0
"""Rooms as a scheduler has them: on its one thread, which must not wait for a daemon.

Every call is written to the daemon's socket at once and answered later; turn() reads the
answers, and does what had to be put off: an opening while an old room has the number, a
chunk whose event has not happened, a call while there is no session. A room's state is a
read of shared memory. Only wait_still() waits.

A Handle outlives its room: it is closed, and its number free, as soon as it has ended."""
import json
import time
from collections import deque

from .. import _kvd
from ..errors import Error
from ..rooms import (BOOTSTRAPPING, FAILED, NOREPLY, RECV, ROLES, SEND, SILENT, SUCCESS,
                     room_pack, sources_pack, views_pack)

CALL_S = 60.0  # a daemon that is stopped for a while answers late
WORDS_S = 0.05  # a room that failed is shown as such without its reason after that
RETRY_S = 5.0  # without a session
TURN_S = 100e-6
DAY_MS = 24 * 3600 * 1000
LATER = ("EFULL", "EBUSY", "ENOMEM")  # the same call later
SESSION = ("ELOST", "ENODAEMON", "EDEAD", "EDRAIN")


def text_of(error):
    """An exception's words with its code."""
    return "%s (%s)" % (error.message, error.code) if isinstance(error, Error) else \
        "%s: %s" % (type(error).__name__, error)


class Handle:
    """A room of this rank, from before its opening until after its end."""

    def __init__(self, desk, role, number, open_s, pack):
        self.desk, self.role, self.number = desk, role, number
        self._pack, self._room, self._open = pack, None, False
        self._calls = deque()  # (start, events)
        self._given = []  # those that followed an opening without an answer
        self._until = desk.clock() + open_s
        self._retry_until = None
        self._abort_due = False
        self._first, self._first_asked = None, False
        self._words, self.ended_s = None, 0.0
        self.code = None  # of the room's end
        self.end = None  # FAILED or SUCCESS: nothing of it moves any more
        self.stopped = False
        self.given = 0  # chunks that the daemon was given
        self.on_end = None
        self.bytes = 0

    # ---- calls ----

    def bind(self, views, aux=None):
        packed = views_pack(views)
        self._call(lambda room, done: room.bind(packed, aux, None, CALL_S, on_done=done))

    def send(self, views, seq, last, aux=None, events=()):
        """A chunk, once all events have happened. An event has query()."""
        packed = views_pack(views)

        def start(room, done):
            room.send(seq, packed, last, aux, None, CALL_S, on_done=done)
            self.given += 1
        self._call(start, tuple(e for e in events if e is not None))

    def _call(self, start, events=()):
        if self.end is not None or self.stopped:
            return
        self._calls.append((start, events))
        self.desk.parked[id(self)] = self
        self.flush()

    def flush(self):
        """Do what may be done now."""
        if self.end is not None:
            self._calls.clear()
        elif self._abort_due:
            self._abort()
        elif not self._open:
            self._open_now()
        while self._calls and self._room is not None:
            start, events = self._calls[0]
            if not all(e.query() for e in events):
                return
            try:
                start(self._room, self._answered(self._called(self._room)))
            except Error as error:
                self.desk.unanswered -= 1
                if error.code in LATER:
                    return
                self.fail(text_of(error))
                return
            self._calls.popleft()
            if not self._open:
                self._given.append((start, events))
        if not self._calls and not self._abort_due and (self._open or self.end is not None):
            self.desk.parked.pop(id(self), None)

    def _answered(self, then):
        self.desk.unanswered += 1

        def done(answer, error):
            self.desk.unanswered -= 1
            then(answer, error)
        return done

    def _called(self, room):
        def done(answer, error):
            if error is not None and self._room is room:
                self.fail(text_of(error))
        return done

    # ---- opening ----

    def _open_now(self):
        if self._room is not None:
            return  # not answered yet
        desk, now = self.desk, self.desk.clock()
        if desk.live.get((self.role, self.number), self) is not self:
            if now > self._until:
                self._over("room %d: the number is still held by a transfer that was given up"
                           % self.number)
            return
        args, kwargs = self._pack
        done = self._answered(self._opened)
        try:
            self._room = _kvd.Room(*args, on_done=done, **kwargs)
        except (Error, ValueError) as error:
            desk.unanswered -= 1
            if self._retry_until is None:
                self._retry_until = min(self._until, now + RETRY_S)
            if getattr(error, "code", None) not in LATER + SESSION or now > self._retry_until:
                self._over(text_of(error))
            return
        desk.live[self.role, self.number] = self

    def _opened(self, answer, error):
        given, self._given = self._given, []
        if error is None:
            self._open = True
            if self.stopped:
                self._abort()
            self.flush()
            return
        self._room = None
        self.desk.live.pop((self.role, self.number), None)
        if self.stopped or error.code != "EEXIST" or self.desk.clock() > self._until:
            self._over(text_of(error))
            return
        self._calls.extendleft(reversed(given))
        self.desk.parked[id(self)] = self

    # ---- its end ----

    def fail(self, words):
        """The first reason stands."""
        if self._words is None and not self.stopped:
            self._words = words
        self.stop(words)

    def stop(self, reason):
        """Nothing of it shall move. It has ended when `end` says so."""
        if self.end is not None or self.stopped:
            return
        self.stopped = True
        self._words = self._words or reason
        self._calls.clear()
        if self._room is None:
            self._over(reason)
            return
        self.desk.left[id(self)] = self
        if self._open:
            self._abort()

    def _abort(self):
        self._abort_due = False
        try:
            self._room.abort(self._words[:200], CALL_S,
                             on_done=self._answered(lambda answer, error: None))
        except Error as error:
            self.desk.unanswered -= 1
            if error.code in LATER:
                self._abort_due = True
                self.desk.parked[id(self)] = self

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
        if self.on_end:
            self.on_end()

    def peek(self):
        """look() without consequences, from any thread."""
        room, end = self._room, self.end
        if end is not None:
            return end
        try:
            return BOOTSTRAPPING if room is None else room.state()
        except Error:  # closed meanwhile
            return BOOTSTRAPPING if self.end is None else self.end

    def look(self):
        """The state, as the daemon shows it."""
        if self.end is not None:
            return self.end
        if self._room is None:
            return BOOTSTRAPPING
        try:
            now = self._room.state()
        except Error:
            now = FAILED
        if now in (FAILED, SUCCESS) and self._room is not None and self.end is None:
            self._ended(now)
        return now if self.end is None else self.end

    def _ended(self, now):
        """Ask for the words, close it."""
        room = self._room
        self.end = FAILED if self.stopped else now
        self.ended_s = self.desk.clock()
        try:
            _, _, error, _, self.bytes = room.read()[:5]
            self.code = _kvd.code_name(error) if error else None
            if self.end == FAILED and self._words is None:
                self._ask_words(error)
        except Error as why:
            self._words = self._words or text_of(why)
        self._gone()
        try:
            room.close(CALL_S, on_done=self._answered(lambda answer, error: None))
        except Error:
            self.desk.unanswered -= 1  # libkvd closes what is dropped
        self._room = None

    def _ask_words(self, error):
        general = SILENT if error == NOREPLY else "room %d failed" % self.number
        general = "%s (%s)" % (general, self.code)

        def told(answer, why):
            found = (json.loads(answer) if answer and why is None else {}).get("error")
            self._words = "%s (%s)" % (found["message"], self.code) if found else general
        asked = json.dumps({"room": str(self.number), "role": ROLES[self.role]})
        try:
            self.desk.kvd.command("room.show", asked, CALL_S, on_done=self._answered(told))
        except Error:
            self.desk.unanswered -= 1
            self._words = general

    @property
    def told(self):
        """It has ended and, where it failed, says why; or has taken too long to."""
        return self.end is not None and (
            self._words is not None or self.end == SUCCESS or
            self.desk.clock() > self.ended_s + WORDS_S)

    @property
    def reason(self):
        return self._words or "room %d failed (%s)" % (self.number, self.code)

    def wait_still(self, seconds):
        """Until nothing of it moves; whether that was so in time."""
        desk, pause = self.desk, 20e-6
        until = desk.clock() + seconds
        while self.look() not in (FAILED, SUCCESS):
            if desk.clock() > until:
                return False
            desk.turn(True)
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
        return True

    # ---- a sender's ----

    def first_token(self):
        """The first token that a receiver wants; None: not known yet."""
        if self._first is None and not self._first_asked and self._room is not None:
            def told(answer, error):
                self._first_asked = False
                rooms = json.loads(answer).get("rooms") if answer and error is None else None
                if rooms:
                    self._first = int(rooms[0].get("first_token", 0))
            asked = json.dumps({"rooms": [{"room": str(self.number), "role": "send"}]})
            self._first_asked = True
            try:
                self.desk.kvd.command("room.poll", asked, CALL_S,
                                      on_done=self._answered(told))
            except Error:
                self.desk.unanswered -= 1
                self._first_asked = False
        return self._first


class Desk:
    """All rooms of a rank."""

    def __init__(self, client, clock=time.monotonic):
        self.client, self.kvd, self.clock = client, client._kvd, clock
        self.live = {}  # (role, number): who has it in the daemon
        self.parked = {}  # handles with something to do, by id
        self.left = {}  # stopped, not ended
        self.unanswered = 0
        self._turned_s = 0.0

    def _handle(self, role, number, pool, sources, receivers, open_s, bootstrap_ms,
                request_id, ticket):
        times = {"bootstrap_ms": min(bootstrap_ms, DAY_MS), "waiting_ms": DAY_MS}
        names = {"request_id": request_id, "ticket": ticket}
        pack = room_pack(self.kvd, number, role, pool, sources_pack(sources), receivers, None,
                         None, None, times, names, (), CALL_S)
        handle = Handle(self, role, number, open_s, pack)
        self.parked[id(handle)] = handle
        handle.flush()
        return handle

    def send(self, number, pool, *, bootstrap_s, ticket, request_id=None):
        return self._handle(SEND, number, pool, (), 0, bootstrap_s, int(bootstrap_s * 1000),
                            request_id, ticket)

    def recv(self, number, pool, sources, *, receivers, bootstrap_s, ticket,
             request_id=None):
        return self._handle(RECV, number, pool, sources, receivers, bootstrap_s,
                            int(bootstrap_s * 1000), request_id, ticket)

    def turn(self, now=False):
        """Read answers, do what was put off."""
        if not (self.unanswered or self.parked or self.left):
            return
        clock = self.clock()
        if not now and clock - self._turned_s < TURN_S:
            return
        self._turned_s = clock
        if self.unanswered or self.parked:
            self.kvd.poll()
        for handle in list(self.parked.values()):
            handle.flush()
        for handle in list(self.left.values()):
            handle.look()

    def still(self, role, number):
        """No room of this number that was stopped can move any more."""
        self.turn()
        return not any(h.number == number and h.role == role for h in self.left.values())
