# SPDX-License-Identifier: Apache-2.0
from typing import Iterable, List, NamedTuple, Tuple

INT64: int
FLAGS: Tuple[str, ...]

class SGLangRanks(NamedTuple):
    tp: range
    cp: range
    pp: range
    dst_info: int
    responses: int
    dummies: bool

class Chunk(NamedTuple):
    tokens: range
    pages: range
    last: bool

def units(total: int, size: int, rank: int) -> Tuple[int, int]: ...
def sglang_ranks(*, prefill_tp: int, decode_tp: int, decode_rank: int, prefill_cp: int = ...,
                 prefill_pp: int = ..., decode_pp: int = ..., decode_pp_rank: int = ...,
                 mla: bool = ..., hybrid_mla: bool = ..., all_cp: bool = ...) -> SGLangRanks: ...
def vllm_sources(*, tp_size: int, tp_rank: int, remote_tp_size: int, kv_heads: int,
                 mla: bool = ..., state: bool = ...) -> List[int]: ...
def cp_pages(pages: int, size: int, rank: int) -> range: ...
def dcp_tokens(src_pages: Iterable[int], dst_pages: Iterable[int], *, page_size: int, size: int,
               rank: int, chunk_page: int = ..., prefix: int = ...,
               tokens: int = ...) -> Tuple[List[int], List[int]]: ...
def chunks(prompt: int, *, page_size: int, chunk: int = ..., prefix: int = ...) -> List[Chunk]: ...
def grid(begin: int, end: int, *, base: int, step: int) -> List[range]: ...
def vllm_blocks_per_page(state_bytes: int, block_len: int) -> int: ...
def vllm_window_blocks(window: int, block_size: int, blocks: int) -> int: ...
