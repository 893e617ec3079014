#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""KvdStoreConnector's events through vLLM's scheduler and its publisher, decoded by vLLM: they are
those of vLLM's own blocks, but for the medium. Steps' results and the store's answers are given here.

vllm_events_forms.py [--nixl native] [--name NAME]
Last line: N passed, N failed."""
import argparse
import sys
import time
import types

import vllm_store_async
from rig import Tally, equal
from vllm_async import BLOCK, inside
from vllm_store_async import T

PROMPT = 200
ENDPOINT = "inproc://kvd-events"


class Daemon:
    """In the place of a Follower's SpaceClient: it lists what is there."""
    there = ()

    def ask(self, key, call):
        return True, [types.SimpleNamespace(id=one, tier=tier, put=True, space=None)
                      for one, tier in self.there]

    def close(self):
        pass


class Engine(vllm_store_async.Engine):
    """A scheduler whose events are received."""

    def __init__(self, **kw):
        import msgspec
        import zmq
        from vllm.config import KVEventsConfig
        from vllm.distributed.kv_events import KVEventBatch
        self.endpoint = "%s-%d" % (ENDPOINT, time.monotonic_ns())
        self.events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq",
                                     endpoint=self.endpoint)
        super().__init__(**kw)
        self.sub = zmq.Context.instance().socket(zmq.SUB)
        self.sub.connect(self.endpoint)
        self.sub.subscribe(b"")
        self.decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        follower = self.plan.events.follower
        follower.close()  # its thread; the steps are made here
        follower.spaces = self.daemon = Daemon()
        adapters = self.plan.adapters
        adapters.weights, adapters.run = str, lambda call, *args: call(*args)
        self.begin()

    def prompt(self, name, tokens=PROMPT, n=1, **words):
        """The step of a request that computes all of it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request
        request = Request(name, list(range(10, 10 + tokens)), SamplingParams(
            max_tokens=n, temperature=0), None, block_hasher=self.hasher, **words)
        self.scheduler.add_request(request)
        step = self.step()
        equal(step.num_scheduled_tokens, {name: tokens}, "tokens of the step")
        self.ids = self.plan._ids(self.plan.requests[name], tokens // T)
        return step

    def published(self, step, **transfers):
        """Events of a step's result."""
        self.result(step, **transfers)
        events = []
        while self.sub.poll(1000 if not events else 100):
            events += self.decode(self.sub.recv_multipart()[2]).events
        return events

    def chunks(self, count, tier="memory"):
        return [(one, tier) for one in self.ids[:count]]

    def follow(self, *there):
        self.daemon.there = [one for some in there for one in some]
        self.plan.events.follower.step()


def fields(event):
    return {name: getattr(event, name) for name in event.__struct_fields__}


def blocks(events, medium):
    """{hash: what an event has of this block}"""
    found = {}
    for event in (e for e in events if e.medium == medium):
        told, parent = fields(event), event.parent_block_hash
        for name in ("block_hashes", "medium", "locality", "parent_block_hash", "token_ids"):
            del told[name]
        keys = told.pop("extra_keys") or [None] * len(event.block_hashes)
        for i, one in enumerate(event.block_hashes):
            tokens = event.token_ids[i * BLOCK:(i + 1) * BLOCK]
            found[one] = dict(told, parent=parent, tokens=tokens, keys=keys[i])
            parent = one
    return found


def adapter():
    from vllm.lora.request import LoRARequest
    return LoRARequest("sql", 7, "/none")


def form(**words):
    """All of a prompt's chunks."""
    e = Engine()
    step = e.prompt("a", **words)
    own = blocks(e.published(step), "GPU")
    equal(len(own), PROMPT // BLOCK, "vLLM's blocks")
    assert e.scheduler.has_requests(), "it sleeps, and does not publish"
    e.follow(e.chunks(3), e.chunks(2, "file"))
    events = e.published(e.step(), finished_sending={"a"})
    for medium, count in ("CPU", 3), ("STORAGE", 2):
        told = blocks(events, medium)
        equal(told, {one: own[one] for one in list(own)[:count * T // BLOCK]}, medium)
    equal({(e.locality, e.ownership) for e in events}, {("LOCAL", None)}, "locality, ownership")
    equal([len(e.block_hashes) for e in events], [T // BLOCK] * 5, "blocks of each")
    e.follow(e.chunks(1, "file"))
    gone = e.published(e.step())
    equal(sorted((type(e).__name__, e.medium, e.group_idx) for e in gone),
          [("BlockRemoved", "CPU", 0)] * 3 + [("BlockRemoved", "STORAGE", 0)], "removed")
    equal({one for e in gone if e.medium == "CPU" for one in e.block_hashes},
          {one for e in events if e.medium == "CPU" for one in e.block_hashes}, "their blocks")
    e.plan.events.follower.awake_s = 0
    e.quiet()


def cleared():
    """vLLM clears all tiers for its readers: chunks come again in the same batch or later."""
    e = Engine()
    step = e.prompt("a")
    e.published(step)
    e.follow(e.chunks(3))
    equal(len(e.published(e.step(), finished_sending={"a"})), 3, "chunks")
    e.result(e.step())
    assert e.scheduler.reset_prefix_cache(), "blocks are in use"
    (event,) = e.published(e.step())
    equal(type(event).__name__, "AllBlocksCleared", "event")
    e.follow(e.chunks(3))
    equal([type(one).__name__ for one in e.published(e.step())], ["BlockStored"] * 3, "again")


def reset():
    """With the connector, too: chunks of before are not found any more."""
    e = Engine()
    step = e.prompt("a")
    e.published(step)
    e.follow(e.chunks(3))
    equal(len(e.published(e.step(), finished_sending={"a"})), 3, "chunks")
    e.result(e.step())
    assert e.scheduler.reset_prefix_cache(reset_connector=True), "blocks are in use"
    e.follow(e.chunks(3))
    equal([type(one).__name__ for one in e.published(e.step())],
          ["AllBlocksCleared"] + ["BlockRemoved"] * 3, "events")


def found():
    """Another engine's chunks are published when a request finds them."""
    e = Engine(there=3)
    e.add("a")
    step = e.step()
    e.ids = e.plan._ids(e.plan.requests["a"], 3)
    equal([load[0] for load in step.kv_connector_metadata.loads], ["a"], "loads")
    e.follow(e.chunks(3))
    events = e.published(step, finished_recving={"a"})
    equal([(e.medium, len(e.block_hashes)) for e in events], [("CPU", T // BLOCK)] * 3, "chunks")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-events")
    args = parser.parse_args()
    inside()
    tally = Tally()
    tally.check("chunks are vLLM's blocks in another medium", form)
    tally.check("with a salt", form, cache_salt="salt")
    tally.check("with an adapter", form, lora_request=adapter())
    tally.check("what vLLM clears comes again", cleared)
    tally.check("after a reset nothing does", reset)
    tally.check("found chunks", found)
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
