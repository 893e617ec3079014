# SPDX-License-Identifier: Apache-2.0
"""Chunks: KV that has a name, is found, shared and kept by the daemon, and outlives its engine.

    space = client.space(pool, model="llama-3.1-8b", scheme="sha256/16", tokens=256)
    space.put(ids, {"kv": pages}).wait()
    ...
    with space.hold(ids) as hold:                       # another engine, another day
        hold.fetch({"kv": View(pages, tokens=(0, hold.tokens))}).wait()

An id is 32 bytes that engines compute alike for the same tokens and all before them. An engine
that does not know where in their prompt its chunks are says first=ANYWHERE in all calls: they are
found by those alone who do so too, and tokens are counted from a call's first chunk on."""
from collections import namedtuple

from . import _check, _kvd
from .errors import Error, error_make
from .layout import Layout
from .rooms import Awaited, Status, views_pack, wait_pack

ID_BYTES = 32
IDS_MAX = 4096  # of one call
ANYWHERE = _check.U32  # first: where in their prompt chunks are is not known
FAR_MS_MAX = 60000
GRACE_MS_MAX = 60000
LEASE_MS_MAX = 600000
WHY_S = 5  # for the daemon's words about a move that has failed

Found = namedtuple("Found", "chunks tokens")
Found.__doc__ = """What is there: chunks from the first on, without a gap, and their tokens."""

Facts = namedtuple("Facts", "chunks done there left_out prefix_tokens error")
Facts.__doc__ = """Of a move. chunks: taken; done: moved, or there before; there, left_out: of
a put, there before, and no room for them, or stored at another place; of a withdrawal chunks
were published and left_out were not; prefix_tokens: moved without a gap from the first on; error:
an exception, or None."""


ChunkEvent = namedtuple("ChunkEvent", "seq id space first tokens tier put")
ChunkEvent.__doc__ = """A chunk that came (put) to a tier, "memory", "file" or "pages" (an engine's), or
went from it. space: the digest that chunk.list has for it; first: which chunk of its prompt it is."""


def ids_pack(ids):
    """Ids as one piece of bytes: a list of 32 bytes each, or such a piece."""
    if isinstance(ids, (bytes, bytearray, memoryview)):
        packed = bytes(ids)
    else:
        ids = list(ids)
        for i, one in enumerate(ids):
            if not isinstance(one, (bytes, bytearray)) or len(one) != ID_BYTES:
                raise _check.wrong("ids[%d]" % i, one, "%d bytes" % ID_BYTES)
        packed = b"".join(ids)
    if not packed or len(packed) % ID_BYTES or len(packed) > IDS_MAX * ID_BYTES:
        raise ValueError("ids: %d bytes; 1 to %d ids of %d bytes are wanted"
                         % (len(packed), IDS_MAX, ID_BYTES))
    return packed


def _first(first):
    return _check.integer("first", first, 0, _check.U32)


def _far(far):
    """Seconds, None: nobody is asked."""
    if far is None:
        return 0
    return _check.integer("far", max(1, round(1000 * _check.seconds("far", far))), 1,
                          FAR_MS_MAX)


def _lease(lease):
    """Seconds, None: the preset."""
    if lease is None:
        return 0
    return _check.integer("lease", max(1, round(1000 * _check.seconds("lease", lease))), 1,
                          LEASE_MS_MAX)


class Move(Awaited):
    """A put, a fetch, a publication or a withdrawal under way. When its state is SUCCESS or FAILED its pages are the
    engine's again. One that is dropped is aborted. One whose call was not answered in time
    is had all the same, for its pages may be in motion: it is aborting, and fails."""

    def __init__(self, move, kind):
        self._move, self.kind = move, kind

    @property
    def state(self):
        """A read of shared memory: no system call."""
        return self._move.state()

    def read(self):
        """State and figures, from shared memory."""
        return Status(*self._move.read(), first_token=-1, done=0, rows=0, moved_us=0)

    def show(self, timeout=None):
        """Facts, as the daemon tells them."""
        facts = self._move.show(_check.seconds("timeout", timeout))
        return Facts(*facts[:5], error_make(*facts[5]) if facts[5] else None)

    def error(self):
        """Why it failed, or is aborting, as an exception; None if it does neither."""
        status = self.read()
        if not status.error:
            return None
        try:
            told = self.show(WHY_S).error
        except Error:
            told = None
        return told or error_make(status.error, _kvd.code_name(status.error),
                                  status.retryable, "op", "%s failed" % self)

    def abort(self, timeout=None):
        """The state becomes FAILED once nothing of the move can move."""
        self._move.abort(_check.seconds("timeout", timeout))

    def close(self, timeout=None):
        """Any state; what has not ended is aborted, and its pages may change until it has:
        abort() and wait before."""
        self._move.close(_check.seconds("timeout", timeout))

    def __str__(self):
        return "%s of chunks" % self.kind


Holder = namedtuple("Holder", "peer chunks tokens")
Holder.__doc__ = "A daemon with chunks of a hold. peer: its instance, as in kvd.cost.Holder."


