# SPDX-License-Identifier: Apache-2.0
"""The bystander of an attack: an engine of another user. It pings both daemons, one process
each, and a third transfers rooms from one daemon to the other and compares the bytes."""
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
import traceback

from kvd_engine import BYTES, SUCCESS, Cache, Engine, open_push

# users without a name; engines are in the daemons' group
KVD, MALLORY, ALICE, EVE = 64120, 64121, 64122, 64123
P99_S = 0.005
PING_EVERY_S, ROOM_S, WARM_S = 0.002, 20, 0.3
libc = ctypes.CDLL(None, use_errno=True)


def become(uid, groups=()):
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process started by that user


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class Figures:
    def __init__(self, attacked, other, rooms):
        self.attacked, self.rooms, self.lost = attacked["pings"], rooms["rooms"], []
        self.beside = other["pings"]
        self.worst = max(self.attacked + self.beside, default=0.0)
        self.p99, self.other_p99 = quantile(self.attacked, 0.99), quantile(self.beside, 0.99)
        for who, said in (("pings", attacked), ("pings of its peer", other), ("rooms", rooms)):
            if said["error"]:
                self.lost.append("%s of another user ended: %s" % (who, said["error"]))

    def late(self):
        return self.p99 > max(P99_S, 2 * self.other_p99)

    def __str__(self):
        return ("%d pings, p50 %.2f p99 %.2f max %.1f ms (of its peer: p99 %.2f max %.1f); "
                "%d rooms, p99 %.1f max %.1f ms, %s" % (
                    len(self.attacked), 1e3 * quantile(self.attacked, 0.5), 1e3 * self.p99,
                    1e3 * max(self.attacked, default=0), 1e3 * self.other_p99,
                    1e3 * max(self.beside, default=0), len(self.rooms),
                    1e3 * quantile(self.rooms, 0.99), 1e3 * max(self.rooms, default=0),
                    "lost: " + "; ".join(self.lost) if self.lost else "nothing lost"))


def last_line(why):
    return (traceback.format_exception_only(type(why), why)[-1].strip())[:200]


class Process:
    """work(said, stopped) as ALICE; said is a dict that is returned at the end."""

    stops = set()  # of all of them: a process that inherits one keeps its owner from ending

    def __init__(self, work, *args):
        self.out, out = os.pipe()
        stop, self.stop = os.pipe()
        self.stops.add(self.stop)
        self.pid = os.fork()
        if self.pid == 0:
            said = dict(pings=[], rooms=[], error="")
            try:
                os.close(self.out)
                while self.stops:
                    os.close(self.stops.pop())
                become(ALICE, [KVD])
                libc.prctl(1, signal.SIGKILL, 0, 0, 0)
                work(said, stop, lambda: os.write(out, b"!"), *args)
            except BaseException as why:
                said["error"] = last_line(why)
            with contextlib.suppress(OSError):
                os.write(out, b"!")
            with os.fdopen(out, "wb") as pipe:
                pipe.write(json.dumps(said).encode())
            os._exit(0)
        os.close(out)
        os.close(stop)
        os.read(self.out, 1)  # it has started

    def end(self):
        self.stops.discard(self.stop)
        os.close(self.stop)
        with os.fdopen(self.out, "rb") as pipe:
            text = pipe.read().lstrip(b"!")
        os.waitpid(self.pid, 0)
        return json.loads(text)


def has(fd, seconds):
    return bool(select.select([fd], [], [], seconds)[0])


def ping(said, stop, begun, path):
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    s.sendall(b'{"id":1,"cmd":"hello","proto":1,"client":"bystander"}\n')
    while b"\n" not in s.recv(65536):
        pass
    begun()
    while not has(stop, PING_EVERY_S):
        begin, text = time.monotonic(), b""
        s.sendall(b'{"id":2,"cmd":"ping"}\n')
        while not text.endswith(b"\n"):
            if not has(s.fileno(), 0.05) and has(stop, 0):
                break  # the duration of the ping so far counts
            if has(s.fileno(), 0):
                some = s.recv(65536)
                if not some:
                    raise ConnectionError("the daemon closed the connection")
                text += some
        said["pings"].append(time.monotonic() - begin)


def one_room(prefill, decode, src, dst, room):
    begin = time.monotonic()
    dst.mem[:] = bytes(BYTES)
    open_push(prefill, decode, src, dst, room, [1, 2], [5, 4], 30,
                      ticket=os.urandom(16).hex())
    decode.until(room, "recv", SUCCESS, ROOM_S)
    prefill.until(room, "send", SUCCESS, ROOM_S)
    took = time.monotonic() - begin
    dst.check([5, 4], 30)
    decode.cmd("room.close", room=str(room), role="recv")
    prefill.cmd("room.close", room=str(room), role="send")
    return took


class Place:
    """The part of a daemon that Engine uses."""

    def __init__(self, path):
        self.socket_path = path


def rooms(said, stop, begun, a, b):
    prefill, decode = Engine(Place(a), "bystander"), Engine(Place(b), "bystander")
    for engine in (prefill, decode):
        engine.sock.settimeout(ROOM_S)
    src, dst = Cache(prefill, name="beside"), Cache(decode, name="beside")
    src.fill([1, 2], 30)
    room = 1 << 50
    said["rooms"].append(one_room(prefill, decode, src, dst, room))
    said["rooms"].clear()
    begun()
    while not has(stop, 0.02):
        room += 1
        said["rooms"].append(one_room(prefill, decode, src, dst, room))


class Bystander:
    def __init__(self, house):
        a, b = (d.socket_path for d in house.daemons)
        self.processes = [Process(rooms, a, b), Process(ping, a), Process(ping, b)]
        select.select([], [], [], WARM_S)

    def end(self):
        said = [p.end() for p in self.processes]
        return Figures(said[1], said[2], said[0])
