# SPDX-License-Identifier: Apache-2.0
"""Choice of the prefill and the decode worker for a request.

    picker = Picker()
    picker.feed("prefill", answer)      # of group.query with loads: all, or the changes
    picker.set("decode", "d0", load=Load(seq=1, kv_free_tokens=90000))
    got = picker.pick(prompt_tokens=2000, near=[("p0", 1500)])
    got.prefill, got.decode, got.prefill_score.total
    picker.settle(got.id, ttft=0.31)    # or failed=["prefill"]
    picker.release(got.id)              # the request has ended

A picker is arithmetic in memory, without daemon, thread or clock. Times are seconds of
time.monotonic(), or of `now`. Use it from one thread at a time. docs/pick.md has the function.

The two sides are independent: the predicted time is a sum, so the best of each side make the best
pair. A group of up to `scan` workers is evaluated completely. From a larger one `sample` workers
are drawn, with a probability proportional to their speed, and those that hold a prefix are added:
two choices keep routers that share no state from all choosing the same worker (Mitzenmacher, 2001),
and cost the same in any group. A draw of bad workers only (without room, or with failures) is
repeated, and finally the whole group is evaluated. Among the workers within a hundredth or half a
millisecond of the best, one is drawn.

A reservation counts in full on a side until a load includes it (with a sample later than the
pick by `lag`), and at most for `hold`: a worker need not publish a load that differs too little.
With `results` it is kept in the worker's list after that, until the first token on the prefill side
and until the end on the decode side, for KEEP_NS at most, independent of the worker's reports."""
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import NamedTuple

from .. import _check
from ..errors import LimitError, NotFoundError
from . import pick_feed
from .pick_score import (AMOUNT_MAX, DECODE, DRAINING, FAILURES_S, GONE, OTHERS_S, PREFILL, SERVING,
                         STATES, Load, Member, Predictor, Request, Score, faded, learned, seconds)

__all__ = ["DECODE", "DRAINING", "GONE", "Load", "PREFILL", "Pick", "Picker", "Row", "SERVING",
           "Score"]
WORKERS_MAX = 4096  # per side
NAME_MAX = 63
HELD_MAX = 1 << 16  # reservations
KEEP_NS = 120_000_000_000
DRAWS_MAX = 8  # beyond the first, while all are bad
BAD_S = 1.0  # such a penalty, and no better worker is known
TIE_SHARE, TIE_S = 0.01, 0.0005
TOKENS_MAX = 1e9
RESULT_KEEP = 0.9  # decay per answer of the sums of observed and predicted times
SPEED_TOKENS = 1000.0  # a prompt of this many tokens shows a speed
MASK = (1 << 64) - 1


class Pick(NamedTuple):
    """A pair; "" on a side that was not requested."""
    id: int
    prefill: str
    decode: str
    prefill_score: Score
    decode_score: Score


class Row(NamedTuple):
    worker: str
    state: str
    score: Score


NO_SCORE = Score(0.0, 0.0, 0.0, 0.0, 0.0, False, False)


# ---- arguments ----

def number(name, value, most):
    value = _check.number(name, value)
    if not 0 <= value <= most:
        raise ValueError("%s: %r is not in 0 to %g" % (name, value, most))
    return value


def nanoseconds(name, at):
    return time.monotonic_ns() if at is None else int(number(name, at, 1e10) * 1e9)


def worker_name(value):
    if not isinstance(value, str):
        raise _check.wrong("worker", value, "a str")
    if not 0 < len(value) <= NAME_MAX:
        raise ValueError("worker: %s is not a name of 1 to %d characters" % (
            _check.came(value), NAME_MAX))
    return value


def _amount(value):
    """A figure of a load; -1 if it is not a finite number of a plausible size. Less than a
    millionth counts as 0."""
    value = float(value)
    return (value if value >= 1e-6 else 0.0) if 0 <= value <= AMOUNT_MAX else -1.0


# ---- reservations ----

