#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What holds a daemon's loop: for each load the longest turn of both daemons.

bench_turns.py [--stacks] [WORD ...]

Each load has two fresh daemons of one run dir and engines that speak to their
sockets by hand. A turn is told by what its thread had a core for (stats,
loop.cpu_us): no turn shall be over 200 us. By the clock it may be longer: others had the
core meanwhile. A thread's time includes what the machine does meanwhile (interrupts,
pauses by its host that it does not report). So the control is a thread without a daemon
(machine_turns.c), measured before and after the loads: the last line compares the turns
over the limit of all loads with those of the machine itself in as much CPU time, and the
daemons should have no more. --stacks preloads both daemons with
long-turns.so, which tells where they were after each 200 us of a turn (it costs
some time itself). Words choose loads by name. KVD_BUILD names the build folder.
"""
import argparse
import array
import bisect
import collections
import contextlib
import glob
import json
import mmap
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "lib"), os.path.join(HERE, "..", "metrics")]
from bench_parts import used_s  # noqa: E402
from bench_report import figure  # noqa: E402
from kvd_daemon import BUILD, Daemon  # noqa: E402
from kvd_engine import (Engine, FAILED, RING_ATTEND, RING_ENTRY, RING_NOTIFY, Refused,  # noqa: E402
                        Ring, SUCCESS, WAITING, populated, ring_entry)
from rig import UnixConnection  # noqa: E402

ROOMS = 10000
LIMIT_US = 200
DEADLINE_S = 120
SCRAPES, SCRAPE_S = 25, 0.2
STACKS_TOLD = 8
MACHINE_S = 1
STACK_FRAMES = 9


class Loader(Engine):
    """An engine that sends thousands of lines before it reads the first answer."""

    def many(self, cmd, all_args):
        """Answers, in order; every one must be no error."""
        first = self.last + 1
        lines = []
        for args in all_args:
            self.last += 1
            lines.append(json.dumps(dict(args, cmd=cmd, id=self.last)))
        data = ("\n".join(lines) + "\n").encode()
        sender = threading.Thread(target=self.sock.sendall, args=(data,))
        self.sock.settimeout(DEADLINE_S)
        sender.start()
        answers = {}
        while len(answers) < len(lines):
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise Refused(answer["error"])
            answers[answer["id"]] = answer
        sender.join()
        return [answers[first + i] for i in range(len(lines))]

    def pool_of(self, layout, nbytes, name="kv", regions=1):
        """A region of `nbytes` and a pool of it, all buffers in it."""
        fd = os.memfd_create("cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            self.mem = populated(fd, nbytes)
            region = self.cmd("region.register", kind="memfd", fd=0, length=str(nbytes),
                              fds=[fd])["region"]
        finally:
            os.close(fd)
        return self.cmd("pool.register", name=name, layout=layout,
                        regions=[{"region": region}] * regions)["pool"]

    def until_all(self, rooms, role, state):
        """Until all of them are in that state (FAILED, SUCCESS: are ended)."""
        left, end = set(map(str, rooms)), time.monotonic() + DEADLINE_S
        since = "0"
        while left:
            assert time.monotonic() < end, "%d rooms are not %d" % (len(left), state)
            said = self.cmd("room.poll", since=since)
            since = said["version"]
            for one in said["rooms"]:
                if one["role"] == role and one["state"] == state:
                    left.discard(one["room"])
            if left:
                select.select([], [], [], 0.02)


def flat(pages, page_bytes, layers=1, buffers=1):
    """One field a layer, a page in one piece, layers spread over the buffers."""
    share = layers // buffers
    size = pages * page_bytes
    fields = [dict(layer=n, fields=[dict(
        name="k", buffer=n // share, offset=n % share * size, page_stride=page_bytes,
        token_stride=page_bytes, unit_stride=page_bytes, unit_bytes=page_bytes, first_unit=0,
        units=1, total_units=1)]) for n in range(layers)]
    return dict(rank=0, buffers=[size * share] * buffers,
                views={"kv": dict(page_tokens=1, pages=pages, layers=fields)})


def heads(pages, first, units, total, hnd, tokens=16, head_bytes=64):
    """Attention of `units` of `total` heads, in either order."""
    page = tokens * units * head_bytes
    token, unit = (head_bytes, tokens * head_bytes) if hnd else (units * head_bytes, head_bytes)
    return dict(rank=first // units, buffers=[pages * page], views={"kv": dict(
        page_tokens=tokens, pages=pages, layers=[dict(layer=0, fields=[dict(
            name="k", buffer=0, offset=0, page_stride=page, token_stride=token,
            unit_stride=unit, unit_bytes=head_bytes, first_unit=first, units=units,
            total_units=total)])])})


class World:
    def __init__(self, transport, stacks, more=""):
        self.stack = contextlib.ExitStack()
        self.dir = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-turns-"))
        env = dict(LD_PRELOAD=BUILD + "/long-turns.so",
                   KVD_LONG_TURNS=self.dir + "/turns") if stacks else {}
        config = "log_level = error\n%s[transport]\ntransports = %s\n" % (
            "sandbox = no\n" if stacks else "", transport)
        self.daemons, self.watchers = [], []
        for name in ("prefill", "decode"):
            words = dict(dir=self.dir, name=name, other=self.watchers[0].endpoint
                         if self.watchers else "tcp://127.0.0.1:1")
            self.daemons.append(Daemon(config + more.format(**words), run_dir=self.dir,
                                       name=name, env=env).start())
            self.daemons[-1].wait_ready()
            self.watchers.append(Loader(self.daemons[-1], "watcher"))
        self.prefill, self.decode = (Loader(daemon, daemon.name) for daemon in self.daemons)
        self.alive = [True, True]
        self.note = ""

    def pools(self, src, dst=None, regions=1):
        size = lambda layout: sum(layout["buffers"]) // regions  # noqa: E731
        dst = dst or src
        self.src = self.prefill.pool_of(src, size(src), regions=regions)
        self.dst = self.decode.pool_of(dst, size(dst), regions=regions)

    def acquainted(self):
        """The daemons know each other before it is measured."""
        self.decode.cmd("peer.connect", endpoint=self.prefill.endpoint)

    def open(self, rooms, both=True, **timeouts):
        args = dict(timeouts=timeouts) if timeouts else {}
        self.prefill.many("room.open", [dict(args, room=str(n), role="send", pool=self.src)
                                        for n in rooms])
        if both:
            self.decode.many("room.open", [dict(
                args, room=str(n), role="recv", pool=self.dst,
                sources=[self.prefill.endpoint]) for n in rooms])

    def push(self, room, src_pages, dst_pages, tokens):
        view = lambda pages: {"kv": dict(pages=pages, tokens=[0, tokens])}  # noqa: E731
        self.open([room])
        self.decode.cmd("room.bind", room=str(room), views=view(dst_pages))
        self.prefill.until(room, "send", WAITING)
        self.prefill.cmd("room.send", room=str(room), seq=0, last=True, views=view(src_pages))
        self.decode.until(room, "recv", SUCCESS, DEADLINE_S)
        self.prefill.until(room, "send", SUCCESS, DEADLINE_S)

    def loops_s(self):
        """CPU time of the loops' threads, of the daemons that live."""
        ns = 0
        for daemon, alive in zip(self.daemons, self.alive):
            if alive:
                with open("/proc/%d/task/%d/schedstat" % ((daemon.proc.pid,) * 2)) as f:
                    ns += int(f.read().split()[0])
        return ns / 1e9

    def turns(self):
        """Of the daemons that live: all turns, those over the limit, by bucket of what
        they had a core for, by bucket of the clock."""
        said = []
        for watcher, alive in zip(self.watchers, self.alive):
            if alive:
                stats = watcher.cmd("stats")
                metrics = {row["name"]: row["value"] for row in stats["metrics"]}
                said.append((metrics["loop_iterations_total"], metrics["loop_slow_iterations_total"],
                             stats["loop"]["cpu_us"]["buckets"],
                             stats["loop"]["busy_us"]["buckets"]))
        return said

    def forget_stacks(self):
        for path in glob.glob(self.dir + "/turns.*"):
            os.truncate(path, 0)

    def stacks(self):
        """[(us, names of frames)] of both daemons' long turns."""
        found = []
        for path in glob.glob(self.dir + "/turns.*"):
            with open(path) as lines:
                text = lines.read()
            for part in re.split(r"^at ", text, flags=re.M)[1:]:
                frames = re.findall(r"^(\S+?)\(([^()\n]*)\)\[0x[0-9a-f]+\]$", part, re.M)
                found.append((int(part.split()[0]), frames))
        return found

    def close(self):
        for daemon, alive in zip(self.daemons, self.alive):
            daemon.proc.send_signal(signal.SIGTERM)
            daemon.wait(DEADLINE_S)
        self.stack.close()


