# SPDX-License-Identifier: Apache-2.0
"""Another agent, as its metadata describes it."""
import numpy as np

MEM_TYPES = 256  # a region's kind in metadata: memory type + device * this


class Remote:
    """Another agent: contents of its metadata, and the connection to its session."""

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
        self.full = 0  # number of the change to its regions when all of them were sent
        self.failed = False  # ever: its lists may be of an attachment that is dead
        self.again = None  # the next attachment, while the last one is dead
        self.asked = self.tried = 0.0  # times of the last query of the daemon, and attachment

    def same(self, head):
        return (self.endpoint, self.epoch, self.secret) == \
            (head["endpoint"], head["epoch"], head["secret"])

    def learn(self, regions, full):
        """Whether some of them are new. full: these are all, as of that change of its regions;
        older metadata is ignored."""
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
