#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The image of contrib/container, and two "pods" of it: a daemon and an engine each, in
mount, PID, IPC and network namespaces of their own, with the socket's folder and nothing
else in common; a pair of veth between the pods."""
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from image import TREE, Container, Image, as_user, until
from kvd_daemon import BUILD, Skip, run

CONF = """[daemon]
name = %(name)s
drain_timeout = 2 s
[peer]
dead_after = 20 s
listen = tcp://%(address)s:7400
curve_secret_file = /etc/kvd/daemon.key
curve_allow_file = /etc/kvd/peers
[metrics]
metrics_listen = tcp://127.0.0.1:9464
[transport]
tcp_listen = tcp://%(address)s:7401
"""
TICKET = os.urandom(16).hex()
ADDRESSES = {"prefill": "10.231.0.1", "decode": "10.231.0.2"}
folder = image = None
pods, daemons = {}, {}


def sh(*argv):
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, (argv, done.stdout)
    return done.stdout


def holder():
    """A pod's network."""
    proc = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up; echo; exec cat"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    proc.stdout.readline()
    return proc


def nets():
    made = {name: holder() for name in ADDRESSES}
    try:
        ends = {"prefill": "kvp%d" % os.getpid(), "decode": "kvd%d" % os.getpid()}
        a, b = made["prefill"].pid, made["decode"].pid
        sh("nsenter", "--net=/proc/%d/ns/net" % a, "ip", "link", "add", ends["prefill"], "type",
           "veth", "peer", "name", ends["decode"], "netns", str(b))
        for name, pod in made.items():
            for words in (("addr", "add", ADDRESSES[name] + "/24", "dev", ends[name]),
                          ("link", "set", ends[name], "up")):
                sh("nsenter", "--net=/proc/%d/ns/net" % pod.pid, "ip", *words)
    except AssertionError as why:
        raise Skip("network namespaces with veth (%s)" % why)
    return made


def daemon(name):
    mounts = [(os.path.join(folder, name, "run"), "/run/kvd", "rw"),
              (os.path.join(folder, name, "etc"), "/etc/kvd", "ro")]
    args = ["--config", "/etc/kvd/kvd.conf"]
    daemons[name] = Container(image.root, as_user(image.words_of("ENTRYPOINT") + args), mounts,
                              pods[name].pid)


def engine(name, argv):
    """As another user, whose only common thing with kvd is the group and the folder. Not as
    PID 1, which its own SIGKILL, the demo's last act, does not end. Rooms between two
    users' daemons need a ticket."""
    argv = ["sh", "-c", '"$@"; exit $?', "sh", "env", "TICKET=" + TICKET] + argv
    return Container(os.path.join(folder, "engine"),
                     as_user(argv, "1234", "--groups=997"),
                     [(os.path.join(folder, name, "run"), "/run/kvd", "ro")], pods[name].pid)


