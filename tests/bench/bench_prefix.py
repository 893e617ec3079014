# SPDX-License-Identifier: Apache-2.0
"""Memory and CPU time of the router's index of prefixes: 1000 members with a million blocks in all,
after each has dropped as many as it has. Promises: 200 MiB, and a millisecond to find a prompt of 64
blocks; values above them are marked, and the exit status is 1. Then the other calls, and the longest
chain that there is."""
import os
import random
import statistics
import sys
import time

from kvd.router import prefix

MEMBERS, BLOCKS, PROMPT = 1000, 1000, 64
ROUNDS, CALLS = 21, 20
PROMISE_MIB, PROMISE_US = 200, 1000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call):
    """Microseconds of a call: median, largest of rounds."""
    took = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        took.append((time.thread_time() - start) / CALLS * 1e6)
    return statistics.median(took), max(took)


def main():
    rnd, late = random.Random(1), False

    def prompt(length=PROMPT):
        return [rnd.getrandbits(60) for _ in range(length)]

    def judged(words, value, bound, unit):
        nonlocal late
        late |= value > bound
        print("%-58s %8.1f %s%s" % (words, value, unit, "   over %d" % bound
                                    if value > bound else ""))

    def shown(words, call):
        judged(words, timed(call)[0], float("inf"), "us")
    urls = ["http://10.0.%d.%d:8000" % divmod(i, 250) for i in range(MEMBERS)]
    index = prefix.PrefixIndex(1 << 30, 1e9)
    index.most = MEMBERS * BLOCKS
    common, before, now = prompt(), resident(), 0.0
    while now < 2 * MEMBERS * BLOCKS / PROMPT:
        now += 1
        index.answered(rnd.choice(urls), prompt(), now)
    for url in urls:  # all have this one
        index.answered(url, common, now)
    print("%d members, %d blocks" % (len(index.members), index.blocks))
    judged("memory", (resident() - before) / 2 ** 20, PROMISE_MIB, "MiB")
    judged("memory of a block", (resident() - before) / index.blocks, prefix.ENTRY_BYTES, "bytes")
    index.most *= 2  # or there is no room for prompts that are handed out
    half = common[:PROMPT // 2] + prompt(PROMPT // 2)

    def find(chain):
        return [index.find(url, chain, now) for url in index.holders(chain)]
    for words, chain in (("all have it", common), ("all have a half", half),
                         ("none has it", prompt())):
        judged("find the best of %d members, %s" % (MEMBERS, words), timed(lambda: find(chain))[0],
               PROMISE_US, "us")
    judged("find the blocks of one member", timed(lambda: index.find(rnd.choice(urls), half, now))[0],
           PROMISE_US, "us")
    shown("handed and dropped", lambda: (index.handed(urls[0], half, now),
                                         index.dropped(urls[0], half)))
    shown("answered", lambda: index.answered(rnd.choice(urls), prompt(), now))
    most = prompt(prefix.CHAIN_MAX)
    shown("answered, %d blocks" % len(most), lambda: index.answered(urls[0], most, now))
    shown("handed and dropped, %d blocks" % len(most),
          lambda: (index.handed(urls[1], most, now), index.dropped(urls[1], most)))
    body, key = {"model": "m", "prompt": "x" * (prefix.CHAIN_MAX << 10)}, b"k" * 16
    shown("a chain of 4 MiB of text", lambda: prefix.chain("/v1/completions", body, key))
    body["prompt"] = body["prompt"][:64 << 10]
    shown("a chain of 64 KiB of text", lambda: prefix.chain("/v1/completions", body, key))
    return late


sys.exit(main())
