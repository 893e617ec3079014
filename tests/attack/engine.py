#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by engines: users that may connect to the control socket."""
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import secrets
import signal
import socket
import struct
import subprocess
import time

import rig
from fuse import FLUSH, READ, Silent
from rig import (MIB, ROOT, Engine, Forked, Lingering, Refused, Skip, ask, attack, raw, rest,
                 rss_mib, status_kib)
from bystander import become, libc, MALLORY, KVD

HOLD_S = 2
HELLO = b'{"id":0,"cmd":"hello","proto":1,"client":"mallory"}\n'
F_SETLEASE = 1024


def greeted(house):
    s = raw(house.a.socket_path)
    ask(s, HELLO)
    return s


def linger(house, line, tries=4, nested=False):
    lingering, kept = Lingering(), []
    for _ in range(tries):
        kept.append(greeted(house))
        lingering.send(kept[-1], line, nested=nested)
    rest(HOLD_S)
    for s in kept:
        s.close()
    rest(HOLD_S)


# ---- what sleeps ----

@attack("V1", "a descriptor of a line that is refused stops nobody when it is closed", quick=True)
def lingering_fd_with_a_refused_line(house):
    linger(house, b'{"id":1,"cmd":"nonsense"}\n')


@attack("V1", "a socket is no memory, and saying so stops nobody", quick=True)
def lingering_fd_as_a_region(house):
    linger(house, b'{"id":1,"cmd":"region.register","kind":"memfd","fd":0,"length":"4096"}\n')


@attack("V1", "a descriptor that was never read goes with its connection", quick=True)
def lingering_fd_never_read(house):
    linger(house, b'{"id":1,"cmd":')


@attack("V1", "nor does one within a socket within the line's socket", quick=True)
def lingering_fd_in_a_nested_socket(house):
    linger(house, b'{"id":1,"cmd":"nonsense"}\n', nested=True)


@attack("V1", "a file of a FUSE server that does not answer stops nobody when it is closed",
        by=ROOT)
def fuse_fd_whose_server_is_silent(house):
    fuse = Silent(house.dir + "/fuse", {FLUSH})
    fds = [os.open(fuse.path, os.O_RDWR) for _ in range(2)]
    fuse.quiet.set()
    s = greeted(house)
    pid = os.fork()  # its own close() sleeps, too
    if pid == 0:
        socket.send_fds(s, [b'{"id":1,"cmd":"nonsense"}\n'], fds[:1])
        socket.send_fds(s, [b'{"id":2,"cmd":"region.register","kind":"memfd","fd":0,'
                            b'"length":"4096"}\n'], fds[1:])
        os._exit(0)
    rest(HOLD_S)
    os.close(fuse.dev)
    return None


def register_shm(house, name, wait_s=HOLD_S):
    s = greeted(house)
    s.sendall(b'{"id":1,"cmd":"region.register","kind":"shm","shm_name":"/%s",'
              b'"length":"4096"}\n' % name.encode())
    rest(wait_s)


@attack("V2", "a FIFO in /dev/shm is refused, not opened and waited for", quick=True)
def fifo_as_a_shm_name(house):
    name = "kvd-attack-" + secrets.token_hex(8)
    os.mkfifo("/dev/shm/" + name)
    os.chmod("/dev/shm/" + name, 0o444)
    try:
        register_shm(house, name)
    finally:
        # whoever waits in open() is let go
        with contextlib.suppress(OSError):
            os.chmod("/dev/shm/" + name, 0o666)
            os.close(os.open("/dev/shm/" + name, os.O_RDWR | os.O_NONBLOCK))
        os.unlink("/dev/shm/" + name)


@attack("V2", "a file under a lease is not waited for on the loop", quick=True)
def lease_on_a_shm_object(house):
    name = "kvd-attack-" + secrets.token_hex(8)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open("/dev/shm/" + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.fchmod(fd, 0o666)
    os.ftruncate(fd, 4096)
    os.close(fd)
    fd = os.open("/dev/shm/" + name, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, F_SETLEASE, fcntl.F_RDLCK)
        register_shm(house, name)
    finally:
        os.close(fd)
        os.unlink("/dev/shm/" + name)


if __name__ == "__main__":
    rig.main("engine")