class _Held:
    """On the prefill side (index 0) and on the decode side (1). member: None if it has none on that
    side, or has ended there."""
    __slots__ = "id", "made", "bytes", "predicted", "settled", "member", "tokens", "shown"

    def __init__(self, id, made, size):  # noqa: A002
        self.id, self.made, self.bytes = id, made, size
        self.predicted, self.settled = 0.0, False
        self.member, self.tokens, self.shown = [None, None], [0.0, 0.0], [True, True]

    def enter(self, side, member, tokens):
        self.member[side], self.tokens[side], self.shown[side] = member, tokens, False
        member.held[self.id] = self
        if member.head is None:
            member.head = self
        member.fresh_count += 1
        member.held_tokens += tokens
        member.fresh_tokens += tokens
        member.fresh_bytes += self.bytes

    def show(self, side):
        """A load includes it, or it is too old to be added to one."""
        if self.shown[side]:
            return
        member, self.shown[side] = self.member[side], True
        member.fresh_tokens = max(0.0, member.fresh_tokens - self.tokens[side])
        member.fresh_bytes = max(0.0, member.fresh_bytes - self.bytes)
        member.fresh_count -= 1

    def leave(self, side):
        """It has ended on this side."""
        member = self.member[side]
        if member is None:
            return
        self.show(side)
        del member.held[self.id]
        if member.head is self:
            member.head = next(iter(member.held.values()), None)
        member.held_tokens = max(0.0, member.held_tokens - self.tokens[side]) \
            if member.held else 0.0
        self.member[side] = None


class _Near:
    """A mapping of the caller's as `near`: its values are checked when they are needed."""

    def __init__(self, mapping, prompt):
        self.mapping, self.prompt = mapping, prompt

    def __iter__(self):
        return iter(self.mapping)

    def get(self, name, usual):
        tokens = number("near: tokens", self.mapping.get(name, usual), math.inf)
        return min(tokens, self.prompt)


class _Choice:
    """The best of a side so far. Of equal ones it is that which holds most of the prompt, as that
    is the least work; else they have equal chances. tokens: of the prompt that it holds."""
    __slots__ = ("picker", "side", "request", "near", "avoid", "member", "score", "ratio", "ties",
                 "tokens")

    def __init__(self, picker, side, request, near, avoid):
        self.picker, self.side, self.request = picker, side, request
        self.near, self.avoid = near, avoid
        self.member = self.score = None
        self.ties = self.tokens = 0

    def read(self, member):
        if member.name in self.avoid:
            return
        tokens = self.near.get(member.name, 0.0)
        score, ratio = self.picker.score(self.side, member, self.request, tokens)
        best, total, last_resort = self.score, score[0], score[5]
        if best is not None and best[5] == last_resort and \
                abs(best[0] - total) <= TIE_S + TIE_SHARE * total:
            if tokens < self.tokens:
                return
            self.ties = self.ties + 1 if tokens == self.tokens else 1
            if self.picker._below(self.ties):
                return
        elif best is None or (best[5] if best[5] != last_resort else total < best[0]):
            self.ties = 1
        else:
            return
        self.member, self.score, self.ratio, self.tokens = member, score, ratio, tokens

    def bad(self):
        """Whether it is None, has no room, or has failures."""
        return self.member is None or self.score[5] or self.score[4] > BAD_S


