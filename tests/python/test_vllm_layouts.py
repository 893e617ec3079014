# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm's layouts of caches as vLLM 0.32 has them, and their bytes over two daemons:
ranks, stages, windows, states and context-parallel shards, and SGLang on the other side."""
import types
from collections import namedtuple

import numpy as np
import pytest

import kvd
from conftest import until
from kvd import engine
from kvd.layout import format_of
from kvd.rooms import FAILED, SUCCESS, View
from kvd.sglang import pools as sglang
from kvd.vllm import pools

TICKET = "beef" * 8
LAYERS, HEADS, DIM, BLOCKS = 2, 4, 8, 16  # float32
TOKEN = LAYERS * 2 * HEADS * DIM * 4
Ranks = namedtuple("Ranks", "size rank")
Side = namedtuple("Side", "daemon role clients")
rooms = iter(range(1000, 10000))


class Cache:
    """A tensor of vLLM's, [block, head, token, content], of a numpy array."""
    dtype, device = "torch.float32", "cpu"

    def __init__(self, array, base=None, dtype=None):
        self.array, self.base = array, array if base is None else base
        self.shape, self.dtype = array.shape, dtype or self.dtype

    def dim(self):
        return self.array.ndim

    def element_size(self):
        return self.array.itemsize

    def stride(self, i=None):
        strides = tuple(s // self.array.itemsize for s in self.array.strides)
        return strides if i is None else strides[i]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=lambda: self.base.ctypes.data,
                                     nbytes=lambda: self.base.nbytes)


def tensor(heads=HEADS, tokens=32, blocks=BLOCKS, order="NHD", content=2 * DIM,
           dtype=np.float32):
    if order == "HND":
        array = np.zeros((blocks, heads, tokens, content), dtype)
        return Cache(array)
    array = np.zeros((blocks, tokens, heads, content), dtype)
    return Cache(array.transpose(0, 2, 1, 3), array)


SPEC = types.SimpleNamespace(head_size=DIM, head_size_v=DIM)


def made_of(caches, group, ranks=Ranks(1, 0), heads=HEADS, author=None, spec=SPEC,
            dtype="auto", blocks=BLOCKS, layers=None):
    made = pools.Buffers(ranks.rank)
    made.add(group, blocks)
    for i, cache in zip(layers or range(len(caches)), caches):
        pools.attention(made, group, i, cache, spec, heads, ranks, author, dtype)
    return made


def group(tokens=32, **kw):
    return pools.Group("kv", "kv", tokens, 1, 1, 0, 0)._replace(**kw)


def fields(made, view="kv", layer=0):
    return {f["name"]: f for f in made.layout.views[view]["layers"][layer]}


# ---- layouts ---------------------------------------------------------------------------------

@pytest.mark.parametrize("order, unit, token", [("NHD", 64, 256), ("HND", 2048, 64)])
def test_k_and_v_are_fields_of_their_own(order, unit, token):
    got = fields(made_of([tensor(order=order)], group()))
    assert list(got) == ["k", "v"] and [f["offset"] for f in got.values()] == [0, 32]
    for f in got.values():
        assert (f["page_stride"], f["token_stride"], f["unit_stride"], f["unit_bytes"]) == \
            (8192, token, unit, 32)
        assert (f["units"], f["total_units"], f["format"]) == (4, 4, "float32")


def test_value_of_another_width_follows_its_key():
    spec = types.SimpleNamespace(head_size=DIM, head_size_v=4)
    got = fields(made_of([tensor(content=12)], group(), spec=spec))
    assert [(f["offset"], f["unit_bytes"]) for f in got.values()] == [(0, 32), (32, 16)]


def test_content_beyond_k_and_v_is_one_field():
    """A scale behind each head's token."""
    got = fields(made_of([tensor(content=20, dtype=np.uint8)], group(), dtype="fp8"))
    assert [(n, f["unit_bytes"], f["format"]) for n, f in got.items()] == [
        ("kv", 20, "fp8_e4m3")]


def test_latent_is_named_as_sglangs():
    cache = tensor(heads=1, content=24)
    got = fields(made_of([cache], group(), ranks=Ranks(2, 1), heads=None))
    assert [(n, f["unit_bytes"], f["units"], f["total_units"]) for n, f in got.items()] == [
        ("latent", 96, 1, 1)]


