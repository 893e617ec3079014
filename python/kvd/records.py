# SPDX-License-Identifier: Apache-2.0
"""Metadata sent with the cache, as one record: a head with the first token, in the view `aux`,
and the engine's additions, in the view `meta`. An engine without additions has no `meta`.

A record has its own slot, in memory that the daemon maps, until its room has ended."""
import struct
from collections import deque

import numpy as np

from .memory import Memory

HEAD = struct.Struct("<4sHHQq")  # magic, version, parts, room, first token
MAGIC, VERSION = b"KVDA", 2
LINE = 64  # of the head
AUX, META = "aux", "meta"


def head_write(record, room, parts, first):
    record[:HEAD.size] = np.frombuffer(HEAD.pack(MAGIC, VERSION, parts, room, first), np.uint8)


def head_read(record, room):
    """(parts, first token, None), or the error in the last place."""
    magic, version, parts, told, first = HEAD.unpack(record[:HEAD.size].tobytes())
    if magic != MAGIC or version != VERSION:
        return 0, 0, "the received metadata is not a record of this version (%r, %d)" % (magic,
                                                                                    version)
    if told != room:
        return 0, 0, "the received metadata belongs to room %d" % told
    return parts, first, None


def views_add(layout, buffer, count, nbytes):
    """The views of `count` records of `nbytes`."""
    for name, at, size in ((AUX, 0, LINE), (META, LINE, nbytes - LINE)):
        if size:
            layout.view(name, 1, count)
            layout.field(name, 0, "record", buffer=buffer, offset=at, page_stride=nbytes,
                         token_stride=nbytes, unit_stride=size, unit_bytes=size)


class Slots:
    """Records in one block of memory, allocated by number."""

    def __init__(self, count, record_bytes):
        self.count, self.record_bytes = count, record_bytes
        self.memory = Memory(count * record_bytes, "kvd-aux")
        self._records = self.memory.array((count, record_bytes))
        self._free = deque(range(count))

    def take(self):
        """A number, or None."""
        return self._free.popleft() if self._free else None

    def give(self, slot):
        self._free.append(slot)

    @property
    def free(self):
        return len(self._free)

    def record(self, slot):
        return self._records[slot]
