#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""No call of a daemon's main process may wait for what a stranger owns: its calls are
judged (tests/still) while it serves engines, peers and hostile descriptors. First that
each such call is found, by programs that make it."""
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys

os.environ["KVD_STILL"] = "1"  # before kvd_daemon looks
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "lib"), os.path.join(HERE, "..", "attack"), HERE]
import test_rooms  # noqa: E402
import test_xfer  # noqa: E402
from fuse import FLUSH, GETATTR, Silent  # noqa: E402
from kvd_daemon import Daemon, Skip, free_port, run, still_command, still_found  # noqa: E402
from kvd_engine import Cache, Engine, Refused  # noqa: E402

HEAD = "import os, socket, struct, sys, ctypes, fcntl\n"
# a stranger at a Unix socket, who sends a descriptor with a byte
VISITED = HEAD + """
l = socket.socket(socket.AF_UNIX); l.bind(sys.argv[1]); l.listen(); l.setblocking(False)
print(flush=True)
import select; select.select([l], [], [])
s = l.accept()[0]; s.setblocking(False)
while not any(fcntl.ioctl(s, 0x541B, bytes(4))): pass
"""
SINS = {  # what is done: in whose words it is found
    "close_of_a_lingering_socket": ("close", "it lingers", HEAD + """
l = socket.create_server(("127.0.0.1", 0)); s = socket.socket(); s.setblocking(False)
s.connect_ex(l.getsockname())
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 9)); s.close()"""),
    "receive_that_drops_descriptors": ("recvfrom", "lie in its queue", VISITED + "s.recv(1)"),
    "close_of_descriptors_unread": ("close", "lie in its queue", VISITED + "s.close()"),
    "receive_that_blocks": ("recvfrom", "it blocks", VISITED + "s.setblocking(True); s.recv(1)"),
    "open_of_a_name_in_dev_shm": ("openat", "all may write", HEAD + """
try: os.open("/dev/shm/kvd-test-no-such", os.O_RDONLY)
except OSError: pass"""),
    "open_of_leased_memory": ("openat", "a lease", HEAD + """
fd = os.memfd_create("x"); os.open("/proc/self/fd/%d" % fd, os.O_RDONLY)"""),
    "holes_of_memory_on_the_loop": ("lseek", "helpers do it", HEAD + """
fd = os.memfd_create("x"); os.lseek(fd, 0, os.SEEK_END)"""),
    "read_of_a_process": ("pread64", "a process's memory", HEAD + """
fd = os.open("/proc/self/mem", os.O_RDONLY); os.pread(fd, 1, id(fd))"""),
    "read_of_another_process": ("process_vm_readv", "", HEAD + """
v = (ctypes.c_ulong * 2)(); ctypes.CDLL(None).process_vm_readv(1, v, 1, v, 1, 0)"""),
    "wait_for_a_lock": ("flock", "LOCK_NB", HEAD + """
fcntl.flock(os.open(sys.executable, os.O_RDONLY), fcntl.LOCK_EX)"""),
    "sleep_on_the_loop": ("clock_nanosleep", "", HEAD + "ctypes.CDLL(None).usleep(1)"),
}
FUSE = HEAD + "fd = os.open(sys.argv[1], os.O_RDONLY); os.fstat(fd); os.close(fd)"


def started(code, *args, within=()):
    """A program whose calls are judged, and where its findings come from; `within`: by what
    it is run."""
    report, end = os.pipe()
    command = still_command(end, [sys.base_prefix, sys.prefix, HERE, os.getcwd(), "/root"])
    proc = subprocess.Popen([*within, *command] + [sys.executable, "-S", "-c", code] + list(args),
                            pass_fds=[end], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(end)
    return proc, report


def ended(proc, report):
    told = proc.communicate()[1].decode()
    found = still_found(report, sys.executable)
    if proc.returncode == 77:
        raise Skip(told.strip())
    assert proc.returncode == 0, told
    return found


def visit(proc, path):
    """Until it listens, and then a descriptor."""
    assert proc.stdout.readline(), proc.communicate()[1].decode()
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        with open(os.devnull) as null:
            socket.send_fds(s, [b"x"], [null.fileno()])
        proc.wait()


def blocking_calls_are_found():
    for name, (call, why, code) in SINS.items():
        path = "\0kvd-test-still-%d-%s" % (os.getpid(), name)
        proc, report = started(code.replace("sys.argv[1]", "'\\0'+sys.argv[1]"), path[1:])
        if VISITED in code:
            visit(proc, path)
        found = ended(proc, report)
        assert any(line.startswith(call + "(") and why in line for line in found.split("\n")), \
            "%s: found only: %s" % (name, found)


def nonblocking_calls_are_not_reported():
    code = VISITED + "s.recv(1, socket.MSG_PEEK); fd = os.memfd_create('x'); os.fstat(fd);" \
        "os.close(fd); os._exit(0)"
    path = "\0kvd-test-still-%d" % os.getpid()
    proc, report = started(code.replace("sys.argv[1]", "'\\0'+sys.argv[1]"), path[1:])
    visit(proc, path)
    found = ended(proc, report)
    assert not found, found


def process_without_proc_is_not_judged():
    """In a PID namespace whose /proc is another's: the program runs, and the log says so."""
    unshare = ("unshare", "--pid", "--fork")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        raise Skip("a PID namespace (CAP_SYS_ADMIN)")
    proc, report = started(SINS["sleep_on_the_loop"][2] + "; print('ran')", within=unshare)
    said, told = proc.communicate()
    assert (said, proc.returncode) == (b"ran\n", 0), told
    assert b"nothing is judged" in told and not still_found(report, sys.executable)


