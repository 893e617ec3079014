# SPDX-License-Identifier: Apache-2.0
"""A fake daemon: it speaks the control line (proto/wire_table.h) with a key that the attacked
daemon knows, or with an unknown one, and sends the messages of an attack."""
import contextlib
import ctypes
import os
import re
import struct
import threading
import time

from rig import Skip, free_port, rest

DEALER, ROUTER = 5, 6
LINGER, RCVTIMEO, SNDTIMEO, SNDHWM, CURVE_SERVER, PUBLIC, SECRET, SERVER = (
    17, 27, 28, 23, 47, 48, 49, 50)
DONTWAIT, SNDMORE = 1, 2
HELLO, WELCOME, PING, PONG, BYE, REGISTER, REGISTER_ACK, REGISTER_NAK = range(1, 9)
UNREGISTER, UNREGISTER_ACK, TRANSFER_INFO = 9, 10, 13
TRANSFER_INFO_ACK, TRANSFER_INFO_NAK, ABORT, OFFER_QUERY = 14, 15, 17, 19
ATTACH, ATTACH_ACK, ATTACH_NAK = 24, 25, 26
PART, LINE = 31, 32
CHUNK_LOOKUP, CHUNK_LOOKUP_ACK, ATTEND, ATTENTION_RESULT = 33, 34, 43, 44
BASE, VERSION = 1, 2
HEAD = struct.Struct("<IHHI16s16sQQIIQ20s")


def library(name):
    try:
        return ctypes.CDLL(name, use_errno=True)
    except OSError as why:
        raise Skip(str(why)) from None


def text(s):
    s = s.encode()
    return struct.pack("<H", len(s)) + s


def blob(b):
    return struct.pack("<I", len(b)) + b


