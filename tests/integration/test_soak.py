#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A few rounds of the soak, with the transports mixed. `make soak` runs all of it."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "faults"))
import soak  # noqa: E402

soak.main(["--rooms", "1500", "--transports", soak.MIXED] + sys.argv[1:])
