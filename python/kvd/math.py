# SPDX-License-Identifier: Apache-2.0
"""Attention of an engine's own tokens on a CPU, in place and with the logarithm that merges it
with attention elsewhere: the daemon's kernels in this process.

    cache = Cache(kv, dv=128)         # once a layer; a tensor [pages, heads, tokens, 256]
    batch = Batch(queries=[1, 40], page_counts=[2, 3], pages=[7, 9, 4, 1, 2], lengths=[20, 40])
    o, lse = attend(q, cache, batch, scale=128 ** -0.5)

    merge(o, lse, (seat_o, seat_m, seat_l))    # with attention to other tokens

For each query token and head, lse is the natural logarithm of the sum of exp(score), and o is
normalised: parts with (o1, lse1) and (o2, lse2) have o = (o1 * exp(lse1) + o2 * exp(lse2)) /
(exp(lse1) + exp(lse2)). A query token that attends to no token has o = 0 and lse = -inf.

Arrays are torch tensors of a CPU, numpy arrays or anything with __dlpack__; they are not copied.
Only the tokens that a query token attends to are read. Sums are fp32; with AVX512-BF16 and
AMX (bf16 q and cache) weights are rounded to bf16. Errors: TypeError for another type, ValueError for a value outside its
limits, which the text names."""
import sys

import numpy as np

from . import _check, _kvd

QUERIES_MAX = 1 << 24
HEADS_MAX = 4096
DIMS_MAX = 1024
THREADS_MAX = 64
_TYPES = {"bfloat16": 0, "uint16": 0, "float16": 1, "float32": 2,
          "float8_e4m3fn": 3, "uint8": 3}
_BYTES = (2, 2, 4, 1)
_kinds = {}  # {dtype of torch or numpy: number in _TYPES}, of those used so far


def _kind(name, dtype):
    kind = _kinds.get(dtype)
    if kind is None:
        text = str(dtype)  # numpy's, of the other byte order: ">f4"
        text = text[len("torch."):] if text.startswith("torch.") else text
        if text not in _TYPES:
            raise ValueError("%s: %s; use bfloat16 (or uint16 of its bits), float16, float32 or "
                             "float8_e4m3fn (or uint8)" % (name, text))
        kind = _kinds[dtype] = _TYPES[text]
    return kind


def _array(name, thing, ndim, gaps=False):
    """(owner, address, type, shape, strides in bytes) of an array of `ndim` (a tuple) dimensions
    whose last one is contiguous, or has gaps."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        if thing.device.type != "cpu":
            raise ValueError("%s: a tensor on %s; the kernels are a CPU's" % (name, thing.device))
        size, shape = thing.element_size(), tuple(thing.shape)
        strides = tuple(n * size for n in thing.stride())
        address = thing.data_ptr()
    else:
        if not isinstance(thing, np.ndarray):
            if not hasattr(thing, "__dlpack__"):
                raise _check.wrong(name, thing, "a tensor, a numpy array or one with __dlpack__")
            thing = np.from_dlpack(thing)
        size, shape, strides = thing.itemsize, thing.shape, thing.strides
        address = thing.__array_interface__["data"][0]
    kind = _kind(name, thing.dtype)
    if len(shape) not in ndim:
        raise ValueError("%s: %d dimensions, not %s" % (name, len(shape),
                                                        " or ".join(map(str, ndim))))
    if 0 in shape:
        strides = (0,) * len(shape)  # numpy and torch have different ones
    elif shape[-1] > 1 and strides[-1] != size and not gaps:
        raise ValueError("%s: values are %d bytes apart, not %d" % (name, strides[-1], size))
    if min(strides) < 0:
        raise ValueError("%s: strides %s; none may be negative" % (name, strides))
    return thing, address, kind, shape, strides


def isas():
    """Names of the kernels that this process can run, from the slowest on."""
    return _kvd.math_isas()


def _scales(name, thing, kind, shape):
    """(owner, (address, strides of a page, a token and a head)) of fp8's scales; None: none."""
    if thing is None:
        return None, (0, 0, 0, 0)
    if kind != _TYPES["uint8"]:
        raise ValueError("%s: kv is not fp8" % name)
    dtype = str(getattr(thing, "dtype", "float32"))  # DLPack alone has none
    if dtype.rsplit(".", 1)[-1] != "float32":
        raise ValueError("%s: %s, not float32" % (name, dtype))
    thing, at, found, have, strides = _array(name, thing, (len(shape),), gaps=True)
    if found != _TYPES["float32"]:
        raise ValueError("%s: an array of another type, not float32" % name)
    if have != shape:
        raise ValueError("%s: its shape %s is not kv's %s" % (name, have, shape))
    return thing, (at, strides[0], strides[-1], strides[1] if len(shape) == 3 else 0)


