# SPDX-License-Identifier: Apache-2.0
"""vLLM's KvdConnector: decode pulls a request's cache from prefill, by kvd's rooms.

Prefill mints a room when a request has finished and offers its blocks; what decode needs to
find it (room, ticket, the ranks' pools) travels as kv_transfer_params, so proxies that serve
NixlConnector serve this one. Decode opens its side as soon as the request arrives, which keeps
prefill's lease, and names its blocks when it has some. The daemons tell each other all else,
so there is no listener, no handshake and no thread here.

A request is reported to vLLM when its room has ended, and not before: nothing reads or writes
its blocks any more."""
import secrets
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorHandshakeMetadata,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole,
                                                               KVConnectorTransferResults,
                                                               SupportsHMA)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from . import check_release
from .params import read, write
from .stats import KvdStats, PromMetrics
from .worker import Worker

logger = init_logger("vllm.kvd")
LEASE_S = 30  # vLLM's own default


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Where a rank's blocks are."""
    endpoint: str
    pool: str
    rank: int


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""
    offers: list = field(default_factory=list)  # (request, room, ticket, blocks, tokens)
    pulls: list = field(default_factory=list)  # (request, Remote)
    binds: list = field(default_factory=list)  # (request, blocks, begin, end)
    drops: list = field(default_factory=list)  # requests that are given up


# ---- the scheduler's side --------------------------------------------------------------

