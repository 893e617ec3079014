#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""KV events of real vLLM engines on kvd, read by Dynamo's indexer: it knows what the daemon has.

vllm_events.py lives|tier [--nixl native] [--name NAME]

    lives   KvdStoreConnector: chunks put, found by another engine, evicted, deleted, in a file alone;
            the daemon killed and back; a lost batch
    tier    KvdTier behind OffloadingConnector: stored, found by another engine, evicted

Blocks that the indexer has in host memory and on disk must be those of the daemon's chunks in memory
and in files, to the block. vLLM sends events from its steps: those of an engine without requests come
with the next request.
Last line: N passed, N failed."""
import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading

import dynamo_index
import vllm_store
import vllm_tier
from rig import HOST, Tally, equal, free_ports, until
from vllm_pd import BLOCK
from vllm_store import T

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import Daemon  # noqa: E402

MODEL = "tiny"
MEMORY_MIB = 32  # of the daemon: 128 chunks
FILL = ("len1900", "kill0", "kill1", "kill2")  # 23 or more chunks each
SMALL = "len31"  # no chunk, but a step


class Relay:
    """Of an engine's events, from its own socket to the indexer's; lose: the next batch."""

    def __init__(self):
        import zmq
        self.folder = tempfile.mkdtemp(prefix="kvd-events-")
        self.source, self.replay = "ipc://%s/events" % self.folder, "tcp://%s:%d" % (
            HOST, free_ports())
        context = zmq.Context.instance()
        self.sub, self.pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self.sub.connect(self.source)
        self.sub.subscribe(b"")
        self.endpoint = "tcp://%s:%d" % (HOST, self.pub.bind_to_random_port("tcp://" + HOST))
        self.lose, self.lost = False, 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            batch = self.sub.recv_multipart()
            if self.lose:
                self.lose, self.lost = False, self.lost + 1
            else:
                self.pub.send_multipart(batch)

    def option(self):
        return ("--kv-events-config", json.dumps({
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.source,
            "replay_endpoint": self.replay}))

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class StoreNode(vllm_store.StoreNode):
    def __init__(self, name, folder=None):
        super().__init__(name)
        self.daemon = Daemon("log_level = info\n[peer]\ndead_after = 5 s\n[chunks]\n"
                             "chunk_memory = %d MiB\n%s" % (MEMORY_MIB, "" if folder is None else (
                                 "chunk_dir = %s\nchunk_dir_size = 128 MiB\n" % folder)), name=name)


class Indexed:
    """What the indexer knows of an engine."""

    def __init__(self, case, worker):
        self.relay, self.indexer, self.worker = Relay(), case.indexer, worker
        case.stack.callback(self.relay.close)
        self.indexer.register(worker, self.relay.endpoint, self.relay.replay, MODEL, BLOCK)

    def counts(self):
        """Blocks in host memory and on disk."""
        found = self.indexer.blocks(self.worker, MODEL)
        return tuple(len(found.get(tier, ())) for tier in ("host_pinned", "disk"))

    def query(self, tokens):
        return self.indexer.query(self.worker, MODEL, tokens)

    def has(self, wanted, what="blocks in host memory and on disk"):
        """wanted: () -> of counts()"""
        until(lambda: self.counts() == wanted(), 20, 0.2)
        equal(self.counts(), wanted(), what)
        return "%d blocks in host memory, %d on disk" % self.counts()


class StoreCase(vllm_store.Case):
    def start(self, name, node, worker):
        indexed = Indexed(self, worker)
        engine = self.engine(name, node, look="vllm_events_look.Look",
                             more=("--max-num-batched-tokens", "256", *indexed.relay.option()))
        return engine, indexed

    def blocks(self, engine):
        """Of the daemon's chunks in memory, and in files."""
        chunks = engine.look("chunks")[0]
        return tuple(T // BLOCK * sum(one[i] for one in chunks) for i in (2, 3))


def lives(case):
    tally, folder = case.tally, tempfile.mkdtemp(prefix="kvd-events-")
    case.stack.callback(shutil.rmtree, folder)
    node = case.stack.enter_context(StoreNode("store", folder))
    node.ready()
    A, a = case.start("A", node, 1)
    tally.check("stored chunks, without another request", put, case, A, a)
    tally.check("what vLLM's reset clears comes again", cleared, case, A, a)
    B, b = case.start("B", node, 2)
    tally.check("another engine's chunks once they are found", found, case, B, b)
    B.stop()
    tally.check("chunks in files are on disk, too", filed, case, A, a)
    tally.check("evicted chunks", evicted, case, A, a)
    tally.check("deleted chunks, with the next request", dropped, case, A, a)
    tally.check("a lost batch is sent again", lost, case, A, a)
    tally.check("the daemon is killed and back: files alone", back, case, A, a, node)
    tally.check("and what is stored since", again, case, A, a)
    tally.check("a reset with the connector leaves nothing", reset, case, A, a)


def put(case, A, a):
    case.right(A, "len777")
    A.settled()
    equal(case.blocks(A), (case.saved("len777") * T // BLOCK, 0), "blocks in the daemon")
    return a.has(lambda: case.blocks(A))


def cleared(case, A, a):
    A.forget()
    case.right(A, SMALL)
    tokens = case.found("len777")
    until(lambda: a.query(case.prompts["len777"]) == (0, tokens, tokens), 20)
    equal(a.query(case.prompts["len777"]), (0, tokens, tokens), "tokens")
    return a.has(lambda: case.blocks(A))


def found(case, B, b):
    equal(b.counts(), (0, 0), "before")
    case.right(B, SMALL)
    equal(b.query(case.prompts["len777"])[1:], (0, 0), "of what it was not asked for")
    case.right(B, "len777")
    B.settled()
    return b.has(lambda: case.blocks(B))


def filed(case, A, a):
    A.forget()
    case.right(A, "len777")
    A.settled()
    until(lambda: case.blocks(A)[1] > 0, 20)
    case.right(A, SMALL)
    assert case.blocks(A)[1] > 0, "no file was written"
    return a.has(lambda: case.blocks(A))


def evicted(case, A, a):
    before = A.node.chunks()["evicted"]
    for name in FILL:
        case.right(A, name)
    for i, name in enumerate(vllm_store.AT_ONCE):
        case.right(A, name)
    A.settled()
    case.right(A, SMALL)
    count = A.node.chunks()["evicted"] - before
    assert count > 0, "nothing was evicted"
    return "%d chunks; %s" % (count, a.has(lambda: case.blocks(A)))


def dropped(case, A, a):
    before = case.blocks(A)
    A.look("drop", 20)
    assert case.blocks(A)[0] < before[0], "nothing was deleted"
    case.right(A, SMALL)
    return a.has(lambda: case.blocks(A))


def lost(case, A, a):
    a.relay.lose = True
    case.right(A, "again")
    A.settled()
    assert until(lambda: a.relay.lost == 1, 20), "no batch"
    case.right(A, "len257")
    A.settled()
    case.right(A, SMALL)
    return a.has(lambda: case.blocks(A))


def back(case, A, a, node):
    before = case.blocks(A)
    assert before[0] and before[1], before
    node.daemon.proc.kill()
    node.daemon.proc.wait()
    case.right(A, SMALL)
    node.daemon.notify.close()
    node.daemon.start().wait_ready()
    node.ready()
    assert until(lambda: (node.chunks()["files"] or {}).get("scanned"), 20), "files are not read"

    def served():
        case.right(A, SMALL)
        return a.counts()[0] == 0
    assert until(served, 60, 1), a.counts()
    assert a.counts()[1] > 0, a.counts()
    return a.has(lambda: case.blocks(A))


def again(case, A, a):
    def served():
        A.forget()
        case.right(A, "len65")
        A.settled()
        return case.blocks(A)[0] > 0
    assert until(served, 60, 1), "the store is not used again"
    case.right(A, SMALL)
    return a.has(lambda: case.blocks(A))


def reset(case, A, a):
    equal(A.call("POST", "/reset_prefix_cache?reset_external=true")[0], 200, "status")
    case.right(A, SMALL)
    assert sum(case.blocks(A)) > 0
    a.has(lambda: (0, 0))


# ---- the tier ------------------------------------------------------------------------------

class TierEngine(vllm_tier.Engine):
    def __init__(self, relay, *args, **kw):
        self.relay = relay
        super().__init__(*args, **kw)

    def connector(self, args, role, side_port):
        option, config, *more = super().connector(args, role, side_port)
        config = json.loads(config)
        config["kv_connector_extra_config"]["self_describing_kv_events"] = True
        return [option, json.dumps(config), *more, *self.relay.option()]


class TierCase(vllm_tier.Case):
    def start(self, name, node, worker):
        indexed = Indexed(self, worker)
        engine = TierEngine(indexed.relay, self, name, node)
        self.stack.callback(engine.stop)
        engine.wait()
        self.tally.add("engine %s is up" % name, True, "%.0f s" % engine.took)
        return engine, indexed


def tier(case):
    node = case.stack.enter_context(StoreNode("store"))
    node.ready()
    A, a = case.start("A", node, 1)
    case.tally.check("stored chunks, without another request", tier_put, case, A, a)
    B, b = case.start("B", node, 2)
    case.tally.check("another engine's chunks once they are loaded", tier_found, case, B, b)
    B.stop()
    case.tally.check("evicted chunks", tier_evicted, case, A, a)


def tier_blocks(case, *names):
    return sum(map(case.chunks, names)) * T // BLOCK


def tier_put(case, A, a):
    case.right(A, "len777")
    A.settled()
    wanted = tier_blocks(case, "len777")
    return a.has(lambda: (wanted, wanted))


def tier_found(case, B, b):
    case.right(B, "len777")
    B.settled()
    wanted = tier_blocks(case, "len777")
    case.right(B, SMALL)
    return b.has(lambda: (wanted, wanted))


def tier_evicted(case, A, a):
    """vLLM's own memory holds 64 chunks, the daemon's 128."""
    for name in (*FILL, *vllm_store.AT_ONCE):
        case.right(A, name)
    A.settled()
    case.right(A, SMALL)
    assert A.node.chunks()["evicted"] > 0, "nothing was evicted"
    until(lambda: a.counts()[1] == A.node.chunks()["chunks"] * T // BLOCK, 20, 0.2)
    equal(a.counts()[1], A.node.chunks()["chunks"] * T // BLOCK, "blocks on disk")
    return "%d blocks in host memory, %d on disk" % a.counts()


CASES = {"lives": (StoreCase, lives), "tier": (TierCase, tier)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-dynamo")
    args = parser.parse_args()
    dynamo_index.inside()
    tally = Tally()
    try:
        kind, what = CASES[args.case]
        case = kind(args, tally) if kind is StoreCase else kind("llama", args, tally)
        with contextlib.ExitStack() as case.stack:
            case.indexer = dynamo_index.Indexer(args.name)
            case.stack.callback(case.indexer.stop)
            what(case)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
