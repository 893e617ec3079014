# SPDX-License-Identifier: Apache-2.0
"""A daemon that asks a holder to attend and keeps to no window, as fast as it can: by hand, with a
key that the holder knows. Others are served between, and what of it waits has a bound."""
import contextlib
import os
import re
import socket
import statistics
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvd
from conftest import ROOT, until
from kvd_daemon import BUILD, Daemon
from test_attend import ATTENDS, T, Engine, Model, close, ids_of

sys.path.insert(0, os.path.join(ROOT, "tests", "attack"))
import hostile  # noqa: E402
from dataline import REQUEST, DataLine  # noqa: E402

TOKENS, ROWS = 512 * T, 512  # of a message: half of what one call of the kernel computes
WAITS_MOST = 8192 // ROWS + 1  # what may wait of one daemon, and what others ask
GROWS_MOST_MIB = 96  # rows, answers and what waits in the line
ASKS = 15
MESSAGE = b"\7"  # of a data line's requests, a peer message
FEATURES = 1 | 2 | 4 | 8 | 16 | 64


@contextlib.contextmanager
def known(folder):
    """A holder, its client, that of a daemon which asks it, and a third key that it knows."""
    keys = {}
    for name in ("holder", "asker", "mallory"):
        told = subprocess.run([BUILD + "/kvd-ctl", "keygen", folder / (name + ".key")],
                              check=True, capture_output=True, text=True).stdout
        keys[name] = re.findall(r"\S{40}", told)[-1]
    (folder / "peers").write_text("".join("%s %s\n" % one for one in keys.items()))

    def config(name):
        return "[peer]\ncurve_secret_file = %s/%s.key\ncurve_allow_file = %s/peers\n" % (
            folder, name, folder)
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(Daemon(ATTENDS + config("holder")))
        far = stack.enter_context(kvd.Client(holder.socket_path))
        asker = stack.enter_context(Daemon(ATTENDS + "chunk_stores = %s\n" % far.endpoint +
                                           config("asker")))
        client = stack.enter_context(kvd.Client(asker.socket_path))
        until(lambda: any(p["data_line"] and not p["self"]
                          for p in client.command("peer.list")["peers"]))
        secret = re.search(r"^\S{40}$", (folder / "mallory.key").read_text(), re.M).group()
        yield holder, far, client, (secret, keys["mallory"])


class Flood:
    """ATTENDs of a hold, without end and without waiting, by the control or the data line."""

    def __init__(self, far, keys, model, ids, way):
        digest, = (s["digest"] for s in far.command("chunk.list")["spaces"])
        self.peer = hostile.Daemon(far.endpoint, keys, features=FEATURES)
        assert self.peer.up()
        self.peer.line()
        self.line = DataLine(self.peer) if way == "data line" else None
        self.peer.say(hostile.CHUNK_ASK, struct.pack("<Q", 7) + bytes.fromhex(digest) +
                      struct.pack("<QQ", 0, 600000) + hostile.blob(b"".join(ids)))
        told = self.peer.saw(hostile.CHUNK_TOLD)
        assert told and not struct.unpack_from("<I", told, 8)[0], told
        # behind ask, code, text (none), tokens and the blob's length: pools
        self.pool, = struct.unpack_from("<Q", told, 8 + 4 + 2 + 8 + 4 + 4)
        self.form = struct.pack("<BBBHHHHIff", 0, 0, 0, model.heads, 1, model.dqk, model.dv, 0,
                                model.scale, 0.0) + hostile.text("kv") + hostile.text("")
        self.q = bytes(ROWS * model.dqk * 2)
        self.sent, self.over, self.goes = 0, None, True
        self.threads = [threading.Thread(target=work, daemon=True)
                        for work in (self.run, self.read)[:1 + (self.line is not None)]]

    def message(self):
        self.sent += 1
        return struct.pack("<QQQIIQ", self.sent, 7, self.pool, 0, TOKENS // T, TOKENS) + \
            hostile.text("") + struct.pack("<IIII", 0, ROWS, 0, 0) + \
            b"".join(map(hostile.blob, (self.form, b"", b"", self.q)))

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


def rss_mib(daemon):
    with open("/proc/%d/status" % daemon.proc.pid, encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@pytest.mark.parametrize("way", ["control line", "data line"])
def test_who_keeps_to_no_window_disturbs_nobody_else(tmp_path, way):
    model, ids = Model(TOKENS), ids_of(TOKENS // T, b"flood")
    with known(tmp_path) as (holder, far, client, keys):
        holder.expected.append("peer")  # its line may end, and that is told
        there, near = Engine(far, model), Engine(client, model)
        there.put(ids)
        hold = near.space.hold(ids, far=10)
        assert hold.far == len(ids)

        def state():
            return far.command("attend.list")

        def ask():
            """Calls of the holder's kernel until it was answered, and what waited."""
            before = state()
            q = near.ask(0, 1, [kvd.Part(hold)], deadline=60)
            near.attend.wait(0, timeout=60)
            after = state()
            close(near.got(0), want if (q == rows).all() else None)
            return after["batches"] - before["batches"], after["waiting"]
        rows = near.ask(0, 1, [kvd.Part(hold)])
        near.attend.wait(0, timeout=60)
        want = model.attend(1, rows, np.arange(TOKENS))
        ask()
        begin, refused = rss_mib(holder), state()["refused"]
        with Flood(far, keys, model, ids, way) as flood:
            until(lambda: state()["refused"] > refused)
            calls, waited, grown = [], [], []
            for _ in range(ASKS):
                count, waiting = ask()
                calls.append(count)
                waited.append(waiting)
                grown.append(rss_mib(holder) - begin)
            told = state()
            print("%s: %d messages, %d refused; calls until an answer %s; %s waited; "
                  "grown by %.0f MiB; over: %r" % (
                      way, flood.sent, told["refused"], sorted(calls), max(waited),
                      max(grown), flood.over))
        assert max(waited) <= WAITS_MOST
        # its own, and what is computed while it comes, goes and is asked about; whoever came
        # first being next it would be all that waits
        assert statistics.median(calls) <= 5
        if os.path.basename(BUILD) == "rel":  # sanitizers have memory of their own
            assert max(grown) <= GROWS_MOST_MIB
        until(lambda: state()["waiting"] == 0)
        ask()
        hold.close()
