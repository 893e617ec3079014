#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The way of query rows to another daemon and back, beside a bare round trip of their bytes.

bench_attend_trip.py [--json FILE] [--turns N]

Two daemons of one run dir by shm, then two by tcp, once asleep between messages (attend_spin =
1) and once awake, each on a core of its own; `cost.calibrate` sends rows of 1152 bytes that come back as they are, so no
kernel is in it. Beside them bench_trip: the same bytes over a Unix socket (shm) and over TCP, in
the same mode. Both take turns, N of each; the figure is the median of their medians. KVD_BUILD
names the build folder. This is a benchmark: it judges nothing.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "lib")]
from kvd_daemon import BUILD, Daemon  # noqa: E402
from kvd_engine import Engine, Refused  # noqa: E402

ROWS = (1, 16, 128, 1024)
ROW_BYTES = 1152
GOALS = {1: 3, 16: 3, 128: 2, 1024: 2}
COUNTS = {1: 60, 16: 60, 128: 20, 1024: 4}
REFILL_S = 0.15  # of the holder's bound on echoes
UP_S = 30
MADE_S = 0.5  # in which the memory for chunks is made
PAUSE = threading.Event()


class Raw:
    def __init__(self):
        self.proc = subprocess.Popen([f"{BUILD}/bench/bench_trip"], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)

    def trip(self, rows):
        self.proc.stdin.write(f"{rows * ROW_BYTES} {COUNTS[rows]}\n")
        self.proc.stdin.flush()
        return json.loads(self.proc.stdout.readline())


def stay_on(pid, number):
    """All threads of a process on one core."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {cores[number % len(cores)]})


class Pair:
    """A daemon and a holder that it knows."""

    def __init__(self, transport, spin):
        text = f"[chunks]\nchunk_memory = 16 MiB\nattend_spin = {spin}\n"
        more = f"[transport]\ntransports = {transport}\n"
        self.holder = Daemon(text + more).__enter__()
        self.endpoint = Engine(self.holder, "holder").endpoint
        self.daemon = Daemon(text + f"chunk_stores = {self.endpoint}\n" + more).__enter__()
        self.engine = Engine(self.daemon, "bench")
        end = time.monotonic() + UP_S
        while not any(p["data_line"] for p in self.engine.cmd("peer.list")["peers"]):
            assert time.monotonic() < end, "the holder is not up"
            PAUSE.wait(0.05)
        PAUSE.wait(MADE_S)
        if spin > 1:
            stay_on(self.daemon.proc.pid, 0)
            stay_on(self.holder.proc.pid, 1)

    def trip(self, rows):
        while True:
            try:
                PAUSE.wait(REFILL_S)
                told = self.engine.cmd("cost.calibrate", endpoint=self.endpoint, rows=rows,
                                       rounds=COUNTS[rows])
                return told["echoes"][0]["us"]
            except Refused as error:
                if error.code != "EBUSY":
                    raise

    def close(self):
        for daemon in (self.daemon, self.holder):
            daemon.__exit__(None, None, None)


def measured(transport, mode, turns):
    """{rows: (echo, raw)} in us."""
    raw, pair = Raw(), Pair(transport, 1 if mode == "sleeping" else 1000)
    name = ("unix " if transport == "shm" else "tcp ") + mode
    figures = {}
    for rows in ROWS:
        pair.trip(rows)
        times = [(pair.trip(rows), raw.trip(rows)[name]) for _ in range(turns)]
        figures[rows] = [statistics.median(t) for t in zip(*times)]
    pair.close()
    raw.proc.stdin.close()
    raw.proc.wait()
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    told = {}
    print(f"{'':>14}{'rows':>6}{'echo us':>10}{'bare us':>10}{'ratio':>8}{'goal':>6}")
    for transport in ("shm", "tcp"):
        for mode in ("sleeping", "spinning"):
            for rows, (echo, bare) in measured(transport, mode, args.turns).items():
                print(f"{transport + ' ' + mode:>14}{rows:>6}{echo:>10.1f}{bare:>10.1f}"
                      f"{echo / bare:>8.2f}{GOALS[rows]:>6}", flush=True)
                told[f"{transport} {mode} {rows}"] = {"echo_us": echo, "bare_us": bare}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
