#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The units under a real systemd (guest.py), with what `make install` installs and nothing
else of this tree. Device lists, the filter of system calls, notification, watchdog and
sockets are the kernel's and systemd's own."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from guest import BUILD, DEADLINE_S, TREE, Guest, Skip, until
from kvd_daemon import run

CONF = """[daemon]
name = %s
log_level = info
drain_timeout = 2 s
[transport]
transports = shm
"""
guest = None


def install():
    with tempfile.TemporaryDirectory(prefix="kvd-stage-") as stage:
        san = os.path.basename(BUILD)
        subprocess.run(["make", "-s", "-C", TREE, "install", "DESTDIR=" + stage, "PREFIX=/usr",
                        "SAN=" + ("" if san == "rel" else san)], check=True,
                       stdout=subprocess.DEVNULL)
        for program in ("demo-prefill", "demo-decode"):
            shutil.copy(os.path.join(BUILD, program), stage + "/usr/bin/")
        guest.copy(stage)
    guest.run("systemd-sysusers")
    guest.run("systemd-tmpfiles", "--create")
    for user in ("prefill", "decode"):
        guest.run("useradd", "--system", "--user-group", "--groups", "kvd", user)
    for name in ("gpu0", "gpu1"):
        guest.write("/etc/kvd/%s.conf" % name, CONF % name)
    guest.run("ldconfig")
    guest.run("systemctl", "daemon-reload")


def new_pid(unit, old):
    state, pid, result = guest.show(unit, "ActiveState", "MainPID", "Result")
    assert state != "failed", (unit, result)
    return int(pid) if state == "active" and int(pid) not in (0, old) else None


def main_pid(unit):
    """As PID 1's namespace counts."""
    pid = int(guest.show(unit, "MainPID"))
    assert pid > 0, "%s does not run" % unit
    return pid


# ---- cases, in this order ----

def service_starts_and_says_so():
    guest.run("systemctl", "start", "kvd@gpu0")  # returns when it is ready
    state, text, restarts = guest.show("kvd@gpu0", "ActiveState", "StatusText", "NRestarts")
    assert (state, text, restarts) == ("active", "serving", "0"), (state, text, restarts)
    code, says = guest.ctl("gpu0", "health")[:2]
    assert code == 0 and "seccomp" not in says, says  # it would say why there is none
    pid = main_pid("kvd@gpu0")
    with open("/proc/%d/root/proc/%d/status" % (guest.pid, pid)) as f:
        status = dict(line.split(":\t") for line in f.read().splitlines() if ":\t" in line)
    assert status["Seccomp"].strip() == "2" and int(status["CapEff"], 16) == 0, status
    assert status["Uid"].split()[0] == guest.run("id", "-u", "kvd")[1].strip()


def target_starts_and_stops_all():
    guest.run("systemctl", "enable", "--quiet", "kvd.target", "kvd@gpu0", "kvd@gpu1")
    guest.run("systemctl", "start", "kvd.target")
    for name in ("gpu0", "gpu1"):
        assert guest.show("kvd@" + name, "ActiveState") == "active", name
    guest.run("systemctl", "stop", "kvd.target")
    for name in ("gpu0", "gpu1"):  # systemctl waits for the target's own end alone
        until(name + " stops", lambda n=name: guest.show("kvd@" + n, "ActiveState") ==
              "inactive")
    guest.run("systemctl", "start", "kvd.target")


def rooms_between_engines_of_other_users():
    endpoint = json.loads(guest.ctl("gpu0", "--json", "status")[1])["endpoint"]
    with tempfile.TemporaryFile() as log:
        prefill = guest.start("demo-prefill", "/run/kvd/gpu0.sock", user="prefill", log=log)
        try:
            _, out = guest.run("demo-decode", "/run/kvd/gpu1.sock", endpoint, "shm",
                               user="decode")
        finally:
            prefill.kill()  # it ends by a SIGKILL of its own
            prefill.wait()
    assert out.count("shm") >= 3, out
    until("nothing is left of them", lambda: "regions 0" in " ".join(
        guest.ctl("gpu0", "stats")[1].split()))


