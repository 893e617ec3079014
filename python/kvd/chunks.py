# SPDX-License-Identifier: Apache-2.0
"""Chunks: KV under ids, which the daemon finds, shares and keeps after its engine has ended.

    space = client.space(pool, model="llama-3.1-8b", scheme="sha256/16", tokens=256)
    space.put(ids, {"kv": pages}).wait()
    ...
    with space.hold(ids) as hold:                       # any engine, at any time
        hold.fetch({"kv": View(pages, tokens=(0, hold.tokens))}).wait()

An id is 32 bytes that engines compute alike for the same tokens and all tokens before them. An
engine that does not know the position of its chunks in their prompt passes first=ANYWHERE to all
calls: only engines that do so, too, find these chunks, and tokens count from a call's first one."""
from collections import namedtuple

from . import _check, _kvd
from .attend import TYPES, _choice, _rope_pack
from .errors import Error, error_make
from .layout import Layout
from .rooms import Awaited, Status, views_pack, wait_pack

ID_BYTES = 32
IDS_MAX = 4096  # per call
ANYWHERE = _check.U32  # first: the position of the chunks in their prompt is unknown
REMOTE_MS_MAX = 60000
GRACE_MS_MAX = 60000
LEASE_MS_MAX = 600000
WHY_S = 5  # timeout of the query for a failed move's message, in seconds

Found = namedtuple("Found", "chunks tokens")
Found.__doc__ = """Stored chunks, from the first on without a gap, and their tokens."""

Facts = namedtuple("Facts", "chunks done there left_out prefix_tokens error")
Facts.__doc__ = """Result of a move. chunks: accepted. done: moved or already stored. there,
left_out: of a put, chunks already stored, and chunks without space or stored at another position;
of a withdrawal, chunks that were published, and that were not. prefix_tokens: moved without a gap
from the first on. error: an exception, or None."""


ChunkEvent = namedtuple("ChunkEvent", "seq id space first tokens tier put")
ChunkEvent.__doc__ = """A chunk was added to (put) or removed from a tier: "memory", "file" or "pages"
(of an engine). space: its digest, as in chunk.list. first: index of the chunk in its prompt."""


def ids_pack(ids):
    """Ids as one bytes object, from a list of 32 bytes each, or from such an object."""
    if isinstance(ids, (bytes, bytearray, memoryview)):
        packed = bytes(ids)
    else:
        ids = list(ids)
        for i, one in enumerate(ids):
            if not isinstance(one, (bytes, bytearray)) or len(one) != ID_BYTES:
                raise _check.wrong("ids[%d]" % i, one, "%d bytes" % ID_BYTES)
        packed = b"".join(ids)
    if not packed or len(packed) % ID_BYTES or len(packed) > IDS_MAX * ID_BYTES:
        raise ValueError("ids: %d bytes (1 to %d ids of %d bytes)"
                         % (len(packed), IDS_MAX, ID_BYTES))
    return packed


def _named(ids, first):
    return ids_pack(ids), _check.integer("first", first, 0, _check.U32)


def _remote(remote):
    """Seconds to milliseconds; None: no query."""
    if remote is None:
        return 0
    return _check.integer("remote", max(1, round(1000 * _check.seconds("remote", remote))), 1,
                          REMOTE_MS_MAX)


def _lease(lease):
    """Seconds to milliseconds; None: the default."""
    if lease is None:
        return 0
    return _check.integer("lease", max(1, round(1000 * _check.seconds("lease", lease))), 1,
                          LEASE_MS_MAX)


class Move(Awaited):
    """A put, fetch, publication or withdrawal in progress. In the states SUCCESS and FAILED its
    pages belong to the engine again. An unreferenced move is aborted. A call without a reply in
    time returns a move as well, because its pages may be in motion: it is aborting, and fails."""

    def __init__(self, move, kind, pages=None):
        self._move, self.kind, self._pages = move, kind, pages

    @property
    def state(self):
        """The state: a read of shared memory, without a system call."""
        return self._move.state()

    def read(self):
        """State and counters, from shared memory."""
        return Status(*self._move.read(), first_token=-1, done=0, rows=0, moved_us=0)

    def show(self, timeout=None):
        """The daemon's report of the move. -> Facts"""
        facts = self._move.show(_check.seconds("timeout", timeout))
        return Facts(*facts[:5], error_make(*facts[5]) if facts[5] else None)

    def error(self):
        """Why the move failed or is aborting, as an exception; None otherwise."""
        status = self.read()
        if not status.error:
            return None
        try:
            told = self.show(WHY_S).error
        except Error:
            told = None
        return told or error_make(status.error, _kvd.code_name(status.error),
                                  status.retryable, "op", "%s failed" % self)

    def splice(self, delta, rope, *, key, type):
        """Rotate the keys of a fetch that has succeeded, in its pages, for tokens that are used
        `delta` positions later than they were computed: once, in fp32, rounded to their type.
        rope: a kvd.Rope; key: the field of the layout with the keys, of MLA that of the rows; type:
        "bf16", "fp16", "fp32" or "fp8_e4m3"; in GPU memory "bf16", by a kernel of the GPU, in the
        context that has the memory. The call waits for it. ESTATE: the fetch has not succeeded, or
        its keys were rotated before. EREQUIRE: not this memory, or a kvd that was built without
        nvcc. After a fault of a running GPU the keys are undefined: fetch them again."""
        if self._pages is None:
            raise ValueError("splice: %s has no keys of its own" % self)
        pool, views = self._pages
        self._move.splice(pool._pool, views, _check.instance("key", key, str, "a str"),
                          _choice("type", type, TYPES), _rope_pack(rope),
                          _check.integer("delta", delta, -(1 << 31) + 1, (1 << 31) - 1))

    def abort(self, timeout=None):
        """Abort the move. The state becomes FAILED once no byte of it can move."""
        self._move.abort(_check.seconds("timeout", timeout))

    def close(self, timeout=None):
        """Close the move, in any state. A move in progress is aborted, and its pages may change
        until it has ended: call abort() and wait first."""
        self._move.close(_check.seconds("timeout", timeout))

    def __str__(self):
        return "%s of chunks" % self.kind


