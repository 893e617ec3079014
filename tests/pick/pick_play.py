# SPDX-License-Identifier: Apache-2.0
"""One run of a case: arrivals, a policy, and how long requests waited.

A worker computes prompts in turn, each in tokens / speed, so the moment at which it is free shows
all of its queue. It samples its load each `period`, from a phase of its own; routers have it
`delay` later. The same seed gives all policies the same requests at the same times.

The oracle reads every queue at the moment and takes the worker with the least real work left once
the request is there: (tokens that it has not computed + the request's) / its true speed. Of equals
one by chance. Among equal workers that is the shortest queue."""
import heapq
import itertools
import math
import random
from typing import NamedTuple, Optional

from kvd.router.pick import GONE, SERVING, Load, Picker

START_S = 1.0
WARM = 0.1  # of the run is not counted
ORACLE, CHANCE, TURNS, PICK = "oracle", "chance", "turns", "pick"


class Case(NamedTuple):
    workers: int = 16
    routers: int = 1
    speed: float = 20000  # tokens a second of the slowest
    unequal: bool = False  # a half is as fast, a quarter twice, a quarter four times
    prompt: float = 4000  # mean tokens
    spread: float = 0.8  # sigma of the logarithm of prompts
    doubt: float = 0  # sigma of how long a prompt takes, in relation to its length
    use: float = 0.7  # share of the workers' speed
    bursty: bool = False  # MMPP of two states
    period: float = 1  # of loads: between samples
    delay: float = 0.1  # until they arrive
    seconds: float = 200
    liar: Optional[int] = None  # this worker always reports `lie`
    lie: Optional[Load] = None
    dies: Optional[int] = None  # this worker, at half the time
    gone_after: float = 15  # the directory removes it so much later
    answers_failures: bool = False  # those of the dead are reported at once
    results: bool = True  # outcomes are reported to the picker
    sample: int = 2


class Result(NamedTuple):
    """Seconds; share: of requests that the liar had; lost: to the worker that died, after that;
    to_gone: of them after its removal."""
    wait_mean: float
    wait_p99: float
    ttft_mean: float
    ttft_p99: float
    wait_most: float
    share: float
    requests: int
    lost: int
    to_gone: int


class Worker:
    def __init__(self, name, speed):
        self.name, self.speed = name, speed
        self.free_at = self.assigned = self.told_done = self.told_at = 0.0
        self.requests = self.seq = 0
        self.dead = self.gone = False

    def load(self, at):
        """Its own report."""
        left = max(0.0, self.free_at - at) * self.speed
        done, past = self.assigned - left, at - self.told_at
        rate = (done - self.told_done) / past if past > 0 else -1
        self.told_done, self.told_at = done, at
        self.seq += 1
        return Load(self.seq, prompt_tokens_waiting=left, prompt_tokens_s=rate)


def requests(case, speeds, rnd):
    """(at, tokens, work, router) in order. Of the two states of bursts one brings three times as
    many requests as the other, each for some seconds."""
    rate = case.use * sum(speeds) / case.prompt
    at, change, high = START_S, 0.0, False
    while at < START_S + case.seconds:
        at += rnd.expovariate(rate * (1.5 if high else 0.5) if case.bursty else rate)
        if case.bursty and at > change:
            high, at = not high, max(change, START_S)
            change = at + rnd.expovariate(1 / 5)
            continue
        tokens = case.prompt * math.exp(case.spread * rnd.gauss(0, 1) - case.spread ** 2 / 2)
        tokens = min(max(tokens, 16), 40 * case.prompt)
        yield (at, tokens, tokens * math.exp(case.doubt * rnd.gauss(0, 1)),
               rnd.randrange(case.routers))


