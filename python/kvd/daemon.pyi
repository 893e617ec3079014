# SPDX-License-Identifier: Apache-2.0
import subprocess
from typing import Optional

from .client import Client

class PrivateDaemon:
    pid: int
    dir: str
    socket: str
    shell: subprocess.Popen[bytes]
    def __init__(self) -> None: ...
    def alive(self) -> bool: ...
    def stop(self) -> None: ...

def private_socket() -> str: ...
def connect(name: str, role: Optional[str] = ..., timeout: Optional[float] = ...) -> Client: ...