def user_outside_the_group_is_refused():
    guest.run("useradd", "--system", "--user-group", "stranger")
    status, out = guest.ctl("gpu0", "status", check=False, user="stranger")
    assert status == 3 and "usermod -aG kvd stranger" in out, (status, out)


def reload_takes_the_new_file():
    guest.write("/etc/kvd/gpu0.conf", (CONF % "gpu0").replace("= info", "= debug"))
    guest.run("systemctl", "reload", "kvd@gpu0")
    until("reloaded", lambda: "reloaded" in guest.journal("kvd@gpu0"))
    assert json.loads(guest.ctl("gpu0", "--json", "call", "config.show")[1])


def killed_daemon_comes_back():
    old = main_pid("kvd@gpu0")
    guest.run("kill", "-9", str(old))
    until("a new process", lambda: new_pid("kvd@gpu0", old))
    assert guest.ctl("gpu0", "health")[0] == 0


def memory_of_chunks_outlives_its_process():
    def taken():
        return guest.journal("kvd@gpu0").count("takes over the memory of the previous process")
    guest.write("/etc/kvd/gpu0.conf", CONF % "gpu0" + "[chunks]\nchunk_memory = 16 MiB\n")
    guest.run("systemctl", "restart", "kvd@gpu0")
    assert guest.show("kvd@gpu0", "NFileDescriptorStore") == "2"
    for how in (("kill", "-9"), None):
        before, old = taken(), main_pid("kvd@gpu0")
        if how:
            guest.run(*how, str(old))
        else:
            guest.run("systemctl", "restart", "kvd@gpu0")
        until("a new process", lambda o=old: new_pid("kvd@gpu0", o))
        until("its memory", lambda b=before: taken() == b + 1)
        assert guest.show("kvd@gpu0", "NFileDescriptorStore") == "2"
    guest.run("systemctl", "stop", "kvd@gpu0")
    assert guest.show("kvd@gpu0", "NFileDescriptorStore") == "0", "stopped: given back"
    guest.write("/etc/kvd/gpu0.conf", CONF % "gpu0")
    guest.run("systemctl", "start", "kvd@gpu0")


def it_never_gives_up():
    for _ in range(8):  # systemd's default is 5 in 10 s
        old = until("a process", lambda: new_pid("kvd@gpu1", 0))
        guest.run("kill", "-9", str(old))
        until("a new process", lambda o=old: new_pid("kvd@gpu1", o))


def frozen_daemon_is_restarted_by_the_watchdog():
    guest.write("/etc/systemd/system/kvd@.service.d/test.conf", "[Service]\nWatchdogSec=2\n")
    guest.run("systemctl", "daemon-reload")
    guest.run("systemctl", "restart", "kvd@gpu0")
    old = main_pid("kvd@gpu0")
    guest.run("kill", "-STOP", str(old))
    until("a new process", lambda: new_pid("kvd@gpu0", old))
    assert "Watchdog timeout" in guest.journal("kvd@gpu0"), guest.journal("kvd@gpu0")
    guest.run("rm", "/etc/systemd/system/kvd@.service.d/test.conf")
    guest.run("systemctl", "daemon-reload")


def stop_drains_a_room_that_hangs():
    guest.run("systemctl", "restart", "kvd@gpu0")
    with tempfile.TemporaryFile() as log:
        prefill = guest.start("demo-prefill", "/run/kvd/gpu0.sock", user="prefill", log=log)
        try:
            until("a room is open", lambda: len(
                guest.ctl("gpu0", "rooms")[1].splitlines()) > 1)
            began = time.monotonic()
            stop = subprocess.Popen(["nsenter", "-t", str(guest.pid), "-a", "--",
                                     "systemctl", "stop", "kvd@gpu0"])
            until("draining", lambda: guest.show("kvd@gpu0", "StatusText").startswith(
                "draining"))
            assert stop.wait(DEADLINE_S) == 0
            assert time.monotonic() - began >= 2
        finally:
            prefill.kill()
            prefill.wait()
    result, state = guest.show("kvd@gpu0", "Result", "ActiveState")
    assert (result, state) == ("success", "inactive"), (result, state)


