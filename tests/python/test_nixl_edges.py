# SPDX-License-Identifier: Apache-2.0
"""nixl where callers are not engines: what NIXL 1.5.1 itself does with odd arguments
(each case was run on it, too), and the ways that its examples and tests take: metadata
by listeners and in notifications, lists in notifications, the binding layer by hand."""
import datetime
import gc
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from conftest import until
from nixl_peer import Peer, agent_of
from test_nixl import B, name, world  # noqa: F401 (fixtures)


def raised_by(calls):
    """{what: the exception's class}, for calls that must raise."""
    out = {}
    for what, call in calls.items():
        try:
            out[what] = "gave %r" % (call(),)
        except Exception as error:
            out[what] = type(error)
    return out


# ---- lists ------------------------------------------------------------------------------

def test_package_exports_names_of_its_modules(B):  # noqa: F811
    import nixl
    from nixl import _api, _bindings, _utils
    for module in (_bindings, _utils):
        for word in getattr(module, "__all__", ("malloc_passthru", "free_passthru", "ba_buf",
                                                "verify_transfer")):
            if word != "nixl_thread_sync_t":
                assert getattr(nixl, word) is getattr(module, word), word
    assert nixl.nixl_agent is _api.nixl_agent
    assert nixl.nixl_thread_sync_t is _api.nixl_thread_sync_t is not B.nixl_thread_sync_t
    assert nixl.DRAM_SEG == B.DRAM_SEG and nixl.nixlNotFoundError is B.nixlNotFoundError
    assert callable(nixl.get_logger) and callable(nixl.setup_logging)
    namespace = {}
    exec("from nixl import *", namespace)
    assert {"nixl_agent", "nixl_agent_config", "DRAM_SEG", "nixlXferDList"} <= set(namespace)


def test_lists_by_number_name_and_width(B):  # noqa: F811
    X, R, D = B.nixlXferDList, B.nixlRegDList, B.DRAM_SEG
    assert [X(D, n).descCount() for n in (0, 5, False, True, np.int32(3))] == [0, 5, 0, 1, 3]
    assert (X(type=D, init_size=2).descCount(), R(D, init_size=3).descCount()) == (2, 3)
    assert X(type=D, descs=[(1, 2, 3)])[0] == (1, 2, 3)
    assert R(D, np.array([[1, 2, 3]], np.uint64))[0] == (1, 2, 3, b"")
    # what a tuple has beyond the list's width is not looked at
    d = X(D, [(1, 2, 3)])
    d.addDesc((4, 5, 6, "more"))
    d[0] = (7, 8, 9, 10)
    assert (d[0], d[1], d.index((4, 5, 6, 7))) == ((7, 8, 9), (4, 5, 6), 1)
    assert list(d) == [(7, 8, 9), (4, 5, 6)]
    assert raised_by({
        "short": lambda: d.addDesc((1, 2)), "short in R": lambda: R(D).addDesc((1, 2, 3)),
        "a list": lambda: d.addDesc([1, 2, 3]), "below 0": lambda: d.addDesc((-1, 2, 3)),
        "65 bits": lambda: X(D, [(1 << 64, 2, 3)]), "a float": lambda: d.addDesc((1., 2, 3)),
        "metadata": lambda: R(D, [(1, 2, 3, 4)]), "negative": lambda: X(D, -1),
        "not a number": lambda: X(D, 1.5), "outer tuple": lambda: X(D, ((1, 2, 3),)),
        "behind": lambda: d.remDesc(2), "no enum": lambda: X(0),
    }) == {
        "short": IndexError, "short in R": IndexError, "a list": TypeError,
        "below 0": RuntimeError, "65 bits": RuntimeError, "a float": RuntimeError,
        "metadata": RuntimeError, "negative": ValueError, "not a number": TypeError,
        "outer tuple": TypeError, "behind": IndexError, "no enum": TypeError}
    # NIXL reads behind the list here, or faults
    assert raised_by({"get": lambda: d[2], "set": lambda: d.__setitem__(2, (1, 2, 3))}) == \
        {"get": IndexError, "set": IndexError}


