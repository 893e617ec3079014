#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dynamo's indexer of KV events (python -m dynamo.indexer), and what it makes of events.

dynamo_index.py [--nixl native] [--name NAME]

Events of each kind that kvd publishes, or decided not to, are sent as vLLM sends them, and a prompt is
queried: the tokens that the indexer finds in GPU memory, up to host memory, and up to disk. A newer
indexer that judges otherwise fails here.
Last line: N passed, N failed."""
import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
import time

from rig import HOST, Server, Tally, equal, free_ports, logs, python, until

BLOCK = 4
PROMPT = list(range(40))
MARKS = itertools.count(1000)  # tokens of prompts that are sent to know that earlier ones were read


def inside():
    """In the indexer's interpreter, which has what writes and reads events."""
    if "KVD_INSIDE" not in os.environ:
        os.execve(python("dynamo"), [python("dynamo"), *sys.argv],
                  dict(os.environ, KVD_INSIDE="1"))


class Indexer(Server):
    def __init__(self, name):
        port = free_ports()
        super().__init__("indexer", [python("dynamo"), "-m", "dynamo.indexer", "--port", str(port)],
                         dict(os.environ, DYN_LOG="info"),
                         os.path.join(logs(name), "indexer.log"), port, "/health")
        self.wait()

    def asked(self, path, body=None):
        status, said = self.call("GET" if body is None else "POST", path, body)
        if status not in (200, 201):
            raise RuntimeError("%s: %d %s" % (path, status, said[:200]))
        return json.loads(said)

    def register(self, worker, endpoint, replay, model, block):
        self.asked("/register", {"instance_id": worker, "endpoint": endpoint, "model_name": model,
                                 "block_size": block, **(
                                     {"replay_endpoint": replay} if replay else {})})

    def query(self, worker, model, tokens, **words):
        """(tokens found in GPU memory, up to host memory, up to disk)"""
        found = self.asked("/query", {"model_name": model, "token_ids": tokens, **words})
        found = found["instances"].get(str(worker), {})
        tiers = [found.get(tier, 0) for tier in ("gpu", "cpu", "disk")]
        equal(found.get("longest_matched", 0), max(tiers), "longest match")
        return tuple(tiers)

    def blocks(self, worker, model):
        """{"device", "host_pinned", "disk": hashes of blocks}"""
        told, found = self.asked("/dump")[model + ":default"]["events"], {}
        for event in (e for e in told if e["worker_id"] == worker):
            found.setdefault(event["storage_tier"], set()).update(
                one["block_hash"] for one in event["event"]["data"]["stored"]["blocks"])
        return found


class Publisher:
    """As vLLM's, without an engine."""

    def __init__(self):
        import msgspec
        import zmq
        self.pack, context = msgspec.msgpack.encode, zmq.Context.instance()
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.endpoint, self.replay = ("tcp://%s:%d" % (HOST, one.bind_to_random_port(
            "tcp://" + HOST)) for one in (self.pub, self.router))
        self.sent, self.replays = [], 0
        threading.Thread(target=self._replay, daemon=True).start()

    def _replay(self):
        while True:
            name, _, first = self.router.recv_multipart()
            self.replays += 1
            for seq, payload in self.sent[int.from_bytes(first, "big"):]:
                self.router.send_multipart((name, b"", b"kv@pod@model", seq, payload))
            self.router.send_multipart((name, b"", b"", b"\xff" * 8, b""))

    def send(self, events, lose=False):
        seq = len(self.sent).to_bytes(8, "big")
        self.sent.append((seq, self.pack([time.time(), events, 0])))
        if not lose:
            self.pub.send_multipart((b"kv@pod@model", *self.sent[-1]))


# ---- events --------------------------------------------------------------------------------

def stored(first, count, medium="CPU", **more):
    """Of blocks of the prompt; their hashes are 100, 101 …"""
    return dict({"type": "BlockStored", "block_hashes": list(range(100 + first, 100 + first + count)),
                 "parent_block_hash": 99 + first if first else None, "medium": medium,
                 "token_ids": PROMPT[first * BLOCK:(first + count) * BLOCK], "block_size": BLOCK,
                 "lora_id": None, "lora_name": None}, **more)


def removed(first, count, medium="CPU", **more):
    return dict({"type": "BlockRemoved", "medium": medium,
                 "block_hashes": list(range(100 + first, 100 + first + count))}, **more)


