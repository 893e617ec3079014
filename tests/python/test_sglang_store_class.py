# SPDX-License-Identifier: Apache-2.0
"""kvd.sglang's KvdStore with stand-ins for what it takes from SGLang, and a real daemon."""
import enum
import importlib
import json
import os
import sys
import types
from collections import namedtuple

import numpy as np
import pytest

import kvd
from conftest import until
from kvd.stores.choice import TIMED_TOKENS
from test_sglang_store import MHA, PAGE, content, keys_of, pool_of
from kvd_daemon import Daemon

CONFIG = dict(tp_rank=0, tp_size=1, pp_size=1, attn_cp_size=1, dcp_size=1,
              should_split_heads=False, enable_storage_metrics=False, dp_rank=0)
GIVEN = {"backend_name": "kvd", "module_path": "kvd.sglang.store", "class_name": "KvdStore",
         "interface_v1": 1}
Result = namedtuple("Result", "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages")
Result.empty = classmethod(lambda cls: cls(0, {}, None))


class PoolName(str, enum.Enum):
    KV, SWA, MAMBA, DRAFT = "kv", "swa", "mamba", "draft"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


class Storage:
    def register_mem_pool_host(self, pool):
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool, name):
        self.registered_pools = dict(getattr(self, "registered_pools", {}), **{name: pool})


class Hooks:
    """HookRegistry"""

    def __init__(self):
        self.hooks, self._patched, self.absent = {}, set(), ()

    def register(self, target, hook, kind):
        self.hooks[target] = hook

    def apply_hooks(self):
        self._patched.update(t for t in self.hooks if t.rsplit(".", 1)[1] not in self.absent)


class Slots:
    """A tensor of indices."""

    def __init__(self, pages):
        self.slots = np.concatenate([np.arange(p * PAGE, (p + 1) * PAGE) for p in pages])

    def cpu(self):
        return self

    def numpy(self):
        return self.slots


class Transfer:
    def __init__(self, name, keys=None, pages=None, policy=PoolHitPolicy.ALL_PAGES):
        self.name, self.keys, self.hit_policy = name, keys, policy
        self.host_indices = None if pages is None else Slots(pages)


def server_args(**kw):
    return types.SimpleNamespace(**dict(dict(
        model_path="org/model", revision=None, kv_cache_dtype="auto", lora_paths=None,
        load_format="auto", random_seed=1, quantization_param_path=None, torchao_config="",
        json_model_override_args="{}", model_impl="auto", modelopt_quant=None,
        speculative_algorithm=None), **kw))


def model_config(**kw):
    text = types.SimpleNamespace(rope_theta=10000.0, rope_scaling=None)
    return types.SimpleNamespace(**dict(dict(
        dtype="torch.bfloat16", quantization=None, context_len=4096, hf_text_config=text,
        hf_config=types.SimpleNamespace(_commit_hash="abc"),
        get_total_num_kv_heads=lambda: 4), **kw))


@pytest.fixture
def sglang(monkeypatch):
    """kvd.sglang.store, and what it sees."""
    seen = types.SimpleNamespace(args=server_args(), model=model_config(), hooks=Hooks(),
                                 serving=types.SimpleNamespace(weight_version="default"),
                                 schedule=types.SimpleNamespace(disable_overlap_schedule=True))
    made = {"": {}, ".srt": {}, ".srt.configs": {},
            ".srt.configs.model_config": {"ModelConfig": types.SimpleNamespace(
                from_server_args=lambda args: seen.model)},
            ".srt.mem_cache": {}, ".srt.mem_cache.hicache_storage": {
                "HiCacheStorage": Storage, "PoolHitPolicy": PoolHitPolicy, "PoolName": PoolName,
                "PoolTransferResult": Result},
            ".srt.plugins": {}, ".srt.plugins.hook_registry": {
                "HookRegistry": seen.hooks, "HookType": types.SimpleNamespace(BEFORE="before", AFTER="after")},
            ".srt.runtime_context": {"get_server_args": lambda: seen.args,
                                     "get_schedule": lambda: seen.schedule,
                                     "get_serving": lambda: seen.serving}}
    for name, words in made.items():
        module = types.ModuleType("sglang" + name)
        module.__dict__.update(words, __path__=[])
        monkeypatch.setitem(sys.modules, "sglang" + name, module)
    monkeypatch.delitem(sys.modules, "kvd.sglang.store", raising=False)
    monkeypatch.setattr("kvd.sglang.check", lambda part: None)  # these are no whole SGLang
    seen.module = importlib.import_module("kvd.sglang.store")
    monkeypatch.setitem(sys.modules, "kvd.sglang.store", seen.module)
    return seen


