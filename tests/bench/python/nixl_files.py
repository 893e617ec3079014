#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes between memory and a file by a NIXL module's backend POSIX: NIXL's own, or kvd's.

nixl_files.py PACKAGE FILE [PARAMETER=VALUE …]: `nixl` is kvd's (KVD_SOCKET names the daemon);
any other is a wheel's package, nixl_cu12, with parameters of its plugin. FILE is made, 256 MiB
long. Says a line {} when it is ready, then answers lines `row I N` by the seconds of N
transfers of ROWS[I], each from its post until it is seen done.

scripts/bench-nixl-files.py asks two of them in turns."""
import json
import os
import random
import sys
import time

from nixl_module import memory, module

FILE = 256 << 20
# operation, bytes of a row, rows of a transfer, past the page cache
ROWS = [(op, size, count, direct) for direct in (False, True)
        for size, count in ((4096, 256), (1 << 20, 32)) for op in ("WRITE", "READ")]


class Side:
    def __init__(self, package, path, params):
        api = module(package)
        self.agent = api.nixl_agent("files", api.nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", params)
        self.bytes, self.base = memory(FILE, 7)
        self.agent.register_memory([(self.base, FILE, 0, "")], "DRAM")
        self.fds = []
        for flags in (os.O_CREAT, os.O_DIRECT):
            self.fds.append(os.open(path, os.O_RDWR | flags, 0o600))
            self.agent.register_memory([(0, FILE, self.fds[-1], "")], "FILE")
        os.pwrite(self.fds[0], self.bytes, 0)
        os.fsync(self.fds[0])

    def request(self, op, size, count, direct, rng):
        """Rows that lie scattered in the file, one behind the other in memory."""
        places = rng.sample(range(FILE // size), count)
        local = [(self.base + i * size, size, 0) for i in range(count)]
        remote = [(place * size, size, self.fds[direct]) for place in places]
        return self.agent.initialize_xfer(op, self.agent.get_xfer_descs(local, "DRAM"),
                                          self.agent.get_xfer_descs(remote, "FILE"), "files")

    def seconds(self, handle):
        begin = time.perf_counter()
        state = self.agent.transfer(handle)
        while state != "DONE":
            state = self.agent.check_xfer_state(handle)
        return time.perf_counter() - begin


def main():
    side = Side(sys.argv[1], sys.argv[2], dict(p.split("=") for p in sys.argv[3:]))
    print("{}", flush=True)
    rng = random.Random(11)
    for line in sys.stdin:
        _, which, times = line.split()
        took = []
        for _ in range(int(times)):
            handle = side.request(*ROWS[int(which)], rng)
            took.append(side.seconds(handle))
            side.agent.release_xfer_handle(handle)
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