CLEARED = {"type": "AllBlocksCleared"}
KIND = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL"}
ALL_TIERS = [stored(0, 2, "GPU"), stored(0, 4, "CPU"), stored(0, 6, "STORAGE")]
# (what, batches, (tokens in GPU memory, up to host memory, up to disk))
TABLE = [
    ("GPU is GPU memory", [[stored(0, 2, "GPU")]], (8, 8, 8)),
    ("CPU is host memory", [[stored(0, 2, "CPU")]], (0, 8, 8)),
    ("CPU_PINNED is host memory", [[stored(0, 2, "CPU_PINNED")]], (0, 8, 8)),
    ("STORAGE is disk", [[stored(0, 2, "STORAGE")]], (0, 0, 8)),
    ("DISK is disk", [[stored(0, 2, "DISK")]], (0, 0, 8)),
    ("EXTERNAL is disk", [[stored(0, 2, "EXTERNAL")]], (0, 0, 8)),
    ("REMOTE is disk", [[stored(0, 2, "REMOTE")]], (0, 0, 8)),
    ("another medium is dropped", [[stored(0, 2, "kvd")]], (0, 0, 0)),
    ("a match goes on in the next tier", [ALL_TIERS], (8, 16, 24)),
    ("kvd's form", [[stored(0, 2, **KIND)]], (0, 8, 8)),
    ("kvd's form of a removal", [[stored(0, 4, **KIND)], [removed(2, 2, group_idx=0,
                                                              locality="LOCAL")]], (0, 8, 8)),
    ("locality REMOTE is dropped", [[stored(0, 2, locality="REMOTE")]], (0, 0, 0)),
    ("ownership is dropped", [[stored(0, 2, ownership="kvd")]], (0, 0, 0)),
    ("blocks of another size are dropped", [[stored(0, 1, token_ids=PROMPT[:8], block_size=8)]],
     (0, 0, 0)),
    ("blocks without tokens are dropped", [[stored(0, 2, token_ids=[])]], (0, 0, 0)),
    ("hashes as bytes drop the batch", [[stored(0, 1, block_hashes=[b"x" * 32]), stored(0, 2)]],
     (0, 0, 0)),
    ("hashes of 64 bits", [[stored(0, 2, block_hashes=[2 ** 64 - 1, 2 ** 63])]], (0, 8, 8)),
    ("arrays, as before maps", [[["BlockStored", [100, 101], None, PROMPT[:8], BLOCK, None, "CPU",
                                  None]]], (0, 8, 8)),
    ("a child before its parent", [[stored(2, 2)], [stored(0, 2)]], (0, 16, 16)),
    ("a child without its parent", [[stored(2, 2)]], (0, 0, 0)),
    ("a child whose parent is in GPU memory alone", [[stored(0, 2, "GPU"), stored(2, 2)]],
     (8, 16, 16)),
    ("stored twice, removed once", [[stored(0, 2)], [stored(0, 2)], [removed(0, 2)]], (0, 0, 0)),
    ("removed in the middle", [[stored(0, 6)], [removed(2, 2)]], (0, 8, 8)),
    ("and stored again", [[stored(0, 6)], [removed(2, 2)], [stored(2, 2)]], (0, 24, 24)),
    ("removed of one tier", [ALL_TIERS, [removed(0, 4, "CPU")]], (8, 8, 24)),
    ("removed and unknown", [[removed(0, 2)], [stored(0, 2)]], (0, 8, 8)),
    ("AllBlocksCleared clears all tiers", [ALL_TIERS, [CLEARED]], (0, 0, 0)),
    ("what is stored again behind it is there", [ALL_TIERS, [CLEARED, stored(0, 4)]], (0, 16, 16)),
    ("salts do not count", [[stored(0, 2, extra_keys=[["salt"], None])]], (0, 8, 8)),
    ("an adapter's blocks are not the model's", [[stored(0, 2, lora_name="sql", lora_id=1)]],
     (0, 0, 0)),
]


class Run:
    def __init__(self, indexer):
        self.indexer, self.workers = indexer, itertools.count(1)

    def publisher(self, replay=True):
        """(number of a worker, its publisher), whose events are read."""
        worker, made = next(self.workers), Publisher()
        self.indexer.register(worker, made.endpoint, made.replay if replay else None,
                              "m%d" % worker, BLOCK)
        self.read(worker, made, True)
        return worker, made

    def read(self, worker, publisher, repeats=False):
        """Until the indexer has read all that was sent. repeats: it may not have subscribed yet."""
        token = next(MARKS)
        mark = stored(0, 1, "GPU", block_hashes=[token], token_ids=[token] * BLOCK)
        publisher.send([mark])

        def there():
            if self.query(worker, [token] * BLOCK)[0]:
                return True
            if repeats:
                publisher.send([mark])
            return False
        assert until(there, 20, 0.05), "events are not read"

    def query(self, worker, tokens=PROMPT, **words):
        return self.indexer.query(worker, "m%d" % worker, tokens, **words)

    def row(self, batches, wanted):
        worker, publisher = self.publisher()
        for batch in batches:
            publisher.send(batch)
        self.read(worker, publisher)
        equal(self.query(worker), wanted, "tokens")

    def adapter(self):
        worker, publisher = self.publisher()
        publisher.send([stored(0, 2, lora_name="sql", lora_id=1)])
        self.read(worker, publisher)
        equal(self.query(worker, lora_name="sql"), (0, 8, 8), "tokens")

    def lost(self, replay, wanted):
        worker, publisher = self.publisher(replay)
        before = publisher.replays
        publisher.send([stored(0, 2)])
        publisher.send([stored(2, 2)], lose=True)
        publisher.send([stored(4, 2)])
        self.read(worker, publisher)
        equal((self.query(worker), publisher.replays - before), wanted, "tokens, replays")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="dynamo")
    args = parser.parse_args()
    inside()
    tally = Tally()
    with contextlib.ExitStack() as stack:
        indexer = Indexer(args.name)
        stack.callback(indexer.stop)
        run = Run(indexer)
        for what, batches, wanted in TABLE:
            tally.check(what, run.row, batches, wanted)
        tally.check("an adapter's blocks are found by its name", run.adapter)
        tally.check("a lost batch is replayed", run.lost, True, ((0, 24, 24), 1))
        tally.check("without a replay it is lost", run.lost, False, ((0, 8, 8), 0))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
