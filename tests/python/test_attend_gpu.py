# SPDX-License-Identifier: Apache-2.0
"""Query rows for chunks that an engine has published in GPU memory: kernels of the fake driver
(tests/gpu), which run gpu/attend.cu itself, where the engine's pages are."""
import contextlib
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from kvd_space import space_of
from test_attend import ATTENDS, LAYERS, T, Engine, Model, close, ids_of
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
        self.fill(self.array.memory)

    def publish(self, ids):
        pages = {"kv": kvd.View(list(range(len(ids))), tokens=(0, len(ids) * T))}
        return self.space.publish(ids, pages).wait(timeout=30)


@contextlib.contextmanager
def two(share="100", **env):
    """A holder that attends, and a daemon that asks it; their clients."""
    with contextlib.ExitStack() as stack:
        image = stack.enter_context(tempfile.NamedTemporaryFile())
        image.write(fake_gpu.IMAGE)  # of a build without nvcc, too
        image.flush()
        text = ATTENDS + "%s[transport]\ntransports = shm\n" + fake_gpu.CONFIG
        holder = stack.enter_context(Daemon(
            text % ("attention_gpu_share = %s\n" % share) + "gpu_kernels = %s\n" % image.name,
            env=env))
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


def test_fp8_with_scales_is_refused(gpu):  # noqa: F811
    model = Model(4 * T, kind="gqa", heads=4, kv_heads=1, dqk=64, dv=64, kv_type="fp8_e4m3",
                  format="fp8_e4m3", scaled=True)
    ids = ids_of(4, b"scales")
    with two() as (_, far, client):
        OnDevice(gpu, far, model).publish(ids)
        here = Engine(client, model)
        with here.space.hold(ids, remote=10) as hold:
            here.ask(0, 0, [kvd.Part(hold)])
            with pytest.raises(kvd.Error, match="kv_type.*bf16.*use fetch") as refused:
                here.attend.wait(0, timeout=30)
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


CALLS = ["cuStreamCreateWithPriority:1", "cuEventCreate:1", "cuMemHostAlloc:1",
         "cuMemAlloc_v2:1", "cuMemcpyAsync:1", "cuLaunchKernel:1", "cuMemcpyAsync:2",
         "cuEventRecord:1", "cuEventSynchronize:1"]


@pytest.mark.parametrize("call", CALLS)
def test_fault_of_the_driver_fails_the_rows_alone(gpu, call):  # noqa: F811
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"fault")
    with two(FAKE_CUDA_FAIL=call, FAKE_CUDA_SLOW="attend:5") as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        error = asked(here, model, ids)
        assert error and error.code in ("EIO", "ENOMEM"), error
        assert asked(here, model, ids) is None


@pytest.mark.parametrize("call", ["cuModuleLoadData:2", "cuModuleGetFunction:2",
                                  "cuModuleGetFunction:5"])
def test_kernels_that_cannot_be_loaded_are_refused_by_name(gpu, call):  # noqa: F811
    """Those of copies are: the first module, and the first function."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"load")
    with two(FAKE_CUDA_FAIL=call) as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        for _ in range(2):
            error = asked(here, model, ids)
            assert error and error.code == "EREQUIRE", error
            assert "cuModule" in str(error) and "fetch" in str(error), error


class Control:
    """struct fake_control: the so many-th call of the holder's driver from now on fails."""
    FORM = "<IiIi64s"

    def __init__(self, file):
        file.write(bytes(struct.calcsize(self.FORM)))
        file.flush()
        self.map = mmap.mmap(file.fileno(), 0)

    def plan(self, left):
        self.map[:] = struct.pack(self.FORM, left, 2, 0, 0, b"")

    def calls(self):
        return struct.unpack(self.FORM, self.map)[2]

    def struck(self):
        return struct.unpack(self.FORM, self.map)[4].rstrip(b"\0").decode()


def test_each_call_of_the_driver_fails_once(gpu, tmp_path):  # noqa: F811
    """Of those for rows, when all memory has been made: each fails the rows, or does not matter.
    "execute" is the device's own, and ends its context."""
    model = Model(40 * T, **SHAPES["gqa64"])  # split: it has a merge
    ids, failed, lefts = ids_of(40, b"sweep"), set(), iter(range(1, 100))
    with open(tmp_path / "control", "w+b") as file:
        control, call = Control(file), "execute"
        while call == "execute":
            with two(FAKE_CUDA_CONTROL=file.name) as (holder, far, client):
                holder.expected.append("the device has failed")
                there = OnDevice(gpu, far, model)
                there.publish(ids)
                here = Engine(client, model)
                assert asked(here, model, ids) is None
                for left in lefts:
                    control.plan(left)
                    error = asked(here, model, ids)
                    call = control.struck()
                    control.plan(0)
                    assert error is None or error.code in ("EIO", "ENOMEM"), (call, error)
                    failed |= {call} if error else set()
                    if call in ("", "execute"):
                        break
                    assert asked(here, model, ids) is None, call
    assert failed >= {"cuCtxPushCurrent_v2", "cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord",
                      "execute"}, failed


