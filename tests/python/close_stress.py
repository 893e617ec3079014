# SPDX-License-Identifier: Apache-2.0
"""close_stress.py SOCKET SECONDS: for each type with a handle of libkvd, threads that use one
while another thread closes it. They get a result or an exception; a process that dies of a
signal has read freed memory."""
import contextlib
import sys
import threading
import time
from array import array

import kvd
from kvd import _kvd

PAGES = 8
TOKENS = 16
IDS = [bytes([n]) * 32 for n in range(2)]
FEW_S = 0.2  # of calls that the daemon answers
EXPECTED = (kvd.Error, ValueError)


class Bench:
    """A client, a pool and a space, which outlive the handles that are raced for."""

    def __init__(self, path):
        self.path = path
        self.client = kvd.Client(path, timeout=20)
        self.layout = kvd.Layout.sglang_mha(page_size=TOKENS, pages=PAGES, layers=1, kv_heads=1,
                                            head_bytes=64)
        self.region = self.client.register(kvd.Memory(sum(self.layout.buffers)))
        self.parts = [(self.region, 0), (self.region, self.layout.buffers[0])]
        self.pool = self.client.pool(self.layout, self.parts, name="bench")
        self.space = self.open_space()
        self.space.put(IDS, {"kv": [0, 1]}).wait(timeout=20)
        self.number = 0

    def open_space(self):
        end = time.monotonic() + 20
        while True:
            try:
                return self.client.space(self.pool, model="m", scheme="t", tokens=TOKENS)
            except kvd.BusyError:
                assert time.monotonic() < end

    def region_case(self):
        region = self.client.register(kvd.Memory(4096))
        return region.unregister, [lambda: region.id, region.unregister]

    def pool_case(self):
        pool = self.client.pool(self.layout, self.parts, name="raced")

        def room():
            self.number += 1
            self.client.send(self.number, pool, post=True).close()
        return pool.unregister, [lambda: pool.id, room, pool.unregister]

    def room_case(self, post=False):
        self.number += 1
        room = self.client.send(self.number, self.pool, post=post)
        out = array("i", [0])

        def end():
            room.abort()
            while room.state != kvd.FAILED:
                pass
            room.close()
        return end, [lambda: room.state, room.read, room.error, lambda: room.landed(1),
                     lambda: self.client.states([room], out), room.close]

    def posted_room_case(self):
        return self.room_case(True)

    def space_case(self):
        space = self.open_space()
        return space.close, [lambda: space.find(IDS, timeout=FEW_S),
                             lambda: space.hold(IDS).close(),
                             lambda: space.put(IDS, {"kv": [0, 1]}).close(), space.close]

    def hold_case(self):
        hold = self.space.hold(IDS)
        return hold.close, [hold.holders, lambda: hold._hold.facts(), hold.close,
                            lambda: hold.fetch({"kv": [2, 3]}).wait(timeout=FEW_S)]

    def move_case(self):
        move = self.space.put(IDS, {"kv": [0, 1]})
        with contextlib.suppress(*EXPECTED):
            move.wait(timeout=FEW_S)
        return move.close, [lambda: move.state, move.read, move.show, move.abort, move.close]

    def attend_case(self):
        attend = self.client.attend(rows=4, heads=1, dqk=32, dv=32, kind="gqa", q_type="bf16",
                                    kv_type="bf16", scale=1.0, key="k", value="v")
        hold = self.space.hold(IDS)

        def post():
            attend.post(0, 0, [kvd.Part(hold)])

        def end():
            hold.close()
            attend._attend.close()
        return end, [post, lambda: attend._attend.state(0), lambda: attend._attend.read(0),
                     lambda: attend._attend.wait(0, FEW_S), attend._attend.close,
                     lambda: attend._attend.error(0, FEW_S)]

    def client_case(self):
        client = kvd.Client(self.path, timeout=FEW_S)
        memory = [kvd.Memory(4096) for _ in range(2)]
        region = [client.register(m) for m in memory][0]
        lists = Lists(client, *memory)
        return client.close, [lambda: region.id, lambda: client.command("ping"),
                              lambda: client.info, lambda: client.lost, client.close,
                              lambda: client.register(kvd.Memory(4096))] + lists.calls()

    def lists_case(self):
        """Attach, Dlist, Xfer have no close(): closing their client ends them."""
        client = kvd.Client(self.path, timeout=FEW_S)
        memory, other = kvd.Memory(4096), kvd.Memory(4096)
        regions = [client.register(memory), client.register(other)]
        calls = Lists(client, memory, other).calls()

        def end():
            client.close()
            regions.clear()
        return end, calls


class Lists:
    """Transfers of a client to itself."""

    def __init__(self, client, mine, other):
        kvd_client = client._kvd
        epoch, secret = kvd_client.key()
        self.attach = _kvd.Attach(kvd_client, client.endpoint, epoch, secret, 20)
        self.tables = [array("Q", (m.address, 4096, 0)) for m in (mine, other)]
        local, remote = (_kvd.Dlist(kvd_client, attach, table.buffer_info()[0], 1, 3,
                                    table.tobytes())
                         for attach, table in zip((None, self.attach), self.tables))
        self.xfer = _kvd.Xfer(0, local, None, remote, None, None)
        self.client = kvd_client

    def post(self):
        if self.xfer.quiesced():
            self.xfer.post(None)

    def calls(self):
        return [self.attach.state, self.attach.error, lambda: self.attach.check(FEW_S),
                lambda: self.attach.refresh(FEW_S), self.post, self.xfer.poll, self.xfer.stop,
                self.xfer.error, self.xfer.telemetry, lambda: self.xfer.rebind(self.attach),
                lambda: _kvd.notif_waiting(self.client), lambda: _kvd.notif_drain(self.client)]


CASES = ["region", "pool", "room", "posted_room", "space", "hold", "move", "attend", "lists",
         "client"]
FAULTS = []


def user(call, go, over):
    go.wait()
    while not over.is_set():
        try:
            call()
        except EXPECTED:
            pass
        except BaseException as error:
            FAULTS.append(error)
            return


def race(bench, name):
    """One handle from its making to its end."""
    close, calls = getattr(bench, name + "_case")()
    over, go = threading.Event(), threading.Barrier(len(calls) + 1)
    threads = [threading.Thread(target=user, args=(call, go, over)) for call in calls]
    for t in threads:
        t.start()
    go.wait()
    end = time.monotonic() + 20
    while True:
        try:
            close()
            break
        except kvd.StateError as error:
            if "closed" in str(error):
                break
        except EXPECTED:
            pass
        assert time.monotonic() < end, "%s: not closed in time" % name
    over.set()
    for t in threads:
        t.join()


def main(path, seconds):
    sys.setswitchinterval(1e-6)
    bench = Bench(path)
    for name in CASES:
        end, n = time.monotonic() + seconds / len(CASES), 0
        while time.monotonic() < end or n == 0:
            race(bench, name)
            n += 1
        print(name, n, flush=True)
    bench.client.close()
    if FAULTS:
        raise FAULTS[0]


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
