#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a request costs on kvd's own backend (native), on kvd's nixl (kvd) and on the real one
(nixl), in turns.

figures.py ENGINE [--turns 5] [--requests 16] [--only BACKEND ...]

ENGINE is vllm or sglang. The pairs of all backends are up at once; those whose turn it is not
are stopped (SIGSTOP), their daemons too. A turn measures, for 1 and 8 clients and prompts of
64, 1024 and 1900 tokens, none of which came before: seconds to the first token, and processor
time. The order of the backends goes round. CPU of the transfer is that of the daemons, of the
calls of the connector on the engine's thread, and of the threads that came with the connector
(timed/kvd_timed.py); beside it all CPU of engines and daemons, and what the same pair takes
idle. Threads that poll take their CPU without requests, too: it counts. Last, what the calls
take in one step of the engine, with no and with 100 open rooms.
Prints tables for docs/runs; results/figures-ENGINE.json has all values.
Last line: N passed, N failed; a goal that is missed does not fail."""
import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import random
import signal
import statistics
import struct
import sys
import time
from types import SimpleNamespace as Some

import sglang_pd
import soak
import vllm_pd
from rig import FOLDER, HERE, HOST, Node, Tally, free_ports, logs, pause, until

BACKENDS = ("native", "kvd", "nixl")
LENGTHS, CLIENTS, TOKENS, IDLE_S, ROOMS, STEPS = (64, 1024, 1900), (1, 8), 4, 2.0, 100, 150
SAME = 1.02  # a ratio of times up to which nothing is slower
HOOKS_US = 50
PARTS = ("daemons", "calls", "threads")  # of the transfer's CPU
TICK = os.sysconf("SC_CLK_TCK")
PATIENT = "log_level = info\n[peer]\ndead_after = 10 min\n"
TIMED = os.path.join(HERE, "timed")


def timed(env, folder):
    """An engine's environment, with the clock in it."""
    path = [p for p in (env.get("PYTHONPATH"), TIMED) if p]
    return dict(env, PYTHONPATH=os.pathsep.join(path), KVD_TIMED=folder)


def prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


# ---- the engines -----------------------------------------------------------------------

class VllmEngine(vllm_pd.Engine):
    def environment(self, args, node):
        return timed(super().environment(args, node), args.folder)

    @staticmethod
    def connector(args, role, side_port):
        return vllm_pd.Engine.connector(args, role, side_port) + \
            ["--num-gpu-blocks-override", "1024"]


class Vllm:
    def __init__(self, args):
        self.args = vllm_pd.arguments(["--nixl", args.nixl, "--name", args.name])
        self.args.folder = args.folder

    def start(self, nodes):
        self.P, self.D = (VllmEngine(self.args, n, node) for n, node in zip("PD", nodes))

    def prefill(self, ids):
        return self.P.prefill(ids)

    def decode(self, ids, params):
        return self.D.complete(ids, TOKENS, params)

    def ask(self, ids):
        """(seconds to the first token, of that since decode was asked)"""
        begin = time.monotonic()
        params = self.prefill(ids)
        asked = time.monotonic()
        got = self.decode(ids, params)
        if len(got["tokens"]) != TOKENS:
            raise RuntimeError("no answer: %s" % got["error"])
        return asked - begin + got["first"], got["first"]

    def moved(self):
        told = self.D.counters()
        return {w: told[w] for w in ("xfers", "bytes", "xfer_s")}

    def busy(self, server):
        """Steps without a transfer."""
        server.complete(prompt(random.random(), 16), STEPS)

    def open_rooms(self, nodes, look):
        """look(side) while prefill, then decode, has 100 open rooms."""
        ids = [prompt("open%d" % i, 40) for i in range(ROOMS)]
        with concurrent.futures.ThreadPoolExecutor(ROOMS) as pool:
            params = list(itertools.islice(pool.map(self.prefill, ids), ROOMS))
            look("P", ROOMS)
            held = nodes[0].daemon  # NIXL reads from a stopped process: nothing stays open
            if held:
                held.freeze()
            try:
                asked = [pool.submit(self.decode, i, p) for i, p in zip(ids, params)]
                if held and until(lambda: soak.usage(self.D, "vllm:num_requests_waiting") ==
                                  ROOMS or any(a.done() for a in asked), 30) and \
                        not any(a.done() for a in asked):
                    look("D", ROOMS)
            finally:
                if held:
                    held.thaw()
            short = [a.result()["error"] for a in asked if len(a.result()["tokens"]) != TOKENS]
        if short:
            raise RuntimeError("%d of %d open requests failed: %s" % (len(short), ROOMS,
                                                                      short[0]))


