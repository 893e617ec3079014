# SPDX-License-Identifier: Apache-2.0
"""Reconnect: the daemon is restarted under an engine that does nothing but open a room
for each request. What is retryable it tries again; memory and pool it registers once.

python reconnect.py SOCKET     a line for each line of the standard input"""
import sys
import time

import kvd
from engine import Engine

engine = Engine(sys.argv[1], "prefill")
for number, _ in enumerate(sys.stdin, 54):
    tries = 0
    while True:
        try:
            tries += 1
            room = engine.client.send(number, engine.pool)
            break
        except kvd.Error as error:
            if not error.retryable:
                raise
            time.sleep(0.02)
    print("room %d: %s" % (number, "open" if tries == 1 else "open, after other tries"),
          flush=True)
    del room  # one that is dropped is aborted and closed
