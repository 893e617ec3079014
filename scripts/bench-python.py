#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvd's nixl beside the real one: what each call costs, and what it moves.

bench-python.py [--reps N] [--transport shm|tcp] [--peers VENV] [--out FOLDER]

Two engines of one host, a daemon each for kvd's. Both modules take turns, the one
that waits is stopped (a NIXL agent polls). Of calls the least is told, of transfers
the median; a ratio above 1 says that kvd is faster. make bench-python."""
import argparse
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for part in ("bench", "bench/python", "lib"):
    sys.path.insert(0, os.path.join(ROOT, "tests", part))

from bench_parts import Gone, Obeyer, Pair  # noqa: E402
from bench_report import median  # noqa: E402
from nixl_module import ROWS  # noqa: E402

# what is told, and its goal: so many times faster than NIXL, or at most so many µs; or
# why it is slower
ROUND_TRIP = "NIXL notes it in the process; here the daemon maps it and makes its page tables"
MOVED = "moved behind a memfd: each page is copied once (KVD_ADOPT)"
HOPS = "NIXL copies inside the call; this wakes the daemon, and it the other"
CALLS = [
    ("agent", "agent, the first of a process", 20, None),
    ("agent_again", "agent, one more", None, None),
    ("first_connection", "first connection (with 256 B written)", 20, None),
    ("register_1GiB", "register 1 GiB", None, ROUND_TRIP),
    ("register_1GiB_first", "register 1 GiB, never seen before", None, MOVED),
    ("get_agent_metadata", "get_agent_metadata", 1 / 1.2, None),
    ("add_remote_agent", "add_remote_agent", 1 / 1.2, None),
    ("prep", "prep, a descriptor of 4096", 1 / 1.2, None),
    ("make_1", "make, of 1 descriptor", 1 / 1.2, None),
    ("make", "make, a descriptor of 4096", 1 / 1.2, None),
    ("post_256B", "post of 256 B", None, 15),
    ("write_256B", "256 B written and seen done", None, HOPS),
    ("check", "check_xfer_state", 1 / 1.2, 0.5),
    ("get_new_notifs", "get_new_notifs", 1 / 1.2, 0.5),
    ("send_notif", "send_notif", 1 / 1.2, None),
]
ROW_GOALS = {2: 50}


class Module:
    """Figures of one module, over several processes of it."""

    def __init__(self, name, argv, env):
        self.name, self.argv, self.env = name, argv, env
        self.least, self.seconds, self.posts = {}, [[] for _ in ROWS], [[] for _ in ROWS]
        self.now = None

    def learn(self, said):
        for word, value in said.items():
            self.least[word] = min(value, self.least.get(word, value))

    def start(self):
        self.now = Obeyer(self.argv, self.env, frozen=True)
        self.learn(self.now.hello())

    def calls(self):
        self.learn(self.now.ask("calls"))
        self.learn(self.now.ask("lists 4096"))

    def row(self, which, n):
        said = self.now.ask("row %d %d" % (which, n))
        self.seconds[which] += said["seconds"]
        self.posts[which] += said["post"]

    def stop(self):
        if self.now:
            self.now.close()
        self.now = None


def modules(args, sockets):
    worker = os.path.join(ROOT, "tests", "bench", "python", "nixl_module.py")
    tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"} if args.transport == "tcp" else {}
    out = [Module("kvd", [args.venv + "/bin/python", worker, "nixl"],
                  {"KVD_SOCKET": sockets[0], "KVD_TARGET_SOCKET": sockets[1]})]
    if args.peers:
        out.append(Module("NIXL", [args.peers + "/bin/python", worker, "nixl_cu12"],
                          dict(tcp, LD_LIBRARY_PATH=libraries(args.peers))))
    return out


def libraries(venv):
    """Where NIXL's plugins find CUDA's libraries."""
    site = [n for n in os.listdir(venv + "/lib") if n.startswith("python3")][0]
    return ":".join("%s/lib/%s/site-packages/nvidia/%s/lib" % (os.path.abspath(venv), site, n)
                    for n in ("cufile", "cuda_runtime"))


def measure(args, them):
    for rep in range(args.reps):
        try:
            for one in them:
                one.start()
            for turn in range(args.turns):
                for one in them:
                    one.calls()
                for which in range(len(ROWS)):
                    for one in them:
                        one.row(which, 3)
            print("bench: %d of %d" % (rep + 1, args.reps), file=sys.stderr, flush=True)
        finally:
            for one in them:
                one.stop()


def record(what, unit, kvd, nixl, faster, at_most):
    """nixl None: not measured."""
    out = {"what": what, "unit": unit, "kvd": round(kvd, 3)}
    if nixl is not None:
        ratio = nixl / kvd if unit == "us" else kvd / nixl
        out.update(nixl=round(nixl, 3), ratio=round(ratio, 2))
        if faster is not None:
            out.update(goal="%.2g x" % faster, met=ratio >= faster)
    if isinstance(at_most, str):
        out["reason"] = at_most
    elif at_most is not None:
        out.update(goal="%g us" % at_most, met=out.get("met", True) and kvd <= at_most)
    return out


def records(them):
    kvd, nixl = them[0], them[1] if len(them) > 1 else None
    for word, what, faster, at_most in CALLS:
        yield record(what, "us", kvd.least[word], nixl and nixl.least[word], faster, at_most)
    for which, (op, size, count, scatter) in enumerate(ROWS):
        what = "%s %d x %d B%s" % (op, count, size, ", scattered" if scatter else "")
        yield record("post of " + what, "us", min(kvd.posts[which]),
                     nixl and min(nixl.posts[which]), None, 15)
        gbps = [count * size / median(one.seconds[which]) / 1e9 for one in them]
        yield record(what, "GB/s", gbps[0], gbps[1] if nixl else None,
                     ROW_GOALS.get(which), None)


def table(rows):
    yield "%-40s %5s %12s %12s %8s  %s" % ("", "", "kvd", "NIXL", "ratio", "goal")
    for r in rows:
        goal = r.get("reason", "")
        if "goal" in r:
            goal = "%s %s" % (r["goal"], "met" if r["met"] else "MISSED")
        yield "%-40s %5s %12.3f %12s %8s  %s" % (
            r["what"], r["unit"], r["kvd"], r.get("nixl", "-"), r.get("ratio", "-"), goal)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reps", type=int, default=3, help="processes of each module")
    parser.add_argument("--turns", type=int, default=3, help="in each process")
    parser.add_argument("--transport", default="shm", choices=["shm", "tcp"])
    parser.add_argument("--venv", default="build/python/venv")
    parser.add_argument("--peers", help="venv with nixl_cu12 (tests/bench/peers/setup.sh)")
    parser.add_argument("--out", default="build/bench")
    args = parser.parse_args()
    pair = Pair(args.transport, os.cpu_count())
    try:
        them = modules(args, pair.sockets)
        measure(args, them)
    except Gone as why:
        sys.exit("bench-python: %s" % why)
    finally:
        pair.close()
    rows = list(records(them))
    print("\n".join(table(rows)))
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "python-%s.json" % args.transport), "w") as out:
        json.dump({"transport": args.transport, "records": rows}, out, indent=1)
    return 1 if any(not r.get("met", True) for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
