# SPDX-License-Identifier: Apache-2.0
"""A program that is run after a change: never twice at a time, and not longer than its limit.

It has its own process group, which is killed at the limit and when this process ends. Its standard
input is empty, and its output is sent to our standard error, because our standard output is data.
After a failure it is run again at the next turn that starts nothing else: its work is not done."""
import os
import signal
import subprocess
import sys
import time


class Hook:
    def __init__(self, program, limit):
        self.program, self.limit = program, limit  # a path, without arguments; no shell is used
        self.wanted, self.failures = False, 0  # wanted: run it (again) when none runs
        self.process, self.ends = None, 0
        self.starting, self.stopped = False, 0

    def wait(self, until):
        """Waits for the running one, until this time of time.monotonic() at most."""
        while self.process:
            left = max(min(until, self.ends) - time.monotonic(), 0)
            try:
                self._ended(self.process.wait(left))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= self.ends:
                    self.kill()
                    self._ended(self.process.wait())
                elif time.monotonic() >= until:
                    return

    def _ended(self, status):
        self.process = None
        if status == 0:
            return
        late = ", at its time limit" if time.monotonic() >= self.ends else ""
        self._failed("exit status %d" % status if status > 0 else "signal %d%s" % (-status, late))

    def _failed(self, why):
        self.failures += 1
        self.wanted = True
        print("kvd.router: hook: %s: %s" % (self.program, why), file=sys.stderr)

    def turn(self, environment):
        """Starts it if wanted; environment: added to that of this process."""
        self.wait(0)
        if not self.program or not self.wanted or self.process:
            return
        self.wanted, self.starting = False, True
        try:
            self.process = subprocess.Popen(
                [self.program], stdin=subprocess.DEVNULL, stdout=sys.stderr,
                env={**os.environ, **environment}, start_new_session=True)
        except OSError as why:
            self._failed(why.strerror)
        self.ends, self.starting = time.monotonic() + self.limit, False
        if self.stopped:
            self.stop(self.stopped)

    def stop(self, number, *_):
        """A handler of signals: ends this process, but not during a start, whose process kill()
        does not know yet."""
        self.stopped = number
        if not self.starting:
            sys.exit(128 + number)

    def kill(self):
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
