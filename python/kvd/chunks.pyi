# SPDX-License-Identifier: Apache-2.0
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

from .attend import Rope
from .client import Client, Pool
from .errors import Error
from .layout import Layout
from .rooms import Awaited, Status, _Views, _Wait

ID_BYTES: int
IDS_MAX: int
ANYWHERE: int
LEASE_MS_MAX: int
WHY_S: int

_Ids = Union[bytes, bytearray, memoryview, Sequence[bytes]]

class Found(NamedTuple):
    chunks: int
    tokens: int

class Facts(NamedTuple):
    chunks: int
    done: int
    there: int
    left_out: int
    prefix_tokens: int
    error: Optional[Error]

class ChunkEvent(NamedTuple):
    seq: int
    id: bytes
    space: str
    first: int
    tokens: int
    tier: str
    put: bool

def ids_pack(ids: _Ids) -> bytes: ...

class Move(Awaited):
    kind: str
    def __init__(self, move: Any, kind: str, pages: Any = ...) -> None: ...
    @property
    def state(self) -> int: ...
    def read(self) -> Status: ...
    def show(self, timeout: Optional[float] = ...) -> Facts: ...
    def splice(self, delta: int, rope: Rope, *, key: str, type: str) -> None: ...
    def error(self) -> Optional[Error]: ...
    def abort(self, timeout: Optional[float] = ...) -> None: ...
    def close(self, timeout: Optional[float] = ...) -> None: ...

class Holder(NamedTuple):
    peer: bytes
    first: int
    chunks: int
    tokens: int
    gpu: bool

class Hold:
    space: Space
    chunks: int
    tokens: int
    first: int
    remote: int
    secret: bytes
    def __init__(self, space: Space, hold: Any) -> None: ...
    def fetch(self, views: _Views, *, pool: Optional[Pool] = ..., wait: _Wait = ...,
              deadline: Optional[float] = ..., timeout: Optional[float] = ...,
              post: bool = ...) -> Move: ...
    def holders(self, timeout: Optional[float] = ...) -> Tuple[Holder, ...]: ...
    def close(self, timeout: Optional[float] = ...) -> None: ...
    def __enter__(self) -> Hold: ...
    def __exit__(self, *exc: object) -> None: ...

class Space:
    client: Client
    pool: Optional[Pool]
    tokens: int
    def __init__(self, client: Client, pool: Union[Pool, Layout, str], *, model: str,
                 scheme: str, tokens: int, revision: Optional[str] = ...,
                 rope: Optional[str] = ..., views: Optional[Sequence[str]] = ...,
                 timeout: Optional[float] = ...) -> None: ...
    def pool_of(self, pool: Optional[Pool]) -> Pool: ...
    def find(self, ids: _Ids, first: int = ..., timeout: Optional[float] = ...) -> Found: ...
    def hold(self, ids: _Ids, first: int = ..., *, lease: Optional[float] = ...,
             remote: Optional[float] = ..., timeout: Optional[float] = ...) -> Hold: ...
    def join(self, secret: bytes, *, lease: Optional[float] = ...,
             timeout: Optional[float] = ...) -> Hold: ...
    def put(self, ids: _Ids, views: _Views, first: int = ..., *, pool: Optional[Pool] = ...,
            wait: _Wait = ..., timeout: Optional[float] = ..., post: bool = ...,
            durable: bool = ...) -> Move: ...
    def publish(self, ids: _Ids, views: _Views, first: int = ..., *,
                pool: Optional[Pool] = ..., wait: _Wait = ..., timeout: Optional[float] = ...,
                post: bool = ...) -> Move: ...
    def withdraw(self, ids: _Ids, first: int = ..., *, grace: float = ...,
                 timeout: Optional[float] = ...) -> Move: ...
    def drop(self, ids: _Ids, first: int = ..., timeout: Optional[float] = ...) -> None: ...
    def close(self, timeout: Optional[float] = ...) -> None: ...
    def __enter__(self) -> Space: ...
    def __exit__(self, *exc: object) -> None: ...

class ChunkEvents:
    def __init__(self, client: Client) -> None: ...
    def read(self, timeout: Optional[float] = ...) -> Tuple[bool, List[ChunkEvent]]: ...
