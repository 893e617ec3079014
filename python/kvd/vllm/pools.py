# SPDX-License-Identifier: Apache-2.0
"""vLLM's caches as views of a pool, and a request's blocks as pages of them.

A group of layers with one block table is one view: kv, kv1, … of full attention, swa<i> of a
sliding window, state<i> of a state-space model. An attention tensor is [block][head][token]
[K and V], with any strides: those are the layout.

Shape and strides do not show whether the bytes inside a block are in that order: the index of
sparse attention has all values of a block before all scales, vLLM's CPU kernels interleave the
tokens. Only the backends and modes listed here are known to keep rows of tokens. A view of any
other cache has whole blocks, in place of tokens, in a format that names their writer: release,
backend, instruction set, mode."""
import hashlib
import math
from collections import namedtuple

import numpy as np

from .. import shards
from ..layout import Layout, format_of
from ..rooms import View

KINDS = ("kv", "swa", "state")
OWN = "KVD"  # kvd's own backends (route_cpu.py)
# Backends that keep each token's K and V of a head, or its latent, contiguous.
ROWS = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER",
        "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90",
        "FLASHINFER_MLA_SPARSE_SM120", "FLASHMLA", "FLASHMLA_SPARSE", "FLEX_ATTENTION",
        "CUTLASS_MLA", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_MLA", "TOKENSPEED_MLA",
        "CPU_MLA", OWN)
HEADS = ("CPU_ATTN",)  # those that keep each head of a block contiguous
# Quantization modes whose scales, if any, are in a token's row, or are not part of the cache.
ROW_MODES = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD",
             "INT4_PER_TOKEN_HEAD", "TURBOQUANT_K8V4", "TURBOQUANT_4BIT_NC", "TURBOQUANT_K3V4_NC",
             "TURBOQUANT_3BIT_NC", "ULTRAQUANT_4BIT", "NVFP4_DS_MLA")
PAGE_MODES = ("NVFP4",)  # those whose scales are elsewhere in the block


class Group(namedtuple("Group", "name kind tokens ratio grain window spec_blocks")):
    """tokens: of a block of the block table; ratio: number of pages per block; grain: tokens of the
    request per token of the view; window: 0 except for sliding windows; spec_blocks: of a state,
    slots after the valid one."""

    def _pages(self, blocks, first):
        """The table's blocks from `first` on, as pages; the view's first token."""
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
        """Pages of a request of `end` tokens; None: none."""
        return self._state(blocks) if self.kind == "state" else self.pushed(blocks, 0, end)

    def pushed(self, blocks, begin, end):
        """Tokens [begin, end) of a request that are in the window: block 0 stands for one that is
        not."""
        blocks = list(blocks)[:-(-end // self.tokens)]
        first = begin // self.tokens
        for at in range(len(blocks) - 1, first - 1, -1):
            if not blocks[at]:
                begin = (at + 1) * self.tokens
                break
        return self._view(blocks, begin, end) if begin < end else None

    def wanted(self, blocks, begin, end):
        """The missing part of tokens [0, end), if [0, begin) is here; None: none."""
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
        """Alignment, in tokens, common to all views."""
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


def author_of(backend, spec, *words):
    """A text that names the writer of a layer's blocks; None: they are rows of tokens. words: other
    options that decide the order of their bytes."""
    mode = spec.kv_quant_mode.name
    if mode not in ROW_MODES + PAGE_MODES:
        refuse("a cache of mode %s is not supported (%s); choose another --kv-cache-dtype", mode,
               ", ".join(ROW_MODES + PAGE_MODES).lower())
    if spec.tokens_per_state != 1:
        refuse("a cache of %s tokens per state is not supported: use NixlConnector on kvd",
               spec.tokens_per_state)
    if backend in ROWS and mode in ROW_MODES and not indexes(spec) and not any(words):
        return None
    return " ".join(str(word) for word in (backend, mode, *words) if word)


def indexes(spec):
    """Whether it belongs to the index by which sparse attention selects tokens."""
    return getattr(getattr(spec, "cache_role", None), "name", "") == "INDEXER"


def attention(made, group, layer, cache, spec, heads, ranks, author, dtype):
    """One layer's fields. heads: of the model, None for MLA; author: author_of(); dtype: of the
    cache, "auto": the tensor's."""
    size, mla = cache.element_size(), heads is None
    index, offset = made.buffer(cache)
    if cache.dim() != 4 or cache.shape[2] * group.ratio != group.tokens:
        refuse("a cache of shape %s is not supported, only [blocks, heads, tokens of %d, K and V]",
               tuple(cache.shape), group.tokens)
    if group.grain == 1 and (author or indexes(spec)):
        refuse("layer %d: blocks of %s are not rows of tokens", layer, author or "an index")
    page, unit, token, _ = [stride * size for stride in cache.stride()]
    units, tokens, content = cache.shape[1], cache.shape[2], cache.shape[3] * size
    apart = group.grain == 1 or author is not None and author.split()[0] in HEADS
    if cache.stride(3) != 1 or group.grain > 1 and not dense(cache, 2 if apart else 1):
        refuse("a cache with strides %s is not supported", tuple(cache.stride()))
    first, mine, total = (0, 1, 1) if mla else \
        (*shards.units(heads, ranks.size, ranks.rank), heads)
    if apart and mine != units:
        refuse("a cache of %d heads instead of %d (%d over %d ranks)", units, mine,
               total, ranks.size)
    if group.grain == 1:
        parts = contents(mla, content, spec, size)
    elif apart:
        parts, token = [("kv", content * tokens)], page
    else:  # the rank's whole block
        parts, token, unit = [("block", content * tokens * units)], page, page
        first, units, total = (0, 1, 1) if mla else (ranks.rank, 1, ranks.size)
    same = sum(f["name"].startswith(parts[0][0])
               for f in made.layout.views[group.name]["layers"].get(layer, ()))
    for name, nbytes in parts:
        made.layout.field(group.name, layer, name + str(same or ""), buffer=index,
                          offset=offset, page_stride=page, token_stride=token,
                          unit_stride=unit or nbytes, unit_bytes=nbytes, units=units,
                          first_unit=first, total_units=total,
                          format=format_name(cache, group, dtype, author))
        offset += nbytes


def dense(cache, first):
    """Whether dimensions `first` and on of a block are contiguous memory, in any order."""
    width = 1
    for stride, count in sorted((cache.stride(i), cache.shape[i]) for i in range(first, 4)
                                if cache.shape[i] > 1):
        if stride != width:
            return False
        width *= count
    return True


def contents(mla, content, spec, size):
    """[(name, bytes)] of a token's and head's bytes. K and V are separate fields if there are no
    other bytes: other engines store them separately."""
    if mla:
        return [("latent", content)]
    k, v = spec.head_size * size, spec.head_size_v * size
    return [("k", k), ("v", v)] if k + v == content else [("kv", content)]


def format_name(cache, group, dtype, author=None):
    """Format of bytes that must not be mistaken for others."""
    if dtype == "auto" or cache.element_size() > 1:
        dtype = cache.dtype
    if group.grain == 1:
        return format_of(dtype)
    words = "%s %s %d" % (author, dtype, group.grain)
    return "vllm-" + hashlib.sha256(words.encode()).hexdigest()[:10]


def state(made, group, layer, cache, spec, split, ranks, groups):
    """Conv state, by its projections, then the temporal one. groups: of the model's B and C
    (Mamba2), None: it has none. A single group is on each rank."""
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
