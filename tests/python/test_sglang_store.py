# SPDX-License-Identifier: Apache-2.0
"""kvd.sglang's store without SGLang: its host pools as arrays of the same shapes, a real daemon, and
every byte judged by the hash of its page."""
import contextlib
import hashlib
import types
from collections import namedtuple

import numpy as np
import pytest

import kvd
from conftest import Stopwatch, judging_deaths, until
from kvd.sglang.store_pools import DRAFT, Ranks, build
from kvd.stores.choice import Prices, model_of
from kvd.stores.space_client import CALL_S, SpaceClient
from kvd.stores.hicache import HiCache, ids_of, pages_of, trailing
from kvd_daemon import Daemon

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 48, 3, 4, 8
Key = namedtuple("Key", "pool tokens")
CHUNKS = "[chunks]\nchunk_memory = 64 MiB\n"
MHA, MLA = "MHATokenToKVPoolHost", "MLATokenToKVPoolHost"


def keys_of(count, seed="x"):
    """A chain of hashes in hex, as SGLang's."""
    keys, last = [], hashlib.sha256(seed.encode()).digest()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        keys.append(last.hex())
    return keys


class Dtype:
    itemsize = 2

    def __str__(self):
        return "torch.bfloat16"


class Tensor:
    """As far as a tensor of torch is looked at."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return self.array.flags.c_contiguous


def tensor(*dims, dtype=np.uint16):
    return Tensor(np.full(dims, 0xEEEE, np.uint16).astype(dtype))


class Pool:
    """A host pool of SGLang's. page(i): {(layer, field): its bytes, [token][head][byte]}, by the
    indices that SGLang's own code uses."""

    def __init__(self, layout="layer_first", heads=HEADS, groups=1, v_dim=DIM, layers=LAYERS,
                 targets=None, start=0):
        self.layout, self.head_num, self.head_group_num = layout, heads, groups
        self.head_dim, self.v_head_dim, self.layer_num = DIM, v_dim, layers
        self.target_layer_num, self.start_layer = targets or layers, start
        self.page_size, self.size, self.dtype = PAGE, PAGE * PAGES, Dtype()
        self.kv_cache_dim, self.dcp_size = DIM, 1
        self.kv_buffer = self.make()

    def make(self):
        n, p, la, h, d = PAGES, PAGE, self.layer_num, self.head_num, self.head_dim
        if self.layout == "layer_first":
            return tensor(2, la, n * p, h, d)
        if self.layout == "page_first":
            return tensor(2, n * p, la, h, d)
        if self.layout == "page_first_direct":
            return tensor(2, n, la, p, h, d)
        if self.layout == "page_head":
            return tensor(2, n, h, p, la, d)
        return tensor(n, self.head_group_num, la, 2, p, h // self.head_group_num, d)

    def page(self, i):
        a, at = self.kv_buffer.array, slice(i * PAGE, (i + 1) * PAGE)
        views = {}
        for kv, name in enumerate("kv"):
            for la in range(self.layer_num):
                views[la, name] = {
                    "layer_first": lambda: a[kv, la, at],
                    "page_first": lambda: a[kv, at, la],
                    "page_first_direct": lambda: a[kv, i, la],
                    "page_head": lambda: a[kv, i, :, :, la].transpose(1, 0, 2),
                    "page_unified": lambda: self.unified(a[i, :, la, kv])}[self.layout]()
        return views

    @staticmethod
    def unified(group):
        """[group][token][head][byte], of which one of group and head is 1."""
        return group[0] if len(group) == 1 else group[:, :, 0].transpose(1, 0, 2)


class Wide(Pool):
    """K and V of other widths."""

    def make(self):
        n, p, la, h = PAGES, PAGE, self.layer_num, self.head_num
        return tuple(tensor(n * p, la, h, d) if self.layout == "page_first" else
                     tensor(n, la, p, h, d) for d in (self.head_dim, self.v_head_dim))

    def page(self, i):
        at = slice(i * PAGE, (i + 1) * PAGE)
        return {(la, name): t.array[at, la] if self.layout == "page_first" else t.array[i, la]
                for name, t in zip("kv", self.kv_buffer) for la in range(self.layer_num)}


class Latent(Pool):
    def make(self):
        n, p, la, d = PAGES, PAGE, self.layer_num, self.kv_cache_dim
        if self.layout == "layer_first":
            return tensor(la, n * p, 1, d)
        return tensor(n * p, la, 1, d) if self.layout == "page_first" else tensor(n, la, p, 1, d)

    def page(self, i):
        a, at = self.kv_buffer.array, slice(i * PAGE, (i + 1) * PAGE)
        return {(la, "latent"): a[la, at] if self.layout == "layer_first" else
                a[at, la] if self.layout == "page_first" else a[i, la]
                for la in range(self.layer_num)}


class Index(Pool):
    """Keys and scales of a page; layer 1 of the model has none."""
    _live_target_layers = [0, 2, 3]
    indexer_page_stride_size = PAGE * 12
    indexer_page_num = PAGES + 1

    def make(self):
        dims = (self.layer_num, self.indexer_page_num) if self.layout == "layer_first" else \
            (self.indexer_page_num, self.layer_num)
        self.index_k_with_scale_buffer = tensor(*dims, self.indexer_page_stride_size,
                                                dtype=np.uint8)

    def page(self, i):
        a = self.index_k_with_scale_buffer.array
        return {(self._live_target_layers[la], "index"):
                (a[la, i] if self.layout == "layer_first" else a[i, la]).reshape(PAGE, 1, 12)
                for la in range(self.layer_num)}


def pool_of(name, base=None, **kw):
    """Of SGLang's class `name`."""
    base = base or {MHA: Pool, MLA: Latent, "AsymmetricMHATokenToKVPoolHost": Wide,
                    "DSAIndexerPoolHost": Index}[name]
    return type(name, (base,), {})(**kw)


def content(key, layer, field, head, shape, dtype):
    said = hashlib.shake_128(("%s.%d.%s.%d" % (key, layer, field, head)).encode())
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(said.digest(size), dtype).reshape(shape)


class Engine:
    """One rank's pool and its store."""

    def __init__(self, daemon, pool, size=1, rank=0, heads=HEADS, page=PAGE, **kw):
        self.pool = pool
        self.first = 0 if isinstance(pool, (Latent, Index)) else rank * heads // size
        self.made = build(pool, Ranks(size, rank, rank), heads)
        self.key = Key("kv", page)
        self.clients = []

        def connect():
            self.clients.append(kvd.Client(daemon.socket_path, client="sglang"))
            return self.clients[-1]

        def moving(client, key):
            return client.space(client.pool(
                self.made.layout, [client.register_address(a, n, keep=k)
                                   for a, n, _, k in self.made.parts]), **words())

        def words():
            return dict(model="m", scheme="sglang", tokens=page)
        self.cache = HiCache(
            SpaceClient(connect, lambda c, k: c.space(self.made.layout, **words())),
            SpaceClient(connect, moving), **kw)

    def each(self, pages, keys):
        for page, key in zip(pages, keys):
            for (layer, field), at in self.pool.page(page).items():
                for h in range(at.shape[1]):
                    yield at, h, content(key, layer, field, self.first + h,
                                         (at.shape[0], at.shape[2]), at.dtype)

    def fill(self, pages, keys):
        for at, h, wanted in self.each(pages, keys):
            at[:, h] = wanted

    def holds(self, pages, keys):
        return all((at[:, h] == wanted).all() for at, h, wanted in self.each(pages, keys))

    def some(self, count, seed=0):
        return np.random.default_rng(seed).permutation(PAGES)[:count]

    def put(self, keys, seed=0):
        pages = self.some(len(keys), seed)
        self.fill(pages, keys)
        return self.cache.put(self.key, keys, pages)

    def get(self, keys, seed=1):
        """How many come, each of them judged."""
        pages = self.some(len(keys), seed)
        got = self.cache.get(self.key, keys, pages)
        count = got.index(False) if False in got else len(got)
        assert not any(got[count:]) and self.holds(pages[:count], keys[:count])
        return count

    def exists(self, keys):
        return self.cache.exists(self.key, keys)

    def __enter__(self):
        """The daemon may be making its memory."""
        until(lambda: self.cache.mover.ask(self.key, lambda s: True) and
              self.cache.finder.ask(self.key, lambda s: True))
        return self

    def __exit__(self, *exc):
        self.cache.close()


@pytest.fixture(scope="module")
def daemon():
    with Daemon(CHUNKS) as d:
        yield d


# ---- host pools ------------------------------------------------------------------------

LAYOUTS = [dict(layout="layer_first"), dict(layout="page_first"),
           dict(layout="page_first_direct"), dict(layout="page_head"),
           dict(layout="page_unified"), dict(layout="page_unified", groups=HEADS)]


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda w: "-".join(map(str, w.values())))
def test_chunks_are_read_by_any_layout_and_rank_count(daemon, write):
    keys = keys_of(5, "layouts%s" % write)
    with Engine(daemon, pool_of(MHA, **write)) as writer:
        assert writer.put(keys) == [True] * 5
    for read in LAYOUTS:
        with Engine(daemon, pool_of(MHA, **read)) as one:
            assert one.exists(keys) == one.get(keys) == 5
    for rank in range(2):
        with Engine(daemon, pool_of(MHA, layout="page_first", heads=HEADS // 2), 2, rank) as half:
            assert half.get(keys) == 5


def test_ranks_write_parts_and_one_rank_or_more_read_all(daemon):
    keys = keys_of(4, "parts")
    with Engine(daemon, pool_of(MHA)) as whole, contextlib.ExitStack() as stack:
        for rank in range(2):
            assert whole.exists(keys) == 0
            half = Engine(daemon, pool_of(MHA, heads=HEADS // 2), 2, rank)
            assert stack.enter_context(half).put(keys) == [True] * 4
        assert whole.exists(keys) == whole.get(keys) == 4
        for rank in range(4):
            one = Engine(daemon, pool_of(MHA, layout="page_head", heads=1), 4, rank)
            assert stack.enter_context(one).get(keys) == 4


def test_ranks_sharing_a_head_have_equal_chunks(daemon):
    keys = keys_of(2, "replicated")
    with Engine(daemon, pool_of(MHA, heads=1), 8, 3) as rank:  # head 1 of 4
        rank.first = 1
        assert rank.put(keys) == [True] * 2
    with Engine(daemon, pool_of(MHA, heads=1), 4, 1) as rank:
        assert rank.get(keys) == 2
    with Engine(daemon, pool_of(MHA, heads=1), 4, 2) as rank:
        assert rank.exists(keys) == 0


@pytest.mark.parametrize("name, writes, reads", [
    (MLA, "layer_first", "page_first"), (MLA, "page_first_direct", "layer_first"),
    (MLA, "page_first", "page_unified"),
    ("AsymmetricMHATokenToKVPoolHost", "page_first", "page_first_direct"),
    ("DSAIndexerPoolHost", "layer_first", "page_first")])
def test_other_pools(daemon, name, writes, reads):
    """MLA and its index are the same on all ranks."""
    keys, more = keys_of(6, name + writes), {"v_dim": 2 * DIM} if "Asym" in name else {}
    with Engine(daemon, pool_of(name, layout=writes, **more)) as writer:
        assert writer.put(keys) == [True] * 6
    size = 1 if more else 4
    for rank in range(size):
        with Engine(daemon, pool_of(name, layout=reads, **more), size, rank) as reader:
            assert reader.exists(keys) == reader.get(keys) == 6


def test_draft_behind_the_model_is_no_layer_of_it(daemon):
    made = build(pool_of(MHA, layers=4, targets=3, start=5), Ranks(1, 0, 0))
    assert sorted(made.layout.views["kv"]["layers"]) == [5, 6, 7, DRAFT] and made.drafts == 1
    made = build(pool_of("DSAIndexerPoolHost"), Ranks(1, 0, 0))
    assert sorted(made.layout.views["kv"]["layers"]) == [0, 2, 3]


def refused(match, pool):
    with pytest.raises(ValueError, match=match):
        build(pool, Ranks(1, 0, 0))


def test_pools_without_chunks_are_refused_by_name():
    refused("MambaPoolHost is not supported by the store", pool_of("MambaPoolHost", Pool))
    refused("MHATokenToKOnlyPoolHost", pool_of("MHATokenToKOnlyPoolHost", Pool))
    pool = pool_of(MLA)
    pool.layout = "page_first_kv_split"
    refused("page_first_kv_split is not supported by the store", pool)
    pool = pool_of(MLA)
    pool.dcp_size = 2
    refused("--dcp-size 1", pool)
    refused("groups of 2 heads .* --hicache-storage-head-group 1",
            pool_of(MHA, layout="page_unified", groups=2))
    pool = pool_of(MHA)
    pool.size -= 1
    refused("not a multiple of its page", pool)
    pool = pool_of(MHA)
    pool.layer_num += 1
    refused("bytes instead of", pool)
    pool = pool_of(MLA)
    pool._is_dummy = True
    refused("without memory", pool)


def test_memory_of_the_shm_allocator_is_found_by_its_files():
    pool = pool_of("AsymmetricMHATokenToKVPoolHost", layout="page_first", v_dim=2 * DIM)
    pool.allocator = types.SimpleNamespace(fds=[7, 8])
    assert [part[2] for part in build(pool, Ranks(1, 0, 0)).parts] == [7, 8]
    pool.allocator.fds = [7]
    assert [part[2] for part in build(pool, Ranks(1, 0, 0)).parts] == [None, None]


# ---- what SGLang passes ------------------------------------------------------------------

def test_ids_are_hashes_of_32_bytes():
    keys = keys_of(3)
    assert ids_of(keys) == [bytes.fromhex(k) for k in keys]
    for wrong in ("", "zz", keys[1][:-2], keys[1] + "00", None):
        assert ids_of([keys[0], wrong, keys[2]]) == ids_of(keys[:1])


def test_pages_are_whole_and_of_the_pool():
    slots = np.concatenate([np.arange(p * PAGE, (p + 1) * PAGE) for p in (3, 0, 7)])
    assert pages_of(slots, 3, PAGE, PAGES).tolist() == [3, 0, 7]
    for wrong in (slots[:-1], slots + 1, slots[::-1], slots - PAGE, slots + PAGE * (PAGES - 7)):
        assert pages_of(wrong, 3, PAGE, PAGES) is None
    assert pages_of(slots, 2, PAGE, PAGES) is None and pages_of([], 0, PAGE, PAGES) is None


def test_lengths_with_present_last_pages():
    there = [True, False, True, True, False, True]
    assert trailing(there, 1) == {1, 3, 4, 6}
    assert trailing(there, 2) == {1, 4}
    assert trailing([True] * 3, 5) == {1, 2, 3} and trailing([], 1) == set()


# ---- the cache ---------------------------------------------------------------------------

def test_any_run_of_pages_is_found_from_any_put(daemon):
    """Nodes of a tree are cut anywhere, and nobody says where they begin."""
    keys = keys_of(12, "runs")
    with Engine(daemon, pool_of(MHA)) as one:
        assert one.put(keys[4:9]) == [True] * 5
        assert one.put(keys[:6], seed=3) == [True] * 6
        assert one.put(keys[9:], seed=4) == [True] * 3
    with Engine(daemon, pool_of(MHA, layout="page_first")) as two:
        assert two.exists(keys) == 12 and two.exists(keys[7:]) == 5
        assert two.get(keys[2:10]) == 8 and two.get(keys[10:], seed=2) == 2
        assert two.exists(keys[:3] + keys_of(1, "none") + keys[3:]) == 3
        assert two.get(keys[10:] + keys_of(2, "none")) == 2
        assert two.cache.present(two.key, keys_of(1, "none") + keys[:2] + keys_of(2, "no") +
                                 keys[8:9]) == [False, True, True, False, False, True]


def test_found_pages_are_held_until_read(daemon):
    keys = keys_of(8, "kept")
    with Engine(daemon, pool_of(MHA)) as one:
        one.put(keys)
        assert one.exists(keys) == 8
        one.cache.finder.ask(one.key, lambda s: s.drop(ids_of(keys), kvd.chunks.ANYWHERE))
        with Engine(daemon, pool_of(MHA)) as other:
            assert other.exists(keys) == 0
        assert one.get(keys[:3]) == 3 and one.get(keys[3:], seed=2) == 5
        until(lambda: one.get(keys[:1]) == 0)
        assert not one.cache.holds._held and not one.cache.holds._where


def test_expired_lease_is_looked_up_again(daemon):
    keys = keys_of(3, "lease")
    with Engine(daemon, pool_of(MHA), lease=0.3) as one:
        one.put(keys)
        assert one.exists(keys) == 3
        clock = one.cache.clock
        one.cache.holds.clock = lambda: clock() - 1000  # it is not noticed
        secret = next(iter(one.cache.holds._held.values())).hold.secret
        until(lambda: one.cache.mover.ask(one.key, lambda s: s.join(secret)) is None)
        assert one.get(keys) == 3


def test_unread_holds_are_released(daemon):
    keys = keys_of(2, "idle")
    with Engine(daemon, pool_of(MHA)) as one:
        one.put(keys)
        for _ in range(200):
            assert one.exists(keys) == 2
        assert len(one.cache.holds._held) <= 64
        one.cache.stop("a test")
        until(lambda: one.exists(keys) == 0 and
              one.clients[0].command("chunk.list")["holds"] == 0)
        assert one.put(keys) == [False] * 2 and one.get(keys) == 0


def test_limit_of_all_holds_is_kept():
    """The daemon bounds it; then others go first, and less is asked for."""
    class Space:
        kept, most = 0, 10

        def find(self, ids, timeout):
            pass

        def hold(self, ids, first, lease, remote, timeout):
            if self.kept + len(ids) > self.most:
                raise kvd.Error("half of its share", "ELIMIT")
            self.kept += len(ids)
            return types.SimpleNamespace(chunks=len(ids), close=lambda t: self.close(ids))

        def close(self, ids):
            self.kept -= len(ids)
    space, keys = Space(), keys_of(32)
    client = types.SimpleNamespace(_kvd=types.SimpleNamespace(poll=lambda: None), lost=False)
    cache = HiCache(SpaceClient(lambda: client, lambda c, k: space), None)
    assert cache.exists("kv", keys[:8]) == 8
    assert cache.exists("kv", keys[8:14]) == 6 and space.kept == 6
    assert cache.exists("kv", keys) == 8 and space.kept == 8
    space.most = 0
    assert cache.exists("kv", keys) == 0 and space.kept == 0


def test_old_pages_make_room_for_new_ones():
    with Daemon("[chunks]\nchunk_memory = 16 MiB\n") as small, \
            Engine(small, pool_of(MHA)) as one:
        for i in range(60):  # others leave
            assert one.put(keys_of(40, "flood%d" % i)) == [True] * 40
        assert one.exists(keys_of(40, "flood59")) == 40


# ---- a daemon that is not there ------------------------------------------------------------

@judging_deaths
def test_without_a_daemon_all_is_a_miss_until_it_is_back():
    keys = keys_of(4, "away")
    with Daemon(CHUNKS, patient=False) as daemon:
        with Engine(daemon, pool_of(MHA)) as one:
            one.put(keys)
            daemon.proc.kill()
            daemon.proc.wait()
            watch = Stopwatch()
            assert one.exists(keys) == one.get(keys) == 0 and one.put(keys) == [False] * 4
            assert watch.seconds() < 1
            daemon.notify.close()
            daemon.start().wait_ready()
            until(lambda: one.put(keys) == [True] * 4)
            until(lambda: one.exists(keys) == 4)
            assert one.get(keys) == 4


def test_absent_daemon_has_no_effect(tmp_path):
    nobody = types.SimpleNamespace(socket_path=str(tmp_path / "nobody.sock"))
    one, keys = Engine(nobody, pool_of(MHA)), keys_of(4)
    watch = Stopwatch()
    for _ in range(100):
        assert one.exists(keys) == one.get(keys) == 0 and one.put(keys) == [False] * 4
    assert watch.seconds() < 30  # each of them that waited would take a second or more
    one.cache.close()


def test_daemon_without_chunks_is_logged_and_left_alone(caplog):
    with Daemon() as plain:
        one, keys = Engine(plain, pool_of(MHA)), keys_of(4)
        for _ in range(10):
            assert one.exists(keys) == 0 and one.put(keys) == [False] * 4
        told = [r for r in caplog.records if "does not serve" in r.getMessage()]
        assert 1 <= len(told) <= 2, told
        one.cache.close()


@judging_deaths
def test_stalled_daemon_is_awaited_once():
    keys = keys_of(4, "still")
    with Daemon(CHUNKS, patient=False) as daemon, Engine(daemon, pool_of(MHA)) as one:
        one.put(keys)
        daemon.freeze()
        try:
            watch = Stopwatch()
            for _ in range(20):
                assert one.exists(keys) == 0
            assert watch.seconds() < 2 * CALL_S
        finally:
            daemon.thaw()
        until(lambda: one.exists(keys) == 4, 20)
        assert one.get(keys) == 4


# ---- other daemons -------------------------------------------------------------------------

def test_pages_of_another_daemon():
    keys = keys_of(9, "far")
    with Daemon(CHUNKS) as there, kvd.Client(there.socket_path) as c:
        with Daemon(CHUNKS + "chunk_peers = %s\n" % c.endpoint) as here, \
                kvd.Client(here.socket_path) as own, \
                Engine(there, pool_of(MHA)) as writer, \
                Engine(here, pool_of(MHA, layout="page_first"), remote=5) as reader:
            until(lambda: own.command("peer.list")["peers"][0]["state"] == "up")
            assert writer.put(keys[:7]) == [True] * 7
            assert reader.exists(keys) == 7
            assert reader.get(keys[:4]) == 4 and reader.get(keys[4:7], seed=2) == 3
            assert reader.get(keys[2:5], seed=3) == 3, "without having asked before"
            assert reader.put(keys[:2]) == [True] * 2
            assert reader.exists(keys) == reader.get(keys[:7]) == 7, "own ones, then others'"
            reader.cache.remote = None
            assert reader.exists(keys) == 2


class Told:
    """Prices, and a log of what was asked."""

    def __init__(self, computes):
        self.way, self.asked = computes, []

    def page(self, client):
        return client.cost_page(CALL_S)

    def computes(self, page, holders):
        self.asked.append(list(holders.values()))
        return self.way


@contextlib.contextmanager
def away(keys, **kw):
    """Pages at another daemon -> the engine of this one"""
    with Daemon(CHUNKS) as there, kvd.Client(there.socket_path) as c:
        with Daemon(CHUNKS + "chunk_peers = %s\n" % c.endpoint) as here, \
                kvd.Client(here.socket_path) as own, Engine(there, pool_of(MHA)) as writer, \
                Engine(here, pool_of(MHA, layout="page_first"), remote=5, **kw) as reader:
            until(lambda: own.command("peer.list")["peers"][0]["state"] == "up")
            assert writer.put(keys) == [True] * len(keys)
            yield reader


def fetched(engine):
    return engine.clients[0].command("chunk.list")["fetched_bytes"]


def test_pages_cheaper_to_compute_are_not_promised():
    keys, told = keys_of(8, "dear"), Told(True)
    with away(keys, prices=told) as reader:
        def priced(some):
            return reader.cache.exists(reader.key, some, priced=True)
        assert priced(keys) == 0 and told.asked == [[8 * PAGE]]
        assert not reader.cache.holds._held, "nothing is to be read"
        assert reader.put(keys[:3], seed=2) == [True] * 3
        assert priced(keys) == 3 and told.asked[1:] == [[5 * PAGE]]
        assert reader.get(keys[:3]) == 3 and not reader.cache.holds._held
        assert priced(keys[:3]) == 3 and len(told.asked) == 2, "own pages have no price"
        begin = fetched(reader)
        assert reader.exists(keys) == 8 and len(told.asked) == 2, "a pool that follows another"
        told.way = False
        assert priced(keys) == 8
        told.way = True
        assert reader.get(keys, seed=3) == 8, "what was promised is read"
        until(lambda: fetched(reader) > begin)
        assert len(told.asked) == 3


def test_without_an_answer_of_prices_pages_are_fetched():
    keys, told = keys_of(4, "priceless"), Told(True)
    with away(keys, prices=told) as reader:
        told.page = lambda client: client.command("no such command")
        assert reader.cache.exists(reader.key, keys, priced=True) == 4 and not told.asked
        reader.cache.finder.until = 0
        assert reader.get(keys) == 4


class Published(Prices):
    """Of a fabric whose one peer has all pages."""

    def page(self, client):
        return kvd.cost.preset("h100-ibgda")

    def computes(self, page, holders):
        return super().computes(page, {(kvd.cost.SELF, False): sum(holders.values())})


@pytest.mark.parametrize("token_us, found", [(0.0, 24), (1000.0, 24), (1e-6, 0)])
def test_prices_of_a_fabric_decide(token_us, found):
    """The time of a token is unknown, long, or short."""
    keys, prices = keys_of(24, "fabric"), Published(timed=True)
    with away(keys, prices=prices) as reader:
        prices.model, prices.token_us = model_of(reader.made.layout.text()), token_us
        assert reader.cache.exists(reader.key, keys, priced=True) == found
        assert reader.get(keys[:found]) == found if found else not reader.cache.holds._held


def test_loads_and_puts_are_counted():
    counts = {}

    def count(**values):
        for name, value in values.items():
            counts[name] = counts.get(name, 0) + value
    keys = keys_of(6, "counted")
    with away(keys, prices=Told(True), count=count) as reader:
        page = PAGE * HEADS * LAYERS * 2 * 2 * DIM
        assert reader.cache.exists(reader.key, keys, priced=True) == 0
        assert counts == {"asked": 6, "found": 6}
        assert reader.exists(keys + keys_of(2, "none")) == 6
        assert reader.get(keys + keys_of(2, "none")) == 6
        assert (counts["asked"], counts["found"], counts["bytes"]) == (14, 12, 6 * page)
        assert counts["seconds"] > 0 and counts["failed_loads"] == 1
        assert reader.put(keys_of(5, "own")) == [True] * 5
        assert counts["saved_bytes"] == 5 * page and "failed_saves" not in counts
        reader.cache.mover.until = float("inf")
        assert reader.put(keys_of(2, "lost")) == [False] * 2
        reader.cache.stop("a test")
        assert reader.put(keys_of(2, "lost")) == [False] * 2
        assert counts["failed_saves"] == 1 and counts["failed_loads"] == 1
