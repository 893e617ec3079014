# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm's KvdTier with stand-ins for what it takes from vLLM, and a real daemon."""
import enum
import hashlib
import importlib
import logging
import os
import secrets
import sys
import types
from collections import namedtuple

import numpy as np
import pytest

import kvd
from conftest import judging_deaths, until
from kvd_daemon import Daemon

ROW, ROWS = 8192, 64
GIVEN = {"revision": "one"}
Result = namedtuple("Result", "job_id success successful_keys transfer_time transfer_bytes",
                    defaults=(None, None, None))
Job = namedtuple("Job", "job_id keys chunk_ids is_promotion req_context")


class Lookup(enum.Enum):
    MISS, HIT, RETRY = range(3)


class Tier:
    """SecondaryTierManager"""

    def __init__(self, spec, view, tier_type, detector=None):
        self._block_size_bytes, self.tier_type = view.strides[0], tier_type


class Lookups:
    """AsyncLookupManager, whose answers come with flush()."""

    def __init__(self, tier_type):
        self.known, self.asked = {}, []

    def lookup(self, key, context):
        if key not in self.known:
            self.known[key] = None
            self.asked.append(key)
        self.context = context
        return self.known[key]

    def flush(self):
        asked, self.asked = self.asked, []
        if asked:
            self.known.update(zip(asked, self.batch_lookup(asked, self.context)))

    def mark_miss(self, keys):
        self.known.update(dict.fromkeys(self.known.keys() & set(keys), False))

    def cleanup(self, name):
        self.known.clear()

    def shutdown(self):
        pass


class Context:
    def __init__(self, name="request", keys=()):
        self.req_id, self.places = name, {key: i for i, key in enumerate(keys)}

    def get_offload_key_position(self, key):
        return self.places.get(key)


def spec_of(events=False, **kw):
    """events: whether vLLM publishes some."""
    events = types.SimpleNamespace(enable_kv_cache_events=events)
    config = types.SimpleNamespace(**dict(dict(
        canonical_layout=False, replicated_layout=False, kv_cache_layout="LBHNC", tp=1,
        model=types.SimpleNamespace(name="org/model")), **kw))
    return types.SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


@pytest.fixture
def module(monkeypatch):
    """kvd.vllm.tier"""
    def fields(folder, spec, blocks, shared):
        return types.SimpleNamespace(fields={"tp": 1 if shared else spec.config.tp})
    made = {"": {"__version__": "1"}, ".logger": {"init_logger": logging.getLogger},
            ".platforms": {"current_platform": types.SimpleNamespace(
                device_name="cpu", get_device_capability=lambda: None)},
            ".v1": {}, ".v1.kv_offload": {}, ".v1.kv_offload.tiering": {}, ".v1.metrics": {},
            ".v1.kv_offload.base": {
                "Locality": enum.Enum("Locality", {"LOCAL": "LOCAL"}), "LookupResult": Lookup,
                "Medium": enum.Enum("Medium", "CPU STORAGE"),
                "OffloadingEvent": types.SimpleNamespace,
                "RequestOffloadingContext": types.SimpleNamespace,
                "get_offload_block_hash": lambda key: key[:-4],
                "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big")},
            ".v1.kv_offload.file_mapper": {
                "FileMapper": types.SimpleNamespace(from_offloading_spec=fields)},
            ".v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": Lookups},
            ".v1.kv_offload.tiering.base": {"JobResult": Result, "SecondaryTierManager": Tier},
            ".v1.metrics.cache_hit_source": {"CacheHitSource": enum.Enum("Source", "HOST")}}
    for name, words in made.items():
        one = types.ModuleType("vllm" + name)
        one.__dict__.update(words, __path__=[])
        monkeypatch.setitem(sys.modules, "vllm" + name, one)
    monkeypatch.delitem(sys.modules, "kvd.vllm.tier", raising=False)
    monkeypatch.setattr("kvd.vllm.check", lambda part: None)  # these are no whole vLLM
    found = importlib.import_module("kvd.vllm.tier")
    monkeypatch.setitem(sys.modules, "kvd.vllm.tier", found)
    return found


