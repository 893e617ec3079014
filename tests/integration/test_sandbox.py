#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What the processes of a daemon have given up, as the kernel tells it. That each call is
refused or not: tests/unit/test_sandbox.c. All other tests run daemons that are in it."""
import os
import re
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
sys.path.insert(0, os.path.join(HERE, "..", "systemd"))
from kvd_daemon import Daemon, Skip, run  # noqa: E402
from kvd_engine import Engine, open_push, Pair, SUCCESS  # noqa: E402
import filtered  # noqa: E402

SOURCE = os.path.join(HERE, "../../daemon/gate/sandbox_calls.c")
SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77
FILTERED = {"Seccomp": "2", "NoNewPrivs": "1"}


def status(path):
    with open(path + "/status") as f:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
    return lines["Name"], {name: lines[name] for name in FILTERED}


def filters(path):
    """How many lie over each other; None before Linux 5.9."""
    with open(path + "/status") as f:
        found = re.search(r"^Seccomp_filters:\t(\d+)", f.read(), re.M)
    return int(found[1]) if found else None


def children(pid):
    with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
        return [int(word) for word in f.read().split()]


def processes(daemon):
    """(name, what the kernel says), of each thread and process."""
    main = daemon.proc.pid
    tasks = ["/proc/%d/task/%s" % (main, task) for task in os.listdir("/proc/%d/task" % main)]
    wardens = children(main)
    paths = ["/proc/%d" % pid for w in wardens for pid in [w] + children(w)]
    return [status(path) for path in tasks + paths]


def health(daemon):
    engine = Engine(daemon, "asks")
    says = engine.cmd("health")
    engine.close()
    return says


def need(daemon):
    says = health(daemon)
    if "seccomp" not in says["sandbox"]:
        raise Skip(says["sandbox_lacks"])


def every_process_is_filtered():
    config = "[transport]\ntransports = tcp\n"
    with Pair([Daemon(config), Daemon(config)], kinds=("vm", "vm")) as p:
        need(p.a)
        p.src.fill(SRC, TOKENS)
        open_push(p.prefill, p.decode, p.src, p.dst, 1, SRC, DST, TOKENS)
        p.decode.until(1, "recv", SUCCESS)
        p.dst.check(DST, TOKENS)
        seen = processes(p.a)
        names = " ".join(name for name, _ in seen)
        assert len(seen) > 6, seen
        for name in ("kvd-tcp", "kvd-warden", "kvd-gate:", "kvd-vm:"):
            assert name in names, names
        assert all(says == FILTERED for _, says in seen), seen
        warden, = children(p.a.proc.pid)
        below = filters("/proc/%d" % warden)
        assert all(below is None or filters("/proc/%d" % pid) == below + 1
                   for pid in children(warden)), below


def health_reports_active_sandbox():
    with Daemon() as d:
        need(d)
        says = health(d)
        assert "seccomp" in says["sandbox"], says
        assert ("landlock" in says["sandbox"]) == ("sandbox_lacks" not in says), says


def daemon_with_gpu_reads_other_processes():
    with Daemon("[transport]\ncuda_library = /nonexistent/libcuda.so\n") as d:
        need(d)
        d.expect("no CUDA driver")
        says = health(d)
        assert says["sandbox"] == "seccomp" and says["sandbox_lacks"], says
    with Daemon("[transport]\ngpus = off\ncuda_library = /nonexistent/libcuda.so\n") as d:
        says = health(d)
        assert says["sandbox"] == "seccomp landlock" or "GPU" not in says["sandbox_lacks"], says


def unwanted_sandbox_is_off_and_reported():
    with Daemon("[daemon]\nsandbox = no\n") as d:
        assert "sandbox is incomplete" in d.log(), d.log()
        says = health(d)
        assert says["sandbox"] == "" and says["sandbox_lacks"], says
        own, told = status("/proc/self"), processes(d)
        assert all(says == own[1] for _, says in told), (own, told)


def unit_allows_system_calls_of_the_daemon():
    """Two lists of one thing: of what the unit refuses nothing may be on the daemon's."""
    if not shutil.which("systemd-analyze"):
        raise Skip("systemd-analyze")
    with open(SOURCE) as f:
        table = f.read().split("sandbox_calls[] = {")[1]
    own = set(" ".join(re.findall(r'"([^"]*)"', table)).split())
    assert {"read", "sendmsg", "openat", "clone"} < own, own
    unit = filtered.allowed(filtered.settings()["SystemCallFilter"])
    known = set().union(*filtered.groups().values())
    assert not (own & known) - unit, sorted((own & known) - unit)
    assert {"seccomp", "landlock_restrict_self"} < unit, unit
    for call in ("execve", "ptrace", "process_vm_readv", "io_uring_setup", "bpf"):
        assert call not in own, call


if __name__ == "__main__":
    run([every_process_is_filtered,
         health_reports_active_sandbox,
         daemon_with_gpu_reads_other_processes,
         unwanted_sandbox_is_off_and_reported,
         unit_allows_system_calls_of_the_daemon])
