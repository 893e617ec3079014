#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by engines: users that may connect to the control socket."""
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import rig
from engine_help import HELLO, greeted
from fuse import FLUSH, READ, Silent
from rig import (MIB, ROOT, Daemon, Engine, Forked, House, Lingering, Refused, Skip, ask, attack,
                 for_everyone, raw, rest, rss_mib)
from bystander import ALICE, EVE, KVD, MALLORY, become, libc
from kvd_engine import SUCCESS, WAITING, Cache, open_push

HOLD_S = 2
F_SETLEASE = 1024


def linger(house, line, tries=4, nested=False):
    lingering, kept = Lingering(), []
    for _ in range(tries):
        kept.append(greeted(house))
        lingering.send(kept[-1], line, nested=nested)
    rest(HOLD_S)
    for s in kept:
        s.close()
    rest(HOLD_S)


# ---- descriptors that block ----

@attack("V1", "a descriptor of a line that is refused stops nobody when it is closed", quick=True)
def lingering_fd_with_a_refused_line(house):
    linger(house, b'{"id":1,"cmd":"nonsense"}\n')


@attack("V1", "a socket is no memory, and saying so stops nobody", quick=True)
def lingering_fd_as_a_region(house):
    linger(house, b'{"id":1,"cmd":"region.register","kind":"memfd","fd":0,"length":"4096"}\n')


@attack("V1", "a descriptor that was never read goes with its connection", quick=True)
def lingering_fd_never_read(house):
    linger(house, b'{"id":1,"cmd":')


@attack("V1", "nor does one within a socket within the line's socket", quick=True)
def lingering_fd_in_a_nested_socket(house):
    linger(house, b'{"id":1,"cmd":"nonsense"}\n', nested=True)


@attack("V1", "a file of a FUSE server that does not answer stops nobody when it is closed",
        by=ROOT)
def fuse_fd_whose_server_is_silent(house):
    fuse = Silent(house.dir + "/fuse", {FLUSH})
    fds = [os.open(fuse.path, os.O_RDWR) for _ in range(2)]
    fuse.quiet()
    s = greeted(house)
    pid = os.fork()  # its own close() sleeps, too
    if pid == 0:
        socket.send_fds(s, [b'{"id":1,"cmd":"nonsense"}\n'], fds[:1])
        socket.send_fds(s, [b'{"id":2,"cmd":"region.register","kind":"memfd","fd":0,'
                            b'"length":"4096"}\n'], fds[1:])
        os._exit(0)
    rest(HOLD_S)
    fuse.end()
    return None


def register_shm(house, name, wait_s=HOLD_S):
    s = greeted(house)
    s.sendall(b'{"id":1,"cmd":"region.register","kind":"shm","shm_name":"/%s",'
              b'"length":"4096"}\n' % name.encode())
    rest(wait_s)


@attack("V2", "a FIFO in /dev/shm is refused, not opened and waited for", quick=True)
def fifo_as_a_shm_name(house):
    name = "kvd-attack-" + secrets.token_hex(8)
    os.mkfifo("/dev/shm/" + name)
    os.chmod("/dev/shm/" + name, 0o444)
    try:
        register_shm(house, name)
    finally:
        # processes that wait in open() continue
        with contextlib.suppress(OSError):
            os.chmod("/dev/shm/" + name, 0o666)
            os.close(os.open("/dev/shm/" + name, os.O_RDWR | os.O_NONBLOCK))
        os.unlink("/dev/shm/" + name)


