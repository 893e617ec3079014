# SPDX-License-Identifier: Apache-2.0
"""A rank's rooms, on its engine's thread."""
import logging
import re
import secrets
from collections import namedtuple

from ..client import Client
from ..engine import Desk
from ..place import Place
from ..records import LINE, Slots, views_add
from ..rooms import FAILED, PULL, SUCCESS, TRANSFERRING
from . import pools
from .marks import Marks
from .params import sources_of
from .push import Push
from .stats import KvdStats

logger = logging.getLogger("vllm.kvd")
NAME_MAX = 63  # of a pool
ID_MAX = 128  # of a request
OPEN_S = 30.0  # for prefill's daemon and its room
OFFER_S = 10.0  # for an offer, which prefill makes in its next step
CLOSE_S = 2.0
ENDPOINT_S = 0.25  # of a daemon that was restarted
RECORDS = 1024  # of pushed requests that have finished here, at least

Ranks = namedtuple("Ranks", "size rank")


class Pull:
    """waits: report that vLLM waits for; until: deadline of its offer."""

    def __init__(self, handle):
        self.handle, self.bound, self.dropped, self.waits = handle, False, False, None
        self.until = None


class Worker:
    def __init__(self, config, kv_cache_config, lease_s, pushes=False, place=None):
        """pushes: this engine is prefill, and has a bootstrap server. place: its group, worker and
        url in the cluster's directory, if configured."""
        self.config, self.caches, self.lease_s = config, kv_cache_config, lease_s
        self.client = self.desk = self.pool = self.slots = None
        self.marks = self.mark = None
        self.with_push, self.offers, self.pulls, self.pushes = pushes, {}, {}, {}
        self._stats, self._seen, self._endpoint_s = None, None, 0.0
        self._place_given, self.place = place or {}, None

    # ---- memory ----

    def register(self, kv_caches):
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
        parallel = self.config.parallel_config
        self.ranks = Ranks(parallel.tensor_parallel_size, get_tensor_model_parallel_rank())
        stage = get_pp_group()
        made = self.made = build(self.config, self.caches, kv_caches, self.ranks,
                                 stage.rank_in_group * self.ranks.size + self.ranks.rank)
        producer = self.config.kv_transfer_config.kv_role == "kv_producer"
        self.client = Client(client="vllm", role="prefill" if producer else "decode")
        self.desk = Desk(self.client)
        gpu = next(iter(kv_caches.values())).is_cuda
        self.marks = self.mark = Marks(self.client, gpu)
        # this runner has zeroed reused blocks before it calls begin()
        self.zeroed = self.caches.needs_kv_cache_zeroing and self.config.use_v2_model_runner
        take = self.client.register_gpu if gpu else self.client.register_address
        regions = [take(*part) for part in made.parts]
        if self.with_push and stage.is_last_rank:
            self.slots = Slots(max(RECORDS, 4 * self.config.scheduler_config.max_num_seqs), LINE)
            views_add(made.layout, made.layout.buffer(self.slots.memory.nbytes),
                     self.slots.count, LINE)
            regions.append(self.client.register(self.slots.memory))
        if self.with_push:
            self.mark()  # fails here if the GPU does not support it
        model = re.sub(r"[^A-Za-z0-9_-]", "-", str(self.config.model_config.model).rstrip("/"))
        tail = "." + secrets.token_hex(4)
        self.name = model[-(NAME_MAX - len(tail)):] + tail
        self.pool = self.client.pool(made.layout, regions, name=self.name)
        self.stage, self.endpoint = stage.rank_in_group, self.client.endpoint
        if self._place_given.get("group"):
            self.place = self._place(parallel)
            self.place.keep()

    def _place(self, parallel):
        ranks = {"tp": (self.ranks.rank, self.ranks.size),
                 "pp": (self.stage, parallel.pipeline_parallel_size),
                 "dp": (getattr(parallel, "data_parallel_rank", 0),
                        getattr(parallel, "data_parallel_size", 1))}
        told = self._place_given
        return Place(self.client, told["group"], told["worker"], ranks, url=told["url"],
                     pool=self.name, engine="vllm",
                     model=str(self.config.model_config.model)[-127:])

    def told(self):
        """The row of this rank (route.py)."""
        heads = None if self.config.model_config.use_mla else \
            self.config.model_config.get_total_num_kv_heads()
        return {"endpoint": self.client.endpoint, "pool": self.name,
                "rank": self.made.layout.rank, "heads": heads,
                "views": sorted(self.made.layout.views),
                "states": ["vllm " + g.name for g in self.made.groups if g and g.kind != "kv"],
                "layers": self.made.layers(), "aux": LINE if self.slots else None}

    def moved(self):
        """The row, once its daemon has been restarted at another port."""
        now = self.desk.clock()
        if now < self._endpoint_s:
            return None
        self._endpoint_s, endpoint = now + ENDPOINT_S, self.client.endpoint
        if self.place:
            self.place.keep()
        if endpoint == self.endpoint:
            return None
        self.endpoint = endpoint
        return self.told()

    # ---- a step ----

    def begin(self, step):
        """Before the step's forward pass: everything that does not need it, because vLLM may call
        take() after it, which on a CPU is a pass later."""
        if step.load and self.place:
            self.place.load(step.load)
        for name in step.preempted:
            if name in self.pushes:
                self.pushes[name].settle()
        for name, room, ticket in step.pushes:
            handle = self.desk.send(room, self.pool, open_s=self.lease_s, ticket=ticket,
                                    request_id=shown(name))
            self.pushes[name] = Push(self, name, handle)
        for name, blocks, end in step.computed:
            if name in self.pushes:
                self.pushes[name].computed(blocks, end)
        mark = Mark(self)
        for name, blocks, end, first in step.ends:
            if name in self.pushes:
                self.pushes[name].finish(blocks, end, first)
                self.pushes[name].advance(mark)
        for name, room, ticket, blocks, tokens in step.offers:
            views = self._views(blocks, lambda g, b: g.offered(b, tokens))
            self.offers[name] = self.desk.offer(
                room, self.pool, views, ticket=ticket, lease_ms=int(self.lease_s * 1000),
                request_id=shown(name), wait=mark())
        for name, why, waits in step.given_up:
            if name in self.pushes:
                self.pushes[name].give_up(why, waits)
        for name, remote in step.pulls:
            self._open(name, remote)
        for name, room, words in step.refused:
            if name in self.pulls:
                self.pulls[name].handle.stop(words)
            self.pulls[name] = Pull(self.desk.refused(PULL, room, words))
        for name, waits in step.drops:
            pull = self.pulls.get(name)
            if pull is not None:
                pull.dropped = True
                if waits:
                    pull.waits = "sent"
                pull.handle.stop("the request was aborted")
        if step.ends:  # of rooms that ended before
            self._seen = None

    def layer_saved(self, step, layer):
        """During the forward pass, after this layer."""
        mark = Mark(self)
        for name, _, _ in step.computed:
            if name in self.pushes:
                self.pushes[name].layer_saved(layer, mark)

    def take(self, step):
        """Copies of blocks for the pass have been enqueued. vLLM does not zero blocks that are
        loaded, and frees none that a step in flight may write."""
        for name, blocks, begin, end in step.binds:
            self._bind(name, blocks, begin, end)

    def saved(self):
        """The whole step has been enqueued."""
        mark = Mark(self)
        for push in self.pushes.values():
            push.advance(mark)

    def _views(self, blocks, view_of):
        """By name; a group without layers on this rank has none."""
        made = ((g.name, view_of(g, b)) for g, b in zip(self.made.groups, blocks) if g)
        return {name: view for name, view in made if view is not None}

    def _open(self, name, remote):
        try:
            sources, receivers = sources_of(remote, *self.ranks)
        except ValueError as error:
            handle = self.desk.refused(PULL, remote.room, str(error))
        else:
            way, open_s = (self.desk.recv, OPEN_S) if remote.push else (self.desk.pull, OFFER_S)
            handle = way(remote.room, self.pool, sources, receivers=receivers, open_s=open_s,
                         ticket=remote.ticket, request_id=shown(name))
        self.pulls[name] = Pull(handle)

    def _bind(self, name, blocks, begin, end):
        pull = self.pulls.get(name)
        if pull is None:
            return
        pull.bound, pull.until, views = True, self.desk.clock() + OFFER_S, {}
        if blocks:
            views = self._views(blocks, lambda g, b: g.wanted(b, begin, end))
            pull.waits = "received"
        pull.handle.bind(views)

    # ---- results ----

    def results(self):
        """(sent, received, failed) since the last call."""
        sent, received, failed = set(), set(), set()
        version = self.desk.version()
        if version == self._seen:
            return sent, received, failed
        self._seen = version
        for name, handle in list(self.offers.items()):
            if handle.look() in (FAILED, SUCCESS):
                del self.offers[name]
                sent.add(name)
                self._count_offer(name, handle)
        for name, push in list(self.pushes.items()):
            if push.ended:
                del self.pushes[name]
                if push.waits:
                    sent.add(name)
                self._count_offer(name, push.handle)
        for name, pull in list(self.pulls.items()):
            if not (pull.bound or pull.dropped):
                continue
            state = pull.handle.look()
            if state not in (FAILED, SUCCESS):
                if pull.bound and pull.handle.role == PULL and state < TRANSFERRING and \
                        self.desk.clock() > pull.until:
                    pull.handle.stop("prefill did not offer it within %g s" % OFFER_S)
                continue
            del self.pulls[name]
            self._count_pull(name, pull)
            if pull.waits == "sent":
                sent.add(name)
            elif pull.waits:
                received.add(name)
                if pull.handle.end == FAILED and not pull.dropped:
                    failed.add(name)
        return sent, received, failed

    def _count_offer(self, name, handle):
        if handle.end == FAILED:
            logger.warning("request %s: its cache was not sent to decode: %s", name, handle.reason)
            self._count(**{"expired" if handle.code == "ELEASE" else "failed": 1})

    def _count_pull(self, name, pull):
        handle = pull.handle
        if handle.end == FAILED:
            if not pull.dropped:
                logger.warning("request %s: its cache was not loaded: %s", name, handle.reason)
                self._count(failed=1)
        elif handle.bytes:
            self._count(bytes=handle.bytes, rows=handle.rows, seconds=handle.moved_us / 1e6)

    def _count(self, **values):
        self._stats = self._stats or KvdStats()
        for word, value in values.items():
            self._stats.add(word, value)

    def stats(self):
        """Since the last call; None: nothing."""
        told, self._stats = self._stats, None
        return told

    def close(self):
        """No transfer accesses the engine's memory after this."""
        if self.client is None:
            return
        others = [*self.pulls.values(), *self.pushes.values()]
        handles = list(self.offers.values()) + [other.handle for other in others]
        for handle in handles:
            handle.stop("the engine is shutting down")
        for handle in handles:
            handle.wait_still(CLOSE_S)
        self.marks.close()
        self.client.close()
        self.client = None


