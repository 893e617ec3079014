# SPDX-License-Identifier: Apache-2.0
from typing import List

NEEDS: str
FORMAT: str

def main(argv: List[str]) -> int: ...
