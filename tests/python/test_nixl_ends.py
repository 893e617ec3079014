# SPDX-License-Identifier: Apache-2.0
"""nixl when processes end: engines and daemons killed, stopped and frozen with transfers in
flight, memory that its owner removes, forks, exits; and the call sequences of the two engines
that it was made for."""
import os
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest

from conftest import Stopwatch, judging_deaths, until
from kvd_daemon import Daemon
from nixl_peer import Peer, agent_of
from test_nixl import B, GUARD, ROW, SIZE, World, name  # noqa: F401 (B is a fixture)


def failing(agent, handle):
    """The exception of check_xfer_state, once there is one; and its time."""
    watch = Stopwatch()

    def look():
        try:
            assert agent.check_xfer_state(handle) == "PROC", "it was done"
        except AssertionError:
            raise
        except Exception as error:
            return error
    return until(look), watch.seconds()


def big_write(w, size):
    row = size - 2 * GUARD
    return w.agent.initialize_xfer("WRITE", w.agent.get_xfer_descs(w.rows(w.base, [0], row),
                                                                  "DRAM"),
                                   w.agent.get_xfer_descs(w.rows(w.yours, [0], row), "DRAM"),
                                   w.remote, b"n")


def own_pair(patient=True):
    return Daemon(patient=patient), Daemon(patient=patient)


def test_killed_engine_fails_its_transfers(B):  # noqa: F811
    a, b = own_pair()
    with a, b:
        w = World((a, b), size=64 << 20)
        handle = big_write(w, 64 << 20)
        w.run(handle)
        w.agent.transfer(handle)
        w.peer.kill()
        # what was faster than the kill is done; the next one cannot be
        until(lambda: w.agent.agent._requests and ended(w.agent, handle))
        until(lambda: repost_fails(w, handle))
        first, _ = failing(w.agent, handle)
        assert isinstance(first, B.nixlRemoteDisconnectError), first
        frames = [len(traceback.extract_tb(e.__traceback__)) for e in
                  (failing(w.agent, handle)[0] for _ in range(20))]
        again = failing(w.agent, handle)[0]
        assert (type(again), str(again)) == (type(first), str(first)), "the error stays"
        assert len(set(frames)) == 1, "it grows with each look"
        until(lambda: raises(lambda: w.agent.send_notif(w.remote, b"x")))
        with pytest.raises(B.nixlRemoteDisconnectError):
            w.agent.send_notif(w.remote, b"x")
        assert w.agent.check_remote_metadata(w.remote)
        w.agent.release_xfer_handle(handle)


def ended(agent, handle):
    try:
        return agent.check_xfer_state(handle) != "PROC"
    except Exception:
        return True


def raises(call):
    try:
        call()
        return False
    except Exception:
        return True


def repost_fails(w, handle):
    try:
        w.agent.transfer(handle)
        until(lambda: ended(w.agent, handle))
        return w.agent.check_xfer_state(handle) != "DONE"
    except Exception:
        return True


@judging_deaths
def test_killed_remote_daemon_fails_within_a_second(B):  # noqa: F811
    a, b = own_pair(patient=False)
    with a:
        b.__enter__()
        try:
            w = World((a, b), size=64 << 20)
            handle = big_write(w, 64 << 20)
            w.run(handle)
            b.freeze()
            w.agent.transfer(handle)
        finally:
            b.proc.kill()
        error, took = failing(w.agent, handle)
        assert isinstance(error, B.nixlRemoteDisconnectError), error
        assert took < 3, took
        with pytest.raises(B.nixlRemoteDisconnectError):
            w.agent.check_xfer_state(handle)
        until(lambda: not raises(lambda: w.agent.release_xfer_handle(handle)))
        b.proc.wait()
        b.notify.close()
        b.tmp.cleanup()
        w.peer.kill()
        a.expect("")


