#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian packages in a booted system of their own (tests/systemd/guest.py), which has
what they depend on: install, configure, move bytes, upgrade under living engines, remove,
purge. What is committed is packaged."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "systemd"))
from guest import PACKAGES, TREE, Guest, Skip, until  # noqa: E402
from kvd_daemon import run  # noqa: E402

ROOT = os.path.join(TREE, "build", "package-root")
# of Depends, not of Recommends
NEEDS = PACKAGES + ["python3", "python3-numpy"]
OURS = ("kvd", "libkvd0", "python3-kvd")
SOCKETS = ("/run/kvd/gpu0.sock", "/run/kvd/gpu1.sock")
UNITS = ("kvd@gpu0", "kvd@gpu1")
guest = None
before = None  # the guest's files before there was any of ours
engine = None


def debs():
    """The packages' files, built of HEAD."""
    if not shutil.which("dh") or not shutil.which("lintian"):
        raise Skip("debhelper and lintian (make deps-packages)")
    out = os.path.join(TREE, "build", "deb")
    env = dict(os.environ, DEB_BUILD_OPTIONS="nocheck terse " +
               os.environ.get("DEB_BUILD_OPTIONS", ""))
    made = subprocess.run(["scripts/deb.sh", out], cwd=TREE, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if "Unmet build dependencies" in made.stdout:
        raise Skip(re.search("Unmet build dependencies.*", made.stdout).group())
    if made.returncode:
        print(made.stdout[-4000:])
        raise AssertionError("scripts/deb.sh: exit status %d" % made.returncode)
    names = [line for line in made.stdout.splitlines() if line.endswith(".deb")]
    return {os.path.basename(n).split("_")[0]: n for n in names if n.startswith(out)}


def later(deb, folder):
    """The same package in a later version."""
    tree = os.path.join(folder, "tree")
    subprocess.run(["dpkg-deb", "-R", deb, tree], check=True)
    path = os.path.join(tree, "DEBIAN", "control")
    with open(path) as f:
        text = f.read()
    version = re.search("^Version: (.*)$", text, re.M).group(1)
    with open(path, "w") as f:
        f.write(text.replace(version, version + "+later"))
    out = os.path.join(folder, os.path.basename(deb))
    subprocess.run(["dpkg-deb", "-Znone", "-b", tree, out], check=True,
                   stdout=subprocess.DEVNULL)
    shutil.rmtree(tree)
    return out


def put(path, files):
    """Copies into a folder of the guest."""
    with tempfile.TemporaryDirectory() as stage:
        folder = stage + path
        os.makedirs(folder)
        for file in files:
            shutil.copy(file, folder)
        guest.copy(stage)


def files():
    """The names of all that lasts, but for logs, caches and lists."""
    _, out = guest.run("find", "/", "-xdev", "(", "-path", "/proc", "-o", "-path", "/sys", "-o",
                       "-path", "/tmp", "-o", "-path", "/var/log", "-o", "-path", "/var/cache",
                       "-o", "-path", "/new", "-o", "-path", "/later", ")", "-prune", "-o",
                       "-print")
    return set(out.splitlines()) | {"/run/" + n for n in guest.run("ls", "/run")[1].split()}


def states():
    return [guest.show(unit, "ActiveState") for unit in UNITS]


def pids():
    return [int(guest.show(unit, "MainPID")) for unit in UNITS]


def dpkg_install(folder):
    # the guest's dpkg leaves documents out
    return guest.run("sh", "-c", "dpkg --path-include='/usr/share/doc/kvd/*' -i %s/*.deb" %
                     folder)[1]


class Engine:
    """tests/packages/engine.py as a user of its own."""

    def __init__(self):
        self.log = tempfile.TemporaryFile()
        self.proc = guest.start("python3", "/opt/engine.py", *SOCKETS, user="engine",
                                log=self.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                text=True)

    def does(self, word):
        self.proc.stdin.write(word + "\n")
        self.proc.stdin.flush()
        if self.proc.stdout.readline() != "done\n":
            self.proc.kill()
            self.log.seek(0)
            raise AssertionError("%s: %s" % (word, self.log.read().decode()))

    def end(self):
        self.proc.stdin.close()
        assert self.proc.wait(60) == 0


# ---- cases, in this order ----

def new_install_starts_nothing():
    global before
    before = files()
    dpkg_install("/new")
    assert guest.show("kvd.target", "ActiveState") == "active"
    assert not guest.run("systemctl", "--no-legend", "list-units", "--all", "kvd@*")[1].strip()
    assert guest.run("pgrep", "-x", "kvd", check=False)[0] == 1
    _, out = guest.run("stat", "-c", "%U %a", "/run/kvd", "/etc/kvd")
    assert out.split() == ["kvd", "755", "root", "755"], out


def first_transfer_needs_no_configuration():
    """As docs/install.md says."""
    guest.run("systemctl", "enable", "--quiet", "--now", *UNITS)
    _, out = guest.run("python3", "/usr/share/doc/kvd/examples/push.py", *SOCKETS)
    assert "bytes in two chunks" in out, out


def init_and_restart_configure():
    for name, port in (("gpu0", 7400), ("gpu1", 7410)):
        guest.run("sh", "-c", "kvd-ctl --name %s init --listen 127.0.0.1:%d "
                  "2> /dev/null" % (name, port))
        guest.run("kvd", "--check-config", "--name", name, "--user", "kvd")
    guest.run("systemctl", "restart", *UNITS)
    for name, other in (("gpu0", "gpu1"), ("gpu1", "gpu0")):
        line = json.loads(guest.ctl(other, "--json", "keys")[1])["line"]
        assert re.match(r"\S+\.%s \S{40} 127.0.0.1:74.0$" % other, line), line
        guest.run("sh", "-c", 'echo "$1" >> /etc/kvd/%s.peers' % name, "sh", line)
        guest.run("kvd", "--check-config", "--name", name, "--user", "kvd")
    guest.run("systemctl", "restart", *UNITS)
    assert states() == ["active", "active"], states()
    for name in ("gpu0", "gpu1"):
        assert "tcp://127.0.0.1:74" in guest.ctl(name, "status")[1], name
    line = guest.run("systemd-analyze", "security", "--no-pager", UNITS[0])[1]
    line = re.search("Overall exposure.*?: ([0-9.]+)", line)
    print(line.group())
    assert float(line.group(1)) <= 2.5


def packaged_example_moves_bytes_for_another_user():
    guest.run("useradd", "--system", "--user-group", "--groups", "kvd", "engine")
    _, out = guest.run("python3", "/usr/share/doc/kvd/examples/push.py", *SOCKETS, user="engine")
    assert "bytes in two chunks" in out, out
    peers = guest.ctl("gpu0", "peers")[1]
    assert re.search("gpu1 .* shm", peers), peers


def small_memory_of_another_user():
    for pid in pids():
        status = guest.run("cat", "/proc/%d/status" % pid)[1]
        assert re.search("^CapEff:\t0+$", status, re.M), status
    one = Engine()
    one.does("vm")
    one.does("nixl")
    one.end()


def upgrade_restarts_under_living_engines():
    global engine
    engine = Engine()
    engine.does("memfd")
    old = pids()
    guest.run("sh", "-c", "echo '# mine' | tee -a /etc/kvd/kvd.conf.sample >> /etc/kvd/gpu0.conf")
    guest.run("systemctl", "disable", "--quiet", "--now", UNITS[1])
    guest.run("systemctl", "start", UNITS[1])  # runs, and is not to be enabled again
    between = pids()
    assert between[0] == old[0] and between[1] != old[1]
    engine.does("memfd")
    dpkg_install("/later")
    assert guest.run("dpkg-query", "-f", "${Version}", "-W", "kvd")[1].endswith("+later")
    assert states() == ["active", "active"], states()
    assert not set(pids()) & set(between), (pids(), between)
    engine.does("memfd")
    for file in ("kvd.conf.sample", "gpu0.conf"):
        assert guest.run("tail", "-n", "1", "/etc/kvd/" + file)[1] == "# mine\n", file
    assert guest.run("systemctl", "is-enabled", UNITS[1], check=False)[1] == "disabled\n"


def upgrade_leaves_stopped_ones_alone():
    guest.run("systemctl", "stop", UNITS[1])
    dpkg_install("/later")
    assert states() == ["active", "inactive"], states()
    guest.run("systemctl", "start", UNITS[1])
    engine.does("memfd")


def removal_stops_and_keeps_the_configuration():
    guest.run("systemctl", "stop", UNITS[1])
    guest.run("systemctl", "start", UNITS[1] + ".socket")
    guest.run("dpkg", "-r", "kvd")
    until("no daemon", lambda: guest.run("pgrep", "-x", "kvd", check=False)[0] == 1)
    assert guest.run("systemctl", "is-active", UNITS[1] + ".socket", check=False)[0] != 0
    _, out = guest.run("ls", "/etc/kvd")
    assert {"gpu0.conf", "gpu0.key", "gpu0.peers", "kvd.conf.sample"} <= set(out.split()), out
    engine.end()


def enabled_ones_come_back():
    dpkg_install("/later")
    assert states() == ["active", "inactive"], states()
    assert guest.ctl("gpu0", "health")[0] == 0


def purge_leaves_nothing():
    guest.run("userdel", "engine")
    guest.run("dpkg", "-P", *OURS)
    assert guest.run("pgrep", "-x", "kvd", check=False)[0] == 1
    ours = {name for name in files() - before
            if not re.match("/etc/(passwd|group|g?shadow|subuid|subgid)-$|/opt/engine.py$|"
                            "/var/lib/(dpkg|systemd)/|/etc/.pwd.lock$|/var/mail", name)}
    assert not ours, sorted(ours)
    assert not [n for n in files() if re.search("/kvd[^/]*$|/var/lib/.*kvd", n)]


def main():
    global guest
    try:
        made = debs()
        guest = Guest(ROOT, NEEDS)
    except Skip as need:
        print("skipped: %s" % need)
        return 77
    try:
        with tempfile.TemporaryDirectory() as folder:
            put("/new", [made[p] for p in OURS])
            put("/later", [later(made[p], folder) for p in OURS])
        put("/opt", [os.path.join(HERE, "engine.py")])
        cases = [new_install_starts_nothing, first_transfer_needs_no_configuration,
                 init_and_restart_configure, packaged_example_moves_bytes_for_another_user,
                 small_memory_of_another_user,
                 upgrade_restarts_under_living_engines, upgrade_leaves_stopped_ones_alone,
                 removal_stops_and_keeps_the_configuration, enabled_ones_come_back,
                 purge_leaves_nothing]
        run([guest.told(case) for case in cases])
    finally:
        guest.stop()


if __name__ == "__main__":
    sys.exit(main())
