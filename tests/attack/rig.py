# SPDX-License-Identifier: Apache-2.0
"""Attacks on real daemons: who attacks, who stands beside, what is a verdict.

    @attack("V1", "a line of what must hold", by=ENGINE)
    def name(house):
        ...          # in a process of that user; `return "what was seen"`: it worked

Each attack gets a house of its own: two daemons of a user of theirs, and a bystander, an
engine of another user, which pings both and hands rooms from one to the other all the
while. An attack holds when it says nothing, the bystander lost no room and waited for no
ping for longer than STOPPED_S, and both daemons end on SIGTERM with status 0 afterwards.
`make attack` asks for a p99 of the pings under P99_S, too: thrice, if need be, and only
where the daemon that is not attacked answers in time.

Names in open.txt are known to work: they are reported as open and fail nothing.
"""
import array
import contextlib
import encodings.idna  # noqa: F401 (other users may not read where Python is)
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
from kvd_daemon import BUILD, Daemon, Skip, for_everyone, free_port, need_fds, need_users  # noqa: E402,F401
from kvd_engine import Engine, Refused  # noqa: E402,F401
from bystander import (ALICE, EVE, KVD, MALLORY, P99_S, Bystander, Process,  # noqa: E402
                       become, libc)  # noqa: E402

ROOT, ENGINE, STRANGER = "root", "engine", "stranger"
STOPPED_S, LIMIT_S, END_S = 1.0, 60, 20
MIB = 1 << 20
OPEN = os.path.join(HERE, "open.txt")
PLAIN = os.path.basename(BUILD) == "rel"  # sanitizers need more memory
attacks = []


class Attack:
    def __init__(self, run, cause, claim, by, options):
        self.run, self.name, self.cause, self.claim = run, run.__name__, cause, claim
        self.by, self.options = by, options
        self.quick = options.pop("quick", False)


def attack(cause, claim, by=ENGINE, **options):
    """quick: of `make test`, too. config, root_daemon, keyed, one: see House."""
    def add(run):
        attacks.append(Attack(run, cause, claim, by, options))
        return run
    return add


def rest(seconds):
    select.select([], [], [], seconds)


def become_role(role):
    if role == ENGINE:
        become(MALLORY, [KVD])
    elif role == "alice":
        become(ALICE, [KVD])
    elif role == STRANGER:
        become(EVE)


class Forked:
    """A function in a process of another user. Its value, or error, is result()."""

    def __init__(self, run, *args, role=ROOT):
        self.read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            said = {}
            try:
                os.setsid()
                while Process.stops:
                    os.close(Process.stops.pop())
                os.close(self.read)
                become_role(role)
                libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # dropped with the change of user
                said["value"] = run(*args)
            except Skip as why:
                said["skip"] = str(why)
            except BaseException:
                said["error"] = traceback.format_exc()
            with contextlib.suppress(OSError):
                os.write(write, json.dumps(said).encode() + b"\n")
            os._exit(0)
        os.close(write)

    def result(self, seconds):
        """Its output in that time; None: nothing. Its process group has ended."""
        text, end = b"", time.monotonic() + seconds
        while not text.endswith(b"\n"):  # its end may be missing: it may have children
            if not select.select([self.read], [], [], max(0, end - time.monotonic()))[0]:
                break
            some = os.read(self.read, 65536)
            if not some:
                break
            text += some
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while time.monotonic() < end and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            rest(0.01)
        os.close(self.read)
        return json.loads(text) if text.endswith(b"\n") else None


