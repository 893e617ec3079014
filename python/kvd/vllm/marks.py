# SPDX-License-Identifier: Apache-2.0
"""Progress of an engine's stream, for the daemon to wait for."""
import contextlib

from ..errors import Error
from ..timeline import Timeline


class Marks:
    """For a rank's streams. gpu: False, a call that returns has computed."""

    def __init__(self, client, gpu):
        self._client, self._gpu, self._timelines = client, gpu, {}

    def __call__(self):
        """A mark in the current stream; None: no need to wait."""
        if not self._gpu:
            return None
        from torch.cuda import current_stream
        stream = current_stream()
        if stream.cuda_stream not in self._timelines:
            self._timelines[stream.cuda_stream] = Timeline(self._client, stream)
        return self._timelines[stream.cuda_stream].mark()

    def close(self):
        for timeline in self._timelines.values():
            with contextlib.suppress(Error):  # a hanging stream keeps its page
                timeline.close()
