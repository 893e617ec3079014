# SPDX-License-Identifier: Apache-2.0
"""The nixl package: the calls that engines make, between processes over two daemons; every byte
is verified, including those around the target."""
import gc
import itertools
import os
import pickle
import random
import threading

import numpy as np
import pytest

from conftest import until
from kvd import _kvd
from nixl_peer import Peer, agent_of

ROW, ROWS, GUARD = 256, 512, 4096
SIZE = ROW * ROWS + 2 * GUARD
_names = itertools.count()


@pytest.fixture
def B():
    import nixl._bindings as bindings
    return bindings


def name(word="agent"):
    return "%s-%d" % (word, next(_names))


class World:
    """An agent here, one in another process, memory on both sides."""

    def __init__(self, pair, size=SIZE, big=0, **config):
        self.agent = agent_of(pair[0].socket_path, name("here"), capture_telemetry=True,
                              **config)
        self.peer = Peer(pair[1], name("there"), capture_telemetry=True)
        self.mine = np.random.default_rng(3).integers(0, 256, size + big, dtype=np.uint8)
        self.base = self.mine.ctypes.data
        self.reg = self.agent.register_memory([(self.base, size + big, 0, "")], "DRAM")
        self.yours = self.peer.alloc(size + big, 0xee)
        self.remote = self.agent.add_remote_agent(self.peer.metadata())

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.peer.__exit__(*exc)

    def rows(self, base, picks, row=ROW):
        table = np.zeros((len(picks), 3), np.uint64)
        table[:, 0] = base + GUARD + np.asarray(picks, np.uint64) * row
        table[:, 1] = row
        return table

    def lists(self, n=ROWS):
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.rows(self.base, range(n)),
                                           "DRAM")
        remote = self.agent.prep_xfer_dlist(self.remote, self.rows(self.yours, range(n)),
                                            "DRAM")
        return local, remote

    def run(self, handle, *args):
        state = self.agent.transfer(handle, *args)
        return until(lambda: state == "DONE" or
                     self.agent.check_xfer_state(handle) == "DONE", pause=0.0002)

    def expect(self, moved, row=ROW):
        """The remote memory: row -> local row; all else as it was filled."""
        wanted = np.full(self.mine.size, 0xee, np.uint8)
        for to, of in moved.items():
            at, src = GUARD + to * row, GUARD + of * row
            wanted[at:at + row] = self.mine[src:src + row]
        got = np.frombuffer(self.peer.read(0), np.uint8)
        assert np.array_equal(got, wanted)


@pytest.fixture
def world(pair):
    with World(pair) as w:
        yield w


# ---- the surface -------------------------------------------------------------------------

def test_modules_have_the_names(B):
    import importlib.util
    import sys

    import nixl
    from nixl import _api, _utils, logging
    assert importlib.util.find_spec("nixl") is not None
    for word in nixl.__all__:
        assert hasattr(nixl, word), word
    assert _api.DEFAULT_COMM_PORT == B.DEFAULT_COMM_PORT == 8888
    assert (B.DRAM_SEG, B.VRAM_SEG, B.BLK_SEG, B.OBJ_SEG, B.FILE_SEG) == (0, 1, 2, 3, 4)
    assert (B.NIXL_READ, B.NIXL_WRITE, B.NIXL_IN_PROG, B.NIXL_SUCCESS) == (0, 1, 1, 0)
    assert B.NIXL_ERR_NOT_SUPPORTED == -9 and B.NIXL_INIT_AGENT == ""
    for word in ("NotPosted InvalidParam Backend NotFound Mismatch NotAllowed RepostActive "
                 "Unknown NotSupported RemoteDisconnect Cancelled NoTelemetry").split():
        kind = getattr(B, "nixl%sError" % word)
        assert kind.__bases__ == (Exception,) and "NIXL_ERR" in str(kind())
    assert logging.get_logger("_x").name == "nixl.x"
    memory = _utils.malloc_passthru(64)
    _utils.ba_buf(memory, 64)
    _utils.verify_transfer(memory, memory + 32, 32)
    _utils.free_passthru(memory)
    assert "torch" not in sys.modules


def test_config_keeps_given_values(B):
    from nixl._api import nixl_agent_config, nixl_thread_sync_t
    conf = nixl_agent_config(True, True, 0, num_threads=4)
    assert (conf.enable_pthread, conf.enable_listen, conf.port, conf.num_threads,
            conf.capture_telemetry, conf.backends) == (True, True, 0, 4, False, ["UCX"])
    assert nixl_agent_config().sync_mode is None
    assert nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT is \
        nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    with pytest.raises(TypeError):
        nixl_agent_config(sync_mode=1)
    telemetry = B.nixlXferTelemetry()
    assert telemetry.totalBytes == telemetry.descCount == telemetry.startTime == 0


def test_agent_refuses_bad_names_and_no_daemon(pair, monkeypatch):
    from nixl._api import nixl_agent
    with pytest.raises(ValueError):
        nixl_agent("")
    with pytest.raises(TypeError):
        nixl_agent(None)
    monkeypatch.setenv("KVD_SOCKET", "/nowhere.sock")
    with pytest.raises(RuntimeError) as told:
        nixl_agent("a")
    assert "KVD_SOCKET" in str(told.value) and "KVD_AUTOSTART" in str(told.value)


