# SPDX-License-Identifier: Apache-2.0
"""nixl at the edges of its values: what NIXL 1.5.1 takes and gives there was measured
with it, case by case. Where kvd means to differ, the case says so."""
import gc
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import Stopwatch, judging_deaths, until
from kvd_daemon import Daemon
from nixl_peer import agent_of
from test_nixl import B, name, world  # noqa: F401 (fixtures)
from test_nixl_edges import raised_by
from test_nixl_ends import raises

PAGE = 4096


class Two:
    """Two agents of this process, on two daemons, with a buffer each."""

    def __init__(self, pair, nbytes=16 * PAGE):
        self.a = agent_of(pair[0].socket_path, name("a"), capture_telemetry=True)
        self.b = agent_of(pair[1].socket_path, name("b"))
        self.mine = np.random.default_rng(5).integers(0, 256, nbytes, dtype=np.uint8)
        self.yours = np.zeros(nbytes, np.uint8)
        self.at, self.to = self.mine.ctypes.data, self.yours.ctypes.data
        self.reg = self.a.register_memory([(self.at, nbytes, 0, "")], "DRAM")
        self.your_reg = self.b.register_memory([(self.to, nbytes, 0, "")], "DRAM")
        self.remote = self.a.add_remote_agent(self.b.get_agent_metadata())

    def descs(self, base, *rows):
        return self.a.get_xfer_descs([(base + at, n, 0) for at, n in rows], "DRAM")

    def run(self, handle, *args):
        self.a.transfer(handle, *args)
        return until(lambda: self.a.check_xfer_state(handle) == "DONE")


@pytest.fixture
def two(pair):
    return Two(pair)


# ---- types ------------------------------------------------------------------------------

def test_enums_are_true_and_exceptions_travel(B):  # noqa: F811
    for kind in (B.nixl_mem_t, B.nixl_xfer_op_t, B.nixl_status_t, B.nixl_thread_sync_t):
        assert all(bool(member) for member in kind.__members__.values()), kind
    for word in ("nixlNotFoundError", "nixlBackendError", "nixlCancelledError"):
        kind = getattr(B, word)
        told = pickle.loads(pickle.dumps(kind("words", 2)))
        assert type(told) is kind and told.args == ("words", 2)
        once = pickle.loads(pickle.dumps(kind("words")))
        assert str(once) == str(kind("words")) and str(once).count("NIXL_ERR") == 1
        assert str(kind()).startswith("NIXL_ERR") and kind().args == ()


def test_arrays_of_another_order_are_refused(pair, B):  # noqa: F811
    """An array of another byte order once gave addresses that nobody meant."""
    a = agent_of(pair[0].socket_path, name())
    memory = np.zeros(16 * PAGE, np.uint8)
    at = memory.ctypes.data
    a.register_memory([(at, memory.size, 0, "")], "DRAM")
    three = np.array([[at, 8, 0], [at + 64, 8, 0], [at + 128, 8, 0]], np.uint64)
    five = np.array([[at, 8, 0, 64, 3]] * 3, np.uint64)
    for make in (lambda t: B.nixlXferDList(B.DRAM_SEG, t),
                 lambda t: B.nixlRegDList(B.DRAM_SEG, t),
                 lambda t: a.get_xfer_descs(t, "DRAM"),
                 lambda t: a.prep_xfer_dlist("", t, "DRAM")):
        make(three)
        make(three.astype(np.int64))
        assert set(raised_by({
            "other bytes": lambda: make(three.astype(">u8")),
            "other signed": lambda: make(three.astype(">i8")),
            "columns first": lambda: make(np.asfortranarray(three)),
            "every second": lambda: make(three[::2]),
            "from behind": lambda: make(three[::-1]),
            "32 bits": lambda: make(three.astype(np.uint32)),
            "floats": lambda: make(three.astype(float))}).values()) == {ValueError}
    for table in (five.astype(">u8"), five.astype(">i8"), np.asfortranarray(five), five[::2]):
        with pytest.raises(ValueError):
            a.prep_xfer_dlist("", table, "DRAM")
    a.prep_xfer_dlist("", five, "DRAM")


