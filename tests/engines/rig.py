# SPDX-License-Identifier: Apache-2.0
"""What the runs of real engines have in common: folders, processes, HTTP, checks.

Everything listens on loopback. Each engine is a session of its own, so that all of its
processes can be found and ended, and no others."""
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
from kvd_daemon import Daemon, free_port  # noqa: E402

FOLDER = os.path.abspath(os.environ.get("KVD_ENGINES", os.path.join(ROOT, "build/engines")))
HOST = "127.0.0.1"
START_S = float(os.environ.get("KVD_ENGINES_START_S", "900"))
PR_SET_PDEATHSIG = 1
_clock = threading.Event()


def pause(seconds):
    _clock.wait(seconds)


def until(holds, seconds, step=0.1):
    """What holds() gave at last: true, or false when it took too long."""
    end = time.monotonic() + seconds
    while True:
        got = holds()
        if got or time.monotonic() > end:
            return got
        pause(step)


def free_ports(n=1):
    """The first of n free ports in a row, none of which a connection may take meanwhile."""
    while True:
        socks = []
        try:
            base = free_port()
            for i in range(n):
                socks.append(socket.create_server((HOST, base + i)))
            return base
        except (OSError, OverflowError):
            continue
        finally:
            for sock in socks:
                sock.close()


def python(engine):
    path = os.path.join(FOLDER, engine, "venv", "bin", "python")
    if not os.path.exists(path):
        sys.exit("no %s: tests/engines/setup.sh %s %s" % (path, engine, FOLDER))
    return path


def kvd_paths(nixl="kvd"):
    """What goes on PYTHONPATH for kvd's nixl, or for kvd's own backend (native): the wheel,
    unpacked by make engines. Nothing for NIXL's own module."""
    wheel = os.path.join(FOLDER, "kvd")
    return {"kvd": [os.path.join(wheel, "kvd", "nixl", "path"), wheel], "native": [wheel],
            "nixl": []}[nixl]


def logs(name):
    path = os.path.join(FOLDER, "logs", name)
    os.makedirs(path, exist_ok=True)
    return path


class Process:
    """A program with children; its output goes to a file."""

    def __init__(self, argv, env, log):
        self.log, self.begin = log, time.monotonic()
        with open(log, "wb") as out:
            self.proc = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                         stderr=subprocess.STDOUT, start_new_session=True,
                                         preexec_fn=self._die_with_parent)

    @staticmethod
    def _die_with_parent():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def pids(self):
        """All of its session."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open("/proc/%s/stat" % pid) as f:
                    words = f.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(words[3]) == self.proc.pid and words[0] != "Z":
                found.append(int(pid))
        return found

    def signal_all(self, number):
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def kill(self):
        self.signal_all(signal.SIGKILL)
        self.proc.wait(20)

    def stop(self):
        if self.proc.poll() is None:
            self.proc.terminate()
            until(lambda: self.proc.poll() is not None, 20)
        until(lambda: not self.pids(), 5)
        self.kill()

    def words(self):
        """The last lines of its log that tell of errors."""
        with open(self.log, errors="replace") as f:
            lines = f.read().splitlines()
        return "\n".join([x for x in lines if "Error" in x or "rror:" in x][-5:] or lines[-5:])


class Server(Process):
    """A process that answers HTTP."""

    def __init__(self, name, argv, env, log, port, ready):
        self.name, self.port, self.ready_path = name, port, ready
        super().__init__(argv, env, log)

    def wait(self):
        if not until(self.answers, START_S, 0.5):
            raise RuntimeError("%s is not up after %g s; %s\n%s" % (self.name, START_S,
                                                                   self.log, self.words()))
        self.took = time.monotonic() - self.begin
        return self

    def answers(self):
        if self.proc.poll() is not None:
            raise RuntimeError("%s ended with %d; %s\n%s" % (
                self.name, self.proc.returncode, self.log, self.words()))
        try:
            return self.call("GET", self.ready_path, seconds=3)[0] == 200
        except OSError:
            return False

    def call(self, method, path, body=None, seconds=60, head=None):
        line = http.client.HTTPConnection(HOST, self.port, timeout=seconds)
        try:
            line.request(method, path, None if body is None else json.dumps(body),
                         dict(head or {}, **{"Content-Type": "application/json"}))
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()


class Tally:
    """Counts checks; each is one line."""

    def __init__(self):
        self.passed = self.failed = 0
        self.notes = {}

    def add(self, name, ok, note=""):
        self.passed, self.failed = self.passed + bool(ok), self.failed + (not ok)
        print("%s%s%s" % ("ok    " if ok else "FAIL  ", name, "  (%s)" % note if note else ""),
              flush=True)

    def check(self, name, call, *args, **kwargs):
        """A check that raises says why."""
        try:
            note = call(*args, **kwargs)
        except Exception as error:
            self.add(name, False, "%s: %s" % (type(error).__name__, str(error)[:600]))
        else:
            self.add(name, True, note or "")

    def note(self, name, value):
        self.notes[name] = value
        print("note  %s: %s" % (name, value), flush=True)

    def close(self, name):
        """The result for run.py, and the exit status."""
        os.makedirs(os.path.join(FOLDER, "results"), exist_ok=True)
        with open(os.path.join(FOLDER, "results", name + ".json"), "w") as out:
            json.dump({"passed": self.passed, "failed": self.failed, "notes": self.notes},
                      out, indent=1)
        print("%d passed, %d failed" % (self.passed, self.failed), flush=True)
        return 1 if self.failed or not self.passed else 0


def equal(got, wanted, what):
    if got != wanted:
        raise AssertionError("%s: got %s, wanted %s" % (what, got, wanted))


# two engines that start and poll on few cores keep even a daemon waiting for a second
CONFIG = "log_level = info\n[peer]\ndead_after = 5 s\n"


class Node:
    """The daemon of one engine, or nothing for NIXL's own module."""

    def __init__(self, nixl, name):
        self.nixl = nixl
        self.daemon = Daemon(CONFIG, name=name) if nixl != "nixl" else None

    def __enter__(self):
        if self.daemon:
            self.daemon.__enter__()
        return self

    def __exit__(self, *exc):
        if self.daemon:
            self.daemon.__exit__(*exc)

    def env(self):
        """For the engine: its daemon."""
        return {"KVD_SOCKET": self.daemon.socket_path} if self.daemon else {}

    def used(self):
        """Whether engines moved bytes through it: a data line came up."""
        return self.daemon is None or "data connection up" in self.daemon.log() or \
            "transport=local" in self.daemon.log()
