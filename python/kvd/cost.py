# SPDX-License-Identifier: Apache-2.0
"""Route a query to the holders of KV, fetch the KV, or recompute it: the cost of each.

    page = kvd.cost.preset("h100-ibgda")
    choice = page.decide(kvd.cost.Model.mla(layers=27, heads=16, dqk=576, dv=512),
                         [kvd.cost.Holder(tokens=32768)], steps=100, shifted=True)
    choice.way, choice.even_steps       # 'fetch', 51.66…

With the daemon's measurements (its attention replies are fp32: out_bytes=4; with
out_type="bf16" 2), for a hold that was
found at another daemon:

    page, there = client.cost_page(), hold.holders()[0]
    page.decide(model, [kvd.cost.Holder(tokens=there.tokens, peer=there.peer,
                                        gpu=there.gpu)], …)

Arithmetic only: no query is sent, no byte is moved. docs/route.md has the model."""
import math
from typing import NamedTuple

from . import _check, _kvd

ROUTE, FETCH, LOCAL = "route", "fetch", "local"
SELF = bytes(16)  # the one peer of a preset page
_WAYS = (None, ROUTE, FETCH, LOCAL)


class Model(NamedTuple):
    """The model as one rank has it. Sizes in bytes: of a value of q and KV; of the output; of a
    token and layer of KV (0: computed from the others)."""
    kind: int
    layers: int
    heads: int
    kv_heads: int
    dqk: int
    dv: int
    value_bytes: int = 2
    out_bytes: int = 2
    token_bytes: int = 0

    @classmethod
    def mla(cls, layers, heads, dqk=576, dv=512, **sizes):
        return cls(1, layers, heads, 1, dqk, dv, **sizes)

    @classmethod
    def gqa(cls, layers, heads, kv_heads, dqk=128, dv=128, **sizes):
        return cls(0, layers, heads, kv_heads, dqk, dv, **sizes)


class Holder(NamedTuple):
    """The share of the context that an instance (16 bytes) holds; `selected`: tokens of it that
    a query token attends to; gpu: they are in its GPU memory."""
    tokens: int
    selected: int = 0
    peer: bytes = SELF
    gpu: bool = False


class Price(NamedTuple):
    us: float  # inf: not possible
    error_us: float


class Choice(NamedTuple):
    way: str
    sure: bool
    replicate: bool
    route: Price
    fetch: Price
    local: Price
    round: Price
    attend: Price
    once: Price
    even_steps: float
    slowest: int
    transport: str


def _time(name, value):
    got = _check.number(name, value, "a number of microseconds")
    if not 0 <= got < math.inf:
        raise ValueError("%s: %s is not a time in microseconds" % (name, _check.came(value)))
    return got


def _holder(i, holder):
    tokens, selected, peer, gpu = Holder(*holder)
    return (bytes(peer), _check.integer("holders[%d].tokens" % i, tokens),
            _check.integer("holders[%d].selected" % i, selected),
            _check.flag("holders[%d].gpu" % i, gpu))


class Page:
    """Constants of a fabric: from preset(), or measured by a daemon: Client.cost_page()."""

    def __init__(self, page):
        self._page = page

    def decide(self, model, holders, *, query_tokens=1, steps=0, steps_made=0, selected=False,
               shifted=False, no_pages=False, last=None, attend_us=0, hidden_us=0,
               recompute_us=0):
        """The cheapest choice. steps: later decode steps; 0: unknown, steps_made is used. last:
        the previous choice. Times in microseconds; 0: unknown."""
        _check.instance("model", model, Model, "a kvd.cost.Model")
        if last not in _WAYS:
            raise ValueError("last: %s is not one of %s" % (_check.came(last), _WAYS))
        numbers = [_check.integer(name, value, 0, _check.U32) for name, value in (
            *model._asdict().items(), ("query_tokens", query_tokens), ("steps", steps),
            ("steps_made", steps_made))]
        flags = tuple(_check.flag(name, value) for name, value in (
            ("selected", selected), ("shifted", shifted), ("no_pages", no_pages)))
        times = tuple(_time(name, value) for name, value in (
            ("attend_us", attend_us), ("hidden_us", hidden_us), ("recompute_us", recompute_us)))
        way, sure, replicate, *prices, even, slowest, transport = _kvd.cost_decide(
            self._page, numbers[0], tuple(numbers[1:]), flags, _WAYS.index(last), times,
            tuple(_holder(i, holder) for i, holder in enumerate(holders)))
        return Choice(_WAYS[way], sure, replicate, *(Price(*price) for price in prices), even,
                      slowest, transport)


def preset(name):
    """A published fabric: h100-ibgda, h100-nvlink4, a100-nvlink3, rtx6000-pcie5, a40-pcie4."""
    if not isinstance(name, str):
        raise _check.wrong("name", name, "a str")
    return Page(_kvd.cost_preset(name))
