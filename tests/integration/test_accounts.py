#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What one principal can hold of a real daemon: everything at its caps beside `memory_limit`
and beside what the process has grown by; sessions by many processes of one user; memory
that nobody has paid for. Each cause by itself is in tests/unit (test_account, test_xfer_caps,
test_overload, test_rooms_forged, test_rooms_moves, test_room_map, test_memory)."""
import array
import contextlib
import json
import os
import random
import socket
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, need_fds, need_users, run  # noqa: E402
from kvd_engine import BYTES, Cache, Engine, PAGES, Refused, populated  # noqa: E402

MIB = 1 << 20
PLAIN = os.path.basename(BUILD) == "rel"  # sanitizers have memory of their own
LIMIT = 128 * MIB
SHARE = LIMIT * 7 // 8
# what is in no account: tables of the daemon, helpers' and libmalloc's arenas
BESIDE = 24 * MIB


def rss(pid):
    with open("/proc/%d/status" % pid) as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmRSS"))


def principals(engine):
    answer = engine.cmd("stats", by="principal")
    assert answer["limit_bytes"] == LIMIT and answer["share_bytes"] == SHARE, answer
    assert answer["known"] == len(answer["principals"]), answer
    for p in answer["principals"]:
        assert p["bytes"] == sum(c["bytes"] for c in p["classes"]), p
    assert answer["bytes"] == sum(p["bytes"] for p in answer["principals"]), answer
    return {p["name"]: p for p in answer["principals"]}


def until_refused(step):
    """How often it was done before the account was full."""
    done = 0
    try:
        while True:
            step(done)
            done += 1
    except Refused as why:
        assert why.code == "ELIMIT" and "(memory_limit)" in why.message, why
        assert "uid:%d: " % os.getuid() in why.message, why
    return done


def lists_of(engine, address, count):
    """Rows that do not squeeze, in one memfd."""
    rows = array.array("Q")
    order = list(range(count))
    random.Random(1).shuffle(order)
    for i in order:
        rows.extend((address + i * 8, 4, 0, 1))
    fd = os.memfd_create("rows", os.MFD_CLOEXEC)
    os.write(fd, rows.tobytes())
    return fd


def replies_of_a_full_account(kvd, engine, admin, name):
    """A large reply is refused by name, and who does not read his gets no more of them."""
    try:
        engine.cmd("room.list")
        raise AssertionError("a large reply of a full account")
    except Refused as why:
        assert why.code == "ELIMIT" and name + ": replies: " in why.message, why
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(kvd.socket_path)
        deaf.setblocking(False)
        deaf.send(b'{"id":1,"cmd":"hello","proto":1,"client":"deaf"}\n')
        for _ in range(2000):
            with contextlib.suppress(BlockingIOError):
                deaf.send(b'{"id":2,"cmd":"stats"}\n')
            admin.cmd("ping")
        held = principals(admin)[name]
        waits = {c["class"]: c for c in held["classes"]}["replies"]["bytes"]
        print("     %.1f KiB of replies wait for one that does not read, %.1f MiB charged"
              % (waits / 1024, held["bytes"] / MIB), flush=True)
        # what it had asked for by then
        assert waits and held["bytes"] < SHARE + MIB, held


def one_principal_at_all_its_caps_stays_below_the_ceiling():
    config = "[daemon]\nmemory_limit = 128 MiB\n[transport]\ntransports = tcp\n"
    with Daemon(config) as kvd, contextlib.ExitStack() as files:
        admin = Engine(kvd, "admin")
        engine, other = Engine(kvd, "greedy"), Engine(kvd, "the same user's")
        cache, second = Cache(engine), Cache(other)
        before = rss(kvd.proc.pid)
        name = "uid:%d" % os.getuid()
        fd = lists_of(engine, cache.address, 65536)
        files.callback(os.close, fd)
        views = {"kv": {"pages": list(range(PAGES))}}

        def room(i):
            engine.cmd("room.open", room=str(i), role="send", pool=cache.pool)
            for seq in range(20):  # nobody has come: they are kept
                engine.cmd("room.send", room=str(i), seq=2 * seq, views=views)

        for i in range(2000):
            room(i)
        lists = until_refused(lambda i: engine.cmd("dlist.prep", fd=0, count=65536, fds=[fd]))
        rooms = until_refused(lambda i: room(10000 + i))
        grown = rss(kvd.proc.pid) - before
        held = principals(admin)[name]
        kinds = {c["class"]: c for c in held["classes"]}
        print("     %d lists, %d rooms, %d chunks: %.1f MiB charged of %.1f, %.1f MiB grown"
              % (lists, 2000 + rooms, kinds["chunks"]["objects"], held["bytes"] / MIB,
                 SHARE / MIB, grown / MIB), flush=True)
        assert held["bytes"] <= SHARE and held["bytes"] > SHARE - 4 * MIB, held
        assert lists > 5 and held["refused"] >= 2, held
        for kind in ("sessions", "regions", "rooms", "chunks", "pages", "lists", "layouts"):
            assert kinds[kind]["bytes"] > 0, kinds
        assert not PLAIN or grown < held["bytes"] + BESIDE, (grown, held)
        replies_of_a_full_account(kvd, engine, admin, name)
        try:  # another session is the same principal
            other.cmd("dlist.prep", fd=0, count=65536, fds=[fd])
            raise AssertionError("a second session of the user has more")
        except Refused as why:
            assert why.code == "ELIMIT", why
        done = subprocess.run([BUILD + "/kvd-ctl", "-s", kvd.socket_path, "stats", "--by",
                               "principal"], capture_output=True, text=True)
        assert done.returncode == 0 and name in done.stdout, done
        assert "of 128.0 MiB (memory_limit); limit per principal 112.0" in done.stdout, done
        engine.close()
        end = DEADLINE_S * 100
        while principals(admin)[name]["bytes"] > MIB and end:
            end -= 1
        assert end, principals(admin)
        other.prep([(second.address, 64)])
        other.close()
        admin.close()


def many_processes_of_one_user_leave_room_for_others():
    """256 processes, a session each, are still one user."""
    need_users(65534, 65533)
    need_fds(1024)
    with Daemon("[control]\nsocket_mode = 0666\nallow_uids = 65533, 65534\n") as kvd:
        os.chmod(kvd.run_dir, 0o755)
        kvd.expect("connection refused")
        children, admitted = [], 0
        for _ in range(256):
            r, w = os.pipe()
            keep_r, keep_w = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(keep_w)
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                os.write(w, b"y" if hello(kvd)[0] else b"n")
                os.read(keep_r, 1)  # until its parent is done
                os._exit(0)
            os.close(w)
            os.close(keep_r)
            admitted += os.read(r, 1) == b"y"
            os.close(r)
            children.append((pid, keep_w))
        pid = os.fork()  # another user
        if pid == 0:
            os.setresgid(65533, 65533, 65533)
            os.setresuid(65533, 65533, 65533)
            os._exit(0 if hello(kvd)[0] else 1)
        kept_out = os.waitpid(pid, 0)[1]
        done = subprocess.run([BUILD + "/kvd-ctl", "-s", kvd.socket_path, "ping"],
                              capture_output=True, text=True, timeout=DEADLINE_S)
        for pid, keep_w in children:
            os.close(keep_w)
        for pid, _ in children:
            os.waitpid(pid, 0)
        assert admitted == 256 - 256 // 8, admitted
        assert kept_out == 0, "another user is kept out"
        assert done.returncode == 0, "an administrator is kept out: " + done.stderr


KEPT = []


def hello(kvd):
    """Is a session of this process admitted?"""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(DEADLINE_S)
    sock.connect(kvd.socket_path)
    with contextlib.suppress(OSError):
        sock.sendall(b'{"id":1,"cmd":"hello","proto":1,"client":"one"}\n')
    answer = json.loads(sock.makefile().readline())
    KEPT.append(sock)
    return "error" not in answer, answer


def memory_with_holes_is_refused():
    """A page belongs to who makes it: of large memory not one is made here."""
    with Daemon() as kvd:
        engine = Engine(kvd, "sparse")
        fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 160 * MIB)
        args = dict(kind="memfd", fd=0, length=160 * MIB)
        message = engine.refused("EIMPORT", "region.register", fds=[fd], **args)
        assert "holes" in message and "MADV_POPULATE_WRITE" in message, message
        assert os.fstat(fd).st_blocks == 0, os.fstat(fd)
        populated(fd, 160 * MIB).close()
        engine.cmd("region.register", fds=[fd], **args)
        os.close(fd)
        engine.close()


if __name__ == "__main__":
    assert BYTES
    run([one_principal_at_all_its_caps_stays_below_the_ceiling,
         many_processes_of_one_user_leave_room_for_others,
         memory_with_holes_is_refused])