class House:
    """The two daemons. config: of both; root_daemon: of root; keyed: with CURVE keys, and
    one that they allow for the attacker (mallory.key, mallory.pub). nofile: so many
    descriptors are theirs. stores: a asks b for chunks."""

    def __init__(self, config="", root_daemon=False, keyed=False, nofile=0, stores=False):
        self.tmp = tempfile.TemporaryDirectory(prefix="kvd-attack-")
        self.dir = self.tmp.name
        os.chmod(self.dir, 0o755)
        self.uid = 0 if root_daemon else KVD
        self.keyed, self.nofile, self.daemons, self.ends = keyed, nofile, [], []
        self.keys = {}
        program = for_everyone("kvd")
        endpoint = "tcp://127.0.0.1:%d" % free_port() if stores else ""
        self.more = {"a": "[chunks]\nchunk_peers = %s\n" % endpoint,
                     "b": "[peer]\nlisten = %s\n" % endpoint} if stores else {}
        if keyed:
            self.make_keys()
        for name in ("a", "b"):
            run_dir = os.path.join(self.dir, name)
            os.mkdir(run_dir, 0o755)
            os.chown(run_dir, self.uid, KVD)
            text = config.replace("[peer]\n", "[peer]\n" + self.key_lines(name), 1) \
                if "[peer]\n" in config else config + "\n[peer]\n" + self.key_lines(name)
            text = text.replace(":PORT", ":%d" % free_port())
            for lines in [self.more[name]] if name in self.more else []:
                head = lines.partition("\n")[0] + "\n"
                text = text.replace(head, lines, 1)
            if "socket_group" not in text:
                text = text.replace("[control]\n", "[control]\n" + self.group_line(), 1) \
                    if "[control]\n" in text else text + "\n[control]\n" + self.group_line()
            self.daemons.append(Daemon(text, run_dir=run_dir, name=name, program=program,
                                       preexec=self.become_daemon))
        self.a, self.b = self.daemons

    def group_line(self):
        return "socket_group = %d\n" % KVD if self.uid == 0 else ""

    def make_keys(self):
        for name in ("a", "b", "mallory"):
            path = os.path.join(self.dir, name + ".key")
            done = subprocess.run([BUILD + "/kvd-ctl", "keygen", path], check=True,
                                  capture_output=True, text=True)
            self.keys[name] = re.findall(r"[^\s]{40}", done.stdout)[-1]
            os.chown(path, MALLORY if name == "mallory" else self.uid, KVD)
        with open(os.path.join(self.dir, "peers"), "w") as out:
            for name, key in self.keys.items():
                out.write("%s %s\n" % (name, key))

    def key_lines(self, name):
        if not self.keyed:
            return ""
        return "curve_secret_file = %s/%s.key\ncurve_allow_file = %s/peers\n" % (
            self.dir, name, self.dir)

    def become_daemon(self):
        os.umask(0o022)
        if self.nofile:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.nofile, self.nofile))
        if self.uid:
            become(self.uid)

    def __enter__(self):
        try:
            for d in self.daemons:
                d.start()
            for d in self.daemons:
                d.wait_ready()
            self.endpoints = {d.name: Engine(d, "rig").endpoint for d in self.daemons}
            self.ports = {d.name: tcp_ports(d.proc.pid) for d in self.daemons}
            self.shm = {d.name: shm_names(d.proc.pid) for d in self.daemons}
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def end(self):
        """Ends both; returns the faults as text."""
        wrong = []
        for d in self.daemons:
            status = d.proc.poll()
            if status is not None:
                wrong.append("daemon %s had ended with %d" % (d.name, status))
                continue
            d.proc.send_signal(signal.SIGTERM)
        for d in self.daemons:
            try:
                status = d.proc.wait(END_S)
                if status != 0 and not wrong:
                    wrong.append("SIGTERM ends %s with %d" % (d.name, status))
            except subprocess.TimeoutExpired:
                wrong.append("SIGTERM does not end %s" % d.name)
            if "ERROR: AddressSanitizer" in d.log() or "runtime error:" in d.log():
                wrong.append("a sanitizer's report of %s" % d.name)
        return wrong

    def __exit__(self, *exc):
        for d in self.daemons:
            if d.proc and d.proc.poll() is None:
                d.proc.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    d.proc.wait(5)
            with contextlib.suppress(AttributeError, OSError):
                d.notify.close()
        with contextlib.suppress(OSError):
            self.tmp.cleanup()


def socket_inodes(pid):
    inodes = set()
    for fd in os.listdir("/proc/%d/fd" % pid):
        with contextlib.suppress(OSError):
            to = os.readlink("/proc/%d/fd/%s" % (pid, fd))
            if to.startswith("socket:["):
                inodes.add(to[8:-1])
    return inodes


def shm_names(pid):
    """The daemon's own listeners for other daemons, as everybody reads them there."""
    mine = socket_inodes(pid)
    names = []
    with open("/proc/net/unix") as lines:
        for line in lines:
            words = line.split()
            if len(words) == 8 and words[6] in mine and "shm" in words[7]:
                names.append(words[7].replace("@", "\0", 1))
    return names


def listening(house):
    """TCP ports of a, in order; taken from /proc before the attacker loses root's view."""
    return house.ports["a"]


def tcp_ports(pid):
    mine, ports = socket_inodes(pid), []
    with open("/proc/net/tcp") as lines:
        for line in list(lines)[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in mine:
                ports.append(int(words[1].split(":")[1], 16))
    return sorted(ports)


def status_kib(pid, name):
    with open("/proc/%d/status" % pid) as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name + ":"))


def rss_mib(daemon):
    return status_kib(daemon.proc.pid, "VmRSS") / 1024


def grown_mib(daemon, work, seconds=0):
    """Maximum growth of its memory during work() and until the check after it."""
    begin = rss_mib(daemon)
    work()
    most, end = rss_mib(daemon), time.monotonic() + seconds
    while time.monotonic() < end:
        rest(0.05)
        most = max(most, rss_mib(daemon))
    return most - begin