class Cache:
    """KV of one layer, in place and kept alive. The engine may write to it between calls.

    kv: [pages, heads, tokens of a page, values], and of a token and head first K, then V, which is
    the last dv values. v: V, with kv's shape but for the last dimension; then kv is K alone. With
    three dimensions, [pages, tokens of a page, values], it is a latent cache (MLA): all heads
    share a row, all of it is K, and V is its first dv values (DeepSeek: 512 of 576).

    bf16, fp16, fp32 or fp8 (e4m3); K and V: multiples of 16 values, at most 1024. In memory
    dimensions may be in any order but for the last one.

    k_scale, v_scale: of fp8, float32 [pages, heads, tokens of a page] in any memory order, at
    any distances: K and V of a token and head are multiplied by theirs. MLA: k_scale alone, [pages,
    tokens of a page], for both. vLLM's fp8_per_token_head has a head's as [K, its scale, V, its
    scale]. One for all heads of a token is an array expanded over heads. Like K and V, they may
    have any value: a NaN is a NaN in the rows that attend to the token. Scales of a tensor or of a
    head are the caller's: multiply q by K's, and o by V's."""

    __slots__ = ("mla", "pages", "heads", "page_tokens", "dqk", "dv", "_packed", "_keep",
                 "_places")

    def __init__(self, kv, dv, *, v=None, k_scale=None, v_scale=None):
        kv, at, kind, shape, strides = _array("kv", kv, (3, 4) if v is None else (4,))
        self.mla = len(shape) == 3
        if self.mla and v_scale is not None:
            raise ValueError("v_scale: a latent cache has k_scale alone, for both")
        scales = [_scales("k_scale", k_scale, kind, shape[:-1])]
        scales.append(scales[0] if self.mla else _scales("v_scale", v_scale, kind, shape[:-1]))
        if self.mla:
            shape, strides = (shape[0], 1) + shape[1:], (strides[0], 0) + strides[1:]
        self.pages, self.heads, self.page_tokens = (
            _check.integer("kv.shape[%d]" % i, n, 1, high) for i, (n, high) in
            enumerate(zip(shape, (_check.U32, HEADS_MAX, _check.U32))))
        dv = _check.integer("dv", dv, 1, DIMS_MAX)
        dqk = shape[3] if self.mla or v is not None else shape[3] - dv
        self.dqk, self.dv = _check.integer("values of K", dqk, 1, DIMS_MAX), dv
        at_v, strides_v = at + dqk * _BYTES[kind], strides
        if v is not None:
            v, at_v, kind_v, shape_v, strides_v = _array("v", v, (4,))
            if (kind_v, shape_v) != (kind, shape[:3] + (dv,)):
                raise ValueError("v: its type or its shape %s do not fit kv's %s and dv %d"
                                 % (shape_v, shape, dv))
        self._packed = (not self.mla, kind, self.heads, dqk, dv, self.pages, self.page_tokens,
                        *((a, s[0], s[2], s[1]) for a, s in ((at, strides), (at_v, strides_v))),
                        *(scale[1] for scale in scales))
        self._keep = kv, v, scales
        self._places = [(tensor, address) for tensor, address in
                        ((kv, at), (v, at_v), *((s, place[0]) for s, place in scales))
                        if hasattr(tensor, "data_ptr")]

    def _check_place(self):
        """Tensors of torch may be given up, and others may get their memory."""
        if any(tensor.data_ptr() != address for tensor, address in self._places):
            raise ValueError("cache: its tensor has other memory now; make a new Cache")


