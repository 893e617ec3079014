# SPDX-License-Identifier: Apache-2.0
"""One session with the daemon for the store: opened when it is first asked, and again after the
daemon was restarted. Where it is not there everything is a miss, and no call waits for it; nothing
of it is an exception in the engine. Any thread may ask; they take turns for a call, not for what it
has begun."""
import logging
import threading
import time

from ..errors import BusyError, Error

logger = logging.getLogger("kvd.stores")
CALL_S = 1.0  # for the daemon's answer; a command takes less than a millisecond
FETCH_S = 30.0  # for a fetch; what takes longer is a miss and is computed
AWAY_S = 1.0  # until a daemon that is not there is tried again
MUTE_S = 5.0  # and one that keeps no chunks, or that did not answer in time, where the pause
MUTE_MOST_S = 60.0  # doubles each time up to this
BUSY_S = 0.1  # and one that makes its memory
TELL_S = 60.0  # between two lines of the log that say the same
GONE = ("ELOST", "ENODAEMON", "EDEAD", "EDRAIN")
MISSES = ("ELEASE", "ENOTFOUND")  # chunks have left


def hold_most(hold, count, far):
    """The longest hold that its user's limits allow. hold(n, far): of the first n chunks; what
    all holds of a user keep is bounded, so that one of fewer chunks may be possible. far: for
    which other daemons are asked, or None. They are once: what is too much lies here."""
    best, low, high, most = None, 0, count + 1, count
    while most > low:
        try:
            one = hold(most, far if most == count else None)
        except Error as error:
            if error.code != "ELIMIT" or most == 1:
                raise
            high = most
        else:
            if best is not None:
                best.close(CALL_S)
            best, low = one, most
            if one.chunks < most:  # the store has no more
                break
        most = (low + high) // 2
    return best


class Door:
    """connect() gives a client, where there is none yet; opener(client, key) a space of it, key
    being what the caller names spaces by. most: spaces that stay open, 0 for all; log: the
    engine's."""

    def __init__(self, connect, opener, client=None, *, most=0, log=logger,
                 clock=time.monotonic):
        self.connect, self.opener, self.clock = connect, opener, clock
        self.client, self.spaces, self.most, self.log = client, {}, most, log
        self.until, self.why = 0.0, None
        self._lock, self._told, self._mute_s = threading.RLock(), {}, MUTE_S

    def ask(self, key, call):
        """call(space); None: it could not be, `why` says it."""
        with self._lock:
            if self.clock() < self.until:
                self.why = "the store is away"
                return None
            begin = self.clock()
            try:
                if not self._here():
                    raise Error("no session", "ELOST")
                got = self._call(key, call)
                if self.clock() < begin + CALL_S:
                    self._mute_s = MUTE_S
                return got
            except (Error, OSError) as error:
                self._failed(key, error, self.clock() >= begin + CALL_S)
                return None

    def _here(self):
        """Whether there is a session. A turn notices that one has ended, or tries to make one,
        and waits for neither."""
        if self.client is None:
            self.client = self.connect()
        self.client._kvd.poll()
        return not self.client.lost

    def _call(self, key, call):
        had = key in self.spaces
        try:
            return call(self._space(key))
        except Error as error:
            if error.code != "ESTATE" or not had:
                raise
        self.spaces.clear()  # of a session that has ended
        return call(self._space(key))

    def _space(self, key):
        if key not in self.spaces:
            if self.most and len(self.spaces) >= self.most:
                self.spaces.clear()
            space = self.opener(self.client, key)
            # a session's first look-up makes its shared memory, for which no timeout is told
            space.find(bytes(32), timeout=CALL_S)
            self.spaces[key] = space
        return self.spaces[key]

    def _failed(self, key, error, late):
        code = getattr(error, "code", "EIO")
        self.why = "%s (%s)" % (getattr(error, "message", error), code)
        if isinstance(error, BusyError):
            self.until = self.clock() + BUSY_S
            return
        if code == "ENOREPLY" or late:
            self.mute()
        elif code in GONE:
            self.until = self.clock() + AWAY_S
        elif key not in self.spaces:  # it has none
            self.until = self.clock() + MUTE_S
        if code not in MISSES:
            self.tell("the store of chunks does not serve: %s" % self.why, code)

    def mute(self):
        """A call was not answered in time: none waits for the next ones."""
        self.until = self.clock() + self._mute_s
        self._mute_s = min(2 * self._mute_s, MUTE_MOST_S)

    def tell(self, words, kind=None):
        """Once in a while."""
        now, kind = self.clock(), kind or words
        if now >= self._told.get(kind, 0):
            self._told[kind] = now + TELL_S
            self.log.warning("%s", words)

    def close(self):
        """No call after this does anything."""
        with self._lock:
            self.until = float("inf")
            client, self.client = self.client, None
            self.spaces.clear()
        if client is not None:
            client.close()
