#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Rooms between two real daemons through their public sockets: every transport and memory kind,
authentication, and the ends of processes."""
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, for_everyone, need_users, run  # noqa: E402
import kvd_engine  # noqa: E402
from kvd_engine import (BOOTSTRAPPING, BYTES, Cache, Engine, FAILED, PAGES, Refused, SUCCESS,  # noqa: E402
                        TRANSFERRING, WAITING, open_pull, open_push)

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77


def config(transport, more=""):
    return "[transport]\ntransports = %s\n%s" % (transport, more)


class Pair(kvd_engine.Pair):
    def __init__(self, transport, kinds=("memfd", "memfd"), more="", **args):
        super().__init__([Daemon(config(transport, more), **args) for _ in range(2)],
                         kinds=kinds)

    def push(self, room):
        self.src.fill(SRC, TOKENS)
        open_push(self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS)
        self.decode.until(room, "recv", SUCCESS)
        self.prefill.until(room, "send", SUCCESS)
        self.dst.check(DST, TOKENS)

    def pull(self, room):
        self.src.fill(SRC, TOKENS)
        open_pull(self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS)
        self.decode.until(room, "pull", SUCCESS)
        self.prefill.until(room, "offer", SUCCESS)
        self.dst.check(DST, TOKENS)


def both_ways(transport, kinds):
    with Pair(transport, kinds) as p:
        p.push(1)
        p.dst.mem[:] = bytes(BYTES)
        p.pull(2)
        shown = p.decode.cmd("room.show", room="1")
        assert shown["peers"][0]["transport"] == transport, shown


def shm_memfd_push_and_pull():
    both_ways("shm", ("memfd", "memfd"))


def shm_posix_shm_push_and_pull():
    both_ways("shm", ("shm", "shm"))


def shm_vm_push_and_pull():
    both_ways("shm", ("vm", "vm"))


def shm_mixed_kinds_push_and_pull():
    both_ways("shm", ("vm", "shm"))


def ucx_memfd_push_and_pull():
    both_ways("ucx", ("memfd", "memfd"))


def ucx_vm_and_shm_push_and_pull():
    both_ways("ucx", ("vm", "shm"))


def tcp_memfd_push_and_pull():
    both_ways("tcp", ("memfd", "memfd"))


def tcp_vm_and_shm_push_and_pull():
    both_ways("tcp", ("vm", "shm"))


def one_daemon_serves_both_engines():
    with Daemon(config("shm")) as d:
        prefill, decode = Engine(d, "prefill"), Engine(d, "decode")
        src, dst = Cache(prefill), Cache(decode)
        src.fill(SRC, TOKENS)
        open_push(prefill, decode, src, dst, 1, SRC, DST, TOKENS)
        decode.until(1, "recv", SUCCESS)
        dst.check(DST, TOKENS)
        prefill.close()
        decode.close()


def peer_daemon_killed_fails_the_room_within_a_second():
    with Pair("shm", patient=False) as p:
        open_push(p.prefill, p.decode, p.src, p.dst, 1, SRC, DST, TOKENS, send=False)
        p.daemons[0].proc.kill()
        p.daemons[0].wait()
        took, error = p.decode.until(1, "recv", FAILED)
        assert took < 1.5, took
        assert error["code"] in ("EPEER", "ETRANSPORT") and error["retryable"], error
        assert p.prefill.endpoint.split("#")[0] in error["message"], error
        # the next prefill daemon serves new rooms at once
        with Daemon(config("shm"), patient=False) as again:
            prefill = Engine(again, "prefill")
            src = Cache(prefill)
            src.fill(SRC, TOKENS)
            open_push(prefill, p.decode, src, p.dst, 2, SRC, DST, TOKENS)
            p.decode.until(2, "recv", SUCCESS)
            p.dst.check(DST, TOKENS)
            prefill.close()
        p.daemons[0].__enter__()  # for the common end


def peer_daemon_frozen_fails_the_room():
    with Pair("ucx", patient=False) as p:
        open_push(p.prefill, p.decode, p.src, p.dst, 1, SRC, DST, TOKENS, send=False)
        p.daemons[0].proc.send_signal(signal.SIGSTOP)
        took, error = p.decode.until(1, "recv", FAILED)
        p.daemons[0].proc.send_signal(signal.SIGCONT)
        assert took < 2.5 and "missed" in error["message"], (took, error)
        p.prefill.until(1, "send", FAILED)
        p.push(2)


ENGINE = """
import sys
sys.path.insert(0, sys.argv[1])
from kvd_engine import *
class D: socket_path = sys.argv[2]
e = Engine(D, "victim")
c = Cache(e)
e.cmd("room.open", room="9", role="send", pool=c.pool)
print(c.pool, flush=True)
sys.stdin.read()
"""


def victim(daemon):
    lib = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib")
    proc = subprocess.Popen([sys.executable, "-c", ENGINE, lib, daemon.socket_path],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert proc.stdout.readline().strip(), "the victim engine did not start"
    return proc


def engine_killed_fails_the_other_side_and_is_unmapped():
    with Pair("shm") as p:
        p.prefill.cmd("pool.unregister", pool=p.src.pool)
        p.prefill.cmd("region.unregister", region=p.src.region)
        proc = victim(p.daemons[0])
        p.decode.cmd("room.open", room="9", role="recv", pool=p.dst.pool,
                     sources=[p.prefill.endpoint])
        p.decode.cmd("room.bind", room="9", views={"kv": {"pages": DST}})
        p.decode.until(9, "recv", WAITING)
        p.decode.acknowledged(9)
        proc.kill()
        proc.wait()
        took, error = p.decode.until(9, "recv", FAILED)
        assert took < 2 and error["code"] == "ESESSION", (took, error)
        assert "victim" in error["message"] and str(proc.pid) in error["message"], error
        end = time.monotonic() + 2
        while any(m["name"] == "regions" and m["value"] != "0" and m["value"] != 0
                  for m in p.prefill.cmd("stats")["metrics"]):
            assert time.monotonic() < end, "regions of a dead engine are still mapped"


def engine_stopped_is_not_dead():
    with Pair("shm") as p:
        proc = victim(p.daemons[1])
        proc.send_signal(signal.SIGSTOP)
        p.push(1)
        sessions = p.decode.cmd("session.list", all=True)["sessions"]
        assert any(s["client"] == "victim" for s in sessions), sessions
        proc.kill()
        proc.wait()


def abort_under_way_stops_every_byte():
    for transport in ("shm", "tcp", "ucx"):
        with Pair(transport) as p:
            pages = list(range(PAGES))
            p.src.fill(pages, PAGES * 16)
            for room in range(1, 11):
                open_push(p.prefill, p.decode, p.src, p.dst, room, pages, pages, PAGES * 16)
                side = p.decode if room % 2 else p.prefill
                side.cmd("room.abort", room=str(room), reason="test")
                while True:
                    state, _, _ = p.decode.state(room, "recv")
                    if state in (FAILED, SUCCESS):
                        break
                before = p.dst.mem[:]
                end = time.monotonic() + (1 if room in (1, 2) else 0.05)
                while time.monotonic() < end:
                    assert p.dst.mem[:] == before, "a byte moved after a terminal state"
                for engine, role in ((p.prefill, "send"), (p.decode, "recv")):
                    while engine.state(room, role)[0] == TRANSFERRING:
                        pass
                p.dst.mem[:] = bytes(BYTES)


def keygen(folder, name):
    path = os.path.join(folder, name)
    done = subprocess.run([BUILD + "/kvd-ctl", "keygen", path], capture_output=True,
                          text=True, check=True)
    return path, done.stdout


def curve_peers_on_the_list_connect_and_others_do_not():
    with tempfile.TemporaryDirectory() as folder:
        keys = [keygen(folder, "key%d" % i) for i in range(3)]
        allow = os.path.join(folder, "allow")
        with open(allow, "w") as out:
            out.writelines("peer%d %s" % (i, keys[i][1]) for i in range(2))

        def daemon(i):
            return Daemon("[peer]\ncurve_secret_file = %s\ncurve_allow_file = %s\n"
                          "[transport]\ntransports = shm\n" % (keys[i][0], allow),
                          name="d%d" % i)
        with daemon(0) as a, daemon(1) as b, daemon(2) as c:
            prefill, decode, stranger = Engine(a, "p"), Engine(b, "d"), Engine(c, "s")
            src, dst = Cache(prefill), Cache(decode)
            src.fill(SRC, TOKENS)
            open_push(prefill, decode, src, dst, 1, SRC, DST, TOKENS,
                      ticket=os.urandom(16).hex())
            decode.until(1, "recv", SUCCESS)
            dst.check(DST, TOKENS)
            # daemons of two users: a number alone is not enough
            prefill.cmd("room.open", room="2", role="send", pool=src.pool)
            decode.cmd("room.open", room="2", role="recv", pool=dst.pool,
                       sources=[prefill.endpoint])
            decode.cmd("room.bind", room="2", views={"kv": {"pages": DST}})
            error = decode.until(2, "recv", FAILED)[1]
            assert error["code"] == "EAUTH" and "ticket: room 2" in error["message"], error
            assert prefill.state(2, "send")[0] == BOOTSTRAPPING
            a.expect("unauthorized peer")
            for d in (a, b, c):
                d.expect("not on")  # any log lines of the unauthenticated peer
                d.expect("refused")
                d.expect("not reached")
            stranger.refused("EAUTH", "peer.connect", endpoint=prefill.endpoint)
            for e in (prefill, decode, stranger):
                e.close()


def curve_key_removed_ends_its_peering():
    """Two daemons, a running room: the list of one loses the other's key."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [keygen(folder, "key%d" % i) for i in range(2)]

        def allow(i, *listed):
            with open(os.path.join(folder, "allow%d" % i), "w") as out:
                out.writelines("peer%d %s" % (k, keys[k][1]) for k in listed)

        def daemon(i):
            allow(i, 0, 1)
            return Daemon("[peer]\ncurve_secret_file = %s\ncurve_allow_file = %s/allow%d\n"
                          "[transport]\ntransports = tcp\n" % (keys[i][0], folder, i),
                          name="d%d" % i)
        with daemon(0) as a, daemon(1) as b:
            prefill, decode = Engine(a, "p"), Engine(b, "d")
            src, dst = Cache(prefill), Cache(decode)
            prefill.cmd("room.open", room="1", role="send", pool=src.pool, ticket="ab" * 16)
            decode.cmd("room.open", room="1", role="recv", pool=dst.pool,
                       sources=[prefill.endpoint], ticket="ab" * 16)
            decode.cmd("room.bind", room="1", views={"kv": {"pages": DST}})
            decode.acknowledged(1)
            allow(0, 0)
            began = time.monotonic()
            answer = prefill.cmd("config.reload")
            assert answer["keys"]["removed"] == 1, answer
            assert answer["ended"] == {"peerings": 1, "sessions": 0}, answer
            for engine, role in ((prefill, "send"), (decode, "recv")):
                error = engine.until(1, role, FAILED)[1]
                told = error["code"] == "EAUTH" and \
                    "its key was removed from curve_allow_file" in error["message"]
                # the other side may see the end of its data connection before the reason
                assert told or engine is decode and error["code"] == "EPEER", error
            assert time.monotonic() - began < 1, time.monotonic() - began
            lost = prefill.cmd("peer.list")
            assert not [p for p in lost["peers"] if p["state"] == "up"], lost
            assert "its key was removed" in str(lost), lost
            assert "down instance=" in a.log() and "its key was removed" in a.log(), a.log()
            b.expect("not reached")
            a.expect("connection refused")
            decode.refused("EAUTH", "peer.connect", endpoint=prefill.endpoint)
            prefill.refused("EAUTH", "peer.connect", endpoint=decode.endpoint)
            for e in (prefill, decode):
                e.close()


