# SPDX-License-Identifier: Apache-2.0
"""SGLang's manager, sender and receiver on kvd's rooms.

A request is a room; its number is SGLang's bootstrap_room, on all ranks. Decode opens a receiving
room, prefill a sending one; the daemons connect by the entry of a prefill rank in GET /route:
{endpoint, pool, rank} and the server's secret, from which each room's ticket is derived. All other
information that SGLang's backends exchange next to the bytes (pages, prefix, progress, end, abort)
is sent by the daemons, so there is no listener here.

SGLang raises for a state that its queue does not know, and frees pages as soon as it sees Failed.
So a room's state is limited to the states of its queue, Failed is reported when no byte can move
any more, and abort() of a sender that has posted chunks waits for that: SGLang reuses the pages at
once."""
import functools
import logging
import re
import secrets
import threading
import time

import numpy as np
import requests
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (CommonKVManager, CommonKVReceiver,
                                                   CommonKVSender)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import (get_device, get_disagg, get_parallel, get_serving,
                                        linear_attn_tp_size)

from .. import place
from ..client import Client
from ..engine import Desk
from ..layout import format_of
from ..records import LINE, META, Slots
from ..rooms import FAILED, RECV, SUCCESS, Source, View
from ..route import row_of, secret_of, ticket_of
from . import pools
from .slots import Rows

logger = logging.getLogger("kvd.sglang")
NAME_MAX = 63  # of a pool
STILL_S = 30.0  # until a sender's room must have ended, before its pages are reused
STILL_LATE_S = 1.0
ABORT_S = 0.005  # of a receiver's abort, so that the next poll sees its result
MIRROR_S = 0.002
LOOK_S = 0.5
PREFIX_S = 1.0
ABORTED = "Aborted by AbortReq."
ELSEWHERE = "it failed on another rank of the engine"
# The other side has changed: its cached description is fetched again.
LOST = ("ESESSION", "EPEER", "ERESTART", "EAUTH", "ENOTFOUND", "ETIMEOUT", "ETRANSPORT")
GONE = ("ESESSION", "EPEER", "ERESTART")


# ---- refused options -------------------------------------------------------------------

def gates(args, parallel, disagg):
    """(refused, option, remedy) of options that this backend does not support."""
    yield parallel.attn_dcp_size > 1, "decode context parallelism", "--dcp-size 1"
    yield getattr(args, "enable_hisparse", False), "HiSparse", "drop --enable-hisparse"
    yield getattr(args, "enable_unified_memory", False), "unified memory", \
        "drop --enable-unified-memory"
    yield parallel.enable_kv_cache_sharding, "KV cache sharding", \
        "drop --enable-kv-cache-sharding"
    yield parallel.enable_dsa_cache_layer_split, "DSA cache layer split", \
        "drop --enable-dsa-cache-layer-split"
    yield parallel.enable_cp_tp_group_sharing, "CP-TP group sharing", \
        "drop --enable-cp-tp-group-sharing"
    yield disagg.disaggregation_decode_allocation_policy != "early", \
        "deferred decode allocation", "--disaggregation-decode-allocation-policy early"
    yield getattr(args, "enable_pd_role_switch", False), "role switching", \
        "drop --enable-pd-role-switch"
    yield envs.SGLANG_DISAGG_STAGING_BUFFER.get(), "staging buffers", \
        "unset SGLANG_DISAGG_STAGING_BUFFER (kvd cuts heads itself)"
    yield envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get() and \
        parallel.attn_cp_size > 1, "transfer by all context-parallel ranks", \
        "unset SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
    yield envs.SGLANG_RUST_SERVER.get() and parallel.attn_dp_size > 1, \
        "the Rust server with DP attention", "unset SGLANG_RUST_SERVER"
    yield envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() == "INTRA_NODE_NVLINK", \
        "metadata buffers on a GPU", "unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL"


