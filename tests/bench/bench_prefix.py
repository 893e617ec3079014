# SPDX-License-Identifier: Apache-2.0
"""Memory and CPU time of the router's index of prefixes: 1000 members with a million blocks in all,
after each has dropped as many as it has. Promises: 200 MiB; a millisecond to find a prompt of 64
blocks; and as the router serves no stream meanwhile, 10 ms for any other call with such a prompt,
25 ms for one with the longest prompt, 50 ms to forget the largest member. The longest time is
judged, not the median. Values above the promises are marked, and the exit status is 1. Then the times to
compute chains."""
import math
import os
import random
import statistics
import sys
import time

from kvd.router import prefix

MEMBERS, BLOCKS, PROMPT = 1000, 1000, 64
ROUNDS, CALLS = 21, 20
PRESET = 256 << 20  # --prefix-memory
PROMISE_MIB = 200
PROMISE_FIND_US, PROMISE_US, PROMISE_LONGEST_US, PROMISE_FORGET_US = 1000, 10_000, 25_000, 50_000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def once(call):
    """Microseconds of a call."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e6


def timed(call):
    """Microseconds of a call: median, largest of rounds."""
    took = [once(lambda: [call() for _ in range(CALLS)]) / CALLS for _ in range(ROUNDS)]
    return statistics.median(took), max(took)


def main():
    rnd, late = random.Random(1), False

    def prompt(length=PROMPT):
        return [rnd.getrandbits(60) for _ in range(length)]

    def judged(words, value, bound, unit, more=""):
        nonlocal late
        late |= value > bound
        print("%-58s %8.1f %s%s%s" % (words, value, unit, more, "   over %d" % bound
                                      if value > bound else ""))

    def took(words, times, bound):
        median, most = times
        judged(words, most, bound, "us", ", median %.1f" % median)

    def grown(members, length, tokens):
        """Answers of prompts until each member has dropped as many blocks as it has."""
        index, now, times = prefix.PrefixIndex(PRESET), 0.0, []
        while now < 2 * index.most / length:
            now, own, url = now + 1, prompt(length), rnd.choice(urls[:members])
            times.append(once(lambda: index.answered(url, own, now, tokens)))
        return index, (statistics.median(times), max(times))
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
    half = common[:PROMPT // 2] + prompt(PROMPT // 2)

    def find(chain):
        return [index.find(url, chain, now) for url in index.holders(chain)]
    for words, chain in (("all have it", common), ("all have a half", half),
                         ("none has it", prompt())):
        took("find the best of %d members, %s" % (MEMBERS, words), timed(lambda: find(chain)),
             PROMISE_FIND_US)
    took("find the blocks of one member", timed(lambda: index.find(rnd.choice(urls), half, now)),
         PROMISE_FIND_US)

    def tried(chain):
        index.ended(urls[0], chain, index.handed(urls[0], chain))
    most = prompt(prefix.CHAIN_MAX)
    took("handed and ended", timed(lambda: tried(half)), PROMISE_US)
    took("handed and ended, %d blocks" % len(most), timed(lambda: tried(most)), PROMISE_LONGEST_US)
    took("answered", timed(lambda: index.answered(rnd.choice(urls), prompt(), now)), PROMISE_US)
    took("answered, from none to the preset memory", grown(MEMBERS, PROMPT, prefix.TOKENS_USUAL)[1],
         PROMISE_US)
    few = PRESET // prefix.ENTRY_BYTES // prefix.MEMBER_MAX
    index, times = grown(few, PROMPT, 1e9)
    took("the same, %d members" % few, times, PROMISE_US)
    index, times = grown(few, len(most), 1e9)
    took("the same, %d blocks" % len(most), times, PROMISE_LONGEST_US)
    for _ in range(2 * prefix.MEMBER_MAX // len(most)):
        index.handed(urls[0], prompt(len(most)))
    judged("forget a member of %d blocks, and as many under way" % len(index.members[urls[0]]),
           once(lambda: index.forget(urls[0])), PROMISE_FORGET_US, "us")

    def shown(words, call):
        took(words, timed(call), math.inf)
    body, key = {"model": "m", "prompt": "x" * (prefix.CHAIN_MAX << 10)}, b"k" * 16
    shown("a chain of 4 MiB of text", lambda: prefix.chain("/v1/completions", body, key))
    body["prompt"] = body["prompt"][:64 << 10]
    shown("a chain of 64 KiB of text", lambda: prefix.chain("/v1/completions", body, key))
    return late


sys.exit(main())