def test_lists_match_nixls_values(B):  # noqa: F811
    X, R, D = B.nixlXferDList, B.nixlRegDList, B.DRAM_SEG
    d = X(D, [(1, 2, 3), (4, 5, 6)])
    assert raised_by({
        "rows as lists": lambda: X(D, [[1, 2, 3]]), "second": lambda: X(D, [(1, 2, 3), None]),
        "rows as arrays": lambda: R(D, list(np.zeros((2, 3), np.uint64))),
        "below 0": lambda: d[-1], "slice": lambda: d[0:1], "float": lambda: d[1.0],
        "word": lambda: d["0"], "set": lambda: d.__setitem__(-1, (1, 2, 3)),
        "rem": lambda: d.remDesc(1.0), "field": lambda: setattr(d, "other", 1),
        "config": lambda: setattr(B.nixlAgentConfig(), "listenPort", 70000),
        "port": lambda: setattr(B.nixlAgentConfig(), "listenPort", "x"),
        "mode": lambda: setattr(B.nixlAgentConfig(), "syncMode", 1),
        "flag": lambda: B.nixlAgentConfig("x"),
        "none": lambda: setattr(B.nixlAgentConfig(), "another", 1)}) == dict.fromkeys(
            ("rows as lists", "second", "rows as arrays", "below 0", "slice", "float", "word",
             "set", "rem", "config", "port", "mode", "flag"), TypeError) | {
            "field": AttributeError, "none": AttributeError}
    assert pickle.loads(pickle.dumps(d)) == d and d.descCount() == 2


# ---- registration ----------------------------------------------------------------------------

def test_register_answers_as_nixl_does(pair, B):  # noqa: F811
    a = agent_of(pair[0].socket_path, name())
    memory = np.zeros(PAGE, np.uint8)
    at = memory.ctypes.data
    assert raised_by({
        "file": lambda: a.register_memory([(1, 64, 0, "name")], "FILE"),
        "object": lambda: a.register_memory([(1, 64, 0, "name")], "OBJ"),
        "no row": lambda: a.register_memory(B.nixlRegDList(B.DRAM_SEG)),
        "nobody's": lambda: a.register_memory([(PAGE, 64, 0, "")], "DRAM"),
        "over the end": lambda: a.register_memory([(2 ** 64 - PAGE, 2 * PAGE, 0, "")], "DRAM"),
        "address 0": lambda: a.register_memory([(0, 64, 0, "")], "DRAM"),
        "second": lambda: a.register_memory([(at, 64, 0, ""), (PAGE, 64, 0, "")], "DRAM"),
        "first is gone": lambda: a.deregister_memory(
            B.nixlRegDList(B.DRAM_SEG, [(at, 64, 0, b"")])),
    }) == {"file": B.nixlNotFoundError, "object": B.nixlNotFoundError,
           "no row": B.nixlBackendError, "nobody's": B.nixlBackendError,
           "over the end": B.nixlBackendError, "address 0": B.nixlBackendError,
           "second": B.nixlBackendError, "first is gone": B.nixlNotFoundError}


def test_device_is_part_of_a_descriptor(two, B):  # noqa: F811
    a, b, to = two.a, two.b, two.to
    for agent, base in (("", two.at), (two.remote, to)):
        a.prep_xfer_dlist(agent, [(base, 8, 0)], "DRAM")
        strided = np.array([[base, 8, 1, 64, 2]], np.uint64)
        assert set(raised_by({
            "1": lambda: a.prep_xfer_dlist(agent, [(base, 8, 1)], "DRAM"),
            "mixed": lambda: a.prep_xfer_dlist(
                agent, [(base + 64 * i, 8, int(i == 9)) for i in range(20)], "DRAM"),
            "strided": lambda: a.prep_xfer_dlist(agent, strided, "DRAM"),
        }).values()) == {B.nixlNotFoundError}
    other = b.register_memory([(to + PAGE, PAGE, 3, "")], "DRAM")
    asked = B.nixlXferDList(B.DRAM_SEG, [(to + PAGE, 8, 3)])
    assert not a.check_remote_metadata(two.remote, asked)
    with pytest.raises(B.nixlNotFoundError):
        b.deregister_memory(B.nixlRegDList(B.DRAM_SEG, [(to + PAGE, PAGE, 0, b"")]))
    assert a.add_remote_agent(b.get_partial_agent_metadata(other)) == two.remote
    assert a.check_remote_metadata(two.remote, asked)
    assert not a.check_remote_metadata(two.remote, B.nixlXferDList(B.DRAM_SEG, [(to, 8, 3)]))
    two.run(a.initialize_xfer("WRITE", two.descs(two.at, (0, 8)), asked, two.remote))
    assert two.yours[PAGE:PAGE + 8].tolist() == two.mine[:8].tolist()
    b.deregister_memory(other)


