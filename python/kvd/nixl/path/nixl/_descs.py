# SPDX-License-Identifier: Apache-2.0
"""Descriptor lists. A list is a table of u64 (address, length, device) while it is only passed
on, and a Python list once it is changed row by row."""
import operator

import numpy as np

from kvd._kvd import table as _flat

from ._status import nixl_mem_t, nixlNotFoundError


def _type_check(mem):
    if not isinstance(mem, nixl_mem_t):
        raise TypeError("not a nixl_mem_t: %s" % type(mem).__name__)
    return mem


def _table(rows):
    """An (N, 3) array of u64 from numpy's types."""
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError("descs must be a Nx3 numpy array")
    check_u64(rows, "Nx3")
    return np.array(rows, order="C", copy=True, subok=False).view(np.uint64)


def check_u64(rows, shape):
    """NIXL's form of a table: 64-bit integers of this machine, consecutive rows."""
    if rows.dtype.kind not in "iu" or rows.dtype.itemsize != 8 or not rows.dtype.isnative:
        raise ValueError("descs must be a %s numpy array of uint64 or int64" % shape)
    if not rows.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")


def strided(table):
    """The rows of (address, bytes, device, stride, count) that prepXferDlist takes."""
    if table.ndim != 2 or table.shape[1] != 5:
        raise ValueError("strided descs must be a Nx5 numpy array")
    check_u64(table, "Nx5")
    return table


class _DescList:
    """Common parts of the three kinds. _width: of a row as a tuple."""

    __slots__ = ("_mem", "_array", "_rows", "__weakref__")
    __hash__ = None
    _width = 3

    def __init__(self, type, descs=0, *, init_size=None):
        self._mem = _type_check(type)
        if init_size is not None:
            descs = self._count(init_size)
        self._array, self._rows = None, None
        if isinstance(descs, np.ndarray):
            self._take_array(descs)
        elif isinstance(descs, list):
            if self._width == 3:
                flat = _flat(descs, 3)
                if flat is not None:
                    self._array = np.frombuffer(flat, np.uint64).reshape(-1, 3)
                    return
            for row in descs:
                if not isinstance(row, tuple):
                    raise TypeError("Each descriptor must be a tuple when provided as a list")
                if len(row) != self._width:
                    raise ValueError("Each descriptor tuple must have exactly %d elements"
                                     % self._width)
            self._rows = [self._row(row) for row in descs]
        else:
            self._rows = [self._blank()] * self._count(descs)

    @staticmethod
    def _count(n):
        """False is accepted as a number: NIXL once had a third argument in this place."""
        if not hasattr(n, "__index__"):
            raise TypeError("descs: needs an array, a list of tuples or a number")
        if n.__index__() < 0:
            raise ValueError("descs: a negative number of descriptors")
        return n.__index__()

    @staticmethod
    def _number(value, bits=64):
        n = value.__index__()
        if not 0 <= n < 1 << bits:
            raise RuntimeError("%d is outside %d bits" % (n, bits))
        return n

    def _row(self, row):
        """Elements of a tuple beyond the list's width are ignored, as in NIXL."""
        if not isinstance(row, tuple):
            raise TypeError("not a tuple: %s" % type(row).__name__)
        if len(row) < self._width:
            raise IndexError("needs a tuple of %d" % self._width)
        row = row[:self._width]
        try:
            return (self._number(row[0]), self._number(row[1]), self._number(row[2])) \
                + tuple(self._last(v) for v in row[3:])
        except AttributeError:
            raise RuntimeError("a descriptor of %r" % (row,)) from None

    def _blank(self):
        return (0, 0, 0)

    def _take_array(self, array):
        self._array = _table(array)

    def _list(self):
        """As rows that can be changed."""
        if self._rows is None:
            self._rows = [self._row(tuple(r) + self._blank()[3:])
                          for r in self._array.tolist()]
        self._array = None
        return self._rows

    def table(self):
        """As (N, 3) u64."""
        if self._array is None:
            flat = [r[:3] for r in self._rows]
            self._array = np.array(flat, np.uint64).reshape(-1, 3)
        return self._array

    def __len_(self):
        return len(self._rows) if self._rows is not None else len(self._array)

    def getType(self):
        return self._mem

    def descCount(self):
        return self.__len_()

    def isEmpty(self):
        return self.__len_() == 0

    def _index(self, i):
        i = operator.index(i)
        if i < 0:
            raise TypeError("a descriptor's number is not negative")
        if i >= self.__len_():
            raise IndexError("descriptor %d of %d" % (i, self.__len_()))
        return i

    def __getitem__(self, i):
        i = self._index(i)
        if self._rows is not None:
            return self._rows[i]
        return tuple(self._array[i].tolist()) + self._blank()[3:]

    def __setitem__(self, i, row):
        self._list()[self._index(i)] = self._row(row)

    def addDesc(self, row):
        self._list().append(self._row(row))

    append = addDesc

    def remDesc(self, i):
        del self._list()[self._index(i)]

    def clear(self):
        self._rows, self._array = [], None

    def index(self, row):
        try:
            return self._list().index(self._row(row))
        except ValueError:
            raise nixlNotFoundError("no such descriptor") from None

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        if self._mem is not other._mem:
            return False
        if self._width == 3:
            return np.array_equal(self.table(), other.table())
        return self._list() == other._list()

    def print(self):
        print("DescList of mem type %d" % int(self._mem))
        for i in range(self.__len_()):
            print(*self[i])

    def __getstate__(self):
        return int(self._mem), self._list()

    def __setstate__(self, state):
        self._mem, self._rows, self._array = nixl_mem_t(state[0]), list(state[1]), None


class nixlXferDList(_DescList):
    """(address, length, device)"""

    __slots__ = ()


class nixlRegDList(_DescList):
    """(address, length, device, bytes)"""

    __slots__ = ()
    _width = 4

    def _blank(self):
        return (0, 0, 0, b"")

    @staticmethod
    def _last(meta):
        if isinstance(meta, str):
            return meta.encode()
        if isinstance(meta, (bytes, bytearray)):
            return bytes(meta)
        raise RuntimeError("metadata of a descriptor: str or bytes")

    def trim(self):
        """Without the metadata."""
        return nixlXferDList(self._mem, self.table())


class nixlRemoteDList(_DescList):
    """(address, length, device, agent name)"""

    __slots__ = ()
    _width = 4

    def _blank(self):
        return (0, 0, 0, "")

    @staticmethod
    def _last(name):
        if isinstance(name, (bytes, bytearray)):
            return bytes(name).decode()
        if isinstance(name, str):
            return name
        raise RuntimeError("an agent's name: str or bytes")

    index = None

    def __getstate__(self):
        raise TypeError("nixlRemoteDList cannot be pickled")
