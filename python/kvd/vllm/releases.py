# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of vLLM that kvd runs with."""


def hits(source):
    """vLLM's name for where cached tokens came from. None: it has no such name,
    before release 0.32 none at all."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return getattr(CacheHitSource, source, None)


def hash_tokens(config, caches):
    """Tokens of a block as they are hashed. Before release 0.32 those of the caches' blocks."""
    return getattr(caches, "hash_block_size", None) or config.cache_config.block_size


def refuse_lookahead(pool):
    """From release 0.33 on a block's hash may cover tokens behind it, whose KV is not in it."""
    tokens = getattr(pool, "num_hash_lookahead_tokens", 0)
    if tokens:
        raise ValueError("kvd.vllm: block hashes that cover %d tokens behind their block are not "
                         "ids of chunks: drop the option that asks for them" % tokens)
