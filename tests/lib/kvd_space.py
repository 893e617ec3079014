# SPDX-License-Identifier: Apache-2.0
"""A client's space, once the daemon has made its memory for chunks."""
import threading
import time

import kvd
from kvd_daemon import DEADLINE_S

PAUSE = threading.Event()  # never set


def space_of(client, *args, **words):
    """client.space(…)"""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            return client.space(*args, **words)
        except kvd.BusyError:
            assert time.monotonic() < end, "no memory for chunks within %g s" % DEADLINE_S
            PAUSE.wait(0.002)


def attended(client):
    """A daemon's figures of attention: requests_active, queued, refused_total, batches_total, …"""
    return {row["name"][len("attention_"):]: row["value"]
            for row in client.command("stats")["metrics"] if row["name"].startswith("attention_")}
