# SPDX-License-Identifier: Apache-2.0
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

RANKS: int
ANSWER: int
ANSWER_S: float
AGAIN_S: float
ASKED: int
KNOWN: int
QUERY: str

class Prefill(NamedTuple):
    tp: int
    pp: int
    rows: List[Dict[str, Any]]

class Server:
    def __init__(self, host: str, port: int, tp: int, pp: int,
                 ranks: Callable[[], Mapping[Tuple[int, int], Dict[str, Any]]],
                 secret: str) -> None: ...
    def close(self) -> None: ...

def fetch(address: str, room: int) -> Tuple[Prefill, int]: ...

class Lookups:
    def __init__(self) -> None: ...
    def of(self, address: str, room: int) -> Optional[Prefill]: ...
    def forget(self) -> None: ...
