# SPDX-License-Identifier: Apache-2.0
"""Progress of a CUDA stream, visible to the daemon.

The progress is a counter in a page that the daemon maps and the driver has registered; the
stream increases it. Each stream needs its own: values of two streams would overtake each other."""
import contextlib
import ctypes
import mmap
import threading

import numpy as np

from . import cuda
from .errors import BusyError, Error, StateError
from .memory import Memory

_NON_BLOCKING = 1
_open = set()  # a stream may write to the page until close()


class Timeline:
    """For `wait=` of rooms. stream: a CUstream as int, or a torch.cuda.Stream; None: a new
    one, for after(). Its context must be current in the thread of these calls, and the stream
    must not be capturing a graph. Close the timeline before the client."""

    def __init__(self, client, stream=None, *, timeout=None):
        self._lock, self._client, self._marks, self._undo = threading.Lock(), client, 0, None
        memory = Memory(mmap.PAGESIZE, "kvd-timeline")
        self._region = client.register(memory, name="timeline", timeout=timeout)
        try:
            self._begin(stream, memory)
        except Error:
            self._region.unregister()
            raise
        _open.add(self)

    def _begin(self, stream, memory):
        with contextlib.ExitStack() as undo:
            self._page = cuda.Pinned(memory, "timeline")
            undo.callback(self._page.close)
            if stream is None:
                self._stream = ctypes.c_void_p()
                self._page.call("cuStreamCreateWithPriority", ctypes.byref(self._stream),
                                _NON_BLOCKING, 0)
                undo.callback(cuda._driver().code, "cuStreamDestroy_v2", self._stream)
            else:
                self._stream = cuda._stream(stream)
            self._word = memory.array(dtype=np.uint64)
            self._page.store(self._stream, 0, 0)  # fails here if the device does not support it
            self._undo = undo.pop_all()

    def _mark(self):
        self._page.store(self._stream, 0, self._marks + 1)
        self._marks += 1
        return self._region, 0, self._marks

    def _usable(self):
        if self._undo is None:
            raise StateError("timeline: it is closed", "ESTATE", 11)

    def mark(self):
        """A point to wait for: the end of the work in the stream. One write by the GPU; never blocks.
        -> (region, offset, value)"""
        with self._lock:
            self._usable()
            return self._mark()

    def after(self, event):
        """The same for a recorded event: the timeline's stream waits for it. event: a CUevent as
        int, or a torch.cuda.Event."""
        with self._lock:
            self._usable()
            self._page.call("cuStreamWaitEvent", self._stream,
                            ctypes.c_void_p(int(getattr(event, "cuda_event", event))), 0)
            return self._mark()

    @property
    def passed(self):
        """Whether the stream has passed the last mark."""
        return self._undo is None or int(self._word[0]) >= self._marks

    def close(self, timeout=None):
        """Release the page. BusyError until the stream has passed the last mark."""
        with self._lock:
            if self._undo is None:
                return
            if not self.passed:
                raise BusyError("timeline: the stream has not passed the last mark", "EBUSY", 8,
                                retryable=True)
            if not self._client.closed:
                self._region.unregister(timeout)
            undo, self._undo = self._undo, None
            _open.discard(self)
            undo.close()
