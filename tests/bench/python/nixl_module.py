#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One NIXL module between two processes of this host: NIXL's own, or kvd's.

nixl_module.py PACKAGE: `nixl` is kvd's (python -m kvd.nixl path), KVD_SOCKET and
KVD_TARGET_SOCKET name the two daemons; any other is a wheel's package, nixl_cu12.
Says a line {"agent": us, ...} when two agents are connected, then answers lines:

    calls       the least of many, in microseconds: {"check": us, ...}
    lists N     prep of two lists of 4096 and make of N descriptors, us a descriptor
    row I N     N transfers of ROWS[I]: seconds each, and the microseconds of post()

scripts/bench-python.py asks two of them in turns."""
import json
import multiprocessing
import os
import random
import sys
import time

ROWS = [("write", 65536, 4096, False), ("write", 4096, 16384, True),
        ("write", 256, 40000, True), ("read", 65536, 4096, False)]
REGION, GIB = 256 << 20, 1 << 30


def module(package):
    if package == "nixl":
        import kvd.nixl
        sys.path.insert(0, kvd.nixl.path())
    return __import__(package + "._api", fromlist=["_api"])


def memory(nbytes, fill):
    import numpy
    raw = numpy.full(nbytes + 4096, fill, dtype=numpy.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip:skip + nbytes], raw.ctypes.data + skip


def us(begin):
    return (time.perf_counter() - begin) * 1e6


def target(package, pipe):
    """The other engine: its memory is there, and that is all."""
    if os.environ.get("KVD_TARGET_SOCKET"):
        os.environ["KVD_SOCKET"] = os.environ["KVD_TARGET_SOCKET"]
    api = module(package)
    agent = api.nixl_agent("target", api.nixl_agent_config(backends=["UCX"]))
    raw, base = memory(REGION, 7)
    agent.register_memory([(base, REGION, 0, "target")], "DRAM")
    pipe.send((agent.get_agent_metadata(), base))
    while True:
        word = pipe.recv()
        if word is None:
            os._exit(0)
        begin, end, step = word
        pipe.send(raw[begin:end:step].tobytes())


class Side:
    def __init__(self, package):
        api, said = module(package), {}
        raw, base = memory(GIB, 1)  # numpy is imported: not in the figures
        here, there = multiprocessing.Pipe()
        self.child = multiprocessing.Process(target=target, args=(package, there))
        self.child.start()
        metadata, self.far = here.recv()
        self.pipe = here
        config = api.nixl_agent_config(backends=["UCX"])
        begin = time.perf_counter()
        self.agent = agent = api.nixl_agent("initiator", config)
        said["agent"] = us(begin)
        begin = time.perf_counter()
        second = api.nixl_agent("second", api.nixl_agent_config(backends=["UCX"]))
        said["agent_again"] = us(begin)
        del second
        self.registration(base, said)
        begin = time.perf_counter()
        self.peer = agent.add_remote_agent(metadata)
        said["add_remote_agent"] = us(begin)
        self.raw, self.base = raw, base
        agent.register_memory([(base, REGION, 0, "initiator")], "DRAM")
        begin = time.perf_counter()
        self.small = self.handle("WRITE", [(base, 256, 0)], [(self.far, 256, 0)])
        self.run(self.small)
        said["first_connection"] = us(begin)
        self.rows = {}
        print(json.dumps(said), flush=True)

    def registration(self, base, said):
        """Of memory that was never registered, and the least of some more."""
        best = []
        for _ in range(6):
            begin = time.perf_counter()
            reg = self.agent.register_memory([(base, GIB, 0, "gib")], "DRAM")
            best.append(us(begin))
            self.agent.deregister_memory(reg)
        said["register_1GiB_first"], said["register_1GiB"] = best[0], min(best[1:])

    def handle(self, op, local, remote):
        agent = self.agent
        return agent.initialize_xfer(op, agent.get_xfer_descs(local, "DRAM"),
                                     agent.get_xfer_descs(remote, "DRAM"), self.peer)

    def run(self, handle):
        begin = time.perf_counter()
        state = self.agent.transfer(handle)
        posted = us(begin)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit("a transfer ended " + state)
        return time.perf_counter() - begin, posted

    @staticmethod
    def least(n, call):
        best = 1e9
        for _ in range(n):
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
        return best * 1e6

    def calls(self):
        agent, out = self.agent, {}
        out["get_agent_metadata"] = self.least(1000, agent.get_agent_metadata)
        out["check"] = self.least(20000, lambda: agent.check_xfer_state(self.small))
        out["get_new_notifs"] = self.least(20000, agent.get_new_notifs)
        out["send_notif"] = self.least(300, lambda: agent.send_notif(self.peer, b"x"))
        lists = self.lists(1)
        out["make_1"] = lists["make"]
        times = [self.run(self.small) for _ in range(1000)]
        out["post_256B"] = min(t[1] for t in times)
        out["write_256B"] = min(t[0] for t in times) * 1e6
        return out

    def lists(self, n):
        """n indices of lists of 4096."""
        agent, best = self.agent, {"prep": 1e9, "make": 1e9}
        local = [(self.base + i * 256, 256, 0) for i in range(4096)]
        remote = [(self.far + i * 512, 256, 0) for i in range(4096)]
        index = list(range(n))
        for _ in range(10):
            begin = time.perf_counter()
            mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
            yours = agent.prep_xfer_dlist(self.peer, remote, "DRAM")
            best["prep"] = min(best["prep"], us(begin) / 8192)
            for _ in range(30):
                begin = time.perf_counter()
                made = agent.make_prepped_xfer("WRITE", mine, index, yours, index)
                best["make"] = min(best["make"], us(begin) / n)
                agent.release_xfer_handle(made)
            agent.release_dlist_handle(mine)
            agent.release_dlist_handle(yours)
        return best

    def row(self, which, n):
        if which not in self.rows:
            self.rows[which] = self.row_made(which)
        self.run(self.rows[which])
        times = [self.run(self.rows[which]) for _ in range(n)]
        return {"seconds": [t[0] for t in times], "post": [t[1] for t in times]}

    def row_made(self, which):
        """The handle; its bytes were looked at."""
        op, size, count, scatter = ROWS[which]
        order = list(range(count))
        if scatter:
            random.Random(1).shuffle(order)
        agent = self.agent
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", [
            (self.base + i * size, size, 0) for i in range(count)], "DRAM")
        yours = agent.prep_xfer_dlist(self.peer, [
            (self.far + i * size, size, 0) for i in order], "DRAM")
        index = list(range(count))
        made = agent.make_prepped_xfer(op.upper(), mine, index, yours, index, b"")
        self.raw[0:count * size] = which + 11
        self.run(made)
        self.pipe.send((0, count * size, size - 1))
        far = set(self.pipe.recv())
        near = set(self.raw[0:count * size:size - 1].tobytes())
        if far != near:
            raise SystemExit("row %d: the bytes differ" % which)
        return made


def main():
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    multiprocessing.set_start_method("spawn")
    side = Side(sys.argv[1])
    for line in sys.stdin:
        words = line.split()
        answer = getattr(side, words[0])(*map(int, words[1:]))
        print(json.dumps(answer), flush=True)
    side.pipe.send(None)
    os._exit(0)  # NIXL's destructors do not always survive


if __name__ == "__main__":
    main()