# ---- loads: what stands before `yield` is not measured ----

def nothing(world):
    """The least of a daemon: turns that only answer a poll of no room."""
    yield
    for _ in range(ROOMS):
        for engine in (world.prefill, world.decode):
            assert engine.cmd("room.poll", rooms=[])["rooms"] == []


def open_many(world):
    world.pools(flat(64, 4096))
    world.acquainted()
    yield
    world.open(range(ROOMS))


def bind_many(world):
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    yield
    world.decode.many("room.bind", [dict(room=str(n), views={"kv": dict(pages=[n % 64])})
                                    for n in range(ROOMS)])
    world.prefill.until_all(range(ROOMS), "send", WAITING)
    world.prefill.many("room.send", [dict(room=str(n), seq=0, last=True,
                                          views={"kv": dict(pages=[n % 64])})
                                     for n in range(ROOMS)])
    world.decode.until_all(range(ROOMS), "recv", SUCCESS)
    world.prefill.until_all(range(ROOMS), "send", SUCCESS)
    world.decode.many("room.close", [dict(room=str(n)) for n in range(ROOMS)])
    world.prefill.many("room.close", [dict(room=str(n)) for n in range(ROOMS)])


def look_at_many(world):
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    yield
    numbers = [str(n) for n in range(ROOMS)]
    for _ in range(5):
        assert len(world.prefill.cmd("room.poll", rooms=numbers)["rooms"]) == ROOMS
        assert len(world.prefill.cmd("room.poll", since="0")["rooms"]) == ROOMS
        assert len(world.prefill.cmd("room.list", limit=65536)["rooms"]) == ROOMS
        assert world.prefill.cmd("room.list", limit=10, all=True)["total"] >= ROOMS
        for cmd in ("session.list", "pool.list", "region.list", "peer.list", "health", "help",
                    "stats", "config.show"):
            world.prefill.cmd(cmd)


