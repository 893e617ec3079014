# SPDX-License-Identifier: Apache-2.0
"""nixl where NIXL fails: memory that its owner unmaps, engines that are stopped, callers
that poll without a pause, lists of a million rows; and how the package is put on the path."""
import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from conftest import Stopwatch, until
from nixl_peer import Peer, agent_of
from test_nixl import B, GUARD, ROW, ROWS, World, name  # noqa: F401 (B is a fixture)

MIB = 1 << 20


def test_memory_unmapped_by_its_owner_is_not_written(pair):
    """The owner unmaps registered memory, and other memory is mapped there: the daemon still
    has the old pages, and the new ones are not registered."""
    with Peer(pair[1], name("owner")) as peer:
        me = agent_of(pair[0].socket_path, name())
        mine = np.full(4 * MIB, 0x77, np.uint8)
        me.register_memory([(mine.ctypes.data, mine.size, 0, "")], "DRAM")
        at = peer.alloc_malloc(64 * MIB)
        remote = me.add_remote_agent(peer.metadata())
        h = me.initialize_xfer(
            "WRITE", me.get_xfer_descs([(mine.ctypes.data, 4 * MIB, 0)], "DRAM"),
            me.get_xfer_descs([(at + 8 * MIB, 4 * MIB, 0)], "DRAM"), remote)
        me.transfer(h)
        until(lambda: me.check_xfer_state(h) == "DONE")
        assert peer.peek(at + 8 * MIB, 4 * MIB) == {0x77}
        peer.replace(at + 4 * MIB, 16 * MIB, 0x11)
        me.transfer(h)
        until(lambda: me.check_xfer_state(h) == "DONE")
        assert peer.peek(at + 4 * MIB, 16 * MIB) == {0x11}, "what came there was written"
        assert peer.call("check_remote_metadata", "nobody") is False, "the owner lives"


def test_stopped_engine_is_served_by_its_daemon(pair):
    """SIGSTOP: its memory is written all the same, and it finds the notification later."""
    with World(pair) as w:
        local, remote = w.lists()
        h = w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2], b"while you slept")
        w.run(w.agent.make_prepped_xfer("WRITE", local, [0], remote, [0]))
        os.kill(w.peer.proc.pid, signal.SIGSTOP)
        try:
            assert w.run(h)
            w.agent.send_notif(w.remote, b"and this")
        finally:
            os.kill(w.peer.proc.pid, signal.SIGCONT)
        got = []
        until(lambda: got.extend(sum(w.peer.notifs().values(), [])) or len(got) == 2)
        assert got == [b"while you slept", b"and this"]
        w.expect({0: 0, 2: 1})


def test_busy_pollers_do_not_starve_others(pair):
    """Threads that look at a handle and at the inbox without a pause, in both processes'
    place: another thread's requests go on."""
    with World(pair, num_threads=4) as w:
        local, remote = w.lists()
        idle = w.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
        w.run(idle)
        over, looks = threading.Event(), [0, 0]

        def poll(k):
            while not over.is_set():
                w.agent.check_xfer_state(idle)
                looks[k] += 1
        threads = [threading.Thread(target=poll, args=(k,)) for k in range(2)]
        for t in threads:
            t.start()
        try:
            watch = Stopwatch()
            for i in range(1, 40):
                h = w.agent.make_prepped_xfer("WRITE", local, [i], remote, [i], b"%d" % i)
                w.run(h)
            took = watch.seconds()
        finally:
            over.set()
            for t in threads:
                t.join()
        assert all(looks) and took < 15, (took, looks)
        got = []
        until(lambda: got.extend(sum(w.peer.notifs().values(), [])) or len(got) == 39)
        assert got == [b"%d" % i for i in range(1, 40)]


def test_million_rows_are_one_list(pair, B):  # noqa: F811
    rows, row = 1 << 20, 16
    with World(pair, size=rows * row + 2 * GUARD) as w:
        order = np.random.default_rng(7).permutation(rows)
        local = w.agent.prep_xfer_dlist("", w.rows(w.base, np.arange(rows), row), "DRAM")
        remote = w.agent.prep_xfer_dlist(w.remote, w.rows(w.yours, order, row), "DRAM")
        index = np.arange(rows, dtype=np.int32)
        h = w.agent.make_prepped_xfer("WRITE", local, index, remote, index, b"all")
        w.run(h)
        got = np.frombuffer(w.peer.read(0), np.uint8)
        assert np.array_equal(got[GUARD:-GUARD].reshape(rows, row)[order],
                              w.mine[GUARD:-GUARD].reshape(rows, row))
        with pytest.raises(B.nixlInvalidParamError):
            w.agent.make_prepped_xfer("WRITE", local, [rows], remote, [0])


def test_regular_rows_are_one_stride(world_of_lists):
    """The daemon receives one entry, not rows."""
    w, entries = world_of_lists
    base = w.base + GUARD
    assert entries([(base + i * ROW, ROW, 0) for i in range(ROWS)]) == 1
    assert entries([(base + i * 2 * ROW, ROW, 0) for i in range(ROWS // 2)]) == 1
    blocks = [(base + layer * 128 * ROW + i * ROW, 64, 0) for layer in range(4)
              for i in range(100)]
    assert entries(blocks) <= 4
    shuffled = np.random.default_rng(1).permutation(ROWS)
    assert entries([(base + int(i) * ROW, 64, 0) for i in shuffled]) > ROWS // 2


@pytest.fixture
def world_of_lists(pair):
    with World(pair) as w:
        def entries(rows):
            handle = w.agent.prep_xfer_dlist("", rows, "DRAM")
            return w.agent.agent._dlists[handle._handle][0].entries
        yield w, entries


@pytest.mark.parametrize("adopted", [True, False])
def test_choice_of_memory_is_logged(pair, monkeypatch, caplog, adopted):
    """In the log of the engine, and in the daemon's list of regions."""
    import kvd
    monkeypatch.setenv("KVD_ADOPT", "1" if adopted else "0")
    with kvd.Client(pair[0].socket_path) as client, caplog.at_level(logging.DEBUG, "kvd"):
        region = client.register(np.zeros(40 * MIB, np.uint8))
        shown = [r for r in client.command("region.list")["regions"]
                 if r["region"] == region.id][0]
    assert shown["kind"] == ("memfd" if adopted else "vm")
    assert ("adopted" if adopted else "KVD_ADOPT=0") in caplog.text


def test_installed_only_on_request(tmp_path):
    """In an environment of its own: not importable, then a link, never beside another."""
    import kvd
    site = os.path.dirname(os.path.dirname(kvd.__file__))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")],
                   check=True)
    python = str(tmp_path / "v" / "bin" / "python")

    def run(*args, path=(), fails=False):
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([*path, site]))
        done = subprocess.run([python, *args], env=env, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout.strip()
    look = ("-c", "import importlib.util as u; print(u.find_spec('nixl') is not None)")
    assert run(*look) == "False"
    folder = run("-m", "kvd.nixl", "path")
    assert os.path.isdir(os.path.join(folder, "nixl"))
    other = tmp_path / "other" / "nixl"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    run("-m", "kvd.nixl", "install", path=[str(other.parent)], fails=True)
    assert run(*look) == "False"
    for _ in range(2):
        link = run("-m", "kvd.nixl", "install")
    assert os.path.islink(link) and run(*look) == "True"
    assert run("-c", "import nixl, os; print(os.path.realpath(nixl.__file__))").startswith(
        os.path.realpath(folder))
    run("-m", "kvd.nixl", "uninstall")
    assert run(*look) == "False"
    run("-m", "kvd.nixl", "nothing", fails=True)
