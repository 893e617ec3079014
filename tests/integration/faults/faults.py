#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: faults.py [--jobs N] [--subset] [--list] [WORD…]

Runs the cells whose name holds all words (an alternative: a,b). Prints a line for
each failed cell, a table of the transports (cells, those passed, the worst times, from
the fault to what the sides see and from that to the end), and the counts."""
import argparse
import collections
import multiprocessing
import os
import queue
import re
import signal
import sys
import time
import traceback

import cells
import rows
from scene import POOL_PAGES, SMALL, Scene
from world import (BUILD, FAILED, SLOW, STALLS, SUCCESS, WAITING, Side, World, Wrong, may_mount,
                   may_partition, memory_gone_ns, mounts_of_our_own, transports)
import stalls  # noqa: E402 world knows where

LEARN_S = 1.0  # invariant 3: both sides learn
FENCE_S = 2.5  # fence_timeout is 1 s; then the peer is cut, and its silence counts
STILL_MS = 300
LATE_S = 0.15  # a cell that fails on a machine as late as this in sum is played again
PLAYS = 3
DRAIN_S = 0.5
WITNESS_PAGES = 2
KINDS = "detection", "detection (own daemon frozen)", "fence"
SLACK = dict(anon=8192, shmem=1024, fds=0, threads=0)
if SLOW > 1:
    del SLACK["anon"]  # a sanitizer keeps what is freed


class Times:
    """Worst of each kind, in seconds."""

    def __init__(self):
        self.worst = {}

    def add(self, kind, seconds, cell):
        if seconds > self.worst.get(kind, (-1, None))[0]:
            self.worst[kind] = (seconds, cells.name(cell))


class Stage:
    """A world with witnesses, in which cell after cell is played."""

    def __init__(self, key, partition):
        self.key = key
        # rows fill more of a line's rings than the rooms that warm it up
        self.slack = dict(SLACK, shmem=16384) if key[1] else SLACK
        self.world = World(key[0], partition, more=key[1])
        self.witnesses = [self.world.engine(i, "witness-%s" % "abc"[i], "w%d" % i, 64)
                          for i in range(3)]
        self.rooms = {}
        self.warm_up()

    def warm_up(self):
        """Everybody knows everybody, all is mapped once, and filled by the helpers."""
        self.open_witnesses()
        self.check_witnesses(list(self.rooms))
        was, now = None, self.shmem()
        while was != now:
            self.world.pass_time(time.monotonic_ns() + 100_000_000)
            was, now = now, self.shmem()

    def shmem(self):
        return [node.figures()["shmem"] for node in self.world.nodes]

    def close(self):
        self.world.close()

    # ---- the rooms beside the victim

    def open_witnesses(self):
        number = self.world.new_number()
        for a, b in ((0, 1), (2, 1), (2, 0)):
            one = Side(self.witnesses[a], number, "send", WITNESS_PAGES)
            other = Side(self.witnesses[b], number, "recv", WITNESS_PAGES, self.witnesses[a])
            number = self.world.new_number()
            other.number = one.number = number
            other.open()
            one.open()
            other.bind()
            self.rooms[a, b] = one, other
        for one, other in self.rooms.values():
            one.until(WAITING)
            other.until(WAITING)

    def check_witnesses(self, spared):
        for pair in spared:
            one, other = self.rooms[pair]
            if one.state != WAITING or other.state != WAITING:
                raise Wrong("the bystanders' room %s was hurt: %s, %s" %
                            (pair, one.words() or one.now, other.words() or other.now))
            one.send(0, 0, WITNESS_PAGES, True)
            other.until(SUCCESS)
            one.until(SUCCESS)
        for pair, sides in self.rooms.items():
            for side in sides:
                if pair not in spared and not side.ended:
                    side.engine.ask("abort", side.number, side.role)
                self.world.until(lambda side=side: side.ended, lambda side=side:
                                 "witness %s does not end: %s" % (side, side.now))
                side.still(0)
                side.close()
        self.rooms = {}

    # ---- what a daemon holds

    def holds(self, node):
        stats = self.witnesses[node].cmd("stats")["metrics"]
        return {m["name"]: int(m["value"]) for m in stats
                if m["name"] in ("sessions", "regions", "pools", "rooms")}

    def level(self):
        return [dict(self.world.nodes[i].figures(), pid=self.world.nodes[i].pid,
                     holds=self.holds(i), files=self.world.nodes[i].open_files()) for i in range(3)]

    def check_level(self, before):
        """Back to what it was, of those daemons that still are who they were."""
        def more():
            now = self.level()
            for i, was in enumerate(before):
                if now[i]["pid"] != was["pid"]:
                    continue
                if now[i]["holds"] != was["holds"]:
                    return "daemon %s holds %s, before %s" % ("ABC"[i], now[i]["holds"],
                                                              was["holds"])
                for key, slack in self.slack.items():
                    if now[i][key] > was[key] + slack:
                        return "daemon %s: %s is %d, was %d%s" % (
                            "ABC"[i], key, now[i][key], was[key], "; %s, was %s" %
                            (self.world.nodes[i].open_files(), was["files"])
                            if key == "fds" else "")
            return ""
        self.world.until(lambda: not more(), more, 10 * SLOW)


class Play:
    """One cell."""

    def __init__(self, stage, cell, times):
        self.stage, self.world, self.cell, self.times = stage, stage.world, cell, times
        self.undo, self.struck_ns, self.latest = [], 0, {}
        self.frozen, self.frozen_pid = None, 0

    def run(self):
        self.enter()
        try:
            self.strike()
            self.judge()
        finally:
            for undo in reversed(self.undo):
                undo()
        self.stillness()
        self.recover()
        self.awake()
        self.go_on()
        self.next_room()
        self.stage.check_witnesses(cells.spared(self.cell))
        self.leave()

    # ---- before

    def enter(self):
        self.before = self.stage.level()
        self.stage.open_witnesses()
        pages = POOL_PAGES if self.cell.phase == "moving" else 64
        self.s = self.world.engine(0, "victim-s", "v", pages)
        self.d = self.world.engine(1, "victim-d", "v", pages)
        self.t = self.world.engine(1, "victim-t", "v", 64) if self.cell.phase == "half" \
            else self.d
        self.scene = Scene(self.world, self.cell.way, self.cell.phase, self.s,
                           (self.d, self.t))
        self.sides = {n: getattr(self.scene, n) for n in cells.opened(self.cell)}
        self.scene.enter()

    # ---- the fault

    def victim_engine(self):
        side = cells.victim_side(self.cell)
        return getattr(self, side)

    def victim_node(self):
        return self.world.nodes[cells.DAEMONS[self.cell.victim]]

    def strike(self):
        self.marks = {n: len(s.history) for n, s in self.sides.items()}
        self.was = {n: s.state for n, s in self.sides.items()}
        self.late = {e: e.do("look")["late"] for e in self.world.engines}
        self.struck_ns = time.monotonic_ns()
        kind = self.cell.victim.split("-")[-1]
        getattr(self, "%s_%s" % (kind, self.cell.fault.replace("-", "_")))()

    def engine_kill(self):
        engine = self.victim_engine()
        engine.signal(signal.SIGKILL)
        self.struck_ns = memory_gone_ns(engine.pid)
        engine.reap()

    def engine_stop(self):
        engine = self.victim_engine()
        engine.signal(signal.SIGSTOP)
        self.undo.append(lambda: engine.signal(signal.SIGCONT))
        self.world.pass_time(self.struck_ns + int(1.2e9))

    def engine_leave(self):
        self.victim_engine().leave()

    def engine_fds(self):
        self.squeeze(self.victim_engine(), self.victim_engine().no_more_fds())

    def engine_memory(self):
        self.squeeze(self.victim_engine(), self.victim_engine().no_more_memory())

    def daemon_kill(self):
        node = self.victim_node()
        node.signal(signal.SIGKILL)
        self.struck_ns = memory_gone_ns(node.pid)
        node.daemon.wait()

    def downs(self, node):
        """How often it has given up, or was given up by, the other of the two."""
        other = self.world.nodes[1 - self.world.nodes.index(node)]
        return node.log().count("peer %s: down instance=" % other.endpoint)

    def thaw_later(self):
        node = self.victim_node()
        node.signal(signal.SIGSTOP)
        self.undo.append(lambda: node.alive and node.signal(signal.SIGCONT))
        return node

    def daemon_stop(self):
        self.seen = self.downs(self.victim_node())
        self.frozen = self.thaw_later()
        self.frozen_pid = self.frozen.pid
        self.world.pass_time(self.struck_ns + int(1.2e9 * SLOW))

    daemon_stop_kill = daemon_stop

    def daemon_pause(self):
        node = self.thaw_later()
        self.world.pass_time(self.struck_ns + int(0.3e9))
        node.signal(signal.SIGCONT)

    def daemon_term(self):
        node = self.victim_node()
        node.signal(signal.SIGTERM)
        self.undo.append(lambda: node.daemon.wait())

    def daemon_fds(self):
        self.squeeze(self.victim_node(), self.victim_node().no_more_fds())

    def daemon_memory(self):
        self.squeeze(self.victim_node(), self.victim_node().no_more_memory())

    def daemon_disk(self):
        self.squeeze(self.victim_node(), self.victim_node().disk_full())

    def squeeze(self, process, undo):
        """The room goes on although there is nothing left to take."""
        self.undo.append(undo)
        try:
            self.scene.go_on()
        except Wrong as why:
            self.refusal = str(why)  # refused with a code: an answer, not a crash
            if "does not answer" in self.refusal or "instead of" in self.refusal and \
                    not self.scene.failed():
                raise
        used = process.cpu_s()
        self.world.pass_time(time.monotonic_ns() + int(0.3e9))
        if process.cpu_s() - used > 0.2:
            raise Wrong("%s spins: %.2f s of 0.3" % (process.name, process.cpu_s() - used))

    def link_cut(self, pairs=((0, 1), (1, 0))):
        self.world.net.cut(pairs)
        self.undo.append(lambda: self.world.net.heal(pairs))
        self.struck_ns = time.monotonic_ns()

    def link_cut_to(self):
        self.link_cut(((0, 1),))

    def link_cut_from(self):
        self.link_cut(((1, 0),))

    def link_blink(self):
        self.link_cut()
        self.world.pass_time(self.struck_ns + int(0.25e9))
        self.undo.pop()()

    def link_reset(self):
        self.struck_ns = time.monotonic_ns()
        if not self.world.net.reset(0, 1):
            raise Wrong("there was no connection to reset")

    # ---- what the sides see

    def judge(self):
        for name, side in self.sides.items():
            self.fate = cells.fate(self.cell, name)
            if self.fate.kind != "gone":
                getattr(self, "see_" + self.fate.kind)(name, side)

    def new_events(self, name, side):
        return side.history[self.marks[name]:]

    @staticmethod
    def allowance_s(event, since):
        """How late this machine woke the side's engine: the daemons were late, too."""
        return 2 * max(0, event["late"] - since) / 1e9

    def see_fails(self, name, side, since_ns=None, may_succeed=False):
        since_ns = since_ns or self.struck_ns
        limit_s = LEARN_S * SLOW + (DRAIN_S if self.cell.fault == "term" else 0)

        def learnt():
            return [e for e in self.new_events(name, side)
                    if e["aborting"] or e["state"] in (FAILED, SUCCESS)]
        self.world.until(lambda: learnt() or side.ended, lambda: "%s learns nothing: %s" %
                         (side, side.now), 10 * SLOW)
        if side.state == SUCCESS:
            if may_succeed:
                return
            raise Wrong("%s succeeds" % side)
        first = learnt()[0]
        took_s = (first["t"] - since_ns) / 1e9
        late_s = self.allowance_s(first, self.late[side.engine])
        if took_s > limit_s + late_s:
            raise Wrong("%s: learnt after %.3f s (allowed %.3f)" % (side, took_s,
                                                                    limit_s + late_s))
        if self.cell.fault != "term":
            self.times.add(KINDS[0], took_s, self.cell)
        self.see_end(side, first, may_succeed)

    def see_end(self, side, first, may_succeed=False):
        self.world.until(lambda: side.ended, lambda: "%s: aborting, does not end: %s" %
                         (side, side.now), 15 * SLOW)
        took_s = (side.now["t"] - first["t"]) / 1e9
        late_s = self.allowance_s(side.now, first["late"])
        if took_s > FENCE_S * SLOW + late_s:
            raise Wrong("%s: fence took %.3f s" % (side, took_s))
        self.times.add(KINDS[2], took_s, self.cell)
        if side.state == SUCCESS and not may_succeed:
            raise Wrong("%s succeeds" % side)
        if side.state == FAILED:
            self.see_words(side)

    def see_words(self, side):
        peer = self.world.nodes[1 if side.role in ("send", "offer") else 0]
        wanted = self.fate.words.replace("{peer}", re.escape(peer.endpoint))
        wanted = wanted.replace("{own}", re.escape(side.engine.node.endpoint))
        said = side.words()
        if not re.search(wanted, said):
            raise Wrong("%s: '%s' does not say %s" % (side, said, wanted))
        if self.fate.kind != "limited" and not side.now["retryable"]:
            raise Wrong("%s: '%s' is not retryable" % (side, said))

    def see_held(self, name, side):
        def held():
            return [e for e in self.new_events(name, side) if e["aborting"]]
        self.world.until(lambda: held() or side.ended, "%s does not see its frozen daemon"
                         % side, 5 * SLOW)
        first = (held() or [side.now])[0]
        took_s = (first["t"] - self.struck_ns) / 1e9
        late_s = self.allowance_s(first, self.late[side.engine])
        if took_s > LEARN_S * SLOW + late_s:
            raise Wrong("%s: sees its frozen daemon after %.3f s" % (side, took_s))
        if side.ended:
            raise Wrong("%s: ended while its daemon was frozen: %s" % (side, side.now))
        self.times.add(KINDS[1], took_s, self.cell)
        node = self.victim_node()
        if self.cell.fault == "stop-kill":
            if node.alive:
                node.signal(signal.SIGKILL)
                self.gone_ns = memory_gone_ns(node.pid)
                node.daemon.wait()
            begin = dict(first, t=self.gone_ns)
        else:
            begin = dict(first, t=time.monotonic_ns())
            node.signal(signal.SIGCONT)
            if not self.fate.words:
                self.world.until(lambda: not side.now["aborting"], "%s: its daemon is back, "
                                 "it is not" % side)
                return self.see_lives(name, side)
        return self.see_end(side, begin, may_succeed=self.cell.phase == "moving")

    def see_lives(self, name, side):
        if side.state == FAILED or side.now["aborting"] and \
                self.cell.fault not in ("pause", "stop"):
            raise Wrong("%s was hurt: %s" % (side, side.words() or side.now))

    def see_sticky(self, name, side):
        if side.state != SUCCESS:
            raise Wrong("%s had succeeded: %s" % (side, side.now))

    def see_ends(self, name, side):
        if self.was[name] == SUCCESS:
            return self.see_sticky(name, side)
        if cells.fate(self.cell._replace(phase="waiting" if self.cell.way == "push"
                                         else "held"), name).kind == "held" and \
                not side.ended:
            return self.see_held(name, side)
        return self.see_fails(name, side, may_succeed=True)

    def see_limited(self, name, side):
        if side.state == FAILED:
            self.see_words(side)

    # ---- afterwards

    def stillness(self):
        """Canaries, pages of ended rooms, and truth between the two sides."""
        for side in self.sides.values():
            if side.ended and side.engine in self.world.engines:
                side.still(STILL_MS)
        ended = [s for s in self.sides.values() if s.engine in self.world.engines]
        # a puller that does not get the offer's answer fails, the offer does not
        if self.cell.way == "push" and self.scene.s in ended and \
                self.scene.s.state == SUCCESS and any(s.state == FAILED for s in ended):
            raise Wrong("the source succeeded, a target did not")

    def recover(self):
        for node in self.world.nodes:
            if node.alive:
                continue
            status = node.daemon.wait()
            if status != (0 if self.cell.fault == "term" else -signal.SIGKILL):
                raise Wrong("daemon %s ended with %d" % (node.name, status))
            node.restart()
            for engine in self.world.engines:
                if engine.node is node:
                    self.world.until(lambda e=engine: not e.lost and e.sessions[-1]["instance"]
                                     == e.node.instance,
                                     "%s does not find its daemon" % engine.name)

    def awake(self):
        """A daemon that was frozen for longer than its peers wait learns from its
        lines that it is given up. Until then it takes rooms that end so."""
        node = self.frozen
        if node and node.alive and node.pid == self.frozen_pid:
            self.world.until(lambda: self.downs(node) > self.seen,
                             "%s does not learn that it was given up" % node.name)

    def all_there(self):
        return all(e in self.world.engines for e in (self.s, self.d, self.t))

    def go_on(self):
        """Who lives goes on to success; who cannot is given up."""
        alive = [s for s in self.sides.values() if s.engine in self.world.engines]
        if self.cell.victim == cells.DONE_ENGINE and self.cell.fault != "stop":
            self.t.do("word", 1)  # who is done is not missed
            for side in (self.scene.s, self.scene.t):
                side.until(SUCCESS)
        elif self.all_there() and not any(s.state == FAILED for s in alive) and \
                self.cell.fault not in cells.LIMITS:
            self.scene.go_on()
            self.scene.all_done()
        for side in self.scene.sides:
            if side.opened and side.engine in self.world.engines:
                if not side.ended:
                    side.engine.do("abort", side.number, side.role)
                self.world.until(lambda side=side: side.ended, lambda side=side:
                                 "%s does not end: %s" % (side, side.now))
                side.still(STILL_MS)

    def next_room(self):
        """The same number again, on the same engines or those that follow them."""
        number = self.scene.s.number
        for side in self.scene.sides:
            if side.opened and side.engine in self.world.engines:
                side.close()
        for engine in {self.s, self.d, self.t} & set(self.world.engines):
            engine.do("zero")
        source = self.s if self.s in self.world.engines else \
            self.world.engine(0, "next-s", "v", 64)
        target = self.d if self.d in self.world.engines else \
            self.world.engine(1, "next-d", "v", 64)
        roles = ("send", "recv") if self.cell.way == "push" else ("offer", "pull")
        s = Side(source, number, roles[0], SMALL)
        d = Side(target, number, roles[1], SMALL, source)
        s.open()  # first: a pull that comes before it is told how the last one ended
        if (self.cell.phase, self.cell.victim) == ("receiver-alone", "target-engine") and \
                self.cell.fault in ("kill", "leave"):
            # it is the dead one's: told of it, as if it had been there
            s.until(FAILED)
            if "ESESSION: " not in s.words() or "victim-d" not in s.words():
                raise Wrong("%s: %s" % (s, s.words()))
            s.close()
            s.open()
        d.open()
        if self.cell.way == "push":
            d.bind()
            s.until(WAITING)
            s.send(0, 0, SMALL, True)
        d.until(SUCCESS)
        s.until(SUCCESS)
        d.still(0)
        for side in (s, d):
            side.close()
        self.victims = {self.s, self.d, self.t, source, target} & set(self.world.engines)

    def leave(self):
        for engine in self.victims:
            found = engine.do("look")
            if found["strayed"]:
                raise Wrong("%s: %d canary pages were written" % (engine.name,
                                                                 found["strayed"]))
            engine.leave()
        self.stage.check_level(self.before)
        if len(cells.spared(self.cell)) < 3:
            self.stage.warm_up()


