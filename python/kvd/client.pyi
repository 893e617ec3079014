# SPDX-License-Identifier: Apache-2.0
import os
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from .attend import Attend, Rope
from .chunks import ChunkEvents, Space
from .layout import Layout
from .memory import Region
from .rooms import Room, Source, _Views, _Wait

INT64: int

class Pool:
    def __init__(self, client: Client, layout: Union[Layout, str, Mapping[str, Any]],
                 regions: Iterable[Union[Region, Tuple[Region, int]]],
                 name: Optional[str] = ..., timeout: Optional[float] = ...) -> None: ...
    @property
    def id(self) -> int: ...
    def unregister(self, timeout: Optional[float] = ...) -> None: ...

class Client:
    def __init__(self, socket: Union[None, str, os.PathLike[str]] = ..., *, name: Optional[str] = ...,
                 client: str = ..., role: Optional[str] = ...,
                 timeout: Optional[float] = ...) -> None: ...
    def __enter__(self) -> Client: ...
    def __exit__(self, *exc: Any) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def lost(self) -> bool: ...
    @property
    def info(self) -> Dict[str, Any]: ...
    @property
    def endpoint(self) -> str: ...
    def command(self, cmd: str, timeout: Optional[float] = ..., **args: Any) -> Dict[str, Any]: ...
    def register(self, memory: Any, *, name: Optional[str] = ..., adopt_memory: bool = ...,
                 timeout: Optional[float] = ...) -> Region: ...
    def register_address(self, address: int, nbytes: int, *, name: Optional[str] = ...,
                         keep: Any = ..., adopt_memory: bool = ...,
                         timeout: Optional[float] = ...) -> Region: ...
    def register_fd(self, fd: int, nbytes: int, *, offset: int = ..., address: int = ...,
                    name: Optional[str] = ..., keep: Any = ...,
                    timeout: Optional[float] = ...) -> Region: ...
    def register_gpu(self, address: int, nbytes: int, *, name: Optional[str] = ...,
                     keep: Any = ..., timeout: Optional[float] = ...) -> Region: ...
    def register_gpu_fd(self, fd: int, nbytes: int, *, device: str, allocation: int,
                        offset: int = ..., address: int = ..., name: Optional[str] = ...,
                        keep: Any = ..., timeout: Optional[float] = ...) -> Region: ...
    def register_shm(self, shm_name: str, nbytes: int, *, offset: int = ..., address: int = ...,
                     name: Optional[str] = ..., timeout: Optional[float] = ...) -> Region: ...
    def pool(self, layout: Union[Layout, str, Mapping[str, Any]],
             regions: Iterable[Union[Region, Tuple[Region, int]]], *,
             name: Optional[str] = ...,
             timeout: Optional[float] = ...) -> Pool: ...
    def space(self, pool: Union[Pool, Layout, str], *, model: str, scheme: str, tokens: int,
              revision: Optional[str] = ..., rope: Optional[str] = ...,
              views: Optional[Sequence[str]] = ...,
              timeout: Optional[float] = ...) -> Space: ...
    def attend(self, *, rows: int, heads: int, dqk: int, dv: int, kind: str, q_type: str,
               kv_type: str, scale: float, key: str, value: Optional[str] = ...,
               seats: int = ..., kv_heads: int = ..., first_head: int = ...,
               softcap: float = ..., view: Optional[str] = ..., rope: Optional[Rope] = ...,
               timeout: Optional[float] = ...) -> Attend: ...
    def chunk_events(self) -> ChunkEvents: ...
    def states(self, rooms: List[Room], out: Any) -> int: ...
    def send(self, room: int, pool: Pool, *, bootstrap_ms: int = ..., waiting_ms: int = ...,
             stall_ms: int = ..., request_id: Optional[str] = ...,
             traceparent: Optional[str] = ..., ticket: Optional[str] = ...,
             peers: Sequence[str] = ..., timeout: Optional[float] = ...,
             post: bool = ...) -> Room: ...
    def recv(self, room: int, pool: Pool, sources: Sequence[Union[str, Source]], *,
             receivers: int = ..., bootstrap_ms: int = ..., waiting_ms: int = ...,
             stall_ms: int = ..., request_id: Optional[str] = ...,
             traceparent: Optional[str] = ..., ticket: Optional[str] = ...,
             peers: Sequence[str] = ..., timeout: Optional[float] = ...,
             post: bool = ...) -> Room: ...
    def offer(self, room: int, pool: Pool, views: _Views, *, receivers: int = ...,
              receivers_told: bool = ..., aux: Optional[int] = ...,
              wait: _Wait = ..., lease_ms: int = ..., bootstrap_ms: int = ...,
              waiting_ms: int = ..., stall_ms: int = ..., request_id: Optional[str] = ...,
             traceparent: Optional[str] = ..., ticket: Optional[str] = ...,
             peers: Sequence[str] = ..., timeout: Optional[float] = ...,
             post: bool = ...) -> Room: ...
    def pull(self, room: int, pool: Pool, sources: Union[str, Source, Sequence[Union[str, Source]]],
             views: Optional[_Views] = ..., *, receivers: int = ...,
             aux: Optional[int] = ..., wait: _Wait = ..., bootstrap_ms: int = ...,
             waiting_ms: int = ..., stall_ms: int = ..., request_id: Optional[str] = ...,
             traceparent: Optional[str] = ..., ticket: Optional[str] = ...,
             peers: Sequence[str] = ..., timeout: Optional[float] = ...,
             post: bool = ...) -> Room: ...
