# SPDX-License-Identifier: Apache-2.0
"""vLLM's KvdConnector: a request's cache is transferred from prefill to decode by kvd's rooms.

Pull. When a request has finished, prefill creates a room and offers its blocks; decode receives
what it needs (room, ticket, the ranks' pools) as kv_transfer_params, so proxies for NixlConnector
work with this one. Decode opens its side as soon as the request arrives, which extends prefill's
lease, and binds its blocks when it has some.

Push. The proxy chooses the room's number and sends both requests at once, as SGLang's does;
decode queries prefill's bootstrap server for the addresses of its ranks, and prefill sends the
computed blocks after each step, or each layer. Either engine may be SGLang (kvd.sglang).

The daemons exchange everything else.

A request is reported to vLLM only when its room has ended: its blocks are neither read nor written
any more."""
import contextlib
import secrets
import time
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorHandshakeMetadata,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole,
                                                               KVConnectorTransferResults,
                                                               KVConnectorWorkerMetadata,
                                                               SupportsHMA)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.request import RequestStatus

from ..rooms import Source
from ..route import ticket_of
from . import releases, sleep
from .bootstrap import Lookups, Server
from .load import Meter
from .params import Remote, address_of, layers_of_all, params_of, read, room_of, write
from .pools import unlike
from .stats import KvdStats, PromMetrics
from .worker import Worker

logger = init_logger("vllm.kvd")
LEASE_S = 30  # vLLM's own default

with contextlib.suppress(ValueError):  # registered already: MultiConnector loads children by name
    KVConnectorFactory.register_connector("KvdConnector", "kvd.vllm", "KvdConnector")


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Address and shape of a rank's blocks (route.py)."""
    row: dict