@pytest.fixture(scope="module")
def daemon():
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d:
        yield d


class Engine:
    def __init__(self, sglang, daemon, pools, **given):
        config = types.SimpleNamespace(extra_config=dict(
            GIVEN, kvd_socket=daemon.socket_path, **given), **CONFIG)
        self.store = sglang.module.KvdStore(config, {})
        self.pools = pools
        self.store.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            self.store.register_mem_host_pool_v2(pool, PoolName(name))
        cache = self.store.cache
        for _, named, _ in self.store.pools.values():
            until(lambda n=named: cache.mover.ask(n, lambda s: True) and
                  cache.finder.ask(n, lambda s: True))

    def each(self, name, keys, pages):
        for key, page in zip(keys, pages):
            for (layer, field), at in self.pools[name].page(page).items():
                for h in range(at.shape[1]):
                    yield at, h, content(key, layer, name + field, h,
                                         (at.shape[0], at.shape[2]), at.dtype)

    def fill(self, name, keys, pages):
        for at, h, wanted in self.each(name, keys, pages):
            at[:, h] = wanted

    def holds(self, name, keys, pages):
        return all((at[:, h] == wanted).all() for at, h, wanted in self.each(name, keys, pages))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.store.close()


# ---- what is refused -----------------------------------------------------------------------

@pytest.mark.parametrize("given, match", [
    ({"interface_v1": 0}, '"interface_v1": 1'), ({"chunk": 1}, "chunk is not an option"),
    ({"model": 5}, "model: 5 is not a string"),
    ({"remote": 0}, "remote: 0 is not a number of seconds"),
    ({"remote": 61}, "up to 60"), ({"lease": True}, "lease: True"), ({"lease": "1"}, "lease: '1'")])
def test_invalid_options_are_refused(sglang, given, match):
    with pytest.raises(ValueError, match=match):
        sglang.module.check_options(dict(GIVEN, **given))


@pytest.mark.parametrize("config, match", [
    ({"pp_size": 2}, "--pp-size 1"), ({"attn_cp_size": 2}, "--attn-cp-size 1"),
    ({"dcp_size": 2}, "--dcp-size 1"), ({"should_split_heads": True}, "kvd cuts heads itself")])
def test_ranks_not_distinguishable_are_refused(sglang, config, match):
    with pytest.raises(ValueError, match=match):
        sglang.module.check_ranks(types.SimpleNamespace(**dict(CONFIG, **config)))


def test_untracked_weight_updates_are_refused(sglang, daemon):
    sglang.hooks.absent = ("update_weights_from_ipc",)
    with pytest.raises(RuntimeError, match="update_weights_from_ipc"):
        Engine(sglang, daemon, {"kv": pool_of(MHA)})


def test_untracked_adapters_are_refused(sglang, daemon):
    sglang.hooks.absent = ("load_lora_adapter",)
    Engine(sglang, daemon, {"kv": pool_of(MHA)})  # has none
    sglang.args = server_args(enable_lora=True)
    with pytest.raises(ValueError, match="set \"revision\""):
        Engine(sglang, daemon, {"kv": pool_of(MHA)})
    Engine(sglang, daemon, {"kv": pool_of(MHA)}, revision="mine")


