# SPDX-License-Identifier: Apache-2.0
import subprocess
from typing import Optional

from . import _kvd

def program(name: str) -> Optional[str]: ...

def caller() -> str: ...

class PrivateDaemon:
    pid: int
    dir: str
    socket: str
    shell: subprocess.Popen[bytes]
    def __init__(self) -> None: ...
    def alive(self) -> bool: ...
    def stop(self) -> None: ...

def private_socket() -> str: ...
def session(
    socket: Optional[str],
    name: Optional[str],
    client: Optional[str],
    role: Optional[str],
    timeout: Optional[float],
) -> _kvd.Client: ...