@pytest.mark.parametrize("at", ["execute:1", "execute:2", "execute:3"])
def test_fault_on_the_device_ends_no_daemon(gpu, at):  # noqa: F811
    """Of the copy there, of the kernel, of the copy back."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"execute")
    with two(FAKE_CUDA_FAIL=at) as (holder, far, client):
        holder.expected.append("the device has failed")
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        assert asked(here, model, ids).code == "EIO"
        assert asked(here, model, ids).code in ("EIO", "ENOTFOUND")
        other = Engine(far, model, rows=8)
        other.put(more := ids_of(8, b"other"))
        assert asked(here, model, more) is None


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


def figure(client, name):
    return next(float(m["value"]) for m in client.command("stats")["metrics"]
                if m["name"] == name)


def test_without_a_share_rows_are_refused(gpu):  # noqa: F811
    """Those for host memory are not."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"off")
    with two("off") as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        error = asked(here, model, ids)
        assert error.code == "EREQUIRE" and "attention_gpu_share" in str(error), error
        with here.space.hold(ids, remote=10) as hold:
            assert hold.holders()[0].gpu
        other = Engine(far, model)
        other.put(more := ids_of(8, b"here"))
        with here.space.hold(more, remote=10) as hold:
            assert not hold.holders()[0].gpu
        assert asked(here, model, more) is None


def test_share_of_a_device_is_kept(gpu):  # noqa: F811
    """Kernels of 5 ms each, one behind the other, in a fifth of the time; the first one is free."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"share")
    with two("20", FAKE_CUDA_SLOW="attend:5") as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        begin = time.monotonic()
        for _ in range(20):
            assert asked(here, model, ids) is None
        took = time.monotonic() - begin
        busy = figure(far, "attention_gpu_seconds_total")
        assert busy > 20 * 0.005
        assert busy * 19 / 20 < 0.2 * (took + 0.01), (busy, took)


def test_request_that_is_long_is_computed_in_parts(gpu):  # noqa: F811
    """By a slow kernel a token of the query at a time; what is withdrawn ends between two."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"parts")
    with two(FAKE_CUDA_SLOW="attend:50") as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model, rows=8 * model.heads)
        assert asked(here, model, ids) is None
        batches = figure(far, "attention_batches_total")
        assert batches == 8
        with here.space.hold(ids, remote=10) as hold:
            here.ask(0, 0, [kvd.Part(hold)], deadline=30)
            until(lambda: figure(far, "attention_batches_total") > batches)
            there.space.withdraw(ids, grace=0).wait(timeout=30)
            with pytest.raises(kvd.Error) as gone:
                here.attend.wait(0, timeout=30)
        assert gone.value.code == "ENOTFOUND"
        assert figure(far, "attention_batches_total") < batches + 8


def test_kernel_that_hangs_blocks_its_device_alone(gpu):  # noqa: F811
    """Its post ends by the deadline, rows for host memory are computed, and a withdrawal waits for
    it: until then the device may read the pages."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"hang")
    with two(FAKE_CUDA_SLOW="attend:3000") as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        other = Engine(far, model)
        other.put(more := ids_of(8, b"host"))
        with here.space.hold(ids, remote=10) as hold:
            begin = time.monotonic()
            here.ask(0, 0, [kvd.Part(hold)], deadline=0.5)
            with pytest.raises(kvd.Error) as late:
                here.attend.wait(0, timeout=30)
            assert late.value.code == "ETIMEOUT"
            assert asked(here, model, more) is None
            assert figure(far, "attention_gpu_seconds_total") == 0  # it runs
            there.space.withdraw(ids, grace=0).wait(timeout=30)
            assert time.monotonic() - begin > 2.5
            assert figure(far, "attention_gpu_seconds_total") > 2.5


def test_devices_have_queues_of_their_own(gpu):  # noqa: F811
    """Rows for one device do not wait for those that queue for another one."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids, others = ids_of(8, b"first"), ids_of(8, b"second")
    with two(FAKE_CUDA_SLOW="attend:400") as (_, far, client):
        engines = OnDevice(gpu, far, model), OnDevice(fake_gpu.Gpu(1), far, model)
        for engine, own in zip(engines, (ids, others)):
            engine.publish(own)
        here = Engine(client, model, seats=8)
        with here.space.hold(ids, remote=10) as hold, \
                here.space.hold(others, remote=10) as other:
            for seat in range(6):
                part = kvd.Part(hold, chunks=(seat, seat + 1), tokens=(seat + 1) * T)
                here.ask(seat, 0, [part], deadline=30)
            q = here.ask(7, 0, [kvd.Part(other)], deadline=30)
            here.attend.wait(7, timeout=30)
            assert here.attend.state(5) == kvd.TRANSFERRING
            close(here.got(7), model.attend(0, q, np.arange(8 * T)))
            for seat in range(6):
                here.attend.wait(seat, timeout=30)


