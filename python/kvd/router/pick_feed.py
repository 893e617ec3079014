# SPDX-License-Identifier: Apache-2.0
"""Reads answers of group.query for a picker and combines the loads of a worker's ranks.

Ranks of a worker with the same dp rank serve the same requests, so the engine's figures and the
rooms count once, from the rank that published last; different dp ranks have different requests,
whose figures are added. Bytes and GB/s are added over all ranks. The worker's load number is the
sum of its ranks' numbers, so it changes whenever one of them publishes.

A worker with missing or draining ranks is not picked. An answer with `gone` and without `whole` has
the changes; any other has all ranks."""
import json
import math

from ..errors import InvalidError, LimitError
from .pick_score import AMOUNT_MAX, DRAINING, SERVING, Load

RANKS_MAX = 1024  # per worker
NAME_MAX = 63
AXES = ("dp", "tp", "pp", "cp")
AXIS_MAX = 65536
# where a figure is: object of the load ("": the load itself); each: it is added over ranks
FIGURES = {
    "rooms_waiting": ("rooms", "waiting"), "rooms_running": ("rooms", "running"),
    "bytes_queued": ("bytes", "queued"), "gbps": ("", "gbps"), "failed": ("", "failed"),
    **{name: ("engine", name) for name in Load._fields[6:]}}
EACH = ("bytes_queued", "gbps")


class Rank:
    __slots__ = "of", "draining", "load", "told", "mark"


def _refuse():
    return InvalidError("not an answer of group.query", "EPROTO", 2)


def _axis(rank, name, low, high):
    value = rank.get(name, low)
    if type(value) not in (int, float) or not low <= value <= high:
        raise _refuse()
    return int(value)


def _place(rank):
    """(worker, rank, the number of the worker's ranks)"""
    if not isinstance(rank, dict):
        raise _refuse()
    worker = rank.get("worker", "")
    if not isinstance(worker, str) or len(worker) > NAME_MAX:
        raise _refuse()
    return (worker or "-", tuple(_axis(rank, a + "_rank", 0, AXIS_MAX - 1) for a in AXES),
            math.prod(_axis(rank, a + "_size", 1, AXIS_MAX) for a in AXES))


def _figure(load, where, name):
    inside = load.get(where) if where else load
    value = inside.get(name) if isinstance(inside, dict) else None
    return float(value) if type(value) in (int, float) and 0 <= value <= AMOUNT_MAX else -1.0


def _load(load):
    """None if there is none. Its invalid figures are unknown."""
    if not isinstance(load, dict):
        return None
    seq = load.get("seq")
    return Load(int(seq) if type(seq) in (int, float) and 0 <= seq < 1 << 53 else 0,
                *(_figure(load, *FIGURES[name]) for name in Load._fields[1:]))


# ---- one rank ----

def _take_rank(picker, side, entry, mark):
    worker, place, of = _place(entry)
    member = picker._member(side, worker)
    if member.ranks is None:
        member.ranks = {}
    before = member.ranks.get(place)
    member.changed = True
    if before is None and len(member.ranks) == RANKS_MAX:
        raise LimitError("worker %s: more than %d ranks" % (worker, RANKS_MAX), "ELIMIT", 9)
    rank = member.ranks[place] = Rank()
    state = entry.get("state")
    rank.of, rank.mark, rank.told = of, mark, picker.now
    rank.draining = isinstance(state, str) and state != SERVING
    rank.load = _load(entry.get("load"))
    if before is not None and before.load is not None and (
            rank.load is None or rank.load.seq == before.load.seq):
        rank.load, rank.told = before.load, before.told


def _take_gone(side, entry):
    try:
        worker, place, _ = _place(entry)
    except InvalidError:
        return
    member = side.members.get(worker)
    if member is not None and member.ranks and member.ranks.pop(place, None):
        member.changed = True


# ---- a worker ----

def _latest(ranks, index):
    """A figure of the rank that published last, among those that have it."""
    told, value = 0, -1.0
    for rank in ranks:
        if rank.load[index] >= 0:
            if value < 0 or rank.told > told:
                value = rank.load[index]
            told = max(told, rank.told)
    return value


def _together(member):
    """(Load, time) of all ranks; None: none has a load."""
    groups = {}
    for place, rank in sorted(member.ranks.items()):
        if rank.load is not None:
            groups.setdefault(place[0], []).append(rank)
    if not groups:
        return None
    out = [sum(rank.load.seq + 1 for ranks in groups.values() for rank in ranks)]
    for index, name in enumerate(Load._fields[1:], 1):
        known = [rank.load[index] for ranks in groups.values() for rank in ranks] \
            if name in EACH else [_latest(ranks, index) for ranks in groups.values()]
        known = [value for value in known if value >= 0]
        out.append(sum(known) if known else -1.0)
    return Load._make(out), max(rank.told for ranks in groups.values() for rank in ranks)


def _changed(picker, side, member):
    member.changed = False
    if not member.ranks:
        picker._forget(side, member)
        return
    of = member.ranks[min(member.ranks)].of
    serves = len(member.ranks) >= of and not any(r.draining for r in member.ranks.values())
    picker._move(side, member, SERVING if serves else DRAINING)
    told = _together(member)
    if told:
        picker._load(side, member, *told)


# ---- an answer ----

def _parse(answer):
    """(ranks, gone, whole, synced); InvalidError."""
    if isinstance(answer, (str, bytes)):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            raise _refuse() from None
    if not isinstance(answer, dict):
        raise _refuse()
    ranks, gone = answer.get("ranks"), answer.get("gone")
    if not isinstance(ranks, list) or not isinstance(gone, (list, type(None))):
        raise _refuse()
    for rank in ranks:
        _place(rank)
    return ranks, gone or [], gone is None or answer.get("whole") is True, \
        answer.get("synced") is not False


def take(picker, side, answer):
    """InvalidError: the answer is invalid, and nothing was changed. LimitError: the part of it that
    fits was applied."""
    ranks, gone, whole, synced = _parse(answer)
    mark, limit = object(), None
    for entry in gone if not whole else ():
        _take_gone(side, entry)
    for entry in ranks:
        try:
            _take_rank(picker, side, entry, mark)
        except LimitError as why:
            limit = limit or why
    for member in [m for m in side.members.values() if m.ranks is not None]:
        if whole:
            for place in [p for p, rank in member.ranks.items() if rank.mark is not mark]:
                del member.ranks[place]
                member.changed = True
        if member.changed:
            _changed(picker, side, member)
    if synced:
        side.synced = picker.now
    if limit:
        raise limit
