# SPDX-License-Identifier: Apache-2.0
"""Shared by the attacks of engines."""
from rig import ask, raw

HELLO = b'{"id":0,"cmd":"hello","proto":1,"client":"mallory"}\n'


def greeted(house):
    s = raw(house.a.socket_path)
    ask(s, HELLO)
    return s