class Lingering:
    """TCP sockets whose close() blocks for `seconds` while this object lives: unsent bytes and
    a peer that does not read. send() passes one over a Unix socket with `line`. A process does
    that, closes the socket and ends: where the receiver was faster, its own end blocks, and not
    the receiver's close()."""

    def __init__(self, seconds=1 << 30):
        self.linger = (1).to_bytes(4, "little") + seconds.to_bytes(4, "little")
        self.door = socket.socket()
        self.door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.door.bind(("127.0.0.1", 0))
        self.door.listen(16)
        self.door.settimeout(5)
        self.others, self.children = [], []

    def open(self):
        one = socket.create_connection(self.door.getsockname())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, self.linger)
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(bytes(65536))
        return one

    def send(self, to, line, count=1, nested=False):
        """to: a connection, or a path to connect to. nested: in the queue of a Unix socket,
        which is passed instead."""
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                fds = [self.open().detach() for _ in range(count)]
                if nested:
                    inner, outer = socket.socketpair()
                    socket.send_fds(outer, [b"x"], fds)
                    for fd in fds:
                        os.close(fd)
                    outer.shutdown(socket.SHUT_WR)
                    outer.close()
                    fds = [inner.detach()]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                if isinstance(to, str):
                    to = raw(to)
                to.sendmsg([line], rights)
                for fd in fds:
                    os.close(fd)
            os._exit(0)
        self.children.append(pid)
        self.others += [self.door.accept()[0] for _ in range(count)]


def raw(path):
    """A connection to a control socket, without any request."""
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(5)
    s.connect(path)
    return s


def ask(s, line, fds=()):
    """Send one line; the answer, or None: closed."""
    if fds:
        socket.send_fds(s, [line], list(fds))
    else:
        s.sendall(line)
    with contextlib.suppress(OSError):
        text = b""
        while not text.endswith(b"\n"):
            some = s.recv(65536)
            if not some:
                return None
            text += some
        return json.loads(text)
    return None


# ---- playing ----

def listed_open():
    with open(OPEN) as lines:
        return {line.split()[0] for line in lines if line.strip() and line[0] != "#"}


def play_once(one, timed):
    """(outcome, observations, the bystander's measurements)."""
    with House(**one.options) as house:
        beside = Bystander(house)
        try:
            said = Forked(one.run, house, role=one.by).result(LIMIT_S)
        finally:
            figures = beside.end()
        ended = house.end()
        log = "\n".join("--- log of %s\n%s" % (d.name, d.log()[-4000:]) for d in house.daemons) \
            if os.environ.get("V") else ""
    if said is None:
        said = {"value": "the attack did not end within %d s" % LIMIT_S}
    if "skip" in said:
        return "skipped", said["skip"], figures
    if "error" in said:
        return "broken", said["error"] + log, figures
    seen = [said["value"]] if said["value"] else []
    if figures.worst > STOPPED_S:
        seen.append("a ping of another user took %.1f s" % figures.worst)
    seen += figures.lost + ended
    if seen:
        return "VULNERABLE", "; ".join(seen) + log, figures
    if timed and figures.late():
        return "late", "p99 of another user's ping %.1f ms" % (1e3 * figures.p99), figures
    return "held", "", figures


def play(one, timed):
    for _ in range(3):
        outcome, seen, figures = play_once(one, timed)
        if outcome != "late":
            return outcome, seen, figures
    return "VULNERABLE", seen, figures


def chosen(words, quick):
    return [a for a in attacks if (a.quick or not quick) and
            (not words or any(w in a.name or w == a.cause for w in words))]


def run(door, words=(), quick=False, timed=True):
    """Plays them; (passed, failed, skipped, open)."""
    counts = dict(passed=0, failed=0, skipped=0, open=0)
    known = listed_open()
    for one in chosen(words, quick):
        try:
            need_users(KVD, MALLORY, ALICE, EVE)
            begin = time.monotonic()
            outcome, seen, figures = play(one, timed)
        except Skip as why:
            outcome, seen, figures = "skipped", str(why), None
        said = outcome + (": " + seen if seen else "")
        if one.name in known and outcome == "VULNERABLE":
            outcome, said = "open", "open: " + seen
        elif one.name in known and outcome == "held":
            said = "held: take its line out of open.txt"
        counts[{"held": "passed", "open": "open", "skipped": "skipped"}.get(
            outcome, "failed")] += 1
        word = {"held": "ok  ", "skipped": "skip", "open": "skip"}.get(outcome, "FAIL")
        print("%s %s %s: %s\n       claim: %s" % (word, one.cause, one.name, said, one.claim))
        if figures:
            print("       beside: %s (%.1f s)" % (figures, time.monotonic() - begin))
        sys.stdout.flush()
    return counts


def main(door):
    counts = run(door, sys.argv[1:])
    print("%d passed, %d failed, %d skipped" % (
        counts["passed"], counts["failed"], counts["skipped"] + counts["open"]))
    sys.exit(1 if counts["failed"] else 0)
