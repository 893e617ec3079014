#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""doc-section.py FILE NAME -- COMMAND...: what COMMAND prints goes between <!-- NAME --> and
<!-- end NAME --> of FILE, under a line with date, version and machine. Nothing is changed when
COMMAND fails."""
import datetime
import os
import platform
import re
import subprocess
import sys


def main():
    path, name, dashes, *command = sys.argv[1:]
    assert dashes == "--" and command
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("%s: exit status %d: %s is as it was" % (command[0], done.returncode, path))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE,
                            text=True, check=True).stdout.strip()
    head = "%s, kvd %s, %d cores, Linux %s.\n\n" % (
        datetime.date.today().isoformat(), commit, os.cpu_count(), platform.release())
    with open(path, encoding="utf-8") as file:
        text = file.read()
    marked = re.compile(r"(<!-- %s -->\n).*?(<!-- end %s -->)" % (name, name), re.S)
    new, count = marked.subn(lambda m: m[1] + head + done.stdout + m[2], text)
    if count != 1:
        sys.exit("%s: no <!-- %s --> … <!-- end %s -->" % (path, name, name))
    with open(path, "w", encoding="utf-8") as file:
        file.write(new)


main()
