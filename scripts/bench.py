#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd beside its limits and its peers, all in one run that takes turns.

bench.py [--reps N] [--minutes N] [--peers VENV] [--against FILE] [--profile]
         [--out FOLDER] [--doc FOLDER] [--from FILE] [WORD ...]

For each work (a row of the table) all parts are set up with fresh memory of their
own: two live daemons and an engine on each side, the limits (the same rows without
kvd; iperf3, tcp_floor, ucx_perftest) and, with --peers, NIXL and Mooncake. Then
they take turns, a few transfers each, who begins changes, REPS times over; figures
are medians with the tenth and ninetieth percentile. Prints one table with ratios
and goals, writes latest.json, latest.md and latest.svg into --out. --profile lets perf
look at both daemons for some more transfers of each work: who used the cores. A slow
machine makes fewer repetitions, two at least, to be done after --minutes.

--doc writes the figures, with date, commit and machine, as a page of this run into a folder
(docs/runs); --from FILE measures nothing and takes an earlier run's latest.json.

Words choose parts (mk/bench.mk). KVD_BUILD names the build folder.
"""
import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [os.path.join(ROOT, "tests", "bench"), os.path.join(ROOT, "tests", "lib")]
import bench_control  # noqa: E402
import bench_page  # noqa: E402
import bench_report  # noqa: E402
from bench_parts import (BUILD, Gone, Iperf, Limit, Mooncake, Nixl, Pair, TcpFloor,  # noqa: E402
                         UcxPerftest, Xfer)
from bench_works import CRYPTO, GOALS, GROUPS, KINDS, ROWS, WEIGHTS, Chosen  # noqa: E402

TURN = 4            # transfers a turn
REPS_MIN = 2
PROFILE_TURNS = 5
PROFILE_LINES = 12


def say(words):
    print("bench: " + words, file=sys.stderr, flush=True)


class Budget:
    """Shares out what is left of the time among the works that are left."""

    def __init__(self, minutes, weights):
        self.end, self.weights = time.monotonic() + 60 * minutes, weights

    def until(self, weight):
        """When the next work, of this weight, shall end."""
        now = time.monotonic()
        share = max(0, self.end - now) * weight / max(self.weights, weight)
        self.weights -= weight
        return now + share


def copy_threads():
    return int(os.environ.get("KVD_BENCH_COPY_THREADS", 0)) or max(1, os.cpu_count() // 2)


class Bench:
    def __init__(self, args):
        self.args, self.threads = args, copy_threads()
        self.pairs, self.records, self.budget = {}, [], None
        said = subprocess.run([BUILD + "/kvd", "--version"], capture_output=True, text=True,
                              check=True).stdout
        self.transports = [line for line in said.splitlines()
                           if line.startswith("transports:")][0].split()[1:]

    def pair(self, kind):
        """Of a transport, or of a kind of tcp that has options of its own."""
        if kind not in self.pairs:
            more = "tcp_crypto = %s" % kind if kind in CRYPTO else ""
            self.pairs[kind] = Pair("tcp" if more else kind, self.threads, more)
        return self.pairs[kind]

    def kinds(self, wanted):
        for kind in wanted:
            if KINDS[kind][1] in self.transports:
                yield kind
            else:
                say("%s: this build has no transport %s" % (kind, KINDS[kind][1]))

    # ---- transfers ----

    def part(self, parts, make):
        """A part that cannot be had is told and left out."""
        try:
            parts.append(make())
            return parts[-1]
        except (Gone, OSError) as why:
            say(str(why))
            return None

    def host_parts(self, parts, kinds, op, rows, caches):
        plans, peers = [], []
        for kind in kinds:
            xfer = self.part(parts, lambda k=kind: Xfer(self.pair("shm"), KINDS[k][2], op,
                                                        rows, caches, self.threads))
            if xfer:
                parts.append(Limit(xfer, "proc_mem" if kind == "vm" else "memcpy"))
                plans.append((kind, xfer, [parts[-1]]))
        if self.args.peers:
            peers.append(self.part(parts, lambda: Nixl(self.args.peers, op, rows, caches,
                                                       "default")))
        return plans, peers

    def net_limits(self, parts, kinds, op, rows, caches):
        limits = {"tcp": [], "ucx": [], "aes128gcm": []}
        iperf = self.part(parts, Iperf)
        if "tcp" in kinds and caches == "cold" and TcpFloor.there():
            limits["tcp"].append(self.part(parts, lambda: TcpFloor(op, rows, self.threads)))
        for kind in CRYPTO:
            if kind in kinds and caches == "cold" and TcpFloor.there():
                limits[kind].append(self.part(
                    parts, lambda k=kind: TcpFloor(op, rows, self.threads, k)))
        if "ucx" in kinds:
            limits["ucx"].append(self.part(parts, UcxPerftest))
        for names in limits.values():
            names.append(iperf)
        return limits

    def net_parts(self, parts, kinds, op, rows, caches):
        """Peers are measured warm; ucx is no fallback of anybody's, so only cold."""
        plans, peers, venv = [], [], self.args.peers if caches == "warm" else None
        kinds = [kind for kind in kinds if caches == "cold" or kind != "ucx"]
        limits = self.net_limits(parts, kinds, op, rows, caches) if kinds else {}
        for kind in kinds:
            xfer = self.part(parts, lambda k=kind: Xfer(self.pair(k), KINDS[k][2], op, rows,
                                                        caches, self.threads))
            if xfer:
                plans.append((kind, xfer, limits[kind]))
        if venv and plans:
            peers.append(self.part(parts, lambda: Nixl(venv, op, rows, caches, "tcp")))
        if venv and plans and rows in ("64k", "4k"):
            peers.append(self.part(parts, lambda: Mooncake(venv, op, rows)))
        return plans, peers

    def take_turns(self, parts, until):
        for rep in range(self.args.reps):
            if rep >= REPS_MIN and time.monotonic() > until:
                say("only %d repetitions: no time" % rep)
                return
            at = rep % len(parts)
            for part in parts[at:] + parts[:at]:
                try:
                    part.turn(TURN)
                except (Gone, subprocess.TimeoutExpired, ValueError) as why:
                    say("%s: %s" % (part.name, why))

    def profile(self, kind, kvd, words):
        """Where both daemons' time went, thread by thread; into --out, the top is told."""
        os.makedirs(self.args.out, exist_ok=True)
        data, kept = os.path.join(self.args.out, "perf.data"), list(kvd.samples)
        pids = ",".join(str(d.proc.pid) for d in self.pair(kind if kind in CRYPTO else KINDS[kind][1]).daemons)
        perf = subprocess.Popen(["perf", "record", "-q", "-F", "997", "-o", data, "-p", pids],
                                stderr=subprocess.DEVNULL)
        for _ in range(PROFILE_TURNS):
            kvd.turn(TURN)
        kvd.samples = kept
        perf.send_signal(signal.SIGINT)
        perf.wait()
        said = subprocess.run(["perf", "report", "-i", data, "--stdio", "-q", "--no-children",
                               "--percent-limit", "1", "--sort", "comm,symbol"],
                              capture_output=True, text=True).stdout
        path = os.path.join(self.args.out, "profile-%s.txt" % words)
        with open(path, "w") as out:
            out.write(said)
        if os.path.exists(data):
            os.unlink(data)
        print("%s\n%s" % (path, "\n".join(
            [line.rstrip(" -") for line in said.splitlines() if line.strip()][:PROFILE_LINES])))

    def work(self, group, kinds, op, rows, caches):
        parts, begin = [], time.monotonic()
        until = self.budget.until(WEIGHTS[group])
        make = self.host_parts if group == "host" else self.net_parts
        try:
            plans, peers = make(parts, kinds, op, rows, caches)
            if plans:
                self.take_turns(parts, until)
            for kind, kvd, _ in plans if self.args.profile else []:
                self.profile(kind, kvd, "-".join((kind, caches, rows, op)))
        finally:
            for part in parts:
                part.close()
        for kind, kvd, limits in plans:
            if kvd.samples:
                self.records.append(bench_report.transfer_record(
                    ROWS[rows], KINDS[kind], op, caches, kvd,
                    [one for one in limits if one], [one for one in peers if one],
                    GOALS[caches][kind].get(rows, [])))
        if plans:
            say("%s, %s, %s, %s: %.0f s" % (
                ", ".join(kind for kind, _, _ in plans), caches, ROWS[rows][0], op,
                time.monotonic() - begin))

    def plan(self, chosen):
        """All that is to be measured: works of transfers, works of control."""
        kinds, transfers, control = list(self.kinds(chosen.kinds)), [], []
        for group, members in GROUPS.items():
            mine = [kind for kind in kinds if kind in members]
            transfers += [(group, mine) + one for one in itertools.product(
                chosen.ops, chosen.rows, chosen.caches) if mine]
        transports = list(dict.fromkeys(KINDS[kind][1]
                                        for kind in self.kinds(chosen.control_kinds)))
        for work in chosen.control:
            # what has nothing to do with the bytes is measured once
            control += [(work, transport) for transport in (
                transports if work in ("latency", "rate", "pages") else transports[:1])]
        weights = sum(WEIGHTS[work[0]] for work in transfers + control)
        self.budget = Budget(self.args.minutes, weights)
        return transfers, control

    def transfers(self, works):
        for group, kinds, op, rows, caches in works:
            self.work(group, kinds, op, rows, caches)
        order = [kind[0] for kind in KINDS.values()]
        self.records.sort(key=lambda record: (order.index(record["kind"]), record["caches"]))

    # ---- control ----

    def control(self, works):
        for work, transport in works:
            begin, fresh = time.monotonic(), work in bench_control.FRESH
            until = self.budget.until(WEIGHTS[work])
            pair = Pair(transport, self.threads) if fresh else self.pair(transport)
            try:
                self.records += bench_control.run(work, pair, self.args.reps, until)
            except Gone as why:
                say("%s, %s: %s" % (work, transport, why))
            finally:
                if fresh:
                    pair.close()
            say("%s, %s: %.0f s" % (work, transport, time.monotonic() - begin))

    def close(self):
        for pair in self.pairs.values():
            pair.close()


