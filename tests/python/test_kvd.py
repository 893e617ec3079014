# SPDX-License-Identifier: Apache-2.0
"""The package kvd over two daemons: regions of each kind, pools, rooms by push and
pull, asyncio, errors, threads, finalisers, fork."""
import asyncio
import gc
import mmap
import os
import pickle
import threading

import numpy as np
import pytest

import kvd
from conftest import until

PAGE, PAGES, LAYERS = 16, 64, 4
PAGE_BYTES = PAGE * 8 * 128
MFD_EXEC = 0x10  # without it vm.memfd_noexec lets memfds be sealed


def layout(rank=0):
    return kvd.Layout.sglang_mha(page_size=PAGE, pages=PAGES, layers=LAYERS, kv_heads=8,
                                 head_bytes=128, tp_rank=rank)


TOTAL = sum(layout().buffers)
PARTS = [sum(layout().buffers[:i]) for i in range(2 * LAYERS)]


class Side:
    """A client with a pool over one piece of memory."""

    def __init__(self, daemon, memory):
        self.client = kvd.Client(daemon.socket_path, timeout=60)
        self.memory = np.asarray(memory)
        self.region = (memory.register(self.client) if isinstance(memory, Unsealable)
                       else self.client.register(memory))
        self.pool = self.client.pool(layout(), [(self.region, o) for o in PARTS])

    def pages(self, first, count):
        parts = self.memory.reshape(2 * LAYERS, PAGES, PAGE_BYTES)
        return parts[:, first:first + count]



class Unsealable:
    """A memfd created without permission for seals."""

    def __init__(self, nbytes):
        try:
            self.fd = os.memfd_create("test", os.MFD_CLOEXEC | MFD_EXEC)
        except PermissionError:
            pytest.skip("needs a memfd that cannot be sealed (vm.memfd_noexec = 2)")
        except OSError:  # before Linux 6.3
            self.fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.memory = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)

    def __array__(self, dtype=None, copy=None):
        return self.memory

    def register(self, client):
        with pytest.raises(kvd.Error) as told:
            client.register_fd(self.fd, self.memory.nbytes)
        assert told.value.code == "EIMPORT"
        return client.register_fd(self.fd, self.memory.nbytes, keep=self, seal=False,
                                  address=self.memory.ctypes.data)


def memory_of_kind(kind):
    return {"memfd": kvd.Memory, "shm": Unsealable,
            "vm": lambda nbytes: np.zeros(nbytes, np.uint8)}[kind](TOTAL)


@pytest.fixture(params=["memfd", "shm", "vm"])
def sides(pair, request):
    both = [Side(d, memory_of_kind(request.param)) for d in pair]
    both[0].memory[:] = np.random.default_rng(1).integers(0, 256, both[0].memory.size)
    assert both[0].region.kind == request.param
    yield both
    for side in both:
        side.client.close()


def check_moved(a, b):
    assert np.array_equal(a.pages(7, 3), b.pages(30, 3))
    guard = b.memory.reshape(2 * LAYERS, PAGES, PAGE_BYTES).copy()
    guard[:, 30:33] = 0
    assert not guard.any(), "bytes outside the bound pages were written"


def test_room_pushed_lands(sides):
    a, b = sides
    tx = a.client.send(1, a.pool)
    rx = b.client.recv(1, b.pool, [a.client.endpoint])
    rx.bind({"kv": kvd.View(range(30, 33), tokens=(0, 3 * PAGE))})
    assert tx.wait(kvd.WAITING_FOR_INPUT, 60) >= kvd.WAITING_FOR_INPUT
    assert tx.first_token() == 0
    tx.send({"kv": kvd.View([7, 8, 9], tokens=(0, 3 * PAGE))})
    assert rx.wait(timeout=60) == tx.wait(timeout=60) == kvd.SUCCESS
    check_moved(a, b)
    assert tx.read().first_token == 0 and rx.read().first_token == -1
    assert tx.read().done == 1 and tx.read().rows > 0
    status = rx.read()
    assert status.bytes == status.total == 3 * PAGE_BYTES * 2 * LAYERS
    rx.close()
    tx.close()
    with pytest.raises(kvd.StateError):
        rx.state
    for side in sides:
        side.pool.unregister()
        side.region.unregister()
        assert not side.client.command("region.list")["regions"]


