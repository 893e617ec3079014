# SPDX-License-Identifier: Apache-2.0
from typing import Iterable, Optional, Sequence, Union

from .layout import Layout

PACKED: int
HND: int
NHD: int
MLA: int
MAMBA1: int
MAMBA2: int
GDN: int

_Numbers = Union[int, Iterable[int]]

class Shapes:
    def __init__(self, tp_size: int = ..., tp_rank: int = ..., rank: Optional[int] = ...) -> None: ...
    def buffer(self, nbytes: int) -> int: ...
    def sglang_mha(self, view: str = ..., *, page_size: int, pages: int, layers: _Numbers,
                   kv_heads: int, head_bytes: int) -> Shapes: ...
    def sglang_mla(self, view: str = ..., *, page_size: int, pages: int, layers: _Numbers,
                   latent_bytes: int) -> Shapes: ...
    def sglang_state(self, view: str, *, slots: int, layers: _Numbers, full_dim: int,
                     unit_bytes: int, groups: Iterable[int] = ..., outer: int = ...) -> Shapes: ...
    def sglang_aux(self, view: str = ..., *, slots: int, hidden_size: int = ...,
                   hidden_elem_bytes: int = ..., top_logprobs: int = ...,
                   sampling_mask: int = ..., dsa_dim: int = ...) -> Shapes: ...
    def vllm_attention(self, view: str = ..., *, block_size: int, blocks: int,
                       layers: _Numbers, buffers: _Numbers, kv_heads: int, head_bytes: int,
                       packing: int = ..., block_len: int = ...) -> Shapes: ...
    def vllm_ssm(self, view: str, *, kind: int, pages: int, page_len: int, layers: _Numbers,
                 buffers: _Numbers, conv_dim: int, conv_rows: int, conv_elem: int,
                 temporal: Sequence[int], ssm_elem: int) -> Shapes: ...
    def text(self) -> str: ...
    def layout(self) -> Layout: ...
