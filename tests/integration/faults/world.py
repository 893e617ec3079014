# SPDX-License-Identifier: Apache-2.0
"""Where faults happen: three real daemons, each in a network namespace of its own
behind a router (as root; else all on loopback), engines as processes of their own
(engine.c), and the ways to hurt them.

Everything waits on lines that engines print, or on /proc, with a deadline.
"""
import collections
import contextlib
import ctypes
import functools
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import kvd_engine as control  # noqa: E402
from kvd_daemon import BUILD, STALLS, Daemon, free_port, kvd  # noqa: E402
import stalls  # noqa: E402

SLOW = 1 if os.path.basename(BUILD) == "rel" else 5
DEADLINE_S = 30 * SLOW
LATE_S = 0.02
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
NEVER = dict(state=-1, aborting=False, error="", retryable=False, bytes=0, wrong=0, t=0, late=0)
CONFIG = """[daemon]
log_level = %s
drain_timeout = 500 ms
[peer]
listen = tcp://%s:%d
insecure = yes
[rooms]
fence_timeout = 1 s
%s[transport]
transports = %s
"""
LIBC = ctypes.CDLL(None, use_errno=True)


class Wrong(Exception):
    """What was seen is not what must be."""


@functools.cache
def may_mount():
    """The mount namespace that some faults need, or why not."""
    if os.geteuid():
        return "a mount namespace needs root"
    return missing("no mounts of our own", "--mount", "mount -t tmpfs faults /tmp")


@functools.cache
def may_partition():
    """The namespaces that the link's faults need, or why not."""
    if os.geteuid():
        return "network namespaces need root"
    return missing("no policy routing", "--net", "ip rule add from 10.77.1.2 to 10.77.2.2 "
                   "blackhole") or \
        missing("no sysfs of our own", "--net", "unshare --mount mount -t sysfs faults /sys")


def missing(what, namespace, command):
    done = subprocess.run(["unshare", namespace, "sh", "-c", command], capture_output=True,
                          text=True)
    return "" if done.returncode == 0 else "%s: %s" % (what, done.stderr.strip())


def transports():
    """What the daemon can do between two hosts or two processes of one."""
    words = kvd("--version")[1].split()
    return [t for t in ("shm", "ucx", "tcp") if t in words]


def mounts_of_our_own():
    """What is mounted from here on is seen by our children only, and goes with us."""
    new_namespace, recursive_private = 0x20000, 0x4000 | 1 << 18
    if LIBC.unshare(new_namespace) or \
            LIBC.mount(b"none", b"/", None, recursive_private, None):
        raise OSError(ctypes.get_errno(), "a mount namespace")


def die_with_parent():
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# ---- the network -----------------------------------------------------------

