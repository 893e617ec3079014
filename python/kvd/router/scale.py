# SPDX-License-Identifier: Apache-2.0
"""Number of workers that the load requires, from measurements of those that serve.

    scaler = Scaler(prefill=(2, 20), decode=(1, 8))
    wanted = scaler.step(measure(picker))   # some seconds after the last step
    wanted.prefill, wanted.decode

Prefill: prompt tokens that arrive per second (those computed, and the growth of the queue) over a
worker's speed, of which `busy` is the target; plus enough to compute waiting prompts `within` its
time. Decode: KV in use, and the need of requests without room, over `full` of a worker's. Both are
smoothed (Holt: a level and its slope) and extrapolated by the start-up time of a worker, because a
worker that is started now serves only then.

A step up follows at once, but `up` after the previous one, and is a band larger than needed. A step
down is made when the maximum need in the last `down` is three bands below, and ends one band above
that: so no worker is removed for `down` after a step up, and a step is not reversed for less than a
band. The maximum is kept in bins, so a Scaler is small; it may be copied and pickled."""
import math
from typing import NamedTuple

from .. import _check
from .pick import WORKERS_MAX, Picker, nanoseconds, number
from .pick_score import AMOUNT_MAX, seconds

BINS = 32
LEVEL_S, SLOPE_S = 30.0, 180.0
AHEAD_MAX = 1.5  # times the level
DOWN_BANDS = 3.0  # margin of a step down
WAITING_S = 600.0  # of a worker's speed: a longer queue is ignored
ROUND_DOWN = 0.001  # of a worker, for which none is started
TIME_MAX = 86400


class Measured(NamedTuple):
    """Measurements of a side. Prefill: prompt tokens per second of one worker, and of all; waiting
    prompt tokens. Decode: KV tokens of one worker, in use, and needed by requests without room."""
    workers: int
    speed: float
    served: float
    waiting: float


class Wanted(NamedTuple):
    """known: False if loads report too little, and the number is the previous one. need: before
    rounding and hysteresis."""
    prefill: int
    decode: int
    prefill_need: float
    decode_need: float
    prefill_known: bool
    decode_known: bool
    changed: bool


def measure(picker, now=None):
    """The loads of a Picker, for Scaler.step(). -> (Measured, Measured)"""
    picker._tick(now)
    return _measure(picker, picker.prefill), _measure(picker, picker.decode)


def _measure(picker, side):
    picker.refresh(side, must=True)
    prefill, told = side is picker.prefill, 0
    served = waiting = running = 0.0
    for at, member in enumerate(side.order):
        load = member.load
        if not picker.fresh(side, member):
            continue
        told += at < side.serving
        if prefill:
            speed = picker.speed(member)
            served += min(max(load.prompt_tokens_s, 0), speed)
            waiting += min(picker.prompts(load), WAITING_S * speed)
        else:
            if load.kv_free_tokens >= 0 and load.kv_total_tokens > 0:
                served += max(0, load.kv_total_tokens - load.kv_free_tokens)
            running += max(load.running, 0)
            waiting += max(load.waiting, 0)
    if not prefill:  # running and KV in use show how much KV a request has
        waiting = waiting * served / running if running > 0 else 0.0
    if 0 < told < side.serving:  # the others are assumed equal
        served *= side.serving / told
    speed = side.usual.speed if prefill else side.usual.kv_total
    return Measured(side.serving, speed if told else 0.0, served, waiting)


