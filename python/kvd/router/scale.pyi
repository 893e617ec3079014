# SPDX-License-Identifier: Apache-2.0
from typing import NamedTuple, Optional, Tuple, Union

from .pick import Picker

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

def measure(picker: Picker, now: Optional[float] = ...) -> Tuple[Measured, Measured]: ...

class Scaler:
    def __init__(self, *, prefill: Tuple[int, int] = ..., decode: Tuple[int, int] = ...,
                 busy: float = ..., full: float = ..., within: float = ...,
                 start: float = ..., up: float = ..., down: float = ...,
                 band: float = ...) -> None: ...
    def step(self, measured: Union[Picker, Tuple[Measured, Measured]],
             now: Optional[float] = ...) -> Wanted: ...
