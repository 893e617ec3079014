# SPDX-License-Identifier: Apache-2.0
from typing import Tuple

def units(total: int, size: int, rank: int) -> Tuple[int, int]: ...
