# SPDX-License-Identifier: Apache-2.0
"""Handles that one thread closes while others use them: no call reads freed memory, all find a
handle closed as soon as its close is sent, and memory stays until the daemon has answered.
KVD_RACE_S: seconds of the stress."""
import asyncio
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

import kvd
from close_stress import CASES, IDS, Bench, Lists
from conftest import until
from kvd_daemon import Daemon
from kvd import _kvd

HERE = os.path.dirname(os.path.abspath(__file__))
RACE_S = float(os.environ.get("KVD_RACE_S", "3"))
WAIT_S = 20


@pytest.fixture(scope="module")
def daemon():
    with Daemon("[chunks]\nchunk_memory = 64 MiB\nattention_threads = 1\n") as d:
        yield d


@pytest.fixture
def bench(daemon):
    b = Bench(daemon.socket_path)
    yield b
    b.client.close()


class Call(threading.Thread):
    """A call on its own thread, and its result."""

    def __init__(self, call, *args):
        super().__init__(daemon=True)
        self.call, self.args, self.got, self.error = call, args, None, None
        self.start()

    def run(self):
        try:
            self.got = self.call(*self.args)
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(WAIT_S)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return self.got


class frozen:
    """with frozen(daemon): it answers nothing."""

    def __init__(self, daemon):
        self.daemon = daemon

    def __enter__(self):
        self.daemon.freeze()

    def __exit__(self, *exc):
        self.daemon.thaw()


def usable(call):
    try:
        call()
    except kvd.StateError:
        return False
    except kvd.TimeoutError:
        return True
    return True


def region_of(bench):
    region = bench.client.register(kvd.Memory(4096))
    return region.unregister, lambda: region.id != 0


def pool_of(bench):
    pool = bench.client.pool(bench.layout, bench.parts, name="closing")
    return pool.unregister, lambda: pool.id != 0


def room_of(bench):
    room = bench.client.send(1, bench.pool)
    room.abort()
    until(lambda: room.state == kvd.FAILED)
    return room.close, lambda: usable(room._room.state)


def space_of(bench):
    space = bench.open_space()
    return space.close, lambda: usable(lambda: space.find(IDS, timeout=0.02))


def move_of(bench):
    move = bench.space.put(IDS, {"kv": [0, 1]})
    move.wait(timeout=WAIT_S)
    return move.close, lambda: usable(move._move.state)


def attend_of(bench):
    attend = bench.client.attend(rows=4, heads=1, dqk=32, dv=32, kind="gqa", q_type="bf16",
                                 kv_type="bf16", scale=1.0, key="k", value="v")
    return attend._attend.close, lambda: usable(attend._attend.seat)


MADE = {"region": region_of, "pool": pool_of, "room": room_of, "space": space_of,
        "move": move_of, "attend": attend_of}


@pytest.mark.parametrize("kind", MADE)
def test_handle_is_closed_to_others_while_its_closing_is_under_way(daemon, bench, kind):
    close, is_open = MADE[kind](bench)
    assert is_open()
    with frozen(daemon):
        first = Call(close)
        until(lambda: not is_open(), 10)
        second = Call(close)  # ends as the first one does
    assert first.result() is None and second.result() is None
    assert not is_open() and close() is None


def test_hold_closed_fails_call_waiting_for_lock(daemon, bench):
    """An object closed in the ring is removed at once: the fetch was checked before."""
    hold = bench.space.hold(IDS)
    with frozen(daemon):
        lock = Call(bench.space.find, IDS)
        calls = [Call(hold._hold.close)] + [Call(hold.holders) for _ in range(4)]
    assert lock.result()[0] == len(IDS)
    assert calls[0].result() is None
    for call in calls[1:]:
        try:
            call.result()
        except kvd.StateError as error:
            assert "closed" in str(error)
    assert not usable(hold._hold.facts)


def test_refused_closing_opens_the_handle_again(daemon, bench):
    with frozen(daemon):
        calls = [Call(bench.region.unregister)]
        until(lambda: bench.region.id == 0, 10)
        calls.append(Call(bench.region.unregister))
    for call in calls:
        with pytest.raises(kvd.BusyError):
            call.result()
    assert bench.region.id != 0
    bench.space.close()
    bench.pool.unregister()
    bench.region.unregister()
    assert bench.region.id == 0