class SglangEngine(sglang_pd.Engine):
    def __init__(self, args, name, node, *more):
        super().__init__(args, name, node, "--enable-metrics", "--max-total-tokens", "24576",
                         "--chunked-prefill-size", "512", *more)

    def environment(self, args, node):
        return dict(timed(super().environment(args, node), args.folder),
                    SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="120")


class Sglang:
    def __init__(self, args):
        self.args = Some(nixl=args.nixl, name=args.name, folder=args.folder)
        self.rooms = itertools.count(random.getrandbits(40))
        self.legs = concurrent.futures.ThreadPoolExecutor(2 * ROOMS)

    def start(self, nodes):
        self.bootstrap = free_ports()
        disagg = ["--disaggregation-transfer-backend", sglang_pd.BACKEND[self.args.nixl],
                  "--disaggregation-mode"]
        self.P = SglangEngine(self.args, "prefill", nodes[0], *disagg, "prefill",
                              "--disaggregation-bootstrap-port", str(self.bootstrap))
        self.D = SglangEngine(self.args, "decode", nodes[1], *disagg, "decode",
                              "--disaggregation-decode-retraction-backup", "none")

    def body(self, ids, n=TOKENS):
        return sglang_pd.request(ids, n, bootstrap_host=HOST, bootstrap_port=self.bootstrap,
                                 bootstrap_room=next(self.rooms), stream=True)

    def leg(self, server, body):
        return collections.deque(soak.events(server.port, "/generate", body), 1)

    def ask(self, ids):
        body, begin, first, said = self.body(ids), time.monotonic(), None, {}
        other = self.legs.submit(self.leg, self.P, body)
        for said in soak.events(self.D.port, "/generate", body):
            if first is None and said.get("output_ids"):
                first = time.monotonic() - begin
        other.result()
        if len(said.get("output_ids", ())) != TOKENS:
            raise RuntimeError("no answer: %s" % said)
        return first, first

    def moved(self):
        return self.P.moved()

    def busy(self, server):
        """Its loop turns by itself."""
        pause(2)

    def open_rooms(self, nodes, look):
        """Each side waits for the other, in the queue before the transfer."""
        for name, server, other in (("P", self.P, self.D), ("D", self.D, self.P)):
            bodies = [self.body(prompt("%s%d" % (name, i), 40)) for i in range(ROOMS)]
            asked = [self.legs.submit(self.leg, server, b) for b in bodies]
            pause(1.5)
            look(name, ROOMS)
            for late in [self.legs.submit(self.leg, other, b) for b in bodies] + asked:
                late.result()


# ---- processor time --------------------------------------------------------------------

def cpu_of(pid, tid=None):
    """Seconds of a process with all its threads, or of one."""
    path = "/proc/%d/stat" % pid if tid is None else "/proc/%d/task/%s/stat" % (pid, tid)
    try:
        with open(path) as f:
            words = f.read().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / TICK


