#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The transfer layer between two real daemons: what a NIXL-like agent does.
Agents exchange (endpoint, session, secret), prepare lists, write and read by
index, and are told by notifications; over each transport and memory kind."""
import base64
import json
import os
import random
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import DEADLINE_S, Daemon, run  # noqa: E402
from kvd_engine import (BYTES, FAILED, RING_RELEASE, SUCCESS, Cache, Engine, Refused,  # noqa: E402
                        ring_entry)

ROW = 256
ROWS = BYTES // ROW


class Agents:
    def __init__(self, transport, kinds=("memfd", "memfd")):
        text = "[transport]\ntransports = %s\n" % transport
        self.daemons, self.kinds = [Daemon(text), Daemon(text)], kinds

    def __enter__(self):
        for d in self.daemons:
            d.__enter__()
        self.a, self.b = (Engine(d, n) for d, n in zip(self.daemons, "ab"))
        self.mine, self.yours = Cache(self.a, self.kinds[0]), Cache(self.b, self.kinds[1])
        self.peer = self.attach(self.a, self.b)
        return self

    def __exit__(self, *exc):
        self.a.close()
        self.b.close()
        for d in self.daemons:
            d.__exit__(*exc)

    @staticmethod
    def attach(one, other):
        own = [s for s in other.cmd("session.list")["sessions"] if "secret" in s][0]
        return one.cmd("peer.attach", endpoint=other.endpoint, session=own["epoch"],
                       secret=own["secret"])["attach"]

    def lists(self):
        local = self.a.prep([(self.mine.address, ROW, ROW, ROWS)])
        remote = self.a.prep([(self.yours.address, ROW, ROW, ROWS)], peer=self.peer)
        assert local["count"] == remote["count"] == ROWS
        return local["dlist"], remote["dlist"]

    def until(self, xfer, state=SUCCESS):
        end = time.monotonic() + DEADLINE_S
        while True:
            one = self.a.cmd("xfer.state", xfer=xfer)
            if one["state"] == state:
                return one
            assert one["state"] not in (FAILED, SUCCESS), one
            assert time.monotonic() < end, one


def scattered(n, seed):
    picks = random.Random(seed).sample(range(ROWS), n)
    return picks


def write_and_read(transport, kinds):
    with Agents(transport, kinds) as t:
        local, remote = t.lists()
        t.mine.mem[:] = random.Random(1).randbytes(BYTES)
        src, dst = scattered(2000, 2), scattered(2000, 3)
        x = t.a.xfer("write", local, remote, src, dst, b"written")
        t.until(x)
        wanted = bytearray(BYTES)
        for s, d in zip(src, dst):
            wanted[d * ROW:(d + 1) * ROW] = t.mine.mem[s * ROW:(s + 1) * ROW]
        assert t.yours.mem[:] == bytes(wanted), "written bytes differ"
        told = t.b.cmd("notif.drain")["notifs"]
        assert [(n["from"], base64.b64decode(n["data"])) for n in told] == [("a", b"written")]
        t.a.cmd("xfer.submit", **ring_entry(RING_RELEASE, a=x))
        t.a.refused("ENOTFOUND", "xfer.state", xfer=x)
        t.yours.mem[:] = random.Random(4).randbytes(BYTES)
        t.until(t.a.xfer("read", local, remote))
        assert t.mine.mem[:] == t.yours.mem[:], "read bytes differ"


def shm_memfd_write_and_read():
    write_and_read("shm", ("memfd", "memfd"))


def shm_vm_write_and_read():
    write_and_read("shm", ("vm", "vm"))


def ucx_memfd_write_and_read():
    write_and_read("ucx", ("memfd", "memfd"))


def ucx_vm_and_shm_write_and_read():
    write_and_read("ucx", ("vm", "shm"))


def tcp_memfd_write_and_read():
    write_and_read("tcp", ("memfd", "memfd"))


def tcp_vm_and_shm_write_and_read():
    write_and_read("tcp", ("vm", "shm"))


def long_list_by_memfd():
    """40 000 rows in random order, as one list of 40 000 entries in a memfd."""
    with Agents("shm") as t:
        n = min(40000, ROWS)
        t.mine.mem[:] = random.Random(5).randbytes(BYTES)
        rows = scattered(n, 6)
        fd = os.memfd_create("list", os.MFD_CLOEXEC)
        os.write(fd, b"".join(struct.pack("<4Q", t.yours.address + r * ROW, ROW, 0, 1)
                              for r in rows))
        remote = t.a.cmd("dlist.prep", fds=[fd], fd=0, count=n, peer=t.peer)["dlist"]
        local, _ = t.lists()
        t.until(t.a.xfer("write", local, remote, range(n)))
        for i, r in enumerate(rows):
            assert t.yours.mem[r * ROW:(r + 1) * ROW] == t.mine.mem[i * ROW:(i + 1) * ROW]
        os.close(fd)


def session_ends_while_its_list_is_read():
    """The helper's result comes when nobody is there any more; nothing may be left."""
    with Agents("shm") as t:
        n = min(40000, ROWS)
        for _ in range(10):
            gone = Engine(t.daemons[0], "gone")
            own = Cache(gone)
            fd = os.memfd_create("list", os.MFD_CLOEXEC)
            os.write(fd, b"".join(struct.pack("<4Q", own.address + r * ROW, ROW, 0, 1)
                                  for r in scattered(n, 6)))
            line = json.dumps({"cmd": "dlist.prep", "fd": 0, "count": n}) + "\n"
            socket.send_fds(gone.sock, [line.encode()], [fd])
            gone.close()
            os.close(fd)
        end = time.monotonic() + DEADLINE_S
        while len(t.a.cmd("session.list", all=True)["sessions"]) > 1:
            assert time.monotonic() < end, "a session does not end"
        local, remote = t.lists()
        t.until(t.a.xfer("write", local, remote))