class Batch:
    """Query tokens of requests, and the pages of each request's own KV.

    queries: query tokens of each request. page_counts: pages of each. pages: their numbers in the
    cache, one request's behind the other's; in this order they hold its tokens.

    Either lengths: how many tokens each request has there, its query tokens included, of which
    each attends to itself and those before it; or ends: to how many first tokens each query token
    attends, 0: none. Lists or arrays of numbers, which are copied: one batch serves all layers."""

    __slots__ = ("tokens", "_packed")

    def __init__(self, queries, page_counts, pages, *, lengths=None, ends=None):
        packed = [_check.u32s(name, value) for name, value in (
            ("queries", queries), ("page_counts", page_counts), ("pages", pages))]
        counts = np.frombuffer(packed[0], np.uint32).astype(np.int64)
        if len(packed[1]) != len(packed[0]):
            raise ValueError("page_counts: %d numbers for %d requests"
                             % (len(packed[1]) // 4, len(counts)))
        self.tokens = _check.integer("sum of queries", counts.sum(), 0, QUERIES_MAX)
        if (lengths is None) == (ends is None):
            raise TypeError("lengths, ends: give one of them")
        if ends is None:
            ends = self._causal(counts, _check.u32s("lengths", lengths))
        packed.append(_check.u32s("ends", ends))
        if len(packed[3]) != 4 * self.tokens:
            raise ValueError("ends: %d numbers for %d query tokens"
                             % (len(packed[3]) // 4, self.tokens))
        self._packed = tuple(packed)

    def _causal(self, counts, lengths):
        lengths = np.frombuffer(lengths, np.uint32).astype(np.int64)
        if len(lengths) != len(counts):
            raise ValueError("lengths: %d numbers for %d requests" % (len(lengths), len(counts)))
        for i in np.flatnonzero(lengths < counts)[:1]:
            raise ValueError("lengths[%d]: %d tokens, fewer than its %d query tokens"
                             % (i, lengths[i], counts[i]))
        return np.repeat(lengths - np.cumsum(counts), counts) + np.arange(1, self.tokens + 1)


def _floats(name, thing, shape, writable=True):
    """(array, its address), float32 and contiguous, of this shape."""
    thing, address, kind, have, strides = _array(name, thing, (len(shape),))
    dense, size = True, 4
    for count, stride in zip(reversed(have), reversed(strides)):
        dense, size = dense and (count < 2 or stride == size), size * count
    if kind != 2 or have != shape or not (dense or size == 0):
        raise ValueError("%s: not a contiguous float32 array of shape %s" % (name, shape))
    if writable and isinstance(thing, np.ndarray) and not thing.flags.writeable:
        raise ValueError("%s: read-only" % name)
    return thing, address


def attend(q, cache, batch, *, scale, softcap=0.0, isa="auto", threads=1, out=None):
    """Attention of the query tokens of a batch to their pages. -> (o [tokens, heads, dv], lse
    [tokens, heads]), float32: numpy arrays, or `out`, a pair of contiguous ones.

    q: [tokens, heads, values of K]; query tokens may be at any distance. Query heads: a multiple
    of the cache's, which consecutive ones share. scale: of scores; softcap: cap * tanh(score /
    cap), 0: none. isa: one of isas(), "auto": the fastest.

    Runs without the GIL, in the calling thread. threads: how many at most, if the call is long
    enough; the others are started for it, on the processors that the calling thread may use. With
    any number of them a query token has the same bits."""
    _check.instance("cache", cache, Cache, "a kvd.math.Cache")
    _check.instance("batch", batch, Batch, "a kvd.math.Batch")
    keep, at, kind, shape, strides = _array("q", q, (3,))
    tokens, heads, dqk = shape
    _check.integer("q.shape[0]", tokens, batch.tokens, batch.tokens)
    _check.integer("q.shape[1]", heads, 1, HEADS_MAX)
    _check.integer("q.shape[2]", dqk, cache.dqk, cache.dqk)
    if heads > 1 and tokens and strides[1] != dqk * _BYTES[kind]:
        raise ValueError("q: heads are %d bytes apart, not %d" % (strides[1], dqk * _BYTES[kind]))
    if out is None:
        out = np.empty((tokens, heads, cache.dv), np.float32), np.empty((tokens, heads), np.float32)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise ValueError("out: a pair (o, lse), not %s" % _check.came(out))
    o = _floats("out[0]", out[0], (tokens, heads, cache.dv))
    lse = _floats("out[1]", out[1], (tokens, heads))
    cache._check_place()
    _kvd.math_attend((at, kind, tokens, heads, strides[0], o[1], lse[1]), cache._packed,
                     batch._packed,
                     _check.number("scale", scale), _check.number("softcap", softcap),
                     _check.instance("isa", isa, str, "a str"),
                     _check.integer("threads", threads, 1, THREADS_MAX))
    del keep
    return out


def merge(o, lse, there, *, at=None):
    """Merge the results of attend(), in place, with attention of the same rows to other tokens:
    there, as kvd.Attend returns it: (o [rows, dv], m [rows], l [rows]), of which row t * heads + h
    is of head h. at: numbers of the query tokens; None: all, in order. Bits are the same in both
    orders, and a row whose l is 0 changes none."""
    shape = _array("o", o, (3,))[3]
    tokens, heads, dv = shape
    o = _floats("o", o, shape)
    lse = _floats("lse", lse, shape[:2])
    numbers = np.arange(tokens, dtype=np.uint32).tobytes() if at is None else _check.u32s("at", at)
    rows = len(numbers) // 4 * heads
    if not isinstance(there, (tuple, list)) or len(there) != 3:
        raise ValueError("there: (o, m, l), not %s" % _check.came(there))
    parts = [_floats("there[%d]" % i, part, (rows, dv)[:1 + (i == 0)], writable=False)
             for i, part in enumerate(there)]
    _kvd.math_merge(o[1], lse[1], tokens, _check.integer("o.shape[1]", heads, 0, HEADS_MAX),
                    _check.integer("o.shape[2]", dv, 0, DIMS_MAX), numbers,
                    *(part[1] for part in parts))
