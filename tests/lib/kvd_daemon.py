# SPDX-License-Identifier: Apache-2.0
"""A real kvd for integration tests.

    with Daemon("[rooms]\\noffer_lease = 1 s\\n") as kvd:
        ...                # ready: it said READY=1 on its notify socket
    # stopped by SIGTERM; exit status 0, no unexpected warning or error logged

Everything waits on a message or an exit with a deadline; nothing sleeps. A
test that provokes a warning names it: kvd.expect("needs a restart").
It has more patience with others than the preset, so that nobody is taken for dead
on a machine that gives one core and not the other; where the death of a daemon is
what a test is about, it says patient=False, or writes a dead_after.
`run(cases)` runs functions and prints the counts that mk/test.mk wants. A case that
fails while the machine stands still (stalls.py) is played again, and a line says so.
"""
import contextlib
import ctypes
import os
import random
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import stalls

BUILD = os.environ.get("KVD_BUILD", os.path.abspath("build/rel"))
DEADLINE_S = 180 if os.path.basename(BUILD) != "rel" else 60
PATIENT = "[peer]\ndead_after = 20 s\n"
STILL = os.environ.get("KVD_STILL")  # its main process's calls are judged (tests/still)
STALLS = os.environ.get("KVD_STALLS", "")  # of this machine, as stalls.py sees it
PLAYS = 3

# as tests/lib/tmp.h: a socket's path has 107 bytes
if len(tempfile.gettempdir()) > 24:
    tempfile.tempdir = "/tmp"

_libc = ctypes.CDLL(None)
_copies = None


def for_everyone(program):
    """A copy of a program that other users may run, wherever the tree lies."""
    global _copies
    if not _copies:
        _copies = tempfile.TemporaryDirectory(prefix="kvd-test-bin-")
        os.chmod(_copies.name, 0o755)
    copy = os.path.join(_copies.name, program)
    if not os.path.exists(copy):
        shutil.copy(os.path.join(BUILD, program), copy)
        os.chmod(copy, 0o755)
    if not os.access(copy, os.X_OK):
        raise Skip("programs that run in %s: it is mounted noexec" % _copies.name)
    return copy


def free_port():
    """One that nobody is given who asks for any: another daemon of the test took it."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as given:
        first = int(given.read().split()[0])
    low, high = (10000, first) if first > 11000 else (50000, 65535)
    while True:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", random.randrange(low, high)))
            return s.getsockname()[1]


def until(what, check, seconds=DEADLINE_S):
    """What the check gave at last."""
    end = time.monotonic() + seconds
    while True:
        last = check()
        if last:
            return last
        assert time.monotonic() < end, "not within %d s: %s" % (seconds, what)
        select.select([], [], [], 0.05)


def child_of(pid):
    """Its first child, None: it has none."""
    with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
        pids = f.read().split()
    return int(pids[0]) if pids else None


class Skip(Exception):
    """The named need is missing."""


def need_fds(count):
    """Room for so many file descriptors: the soft limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise Skip("%d file descriptors (ulimit -n)" % count)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def need_users(*ids):
    """To become those users: root may not without CAP_SETUID, or where it has no such."""
    for uid in ids:
        try:
            subprocess.run(["true"], user=uid, group=uid, extra_groups=[], check=True)
        except (OSError, subprocess.SubprocessError) as why:
            raise Skip("root, to become user %d: %s" % (uid, why))


def need_transports(config):
    """Those that it names are built in (make MODULES=)."""
    for named in re.findall(r"^transports = (.*)$", config, re.M):
        if "ucx" in named and not re.search(r"^transports:.* ucx\b", kvd("--version")[1], re.M):
            raise Skip("a kvd with the module ucx")


