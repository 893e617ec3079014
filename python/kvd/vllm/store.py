# SPDX-License-Identifier: Apache-2.0
"""vLLM's KvdStoreConnector: KV that outlives its engine, in the chunks of the node's daemon.

    --kv-transfer-config '{"kv_connector": "KvdStoreConnector",
                           "kv_connector_module_path": "kvd.vllm", "kv_role": "kv_both"}'

The prefix of a request that vLLM's own cache lacks is looked up when the request is first
considered, and loaded while other requests are computed; missing tokens are computed. Chunks are
put as soon as a step has computed all of their tokens, so aborting a request loses none of them.

It runs alone, or in vLLM's MultiConnector together with KvdConnector. store_plan.py is the
scheduler's side, store_worker.py the workers'."""
import contextlib
import math
import re
import secrets
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole,
                                                               KVConnectorWorkerMetadata,
                                                               SupportsHMA)
from vllm.logger import init_logger

from ..client import Client
from ..stores.space_client import CALL_S, SpaceClient
from ..stores.names import weights_of
from . import releases, sleep
from .identity import names
from .marks import Marks
from .stats import StorePromMetrics, StoreStats
from .store_plan import (LEASE_S, REMOTE_MOST_S, Adapters, BlockIds, Plan, Step, TokenIds,
                         chunk_tokens)
from .store_worker import Rank
from .worker import NAME_MAX, Ranks, build

logger = init_logger("vllm.kvd")
HASH = "sha256_cbor"
OPTIONS = ("kvd_socket", "chunk_tokens", "model", "revision", "ids", "lease", "remote")
NO_CACHE_DRAFTERS = ("ngram", "ngram_gpu", "suffix")

with contextlib.suppress(ValueError):  # registered already: MultiConnector loads children by name
    KVConnectorFactory.register_connector("KvdStoreConnector", "kvd.vllm", "KvdStoreConnector")


@dataclass
class StoreStep(Step, KVConnectorMetadata):
    """A Step in vLLM's form."""


@dataclass
class StoreRows(KVConnectorWorkerMetadata):
    """{(stage, rank): (layout's text, its grain)}"""
    rows: dict

    def aggregate(self, other):
        return StoreRows({**self.rows, **other.rows})


# ---- refused options -------------------------------------------------------------------

def specs_of(caches):
    for group in caches.kv_cache_groups:
        spec = group.kv_cache_spec
        yield from getattr(spec, "kv_cache_specs", {}).values() or (spec,)


def refusals(config, caches):
    """(refused, what, remedy)"""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec
    parallel, drafter = config.parallel_config, config.speculative_config
    specs = list(specs_of(caches))
    full = all(isinstance(s, FullAttentionSpec) and
               not isinstance(s, ChunkedLocalAttentionSpec) for s in specs)
    yield len(caches.kv_cache_groups) != 1 or not full, "a model with %d groups of caches (%s)" \
        % (len(caches.kv_cache_groups), ", ".join(sorted({type(s).__name__ for s in specs}))), \
        "models whose layers all have full attention or MLA are"
    yield any(s.non_causal for s in specs if hasattr(s, "non_causal")), \
        "attention that is not causal", "its cache is valid for one prompt only"
    yield config.model_config.runner_type != "generate", "a model without generation", \
        "drop the connector"
    yield parallel.prefill_context_parallel_size > 1, "prefill context parallelism", \
        "--prefill-context-parallel-size 1"
    yield parallel.decode_context_parallel_size > 1, "decode context parallelism", \
        "--decode-context-parallel-size 1"
    yield parallel.pipeline_parallel_size > 1, "pipeline parallelism", \
        "--pipeline-parallel-size 1"
    yield parallel.nnodes > 1, "an engine on several nodes", \
        "one node: all ranks share one daemon's chunks"
    yield drafter is not None and drafter.method not in NO_CACHE_DRAFTERS, \
        "a drafter with a cache", "speculative methods without one are: %s" % \
        ", ".join(NO_CACHE_DRAFTERS)
    yield caches.needs_kv_cache_zeroing, "a cache of mixed precision (its blocks are zeroed " \
        "before a put of them could be waited for)", "drop --kv-cache-dtype-skip-layers"
    yield from sleep.refusals(config)
    yield any(g.host_resident for g in caches.kv_cache_groups), "HiSparse", "drop its option"
    yield bool(config.kv_transfer_config.enable_permute_local_kv), "enable_permute_local_kv", \
        "drop it (kvd cuts heads itself)"