Holder = namedtuple("Holder", "peer first chunks tokens gpu")
Holder.__doc__ = """A daemon with chunks of a hold. peer: its instance, and gpu: whether most are in
its GPU memory, as in kvd.cost.Holder; first: number of its first chunk in the hold."""


class Hold:
    """Chunks that are kept until the lease ends, the hold is closed, or its client ends.
    remote: number of the last chunks, from the first one on that another daemon holds."""

    def __init__(self, space, hold):
        self.space, self._hold = space, hold
        self.chunks, self.tokens, self.first, self.remote, self.secret = hold.facts()

    def fetch(self, views, *, pool=None, wait=None, deadline=None, timeout=None, post=False):
        """Read the tokens that the views name into pages: {name: pages or View}, each view of
        the space. wait as in Room.bind(); deadline: seconds, a later fetch fails; post: without a
        reply, as in Space.put().

        A gather: {name: View(pages, layers=(7, 8), select=tokens)}, one view. Only these
        tokens are read, at most 65536, of these layers. tokens: a list or array of the request's
        token numbers, ascending; tokens[i] is at place i of the pages, which is place % page
        tokens of page number place // page tokens. It is always posted: EINVAL and ERANGE fail
        the move. ENOTFOUND: a chunk has no holder any more; then Facts.prefix_tokens is the range
        from tokens[0] on in which all were read. Such keys cannot be spliced. -> Move"""
        ms = 0 if deadline is None else \
            _check.integer("deadline", max(1, round(1000 * deadline)), 1, _check.U32)
        pool, views = self.space.pool_of(pool), views_pack(views)
        post = _check.flag("post", post) or any(view[-1] is not None for view in views)
        return Move(self._hold.fetch(pool._pool, views, wait_pack(wait), ms,
                                     _check.seconds("timeout", timeout), post), "fetch",
                    (pool, views))

    def holders(self, timeout=None):
        """Other daemons with chunks of the hold, in the order of the chunks: of each piece the one
        that is read, and the one with the same `first` that replaces it if it fails.
        -> (Holder, …)"""
        return tuple(Holder(*one) for one in
                     self._hold.holders(_check.seconds("timeout", timeout)))

    def close(self, timeout=None):
        """Close the hold. Fetches in progress continue."""
        self._hold.close(_check.seconds("timeout", timeout))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def holders_of(hold, timeout=None):
    """{(peer, gpu): tokens} of the daemons that are read for a hold; the own one is not among them.
    The others of Hold.holders() replace one that fails."""
    tokens, end = {}, 0
    for there in hold.holders(timeout):
        if there.first >= end:
            where = there.peer, there.gpu
            tokens[where] = tokens.get(where, 0) + there.tokens
            end = there.first + there.chunks
    return tokens


