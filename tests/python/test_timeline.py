# SPDX-License-Identifier: Apache-2.0
"""What rooms wait for: marks of a CUDA stream (kvd.Timeline), over the fake driver (tests/gpu). A
stream is held; what waits for it stays where it is while what does not wait goes by."""
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvd
import kvd.cuda
from conftest import until
from kvd.engine import Desk
from test_gpu import Array, gpu, two  # noqa: F401 (gpu is a fixture)
from test_kvd import PAGE_BYTES, PARTS, PAGES, TOTAL, layout

import fake_gpu

OLD, TRUE, ERROR = 0x11, 0x22, 801  # CU_ERROR_NOT_SUPPORTED


class Held:
    """A stream that does nothing of what it is told from now on, until go()."""

    def __init__(self, gpu, work=lambda: None):  # noqa: F811
        self.stream, self._go = fake_gpu.Stream(gpu), threading.Event()
        self.stream.do(lambda: (self._go.wait(60), work()))

    def go(self):
        self._go.set()


class Side:
    def __init__(self, daemon, memory, thing, name=None):
        self.client, self.memory = kvd.Client(daemon.socket_path, timeout=60), memory
        self.socket_path = daemon.socket_path
        region = self.client.register(thing)
        self.pool = self.client.pool(layout(), [(region, o) for o in PARTS], name=name)

    def pages(self, first):
        return self.memory.reshape(len(PARTS), PAGES, PAGE_BYTES)[:, first:first + 3]


@pytest.fixture
def sides(gpu):  # noqa: F811
    """A cache on a GPU, whose bytes are old, and one on a host."""
    one, other = two("shm")
    with one, other:
        array, host = Array(gpu, TOTAL, 256), np.zeros(TOTAL, np.uint8)
        array.memory[:] = OLD
        both = Side(one, array.memory, array), Side(other, host, host)
        yield both
        for side in both:
            side.client.close()


def start(role, number, a, b, first, wait):
    """A room that takes pages 7 to 9 to `first` and on; who has `role` waits."""
    def of(who):
        return wait if who == role else None
    into = {"kv": range(first, first + 3)}
    if role in ("send", "bind"):
        tx = a.client.send(number, a.pool)
        rx = b.client.recv(number, b.pool, [a.client.endpoint])
        rx.bind(into, wait=of("bind"))
        tx.wait(kvd.WAITING_FOR_INPUT, 60)
        tx.send({"kv": [7, 8, 9]}, wait=of("send"))
    else:
        tx = a.client.offer(number, a.pool, {"kv": [7, 8, 9]}, wait=of("offer"))
        rx = b.client.pull(number, b.pool, a.client.endpoint, into, wait=of("pull"))
    return tx, rx


@pytest.mark.parametrize("role,kind", [
    ("send", "mark"), ("bind", "mark"), ("offer", "mark"), ("pull", "mark"), ("send", "after")])
def test_pages_move_after_the_stream_reaches_its_mark(gpu, sides, role, kind):  # noqa: F811
    a, b = sides

    def work():
        a.memory[:] = TRUE
    held = Held(gpu, work)
    client = (a if role in ("send", "offer") else b).client
    line = kvd.Timeline(client, held.stream if kind == "mark" else None)
    wait = line.mark() if kind == "mark" else line.after(held.stream.record())
    tx, rx = start(role, 1, a, b, 30, wait)
    # one that does not wait goes by, with what is there now
    free_tx, free_rx = start(role, 2, a, b, 40, None)
    assert free_rx.wait(timeout=60) == free_tx.wait(timeout=60) == kvd.SUCCESS
    assert (b.pages(40) == OLD).all()
    assert rx.state not in (kvd.SUCCESS, kvd.FAILED) and not b.pages(30).any()
    held.go()
    assert rx.wait(timeout=60) == tx.wait(timeout=60) == kvd.SUCCESS
    assert (b.pages(30) == TRUE).all()
    assert line.passed
    line.close()


