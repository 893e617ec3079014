# SPDX-License-Identifier: Apache-2.0
"""Common parts of the connectors of all engines to the daemon's chunks. No engine is imported
here.

space_client  a session that is opened on first use, and again after a restart of the daemon
names         names of spaces: weights, positions
choice        fetch chunks of other daemons, or compute them, by their prices
hicache       pages of a pool in host memory as chunks, by their hashes
metrics       of a store"""