class Daemon:
    def __init__(self, config="", args=(), run_dir=None, name="kvd", env=None,
                 wrapper=(), pass_fds=(), preexec=None, program=BUILD + "/kvd",
                 log_dir=None, patient=True):
        need_transports(config)
        self.tmp = None
        if run_dir is None:
            self.tmp = tempfile.TemporaryDirectory(prefix="kvd-test-")
            run_dir = self.tmp.name
        self.run_dir, self.name = run_dir, name
        self.config_path = os.path.join(run_dir, name + ".conf")
        self.socket_path = os.path.join(run_dir, name + ".sock")
        self.lock_path = os.path.join(run_dir, name + ".lock")
        self.patient = patient
        self.write_config(config)
        self.env, self.args, self.wrapper = dict(env or {}), list(args), list(wrapper)
        self.pass_fds, self.preexec, self.program = pass_fds, preexec, program
        self.expected, self.states, self.proc, self.kept = [], [], None, None
        self.report = None
        self.log_dir = log_dir

    def write_config(self, text):
        """Every option of `text`, and run_dir, name and patience."""
        if "[daemon]" not in text:
            text = "[daemon]\n" + text
        if STILL and "core_dumps" not in text:  # else only root may look at it
            text = text.replace("[daemon]\n", "[daemon]\ncore_dumps = yes\n", 1)
        if self.patient and "dead_after" not in text:
            text = text.replace("[peer]\n", PATIENT, 1) if "[peer]\n" in text else \
                text.rstrip("\n") + "\n" + PATIENT
        head = "[daemon]\nrun_dir = %s\nname = %s\n" % (self.run_dir, self.name)
        if "log_format" not in text:  # check_end() reads the priorities
            head += "log_format = journal\n"
        with open(self.config_path, "w") as out:
            out.write(text.replace("[daemon]\n", head, 1))

    def __enter__(self):
        return self.start().wait_ready()

    def __exit__(self, kind, value, trace):
        if self.proc and self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
        if self.proc and kind is None:
            self.check_end()
        elif self.proc:
            self.proc.kill()
            self.wait()
            sys.stderr.write(self.log())
        self.notify.close()
        if self.tmp:
            self.tmp.cleanup()

    def start(self):
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = "\0kvd-test-notify-" + secrets.token_hex(8)
        if self.log_dir:  # perhaps in another network namespace: by a path
            path = os.path.join(self.log_dir, "notify")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self.notify.bind(path)
        env = dict(os.environ, NOTIFY_SOCKET=path.replace("\0", "@"), **self.env)
        self.log_file = tempfile.TemporaryFile(dir=self.log_dir)
        self.states = []
        by_main = threading.current_thread() is threading.main_thread()
        still, pass_fds = [], tuple(self.pass_fds)
        if STILL:
            if os.path.basename(BUILD) != "rel":
                raise Skip("calls of a sanitizer's runtime wait")
            self.report, end = os.pipe()
            still = still_command(end, self.own_paths())
            pass_fds += (end,)
        self.proc = subprocess.Popen(
            self.wrapper + still + [self.program, "--config", self.config_path] + self.args,
            env=env, stdin=subprocess.DEVNULL, stdout=self.log_file,
            stderr=self.log_file, pass_fds=pass_fds, preexec_fn=lambda: self.begin(by_main))
        if STILL:
            os.close(end)
        return self

    def own_paths(self):
        """What is not a stranger's: where it runs, what its configuration names."""
        with open(self.config_path) as config:
            named = re.findall(r"= *(/\S+)", config.read())
        named += [value for value in self.env.values() if value.startswith("/")]
        return [self.run_dir, os.path.expanduser("~"), BUILD] + named

    def begin(self, by_main):
        """In the new process. It goes with the test, however that ends; the kernel means
        the thread that made it."""
        if self.preexec:
            self.preexec()
        if by_main:
            _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def wait_state(self, line, deadline_s=DEADLINE_S):
        """Wait until it tells systemd `line`; all told lines are in states."""
        end = time.monotonic() + deadline_s
        while line not in self.states:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("no %s; log:\n%s" % (line, self.log()))
            # short waits only to see an early death of the process
            if select.select([self.notify], [], [], min(left, 0.1))[0]:
                self.heard()
            elif self.proc.poll() is not None:
                raise RuntimeError("ended with %d before %s; log:\n%s"
                                   % (self.proc.returncode, line, self.log()))
        return self

    def heard(self):
        """A word for systemd. What it is given to keep is in `kept`, where that is a dict."""
        text, fds, _, _ = socket.recv_fds(self.notify, 4096, 4)
        lines = text.decode().split("\n")
        self.states += lines
        name = next((one[7:] for one in lines if one.startswith("FDNAME=")), None)
        if self.kept is not None and "FDSTOREREMOVE=1" in lines and name in self.kept:
            os.close(self.kept.pop(name))
        for fd in fds:
            if self.kept is None or name is None:
                os.close(fd)
            else:
                self.kept[name] = fd

    def wait_ready(self):
        return self.wait_state("READY=1")

    def log(self):
        self.log_file.seek(0)
        return self.log_file.read().decode("utf-8", "replace")

    def expect(self, words):
        self.expected.append(words)

    def wait(self, deadline_s=DEADLINE_S):
        return self.proc.wait(deadline_s)

    def stop(self, sig=signal.SIGTERM):
        self.proc.send_signal(sig)
        return self.wait()

    def freeze(self):
        """SIGSTOP, and wait until no thread of it runs: a loaded machine takes time."""
        self.proc.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.proc.pid, os.WSTOPPED)

    def thaw(self):
        self.proc.send_signal(signal.SIGCONT)

    def check_still(self):
        """No call of the main process could have waited for a stranger."""
        if self.report is None:
            return
        found = still_found(self.report, self.program)
        self.report = None
        if found:
            raise AssertionError("calls that may wait:\n" + found)

    def check_end(self):
        status = self.wait()
        self.check_still()
        log = self.log()
        if status != 0:
            raise AssertionError("exit status %d; log:\n%s" % (status, log))
        for line in log.splitlines():
            if re.match("<4>room [0-9]+: failed ", line):
                continue  # its engine is told, and judges it
            if re.match("<4>link.*: connection refused why=", line):
                continue  # the port was another test's, whose daemons dial it still
            if re.match("<[0-4]>", line) and not any(w in line for w in self.expected):
                raise AssertionError("unexpected in the log: " + line)