def test_room_pulled_lands(sides):
    a, b = sides
    offer = a.client.offer(2, a.pool, {"kv": kvd.View([7, 8, 9], tokens=(0, 3 * PAGE))})
    pull = b.client.pull(2, b.pool, a.client.endpoint,
                         {"kv": kvd.View([30, 31, 32], tokens=(0, 3 * PAGE))})
    assert pull.wait(timeout=60) == offer.wait(timeout=60) == kvd.SUCCESS
    check_moved(a, b)


def test_room_pulled_of_two_halves_with_later_pages(pair):
    """Two prefill ranks of half the heads each, which get the number of pullers, after a word
    of their stream; a decode rank of all heads, which allocates pages late."""
    def side(daemon, rank, size):
        client = kvd.Client(daemon.socket_path, timeout=60)
        shape = kvd.Layout.sglang_mha(page_size=PAGE, pages=8, layers=1, kv_heads=2,
                                      head_bytes=64, tp_size=size, tp_rank=rank)
        memory = kvd.Memory(8 + sum(shape.buffers))
        region = client.register(memory)
        pool = client.pool(shape, [(region, 8), (region, 8 + shape.buffers[0])], name="half")
        return client, np.asarray(memory)[:8 + sum(shape.buffers)], region, pool

    a, b = pair
    sources = [side(a, rank, 2) for rank in range(2)]
    client, memory, _, pool = side(b, 0, 1)
    for rank, (_, mine, _, _) in enumerate(sources):
        mine[8:] = rank + 1
    offers = [c.offer(77, p, {"kv": [3]}, receivers_from_pullers=True, wait=(region, 0, 1),
                      lease_ms=60000) for c, _, region, p in sources]
    pull = client.pull(77, pool, [kvd.Source(c.endpoint, "half", rank=i)
                                  for i, (c, _, _, _) in enumerate(sources)], receivers=1)
    with pytest.raises(kvd.TimeoutError, match="room 77: still bootstrapping after 0.2 s"):
        pull.wait(kvd.WAITING_FOR_INPUT, 0.2)
    for offer, (_, mine, _, _) in zip(offers, sources):
        offer.extend(120000)
        mine[0] = 1
    assert pull.wait(kvd.WAITING_FOR_INPUT, 60) == kvd.WAITING_FOR_INPUT
    pull.bind({"kv": [5]})
    assert pull.wait(timeout=60) == kvd.SUCCESS
    for offer in offers:
        assert offer.wait(timeout=60) == kvd.SUCCESS
    for part in memory[8:].reshape(2, 8, PAGE, 2, 64):  # K, V: page, token, head
        assert (part[5, :, 0] == 1).all() and (part[5, :, 1] == 2).all()
        part[5] = 0
        assert not part.any()
    with pytest.raises(kvd.Error):
        offers[0].extend(1000)
    for one in sources:
        one[0].close()
    client.close()


def test_first_token_is_the_first_view_s(pair):
    def side(daemon):
        layout = kvd.Layout(0)
        for name in ("kv", "state"):
            layout.view(name, 4, 8)
            layout.heads(name, 0, "k", buffer=layout.buffer(8 * 64), unit_bytes=16)
        client = kvd.Client(daemon.socket_path, timeout=60)
        region = client.register(kvd.Memory(1024))
        return client, client.pool(layout, [region, (region, 512)])

    (a, source), (b, target) = side(pair[0]), side(pair[1])
    tx, rx = a.send(77, source), b.recv(77, target, [a.endpoint])
    rx.bind({"kv": kvd.View([1, 2], first_token=8), "state": kvd.View([0], tokens=(0, 1))})
    tx.wait(kvd.WAITING_FOR_INPUT, 60)
    assert tx.read().first_token == tx.first_token() == 8
    assert a.command("room.poll", rooms=["77"])["rooms"][0]["first_token"] == 8
    tx.abort()
    until(lambda: rx.state == kvd.FAILED)
    assert rx.read().flags & kvd.rooms.REMOTE and not tx.read().flags & kvd.rooms.REMOTE
    a.close()
    b.close()


def test_room_aborted_fails_both_sides(sides):
    a, b = sides
    tx = a.client.send(3, a.pool)
    rx = b.client.recv(3, b.pool, [a.client.endpoint])
    rx.bind({"kv": range(3)})
    tx.wait(kvd.WAITING_FOR_INPUT, 60)
    rx.abort("tired")
    with pytest.raises(kvd.AbortedError) as told:
        tx.wait(timeout=60)
    assert "tired" in str(told.value) and told.value.code == "EABORTED"
    until(lambda: rx.state == kvd.FAILED)
    assert not rx.landed(3).any()