def abort_many(world):
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    yield
    world.prefill.many("room.abort", [dict(room=str(n)) for n in range(ROOMS)])
    world.prefill.until_all(range(ROOMS), "send", FAILED)
    world.decode.many("room.abort", [dict(room=str(n)) for n in range(ROOMS)])
    world.decode.until_all(range(ROOMS), "recv", FAILED)


def session_gone(world, which="decode"):
    """The engine's socket closes; its daemon and the other one clean up."""
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    world.decode.many("room.bind", [dict(room=str(n), views={"kv": dict(pages=[n % 64])})
                                    for n in range(ROOMS)])
    world.prefill.until_all(range(ROOMS), "send", WAITING)
    yield
    gone, stays = (world.decode, world.prefill) if which == "decode" else \
        (world.prefill, world.decode)
    gone.close()
    stays.until_all(range(ROOMS), "send" if which == "decode" else "recv", FAILED)
    watcher = world.watchers[1 if which == "decode" else 0]
    while len(watcher.cmd("session.list", all=True)["sessions"]) > 1:
        select.select([], [], [], 0.05)


def sender_gone(world):
    yield from session_gone(world, "prefill")


def peer_killed(world):
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    world.decode.many("room.bind", [dict(room=str(n), views={"kv": dict(pages=[n % 64])})
                                    for n in range(ROOMS)])
    world.prefill.until_all(range(ROOMS), "send", WAITING)
    yield
    world.alive[1] = False
    world.daemons[1].proc.kill()
    world.prefill.until_all(range(ROOMS), "send", FAILED)


