# SPDX-License-Identifier: Apache-2.0
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ..rooms import Source

RANKS: int
TEXT: int

class Remote(NamedTuple):
    room: int
    ticket: str
    tokens: int
    tp: int
    pp: int
    sources: Sequence[Source]

def write(room: int, ticket: str, tokens: int, tp: int, pp: int,
          ranks: Mapping[Tuple[int, int], Tuple[str, str, int]]) -> Dict[str, Any]: ...
def read(params: Mapping[str, Any]) -> Remote: ...
def sources_of(remote: Remote, tp: int, rank: int) -> Tuple[List[Source], int]: ...
