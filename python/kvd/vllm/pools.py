# SPDX-License-Identifier: Apache-2.0
"""vLLM's caches as views of a pool, and a request's blocks as pages of them.

A group of layers with one block table is one view: kv, kv1, … of full attention, swa<i> of a
sliding window, state<i> of a state-space model. An attention tensor is [block][head][token]
[K and V], whatever its strides: those are the layout. vLLM's CPU kernels interleave the
tokens of a block in an order of their own, so a view has whole blocks there, and a block
takes the place of a token."""
import math
from collections import namedtuple

import numpy as np

from .. import shards
from ..layout import Layout
from ..rooms import View

KINDS = ("kv", "swa", "state")


class Group(namedtuple("Group", "name kind tokens ratio grain window spec_blocks")):
    """tokens: of a block of the block table; ratio: pages that it takes; grain: of the
    request's tokens, one of the view's; window: 0 but for sliding windows; spec_blocks: of a
    state, slots behind the one that counts."""

    def _pages(self, blocks, first):
        """Blocks `first` and on of the table, as pages; the view's first token."""
        ids = np.asarray(blocks[first:], np.int64)
        if self.ratio > 1:
            ids = (ids[:, None] * self.ratio + np.arange(self.ratio)).ravel()
        return ids, first * self.tokens // self.grain

    def _view(self, blocks, begin, end):
        """Tokens [begin, end) of the request."""
        first = begin // self.tokens
        pages, at = self._pages(blocks[:-(-end // self.tokens)], first)
        return View(pages, at, (begin // self.grain, -(-end // self.grain)))

    def _state(self, blocks):
        blocks = list(blocks)
        scratch = min(self.spec_blocks, len(blocks) - 1)
        return View([blocks[len(blocks) - 1 - scratch]], 0, (0, 1)) if blocks else None

    def offered(self, blocks, end):
        """What a request of `end` tokens has; None: nothing. Block 0 stands for one that
        fell out of the window."""
        if self.kind == "state":
            return self._state(blocks)
        blocks = list(blocks)[:-(-end // self.tokens)]
        first = len(blocks)
        while first and blocks[first - 1]:
            first -= 1
        begin = first * self.tokens
        return self._view(blocks, begin, end) if begin < end else None

    def pushed(self, blocks, begin, end):
        """Tokens [begin, end) of a request, as far as they have not left the window."""
        blocks = list(blocks)[:-(-end // self.tokens)]
        first = begin // self.tokens
        for at in range(len(blocks) - 1, first - 1, -1):
            if not blocks[at]:
                begin = (at + 1) * self.tokens
                break
        return self._view(blocks, begin, end) if begin < end else None

    def wanted(self, blocks, begin, end):
        """What is missing of tokens [0, end), where [0, begin) is here; None: nothing."""
        if self.kind == "state":
            return self._state(blocks)
        if self.window:
            begin = max(begin, end + 1 - self.window)
        return self._view(blocks, begin, end) if begin < end else None


def refuse(words, *values):
    raise ValueError("kvd.vllm: " + words % values)


class Buffers:
    """A layout, and the memory behind it: (address, bytes) of each buffer."""

    def __init__(self, rank):
        self.layout, self.parts, self.groups = Layout(rank), [], []

    def add(self, group, blocks):
        """A group, and the pages of its view."""
        self.groups.append(group)
        state = group.kind == "state"
        self.layout.view(group.name, 1 if state else group.tokens // group.ratio // group.grain,
                         blocks * group.ratio)

    @property
    def grain(self):
        """Tokens that go together in all views."""
        return math.lcm(*(g.grain for g in self.groups if g and g.kind != "state"))

    def has_layers(self, view, begin, end):
        return any(begin <= layer < end for layer in self.layout.views[view]["layers"])

    def buffer(self, cache):
        """(index, offset of the tensor in it)."""
        storage = cache.untyped_storage()
        part = storage.data_ptr(), storage.nbytes()
        if part not in self.parts:
            self.parts.append(part)
            self.layout.buffer(part[1])
        return self.parts.index(part), cache.data_ptr() - part[0]


def attention(made, group, layer, cache, spec, heads, ranks, whole):
    """One layer's field. heads: of the model, None for MLA; whole: a block is a token."""
    size = cache.element_size()
    mla = heads is None
    index, offset = made.buffer(cache)
    if cache.dim() == 1:  # bytes of a tensor that layers of several kinds share
        page = spec.page_size_bytes // group.ratio
        units = 1 if mla else spec.num_kv_heads
        strides, shape = (page, page // units, 0), (0, units, 0, page // units)
        if not whole:
            refuse("a cache without dimensions is only known on the CPU")
    else:
        if cache.dim() != (3 if mla else 4):
            refuse("a cache of shape %s is not known: [blocks, heads, tokens, K and V] or "
                   "[blocks, tokens, latent]", tuple(cache.shape))
        shape = (cache.shape[0],) + ((1,) if mla else ()) + tuple(cache.shape[1:])
        strides = [s * size for s in cache.stride()]
        strides = strides[:1] + ([0] if mla else []) + strides[1:]
        if cache.stride(-1) != 1 or whole and strides[2] != shape[3] * size:
            refuse("a cache with strides %s is not known", tuple(cache.stride()))
        shape = shape[:3] + (shape[3] * size * (shape[2] if whole else 1),)
    units, unit = shape[1], shape[3]
    first, mine, total = 0, 1, 1
    if not mla:
        total = heads
        first, mine = shards.units(heads, ranks.size, ranks.rank)
    if mine != units:
        refuse("a cache of %d heads where %d are expected (%d over %d ranks)", units, mine,
               heads or 1, ranks.size)
    layers = made.layout.views[group.name]["layers"]
    name = "kv" if layer not in layers else "kv%d" % len(layers[layer])
    token = strides[0] if whole else strides[2]
    made.layout.field(group.name, layer, name, buffer=index, offset=offset,
                      page_stride=strides[0], token_stride=token,
                      unit_stride=strides[1] or unit, unit_bytes=unit, units=units,
                      first_unit=first, total_units=total, format=format_of(cache, group))


def format_of(cache, group):
    """Of bytes that may not be taken for each other."""
    kind = str(cache.dtype).rsplit(".", 1)[-1][:9]
    return "%s/%d" % (kind, group.grain) if group.grain > 1 else kind


def state(made, group, layer, cache, spec, split, ranks):
    """Conv state, by its projections, then the temporal one."""
    index, offset = made.buffer(cache)
    page = spec.page_size_bytes
    shape, size = spec.shapes[1], spec.dtypes[1].itemsize
    inner = size * int(np.prod(shape[1:]))
    fields = [("conv%d" % i, dims, split.conv_rows * split.conv_dtype_size)
              for i, dims in enumerate(split.local_proj_dims)]
    at = 0
    for name, units, unit in fields + [("ssm", shape[0], inner)]:
        if name == "ssm":
            at = split.ssm_sizes[0]
        made.layout.field(group.name, layer, name, buffer=index, offset=offset + at,
                          page_stride=page, token_stride=page, unit_stride=unit,
                          unit_bytes=unit, units=units, first_unit=ranks.rank * units,
                          total_units=ranks.size * units)
        at += units * unit