@attack("V2", "a file under a lease is not waited for on the loop", quick=True)
def lease_on_a_shm_object(house):
    name = "kvd-attack-" + secrets.token_hex(8)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open("/dev/shm/" + name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.fchmod(fd, 0o666)
    os.ftruncate(fd, 4096)
    os.close(fd)
    fd = os.open("/dev/shm/" + name, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, F_SETLEASE, fcntl.F_RDLCK)
        register_shm(house, name)
    finally:
        os.close(fd)
        os.unlink("/dev/shm/" + name)


# ---- other processes' memory ----

VICTIM = os.path.join(rig.BUILD, "attack-victim")


def vm_by_setuid(house, before):
    """A process connects, passes its connection and its memory to another, and executes a
    program of root's. `before`: the memory is registered before that."""
    if not os.path.exists(VICTIM):
        raise Skip("%s (make attack builds it)" % VICTIM)
    program = house.dir + "/victim"
    shutil.copy(VICTIM, program)
    os.chmod(program, 0o4755)
    if os.statvfs(house.dir).f_flag & os.ST_NOSUID:
        raise Skip("set-user-ID programs in %s" % house.dir)
    address = int(subprocess.run([program, "where"], capture_output=True, text=True,
                                 check=True).stdout, 16) & ~4095
    ours, theirs = socket.socketpair()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            become(MALLORY, [KVD])
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3, 0x32, -1, 0)
            control = raw(house.a.socket_path)
            memory = os.open("/proc/self/mem", os.O_RDWR)
            socket.send_fds(theirs, [b"x"], [control.fileno(), memory])
            theirs.recv(1)
            os.dup2(into, 1)
            os.execv(program, [program, "wait"])
        os._exit(1)
    os.close(into)
    _, fds, _, _ = socket.recv_fds(ours, 1, 2)

    def go():
        ours.send(b"x")
        assert os.read(out, 1) == b"r", "the program did not begin"
    become(MALLORY, [KVD])
    one = Engine.__new__(Engine)
    one.daemon, one.name, one.last, one.lock = house.a, "mallory", 0, threading.Lock()
    one.sock = socket.socket(fileno=fds[0])
    one.sock.settimeout(10)
    one.lines = one.sock.makefile("r")
    one.info = one.cmd("hello", proto=1, client="mallory")
    if not before:
        go()
    got = False
    for given in ({}, {"fd": 0}):
        with contextlib.suppress(Refused):
            one.cmd("region.register", fds=fds[1:] if given else (), kind="vm",
                    address=str(address), length=4096, **given)
            got = True
            break
    if before and not got:
        raise Skip("memory of kind vm of another user's engine")
    if before:
        go()
    if not got:
        return None
    return stolen(house, one, address)


def own_session(engine):
    return [s for s in engine.cmd("session.list")["sessions"] if "secret" in s][0]


def buffer(engine, length, seal=True):
    """(region, address, mmap) of a memfd."""
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    mem = mmap.mmap(fd, length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mem))
    region = engine.cmd("region.register", fds=[fd], kind="memfd", fd=0, length=length,
                        address=str(address))["region"]
    os.close(fd)
    return region, address, mem


def transfer(house, source, address, op):
    """An engine of b's reads or writes 4096 bytes of source's; (state, its contents)."""
    other = Engine(house.b, "mallory2")
    region, mine, mem = buffer(other, 4096)
    mem[:16] = b"written by mallo"
    own = own_session(source)
    at = other.cmd("peer.attach", endpoint=source.endpoint, session=own["epoch"],
                   secret=own["secret"])["attach"]
    local = other.prep([(mine, 4096)])["dlist"]
    remote = other.prep([(address, 4096)], peer=at)["dlist"]
    xfer = other.xfer(op, local, remote)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        state = other.cmd("xfer.state", xfer=xfer)["state"]
        if state in (0, 4):
            break
        rest(0.02)
    return state, bytes(mem)


def stolen(house, source, address):
    try:
        state, bytes_ = transfer(house, source, address, "read")
    except Refused as why:
        return None if "gone" in str(why) or "memory" in str(why) else "refused late: %s" % why
    if b"the secret of root" in bytes_:
        return "read the memory of a set-user-ID program"
    return None


@attack("V3", "memory of a set-user-ID program is not given to who executed it", by=ROOT,
        root_daemon=True)
def vm_region_of_a_setuid_program(house):
    return vm_by_setuid(house, before=False)


@attack("V3", "nor is memory that was registered before it was executed", by=ROOT,
        root_daemon=True)
def vm_region_kept_across_a_setuid_exec(house):
    return vm_by_setuid(house, before=True)


# ---- memory that is removed ----

@attack("V6", "huge pages that are taken back do not end the daemon", by=ROOT)
def hugetlb_pages_taken_back(house):
    path = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
    with contextlib.suppress(OSError):
        had = int(open(path).read())
        with open(path, "w") as f:
            f.write(str(had + 1))
    try:
        return huge_taken(house)
    finally:
        with contextlib.suppress(OSError), open(path, "w") as f:
            f.write(str(had))


