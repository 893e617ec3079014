# SPDX-License-Identifier: Apache-2.0
"""An engine for integration tests: the public control socket, spoken by hand
(JSON lines, descriptors by SCM_RIGHTS), and a small cache with a pattern.

    with Daemon(...) as a, Daemon(...) as b:
        prefill, decode = Engine(a, "prefill"), Engine(b, "decode")
        src, dst = Cache(prefill), Cache(decode)
"""
import base64
import ctypes
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time

from kvd_daemon import DEADLINE_S

LAYERS, PAGES, PAGE_TOKENS, HEADS, HEAD_BYTES = 4, 64, 16, 4, 64
TOKEN = HEADS * HEAD_BYTES
FIELD = PAGES * PAGE_TOKENS * TOKEN
BYTES = 2 * LAYERS * FIELD
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
# of proto/kvd_ring.h; slots from the first one on are the engine's own
RING_XFER, RING_RELEASE, RING_NOTIFY, RING_ATTEND = 2, 5, 6, 24
RING_FIND, RING_HOLD, RING_HOLD_REMOTE = 16, 17, 21
WRITES, POSTS, NOTIFIES = 1, 2, 4
RING_IDS, FIRST_SLOT = 1 << 48, 65536
RING_HEADER, RING_ENTRY = 4096, struct.Struct("<IIIIQQQIIIIQ")
PAGE_SLOT = struct.Struct("<QQQQQQQQ")  # of proto/kvd_status.h, behind a header of its size


def ring_entry(op, flags=0, slot=0, a=0, b=0, n0=0, n1=0, size=0, data=b"", gen=1):
    """Arguments of xfer.submit, for an entry with its payload."""
    entry = RING_ENTRY.pack(op, flags, slot, slot and gen, a, b, 0, n0, n1, size, 0, 0)
    return dict(entry=base64.b64encode(entry).decode(), data=base64.b64encode(data).decode())


class Refused(Exception):
    def __init__(self, error):
        super().__init__("%(code)s: %(message)s" % error)
        self.code, self.message = error["code"], error["message"]


class Engine:
    def __init__(self, daemon, name, path=None):
        self.daemon, self.name, self.last, self.slots = daemon, name, 0, 0
        self.lock = threading.Lock()  # an answer is of who asked
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(path or daemon.socket_path)
        self.lines = self.sock.makefile("r")
        self.sock.sendall(json.dumps(dict(id=0, cmd="hello", proto=1, client=name)).encode() + b"\n")
        text, fds, _, _ = socket.recv_fds(self.sock, 65536, 1)
        self.info, self.page = json.loads(text or "{}"), fds[0] if fds else -1
        if self.page < 0:
            raise Refused(self.info.get("error", dict(code="ELOST", message="no answer")))

    @property
    def endpoint(self):
        return self.info["endpoint"]

    def cmd(self, cmd, fds=(), **args):
        with self.lock:
            self.last += 1
            line = json.dumps(dict(args, cmd=cmd, id=self.last)).encode() + b"\n"
            if fds:
                sent = socket.send_fds(self.sock, [line], list(fds))
                line = line[sent:]
            self.sock.sendall(line)
            answer = json.loads(self.lines.readline())
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def refused(self, code, cmd, **args):
        try:
            answer = self.cmd(cmd, **args)
        except Refused as why:
            assert why.code == code, "%s instead of %s" % (why, code)
            return why.message
        raise AssertionError("%s was not refused: %s" % (cmd, answer))

    def prep(self, rows, **args):
        """dlist.prep of rows (address, bytes[, stride, count])."""
        fd = os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, b"".join(struct.pack("<4Q", *row, *(0, 1)[len(row) - 2:]) for row in rows))
            return self.cmd("dlist.prep", fds=[fd], fd=0, count=len(rows), **args)
        finally:
            os.close(fd)

    def slot(self):
        self.slots += 1
        return FIRST_SLOT + self.slots - 1

    def xfer(self, op, local, remote, local_index=(), remote_index=(), notif=None):
        """Start a transfer in a new slot, of these rows (none: of all): its number."""
        slot = self.slot()
        flags = POSTS | (op == "write" and WRITES) | (notif is not None and NOTIFIES)
        picks = struct.pack("<%dI" % (len(local_index) + len(remote_index)), *local_index,
                            *remote_index)
        self.cmd("xfer.submit", **ring_entry(
            RING_XFER, flags, slot, local, remote, len(local_index), len(remote_index),
            len(notif or b""), picks + (notif or b"")))
        return RING_IDS + slot

    def find(self, space, ids):
        """How many of them are there, from the first on."""
        return self.ids_entry(RING_FIND, space, ids)["chunks"]

    def hold(self, space, ids, lease_ms, remote_ms=0):
        return self.ids_entry(RING_HOLD_REMOTE if remote_ms else RING_HOLD, space, ids,
                              os.urandom(16), lease_ms, remote_ms)

    def join(self, space, secret, lease_ms):
        return self.ids_entry(RING_HOLD, space, [], secret, lease_ms)

    def ids_entry(self, op, space, ids, secret=b"", lease_ms=0, remote_ms=0):
        slot, data = self.slot(), secret + b"".join(map(bytes.fromhex, ids))
        self.cmd("xfer.submit", **ring_entry(op, slot=slot, a=space, b=lease_ms, n0=len(ids),
                                             n1=remote_ms, size=len(data), data=data))
        state, end = None, time.monotonic() + DEADLINE_S
        while state not in (FAILED, SUCCESS):
            assert time.monotonic() < end, "no result"
            said = PAGE_SLOT.unpack(os.pread(self.page, PAGE_SLOT.size,
                                             PAGE_SLOT.size * (1 + slot)))
            state = said[0] >> 32 & 0xff if said[0] & 0xffffffff else None
        if state == FAILED:
            self.cmd("xfer.state", xfer=RING_IDS + slot)  # raises the reason
        return dict(hold=RING_IDS + slot, secret=secret, chunks=said[4],
                    remote=said[7] & 0xffffffff)

    def release(self, hold):
        self.cmd("xfer.submit", **ring_entry(RING_RELEASE, a=hold))

    def notify(self, attach, data):
        self.cmd("xfer.submit", **ring_entry(RING_NOTIFY, a=attach, size=len(data), data=data))

    def state(self, room, role):
        one = self.cmd("room.poll", rooms=[{"room": str(room), "role": role}])["rooms"][0]
        return one["state"], one.get("error"), one

    def until(self, room, role, state, deadline_s=DEADLINE_S):
        """Poll until the state; returns the seconds that it took."""
        begin = time.monotonic()
        while True:
            now, error, one = self.state(room, role)
            if now == state:
                return time.monotonic() - begin, error
            if time.monotonic() - begin > deadline_s or now in (FAILED, SUCCESS):
                raise AssertionError("%s %s: %s instead of %d" % (role, room, one, state))

    def acknowledged(self, room, deadline_s=DEADLINE_S):
        """Until every source's room knows of this recv room: it will say why it ends."""
        end = time.monotonic() + deadline_s
        while any(p["generation"] == "0" for p in
                  self.cmd("room.show", room=str(room), role="recv")["peers"]):
            assert time.monotonic() < end, "a source did not answer"

    def close(self):
        self.lines.close()
        self.sock.close()
        if self.page >= 0:
            os.close(self.page)
        self.page = -1


