#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The soak: soak.py [--rooms N] [--transports shm,mixed] [--faults cut,…] [--seed N] [-v]

On each transport, and then mixed: A has all, C the last of them, and B comes back from
each restart with another one. Daemon A takes rooms, pushed and pulled, from engines on B and on C; each round one
fault strikes them: aborts, an engine killed, B killed, or stopped, and started again,
C frozen, a link cut or its connections reset, or none. A and C live through all of it. After it a dozen rooms with
each source must succeed.

A round is good when every room of every engine that lived ended, in time, and told
the truth: success with all bytes on the target (and no sender's alone), no
byte after the end, no page beside. A round without a fault, or with a pause that is too short for a
death, has no failed room.

Flat: idle after each round, A and C are measured. Rounds before a quarter of the
rooms are warm-up; of the rest the median of the last third must not lie above that
of the first third by more than the slack: 1 MiB of own memory, 2 descriptors, no
thread, nothing held (rooms, regions, pools, sessions). A dozen rounds at least are
needed to say so."""
import argparse
import os
import random
import signal
import statistics
import sys
import time
import traceback

from world import (BUILD, SLOW, World, Wrong, may_mount, may_partition, memory_gone_ns,
                   mounts_of_our_own, transports)

ROOMS_A_ROUND, WINDOW, PAGES = 1000, 48, 1024
CALM_ROOMS = 12
ROUND_S = 60 * SLOW
SLACK = dict(anon=1024, fds=2, threads=0)
if SLOW > 1:
    del SLACK["anon"]  # a sanitizer keeps what is freed
MORE = "tombstones = 1024\n"  # the ring is full, and so as large as it gets, soon
MIXED = "mixed"
FAULTS = ("none", "aborts", "target-engine", "source-engine", "peer-restart", "peer-stop",
          "peer-frozen", "peer-paused", "cut", "blink", "reset")
LINK_FAULTS = FAULTS[-3:]
ROUNDS_MIN, CALMS_MAX = 12, 5
GENTLE = ("none", "peer-paused", "blink")
GENTLE_S = 0.45  # TCP is silent for as long again
LATE_S = 0.15  # of a machine as late as this in a round a death may come of anything


class Soak:
    def __init__(self, transport, partition, seed, args):
        self.random, self.verbose = random.Random(seed), args.verbose
        self.kinds = [f for f in args.faults.split(",") if partition or f not in LINK_FAULTS]
        self.choices, each = [transport], transport
        if transport == MIXED:
            self.choices = transports()
            each = [", ".join(self.choices), self.choices[0], self.choices[-1]]
        self.world = World(each, partition, more=MORE, log_level="warn")
        self.first, self.rooms, self.succeeded = 1, 0, 0
        self.levels, self.faults = [], {}
        self.worst_s = 0
        self.target = self.sources = None
        self.people()

    def people(self):
        """Engines that are not there are started."""
        if self.target is None:
            self.target = self.world.engine(0, "target", "t", PAGES)
        self.sources = [s or self.world.engine(1 + i, "source-%d" % i, "s%d" % i, PAGES)
                        for i, s in enumerate(self.sources or (None, None))]

    # ---- faults: each returns what undoes it

    def linger(self, low_s, high_s):
        self.world.pass_time(time.monotonic_ns() +
                             int(self.random.uniform(low_s, high_s) * 1e9))

    def kill_engine(self, engine):
        engine.signal(signal.SIGKILL)
        memory_gone_ns(engine.pid)
        engine.reap()

    def strike_target_engine(self):
        self.kill_engine(self.target)
        self.target = None

    def strike_source_engine(self):
        index = self.random.randrange(2)
        self.kill_engine(self.sources[index])
        self.sources[index] = None

    def strike_peer_restart(self):
        self.restart(signal.SIGKILL)

    def strike_peer_stop(self):
        self.restart(signal.SIGTERM)

    def restart(self, number):
        node = self.world.nodes[1]
        node.signal(number)
        status = node.daemon.wait()
        if status != (0 if number == signal.SIGTERM else -number):
            raise Wrong("daemon B ended with %d" % status)
        node.restart(self.random.choice(self.choices))

    def strike_peer_frozen(self):
        self.freeze(1.0, 2.0)

    def strike_peer_paused(self):
        self.freeze(0.05, 0.3)

    def freeze(self, low_s, high_s):
        node = self.world.nodes[2]
        node.signal(signal.SIGSTOP)
        try:
            self.linger(low_s, high_s)
        finally:
            node.signal(signal.SIGCONT)

    def strike_cut(self):
        self.cut(0.9, 1.6)

    def strike_blink(self):
        self.cut(0.02, 0.2)

    def cut(self, low_s, high_s):
        other = self.random.choice((1, 2))
        pairs = self.random.choice((((0, other), (other, 0)), ((0, other),), ((other, 0),)))
        self.world.net.cut(pairs)
        try:
            self.linger(low_s, high_s)
        finally:
            self.world.net.heal(pairs)

    def strike_reset(self):
        self.world.net.reset(0, self.random.choice((1, 2)))

    # ---- a round

    def round(self):
        fault = self.random.choice(self.kinds)
        self.faults[fault] = self.faults.get(fault, 0) + 1
        begin, took_s = time.monotonic(), 0
        self.world.time_begins()
        asked = self.begin_batches(150 if fault == "aborts" else 0)
        if fault not in ("none", "aborts"):
            self.linger(0, 0.25)
            took_s = -time.monotonic()
            getattr(self, "strike_" + fault.replace("-", "_"))()
            took_s += time.monotonic()
            for engine in filter(None, [self.target] + self.sources):
                engine.do("finish")
        found = {}
        for key, (engine, ident, first) in asked.items():
            if engine in self.world.engines:
                found[key] = dict(engine.answer(ident, ROUND_S), first=first)
        self.gentle = fault in GENTLE and took_s < GENTLE_S and self.world.late() < LATE_S
        self.judge(fault, found)
        self.people()
        self.wait_found()
        self.calm()
        self.wait_idle()
        self.worst_s = max(self.worst_s, time.monotonic() - begin)
        if self.verbose:
            print("     %s: %s, %.1f s; A and C: %s" % (
                fault, ", ".join("%s %d: %d ok %d failed" % (
                    k + (f["rooms"].count("s"), f["rooms"].count("f")))
                    for k, f in found.items()), time.monotonic() - begin,
                [tuple(level.values()) for level in self.levels[-1]]), flush=True)

    def calm(self):
        """The next rooms work, with everybody; and all is mapped again. Where the machine
        stood still meanwhile, they may fail, and those after them are asked."""
        for _ in range(CALMS_MAX):
            self.world.time_begins()
            asked = self.begin_batches(0, CALM_ROOMS)
            found = {key: dict(engine.answer(ident, ROUND_S), first=first)
                     for key, (engine, ident, first) in asked.items()}
            self.gentle = self.world.late() < LATE_S
            self.judge("calm", found)
            if self.gentle:
                break

    def begin_batches(self, permille, count=ROOMS_A_ROUND // 2):
        asked, half = {}, PAGES // 2
        for i, source in enumerate(self.sources):
            first = self.first
            self.first += count
            common = (first, count, WINDOW)
            asked["source", i] = source, source.ask(
                "batch", *common, "source", permille, 0, PAGES, "-", "-"), first
            asked["target", i] = self.target, self.target.ask(
                "batch", *common, "target", permille, i * half, half, source.node.endpoint,
                source.pool), first
        return asked

    def judge(self, fault, found):
        for (side, i), one in found.items():
            who = "%s %d" % (side, i)
            for what in ("wrong", "written", "unsteady", "strayed"):
                if one.get(what):
                    raise Wrong("%s: %s: %d %s" % (fault, who, one[what], what))
            if "?" in one["rooms"]:
                raise Wrong("%s: %s: a room has no end" % (fault, who))
            if fault in ("none", "calm") and "f" in one["rooms"] and self.gentle:
                raise Wrong("%s: %s: %d rooms failed: %s" % (
                    fault, who, one["rooms"].count("f"), one["words"]))
        for i in range(2):
            source, target = found.get(("source", i)), found.get(("target", i))
            if target:
                self.rooms += len(target["rooms"])
                self.succeeded += target["rooms"].count("s")
            elif source:
                self.rooms += len(source["rooms"])
            if source and target:
                self.judge_pairs(fault, source, target)

    def judge_pairs(self, fault, source, target):
        """An offer ends with the puller's word that it has all; a puller that does not
        get the answer fails. A sender ends with all its receivers, or fails."""
        for i, (a, b) in enumerate(zip(source["rooms"], target["rooms"])):
            number = source["first"] + i
            if self.gentle and (a, b) != ("s", "s"):
                raise Wrong("%s: room %d failed: %s, %s: %s, %s" % (
                    fault, number, a, b, source["words"], target["words"]))
            if number % 3 and a == "s" and b != "s":
                raise Wrong("%s: the sender of room %d succeeded alone" % (fault, number))

    # ---- what is held when nothing runs

    def holds(self, engine):
        stats = {m["name"]: int(m["value"]) for m in engine.cmd("stats")["metrics"]}
        return tuple(stats[k] for k in ("rooms", "regions", "pools", "sessions"))

    def wait_found(self):
        for engine in [self.target] + self.sources:
            self.world.until(lambda: not engine.lost and engine.sessions[-1]["instance"] ==
                             engine.node.instance, "%s has no daemon" % engine.name)

    def wait_idle(self):
        for engine in [self.target] + self.sources:
            self.world.until(lambda: self.holds(engine) == (0, 1, 1, 1), lambda: "daemon of %s "
                             "still holds %s (rooms, regions, pools, sessions)" %
                             (engine.name, self.holds(engine)), 20 * SLOW)
        self.levels.append([self.world.nodes[i].figures() for i in (0, 2)])

    def flat(self):
        """Words for each figure that rose, and those that show how it went."""
        kept = self.levels[len(self.levels) // 4:]
        third = max(1, len(kept) // 3)
        rose, told = [], []
        for i, name in enumerate("AC"):
            for key, slack in SLACK.items():
                before = statistics.median(level[i][key] for level in kept[:third])
                after = statistics.median(level[i][key] for level in kept[-third:])
                text = "daemon %s %s: %d, then %d" % (name, key, before, after)
                told.append(text)
                if after > before + slack and len(self.levels) >= ROUNDS_MIN:
                    rose.append("%s, allowed %d more" % (text, slack))
        return rose, told

    def check_logs(self):
        for node in self.world.nodes:
            bad = node.bad_line()
            if bad:
                raise Wrong("in the log of %s: %s" % (node.name, bad))


def soak(transport, rooms, partition, args):
    """(rooms, passed, failed)"""
    passed = failed = 0
    run = Soak(transport, partition, "%s %d" % (transport, args.seed), args)
    begin = time.monotonic()
    try:
        while run.rooms < rooms:
            run.round()
            run.check_logs()
            passed += 1
        rose, told = run.flat()
        for text in told:
            print("%s: %s%s" % (transport, text, " KiB" if " anon" in text else ""))
        for text in rose:
            print("FAIL %s: %s" % (transport, text))
        passed, failed = passed + len(told) - len(rose), len(rose)
    except Exception as why:
        text = str(why) if isinstance(why, Wrong) else traceback.format_exc()
        folder = os.path.join(BUILD, "faults-logs")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "soak-%s.log" % transport), "w") as out:
            out.write(text + "\n" + run.world.logs())
        print("FAIL %s after %d rooms: %s" % (transport, run.rooms, text))
        failed += 1
    finally:
        run.world.close()
    print("%s: %d rooms in %.0f s, %d succeeded, %d rounds, the longest %.1f s; %s" % (
        transport, run.rooms, time.monotonic() - begin, run.succeeded, len(run.levels),
        run.worst_s, ", ".join("%s %d" % one for one in sorted(run.faults.items()))),
        flush=True)
    return run.rooms, passed, failed


def main(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rooms", type=int, default=100000, help="of all transports together")
    parser.add_argument("--transports", default=",".join(transports() + [MIXED]))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args(given)
    if not may_mount():
        mounts_of_our_own()
    no_partition = may_partition()
    if no_partition:
        print("links are not cut: %s" % no_partition)
    names = args.transports.split(",")
    print("seed %d" % args.seed, flush=True)
    rooms = passed = failed = 0
    for transport in names:
        some, ok, bad = soak(transport, -(-args.rooms // len(names)),
                             not no_partition, args)
        rooms, passed, failed = rooms + some, passed + ok, failed + bad
    print("%d rooms\n%d passed, %d failed" % (rooms, passed, failed), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