class RowsPlay(Play):
    """One cell of query rows: what the room's cells do, about a post."""

    def enter(self):
        self.scene = rows.Scene(self.world, self.cell.phase, self.stage.witnesses)
        self.scene.prime()
        self.before = self.stage.level()
        self.stage.open_witnesses()
        self.scene.begin()
        self.s, self.d, self.t = self.scene.s, self.scene.d, self.scene.t
        self.sides = dict(d=self.scene.post)
        self.scene.enter()

    def strike(self):
        self.scene.thaw()
        super().strike()

    def see_succeeds(self, name, side):
        side.until(SUCCESS)

    def see_ends(self, name, side):
        self.see_fails(name, side, may_succeed=True)

    def go_on(self):
        self.scene.end()

    def next_room(self):
        """Other engines, of the same chunks."""
        self.scene.again()

    def leave(self):
        self.victims = ()
        super().leave()


# ---- the run ---------------------------------------------------------------

def play(stage, cell, times):
    """Words of what is wrong, or None."""
    try:
        (RowsPlay if cell.way == cells.ATTEND else Play)(stage, cell, times).run()
        for node in stage.world.nodes:
            bad = node.bad_line()
            if bad:
                return "in the log of %s: %s" % (node.name, bad)
    except Wrong as why:
        return str(why)
    except Exception:
        return traceback.format_exc()
    return None


