# SPDX-License-Identifier: Apache-2.0
"""Prices for a Reader: what routing, fetching and computing a document take, here and now.

Each constant is a line through two sizes, of medians: rows that go to one chunk, and to all;
a pull of one chunk, and of all. Attention at home, computing and splicing are measured as this
client does them. It takes some twenty round trips and five fetches of the document."""
import time
from statistics import median

import torch

from .. import cost, rooms
from ..attend import Part
from .attention import Cache, own_part

REPEAT = 5
WIDE = 16  # query tokens of the larger exchange
LEAST_US = 1e-3  # what cannot be told from nothing


def _us(work, repeat=REPEAT):
    took = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        took.append(1e6 * (time.perf_counter() - begin))
    return median(took)


def _line(x0, y0, x1, y1):
    """-> what is fixed, and units a µs."""
    rise = max((y1 - y0) / (x1 - x0), 1e-9)
    return max(y0 - rise * x0, LEAST_US), 1 / rise


def _rounds(place, hold, tokens):
    """-> (probe_us, bytes a µs, attend_us, FLOP a µs)"""
    g, client = place.geometry, place.client
    row = g.value_bytes * g.dqk + 4 * g.dv + 8
    with g.attend(client, WIDE * g.heads, 1) as attend:
        def post(queries, count):
            attend.post(0, 0, [Part(hold, rows=(0, queries * g.heads), tokens=count)])
            attend.wait(0)
            inside.append(sum(attend.read(0)[:2]))

        def outside(queries, count):
            inside.clear()
            took = _us(lambda: post(queries, count))
            return max(took - median(inside), LEAST_US)
        inside = []
        attend.q(0)[:] = 0
        outside(1, place.chunk)
        few = outside(1, place.chunk)
        few_us = median(inside)
        probe, rate = _line(g.heads * row, few, WIDE * g.heads * row,
                            outside(WIDE, place.chunk))
        outside(1, tokens)
        flop = 2 * (g.dqk + g.dv) * g.heads
        fixed, flops = _line(flop * place.chunk, few_us, flop * tokens, median(inside))
    return probe, rate, fixed, flops


def _pulls(place, held, tokens):
    g = place.geometry
    token = g.layers * g.kv_heads * sum(g.fields.values()) * g.value_bytes

    def pull(count):
        pages = place.take(count)
        move = held.hold.fetch({"kv": rooms.View(pages, first_token=held.begin, tokens=(
            held.begin, held.begin + count))})
        move.wait()
        move.close()
        place.give(pages)
    return _line(place.chunk * token, _us(lambda: pull(place.chunk)), tokens * token,
                 _us(lambda: pull(tokens)))


def _home(model, g, rows):
    """One query token's attention to tokens that are here; transformers expands all latents
    again for it."""
    keys, values = g.unpack(rows)
    if g.mla:
        with torch.no_grad():
            keys, values = model.model.layers[0].self_attn.expand_kv(keys, values)
    query = torch.zeros(1, g.heads, 1, keys.shape[-1], dtype=g.dtype)
    seen = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool)
    own_part(query, keys, values, seen, g.scale)


def measure(place, document):
    """-> (kvd.cost.Constants, more arguments of decide()), of a document with one holder."""
    g, tokens = place.geometry, len(document)
    held = place.hold(document)
    try:
        if len(held) != 1 or tokens <= place.chunk:
            raise ValueError("document: %d pieces, of which one is wanted, of several chunks"
                             % len(held))
        probe, rate, fixed, flops = _rounds(place, held[0].hold, tokens)
        pull_us, pull_rate = _pulls(place, held[0], tokens)
    finally:
        for one in held:
            one.hold.close()
    rows = {name: torch.zeros(tokens, g.kv_heads, dims, dtype=g.dtype)
            for name, dims in g.fields.items()}
    part = document[:min(256, tokens)]

    def compute():
        with torch.no_grad():
            place.model(input_ids=torch.tensor([part]), past_key_values=Cache(g),
                        use_cache=True)
    compute_us = _us(compute, 3) / (len(part) * g.layers)
    return cost.Constants(
        probe_us=probe, bytes_per_us=rate, pull_us=pull_us, pull_bytes_per_us=pull_rate,
        attend_us=fixed, attend_bytes_per_us=1e6, attend_flops_per_us=flops,
        splice_token_us=_us(lambda: g.splice(rows, 1)) / tokens if g.rope else 0), {
            "attend_us": _us(lambda: _home(place.model, g, rows)), "recompute_us": compute_us}
