# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm's store without vLLM: what chunks are called, what the scheduler asks for and saves
(the store is faked), and loads and saves of a rank by a real daemon."""
import hashlib
import json
import time
import types
from collections import namedtuple

import numpy as np
import pytest

import kvd
from conftest import judging_deaths, until
from kvd.stores import door as store_door
from kvd.stores.door import Door
from kvd.stores.names import word
from kvd.vllm import pools, store_plan
from kvd.vllm.store_plan import (Adapters, BlockIds, Known, Plan, Step, TokenIds, Words, chunk_tokens,
                                 whole_layout)
from kvd.vllm.store_worker import Load, Rank
from kvd_daemon import Daemon

BLOCK, T = 16, 64
CHUNKS = "[chunks]\nchunk_memory = 64 MiB\n"
NAMED = Words("m", "r", "s", "", 0)
LAYERS, BLOCKS, HEADS, HEAD = 2, 64, 4, 32


def digest(thing):
    return hashlib.sha256(repr(thing).encode()).digest()


class Request:
    """As far as the store looks at one."""

    def __init__(self, tokens, name="a", block=BLOCK, seed=0):
        rng = np.random.default_rng(seed)
        self.request_id = name
        self.all_token_ids = [int(t) for t in rng.integers(0, 1000, tokens)]
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.block_hashes, last = [], b""
        for i in range(tokens // block):
            last = digest((last, self.all_token_ids[i * block:(i + 1) * block]))
            self.block_hashes.append(last)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


# ---- names -------------------------------------------------------------------------------

def test_a_chunk_is_called_as_its_last_block():
    known = Known(Request(200))
    hashes = known.request.block_hashes
    assert BlockIds(16).of(known, 64, 3) == [hashes[3], hashes[7], hashes[11]]
    assert BlockIds(16).of(known, 16, 2) == hashes[:2]
    assert BlockIds(16).of(known, 64, 9) == [hashes[3], hashes[7], hashes[11]]


def test_ids_of_tokens_do_not_know_of_blocks():
    calls = []

    def counted(thing):
        calls.append(thing)
        return digest(thing)

    def nothing(request, begin, end, image):
        return None, image
    ids = TokenIds(counted, nothing)
    a, b = Known(Request(300, block=16)), Known(Request(300, block=96))
    assert ids.of(a, 64, 4) == ids.of(b, 64, 4) and len(set(ids.of(a, 64, 4))) == 4
    made = len(calls)
    assert ids.of(a, 64, 3) == ids.of(a, 64, 4)[:3] and len(calls) == made
    assert len(ids.of(a, 64, 9)) == 4, "whole chunks only"
    assert ids.of(Known(Request(300, seed=1)), 64, 1) != ids.of(a, 64, 1)


def test_ids_of_tokens_know_of_salts_and_images():
    seen = []

    def extra(request, begin, end, image):
        seen.append((begin, end, image))
        return ((request.salt,) if begin == 0 else None), image + 1

    def ids_of(salt):
        request = Request(200)
        request.salt = salt
        return TokenIds(digest, extra).of(Known(request), 64, 3)
    assert ids_of("x") == ids_of("x")
    assert not set(ids_of("x")) & set(ids_of("y")), "a chain: all of them"
    assert seen[:3] == [(0, 64, 0), (64, 128, 1), (128, 192, 2)]


@pytest.mark.parametrize("asked, block, tokens", [
    (None, 16, 256), (None, 32, 256), (None, 48, 288), (None, 512, 512), (64, 16, 64)])
def test_a_chunk_is_whole_blocks(asked, block, tokens):
    assert chunk_tokens(asked, block) == tokens


@pytest.mark.parametrize("asked", [0, -16, 40, "64", True, 1.5])
def test_chunks_of_other_sizes_are_refused(asked):
    with pytest.raises(ValueError, match="multiple of the block size, 16"):
        chunk_tokens(asked, 16)


def test_a_long_word_differs_where_it_is_cut():
    long = [word("x" * 300 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(w.encode()) <= 200 for w in long)
    assert word("é" * 150) != word("é" * 151) and len(word("é" * 151).encode()) <= 200
    assert word("a\nb") != word("a\rb") != word("a?b") == "a?b" and word(5) == "5"


# ---- the scheduler, with a store that is faked ---------------------------------------------

Found = namedtuple("Found", "chunks secret")


class Store:
    """A Door that has the first `there` chunks of any prompt."""

    def __init__(self, there=0):
        self.there, self.asked, self.away = there, [], False

    def ask(self, key, call):
        return None if self.away else call(self)

    def hold(self, ids, first, lease, far, timeout):
        self.asked.append((first, len(ids)))
        return Found(max(0, min(len(ids), self.there - first)), b"secret")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def plan_of(there=0, told=True, **kw):
    store, clock = Store(there), Clock()
    plan = Plan(store, BlockIds(BLOCK), NAMED, BLOCK, T, clock=clock, **kw)
    if told:
        plan.told({(0, 0): (layout_text(), 1)})
    return plan, store, clock


def layout_text():
    layout = kvd.Layout()
    layout.buffer(1 << 20)
    layout.view("kv", BLOCK, 16).heads("kv", 0, "k", buffer=0, unit_bytes=32, units=2)
    return layout.text()


def table(n=200):
    """Block i is number 1000 + i."""
    return ([1000 + i for i in range(n)],)


def output(counts, preempted=()):
    state = types.SimpleNamespace(get_block_ids=lambda name: table())
    return types.SimpleNamespace(num_scheduled_tokens=counts, preempted_req_ids=set(preempted),
                                 kv_connector_block_state=state)


def computes(plan, request, count):
    """A step that computes so many of its tokens -> Step"""
    step = plan.take(output({request.request_id: count}))
    request.num_computed_tokens += count
    return step


def arrive(plan, tokens, name="a"):
    request = Request(tokens, name)
    plan.arrived(request)
    return request


# ---- adapters ------------------------------------------------------------------------------

def lora_plan(weights, there=9):
    warned = []
    log = types.SimpleNamespace(warning=lambda text, *args: warned.append(text % args))
    plan, store, _ = plan_of(there, adapters=Adapters(weights.get, log))
    return plan, store, warned


def lora_ids(plan, name, path="/a"):
    """What a request of that adapter finds, and what it saves."""
    request = Request(300, name)
    request.lora_request = path and types.SimpleNamespace(lora_name="a", lora_path=path)
    plan.arrived(request)
    found = plan.matched(request, 0)[0]
    plan.requests[name].saved = 0
    saves = computes(plan, request, 300).saves
    return found, [one[2] for one in saves]


def test_an_adapter_that_was_trained_anew_has_other_chunks():
    told = []
    for weights in ("old", "new", "old"):
        plan, _, warned = lora_plan({"/a": weights})
        found, ids = lora_ids(plan, "x")
        assert found and len(ids) == 1 and not warned
        told.append(ids[0])
    assert told[0] == told[2] != told[1]
    assert lora_ids(plan, "bare", None)[1][0] not in told


def test_an_adapter_that_changes_under_a_running_engine_has_no_chunks():
    weights = {"/a": "old", "/b": "other"}
    plan, store, warned = lora_plan(weights)
    assert lora_ids(plan, "x")[1]
    weights["/a"] = "new"
    asked = len(store.asked)
    assert lora_ids(plan, "y") == (0, []) and len(store.asked) == asked
    weights["/a"] = "old"  # which of the two is loaded?
    assert lora_ids(plan, "z") == (0, [])
    assert len(warned) == 1 and "has changed" in warned[0] and "revision" in warned[0]
    assert lora_ids(plan, "b", "/b")[1] and lora_ids(plan, "bare", None)[1]


def test_an_adapter_of_which_nothing_is_known_has_no_chunks():
    plan, _, warned = lora_plan({})
    assert lora_ids(plan, "x") == (0, []) and lora_ids(plan, "y") == (0, [])
    assert len(warned) == 1 and "no folder" in warned[0]
    plan, _, _ = plan_of(9)  # the user's word stands for it
    assert lora_ids(plan, "x")[1] == lora_ids(plan, "y", None)[1]


@pytest.mark.parametrize("tokens, computed, there, end", [
    (63, 0, 9, 0), (64, 0, 9, 0), (65, 0, 9, 64), (128, 0, 9, 64), (129, 0, 9, 128),
    (300, 0, 2, 128), (300, 0, 0, 0), (300, 64, 9, 256), (300, 80, 9, 256), (300, 80, 2, 128),
    (300, 128, 2, 0), (300, 256, 9, 0), (300, 240, 9, 256)])
def test_what_is_behind_the_own_cache_is_loaded_but_for_a_token(tokens, computed, there, end):
    plan, store, _ = plan_of(there)
    request = arrive(plan, tokens)
    wanted = (end - computed, True) if end else (0, False)
    assert plan.matched(request, computed) == wanted
    assert all(first == computed // T for first, _ in store.asked)


def test_a_queued_request_is_not_asked_for_in_each_step():
    plan, store, clock = plan_of(0)
    request = arrive(plan, 300)
    for _ in range(5):
        assert plan.matched(request, 0) == (0, False)
    assert store.asked == [(0, 4)]
    store.there = 3
    clock.now += store_plan.AGAIN_S
    for _ in range(5):
        assert plan.matched(request, 0) == (192, True)
    assert len(store.asked) == 2
    assert plan.matched(request, 64) == (128, True), "its own cache has more now"
    assert store.asked[2] == (1, 3)
    clock.now += plan.lease / 2
    plan.matched(request, 64)
    assert len(store.asked) == 4, "before the lease ends"
    assert plan.take_counts() == (4 + 4 + 3 + 3, 3 + 2 + 2) and plan.take_counts() == (0, 0)


def test_nothing_is_asked_before_the_workers_have_told_what_they_have():
    plan, store, clock = plan_of(3, told=False)
    request = arrive(plan, 300)
    assert plan.matched(request, 0) == (None, False)
    assert plan.take(output({})).words is None
    plan.told({(0, 0): (layout_text(), 1)})
    assert plan.matched(request, 0) == (192, True)
    assert plan.take(output({})).words == NAMED._replace(tokens=T)
    plan, store, clock = plan_of(3, told=False)
    request = arrive(plan, 300)
    plan.matched(request, 0)
    clock.now += store_plan.START_S
    assert plan.matched(request, 0) == (0, False), "it does not wait for ever"


def test_a_cache_whose_blocks_are_whole_has_chunks_of_sixteen_at_least():
    plan, _, _ = plan_of(told=False)
    plan.told({(0, 0): (layout_text(), BLOCK)})
    assert (plan.tokens, plan.words.tokens) == (256, 16)


def test_requests_that_may_not_read_do_not():
    for change in ("skip", "producer", "unknown", "away"):
        plan, store, _ = plan_of(9, loads=change != "producer")
        request = Request(300) if change == "unknown" else arrive(plan, 300)
        request.skip_reading_prefix_cache = change == "skip"
        store.away = change == "away"
        assert plan.matched(request, 0) == (0, False), change
        assert not store.asked, change


def load(plan, request, computed=0):
    """It gets its blocks -> Step"""
    tokens, later = plan.matched(request, computed)
    assert later
    plan.allocated(request, table, tokens)
    return plan.take(output({}))


def test_a_load_names_the_blocks_of_its_tokens():
    plan, _, _ = plan_of(3)
    request = arrive(plan, 300)
    assert load(plan, request, 80).loads == [
        ("a", b"secret", [1000 + i for i in range(5, 12)], 80, 192)]
    assert plan.take(output({})).loads == []
    plan.heard({"a"}, set())
    plan.allocated(request, table, 0)  # vLLM's second call, for the rest
    request.num_computed_tokens = 192
    assert computes(plan, request, 108).saves == [("a", 3, request.block_hashes[15],
                                                  [1012, 1013, 1014, 1015])]


def test_a_load_that_another_connector_makes_is_let_go():
    plan, _, _ = plan_of(3)
    request = arrive(plan, 300)
    plan.matched(request, 0)
    plan.allocated(request, table, 0)
    assert plan.take(output({})).loads == []
    request.num_computed_tokens = 299
    assert [s[:2] for s in computes(plan, request, 1).saves] == [("a", 3)], "the store has 3"


def test_a_load_that_failed_is_computed_and_saved_and_not_tried_again():
    plan, store, _ = plan_of(3)
    request = arrive(plan, 300)
    load(plan, request)
    plan.heard((), {77})
    plan.heard({"a"}, {1008})
    assert plan.matched(request, 0) == (0, False) and len(store.asked) == 1
    assert [s[:2] for s in computes(plan, request, 300).saves] == [("a", 0)]


def test_chunks_are_saved_when_they_are_whole():
    plan, _, _ = plan_of()
    request = arrive(plan, 300)
    plan.matched(request, 0)
    hashes = request.block_hashes
    assert computes(plan, request, 63).saves == []
    assert computes(plan, request, 70).saves == [
        ("a", 0, hashes[3] + hashes[7], [1000 + i for i in range(8)])]
    assert computes(plan, request, 10).saves == []
    assert computes(plan, request, 157).saves == [
        ("a", 2, hashes[11] + hashes[15], [1000 + i for i in range(8, 16)])]
    assert plan.finished(request, table()) is True
    step = plan.take(output({}))
    assert (step.saves, step.ends) == ([], ["a"])


def test_a_prompt_that_is_here_is_not_saved_again_but_with_what_follows_it():
    plan, _, _ = plan_of()
    request = arrive(plan, 300)
    plan.matched(request, 256)
    request.num_computed_tokens = 256
    assert computes(plan, request, 44).saves == []
    assert plan.finished(request, table()) is False
    longer = arrive(plan, 400)
    plan.matched(longer, 256)
    longer.num_computed_tokens = 256
    assert [s[:2] for s in computes(plan, longer, 144).saves] == [("a", 0)]


def test_the_answer_is_saved_and_drafts_are_not():
    plan, _, _ = plan_of()
    request = arrive(plan, 120)
    plan.matched(request, 0)
    assert [s[1] for s in computes(plan, request, 120).saves] == [0]
    more = Request(192).all_token_ids[120:]
    whole = Request(192)
    request.block_hashes = whole.block_hashes
    request.all_token_ids = request.all_token_ids + more[:7]
    assert computes(plan, request, 8).saves == [], "token 127 is a draft"
    request.num_in_flight_tokens = 8
    request.all_token_ids = request.all_token_ids + more[7:8]
    assert plan.finished(request, table()) is True
    step = plan.take(output({}))
    assert step.saves == [] and step.ends == ["a"], "a step in flight writes token 127"
    request.num_in_flight_tokens = 0
    plan.arrived(request)
    assert plan.finished(request, table()) is True
    assert [s[1] for s in plan.take(output({})).saves] == [0]


def test_a_request_that_is_given_up():
    plan, _, _ = plan_of(3)
    loading, queued = arrive(plan, 300, "loading"), arrive(plan, 300, "queued")
    load(plan, loading)
    plan.matched(queued, 0)
    assert plan.finished(loading, table()) is False, "vLLM waits for the load"
    assert plan.finished(queued, ([],)) is False
    step = plan.take(output({}))
    assert (step.drops, step.ends) == (["loading"], [])
    plan.heard({"loading"}, set())
    assert plan.finished(Request(300), table()) is False, "unknown"
    assert not plan.requests and not plan.loading


def test_a_preempted_request_is_settled_and_begins_again():
    plan, store, _ = plan_of()
    request = arrive(plan, 300)
    plan.matched(request, 0)
    computes(plan, request, 200)
    request.num_computed_tokens = 0
    step = plan.take(output({}, preempted=["a", "gone"]))
    assert set(step.settles) == {"a", "gone"} and not step.saves
    store.there = 2
    assert plan.matched(request, 64) == (64, True)
    plan.allocated(request, table, 64)
    assert plan.take(output({})).loads[0][3:] == (64, 128)
    plan.heard({"a"}, set())
    request.num_computed_tokens = 128
    assert [s[1] for s in computes(plan, request, 172).saves] == [2]


def test_after_a_reset_nothing_of_before_is_found_or_saved():
    plan, store, _ = plan_of(3)
    old = arrive(plan, 300, "old")
    plan.matched(old, 0)
    before = plan.words
    plan.reset()
    assert plan.words != before and plan.words.tokens == before.tokens
    assert plan.matched(old, 0) == (0, False)
    assert computes(plan, old, 300).saves == []
    new = arrive(plan, 300, "new")
    assert plan.matched(new, 0) == (192, True)
    again = plan.words
    plan.reset()
    assert len({before, again, plan.words}) == 3


def test_a_prompt_of_more_than_a_call_takes_goes_in_two():
    plan = Plan(Store(1 << 20), BlockIds(BLOCK), NAMED, BLOCK, 16, clock=Clock())
    plan.told({(0, 0): (layout_text(), 1)})
    request = arrive(plan, 5000 * 16)
    assert plan.matched(request, 0) == (4096 * 16, True)
    plan.door.there = 0
    other = arrive(plan, 5000 * 16, "b")
    plan.matched(other, 0)
    assert [len(s[2]) // 32 for s in computes(plan, other, 5000 * 16).saves] == [4096]
    assert plan.finished(other, table(5000))
    assert [len(s[2]) // 32 for s in plan.take(output({})).saves] == [904]


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
        self.door = Door(None, lambda c, words: c.space(pool, **words._asdict()), self.client)
        self.rank = Rank(self.door, group, mark or (lambda: None), self.count)

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
        self.rank.saved(Step(words=words, saves=[(name, first, b"".join(ids), blocks)],
                             ends=[name] if ends else []))

    def __enter__(self):
        assert until(lambda: self.door.ask(NAMED._replace(tokens=T), lambda s: True))
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
    hold = side.door.ask(words, lambda space: space.hold(ids, first, lease=lease))
    return hold


def step_of(words, hold, blocks, begin, end, name="a"):
    return Step(words=words, loads=[(name, hold.secret, blocks, begin, end)])


@pytest.mark.parametrize("there, here", [
    (dict(), dict()), (dict(), dict(block=64)), (dict(block=32), dict(block=16)),
    (dict(block=32, ratio=2), dict(block=16)), (dict(), dict(block=64, ratio=4)),
    (dict(grain=2), dict(grain=2, block=32))])
def test_what_is_saved_is_loaded_into_other_blocks(daemon, there, here):
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


def test_a_scheduler_finds_what_all_of_its_ranks_have(daemon):
    words, ids = words_of("ranks"), ids_of("ranks", 2)
    sides = [Side(daemon, tp=2, rank=r) for r in range(2)]
    with sides[0], sides[1], Side(daemon) as one, kvd.Client(daemon.socket_path) as c:
        plan = Plan(Door(lambda: c, lambda c, key: c.space(key[0], **key[1]._asdict())),
                    BlockIds(BLOCK), words, BLOCK, T, ranks=2)
        plan.told({(0, 1): (sides[1].layout.text(), 1)})
        assert plan.words is None
        plan.told({(0, 0): (sides[0].layout.text(), 1)})
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
        secret = plan.requests["a"].hold.secret
        for side in [*sides, one]:
            into = list(range(20, 28))
            side.rank.take(Step(words=words, loads=[("a", secret, into, 0, 128)]))
            side.results()
            assert side.holds(into, 6, 0, 128) and not side.rank.bad_blocks()
        plan.requests.clear()


def test_a_latent_that_all_ranks_have_is_kept_once(daemon):
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


def test_a_load_whose_lease_has_ended_has_no_block(daemon, caplog):
    words, ids = words_of("lease"), ids_of("lease", 2)
    with Side(daemon) as a:
        a.save(words, ids, list(range(8)))
        a.results()
        hold = held(a, words, ids, lease=0.02)
        until(lambda: not a.door.ask(words, lambda s: s.join(hold.secret)))
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        assert a.results() == (set(), {"a"})
        assert a.rank.bad_blocks() == set(range(20, 28)) and not a.rank.bad_blocks()
        assert a.total("failed_loads") == 1 and "8 of 8 blocks" in caplog.text
        a.save(words, ids, list(range(8)), "b")  # the store is not away for that
        assert a.results()[0] == {"b"} and a.total("failed_saves") == 0


@pytest.mark.parametrize("tokens, grain, whole", [(0, 1, 0), (64, 1, 4), (80, 1, 5),
                                                  (79, 1, 4), (4, 16, 4)])
def test_blocks_that_have_landed_are_not_computed(tokens, grain, whole):
    class Failed:
        state = kvd.FAILED

        def read(self):
            return types.SimpleNamespace(state=kvd.FAILED, bytes=0)

        def show(self, timeout):
            return types.SimpleNamespace(prefix_tokens=tokens, error="broken")
    rank = Rank(types.SimpleNamespace(why=None, client=None),
                pools.Group("kv", "kv", 16, 1, grain, 0, 0), None, lambda **kw: None)
    rank.turn = lambda: None
    rank.loads["a"] = Load(Failed(), list(range(10, 18)))
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


def test_a_request_is_reported_when_its_puts_have_ended(late):
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


def test_nothing_is_read_of_a_request_that_was_preempted(late):
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


def test_a_stream_that_cannot_be_marked_saves_nothing(daemon):
    def broken():
        raise kvd.Error("the stream is gone", "EIO", 36)
    words, ids = words_of("unmarked"), ids_of("unmarked", 2)
    with Side(daemon, mark=broken) as a:
        a.save(words, ids, list(range(8)))
        assert a.results() == ({"a"}, set()) and a.total("failed_saves") == 1
        assert held(a, words, ids).chunks == 0


def test_the_step_that_takes_blocks_away_waits_for_who_reads_them():
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


def test_a_load_that_is_given_up_is_reported_once_it_is_still(late):
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

def test_a_daemon_that_is_restarted_is_a_miss_and_then_serves():
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
        assert until(lambda: a.door.ask(words, lambda s: s.find(ids))).chunks == 0
        a.save(words, ids, blocks, "c")
        assert a.results()[0] == {"c"}
        hold = held(a, words, ids)
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        a.results()
        assert a.holds(list(range(20, 28)), 4, 0, 128)


def test_a_put_under_way_ends_with_its_daemon():
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
        assert until(lambda: a.door.ask(words_of("dies"), lambda s: True))


@judging_deaths
def test_a_daemon_that_stands_still_costs_one_call_and_no_block():
    words, ids = words_of("frozen"), ids_of("frozen", 2)
    with Daemon(CHUNKS, patient=False) as daemon, Side(daemon) as a:
        a.save(words, ids, list(range(8)))
        a.results()
        hold = held(a, words, ids)
        daemon.freeze()
        try:
            a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128, "b"))
            assert a.rank.loads["b"].move is None and a.door.ask(words, None) is None, \
                "the next calls do not wait"
            assert a.rank.results() == (set(), {"b"})
            assert a.rank.bad_blocks() == set(range(20, 28))
            a.door.until = 0
            more = ids_of("frozen more", 2)
            a.write(list(range(8)), 3)
            begin = time.monotonic()
            a.save(words, more, list(range(8)), "c")
            assert time.monotonic() - begin < store_door.CALL_S, "a put waits for nobody"
            assert a.rank.results() == (set(), set()), "the daemon may read its blocks"
        finally:
            daemon.thaw()
        assert a.results()[0] == {"c"}
        a.door.until = 0
        hold = until(lambda: held(a, words, more))
        a.rank.take(step_of(words, hold, list(range(20, 28)), 0, 128))
        a.results()
        assert a.holds(list(range(20, 28)), 3, 0, 128)


def test_moves_go_by_command_where_shared_memory_is_full(daemon, monkeypatch):
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
