#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A part of the fault matrix that fits into `make test`: every victim and fault on
each transport in the phases that differ most. `make faults` runs all of it."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "faults"))
import faults  # noqa: E402

faults.main(["--subset"] + sys.argv[1:])