def refuse_unsupported(args, mode, hybrid_mla):
    parallel, device = get_parallel(), get_device().device
    for refused, what, remedy in gates(args, parallel, get_disagg()):
        if refused:
            raise ValueError("kvd.sglang: %s is not supported; %s" % (what, remedy))
    if device not in ("cpu", "cuda") or torch.version.hip:  # ROCm's device is "cuda", too
        raise ValueError("kvd.sglang: memory of device %r is not supported, only of cuda and "
                         "cpu; use another transfer backend"
                         % ("hip" if torch.version.hip else device))
    if mode == DisaggregationMode.DECODE and parallel.pp_size > 1:
        raise ValueError("kvd.sglang: pipeline parallelism on decode is not supported; "
                         "--pp-size 1 there (prefill may have more)")
    if hybrid_mla and parallel.attn_cp_size > 1:
        raise ValueError("kvd.sglang: context parallelism with a hybrid MLA model is not "
                         "supported; --attn-cp-size 1")


def warn_unused(args):
    """Warn about options without effect. args: KVArgs."""
    if args.ib_device:
        logger.warning("--disaggregation-ib-device %s has no effect: the daemon chooses its rails "
                       "(verbs_rails of kvd.conf, UCX_NET_DEVICES of its environment)",
                       args.ib_device)


# ---- the manager -----------------------------------------------------------------------

