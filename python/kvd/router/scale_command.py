# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.router scale: the number of workers that the load requires, once or repeatedly, to
a terminal, to a program, to a file of metrics.

If the daemon does not answer, it is queried again in the next step, and the numbers are kept: no
worker may be stopped because a daemon was restarted. The file is replaced atomically, so a
collector never reads a part of one."""
import argparse
import json
import os
import re
import signal
import sys
import time

from ..errors import Error
from .hook import Hook
from .pick import DECODE, PREFILL, WORKERS_MAX
from .scale import Measured, Scaler, measure
from .sides import Failed, Sides, duration, parsed, parser, table

NAMES = (PREFILL, DECODE)
TIME_MAX = 86400


def _range(text):
    got = re.fullmatch(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text)
    if not got or not int(got[1]) <= int(got[2]) <= WORKERS_MAX:
        raise argparse.ArgumentTypeError("%.40r is not MIN:MAX, of 1 to %d" % (text, WORKERS_MAX))
    return int(got[1]), int(got[2])


def _percent(text):
    if not re.fullmatch("[1-9][0-9]?|100", text):
        raise argparse.ArgumentTypeError("%.40r is not a percentage from 1 to 100" % text)
    return int(text) / 100


def _count(text):
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError("%.40r is not an integer from 1 to 999999999" % text)
    return int(text)


def _program(path):
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError("%s: not an executable program" % path)
    return path


def options():
    out = parser("scale", "Show how many workers the load requires. Prints text when a number "
                          "changes; "
                 "--json: a line per step. The numbers are kept while the kvd does not answer.")
    time_of = duration(1e-3, TIME_MAX)
    out.add_argument("--interval", type=duration(1, 3600), metavar="TIME",
                     help="repeat at this interval; default: once")
    out.add_argument("--count", type=_count, metavar="N", help="stop after N steps")
    out.add_argument("--prefill", type=_range, default=(1, WORKERS_MAX), metavar="MIN:MAX",
                     help="limits of the number of prefill workers (1:%d)" % WORKERS_MAX)
    out.add_argument("--decode", type=_range, default=(1, WORKERS_MAX), metavar="MIN:MAX",
                     help="limits of the number of decode workers (1:%d)" % WORKERS_MAX)
    out.add_argument("--busy", type=_percent, default=0.7, metavar="PERCENT",
                     help="target utilisation of prefill workers (70)")
    out.add_argument("--full", type=_percent, default=0.75, metavar="PERCENT",
                     help="target utilisation of decode workers' KV memory (75)")
    for name, value, text in (
            ("within", 60, "time in which waiting prompts are to be computed"),
            ("start", 180, "start-up time of a worker"), ("up", 60, "interval between two steps "
                                                                    "up"),
            ("down", 900, "time of lower need before a step down")):
        out.add_argument("--" + name, type=time_of, default=value, metavar="TIME",
                         help="%s (%ds)" % (text, value))
    out.add_argument("--hook", type=_program, metavar="PROGRAM",
                     help="program to run when a number has changed, one at a time, with "
                     "KVD_SCALE_PREFILL, KVD_SCALE_DECODE, and each with _BEFORE, _WORKERS and "
                     "_GROUP appended; it is run again if it failed")
    out.add_argument("--hook-limit", type=time_of, default=60, metavar="TIME",
                     help="time after which it is killed (60s)")
    out.add_argument("--metrics", metavar="FILE",
                     help="file to write metrics to (kvd_scale_wanted and others), for the "
                          "textfile collector")
    return out


class Scale:
    def __init__(self, args):
        self.args, self.sides = args, Sides(args)
        self.scaler = Scaler(prefill=args.prefill, decode=args.decode, busy=args.busy,
                             full=args.full, within=args.within, start=args.start, up=args.up,
                             down=args.down)
        self.hook = Hook(args.hook, args.hook_limit)
        self.wanted, self.seen, self.before = None, (), (0, 0)
        self.steps = self.lost = 0

    def rows(self):
        """(side, group, wanted, need, known, Measured) of each side."""
        return zip(NAMES, self.args.groups, self.wanted[:2], self.wanted[2:4], self.wanted[4:6],
                   self.seen)

    # ---- output ----

    def print(self):
        if self.args.json:
            print(json.dumps({**{side: {
                "group": group, "wanted": wanted, "workers": seen.workers, "known": known,
                "need": need, "speed": seen.speed, "served": seen.served, "waiting": seen.waiting}
                for side, group, wanted, need, known, seen in self.rows()},
                "changed": self.wanted.changed}), flush=True)
        elif self.wanted.changed:
            table("GROUP >WANTED >WORKERS >NEED >OF_ONE >IN_USE >WAITING UNIT", (
                (group, wanted, seen.workers, "%.2f" % need if known else "-",
                 "%.0f" % seen.speed if known else "-", "%.0f" % seen.served,
                 "%.0f" % seen.waiting, "tokens/s" if side == PREFILL else "KV tokens")
                for side, group, wanted, need, known, seen in self.rows()))
            sys.stdout.flush()

    def metrics(self):
        """Contents of the file."""
        def label(group):
            return group.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        out, rows = [], list(self.rows())
        for name, text, column in (
                ("wanted", "Workers that the load requires.", [row[2] for row in rows]),
                ("workers", "Workers that serve requests.", [row[5].workers for row in rows]),
                ("need", "As wanted, before rounding and hysteresis.",
                 [row[3] for row in rows]),
                ("known", "0 if loads report too little, and wanted is the previous value.",
                 [int(row[4]) for row in rows])):
            out.append("# HELP kvd_scale_%s %s\n# TYPE kvd_scale_%s gauge\n" % (name, text, name))
            out += ['kvd_scale_%s{group="%s"} %.9g\n' % (name, label(row[1]), value)
                    for row, value in zip(rows, column)]
        for name, text, value in (
                ("hook_failures", "Failed runs of the hook.", self.hook.failures),
                ("lost", "Steps in which the daemon did not answer.", self.lost)):
            out.append("# HELP kvd_scale_%s_total %s\n# TYPE kvd_scale_%s_total counter\n"
                       "kvd_scale_%s_total %d\n" % (name, text, name, name, value))
        return "".join(out)

    def _write(self, path):
        aside = "%s.%d.tmp" % (path, os.getpid())
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(self.metrics())
            os.rename(aside, path)
        except OSError as why:
            raise Failed("%s: %s" % (path, why.strerror)) from None

    def environment(self):
        return {"KVD_SCALE_%s%s" % (side.upper(), suffix): str(value)
                for (side, group, wanted, _, _, seen), before in zip(self.rows(), self.before)
                for suffix, value in (("", wanted), ("_BEFORE", before),
                                      ("_WORKERS", seen.workers), ("_GROUP", group))}

    # ---- steps ----

    def step(self):
        """False: after the file's last line."""
        lost = False
        try:
            if not self.sides.look():
                return False
        except Error as why:
            if self.sides.file or not self.args.interval:
                raise
            print("kvd.router: %s" % why, file=sys.stderr)
            lost = True
            self.lost += 1
        now = self.sides.now
        self.seen = measure(self.sides.picker, now)
        if lost:  # the loads are unknown
            self.seen = tuple(seen._replace(speed=0.0) for seen in self.seen)
        self.before = self.wanted[:2] if self.wanted else (0, 0)
        self.wanted = self.scaler.step(self.seen, now)
        self.hook.wanted |= self.wanted.changed
        self.print()
        self.hook.turn(self.environment())
        self.steps += 1
        if self.args.metrics:
            self._write(self.args.metrics)
        return True

    def run(self):
        args = self.args
        while self.step():
            if self.steps == args.count or not (args.interval or self.sides.file):
                break
            if not self.sides.file:
                until = time.monotonic() + args.interval
                self.hook.wait(until)
                time.sleep(max(until - time.monotonic(), 0))
        if not self.steps:
            raise Failed("%s: empty" % args.path)
        # for a change while it ran, or a failure: run it once more
        self.hook.wait(float("inf"))
        self.before = self.wanted[:2]
        self.hook.turn(self.environment())
        self.hook.wait(float("inf"))


def main(argv):
    scale = Scale(parsed(options(), argv))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, scale.hook.stop)
    try:
        scale.run()
    finally:
        scale.hook.kill()
    return 0
