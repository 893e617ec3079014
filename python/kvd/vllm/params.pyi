# SPDX-License-Identifier: Apache-2.0
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

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
    push: bool
    layers: Optional[Mapping[str, Sequence[int]]]

def params_of(request: Any) -> Dict[str, Any]: ...
def layers_of_all(rows: Iterable[Mapping[str, Any]]) -> Dict[str, List[int]]: ...
def write(room: int, ticket: str, tokens: int, tp: int, pp: int,
          ranks: Mapping[Tuple[int, int], Mapping[str, Any]]) -> Dict[str, Any]: ...
def read(params: Mapping[str, Any]) -> Remote: ...
def room_of(params: Mapping[str, Any]) -> Optional[int]: ...
def address_of(params: Mapping[str, Any]) -> str: ...
def sources_of(remote: Remote, tp: int, rank: int) -> Tuple[List[Source], int]: ...
