# SPDX-License-Identifier: Apache-2.0
"""A daemon by hand that asks a holder to attend, as fast as it can and without a window."""
import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading

from kvd_daemon import BUILD

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "attack"))
import hostile  # noqa: E402
from dataline import REQUEST, DataLine  # noqa: E402

MESSAGE = b"\7"  # of a data line's requests, a peer message
FEATURES = 1 | 2 | 4 | 8 | 16 | 64


def keys_of(folder, names):
    """Keys of daemons that know each other. -> {name: its [peer] section}, {name: its keys}"""
    keys, sections = {}, {}
    for name in names:
        path = os.path.join(folder, name + ".key")
        told = subprocess.run([BUILD + "/kvd-ctl", "keygen", path], check=True,
                              capture_output=True, text=True).stdout
        with open(path, encoding="ascii") as lines:
            secret = re.search(r"^\S{40}$", lines.read(), re.M).group()
        keys[name] = secret, re.findall(r"\S{40}", told)[-1]
        sections[name] = "[peer]\ncurve_secret_file = %s\ncurve_allow_file = %s/peers\n" % (
            path, folder)
    with open(os.path.join(folder, "peers"), "w", encoding="ascii") as peers:
        peers.writelines("%s %s\n" % (name, public) for name, (_, public) in keys.items())
    return sections, keys


class Flood:
    """ATTENDs of a hold's chunks, without end, by the control or the data line. Rows are of MLA
    in bf16, in the field "kv" of layer 0; client: the holder's."""

    def __init__(self, client, keys, ids, *, tokens, rows, heads, dqk, dv, data_line=False):
        digest, = (s["digest"] for s in client.command("chunk.list")["spaces"])
        self.peer = hostile.Daemon(client.endpoint, keys, features=FEATURES)
        assert self.peer.up(), "the holder does not know the key"
        self.peer.line()
        self.line = DataLine(self.peer) if data_line else None
        self.peer.say(hostile.CHUNK_LOOKUP, struct.pack("<Q", 7) + bytes.fromhex(digest) +
                      struct.pack("<QQ", 0, 600000) + hostile.blob(b"".join(ids)))
        told = self.peer.saw(hostile.CHUNK_LOOKUP_ACK)
        assert told and not struct.unpack_from("<I", told, 8)[0], told
        # behind ask, code, text (none), tokens and the blob's length: pools
        pool, = struct.unpack_from("<Q", told, 8 + 4 + 2 + 8 + 4 + 4)
        form = struct.pack("<BBBHHHHIff", 0, 0, 0, heads, 1, dqk, dv, 0, dqk ** -0.5, 0.0) + \
            hostile.text("kv") + hostile.text("")
        self.body = struct.pack("<QQIIQ", 7, pool, 0, len(ids), tokens) + hostile.text("") + \
            struct.pack("<IIII", 0, rows, 0, 0) + \
            b"".join(map(hostile.blob, (form, b"", b"", bytes(rows * dqk * 2))))
        self.sent, self.over, self.goes = 0, None, True
        self.threads = [threading.Thread(target=work, daemon=True)
                        for work in (self.run, self.read)[:1 + data_line]]

    def message(self):
        self.sent += 1
        return struct.pack("<Q", self.sent) + self.body

    def run(self):
        try:
            while self.goes:
                if self.line is None:
                    self.peer.say(hostile.ATTEND, self.message())
                    continue
                with self.peer.lock:
                    self.peer.sequence += 1
                    frame = self.peer.frame(hostile.ATTEND, self.message(), self.peer.sequence)
                    self.line.ask(MESSAGE + frame)
        except OSError as why:
            self.over = why

    def read(self):
        """Answers come by the data line, too: each is a request of no bytes."""
        with contextlib.suppress(OSError):
            while True:
                kind, number = self.line.heard()
                if kind == REQUEST:
                    with self.peer.lock:
                        self.line.finish(number)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *why):
        self.goes = self.peer.alive = False
        if self.line is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.line.control.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
