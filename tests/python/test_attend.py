# SPDX-License-Identifier: Apache-2.0
"""Query rows that attend to chunks in place: here, at another daemon, at several; against the
same attention in float64. And the end of a request when its holder dies, refuses, or its engine
cancels it."""
import contextlib
import copy
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import kvd
from conftest import until
from kvd_daemon import BUILD, Daemon
from kvd_space import attended, space_of
from test_chunk_files import killed
from test_math import E4M3, narrow

T = 16  # tokens of a chunk
LAYERS = 2
MEMORY = "[chunks]\nchunk_memory = 64 MiB\n"
ATTENDS = MEMORY + "attention_threads = 1\n"


def bf16(values):
    """Rounded to bf16, as uint16 and as the floats that these are."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def fp8(values):
    """The same of fp8, as uint8."""
    bits = narrow(values, np.uint8)
    return bits, E4M3[bits]


def ids_of(count, name):
    return [(b"%s %d" % (name, i)).ljust(32, b".") for i in range(count)]


class Model:
    """KV of `tokens` tokens for each layer, in float, and how scores are made."""

    def __init__(self, tokens, heads=4, kv_heads=1, dqk=96, dv=64, kind="mla", seed=1,
                 format="bf16", kv_type="bf16", scaled=False):
        rng = np.random.default_rng(seed)
        self.kind, self.heads, self.kv_heads, self.dqk, self.dv = kind, heads, kv_heads, dqk, dv
        self.tokens, self.scale, self.format = tokens, dqk ** -0.5, format
        self.first, self.total = 0, kv_heads
        rounded = {"bf16": bf16, "fp8_e4m3": fp8}[kv_type]
        self.kv_type = kv_type
        self.k_bits, self.k = rounded(rng.standard_normal((LAYERS, tokens, kv_heads, dqk)))
        if kind == "gqa":
            self.v_bits, self.v = rounded(rng.standard_normal((LAYERS, tokens, kv_heads, dv)))
        self.scaled, self.k_scale, self.v_scale = scaled, None, None
        if scaled:
            self.k_scale, self.v_scale = (
                rng.uniform(0.2, 1.2, (2, LAYERS, tokens, kv_heads, 1))
                * rng.choice([-1, 1, 1], (2, 1, tokens, kv_heads, 1))).astype(np.float32)
            self.k = self.k * self.k_scale
            self.v = self.v * self.v_scale if kind == "gqa" else None
        if kind == "mla":
            self.v_bits, self.v, self.v_scale = None, self.k[..., :dv], None

    def rank(self, begin, end):
        """A tensor-parallel rank of it, with these KV heads and their query heads."""
        one, heads = copy.copy(self), self.heads // self.kv_heads
        one.first, one.kv_heads, one.heads = begin, end - begin, heads * (end - begin)
        for name in ("k", "k_bits", "k_scale", "v", "v_bits", "v_scale"):
            if getattr(self, name) is not None:
                setattr(one, name, getattr(self, name)[:, :, begin:end])
        return one

    def parts(self):
        """Lists of (field, bytes of each layer, token and head, format) that lie behind each
        other: K and V apart, or in each head as vLLM has them with their scales."""
        every = [(name, np.ascontiguousarray(values).view(np.uint8), format)
                 for name, values, format in (
                     ("kv" if self.kind == "mla" else "k", self.k_bits, self.format),
                     ("k_scale", self.k_scale, "float32"), ("v", self.v_bits, self.format),
                     ("v_scale", self.v_scale, "float32")) if values is not None]
        return [every] if self.scaled else [[one] for one in every]

    def layout(self, pages):
        at, layers = 0, []
        for layer in range(LAYERS):
            fields = []
            for parts in self.parts():
                unit = sum(values.shape[3] for _, values, _ in parts)
                token, first = self.kv_heads * unit, at
                for name, values, format in parts:
                    fields.append({"name": name, "buffer": 0, "offset": first,
                                   "page_stride": T * token, "token_stride": token,
                                   "unit_stride": unit, "unit_bytes": values.shape[3],
                                   "first_unit": self.first, "units": self.kv_heads,
                                   "total_units": self.total, "format": format})
                    first += values.shape[3]
                at += pages * T * token
            layers.append({"layer": layer, "fields": fields})
        lay = {"buffers": [at]}
        lay["views"] = {"kv": {"page_tokens": T, "pages": pages, "layers": layers}}
        return lay

    def attend(self, layer, q, tokens, delta_q=None):
        """(o, m, l) of rows, in float64, over these tokens (an index array)."""
        rows = q.shape[0]
        o, m, lsum = np.zeros((rows, self.dv)), np.full(rows, -np.inf), np.zeros(rows)
        for r in range(rows):
            head = r % self.heads * self.kv_heads // self.heads
            of = tokens[r] if isinstance(tokens, list) else tokens
            if len(of) == 0:
                continue
            s = self.k[layer, of, head].astype(np.float64) @ q[r].astype(np.float64) * self.scale
            m[r] = s.max()
            w = np.exp(s - m[r])
            lsum[r] = w.sum()
            o[r] = w @ self.v[layer, of, head].astype(np.float64) / lsum[r]
        return o, m, lsum


class Engine:
    """A rank whose cache has the model's KV, and buffers."""

    def __init__(self, client, model, rows=8, seats=2, **more):
        self.client, self.model = client, model
        pages = model.tokens // T
        self.pool = client.pool(lay := model.layout(pages),
                                [client.register(memory := kvd.Memory(lay["buffers"][0]))])
        self.memory = memory
        self.space = space_of(client, self.pool, model="m", scheme="test", tokens=T)
        mla = model.kind == "mla"
        self.attend = client.attend(**{**dict(
            rows=rows, seats=seats, heads=model.heads, kv_heads=model.kv_heads,
            first_head=model.first, dqk=model.dqk,
            dv=model.dv, kind=model.kind, q_type="bf16", kv_type=model.kv_type, scale=model.scale,
            key="kv" if mla else "k", value=None if mla else "v",
            key_scale="k_scale" if model.scaled else None,
            value_scale="v_scale" if model.scaled and not mla else None), **more})

    def fill(self, flat):
        """The model's KV, in an array of its bytes."""
        at, parts = 0, self.model.parts()
        for layer in range(LAYERS):
            for some in parts:
                values = np.concatenate([values[layer] for _, values, _ in some], 2).reshape(-1)
                flat[at:at + values.size] = values
                at += values.size

    def put(self, ids, first=0):
        """Chunks of the model's tokens from number `first` on."""
        self.fill(self.memory.array())
        pages = list(range(first, first + len(ids)))
        self.space.put(ids, {"kv": kvd.View(pages, tokens=(0, len(ids) * T))}).wait(timeout=60)

    def put_at(self, ids, first):
        """The same, at their position in the prompt."""
        self.fill(self.memory.array())
        pages = list(range(first, first + len(ids)))
        self.space.put(ids, {"kv": kvd.View(pages, first_token=first * T)}, first).wait(timeout=60)

    def ask(self, seat, layer, parts, seed=7, **more):
        """The rows that were asked for, in float."""
        rng = np.random.default_rng(seed)
        bits, rows = bf16(rng.standard_normal((self.attend.rows, self.model.dqk)))
        self.attend.q(seat)[:] = bits.reshape(-1).view(np.uint8)
        self.attend.post(seat, layer, parts, **more)
        return rows

    def got(self, seat):
        a = self.attend
        return a.o(seat).copy(), a.m(seat).copy(), a.l(seat).copy()