class KVManager(CommonKVManager):
    supports_deferred_decode_kv_release = True

    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        hybrid = getattr(args, "is_hybrid_mla_backend", False)
        refuse_unsupported(server_args, disaggregation_mode, hybrid)
        warn_unused(args)
        self.mla = bool(is_mla_backend or hybrid)
        pools.check(args, self.mla)
        self.kv_args = args
        self.is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        role = "prefill" if self.is_prefill else "decode"
        self.client = Client(client="sglang", role=role)
        self.desk, self.thread = Desk(self.client), threading.get_ident()
        self.gpu = get_device().device == "cuda"
        if self.gpu and self.is_prefill:
            self.desk.follow_cuda()
        self.has_aux = not self.is_prefill or args.pp_rank == get_parallel().pp_size - 1
        checksum = getattr(server_args, "disaggregation_enable_kv_checksum", False)
        self.rows = Rows(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens,
                         -2 if checksum else -1)
        # aborted rooms keep theirs until they have ended
        self.slots = Slots(2 * self.rows.count + 16, self.rows.record_bytes)
        self.secret, self._regions, self._made, self.senders = None, {}, {}, set()
        self.mirror_lock = threading.Lock()
        self.pool_name = pool_name(server_args, args, role)
        self.cache_format = cache_format(server_args, args)
        self.register_buffer_to_engine()
        self.published_endpoint, self._look_s = self.client.endpoint, 0.0
        self.place = self._place(server_args, args)
        if self.place:
            self.place.keep()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # unused
        if not self.is_prefill:
            tell_lengths()
            self.bootstrap_timeout = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
            self._start_heartbeat_checker_thread()
        elif self.pp_size > 1:
            threading.Thread(target=self._mirror, name="kvd-mirror", daemon=True).start()

    def _place(self, server_args, args):
        """Publish in the cluster's directory, if KVD_GROUP names a group."""
        parallel = get_parallel()
        return place.from_environment(
            self.client, "sglang",
            {"tp": (parallel.attn_tp_rank, parallel.attn_tp_size),
             "pp": (args.pp_rank, parallel.pp_size)},
            getattr(server_args, "disaggregation_bootstrap_port", None) if self.is_prefill
            else None,
            pool=self.pool_name, model=str(getattr(server_args, "model_path", "") or "")[-127:])

    # ---- memory ----

    def register_buffer_to_engine(self):
        """Also after deregister_buffer_to_engine(), when the memory was restored."""
        if self._regions:
            return
        args = self.kv_args
        take = self.client.register_gpu if self.gpu else self.client.register_address
        lists = [(args.kv_data_ptrs, args.kv_data_lens)]
        lists += zip(args.state_data_ptrs, args.state_data_lens)
        for ptrs, lens in lists:
            for ptr, nbytes in zip(ptrs, lens):
                if (ptr, nbytes) not in self._regions:
                    self._regions[ptr, nbytes] = take(ptr, nbytes)
        self._regions[None] = self.client.register(self.slots.memory)
        if self.is_prefill:
            self.pool_of(None if self.mla else args.total_kv_head_num)

    def deregister_buffer_to_engine(self):
        """The engine releases its memory: no transfer may access it after this."""
        for handle in list(self.desk.live.values()):
            handle.stop("the engine releases its memory")
            if not handle.wait_still(STILL_S):
                raise RuntimeError("kvd.sglang: room %d still moves after %g s; the memory is "
                                   "not released" % (handle.number, STILL_S))
        for _, pool in self._made.values():
            pool.unregister()
        for region in self._regions.values():
            region.unregister()
        self._made.clear()
        self._regions.clear()

    def pool_of(self, heads):
        """(buffers, pool) for a model with so many heads."""
        if heads in self._made:
            return self._made[heads]
        args, parallel = self.kv_args, get_parallel()
        size, rank = parallel.attn_tp_size, parallel.attn_tp_rank
        state = linear_attn_tp_size()
        ranks = pools.Ranks(size, rank, state, args.engine_rank % state,
                            args.pp_rank * size + rank)
        slots = (self.slots.count, self.slots.record_bytes) if self.has_aux else None
        made = pools.build(args, ranks, heads=heads, mla=self.mla,
                           start_layer=args.prefill_start_layer if self.is_prefill else 0,
                           pp_size=parallel.pp_size, slots=slots, cache=self.cache_format)
        regions = [self._regions[None if ptr is None else (ptr, nbytes)]
                   for ptr, nbytes in made.parts]
        name = self.pool_name if self.is_prefill else "%s.h%s" % (self.pool_name, heads or 0)
        self._made[heads] = made, self.client.pool(made.layout, regions, name=name)
        return self._made[heads]

    # ---- description of prefill, for decode ----

    def row(self):
        """Entry of this prefill rank in GET /route."""
        (heads, (made, _)), = self._made.items()
        return {"endpoint": self.published_endpoint, "pool": self.pool_name,
                "rank": made.layout.rank, "heads": heads, "views": sorted(made.layout.views),
                "aux": self.slots.record_bytes if self.has_aux else None,
                "states": [pools.kind_of(s) for s in self.kv_args.state_types]}

    def _register_topology_row(self, url, payload):
        """SGLang's registration, with the entry; the reply has the secret."""
        payload = dict(payload, kvd=self.row())
        self._put = url, payload
        for attempt in range(5):
            try:
                answer = requests.put(url, json=payload, timeout=5)
                if answer.status_code == 200:
                    self.secret = secret_of(answer.json().get("kvd"))
                    return
                words = "HTTP %d: %s" % (answer.status_code, answer.text[:200])
            except (requests.RequestException, ValueError, AttributeError) as error:
                words = str(error)
            logger.warning("bootstrap server %s: %s", url, words)
            if attempt < 4:
                time.sleep(min(2 ** attempt, 8))
        raise RuntimeError("kvd.sglang: cannot register at the bootstrap server %s: %s. It must "
                           "belong to a prefill server with --disaggregation-transfer-backend kvd"
                           % (url, words))

    def look_at_endpoint(self):
        """A restarted daemon may have another address: update the bootstrap server."""
        now = time.monotonic()
        if now < self._look_s + LOOK_S:
            return
        self._look_s = now
        if self.client.lost:
            self.desk.kvd.poll()
        if self.place:
            self.place.keep()
        endpoint = self.client.endpoint
        if endpoint != self.published_endpoint:
            self.published_endpoint = endpoint
            threading.Thread(target=self._register_topology_row, args=self._put,
                             daemon=True).start()

    def match(self, info, infos):
        """(sources, buffers, pool, views of both sides, secret); ValueError has the first
        mismatch."""
        rows = [row_of(i) for i in infos]
        first = rows[0]
        here, there = self.attn_tp_size, info.attn_tp_size
        if max(here, there) % min(here, there):
            raise ValueError("prefill has %d tensor-parallel ranks, decode %d: one must divide "
                             "the other" % (there, here))
        if (first["heads"] is None) != self.mla:
            raise ValueError("only one side has an MLA cache: are the models "
                             "the same?")
        own = [pools.kind_of(s) for s in self.kv_args.state_types]
        if first["states"] != own:
            raise ValueError("prefill has state %s, decode %s: are the models and options the "
                             "same?" % (first["states"], own))
        if here != there:
            uncut = pools.uncut(self.kv_args, first["heads"], self.mla)
            if uncut:
                raise ValueError("prefill has %d tensor-parallel ranks, decode %d: state %s "
                                 "cannot be split; use the same --tp-size"
                                 % (there, here, ", ".join(uncut)))
        for row in rows:
            if row["aux"] not in (None, LINE, self.slots.record_bytes):
                raise ValueError(
                    "metadata records have %d bytes on prefill and %d on decode: set "
                    "--disaggregation-enable-kv-checksum, speculative decoding and "
                    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK to equal values" % (row["aux"],
                                                                 self.slots.record_bytes))
        made, pool = self.pool_of(first["heads"])
        sources = [Source(r["endpoint"], r["pool"], None, r["rank"]) for r in rows]
        return sources, made, pool, {v for r in rows for v in r["views"]}, first["secret"]

    # ---- rooms ----

    def is_abort_release_safe(self, bootstrap_room, required_acks):
        """No page of this room is written any more."""
        return self.desk.still(RECV, bootstrap_room)

    def _mirror(self):
        """Pipeline stages publish their states in SGLang's store."""
        while True:
            time.sleep(MIRROR_S)
            for sender in list(self.senders):
                shown = sender.peek()
                with self.mirror_lock:
                    if shown != sender.mirrored and sender in self.senders:
                        sender.mirrored = shown
                        self.update_status(sender.bootstrap_room, shown)


