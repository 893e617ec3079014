# SPDX-License-Identifier: Apache-2.0
"""A program on a terminal of its own, and what its screen shows: as much of ECMA-48 as
kvd-ctl writes. Anything else that controls a terminal is an error of the program."""
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

from kvd_daemon import DEADLINE_S

SEQUENCE = re.compile(r"\x1b\[(\??)(\d*)([HJKmhl])")


class Screen:
    def __init__(self, args, rows=30, columns=120, env=None):
        self.master, slave = pty.openpty()
        self.raw, self.rest, self.modes, self.looks = b"", "", {}, set()
        self.whole = False
        self.lines, self.line = [""], 0
        self.size(rows, columns)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.proc = subprocess.Popen(
            args, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=dict({"PATH": os.environ["PATH"], "TERM": "xterm"}, **(env or {})),
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.proc.poll() is None:
            self.proc.kill()
        self.proc.wait()
        os.close(self.slave)
        os.close(self.master)

    def size(self, rows, columns):
        self.rows, self.columns = rows, columns
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text.encode())

    def text(self):
        return "\n".join(line[:self.columns] for line in self.lines)

    def control(self, private, number, letter):
        if letter in "HJ":  # a frame begins with one and ends with the other
            self.whole = letter == "J"
        if letter == "H":
            self.line = 0
            self.lines[0] = ""
        elif letter == "J":
            del self.lines[self.line + 1:]
        elif letter == "m":
            self.looks.add(number)
        elif letter in "hl" and private:
            self.modes[number] = letter == "h"

    def feed(self, data):
        """A line is whole when the next begins: it is drawn anew from its start."""
        text = self.rest + data.decode("utf-8", "replace")
        at = 0
        while at < len(text):
            found = SEQUENCE.match(text, at)
            if found:
                self.control(*found.groups())
                at = found.end()
            elif text[at] == "\x1b" and len(text) - at < 10:
                break  # the rest comes
            else:
                self.put(text[at])
                at += 1
        self.rest = text[at:]

    def put(self, char):
        if char == "\n":
            self.line += 1
            self.lines[self.line:self.line + 1] = [""]
        elif char != "\r":
            assert char.isprintable(), "it wrote %r" % char
            self.lines[self.line] += char

    def read(self, wait_s):
        data = self.read_raw(wait_s)
        self.feed(data)
        return bool(data)

    def read_raw(self, wait_s):
        """Not onto the screen: for programs that write lines."""
        if not select.select([self.master], [], [], wait_s)[0]:
            return b""
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: nobody has it open any more
            return b""
        self.raw += data
        return data

    def until_raw(self, words):
        end = time.monotonic() + DEADLINE_S
        while words.encode() not in self.raw:
            self.read_raw(0.05)
            assert time.monotonic() < end, self.raw

    def until(self, words, shown=True, deadline_s=DEADLINE_S):
        """Until the screen has the words, or has them no more; all of it, drawn whole."""
        end = time.monotonic() + deadline_s
        while True:
            while self.read(0.05):
                pass
            if self.whole and (words in self.text()) == shown:
                return self.text()
            assert time.monotonic() < end and self.proc.poll() is None, \
                "%s %r:\n%s" % ("no" if shown else "still", words, self.text())

    def end(self, sig=None):
        """Its status, when all that it wrote is read."""
        if sig:
            self.proc.send_signal(sig)
        status = self.proc.wait(DEADLINE_S)
        while self.read(0.05):
            pass
        return status

    def restored(self):
        """The terminal is as it was."""
        return termios.tcgetattr(self.slave) == self.before and \
            not self.modes.get("1049") and self.modes.get("25", True) and \
            self.modes.get("7", True)
