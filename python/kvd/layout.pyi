# SPDX-License-Identifier: Apache-2.0
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

NHD: str
HND: str
INT64: int
SHARD_SIZE: int
SHARD_RUN: int
FORMAT_MAX: int
FORMATS: Dict[str, str]

def format_of(dtype: Any) -> str: ...

class Layout:
    rank: int
    buffers: List[int]
    views: Dict[str, Any]
    def __init__(self, rank: int = ...) -> None: ...
    def buffer(self, nbytes: int) -> int: ...
    def view(self, name: str, page_tokens: int, pages: int,
             shard: Optional[Tuple[int, int, int]] = ...) -> Layout: ...
    def field(self, view: str, layer: int, name: str, *, buffer: int, offset: int = ...,
              page_stride: int, token_stride: int, unit_stride: int, unit_bytes: int,
              units: int = ..., first_unit: int = ...,
              total_units: Optional[int] = ...,
              format: Optional[str] = ...) -> Layout: ...
    def heads(self, view: str, layer: int, name: str, order: str = ..., *, buffer: int,
              unit_bytes: int, units: int = ..., offset: int = ..., first_unit: int = ...,
              total_units: Optional[int] = ..., page_stride: Optional[int] = ...,
              format: Optional[str] = ...) -> Layout: ...
    def text(self) -> str: ...
    @classmethod
    def parse(cls, text: str) -> Layout: ...
    @classmethod
    def sglang_mha(cls, *, page_size: int, pages: int, layers: Union[int, Iterable[int]],
                   kv_heads: int, head_bytes: int, tp_size: int = ..., tp_rank: int = ...,
                   view: str = ...) -> Layout: ...
    @classmethod
    def sglang_mla(cls, *, page_size: int, pages: int, layers: Union[int, Iterable[int]],
                   latent_bytes: int, tp_rank: int = ..., view: str = ...) -> Layout: ...
    @classmethod
    def vllm_attention(cls, *, block_size: int, blocks: int,
                       layers: Union[int, Iterable[int]], kv_heads: int, head_bytes: int,
                       tp_size: int = ..., tp_rank: int = ..., order: str = ...,
                       block_len: Optional[int] = ..., view: str = ...) -> Layout: ...
