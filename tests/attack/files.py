#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by files: the run directory, keys, the unit, /proc."""
import contextlib
import fcntl
import os
import stat

import rig
from rig import STRANGER, Engine, Skip, attack
from bystander import KVD, become, libc

PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17


@attack("V12", "nobody but the daemon's user holds its lock", by=STRANGER, quick=True)
def lock_held_by_a_stranger(house):
    try:
        fd = os.open(house.a.lock_path, os.O_RDONLY)
    except PermissionError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "opened %s: a flock() that waits there outlives the daemon" % house.a.lock_path


@attack("V13", "a process of the daemon's own user reads neither its memory nor its keys there",
        by=rig.ROOT, quick=True)
def daemon_read_by_its_own_user(house):
    become(KVD)
    pid, got = house.a.proc.pid, []
    for path in ("mem", "environ", "fd", "maps", "io"):
        try:
            path = "/proc/%d/%s" % (pid, path)
            os.listdir(path) if path.endswith("fd") else open(path, "rb").close()
            got.append(path)
        except PermissionError:
            pass
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0:
        libc.ptrace(PTRACE_DETACH, pid, None, None)
        got.append("ptrace")
    return "of use to its user: " + ", ".join(got) if got else None


@attack("V13", "what the daemon makes is its own, whatever the umask", by=rig.ROOT, quick=True,
        keyed=True)
def files_that_others_may_use(house):
    Engine(house.a, "watch")
    wide = []
    for d in house.daemons:
        for folder, names, files in os.walk(d.run_dir):
            for name in files + names:
                path = os.path.join(folder, name)
                mode = os.lstat(path).st_mode
                most = 0o660 if stat.S_ISSOCK(mode) else 0o755 if stat.S_ISDIR(mode) else 0o644
                if name.endswith((".lock", ".key")):
                    most = 0o600
                if stat.S_IMODE(mode) & ~most:
                    wide.append("%s %o" % (path, stat.S_IMODE(mode)))
    return "; ".join(wide) if wide else None


@attack("V13", "the status page and the ring are nobody else's to open", quick=True,
        by=rig.ROOT)
def pages_opened_through_proc(house):
    pid = house.a.proc.pid
    fds = [os.readlink("/proc/%d/fd/%s" % (pid, n)) for n in os.listdir("/proc/%d/fd" % pid)
           if os.path.islink("/proc/%d/fd/%s" % (pid, n))]
    if not any("memfd:" in name for name in fds):
        raise Skip("a daemon with status pages")
    become(rig.MALLORY, [KVD])
    with contextlib.suppress(PermissionError):
        os.listdir("/proc/%d/fd" % pid)
        return "an engine's user lists the daemon's descriptors"
    return None


if __name__ == "__main__":
    rig.main("files")