@dataclass
class Rows(KVConnectorWorkerMetadata):
    """Of ranks whose blocks have moved: {(stage, rank): row}."""
    rows: dict

    def aggregate(self, other):
        return Rows({**self.rows, **other.rows})


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler sends to the workers in a step."""
    offers: list = field(default_factory=list)  # (request, room, ticket, blocks, tokens)
    pulls: list = field(default_factory=list)  # (request, Remote)
    binds: list = field(default_factory=list)  # (request, blocks, begin, end)
    drops: list = field(default_factory=list)  # (request, vLLM waits for its end)
    refused: list = field(default_factory=list)  # (request, room, why)
    # prefill that pushes
    pushes: list = field(default_factory=list)  # (request, room, ticket)
    computed: list = field(default_factory=list)  # (request, blocks, tokens after this step)
    preempted: list = field(default_factory=list)  # requests
    ends: list = field(default_factory=list)  # (request, blocks, tokens, first token)
    given_up: list = field(default_factory=list)  # (request, why, vLLM waits for its end)
    load: dict | None = None  # for session.report


def address(text):
    """(host, port) of kv_connector_extra_config.bootstrap."""
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("kvd.vllm: bootstrap: %r is not HOST:PORT" % text)
    return host.strip("[]"), int(port)


class Mismatch(ValueError):
    """Prefill was found, but does not match."""


class Ask:
    """A request whose prefill is being queried. unwanted: the request, once vLLM computes its
    prompt without the answer."""

    def __init__(self, room, address, until):
        self.room, self.address, self.until, self.unwanted = room, address, until, None


class Pushed:
    """A request that prefill sends. idle: it has blocks but has not run with them, so vLLM may be
    waiting for another connector that loads them."""

    def __init__(self, request):
        self.request, self.idle = request, False


# ---- the scheduler's side --------------------------------------------------------------

class Scheduler:
    def __init__(self, config, kv_cache_config):
        self.config, self.caches = config, kv_cache_config
        self.step, self.pulls, self.ranks, self.shortened = Step(), {}, {}, set()
        self.computed = {}  # {request: tokens that vLLM had when it received the others}
        self.pushes, self.asks, self.lookups = {}, {}, Lookups()
        self.server, self.secret = None, secrets.token_hex(32)
        transfer = config.kv_transfer_config
        self.lease_s = transfer.get_from_extra_config("kv_lease_duration", LEASE_S)
        self.bootstrap = transfer.get_from_extra_config("bootstrap", None)
        self.meter = Meter(config.cache_config.block_size) \
            if transfer.get_from_extra_config("group", None) else None
        self.lookahead = config.num_prefill_lookahead_tokens
        self.replay = kv_cache_config.has_mamba_layers or any(
            g.kv_cache_spec.prefix_replay_tokens > 0 for g in kv_cache_config.kv_cache_groups)

    def told_by_workers(self, metadata):
        if not all(isinstance(told, Handshake) for told in metadata.values()):
            raise ValueError("kvd.vllm: a MultiConnector must list KvdConnector before "
                             "connectors with a handshake")
        self.ranks = {key: told.row for key, told in metadata.items()}
        if self.bootstrap is None or self.server is not None:
            return
        parallel, (host, port) = self.config.parallel_config, address(self.bootstrap)
        self.server = Server(host, port + parallel.data_parallel_index,
                             parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
                             lambda: self.ranks, self.secret)

    def backoff(self):
        """Tokens at the prompt's end that decode computes itself: the last one if a state must be
        the one before it, and those that a drafter looks ahead."""
        return max(1 if self.replay else 0, self.lookahead - 1)

    def loads(self, tokens):
        return tokens - self.backoff() if tokens > self.backoff() else tokens

    def arrived(self, request):
        params = params_of(request)
        if params.get("do_remote_decode"):
            self._shorten(request, params)
            self._push(request, params)
        if not params.get("do_remote_prefill"):
            return
        if not self.config.kv_transfer_config.is_kv_consumer:
            logger.warning("request %s: a kv_producer does not load; its prompt is computed here",
                           request.request_id)
            params["do_remote_prefill"] = False
            return
        try:
            room = room_of(params)
            if room is not None:
                self.asks[request.request_id] = Ask(room, address_of(params),
                                                    time.monotonic() + self.lease_s)
                self._found(request)
                return
            remote = read(params)
        except ValueError as error:
            logger.warning("request %s: kv_transfer_params: %s; its prompt is computed here",
                           request.request_id, error)
            params["do_remote_prefill"] = False
            return
        if any(other.room == remote.room for other in self.pulls.values()):
            logger.warning("request %s: room %d is in use by another request; its prompt is "
                           "computed here", request.request_id, remote.room)
            params["do_remote_prefill"] = False
            return
        self.pulls[request.request_id] = remote
        self.step.pulls.append((request.request_id, remote))
        wanted = self.loads(request.num_prompt_tokens)
        why = unlike(remote.layers, next(iter(self.ranks.values()))["layers"])
        if why is None and self.replay and remote.tokens != wanted:  # a state is of one token
            why = "its state is after %d tokens, not after %d" % (remote.tokens, wanted)
        if why:
            logger.warning("request %s: prefill cannot serve it: %s; the prompt is computed here",
                           request.request_id, why)
            params["do_remote_prefill"] = False
            self.step.drops.append((request.request_id, False))

    def _push(self, request, params):
        """Prefill of a request whose room the proxy has chosen."""
        try:
            room = room_of(params)
            if room is None:
                return
            if self.server is None:
                raise ValueError("bootstrap_room needs kv_connector_extra_config.bootstrap, "
                                 "HOST:PORT of a bootstrap server, on prefill")
        except ValueError as error:
            logger.error("request %s: kv_transfer_params: %s", request.request_id, error)
            return
        self.pushes[request.request_id] = Pushed(request)
        self.step.pushes.append((request.request_id, room, ticket_of(self.secret, room)))

    def _found(self, request):
        """Whether the queries of bootstrap servers have been answered."""
        name, ask = request.request_id, self.asks.get(request.request_id)
        if ask is None:
            return True
        try:
            found = self.lookups.of(ask.address, ask.room)
            if found is None and time.monotonic() > ask.until:
                raise ValueError("bootstrap server %s: no answer" % ask.address)
            if found is not None:
                self._fits(found)
        except ValueError as error:
            if time.monotonic() < ask.until and not isinstance(error, Mismatch):
                return False  # it may be starting
            remote = Remote(ask.room, None, 0, 0, 0, (), True)
            self.step.refused.append((name, ask.room, str(error)))
        else:
            if found is None:
                return False
            sources = [Source(r["endpoint"], r["pool"], None, r["rank"]) for r in found.rows]
            remote = Remote(ask.room, ticket_of(found.rows[0]["secret"], ask.room), 0, found.tp,
                            found.pp, sources, True)
            self.step.pulls.append((name, remote))
        del self.asks[name]
        self.pulls[name] = remote
        return True

    def _fits(self, found):
        own = next(iter(self.ranks.values()))
        for name in ("heads", "states"):
            there, here = found.rows[0][name], own[name]
            if there != here:
                raise Mismatch("%s of the cache are %s on prefill, %s here: are the models the "
                               "same?" % (name, there, here))
        if all(row["layers"] is not None for row in found.rows):  # SGLang does not report them
            why = unlike(layers_of_all(found.rows), own["layers"])
            if why:
                raise Mismatch("prefill cannot serve it: " + why)

    def _shorten(self, request, params):
        """Prefill stops where decode continues. Once: requests are passed repeatedly."""
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
        if not params_of(request).get("do_remote_prefill"):
            return 0, False
        if not self._found(request):
            return None, False
        remote = self.pulls.get(request.request_id)
        if remote is None:
            return 0, False
        self.computed[request.request_id] = computed
        end = self._end(request, remote)
        return (end - computed, True) if end > computed else (0, False)

    def _end(self, request, remote):
        """Tokens that prefill has, among the needed ones."""
        wanted = self.loads(request.num_prompt_tokens)
        return wanted if remote.push else min(wanted, remote.tokens)

    def allocated(self, request, blocks, external):
        name, params = request.request_id, params_of(request)
        if name in self.pushes:
            self.pushes[name].idle = True
        if name in self.asks:
            self.asks[name].unwanted = request
        remote, begin = self.pulls.get(name), self.computed.pop(name, 0)
        if remote is None or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        end = begin + external  # may be fewer than exist
        if external and self.replay and end != self._end(request, remote):
            self.step.refused.append((name, remote.room, "vLLM loads %d of its tokens: the state "
                                      "after these does not exist" % end))
        ids = self.caches.select_transfer_block_ids(blocks.get_block_ids()) if external else ()
        self.step.binds.append((name, ids, begin, end))

    def _open_unwanted(self):
        """A room that is bound to no blocks frees prefill's blocks, which are otherwise kept until
        the end of the lease."""
        for name, ask in list(self.asks.items()):
            if ask.unwanted is not None and self._found(ask.unwanted):
                params_of(ask.unwanted)["do_remote_prefill"] = False
                self.step.binds.append((name, (), 0, 0))

    def finished(self, request, block_ids):
        params, name = params_of(request), request.request_id
        if self.meter:
            self.meter.finished(request)
        shortened = name in self.shortened
        self.shortened.discard(name)
        self.computed.pop(name, None)
        if self.asks.pop(name, None) is not None:
            return False, None
        if self.pulls.pop(name, None) is not None:
            # one without blocks stays until its room has ended: workers continue to step
            waits = bool(params.get("do_remote_prefill"))
            self.step.drops.append((name, waits))
            return waits, None
        push = self.pushes.pop(name, None)
        if push is not None:
            self._pushed(push, block_ids, shortened)
            return not push.idle, None
        if not params.get("do_remote_decode") or request.status not in (
                RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None
        blocks = self.caches.select_transfer_block_ids(block_ids)
        if not any(blocks):
            return False, None
        room, ticket = secrets.randbits(63), secrets.token_hex(16)
        # a step in flight may write the others
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        self.step.offers.append((name, room, ticket, blocks, tokens))
        parallel = self.config.parallel_config
        return True, write(room, ticket, tokens, parallel.tensor_parallel_size,
                           parallel.pipeline_parallel_size, self.ranks)

    def _pushed(self, push, block_ids, shortened):
        request = push.request
        if push.idle or request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED,
                                               RequestStatus.FINISHED_STOPPED):
            # vLLM waits for loads only; a second report would end its engine core
            self.step.given_up.append((request.request_id, "aborted by prefill",
                                       not push.idle))
            return
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        first = None if shortened else next(iter(request.output_token_ids), None)
        self.step.ends.append((request.request_id,
                               self.caches.select_transfer_block_ids(block_ids), tokens, first))

    def take(self, output):
        self._open_unwanted()
        step, self.step = self.step, Step()
        for name, push in self.pushes.items():
            request, scheduled = push.request, output.num_scheduled_tokens.get(name)
            if scheduled:
                push.idle = False
                end = min(request.num_computed_tokens + scheduled, request.num_prompt_tokens)
                blocks = output.kv_connector_block_state.get_block_ids(name)
                step.computed.append((name, self.caches.select_transfer_block_ids(blocks), end))
        step.preempted += [n for n in output.preempted_req_ids or () if n in self.pushes]
        if self.meter:
            step.load = self.meter.stepped(output.num_scheduled_tokens)
        return step

    def heard(self, output):
        """A load may have failed because the cached entry of a prefill engine is out of date."""
        if output.failed_recving or output.invalid_block_ids:
            self.lookups.forget()

    def close(self):
        if self.server is not None:
            self.server.close()


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
    yield transfer.get_from_extra_config("layerwise", False) and \
        transfer.get_from_extra_config("bootstrap", None) is None, \
        "layerwise without a bootstrap server", "set bootstrap, too: only a push is layerwise"
    yield from sleep.refusals(config)
    yield any(g.host_resident for g in caches.kv_cache_groups), "HiSparse", \
        "drop its option, or use NixlConnector"


class KvdConnector(sleep.Awake, KVConnectorBase_V1, SupportsHMA):
    _cache_hit_source = releases.hits("P2P")

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        for refused, what, remedy in refusals(vllm_config, kv_cache_config):
            if refused:
                raise ValueError("kvd.vllm: %s is not supported; %s" % (what, remedy))
        self._scheduler = self._worker = None
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        bootstrap = extra("bootstrap", None)
        if bootstrap is not None:
            address(bootstrap)
        self._layerwise = bool(extra("layerwise", False))
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config, kv_cache_config)
        else:
            self._worker = Worker(vllm_config, kv_cache_config,
                                  extra("kv_lease_duration", LEASE_S), bootstrap is not None,
                                  {name: extra(name, None)
                                   for name in ("group", "worker", "url")})

    @property
    def supports_divergent_local_hybrid_hits(self):
        return True

    # ---- scheduler ----

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self._scheduler.told_by_workers(metadata)

    def get_loaded_kv_cache_group_ids(self, request):
        return self._kv_cache_config.transfer_group_ids

    def bind_gpu_block_pool(self, gpu_block_pool):
        if self._scheduler.meter:
            self._scheduler.meter.pool = gpu_block_pool

    def on_new_request(self, request):
        if self._scheduler.meter:
            self._scheduler.meter.arrived(request)
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._scheduler.take(scheduler_output)

    def update_connector_output(self, connector_output):
        moved = connector_output.kv_connector_worker_meta
        if moved is not None:
            self._scheduler.ranks.update(moved.rows)
        self._scheduler.heard(connector_output)

    def request_finished(self, request, block_ids):
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        return self._scheduler.finished(request, block_ids)

    # ---- worker ----

    def register_kv_caches(self, kv_caches):
        self._worker.register(kv_caches)

    def get_handshake_metadata(self):
        return Handshake(self._worker.told())

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return bool(extra_config.get("layerwise", False))

    def handle_preemptions(self, kv_connector_metadata):
        self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        self._worker.take(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name):
        """Loads are not part of the forward pass."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        if self._layerwise:
            self._worker.layer_saved(self._get_connector_metadata(),
                                     extract_layer_index(layer_name))

    def wait_for_save(self):
        self._worker.saved()

    def get_finished(self, finished_req_ids):
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids):
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received,
                                          failed_recving=failed)

    def build_connector_worker_meta(self):
        row = self._worker.moved()
        return Rows({(self._worker.stage, self._worker.ranks.rank): row}) if row else None

    def shutdown(self):
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # ---- metrics ----

    def get_kv_connector_stats(self):
        return self._worker.stats() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return KvdStats() if data is None else KvdStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
