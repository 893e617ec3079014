# SPDX-License-Identifier: Apache-2.0
"""The row of SGLang's MetadataBuffers as a record (records.py): SGLang's tensors are pageable,
and a row is its again as soon as it gives up a request."""
import ctypes

import numpy as np

from ..records import LINE, head_read, head_write


class Rows:
    """Tensors of SGLang's: item_lens[i] bytes a row. The first begins with the first token, the
    third with its logprob."""

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
        """A row into a record."""
        head_write(record, room, len(self._views),
                   int(self._views[0][row, :4].view(np.int32)[0]))
        at = LINE
        for view in self._views:
            item = view.shape[1]
            record[at:at + item] = view[row]
            at += item

    def read(self, row, room, record):
        """A record into a row, the word of the room last. What is wrong with it, or None."""
        parts, first, wrong = head_read(record, room)
        if wrong:
            return wrong
        if parts == 0:
            self._first_token(row, room, first)
            return None
        if parts != len(self._views):
            return "the metadata that came has %d tensors, %d are expected" % (
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
            return "the metadata that came contradicts itself"
        view[row] = record[at:at + item]
        return None

    def _first_token(self, row, room, first):
        """Of an engine that tells no more: logprobs are not known, which is NaN."""
        for view in self._views:
            view[row] = 0
        self._views[0][row, :4].view(np.int32)[0] = first
        if len(self._views) > 2:
            self._views[2][row].view(np.float32)[:] = np.nan
        self._views[self.room_tensor][row].view(np.uint64)[0] = room