def test_agent_without_backends_then_ucx(pair, B):
    a = agent_of(pair[0].socket_path, name(), backends=[])
    assert "UCX" in a.get_plugin_list() and a.backends == {}
    with pytest.raises(B.nixlInvalidParamError):
        a.get_agent_metadata()
    a.create_backend("UCX", {"num_threads": "8"})
    assert a.get_backend_params("UCX") == {"num_threads": "8"}
    assert a.get_plugin_mem_types("UCX") == a.get_backend_mem_types("UCX") == \
        ["DRAM_SEG", "VRAM_SEG"]
    assert a.get_plugin_params("NONE") == {} and a.get_plugin_mem_types("NONE") == []
    with pytest.raises(B.nixlNotFoundError):
        a.create_backend("NONE")
    with pytest.raises(B.nixlInvalidParamError):
        a.create_backend("UCX")
    assert isinstance(a.get_agent_metadata(), bytes)
    skipped = agent_of(pair[0].socket_path, name(), backends=["GDS", "UCX"])
    assert list(skipped.backends) == ["UCX"]


def test_descriptor_lists_behave(pair, B):
    a = agent_of(pair[0].socket_path, name())
    d = a.get_xfer_descs([(1, 2, 3), (4, 5, 6)], "DRAM")
    assert isinstance(d, B.nixlXferDList) and a.get_xfer_descs(d) is d
    assert (d.descCount(), d[1], d.getType(), d.isEmpty()) == (2, (4, 5, 6), B.DRAM_SEG, False)
    array = np.array([[1, 2, 3], [4, 5, 6]], np.uint64)
    assert a.get_xfer_descs(array, "DRAM") == d
    assert a.get_xfer_descs(array.astype(np.int64), "DRAM") == d
    assert pickle.loads(pickle.dumps(d)) == d
    assert a.deserialize_descs(a.get_serialized_descs(d)) == d
    d.addDesc((7, 8, 9))
    d[0] = (9, 9, 9)
    assert d.index((7, 8, 9)) == 2 and d[0] == (9, 9, 9)
    d.remDesc(0)
    assert d.descCount() == 2
    with pytest.raises(B.nixlNotFoundError):
        d.index((0, 0, 0))
    with pytest.raises(IndexError):
        d[7]
    with pytest.raises(TypeError):
        hash(d)
    d.clear()
    assert d.isEmpty()
    r = a.get_reg_descs([(1, 2, 3, "meta")], "DRAM")
    assert r[0] == (1, 2, 3, b"meta") and r.trim()[0] == (1, 2, 3) and bool(r)
    assert pickle.loads(pickle.dumps(r)) == r
    assert a.get_xfer_descs(r) is None and a.get_reg_descs(r.trim()) is None
    assert a.get_xfer_descs([(1, 2, 3)]) is None and a.get_reg_descs([(1, 2, 3)], "DRAM") is None
    assert a.get_xfer_descs(np.zeros((2, 4), np.uint64), "DRAM") is None
    for wrong in (lambda: a.get_xfer_descs([], "DRAM"), lambda: a.get_reg_descs([], "DRAM")):
        with pytest.raises(IndexError):
            wrong()
    with pytest.raises(KeyError):
        a.get_xfer_descs([(1, 2, 3)], "NONE")
    with pytest.raises(ValueError):
        a.get_xfer_descs(np.zeros((2, 3), np.float64), "DRAM")
    assert B.nixlXferDList(B.DRAM_SEG, 5).descCount() == 5
    remote = a.get_remote_descs([(1, 2, 3, "other")], "DRAM")
    assert remote[0] == (1, 2, 3, "other")
    with pytest.raises(TypeError):
        pickle.dumps(remote)


# ---- memory and metadata --------------------------------------------------------------------

def test_register_refuses_unsupported_memory(pair, B):
    a = agent_of(pair[0].socket_path, name())
    memory = np.zeros(8192, np.uint8)
    at = memory.ctypes.data
    got = a.register_memory([(at, 8192, 0, "")], "DRAM", backends=["UCX"])
    assert isinstance(got, B.nixlRegDList) and got
    again = a.register_memory(got)
    a.deregister_memory(again)
    a.deregister_memory(got)
    with pytest.raises(B.nixlNotFoundError):
        a.deregister_memory(got)
    with pytest.raises(B.nixlBackendError):
        a.register_memory([(0, 10, 0, "")], "DRAM")
    with pytest.raises(B.nixlBackendError):
        a.register_memory([(at, 8192, 0, "")], "VRAM")
    for kwargs in (dict(mem_type="NONE"), dict(mem_type="DRAM", backends=["NONE"])):
        with pytest.raises(KeyError):
            a.register_memory([(at, 8192, 0, "")], **kwargs)
    with pytest.raises(ValueError):
        a.query_memory([(at, 1, 0, "")], "NONE", "DRAM")


