# SPDX-License-Identifier: Apache-2.0
"""Load of this engine: the scheduler counts and sends it to its workers once a second, which report
it to their daemons (session.report)."""
import time

EVERY_S = 1.0
KEEP = 0.5  # weight of the old rate when a new second is added


class Meter:
    def __init__(self, block_size, clock=time.monotonic):
        self.block_size, self.clock, self.pool = block_size, clock, None
        self.requests = {}  # unfinished ones, by id
        self.reported_s, self.prompt, self.decode = None, 0, 0
        self.rates = {}

    def arrived(self, request):
        self.requests[request.request_id] = request

    def finished(self, request):
        self.requests.pop(request.request_id, None)

    def stepped(self, scheduled):
        """scheduled: tokens of this step by request. -> the report, or None: not yet due"""
        for name, tokens in scheduled.items():
            request = self.requests.get(name)
            prompt = min(tokens, self._left(request)) if request else 0
            self.prompt += prompt
            self.decode += tokens - prompt
        now = self.clock()
        if self.reported_s is None:
            self.reported_s = now
        elif now - self.reported_s >= EVERY_S:
            self._rate("prompt_tokens_s", self.prompt / (now - self.reported_s))
            self._rate("decode_tokens_s", self.decode / (now - self.reported_s))
            self.reported_s, self.prompt, self.decode = now, 0, 0
            return self._figures(len(scheduled))
        return None

    @staticmethod
    def _left(request):
        return max(0, request.num_prompt_tokens - request.num_computed_tokens)

    def _rate(self, name, rate):
        self.rates[name] = self.rates.get(name, rate) * KEEP + rate * (1 - KEEP)

    def _figures(self, running):
        figures = {"running": running, "waiting": max(0, len(self.requests) - running),
                   "prompt_tokens_waiting": sum(map(self._left, self.requests.values()))}
        figures.update((name, int(rate)) for name, rate in self.rates.items())
        if self.pool is not None:
            figures["kv_free_tokens"] = self.pool.get_num_free_blocks() * self.block_size
            figures["kv_total_tokens"] = self.pool.num_gpu_blocks * self.block_size
        return figures
