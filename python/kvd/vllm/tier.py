# SPDX-License-Identifier: Apache-2.0
"""A secondary tier of vLLM's OffloadingConnector: the chunks of the node's daemon, behind vLLM's
own tier of host memory.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10737418240, "block_size": 256, "secondary_tiers": [
                {"type": "KvdTier", "module_path": "kvd.vllm.tier", "revision": "e1945c40"}]}}'

It runs in the scheduler's process. vLLM's memory is rows of equal size, one for each of its chunks,
with the data of all ranks: a page of a pool, and a chunk of kvd. The order inside a row is not
known, so a row is one field, and everything that decides the order is in the space's names. vLLM
does not pass a tier the options that its model was started with, either: `revision` has to.

Rows may be reused by vLLM when a job is reported, that is, when the daemon no longer accesses them.
They are host memory, which sleep mode does not move.
Lookups, loads and stores have a thread each, so a stopped daemon blocks requests that wait for it,
not the scheduler. With KV events, another one follows the changes of this engine's chunks."""
import itertools
import json
import os
import queue
import re
import secrets
import time
from collections import namedtuple

import numpy as np

from . import check

check("tier")  # before the imports below fail for a name that this vLLM lacks

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (Locality, LookupResult, Medium, OffloadingEvent,
                                     RequestOffloadingContext, get_offload_block_hash,
                                     get_offload_group_idx)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ..chunks import ID_BYTES
from ..client import Client
from ..errors import Error
from ..layout import Layout
from ..stores.follow import Follower, Watch
from ..stores.hicache import LEASE_S, HiCache
from ..stores.jobs import Jobs
from ..stores.names import weights_of, word
from ..stores.space_client import CALL_S, SpaceClient
from . import releases

logger = init_logger("vllm.kvd")
OPTIONS = ("revision", "model", "kvd_socket", "lease", "remote", "locality")
TOKENS = 16  # of a row, as the layout counts them: a row is a multiple of 4096 bytes
NAME_MAX = 63  # of a pool
MEDIA = (), (Medium.STORAGE,), (Medium.STORAGE,), (Medium.STORAGE,)  # by tiers' bits
REGISTER_S = 120.0  # for memory that a daemon may have to pin

Named = namedtuple("Named", "model revision scheme rope tokens")
Named.__doc__ = """Names of a space."""


def check_options(given):
    for name in set(given) - set(OPTIONS):
        raise ValueError("kvd.vllm: secondary_tiers: %s is not an option of KvdTier (%s)"
                         % (name, ", ".join(OPTIONS)))
    for name in ("revision", "model", "kvd_socket"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError("kvd.vllm: %s: %r is not a string" % (name, given[name]))
    if not given.get("revision"):
        raise ValueError(
            "kvd.vllm: KvdTier does not know the options that vLLM was started with: set "
            "\"revision\" to a text that is unique to these weights, adapters, quantization, "
            "overrides, position encoding and attention backends")
    for name, most in (("lease", 600), ("remote", 60)):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or
                                  not isinstance(value, (int, float)) or not 0 < value <= most):
            raise ValueError("kvd.vllm: %s: %r is not a number of seconds up to %d"
                             % (name, value, most))


# ---- names -----------------------------------------------------------------------------

def scheme_of(spec, row):
    """A name for the contents and the order of a row. With another number of ranks rows are laid
    out differently, unless vLLM was configured with a common order."""
    config = spec.config
    shared = config.canonical_layout or config.replicated_layout
    fields = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, shared).fields
    fields = dict(fields, model_name=None, row=row, layout=config.kv_cache_layout,
                  device=(current_platform.device_name, current_platform.get_device_capability()))
    return "vllm %s tier %s" % (vllm.__version__, json.dumps(fields, sort_keys=True, default=str))


def names_of(spec, row, given):
    model = spec.config.model.name
    revision, weights = given["revision"], weights_of(model)
    if weights is not None:
        revision += " weights=" + weights
    return Named(word(given.get("model") or model), word(revision),
                 word(scheme_of(spec, row)), None, TOKENS)