def huge_taken(house):
    length, MFD_HUGETLB = 2 * MIB, 4
    try:
        fd = os.memfd_create("attack", MFD_HUGETLB | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, length)
        mem = mmap.mmap(fd, length)
        mem[0] = 1
    except OSError as why:
        raise Skip("a huge page: %s" % why)
    fcntl.fcntl(fd, 1033, 0x2)  # F_ADD_SEALS, F_SEAL_SHRINK
    pushing = Push(house)
    try:
        region = pushing.prefill.cmd("region.register", fds=[fd], kind="memfd", fd=0,
                                     length=length)["region"]
        pushing.send(0, wait=dict(kind="seq", region=region, offset=0, value="99"))
    except Refused:
        return None
    mem.close()
    if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(length)):  # PUNCH_HOLE, KEEP_SIZE
        raise Skip("to punch a hole into huge pages")
    taken = []
    with contextlib.suppress(OSError, ValueError):
        while len(taken) < 64:  # private and reserved: it is ours now
            taken.append(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
            taken[-1][0] = 1
    rest(1)
    return None


# ---- how much one may have ----

class Push:
    """A room of MALLORY's between both daemons, with nothing sent yet."""

    def __init__(self, house, room=7):
        self.prefill, self.decode = Engine(house.a, "mallory"), Engine(house.b, "mallory")
        self.src, self.dst = (Cache(e, name="m%d" % room) for e in (self.prefill, self.decode))
        self.room = room
        open_push(self.prefill, self.decode, self.src, self.dst, room, [1, 2], [1, 2], 30,
                  send=False)

    def line(self, seq, **more):
        return json.dumps(dict(id=seq, cmd="room.send", room=str(self.room), seq=seq, views={
            "kv": dict(pages=[1], tokens=[0, 1])}, **more)).encode() + b"\n"

    def send(self, seq, **more):
        self.prefill.cmd("room.send", room=str(self.room), seq=seq,
                         views={"kv": dict(pages=[1], tokens=[0, 1])}, **more)


def flood(engine, lines, batch=200):
    """All of them, many at once; how many were refused, the last refusal."""
    refused, why = 0, ""
    for at in range(0, len(lines), batch):
        some = lines[at:at + batch]
        engine.sock.sendall(b"".join(some))
        for _ in some:
            said = json.loads(engine.lines.readline())
            if "error" in said:
                refused, why = refused + 1, said["error"]["message"]
    return refused, why


@attack("V7", "an empty memfd is not filled at the daemon's expense")
def sparse_memfd_at_the_daemons_expense(house):
    engine = Engine(house.a, "mallory")
    length = 256 * MIB
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    with contextlib.suppress(Refused):
        engine.cmd("region.register", fds=[fd], kind="memfd", fd=0, length=length)
    had = os.fstat(fd).st_blocks * 512
    if had > 32 * MIB:
        return "%d MiB of a memfd that was empty" % (had // MIB)
    return None


def many_lists(engine, fd, entries, at_most):
    for n in range(at_most):
        try:
            engine.cmd("dlist.prep", fds=[fd], fd=0, count=entries)
        except Refused:
            return n
    return at_most


@attack("V7", "lists of one user are held to a sum over its sessions")
def lists_of_one_user(house):
    if not rig.PLAIN:
        raise Skip("memory is measured without sanitizers only")
    entries = 1 << 20
    begin, made = rss_mib(house.a), 0
    engines = []
    for _ in range(3):
        engine = Engine(house.a, "mallory")
        engines.append(engine)
        region, address, mem = buffer(engine, 4096)
        engines.append(mem)
        fd = os.memfd_create("list", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, struct.pack("<QQQQ", address, 1, 1, 1) * entries)
        made += many_lists(engine, fd, entries, 40)
        os.close(fd)
        if rss_mib(house.a) - begin > 2048:
            break
    grown = rss_mib(house.a) - begin
    return "%d lists, %d MiB, of %d sessions of one user" % (
        made, grown, len(engines) // 2) if grown > 1536 else None


@attack("V7", "chunks that have ended are not remembered one by one")
def chunks_without_end(house):
    if not rig.PLAIN:
        raise Skip("memory is measured without sanitizers only")
    push, begin = Push(house), rss_mib(house.a)
    total, end = 0, time.monotonic() + 8
    while time.monotonic() < end and total < 200000:
        lines = [push.line(2 * (total + n)) for n in range(2000)]
        refused, why = flood(push.prefill, lines)
        if refused == len(lines):
            break
        total += len(lines)
    grown = rss_mib(house.a) - begin
    return "%d chunks cost %d MiB" % (total, grown) if grown > 24 else None


# ---- tables ----

@attack("V8", "one user's processes do not take all sessions", by=ROOT)
def sessions_by_many_processes(house):
    def one():
        become(MALLORY, [KVD])
        with contextlib.suppress(OSError):
            kept = [greeted(house) for _ in range(2)]
            os.write(into, b"x")
            signal.pause()
            return kept
    out, into = os.pipe()
    pids = []
    for _ in range(270):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                one()
            os._exit(0)
        pids.append(pid)
    rest(1.5)
    try:
        for uid in (ALICE, 0):
            said = Forked(lambda: ask(raw(house.a.socket_path), HELLO),
                          role="alice" if uid else ROOT).result(10)
            value = said.get("value") if said else None
            if not value or "error" in value:
                return "user %d is kept out: %s" % (uid, value)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return None


@attack("V8", "daemons that do not exist take no place of those that do", by=ROOT,
        config="[peer]\npeers = 256\n")
def peers_that_do_not_exist(house):
    """Requests of an engine do not exclude daemons."""
    with House() as other:
        return crowd(house, other)


def crowd(house, other):
    sockets = []
    for i in range(6):
        s = greeted(house)
        s.sendall(b"".join(
            b'{"id":%d,"cmd":"peer.connect","endpoint":"tcp://127.77.%d.%d:9","timeout_ms":60000}\n'
            % (n + 1, i, n + 1) for n in range(80)))
        sockets.append(s)
    rest(0.5)
    said = Forked(reach_new_daemon, house, other, role="alice").result(20)
    return said["value"] if said and "value" in said else "no answer: %s" % said


def reach_new_daemon(house, other):
    """As another user: a daemon that a does not know yet. None: it answers."""
    engine = Engine(house.a, "bystander")
    try:
        engine.cmd("peer.connect", endpoint=Engine(other.a, "x").endpoint, timeout_ms=5000)
    except Refused as why:
        return "no new daemon can be reached: %s" % why
    return None


# ---- helpers ----

def register_takes(house):
    """How long an engine of another user waits until its memory is imported."""
    def one():
        begin = time.monotonic()
        buffer(Engine(house.a, "bystander"), 4096)
        return time.monotonic() - begin
    said = Forked(one, role="alice").result(8)
    return said["value"] if said and "value" in said else 8.0


@attack("V9", "long lines of one user do not delay the memory of another", by=ROOT)
def helpers_kept_busy(house):
    line = json.dumps(dict(id=1, cmd="pool.register", regions=[], layout=dict(
        rank=0, buffers=[1], views={str(i): {} for i in range(70000)})),
        separators=(",", ":")).encode() + b"\n"
    kept = []
    for _ in range(4):
        s = greeted(house)
        s.sendall(line)
        kept.append(s)
    rest(0.5)
    took = register_takes(house)
    return "another user's region.register took %.1f s" % took if took > 1 else None


@attack("V9", "memory that never comes keeps no helper from others", by=ROOT)
def vm_region_on_a_silent_file(house):
    fuse = Silent(house.dir + "/fuse", {READ})
    fuse.quiet()
    for _ in range(8):  # a process each: one that waits for a page maps no more
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                register_silent(house, fuse)
            os._exit(0)
    rest(1)
    took = register_takes(house)
    fuse.end()
    return "another user's region.register took %.1f s" % took if took > 1 else None


def register_silent(house, fuse):
    file, mine = os.open(fuse.path, os.O_RDWR), os.open("/proc/self/mem", os.O_RDWR)
    mem = mmap.mmap(file, fuse.bytes, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mem))
    socket.send_fds(greeted(house), [
        b'{"id":1,"cmd":"region.register","kind":"vm","fd":0,"address":"%d","length":"%d"}\n'
        % (address, fuse.bytes)], [mine])
    signal.pause()


# ---- work without end ----

@attack("V10", "words that are waited for cost no core")
def thousands_of_words(house):
    pushes = [Push(house, n) for n in range(1, 41)]
    refused, count = 0, 150
    for push in pushes:
        region, _, push.mem = buffer(push.prefill, 4096)
        wait = dict(kind="seq", region=region, offset=0, value="99")
        refused += flood(push.prefill, [push.line(n, wait=wait) for n in range(count)])[0]
    begin, since = cpu_s(house.a), time.monotonic()
    rest(2)
    share = (cpu_s(house.a) - begin) / (time.monotonic() - since)
    if share > 0.4:
        return "%d %% of a core for %d words" % (100 * share, count * len(pushes) - refused)
    return None


def cpu_s(daemon):
    with open("/proc/%d/stat" % daemon.proc.pid) as f:
        words = f.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


# ---- rooms of others ----

@attack("V4", "another engine of a known daemon does not read a room by its number", by=ROOT,
        keyed=True)
def room_of_another_engine_by_its_number(house):
    return room_by_number(house, house.b)


def offer_page(house, out):
    """ALICE at a: a room of number 42 that waits for its receiver."""
    prefill = Engine(house.a, "alice")
    src = Cache(prefill)
    src.fill([1, 2], 30)
    prefill.cmd("room.open", room="42", role="send", pool=src.pool,
                ticket=os.urandom(16).hex())
    os.write(out, prefill.endpoint.encode() + b"\n")
    for _ in range(100):
        if prefill.state(42, "send")[0] == WAITING:
            prefill.cmd("room.send", room="42", seq=0, last=True,
                        views={"kv": dict(pages=[1, 2], tokens=[0, 30])})
            break
        rest(0.05)
    rest(2)


def room_by_number(house, thief, role=rig.ENGINE):
    out, into = os.pipe()
    victim = Forked(offer_page, house, into, role="alice")
    os.close(into)
    endpoint = os.read(out, 200).decode().strip()
    assert endpoint, "no room: %s" % victim.result(5)
    said = Forked(read_room, thief, endpoint, role=role).result(12)
    victim.result(0.1)
    if said is None or "value" not in said:
        return None if said is None else "the thief failed: %s" % said.get("error", "")[-300:]
    return said["value"]


def read_room(thief, endpoint):
    """As a receiver with its own pages: the pages of room 42, or None."""
    decode = Engine(thief, "thief")
    dst = Cache(decode)
    try:
        decode.cmd("room.open", room="42", role="recv", pool=dst.pool,
                   sources=[dict(endpoint=endpoint, pool="kv")])
        decode.cmd("room.bind", room="42", views={"kv": dict(pages=[1, 2], tokens=[0, 30])})
        decode.until(42, "recv", SUCCESS, 6)
        dst.check([1, 2], 30)
    except (Refused, AssertionError):
        return None
    return "read the pages of another user's room by its number"


@attack("V4", "rooms asked for before they are open are not taken from their receivers", by=ROOT,
        keyed=True)
def rooms_squatted_before_they_open(house):
    out, into = os.pipe()
    squatter = Forked(squat, house, into)
    os.close(into)
    assert os.read(out, 1), "nobody squats: %s" % squatter.result(5)
    prefill, decode = Engine(house.a, "alice"), Engine(house.b, "alice")
    src, dst = Cache(prefill, name="alice"), Cache(decode, name="alice")
    try:
        open_push(prefill, decode, src, dst, 42, [1, 2], [1, 2], 30,
                  ticket=os.urandom(16).hex())
        decode.until(42, "recv", SUCCESS, 8)
    except (Refused, AssertionError) as why:
        return "a squatted room: %s" % str(why)[:200]
    finally:
        squatter.result(0.1)
    return None


def squat(house, out):
    become(MALLORY, [KVD])
    decode = Engine(house.b, "mallory")
    dst = Cache(decode, name="alice")
    endpoint = house_endpoint(house)
    for room in range(30, 60):
        decode.cmd("room.open", room=str(room), role="recv", pool=dst.pool,
                   sources=[dict(endpoint=endpoint, pool="alice")])
        decode.cmd("room.bind", room=str(room), views={
            "kv": dict(pages=[1, 2], tokens=[0, 30])})
    rest(1)
    os.write(out, b"x")
    rest(20)


@attack("V4", "nor does a daemon of another user of this host, whom nobody named", by=ROOT)
def room_read_by_a_stranger(house):
    run_dir = os.path.join(house.dir, "eve")
    os.mkdir(run_dir, 0o755)
    os.chown(run_dir, EVE, EVE)
    thief = Daemon("", run_dir=run_dir, name="eve", program=for_everyone("kvd"),
                   preexec=lambda: become(EVE))
    thief.start()
    try:
        thief.wait_ready()
        return room_by_number(house, thief, role=rig.STRANGER)
    finally:
        thief.proc.kill()
        thief.wait()


def house_endpoint(house):
    return ask(raw(house.a.socket_path), HELLO)["endpoint"]


if __name__ == "__main__":
    rig.main("engine")