def test_lists_made_of_the_wrong_thing(pair, B):  # noqa: F811
    a = agent_of(pair[0].socket_path, name(), backends=[])
    assert [a.get_xfer_descs(x, m) for x, m in (
        ([(1, 2, 3, 4)], None), ([(1, 2, 3, 4)], "DRAM"), ([[1, 2, 3]], "DRAM"),
        (B.nixlRegDList(B.DRAM_SEG), None), ("abc", "DRAM"))] == [None] * 5
    assert [a.get_reg_descs(x, m) for x, m in (
        ([(1, 2, 3)], None), ([(1, 2, 3, 4)], None),
        (B.nixlXferDList(B.DRAM_SEG), None))] == [None] * 3
    assert raised_by({
        "V-RAM": lambda: a.get_xfer_descs([(1, 2, 3)], "V-RAM"),
        "V-RAM, reg": lambda: a.get_reg_descs([(1, 2, 3, "")], "V-RAM"),
        "None": lambda: a.get_xfer_descs(None, "DRAM"),
        "no row": lambda: a.get_xfer_descs(np.zeros((0, 3), np.uint64), "DRAM"),
        "32 bits": lambda: a.get_xfer_descs(np.zeros((1, 3), np.int32), "DRAM"),
        "number as metadata": lambda: a.get_reg_descs([(1, 2, 3, 4)], "DRAM"),
    }) == {"V-RAM": KeyError, "V-RAM, reg": KeyError, "None": TypeError,
           "no row": IndexError, "32 bits": ValueError, "number as metadata": RuntimeError}


def test_operation_is_checked_first(pair, B):  # noqa: F811
    a = agent_of(pair[0].socket_path, name(), backends=[])
    empty = B.nixlXferDList(B.DRAM_SEG)
    with pytest.raises(KeyError):
        a.make_prepped_xfer("RD", 0, [], 0, [])
    with pytest.raises(KeyError):
        a.initialize_xfer("WR", empty, empty, "nobody")


# ---- agents ------------------------------------------------------------------------------

def test_agent_without_backend_names_it(pair, B):  # noqa: F811
    a = agent_of(pair[0].socket_path, name(), backends=[])
    memory = np.zeros(4096, np.uint8)
    at = memory.ctypes.data
    empty = B.nixlXferDList(B.DRAM_SEG)
    assert raised_by({
        "metadata": a.get_agent_metadata, "notify": lambda: a.send_notif("x", b"y"),
        "new": a.get_new_notifs, "update": a.update_notifs,
        "register": lambda: a.register_memory([(at, 4096, 0, "")], "DRAM"),
        "prep": lambda: a.prep_xfer_dlist("", [(at, 8, 0)], "DRAM"),
        "init": lambda: a.initialize_xfer("READ", empty, empty, "nobody"),
    }) == {"metadata": B.nixlInvalidParamError, "notify": B.nixlBackendError,
           "new": B.nixlBackendError, "update": B.nixlBackendError,
           "register": B.nixlNotFoundError, "prep": B.nixlNotFoundError,
           "init": B.nixlNotFoundError}
    assert not a.check_remote_metadata("x")
    a.create_backend("UCX")
    assert a.get_new_notifs() == {}


