# SPDX-License-Identifier: Apache-2.0
"""kvd.math against numpy in float64. Whatever a query token does not attend to is NaN."""
import ctypes
import functools
import math
import mmap
import os
import re
import sys
import threading

import numpy as np
import pytest

from kvd import math as kvd_math
from kvd.math import Batch, Cache, attend

ISAS = ("ref", "vector", "avx2", "avx512", "avx512_bf16", "amx", "auto")
NAN = {np.uint8: 0x7f, np.uint16: 0x7fc1, np.float16: np.nan, np.float32: np.nan}


# of fp8: sign, four bits of exponent, three
CODES = np.arange(256)
E4M3 = np.where(CODES & 0x80, -1.0, 1.0) * np.where(
    CODES & 0x78, (8 + (CODES & 7)) * 2.0 ** ((CODES >> 3 & 15) - 10), (CODES & 7) * 2.0 ** -9)
E4M3[[0x7f, 0xff]] = np.nan


def narrow(values, kind):
    """As the cache has them: bf16 as uint16, rounded to nearest; fp8 as uint8, any near one."""
    values = values.astype(np.float32)
    if kind is np.uint8:
        at = np.searchsorted(E4M3[:0x7f], np.abs(values)).clip(max=0x7e)
        return (at | (values < 0) << 7).astype(np.uint8)
    if kind is not np.uint16:
        return values.astype(kind)
    bits = values.view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(values):
    """In float64."""
    if values.dtype == np.uint8:
        return E4M3[values]
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class Case:
    """Requests (query tokens, tokens with these) whose pages are scattered over a cache."""

    def __init__(self, requests, *, mla=False, kind=np.float32, q_kind=None, heads=8, kv_heads=4,
                 dqk=64, dv=32, page_tokens=16, ends=None, spare=1, seed=1, scaled=False):
        self.rng = rng = np.random.default_rng(seed)
        self.mla, self.heads, self.dqk, self.dv = mla, heads, dqk, dv
        self.kv_heads, self.page_tokens = 1 if mla else kv_heads, page_tokens
        self.requests = requests
        counts = [-(-length // page_tokens) + spare for _, length in requests]
        pages = rng.permutation(sum(counts) + 3)[:sum(counts)]
        values = dqk if mla else dqk + dv
        self.kv = np.full((sum(counts) + 3, self.kv_heads, page_tokens, values), NAN[kind], kind)
        self.tables = np.split(pages, np.cumsum(counts)[:-1])
        self.scales = [np.full(self.kv.shape[:3], np.nan if scaled else 1, np.float32)
                       for _ in range(2)]  # of K and V
        self.scaled = scaled
        for (_, length), table in zip(requests, self.tables):
            at = np.arange(length)
            self.kv[table[at // page_tokens], :, at % page_tokens] = narrow(
                rng.standard_normal((length, self.kv_heads, values)), kind)
            for scales in self.scales if scaled else ():
                scales[table[at // page_tokens], :, at % page_tokens] = rng.uniform(
                    0.2, 1.2, (length, self.kv_heads)) * rng.choice([-1, 1, 1], (length, 1))
        if mla:
            self.scales[1] = self.scales[0]
        queries = [n for n, _ in requests]
        self.q = narrow(rng.standard_normal((sum(queries), heads, dqk)), q_kind or kind)
        lengths = [length for _, length in requests]
        self.ends = [length - n + i + 1 for n, length in requests for i in range(n)] \
            if ends is None else ends
        self.batch = Batch(queries, counts, pages, lengths=lengths) if ends is None else \
            Batch(queries, counts, pages, ends=ends)
        self.cache = self.cache_of(self.kv)
        self.scale, self.softcap = dqk ** -0.5, 0.0

    def cache_of(self, kv):
        if not self.scaled:
            return Cache(kv[:, 0] if self.mla else kv, self.dv)
        k, v = self.scales
        return Cache(kv[:, 0], self.dv, k_scale=k[:, 0]) if self.mla else \
            Cache(kv, self.dv, k_scale=k, v_scale=v)

    def run(self, cache=None, **how):
        return attend(self.q, cache or self.cache, self.batch, scale=self.scale,
                      softcap=self.softcap, **how)

    @functools.lru_cache(1)
    def wanted(self):
        """o and lse in float64; nothing but each token's first ones is read."""
        owner = [i for i, (n, _) in enumerate(self.requests) for _ in range(n)]
        o = np.zeros(self.q.shape[:2] + (self.dv,))
        lse = np.full(self.q.shape[:2], -np.inf)
        for t, (q, end, request) in enumerate(zip(wide(self.q), self.ends, owner)):
            if not end:
                continue
            def rows(array):
                array = wide(array[self.tables[request]]).swapaxes(0, 1).reshape(
                    self.kv_heads, -1, array.shape[3])[:, :end]
                return np.repeat(array, self.heads // self.kv_heads, 0)

            kv = rows(self.kv)
            k_scale, v_scale = (rows(scales[..., None]) for scales in self.scales)
            k = kv[:, :, :self.dqk] * k_scale
            v = (kv[:, :, :self.dv] if self.mla else kv[:, :, self.dqk:]) * v_scale
            score = np.float64(np.float32(self.scale)) * np.einsum("hd,htd->ht", q, k)
            if self.softcap:
                score = self.softcap * np.tanh(score / self.softcap)
            most = score.max(1)
            weights = np.exp(score - most[:, None])
            lse[t] = most + np.log(weights.sum(1))
            o[t] = np.einsum("ht,htd->hd", weights, v) / weights.sum(1)[:, None]
        return o, lse

    def judge(self, got, *, rounded=False):
        """rounded: the kernels for products of bf16 have weights of 8 bits."""
        o, lse = self.wanted()
        assert got[0].dtype == got[1].dtype == np.float32
        empty = np.isneginf(lse)
        assert (np.isneginf(got[1]) == empty).all() and not got[0][empty].any()
        assert np.isfinite(got[0]).all()
        assert np.abs(got[0] - o).max(initial=0) < (2e-2 if rounded else 4e-6)
        assert np.abs(got[1][~empty] - lse[~empty]).max(initial=0) < 1e-5


def here(isa):
    if isa != "auto" and isa not in kvd_math.isas():
        pytest.skip("this machine or process has no %s" % isa)
    return isa


def rounds(isa, case):
    return isa in ("avx512_bf16", "amx", "auto") and case.q.dtype == case.kv.dtype == np.uint16


RAGGED = [(1, 1), (1, 300), (0, 40), (5, 5), (16, 40), (1, 16), (40, 77), (33, 500), (17, 17),
          (2, 33), (0, 0), (150, 150)]
TYPES = {"fp32": (np.float32, np.float32), "bf16": (np.uint16, np.uint16),
         "fp16": (np.float16, np.float16), "fp8": (np.uint8, np.uint8),
         "bf16 to fp8": (np.uint8, np.uint16), "fp32 to bf16": (np.uint16, np.float32),
         "bf16 to fp32": (np.float32, np.uint16)}


def test_kernels_of_this_machine():
    assert kvd_math.isas()[:2] == ("ref", "vector")
    assert set(kvd_math.isas()) <= set(ISAS)


SHAPES = {"gqa": dict(heads=8, kv_heads=4, dqk=64, dv=32), "mha": dict(heads=3, kv_heads=3),
          "mqa": dict(heads=9, kv_heads=1, dqk=48, dv=48),
          "mla": dict(mla=True, heads=5, dqk=96, dv=64),
          "wide mla": dict(mla=True, heads=16, dqk=576, dv=512)}


@functools.lru_cache(1)
def ragged(shape, types):
    kind, q_kind = TYPES[types]
    return Case(RAGGED[:7] if shape == "wide mla" else RAGGED, kind=kind, q_kind=q_kind,
                **SHAPES[shape])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_batches(shape, types, isa):
    case = ragged(shape, types)
    case.judge(case.run(isa=here(isa)), rounded=rounds(isa, case))


@pytest.mark.parametrize("isa", ISAS)
def test_query_tokens_end_anywhere(isa):
    """In any order, with none at all, on pages of any size."""
    for seed, page_tokens in enumerate((1, 7, 16, 64)):
        rng = np.random.default_rng(seed)
        requests = [(int(rng.integers(0, 50)), int(rng.integers(1, 200))) for _ in range(9)]
        ends = np.concatenate([rng.integers(0, length + 1, n) for n, length in requests])
        ends[rng.random(len(ends)) < 0.2] = 0
        case = Case(requests, ends=ends.tolist(), page_tokens=page_tokens, seed=seed)
        assert 0 in case.ends
        case.judge(case.run(isa=here(isa)))


def test_attention_over_no_tokens():
    case = Case([(3, 0), (1, 0)], ends=[0] * 4, spare=0)
    o, lse = case.run()
    assert not o.any() and np.isneginf(lse).all() and not np.signbit(o).any()
    empty = Batch([], [], [], lengths=[])
    o, lse = attend(case.q[:0], Case([(1, 1)]).cache, empty, scale=1)
    assert o.shape == (0, 8, 32) and lse.shape == (0, 8)


@pytest.mark.parametrize("heads", [1, 7, 64, 513, 1025, 4096])
def test_rows_fill_several_calls_of_the_kernel(heads):
    case = Case([(40, 60), (1, 9), (21, 21)], heads=heads, kv_heads=1, dqk=16, dv=16)
    case.judge(case.run())


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_and_scale(isa):
    case = Case([(20, 60), (1, 90)])
    case.softcap, case.scale = 1.5, -0.3
    case.judge(case.run(isa=here(isa)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_with_a_scale_for_each_token(shape, isa):
    case = Case(RAGGED[:7], kind=np.uint8, q_kind=np.uint16, scaled=True, **SHAPES[shape])
    case.judge(case.run(isa=here(isa)))


def test_scales_anywhere_in_memory_change_no_bit():
    """As vLLM has them behind K and V of a token and head, at odd addresses, and expanded."""
    case = Case(RAGGED, kind=np.uint8, q_kind=np.uint16, scaled=True)
    k, v = case.scales
    k[:] = k[:, :1]
    o, lse = case.run()
    packed = np.zeros(k.shape, [("", "u1"), ("k", "u1", case.dqk), ("k_scale", "f4"),
                                ("v", "u1", case.dv), ("v_scale", "f4")])
    packed["k"], packed["v"] = np.split(case.kv, [case.dqk], 3)
    packed["k_scale"], packed["v_scale"] = k, v
    for cache in (Cache(packed["k"], case.dv, v=packed["v"], k_scale=packed["k_scale"],
                        v_scale=packed["v_scale"]),
                  Cache(case.kv, case.dv, k_scale=np.broadcast_to(k[:, :1], k.shape),
                        v_scale=np.asfortranarray(v))):
        again = case.run(cache)
        assert (again[0] == o).all() and (again[1] == lse).all()


def test_a_scale_alone_is_of_k_or_of_v():
    case = Case([(3, 40)], kind=np.uint8, q_kind=np.uint16)
    o, lse = case.run()
    two = np.full(case.kv.shape[:3], 2, np.float32)
    got = case.run(Cache(case.kv, case.dv, v_scale=two))
    assert (got[0] == 2 * o).all() and (got[1] == lse).all()
    got = case.run(Cache(case.kv, case.dv, k_scale=two))
    case.scale *= 2
    want = case.run()
    assert (got[0] == want[0]).all() and (got[1] == want[1]).all()


def test_any_scale_is_a_number_or_a_nan_of_its_rows():
    case = Case([(1, 40), (1, 33)], kind=np.uint8, q_kind=np.uint16, scaled=True)
    o, _ = case.run()
    for scales in case.scales:
        for x in (np.nan, np.inf, -np.inf, 0, -1, 3e38):
            at = case.tables[1][0], 1, 9
            kept, scales[at] = scales[at], x
            got = case.run()[0]
            assert (got[0] == o[0]).all() and (got[1, [0, 1, 4, 5]] == o[1, [0, 1, 4, 5]]).all()
            assert np.isnan(got[1, 2:4]).all() or not np.isnan(x)
            scales[at] = kept


def test_scales_of_another_shape_or_type_are_refused():
    case = Case([(1, 40)], kind=np.uint8, q_kind=np.uint16)
    mla = Case([(1, 40)], mla=True, kind=np.uint8, q_kind=np.uint16)
    good = np.ones(case.kv.shape[:3], np.float32)
    for name in ("k_scale", "v_scale"):
        for scales, why in ((good[1:], "its shape"), (good[:, 0], "2 dimensions, not 3"),
                            (good.astype(np.float64), "float64, not float32"),
                            (good.astype(">f4"), ">f4, not float32"),
                            (Exporter(good.astype(np.float16)), "not float32"),
                            (good[..., ::-1], "negative")):
            with pytest.raises(ValueError, match="%s: .*%s" % (name, why)):
                Cache(case.kv, case.dv, **{name: scales})
        with pytest.raises(TypeError, match=name):
            Cache(case.kv, case.dv, **{name: 1.0})
        with pytest.raises(ValueError, match="%s: kv is not fp8" % name):
            Cache(case.kv.astype(np.float32), case.dv, **{name: good})
    with pytest.raises(ValueError, match="v_scale: a latent cache has k_scale alone"):
        Cache(mla.kv[:, 0], mla.dv, v_scale=np.ones(mla.kv[:, 0].shape[:2], np.float32))


def test_large_scores():
    """exp of none of them fits into fp32."""
    case = Case([(20, 60), (1, 90)])
    case.scale = 40.0
    o, lse = case.run()
    wanted = case.wanted()
    assert np.abs(lse).max() > 500 and np.allclose(lse, wanted[1], rtol=1e-6, atol=1e-3)
    assert np.abs(o - wanted[0]).max() < 1e-2


def layouts(kv):
    """The same pages in other memory."""
    yield np.ascontiguousarray(kv.swapaxes(1, 2)).swapaxes(1, 2)  # heads of a token adjacent
    padded = np.full(tuple(n + 1 for n in kv.shape), NAN[kv.dtype.type], kv.dtype)
    padded[:-1, :-1, :-1, :-1] = kv
    yield padded[:-1, :-1, :-1, :-1]
    yield np.ascontiguousarray(kv.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    odd = np.empty(kv.nbytes + 1, np.uint8)[1:].view(kv.dtype).reshape(kv.shape)
    odd[:] = kv
    yield odd


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_memory_order_changes_no_bit(kind, mla):
    case = Case(RAGGED, kind=kind, mla=mla)
    o, lse = case.run()
    caches = [case.cache_of(kv) for kv in layouts(case.kv)]
    if not mla:
        k, v = (np.ascontiguousarray(part) for part in np.split(case.kv, [case.dqk], 3))
        caches += [Cache(k, case.dv, v=v),
                   Cache(case.kv[..., :case.dqk], case.dv, v=case.kv[..., case.dqk:])]
    for cache in caches:
        again = case.run(cache)
        assert (again[0] == o).all() and (again[1] == lse).all()
    between = np.full((len(case.q), 3, case.heads, case.dqk), NAN[kind], kind)
    between[:, 1] = case.q
    again = attend(between[:, 1], case.cache, case.batch, scale=case.scale)
    assert (again[0] == o).all() and (again[1] == lse).all()


def test_other_requests_change_no_bit():
    case = Case(RAGGED)
    o, lse = case.run()
    first = 0
    for (n, length), table in zip(case.requests, case.tables):
        alone = attend(case.q[first:first + n], case.cache,
                       Batch([n], [len(table)], table, lengths=[length]), scale=case.scale)
        assert (alone[0] == o[first:first + n]).all() and (alone[1] == lse[first:first + n]).all()
        first += n


def test_nan_stays_in_its_rows():
    case = Case(RAGGED)
    wanted = case.run()
    case.q[7, 3, 5] = np.nan
    case.kv[case.tables[1][0], 2, 9] = np.nan  # of the second request, whose token is the second
    got = case.run()
    spoilt = np.zeros(got[1].shape, bool)
    spoilt[7, 3] = spoilt[1, 4:6] = True
    for have, want in zip(got, wanted):
        assert np.isnan(have[spoilt]).all() and (have[~spoilt] == want[~spoilt]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_memory_behind_the_last_token_is_not_read(kind, mla, isa):
    """It is not there: reading it would end the process. 19 tokens on a page of 19."""
    case = Case([(19, 19)], kind=kind, mla=mla, page_tokens=19, spare=0)
    page = mmap.PAGESIZE
    nbytes = -(-case.kv.nbytes // page) * page
    mapped = mmap.mmap(-1, nbytes + page)
    whole = np.frombuffer(mapped, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    guard = whole.ctypes.data + nbytes
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    kv = whole[nbytes - case.kv[:1].nbytes:nbytes].view(kind).reshape(case.kv[:1].shape)
    kv[:] = case.kv[case.tables[0]]
    case.batch = Batch([19], [1], [0], lengths=[19])
    got = attend(case.q, case.cache_of(kv), case.batch, scale=case.scale, isa=here(isa))
    case.judge(got, rounded=rounds(isa, case))


def test_results_go_where_out_says():
    case = Case(RAGGED)
    o, lse = case.run()
    space = np.full((len(case.q) + 2, case.heads, case.dv), np.nan, np.float32)
    out = space[1:-1], np.empty(lse.shape, np.float32)
    got = case.run(out=out)
    assert got[0] is out[0] and got[1] is out[1]
    assert (out[0] == o).all() and (out[1] == lse).all() and np.isnan(space[[0, -1]]).all()


class Exporter:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries():
    case = Case(RAGGED)
    o, lse = case.run()
    out = np.empty_like(o), np.empty_like(lse)
    attend(Exporter(case.q), Cache(Exporter(case.kv), case.dv), case.batch, scale=case.scale,
           out=tuple(map(Exporter, out)))
    assert (out[0] == o).all() and (out[1] == lse).all()


def test_tensors_of_torch():
    torch = pytest.importorskip("torch", reason="no torch")
    for kind in (np.float32, np.float16, np.uint16, np.uint8):
        case = Case(RAGGED, kind=kind, q_kind=np.uint16 if kind is np.uint8 else None)
        o, lse = case.run()
        q, kv = (torch.from_numpy(a.view(np.int16) if a.dtype == np.uint16 else a)
                 for a in (case.q, case.kv))
        q, kv = (t.view({torch.int16: torch.bfloat16, torch.uint8: torch.float8_e4m3fn}.get(
            t.dtype, t.dtype)) for t in (q, kv))
        kv = kv.transpose(1, 2).contiguous().transpose(1, 2)
        out = torch.empty(o.shape), torch.empty(lse.shape)
        attend(q, Cache(kv, case.dv), case.batch, scale=case.scale, out=out)
        assert (out[0].numpy() == o).all() and (out[1].numpy() == lse).all()
    cache = Cache(torch.zeros(5, 2, 16, 64), 32)
    cache._keep[0].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="^cache: its tensor has other memory"):
        attend(zeros(4, 4, 32), cache, Batch(**GOOD), scale=1)
    for tensor in (q.to("meta"), q.double(), q.to(torch.float8_e5m2)):
        with pytest.raises(ValueError, match="^q: "):
            attend(tensor, case.cache, case.batch, scale=1)


# ---- merging ----


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def halves(case, cut):
    """Attention to tokens [0, cut) of each request, and to those behind, as (o, m, l)."""
    ends = np.asarray(case.ends)
    queries, counts = [n for n, _ in case.requests], [len(table) for table in case.tables]
    near = Batch(queries, counts, np.concatenate(case.tables), ends=np.minimum(ends, cut))
    assert cut % case.page_tokens == 0
    skip = cut // case.page_tokens
    later = [table[skip:] for table in case.tables]
    far = Batch(queries, [len(table) for table in later], np.concatenate(later),
                ends=np.maximum(ends - cut, 0))
    o, lse = attend(case.q, case.cache, far, scale=case.scale)
    empty = np.isneginf(lse)
    there = [o.reshape(-1, case.dv), np.where(empty, np.nan, lse - 1).reshape(-1).astype("f4"),
             np.where(empty, 0, np.e).reshape(-1).astype("f4")]
    there[0][empty.reshape(-1)] = np.nan  # neither is read
    return attend(case.q, case.cache, near, scale=case.scale), there


def test_parts_are_merged():
    case = Case(RAGGED)
    for cut in (16, 32, 400):
        (o, lse), there = halves(case, cut)
        kvd_math.merge(o, lse, there)
        case.judge((o, lse))
    (o, lse), there = halves(case, 0)  # nothing here
    assert not o.any() and np.isneginf(lse).all()
    kvd_math.merge(o, lse, there)
    case.judge((o, lse))


def test_some_query_tokens_are_merged():
    """In any order; the others keep their bits."""
    case = Case(RAGGED)
    (o, lse), there = halves(case, 16)
    alone = o.copy(), lse.copy()
    whole = o.copy(), lse.copy()
    kvd_math.merge(*whole, there)
    at = np.random.default_rng(3).permutation(len(o))[:99]
    some = [np.ascontiguousarray(part.reshape(len(o), case.heads, -1)[at].reshape(
        (99 * case.heads,) + part.shape[1:])) for part in there]
    kvd_math.merge(o, lse, some, at=at)
    others = np.setdiff1d(np.arange(len(o)), at)
    for got, merged, before in zip((o, lse), whole, alone):
        assert (got[at] == merged[at]).all() and (got[others] == before[others]).all()


O, LSE = zeros(4, 4, 32), zeros(4, 4)


def merge(o=None, lse=None, there=None, **how):
    there = [zeros(16, 32), zeros(16), zeros(16)] if there is None else there
    kvd_math.merge(O if o is None else o, LSE if lse is None else lse, there, **how)


def test_merges_are_refused():
    merge()
    merge(there=(zeros(0, 32), zeros(0), zeros(0)), at=[])
    for wrong, error, words in (
            (dict(at=[0, 1, 2, 4]), ValueError, "at[3]: 4, but o has 4 query tokens"),
            (dict(at=[0, 1, 2, -1]), ValueError, "at[3]: -1"),
            (dict(at=[0]), ValueError, "there[0]: not a contiguous float32 array of shape (4, 32)"),
            (dict(o=zeros(4, 4, 64)[..., :32]), ValueError, "o: not a contiguous"),
            (dict(o=zeros(16, 32)), ValueError, "o: 2 dimensions, not 3"),
            (dict(lse=zeros(4, 3)), ValueError, "lse: not a contiguous float32 array of shape (4, 4)"),
            (dict(there=(zeros(16, 32), zeros(16))), ValueError, "there: (o, m, l), not"),
            (dict(there=(zeros(16, 32), zeros(16), zeros(15))), ValueError, "there[2]: not a"),
            (dict(there=(zeros(16, 16), zeros(16), zeros(16))), ValueError, "there[0]: not a"),
            (dict(lse=np.frombuffer(bytes(64), np.float32).reshape(4, 4)), ValueError,
             "lse: read-only")):
        with pytest.raises(error, match=re.escape(words)):
            merge(**wrong)


# ---- threads and forks ----


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_threads_change_no_bit(threads):
    case = Case([*RAGGED, (900, 900)])
    o, lse = case.run()
    for _ in range(5):
        got = case.run(threads=threads)
        assert (got[0] == o).all() and (got[1] == lse).all()


def test_callers_of_many_threads():
    cases = [Case(RAGGED, seed=seed, kind=kind) for seed, kind in
             enumerate((np.float32, np.uint16) * 4)]
    wanted = [case.run() for case in cases]
    wrong = []

    def caller(case, want):
        for i in range(20):
            got = case.run(threads=1 + i % 3)
            if not all((a == b).all() for a, b in zip(got, want)):
                wrong.append(case)
    threads = [threading.Thread(target=caller, args=pair) for pair in zip(cases, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_meanwhile():
    """No thread is interrupted here: this one can run again only when the other lets the
    interpreter go."""
    case = Case([(300, 3000)])
    begun, ended = threading.Event(), []

    def caller():
        begun.set()
        case.run()
        ended.append(True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=caller)
        thread.start()
        begun.wait()
        meanwhile = not ended
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert meanwhile and ended


def test_forks_compute():
    """Also while other threads are in the kernel."""
    case = Case(RAGGED)
    o, lse = case.run()
    stop = threading.Event()

    def caller():
        while not stop.is_set():
            case.run(threads=2)
    threads = [threading.Thread(target=caller) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                same = False
                try:
                    got = case.run(threads=2)
                    same = (got[0] == o).all() and (got[1] == lse).all()
                finally:
                    os._exit(0 if same else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# ---- arguments ----

GOOD = dict(queries=[1, 3], page_counts=[2, 1], pages=[4, 0, 2], lengths=[20, 5])
BATCHES = [
    (dict(queries=[1, -3]), ValueError, "queries[1]: -3"),
    (dict(queries=[1, 2 ** 32]), ValueError, "queries[1]: 4294967296"),
    (dict(queries=[2 ** 31, 2 ** 31]), ValueError, "sum of queries: 4294967296 is not in 0 to 16777216"),
    (dict(queries=[1.5, 3]), TypeError, "queries[0]: 1.5"),
    (dict(queries=[[1, 3]]), TypeError, "queries: "),
    (dict(queries=None), TypeError, "queries: "),
    (dict(queries=[1, 3, 1]), ValueError, "page_counts: 2 numbers for 3 requests"),
    (dict(queries=[21, 3]), ValueError, "lengths[0]: 20 tokens, fewer than its 21 query tokens"),
    (dict(lengths=[20]), ValueError, "lengths: 1 numbers for 2 requests"),
    (dict(lengths=None), TypeError, "lengths, ends: give one"),
    (dict(ends=[1] * 4), TypeError, "lengths, ends: give one"),
    (dict(lengths=None, ends=[1] * 5), ValueError, "ends: 5 numbers for 4 query tokens"),
    (dict(pages="402"), TypeError, "pages: "),
]


@pytest.mark.parametrize("wrong, error, words", BATCHES, ids=[words for _, _, words in BATCHES])
def test_batches_are_refused(wrong, error, words):
    Batch(**GOOD)
    with pytest.raises(error, match=re.escape(words)):
        Batch(**{**GOOD, **wrong})


def strided(shape, strides):
    return np.lib.stride_tricks.as_strided(zeros(64), shape, strides)


CACHES = [
    (lambda: Cache(zeros(5, 2, 16, 64).tolist(), 32), TypeError, "kv: "),
    (lambda: Cache(zeros(5, 2, 16, 64, dtype=np.float64), 32), ValueError, "kv: float64"),
    (lambda: Cache(zeros(5, 2, 16, 64, dtype=">f4"), 32), ValueError, "kv: >f4"),
    (lambda: Cache(zeros(5, 64), 32), ValueError, "kv: 2 dimensions, not 3 or 4"),
    (lambda: Cache(zeros(0, 2, 16, 64), 32), ValueError, "kv.shape[0]: 0 "),
    (lambda: Cache(zeros(5, 2, 0, 64), 32), ValueError, "kv.shape[2]: 0 "),
    (lambda: Cache(zeros(1, 4097, 1, 32), 16), ValueError, "kv.shape[1]: 4097 is not in 1 to 4096"),
    (lambda: Cache(zeros(5, 2, 16, 64)[..., ::-1], 32), ValueError, "kv: values are -4 bytes apart"),
    (lambda: Cache(zeros(5, 2, 16, 64)[..., ::2], 16), ValueError, "kv: values are 8 bytes apart"),
    (lambda: Cache(zeros(5, 2, 16, 64)[::-1], 32), ValueError, "kv: strides (-8192, "),
    (lambda: Cache(zeros(5, 2, 16, 64), 64), ValueError, "values of K: 0 "),
    (lambda: Cache(zeros(5, 2, 16, 64), 65), ValueError, "values of K: -1 "),
    (lambda: Cache(zeros(5, 2, 16, 64), 0), ValueError, "dv: 0 is not in 1 to 1024"),
    (lambda: Cache(zeros(5, 2, 16, 64), 2.0), TypeError, "dv: 2.0"),
    (lambda: Cache(zeros(5, 2, 16, 64), 32, v=zeros(5, 2, 16, 33)), ValueError, "v: its type or"),
    (lambda: Cache(zeros(5, 2, 16, 64), 32, v=zeros(5, 2, 16, 32, dtype=np.float16)), ValueError, "v: its"),
    (lambda: Cache(zeros(5, 16, 64), 32, v=zeros(5, 16, 32)), ValueError, "kv: 3 dimensions, not 4"),
]


@pytest.mark.parametrize("make, error, words", CACHES, ids=[words for _, _, words in CACHES])
def test_caches_are_refused(make, error, words):
    with pytest.raises(error, match=re.escape(words)):
        make()


def call(q=zeros(4, 4, 32), kv=zeros(5, 2, 16, 64), dv=32, batch=None, **how):
    return attend(q, Cache(kv, dv), Batch(**{**GOOD, **(batch or {})}), **{"scale": 1.0, **how})


CALLS = [
    (dict(batch=dict(pages=[4, 0, 5])), ValueError, "pages[2]: 5, but the cache has 5 pages"),
    (dict(batch=dict(pages=[2 ** 32 - 1, 0, 1])), ValueError, "pages[0]: 4294967295, but"),
    (dict(batch=dict(pages=[4, 0])), ValueError, "page_counts: 3 in all, but pages has 2"),
    (dict(batch=dict(page_counts=[2, 2])), ValueError, "page_counts: 4 in all, but pages has 3"),
    (dict(batch=dict(page_counts=[2 ** 32 - 1, 4])), ValueError, "page_counts: 4294967299 in all"),
    (dict(batch=dict(lengths=[33, 5])), ValueError, "ends[0]: 33, but the pages of request 0 have 32"),
    (dict(batch=dict(lengths=[20, 17])), ValueError, "ends[3]: 17, but the pages of request 1 have 16"),
    (dict(batch=dict(lengths=None, ends=[0, 2 ** 32 - 1, 0, 0])), ValueError, "ends[1]: 4294967295, but"),
    (dict(kv=strided((2 ** 31, 2, 16, 64), (2 ** 40, 0, 0, 4))), ValueError,
     "cache: ends behind the last address"),
    (dict(kv=strided((5, 2, 2 ** 31, 64), (0, 0, 0, 4))), ValueError,
     "pages: 3 (at most 1 of 2147483648 tokens)"),
    (dict(kv=zeros(5, 2, 16, 57), dv=25), ValueError, "dv: must be a multiple of 16"),
    (dict(q=zeros(4, 4, 33), kv=zeros(5, 2, 16, 49), dv=16), ValueError, "dqk: must be a multiple"),
    (dict(q=zeros(4, 4, 16), kv=zeros(5, 16, 16)), ValueError, "dv: MLA needs one KV head, and dv at most"),
    (dict(q=zeros(3, 4, 32)), ValueError, "q.shape[0]: 3 is not in 4 to 4"),
    (dict(q=zeros(4, 4, 48)), ValueError, "q.shape[2]: 48 is not in 32 to 32"),
    (dict(q=zeros(4, 3, 32)), ValueError, "heads: must be a multiple of kv_heads"),
    (dict(q=zeros(4, 0, 32)), ValueError, "q.shape[1]: 0 is not in 1 to 4096"),
    (dict(q=zeros(4, 4098, 32)), ValueError, "q.shape[1]: 4098"),
    (dict(q=zeros(16, 32)), ValueError, "q: 2 dimensions, not 3"),
    (dict(q=zeros(4, 32, 4).swapaxes(1, 2)), ValueError, "q: values are 16 bytes apart, not 4"),
    (dict(q=zeros(4, 8, 32)[:, ::2]), ValueError, "q: heads are 256 bytes apart, not 128"),
    (dict(q=zeros(4, 4, 32)[::-1]), ValueError, "q: strides (-512, "),
    (dict(q=None), TypeError, "q: None"),
    (dict(scale=math.nan), ValueError, "scale: must be finite"),
    (dict(scale=1e300), ValueError, "scale: must be finite"),
    (dict(scale="1"), TypeError, "scale: '1'"),
    (dict(scale=None), TypeError, "scale: None"),
    (dict(softcap=-1), ValueError, "softcap: must be 0, or above"),
    (dict(softcap=math.inf), ValueError, "softcap: must be 0, or above"),
    (dict(isa="mmx"), ValueError, 'isa: this processor has no "mmx"'),
    (dict(isa=None), TypeError, "isa: None"),
    (dict(threads=0), ValueError, "threads: 0 is not in 1 to 64"),
    (dict(threads=65), ValueError, "threads: 65 is not in 1 to 64"),
    (dict(out=(O[:3], LSE)), ValueError, "out[0]: not a contiguous float32 array of shape (4, 4, 32)"),
    (dict(out=(O, LSE[:, :3])), ValueError, "out[1]: not a contiguous float32"),
    (dict(out=(zeros(4, 4, 64)[..., :32], LSE)), ValueError, "out[0]: not a contiguous"),
    (dict(out=(zeros(4, 4, 32, dtype=np.float16), LSE)), ValueError, "out[0]: not a contiguous"),
    (dict(out=(O, np.broadcast_to(LSE[:1], (4, 4)))), ValueError, "out[1]: not a contiguous"),
    (dict(out=(O, np.frombuffer(bytes(64), np.float32).reshape(4, 4))), ValueError, "out[1]: read-only"),
    (dict(out=(O,)), ValueError, "out: a pair"),
]


@pytest.mark.parametrize("wrong, error, words", CALLS, ids=[words for _, _, words in CALLS])
def test_calls_are_refused(wrong, error, words):
    call()
    with pytest.raises(error, match=re.escape(words)):
        call(**wrong)


def test_other_objects_are_refused():
    for cache, batch, words in ((zeros(5, 2, 16, 64), Batch(**GOOD), "cache: "),
                                (Cache(zeros(5, 2, 16, 64), 32), GOOD, "batch: ")):
        with pytest.raises(TypeError, match=words):
            attend(zeros(4, 4, 32), cache, batch, scale=1)