def machine():
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True,
                            text=True, cwd=ROOT).stdout.strip()
    with open("/proc/cpuinfo") as lines:
        cpu = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "commit": commit, "cores": os.cpu_count(),
            "cpu": cpu[0] if cpu else platform.machine(), "kernel": platform.release(),
            "load": round(os.getloadavg()[0], 1)}


def document(args, records):
    if args.doc:
        print(bench_page.write(records, args.doc))


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--peers")
    parser.add_argument("--against")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--doc")
    parser.add_argument("--from", dest="earlier")
    parser.add_argument("--out", default=os.path.join(os.path.dirname(BUILD) or ".", "bench"))
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.earlier:
        with open(args.earlier) as stream:
            document(args, json.load(stream))
        return 0
    chosen = Chosen(args.words)
    where, begin = machine(), time.monotonic()
    bench = Bench(args)
    try:
        transfers, control = bench.plan(chosen)
        bench.transfers(transfers)
        bench.control(control)
    finally:
        bench.close()
    for record in bench.records:
        record.update(where)
    print("\nkvd %(commit)s, %(date)s, %(cores)d cores, Linux %(kernel)s" % where +
          ", %d copy thread(s), load %.1f at the start; %d repetitions, %.0f s" % (
              bench.threads, where["load"], args.reps, time.monotonic() - begin))
    print(bench_report.table(bench.records))
    if args.against:
        print(bench_report.compare(bench.records, args.against))
    path = bench_report.write(bench.records, args.out)
    drawn = bench_report.plot(bench.records, os.path.join(args.out, "latest.svg"))
    print("\n%s%s" % (path, " and latest.svg" if drawn else ""))
    if bench.records:
        document(args, bench.records)
    return 0 if bench.records else 1


if __name__ == "__main__":
    sys.exit(main())