CYCLE = bytes(range(1, 252)) * (TOKEN // 251 + 2)


class Ring:
    """An engine's submission ring, written by hand."""

    def __init__(self, engine, entries=4096):
        self.engine = engine
        engine.sock.sendall(b'{"id":0,"cmd":"session.share","entries":%d}\n' % entries)
        text, fds, _, _ = socket.recv_fds(engine.sock, 65536, 3)
        told = json.loads(text)
        self.first, self.count, self.entries = told["first_slot"], told["slots"], entries
        self.shared = mmap.mmap(fds[0], RING_HEADER + entries * RING_ENTRY.size)
        self.arena = mmap.mmap(fds[1], told["arena_bytes"])
        self.event, self.tail = fds[2], 0
        os.close(fds[0])
        os.close(fds[1])

    def close(self):
        self.shared.close()
        self.arena.close()
        os.close(self.event)

    def give(self, packed):
        """Entries, as many as have room; taken in order."""
        for at in range(0, len(packed), RING_ENTRY.size):
            to = RING_HEADER + self.tail % self.entries * RING_ENTRY.size
            self.shared[to:to + RING_ENTRY.size] = packed[at:at + RING_ENTRY.size]
            self.tail += 1
        struct.pack_into("<Q", self.shared, 64, self.tail)
        os.write(self.event, struct.pack("<Q", 1))

    def all_taken(self):
        return struct.unpack_from("<Q", self.shared, 128)[0] == self.tail


def pattern(token, layer, field):
    """The bytes of one token in one field: 1 to 251 and again, from a number of its own."""
    at = (1 + token * 7 + layer * 31 + field * 17) % 251
    return CYCLE[at:at + TOKEN]


def populated(fd, length):
    """Mapped, with every page there: a daemon takes no memory with holes. Each is written:
    reclaim may take away a page that was only read."""
    memory = mmap.mmap(fd, length)
    memory[::mmap.PAGESIZE] = memory[::mmap.PAGESIZE]
    return memory


def register(engine, fds=(), **args):
    """As libkvd does: with /proc/self/statm."""
    with open("/proc/self/statm") as statm:
        return engine.cmd("region.register", fds=[*fds, statm.fileno()], statm=len(fds), **args)


class Cache:
    """One pool "kv": [layer][k, v][page][token][head], one buffer."""

    def __init__(self, engine, kind="memfd", name="kv", rank=0):
        self.engine, self.name = engine, name
        if kind in ("memfd", "huge"):
            fd = os.memfd_create("cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING |
                                 (os.MFD_HUGETLB if kind == "huge" else 0))
            os.ftruncate(fd, BYTES)
            self.fd = os.dup(fd) if kind == "huge" else -1
            self.mem = populated(fd, BYTES)
            args = dict(kind="memfd", fd=0, length=BYTES, fds=[fd])
        elif kind == "shm":
            self.path = "kvd-test-" + secrets.token_hex(8)
            fd = os.open("/dev/shm/" + self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(fd, BYTES)
            self.mem = populated(fd, BYTES)
            args = dict(kind="shm", shm_name="/" + self.path, length=BYTES)
        elif kind in ("cuda_ipc", "cuda_vmm"):
            from fake_gpu import Gpu
            gpu = Gpu()
            self.address, args, self.mem = (gpu.ipc if kind == "cuda_ipc" else gpu.vmm)(BYTES)
            args["length"], fd = BYTES, args.get("fds", [-1])[0]
        else:
            fd = -1
            self.mem = mmap.mmap(-1, BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # several daemons read it, and no root is asked: PR_SET_PTRACER, _ANY
            ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)
            args = dict(kind="vm", length=BYTES)
        if not kind.startswith("cuda"):
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mem))
        args["address"] = str(self.address)
        try:
            self.region = register(engine, **args)["region"]
        finally:
            if fd >= 0:
                os.close(fd)
            if kind == "shm":
                os.unlink("/dev/shm/" + self.path)
        self.pool = engine.cmd("pool.register", name=name, layout=self.layout(rank),
                               regions=[{"region": self.region}])["pool"]

    @staticmethod
    def layout(rank):
        def field(name, index):
            return dict(name=name, buffer=0, offset=index * FIELD,
                        page_stride=PAGE_TOKENS * TOKEN, token_stride=TOKEN,
                        unit_stride=HEAD_BYTES, unit_bytes=HEAD_BYTES, first_unit=0,
                        units=HEADS, total_units=HEADS)
        layers = [dict(layer=n, fields=[field("k", 2 * n), field("v", 2 * n + 1)])
                  for n in range(LAYERS)]
        return dict(rank=rank, buffers=[BYTES],
                    views={"kv": dict(page_tokens=PAGE_TOKENS, pages=PAGES, layers=layers)})

    def each(self, pages, tokens):
        for layer in range(LAYERS):
            for field in range(2):
                for t in range(tokens):
                    at = (2 * layer + field) * FIELD + \
                        (pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS) * TOKEN
                    yield at, pattern(t, layer, field)

    def fill(self, pages, tokens):
        for at, row in self.each(pages, tokens):
            self.mem[at:at + TOKEN] = row

    def check(self, pages, tokens):
        """All tokens arrived, and nothing else was touched."""
        wanted = bytearray(BYTES)
        for at, row in self.each(pages, tokens):
            wanted[at:at + TOKEN] = row
        assert self.mem[:BYTES] == bytes(wanted), "bytes differ"


