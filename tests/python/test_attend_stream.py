# SPDX-License-Identifier: Apache-2.0
"""Queries that a GPU's stream computes (AttendStream), over the fake driver (tests/gpu): the stream
writes them, waits for results and reads them, and no thread waits for the stream. What becomes of
the stream when the daemon dies, hangs or refuses."""
import os
import signal
import time

import numpy as np
import pytest

import kvd
from conftest import until
from test_attend import ATTENDS, LAYERS, T, Engine, Model, bf16, ids_of
from test_chunk_files import killed
from test_gpu import gpu  # noqa: F401 (a fixture)
from test_timeline import Held

import fake_gpu
from kvd_daemon import Daemon

SEATS, ERROR = 4, 801  # CU_ERROR_NOT_SUPPORTED


@pytest.fixture
def daemon():
    with Daemon(ATTENDS) as one:
        yield one


class Rank(Engine):
    """With a prompt of 8 chunks, whose hold it has."""

    def __init__(self, daemon):
        super().__init__(kvd.Client(daemon.socket_path, timeout=60), Model(8 * T), seats=SEATS)
        ids = ids_of(8, b"stream")
        self.put(ids)
        self.hold = self.space.hold(ids)
        self.parts = self.attend.pack([kvd.Part(self.hold)])

    def queries(self, seat, seed):
        """-> (what writes them, the rows in float)"""
        rng = np.random.default_rng(seed)
        bits, rows = bf16(rng.standard_normal((self.attend.rows, self.model.dqk)))

        def write():
            self.attend.q(seat)[:] = bits.reshape(-1).view(np.uint8)
        return write, rows


@pytest.fixture
def rank(gpu, daemon):  # noqa: F811
    one = Rank(daemon)
    yield one
    one.client.close()


def test_layers_posted_ahead_of_the_stream(gpu, rank):  # noqa: F811
    """All are posted while the stream is held; each reads its own queries' results in its turn."""
    held, told = Held(gpu), {}
    on = rank.attend.on_stream(held.stream)
    rows = {}
    for seat in range(SEATS):
        write, rows[seat] = rank.queries(seat, seat)
        held.stream.do(write)
        on.post(seat, seat % LAYERS, rank.parts)
        on.join(seat)
        held.stream.do(lambda seat=seat: told.update({seat: rank.attend.o(seat).copy()}))
    rank.client.command("peer.list")  # it is processed after the requests
    assert not told
    assert [rank.attend.state(s) for s in range(SEATS)] == [kvd.WAITING_FOR_INPUT] * SEATS
    held.go()
    until(lambda: len(told) == SEATS)
    assert on.failed() == [] and list(told) == list(range(SEATS))
    for seat in range(SEATS):
        want, _, _ = rank.model.attend(seat % LAYERS, rows[seat], np.arange(8 * T))
        assert np.abs(told[seat] - want).max() < 2e-2
    assert on.at(1).q - on.at(0).q == rank.attend._at[0]
    on.close()
    on.close()
    for late in (lambda: on.post(0, 0, rank.parts), lambda: on.join(0)):
        with pytest.raises(kvd.StateError):
            late()


def test_seats_again_and_again(gpu, rank):  # noqa: F811
    stream, done = fake_gpu.Stream(gpu), []
    on = rank.attend.on_stream(stream)
    with pytest.raises(kvd.StateError, match="no request"):
        on.join(2)
    for step in range(20):
        for seat in range(SEATS):
            write, _ = rank.queries(seat, step)
            stream.do(write)
            on.post(seat, 0, rank.parts)
            on.join(seat)
        stream.do(lambda: done.append(step))
        until(lambda: len(done) == step + 1)
        assert on.failed() == []
    on.close()


def test_refused_request_lets_the_stream_go_on(gpu, rank):  # noqa: F811
    stream, passed = fake_gpu.Stream(gpu), []
    on = rank.attend.on_stream(stream)
    begin = time.monotonic()
    on.post(0, 99, rank.parts, deadline=30)  # no such layer
    on.join(0)
    write, _ = rank.queries(1, 1)
    stream.do(write)
    on.post(1, 0, rank.parts)
    on.join(1)
    stream.do(lambda: passed.append(1))
    until(lambda: passed)
    assert time.monotonic() - begin < 20
    assert on.failed() == [0] and rank.attend.error(0).code != "ENOREPLY"
    on.close()