@judging_deaths
def test_frozen_remote_daemon_is_noticed(B):  # noqa: F811
    a, b = own_pair(patient=False)
    with a, b:
        a.expect("")
        b.expect("")
        w = World((a, b), size=64 << 20)
        handle = big_write(w, 64 << 20)
        w.run(handle)
        local, remote = w.lists()
        w.run(w.agent.make_prepped_xfer("WRITE", local, [1], remote, [1]))
        b.freeze()
        w.agent.transfer(handle)
        error, took = failing(w.agent, handle)
        assert isinstance(error, B.nixlRemoteDisconnectError), error
        assert took < 3, took
        b.thaw()
        until(lambda: not raises(lambda: w.agent.release_xfer_handle(handle)))
        # the link is made again behind the next attempts, without new metadata
        again = big_write(w, 64 << 20)

        def works():
            try:
                w.agent.transfer(again)
                until(lambda: w.agent.check_xfer_state(again) == "DONE")
                return True
            except Exception:
                return False
        until(works, pause=0.05)
        # and so are new requests of lists that were prepared before
        assert w.run(w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2]))
        w.peer.__exit__()


def test_stopped_own_daemon_fails_everything(B):  # noqa: F811
    a, b = own_pair()
    with b:
        a.__enter__()
        w = World((a, b))
        local, remote = w.lists()
        handle = w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
        w.run(handle)
        a.stop()
        a.notify.close()
        a.tmp.cleanup()

        def post():
            w.agent.transfer(handle)
            until(lambda: w.agent.check_xfer_state(handle) == "DONE")
        until(lambda: raises(post))
        with pytest.raises(Exception):
            post()
        assert w.agent.get_new_notifs() == {}
        w.peer.__exit__()


def test_deregistered_memory_is_out_of_reach(pair, B):  # noqa: F811
    with World(pair) as w:
        local, remote = w.lists()
        handle = w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
        w.run(handle)
        before = w.peer.read(0)
        w.peer.free(0)
        w.mine[:] = 0x55
        w.agent.transfer(handle)
        error, _ = failing(w.agent, handle)
        assert isinstance(error, B.nixlNotFoundError), error
        assert w.peer.read(0) == before
        w.agent.add_remote_agent(w.peer.metadata())
        with pytest.raises(B.nixlNotFoundError):
            w.agent.prep_xfer_dlist(w.remote, w.rows(w.yours, [1]), "DRAM")
        # own memory taken back: the same on this side
        w.agent.deregister_memory(w.reg)
        with pytest.raises(B.nixlNotFoundError):
            w.agent.prep_xfer_dlist("", w.rows(w.base, [1]), "DRAM")


def test_removed_agent_is_refused(pair, B):  # noqa: F811
    with World(pair) as w:
        local, remote = w.lists()
        handle = w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
        w.agent.remove_remote_agent(w.remote)
        for use in (lambda: w.agent.transfer(handle),
                    lambda: w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2]),
                    lambda: w.agent.send_notif(w.remote, b"x"),
                    lambda: w.agent.make_connection(w.remote)):
            with pytest.raises(B.nixlNotFoundError):
                use()
        assert w.agent.add_remote_agent(w.peer.metadata()) == w.remote
        w.agent.make_connection(w.remote)
        local, remote = w.lists()
        w.run(w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2]))


def test_fork_child_is_refused(pair):
    with World(pair) as w:
        local, remote = w.lists()
        handle = w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
        w.run(handle)
        pid = os.fork()
        if pid == 0:
            status = 0
            for use in (lambda: w.agent.transfer(handle),
                        lambda: w.agent.send_notif(w.remote, b"x"),
                        w.agent.get_new_notifs, w.agent.update_notifs,
                        lambda: w.agent.prep_xfer_dlist("", w.rows(w.base, [1]), "DRAM"),
                        lambda: w.agent.get_agent_metadata() and w.agent.deregister_memory(
                            w.reg)):
                try:
                    use()
                    status = 1
                except Exception as error:
                    if "fork" not in str(error):
                        status = 2
            del handle, local, remote
            w.agent.__del__()
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        w.run(handle)


SCRIPT = """
import numpy as np, os, sys
from nixl._api import nixl_agent, nixl_agent_config
a = nixl_agent("alone", nixl_agent_config(capture_telemetry=True))
m = np.full(1 << 20, 3, np.uint8)
at = m.ctypes.data
a.register_memory([(at, m.size, 0, "")], "DRAM")
h = a.initialize_xfer("WRITE", a.get_xfer_descs([(at, 4096, 0)], "DRAM"),
                      a.get_xfer_descs([(at + 8192, 4096, 0)], "DRAM"), "alone")
a.transfer(h)
while a.check_xfer_state(h) != "DONE":
    pass
print("moved", flush=True)
"""


