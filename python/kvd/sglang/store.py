# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache on the chunks of the node's daemon: host pages that outlive their engine.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvd", "module_path":
        "kvd.sglang.store", "class_name": "KvdStore", "interface_v1": 1}'

SGLang calls batch_exists() on its prefetch thread (and sometimes the scheduler's), batch_get_*() on
another, batch_set_*() on a third, and close() after these have ended. Ids are its page hashes;
ranks are in the layouts (store_pools.py), so another number of ranks can read these chunks.
kvd.stores.hicache implements the operations."""
import logging
import re
import secrets
import weakref
from collections import namedtuple

from . import check

check("store")  # before the imports below fail for a name that this SGLang lacks

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import (HiCacheStorage, PoolHitPolicy, PoolName,
                                                  PoolTransferResult)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_schedule, get_server_args, get_serving

from ..client import Client
from ..errors import Error
from ..layout import format_of
from ..stores.choice import Prices, model_of
from ..stores.space_client import CALL_S, SpaceClient
from ..stores.names import commit_of, rope_of, weights_of, word
from ..stores.hicache import LEASE_S, HiCache, pages_of, trailing
from . import metrics, store_pools

logger = logging.getLogger("kvd.sglang")
OPTIONS = ("kvd_socket", "model", "revision", "remote", "lease")
SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator",
           "file_storage_path")
# Load formats that read the weights from the model's own folder or repository.
FROM_MODEL = ("auto", "bitsandbytes", "dummy", "fastsafetensors", "gguf", "instanttensor",
              "layered", "mistral", "npcache", "pt", "safetensors", "sharded_state")
NAME_MAX = 63  # of a pool
REGISTER_S = 120.0  # for a host pool, which a daemon may have to pin
UPDATES = ("update_weights_from_disk", "update_weights_from_distributed",
           "update_weights_from_tensor", "update_weights_from_ipc", "begin_weight_update")
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater." \
    "SchedulerWeightUpdaterManager."
ADAPTERS = ("load_lora_adapter", "load_lora_adapter_from_tensors")
WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."

Named = namedtuple("Named", "pool model revision scheme rope tokens")
Named.__doc__ = "Names of a space; pool: SGLang's name of the host pool."

_stores = weakref.WeakSet()


# ---- refused options -------------------------------------------------------------------

def check_options(given):
    for name in set(given) - set(OPTIONS) - set(SGLANGS):
        raise ValueError("kvd.sglang: %s is not an option of the store (%s)"
                         % (name, ", ".join(OPTIONS)))
    if not given.get("interface_v1"):
        raise ValueError('kvd.sglang: set "interface_v1": 1 in '
                         "--hicache-storage-backend-extra-config")
    for name in ("kvd_socket", "model", "revision"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError("kvd.sglang: %s: %r is not a string" % (name, given[name]))
    for name, most in (("remote", 60), ("lease", 600)):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or
                                  not isinstance(value, (int, float)) or not 0 < value <= most):
            raise ValueError("kvd.sglang: %s: %r is not a number of seconds up to %d"
                             % (name, value, most))


def check_ranks(config):
    """config: HiCacheStorageConfig"""
    for refused, what, remedy in (
            (config.pp_size > 1, "pipeline parallelism", "--pp-size 1"),
            (config.attn_cp_size > 1, "context parallelism", "--attn-cp-size 1"),
            (config.dcp_size > 1, "decode context parallelism", "--dcp-size 1"),
            (config.should_split_heads, "tp_lcm_size", "drop it (kvd cuts heads itself)")):
        if refused:
            raise ValueError("kvd.sglang: %s is not supported by the store; %s" % (what, remedy))


# ---- names -----------------------------------------------------------------------------

def weights_word(args, model_config):
    """A name for the loaded weights. None: they have none."""
    if args.load_format not in FROM_MODEL:
        return None  # loaded from elsewhere
    return commit_of(getattr(model_config.hf_config, "_commit_hash", None), args.revision) or \
        weights_of(args.model_path)


def adapters_of(args):
    """[(adapter, its name or None)] of LoRA adapters that are given at the start: their ids, which
    are in the hashes, are derived from names and paths alone."""
    listed = args.lora_paths or []
    told = []
    for one in listed.values() if isinstance(listed, dict) else listed:
        name, path = (getattr(one, a, None) for a in ("lora_name", "lora_path"))
        if path is None:  # as on the command line
            name, _, path = str(one).rpartition("=")
        told.append(("%s=%s" % (name, path), weights_of(path)))
    return sorted(told)


def draft_of(args):
    """(the draft's path, its name or None); the name is "" if it is the model's own."""
    path = getattr(args, "speculative_draft_model_path", None) or args.model_path
    revision = getattr(args, "speculative_draft_model_revision", None)
    if path == args.model_path and revision in (None, args.revision):
        return path, ""
    return path, commit_of(None, revision) or weights_of(path)


def unnamed(what, path):
    logger.warning("kvd.sglang: cannot identify the weights of %s %s: no chunks are found or "
                   "put; set \"revision\" in --hicache-storage-backend-extra-config to a "
                   "text that is unique to these weights, or load a local folder", what, path)


def revision_of(args, model_config, given):
    """A name for the weights, and for other options that change KV without changing ids. given: the
    user's name for the weights. None: some of them have no name."""
    weights = given if given is not None else weights_word(args, model_config)
    adapters = adapters_of(args)
    missing = [("the model", args.model_path)] if weights is None else []
    missing += [("the adapter", what) for what, one in adapters if one is None and given is None]
    for what, path in missing:
        unnamed(what, path)
    if missing:
        return None
    words = ["weights=%s" % weights, "dtype=%s" % format_of(model_config.dtype)]
    for name, value in (("quantization", model_config.quantization),
                        ("kv", None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype),
                        ("adapters", adapters)):
        if value:
            words.append("%s=%s" % (name, value))
    for name in ("quantization_param_path", "modelopt_checkpoint_restore_path", "torchao_config",
                 "json_model_override_args", "model_impl", "modelopt_quant"):
        value = getattr(args, name, None)
        if value and value not in ("{}", "auto"):
            told = weights_of(value) if name.endswith("_path") else None
            words.append("%s=%s" % (name, told or value))
    if args.load_format == "dummy":
        words.append("dummy=%s" % args.random_seed)
    if get_serving().weight_version not in (None, "default"):
        words.append("version=%s" % get_serving().weight_version)
    return " ".join(words)


class Names:
    """Of all spaces of an engine."""

    def __init__(self, given, args):
        self.args, config = args, ModelConfig.from_server_args(args)
        self.heads = config.get_total_num_kv_heads()
        self.model = given.get("model") or args.model_path
        self.given = given.get("revision")
        self.revision = revision_of(args, config, self.given)
        self.rope = rope_of(config.hf_text_config, config.context_len)

    def of(self, pool, made):
        """Named, for the result of store_pools on a host pool. Its revision is None if the weights
        have no name."""
        revision = self.revision
        if revision is not None and (made.drafts or "draft" in pool):
            path, draft = draft_of(self.args)
            if draft is None and self.given is None:
                unnamed("the draft", path)
                revision = None
            else:
                revision += " draft=%s %s %s %s" % (
                    self.args.speculative_algorithm, path, draft,
                    getattr(self.args, "speculative_draft_model_quantization", None))
        return Named(pool, word(self.model), None if revision is None else word(revision),
                     word("sglang sha256 %d %s" % (made.page_size, pool)), word(self.rope),
                     made.page_size)


# ---- new weights -----------------------------------------------------------------------

def follow_updates():
    """Chunks named after the old weights must not be found with new ones, nor new ones be put
    under that name."""
    for name in UPDATES:
        if UPDATER + name not in HookRegistry._patched:
            HookRegistry.register(UPDATER + name, on_update, HookType.BEFORE)
    HookRegistry.apply_hooks()
    missing = [name for name in UPDATES if UPDATER + name not in HookRegistry._patched]
    if missing:
        raise RuntimeError("kvd.sglang: changes of weights cannot be observed: this SGLang has no "
                           "%s" % missing)


def follow_adapters(args, given):
    """An adapter that is loaded at run time may be another one with the name and path that its
    chunks are named after. The user's revision covers it, too."""
    if given.get("revision") is not None or not (getattr(args, "enable_lora", None) or
                                                 args.lora_paths):
        return
    for name in ADAPTERS:
        if WORKER + name not in HookRegistry._patched:
            HookRegistry.register(WORKER + name, on_update, HookType.BEFORE)
    HookRegistry.apply_hooks()
    if any(WORKER + name not in HookRegistry._patched for name in ADAPTERS):
        raise ValueError("kvd.sglang: cannot identify adapters that this SGLang loads at run "
                         "time: set \"revision\" in --hicache-storage-backend-extra-config, "
                         "and change it whenever an adapter of the same path is retrained")


def on_update(*args, **kwargs):
    for store in list(_stores):
        store.on_new_weights()


# ---- the time of a step ----------------------------------------------------------------

def follow_steps():
    """For prices: how long the engine takes to compute a token."""
    for name, hook, kind in (("run_batch", on_step, HookType.BEFORE),
                             ("process_batch_result", on_result, HookType.AFTER)):
        if SCHEDULER + name not in HookRegistry._patched:
            HookRegistry.register(SCHEDULER + name, hook, kind)
    HookRegistry.apply_hooks()


def on_step(scheduler, batch, *args, **kwargs):
    for store in list(_stores):
        if store.cache.prices is not None:
            store.cache.prices.began(batch.extend_num_tokens or 0)


def on_result(result, *args, **kwargs):
    for store in list(_stores):
        if store.cache.prices is not None:
            store.cache.prices.ended()


# ---- the backend -----------------------------------------------------------------------

class KvdStore(HiCacheStorage):
    def __init__(self, storage_config, kwargs=None):
        self.config = storage_config
        given = dict(storage_config.extra_config or {})
        check_options(given)
        check_ranks(storage_config)
        self.names = Names(given, get_server_args())
        self.ranks = store_pools.Ranks(storage_config.tp_size, storage_config.tp_rank,
                                       storage_config.tp_rank)
        self.pools = {}  # SGLang's name: (Made, Named, host pool)
        self.registered = {}  # memory of the mover's client
        self.tail = ".hicache." + secrets.token_hex(4)

        def connect():
            self.registered.clear()
            return Client(given.get("kvd_socket"), client="sglang")
        finder = SpaceClient(
            lambda: Client(given.get("kvd_socket"), client="sglang", timeout=CALL_S),
            self._asking, log=logger)
        mover = SpaceClient(connect, self._moving, log=logger)
        prices = None
        if given.get("remote"):
            prices = Prices(timed=bool(get_schedule().disable_overlap_schedule))
            follow_steps()
        self.cache = HiCache(finder, mover, lease=given.get("lease", LEASE_S),
                             remote=given.get("remote"), prices=prices,
                             count=metrics.counting(storage_config))
        follow_updates()
        follow_adapters(get_server_args(), given)
        _stores.add(self)

    # ---- pools and spaces ----

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name, pool):
        if name in self.pools:
            if self.pools[name][2] is not pool:
                raise ValueError("kvd.sglang: host pool %s is already registered" % name)
            return
        heads = self.names.heads if name == PoolName.KV.value else None
        made = store_pools.build(pool, self.ranks, heads)
        named = self.names.of(name, made)
        self.pools[name] = made, named, pool
        if name == PoolName.KV.value and self.cache.prices is not None:
            self.cache.prices.model = model_of(made.layout.text())
        if named.revision is None:
            self.cache.stop("the weights have no name")
            return
        logger.info("pages of %d tokens of %s are chunks: %s", made.page_size, name, named)
        self.cache.mover.ask(named, lambda space: True)  # register the memory before it serves

    def _asking(self, client, named):
        return client.space(self.pools[named.pool][0].layout, **self._words(named))

    def _moving(self, client, named):
        made = self.pools[named.pool][0]
        pool = self.registered.get(named.pool)
        if pool is None:
            model = re.sub(r"[^A-Za-z0-9_-]", "-", str(named.model))
            tail = "." + named.pool + self.tail
            pool = self.registered[named.pool] = client.pool(
                made.layout, [region_of(client, part) for part in made.parts],
                name=model[-(NAME_MAX - len(tail)):] + tail)
        return client.space(pool, **self._words(named))

    @staticmethod
    def _words(named):
        words = named._asdict()
        words.pop("pool")
        return words

    def _safe(self, missed, call, *args):
        """Errors are misses: an exception would end some of SGLang's threads."""
        try:
            return call(*args)
        except Exception as error:
            self.cache.mover.tell("the store has failed: %s: %s" % (type(error).__name__, error),
                                  type(error))
            logger.debug("the store has failed", exc_info=True)
            return missed

    def _move(self, move, name, keys, host_indices):
        return self._safe([False] * len(keys), self._do, move, name, keys, host_indices)

    def _do(self, move, name, keys, host_indices):
        made, named, pool = self.pools[str(name)]
        pages = None if host_indices is None else pages_of(
            host_indices.cpu().numpy(), len(keys), made.page_size, store_pools.pages_of(pool))
        if pages is None:
            if keys:
                self.cache.mover.tell("SGLang passed %d invalid pages of %s"
                                      % (len(keys), name))
            return [False] * len(keys)
        return move(named, keys, pages)

    # ---- one pool ----

    def batch_exists(self, keys, extra_info=None):
        return self._safe(0, lambda: self.cache.exists(self.pools[PoolName.KV.value][1], keys,
                                                       priced=True))

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        return self._set(PoolName.KV, keys, host_indices)

    def _get(self, name, keys, host_indices):
        return self._move(self.cache.get, name, keys, host_indices)

    def _set(self, name, keys, host_indices):
        return self._move(self.cache.put, name, keys, host_indices)

    # ---- several ----

    def batch_get_v2(self, transfers, extra_info=None):
        return {t.name: self._get(t.name, t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers, extra_info=None):
        return {t.name: self._set(t.name, t.keys or [], t.host_indices) for t in transfers}

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        """The lengths at which all pools have the pages they need. A pool that needs only its last
        pages is searched in this daemon alone. Prices are those of the KV: other pools follow it."""
        return self._safe(PoolTransferResult.empty(), self._lengths, keys, pool_transfers)

    def _lengths(self, keys, pool_transfers):
        count = self.batch_exists(keys)
        hits = {PoolName.KV: count} if count else {}
        lengths = set(range(1, count + 1))
        for transfer in pool_transfers or []:
            if not lengths:
                break
            named = self.pools[str(transfer.name)][1]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                own = set(range(1, self.cache.exists(named, keys[:count]) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                there = self.cache.present(named, keys[:count])
                own = trailing(there, max(1, len(transfer.keys or ())))
            else:
                continue  # it limits nothing, and has no name
            if own:
                hits[transfer.name] = max(own)
            lengths &= own
        lengths = sorted(lengths)
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    # ---- SGLang's other calls ----

    def exists(self, key):
        return self.batch_exists([key]) == 1

    def get(self, key, target_location=None, target_sizes=None):
        raise NotImplementedError('kvd.sglang: set "interface_v1": 1')

    batch_get = set = batch_set = get

    def clear(self):
        raise NotImplementedError("kvd.sglang: chunks are shared by all engines of this user, and "
                                  "evicted automatically; another \"revision\" gives an empty "
                                  "store")

    def on_new_weights(self):
        if self.cache.stopped is None:
            logger.warning("kvd.sglang: the weights (or adapters) change, so no more chunks "
                           "are found or put: detach the storage backend, and attach it with a "
                           "\"revision\" of the new weights")
            self.cache.stop("the weights have changed")

    def close(self):
        _stores.discard(self)
        self.cache.close()


def region_of(client, part):
    """part: as in store_pools.Made. Memory from the allocator `shm` has an fd and is shared in
    place, though SGLang forbids sealing it unless the kernel (vm.memfd_noexec) decides otherwise;
    the daemon copies other memory through the kernel, because SGLang's cannot be moved."""
    address, nbytes, fd, tensor = part
    for seal in (True, False) if fd is not None else ():
        try:
            return client.register_fd(fd, nbytes, address=address, keep=tensor, seal=seal,
                                      timeout=REGISTER_S)
        except Error as error:
            if error.code != "EIMPORT":
                raise
            why = error
    if fd is not None:
        logger.info("host pool is copied through the kernel: %s", why)
    return client.register_address(address, nbytes, keep=tensor, timeout=REGISTER_S)
