#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Chunks beside their limits, in turns of one run.

bench_chunks.py [--turns N] [--dir FOLDER] [--peers VENV] [--json FILE] [PART...]

Parts: memory far gather stall files, all of them unless named.

    put, fetch       beside a bare pull between two pools of the same pages
    publish          of the same chunks, and their withdrawal, beside the put; a fetch from
                     their engine's pages beside one from memory
    find             512 chunks of the own daemon that are there, beside one of them: what
                     waking and answering take; and again by an engine that has slept before
    far              of another daemon, beside a bare pull of the same pages from there; a
                     hold of 512 beside one of a chunk that nobody has, which takes the hops
    gather           2048 of 8192 tokens of another daemon, in 4 layers, beside all tokens of these
                     layers, and beside one fetch a token, all posted at once
    a holder stalls  two daemons hold 71 MB; of 60 fetches two find the first one stopped for
                     0.4 s: with the hedge, beside as many of a daemon without it
    Mooncake Store   (--peers) by tcp, a client with memory of its own: put, get of 4 MiB
                     pieces, exist of 512 keys, in the same turns as put, fetch, find
    file to pages    beside reads of as many bytes from the same disk, without kvd
    pages to file    durable, beside writes and one fdatasync a file
    restart          from the daemon's start to the first hit in its files; of that the
                     memory for chunks, which has to be made, beside an engine making as much