def layout_of(rows, row):
    layout = Layout()
    layout.buffer(rows * row)
    unit = row // TOKENS
    return layout.view("kv", TOKENS, rows).field(
        "kv", 0, "row", buffer=0, page_stride=row, token_stride=unit, unit_stride=unit,
        unit_bytes=unit, format="vllm-row")


# ---- lookups --------------------------------------------------------------------------

def ascends(places):
    return None not in places and all(a < b for a, b in zip(places, places[1:]))


class Lookups(AsyncLookupManager):
    """A step's lookups are answered at once. Found chunks are held for a while, so they exist when
    vLLM loads them. vLLM looks up a prompt from its start, and needs nothing after a miss, or for
    windows from its end, and then gaps do not matter."""

    def __init__(self, tier, tier_type):
        super().__init__(tier_type)
        self.tier = tier

    def batch_lookup(self, keys, req_context):
        there = {}
        for named, some in self.tier.by_space(keys):
            hashes = [get_offload_block_hash(key).hex() for key in some]
            count = self.tier.cache.exists(named, hashes)
            found = [True] * count
            if not ascends([req_context.get_offload_key_position(key) for key in some]):
                found += [False] + self.tier.cache.present(named, hashes[count + 1:])
            there.update(zip(some, found))
        return [there.get(key, False) for key in keys]


# ---- the tier --------------------------------------------------------------------------

