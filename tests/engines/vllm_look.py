# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM (--worker-extension-cls), called by its /collective_rpc: what of
KvdConnector and of the caches cannot be seen from outside, and faults for the checks that
must notice them."""
import hashlib
import os
import time

from kvd.vllm import worker as product
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

CANARY, OFFER_S = 12345.0, product.OFFER_S


def client(*args, **kwargs):
    """A daemon for each rank, where the test has several, as on several hosts."""
    own = os.environ.get("KVD_SOCKET_%d" % get_tensor_model_parallel_rank())
    return product_client(own, *args, **kwargs)


product_client, product.Client = product.Client, client


class Look:
    def kvd_watch(self):
        """From now on."""
        group = get_kv_transfer_group()
        own = getattr(group, "sub_connectors", [group])[0]
        worker, self.kvd_invalid = own._worker, set()
        self.kvd = worker
        self.kvd_seen, self.kvd_blocks, self.kvd_freed = [], {}, []
        self.kvd_held, self.kvd_fault, self.kvd_lost = None, "", []
        begin, bind, results = worker.begin, worker._bind, worker.results

        def begun(step):
            if self.kvd_fault == "untold":
                for name, _ in step.drops:
                    if name in worker.pulls:
                        worker.pulls[name].dropped = True
                step.drops.clear()
            begin(step)
            for name in [o[0] for o in step.offers if o[0] in worker.offers]:
                self.kvd_note("offered", name, worker.offers[name])

        def bound(name, blocks, begin, end):
            pull, size = worker.pulls.get(name), worker.caches.transfer_groups[
                0].kv_cache_spec.block_size
            # those before may be other requests', too
            self.kvd_blocks[name] = list(blocks[0][begin // size:]) if blocks else []
            self.kvd_note("bound", name, pull)
            if self.kvd_held is not None and pull is not None:
                tell = pull.handle.bind
                pull.handle.bind = lambda views: self.kvd_held.append((tell, views))
            bind(name, blocks, begin, end)

        def told():
            pulls, offers = dict(worker.pulls), dict(worker.offers)
            if self.kvd_fault == "impatient":
                for pull in pulls.values():
                    if pull.bound and self.kvd.desk.clock() > pull.until - OFFER_S + 1:
                        pull.handle.stop("it takes too long")
            sent, received, failed = results()
            if self.kvd_fault in ("early", "untold"):
                received |= self.kvd_too_early(worker)
            if self.kvd_fault == "blocks":
                self.kvd_invalid.update(*(self.kvd_blocks[name] for name in failed))
                failed = set()
            for name in received:
                self.kvd_note("failed" if name in failed else "received", name, pulls[name])
                if pulls[name].dropped:
                    self.kvd_free(self.kvd_blocks.get(name, ()))
            for name in sent & set(offers):
                self.kvd_note("sent", name, offers[name])
            return sent, received, failed
        worker.begin, worker._bind, worker.results = begun, bound, told
        own.get_block_ids_with_load_errors = self.kvd_take_invalid

    def kvd_note(self, what, name, pull):
        handle = getattr(pull, "handle", pull)
        self.kvd_seen.append({
            "what": what, "name": name, "s": time.monotonic(), "rank": worker_rank(),
            "room": handle and str(handle.number), "why": handle and handle.reason,
            "end": handle and handle.end})

    def kvd_too_early(self, worker):
        """Requests that were given up, before their rooms have ended."""
        found = {n for n, p in worker.pulls.items()
                 if (p.dropped or p.handle.stopped) and p.bound}
        self.kvd_lost += [worker.pulls.pop(name).handle for name in found]
        return found

    def kvd_take_invalid(self):
        invalid, self.kvd_invalid = self.kvd_invalid, set()
        return invalid

    def kvd_free(self, blocks):
        """These are nobody's when this step is over."""
        for block in set(blocks) - {0}:
            for cache in self.model_runner.kv_caches:
                cache[block] = CANARY
            self.kvd_freed.append(block)

    def kvd_canary(self):
        """Blocks that were written since, of how many; the first call's are forgotten."""
        freed, self.kvd_freed = self.kvd_freed, []
        bad = [b for b in freed for cache in self.model_runner.kv_caches
               if not bool((cache[b] == CANARY).all())]
        return [len(set(bad)), len(freed)]

    def kvd_canary_peek(self):
        kept = list(self.kvd_freed)
        out = self.kvd_canary()
        self.kvd_freed = kept
        return out

    def kvd_blocks_of(self):
        """Of each layer, a sum of each block that is not empty."""
        return [[hashlib.sha256(block.contiguous().numpy().tobytes()).hexdigest()[:16]
                 for block in cache if bool(block.any())]
                for cache in self.model_runner.kv_caches]

    def kvd_hold(self):
        """Requests get their blocks, and the daemon is not told of them."""
        self.kvd_held = [] if self.kvd_held is None else self.kvd_held
        return [len(self.kvd_held)]

    def kvd_let_go(self):
        held, self.kvd_held = self.kvd_held or [], None
        for tell, views in held:
            tell(views)
        return [len(held)]

    def kvd_break(self, fault):
        self.kvd_fault, lost, self.kvd_lost = fault, self.kvd_lost, []
        for handle in lost:
            handle.stop("its request is gone")
        return [fault]

    def kvd_events(self):
        seen, self.kvd_seen = self.kvd_seen, []
        return seen

    def kvd_left(self):
        desk = self.kvd.desk
        return {"offers": len(self.kvd.offers), "pulls": len(self.kvd.pulls),
                "live": len(desk.live), "parked": len(desk.parked), "left": len(desk.left)}

    def kvd_states(self):
        """Of its pulls, as the daemon shows them."""
        return [[name, p.handle.peek()] for name, p in self.kvd.pulls.items()]


def worker_rank():
    return get_tensor_model_parallel_rank()
