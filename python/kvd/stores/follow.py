# SPDX-License-Identifier: Apache-2.0
"""Changes of an engine's chunks in the daemon, for an engine that publishes them to routers.

The daemon reports ids of chunks. Their tokens are known to the engine alone, and only of chunks that
it has stored or looked up itself: these are the known chunks, and their changes are reported. All
other chunks of the space are remembered by id, because a look-up may make them known later.

A thread reads the daemon's events. The engine's scheduler adds to one queue and takes from another,
so no call of it waits for the daemon."""
import json
import logging
import threading
import time
from collections import OrderedDict, deque

from ..chunks import ChunkEvents
from .space_client import CALL_S

logger = logging.getLogger("kvd.stores")
PERIOD_S = 0.25  # between two reads of events
WAKE_S = 2 * PERIOD_S  # in which a finished put is reported
AWAY_S = 10.0  # without the daemon, until its chunks are reported as removed
STEP = 512  # changes that the engine takes in one step
QUEUED = 8192  # changes not taken yet, above which no events are read
KNOWN = 65536  # chunks
PRESENT = 1 << 20  # chunks of a space in the daemon; further ones are not reported
MEMORY, FILE = 1, 2
BITS = {"memory": MEMORY, "file": FILE}  # an engine's own pages are not in the store


class Watch:
    """Events of a session, in the place of a SpaceClient's space."""

    def __init__(self, client, key=None):
        self.client, self.events = client, None

    def find(self, *args, **kw):
        """SpaceClient's first call of a space. Events need no shared memory."""

    def digest(self, layout, names):
        """Of a space, by which events name it."""
        told = self.client.command("space.open", CALL_S, layout=json.loads(layout), **{
            name: value for name, value in names._asdict().items() if value is not None})
        self.client.command("space.close", CALL_S, space=told["space"])
        return told["digest"]

    def read(self, anew):
        """(whole, events), as of ChunkEvents.read(). anew: all chunks that are there."""
        if anew or self.events is None:
            self.events = self.client.chunk_events()
        return self.events.read(CALL_S)


class Contents:
    """Chunks of one space. media: names of the media of a chunk by its tiers' bits; most: chunks that
    are known; changes: a queue of (stored, chunk, medium); forgets: as of Follower."""

    def __init__(self, media, most, changes, forgets=False):
        self.media, self.most, self.changes, self.forgets = media, most, changes, forgets
        self.digest = None  # of the space, once the daemon has been asked
        self.there, self.known = {}, OrderedDict()  # {id: bits}, {id: [chunk, reported media]}

    def know(self, chunks):
        """[(id, chunk)], consecutive ones of a prompt; chunk: None if it was known. The first ones are
        forgotten last: without them the others are not found."""
        for one, chunk in reversed(chunks):
            if chunk is not None:
                self.known.setdefault(one, [chunk, ()])
            if one in self.known:  # still
                self.known.move_to_end(one)
        self._report([one for one, _ in chunks], self.forgets)
        while len(self.known) > self.most:
            _, (chunk, media) = self.known.popitem(last=False)
            self.changes.extend((False, chunk, medium) for medium in media)

    def read(self, whole, events):
        """whole: the events list all chunks that are there."""
        if whole:
            self.there = {}
        for event in events:
            self._change(event)
        ids = list(reversed(self.known)) if whole else dict.fromkeys(e.id for e in events)
        self._report(ids)
        for one in ids if self.forgets else ():
            if one in self.known and one not in self.there:
                del self.known[one]

    def _change(self, event):
        bit, bits = BITS.get(event.tier, 0), self.there.get(event.id, 0)
        bits = bits | bit if event.put else bits & ~bit
        if not bits:
            self.there.pop(event.id, None)
        elif event.id in self.there or len(self.there) < PRESENT:
            self.there[event.id] = bits

    def _report(self, ids, again=False):
        """again: also media that have been reported before."""
        for one in ids:
            known = self.known.get(one)
            if known is None:
                continue
            chunk, before = known
            known[1] = now = self.media[self.there.get(one, 0)]
            self.changes.extend((True, chunk, medium) for medium in now
                                if again or medium not in before)
            self.changes.extend((False, chunk, medium) for medium in before if medium not in now)

    def again(self):
        """The engine's readers have lost all that was reported."""
        self._report(reversed(self.known), True)


