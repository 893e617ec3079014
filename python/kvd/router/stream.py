# SPDX-License-Identifier: Apache-2.0
"""Server-sent events of an engine, as far as the router reads them: whether the first ones with
contents report an error. All bytes are passed on unchanged."""
import json

HELD_MAX = 64 << 10


def _empty(event):
    """The role of a chat, which is sent before the first token and before an error."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("finish_reason"):
            return False
        delta = choice.get("delta")
        if not isinstance(delta, dict) or any(v for k, v in delta.items() if k != "role"):
            return False
        if choice.get("token_ids") or choice.get("logprobs"):
            return False
    return True


def _error(event):
    """(message, code) of an event that reports an error; None otherwise."""
    error = event.get("error")
    if error is not None:
        error = error if isinstance(error, dict) else {"message": error}
        code = error.get("code")
        return str(error.get("message"))[:200], code if isinstance(code, int) else 500
    meta = event.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        code = reason.get("status_code")  # none: it was aborted
        return str(reason.get("message"))[:200], code if isinstance(code, int) else 400
    return None


class Opening:
    """The beginning of an answer, held until it is classified. done: pass it on; error: (message,
    code) instead."""

    def __init__(self, events, hold):
        """events: the answer is server-sent events. hold: bytes of any other answer."""
        self.events, self.hold = events, HELD_MAX if events else hold
        self.data, self.at = bytearray(), 0
        self.done, self.error = False, None

    def feed(self, data):
        """b"": the end."""
        self.data += data
        if self.events:
            self._look()
            self.done = self.done or b"\r" in self.data  # other line ends: passed on
        self.done = self.done or not data or len(self.data) > self.hold

    def _look(self):
        while not self.done:
            end = self.data.find(b"\n\n", self.at)
            if end < 0:
                return
            text = bytes(self.data[self.at:end]).strip()
            self.at = end + 2
            if not text or text.startswith(b":"):
                continue
            try:
                event = json.loads(text[5:]) if text.startswith(b"data:") else None
            except (ValueError, RecursionError):
                event = None
            self.error = _error(event) if isinstance(event, dict) else None
            self.done = self.error is not None or not isinstance(event, dict) or \
                not _empty(event)


class Watchdog:
    """Calls end() after so long without touch(). One timer for the whole stream."""

    def __init__(self, loop, seconds, end):
        self.loop, self.seconds, self.end = loop, seconds, end
        self.timer = None
        self.touch()
        self._arm(seconds)

    def touch(self):
        self.since = self.loop.time()

    def stop(self):
        self.timer.cancel()

    def _arm(self, seconds):
        self.timer = self.loop.call_later(seconds, self._look)

    def _look(self):
        left = self.since + self.seconds - self.loop.time()
        if left > 0:
            self._arm(left)
        else:
            self.end()
