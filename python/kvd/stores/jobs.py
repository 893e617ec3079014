# SPDX-License-Identifier: Apache-2.0
"""A thread for calls that an engine's scheduler must not wait for."""
import queue
import threading

CLOSE_S = 2.0


class Jobs:
    """Runs calls one after another, on its own thread."""

    def __init__(self, name):
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, call, *args):
        self._queue.put((call, args))

    def _run(self):
        while True:
            call, args = self._queue.get()
            try:
                if call is None:
                    return
                call(*args)
            finally:
                self._queue.task_done()

    def drain(self):
        self._queue.join()

    def close(self):
        """A stopped daemon is not waited for: its mapping outlives this process."""
        self.add(None)
        self._thread.join(CLOSE_S)
