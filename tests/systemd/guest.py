# SPDX-License-Identifier: Apache-2.0
"""A small Debian whose systemd is PID 1 of namespaces of its own (root.sh, boot.sh), and what
tests do in there."""
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TREE, "tests", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Skip, child_of, until  # noqa: E402

ROOT = os.path.join(TREE, "build", "systemd-root")
PACKAGES = ["systemd", "systemd-sysv", "dbus", "procps",
            "libev4", "libzmq5", "libcjson1", "libinih1", "libxxhash0", "libseccomp2",
            "libssl3"]


def make_root(root=ROOT, packages=tuple(PACKAGES)):
    """The folder, made once; returns the cgroup2 below which it can boot."""
    if os.path.basename(BUILD) != "rel":
        raise Skip("programs without a sanitizer's library")
    mounts = [line.split() for line in open("/proc/mounts")]
    cgroups = [m[1] for m in mounts if m[2] == "cgroup2" and "rw" in m[3].split(",")]
    if os.getuid() != 0 or not cgroups:
        raise Skip("root and a writable cgroup2")
    made = subprocess.run([HERE + "/root.sh", root, *packages], capture_output=True, text=True)
    if made.returncode:
        raise Skip((made.stdout.strip().split("skipped: ")[-1] or made.stderr.strip()))
    return cgroups[0]


class Guest:
    """The booted systemd of the folder `root`, which is made of Debian's `packages`. pid: of
    its PID 1, as this machine counts."""

    def __init__(self, root=ROOT, packages=tuple(PACKAGES)):
        self.cgroup = "%s/kvd-test-%d" % (make_root(root, packages), os.getpid())
        self.log = tempfile.TemporaryFile()
        self.boot = subprocess.Popen([HERE + "/boot.sh", root, self.cgroup],
                                     stdin=subprocess.DEVNULL, stdout=self.log,
                                     stderr=self.log)
        try:
            self.pid = until("namespaces", self._child)
            until("the system runs", self._running)
        except BaseException:
            self.stop()
            if self.boot.returncode != -signal.SIGKILL:
                raise Skip("namespaces in which systemd runs (%s)" % self._last_line())
            raise

    def _child(self):
        assert self.boot.poll() is None, "boot.sh ended"
        with contextlib.suppress(OSError):
            with open("/proc/%s/status" % child_of(self.boot.pid)) as f:
                pids = [line.split() for line in f if line.startswith("NSpid:")][0]
            return int(pids[1]) if len(pids) > 2 and pids[-1] == "1" else None

    def _running(self):
        assert self.boot.poll() is None, "systemd ended"
        return self.run("systemctl", "is-system-running", check=False)[1].strip() in (
            "running", "degraded")

    def _last_line(self):
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no word of it"

    def run(self, *argv, check=True, stdin=None, user=None):
        """(status, output) of a command inside."""
        if user:
            argv = ("setpriv", "--reuid", user, "--regid", user, "--init-groups") + argv
        done = subprocess.run(["nsenter", "-t", str(self.pid), "-a", "--"] + list(argv),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              stdin=stdin or subprocess.DEVNULL, timeout=DEADLINE_S)
        assert not check or done.returncode == 0, (argv, done.returncode, done.stdout)
        return done.returncode, done.stdout

    def start(self, *argv, user=None, log=None, **pipes):
        """A process inside, whose output goes to `log` or to pipes."""
        pipes = pipes or {"stdin": subprocess.DEVNULL, "stdout": log}
        return subprocess.Popen(
            ["nsenter", "-t", str(self.pid), "-a", "--", "setpriv", "--reuid", user,
             "--regid", user, "--init-groups"] + list(argv), stderr=log, **pipes)

    def write(self, path, text):
        with tempfile.TemporaryFile("w+") as f:
            f.write(text)
            f.seek(0)
            self.run("sh", "-c", 'mkdir -p "${1%/*}" && cat > "$1"', "sh", path, stdin=f)

    def copy(self, folder):
        with tempfile.TemporaryFile() as f:
            subprocess.run(["tar", "-C", folder, "--owner=0", "--group=0", "-c"] + os.listdir(folder),
                           stdout=f, check=True)
            f.seek(0)
            self.run("tar", "-C", "/", "-x", stdin=f)

    def show(self, unit, *names):
        out = self.run("systemctl", "show", unit, *("-p" + n for n in names))[1]
        pairs = dict(line.split("=", 1) for line in out.strip().splitlines())
        return pairs[names[0]] if len(names) == 1 else [pairs[n] for n in names]

    def ctl(self, name, *args, check=True, user=None):
        return self.run("kvd-ctl", "--name", name, *args, check=check, user=user)

    def journal(self, unit):
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit)[1]

    def stop(self):
        self.boot.kill()
        self.boot.wait()
        with contextlib.suppress(AssertionError):
            until("what is left of it has died", self._cgroup_gone, 10)

    def _cgroup_gone(self):
        for folder, _, _ in os.walk(self.cgroup, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not os.path.exists(self.cgroup)

    def told(self, case):
        """The case; the journal's end when it fails."""
        @functools.wraps(case)
        def play():
            try:
                case()
            except AssertionError:
                print(self.run("journalctl", "--no-pager", "-n", "30", check=False)[1])
                raise
        return play


if __name__ == "__main__":
    with contextlib.suppress(Skip):
        make_root()
