# SPDX-License-Identifier: Apache-2.0
"""What the connectors of all engines to the daemon's chunks have in common. No engine is imported
here.

door     a session that is opened when it is first asked, and again after the daemon was restarted
names    what spaces are called: weights, positions
shelf    pages of a pool in host memory as chunks, by their hashes"""