def spec_of(mode="NONE", role=None, states=1):
    return types.SimpleNamespace(kv_quant_mode=types.SimpleNamespace(name=mode),
                                 cache_role=role and types.SimpleNamespace(name=role),
                                 tokens_per_state=states, head_size=DIM, head_size_v=DIM)


@pytest.mark.parametrize("backend, spec, words, author", [
    ("FLASH_ATTN", spec_of(), (), None), ("FLASHMLA_SPARSE", spec_of(role="SPARSE"), (), None),
    ("TRITON_ATTN", spec_of("INT8_PER_TOKEN_HEAD"), (), None),
    ("FLASHINFER", spec_of("NVFP4"), (), "FLASHINFER NVFP4"),
    ("FLASH_ATTN", spec_of(), ("rocm",), "FLASH_ATTN NONE rocm"),
    ("FLASHMLA_SPARSE", spec_of(role="INDEXER"), (), "FLASHMLA_SPARSE NONE"),
    ("DEEPSEEK_V32_INDEXER", spec_of(role="INDEXER"), (), "DEEPSEEK_V32_INDEXER NONE"),
    ("CPU_ATTN", spec_of(), ("amx",), "CPU_ATTN NONE amx"), ("NEWER", spec_of(), (), "NEWER NONE")])
def test_only_known_caches_are_rows_of_tokens(backend, spec, words, author):
    assert pools.author_of(backend, spec, *words) == author


@pytest.mark.parametrize("spec, words", [(spec_of("OCTAVE_4BIT"), "mode OCTAVE_4BIT is not supported"),
                                         (spec_of(states=4), "4 tokens per state")])
def test_caches_of_unknown_modes_are_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        pools.author_of("FLASH_ATTN", spec)


def test_blocks_of_the_cpus_kernels_are_whole():
    got = fields(made_of([tensor(order="HND")], group(grain=32), author="CPU_ATTN NONE vec"))
    assert [(n, f["unit_bytes"], f["units"]) for n, f in got.items()] == [("kv", 2048, 4)]
    with pytest.raises(ValueError, match="strides"):
        made_of([tensor(order="NHD")], group(grain=32), author="CPU_ATTN NONE vec")


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_blocks_of_unknown_backends_are_whole_and_of_one_rank(order):
    got = fields(made_of([tensor(order=order, heads=2)], group(grain=32), ranks=Ranks(2, 1),
                         author="NEWER NONE"))
    assert [(n, f["unit_bytes"], f["first_unit"], f["units"], f["total_units"], f["page_stride"])
            for n, f in got.items()] == [("block", 4096, 1, 1, 2, 4096)]


def test_whole_blocks_not_contiguous_are_refused():
    array = np.zeros((BLOCKS, 2, 32, 16), np.float32)
    with pytest.raises(ValueError, match="strides"):
        made_of([Cache(array[:, :, ::2], array)], group(16, grain=16), heads=2, author="X NONE")


@pytest.mark.parametrize("kw", [{"author": "NEWER NONE"}, {"spec": spec_of(role="INDEXER")}])
def test_whole_blocks_are_not_cut_into_tokens(kw):
    with pytest.raises(ValueError, match="not rows of tokens"):
        made_of([tensor(heads=1)], group(), heads=None, **kw)


def test_formats_of_whole_blocks_name_their_writer():
    """Instruction sets order a block's bytes otherwise, at the same sizes."""
    def name(author, dtype="auto", cache=tensor(order="HND"), grain=32):
        return pools.format_name(cache, group(grain=grain), dtype, author)
    names = [name("CPU_ATTN NONE vec"), name("CPU_ATTN NONE amx"), name("INDEX NONE"),
             name("INDEX NONE", "auto", Cache(np.zeros((1, 1, 32, 8), np.uint8), dtype="uint8")),
             name("INDEX NONE", "fp8", Cache(np.zeros((1, 1, 32, 8), np.uint8))),
             name("CPU_ATTN NONE vec", grain=16), name(None, grain=1)]
    assert len(set(names)) == len(names) and all(len(n) <= 15 for n in names)
    assert name("CPU_ATTN NONE vec") == names[0]


