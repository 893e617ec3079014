# SPDX-License-Identifier: Apache-2.0
"""What travels beside the cache: the row of SGLang's MetadataBuffers, as one record.

SGLang's tensors are pageable, and a row is its again as soon as it gives up a request. A
record has a slot of its own, in memory that the daemon maps, until its room has ended."""
import ctypes
import struct
from collections import deque

import numpy as np

from ..memory import Memory

HEAD = struct.Struct("<4sHHQq")  # magic, version, tensors, room, first token
MAGIC, VERSION = b"KVDA", 1
LINE = 64


class Rows:
    """Tensors of SGLang's: item_lens[i] bytes a row."""

    def __init__(self, ptrs, lens, item_lens, room_tensor):
        """room_tensor: index of the one whose word tells decode that the row is whole."""
        self.count = min(n // item for n, item in zip(lens, item_lens)) if ptrs else 0
        self._views = []
        for ptr, nbytes, item in zip(ptrs, lens, item_lens):
            raw = (ctypes.c_uint8 * nbytes).from_address(ptr)
            self._views.append(np.frombuffer(raw, np.uint8).reshape(-1, item))
        self.room_tensor = room_tensor % len(ptrs) if ptrs else 0
        self.record_bytes = -(-(LINE + sum(item_lens)) // LINE) * LINE

    def write(self, row, room, record):
        """A row into a record. The first tensor begins with the first token."""
        first = int(self._views[0][row, :4].view(np.int32)[0])
        record[:HEAD.size] = np.frombuffer(
            HEAD.pack(MAGIC, VERSION, len(self._views), room, first), np.uint8)
        at = LINE
        for view in self._views:
            item = view.shape[1]
            record[at:at + item] = view[row]
            at += item

    def read(self, row, room, record):
        """A record into a row, the word of the room last. What is wrong with it, or None."""
        magic, version, tensors, told, first = HEAD.unpack(record[:HEAD.size].tobytes())
        if magic != MAGIC or version != VERSION or tensors != len(self._views):
            return "the metadata that came is no record of this version (%r, %d, %d tensors)" \
                % (magic, version, tensors)
        if told != room:
            return "the metadata that came is of room %d" % told
        at = LINE
        last = None
        for i, view in enumerate(self._views):
            item = view.shape[1]
            if i == self.room_tensor:
                last = (view, at, item)
            else:
                view[row] = record[at:at + item]
            at += item
        view, at, item = last
        if first != int(self._views[0][row, :4].view(np.int32)[0]):
            return "the metadata that came contradicts itself"
        view[row] = record[at:at + item]
        return None


class Slots:
    """Records in one piece of memory, handed out by number."""

    def __init__(self, count, record_bytes):
        self.count, self.record_bytes = count, record_bytes
        self.memory = Memory(count * record_bytes, "kvd-sglang-aux")
        self._records = self.memory.array((count, record_bytes))
        self._free = deque(range(count))

    def take(self):
        """A number, or None."""
        return self._free.popleft() if self._free else None

    def give(self, slot):
        self._free.append(slot)

    def record(self, slot):
        return self._records[slot]
