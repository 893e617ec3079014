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


class Chunks:
    """The store that a plan asks, and what its workers tell. there: chunks of any prompt."""
    there = asked = 0

    def serve(self, plan):
        import kvd
        from kvd.vllm.store import StoreRows
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.plan, plan.spaces = plan, self
        layout = kvd.Layout()
        layout.buffer(1 << 20)
        layout.view("kv", BLOCK, 4).heads("kv", 0, "k", buffer=0, unit_bytes=8)
        self.rows = StoreRows({(0, 0): (layout.text(), 1, None)})

    def ask(self, key, call):
        return call(self)

    def hold(self, ids, first, lease, timeout, remote=None):
        self.asked += 1
        return Found(max(0, min(len(ids), self.there - first)), b"secret")

    def close(self):
        pass


class Engine(Chunks, vllm_async.Engine):
    connector, options, hashing = "KvdStoreConnector", {"chunk_tokens": T}, "sha256_cbor"

    def __init__(self, there=0, caching=True, blocks=None):
        self.caching, self.there = caching, there
        if blocks:
            vllm_async.BLOCKS = blocks
        super().__init__("kv_both")
        equal(self.scheduler.recompute_kv_load_failures, True, "what fails is computed")

    def told(self):
        self.serve(self.scheduler.connector._plan)

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


# ---- what is refused, and what a space is called ------------------------------------------

def refused(words, **change):
    """At its start."""
    kind = type("Changed", (Engine,), change)
    try:
        kind()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError("it starts")


def window(words):
    """Of other caches, by the connector alone."""
    import torch
    from kvd.vllm.store import refusals
    from vllm.v1.kv_cache_interface import (KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec)
    e = Engine()
    spec = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=4, head_size=32,
                             dtype=torch.float32, sliding_window=64)
    full = e.scheduler.kv_cache_config.kv_cache_groups[0]
    for groups in ([KVCacheGroupSpec(["a"], spec)], [full, full]):
        caches = KVCacheConfig(8, [], groups)
        found = [what for bad, what, _ in refusals(e.scheduler.vllm_config, caches) if bad]
        assert len(found) == 1 and words in found[0], found


def named():
    """Each of what changes KV is another space."""
    import copy
    import shutil
    import tempfile
    from kvd.vllm.store import names
    config = Engine().scheduler.vllm_config
    seen = set()

    def one(extra=(), **change):
        other = copy.copy(config)
        other.model_config = copy.copy(config.model_config)
        for name, value in change.items():
            setattr(other.model_config, name, value)
        return names(other, dict(extra).get, "s")

    def new(*words, **change):
        got = one(*words, **change)
        assert got not in seen and all(len(w.encode()) <= 200 for w in got[:4]), got
        seen.add(got)
    new()
    assert one() in seen, "the same twice"
    new(dtype="bfloat16")
    new(quantization="fp8")
    assert one(revision="main") in seen, "a branch is no name of weights"
    new(revision="e1945c40" * 5)
    new(hf_overrides={"sliding_window": 7})
    equal(one(model="/nowhere").revision, None, "weights that nothing names")
    new({"model": "m"})
    new({"revision": "x" * 300})
    text = copy.copy(config.model_config.hf_text_config)
    for length in (1024, 2048):
        text.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e6,
                                "long_factor": list(range(64))}
        new(hf_text_config=text, max_model_len=length)
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copytree(config.model_config.model, folder + "/m")
        new(model=model)
        with open(model + "/config.json", "a") as f:
            f.write("\n")
        new(model=model)
    try:
        one(hf_overrides=lambda config: config)
    except ValueError as error:
        assert "revision" in str(error)
    else:
        raise AssertionError("a function is compared")


def ids():
    """vLLM's own keys, by its own hash: adapters and salts are other chunks."""
    from kvd.vllm.store import ids_and_scheme
    from kvd.vllm.store_plan import Known
    e = Engine()
    made, scheme = ids_and_scheme(e.scheduler.vllm_config, "tokens", BLOCK)
    plain, salted = e.add("a"), e.add("b")
    salted.cache_salt = "x"
    chains = [made.of(Known(r), T, 3) for r in (plain, salted)]
    assert all(len(one) == 32 for chain in chains for one in chain)
    equal(len(set(chains[0] + chains[1])), 6, "ids")
    blocks, other = ids_and_scheme(e.scheduler.vllm_config, "blocks", BLOCK)
    equal(blocks.of(Known(plain), T, 3), plain.block_hashes[1::2], "hashes of blocks")
    assert scheme != other and "seed=" in other and "block=%d" % BLOCK in other, other


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
    for words, change in (
            ("--prefix-caching-hash-algo sha256_cbor", {"hashing": "sha256"}),
            ("--prefix-caching-hash-algo sha256_cbor", {"hashing": "xxhash_cbor"}),
            ("chunk_token is not an option", {"options": {"chunk_token": 64}}),
            ("not a multiple of the block size, 32", {"options": {"chunk_tokens": 100}}),
            ("neither", {"options": {"ids": "words"}}),
            ("lease", {"options": {"lease": 0}}), ("remote", {"options": {"remote": 2}}),
            ("kvd_socket", {"options": {"kvd_socket": 1}})):
        tally.check("refused: %s" % change, refused, words, **change)
    tally.check("refused: windows, and several groups", window, "groups of caches")
    tally.check("what a space is called", named)
    tally.check("ids", ids)
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
