# SPDX-License-Identifier: Apache-2.0
"""python -m kvd daemon ARGS... | ctl ARGS...: run kvd or kvd-ctl in place of this
process."""
import os
import sys

from .daemon import program

USAGE = """usage: python -m kvd daemon ARGS... | ctl ARGS...
  daemon  run kvd
  ctl     run kvd-ctl
The programs of this package are used, else those in PATH."""


def _run(name, args):
    path = program(name)
    try:
        if path:
            os.execv(path, [name] + args)
        why = "not in this package (pip install ./python leaves it out), nor in PATH"
    except OSError as error:
        why = "%s: %s" % (path, error.strerror)
    print("%s: %s" % (name, why), file=sys.stderr)
    return 127  # a shell's status for a command that it cannot run


def main(argv):
    """Exit status of `python -m kvd ARGV`, if it returns."""
    names = {"daemon": "kvd", "ctl": "kvd-ctl"}
    if not argv or argv[0] not in names:
        print(USAGE, file=sys.stderr)
        return 2
    return _run(names[argv[0]], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
