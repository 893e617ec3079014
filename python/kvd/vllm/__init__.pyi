# SPDX-License-Identifier: Apache-2.0
from typing import Any, Tuple

TESTED: Tuple[str, ...]

def check_release(version: str) -> None: ...
def __getattr__(name: str) -> Any: ...
