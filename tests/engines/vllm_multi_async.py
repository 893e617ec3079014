#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, asynchronous and plain, with a MultiConnector of KvdConnector and
KvdStoreConnector in both orders, without a model. Workers and memory are given here: a block has
the tokens of a prompt once a step has computed them, or a load has landed. Requests are given up,
and loads fail, in each state. No block may be saved, or computed upon, that does not have its
tokens; none may be freed twice, or kept.

vllm_multi_async.py [--nixl native] [--name NAME]
Last line: N passed, N failed."""
import argparse
import contextlib
import random
import sys

import vllm_async
from rig import Tally, equal
from vllm_async import BLOCK, inside
from vllm_store_async import PROMPT, T, Chunks

BLOCKS, ROUNDS = 40, 400
ORDERS = {"kvd first": ("KvdConnector", "KvdStoreConnector"),
          "store first": ("KvdStoreConnector", "KvdConnector")}


class KvdSide:
    """KvdConnector's worker."""

    def __init__(self, world):
        self.world, self.pulls, self.sent = world, {}, set()

    def bind_connector_metadata(self, meta):
        for name, blocks, begin, end in meta.binds:
            if blocks:
                self.pulls[name] = "received"
                self.world.loads(name, blocks[0], begin, end)
        for name, waits in meta.drops:
            if waits:
                self.sent.add(name)
            self.world.land.add(name)
        self.sent.update(one[0] for one in [*meta.offers, *meta.ends])
        self.sent.update(name for name, _, waits in meta.given_up if waits)

    def get_transfer_results(self, finished):
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
        received = {n for n in self.pulls if n in self.world.land | self.world.fail}
        for name in received:
            del self.pulls[name]
            self.world.landed(name, name not in self.world.fail)
        sent, self.sent = self.sent, set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received,
                                          failed_recving=received & self.world.fail)

    def get_block_ids_with_load_errors(self):
        return set()


class StoreSide:
    """KvdStoreConnector's."""

    def __init__(self, world):
        self.world, self.moves, self.bad, self.ending = world, {}, set(), set()

    def bind_connector_metadata(self, meta):
        for name, _, blocks, begin, end in meta.loads:
            self.moves[name] = blocks
            self.world.loads(name, blocks, begin, end, 0)
        self.world.land.update(meta.drops)
        self.world.saves += meta.saves
        self.ending.update(meta.ends)

    def get_transfer_results(self, finished):
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
        received = {n for n in self.moves if n in self.world.land | self.world.fail}
        for name in received:
            blocks = self.moves.pop(name)
            self.world.landed(name, name not in self.world.fail)
            if name in self.world.fail:
                self.bad.update(blocks)
        sent, self.ending = self.ending, set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received,
                                          failed_recving=set())

    def get_block_ids_with_load_errors(self):
        bad, self.bad = self.bad, set()
        return bad


