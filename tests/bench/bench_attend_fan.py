#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Many requesters on one holder: bench_attend_fan.py [--seconds S] [--flood]

One holder, one daemon that asks, and N engines of it (threads), each with query rows for the
same layer of the same chunks (MLA, 576 and 512 values, 16 heads a query token; 2048 tokens).
  together  all at once: rows that wait are attended in one call
  alone     the same posts one behind the other: what the holder would do without batches
With --flood a second daemon asks for 512 rows at a time, as fast as it is answered, over other
chunks of the holder; beside it is how long the others take.

The holder's engine is a process that multiplies matrices on one thread: its step time with
and without requesters. Figures of one run; the hosts' cores are what they share. This is a
benchmark: it judges nothing.
"""
import argparse
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", d) for d in ("lib", "python")]

import kvd  # noqa: E402
from kvd_daemon import Daemon  # noqa: E402

PAUSE = threading.Event()  # never set

T, TOKENS, HEADS, DQK, DV = 64, 2048, 16, 576, 512
MEMORY = "[chunks]\nchunk_memory = 64 MiB\nattend_threads = 1\n"
STEP = """
import sys, time
import numpy as np
a = np.ones((192, 192), np.float32)
while True:
    begin = time.perf_counter()
    for _ in range(20):
        a = a @ a * 0 + 1
    print(time.perf_counter() - begin, flush=True)
"""


def layout(pages):
    field = {"name": "kv", "buffer": 0, "offset": 0, "page_stride": T * DQK * 2,
             "token_stride": DQK * 2, "unit_stride": DQK * 2, "unit_bytes": DQK * 2,
             "first_unit": 0, "units": 1, "total_units": 1, "format": "bf16"}
    return {"buffers": [pages * T * DQK * 2],
            "views": {"kv": {"page_tokens": T, "pages": pages,
                             "layers": [{"layer": 0, "fields": [field]}]}}}


def ids_of(name):
    return [(b"%s %d" % (name, i)).ljust(32, b".") for i in range(TOKENS // T)]


def space_of(client, pool):
    while True:
        try:
            return client.space(pool, model="m", scheme="fan", tokens=T)
        except kvd.BusyError:
            PAUSE.wait(0.05)


class Engine:
    def __init__(self, client, rows):
        self.client = client
        lay = layout(TOKENS // T)
        self.memory = kvd.Memory(lay["buffers"][0])
        self.pool = client.pool(lay, [client.register(self.memory)])
        self.space = space_of(client, self.pool)
        self.attend = client.attend(rows=rows, heads=HEADS, dqk=DQK, dv=DV, kind="mla",
                                    q_type="bf16", kv_type="bf16", scale=DQK ** -0.5, key="kv")
        values = np.random.default_rng(rows).standard_normal(rows * DQK).astype(np.float32)
        self.attend.q(0)[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    def put(self, name):
        values = np.random.default_rng(1).standard_normal(TOKENS * DQK).astype(np.float32)
        self.memory.array(dtype=np.uint16)[:TOKENS * DQK] = values.view(np.uint32) >> 16
        self.space.put(ids_of(name), {"kv": kvd.View(list(range(TOKENS // T)),
                                                     tokens=(0, TOKENS))}).wait(timeout=60)

    def hold(self, name):
        """When the daemon knows the holder."""
        while True:
            hold = self.space.hold(ids_of(name), far=10, lease=600)
            if hold.chunks == TOKENS // T:
                return hold
            hold.close()
            PAUSE.wait(0.05)

    def ask(self, hold):
        begin = time.perf_counter()
        self.attend.post(0, 0, [kvd.Part(hold)], deadline=30)
        self.attend.wait(0, timeout=60)
        return time.perf_counter() - begin


class Steps:
    """The holder's engine, and how long its steps take."""

    def __init__(self):
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        self.proc = subprocess.Popen([sys.executable, "-c", STEP], stdout=subprocess.PIPE,
                                     text=True, env=env)
        self.times = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.proc.stdout:
            self.times.append(float(line))

    def during(self, work):
        first = len(self.times)
        result = work()
        return statistics.median(self.times[first:] or [0]) * 1e3, result


def crowd(engines, holds, seconds, at_once):
    """Latencies (s) of all, in some seconds: all at once, or one behind the other."""
    stop, times, turn = time.perf_counter() + seconds, [], threading.Lock()

    def run(engine, hold):
        while time.perf_counter() < stop:
            if at_once:
                times.append(engine.ask(hold))
                continue
            with turn:
                times.append(engine.ask(hold))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(engines, holds)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return times


def flood(engine, hold, stop):
    while not stop.is_set():
        engine.ask(hold)


def line(name, count, seconds, got):
    step, times = got
    times.sort()
    print("%-10s %4d %12.0f %10.2f %10.2f %12.2f" % (
        name, count, len(times) * HEADS / seconds, times[len(times) // 2] * 1e3,
        times[int(len(times) * 0.99)] * 1e3, step), flush=True)
    return len(times) / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--flood", action="store_true")
    args = parser.parse_args()
    with Daemon(MEMORY) as holder, kvd.Client(holder.socket_path) as far:
        stores = MEMORY + "chunk_stores = %s\n" % far.endpoint
        with Daemon(stores) as daemon, Daemon(stores) as other:
            run(args, far, daemon, other)


def run(args, far, daemon, other):
    there = Engine(far, HEADS)
    there.put(b"fan")
    there.put(b"flood")
    clients = [kvd.Client(daemon.socket_path) for _ in range(32)]
    engines = [Engine(c, HEADS) for c in clients]
    holds = [e.hold(b"fan") for e in engines]
    steps = Steps()
    print("%-10s %4s %12s %10s %10s %12s" % ("", "N", "rows/s", "p50 ms", "p99 ms",
                                             "its step ms"))
    line("idle", 0, 1, steps.during(lambda: (PAUSE.wait(args.seconds), [0.0])[1]))
    for count in (1, 8, 16, 32):
        rate = {}
        for name, at_once in (("alone", False), ("together", True)):
            before = far.command("attend.list")
            rate[name] = line(name, count, args.seconds, steps.during(
                lambda n=count, a=at_once: crowd(engines[:n], holds[:n], args.seconds, a)))
            after = far.command("attend.list")
        rows = after["batch_rows"] - before["batch_rows"]
        us = after["attend_us"] - before["attend_us"]
        print("%15s %.2f times alone's throughput; %.0f rows a call, %.1f us a row; "
              "replicate: %s" % (
                  "", rate["together"] / rate["alone"],
                  rows / max(1, after["batches"] - before["batches"]), us / max(1, rows),
                  engines[0].attend.read(0).replicate))
    if args.flood:
        with kvd.Client(other.socket_path) as hostile:
            floods = [Engine(hostile, 512) for _ in range(4)]
            hold = floods[0].hold(b"flood")
            stop = threading.Event()
            threads = [threading.Thread(target=flood, args=(e, hold, stop)) for e in floods]
            for t in threads:
                t.start()
            line("flooded", 1, args.seconds, steps.during(
                lambda: crowd(engines[:1], holds[:1], args.seconds, True)))
            line("flooded", 8, args.seconds, steps.during(
                lambda: crowd(engines[:8], holds[:8], args.seconds, True)))
            stop.set()
            for t in threads:
                t.join()
    steps.proc.kill()
    steps.proc.wait()
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