class KvdTier(SecondaryTierManager):
    medium = Medium.STORAGE  # it outlives the engine
    cache_hit_source = releases.hits("HOST")

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None,
                 **given):
        check_options(given)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(given["locality"]) if "locality" in given else None
        self.rows, self.row = len(primary_kv_view), self._block_size_bytes
        # no view of it is kept: vLLM could not free its memory
        self.address = np.asarray(primary_kv_view).ctypes.data
        self.layout = layout_of(self.rows, self.row)
        self.named = names_of(offloading_spec, self.row, given)
        self.region = getattr(offloading_spec, "_scheduler_mmap", None)
        self.requests, self.frozen = set(), set()
        self.done = queue.SimpleQueue()
        self.pool = None  # of the mover's client

        def connect():
            self.pool = None
            return Client(given.get("kvd_socket"), client="vllm")

        def asking(client, named):
            return client.space(self.layout, timeout=CALL_S, **named._asdict())

        def brief():
            return Client(given.get("kvd_socket"), client="vllm", timeout=CALL_S)
        finder = SpaceClient(brief, asking, log=logger)
        mover = SpaceClient(connect, self._moving, log=logger)
        self.cache = HiCache(finder, mover, lease=given.get("lease", LEASE_S),
                             remote=given.get("remote"))
        self.lookups = Lookups(self, tier_type)
        self.loads, self.stores = Jobs("kvd-loads"), Jobs("kvd-stores")
        self.follower, self.loaded = None, ([], [])
        if offloading_spec.kv_events_config.enable_kv_cache_events:
            self.follower = Follower(SpaceClient(brief, Watch, log=logger), MEDIA, forgets=True)
        # the memory is registered before it serves
        self.loads.add(self.cache.mover.ask, self._space_of(0), lambda space: True)
        logger.info("kvd.vllm: rows of %d bytes are chunks: %s", self.row, self.named)

    def _moving(self, client, named):
        if self.pool is None:
            model = re.sub(r"[^A-Za-z0-9_-]", "-", str(named.model).rstrip("/"))
            tail = ".tier." + secrets.token_hex(4)
            self.pool = client.pool(self.layout, [self._register(client)],
                                    name=model[-(NAME_MAX - len(tail)):] + tail)
        return client.space(self.pool, timeout=CALL_S, **named._asdict())

    def _register(self, client):
        """The file that vLLM's workers have mapped, too: it is shared in place, never moved, or
        copied through the kernel by a daemon that may not open it."""
        folder, name = os.path.split(getattr(self.region, "mmap_path", ""))
        nbytes = self.rows * self.row
        if folder == "/dev/shm":
            try:
                return client.register_shm("/" + name, nbytes, address=self.address,
                                           timeout=REGISTER_S)
            except Error as error:
                if error.code not in ("EIMPORT", "EPERM"):
                    raise
                logger.info("kvd.vllm: vLLM's memory is copied through the kernel: %s", error)
        return client.register_address(self.address, nbytes, adopt_memory=False,
                                       timeout=REGISTER_S)

    # ---- names ----

    def _space_of(self, group):
        """Groups of caches have equal hashes and other bytes."""
        return self.named._replace(scheme=word("group %d of %s" % (group, self.named.scheme)))

    def by_space(self, keys):
        """[(name of its space, its keys in order)]"""
        groups = {}
        for key in keys:
            if len(get_offload_block_hash(key)) != ID_BYTES:
                self.cache.mover.tell("block hashes of %d bytes cannot be ids: set "
                                      "--prefix-caching-hash-algo sha256_cbor" % (len(key) - 4))
                continue
            groups.setdefault(get_offload_group_idx(key), []).append(key)
        return [(self._space_of(group), some) for group, some in groups.items()]

    # ---- lookups ----

    def on_new_request(self, req_context):
        self.requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context):
        self.requests.discard(req_context.req_id)
        self.frozen.discard(req_context.req_id)
        self.lookups.cleanup(req_context.req_id)

    def lookup(self, key, req_context):
        found = self.lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context):
        self.lookups.flush()
        before, now = self.loaded
        self._follow(before)
        self.loaded = now, []

    # ---- jobs ----

    def submit_store(self, job_metadata):
        if job_metadata.req_context.req_id in self.frozen:
            self.done.put((job_metadata, [], 0.0))
        else:
            self.stores.add(self._do, self.cache.put, job_metadata)

    def submit_load(self, job_metadata):
        self.loads.add(self._do, self.cache.get, job_metadata)

    def _do(self, move, job):
        """job: it has ended when it is reported. Errors are misses."""
        begin, done = time.monotonic(), []
        try:
            rows = dict(zip(job.keys, np.asarray(job.chunk_ids, np.int64)))
            for named, keys in self.by_space(rows):
                came = move(named, [get_offload_block_hash(key).hex() for key in keys],
                            np.array([rows[key] for key in keys]))
                done += [key for key, one in zip(keys, came) if one]
        except Exception as error:
            self.cache.mover.tell("the store has failed: %s: %s" % (type(error).__name__, error),
                                  type(error))
            logger.debug("the store has failed", exc_info=True)
        self.done.put((job, done, time.monotonic() - begin))

    def get_finished_jobs(self):
        results = []
        while not self.done.empty():
            job, done, seconds = self.done.get()
            success = len(done) == len(job.keys)
            if job.is_promotion and not success:
                # or else vLLM would load them repeatedly
                self.lookups.mark_miss(set(job.keys).difference(done))
            if job.is_promotion:
                self.loaded[1].extend(done)
            else:
                self._follow(done)
            results.append(JobResult(
                job_id=job.job_id, success=success, transfer_time=seconds,
                successful_keys=tuple(done) if job.is_promotion and done else None,
                transfer_bytes=len(done) * self.row))
        return results

    # ---- events ----

    def _follow(self, keys):
        """Publish where these chunks are, from now on. vLLM completes events with the tokens of
        stored chunks, and of loaded ones after the next step's lookups."""
        if self.follower is not None:
            for named, some in self.by_space(keys):
                self.follower.know((self.layout.text(), named),
                                   [get_offload_block_hash(key) for key in some], some.__getitem__)

    def take_events(self):
        if self.follower is None:
            return
        for stored, changes in itertools.groupby(self.follower.take(), lambda change: change[0]):
            yield OffloadingEvent(keys=[key for _, key, _ in changes], medium=self.medium,
                                  removed=not stored, locality=self.locality,
                                  removal_expected=True)

    def has_pending_work(self):
        return self.follower is not None and self.follower.waits()

    # ---- ends ----

    def drain_jobs(self):
        """vLLM drops its cache, perhaps because its weights have changed: chunks from before are
        neither found nor stored any more."""
        self.loads.drain()
        self.stores.drain()
        self.named = self.named._replace(
            revision=word("%s reset %d" % (self.named.revision, time.time_ns())))
        self.frozen |= self.requests
        self.loaded = [], []
        if self.follower is not None:
            self.follower.forget()

    def shutdown(self):
        self.lookups.shutdown()
        self.loads.close()
        self.stores.close()
        self.cache.close()
        if self.follower is not None:
            self.follower.close()
