#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Query rows that go to the KV, beside their floors: the goals of routing in one run.

bench_route.py [--json FILE] [--doc FOLDER] [--plot FILE] [--from FILE] [--part NAME …]

    echo    rows that come back as they are, beside a bare ping-pong of the same bytes over a
            Unix socket (shm) or TCP, asleep and awake (then each daemon on a core of its own)
    sweep   M rows over C tokens of one layer, by shm and by tcp: routed, and pulled and then
            attended at home (of a third daemon, that has the same); beside it what kvd_decide() says by the daemon's own page
    fan     N daemons that ask one holder at the same time, one row each
    out     one row over 2048 tokens of one holder, then of seven; and a pull from them
    crowd   32 daemons with one decoded token each (16 rows), and an engine beside the holder:
            its steps' time alone, beside them, and beside a daemon that floods the holder
    beside  steps of an engine that has a core, while all daemons share the other: alone,
            beside one that asks, beside a flood, and beside one that keeps to no window

All daemons are of this host, and so are those that ask: what they take of its cores is in
every figure. Attention at home is the time of the kernel's calls alone. Prints a page of docs/runs; --doc writes it there, and
--plot the break-even of sweep; --from: of an earlier --json. KVD_BUILD names the build folder.
This is a benchmark: it judges nothing."""
import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import bench_route_page
from bench_route_parts import (DQK, DV, T, TOKEN_BYTES, WAIT_S, BUILD, Engine, Hosts, PAUSE, Raw, Steps,
                               attended, cpu_s, crowd, ids_of, kernel_us, kvd, median_us, part, rounds,
                               single, slow_turns, stay_on, until)
import attend_flood  # noqa: E402

TRANSPORTS = ("shm", "tcp")
CORES = sorted(os.sched_getaffinity(0))


def say(words):
    print("bench-route: " + words, file=sys.stderr, flush=True)


# ---- echo ----

ECHO_COUNTS = {16: 60, 128: 20, 1024: 4}
ECHO_TURNS = 5
ECHO_REFILL_S = 0.15  # of the holder's bound on echoes
AWAKE_US = 1000


def echo_once(client, holder, rows):
    while True:
        try:
            PAUSE.wait(ECHO_REFILL_S)
            told = client.command("cost.calibrate", endpoint=holder.endpoint, rows=rows,
                                  rounds=ECHO_COUNTS[rows])
            return told["echoes"][0]["us"]
        except kvd.BusyError:
            continue


def echo(transport, mode):
    """{rows: (echo, bare)} in us: medians of turns."""
    raw, figures = Raw(), {}
    name = ("unix " if transport == "shm" else "tcp ") + mode
    with Hosts() as hosts:
        spin = "%d" % AWAKE_US if mode == "spinning" else "off"
        holder = hosts.add(transport, spin=spin)
        client = hosts.add(transport, spin=spin, stores=[holder.endpoint])
        if mode == "spinning":
            stay_on(client.pid, {CORES[0]})
            stay_on(holder.pid, {CORES[-1]})
        for rows, count in ECHO_COUNTS.items():
            echo_once(client, holder, rows)
            turns = [(echo_once(client, holder, rows), raw.trip(rows * TOKEN_BYTES, count)[name])
                     for _ in range(ECHO_TURNS)]
            figures[rows] = [statistics.median(t) for t in zip(*turns)]
    raw.close()
    return figures


# ---- sweep ----

SWEEP_TOKENS = [256 << i for i in range(8)]
SWEEP_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
SWEEP_S = 20        # of a transport
SWEEP_PASSES = (4, 12)
SHORT_US = 3000     # a cell that is tried three times a pass
DECIDED_MOST = 4096
BESIDE_POSTS = 60
MODEL = kvd.cost.Model.mla(layers=1, heads=1, out_bytes=4)


class Sweep:
    def __init__(self, hosts, transport):
        tokens = SWEEP_TOKENS[-1]
        self.holder = hosts.add(transport, memory=96)
        self.own = hosts.add(transport, stores=[self.holder.endpoint])
        self.alone = hosts.add("shm", memory=96)  # like `own`, with chunks of its own
        there, self.engine, self.home = (Engine(c, tokens) for c in (
            self.holder, self.own, self.alone))
        for engine in (there, self.home):
            engine.fill()
            engine.put(b"kv")
        self.far, self.near = self.engine.hold(b"kv"), self.home.hold(b"kv")
        self.views = {c: kvd.View(list(range(c // T)), tokens=(0, c)) for c in SWEEP_TOKENS}
        for rows in SWEEP_ROWS:
            self.engine.seat(rows)
            self.home.seat(rows)
        self.page = self.own.cost_page()
        until("what attending costs", lambda: len(self.own.command("cost.show")["speeds"]) >= 2,
              WAIT_S)
        peer = next(p for p in self.own.command("peer.list")["peers"]
                    if p["endpoint"] == self.holder.endpoint)
        self.peer = bytes.fromhex(peer["instance"])

    def decide(self, rows, tokens):
        return self.page.decide(MODEL, [kvd.cost.Holder(tokens, 0, self.peer)],
                                query_tokens=rows, steps=1)

    def border(self, tokens, routes):
        """The smallest number of rows that is not routed; routes(choice) falls with it."""
        low, high = 0, DECIDED_MOST + 1
        while high - low > 1:
            middle = (low + high) // 2
            if routes(self.decide(middle, tokens)):
                low = middle
            else:
                high = middle
        return high

    def borders(self, tokens):
        """Of twice the error below, of equal prices, and of twice the error above."""
        return [self.border(tokens, routes) for routes in (
            lambda c: c.way == "route" and c.sure,
            lambda c: c.route.us < c.fetch.us,
            lambda c: not (c.way == "fetch" and c.sure))]

    def cell(self, rows, tokens):
        choice = self.decide(rows, tokens)
        tried = []
        for _ in range(3 if choice.route.us < SHORT_US else 1):
            us, _ = kernel_us(self.alone, lambda: self.home.ask(rows, [part(self.near, tokens)]))
            tried.append((self.engine.ask(rows, [part(self.far, tokens)]) * 1e6,
                          self.engine.fetch(self.far, self.views[tokens]) * 1e6, us))
        route, pull, home = (statistics.median(t) for t in zip(*tried))
        return {"route": route, "pull": pull, "home": home, "way": choice.way,
                "sure": choice.sure, "price_route": choice.route.us,
                "price_fetch": choice.fetch.us}

    def one_pass(self, seen, borders):
        for tokens in SWEEP_TOKENS:
            borders.setdefault(tokens, []).append(self.borders(tokens))
        cells = [(m, c) for m in SWEEP_ROWS for c in SWEEP_TOKENS]
        random.shuffle(cells)
        for cell in cells:
            seen.setdefault(cell, []).append(self.cell(*cell))

    def beside(self):
        """(turns, slow ones) of both daemons while 1024 rows go to and fro."""
        before = [slow_turns(c) for c in (self.holder, self.own)]
        for _ in range(BESIDE_POSTS):
            self.engine.ask(1024, [part(self.far, 2048)])
        return [int(n) for n in sum(slow_turns(c) - b for c, b in
                                    zip((self.holder, self.own), before))]


def sweep(transport):
    """{"cells": …, "borders": …, "turns": …}; what the first pass saw is not counted: the page
    learns what a pull takes from it."""
    with Hosts() as hosts:
        all_of = Sweep(hosts, transport)
        all_of.one_pass({}, {})
        seen, borders, end = {}, {}, time.monotonic() + SWEEP_S
        for i in range(SWEEP_PASSES[1]):
            if i >= SWEEP_PASSES[0] and time.monotonic() > end:
                break
            all_of.one_pass(seen, borders)
        return {"cells": [dict(rows=m, tokens=c, passes=passes)
                          for (m, c), passes in seen.items()],
                "borders": borders, "turns": all_of.beside()}


# ---- fan-in ----

FAN_TOKENS = 2048
FAN_REQUESTERS = (1, 8, 16, 32)
FAN_S = 0.6
FAN_TURNS = 3
FAN_ROUNDS = 15


class Crowd:
    """Daemons that ask one holder, with an engine each."""

    def __init__(self, hosts, transport, count, rows, more=()):
        self.rows, tokens = rows, FAN_TOKENS
        self.holder = hosts.add(transport, memory=16)
        there = Engine(self.holder, tokens)
        there.fill()
        for name in (b"fan",) + tuple(more):
            there.put(name)
        self.clients = hosts.add_all(count, transport, threads=0, stores=[self.holder.endpoint])
        self.engines = [Engine(c, T, heads=rows) for c in self.clients]
        self.parts = [[part(e.hold(b"fan", tokens), tokens)] for e in self.engines]
        single(self.engines, rows, self.parts, 0.2)

    def during(self, work, count, seconds):
        """Of some engines for some seconds: latencies, and what the holder did meanwhile."""
        engines = self.engines[:count]
        before, cpu = attended(self.holder), cpu_s(self.holder.pid)
        begin = time.perf_counter()
        times = work(engines, self.rows, self.parts, seconds)
        wall = time.perf_counter() - begin
        after = attended(self.holder)
        return {"times": times, "wall": wall, "cpu": cpu_s(self.holder.pid) - cpu,
                **{k: after[k] - before[k]
                   for k in ("batches_total", "served_rows_total", "compute_seconds_total")}}


def together(tries):
    """Of several tries, one."""
    return {k: [t for one in tries for t in one[k]] if k == "times" else
            sum(one[k] for one in tries) for k in tries[0]}


def told(figure):
    times = sorted(figure["times"])
    return {"each_us": figure["wall"] / len(times) * 1e6, "p50_us": median_us(times),
            "p99_us": times[int(len(times) * 0.99)] * 1e6, "count": len(times),
            "rows_a_call": figure["served_rows_total"] / max(1, figure["batches_total"]),
            "call_us": 1e6 * figure["compute_seconds_total"] / max(1, figure["batches_total"]),
            "holder_cores": figure["cpu"] / figure["wall"],
            "holder_us_each": figure["cpu"] / len(times) * 1e6}


def fan(transport):
    """{N: {"alone": …, "crowd": …, "round_us": …}}"""
    with Hosts() as hosts:
        all_of = Crowd(hosts, transport, FAN_REQUESTERS[-1], 1)
        tries = {n: {"alone": [], "crowd": [], "rounds": []} for n in FAN_REQUESTERS}
        for _ in range(FAN_TURNS):
            for n, of in tries.items():
                of["alone"].append(all_of.during(single, n, FAN_S))
                of["crowd"].append(all_of.during(crowd, n, FAN_S))
                of["rounds"] += rounds(all_of.engines[:n], 1, all_of.parts, FAN_ROUNDS)
        return {n: {"alone": told(together(of["alone"])), "crowd": told(together(of["crowd"])),
                    "round_us": median_us(of["rounds"])} for n, of in tries.items()}


# ---- fan-out ----

OUT_HOLDERS, OUT_TOKENS, OUT_ROWS, OUT_TURNS = 7, 2048, 16, 150


def out(transport):
    """Medians, us."""
    chunks = [OUT_TOKENS // T * (i + 1) // OUT_HOLDERS - OUT_TOKENS // T * i // OUT_HOLDERS
              for i in range(OUT_HOLDERS)]
    with Hosts() as hosts:
        holders = hosts.add_all(OUT_HOLDERS, transport, memory=16)
        for i, client in enumerate(holders):
            there = Engine(client, OUT_TOKENS)
            there.fill()
            there.put(b"of %d" % i, tokens=chunks[i] * T)
            if i == 0:
                there.put(b"all")
        own = hosts.add(transport, memory=16, stores=[h.endpoint for h in holders])
        engine = Engine(own, OUT_TOKENS, heads=OUT_ROWS)
        whole = engine.hold(b"all")
        holds = [engine.hold(b"of %d" % i, n * T) for i, n in enumerate(chunks)]
        firsts = [sum(chunks[:i]) for i in range(OUT_HOLDERS)]
        views = [{"kv": kvd.View(list(range(f, f + n)), tokens=(0, n * T))}
                 for f, n in zip(firsts, chunks)]

        def gather():
            begin = time.perf_counter()
            for move in [h.fetch(v, post=True) for h, v in zip(holds, views)]:
                move.wait(timeout=WAIT_S)
            return time.perf_counter() - begin
        ways = {"one": lambda: engine.ask(OUT_ROWS, [part(whole, OUT_TOKENS)]),
                "seven": lambda: engine.ask(OUT_ROWS, [part(h, n * T)
                                                       for h, n in zip(holds, chunks)]),
                "gather": gather}
        times = {name: [] for name in ways}
        for _ in range(OUT_TURNS):
            for name, way in ways.items():
                times[name].append(way())
        return {name: median_us(of[5:]) for name, of in times.items()}


# ---- a crowd, a flood, an engine beside ----

CROWD_REQUESTERS, CROWD_ROWS, CROWD_S = 32, 16, 2.0
FLOOD_ENGINES, FLOOD_ROWS = 4, 512


def flood(socket, seconds):
    """In a process of its own, until it is killed."""
    clients = [kvd.Client(socket) for _ in range(FLOOD_ENGINES)]
    engines = [Engine(c, T) for c in clients]
    parts = [[part(e.hold(b"flood", FAN_TOKENS), FAN_TOKENS)] for e in engines]
    single(engines, FLOOD_ROWS, parts, 0.1)
    print("floods", flush=True)
    crowd(engines, FLOOD_ROWS, parts, seconds)


class Flood:
    def __init__(self, client):
        self.proc = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--flood",
                                      client.socket], stdout=subprocess.PIPE, text=True)
        assert self.proc.stdout.readline() == "floods\n"

    def close(self):
        self.proc.kill()
        self.proc.wait()


def crowded(transport):
    """{work: figures}: each with step_ms (the engine wherever there is a core) and
    step_own_ms (on a core that it has alone)."""
    figures = {}
    with Hosts() as hosts:
        all_of = Crowd(hosts, transport, CROWD_REQUESTERS, CROWD_ROWS, more=(b"flood",))
        hostile = hosts.add(transport, threads=0, memory=32, stores=[all_of.holder.endpoint])
        steps = Steps()

        def work(name, count, how):
            step, seen = steps.during(lambda: all_of.during(how, count, CROWD_S))
            figures[name] = {**told(seen), "step_ms": step,
                             "rows_a_s": len(seen["times"]) * CROWD_ROWS / seen["wall"]}
            rest = [c for c in CORES if c != CORES[0]] or CORES
            pids = [all_of.holder.pid, hostile.pid, os.getpid()] + \
                [c.pid for c in all_of.clients]
            stay_on(steps.proc.pid, {CORES[0]})
            for pid in pids:
                stay_on(pid, set(rest))
            figures[name]["step_own_ms"] = steps.during(
                lambda: all_of.during(how, count, CROWD_S / 2))[0]
            for pid in pids + [steps.proc.pid]:
                stay_on(pid, set(CORES))
        work("nobody", 1, lambda *_: [PAUSE.wait(CROWD_S) or 1.0])
        work("one", 1, single)
        work("unbatched", CROWD_REQUESTERS, single)
        facts = []
        work("batched", CROWD_REQUESTERS, lambda *of: crowd(*of, facts=facts))
        figures["batched"]["replicate"] = statistics.mean(f.replicate for f in facts)
        figures["batched"]["together"] = statistics.median(f.together for f in facts)
        flooding = Flood(hostile)
        work("one beside a flood", 1, single)
        work("batched beside a flood", CROWD_REQUESTERS, crowd)
        flooding.close()
        steps.close()
    return figures


# ---- an engine that has a core ----

BESIDE_S, BESIDE_TURNS, BESIDE_ROWS = 1.0, 3, 256


def beside():
    """{work: {"multiply": ms of a step, "copy": …, "cores": the holder's, "refused": …}}"""
    seen = {}
    with Hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        sections, keys = attend_flood.keys_of(folder, ("holder", "requester", "mallory"))
        holder = hosts.add("tcp", memory=16, peer=sections["holder"])
        requester = hosts.add("tcp", threads=0, memory=32, stores=[holder.endpoint],
                          peer=sections["requester"])
        there = Engine(holder, FAN_TOKENS)
        there.fill()
        there.put(b"flood")
        engine = Engine(requester, T, heads=CROWD_ROWS)
        parts = [[part(engine.hold(b"flood", FAN_TOKENS), FAN_TOKENS)]]
        single([engine], CROWD_ROWS, parts, 0.2)
        steps = {kind: Steps(kind) for kind in ("multiply", "copy")}
        rest = {c for c in CORES if c != CORES[0]} or set(CORES)
        for pid in (holder.pid, requester.pid, os.getpid()):
            stay_on(pid, rest)

        def work(name, what):
            of = seen.setdefault(name, {k: [] for k in (*steps, "cores", "refused")})
            for kind, step in steps.items():
                for other in steps.values():  # one at a time
                    os.kill(other.proc.pid, signal.SIGSTOP)
                os.kill(step.proc.pid, signal.SIGCONT)
                stay_on(step.proc.pid, {CORES[0]})
                step.during(lambda: PAUSE.wait(0.1))
                before, cpu = attended(holder)["refused_total"], cpu_s(holder.pid)
                begin = time.perf_counter()
                of[kind].append(step.during(what)[0])
                wall = time.perf_counter() - begin
                of["cores"].append((cpu_s(holder.pid) - cpu) / wall)
                of["refused"].append(attended(holder)["refused_total"] - before)
        for _ in range(BESIDE_TURNS):
            work("nobody", lambda: PAUSE.wait(BESIDE_S))
            work("one that asks", lambda: single([engine], CROWD_ROWS, parts, BESIDE_S))
            flooding = Flood(requester)
            stay_on(flooding.proc.pid, rest)
            work("a flood", lambda: PAUSE.wait(BESIDE_S))
            flooding.close()
            with attend_flood.Flood(holder, keys["mallory"], ids_of(b"flood", FAN_TOKENS // T),
                                    tokens=FAN_TOKENS, rows=BESIDE_ROWS, heads=1, dqk=DQK,
                                    dv=DV):
                work("a flood without a window", lambda: PAUSE.wait(BESIDE_S))
        for step in steps.values():
            step.close()
    return {name: {k: statistics.median(v) for k, v in of.items()} for name, of in seen.items()}


# ---- all ----

PARTS = {"echo": lambda: {t: {m: echo(t, m) for m in ("sleeping", "spinning")}
                          for t in TRANSPORTS},
         "sweep": lambda: {t: sweep(t) for t in TRANSPORTS},
         "fan": lambda: {t: fan(t) for t in TRANSPORTS},
         "out": lambda: {t: out(t) for t in TRANSPORTS},
         "crowd": lambda: {"shm": crowded("shm")}, "beside": beside}


def measure(names):
    told_all = {"about": bench_route_page.about(), "loads": [os.getloadavg()[0]]}
    for name in names:
        begin = time.monotonic()
        told_all[name] = PARTS[name]()
        told_all["loads"].append(os.getloadavg()[0])
        say("%s took %.0f s" % (name, time.monotonic() - begin))
    # as they are read again: keys of JSON are words
    return json.loads(json.dumps(told_all))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all figures there")
    parser.add_argument("--from", dest="source", help="measure nothing: figures of --json")
    parser.add_argument("--doc", help="a folder: the page of this run is written there")
    parser.add_argument("--plot", help="write the break-even there, as SVG")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flood:
        flood(args.flood, WAIT_S)
        return
    if args.source:
        with open(args.source, encoding="utf-8") as file:
            figures = json.load(file)
    else:
        figures = measure(args.part)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file)
    if args.plot and "sweep" in figures:
        bench_route_page.plot(figures, args.plot)
    print(bench_route_page.section(figures))
    if args.doc:
        print(bench_route_page.write(figures, args.doc))


if __name__ == "__main__":
    main()
