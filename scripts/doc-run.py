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


def main():
    name, title, dashes, *command = sys.argv[1:]
    assert dashes == "--" and command
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("%s: exit status %d: nothing is written" % (command[0], done.returncode))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE,
                            text=True, check=True).stdout.strip()
    date = datetime.date.today().isoformat()
    path = "docs/runs/%s-%s-%s.md" % (date, commit, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write("# %s\n\n%s, kvd %s, %d cores, Linux %s.\n\n%s" % (
            title, date, commit, os.cpu_count(), platform.release(), done.stdout))
    print(path)


main()