def test_mark_completes_after_earlier_work(gpu, pair):  # noqa: F811
    with kvd.Client(pair[0].socket_path, timeout=60) as client:
        seen = []
        held = Held(gpu, lambda: seen.append(line.passed))
        line = kvd.Timeline(client, held.stream)
        region, offset, value = line.mark()
        assert (offset, value) == (0, 1) and region.kind == "memfd"
        held.stream.do(lambda: seen.append(line.passed))
        assert line.mark() == (region, 0, 2)
        # another stream's word is not held up, and its event not this one's
        other = kvd.Timeline(client)
        other.after(fake_gpu.Stream(gpu).record())
        until(lambda: other.passed)
        other.after(held.stream.record())
        assert not other.passed and not line.passed and not seen
        for pending in (line, other):
            with pytest.raises(kvd.BusyError):
                pending.close()
        held.go()
        until(lambda: line.passed and other.passed)
        assert seen == [False, False]
        for passed in (line, other):
            passed.close()


def test_closed_timeline_marks_nothing(gpu, sides):  # noqa: F811
    a, b = sides
    stream = fake_gpu.Stream(gpu)
    begin = gpu.lib.fake_cuda_live()
    line = kvd.Timeline(a.client)
    wait = line.mark()
    until(lambda: line.passed)
    line.close()
    line.close()
    assert gpu.lib.fake_cuda_live() == begin
    for late in (line.mark, lambda: line.after(stream.record())):
        with pytest.raises(kvd.StateError):
            late()
    tx = a.client.send(1, a.pool)
    with pytest.raises(ValueError, match="not registered"):
        tx.send({"kv": [1]}, wait=wait)
    # and one whose client is gone
    late = kvd.Timeline(a.client)
    a.client.close()
    late.close()
    assert gpu.lib.fake_cuda_live() == begin + 1  # the event


@pytest.mark.parametrize("name", [
    "cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamCreateWithPriority",
    "cuStreamWriteValue64_v2"])
def test_driver_refusal_leaks_nothing(gpu, pair, name):  # noqa: F811
    with kvd.Client(pair[0].socket_path, timeout=60) as client:
        def left():
            return gpu.lib.fake_cuda_live(), client.command("region.list")["regions"]
        begin = left()
        gpu.lib.fake_cuda_fail(name.encode(), 1, ERROR)
        with pytest.raises(kvd.Error, match="%s: CUDA_ERROR_NOT_SUPPORTED" % name):
            kvd.Timeline(client)
        assert left() == begin
        line = kvd.Timeline(client)
        gpu.lib.fake_cuda_fail(b"cuStreamWriteValue64_v2", 1, ERROR)
        with pytest.raises(kvd.Error):
            line.mark()
        assert line.mark()[2] == 1
        until(lambda: line.passed)
        line.close()
        assert left() == begin


ENGINE = """
import sys, threading
sys.path[:0] = %r
import fake_gpu, kvd
from test_timeline import Held, Side, layout
from test_kvd import TOTAL
gpu = fake_gpu.Gpu()
class daemon: socket_path = sys.argv[1]
memory = kvd.Memory(TOTAL)
import numpy
a = Side(daemon, numpy.asarray(memory), memory, "dying")
line = kvd.Timeline(a.client, Held(gpu).stream)
tx = a.client.send(1, a.pool)
tx.wait(kvd.WAITING_FOR_INPUT, 60)
tx.send({"kv": [7, 8, 9]}, wait=line.mark())
print("given", flush=True)
threading.Event().wait()
"""


