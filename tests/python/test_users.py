# SPDX-License-Identifier: Apache-2.0
"""Small memory under a service: the daemons are other users than the engines and have no
right to read processes. Needs root, to be several users."""
import os
import shutil
import tempfile

import numpy as np
import pytest

import kvd
from conftest import Daemon, until
from kvd_daemon import Skip, for_everyone, need_users
from nixl_peer import Peer, agent_of

USERS = (65534, 1)


def become(user):
    def change():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    return change


@pytest.fixture(scope="module")
def strangers():
    """Two daemons that are not root."""
    try:
        need_users(*USERS)
        program = for_everyone("kvd")
    except Skip as why:
        pytest.skip(str(why))
    folders = [tempfile.mkdtemp(prefix="kvd-user-") for _ in USERS]
    try:
        for user, folder in zip(USERS, folders):
            os.chown(folder, user, user)
            os.chmod(folder, 0o755)
            open(folder + "/peers", "w").close()
        daemons = [Daemon("[control]\nsocket_mode = 0666\nallow_uids = 0\n"
                          "[peer]\ncurve_allow_file = %s/peers\n" % folder, run_dir=folder,
                          name="u%d" % user, preexec=become(user), program=program)
                   for user, folder in zip(USERS, folders)]
        with daemons[0] as a, daemons[1] as b:
            clients = [kvd.Client(d.socket_path) for d in (a, b)]
            for daemon, client, other in (a, *clients), (b, *clients[::-1]):
                with open(daemon.run_dir + "/peers", "w") as out:
                    out.write(other.command("keys")["line"] + "\n")
                client.command("config.reload")
            for client in clients:
                client.close()
            yield a, b
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def kinds(client):
    return [r["kind"] for r in client.command("region.list")["regions"]]


@pytest.mark.parametrize("nbytes", [40, 4096, 100_001, 3 << 20])
def test_nixl_moves_small_memory_of_another_user(strangers, nbytes):
    """As NIXL's example of two peers: lists of tensors of some bytes."""
    with Peer(strangers[1], "b-%d" % nbytes) as peer:
        agent = agent_of(strangers[0].socket_path, "a-%d" % nbytes)
        mine = np.full(nbytes, 7, np.uint8)
        there = peer.alloc(nbytes, 5)
        rows = [(mine.ctypes.data, nbytes, 0)]
        agent.register_memory([row + ("",) for row in rows], "DRAM")
        remote = agent.add_remote_agent(peer.metadata())
        for op, wanted in (("WRITE", 7), ("READ", 9)):
            if op == "READ":
                peer.write(0, bytes([9]) * nbytes)
            handle = agent.initialize_xfer(
                op, agent.get_xfer_descs(rows, "DRAM"),
                agent.get_xfer_descs([(there, nbytes, 0)], "DRAM"), remote)
            agent.transfer(handle)
            until(lambda: agent.check_xfer_state(handle) == "DONE")
            handle.release()
            got = peer.read(0) if op == "WRITE" else mine.tobytes()
            assert got == bytes([wanted]) * nbytes


def test_room_moves_small_memory_of_another_user(strangers):
    layout = kvd.Layout.sglang_mha(page_size=16, pages=8, layers=2, kv_heads=1, head_bytes=64)
    sides = []
    for daemon in strangers:
        client = kvd.Client(daemon.socket_path)
        memory = [np.zeros(n, np.uint8) for n in layout.buffers]
        sides.append((client, memory, client.pool(layout, [client.register(m)
                                                           for m in memory])))
        assert set(kinds(client)) == {"vm"}
    (a, source, a_pool), (b, target, b_pool) = sides
    for i, memory in enumerate(source):
        memory[:] = i + 1
    ticket = os.urandom(16).hex()
    offer = a.offer(1, a_pool, {"kv": [1, 2]}, ticket=ticket)
    b.pull(1, b_pool, a.endpoint, {"kv": [4, 5]}, ticket=ticket).wait(timeout=60)
    offer.wait(timeout=60)
    page = 16 * 64
    for i, memory in enumerate(target):
        assert (memory[4 * page:6 * page] == i + 1).all()
        assert not memory[:4 * page].any() and not memory[6 * page:].any()
    a.close()
    b.close()
