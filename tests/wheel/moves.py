# SPDX-License-Identifier: Apache-2.0
"""Two engines, each with a daemon of its own by KVD_AUTOSTART, and two rooms between them:
this process pulls what the process that it starts offers. Run where the wheel is installed;
without arguments it is the decode engine."""
import os
import subprocess
import sys

import kvd

LAYOUT = kvd.Layout.sglang_mha(page_size=16, pages=64, layers=2, kv_heads=8, head_bytes=256)
ROOMS = {7: [3, 9, 4], 8: [60]}


class Engine:
    def __init__(self):
        self.client = kvd.Client()
        self.memory = [kvd.Memory(n) for n in LAYOUT.buffers]
        self.pool = self.client.pool(LAYOUT, [self.client.register(m) for m in self.memory])
        program = os.readlink("/proc/%d/exe" % self.client.info["pid"])
        assert program == os.path.join(os.path.dirname(kvd.__file__), "bin", "kvd"), program

    def page(self, memory, number):
        return memory.pages(64)[number]


def value(number, buffer):
    return 1 + (number * 7 + buffer) % 250


def prefill():
    engine = Engine()
    for buffer, memory in enumerate(engine.memory):
        for number in range(64):
            engine.page(memory, number)[:] = value(number, buffer)
    rooms = [engine.client.offer(n, engine.pool, {"kv": pages}) for n, pages in ROOMS.items()]
    print(engine.client.endpoint, flush=True)
    for room in rooms:
        room.wait(timeout=60)


def decode():
    engine = Engine()
    other = subprocess.Popen([sys.executable, __file__, "prefill"], stdout=subprocess.PIPE,
                             text=True)
    endpoint = other.stdout.readline().strip()
    assert endpoint and endpoint != engine.client.endpoint, endpoint
    for number, pages in ROOMS.items():
        wanted = [page + 1 for page in pages]
        engine.client.pull(number, engine.pool, endpoint, {"kv": wanted}).wait(timeout=60)
        for buffer, memory in enumerate(engine.memory):
            for page in pages:
                assert (engine.page(memory, page + 1) == value(page, buffer)).all()
    assert other.wait(60) == 0
    print("%d rooms" % len(ROOMS))


prefill() if sys.argv[1:] else decode()