class Picker(Predictor):
    """Members of a prefill and a decode group, and the picks of them."""

    def __init__(self, *, seed=None, token_bytes=0, stale=5, hold=5, lag=0.1, scan=64, sample=2,
                 results=True):
        """seed: of ties and samples. token_bytes: bytes of KV per token; 0: unknown. stale: seconds
        after which a load is ignored. hold: seconds that a pick counts if no load includes it. lag:
        seconds from a pick until a load includes it. scan: groups up to this size are evaluated
        completely; of larger ones `sample` workers. results: the outcome of each pick is reported
        by settle() and release()."""
        super().__init__(_check.flag("results", results), number("stale", stale, 3600))
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        self._random = _check.integer("seed", seed)
        self._token_bytes = number("token_bytes", token_bytes, 1e9)
        self._hold_ns = int(number("hold", hold, 60) * 1e9)
        self._lag_ns = int(number("lag", lag, 60) * 1e9)
        self._scan = _check.integer("scan", scan, 0, WORKERS_MAX)
        self._sample = _check.integer("sample", sample, 1, 64)
        self._held, self._serial = OrderedDict(), 0  # by id, the oldest first
        self._young = deque()  # those of the last hold_s, including ended ones

    def _side(self, side):
        if side == PREFILL:
            return self.prefill
        if side == DECODE:
            return self.decode
        raise ValueError("side: %s is not %r or %r" % (_check.came(side), PREFILL, DECODE))

    def _draw(self):
        """64 bits of splitmix64."""
        self._random = x = self._random + 0x9e3779b97f4a7c15 & MASK
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & MASK
        x = (x ^ x >> 27) * 0x94d049bb133111eb & MASK
        return x ^ x >> 31

    def _below(self, limit):
        return (self._draw() >> 32) * limit >> 32

    def _tick(self, now):
        """Time never decreases."""
        now = nanoseconds("now", now)
        if now > self.now:
            self.now, self.trusted = now, now - self.stale_ns

    def _expire(self):
        """Ends reservations that are too old."""
        keep = self.now - (KEEP_NS if self.results else self._hold_ns)
        while self._held:
            held = next(iter(self._held.values()))
            if held.made > keep:
                break
            self._end(held)
        keep = self.now - self._hold_ns
        while self._young and self._young[0].made <= keep:
            held = self._young.popleft()
            held.show(0)
            held.show(1)

    # ---- members ----

    def _member(self, side, name):
        """The member, a new one if needed; it does not serve until _move()."""
        member = side.members.get(name)
        if member is None:
            if len(side.order) == WORKERS_MAX:
                raise LimitError("a group has at most %d workers" % WORKERS_MAX, "ELIMIT", 9)
            member = side.members[name] = Member(name, len(side.order), self.now)
            side.order.append(member)
        return member

    @staticmethod
    def _swap(side, member, at):
        other = side.order[at]
        side.order[member.at], side.order[at] = other, member
        other.at, member.at = member.at, at

    def _move(self, side, member, state):
        serves = member.at < side.serving
        member.state = state
        if serves and state != SERVING:
            side.serving -= 1
            self._swap(side, member, side.serving)
        elif not serves and state == SERVING:
            self._swap(side, member, side.serving)
            side.serving += 1

    def _forget(self, side, member):
        of = 0 if side is self.prefill else 1
        for held in list(member.held.values()):
            held.leave(of)
        self._move(side, member, GONE)
        self._swap(side, member, len(side.order) - 1)
        side.order.pop()
        del side.members[member.name]

    def _load(self, side, member, load, sampled):
        sampled = min(sampled, self.now)
        member.told = max(member.told, sampled)
        # older, or the same as the last
        if member.loaded and (load.seq == member.load.seq or sampled < member.sampled):
            return
        self.take_load(side, member, load, sampled, self._lag_ns)
        of, shown = (0 if side is self.prefill else 1), sampled - self._lag_ns
        for held in list(member.held.values()):
            if held.made > shown:
                break  # the oldest are first
            if self.results:
                held.show(of)
            else:
                held.leave(of)

    def set(self, side, worker, state=SERVING, load=None, sampled=None, now=None):
        """Set a worker's state and, if new, its load as of `sampled` (default: now). GONE removes
        the worker."""
        of, worker = self._side(side), worker_name(worker)
        if state not in STATES:
            raise ValueError("state: %s is not one of %s" % (
                _check.came(state), ", ".join(STATES)))
        if load is not None:
            _check.instance("load", load, Load, "a Load")
            load = Load(_check.integer("load.seq", load.seq), *map(_amount, load[1:]))
        self._tick(now)
        self._expire()
        if state == GONE:
            if worker in of.members:
                self._forget(of, of.members[worker])
            return
        member = self._member(of, worker)
        self._move(of, member, state)
        if load is not None:
            self._load(of, member, load,
                      self.now if sampled is None else nanoseconds("sampled", sampled))

    def feed(self, side, answer, now=None):
        """Read an answer of group.query with loads: a dict, or its text. It has all workers, or,
        with `gone` and without `whole`, the changes. Loads of a worker's ranks are combined; the
        worker is not picked while one of them drains or is missing. Once the answer is `synced`,
        loads are current, however long ago they were published."""
        of = self._side(side)
        self._tick(now)
        self._expire()
        pick_feed.take(self, of, answer)

    def count(self, side):
        """(workers that serve, all workers)"""
        of = self._side(side)
        return of.serving, len(of.order)

    # ---- a pick ----

    def _request(self, prompt, size, output):
        """Tokens by bytes, bytes by tokens."""
        prompt = number("prompt_tokens", prompt, TOKENS_MAX)
        size = number("bytes", size, AMOUNT_MAX)
        output = number("output_tokens", output, TOKENS_MAX)
        if prompt <= 0:
            prompt = size / self._token_bytes if self._token_bytes > 0 and size > 0 \
                else self.mean_prompt
        return Request(prompt, output if output > 0 else self.mean_output,
                       size if size > 0 else prompt * self._token_bytes)

    @staticmethod
    def _near(near, prompt):
        """{worker: tokens of the prompt}"""
        if isinstance(near, Mapping):
            return _Near(near, prompt)
        out = {}
        for worker, tokens in near:
            tokens = min(number("near: tokens", tokens, math.inf), prompt)
            if tokens >= out.get(worker_name(worker), 0.0):
                out[worker] = tokens
        return out

    def _drawn(self, side):
        """Each with the probability of its weight; few draws exceed the recent maximum of
        weights."""
        for _ in range(64):
            chance = (self._draw() >> 11) * 2.0 ** -53
            member = side.order[self._below(side.serving)]
            if chance * side.heaviest < self.weight(side, member):
                break
        return member

    def _least(self, side, request, near, avoid):
        self.refresh(side)
        choice = _Choice(self, side, request, near, avoid)
        if side.serving > self._scan:
            for name in near:
                member = side.members.get(name)
                if member is not None and member.state == SERVING:
                    choice.read(member)
            for i in range(self._sample + DRAWS_MAX):
                if i >= self._sample and not choice.bad():
                    break
                choice.read(self._drawn(side))
            if not choice.bad():
                return choice
        for member in side.order[:side.serving]:
            choice.read(member)
        return choice

    def _choose(self, side, request, near, avoid, prefer):
        choice = self._least(side, request, near, avoid)
        if choice.member is None:
            raise NotFoundError("no %s worker serves, except those to avoid" % (
                PREFILL if side is self.prefill else DECODE), "ENOTFOUND", 6)
        preferred = _Choice(self, side, request, near, avoid)
        for name, slack in prefer.items():
            member = side.members.get(name)
            if member is not None and member.state == SERVING and \
                    self.score(side, member, request, near.get(name, 0.0))[0][0] <= \
                    choice.score[0] + slack:
                preferred.read(member)
        return choice if preferred.member is None or preferred.score[5] else preferred

    def pick(self, *, prompt_tokens=0, bytes=0, output_tokens=0, near=(),  # noqa: A002
             avoid=(), only=None, alone=None, prefer=None, now=None):
        """The pair with the earliest predicted first token. prompt_tokens or bytes: the other one
        is computed by token_bytes. near: (worker, tokens of the prompt that it holds), or a
        mapping, which is queried for each worker that is evaluated; of a large group, those that it
        iterates over are added. avoid: workers to skip. only: one side. alone: is called with the
        decode worker; true: it computes the prompt, and no prefill worker is picked. prefer:
        {worker: seconds}: it is picked if it is at most so much later than the best.
        NotFoundError: no worker serves."""
        request = self._request(prompt_tokens, bytes, output_tokens)
        near, avoid = self._near(near, request.prompt), {worker_name(name) for name in avoid}
        prefer = {worker_name(name): number("prefer: seconds", slack, 1e6)
                  for name, slack in (prefer or {}).items()}
        sides = (self.decode, self.prefill) if only is None else (self._side(only),)
        self._tick(now)
        self._expire()
        choices = [self._choose(sides[0], request, near, avoid, prefer)]
        if len(sides) > 1 and not (alone and alone(choices[0].member.name)):
            choices.append(self._choose(sides[1], request, near, avoid, prefer))
        if len(self._held) == HELD_MAX:
            raise LimitError("picks: %d are not released (limit)" % HELD_MAX, "ELIMIT", 9)
        self.mean_prompt += 0.05 * (request.prompt - self.mean_prompt)
        if output_tokens > 0:
            self.mean_output += 0.05 * (request.output - self.mean_output)
        held, names, scores = self._hold(request), ["", ""], [NO_SCORE, NO_SCORE]
        for side, choice in zip(sides, choices):
            of = 0 if side is self.prefill else 1
            names[of], scores[of] = choice.member.name, Score._make(choice.score)
            if of == 0:
                self._enter_prefill(held, choice, request)
            else:
                held.enter(1, choice.member, request.prompt + request.output)
        return Pick(held.id, *names, *scores)

    def _hold(self, request):
        self._serial += 1
        held = self._held[self._serial] = _Held(self._serial, self.now, request.bytes)
        self._young.append(held)
        return held

    def _enter_prefill(self, held, choice, request):
        member, tokens = choice.member, max(0.0, request.prompt - choice.tokens)
        _, queue, compute, transfer, *_ = choice.score
        held.predicted = (queue + compute + transfer) / choice.ratio
        held.enter(0, member, tokens)
        self.drain(member)
        member.work += tokens
        member.own_work = min(member.own_work + tokens,
                              self.speed(member) * self._hold_ns * 1e-9)
        member.own = faded(member.own, member.own_at, self.now, OTHERS_S) + tokens
        member.own_at = self.now

    def scores(self, side, *, prompt_tokens=0, bytes=0, output_tokens=0, near=(),  # noqa: A002
               now=None):
        """The prediction of pick() for each worker of a side, without a reservation. -> [Row]"""
        of, request = self._side(side), self._request(prompt_tokens, bytes, output_tokens)
        near = self._near(near, request.prompt)
        self._tick(now)
        self._expire()
        self.refresh(of)
        return [Row(m.name, m.state, Score._make(
            self.score(of, m, request, near.get(m.name, 0.0))[0])) for m in of.order]

    # ---- results ----

    def _end(self, held):
        held.leave(0)
        held.leave(1)
        del self._held[held.id]

    def settle(self, id, ttft=None, failed=(), now=None):  # noqa: A002
        """Report that the first token was received after ttft seconds; or that it failed (None), by
        the fault of the sides in `failed`. Once per pick; unknown and ended ids are ignored."""
        failed = [self._side(side) for side in ((failed,) if isinstance(failed, str) else failed)]
        ttft = None if ttft is None else min(number("ttft", ttft, math.inf), 3600)
        self._tick(now)
        held = self._held.get(_check.integer("id", id))
        if held is None or held.settled:
            return
        held.settled = True
        for side, member in zip((self.prefill, self.decode), held.member):
            if member is None:
                continue
            if ttft is not None:
                side.answered = max(side.answered, held.made)
            elif side in failed:
                member.failures = min(1 + faded(member.failures, member.failures_at, self.now,
                                                FAILURES_S), 16)
                member.failures_at = self.now
        if ttft is not None and held.member[0] is not None:
            self._answered(held, held.member[0], ttft)
        held.leave(0)

    def _answered(self, held, member, ttft):
        """Prompts are computed one after another: this one took no longer than since the answer to
        the one before it. Small ones are batched: for each alone the fixed part takes longest, and
        those of a batch are answered at the same moment."""
        member.observed = RESULT_KEEP * member.observed + ttft
        member.predicted = RESULT_KEEP * member.predicted + held.predicted
        member.observations += 1
        member.seen_tokens += held.tokens[0]
        member.seen_s += seconds(max(member.answered, held.made), self.now)
        if member.seen_tokens >= SPEED_TOKENS:
            member.seen_speed = learned(member.seen_speed, 0.05,
                                        member.seen_tokens / max(member.seen_s, 1e-4), True)
            member.seen_tokens = member.seen_s = 0.0
        member.answered = self.now
        for other in list(member.held.values()):  # earlier picks are computed, too
            if other is held:
                break
            other.leave(0)

    def release(self, id, now=None):  # noqa: A002
        """The request has ended, or was never started."""
        self._tick(now)
        held = self._held.get(_check.integer("id", id))
        if held is not None:
            self._end(held)
