# SPDX-License-Identifier: Apache-2.0
"""contrib/container/Dockerfile without a registry: each stage's base and Debian packages by
mmdebstrap, its other steps as they stand there, in namespaces. And containers of the image:
namespaces of their own, a read-only root, no capability."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TREE, "tests", "lib"))
from kvd_daemon import DEADLINE_S, Skip, child_of, until  # noqa: E402

# an image is built without what this make was told
BUILD_ENV = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"}
ENTER = r"""
set -e
mount --make-rprivate /
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom; do
	touch "$root/dev/$node"
	mount --bind "/dev/$node" "$root/dev/$node"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do # FROM TO ro|rw
	mount --bind "$1" "$root$2"
	[ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
	shift 3
done
shift
[ "$1" != ro ] || mount -o remount,bind,ro "$root"
shift
ip link set lo up
cd "$root"
mkdir -p dev/old
pivot_root . dev/old
umount -l /dev/old
exec "$@"
"""


def words(text):
    """A RUN line's shell steps."""
    return [step.strip() for step in text.split("&&")]


class Image:
    """The stage `target`; root: its files, config: what a runtime is told."""

    def __init__(self, target, folder):
        if os.getuid() != 0:
            raise Skip("root")
        self.roots, self.config, self.folder = {}, {}, folder
        with open(os.path.join(TREE, "contrib/container/Dockerfile")) as f:
            lines = [line.strip() for line in f if line.strip() and line[0] != "#"]
        stages, args = [], {}
        for line in lines:
            verb, rest = line.split(None, 1)
            if verb == "ARG":
                args.update([rest.split("=", 1)])
            elif verb == "FROM":
                base, *name = rest.split()
                if not name:
                    assert base == target, "the default target"
                    continue
                stages.append((name[1], re.sub(r"\$\{(\w+)\}", lambda m: args[m[1]], base), []))
            else:
                stages[-1][2].append((verb, rest))
        wanted = {target} | {m for name, _, steps in stages if name == target for verb, rest in
                             steps if verb == "COPY" for m in re.findall(r"--from=(\w+)", rest)}
        for name, base, steps in stages:
            if name in wanted:
                assert base == "debian:12-slim", base
                self._stage(name, steps)
        self.root = self.roots[target]

    def _stage(self, name, steps):
        packages = [w for verb, rest in steps if verb == "RUN" for s in words(rest)
                    if s.startswith("apt-get install") for w in s.split()[2:] if w[0] != "-"]
        kept = os.path.join(TREE, "build", "container-" + name)
        with contextlib.suppress(OSError):
            with open(kept + ".packages") as f:
                if f.read() != " ".join(packages):
                    os.unlink(kept + ".ready")
        with open(kept + ".packages", "w") as f:
            f.write(" ".join(packages))
        made = subprocess.run([TREE + "/tests/systemd/root.sh", kept] + packages, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if made.returncode:
            raise Skip(made.stdout.strip().split("skipped: ")[-1])
        root = self.roots[name] = os.path.join(self.folder, name)
        subprocess.run(["cp", "-a", "--reflink=auto", kept, root], check=True)
        where = "/"
        self.config = {}
        for verb, rest in steps:
            if verb == "RUN":
                for step in words(rest):
                    if not step.startswith("apt-get "):
                        subprocess.run(enter(root, ["sh", "-c", "cd %s && %s" % (where, step)]),
                                       check=True, stdout=subprocess.DEVNULL, env=BUILD_ENV)
            elif verb == "WORKDIR":
                where = rest
            elif verb == "COPY" and rest.startswith("--from="):
                stage, *paths = rest[len("--from="):].split()
                for path in paths[:-1]:
                    shutil.copy2(self.roots[stage] + path, root + paths[-1])
            elif verb == "COPY":
                assert rest == ". /src", rest
                os.mkdir(root + "/src")
                files = subprocess.run(["git", "-C", TREE, "ls-files", "-co",
                                        "--exclude-standard", "-z"], check=True,
                                       stdout=subprocess.PIPE).stdout
                tar = subprocess.Popen(["tar", "-C", TREE, "--null", "-T", "-", "-c"],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                out = subprocess.Popen(["tar", "-C", root + "/src", "-x"], stdin=tar.stdout)
                tar.stdin.write(files)
                tar.stdin.close()
                assert tar.wait() == 0 and out.wait() == 0
            else:
                self.config[verb] = rest

    def words_of(self, verb):
        return json.loads(self.config[verb][self.config[verb].index("["):])


def enter(root, argv, mounts=(), read_only=False, net=None, host=False):
    """The command line that runs argv as PID 1 over the files `root`."""
    flat = [w for mount in mounts for w in mount]
    return ((["nsenter", "--net=/proc/%d/ns/net" % net] if net else []) +
            ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"] +
            ([] if net or host else ["--net"]) +
            ["sh", "-c", ENTER, "enter", root] + flat +
            ["--", "ro" if read_only else "rw"] + list(argv))


def as_user(argv, uid="997", groups="--clear-groups"):
    return ["setpriv", "--reuid", uid, "--regid", uid, groups, "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all"] + argv


class Container:
    def __init__(self, root, argv, mounts=(), net=None):
        self.log = tempfile.TemporaryFile()
        self.proc = subprocess.Popen(enter(root, argv, mounts, True, net), stdout=self.log,
                                     stdin=subprocess.DEVNULL, stderr=self.log)
        self.pid = until("PID 1", self._first)

    def _first(self):
        """-1: it has already ended well."""
        ended = self.proc.poll()
        assert not ended, self.text()
        return -1 if ended == 0 else child_of(self.proc.pid)

    def text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def run(self, *argv):
        """(status, output): as `docker exec` and probes do it."""
        done = subprocess.run(["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-n",
                               "--"] + as_user(list(argv)), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S)
        return done.returncode, done.stdout

    def signal(self, number):
        os.kill(self.pid, number)

    def end(self):
        try:
            return self.proc.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError("does not end: " + self.text()) from None

    def kill(self):
        if self.proc.poll() is None:
            with contextlib.suppress(OSError):
                self.signal(signal.SIGKILL)
            self.proc.kill()
            self.proc.wait()