def test_metadata_is_checked(world, B):
    blob = world.peer.metadata()
    assert world.agent.add_remote_agent(blob) == world.remote
    assert isinstance(world.remote, bytes)
    for bad in (b"", b"x", b"KVDNIXL1", blob[:-1], blob + b"x", os.urandom(400)):
        with pytest.raises(B.nixlMismatchError):
            world.agent.add_remote_agent(bad)
    for at in random.Random(1).sample(range(len(blob)), 60):
        with pytest.raises(B.nixlMismatchError):
            world.agent.add_remote_agent(blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1:])
    with pytest.raises(B.nixlInvalidParamError):
        world.agent.add_remote_agent(world.agent.get_agent_metadata())
    with pytest.raises(TypeError):
        world.agent.add_remote_agent(7)
    assert world.agent.check_remote_metadata(world.remote)
    assert world.agent.check_remote_metadata(world.remote.decode())
    assert not world.agent.check_remote_metadata("nobody")
    inside = world.agent.get_xfer_descs([(world.yours, 10, 0)], "DRAM")
    outside = world.agent.get_xfer_descs([(world.yours + SIZE, 10, 0)], "DRAM")
    assert world.agent.check_remote_metadata(world.remote, inside)
    assert not world.agent.check_remote_metadata(world.remote, outside)
    world.agent.remove_remote_agent(world.remote)
    world.agent.remove_remote_agent(world.remote)
    assert not world.agent.check_remote_metadata(world.remote)


def test_partial_metadata_adds_up(pair, B):
    a, b = (agent_of(d.socket_path, name()) for d in pair)
    memory = np.zeros(3 * 4096, np.uint8)
    at = memory.ctypes.data
    parts = [b.register_memory([(at + i * 4096, 4096, 0, "")], "DRAM") for i in range(3)]
    connection = b.get_partial_agent_metadata(B.nixlRegDList(B.DRAM_SEG))
    some = b.get_partial_agent_metadata(parts[0])
    with pytest.raises(B.nixlNotFoundError):
        a.add_remote_agent(some)
    remote = a.add_remote_agent(connection)
    assert a.check_remote_metadata(remote)
    assert not a.check_remote_metadata(remote, parts[0].trim())
    a.add_remote_agent(some)
    assert a.check_remote_metadata(remote, parts[0].trim())
    assert not a.check_remote_metadata(remote, parts[1].trim())
    a.add_remote_agent(b.get_partial_agent_metadata(parts[1], inc_conn_info=True))
    assert a.check_remote_metadata(remote, parts[1].trim())
    assert a.check_remote_metadata(remote, parts[0].trim())
    with pytest.raises(B.nixlNotFoundError):
        b.get_partial_agent_metadata(b.get_reg_descs([(at + 5, 7, 0, "")], "DRAM"))


def test_metadata_of_a_restarted_agent_replaces_the_old(pair, B):
    word = name("restarts")
    with World(pair) as w:
        with Peer(pair[1], word) as first:
            at = first.alloc(SIZE)
            remote = w.agent.add_remote_agent(first.metadata())
            old = w.agent.prep_xfer_dlist("", w.rows(w.base, [0]), "DRAM")
            to = w.agent.prep_xfer_dlist(remote, w.rows(at, [2]), "DRAM")
            w.run(w.agent.make_prepped_xfer("WRITE", old, [0], to, [0]))
        with Peer(pair[1], word) as second:
            at = second.alloc(SIZE, 0xee)
            assert w.agent.add_remote_agent(second.metadata()) == remote
            to = w.agent.prep_xfer_dlist(remote, w.rows(at, [3]), "DRAM")
            w.run(w.agent.make_prepped_xfer("WRITE", old, [0], to, [0], b"hello"))
            assert second.read(0, GUARD + 3 * ROW, GUARD + 4 * ROW) == \
                w.mine[GUARD:GUARD + ROW].tobytes()
            assert until(second.notifs) == {w.agent.name: [b"hello"]}


def test_listener_exchanges_metadata(pair, B):
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: F401
    a = agent_of(pair[0].socket_path, name("a"), enable_listen_thread=True, listen_port=0)
    b = agent_of(pair[1].socket_path, name("b"), enable_listen_thread=True, listen_port=0)
    port = a.agent._listener.port
    b.send_local_metadata("127.0.0.1", port)
    until(lambda: a.check_remote_metadata(b.name))
    b.fetch_remote_metadata(a.name, "127.0.0.1", port)
    until(lambda: b.check_remote_metadata(a.name))
    b.invalidate_local_metadata("127.0.0.1", port)
    until(lambda: not a.check_remote_metadata(b.name))
    with pytest.raises(RuntimeError):
        agent_of(pair[0].socket_path, name(), enable_listen_thread=True, listen_port=port)
    with pytest.raises(B.nixlInvalidParamError, match="directory"):
        a.send_local_metadata()
    quiet = agent_of(pair[0].socket_path, name())
    quiet.send_local_metadata("127.0.0.1", port)


# ---- transfers ---------------------------------------------------------------------------------

@pytest.mark.parametrize("adopt", ["1", "0"])
@pytest.mark.parametrize("picks", ["dense", "scattered"])
def test_write_and_read_move_the_right_bytes(pair, adopt, picks, monkeypatch):
    monkeypatch.setenv("KVD_ADOPT", adopt)
    with World(pair, big=40 << 20) as w:
        local, remote = w.lists()
        rng = np.random.default_rng(5)
        mine = np.arange(100) if picks == "dense" else rng.permutation(ROWS)[:100]
        theirs = mine + 7 if picks == "dense" else rng.permutation(ROWS)[:100]
        h = w.agent.make_prepped_xfer("WRITE", local, mine, remote, theirs, b"written")
        assert w.run(h)
        moved = {int(t): int(m) for t, m in zip(theirs, mine)}
        w.expect(moved)
        assert until(w.peer.notifs) == {w.agent.name: [b"written"]}
        before = w.mine.copy()
        free = [r for r in range(ROWS) if r not in set(mine.tolist())][:100]
        back = w.agent.make_prepped_xfer("READ", local, free, remote, theirs.tolist(), b"read")
        assert w.run(back)
        for to, of in zip(free, theirs.tolist()):
            at, src = GUARD + to * ROW, GUARD + moved[of] * ROW
            before[at:at + ROW] = before[src:src + ROW]
        assert np.array_equal(w.mine, before)
        assert until(w.peer.notifs) == {w.agent.name: [b"read"]}


