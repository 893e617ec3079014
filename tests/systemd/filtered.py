#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""filtered.py PROGRAM ARGUMENT…: a program under the system call filters of kvd@.service.

filtered.py --fold BUILD FOLDER: BUILD's programs by links in FOLDER, with a kvd that starts
under the filters.

What systemd makes of SystemCallFilter=, MemoryDenyWriteExecute=, RestrictRealtime=,
RestrictNamespaces= and RestrictAddressFamilies= is made here with libseccomp, as systemd does it: several filters,
of which a call has to pass all."""
import ctypes
import errno
import os
import socket
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
UNIT = os.path.join(HERE, "../../systemd/kvd@.service.in")
ALLOW, ERRNO = 0x7fff0000, 0x00050000
EQ, GT, MASKED_EQ = 4, 6, 7
PROT_WRITE, PROT_EXEC, SHM_EXEC = 2, 4, 0o100000
FIFO, RR, DEADLINE = 1, 2, 6
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000,
              0x40000000)  # CLONE_NEW…
FAMILIES = 64  # more than any kernel's


class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64),
                ("b", ctypes.c_uint64)]


class Filter:
    def __init__(self, library, otherwise):
        self.library = library
        library.seccomp_init.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(otherwise)))
        assert self.context, "seccomp_init"

    def add(self, action, call, *compares):
        number = self.library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return  # not this architecture's
        array = (Compare * max(len(compares), 1))(*(Compare(*c) for c in compares))
        status = self.library.seccomp_rule_add_array(
            self.context, ctypes.c_uint32(action), number, len(compares), array)
        assert status == 0, (call, status)

    def load(self):
        status = self.library.seccomp_load(self.context)
        assert status == 0, "seccomp_load: %s" % os.strerror(-status)


def settings():
    out = {}
    with open(UNIT) as f:
        for line in f:
            name, equals, value = line.strip().partition("=")
            if equals:
                out.setdefault(name, []).append(value)
    return out


def groups():
    """What is in each group, as this systemd has them."""
    listed = subprocess.run(["systemd-analyze", "syscall-filter"], check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    out, calls = {}, None
    for line in listed.splitlines():
        word = line.strip()
        if line.startswith("@"):
            calls = out[word] = []
        elif line.startswith("#"):
            calls = None  # calls of no group follow
        elif word and calls is not None and not word.startswith("#"):
            calls.append(word)
    return out


def calls_of(word, known):
    if not word.startswith("@"):
        return {word}
    return set().union(*(calls_of(w, known) for w in known[word]))


def allowed(lines):
    known = groups()
    calls = calls_of("@default", known)
    for line in lines:
        taken = set().union(*(calls_of(w, known) for w in line.lstrip("~").split()))
        calls = calls - taken if line.startswith("~") else calls | taken
    return calls


def load_filters():
    library = ctypes.CDLL("libseccomp.so.2")
    unit = settings()
    refuse = ERRNO | getattr(errno, unit["SystemCallErrorNumber"][0])
    arguments = Filter(library, ALLOW)
    if unit["MemoryDenyWriteExecute"] == ["yes"]:
        both = PROT_WRITE | PROT_EXEC
        arguments.add(ERRNO | errno.EPERM, "mmap", (2, MASKED_EQ, both, both))
        for call in ("mprotect", "pkey_mprotect"):
            arguments.add(ERRNO | errno.EPERM, call, (2, MASKED_EQ, PROT_EXEC, PROT_EXEC))
        arguments.add(ERRNO | errno.EPERM, "shmat", (2, MASKED_EQ, SHM_EXEC, SHM_EXEC))
    if unit["RestrictRealtime"] == ["yes"]:
        for policy in (FIFO, RR, DEADLINE):
            arguments.add(ERRNO | errno.EPERM, "sched_setscheduler", (1, EQ, policy, 0))
    if unit["RestrictNamespaces"] == ["yes"]:
        for flag in NAMESPACES:
            for call in ("clone", "unshare"):
                arguments.add(ERRNO | errno.EPERM, call, (0, MASKED_EQ, flag, flag))
        arguments.add(ERRNO | errno.EPERM, "setns")
        arguments.add(ERRNO | errno.ENOSYS, "clone3")  # its flags lie in memory
    families = {int(getattr(socket, f)) for f in unit["RestrictAddressFamilies"][0].split()}
    for family in set(range(FAMILIES)) - families:
        arguments.add(ERRNO | errno.EAFNOSUPPORT, "socket", (0, EQ, family, 0))
    arguments.add(ERRNO | errno.EAFNOSUPPORT, "socket", (0, GT, FAMILIES - 1, 0))
    names = Filter(library, refuse)
    for call in sorted(allowed(unit["SystemCallFilter"])):
        names.add(ALLOW, call)
    arguments.load()
    names.load()


def fold(build, folder):
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(build):
        if name != "kvd" and not os.path.lexists(os.path.join(folder, name)):
            os.symlink(os.path.join(build, name), os.path.join(folder, name))
    with open(os.path.join(folder, "kvd"), "w") as script:
        script.write('#!/bin/sh\nexec %s %s/kvd "$@"\n' % (os.path.abspath(__file__), build))
    os.chmod(os.path.join(folder, "kvd"), 0o755)


def main():
    if sys.argv[1] == "--fold":
        fold(os.path.abspath(sys.argv[2]), sys.argv[3])
        return
    load_filters()
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