def test_posted_rooms_land(sides):
    a, b = sides
    tx = a.client.send(90, a.pool, post=True)
    rx = b.client.recv(90, b.pool, [a.client.endpoint], post=True)
    rx.bind({"kv": kvd.View(range(30, 33), tokens=(0, 3 * PAGE))})
    tx.wait(kvd.WAITING_FOR_INPUT, 60)
    tx.send({"kv": kvd.View([7, 8, 9], tokens=(0, 3 * PAGE))})
    assert rx.wait(timeout=60) == tx.wait(timeout=60) == kvd.SUCCESS
    check_moved(a, b)
    assert tx.read().done == 1
    tx.close()
    rx.close()
    with pytest.raises(kvd.StateError):
        tx.state
    # again at once, and unfinished ones may be closed
    for _ in range(3):
        tx = a.client.send(90, a.pool, post=True)
        tx.close()
    until(lambda: a.client.command("room.list")["total"] == 0)


def test_posted_room_refused_fails(sides):
    a, b = sides
    held = a.client.send(91, a.pool)
    tx = a.client.send(91, a.pool, post=True)
    until(lambda: tx.state == kvd.FAILED)
    assert "room 91 (send) is open already" in str(tx.error())
    with pytest.raises(kvd.Error, match="open already"):
        tx.send({"kv": [1]})
    rx = b.client.recv(91, b.pool, [a.client.endpoint], post=True)
    rx.bind({"kv": [PAGES]})
    until(lambda: rx.state == kvd.FAILED)
    assert "is outside the view's %d pages" % PAGES in str(rx.error())
    rx.close()
    tx.close()
    held.abort()
    until(lambda: held.state == kvd.FAILED)
    held.close()
    offer = a.client.offer(92, a.pool, {"kv": [1]}, lease_ms=60000, post=True)
    offer.extend(120000)
    offer.abort("enough")
    until(lambda: offer.state == kvd.FAILED)
    assert "enough" in str(offer.error())


def test_states_of_many_in_one_call(sides):
    a, b = sides
    rooms = [a.client.send(500 + n, a.pool) for n in range(70)]
    out = np.full(80, 99, np.int32)
    assert a.client.states(rooms, out) == 0
    assert (out[:70] == kvd.BOOTSTRAPPING).all() and (out[70:] == 99).all()
    rooms[3].abort()
    until(lambda: rooms[3].state == kvd.FAILED)
    rooms[66].abort()
    until(lambda: rooms[66].state == kvd.FAILED)
    rooms[66].close()
    assert a.client.states(rooms, memoryview(out)) == 2
    assert out[3] == kvd.FAILED and out[66] == kvd.CLOSED
    assert (np.delete(out[:70], [3, 66]) == kvd.BOOTSTRAPPING).all()
    assert a.client.states([], out) == 0
    with pytest.raises(ValueError, match="70 rooms"):
        a.client.states(rooms, out[:69])
    frozen = out.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        a.client.states(rooms, frozen)
    for wrong in (out[::2], out.astype(np.int64), [0] * 80, bytes(320)):
        with pytest.raises(TypeError):
            a.client.states(rooms, wrong)
    for wrong in ([None], [a], tuple(rooms)):
        with pytest.raises((TypeError, AttributeError)):
            a.client.states(wrong, out)
    b.client.close()
    a.client.close()
    assert a.client.states(rooms, out) == 70 and (out[:70] == kvd.CLOSED).all()


def test_room_dropped_is_closed(sides):
    a, b = sides
    tx = a.client.send(4, a.pool)
    rx = b.client.recv(4, b.pool, [a.client.endpoint])
    rx.bind({"kv": range(3)})
    tx.wait(kvd.WAITING_FOR_INPUT, 60)
    del rx
    gc.collect()

    def gone():
        b.client.command("ping")
        return not b.client.command("room.list")["rooms"]
    until(gone)
    until(lambda: tx.state == kvd.FAILED)