class Mark:
    """What a chunk waits for: the work enqueued so far. Created on first use, for all chunks of one
    position."""

    def __init__(self, worker):
        self._worker, self._made = worker, None

    def __call__(self):
        if self._made is None:
            self._made = self._worker.mark()
        return self._made


def shown(name):
    """A request's id in the form that the daemon accepts: clients may choose it."""
    return re.sub(r'[^!#-\[\]-~]', "?", name)[-ID_MAX:]


# ---- the pool --------------------------------------------------------------------------

def build(config, caches, kv_caches, ranks, rank):
    """Buffers, with the groups in the order of vLLM's."""
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import (FullAttentionSpec, MambaSpec, MLAAttentionSpec,
                                            SlidingWindowMLASpec, SlidingWindowSpec,
                                            UniformTypeKVCacheSpecs)
    known = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec,
             MambaSpec}
    made, counts = pools.Buffers(rank), dict.fromkeys(pools.KINDS, 0)
    heads = config.model_config.get_total_num_kv_heads()
    for group in caches.transfer_groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else \
            dict.fromkeys(group.layer_names, spec)
        names = [n for n in group.layer_names if n in kv_caches]
        if not names:
            made.groups.append(None)
            continue
        first = specs[names[0]]
        mamba = isinstance(first, MambaSpec)
        # exactly these classes: a derived one may store its blocks differently
        if not {type(specs[n]) for n in names} <= known or mamba and first.tp_replicated:
            pools.refuse("a cache of %s is not supported: use NixlConnector on kvd",
                         " and ".join(sorted({type(specs[n]).__name__ for n in names})))
        window = first.sliding_window if isinstance(
            first, (SlidingWindowSpec, SlidingWindowMLASpec)) else 0
        kind = "state" if mamba else "swa" if window else "kv"
        view = "%s%d" % (kind, counts[kind]) if kind != "kv" or counts[kind] else "kv"
        counts[kind] += 1
        authors = {} if mamba else {n: author_of(config, n, specs[n], kv_caches[n].shape[2])
                                    for n in names}
        whole = any(author is not None for author in authors.values())
        made.add(pools.Group(view, kind, spec.block_size,
                             *paging(kind, kv_caches[names[0]], caches, spec, whole), window,
                             first.num_speculative_blocks if mamba else 0), caches.num_blocks)
        for name in names:
            cache, one, layer = kv_caches[name], specs[name], extract_layer_index(name)
            if mamba:
                pools.state(made, made.groups[-1], layer, cache, one,
                            conv_split(one, ranks.size), ranks, groups_of(config, one))
                continue
            mla = isinstance(one, (MLAAttentionSpec, SlidingWindowMLASpec))
            pools.attention(made, made.groups[-1], layer, cache, one, None if mla else heads,
                            ranks, authors[name], config.cache_config.cache_dtype)
    return made