def test_agent_of_bytes_and_its_own_name(pair, B):  # noqa: F811
    word = name("bytes")
    a = agent_of(pair[0].socket_path, word.encode())
    b = agent_of(pair[1].socket_path, name())
    assert b.add_remote_agent(bytearray(a.get_agent_metadata())) == word.encode()
    memory = np.zeros(4096, np.uint8)
    reg = a.register_memory([(memory.ctypes.data, 4096, 0, "")], "DRAM")
    # an agent knows itself, and what it registered
    assert a.check_remote_metadata(word) and a.check_remote_metadata(word, reg.trim())
    other = a.get_xfer_descs([(memory.ctypes.data + 4095, 2, 0)], "DRAM")
    assert not a.check_remote_metadata(word, other)
    assert not b.check_remote_metadata(word, reg.trim()), "metadata is as old as it is"
    statuses = (B.nixl_status_t.NIXL_ERR_INVALID_PARAM, B.nixl_status_t.NIXL_ERR_NOT_FOUND)
    assert (a.agent.invalidateRemoteMD(word), a.agent.invalidateRemoteMD("no")) == statuses
    with pytest.raises(TypeError):
        a.check_remote_metadata(word, [(1, 2, 3)])
    for wrong in ([(memory.ctypes.data, 8, 0, "")], reg.trim(), None):
        with pytest.raises(TypeError):
            a.get_partial_agent_metadata(wrong)
    for wrong in (reg.trim(), [(1, 2, 3, "")]):
        with pytest.raises(TypeError):
            a.deregister_memory(wrong)


def test_unknown_agent_is_not_found_before_all_else(world, B):  # noqa: F811
    a = world.agent
    one = a.get_xfer_descs([(world.base, 8, 0)], "DRAM")
    to = a.get_xfer_descs([(world.yours, 8, 0)], "DRAM")
    empty = B.nixlXferDList(B.DRAM_SEG)
    assert raised_by({
        "unknown": lambda: a.initialize_xfer("WRITE", one, empty, "nobody"),
        "the word for local": lambda: a.initialize_xfer("WRITE", one, to, "NIXL_INIT_AGENT"),
        "both empty": lambda: a.initialize_xfer("WRITE", empty, empty, world.remote),
        "uneven": lambda: a.initialize_xfer("WRITE", one, empty, world.remote),
        "lists": lambda: a.initialize_xfer("WRITE", [(1, 8, 0)], [(2, 8, 0)], world.remote),
        "no message": lambda: a.initialize_xfer("WRITE", one, to, world.remote, None),
        "backend": lambda: a.initialize_xfer("WRITE", one, to, world.remote, b"", ["GDS"]),
        "prep without kind": lambda: a.prep_xfer_dlist("", [(world.base, 8, 0)]),
        "prep of 4 columns": lambda: a.prep_xfer_dlist("", np.zeros((1, 4), int), "DRAM"),
        "prep of nothing": lambda: a.prep_xfer_dlist("", np.zeros((0, 5), int), "DRAM"),
        "prep of floats": lambda: a.prep_xfer_dlist("", np.zeros((1, 5)), "DRAM"),
    }) == {
        "unknown": B.nixlNotFoundError, "the word for local": B.nixlNotFoundError,
        "both empty": B.nixlNotFoundError, "uneven": B.nixlInvalidParamError,
        "lists": TypeError, "no message": TypeError, "backend": KeyError,
        "prep without kind": TypeError, "prep of 4 columns": TypeError,
        "prep of nothing": B.nixlNotFoundError, "prep of floats": ValueError}


def test_invalid_indices_are_refused(world, B):  # noqa: F811
    local, remote = world.lists()
    a = world.agent
    for wrong in (0, None, "01", [0.0], [None], [[0]]):
        with pytest.raises(RuntimeError):
            a.make_prepped_xfer("WRITE", local, wrong, remote, [0])
        with pytest.raises(RuntimeError):
            a.make_prepped_xfer("WRITE", local, [0], remote, wrong)
    for right in (range(2), (i for i in range(2)), [np.int64(0), np.int32(1)],
                  np.array([False, True])):
        world.run(a.make_prepped_xfer("WRITE", local, right, remote, [0, 1]))
    world.expect({0: 0, 1: 1})


def test_configuration_of_the_binding_layer(B):  # noqa: F811
    config = B.nixlAgentConfig(False, True, 7777, syncMode=B.NIXL_THREAD_SYNC_RW,
                               captureTelemetry=True)
    assert (config.useProgThread, config.useListenThread, config.listenPort) == \
        (False, True, 7777)
    assert config.syncMode == B.NIXL_THREAD_SYNC_RW and config.captureTelemetry
    assert config.etcdWatchTimeout == datetime.timedelta(seconds=5)
    assert B.nixlAgentConfig().lthrDelay == 100000
    with pytest.raises(TypeError):
        B.nixlAgentConfig(nothing=1)


