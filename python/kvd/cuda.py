# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs, in the form that the daemon takes: the driver's handle of the allocation.

The driver is the process's libcuda.so.1 (KVD_CUDA_LIBRARY names another); it is loaded when
GPU memory is registered, not before. The handle is of the whole allocation, of which a tensor
is mostly a part: cuMemGetAddressRange returns its start."""
import contextlib
import ctypes
import os
import threading

from .errors import Error, MemoryImportError

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_lock = threading.Lock()
_library = None


def _refused(words):
    return MemoryImportError(words, "EIMPORT", 25, "op", False)


class _Driver:
    def __init__(self, path):
        try:
            self._lib = ctypes.CDLL(path)
        except OSError as error:
            raise _refused("GPU memory: %s" % error) from None
        self("cuInit", 0)

    def code(self, name, *args):
        return getattr(self._lib, name)(*args)

    def word(self, code):
        text = ctypes.c_char_p()
        self._lib.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"error %d" % code).decode()

    def __call__(self, name, *args):
        code = self.code(name, *args)
        if code:
            raise _refused("GPU memory: %s: %s" % (name, self.word(code)))

    def uuid(self, device):
        raw = (ctypes.c_ubyte * 16)()
        self("cuDeviceGetUuid_v2", raw, device)
        text = bytes(raw).hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _driver():
    global _library
    with _lock:
        if _library is None:
            _library = _Driver(os.environ.get("KVD_CUDA_LIBRARY", "libcuda.so.1"))
        return _library


class Piece:
    """Part of a GPU allocation: the base of a region of kind cuda_ipc."""

    def __init__(self, device, handle, offset):
        self.device, self.handle, self.offset = device, handle, offset


@contextlib.contextmanager
def _context(driver, ordinal):
    """Make the device's context current: the thread may have none, and the driver returns the
    start of an allocation only to a thread that has."""
    context = ctypes.c_void_p()
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    try:
        driver("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        driver("cuDevicePrimaryCtxRelease_v2", ordinal)


def _handle(driver, base):
    out = (ctypes.c_ubyte * 64)()
    code = driver.code("cuIpcGetMemHandle", out, base)
    if code:
        raise _refused(
            "GPU memory at %#x: cuIpcGetMemHandle: %s (memory of cuMemCreate, PyTorch's "
            "expandable_segments, has no such handle: hand its fd to register_gpu_fd(); "
            "MIG devices share none)" % (base.value, driver.word(code)))
    return bytes(out)


def describe(address, nbytes):
    """A Piece; MemoryImportError if it is not GPU memory, or cannot be shared."""
    driver, ordinal = _driver(), ctypes.c_int()
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    pointer = ctypes.c_uint64(address)
    if driver.code("cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, pointer):
        raise _refused("%#x is not GPU memory" % address)
    with _context(driver, ordinal.value):
        driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        offset = address - base.value
        if nbytes > size.value - offset:
            raise _refused("GPU memory [%#x, +%d) exceeds its allocation [%#x, +%d)"
                           % (address, nbytes, base.value, size.value))
        return Piece(driver.uuid(ordinal.value), _handle(driver, base), offset)


_PORTABLE_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


def _stream(thing):
    """A driver's handle of a stream, of that or torch's object."""
    return ctypes.c_void_p(int(getattr(thing, "cuda_stream", thing)))


class Pinned:
    """Memory of this process that the driver has registered, and words in it that streams store
    and wait for. The context of the stream must be current in the thread of each call. name: in
    errors."""

    def __init__(self, memory, name):
        self._cuda, self._name, self._base = _driver(), name, ctypes.c_void_p(memory.address)
        self._memory, address = memory, ctypes.c_uint64()  # keeps the mapping
        self.call("cuMemHostRegister_v2", self._base, ctypes.c_size_t(memory.nbytes),
                  _PORTABLE_MAPPED)
        try:
            self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), self._base, 0)
        except Error:
            self.close()
            raise
        self.address = address.value  # of the memory, on the device

    def call(self, function, *args):
        code = self._cuda.code(function, *args)
        if code:
            raise Error("%s: %s: %s; the stream's context must be current in this thread"
                        % (self._name, function, self._cuda.word(code)), "EIO", 36)

    def store(self, stream, offset, value):
        """The stream stores a 64-bit word after its earlier work."""
        self.call("cuStreamWriteValue64_v2", stream, ctypes.c_uint64(self.address + offset),
                  ctypes.c_uint64(value), 0)

    def await_word(self, stream, offset, value):
        """The stream's later work waits until the word is at least `value`."""
        self.call("cuStreamWaitValue64_v2", stream, ctypes.c_uint64(self.address + offset),
                  ctypes.c_uint64(value), _UNTIL_AT_LEAST)

    def close(self):
        self._cuda.code("cuMemHostUnregister", self._base)