def become(user):
    def change():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    return change


def unprivileged_users_share_a_host():
    """Two daemons of two users without rights: memfds cross by shm."""
    users = (65534, 1)
    need_users(*users)
    folders = [tempfile.mkdtemp(prefix="kvd-user-") for _ in users]
    try:
        for user, folder in zip(users, folders):
            os.chown(folder, user, user)
            os.chmod(folder, 0o755)
            open(folder + "/peers", "w").close()
        daemons = [Daemon(config("shm, ucx", "[control]\nsocket_mode = 0666\nallow_uids = 0\n"
                                 "[peer]\ncurve_allow_file = %s/peers\n" % folder),
                          run_dir=folder, name="u%d" % user, preexec=become(user),
                          program=for_everyone("kvd"))
                   for user, folder in zip(users, folders)]
        with daemons[0] as a, daemons[1] as b:
            a.expect("connection refused")
            b.expect("not reached")
            prefill, decode = Engine(a, "prefill"), Engine(b, "decode")
            # keys of other users are unknown: errors name the missing line and its host
            line_of_a, line_of_b = (e.cmd("keys")["line"] for e in (prefill, decode))
            message = decode.refused("EAUTH", "peer.connect", endpoint=prefill.endpoint)
            assert line_of_b in message and "here, and" in message, message
            for daemon, engine, line in (b, decode, line_of_a), (a, prefill, line_of_b):
                if daemon is a:
                    message = decode.refused("EAUTH", "peer.connect", endpoint=prefill.endpoint)
                    assert "on its host add the line '%s'" % line in message, message
                with open(daemon.run_dir + "/peers", "w") as out:
                    out.write(line + "\n")
                assert engine.cmd("config.reload")["keys"]["added"] == 1
            src, dst = Cache(prefill), Cache(decode)
            src.fill(SRC, TOKENS)
            open_push(prefill, decode, src, dst, 1, SRC, DST, TOKENS,
                      ticket=os.urandom(16).hex())
            decode.until(1, "recv", SUCCESS)
            dst.check(DST, TOKENS)
            # memory of a process that the daemon's user may not read
            vm = dict(kind="vm", address=str(src.address), length=BYTES)
            message = prefill.refused("EPERM", "region.register", **vm)
            assert "uid" in message and "use memfd" in message, message
            # unless the process itself opens it for the daemon
            for path, taken in (("/proc/self/comm", False), ("/proc/self/mem", True)):
                fd = os.open(path, os.O_RDWR)
                try:
                    answer = prefill.cmd("region.register", fds=[fd], fd=0, **vm)
                    assert taken and answer["kind"] == "vm", path
                except Refused as why:
                    assert not taken and why.code == "EIMPORT", why
                finally:
                    os.close(fd)
            prefill.close()
            decode.close()
    finally:
        for folder in folders:
            subprocess.run(["rm", "-rf", folder], check=True)


if __name__ == "__main__":
    cases = [shm_memfd_push_and_pull, shm_posix_shm_push_and_pull, shm_vm_push_and_pull,
         shm_mixed_kinds_push_and_pull, ucx_memfd_push_and_pull,
         ucx_vm_and_shm_push_and_pull, tcp_memfd_push_and_pull,
         tcp_vm_and_shm_push_and_pull, one_daemon_serves_both_engines,
         peer_daemon_killed_fails_the_room_within_a_second,
         peer_daemon_frozen_fails_the_room,
         engine_killed_fails_the_other_side_and_is_unmapped, engine_stopped_is_not_dead,
         abort_under_way_stops_every_byte, curve_peers_on_the_list_connect_and_others_do_not,
         curve_key_removed_ends_its_peering,
         unprivileged_users_share_a_host]
    run([c for c in cases if not sys.argv[1:] or c.__name__ in sys.argv[1:]])
