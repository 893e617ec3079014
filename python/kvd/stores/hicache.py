# SPDX-License-Identifier: Apache-2.0
"""Storage behind an engine's host memory, in chunks: each page of a pool is a chunk, and its hash
in hex is its id.

Engines do not pass the position of such pages in their prompt: they have none
(kvd.chunks.ANYWHERE). Pages that exists() finds are held until they are read, for at most the
lease, so no page is evicted between the two, and another daemon is queried once. Whether pages of
other daemons are fetched is decided by exists() alone: it does not count those that are cheaper to
compute, and get() fetches all that it is asked for.

A call returns when the daemon no longer accesses the pool, because the engine reuses its pages at
once. So a daemon that stops during a call blocks the engine's storage thread, not its scheduler."""
import threading
import time
from collections import OrderedDict

import numpy as np

from ..chunks import ANYWHERE, IDS_MAX, holders_of
from ..errors import Error
from ..rooms import FAILED, SUCCESS, View
from .space_client import CALL_S, FETCH_S, hold_most

LEASE_S = 10.0
HELD_MAX = 64  # holds of pages that were found and not read yet
STILL_S = 5.0  # until a slow move is logged
PIECE = 1024  # pages of one put or fetch
OVER = ("ELEASE", "ENOTFOUND")  # the end of a hold


def ids_of(keys):
    """Ids of hashes in hex, up to the first invalid one."""
    ids = []
    for key in keys:
        try:
            one = bytes.fromhex(key)
        except (TypeError, ValueError):
            break
        if len(one) != 32:
            break
        ids.append(one)
    return ids


def pages_of(indices, count, page, pages):
    """Numbers of `count` pages by the slots of their tokens, in SGLang's form; None: not whole
    pages of the pool."""
    slots = np.asarray(indices, np.int64).reshape(-1)
    if slots.size != count * page:
        return None
    slots = slots.reshape(count, page)
    first = slots[:, 0]
    if not count or (first % page).any() or first.min() < 0 or first.max() >= page * pages or \
            (slots != first[:, None] + np.arange(page)).any():
        return None
    return first // page


def trailing(there, count):
    """Lengths whose last pages, so many, are stored."""
    lengths, run = set(), 0
    for i, one in enumerate(there):
        run = run + 1 if one else 0
        if run >= min(count, i + 1):
            lengths.add(i + 1)
    return lengths


def bytes_of(move):
    """Of a move that has ended. 0: unknown."""
    try:
        return move.read().bytes
    except Error:  # its slot was reused
        return 0


class Held:
    """Ids that a hold has, in their order."""

    def __init__(self, hold, ids, until):
        self.hold, self.ids, self.until = hold, ids, until


class Holds:
    """Pages that were found and not read yet, by their ids."""

    def __init__(self, clock):
        self.clock, self._lock = clock, threading.Lock()
        self._held, self._where = OrderedDict(), {}  # {id(held): held}, {id: (held, i)}

    def add(self, key, hold, ids, lease):
        held = Held(hold, ids, self.clock() + lease)
        with self._lock:
            self._held[id(held)] = held
            for i, one in enumerate(ids):
                self._where[key, one] = held, i
            gone = self._late()
        return gone

    def _late(self):
        """Drops ended holds and their entries."""
        now, gone = self.clock(), []
        for name, held in list(self._held.items()):
            if held.until > now and len(self._held) <= HELD_MAX:
                break
            gone.append(self._held.pop(name))
        if gone:
            over = set(map(id, gone))
            self._where = {k: v for k, v in self._where.items() if id(v[0]) not in over}
        return gone

    def find(self, key, ids):
        """(held, index of the first, number that follow in it), or None."""
        with self._lock:
            held, at = self._where.get((key, ids[0]), (None, 0))
            if held is None or held.until <= self.clock():
                return None
            count = 0
            while count < len(ids) and at + count < len(held.ids) and \
                    held.ids[at + count] == ids[count]:
                count += 1
            return held, at, count

    def got(self, held, last):
        """Drops all up to the one before `last`; the hold is closed with its last one."""
        if last < len(held.ids):
            return
        with self._lock:
            self._held.pop(id(held), None)
            self._where = {k: v for k, v in self._where.items() if v[0] is not held}

    def clear(self):
        """-> those that were held"""
        with self._lock:
            gone = list(self._held.values())
            self._held.clear()
            self._where.clear()
        return gone


