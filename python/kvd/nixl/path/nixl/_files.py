# SPDX-License-Identifier: Apache-2.0
"""Files of an agent (FILE_SEG): addresses of their bytes for the daemon, and the replies of NIXL's
POSIX plugin.

A row of a file is (offset, length, device), and devices overlap. The daemon identifies bytes by
address alone; so each registration gets a range of numbers outside of all memory, and rows are
rewritten in it. The engine opens files, or this module in its process: the daemon receives
descriptors and opens no file."""
import os
import re
import threading

import numpy as np

from ._status import nixlBackendError, nixlNotFoundError

FIRST, END = 1 << 62, (1 << 63) - 1  # kvd's, of files
WHOLE = 1 << 46  # bytes of a file that was registered with length 0, which means all
PAGE = 4096
# parameters of NIXL's plugin, without effect here
PARAMS = {"use_posix_aio": "false", "use_uring": "false", "use_aio": "false",
          "kernel_queue_size": "256", "ios_pool_size": "65536"}
_FLAGS = {b"ro": os.O_RDONLY, b"rw": os.O_RDWR, b"direct": os.O_DIRECT, b"sync": os.O_SYNC,
          b"noatime": os.O_NOATIME, b"create": os.O_CREAT}
_path_mode = re.compile(rb"((?:ro|rw)(?:,(?:direct|sync|noatime|create))*):(.+)",
                        re.DOTALL).fullmatch


def opened(meta):
    """A descriptor of the file that "rw,create:PATH" names; None: meta has another form, and the
    device is the descriptor."""
    mode = _path_mode(meta)
    if mode is None:
        return None
    flags = os.O_CLOEXEC
    for word in mode[1].split(b","):
        flags |= _FLAGS[word]
    try:
        return os.open(mode[2], flags, 0o644)
    except (OSError, ValueError) as error:
        raise nixlBackendError("opening '%s': %s" % (os.fsdecode(mode[2]), error)) \
            from error


def queried(meta):
    """stat(2) of the path in the form of NIXL's plugins; None: it does not exist."""
    try:
        told = os.stat(meta)
    except (OSError, ValueError):
        return None
    return {"size": str(told.st_size), "mode": str(told.st_mode),
            "mtime": str(int(told.st_mtime))}


class Ranges:
    """The ranges that are in use."""

    def __init__(self):
        self._lock, self._next, self._used = threading.Lock(), FIRST, {}

    def take(self, nbytes):
        size = -(-nbytes // PAGE) * PAGE + PAGE  # neighbours are never adjacent
        with self._lock:
            at = self._next
            if size > END - at:
                at = self._gap(size)
            self._next = at + size
            self._used[at] = size
        return at

    def _gap(self, size):
        """Without space after the last range: one between the remaining ranges."""
        at = FIRST
        for used in sorted(self._used):
            if used - at >= size:
                return at
            at = used + self._used[used]
        if size > END - at:
            raise nixlBackendError("%d bytes of files are more than can be registered at "
                                   "once" % size)
        return at

    def drop(self, at):
        with self._lock:
            self._used.pop(at, None)


def addresses(table, files):
    """The rows with addresses in place of offsets. files: {device: [(offset, bytes, address of that
    offset)]}, the newest last: descriptor numbers are reused, and NIXL means the current one. Rows
    have 3 columns, or 5 with stride and count."""
    out = np.array(table, np.uint64)
    for i, (offset, nbytes, device, *more) in enumerate(table.tolist()):
        span = nbytes + more[0] * (more[1] - 1) if more and more[1] else nbytes
        for first, length, address in reversed(files.get(device, ())):
            if offset >= first and span <= length and offset - first <= length - span:
                out[i, 0] = address + offset - first
                break
        else:
            raise nixlNotFoundError("[%d, +%d) of file %d is not registered"
                                    % (offset, span, device))
    return out