def keep_log(cell, why, stage):
    folder = os.path.join(BUILD, "faults-logs")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "-".join(cell) + ".log"), "w") as out:
        out.write("%s\n%s\n%s" % (cells.name(cell), why, stage.world.logs()))


class Worker:
    """Takes cells and plays them, in one world as long as none fails."""

    def __init__(self, todo, done, partition):
        self.done, self.partition, self.stage = done, partition, None
        if not may_mount():
            mounts_of_our_own()
        for cell in iter(todo.get, None):
            self.work(cell)
        self.close_stage()
        done.put(None)

    def close_stage(self):
        if self.stage:
            self.stage.close()
        self.stage = None

    def work(self, cell):
        begin = time.monotonic()
        again = []
        while True:
            times = Times()
            why, late_s = self.once(cell, times)
            if not why or late_s < LATE_S or len(again) == PLAYS - 1:
                break
            again.append("the machine was late by %.0f ms; %s" % (late_s * 1000, why))
        self.done.put((cell, why, times.worst, time.monotonic() - begin, again))

    def once(self, cell, times):
        """What is wrong, or None; and how late the machine was."""
        key = cell.transport, ""
        if cell.way == cells.ATTEND:
            key = rows.TRANSPORTS[cell.transport], rows.CONFIG
        if self.stage and self.stage.key != key:
            self.close_stage()
        since = time.time()
        try:
            self.stage = self.stage or Stage(key, self.partition)
            self.stage.world.time_begins()
            why = play(self.stage, cell, times)
        except Exception:
            why = traceback.format_exc()
        late_s = max(self.stage.world.late() if self.stage else LATE_S,
                     stalls.worst(STALLS, since))
        if why:
            if self.stage:
                keep_log(cell, why, self.stage)
            self.close_stage()
        return why, late_s


