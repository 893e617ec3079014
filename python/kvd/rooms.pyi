# SPDX-License-Identifier: Apache-2.0
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .client import Client, Pool
from .errors import Error
from .memory import Region

FAILED: int
BOOTSTRAPPING: int
WAITING_FOR_INPUT: int
TRANSFERRING: int
SUCCESS: int
CLOSED: int
ABORTING: int
REMOTE: int
SEND: int
RECV: int
OFFER: int
PULL: int
ROLES: Tuple[str, ...]
WHY_S: int
NOREPLY: int
LOOK_S: float
SILENT: str

_Pages = Union[Sequence[int], range, np.ndarray]
_Views = Mapping[str, Union["View", _Pages]]
_Wait = Union[None, Tuple[Region, int, int], "Event"]

class Status(NamedTuple):
    state: int
    flags: int
    error: int
    retryable: bool
    bytes: int
    total: int
    first_token: int
    done: int
    rows: int
    moved_us: int

class View(NamedTuple):
    pages: _Pages
    first_token: int = ...
    tokens: Optional[Tuple[int, int]] = ...
    layers: Optional[Tuple[int, int]] = ...

class Source(NamedTuple):
    endpoint: Optional[str] = ...
    pool: Optional[str] = ...
    room: Optional[int] = ...
    rank: Optional[int] = ...
    views: Optional[_Views] = ...

class Event(NamedTuple):
    handle: bytes
    device: str

def views_pack(views: _Views, name: str = ...) -> Tuple[Any, ...]: ...
def source_pack(source: Union[None, str, Source], name: str) -> Tuple[Any, ...]: ...
def sources_pack(sources: Sequence[Union[str, Source]]) -> Tuple[Any, ...]: ...
def wait_pack(wait: _Wait) -> Optional[Tuple[Any, ...]]: ...
def aux_pack(aux: Optional[int]) -> Optional[int]: ...
def peers_pack(peers: Sequence[str]) -> Tuple[str, ...]: ...
def pull_sources(
    sources: Union[str, Source, Sequence[Union[str, Source]]]) -> Sequence[Union[str, Source]]: ...
def room_pack(client: Any, number: int, role: int, pool: Pool, sources: Tuple[Any, ...],
              receivers: int, views: Optional[_Views], aux: Optional[int], wait: _Wait,
              times: Dict[str, int], names: Dict[str, Optional[str]],
              peers: Optional[Sequence[str]], timeout: Optional[float],
              receivers_told: bool = ...) -> Tuple[Tuple[Any, ...], Dict[str, Any]]: ...
def room_error(number: int, status: Status, told: Optional[Dict[str, Any]]) -> Error: ...

class Silence:
    def __init__(self, awaited: Any) -> None: ...
    def look(self) -> None: ...

class Awaited:
    def wait(self, state: int = ..., timeout: Optional[float] = ...) -> int: ...

class Room(Awaited):
    number: int
    def __init__(self, client: Client, number: int, role: int, pool: Pool, *,
                 sources: Sequence[Union[str, Source]] = ..., receivers: int = ...,
                 views: Optional[_Views] = ..., aux: Optional[int] = ..., wait: _Wait = ...,
                 lease_ms: int = ..., bootstrap_ms: int = ..., waiting_ms: int = ...,
                 stall_ms: int = ..., request_id: Optional[str] = ...,
                 traceparent: Optional[str] = ..., ticket: Optional[str] = ...,
             peers: Sequence[str] = ..., timeout: Optional[float] = ...,
                 receivers_told: bool = ..., post: bool = ...) -> None: ...
    def extend(self, lease_ms: int, timeout: Optional[float] = ...) -> None: ...
    def bind(self, views: _Views, aux: Optional[int] = ..., wait: _Wait = ...,
             timeout: Optional[float] = ...) -> None: ...
    def send(self, views: _Views, seq: int = ..., last: bool = ..., aux: Optional[int] = ...,
             wait: _Wait = ..., timeout: Optional[float] = ...) -> None: ...
    def abort(self, reason: Optional[str] = ..., timeout: Optional[float] = ...) -> None: ...
    def close(self, timeout: Optional[float] = ...) -> None: ...
    @property
    def state(self) -> int: ...
    def read(self) -> Status: ...
    def error(self) -> Optional[Error]: ...
    def first_token(self) -> int: ...
    def landed(self, pages: int, view: Optional[str] = ...) -> np.ndarray: ...
