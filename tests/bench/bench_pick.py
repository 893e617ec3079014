# SPDX-License-Identifier: Apache-2.0
"""The CPU time of a pick of a pair, with its settle and release, 1000 reservations held: median and
largest of rounds; of an answer of group.query; of a step of scaling. Promises: 250 us among 1000
workers, 750 us where all of 64 are read; what passes them is printed, and the exit status is 1."""
import collections
import itertools
import statistics
import sys
import time

from kvd.router import pick, scale

ROUNDS, CALLS, HELD = 21, 300, 1000
PROMISES_US = {64: 750, 1000: 250}


def timed(call, calls=1):
    """Microseconds of a call: median, largest."""
    took = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(calls):
            call()
        took.append((time.thread_time() - begun) / calls * 1e6)
    return statistics.median(took), max(took)


def filled(workers, **options):
    picker = pick.Picker(seed=1, **options)
    for i in range(workers):
        for side in ("prefill", "decode"):
            picker.set(side, "w%d" % i, now=1, load=pick.Load(
                1, prompt_tokens_waiting=i * 7919 % 20000, prompt_tokens_s=20000, gbps=10,
                bytes_queued=1e6, kv_total_tokens=4e5, kv_free_tokens=3e5))
    return picker


def measure(workers, sample=2, full=False):
    """full: no decode worker has room, so all are read."""
    picker, held, clock = filled(workers, sample=sample), collections.deque(), itertools.count(1)
    if full:
        for i in range(workers):
            picker.set("decode", "w%d" % i, now=1, load=pick.Load(
                2, kv_total_tokens=4e5, kv_free_tokens=0))

    def call():
        now = 1 + next(clock) * 2e-4
        if len(held) == HELD:
            id_ = held.popleft()
            picker.settle(id_, 0.2, now=now)
            picker.release(id_, now=now)
        held.append(picker.pick(prompt_tokens=4000, bytes=5e8, now=now).id)

    for _ in range(HELD):
        call()
    median, most = timed(call, 20 if full else CALLS)
    late = not full and sample == 2 and median > PROMISES_US.get(workers, float("inf"))
    print("%5d workers a side, %-10s %8.1f us, at most %8.1f%s" % (
        workers, "all" if full or workers <= 64 else "sample %d" % sample, median, most,
        "   over %d us" % PROMISES_US[workers] if late else ""))
    return late


def main():
    late = sum([measure(16), measure(64), measure(1000), measure(1000, 8), measure(4096)])
    measure(1000, full=True)
    answer = {"revision": 1, "ranks": [
        {"worker": "w%d" % i, "tp_rank": 0, "tp_size": 1, "endpoint": "tcp://10.0.0.1:18515",
         "state": "serving", "load": {"v": 1, "seq": 1, "gbps": 12.5, "engine": {
             "running": 12, "waiting": 3, "prompt_tokens_waiting": 9000,
             "prompt_tokens_s": 51000}}} for i in range(1000)]}
    picker, scaler, clock = filled(1000), scale.Scaler(), itertools.count(2)
    print("an answer with 1000 workers: %.1f ms" % (
        timed(lambda: picker.feed("prefill", answer))[0] / 1e3))
    print("1000 workers measured, and a step: %.1f ms" % (
        timed(lambda: scaler.step(picker, now=next(clock)))[0] / 1e3))
    return bool(late)


sys.exit(main())
