# SPDX-License-Identifier: Apache-2.0
"""How many workers are wanted: steps, dwell times, limits, and what is not known."""
import copy
import math
import pickle
import random

import pytest

from kvd.router.pick import Load, Picker
from kvd.router.scale import Measured, Scaler, measure


class World:
    def __init__(self, **options):
        self.scaler, self.now, self.wanted = Scaler(**options), 5, None

    def step(self, served, waiting=0, count=1):
        """Prompt tokens of workers of 10 000 a second; decode has half its KV in use on each of
        four."""
        for _ in range(count):
            self.now += 10
            self.wanted = self.scaler.step(sample(served, waiting), self.now)
        return self.wanted.prefill


def sample(served, waiting=0, **more):
    return (Measured(4, 10000, served, waiting)._replace(**more), Measured(4, 100000, 200000, 0))


def test_first_step_keeps_running_or_needed_count():
    w = World()
    assert w.step(1000) == 4  # less is not believed before `down`
    assert w.wanted.changed and w.wanted.prefill_known and w.wanted.decode_known
    assert w.wanted.decode == 4 and w.wanted.decode_need == pytest.approx(8 / 3)
    assert World().step(56000) == 9  # 56 / 7, and a band


def test_queue_requires_workers():
    w = World()
    assert w.step(28000, count=10) == 4
    assert w.step(28000, 6e6, count=3) >= 14  # 100 s of work to do within 60 s


def test_step_up_dwells():
    w, count = World(up=100), 0
    first = w.step(60000)
    for i in range(20):
        count += w.wanted.changed and i > 0
        w.step(60000 + 20000 * i)
    assert w.wanted.prefill > first and 1 <= count <= 2  # in 200 s


def test_step_down_waits_for_all_of_the_window():
    w = World()
    assert w.step(70000, count=6) == 11
    # 900 s after the last of it, and not before
    assert w.step(7000, count=85) == 11
    assert 2 <= w.step(7000, count=60) <= 3


def test_noise_within_the_band_is_not_followed():
    w, rnd, changes = World(), random.Random(3), 0
    for i in range(6 * 60 * 8):
        w.step(50000 * (0.9 + 0.2 * rnd.random()))
        changes += i > 200 and w.wanted.changed
    assert changes <= 2


def test_limits_hold():
    w = World(prefill=(2, 6))
    assert w.step(1e6, 1e9, count=20) == 6
    assert w.step(0, count=300) == 2


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, 1e300])
def test_unknown_figures_keep_wanted_count(wrong):
    w = World()
    before = w.step(60000, count=20)
    w.now += 2000
    got = w.scaler.step(sample(60000, speed=wrong) if wrong == 0 else
                        sample(60000, waiting=wrong), w.now)
    assert got.prefill == before and not got.prefill_known and got.decode_known
    assert w.step(60000) == before


def test_clock_without_progress_is_no_step():
    w = World()
    w.step(28000, count=5)
    for now in (w.now, 1):
        got = w.scaler.step(sample(1e6, 1e9), now)
        assert not got.prefill_known and got.prefill == 4


def test_copied_scaler_continues():
    w = World()
    w.step(60000, count=20)
    for other in (copy.deepcopy(w.scaler), pickle.loads(pickle.dumps(w.scaler))):
        assert not other.step(sample(60000), w.now + 10).changed


@pytest.mark.parametrize("words", [
    dict(prefill=(3, 2)), dict(prefill=(0, 2)), dict(decode=(1,)), dict(prefill=(1, 4097)),
    dict(busy=1.1), dict(busy=0), dict(full=math.nan), dict(start=-1), dict(down=math.inf),
    dict(within=1e9), dict(within=0), dict(band=11), dict(up=-0.5)])
def test_options_out_of_limits_are_refused(words):
    with pytest.raises(ValueError):
        Scaler(**words)


# ---- loads ----

def test_loads_are_measured():
    p = Picker(seed=1)
    load = Load(prompt_tokens_s=10000, prompt_tokens_waiting=5000, kv_total_tokens=1000,
                kv_free_tokens=400, running=6, waiting=1)
    for side in ("prefill", "decode"):
        p.set(side, "a", load=load, now=5)
        p.set(side, "b", now=5)
        p.set(side, "c", "draining", load, now=5)
    # a lie: one of three, and far from the others
    p.set("prefill", "d", "draining", load._replace(
        seq=1, prompt_tokens_s=1e12, prompt_tokens_waiting=1e15), now=5)
    prefill, decode = measure(p, now=5)
    assert prefill.workers == 2 and prefill.speed == pytest.approx(10000)
    assert prefill.served <= 2 * (20000 + 80000) and prefill.waiting <= 600 * 80000 + 10000
    # b is as the others; two requests wait, of 100 each
    assert decode == Measured(2, 1000, 2400, pytest.approx(200))
    assert measure(p, now=65)[0].speed == 0  # nothing is known any more


def test_picker_is_measured_by_a_step():
    p = Picker()
    for i in range(4):
        p.set("prefill", "p%d" % i, now=0, load=Load(
            seq=1, prompt_tokens_s=10000, prompt_tokens_waiting=20000))
        p.set("decode", "d%d" % i, now=0, load=Load(
            seq=1, kv_total_tokens=1000, kv_free_tokens=250, running=5, waiting=0))
    assert measure(p, now=1) == (Measured(4, 10000, 40000, pytest.approx(80000)),
                                 Measured(4, 1000, 3000, 0))
    wanted = Scaler(prefill=(2, 9), decode=(1, 3)).step(p, now=1)
    assert wanted.changed and 6 <= wanted.prefill <= 9 and wanted.decode == 3
    assert wanted.prefill_known and wanted.decode_need == pytest.approx(4)
