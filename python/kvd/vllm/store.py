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
from collections import namedtuple
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole,
                                                               KVConnectorWorkerMetadata,
                                                               SupportsHMA)
from vllm.logger import init_logger

from ..client import Client
from ..cost import Model
from ..stores.follow import Watch
from ..stores.names import weights_of
from ..stores.space_client import CALL_S, SpaceClient
from . import releases, sleep
from .choice import Ways
from .identity import names
from .marks import Marks
from .plugin import routes
from .route import MODES, Routes
from .route_worker import Router
from .stats import StorePromMetrics, StoreStats
from .store_plan import (LEASE_S, REMOTE_MOST_S, Adapters, BlockIds, Plan, Step, TokenIds,
                         chunk_tokens)
from .store_worker import Rank
from .worker import NAME_MAX, Ranks, build

logger = init_logger("vllm.kvd")
HASH = "sha256_cbor"
OPTIONS = ("kvd_socket", "chunk_tokens", "model", "revision", "ids", "lease", "remote", "route")
ROUTE_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SCHEDULER = "kvd.vllm.RouteScheduler"
NO_CACHE_DRAFTERS = ("ngram", "ngram_gpu", "suffix")

with contextlib.suppress(ValueError):  # registered already: MultiConnector loads children by name
    KVConnectorFactory.register_connector("KvdStoreConnector", "kvd.vllm", "KvdStoreConnector")


@dataclass
class StoreStep(Step, KVConnectorMetadata):
    """A Step in vLLM's form."""


@dataclass
class StoreRows(KVConnectorWorkerMetadata):
    """rows: {(stage, rank): (layout's text, its grain, kvd.cost.Model or None)}; lost: requests
    without a valid result; rented: {number of a route.Rent that has ended at ranks: for each of
    them, whether all of it was loaded}."""
    rows: dict
    lost: set = field(default_factory=set)
    rented: dict = field(default_factory=dict)

    def aggregate(self, other):
        rented = {number: self.rented.get(number, []) + other.rented.get(number, [])
                  for number in {**self.rented, **other.rented}}
        return StoreRows({**self.rows, **other.rows}, self.lost | other.lost, rented)


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


def dtype_of(config):
    return str(config.model_config.dtype).rsplit(".", 1)[-1]


def route_refusals(config, caches):
    """(refused, what, remedy), with "route"."""
    from vllm.platforms import current_platform
    scheduler, parallel = config.scheduler_config, config.parallel_config
    named = scheduler.scheduler_cls
    spec = caches.kv_cache_groups[0].kv_cache_spec
    yield named is None or named != SCHEDULER and getattr(named, "__name__", "") != \
        SCHEDULER.rsplit(".", 1)[-1], "vLLM's scheduler", "--scheduler-cls " + SCHEDULER
    yield not current_platform.is_cpu(), "an engine on %s" % current_platform.device_name, \
        "engines on CPUs can"
    yield config.kv_transfer_config.kv_connector != "KvdStoreConnector", "a MultiConnector", \
        "KvdStoreConnector alone"
    yield bool(scheduler.async_scheduling), "asynchronous scheduling", "--no-async-scheduling"
    yield parallel.data_parallel_size > 1, "data parallelism", "--data-parallel-size 1"
    yield config.use_v2_model_runner, "the V2 model runner", "VLLM_USE_V2_MODEL_RUNNER=0"
    yield not config.kv_transfer_config.is_kv_consumer, "a kv_producer", "kv_role kv_both"
    yield config.cache_config.cache_dtype not in ("auto", *ROUTE_TYPES), "--kv-cache-dtype %s" \
        % config.cache_config.cache_dtype, "auto"
    dtype = dtype_of(config)
    yield dtype not in ROUTE_TYPES, "a model of %s" % dtype, "--dtype " + ", ".join(ROUTE_TYPES)
    yield releases.hash_tokens(config, caches) != spec.block_size, "hashes of parts of a block", \
        "equal block sizes"


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
    if given.get("route", "off") not in MODES:
        raise ValueError("kvd.vllm: route: %r is not one of %s" % (given["route"],
                                                                   ", ".join(MODES)))


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
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ids, scheme = ids_and_scheme(config, extra("ids", "blocks"), hashed)

    def opener(client, key):
        layout, named = key
        return client.space(layout, timeout=CALL_S, **named._asdict())
    spaces = SpaceClient(
        lambda: Client(extra("kvd_socket", None), client="vllm", timeout=CALL_S),
        opener, most=1, log=logger)
    named, way = names(config, extra, scheme), extra("route", "off")
    return Plan(spaces, ids, named, block, tokens,
                group=caches.transfer_group_ids[0],
                ranks=ranks, lease=extra("lease", LEASE_S), remote=extra("remote", 0) or None,
                loads=transfer.is_kv_consumer and named.revision is not None,
                saves=transfer.is_kv_producer and named.revision is not None, step=StoreStep,
                adapters=Adapters(weights_of, logger) if extra("revision", None) is None else None,
                routes=Routes(block, ranks) if routes(transfer) else None,
                prices=Ways(not config.scheduler_config.async_scheduling)
                if way != "always" and extra("remote", 0) else None,
                events=block_events(config, caches, hashed, tokens))


def block_events(config, caches, hashed, tokens):
    """None: vLLM publishes no events."""
    published = config.kv_events_config
    if published is None or not published.enable_kv_cache_events:
        return None
    from .events import BlockEvents
    socket = config.kv_transfer_config.get_from_extra_config("kvd_socket", None)
    spaces = SpaceClient(lambda: Client(socket, client="vllm", timeout=CALL_S), Watch, log=logger)
    return BlockEvents(spaces, caches.kv_cache_groups[0].kv_cache_spec, hashed, tokens)