class World(Chunks, vllm_async.Engine):
    """An engine with its workers and memory."""
    caching, hashing = True, "sha256_cbor"

    def __init__(self, order, policy, asynchronous, role="kv_consumer"):
        self.order, self.asynchronous = order, asynchronous
        vllm_async.BLOCKS = BLOCKS
        super().__init__(role, policy)
        self.count, self.land, self.fail, self.saves = 0, set(), set(), []
        self.under_way, self.valid, self.flying, self.firsts = {}, {}, [], {}
        self.loaded = self.saved = 0
        self.worker = self._worker()
        self.steps(2)

    def transfer(self, role, policy):
        from vllm.config import KVTransferConfig
        return KVTransferConfig(
            kv_connector="MultiConnector", kv_role=role, kv_load_failure_policy=policy,
            kv_connector_extra_config={"connectors": [
                {"kv_connector": name, "kv_connector_module_path": "kvd.vllm",
                 "kv_role": role if name == "KvdConnector" else "kv_both",
                 "kv_connector_extra_config": {} if name == "KvdConnector" else
                 {"chunk_tokens": T}} for name in self.order]})

    def _child(self, name):
        return self.scheduler.connector._connectors[self.order.index(name)]

    def _worker(self):
        """vLLM's own, which counts reports."""
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
        made = MultiConnector.__new__(MultiConnector)
        made._connectors = [KvdSide(self) if name == "KvdConnector" else StoreSide(self)
                            for name in self.order]
        made._extra_async_saves = {}
        return made

    def told(self):
        from kvd.vllm.connector import Handshake
        self.serve(self._child("KvdStoreConnector")._plan)
        self.plan.told(self.rows.rows)
        kvd_side = self._child("KvdConnector")._scheduler
        kvd_side.told_by_workers({(0, 0): Handshake(vllm_async.ROW)})
        kvd_side.server = self  # a bootstrap server

    # ---- memory ----

    def loads(self, name, blocks, begin, end, first=None):
        """first: block of the request that is the first of these; None: they are all of it."""
        at = begin // BLOCK
        some = blocks[at:-(-end // BLOCK)] if first is None else blocks
        self.under_way[name] = [(block, at + i) for i, block in enumerate(some)]
        self.valid.update((block, None) for block in some)

    def landed(self, name, whole):
        self.loaded += whole
        for block, i in self.under_way.pop(name):
            self.valid[block] = (self.firsts[name], i) if whole else None

    def compute(self, name, table, begin, end):
        for i in range(-(-begin // BLOCK)):
            equal(self.valid.get(table[i]), (self.firsts[name], i),
                  "%s computes [%d, %d) upon block %d, which has" % (name, begin, end, i))
        for i in range(begin // BLOCK, -(-end // BLOCK)):
            self.valid[table[i]] = self.firsts[name], i

    # ---- steps ----

    def schedule(self):
        step = self.step()
        ran = {}
        for name, count in step.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            table = list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])
            ran[name] = table, request.num_computed_tokens - count, request.num_computed_tokens
        self.flying.append((step, ran))

    def answer(self):
        """What the oldest step gives."""
        step, ran = self.flying.pop(0)
        self.saves = []
        meta = step.kv_connector_metadata
        self.worker._extra_async_saves.update(meta.extra_async_saves or {})
        for child, part in zip(self.worker._connectors, meta.metadata):
            child.bind_connector_metadata(part)
        for name, (table, begin, end) in ran.items():
            self.compute(name, table, begin, end)
        for name, first, _, blocks, _ in self.saves:
            at = first * T // BLOCK
            equal([self.valid.get(block) for block in blocks],
                  [(self.firsts[name], at + i) for i in range(len(blocks))],
                  "%s saves blocks that have" % name)
            self.saved += 1
        done = self.worker.get_transfer_results(set())
        self.result(step, **{name: value for name, value in (
            ("finished_sending", done.finished_sending),
            ("finished_recving", done.finished_recving),
            ("failed_recving", done.failed_recving),
            ("invalid_block_ids", self.worker.get_block_ids_with_load_errors()))})

    def steps(self, count=1):
        """As many in flight as the scheduler allows."""
        for _ in range(count):
            self.schedule()
            if len(self.flying) > self.asynchronous:
                self.answer()

    def request(self, push=False, n=1, tokens=PROMPT, first=10):
        """first: token of its prompt."""
        self.count += 1
        name = "r%d" % self.count
        params = {"do_remote_decode": True, "bootstrap_room": self.count} if push else {
            "do_remote_prefill": True, "kvd": dict(vllm_async.KVD, room=str(self.count),
                                                   tokens=tokens)}
        self.firsts[name] = first
        self.add(name, params, n, tokens, self.hasher, first)
        return name

    def drained(self):
        """Everything ends, and nothing is left."""
        for _ in range(200):
            self.land.update(self.under_way)
            self.steps()
            if not self.scheduler.has_requests():
                break
        while self.flying:
            self.answer()
        equal(dict(self.scheduler.requests), {}, "requests")
        assert self.scheduler.reset_prefix_cache(), "blocks are kept"
        pool = self.scheduler.kv_cache_manager.block_pool
        equal(pool.get_num_free_blocks(), self.free, "free blocks")
        equal(self.worker._extra_async_saves, {}, "reports that are missing")
        self.land.clear()
        self.fail.clear()
        self.valid.clear()


# ---- checks ------------------------------------------------------------------------------

def ended(world, name, when):
    """It is given up, or its load fails, when it has come so far."""
    if when == "queued":
        return world.abort(name)
    world.steps(1 if when == "loading" else 3)
    if when == "fails":
        world.fail.add(name)
        return world.steps(3)
    if when in ("loading", "loading for some steps"):
        return world.abort(name)
    world.land.add(name)
    while name in world.under_way:
        world.schedule()
        world.answer()
    if when == "running":
        world.steps(2)
    world.abort(name)


WHEN = ("queued", "loading", "loading for some steps", "loaded", "running", "fails")


def each(world, push):
    for there in (0, 2, 3):
        for n in (1, 40):
            for when in WHEN:
                world.there = there
                name = world.request(push, n, first=10 + world.count)
                try:
                    ended(world, name, when)
                    world.drained()
                except Exception as error:
                    raise AssertionError("%d chunks in the store, %d tokens, %s: %s: %s" % (
                        there, n, when, type(error).__name__, error)) from error


def chance(world, push, seed):
    """Several requests at once in a small cache, which preempts."""
    rng, living, preempted = random.Random(seed), [], set()
    for at in range(ROUNDS):
        living = [name for name in living if name in world.scheduler.requests]
        world.there = rng.randrange(5)
        what = rng.randrange(8)
        if what < 3 and len(living) < 6:
            living.append(world.request(push, rng.choice((1, 5, 60)),
                                        rng.choice((70, 200, 333)), rng.randrange(10, 18)))
        elif what == 3 and living:
            world.abort(rng.choice(living))
        elif what == 4 and world.under_way:
            rng.choice((world.land, world.land, world.fail)).add(
                rng.choice(sorted(world.under_way)))
        elif what == 5:
            with contextlib.suppress(RuntimeError):  # blocks of puts or loads are not free
                world.scheduler.reset_prefix_cache(rng.random() < 0.5, rng.random() < 0.5)
        else:
            world.land.update(world.under_way)
        world.steps()
        preempted.update(name for name in living if name in world.scheduler.requests and
                         world.scheduler.requests[name].num_preemptions)
    world.drained()
    assert preempted and world.loaded and world.saved
    return "%d requests, %d preempted, %d loads, %d saves" % (
        world.count, len(preempted), world.loaded, world.saved)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-multi-async")
    args = parser.parse_args()
    inside()
    tally = Tally()
    for role, push in (("kv_consumer", False), ("kv_producer", True)):
        for named, order in ORDERS.items():
            for policy in ("fail", "recompute"):
                for asynchronous in (True, False):
                    words = "%s, %s, %s, %s" % (role, named, policy, "two steps in flight"
                                                if asynchronous else "one step")

                    def of(check, *more):
                        return check(World(order, policy, asynchronous, role), push, *more)
                    tally.check("each state: " + words, of, each)
                    tally.check("by chance: " + words, of, chance, 7)
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