WORDS = "turboquant_4bit_nc turboquant_4bit turboquant_3bit_nc turboquant_3bit " \
    "int8_per_token_head int8_per_token_group fp8_per_token_head fp8_e4m3 fp8_e5m2 " \
    "float8_e4m3fnuz nvfp4_ds_mla nvfp4_4over6 nvfp4".split()


def test_formats_of_two_modes_differ():
    names = {format_of(word) for word in WORDS}
    assert len(names) == len(WORDS) and max(map(len, names)) <= 15


def test_kernel_blocks_are_the_views_pages():
    made = made_of([tensor(tokens=16, blocks=2 * BLOCKS)], group(ratio=2))
    view = made.layout.views["kv"]
    assert (view["page_tokens"], view["pages"]) == (16, 32)


@pytest.mark.parametrize("cache, kw, words", [
    (tensor(heads=2), {}, "2 heads instead of 4"), (tensor(tokens=16), {}, "tokens of 32"),
    (tensor(heads=4), {"ranks": Ranks(2, 0)}, "4 heads instead of 2 .*over 2 ranks")])
def test_unexpected_cache_is_refused(cache, kw, words):
    with pytest.raises(ValueError, match=words):
        made_of([cache], group(), **kw)


def test_two_tensors_of_one_layer_have_names_of_their_own():
    made = made_of([tensor(), tensor()], group(), layers=[3, 3])
    assert list(fields(made, layer=3)) == ["k", "v", "k1", "v1"] or \
        list(fields(made, layer=3)) == ["k", "v", "k2", "v2"]


@pytest.mark.parametrize("words, name", [
    (("torch.bfloat16", "bfloat16", "bf16"), "bfloat16"), (("torch.float32", "float"), "float32"),
    (("fp8", "fp8_e4m3", "torch.float8_e4m3fn"), "fp8_e4m3"), (("fp8_e5m2",), "fp8_e5m2")])
def test_format_has_one_name(words, name):
    assert {format_of(word) for word in words} == {name}


