#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by engines that no cause is known for: odd messages, descriptors, numbers."""
import array
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import rig
from engine_help import HELLO, greeted
from fuse import FLUSH, GETATTR, READ, STATFS, Silent
from rig import Engine, Refused, ask, attack, raw, rest
from bystander import MALLORY, libc


def rights(fds):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


@attack("odd", "urgent bytes with descriptors are bytes, or end the connection")
def oob_bytes_with_descriptors(house):
    for text in (b"{", b"\n", b'{"id":1,"cmd":"ping"}\n'):
        s, fd = greeted(house), os.open("/dev/null", os.O_RDONLY)
        with contextlib.suppress(OSError):
            for _ in range(50):
                s.sendmsg([text], rights([fd] * 100), socket.MSG_OOB)
        os.close(fd)
        rest(0.1)
        s.close()
    return None


@attack("odd", "descriptors with empty and half lines are bounded")
def descriptors_without_a_line(house):
    fd, kept = os.open("/dev/null", os.O_RDONLY), []
    for _ in range(20):
        s = greeted(house)
        with contextlib.suppress(OSError):
            for text in (b"\n", b" ", b"{"):
                for _ in range(10):
                    s.sendmsg([text], rights([fd] * 253))
        kept.append(s)
    rest(1)
    said = ask(raw(house.a.socket_path), HELLO)
    return None if said and "error" not in said else "no session is begun: %s" % said


@attack("odd", "a connection passed over itself ends with its client")
def connection_in_its_own_queue(house):
    admin = Engine(house.a, "watch")
    before = {m["name"]: m["value"] for m in admin.cmd("stats")["metrics"]}["sessions"]
    for text in (b"{", b'{"id":1,"cmd":"nonsense"}\n',
                 b'{"id":1,"cmd":"region.register","kind":"memfd","fd":0,"length":"4096"}\n'):
        for _ in range(8):
            s = greeted(house)
            s.sendmsg([text], rights([s.fileno()]))
            s.close()
    rest(8)
    after = {m["name"]: m["value"] for m in admin.cmd("stats")["metrics"]}["sessions"]
    return "%d sessions more" % (after - before) if after > before + 1 else None


def odd_descriptors():
    yield "pidfd", lambda: os.pidfd_open(os.getpid())
    yield "eventfd", lambda: os.eventfd(1)
    yield "epoll", lambda: libc.epoll_create1(0)
    yield "timerfd", lambda: libc.timerfd_create(1, 0)
    yield "signalfd", lambda: libc.signalfd(-1, bytes(128), 0)
    yield "inotify", lambda: libc.inotify_init1(0)
    yield "fanotify", lambda: libc.fanotify_init(0x200, 0)
    yield "io_uring", lambda: libc.syscall(425, 4, bytes(120))
    yield "userfaultfd", lambda: libc.syscall(323, 1)
    yield "memfd_secret", lambda: libc.syscall(447, 0)
    yield "O_PATH", lambda: os.open("/dev/shm", os.O_PATH)
    yield "folder", lambda: os.open("/", os.O_RDONLY)
    yield "pipe", lambda: os.pipe()[0]
    yield "zero", lambda: os.open("/dev/zero", os.O_RDWR)
    yield "memory", lambda: os.open("/proc/self/mem", os.O_RDWR)
    yield "statm", lambda: os.open("/proc/self/statm", os.O_RDONLY)
    yield "pagemap", lambda: os.open("/proc/self/pagemap", os.O_RDONLY)
    yield "tty", lambda: os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    yield "empty memfd", lambda: os.memfd_create("x", 0)
    yield "hugetlb", lambda: os.memfd_create("x", 4 | os.MFD_ALLOW_SEALING)
    yield "namespace", lambda: os.open("/proc/self/ns/user", os.O_RDONLY)
    yield "listener", lambda: socket.create_server(("127.0.0.1", 0)).detach()


@attack("odd", "descriptors that are no memory are refused by name")
def descriptors_of_every_kind(house):
    s, taken = Engine(house.a, "mallory"), []
    for name, make in odd_descriptors():
        try:
            fd = make()
        except OSError:
            continue
        if fd < 0:
            continue
        for kind in ("memfd", "vm", "dmabuf", "cuda_vmm", "file"):
            if kind == "file" and name == "empty memfd":
                continue  # it is one
            more = {"vm": {"address": "4096"}, "file": {"address": str(1 << 62)}}.get(kind, {})
            try:
                s.cmd("region.register", fds=[fd], kind=kind, fd=0, length=4096, **more)
                taken.append("%s as %s" % (name, kind))
            except (Refused, OSError):
                pass
        os.close(fd)
    return "taken: " + ", ".join(taken) if taken else None