def still_command(report, own):
    """A program's arguments go behind it. `report`: where findings are written."""
    command = [os.path.join(BUILD, "still"), "--report", str(report)]
    for folder in own:
        command += ["--own", os.path.realpath(folder)]
    return command


def still_found(report, program):
    """All findings, when the program has ended; the pipe is closed."""
    with os.fdopen(report) as lines:
        found = lines.read()
    for line in set(re.findall(r"; at((?: 0x[0-9a-f]+)+)$", found, re.M)):
        named = subprocess.run(["addr2line", "-sfe", program] + line.split(),
                               capture_output=True, text=True)
        names = named.stdout.split("\n")[::2]
        if named.returncode == 0:
            found = found.replace("; at" + line, "; at " + " < ".join(n for n in names if n))
    return found


def kvd(*args, env=None):
    """Run kvd with args to its end: (status, stdout, stderr)."""
    done = subprocess.run([BUILD + "/kvd"] + list(args), capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
                          env=dict(os.environ, **(env or {})))
    return done.returncode, done.stdout, done.stderr


def play(case):
    """Its end in a word."""
    for plays in range(1, PLAYS + 1):
        since = time.time()
        try:
            case()
            print("ok   " + case.__name__, flush=True)
            return "passed"
        except Skip as why:
            print("skip %s: %s" % (case.__name__, why), flush=True)
            return "skipped"
        except Exception:
            traceback.print_exc(file=sys.stdout)
        late_s = stalls.worst(STALLS, since)
        if not late_s or plays == PLAYS:
            break
        print("again %s: the machine stood still for %.0f ms" % (case.__name__, 1e3 * late_s),
              flush=True)
    print("FAIL " + case.__name__, flush=True)
    return "failed"


def run(cases):
    ends = [play(case) for case in cases]
    passed, failed, skipped = (ends.count(w) for w in ("passed", "failed", "skipped"))
    total = "%d passed, %d failed" % (passed, failed)
    print(total + (", %d skipped" % skipped if skipped else ""), flush=True)
    sys.exit(1 if failed else 0)
