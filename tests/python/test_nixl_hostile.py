# SPDX-License-Identifier: Apache-2.0
"""nixl with careless or hostile callers or peers: metadata that was cut or changed, threads
that all use one agent, forks, exits and collections at odd moments; and a daemon that is not
queried unnecessarily."""
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest

from kvd_daemon import Daemon
from nixl_peer import agent_of
from test_nixl import B, World, name  # noqa: F401 (B is a fixture)


def within(seconds, call):
    """The result of call(), if it returns in time; it is abandoned otherwise."""
    got = []
    thread = threading.Thread(target=lambda: got.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else None


def test_first_list_sends_no_command():
    """Memory that lists and transfers share with the daemon is made with the agent."""
    with Daemon("[peer]\ndead_after = 100 s\n") as own:
        agent = agent_of(own.socket_path, name())
        memory = np.zeros(1 << 16, np.uint8)
        at = memory.ctypes.data
        agent.register_memory([(at, memory.size, 0, "")], "DRAM")
        os.kill(own.proc.pid, signal.SIGSTOP)
        try:
            made = within(8, lambda: agent.prep_xfer_dlist(
                "", [(at, 256, 0), (at + 512, 256, 0)], "DRAM"))
        finally:
            os.kill(own.proc.pid, signal.SIGCONT)
        assert made is not None
        agent.release_dlist_handle(made)


# ---- metadata ---------------------------------------------------------------------------

def sealed(text, regions=b"", count=0):
    """Metadata of any content, with the length and the checksum that it wants."""
    body = struct.pack("<II", len(text), count) + text + regions
    return struct.pack("<8sII", b"KVDNIXL1", 16 + len(body), zlib.crc32(body)) + body


def refused(agent, blob):
    try:
        return "took " + repr(agent.add_remote_agent(blob))
    except Exception as error:
        return type(error).__name__


def test_metadata_cut_or_changed_anywhere_is_refused(pair):
    me, you = agent_of(pair[0].socket_path, name()), agent_of(pair[1].socket_path, name())
    memory = np.zeros(1 << 16, np.uint8)
    you.register_memory([(memory.ctypes.data, memory.size, 0, "")], "DRAM")
    told = you.get_agent_metadata()
    assert {refused(me, told[:n]) for n in range(len(told))} == {"nixlMismatchError"}
    assert {refused(me, told[:i] + bytes([told[i] ^ 1 << bit]) + told[i + 1:])
            for i in range(len(told)) for bit in range(8)} == {"nixlMismatchError"}
    assert refused(me, told + b"\0") == refused(me, told + told) == "nixlMismatchError"
    assert me.add_remote_agent(told) == you.name.encode()


def test_forged_metadata_is_refused(pair):
    me, you = agent_of(pair[0].socket_path, name()), agent_of(pair[1].socket_path, name())
    told = you.get_agent_metadata()
    good = json.loads(told[24:24 + struct.unpack_from("<I", told, 16)[0]])
    assert refused(me, sealed(json.dumps(good).encode())).startswith("took")
    for word, value in [
            ("name", 5), ("name", ""), ("name", "\ud800"), ("name", "x" * 65536),
            ("endpoint", 5), ("endpoint", ""), ("endpoint", "tcp://a\0b:1"),
            ("endpoint", "tcp://" + "x" * 200), ("endpoint", "127.0.0.1:1"),
            ("endpoint", "tcp://127.0.0.1:1\n{}"), ("epoch", -1), ("epoch", 1 << 64),
            ("epoch", True), ("epoch", "1"), ("secret", "zz" * 16), ("secret", "00"),
            ("secret", None)]:
        blob = sealed(json.dumps(dict(good, **{word: value})).encode())
        assert refused(me, blob) == "nixlMismatchError", (word, value)
    for text in (b"", b"[1]", b"5", b"null", b"{", b"[" * 100000, b"\xff"):
        assert refused(me, sealed(text)) == "nixlMismatchError", text[:20]
    row = struct.pack("<QQQ", 0, 4096, 4096)
    for count in (0, 2, 1 << 20, 1 << 32 - 1):
        assert refused(me, sealed(json.dumps(good).encode(), row, count)) == \
            "nixlMismatchError", count


# ---- threads and forks -----------------------------------------------------------------------

def test_removed_and_loaded_again_under_the_feet_of_others(pair, B):  # noqa: F811
    """Threads write, read and notify while one removes the agent and loads it again: each
    call ends, as it should or with an exception of NIXL's; and then all is as before."""
    with World(pair) as w:
        told, over, odd = w.peer.metadata(), threading.Event(), []
        fine = (B.nixlNotFoundError, B.nixlRemoteDisconnectError, B.nixlCancelledError,
                B.nixlInvalidParamError, B.nixlRepostActiveError, B.nixlNotPostedError)

        def go(use):
            while not over.is_set():
                try:
                    use()
                except fine:
                    pass
                except BaseException as error:
                    if "EFULL" in str(error):  # the daemon is slower than these threads
                        continue
                    odd.append(error)
                    return

        def write():
            local, remote = w.lists()
            w.run(w.agent.make_prepped_xfer("WRITE", local, [1, 2], remote, [2, 1]))

        def load():
            w.agent.remove_remote_agent(w.remote)
            w.agent.add_remote_agent(told)

        threads = [threading.Thread(target=go, args=(use,)) for use in (
            write, write, load, lambda: w.agent.send_notif(w.remote, b"n"),
            w.agent.get_new_notifs, w.peer.notifs)]
        for thread in threads:
            thread.start()
        over.wait(2)
        over.set()
        for thread in threads:
            thread.join(90)
        assert not odd and not any(t.is_alive() for t in threads)
        assert w.agent.add_remote_agent(told) == w.remote
        write()


FORK = """
import gc, numpy as np, os, sys
from nixl._api import nixl_agent, nixl_agent_config
a = nixl_agent("alone", nixl_agent_config())
m = np.full(64 << 20, 3, np.uint8)
at = m.ctypes.data
a.register_memory([(at, m.size, 0, "")], "DRAM")
h = a.initialize_xfer("WRITE", a.get_xfer_descs([(at, 1 << 20, 0)], "DRAM"),
                      a.get_xfer_descs([(at + (32 << 20), 1 << 20, 0)], "DRAM"), "alone")
a.transfer(h)
child = os.fork()
if child == 0:
    for use in (a.transfer, a.release_xfer_handle):
        try:
            use(h)
            if use == a.transfer:  # what has ended already may be let go
                os._exit(1)
        except Exception as error:
            if "fork" not in str(error) or not type(error).__name__.startswith("nixl"):
                os._exit(2)
    if m[0] != 3 or m[-1] != 3:
        os._exit(3)
    m[:] = 9
    del h, a, m
    gc.collect()
    sys.exit(7)  # all that the interpreter has is given back
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
while a.check_xfer_state(h) != "DONE":
    pass
assert set(np.unique(m)) == {3}
"""


@pytest.mark.parametrize("adopt", ["1", "0"])
def test_child_of_fork_ends_like_any_process(pair, adopt):
    import kvd.nixl
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120,
        env=dict(os.environ, PYTHONPATH=kvd.nixl.path(), NIXL_LOG_LEVEL="ERROR",
                 KVD_ADOPT=adopt, KVD_SOCKET=pair[0].socket_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_metadata_grants_only_its_memory(pair):
    """The metadata of one region gives no access to others of that agent, even with a known
    address; the session's own secret is in none."""
    me, you = agent_of(pair[0].socket_path, name()), agent_of(pair[1].socket_path, name())
    mine, told, kept = (np.zeros(1 << 16, np.uint8) for _ in range(3))
    kept[:] = 7
    me.register_memory([(mine.ctypes.data, mine.size, 0, "")], "DRAM")
    descs = you.register_memory([(told.ctypes.data, told.size, 0, "")], "DRAM")
    you.register_memory([(kept.ctypes.data, kept.size, 0, "")], "DRAM")

    def wrote(array):
        local = me.get_xfer_descs([(mine.ctypes.data, 4096, 0)], "DRAM")
        remote = me.get_xfer_descs([(array.ctypes.data, 4096, 0)], "DRAM")
        handle = me.initialize_xfer("WRITE", local, remote, you.name)
        state = me.transfer(handle)
        while state == "PROC":
            state = me.check_xfer_state(handle)
        return state

    blob = you.get_partial_agent_metadata(descs, inc_conn_info=True)
    text, count = struct.unpack_from("<II", blob, 16)
    head = json.loads(blob[24:24 + text])
    assert head["secret"] != you.agent._kvd.key()[1]
    lie = struct.pack("<QQQ", 0, kept.ctypes.data, kept.size)
    assert count == 1
    me.add_remote_agent(sealed(blob[24:24 + text], blob[24 + text:] + lie, 2))
    assert wrote(told) == "DONE"
    with pytest.raises(Exception, match="NOT_FOUND"):
        wrote(kept)
    assert (kept == 7).all()
    me.add_remote_agent(you.get_agent_metadata())
    assert wrote(kept) == "DONE"


class Called:
    """Pickled, it calls a function when it is read."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def test_lists_of_others_send_no_command(pair, tmp_path):
    agent = agent_of(pair[0].socket_path, name())
    rows = [(4096, 64, 0), (8192, 64, 1)]
    mine = [agent.get_xfer_descs(rows, "DRAM"),
            agent.get_reg_descs([row + ("x",) for row in rows], "DRAM"), rows, []]
    for descs in mine:
        for said in (agent.get_serialized_descs(descs), pickle.dumps(descs, 5)):
            assert agent.deserialize_descs(said) == descs
    at = tmp_path / "called"
    import nixl._descs
    for bad in (Called(os.mkdir, str(at)), [Called(eval, "1")], Called(getattr, rows, "append"),
                Called(nixl._descs.strided, rows), Called(np.zeros, 1)):
        with pytest.raises(pickle.UnpicklingError, match="not a descriptor list"):
            agent.deserialize_descs(pickle.dumps(bad))
    assert not at.exists()
