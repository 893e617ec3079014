#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by way of files: the run directory, keys, the unit."""
import contextlib
import fcntl
import os

import rig
from rig import STRANGER, attack


@attack("V12", "nobody but the daemon's user holds its lock", by=STRANGER, quick=True)
def lock_held_by_a_stranger(house):
    try:
        fd = os.open(house.a.lock_path, os.O_RDONLY)
    except PermissionError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "opened %s: a flock() that waits there outlives the daemon" % house.a.lock_path


if __name__ == "__main__":
    rig.main("files")
