# SPDX-License-Identifier: Apache-2.0
"""The function that a picker minimises: the predicted time to the first token (docs/pick.md).

The uncomputed prompt tokens of a worker are known from its last load, which is up to a second old:
since then it has computed some, and more were picked. So `work` is drained at the worker's speed
and raised by each pick. A new load sets it, and picks that this load cannot include yet are added
again, each at its time.

A worker's report is used within bounds. A speed is one eighth to eight times the usual one; picks
of this picker without an answer are pending, whatever a load reports (`_floor`); an answer later
than predicted, relative to the others', makes all predictions later; an overdue answer is expected
to be as late again. A worker without a trusted load is assumed to have the usual queue, and at
least the picks of this picker."""
import math
from collections import OrderedDict
from typing import NamedTuple

PREFILL, DECODE = "prefill", "decode"
SERVING, DRAINING, GONE = STATES = ("serving", "draining", "gone")
AMOUNT_MAX = 1e15

USUAL_NS = 250_000_000
USUAL_OF = 128  # members, at most, whose medians are taken
BOUND = 8.0  # of a member's figure, relative to the usual one
SPEED_UNKNOWN = 10000.0
RATIO_FREE, RATIO_MAX, RATIO_COUNT = 1.5, 64.0, 3
OTHERS_S = 10.0  # window of the share of other routers
OTHERS_MAX = 0.9  # of its speed
STEP_S = 0.1  # added to a token by a full batch
BATCH_USUAL = 32.0
FAILURES_S = 30.0  # in which failures fade to a third
FAILURE_S, FAILURE_MAX_S = 1.0, 60.0
OWN_FAILURE_S, OWN_FAILURE_MAX_S = 0.25, 5.0  # of those that the worker itself counts
OVERDUE_FREE, OVERDUE_FREE_S = 2.0, 0.25  # times the prediction, and more


class Load(NamedTuple):
    """A worker's own report; -1: unknown. seq: changes with each load."""
    seq: int = 0
    rooms_waiting: float = -1
    rooms_running: float = -1
    bytes_queued: float = -1  # of transfers
    gbps: float = -1  # 10^9 bytes per second, recently
    failed: float = -1  # rooms of the last minute
    running: float = -1  # requests of the engine
    waiting: float = -1
    kv_free_tokens: float = -1
    kv_total_tokens: float = -1
    prompt_tokens_waiting: float = -1  # not computed yet
    prompt_tokens_s: float = -1  # computed per second, recently
    decode_tokens_s: float = -1


class Score(NamedTuple):
    """A prediction, in seconds: total, to the first token, is the sum of the next four."""
    total: float
    queue: float
    compute: float
    transfer: float
    penalty: float
    last_resort: bool  # decode: no room for its KV
    fresh: bool  # from a trusted load


class Request(NamedTuple):
    """Amounts of a request; unknown ones are the usual ones."""
    prompt: float
    output: float
    bytes: float


class Usual(NamedTuple):
    """Medians of a side's members. A missing figure counts as usual, a very large one is limited to
    a multiple of the usual. 0: unknown."""
    speed: float = 0.0
    gbps: float = 0.0
    kv_total: float = 0.0
    decode_s: float = 0.0
    ratio: float = 0.0
    queue: float = 0.0


class Member:
    """A worker on one side. `at`: its index in Side.order. Times are nanoseconds; 0: never."""
    __slots__ = (
        "name", "state", "at", "load", "loaded", "sampled", "told",
        "work", "own_work", "work_at",  # prompt tokens that are not computed; of own picks
        "speed", "seen_speed", "gbps", "served",  # 0: unknown
        "own", "own_at",  # tokens of own picks, fading
        "observed", "predicted", "observations",  # of answers: decaying sums
        "failures", "failures_at", "answered", "seen_tokens", "seen_s",
        # reservations by id, the oldest (`head`) first; `fresh_…`: those that no load includes yet
        "held", "head", "held_tokens", "fresh_tokens", "fresh_bytes", "fresh_count",
        "ranks", "changed")  # of pick_feed

    def __init__(self, name, at, now):
        self.name, self.at, self.state = name, at, DRAINING
        self.load, self.loaded = Load(), False
        self.sampled = self.told = self.own_at = self.failures_at = self.answered = 0
        self.work = self.own_work = self.speed = self.seen_speed = self.gbps = self.served = 0.0
        self.own = self.observed = self.predicted = self.failures = 0.0
        self.seen_tokens = self.seen_s = 0.0
        self.held_tokens = self.fresh_tokens = self.fresh_bytes = 0.0
        self.observations = self.fresh_count = 0
        self.work_at, self.held, self.head = now, OrderedDict(), None
        self.ranks, self.changed = None, False