def tell_lengths():
    """SGLang passes pages to a receiver, and SGLang's prefill fills all of them. Another engine
    has only the prompt's tokens: a receiver learns here how many there are."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    create = DecodePreallocQueue._create_receiver_and_enqueue
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def told(queue, req, *args, **kwargs):
        made = create(queue, req, *args, **kwargs)
        made.kv_receiver.prompt_tokens = len(req.origin_input_ids)
        return made
    DecodePreallocQueue._create_receiver_and_enqueue = told


def cache_format(server_args, args):
    """Format of the cache's bytes; "auto" is the model's own."""
    told = args.kv_cache_dtype_str
    return format_of(ModelConfig.from_server_args(server_args).dtype if told == "auto" else told)


def pool_name(server_args, args, role):
    """A name unique in a daemon, also if engines of several network namespaces have the same
    port: decode requests a pool by name and rank."""
    model = re.sub(r"[^A-Za-z0-9_-]", "-", str(server_args.model_path).rstrip("/"))
    port = get_disagg().disaggregation_bootstrap_port if role == "prefill" else \
        get_serving().port
    tail = ".%s.%s%d.dp%d.%d.%s" % (args.kv_cache_dtype_str, role[0], port,
                                    get_parallel().attn_dp_rank or 0, args.system_dp_rank or 0,
                                    secrets.token_hex(4))
    return model[-(NAME_MAX - 8 - len(tail)):] + tail


def indices(values):
    """Page or entry numbers in SGLang's form."""
    if isinstance(values, (list, tuple)):
        values = np.concatenate([np.asarray(v).ravel() for v in values]) if values else []
    return np.asarray(values).ravel().astype(np.int64)


def state_views(made, state_indices, base, wanted=None):
    """Both sides have equal lists; entry k of one is token base + k of its view."""
    views = {}
    for name, listed in zip(made.states, state_indices or ()):
        if name is None or listed is None or wanted is not None and name not in wanted:
            continue
        numbers = indices(listed)
        if len(numbers):
            views[name] = View(numbers, base)
    return views


# ---- prefill ---------------------------------------------------------------------------

