#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Two real daemons asked for more than their caps, and flooded by clients and by
whoever reaches their ports. In every case another session's rooms go on in time (a
witness in a process of its own), the daemon's memory stays bounded while it lasts,
and afterwards its memory, descriptors and gauges are back. What a peer that speaks
the protocol can do is tests/unit/test_overload.c."""
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, need_fds, run  # noqa: E402
from kvd_engine import BYTES, Cache, Engine, FAILED, Refused, SUCCESS, open_push  # noqa: E402

CONFIG = """[control]
sessions = 256
session_regions = 12
session_pools = 5
client_queue = 2 MiB
[peer]
peers = 6
early_requests = 40
early_request_ttl = 5 s
[rooms]
rooms = 256
tombstones = 100
[transport]
transports = tcp
"""
ROOM_S = 5.0  # a witness' room, at worst: the machine may have much else to do
PLAIN = os.path.basename(BUILD) == "rel"  # sanitizers have memory of their own
MIB = 1 << 20
WARNS = ("connection refused", "connection closed", "bad frame", "refused a connection",
         "closed a connection")


class Witness:
    """Rooms of another pair of sessions, one after the other, in a process of its own."""

    def __init__(self, daemons):
        self.word_r, self.word_w = os.pipe()  # a byte: rest, another: go on; its end: stop
        self.out_r, self.out_w = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self.word_w)
                self.play(daemons)
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
            finally:
                os._exit(status)
        os.close(self.word_r)
        os.close(self.out_w)
        self.lines = os.fdopen(self.out_r)
        self.rooms, self.worst_s = 0, 0.0
        self.hear(3)

    def play(self, daemons):
        prefill, decode = (Engine(d, "witness") for d in daemons)
        src, dst = (Cache(e, name="witness") for e in (prefill, decode))
        src.fill([1, 2], 30)
        room = 1 << 50
        while self.shall_go_on():
            room += 1
            begin = time.monotonic()
            dst.mem[:] = bytes(BYTES)
            open_push(prefill, decode, src, dst, room, [1, 2], [5, 4], 30)
            decode.until(room, "recv", SUCCESS)
            prefill.until(room, "send", SUCCESS)
            took = time.monotonic() - begin
            dst.check([5, 4], 30)
            decode.cmd("room.close", room=str(room), role="recv")
            prefill.cmd("room.close", room=str(room), role="send")
            os.write(self.out_w, b"%.6f\n" % took)

    def shall_go_on(self):
        """In its process: False at the end. A witness that rests has no room."""
        if not select.select([self.word_r], [], [], 0.01)[0]:
            return True
        if not os.read(self.word_r, 1):
            return False
        os.write(self.out_w, b"resting\n")
        return bool(os.read(self.word_r, 1))

    def line(self):
        line = self.lines.readline()
        assert line, "the witness failed"
        if line != "resting\n":
            self.rooms += 1
            self.worst_s = max(self.worst_s, float(line))
        return line

    def hear(self, more):
        """Until that many more of its rooms have succeeded."""
        for _ in range(more):
            self.line()

    @contextlib.contextmanager
    def resting(self):
        os.write(self.word_w, b"r")
        while self.line() != "resting\n":
            pass
        yield
        os.write(self.word_w, b"g")

    def end(self):
        os.close(self.word_w)
        for line in self.lines:
            self.rooms += 1
            self.worst_s = max(self.worst_s, float(line))
        self.lines.close()
        assert os.waitpid(self.pid, 0)[1] == 0, "the witness failed"
        return self.rooms, self.worst_s


def proc_status(pid, name):
    with open("/proc/%d/status" % pid) as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name))


class Level:
    """What a daemon has, and how much of it at most since then."""

    def __init__(self, daemon):
        self.daemon, self.pid = daemon, daemon.proc.pid
        self.admin = Engine(daemon, "level")
        self.was = self.now()
        self.rss_kib = proc_status(self.pid, "VmRSS")
        with open("/proc/%d/clear_refs" % self.pid, "w") as f:
            f.write("5")  # VmHWM begins anew

    def now(self):
        stats = {m["name"]: int(m["value"]) for m in self.admin.cmd("stats")["metrics"]}
        held = {n: stats[n] for n in ("sessions", "regions", "pools", "rooms")}
        return dict(held, fds=len(os.listdir("/proc/%d/fd" % self.pid)))

    def peak_growth(self):
        return (proc_status(self.pid, "VmHWM") - self.rss_kib) << 10

    def check_back(self):
        end = time.monotonic() + DEADLINE_S
        while True:
            now = self.now()
            if all(now[k] <= self.was[k] for k in now):
                break
            assert time.monotonic() < end, "%s, before %s" % (now, self.was)
            select.select([], [], [], 0.05)
        self.admin.close()


@contextlib.contextmanager
def storm(memory_mib):
    """Two daemons, a witness on both, and bounds for the first."""
    need_fds(1024)
    with Daemon(CONFIG, name="a") as a, Daemon(CONFIG, name="b") as b:
        for words in WARNS:
            a.expect(words)
            b.expect(words)
        witness = Witness([a, b])
        with witness.resting():
            level = Level(a)
        yield a, b
        witness.hear(3)  # after the storm, too
        grown = level.peak_growth()
        with witness.resting():
            level.check_back()
        rooms, worst_s = witness.end()
        print("     %d rooms beside it, the slowest took %.0f ms; memory grew by %.1f MiB"
              % (rooms, 1e3 * worst_s, grown / MIB), flush=True)
        assert worst_s < ROOM_S, "a room beside it took %.1f s" % worst_s
        assert not PLAIN or grown < memory_mib * MIB, "memory grew by %d MiB" % (grown >> 20)


def names(message, *words):
    assert all(w in message for w in words), "'%s' does not name %s" % (message, words)


def connect(daemon):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(daemon.socket_path)  # blocking: waits while the backlog is full
    sock.settimeout(DEADLINE_S)
    return sock


def answers(sock, count):
    """That many lines of it."""
    with sock.makefile("rb") as lines:
        for _ in range(count):
            yield json.loads(lines.readline())


# ---- caps


def sessions_over_the_cap_are_refused():
    with storm(8) as (a, _):
        socks, refused = [], 0
        for _ in range(500):
            socks.append(connect(a))
        poller, ends = select.poll(), time.monotonic() + DEADLINE_S
        by_fd = {s.fileno(): s for s in socks}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while refused < 270:  # the last of them wait in the backlog
            assert time.monotonic() < ends, refused
            for fd, _ in poller.poll(100):
                line = json.loads(by_fd[fd].makefile().readline())
                names(line["error"]["message"], "sessions", "256")
                assert line["error"]["code"] == "ELIMIT", line
                poller.unregister(fd)
                refused += 1
        done = subprocess.run([BUILD + "/kvd-ctl", "-s", a.socket_path, "ping"],
                              capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, "another process is kept out: " + done.stderr
        for s in socks:
            s.close()


def rooms_regions_and_pools_over_the_cap_are_refused():
    with storm(32) as (a, b):
        one = Engine(a, "greedy")
        cache = Cache(one)
        opened = 0
        try:
            while True:
                one.cmd("room.open", room=str(opened), role="send", pool=cache.pool)
                opened += 1
        except Refused as why:
            assert why.code == "ELIMIT", why
            names(why.message, "rooms", "256")
        assert opened in (223, 224), opened  # the rest is for others: the witness
        for room in range(opened):
            one.cmd("room.abort", room=str(room))
            one.until(room, "send", FAILED)
            one.cmd("room.close", room=str(room))
        caches = [Cache(one, name="more%d" % i) for i in range(4)]
        names(one.refused("ELIMIT", "pool.register", name="x", layout=Cache.layout(0),
                          regions=[{"region": cache.region}]), "session_pools", "5")
        part = lambda i: dict(kind="vm", address=str(cache.address + 4096 * i),  # noqa: E731
                              length="4096")
        for i in range(7):
            one.cmd("region.register", **part(i))
        names(one.refused("ELIMIT", "region.register", **part(7)), "session_regions", "12")
        assert len(caches) == 4
        one.close()


def lists_over_the_cap_are_refused():
    """A session that is attached again has its number."""
    with storm(200) as (a, b):
        one, two = Engine(a, "greedy"), Engine(b, "other")
        mine = Cache(one)
        own = [s for s in two.cmd("session.list")["sessions"] if "secret" in s][0]
        numbers = {one.cmd("peer.attach", endpoint=two.endpoint, session=own["epoch"],
                           secret=own["secret"])["attach"] for _ in range(1100)}
        assert len(numbers) == 1
        rows = os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(rows, struct.pack("<4Q", mine.address, 64, 0, 1))
        flooded(one, dict(cmd="dlist.prep", fd=0, count=1), rows, 16384, "16384", "lists")
        os.close(rows)
        one.close()
        two.close()


def flooded(engine, request, fd, cap, *words):
    """The request with its descriptor, in batches that are not answered one by one: `cap`
    succeed, more are refused by name."""
    succeeded = done = 0
    line = json.dumps(dict(request, id=1)).encode() + b"\n"
    while done < cap + 50:
        batch = min(256, cap + 50 - done)
        for _ in range(batch):
            assert socket.send_fds(engine.sock, [line], [fd]) == len(line)
        for _ in range(batch):
            answer = json.loads(engine.lines.readline())
            done += 1
            if "error" not in answer:
                succeeded += 1
                continue
            assert answer["error"]["code"] == "ELIMIT", answer
            names(answer["error"]["message"], *words)
    assert succeeded == cap, "%d, the cap is %d" % (succeeded, cap)


def unread_notifications_are_refused():
    with storm(40) as (a, b):
        one, two = Engine(b, "talker"), Engine(a, "deaf")
        own = [s for s in two.cmd("session.list")["sessions"] if "secret" in s][0]
        peer = one.cmd("peer.attach", endpoint=two.endpoint, session=own["epoch"],
                       secret=own["secret"])["attach"]
        data = os.urandom(30000)
        dropped = lambda: [int(s["value"]) for m in two.cmd("stats")["metrics"]  # noqa: E731
                           if m["name"] == "notifications_total"
                           for s in m.get("series", []) if s["result"] == "dropped"]
        sent, end = 0, time.monotonic() + DEADLINE_S
        while not dropped():
            with contextlib.suppress(Refused):  # what waits for the peer is bounded, too
                one.notify(peer, data)
                sent += 1
            assert sent < 2000, "60 MB of notifications were kept"
            assert time.monotonic() < end, "%d were taken, and none was dropped" % sent
        got = two.cmd("notif.drain")["notifs"]
        assert got, "those before the cap are there"
        one.close()
        two.close()


def peers_over_the_cap_are_refused():
    with storm(16) as (a, b):
        one = Engine(a, "greedy")
        cache = Cache(one)
        nobody = ["tcp://127.0.0.%d:1" % (2 + i) for i in range(20)]
        names(one.refused("ELIMIT", "room.open", room="1", role="recv", pool=cache.pool,
                          sources=nobody), "peers", "6")
        one.cmd("peer.connect", endpoint=Engine(b, "x").endpoint)
        one.close()


def requests_without_room_are_refused():
    with storm(16) as (a, b):
        one, two = Engine(b, "receiver"), Engine(a, "sender")
        dst, src = Cache(one, name="early"), Cache(two, name="early")
        asked = []
        for room in range(60):
            asked.append(dict(cmd="room.open", room=str(room), role="recv", pool=dst.pool,
                              sources=[dict(endpoint=two.endpoint, pool="early")]))
            asked.append(dict(cmd="room.bind", room=str(room),
                              views={"kv": dict(pages=[room], tokens=[0, 10])}))
        # in one piece: the first must be there when the last comes, however slow we are
        one.sock.sendall(b"".join(json.dumps(dict(line, id=i)).encode() + b"\n"
                                  for i, line in enumerate(asked)))
        for line in asked:
            answer = json.loads(one.lines.readline())
            assert "error" not in answer, (line, answer)
        reasons = set()
        for room in range(60):
            _, error = one.until(room, "recv", FAILED)
            reasons.add(error["code"])
            if error["code"] == "ELIMIT":
                names(error["message"], "early_requests", "40")
            one.cmd("room.close", room=str(room))
        assert reasons == {"ELIMIT", "ETIMEOUT"}, reasons
        assert src
        one.close()
        two.close()


# ---- clients that flood


def client_never_reading_is_bounded():
    with storm(24) as (a, _):
        socks = [connect(a) for _ in range(8)]
        line = b'{"cmd":"hello","proto":1,"client":"deaf","id":1}\n' + \
               b'{"cmd":"config.show","id":2}\n' * 2000
        for s in socks:
            s.setblocking(False)
        sent, idle = [0] * len(socks), 0
        while idle < 20:  # until the daemon takes no more, or cuts them
            idle += 1
            for i, s in enumerate(socks):
                with contextlib.suppress(BlockingIOError, BrokenPipeError,
                                         ConnectionResetError):
                    n = s.send(line[sent[i] % len(line):])
                    sent[i] += n
                    idle = 0
            assert sum(sent) < 64 * MIB, "the daemon takes whatever comes"
            select.select([], [], [], 0.01)
        for s in socks:
            s.close()


def garbage_without_end_is_bounded():
    with storm(24) as (a, _):
        for junk in (os.urandom(1 * MIB), b"{" * MIB, b"\n" * MIB, b"x" * MIB + b"\n",
                     b'{"cmd":"' + b"a" * 60000 + b'"}\n', b"[[[[[[[[[[\n" * 50000):
            s = connect(a)
            s.settimeout(DEADLINE_S)

            def swallow(sock=s):
                with contextlib.suppress(OSError):
                    while sock.recv(65536):
                        pass
            reader = threading.Thread(target=swallow)
            reader.start()
            end = time.monotonic() + 2
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(12):
                    if time.monotonic() > end:
                        break
                    s.sendall(junk)
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            reader.join()
            s.close()


def commands_by_the_hundred_thousand_are_answered():
    with storm(24) as (a, _):
        count = 100000
        s = connect(a)
        text = b'{"cmd":"hello","proto":1,"client":"fast","id":0}\n' + b"".join(
            b'{"cmd":"ping","id":%d}\n' % (i + 1) for i in range(count))
        writer = threading.Thread(target=s.sendall, args=(text,))
        writer.start()
        for i, answer in enumerate(answers(s, count + 1)):
            assert answer["id"] == i and "error" not in answer, answer
        writer.join()
        s.close()


def sockets_by_the_thousand_are_bounded():
    with storm(16) as (a, _):
        for _ in range(4):
            socks = []
            for i in range(600):
                socks.append(connect(a))
                with contextlib.suppress(OSError):
                    socks[-1].send(b'{"cmd":"hel' if i % 2 else b"")
            for s in socks:
                s.close()


# ---- whoever reaches the ports


def ports(daemon):
    """The TCP ports that it listens on."""
    inodes = set()
    for fd in os.listdir("/proc/%d/fd" % daemon.proc.pid):
        with contextlib.suppress(OSError):
            link = os.readlink("/proc/%d/fd/%s" % (daemon.proc.pid, fd))
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    with open("/proc/net/tcp") as f:
        rows = [line.split() for line in f.readlines()[1:]]
    return [int(r[1].split(":")[1], 16) for r in rows if r[3] == "0A" and r[9] in inodes]


def unauthenticated_connections_are_bounded():
    with storm(48) as (a, _):
        doors = ports(a)
        assert len(doors) == 2, "control line and bytes: %s" % doors
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)
        for door in doors:
            for junk in (b"", greeting, greeting + b"\x02" + b"\xff" * 8, os.urandom(4096)):
                socks = []
                for _ in range(300):
                    s = socket.create_connection(("127.0.0.1", door), DEADLINE_S)
                    socks.append(s)
                    s.setblocking(False)
                    with contextlib.suppress(OSError):
                        s.send(junk)
                for s in socks:
                    s.close()


if __name__ == "__main__":
    run([sessions_over_the_cap_are_refused,
         rooms_regions_and_pools_over_the_cap_are_refused,
         lists_over_the_cap_are_refused,
         unread_notifications_are_refused,
         peers_over_the_cap_are_refused,
         requests_without_room_are_refused,
         client_never_reading_is_bounded,
         garbage_without_end_is_bounded,
         commands_by_the_hundred_thousand_are_answered,
         sockets_by_the_thousand_are_bounded,
         unauthenticated_connections_are_bounded])
