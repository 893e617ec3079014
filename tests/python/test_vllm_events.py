# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm's KV events of chunks, with stand-ins for vLLM. tests/engines/vllm_events.py compares them with
vLLM's own, and has vLLM and an indexer decode them."""
import importlib
import sys
import types
from types import SimpleNamespace as Some

import pytest

from kvd.fit import parse
from kvd.stores.follow import WAKE_S
from kvd.vllm.needs import PARTS
from test_vllm_plan import (BLOCK, NAMED, T, Clock, Plan, Request, arrive, computes, layout_text,
                            output, plan_of, table)
from vllm_stub import Vllm

KEY = "space"


def stand_in():
    """vLLM's interface of events."""
    def keys(request, begin, end, image):
        found = [("lora", request.lora_request.lora_name)] if request.lora_request else []
        if begin == 0 and request.cache_salt:
            found.append(("cache_salt", request.cache_salt))
        return tuple(found) or None, image

    def untagged(keys):
        return [None if some is None else tuple(key[1] for key in some) for some in keys]
    return {"": {}, ".distributed": {}, ".v1": {}, ".v1.core": {},
            ".distributed.kv_events": {
                "MEDIUM_CPU": "CPU", "MEDIUM_STORAGE": "STORAGE",
                "BlockStored": lambda **kw: Some(stored=True, **kw),
                "BlockRemoved": lambda **kw: Some(stored=False, **kw)},
            ".v1.core.kv_cache_utils": {
                "generate_block_hash_extra_keys": keys, "to_event_extra_keys": untagged,
                "maybe_convert_block_hash": lambda one: int.from_bytes(one, "big") % 2 ** 64},
            ".v1.kv_cache_interface": {
                "get_kv_cache_spec_kind": lambda spec: Some(value="full_attention")}}


@pytest.fixture
def checked(monkeypatch):
    """Parts whose interfaces have been compared with vLLM's: these are no whole vLLM."""
    parts = []
    monkeypatch.setattr("kvd.vllm.check", parts.append)
    return parts


@pytest.fixture
def module(monkeypatch, checked):
    """kvd.vllm.events"""
    for name, words in stand_in().items():
        one = types.ModuleType("vllm" + name)
        one.__dict__.update(words, __path__=[])
        monkeypatch.setitem(sys.modules, "vllm" + name, one)
    monkeypatch.delitem(sys.modules, "kvd.vllm.events", raising=False)
    found = importlib.import_module("kvd.vllm.events")
    monkeypatch.setitem(sys.modules, "kvd.vllm.events", found)
    return found


