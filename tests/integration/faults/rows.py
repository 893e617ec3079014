# SPDX-License-Identifier: Apache-2.0
"""Query rows: an engine of B's posts rows with chunks that A holds (rows.h), and is led
into a phase. Each daemon has one thread that attends, with the slow kernel: what is to
wait waits behind another post."""
import contextlib
import signal
import threading

from world import SLOW, SUCCESS, TRANSFERRING, Side, Wrong

CHUNKS, NEAR = 8, 20  # NEAR: the first of those of B's own
LARGE, MERGED, SMALL = 4096, 2048, 16
# done within dead_after, for who waits for it is frozen
MIDDLE = 512 if SLOW == 1 else 64
BEFORE, TIMES = 6, 3
DEADLINE_MS, LONG_MS = 20000 if SLOW == 1 else 60000, 60000  # the last is the most
TRANSPORTS = dict(shm="shm", tcp="tcp shm")  # a store puts by a line to itself
THAW_S = 0.05  # the fault comes first


def CONFIG(net):
    """More of the daemons' configuration."""
    return """[chunks]
chunk_memory = 32 MiB
chunk_peers = tcp://%s:%d
attention_threads = 1
attention_isa = ref
""" % net.address(0)


class Post(Side):
    """A post, as one side of a room."""

    def __init__(self, engine, number):
        super().__init__(engine, number, "attend", 0)

    def open(self, layer, rows, chunks=CHUNKS, tokens=0, deadline_ms=DEADLINE_MS, times=1):
        self.engine.do("rows", self.number, layer, rows, chunks, tokens, deadline_ms, times)

    def words(self):
        if self.engine.lost:
            return "EDEAD"
        return self.engine.answer(self.engine.ask("why", self.number, self.role))["words"]

    def under_way(self):
        self.engine.world.until(lambda: self.state == TRANSFERRING or self.ended,
                                "%s is not under way: %s" % (self, self.now))


class Scene:
    def __init__(self, world, phase, witnesses):
        self.world, self.phase, self.witnesses = world, phase, witnesses
        self.frozen = None

    def figure(self, node, name):
        stats = self.witnesses[node].cmd("stats")["metrics"]
        return next(int(m["value"]) for m in stats if m["name"] == name)

    def engine(self, node, name):
        return self.world.engine(node, name, "v", 16)

    def prime(self):
        """Both stores have had chunks: what they make for these is there."""
        for node, first in ((0, 0), (1, NEAR)):
            sessions = self.figure(node, "sessions")
            engine = self.engine(node, "primer")
            engine.do("chunks", first, CHUNKS)
            engine.leave()
            self.world.until(lambda n=node, s=sessions: self.figure(n, "sessions") <= s,
                             "the primer does not go")

    def begin(self):
        self.s, self.d, self.t = (self.engine(node, name) for node, name in
                                  ((0, "victim-s"), (1, "victim-d"), (1, "victim-t")))
        self.hold(self.d, 0)
        self.hold(self.t, NEAR if self.phase == "merging" else 0)
        self.post = Post(self.d, self.world.new_number())
        self.other = Post(self.t, self.world.new_number())

    def hold(self, engine, first):
        """A daemon that came again is asked once it is known again."""
        self.world.until(lambda: engine.answer(engine.ask("hold", first, CHUNKS))["result"]
                         == "OK", "%s does not find its chunks" % engine.name)

    def enter(self):
        self.served = self.figure(0, "attention_served_total")
        self.batches = self.figure(0, "attention_batches_total")
        getattr(self, "be_" + self.phase)()

    def waiting(self):
        self.world.until(lambda: self.figure(0, "attention_queued") > 0, "no leg waits")

    def busy(self):
        """The first of the legs is done, there are others."""
        return self.figure(0, "attention_batches_total") > self.batches

    def answered(self):
        """All that was asked, of what it was told before it was frozen."""
        self.world.until(lambda: self.figure(0, "attention_served_total") > self.served and
                         not self.figure(0, "attention_queued"), "nothing is served")

    def be_queued(self):
        """One of the legs before it is to be done first, at least."""
        self.other.open(1, LARGE, deadline_ms=LONG_MS, times=BEFORE)
        self.waiting()
        self.post.open(0, SMALL)
        self.post.under_way()

    def be_attended(self):
        self.post.open(0, LARGE, times=TIMES)
        self.waiting()

    def be_answered(self):
        """The answer is in the socket of a daemon that does not look."""
        self.post.open(0, MIDDLE, times=4)
        self.world.until(lambda: self.busy() or self.post.ended, "the holder does nothing")
        self.frozen = self.world.nodes[1]
        self.frozen.signal(signal.SIGSTOP)
        self.answered()

    def be_merging(self):
        self.other.open(1, LARGE, deadline_ms=LONG_MS, times=TIMES)
        self.other.under_way()
        self.post.open(0, MERGED, 1, 16, times=2)  # of one part nothing is merged
        self.answered()
        if self.post.ended:
            raise Wrong("it was merged: %s" % self.post.now)

    def thaw(self):
        def go_on():
            with contextlib.suppress(ProcessLookupError):
                self.frozen.signal(signal.SIGCONT)
        if self.frozen:
            threading.Timer(THAW_S, go_on).start()

    # ---- after it

    def end(self):
        """The post beside it has ended, or ends with its engine."""
        if self.other.ended:
            self.other.still(0)

    def again(self):
        for engine in {self.s, self.d, self.t} & set(self.world.engines):
            engine.leave()
        self.prime()
        engine = self.engine(1, "next-d")
        self.hold(engine, 0)
        post = Post(engine, self.world.new_number())
        post.open(0, SMALL)
        post.until(SUCCESS)
        post.still(0)
        engine.leave()