def run(chosen, jobs, partition, verbose):
    todo, done = multiprocessing.Queue(), multiprocessing.Queue()
    workers = [multiprocessing.Process(target=Worker, args=(todo, done, partition), daemon=True)
               for _ in range(min(jobs, len(chosen)) or 1)]
    for cell in chosen + [None] * len(workers):  # each takes one None, and ends
        todo.put(cell)
    for worker in workers:
        worker.start()
    found, left, again = {}, len(workers), 0
    while left:
        alive = any(w.is_alive() for w in workers)  # what the dead have said is there
        try:
            one = done.get(timeout=5)
        except queue.Empty:
            if not alive:
                print("FAIL the workers died")
                return found
            continue
        if one is None:
            left -= 1
            continue
        cell, why, times, took, late = one
        row = found.setdefault(cell.transport, Row())
        row.cells += 1
        row.passed += not why
        row.add(times)
        again += len(late)
        for words in late:
            print("again %s: %s" % (cells.name(cell), words), flush=True)
        if why:
            print("FAIL %s: %s" % (cells.name(cell), why), flush=True)
        elif verbose:
            print("ok   %s (%.1f s)" % (cells.name(cell), took), flush=True)
    if again:
        print("played again: %d" % again)
    return found


class Row:
    """What became of a transport."""

    def __init__(self):
        self.cells, self.passed, self.worst = 0, 0, {}

    def add(self, times):
        for kind, one in times.items():
            self.worst[kind] = max(self.worst.get(kind, one), one)

    def time(self, kind):
        seconds, at = self.worst.get(kind, (0, "-"))
        return "%5.0f ms (%s)" % (seconds * 1000, at.partition(" ")[2] or at)


