# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm's store without vLLM: loads and saves of a rank by a real daemon."""
import json
import time
import types

import numpy as np
import pytest

import kvd
from conftest import judging_deaths, until
from kvd.stores import space_client
from kvd.stores.space_client import SpaceClient
from kvd.vllm import pools
from kvd.vllm.store_plan import BlockIds, Plan, Step, Words, whole_layout
from kvd.vllm.store_worker import Load, Rank
from kvd_daemon import Daemon
from test_vllm_plan import BLOCK, NAMED, Request, T, digest

CHUNKS = "[chunks]\nchunk_memory = 64 MiB\n"
LAYERS, BLOCKS, HEADS, HEAD = 2, 64, 4, 32


# ---- ranks and a real daemon ---------------------------------------------------------------

@pytest.fixture(scope="module")
def daemon():
    with Daemon(CHUNKS) as d:
        yield d


class Side:
    """One rank: a cache of two layers, [block][token][head]."""

    def __init__(self, daemon, tp=1, rank=0, block=BLOCK, grain=1, ratio=1, mark=None,
                 latent=False):
        """grain: of tokens that lie in an order of their own; latent: one for all heads."""
        self.client = kvd.Client(daemon.socket_path, client="vllm")
        heads, self.block, self.tp = HEADS // tp, block, tp
        whole = latent or grain > 1
        self.cache = np.zeros((LAYERS, BLOCKS, block, heads, HEAD), np.uint8)
        layout, layer = kvd.Layout(rank), self.cache[0].nbytes
        layout.buffer(self.cache.nbytes)
        layout.view("kv", block // ratio // grain, BLOCKS * ratio)
        token = heads * HEAD
        for i in range(LAYERS):
            layout.field("kv", i, "k", buffer=0, offset=i * layer,
                         page_stride=token * block // ratio,
                         token_stride=token * grain,
                         unit_stride=token * grain if whole else HEAD,
                         unit_bytes=token * grain if whole else HEAD,
                         units=1 if whole else heads, first_unit=0 if whole else rank * heads,
                         total_units=1 if whole else HEADS)
        self.layout, self.counts = layout, []
        pool = self.client.pool(layout, [self.client.register(self.cache)],
                                name="store.%d.%d" % (id(self), rank))
        group = pools.Group("kv", "kv", block, ratio, grain, 0, 0)
        self.spaces = SpaceClient(None, lambda c, words: c.space(pool, **words._asdict()),
                                  self.client)
        self.rank = Rank(self.spaces, group, mark or (lambda: None), self.count)

    def count(self, **values):
        self.counts.append(values)

    def total(self, name):
        return sum(values.get(name, 0) for values in self.counts)

    def fill(self, blocks, seed):
        """As a prompt of this seed has them: heads of all ranks alike in all sizes."""
        tokens = len(blocks) * self.block
        whole = np.random.default_rng(seed).integers(
            1, 256, (LAYERS, 1024, HEADS, HEAD), np.uint8)[:, :tokens]
        heads = self.cache.shape[3]
        first = self.layout.rank * heads if self.tp > 1 else 0
        whole = whole[:, :, first:first + heads]
        return whole.reshape(LAYERS, len(blocks), self.block, heads, HEAD)

    def write(self, blocks, seed):
        self.cache[:, blocks] = self.fill(blocks, seed)

    def holds(self, blocks, seed, begin, end):
        """Are tokens [begin, end) those of the seed, in the blocks of the whole prompt?"""
        want = self.fill(blocks, seed).reshape(LAYERS, -1, self.cache.shape[3], HEAD)
        got = self.cache[:, blocks].reshape(want.shape)
        return (got[:, begin:end] == want[:, begin:end]).all()

    def results(self):
        """Once all has ended."""
        sent, received = set(), set()

        def over():
            s, r = self.rank.results()
            sent.update(s)
            received.update(r)
            return not self.rank.loads and not self.rank.puts
        until(over)
        return sent, received

    def save(self, words, ids, blocks, name="a", first=0, ends=True):
        self.rank.saved(Step(words=words, saves=[(name, first, b"".join(ids), blocks, words)],
                             ends=[name] if ends else []))

    def __enter__(self):
        assert until(lambda: self.spaces.ask(NAMED._replace(tokens=T), lambda s: True))
        return self

    def __exit__(self, *exc):
        self.rank.quiet()
        self.client.close()


def words_of(test, tokens=T):
    return NAMED._replace(model=test, tokens=tokens)


def ids_of(test, count):
    return [digest((test, i)) for i in range(count)]


def held(side, words, ids, first=0, lease=None):
    """By a scheduler of its own session, with the layout of the whole model."""
    hold = side.spaces.ask(words, lambda space: space.hold(ids, first, lease=lease))
    return hold


def step_of(words, hold, blocks, begin, end, name="a"):
    return Step(words=words, loads=[(name, hold.secret, blocks, begin, end)])


@pytest.mark.parametrize("there, here", [
    (dict(), dict()), (dict(), dict(block=64)), (dict(block=32), dict(block=16)),
    (dict(block=32, ratio=2), dict(block=16)), (dict(), dict(block=64, ratio=4)),
    (dict(grain=2), dict(grain=2, block=32))])
def test_saved_blocks_are_loaded_into_other_blocks(daemon, there, here):
    words, ids = words_of(str((there, here))), ids_of(str((there, here)), 4)
    with Side(daemon, **there) as a, Side(daemon, **here) as b:
        grain = there.get("grain", 1)
        words = words._replace(tokens=T // grain)
        blocks = list(range(3, 3 + 4 * T // a.block))
        a.write(blocks, 5)
        a.save(words, ids, blocks)
        assert a.results() == ({"a"}, set())
        assert a.total("saved_bytes") == LAYERS * 4 * T * HEADS * HEAD
        into = list(range(40, 40 + 4 * T // b.block))
        begin = b.block * 2  # the engine has these
        hold = held(b, words, ids[begin // T:], begin // T)
        b.rank.take(step_of(words, hold, into[2:], begin, 4 * T))
        assert b.results() == (set(), {"a"}) and not b.rank.bad_blocks()
        assert b.holds(into, 5, begin, 4 * T) and not b.cache[:, into[:2]].any()
        assert not b.cache[:, :40].any() and b.total("failed_loads") == 0


def test_scheduler_finds_chunks_of_all_its_ranks(daemon):
    words, ids = words_of("ranks"), ids_of("ranks", 2)
    sides = [Side(daemon, tp=2, rank=r) for r in range(2)]
    with sides[0], sides[1], Side(daemon) as one, kvd.Client(daemon.socket_path) as c:
        plan = Plan(SpaceClient(lambda: c, lambda c, key: c.space(key[0], **key[1]._asdict())),
                    BlockIds(BLOCK), words, BLOCK, T, ranks=2)
        plan.told({(0, 1): (sides[1].layout.text(), 1, None)})
        assert plan.words is None
        plan.told({(0, 0): (sides[0].layout.text(), 1, None)})
        request = Request(200)
        request.block_hashes[3::4] = ids_of("ranks", 3)
        blocks = list(range(8))
        for i, side in enumerate(sides):
            plan.requests.clear()
            plan.arrived(request)
            assert plan.matched(request, 0) == (0, False), "%d of 2 ranks" % i
            side.write(blocks, 6)
            side.save(words, ids, blocks)
            side.results()
        plan.requests.clear()
        plan.arrived(request)
        assert plan.matched(request, 0) == (128, True)
        secret = plan.requests["a"].held.secret
        for side in [*sides, one]:
            into = list(range(20, 28))
            side.rank.take(Step(words=words, loads=[("a", secret, into, 0, 128)]))
            side.results()
            assert side.holds(into, 6, 0, 128) and not side.rank.bad_blocks()
        plan.requests.clear()


def test_latent_of_all_ranks_is_stored_once(daemon):
    words, ids = words_of("latent"), ids_of("latent", 2)
    with Side(daemon, latent=True) as a, \
            Side(daemon, rank=1, latent=True) as b, Side(daemon, latent=True) as c:
        bytes_before = a.client.command("chunk.list")["put_bytes"]
        for side in (a, b):
            side.write(list(range(8)), 2)
            side.save(words, ids, list(range(8)))
        a.results()
        b.results()
        put = a.client.command("chunk.list")["put_bytes"] - bytes_before
        assert put == a.cache[:, :8].nbytes, "one of them"
        layout = whole_layout([a.layout.text(), b.layout.text()])
        (f,) = json.loads(layout)["views"]["kv"]["layers"][0]["fields"]
        assert (f["units"], f["total_units"]) == (1, 1)
        for side in (a, b, c):
            hold = held(side, words, ids)
            side.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
            side.results()
            assert side.holds(list(range(20, 28)), 2, 0, 128)


def test_layers_of_several_stages_are_one_layout():
    stages = []
    for layers in ((0, 1), (2, 3)):
        layout = kvd.Layout()
        layout.buffer(1 << 20)
        layout.view("kv", 16, 4)
        for n in layers:
            layout.heads("kv", n, "k", kvd.HND, buffer=0, unit_bytes=8, units=2, first_unit=2,
                         total_units=4, format="bf16")
        stages.append(layout.text())
    (view,) = json.loads(whole_layout(stages))["views"].values()
    assert [one["layer"] for one in view["layers"]] == [0, 1, 2, 3]
    for one in view["layers"]:
        (f,) = one["fields"]
        assert (f["units"], f["first_unit"], f["total_units"], f["format"]) == (4, 0, 4, "bf16")


def test_load_with_expired_lease_has_no_block(daemon, caplog):
    words, ids = words_of("lease"), ids_of("lease", 2)
    with Side(daemon) as a:
        a.save(words, ids, list(range(8)))
        a.results()
        hold = held(a, words, ids, lease=0.02)
        until(lambda: not a.spaces.ask(words, lambda s: s.join(hold.secret)))
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        assert a.results() == (set(), {"a"})
        assert a.rank.bad_blocks() == set(range(20, 28)) and not a.rank.bad_blocks()
        assert a.total("failed_loads") == 1 and "8 of 8 blocks" in caplog.text
        a.save(words, ids, list(range(8)), "b")  # the store is not away for that
        assert a.results()[0] == {"b"} and a.total("failed_saves") == 0


@pytest.mark.parametrize("tokens, grain, whole", [(0, 1, 0), (64, 1, 4), (80, 1, 5),
                                                  (79, 1, 4), (4, 16, 4)])
def test_landed_blocks_are_not_computed(tokens, grain, whole):
    class Failed:
        state = kvd.FAILED

        def read(self):
            return types.SimpleNamespace(state=kvd.FAILED, bytes=0)

        def show(self, timeout):
            return types.SimpleNamespace(prefix_tokens=tokens, error="broken")
    rank = Rank(types.SimpleNamespace(why=None, client=None),
                pools.Group("kv", "kv", 16, 1, grain, 0, 0), None, lambda **kw: None)
    rank.turn = lambda: None
    rank.loads["a"] = Load(Failed(), None, list(range(10, 18)))
    assert rank.results() == (set(), {"a"})
    assert rank.bad_blocks() == set(range(10 + whole, 18))


class Late:
    """A mark that is passed by hand."""

    def __init__(self):
        self.memory = kvd.Memory(4096, "mark")
        self.word = self.memory.array((512,), np.uint64)
        self.region, self.made = None, 0

    def __call__(self):
        self.region = self.region or self.side.client.register(self.memory)
        self.made += 1
        return self.region, 0, self.made

    def passed(self):
        self.word[0] = self.made


@pytest.fixture
def late(daemon):
    mark = Late()
    with Side(daemon, mark=mark) as side:
        mark.side = side
        yield side, mark


def test_request_is_reported_when_its_puts_have_ended(late):
    side, mark = late
    words, ids = words_of("late"), ids_of("late", 3)
    blocks = list(range(12))
    side.save(words, ids[:2], blocks[:8], ends=False)
    mark.passed()
    side.save(words, ids[2:], blocks[8:], first=2)
    until(lambda: len(side.rank.results()[0]) == 0 and len(side.rank.puts["a"]) == 1)
    side.write(blocks, 7)  # the step behind the mark computes late
    assert side.rank.results() == (set(), set())
    mark.passed()
    assert side.results() == ({"a"}, set())
    assert side.rank.results() == (set(), set())
    hold = held(side, words, ids)
    side.rank.take(step_of(words, hold, list(range(20, 32)), 0, 192))
    side.results()
    assert side.holds(list(range(20, 32)), 7, 128, 192)


def test_preempted_request_is_not_read(late):
    side, mark = late
    words, ids = words_of("preempted"), ids_of("preempted", 2)
    blocks = list(range(8))
    side.write(blocks, 8)
    side.save(words, ids, blocks, ends=False)
    side.rank.begin(Step(settles=["a", "unknown"]))
    assert not side.rank.puts
    side.write(blocks, 9)  # another request's
    mark.passed()
    assert held(side, words, ids).chunks == 0
    until(lambda: side.client.command("chunk.list")["moves"] == 0)
    assert held(side, words, ids).chunks == 0
    side.write(blocks, 8)
    side.save(words, ids, blocks, "again")
    mark.passed()
    assert side.results()[0] == {"again"} and held(side, words, ids).chunks == 2


def test_stream_without_mark_saves_nothing(daemon):
    def broken():
        raise kvd.Error("the stream is gone", "EIO", 36)
    words, ids = words_of("unmarked"), ids_of("unmarked", 2)
    with Side(daemon, mark=broken) as a:
        a.save(words, ids, list(range(8)))
        assert a.results() == ({"a"}, set()) and a.total("failed_saves") == 1
        assert held(a, words, ids).chunks == 0


def test_step_freeing_blocks_waits_for_their_readers():
    class Slow:
        looks, aborted = 0, False

        @property
        def state(self):
            self.looks += self.aborted
            return kvd.FAILED if self.looks > 5 else kvd.TRANSFERRING

        def abort(self, timeout):
            self.aborted = True
    rank = Rank(None, None, None, None)
    rank.turn = lambda: None
    moves = rank.puts["a"] = [Slow(), Slow()]
    rank.begin(Step(settles=["a"]))
    assert all(move.looks > 5 for move in moves) and not rank.puts


def test_abandoned_load_is_reported_when_quiesced(late):
    side, mark = late
    words, ids = words_of("dropped"), ids_of("dropped", 2)
    side.write(list(range(8)), 3)
    side.save(words, ids, list(range(8)))
    mark.passed()
    side.results()
    hold = held(side, words, ids)
    fetch = kvd.chunks.Hold.fetch
    try:  # so that it is not over before it is given up
        kvd.chunks.Hold.fetch = lambda self, views, **kw: fetch(self, views, wait=mark(), **kw)
        side.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
    finally:
        kvd.chunks.Hold.fetch = fetch
    assert side.rank.results() == (set(), set())
    side.rank.take(Step(words=words, drops=["a", "unknown"]))
    assert side.results() == (set(), {"a"})
    assert not side.rank.bad_blocks() and side.total("failed_loads") == 0
    mark.passed()
    assert not side.cache[:, 20:28].any()


# ---- a store that goes away --------------------------------------------------------------

def test_restarted_daemon_is_a_miss_and_then_serves():
    words, ids = words_of("restart"), ids_of("restart", 2)
    blocks = list(range(8))
    with Daemon(CHUNKS) as daemon, Side(daemon) as a:
        a.write(blocks, 4)
        a.save(words, ids, blocks)
        assert a.results() == ({"a"}, set())
        hold = held(a, words, ids)
        daemon.proc.kill()
        daemon.proc.wait()
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        assert a.results() == (set(), {"a"}) and len(a.rank.bad_blocks()) == 8
        a.save(words, ids, blocks, "b")
        assert a.results()[0] == {"b"} and a.total("failed_saves") == 1
        daemon.notify.close()
        daemon.start().wait_ready()
        assert until(lambda: a.spaces.ask(words, lambda s: s.find(ids))).chunks == 0
        a.save(words, ids, blocks, "c")
        assert a.results()[0] == {"c"}
        hold = held(a, words, ids)
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        a.results()
        assert a.holds(list(range(20, 28)), 4, 0, 128)


def test_lost_session_returns_within_a_few_steps():
    words = words_of("returns")
    with Daemon(CHUNKS) as daemon, Side(daemon) as a:
        daemon.proc.kill()
        daemon.proc.wait()
        assert a.spaces.ask(words, lambda s: True) is None and a.client.lost
        daemon.notify.close()
        daemon.start().wait_ready()

        def returned():
            assert a.rank.results() == (set(), set())
            return not a.client.lost
        assert until(returned), "only calls open a session again"


def test_put_under_way_ends_with_its_daemon():
    mark = Late()
    with Daemon(CHUNKS) as daemon, Side(daemon, mark=mark) as a:
        mark.side = a
        a.save(words_of("dies"), ids_of("dies", 2), list(range(8)))
        assert a.rank.results() == (set(), set())
        daemon.proc.kill()
        daemon.proc.wait()
        assert a.results()[0] == {"a"} and a.total("failed_saves") == 1
        daemon.notify.close()
        daemon.start().wait_ready()
        assert until(lambda: a.spaces.ask(words_of("dies"), lambda s: True))


@judging_deaths
def test_stalled_daemon_costs_one_call_and_no_block():
    words, ids = words_of("frozen"), ids_of("frozen", 2)
    with Daemon(CHUNKS, patient=False) as daemon, Side(daemon) as a:
        a.save(words, ids, list(range(8)))
        a.results()
        hold = held(a, words, ids)
        daemon.freeze()
        try:
            a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128, "b"))
            assert a.rank.loads["b"].move is None and a.spaces.ask(words, None) is None, \
                "the next calls do not wait"
            assert a.rank.results() == (set(), {"b"})
            assert a.rank.bad_blocks() == set(range(20, 28))
            a.spaces.until = 0
            more = ids_of("frozen more", 2)
            a.write(list(range(8)), 3)
            begin = time.monotonic()
            a.save(words, more, list(range(8)), "c")
            assert time.monotonic() - begin < space_client.CALL_S, "a put waits for nobody"
            assert a.rank.results() == (set(), set()), "the daemon may read its blocks"
        finally:
            daemon.thaw()
        assert a.results()[0] == {"c"}
        a.spaces.until = 0
        hold = until(lambda: held(a, words, more))
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        a.results()
        assert a.holds(list(range(20, 28)), 3, 0, 128)


def test_moves_use_commands_when_shared_memory_is_full(daemon, monkeypatch):
    asked = []

    def full(call):
        def posted(self, *args, **kw):
            asked.append(kw.get("post", False))
            if kw.get("post"):
                raise kvd.BusyError("it is full", "EFULL", 1)
            return call(self, *args, **kw)
        return posted
    monkeypatch.setattr(kvd.chunks.Space, "put", full(kvd.chunks.Space.put))
    monkeypatch.setattr(kvd.chunks.Hold, "fetch", full(kvd.chunks.Hold.fetch))
    words, ids = words_of("full"), ids_of("full", 2)
    with Side(daemon) as a:
        a.write(list(range(8)), 1)
        a.save(words, ids, list(range(8)))
        assert a.results() == ({"a"}, set())
        hold = held(a, words, ids)
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        assert a.results() == (set(), {"a"}) and a.holds(list(range(20, 28)), 1, 0, 128)
    assert asked == [True, False, True, False]
