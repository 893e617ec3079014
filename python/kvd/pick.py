# SPDX-License-Identifier: Apache-2.0
"""Which workers serve a request, and how many are wanted.

    picker = kvd.pick.Picker()
    picker.feed("prefill", answer)      # of group.query with loads, whole or what has changed
    picker.set("decode", "d0", load=kvd.pick.Load(seq=1, kv_free_tokens=90000))
    got = picker.pick(prompt_tokens=2000, near=[("p3", 1500)])
    got = picker.pick(prompt_tokens=2000, near=kvd.pick.near(space.hold(ids, far=0.01), answer))
    got.prefill, got.decode, got.prefill_score.total
    picker.settle(got.id, ttft=0.31)    # or failed=["prefill"]
    picker.release(got.id)              # the request has ended

Arithmetic: nobody is asked, and no daemon is needed. Times are seconds of time.monotonic(), or of
`now`. A picker is of one thread at a time, or of many under the GIL. docs/pick.md has the
function."""
import json
import math
import os
import time
from typing import NamedTuple

from . import _check, _kvd

PREFILL, DECODE = "prefill", "decode"
SERVING, DRAINING, GONE = "serving", "draining", "gone"
_SIDES = {PREFILL: 0, DECODE: 1}
_STATES = {SERVING: 0, DRAINING: 1, GONE: 2}
_STATE_NAMES = (SERVING, DRAINING, GONE)


class Load(NamedTuple):
    """What a worker says of itself; -1: not known. seq: another one, another load."""
    seq: int = 0
    rooms_waiting: float = -1
    rooms_running: float = -1
    bytes_queued: float = -1
    gbps: float = -1
    failed: float = -1
    running: float = -1
    waiting: float = -1
    kv_free_tokens: float = -1
    kv_total_tokens: float = -1
    prompt_tokens_waiting: float = -1
    prompt_tokens_s: float = -1
    decode_tokens_s: float = -1


class Score(NamedTuple):
    """A prediction, in seconds: total, to the first token, is the sum of the next four."""
    total: float
    queue: float
    compute: float
    transfer: float
    penalty: float
    last_resort: bool
    fresh: bool


class Pick(NamedTuple):
    """A pair; "" on a side that was not asked for."""
    id: int
    prefill: str
    decode: str
    prefill_score: Score
    decode_score: Score


class Row(NamedTuple):
    worker: str
    state: str
    score: Score


def _number(name, value):
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise _check.wrong(name, value, "a number")
    return float(value)


def _ns(now):
    if now is None:
        return time.monotonic_ns()
    now = _number("now", now)
    if not 0 <= now < 1e10:
        raise ValueError("now: %r is not a time in seconds" % now)
    return int(now * 1e9)


def _side(side):
    try:
        return _SIDES[side]
    except (KeyError, TypeError):
        raise ValueError("side: %s is not %r or %r" % (
            _check.came(side), PREFILL, DECODE)) from None


def near(hold, *answers):
    """Which workers of these answers of group.query have the beginning of a prompt, by the ids of
    its chunks: those whose daemons have what hold, of Space.hold(ids, far=…), found there and
    here. As long as the hold is open, they keep it. -> [(worker, tokens)], for pick()"""
    own = (hold.chunks - hold.far) * hold.space.tokens if hold.far else hold.tokens
    held = {hold.space.client.info["instance"]: own}
    for holder in hold.holders():
        held[holder.peer.hex()] = own + holder.tokens
    tokens = {}
    for rank in (rank for answer in answers for rank in answer["ranks"]):
        has = held.get(rank.get("instance"), 0)
        if has > tokens.get(rank["worker"], 0):
            tokens[rank["worker"]] = has
    return sorted(tokens.items())


def _request(prompt_tokens, bytes, output_tokens, near, avoid, only):  # noqa: A002
    return (prompt_tokens, bytes, output_tokens, tuple(map(tuple, near)), tuple(avoid),
            -1 if only is None else _side(only))


