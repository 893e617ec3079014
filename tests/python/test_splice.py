# SPDX-License-Identifier: Apache-2.0
"""Keys of a fetch for other positions: each value against fp64, and nothing else changes."""
import numpy as np
import pytest

import kvd
from kvd_daemon import Daemon
from kvd_space import space_of
from test_attend import bf16, ids_of
from test_gpu import Array, gpu  # noqa: F401 (gpu is a fixture)
from turned import turned

import fake_gpu

PAGE, PAGES, LAYERS, CHUNKS = 16, 24, 3, 4
# heads, values of one, first rope value, rope values
SHAPES = {"gqa": (4, 64, 0, 64), "gqa, a part of a head": (2, 48, 0, 32), "mla": (1, 96, 64, 32)}
TYPES = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
NEAR = {"fp32": 1e-6, "bf16": 2.0 ** -8, "fp16": 2.0 ** -10}  # of a pair's length
DELTAS = [1, -7, 4096, 131072, -(1 << 20)]


def values_of(bits, kind):
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64)


class Vmm:
    """Memory of cuMemCreate, which has no context."""

    def __init__(self, gpu, nbytes):
        self.address, args, view = gpu.vmm(nbytes)
        self.memory, self.allocation = np.frombuffer(view, np.uint8)[:nbytes], args["allocation"]
        self.fd, self.device = args["fds"][0], args["device"]

    def region(self, client):
        return client.register_gpu_fd(self.fd, self.memory.size, device=self.device,
                                      allocation=self.allocation, address=self.address)


