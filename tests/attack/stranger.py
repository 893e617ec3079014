#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by local users that may not connect to the control socket."""
import rig
from rig import STRANGER, Lingering, attack, rest

HOLD_S = 2


def linger_at(names, tries=8, nested=False):
    """Whoever closes the descriptor waits while we live."""
    lingering = Lingering()
    for name in names * tries:
        lingering.send(name, b"x", nested=nested)
    rest(HOLD_S)


@attack("V1", "a descriptor sent to the data socket of daemons stops nobody", by=STRANGER,
        quick=True)
def stranger_lingers_at_the_abstract_socket(house):
    linger_at([n for n in house.shm["a"] if n.startswith("\0")])


@attack("V1", "nor does one sent to its path in the run directory", by=STRANGER, quick=True)
def stranger_lingers_at_the_shm_path(house):
    linger_at([n for n in house.shm["a"] if not n.startswith("\0")])


@attack("V1", "a refused user's descriptor stops nobody", by=STRANGER, quick=True,
        config="[control]\nsocket_mode = 0666\nallow_uids = %d\n" % rig.ALICE)
def lingering_fd_from_a_refused_user(house):
    linger_at([house.a.socket_path])


@attack("V1", "nor one in the queue of a socket that is sent", by=STRANGER, quick=True)
def stranger_lingers_in_a_nested_socket(house):
    linger_at(house.shm["a"], nested=True)


if __name__ == "__main__":
    rig.main("stranger")