class Picker:
    """Members of a prefill and a decode group, and what was picked of them."""

    def __init__(self, *, seed=None, token_bytes=0, stale=0, hold=0, lag=0, scan=0, sample=0,
                 results=True):
        """seed: of ties and samples. token_bytes: of KV. stale: seconds until a load is
        distrusted (5). hold: that a pick counts which no load shows (5). lag: a load shows what was
        picked so long before (0.1). scan: groups up to this size are looked at whole (64), of
        larger ones `sample` (2). results: the outcome of each pick is told."""
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        self._picker = _kvd.pick_new(
            _check.integer("seed", seed), _number("token_bytes", token_bytes),
            _number("stale", stale), _number("hold", hold), _number("lag", lag),
            _check.integer("scan", scan, 0, _check.U32),
            _check.integer("sample", sample, 0, _check.U32), _check.flag("results", results))

    def set(self, side, worker, state=SERVING, load=None, sampled=None, now=None):
        """A worker, and its load as of `sampled` (now). GONE forgets it."""
        now = _ns(now)
        if state not in _STATES:
            raise ValueError("state: %s is not one of %s" % (
                _check.came(state), ", ".join(_STATES)))
        _kvd.pick_set(self._picker, _side(side), worker, _STATES[state],
                      None if load is None else tuple(load),
                      now if sampled is None else _ns(sampled), now)

    def feed(self, side, answer, now=None):
        """An answer of group.query with loads: a dict, or its text."""
        if not isinstance(answer, (str, bytes)):
            answer = json.dumps(answer)
        _kvd.pick_feed(self._picker, _side(side), answer, _ns(now))

    def pick(self, *, prompt_tokens=0, bytes=0, output_tokens=0, near=(),  # noqa: A002
             avoid=(), only=None, now=None):
        """The pair that is predicted to give the first token soonest. prompt_tokens or bytes: the
        other follows from token_bytes. near: (worker, tokens of the prompt that it holds). avoid:
        workers. only: one side. NotFoundError: no worker serves."""
        got = _kvd.pick_pick(
            self._picker, _request(prompt_tokens, bytes, output_tokens, near, avoid, only),
            _ns(now))
        return Pick(got[0], got[1], got[2], Score._make(got[3]), Score._make(got[4]))

    def settle(self, id, ttft=None, failed=(), now=None):  # noqa: A002
        """The first token came after ttft seconds; or it will not (None), by the fault of the
        sides in `failed`."""
        if isinstance(failed, str):
            failed = (failed,)
        mask = 0
        for side in failed:
            mask |= 1 << _side(side)
        _kvd.pick_settle(self._picker, id, -1.0 if ttft is None else _number("ttft", ttft), mask,
                         _ns(now))

    def release(self, id, now=None):  # noqa: A002
        """The request has ended, or never began."""
        _kvd.pick_release(self._picker, id, _ns(now))

    def scores(self, side, *, prompt_tokens=0, bytes=0, output_tokens=0, near=(),  # noqa: A002
               now=None):
        """What pick() would think of each worker of a side; nothing is reserved. -> [Row]"""
        rows = _kvd.pick_scores(
            self._picker, _side(side),
            _request(prompt_tokens, bytes, output_tokens, near, (), None), _ns(now))
        return [Row(worker, _STATE_NAMES[state], Score._make(score))
                for worker, state, score in rows]

    def count(self, side):
        """(workers that serve, all of them)"""
        return _kvd.pick_count(self._picker, _side(side))

    def measure(self, now=None):
        """What the loads say for Scaler.step(). -> (Measured, Measured)"""
        return tuple(Measured._make(side)
                     for side in _kvd.scale_measure(self._picker, _ns(now)))


class Measured(NamedTuple):
    """Of a side. Prefill: prompt tokens a second of one worker, and of all; prompt tokens that
    wait. Decode: KV tokens of one worker, in use, and wanted by requests without room."""
    workers: int
    speed: float
    served: float
    waiting: float


class Wanted(NamedTuple):
    """known: False where loads say too little, and the number is what it was."""
    prefill: int
    decode: int
    prefill_need: float
    decode_need: float
    prefill_known: bool
    decode_known: bool
    changed: bool


class Scaler:
    """How many workers are wanted, step by step, some seconds apart."""

    def __init__(self, *, prefill=(1, 4096), decode=(1, 4096), busy=0, full=0, within=0, start=0,
                 up=0, down=0, band=0, state=b""):
        """prefill, decode: least and most. busy: share of prefill workers' time that is to be used
        (0.7). full: of decode workers' KV (0.75). within: seconds in which prompts that wait are to
        be computed (60). start: that a worker takes to start (180). up: between two steps up (60).
        down: less was wanted for so long before a step down (900). band: hysteresis (0.1).
        state: of another one of this version."""
        self._options = tuple(
            _check.integer(name, value, 1, 4096)
            for name, pair in (("prefill", prefill), ("decode", decode))
            for value in pair) + tuple(
                _number(name, value) for name, value in (
                    ("busy", busy), ("full", full), ("within", within), ("start", start),
                    ("up", up), ("down", down), ("band", band)))
        if len(self._options) != 11:
            raise ValueError("prefill, decode: a least and a most number of workers")
        self.state = state
        for value in self._options[4:]:
            if not 0 <= value < math.inf:
                raise ValueError("%r is not a number of at least 0" % value)

    def step(self, measured, now=None):
        """measured: of Picker.measure(), or a Picker. -> Wanted"""
        now = _ns(now)
        if isinstance(measured, Picker):
            measured = _kvd.scale_measure(measured._picker, now)
        prefill, decode = measured
        self.state, *rest = _kvd.scale_step(
            self.state, self._options, tuple(prefill), tuple(decode), now)
        return Wanted._make(rest)
