# SPDX-License-Identifier: Apache-2.0
"""A rank's loads and saves of chunks, on its engine's thread.

A put is started after the step that has computed its chunks, on a GPU after a mark in the stream.
Until it has ended its blocks may be read: vLLM keeps those of a finished request until the end is
reported, and puts of a preempted request are waited for before the next step writes its blocks.
A later read would store wrong contents."""
import contextlib
import logging
import time

import numpy as np

from ..errors import Error
from ..rooms import ABORTING, FAILED, SUCCESS, View
from ..stores.space_client import CALL_S, FETCH_S

logger = logging.getLogger("vllm.kvd")
SHOW_S = 0.25  # timeout of the query for a failed load's message
TELL_S = 1.0  # between log lines about a daemon that does not answer
CLOSE_S = 2.0


class Load:
    """move: None if it could not be started; hold: by which it reads."""

    def __init__(self, move, hold, blocks):
        self.move, self.hold, self.blocks, self.dropped = move, hold, blocks, False
        self.begin_s = time.monotonic()


def post(call):
    """A put or a fetch without a reply, by shared memory; with one if that is full."""
    try:
        return call(post=True)
    except Error as error:
        if error.code != "EFULL":
            raise
        return call(timeout=CALL_S)


def over(move):
    """Whether no byte of it moves any more. None: one that could not be started."""
    try:
        return move is None or move.state in (FAILED, SUCCESS)
    except Error:  # its slot was reused: it has ended unnoticed
        return True


def end_of(move):
    """(state, bytes) of one that has ended."""
    try:
        status = move.read() if move is not None else None
    except Error:
        status = None
    return (status.state, status.bytes) if status else (FAILED, 0)


def landed(move):
    """(tokens of the view's from the first on, why not all)"""
    if move is None:
        return 0, None
    try:
        facts = move.show(SHOW_S)
    except Error as error:
        return 0, error
    return facts.prefix_tokens, facts.error