@pytest.mark.parametrize("listen", [False, True])
def test_sync_mode_reaches_the_binding_layer(pair, B, monkeypatch, listen):  # noqa: F811
    from nixl._api import nixl_thread_sync_t
    seen, real = [], B.nixlAgent

    def spy(word, config):
        seen.append(config.syncMode)
        return real(word, config)
    monkeypatch.setattr(B, "nixlAgent", spy)
    modes = [None] + list(nixl_thread_sync_t)
    for mode in modes:
        agent_of(pair[0].socket_path, name(), sync_mode=mode, listen_port=0,
                 enable_listen_thread=listen)
    default = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if listen \
        else nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    assert seen == [(mode or default).value for mode in modes]


@pytest.mark.parametrize("word, config, wanted", [
    ("y", False, True), ("1", False, True), ("ON", False, True), ("no", True, False),
    ("0", True, False), ("off", True, False), (None, True, True), (None, False, False)])
def test_telemetry_is_switched_by_the_environment(pair, B, monkeypatch,  # noqa: F811
                                                  word, config, wanted):
    if word is None:
        monkeypatch.delenv("NIXL_TELEMETRY_ENABLE", raising=False)
    else:
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", word)
    a = agent_of(pair[0].socket_path, name(), capture_telemetry=config)
    memory = np.zeros(4096, np.uint8)
    at = memory.ctypes.data
    a.register_memory([(at, 4096, 0, "")], "DRAM")
    h = a.initialize_xfer("WRITE", a.get_xfer_descs([(at, 64, 0), (at + 64, 64, 0)], "DRAM"),
                          a.get_xfer_descs([(at + 1024, 64, 0), (at + 1088, 64, 0)], "DRAM"),
                          a.name, b"told")
    a.transfer(h)
    until(lambda: a.check_xfer_state(h) == "DONE")
    until(lambda: a.check_remote_xfer_done(a.name, b"told"))
    if wanted:
        t = a.get_xfer_telemetry(h)
        assert (t.descCount, t.totalBytes, t.backendName) == (2, 128, "UCX")
        assert t.startTime > 0 and 0 < t.postDuration <= t.xferDuration
    else:
        with pytest.raises(B.nixlNoTelemetryError):
            a.get_xfer_telemetry(h)


def test_many_agents_start_and_end(pair):
    """Each with memory that is freed while it is registered."""
    from nixl._utils import free_passthru, malloc_passthru
    for _ in range(30):
        agents = [agent_of(d.socket_path, name()) for d in pair]
        memory = [malloc_passthru(1024) for _ in agents]
        for agent, at in zip(agents, memory):
            agent.register_memory([(at, 1024, 0, "test")], "DRAM")
        one, two = agents
        assert two.add_remote_agent(one.get_agent_metadata()) == one.name.encode()
        for at in memory:
            free_passthru(at)
    agents = one = two = agent = None
    gc.collect()


# ---- the ways of NIXL's examples ---------------------------------------------------------

