# SPDX-License-Identifier: Apache-2.0
"""What a pick from Python takes of a processor, with its settle and release: the median of
rounds. 20 us among 1000 workers are promised; what passes them is told, and the exit status is
1."""
import statistics
import sys
import time

from kvd import pick

ROUNDS, CALLS = 21, 2000


def measure(workers):
    picker = pick.Picker(seed=1)
    for i in range(workers):
        picker.set("prefill", "p%d" % i, load=pick.Load(
            1, prompt_tokens_waiting=i * 10 % 7000, prompt_tokens_s=10000))
        picker.set("decode", "d%d" % i, load=pick.Load(
            1, kv_total_tokens=1e5, kv_free_tokens=9e4))
    took = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(CALLS):
            got = picker.pick(prompt_tokens=1000)
            picker.settle(got.id, ttft=0.1)
            picker.release(got.id)
        took.append((time.thread_time() - begun) / CALLS * 1e6)
    return statistics.median(took)


def main():
    late = False
    for workers in (16, 64, 1000):
        us = measure(workers)
        late |= workers == 1000 and us > 20
        print("%5d workers a side, from Python %8.1f us%s" % (
            workers, us, "   over 20 us" if us > 20 else ""))
    return late


sys.exit(main())
