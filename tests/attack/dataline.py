# SPDX-License-Identifier: Apache-2.0
"""A data line over tcp (daemon/transport/tcp/tcp_wire.h) of a hostile daemon, in clear as
between loopback addresses, and its requests (transport/kinds.h)."""
import ctypes
import hashlib
import hmac
import os
import socket
import struct
import time

from hostile import blob, text

CONTROL, WELCOME, STREAM, STREAM_OK = range(1, 5)
REQUEST, GO, CANCEL, DONE = range(1, 5)
WRITE, READ = 0, 1
XFER, DLIST, DLIST_FREE, NOTIF = range(3, 7)
VERSION = 3
HEAD = struct.Struct("<IBBHQQII")
HELLO = struct.Struct("<IHBBHHI16s32s")
CHECK = 8  # bytes behind a head
ALL = struct.pack("<I", 0xffffffff)  # of a list's descriptors
KEY = struct.pack("<IQ", 0x4b54564b, 1)


def extract(salt, key):
    return hmac.digest(salt, key, "sha256")


def derive(secret, label, size=32):
    """Of HKDF-Expand's first block."""
    info = b"kvd tcp " + label + bytes(5)
    return hmac.digest(secret, info + b"\1", "sha256")[:size]


def port_of(welcome):
    """(host, port) of the first place of a WELCOME's tcp address."""
    at = welcome.index(struct.pack("<IH", 0x4154564b, VERSION)) + 7
    family, port = struct.unpack_from("<BH", welcome, at)
    assert family == 4
    return socket.inet_ntoa(welcome[at + 3:at + 7]), port


def read(s, size):
    text_ = b""
    while len(text_) < size:
        some = s.recv(size - len(text_))
        if not some:
            raise ConnectionError("the data line was closed")
        text_ += some
    return text_


class DataLine:
    """Of a peer that is up and has sent LINE tcp. Its streams are not read."""

    def __init__(self, peer, seconds=20):
        self.xx, self.id, self.done = peer.xx, 0, {}
        self.place = port_of(peer.welcome)
        self.peering = extract(b"kvd tcp 2", peer.welcome[36:52] + peer.token)
        self.seconds = seconds
        self.control = self.dial()
        said = self.say(self.control, CONTROL, self.peering, b"control",
                        derive(self.peering, b"id", 16))
        welcome = read(self.control, 96)
        assert HELLO.unpack(welcome[:64])[2] == WELCOME
        self.session = extract(hashlib.sha256(said + welcome).digest(), self.peering)
        self.streams = [self.stream(n) for n in range(HELLO.unpack(welcome[:64])[4])]

    def dial(self):
        s = socket.create_connection(self.place)
        s.settimeout(self.seconds)
        return s

    def stream(self, number):
        s = self.dial()
        self.say(s, STREAM, self.session, b"stream", derive(self.session, b"session id", 16),
                 number)
        assert HELLO.unpack(read(s, 96)[:64])[2] == STREAM_OK
        return s

    def say(self, s, role, secret, label, id_, number=0):
        bare = HELLO.pack(0x4854564b, VERSION, role, 0, 1, number, 0, id_, os.urandom(32))
        said = bare + hmac.digest(derive(secret, label), bare, "sha256")
        s.sendall(said)
        return said

    def head(self, kind, number, length=0, code=WRITE, header=b""):
        whole = HEAD.pack(0x4654564b, VERSION, kind, 0, number, length, code, len(header))
        return whole + struct.pack("<Q", self.xx.XXH3_64bits(whole, ctypes.c_size_t(HEAD.size)))

    def ask(self, header, length=0, code=WRITE):
        """A request; its number. length: the bytes that it is to move."""
        self.id += 1
        self.control.sendall(self.head(REQUEST, self.id, length, code, header) + header)
        return self.id

    def heard(self):
        """The next received frame, as (kind, number). A request without bytes needs
        finish()."""
        head = HEAD.unpack(read(self.control, HEAD.size + CHECK)[:HEAD.size])
        read(self.control, head[7])
        return head[2], head[4]

    def finish(self, number):
        self.control.sendall(self.head(DONE, number))

    def answer(self, number, seconds=20):
        """(code, text) of a DONE; None: there is none in that time."""
        end = time.monotonic() + seconds
        while number not in self.done and time.monotonic() < end:
            self.control.settimeout(max(0.01, end - time.monotonic()))
            try:
                head = HEAD.unpack(read(self.control, HEAD.size + CHECK)[:HEAD.size])
                body = read(self.control, head[7])
            except TimeoutError:
                break
            if head[2] == DONE:
                self.done[head[4]] = (head[6], body)
        return self.done.get(number)


# ---- requests between sessions ----

def dlist(gid, entries, ours, initiator, target, total=None, begin=0):
    """entries: of 32 bytes each. ours: it names the asked daemon's memory."""
    return (struct.pack("<BQBQQ", DLIST, gid, ours, initiator, target[0]) + target[1] +
            struct.pack("<III", len(entries) // 32 if total is None else total, begin,
                        len(entries) // 32) + entries)


def xfer(kind, initiator, target, local, remote, length, picks=(ALL, ALL), digest=0):
    return (struct.pack("<BBQQ", XFER, kind, initiator, target[0]) + target[1] +
            struct.pack("<QQQQ", local, remote, digest, length) + picks[0] + picks[1] +
            struct.pack("<B", 0) + text("") + blob(b""))


def runs(first, count, times):
    """The same descriptors again and again."""
    return struct.pack("<II", count * times, times) + struct.pack("<II", first, count) * times