def test_memory_stays_until_an_interrupted_closing_is_answered(daemon, bench):
    memory = kvd.Memory(4096)
    kept, region = weakref.ref(memory), bench.client.register(memory)
    del memory

    def interrupt(*_):
        raise InterruptedError

    def at_last():
        until(lambda: region.id == 0, 10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with frozen(daemon):
            call = Call(at_last)
            with pytest.raises(InterruptedError):
                region.unregister(timeout=WAIT_S)
            call.result()
            del region, call, at_last
            assert kept() is not None
    finally:
        signal.signal(signal.SIGUSR1, before)

    def gone():
        bench.client.command("ping")
        return kept() is None
    until(gone)


def test_memory_stays_until_a_reported_closing_is_answered(daemon, bench):
    memory, told = kvd.Memory(4096), []
    kept, region = weakref.ref(memory), bench.client.register(memory)
    del memory
    with frozen(daemon):
        for _ in range(2):
            region.unregister(on_done=lambda *end: told.append(end))
        assert kept() is not None and region.id == 0
    until(lambda: bench.client._kvd.poll() or len(told) == 2)
    assert all(error is None for _, error in told)
    region.unregister(on_done=lambda *end: told.append(end))
    assert told[2:] == [(None, None)] and kept() is None


def test_callback_can_close_its_client(daemon, bench):
    for read in ("state", "read"):
        client = kvd.Client(daemon.socket_path)
        pool = client.pool(bench.layout, [client.register(kvd.Memory(n))
                                          for n in bench.layout.buffers])
        room = _kvd.Room(client._kvd, 7, kvd.rooms.SEND, pool._pool,
                         on_done=lambda *_, client=client: client.close())
        with pytest.raises(kvd.StateError, match="room 7: closed"):
            until(lambda: getattr(room, read)() is None)
        assert client.closed


def test_signal_handler_may_use_the_client_while_a_session_is_awaited():
    """A daemon that has ended: the call waits for another, and holds no lock meanwhile."""
    with Daemon() as d:
        client = kvd.Client(d.socket_path)
        d.stop(signal.SIGKILL)
        d.notify.close()
        with pytest.raises(kvd.ConnectionError):
            client.command("ping", timeout=0.01)
        until(lambda: client.lost)
        seen = []

        def handle(*_):
            seen.append(client.lost)
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(kvd.ConnectionError):
                client.command("ping", timeout=1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert seen == [True]
        client.close()
        d.start().wait_ready()


WAITING = {
    "command": lambda b, c, m: lambda: c.command("ping"),
    "region": lambda b, c, m: lambda: c.register(kvd.Memory(4096)),
    "pool": lambda b, c, m: lambda: c.pool(b.layout, [c.register(kvd.Memory(n))
                                                      for n in b.layout.buffers]),
    "find": lambda b, c, m: lambda: c.space(b.layout, model="m", scheme="t", tokens=16,
                                            timeout=WAIT_S),
    "attach": lambda b, c, m: lambda: m.attach.check(WAIT_S),
}


@pytest.mark.parametrize("call", WAITING)
def test_client_closed_under_a_waiting_call(daemon, bench, call):
    client = kvd.Client(daemon.socket_path, timeout=WAIT_S)
    memory = [kvd.Memory(4096) for _ in range(2)]
    regions = [client.register(m) for m in memory]
    lists = Lists(client, *memory)
    until(lambda: lists.attach.state() == 1)
    lists.xfer.post(None)
    until(lambda: lists.xfer.poll() != 1, 10)
    assert lists.xfer.poll() == 0, lists.xfer.error()
    waits = WAITING[call](bench, client, lists)
    with frozen(daemon):
        thread = Call(waits)
        posted = Call(lists.xfer.post, None)
        until(lambda: posted.result() == 1)
        client.close()
        with pytest.raises(kvd.Error, match="closed"):
            thread.result()
    assert lists.xfer.poll() < 0 and lists.xfer.stop() is True
    assert lists.attach.state() == 1 and lists.attach.error() == ""
    with pytest.raises(kvd.StateError):
        lists.attach.refresh(1)
    with pytest.raises(kvd.Error):
        _kvd.Dlist(client._kvd, lists.attach, lists.tables[0].buffer_info()[0], 1, 3,
                   lists.tables[0].tobytes())
    with pytest.raises(kvd.StateError):
        lists.xfer.post(None)
    assert all(region.id == 0 for region in regions)


def test_asyncio_room_may_be_closed_twice(daemon, bench):
    async def engine():
        async with kvd.AsyncClient(daemon.socket_path) as client:
            pool = await client.pool(bench.layout, [await client.register(kvd.Memory(n))
                                                    for n in bench.layout.buffers])
            room = await client.send(9, pool)
            await room.abort()
            while room.state != kvd.FAILED:
                await client.command("ping")
            await asyncio.wait_for(asyncio.gather(room.close(), room.close()), WAIT_S)
            await asyncio.wait_for(room.close(), WAIT_S)
            with pytest.raises(kvd.StateError):
                room.state
    asyncio.run(engine())


def python(*args, **more):
    return subprocess.run([sys.executable, "-X", "dev", *args], cwd=HERE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


EXIT = """
import sys, threading, kvd
class Last:
    def __init__(self, client): self.client = client
    def __del__(self): self.client.close()
client = kvd.Client(sys.argv[1])
last = Last(client)
space = client.space(kvd.Layout.sglang_mha(page_size=16, pages=8, layers=1, kv_heads=1,
                     head_bytes=64), model="m", scheme="t", tokens=16)
print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=space.find, args=([bytes(32)],), kwargs={"timeout": 3}, daemon=True).start()
"""


def test_interpreter_ends_while_a_daemon_thread_waits(daemon, bench):
    """That thread keeps the client's lock for ever."""
    with subprocess.Popen([sys.executable, "-c", EXIT, daemon.socket_path], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout.readline() == "ready\n"
        with frozen(daemon):
            engine.stdin.write("\n")
            engine.stdin.flush()
            assert engine.wait(WAIT_S) == 0


def test_stress(daemon, bench):
    """As many cases as time is given for, under the checks of Python's development mode."""
    done = python("close_stress.py", daemon.socket_path, str(RACE_S),
                  timeout=RACE_S + 5 * WAIT_S)
    assert done.returncode == 0, (done.returncode, done.stdout[-4000:])
    assert [line.split()[0] for line in done.stdout.splitlines() if line.split()[0] in CASES] \
        == CASES, done.stdout[-4000:]