def socket_starts_the_service_for_the_engine_that_comes_first():
    guest.run("systemctl", "start", "kvd@gpu0.socket")
    assert guest.show("kvd@gpu0", "ActiveState") == "inactive"
    assert guest.ctl("gpu0", "health", check=False)[0] == 3  # a probe does not start it
    assert guest.show("kvd@gpu0", "ActiveState") == "inactive"
    assert guest.run("kvd-ctl", "--socket", "/run/kvd/gpu0.sock", "ping",
                     user="prefill")[0] == 0
    assert guest.show("kvd@gpu0", "ActiveState") == "active"
    guest.run("systemctl", "stop", "kvd@gpu0.socket", "kvd@gpu0")


def socket_of_another_group_is_made_under_the_filter():
    """chown is not among the calls that the unit allows."""
    guest.write("/etc/kvd/grp.conf", CONF % "grp" + "[control]\nsocket_group = stranger\n")
    guest.run("systemctl", "start", "kvd@grp")
    assert guest.ctl("grp", "ping", user="stranger")[0] == 0
    assert guest.ctl("grp", "ping", check=False, user="prefill")[0] == 3
    guest.run("systemctl", "stop", "kvd@grp")


def reached(*words):
    """What a daemon of the unit hears of an address of no private network, where nobody
    listens."""
    guest.run("systemctl", "daemon-reload")
    guest.run("systemctl", "restart", "kvd@gpu0")
    code, out = guest.ctl("gpu0", "call", "peer.connect", json.dumps(
        dict(endpoint="tcp://203.0.113.1:7", timeout_ms=6000)), check=False)
    for word in words:
        assert code and word in out, out


def packets_of_public_networks_pass_with_a_drop_in():
    subprocess.run(["nsenter", "-t", str(guest.pid), "-n", "ip", "address", "add",
                    "203.0.113.1/32", "dev", "lo"], check=True)
    reached("Connection timed out", "IPAddressAllow=")
    guest.write("/etc/systemd/system/kvd@.service.d/test.conf",
                "[Service]\nIPAddressAllow=203.0.113.0/24\n")
    reached("Connection refused")
    guest.run("rm", "/etc/systemd/system/kvd@.service.d/test.conf")
    guest.run("systemctl", "daemon-reload")


def engine_that_is_hidden_is_watched_and_its_kill_is_noticed():
    guest.run("systemctl", "restart", "kvd@gpu0")
    daemon = main_pid("kvd@gpu0")
    with tempfile.TemporaryFile() as log:
        prefill = guest.start("demo-prefill", "/run/kvd/gpu0.sock", user="prefill", log=log)
        try:
            until("a room is open", lambda: len(
                guest.ctl("gpu0", "rooms")[1].splitlines()) > 1)
            engine = guest.run("pgrep", "-n", "-u", "prefill")[1].strip()
            assert guest.run("nsenter", "-t", str(daemon), "-m", "setpriv", "--reuid", "kvd",
                             "--regid", "kvd", "--clear-groups", "test", "-e",
                             "/proc/" + engine, check=False)[0] == 1, "/proc shows the engine"
            held = guest.run("ls", "-l", "/proc/%d/fd" % daemon)[1]
            assert "/%s/statm" % engine in held, held
            guest.run("kill", "-9", engine)
            until("its memory is left", lambda: "regions 0" in " ".join(
                guest.ctl("gpu0", "stats")[1].split()))
        finally:
            prefill.kill()
            prefill.wait()
    guest.run("systemctl", "stop", "kvd@gpu0")


OWN_USER = r"""use IO::Socket::UNIX;
$s = IO::Socket::UNIX->new(Peer => "/run/kvd/gpu0.sock"); $bytes = "x" x 65536;
print $s '{"id":1,"cmd":"hello","proto":1,"client":"own"}', "\n"; <$s>;
print $s '{"id":2,"cmd":"region.register","kind":"vm","length":65536,"address":"',
    unpack("J", pack("p", $bytes)), '"}', "\n"; print scalar <$s>;
"""


