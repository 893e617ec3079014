#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does the machine stand still? A process on each core sleeps for 20 ms, again and
again; one that is woken more than 100 ms late writes a line, "BEGIN END CORE", the
first two in seconds of the wall clock. A core of a virtual machine that its host
takes away is seen so, and a machine that is paused; a core that is only busy is
not: who has slept comes first. A host that takes the core away in small pieces is
seen by their sum: 150 ms of a second, of those longer than 10 ms, are a line, too.

    stalls.py FILE               write until killed, or until the parent dies
    stalls.py FILE BEGIN END     print the longest stall between them, in ms

A test that knows how long its peers may take asks worst(): what was late while the
machine stood still is no proof of anything.
"""
import ctypes
import os
import select
import signal
import sys
import time

SLEEP_S, LATE_S = 0.02, 0.1
PIECE_S, PIECES_S, WINDOW_S = 0.01, 0.15, 1.0


def watch(path, core):
    """For ever: the stalls of one core."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.sched_setaffinity(0, {core})
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    pieces = []
    while True:
        begin = time.monotonic()
        select.select([], [], [], SLEEP_S)
        end = time.monotonic()
        took, late = end - begin, end - begin - SLEEP_S
        if PIECE_S < late <= LATE_S:
            pieces = [(at, s) for at, s in pieces if at > end - WINDOW_S] + [(end, late)]
            took = sum(s for _, s in pieces)
        if late > LATE_S or late > PIECE_S and took > PIECES_S:
            now = time.time()
            os.write(out, b"%.3f %.3f %d\n" % (now - took, now, core))
            pieces = []


def worst(path, begin, end=None):
    """The longest stall that was at least in part between two moments of the wall
    clock, in seconds."""
    longest = 0.0
    try:
        with open(path) as lines:
            for line in lines:
                one, other, _ = map(float, line.split())
                if other >= begin and (end is None or one <= end):
                    longest = max(longest, other - one)
    except FileNotFoundError:
        pass
    return longest


def main():
    path = sys.argv[1]
    if len(sys.argv) == 4:
        print("%d" % (1000 * worst(path, float(sys.argv[2]), float(sys.argv[3]))))
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before it could be told
    cores = sorted(os.sched_getaffinity(0))
    for core in cores[1:]:
        if os.fork() == 0:
            watch(path, core)
    watch(path, cores[0])


if __name__ == "__main__":
    main()
