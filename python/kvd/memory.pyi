# SPDX-License-Identifier: Apache-2.0
from typing import Any, Optional, Sequence, Tuple, Union

import numpy as np

from ._kvd import Region as Region

ADOPT_BYTES_MIN: int

class Memory:
    fd: int
    address: int
    nbytes: int
    huge_bytes: int
    def __init__(self, nbytes: int, name: str = ...) -> None: ...
    def array(self, shape: Union[None, int, Sequence[int]] = ..., dtype: Any = ...) -> np.ndarray: ...
    def pages(self, count: int) -> np.ndarray: ...

def memory_of(thing: Any) -> Tuple[int, int, bool]: ...
def adopt_wanted() -> bool: ...
def adopt(address: int, nbytes: int) -> Optional[str]: ...