def test_loaded_adapter_stops_the_store(sglang, daemon):
    keys, pages = keys_of(3, "adapter"), [0, 1, 2]
    sglang.args = server_args(enable_lora=True)
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as one:
        one.fill("kv", keys, pages)
        one.store.batch_set_v1(keys, Slots(pages))
        assert one.store.batch_exists(keys) == 3
        (hook,) = {h for t, h in sglang.hooks.hooks.items() if t.endswith(".load_lora_adapter")}
        assert hook(object(), object()) is None
        assert one.store.batch_exists(keys) == 0


def test_pools_without_chunk_layout_are_refused(sglang, daemon):
    with pytest.raises(ValueError, match="MambaPoolHost is not supported"):
        Engine(sglang, daemon, {"kv": pool_of(MHA), "mamba": pool_of("MambaPoolHost",
                                                                      type(pool_of(MHA)))})


# ---- names ---------------------------------------------------------------------------------

def named(sglang, args=(), config=(), given=(), pool="kv", drafts=0):
    sglang.model = model_config(**dict(config))
    made = types.SimpleNamespace(page_size=PAGE, drafts=drafts)
    return sglang.module.Names(dict(given), server_args(**dict(args))).of(pool, made)


def test_space_words_include_all_kv_settings(sglang, tmp_path):
    scales, adapter = tmp_path / "scales.json", tmp_path / "lora"
    scales.write_text("{}")
    adapter.mkdir()
    (adapter / "a.safetensors").write_text("1")
    lora = types.SimpleNamespace(lora_name="a", lora_path=str(adapter))
    text = types.SimpleNamespace
    told = [named(sglang)]
    told += [named(sglang, args=a) for a in (
        {"model_path": "org/other"}, {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e5m2"}, {"torchao_config": "int4wo"},
        {"json_model_override_args": '{"a": 1}'}, {"load_format": "dummy"},
        {"load_format": "dummy", "random_seed": 2}, {"quantization_param_path": str(scales)},
        {"lora_paths": [lora]})]
    told += [named(sglang, config=c) for c in (
        {"dtype": "torch.float16"}, {"quantization": "fp8"},
        {"hf_text_config": text(rope_theta=5e5, rope_scaling=None)},
        {"hf_text_config": text(rope_theta=1e4, rope_scaling={"type": "dynamic"})},
        {"hf_text_config": text(rope_theta=1e4, rope_scaling={"type": "dynamic"}),
         "context_len": 8192})]
    told += [named(sglang, given={"revision": "mine"}), named(sglang, given={"model": "mine"}),
             named(sglang, drafts=1), named(sglang, pool="draft"), named(sglang, pool="swa"),
             named(sglang, drafts=1, args={"speculative_algorithm": "EAGLE"})]
    sglang.serving.weight_version = "7"
    told.append(named(sglang))
    sglang.serving.weight_version = "default"
    (adapter / "a.safetensors").write_text("23")
    told.append(named(sglang, args={"lora_paths": [lora]}))
    assert len(set(told)) == len(told)
    assert named(sglang) == told[0] and "weights=abc dtype=bfloat16" in told[0].revision


def test_weights_folder_is_named_by_its_files(sglang, tmp_path, caplog):
    (tmp_path / "model.safetensors").write_text("1")
    bare = {"hf_config": types.SimpleNamespace()}
    first = named(sglang, args={"model_path": str(tmp_path)}, config=bare)
    (tmp_path / "model.safetensors").write_text("22")
    assert named(sglang, args={"model_path": str(tmp_path)}, config=bare) != first
    assert not caplog.records


HUB = "org/somewhere"
SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("args, config, pool", [
    ({"revision": "main"}, {"hf_config": types.SimpleNamespace()}, "kv"),
    ({"lora_paths": ["a=" + HUB]}, {}, "kv"), ({"load_format": "remote"}, {}, "kv"),
    ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": HUB,
      "speculative_draft_model_revision": "main"}, {}, "draft")])
def test_unnamed_weights_have_no_chunks(sglang, daemon, caplog, args, config, pool):
    assert named(sglang, args, config, pool=pool).revision is None
    assert "no chunks are found or put; set \"revision\"" in caplog.text
    assert named(sglang, args, config, {"revision": "mine"}, pool).revision
    if pool == "draft":
        args["speculative_draft_model_revision"] = SHA
        assert SHA in named(sglang, args, pool=pool).revision


