#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduler with KvdStoreConnector's scheduler side, two steps in flight, as
vllm_async.py does it: the steps' results and the store's answers are given here. Blocks must be
neither freed twice nor kept.

vllm_store_async.py [--nixl native] [--name NAME]
Last line: N passed, N failed."""
import argparse
import sys
from collections import namedtuple

import vllm_async
from rig import Tally, equal
from vllm_async import BLOCK, inside

T, PROMPT = 64, 200
Found = namedtuple("Found", "chunks secret")


class Engine(vllm_async.Engine):
    connector, options, hashing = "KvdStoreConnector", {"chunk_tokens": T}, "sha256_cbor"

    def __init__(self, there=0, caching=True, blocks=None):
        """there: chunks of any prompt that the store has."""
        self.caching, self.there, self.asked = caching, there, 0
        if blocks:
            vllm_async.BLOCKS = blocks
        super().__init__("kv_both")
        equal(self.scheduler.recompute_kv_load_failures, True, "what fails is computed")

    def told(self):
        import kvd
        from kvd.vllm.store import StoreRows
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.plan = self.scheduler.connector._plan
        self.plan.door = self
        layout = kvd.Layout()
        layout.buffer(1 << 20)
        layout.view("kv", BLOCK, 4).heads("kv", 0, "k", buffer=0, unit_bytes=8)
        self.rows = StoreRows({(0, 0): (layout.text(), 1)})

    def ask(self, key, call):
        return call(self)

    def hold(self, ids, first, lease, timeout):
        self.asked += 1
        return Found(max(0, min(len(ids), self.there - first)), b"secret")

    def close(self):
        pass

    def add(self, name, n=1, tokens=PROMPT):
        return super().add(name, None, n, tokens, self.hasher)

    def begin(self):
        """The workers' first step."""
        self.result(self.step(), kv_connector_worker_meta=self.rows)

    def blocks(self, name):
        return self.scheduler.kv_cache_manager.get_block_ids(name)[0]


def meta(step):
    return step.kv_connector_metadata


def first_step():
    """A request waits for what the workers tell, which comes with a step of none."""
    e = Engine(3)
    e.add("a")
    step = e.step()
    equal((step.num_scheduled_tokens, meta(step).words, e.asked), ({}, None, 0), "the first step")
    e.result(step, kv_connector_worker_meta=e.rows)
    step = e.step()
    equal([load[3:] for load in meta(step).loads], [(0, 192)], "loads")
    e.result(step, finished_recving={"a"})
    finish(e, "a")


def finish(e, name, saves=()):
    """It computes what is left, and ends."""
    step = e.step()
    equal([s[:2] for s in meta(step).saves], list(saves), "saves")
    e.result(step)
    step = e.step()
    ends = meta(step).ends
    e.result(step, finished_sending=set(ends))
    e.quiet()
    return ends


def loading(**kw):
    e = Engine(3, **kw)
    e.begin()
    e.add("a")
    step = e.step()
    equal([load[0] for load in meta(step).loads], ["a"], "loads")
    equal(meta(step).loads[0][2], e.blocks("a")[:6], "blocks")
    return e, step


def loaded():
    e, first = loading()
    second = e.step()
    e.result(first, finished_recving={"a"})
    third = e.step()
    equal(third.num_scheduled_tokens, {"a": PROMPT - 192}, "tokens that are computed")
    e.result(second)
    e.result(third)
    equal(meta(e.step()).ends, [], "ends of what was not saved")
    e.quiet()


def computed():
    """Saved as it is computed, and kept until that has ended."""
    e = Engine(0)
    e.begin()
    request = e.add("a", 200)
    first = e.step()
    equal([s[:2] for s in meta(first).saves], [("a", 0)], "saves of the prompt")
    equal(len(meta(first).saves[0][2]), 3 * 32, "bytes of ids")
    equal(meta(first).saves[0][3], e.blocks("a")[:6], "blocks")
    flying, saved = [first], []
    while not request.is_finished():
        flying.append(e.step())
        saved += [s[:2] for s in meta(flying[-1]).saves]
        e.result(flying.pop(0))
    for step in flying:
        e.result(step)
    equal(saved, [("a", 3), ("a", 4), ("a", 5)], "chunks of the answer")
    step = e.step()
    equal(meta(step).ends, ["a"], "ends")
    assert e.scheduler.has_requests(), "nobody would look at the puts any more"
    e.result(step)
    assert e.blocks("a"), "its blocks are given away while they are read"
    e.result(e.step(), finished_sending={"a"})
    e.quiet()


