#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The demo is a test: two real daemons, two engines, every byte.
exec scripts/demo.sh "${KVD_BUILD:-build/rel}"