class Pair:
    """A backend's engines and daemons."""

    def __init__(self, engine, nixl):
        self.nixl, self.folder = nixl, os.path.join(logs("figures-" + engine), "timed-" + nixl)
        os.makedirs(self.folder, exist_ok=True)
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))
        args = Some(nixl=nixl, name="figures-%s-%s" % (engine, nixl), folder=self.folder)
        self.pair = {"vllm": Vllm, "sglang": Sglang}[engine](args)
        self.nodes = [self.node(nixl, name) for name in "pd"]
        for node in self.nodes:
            node.__enter__()
        self.pair.start(self.nodes)

    @staticmethod
    def node(nixl, name):
        node = Node(nixl, name)
        if node.daemon:
            node.daemon.write_config(PATIENT)
        return node

    def wait(self):
        for server in (self.pair.P, self.pair.D):
            server.wait()
        for tries in range(5):  # vLLM's side channel has 5 s for the first handshake
            try:
                self.pair.ask(prompt("first%d" % tries, 40))
                return
            except RuntimeError as error:
                why = error
                pause(1)
        raise RuntimeError("%s: no request works: %s" % (self.nixl, why))

    def close(self):
        self.go()
        for name in "PD":
            if hasattr(self.pair, name):
                getattr(self.pair, name).stop()
        for node in self.nodes:
            node.__exit__(None, None, None)

    # ---- whose turn it is ----

    def halt(self):
        for server in (self.pair.D, self.pair.P):
            server.signal_all(signal.SIGSTOP)
        for node in self.nodes:
            if node.daemon:
                node.daemon.freeze()

    def go(self):
        for node in self.nodes:
            if node.daemon:
                node.daemon.thaw()
        for name in "PD":
            if hasattr(self.pair, name):
                getattr(self.pair, name).signal_all(signal.SIGCONT)

    # ---- what it took ----

    def clocks(self):
        """{pid: (steps, seconds, CPU seconds, calls)} of processes with a connector."""
        out = {}
        for name in filter(str.isdigit, os.listdir(self.folder)):
            with open(os.path.join(self.folder, name), "rb") as f:
                out[int(name)] = struct.unpack("4d", f.read(32))
        return out

    def clock_of(self, server):
        pid, = set(self.clocks()) & set(server.pids())
        return pid, self.clocks()[pid]

    def last_steps(self, pid, count):
        """Seconds in calls of each of the last steps."""
        with open(os.path.join(self.folder, str(pid)), "rb") as f:
            data = f.read()
        steps, ring = int(struct.unpack_from("d", data)[0]), len(data) // 8 - 4
        return [struct.unpack_from("d", data, 8 * (4 + i % ring))[0]
                for i in range(max(0, steps - min(count, ring)), steps)]

    def cpu(self):
        """CPU seconds so far, by what took them."""
        out = {"engines": sum(cpu_of(pid) for server in (self.pair.P, self.pair.D)
                              for pid in server.pids()),
               "daemons": sum(cpu_of(pid) for node in self.nodes if node.daemon
                              for pid in soak.family(node.daemon.proc.pid)),
               "calls": 0.0, "threads": 0.0}
        for pid, (_, _, seconds, _) in self.clocks().items():
            out["calls"] += seconds
            try:
                with open(os.path.join(self.folder, "%d.tids" % pid)) as f:
                    out["threads"] += sum(cpu_of(pid, tid) for tid in f.read().split())
            except FileNotFoundError:
                pass
        return out

    def spent(self, work):
        """(what work() gave, seconds, CPU seconds of each part)"""
        before, begin = self.cpu(), time.monotonic()
        got = work()
        took, after = time.monotonic() - begin, self.cpu()
        return got, took, {word: after[word] - before[word] for word in after}


# ---- a turn ----------------------------------------------------------------------------