class HiCache:
    """finder: a SpaceClient whose spaces have layouts alone; mover: one whose spaces have memory.
    key: name of a pool's space for both. remote: seconds, or None; prices: a choice.Prices, None:
    all that is found is fetched; count(name=value): statistics, by the names of metrics.py."""

    def __init__(self, finder, mover, *, lease=LEASE_S, remote=None, prices=None,
                 count=lambda **values: None, clock=time.monotonic):
        self.finder, self.mover, self.lease, self.remote = finder, mover, lease, remote
        self.prices, self.count = prices, count
        self.clock, self.holds = clock, Holds(clock)
        self.stopped = None  # reason why no page is found or put any more

    # ---- lookups ----

    def exists(self, key, keys, priced=False):
        """Number of pages that are stored, from the first on. priced: without those of other
        daemons that are cheaper to compute."""
        ids, count, found = ids_of(keys), 0, 0
        while self.stopped is None and count < len(ids):
            part = ids[count:count + IDS_MAX]
            there, some = self._there(key, part, priced)
            count, found = count + some, found + there
            if some < len(part):
                break
        self.count(asked=len(keys), found=found)
        return count

    def _there(self, key, ids, priced):
        """(pages found, pages of them to fetch), from the first on. The latter are held."""
        held = self._hold(key, ids)
        if held is None or not held.chunks:
            return 0, 0
        count = held.chunks
        if priced and held.remote and self._computes(key, held):
            count -= held.remote  # the own daemon's are the first ones
        if count:
            self.holds.add(key, held, ids[:count], self.lease / 2)
        return held.chunks, count

    def _computes(self, key, held):
        """Whether the other daemons' pages are cheaper to compute."""
        told = self.prices and self.finder.ask(key, lambda space: (
            self.prices.page(space.client), holders_of(held, CALL_S)))
        return bool(told) and self.prices.computes(*told)

    def _hold(self, key, ids):
        """None: unknown. Holds of this cache are released if all holds together exceed the
        limit."""
        def call(space):
            def hold(count, remote):
                return space.hold(ids[:count], ANYWHERE, lease=self.lease, remote=remote,
                                  timeout=CALL_S + (remote or 0))
            try:
                return hold(len(ids), self.remote)
            except Error as error:
                if error.code != "ELIMIT":
                    raise
            for one in self.holds.clear():
                one.hold.close(CALL_S)
            return hold_most(hold, len(ids), self.remote)
        return self.finder.ask(key, call)

    def present(self, key, keys):
        """For each page, whether it is in this daemon."""
        there, ids = [False] * len(keys), ids_of(keys)
        at = 0
        while self.stopped is None and at < len(ids):
            part = ids[at:at + IDS_MAX]
            told = self.finder.ask(key, lambda s, p=part: s.find(p, ANYWHERE, timeout=CALL_S))
            if told is None:
                break
            there[at:at + told.chunks] = [True] * told.chunks
            at += told.chunks + (told.chunks < len(part))
        return there

    # ---- moves ----

    def get(self, key, keys, pages):
        """Read pages; for each whether it was read, up to the first that was not."""
        ids, count = ids_of(keys), 0
        while self.stopped is None and count < len(ids):
            part = ids[count:count + PIECE]
            read, asked = self._get(key, part, pages[count:count + len(part)])
            count += read
            if not read or read < asked:
                break
        if self.stopped is None and count < len(keys):
            self.count(failed_loads=1)
        return [i < count for i in range(len(keys))]

    def _get(self, key, ids, pages):
        """(pages read, pages requested)"""
        known = self.holds.find(key, ids)
        if known is None:
            hold = self._hold(key, ids)
            if hold is None or not hold.chunks:
                return 0, 1
            held, at, count = Held(hold, ids, 0), 0, min(hold.chunks, len(ids))
        else:
            held, at, count = known
        read = self._fetch(key, held.hold, at, count, pages)
        if known is not None:
            if read < count:  # of held pages; perhaps the lease has ended
                self.holds.got(held, len(held.ids))
                if read == 0:
                    return self._get(key, ids, pages)
            else:
                self.holds.got(held, at + count)
        return read, count

    def _fetch(self, key, hold, at, count, pages):
        """Number of pages read, from the first on."""
        page = self.page_of(key)
        views = {"kv": View(pages[:count], first_token=at * page,
                            tokens=(at * page, (at + count) * page))}

        def call(space):
            try:
                joined = space.join(hold.secret, timeout=CALL_S)
                if joined.chunks < at + count:
                    return None
                return joined.fetch(views, deadline=FETCH_S, timeout=CALL_S)
            except Error as error:
                if error.code in OVER:
                    return None
                raise
        begin = self.clock()
        move = self.mover.ask(key, call)
        if move is None:
            return 0
        if self._still(move) == SUCCESS:
            self.count(bytes=bytes_of(move), seconds=self.clock() - begin)
            return count
        facts = self._facts(move)
        return min(count, facts.prefix_tokens // page) if facts else 0

    def put(self, key, keys, pages):
        """Store pages; for each whether it is stored now, up to the first that is not."""
        ids, count = ids_of(keys), 0
        while self.stopped is None and count < len(ids):
            part = ids[count:count + PIECE]
            there = self._put(key, part, pages[count:count + len(part)])
            count += there
            if there < len(part):
                break
        if self.stopped is None and count < len(keys):
            self.count(failed_saves=1)
        return [i < count for i in range(len(keys))]

    def _put(self, key, ids, pages):
        move = self.mover.ask(key, lambda s: s.put(ids, {"kv": pages}, ANYWHERE,
                                                   timeout=CALL_S))
        if move is None:
            return 0
        if self._still(move) != SUCCESS:
            self._facts(move)
            return 0
        self.count(saved_bytes=bytes_of(move))
        facts = self._facts(move)
        return min(len(ids), facts.chunks) if facts else 0

    def page_of(self, key):
        """Tokens of a page."""
        return key.tokens

    def _still(self, move):
        """Its end, SUCCESS or FAILED. Until then the daemon accesses the pages, whatever the
        result; a closed move has ended."""
        told = self.clock() + STILL_S
        while True:
            try:
                return move.wait(timeout=0.5)
            except Error as error:
                if error.code != "ENOREPLY":  # it has ended; its own deadline is ETIMEOUT
                    return FAILED
            if self.clock() > told:
                told = float("inf")
                self.mover.tell("%s is slow: the daemon has not released the host pool after "
                                "%g s" % (move, STILL_S))
            try:
                self.mover.client._kvd.poll()
            except (AttributeError, Error):
                return FAILED  # closed

    def _facts(self, move):
        """The result of a move that has ended; None: unknown. Closes it."""
        try:
            facts = move.show(CALL_S)
            if facts.error is not None:
                self.mover.tell("%s failed: %s" % (move, facts.error), "move")
            elif facts.left_out:
                self.mover.tell("%d of %d pages found no space in the chunk memory"
                                % (facts.left_out, facts.left_out + facts.chunks), "room")
            move.close(CALL_S)
            return facts
        except Error as error:
            self.mover.tell("%s failed: %s" % (move, error), "move")
            return None

    # ---- ends ----

    def stop(self, why):
        """From now on no page is found or put."""
        self.stopped = why
        self.holds.clear()

    def close(self):
        self.stop("closed")
        self.finder.close()
        self.mover.close()
