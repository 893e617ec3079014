# SPDX-License-Identifier: Apache-2.0
import struct
from typing import Optional, Sequence

import numpy as np

from ..memory import Memory

HEAD: struct.Struct
MAGIC: bytes
VERSION: int
LINE: int

class Rows:
    count: int
    room_tensor: int
    record_bytes: int
    def __init__(self, ptrs: Sequence[int], lens: Sequence[int], item_lens: Sequence[int],
                 room_tensor: int) -> None: ...
    def write(self, row: int, room: int, record: np.ndarray) -> None: ...
    def read(self, row: int, room: int, record: np.ndarray) -> Optional[str]: ...

class Slots:
    count: int
    record_bytes: int
    memory: Memory
    def __init__(self, count: int, record_bytes: int) -> None: ...
    def take(self) -> Optional[int]: ...
    def give(self, slot: int) -> None: ...
    def record(self, slot: int) -> np.ndarray: ...
