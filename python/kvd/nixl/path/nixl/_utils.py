# SPDX-License-Identifier: Apache-2.0
"""Memory by address, as NIXL's own tests and examples use it."""
import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def malloc_passthru(n):
    return _libc.malloc(n) or 0


def free_passthru(p):
    _libc.free(p)


def ba_buf(p, n):
    """Fill n bytes with 0xba."""
    ctypes.memset(p, 0xba, n)


def verify_transfer(a, b, n):
    """Check that n bytes at a and at b are equal."""
    assert ctypes.string_at(a, n) == ctypes.string_at(b, n), "the transfer's bytes differ"
