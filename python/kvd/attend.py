# SPDX-License-Identifier: Apache-2.0
"""Attention next to the KV: query rows are sent to chunks, of this daemon and of others, and
their results are returned.

    attend = client.attend(rows=16, heads=16, dqk=576, dv=512, kind="mla", q_type="bf16",
                           kv_type="bf16", scale=576 ** -0.5, key="kv")
    packed = attend.pack([Part(hold)])          # once a step
    attend.q(0)[:] = rows                       # of one seat, of one layer
    attend.post(0, layer, packed)
    attend.wait(0)
    o, m, l = attend.o(0), attend.m(0), attend.l(0)

Row t * heads + h is head h of query token t. o covers all tokens of the parts, m is the largest
score, l the sum of exp(score - m); a row without tokens has o 0, m -inf and l 0. The engine merges
them with its own attention over other tokens (mine), which it computes between post and wait:

    top = np.maximum(m, mine.m)
    w, w_mine = l * np.exp(m - top), mine.l * np.exp(mine.m - top)
    o = (w[:, None] * o + w_mine[:, None] * mine.o) / (w + w_mine)[:, None]

A kernel that returns the log-sum-exp has m = LSE and l = 1. Exponentials and logarithms are natural
(base e), as those of FlashAttention, torch and vLLM; an LSE of base 2, such as FlashInfer's, is
multiplied by ln 2 before."""
import contextlib
from array import array
from collections import namedtuple

import numpy as np

from . import _check, _kvd, cuda
from .errors import BusyError, Error, StateError, TimeoutError, error_make
from .memory import Memory
from .rooms import BOOTSTRAPPING, FAILED, SUCCESS

KINDS = {"mla": 0, "gqa": 1}
TYPES = {"bf16": 0, "fp16": 1, "fp32": 2, "fp8_e4m3": 3}
TYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}
OUTS = {"fp32": False, "bf16": True}
PAIRS = {"halves": 0, "interleaved": 1}
ALIGN = 64
ROWS_MAX = 4096
_open = set()  # a stream may use the seats until AttendStream.close()
WHY_S = 5  # timeout of the query for a failed request's message, in seconds

Rope = namedtuple("Rope", "first dims pairs inv_freq")
Rope.__doc__ = """Values [first, first + dims) of a query row and of a key are pairs, "halves" (i
and i + dims / 2) or "interleaved" (2i and 2i + 1), rotated by position * inv_freq[i]; the
frequencies include the model's scaling, if it has one."""

Part = namedtuple("Part", "hold rows chunks tokens delta select",
                  defaults=(None, None, 0, 0, None))
Part.__doc__ = """Rows (begin, end), None: all, and the chunks (begin, end) of a hold, None: all,
that they attend to. tokens: number, from the first chunk's first on, 0: all. delta: positions by
which the chunks are shifted from where they were computed. select: for each query token one list,
of equal length, of tokens of the part (4294967295: none), which its heads share; or an array of
query tokens x tokens."""


class Packed(tuple):
    """Parts, as Attend.pack() returns them."""
    __slots__ = ()


AttendFacts = namedtuple("AttendFacts", "queue_us attend_us daemons together replicate error "
                         "retryable")
AttendFacts.__doc__ = """Times in microseconds, of the slowest part: queue_us, waiting for a
processor; attend_us, attention. daemons: number of other daemons used. together: largest number of
requesters whose rows were computed in one batch. replicate: more than 8 of them; fetching the
chunks would help all. error: number of the code, 0 unless failed; retryable: whether the same request
may succeed later."""


def _choice(name, value, names):
    if value not in names:
        raise _check.wrong(name, value, "one of %s" % ", ".join(names))
    return names[value]


def _rope_pack(rope):
    if rope is None:
        return None
    first, dims, pairs, inv_freq = rope
    freq = array("d", inv_freq)
    if len(freq) * 2 != dims:
        raise ValueError("rope.inv_freq: %d numbers for %d values" % (len(freq), dims))
    return (first, dims, _choice("rope.pairs", pairs, PAIRS), freq.tobytes())


def _select_pack(select, queries):
    """-> tokens of each query, bytes"""
    try:
        table = np.asarray(select)
    except ValueError:  # lists of different lengths
        table = np.empty(0)
    if (table.ndim != 2 or len(table) != queries or not table.size
            or table.dtype.kind not in "iu" or table.min() < 0 or table.max() > _check.U32):
        raise ValueError("select: needs one list for each of the %d query tokens, of equal length, "
                         "not empty, of numbers in 0 to %d" % (queries, _check.U32))
    return table.shape[1], table.astype(np.uint32).tobytes()


