# SPDX-License-Identifier: Apache-2.0
"""A daemon that sends attention requests to a holder without a window, as fast as it can:
others are served in between, and its queue is bounded."""
import contextlib
import os
import statistics

import numpy as np
import pytest

import kvd
from attend_flood import Flood, keys_of
from conftest import until
from kvd_daemon import BUILD, Daemon
from kvd_space import attended
from test_attend import ATTENDS, T, Engine, Model, close, ids_of

TOKENS, ROWS = 512 * T, 512  # of a message: half of the rows of one call of the kernel
WAITS_MOST = 8192 // ROWS + 1  # limit of queued rows of one daemon, and the requests of others
GROWS_MOST_MIB = 96  # rows, answers and the queue of the line
ASKS = 15


@contextlib.contextmanager
def known(folder):
    """A holder, its client, that of a daemon which asks it, and a third key that it knows."""
    sections, keys = keys_of(folder, ("holder", "requester", "mallory"))
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(Daemon(ATTENDS + sections["holder"]))
        far = stack.enter_context(kvd.Client(holder.socket_path))
        requester = stack.enter_context(Daemon(ATTENDS + "chunk_peers = %s\n" % far.endpoint +
                                           sections["requester"]))
        client = stack.enter_context(kvd.Client(requester.socket_path))
        until(lambda: any(p["data_line"] and not p["self"]
                          for p in client.command("peer.list")["peers"]))
        yield holder, far, client, keys["mallory"]


def rss_mib(daemon):
    with open("/proc/%d/status" % daemon.proc.pid, encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@pytest.mark.parametrize("way", ["control line", "data line"])
def test_flood_beyond_window_disturbs_no_other_requester(tmp_path, way):
    model, ids = Model(TOKENS), ids_of(TOKENS // T, b"flood")
    with known(tmp_path) as (holder, far, client, keys):
        holder.expected.append("peer")  # its line may end, and that is reported
        there, near = Engine(far, model), Engine(client, model)
        there.put(ids)
        hold = near.space.hold(ids, remote=10, lease=300)
        assert hold.remote == len(ids)

        def state():
            return attended(far)

        def ask():
            """Calls of the holder's kernel until the answer, and the queue."""
            before = state()
            near.ask(0, 1, [kvd.Part(hold)], deadline=60)
            near.attend.wait(0, timeout=60)
            after = state()
            close(near.got(0), want)
            return after["batches_total"] - before["batches_total"], after["queued"]
        rows = near.ask(0, 1, [kvd.Part(hold)])  # as each ask() has them
        near.attend.wait(0, timeout=60)
        want = model.attend(1, rows, np.arange(TOKENS))
        ask()
        begin, refused = rss_mib(holder), state()["refused_total"]
        with Flood(far, keys, ids, tokens=TOKENS, rows=ROWS, heads=model.heads, dqk=model.dqk,
                   dv=model.dv, data_line=way == "data line") as flood:
            until(lambda: state()["refused_total"] > refused)
            calls, waited, grown = [], [], []
            for _ in range(ASKS):
                count, waiting = ask()
                calls.append(count)
                waited.append(waiting)
                grown.append(rss_mib(holder) - begin)
            print("%s: %d messages, %d refused; calls until an answer %s; %s waited; "
                  "grown by %.0f MiB; over: %r" % (
                      way, flood.sent, state()["refused_total"], sorted(calls), max(waited),
                      max(grown), flood.over))
        assert max(waited) <= WAITS_MOST
        # its own, and what is computed while it comes, goes and is asked about; whoever came
        # first being next it would be all that waits
        assert statistics.median(calls) <= 5
        if os.path.basename(BUILD) == "rel":  # sanitizers need more memory
            assert max(grown) <= GROWS_MOST_MIB
        until(lambda: state()["queued"] == 0)
        ask()
        hold.close()
