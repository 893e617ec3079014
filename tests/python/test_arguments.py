# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments are refused by name, before they reach the daemon; and every public name
has a description."""
import ctypes
import inspect
import re

import numpy as np
import pytest

import kvd
from kvd import shards

PAGES, TOKENS = 8, 16


def layout():
    return kvd.Layout.sglang_mha(page_size=TOKENS, pages=PAGES, layers=1, kv_heads=1,
                                 head_bytes=64)


class Engine:
    def __init__(self, daemon):
        self.client = kvd.Client(daemon.socket_path)
        self.memory = [kvd.Memory(n) for n in layout().buffers]
        self.regions = [self.client.register(m) for m in self.memory]
        self.pool = self.client.pool(layout(), self.regions)


@pytest.fixture(scope="module")
def engine(pair):
    made = Engine(pair[0])
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def other(pair):
    made = Engine(pair[0])
    yield made
    made.client.close()


def frozen():
    array = np.zeros(64)
    array.flags.writeable = False
    return array


def strided():
    return np.zeros((8, 8))[:, ::2]


def test_name_or_path_wins_over_the_environment(pair, monkeypatch):
    monkeypatch.setenv("KVD_SOCKET", "/nowhere.sock")
    kvd.Client(pair[0].socket_path).close()
    with pytest.raises(kvd.Error, match=r"/nobody\.sock"):
        kvd.Client(name="nobody")
    with pytest.raises(kvd.Error, match=r"/nowhere\.sock"):
        kvd.Client()


@pytest.mark.parametrize("make, kind, words", [
    (lambda: b"abc", ValueError, "memory: bytes is read-only"),
    (lambda: memoryview(b"abc"), ValueError, "memory: memoryview is read-only"),
    (frozen, ValueError, "memory: ndarray is read-only"),
    (strided, ValueError, "memory: ndarray is not contiguous"),
    (lambda: np.zeros(0), ValueError, "memory: ndarray is 0 bytes long"),
    (lambda: np.array([object()]), ValueError, "memory: ndarray is of Python objects"),
    (lambda: np.float32(1), TypeError, "memory: .*float32.* is not an array"),
    (lambda: "abc", TypeError, r"memory: 'abc' \(str\) is not an array"),
    (lambda: [1, 2, 3], TypeError, r"memory: \[1, 2, 3\] \(list\) is not an array"),
    (lambda: 4096, TypeError, r"memory: 4096 \(int\) is not an array"),
    (lambda: None, TypeError, r"memory: None"),
])
def test_memory_needing_a_copy_is_refused(engine, make, kind, words):
    with pytest.raises(kind, match=words):
        engine.client.register(make())


def test_memory_with_the_buffer_protocol_is_the_memory_itself(engine):
    """Bytes that the daemon has are the object's, not a copy's."""
    for thing in (bytearray(8192), (ctypes.c_char * 8192)()):
        region = engine.client.register(thing)
        at = ctypes.addressof((ctypes.c_char * 8192).from_buffer(thing))
        assert (region.address, region.bytes) == (at, 8192)
        region.unregister()


ROOM_CALLS = [
    (lambda e: e.client.send(-1, e.pool), ValueError, "room: -1 is not in 0 to 18446"),
    (lambda e: e.client.send(1 << 64, e.pool), ValueError, "room: 18446744073709551616"),
    (lambda e: e.client.send(1.0, e.pool), TypeError, r"room: 1.0 \(float\) is not an integer"),
    (lambda e: e.client.send(True, e.pool), TypeError, r"room: True \(bool\)"),
    (lambda e: e.client.send("1", e.pool), TypeError, "room: '1'"),
    (lambda e: e.client.send(1, e.regions), TypeError, "pool: .*is not a pool of"),
    (lambda e: e.client.send(1, e.pool, stall_ms=-1), ValueError, "stall_ms: -1"),
    (lambda e: e.client.send(1, e.pool, stall_ms=1.5), TypeError, "stall_ms: 1.5"),
    (lambda e: e.client.send(1, e.pool, timeout="1"), TypeError, "timeout: '1'"),
    (lambda e: e.client.send(1, e.pool, timeout=0), ValueError, "timeout: 0"),
    (lambda e: e.client.send(1, e.pool, timeout=True), TypeError, "timeout: True"),
    (lambda e: e.client.recv(1, e.pool, "tcp://127.0.0.1:1"), TypeError,
     r"sources: 'tcp://127.0.0.1:1' \(str\) is not a list"),
    (lambda e: e.client.recv(1, e.pool, kvd.Source("tcp://a:1")), TypeError, "sources: "),
    (lambda e: e.client.recv(1, e.pool, [5]), TypeError, r"sources\[0\]: 5 \(int\)"),
    (lambda e: e.client.recv(1, e.pool, [kvd.Source(7)]), TypeError,
     r"sources\[0\].endpoint: 7"),
    (lambda e: e.client.recv(1, e.pool, [kvd.Source(room=-2)]), ValueError,
     r"sources\[0\].room: -2"),
    (lambda e: e.client.recv(1, e.pool, [kvd.Source(rank=2.0)]), TypeError,
     r"sources\[0\].rank: 2.0"),
    (lambda e: e.client.recv(1, e.pool, [kvd.Source(views=[1])]), TypeError,
     r"sources\[0\].views: \[1\]"),
    (lambda e: e.client.recv(1, e.pool, [None], receivers=-1), ValueError, "receivers: -1"),
    (lambda e: e.client.offer(1, e.pool, None), TypeError, "views: None"),
    (lambda e: e.client.offer(1, e.pool, {"kv": [1]}, aux=b"x"), TypeError, "aux: b'x'"),
    (lambda e: e.client.offer(1, e.pool, {"kv": [1]}, lease_ms="9"), TypeError, "lease_ms"),
    (lambda e: e.client.pull(1, e.pool, 7, {"kv": [1]}), TypeError, "sources: 7"),
    (lambda e: e.client.pull(1, e.pool, ["tcp://a:1", 7], {"kv": [1]}), TypeError,
     r"sources\[1\]: 7"),
    (lambda e: e.client.offer(1, e.pool, {"kv": [1]}, receivers_from_pullers=1), TypeError,
     "receivers_from_pullers: 1"),
    (lambda e: e.client.pull(1, e.pool, None, {"kv": [1]}, wait=[1]), TypeError, "wait: "),
    (lambda e: e.client.pull(1, e.pool, None, {"kv": [1]}, wait=(e.regions[0], -8, 1)),
     ValueError, r"wait\[1\]: -8"),
    (lambda e: e.client.pull(1, e.pool, None, {"kv": [1]}, wait=("r", 0, 1)), TypeError,
     r"wait\[0\]: 'r'"),
]


@pytest.mark.parametrize("call, kind, words", ROOM_CALLS)
def test_arguments_of_rooms_are_refused_by_name(engine, call, kind, words):
    with pytest.raises(kind, match=words):
        call(engine)


@pytest.mark.parametrize("views, kind, words", [
    ([1, 2], TypeError, r"views: \[1, 2\] \(list\) is not a dict"),
    ({3: [1]}, TypeError, "views: the name of a view: 3"),
    ({"kv": [1.5, 2.7]}, TypeError, r"views\['kv'\].pages\[0\]: 1.5 \(float\) is not an integer"),
    ({"kv": np.array([1.0])}, TypeError, r"views\['kv'\].pages\[0\]: "),
    ({"kv": [0, True]}, TypeError, r"views\['kv'\].pages\[1\]: True \(bool\)"),
    ({"kv": np.array([True])}, TypeError, r"views\['kv'\].pages\[0\]"),
    ({"kv": [0, -1]}, ValueError, r"views\['kv'\].pages\[1\]: -1 is not in 0 to 4294967295"),
    ({"kv": [1 << 32]}, ValueError, r"views\['kv'\].pages\[0\]: 4294967296"),
    ({"kv": [1 << 70]}, ValueError, r"views\['kv'\].pages\[0\]: 1180591620717411303424"),
    ({"kv": "12"}, TypeError, r"views\['kv'\].pages: '12'"),
    ({"kv": b"12"}, TypeError, r"views\['kv'\].pages: b'12'"),
    ({"kv": 3}, TypeError, r"views\['kv'\].pages: 3 \(int\)"),
    ({"kv": {1, 2}}, TypeError, r"views\['kv'\].pages: "),
    ({"kv": [[1], [2]]}, TypeError, r"views\['kv'\].pages: "),
    ({"kv": [1, "2"]}, TypeError, r"views\['kv'\].pages"),
    ({"kv": kvd.View([1], first_token=-1)}, ValueError, r"views\['kv'\].first_token: -1"),
    ({"kv": kvd.View([1], tokens=5)}, TypeError, r"views\['kv'\].tokens: 5"),
    ({"kv": kvd.View([1], tokens=(4, 2))}, ValueError, r"views\['kv'\].tokens: \(4, 2\)"),
    ({"kv": kvd.View([1], tokens=(0, 0))}, ValueError, "None means all"),
    ({"kv": kvd.View([1], layers=(0, 1.0))}, TypeError, r"views\['kv'\].layers\[1\]: 1.0"),
])
def test_views_are_refused_by_name(engine, views, kind, words):
    with pytest.raises(kind, match=words):
        engine.client.offer(1, engine.pool, views)


def test_pages_of_every_integer_type_are_taken(engine):
    for number, pages in enumerate(([1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8),
                                    np.array([1, 2], np.int64), [np.int32(1), 2])):
        offer = engine.client.offer(500 + number, engine.pool, {"kv": pages})
        record = engine.client.command("room.show", room=str(500 + number))
        assert not record.get("error")
        offer.abort()
        with pytest.raises(kvd.AbortedError):
            offer.wait(timeout=60)
        offer.close()


def test_handles_of_another_client_are_refused(engine, other):
    with pytest.raises(ValueError, match="pool: belongs to another client"):
        engine.client.send(600, other.pool)
    with pytest.raises(ValueError, match=r"regions\[1\]: belongs to another client"):
        engine.client.pool(layout(), [engine.regions[0], other.regions[1]])
    with pytest.raises(ValueError, match=r"wait\[0\]: belongs to another client"):
        engine.client.pull(600, engine.pool, None, {"kv": [1]}, wait=(other.regions[0], 0, 1))


def test_arguments_of_open_rooms_are_refused_by_name(engine):
    tx = engine.client.send(700, engine.pool)
    rx = engine.client.recv(700, engine.pool, [None])
    for call, kind, words in (
            (lambda: tx.send({"kv": [0]}, seq=-1), ValueError, "seq: -1"),
            (lambda: tx.send({"kv": [0]}, last=1), TypeError, r"last: 1 \(int\) is not a bool"),
            (lambda: tx.send([0]), TypeError, "views: "),
            (lambda: rx.bind([0]), TypeError, "views: "),
            (lambda: rx.bind({"kv": [0]}, aux=-1), ValueError, "aux: -1"),
            (lambda: rx.abort(5), TypeError, "reason: 5"),
            (lambda: rx.wait("success"), TypeError, "state: 'success'"),
            (lambda: rx.wait(9), ValueError, "state: 9"),
            (lambda: rx.landed(-1), ValueError, "pages: -1"),
            (lambda: rx.landed(1, view=2), TypeError, "view: 2")):
        with pytest.raises(kind, match=words):
            call()
    for room in (tx, rx):
        room.abort()


@pytest.mark.parametrize("call, kind, words", [
    (lambda c: c.register_fd(1.0, 4096), TypeError, "fd: 1.0"),
    (lambda c: c.register_fd(-1, 4096), ValueError, "fd: -1"),
    (lambda c: c.register_fd(1, -4096), ValueError, "nbytes: -4096"),
    (lambda c: c.register_fd(1, 4096, offset=-1), ValueError, "offset: -1"),
    (lambda c: c.register_fd(1, 4096, name=5), TypeError, "name: 5"),
    (lambda c: c.register_shm(5, 4096), TypeError, "shm_name: 5"),
    (lambda c: c.register_address(0, 4096), ValueError, "address: 0"),
    (lambda c: c.register_address(4096, 1 << 64), ValueError, "nbytes: 18446744073709551616"),
    (lambda c: c.register_address(-4096, 4096), ValueError, "address: -4096"),
    (lambda c: c.register_address(4096, 4096, adopt_memory="no"), TypeError, "adopt_memory"),
    (lambda c: c.register_gpu(4096, 0), ValueError, "nbytes: 0"),
    (lambda c: c.register_gpu_fd(1, 4096, device=0, allocation=1), TypeError, "device: 0"),
    (lambda c: c.pool(5, []), TypeError, "layout: 5"),
    (lambda c: c.pool(layout(), 5), TypeError, "regions: 5"),
    (lambda c: c.pool(layout(), ["r"]), TypeError, r"regions\[0\]: 'r'"),
    (lambda c: c.pool(layout(), [], name=3), TypeError, "name: 3"),
    (lambda c: c.command(5), TypeError, "cmd: 5"),
    (lambda c: c.command("ping", timeout=-1), ValueError, "timeout: -1"),
    (lambda c: kvd.Client(5), TypeError, "socket: 5"),
    (lambda c: kvd.Client(timeout="x"), TypeError, "timeout: 'x'"),
    (lambda c: kvd.Memory(1.5), TypeError, "nbytes: 1.5"),
    (lambda c: kvd.Memory(-1), ValueError, "nbytes: -1"),
    (lambda c: kvd.Layout(1.5), TypeError, "rank: 1.5"),
    (lambda c: kvd.Layout().buffer(1.5), TypeError, "nbytes: 1.5"),
    (lambda c: kvd.Layout().view(1, 2, 3), TypeError, "name: 1"),
    (lambda c: kvd.Layout().view("kv", 2, True), TypeError, "pages: True"),
    (lambda c: kvd.Layout().view("kv", 2, 3, shard=(0, 0, 1)), ValueError, "shard size: 0"),
    (lambda c: kvd.Layout().view("kv", 2, 3, shard=(2, 2, 1)), ValueError, "shard rank: 2"),
    (lambda c: kvd.Layout().view("kv", 2, 3, shard=(2, 1, 0)), ValueError, "shard run: 0"),
    (lambda c: kvd.Layout().heads("kv", 0, "k", buffer=0, unit_bytes=1), ValueError,
     "view: 'kv'"),
    (lambda c: kvd.Layout().view("kv", 2, 3).heads("kv", 0, "k", buffer=0, unit_bytes=1),
     ValueError, "buffer: the layout has none"),
    (lambda c: kvd.Layout.sglang_mha(page_size=1, pages=1, layers=1, kv_heads=1, head_bytes=1,
                                     tp_size=1.0), TypeError, "size: 1.0"),
    (lambda c: kvd.Layout.sglang_mha(page_size=1.5, pages=1, layers=1, kv_heads=1,
                                     head_bytes=1), TypeError, "page_size: 1.5"),
    (lambda c: kvd.Layout.sglang_mla(page_size=1, pages=1, layers=[0.5], latent_bytes=1),
     TypeError, r"layers\[0\]: 0.5"),
    (lambda c: shards.units(8.0, 2, 0), TypeError, "total: 8.0"),
    (lambda c: shards.units((1 << 32) + 8, 2, 0), ValueError, "total: 4294967304"),
])
def test_arguments_are_refused_by_name(engine, call, kind, words):
    with pytest.raises(kind, match=words):
        call(engine.client)


def test_invalid_arguments_never_reach_the_daemon(engine):
    def served():
        told = engine.client.command("stats")["metrics"]
        return [int(m["value"]) for m in told if m["name"] == "commands_total"][0]
    before = served()
    for call, kind, _ in ROOM_CALLS:
        with pytest.raises(kind):
            call(engine)
    assert served() == before + 1


# ---- public names have descriptions --------------------------------------------------------

def public(thing):
    for name, member in vars(thing).items():
        if not name.startswith("_") and (inspect.isfunction(member) or
                                         isinstance(member, property) or
                                         isinstance(member, classmethod)):
            yield name, member


def test_every_public_name_has_a_docstring():
    modules = [kvd, kvd.shards]
    things = [(m.__name__ + "." + n, getattr(m, n)) for m in modules for n in dir(m)
              if not n.startswith("_")]
    classes = [(n, t) for n, t in things if inspect.isclass(t) or inspect.isfunction(t)]
    assert len(classes) >= 30
    for name, thing in classes:
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing) and thing.__module__.startswith("kvd"):
            for member, inner in public(thing):
                assert inspect.getdoc(inner), "%s.%s" % (name, member)


def test_no_signature_hides_its_arguments():
    for cls in (kvd.Client, kvd.AsyncClient, kvd.Room, kvd.AsyncRoom, kvd.Pool):
        for name, member in list(public(cls)) + [("__init__", cls.__init__)]:
            if not inspect.isfunction(member) or name == "command":
                continue
            kinds = {p.kind for p in inspect.signature(member).parameters.values()}
            assert not kinds & {inspect.Parameter.VAR_KEYWORD,
                                inspect.Parameter.VAR_POSITIONAL}, (cls, name)


def test_names_of_a_request_are_checked_and_kept(engine):
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with pytest.raises(TypeError, match="request_id: 7"):
        engine.client.send(900, engine.pool, request_id=7)
    for name, text in (("request_id", ""), ("request_id", "a b"), ("request_id", "\x1b[2J"),
                       ("traceparent", parent.upper()), ("traceparent", "\u00e9" * 55)):
        with pytest.raises(kvd.Error, match=name + ":"):
            engine.client.send(900, engine.pool, **{name: text})
    with pytest.raises(ValueError):
        engine.client.send(900, engine.pool, request_id="a\0b")
    room = engine.client.send(900, engine.pool, request_id="cmpl-1", traceparent=parent)
    shown = engine.client.command("room.show", room="900")
    assert (shown["request_id"], shown["traceparent"]) == ("cmpl-1", parent)
    room.abort()
    with pytest.raises(kvd.Error, match="aborted"):
        room.wait(timeout=60)
    room.close()


def test_retry_names_every_retryable_code():
    """Those of the daemon's table, as docs/reference.md has them, and libkvd's own."""
    import os
    from conftest import ROOT
    with open(os.path.join(ROOT, "docs", "reference.md")) as text:
        retryable = set(re.findall(r"^\| (E\w+) \|.*\| yes \| [^|]* \|$", text.read(), re.M))
    assert len(retryable) > 10
    own = {"ELOST", "ENODAEMON", "ENOREPLY", "EFULL", "EDEAD"}
    assert set(kvd.RETRY) == retryable | own
    with open(os.path.join(ROOT, "docs", "clients.md")) as text:
        told = text.read()
    for code, words in kvd.RETRY.items():
        row = re.search(r"^\|[^|]*`%s`[^|]*\|[^|]*\| (.*) \|$" % code, told, re.M)
        assert row and row.group(1) == words, code


def test_room_has_a_ticket_and_names_its_peers(engine):
    """Which ticket is in no record; one of another form is refused by name."""
    ticket = "00112233445566778899aabbccddeeff"
    for wrong in ("", "0" * 32, ticket[:-1], ticket + "00", "z" * 32):
        with pytest.raises(kvd.Error, match="ticket"):
            engine.client.send(901, engine.pool, ticket=wrong)
    for wrong in (7, b"0" * 16):
        with pytest.raises(TypeError, match="ticket"):
            engine.client.send(901, engine.pool, ticket=wrong)
    for wrong in ("anna", [7], None):
        with pytest.raises(TypeError, match="peers"):
            engine.client.send(901, engine.pool, peers=wrong)
    room = engine.client.send(901, engine.pool, ticket=ticket, peers=["anna", "bert"])
    shown = engine.client.command("room.show", room="901", role="send")
    assert shown["ticket"] is True and shown["admits"] == ["anna", "bert"]
    assert ticket not in str(shown)
    room.abort()