def test_loaded_commit_precedes_branch(sglang):
    two = [named(sglang, {"revision": "main"}, {"hf_config": types.SimpleNamespace(
        _commit_hash=commit)}).revision for commit in (SHA, SHA[::-1])]
    assert two[0] != two[1] and SHA in two[0]
    bare = {"hf_config": types.SimpleNamespace()}
    assert SHA in named(sglang, {"revision": SHA}, bare).revision


def test_store_without_a_name_is_inactive(sglang, daemon):
    sglang.model = model_config(hf_config=types.SimpleNamespace())
    config = types.SimpleNamespace(
        extra_config=dict(GIVEN, kvd_socket=daemon.socket_path), **CONFIG)
    store = sglang.module.KvdStore(config, {})
    store.register_mem_pool_host(pool_of(MHA))
    keys = keys_of(2, "none")
    assert store.batch_set_v1(keys, Slots([0, 1])) == [False, False]
    assert store.batch_exists(keys) == 0
    store.close()


def test_long_space_words_are_cut_with_a_digest(sglang):
    long = [sglang.module.word("x" * 300 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(w.encode()) <= 200 for w in long)
    text = json.dumps({"a": "é" * 150})
    assert len(sglang.module.word(text).encode()) <= 200 and sglang.module.word("a\nb") != \
        sglang.module.word("a\rb")


# ---- pages ---------------------------------------------------------------------------------

def test_pages_of_one_engine_are_those_of_the_next(sglang, daemon):
    keys, pages = keys_of(5, "class"), [7, 3, 9, 1, 2]
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as one:
        one.fill("kv", keys, pages)
        assert one.store.batch_exists(keys) == 0 and not one.store.exists(keys[0])
        assert one.store.batch_set_v1(keys, Slots(pages)) == [True] * 5
    with Engine(sglang, daemon, {"kv": pool_of(MHA, layout="page_head")}) as two:
        assert two.store.batch_exists(keys + keys_of(1, "no")) == 5 and two.store.exists(keys[2])
        assert two.store.batch_get_v1(keys[1:], Slots(pages[1:])) == [True] * 4
        assert two.holds("kv", keys[1:], pages[1:]) and not two.holds("kv", keys[:1], pages[:1])
        assert two.store.batch_get_v1(keys, Slots(pages[:4])) == [False] * 5
        assert two.store.batch_get_v1([], Slots([0])) == []
        with pytest.raises(NotImplementedError, match="by all engines"):
            two.store.clear()
        with pytest.raises(NotImplementedError, match="interface_v1"):
            two.store.batch_get(keys)


def test_windows_are_looked_up_by_their_last_pages(sglang, daemon):
    keys, pages = keys_of(8, "windows"), list(range(8))
    pools = {"kv": pool_of(MHA), "swa": pool_of(MHA, layers=2, heads=2),
             "draft": pool_of(MHA, layers=1)}
    with Engine(sglang, daemon, pools) as one:
        def lengths(policy, count=1, name=PoolName.SWA):
            return one.store.batch_exists_v2(keys, [Transfer(name, keys[:count],
                                                             policy=policy)])
        one.fill("kv", keys, pages)
        one.store.batch_set_v1(keys, Slots(pages))
        assert lengths(PoolHitPolicy.TRAILING_PAGES) == (0, {PoolName.KV: 8}, [])
        some = [keys[i] for i in (2, 3, 6)]
        one.fill("swa", some, [4, 5, 6])
        assert one.store.batch_set_v2([Transfer(PoolName.SWA, some, [4, 5, 6])]) == \
            {PoolName.SWA: [True] * 3}
        assert lengths(PoolHitPolicy.TRAILING_PAGES) == (
            7, {PoolName.KV: 8, PoolName.SWA: 7}, [3, 4, 7])
        assert lengths(PoolHitPolicy.TRAILING_PAGES, 2).restorable_prefix_pages == [4]
        assert lengths(PoolHitPolicy.BLOCK_GROUPS).kv_hit_pages == 8
        one.fill("draft", keys[:3], [0, 1, 2])
        one.store.batch_set_v2([Transfer(PoolName.DRAFT, keys[:3], [0, 1, 2])])
        assert lengths(PoolHitPolicy.ALL_PAGES, name=PoolName.DRAFT) == (
            3, {PoolName.KV: 8, PoolName.DRAFT: 3}, [1, 2, 3])
        into = [10, 11, 12]
        assert one.store.batch_get_v2([Transfer(PoolName.SWA, some, into),
                                       Transfer(PoolName.DRAFT, keys[:3], into)]) == \
            {PoolName.SWA: [True] * 3, PoolName.DRAFT: [True] * 3}
        assert one.holds("swa", some, into) and one.holds("draft", keys[:3], into)


def test_new_weights_end_it(sglang, daemon):
    keys, pages = keys_of(3, "weights"), [0, 1, 2]
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as one:
        one.fill("kv", keys, pages)
        one.store.batch_set_v1(keys, Slots(pages))
        assert one.store.batch_exists(keys) == 3
        (hook,) = {h for t, h in sglang.hooks.hooks.items() if t.endswith("_from_disk")}
        assert hook(object(), object()) is None, "its arguments stay"
        assert one.store.batch_exists(keys) == 0
        assert one.store.batch_get_v1(keys, Slots(pages)) == [False] * 3
        assert one.store.batch_set_v1(keys_of(3, "more"), Slots(pages)) == [False] * 3
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as two:
        assert two.store.batch_exists(keys) == 3


def test_failure_is_a_miss_and_logged_once(sglang, daemon, caplog):
    keys = keys_of(3, "wrong")
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as one:
        one.store.cache.finder.ask = one.store.cache.mover.ask = lambda *a: 1 / 0
        for _ in range(5):
            assert one.store.batch_exists(keys) == 0
            assert one.store.batch_exists_v2(keys).kv_hit_pages == 0
            assert one.store.batch_get_v1(keys, Slots([0, 1, 2])) == [False] * 3
            assert one.store.batch_set_v1(keys, Slots([0, 1, 2])) == [False] * 3
        assert caplog.text.count("the store has failed: ZeroDivisionError") == 1


# ---- prices --------------------------------------------------------------------------------

def hooked(sglang, name):
    (hook,) = {h for t, h in sglang.hooks.hooks.items() if t.endswith("." + name)}
    return hook


def step(sglang, tokens):
    """SGLang's scheduler runs a batch, and processes its result."""
    batch = types.SimpleNamespace(extend_num_tokens=tokens)
    assert hooked(sglang, "run_batch")("scheduler", batch) is None, "its arguments stay"
    assert hooked(sglang, "process_batch_result")(None, "scheduler", batch, "result") is None


def test_time_of_a_token_is_measured_in_the_schedulers_steps(sglang, daemon):
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as one:
        assert one.store.cache.prices is None, "nothing is fetched from other daemons"
        assert not [t for t in sglang.hooks.hooks if t.endswith(".run_batch")]
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}, remote=1) as one:
        prices = one.store.cache.prices
        assert prices.model.layers == 3 and prices.model.token_bytes == 2 * 4 * 16
        for tokens in (0, None, TIMED_TOKENS - 1):
            step(sglang, tokens)
        assert prices.token_us == 0
        step(sglang, TIMED_TOKENS)
        assert prices.token_us > 0
    sglang.schedule.disable_overlap_schedule = False
    with Engine(sglang, daemon, {"kv": pool_of(MHA)}, remote=1) as one:
        step(sglang, TIMED_TOKENS)
        assert one.store.cache.prices.token_us == 0, "the steps overlap"