@pytest.mark.parametrize("ms", [400, 1500])
def test_rows_wait_for_kernels_that_are_being_loaded(gpu, ms):  # noqa: F811
    """For a second; then they may be tried again. Two images are loaded, so long each."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"early")
    with two(FAKE_CUDA_SLOW="cuModuleLoadData:%d" % ms) as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        error = asked(here, model, ids)
        if ms == 400:
            assert error is None
        else:
            assert error.code == "EBUSY" and error.retryable and "loaded" in str(error), error
            until(lambda: asked(here, model, ids) is None)


def victim(socket):
    """A process that publishes chunks in memory of the device, says so, and stays."""
    with kvd.Client(socket) as client:
        there = OnDevice(fake_gpu.Gpu(), client, Model(8 * T, **SHAPES["gqa64"]))
        there.publish(ids_of(8, b"killed"))
        print("published", flush=True)
        sys.stdin.read()


def test_engine_is_killed_under_a_kernel(gpu, tmp_path):  # noqa: F811
    """The rows end, and the daemons continue."""
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"killed")
    file = open(tmp_path / "control", "w+b")
    control = Control(file)
    with file, two(FAKE_CUDA_SLOW="attend:1000", FAKE_CUDA_CONTROL=file.name) as (
            holder, far, client):
        command = [sys.executable, __file__, holder.socket_path]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path),
                   KVD_CUDA_LIBRARY=fake_gpu.LIBRARY)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=env) as engine:
            assert engine.stdout.readline() == b"published\n"
            here = Engine(client, model)
            with here.space.hold(ids, remote=10) as hold:
                assert hold.chunks == 8
                idle = control.calls()
                here.ask(0, 0, [kvd.Part(hold)], deadline=30)
                until(lambda: control.calls() > idle)
                engine.kill()
                with pytest.raises(kvd.Error) as gone:
                    here.attend.wait(0, timeout=30)
            assert gone.value.code in ("ENOTFOUND", "EIO", "EPEER"), gone.value
        until(lambda: not here.space.find(ids).chunks)
        there = OnDevice(gpu, far, model)  # the device is in use again
        there.publish(more := ids_of(8, b"next"))
        assert asked(here, model, more) is None


def test_prices_are_of_the_memory_that_has_the_kv(gpu):  # noqa: F811
    model = Model(8 * T, **SHAPES["gqa64"])
    ids = ids_of(8, b"price")
    shape = kvd.cost.Model.gqa(LAYERS, model.heads, model.kv_heads, 64, 64, out_bytes=4)
    with two(FAKE_CUDA_SLOW="attend:5") as (_, far, client):
        there = OnDevice(gpu, far, model)
        there.publish(ids)
        here = Engine(client, model)
        page = client.cost_page()
        peer = bytes.fromhex(far.info["instance"])

        def speeds():
            return {s["gpu"]: s for s in client.command("cost.show")["speeds"]
                    if s["instance"] == peer.hex() and s["dqk"] == 64}
        until(lambda: set(speeds()) == {False, True})
        assert speeds()[True]["fixed_us"]["value"] > 1000 > speeds()[False]["fixed_us"]["value"]
        with here.space.hold(ids, remote=10) as hold:
            holder, = hold.holders()
            assert holder == (peer, 0, 8, 8 * T, True)

            def price(gpu):
                return page.decide(shape, [kvd.cost.Holder(8 * T, 0, peer, gpu)], steps=1)
            assert price(True).round.us > price(False).round.us
        for _ in range(3):
            assert asked(here, model, ids) is None
        told, = client.command("cost.show")["peers"]
        assert told["gpu_wait_us"]["count"] == 3 and told["wait_us"] is None
        assert speeds()[True]["attend"]["count"] == 3 and speeds()[False]["attend"] is None


if __name__ == "__main__":
    victim(sys.argv[1])
