# SPDX-License-Identifier: Apache-2.0
"""One session with the daemon for the store: opened on first use, and again after a restart of the
daemon. Without a daemon every lookup is a miss, no call waits for it, and the engine sees no
exception. All threads may call it; they take turns for a call, not for the moves that it starts."""
import logging
import threading
import time

from ..errors import BusyError, Error

logger = logging.getLogger("kvd.stores")
CALL_S = 1.0  # timeout of a command, which takes less than a millisecond
FETCH_S = 30.0  # timeout of a fetch; a slower one is a miss and is computed
AWAY_S = 1.0  # pause before connecting again to a daemon that does not run
MUTE_S = 5.0  # and to one that keeps no chunks, or did not answer in time; the latter
MUTE_MOST_S = 60.0  # pause doubles each time up to this
BUSY_S = 0.1  # and to one that is preparing its memory
TELL_S = 60.0  # between equal lines of the log
GONE = ("ELOST", "ENODAEMON", "EDEAD", "EDRAIN")
MISSES = ("ELEASE", "ENOTFOUND")  # chunks were evicted


def hold_most(hold, count, remote):
    """The longest hold that its user's limits allow. hold(n, remote): of the first n chunks; all
    holds of a user together are limited, so a shorter one may be possible. remote: seconds to query
    other daemons, or None. They are queried once: the limit is this daemon's."""
    best, low, high, most = None, 0, count + 1, count
    while most > low:
        try:
            one = hold(most, remote if most == count else None)
        except Error as error:
            if error.code != "ELIMIT" or most == 1:
                raise
            high = most
        else:
            if best is not None:
                best.close(CALL_S)
            best, low = one, most
            if one.chunks < most:  # no more are stored
                break
        most = (low + high) // 2
    return best


class SpaceClient:
    """connect() returns a client if there is none yet; opener(client, key) opens a space, where key
    is the caller's name for it. most: number of spaces that are kept open, 0: all; log: the
    engine's."""

    def __init__(self, connect, opener, client=None, *, most=0, log=logger,
                 clock=time.monotonic):
        self.connect, self.opener, self.clock = connect, opener, clock
        self.client, self.spaces, self.most, self.log = client, {}, most, log
        self.until, self.why = 0.0, None
        self._lock, self._told, self._mute_s = threading.RLock(), {}, MUTE_S

    def ask(self, key, call):
        """call(space); None if it was not possible, then `why` has the reason."""
        with self._lock:
            if self.clock() < self.until:
                self.why = "the daemon is unavailable"
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
        """Whether there is a session. A call detects the end of a session, or starts a new one,
        without waiting."""
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
            # a session's first lookup creates its shared memory, for which no timeout can be set
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
        elif key not in self.spaces:  # it has no chunks
            self.until = self.clock() + MUTE_S
        if code not in MISSES:
            self.tell("the store of chunks does not serve: %s" % self.why, code)

    def mute(self):
        """A call was not answered in time: the next ones do not wait."""
        self.until = self.clock() + self._mute_s
        self._mute_s = min(2 * self._mute_s, MUTE_MOST_S)

    def tell(self, words, kind=None):
        """Logs at a limited rate."""
        now, kind = self.clock(), kind or words
        if now >= self._told.get(kind, 0):
            self._told[kind] = now + TELL_S
            self.log.warning("%s", words)

    def close(self):
        """Later calls have no effect."""
        with self._lock:
            self.until = float("inf")
            client, self.client = self.client, None
            self.spaces.clear()
        if client is not None:
            client.close()