def timeouts_at_once(world):
    """All expire while the daemons stand still, so all at the moment they go on."""
    world.pools(flat(64, 4096))
    world.acquainted()
    begin = time.monotonic()
    world.open(range(ROOMS), bootstrap_ms=8000, waiting_ms=8000)
    yield
    for daemon in world.daemons:
        daemon.freeze()
    select.select([], [], [], max(0, begin + 14 - time.monotonic()))
    for daemon in world.daemons:
        daemon.thaw()
    world.prefill.until_all(range(ROOMS), "send", FAILED)
    world.decode.until_all(range(ROOMS), "recv", FAILED)


def drained(world):
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    yield
    world.watchers[0].cmd("drain", timeout_ms=60000)
    rooms = range(1, ROOMS)  # with the last one the daemon would end
    world.prefill.many("room.abort", [dict(room=str(n)) for n in rooms])
    world.prefill.until_all(rooms, "send", FAILED)


def pages_many(world):
    """10^5 scattered pages of 256 bytes: plans of 10^5 rows on both sides."""
    n = 100000
    world.pools(flat(n, 256))
    world.acquainted()
    src = [i * 7919 % n for i in range(n)]
    dst = [i * 4051 % n for i in range(n)]
    yield
    for room in range(5):
        world.push(room, src, dst, n)


def pulls_many(world):
    """The same pages, offered and pulled."""
    n = 100000
    world.pools(flat(n, 256))
    world.acquainted()
    src = {"kv": dict(pages=[i * 7919 % n for i in range(n)], tokens=[0, n])}
    dst = {"kv": dict(pages=[i * 4051 % n for i in range(n)], tokens=[0, n])}
    yield
    for room in map(str, range(5)):
        world.prefill.cmd("room.open", room=room, role="offer", pool=world.src, views=src)
        world.decode.cmd("room.open", room=room, role="pull", pool=world.dst, views=dst,
                         sources=[world.prefill.endpoint])
        world.decode.until(room, "pull", SUCCESS, DEADLINE_S)
        world.prefill.until(room, "offer", SUCCESS, DEADLINE_S)


def heads_swapped(world):
    """Another order of heads and tokens, unequal TP: rows of one head of one token."""
    n = 2048
    world.pools(heads(n, 0, 8, 8, True), heads(n, 0, 4, 8, False))
    world.acquainted()
    src = [i * 7919 % n for i in range(n)]
    dst = [i * 4051 % n for i in range(n)]
    yield
    for room in range(5):
        world.push(room, src, dst, 16 * n)


def pages_large(world):
    """1 GiB in 16 384 pages."""
    n = 16384
    world.pools(flat(n, 65536))
    world.acquainted()
    src = [i * 7919 % n for i in range(n)]
    dst = [i * 4051 % n for i in range(n)]
    yield
    for room in range(3):
        world.push(room, src, dst, n)


def layers_many(world):
    """A pool of 1000 layers in 1000 buffers, registered here and at the peer; a room."""
    yield
    world.pools(flat(256, 4096, 1000, 1000), regions=1000)
    for room in range(3):
        world.push(room, list(range(256)), list(range(255, -1, -1)), 256)


