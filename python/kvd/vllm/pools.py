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
from ..layout import Layout, format_of
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
        """What a request of `end` tokens has; None: nothing."""
        return self._state(blocks) if self.kind == "state" else self.pushed(blocks, 0, end)

    def pushed(self, blocks, begin, end):
        """Tokens [begin, end) of a request, as far as they have not left the window: block 0
        stands for one that did."""
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


def unlike(there, here):
    """Why prefill's groups, {view: layers}, cannot serve these; None: they can."""
    for name, layers in here.items():
        if set(layers) - set(there.get(name, ())):
            return "its group %s has layers %s, here %s: are the models and options the same? " \
                "Hybrid models may want --pipeline-parallel-size 1 on prefill" % (
                    name, sorted(there.get(name, ())), layers)
    return None


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

    def layers(self):
        """{view: its layers}, of all groups."""
        return {g.name: sorted(self.layout.views[g.name]["layers"]) for g in self.groups if g}

    def buffer(self, cache):
        """(index, offset of the tensor in it)."""
        storage = cache.untyped_storage()
        part = storage.data_ptr(), storage.nbytes()
        if part not in self.parts:
            self.parts.append(part)
            self.layout.buffer(part[1])
        return self.parts.index(part), cache.data_ptr() - part[0]


def attention(made, group, layer, cache, spec, heads, ranks, whole, dtype):
    """One layer's fields. heads: of the model, None for MLA; whole: a block is a token;
    dtype: of the cache, "auto": the tensor's."""
    size, mla = cache.element_size(), heads is None
    index, offset = made.buffer(cache)
    if cache.dim() != 4 or cache.shape[2] * group.ratio != group.tokens:
        refuse("a cache of shape %s is not known: [blocks, heads, tokens of %d, K and V]",
               tuple(cache.shape), group.tokens)
    page, unit, token, _ = [stride * size for stride in cache.stride()]
    units, tokens, content = cache.shape[1], cache.shape[2], cache.shape[3] * size
    if cache.stride(3) != 1 or whole and token != content:
        refuse("a cache with strides %s is not known", tuple(cache.stride()))
    first, mine, total = (0, 1, 1) if mla else \
        (*shards.units(heads, ranks.size, ranks.rank), heads)
    if mine != units:
        refuse("a cache of %d heads where %d are expected (%d over %d ranks)", units, mine,
               total, ranks.size)
    if whole:
        parts, token = [("kv", content * tokens)], page
    else:
        parts = contents(mla, content, spec, size)
    same = sum(f["name"].startswith(parts[0][0])
               for f in made.layout.views[group.name]["layers"].get(layer, ()))
    for name, nbytes in parts:
        made.layout.field(group.name, layer, name + str(same or ""), buffer=index,
                          offset=offset, page_stride=page, token_stride=token,
                          unit_stride=unit or nbytes, unit_bytes=nbytes, units=units,
                          first_unit=first, total_units=total,
                          format=format_name(cache, group, dtype))
        offset += nbytes


def contents(mla, content, spec, size):
    """[(name, bytes)] of a token's and head's bytes. K and V are fields of their own where
    they are all of it: other engines have them apart."""
    if mla:
        return [("latent", content)]
    k, v = spec.head_size * size, spec.head_size_v * size
    return [("k", k), ("v", v)] if k + v == content else [("kv", content)]


def format_name(cache, group, dtype):
    """Of bytes that may not be taken for each other."""
    if dtype == "auto" or cache.element_size() > 1:
        dtype = cache.dtype
    return format_of(dtype) if group.grain == 1 else \
        "%s/%d" % (format_of(dtype)[:10], group.grain)


def state(made, group, layer, cache, spec, split, ranks, groups):
    """Conv state, by its projections, then the temporal one. groups: of the model's B and C
    (Mamba2), None: it has none. Where it is one, each rank has it."""
    index, offset = made.buffer(cache)
    page = cache.stride(0) * cache.element_size()
    shape, size = spec.shapes[1], spec.dtypes[1].itemsize
    inner = size * int(np.prod(shape[1:]))
    fields = [("conv%d" % i, dims, split.conv_rows * split.conv_dtype_size)
              for i, dims in enumerate(split.local_proj_dims)]
    at = 0
    for name, units, unit in fields + [("ssm", shape[0], inner)]:
        if name == "ssm":
            at = split.ssm_sizes[0]
        every = groups == 1 and name in ("conv1", "conv2")
        made.layout.field(group.name, layer, name, buffer=index, offset=offset + at,
                          page_stride=page, token_stride=page, unit_stride=unit,
                          unit_bytes=unit, units=units,
                          first_unit=0 if every else ranks.rank * units,
                          total_units=units if every else ranks.size * units)
        at += units * unit
