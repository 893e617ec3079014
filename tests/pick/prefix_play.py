# SPDX-License-Identifier: Apache-2.0
"""One run of a trace: prompts with the prefixes of earlier ones, and how long each waits for its
first token, with a policy of the router.

A prefill server computes its prompts in turn, of each the part that its cache lacks. The cache is an
LRU. Trace and block are those of Mooncake's public traces (FAST25-release
of kvcache-ai/Mooncake): a JSON object a line with `timestamp` in ms, `input_length`, `output_length`
and `hash_ids`, one for each 512 tokens of the prompt; equal ids are equal prefixes. Such a file can
be played, and synthetic() makes the like of one.

The policy is the router's own, with its index and its picker, in virtual time. It learns from its
own requests, and from loads, if members publish them: each second, and 0.1 s later they are known.
Decode is one server of unlimited speed."""
import heapq
import itertools
import json
import math
import random
import types
from collections import OrderedDict
from typing import NamedTuple

from kvd.router import policy
from kvd.router.config import ROLES
from kvd.router.pick import Load, Picker
from kvd.router.prefix import BLOCK_TOKENS

BLOCK = 512  # tokens of an id
DECODE_S = 0.02  # of an answer's token
PERIOD_S, DELAY_S = 1.0, 0.1  # of loads
WARM = 0.1  # of the trace is not counted


class Prompt(NamedTuple):
    at: float
    tokens: int
    output: int
    ids: tuple
    session: object = None


class Case(NamedTuple):
    workers: int = 8
    speed: float = 8000  # tokens a second
    cache: int = 500_000  # tokens
    known: bool = True  # the size of the cache is reported
    slack: float = 1
    affinity: bool = False
    loads: bool = False  # are published
    routers: int = 1
    hashed: bool = False  # a session has always the same router; else each prompt has one by chance


class Result(NamedTuple):
    """Seconds to the first token; hits: share of the prompts' tokens that a cache had."""
    p50: float
    p90: float
    p99: float
    hits: float


# ---- traces ----

