# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM (--worker-extension-cls), called by its /collective_rpc: ends or stops
a daemon between two layers of a step, tells what routing keeps, and breaks one of its rules, so
that a run can show that it would notice."""
import gc
import os
import signal

from kvd.vllm import choice, route, route_scheduler, route_worker, store_worker
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_store_look import Look as StoreLook


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

    def kvd_kept(self):
        """(routed requests, documents, holds of the worker)"""
        gc.unfreeze()  # vLLM's engine hides what it has made at its start
        gc.collect()
        (routes,) = (one for one in gc.get_objects() if isinstance(one, route.Routes))
        return len(routes.ways) + len(routes.away) + len(routes.rents), len(routes.documents), \
            len(self.kvd_worker.router.holds)

    def kvd_break(self, rule):
        """Until mend()."""
        if not hasattr(self, "kvd_whole"):
            self.kvd_whole = []
        for cls, name, broken in RULES[rule]:
            self.kvd_whole.append((cls, name, getattr(cls, name)))
            setattr(cls, name, broken)

    def kvd_mend(self):
        for cls, name, whole in reversed(self.kvd_whole):
            setattr(cls, name, whole)
        self.kvd_whole = []


def unnoticed(router):
    router.lost = set()
    return set()


def nothing(rank, words, pieces, blocks, begin, end):
    """A load of which no byte moves, and which is whole all the same."""
    load = store_worker.Load(blocks)
    load.end = lambda: (True, 0)
    return load


RULES = {
    # all is routed first, and each document is fetched after its first steps
    "rents": [(choice.Prices, "choose", lambda *args, **kw: choice.ROUTE),
              (choice.Prices, "turned", lambda *args: True)],
    "fetches": [(choice.Prices, "choose", lambda *args, **kw: choice.FETCH)],
    "computes": [(choice.Prices, "choose", lambda *args, **kw: choice.LOCAL)],
    # blocks count as loaded to which nothing was
    "loads": [(store_worker.Rank, "_load", nothing)],
    # zeros count as an answer
    "lost": [(route_worker.Router, "end", unnoticed)],
    # blocks that a lost step has written are found by the next request
    "evict": [(KVCacheManager, "evict_blocks", lambda own, blocks: None)],
    # the rest of the batch is not looked at
    "spoiled": [(route_scheduler, "spoiled", lambda lost, rows: (list(lost), set().union(
        *(rows[name][1] for name in lost if name in rows))))],
}
