#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Somebody between two real daemons, on tcp's connections (tests/lib/preload/detour.c): he
reads nothing of a page and no token, and what he changes, drops, repeats, swaps, moves to
another connection or cuts off ends the rooms of both sides within a second, with nothing
wrong in anybody's memory."""
import functools
import itertools
import os
import select
import socket
import struct
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import kvd_engine  # noqa: E402
from kvd_daemon import BUILD, Daemon, Skip, free_port, run, until  # noqa: E402
from kvd_engine import BYTES, FAILED, TOKEN, SUCCESS, open_pull, open_push  # noqa: E402

HELLO, HEAD = 96, 5  # bytes of a connection's beginning, and of a record's
EMPTY = HEAD + 48 + 1 + 16  # of a record that has a frame's head only, as a BEAT has
SRC = list(range(63))
DST = list(range(62, -1, -1))
TOKENS = 1000
WITHIN_S = 1.0
# one side's room may fail with the peering that ends, and the other's waits for it
CONFIG = """[rooms]
bootstrap_timeout = 2 s
[transport]
transports = tcp
tcp_listen = tcp://127.0.0.1:%d
tcp_streams = 2
tcp_crypto = %s
[peer]
listen = tcp://127.0.0.1:%d
"""


class Way:
    """One direction of a connection: bytes that came and did not leave yet."""

    def __init__(self, middle, index, forth, here, there):
        self.middle, self.index, self.forth = middle, index, forth
        self.here, self.there = here, there
        self.held, self.seen, self.records, self.open = b"", bytearray(), 0, True

    def take(self):
        try:
            came = self.here.recv(65536)
        except OSError:
            came = b""
        if not came:
            self.open = False
            try:
                self.there.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            return
        self.seen += came
        self.held += came
        self.pass_on()

    def pass_on(self):
        """Hellos and all that has no records as it is; records one by one."""
        if not self.middle.cuts_records or len(self.seen) - len(self.held) < HELLO:
            n = len(self.held) if not self.middle.cuts_records else \
                min(len(self.held), HELLO - (len(self.seen) - len(self.held)))
            self.send(self.held[:n])
            self.held = self.held[n:]
        while len(self.held) >= HEAD and self.middle.cuts_records:
            end = HEAD + int.from_bytes(self.held[3:5], "big")
            if len(self.held) < end:
                return
            record, self.held = self.held[:end], self.held[end:]
            self.records += 1
            self.middle.tamper(self, record)

    def send(self, data):
        while data and self.open:
            try:
                select.select([], [self.there], [])
                data = data[self.there.send(data):]
            except OSError:
                return

    def cut(self, reset):
        """The receiver is told that the sender has closed, or reset, the connection, of
        which nobody hears more: not the sender either."""
        for way in self.middle.ways[2 * self.index:][:2]:
            way.open = False
        if reset:
            self.there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                  struct.pack("ii", 1, 0))
            self.there.close()
        else:
            self.there.shutdown(socket.SHUT_WR)


class Middle:
    """Listens where daemons are sent instead of `port`, and connects to it."""

    def __init__(self, port, cuts_records=True):
        self.port, self.cuts_records = port, cuts_records
        self.ways, self.ending = [], False
        self.tamper = self.honest
        self.began = None  # when a wrong byte was sent first
        self.door = socket.create_server(("127.0.0.1", 0))
        self.at = self.door.getsockname()[1]
        self.thread = threading.Thread(target=self.main)
        self.thread.start()

    def main(self):
        while not self.ending:
            ways = [w for w in self.ways if w.open]
            ready = select.select([self.door] + [w.here for w in ways], [], [], 0.05)[0]
            if self.door in ready:
                here = self.door.accept()[0]
                there = socket.create_connection(("127.0.0.1", self.port))
                for s in (here, there):
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                index = len(self.ways) // 2
                self.ways += [Way(self, index, True, here, there),
                              Way(self, index, False, there, here)]
            for way in ways:
                if way.here in ready and way.open:
                    way.take()

    def close(self):
        self.ending = True
        self.thread.join()
        for s in [self.door] + [w.here for w in self.ways]:
            s.close()

    def seen(self):
        return [bytes(w.seen) for w in self.ways]

    def honest(self, way, record):
        way.send(record)

    def now(self):
        self.began = self.began or time.monotonic()


# ---- what he does to the records of a room ----

def big(record):
    return len(record) > 4096


