# SPDX-License-Identifier: Apache-2.0
from typing import Any, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

from ..layout import Layout
from ..rooms import View

KINDS: Tuple[str, ...]

class Group(NamedTuple):
    name: str
    kind: str
    tokens: int
    ratio: int
    grain: int
    window: int
    spec_blocks: int
    def offered(self, blocks: Sequence[int], end: int) -> Optional[View]: ...
    def wanted(self, blocks: Sequence[int], begin: int, end: int) -> Optional[View]: ...

class Buffers:
    layout: Layout
    parts: List[Tuple[int, int]]
    groups: List[Group]
    def __init__(self, rank: int) -> None: ...
    def add(self, group: Group, blocks: int) -> None: ...
    def buffer(self, cache: Any) -> Tuple[int, int]: ...

def refuse(words: str, *values: Any) -> NoReturn: ...
def attention(made: Buffers, group: Group, layer: int, cache: Any, spec: Any,
              heads: Optional[int], ranks: Any, whole: bool) -> None: ...
def format_of(cache: Any, group: Group) -> str: ...
def state(made: Buffers, group: Group, layer: int, cache: Any, spec: Any, split: Any,
          ranks: Any) -> None: ...