def test_binding_layer_by_hand(pair, B, monkeypatch):  # noqa: F811
    """Agents of the lower layer on two daemons: rows of some bytes at odd addresses, a
    notification that is a str with a NUL, telemetry, statuses."""
    from nixl import _utils
    agents, backends = [], []
    for daemon in pair:
        monkeypatch.setenv("KVD_SOCKET", daemon.socket_path)
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
        agents.append(B.nixlAgent(name("hand"), B.nixlAgentConfig(False)))
        backends.append(agents[-1].createBackend("UCX", {}))
    size = 257
    memory = [_utils.malloc_passthru(size) for _ in agents]
    _utils.ba_buf(memory[0], size)
    lists = []
    for agent, backend, at in zip(agents, backends, memory):
        reg = B.nixlRegDList(B.DRAM_SEG)
        reg.addDesc((at, size, 0, "dead"))
        assert agent.registerMem(reg, [backend]) == B.NIXL_SUCCESS
        lists.append(reg)
    one, two = agents
    assert one.loadRemoteMD(two.getLocalMD()).decode() == two._name
    assert two.loadRemoteMD(one.getLocalMD()).decode() == one._name
    mine, yours = B.nixlXferDList(B.DRAM_SEG), B.nixlXferDList(B.DRAM_SEG, False)
    mine.addDesc((memory[0] + 9, 7, 0))
    yours.addDesc((memory[1] + 3, 7, 0))
    handle = one.createXferReq(B.NIXL_WRITE, mine, yours, two._name, "n\0tification")
    assert handle != 0
    status = one.postXferReq(handle)
    got = {}

    def over():
        nonlocal status
        if status != B.NIXL_SUCCESS:
            assert status == B.NIXL_IN_PROG
            status = one.getXferStatus(handle)
        got.update(two.getNotifs(got))
        return got and status == B.NIXL_SUCCESS
    until(over)
    assert got == {one._name: [b"n\0tification"]}
    _utils.verify_transfer(memory[0] + 9, memory[1] + 3, 7)
    told = one.getXferTelemetry(handle)
    assert (told.descCount, told.totalBytes) == (1, 7)
    assert one.releaseXferReq(handle) == B.NIXL_SUCCESS
    # NIXL faults on what it never gave
    for call in (lambda: one.getXferStatus(handle), lambda: one.getXferStatus(0),
                 lambda: one.getBackendParams(12345)):
        with pytest.raises(B.nixlInvalidParamError):
            call()
    for agent, backend, reg in zip(agents, backends, lists):
        assert agent.deregisterMem(reg, [backend]) == B.NIXL_SUCCESS
    assert one.invalidateRemoteMD(two._name) == B.NIXL_SUCCESS
    for at in memory:
        _utils.free_passthru(at)


def test_two_peers_by_listeners_and_lists_in_notifications(pair):
    """Metadata by the listener, the target's list in a notification; READs of prepared
    rows, crossed; WRITEs of rows chosen later; the READs again, with other words."""
    rows, row = 16, 128
    with Peer(pair[1], name("target"), enable_listen_thread=True, listen_port=0) as target:
        me = agent_of(pair[0].socket_path, name("initiator"), enable_listen_thread=True,
                      listen_port=0)
        mine = np.zeros((rows, row), np.uint8)
        me.register_memory([(mine.ctypes.data, mine.nbytes, 0, "")], "cpu")
        at = target.alloc(rows * row, 1)
        port, its = target.call("get_listen_port"), target.own_name()
        assert me.get_listen_port() not in (0, port)
        me.send_local_metadata("127.0.0.1", port)
        me.fetch_remote_metadata(its, "127.0.0.1", port)
        until(lambda: target.call("check_remote_metadata", me.name))
        theirs = me.get_xfer_descs([(at + i * row, row, 0) for i in range(rows)], "cpu")
        target.call("send_notif", me.name, pickle.dumps((me.get_serialized_descs(theirs),
                                                         (at, rows, row, 0, "cpu"))))
        said, layout = pickle.loads(until(me.get_new_notifs)[its][0])
        assert layout[0] == at
        theirs = me.deserialize_descs(said)
        until(lambda: me.check_remote_metadata(its))
        local = me.prep_xfer_dlist("", me.get_xfer_descs(
            [(mine.ctypes.data + i * row, row, 0) for i in range(rows)], "cpu"))
        remote = me.prep_xfer_dlist(its, theirs)
        for i in range(rows):
            target.write(0, bytes([i + 1]) * row, i * row)
        reads = []
        for start in range(4):
            picks = [start, start + 4, start + 8]
            reads.append(me.make_prepped_xfer("READ", local, picks, remote, picks[::-1],
                                              b"Read %d" % start))
        for handle in reads:
            assert me.transfer(handle) != "ERR"
        until(lambda: all(me.check_xfer_state(h) == "DONE" for h in reads))
        for start in range(4):
            assert [mine[start + 4 * k, 0] for k in range(3)] == \
                [start + 4 * (2 - k) + 1 for k in range(3)]
        mine[12:] = 99
        half = row // 2
        write = me.initialize_xfer(
            "WRITE", me.get_xfer_descs([(mine[12].ctypes.data, half, 0),
                                        (mine[13].ctypes.data + half, half, 0)], "cpu"),
            me.get_xfer_descs(np.array([[at + 12 * row, half, 0],
                                        [at + 13 * row + half, half, 0]], np.uint64), "cpu"),
            its, b"Write 12,13")
        me.transfer(write)
        until(lambda: me.check_xfer_state(write) == "DONE")
        assert target.read(0, 12 * row, 14 * row) == (
            bytes([99]) * half + bytes([13]) * half + bytes([14]) * half + bytes([99]) * half)
        for start, handle in enumerate(reads):
            me.transfer(handle, b"Again %d" % start)
        until(lambda: all(me.check_xfer_state(h) == "DONE" for h in reads))
        wanted = sorted([b"Read %d" % i for i in range(4)] + [b"Write 12,13"] +
                        [b"Again %d" % i for i in range(4)])
        got = []
        until(lambda: got.extend(sum(target.notifs().values(), [])) or
              len(got) == len(wanted))
        assert sorted(got) == wanted
        me.invalidate_local_metadata("127.0.0.1", port)
        until(lambda: not target.call("check_remote_metadata", me.name))
        me.remove_remote_agent(its)