class Net:
    """A router and `count` hosts. Cutting is dropping in the router: silence."""

    def __init__(self, count, real):
        self.real, self.count = real, count
        self.holders = []
        if not real:
            self.ports = [free_port() for _ in range(count)]
            return
        self.holders = [self.hold() for _ in range(count + 1)]
        self.router = self.holders[count].pid
        lines = ["link set lo up"]
        for i in range(count):
            lines += ["link add r%d type veth peer name e0 netns %d" % (i, self.holders[i].pid),
                      "address add 10.77.%d.1/24 dev r%d" % (i, i), "link set r%d up" % i]
        self.ip(self.router, lines)
        self.inside(self.router, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        for i in range(count):
            self.ip(self.holders[i].pid,
                    ["link set lo up", "address add 10.77.%d.2/24 dev e0" % i,
                     "link set e0 up", "route add default via 10.77.%d.1" % i])
        end = time.monotonic() + DEADLINE_S
        while not all(self.running(h.pid) for h in self.holders[:count]):
            if time.monotonic() > end:
                raise RuntimeError("a veth does not come up")

    def running(self, pid):
        """The kernel says so up to a second late; libucp takes only what is."""
        done = subprocess.run(["nsenter", "--net=/proc/%d/ns/net" % pid, "ip", "-o", "link",
                               "show", "e0"], capture_output=True, text=True, check=True)
        return "state UP" in done.stdout

    @staticmethod
    def hold():
        proc = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, preexec_fn=die_with_parent)
        proc.stdin.write(b"there\n")
        proc.stdin.flush()
        if proc.stdout.readline() != b"there\n":
            raise RuntimeError("no network namespace")
        return proc

    @staticmethod
    def inside(pid, command, text=None):
        subprocess.run(["nsenter", "--net=/proc/%d/ns/net" % pid, "--"] + command, input=text,
                       text=True, check=True, timeout=DEADLINE_S)

    def ip(self, pid, lines):
        self.inside(pid, ["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def wrapper(self, i):
        if not self.real:
            return []
        # with a /sys of its own: libucp looks for the interface there
        return ["nsenter", "--net=/proc/%d/ns/net" % self.holders[i].pid, "--", "unshare",
                "--mount", "--", "sh", "-c", 'mount -t sysfs faults /sys && exec "$@"', "sh"]

    def address(self, i):
        return ("10.77.%d.2" % i, 7400) if self.real else ("127.0.0.1", self.ports[i])

    def cut(self, pairs):
        self.ip(self.router, ["rule add from 10.77.%d.2 to 10.77.%d.2 blackhole" % p
                              for p in pairs])

    def heal(self, pairs):
        self.ip(self.router, ["rule del from 10.77.%d.2 to 10.77.%d.2 blackhole" % p
                              for p in pairs])

    def reset(self, i, j):
        """The kernel ends i's connections with j at once: RST. What it ended."""
        return subprocess.run(["nsenter", "--net=/proc/%d/ns/net" % self.holders[i].pid, "--",
                               "ss", "-HKtn", "dst", self.address(j)[0]], check=True,
                              timeout=DEADLINE_S, capture_output=True, text=True).stdout

    def close(self):
        for holder in self.holders:
            holder.stdin.close()
            holder.stdout.close()
            holder.kill()
            holder.wait()


# ---- a daemon --------------------------------------------------------------

class Process:
    """What has a pid and is `alive`."""

    def cpu_s(self):
        with open("/proc/%d/stat" % self.pid) as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def waits(self):
        """How long each thread was ready, and no core was free for it, in seconds."""
        found, folder = {}, "/proc/%d/task" % self.pid
        with contextlib.suppress(OSError):
            for tid in os.listdir(folder):
                with open("%s/%s/schedstat" % (folder, tid)) as one:
                    found[int(tid)] = int(one.read().split()[1]) / 1e9
        return found

    def limit(self, what, value):
        """Lower a soft limit of the running process; undone by the function returned."""
        old = resource.prlimit(self.pid, what)
        resource.prlimit(self.pid, what, (value, old[1]))
        return lambda: self.alive and resource.prlimit(self.pid, what, old)

    def no_more_fds(self):
        used = max(int(n) for n in os.listdir("/proc/%d/fd" % self.pid))
        return self.limit(resource.RLIMIT_NOFILE, used + 1)

    def no_more_memory(self):
        with open("/proc/%d/statm" % self.pid) as statm:
            pages = int(statm.read().split()[0])
        return self.limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE"))


class Node(Process):
    def __init__(self, net, index, folder, log_level, rooms, transport):
        self.net, self.index, self.name = net, index, "ABC"[index]
        self.dir = os.path.join(folder, self.name)
        host, port = net.address(index)
        self.endpoint = "tcp://%s:%d" % (host, port)
        self.config = lambda transport: CONFIG % (log_level, host, port, rooms, transport)
        self.daemon = Daemon(self.config(transport), run_dir=folder, name=self.name,
                             wrapper=net.wrapper(index), preexec=die_with_parent,
                             log_dir=self.dir, patient=False)
        self.old_logs = ""
        self.begin()

    def begin(self):
        self.daemon.start().wait_ready()
        asked = control.Engine(self.daemon, "who")
        self.instance = asked.info["instance"]
        asked.close()

    @property
    def pid(self):
        return self.daemon.proc.pid

    @property
    def alive(self):
        return self.daemon.proc.poll() is None

    def signal(self, number):
        os.kill(self.pid, number)

    def restart(self, transport=None):
        """It is gone: again, at the same endpoint, in the same directory."""
        if transport:
            self.daemon.write_config(self.config(transport))
        self.old_logs = (self.old_logs + self.log())[-200000:]
        self.daemon.notify.close()
        self.begin()

    def log(self):
        return self.daemon.log()

    def bad_line(self):
        """The first of its log that tells of an error, its own or a sanitizer's."""
        return next((line for line in (self.old_logs + self.log()).splitlines()
                     if re.match("<[0-3]>", line) or "Sanitizer" in line or
                     "runtime error" in line), None)

    def open_files(self):
        """What its descriptors are, as in /proc, and how many of each."""
        kinds = collections.Counter()
        for fd in os.listdir("/proc/%d/fd" % self.pid):
            with contextlib.suppress(FileNotFoundError):
                kinds[re.sub("[0-9]+", "N", os.readlink("/proc/%d/fd/%s" % (self.pid, fd)))] += 1
        return dict(kinds)

    def figures(self):
        """RSS in KiB (own, shared), descriptors, threads."""
        with open("/proc/%d/status" % self.pid) as status:
            lines = dict(line.split(":", 1) for line in status)
        return dict(anon=int(lines["RssAnon"].split()[0]),
                    shmem=int(lines["RssShmem"].split()[0]),
                    fds=len(os.listdir("/proc/%d/fd" % self.pid)),
                    threads=int(lines["Threads"]))

    def disk_full(self):
        path = os.path.join(self.dir, "ballast")
        with open(path, "wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(bytes(4096))
        return lambda: os.unlink(path)

    def close(self):
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGKILL)
        self.daemon.wait()
        self.daemon.notify.close()
        self.daemon.log_file.close()


def memory_gone_ns(pid):
    """When the kernel has taken a killed process's memory (it may not be dead yet)."""
    end = time.monotonic() + DEADLINE_S
    with open("/proc/%d/statm" % pid) as statm:
        while time.monotonic() < end:
            statm.seek(0)
            with contextlib.suppress(ProcessLookupError):
                if not statm.read().startswith("0 "):
                    continue
            return time.monotonic_ns()
    raise Wrong("the memory of %d does not go" % pid)


# ---- an engine -------------------------------------------------------------

class Engine(Process):
    """A faults-engine. Its rooms' histories are in `rooms`, last state last."""

    def __init__(self, world, node, name, pool, pages):
        self.world, self.node, self.name, self.pool, self.pages = world, node, name, pool, pages
        self.proc = subprocess.Popen(
            [BUILD + "/faults-engine", node.daemon.socket_path, name, pool, str(pages)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=die_with_parent)
        os.set_blocking(self.proc.stdout.fileno(), False)
        self.rooms, self.answers, self.sessions = {}, {}, []
        self.last, self.buffer, self.stopped, self.next_page = 0, b"", False, 0
        world.engines.append(self)

    @property
    def pid(self):
        return self.proc.pid

    @property
    def alive(self):
        return self.proc.poll() is None

    @property
    def lost(self):
        return not self.sessions or self.sessions[-1]["lost"]

    def ready(self):
        self.world.until(lambda: self.sessions or self.proc.poll() is not None,
                         "%s does not start" % self.name)
        if not self.sessions:
            raise Wrong("%s did not start: %s" % (self.name, self.proc.stderr.read().decode()))
        return self

    def take(self):
        """Lines it printed; False at its end."""
        try:
            data = os.read(self.proc.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        lines = (self.buffer + data).split(b"\n")
        self.buffer = lines.pop()
        for line in lines:
            message = json.loads(line)
            event = message.get("event")
            if event == "room":
                key = message["room"], message["role"]
                self.rooms.setdefault(key, []).append(message)
            elif event == "session":
                self.sessions.append(message)
            else:
                self.answers[message["id"]] = message
        return bool(data)

    def ask(self, verb, *args):
        self.last += 1
        line = " ".join(str(a) for a in (verb, self.last) + args) + "\n"
        with contextlib.suppress(BrokenPipeError):
            self.proc.stdin.write(line.encode())
            self.proc.stdin.flush()
        return self.last

    def answer(self, ident, deadline_s=DEADLINE_S):
        self.world.until(lambda: ident in self.answers,
                         "%s does not answer" % self.name, deadline_s)
        return self.answers.pop(ident)

    def do(self, verb, *args):
        answer = self.answer(self.ask(verb, *args))
        if answer["result"] != "OK":
            raise Wrong("%s: %s %s: %s: %s" % (self.name, verb, " ".join(map(str, args)),
                                               answer["result"], answer["words"]))
        return answer

    def cmd(self, name, **args):
        return self.do("cmd", name, json.dumps(args))["reply"]

    def signal(self, number):
        os.kill(self.pid, number)
        self.stopped = number == signal.SIGSTOP

    def pages_for(self, count):
        """A base for so many room pages: round and round through the pool."""
        if self.next_page + 2 * count > self.pages:
            self.next_page = 0
        base = self.next_page
        self.next_page += 2 * count
        return base

    def end(self):
        if self.proc.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGKILL)
        self.reap()

    def reap(self):
        self.proc.wait(DEADLINE_S)
        for pipe in (self.proc.stdin, self.proc.stdout, self.proc.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self in self.world.engines:
            self.world.engines.remove(self)

    def leave(self):
        """The graceful way."""
        self.ask("bye")
        self.reap()


class Side:
    """One side of a room."""

    def __init__(self, engine, number, role, count, source=None, receivers=0):
        self.engine, self.number, self.role, self.count = engine, number, role, count
        self.source, self.receivers = source, receivers
        self.opened = False

    def __str__(self):
        return "%s of %s" % (self.role, self.engine.name)

    @property
    def key(self):
        return self.number, self.role

    @property
    def history(self):
        return self.engine.rooms.get(self.key, [])

    @property
    def now(self):
        return self.history[-1] if self.history else NEVER

    @property
    def state(self):
        return self.now["state"]

    @property
    def ended(self):
        return self.state in (FAILED, SUCCESS)

    def open(self, word=0):
        self.engine.rooms.pop(self.key, None)
        endpoint, pool = "-", "-"
        if self.source:
            endpoint, pool = self.source.node.endpoint, self.source.pool
        self.engine.do("open", self.number, self.role, self.engine.pages_for(self.count),
                       self.count, self.receivers, word, endpoint, pool)
        self.opened = True

    def bind(self, word=0):
        self.engine.do("bind", self.number, "recv", word)

    def send(self, seq, begin, end, last, word=0):
        self.engine.do("send", self.number, "send", seq, begin, end, int(last), word)

    def until(self, state, deadline_s=DEADLINE_S):
        self.engine.world.until(lambda: self.state == state or self.ended,
                                "%s: %s instead of %d" % (self, self.now, state), deadline_s)
        if self.state != state:
            raise Wrong("%s: state %d instead of %d: %s" %
                        (self, self.state, state, self.words() or self.now))

    def show(self):
        return self.engine.cmd("room.show", room=str(self.number), role=self.role)

    def words(self):
        """Code and message of its end, as far as anyone can tell."""
        if self.now["error"] in ("", "EDEAD", "ELOST"):
            return self.now["error"]
        ident = self.engine.ask("cmd", "room.show",
                                json.dumps(dict(room=str(self.number), role=self.role)))
        answer = self.engine.answer(ident)
        if answer["result"] != "OK":
            return self.now["error"]
        error = answer["reply"].get("error") or dict(code="", message="")
        return "%s: %s" % (error["code"], error["message"])

    def still(self, ms):
        """Nothing was written since its end; nothing beside it ever."""
        found = self.engine.do("still", self.number, self.role, ms)
        if found["written"]:
            raise Wrong("%s: %d pages were written after its end" % (self, found["written"]))
        if found["strayed"]:
            raise Wrong("%s: %d canary pages were written" % (self, found["strayed"]))
        if not found["sticky"]:
            raise Wrong("%s: a terminal state changed: %s" % (self, self.history))
        if self.now["wrong"]:
            raise Wrong("%s: success with %d wrong pages" % (self, self.now["wrong"]))

    def close(self):
        self.engine.do("close", self.number, self.role)
        self.opened = False


# ---- all of it -------------------------------------------------------------

class World:
    """Three daemons A, B, C of one transport, and engines on them."""

    def __init__(self, transport, partition=True, count=3, more="", log_level="info"):
        """`transport`: of all, or a list of each one's. `more`: options of section [rooms],
        or what makes them of the net."""
        self.transport, self.engines, self.number = transport, [], 0
        self.folder = tempfile.mkdtemp(prefix="kvd-faults-")
        self.net, self.nodes, self.mounted = None, [], []
        self.late_s = 0  # by how much the machine woke us too late, in sum
        self.waited, self.since = {}, time.time()
        try:
            self.begin(partition, count, log_level, more)
        except BaseException:
            self.close()
            raise

    def begin(self, partition, count, log_level, more):
        each = self.transport
        each = [each] * count if isinstance(each, str) else each
        for i in range(count):  # before any daemon takes a copy of what is mounted
            folder = os.path.join(self.folder, "ABC"[i])
            os.mkdir(folder)
            if not may_mount():
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "faults", folder],
                               check=True)
                self.mounted.append(folder)
        self.net = Net(count, partition)
        for i in range(count):
            self.nodes.append(Node(self.net, i, self.folder, log_level,
                                   more(self.net) if callable(more) else more, each[i]))

    def new_number(self):
        self.number += 1
        return self.number

    def engine(self, node, name, pool, pages):
        return Engine(self, self.nodes[node], name, pool, pages).ready()

    def pump(self, wait_s):
        fds = {e.proc.stdout.fileno(): e for e in self.engines if not e.proc.stdout.closed}
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        begin = time.monotonic()
        ready = poller.poll(max(0, wait_s) * 1000)
        self.late_s += max(0, time.monotonic() - begin - max(0, wait_s) - LATE_S)
        for fd, _ in ready:
            if not fds[fd].take():
                self.engines.remove(fds[fd])  # no more lines from it

    def waits(self):
        return {key: s for p in self.nodes + self.engines for key, s in p.waits().items()}

    def time_begins(self):
        self.late_s, self.waited, self.since = 0, self.waits(), time.time()

    def late(self):
        """How late the machine was since then, for us, their threads in sum (what one learns
        goes through several) or a core."""
        return max(self.late_s, stalls.worst(STALLS, self.since),
                   sum(s - self.waited.get(key, 0) for key, s in self.waits().items()))

    def until(self, holds, what, deadline_s=DEADLINE_S):
        end = time.monotonic() + deadline_s
        while not holds():
            left = end - time.monotonic()
            if left <= 0:
                raise Wrong(what() if callable(what) else what)
            self.pump(min(left, 0.05))

    def pass_time(self, until_ns):
        """Time is what is waited for; lines are read meanwhile."""
        while time.monotonic_ns() < until_ns:
            self.pump((until_ns - time.monotonic_ns()) / 1e9)

    def logs(self):
        return "".join("---- %s\n%s" % (n.name, n.old_logs + n.log()) for n in self.nodes)

    def close(self):
        for engine in list(self.engines):
            engine.end()
        for node in self.nodes:
            node.close()
        if self.net:
            self.net.close()
        for folder in self.mounted:
            subprocess.run(["umount", "-l", folder], check=False)
        subprocess.run(["rm", "-rf", self.folder], check=False)