def abort_loading(when):
    """Before the load was reported, in a step that ran then, or after."""
    e, first = loading()
    second = e.step()
    if when == "before":
        e.abort("a")
        e.result(first)
        third = e.step()
        equal(meta(third).drops, ["a"], "drops")
        e.result(second)
        e.result(third, finished_recving={"a"})
    elif when == "meanwhile":
        e.abort("a")
        e.result(first, finished_recving={"a"})
        e.result(second)
    else:
        e.result(first, finished_recving={"a"})
        e.abort("a")
        e.result(second)
    e.quiet()


def abort_saving():
    """With a step in flight that writes its blocks."""
    e = Engine(0)
    e.begin()
    e.add("a", 50)
    first, second = e.step(), e.step()
    e.result(first)
    e.abort("a")
    e.result(second)
    step = e.step()
    equal(meta(step).ends, ["a"], "ends")
    assert e.blocks("a"), "its blocks are given away while they are read"
    e.result(step, finished_sending={"a"})
    e.quiet()


def failed(where, caching):
    """The first blocks that are not there are computed, and those behind them."""
    e, first = loading(caching=caching)
    blocks = e.blocks("a")
    second = e.step()
    e.result(first, finished_recving={"a"}, invalid_block_ids=set(blocks[where:6]))
    asked = e.asked
    third = e.step()
    equal(third.num_scheduled_tokens, {"a": PROMPT - where * BLOCK}, "tokens that are computed")
    equal((meta(third).loads, e.asked), ([], asked), "it is not tried again")
    equal([s[:2] for s in meta(third).saves], [("a", 0)], "saves")
    e.result(second)
    e.result(third)
    step = e.step()
    e.result(step, finished_sending=set(meta(step).ends))
    e.quiet()


def shared():
    """What the own cache has is not loaded."""
    e = Engine(3)
    e.begin()
    e.add("a")
    e.result(e.step(), finished_recving={"a"})
    finish(e, "a")
    e.there = 0
    e.add("b", tokens=PROMPT + 100)
    step = e.step()
    equal(step.num_scheduled_tokens, {"b": PROMPT + 100 - 192}, "tokens that are computed")
    equal([s[:2] for s in meta(step).saves], [("b", 0)], "saves")
    e.result(step)
    step = e.step()
    e.result(step, finished_sending=set(meta(step).ends))
    e.quiet()


def preempted():
    """Blocks are given away under puts, which the next step settles."""
    e = Engine(0, caching=False, blocks=16)
    e.begin()
    requests = [e.add(name, 100) for name in "ab"]
    settled, flying = [], [e.step()]
    for _ in range(400):
        flying.append(e.step())
        settled += meta(flying[-1]).settles
        step = flying.pop(0)
        e.result(step, finished_sending=set(meta(step).ends))
        if all(r.is_finished() for r in requests):
            break
    assert settled, "nobody was preempted"
    for step in flying:
        e.result(step, finished_sending=set(meta(step).ends))
    step = e.step()
    e.result(step, finished_sending=set(meta(step).ends))
    e.quiet()
    return "%d times" % len(settled)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-store-async")
    args = parser.parse_args()
    inside()
    tally = Tally()
    tally.check("the first step", first_step)
    tally.check("a load", loaded)
    tally.check("chunks are saved as they are computed", computed)
    for when in ("before", "meanwhile", "after"):
        tally.check("given up %s it was loaded" % when, abort_loading, when)
    tally.check("given up while it is saved", abort_saving)
    for caching in (True, False):
        for where in (0, 1, 4):
            tally.check("a load of which %d blocks have landed%s" % (
                where, "" if caching else ", without an own cache"), failed, where, caching)
    tally.check("what the own cache has", shared)
    tally.check("a full cache", preempted)
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
