# SPDX-License-Identifier: Apache-2.0
"""kvd.router.pick against the C library's picker: the same steps, the same picks and scores, to the
last bit. ORACLE_STEPS=n of each case; 1500 if absent."""
import math
import os
import random

import pytest

import kvd
from kvd import pick as c
from kvd.router import pick as py, scale as py_scale

SIDES = ("prefill", "decode")
STEPS = int(os.environ.get("ORACLE_STEPS", "1500"))
GAMMA, MASK = 0x9e3779b97f4a7c15, (1 << 64) - 1  # C draws once at its start
HOSTILE = (0, 1, 1e5, 1e15, 1e300, -1, -0.0, math.nan, math.inf, -math.inf, 5e-324)


class Both:
    def __init__(self, seed, members, hostile, feeds, **options):
        self.rnd, self.members, self.hostile, self.feeds = random.Random(seed), members, hostile, feeds
        self.c = c.Picker(seed=seed, **options)
        self.py = py.Picker(seed=(seed + GAMMA) & MASK, **options)
        self.now, self.ids, self.picks = 100.0, [(1 << 63, 1 << 63)] * 64, 0

    def set(self):
        rnd, side = self.rnd, self.rnd.choice(SIDES)
        figures = [rnd.choice(HOSTILE) if self.hostile else
                   rnd.choice((-1, 10 * rnd.random(), 1e4 * rnd.random(), 1e5 * rnd.random()))
                   for _ in range(12)]
        seq, given = rnd.randrange(1 << 30), rnd.random() < 0.8
        args = ("w%d" % rnd.randrange(self.members),
                rnd.choice(("serving",) * 4 + ("draining", "gone")))
        sampled = self.now - rnd.choice((0, 0, 0.05, 0.3))
        for picker, load in ((self.c, c.Load), (self.py, py.Load)):
            picker.set(side, *args, load(seq, *figures) if given else None, sampled, self.now)

    def settle(self, release):
        rnd = self.rnd
        of_c, of_py = rnd.choice(self.ids)
        args = (rnd.choice((None, rnd.random(), 3 * rnd.random())),
                rnd.choice(((), ("prefill",), ("decode",), SIDES)), self.now)
        for picker, id_ in ((self.c, of_c), (self.py, of_py)):
            picker.settle(id_, *args)
            if release:
                picker.release(id_, self.now)

    def release(self):
        of_c, of_py = self.rnd.choice(self.ids)
        self.c.release(of_c, self.now - 1)
        self.py.release(of_py, self.now - 1)

    def feed(self):
        rnd = self.rnd
        rank = {"worker": "f%d" % rnd.randrange(5), "tp_rank": rnd.randrange(2), "tp_size": 2,
                "dp_rank": rnd.randrange(2), "dp_size": rnd.choice((1, 2)),
                "state": rnd.choice(("serving",) * 5 + ("draining",)),
                "load": {"seq": rnd.randrange(1 << 20), "gbps": rnd.choice((-1, 3, 10)),
                         "rooms": {"waiting": rnd.randrange(5)},
                         "bytes": {"queued": rnd.randrange(10 ** 9)},
                         "engine": {name: rnd.randrange(10000) for name in c.Load._fields[6:]
                                    if rnd.random() < 0.7}}}
        ranks, gone = ([rank], []) if rnd.random() < 0.8 else ([], [rank])
        side = rnd.choice(SIDES)
        answer = {"ranks": ranks, "gone": gone, "synced": rnd.random() < 0.5}
        self.c.feed(side, answer, self.now)
        self.py.feed(side, answer, self.now)

    def pick(self):
        rnd = self.rnd
        words = dict(
            prompt_tokens=rnd.choice((0, rnd.randrange(20000))),
            bytes=rnd.choice((0, rnd.randrange(1 << 30))),
            output_tokens=rnd.choice((0, rnd.randrange(1000))),
            near=[("w%d" % i, rnd.randrange(5000))
                  for i in rnd.sample(range(self.members), rnd.randrange(3))],
            avoid=["w%d" % rnd.randrange(self.members)] * rnd.randrange(2),
            only=rnd.choice((None, None, None, *SIDES)), now=self.now)
        try:
            of_c = self.c.pick(**words)
        except kvd.NotFoundError as why:
            with pytest.raises(kvd.NotFoundError, match=str(why)):
                self.py.pick(**words)
            return
        of_py = self.py.pick(**words)
        assert tuple(of_c[1:]) == tuple(of_py[1:])
        self.picks += 1
        rnd.shuffle(self.ids)
        self.ids[0] = of_c.id, of_py.id

    def step(self):
        self.now += self.rnd.randrange(50) * 1e-3
        kind = self.rnd.randrange(12)
        if kind <= 1:
            self.set()
        elif kind <= 4:
            self.settle(kind == 4)
        elif kind == 5:
            self.release()
        elif kind == 6 and self.feeds:
            self.feed()
        else:
            self.pick()

    def compare(self):
        for side in SIDES:
            assert self.c.count(side) == self.py.count(side)
            rows = [picker.scores(side, prompt_tokens=500, now=self.now)
                    for picker in (self.c, self.py)]
            assert [tuple(row) for row in rows[0]] == [tuple(row) for row in rows[1]]
        assert [tuple(side) for side in self.c.measure(self.now)] == \
            [tuple(side) for side in py_scale.measure(self.py, self.now)]


@pytest.mark.parametrize("seed, members, hostile, feeds, options", [
    (1, 5, True, True, {}), (2, 5, False, True, {}), (3, 100, False, True, {}),
    (4, 100, True, False, {}), (5, 300, False, True, dict(sample=8)),
    (6, 8, False, True, dict(results=False)),
    (7, 90, False, True, dict(results=False, token_bytes=1e5)),
    (8, 6, False, True, dict(token_bytes=1e6))])
def test_picks_are_those_of_the_c_library(seed, members, hostile, feeds, options):
    both = Both(seed, members, hostile, feeds, **options)
    for i in range(STEPS):
        both.step()
        if i % 500 == 0:
            both.compare()
    print("%d equal picks in %d steps" % (both.picks, STEPS))


def test_steps_of_scaling_are_those_of_the_c_library():
    rnd = random.Random(4)
    for _ in range(STEPS // 50):
        options = dict(
            prefill=(1, rnd.randrange(1, 40)), decode=(1, 30), busy=rnd.choice((0.3, 0.7, 1)),
            full=0.5 + 0.5 * rnd.random(), within=rnd.choice((1, 60)), start=rnd.choice((1, 180)),
            up=rnd.choice((1, 60)), down=rnd.choice((10, 900)), band=rnd.choice((0.05, 0.1, 0.3)))
        of_c, of_py, now = c.Scaler(**options), py_scale.Scaler(**options), 5.0
        for i in range(300):
            now += rnd.choice((0, 1, 10, 10, 10, 40))
            seen = [(rnd.randrange(40), rnd.choice((10000, 10000, 10000, 20000, 0, math.nan, -1)),
                     1e5 * rnd.random() * (1 + math.sin(i / 30)),
                     rnd.choice((0, 1e6 * rnd.random(), rnd.choice((math.inf, 0)))))
                    for _ in SIDES]
            assert tuple(of_c.step([c.Measured(*side) for side in seen], now)) == \
                tuple(of_py.step([py_scale.Measured(*side) for side in seen], now))
