# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of kvd.vllm's store, without vLLM and with a faked store: what chunks are
called, what is asked for, loaded and saved."""
import hashlib
import types
from collections import namedtuple

import numpy as np
import pytest

import kvd
from kvd.stores.names import word
from kvd.vllm import store_plan
from kvd.vllm.store_plan import Adapters, BlockIds, Known, Plan, TokenIds, Words, chunk_tokens

BLOCK, T = 16, 64
NAMED = Words("m", "r", "s", "", 0)


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

def test_chunk_id_is_of_its_last_block():
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
def test_chunk_is_whole_blocks(asked, block, tokens):
    assert chunk_tokens(asked, block) == tokens


@pytest.mark.parametrize("asked", [0, -16, 40, "64", True, 1.5])
def test_chunks_of_other_sizes_are_refused(asked):
    with pytest.raises(ValueError, match="multiple of the block size, 16"):
        chunk_tokens(asked, 16)


def test_long_space_word_is_cut_with_a_digest():
    long = [word("x" * 300 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(w.encode()) <= 200 for w in long)
    assert word("é" * 150) != word("é" * 151) and len(word("é" * 151).encode()) <= 200
    assert word("a\nb") != word("a\rb") != word("a?b") == "a?b" and word(5) == "5"


# ---- the scheduler, with a store that is faked ---------------------------------------------

Found = namedtuple("Found", "chunks secret remote", defaults=(0,))


class Store:
    """A SpaceClient that has the first `there` chunks of any prompt."""

    def __init__(self, there=0):
        self.there, self.asked, self.away = there, [], False

    def ask(self, key, call):
        return None if self.away else call(self)

    def hold(self, ids, first, lease, remote, timeout):
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
        plan.told({(0, 0): (layout_text(), 1, None)})
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

def at_once(call, *args):
    call(*args)


def lora_plan(weights, there=9, run=at_once):
    warned = []
    log = types.SimpleNamespace(warning=lambda text, *args: warned.append(text % args))
    plan, store, _ = plan_of(there, adapters=Adapters(weights.get, log, run))
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


def test_retrained_adapter_has_other_chunks():
    told = []
    for weights in ("old", "new", "old"):
        plan, _, warned = lora_plan({"/a": weights})
        found, ids = lora_ids(plan, "x")
        assert found and len(ids) == 1 and not warned
        told.append(ids[0])
    assert told[0] == told[2] != told[1]
    assert lora_ids(plan, "bare", None)[1][0] not in told


def test_adapter_changed_at_runtime_has_no_chunks():
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


def test_unknown_adapter_has_no_chunks():
    plan, _, warned = lora_plan({})
    assert lora_ids(plan, "x") == (0, []) and lora_ids(plan, "y") == (0, [])
    assert len(warned) == 1 and "not a folder" in warned[0]
    plan, _, _ = plan_of(9)  # the user's word stands for it
    assert lora_ids(plan, "x")[1] == lora_ids(plan, "y", None)[1]


def test_folder_of_an_adapter_is_read_by_a_thread():
    calls = []
    plan, store, _ = lora_plan({"/a": "old"}, run=lambda call, *args: calls.append((call, args)))
    request = Request(300)
    request.lora_request = types.SimpleNamespace(lora_name="a", lora_path="/a")
    plan.arrived(request)
    assert plan.matched(request, 0) == (None, False) and not store.asked
    ((call, args),) = calls
    call(*args)
    assert plan.matched(request, 0) == (256, True)


def test_request_with_unknown_adapter_waits_briefly():
    plan, store, _ = lora_plan({"/a": "old"}, run=lambda call, *args: None)
    request = Request(300)
    request.lora_request = types.SimpleNamespace(lora_name="a", lora_path="/a")
    plan.arrived(request)
    assert plan.matched(request, 0) == (None, False)
    plan.clock.now += store_plan.ADAPTER_S
    assert plan.matched(request, 0) == (0, False) and not store.asked
    assert computes(plan, request, 300).saves == []
    assert plan.finished(request, table()) is False


@pytest.mark.parametrize("tokens, computed, there, end", [
    (63, 0, 9, 0), (64, 0, 9, 0), (65, 0, 9, 64), (128, 0, 9, 64), (129, 0, 9, 128),
    (300, 0, 2, 128), (300, 0, 0, 0), (300, 64, 9, 256), (300, 80, 9, 256), (300, 80, 2, 128),
    (300, 128, 2, 0), (300, 256, 9, 0), (300, 240, 9, 256)])
def test_tokens_after_own_cache_are_loaded_except_one(tokens, computed, there, end):
    plan, store, _ = plan_of(there)
    request = arrive(plan, tokens)
    wanted = (end - computed, True) if end else (0, False)
    assert plan.matched(request, computed) == wanted
    assert all(first == computed // T for first, _ in store.asked)


def test_queued_request_is_not_looked_up_in_each_step():
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


def test_request_looked_up_repeatedly_is_counted_once():
    plan, store, clock = plan_of(0)
    request, other = arrive(plan, 300), arrive(plan, 300, "left in the queue")
    for there in (0, 1, 3, 3):
        store.there = there
        plan.matched(request, 0)
        plan.matched(other, 0)
        clock.now += plan.lease
    assert plan.take_counts() == (0, 0)
    plan.matched(request, 0)
    plan.allocated(request, table, 192)
    assert plan.take_counts() == (4, 3) and plan.take_counts() == (0, 0)
    plan.take(output({}))
    plan.heard({"a"}, set())
    request.num_computed_tokens = 192
    plan.allocated(request, table, 0)
    computes(plan, request, 20)
    request.num_computed_tokens = 0
    plan.take(output({}, preempted=["a"]))
    plan.matched(request, 0)
    plan.allocated(request, table, 192)
    assert plan.take_counts() == (0, 0), "it comes again after it was preempted"


def test_no_lookup_before_workers_report_pools():
    plan, store, clock = plan_of(3, told=False)
    request = arrive(plan, 300)
    assert plan.matched(request, 0) == (None, False)
    assert plan.take(output({})).words is None
    plan.told({(0, 0): (layout_text(), 1, None)})
    assert plan.matched(request, 0) == (192, True)
    assert plan.take(output({})).words == NAMED._replace(tokens=T)
    plan, store, clock = plan_of(3, told=False)
    request = arrive(plan, 300)
    plan.matched(request, 0)
    clock.now += store_plan.START_S
    assert plan.matched(request, 0) == (0, False), "it does not wait for ever"


def test_cache_of_whole_blocks_has_chunks_of_sixteen_or_more():
    plan, _, _ = plan_of(told=False)
    plan.told({(0, 0): (layout_text(), BLOCK, None)})
    assert (plan.tokens, plan.words.tokens) == (256, 16)


def test_requests_without_read_permission_do_not_read():
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


def test_load_names_the_blocks_of_its_tokens():
    plan, _, _ = plan_of(3)
    request = arrive(plan, 300)
    assert load(plan, request, 80).loads == [
        ("a", b"secret", [1000 + i for i in range(5, 12)], 80, 192)]
    assert plan.take(output({})).loads == []
    plan.heard({"a"}, set())
    plan.allocated(request, table, 0)  # vLLM's second call, for the rest
    request.num_computed_tokens = 192
    assert computes(plan, request, 108).saves == [("a", 3, request.block_hashes[15],
                                                  [1012, 1013, 1014, 1015], plan.words)]


def test_load_by_another_connector_is_released():
    plan, _, _ = plan_of(3)
    request = arrive(plan, 300)
    plan.matched(request, 0)
    plan.allocated(request, table, 0)
    assert plan.take(output({})).loads == []
    request.num_computed_tokens = 299
    plan.heard({"a"}, set())
    assert [s[:2] for s in computes(plan, request, 1).saves] == [("a", 3)], "the store has 3"


@pytest.mark.parametrize("there, local, steps", [(0, 0, 0), (0, 0, 1), (0, 64, 0), (2, 0, 1)])
def test_load_by_another_connector_is_saved_after_its_step(there, local, steps):
    """vLLM counts its tokens as computed from the begin of the load on."""
    plan, _, _ = plan_of(there)
    request = arrive(plan, 300)
    plan.matched(request, local)
    plan.allocated(request, table, 0)
    request.num_computed_tokens = 299
    for _ in range(steps):
        assert plan.take(output({})).saves == []
    assert plan.finished(request, table()) is False, "vLLM waits for the load, and for no save"
    step = plan.take(output({}))
    assert (step.saves, step.ends) == ([], [])


def test_load_of_another_connector_after_a_preemption_is_not_saved():
    plan, _, _ = plan_of()
    request = arrive(plan, 300)
    plan.matched(request, 0)
    plan.allocated(request, table, 0)
    assert computes(plan, request, 100).saves
    request.num_computed_tokens = 0
    plan.take(output({}, preempted=["a"]))
    plan.matched(request, 0)
    plan.allocated(request, table, 0)
    request.num_computed_tokens = 299
    assert plan.take(output({})).saves == []
    assert plan.finished(request, table()) is False
    assert plan.take(output({})).saves == []


def test_load_ended_in_its_step_is_saved_after_its_result():
    """As other connectors load: its blocks may turn out to be missing after the step."""
    for failed, saved in ((False, [("good", 0)]), (True, [])):
        plan, _, _ = plan_of()
        request = arrive(plan, 300, "bad" if failed else "good")
        plan.matched(request, 0)
        plan.allocated(request, table, 0)
        request.num_computed_tokens = 256
        assert computes(plan, request, 44).saves == []
        request.num_in_flight_tokens = 44
        assert plan.take(output({request.request_id: 0})).saves == []
        request.num_in_flight_tokens = 0
        if failed:
            request.num_computed_tokens = 32
        step = plan.take(output({request.request_id: 1}))
        assert [s[:2] for s in step.saves] == saved
        assert plan.finished(request, table()) is not failed
        assert plan.take(output({})).saves == []


def test_failed_load_is_computed_saved_and_not_retried():
    plan, store, _ = plan_of(3)
    request = arrive(plan, 300)
    load(plan, request)
    plan.heard((), {77})
    plan.heard({"a"}, {1008})
    assert plan.matched(request, 0) == (0, False) and len(store.asked) == 1
    assert [s[:2] for s in computes(plan, request, 300).saves] == [("a", 0)]


def test_chunks_are_saved_when_complete():
    plan, _, _ = plan_of()
    request = arrive(plan, 300)
    plan.matched(request, 0)
    hashes = request.block_hashes
    assert computes(plan, request, 63).saves == []
    assert computes(plan, request, 70).saves == [
        ("a", 0, hashes[3] + hashes[7], [1000 + i for i in range(8)], plan.words)]
    assert computes(plan, request, 10).saves == []
    assert computes(plan, request, 157).saves == [
        ("a", 2, hashes[11] + hashes[15], [1000 + i for i in range(8, 16)], plan.words)]
    assert plan.finished(request, table()) is True
    step = plan.take(output({}))
    assert (step.saves, step.ends) == ([], ["a"])


def test_cached_prompt_is_saved_only_with_new_tokens():
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


@pytest.mark.parametrize("flying, saved", [(8, []), (0, [1])])
def test_answer_is_saved_and_drafts_are_not(flying, saved):
    """flying: tokens that a step in flight writes when the request ends."""
    plan, _, _ = plan_of()
    request = arrive(plan, 120)
    plan.matched(request, 0)
    assert [s[1] for s in computes(plan, request, 120).saves] == [0]
    more = Request(192).all_token_ids[120:]
    whole = Request(192)
    request.block_hashes = whole.block_hashes
    request.all_token_ids = request.all_token_ids + more[:7]
    assert computes(plan, request, 8).saves == [], "token 127 is a draft"
    request.num_in_flight_tokens = flying
    request.all_token_ids = request.all_token_ids + more[7:8]
    assert plan.finished(request, table()) is True
    step = plan.take(output({}))
    assert [s[1] for s in step.saves] == saved and step.ends == ["a"]


def test_abandoned_request():
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


def test_preempted_request_is_settled_and_begins_again():
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


def test_reset_drops_earlier_chunks():
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


def test_saves_before_a_reset_keep_the_old_name():
    """The step that takes it to the workers may come after the reset."""
    plan, _, _ = plan_of()
    request = arrive(plan, 300)
    before = plan.words
    plan.matched(request, 0)
    plan.allocated(request, table, 0)
    request.all_token_ids = request.all_token_ids[:250]
    assert computes(plan, request, 250).saves[0][4] == before
    request.all_token_ids = Request(300).all_token_ids
    computes(plan, request, 10)
    request.num_computed_tokens = 260
    plan.requests["a"].saved = 3
    assert plan.finished(request, table()) is True
    plan.reset()
    step = plan.take(output({}))
    assert [s[:2] for s in step.saves] == [("a", 3)]
    assert step.saves[0][4] == before != step.words


def test_prompt_partly_holdable_has_that_part():
    """What a user's holds keep is bounded."""
    plan, store, _ = plan_of(9, remote=0.5)
    hold, store.room = store.hold, 2
    closed = []

    def limited(ids, first, **kw):
        assert kw["remote"] == (0.5 if len(ids) == 4 else None), "others are asked once"
        if min(len(ids), store.there - first) > store.room:
            store.asked.append((first, len(ids)))
            raise kvd.Error("too much is held", "ELIMIT")
        found = hold(ids, first, **kw)
        return types.SimpleNamespace(chunks=found.chunks, secret=found.secret,
                                     close=lambda timeout: closed.append(found.chunks))
    store.hold = limited
    for room, tokens, ended in ((4, 256, []), (3, 192, [2]), (2, 128, []), (1, 64, [])):
        store.room = room
        request = arrive(plan, 300, "room for %d" % room)
        assert plan.matched(request, 0) == (tokens, True)
        assert closed == ended
        closed.clear()
    store.room = 0
    assert plan_matches_nothing(plan, store)


def plan_matches_nothing(plan, store):
    store.ask = lambda key, call: caught(lambda: call(store))
    return plan.matched(arrive(plan, 300, "no room"), 0) == (0, False)


def caught(call):
    """As a SpaceClient: what fails is none."""
    try:
        return call()
    except kvd.Error:
        return None


def test_prompt_longer_than_a_call_is_split():
    plan = Plan(Store(1 << 20), BlockIds(BLOCK), NAMED, BLOCK, 16, clock=Clock())
    plan.told({(0, 0): (layout_text(), 1, None)})
    request = arrive(plan, 5000 * 16)
    assert plan.matched(request, 0) == (4096 * 16, True)
    plan.spaces.there = 0
    other = arrive(plan, 5000 * 16, "b")
    plan.matched(other, 0)
    assert [len(s[2]) // 32 for s in computes(plan, other, 5000 * 16).saves] == [4096]
    assert plan.finished(other, table(5000))
    assert [len(s[2]) // 32 for s in plan.take(output({})).saves] == [904]
