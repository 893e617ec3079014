# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of routing: requests whose prompt lies in chunks of other daemons run here
without a copy of it.

A routed request's tokens [local, end) have null blocks (block 0) in its block table, because they
are computed for vLLM, and are not here. In each layer the workers send the request's query rows to
the holders of these tokens, and merge the answers with attention over its own blocks.

Requests with the same document share its hold: the rows of all of them are one message to each of
its daemons."""
import weakref
from collections import namedtuple

NULL = 0  # the id of vLLM's null block
MODES = ("off", "auto", "always")
LEASE_S = 600.0
RENEW_S = 10.0  # between tries to hold a document again
LOSSES_MAX = 2  # of a request, before its prefix is loaded or computed instead
RENT_STEPS = 8  # routed ones between decisions whether a document is fetched after all
RENT_AGAIN_S = 2.0  # between tries to fetch it, and twice as long each time

Route = namedtuple("Route", "name begin local end secret")
Route.__doc__ = """A routed request, for the workers: tokens [begin, end) are attended to at their
holders, of which [local, end) have null blocks here; the request's own attention leaves out
[begin, local), which are here, too, because a part of a chunk cannot be attended to."""


class Document:
    """Chunks of [begin, end) tokens, from chunk `first` on, with their ids, which are held. It
    lasts as long as a request refers to it: ended(secret) tells that none does, or that it is held
    anew."""

    def __init__(self, first, ids, held, tokens, until, ended):
        self.first, self.ids, self.ended = first, ids, ended
        self.steps, self.next = 0, RENT_STEPS  # routed, of one token each
        self.rent, self.pause, self.again = None, RENT_AGAIN_S, 0.0
        self.begin, self.end = first * tokens, (first + len(ids)) * tokens
        self.last = None
        self.hold(held, until)

    def hold(self, held, until):
        """until: it is to be held again by then."""
        if self.last is not None:
            self.last()  # the hold before
        self.held, self.until, self.holders = held, until, None
        self.last = weakref.finalize(self, self.ended, held.secret)


class Rent:
    """A routed document that is fetched to blocks of vLLM's, which its prefix cache has afterwards.
    request: one that starts with it; ranks: of the engine."""

    def __init__(self, number, document, request, blocks, ranks):
        self.number, self.document, self.request, self.blocks = number, document, request, blocks
        self.left = ranks  # those that still load it
        self.valid = True  # all of it was loaded, and the model has not changed since


class Way:
    """Of a routed request. own: its first block behind the document."""

    def __init__(self, document, local):
        self.document, self.local, self.own = document, local, None

    def fits(self, table, block):
        """Whether exactly its tokens have null blocks."""
        begin, end = self.local // block, self.document.end // block
        return len(table) > end and not any(table[begin:end]) and \
            NULL not in table[:begin] and NULL not in table[end:]


class Routes:
    """block: tokens of one; ranks: of the engine; lease: of holds, in seconds. pool: vLLM's blocks
    (route_scheduler.Blocks), once there is one."""

    def __init__(self, block, ranks=1, lease=LEASE_S):
        self.block, self.ranks, self.lease, self.pool = block, ranks, lease, None
        self.rents, self.number, self.landed = {}, 0, set()  # landed: documents that are here
        self.away = {}  # {request: tokens without a block}, read by vLLM's block manager
        self.ways, self.losses = {}, {}
        self.documents = weakref.WeakValueDictionary()  # by (first chunk, id of the last one)
        self.ended = []  # secrets that the workers may forget

    # ---- documents ----

    def shared(self, first, ids, now):
        """The longest document in use of these chunks, from the first on."""
        for count in range(len(ids), 0, -1):
            document = self.documents.get((first, ids[count - 1]))
            if document is not None and now < document.until:
                return document
        return None

    def document(self, first, ids, held, tokens, until):
        """Of a hold, which starts with the first of these chunks."""
        made = Document(first, ids[:held.chunks], held, tokens, until, self.ended.append)
        self.documents[first, ids[held.chunks - 1]] = made
        return made

    def renew(self, hold, now):
        """Hold documents of running requests again before their leases end: hold(ids, first) is a
        hold, or None. One of which chunks are missing is tried again later; when its lease has
        ended, its requests are lost."""
        for document in {way.document for way in self.ways.values() if way.own is not None}:
            if now < document.until:
                continue
            held = hold(document.ids, document.first)
            if held is None or held.chunks < len(document.ids):
                document.until = now + RENEW_S
            else:
                document.hold(held, now + self.lease / 2)

    # ---- requests ----

    def leave(self, name):
        """It is asked for anew, or has ended."""
        self.away.pop(name, None)
        self.ways.pop(name, None)

    def chosen(self, name, document, local):
        """Tokens of it that are routed, 0: none."""
        if document is None or document.end <= local or \
                self.losses.get(name, 0) >= LOSSES_MAX:
            return 0
        self.ways[name] = Way(document, local)
        self.away[name] = document.end - local
        return self.away[name]

    def allocated(self, name, table, external):
        """vLLM has given blocks to a routed request. -> the end of its document"""
        way = self.ways[name]
        if external != self.away[name] or not way.fits(table, self.block):
            raise RuntimeError(
                "kvd.vllm: request %s: %d tokens from %d on are at other daemons, and vLLM has "
                "allocated %d, blocks %s: this release cannot be used with \"route\""
                % (name, self.away[name], way.local, external, table))
        way.own = table[way.document.end // self.block]
        return way.document.end

    def whole(self, name, table):
        """Whether positions in this table are those of its tokens: a release may leave out null
        blocks in front."""
        way = self.ways.get(name)
        return way is None or way.fits(table, self.block)

    def saved(self, name, tokens):
        """Its first chunks that are stored already."""
        way = self.ways.get(name)
        return way.document.end // tokens if way is not None else 0

    def step(self, scheduled):
        """{first own block: Route} of the routed requests among these."""
        routes = {}
        for name in scheduled:
            way = self.ways.get(name)
            if way is not None:
                document = way.document
                routes[way.own] = Route(name, document.begin, way.local, document.end,
                                        document.held.secret)
        return routes

    def take_ended(self):
        ended, self.ended[:] = list(self.ended), ()
        return ended

    def lost(self, name):
        """A step of it has no valid result: its document is not shared with others any more."""
        way = self.ways.get(name)
        if way is not None:
            self.losses[name] = self.losses.get(name, 0) + 1
            for key, document in list(self.documents.items()):
                if document is way.document:
                    del self.documents[key]
        self.leave(name)

    # ---- documents that are fetched while they are routed to ----

    def free(self):
        """Number of vLLM's free blocks."""
        return self.pool.free() if self.pool is not None else 0

    @property
    def rents_are_possible(self):
        return self.pool is not None and self.pool.caches

    def due(self, scheduled, now):
        """Routed documents of this step, each with one of its requests' names, for which to decide
        again."""
        due = {}
        for name in scheduled if self.rents_are_possible else ():
            way = self.ways.get(name)
            if way is None:
                continue
            document = way.document
            document.steps += 1
            if document.rent is None and document.steps >= document.next and now >= document.again:
                due.setdefault(document, name)
        for document in due:
            document.next = document.steps + RENT_STEPS
        return due.items()

    def rent(self, document, request):
        """-> a Rent. None: vLLM has too few free blocks."""
        blocks = self.pool.take((document.end - document.begin) // self.block)
        if blocks is None:
            return None
        self.number += 1
        document.rent = self.rents[self.number] = Rent(self.number, document, request, blocks,
                                                            self.ranks)
        return document.rent

    def rented(self, number, wholes, now):
        """A rent has ended at some ranks. wholes: for each of them, whether all of it was loaded."""
        rent = self.rents[number]
        rent.left, rent.valid = rent.left - len(wholes), rent.valid and all(wholes)
        if rent.left:  # its blocks are still written
            return
        del self.rents[number]
        document, document.rent = rent.document, None
        if rent.valid:
            self.pool.cache(rent.request, document.begin // self.block, rent.blocks)
            self.landed.add(document)
        else:
            document.again, document.pause = now + document.pause, 2 * document.pause
        self.pool.give(rent.blocks)

    def take_landed(self):
        """Names of requests whose documents are here now."""
        landed, self.landed = self.landed, set()
        return {name for name, way in self.ways.items() if way.document in landed}

    def reset(self):
        """The model has changed."""
        for rent in self.rents.values():
            rent.valid = False

    def finished(self, name):
        self.leave(name)
        self.losses.pop(name, None)


def own_blocks(table, block, routes):
    """A row of the batch: (its own blocks, number of its tokens that are elsewhere, its Route).
    table: an array of block ids; routes: of the step. Unexpected null blocks end the engine: nobody
    attends to their tokens."""
    nulls = (table == NULL).nonzero()[0]
    if not len(nulls):
        return table, 0, None
    begin, end = int(nulls[0]), int(nulls[-1]) + 1
    route = routes.get(int(table[end])) if end < len(table) else None
    if route is None or end - begin != len(nulls) or \
            (route.local, route.end) != (begin * block, end * block):
        raise RuntimeError("kvd.vllm: blocks %s of a request are null, and its route is %s: this "
                           "release of vLLM cannot be used with \"route\"" % (nulls, route))
    keep = [*range(route.begin // block), *range(end, len(table))]
    return table[keep], route.end - route.begin, route


def written(table, computed, block):
    """Blocks that a step has written which began with `computed` tokens."""
    return {one for one in table[computed // block:] if one != NULL}


def spoiled(lost, rows):
    """(requests without a valid result, blocks that they have written). lost: names of the workers;
    rows: {name: (block table, blocks written in this step)} of all in the step. A request may have
    found blocks in vLLM's cache that another one has written in the same step."""
    names, blocks, more = [], set(), [name for name in lost if name in rows]
    while more:
        name = more.pop()
        if name in names:
            continue
        names.append(name)
        blocks |= rows[name][1]
        more += [other for other, (table, _) in rows.items()
                 if other not in names and not rows[name][1].isdisjoint(table)]
    return names, blocks
