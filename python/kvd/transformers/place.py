# SPDX-License-Identifier: Apache-2.0
"""A model's KV in pages and chunks: computed KV is stored, KV that is to be attended here is
fetched."""
import contextlib
import hashlib
import json
import struct
import time
from collections import namedtuple

import torch

from .. import rooms
from ..errors import BusyError, Error, NotFoundError
from ..memory import Memory
from .geometry import Geometry

START_S = 60  # the daemon prepares its chunk memory
REMOTE_S = 10  # query of other daemons
LEASE_S = 600
SUMMED = 1 << 24  # values of a parameter at a time
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FETCH_S = 300  # of a document

Held = namedtuple("Held", "hold begin tokens")
Held.__doc__ = """Tokens [begin, begin + tokens) of a document."""


def chunk_ids(tokens, size):
    """An id for each `size` tokens and all tokens before them; the last may have fewer."""
    ids, last = [], b""
    for begin in range(0, len(tokens), size):
        part = tokens[begin:begin + size]
        last = hashlib.sha256(last + struct.pack("<%dI" % len(part), *part)).digest()
        ids.append(last)
    return ids


def revision_of(model):
    """A name for everything that decides a model's KV: its configuration, and its parameters in
    memory, by sums of their bits, plain and weighted by position. Neither a name nor a commit
    covers changes after loading. It reads all parameters once, at the speed of memory."""
    config = {name: value for name, value in model.config.to_dict().items()
              if name != "transformers_version" and not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            flat, sums = tensor.detach().reshape(-1).contiguous(), [0, 0]
            for at in range(0, flat.numel(), SUMMED):
                bits = flat[at:at + SUMMED].view(BITS[flat.element_size()]).to(torch.int64)
                place = torch.arange(at + 1, at + 1 + bits.numel(), device=bits.device)
                sums = [sums[0] + int(bits.sum()), sums[1] + int((bits * place).sum())]
            digest.update(("%s %s %s %s" % (name, tuple(tensor.shape), tensor.dtype,
                                            sums)).encode())
    return digest.hexdigest()


def _still(move):
    """End a move: its pages are free when this returns."""
    while True:
        try:
            if move.state in (rooms.SUCCESS, rooms.FAILED):
                break
        except Error:  # closed, or ended with its session
            return
        with contextlib.suppress(Error):  # its state shows the end
            move.abort()
        time.sleep(0.001)
    with contextlib.suppress(Error):
        move.close()


class Place:
    """Pages for `tokens` tokens at a time, and the space of chunks of this model's KV: models with
    equal configurations and parameters share it."""

    def __init__(self, client, model, *, tokens, chunk=16):
        self.client, self.model, self.chunk = client, model, chunk
        self.geometry = geometry = Geometry(model)
        pages = -(-tokens // chunk)
        layout = geometry.layout(chunk, pages)
        self._memory = Memory(layout.buffers[0])
        self._region = client.register(self._memory, name="pages")
        self.pool = client.pool(layout, [self._region],
                                name="%s.%s" % (geometry.name, geometry.type))
        self._views = {name: view["layers"] for name, view in layout.views.items()}
        self._free, self._pages = list(range(pages)), pages
        # index keys are fetched alone, and a fetch covers all views of a space
        revision = revision_of(model)
        self.spaces = {name: self._space(revision, name) for name in self._views}

    def _space(self, revision, view):
        end = time.monotonic() + START_S
        while True:
            try:
                return self.client.space(
                    self.pool, model=self.geometry.name, scheme="sha256 %d" % self.chunk,
                    tokens=self.chunk, revision=revision, views=(view,))
            except BusyError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    # ---- pages ----

    def take(self, tokens):
        """BusyError: too many pages are in use."""
        count = -(-tokens // self.chunk)
        if count > self._pages:
            raise ValueError("tokens: %d need %d pages (%d in all)"
                             % (tokens, count, self._pages))
        if count > len(self._free):
            raise BusyError("tokens: %d need %d pages (%d free)"
                            % (tokens, count, len(self._free)), "EBUSY", 0, "op", True)
        pages, self._free = self._free[:count], self._free[count:]
        return pages

    def give(self, pages):
        self._free += pages

    def _rows(self, view, layer, field):
        """All pages of a field, as a tensor [page, token, head, value]."""
        row = next(f for f in self._views[view][layer] if f["name"] == field)
        count = self._pages * row["page_stride"]
        flat = torch.from_numpy(self._memory.array()[row["offset"]:row["offset"] + count])
        return flat.view(self.geometry.dtype).view(self._pages, self.chunk, row["units"], -1)

    def write(self, view, layer, field, pages, rows):
        at = self._rows(view, layer, field)
        for i, page in enumerate(pages):
            part = rows[i * self.chunk:(i + 1) * self.chunk]
            at[page, :len(part)] = part

    def read(self, view, layer, field, pages, tokens):
        """A copy of rows [tokens, heads, values]."""
        return self._rows(view, layer, field)[pages].flatten(0, 1)[:tokens]

    # ---- chunks ----

    def put(self, tokens, cache, begin=0, end=None):
        """Store the KV of a document's tokens [begin, end), in whole chunks except the last, from a
        transformers cache that has the document from its first token on."""
        geometry, end = self.geometry, len(tokens) if end is None else end
        ids = chunk_ids(tokens, self.chunk)[begin // self.chunk:-(-end // self.chunk)]
        pages, moves = self.take(end - begin), []
        try:
            for number, layer in enumerate(cache.layers):
                rows = geometry.pack(layer.keys, layer.values)
                for field, all_tokens in rows.items():
                    self.write("kv", number, field, pages, all_tokens[begin:end])
                if geometry.index:
                    self.write("index", number, "index", pages,
                               layer.indexer_keys[0, begin:end, None])
            view = rooms.View(pages, first_token=begin, tokens=(begin, end))
            for name, space in self.spaces.items():
                moves.append(space.put(ids, {name: view}, begin // self.chunk))
                moves[-1].wait()
        finally:
            for move in moves:
                _still(move)
            self.give(pages)

    def hold(self, tokens, view="kv", begin=0):
        """All chunks of a document from token `begin` on, from any daemon. -> [Held]"""
        ids, held = chunk_ids(tokens, self.chunk), []
        at = begin // self.chunk
        try:
            while at < len(ids):
                hold = self.spaces[view].hold(ids[at:], at, remote=REMOTE_S, lease=LEASE_S)
                first = at * self.chunk
                at += hold.chunks
                held.append(Held(hold, first, min(at * self.chunk, len(tokens)) - first))
                if not hold.chunks:
                    raise NotFoundError("document: no daemon has its tokens from %d on" % first,
                                        "ENOTFOUND", 0, "op", False)
        except BaseException:
            for one in held:
                one.hold.close()
            raise
        return held

    def fetch(self, held, view):
        """-> [(move, pages)]"""
        moves = []
        try:
            for hold, begin, tokens in held:
                pages = self.take(tokens)
                moves.append((None, pages))
                moves[-1] = (hold.fetch({view: rooms.View(
                    pages, first_token=begin, tokens=(begin, begin + tokens))},
                    deadline=FETCH_S), pages)
        except BaseException:
            self.drop(moves)
            raise
        return moves

    def drop(self, moves):
        """Abandoned moves: their pages are free once no byte is written to them."""
        for move, pages in moves:
            if move is not None:
                _still(move)
            self.give(pages)

    def fetched(self, moves, held, view, delta=0):
        """The fetched rows, per layer {field: rows}, of tokens that are used `delta` positions
        later than they were computed. Frees the pages, also after an error."""
        try:
            for move, _ in moves:
                move.wait()
                if delta:
                    move.splice(delta, self.geometry.rope, key=self.geometry.key,
                                type=self.geometry.type)
            return [{f["name"]: torch.cat([self.read(view, layer, f["name"], pages, h.tokens)
                                           for (_, pages), h in zip(moves, held)])
                     for f in fields} for layer, fields in self._views[view].items()]
        finally:
            self.drop(moves)

    def close(self):
        for space in self.spaces.values():
            space.close()
        self.pool.unregister()
        self._region.unregister()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
