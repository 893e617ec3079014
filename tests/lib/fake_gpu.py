# SPDX-License-Identifier: Apache-2.0
"""Memory on the fake driver's GPUs, as an engine in this process has it."""
import base64
import ctypes
import mmap
import os

from kvd_daemon import BUILD, Skip

LIBRARY = os.path.join(BUILD, "fakegpu", "libcuda.so.1")
IMAGE = b"kvd fake kernels\n"  # in a file of gpu_kernels: it has every kernel
NOT_READY = 600
CONFIG = "cuda_library = %s\n" % LIBRARY


class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int),
                ("device", ctypes.c_int), ("win32", ctypes.c_void_p),
                ("flags", ctypes.c_uint64)]


class Access(ctypes.Structure):
    _fields_ = [("where", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class Stream:
    """What a GPU does in order, later than it is told. As torch's, by cuda_stream."""

    def __init__(self, gpu):
        self.gpu, self.handle, self._calls = gpu, ctypes.c_void_p(), []
        gpu.call("cuStreamCreateWithPriority", ctypes.byref(self.handle), 1, 0)
        self.cuda_stream = self.handle.value

    def do(self, function):
        """function() when its turn comes."""
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
        self._calls.append(call)
        self.gpu.call("cuLaunchHostFunc", self.handle, call, None)

    def record(self):
        event = Event(self.gpu)
        self.gpu.call("cuEventRecord", event.handle, self.handle)
        return event


class Event:
    """As torch's, by cuda_event and query()."""

    def __init__(self, gpu):
        self.gpu, self.handle = gpu, ctypes.c_void_p()
        gpu.call("cuEventCreate", ctypes.byref(self.handle), 2)
        self.cuda_event = self.handle.value

    def query(self):
        result = self.gpu.lib.cuEventQuery(self.handle)
        assert result in (0, NOT_READY), result
        return result == 0


class Gpu:
    """One device of the driver, with its context current in this thread."""

    def __init__(self, device=0):
        if os.path.basename(BUILD) != "rel":
            raise Skip("a fake driver that Python can load: a build without sanitizer")
        self.lib, self.device = ctypes.CDLL(LIBRARY), device
        ctx, uuid = ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), device)
        self.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))  # of the one before
        self.call("cuCtxPushCurrent_v2", ctx)
        self.call("cuDeviceGetUuid_v2", uuid, device)
        text = bytes(uuid).hex()
        self.uuid = "GPU-" + "-".join([text[:8], text[8:12], text[12:16], text[16:20],
                                       text[20:]])

    def call(self, name, *args):
        result = getattr(self.lib, name)(*args)
        assert result == 0, "%s: %d" % (name, result)

    def view(self, address, length):
        """The file behind device memory, mapped: what the GPU sees."""
        fd, offset = ctypes.c_int(), ctypes.c_uint64()
        self.call("fake_cuda_file", address, ctypes.byref(fd), ctypes.byref(offset))
        return mmap.mmap(fd.value, length)

    def ipc(self, length):
        """(address, arguments of region.register, view)"""
        address, handle = ctypes.c_uint64(), (ctypes.c_ubyte * 64)()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        self.call("cuIpcGetMemHandle", handle, address)
        args = dict(kind="cuda_ipc", handle=base64.b64encode(bytes(handle)).decode(),
                    device=self.uuid)
        return address.value, args, self.view(address, length)

    def vmm(self, length):
        unit = 2 << 20
        size = ctypes.c_size_t((length + unit - 1) // unit * unit)
        handle, address, fd = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
        prop = Prop(type=1, handles=1, where=1, device=self.device)
        access = Access(where=1, device=self.device, flags=3)
        zero = ctypes.c_uint64(0)
        self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(prop), zero)
        self.call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0),
                  zero, zero)
        self.call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
        self.call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, zero)
        args = dict(kind="cuda_vmm", fd=0, device=self.uuid, allocation=size.value,
                    fds=[fd.value])
        return address.value, args, self.view(address, size.value)
