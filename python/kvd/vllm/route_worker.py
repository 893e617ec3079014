# SPDX-License-Identifier: Apache-2.0
"""The workers' side of routing: query rows of a step go to the holders of their documents, layer by
layer.

The rows of all requests with one document are one request to the daemon ("cut"), of at most a
seat's rows. A failed one is sent once more, because the daemon then takes the hold's other holder.
If that fails, too, its requests are lost: nothing more is sent for them in this step, their rows
are zeros, and the scheduler drops the step's result."""
import logging
import time
from collections import namedtuple

from ..attend import ROWS_MAX, Part
from ..errors import Error, NotFoundError
from ..stores.space_client import CALL_S, GONE
from .route import LEASE_S, own_blocks

logger = logging.getLogger("vllm.kvd")
SEATS = 4
DEADLINE_S = 1.0  # of a layer's rows, with the second try, and in addition their work at
SLOW = 2e9  # floating-point operations a second, of a slow holder;
DEADLINE_MOST_S = 30.0  # at most this in all
WHY_S = 0.25  # for a daemon's message
AGAIN = ("ELEASE", "ENOTFOUND", "EREVOKED")  # another holder may have it
UNUSABLE = (*GONE, "ESTATE", "ENOREPLY")  # the session has ended, or a seat is not free

Row = namedtuple("Row", "start count length blocks")
Row.__doc__ = """A request in a batch: its first token there, number of its tokens, and tokens and
blocks that its own attention covers."""


class Cut:
    """Routed tokens [begin, end), in the order of Batch.order, of these requests, which attend to
    this hold. packed: as an Attend takes it in each layer."""

    def __init__(self, begin, end, names, hold):
        self.begin, self.end, self.names, self.hold = begin, end, names, hold
        self.packed = None


class Batch:
    """A step's requests. order: indices of its routed tokens in the batch, by document; pairs: of a
    routed token and a token of its document."""

    def __init__(self, rows, order, cuts, pairs):
        self.rows, self.order, self.cuts, self.pairs = rows, order, cuts, pairs


def batch(requests, block, routes, most, hold):
    """requests: (first token, tokens, length, table of blocks) of each; most: tokens of a cut;
    hold(route): of its document, None: it is lost."""
    rows, documents = [], {}
    for start, count, length, table in requests:
        blocks, away, route = own_blocks(table, block, routes)
        rows.append(Row(start, count, length - away, blocks))
        if route is not None:
            documents.setdefault(route.secret, []).append((start, count, route))
    order, cuts, pairs = [], [], 0
    for asked in documents.values():
        held = hold(asked[0][2])
        if held is None:
            continue
        tokens = [(at, route.name) for start, count, route in asked
                  for at in range(start, start + count)]
        pairs += len(tokens) * (asked[0][2].end - asked[0][2].begin)
        for at in range(0, len(tokens), most):
            some = tokens[at:at + most]
            cuts.append(Cut(len(order), len(order) + len(some), {name for _, name in some}, held))
            order += [token for token, _ in some]
    return Batch(rows, order, cuts, pairs)


