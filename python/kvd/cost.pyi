# SPDX-License-Identifier: Apache-2.0
from typing import Any, Iterable, NamedTuple, Optional

ROUTE: str
FETCH: str
LOCAL: str
SELF: bytes

class Model(NamedTuple):
    kind: int
    layers: int
    heads: int
    kv_heads: int
    dqk: int
    dv: int
    value_bytes: int = ...
    out_bytes: int = ...
    token_bytes: int = ...
    @classmethod
    def mla(cls, layers: int, heads: int, dqk: int = ..., dv: int = ...,
            **sizes: int) -> Model: ...
    @classmethod
    def gqa(cls, layers: int, heads: int, kv_heads: int, dqk: int = ..., dv: int = ...,
            **sizes: int) -> Model: ...

class Holder(NamedTuple):
    tokens: int
    selected: int = ...
    peer: bytes = ...
    gpu: bool = ...

class Price(NamedTuple):
    us: float
    error_us: float

class Choice(NamedTuple):
    way: str
    sure: bool
    replicate: bool
    route: Price
    fetch: Price
    local: Price
    round: Price
    attend: Price
    once: Price
    even_steps: float
    slowest: int
    transport: str

class Page:
    def __init__(self, page: Any) -> None: ...
    def decide(self, model: Model, holders: Iterable[Holder], *, query_tokens: int = ...,
               steps: int = ..., steps_made: int = ..., selected: bool = ...,
               shifted: bool = ..., no_pages: bool = ..., last: Optional[str] = ...,
               attend_us: float = ..., hidden_us: float = ...,
               recompute_us: float = ...) -> Choice: ...

def preset(name: str) -> Page: ...
