# SPDX-License-Identifier: Apache-2.0
"""Another agent, as its metadata tells it."""
import numpy as np

MEM_TYPES = 256  # a region's kind in metadata: memory type + device * this


class Remote:
    """Another agent: what its metadata told, and the way to its session."""

    __slots__ = ("name", "endpoint", "epoch", "secret", "spans", "attach", "gone", "again",
                 "asked", "tried", "failed", "full", "since", "beside")

    def __init__(self, name, head, since=None):
        self.name, self.endpoint = name, head["endpoint"]
        self.since = since  # the own daemon's instance then; None: of the own name
        # a session of the own daemon
        self.beside = since is not None and since == head.get("instance")
        self.epoch, self.secret = head["epoch"], head["secret"]
        self.spans = {}  # memory type -> {(address, bytes, device)}, in order
        self.attach, self.gone = None, False
        self.full = 0  # how often its regions had changed when all of them were told
        self.failed = False  # ever: its lists may be of an attachment that is dead
        self.again = None  # the next attachment, while the last one is dead
        self.asked = self.tried = 0.0  # when the daemon was asked after it; made again

    def same(self, head):
        return (self.endpoint, self.epoch, self.secret) == \
            (head["endpoint"], head["epoch"], head["secret"])

    def learn(self, regions, full):
        """Whether there are some that were not known. full: these are all, and of which
        change of its regions; what is no newer than what is known tells nothing."""
        if 0 < full <= self.full:
            return False
        before, self.full = self.spans, max(self.full, full)
        self.spans = {} if full else {mem: dict(spans) for mem, spans in before.items()}
        for kind, address, nbytes in regions.tolist():
            mem, device = kind % MEM_TYPES, kind // MEM_TYPES
            self.spans.setdefault(mem, {})[(address, nbytes, device)] = None
        return any(span not in before.get(mem, ())
                   for mem, spans in self.spans.items() for span in spans)

    def packed(self, mem):
        return np.array(list(self.spans.get(int(mem), ())), np.uint64).tobytes()


def within(spans, table):
    """Whether each row of (address, bytes, device) lies in one of the spans."""
    return all(any(a >= s and n <= b and a - s <= b - n and d == e for s, b, e in spans)
               for a, n, d in table.tolist())
