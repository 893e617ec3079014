# SPDX-License-Identifier: Apache-2.0
from typing import Optional, Sequence

from numpy import uint8
from numpy.typing import NDArray

class Rows:
    count: int
    room_tensor: int
    record_bytes: int
    def __init__(self, ptrs: Sequence[int], lens: Sequence[int], item_lens: Sequence[int],
                 room_tensor: int) -> None: ...
    def write(self, row: int, room: int, record: NDArray[uint8]) -> None: ...
    def read(self, row: int, room: int, record: NDArray[uint8]) -> Optional[str]: ...
