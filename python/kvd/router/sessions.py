# SPDX-License-Identifier: Apache-2.0
"""The last pair of each session, for --affinity. A session is the value of a header."""
import secrets
from hashlib import blake2b
from itertools import islice

SESSIONS_MAX, SESSION_S = 100_000, 3600
DROPPED = 1000  # at a time
NONE = (None, None)


class Sessions:
    """Of a session's name only a hash is kept: it may be long, or a secret."""

    def __init__(self):
        self.key = secrets.token_bytes(16)
        self.pairs = {}  # {hash: (prefill's URL, decode's URL, time)}, the oldest first

    def name(self, value):
        """The hash of a header's value; None if there is none."""
        if not value:
            return None
        text = value.encode("utf-8", "surrogateescape")
        return int.from_bytes(blake2b(text, digest_size=8, key=self.key).digest(), "little")

    def last(self, name, now):
        """(prefill's URL, decode's URL), None where it is not known."""
        prefill, decode, time = self.pairs.get(name, (*NONE, 0))
        return (prefill, decode) if now - time < SESSION_S else NONE

    def answered(self, name, prefill, decode, now):
        """prefill: None: decode computed the prompt; the session's prefill server remains."""
        prefill = prefill or self.last(name, now)[0]
        self.pairs.pop(name, None)
        self.pairs[name] = prefill, decode, now
        if len(self.pairs) > SESSIONS_MAX:
            for oldest in list(islice(self.pairs, DROPPED)):
                del self.pairs[oldest]
