# SPDX-License-Identifier: Apache-2.0
"""The scheduler's sides of kvd.vllm's connectors with stand-ins for vLLM: what clients send, and
which reports vLLM is made to wait for."""
import pickle
from types import SimpleNamespace as Some

import pytest

from kvd.rooms import SUCCESS
from kvd.vllm.push import Push
from vllm_stub import Status, Vllm

ROW = {"endpoint": "tcp://127.0.0.1:2", "pool": "m.d", "rank": 0, "heads": 4, "states": [],
       "layers": {"kv": [0]}}
PUSH = {"do_remote_decode": True, "bootstrap_room": 5}
FROM = {"do_remote_prefill": True, "bootstrap_room": 5, "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 1}


@pytest.fixture(scope="module")
def vllm():
    with Vllm() as v:
        yield v


class Engine:
    """The scheduler's side of KvdConnector."""

    def __init__(self, vllm):
        extra = {"bootstrap": "127.0.0.1:1"}
        transfer = Some(is_kv_consumer=True, get_from_extra_config=lambda name, preset:
                        extra.get(name, preset))
        caches = Some(has_mamba_layers=False, kv_cache_groups=[],
                      select_transfer_block_ids=lambda blocks: blocks)
        config = Some(kv_transfer_config=transfer, num_prefill_lookahead_tokens=0,
                      parallel_config=Some(tensor_parallel_size=1, pipeline_parallel_size=1))
        self.scheduler = vllm.load("kvd.vllm.connector").Scheduler(config, caches)
        self.scheduler.ranks, self.scheduler.server = {(0, 0): ROW}, object()
        self.prefill = None
        self.scheduler.lookups = Some(of=lambda address, room: self.prefill)

    def request(self, params, name="a"):
        request = Some(request_id=name, kv_transfer_params=params, num_prompt_tokens=70,
                       num_computed_tokens=0, num_in_flight_tokens=0, status=Status.WAITING,
                       output_token_ids=[])
        self.scheduler.arrived(request)
        return request

    def step(self, counts=(), preempted=()):
        """As workers get it: where there are several, each is a process of its own."""
        state = Some(get_block_ids=lambda name: ([1, 2],))
        return pickle.loads(pickle.dumps(self.scheduler.take(Some(
            num_scheduled_tokens=dict(counts), preempted_req_ids=set(preempted),
            kv_connector_block_state=state))))

    def given(self, request, external=0):
        """It gets blocks."""
        self.scheduler.allocated(request, Some(get_block_ids=lambda: ([1, 2],)), external)

    def ended(self, request, status=Status.FINISHED_ABORTED):
        """Whether vLLM is to wait for a report."""
        request.status = status
        return self.scheduler.finished(request, ([1, 2],))[0]


# ---- what clients send ---------------------------------------------------------------------

@pytest.mark.parametrize("params", ["x", ["do_remote_prefill"], 7, True, None, {}, {"kvd": 7},
                                    {"do_remote_prefill": 1, "kvd": "x"},
                                    {"do_remote_prefill": 1, "bootstrap_room": -1},
                                    {"do_remote_prefill": 1, "bootstrap_room": [1]},
                                    {"do_remote_prefill": 1, "bootstrap_room": 5},
                                    {"do_remote_decode": 1, "bootstrap_room": "9" * 30}], ids=str)
def test_parameters_of_another_kind_are_none(vllm, params):
    engine = Engine(vllm)
    request = engine.request(params)
    assert engine.scheduler.matched(request, 0) == (0, False)
    engine.given(request)
    step = engine.step({"a": 70})
    assert not (step.pulls or step.pushes or step.binds)
    assert engine.ended(request) is False


# ---- reports -------------------------------------------------------------------------------

def test_completed_push_is_reported(vllm):
    for status in (Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_ABORTED):
        engine = Engine(vllm)
        request = engine.request(PUSH)
        engine.given(request)
        assert [one[0] for one in engine.step({"a": 70}).computed] == ["a"]
        request.num_computed_tokens = 70
        assert engine.ended(request, status) is True
        step = engine.step()
        assert [one[0] for one in step.ends] + [one[0::2] for one in step.given_up] == \
            (["a"] if status == Status.FINISHED_LENGTH_CAPPED else [("a", True)])


@pytest.mark.parametrize("steps", [0, 1])
def test_push_of_prompt_loaded_elsewhere_is_not_reported(vllm, steps):
    """vLLM waits for the load, and ends its engine core at a second report."""
    engine = Engine(vllm)
    request = engine.request(PUSH)
    engine.given(request)
    request.num_computed_tokens = 64
    for _ in range(steps):
        assert engine.step().computed == []
    assert engine.ended(request) is False
    assert [one[0::2] for one in engine.step().given_up] == [("a", False)]


def test_preempted_and_reloaded_push_is_not_reported(vllm):
    engine = Engine(vllm)
    request = engine.request(PUSH)
    engine.given(request)
    engine.step({"a": 70})
    engine.step(preempted=["a"])
    engine.given(request)
    assert engine.ended(request) is False


def test_push_in_the_queue_is_reported(vllm):
    """So that workers go on stepping until its room has ended."""
    engine = Engine(vllm)
    assert engine.ended(engine.request(PUSH)) is True


@pytest.mark.parametrize("waits", [True, False])
def test_worker_reports_awaited_requests(vllm, waits):
    worker = vllm.load("kvd.vllm.worker").Worker(None, None, 1)
    worker.desk = Some(version=object)
    push = Push(worker, "a", Some(stop=lambda why: None, look=lambda: SUCCESS, end=SUCCESS))
    worker.pushes["a"] = push
    assert worker.results() == (set(), set(), set())
    push.give_up("the client has left", waits)
    assert worker.results() == ({"a"} if waits else set(), set(), set()) and not worker.pushes


# ---- prompts that are computed on decode -----------------------------------------------------

def test_prompt_computed_by_vllm_has_empty_room(vllm):
    """prompt_logprobs: it does not wait for what prefill's bootstrap server answers."""
    engine = Engine(vllm)
    request = engine.request(dict(FROM))
    assert engine.scheduler.matched(request, 0) == (None, False)
    engine.given(request)
    step = engine.step({"a": 70})
    assert not step.pulls and not step.binds
    engine.prefill = Some(rows=[dict(ROW, secret="00" * 32)], tp=1, pp=1)
    step = engine.step({"a": 1})
    assert [one[0] for one in step.pulls] == ["a"] and step.binds == [("a", (), 0, 0)]
    step = engine.step({"a": 1})
    assert not step.pulls and not step.binds
    assert engine.ended(request) is False


# ---- the store -------------------------------------------------------------------------------

def test_blocks_of_the_store_are_those_of_its_group(vllm, monkeypatch):
    """vLLM may hash less than a block."""
    store = vllm.load("kvd.vllm.store")
    spec = spec_of(vllm)
    group = Some(kv_cache_spec=spec, layer_names=["l0"], host_resident=False)
    caches = Some(kv_cache_groups=[group], hash_block_size=16, needs_kv_cache_zeroing=False,
                  transfer_group_ids=(0,))
    monkeypatch.setattr(store, "refusals", lambda config, caches: ())
    monkeypatch.setattr(store, "names", lambda config, extra, scheme: Some(revision="r"))
    monkeypatch.setattr(store, "ids_and_scheme", lambda config, kind, block: (block, "s"))
    given = {"chunk_tokens": 128, "revision": "r"}
    transfer = Some(kv_connector_extra_config=given, is_kv_consumer=True, is_kv_producer=True,
                    get_from_extra_config=lambda name, preset: given.get(name, preset))
    config = Some(kv_transfer_config=transfer, cache_config=Some(
        block_size=16, prefix_caching_hash_algo="sha256_cbor"), parallel_config=Some(
            tensor_parallel_size=1, pipeline_parallel_size=1), kv_events_config=None)
    plan = store.KvdStoreConnector(config, store.KVConnectorRole.SCHEDULER, caches)._plan
    assert plan.events is None
    with monkeypatch.context() as on:
        on.setattr(store, "block_events", lambda *args: args)
        made = store.KvdStoreConnector(config, store.KVConnectorRole.SCHEDULER, caches)._plan.events
        assert made == (config, caches, 16, 128)
    assert plan.ids == 16 and plan._part((list(range(100, 120)),), 64, 192) == [101, 102]
    given["chunk_tokens"] = 32
    with pytest.raises(ValueError, match="multiple of the block size, 64"):
        store.KvdStoreConnector(config, store.KVConnectorRole.SCHEDULER, caches)


def spec_of(vllm):
    spec = vllm.load("vllm.v1.kv_cache_interface").FullAttentionSpec()
    spec.block_size = 64
    return spec