def author_of(config, name, spec, tokens):
    """A name for the writer of a layer's blocks (pools.py). tokens: of a kernel's block."""
    from vllm import __version__
    from vllm.platforms import current_platform
    cls = config.compilation_config.static_forward_context[name].get_attn_backend()
    backend = pools.OWN if getattr(cls, "token_rows", False) else cls.get_name()
    words = []
    if backend == "CPU_ATTN":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
        words = [_get_attn_isa(config.model_config.dtype, tokens, spec.head_size,
                               config.cache_config.cache_dtype)]
    elif current_platform.is_rocm():  # its backends tile blocks, some under other names
        words = ["rocm"]
    author = pools.author_of(backend, spec, *words)
    if author is None:
        return None
    author = "%s vllm=%s cache=%s" % (author, __version__, config.cache_config.cache_dtype)
    logger.info("layer %s: blocks are moved whole: %s", name, author)
    return author


def paging(kind, cache, caches, spec, whole):
    """(pages of a block, the request's tokens per token of the view)"""
    if kind == "state":
        return 1, 1
    ratio = max(cache.shape[0] // caches.num_blocks, 1)
    return ratio, spec.block_size // ratio if whole else 1


def groups_of(config, spec):
    """Number of groups of the model's B and C; models name it differently."""
    text = config.model_config.hf_text_config
    names = ("mamba_n_groups", "n_groups", "mamba_ngroups")
    return next((getattr(text, n) for n in names if hasattr(text, n)), None) \
        if spec.mamba_type.name == "MAMBA2" else None


def conv_split(spec, tp):
    from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
        derive_mamba_conv_split)
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    if not is_conv_state_dim_first():
        pools.refuse("the conv state must be stored by its dimensions: set "
                     "VLLM_SSM_CONV_STATE_LAYOUT=DS")
    return derive_mamba_conv_split(spec, tp)
