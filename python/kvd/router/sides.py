# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode group with their loads in a picker, for the commands pick and scale: from
a daemon's directory, repeatedly, or from a file with a line for each step:

    {"at": SECONDS, "groups": {"NAME": ANSWER, …}}

ANSWER is an answer of group.query with loads. Without "at" a step is one second after the previous
one."""
import argparse
import json
import re
import sys
import time

from ..client import Client
from ..errors import Error, InvalidError, LimitError, NotFoundError
from .pick import DECODE, PREFILL, Picker

LINE_MAX = 64 << 20
TIMEOUT_S = 10
UNITS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Failed(Exception):
    """The command ends with this text and status 1."""


def duration(least, most):
    """Parses TIME: a number with a unit, default s."""
    def of(text):
        got = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|)", text)
        value = float(got[1]) * UNITS_S[got[2] or "s"] if got else 0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError("%.40r is not a time of %gs to %gs like 60s" % (
                text, least, most))
        return value
    return of


def parser(command, description, **more):
    out = argparse.ArgumentParser(prog="python -m kvd.router " + command, allow_abbrev=False,
                                  description=description, **more)
    out.add_argument("groups", nargs="*", metavar="GROUP",
                     help="names of a prefill and a decode group (prefill decode)")
    out.add_argument("--socket", metavar="PATH", help="control socket of the kvd (KVD_SOCKET, "
                                                      "KVD_NAME, or the only one in the run dir)")
    out.add_argument("--name", help="name of the instance: <run dir>/NAME.sock")
    out.add_argument("--timeout", type=duration(1e-3, 3600), default=TIMEOUT_S, metavar="TIME",
                     help="timeout of its answers (%ds)" % TIMEOUT_S)
    out.add_argument("--from", dest="path", metavar="FILE",
                     help="file with a line per step, instead of a kvd; - is standard input")
    out.add_argument("--json", action="store_true")
    return out


def parsed(out, argv):
    args = out.parse_args(argv)
    if len(args.groups) not in (0, 2):
        out.error("give a prefill group and a decode group, or neither")
    args.groups = args.groups or [PREFILL, DECODE]
    return args


class Sides:
    """now: nanoseconds of the last step: the file's time, or the clock's."""

    def __init__(self, args):
        self.args, self.picker, self.now = args, Picker(), 0.0
        self.client = self.file = None
        self.line = 0
        if args.path == "-":
            self.file = sys.stdin.buffer
        elif args.path:
            try:
                self.file = open(args.path, "rb")  # until the process ends
            except OSError as why:
                raise Failed("%s: %s" % (args.path, why.strerror)) from None

    def look(self):
        """One step for both groups. False: after the file's last line. kvd.Error: from the
        daemon."""
        if self.file:
            return self._read()
        self.now = time.monotonic()
        if self.client is None:
            self.client = Client(self.args.socket, name=self.args.name, client="kvd.router",
                                 timeout=self.args.timeout)
        for side, group in zip((PREFILL, DECODE), self.args.groups):
            try:
                answer = self.client.command("group.query", group=group, loads=True)
            except NotFoundError:  # the group is empty
                answer = {"ranks": []}
            self.picker.feed(side, answer, self.now)
        return True

    def _read(self):
        text = b"\n"
        while text == b"\n":
            text = self.file.readline(LINE_MAX + 1)
            self.line += 1
        if not text:
            return False
        where = "%s:%d: " % (self.args.path, self.line)
        if len(text) > LINE_MAX:
            raise Failed(where + "line longer than %d MiB" % (LINE_MAX >> 20))
        try:
            look = json.loads(text)
            at, groups = look.get("at"), look["groups"]
            self.now = float(at) if type(at) in (int, float) and 0 < at < 1e9 else self.now + 1
            for side, group in zip((PREFILL, DECODE), self.args.groups):
                self.picker.feed(side, groups[group], self.now)
        except (InvalidError, LimitError) as why:
            raise Failed(where + "group %.64s: %s" % (group, why.message)) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Failed(where + '{"groups": {NAME: ANSWER}} with both groups is required') \
                from None
        return True


# ---- output ----

def clean(text):
    """A name on one line, without control characters of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(header, rows):
    """Columns whose header starts with > are right-aligned."""
    header = header.split()
    rows = [[h.lstrip(">") for h in header]] + [[clean(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows:
        print("  ".join(cell.rjust(width) if h[0] == ">" else cell.ljust(width)
                        for h, cell, width in zip(header, row, widths)).rstrip())


def run(main, argv):
    """The exit status of a command."""
    try:
        return main(argv)
    except (Error, Failed) as why:
        print("kvd.router: %s" % why, file=sys.stderr)
        return 1