def close(got, want):
    o, m, lsum = got
    assert np.allclose(m, want[1], rtol=0, atol=2e-2)
    # l is a sum relative to m, so compare their combined result
    assert np.allclose(np.log(lsum) + m, np.log(want[2]) + want[1], rtol=0, atol=2e-2)
    assert np.abs(o - want[0]).max() < 2e-2


@contextlib.contextmanager
def daemons(count, holder=ATTENDS, own=ATTENDS, more="", kind=Daemon):
    """Holders, then the asking one that knows them; a client each."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(kind(holder)) for _ in range(count)]
        clients = [stack.enter_context(kvd.Client(d.socket_path)) for d in holders]
        stores = "chunk_peers = %s\n" % " ".join(c.endpoint for c in clients) if count else ""
        daemon = stack.enter_context(Daemon(own + stores + more))
        client = stack.enter_context(kvd.Client(daemon.socket_path))
        until(lambda: sum(p["state"] == "up" for p in client.command("peer.list")["peers"])
              >= count)
        yield daemon, client, holders, clients


GQA = {"kind": "gqa", "kv_heads": 2, "dqk": 64, "dv": 64}
SHAPES = {"mla": {}, "gqa": GQA,
          "gqa of fp8": {**GQA, "kv_type": "fp8_e4m3", "format": "float8_e4m3fn"},
          "gqa of scaled fp8": {**GQA, "kv_type": "fp8_e4m3", "scaled": True, "format": ""},
          "mla of scaled fp8": {"kv_type": "fp8_e4m3", "format": "fp8_e4m3", "scaled": True}}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_to_chunks_here(shape):
    model = Model(8 * T, **SHAPES[shape])
    ids = ids_of(8, b"here")
    with daemons(0) as (_, client, _, _):
        engine = Engine(client, model)
        engine.put(ids)
        with engine.space.hold(ids) as hold:
            assert hold.chunks == 8
            for layer in range(LAYERS):
                q = engine.ask(0, layer, [kvd.Part(hold)])
                engine.attend.wait(0, timeout=30)
                close(engine.got(0), model.attend(layer, q, np.arange(8 * T)))
            q = engine.ask(1, 1, [kvd.Part(hold, chunks=(2, 5), tokens=2 * T + 5)])
            engine.attend.wait(1, timeout=30)
            close(engine.got(1), model.attend(1, q, np.arange(2 * T, 4 * T + 5)))


@pytest.mark.parametrize("ways", ["shm", "tcp", "ucx"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_attend_to_chunks_of_another_daemon(shape, ways):
    model = Model(8 * T, **SHAPES[shape])
    ids = ids_of(8, b"there")
    more = "[transport]\ntransports = shm %s\nrequire = %s\n" % (
        ways if ways != "shm" else "", ways)
    with daemons(1, holder=ATTENDS + more, more=more) as (_, client, _, (far,)):
        until(lambda: [p["transport"] for p in client.command("peer.list")["peers"]] == [ways])
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        here.put(ids[:3])
        with here.space.hold(ids, remote=10) as hold:
            assert (hold.chunks, hold.remote) == (8, 5)
            for layer in range(LAYERS):
                q = here.ask(0, layer, [kvd.Part(hold)])
                here.attend.wait(0, timeout=30)
                close(here.got(0), model.attend(layer, q, np.arange(8 * T)))
            assert here.attend.read(0).daemons == 1
            # rows of several long messages, in each direction
            many = Engine(client, model, rows=2048)
            q = many.ask(0, 1, [kvd.Part(hold)])
            many.attend.wait(0, timeout=30)
            close(many.got(0), model.attend(1, q, np.arange(8 * T)))


def test_results_return_in_bf16_where_that_is_asked():
    """An MLA row is 2184 bytes instead of 3208; seats, and what is attended here, stay fp32."""
    model = Model(4 * T, dqk=576, dv=512, heads=16)
    ids = ids_of(4, b"half")
    with daemons(1) as (_, client, _, (far,)):
        there = Engine(far, model, rows=32)
        there.put(ids)
        got = []
        for out_type, row in (("fp32", 3208), ("bf16", 2184)):
            here = Engine(client, model, rows=32, out_type=out_type)
            with here.space.hold(ids, remote=10) as hold:
                for layer in range(LAYERS):
                    before = figure(client, "attention_request_bytes_total")
                    q = here.ask(0, layer, [kvd.Part(hold, rows=(0, 16))])
                    here.attend.wait(0, timeout=30)
                    assert figure(client, "attention_request_bytes_total") - before == 16 * row
                    want = model.attend(layer, q[:16], np.arange(4 * T))
                    close(tuple(a[:16] for a in here.got(0)), want)
            got.append(here.attend.o(0)[:16].copy())
        off = np.abs(got[1] - got[0])
        assert 0 < off.max() and (off <= 2.0 ** -8 * np.abs(got[0])).all()
        with pytest.raises(TypeError, match="out_type"):
            Engine(client, model, rows=32, out_type="fp16")


def figure(client, name):
    return next(int(m["value"]) for m in client.command("stats")["metrics"] if m["name"] == name)


RANKS = {"1 from 2": ([(0, 4)], [(0, 2), (2, 4)]), "1 from 1 and 3": ([(0, 4)], [(0, 1), (1, 4)]),
         "2 from 4": ([(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]),
         "2 from uneven": ([(0, 2), (2, 4)], [(0, 3), (3, 4)]), "4 from 2": (
             [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2), (2, 4)])}


@pytest.mark.parametrize("way", ["here", "shm", "tcp"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_attend_to_parts_of_other_ranks(ranks, way):
    """Eight query heads share four KV heads. Nothing is fetched. By tcp, of fp8 with scales."""
    kind = SHAPES["gqa of scaled fp8"] if way == "tcp" else GQA
    model = Model(8 * T, **{**kind, "heads": 8, "kv_heads": 4})
    ids = ids_of(8, ranks.encode())
    askers, holders = RANKS[ranks]
    more = "" if way == "here" else "[transport]\ntransports = shm %s\nrequire = %s\n" % (
        "tcp" if way == "tcp" else "", way)
    with daemons(1, holder=ATTENDS + more, more=more) as (near, client, (holder,), _):
        with contextlib.ExitStack() as stack:
            for rank in holders:
                where = near if way == "here" else holder
                stack.enter_context(other := kvd.Client(where.socket_path))
                Engine(other, model.rank(*rank), rows=24).put(ids)
            for rank in askers:
                one = model.rank(*rank)
                here = Engine(client, one, rows=2 * one.heads)
                chosen = [[3, 70, 127], [0, 64, 0xFFFFFFFF]]
                with here.space.hold(ids, remote=10) as hold:
                    assert (hold.chunks, hold.remote) == (8, 0 if way == "here" else 8)
                    for layer in range(LAYERS):
                        q = here.ask(0, layer, [kvd.Part(hold)])
                        here.attend.wait(0, timeout=30)
                        close(here.got(0), one.attend(layer, q, np.arange(8 * T)))
                    q = here.ask(1, 0, [kvd.Part(hold, select=chosen)])
                    here.attend.wait(1, timeout=30)
                    close(here.got(1), one.attend(0, q, [
                        [t for t in chosen[r // one.heads] if t != 0xFFFFFFFF]
                        for r in range(2 * one.heads)]))


def test_latents_of_two_ranks_are_attended_to_once():
    model = Model(8 * T)
    ids = ids_of(8, b"latents")
    with daemons(1) as (_, client, (holder,), (far,)):
        with kvd.Client(holder.socket_path) as second:
            for one in (far, second):
                Engine(one, model).put(ids)
            here = Engine(client, model)
            with here.space.hold(ids, remote=10) as hold:
                q = here.ask(0, 0, [kvd.Part(hold)])
                here.attend.wait(0, timeout=30)
                close(here.got(0), model.attend(0, q, np.arange(8 * T)))
            assert figure(far, "attention_served_total") == 1


def test_format_accepts_torch_names():
    """What adapters of engines write into layouts is torch's word."""
    for word in ("bfloat16", "float16"):
        model = Model(2 * T, format=word)
        ids = ids_of(2, b"format")
        with daemons(0) as (_, client, _, _):
            engine = Engine(client, model)
            engine.put(ids)
            with engine.space.hold(ids) as hold:
                q = engine.ask(0, 0, [kvd.Part(hold)])
                if word == "float16":
                    with pytest.raises(kvd.Error, match="format"):
                        engine.attend.wait(0, timeout=30)
                    continue
                engine.attend.wait(0, timeout=30)
                close(engine.got(0), model.attend(0, q, np.arange(2 * T)))


