# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM (--worker-extension-cls), called by its /collective_rpc: ends or stops
a daemon between two layers of a step, tells what routing keeps, and breaks one of its rules, so
that a run can show that it would notice."""
import functools
import gc
import hashlib
import inspect
import os
import signal
import struct
import time
import types

import torch
from kvd.attend import Part
from kvd.chunks import ANYWHERE, ID_BYTES, Space
from kvd.rooms import SUCCESS
from kvd.vllm import choice, route, route_scheduler, route_worker, store, store_plan, store_worker
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_store_look import Look as StoreLook


REGISTER, IDS = store.Worker.register, store_plan.Plan._ids
TAKE, OWN_BLOCKS = store_plan.Plan.take, route.own_blocks
ids_seen, scheduled = [], {}
ROUND_S = 30.0


def remembered(worker, kv_caches):
    worker.kvd_caches = kv_caches
    REGISTER(worker, kv_caches)


def seen(plan, known, count):
    ids_seen[:] = IDS(plan, known, count)
    return list(ids_seen)


store.Worker.register, store_plan.Plan._ids = remembered, seen


def ids_of_pages(plan, known, count):
    """SGLang's: hashes of a page's tokens and of the page before."""
    ids, tokens = [], known.request.all_token_ids
    for at in range(0, count * plan.tokens, plan.tokens):
        page = struct.pack("<%dI" % plan.tokens, *tokens[at:at + plan.tokens])
        ids.append(hashlib.sha256((ids[-1] if ids else b"") + page).digest())
    return ids


@functools.lru_cache(None)
def the(cls):
    """The engine's one object of a class."""
    gc.unfreeze()  # vLLM's engine hides what it has made at its start
    gc.collect()
    (one,) = (one for one in gc.get_objects() if isinstance(one, cls))
    gc.freeze()
    return one


class Look(StoreLook):
    def kvd_tap(self, number, pid, sends):
        """Before the given request for attention from now on, the daemon gets this signal."""
        left, send = [sends], route_worker.Router.send

        def tapped(own, *args):
            left[0] -= 1
            if not left[0]:
                os.kill(pid, signal.Signals(number))
                route_worker.Router.send = send
            return send(own, *args)
        route_worker.Router.send = tapped

    def kvd_scatter(self, sockets, run):
        """From now on chunks are put into several daemons: so many of a prompt in turn to each."""
        own = self.kvd_worker
        if not hasattr(self, "kvd_others"):
            self.kvd_others, self.kvd_saved = {}, own.rank.saved
        given = own.config.kv_transfer_config.kv_connector_extra_config
        for socket in sockets:
            if socket not in self.kvd_others:
                own.config.kv_transfer_config.kv_connector_extra_config = dict(
                    given, kvd_socket=socket)
                other = self.kvd_others[socket] = store.Worker(own.config, own.caches)
                other.register(own.kvd_caches)
        own.config.kv_transfer_config.kv_connector_extra_config = given
        ranks = [self.kvd_others[socket].rank for socket in sockets]

        def saved(step):
            for name, first, ids, blocks, words in step.saves:
                count = len(ids) // ID_BYTES
                each = len(blocks) // count
                for i in range(count):
                    ranks[(first + i) // run % len(ranks)].saved(store_plan.Step(
                        words=words, saves=[(name, first + i,
                                             ids[ID_BYTES * i:ID_BYTES * (i + 1)],
                                             blocks[each * i:each * (i + 1)], words)]))
            while any(rank.puts for rank in ranks):
                for rank in ranks:
                    rank.results()
            step.saves = []
            self.kvd_saved(step)
        own.rank.saved = saved

    def kvd_kept(self):
        """(routed requests, documents, holds of the worker)"""
        routes = the(route.Routes)
        return len(routes.ways) + len(routes.away) + len(routes.rents), len(routes.documents), \
            len(self.kvd_worker.router.holds)

    def kvd_free(self):
        """Blocks of vLLM's pool."""
        return the(route.Routes).free()

    def kvd_shrink(self, left):
        """Until widen(), only so many are free."""
        pool = the(route.Routes).pool
        self.kvd_taken = pool.pool.get_new_blocks(pool.free() - left)

    def kvd_widen(self):
        the(route.Routes).pool.give(self.kvd_taken)

    def kvd_crowd(self):
        """The most requests that ran at the same time since the last call."""
        scheduler = the(route_scheduler.RouteScheduler)
        most, self.kvd_most = getattr(self, "kvd_most", None), 0
        if most is None:
            update = scheduler.update_from_output

            def updated(*args):
                self.kvd_most = max(self.kvd_most, len(scheduler.running))
                return update(*args)
            scheduler.update_from_output = updated
        return most or 0

    def kvd_posts(self, rows, chunks, rounds, apart):
        """[us of a hold of so many chunks of the last prompt, us of each of so many requests for
        attention to them, one after another and each of the next layer, with so many rows].
        apart: seconds of an engine's work before each."""
        router, plan = self.kvd_worker.router, the(store_plan.Plan)
        begin = time.perf_counter()
        held = plan._hold(ids_seen[:chunks], 0)
        times = [time.perf_counter() - begin]
        if held.chunks != chunks:
            raise RuntimeError("%d chunks of %d" % (held.chunks, chunks))
        joined = router.spaces.ask(router.words, lambda space: space.join(held.secret))
        packed = router.attend.pack([Part(joined, rows=(0, rows))])
        layers = sorted(router.layers.values())
        values = torch.ones(256, 256)
        for i in range(rounds):
            begin = time.perf_counter()
            while time.perf_counter() < begin + apart:
                values = torch.tanh(values @ values)
            begin = time.perf_counter()
            router.attend.post(0, layers[i % len(layers)], packed, deadline=ROUND_S)
            router.attend.wait(0, ROUND_S)
            times.append(time.perf_counter() - begin)
        joined.close()
        held.close()
        return [1e6 * one for one in times]

    def kvd_prices(self, chunks, question):
        """Of so many chunks of the last prompt: {us of fetching them; by how much routing costs
        more than attention here, in the step of the question and in one of a token; whether the
        two are surely different in half and in twice as many steps as make them equal}"""
        plan = the(store_plan.Plan)
        held = plan._hold(ids_seen[:chunks], 0)
        page, holders = plan._page(), plan._holders(held)
        held.close()

        def price(tokens, steps=1):
            return plan.prices.decide(page, holders, tokens, steps=steps)
        one, many = price(1), price(question)
        first, later = (of.route.us - (of.fetch.us - of.once.us) for of in (many, one))
        even = max(1.0, one.once.us / later) if later > 0 else 1.0
        return {"fetch_us": one.once.us, "first_us": first, "later_us": later, "sure": all(
            price(1, steps=max(1, round(even * part))).sure for part in (0.5, 2))}

    def kvd_poison(self):
        """No value of its cache is a number."""
        for tensor in self.kvd_worker.kvd_caches.values():
            tensor.fill_(float("nan"))

    def kvd_names(self):
        """Of its space."""
        return list(the(store_plan.Plan).named)

    def kvd_rename(self, names):
        plan = the(store_plan.Plan)
        plan.named = store_plan.Words(*names)
        plan.words = plan.named._replace(tokens=plan.words.tokens)

    def kvd_sglang(self, names):
        """From now on it has the ids and names of SGLang's store, whose pages have no position."""
        self.kvd_rename(names)
        store_plan.Plan._ids, hold = ids_of_pages, Space.hold
        Space.hold = lambda space, ids, first=0, **kw: hold(space, ids, ANYWHERE, **kw)

    def kvd_swap(self, count):
        """Until mend(), so many chunks of each prompt are those of the last prompt."""
        others = ids_seen[:count]
        self.kvd_replace(store_plan.Plan, "_ids", lambda plan, known, most: others[:most] + IDS(
            plan, known, most)[count:])

    def kvd_break(self, rule):
        """Until mend()."""
        for one in RULES[rule]:
            self.kvd_replace(*one)

    def kvd_replace(self, cls, name, broken):
        if not hasattr(self, "kvd_whole"):
            self.kvd_whole = []
        self.kvd_whole.append((cls, name, inspect.getattr_static(cls, name)))
        setattr(cls, name, broken)

    def kvd_mend(self):
        for cls, name, whole in reversed(self.kvd_whole):
            setattr(cls, name, whole)
        self.kvd_whole = []


