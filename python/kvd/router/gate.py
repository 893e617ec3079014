# SPDX-License-Identifier: Apache-2.0
"""Limits of running requests, queued requests, and memory for their bodies."""
import asyncio
from collections import deque

from .errors import Refused


class Gate:
    def __init__(self, most, queued, seconds, bodies):
        self.most, self.queued, self.seconds, self.bodies = most, queued, seconds, bodies
        self.running, self.queue, self.taken = 0, deque(), 0

    async def enter(self):
        """Wait to run; Refused."""
        if self.running < self.most:
            self.running += 1
            return
        if len(self.queue) >= self.queued:
            raise Refused(429, "%d requests run and %d wait (max-in-flight, max-queued)" % (
                self.running, len(self.queue)), retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        self.queue.append(turn)
        try:
            await asyncio.wait([turn], timeout=self.seconds)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        if not turn.done():
            self._give_up(turn)
            raise Refused(503, "queued for more than %g s (queue-timeout)" % self.seconds,
                          retry_after=1)

    def _give_up(self, turn):
        if turn.done():  # it was started already
            self.leave()
        else:
            self.queue.remove(turn)

    def take(self, size, own):
        """Count received bytes of a body, after `own`; Refused."""
        if self.taken > own and self.taken + size > self.bodies:
            raise Refused(429, "bodies of %d bytes in memory (max-bodies)" % self.taken,
                          retry_after=1)
        self.taken += size

    def give(self, size):
        self.taken -= size

    def leave(self):
        """Start the request that has waited longest."""
        if self.queue:
            self.queue.popleft().set_result(None)
        else:
            self.running -= 1