def test_index_lists_of_every_form(world):
    local, remote = world.lists()
    want = [5, 9, 300, 2]
    wide = np.zeros(8, np.int64)
    wide[::2] = want
    forms = [want, tuple(want), np.array(want, np.int32), np.array(want, np.int64),
             np.array(want, np.uint64), np.array(want, np.uint16), wide[::2],
             np.array(want[::-1], np.int32)[::-1], np.array(want, np.float64),
             np.array(want, ">i8")]
    for form in forms:
        handle = world.agent.make_prepped_xfer("WRITE", local, form, remote, want)
        world.run(handle)
    world.expect({r: r for r in want})


def test_make_and_prep_refuse_by_name(world, B):
    a = world.agent
    local, remote = world.lists()
    for bad in (lambda: a.make_prepped_xfer("WRITE", local, [ROWS], remote, [0]),
                lambda: a.make_prepped_xfer("WRITE", local, [0], remote, [-1]),
                lambda: a.make_prepped_xfer("WRITE", local, [1 << 32], remote, [0]),
                lambda: a.make_prepped_xfer("WRITE", local, np.array([1 << 32]), remote, [0]),
                lambda: a.make_prepped_xfer("WRITE", local, [1 << 70], remote, [0]),
                lambda: a.make_prepped_xfer("WRITE", local, np.array([-1]), remote, [0]),
                lambda: a.make_prepped_xfer("WRITE", local, [0, 1], remote, [0]),
                lambda: a.make_prepped_xfer("WRITE", local, [], remote, []),
                lambda: a.make_prepped_xfer("WRITE", local, np.zeros(0, np.int32), remote,
                                            np.zeros(0, np.int32)),
                lambda: a.make_prepped_xfer("WRITE", remote, [0], local, [0])):
        with pytest.raises(B.nixlInvalidParamError):
            bad()
    with pytest.raises(ValueError):
        a.make_prepped_xfer("WRITE", local, np.zeros((1, 1), int), remote, [0])
    with pytest.raises(KeyError):
        a.make_prepped_xfer("COPY", local, [0], remote, [0])
    uneven = a.prep_xfer_dlist("", [(world.base, 100, 0)], "DRAM")
    with pytest.raises(B.nixlInvalidParamError):
        a.make_prepped_xfer("WRITE", uneven, [0], remote, [0])
    for bad in (lambda: a.prep_xfer_dlist("nobody", [(1, 1, 0)], "DRAM"),
                lambda: a.prep_xfer_dlist("", [(world.base - 1, 10, 0)], "DRAM"),
                lambda: a.prep_xfer_dlist(world.remote, [(world.yours, SIZE + 1, 0)], "DRAM"),
                lambda: a.prep_xfer_dlist(world.remote, [(2 ** 64 - 8, 64, 0)], "DRAM"),
                lambda: a.prep_xfer_dlist("", B.nixlXferDList(B.DRAM_SEG)),
                lambda: a.prep_xfer_dlist("", [(world.base, 8, 0)], "VRAM")):
        with pytest.raises(B.nixlNotFoundError):
            bad()
    a.release_dlist_handle(local)
    a.release_dlist_handle(local)
    with pytest.raises(B.nixlInvalidParamError):
        a.make_prepped_xfer("WRITE", local, [0], remote, [0])


def test_strided_lists(world, B):
    a = world.agent
    local = np.array([[world.base + GUARD, ROW, 0, 2 * ROW, 20],
                      [world.base + GUARD + 100 * ROW, ROW, 0, ROW, 5]], np.uint64)
    remote = np.array([[world.yours + GUARD + 50 * ROW, ROW, 0, 3 * ROW, 25]], np.uint64)
    with pytest.raises(ValueError):
        a.prep_xfer_dlist("", local)
    mine, theirs = a.prep_xfer_dlist("", local, "DRAM"), \
        a.prep_xfer_dlist(world.remote, remote, "DRAM")
    world.run(a.make_prepped_xfer("WRITE", mine, np.arange(25), theirs,
                                  np.arange(25)[::-1].copy()))
    source = [2 * i for i in range(20)] + [100 + i for i in range(5)]
    world.expect({50 + 3 * (24 - i): source[i] for i in range(25)})
    for row in ((world.base, ROW, 0, ROW - 1, 3), (world.base, ROW, 0, ROW, 0),
                (world.base, ROW, 0, ROW, 1 << 40)):
        with pytest.raises(B.nixlNotFoundError):
            a.prep_xfer_dlist("", np.array([row], np.uint64), "DRAM")


