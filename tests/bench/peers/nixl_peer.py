#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NIXL between two processes of this host, as tests/bench/bench_xfer.c does it.

nixl_peer.py OP SIZE TOTAL PLACES CACHES TLS: OP write or read, rows of SIZE bytes,
TOTAL bytes a transfer, PLACES scattered, dense or flat as tests/bench/rows.h has them
(where they are shuffled NIXL finds no neighbours to merge), CACHES cold (swept before
each transfer) or warm, TLS tcp or default (NIXL chooses: shared memory and CMA on one
host).

Each line `peer N` on stdin is answered by a line with N times in seconds, from
posting a prepared transfer until its state is DONE. Needs (PyPI): nixl-cu12, numpy; see setup.sh beside this file.
"""
import json
import multiprocessing
import os
import sys
import time

REGION = 256 << 20
SC_LEVEL3_CACHE_SIZE = 194  # glibc's number; Python has no name for it


class Side:
    """An agent and its memory, full of words that tell places and sides apart."""

    def __init__(self, name, fill):
        import numpy
        from nixl_cu12._api import nixl_agent, nixl_agent_config
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.raw = numpy.empty(REGION + 4096, dtype=numpy.uint8)
        skip = -self.raw.ctypes.data % 4096
        self.base = self.raw.ctypes.data + skip
        self.words = self.raw[skip:skip + REGION].view(numpy.uint64)
        self.words[:] = numpy.arange(len(self.words), dtype=numpy.uint64) * 2654435761 + fill
        self.agent.register_memory([(self.base, REGION, 0, name)], "DRAM")


def target(pipe):
    """The other engine: its memory is there, and that is all."""
    side = Side("target", 7)
    pipe.send((side.agent.get_agent_metadata(), side.base))
    pipe.send(side.words[pipe.recv()])
    pipe.recv()
    os._exit(0)


def sweeper():
    import numpy
    l3 = os.sysconf(SC_LEVEL3_CACHE_SIZE)
    words = numpy.zeros(min(2 * l3 if l3 > 0 else 64 << 20, 512 << 20) // 8,
                        dtype=numpy.uint64)

    def sweep():
        words[::8] += 1
    return sweep


class Transfer:
    def __init__(self, side, peer, far_base, op, size, near, far):
        ag = side.agent
        local = ag.prep_xfer_dlist("NIXL_INIT_AGENT",
                                   [(side.base + int(at), size, 0) for at in near], "DRAM")
        remote = ag.prep_xfer_dlist(peer, [(far_base + int(at), size, 0) for at in far],
                                    "DRAM")
        index = list(range(len(near)))
        self.agent = ag
        self.handle = ag.make_prepped_xfer(op.upper(), local, index, remote, index, b"")

    def seconds(self):
        begin = time.perf_counter()
        state = self.agent.transfer(self.handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(self.handle)
        if state != "DONE":
            sys.exit("nixl_peer: the transfer ended " + state)
        return time.perf_counter() - begin


def main():
    op, size, total, places, caches, tls = sys.argv[1:]
    size, count = int(size), int(total) // int(size)
    if tls == "tcp":
        os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    multiprocessing.set_start_method("spawn")
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=target, args=(there,), daemon=True).start()
    import numpy
    side = Side("initiator", 1 << 40)
    metadata, far_base = here.recv()
    peer = side.agent.add_remote_agent(metadata)
    random = numpy.random.default_rng(1)
    slots = REGION // size if places == "scattered" else count
    near = (random.permutation(slots) if places == "scattered" else numpy.arange(slots)) * size
    far = (numpy.arange(slots) if places == "flat" else random.permutation(slots)) * size
    near, far = near[:count], far[:count]
    transfer = Transfer(side, peer, far_base, op, size, near, far)
    sweep = sweeper() if caches == "cold" else lambda: None
    transfer.seconds()
    here.send(far // 8)
    if not (here.recv() == side.words[near // 8]).all():
        sys.exit("nixl_peer: the rows differ")
    print(json.dumps({"rows": count}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line.split()[1])):
            sweep()
            times.append(transfer.seconds())
        print(json.dumps(times), flush=True)
    here.send(None)
    os._exit(0)  # its destructors do not always survive


if __name__ == "__main__":
    main()
