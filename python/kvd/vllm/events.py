# SPDX-License-Identifier: Apache-2.0
"""KV events of chunks for vLLM's own publisher (--kv-events-config). Each is of one chunk, and has the
form of vLLM's events of its own blocks, but for the medium, so an indexer finds the same blocks."""
import logging
from array import array
from collections import namedtuple

from . import check

check("events")  # before the imports below fail for a name that this vLLM lacks

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (generate_block_hash_extra_keys, maybe_convert_block_hash,
                                         to_event_extra_keys)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from ..stores.follow import KNOWN, STEP, Follower

logger = logging.getLogger("vllm.kvd")
MEDIA = (), (MEDIUM_CPU,), (MEDIUM_STORAGE,), (MEDIUM_CPU, MEDIUM_STORAGE)  # by tiers' bits
KNOWN_TOKENS = 1 << 24
STEP_TOKENS = 1 << 17  # of the events of a step
GROUP = 0  # of caches: models with several have no chunks
LOCAL = "LOCAL"

Blocks = namedtuple("Blocks", "hashes parent tokens lora_id lora_name extra_keys")
Blocks.__doc__ = """A chunk as vLLM's blocks, all that a BlockStored has. parent: None for the first chunk."""


class BlockEvents:
    """spaces: a SpaceClient of a Follower; spec: of the caches; hashed: tokens per hash of a request;
    tokens: of a chunk."""

    def __init__(self, spaces, spec, hashed, tokens, **options):
        self.follower = Follower(spaces, MEDIA, max(1, min(KNOWN, KNOWN_TOKENS // tokens)),
                                 max(1, min(STEP, STEP_TOKENS // tokens)), **options)
        self.kind = get_kv_cache_spec_kind(spec).value
        self.block, self.hashed = spec.block_size, hashed
        self.pool = self.cached = None  # vLLM's pool of blocks, and its map of cached ones

    def bind(self, pool):
        self.pool, self.cached = pool, pool.cached_block_hash_to_block

    def forget(self):
        self.follower.forget()

    def wake(self):
        self.follower.wake()

    def waits(self):
        return self.follower.waits()

    def close(self):
        self.follower.close()

    def know(self, key, request, first, ids, tokens):
        """Report these chunks of a request from now on. key: of their space; first: index of the
        first one; tokens: of a chunk."""
        try:
            self.follower.know(key, ids, lambda i: self._blocks(
                request, (first + i) * tokens, (first + i + 1) * tokens))
        except Exception:
            self._failed()

    def _failed(self):
        """No exception of events ends the scheduler."""
        self.follower.spaces.tell("events of chunks cannot be made")
        logger.debug("events of chunks cannot be made", exc_info=True)

    def _blocks(self, request, begin, end):
        ratio, lora = self.block // self.hashed, request.lora_request
        hashes = [maybe_convert_block_hash(one) for one in request.block_hashes[
            begin // self.hashed + ratio - 1:end // self.hashed:ratio]]
        parent = maybe_convert_block_hash(request.block_hashes[begin // self.hashed - 1]) \
            if begin else None
        return Blocks(hashes, parent, array("i", request.all_token_ids[begin:end]),
                      lora and lora.adapter_id, lora and lora.lora_name,
                      self._extra_keys(request, begin, end))

    def _extra_keys(self, request, begin, end):
        if not (request.lora_request or request.mm_features or request.cache_salt or
                request.prompt_embeds is not None):
            return None
        keys, image = [], 0
        for at in range(begin, end, self.block):
            one, image = generate_block_hash_extra_keys(request, at, at + self.block, image)
            keys.append(one)
        return to_event_extra_keys(keys)

    def take(self):
        """vLLM's events, in each step. Its AllBlocksCleared comes with the reset of its own cache, and
        is for indexers the end of all media: chunks are reported again, behind it."""
        try:
            if self.pool is not None and self.cached is not self.pool.cached_block_hash_to_block:
                self.cached = self.pool.cached_block_hash_to_block
                self.follower.again()
            return [self._event(*change) for change in self.follower.take()]
        except Exception:
            self._failed()
            return []

    def _event(self, stored, blocks, medium):
        if not stored:
            return BlockRemoved(block_hashes=blocks.hashes, medium=medium, group_idx=GROUP,
                                locality=LOCAL)
        return BlockStored(
            block_hashes=blocks.hashes, parent_block_hash=blocks.parent,
            token_ids=blocks.tokens.tolist(), block_size=self.block, lora_id=blocks.lora_id,
            medium=medium, lora_name=blocks.lora_name, extra_keys=blocks.extra_keys,
            group_idx=GROUP, kv_cache_spec_kind=self.kind, locality=LOCAL)
