#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on OffloadingConnector with KvdTier behind vLLM's tier of host memory: prompts
that one engine has computed are loaded by another, or by itself, from the daemon's chunks.

vllm_tier.py lives|ranks|windows [--nixl native] [--name NAME]

    lives   one engine computes and is killed, the next one has its chunks; the daemon stands still,
            and dies
    ranks   the same with two ranks, whose rows one rank does not take for its own
    windows a model with sliding windows beside full attention: groups of caches

Greedy tokens must be those of one plain engine of vLLM. That they come of chunks is seen from the
daemon's figures and from where vLLM's prompt tokens came from, both to the token. vLLM has no worker
for that connector on a CPU: vllm_tier_cpu copies, all else is vLLM's own.
Last line: N passed, N failed."""
import argparse
import concurrent.futures
import contextlib
import glob
import json
import os
import secrets
import sys
import types

import vllm_layouts
import vllm_pd
import vllm_store
from rig import HERE, Tally, equal, until
from vllm_ends import ctl
from vllm_pd import BLOCK
from vllm_store import AT_ONCE, NAMES, PLAIN, T, TOKEN

HOST_MIB = 16  # of vLLM's tier of host memory: 64 chunks


class Engine(vllm_pd.Engine):
    def __init__(self, case, name, node, revision="one", tp=1):
        self.node, self.revision, self.own = node, revision, "tier-" + secrets.token_hex(4)
        super().__init__(case.args, name, node, role="kv_both", path=[HERE, PLAIN], tp=tp,
                         more=("--max-num-batched-tokens", "256", "--block-size", str(BLOCK),
                               "--worker-extension-cls", "vllm_look.Look"))
        self.metrics = {"usage": "kv_cache_usage_perc"}

    def environment(self, args, node):
        return dict(super().environment(args, node), VLLM_SERVER_DEV_MODE="1")

    def connector(self, args, role, side_port):
        tier = {"type": "KvdTier", "module_path": "kvd.vllm.tier", "revision": self.revision}
        config = {"kv_connector": "OffloadingConnector", "kv_role": role, "engine_id": self.own,
                  "kv_connector_extra_config": {
                      "spec_name": "CpuTiers", "spec_module_path": "vllm_tier_cpu",
                      "cpu_bytes_to_use": HOST_MIB << 20, "block_size": T,
                      "secondary_tiers": [tier]}}
        return ["--kv-transfer-config", json.dumps(config), "--prefix-caching-hash-algo",
                "sha256_cbor"]

    def kill(self):
        """vLLM leaves its memory's file behind when it is killed."""
        super().kill()
        for path in glob.glob("/dev/shm/vllm_offload_%s*" % self.own):
            os.unlink(path)

    def settled(self):
        assert until(lambda: self.counters()["usage"] == 0, 20), "blocks are not free"
        assert until(lambda: self.node.daemon.proc.poll() is not None or
                     self.node.chunks()["moves"] == 0, 10), "moves"

    def forget(self, all_of_it=False):
        """Its own cache of prefixes; all_of_it: host memory, too, and what it knows of chunks."""
        self.settled()
        path = "/reset_prefix_cache" + ("?reset_external=true" if all_of_it else "")
        equal(self.call("POST", path)[0], 200, "status")


class Case(vllm_store.Case):
    def __init__(self, kind, args, tally):
        vllm_pd.Run.__init__(self, types.SimpleNamespace(
            nixl="native", kind=kind, connector="", tp_d=1, push=False, name=args.name), tally)
        self.chunk, self.stack = T, None

    def tier(self, name, node, **kw):
        engine = Engine(self, name, node, **kw)
        self.stack.callback(engine.stop)
        engine.wait()
        self.tally.add("engine %s is up" % name, True, "%.0f s" % engine.took)
        return engine

    def chunks(self, name):
        """Of a prompt: vLLM stores no answers here."""
        return self.length(name) // T

    def found(self, name):
        """Tokens that are loaded: vLLM computes the last one of a whole prompt again, and counts
        it as loaded."""
        return self.chunks(name) * T

    def seen(self, engine):
        engine.settled()
        told = engine.node.chunks()
        return dict(engine.counters()["sources"], fetched=told["fetched_bytes"],
                    put=told["put_bytes"])

    def came(self, engine, what, wanted):
        """wanted: of what grows while what() is done."""
        begin = self.seen(engine)
        what()

        def grown():
            end = self.seen(engine)
            return {k: end.get(k, 0) - begin.get(k, 0) for k in wanted}
        until(lambda: grown() == wanted, 10)
        equal(grown(), wanted, "figures")

    def computes(self, engine, name, chunks=None):
        chunks = self.chunks(name) if chunks is None else chunks
        engine.forget()
        self.came(engine, lambda: self.right(engine, name), {
            "external_kv_transfer": 0, "local_compute": self.length(name), "fetched": 0,
            "put": chunks * T * TOKEN})

    def loads(self, engine, name, fetched):
        """fetched: chunks that are not in vLLM's memory."""
        engine.forget()
        loaded = self.found(name)
        self.came(engine, lambda: self.right(engine, name), {
            "external_kv_transfer": loaded, "local_compute": self.length(name) - loaded,
            "fetched": fetched * T * TOKEN, "put": 0})

    def at_once(self, engine):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self.right(engine, name), AT_ONCE))