@pytest.fixture(scope="module")
def daemon():
    with Daemon("[chunks]\nchunk_memory = 16 MiB\n") as d:
        yield d


def keys_of(count, seed, group=0):
    return [hashlib.sha256(b"%s %d" % (seed.encode(), i)).digest() + group.to_bytes(4, "big")
            for i in range(count)]


class Engine:
    """vLLM's memory, and what it does with a tier."""

    def __init__(self, module, daemon, spec=None, **given):
        self.module, self.jobs = module, 0
        self.path = "/dev/shm/kvd-test-tier-" + secrets.token_hex(8)
        self.rows = np.memmap(self.path, np.uint8, "w+", shape=(ROWS, ROW))
        spec = spec or spec_of()
        spec._scheduler_mmap = types.SimpleNamespace(mmap_path=self.path)
        self.tier = module.KvdTier(spec, memoryview(self.rows), "KvdTier",
                                   kvd_socket=daemon.socket_path, **dict(GIVEN, **given))
        named = self.tier._space_of(0)
        until(lambda: self.tier.cache.mover.ask(named, lambda s: True) and
              self.tier.cache.finder.ask(named, lambda s: True))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.tier.shutdown()
        del self.rows
        if os.path.exists(self.path):
            os.unlink(self.path)

    @staticmethod
    def content(key):
        return np.frombuffer(hashlib.shake_128(key).digest(ROW), np.uint8)

    def fill(self, keys, rows):
        for key, row in zip(keys, rows):
            self.rows[row] = self.content(key)

    def holds(self, keys, rows):
        return all((self.rows[row] == self.content(key)).all() for key, row in zip(keys, rows))

    def submit(self, keys, rows, load, context=None):
        self.jobs += 1
        job = Job(self.jobs, keys, np.array(rows, np.int32), load, context or Context())
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def end(self, job):
        ended = []
        until(lambda: ended.extend(self.tier.get_finished_jobs()) or ended)
        assert [one.job_id for one in ended] == [job]
        return ended[0]

    def store(self, keys, rows, context=None):
        self.fill(keys, rows)
        return self.end(self.submit(keys, rows, False, context))

    def load(self, keys, rows):
        return self.end(self.submit(keys, rows, True))

    def find(self, keys, context=None):
        """What vLLM is told of each key, once it is told."""
        context = context or Context(keys=keys)
        first = [self.tier.lookup(key, context) for key in keys]
        self.tier.on_schedule_end(None)
        told = [self.tier.lookup(key, context) for key in keys]
        self.tier.on_request_finished(context)
        assert set(first) == {Lookup.RETRY}
        return [one is Lookup.HIT for one in told]


# ---- what is refused -----------------------------------------------------------------------

@pytest.mark.parametrize("given, match", [
    ({"revision": None}, "revision: None is not a string"), ({"revision": ""}, 'set "revision"'),
    ({"chunk": 1}, "chunk is not an option"), ({"model": 5}, "model: 5 is not a string"),
    ({"remote": 0}, "remote: 0 is not a number"), ({"remote": 61}, "up to 60"),
    ({"lease": True}, "lease: True"), ({"lease": "1"}, "lease: '1'")])
def test_invalid_options_are_refused(module, given, match):
    with pytest.raises(ValueError, match=match):
        module.check_options(dict(GIVEN, **given))


def test_no_revision_is_refused(module):
    with pytest.raises(ValueError, match="does not know the options that vLLM"):
        module.check_options({})