class Play:
    def __init__(self, case, policy, seed):
        self.case, self.policy, self.chance = case, policy, random.Random(seed * 31 + 7)
        speeds = [case.speed * ((1, 2, 1, 4)[i % 4] if case.unequal else 1)
                  for i in range(case.workers)]
        self.requests = list(requests(case, speeds, random.Random(seed * 77 + 1)))
        self.workers = [Worker("w%d" % i, speed) for i, speed in enumerate(speeds)]
        self.pickers = [Picker(seed=seed * 1000 + r, results=case.results, lag=1e-6,
                               sample=case.sample) for r in range(case.routers)]
        self.turns = [itertools.count(self.chance.randrange(case.workers))
                      for _ in range(case.routers)]
        self.events, self.serial = [], itertools.count()  # a heap of (at, serial, call, arguments)
        self.waits, self.ttfts, self.lost, self.to_gone = [], [], 0, 0
        for worker in self.workers:
            for picker in self.pickers:
                picker.set("prefill", worker.name, now=START_S / 2)
            self.at(START_S - case.period * self.chance.random(), self.sample, worker)

    def at(self, at, call, *args):
        heapq.heappush(self.events, (at, next(self.serial), call, args))

    # ---- events ----

    def answer(self, at, picker, id_, ttft):
        if self.case.results:
            picker.settle(id_, ttft, () if ttft is not None else "prefill", now=at)
            picker.release(id_, now=at)

    def sample(self, at, worker):
        if worker.dead:
            return
        load = worker.load(at)
        if self.case.liar is not None and worker is self.workers[self.case.liar]:
            load = self.case.lie._replace(seq=worker.seq)
        self.at(at + self.case.delay, self.publish, worker, SERVING, load, at)
        self.at(at + self.case.period, self.sample, worker)

    def publish(self, at, worker, state, load, sampled):
        worker.gone |= state == GONE
        for picker in self.pickers:
            picker.set("prefill", worker.name, state, load, sampled, now=at)

    def die(self, at, worker):
        worker.dead = True
        self.at(at + self.case.gone_after, self.publish, worker, GONE, None, None)

    # ---- policies ----

    def choose(self, at, tokens, work, router):
        """(worker, id)"""
        if self.policy == PICK:
            got = self.pickers[router].pick(prompt_tokens=tokens, only="prefill", now=at)
            return self.workers[int(got.prefill[1:])], got.id
        if self.policy == CHANCE:
            return self.chance.choice(self.workers), None
        if self.policy == TURNS:
            return self.workers[next(self.turns[router]) % len(self.workers)], None
        left = [max(0.0, w.free_at - at) + work / w.speed if not w.dead else math.inf
                for w in self.workers]
        least = min(left)
        if left.count(least) == 1:
            return self.workers[left.index(least)], None
        return self.chance.choice([w for w, l in zip(self.workers, left) if l == least]), None

    def request(self, at, tokens, work, router):
        worker, id_ = self.choose(at, tokens, work, router)
        worker.requests += 1
        self.to_gone += worker.gone
        if worker.dead:
            self.lost += 1
            if self.policy == PICK and self.case.answers_failures:
                self.at(at + 0.002, self.answer, self.pickers[router], id_, None)
            return
        wait = max(0.0, worker.free_at - at)
        worker.free_at = at + wait + work / worker.speed
        worker.assigned += work
        ttft = worker.free_at - at
        if self.policy == PICK:
            self.at(worker.free_at, self.answer, self.pickers[router], id_, ttft)
        if at >= START_S + WARM * self.case.seconds:
            self.waits.append(wait)
            self.ttfts.append(ttft)

    def run(self):
        if self.case.dies is not None:
            self.at(self.case.seconds / 2, self.die, self.workers[self.case.dies])
        for request in self.requests:
            while self.events and self.events[0][0] <= request[0]:
                at, _, call, args = heapq.heappop(self.events)
                if self.policy == PICK:
                    call(at, *args)
            self.request(*request)
        self.waits.sort()
        self.ttfts.sort()
        liar = self.workers[self.case.liar] if self.case.liar is not None else None
        return Result(_mean(self.waits), _p99(self.waits), _mean(self.ttfts), _p99(self.ttfts),
                      self.waits[-1] if self.waits else 0,
                      liar.requests / len(self.requests) if liar else 0, len(self.requests),
                      self.lost, self.to_gone)


def _mean(values):
    return sum(values) / len(values) if values else 0


def _p99(values):
    return values[int(0.99 * len(values))] if values else 0


def play(case, policy, seed):
    return Play(case, policy, seed).run()