def over_statm(path):
    """A mount of this name, by the root of a user namespace."""
    uid, flags = os.geteuid(), 0x20000 if os.geteuid() == 0 else 0x10020000
    if libc.unshare(flags) == 0 and uid:
        for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % uid)):
            with open("/proc/self/" + name, "w") as out:
                out.write(text)
    libc.mount(None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    if libc.mount(path, b"/proc/self/statm", None, 0x1000, None):  # MS_BIND
        raise OSError("no mounts for users")
    return os.open("/proc/self/statm", os.O_RDONLY)


def in_dev_shm():
    folder = tempfile.mkdtemp(dir="/dev/shm")
    fd = os.open(folder + "/statm", os.O_RDWR | os.O_CREAT)
    shutil.rmtree(folder)
    return fd


def statm_look_alikes():
    yield "O_PATH", lambda: os.open("/proc/self/statm", os.O_PATH)
    yield "a pipe", lambda: os.pipe()[0]
    yield "a memfd", lambda: os.memfd_create("statm", 0)
    yield "of tmpfs", in_dev_shm
    yield "memory", lambda: os.open("/proc/self/mem", os.O_RDONLY)
    yield "status", lambda: os.open("/proc/self/status", os.O_RDONLY)
    yield "a file of a disk", lambda: os.open("/proc/self/exe", os.O_RDONLY)
    for name in (b"mem", b"status", b"uid_map"):
        yield name.decode() + " of a mount", lambda n=name: over_statm(b"/proc/self/" + n)


@attack("odd", "a file that only looks like statm is refused by name", quick=True)
def statm_that_is_none(house):
    s, taken = Engine(house.a, "mallory"), []
    memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(memory, 0, 4096)
    for name, make in statm_look_alikes():
        try:
            fd = make()
        except OSError:
            continue
        try:
            s.cmd("region.register", fds=[memory, fd], kind="memfd", fd=0, length=4096, statm=1)
            taken.append(name)
        except Refused as why:
            if why.code != "EIMPORT":
                taken.append("%s: %s" % (name, why))
        os.close(fd)
    return "taken: " + ", ".join(taken) if taken else None


@attack("odd", "a statm of a file system that does not answer is waited for by nobody", by=rig.ROOT)
def statm_of_a_silent_file_system(house):
    fuse = Silent(house.dir + "/fuse", {GETATTR, STATFS, READ, FLUSH})
    fd = os.open(os.path.dirname(fuse.path) + "/statm", os.O_RDWR)
    fuse.quiet()
    try:
        Engine(house.a, "mallory").cmd("region.register", fds=[fd], kind="shm", length=4096,
                                       shm_name="/none", statm=0)
        return "it was taken"
    except (Refused, OSError, ValueError) as why:
        return None if "descriptor" in str(why) else str(why)
    finally:
        fuse.end()


@attack("odd", "a file of a file system that does not answer is not taken", by=rig.ROOT)
def file_of_a_silent_file_system(house):
    fuse = Silent(house.dir + "/fuse", {GETATTR, STATFS, READ, FLUSH})
    fd = os.open(os.path.dirname(fuse.path) + "/statm", os.O_RDWR)
    fuse.quiet()
    try:
        Engine(house.a, "mallory").cmd("region.register", fds=[fd], kind="file", fd=0,
                                       length=4096, address=str(1 << 62))
        return "it was taken"
    except (Refused, OSError, ValueError) as why:
        return None if "descriptor" in str(why) else str(why)
    finally:
        fuse.end()


@attack("odd", "nor is a statm that its owner reads for ever", by=rig.ROOT, quick=True)
def statm_held_by_a_reader(house):
    """The kernel locks an open file of /proc while it copies, here to a page that never
    arrives."""
    fuse = Silent(house.dir + "/fuse", {READ})
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    page = mmap.mmap(os.open(fuse.path, os.O_RDWR), fuse.bytes)
    fuse.quiet()
    reader = os.fork()
    if reader == 0:
        libc.read(statm, ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), 64)
        os._exit(0)
    while not sleeps_with(reader, statm):
        rest(0.01)
    s, memory = Engine(house.a, "mallory"), os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(memory, 0, 4096)
    s.cmd("region.register", fds=[memory, statm], kind="memfd", fd=0, length=4096, statm=1)
    rest(2)  # it is checked every 200 ms
    s.cmd("ping")
    fuse.end()
    return None