def test_release_without_used_names_is_refused(module, monkeypatch):
    monkeypatch.undo()
    old = types.ModuleType("vllm")
    old.__dict__.update(__version__="0.10.0", __path__=[])
    monkeypatch.setitem(sys.modules, "vllm", old)
    monkeypatch.delitem(sys.modules, "kvd.vllm.tier", raising=False)
    with pytest.raises(RuntimeError, match="vLLM 0.10.0 lacks interfaces that kvd uses: .*is missing"):
        importlib.import_module("kvd.vllm.tier")


def test_hashes_invalid_as_ids_are_logged_misses(module, daemon, caplog):
    with Engine(module, daemon) as one:
        short = [b"x" * 16 + bytes(4)]
        assert one.find(short) == [False] and not one.store(short, [0]).success
    assert "--prefix-caching-hash-algo" in caplog.text


# ---- what spaces are called ----------------------------------------------------------------

def test_space_words_include_all_row_settings(module, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    told = [module.names_of(spec, row, dict(GIVEN, **given)) for spec, row, given in (
        (spec_of(), ROW, {}), (spec_of(), ROW, {"revision": "two"}),
        (spec_of(), ROW, {"model": "other"}), (spec_of(tp=2), ROW, {}),
        (spec_of(kv_cache_layout="LBNHC"), ROW, {}), (spec_of(), 2 * ROW, {}),
        (spec_of(model=types.SimpleNamespace(name=str(tmp_path))), ROW, {}))]
    assert len(set(told)) == len(told)
    assert "weights=" in told[-1].revision and told[0].revision == "one"
    shared = [module.names_of(spec_of(tp=tp, canonical_layout=True), ROW, GIVEN)
              for tp in (1, 2)]
    assert shared[0] == shared[1]


# ---- what it does --------------------------------------------------------------------------

def test_rows_are_loaded_by_any_engine(module, daemon):
    keys = keys_of(8, "back")
    with Engine(module, daemon) as one:
        assert one.find(keys) == [False] * 8
        stored = one.store(keys, range(8))
        assert stored.success and stored.transfer_bytes == 8 * ROW
        assert stored.successful_keys is None
    with Engine(module, daemon) as two:
        assert two.find(keys) == [True] * 8
        rows = [9, 3, 60, 0, 63, 11, 12, 13]
        got = two.load(keys, rows)
        assert got.success and set(got.successful_keys) == set(keys)
        assert two.holds(keys, rows) and not two.rows[8].any()


def kinds(daemon):
    with kvd.Client(daemon.socket_path) as c:
        return {one["kind"] for one in c.command("region.list", all=True)["regions"]
                if one["bytes"] == ROWS * ROW}


def test_memory_is_shared_by_its_name_or_copied(module, daemon):
    keys = keys_of(4, "kinds")
    with Engine(module, daemon) as one:
        one.store(keys, range(4))
        assert kinds(daemon) == {"shm"}
    with Engine(module, daemon) as two:
        os.unlink(two.path)  # a daemon that may not open it
        two.tier.cache.mover.close()
        two.tier.cache.mover = module.SpaceClient(lambda: kvd.Client(daemon.socket_path),
                                                  two.tier._moving)
        two.tier.pool = None
        assert two.load(keys, [5, 6, 7, 8]).success and two.holds(keys, [5, 6, 7, 8])
        assert kinds(daemon) == {"vm"}


def test_groups_have_equal_hashes_and_other_bytes(module, daemon):
    first, second = keys_of(4, "groups"), keys_of(4, "groups", 1)
    with Engine(module, daemon) as one:
        assert one.store(first[:2] + second, [0, 1, 2, 3, 4, 5]).success
        assert one.find(first + second) == [True] * 2 + [False] * 2 + [True] * 4
        assert one.load(second[:2] + first[:2], [10, 11, 12, 13]).success
        assert one.holds(second[:2] + first[:2], [10, 11, 12, 13])


def test_behind_a_gap_only_windows_look(module, daemon):
    keys = keys_of(6, "gap")
    with Engine(module, daemon) as one:
        one.store(keys[:2] + keys[4:], [0, 1, 2, 3])
        assert one.find(keys) == [True] * 2 + [False] * 4
        context = Context(keys=keys)
        assert one.find(keys[::-1], context) == [True, True, False, False, True, True]


def test_failed_load_is_a_miss_afterwards(module, daemon):
    keys = keys_of(6, "part")
    with Engine(module, daemon) as one:
        one.store(keys[:4], range(4))
        context = Context(keys=keys)
        for key in keys:
            one.tier.lookup(key, context)
        one.tier.lookups.known = dict.fromkeys(keys, True)  # they have left since
        got = one.load(keys, range(10, 16))
        assert not got.success and set(got.successful_keys) == set(keys[:4])
        assert one.holds(keys[:4], range(10, 14)) and got.transfer_bytes == 4 * ROW
        assert [one.tier.lookup(key, context) for key in keys] == \
            [Lookup.HIT] * 4 + [Lookup.MISS] * 2


def test_present_blocks_are_stored_again_without_cost(module, daemon):
    keys = keys_of(4, "again")
    with Engine(module, daemon) as one, kvd.Client(daemon.socket_path) as c:
        one.store(keys, range(4))
        before = c.command("chunk.list")["put_bytes"]
        assert one.store(keys, range(4)).success
        assert c.command("chunk.list")["put_bytes"] == before


def test_reset_drops_earlier_blocks(module, daemon):
    keys, old, new = keys_of(4, "reset"), Context("old"), Context("new")
    with Engine(module, daemon) as one:
        one.tier.on_new_request(old)
        assert one.store(keys[:2], [0, 1], old).success
        one.tier.drain_jobs()
        assert one.find(keys) == [False] * 4
        assert not one.load(keys[:2], [4, 5]).success
        assert not one.store(keys[:2], [0, 1], old).success
        one.tier.on_new_request(new)
        assert one.store(keys[:2], [0, 1], new).success and one.find(keys[:2]) == [True] * 2
        one.tier.on_request_finished(old)
        assert not one.tier.frozen and one.tier.requests == {"new"}
    with Engine(module, daemon) as two:  # under the first name
        assert two.find(keys) == [True, True, False, False]


# ---- a daemon that is not there ------------------------------------------------------------

def test_without_a_daemon_all_is_a_miss(module, daemon):
    keys = keys_of(4, "nobody")
    with Engine(module, daemon) as one:
        one.store(keys, range(4))
        for spaces in (one.tier.cache.finder, one.tier.cache.mover):
            spaces.until = float("inf")  # as when it was not there
        assert one.find(keys) == [False] * 4
        assert not one.load(keys, range(4)).success and not one.store(keys, range(4)).success


@judging_deaths
def test_daemon_killed_during_load_is_a_miss_without_hang(module, monkeypatch):
    keys = keys_of(8, "dies")
    with Daemon("[chunks]\nchunk_memory = 16 MiB\n", patient=False) as d:
        with Engine(module, d) as one:
            one.store(keys, range(8))
            fetch = kvd.chunks.Hold.fetch

            def held(hold, *args, **kw):
                """A move waits for a word that nobody writes."""
                move = fetch(hold, *args, wait=(word, 0, 1), **kw)
                begun.append(move)
                return move
            begun, memory = [], kvd.Memory(4096, "word")
            word = one.tier.cache.mover.client.register(memory)
            monkeypatch.setattr(kvd.chunks.Hold, "fetch", held)
            one.rows[8:16] = 0
            job = one.submit(keys, range(8, 16), True)
            until(lambda: begun)
            assert not list(one.tier.get_finished_jobs()), "its rows may be written still"
            d.proc.kill()
            d.proc.wait()
            got = one.end(job)
            assert not got.success and not one.rows[8:16].any()
            assert one.find(keys) == [False] * 8
        d.notify.close()
        d.start().wait_ready()


# ---- events --------------------------------------------------------------------------------

def changes(one):
    """What the tier reports next: [(removed, keys)]"""
    made = []
    until(lambda: made.extend(one.tier.take_events()) or made)
    assert all(e.medium is one.module.Medium.STORAGE and e.removal_expected for e in made)
    return sorted((e.removed, key) for e in made for key in e.keys)


def dropped(daemon, one, keys):
    """As evicted ones."""
    with kvd.Client(daemon.socket_path) as c:
        space = c.space(one.tier.layout, **one.tier._space_of(0)._asdict())
        space.drop([key[:-4] for key in keys], first=kvd.chunks.ANYWHERE)


def test_stored_and_evicted_chunks_are_events(module, daemon):
    keys, group = keys_of(3, "events"), keys_of(2, "events", 1)
    with Engine(module, daemon, spec_of(True), locality="LOCAL") as one:
        one.store(keys + group, range(5))
        assert one.tier.has_pending_work()
        assert changes(one) == sorted((False, key) for key in keys + group)
        assert list(one.tier.take_events()) == []
        until(lambda: not one.tier.has_pending_work())
        dropped(daemon, one, keys[1:])
        assert changes(one) == sorted((True, key) for key in keys[1:])
        one.store(keys[1:], range(1, 3))
        (event,) = until(lambda: list(one.tier.take_events()))
        assert (event.removed, event.locality) == (False, module.Locality.LOCAL)
        assert sorted(event.keys) == sorted(keys[1:])
        one.tier.drain_jobs()
        assert changes(one) == sorted((True, key) for key in keys + group), \
            "the engine does not find them any more"
    assert not one.tier.follower.thread.is_alive()


def test_loaded_chunks_are_events_after_the_next_lookups(module, daemon):
    """Their tokens are known to vLLM then."""
    keys = keys_of(2, "loaded")
    with Engine(module, daemon) as writer:
        writer.store(keys, range(2))
        assert writer.tier.follower is None
        assert not list(writer.tier.take_events()) and writer.tier.has_pending_work() is False
    with Engine(module, daemon, spec_of(True)) as one:
        assert one.find(keys) == [True, True]
        one.load(keys, range(2))
        one.tier.on_schedule_end(None)
        assert not one.tier.follower.calls and not one.tier.follower.contents
        one.tier.on_schedule_end(None)
        assert changes(one) == sorted((False, key) for key in keys)


def test_stored_and_loaded_chunks_are_events_each_time(module, daemon):
    """vLLM does not notify a tier of AllBlocksCleared."""
    keys = keys_of(2, "each")
    with Engine(module, daemon, spec_of(True)) as one:
        for _ in range(2):
            one.store(keys, range(2))
            assert changes(one) == sorted((False, key) for key in keys)
        one.load(keys, range(2))
        for _ in range(2):
            one.tier.on_schedule_end(None)
        assert changes(one) == sorted((False, key) for key in keys)


def test_evicted_chunk_of_another_engine_is_no_event(module, daemon):
    """vLLM has no tokens of it any more."""
    keys = keys_of(2, "others")
    with Engine(module, daemon, spec_of(True)) as one, Engine(module, daemon) as other:
        one.store(keys[:1], range(1))
        assert changes(one) == [(False, keys[0])]
        dropped(daemon, one, keys[:1])
        assert changes(one) == [(True, keys[0])]
        other.store(keys[:1], range(1))
        one.store(keys[1:], range(1))
        assert changes(one) == [(False, keys[1])]
        one.load(keys[:1], range(1))
        for _ in range(2):
            one.tier.on_schedule_end(None)
        assert changes(one) == [(False, keys[0])]


def test_failed_jobs_are_no_events(module, daemon):
    keys = keys_of(1, "failed")
    with Engine(module, daemon, spec_of(True)) as one:
        assert not one.load(keys, [0]).success
        short = [b"x" * 16 + bytes(4)]
        assert not one.store(short, [0]).success
        for _ in range(2):
            one.tier.on_schedule_end(None)
        assert not one.tier.follower.calls and not one.tier.follower.contents