def merged(a, b):
    """As the engine merges parts over different tokens: kvd/attend.py."""
    (oa, ma, la), (ob, mb, lb) = a, b
    top = np.maximum(ma, mb)
    wa, wb = la * np.exp(ma - top), lb * np.exp(mb - top)
    return (wa[:, None] * oa + wb[:, None] * ob) / (wa + wb)[:, None], top, wa + wb


def test_one_to_seven_holders_and_the_engines_own_part():
    model = Model(8 * T)
    with daemons(7) as (_, client, _, clients):
        ids = [ids_of(1, b"holder %d" % i)[0] for i in range(7)]
        holders = [Engine(c, model) for c in clients]
        for i, holder in enumerate(holders):
            holder.put([ids[i]], first=i)
        here = Engine(client, model)
        holds = [here.space.hold([one], remote=10) for one in ids]
        assert [h.chunks for h in holds] == [1] * 7
        for count in range(1, 8):
            q = here.ask(0, 0, [kvd.Part(h) for h in holds[:count]], seed=count)
            here.attend.wait(0, timeout=30)
            close(here.got(0), model.attend(0, q, np.arange(count * T)))
        # the second query token attends to 7 holders, the first to none; and the last T tokens,
        # which are the engine's own: by m and l, and by a log-sum-exp
        q = here.ask(1, 0, [kvd.Part(h, rows=(4, 8)) for h in holds])
        here.attend.wait(1, timeout=30)
        o, m, lsum = model.attend(0, q, np.arange(7 * T, 8 * T))
        want = model.attend(0, q, [np.arange(7 * T if row < 4 else 0, 8 * T)
                                   for row in range(8)])
        for mine in ((o, m, lsum), (o, m + np.log(lsum), np.ones_like(lsum))):
            got, top, total = merged(here.got(1), mine)
            close((got, want[1], total * np.exp(top - want[1])), want)