class Cache:
    """An engine's, with keys and values of each layer, as arrays [page, token, head, value]."""

    def __init__(self, client, shape, kind, order=kvd.NHD, plain=False, gpu=None, vmm=False,
                 **region):
        self.heads, self.values, self.first, self.dims = SHAPES[shape]
        self.kind, self.fields = kind, ("kv",) if shape == "mla" else ("k", "v")
        self.key, size = self.fields[0], np.dtype(TYPES[kind]).itemsize
        each = PAGES * PAGE * self.heads * self.values
        layout, self.arrays = kvd.Layout(), {}
        layout.buffer(LAYERS * len(self.fields) * each * size)
        layout.view("kv", PAGE, PAGES)
        self.memory = np.zeros(layout.buffers[0], np.uint8) if plain \
            else Vmm(gpu, layout.buffers[0]) if vmm \
            else Array(gpu, layout.buffers[0], 4096) if gpu else kvd.Memory(layout.buffers[0])
        flat = (self.memory if plain else self.memory.memory if gpu
                else self.memory.array()).view(TYPES[kind])
        for layer in range(LAYERS):
            for name in self.fields:
                at = len(self.arrays) * each
                layout.heads("kv", layer, name, order, buffer=0, offset=at * size,
                             unit_bytes=self.values * size, units=self.heads)
                some = flat[at:at + each]
                self.arrays[layer, name] = \
                    some.reshape(PAGES, self.heads, PAGE, -1).transpose(0, 2, 1, 3) \
                    if order == kvd.HND else some.reshape(PAGES, PAGE, self.heads, -1)
        self.pool = client.pool(layout, [self.memory.region(client) if vmm
                                         else client.register(self.memory, **region)])
        self.space = space_of(client, self.pool, model="m", scheme="splice " + shape + kind,
                              tokens=PAGE)

    def rope(self, pairs="halves"):
        freq = [10000.0 ** (-2.0 * i / self.dims) for i in range(self.dims // 2)]
        return kvd.Rope(self.first, self.dims, pairs, freq)

    def fill(self, seed=1):
        rng = np.random.default_rng(seed)
        for array in self.arrays.values():
            some = rng.standard_normal(array.shape)
            array[...] = bf16(some)[0].reshape(array.shape) if self.kind == "bf16" \
                else some.astype(array.dtype)

    def copy(self):
        return {key: array.copy() for key, array in self.arrays.items()}

    def put(self, ids, pages):
        self.space.put(ids, {"kv": pages}).wait(timeout=60)

    def fetch(self, ids, pages, tokens):
        with self.space.hold(ids) as hold:
            move = hold.fetch({"kv": kvd.View(pages, tokens=tokens)})
            move.wait(timeout=60)
        return move

    def judge(self, before, pages, tokens, delta, rope):
        """Of what was there before, the keys of these tokens are rotated."""
        for (layer, name), was in before.items():
            got, want = self.arrays[layer, name].copy(), was.copy()
            if name == self.key:
                at = [(pages[t // PAGE], t % PAGE) for t in range(*tokens)]
                page, slot = (np.array(one) for one in zip(*at))
                exact = turned(values_of(was[page, slot], self.kind), delta, *rope)
                size = np.abs(exact[..., rope.first:rope.first + rope.dims]).max()
                near = np.abs(values_of(got[page, slot], self.kind) - exact)
                outside = np.delete(near, np.s_[rope.first:rope.first + rope.dims], -1)
                assert near.max() <= NEAR[self.kind] * size and not outside.any()
                got[page, slot] = want[page, slot] = 0
            assert (got.view(np.uint8) == want.view(np.uint8)).all(), (layer, name)


@pytest.fixture(scope="module")
def daemon():
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n[transport]\n" + fake_gpu.CONFIG) as d:
        yield d


@pytest.fixture
def client(daemon):
    with kvd.Client(daemon.socket_path) as c:
        yield c


@pytest.mark.parametrize("order", [kvd.NHD, kvd.HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_are_rotated_and_nothing_else(client, shape, kind, pairs, order):
    cache, ids = Cache(client, shape, kind, order), ids_of(CHUNKS, b"splice")
    cache.fill()
    cache.put(ids, [3, 1, 9, 2])
    cache.fill(seed=2)
    pages, rope = [20, 5, 11, 7], cache.rope(pairs)
    for delta, tokens in zip(DELTAS, [(0, 64), (3, 61), (16, 32), (5, 9), (0, 64)]):
        move = cache.fetch(ids, pages, tokens)
        before = cache.copy()
        move.splice(delta, rope, key=cache.key, type=kind)
        cache.judge(before, pages, tokens, delta, rope)


def test_memory_of_the_engine_s_own_is_rotated(client):
    cache, ids = Cache(client, "gqa", "bf16", plain=True, adopt_memory=False), ids_of(2, b"plain")
    cache.fill()
    cache.put(ids, [3, 1])
    move = cache.fetch(ids, [8, 9], (0, 32))
    before = cache.copy()
    move.splice(77, cache.rope(), key="k", type="bf16")
    cache.judge(before, [8, 9], (0, 32), 77, cache.rope())


def test_keys_at_their_own_position_stay_bit_by_bit(client):
    cache, ids = Cache(client, "mla", "bf16"), ids_of(2, b"zero")
    cache.fill()
    cache.arrays[0, "kv"][...] = 0x7FC1  # a NaN with a payload
    cache.put(ids, [3, 1])
    move = cache.fetch(ids, [8, 9], (0, 32))
    before = cache.copy()
    move.splice(0, cache.rope(), key="kv", type="bf16")
    for key, array in cache.arrays.items():
        assert (array == before[key]).all()


def test_keys_rotated_there_and_back_are_the_first_ones(client):
    cache, ids = Cache(client, "gqa", "fp32"), ids_of(2, b"back")
    cache.fill()
    cache.put(ids, [3, 1])
    for at, delta in ((8, 5000), (10, 5000), (10, -5000)):
        if at == 10 and delta < 0:  # what was rotated is stored as other chunks, and fetched
            ids = ids_of(2, b"back again")
            cache.put(ids, [10, 11])
        cache.fetch(ids, [at, at + 1], (0, 32)).splice(delta, cache.rope(), key="k", type="fp32")
    for layer in range(LAYERS):
        keys = cache.arrays[layer, "k"]
        assert np.abs(keys[10:12] - keys[[3, 1]]).max() < 1e-5
        assert np.abs(keys[8:10] - keys[[3, 1]]).max() > 0.1


def test_keys_are_rotated_once(client):
    cache, ids = Cache(client, "gqa", "bf16"), ids_of(2, b"once")
    cache.fill()
    put = cache.space.put(ids, {"kv": [3, 1]})
    put.wait(timeout=60)
    with pytest.raises(ValueError, match="put of chunks"):
        put.splice(5, cache.rope(), key="k", type="bf16")
    move = cache.fetch(ids, [8, 9], (0, 32))
    move.splice(5, cache.rope(), key="k", type="bf16")
    before = cache.copy()
    with pytest.raises(kvd.Error, match="rotated before") as told:
        move.splice(5, cache.rope(), key="k", type="bf16")
    assert told.value.code == "ESTATE"
    assert all((array == before[key]).all() for key, array in cache.arrays.items())


def test_failed_fetch_is_not_rotated(client):
    cache, ids = Cache(client, "gqa", "bf16"), ids_of(2, b"failed")
    cache.fill()
    cache.put(ids, [3, 1])
    word = kvd.Memory(4096)
    timeline = client.register(word)
    with cache.space.hold(ids) as hold:
        move = hold.fetch({"kv": [8, 9]}, wait=(timeline, 0, 1))
    before = cache.copy()
    for end in (lambda: None, move.abort):
        end()
        with pytest.raises(kvd.Error, match="not a fetch that has succeeded") as told:
            move.splice(5, cache.rope(), key="k", type="bf16")
        assert told.value.code == "ESTATE"
    assert all((array == before[key]).all() for key, array in cache.arrays.items())


@pytest.mark.parametrize("wrong, error, words", [
    (dict(key="q"), "EINVAL", "layer 0 has no field q"),
    (dict(rope=kvd.Rope(32, 64, "halves", [1.0] * 32)), "EINVAL", "does not have the rope values"),
    (dict(rope=kvd.Rope(0, 0, "halves", [])), "ERANGE", "not 1 to 256 pairs"),
    (dict(rope=kvd.Rope(0, 1024, "halves", [1.0] * 512)), "ERANGE", "not 1 to 256 pairs"),
    (dict(rope=kvd.Rope(70000, 2, "halves", [1.0])), "ERANGE", "not 1 to 256 pairs"),
    (dict(type="fp32"), "EINVAL", "does not have the rope values"),
    (dict(delta=-(1 << 31)), None, "delta"), (dict(delta=1 << 31), None, "delta"),
    (dict(type="int8"), None, "type"), (dict(rope=None), "EINVAL", "type, key or rope"),
    (dict(rope=kvd.Rope(0, 64, "thirds", [1.0] * 32)), None, "pairs"),
    (dict(rope=kvd.Rope(0, 64, "halves", [1.0] * 3)), None, "inv_freq")])
def test_wrong_arguments_leave_all_as_it_is(client, wrong, error, words):
    cache, ids = Cache(client, "gqa", "bf16"), ids_of(2, b"wrong")
    cache.fill()
    cache.put(ids, [3, 1])
    move = cache.fetch(ids, [8, 9], (0, 32))
    before = cache.copy()
    given = {"delta": 5, "rope": cache.rope(), "key": "k", "type": "bf16", **wrong}
    with pytest.raises((kvd.Error, ValueError, TypeError), match=words) as told:
        move.splice(given.pop("delta"), given.pop("rope"), **given)
    assert getattr(told.value, "code", None) == error
    assert all((array == before[key]).all() for key, array in cache.arrays.items())
    move.splice(5, cache.rope(), key="k", type="bf16")
    cache.judge(before, [8, 9], (0, 32), 5, cache.rope())


def test_memory_at_an_unknown_address_is_refused(client):
    cache, ids = Cache(client, "mla", "bf16"), ids_of(2, b"nowhere")
    cache.fill()
    cache.put(ids, [3, 1])
    layout = kvd.Layout()
    layout.buffer(cache.memory.nbytes)
    layout.view("kv", PAGE, PAGES)
    for layer in range(LAYERS):
        layout.heads("kv", layer, "kv", buffer=0, offset=layer * cache.memory.nbytes // LAYERS,
                     unit_bytes=192, units=1)
    pool = client.pool(layout, [client.register_fd(cache.memory.fd, cache.memory.nbytes)])
    with cache.space.hold(ids) as hold:
        move = hold.fetch({"kv": [8, 9]}, pool=pool)
        move.wait(timeout=60)
    with pytest.raises(kvd.Error, match="without its address") as told:
        move.splice(5, cache.rope(), key="kv", type="bf16")
    assert told.value.code == "EREQUIRE"


# ---- keys in GPU memory ----

def on_gpu(client, gpu, shape="gqa", kind="bf16", **more):
    """A cache there with a fetch into pages 8 and 9."""
    cache, ids = Cache(client, shape, kind, gpu=gpu, **more), ids_of(2, b"vram")
    cache.fill()
    cache.put(ids, [3, 1])
    cache.fill(seed=2)
    return cache, cache.fetch(ids, [8, 9], (0, 32)), cache.copy()


def needs_image(move, cache):
    """Skips in a build without nvcc."""
    try:
        move.splice(1, cache.rope(), key=cache.key, type="bf16")
    except kvd.Error as error:
        if "built without nvcc" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("order", [kvd.NHD, kvd.HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("shape, vmm", [(shape, False) for shape in SHAPES] + [("gqa", True)])
def test_keys_in_gpu_memory_have_the_bits_of_a_processor(client, gpu, shape, order, vmm):  # noqa: F811
    there, move, before = on_gpu(client, gpu, shape, order=order, vmm=vmm)
    needs_image(move, there)
    there.judge(before, [8, 9], (0, 32), 1, there.rope())
    here, ids = Cache(client, shape, "bf16", order), ids_of(2, b"vram")
    for pairs in ("halves", "interleaved"):
        for delta, tokens in zip(DELTAS, [(0, 32), (3, 29), (16, 32), (5, 9), (31, 32)]):
            got = []
            for cache, pages in ((there, [20, 5]), (here, [7, 2])):
                cache.fetch(ids, pages, tokens).splice(delta, cache.rope(pairs), key=cache.key,
                                                       type="bf16")
                at = [(pages[t // PAGE], t % PAGE) for t in range(*tokens)]
                page, slot = (np.array(one) for one in zip(*at))
                got.append({key: array[page, slot] for key, array in cache.arrays.items()})
            assert all((got[0][key] == got[1][key]).all() for key in got[0]), (pairs, delta)


def test_a_second_rotation_in_gpu_memory_is_refused(client, gpu):  # noqa: F811
    cache, move, _ = on_gpu(client, gpu)
    needs_image(move, cache)
    before = cache.copy()
    with pytest.raises(kvd.Error, match="rotated before"):
        move.splice(1, cache.rope(), key="k", type="bf16")
    assert all((array == before[key]).all() for key, array in cache.arrays.items())


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_other_types_in_gpu_memory_are_refused(client, gpu, kind):  # noqa: F811
    cache, move, before = on_gpu(client, gpu, kind=kind)
    with pytest.raises(kvd.Error, match="field k: keys in GPU memory must be bf16") as told:
        move.splice(1, cache.rope(), key="k", type=kind)
    assert told.value.code == "EREQUIRE"
    assert all((array == before[key]).all() for key, array in cache.arrays.items())


# calls of the driver, in the order of a splice; whether keys may have been rotated before
CALLS = [("cuInit", 1, False), ("cuDriverGetVersion", 1, False),
         ("cuPointerGetAttribute", 1, False), ("cuPointerGetAttribute", LAYERS, False),
         ("cuCtxPushCurrent_v2", 1, False), ("cuModuleLoadData", 1, False),
         ("cuModuleGetFunction", 1, False), ("cuMemAlloc_v2", 1, False),
         ("cuStreamCreateWithPriority", 1, False), ("cuMemcpyAsync", 1, False),
         ("cuLaunchKernel", 1, True), ("cuLaunchKernel", LAYERS, True),
         ("cuStreamSynchronize", 1, True)]


@pytest.mark.parametrize("call, n, rotated", CALLS)
def test_a_call_of_the_driver_that_fails_leaves_nothing(client, gpu, call, n, rotated):  # noqa: F811
    cache, move, _ = on_gpu(client, gpu)
    needs_image(move, cache)
    move = cache.fetch(ids_of(2, b"vram"), [8, 9], (0, 32))
    before, live = cache.copy(), gpu.lib.fake_cuda_live()
    gpu.lib.fake_cuda_fail(call.encode(), n, 2)
    try:
        with pytest.raises(kvd.Error, match="CUDA_ERROR|no GPU memory") as told:
            move.splice(5, cache.rope(), key="k", type="bf16")
    finally:
        gpu.lib.fake_cuda_fail(None, 0, 0)
    assert ("fetch them again" in str(told.value)) == rotated
    assert gpu.lib.fake_cuda_live() == live
    if rotated:
        with pytest.raises(kvd.Error, match="rotated before"):
            move.splice(5, cache.rope(), key="k", type="bf16")
        return
    assert all((array == before[key]).all() for key, array in cache.arrays.items())
    move.splice(5, cache.rope(), key="k", type="bf16")
    cache.judge(before, [8, 9], (0, 32), 5, cache.rope())