class KVSender(CommonKVSender):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room,
                 req_has_disagg_prefill_dp_rank=False):
        self._room, self._started, self._seq, self._ready = None, False, 0, False
        self._version, self._seen, self._last = mgr.desk.version, None, None
        self.mirrored = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if mgr.is_dummy_cp_rank or \
                mgr.request_status.get(bootstrap_room) == KVPoll.Failed:
            return
        mgr.look_at_endpoint()
        _, (_, pool) = next(iter(mgr._made.items()))
        self._room = mgr.desk.send(bootstrap_room, pool, open_s=mgr.bootstrap_timeout,
                                   ticket=ticket_of(mgr.secret, bootstrap_room))
        if mgr.pp_size > 1:
            mgr.senders.add(self)

    @property
    def supports_host_tensor_indices(self):
        """Page numbers may arrive from the GPU later, with indices_event."""
        return self.kv_mgr.gpu

    # ---- state ----

    def poll(self):
        version = self._version()
        if version == self._seen:
            return self._last
        room = self._room
        if room is None or self.conclude_state is not None:
            return super().poll()
        state = room.look()
        if state in (FAILED, SUCCESS):
            return self._conclude(state)
        self._last = self._moving(state)
        if self._ready or state != KVPoll.WaitingForInput:
            self._seen = version
        return self._last

    def _moving(self, state):
        """The bootstrap queue and parked requests know 0, 1, 2; the inflight queue 0, 2, 3, 4."""
        if self._started:
            return max(state, KVPoll.WaitingForInput)
        if not self._ready and state == KVPoll.WaitingForInput:
            self._ready = self._room.first_token() is not None
        elif not self._ready:
            self.kv_mgr.look_at_endpoint()
        return KVPoll.WaitingForInput if self._ready else KVPoll.Bootstrapping

    def poll_pp_consensus(self):
        """For the first stage: the lowest state of all stages."""
        own = self.poll()
        if self._room is None or own == KVPoll.Failed:
            return own
        self.kv_mgr.update_status(self.bootstrap_room, own)
        return self.kv_mgr.check_status_pp_consensus(self.bootstrap_room)

    def peek(self):
        """For the other stages, from another thread."""
        state = self._room.peek()
        if not self._started and state != FAILED:
            return min(state, KVPoll.WaitingForInput)
        return state

    def _conclude(self, state):
        mgr, room = self.kv_mgr, self._room
        if state == SUCCESS:
            self.conclude_state = KVPoll.Success
            if self._transfer_start_time is not None:
                self._transfer_metric.transfer_latency_s = \
                    room.ended_s - self._transfer_start_time
        else:
            with mgr.failure_lock:
                mgr.failure_records.setdefault(self.bootstrap_room, lost_words(
                    room, "decode instance"))
            self.conclude_state = KVPoll.Failed
        mgr.update_status(self.bootstrap_room, self.conclude_state)
        self.trace_ctx.trace_req_finish()
        return self.conclude_state

    # ---- the request ----

    def pop_decode_prefix_len(self):
        if self._room is None:
            return super().pop_decode_prefix_len()
        until = time.monotonic() + PREFIX_S  # another stage's poll may have passed it
        while self._room.first_token() is None and self._room.end is None and \
                time.monotonic() < until:
            self.kv_mgr.desk.turn(True)
            time.sleep(50e-6)
        return self._prefix()

    def _prefix(self):
        """Tokens that decode has, in whole pages: another engine's pages may be smaller."""
        first = self._room.first_token() or 0
        return first - first % self.kv_mgr.kv_args.page_size

    def init(self, num_kv_indices, aux_index=None):
        super().init(num_kv_indices, aux_index)
        self._started, self._seen = True, None

    def send(self, kv_indices, state_indices=None, num_kv_tokens=None, indices_event=None):
        if self._room is None:
            return super().send(kv_indices, state_indices, num_kv_tokens, indices_event)
        if self.conclude_state is not None:
            return None
        kv_indices, at, last, skip = self._prepare_send_indices(kv_indices, state_indices)
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if skip:
            return None
        if self._transfer_start_time is None:
            self._transfer_start_time = time.monotonic()
        mgr, room = self.kv_mgr, self._room
        made = next(iter(mgr._made.values()))[0]
        base = self._prefix()

        def views():
            listed = {}
            if len(kv_indices):
                pages = View(indices(kv_indices), base + at.start * mgr.kv_args.page_size)
                listed = {v: pages for v in ("kv", "draft") if v in made.layout.views}
            if last:
                listed.update(state_views(made, state_indices, base))
            if aux is not None:
                listed[META] = [aux]
            return listed
        aux = self._fill_aux() if last else None
        room.send(views() if indices_event is None else views, self._seq, last, aux, (event,),
                  indices_event)
        self._seq += 1
        self._record_transfer_indices(kv_indices, state_indices if last else None)
        return None

    def _fill_aux(self):
        mgr, room = self.kv_mgr, self._room
        if not mgr.has_aux or room.end is not None:
            return None
        slot = mgr.slots.take()
        if slot is None:
            room.stop("no free metadata record: %d aborted rooms have not ended"
                      % mgr.slots.count)
            return None
        room.on_end = lambda: mgr.slots.give(slot)
        mgr.rows.write(self.aux_index, self.bootstrap_room, mgr.slots.record(slot))
        return slot

    # ---- its end ----

    def _halt(self, reason):
        """Wait until the daemon reads no page of it, if chunks were posted."""
        room = self._room
        room.stop(reason)
        if not room.given or room.wait_still(STILL_LATE_S):
            return
        logger.warning("room %d: waiting for the daemon to release its pages", room.number)
        if not room.wait_still(STILL_S):
            logger.error("room %d: still active after %g s; its pages are reused",
                         room.number, STILL_S)

    def abort(self):
        if self._room is None:
            super().abort()
            return
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.setdefault(self.bootstrap_room, ABORTED)
        self._halt(ABORTED)
        if self.conclude_state == KVPoll.Success:
            self.conclude_state = KVPoll.Failed
        self.trace_ctx.abort(abort_info={"reason": "Aborted"})
        self.trace_ctx.trace_req_finish()

    def failure_exception(self):
        if self._room is not None:
            self._halt(ELSEWHERE)
        super().failure_exception()

    def clear(self):
        if self._room is not None:
            self._room.stop("aborted by the engine")
        with self.kv_mgr.mirror_lock:  # a cleared room stays cleared
            self.kv_mgr.senders.discard(self)
            super().clear()