class Daemon:
    """at: the attacked daemon's endpoint with its key. keys: (secret, public)."""

    def __init__(self, at, keys=None, low=True, host="127.0.0.1", shm=False,
                 transport="tcp", features=BASE):
        self.zmq, self.xx = library("libzmq.so.5"), library("libxxhash.so.0")
        for name in ("zmq_ctx_new", "zmq_socket"):
            getattr(self.zmq, name).restype = ctypes.c_void_p
        self.xx.XXH3_64bits.restype = ctypes.c_uint64
        self.context = ctypes.c_void_p(self.zmq.zmq_ctx_new())
        self.keys = keys or self.new_keys()
        self.plain, _, self.server_key = at.partition("#")
        self.port = free_port()
        self.id = (b"\1" if low else b"\xfe") + os.urandom(15)
        self.epoch, self.nonce = (int.from_bytes(os.urandom(8), "little") >> 1 for _ in "12")
        self.endpoint = "tcp://%s:%d#%s" % (host, self.port, self.keys[1])
        self.router = self.open(ROUTER, server=True)
        assert self.zmq.zmq_bind(self.router, b"tcp://127.0.0.1:%d" % self.port) == 0
        self.dealer = self.dial()
        self.sequence, self.theirs, self.their_id, self.addresses = 0, 0, bytes(16), b""
        self.heard, self.alive, self.pongs = [], True, True
        self.welcome, self.shm, self.lock = b"", shm, threading.Lock()
        self.transport, self.features = transport, features
        self.threads, self.boot, self.token = [], b"", os.urandom(16)

    def new_keys(self):
        public, secret = (ctypes.create_string_buffer(41) for _ in "12")
        self.zmq.zmq_curve_keypair(public, secret)
        return secret.value.decode(), public.value.decode()

    def set(self, socket, option, value):
        data = value if isinstance(value, bytes) else struct.pack("<i", value)
        assert self.zmq.zmq_setsockopt(socket, option, data, ctypes.c_size_t(len(data))) == 0

    def open(self, kind, server=False):
        socket = ctypes.c_void_p(self.zmq.zmq_socket(self.context, kind))
        self.set(socket, LINGER, 0)
        self.set(socket, RCVTIMEO, 50)
        self.set(socket, SNDTIMEO, 500)
        self.set(socket, SECRET, self.keys[0].encode() + b"\0")
        if server:
            self.set(socket, CURVE_SERVER, 1)
        else:
            self.set(socket, PUBLIC, self.keys[1].encode() + b"\0")
            self.set(socket, SERVER, self.server_key.encode() + b"\0")
        return socket

    def dial(self):
        socket = self.open(DEALER)
        assert self.zmq.zmq_connect(socket, self.plain.encode()) == 0
        return socket

    # ---- frames ----

    def frame(self, type_, body=b"", number=0, **bent):
        h = dict(magic=0x3144564b, version=VERSION, kind=type_, flags=0, sender=self.id,
                 target=self.their_id, epoch=self.theirs, sequence=number,
                 length=len(body), sum=0, mine=self.epoch)
        if type_ in (HELLO, WELCOME):
            h.update(target=bytes(16) if type_ == HELLO else self.their_id,
                     epoch=self.epoch, mine=0 if type_ == HELLO else self.theirs)
        h.update(bent)
        whole = HEAD.pack(*h.values(), bytes(20)) + body
        checked = self.xx.XXH3_64bits(whole, ctypes.c_size_t(len(whole))) & 0xffffffff
        return whole[:64] + struct.pack("<I", checked) + whole[68:]

    def put(self, frame, socket=None, flags=0):
        """False: it was not taken in half a second."""
        return self.zmq.zmq_send(socket or self.dealer, frame, ctypes.c_size_t(len(frame)),
                                 flags) >= 0

    def say(self, type_, body=b"", **bent):
        with self.lock:
            self.sequence += 1
            return self.put(self.frame(type_, body, self.sequence, **bent))

    def shm_address(self):
        """Of a peer that dials, and is not to be dialled."""
        return (b"\3" + self.boot + text("@kvd-none") + text("") +
                struct.pack("<QQI", 0, 0, os.geteuid()))

    def hello_body(self, low=VERSION, high=VERSION, features=None, endpoint=None, name="mallory"):
        place = struct.pack("<IHBBH4s", 0x4154564b, 3, 1, 4, 1, bytes([127, 0, 0, 1]))
        if self.transport == "ucx":  # a fake worker: the dialler sends hello first
            place = struct.pack("<IHH", 0x4144564b, 1, 64) + bytes(64)
        addresses = text(self.transport) + blob(place)
        if self.shm:
            addresses += text("shm") + blob(self.shm_address())
        addresses = struct.pack("<I", 1 + self.shm) + addresses
        return (struct.pack("<HHQQ", low, high, features or self.features, self.nonce) +
                (self.boot or os.urandom(16)) + self.token +
                text(name) + text(endpoint or self.endpoint) + blob(addresses) + text("x"))

    def hear(self):
        """The next frame as (type, header, body), or None."""
        buf = ctypes.create_string_buffer(1 << 20)
        parts = []
        while True:
            n = self.zmq.zmq_recv(self.router, buf, ctypes.c_size_t(len(buf)), 0)
            if n < 0:
                return None
            parts.append(buf.raw[:n])
            if n >= HEAD.size and parts[-1][:4] == b"KVD1":
                h = HEAD.unpack(parts[-1][:HEAD.size])
                return h[2], h, parts[-1][HEAD.size:]

    # ---- a peering ----

    def up(self, seconds=5):
        """HELLO, their WELCOME, our PING, which is the proof."""
        end = time.monotonic() + seconds
        again = 0
        while time.monotonic() < end:
            if time.monotonic() > again:
                self.put(self.frame(HELLO, self.hello_body()), flags=DONTWAIT)
                again = time.monotonic() + 0.5
            said = self.hear()
            if said and said[0] == WELCOME:
                self.their_id, self.theirs = said[1][4], said[1][6]
                self.welcome = said[2]
                self.say(PING, struct.pack("<Q", 1))
                self.threads.append(threading.Thread(target=self.serve, daemon=True))
                self.threads[-1].start()
                return True
        return False

    def afresh(self, epoch, instance=None):
        """As after a restart."""
        self.alive = False
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        self.heard.clear()
        self.id, self.epoch = instance or self.id, epoch
        self.sequence, self.their_id, self.alive = 0, bytes(16), True

    def serve(self):
        """PINGs are answered, all other messages are kept in heard."""
        last = time.monotonic()
        while self.alive:
            said = self.hear()
            if said and said[0] == PING and self.pongs:
                self.say(PONG, said[2])
            elif said:
                self.heard.append((said[0], said[2]))
            if time.monotonic() - last > 0.2 and self.pongs:
                last = time.monotonic()
                self.say(PING, struct.pack("<Q", 2))

    def saw(self, kind, seconds=10):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for was, body in list(self.heard):
                if was == kind:
                    return body
            rest(0.02)
        return None

    def line(self, transport=None):
        return self.say(LINE, text(transport or self.transport) + struct.pack("<I", 0) + text("") +
                        struct.pack("<I", 0) + text(""))

    def pool(self):
        """A pool of theirs, announced as ours, too: rooms can pair the two by its number."""
        self.line()
        told = self.saw(REGISTER, 5)
        assert told, "no pool is told"
        self.say(REGISTER_ACK, told[:8])
        self.say(REGISTER, told)
        assert self.saw(REGISTER_ACK), "ours is not taken"
        return struct.unpack_from("<Q", told)[0]


def keys_of(house, name="mallory"):
    with open(os.path.join(house.dir, name + ".key")) as lines:
        return re.search(r"^\S{40}$", lines.read(), re.M).group(), house.keys[name]


def known(house, **more):
    return Daemon(house.endpoints["a"], keys_of(house), **more)


@contextlib.contextmanager
def peered(house, **more):
    one = known(house, **more)
    if one.shm:  # of the same boot, as in its WELCOME
        scout = known(house)
        assert scout.up(), "no WELCOME"
        scout.alive, one.boot = False, scout.welcome[20:36]
        scout.say(BYE, struct.pack("<I", 1) + text("bye"), sequence=0)
    assert one.up(), "no WELCOME: %s" % house.a.log()[-600:]
    try:
        yield one
    finally:
        one.alive = False
