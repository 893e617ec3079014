#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every packet between two real daemons in two network namespaces, while rooms move: with
encryption nothing of a page is in them, no ticket, no secret and no token; without, pages
are, and without keys all of that."""
import contextlib
import os
import socket
import struct
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
from kvd_daemon import BUILD, Skip, run  # noqa: E402
from kvd_engine import (BYTES, FIELD, LAYERS, PAGE_TOKENS, PAGES, SUCCESS,  # noqa: E402
                        TOKEN, Cache, open_pull, open_push)
from test_pods import two_pods  # noqa: E402
from test_xfer import Agents  # noqa: E402
from world import LIBC  # noqa: E402

CONFIG = """[peer]
listen = tcp://%%s:%%d
%s[transport]
transports = %%s
tcp_crypto = %s
"""
PAGE = PAGE_TOKENS * TOKEN
SRC = list(range(PAGES - 1))
DST = SRC[::-1]
SMALL = PAGES - 1  # its bytes travel in a request
CHUNK = 16
CLONE_NEWNET = 0x40000000
SO_RCVBUFFORCE, SOL_PACKET, PACKET_STATISTICS, ETH_P_ALL = 33, 263, 6, 3
ROOM = 256 << 20  # for what is captured until it is read
Z85 = ("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
       ".-:+=^!/*?&<>()[]{}@%$#")


# ---- the wire ----

class Capture:
    """All packets of a namespace's interface from now on."""

    def __init__(self, pid, interface):
        with open("/proc/%d/ns/net" % pid) as there, open("/proc/self/ns/net") as here:
            assert LIBC.setns(there.fileno(), CLONE_NEWNET) == 0
            self.sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            assert LIBC.setns(here.fileno(), CLONE_NEWNET) == 0
        self.sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
        self.sock.bind((interface, ETH_P_ALL))
        self.sock.setblocking(False)

    def packets(self):
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self.sock.recv(1 << 17)
        _, dropped = struct.unpack("II", self.sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        assert dropped == 0, dropped

    def said(self):
        """What each end of a TCP connection has sent, in order and without a gap; all
        other packets."""
        begins, parts, others = {}, {}, []
        for packet in self.packets():
            ip = packet[14:]
            if packet[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
                others.append(packet)
                continue
            length = int.from_bytes(ip[2:4], "big")
            tcp = ip[4 * (ip[0] & 15):length or len(ip)]  # 0: over 64 KiB
            key, seq, flags = ip[12:20] + tcp[:4], int.from_bytes(tcp[4:8], "big"), tcp[13]
            if flags & 2:
                begins[key] = seq + 1
            parts.setdefault(key, []).append((seq, tcp[4 * (tcp[12] >> 4):]))
        return [whole(parts[key], begins[key]) for key in parts] + others

    def close(self):
        self.sock.close()


def whole(parts, begin):
    said = bytearray()
    for seq, data in sorted(((seq - begin) % (1 << 32), data) for seq, data in parts if data):
        assert seq <= len(said), "a segment is missing"
        said[seq:seq + len(data)] = data
    return bytes(said)


# ---- what must not be there ----

def z85(text):
    value = b""
    for i in range(0, len(text), 5):
        number = 0
        for letter in text[i:i + 5]:
            number = number * 85 + Z85.index(letter)
        value += number.to_bytes(4, "big")
    return value


def chunks(data):
    return {bytes(data[i:i + CHUNK]) for i in range(0, len(data) - CHUNK + 1, CHUNK)}


def secret(data):
    """As it is, and in hexadecimal."""
    return chunks(data) | chunks(data.hex().encode())


def drawn_in(path):
    """Tokens, secrets of sessions and instance ids, as the daemons' random bytes came."""
    with open(path, "rb") as notes:
        count, = struct.unpack("Q", notes.read(8))
        return {notes.read(CHUNK) for _ in range(count)}


def key_of(pod):
    folder = os.path.join(pod.files, "keys-%d" % os.geteuid())
    with open(os.path.join(folder, "kvd.key")) as key:
        words = key.read().split()
    text, = [w for w in words if len(w) == 40 and set(w) <= set(Z85)]
    return chunks(text.encode()) | chunks(z85(text))


# ---- rooms ----

def pages_of(memory, pages):
    return b"".join(memory[field * FIELD + page * PAGE:][:PAGE]
                    for field in range(2 * LAYERS) for page in pages)


def move(engines, src, dst, ticket):
    prefill, decode = engines
    for room, way in ((1, open_push), (2, open_pull)):
        dst.mem[:] = bytes(BYTES)
        way(prefill, decode, src, dst, room, SRC, DST, len(SRC) * PAGE_TOKENS, ticket=ticket)
        decode.until(room, "recv" if way is open_push else "pull", SUCCESS)
        prefill.until(room, "send" if way is open_push else "offer", SUCCESS)
        assert pages_of(dst.mem[:], DST) == pages_of(src.mem[:], SRC)
    open_push(prefill, decode, src, dst, 3, [SMALL], [SMALL], 1, ticket=ticket)
    decode.until(3, "recv", SUCCESS)
    Agents.attach(decode, prefill)


def captured(crypto, more=""):
    """What is looked for: {kind: chunks}, and the chunks that were seen."""
    if os.path.basename(BUILD) != "rel":
        raise Skip("a preload, which sanitizers do not like to come second to")
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except OSError as why:
        raise Skip("AF_PACKET (CAP_NET_RAW): %s" % why)
    with contextlib.ExitStack() as after:
        notes = after.enter_context(tempfile.NamedTemporaryFile(prefix="kvd-drawn-"))
        notes.truncate(1 << 16)
        env = {"LD_PRELOAD": os.path.abspath(os.path.join(BUILD, "drawn.so")),
               "KVD_DRAWN": notes.name}
        pods = after.enter_context(two_pods(transports="tcp", env=env,
                                            config=CONFIG % (more, crypto)))
        capture = Capture(pods[0].net.router, "r0")
        after.callback(capture.close)
        engines = [pod.engine("e%d" % i) for i, pod in enumerate(pods)]
        src, dst = map(Cache, engines)
        src.mem[:] = os.urandom(BYTES)
        ticket = os.urandom(CHUNK)
        move(engines, src, dst, ticket.hex())
        instances = {bytes.fromhex(e.info["instance"]) for e in engines}
        own, = [s["secret"] for s in engines[0].cmd("session.list")["sessions"] if "secret" in s]
        peer, = [p for p in engines[0].cmd("peer.list")["peers"] if not p.get("self")]
        assert peer["transport"] == "tcp" and peer["crypto"].startswith(crypto), peer
        wanted = {"page": chunks(pages_of(src.mem[:], SRC)),
                  "small page": chunks(src.mem[SMALL * PAGE:][:TOKEN]),
                  "ticket": secret(ticket), "secret": secret(bytes.fromhex(own)),
                  "drawn": drawn_in(notes.name) - instances,
                  "key": set() if more else key_of(pods[0]) | key_of(pods[1])}
        for engine in engines:
            engine.close()
        said = capture.said()
    assert sum(map(len, said)) > 2 * len(SRC) * PAGE * 2 * LAYERS, list(map(len, said))
    every = set().union(*wanted.values())
    return wanted, {w for s in said for i in range(len(s) - CHUNK + 1)
                    if (w := s[i:i + CHUNK]) in every}


def encrypted_traffic_shows_no_content():
    wanted, seen = captured("aes128gcm")
    assert len(wanted["drawn"]) >= 4, len(wanted["drawn"])  # 2 of sessions, 2 tokens
    found = {kind: len(known & seen) for kind, known in wanted.items() if known & seen}
    assert not found, found


def unencrypted_traffic_shows_pages_only():
    """What opens rooms and sessions takes the control line then, which has keys."""
    wanted, seen = captured("none")
    assert wanted.pop("page") | wanted.pop("small page") <= seen
    found = {kind: len(known & seen) for kind, known in wanted.items() if known & seen}
    assert not found, found


def unencrypted_traffic_shows_everything():
    """So that the one above has looked at the right bytes in the right places."""
    wanted, seen = captured("none", "insecure = yes\n")
    for kind in ("page", "small page"):
        assert wanted[kind] <= seen, (kind, len(wanted[kind] - seen))
    for kind in ("ticket", "secret", "drawn"):
        assert wanted[kind] & seen, kind


run([encrypted_traffic_shows_no_content, unencrypted_traffic_shows_pages_only,
     unencrypted_traffic_shows_everything])
