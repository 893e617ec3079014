# SPDX-License-Identifier: Apache-2.0
from typing import Optional, Tuple

from numpy.typing import NDArray
from numpy import uint8

from .layout import Layout
from .memory import Memory

MAGIC: bytes
VERSION: int
LINE: int
AUX: str
META: str

def head_write(record: NDArray[uint8], room: int, parts: int, first: int) -> None: ...
def head_read(record: NDArray[uint8], room: int) -> Tuple[int, int, Optional[str]]: ...
def views_add(layout: Layout, buffer: int, count: int, nbytes: int) -> None: ...

class Slots:
    count: int
    record_bytes: int
    memory: Memory
    def __init__(self, count: int, record_bytes: int) -> None: ...
    def take(self) -> Optional[int]: ...
    def give(self, slot: int) -> None: ...
    @property
    def free(self) -> int: ...
    def record(self, slot: int) -> NDArray[uint8]: ...