def sleeps_with(pid, fd):
    """In a call whose first argument is `fd`."""
    with open("/proc/%d/syscall" % pid) as call:
        return call.read().split()[1:2] == [hex(fd)]


@attack("odd", "imported memory is not cut, not through /proc either")
def memory_cut_after_it_was_imported(house):
    s = Engine(house.a, "mallory")
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    s.cmd("region.register", fds=[fd], kind="memfd", fd=0, length=1 << 20)
    for path in (fd, "/proc/self/fd/%d" % fd):
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
    return "it was cut" if os.fstat(fd).st_size == 0 else None


@attack("odd", "numbers beyond a u64, negative and not whole are refused")
def numbers_at_every_end(house):
    s = Engine(house.a, "mallory")
    for room in ("18446744073709551616", "-1", "1e3", "0x10", "", " 1", "1 ", "9" * 4000, "\x00"):
        for cmd in ("room.show", "room.close", "room.abort"):
            with contextlib.suppress(Refused):
                s.cmd(cmd, room=room, role="send")
                return "%s took room %r" % (cmd, room[:30])
    for room in (2 ** 63, 2 ** 64 - 1):
        with contextlib.suppress(Refused):
            s.cmd("room.show", room=str(room), role="send")
    raw_lines = [b'{"id":1,"cmd":"region.unregister","region":%s}\n' % n for n in (
        b"1e308", b"1e999", b"-0", b"9007199254740993", b"1" * 5000, b"NaN", b"0.5")]
    for line in raw_lines:
        answer = ask(s.sock, line)
        if answer and "error" not in answer:
            return "took %r" % line[:60]
    return None


@attack("odd", "names write no line of the log and no control into a terminal")
def names_that_forge_the_log(house):
    for name in ("a\n<0>daemon a: forged", "b\x1b[2J\x1b]0;x\x07", "c\u2028d", "e\x9b31m", "\u202eevil"):
        s = raw(house.a.socket_path)
        ask(s, json.dumps(dict(id=1, cmd="hello", proto=1, client=name),
                          ensure_ascii=False).encode() + b"\n")
        with contextlib.suppress(OSError):
            s.sendall(b"x" * (2 << 20))  # closed with a line in the log
        s.close()
    rest(0.3)
    log = house.a.log()
    bad = [w for w in ("\n<0>daemon a: forged", "\x1b", "\x9b", "\u2028", "\u202e") if w in log]
    return "in the log: %r" % bad if bad else None