class Tamper:
    """On connections of `line` (the control lines) or streams; after `skip` records. On a
    line it begins with a request: a BEAT that still belongs to the room before would end
    the peering before this room is there."""

    def __init__(self, middle, line, skip=3):
        self.middle, self.line, self.left, self.kept = middle, line, skip, None
        self.begun = self.done = False

    def wants(self, way, record):
        """Roles are in the hello: CONTROL is 1, its answer 2."""
        if self.done or (way.seen[6] <= 2) != self.line or not (self.line or big(record)):
            return False
        self.begun = self.begun or len(record) > EMPTY
        if not self.begun:
            return False
        self.left -= 1
        return self.left < 0

    def __call__(self, way, record):
        if self.wants(way, record):
            self.act(way, record)
        else:
            way.send(record)

    def wrong(self, way, *records):
        self.done = True
        self.middle.now()
        way.send(b"".join(records))  # at once: the room may end between two of them


class Flip(Tamper):
    def act(self, way, record):
        at = len(record) // 2
        self.wrong(way, record[:at] + bytes([record[at] ^ 1]) + record[at + 1:])


class Drop(Tamper):
    def act(self, way, record):
        self.wrong(way)


class Repeat(Tamper):
    def act(self, way, record):
        self.wrong(way, record, record)


class Swap(Tamper):
    """Two neighbours of one direction."""

    def act(self, way, record):
        if self.kept is None:
            self.kept = (way, record)
        elif self.kept[0] is way:
            self.wrong(way, record, self.kept[1])
        else:
            way.send(record)


class Splice(Tamper):
    """A record of one connection, in the place of another's; on the control line, whose
    other direction's it is, that is a reflection."""

    def act(self, way, record):
        if self.kept is None:
            self.kept = (way, record)
            way.send(record)
        elif self.kept[0] is not way:
            self.wrong(way, self.kept[1])
        else:
            way.send(record)