def unnoticed(router):
    router.lost = set()
    return set()


def nothing(rank, words, secret, blocks, begin, end):
    """A load of which no byte moves, and which is whole all the same."""
    done = types.SimpleNamespace(state=SUCCESS, bytes=0)
    done.read = lambda: done
    return store_worker.Load(done, None, blocks)


def nulls_kept(table, block, routes):
    return table, 0, OWN_BLOCKS(table, block, routes)[2]


def taken(plan, output):
    scheduled.update(output.num_scheduled_tokens)
    try:
        return TAKE(plan, output)
    finally:
        scheduled.clear()


def over_at_once(plan, known):
    """A step's tokens, whether it will have a result or not."""
    request = known.request
    return min(request.num_computed_tokens + scheduled.get(request.request_id, 0),
               request.num_tokens)


RULES = {
    # all is routed first, and each document is fetched after its first steps
    "rents": [(choice.Ways, "choose", lambda *args, **kw: choice.ROUTE),
              (choice.Ways, "turned", lambda *args: True)],
    "routes": [(choice.Ways, "choose", lambda *args, **kw: choice.ROUTE),
               (choice.Ways, "turned", lambda *args: False)],
    "fetches": [(choice.Ways, "choose", lambda *args, **kw: choice.FETCH),
                (choice.Ways, "computes", lambda *args: False)],
    "computes": [(choice.Ways, "choose", lambda *args, **kw: choice.LOCAL)],
    # blocks count as loaded to which nothing was
    "loads": [(store_worker.Rank, "_load", nothing)],
    # zeros count as an answer
    "lost": [(route_worker.Router, "end", unnoticed)],
    # blocks that a lost step has written are found by the next request
    "evict": [(KVCacheManager, "evict_blocks", lambda own, blocks: None)],
    # chunks of a step are stored before its result is there, and even if it has none
    "saves": [(store_plan.Plan, "take", taken), (store_plan.Plan, "_over", over_at_once),
              (store_worker.Rank, "stop", lambda rank, moves: None)],
    # own attention covers tokens that are elsewhere
    "nulls": [(route_worker, "own_blocks", nulls_kept)],
    # the rest of the batch is not looked at
    "spoiled": [(route_scheduler, "spoiled", lambda lost, rows: (list(lost), set().union(
        *(rows[name][1] for name in lost if name in rows))))],
}