def mamba(tp, rank, groups, blocks=BLOCKS):
    """Mamba2: x of 16 channels, B and C of 4 a group; 8 heads of 2 x 4."""
    local = 16 // tp, 4 * max(groups // tp, 1)
    conv = (local[0] + 2 * local[1]) * 3 * 4
    ssm = 8 // tp * 2 * 4 * 4
    cache = np.zeros((blocks, 1, 1, conv + ssm + 32), np.uint8)  # padded
    spec = types.SimpleNamespace(shapes=((local[0] + 2 * local[1], 3), (8 // tp, 2, 4)),
                                 dtypes=(np.dtype("f4"), np.dtype("f4")))
    split = types.SimpleNamespace(local_proj_dims=(local[0], local[1], local[1]), conv_rows=3,
                                  conv_dtype_size=4, ssm_sizes=(conv, ssm))
    made = pools.Buffers(rank)
    made.add(pools.Group("state0", "state", 32, 1, 1, 0, 0), blocks)
    pools.state(made, made.groups[0], 0, Cache(cache), spec, split, Ranks(tp, rank),
                groups)
    return made, cache


def test_state_is_cut_by_channels_and_heads():
    made, cache = mamba(2, 1, 2)
    got = fields(made, "state0")
    assert [(n, f["first_unit"], f["units"], f["total_units"], f["unit_bytes"])
            for n, f in got.items()] == [("conv0", 8, 8, 16, 12), ("conv1", 4, 4, 8, 12),
                                         ("conv2", 4, 4, 8, 12), ("ssm", 4, 4, 8, 32)]
    assert {f["page_stride"] for f in got.values()} == {cache.strides[0]}


def test_b_and_c_of_one_group_are_on_each_rank():
    got = fields(mamba(2, 1, 1)[0], "state0")
    assert [(f["first_unit"], f["units"], f["total_units"]) for f in got.values()] == [
        (8, 8, 16), (0, 4, 4), (0, 4, 4), (4, 4, 8)]


# ---- by two daemons ----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def sides(pair):
    """Prefill's daemon and decode's."""
    out = [Side(pair[0], "prefill", []), Side(pair[1], "decode", [])]
    yield out
    for side in out:
        for client in side.clients:
            client.close()


class Rank:
    """A process with a pool of somebody's layout: vLLM's Buffers, or SGLang's."""

    def __init__(self, side, made):
        client = kvd.Client(side.daemon.socket_path, client="vllm", role=side.role)
        side.clients.append(client)
        self.desk, name = engine.Desk(client), "pool%d" % next(rooms)
        regions = [client.register_address(*part) for part in made.parts]
        self.pool = client.pool(made.layout, regions, name=name)
        self.source = kvd.Source(client.endpoint, name, None, made.layout.rank)


def end_of(handle):
    def look():
        handle.desk.turn()
        return handle.look() in (FAILED, SUCCESS)
    until(look, 20)
    return handle.end


def moved(sources, sinks, per_sink=None):
    """[(rank, views)] of both; the sinks' handles at their end. per_sink: of each, which
    sources; None: all."""
    number = next(rooms)
    offers = [rank.desk.offer(number, rank.pool, views, ticket=TICKET, lease_ms=20000)
              for rank, views in sources]
    pulls = []
    for i, (rank, views) in enumerate(sinks):
        of = per_sink[i] if per_sink else range(len(sources))
        pull = rank.desk.pull(number, rank.pool, [sources[j][0].source for j in of],
                              receivers=len(sinks) // len(sources) if per_sink else
                              len(sinks), open_s=10, ticket=TICKET)
        pull.bind(views)
        pulls.append(pull)
    if any(end_of(pull) == FAILED for pull in pulls):
        for offer in offers:
            offer.stop("a pull has failed")
    for offer in offers:
        end_of(offer)
    return pulls


def noise(array, seed):
    array.view(np.uint32)[...] = np.random.default_rng(seed).integers(
        1, 1 << 30, array.shape, np.uint32)
    return array


def attention_rank(side, tokens=32, order="NHD", seed=0, layers=range(LAYERS), heads=HEADS,
                   ranks=Ranks(1, 0), one_field=False):
    """(rank, its caches, its group)"""
    caches = [tensor(heads=heads, tokens=tokens, order=order) for _ in layers]
    for i, cache in enumerate(caches):
        if seed:
            noise(cache.base, seed + i)
    its = group(tokens)
    spec = types.SimpleNamespace(head_size=2 * DIM, head_size_v=1) if one_field else SPEC
    made = made_of(caches, its, ranks=ranks, spec=spec, layers=list(layers))
    return Rank(side, made), caches, its


def rows_of(caches, blocks, begin, end):
    """[layer, token, head, K and V] of tokens [begin, end)."""
    out = []
    for cache in caches:
        flat = cache.array[list(blocks)].transpose(0, 2, 1, 3)
        out.append(flat.reshape((-1,) + flat.shape[2:])[begin:end])
    return np.array(out)


def test_index_and_its_latent_arrive_in_whole_blocks(sides):
    """A block of the index has all values before all scales: what a prompt that ends inside of
    it needs lies at its end, too."""
    block, blocks, author = 64, 8, "DEEPSEEK_V32_INDEXER NONE"
    its, made, caches = group(block, grain=block), [], []
    for side in sides:
        latent, index = (np.zeros((blocks, 1, block, n), np.uint8) for n in (656, 132))
        if side.role == "prefill":
            latent[:], index[:] = (np.random.default_rng(1).integers(1, 256, a.shape, np.uint8)
                                   for a in (latent, index))
        one = pools.Buffers(0)
        one.add(its, blocks)
        for cache, spec, who in ((latent, spec_of(), None),
                                 (index, spec_of(role="INDEXER"), author)):
            pools.attention(one, its, 0, Cache(cache, dtype="torch.uint8"), spec, None,
                            Ranks(1, 0), who, "auto")
        made.append(Rank(side, one))
        caches.append((latent, index))
    (pull,) = moved([(made[0], {"kv": its.offered([3, 4], 100)})],
                    [(made[1], {"kv": its.wanted([6, 7], 0, 100)})])
    assert pull.end == SUCCESS, pull.reason
    for there, here in zip(*caches):
        assert (here[[6, 7]] == there[[3, 4]]).all() and not here[:6].any()


@pytest.mark.parametrize("there, here", [((32, "NHD"), (64, "NHD")), ((64, "HND"), (32, "NHD")),
                                         ((16, "NHD"), (32, "HND"))])
def test_blocks_of_other_sizes_and_orders(sides, there, here):
    (P, source, of), (D, sink, to) = (attention_rank(sides[i], *one, seed=i == 0 and 1)
                                      for i, one in enumerate((there, here)))
    n = 150
    a, b = ([9, 3, 5, 7, 2, 8, 1, 6, 4, 10][:-(-n // one[0])] for one in (there, here))
    pull, = moved([(P, {"kv": of.offered(a, n)})], [(D, {"kv": to.wanted(b, 40, n)})])
    assert pull.end == SUCCESS, pull.reason
    assert pull.bytes == (n - 40) * TOKEN
    assert (rows_of(sink, b, 40, n) == rows_of(source, a, 40, n)).all()
    assert not rows_of(sink, b, 0, 40).any() and not rows_of(sink, b, n, None).any()


@pytest.mark.parametrize("order, of_half", [("NHD", 1), ("HND", HEADS)])
def test_adjacent_k_and_v_move_as_one_row(sides, order, of_half):
    """As many rows as of a cache whose K and V are one field: of two blocks, and of half a
    block."""
    rows = []
    for one_field in (False, True):
        (P, source, its), (D, sink, _) = (
            attention_rank(d, order=order, seed=s, one_field=one_field)
            for d, s in zip(sides, (1, 0)))
        pull, = moved([(P, {"kv": its.offered([3, 9, 4], 80)})],
                      [(D, {"kv": its.wanted([1, 7, 5], 0, 80)})])
        assert pull.end == SUCCESS, pull.reason
        assert (rows_of(sink, [1, 7, 5], 0, 80) == rows_of(source, [3, 9, 4], 0, 80)).all()
        rows.append(pull.rows)
    assert rows == [LAYERS * (2 + of_half)] * 2


@pytest.mark.parametrize("there, here", [(1, 2), (2, 1), (2, 2)])
def test_heads_of_other_ranks(sides, there, here):
    whole = [noise(np.zeros((BLOCKS, 32, HEADS, 2 * DIM), np.float32), 50 + i)
             for i in range(LAYERS)]

    def ranks_of(side, size, filled):
        out = []
        for r in range(size):
            n = HEADS // size
            rank, caches, its = attention_rank(side, heads=n, ranks=Ranks(size, r))
            for cache, all_ in zip(caches, whole):
                cache.base[...] = all_[:, :, r * n:(r + 1) * n] if filled else 0
            out.append((rank, caches, its))
        return out
    P, D = ranks_of(sides[0], there, True), ranks_of(sides[1], here, False)
    blocks, n = [2, 5], 50
    per_sink = [range(there)] if here == 1 else \
        [[r * there // here] for r in range(here)]
    pulls = moved([(r, {"kv": g.offered(blocks, n)}) for r, _, g in P],
                  [(r, {"kv": g.wanted(blocks, 0, n)}) for r, _, g in D],
                  per_sink if here >= there and here > 1 else None)
    assert [p.end for p in pulls] == [SUCCESS] * here, [p.reason for p in pulls]
    for r, (_, caches, _) in enumerate(D):
        k = HEADS // here
        for cache, all_ in zip(caches, whole):
            got = cache.base[blocks].reshape(-1, k, 2 * DIM)
            want = all_[blocks].reshape(-1, HEADS, 2 * DIM)[:, r * k:(r + 1) * k]
            assert (got[:n] == want[:n]).all() and not got[n:].any()


def test_stages_of_prefill_make_one_rank_of_decode(sides):
    first, a, its = attention_rank(sides[0], seed=1, layers=[0])
    second, b, _ = attention_rank(sides[0], seed=2, layers=[1])
    D, sink, _ = attention_rank(sides[1], tokens=64)
    to = group(64)
    offered, wanted = its.offered([4, 2], 60), to.wanted([7], 0, 60)
    pull, = moved([(first, {"kv": offered}), (second, {"kv": offered})], [(D, {"kv": wanted})])
    assert pull.end == SUCCESS, pull.reason
    assert (rows_of(sink, [7], 0, 60) == rows_of(a + b, [4, 2], 0, 60)).all()
    number = next(rooms)  # a stage that does not come is missed
    offer = first.desk.offer(number, first.pool, {"kv": offered}, ticket=TICKET, lease_ms=20000)
    lone = D.desk.pull(number, D.pool, [first.source], receivers=1, open_s=10, ticket=TICKET)
    lone.bind({"kv": wanted})
    assert end_of(lone) == FAILED and "layer 1" in lone.reason
    end_of(offer)


def test_window_is_what_the_next_token_reads(sides):
    (P, source, _), (D, sink, _) = (attention_rank(d, seed=s) for d, s in zip(sides, (1, 0)))
    swa = group(kind="swa", window=40)
    a, b = [0, 0, 3, 9], [0, 0, 6, 2]
    pull, = moved([(P, {"kv": swa.offered(a, 120)})], [(D, {"kv": swa.wanted(b, 0, 120)})])
    assert pull.end == SUCCESS, pull.reason
    assert pull.bytes == 39 * TOKEN
    assert (rows_of(sink, b, 81, 120) == rows_of(source, a, 81, 120)).all()
    assert not rows_of(sink, b, 0, 81).any()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("there, here", [(1, 2), (2, 1)])
def test_state_is_sent_to_other_ranks(sides, there, here, groups):
    def ranks_of(side, size, seed):
        out = []
        for r in range(size):
            made, cache = mamba(size, r, groups)
            out.append((Rank(side, made), cache, made.groups[0]))
        return out
    P, D = ranks_of(sides[0], there, 1), ranks_of(sides[1], here, 0)

    def parts(cache, size):
        """x, B, C and the temporal state of slot 5."""
        local = 16 // size * 12, 4 * max(groups // size, 1) * 12
        ends = np.cumsum([local[0], local[1], local[1], 8 // size * 32])
        return np.split(cache[5, 0, 0], ends)[:4]
    for r, (_, cache, _) in enumerate(P):
        for i, part in enumerate(parts(cache, there)):
            one = groups == 1 and i in (1, 2)
            part[...] = 1 + i * 50 + (np.arange(part.size) + (0 if one else r * part.size)) % 49
    pulls = moved([(r, {"state0": g.offered([5], 1)}) for r, _, g in P],
                  [(r, {"state0": g.wanted([5], 0, 1)}) for r, _, g in D],
                  [[0]] * here if here > there else None)
    assert [p.end for p in pulls] == [SUCCESS] * here, [p.reason for p in pulls]
    for r, (_, cache, _) in enumerate(D):
        for i, part in enumerate(parts(cache, here)):
            one = groups == 1 and i in (1, 2)
            at = np.arange(part.size) + (0 if one else r * part.size)
            assert (part == 1 + i * 50 + at % 49).all(), (r, i)


def test_draft_with_a_table_of_its_own(sides):
    """Its group is a view beside the target's."""
    both = []
    for side, seed in zip(sides, (1, 0)):
        caches = [tensor(), tensor(heads=2)]
        made, views = pools.Buffers(0), []
        for i, (cache, heads) in enumerate(zip(caches, (HEADS, 2))):
            its = group(name=("kv", "kv1")[i])
            made.add(its, BLOCKS)
            pools.attention(made, its, 4 * i, cache, SPEC, heads, Ranks(1, 0), False,
                            "auto")
            if seed:
                noise(cache.base, seed + i)
            views.append(its)
        both.append((Rank(side, made), caches, views))
    (P, source, of), (D, sink, to) = both
    pull, = moved([(P, {g.name: g.offered([2 + i], 30) for i, g in enumerate(of)})],
                  [(D, {g.name: g.wanted([8 + i], 0, 30) for i, g in enumerate(to)})])
    assert pull.end == SUCCESS, pull.reason
    for i in range(2):
        assert (rows_of(sink[i:i + 1], [8 + i], 0, 30) ==
                rows_of(source[i:i + 1], [2 + i], 0, 30)).all()


# ---- context parallelism -------------------------------------------------------------------------

def sharded(side, size, rank, run, seed):
    """The tokens of a rank, in pages of 4, from page 0 on."""
    cache = tensor(heads=1, tokens=4)
    if seed is not None:
        flat = cache.base.reshape(-1, 2 * DIM)
        held = [t for t in range(64) if t // run % size == rank]
        flat[:len(held)] = np.array(held)[:, None] + seed
    made = pools.Buffers(rank)
    made.layout.view("kv", 4, BLOCKS, (size, rank, run) if size > 1 else None)
    pools.attention(made, group(4), 0, cache, SPEC, 1, Ranks(1, 0), False, "auto")
    return Rank(side, made), cache


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("there, here", [(1, 2), (2, 1), (2, 3)])
def test_tokens_of_context_parallel_ranks(sides, there, here, run):
    n = 50
    P = [sharded(sides[0], there, r, run, 1.0) for r in range(there)]
    D = [sharded(sides[1], here, r, run, None) for r in range(here)]

    def view(size, rank):
        held = len([t for t in range(n) if t // run % size == rank])
        return {"kv": View(list(range(-(-held // 4))), 0, (0, n))}
    pulls = moved([(rank, view(there, r)) for r, (rank, _) in enumerate(P)],
                  [(rank, view(here, r)) for r, (rank, _) in enumerate(D)])
    assert [p.end for p in pulls] == [SUCCESS] * here, [p.reason for p in pulls]
    for r, (_, cache) in enumerate(D):
        held = [t for t in range(n) if t // run % here == r]
        flat = cache.base.reshape(-1, 2 * DIM)
        assert (flat[:len(held)] == np.array(held)[:, None] + 1.0).all()
        assert not flat[len(held):].any()


# ---- vLLM and SGLang -----------------------------------------------------------------------------

def sglang_rank(side, cache_format, seed=0, page=16):
    """[slot][head][dim], K of both layers, then V."""
    arrays = [np.zeros((BLOCKS * 2 * page, HEADS, DIM), np.float32) for _ in range(2 * LAYERS)]
    for i, array in enumerate(arrays):
        if seed:
            noise(array, seed + i)
    item = page * HEADS * DIM * 4
    args = types.SimpleNamespace(
        kv_data_ptrs=[a.ctypes.data for a in arrays], kv_data_lens=[a.nbytes for a in arrays],
        kv_item_lens=[item] * len(arrays), num_draft_entries=0, kv_layer_ids=[], page_size=page,
        state_types=[], state_data_ptrs=[], state_data_lens=[], state_item_lens=[])
    made = sglang.build(args, sglang.Ranks(1, 0, 1, 0, 0), heads=HEADS, mla=False,
                        cache=cache_format)
    return Rank(side, made), arrays


def test_vllms_k_and_v_are_sglangs(sides):
    P, source, its = attention_rank(sides[0], seed=1)
    D, sink = sglang_rank(sides[1], "float32")
    pages = [9, 2, 30, 5]
    pull, = moved([(P, {"kv": its.offered([3, 8], 60)})], [(D, {"kv": View(pages, 0, (0, 60))})])
    assert pull.end == SUCCESS, pull.reason
    assert pull.bytes == 60 * TOKEN
    rows = rows_of(source, [3, 8], 0, 60)
    for i, array in enumerate(sink):
        layer, part = i % LAYERS, i // LAYERS
        got = array.reshape(-1, 16, HEADS, DIM)[pages].reshape(-1, HEADS, DIM)[:60]
        assert (got == rows[layer][..., part * DIM:(part + 1) * DIM]).all()


def test_sglangs_k_and_v_are_vllms(sides):
    P, source = sglang_rank(sides[0], "float32", seed=1)
    D, sink, its = attention_rank(sides[1])
    pull, = moved([(P, {"kv": View([9, 2, 30, 5], 0, (0, 60))})],
                  [(D, {"kv": its.wanted([3, 8], 0, 60)})])
    assert pull.end == SUCCESS, pull.reason
    rows = rows_of(sink, [3, 8], 0, 60)
    for i, array in enumerate(source):
        layer, part = i % LAYERS, i // LAYERS
        want = array.reshape(-1, 16, HEADS, DIM)[[9, 2, 30, 5]].reshape(-1, HEADS, DIM)[:60]
        assert (want == rows[layer][..., part * DIM:(part + 1) * DIM]).all()


def test_bytes_of_another_format_are_refused_by_name(sides):
    """float32 and int32 are of one size."""
    P, _, its = attention_rank(sides[0], seed=1)
    D, sink = sglang_rank(sides[1], "int32")
    pull, = moved([(P, {"kv": its.offered([3], 30)})], [(D, {"kv": View([1, 2], 0, (0, 30))})])
    assert pull.end == FAILED and pull.code == "ELAYOUT"
    until(lambda: "field k: format int32 (the destination), float32 (the source)" in
          sides[1].daemon.log())
    assert not any(array.any() for array in sink)
