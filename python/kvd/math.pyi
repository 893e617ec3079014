# SPDX-License-Identifier: Apache-2.0
from typing import Any, Optional, Tuple

QUERIES_MAX: int
HEADS_MAX: int
DIMS_MAX: int
THREADS_MAX: int

def isas() -> Tuple[str, ...]: ...

class Cache:
    mla: bool
    pages: int
    heads: int
    page_tokens: int
    dqk: int
    dv: int
    def __init__(self, kv: Any, dv: int, *, v: Any = ..., k_scale: Any = ...,
                 v_scale: Any = ...) -> None: ...

class Batch:
    tokens: int
    def __init__(self, queries: Any, page_counts: Any, pages: Any, *, lengths: Any = ...,
                 ends: Any = ...) -> None: ...

def attend(q: Any, cache: Cache, batch: Batch, *, scale: float, softcap: float = ...,
           isa: str = ..., threads: int = ...,
           out: Optional[Tuple[Any, Any]] = ...) -> Tuple[Any, Any]: ...
def merge(o: Any, lse: Any, there: Tuple[Any, Any, Any], *, at: Any = ...) -> None: ...