# ---- a worker --------------------------------------------------------------------------

class Worker:
    """A rank's cache as a pool, and its loads and saves."""

    def __init__(self, config, caches):
        self.config, self.caches = config, caches
        self.rank = self.marks = self.stats = self.router = None

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
        self.row = made.layout.text(), group.grain, None

        def opener(client, named):
            return client.space(pool, timeout=CALL_S, **named._asdict())
        spaces = SpaceClient(None, opener, client, most=1, log=logger)
        self.rank = Rank(spaces, group, self.marks, self.count)
        if routes(self.config.kv_transfer_config):
            self.router = self._router(spaces, group, made.layout)

    def _router(self, spaces, group, layout):
        """For the layers of this rank, whose attention is kvd's (route_cpu.py)."""
        from vllm.model_executor.models.utils import extract_layer_index
        layers = {name: self.config.compilation_config.static_forward_context[name]
                  for name in self.caches.kv_cache_groups[0].layer_names}
        shapes = {name: route_shape(layer) for name, layer in layers.items()}
        for name, shape in shapes.items():
            if shape is None:
                raise ValueError(
                    "kvd.vllm: \"route\": the backend of layer %s is %s, not kvd's: allow the plugin "
                    "kvd (VLLM_PLUGINS), and drop --attention-backend"
                    % (name, layers[name].get_attn_backend().get_name()))
        shape, *others = set(shapes.values())
        if others or group.grain != 1:
            raise ValueError("kvd.vllm: \"route\": layers with attention of several shapes are not "
                             "supported: %s" % [shape, *others])
        fields = next(iter(layout.views[group.name]["layers"].values()))
        first_head = next(f["first_unit"] for f in fields if f["name"] == shape.key)
        dtype = ROUTE_TYPES[dtype_of(self.config)]
        self.row = (*self.row[:2], cost_model(shape, len(layers), TYPE_BYTES[dtype]))

        def opener(client, rows, seats):
            return client.attend(rows=rows, seats=seats, q_type=dtype, kv_type=dtype,
                                 first_head=first_head, view=group.name, timeout=CALL_S,
                                 **shape._asdict())
        return Router(spaces, opener, shape.heads, shape.dqk + shape.dv,
                      {name: extract_layer_index(name) for name in layers}, self.count)

    def count(self, **values):
        self.stats = self.stats or StoreStats()
        for name, value in values.items():
            self.stats.add(name, value)

    def close(self):
        if self.rank is None:
            return
        if self.router is not None:
            self.router.close()
            self.router = None
        self.rank.quiet()
        self.marks.close()
        self.rank.spaces.close()
        self.rank = None


def cost_model(shape, layers, nbytes):
    """nbytes: of a value of q and KV. Answers are fp32."""
    if shape.kind == "mla":
        return Model.mla(layers, shape.heads, shape.dqk, shape.dv, value_bytes=nbytes,
                         out_bytes=4)
    return Model.gqa(layers, shape.heads, shape.kv_heads, shape.dqk, shape.dv,
                     value_bytes=nbytes, out_bytes=4)


Shape = namedtuple("Shape", "kind heads kv_heads dqk dv scale key value")


def route_shape(layer):
    """Of a layer's query rows, as kvd.Attend takes it. None: its backend is not kvd's."""
    impl = layer.impl
    if not getattr(layer.get_attn_backend(), "token_rows", False):
        return None
    mla = impl.kind == "mla"
    return Shape(impl.kind, impl.num_heads, 1 if mla else impl.num_kv_heads, impl.dqk, impl.dv,
                 impl.scale, "latent" if mla else "k", None if mla else "v")


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
        self.route = routes(transfer)
        for refused, what, remedy in route_refusals(vllm_config, kv_cache_config) \
                if self.route else ():
            if refused:
                raise ValueError("kvd.vllm: \"route\": %s is not supported; %s" % (what, remedy))
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
        if self._plan.events is not None:
            self._plan.events.bind(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager):
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.route:
            from .route_scheduler import bind
            bind(kv_cache_manager, self._plan.routes)

    def again(self, request, lost):
        """From RouteScheduler, which preempts it: its step has no valid result (lost), or its
        document is in vLLM's prefix cache."""
        self._plan.again(request, lost)

    def take_landed(self):
        """Names of requests whose documents are in vLLM's prefix cache since the last call."""
        return self._plan.routes.take_landed()

    def has_pending_push_work(self):
        """Whether blocks of vLLM's pool are being written for no request in particular, or events
        are to be published."""
        return self.route and bool(self._plan.routes.rents) or \
            self._plan.events is not None and self._plan.events.waits()

    def take_events(self):
        return () if self._plan.events is None else self._plan.events.take()

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
                         connector_output.invalid_block_ids, told and told.rented,
                         connector_output.finished_sending or ())

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

    @property
    def router(self):
        """A worker's, for its attention backend."""
        return self._worker.router

    def handle_preemptions(self, kv_connector_metadata):
        self._worker.rank.begin(kv_connector_metadata)
        if self.router is not None:
            self.router.begin(kv_connector_metadata)

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
        known = self._get_connector_metadata().words is not None  # to the scheduler
        lost = self.router.end() if self.router is not None else set()
        rented = self._worker.rank.take_rented()
        if known and not lost and not rented:
            return None
        return StoreRows({} if known else {self._worker.key: self._worker.row}, lost, rented)

    def shutdown(self):
        if self._worker is not None:
            self._worker.close()
        if self._plan is not None:
            self._plan.spaces.close()
            if self._plan.events is not None:
                self._plan.events.close()

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
