# SPDX-License-Identifier: Apache-2.0
"""What bench_route.py measures with: daemons, engines of MLA's shape (576 and 512 values, bf16)
whose requests are timed, a bare ping-pong, and an engine beside the holder."""
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
import kvd  # noqa: E402
from kvd_daemon import BUILD, Daemon, until  # noqa: E402
from kvd_space import attended, space_of  # noqa: E402

T, DQK, DV = 64, 576, 512
TOKEN_BYTES = 2 * DQK
WAIT_S = 60
LEASE_S = 600
PAUSE = threading.Event()  # never set

STEP = """
import sys, time
import numpy as np
a, b = np.ones((192, 192), np.float32), np.ones((2, 16 << 20), np.uint8)
def multiply():
    global a
    for _ in range(20):
        a = a @ a * 0 + 1
def copy():
    b[1] = b[0]
step = {"multiply": multiply, "copy": copy}[sys.argv[1]]
while True:
    begin = time.perf_counter()
    step()
    print(time.perf_counter() - begin, flush=True)
"""


def median_us(times):
    return statistics.median(times) * 1e6


def config(transport, memory=16, threads=1, spin=None, stores=(), peer=""):
    """Of a daemon; `stores`: endpoints; peer: its section of that name. By shm its own engines put chunks into it, whatever way
    others come."""
    lines = ["[chunks]", "chunk_memory = %d MiB" % memory, "attention_threads = %s" % (threads or "off")]
    if spin:
        lines.append("attention_busy_poll = " + spin)
    if stores:
        lines.append("chunk_peers = " + " ".join(stores))
    ways = transport if transport == "shm" else transport + ", shm"
    return "\n".join(lines + ["[transport]", "transports = " + ways, "require = " + transport,
                              peer])


class Hosts:
    """Daemons of one run, with a client each. All end with it."""

    def __init__(self):
        self.stack, self.numbers = contextlib.ExitStack(), itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *why):
        return self.stack.__exit__(*why)

    def add(self, *args, **words):
        return self.add_all(1, *args, **words)[0]

    def add_all(self, count, *args, **words):
        """They start side by side; those that ask are ready when they know whom."""
        stores = words.get("stores", ())
        # a name each: those whose keys have the same are one requester
        daemons = [Daemon(config(*args, **words), name="kvd-%d" % next(self.numbers))
                   for _ in range(count)]
        for daemon in daemons:
            daemon.start()
            self.stack.push(daemon)
        clients = []
        for daemon in daemons:
            daemon.wait_ready()
            client = self.stack.enter_context(kvd.Client(daemon.socket_path))
            client.pid, client.socket = daemon.proc.pid, daemon.socket_path
            clients.append(client)
        for client in clients:
            until("a line to the holders", lambda c=client: sum(
                p["data_line"] and not p["self"] for p in c.command("peer.list")["peers"])
                >= len(stores), WAIT_S)
        return clients


def ids_of(name, count):
    return [(b"%s %d" % (name, i)).ljust(32, b".") for i in range(count)]