class Cut(Tamper):
    """The connection ends behind a record, or in its middle."""

    def __init__(self, middle, line, skip=3, within=False, reset=False):
        super().__init__(middle, line, skip)
        self.within, self.reset = within, reset

    def act(self, way, record):
        self.wrong(way, record[:len(record) // 2] if self.within else record)
        way.cut(self.reset)


# ---- two daemons and who is in between ----

class Pair(kvd_engine.Pair):
    """`handshake`: what the daemons tell each other can be read, too."""

    def __init__(self, crypto="aes128gcm", handshake=False):
        if os.path.basename(BUILD) != "rel":
            raise Skip("a preload, which sanitizers do not like to come second to")
        data, control = [free_port(), free_port()], [free_port(), free_port()]
        self.middles = [Middle(port) for port in data]
        self.lines = [Middle(port, cuts_records=False) for port in control] \
            if handshake else []
        env = {"LD_PRELOAD": os.path.join(BUILD, "detour.so"),
               "KVD_DETOUR": " ".join("%d=%d" % (m.port, m.at)
                                      for m in self.middles + self.lines)}
        config = CONFIG + ("insecure = yes\n" if handshake else "")
        super().__init__([Daemon(config % (d, crypto, c), env=env)
                          for d, c in zip(data, control)])
        for d in self.daemons if handshake else []:
            d.expect("insecure: ")

    def __enter__(self):
        try:
            return super().__enter__()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc):
        try:
            super().__exit__(*exc)
        finally:
            self.close()

    def close(self):
        for m in self.middles + self.lines:
            m.close()

    @property
    def middle(self):
        """The one that was dialled."""
        return max(self.middles, key=lambda m: len(m.ways))

    def begin(self, room, push=True, ready=None):
        """ready() is called when both sides know of the room; it may end the room."""
        spoil = ready or (lambda: None)
        self.src.fill(SRC, TOKENS)
        args = self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS
        if not push:
            spoil()
            open_pull(*args)
            return "offer", "pull"
        open_push(*args, send=False)
        spoil()
        try:
            self.prefill.cmd("room.send", room=str(room), seq=0, last=True,
                             views={"kv": dict(pages=SRC, tokens=[0, TOKENS])})
        except kvd_engine.Refused as why:
            if not ready or why.code != "EPEER":
                raise  # else the line was cut at a message before this one's
        return "send", "recv"

    def move(self, room, push=True):
        roles = self.begin(room, push)
        self.decode.until(room, roles[1], SUCCESS)
        self.prefill.until(room, roles[0], SUCCESS)
        self.dst.check(DST, TOKENS)


def pages_and_tokens_are_not_visible():
    for crypto in ("aes128gcm", "none"):
        with Pair(crypto, handshake=True) as p:
            if crypto == "none":
                for m in p.middles:
                    m.cuts_records = False
            p.move(1)
            p.move(2, push=False)
            seen = p.middle.seen()
            assert sum(map(len, seen)) > 4 * 1000 * 1000, list(map(len, seen))
            rows = [row for _, row in p.src.each(SRC, TOKENS)]
            found = [any(row[at:at + 16] in s for s in seen)
                     for row in rows[::97] for at in (0, 100, 240)]
            assert all(found) if crypto == "none" else not any(found), (crypto, found)
            # what the handshake told, here in clear, is nowhere in the data connections'
            # hellos and the records behind them, so no token is
            told = b"".join(s for m in p.lines for s in m.seen())
            assert all(e.endpoint.encode() in told for e in (p.prefill, p.decode))
            windows = {told[i:i + 16] for i in range(len(told) - 15)} - {bytes(16)}
            for s in seen:
                s = s[:HELLO + (4096 if crypto == "aes128gcm" else 0)]
                same = [i for i in range(len(s) - 15) if s[i:i + 16] in windows]
                assert not same, same
            # the words of a room are not seen either
            peer, = [q for q in p.prefill.cmd("peer.list")["peers"] if not q.get("self")]
            assert peer["crypto"] == crypto, peer


def landed_is_right_or_old(pair, before):
    """Each byte of the destination is what it was, or what it should become."""
    wanted = bytearray(before)
    for at, row in pair.dst.each(DST, TOKENS):
        wanted[at:at + len(row)] = row
    now = pair.dst.mem[:BYTES]
    wrong = [i for row in range(0, BYTES, TOKEN)
             if now[row:row + TOKEN] not in (before[row:row + TOKEN], wanted[row:row + TOKEN])
             for i in range(row, row + TOKEN)
             if now[i] != before[i] and now[i] != wanted[i]]
    assert not wrong, "%d bytes, from %d on" % (len(wrong), wrong[0])


def tampered(how, line, push=True, crypto="aes128gcm",
             why=("tcp: authentication failed",)):
    with Pair(crypto) as p:
        p.move(1, push)
        p.dst.mem[:] = bytes(BYTES)
        middle = p.middle
        for d in p.daemons:
            for words in why:
                d.expect(words)

        def ready():
            middle.tamper = how(middle, line, skip=0 if line else 3)
        roles = p.begin(2, push, ready)
        _, there = p.decode.until(2, roles[1], FAILED)
        decode_s = time.monotonic() - middle.began
        _, here = p.prefill.until(2, roles[0], FAILED)
        prefill_s = time.monotonic() - middle.began
        assert max(decode_s, prefill_s) < WITHIN_S, (decode_s, prefill_s)
        told = here["message"] + " | " + there["message"]
        assert any(words in told for words in why), told
        landed_is_right_or_old(p, bytes(BYTES))
        # the next peering works again
        middle.tamper = middle.honest
        until("a new peering", lambda: moved_again(p), 30)


def moved_again(pair):
    pair.room = getattr(pair, "room", 10) + 1
    pair.dst.mem[:] = bytes(BYTES)
    try:
        pair.move(pair.room)
        return True
    except (AssertionError, kvd_engine.Refused):
        return False


def flipped_bits_end_the_room():
    tampered(Flip, line=False)
    tampered(Flip, line=True)
    tampered(Flip, line=False, push=False)


def dropped_records_end_the_room():
    tampered(Drop, line=False)
    tampered(Drop, line=True)


def repeated_records_end_the_room():
    tampered(Repeat, line=False)
    tampered(Repeat, line=True, push=False)


def swapped_records_end_the_room():
    tampered(Swap, line=False, push=False)
    tampered(Swap, line=False)


def records_of_another_connection_end_the_room():
    tampered(Splice, line=False)
    tampered(Splice, line=True)


CLOSED = ("a stream of ", "connection to ")


def cut(line, within, reset, **how):
    tampered(functools.partial(Cut, within=within, reset=reset), line, why=CLOSED, **how)


def cut_streams_end_the_room():
    for within, reset in itertools.product((False, True), repeat=2):
        cut(False, within, reset)
    cut(False, True, False, push=False)


def cut_control_line_ends_the_room():
    for within, reset in itertools.product((False, True), repeat=2):
        cut(True, within, reset)


run([pages_and_tokens_are_not_visible, flipped_bits_end_the_room,
     dropped_records_end_the_room, repeated_records_end_the_room,
     swapped_records_end_the_room, records_of_another_connection_end_the_room,
     cut_streams_end_the_room, cut_control_line_ends_the_room])