@pytest.mark.parametrize("count, own", [(2, None), (3, 1), (7, 3)])
def test_hold_of_several_daemons_is_one_part(count, own):
    """own: a piece that is at the own daemon."""
    model, ids = Model(count * 2 * T), ids_of(count * 2, b"pieces %d" % count)
    with daemons(count) as (_, client, _, clients):
        here = Engine(client, model)
        for i, far in enumerate(clients):
            engine = here if i == own else Engine(far, model)
            engine.put_at(ids[2 * i:2 * i + 2], 2 * i)
        rng = np.random.default_rng(count)
        chosen = [sorted(int(t) for t in rng.choice(count * 2 * T, 20, replace=False))
                  for _ in range(2)]
        with here.space.hold(ids, remote=10) as hold:
            assert hold.chunks == 2 * count
            for tokens in (count * 2 * T, 3 * T - 5):
                q = here.ask(0, 0, [kvd.Part(hold, tokens=tokens)])
                here.attend.wait(0, timeout=30)
                close(here.got(0), model.attend(0, q, np.arange(tokens)))
            q = here.ask(0, 1, [kvd.Part(hold, chunks=(1, 2 * count - 1))])
            here.attend.wait(0, timeout=30)
            close(here.got(0), model.attend(1, q, np.arange(T, (2 * count - 1) * T)))
            q = here.ask(1, 1, [kvd.Part(hold, select=chosen)])
            here.attend.wait(1, timeout=30)
            close(here.got(1), model.attend(1, q, [chosen[r // model.heads] for r in range(8)]))


def test_chosen_tokens_alone_count():
    model = Model(8 * T)
    ids = ids_of(8, b"chosen")
    with daemons(1) as (_, client, _, (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        here.put(ids[:4])
        rng = np.random.default_rng(3)
        chosen = [sorted(int(t) for t in rng.choice(8 * T, 20, replace=False)) for _ in range(2)]
        chosen[1][5:] = [0xFFFFFFFF] * 15
        with here.space.hold(ids, remote=10) as hold:
            q = here.ask(0, 1, [kvd.Part(hold, select=chosen)])
            here.attend.wait(0, timeout=30)
            of = [[t for t in chosen[r // model.heads] if t != 0xFFFFFFFF] for r in range(8)]
            close(here.got(0), model.attend(1, q, of))


def test_parts_are_packed_once():
    model = Model(8 * T)
    ids = ids_of(8, b"packed")
    with daemons(1) as (_, client, _, (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        here.put(ids[:4])
        chosen = np.array([[3, 70, 0xFFFFFFFF], [1, 2, 90]], np.int64)
        with here.space.hold(ids, remote=10) as hold:
            cases = ((kvd.Part(hold, tokens=5 * T), np.arange(5 * T)),
                     (kvd.Part(hold, select=chosen), [[3, 70]] * 4 + [[1, 2, 90]] * 4))
            for part, tokens in cases:
                packed = here.attend.pack([part])
                for layer in range(LAYERS):
                    for seat in range(2):
                        q = here.ask(seat, layer, packed)
                        here.attend.wait(seat, timeout=30)
                        close(here.got(seat), model.attend(layer, q, tokens))
            wrong = ([[1], [2, 3]], [[1]], [[], []], [[1], [-1]], [[1], [1 << 32]],
                     [[1.0], [2.0]], [1, 2])
            for select in wrong:
                with pytest.raises(ValueError, match="select: needs one list for each of the 2 "):
                    here.attend.pack([kvd.Part(hold, select=select)])
            for count in (0, 65):
                with pytest.raises(ValueError, match="parts"):
                    here.attend.post(0, 0, [kvd.Part(hold)] * count)
        with pytest.raises(kvd.StateError):  # the hold is closed
            here.attend.post(0, 0, packed)


def test_holder_without_attention_refuses():
    model = Model(4 * T)
    ids = ids_of(4, b"no")
    with daemons(1, holder=MEMORY) as (_, client, _, (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        with here.space.hold(ids, remote=10) as hold:
            here.ask(0, 0, [kvd.Part(hold)])
            with pytest.raises(kvd.Error, match="attention_threads") as refused:
                here.attend.wait(0, timeout=30)
            assert refused.value.code == "EREQUIRE"


def test_code_of_a_failure_is_in_shared_memory():
    """The daemon, which is stopped, is not queried."""
    model = Model(4 * T)
    ids = ids_of(4, b"code")
    with daemons(1, holder=MEMORY) as (daemon, client, _, (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        here.put(ids[:1])
        with here.space.hold(ids, remote=10) as hold:
            here.ask(1, 0, [kvd.Part(hold, chunks=(0, 1))])
            here.attend.wait(1, timeout=30)
            assert here.attend.read(1)[5:] == (0, False) and here.attend.error(1) is None
            here.ask(0, 0, [kvd.Part(hold)])
            until(lambda: here.attend.state(0) == kvd.FAILED)
            os.kill(daemon.proc.pid, signal.SIGSTOP)
            try:
                facts = here.attend.read(0)
                for why in (0, 0.2):
                    error = here.attend.error(0, why=why)
                    assert (error.code, error.number) == ("EREQUIRE", facts.error)
                    assert error.retryable == facts.retryable
                with pytest.raises(kvd.PeerError, match="EREQUIRE"):
                    here.attend.wait(0, why=0)
            finally:
                os.kill(daemon.proc.pid, signal.SIGCONT)
            assert "attention_threads" in here.attend.error(0).message
            with pytest.raises(ValueError, match="why"):
                here.attend.error(0, why=-1)


def published(engine, ids):
    """The engine's chunks are its pages, and nothing else."""
    engine.put(ids)
    engine.space.drop(ids)
    count = len(ids)
    pages = {"kv": kvd.View(list(range(count)), tokens=(0, count * T))}
    return engine.space.publish(ids, pages).wait(timeout=30)


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_of_an_engine_are_attended_to(shape):
    """Here or there, where they lie."""
    model = Model(4 * T, **SHAPES[shape])
    ids = ids_of(4, b"pages")
    with daemons(1) as (_, client, _, (far,)):
        there, here = Engine(far, model), Engine(client, model)
        for engine in (there, here):
            published(engine, ids)
            with here.space.hold(ids, remote=10) as hold:
                assert (hold.chunks, hold.remote) == (4, 4 if engine is there else 0)
                for layer in range(LAYERS):
                    q = here.ask(0, layer, [kvd.Part(hold)])
                    here.attend.wait(0, timeout=30)
                    close(here.got(0), model.attend(layer, q, np.arange(4 * T)))
                engine.space.withdraw(ids, grace=0)
                here.ask(0, 0, [kvd.Part(hold)])
                with pytest.raises(kvd.Error, match="withdrawn|missing") as gone:
                    here.attend.wait(0, timeout=30)
                assert gone.value.code == "ENOTFOUND"
                assert engine.client.command("chunk.list")["published"] == 0


@pytest.mark.parametrize("remote", [False, True])
def test_pages_withdrawn_under_a_call_give_no_result(remote):
    """Their engine writes them right behind the withdrawal."""
    count = 64
    model = Model(count * T)
    ids = ids_of(count, b"withdrawn")
    ends, told = threading.Event(), []
    with daemons(1) as (_, client, _, (far,)):
        there = Engine(far if remote else client, model)
        here = Engine(client, model, rows=256)
        flat = there.memory.array(dtype=np.uint8)
        published(there, ids)
        right = flat.copy()

        def engine():
            pages = {"kv": kvd.View(list(range(count)), tokens=(0, count * T))}
            while not ends.wait(0.01):
                there.space.withdraw(ids, grace=0).wait(timeout=30)
                flat[:] = 0x41  # another request's
                flat[:] = right
                there.space.publish(ids, pages).wait(timeout=30)
        thread = threading.Thread(target=engine)
        thread.start()
        try:
            want = None
            until_s = time.monotonic() + 4
            while time.monotonic() < until_s or "ok" not in told or "ENOTFOUND" not in told:
                assert time.monotonic() < until_s + 60, told[-20:]
                with here.space.hold(ids, remote=10 if remote else None) as hold:
                    if hold.chunks < count:
                        continue
                    q = here.ask(0, 0, [kvd.Part(hold)], deadline=30)
                    try:
                        here.attend.wait(0, timeout=30)
                    except kvd.Error as error:
                        told.append(error.code)
                        continue
                    want = want or model.attend(0, q, np.arange(count * T))
                    close(here.got(0), want)
                    told.append("ok")
        finally:
            ends.set()
            thread.join()
        assert set(told) <= {"ok", "ENOTFOUND"}, set(told)


def test_engine_ending_beside_posts_fails_them_alone():
    """In any order with the call. (That its memory stays for one: test_attend_posts.c.)"""
    count = 64
    model = Model(count * T)
    ids = ids_of(count, b"ends")
    with daemons(0) as (daemon, client, _, _):
        here, told = Engine(client, model, rows=256), set()
        for _ in range(20):
            with kvd.Client(daemon.socket_path) as other:
                published(Engine(other, model), ids)
                with here.space.hold(ids) as hold:
                    assert hold.chunks == count
                    q = here.ask(0, 0, [kvd.Part(hold)])
                    other.close()
                    try:
                        here.attend.wait(0, timeout=30)
                        close(here.got(0), model.attend(0, q, np.arange(count * T)))
                        told.add("ok")
                    except kvd.Error as error:
                        told.add(error.code)
            until(lambda: client.command("chunk.list")["published"] == 0)
        assert told <= {"ok", "ENOTFOUND"}, told


def test_holder_killed_fails_the_post():
    model = Model(4 * T)
    ids = ids_of(4, b"dies")
    with daemons(1, kind=killed) as (_, client, (holder,), (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        with here.space.hold(ids, remote=10) as hold:
            os.kill(holder.proc.pid, signal.SIGSTOP)
            here.ask(0, 0, [kvd.Part(hold)], deadline=60)
            until(lambda: here.attend.state(0) == kvd.TRANSFERRING)
            os.kill(holder.proc.pid, signal.SIGKILL)
            with pytest.raises(kvd.Error) as lost:
                here.attend.wait(0, timeout=30)
            assert lost.value.retryable, lost.value
            here.ask(1, 0, [kvd.Part(hold)])
            with pytest.raises(kvd.Error):
                here.attend.wait(1, timeout=30)


def test_holder_killed_is_replaced_for_the_next_post():
    model, ids = Model(4 * T), ids_of(4, b"replaced")
    with daemons(2, kind=killed) as (_, client, holders, clients):
        here = Engine(client, model)
        for far in clients:
            Engine(far, model).put(ids)
        with here.space.hold(ids, remote=10) as hold:
            first, second = hold.holders()
            lost = [c.command("health")["instance"] for c in clients].index(first.peer.hex())
            holders[lost].proc.kill()
            holders[lost].proc.wait()
            until(lambda: sum(p["state"] == "up" for p in client.command("peer.list")["peers"])
                  == 1)
            q = here.ask(0, 0, [kvd.Part(hold)])
            here.attend.wait(0, timeout=30)
            close(here.got(0), model.attend(0, q, np.arange(4 * T)))
            assert second.chunks == 4


def test_post_ends_when_it_is_stopped_or_late():
    model = Model(4 * T)
    ids = ids_of(4, b"stop")
    with daemons(1) as (_, client, (holder,), (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        with here.space.hold(ids, remote=10) as hold:
            os.kill(holder.proc.pid, signal.SIGSTOP)
            try:
                here.attend.o(0)[:] = 42
                here.ask(0, 0, [kvd.Part(hold)], deadline=0.2)
                with pytest.raises(kvd.Error) as late:
                    here.attend.wait(0, timeout=30)
                assert late.value.code == "ETIMEOUT"
                here.ask(1, 0, [kvd.Part(hold)], deadline=60)
                here.attend.stop(1)
                with pytest.raises(kvd.Error) as stopped:
                    here.attend.wait(1, timeout=30)
                assert stopped.value.code == "ECANCELED"
            finally:
                os.kill(holder.proc.pid, signal.SIGCONT)
            q = here.ask(1, 0, [kvd.Part(hold)])
            here.attend.wait(1, timeout=30)
            close(here.got(1), model.attend(0, q, np.arange(4 * T)))
            assert (here.attend.o(0) == 42).all(), "a late answer was written"


def test_q_is_the_daemons_until_it_was_read():
    model = Model(4 * T)
    ids = ids_of(4, b"read")
    with daemons(1) as (daemon, client, (holder,), (far,)):
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        assert here.attend.state(0) == kvd.BOOTSTRAPPING
        with here.space.hold(ids, remote=10) as hold:
            here.ask(1, 0, [kvd.Part(hold)])  # the ring is there behind it
            here.attend.wait(1, timeout=30)
            os.kill(holder.proc.pid, signal.SIGSTOP)
            os.kill(daemon.proc.pid, signal.SIGSTOP)
            q = here.ask(0, 0, [kvd.Part(hold)], deadline=60)
            assert here.attend.state(0) == kvd.WAITING_FOR_INPUT
            with pytest.raises(kvd.Error) as taken:
                here.attend.post(0, 0, [kvd.Part(hold)])
            assert taken.value.code == "EBUSY"
            os.kill(daemon.proc.pid, signal.SIGCONT)
            until(lambda: here.attend.state(0) == kvd.TRANSFERRING)
            here.attend.q(0)[:] = 0
            os.kill(holder.proc.pid, signal.SIGCONT)
            here.attend.wait(0, timeout=30)
            close(here.got(0), model.attend(0, q, np.arange(4 * T)))


def test_session_end_leaks_nothing():
    model = Model(4 * T)
    ids = ids_of(4, b"gone")
    with daemons(1) as (daemon, client, (holder,), (far,)):
        there = Engine(far, model)
        there.put(ids)
        os.kill(holder.proc.pid, signal.SIGSTOP)
        try:
            with kvd.Client(daemon.socket_path) as other:
                here = Engine(other, model)
        finally:
            os.kill(holder.proc.pid, signal.SIGCONT)
        with kvd.Client(daemon.socket_path) as other:
            here = Engine(other, model)
            with here.space.hold(ids, remote=10) as hold:
                os.kill(holder.proc.pid, signal.SIGSTOP)
                here.ask(0, 0, [kvd.Part(hold)], deadline=60)
        os.kill(holder.proc.pid, signal.SIGCONT)
        until(lambda: attended(client)["requests_active"] == 0)
        until(lambda: attended(far)["queued"] == 0)


def test_posts_report_number_of_requesters():
    """All that waited while the holder's single thread computed a large request. More than 8
    would need another holder; the number of queries of each is irrelevant."""
    model, ids = Model(64 * T), ids_of(64, b"crowd")
    small = "[chunks]\nchunk_memory = 1 MiB\nchunk_peers = %s\n"
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(Daemon(ATTENDS + "attention_isa = ref\n"))
        far = stack.enter_context(kvd.Client(holder.socket_path))
        there = Engine(far, model, rows=2048 if os.path.basename(BUILD) == "rel" else 256)
        there.put(ids)
        large = stack.enter_context(there.space.hold(ids))
        clients = [stack.enter_context(kvd.Client(stack.enter_context(
            Daemon(small % far.endpoint, name="requester%d" % n)).socket_path)) for n in range(9)]
        requesters = [Engine(c, model) for c in clients]
        holds = [stack.enter_context(a.space.hold(ids, remote=10)) for a in requesters]
        assert [h.remote for h in holds] == [64] * 9
        for count in (1, 8, 9):
            for seat in range(2):  # one is at work, one waits
                there.ask(seat, 0, [kvd.Part(large)], deadline=60)
            until(lambda: attended(far)["queued"] > 0)
            holder.freeze()
            asked = [(a, seat, a.ask(seat, 1, [kvd.Part(h, chunks=(1, 3))], seed=seat,
                                     deadline=60))
                     for a, h in zip(requesters[:count], holds) for seat in range(2)]
            until(lambda: [attended(c)["requests_active"] for c in clients[:count]] ==
                  [2] * count)
            holder.thaw()
            for a, seat, q in asked:
                a.attend.wait(seat, timeout=60)
                close(a.got(seat), model.attend(1, q, np.arange(T, 3 * T)))
                facts = a.attend.read(seat)
                assert (facts.daemons, facts.together, facts.replicate) == (1, count, count > 8)
            for seat in range(2):
                there.attend.wait(seat, timeout=60)


def test_holder_that_attended_again_is_paused_as_the_first_time():
    """One that does not answer is paused for 10 s, and twice as long if it has not answered since."""
    model, ids = Model(4 * T), ids_of(4, b"paused")
    with daemons(1) as (daemon, client, (holder,), (far,)):
        daemon.expect("")
        there, here = Engine(far, model), Engine(client, model)
        there.put(ids)
        for _ in range(2):
            with here.space.hold(ids, remote=10) as hold:
                assert hold.remote == 4
                here.ask(0, 0, [kvd.Part(hold)])
                here.attend.wait(0, timeout=30)
            holder.freeze()
            with here.space.hold(ids, remote=0.3) as hold:
                assert hold.remote == 0
            holder.thaw()
            until(lambda: client.command("chunk.list")["remote"]["suspended"] == 1)

            def found():
                with here.space.hold(ids, remote=10) as hold:
                    return hold.remote == 4
            until(found)
        paused = re.findall(r'seconds=(\d+) why="the query timed out"', daemon.log())
        assert len(paused) == 2 and set(paused) <= {"9", "10"}, paused


def test_refused_attend_leaves_no_region():
    with daemons(0) as (_, client, _, _):
        def regions():
            return [r["region"] for r in client.command("region.list")["regions"]]
        before = regions()
        right = dict(rows=8, heads=4, dqk=96, dv=64, kind="mla", key="kv", q_type="bf16",
                     kv_type="bf16", scale=1.0)
        for word, value, why in [("dqk", 5000, kvd.Error), ("rows", 9, kvd.Error),
                                 ("kind", "mha", TypeError), ("scale", "much", ValueError)]:
            with pytest.raises(why):
                client.attend(**{**right, word: value})
            assert regions() == before, word
        with client.attend(**right):
            assert len(regions()) == len(before) + 1
        assert regions() == before


def test_invalid_post_is_refused_by_field():
    model = Model(4 * T)
    ids = ids_of(4, b"wrong")
    with daemons(0) as (_, client, _, _):
        here = Engine(client, model)
        here.put(ids)
        with here.space.hold(ids) as hold:
            for layer, part, why in [
                    (9, kvd.Part(hold), "layer"),
                    (0, kvd.Part(hold, chunks=(1, 9)), "chunks"),
                    (0, kvd.Part(hold, rows=(0, 3)), "rows"),
                    (0, kvd.Part(hold, rows=(4, 12)), "rows"),
                    (0, kvd.Part(hold, delta=3), "rope")]:
                here.ask(0, layer, [part])
                with pytest.raises(kvd.Error, match=why):
                    here.attend.wait(0, timeout=30)
            here.ask(0, 0, [kvd.Part(hold)])
            here.attend.wait(0, timeout=30)
        for word, value in [("heads", 0), ("dqk", 5000), ("rows", 9), ("dv", 17),
                            ("key", None)]:
            with pytest.raises((kvd.Error, ValueError)):
                client.attend(**{**dict(rows=8, heads=4, dqk=96, dv=64, kind="mla", key="kv",
                                        q_type="bf16", kv_type="bf16", scale=1.0), word: value})


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_chunks_at_another_place_are_turned(pairs):
    """Keys that were computed at 0 … are attended as if they were `delta` later."""
    model, delta, dims = Model(4 * T), 37, 32
    freq = [10000.0 ** (-2 * i / dims) for i in range(dims // 2)]
    ids = ids_of(4, b"turned")
    with daemons(1) as (_, client, _, (far,)):
        rope = kvd.Rope(64, dims, pairs, freq)
        there, here = Engine(far, model), Engine(client, model, rope=rope)
        there.put(ids)
        with here.space.hold(ids, remote=10) as hold:
            q = here.ask(0, 0, [kvd.Part(hold, delta=delta)])
            here.attend.wait(0, timeout=30)
            turned, angle = q.astype(np.float64), -delta * np.array(freq)
            a = slice(64, 80) if pairs == "halves" else slice(64, 96, 2)
            b = slice(80, 96) if pairs == "halves" else slice(65, 96, 2)
            x, y = turned[:, a].copy(), turned[:, b].copy()
            turned[:, a] = x * np.cos(angle) - y * np.sin(angle)
            turned[:, b] = x * np.sin(angle) + y * np.cos(angle)
            close(here.got(0), model.attend(0, turned, np.arange(4 * T)))
            assert np.abs(here.got(0)[0] - model.attend(0, q, np.arange(4 * T))[0]).max() > 5e-2