class Pair:
    """Two daemons, an engine with a cache at each."""

    def __init__(self, daemons, names=("prefill", "decode"), kinds=("memfd", "memfd")):
        self.daemons, self.names, self.kinds = daemons, names, kinds

    def __enter__(self):
        self.a, self.b = [d.__enter__() for d in self.daemons]
        self.prefill, self.decode = map(Engine, self.daemons, self.names)
        self.src, self.dst = map(Cache, (self.prefill, self.decode), self.kinds)
        return self

    def __exit__(self, *exc):
        self.prefill.close()
        self.decode.close()
        for d in self.daemons:
            d.__exit__(*exc)


def open_push(prefill, decode, src, dst, room, src_pages, dst_pages, tokens, send=True,
              **more):
    view = lambda pages: {"kv": dict(pages=pages, tokens=[0, tokens])}  # noqa: E731
    prefill.cmd("room.open", room=str(room), role="send", pool=src.pool, **more)
    decode.cmd("room.open", room=str(room), role="recv", pool=dst.pool,
               sources=[dict(endpoint=prefill.endpoint, pool=src.name)], **more)
    decode.cmd("room.bind", room=str(room), views=view(dst_pages))
    prefill.until(room, "send", WAITING)
    if send:
        prefill.cmd("room.send", room=str(room), seq=0, last=True, views=view(src_pages))


def open_pull(prefill, decode, src, dst, room, src_pages, dst_pages, tokens, **more):
    view = lambda pages: {"kv": dict(pages=pages, tokens=[0, tokens])}  # noqa: E731
    prefill.cmd("room.open", room=str(room), role="offer", pool=src.pool,
                views=view(src_pages), **more)
    decode.cmd("room.open", room=str(room), role="pull", pool=dst.pool,
               sources=[prefill.endpoint], views=view(dst_pages), **more)