def test_queries_that_never_come(gpu, rank):  # noqa: F811
    held = Held(gpu)
    on = rank.attend.on_stream(held.stream)
    on.post(0, 0, rank.parts, deadline=0.2)
    until(lambda: rank.attend.state(0) == kvd.FAILED)
    assert rank.attend.error(0).code == "ETIMEOUT"
    held.go()
    on.close()


def posted(gpu, rank, deadline):  # noqa: F811
    """Requests in all seats that a held stream has no queries for, and behind them a mark."""
    held, passed = Held(gpu), []
    on = rank.attend.on_stream(held.stream)
    for seat in range(SEATS):
        on.post(seat, 0, rank.parts, deadline=deadline)
        on.join(seat)
    held.stream.do(lambda: passed.append(1))
    return held, on, passed


def test_daemon_that_dies(gpu):  # noqa: F811
    with killed(ATTENDS) as daemon:
        rank = Rank(daemon)
        held, on, passed = posted(gpu, rank, 60)
        daemon.proc.kill()
        held.go()
        begin = time.monotonic()
        until(lambda: passed)
        assert time.monotonic() - begin < 30  # and not its deadline
        assert on.failed() == list(range(SEATS))
        with pytest.raises(kvd.Error):
            on.post(0, 0, rank.parts)
        on.close()
        rank.client.close()


def test_daemon_that_hangs(gpu):  # noqa: F811
    """What it does when it goes on is not seen as a result."""
    with killed(ATTENDS) as daemon:
        rank = Rank(daemon)
        held, on, passed = posted(gpu, rank, 0.5)
        os.kill(daemon.proc.pid, signal.SIGSTOP)
        held.go()
        until(lambda: passed)
        why = rank.attend.error(0)
        assert why.code == "ENOREPLY" and why.retryable and rank.attend.read(0).retryable
        with pytest.raises(kvd.BusyError):
            on.post(0, 0, rank.parts)
        os.kill(daemon.proc.pid, signal.SIGCONT)

        def ended(parts):
            """Whether the seat is free again: the request is sent, or refused for another reason."""
            assert rank.attend.state(0) == kvd.FAILED
            try:
                on.post(0, 0, parts)
            except kvd.BusyError:
                return False
            except kvd.Error as why:
                assert "rows" in str(why)
            return True
        # a refused request does not take the place of the lost one
        until(lambda: ended([kvd.Part(rank.hold, rows=(0, 1 << 20))]))
        assert rank.attend.state(0) == kvd.FAILED and ended(rank.parts)
        until(lambda: rank.attend.state(0) == kvd.SUCCESS)
        assert on.failed() == list(range(SEATS)) and on.failed() == []  # also seat 0's first
        on.close()
        rank.client.close()


@pytest.mark.parametrize("name", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])
def test_driver_that_registers_nothing(gpu, rank, name):  # noqa: F811
    begin = gpu.lib.fake_cuda_live()
    gpu.lib.fake_cuda_fail(name.encode(), 1, ERROR)
    with pytest.raises(kvd.Error, match=name):
        rank.attend.on_stream(fake_gpu.Stream(gpu))
    assert gpu.lib.fake_cuda_live() == begin + 1  # the stream


def test_driver_that_stores_no_word(gpu, rank):  # noqa: F811
    stream = fake_gpu.Stream(gpu)
    on = rank.attend.on_stream(stream)
    gpu.lib.fake_cuda_fail(b"cuStreamWriteValue64_v2", 1, ERROR)
    with pytest.raises(kvd.Error, match="cuStreamWriteValue64_v2"):
        on.post(0, 0, rank.parts, deadline=60)
    until(lambda: rank.attend.state(0) == kvd.FAILED)  # canceled
    on.post(0, 0, rank.parts)
    until(lambda: rank.attend.state(0) == kvd.SUCCESS)
    gpu.lib.fake_cuda_fail(b"cuStreamWaitValue64_v2", 1, ERROR)
    with pytest.raises(kvd.Error, match="cuStreamWaitValue64_v2"):
        on.join(0)
    on.join(0)
    on.close()


def test_closing_ends_what_a_stream_waits_for(gpu, daemon):  # noqa: F811
    rank, passed = Rank(daemon), []
    held = Held(gpu)
    on = rank.attend.on_stream(held.stream)
    on.post(0, 0, rank.parts, deadline=60)
    on.join(0)
    held.stream.do(lambda: passed.append(1))
    os.kill(daemon.proc.pid, signal.SIGSTOP)
    try:
        rank.client.close()
        held.go()
        until(lambda: passed)
    finally:
        os.kill(daemon.proc.pid, signal.SIGCONT)
    on.close()
