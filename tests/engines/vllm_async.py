#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduler with KvdConnector's scheduler side, two steps in flight. vLLM's
CPU engine schedules synchronously, so the steps' results are given here, in every order in
which a GPU's engine may give them.

vllm_async.py [--nixl native] [--name NAME]
Last line: N passed, N failed."""
import argparse
import os
import sys

from rig import FOLDER, Tally, equal, kvd_paths, python

BLOCK, BLOCKS, PROMPT, STOP = 32, 64, 70, 7
KVD = {"room": "5", "ticket": "x" * 32, "tokens": PROMPT, "tp": 1, "pp": 1,
       "layers": {"kv": [0]}, "sources": [["tcp://127.0.0.1:1", "m.p", 0]]}
ROW = {"endpoint": "tcp://127.0.0.1:2", "pool": "m.d", "rank": 0, "heads": 4, "states": [],
       "layers": {"kv": [0]}}


def inside():
    """In vLLM's interpreter."""
    if os.environ.get("KVD_INSIDE"):
        return
    env = dict(os.environ, KVD_INSIDE="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1",
               VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1",
               PYTHONPATH=os.pathsep.join(kvd_paths("native")))
    os.execve(python("vllm"), [python("vllm"), *sys.argv], env)


class Engine:
    """A scheduler, and its steps' results."""
    connector, options, hashing, caching = "KvdConnector", {}, "sha256", False
    asynchronous, events = True, None

    def __init__(self, role, policy="fail"):
        import torch
        from vllm.config import (CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig,
                                 VllmConfig)
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig,
                                                KVCacheGroupSpec)
        from vllm.v1.structured_output import StructuredOutputManager
        model = ModelConfig(model=os.path.join(FOLDER, "vllm", "llama"), dtype="float32")
        config = VllmConfig(
            model_config=model, device_config=DeviceConfig("cpu"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=self.caching,
                                     prefix_caching_hash_algo=self.hashing),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2048,
                is_encoder_decoder=False),
            kv_transfer_config=self.transfer(role, policy), kv_events_config=self.events)
        config.scheduler_config.async_scheduling = self.asynchronous
        config.cache_config.num_gpu_blocks = BLOCKS
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"],
            FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32,
                              dtype=torch.float32))])
        self.scheduler = (AsyncScheduler if self.asynchronous else Scheduler)(
            vllm_config=config, kv_cache_config=caches, block_size=BLOCK,
            hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config), log_stats=True)
        self.told()
        self.free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def transfer(self, role, policy):
        from vllm.config import KVTransferConfig
        return KVTransferConfig(
            kv_connector=self.connector, kv_connector_module_path="kvd.vllm", kv_role=role,
            kv_load_failure_policy=policy, kv_connector_extra_config=self.options)

    def told(self):
        """What the workers tell at the start."""
        from kvd.vllm.connector import Handshake
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): Handshake(ROW)})

    def add(self, name, params, n=1, tokens=PROMPT, hasher=None, first=10):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request
        sampling = SamplingParams(max_tokens=n, temperature=0, stop_token_ids=[STOP],
                                  extra_args={"kv_transfer_params": params})
        request = Request(name, list(range(first, first + tokens)), sampling, None,
                          block_hasher=hasher)
        self.scheduler.add_request(request)
        return request

    def step(self):
        return self.scheduler.schedule()

    def result(self, step, token=20, **transfers):
        """What a worker answers."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
        names = list(step.num_scheduled_tokens)
        return self.scheduler.update_from_output(step, ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)},
            sampled_token_ids=[[token] for _ in names],
            kv_connector_output=KVConnectorOutput(**transfers)))

    def abort(self, name):
        from vllm.v1.request import RequestStatus
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def quiet(self):
        for _ in range(3):
            self.result(self.step())
        equal(dict(self.scheduler.requests), {}, "requests")
        equal(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), self.free,
              "free blocks")
        assert not self.scheduler.has_requests(), "it would step for ever"


def in_flight(processed):
    """P stops at its first token while a step with the second one runs: its tokens are not
    offered. processed: count it, as if the step had run."""
    p = Engine("kv_producer")
    request = p.add("a", {"do_remote_decode": True}, 8)
    first, second = p.step(), p.step()
    equal(second.num_scheduled_tokens, {"a": 1}, "the step in flight")
    if processed:
        type(request).num_in_flight_tokens = property(lambda self: 0, lambda self, value: None)
        del request.__dict__["num_in_flight_tokens"]
    try:
        out = p.result(first, STOP)
    finally:
        if processed:
            del type(request).num_in_flight_tokens
            request.num_in_flight_tokens = 1
    (said,) = next(iter(out.values())).outputs
    tokens = said.kv_transfer_params["kvd"]["tokens"]
    meta = p.step().kv_connector_metadata
    equal([o[0] for o in meta.offers], ["a"], "offers of the next step")
    equal(tokens, meta.offers[0][4], "tokens of the offer")
    if not processed:
        p.result(second)
        p.result(p.step(), finished_sending={"a"})
        p.quiet()
    return tokens


def offered():
    equal(in_flight(False), PROMPT, "tokens that are offered")


def offered_control():
    equal(in_flight(True), PROMPT + 1, "tokens that would be offered")


def loading(policy="fail"):
    d = Engine("kv_consumer", policy)
    request = d.add("a", {"do_remote_prefill": True, "kvd": KVD})
    step = d.step()
    equal([b[0] for b in step.kv_connector_metadata.binds], ["a"], "binds")
    return d, request, step


def queued_abort():
    """Before it has blocks: it stays until the workers say that its room has ended."""
    d = Engine("kv_consumer")
    d.add("a", {"do_remote_prefill": True, "kvd": KVD})
    d.abort("a")
    step = d.step()
    equal(step.kv_connector_metadata.drops, [("a", True)], "drops")
    d.result(step)
    assert d.scheduler.has_requests(), "nobody would look at the room any more"
    d.result(d.step(), finished_sending={"a"})
    d.quiet()


def abort_reported(when):
    """It was aborted: before the load was reported, in a step that ran then, or after."""
    d, _, first = loading()
    second = d.step()
    if when == "before":
        d.abort("a")
        d.result(first)
        third = d.step()
        d.result(second)
        equal(third.kv_connector_metadata.drops, [("a", False)], "drops")
        d.result(third, finished_recving={"a"})
    elif when == "meanwhile":
        d.abort("a")
        d.result(first, finished_recving={"a"})
        d.result(second)
    else:
        d.result(first, finished_recving={"a"})
        d.abort("a")
        d.result(second)
    d.quiet()


def failed(policy):
    """With a step in flight: an error, or computed again."""
    d, request, first = loading(policy)
    second = d.step()
    out = d.result(first, finished_recving={"a"}, failed_recving={"a"})
    if policy == "fail":
        equal([str(o.finish_reason) for o in next(iter(out.values())).outputs], ["error"],
              "how it ended")
        d.result(second)
    else:
        third = d.step()
        equal(third.num_scheduled_tokens, {"a": PROMPT}, "tokens that are computed")
        equal(third.kv_connector_metadata.binds, [], "binds")
        d.result(second)
        d.result(third)
    d.quiet()


def loaded():
    d, request, first = loading()
    d.result(first, finished_recving={"a"})
    step = d.step()
    equal(step.num_scheduled_tokens, {"a": 1}, "tokens that are computed")
    d.result(step)
    d.quiet()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-async")
    args = parser.parse_args()
    inside()
    tally = Tally()
    tally.check("a step in flight is not offered", offered)
    tally.check("control: it is, when it counts as run", offered_control)
    tally.check("a load", loaded)
    tally.check("given up in the queue", queued_abort)
    for when in ("before", "meanwhile", "after"):
        tally.check("given up %s it was loaded" % when, abort_reported, when)
    for policy in ("fail", "recompute"):
        tally.check("a load that fails, %s" % policy, failed, policy)
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