def test_initialize_xfer_of_uneven_rows(world, B):
    a = world.agent
    cuts = [(0, 100), (1000, 3000), (9000, 1), (20000, 777)]
    local = a.get_xfer_descs([(world.base + GUARD + o, n, 0) for o, n in cuts], "DRAM")
    remote = a.get_xfer_descs(np.array([(world.yours + GUARD + 2 * o, n, 0) for o, n in cuts],
                                       np.uint64), "DRAM")
    h = a.initialize_xfer("WRITE", local, remote, world.remote, b"init")
    assert bool(h) and "released=False" in repr(h)
    world.run(h)
    got = world.peer.read(0)
    wanted = bytearray(b"\xee" * SIZE)
    for o, n in cuts:
        wanted[GUARD + 2 * o:GUARD + 2 * o + n] = world.mine[GUARD + o:GUARD + o + n].tobytes()
    assert got == bytes(wanted)
    short = a.get_xfer_descs([(world.base, 10, 0)], "DRAM")
    with pytest.raises(B.nixlInvalidParamError):
        a.initialize_xfer("WRITE", short, remote, world.remote)
    longer = a.get_xfer_descs([(world.base, 10, 0)], "DRAM")
    other = a.get_xfer_descs([(world.yours, 11, 0)], "DRAM")
    with pytest.raises(B.nixlInvalidParamError):
        a.initialize_xfer("WRITE", longer, other, world.remote)
    with pytest.raises(B.nixlNotFoundError):
        a.initialize_xfer("WRITE", longer, short, "nobody")


def test_repost_moves_again(world, B):
    local, remote = world.lists()
    h = world.agent.make_prepped_xfer("WRITE", local, [1], remote, [2], b"n")
    with pytest.raises(B.nixlNotPostedError):
        world.agent.check_xfer_state(h)
    for i in range(200):
        world.mine[GUARD + ROW:GUARD + 2 * ROW] = i
        world.run(h, b"round %d" % i) if i % 2 else world.run(h)
        assert world.agent.check_xfer_state(h) == "DONE"
    assert set(world.peer.read(0, GUARD + 2 * ROW, GUARD + 3 * ROW)) == {199}
    got = []
    until(lambda: got.extend(sum(world.peer.notifs().values(), [])) or len(got) == 200)
    words = [b"n"] + [b"round %d" % (i if i % 2 else i - 1) for i in range(1, 200)]
    assert got == words


def test_telemetry_after_every_done(pair, world, B):
    local, remote = world.lists()
    h = world.agent.make_prepped_xfer("WRITE", local, [1, 2, 3, 9], remote, [4, 5, 6, 7])
    with pytest.raises(B.nixlNotPostedError):
        world.agent.get_xfer_telemetry(h)
    for _ in range(20):
        world.run(h)
        t = world.agent.get_xfer_telemetry(h)
        assert isinstance(t, B.nixlXferTelemetry)
        assert (t.totalBytes, t.descCount) == (4 * ROW, 2)
        assert t.xferDuration >= t.postDuration > 0 and t.startTime > 0
    assert world.agent.estimate_xfer_cost(h) == (0, 0, "UNKNOWN")
    assert world.agent.query_xfer_backend(h) == "UCX"
    apart = world.agent.initialize_xfer(
        "WRITE", world.agent.get_xfer_descs(world.rows(world.base, [1, 2]), "DRAM"),
        world.agent.get_xfer_descs(world.rows(world.yours, [1, 2]), "DRAM"), world.remote)
    world.run(apart)
    assert world.agent.get_xfer_telemetry(apart).descCount == 2, "as they were given"
    quiet = agent_of(pair[0].socket_path, name())
    at = quiet.register_memory([(world.base, SIZE, 0, "")], "DRAM")
    h = quiet.initialize_xfer("WRITE", quiet.get_xfer_descs([(world.base, 8, 0)], "DRAM"),
                              quiet.get_xfer_descs([(world.base + 64, 8, 0)], "DRAM"),
                              quiet.name)
    quiet.transfer(h)
    until(lambda: quiet.check_xfer_state(h) == "DONE")
    with pytest.raises(B.nixlNoTelemetryError):
        quiet.get_xfer_telemetry(h)
    assert at


def test_loopback_within_one_agent(pair):
    a = agent_of(pair[0].socket_path, name())
    memory = np.arange(8192, dtype=np.uint64).view(np.uint8)
    at = memory.ctypes.data
    a.register_memory([(at, memory.size, 0, "")], "DRAM")
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", [(at, 4096, 0)], "DRAM")
    remote = a.prep_xfer_dlist(a.name, [(at + 8192, 4096, 0)], "DRAM")
    h = a.make_prepped_xfer("WRITE", local, [0], remote, [0], b"self")
    a.transfer(h)
    until(lambda: a.check_xfer_state(h) == "DONE")
    assert np.array_equal(memory[:4096], memory[8192:8192 + 4096])
    assert until(a.get_new_notifs) == {a.name: [b"self"]}