def read(path):
    """Prompts of a file, in order."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Prompt(row["timestamp"] / 1e3, row["input_length"], row["output_length"],
                   tuple(row["hash_ids"][:row["input_length"] // BLOCK])) for row in rows]


def synthetic(seed, rate=3.4, seconds=1200, systems=8, turns=1.7, median=3200, sigma=1.25):
    """Conversations that arrive at random, each with one of some system prompts, in lengths and reuse about
    like Mooncake's conversations: a turn's prompt is all that was said before, and a new message;
    some have one long document, many have a single turn."""
    rnd, ids = random.Random(seed), itertools.count()
    starts = [[next(ids) for _ in range(rnd.randrange(1, 5))] for _ in range(systems)]

    def length(median, sigma):
        return max(16, int(median * math.exp(sigma * rnd.gauss(0, 1))))
    out, at = [], 0.0
    for session in itertools.count():
        at += rnd.expovariate(rate / turns)
        if at > seconds:
            break
        blocks = list(starts[min(int(rnd.expovariate(0.5)), systems - 1)])
        tokens, now = len(blocks) * BLOCK, at
        while True:
            tokens = min(tokens + length(median, sigma), 120_000)
            blocks += [next(ids) for _ in range(tokens // BLOCK - len(blocks))]
            output = length(250, 0.8)
            out.append(Prompt(now, tokens, output, tuple(blocks), session))
            if rnd.random() < 1 / turns or tokens >= 120_000:
                break
            tokens += output
            now += output * DECODE_S + length(40, 0.8)
    return sorted(prompt for prompt in out if prompt.at < seconds)


# ---- the members ----

class Member:
    """As far as a policy reads it."""

    def __init__(self, role, name, case):
        self.role, self.name, self.url = role, name, "http://%s:1" % name
        self.listed, self.requests, self.tokens = True, 0, 0
        self.circuit = types.SimpleNamespace(taken=int, released=int)
        self.spec = types.SimpleNamespace(engine="vllm", sampled=0.0,
                                          load=Load(
            1, kv_total_tokens=case.cache if case.known else -1))
        self.speed, self.room = case.speed, case.cache // BLOCK
        self.free_at = self.busy = self.told = 0.0  # busy: seconds in all, those at the last load
        self.cache = OrderedDict()  # {id: None}, the oldest first

    def compute(self, prompt):
        """(when its first token is there, tokens that the cache had)"""
        hits = next((i for i, one in enumerate(prompt.ids) if one not in self.cache),
                    len(prompt.ids)) * BLOCK
        for one in reversed(prompt.ids):
            self.cache[one] = None
            self.cache.move_to_end(one)
        while len(self.cache) > self.room:
            self.cache.popitem(last=False)
        hits = min(hits, prompt.tokens - 1)
        self.free_at = max(self.free_at, prompt.at) + (prompt.tokens - hits) / self.speed
        self.busy += (prompt.tokens - hits) / self.speed
        return self.free_at, hits

    def load(self, at):
        """Its own report."""
        left = max(0.0, self.free_at - at)
        done, self.told = self.busy - left - self.told, self.busy - left
        return self.spec.load._replace(
            seq=self.spec.load.seq + 1, prompt_tokens_waiting=left * self.speed,
            prompt_tokens_s=done * self.speed / PERIOD_S)


class Members:
    def __init__(self, case):
        self.config = types.SimpleNamespace(
            alone_below=0, alone_uncached=0, affinity_slack=case.slack, prefix_memory=1 << 30)
        names = [("prefill", "p%d" % i) for i in range(case.workers)] + [("decode", "d0")]
        made = [Member(role, name, case) for role, name in names]
        self.by_key = {(m.role, m.url): m for m in made}
        self.roles = {role: [m for m in made if m.role == role] for role in ROLES}

    def usable(self, role):
        return self.roles[role]


# ---- a run ----

class Play:
    def __init__(self, case, name, trace, seed=1):
        self.case, self.trace, self.now = case, trace, 0.0
        self.rnd, self.members = random.Random(seed), Members(case)
        self.policies = [policy.BY_NAME[name](self.members) for _ in range(case.routers)]
        for i, one in enumerate(self.policies):
            if isinstance(one, policy.LeastLoaded):
                one.clock, one.picker = lambda: self.now, Picker(seed=seed * 1000 + i)
        self.events, self.serial = [], itertools.count()
        self.ttfts, self.hits, self.tokens = [], 0, 0
        members = self.members.roles["prefill"] if case.loads else ()
        for i, member in enumerate(members):
            self.at(i * PERIOD_S / len(members), self.sample, member)

    def at(self, at, call, *args):
        heapq.heappush(self.events, (at, next(self.serial), call, args))

    def sample(self, member):
        self.at(self.now + DELAY_S, self.publish, member, member.load(self.now), self.now)
        self.at(self.now + PERIOD_S, self.sample, member)

    def publish(self, member, load, sampled):
        member.spec.load, member.spec.sampled = load, sampled

    def until(self, at):
        while self.events and self.events[0][0] <= at:
            self.now, _, call, args = heapq.heappop(self.events)
            call(*args)
        self.now = at

    def request(self, prompt):
        chain = tuple(part for one in prompt.ids
                      for part in range(one * 2, one * 2 + BLOCK // BLOCK_TOKENS))
        router = prompt.session % len(self.policies) if self.case.hashed \
            else self.rnd.randrange(len(self.policies))
        prefill, _, held = self.policies[router].pick(policy.Request(
            prompt.tokens, chain=chain, session=prompt.session if self.case.affinity else None))
        first, hits = prefill.compute(prompt)
        self.at(first, held.prefilled)
        self.at(first, held.began, first - prompt.at)
        self.at(first + prompt.output * DECODE_S, held.release)
        return first - prompt.at, hits

    def run(self):
        warm = self.trace[0].at + WARM * (self.trace[-1].at - self.trace[0].at)
        for prompt in self.trace:
            self.until(prompt.at)
            ttft, hits = self.request(prompt)
            if prompt.at >= warm:
                self.ttfts.append(ttft)
                self.hits += hits
                self.tokens += prompt.tokens
        self.ttfts.sort()
        return Result(*(self.ttfts[int(share * len(self.ttfts))] for share in (0.5, 0.9, 0.99)),
                      self.hits / self.tokens)


def play(case, name, trace):
    return Play(case, name, trace).run()