def lost_words(room, who):
    return "Lost connection with %s: %s" % (who, room.reason) if room.code in GONE else \
        room.reason


# ---- decode ----------------------------------------------------------------------------

class KVReceiver(CommonKVReceiver):
    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        self._room, self._bound, self._slot, self._aux_index = None, False, None, None
        self._asked = False  # abort requested by another thread
        self._version, self._seen, self._last = mgr.desk.version, None, None
        self.prompt_tokens = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def _register_kv_args(self):
        return True  # the daemons do

    def init(self, prefill_dp_rank):
        super().init(prefill_dp_rank)
        if self.conclude_state is not None:
            return
        mgr = self.kv_mgr
        try:
            sources, self._made, pool, self._views, secret = mgr.match(self.prefill_info,
                                                                      self.bootstrap_infos)
        except Exception as error:
            self._refuse("%s" % error)
            return
        self._room = mgr.desk.recv(
            self.bootstrap_room, pool, sources, receivers=self.required_dst_info_num,
            open_s=mgr.bootstrap_timeout,
            ticket=ticket_of(secret, self.bootstrap_room))

    def _refuse(self, words):
        """Fail without a room."""
        mgr = self.kv_mgr
        mgr.record_failure(self.bootstrap_room, words)
        mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        self.invalidate_cached_bootstrap_infos()

    # ---- state ----

    def poll(self):
        if self._version() == self._seen and not self._asked:
            return self._last
        return super().poll()

    def _poll(self):
        room = self._room
        if room is None or self.conclude_state is not None:
            return super()._poll()
        if self._asked:
            self._asked = False
            self._stop(ABORTED)
        version, state = self._version(), room.look()
        if state in (FAILED, SUCCESS):
            return self._conclude(state)
        self._give_up_late()
        self._seen, self._last = version, KVPoll.WaitingForInput if not self._bound else \
            min(max(state, KVPoll.WaitingForInput), KVPoll.Transferring)
        return self._last

    def _give_up_late(self):
        elapsed = time.time() - self.init_time if self._bound else 0
        if elapsed >= self.kv_mgr.waiting_timeout and not self._room.stopped:
            self._room.stop("Request %d timed out after %.1fs in KVPoll.WaitingForInput "
                            "(SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
                            % (self.bootstrap_room, elapsed))
            self.abort_notified = True

    def _conclude(self, state):
        mgr, room = self.kv_mgr, self._room
        words = None
        if state == SUCCESS and self._slot is not None:
            words = mgr.rows.read(self._aux_index, self.bootstrap_room,
                                  mgr.slots.record(self._slot))
            self._give_slot()
        if state == FAILED or words:
            with mgr.failure_lock:
                mgr.failure_records.setdefault(self.bootstrap_room, words or lost_words(
                    room, "prefill instance (bootstrap_addr: %s)" % self.bootstrap_addr))
            if room.code in LOST:
                self.invalidate_cached_bootstrap_infos()
                mgr.prefill_info_table.pop(self.bootstrap_addr, None)
            self.conclude_state = KVPoll.Failed
        else:
            self.conclude_state = KVPoll.Success
        mgr.update_status(self.bootstrap_room, self.conclude_state)
        return self.conclude_state

    # ---- the request ----

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None,
                      decode_prefix_len=None, destination=KVTransferDestination.DEVICE,
                      device_kv_indices=None):
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("kvd.sglang: host destinations and HiSparse are not "
                                      "supported")
        mgr, room = self.kv_mgr, self._room
        if room is None:
            if self.conclude_state is None:
                self._refuse("Could not fetch prefill parallel info from bootstrap_addr: %s"
                             % self.bootstrap_addr)
            return
        self.init_time, self._bound = time.time(), True
        base = int(decode_prefix_len or 0)
        # from an engine without `meta`: the tokens that exist, not whole pages
        tokens = (base, self.prompt_tokens) \
            if len(kv_indices) and META not in self._views else None
        pages = View(indices(kv_indices), base, tokens)
        have = self._made.layout.views
        views = {v: pages for v in ("kv", "draft") if v in have and v in self._views}
        views.update(state_views(self._made, state_indices, base, self._views))
        self._aux_index, self._slot = aux_index, mgr.slots.take()
        if self._slot is None:
            room.stop("no free metadata record: %d aborted rooms have not ended"
                      % mgr.slots.count)
            return
        mgr.slots.record(self._slot)[:] = 0
        if META in self._views:  # else the record has only the first token
            views[META] = [self._slot]
        try:
            room.bind(views, self._slot)
        except (TypeError, ValueError) as error:
            room.stop(str(error))

    # ---- its end ----

    def _give_slot(self):
        """Called once its slot is not written any more."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        mgr, room = self.kv_mgr, self._room
        if room.end is None:
            room.on_end = lambda: mgr.slots.give(slot)
        else:
            mgr.slots.give(slot)

    def _stop(self, reason):
        self._room.stop(reason)
        self.abort_notified = True

    def ensure_abort_notified(self, *, force_arm=False):
        if self._room is not None:
            self._stop(ELSEWHERE)

    def abort(self):
        if self._room is None:
            if self.conclude_state != KVPoll.Failed:
                self._refuse(ABORTED)
            return
        if self.conclude_state == KVPoll.Failed:
            return
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.setdefault(self.bootstrap_room, ABORTED)
        if threading.get_ident() != self.kv_mgr.thread:  # a recompute's executor
            self._asked = True
            return
        self._stop(ABORTED)
        if self.conclude_state == KVPoll.Success:  # no byte moves
            self.conclude_state = KVPoll.Failed
        self._room.wait_still(ABORT_S)

    def failure_exception(self):
        room = self._room
        if room is not None:
            room.stop(ELSEWHERE)
            if not self.kv_mgr.enable_deferred_decode_kv_release and \
                    not room.wait_still(STILL_S):  # the pages are freed at once
                logger.error("room %d: still active after %g s; its pages are reused",
                             room.number, STILL_S)
        super().failure_exception()

    def _clear(self):
        if self._room is not None:
            self._room.stop("aborted by the engine")
            self._give_slot()
        super()._clear()