def test_asyncio_room_lands(pair):
    async def both():
        async with kvd.AsyncClient(pair[0].socket_path) as a, \
                kvd.AsyncClient(pair[1].socket_path) as b:
            sides = []
            for client in (a, b):
                memory = kvd.Memory(TOTAL)
                region = await client.register(memory)
                pool = await client.pool(layout(), [(region, o) for o in PARTS])
                sides.append((memory.array(), pool))
            sides[0][0][:] = 9
            tx = await a.send(11, sides[0][1])
            rx = await b.recv(11, sides[1][1], [a.endpoint])
            await rx.bind({"kv": range(2)})
            await tx.wait(kvd.WAITING_FOR_INPUT)
            await tx.send({"kv": range(5, 7)})
            states = await asyncio.gather(tx.wait(), rx.wait())
            assert states == [kvd.SUCCESS, kvd.SUCCESS]
            assert (sides[1][0][:PAGE_BYTES] == 9).all()
            await tx.close()
            await rx.close()
            with pytest.raises(kvd.NotFoundError):
                await a.command("room.show", room="999")
            many = await asyncio.gather(*(a.command("ping") for _ in range(200)))
            assert len(many) == 200
    asyncio.run(both())


def test_error_carries_code_scope_retryable(pair):
    with kvd.Client(pair[0].socket_path) as client:
        with pytest.raises(kvd.NotFoundError) as told:
            client.command("room.show", room="77")
        error = told.value
        assert (error.code, error.scope, error.retryable) == ("ENOTFOUND", "op", False)
        again = pickle.loads(pickle.dumps(error))
        assert (again.code, str(again)) == (error.code, str(error))
    with pytest.raises(kvd.StateError):
        client.command("ping")
    with pytest.raises(kvd.ConnectionError) as told:
        kvd.Client("/nowhere/kvd.sock")
    assert told.value.code == "ENODAEMON" and told.value.retryable


def test_memory_has_requested_bytes(pair):
    memory = kvd.Memory(3 * 4096 + 1)
    assert memory.nbytes == len(memory.array()) == np.asarray(memory).size == 3 * 4096 + 1
    with pytest.raises(ValueError, match="count: 12289 bytes"):
        memory.pages(3)
    with pytest.raises(ValueError):
        memory.array((4, 4096))
    memory = kvd.Memory(64 * 96)
    memory.pages(64)[7] = 1
    assert (memory.array()[7 * 96:8 * 96] == 1).all() and memory.array().sum() == 96
    assert memory.pages(64).shape == (64, 96)
    with kvd.Client(pair[0].socket_path) as client:
        region = client.register(memory)
        rows = {r["region"]: r["bytes"] for r in client.command("region.list")["regions"]}
        assert region.bytes == rows[region.id] == 64 * 96


def test_register_refuses_unusable_memory(pair):
    with kvd.Client(pair[0].socket_path) as client:
        with pytest.raises(ValueError):
            client.register(np.zeros((8, 8))[:, ::2])
        fixed = np.zeros(8)
        fixed.flags.writeable = False
        with pytest.raises(ValueError):
            client.register(fixed)
        with pytest.raises(kvd.Error):
            client.register_fd(0, 4096)


def test_array_adopted_where_safe(pair, monkeypatch):
    with kvd.Client(pair[0].socket_path) as client:
        big = np.zeros(40 << 20, np.uint8)
        inside = client.register(big[4096:-4096])
        small = client.register(np.zeros(4096, np.uint8))
        kinds = {r["region"]: r["kind"] for r in client.command("region.list")["regions"]}
        assert kinds[inside.id] == "memfd" and kinds[small.id] == "vm"
        monkeypatch.setenv("KVD_ADOPT", "0")
        other = np.zeros(40 << 20, np.uint8)
        region = client.register(other)
        kinds = {r["region"]: r["kind"] for r in client.command("region.list")["regions"]}
        assert kinds[region.id] == "vm"


def test_region_dropped_is_unregistered(pair):
    with kvd.Client(pair[0].socket_path) as client:
        client.register(np.zeros(1 << 16, np.uint8))
        gc.collect()

        def gone():
            return not client.command("region.list")["regions"]
        until(gone)


def test_client_serves_many_threads(pair):
    with kvd.Client(pair[0].socket_path) as client:
        failed = []

        def work():
            try:
                for _ in range(100):
                    assert client.command("ping")["ok"]
            except BaseException as error:  # noqa: B036 (told below)
                failed.append(error)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failed


def test_child_of_fork_is_refused(pair):
    with kvd.Client(pair[0].socket_path) as client:
        region = client.register(kvd.Memory(1 << 20))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                client.command("ping")
            except kvd.ConnectionError as error:
                status = 0 if error.code == "EFORKED" else 2
            except BaseException:
                status = 3
            del region
            gc.collect()
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert client.command("ping")["ok"]
        assert client.command("region.list")["regions"]