@attack("odd", "a stopped engine that reads nothing keeps nobody waiting")
def stopped_engine_with_full_queues(house):
    pid = os.fork()
    if pid == 0:
        kept = []
        for _ in range(8):
            s = greeted(house)
            s.setblocking(False)
            with contextlib.suppress(OSError):
                while True:
                    s.sendall(b'{"id":1,"cmd":"help"}\n' * 100)
            kept.append(s)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    rest(2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


@attack("odd", "a metrics client with a window of nothing, and half requests, cost nobody time",
        config="[metrics]\nmetrics_listen = tcp://127.0.0.1:PORT\n", by=rig.STRANGER)
def metrics_read_by_nobody(house):
    ports = rig.listening(house)
    kept = []
    for _ in range(64):
        for port in ports:
            s = socket.socket()
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            with contextlib.suppress(OSError):
                s.connect(("127.0.0.1", port))
                s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
                          b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n")
            kept.append(s)
    rest(2)
    return None


@attack("odd", "what kvd-ctl prints of others holds no control of a terminal", by=rig.ROOT)
def names_in_an_administrators_terminal(house):
    kept = []
    for name in ("a\x1b[2J\x1b]0;x\x07", "b\x9b31m", "\u202eevil", "c\r\nforged"):
        kept.append(raw(house.a.socket_path))
        ask(kept[-1], json.dumps(dict(id=1, cmd="hello", proto=1, client=name, role=name)).encode()
            + b"\n")
    bad = set()
    for words in ("sessions", "stats", "rooms", "pools", "peers"):
        said = subprocess.run([rig.BUILD + "/kvd-ctl", "--socket", house.a.socket_path, words],
                              capture_output=True, timeout=20, env=dict(os.environ, LC_ALL="C.UTF-8"))
        out = (said.stdout + said.stderr).decode("utf-8", "replace")
        bad |= {words + " " + repr(c) for c in "\x1b\x07\x9b\u202e\r" if c in out}
    return "printed: %s" % sorted(bad) if bad else None


@attack("odd", "a key that is told twice, odd UTF-8 and deep trees are refused or harmless")
def lines_that_parsers_read_differently(house):
    s = greeted(house)
    for line in (b'{"id":1,"cmd":"ping","cmd":"drain"}', b'{"id":1,"cmd":"drain","cmd":"ping"}',
                 b'{"id":1,"cmd":"ping\\u0000drain"}', b'{"id":1,"CMD":"drain"}',
                 b'{"id":1,"cmd":"drain\xff"}', b'{"id":1,"cmd":"\xed\xa0\x80"}',
                 b'{"id":1,"cmd":"ping","x":' + b"[" * 5000 + b"]" * 5000 + b"}",
                 b'{"id":1,"cmd":"ping","x":[' + b"0," * 200000 + b"0]}",
                 b'{"id":1,"cmd":"ping"}' + b" " * 60000, b'\xef\xbb\xbf{"id":1,"cmd":"ping"}',
                 b'{"id":' + b"9" * 400 + b',"cmd":"ping"}', b'{"id":1,"cmd":"ping"}{"id":2}'):
        if ask(s, line + b"\n") is None:
            s = greeted(house)
    return None if ask(s, b'{"id":1,"cmd":"ping"}\n') else "no answer any more"


@attack("odd", "root of a user namespace of its own is no administrator", quick=True)
def root_of_its_own_namespace(house):
    uid = os.geteuid()
    if libc.unshare(0x10000000) != 0:
        raise rig.Skip("user namespaces for users")
    with contextlib.suppress(OSError):
        for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % uid)):
            with open("/proc/self/" + name, "w") as out:
                out.write(text)
    s = greeted(house)
    for line in (b'{"id":2,"cmd":"log.level","level":"debug"}\n', b'{"id":2,"cmd":"drain"}\n'):
        said = ask(s, line)
        if said and said.get("ok"):
            return "%s was done" % line.decode()
    return None


def processes_of(pid):
    """Of the daemon's group of processes: its warden's children are in it."""
    n, known = 0, {pid}
    for other in sorted((int(p) for p in os.listdir("/proc") if p.isdigit())):
        with contextlib.suppress(OSError):
            with open("/proc/%d/stat" % other) as f:
                if int(f.read().rsplit(")", 1)[1].split()[1]) in known:
                    known.add(other)
                    n += 1
    return n


@attack("odd", "descriptors of one user make no processes beyond its few", by=rig.ROOT)
def gates_without_number(house):
    def many():
        fd, kept = os.open("/dev/null", os.O_RDONLY), []
        for _ in range(100):
            kept.append(greeted(house))
            with contextlib.suppress(OSError):
                kept[-1].sendmsg([b'{"id":1,"cmd":"nonsense"}\n{'], rights([fd] * 16))
        rest(2)
    before = processes_of(house.a.proc.pid)
    crowd = [rig.Forked(many, role=rig.ENGINE) for _ in range(4)]
    rest(1)
    during = processes_of(house.a.proc.pid)
    for one in crowd:
        one.result(0.1)
    return "%d processes more" % (during - before) if during > before + 16 else None


def descriptors_of(house):
    return len(os.listdir("/proc/%d/fd" % house.a.proc.pid))


def page_of(engine):
    """A region of a page, in its own file."""
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, bytes(4096))
        return engine.cmd("region.register", fds=[fd], kind="memfd", fd=0, length=4096)["region"]
    finally:
        os.close(fd)


def regions_without_end(house, out):
    """As many as the limit allows, of a page each; the refusal of the last region."""
    kept, why = [], ""
    for _ in range(40):
        try:
            kept.append(Engine(house.a, "mallory"))
            for _ in range(200):
                page_of(kept[-1])
        except (Refused, OSError, ValueError) as refused:
            if isinstance(refused, Refused):  # else a session: closed behind its refusal
                why = str(refused)
    os.write(out, json.dumps([len(kept), why]).encode())
    signal.pause()


def one_more(house):
    """A new session's region."""
    engine = Engine(house.a, "bystander")
    engine.sock.settimeout(5)
    return page_of(engine)


@attack("V8", "one user's regions leave descriptors to administrators and other users", by=rig.ROOT,
        nofile=2048)
