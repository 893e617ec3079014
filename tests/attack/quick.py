#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The quick attacks of this folder, for `make test`: no p99 is asked for."""
import sys

import run

sys.argv[1:] = ["--quick"]
run.main()
