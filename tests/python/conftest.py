# SPDX-License-Identifier: Apache-2.0
"""Two real daemons for a module, and helpers that wait on conditions."""
import functools
import os
import sys
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("KVD_BUILD", os.path.join(ROOT, "build", "rel"))
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from kvd_daemon import DEADLINE_S, PLAYS, STALLS, Daemon  # noqa: E402
import stalls  # noqa: E402


class Stopwatch:
    """The clock for promises of seconds: elapsed time without the time for which the machine
    was stopped."""

    def __init__(self):
        self.begin, self.since = time.monotonic(), time.time()

    def seconds(self):
        took = time.monotonic() - self.begin
        return took - 2 * stalls.worst(STALLS, self.since)


def judging_deaths(test):
    """Tests of timeouts below a second are disturbed by a machine that takes a core away for as
    long: then the test is repeated."""
    @functools.wraps(test)
    def played(*args, **kwargs):
        for left in range(PLAYS - 1, -1, -1):
            since = time.time()
            try:
                return test(*args, **kwargs)
            except (Exception, pytest.fail.Exception) as why:
                late_s = stalls.worst(STALLS, since)
                if not late_s or not left:
                    raise
                print("again: the machine stood still for %.0f ms; %r" % (1e3 * late_s, why))
    return played


def until(condition, seconds=DEADLINE_S, pause=0.002):
    """Wait until condition() is true, and give it."""
    end, clock = time.monotonic() + seconds, threading.Event()
    while True:
        got = condition()
        if got:
            return got
        assert time.monotonic() < end, "not within %g s" % seconds
        clock.wait(pause)


@pytest.fixture(scope="module")
def pair():
    """Two daemons; an unexpected warning of either fails the module."""
    with Daemon() as a, Daemon() as b:
        yield a, b


@pytest.fixture(scope="session", autouse=True)
def nixl_on_path():
    """kvd's nixl, before any installed one."""
    import kvd.nixl
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    sys.path.insert(0, kvd.nixl.path())
    yield
    sys.path.remove(kvd.nixl.path())
