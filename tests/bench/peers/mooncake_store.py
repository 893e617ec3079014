#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store on this machine, as a peer of bench_chunks.py: a master and one client that
gives memory, by tcp. Run by the interpreter of a venv that has it.

Reads a line `put N`, `get N` (N pieces of 4 MiB, contiguous, registered) or `exist N`, and
answers with the seconds that it took; ends with its input."""
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore

PIECE = 4 << 20
PIECES = 128
MEMORY = 8 << 30
HOST = "127.0.0.1"


def free_port():
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def master(log):
    port = free_port()
    proc = subprocess.Popen(
        [os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master"),
         "--rpc_port=%d" % port, "--metrics_port=%d" % free_port()],
        stdout=log, stderr=subprocess.STDOUT)
    pause = threading.Event()
    for _ in range(200):
        with socket.socket() as s:
            if s.connect_ex((HOST, port)) == 0:
                return proc, port
        pause.wait(0.05)
    proc.kill()
    raise SystemExit("mooncake_master does not answer")


class Store:
    def __init__(self, port):
        self.store = MooncakeDistributedStore()
        said = self.store.setup("%s:%d" % (HOST, free_port()), "P2PHANDSHAKE", MEMORY, 512 << 20,
                                "tcp", "", "%s:%d" % (HOST, port))
        assert said == 0, said
        self.bytes = np.ones(PIECES * PIECE, np.uint8)
        self.base = self.bytes.ctypes.data
        assert self.store.register_buffer(self.base, self.bytes.nbytes) == 0
        self.turn = 0
        self.known = ["known%d" % i for i in range(512)]
        assert not any(self.store.batch_put_from(self.known, [self.base] * 512, [4096] * 512))

    def keys(self, count):
        return ["%d.%d" % (self.turn, i) for i in range(count)]

    def put(self, count):
        self.turn += 1
        said = self.store.batch_put_from(self.keys(count), self.at(count), [PIECE] * count)
        assert not any(said), said

    def get(self, count):
        said = self.store.batch_get_into(self.keys(count), self.at(count), [PIECE] * count)
        assert all(n == PIECE for n in said), said

    def exist(self, count):
        assert all(self.store.batch_is_exist(self.known[:count]))

    def at(self, count):
        return [self.base + i * PIECE for i in range(count)]


def main():
    out = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)  # it logs where it likes
        os.dup2(log.fileno(), 2)
        proc, port = master(log)
        try:
            store = Store(port)
            print("ready", file=out, flush=True)
            for line in sys.stdin:
                what, count = line.split()
                begin = time.perf_counter()
                getattr(store, what)(int(count))
                print(time.perf_counter() - begin, file=out, flush=True)
        finally:
            proc.terminate()
            proc.wait()


if __name__ == "__main__":
    main()
