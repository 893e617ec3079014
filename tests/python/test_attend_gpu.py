# SPDX-License-Identifier: Apache-2.0
"""Query rows for chunks that an engine has published in GPU memory: kernels of the fake driver
(tests/gpu), which run gpu/attend.cu itself, where the engine's pages are."""
import contextlib
import random
import tempfile
import threading
import time

import numpy as np
import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from kvd_space import space_of
from test_attend import ATTENDS, LAYERS, T, Engine, Model, close, ids_of, published
from test_gpu import Array, gpu  # noqa: F401 (gpu is a fixture)

import fake_gpu

SHAPES = {"mla": dict(kind="mla", heads=16, dqk=576, dv=512),
          "gqa64": dict(kind="gqa", heads=8, kv_heads=2, dqk=64, dv=64),
          "gqa128": dict(kind="gqa", heads=4, kv_heads=1, dqk=128, dv=128)}


class OnDevice(Engine):
    """An engine whose cache is in memory of the device."""

    def __init__(self, gpu, client, model, **more):  # noqa: F811
        super().__init__(client, model, **more)
        lay = model.layout(model.tokens // T)
        self.array = Array(gpu, lay["buffers"][0], 4096)
        self.pool = client.pool(lay, [client.register(self.array)])
        self.space = space_of(client, self.pool, model="m", scheme="test", tokens=T)
        self.fill(self.array.memory.view(model.k_bits.dtype))

    def publish(self, ids):
        pages = {"kv": kvd.View(list(range(len(ids))), tokens=(0, len(ids) * T))}
        return self.space.publish(ids, pages).wait(timeout=30)


@contextlib.contextmanager
def two(**env):
    """A holder that attends, and a daemon that asks it; their clients."""
    with contextlib.ExitStack() as stack:
        image = stack.enter_context(tempfile.NamedTemporaryFile())
        image.write(fake_gpu.IMAGE)  # of a build without nvcc, too
        image.flush()
        text = ATTENDS + "%s[transport]\ntransports = shm\n" + fake_gpu.CONFIG
        holder = stack.enter_context(Daemon(
            text % "" + "gpu_kernels = %s\n" % image.name, env=env))
        far = stack.enter_context(kvd.Client(holder.socket_path))
        own = stack.enter_context(Daemon(text % ("chunk_peers = %s\n" % far.endpoint)))
        client = stack.enter_context(kvd.Client(own.socket_path))
        until(lambda: [p["state"] for p in client.command("peer.list")["peers"]] == ["up"])
        yield holder, far, client


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_in_memory_of_a_device(gpu, shape):  # noqa: F811
    """Here, from another daemon, and to some of the tokens."""
    model = Model(8 * T, **SHAPES[shape])
    ids = ids_of(8, b"vram")
    with two() as (_, far, client):
        there = OnDevice(gpu, far, model, rows=2 * model.heads)
        there.publish(ids)
        here = Engine(client, model, rows=2 * model.heads)
        for engine, remote in ((there, None), (here, 10)):
            with engine.space.hold(ids, remote=remote) as hold:
                assert (hold.chunks, hold.remote) == (8, 8 if remote else 0)
                for layer in range(LAYERS):
                    q = engine.ask(0, layer, [kvd.Part(hold)], deadline=30)
                    engine.attend.wait(0, timeout=60)
                    close(engine.got(0), model.attend(layer, q, np.arange(8 * T)))
                q = engine.ask(1, 1, [kvd.Part(hold, chunks=(2, 5), tokens=2 * T + 5)],
                               deadline=30)
                engine.attend.wait(1, timeout=60)
                close(engine.got(1), model.attend(1, q, np.arange(2 * T, 4 * T + 5)))


def test_few_rows_over_many_tokens_are_split_and_merged(gpu):  # noqa: F811
    """Behind each other, jobs with more rows and with more tokens: memory of both sizes."""
    model = Model(40 * T, **SHAPES["gqa64"])
    ids = ids_of(40, b"split")
    with two() as (_, far, _):
        there = OnDevice(gpu, far, model, rows=64)
        there.publish(ids)
        with there.space.hold(ids) as hold:
            for rows, chunks in ((8, 40), (64, 4), (8, 40)):
                part = kvd.Part(hold, rows=(0, rows), chunks=(0, chunks))
                q = there.ask(0, 1, [part], deadline=60)[:rows]
                there.attend.wait(0, timeout=60)
                got = tuple(a[:rows] for a in there.got(0))
                close(got, model.attend(1, q, np.arange(chunks * T)))


def test_shapes_without_a_kernel_are_refused(gpu):  # noqa: F811
    model = Model(4 * T, kind="gqa", heads=4, kv_heads=1, dqk=96, dv=96)
    ids = ids_of(4, b"96")
    with two() as (_, far, _):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        with there.space.hold(ids) as hold:
            there.ask(0, 0, [kvd.Part(hold)])
            with pytest.raises(kvd.Error, match="dqk, dv.*use fetch") as refused:
                there.attend.wait(0, timeout=30)
            assert refused.value.code == "EREQUIRE"


def asked(here, model, ids):
    """None, or the error of rows for these chunks."""
    with here.space.hold(ids, remote=10) as hold:
        assert hold.chunks == len(ids)
        q = here.ask(0, 0, [kvd.Part(hold)], deadline=30)
        try:
            here.attend.wait(0, timeout=30)
        except kvd.Error as error:
            return error
        close(here.got(0), model.attend(0, q, np.arange(len(ids) * T)))
        return None


CALLS = ["cuModuleLoadData:1", "cuModuleGetFunction:1", "cuModuleGetFunction:4",
         "cuStreamCreateWithPriority:1", "cuEventCreate:1", "cuMemHostAlloc:1",
         "cuMemAlloc_v2:1", "cuMemcpyAsync:1", "cuLaunchKernel:1", "cuMemcpyAsync:2",
         "cuEventRecord:1"]


@pytest.mark.parametrize("call", CALLS)
def test_fault_of_the_driver_fails_the_rows_alone(gpu, call):  # noqa: F811
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"fault")
    with two(FAKE_CUDA_FAIL=call) as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        error = asked(here, model, ids)
        assert error and error.code in ("EIO", "ENOMEM", "EREQUIRE"), error
        assert asked(here, model, ids) is None