def test_two_agents_of_one_daemon(pair):
    a, b = (agent_of(pair[0].socket_path, name()) for _ in range(2))
    mine, yours = np.full(4096, 7, np.uint8), np.zeros(4096, np.uint8)
    a.register_memory([(mine.ctypes.data, 4096, 0, "")], "DRAM")
    b.register_memory([(yours.ctypes.data, 4096, 0, "")], "DRAM")
    remote = a.add_remote_agent(b.get_agent_metadata())
    h = a.initialize_xfer("WRITE", a.get_xfer_descs([(mine.ctypes.data, 4096, 0)], "DRAM"),
                          a.get_xfer_descs([(yours.ctypes.data, 4096, 0)], "DRAM"), remote,
                          b"there")
    a.transfer(h)
    until(lambda: a.check_xfer_state(h) == "DONE")
    assert (yours == 7).all() and until(b.get_new_notifs) == {a.name: [b"there"]}


def test_many_scattered_rows_at_once(pair):
    rows, row = 40000, 256
    with World(pair, size=rows * row + 2 * GUARD) as w:
        order = np.random.default_rng(2).permutation(rows)
        local = w.agent.prep_xfer_dlist("", w.rows(w.base, np.arange(rows)), "DRAM")
        remote = w.agent.prep_xfer_dlist(w.remote, w.rows(w.yours, order), "DRAM")
        index = np.arange(rows, dtype=np.int32)
        h = w.agent.make_prepped_xfer("WRITE", local, index, remote, index, b"all")
        for _ in range(3):
            w.run(h)
        got = np.frombuffer(w.peer.read(0), np.uint8)
        assert np.array_equal(got[GUARD:-GUARD].reshape(rows, row)[order],
                              w.mine[GUARD:-GUARD].reshape(rows, row))
        assert (got[:GUARD] == 0xee).all() and (got[-GUARD:] == 0xee).all()


def test_overlapping_rows_are_legal(world):
    a = world.agent
    local = a.prep_xfer_dlist("", [(world.base, 512, 0), (world.base + 256, 512, 0)], "DRAM")
    remote = a.prep_xfer_dlist(world.remote, [(world.yours, 512, 0),
                                              (world.yours + 1024, 512, 0)], "DRAM")
    world.run(a.make_prepped_xfer("WRITE", local, [0, 1], remote, [0, 1]))
    got = world.peer.read(0)
    assert got[:512] == world.mine[:512].tobytes()
    assert got[1024:1536] == world.mine[256:768].tobytes()


# ---- handles --------------------------------------------------------------------------------------

def test_released_handles_are_refused(world, B):
    local, remote = world.lists()
    h = world.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
    world.run(h)
    world.agent.release_xfer_handle(h)
    world.agent.release_xfer_handle(h)
    assert "released=True" in repr(h)
    for use in (world.agent.check_xfer_state, world.agent.transfer,
                world.agent.get_xfer_telemetry):
        with pytest.raises(B.nixlInvalidParamError):
            use(h)
    with pytest.raises(B.nixlInvalidParamError):
        world.agent.agent.getXferStatus(12345)


def test_regions_in_any_order_and_nested(pair):
    """Engines register a tensor a layer, and transfers name any of them."""
    a, b = (agent_of(d.socket_path, name()) for d in pair)
    mine = [np.full(4096, i + 1, np.uint8) for i in range(12)]
    yours = [np.zeros(4096, np.uint8) for _ in range(12)]
    for agent, arrays in ((a, mine), (b, yours)):
        rows = [(x.ctypes.data, 4096, 0, "") for x in arrays]
        agent.register_memory(rows[6:] + rows[:6], "DRAM")
        agent.register_memory([(arrays[3].ctypes.data + 1024, 1024, 0, "inner")], "DRAM")
        agent.register_memory([(arrays[3].ctypes.data + 1536, 1024, 0, "over it")], "DRAM")
    remote = a.add_remote_agent(b.get_agent_metadata())
    for picks in ([11], [7, 2], [3, 9, 0], list(range(12))):
        rows = [[(x[i].ctypes.data + o, 64, 0) for i in picks for o in (0, 1100, 1600, 4032)]
                for x in (mine, yours)]
        for op, arrays, source in (("WRITE", yours, 0), ("READ", mine, 100)):
            for i in picks:
                (mine if op == "WRITE" else yours)[i][:] = i + 1 + source
            h = a.initialize_xfer(op, *(a.get_xfer_descs(r, "DRAM") for r in rows), remote)
            a.transfer(h)
            until(lambda: a.check_xfer_state(h) == "DONE")
            for i in picks:
                for o in (0, 1100, 1600, 4032):
                    assert (arrays[i][o:o + 64] == i + 1 + source).all()