# ---- rows of no bytes -------------------------------------------------------------------------

def test_rows_of_no_bytes_are_left_out(two, B):  # noqa: F811
    """An engine's empty layer: legal anywhere within a region, its last byte's end too."""
    a, end = two.a, two.mine.size
    for agent, base in (("", two.at), (two.remote, two.to), (a.name, two.at)):
        for at in (0, 5, end):
            a.prep_xfer_dlist(agent, [(base + at, 0, 0)], "DRAM")
        for at in (-1, end + 1, end + PAGE):
            with pytest.raises(B.nixlNotFoundError):
                a.prep_xfer_dlist(agent, [(base + at, 0, 0)], "DRAM")
    sizes = [0, 100, 0, 0, 50, 100, 0]
    rows = [(i * 512, n) for i, n in enumerate(sizes)]
    local = a.prep_xfer_dlist("", two.descs(two.at, *rows))
    remote = a.prep_xfer_dlist(two.remote, two.descs(two.to, *rows))
    picks = [6, 1, 0, 4, 3, 5], [0, 5, 2, 4, 6, 1]
    handle = a.make_prepped_xfer("WRITE", local, picks[0], remote, np.array(picks[1]), b"n")
    two.run(handle)
    wanted = np.zeros_like(two.yours)
    for i, j in zip(*picks):
        wanted[j * 512:j * 512 + sizes[j]] = two.mine[i * 512:i * 512 + sizes[i]]
    assert np.array_equal(two.yours, wanted)
    assert a.get_xfer_telemetry(handle).totalBytes == 250
    assert until(two.b.get_new_notifs) == {a.name: [b"n"]}
    with pytest.raises(B.nixlInvalidParamError):
        a.make_prepped_xfer("WRITE", local, [0], remote, [1])
    two.run(a.initialize_xfer("READ", two.descs(two.at, (0, 0), (8192, 9)),
                              two.descs(two.to, (0, 0), (512, 9)), two.remote))
    assert np.array_equal(two.mine[8192:8201], two.yours[512:521])


def test_transfer_of_no_bytes_is_done_and_notifies(two, B):  # noqa: F811
    a, before = two.a, two.yours.copy()
    nothing = two.descs(two.at, (16, 0), (0, 0)), two.descs(two.to, (0, 0), (9, 0))
    handle = a.initialize_xfer("WRITE", *nothing, two.remote, b"first")
    with pytest.raises(B.nixlNotPostedError):
        a.check_xfer_state(handle)
    two.run(handle)
    two.run(handle, b"second")
    a.send_notif(two.remote, b"third")
    two.run(handle)
    got = []
    until(lambda: got.extend(sum(two.b.get_new_notifs().values(), [])) or len(got) == 4)
    assert got == [b"first", b"second", b"third", b"second"]
    assert a.get_xfer_telemetry(handle).totalBytes == 0
    a.release_xfer_handle(handle)
    two.run(a.initialize_xfer("READ", *nothing, two.remote))
    assert np.array_equal(two.yours, before)
    # memory of no bytes
    empty = a.register_memory([(two.at + 4, 0, 0, "")], "DRAM")
    assert a.get_agent_metadata() and a.check_remote_metadata(a.name, empty.trim())
    a.deregister_memory(empty)
    with pytest.raises(B.nixlNotFoundError):
        a.deregister_memory(empty)


# ---- transfers and notifications ------------------------------------------------------------

def test_pieces_are_counted_as_requested(two):
    a = two.a
    lists = [a.prep_xfer_dlist(who, [(at + 64 * i, 64, 0) for i in range(8)], "DRAM")
             for who, at in (("", two.at), (two.remote, two.to))]

    def pieces(picks, **how):
        handle = a.make_prepped_xfer("WRITE", lists[0], picks, lists[1], picks, **how)
        two.run(handle)
        return a.get_xfer_telemetry(handle).descCount
    assert pieces(list(range(8))) == 1 and pieces([0, 1, 4, 5]) == 2
    assert pieces(list(range(8)), skip_desc_merge=True) == 8


