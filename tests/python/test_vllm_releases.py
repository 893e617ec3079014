# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.33 does and 0.32 does not: loads of fewer tokens than were offered, hashes of tokens
behind a block. vLLM is a stand-in whose classes are empty."""
import sys
import types
from types import SimpleNamespace as Some

import pytest

from kvd.layout import Layout
from kvd.vllm import releases
from kvd.vllm.params import Remote
from kvd.vllm.store_plan import BlockIds, Plan, Words
from vllm_stub import Vllm


@pytest.fixture
def vllm():
    with Vllm() as v:
        yield v


@pytest.fixture
def connector(vllm):
    """KvdConnector, as a scheduler has it."""
    module = vllm.load("kvd.vllm.connector")
    caches = Some(has_mamba_layers=False, kv_cache_groups=[],
                  select_transfer_block_ids=lambda blocks: blocks)
    config = Some(kv_transfer_config=Some(get_from_extra_config=lambda name, preset: preset),
                  num_prefill_lookahead_tokens=0)
    one = object.__new__(module.KvdConnector)
    one._scheduler = module.Scheduler(config, caches)
    return one


def load(connector, external, computed=32, push=False, tokens=100):
    """A request of 100 tokens whose prefill has all: what the workers are given."""
    request = Some(request_id="a", kv_transfer_params={"do_remote_prefill": True},
                   num_prompt_tokens=100)
    scheduler = connector._scheduler
    scheduler.pulls["a"] = Remote(5, "t", 0 if push else tokens, 1, 1, (), push)
    assert connector.get_num_new_matched_tokens(request, computed) == (tokens - computed, True)
    blocks = Some(get_block_ids=lambda: ([1, 2, 3, 4, 5, 6, 7],))
    connector.update_state_after_alloc(request, blocks, external)
    (bind,) = scheduler.step.binds
    return bind[2:], scheduler.step.refused


@pytest.mark.parametrize("push", [False, True])
def test_fewer_tokens_than_offered_follow_own_tokens(connector, push):
    assert load(connector, 48, push=push) == ((32, 80), [])


@pytest.mark.parametrize("push", [False, True])
def test_all_offered_tokens_are_loaded(connector, push):
    assert load(connector, 68, push=push) == ((32, 100), [])
    assert connector._scheduler.computed == {}


def test_state_of_another_token_is_not_loaded(connector):
    connector._scheduler.replay = True
    connector._scheduler.loads = lambda tokens: tokens
    bind, ((name, room, why),) = load(connector, 48)
    assert bind == (32, 80) and (name, room) == ("a", 5) and "the state" in why


def test_fewer_chunks_than_were_found_are_loaded_from_the_first_token_on():
    space = Some(hold=lambda ids, first, **kw: Some(chunks=len(ids), secret=b"s", remote=0,
                                                          close=None))
    spaces = Some(ask=lambda key, call: call(space))
    plan = Plan(spaces, BlockIds(16), Words("m", "r", "s", "", 0), 16, 64)
    layout = Layout()
    layout.buffer(1 << 20)
    layout.view("kv", 16, 20).field("kv", 0, "k", buffer=0, page_stride=512, token_stride=32,
                                    unit_stride=32, unit_bytes=32)
    plan.told({(0, 0): (layout.text(), 1, None)})
    request = Some(request_id="a", num_tokens=300, skip_reading_prefix_cache=False,
                   block_hashes=[bytes([i]) * 32 for i in range(18)])
    plan.arrived(request)
    assert plan.matched(request, 80) == (176, True)
    plan.allocated(request, lambda: (list(range(20)),), 100)
    ((_, _, blocks, begin, end),) = plan.step.loads
    assert (begin, end) == (80, 180) and blocks == list(range(5, 12))


def test_hashes_of_tokens_behind_their_block_are_refused():
    releases.refuse_lookahead(Some())
    releases.refuse_lookahead(Some(num_hash_lookahead_tokens=0))
    with pytest.raises(ValueError, match="cover 2 tokens after"):
        releases.refuse_lookahead(Some(num_hash_lookahead_tokens=2))


def test_block_hash_matches_the_release():
    config = Some(cache_config=Some(block_size=16))
    assert releases.hash_tokens(config, Some()) == 16
    assert releases.hash_tokens(config, Some(hash_block_size=None)) == 16
    assert releases.hash_tokens(config, Some(hash_block_size=64)) == 64


# ---- what wrote a cache --------------------------------------------------------------------------

@pytest.fixture
def author(vllm, monkeypatch):
    """author(backend, isa, …): of a layer of that backend, as the worker names it."""
    worker = vllm.load("kvd.vllm.worker")

    def author(backend, isa="amx", rocm=False, version="0.33.0", cache="auto", mode="NONE"):
        made = {"": {"__version__": version}, ".platforms": {
            "current_platform": Some(is_rocm=lambda: rocm)}, ".v1.attention.backends.cpu_attn": {
                "_get_attn_isa": lambda *args: "%s%d" % (isa, args[1])}}
        for name, words in made.items():
            module = types.ModuleType("vllm" + name)
            module.__dict__.update(words, __path__=[])
            monkeypatch.setitem(sys.modules, "vllm" + name, module)
        layer = Some(get_attn_backend=lambda: Some(get_name=lambda: backend))
        config = Some(compilation_config=Some(static_forward_context={"l": layer}),
                      model_config=Some(dtype="bfloat16"), cache_config=Some(cache_dtype=cache))
        spec = Some(kv_quant_mode=Some(name=mode), tokens_per_state=1, head_size=64)
        return worker.author_of(config, "l", spec, 32)
    return author


def test_order_of_block_bytes_is_named(author):
    assert author("FLASH_ATTN") is None
    names = [author("CPU_ATTN"), author("CPU_ATTN", "vec"), author("CPU_ATTN", version="0.32.0"),
             author("CPU_ATTN", cache="fp8"), author("FLASH_ATTN", rocm=True),
             author("FLASHINFER", mode="NVFP4"), author("DEEPSEEK_V32_INDEXER")]
    assert len(set(names)) == len(names) and None not in names
    assert names[0] == "CPU_ATTN NONE amx32 vllm=0.33.0 cache=auto"