def run_script(env, text=SCRIPT):
    import kvd.nixl
    env = dict(os.environ, PYTHONPATH=kvd.nixl.path(), NIXL_LOG_LEVEL="ERROR", **env)
    return subprocess.run([sys.executable, "-c", text], env=env, capture_output=True,
                          text=True, timeout=120)


def test_exit_is_clean(pair):
    done = run_script({"KVD_SOCKET": pair[0].socket_path})
    assert (done.returncode, done.stdout, done.stderr) == (0, "moved\n", "")


def test_autostart_serves_one_process(tmp_path):
    build = os.environ["KVD_BUILD"]
    nowhere = {"KVD_RUN_DIR": str(tmp_path), "KVD_DAEMON": build + "/kvd"}
    refused = run_script(dict(nowhere, KVD_AUTOSTART="0"))
    assert refused.returncode != 0 and "KVD_AUTOSTART=1" in refused.stderr
    done = run_script(dict(nowhere, KVD_AUTOSTART="1"))
    assert (done.returncode, done.stdout) == (0, "moved\n"), done.stderr
    # also when it is killed, the daemon goes with it, and what it had on the disk
    text = SCRIPT + "import kvd.daemon as d\nprint(d._private.socket, flush=True)\n" \
                    "os.kill(os.getpid(), 9)\n"
    killed = run_script(dict(nowhere, KVD_AUTOSTART="1"), text)
    socket = killed.stdout.split()[-1]

    def gone():
        import kvd
        try:
            kvd.Client(socket).close()
            return False
        except kvd.Error:
            return True
    until(gone)
    until(lambda: not os.path.exists(os.path.dirname(socket)))


def test_require_refuses_another_transport(pair, monkeypatch, B):  # noqa: F811
    monkeypatch.setenv("KVD_REQUIRE", "rdma")
    with Peer(pair[1], name()) as peer:
        a = agent_of(pair[0].socket_path, name())
        with pytest.raises(B.nixlBackendError) as told:
            a.add_remote_agent(peer.metadata())
        assert "rdma" in str(told.value) and "shm" in str(told.value)
    monkeypatch.setenv("KVD_REQUIRE", "shm,tcp")
    with World(pair) as w:
        local, remote = w.lists()
        w.run(w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2]))


@judging_deaths
def test_require_holds_after_reconnect(B, monkeypatch):  # noqa: F811
    """What was lost is made again, perhaps another way: that is looked at, too."""
    monkeypatch.setenv("KVD_REQUIRE", "shm")
    a, b = own_pair(patient=False)
    with a, b:
        a.expect("")
        b.expect("")
        w = World((a, b))
        local, remote = w.lists()
        handle = w.agent.make_prepped_xfer("WRITE", local, [1], remote, [2])
        w.run(handle)
        w.agent.agent._require = ["tcp"]  # as if that were another way than before
        w.run(handle)
        b.freeze()
        w.agent.transfer(handle)
        failing(w.agent, handle)
        b.thaw()

        def refused():
            try:
                w.run(handle)
                return "it moved"
            except (B.nixlRemoteDisconnectError, AssertionError):
                return None  # not back yet
            except B.nixlBackendError as error:
                return str(error)
        assert "KVD_REQUIRE=tcp" in until(refused, pause=0.05)
        with pytest.raises(B.nixlNotFoundError):
            w.agent.transfer(handle)
        w.peer.__exit__()


def test_patient_daemon_may_be_late(B):  # noqa: F811
    """dead_after is the engines' patience with their own daemon, too: one that was held up
    for longer than the default has ended nothing."""
    a, b = own_pair()  # of 20 s
    with a, b:
        w = World((a, b), size=64 << 20)
        handle = big_write(w, 64 << 20)
        w.run(handle)
        a.freeze()
        w.agent.transfer(handle)
        held = time.monotonic() + 1.5
        while time.monotonic() < held:
            assert w.agent.check_xfer_state(handle) == "PROC"
            threading.Event().wait(0.01)
        a.thaw()
        until(lambda: w.agent.check_xfer_state(handle) == "DONE")
        w.peer.__exit__()


# ---- what the engines do -------------------------------------------------------------------------