def test_notifications_are_bytes_or_text(two):
    handle = two.a.initialize_xfer("WRITE", two.descs(two.at, (0, 8)),
                                   two.descs(two.to, (0, 8)), two.remote)
    for wrong in (None, 5, 0, [], np.zeros(3, np.uint8), memoryview(b"x")):
        assert set(raised_by({
            "send": lambda: two.a.send_notif(two.remote, wrong),
            "post": lambda: two.a.transfer(handle, wrong),
            "make": lambda: two.a.initialize_xfer(
                "WRITE", two.descs(two.at, (0, 8)), two.descs(two.to, (0, 8)), two.remote,
                wrong)}).values()) == {TypeError}, wrong
    two.run(handle, "wörd\0")
    two.run(handle, bytearray(b"b\0"))
    got = []
    until(lambda: got.extend(sum(two.b.get_new_notifs().values(), [])) or len(got) == 2)
    assert got == ["wörd\0".encode(), b"b\0"]


def test_notifications_are_added_to_a_copy(two):
    two.a.send_notif(two.remote, b"1")
    mine = {two.a.name: [b"0"], "other": [b"x"]}
    got = until(lambda: (lambda g: len(g[two.a.name]) == 2 and g)(
        two.b.agent.getNotifs(mine, [])))
    assert got == {two.a.name: [b"0", b"1"], "other": [b"x"]}
    assert mine == {two.a.name: [b"0"], "other": [b"x"]}
    for wrong in (None, [], "x"):
        with pytest.raises(TypeError):
            two.b.agent.getNotifs(wrong, [])


# ---- metadata ---------------------------------------------------------------------------------

def test_old_metadata_revokes_nothing(two):
    b, parts = two.b, [two.b.get_agent_metadata()]
    more = b.register_memory([(two.to + PAGE, 64, 0, "")], "DRAM")
    parts.append(b.get_agent_metadata())
    fewer = two.your_reg
    b.deregister_memory(fewer)
    parts.append(b.get_agent_metadata())

    def known():
        return [two.a.check_remote_metadata(two.remote, one.trim()) for one in (more, fewer)]
    assert known() == [True, True]  # the new one lies within the other
    two.a.add_remote_agent(parts[2])
    assert known() == [True, False]
    for old in (parts[0], parts[1], parts[0]):
        two.a.add_remote_agent(old)
        assert known() == [True, False]
    later = b.register_memory([(two.to, 8, 0, "")], "DRAM")
    two.a.add_remote_agent(b.get_partial_agent_metadata(later))
    two.a.add_remote_agent(parts[2])
    assert two.a.check_remote_metadata(two.remote, later.trim())
    two.run(two.a.initialize_xfer("WRITE", two.descs(two.at, (0, 64)), more.trim(),
                                  two.remote))
    assert np.array_equal(two.yours[PAGE:PAGE + 64], two.mine[:64])


def test_listener_calls_look_at_their_arguments(pair):
    a = agent_of(pair[0].socket_path, name(), enable_listen_thread=True, listen_port=0)
    assert set(raised_by({
        "port": lambda: a.fetch_remote_metadata("x", "127.0.0.1", "1"),
        "address": lambda: a.send_local_metadata(None),
        "name": lambda: a.fetch_remote_metadata(None, "127.0.0.1", 1),
        "whose": lambda: a.invalidate_local_metadata(5)}).values()) == {TypeError}


# ---- lives ----------------------------------------------------------------------------------

def test_agents_dropped_while_connecting_leak_nothing(pair):
    """A request under way once kept its agent, and the agent the request."""
    you = agent_of(pair[1].socket_path, name())
    told = you.get_agent_metadata()

    def round_of(n):
        agents = [agent_of(pair[0].socket_path, name()) for _ in range(n)]
        for agent in agents:
            agent.add_remote_agent(told)
        del agents, agent
        gc.collect()

    def fds():
        return len(os.listdir("/proc/self/fd"))
    round_of(2)
    first = fds()
    round_of(20)
    until(lambda: fds() <= first)  # fewer, where a thread of an earlier test ended late
    mine = "/proc/%d/fd" % pair[0].proc.pid
    until(lambda: len(os.listdir(mine)) < 100)