class Pool:
    """vLLM's of blocks."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.cached_block_hash_to_block = {}


class Store:
    """The daemon in the place of a SpaceClient: a change of chunks is whole, and they are in memory."""
    there = ()

    def __init__(self):
        self.told = []

    def tell(self, words):
        self.told.append(words)

    def ask(self, key, call):
        return True, [Some(id=one, tier=tier, put=True, space=None) for one, tier in self.there]

    def close(self):
        pass


def events_of(module, hashed=BLOCK, tokens=T):
    store = Store()
    made = module.BlockEvents(store, Some(block_size=BLOCK), hashed, tokens, clock=Clock(),
                              run=False)
    made.bind(Pool())
    return made, store


def request_of(tokens, **words):
    request = Request(tokens)
    request.__dict__.update(dict(lora_request=None, mm_features=[], cache_salt=None,
                                 prompt_embeds=None), **words)
    return request


def seen(events):
    events.follower.step()
    return events.take()


def external(one):
    return int.from_bytes(one, "big") % 2 ** 64


# ---- events --------------------------------------------------------------------------------

def test_chunk_is_one_event_of_its_blocks(module):
    events, store = events_of(module)
    request = request_of(300)
    events.know(KEY, request, 0, [b"a", b"b", b"c"], T)
    store.there = [(b"a", "memory"), (b"b", "memory"), (b"b", "file")]
    first, second, third = seen(events)
    hashes = [external(one) for one in request.block_hashes]
    assert vars(first) == dict(
        stored=True, block_hashes=hashes[:4], parent_block_hash=None,
        token_ids=request.all_token_ids[:64], block_size=BLOCK, lora_id=None, medium="CPU",
        lora_name=None, extra_keys=None, group_idx=0, kv_cache_spec_kind="full_attention",
        locality="LOCAL")
    assert vars(second) == dict(vars(first), block_hashes=hashes[4:8],
                                parent_block_hash=hashes[3],
                                token_ids=request.all_token_ids[64:128])
    assert vars(third) == dict(vars(second), medium="STORAGE")
    store.there = [(b"b", "file")]
    gone = seen(events)
    assert [vars(one) for one in gone] == [
        dict(stored=False, block_hashes=hashes[at:at + 4], medium="CPU", group_idx=0,
             locality="LOCAL") for at in (0, 4)]
    assert not any(hasattr(one, "ownership") for one in (first, *gone)), "readers drop these"


def test_later_chunk_of_a_request_has_its_own_tokens(module):
    events, store = events_of(module)
    request, store.there = request_of(300), [(b"d", "memory")]
    events.know(KEY, request, 3, [b"d"], T)
    (event,) = seen(events)
    assert event.token_ids == request.all_token_ids[192:256]
    assert event.block_hashes == [external(one) for one in request.block_hashes[12:16]]
    assert event.parent_block_hash == external(request.block_hashes[11])


def test_hashes_of_parts_of_a_block_are_its_last_part(module):
    events, store = events_of(module, hashed=4)
    request, store.there = request_of(300), [(b"b", "memory")]
    request.block_hashes = Request(300, block=4).block_hashes
    events.know(KEY, request, 1, [b"b"], T)
    (event,) = seen(events)
    assert event.block_hashes == [external(request.block_hashes[i]) for i in (19, 23, 27, 31)]
    assert event.parent_block_hash == external(request.block_hashes[15])
    assert event.block_size == BLOCK and len(event.token_ids) == T


def test_adapters_and_salts_are_named(module):
    events, store = events_of(module)
    store.there = [(b"a", "memory"), (b"b", "memory")]
    lora = Some(adapter_id=7, lora_name="sql")
    events.know(KEY, request_of(200, lora_request=lora, cache_salt="x"), 0, [b"a", b"b"], T)
    first, second = seen(events)
    assert (first.lora_id, first.lora_name) == (7, "sql")
    assert first.extra_keys == [("sql", "x"), ("sql",), ("sql",), ("sql",)]
    assert second.extra_keys == [("sql",)] * 4


def test_cleared_index_gets_all_again(module):
    """vLLM's AllBlocksCleared is for indexers the end of all media, and in the same batch as these."""
    events, store = events_of(module)
    store.there = [(b"a", "memory")]
    events.know(KEY, request_of(100), 0, [b"a"], T)
    assert len(seen(events)) == 1 and not seen(events)
    events.follower.clock.now += 60
    assert not events.waits()
    events.pool.reset()
    assert events.take() == [] and events.waits()
    (event,) = seen(events)
    assert event.stored and not seen(events)


def test_tokens_of_known_chunks_are_limited(module):
    assert events_of(module, tokens=256)[0].follower.most == 65536
    assert events_of(module, tokens=16)[0].follower.most == 65536
    assert events_of(module, tokens=4096)[0].follower.most == 4096
    assert events_of(module, tokens=1 << 26)[0].follower.most == 1


def test_tokens_of_a_step_are_limited(module):
    assert events_of(module, tokens=16)[0].follower.step_most == 512
    assert events_of(module, tokens=4096)[0].follower.step_most == 32
    assert events_of(module, tokens=1 << 26)[0].follower.step_most == 1
    events, store = events_of(module, tokens=1 << 17)
    store.there = [(b"a", "memory"), (b"b", "memory")]
    events.know(KEY, request_of(300), 0, [b"a", b"b"], T)
    assert [len(seen(events)), len(events.take()), len(events.take())] == [1, 1, 0]


def test_no_error_reaches_the_scheduler(module):
    events, store = events_of(module)
    store.there = [(b"a", "memory"), (b"b", "memory")]
    events.know(KEY, Some(lora_request=None, block_hashes=[b"h"] * 9, all_token_ids=[1 << 31] * T), 0,
                [b"a"], T)
    assert store.told == ["events of chunks cannot be made"]
    events.know(KEY, request_of(300), 1, [b"b"], T)
    events.follower.step()
    make = module.BlockStored
    module.BlockStored = None
    assert events.take() == [] and len(store.told) == 2
    module.BlockStored = make
    events.pool.reset()
    assert events.take() == []
    assert len(seen(events)) == 1, "they are published again"


def test_older_vllm_is_refused_with_events_alone(module, checked):
    assert checked == ["events"]
    for name, words in stand_in().items():
        for word in words:
            parts = [part for part, engine in PARTS.items()
                     if ("vllm" + name, word) in {need[:2] for need in parse(engine.needs)}]
            assert parts == ["events"] or word == "generate_block_hash_extra_keys", word


