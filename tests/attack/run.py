#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make attack: all doors, one total. run.py [WORDS]: those whose name holds a word, or
whose cause is one. run.py --quick: what `make test` plays, without a judgement of times."""
import importlib
import sys

import rig

DOORS = ("engine", "odd", "stranger", "peer", "files", "chunks")


def main():
    words = sys.argv[1:]
    quick = "--quick" in words
    sums = dict(passed=0, failed=0, skipped=0, open=0)
    words = [w for w in words if w != "--quick"]
    for door in DOORS:
        rig.attacks.clear()
        importlib.import_module(door)
        for key, n in rig.run(door, words, quick, timed=not quick).items():
            sums[key] += n
    print("%d open (tests/attack/open.txt)" % sums["open"])
    print("%d passed, %d failed, %d skipped" % (sums["passed"], sums["failed"],
                                                sums["skipped"] + sums["open"]))
    sys.exit(1 if sums["failed"] else 0)


if __name__ == "__main__":
    main()