class Engine:
    """A cache of so many tokens of one layer, and posts of so many rows."""

    def __init__(self, client, tokens, heads=1):
        self.client, self.tokens, self.heads, self.seats = client, tokens, heads, {}
        self.memory = kvd.Memory(tokens * TOKEN_BYTES)
        field = {"name": "kv", "buffer": 0, "offset": 0, "page_stride": T * TOKEN_BYTES,
                 "token_stride": TOKEN_BYTES, "unit_stride": TOKEN_BYTES,
                 "unit_bytes": TOKEN_BYTES, "first_unit": 0, "units": 1, "total_units": 1,
                 "format": "bf16"}
        layout = {"buffers": [tokens * TOKEN_BYTES],
                  "views": {"kv": {"page_tokens": T, "pages": tokens // T,
                                   "layers": [{"layer": 0, "fields": [field]}]}}}
        self.pool = client.pool(layout, [client.register(self.memory)])
        self.space = space_of(client, self.pool, model="m", scheme="route", tokens=T)

    def seat(self, rows):
        """An attend of that many rows, with values in it."""
        if rows not in self.seats:
            attend = self.client.attend(rows=rows, heads=self.heads, dqk=DQK, dv=DV, kind="mla",
                                        q_type="bf16", kv_type="bf16", scale=DQK ** -0.5,
                                        key="kv")
            attend.q(0)[:] = bf16(rows, rows).view(np.uint8)
            self.seats[rows] = attend
        return self.seats[rows]

    def put(self, name, first=0, tokens=None):
        """Tokens of the cache as chunks."""
        tokens = tokens or self.tokens
        pages = list(range(first // T, (first + tokens) // T))
        self.space.put(ids_of(name, tokens // T),
                       {"kv": kvd.View(pages, tokens=(0, tokens))}).wait(timeout=WAIT_S)

    def fill(self):
        self.memory.array(dtype=np.uint16)[:self.tokens * DQK] = bf16(self.tokens, 1)

    def hold(self, name, tokens=None):
        """As soon as the daemon knows the holder."""
        ids = ids_of(name, (tokens or self.tokens) // T)

        def held():
            hold = self.space.hold(ids, remote=10, lease=LEASE_S)
            if hold.chunks == len(ids):
                return hold
            hold.close()
            return None
        return until("chunks of another daemon", held, WAIT_S)

    def post(self, rows, parts):
        self.seat(rows).post(0, 0, parts, deadline=WAIT_S)

    def ask(self, rows, parts):
        """Seconds until the result was there."""
        attend = self.seat(rows)
        begin = time.perf_counter()
        attend.post(0, 0, parts, deadline=WAIT_S)
        attend.wait(0, timeout=WAIT_S)
        return time.perf_counter() - begin

    def fetch(self, hold, view):
        begin = time.perf_counter()
        hold.fetch({"kv": view}, post=True).wait(timeout=WAIT_S)
        return time.perf_counter() - begin


def bf16(rows, seed):
    values = np.random.default_rng(seed).standard_normal(rows * DQK).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def part(hold, tokens):
    return kvd.Part(hold, chunks=(0, -(-tokens // T)), tokens=tokens)


def kernel_us(client, work):
    """What the kernel's calls of a daemon took during some work, and the work's result."""
    before = attended(client)["compute_seconds_total"]
    result = work()
    after = attended(client)["compute_seconds_total"]
    return 1e6 * (after - before), result


def slow_turns(client):
    """(turns, those that had a core for over 200 us)"""
    metrics = {row["name"]: row["value"] for row in client.command("stats")["metrics"]}
    return np.array([metrics["loop_iterations_total"], metrics["loop_slow_iterations_total"]])


# ---- many at once ----

def crowd(engines, rows, parts, seconds, facts=None):
    """Latencies (s) while each of them asks again as soon as it was answered. One thread
    serves all: it waits for who asked first, then looks at everybody. facts: a list that gets
    what each was told."""
    begun, times = {}, []
    end = time.perf_counter() + seconds
    for i, engine in enumerate(engines):
        engine.post(rows, parts[i])
        begun[i] = time.perf_counter()
    while begun:
        first = min(begun, key=begun.get)
        engines[first].seat(rows).wait(0, timeout=WAIT_S)
        for i in list(begun):
            seat = engines[i].seat(rows)
            state = seat.state(0)
            if state not in (kvd.SUCCESS, kvd.FAILED):
                continue
            if state == kvd.FAILED:
                raise seat.error(0)
            now = time.perf_counter()
            times.append(now - begun.pop(i))
            if facts is not None:
                facts.append(seat.read(0))
            if now < end:
                engines[i].post(rows, parts[i])
                begun[i] = now
    return times


def single(engines, rows, parts, seconds):
    """The same posts, one behind the other."""
    times, end, i = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        times.append(engines[i % len(engines)].ask(rows, parts[i % len(engines)]))
        i += 1
    return times


def rounds(engines, rows, parts, count):
    """Seconds in which all of them, who ask at the same time, were answered."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        for engine, of in zip(engines, parts):
            engine.post(rows, of)
        for engine in engines:
            engine.seat(rows).wait(0, timeout=WAIT_S)
        times.append(time.perf_counter() - begin)
    return times


# ---- beside ----

def cpu_s(pid):
    """That a process had, both modes."""
    with open("/proc/%d/stat" % pid, encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stay_on(pid, cores):
    """All threads of a process."""
    for thread in os.listdir("/proc/%d/task" % pid):
        os.sched_setaffinity(int(thread), cores)


class Steps:
    """An engine on the holder's host: a process that multiplies, or copies 16 MiB, on one
    thread, and how long its steps take."""

    def __init__(self, kind="multiply"):
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        self.proc = subprocess.Popen([sys.executable, "-c", STEP, kind],
                                     stdout=subprocess.PIPE, text=True, env=env)
        self.times = []
        threading.Thread(target=self._read, daemon=True).start()
        until("an engine beside", lambda: len(self.times) > 3, WAIT_S)

    def _read(self):
        for line in self.proc.stdout:
            self.times.append(float(line))

    def during(self, work):
        """(median step in ms, what the work gave)"""
        first = len(self.times)
        result = work()
        return statistics.median(self.times[first:] or self.times[-1:]) * 1e3, result

    def close(self):
        self.proc.kill()
        self.proc.wait()


class Raw:
    """bench_trip: the same bytes there and back over a socket, and nothing else."""

    def __init__(self):
        self.proc = subprocess.Popen([BUILD + "/bench/bench_trip"], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)

    def trip(self, size, count):
        """{"unix sleeping": us, …}"""
        self.proc.stdin.write("%d %d\n" % (size, count))
        self.proc.stdin.flush()
        return json.loads(self.proc.stdout.readline())

    def close(self):
        self.proc.stdin.close()
        self.proc.wait()