def test_partial_metadata_by_a_listener(pair, B):  # noqa: F811
    """What was not sent is not found, until it is."""
    me = agent_of(pair[0].socket_path, name("initiator"), enable_listen_thread=True,
                  listen_port=0)
    other = agent_of(pair[1].socket_path, name("target"), enable_listen_thread=True,
                     listen_port=0)
    size, memory = 256, np.zeros((30, 256), np.uint8)
    memory[:20] = np.arange(1, 21)[:, None]
    strings = [(r.ctypes.data, size, 0, "test") for r in memory]
    sets = [other.get_reg_descs(strings[i:i + 10], "DRAM") for i in (0, 10)]
    for one in sets:
        other.register_memory(one)
    mine = me.register_memory(strings[20:], "DRAM").trim()
    for i, one in enumerate(sets):
        theirs = one.trim()
        with pytest.raises(B.nixlNotFoundError):
            me.initialize_xfer("READ", mine, theirs, other.name, b"UUID")
        other.send_partial_agent_metadata(one, True, ["UCX"], "127.0.0.1",
                                          me.get_listen_port())
        until(lambda: me.check_remote_metadata(other.name, theirs))
        handle = me.initialize_xfer("READ", mine, theirs, other.name, b"UUID%d" % i)
        me.transfer(handle)
        until(lambda: me.check_xfer_state(handle) == "DONE")
        until(lambda: other.check_remote_xfer_done(me.name, b"UUID%d" % i))
        assert np.array_equal(memory[20:], memory[i * 10:i * 10 + 10])
    me.remove_remote_agent(other.name)
    for one in sets:
        other.deregister_memory(one)