def test_engine_killed_with_pending_mark_leaks_nothing(gpu, sides):  # noqa: F811
    a, b = sides
    text = ENGINE % (sys.path,)
    with subprocess.Popen([sys.executable, "-c", text, a.socket_path],
                          stdout=subprocess.PIPE, env=dict(os.environ)) as engine:
        try:
            rx = b.client.recv(1, b.pool, [kvd.Source(a.client.endpoint, "dying")])
            rx.bind({"kv": range(30, 33)})
            assert engine.stdout.readline() == b"given\n"
            until(lambda: len(a.client.command("session.list", all=True)["sessions"]) == 2)
        finally:
            engine.kill()
    with pytest.raises(kvd.PeerError):
        rx.wait(timeout=60)
    assert not b.pages(30).any()
    until(lambda: len(a.client.command("session.list", all=True)["sessions"]) == 1)
    assert len(a.client.command("region.list", all=True)["regions"]) == 1
    tx, rx = start("send", 2, a, b, 40, None)
    assert rx.wait(timeout=60) == tx.wait(timeout=60) == kvd.SUCCESS


@pytest.mark.parametrize("driver", [True, False])
def test_scheduler_leaves_cuda_events_to_the_daemon(gpu, sides, monkeypatch, driver):  # noqa: F811
    """Without a driver that can they are its own to ask for, in turn()."""
    a, b = sides
    held = Held(gpu, lambda: a.memory.fill(TRUE))
    if not driver:
        gpu.lib.fake_cuda_fail(b"cuStreamWriteValue64_v2", 1, ERROR)
    desk = Desk(a.client)
    desk.follow_cuda()
    assert (desk.timeline is not None) == driver
    room = desk.send(1, a.pool, open_s=60, ticket=None)
    rx = b.client.recv(1, b.pool, [a.client.endpoint])
    rx.bind({"kv": range(30, 33)})
    until(lambda: desk.turn(True) or room.look() == kvd.WAITING_FOR_INPUT)
    room.send({"kv": [7, 8, 9]}, 0, True, events=(held.stream.record(), None))
    assert (room.given, bool(desk.parked)) == ((1, False) if driver else (0, True))
    tx, free = start("send", 2, a, b, 40, None)
    assert free.wait(timeout=60) == tx.wait(timeout=60) == kvd.SUCCESS
    desk.turn(True)
    assert room.given == int(driver) and not b.pages(30).any()
    held.go()
    if driver:  # nobody takes a turn
        assert rx.wait(timeout=60) == kvd.SUCCESS
        desk.timeline.close()
    until(lambda: desk.turn(True) or room.look() == kvd.SUCCESS)
    assert rx.wait(timeout=60) == kvd.SUCCESS and (b.pages(30) == TRUE).all()


def test_pages_listed_late(sides):
    """A chunk whose page numbers come with an event; a function that cannot tell them ends
    the room, not the scheduler."""
    a, b = sides

    class Late:
        come = False

        def query(self):
            return self.come
    desk = Desk(a.client)
    for number, views in ((1, lambda: {"kv": [7, 8, 9]}), (2, lambda: {"kv": ["x"]})):
        room, event, asked = desk.send(number, a.pool, open_s=60, ticket=None), Late(), []
        rx = b.client.recv(number, b.pool, [a.client.endpoint])
        rx.bind({"kv": range(30, 33)})
        until(lambda: desk.turn(True) or room.look() == kvd.WAITING_FOR_INPUT)
        room.send(lambda: asked.append(1) or views(), 0, True, listed=event)
        desk.turn(True)
        assert not asked and not room.given
        event.come = True
        until(lambda: desk.turn(True) or room.look() in (kvd.SUCCESS, kvd.FAILED))
        assert room.end == (kvd.SUCCESS if number == 1 else kvd.FAILED), room.reason
    assert "pages" in room.reason
    with pytest.raises(kvd.AbortedError):
        rx.wait(timeout=60)


@pytest.mark.parametrize("wait", [
    (1, 2), ("region", 0, 1), (None, 0, 1), (bytes(64), "GPU-0"), bytes(64)])
def test_invalid_waits_are_refused(sides, wait):
    a, _ = sides
    tx = a.client.send(1, a.pool)
    with pytest.raises((TypeError, ValueError, kvd.Error)):
        tx.send({"kv": [1]}, wait=wait)