def test_binding_layer_by_itself(pair, B):
    """As NIXL's own tests of it: two agents of one process, memory of malloc."""
    from nixl import _utils
    names, agents, memory, lists = [name("raw"), name("raw")], [], [], []
    for word, daemon in zip(names, pair):
        os.environ["KVD_SOCKET"] = daemon.socket_path
        config = B.nixlAgentConfig()
        config.useProgThread = False
        agent = B.nixlAgent(word, config)
        del os.environ["KVD_SOCKET"]
        params, mems = agent.getPluginParams("UCX")
        assert "DRAM_SEG" in mems or B.DRAM_SEG in mems
        backend = agent.createBackend("UCX", params)
        at = _utils.malloc_passthru(256)
        _utils.ba_buf(at, 256)
        regs = B.nixlRegDList(B.DRAM_SEG)
        regs.addDesc((at, 256, 0, "dead"))
        assert agent.registerMem(regs, [backend]) == B.NIXL_SUCCESS
        agents.append((agent, backend))
        memory.append(at)
        lists.append(regs)
    (one, ucx), (two, _) = agents
    assert one.loadRemoteMD(two.getLocalMD()).decode() == names[1]
    ends = [B.nixlXferDList(B.DRAM_SEG) for _ in memory]
    for i, at in enumerate(memory):
        ends[i].addDesc((at + 8 + 8 * i, 8, 0))
    handle = one.createXferReq(B.NIXL_WRITE, ends[0], ends[1], names[1], "n\0tification")
    status = one.postXferReq(handle)
    assert status in (B.NIXL_IN_PROG, B.NIXL_SUCCESS)
    until(lambda: one.getXferStatus(handle) == B.NIXL_SUCCESS)
    _utils.verify_transfer(memory[0] + 8, memory[1] + 16, 8)
    assert until(lambda: two.getNotifs({})) == {names[0]: [b"n\0tification"]}
    assert one.queryXferBackend(handle) == ucx
    assert one.genNotif(names[1], "bare") == B.NIXL_SUCCESS
    assert until(lambda: two.getNotifs({})) == {names[0]: [b"bare"]}
    one.releaseXferReq(handle)
    sides = [one.prepXferDlist(word, d) for word, d in (("", ends[0]), (names[1], ends[1]))]
    made = one.makeXferReq(B.NIXL_READ, sides[0], [0], sides[1], [0], "read")
    one.postXferReq(made)
    until(lambda: one.getXferStatus(made) == B.NIXL_SUCCESS)
    one.releaseXferReq(made)
    for side in sides:
        one.releasedDlistH(side)
    assert one.invalidateRemoteMD(names[1]) == B.NIXL_SUCCESS
    for (agent, backend), regs, at in zip(agents, lists, memory):
        assert agent.deregisterMem(regs, [backend]) == B.NIXL_SUCCESS
        _utils.free_passthru(at)


def test_requests_outlive_their_lists(world):
    local, remote = world.lists()
    h = world.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
    world.agent.release_dlist_handle(local)
    world.agent.release_dlist_handle(remote)
    del local, remote
    gc.collect()
    world.run(h)
    world.expect({2: 1})


def test_dropped_handles_leak_nothing(world):
    agent = world.agent.agent

    def transfers():
        world.agent.get_new_notifs()
        return [s for s in agent._client.command("session.list")["sessions"]
                if s["session"] == agent._client.info["session"]][0]
    local, remote = world.lists()
    for i in range(50):
        h = world.agent.make_prepped_xfer("WRITE", local, [i], remote, [i])
        world.agent.transfer(h)
        del h
    gc.collect()
    assert not agent._requests
    until(lambda: agent._kvd.lost() is False and not agent._requests)
    del local, remote
    gc.collect()
    assert not agent._dlists and transfers()
    # and the session still works, and no data was written meanwhile
    local, remote = world.lists()
    world.run(world.agent.make_prepped_xfer("WRITE", local, [400], remote, [400]))


def test_release_in_flight_raises_until_quiesced(pair, B):
    with World(pair, size=96 << 20) as w:
        table = w.rows(w.base, [0], (96 << 20) - 2 * GUARD)
        local = w.agent.prep_xfer_dlist("", table, "DRAM")
        remote = w.agent.prep_xfer_dlist(w.remote,
                                         w.rows(w.yours, [0], (96 << 20) - 2 * GUARD), "DRAM")
        raised = 0
        for _ in range(30):
            h = w.agent.make_prepped_xfer("READ", local, [0], remote, [0])
            w.agent.transfer(h)
            try:
                w.agent.release_xfer_handle(h)
            except B.nixlBackendError:
                raised += 1

                def still():
                    try:
                        w.agent.release_xfer_handle(h)
                        return True
                    except B.nixlBackendError:
                        return False
                until(still)
            w.mine[:] = 1
            assert "released=True" in repr(h)
            # let the daemons complete pending work
            w.agent.agent._client.command("ping")
            assert (w.mine == 1).all(), "written after the release"
            if raised:
                break
        assert raised, "no release met a transfer in flight"


def test_active_transfer_is_not_posted_twice(pair, B):
    with World(pair, size=64 << 20) as w:
        row = (64 << 20) - 2 * GUARD
        h = w.agent.initialize_xfer("WRITE", w.agent.get_xfer_descs(w.rows(w.base, [0], row),
                                                                    "DRAM"),
                                    w.agent.get_xfer_descs(w.rows(w.yours, [0], row), "DRAM"),
                                    w.remote)
        w.run(h)
        pair[1].freeze()  # it copies what is written there: nothing is done meanwhile
        try:
            w.agent.transfer(h)
            with pytest.raises(B.nixlRepostActiveError):
                w.agent.transfer(h)
        finally:
            pair[1].thaw()
        until(lambda: w.agent.check_xfer_state(h) == "DONE")
        w.run(h)


def test_handle_travels_between_threads(world):
    local, remote = world.lists()
    box, failed = {}, []

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                failed.append(error)
        return threading.Thread(target=run)

    def make():
        box["h"] = world.agent.make_prepped_xfer("WRITE", local, [3], remote, [4])

    def steps():
        yield guarded(make)
        yield guarded(lambda: world.run(box["h"]))
        yield guarded(lambda: world.agent.release_xfer_handle(box["h"]))
    for thread in steps():
        thread.start()
        thread.join()
    assert not failed
    world.expect({4: 3})