def test_memory_registered_for_one_transfer(pair, B):  # noqa: F811
    """Receivers register as they receive, and tell it in a notification; all is taken
    back behind each transfer."""
    with Peer(pair[1], name("receiver")) as peer:
        me = agent_of(pair[0].socket_path, name("sender"))
        me.add_remote_agent(peer.metadata())
        peer.add(me.get_agent_metadata())
        for i in range(40):
            at = peer.alloc(5000, 0)
            peer.tell_ready(i, me.name)
            word, partial, lists = pickle.loads(until(me.get_new_notifs)[peer.own_name()][0])
            mine = np.full(5000, i + 1, np.uint8)
            reg = me.register_memory([(mine.ctypes.data, 5000, 0, "")], "DRAM")
            theirs = me.deserialize_descs(lists)
            assert theirs[0] == (at, 5000, 0)
            assert me.add_remote_agent(partial).decode() == peer.own_name()
            assert me.check_remote_metadata(peer.own_name(), theirs)
            handle = me.initialize_xfer("WRITE", reg.trim(), theirs, peer.own_name())
            me.transfer(handle)
            until(lambda: me.check_xfer_state(handle) == "DONE")
            me.deregister_memory(reg)
            me.send_notif(peer.own_name(), pickle.dumps((word, "over")))
            assert until(peer.notifs) == {me.name: [pickle.dumps((word, "over"))]}
            assert set(peer.read(i)) == {i + 1}
            peer.free(i)


def test_ring_of_slots_under_backpressure(pair):
    """Handles made once for slots at odd addresses, posted again and again; the receiver
    sees a number in each slot and answers every few of them."""
    slots, size, base, total = 8, 4096, 2, 200
    with Peer(pair[1], name("receiver")) as peer:
        me = agent_of(pair[0].socket_path, name("sender"))
        theirs = peer.alloc(base + slots * size, 0xff)
        remote = me.add_remote_agent(peer.metadata())
        peer.add(me.get_agent_metadata())
        mine = np.zeros(slots * size, np.uint8)
        me.register_memory([(mine.ctypes.data, mine.size, 0, "buffers")], "DRAM")
        local = me.prep_xfer_dlist("NIXL_INIT_AGENT", [
            (mine.ctypes.data + i * size, size, 0) for i in range(slots)], "DRAM")
        far = me.prep_xfer_dlist(remote, [
            (theirs + base + i * size, size, 0) for i in range(slots)], "DRAM")
        handles = [me.make_prepped_xfer("WRITE", local, [i], far, [i]) for i in range(slots)]
        peer.consume(base, slots, size, total, me.name)  # answers behind every second slot
        sent = taken = 0
        while taken < total:
            for message in sum(me.get_new_notifs().values(), []):
                taken = int(message[2:])
            if sent < total and sent - taken < slots:
                slot = sent % slots
                if sent < slots or until(
                        lambda: me.check_xfer_state(handles[slot]) == "DONE"):
                    mine[slot * size:(slot + 1) * size].view(np.uint64)[:] = sent
                    me.transfer(handles[slot])
                    sent += 1
        assert peer.consumed() == total


# ---- torch, where it is ------------------------------------------------------------------

def test_tensors_are_described(pair, B):  # noqa: F811
    torch = pytest.importorskip("torch")
    a = agent_of(pair[0].socket_path, name())
    tensor = torch.arange(160, dtype=torch.float32).reshape(10, 16)
    reg = a.register_memory(tensor)
    assert reg[0] == (tensor.data_ptr(), 640, 0, b"")
    rows = a.get_xfer_descs([tensor[i, :] for i in range(10)])
    assert rows[3] == (tensor.data_ptr() + 3 * 64, 64, 0)
    other = torch.zeros_like(tensor)
    a.register_memory([other])
    h = a.initialize_xfer("READ", a.get_xfer_descs([other[i, :] for i in range(10)]), rows,
                          a.name)
    a.transfer(h)
    until(lambda: a.check_xfer_state(h) == "DONE")
    assert torch.equal(other, tensor)
    turned = torch.transpose(tensor, 0, 1)
    assert a.get_reg_descs(turned) is None and a.get_xfer_descs(turned) is None


def test_torch_is_not_imported(pair):
    """An engine's start must not wait for it."""
    import kvd.nixl
    text = ("import sys\nfrom nixl._api import nixl_agent\nimport nixl, nixl.logging, kvd\n"
            "nixl_agent('alone')\nassert 'torch' not in sys.modules\n")
    env = dict(os.environ, PYTHONPATH=kvd.nixl.path(), KVD_SOCKET=pair[0].socket_path)
    subprocess.run([sys.executable, "-c", text], env=env, check=True)
