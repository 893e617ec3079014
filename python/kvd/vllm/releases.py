# SPDX-License-Identifier: Apache-2.0
"""Differences between the releases of vLLM that kvd runs with."""


def hits(source):
    """vLLM's name for the source of cached tokens. None: it has no such name;
    before release 0.32 there is none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return getattr(CacheHitSource, source, None)


def hash_tokens(config, caches):
    """Tokens of a block that is hashed. Before release 0.32 those of the caches' blocks."""
    return getattr(caches, "hash_block_size", None) or config.cache_config.block_size


def refuse_lookahead(pool):
    """From release 0.33 on a block's hash may cover tokens after it, whose KV is not in it."""
    tokens = getattr(pool, "num_hash_lookahead_tokens", 0)
    if tokens:
        raise ValueError("kvd.vllm: block hashes that cover %d tokens after their block cannot be "
                         "ids of chunks: drop the option that enables them" % tokens)
