# SPDX-License-Identifier: Apache-2.0
"""How SGLang and vLLM share a model and a request over ranks, by kvd's plan library: which
heads a rank holds, which prefill ranks a decode rank asks, whose pages and tokens are whose,
and where a chunked prefill cuts. An adapter that asks here answers as the engine would; the
daemon needs none of it, a layout says what a rank holds."""
from array import array
from collections import namedtuple

from . import _check, _kvd

SGLangRanks = namedtuple("SGLangRanks", "tp cp pp dst_info responses dummies")
Chunk = namedtuple("Chunk", "tokens pages last")
INT64 = (1 << 63) - 1  # of tokens and bytes
FLAGS = ("mla", "hybrid_mla", "all_cp", "state")


def _call(rule, wide=(), **numbers):
    """Of 32 bits, but for those that are named in `wide`; bytes are page lists."""
    given = []
    for name, value in numbers.items():
        if name in ("src_pages", "dst_pages"):
            given.append(value)
        elif name in FLAGS:
            given.append(_check.flag(name, value))
        else:
            given.append(_check.integer(name, value, 0,
                                        INT64 if name in wide else _check.U32))
    return rule(*given)


def _numbers(packed):
    return list(array("I", packed))


def units(total, size, rank):
    """(first, count) of the heads, channels or groups of one of `size` ranks."""
    return _call(_kvd.shard_units, total=total, size=size, rank=rank)


def sglang_ranks(*, prefill_tp, decode_tp, decode_rank, prefill_cp=1, prefill_pp=1,
                 decode_pp=1, decode_pp_rank=0, mla=False, hybrid_mla=False, all_cp=False):
    """The prefill ranks of a decode rank: ranges of tp, cp and pp ranks; how many
    TransferInfos each of them waits for, how many of them answer, and whether all but the
    first tp rank only pose."""
    got = _call(_kvd.shard_sglang, prefill_tp=prefill_tp, prefill_cp=prefill_cp,
                prefill_pp=prefill_pp, decode_tp=decode_tp, decode_pp=decode_pp,
                decode_rank=decode_rank, decode_pp_rank=decode_pp_rank, mla=mla,
                hybrid_mla=hybrid_mla, all_cp=all_cp)
    return SGLangRanks(*(range(got[i], got[i] + got[i + 1]) for i in (0, 2, 4)), *got[6:])


def vllm_sources(*, tp_size, tp_rank, remote_tp_size, kv_heads, mla=False, state=False):
    """The prefill ranks that a decode rank reads attention heads (or states) from."""
    return _numbers(_call(_kvd.shard_vllm, tp_size=tp_size, tp_rank=tp_rank,
                          remote_tp_size=remote_tp_size, kv_heads=kv_heads, mla=mla,
                          state=state))


def cp_pages(pages, size, rank):
    """The range of a request's pages that one of `size` context-parallel ranks sends."""
    return range(*_call(_kvd.shard_cp_pages, ("pages",), pages=pages, size=size, rank=rank))


def dcp_tokens(src_pages, dst_pages, *, page_size, size, rank, chunk_page=0, prefix=0,
               tokens=0):
    """(source slots, destination slots) of one decode-context rank's tokens of a chunk: page
    lists for a view of one token a page. tokens: 0: all of src_pages."""
    both = _call(_kvd.shard_dcp_tokens, ("chunk_page", "prefix", "tokens"),
                 src_pages=_check.pages("src_pages", src_pages),
                 dst_pages=_check.pages("dst_pages", dst_pages), page_size=page_size,
                 size=size, rank=rank, chunk_page=chunk_page, prefix=prefix, tokens=tokens)
    return tuple(_numbers(slots) for slots in both)


def chunks(prompt, *, page_size, chunk=0, prefix=0):
    """The sends of a chunked prefill; pages: of the request's list behind the prefix."""
    return [Chunk(range(*c[:2]), range(*c[2:4]), c[4])
            for c in _call(_kvd.shard_chunks, ("prompt", "page_size", "chunk", "prefix"),
                           prompt=prompt, page_size=page_size, chunk=chunk, prefix=prefix)]


def grid(begin, end, *, base, step):
    """Tokens [begin, end) as ranges that end on a grid of `step` tokens from `base` on."""
    return [range(*r) for r in _call(_kvd.shard_grid, ("begin", "end", "base", "step"),
                                      begin=begin, end=end, base=base, step=step)]


def vllm_blocks_per_page(state_bytes, block_len):
    """Physical blocks that a page of state takes in a tensor that it shares."""
    return _call(_kvd.vllm_blocks_per_page, ("state_bytes", "block_len"),
                 state_bytes=state_bytes, block_len=block_len)


def vllm_window_blocks(window, block_size, blocks):
    """How many blocks of a sliding window's list are worth sending: the last of it."""
    return _call(_kvd.vllm_window_blocks, ("window", "block_size", "blocks"),
                 window=window, block_size=block_size, blocks=blocks)