def regions_take_all_descriptors(house):
    out, into = os.pipe()
    before = descriptors_of(house)
    crowd = rig.Forked(regions_without_end, house, into, role=rig.ENGINE)
    sessions, why = json.loads(os.read(out, 4096))
    taken, seen = descriptors_of(house), []
    assert taken > before + 200, "%d and %d descriptors: %s" % (before, taken, why)
    if "ELIMIT" not in why or "uid:%d" % MALLORY not in why:
        seen.append("the last of %d sessions is refused with %s" % (sessions, why))
    for role in ("alice", rig.ROOT):
        said = rig.Forked(one_more, house, role=role).result(8)
        if not said or "value" not in said:
            seen.append("%s: %s" % (role, said and said["error"].strip().split("\n")[-1]))
    crowd.result(0.1)
    return "%d of 2048 descriptors: %s" % (taken, "; ".join(seen)) if seen else None


@attack("odd", "sessions asked for and left at once keep no administrator out", by=rig.ROOT)
def sessions_without_rest(house):
    def flood():
        end = time.monotonic() + 4
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                s = raw(house.a.socket_path)
                s.sendall(HELLO + b'{"id":2,"cmd":"help"}\n' * 20)
                s.close()
    crowd = [rig.Forked(flood, role=rig.ENGINE) for _ in range(4)]
    rest(0.3)
    worst, end = 0, time.monotonic() + 2.5
    while time.monotonic() < end:
        begin, s = time.monotonic(), socket.socket(socket.AF_UNIX)
        s.connect(house.a.socket_path)
        said = ask(s, HELLO)
        worst = max(worst, time.monotonic() - begin)
        s.close()
        if not said or "error" in said:
            return "root is answered by %s" % said
    for one in crowd:
        one.result(3)
    return "root waited %.1f s" % worst if worst > rig.STOPPED_S else None


# ---- numbers of processes ----

def child(run):
    """A process that runs it, and waits for its end."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            run()
            signal.pause()
        os._exit(0)
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def take_number(pid):
    """A process of that number, which has ended; its memory is as this one's."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            with open("/proc/sys/kernel/ns_last_pid", "w") as last:
                last.write(str(pid - 1))
        new = child(lambda: None)
        if new == pid:
            return new
        end(new)
    raise rig.Skip("a process with the number of another (ns_last_pid)")


@contextlib.contextmanager
def stopped(daemon):
    """Input in the meantime is available at once when it continues."""
    os.kill(daemon.proc.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.proc.pid, signal.SIGCONT)


def passed_on(house, line):
    """A connection of a process that has sent hello and passed it on; and that process."""
    ours, theirs = socket.socketpair()

    def connect():
        s = raw(house.a.socket_path)
        s.sendall(line)
        socket.send_fds(theirs, [b"x"], [s.fileno()])
    pid = child(connect)
    s = socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])
    s.settimeout(5)
    return s, pid


def answers(s, count):
    """So many lines, fewer where the connection ended."""
    text = b""
    with contextlib.suppress(OSError):
        while text.count(b"\n") < count and (some := s.recv(65536)):
            text += some
    return [json.loads(line) for line in text.splitlines()]


@attack("V3", "a process that has the number of one which connected is not taken for it",
        by=rig.ROOT, root_daemon=True)
def number_of_a_process_taken(house):
    memory = ctypes.create_string_buffer(b"of another process", 1 << 16)
    at = (ctypes.addressof(memory) + 4095) & ~4095
    line = (b'{"id":1,"cmd":"region.register","kind":"vm","address":"%d","length":"4096"}\n' % at)
    s, pid = passed_on(house, HELLO + line)
    said = answers(s, 2)
    assert len(said) == 2 and "region" in said[1], "memory of the one that connected: %s" % said
    end(pid)
    # between hello and import
    s, pid = passed_on(house, HELLO)
    assert len(answers(s, 1)) == 1
    with stopped(house.a):
        end(pid)
        other = take_number(pid)
        s.sendall(line)
    said = answers(s, 1)
    end(other)
    if said and "region" in said[0]:
        return "memory of another process was registered"
    # before it is let in
    with stopped(house.a):
        s, pid = passed_on(house, HELLO + line)
        end(pid)
        other = take_number(pid)
    said = answers(s, 2)
    end(other)
    if any("region" in one for one in said):
        return "memory of another process was registered at the door"
    return None


if __name__ == "__main__":
    rig.main("odd")