def cores():
    """What this process may use of them: a container may have a part of the machine."""
    count = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as limit:
            quota, period = map(int, limit.read().split())
            count = min(count, max(1, quota // period))
    except (OSError, ValueError):  # not there, or "max"
        pass
    return count


def table(found):
    for transport, row in found.items():
        print("%-4s %4d cells, %4d passed" % (transport, row.cells, row.passed))
        for kind in KINDS:
            print("     worst %-30s %s" % (kind, row.time(kind)))


def choose(words, there):
    def holds(cell):
        text = cells.name(cell).split()
        return all(any(w in text for w in word.split(",")) for word in words)
    return [c for c in cells.table(there) if holds(c)]


def main(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--subset", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args(given)
    no_partition = may_partition()
    chosen, why_not = [], collections.Counter()
    for cell in choose(args.words, transports()):
        if args.subset and not cells.subset(cell):
            continue
        why = cells.excluded(cell, may_mount(), no_partition)
        why_not.update([why] if why else [])
        chosen += [] if why else [cell]
    sweep = os.environ.get("KVD_SWEEP")
    if args.subset and sweep:  # every second one, chosen by the commit
        chosen = chosen[int(sweep) % 2::2]
    if args.list:
        for cell in chosen:
            print(cells.name(cell))
        return
    for why, count in why_not.items():
        print("excluded: %d cells: %s" % (count, why))
    found = run(chosen, args.jobs, not no_partition, args.verbose)
    table(found)
    passed = sum(row.passed for row in found.values())
    print("%d passed, %d failed" % (passed, len(chosen) - passed), flush=True)
    sys.exit(0 if chosen and passed == len(chosen) else 1)


if __name__ == "__main__":
    main()