def test_pages_of_kv_have_a_price_and_others_follow_them(sglang, daemon):
    keys, asked = keys_of(4, "priced"), []
    with Engine(sglang, daemon, {"kv": pool_of(MHA), "draft": pool_of(MHA, layers=1)}) as one:
        exists = one.store.cache.exists

        def recorded(named, keys, priced=False):
            asked.append((named.pool, priced))
            return exists(named, keys, priced)
        one.store.cache.exists = recorded
        for name in ("kv", "draft"):
            one.fill(name, keys, [0, 1, 2, 3])
        one.store.batch_set_v1(keys, Slots([0, 1, 2, 3]))
        one.store.batch_set_v2([Transfer(PoolName.DRAFT, keys, [0, 1, 2, 3])])
        assert one.store.batch_exists_v2(keys, [Transfer(PoolName.DRAFT, keys)]).kv_hit_pages == 4
        assert asked == [("kv", True), ("draft", False)]


# ---- metrics -------------------------------------------------------------------------------

class Metric:
    made = []

    def __init__(self, name, text, labelnames, buckets=None):
        assert name not in [one.name for one in self.made], "a process has one of each"
        self.name, self.names, self.values, self.given = name, labelnames, [], None
        self.made.append(self)

    def labels(self, **given):
        assert set(given) == set(self.names)
        self.given = given
        return self

    def observe(self, value):
        self.values.append(value)

    inc = observe


