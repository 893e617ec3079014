# SPDX-License-Identifier: Apache-2.0
class Piece:
    device: str
    handle: bytes
    offset: int
    def __init__(self, device: str, handle: bytes, offset: int) -> None: ...

def describe(address: int, nbytes: int) -> Piece: ...
