# SPDX-License-Identifier: Apache-2.0
"""Memory of engines: its kind, and how the daemon accesses it.

memfd   the daemon maps it, so one copy is enough: memory made here (Memory), or memory
        of the process that was adopted, that is, moved behind a memfd in place.
vm      any other memory of this process; the daemon reads and writes it through the
        kernel, at the cost of one more copy.
cuda    of a GPU, by the driver's handle (kvd/cuda.py); the GPU copies it.

KVD_ADOPT=0 disables adopting. The choice and its reason are logged."""
import logging
import os
import sys

import numpy as np

from . import _check, _kvd
from .errors import Error

log = logging.getLogger("kvd.memory")
ADOPT_BYTES_MIN = 32 << 20

Region = _kvd.Region


class Memory:
    """nbytes of memory behind a memfd, in huge pages if the kernel has some. It has numpy's
    array interface: numpy.asarray(memory)."""

    _parts = None

    def __init__(self, nbytes, name="kvd-python"):
        nbytes = _check.integer("nbytes", nbytes, 1, (1 << 62) - 1)
        self._parts = _kvd.memory_alloc(nbytes, _check.instance("name", name, str, "a str"))
        self.fd, self.address, _, self.huge_bytes = self._parts  # mapped: whole huge pages
        self.nbytes = nbytes
        self.__array_interface__ = {"version": 3, "shape": (self.nbytes,), "typestr": "|u1",
                                    "data": (self.address, False)}

    def array(self, shape=None, dtype=np.uint8):
        """A numpy array over the memory, which it keeps alive."""
        flat = np.asarray(self)
        if shape is None:
            return flat.view(dtype)
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return flat[:count].view(dtype).reshape(shape)

    def pages(self, count):
        """The bytes of `count` equal pages, as an array of one row per page."""
        count = _check.integer("count", count, 1, self.nbytes)
        if self.nbytes % count:
            raise ValueError("count: %d bytes cannot be split into %d equal pages"
                             % (self.nbytes, count))
        return self.array().reshape(count, -1)

    def __del__(self):
        if self._parts:
            _kvd.memory_free(*self._parts)


def _cuda_array(view):
    """(address, bytes) from __cuda_array_interface__."""
    address, read_only = view["data"]
    item, strides, wanted = int(view["typestr"][2:]), view.get("strides"), []
    for length in reversed(view["shape"]):
        wanted.insert(0, item)
        item *= length
    if strides is not None and tuple(strides) != tuple(wanted):
        raise ValueError("memory: the array is not contiguous")
    if read_only:
        raise ValueError("memory: the array is read-only")
    return address, item


def _refused(thing, why):
    return ValueError("memory: %s is %s" % (type(thing).__name__, why))


def memory_of(thing):
    """(address, bytes, whether GPU memory) of a numpy array, a torch tensor, a Memory, or an
    object with the array interface, CUDA's, or the buffer protocol. Only contiguous, writable
    memory: a copy would be freed while the daemon uses it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        if not thing.is_contiguous():
            raise _refused(thing, "not contiguous")
        address, nbytes = thing.data_ptr(), thing.numel() * thing.element_size()
        gpu = thing.device.type != "cpu"
    elif getattr(thing, "__cuda_array_interface__", None) is not None:
        address, nbytes = _cuda_array(thing.__cuda_array_interface__)
        gpu = True
    else:
        address, nbytes, gpu = _host_array(thing) + (False,)
    if not nbytes:
        raise _refused(thing, "0 bytes long")
    return address, nbytes, gpu


def _host_array(thing):
    wanted = "an array, a tensor, a kvd.Memory or writable memory with the buffer protocol"
    view = thing
    if not isinstance(thing, np.ndarray):
        if isinstance(thing, np.generic):
            raise _check.wrong("memory", thing, wanted)
        if not hasattr(thing, "__array_interface__"):
            try:
                view = memoryview(thing)
            except TypeError:
                raise _check.wrong("memory", thing, wanted) from None
            if view.readonly:
                raise _refused(thing, "read-only")
        view = np.asarray(view)
    if not view.flags.c_contiguous and not view.flags.f_contiguous:
        raise _refused(thing, "not contiguous")
    if not view.flags.writeable:
        raise _refused(thing, "read-only")
    if view.dtype.hasobject:
        raise _refused(thing, "of Python objects")
    return view.__array_interface__["data"][0], view.nbytes


def adopt_wanted():
    """Whether KVD_ADOPT permits adopting."""
    return os.environ.get("KVD_ADOPT", "1") not in ("0", "no", "off")


def adopt(address, nbytes):
    """Move the memory behind a memfd if that is safe. -> None if it is, else the reason."""
    if not adopt_wanted():
        return "KVD_ADOPT=0"
    chunk = (address, nbytes)
    why = None
    for _ in range(2):
        try:
            got = _kvd.adopt(*chunk)
            log.debug("adopted %d bytes at %#x (%s)", chunk[1], chunk[0],
                      "moved" if got["moved"] else "already a memfd")
            return None
        except Error as error:
            why = why or error.message
        # a part of an array, or an aligned start: search for malloc's own pointer
        found = _kvd.chunk_of(address, nbytes) if nbytes >= 4096 else None
        if not found or found == chunk or found[1] < ADOPT_BYTES_MIN:
            break
        chunk = found
    return why