class Space:
    """Made by Client.space()."""

    def __init__(self, client, pool, *, model, scheme, tokens, revision=None, rope=None,
                 views=None, timeout=None):
        from .client import Pool
        self.client, layout = client, None
        if isinstance(pool, (Layout, str)):
            layout, pool = pool if isinstance(pool, str) else pool.text(), None
        elif not isinstance(pool, Pool):
            raise _check.wrong("pool", pool, "a pool of Client.pool(), or a Layout")
        self.pool, self.tokens = pool, _check.integer("tokens", tokens, 1, _check.U32)
        self._space = _kvd.Space(
            client._kvd, pool and pool._pool, layout, _check.instance("model", model, str,
                                                                      "a str"),
            _check.text("revision", revision),
            _check.instance("scheme", scheme, str, "a str"), _check.text("rope", rope),
            self.tokens, None if views is None else tuple(views),
            _check.seconds("timeout", timeout))

    def pool_of(self, pool):
        """The pool of a call, by default that of the space."""
        pool = pool or self.pool
        if pool is None:
            raise ValueError("pool: the space was opened with a layout alone")
        return pool

    def find(self, ids, first=0, timeout=None):
        """Number of consecutive chunks of this rank that are stored, from the first on. They may
        be evicted at any time: hold() keeps them. -> Found"""
        return Found(*self._space.find(_named(ids, first),
                                       _check.seconds("timeout", timeout)))

    def hold(self, ids, first=0, *, lease=None, remote=None, timeout=None):
        """Keep the stored chunks among these for `lease` seconds (default 10), or until the hold
        is closed. remote: seconds for queries of other daemons (chunk_peers, chunk_index) for the
        chunks that follow; they may lie at up to eight of them, in pieces.
        -> Hold, which may be empty"""
        return Hold(self, self._space.hold(_named(ids, first), _lease(lease),
                                           _remote(remote), _check.seconds("timeout", timeout)))

    def join(self, secret, *, lease=None, timeout=None):
        """Join another session's hold, by its Hold.secret. -> Hold"""
        return Hold(self, self._space.join(
            _check.instance("secret", secret, bytes, "bytes"), _lease(lease),
            _check.seconds("timeout", timeout)))

    def put(self, ids, views, first=0, *, pool=None, wait=None, timeout=None, post=False,
            durable=False):
        """Store chunks from pages: {name: pages or View}, each view of the space. Their tokens
        start at the first chunk's, and only the last chunk may have fewer. Chunks that are
        already stored, or that find no space, are left out. wait as in Room.bind(): no page is
        read before. post: written to shared memory, without a reply; a refusal makes the move
        FAILED, and error() has the reason. durable: succeeds once all of them would survive a
        loss of power. -> Move"""
        pool = self.pool_of(pool)
        return Move(self._space.put(pool._pool, _named(ids, first),
                                    views_pack(views), wait_pack(wait),
                                    _check.seconds("timeout", timeout),
                                    _check.flag("post", post),
                                    _check.flag("durable", durable), False), "put")

    def publish(self, ids, views, first=0, *, pool=None, wait=None, timeout=None, post=False):
        """Make chunks readable in the engine's pages, without a copy; arguments as of put(). After
        its success the pages must not be written until withdraw() of these chunks has ended, or
        the pool or the client is closed. A page must hold tokens of one chunk only.
        -> Move"""
        pool = self.pool_of(pool)
        return Move(self._space.put(pool._pool, _named(ids, first),
                                    views_pack(views), wait_pack(wait),
                                    _check.seconds("timeout", timeout),
                                    _check.flag("post", post), False, True), "publication")

    def withdraw(self, ids, first=0, *, grace=0.1, timeout=None):
        """Stop serving this client's publications of them, even to holders. Reads in progress
        may continue for `grace` seconds; then they fail, or continue with another holder. In
        the states SUCCESS and FAILED no reader is left. -> Move"""
        ms = 0 if grace == 0 else _check.integer(
            "grace", max(1, round(1000 * _check.seconds("grace", grace))), 1, GRACE_MS_MAX)
        return Move(self._space.withdraw(_named(ids, first), ms,
                                         _check.seconds("timeout", timeout)), "withdrawal")

    def drop(self, ids, first=0, timeout=None):
        """Delete them; chunks in use are deleted afterwards."""
        self._space.drop(_named(ids, first), _check.seconds("timeout", timeout))

    def close(self, timeout=None):
        """Close the space. Its holds and moves continue, its chunks are kept."""
        self._space.close(_check.seconds("timeout", timeout))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class ChunkEvents:
    """Made by Client.chunk_events()."""

    def __init__(self, client):
        self._client, self._since, self._instance = client, 0, None

    def read(self, timeout=None):
        """Changes since the last read. -> (whole, events). whole: discard all earlier state; the
        events then list all chunks, each as added to its tier. It is set at the first read, after
        a restart of the daemon, and when events were missed."""
        events, since = [], self._since
        args = {} if self._instance is None else {"instance": self._instance}
        while True:
            told = self._client.command("chunk.events", timeout, since=since, **args)
            since = told["seq"]
            if told["lost"]:
                events = self._all(timeout, since)
                break
            events += [ChunkEvent(e["seq"], bytes.fromhex(e["id"]), e["space"], e["first"],
                                  e["tokens"], e["tier"], e["put"]) for e in told["events"]]
            if not told["more"]:
                break
        # not earlier: after a failed read the same events are read again
        self._since, self._instance = since, told["instance"]
        return told["lost"], events

    def _all(self, timeout, since):
        events, at = [], 0
        while True:
            page = self._client.command("chunk.snapshot", timeout, at=at)
            events += [ChunkEvent(since, bytes.fromhex(c["id"]), c["space"],
                                  c["first"], c["tokens"], tier, True)
                       for c in page["chunks"] for tier in ("memory", "file", "pages") if c[tier]]
            at = page["next"]
            if not at:
                return events
