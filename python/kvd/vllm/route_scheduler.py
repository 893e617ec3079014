# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and block manager for routed requests (route.py).

A step without a valid result, because a holder was lost, is treated as one of a preempted request:
the hashes of the blocks that it has written are evicted first, because another request would find
them, then vLLM drops its output and asks for the request again.

A document that routing has become dearer for than a fetch is fetched to blocks of vLLM's pool. Once
they are in its prefix cache, the requests of the document are preempted, and find them there."""
import time

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from .route import spoiled, written


class Away(FullAttentionManager):
    """Tokens that are at other daemons have null blocks, as tokens outside of a sliding window
    have. away: {request: number of these tokens}."""

    def get_num_blocks_to_allocate(self, request_id, num_tokens, new_computed_blocks,
                                   total_computed_tokens, num_local_computed_tokens,
                                   num_tokens_main_model, apply_admission_cap=False,
                                   prefill_end=0):
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens,
            num_local_computed_tokens, num_tokens_main_model, apply_admission_cap, prefill_end)
        if request_id in self.num_cached_block:  # it runs: its null blocks are in its table
            return count
        return count - self.away.get(request_id, 0) // self.block_size

    def allocate_external_computed_blocks(self, request_id, num_local_computed_tokens,
                                          num_external_computed_tokens, record_for_zeroing=True):
        away = self.away.get(request_id)
        if away is None:
            return super().allocate_external_computed_blocks(
                request_id, num_local_computed_tokens, num_external_computed_tokens,
                record_for_zeroing)
        if away != num_external_computed_tokens or away % self.block_size or \
                num_local_computed_tokens % self.block_size:
            raise RuntimeError("kvd.vllm: request %s: %d tokens after %d are at other daemons, and "
                               "vLLM takes %d of them" % (request_id, away,
                                                          num_local_computed_tokens,
                                                          num_external_computed_tokens))
        self.req_to_blocks[request_id].extend([self._null_block] * (away // self.block_size))
        return None


class Blocks:
    """The blocks of vLLM's pool, for documents that are fetched while requests are routed to them.
    caches: whether vLLM keeps a prefix cache, where requests can find them."""

    def __init__(self, pool, size, caches):
        self.pool, self.size, self.caches = pool, size, caches

    def free(self):
        return self.pool.get_num_free_blocks()

    def take(self, count):
        """None: more than half of those that are free."""
        return self.pool.get_new_blocks(count) if count <= self.free() // 2 else None

    @staticmethod
    def numbers(blocks):
        return [block.block_id for block in blocks]

    def cache(self, request, first, blocks):
        """These have the contents of the request's blocks, from the first of them on."""
        self.pool.cache_full_blocks(
            request=request, blocks=[None] * first + blocks, num_cached_blocks=first,
            num_full_blocks=first + len(blocks), block_size=self.size, kv_cache_group_id=0)

    def give(self, blocks):
        """Back; those of the prefix cache stay there until others need them."""
        self.pool.free_blocks(reversed(blocks))


def bind(kv_cache_manager, routes):
    """Let the cache manager give null blocks to routed requests. -> its manager of blocks"""
    (manager,) = kv_cache_manager.coordinator.single_type_managers
    if type(manager) is not FullAttentionManager:
        raise ValueError("kvd.vllm: \"route\": a cache of %s is not supported; models whose layers "
                         "all have full attention or MLA are" % type(manager).__name__)
    manager.__class__ = Away
    manager.away = routes.away
    routes.pool = Blocks(kv_cache_manager.block_pool, routes.block,
                         kv_cache_manager.enable_caching)
    return manager


class RouteScheduler(Scheduler):
    """--scheduler-cls kvd.vllm.RouteScheduler"""

    def update_from_output(self, scheduler_output, model_runner_output):
        output = model_runner_output.kv_connector_output
        told = output and output.kv_connector_worker_meta
        if told and told.lost:
            self._lost(told.lost, scheduler_output.num_scheduled_tokens)
        result = super().update_from_output(scheduler_output, model_runner_output)
        here = self.connector.take_landed()
        for request in [r for r in reversed(self.running) if r.request_id in here]:
            self._again(request, lost=False)
        return result

    def _lost(self, lost, scheduled):
        """The workers have no valid result for these requests."""
        rows = {}
        for name, count in scheduled.items():
            request = self.requests.get(name)
            if request is not None and request.status == RequestStatus.RUNNING:
                (table,) = self.kv_cache_manager.get_block_ids(name)
                rows[name] = table, written(table, request.num_computed_tokens - count,
                                            self.block_size)
        names, blocks = spoiled(lost, rows)
        self.kv_cache_manager.evict_blocks(blocks)
        for request in [r for r in reversed(self.running) if r.request_id in names]:
            self._again(request, lost=True)

    def _again(self, request, lost):
        """Preempt a request, which is asked for anew."""
        self.connector.again(request, lost)
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=lost)
        # as one that was not in the step before: it may be in the next one
        self.prev_step_scheduled_req_ids.discard(request.request_id)