def lives(case):
    node, tally = case.node("store"), case.tally
    A = case.tier("A", node)
    for name in NAMES:
        tally.check("A computes and stores %s" % name, case.computes, A, name)
    tally.check("A has %s in its own memory" % NAMES[-1], case.loads, A, NAMES[-1], 0)
    tally.check("its memory is shared by its file", shared, node)
    tally.check("A stores a prefix", case.computes, A, "prefix")
    tally.check("A has the prefix of a longer prompt", longer, case, A)
    tally.check("A computes 8 at once, which its memory does not hold", case.at_once, A)
    tally.check("what has left its memory it loads", case.loads, A, "len777",
                case.found("len777") // T)
    A.settled()
    A.kill()
    B = case.tier("B", node)
    for name in (*NAMES, "prefix"):
        tally.check("B has %s of A" % name, case.loads, B, name, case.found(name) // T)
    tally.check("B has 8 at once of A", others, case, B)
    tally.check("after a reset nothing of before is found", reset, case, B)
    tally.check("the daemon stands still: computed", frozen, case, B, node)
    tally.check("the daemon is killed: computed", gone, case, B, node)
    tally.check("control: an empty store has nothing, and is used again", back, case, B, node)
    B.stop()
    C = case.tier("C", node, revision="two")
    tally.check("control: another revision finds nothing", case.computes, C, "len777")


def shared(node):
    kinds = {one["kind"] for one in ctl(node, "regions")["regions"]
             if one["bytes"] == HOST_MIB << 20}
    equal(kinds, {"shm"}, "kinds of memory")


def longer(case, A):
    A.forget()
    shared = case.length("prefix") // T * T
    case.came(A, lambda: case.right(A, "longer"), {
        "external_kv_transfer": shared, "local_compute": case.length("longer") - shared,
        "put": case.chunks("longer") * T * TOKEN - shared * TOKEN})


def others(case, B):
    B.forget()
    loaded = sum(map(case.found, AT_ONCE))
    case.came(B, lambda: case.at_once(B), {
        "external_kv_transfer": loaded, "local_compute": sum(map(case.length, AT_ONCE)) - loaded})


def reset(case, B):
    """As after new weights."""
    B.forget(True)
    case.computes(B, "len257")
    case.loads(B, "len257", 0)


def frozen(case, B, node):
    """A look-up is waited for, for a second, and then none."""
    B.forget(True)
    node.daemon.freeze()
    try:
        took = [case.right(B, name)["took"] for name in ("len257", "len777", "len1900")]
        assert max(took) < 10, took
    finally:
        node.daemon.thaw()
    case.loads(B, "len777", 0)
    return "%.1f s at most" % max(took)


def gone(case, B, node):
    B.forget(True)
    node.daemon.proc.kill()
    node.daemon.proc.wait()
    for name in ("len64", "len257", "len1900"):
        case.right(B, name)
    assert until(lambda: B.counters()["usage"] == 0, 10), "blocks are not free"
    assert B.proc.poll() is None


def back(case, B, node):
    node.daemon.notify.close()
    node.daemon.start().wait_ready()
    node.ready()

    def served():
        B.forget(True)
        case.right(B, "len65")
        B.settled()
        return node.chunks()["chunks"] > 0
    assert until(served, 30, 0.2), "the store is not used again"
    case.computes(B, "len777")


def ranks(case):
    node, tally, names = case.node("store"), case.tally, ("len257", "len777", "prefix")
    A = case.tier("A", node, tp=2)
    for name in names:
        tally.check("A, of two ranks, stores %s" % name, case.computes, A, name)
    A.settled()
    A.kill()
    B = case.tier("B", node, tp=2)
    for name in names:
        tally.check("B, of two ranks, has %s" % name, case.loads, B, name, case.chunks(name))
    B.stop()
    C = case.tier("C", node)
    tally.check("control: C, of one rank, finds nothing of theirs", case.computes, C, "len777")


def windows(case):
    """vLLM's groups of layers have equal hashes and other bytes, and of windows it asks for the
    last chunks alone. The model's answers do not depend on its cache: blocks are judged."""
    node, tally, names = case.node("store"), case.tally, ("len65", "len257", "len777", "prefix")
    A, stored = case.tier("A", node), {}
    for name in names:
        tally.check("A computes and stores %s" % name, blocks_of, case, A, name, 0, stored)
    A.settled()
    A.kill()
    B = case.tier("B", node)
    for name in names:
        tally.check("B has %s, block by block" % name, blocks_of, case, B, name,
                    case.found(name), stored)


def blocks_of(case, engine, name, loaded, stored):
    """stored: of each layer the blocks that the first engine wrote."""
    def seen():
        return [set(layer) for layer in engine.look("blocks_of")[0]]
    before = seen()
    case.came(engine, lambda: case.right(engine, name), {
        "external_kv_transfer": loaded, "local_compute": case.length(name) - loaded})
    new = [now - old for now, old in zip(seen(), before)]
    equal_blocks = [len(here & there) for here, there in zip(new, stored.setdefault(name, new))]
    assert min(equal_blocks) >= case.length(name) // T * T // BLOCK, equal_blocks
    return "%s equal blocks" % equal_blocks


CASES = {"lives": ("llama", lives), "ranks": ("llama", ranks), "windows": ("swa", windows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-tier")
    args = parser.parse_args()
    tally = Tally()
    try:
        kind, what = CASES[args.case]
        vllm_layouts.model(kind)
        case = Case(kind, args, tally)
        with contextlib.ExitStack() as case.stack:
            what(case)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
