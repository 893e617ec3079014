# SPDX-License-Identifier: Apache-2.0
"""What the engines' attacks share."""
from rig import ask, raw

HELLO = b'{"id":0,"cmd":"hello","proto":1,"client":"mallory"}\n'


def greeted(house):
    s = raw(house.a.socket_path)
    ask(s, HELLO)
    return s