def test_fault_of_the_device_ends_no_daemon(gpu):  # noqa: F811
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"broken")
    with two(FAKE_CUDA_FAIL="cuLaunchKernel:1:700") as (holder, far, client):
        holder.expected.append("the device has failed")
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        assert asked(here, model, ids).code == "EIO"
        assert asked(here, model, ids).code in ("EIO", "ENOTFOUND")
        other = Engine(far, model, rows=8)
        other.put(more := ids_of(8, b"host"))
        assert asked(here, model, more) is None


def test_pages_of_a_device_withdrawn_under_a_kernel(gpu):  # noqa: F811
    """Their engine writes them right behind the withdrawal."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids, told, ends = ids_of(8, b"gone"), [], threading.Event()
    with two() as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        right = there.array.memory.copy()

        def engine():
            while not ends.wait(random.uniform(0, 0.4)):
                there.space.withdraw(ids, grace=0).wait(timeout=30)
                there.array.memory[:] = 0x41
                there.array.memory[:] = right
                there.publish(ids)
        thread = threading.Thread(target=engine)
        thread.start()
        here = Engine(client, model, rows=64)
        try:
            end = time.monotonic() + 3
            while time.monotonic() < end or not {"ok", "ENOTFOUND"} <= set(told):
                assert time.monotonic() < end + 60, told[-20:]
                with here.space.hold(ids, remote=10) as hold:
                    if hold.chunks < 8:
                        continue
                    q = here.ask(0, 0, [kvd.Part(hold)], deadline=30)
                    try:
                        here.attend.wait(0, timeout=30)
                        close(here.got(0), model.attend(0, q, np.arange(8 * T)))
                        told.append("ok")
                    except kvd.Error as error:
                        told.append(error.code)
        finally:
            ends.set()
            thread.join()
        assert set(told) <= {"ok", "ENOTFOUND"}, set(told)
