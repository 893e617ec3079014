# SPDX-License-Identifier: Apache-2.0
from typing import Callable, Dict, List

NEEDS: str
FORMAT: str
COMMANDS: Dict[str, Callable[[List[str]], int]]

def main(argv: List[str]) -> int: ...