def prepare():
    lines = []
    for name, address in ADDRESSES.items():
        for part, mode in (("run", 0o755), ("etc", 0o755)):
            os.makedirs(os.path.join(folder, name, part))
            os.chown(os.path.join(folder, name, part), 997, 997)
        etc = os.path.join(folder, name, "etc")
        key = subprocess.run([BUILD + "/kvd-ctl", "keygen", etc + "/daemon.key"], check=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.chown(etc + "/daemon.key", 997, 997)
        lines.append("%s %s %s:7400\n" % (name, key.stdout.split()[-1], address))
        with open(etc + "/kvd.conf", "w") as f:
            f.write(CONF % {"name": name, "address": address})
    for name in ADDRESSES:
        with open(os.path.join(folder, name, "etc", "peers"), "w") as f:
            f.writelines(lines)
    # the engine's image is another one: here the build's, with the demo's engines
    root = os.path.join(folder, "engine")
    os.rename(image.roots["build"], root)
    for program in ("demo-prefill", "demo-decode", "libkvd.so.0"):
        shutil.copy(os.path.join(BUILD, program), root + ("/usr/lib/" if ".so" in program
                                                          else "/usr/bin/"))
    os.makedirs(root + "/run/kvd", exist_ok=True)


# ---- cases, in this order ----

def image_is_what_the_dockerfile_promises():
    config = image.config
    assert config["USER"] == "997:997" and config["STOPSIGNAL"] == "SIGTERM", config
    assert image.words_of("ENTRYPOINT") == ["/usr/bin/kvd"]
    assert not os.path.exists(image.root + "/usr/bin/gcc")
    status = os.stat(image.root + "/run/kvd")
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (997, 997, 0o755)
    out = sh("chroot", "--userspec=997:997", image.root, "/usr/bin/kvd", "--version")
    for word in ("verbs", "tcp"):
        assert word in out, out


def daemons_run_confined():
    for name, one in daemons.items():
        until(name + " serves", lambda o=one, n=name: o.run(
            "kvd-ctl", "--name", n, "-t", "1", "ping")[0] == 0 or o.proc.poll() is not None)
        with open("/proc/%d/status" % one.pid) as f:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
        assert status["Uid"].split()[0] == "997" and int(status["CapEff"], 16) == 0, status
        assert status["NSpid"].split()[-1] == "1"
        assert one.run("touch", "/etc/x")[0] != 0


def health_check_tells():
    check = image.words_of("HEALTHCHECK")
    for one in daemons.values():
        status, out = one.run(*check)
        assert status == 0, out


def room_between_two_pods():
    prefill = engine("prefill", ["demo-prefill", "/run/kvd/prefill.sock"])
    try:
        decode = engine("decode", ["demo-decode", "/run/kvd/decode.sock",
                                   "tcp://%s:7400" % ADDRESSES["prefill"], "tcp"])
        try:
            assert decode.end() == 0, decode.text() + prefill.text()
            assert decode.text().count("tcp") >= 3, decode.text()
        finally:
            decode.kill()
    finally:
        prefill.kill()
    until("nothing is left of them", lambda: "regions 0" in " ".join(
        daemons["prefill"].run("kvd-ctl", "--name", "prefill", "stats")[1].split()))


def folder_of_the_socket_alone_is_shared():
    one = engine("prefill", ["sh", "-c", "ls /run/kvd; ls /proc | grep -c '^[0-9]'; ls /dev/shm"])
    assert one.end() == 0
    out = one.text().split()
    assert "prefill.sock" in out and int(out[-1]) <= 5, out


def sigterm_drains():
    """With a room open: until drain_timeout; the health check tells, too."""
    one = daemons["prefill"]
    prefill = engine("prefill", ["demo-prefill", "/run/kvd/prefill.sock"])
    try:
        until("a room is open", lambda: len(one.run(
            "kvd-ctl", "--name", "prefill", "rooms")[1].splitlines()) > 1)
        one.signal(signal.SIGTERM)
        until("not healthy", lambda: one.run(*image.words_of("HEALTHCHECK"))[0] == 1)
        assert one.end() == 0, one.text()
    finally:
        prefill.kill()


def drain_before_stop_ends_the_daemon():
    one = daemons["decode"]
    status, out = one.run("kvd-ctl", "--name", "decode", "drain", "--wait")
    assert status in (0, -signal.SIGKILL), (status, out)  # PID 1's end takes it along
    assert one.end() == 0, one.text()
    for each in daemons.values():
        assert "Operation not permitted" not in each.text(), each.text()


def main():
    global folder, image, pods
    if os.path.basename(BUILD) != "rel":
        print("skipped: programs without a sanitizer's library")
        return 77
    folder = tempfile.mkdtemp(prefix="containers-", dir=os.path.join(TREE, "build"))
    os.chmod(folder, 0o755)
    try:
        try:
            image = Image("kvd", folder)
            pods = nets()
        except Skip as need:
            print("skipped: %s" % need)
            return 77
        prepare()
        for name in ADDRESSES:
            daemon(name)
        run([image_is_what_the_dockerfile_promises, daemons_run_confined, health_check_tells,
             room_between_two_pods, folder_of_the_socket_alone_is_shared, sigterm_drains,
             drain_before_stop_ends_the_daemon])
    finally:
        for one in daemons.values():
            one.kill()
        for pod in pods.values():
            pod.kill()
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
