#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Rooms between GPU caches on real daemons, over the fake driver: every transport
that needs no RDMA, and what becomes of memory whose engine dies."""
import base64
import ctypes
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, Skip, run  # noqa: E402
from kvd_engine import BYTES, Cache, Engine, SUCCESS, open_pull, open_push  # noqa: E402
import fake_gpu  # noqa: E402

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77


def config(transport):
    return "[transport]\ntransports = %s\n%s" % (transport, fake_gpu.CONFIG)


def move(transport, kinds, taken=None):
    with Daemon(config(transport)) as a, Daemon(config(transport)) as b:
        prefill, decode = Engine(a, "prefill"), Engine(b, "decode")
        src, dst = Cache(prefill, kinds[0]), Cache(decode, kinds[1])
        src.fill(SRC, TOKENS)
        open_push(prefill, decode, src, dst, 1, SRC, DST, TOKENS)
        decode.until(1, "recv", SUCCESS)
        prefill.until(1, "send", SUCCESS)
        dst.check(DST, TOKENS)
        dst.mem[:BYTES] = bytes(BYTES)
        open_pull(prefill, decode, src, dst, 2, SRC, DST, TOKENS)
        decode.until(2, "pull", SUCCESS)
        prefill.until(2, "offer", SUCCESS)
        dst.check(DST, TOKENS)
        shown = decode.cmd("room.show", room="1")
        assert shown["peers"][0]["transport"] == (taken or transport), shown
        prefill.close()
        decode.close()


def shm_ipc_to_ipc():
    move("shm", ("cuda_ipc", "cuda_ipc"))


def shm_vmm_to_memfd():
    move("shm", ("cuda_vmm", "memfd"))


def tcp_ipc_to_vmm():
    move("tcp", ("cuda_ipc", "cuda_vmm"))


def tcp_vm_to_ipc():
    move("tcp", ("vm", "cuda_ipc"))


def ucx_vmm_to_ipc():
    move("ucx", ("cuda_vmm", "cuda_ipc"))


def local_ipc_to_ipc():
    move("local", ("cuda_ipc", "cuda_ipc"))


def local_vmm_to_ipc():
    move("local", ("cuda_vmm", "cuda_ipc"))


def local_memfd_to_vmm():
    move("local", ("memfd", "cuda_vmm"))


def auto_takes_local():
    move("auto", ("cuda_ipc", "memfd"), "local")


def mapped(daemon):
    with open("/proc/%d/maps" % daemon.proc.pid) as maps:
        return "fakecuda" in maps.read()


def until(condition, what, limit_s):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < limit_s, what
    return time.monotonic() - begin


def engine_main(path):
    """A process of its own, to be killed: a cache, and a room that waits."""
    class Where:
        socket_path = path
    engine = Engine(Where, "victim")
    cache = Cache(engine, "cuda_ipc")
    engine.cmd("room.open", room="1", role="send", pool=cache.pool)
    print("ready", flush=True)
    sys.stdin.read()


def killed_engine_is_unmapped_in_time():
    fake_gpu.Gpu()  # skips where there is none for Python
    with Daemon(config("shm")) as daemon:
        victim = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--engine",
                                   daemon.socket_path], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        assert victim.stdout.readline() == "ready\n"
        assert mapped(daemon)
        victim.kill()
        victim.wait()
        until(lambda: not mapped(daemon), "the memory stays mapped", 2)
        other = Engine(daemon, "other")
        until(lambda: not other.cmd("region.list")["regions"], "the region stays", 2)
        other.close()


def exporter_gone_is_reported():
    fake_gpu.Gpu()
    with Daemon(config("shm")) as daemon:
        engine = Engine(daemon, "engine")
        code = "import sys; sys.path.insert(0, %r); import fake_gpu; " \
               "print(fake_gpu.Gpu().ipc(4096)[1]['handle'])" % os.path.dirname(
                   fake_gpu.__file__)
        handle = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                check=True).stdout.strip()
        words = engine.refused("EIMPORT", "region.register", kind="cuda_ipc", length=4096,
                               handle=handle, device=fake_gpu.Gpu().uuid)
        assert "--pid=host" in words, words
        engine.close()


def kernels_words():
    text = subprocess.run([BUILD + "/kvd", "--version"], capture_output=True, text=True,
                          check=True).stdout
    return "yes" if "GPU kernels: sm_" in text else "no: this kvd was built without nvcc"


def other_pid_namespace_is_reported():
    fake_gpu.Gpu()
    if subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode:
        raise Skip("a PID namespace of its own (root)")
    code = "import sys; sys.path.insert(0, %r); import fake_gpu; " \
           "print(fake_gpu.Gpu().ipc(4096)[1]['handle'], flush=True); sys.stdin.read()" \
           % os.path.dirname(fake_gpu.__file__)
    with Daemon(config("shm")) as daemon:
        engine = Engine(daemon, "engine")
        other = subprocess.Popen(["unshare", "-pf", sys.executable, "-c", code], text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        handle = other.stdout.readline().strip()
        words = engine.refused("EIMPORT", "region.register", kind="cuda_ipc", length=4096,
                               handle=handle, device=fake_gpu.Gpu().uuid)
        assert "in another PID or IPC namespace (--pid=host --ipc=host)" in words, words
        other.communicate("")
        engine.close()


def mig_is_reported():
    gpu = fake_gpu.Gpu()
    with Daemon(config("shm"), env=dict(FAKE_CUDA_MIG="1")) as daemon:
        engine = Engine(daemon, "engine")
        args = gpu.ipc(4096)[1]
        words = engine.refused("EIMPORT", "region.register", length=4096, **args)
        assert "not available here (MIG" in words and "cuda_vmm" in words, words
        args["device"] = "MIG-" + gpu.uuid[4:]
        words = engine.refused("EIMPORT", "region.register", length=4096, **args)
        assert "use the whole GPU" in words, words
        engine.close()


def other_device_order_is_reported():
    """The engine hands the name of the device that it takes its own for."""
    gpu, other = fake_gpu.Gpu(0), fake_gpu.Gpu(1)
    with Daemon(config("shm"), env=dict(CUDA_VISIBLE_DEVICES="1,0")) as daemon:
        engine = Engine(daemon, "engine")
        fake_gpu.Gpu(0)  # its context is the current one
        args = gpu.ipc(4096)[1]
        words = engine.refused("EIMPORT", "region.register", length=4096,
                               **dict(args, device=other.uuid))
        assert gpu.uuid in words and "CUDA_VISIBLE_DEVICES" in words, words
        engine.cmd("region.register", length=4096, **args)
        engine.close()
    with Daemon(config("shm"), env=dict(CUDA_VISIBLE_DEVICES="1")) as daemon:
        engine = Engine(daemon, "engine")
        words = engine.refused("EIMPORT", "region.register", length=4096, **args)
        assert "CUDA_VISIBLE_DEVICES of kvd must not hide it" in words, words
        engine.close()


def memory_of_vmm_has_no_legacy_handle():
    """What an engine with expandable segments has in its place is junk, or of a driver
    that gives a handle and does not open it; either way it is told of cuda_vmm."""
    gpu = fake_gpu.Gpu()
    address = gpu.vmm(4096)[0]
    handle = (ctypes.c_ubyte * 64)()
    assert gpu.lib.cuIpcGetMemHandle(handle, ctypes.c_uint64(address)) != 0
    with Daemon(config("shm")) as daemon:
        engine = Engine(daemon, "engine")
        words = engine.refused("EIMPORT", "region.register", kind="cuda_ipc", length=4096,
                               handle=base64.b64encode(bytes(handle)).decode(),
                               device=gpu.uuid)
        assert "expandable_segments" in words and "cuda_vmm" in words, words
        engine.close()


def devices_lists_gpus_and_features():
    gpu = fake_gpu.Gpu()
    with Daemon(config("shm") + "gpus = %s\n" % gpu.uuid) as daemon:
        engine = Engine(daemon, "engine")
        told = engine.cmd("devices")
        assert [(g["allowed"], g["used"]) for g in told["gpus"]] == \
            [(True, False), (False, False)], told
        assert told["gpu_features"] == dict(
            vmm="yes", batch="yes", copy3d="yes", peer="yes", dmabuf="yes",
            kernels=kernels_words()), told
        Cache(engine, "cuda_ipc")
        assert [g["used"] for g in engine.cmd("devices")["gpus"]] == [True, False]
        engine.close()
        text = subprocess.run([BUILD + "/kvd-ctl", "--socket", daemon.socket_path, "devices"],
                              capture_output=True, text=True, check=True).stdout
        assert gpu.uuid in text and "feature vmm: yes" in text, text
    old = "cuda_library = %s\n" % fake_gpu.LIBRARY.replace("fakegpu", "fakegpu/old")
    with Daemon("[transport]\ntransports = shm\n" + old) as daemon:
        engine = Engine(daemon, "engine")
        told = engine.cmd("devices")["gpu_features"]
        assert told["batch"] == "no: cuMemcpyBatchAsync_v2 is missing", told
        engine.close()


def ask(engine, cmd, **args):
    """Without waiting for the answer."""
    engine.sock.sendall(json.dumps(dict(args, cmd=cmd, id=99)).encode() + b"\n")


def slow_context_creation_blocks_no_other_engine():
    """Not even with a look at the devices meanwhile."""
    args = fake_gpu.Gpu().ipc(4096)[1]
    slow = dict(FAKE_CUDA_SLOW="cuDevicePrimaryCtxRetain:6000")
    with Daemon(config("shm") + "gpu_kernels = off\n", env=slow) as daemon:
        first, second, third = (Engine(daemon, n) for n in ("first", "second", "third"))
        second.cmd("devices")  # the driver is started
        begin = time.monotonic()
        ask(first, "region.register", length=4096, **args)
        while time.monotonic() - begin < 1:
            third.cmd("ping")
        ask(second, "devices")
        while time.monotonic() - begin < 2:
            third.cmd("ping")
        took = time.monotonic() - begin
        assert took < 5, took
        for engine in (first, second):
            answer = json.loads(engine.lines.readline())
            assert answer["id"] == 99 and "error" not in answer, answer
        assert time.monotonic() - begin > 5.5, "the context was there at once"
        for engine in (first, second, third):
            engine.close()


def missing_driver_is_reported():
    with Daemon("[transport]\ntransports = shm\ncuda_library = libno-such.so.1\n") as daemon:
        engine = Engine(daemon, "engine")
        words = engine.refused("EREQUIRE", "region.register", kind="cuda_ipc", length=4096,
                               handle="A" * 86 + "==", device="GPU-0")
        assert "libno-such.so.1" in words, words
        assert "libno-such.so.1" in engine.cmd("devices")["gpu_error"]
        engine.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine_main(sys.argv[2])
        sys.exit(0)
    run([local_ipc_to_ipc, local_vmm_to_ipc, local_memfd_to_vmm, auto_takes_local,
         shm_ipc_to_ipc, shm_vmm_to_memfd, tcp_ipc_to_vmm, tcp_vm_to_ipc, ucx_vmm_to_ipc,
         killed_engine_is_unmapped_in_time, exporter_gone_is_reported,
         other_pid_namespace_is_reported, mig_is_reported, other_device_order_is_reported,
         memory_of_vmm_has_no_legacy_handle, devices_lists_gpus_and_features,
         slow_context_creation_blocks_no_other_engine, missing_driver_is_reported])
