# SPDX-License-Identifier: Apache-2.0
"""A daemon that is restarted under clients that only open rooms: they reconnect by that alone,
and get ELOST, retryable, meanwhile; never ESTATE."""
import asyncio
import signal
import threading
import time

import pytest

import kvd
from conftest import DEADLINE_S, Daemon, Stopwatch, judging_deaths, until

SHAPE = dict(page_size=16, pages=8, layers=1, kv_heads=1, head_bytes=64)


def opening(client, pool, kind, number):
    """The call that opens such a room; its result may have to be awaited."""
    views = {"kv": [1, 2]}
    return {"send": lambda: client.send(number, pool),
            "recv": lambda: client.recv(number, pool, [client.endpoint]),
            "offer": lambda: client.offer(number, pool, views),
            "pull": lambda: client.pull(number, pool, client.endpoint, views)}[kind]


def lost(error):
    assert (error.code, error.retryable) == ("ELOST", True), error


def kill(daemon):
    daemon.stop(signal.SIGKILL)
    daemon.notify.close()


async def pause():
    """The loop turns meanwhile."""
    await asyncio.get_running_loop().run_in_executor(None, threading.Event().wait, 0.01)


KINDS = ["send", "recv", "offer", "pull"]


@pytest.mark.parametrize("kind", KINDS)
def test_blocking_client_reconnects_by_rooms_alone(kind):
    layout = kvd.Layout.sglang_mha(**SHAPE)
    with Daemon() as daemon:
        client = kvd.Client(daemon.socket_path, timeout=0.5)
        pool = client.pool(layout, [client.register(kvd.Memory(n)) for n in layout.buffers])
        old = client.send(1, pool)
        kill(daemon)
        watch = Stopwatch()
        for _ in range(2):  # at its end, and without it
            with pytest.raises(kvd.ConnectionError) as told:
                opening(client, pool, kind, 2)()
            lost(told.value)
        assert watch.seconds() < 8, "no longer than the client's timeout"
        with pytest.raises(kvd.ConnectionError) as told:  # the room's own end
            old.send({"kv": [1]})
        assert told.value.code == "EDEAD" and told.value.retryable
        assert old.error().code == "EDEAD" and "process has ended" in old.error().message
        daemon.start().wait_ready()
        end, room = time.monotonic() + DEADLINE_S, None
        while room is None:
            try:
                room = opening(client, pool, kind, 3)()
            except kvd.Error as error:
                lost(error)
                assert time.monotonic() < end
        assert room.number == 3 and pool.id
        client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_async_client_reconnects_by_rooms_alone(kind):
    layout = kvd.Layout.sglang_mha(**SHAPE)

    async def engine(daemon):
        async with kvd.AsyncClient(daemon.socket_path, timeout=20) as client:
            pool = await client.pool(layout, [await client.register(kvd.Memory(n))
                                              for n in layout.buffers])
            old = await client.send(1, pool)
            kill(daemon)
            for _ in range(3):
                with pytest.raises(kvd.ConnectionError) as told:
                    await opening(client, pool, kind, 2)()
                lost(told.value)
            with pytest.raises(kvd.ConnectionError) as told:
                await asyncio.wait_for(old.wait(), DEADLINE_S)
            assert told.value.code == "EDEAD"
            daemon.start().wait_ready()
            end, room = time.monotonic() + DEADLINE_S, None
            while room is None:
                try:
                    room = await opening(client, pool, kind, 3)()
                except kvd.Error as error:
                    lost(error)
                    assert time.monotonic() < end
                    await pause()
            assert room.number == 3
    with Daemon() as daemon:
        asyncio.run(engine(daemon))


@judging_deaths
def test_frozen_own_daemon_is_named(caplog):
    """Not only a state that does not change: by the room, its timeout, and the log."""
    caplog.clear()
    layout = kvd.Layout.sglang_mha(**SHAPE)

    def warned():
        return [r for r in caplog.records if "local daemon does not respond" in r.getMessage()]

    async def waits(path, freeze):
        async with kvd.AsyncClient(path) as client:
            pool = await client.pool(layout, [await client.register(kvd.Memory(n))
                                              for n in layout.buffers])
            room = await client.send(2, pool)
            freeze()
            waiting = asyncio.ensure_future(room.wait())
            while not warned():
                assert not waiting.done()
                await pause()
            error = await room.error()
            assert error.code == "ENOREPLY" and "local daemon" in error.message, error
            daemon.thaw()
            await room.abort("enough")
            with pytest.raises(kvd.AbortedError):
                await waiting
    with Daemon(patient=False) as daemon:
        with kvd.Client(daemon.socket_path) as client:
            pool = client.pool(layout, [client.register(kvd.Memory(n))
                                        for n in layout.buffers])
            room = client.send(1, pool)
            with pytest.raises(kvd.TimeoutError) as told:
                room.wait(timeout=0.001)
            assert "daemon" not in told.value.message and room.error() is None
            daemon.freeze()
            error = until(room.error)
            assert (error.code, error.retryable) == ("ENOREPLY", True), error
            assert "local daemon does not respond (no heartbeat for " in error.message
            with pytest.raises(kvd.TimeoutError, match="local daemon does not respond"):
                room.wait(timeout=0.001)
            assert not warned()
            waiting = threading.Thread(target=lambda: pytest.raises(kvd.AbortedError, room.wait))
            waiting.start()
            until(warned)
            daemon.thaw()
            until(lambda: room.error() is None)
            room.abort("enough")
            waiting.join()
            assert len(warned()) == 1, warned()
        caplog.clear()
        asyncio.run(waits(daemon.socket_path, daemon.freeze))


def test_failed_room_has_its_own_error(pair):
    """In every call, by both clients; a sender knows its total at the end."""
    layout = kvd.Layout.sglang_mha(**SHAPE)
    with kvd.Client(pair[0].socket_path) as a, kvd.Client(pair[1].socket_path) as b:
        pools = [c.pool(layout, [c.register(kvd.Memory(n)) for n in layout.buffers])
                 for c in (a, b)]
        tx, rx = a.send(1, pools[0]), b.recv(1, pools[1], [a.endpoint])
        rx.bind({"kv": [1, 2]})
        tx.wait(kvd.WAITING_FOR_INPUT, 60)
        assert tx.error() is None and tx.read().total == 0
        rx.abort("wrong model")
        until(lambda: tx.state == rx.state == kvd.FAILED)
        for call in (lambda: tx.send({"kv": [1, 2]}), lambda: rx.bind({"kv": [1]})):
            with pytest.raises(kvd.AbortedError, match="room 1 failed: EABORTED: .*wrong model"):
                call()
        why = tx.error()
        assert (why.code, why.scope, why.retryable) == ("EABORTED", "room", True)
        assert "wrong model" in why.message
        tx, rx = a.send(2, pools[0]), b.recv(2, pools[1], [a.endpoint])
        rx.bind({"kv": [1, 2]})
        tx.wait(kvd.WAITING_FOR_INPUT, 60)
        tx.send({"kv": [1, 2]})
        assert tx.wait(timeout=60) == rx.wait(timeout=60) == kvd.SUCCESS
        assert tx.read().total == tx.read().bytes == rx.read().total == 2 * 16 * 64 * 2