def test_sequence_of_vllm(pair, B):  # noqa: F811
    """NixlConnector's pull: all blocks of all layers in one list a side, a READ a request
    with a notification, heartbeats, telemetry after every DONE; the puller is unknown to
    the owner."""
    layers, blocks, block = 8, 64, 1024
    with World(pair, size=layers * blocks * block + 2 * GUARD, num_threads=4) as w:
        a = w.agent
        table = np.arange(layers * blocks)
        local = a.prep_xfer_dlist("NIXL_INIT_AGENT",
                                  a.get_xfer_descs(w.rows(w.base, table, block), "DRAM"))
        handshake = {}

        def shake():
            agent = a.add_remote_agent(w.peer.metadata())
            handshake["remote"] = agent, a.prep_xfer_dlist(
                agent, a.get_xfer_descs(w.rows(w.yours, table, block), "DRAM"))
        thread = threading.Thread(target=shake)
        thread.start()
        thread.join()
        agent, remote = handshake["remote"]
        for i in range(layers * blocks):
            w.peer.write(0, bytes([i % 251]) * block, GUARD + i * block)
        got, told = {}, []
        for request in range(6):
            picks = np.array([request * 7 + k for k in range(5)], np.int64)
            rows = (np.arange(layers)[:, None] * blocks + picks).ravel()
            handle = a.make_prepped_xfer("READ", local, rows, remote, rows,
                                         notif_msg=b"req%d:1" % request)
            a.transfer(handle)
            got[request] = handle, rows
        a.send_notif(agent, notif_msg=b"HB:req0,req1")
        while got:
            told += sum(w.peer.notifs().values(), [])
            for request in list(got):
                handle, rows = got[request]
                if a.check_xfer_state(handle) != "DONE":
                    continue
                assert a.get_xfer_telemetry(handle).totalBytes == len(rows) * block
                a.release_xfer_handle(handle)
                for row in rows:
                    at = GUARD + int(row) * block
                    assert (w.mine[at:at + block] == row % 251).all()
                del got[request]
        until(lambda: told.extend(sum(w.peer.notifs().values(), [])) or len(told) == 7)
        assert sorted(told) == sorted([b"req%d:1" % i for i in range(6)] + [b"HB:req0,req1"])
        for handle in (local, remote):
            a.release_dlist_handle(handle)
        a.remove_remote_agent(agent)
        a.deregister_memory(w.reg)


def test_sequence_of_sglang(pair, B):  # noqa: F811
    """Its prefill side: no backend at first, strided lists, WRITEs by several threads, no
    notification, no release."""
    from nixl._api import nixl_thread_sync_t
    with World(pair, num_threads=8,
               sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT) as w:
        a = w.agent
        rows = (SIZE - 2 * GUARD) // ROW
        local = a.prep_xfer_dlist("", np.array([[w.base + GUARD, ROW, 0, ROW, rows]],
                                               np.uint64), "DRAM")
        remote = a.prep_xfer_dlist(w.remote, np.array([[w.yours + GUARD, ROW, 0, ROW, rows]],
                                                      np.uint64), "DRAM")
        failed = []

        def chunk(k):
            try:
                index = np.arange(k * 100, k * 100 + 90, dtype=np.int32)
                handles = [a.make_prepped_xfer("WRITE", local, index, remote, index[::-1])]
                aux = [(w.base + 64 * k, 64, 0)], [(w.yours + 64 * k, 64, 0)]
                handles.append(a.initialize_xfer(
                    "WRITE", a.get_xfer_descs(aux[0], "DRAM"),
                    a.get_xfer_descs(aux[1], "DRAM"), w.remote.decode(), b"", ["UCX"]))
                assert all(handles)
                for handle in handles:
                    assert a.transfer(handle) != "ERR"
                while not all(a.check_xfer_state(h) == "DONE" for h in handles):
                    pass
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=chunk, args=(k,)) for k in range(5)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failed, failed
        got = w.peer.read(0)
        for k in range(5):
            assert got[64 * k:64 * k + 64] == w.mine[64 * k:64 * k + 64].tobytes()
            for i in range(90):
                to, of = GUARD + (k * 100 + 89 - i) * ROW, GUARD + (k * 100 + i) * ROW
                assert got[to:to + ROW] == w.mine[of:of + ROW].tobytes()
        assert not a.get_new_notifs()