class Follower:
    """spaces: a SpaceClient whose opener is Watch; media, most: as of Contents. Keys name spaces: a
    layout's text, and the names as a named tuple. step_most: changes in a step; forgets: the engine has a
    chunk's tokens only until it is reported as removed, and its readers may lose all without notice.
    So a chunk that is nowhere is not known any more, and each call of know() reports it again. run:
    whether a thread follows the daemon; else step() does."""

    def __init__(self, spaces, media, most=KNOWN, step_most=STEP, forgets=False,
                 clock=time.monotonic, run=True):
        self.spaces, self.media, self.most, self.clock = spaces, media, most, clock
        self.step_most, self.forgets = step_most, forgets
        self.contents = {}  # {key: Contents}
        self.anew = True  # all chunks are to be listed
        self.heard_s = None  # when it last answered, or was not asked; None: all is removed
        self.calls, self.changes = deque(), deque()  # of the scheduler, and for it
        self.awake_s = 0.0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kvd-events", daemon=True)
        if run:
            self.thread.start()

    # ---- the scheduler's thread ----

    def know(self, key, ids, chunk):
        """Report these chunks from now on, consecutive ones of a prompt. chunk(i): of ids[i]; it is
        not called for chunks that stay known."""
        if len(self.calls) < QUEUED:
            contents = self.contents.get(key)
            known = () if contents is None or self.forgets else contents.known
            self.calls.append((self._know, key, [(one, None if one in known else chunk(i))
                                                 for i, one in enumerate(ids)]))
        self.wake()

    def forget(self):
        """Report all as removed: the engine does not use these chunks any more."""
        self.calls.append((self._forget,))
        self.wake()

    def again(self):
        """Report all again."""
        self.calls.append((self._again,))
        self.wake()

    def wake(self):
        """The daemon's next events are awaited."""
        self.awake_s = self.clock() + WAKE_S

    def waits(self):
        """Whether take() has changes, or may have some soon."""
        return bool(self.changes) or self.clock() < self.awake_s

    def take(self):
        """[(stored, chunk, medium)], the next ones"""
        return [self.changes.popleft() for _ in range(min(len(self.changes), self.step_most))]

    # ---- the own thread ----

    def _know(self, key, chunks):
        if key not in self.contents:
            self.contents[key] = Contents(self.media, self.most, self.changes, self.forgets)
        self.contents[key].know(chunks)

    def _forget(self):
        for contents in self.contents.values():
            contents.read(True, ())
        self.contents.clear()

    def _again(self):
        for contents in self.contents.values():
            contents.again()

    def _run(self):
        while not self.closed.wait(PERIOD_S):
            try:
                self.step()
            except Exception:
                self.spaces.tell("events of chunks cannot be read")
                logger.debug("events of chunks cannot be read", exc_info=True)
        self.spaces.close()

    def step(self):
        while self.calls:
            call, *args = self.calls.popleft()
            call(*args)
        if self.contents and len(self.changes) < QUEUED:
            self._read()
        elif self.heard_s is not None:  # it is not asked
            self.heard_s = self.clock()

    def _read(self):
        heard = False
        try:
            told = self.spaces.ask(None, self._ask)
            if told is not None:
                self.anew = True  # or else an exception would lose these events
                self._sort(*told)
                self.anew, heard = False, True
        finally:
            if heard:
                self.heard_s = self.clock()
            elif self.heard_s is not None and self.clock() > self.heard_s + AWAY_S:
                self.heard_s, self.anew = None, True
                self._sort(True, ())

    def _ask(self, watch):
        for key, contents in self.contents.items():
            if contents.digest is None:
                contents.digest, self.anew = watch.digest(*key), True
        return watch.read(self.anew)

    def _sort(self, whole, events):
        spaces = {contents.digest: [] for contents in self.contents.values()}
        for event in events:
            if event.space in spaces:
                spaces[event.space].append(event)
        for contents in self.contents.values():
            contents.read(whole, spaces[contents.digest])

    def close(self):
        """The thread closes its session, perhaps later: it may be listing many chunks."""
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(CALL_S)
        else:
            self.spaces.close()