def regions_many(world):
    """1024 regions, exported to another session; lists over them."""
    limit = 256
    yield
    fds = []
    for _ in range(limit):
        fds.append(os.memfd_create("cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.write(fds[-1], bytes(65536))
    for i, fd in enumerate(fds):
        world.prefill.cmd("region.register", kind="memfd", fd=0, length="65536",
                          address=str((i + 1) << 32), fds=[fd])
        os.close(fd)
    own = [one for one in world.prefill.cmd("session.list")["sessions"] if one["own"]][0]
    attach = world.decode.cmd("peer.attach", endpoint=world.prefill.endpoint,
                              session=own["epoch"], secret=own["secret"])["attach"]
    for _ in range(20):
        made = world.decode.prep([((i % limit + 1) << 32, 64) for i in range(1024)], peer=attach)
        world.decode.cmd("dlist.free", dlist=made["dlist"])


def lists_long(world):
    """Prepared lists of 10^6 rows, by memfd."""
    count, size = 1000000, 256 << 20
    fd = os.memfd_create("cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    populated(fd, size)
    world.prefill.cmd("region.register", kind="memfd", fd=0, length=str(size),
                      address=str(1 << 40), fds=[fd])
    table = array.array("Q")
    for i in range(count):
        table.extend(((1 << 40) + i * 7919 % count * 256, 256, 0, 1))
    rows = os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(rows, table.tobytes())
    yield
    for _ in range(3):
        made = world.prefill.cmd("dlist.prep", fd=0, count=count, fds=[rows])
        world.prefill.cmd("dlist.free", dlist=made["dlist"])


def lines_long(world):
    """Lines of a MiB: lists, nests, rubbish, words; each is answered or refused."""
    yield
    size = 1000000
    for body in (b'"rooms":[' + b"1," * (size // 2) + b"1]",
                 b'"x":' + b"[" * (size // 2) + b"]" * (size // 2),
                 b'"x":"' + b"a\\u00e9" * (size // 7) + b'"',
                 b'"x":{' + b",".join(b'"%d":1' % i for i in range(size // 10)) + b"}",
                 b'"x":[' + b"{}," * (size // 3) + b"{}]",
                 b'"x":1e' + b"9" * size):
        with contextlib.closing(Loader(world.daemons[0], "long lines")) as engine:
            engine.sock.sendall(b'{"id":1,"cmd":"room.poll",' + body + b"}\n")
            assert "error" in json.loads(engine.lines.readline())


def notes_many(world):
    """Notifications, 64 KiB and small ones, that wait until they are fetched."""
    own = [one for one in world.decode.cmd("session.list")["sessions"] if one["own"]][0]
    attach = world.prefill.cmd("peer.attach", endpoint=world.decode.endpoint,
                               session=own["epoch"], secret=own["secret"])["attach"]
    yield
    for size, count in ((4, 4000), (65536, 64), (1 << 19, 4)):
        entry = ring_entry(RING_NOTIFY, a=attach, size=size, data=bytes(size))
        world.prefill.many("xfer.submit", [entry] * count)
        got, end = 0, time.monotonic() + DEADLINE_S
        while got < count:
            assert time.monotonic() < end, "%d of %d notifications" % (got, count)
            got += len(world.decode.cmd("notif.drain")["notifs"])


def group_large(world):
    world.acquainted()
    yield
    world.prefill.many("group.publish", [dict(group="g", tp_size=1024, tp_rank=n,
                                              pool="kv", summary="s" * 200)
                                         for n in range(1024)])
    for _ in range(5):
        assert len(world.prefill.cmd("group.query", group="g")["ranks"]) >= 1


def scrape_many(world):
    """CPU time of all threads of both daemons, less what they take unasked in that time."""
    world.pools(flat(64, 4096))
    world.open(range(ROOMS))
    yield
    used = []
    for asked in (False, True):
        before = sum(used_s(d.proc.pid)[0] for d in world.daemons)
        for _ in range(SCRAPES):
            for d in world.daemons if asked else ():
                c = UnixConnection(d.run_dir + "/" + d.name + ".metrics")
                c.request("GET", "/metrics")
                assert b"kvd_rooms" in c.getresponse().read()
                c.close()
            select.select([], [], [], SCRAPE_S)
        used.append(sum(used_s(d.proc.pid)[0] for d in world.daemons) - before)
    cost = max(used[1] - used[0], 0) / SCRAPES / len(world.daemons)
    world.note = "; a scrape takes %.0f us: %.3f %% of a core at one a second" % (
        cost * 1e6, cost * 100)


def chunk_names(kind, count=4096):
    return ["%02x%062x" % (kind, n) for n in range(count)]


def chunk_space(engine, pool, tokens=16):
    while not engine.cmd("chunk.list")["ready"]:
        select.select([], [], [], 0.01)
    return engine.cmd("space.open", pool=pool, model="m", scheme="s", tokens=tokens)["space"]


def chunk_move(engine, verb, pool, pages, **args):
    """All pages of a put or a fetch, until it has succeeded."""
    move = engine.cmd("chunk." + verb, pool=pool, views={
        "kv": dict(pages=list(range(pages)), tokens=[0, pages])}, **args)["move"]
    while True:
        state = engine.cmd("chunk.move", move=move)["state"]
        if state in (SUCCESS, FAILED):
            assert state == SUCCESS, verb
            return
        select.select([], [], [], 0.01)


def chunks_put(world, kind, tokens=16, count=4096):
    space, ids = chunk_space(world.prefill, world.src, tokens), chunk_names(kind, count)
    chunk_move(world.prefill, "put", world.src, count * tokens, space=space, ids=ids)
    return space, ids


def chunks_full(world):
    """The memory is full of chunks of 4 KiB."""
    world.pools(flat(65536, 256))
    for kind in range(3):
        chunks_put(world, kind)


def chunks_many(world):
    """As many of 8 KiB take the place of those of 4, are found, held and let go: all content
    of the memory leaves, slab by slab."""
    chunks_full(world)
    yield
    for kind in range(3, 6):
        space, ids = chunks_put(world, kind, 32, 2048)
        assert world.prefill.find(space, ids) == len(ids)
        for _ in range(4):
            hold = world.prefill.hold(space, ids, 60000)
            assert hold["chunks"] == len(ids)
            world.prefill.release(hold["hold"])


def puts_many(world):
    chunks_full(world)
    yield
    for kind in range(3, 8):
        chunks_put(world, kind)


def holds_many(world):
    """4096 chunks are found, held and let go, here and by the other daemon, which fetches
    them once."""
    world.pools(flat(65536, 256))
    space, ids = chunks_put(world, 0)
    there = chunk_space(world.decode, world.dst)
    yield
    for _ in range(4):
        assert world.prefill.find(space, ids) == len(ids)
        hold = world.prefill.hold(space, ids, 60000)
        assert hold["chunks"] == len(ids)
        world.prefill.release(hold["hold"])
        far = world.decode.hold(there, ids, 60000, remote_ms=10000)
        assert far["remote"] == len(ids), far
        world.decode.release(far["hold"])
    far = world.decode.hold(there, ids, 60000, remote_ms=10000)
    chunk_move(world.decode, "fetch", world.dst, len(ids) * 16, hold=far["hold"])
    world.decode.release(far["hold"])


def attends_select(world):
    """Posts of 4096 query tokens that attend to 256 chosen tokens each, of chunks here and
    at the other daemon."""
    dims, rows, chosen, count = 16, 4096, 256, 64
    layout = flat(count * 16, 2 * dims)
    layout["views"]["kv"]["layers"][0]["fields"][0]["format"] = "bf16"
    world.pools(layout)
    space, ids = chunks_put(world, 0, count=count)
    there = chunk_space(world.decode, world.dst)
    posts = []
    for engine, where, remote_ms in ((world.prefill, space, 0), (world.decode, there, 10000)):
        hold = engine.hold(where, ids, 600000, remote_ms)
        assert hold["chunks"] == count, hold
        size = 1 << 20
        fd = os.memfd_create("seats", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        seat = mmap.mmap(fd, size)
        region = engine.cmd("region.register", kind="memfd", fd=0, length=str(size),
                            fds=[fd])["region"]
        os.close(fd)
        attend = engine.cmd("attention.open", region=region, rows=rows, kind="mla",
                            q_type="bf16", kv_type="bf16", heads=1, dqk=dims, dv=dims,
                            scale=0.25, key="k")
        ring = Ring(engine)
        part = struct.pack("<QIIIIQiI", hold["hold"], 0, rows, 0, count, 0, 0, chosen)
        select_all = array.array("I", [(i * 7919) % (count * 16) for i in range(rows * chosen)])
        ring.arena[:len(part) + 4 * rows * chosen] = part + select_all.tobytes()
        posts.append((ring, engine.slot(), attend, seat, int(attend["l"]) + 4 * (rows - 1)))
    yield
    for gen in range(1, 6):
        for ring, slot, attend, seat, last in posts:
            seat[last:last + 4] = bytes(4)
            ring.give(RING_ENTRY.pack(RING_ATTEND, 0, slot, gen, attend["attend"], 0, 0, 0, 1,
                                      40 + 4 * rows * chosen, 10000000, 0))
            end = time.monotonic() + DEADLINE_S
            while seat[last:last + 4] == bytes(4):
                assert time.monotonic() < end, "nothing is told"
                select.select([], [], [], 0.01)


LOADS = {
    "nothing": (nothing, "an engine polls no room"),
    "open": (open_many, "10^4 rooms are opened on both sides"),
    "serve": (bind_many, "10^4 rooms are served and closed"),
    "look": (look_at_many, "10^4 rooms are listed and polled"),
    "abort": (abort_many, "10^4 rooms are aborted"),
    "receiver": (session_gone, "the receiving engine of 10^4 rooms goes"),
    "sender": (sender_gone, "the sending engine of 10^4 rooms goes"),
    "killed": (peer_killed, "the peer of 10^4 rooms dies"),
    "expire": (timeouts_at_once, "10^4 rooms time out at once"),
    "drain": (drained, "10^4 rooms are drained"),
    "pages": (pages_many, "rooms of 10^5 pages"),
    "pulls": (pulls_many, "rooms of 10^5 pages, pulled"),
    "heads": (heads_swapped, "rooms of 131 072 rows, other order of heads"),
    "large": (pages_large, "rooms of 1 GiB"),
    "layers": (layers_many, "pools of 1000 buffers and layers"),
    "regions": (regions_many, "256 regions, exported"),
    "lists": (lists_long, "lists of 10^6 rows"),
    "lines": (lines_long, "lines of 1 MiB that are wrong"),
    "notes": (notes_many, "notifications by the thousand"),
    "group": (group_large, "a group of 1024 ranks"),
    "scrape": (scrape_many, "metrics are scraped beside 10^4 rooms"),
    "chunks": (chunks_many, "chunks of another size fill the memory, are held"),
    "puts": (puts_many, "4096 chunks of 4 KiB are put into full memory"),
    "holds": (holds_many, "4096 chunks are held here, and by another daemon"),
    "attends": (attends_select, "query rows with 2^20 chosen tokens"),
}
MORE = {"scrape": "[metrics]\nmetrics_listen = unix:{dir}/{name}.metrics\n",
        "chunks": "[chunks]\nchunk_memory = 32 MiB\n",
        "puts": "[chunks]\nchunk_memory = 32 MiB\n",
        "holds": "[chunks]\nchunk_memory = 64 MiB\nchunk_peers = {other}\n",
        "attends": "[chunks]\nchunk_memory = 32 MiB\nchunk_peers = {other}\n"
                   "attention_threads = 1\n"}


def one(name, transport, stacks):
    """Its figure, and its stacks."""
    load, words = LOADS[name]
    world = World(transport, stacks, MORE.get(name, ""))
    try:
        steps = load(world)
        next(steps)
        before = world.turns()
        world.forget_stacks()
        begin, used = time.monotonic(), world.loops_s()
        for _ in steps:
            pass
        took, used = time.monotonic() - begin, world.loops_s() - used
        after = world.turns()
        before = before[:len(after)]
        turns = sum(a[0] - b[0] for a, b in zip(after, before))
        slow = sum(a[1] - b[1] for a, b in zip(after, before))
        longest = [2 ** max(i for a, b in zip(after, before)
                            for i, n in enumerate(a[clock]) if n > b[clock][i])
                   for clock in (2, 3)]
        return figure(words, transport, "longest turn", longest[0], "us", None, turns=turns,
                      slow=slow, cpu_s=max(used, 0), note="%d of %d turns over %d us; by the clock < %d us; "
                      "%.1f s, the loops %.2f s of CPU%s" % (
                          slow, turns, LIMIT_US, longest[1], took, max(used, 0),
                          world.note)), world.stacks()
    finally:
        world.close()


# ---- stacks by name ----

def symbols_of(path):
    """Where the daemon's functions begin, and their names."""
    said = subprocess.run(["nm", "-n", path], capture_output=True, text=True).stdout
    rows = [line.split() for line in said.splitlines()]
    rows = [(int(row[0], 16), row[2]) for row in rows if len(row) == 3 and row[1] in "tT"]
    return [at for at, _ in rows], [name for _, name in rows]


def names_of(frames, symbols):
    """Functions, innermost first."""
    names = []
    for path, at in frames:
        if path.endswith("/kvd"):
            names.append(symbols[1][bisect.bisect(symbols[0], int(at[1:], 16)) - 1])
        elif not path.endswith("/long-turns.so") and at.split("+")[0]:
            names.append(at.split("+")[0])
    return tuple(names[:STACK_FRAMES])


def stacks_told(stacks):
    places = collections.Counter()
    longest = collections.defaultdict(int)
    symbols = symbols_of(BUILD + "/kvd") if stacks else None
    for us, frames in stacks:
        names = names_of(frames, symbols)
        places[names] += 1
        longest[names] = max(longest[names], us)
    for names, count in places.most_common(STACKS_TOLD):
        print("    %4d x, up to %d us: %s" % (count, longest[names], " < ".join(names)))


def machine():
    """Turns over the limit, and CPU time, of a thread without a daemon."""
    out = subprocess.run([BUILD + "/bench/machine_turns", str(MACHINE_S)], check=True,
                         capture_output=True, text=True).stdout.split()
    turns, slow, cpu_s = int(out[0]), int(out[1]), float(out[2])
    print("%-48s             %d of %d turns over %d us; %.2f s of CPU" % (
        "the machine: a thread sleeps and computes", slow, turns, LIMIT_US, cpu_s), flush=True)
    return slow, cpu_s


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    slow, cpu_s = 0, 0.0
    own = [machine()]
    for name in args.words or LOADS:
        record, stacks = one(name, args.transport, args.stacks)
        slow, cpu_s = slow + record["slow"], cpu_s + record["cpu_s"]
        print("%-48s < %7d us  %s" % (record["work"], record["value"], record["note"]),
              flush=True)
        stacks_told(stacks)
    own.append(machine())
    rate = sum(one[0] for one in own) / sum(one[1] for one in own)
    print("all loads: %d turns over %d us in %.2f s of CPU; the machine itself: %.1f in as much "
          "(%.1f a second)" % (slow, LIMIT_US, cpu_s, rate * cpu_s, rate))


if __name__ == "__main__":
    main()