def unregistered_memory_is_out_of_reach():
    with Agents("ucx") as t:
        local, remote = t.lists()
        t.b.cmd("pool.unregister", pool=t.yours.pool)
        t.b.cmd("region.unregister", region=t.yours.region)
        t.mine.mem[:] = b"\1" * BYTES
        try:
            t.until(t.a.xfer("write", local, remote), FAILED)
        except Refused as why:
            assert why.code in ("ENOTFOUND", "EREVOKED"), why
        assert t.yours.mem[:] == bytes(BYTES), "memory that was taken back was written"


def list_survives_its_remote_session():
    """One local list for two engines of the other daemon, of which the first ends."""
    with Agents("shm") as t:
        local, remote = t.lists()
        t.until(t.a.xfer("write", local, remote, [1], [1]))
        second = Engine(t.daemons[1], "second")
        theirs = Cache(second, "memfd")
        peer = t.attach(t.a, second)
        far = t.a.prep([(theirs.address, ROW, ROW, ROWS)], peer=peer)
        t.until(t.a.xfer("write", local, far["dlist"], [1], [2]))
        t.b.close()
        end = time.monotonic() + DEADLINE_S
        while len(second.cmd("session.list")["sessions"]) > 1:
            assert time.monotonic() < end
        t.mine.mem[3 * ROW:4 * ROW] = b"3" * ROW
        t.until(t.a.xfer("write", local, far["dlist"], [3], [4]))
        assert theirs.mem[4 * ROW:5 * ROW] == b"3" * ROW
        third = Engine(t.daemons[1], "third")
        fresh = Cache(third, "memfd")
        peer = t.attach(t.a, third)
        far = t.a.prep([(fresh.address, ROW, ROW, ROWS)], peer=peer)
        t.until(t.a.xfer("read", local, far["dlist"], [3], [4]))
        assert t.mine.mem[3 * ROW:4 * ROW] == fresh.mem[4 * ROW:5 * ROW]
        second.close()
        third.close()


def region_registered_after_attaching_is_sent():
    """Without being asked for; until then it is not known."""
    with Agents("shm") as t:
        later = Cache(t.b, "memfd")
        rows, end = [(later.address, ROW, ROW, ROWS)], time.monotonic() + DEADLINE_S
        while True:
            try:
                t.a.prep(rows, peer=t.peer)
                break
            except Refused as why:
                assert why.code == "ENOTFOUND" and time.monotonic() < end, why


def region_registered_after_attaching():
    """The owner's daemon is asked anew: then its list can be made, at once."""
    with Agents("shm") as t:
        later = Cache(t.b, "memfd")
        rows = [(later.address, ROW, ROW, ROWS)]
        for _ in range(1100):  # more than may be attached: it keeps nothing
            t.a.cmd("peer.attached", attach=t.peer, fresh=True)
        remote = t.a.prep(rows, peer=t.peer)["dlist"]
        local, _ = t.lists()
        t.mine.mem[3 * ROW:4 * ROW] = b"7" * ROW
        t.until(t.a.xfer("write", local, remote, [3], [4]))
        assert later.mem[4 * ROW:5 * ROW] == b"7" * ROW
        t.b.close()
        end = time.monotonic() + DEADLINE_S
        while True:  # and tells of the session's end, as the other form does
            try:
                t.a.cmd("peer.attached", attach=t.peer, fresh=True)
                assert time.monotonic() < end
            except Refused as why:
                assert why.code in ("ESESSION", "EAUTH"), why
                break


def wrong_secret_is_refused():
    with Agents("shm") as t:
        epoch = [s for s in t.b.cmd("session.list")["sessions"] if "secret" in s][0]["epoch"]
        t.a.refused("EAUTH", "peer.attach", endpoint=t.b.endpoint, session=epoch,
                    secret="0" * 32)


def ended_session_is_not_attached():
    with Agents("shm") as t:
        t.a.cmd("peer.attached", attach=t.peer)
        t.b.close()
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                t.a.cmd("peer.attached", attach=t.peer)
                assert time.monotonic() < end
            except Refused as why:
                assert why.code == "ESESSION", why
                break
        t.a.refused("ENOTFOUND", "peer.attached", attach=77)


if __name__ == "__main__":
    run([shm_memfd_write_and_read, shm_vm_write_and_read, ucx_memfd_write_and_read,
         ucx_vm_and_shm_write_and_read, tcp_memfd_write_and_read,
         tcp_vm_and_shm_write_and_read, long_list_by_memfd,
         session_ends_while_its_list_is_read, list_survives_its_remote_session,
         unregistered_memory_is_out_of_reach, region_registered_after_attaching_is_sent,
         region_registered_after_attaching,
         wrong_secret_is_refused,
         ended_session_is_not_attached])