def test_three_threads_share_an_agent(world):
    local, remote = world.lists()
    failed = []

    def work(k):
        try:
            for i in range(60):
                row = k * 100 + i
                h = world.agent.make_prepped_xfer("WRITE", local, [row], remote, [row],
                                                  b"%d" % row)
                world.run(h)
                world.agent.get_xfer_telemetry(h)
                world.agent.release_xfer_handle(h)
                world.agent.get_new_notifs()
                world.agent.send_notif(world.remote, b"b%d" % row)
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    world.expect({k * 100 + i: k * 100 + i for k in range(3) for i in range(60)})
    got = []
    until(lambda: got.extend(sum(world.peer.notifs().values(), [])) or len(got) >= 360)
    assert len(got) == len(set(got)) == 360


# ---- notifications -----------------------------------------------------------------------------------

def test_notifications_keep_order_and_bytes(world, B):
    a = world.agent
    sent = [b"", b"\x00\xff", bytes(range(256)), os.urandom(1 << 20), b"last"]
    for message in sent:
        a.send_notif(world.remote, notif_msg=message)
    a.send_notif(world.remote.decode(), "text")
    got = []
    until(lambda: got.extend(sum(world.peer.notifs().values(), [])) or len(got) == 6)
    assert got == sent + [b"text"]
    many = [b"%d" % i for i in range(2000)]
    for message in many:
        a.send_notif(world.remote, message)
    got = []
    until(lambda: got.extend(sum(world.peer.notifs().values(), [])) or len(got) == 2000)
    assert got == many and world.peer.notifs() == {}
    with pytest.raises(B.nixlNotFoundError):
        a.send_notif("nobody", b"x")
    with pytest.raises(TypeError):
        a.send_notif(world.remote, 5)
    with pytest.raises(B.nixlInvalidParamError):
        a.send_notif(world.remote, bytes((1 << 20) + 1))


def test_all_notifications_that_wait_are_taken(pair):
    """More than one reply of the daemon has."""
    a = agent_of(pair[0].socket_path, name())
    for i in range(200):
        a.send_notif(a.name, b"%4d" % i * 256)
    until(lambda: _kvd.notif_waiting(a.agent._kvd) == 200)
    assert a.get_new_notifs() == {a.name: [b"%4d" % i * 256 for i in range(200)]}


def test_notifications_with_and_without_transfer_are_ordered(world):
    local, remote = world.lists()
    h = world.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    words = []
    for i in range(100):
        world.run(h, b"t%d" % i)
        world.agent.send_notif(world.remote, b"b%d" % i)
        words += [b"t%d" % i, b"b%d" % i]
    got = []
    until(lambda: got.extend(sum(world.peer.notifs().values(), [])) or len(got) == 200)
    assert got == words


def test_notification_never_overtakes_its_data(pair):
    with World(pair, size=8 << 20) as w:
        row = (8 << 20) - 2 * GUARD
        h = w.agent.initialize_xfer("WRITE", w.agent.get_xfer_descs(w.rows(w.base, [0], row),
                                                                    "DRAM"),
                                    w.agent.get_xfer_descs(w.rows(w.yours, [0], row), "DRAM"),
                                    w.remote, b"landed")
        for i in range(10):
            w.mine[:] = i
            w.agent.transfer(h)
            assert until(w.peer.notifs) == {w.agent.name: [b"landed"]}
            got = np.frombuffer(w.peer.read(0), np.uint8)[GUARD:-GUARD]
            assert (got == i).all()
            until(lambda: w.agent.check_xfer_state(h) == "DONE")


def test_update_notifs_accumulates(world):
    world.peer.add(world.agent.get_agent_metadata())
    there = world.peer.call
    me = world.agent
    peer_name = world.remote.decode()
    for word in (b"tag-1", b"other", b"tag-2", b""):
        there("send_notif", me.name, word)
    until(lambda: len(me.update_notifs().get(peer_name, [])) == 4)
    assert me.check_remote_xfer_done(peer_name, b"tag")
    assert me.check_remote_xfer_done(peer_name, b"her", tag_is_prefix=False)
    assert not me.check_remote_xfer_done(peer_name, b"nothing")
    assert not me.check_remote_xfer_done("nobody", b"tag")
    assert me.update_notifs() == {peer_name: [b"tag-2", b""]}
    with pytest.raises(TypeError):
        me.check_remote_xfer_done(peer_name, "tag")
    assert me.check_remote_xfer_done(peer_name, b"tag-2")
    assert me.check_remote_xfer_done(peer_name, b""), "an empty one can be taken out"
    assert me.update_notifs()[peer_name] == []


def test_long_names_arrive_whole(pair):
    long = name("\n\"ünix" + "x" * 65500)
    a, b = agent_of(pair[0].socket_path, long), agent_of(pair[1].socket_path, name())
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif(b.name, b"hello")
    assert until(b.get_new_notifs) == {long: [b"hello"]}
    full = bytes(range(256)) * 4096
    a.send_notif(b.name, full)
    assert until(b.get_new_notifs) == {long: [full]}
    assert b.add_remote_agent(a.get_agent_metadata()) == long.encode()
    b.send_notif(long, b"back")
    assert until(a.get_new_notifs) == {b.name: [b"back"]}