# ---- the plan ------------------------------------------------------------------------------

class Noted:
    def __init__(self):
        self.calls = []

    def know(self, key, request, first, ids, tokens):
        self.calls.append((key[1], request.request_id, first, ids, tokens))

    def forget(self):
        self.calls.append("forget")

    def wake(self):
        self.calls.append("wake")

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def test_found_and_saved_chunks_are_known():
    events = Noted()
    plan, store, clock = plan_of(2, events=events)
    request = arrive(plan, 300)
    hashes = request.block_hashes
    plan.matched(request, 0)
    plan.matched(request, 0)
    assert events.take() == [(plan.words, "a", 0, [hashes[3], hashes[7]], T)]
    assert plan.words == NAMED._replace(tokens=T)
    plan.allocated(request, table, 128)
    plan.take(output({}))
    plan.heard({"a"}, set())
    request.num_computed_tokens = 128
    assert computes(plan, request, 100).saves
    assert events.take() == [(plan.words, "a", 2, [hashes[11]], T)]
    assert computes(plan, request, 72).saves
    assert events.take() == [(plan.words, "a", 3, [hashes[15]], T)]
    clock.now += 60
    store.there = 0
    arrive(plan, 300, "b")
    plan.matched(plan.requests["b"].request, 0)
    assert events.take() == [], "what is not found has no chunks"


def test_own_prefix_is_not_asked_for_and_not_known():
    events = Noted()
    plan, _, _ = plan_of(3, events=events)
    request = arrive(plan, 300)
    plan.matched(request, 80)
    assert events.take() == [(plan.words, "a", 1, [request.block_hashes[7],
                                                   request.block_hashes[11]], T)]


def test_reset_forgets_and_ended_puts_wake():
    events = Noted()
    plan, _, _ = plan_of(events=events)
    request = arrive(plan, 300)
    plan.matched(request, 0)
    computes(plan, request, 300)
    assert len(events.take()) == 1
    plan.heard((), set())
    assert events.take() == []
    plan.heard((), set(), None, {"a"})
    assert events.take() == ["wake"]
    plan.reset()
    assert events.take() == ["forget"]


# ---- the connector -------------------------------------------------------------------------

@pytest.fixture
def store():
    """kvd.vllm.store's module"""
    with Vllm() as vllm:
        yield vllm.load("kvd.vllm.store")


def connector_of(store, events):
    one = object.__new__(store.KvdStoreConnector)
    one.route, one._worker = False, None
    one._plan = Plan(Some(close=lambda: None), None, NAMED, BLOCK, T, events=events)
    return one


def test_connector_without_events_takes_none(store):
    one = connector_of(store, None)
    assert list(one.take_events()) == [] and one.has_pending_push_work() is False
    one.bind_gpu_block_pool(Some())
    one.shutdown()


def test_connector_hands_events_to_vllm(store, module):
    events, daemon = events_of(module)
    one, pool = connector_of(store, events), Pool()
    one.bind_gpu_block_pool(pool)
    assert events.pool is pool and not one.has_pending_push_work()
    daemon.there = [(b"a", "memory")]
    events.know(KEY, request_of(100), 0, [b"a"], T)
    assert one.has_pending_push_work()
    events.follower.step()
    events.follower.clock.now += WAKE_S
    assert one.has_pending_push_work(), "they wait to be taken"
    assert len(one.take_events()) == 1
    assert not one.has_pending_push_work()
    one.update_connector_output(Some(kv_connector_worker_meta=None, finished_recving=None,
                                     invalid_block_ids=(), finished_sending={"a"}))
    assert one.has_pending_push_work(), "its put is reported within this time"
    one.shutdown()
    assert events.follower.closed.is_set()


@pytest.mark.parametrize("published", [None, Some(enable_kv_cache_events=False)])
def test_no_thread_follows_without_vllms_events(store, published):
    assert store.block_events(Some(kv_events_config=published), None, BLOCK, T) is None


def test_vllms_option_makes_events(store, module):
    config = Some(kv_events_config=Some(enable_kv_cache_events=True), kv_transfer_config=Some(
        get_from_extra_config=lambda name, preset: {"kvd_socket": "/none/kvd.sock"}[name]))
    caches = Some(kv_cache_groups=[Some(kv_cache_spec=Some(block_size=BLOCK))])
    made = store.block_events(config, caches, BLOCK, T)
    assert made.follower.thread.is_alive()
    made.know((layout_text(), NAMED), request_of(100), 0, [b"a"], T)
    made.close()
    assert not made.follower.thread.is_alive()