def test_require_holds_for_the_own_name(pair, monkeypatch, B):  # noqa: F811
    monkeypatch.setenv("KVD_REQUIRE", "rdma")
    a = agent_of(pair[0].socket_path, name())
    memory = np.zeros(PAGE, np.uint8)
    a.register_memory([(memory.ctypes.data, PAGE, 0, "")], "DRAM")
    for _ in range(2):
        with pytest.raises(B.nixlBackendError, match="KVD_REQUIRE=rdma"):
            a.prep_xfer_dlist(a.name, [(memory.ctypes.data, 8, 0)], "DRAM")
    a.prep_xfer_dlist("", [(memory.ctypes.data, 8, 0)], "DRAM")


def test_restarted_own_daemon_serves_agents_again(B):  # noqa: F811
    """Both daemons die and this one alone is back: what was made before fails soon, and by
    the right name. And when all are back and told of each other, bytes move again."""
    one, other = Daemon(), Daemon()
    with one, other:
        two = Two((one, other))
        for daemon in (one, other):
            daemon.expect("")
        rows = two.descs(two.at, (0, 64)), two.descs(two.to, (64, 64))
        handle = two.a.initialize_xfer("WRITE", *rows, two.remote)
        two.run(handle)
        for daemon in (other, one):
            daemon.proc.kill()
            daemon.wait()
            daemon.notify.close()
        one.start().wait_ready()
        until(lambda: not raises(lambda: two.a.register_memory(
            [(two.at + 8, 8, 0, "")], "DRAM")), 60)  # its session is there again
        begin, error = time.monotonic(), None
        while error is None:
            assert time.monotonic() - begin < 30
            try:
                two.a.transfer(handle)
                while two.a.check_xfer_state(handle) != "DONE":
                    assert time.monotonic() - begin < 30, "waits for ever"
            except AssertionError:
                raise
            except Exception as caught:
                error = caught
        assert isinstance(error, (B.nixlRemoteDisconnectError, B.nixlBackendError)), error
        with pytest.raises((B.nixlRemoteDisconnectError, B.nixlBackendError)):
            two.a.send_notif(two.remote, b"x")
        other.start().wait_ready()

        def again():
            try:
                two.a.add_remote_agent(two.b.get_agent_metadata())
                return two.run(two.a.initialize_xfer("WRITE", *rows, two.remote))
            except (B.nixlRemoteDisconnectError, B.nixlBackendError, B.nixlNotFoundError):
                return False
        until(again, 60)
        assert np.array_equal(two.yours[64:128], two.mine[:64])


@judging_deaths
def test_restarted_daemon_of_both_agents_names_remedy(B):  # noqa: F811
    """Whatever is called: one error, until the new metadata is there; then bytes move."""
    daemon = Daemon(patient=False)
    with daemon:
        two = Two((daemon, daemon))
        daemon.expect("")
        rows = two.descs(two.at, (0, 64)), two.descs(two.to, (64, 64))
        handle = two.a.initialize_xfer("WRITE", *rows, two.remote)
        two.run(handle)
        two.yours[64:128] = 0
        daemon.proc.kill()
        daemon.wait()
        daemon.notify.close()
        daemon.start().wait_ready()
        with pytest.raises(B.nixlBackendError) as told:
            two.run(handle)  # of the old session
        assert "this agent's daemon ended" in str(told.value), told.value
        until(lambda: not raises(two.a.get_agent_metadata))  # its session is there again

        def again():
            two.a.transfer(handle)
        for call in (again, lambda: two.a.initialize_xfer("WRITE", *rows, two.remote),
                     lambda: two.a.prep_xfer_dlist(two.remote, rows[1]),
                     lambda: two.a.send_notif(two.remote, b"x"),
                     lambda: two.a.make_connection(two.remote)):
            with pytest.raises(B.nixlRemoteDisconnectError, match="daemon of both agents was "
                               r"restarted: add_remote_agent\(\) with new metadata of '"):
                call()
        two.a.add_remote_agent(two.b.get_agent_metadata())  # at the first try
        two.run(two.a.initialize_xfer("WRITE", *rows, two.remote))
        assert np.array_equal(two.yours[64:128], two.mine[:64])