def test_metrics_of_the_store_are_those_of_vllms(sglang, daemon, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", types.SimpleNamespace(
        Counter=Metric, Histogram=Metric))
    monkeypatch.setitem(CONFIG, "enable_storage_metrics", True)
    monkeypatch.setattr(Metric, "made", [])
    sglang.module.metrics.made.cache_clear()
    keys, pages = keys_of(3, "metrics"), [0, 1, 2]
    for _ in range(2):  # attached again
        with Engine(sglang, daemon, {"kv": pool_of(MHA)}) as one:
            one.store.batch_set_v1(keys, Slots(pages))
            one.store.batch_exists(keys)
            one.store.batch_get_v1(keys, Slots(pages))
    sglang.module.metrics.made.cache_clear()
    values = {one.name: one.values for one in Metric.made}
    assert set(values) == {"sglang:kvd_store_" + name for name in (
        "load_seconds", "load_bytes", "num_chunks_asked", "num_chunks_found", "saved_bytes",
        "num_failed_loads", "num_failed_saves")}
    nbytes = 3 * PAGE * 3 * 2 * 4 * 16
    assert values["sglang:kvd_store_load_bytes"] == [nbytes] * 2
    assert values["sglang:kvd_store_num_chunks_found"] == [3, 3]
    assert {str(one.given) for one in Metric.made} == {"{'tp_rank': 0, 'dp_rank': 0}"}


# ---- the allocator `shm` -------------------------------------------------------------------

def test_store_memory_is_mappable_by_the_daemon(sglang, daemon, monkeypatch):
    import kvd.sglang
    extra = {"given": json.dumps(GIVEN)}
    sys.modules["sglang.srt.runtime_context"].get_memory = lambda: types.SimpleNamespace(
        hicache_storage_backend_extra_config=extra["given"])
    torch = types.ModuleType("torch")
    torch.from_numpy = lambda array: array
    monkeypatch.setitem(sys.modules, "torch", torch)
    array, fd, _ = kvd.sglang.host_memory(None, (4, 2, 1000003), np.dtype(np.uint16))
    try:
        assert array.shape == (4, 2, 1000003) and array.nbytes == 16000048
        array[...] = 7
        with kvd.Client(daemon.socket_path) as client:
            address = array.__array_interface__["data"][0]
            part = address, array.nbytes, fd, array
            region = sglang.module.region_of(client, part)
            assert client.command("region.list")["regions"][-1]["kind"] == "memfd"
            region.unregister()
            bare = os.memfd_create("bars seals")  # as SGLang's own
            os.ftruncate(bare, array.nbytes)
            sglang.module.region_of(client, (address, array.nbytes, bare, array)).unregister()
            os.close(bare)
    finally:
        os.close(fd)
    extra["given"] = '{"module_path": "another"}'
    assert kvd.sglang.host_memory(lambda *a: a, 1, 2) == (1, 2)