Figures are medians of the turns, with the tenth and ninetieth percentile. --dir: of files,
on the disk that is meant (the current folder). Needs the package kvd: make bench-chunks."""
import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
import kvd  # noqa: E402
from kvd_daemon import Daemon  # noqa: E402
from kvd_space import space_of  # noqa: E402

T = 256           # tokens of a chunk
PAGE = 16         # of a page
LAYERS, HEADS, HEAD_BYTES = 17, 8, 128
PAGES = 512       # of a cache: 32 chunks
CHUNKS = PAGES * PAGE // T
PIECE = 1 << 20   # of the floor's reads and writes
FLYING = 24
STALL = 0.4       # seconds that a holder stands still
STALL_CHUNKS, STALL_FETCHES = 8, 60
SLEEP = 0.0005    # between finds, of an engine that does other things


def chain(count, seed):
    ids, last = [], seed.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        ids.append(last)
    return ids


class Cache:
    """Pages of K and V, a buffer each, as engines have them."""

    def __init__(self, client, name, sets=1):
        field = sets * PAGES * PAGE * HEADS * HEAD_BYTES
        self.memory = kvd.Memory(2 * LAYERS * field)
        self.memory.array()[:] = 1
        layout = kvd.Layout().view("kv", PAGE, sets * PAGES)
        region = client.register(self.memory)
        for layer in range(LAYERS):
            for k in "kv":
                layout.heads("kv", layer, k, buffer=layout.buffer(field), format="bf16",
                             unit_bytes=HEAD_BYTES, units=HEADS)
        self.pool = client.pool(layout, [(region, i * field) for i in range(2 * LAYERS)],
                                name=name)
        self.bytes = 2 * LAYERS * field // sets
        # scattered, as a block table is: no page follows the one before it
        self.pages = [(i * 197) % PAGES for i in range(PAGES)]

    def set(self, i):
        return [i * PAGES + page for page in self.pages]

    def space(self, client):
        return space_of(client, self.pool, model="bench", scheme="sha256", tokens=T)


def until(have):
    """What `have` answers, once it does."""
    often, end = threading.Event(), time.monotonic() + 120
    while not (found := have()):
        assert time.monotonic() < end
        often.wait(0.005)
    return found


def timed(do):
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


class Mooncake:
    """peers/mooncake_store.py in a venv that has it."""

    def __init__(self, venv):
        self.proc = subprocess.Popen(
            [venv + "/bin/python", os.path.join(ROOT, "tests/bench/peers/mooncake_store.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.proc.stdout.readline() == "ready\n"

    def ask(self, what, count):
        self.proc.stdin.write("%s %d\n" % (what, count))
        self.proc.stdin.flush()
        return float(self.proc.stdout.readline())

    def close(self):
        self.proc.stdin.close()
        self.proc.wait()


class Row:
    """Figures beside floors: of a rate the ratio is figure to floor, of a time (`less`) the
    other way round, so that more is better."""

    def __init__(self, name, unit, goal=None, less=False):
        self.name, self.unit, self.goal, self.less = name, unit, goal, less
        self.figures, self.floors = [], []

    def tell(self):
        ratios = [g / f if self.less else f / g for f, g in zip(self.figures, self.floors)]
        told = {"row": self.name, "unit": self.unit, "goal": self.goal,
                "figure": spread(self.figures),
                "floor": spread(self.floors) if self.floors else None,
                "ratio": spread(ratios) if ratios else None}
        print("%-28s %s %-5s floor %s   ratio %s   goal %s" % (
            self.name, words(told["figure"]), self.unit, words(told["floor"]),
            words(told["ratio"]), self.goal or "-"))
        return told


def spread(values):
    values = sorted(values)
    return [statistics.median(values), values[len(values) // 10],
            values[-1 - len(values) // 10]]


def words(three):
    return "%7.2f (%.2f … %.2f)" % tuple(three) if three else "      -      "


def bare(client, source, target, pages, room):
    """A pull between two pools of one daemon."""
    offer = client.offer(room, source.pool, {"kv": source.pages})
    pull = client.pull(room, target.pool, kvd.Source(pool="a"), {"kv": pages[::-1]})
    pull.wait(timeout=60)
    offer.wait(timeout=60)
    offer.close()
    pull.close()


def moved(move):
    move.wait(timeout=120)
    move.close()


def fetch(space, cache, ids):
    with space.hold(ids, timeout=60) as hold:
        assert hold.chunks == len(ids), (hold.chunks, len(ids))
        moved(hold.fetch({"kv": cache.pages[::-1]}))


def mooncake_turn(peer, rows, gb, took):
    """What kvd just did, by the other: as many bytes in pieces of 4 MiB."""
    pieces = max(1, round(gb * 1e9 / (4 << 20)))
    for row, what, ours in zip(rows, ("put", "get"), ("put", "fetch")):
        row.figures.append(gb / took[ours])
        row.floors.append(pieces * (4 << 20) / 1e9 / peer.ask(what, pieces))


def published_turn(rows, client, cache, space, ids, read, took):
    """The same chunks once more, which are dropped, in the pages that they came from."""
    space.drop(ids)
    before = client.command("chunk.list")["free_bytes"]
    publish = timed(lambda: moved(space.publish(ids, {"kv": cache.pages})))
    rows[1].figures.append(cache.bytes / 1e9 / timed(read))
    rows[1].floors.append(cache.bytes / 1e9 / took["fetch"])
    withdraw = timed(lambda: moved(space.withdraw(ids)))
    rows[0].figures.append(1e6 * (publish + withdraw))
    rows[0].floors.append(1e6 * took["put"])
    assert client.command("chunk.list")["free_bytes"] == before, "publishing takes none"


def memory_rows(turns, venv):
    peer = Mooncake(venv) if venv else None
    rivals = [Row("put / Mooncake put", "GB/s", 2), Row("fetch / Mooncake get", "GB/s", 2)]
    exist = Row("find / Mooncake exist", "us", 20, less=True)
    put, get = Row("put, memory", "GB/s", 0.9), Row("fetch, memory", "GB/s", 0.9)
    pages = [Row("publish and withdraw / put", "us", less=True),
             Row("fetch, pages / memory", "GB/s")]
    find = [Row("find of 512", "us", less=True), Row("find of 512, rarely", "us", less=True)]
    with Daemon("[chunks]\nchunk_memory = 4 GiB\n") as d, kvd.Client(d.socket_path, timeout=120) as c:
        a, b = Cache(c, "a"), Cache(c, "b")
        fresh = Cache(c, "fresh", turns + 1)  # memory that nobody has just used, as a put's is
        sa, sb = a.space(c), b.space(c)
        gb = a.bytes / 1e9
        for i in range(turns + 1):
            ids = chain(CHUNKS, "memory%d" % i)
            works = [("bare put", lambda: bare(c, a, fresh, fresh.set(i), 2 * i)),
                     ("bare fetch", lambda: bare(c, a, b, b.pages, 2 * i + 1)),
                     ("put", lambda: moved(sa.put(ids, {"kv": a.pages}))),
                     ("fetch", lambda: fetch(sb, b, ids))]
            took = {name: timed(do) for name, do in (works if i % 2 else
                                                     works[1:] + works[:1])}
            if i:  # the first warms up
                for row, name in ((put, "put"), (get, "fetch")):
                    row.figures.append(gb / took[name])
                    row.floors.append(gb / took["bare " + name])
                published_turn(pages, c, a, sa, ids, lambda: fetch(sb, b, ids), took)
                if peer:
                    mooncake_turn(peer, rivals, gb, took)
        small = c.space(a.pool, model="bench", scheme="small", tokens=PAGE)
        ids = chain(512, "find")
        moved(small.put(ids, {"kv": a.pages}))
        packed = b"".join(ids)
        rest = threading.Event()
        for row, pause in zip(find, (0, SLEEP)):
            for _ in range(50 * turns):
                rest.wait(pause)
                row.floors.append(1e6 * timed(lambda: small.find(packed[:32])))
                rest.wait(pause)
                row.figures.append(1e6 * timed(lambda: small.find(packed)))
        for _ in range(50 * turns if peer else 0):
            exist.figures.append(1e6 * timed(lambda: small.find(packed)))
            exist.floors.append(1e6 * peer.ask("exist", 512))
    if not peer:
        return [put, get, *pages, *find]
    peer.close()
    return [put, get, *pages, *find, *rivals, exist]


def far_rows(turns):
    """The holder has the chunks in memory; the requester has none, and keeps none."""
    get = Row("fetch, another daemon", "GB/s", 0.9)
    find = Row("hold of 512 there", "us", 0.67, less=True)
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(Daemon("[chunks]\nchunk_memory = 2 GiB\n"))
        h = stack.enter_context(kvd.Client(there.socket_path, timeout=120))
        own = stack.enter_context(Daemon("[chunks]\nchunk_memory = 256 MiB\nchunk_peers = %s\n"
                                         % h.endpoint))
        c = stack.enter_context(kvd.Client(own.socket_path, timeout=120))
        a, b = Cache(h, "a"), Cache(c, "b")
        until(lambda: h.command("chunk.list")["ready"] and c.command("chunk.list")["ready"])
        small = h.space(a.pool, model="bench", scheme="small", tokens=PAGE)
        reader = c.space(b.pool, model="bench", scheme="small", tokens=PAGE)
        ids, gb = chain(512, "far"), b.bytes / 1e9
        moved(small.put(ids, {"kv": a.pages}))
        for i in range(turns + 1):
            offer = h.offer(i, a.pool, {"kv": a.pages})
            begin = time.perf_counter()
            pull = c.pull(i, b.pool, kvd.Source(h.endpoint, "a"), {"kv": b.pages[::-1]})
            pull.wait(timeout=60)
            bare_s = time.perf_counter() - begin
            pull.close()
            offer.wait(timeout=60)
            offer.close()
            with reader.hold(ids, remote=10, timeout=60) as hold:
                assert hold.remote == 512
                took_s = timed(lambda hold=hold: moved(hold.fetch({"kv": b.pages[::-1]})))
            if i:
                get.figures.append(gb / took_s)
                get.floors.append(gb / bare_s)
        packed = b"".join(ids)
        for _ in range(50 * turns):
            for to, asked in ((find.floors, packed[::-1][:32]), (find.figures, packed)):
                begin = time.perf_counter()
                hold = reader.hold(asked, remote=10, timeout=60)
                to.append(1e6 * (time.perf_counter() - begin))
                hold.close()
    return [get, find]


def gather_turn(hold, pages, selects, layers):
    """Seconds of a fetch for each selection, all at once."""
    begin = time.perf_counter()
    moves = [hold.fetch({"kv": kvd.View(pages[i:i + -(-len(select) // PAGE)], layers=layers,
                                        select=select)}) for i, select in enumerate(selects)]
    for move in moves:
        move.wait(timeout=60)
    took = time.perf_counter() - begin
    for move in moves:
        move.close()
    return 1e3 * took


def gather_rows(turns):
    rows = []
    for way, goal in (("shm", 1), ("tcp", 2)):
        alls = Row("gather 2048 of 8192 tokens, beside all (%s)" % way, "ms", goal, less=True)
        ones = Row("the same, beside one fetch a token (%s)" % way, "ms", 10, less=True)
        with contextlib.ExitStack() as stack:
            more = "[transport]\nrequire = %s\n" % way
            there = stack.enter_context(Daemon("[chunks]\nchunk_memory = 2 GiB\n" + more))
            h = stack.enter_context(kvd.Client(there.socket_path, timeout=120))
            own = stack.enter_context(Daemon(
                "[chunks]\nchunk_memory = 2 GiB\nchunk_peers = %s\n%s" % (h.endpoint, more)))
            c = stack.enter_context(kvd.Client(own.socket_path, timeout=120))
            a, b = Cache(h, "a"), Cache(c, "b")
            ready = [h, c]
            until(lambda ready=ready: all(one.command("chunk.list")["ready"] for one in ready))
            ids, reader = chain(CHUNKS, "gather"), b.space(c)
            moved(a.space(h).put(ids, {"kv": a.pages}))
            with until(lambda: reader.hold(ids, remote=10, lease=600)) as hold:
                assert hold.remote == CHUNKS
                for i in range(turns + 1):
                    some = sorted(random.Random(i).sample(range(PAGES * PAGE), 2048))
                    took = [gather_turn(hold, b.pages, selects, (0, 4)) for selects in
                            ([some], [range(PAGES * PAGE)], [[token] for token in some[:512]])]
                    if i:  # one by one: a quarter of them
                        alls.figures.append(took[0])
                        ones.figures.append(took[0])
                        alls.floors.append(took[1])
                        ones.floors.append(4 * took[2])
        rows += [alls, ones]
    return rows


def stalled(daemon, do):
    """Its process stands still from before `do` until STALL later. -> seconds of it"""
    daemon.freeze()
    timer = threading.Timer(STALL, daemon.proc.send_signal, (signal.SIGCONT,))
    timer.start()
    took = timed(do)
    timer.join()
    return took


class Reader:
    """Fetches from two holders."""

    def __init__(self, stack, holders, hedge):
        own = stack.enter_context(Daemon(
            "[chunks]\nchunk_memory = 1280 MiB\nchunk_hedge = %s\nchunk_peers = %s\n"
            % (hedge, " ".join(h.endpoint for h in holders))))
        self.client = stack.enter_context(kvd.Client(own.socket_path, timeout=120))
        self.cache = Cache(self.client, "c")
        until(lambda: all(p["state"] == "up" for p in self.peers()) and len(self.peers()) >= 2)
        self.space = self.cache.space(self.client)

    def peers(self):
        return self.client.command("peer.list")["peers"]

    def fetch(self, ids, stops):
        """What both holders have is fetched. After a stall the first one, which has one more, is
        left out for a time. -> ms"""
        tokens = (len(ids) - 1) * T
        view = kvd.View(self.cache.pages[:tokens // PAGE], tokens=(0, tokens))
        with self.space.hold(ids, remote=10, timeout=60) as hold:
            assert hold.remote >= len(ids) - 1, (hold.remote, len(ids))

            def move():
                moved(hold.fetch({"kv": view}))
            took = stalled(stops, move) if stops else timed(move)
        self.space.drop(ids)
        return 1e3 * took


def stall_rows(turns):
    p50 = Row("fetch, a holder stalls: p50", "ms", less=True)
    p99 = Row("fetch, a holder stalls: p99", "ms", less=True)
    ids = chain(STALL_CHUNKS + 1, "stall")
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(Daemon("[chunks]\nchunk_memory = 1280 MiB\n"))
                   for _ in range(2)]
        holders = [stack.enter_context(kvd.Client(d.socket_path, timeout=120)) for d in daemons]
        for i, h in enumerate(holders):  # the first has one more: it is asked first
            a, count = Cache(h, "a"), len(ids) - i
            moved(a.space(h).put(ids[:count], {"kv": a.pages[:count * T // PAGE]}))
        readers = [Reader(stack, holders, hedge) for hedge in ("yes", "no")]
        for turn in range(turns + 1):
            took = ([], [])
            for i in range(STALL_FETCHES):
                for reader, ms in zip(readers, took):
                    ms.append(reader.fetch(ids, i % (STALL_FETCHES // 2) == 20 and daemons[0]))
            for row, of in ((p50, 0.5), (p99, 0.99)) if turn else ():  # the first warms up
                row.figures.append(sorted(took[0])[int(of * STALL_FETCHES)])
                row.floors.append(sorted(took[1])[int(of * STALL_FETCHES)])
        told = [r.client.command("chunk.list")["remote"] for r in readers]
        print("%d fetches by each, %d stalls: %d hedges, %d of them first there; without: %d" % (
            STALL_FETCHES * (turns + 1), 2 * (turns + 1), told[0]["hedges"],
            told[0]["hedges_won"], told[1]["hedges"]))
    return [p50, p99]


class Floor:
    """The disk without kvd: pieces of a file past the page cache, some at a time."""

    def __init__(self, folder, nbytes):
        self.path = os.path.join(folder, "floor")
        self.nbytes = nbytes
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, nbytes)
        self.buffers = [mmap.mmap(-1, PIECE) for _ in range(FLYING)]
        self.threads = concurrent.futures.ThreadPoolExecutor(FLYING)
        self.write()

    def _lane(self, lane, call):
        for at in range(lane * PIECE, self.nbytes, FLYING * PIECE):
            assert call(self.fd, [self.buffers[lane]], at) == PIECE

    def _all(self, call):
        for done in [self.threads.submit(self._lane, i, call) for i in range(FLYING)]:
            done.result()

    def read(self):
        self._all(os.preadv)

    def write(self):
        self._all(os.pwritev)
        os.fdatasync(self.fd)

    def close(self):
        self.threads.shutdown()
        os.close(self.fd)
        os.unlink(self.path)


def file_rows(turns, folder):
    read, write = Row("file to pages", "GB/s", 0.9), Row("pages to file, durable", "GB/s", 0.85)
    conf = ("[chunks]\nchunk_memory = 2 GiB\nchunk_dir = %s/chunks\nchunk_dir_size = 8 GiB\n"
            % folder)
    os.mkdir(folder + "/chunks", 0o700)
    restart = Row("restart to first hit", "s")
    made = Row("  of it, memory ready", "s", less=True)
    with Daemon(conf) as d, kvd.Client(d.socket_path, timeout=120) as c:
        a = Cache(c, "a")
        space, gb = a.space(c), a.bytes / 1e9
        floor = Floor(folder, a.bytes // PIECE * PIECE)
        until(lambda: c.command("chunk.list")["files"]["scanned"])
        # as in a store that has run for long: slots that were written before. What is
        # fetched has left the memory: far more is put than it holds
        for i in range(30):
            moved(space.put(chain(CHUNKS, "old%d" % i), {"kv": a.pages}, durable=True))
        sets = [chain(CHUNKS, "file%d" % i) for i in range(turns + 10)]
        for ids in sets:
            write.floors.append(gb / timed(floor.write))
            write.figures.append(gb / timed(
                lambda ids=ids: moved(space.put(ids, {"kv": a.pages}, durable=True))))
        for ids in sets[:turns]:
            read.floors.append(gb / timed(floor.read))
            read.figures.append(gb / timed(lambda ids=ids: fetch(space, a, ids)))
        told = c.command("chunk.list")["files"]
        assert told["read"] >= turns * CHUNKS, told
        assert told["bad"] == 0 and told["faults"] == 0
        print("files %s the page cache" % ("past" if told["direct"] else "by way of"))
        floor.close()
    begin = time.perf_counter()
    with Daemon(conf) as d, kvd.Client(d.socket_path, timeout=120) as c:
        until(lambda: c.command("chunk.list")["ready"])
        made.figures.append(time.perf_counter() - begin)
        a = Cache(c, "a")
        space = a.space(c)
        until(lambda: space.find(sets[-1]).chunks == CHUNKS)
        restart.figures.append(time.perf_counter() - begin)
    made.floors.append(timed(lambda: kvd.Memory(2 << 30)))
    return [read, write, restart, made]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--peers", help="a venv with Mooncake (tests/bench/peers/setup.sh)")
    parser.add_argument("--json")
    parser.add_argument("parts", nargs="*")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="kvd-bench-chunks-", dir=os.path.abspath(args.dir))
    try:
        parts = {"memory": lambda turns: memory_rows(turns, args.peers), "far": far_rows,
                 "gather": gather_rows, "stall": stall_rows,
                 "files": lambda turns: file_rows(turns, folder)}
        rows = [row.tell() for part in args.parts or parts for row in parts[part](args.turns)]
    finally:
        shutil.rmtree(folder)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