def test_full_table_of_files_is_reported(pair):
    """A limit on files: the agent is made, or says which limit it was."""
    import kvd.nixl
    text = ("import resource, sys\nfrom nixl._api import nixl_agent, nixl_agent_config\n"
            "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
            "for n in range(4, 40):\n"
            "    resource.setrlimit(resource.RLIMIT_NOFILE, (n, before[1]))\n"
            "    try:\n        nixl_agent('few')\n        break\n"
            "    except RuntimeError as error:\n"
            "        assert 'files' in str(error) or 'RLIMIT_NOFILE' in str(error), error\n"
            "else:\n    sys.exit(3)\nassert n > 4\n")
    env = dict(os.environ, PYTHONPATH=kvd.nixl.path(), KVD_SOCKET=pair[0].socket_path)
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr


LIVES = """
import os, signal, sys, time
import kvd.daemon as d
from nixl._api import nixl_agent
def daemon():
    shell = d._private.shell.pid
    return [int(p) for p in open("/proc/%d/task/%d/children" % (shell, shell)).read().split()
            if "kvd.conf" in open("/proc/%s/cmdline" % p).read()][0]
nixl_agent("one")
first, shell = daemon(), d._private.shell
os.kill(first, signal.SIGKILL)
shell.wait(20)
two = nixl_agent("two")
assert two.get_agent_metadata() and daemon() != first
print(daemon(), d._private.dir)
"""


def autostart(tmp_path, program, text, **more):
    import kvd.nixl
    env = dict(os.environ, PYTHONPATH=kvd.nixl.path(), KVD_AUTOSTART="1",
               KVD_RUN_DIR=str(tmp_path), KVD_DAEMON=program, **more)
    env.pop("KVD_SOCKET", None)
    return subprocess.run([sys.executable, "-c", text], env=env, capture_output=True,
                          text=True, timeout=120)


def test_private_daemon_killed_is_started_again(tmp_path):
    done = autostart(tmp_path, os.path.join(os.environ["KVD_BUILD"], "kvd"), LIVES)
    assert done.returncode == 0, done.stderr
    pid, folder = done.stdout.split()[-2:]
    until(lambda: not os.path.exists(folder) and not os.path.exists("/proc/" + pid))


def test_private_daemon_finds_room_for_its_socket(tmp_path):
    long = tmp_path / ("a-jobs-own-folder-" * 6)
    long.mkdir()
    done = autostart(tmp_path, os.path.join(os.environ["KVD_BUILD"], "kvd"),
                     "from nixl._api import nixl_agent\nnixl_agent('one')\nprint('here')",
                     TMPDIR=str(long))
    assert done.stdout == "here\n", done.stderr


ENDS = """
import os, signal, sys
import kvd.daemon as d
print(d.private_socket(), flush=True)
if os.fork() == 0:
    sys.stdin.read()  # outlives its parent
    os._exit(0)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
reader, writer = os.pipe()
os.close(reader)
os.%s
"""


@pytest.mark.parametrize("end", ["write(writer, b'x')", "kill(os.getpid(), 9)"])
def test_private_daemon_ends_with_its_process_not_with_its_children(tmp_path, end):
    env = dict(os.environ, KVD_RUN_DIR=str(tmp_path),
               KVD_DAEMON=os.path.join(os.environ["KVD_BUILD"], "kvd"))
    process = subprocess.Popen([sys.executable, "-c", ENDS % end], env=env, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        folder = os.path.dirname(process.stdout.readline().strip())
        assert folder
        assert process.wait(60) == -(signal.SIGPIPE if "write" in end else signal.SIGKILL)
        until(lambda: not os.path.exists(folder))
        process.stdin.close()


def test_private_daemon_exit_is_reported_at_once(tmp_path):
    watch = Stopwatch()
    done = autostart(tmp_path, "/bin/false", "from nixl._api import nixl_agent\n"
                     "nixl_agent('one')")
    assert "ended with status 1" in done.stderr and watch.seconds() < 15


def test_signals_are_harmless(two):
    """Every call may be interrupted, by a handler that returns."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        handle = two.a.initialize_xfer("WRITE", two.descs(two.at, (0, 64)),
                                       two.descs(two.to, (0, 64)), two.remote, b"n")
        count = 0
        while count < 100 or len(seen) < 20:
            two.run(handle)
            reg = two.a.register_memory([(two.at + 8, 100, 0, "")], "DRAM")
            two.a.deregister_memory(reg)
            count += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    got = []
    until(lambda: got.extend(sum(two.b.get_new_notifs().values(), [])) or len(got) >= count)
    assert got == [b"n"] * count