def _up(nbytes):
    return -(-nbytes // ALIGN) * ALIGN


class Attend:
    """Buffers ("seats") of query rows, and the shape of an engine's attention.

    rows: of a seat, at most 4096, a multiple of heads. key_scale, value_scale: fields of the layout
    with scales of fp8, a float32 for each head of a token: k and v are multiplied by theirs, and of
    MLA both by key_scale's. None: 1. out_type: in which other daemons send o,
    "fp32" or "bf16": about half the bytes, with an error of at most 2^-8 of each value (its cost:
    Model(out_bytes=2)). Seats are fp32 in any case."""

    def __init__(self, client, *, rows, heads, dqk, dv, kind, q_type, kv_type, scale, key,
                 value=None, key_scale=None, value_scale=None, seats=1, kv_heads=1,
                 first_head=0, softcap=0.0, view=None, rope=None, out_type="fp32", timeout=None):
        self.rows = _check.integer("rows", rows, 1, ROWS_MAX)
        self.seats = _check.integer("seats", seats, 1, 256)
        _choice("q_type", q_type, TYPES)
        self.heads, self.dqk, self.dv, self.q_type = heads, dqk, dv, q_type
        seat = (_up(rows * dqk * TYPE_BYTES[q_type]) + _up(rows * dv * 4) + 2 * _up(rows * 4)
                + 2 * ALIGN)
        self._memory = Memory(seat * seats)
        self._region = client.register(self._memory, name="seats")
        try:
            self._attend = _kvd.Attend(
                client._kvd, self._region, 0, self._memory.address, self.rows, self.seats,
                _choice("kind", kind, KINDS), _choice("q_type", q_type, TYPES),
                _choice("kv_type", kv_type, TYPES), heads, kv_heads, first_head, dqk, dv,
                float(scale), float(softcap), view, key, value, key_scale, value_scale,
                _rope_pack(rope),
                _choice("out_type", out_type, OUTS), _check.seconds("timeout", timeout))
        except BaseException:
            with contextlib.suppress(Error):  # the refusal's own message matters more
                self._region.unregister()
            raise
        self._at, self._made = self._attend.seat(), {}

    def _views(self, seat):
        """(q, o, m, l) of a seat, made once: an engine's layers ask for them again and again."""
        seat = _check.integer("seat", seat, 0, self.seats - 1)
        views = self._made.get(seat)
        if views is None:
            rows, at, memory = self.rows, self._at, self._memory.array()

            def piece(i, nbytes):
                begin = seat * at[0] + at[i]
                return memory[begin:begin + nbytes]
            views = self._made[seat] = (
                piece(1, rows * self.dqk * TYPE_BYTES[self.q_type]),
                piece(2, rows * self.dv * 4).view(np.float32).reshape(rows, self.dv),
                *(piece(i, rows * 4).view(np.float32) for i in (3, 4)))
        return views

    def q(self, seat):
        """The query rows of a seat, as a writable array of bytes: rows x dqk of q_type."""
        return self._views(seat)[0]

    def o(self, seat):
        """Output: rows x dv floats."""
        return self._views(seat)[1]

    def m(self, seat):
        """Largest score: rows floats."""
        return self._views(seat)[2]

    def l(self, seat):
        """Sum of exp(score - m): rows floats; 0: the row has no tokens."""
        return self._views(seat)[3]

    def _part_pack(self, part):
        begin, end = (0, self.rows) if part.rows is None else part.rows
        first, last = (0, part.hold.chunks) if part.chunks is None else part.chunks
        per_token, select = 0, None
        if part.select is not None:
            per_token, select = _select_pack(part.select, (end - begin) // self.heads)
        return (part.hold._hold, begin, end - begin, first, last - first, part.tokens,
                part.delta, per_token, select)

    def pack(self, parts):
        """Check and convert parts once for many requests: those of a step differ in the layer and
        the seat. parts: 1 to 64, of Part. The result keeps their holds, and is valid while they are
        open. -> Packed, of this Attend. ValueError: a selection's shape."""
        return Packed(self._part_pack(p) for p in parts)

    def post(self, seat, layer, parts, *, deadline=0.0):
        """Send a seat's rows: those up to the last one of a part; rows after it cost nothing, and
        their o, m and l stay. parts: as pack() returns them, or as it takes them. Never waits: q may
        be written again in the state TRANSFERRING; o, m and l are complete in SUCCESS. deadline:
        seconds until the request fails, 0: one. ValueError, BusyError (the seat is in use),
        StateError (a hold is closed): nothing was sent. Errors of the daemon: wait()."""
        if not isinstance(parts, Packed):
            parts = self.pack(parts)
        self._attend.post(seat, _check.integer("layer", layer, 0, _check.U32), parts,
                          round(deadline * 1e6))

    def on_stream(self, stream):
        """For queries that a GPU computes. stream: a CUstream as int, or a torch.cuda.Stream.
        -> AttendStream"""
        return AttendStream(self, stream)

    def state(self, seat):
        """The state: a read of shared memory. WAITING_FOR_INPUT: q has not been read yet."""
        return self._attend.state(seat)

    def wait(self, seat, timeout=None, *, why=WHY_S):
        """Wait until the request has ended, at most `timeout` seconds; raises its error. why: as in
        error()."""
        now = self._attend.wait(seat, _check.seconds("timeout", timeout))
        if now == FAILED:
            raise self.error(seat, why=why)
        if now not in (SUCCESS, BOOTSTRAPPING):
            raise TimeoutError("seat %d: no result in time" % seat, "ENOREPLY", 0, "op", True)

    def error(self, seat, *, why=WHY_S):
        """Why the request failed, as an exception; None otherwise. Its code and `retryable` are read
        from shared memory. why: how many seconds to wait for the daemon's message, 0: it is not
        queried, and the exception has none."""
        if self.state(seat) != FAILED:
            return None
        told = self._attend.error(seat, _check.seconds("why", why)) if why else None
        if not told:
            facts = self.read(seat)
            told = (facts.error, _kvd.code_name(facts.error), facts.retryable, "op",
                    "seat %d: failed" % seat)
        return error_make(*told)

    def read(self, seat):
        """Measurements of the seat's last request, and the code of its error: a read of shared
        memory. -> AttendFacts"""
        return AttendFacts(*self._attend.read(seat))

    def stop(self, seat):
        """Cancel the request. It fails; results of other daemons are dropped."""
        self._attend.stop(seat)

    def close(self, timeout=None):
        """Close. Requests in progress are cancelled."""
        self._attend.close(_check.seconds("timeout", timeout))
        self._region.unregister()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


Addresses = namedtuple("Addresses", "q o m l")
Addresses.__doc__ = """Of a seat on the device: q of q_type, rows x dqk; o, rows x dv floats; m and l,
rows floats."""


class AttendStream:
    """Requests in the order of a CUDA stream: Attend.on_stream(). No thread waits for the stream. In
    a step, for each layer, with a seat for each:

        queries = on.at(seat).q         # the engine's kernels write there, in the stream
        on.post(seat, layer, packed)
        ...                             # the engine's own attention, in the stream
        on.join(seat)                   # the stream waits for the results
        ...                             # kernels that read on.at(seat).o, .m, .l and merge
    and at the end of the step, when the stream has passed:

        failed = on.failed()            # seats without a valid result

    The seats are memory of the host that the driver has registered: the device reads and writes it
    directly. A request that fails, and a daemon that dies or hangs, let the stream go on, at the latest
    half a second after the deadline. So results are valid only for seats that failed() does not name.

    The stream's context must be current in the thread of these calls, and the stream must not be
    capturing a graph. Close it before the Attend, when the stream has passed."""

    def __init__(self, attend, stream):
        self._attend, self._stream = attend, cuda._stream(stream)
        self._values, self._lost = {}, []  # of the step: of each seat; seats used again
        self._page = cuda.Pinned(attend._memory, "attend")
        _open.add(self)
        begin = self._page.address
        bytes_, q, o, m, l, self._ready, self._done = attend._at
        self._bytes = bytes_
        self._at = [Addresses(*(begin + seat * bytes_ + piece for piece in (q, o, m, l)))
                    for seat in range(attend.seats)]

    def _usable(self):
        if self._page is None:
            raise StateError("attend: the stream's view is closed", "ESTATE", 11)

    def at(self, seat):
        """-> Addresses"""
        return self._at[_check.integer("seat", seat, 0, self._attend.seats - 1)]

    def post(self, seat, layer, parts, *, deadline=0.0):
        """As Attend.post(), for rows that the stream has been told to write: they are sent when it
        has written them. deadline: seconds from now on. Error: a call of the driver failed; nothing
        is in progress."""
        self._usable()
        attend = self._attend
        if not isinstance(parts, Packed):
            parts = attend.pack(parts)
        layer, before = _check.integer("layer", layer, 0, _check.U32), attend.state(seat)
        try:
            value = attend._attend.order(seat, layer, parts, round(deadline * 1e6))
        except BusyError:  # the seat's last request is in progress
            raise
        except Error:
            self._ended(seat, before)
            raise
        self._ended(seat, before)
        self._values[seat] = value
        try:
            self._page.store(self._stream, seat * self._bytes + self._ready, value)
        except Error:
            attend.stop(seat)
            raise

    def _ended(self, seat, state):
        """Its last request, which may be another step's, is followed by another."""
        if self._values.pop(seat, None) and state != SUCCESS:
            self._lost.append(seat)

    def join(self, seat):
        """The stream's later work waits for the seat's last request, whether it succeeds or not."""
        self._usable()
        if seat not in self._values:
            raise StateError("seat %s: no request" % (seat,), "ESTATE", 11)
        self._page.await_word(self._stream, seat * self._bytes + self._done, self._values[seat])

    def failed(self):
        """Of the requests since the last call: the seats with one that has no result. The stream must
        have passed the last join(). A read of shared memory. The reason of a seat's last request:
        Attend.error(). -> sorted list"""
        lost = [seat for seat in self._values if self._attend.state(seat) != SUCCESS]
        lost, self._values, self._lost = sorted({*lost, *self._lost}), {}, []
        return lost

    def close(self):
        """Release the driver's registration. The stream must have passed the last join()."""
        if self._page is not None:
            self._page.close()
            self._page = None
            _open.discard(self)