class Hold:
    """Chunks that stay until the lease ends, the hold is closed, or its client goes.
    far: the last so many of them are at another daemon."""

    def __init__(self, space, hold):
        self.space, self._hold = space, hold
        self.chunks, self.tokens, self.first, self.far, self.secret = hold.facts()

    def fetch(self, views, *, pool=None, wait=None, deadline=None, timeout=None, post=False):
        """Read into pages the tokens that the views name: {name: pages or View}, each view
        of the space. wait as in Room.bind(); deadline: seconds, what is not there by then
        fails the move; post: without an answer, as Space.put(). -> Move"""
        ms = 0 if deadline is None else \
            _check.integer("deadline", max(1, round(1000 * deadline)), 1, _check.U32)
        pool = self.space.pool_of(pool)
        return Move(self._hold.fetch(pool._pool, views_pack(views), wait_pack(wait), ms,
                                     _check.seconds("timeout", timeout),
                                     _check.flag("post", post)), "fetch")

    def holders(self, timeout=None):
        """Who has its last `far` chunks: who is asked for them, and who goes on when that one
        fails. -> (Holder, …)"""
        return tuple(Holder(*one) for one in
                     self._hold.holders(_check.seconds("timeout", timeout)))

    def close(self, timeout=None):
        """What reads by it goes on."""
        self._hold.close(_check.seconds("timeout", timeout))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Space:
    """Of Client.space()."""

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
        """The one of a call, or else that of the space."""
        pool = pool or self.pool
        if pool is None:
            raise ValueError("pool: the space was opened with a layout alone")
        return pool

    def find(self, ids, first=0, timeout=None):
        """How many of these chunks, which follow each other, are there from the first on, for
        this rank. They may leave at any time: hold() keeps them. -> Found"""
        return Found(*self._space.find(ids_pack(ids), _first(first),
                                       _check.seconds("timeout", timeout)))

    def hold(self, ids, first=0, *, lease=None, far=None, timeout=None):
        """What is there of them stays for `lease` seconds (ten), or until it is closed. far:
        what follows is asked of the daemons of chunk_peers and those that chunk_index name,
        for at most so many seconds.
        -> Hold, perhaps of nothing"""
        return Hold(self, self._space.hold(ids_pack(ids), _first(first), _lease(lease),
                                           _far(far), _check.seconds("timeout", timeout)))

    def join(self, secret, *, lease=None, timeout=None):
        """The chunks of another session's hold, by Hold.secret. -> Hold"""
        return Hold(self, self._space.join(
            _check.instance("secret", secret, bytes, "bytes"), _lease(lease),
            _check.seconds("timeout", timeout)))

    def put(self, ids, views, first=0, *, pool=None, wait=None, timeout=None, post=False,
            durable=False):
        """Store chunks from pages: {name: pages or View}, each view of the space; their
        tokens begin at the first chunk's, and only the last may be short of some. What is
        there already is left out, and what finds no room. wait as in Room.bind(): nothing is
        read before. post: written into shared memory, without an answer; what the daemon
        refuses makes the move FAILED, and error() says why. durable: it succeeds when all
        would outlast a loss of power. -> Move"""
        pool = self.pool_of(pool)
        return Move(self._space.put(pool._pool, ids_pack(ids), _first(first),
                                    views_pack(views), wait_pack(wait),
                                    _check.seconds("timeout", timeout),
                                    _check.flag("post", post),
                                    _check.flag("durable", durable), False), "put")

    def publish(self, ids, views, first=0, *, pool=None, wait=None, timeout=None, post=False):
        """Chunks that are found and read in the pages themselves, which nothing copies; the
        rest as put(). Once it has succeeded the pages must not be written until withdraw() of
        these chunks has ended, or the pool has gone, or the client. A page holds tokens of
        one chunk alone. -> Move"""
        pool = self.pool_of(pool)
        return Move(self._space.put(pool._pool, ids_pack(ids), _first(first),
                                    views_pack(views), wait_pack(wait),
                                    _check.seconds("timeout", timeout),
                                    _check.flag("post", post), False, True), "publication")

    def withdraw(self, ids, first=0, *, grace=0.1, timeout=None):
        """What this client has published of them is found no more, whoever holds it. What reads
        the pages by then may go on for `grace` seconds, then it fails, or goes on with another
        holder. When the state is SUCCESS or FAILED nobody reads them. -> Move"""
        ms = 0 if grace == 0 else _check.integer(
            "grace", max(1, round(1000 * _check.seconds("grace", grace))), 1, GRACE_MS_MAX)
        return Move(self._space.withdraw(ids_pack(ids), _first(first), ms,
                                         _check.seconds("timeout", timeout)), "withdrawal")

    def drop(self, ids, first=0, timeout=None):
        """Forget them; what is in use goes when it is not."""
        self._space.drop(ids_pack(ids), _first(first), _check.seconds("timeout", timeout))

    def close(self, timeout=None):
        """Its holds and moves go on, its chunks stay."""
        self._space.close(_check.seconds("timeout", timeout))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class ChunkEvents:
    """Of Client.chunk_events()."""

    def __init__(self, client):
        self._client, self._since, self._instance = client, 0, None

    def read(self, timeout=None):
        """What came and went since the last read. -> (whole, events): whole: what was known
        is void, as at the first read and when the daemon is another one, or some events were
        missed; then the events are all that there is, each put to where it is."""
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
        # not before: what was read in vain by then is read again
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
