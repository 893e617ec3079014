from typing import Any, Dict, Mapping, Optional, Tuple

from .client import Client

AXES: Tuple[str, ...]
CALL_S: float

class Place:
    client: Client
    epoch: Optional[int]
    args: Dict[str, Any]
    def __init__(self, client: Client, group: str, worker: Optional[str] = ...,
                 ranks: Optional[Mapping[str, Tuple[int, int]]] = ...,
                 **record: Optional[str]) -> None: ...
    def keep(self) -> None: ...
    def load(self, figures: Mapping[str, int]) -> None: ...

def from_environment(client: Client, engine: str, ranks: Mapping[str, Tuple[int, int]],
                     bootstrap_port: Optional[int] = ..., **record: Optional[str]
                     ) -> Optional[Place]: ...
