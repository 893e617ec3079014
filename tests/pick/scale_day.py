# SPDX-License-Identifier: Apache-2.0
"""A day of kvd.router.scale: prompts arrive at a rate that follows the hours, with noise and one
spike; a worker that is wanted works 3 minutes later, one that is not leaves at once (it had
drained). The queue is a fluid: prompts that arrive beyond what the workers compute wait for
waiting / capacity seconds. Each request brings KV to decode workers for RESIDENCE_S."""
import math
import random
from typing import NamedTuple

from kvd.router.scale import Measured, Scaler

STEP_S = 10
SPEED = 20000.0  # prompt tokens a second of a worker
KV_TOTAL = 400000.0
KV_TOKENS = 1.125  # a token of the prompt, with the answer
RESIDENCE_S = 20
BOUND_S = 2  # of waiting that is accepted
FLAP_S = 600  # a step back after less is a flap
START_S = 180
PEAK = 560000  # prompt tokens a second at the busiest hour
SPIKE_AT, SPIKE_S = 54000, 1200
FIRST = 6  # workers at midnight


class Side:
    """turns: changes of direction; hours: of workers; fixed_hours: of a pool for the peak."""

    def __init__(self):
        self.working, self.starting, self.last = FIRST, [], 0  # starting: when each works
        self.step_at = self.direction = 0
        self.steps = self.turns = self.flaps = 0
        self.hours = self.fixed_hours = 0.0

    def follow(self, wanted, at):
        if self.last and wanted != self.last:
            direction = 1 if wanted > self.last else -1
            turn = self.direction and direction != self.direction
            self.steps += 1
            self.turns += bool(turn)
            self.flaps += bool(turn and at - self.step_at < FLAP_S)
            self.direction, self.step_at = direction, at
        self.last = wanted
        self.working += sum(ready <= at for ready in self.starting)
        self.starting = [ready for ready in self.starting if ready > at]
        self.starting += [at + START_S] * (wanted - self.working - len(self.starting))
        if self.working + len(self.starting) > wanted:
            del self.starting[max(0, wanted - self.working):]
        self.working = min(self.working, wanted)
        self.hours += (self.working + len(self.starting)) * STEP_S / 3600


class Day(NamedTuple):
    """kept: share of prompt tokens that waited at most BOUND_S; worst_s: the longest wait."""
    kept: float
    worst_s: float
    prefill: Side
    decode: Side


def rate_at(at, spike):
    """Tokens a second, without noise."""
    hours = ((1 - math.cos(2 * math.pi * (at / 86400 - 0.1))) / 2) ** 1.3
    return PEAK * (0.15 + 0.85 * hours) * (spike if SPIKE_AT <= at < SPIKE_AT + SPIKE_S else 1)


def play(slow_noise, spike, seed=1):
    """slow_noise: share; 5 % more are new at each look. spike: times as much."""
    rnd, scaler, prefill, decode = random.Random(seed), Scaler(), Side(), Side()
    waiting = noise = kv = most = in_bound = total = worst = 0.0
    for at in range(STEP_S, 86400, STEP_S):
        noise = 0.97 * noise + 0.24 * slow_noise * rnd.gauss(0, 1)
        rate = max(0.0, rate_at(at, spike) * (1 + noise + 0.05 * rnd.gauss(0, 1)))
        capacity, room = prefill.working * SPEED, decode.working * KV_TOTAL
        served = min(rate + waiting / STEP_S, capacity)
        waiting = max(0.0, waiting + (rate - served) * STEP_S)
        kv += (1 - math.exp(-STEP_S / RESIDENCE_S)) * (served * KV_TOKENS * RESIDENCE_S - kv)
        most, total = max(most, rate), total + rate
        if waiting <= BOUND_S * capacity and kv <= room:
            in_bound += rate
        worst = max(worst, waiting / max(capacity, 1))
        wanted = scaler.step((
            Measured(prefill.working, SPEED, served, waiting),
            Measured(decode.working, KV_TOTAL, min(kv, room), max(0.0, kv - room))), at)
        prefill.follow(wanted.prefill, at)
        decode.follow(wanted.decode, at)
    prefill.fixed_hours = 24 * math.ceil(most / (SPEED * 0.7))
    decode.fixed_hours = 24 * math.ceil(most * KV_TOKENS * RESIDENCE_S / (KV_TOTAL * 0.75))
    return Day(in_bound / total, worst, prefill, decode)