def cell(pair, turn, clients, length, count):
    """Requests by so many clients: a record."""
    ids = [prompt("%s.%s.%s.%d" % (turn, clients, length, i), length) for i in range(count)]

    def work():
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            return list(pool.map(pair.pair.ask, ids))
    got, took, cpu = pair.spent(work)
    ttft = sorted(t for t, _ in got)
    return {"p50": statistics.median(ttft), "p99": ttft[-(-len(ttft) * 99 // 100) - 1],
            "decode_p50": statistics.median(d for _, d in got), "took": took, "cpu": cpu,
            "count": count}


def take_turn(pair, turn, args):
    out = {"turn": turn}
    _, took, cpu = pair.spent(lambda: pause(IDLE_S))
    out["idle"] = {word: seconds / took for word, seconds in cpu.items()}
    moved = pair.pair.moved()
    out["cells"] = {(c, n): cell(pair, turn, c, n, args.requests * (1 if c == 1 else 2))
                    for c in CLIENTS for n in LENGTHS}
    wanted = sum(one["count"] for one in out["cells"].values())
    until(lambda: pair.pair.moved()["xfers"] - moved["xfers"] >= wanted, 10)
    out["moved"] = {word: value - moved[word] for word, value in pair.pair.moved().items()}
    return out


def steps(pair):
    """Microseconds in calls a step: {(side, open rooms): {p50, mean, steps}}."""
    out = {}

    def look(side, rooms):
        server = getattr(pair.pair, side)
        pid, before = pair.clock_of(server)
        pair.pair.busy(server)
        _, after = pair.clock_of(server)
        count = int(after[0] - before[0])
        if count:
            out[side, rooms] = told(pair.last_steps(pid, count), before, after)

    def told(each, before, after):
        count = after[0] - before[0]
        return {"p50": 1e6 * statistics.median(each), "steps": int(count),
                "mean": 1e6 * (after[1] - before[1]) / count,
                "cpu": 1e6 * (after[2] - before[2]) / count}
    look("P", 0)
    look("D", 0)
    pair.pair.open_rooms(pair.nodes, look)
    return out


# ---- what comes of it ------------------------------------------------------------------

def middle(values):
    return statistics.median(values)


class Report:
    def __init__(self, turns, hooks, engine):
        self.turns, self.hooks, self.engine = turns, hooks, engine
        self.backends = [b for b in BACKENDS if b in turns]
        self.lines, self.goals = [], []

    def of(self, backend, key, word):
        return middle([t["cells"][key][word] for t in self.turns[backend]])

    def cpu(self, backend, words, idle=0):
        """Milliseconds a request; idle 1: less what they take without requests."""
        each = []
        for turn in self.turns[backend]:
            cells = turn["cells"].values()
            seconds = sum(c["cpu"][w] - idle * c["took"] * turn["idle"][w] for c in cells
                          for w in words)
            each.append(1e3 * seconds / sum(c["count"] for c in cells))
        return middle(each)

    def row(self, *cells):
        self.lines.append("| " + " | ".join(str(c) for c in cells) + " |")

    def head(self, *cells):
        self.lines.append("")
        self.row(*cells)
        self.lines.append("|" + "---|" * len(cells))

    def goal(self, words, met):
        self.goals.append({"goal": words, "met": bool(met)})

    def write(self):
        keys = [(c, n) for c in CLIENTS for n in LENGTHS]
        names = " \\| ".join(self.backends)
        self.head("clients, tokens", "first token, ms, p50: " + names, "p99: " + names,
                  "of p50 at decode: " + names)
        for key in keys:
            self.row("%d, %d" % key, *(" \\| ".join(
                "%.1f" % (1e3 * self.of(b, key, word)) for b in self.backends)
                for word in ("p50", "p99", "decode_p50")))
        self.head("CPU ms a request", *self.backends)
        for words, parts in (("daemons", PARTS[:1]), ("calls of the connector", PARTS[1:2]),
                             ("the connector's threads", PARTS[2:]),
                             ("**these together**", PARTS),
                             ("all of engines and daemons", ("engines", "daemons"))):
            self.row(words, *("%.2f" % self.cpu(b, parts) for b in self.backends))
        self.row("these together, less what they take idle", *(
            "%.2f" % max(self.cpu(b, PARTS, 1), 0) for b in self.backends))
        self.row("idle, engines and daemons, ms of CPU a second", *("%.0f" % middle(
            [1e3 * (t["idle"]["engines"] + t["idle"]["daemons"]) for t in self.turns[b]])
            for b in self.backends))
        self.head("transfers as the engine reports them", *self.backends)
        for words, form in (("requests a turn", lambda m: "%d" % m["xfers"]),
                            ("MB a request", lambda m: "%.3f" % (m["bytes"] / 1e6 / m["xfers"])),
                            ("ms a request", lambda m: "%.2f" % (1e3 * m["xfer_s"] /
                                                                 m["xfers"]))):
            self.row(words, *(form({w: middle([t["moved"][w] for t in self.turns[b]])
                                    for w in ("xfers", "bytes", "xfer_s")})
                              for b in self.backends))
        self.head("µs in calls, a step: median, mean, CPU", *self.backends)
        for side, rooms in (("P", 0), ("P", ROOMS), ("D", 0), ("D", ROOMS)):
            self.row("%s, %d open rooms" % ({"P": "prefill", "D": "decode"}[side], rooms), *(
                "%.0f, %.0f, %.0f" % tuple(self.hooks[b][side, rooms][w]
                                           for w in ("p50", "mean", "cpu"))
                if (side, rooms) in self.hooks[b] else "–" for b in self.backends))
        self.judge(keys)

    def judge(self, keys):
        if "native" not in self.backends:
            return
        for other in [b for b in self.backends if b != "native"]:
            for key in keys:
                a, b = self.of("native", key, "p50"), self.of(other, key, "p50")
                self.goal("%d clients, %d tokens: first token %.1f ms, %.2f of %s, at most %.2f"
                          % (*key, 1e3 * a, a / b, other, SAME), a <= SAME * b)
        if "nixl" in self.backends:
            a, b = (self.cpu(x, PARTS) for x in ("native", "nixl"))
            self.goal("CPU of a transfer %.2f ms, %.2f of NIXL's, at most 0.5"
                      % (a, a / b if b > 0 else float("inf")), b > 0 and a <= b / 2)
        for (side, rooms), told in sorted(self.hooks["native"].items()):
            self.goal("%s, %d open rooms: %.0f us a step, at most %d"
                      % (side, rooms, told["p50"], HOOKS_US), told["p50"] <= HOOKS_US)


def keyed(thing):
    """JSON has no tuples for keys."""
    if isinstance(thing, dict):
        return {",".join(map(str, k)) if isinstance(k, tuple) else k: keyed(v)
                for k, v in thing.items()}
    return [keyed(x) for x in thing] if isinstance(thing, list) else thing


def measure(args, pairs, tally):
    turns, order = {b: [] for b in pairs}, list(pairs)
    for pair in pairs.values():
        pair.wait()
        pair.pair.ask(prompt("warm", 1024))
        pair.halt()
    tally.add("engines are up", True)
    for turn in range(args.turns):
        for backend in order:
            pair = pairs[backend]
            pair.go()
            pause(0.5)
            begin = time.monotonic()
            turns[backend].append(take_turn(pair, turn, args))
            print("      turn %d %-6s %.0f s  %s" % (turn, backend, time.monotonic() - begin, {
                "%d,%d" % k: "%.0f ms" % (1e3 * c["p50"])
                for k, c in turns[backend][-1]["cells"].items()}), flush=True)
            pair.halt()
        order.append(order.pop(0))
    hooks = {}
    for backend, pair in pairs.items():
        pair.go()
        pause(0.5)
        hooks[backend] = steps(pair)
        pair.halt()
    return turns, hooks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16, help="of one client; twice of 8")
    parser.add_argument("--only", nargs="*", choices=BACKENDS, default=BACKENDS)
    args = parser.parse_args()
    tally, pairs = Tally(), {}
    try:
        try:
            for backend in args.only:
                pairs[backend] = Pair(args.engine, backend)
            turns, hooks = measure(args, pairs, tally)
        finally:
            for pair in pairs.values():
                pair.close()
        report = Report(turns, hooks, args.engine)
        report.write()
        print("\n".join(report.lines) + "\n")
        for goal in report.goals:
            print("%s %s" % ("met     " if goal["met"] else "not met ", goal["goal"]))
        for backend in turns:
            wanted = len(CLIENTS) and sum(c["count"] for c in turns[backend][0]["cells"].values())
            tally.add("%s: every request moved bytes" % backend, all(
                t["moved"]["xfers"] == wanted for t in turns[backend]), wanted)
        tally.notes = {"turns": keyed(turns), "hooks": keyed(hooks), "goals": report.goals,
                       "table": report.lines}
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    code = tally.close("figures-" + args.engine)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
