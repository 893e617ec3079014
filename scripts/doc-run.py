#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""doc-run.py NAME TITLE -- COMMAND...: what COMMAND prints becomes docs/runs/DATE-COMMIT-NAME.md,
below its title and a line with date, version and machine. Nothing is written when COMMAND
fails."""
import datetime
import os
import platform
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "bench"))
from bench_page import page  # noqa: E402


def main():
    name, title, dashes, *command = sys.argv[1:]
    assert dashes == "--" and command
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("%s: exit status %d: nothing is written" % (command[0], done.returncode))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE,
                            text=True, check=True).stdout.strip()
    date = datetime.date.today().isoformat()
    print(page("docs/runs", date, commit, name, title, "%s, kvd %s, %d cores, Linux %s.\n\n%s" % (
        date, commit, os.cpu_count(), platform.release(), done.stdout)))


main()
