# SPDX-License-Identifier: Apache-2.0
from typing import Any, Dict, Iterable, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import numpy.typing as npt

from .chunks import Hold
from .client import Client
from .errors import Error

KINDS: Dict[str, int]
TYPES: Dict[str, int]
TYPE_BYTES: Dict[str, int]
OUTS: Dict[str, bool]
PAIRS: Dict[str, int]
ALIGN: int
ROWS_MAX: int
WHY_S: int

class Rope(NamedTuple):
    first: int
    dims: int
    pairs: str
    inv_freq: Sequence[float]

class Part(NamedTuple):
    hold: Hold
    rows: Optional[Tuple[int, int]] = ...
    chunks: Optional[Tuple[int, int]] = ...
    tokens: int = ...
    delta: int = ...
    select: Union[Sequence[Sequence[int]], npt.NDArray[np.uint32], None] = ...

class Packed(Tuple[Any, ...]): ...

class AttendFacts(NamedTuple):
    queue_us: int
    attend_us: int
    daemons: int
    together: int
    replicate: bool
    error: int
    retryable: bool

class Attend:
    rows: int
    seats: int
    heads: int
    dqk: int
    dv: int
    q_type: str
    def __init__(self, client: Client, *, rows: int, heads: int, dqk: int, dv: int, kind: str,
                 q_type: str, kv_type: str, scale: float, key: str, value: Optional[str] = ...,
                 seats: int = ..., kv_heads: int = ..., first_head: int = ...,
                 softcap: float = ..., view: Optional[str] = ..., rope: Optional[Rope] = ...,
                 out_type: str = ..., timeout: Optional[float] = ...) -> None: ...
    def q(self, seat: int) -> npt.NDArray[np.uint8]: ...
    def o(self, seat: int) -> npt.NDArray[np.float32]: ...
    def m(self, seat: int) -> npt.NDArray[np.float32]: ...
    def l(self, seat: int) -> npt.NDArray[np.float32]: ...
    def pack(self, parts: Iterable[Part]) -> Packed: ...
    def post(self, seat: int, layer: int, parts: Union[Packed, Iterable[Part]], *,
             deadline: float = ...) -> None: ...
    def state(self, seat: int) -> int: ...
    def wait(self, seat: int, timeout: Optional[float] = ..., *, why: float = ...) -> None: ...
    def error(self, seat: int, *, why: float = ...) -> Optional[Error]: ...
    def read(self, seat: int) -> AttendFacts: ...
    def stop(self, seat: int) -> None: ...
    def close(self, timeout: Optional[float] = ...) -> None: ...
    def __enter__(self) -> Attend: ...
    def __exit__(self, *exc: Any) -> None: ...
