# SPDX-License-Identifier: Apache-2.0
"""One conversation about one document.

Ways: "route", rows are sent to the document's holders in every layer and step; "fetch" and "local",
the document's KV is fetched or computed before the first step. "rent" (ski rental) starts with
routing, and fetches or computes the KV in the background as soon as routing has cost as much as
that would: whatever the conversation's length, both together cost at most twice the better way.
The step after the KV is complete attends here. The tokens are the same."""
import time
from collections import Counter, namedtuple

import numpy as np
import torch

from .. import chunks, cost, rooms
from ..attend import ROWS_MAX, Part
from ..errors import BusyError, Error, NotFoundError
from .attention import NONE, Cache

WAYS = ("route", "fetch", "local", "rent")
PARTS_MAX = 64  # of a request
LOST = ("ELEASE", "ENOTFOUND", "EREVOKED")  # in addition to retryable errors
COMPUTE = 512  # tokens of a document at a time, if it is computed here

Step = namedtuple("Step", "way us routed_us tokens choice")
Step.__doc__ = """Of Reader.steps. way: how the document was attended; us: duration of the step;
routed_us: of that, waiting for routed rows; choice: the costs, for rent."""


class Reader:
    """A document's token ids, and tokens of the conversation that precede it (prefix). The
    document's KV was computed from position 0 on; its keys are rotated for its position.

    carve: so many of the document's first tokens, whole chunks, are computed here, with the prefix
    before them. The others' KV is as without a prefix, and much of the attention to it goes to the
    first tokens.

    steps has a record of each step, now is the current way.

    page: costs: the daemon's (Client.cost_page()), or a preset. Without one, or while it has no
    costs, "rent" fetches or computes the KV before the first step.
    holders: of the document's KV, as kvd.cost.Holder; None: the daemons that hold it. A preset's
    page has one holder, kvd.cost.Holder(tokens).
    price: further arguments of kvd.cost.Page.decide(), such as home_price(); attend_us: of one
    query token.
    recover: when a holder is lost, compute the KV here and continue; else the step raises."""

    def __init__(self, place, document, *, way="route", prefix=(), page=None, holders=None,
                 price=None, recover=True, rows=None, carve=0):
        if way not in WAYS:
            raise ValueError("way: %r is not one of %s" % (way, ", ".join(WAYS)))
        self.place, self.model, self.geometry = place, place.model, place.geometry
        self.document, self.delta, self.carve = list(document), len(prefix), carve
        if not 0 <= carve < len(self.document) or carve % place.chunk:
            raise ValueError("carve: %d is not a multiple of %d below the document's %d tokens"
                             % (carve, place.chunk, len(self.document)))
        if carve and self.geometry.index:
            raise ValueError("carve: selected tokens keep the KV they were computed with")
        if self.delta and self.geometry.index:
            raise ValueError("prefix: selected tokens keep the positions they were computed at")
        if self.delta and self.geometry.rope is None:
            raise ValueError("prefix: this model's frequencies depend on the length")
        self.page, self.price, self.recover = page, price or {}, recover
        self.holders = holders
        self.cache = Cache(self.geometry)
        self.steps, self.lost, self.now = [], None, "route"
        self._held, self._moves, self._attend = [], None, None
        self._packed = {}  # parts of a step, by rows
        self._routed, self._rows = 0.0, rows or 64 * self.geometry.heads
        if self.delta or carve:
            self._forward([*prefix, *self.document[:carve]])
        self._open(way)

    # ---- the document: remote, in transfer, local ----

    def _open(self, way):
        self.way = way
        if way == "local":
            return self._compute()
        if self.geometry.index:  # index keys are needed here in every way
            self._held = self.place.hold(self.document, "index")
            self._index_here(self._fetched("index"))
            self._release()
        self._held = self.place.hold(self.document, begin=self.carve)
        if self.page is not None and self.holders is None:
            self.holders = holders_of(self._held)
        if way == "fetch":
            try:
                layers = self._fetched("kv")
            except Error as why:
                if not self._recovers(why):
                    raise
                return self._compute()
            return self._here(layers, "fetch")
        self._attend = self.geometry.attend(self.place.client, min(
            self._rows, ROWS_MAX // self.geometry.heads * self.geometry.heads), 2)
        away = self.cache.away
        away.tokens = len(self.document) - self.carve
        away.at = self.cache.layers[0].own()

    def _fetched(self, view):
        return self.place.fetched(self.place.fetch(self._held, view), self._held, view, self.delta)

    def _index_here(self, layers):
        for layer, rows in zip(self.cache.layers, layers):
            layer.update_indexer(rows["index"].transpose(0, 1))

    def _here(self, layers, way):
        """Insert the document's KV, layer by layer: from now on attention is ordinary."""
        away, self.now = self.cache.away, way
        at = away.at if away.tokens else self.cache.layers[0].own()
        away.tokens = 0
        for layer, rows in zip(self.cache.layers, layers):
            layer.insert(*self.geometry.unpack(rows), at)
        self._release()

    def _compute(self):
        """Compute the document at its position, as if it were alone; also after a part was lost."""
        cache, index = Cache(self.geometry), self.geometry.index
        for begin in range(0, len(self.document), COMPUTE):
            self._call(self.document[begin:begin + COMPUTE], cache, first=self.delta + begin)
        if index and not self.cache.layers[0].is_indexer_initialized:
            self._index_here([{"index": layer.indexer_keys[0, :, None]}
                              for layer in cache.layers])
        self._here([{name: rows[self.carve:] for name, rows in
                     self.geometry.pack(layer.keys, layer.values).items()}
                    for layer in cache.layers], "local")

    # ---- rows of one layer, for the attention function ----

    def ask(self, layer, rows, chosen):
        """Send the rows that fit; answer() does the rest. chosen: for each query, its tokens of the
        document; None: all."""
        heads = self.geometry.heads
        most = self._attend.rows // heads
        count = len(rows) // heads
        cuts = [(a, min(a + most, count)) for a in range(0, count, most)]
        begin = time.perf_counter()
        sent = [self._post(seat, layer, rows, chosen, cut) for seat, cut in enumerate(cuts[:2])]
        self._routed += time.perf_counter() - begin
        return layer, rows, chosen, cuts, sent

    def answer(self, asked):
        """-> o [rows, dv], m and l [rows], fp32."""
        layer, rows, chosen, cuts, sent = asked
        begin, attend = time.perf_counter(), self._attend
        o = torch.empty(len(rows), self.geometry.dv)
        m, l = torch.empty(len(rows)), torch.empty(len(rows))
        for i, (a, b) in enumerate(cuts):
            seat, n = i % 2, (b - a) * self.geometry.heads
            to = slice(a * self.geometry.heads, b * self.geometry.heads)
            if sent[i]:
                attend.wait(seat)
                for out, got in ((o, attend.o(seat)), (m, attend.m(seat)), (l, attend.l(seat))):
                    out[to] = torch.from_numpy(got[:n])
            else:
                o[to], m[to], l[to] = 0, -torch.inf, 0
            if i + 2 < len(cuts):
                sent.append(self._post(seat, layer, rows, chosen, cuts[i + 2]))
        self._routed += time.perf_counter() - begin
        return o, m, l

    def _post(self, seat, layer, rows, chosen, cut):
        """False: no query attends to the document."""
        heads = self.geometry.heads
        rows = rows[cut[0] * heads:cut[1] * heads]
        q = rows.view(torch.uint8).view(-1).numpy()
        self._attend.q(seat)[:len(q)] = q
        some = (0, len(rows))
        if chosen is None:
            if some not in self._packed:  # the same in each layer of the step
                self._packed[some] = self._attend.pack(
                    Part(h.hold, rows=some, tokens=h.tokens, delta=self.delta)
                    for h in self._held)
            parts = self._packed[some]
        else:
            parts = self._attend.pack(
                Part(h.hold, rows=some, tokens=h.tokens, select=s) for h in self._held
                for s in [select(chosen[cut[0]:cut[1], h.begin:h.begin + h.tokens])]
                if s is not None)
        if len(parts) > PARTS_MAX:
            raise ValueError("document: %d parts (limit %d)" % (len(parts), PARTS_MAX))
        if parts:
            self._attend.post(seat, layer, parts)
        return bool(parts)

    # ---- steps ----

    def _call(self, tokens, cache, reader=None, first=None):
        """first: position of the first token, None: behind the cache's."""
        positions = None if first is None else torch.arange(first, first + len(tokens))[None]
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache,
                              position_ids=positions, use_cache=True, kvd=reader).logits[0]

    def _forward(self, tokens):
        self._packed.clear()
        return self._call(tokens, self.cache, self)

    def step(self, tokens):
        """Logits [tokens, vocabulary]."""
        begin, self._routed = time.perf_counter(), 0.0
        choice, before = None, self.cache.get_seq_length()
        try:
            if self.way == "rent":
                choice = self._turn(len(tokens))
            logits = self._forward(tokens)
        except Error as why:
            if not self.cache.away.tokens or not self._recovers(why):
                raise
            self.cache.cut(before)
            self._drop_moves()
            self._compute()
            logits = self._forward(tokens)
        us = 1e6 * (time.perf_counter() - begin)
        self.steps.append(Step(self.now, us, 1e6 * self._routed, len(tokens), choice))
        return logits

    def prices(self, tokens=1):
        """Costs of the ways, after the steps made so far and with one of so many tokens:
        kvd.cost.Choice. None: costs are unknown."""
        if self.page is None or not self.holders:
            return None
        more = dict(self.price, attend_us=tokens * self.price.get("attend_us", 0))
        try:
            return self.page.decide(
                self.geometry.cost_model(), self.holders, query_tokens=tokens,
                steps_made=len(self.steps), shifted=bool(self.delta), **more)
        except NotFoundError:  # not measured for these daemons
            return None

    def _turn(self, tokens):
        """Ski rental, before a step: fetch or compute the KV now, or is it complete?"""
        if not self.cache.away.tokens:
            return None
        choice = None
        if self._moves is None:
            try:
                choice = self.prices(tokens)
            except BusyError:  # the page is being written: retry in the next step
                return None
            if choice is None or choice.way == "fetch":
                self._moves = self.place.fetch(self._held, "kv")
            elif choice.way == "local":
                self._compute()
        elif all(move.state == rooms.SUCCESS for move, _ in self._moves):
            moves, self._moves = self._moves, None
            self._here(self.place.fetched(moves, self._held, "kv", self.delta), "fetch")
        elif any(move.state == rooms.FAILED for move, _ in self._moves):
            self._drop_moves()  # and it is tried again
        return choice

    def generate(self, tokens, count):
        """Greedy. -> (tokens, logits of each)"""
        out, seen = [], []
        while len(out) < count:
            logits = self.step(tokens)[-1]
            seen.append(logits)
            tokens = [int(logits.argmax())]
            out += tokens
        return out, seen

    def _recovers(self, why):
        """Whether the document is computed here instead."""
        if not self.recover or not (why.retryable or why.code in LOST):
            return False
        self.lost = why
        return True

    # ---- the end ----

    def _drop_moves(self):
        self.place.drop(self._moves or [])
        self._moves = None

    def _release(self):
        """Close; no request is sent any more."""
        if self._attend is not None:
            self._attend.close()
            self._attend = None
        for held in self._held:
            held.hold.close()
        self._held = []

    def close(self):
        self._drop_moves()
        self._release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def holders_of(held):
    """The holders of all parts, as kvd.cost.Holder. The local daemon has no cost."""
    tokens = Counter()
    for one in held:
        tokens.update(chunks.holders_of(one.hold))
    return [cost.Holder(tokens=n, peer=peer, gpu=gpu) for (peer, gpu), n in tokens.items()]


def select(chosen):
    """A table of selected tokens per query -> an array of queries x tokens; None: no query selects
    any."""
    most = int(chosen.sum(-1).max())
    if not most:
        return None
    table = np.full((len(chosen), most), NONE, np.uint32)
    for row, seen in zip(table, chosen.numpy()):
        at = np.flatnonzero(seen)
        row[:len(at)] = at
    return table