def plain_memory_of_the_daemons_user_needs_no_descriptor():
    """The daemon's own process is in Landlock and sees no other; kvd-open does."""
    guest.run("systemctl", "start", "kvd@gpu0")
    guest.write("/tmp/own.pl", OWN_USER)
    guest.run("chmod", "644", "/tmp/own.pl")
    answer = guest.run("perl", "/tmp/own.pl", user="kvd")[1]
    assert json.loads(answer).get("ok"), answer
    guest.run("systemctl", "stop", "kvd@gpu0")


NAMED = r"""use IO::Socket::UNIX;
open $f, ">", "/dev/shm/kvd-test" and print $f "x" x 65536 and close $f or die;
$s = IO::Socket::UNIX->new(Peer => "/run/kvd/gpu0.sock");
print $s '{"id":1,"cmd":"hello","proto":1,"client":"own"}', "\n"; <$s>;
print $s '{"id":2,"cmd":"region.register","kind":"shm","shm_name":"/kvd-test",',
    '"length":65536}', "\n"; print scalar <$s>; unlink "/dev/shm/kvd-test";
"""


def named_shared_memory_is_found_under_the_filter():
    """RestrictSUIDSGID= lets no openat2() pass."""
    guest.run("systemctl", "start", "kvd@gpu0")
    guest.write("/tmp/named.pl", NAMED)
    guest.run("chmod", "644", "/tmp/named.pl")
    answer = guest.run("perl", "/tmp/named.pl", user="prefill")[1]
    assert json.loads(answer).get("ok"), answer
    guest.run("systemctl", "stop", "kvd@gpu0")


def wrong_configuration_is_not_tried_again():
    for text, word in (("[peer]\nlistn = tcp://127.0.0.1:0\n", "listn"),
                       ("[peer]\ncurve_secret_file = /etc/kvd/none\n", "curve_secret_file")):
        guest.write("/etc/kvd/bad.conf", text)
        assert guest.run("systemctl", "start", "kvd@bad", check=False)[0] != 0
        state, status, restarts = guest.show("kvd@bad", "ActiveState", "ExecMainStatus",
                                             "NRestarts")
        assert (state, status, restarts) == ("failed", "78", "0"), (text, state, status,
                                                                    restarts)
        assert word in guest.journal("kvd@bad")
        guest.run("systemctl", "reset-failed", "kvd@bad")


def nothing_in_the_journal_is_an_assertion_or_a_refused_call():
    text = guest.journal("kvd@gpu0") + guest.journal("kvd@gpu1")
    for words in ("Operation not permitted", "Assertion", "core dumped"):
        assert words not in text, text


def main():
    global guest
    try:
        guest = Guest()
    except Skip as need:
        print("skipped: %s" % need)
        return 77
    try:
        install()
        cases = [service_starts_and_says_so, target_starts_and_stops_all,
                 rooms_between_engines_of_other_users, user_outside_the_group_is_refused,
                 reload_takes_the_new_file, killed_daemon_comes_back,
                 memory_of_chunks_outlives_its_process, it_never_gives_up,
                 frozen_daemon_is_restarted_by_the_watchdog, stop_drains_a_room_that_hangs,
                 socket_starts_the_service_for_the_engine_that_comes_first,
                 packets_of_public_networks_pass_with_a_drop_in,
                 engine_that_is_hidden_is_watched_and_its_kill_is_noticed,
                 plain_memory_of_the_daemons_user_needs_no_descriptor,
                 named_shared_memory_is_found_under_the_filter,
                 socket_of_another_group_is_made_under_the_filter,
                 wrong_configuration_is_not_tried_again,
                 nothing_in_the_journal_is_an_assertion_or_a_refused_call]
        run([guest.told(case) for case in cases])
    finally:
        guest.stop()


if __name__ == "__main__":
    sys.exit(main())