class Scheduler:
    def __init__(self, config, kv_cache_config):
        self.config, self.caches = config, kv_cache_config
        self.step, self.pulls, self.ranks, self.shortened = Step(), {}, {}, set()
        self.lookahead = config.num_prefill_lookahead_tokens
        self.replay = kv_cache_config.has_mamba_layers or any(
            g.kv_cache_spec.prefix_replay_tokens > 0 for g in kv_cache_config.kv_cache_groups)

    def told_by_workers(self, metadata):
        self.ranks = {key: (told.endpoint, told.pool, told.rank)
                      for key, told in metadata.items()}

    def backoff(self):
        """Tokens at the prompt's end that decode computes itself: the last one where a state
        has to be of the one before it, and those that a drafter looks ahead."""
        return max(1 if self.replay else 0, self.lookahead - 1)

    def loads(self, tokens):
        return tokens - self.backoff() if tokens > self.backoff() else tokens

    def arrived(self, request):
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._shorten(request, params)
        if not params.get("do_remote_prefill"):
            return
        try:
            remote = read(params)
        except ValueError as error:
            logger.warning("request %s: kv_transfer_params: %s; its prompt is computed here",
                           request.request_id, error)
            params["do_remote_prefill"] = False
            return
        self.pulls[request.request_id] = remote
        self.step.pulls.append((request.request_id, remote))
        wanted = self.loads(request.num_prompt_tokens)
        if self.replay and remote.tokens != wanted:  # a state is of one token only
            logger.warning("request %s: prefill has the state after %d tokens, not after %d; the "
                           "prompt is computed here", request.request_id, remote.tokens, wanted)
            params["do_remote_prefill"] = False
            self.step.drops.append(request.request_id)

    def _shorten(self, request, params):
        """Prefill stops where decode goes on. Once: requests come again."""
        cut = self.backoff()
        if not cut or request.request_id in self.shortened or \
                request.num_prompt_tokens <= cut or request.get_skip_reading_prefix_cache():
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-cut:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-cut]
        else:
            return
        del request._all_token_ids[-cut:]
        request.num_prompt_tokens -= cut
        request.max_tokens = 1
        self.shortened.add(request.request_id)

    def matched(self, request, computed):
        params, remote = request.kv_transfer_params, self.pulls.get(request.request_id)
        if remote is None or not params.get("do_remote_prefill"):
            return 0, False
        end = min(self.loads(request.num_prompt_tokens), remote.tokens)
        return (end - computed, True) if end > computed else (0, False)

    def allocated(self, request, blocks, external):
        params, remote = request.kv_transfer_params, self.pulls.get(request.request_id)
        if remote is None or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        end = min(self.loads(request.num_prompt_tokens), remote.tokens)
        ids = self.caches.select_transfer_block_ids(blocks.get_block_ids()) if external else ()
        self.step.binds.append((request.request_id, ids, end - external, end))

    def finished(self, request, block_ids):
        params, name = request.kv_transfer_params, request.request_id
        self.shortened.discard(name)
        if self.pulls.pop(name, None) is not None:
            self.step.drops.append(name)
            return False, None
        if not params or not params.get("do_remote_decode") or request.status not in (
                RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None
        blocks = self.caches.select_transfer_block_ids(block_ids)
        if not any(blocks):
            return False, None
        room, ticket = secrets.randbits(63), secrets.token_hex(16)
        tokens = request.num_computed_tokens
        self.step.offers.append((name, room, ticket, blocks, tokens))
        parallel = self.config.parallel_config
        return True, write(room, ticket, tokens, parallel.tensor_parallel_size,
                           parallel.pipeline_parallel_size, self.ranks)

    def take(self):
        step, self.step = self.step, Step()
        return step


# ---- the connector ---------------------------------------------------------------------

def refusals(config, caches):
    """(refused, what, remedy)"""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    yield parallel.prefill_context_parallel_size > 1, "prefill context parallelism", \
        "--prefill-context-parallel-size 1"
    yield parallel.decode_context_parallel_size > 1, "decode context parallelism", \
        "--decode-context-parallel-size 1"
    yield parallel.pipeline_parallel_size > 1 and transfer.kv_role != "kv_producer", \
        "pipeline parallelism on decode", "--pipeline-parallel-size 1 (prefill, a kv_producer, " \
        "may have more)"
    yield transfer.get_from_extra_config("bidirectional_kv_xfer", False), \
        "bidirectional_kv_xfer", "drop it"
    yield bool(transfer.enable_permute_local_kv), "enable_permute_local_kv", \
        "drop it (kvd cuts heads itself)"
    yield any(g.host_resident for g in caches.kv_cache_groups), "HiSparse", \
        "drop its option, or use NixlConnector"


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        import vllm
        check_release(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        for refused, what, remedy in refusals(vllm_config, kv_cache_config):
            if refused:
                raise ValueError("kvd.vllm: %s is not supported; %s" % (what, remedy))
        self._scheduler = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config, kv_cache_config)
        else:
            lease = vllm_config.kv_transfer_config.get_from_extra_config("kv_lease_duration",
                                                                         LEASE_S)
            self._worker = Worker(vllm_config, kv_cache_config, lease)

    @property
    def supports_divergent_local_hybrid_hits(self):
        return True

    # ---- scheduler ----

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self._scheduler.told_by_workers(metadata)

    def get_loaded_kv_cache_group_ids(self, request):
        return self._kv_cache_config.transfer_group_ids

    def on_new_request(self, request):
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._scheduler.take()

    def request_finished(self, request, block_ids):
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        return self._scheduler.finished(request, block_ids)

    # ---- worker ----

    def register_kv_caches(self, kv_caches):
        self._worker.register(kv_caches)

    def get_handshake_metadata(self):
        return Handshake(*self._worker.told())

    def start_load_kv(self, forward_context, **kwargs):
        self._worker.take(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name):
        """Loads are not part of the forward pass."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Blocks are offered when the request has finished."""

    def wait_for_save(self):
        pass

    def get_finished(self, finished_req_ids):
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids):
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received,
                                          failed_recving=failed)

    def get_block_ids_with_load_errors(self):
        return self._worker.invalid_blocks()

    def shutdown(self):
        if self._worker is not None:
            self._worker.close()

    # ---- metrics ----

    def get_kv_connector_stats(self):
        return self._worker.stats() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return KvdStats() if data is None else KvdStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