class Rank:
    """spaces: a SpaceClient that opens spaces of the pool; group: of pools.py; mark(): the enqueued
    work, for the daemon to wait for; count(name=value): statistics."""

    def __init__(self, spaces, group, mark, count):
        self.spaces, self.group, self.mark, self.count = spaces, group, mark, count
        self.loads, self.puts, self.ending, self.bad = {}, {}, set(), set()
        self.rents, self.rented = {}, {}  # loads of route.Rents by number, and which were whole

    def view(self, blocks, begin, end):
        """Tokens [begin, end) of the request, which start with the first of these blocks."""
        group, pages = self.group, np.asarray(blocks, np.int64)
        if group.ratio > 1:
            pages = (pages[:, None] * group.ratio + np.arange(group.ratio)).ravel()
        first = begin // group.tokens * group.tokens
        return {group.name: View(pages, first // group.grain,
                                 (begin // group.grain, end // group.grain))}

    # ---- a step ----

    def begin(self, step):
        """Before the step writes."""
        for name in step.settles:
            moves = self.puts.pop(name, ())
            self.stop(moves)
            self.still(moves)

    def take(self, step):
        """After the step's accesses to the blocks that are loaded."""
        for loads, some in ((self.loads, step.loads), (self.rents, step.rents)):
            for name, secret, blocks, begin, end in some:
                loads[name] = self._load(step.words, secret, blocks, begin, end)
        for name in step.drops:
            if name in self.loads:
                self.loads[name].dropped = True
                self.stop([self.loads[name].move])

    def _load(self, words, secret, blocks, begin, end):
        """Fetch tokens [begin, end) of a hold, which start with the first of these blocks."""
        def fetch(space, views=self.view(blocks, begin, end)):
            hold = space.join(secret, timeout=CALL_S)
            return post(lambda **kw: hold.fetch(views, deadline=FETCH_S, **kw)), hold
        move, hold = self.spaces.ask(words, fetch) or (None, None)
        self._begun(move)
        return Load(move, hold, blocks)

    def saved(self, step):
        """The whole step is enqueued."""
        self.ending.update(step.ends)
        try:
            wait = self.mark() if step.saves else None
        except Error as error:  # of the stream: the time of its chunks is unknown
            self.count(failed_saves=len(step.saves))
            self.spaces.tell("chunks are not saved: %s" % error, "mark")
            return
        for name, first, ids, blocks, words in step.saves:
            begin = first * words.tokens * self.group.grain
            views = self.view(blocks, begin, begin + len(blocks) * self.group.tokens)

            def put(space, ids=ids, views=views, first=first):
                return post(lambda **kw: space.put(ids, views, first, wait=wait, **kw))
            move = self.spaces.ask(words, put)
            self._begun(move)
            if move is None:
                self.count(failed_saves=1)
            else:
                self.puts.setdefault(name, []).append(move)

    def _begun(self, move):
        """Its daemon may be stopped, or did not answer: it is not called again soon."""
        if move is not None and not over(move) and move.read().flags & ABORTING:
            self.spaces.mute()

    # ---- their ends ----

    def stop(self, moves):
        for move in moves:
            if not over(move):
                with contextlib.suppress(Error):
                    move.abort(CALL_S)

    def still(self, moves, seconds=float("inf")):
        """Wait until none of them moves. Only a stopped daemon takes long, and it must not read
        these pages when it continues."""
        now = time.monotonic()
        until, told, pause = now + seconds, now + TELL_S, 20e-6
        while not all(map(over, moves)):
            now = time.monotonic()
            if now > until:
                return
            if now > told:
                told = now + TELL_S * 30
                logger.warning("blocks wait for kvd, which does not answer")
            self.turn()
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def turn(self):
        """Late replies arrive with it."""
        with contextlib.suppress(Error):
            self.spaces.client._kvd.poll()

    def results(self):
        """(requests whose puts have ended, requests that were loaded, or not)"""
        sent, received = set(), set()
        # a session that is opened again takes several turns, and calls come a second apart
        if self.loads or self.puts or self.rents or self.spaces.client.lost:
            self.turn()
        for name, load in list(self.loads.items()):
            if over(load.move):
                del self.loads[name]
                received.add(name)
                self._loaded(name, load)
        for number, load in list(self.rents.items()):
            if over(load.move):
                del self.rents[number]
                self.rented[number] = self._counted(load)
                if self.rented[number]:
                    self.count(rents=1)
        for name, moves in list(self.puts.items()):
            left = [move for move in moves if not self._put(name, move)]
            if left:
                self.puts[name] = left
            else:
                del self.puts[name]
        for name in self.ending - self.puts.keys():
            self.ending.discard(name)
            sent.add(name)
        return sent, received

    def bad_blocks(self):
        """Blocks that were not loaded, since the last call."""
        bad, self.bad = self.bad, set()
        return bad

    def take_rented(self):
        """{number of a rent that has ended: [whether all of it was loaded]}, since the last call."""
        rented, self.rented = self.rented, {}
        return {number: [whole] for number, whole in rented.items()}

    def _counted(self, load):
        """Whether all of it was loaded."""
        state, nbytes = end_of(load.move)
        if state == SUCCESS:
            self.count(bytes=nbytes, seconds=time.monotonic() - load.begin_s)
        elif not load.dropped:
            self.count(failed_loads=1)
        return state == SUCCESS

    def _loaded(self, name, load):
        if self._counted(load) or load.dropped:
            return
        tokens, why = landed(load.move)
        whole = tokens * self.group.grain // self.group.tokens
        self.bad.update(load.blocks[whole:])
        logger.warning("request %s: %d of %d blocks were not loaded and are computed: %s",
                       name, len(load.blocks) - whole, len(load.blocks), why or self.spaces.why)

    def _put(self, name, move):
        """Whether it has ended."""
        if not over(move):
            return False
        state, nbytes = end_of(move)
        if state == SUCCESS:
            self.count(saved_bytes=nbytes)
        else:
            self.count(failed_saves=1)
            self.spaces.tell("request %s: chunks were not saved: %s"
                           % (name, landed(move)[1]), "put")
        return True

    def quiet(self):
        """No transfer accesses the engine's memory after this."""
        moves = [move for some in self.puts.values() for move in some]
        moves += [load.move for load in (*self.loads.values(), *self.rents.values())]
        self.stop(moves)
        self.still(moves, CLOSE_S)