class Side:
    def __init__(self):
        self.members, self.order, self.serving = {}, [], 0  # order: members that serve are first
        self.usual, self.usual_until = Usual(), 0
        self.heaviest = 1 / BOUND  # recent maximum of weights
        self.synced = 0  # all loads are current
        self.answered = 0  # time of the latest pick that was answered


def seconds(since, until):
    return (until - since) * 1e-9 if until > since else 0.0


def faded(amount, since, now, fade_s):
    """The rest of an amount that fades."""
    return amount * math.exp(-seconds(since, now) / fade_s) if amount > 0 else 0.0


def learned(speed, rise, seen, was_busy):
    """A speed is near the largest observed one: a measurement is lower whenever the worker was idle
    for a part of the time, or busy for others. The speed rises by this part, and falls more slowly
    if the worker was busy."""
    if seen >= 1:
        if seen > speed:
            return speed + (rise if speed > 0 else 1) * (seen - speed)
        if was_busy:
            return speed + 0.02 * (seen - speed)
    return speed


def bound(value, usual):
    """A member's figure, limited to BOUND times the usual one."""
    if value <= 0:
        return usual
    if usual <= 0:
        return value
    least, most = usual / BOUND, usual * BOUND
    return least if value < least else most if value > most else value


def _median(values):
    known = sorted(v for v in values if v > 0)
    return known[len(known) // 2] if known else 0.0


def _raw_ratio(member):
    return member.observed / max(member.predicted, 1e-4) \
        if member.observations >= RATIO_COUNT else 0.0


class Predictor:
    """Members of two sides with their loads, and the prediction of each."""

    def __init__(self, results, stale):
        self.results, self.stale_ns = results, int(stale * 1e9)
        self.prefill, self.decode = Side(), Side()
        self.now = self.trusted = 0  # the time, and that of the oldest load that is trusted
        self.mean_prompt, self.mean_output = 2048.0, 256.0

    def refresh(self, side, must=False):
        """The medians, which are valid for a quarter of a second."""
        if self.now < side.usual_until and not must:
            return
        step = side.serving // USUAL_OF + 1
        some = side.order[self.now // USUAL_NS % step:side.serving:step]
        queues = []
        for member in some:
            if self.fresh(side, member):
                self.drain(member)
                queues.append(max(member.work, 1e-9) / self.speed(member))
        side.usual = Usual(
            _median([max(m.speed, m.seen_speed) for m in some]), _median([m.gbps for m in some]),
            _median([m.load.kv_total_tokens for m in some]),
            _median([m.load.decode_tokens_s for m in some]),
            _median([_raw_ratio(m) for m in some]), _median(queues))
        side.usual_until = self.now + USUAL_NS if side.serving else 0
        side.heaviest = max([self.weight(side, m) for m in some] + [0.9 * side.heaviest])

    def fresh(self, side, member):
        """Whether its load is trusted."""
        return member.loaded and max(member.told, side.synced) >= self.trusted

    def speed(self, member):
        """Prompt tokens per second."""
        own, seen = member.speed, member.seen_speed
        return bound(own if own > seen else seen, self.prefill.usual.speed) or SPEED_UNKNOWN

    def ratio(self, member):
        """Observed over predicted time of its answers, relative to the others; at least 1."""
        usual = self.prefill.usual.ratio
        if usual <= 0:
            return 1.0
        return min(max(_raw_ratio(member) / max(usual, 1e-6) / RATIO_FREE, 1.0), RATIO_MAX)

    def weight(self, side, member):
        """Its probability of being drawn, relative to the usual: 1/8 to 8."""
        usual, weight = side.usual, 1.0
        if side is self.prefill:
            if usual.speed > 0:
                weight = self.speed(member) / usual.speed / self.ratio(member)
        elif usual.kv_total > 0:
            weight = bound(member.load.kv_total_tokens, usual.kv_total) / usual.kv_total
        return min(max(weight, 1 / BOUND), BOUND)

    # ---- loads ----

    def drain(self, member):
        """Subtracts the work computed until now."""
        if member.work_at == self.now:
            return
        if member.work > 0 or member.own_work > 0:
            done = seconds(member.work_at, self.now) * self.speed(member)
            member.work = max(0.0, member.work - done)
            member.own_work = max(0.0, member.own_work - done)
        member.work_at = self.now

    def prompts(self, load):
        """Waiting prompt tokens of a load; 0: unknown."""
        if load.prompt_tokens_waiting >= 0:
            return load.prompt_tokens_waiting
        if load.waiting >= 0:
            return load.waiting * self.mean_prompt
        return load.rooms_waiting * self.mean_prompt if load.rooms_waiting >= 0 else 0.0

    def take_load(self, side, member, load, sampled, lag_ns):
        """Takes a new load. The tokens computed recently are at most the worker's speed, and about
        its speed if more prompts wait than it computes in that time."""
        past, said = min(seconds(member.sampled, sampled), 10 * OTHERS_S), load.prompt_tokens_s
        if said >= 0 and past > 0:  # the share of other routers follows
            member.served += (1 - math.exp(-past / OTHERS_S)) * (said - member.served)
        member.load, member.loaded, member.sampled = load, True, sampled
        member.speed = learned(member.speed, 0.3, said,
                               load.prompt_tokens_waiting > said or load.waiting > 1)
        if load.gbps > 0:
            member.gbps = member.gbps + 0.3 * (load.gbps - member.gbps) if member.gbps > 0 \
                else load.gbps
        if side is self.prefill:
            self.drain(member)
            member.work, member.work_at = self.prompts(load), sampled
            self._replay(member, sampled - lag_ns)

    def _replay(self, member, shown):
        """Adds the picks that the load cannot include yet to the work again, in the order of
        time."""
        speed = self.speed(member)
        for held in member.held.values():
            if held.made <= shown:
                continue
            if held.made > member.work_at:
                member.work = max(0.0, member.work - seconds(member.work_at, held.made) * speed)
                member.work_at = held.made
            member.work += held.tokens[0]
        member.work = max(0.0, member.work - seconds(member.work_at, self.now) * speed)
        member.work_at = self.now

    # ---- the score: called for each worker that a pick evaluates, so calls are few ----

    def _floor(self, member, speed):
        """Pending prompt tokens, whatever a load reports. With results: own picks without an
        answer; the oldest is being computed, and was not started before the answer to the one in
        front of it. Without: own picks, less the tokens that its speed can have computed since."""
        if not self.results:
            return member.own_work if self.prefill.usual.speed > 0 else 0.0
        head = member.head
        if head is None:
            return 0.0
        begun = head.made if head.made > member.answered else member.answered
        done = (self.now - begun) * 1e-9 * speed if self.now > begun else 0.0
        return member.held_tokens - (done if done < head.tokens[0] else head.tokens[0])

    def _penalty(self, side, member):
        """Penalty of failures, and of an overdue answer while later requests were answered: if all
        are slow, none is overdue."""
        failed, head, penalty = member.load.failed, member.head, 0.0
        if member.failures > 0:
            failures = faded(member.failures, member.failures_at, self.now, FAILURES_S)
            penalty = min(FAILURE_S * failures * (1 + failures), FAILURE_MAX_S)
        if failed > 0:
            penalty += min(failed * OWN_FAILURE_S, OWN_FAILURE_MAX_S)
        if head is not None and side.answered > head.made and self.results:
            late = seconds(head.made, side.answered) - OVERDUE_FREE * head.predicted - \
                OVERDUE_FREE_S
            if late > 0 and not head.settled:
                penalty += late if side is self.prefill else min(late, 10)
        return penalty

    def _others(self, member, speed):
        """Expected queue of other routers' requests since the load was sampled: that of a worker of
        which they take this share, reached in about the time of a prompt. It also makes a worker
        that others use less attractive, so routers that share no state prefer different workers,
        and each knows the queues of its own workers well."""
        served = member.served
        if member.own > 0:
            served -= faded(member.own, member.own_at, self.now, OTHERS_S) / OTHERS_S
        if served <= 0:
            return 0.0
        share = min(served / speed, OTHERS_MAX)
        prompt_s = self.mean_prompt / speed
        age = seconds(member.sampled, self.now)
        return share / (1 - share) * prompt_s * (1 - math.exp(-age / prompt_s))

    def _score_prefill(self, member, request, near, fresh):
        """(queue, compute, ratio)"""
        self.drain(member)
        speed, usual = self.speed(member), self.prefill.usual
        floor, work = self._floor(member, speed), member.work
        queue = (work if work > floor else floor) / speed
        if not fresh:
            queue = max(queue, usual.queue)
        elif member.served > 0:
            queue += self._others(member, speed)
        ratio = self.ratio(member) if usual.ratio > 0 else 1.0
        compute = (request.prompt - near) / speed if request.prompt > near else 0.0
        return queue * ratio, compute * ratio, ratio

    def _score_decode(self, member, request, fresh):
        """(queue, compute, last_resort). Room for KV is the load's figure, less the picks since,
        and never more than the own unfinished picks leave."""
        usual, load = self.decode.usual, member.load
        total, need = bound(load.kv_total_tokens, usual.kv_total), request.prompt + request.output
        running = load.running if fresh and load.running >= 0 else 0.0
        waiting = load.waiting if fresh and load.waiting >= 0 else 0.0
        mean, used = self.mean_prompt + self.mean_output, member.fresh_tokens
        if fresh and load.kv_free_tokens >= 0 and total > 0:
            if total > load.kv_free_tokens:
                used += total - load.kv_free_tokens
        elif running * mean > used:
            used = running * mean
        if self.results and member.held_tokens > used:
            used = member.held_tokens
        if total > 0:
            full = (used + need) / total
        else:
            batch = running + waiting + member.fresh_count
            if self.results:
                batch = max(batch, len(member.held))
            full = batch / (batch + BATCH_USUAL)
        if waiting <= 0 and full <= 1:
            return 0.0, STEP_S * full, False
        request_s = self.mean_output / max(bound(load.decode_tokens_s, usual.decode_s), 100)
        queue = waiting * request_s
        if full > 1:
            queue += (used + need - total) / max(mean, 1) * request_s
        return queue, STEP_S * min(full, 1), full > 1

    def score(self, side, member, request, near):
        """(fields of Score…), ratio"""
        load, told = member.load, member.told
        if told < side.synced:
            told = side.synced
        fresh, last_resort, ratio = member.loaded and told >= self.trusted, False, 1.0
        if side is self.prefill:
            queue, compute, ratio = self._score_prefill(member, request, near, fresh)
        else:
            queue, compute, last_resort = self._score_decode(member, request, fresh)
        transfer, gbps = 0.0, bound(member.gbps, side.usual.gbps)
        if gbps > 0:
            size = request.bytes + member.fresh_bytes
            if near and side is self.decode:
                size -= request.bytes * min(near / request.prompt, 1)
            if fresh and load.bytes_queued > 0:
                size += load.bytes_queued
            transfer = size / (gbps * 1e9)
        penalty = self._penalty(side, member) \
            if member.head is not None or member.failures > 0 or load.failed > 0 else 0.0
        return (queue + compute + transfer + penalty, queue, compute, transfer, penalty,
                last_resort, fresh), ratio
