#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by local users that may not connect to the control socket."""
import contextlib
import socket

import rig
from rig import STRANGER, Lingering, ask, attack, raw, rest

HOLD_S = 2


def linger_at(names, tries=8, nested=False):
    """A process that closes the descriptor waits while we live."""
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


def zmtp(house):
    """A connection to the control line of daemons, as libzmq starts one without keys."""
    endpoint = house.endpoints["a"].split("#")[0].rsplit(":", 1)[1]
    s = socket.create_connection(("127.0.0.1", int(endpoint)))
    s.settimeout(2)
    s.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\5READY\x0bSocket-Type\0\0\0\6DEALER"
    s.sendall(b"\4" + bytes([len(ready)]) + ready)
    return s


def message_without_end(house):
    if not rig.PLAIN:
        raise rig.Skip("memory is measured without sanitizers only")

    def send():
        with contextlib.suppress(OSError):
            s = zmtp(house)
            part = b"\3" + (65536).to_bytes(8, "big") + bytes(65536)  # more follows
            for _ in range(4096):
                s.sendall(part)
    grown = rig.grown_mib(house.a, send, 1)
    return "%d MiB of one message" % grown if grown > 64 else None


@attack("V7", "a ZeroMQ message without an end does not fill memory", by=STRANGER)
def unfinished_multipart(house):
    return message_without_end(house)


@attack("V7", "nor does one of a peer that got past the door: here without keys", by=STRANGER,
        config="[peer]\ninsecure = yes\n")
def unfinished_multipart_past_the_door(house):
    return message_without_end(house)


@attack("V8", "connections that say nothing leave descriptors for engines", by=STRANGER,
        config="[control]\nsocket_mode = 0666\nallow_uids = %d,%d\n" % (rig.EVE, rig.ALICE))
def idle_connections_take_all_descriptors(house):
    rig.need_fds(4096)
    kept = []
    with contextlib.suppress(OSError):
        for _ in range(3000):
            kept.append(zmtp(house))
    rest(1)
    said = ask(raw(house.a.socket_path), b'{"id":1,"cmd":"ping"}\n')
    if not said or "error" in said:
        return "%d connections, and a ping is answered by %s" % (len(kept), said)
    return None


if __name__ == "__main__":
    rig.main("stranger")
