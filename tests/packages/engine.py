# SPDX-License-Identifier: Apache-2.0
"""An engine of both sides, which sees installed packages only. For each word of its standard
input it does that once, and answers "done".

engine.py PREFILL_SOCKET DECODE_SOCKET
  memfd   a room between memory of kvd's
  vm      the same between plain arrays
  nixl    writes and reads between small arrays, by NIXL's API"""
import os
import subprocess
import sys
import time

import kvd
import numpy as np

LAYOUT = kvd.Layout.sglang_mha(page_size=16, pages=8, layers=2, kv_heads=2, head_bytes=64)
SOCKETS = sys.argv[1:]


class Side:
    def __init__(self, socket, kind):
        self.client = kvd.Client(socket)
        if kind == "vm":
            self.arrays = kept = [np.zeros(n, np.uint8) for n in LAYOUT.buffers]
        else:
            kept = [kvd.Memory(n) for n in LAYOUT.buffers]
            self.arrays = [m.array() for m in kept]
        self.kept = kept
        self.pool = self.client.pool(LAYOUT, [self.client.register(m) for m in kept])

    def page(self, number):
        return [a.reshape(8, -1)[number] for a in self.arrays]


class Rooms:
    def __init__(self, kind):
        self.sides = [Side(s, kind) for s in SOCKETS]
        kinds = {r["kind"] for s in self.sides
                 for r in s.client.command("region.list")["regions"]}
        assert kind in kinds, kinds
        self.number = 0

    def once(self):
        prefill, decode = self.sides
        self.number += 1
        for i, part in enumerate(prefill.page(3)):
            part[:] = self.number + i
        rx = decode.client.recv(self.number, decode.pool, [prefill.client.endpoint])
        rx.bind({"kv": [5]})
        tx = prefill.client.send(self.number, prefill.pool)
        tx.wait(kvd.WAITING_FOR_INPUT, timeout=30)
        tx.send({"kv": [3]})
        rx.wait(timeout=30)
        tx.wait(timeout=30)
        for i, part in enumerate(decode.page(5)):
            assert (part == self.number + i).all()

    def do(self):
        """Once; again while that is what the error says."""
        end = time.monotonic() + 50
        while True:
            try:
                return self.once()
            except kvd.Error as error:
                if not error.retryable or time.monotonic() > end:
                    raise


class Nixl:
    def __init__(self):
        path = subprocess.check_output([sys.executable, "-m", "kvd.nixl", "path"], text=True)
        sys.path.insert(0, path.strip())
        from nixl._api import nixl_agent, nixl_agent_config
        self.agents = []
        for socket in SOCKETS:
            os.environ["KVD_SOCKET"] = socket
            self.agents.append(nixl_agent(socket, nixl_agent_config()))
        self.arrays = [np.zeros(4096, np.uint8) for _ in SOCKETS]
        for agent, array in zip(self.agents, self.arrays):
            agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
        self.peer = self.agents[0].add_remote_agent(self.agents[1].get_agent_metadata())

    def do(self):
        agent = self.agents[0]
        rows = [agent.get_xfer_descs([(a.ctypes.data, a.nbytes, 0)], "DRAM")
                for a in self.arrays]
        for op, wanted in (("WRITE", (1, 1)), ("READ", (9, 9))):
            for array, value in zip(self.arrays, (1, 9)):
                array[:] = value
            handle = agent.initialize_xfer(op, rows[0], rows[1], self.peer)
            agent.transfer(handle)
            while agent.check_xfer_state(handle) == "PROC":
                pass
            assert agent.check_xfer_state(handle) == "DONE"
            agent.release_xfer_handle(handle)
            assert tuple(int(a[7]) for a in self.arrays) == wanted, (op, self.arrays)
            assert all((a == a[0]).all() for a in self.arrays)


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    made = {}
    for line in sys.stdin:
        word = line.strip()
        if word not in made:
            made[word] = Nixl() if word == "nixl" else Rooms(word)
        made[word].do()
        print("done", file=out, flush=True)


if __name__ == "__main__":
    main()