def in_a_process_of_its_own(case):
    """For what changes this one: its mounts."""
    pid = os.fork()
    if pid == 0:
        try:
            case()
            os._exit(0)
        except Skip as why:
            print(why, flush=True)
            os._exit(77)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 77:
        raise Skip("/dev/fuse and a mount namespace (CAP_SYS_ADMIN)")
    assert status == 0


def file_of_foreign_file_system_is_found():
    def case():
        folder = "/tmp/kvd-test-still-%d" % os.getpid()
        with contextlib.closing(Fuse(folder, ())) as silent:
            found = ended(*started(FUSE, silent.path))
        for call in ("openat(", "stat", "close("):
            assert call in found, "%s not in: %s" % (call, found)
    in_a_process_of_its_own(case)


class Fuse(Silent):
    def close(self):
        self.end()
        ctypes.CDLL(None).umount2(os.path.dirname(self.path).encode(), 2)
        os.rmdir(os.path.dirname(self.path))


def odd_fds():
    """Whose close, or any look, may wait."""
    yield os.pipe()[0]
    yield os.eventfd(1)
    yield os.open("/dev/zero", os.O_RDWR)
    yield os.open("/", os.O_RDONLY)
    yield os.pidfd_open(os.getpid())
    yield os.open("/proc/self/mem", os.O_RDWR)
    yield os.open("/proc/self/statm", os.O_RDONLY)
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [near.fileno()])
    yield far.detach()
    listener = socket.create_server(("127.0.0.1", 0))
    lingers = socket.create_connection(listener.getsockname())
    lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))
    yield lingers.detach()
    leased = os.memfd_create("leased", os.MFD_ALLOW_SEALING)
    os.ftruncate(leased, 4096)
    os.pwrite(leased, bytes(4096), 0)
    with contextlib.suppress(OSError):
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    yield leased


def shm_sockets(daemon):
    with open("/proc/net/unix") as known:
        names = {line.split()[-1] for line in known if "kvd-shm-" in line}
    return ["\0" + n[1:] for n in names] + [daemon.run_dir + "/kvd.shm"]


def hostile(daemon):
    fds = list(odd_fds())
    for fd in fds:
        engine = Engine(daemon, "odd")
        for kind in ("memfd", "vm", "dmabuf", "shm"):
            more = {"address": "4096"} if kind == "vm" else {}
            with contextlib.suppress(Refused):
                engine.cmd("region.register", fds=[fd], kind=kind, fd=0, length=4096, **more)
        with contextlib.suppress(Refused):
            engine.cmd("region.register", fds=[fd], kind="shm", shm_name="/none", length=4096,
                       statm=0)
        with contextlib.suppress(Refused):
            engine.cmd("dlist.prep", fds=[fd], fd=0, count=2)
        socket.send_fds(engine.sock, [b'{"nonsense'], [fd])  # never read as a line
        engine.close()
        for name in shm_sockets(daemon):
            with socket.socket(socket.AF_UNIX) as s, contextlib.suppress(OSError):
                s.connect(name)
                socket.send_fds(s, [b"x" * 100], [fd])
        os.close(fd)
    Engine(daemon, "after").cmd("ping")


def descriptors_of_every_kind():
    with Daemon("[transport]\ntransports = shm\n") as daemon:
        daemon.expect("gate")
        hostile(daemon)


def files_of_a_silent_file_system():
    def case():
        folder = "/tmp/kvd-test-still-%d" % os.getpid()
        with Daemon() as daemon:
            daemon.expect("receives descriptors")
            with contextlib.closing(Fuse(folder, (FLUSH, GETATTR))) as silent:
                fd = os.open(silent.path, os.O_RDWR)
                engine = Engine(daemon, "fuse")
                silent.quiet()
                with contextlib.suppress(Refused, OSError, ValueError):
                    engine.cmd("region.register", fds=[fd], kind="memfd", fd=0, length=4096)
                Engine(daemon, "after").cmd("ping")
            with contextlib.suppress(OSError):  # its server has ended
                os.close(fd)
    in_a_process_of_its_own(case)


def names_in_dev_shm():
    name = "kvd-test-still-%d" % os.getpid()
    os.mkfifo("/dev/shm/" + name, 0o444)
    try:
        with Daemon() as daemon:
            engine = Engine(daemon, "fifo")
            engine.refused("EIMPORT", "region.register", kind="shm", shm_name="/" + name,
                           length=4096)
            Cache(engine, "shm")
    finally:
        os.unlink("/dev/shm/" + name)


def reload_commands_and_metrics():
    text = "[metrics]\nmetrics_listen = tcp://127.0.0.1:%d\n" % free_port()
    with Daemon(text) as daemon:
        engine = Engine(daemon, "all")
        Cache(engine)
        for name in ("ping", "stats", "health", "config.show", "session.list", "peer.list",
                     "room.list", "config.reload"):
            with contextlib.suppress(Refused):
                engine.cmd(name)
        gone = Engine(daemon, "gone")
        Cache(gone)
        gone.close()


run([blocking_calls_are_found, nonblocking_calls_are_not_reported,
     process_without_proc_is_not_judged, file_of_foreign_file_system_is_found,
     descriptors_of_every_kind, files_of_a_silent_file_system, names_in_dev_shm,
     reload_commands_and_metrics,
     test_rooms.shm_memfd_push_and_pull, test_rooms.shm_posix_shm_push_and_pull,
     test_rooms.shm_vm_push_and_pull, test_rooms.tcp_memfd_push_and_pull,
     test_rooms.engine_killed_fails_the_other_side_and_is_unmapped,
     test_rooms.curve_peers_on_the_list_connect_and_others_do_not,
     test_xfer.shm_memfd_write_and_read, test_xfer.tcp_vm_and_shm_write_and_read,
     test_xfer.ucx_memfd_write_and_read, test_xfer.long_list_by_memfd])
