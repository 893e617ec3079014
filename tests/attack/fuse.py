# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system by hand (/dev/fuse, as root, in its own mount namespace): one file, whose
server answers until it is silenced. Struct: linux/fuse.h."""
import contextlib
import os
import select
import signal
import struct

from kvd_daemon import Skip
from bystander import libc

CLONE_NEWNS, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x20000, 2, 4, 0x4000, 0x40000
LOOKUP, GETATTR, OPEN, READ, STATFS, FLUSH, INIT, OPENDIR, CREATE = 1, 3, 14, 15, 17, 25, 26, 27, 35
FORGETS = (2, 42)  # have no answer
BYTES = 1 << 20


class Silent:
    """Mounted at `folder` for this process and its children. `silent`: opcodes that are never
    answered after quiet() was called. The server is a process that has no file of it open: with
    end(), or when the attack's process group is killed, the kernel wakes waiting processes."""

    bytes = BYTES

    def __init__(self, folder, silent):
        self.silent, self.told = set(silent), False
        if libc.unshare(CLONE_NEWNS) != 0:
            raise Skip("a mount namespace (CAP_SYS_ADMIN)")
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        try:
            self.dev = os.open("/dev/fuse", os.O_RDWR)
        except OSError as why:
            raise Skip("/dev/fuse: %s" % why)
        os.mkdir(folder)
        data = "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % self.dev
        if libc.mount(b"attack", folder.encode(), b"fuse", MS_NOSUID | MS_NODEV, data.encode()):
            raise Skip("to mount FUSE")
        self.path = folder + "/file"
        self.hear, self.tell = os.pipe()
        self.server = os.fork()
        if self.server == 0:
            os.close(self.tell)
            self.serve()
            os._exit(0)
        os.close(self.dev)
        os.close(self.hear)

    def quiet(self):
        os.write(self.tell, b"q")

    def end(self):
        os.kill(self.server, signal.SIGKILL)
        os.waitpid(self.server, 0)

    @staticmethod
    def attr(node):
        mode = 0o40777 if node == 1 else 0o100666
        return struct.pack("<QQQQQQIIIIIIIIII", node, BYTES, BYTES // 512, 0, 0, 0, 0, 0, 0,
                           mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, op, node):
        if op == INIT:
            return struct.pack("<IIIIHHIIHHI", 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, 0) + \
                bytes(28)
        if op == LOOKUP:
            return struct.pack("<QQQQII", 2, 0, 3600, 3600, 0, 0) + self.attr(2)
        if op == GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + self.attr(node)
        if op in (OPEN, OPENDIR):
            return struct.pack("<QII", 1, 0, 0)
        if op == READ:
            return bytes(4096)
        return b""

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                if self.hear in select.select([self.dev, self.hear], [], [])[0]:
                    self.told = bool(os.read(self.hear, 1))
                    continue
                asked = os.read(self.dev, 1 << 17)
                _, op, unique, node = struct.unpack_from("<IIQQ", asked)
                if op in (self.silent if self.told else ()) or op in FORGETS:
                    continue
                said = self.answer(op, node)
                os.write(self.dev, struct.pack("<IiQ", 16 + len(said), 0, unique) + said)