class _Side:
    """State of a side between steps. Times are nanoseconds; 0: none yet."""

    def __init__(self, least, most, share, within):
        self.least, self.most, self.share, self.within = least, most, share, within
        self.last = self.up = self.bin_at = self.bin = self.wanted = 0
        self.rate = self.slope = self.waiting = 0.0
        self.bins = [math.inf] * BINS

    def rounded(self, need):
        return max(self.least, math.ceil(min(max(need - ROUND_DOWN, 0), self.most)))

    def need(self, seen, start, now):
        """Workers that the load needs when one that is started now serves."""
        past, load, level = seconds(self.last, now), seen.served, self.rate
        if self.within is None:
            load += seen.waiting
        elif self.last:
            load = max(0, load + (seen.waiting - self.waiting) / past)
        if self.last:
            self.rate += (1 - math.exp(-past / LEVEL_S)) * (load - self.rate)
            self.slope += (1 - math.exp(-past / SLOPE_S)) * ((self.rate - level) / past -
                                                             self.slope)
        else:
            self.rate = load
        self.waiting, self.last = seen.waiting, now
        ahead = min(self.rate + max(0, self.slope) * start, AHEAD_MAX * self.rate)
        queue = seen.waiting / (seen.speed * self.within) if self.within else 0.0
        return ahead / (seen.speed * self.share) + queue

    def largest(self, need, down, now):
        """The maximum need in the last `down`; infinite while that is unknown."""
        width = int(down * 1e9 / (BINS - 1)) + 1
        if not self.bin_at:
            self.bin_at, self.bins[self.bin] = now, need
        for _ in range(BINS):
            if now < self.bin_at + width:
                break
            self.bin = (self.bin + 1) % BINS
            self.bins[self.bin] = need  # also for a time without measurements
            self.bin_at += width
        if now >= self.bin_at + width:
            self.bin_at = now
        self.bins[self.bin] = max(self.bins[self.bin], need)
        return max(self.bins)


class Scaler:
    """Number of workers that the load requires, step by step, some seconds apart."""

    def __init__(self, *, prefill=(1, WORKERS_MAX), decode=(1, WORKERS_MAX), busy=0.7, full=0.75,
                 within=60, start=180, up=60, down=900, band=0.1):
        """prefill, decode: minimum and maximum. busy: target utilisation of prefill workers' time.
        full: of decode workers' KV. within: seconds in which waiting prompts are to be computed.
        start: seconds until a new worker serves. up: seconds between two steps up. down: seconds
        of lower need before a step down. band: hysteresis."""
        self._start, self._up = number("start", start, TIME_MAX), number("up", up, TIME_MAX)
        self._down, self._band = number("down", down, TIME_MAX), number("band", band, 10)
        self._sides = (
            _Side(*_range("prefill", prefill), _share("busy", busy, 1),
                  _share("within", within, TIME_MAX)),
            _Side(*_range("decode", decode), _share("full", full, 1), None))

    def step(self, measured, now=None):
        """measured: of measure(), or a Picker. -> Wanted"""
        if isinstance(measured, Picker):
            measured = measure(measured, now)
        now = nanoseconds("now", now)
        told = [self._step(side, seen, now) for side, seen in zip(self._sides, measured)]
        (p_need, p_known, p_changed), (d_need, d_known, d_changed) = told
        return Wanted(self._sides[0].wanted, self._sides[1].wanted, p_need, d_need, p_known,
                      d_known, p_changed or d_changed)

    def _step(self, side, seen, now):
        """(need, known, changed)"""
        before, need = side.wanted, 0.0
        side.wanted = side.rounded(before or seen.workers)
        known = now > side.last and 0 < seen.speed <= AMOUNT_MAX and all(
            0 <= figure <= AMOUNT_MAX for figure in (seen.served, seen.waiting))
        if known:
            need = side.need(seen, self._start, now)
            most = side.largest(need, self._down, now)
            if side.rounded(need) > side.wanted and (
                    not side.up or seconds(side.up, now) >= self._up):
                side.wanted, side.up = side.rounded(need * (1 + self._band)), now
            elif most * (1 + DOWN_BANDS * self._band) <= side.wanted:
                side.wanted = min(side.wanted, side.rounded(most * (1 + self._band)))
        return need, known, side.wanted != before


def _range(name, limits):
    least, most = limits
    least = _check.integer(name, least, 1, WORKERS_MAX)
    return least, _check.integer(name, most, least, WORKERS_MAX)


def _share(name, value, most):
    value = number(name, value, most)
    if not value:
        raise ValueError("%s: 0 is not positive" % name)
    return value
