# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs, in the form that the daemon takes: the driver's handle of the allocation.

The driver is the process's libcuda.so.1 (KVD_CUDA_LIBRARY names another); it is loaded when
GPU memory is registered, not before. The handle is of the whole allocation, of which a tensor
is mostly a part: cuMemGetAddressRange returns its start."""
import contextlib
import ctypes
import os
import threading

from .errors import MemoryImportError

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
