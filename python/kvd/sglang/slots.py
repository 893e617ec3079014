# SPDX-License-Identifier: Apache-2.0
"""The row of SGLang's MetadataBuffers as a record (records.py): SGLang's tensors are pageable,
and SGLang reuses a row as soon as it drops a request."""
import ctypes

import numpy as np

from ..records import LINE, head_read, head_write


class Rows:
    """Tensors of SGLang with item_lens[i] bytes per row. The first starts with the first token, the
    third with its logprob."""

    def __init__(self, ptrs, lens, item_lens, room_tensor):
        """room_tensor: index of the tensor whose value tells decode that the row is complete."""
        self.count = min(n // item for n, item in zip(lens, item_lens)) if ptrs else 0
        self._views = []
        for ptr, nbytes, item in zip(ptrs, lens, item_lens):
            raw = (ctypes.c_uint8 * nbytes).from_address(ptr)
            self._views.append(np.frombuffer(raw, np.uint8).reshape(-1, item))
        self.room_tensor = room_tensor % len(ptrs) if ptrs else 0
        self.record_bytes = -(-(LINE + sum(item_lens)) // LINE) * LINE

    def write(self, row, room, record):
        """Copy a row into a record."""
        head_write(record, room, len(self._views),
                   int(self._views[0][row, :4].view(np.int32)[0]))
        at = LINE
        for view in self._views:
            item = view.shape[1]
            record[at:at + item] = view[row]
            at += item

    def read(self, row, room, record):
        """Copy a record into a row, the room's value last. -> an error, or None"""
        parts, first, wrong = head_read(record, room)
        if wrong:
            return wrong
        if parts == 0:
            self._first_token(row, room, first)
            return None
        if parts != len(self._views):
            return "the received metadata has %d tensors instead of %d" % (
                parts, len(self._views))
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
            return "the received metadata is inconsistent"
        view[row] = record[at:at + item]
        return None

    def _first_token(self, row, room, first):
        """For an engine without these values: unknown logprobs are NaN."""
        for view in self._views:
            view[row] = 0
        self._views[0][row, :4].view(np.int32)[0] = first
        if len(self._views) > 2:
            self._views[2][row].view(np.float32)[:] = np.nan
        self._views[self.room_tensor][row].view(np.uint64)[0] = room
