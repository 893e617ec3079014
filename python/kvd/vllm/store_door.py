# SPDX-License-Identifier: Apache-2.0
"""The store as one process of an engine reaches it: opened when it is first asked, and again
after the daemon was restarted. Where it is not there, everything is a miss, and no call waits
for it; nothing of it is an exception in the engine."""
import logging
import time

from ..errors import BusyError, Error

logger = logging.getLogger("vllm.kvd")
CALL_S = 1.0  # for the daemon's answer; a command takes less than a millisecond
AWAY_S = 1.0  # until a daemon that is not there is tried again
MUTE_S = 5.0  # and one that keeps no chunks, or that did not answer in time, where the pause
MUTE_MOST_S = 60.0  # doubles each time up to this
BUSY_S = 0.1  # and one that makes its memory
TELL_S = 60.0  # between two lines of the log that say the same
GONE = ("ELOST", "ENODAEMON", "EDEAD", "EDRAIN")


class Door:
    """connect() gives a client, where there is none yet; opener(client, key) a space of it, key
    being what the caller names spaces by."""

    def __init__(self, connect, opener, client=None, clock=time.monotonic):
        self.connect, self.opener, self.clock = connect, opener, clock
        self.client, self.space, self.key = client, None, None
        self.until, self.why, self._told = 0.0, None, {}
        self._mute_s = MUTE_S

    def ask(self, key, call):
        """call(space); None: it could not be, `why` says it."""
        if self.clock() < self.until:
            self.why = "the store is away"
            return None
        try:
            if not self._here():
                raise Error("no session", "ELOST")
            begin = self.clock()
            got = self._call(key, call)
            if self.clock() < begin + CALL_S:
                self._mute_s = MUTE_S
            return got
        except (Error, OSError) as error:
            self._failed(error)
            return None

    def _here(self):
        """Whether there is a session. A turn notices that one has ended, or tries to make one,
        and waits for neither."""
        if self.client is None:
            self.client = self.connect()
        self.client._kvd.poll()
        return not self.client.lost

    def _call(self, key, call):
        had = self._open(key)
        try:
            return call(self.space)
        except Error as error:
            if error.code != "ESTATE" or not had:
                raise
        self.space = None  # of a session that has ended
        self._open(key)
        return call(self.space)

    def _open(self, key):
        """Whether it was open."""
        if self.space is not None and self.key == key:
            return True
        self.space = None
        self.space, self.key = self.opener(self.client, key), key
        return False

    def _failed(self, error):
        code = getattr(error, "code", "EIO")
        self.why = "%s (%s)" % (getattr(error, "message", error), code)
        if isinstance(error, BusyError):
            self.until = self.clock() + BUSY_S
        elif code == "ENOREPLY":
            self.mute()
        elif code in GONE:
            self.until = self.clock() + AWAY_S
        elif self.space is None:
            self.until = self.clock() + MUTE_S
        if self.until > self.clock() + BUSY_S:
            self.tell("the store of chunks is away: %s" % self.why, code)

    def mute(self):
        """A call was not answered in time: none waits for the next ones."""
        self.until = self.clock() + self._mute_s
        self._mute_s = min(2 * self._mute_s, MUTE_MOST_S)

    def tell(self, words, kind=None):
        """Once in a while."""
        now, kind = self.clock(), kind or words
        if now >= self._told.get(kind, 0):
            self._told[kind] = now + TELL_S
            logger.warning("%s", words)

    def close(self):
        if self.client is not None:
            self.client.close()
        self.client = self.space = None
        self.until = float("inf")
