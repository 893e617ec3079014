# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs in both packages, over the fake driver (tests/gpu): sub-ranges of allocations,
between each other and host memory, over the transports; unsupported memory is refused by
name."""
import concurrent.futures
import os

import numpy as np
import pytest

import kvd
import kvd.cuda
from conftest import until
from kvd_daemon import Daemon, Skip
from nixl_peer import agent_of
from test_kvd import PAGE_BYTES, PARTS, TOTAL, layout
from test_nixl import B, name  # noqa: F401 (B is a fixture)

import fake_gpu

GUARD = 4096


@pytest.fixture
def gpu(monkeypatch):
    if not os.path.exists(fake_gpu.LIBRARY):
        pytest.skip("no fake driver: %s" % fake_gpu.LIBRARY)
    monkeypatch.setenv("KVD_CUDA_LIBRARY", fake_gpu.LIBRARY)
    monkeypatch.setattr("kvd.cuda._library", None)
    try:
        return fake_gpu.Gpu()
    except Skip as why:
        pytest.skip(str(why))


class Array:
    """Part of an allocation, as a GPU array library shows it."""

    def __init__(self, gpu, nbytes, offset):
        base, _, view = gpu.ipc(nbytes + 2 * offset)
        self.address, self.nbytes = base + offset, nbytes
        self.whole = np.frombuffer(view, np.uint8)
        self.memory = self.whole[offset:offset + nbytes]
        self.__cuda_array_interface__ = {"shape": (nbytes // 4, 4), "typestr": "|u1",
                                         "data": (self.address, False), "version": 3,
                                         "strides": None}


def two(transport):
    text = "[transport]\ntransports = %s\n%s" % (transport, fake_gpu.CONFIG)
    return Daemon(text), Daemon(text)


def test_memory_is_described_by_a_thread_without_a_context(gpu):
    array = Array(gpu, 8192, 512)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        piece = other.submit(kvd.cuda.describe, array.address + 4096, 4096).result()
    assert (piece.offset, piece.device) == (512 + 4096, gpu.uuid)


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_vram_moves_between_agents(gpu, transport, B):  # noqa: F811
    rows, row = 64, 1024
    size = rows * row + 2 * GUARD
    one, other = two(transport)
    with one, other:
        a, b = agent_of(one.socket_path, name()), agent_of(other.socket_path, name())
        mine, yours = Array(gpu, size, 512), Array(gpu, size, 8192)
        mine.memory[:] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        yours.whole[:] = 0xee
        host = np.full(size, 0x11, np.uint8)
        reg = a.register_memory([(mine.address, size, 0, "")], "VRAM", ["UCX"])
        assert reg and reg.getType() == B.VRAM_SEG
        a.register_memory([(host.ctypes.data, size, 0, "")], "DRAM")
        b.register_memory([(yours.address, size, 0, "")], "cuda")
        remote = a.add_remote_agent(b.get_agent_metadata())

        def table(base, picks):
            return [(base + GUARD + int(p) * row, row, 0) for p in picks]
        order = np.random.default_rng(2).permutation(rows)
        local = a.prep_xfer_dlist("", table(mine.address, range(rows)), "VRAM")
        far = a.prep_xfer_dlist(remote, table(yours.address, order), "VRAM")
        h = a.make_prepped_xfer("WRITE", local, range(rows), far, range(rows), b"landed")
        a.transfer(h)
        assert until(b.get_new_notifs) == {a.name: [b"landed"]}
        wanted = np.full(yours.whole.size, 0xee, np.uint8)
        body = wanted[8192 + GUARD:8192 + GUARD + rows * row].reshape(rows, row)
        body[order] = mine.memory[GUARD:-GUARD].reshape(rows, row)
        assert np.array_equal(yours.whole, wanted)
        until(lambda: a.check_xfer_state(h) == "DONE")
        # into host memory, and kinds are kept apart
        back = a.initialize_xfer("READ", a.get_xfer_descs(table(host.ctypes.data, [3]), "DRAM"),
                                 a.get_xfer_descs(table(yours.address, [5]), "VRAM"), remote)
        a.transfer(back)
        until(lambda: a.check_xfer_state(back) == "DONE")
        at = GUARD + 3 * row
        assert np.array_equal(host[at:at + row], body[5])
        assert (host[:at] == 0x11).all() and (host[at + row:] == 0x11).all()
        with pytest.raises(B.nixlNotFoundError):
            a.prep_xfer_dlist("", table(mine.address, [0]), "DRAM")
        a.deregister_memory(reg)
        with pytest.raises(B.nixlNotFoundError):
            a.prep_xfer_dlist("", table(mine.address, [0]), "VRAM")


def test_memory_not_on_gpu_is_refused(gpu, B):  # noqa: F811
    one, other = two("shm")
    with one:
        a = agent_of(one.socket_path, name())
        host = np.zeros(4096, np.uint8)
        for address, nbytes, word in (
                (host.ctypes.data, 4096, "is not GPU memory"),
                (Array(gpu, 4096, 0).address, 1 << 30, "exceeds its allocation"),
                (gpu.vmm(1 << 21)[0], 4096, "expandable_segments")):
            with pytest.raises(B.nixlBackendError, match=word):
                a.register_memory([(address, nbytes, 0, "")], "VRAM")
        with pytest.raises(B.nixlNotFoundError, match="POSIX"):
            a.register_memory([(1, 4096, 0, "file")], "FILE")


def test_missing_driver_is_reported(pair, monkeypatch, B):  # noqa: F811
    monkeypatch.setenv("KVD_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    monkeypatch.setattr("kvd.cuda._library", None)
    a = agent_of(pair[0].socket_path, name())
    with pytest.raises(B.nixlBackendError, match="/nowhere/libcuda.so.1"):
        a.register_memory([(4096, 4096, 0, "")], "VRAM")


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_room_between_gpu_and_host(gpu, kind):
    """A pool over part of an allocation, and one over memory of cuMemCreate."""
    one, other = two("shm")
    with one, other, kvd.Client(one.socket_path) as a, kvd.Client(other.socket_path) as b:
        if kind == "ipc":
            source = Array(gpu, TOTAL, 256)
            region, memory = a.register(source), source.memory
        else:
            address, args, view = gpu.vmm(TOTAL)
            region = a.register_gpu_fd(args["fds"][0], TOTAL, device=gpu.uuid,
                                       allocation=args["allocation"], address=address)
            memory = np.frombuffer(view, np.uint8)[:TOTAL]
        assert region.kind == "cuda_" + kind and region.bytes == TOTAL
        memory[:] = np.random.default_rng(1).integers(0, 256, TOTAL, np.uint8)
        target = np.zeros(TOTAL, np.uint8)
        from_pool = a.pool(layout(), [(region, o) for o in PARTS])
        to_pool = b.pool(layout(), [(b.register(target), o) for o in PARTS])
        tx = a.send(1, from_pool)
        rx = b.recv(1, to_pool, [a.endpoint])
        rx.bind({"kv": range(30, 33)})
        tx.wait(kvd.WAITING_FOR_INPUT, 60)
        tx.send({"kv": [7, 8, 9]})
        assert rx.wait(timeout=60) == tx.wait(timeout=60) == kvd.SUCCESS
        got, sent = (m.reshape(len(PARTS), -1, PAGE_BYTES) for m in (target, memory))
        assert np.array_equal(got[:, 30:33], sent[:, 7:10])
        assert not got[:, :30].any() and not got[:, 33:].any()


def test_cuda_arrays_must_be_contiguous(pair):
    class View:
        pass
    with kvd.Client(pair[0].socket_path) as client:
        view = View()
        for strides, read_only in (((8, 1), False), (None, True)):
            view.__cuda_array_interface__ = {
                "shape": (4, 4), "typestr": "|u1", "data": (4096, read_only), "version": 3,
                "strides": strides}
            with pytest.raises(ValueError):
                client.register(view)
        with pytest.raises(ValueError, match="64"):
            kvd._kvd.Region(client._kvd, "cuda_ipc", 4096, 4096, -1, 0, None, "x", None, None,
                            device="GPU-0", handle=b"short")
