# SPDX-License-Identifier: Apache-2.0
from typing import Any, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

from .chunks import Hold

PREFILL: str
DECODE: str
SERVING: str
DRAINING: str
GONE: str

class Load(NamedTuple):
    seq: int = ...
    rooms_waiting: float = ...
    rooms_running: float = ...
    bytes_queued: float = ...
    gbps: float = ...
    failed: float = ...
    running: float = ...
    waiting: float = ...
    kv_free_tokens: float = ...
    kv_total_tokens: float = ...
    prompt_tokens_waiting: float = ...
    prompt_tokens_s: float = ...
    decode_tokens_s: float = ...

class Score(NamedTuple):
    total: float
    queue: float
    compute: float
    transfer: float
    penalty: float
    last_resort: bool
    fresh: bool

class Pick(NamedTuple):
    id: int
    prefill: str
    decode: str
    prefill_score: Score
    decode_score: Score

class Row(NamedTuple):
    worker: str
    state: str
    score: Score

class Measured(NamedTuple):
    workers: int
    speed: float
    served: float
    waiting: float

class Wanted(NamedTuple):
    prefill: int
    decode: int
    prefill_need: float
    decode_need: float
    prefill_known: bool
    decode_known: bool
    changed: bool

def near(hold: Hold, *answers: Mapping[str, Any]) -> List[Tuple[str, int]]: ...

class Picker:
    def __init__(self, *, seed: Optional[int] = ..., token_bytes: float = ...,
                 stale: float = ..., hold: float = ..., lag: float = ..., scan: int = ...,
                 sample: int = ..., results: bool = ...) -> None: ...
    def set(self, side: str, worker: str, state: str = ..., load: Optional[Load] = ...,
            sampled: Optional[float] = ..., now: Optional[float] = ...) -> None: ...
    def feed(self, side: str, answer: Union[str, bytes, Mapping[str, Any]],
             now: Optional[float] = ...) -> None: ...
    def pick(self, *, prompt_tokens: float = ..., bytes: float = ...,
             output_tokens: float = ..., near: Iterable[Tuple[str, float]] = ...,
             avoid: Iterable[str] = ..., only: Optional[str] = ...,
             now: Optional[float] = ...) -> Pick: ...
    def settle(self, id: int, ttft: Optional[float] = ...,
               failed: Union[str, Iterable[str]] = ...,
               now: Optional[float] = ...) -> None: ...
    def release(self, id: int, now: Optional[float] = ...) -> None: ...
    def scores(self, side: str, *, prompt_tokens: float = ..., bytes: float = ...,
               output_tokens: float = ..., near: Iterable[Tuple[str, float]] = ...,
               now: Optional[float] = ...) -> List[Row]: ...
    def count(self, side: str) -> Tuple[int, int]: ...
    def measure(self, now: Optional[float] = ...) -> Tuple[Measured, Measured]: ...

class Scaler:
    state: bytes
    def __init__(self, *, prefill: Tuple[int, int] = ..., decode: Tuple[int, int] = ...,
                 busy: float = ..., full: float = ..., within: float = ...,
                 start: float = ..., up: float = ..., down: float = ..., band: float = ...,
                 state: bytes = ...) -> None: ...
    def step(self, measured: Union[Picker, Tuple[Measured, Measured]],
             now: Optional[float] = ...) -> Wanted: ...