def refuse_options(config):
    transfer = config.kv_transfer_config
    given = transfer.kv_connector_extra_config
    for name in set(given) - set(OPTIONS):
        raise ValueError("kvd.vllm: kv_connector_extra_config: %s is not an option of "
                         "KvdStoreConnector (%s)" % (name, ", ".join(OPTIONS)))
    for name in ("kvd_socket", "model", "revision"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError("kvd.vllm: %s: %r is not a string" % (name, given[name]))
    lease = given.get("lease", LEASE_S)
    if isinstance(lease, bool) or not isinstance(lease, (int, float)) or not 0 < lease <= 600:
        raise ValueError("kvd.vllm: lease: %r is not a number of seconds up to 600" % (lease,))
    remote = given.get("remote", 0)
    if isinstance(remote, bool) or not isinstance(remote, (int, float)) \
            or not 0 <= remote <= REMOTE_MOST_S:
        raise ValueError("kvd.vllm: remote: %r is not a number of seconds up to %g, for which the "
                         "scheduler would wait" % (remote, REMOTE_MOST_S))
    refuse_ids(config, given.get("ids", "blocks"))


def refuse_ids(config, kind):
    """Ids that two engines would compute differently never match, without an error."""
    hashing = config.cache_config.prefix_caching_hash_algo
    if kind not in ("blocks", "tokens"):
        raise ValueError("kvd.vllm: ids: %r is neither \"blocks\" nor \"tokens\"" % (kind,))
    if kind == "blocks" and hashing != HASH:
        raise ValueError(
            "kvd.vllm: block hashes of %s are not the same in all engines: set "
            "--prefix-caching-hash-algo %s, or \"ids\": \"tokens\" in kv_connector_extra_config"
            % (hashing, HASH))


# ---- the scheduler's side ---------------------------------------------------------------

def ids_and_scheme(config, kind, block):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (generate_block_hash_extra_keys,
                                             resolve_none_hash_seed)
    digest = get_hash_fn_by_name(HASH)
    if kind == "tokens":
        ids = TokenIds(digest, generate_block_hash_extra_keys)
        return ids, ids.scheme(None)
    ids = BlockIds(block)
    return ids, ids.scheme("%s seed=%s" % (HASH, resolve_none_hash_seed(digest)))


def plan(config, caches, hashed, block, tokens):
    """The scheduler's side. hashed: tokens per hash of vLLM; block: per allocated block."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    extra = transfer.get_from_extra_config
    ids, scheme = ids_and_scheme(config, extra("ids", "blocks"), hashed)

    def opener(client, key):
        layout, named = key
        return client.space(layout, timeout=CALL_S, **named._asdict())
    spaces = SpaceClient(
        lambda: Client(extra("kvd_socket", None), client="vllm", timeout=CALL_S),
        opener, most=1, log=logger)
    named = names(config, extra, scheme)
    return Plan(spaces, ids, named, block, tokens,
                group=caches.transfer_group_ids[0],
                ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
                lease=extra("lease", LEASE_S), remote=extra("remote", 0) or None,
                loads=transfer.is_kv_consumer and named.revision is not None,
                saves=transfer.is_kv_producer and named.revision is not None, step=StoreStep,
                adapters=Adapters(weights_of, logger) if extra("revision", None) is None else None)


# ---- a worker --------------------------------------------------------------------------

class Worker:
    """A rank's cache as a pool, and its loads and saves."""

    def __init__(self, config, caches):
        self.config, self.caches = config, caches
        self.rank = self.marks = self.stats = None

    def register(self, kv_caches):
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
        ranks = Ranks(self.config.parallel_config.tensor_parallel_size,
                      get_tensor_model_parallel_rank())
        self.key = get_pp_group().rank_in_group, ranks.rank
        made = build(self.config, self.caches, kv_caches, ranks,
                     self.key[0] * ranks.size + ranks.rank)
        extra = self.config.kv_transfer_config.get_from_extra_config
        client = Client(extra("kvd_socket", None), client="vllm")
        gpu = next(iter(kv_caches.values())).is_cuda
        take = client.register_gpu if gpu else client.register_address
        model = re.sub(r"[^A-Za-z0-9_-]", "-", str(self.config.model_config.model).rstrip("/"))
        tail = ".store." + secrets.token_hex(4)
        pool = client.pool(made.layout, [take(*part) for part in made.parts],
                           name=model[-(NAME_MAX - len(tail)):] + tail)
        self.marks = Marks(client, gpu)
        self.marks()  # fails here if the GPU does not support it
        (group,) = made.groups
        self.row = made.layout.text(), group.grain

        def opener(client, named):
            return client.space(pool, timeout=CALL_S, **named._asdict())
        spaces = SpaceClient(None, opener, client, most=1, log=logger)
        self.rank = Rank(spaces, group, self.marks, self.count)

    def count(self, **values):
        self.stats = self.stats or StoreStats()
        for name, value in values.items():
            self.stats.add(name, value)

    def close(self):
        if self.rank is None:
            return
        self.rank.quiet()
        self.marks.close()
        self.rank.spaces.close()
        self.rank = None


# ---- the connector ---------------------------------------------------------------------

class KvdStoreConnector(sleep.Awake, KVConnectorBase_V1, SupportsHMA):
    _cache_hit_source = releases.hits("HOST")
    requires_kv_delivery = False  # unsaved chunks are misses

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        for refused, what, remedy in refusals(vllm_config, kv_cache_config):
            if refused:
                raise ValueError("kvd.vllm: KvdStoreConnector: %s is not supported; %s"
                                 % (what, remedy))
        refuse_options(vllm_config)
        transfer = vllm_config.kv_transfer_config
        hashed = releases.hash_tokens(vllm_config, kv_cache_config)
        block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        tokens = chunk_tokens(transfer.get_from_extra_config("chunk_tokens", None),
                              math.lcm(block, hashed))
        # missing tokens are computed; in a MultiConnector its own policy applies
        transfer.kv_load_failure_policy = "recompute"
        self._plan = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            self._plan = plan(vllm_config, kv_cache_config, hashed, block, tokens)
            logger.info("chunks of %d tokens: %s", tokens, self._plan.named)
        else:
            self._worker = Worker(vllm_config, kv_cache_config)

    # ---- scheduler ----

    def bind_gpu_block_pool(self, gpu_block_pool):
        releases.refuse_lookahead(gpu_block_pool)

    def on_new_request(self, request):
        self._plan.arrived(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._plan.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._plan.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._plan.take(scheduler_output)

    def update_connector_output(self, connector_output):
        told = connector_output.kv_connector_worker_meta
        if told is not None:
            self._plan.told(told.rows)
        self._plan.heard(connector_output.finished_recving or (),
                         connector_output.invalid_block_ids)

    def request_finished(self, request, block_ids):
        return self._plan.finished(request, (block_ids,)), None

    def request_finished_all_groups(self, request, block_ids):
        return self._plan.finished(request, block_ids), None

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        """From another connector in a MultiConnector."""

    def reset_cache(self):
        if self._plan is not None:
            self._plan.reset()
        return True

    # ---- worker ----

    def register_kv_caches(self, kv_caches):
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata):
        self._worker.rank.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        self._worker.rank.take(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name):
        """Loads are not part of the forward pass."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Chunks are of all layers."""

    def wait_for_save(self):
        self._worker.rank.saved(self._get_connector_metadata())

    def get_finished(self, finished_req_ids):
        return self._worker.rank.results()

    def get_block_ids_with_load_errors(self):
        return self._worker.rank.bad_blocks()

    def build_connector_worker_meta(self):
        if self._get_connector_metadata().words is not None:  # the scheduler knows it
            return None
        return StoreRows({self._worker.key: self._worker.row})

    def shutdown(self):
        if self._worker is not None:
            self._worker.close()
        if self._plan is not None:
            self._plan.spaces.close()

    # ---- metrics ----

    def get_kv_connector_stats(self):
        if self._worker is not None:
            told, self._worker.stats = self._worker.stats, None
            return told
        asked, found = self._plan.take_counts()
        if not asked:
            return None
        told = StoreStats()
        told.add("asked", asked)
        told.add("found", found)
        return told

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return StoreStats() if data is None else StoreStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