class Router:
    """spaces: the rank's SpaceClient, whose spaces have the holds; opener(client, rows, seats):
    kvd.Attend for the model's rows; heads: rows of a token; values: of a row of q and of o
    together; layers: {name: number}; count(name=value): statistics."""

    def __init__(self, spaces, opener, heads, values, layers, count, clock=time.monotonic):
        self.spaces, self.opener, self.heads, self.layers = spaces, opener, heads, layers
        self.values, self.seconds = values, DEADLINE_S
        self.count, self.clock, self.attend = count, clock, None
        self.tokens = ROWS_MAX // heads  # of a seat
        self.routes, self.words, self.holds, self.lost = {}, None, {}, set()
        self.sent = self.rows = 0
        self.until = {}  # deadlines of seats

    # ---- a step ----

    def begin(self, step):
        self.routes, self.words, self.lost = step.routes, step.words, set()
        for secret in step.ended:
            self.holds.pop(secret, None)
        if step.words is not None:  # the daemon measures what it is opened for
            self._open()

    def _open(self):
        if self.attend is None:
            self.attend = self.spaces.ask(self.words, lambda space: self.opener(
                self.spaces.client, self.tokens * self.heads, SEATS))
        return self.attend is not None

    def batch(self, requests, block):
        made = batch(requests, block, self.routes, self.tokens, self._hold)
        work = 2 * made.pairs * self.heads * self.values
        self.seconds = min(DEADLINE_S + work / SLOW, DEADLINE_MOST_S)
        return made

    def _hold(self, route):
        """The hold of a route, joined. None: it is lost."""
        secret = route.secret

        def join(space):
            hold = space.join(secret, lease=LEASE_S, timeout=CALL_S)
            if hold.tokens < route.end - route.begin:  # a holder is away, or a limit is reached
                hold.close(CALL_S)
                raise NotFoundError("%d of %d tokens of a hold can be joined"
                                    % (hold.tokens, route.end - route.begin), "ENOTFOUND")
            return hold
        if secret not in self.holds:
            hold = self.spaces.ask(self.words, join)
            if hold is None:
                self._lose({r.name for r in self.routes.values() if r.secret == secret},
                           self.spaces.why)
                return None
            self.holds[secret] = hold
        return self.holds[secret]

    def end(self):
        """-> requests of this step without a valid result"""
        if self.sent:
            self.count(routed_posts=self.sent, routed_rows=self.rows, routed_steps=1)
        if self.lost:
            self.count(lost_steps=len(self.lost))
        self.sent = self.rows = 0
        lost, self.lost, self.routes = self.lost, set(), {}
        return lost

    # ---- a layer ----

    def send(self, layer, cut, seat, fill):
        """Send a cut; fill(bytes of the seat's rows, cut) writes them. False: it is lost."""
        if cut.names <= self.lost:
            return False
        try:
            if not self._open():
                raise Error(self.spaces.why, "ELOST")
            fill(self.attend.q(seat), cut)
            self._post(layer, cut, seat, self.seconds)
        except Error as error:
            self._failed(cut, error)
            return False
        return True

    def _post(self, layer, cut, seat, seconds):
        rows = (cut.end - cut.begin) * self.heads
        if cut.packed is None:
            cut.packed = self.attend.pack([Part(cut.hold, rows=(0, rows))])
        self.attend.post(seat, self.layers[layer], cut.packed, deadline=seconds)
        self.sent, self.rows = self.sent + 1, self.rows + rows
        self.until[seat] = self.clock() + seconds

    def receive(self, layer, cut, seat):
        """o [rows, dv], m and l [rows] of a cut, in the seat. None: it is lost."""
        if self.attend is None:  # closed meanwhile: all are lost
            return None
        try:
            try:
                self._wait(seat)
            except Error as error:
                left = self.until[seat] - self.clock()
                if left <= 0 or not (error.retryable or error.code in AGAIN) or \
                        error.code in UNUSABLE:
                    raise
                self._post(layer, cut, seat, left)
                self._wait(seat)
        except Error as error:
            self._failed(cut, self._why(seat, error))
            return None
        count = (cut.end - cut.begin) * self.heads
        return tuple(values(seat)[:count] for values in
                     (self.attend.o, self.attend.m, self.attend.l))

    def _wait(self, seat):
        """A daemon that does not answer ends no request: it is waited for as long again."""
        self.attend.wait(seat, max(0.0, self.until[seat] - self.clock()) + DEADLINE_S, why=0)

    def _why(self, seat, error):
        """The error with the daemon's message, if it tells it soon."""
        if error.code in UNUSABLE:
            return error
        try:
            return self.attend.error(seat, why=WHY_S) or error
        except Error:
            return error

    # ---- losses ----

    def _failed(self, cut, error):
        if error.code in UNUSABLE:
            self._drop()
            if error.code == "ENOREPLY":
                self.spaces.mute()
            self._lose({route.name for route in self.routes.values()}, error)
        else:
            self._lose(cut.names, error)

    def _lose(self, names, why):
        self.spaces.tell("query rows of %d requests were not answered, their step is repeated: %s"
                       % (len(names), why), "route")
        self.lost |= names

    def _drop(self):
        """Of a session that has ended, or does not answer."""
        attend, self.attend = self.attend, None
        self.holds.clear()
        if attend is not None:
            try:
                attend.close(CALL_S)
            except Error as error:
                logger.debug("seats: %s", error)

    def close(self):
        self._drop()
