#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What members of a group say of their load: what the engine says of itself, rooms that
wait and run, bytes that move, rooms that fail. What other daemons read: test_cluster_etcd."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import Daemon, run, until  # noqa: E402
from kvd_engine import SUCCESS, Cache, Engine, open_push  # noqa: E402

LEASE = "[cluster]\ncluster_lease = 2 s\n"
PAGES, TOKENS = [1, 2, 3, 4], 64


def load_of(engine):
    """What the directory has of prefill's worker w0; None: nothing yet."""
    ranks = engine.cmd("group.query", group="prefill", loads=True)["ranks"]
    return next((r.get("load") for r in ranks if r["worker"] == "w0"), None)


def engine_load_is_published_until_engine_ends():
    with Daemon(LEASE) as a:
        prefill, other, requester = (Engine(a, name) for name in ("prefill", "other", "requester"))
        prefill.cmd("group.publish", group="prefill", worker="w0")
        other.cmd("group.publish", group="prefill", worker="w1")
        prefill.cmd("session.report", running=12, waiting=3, kv_free_tokens=4096)
        load = until("a load", lambda: (x := load_of(requester)) and "engine" in x and x)
        assert load["engine"] == dict(running=12, waiting=3, kv_free_tokens=4096), load
        # a place that comes later is told the same, though nothing has changed
        prefill.cmd("group.publish", group="more", worker="w0")
        until("the load of the second place", lambda: requester.cmd(
            "group.query", group="more", loads=True)["ranks"][0].get("load"))
        # what is not said again is not known any more
        prefill.cmd("session.report", running=1)
        until("the next load", lambda: load_of(requester)["engine"] == dict(running=1))
        assert "engine" not in (next(
            r for r in requester.cmd("group.query", group="prefill", loads=True)["ranks"]
            if r["worker"] == "w1").get("load") or {})
        assert "load" not in requester.cmd("group.query", group="prefill")["ranks"][0]
        prefill.close()
        until("its end", lambda: load_of(requester) is None)


def values_out_of_range_are_refused_and_ignored():
    with Daemon(LEASE) as a:
        prefill = Engine(a, "prefill")
        prefill.cmd("group.publish", group="prefill", worker="w0")
        prefill.cmd("session.report", running=7)
        until("a load",
              lambda: (x := load_of(prefill)) and x.get("engine") == dict(running=7))
        prefill.refused("ERANGE", "session.report", running=-1)
        prefill.refused("ERANGE", "session.report", waiting=(1 << 52) + 1)
        prefill.refused("EINVAL", "session.report", running="many")
        prefill.refused("EINVAL", "session.report", idle=True)
        assert load_of(prefill)["engine"] == dict(running=7)


def rooms_are_counted_as_they_wait_move_and_fail():
    with Daemon(LEASE) as a, Daemon(LEASE) as b:
        prefill, decode = Engine(a, "prefill"), Engine(b, "decode")
        src, dst = Cache(prefill), Cache(decode)
        prefill.cmd("group.publish", group="prefill", worker="w0", pool="kv")
        until("a load", lambda: load_of(prefill))
        for room in range(100, 105):
            prefill.cmd("room.open", room=str(room), role="send", pool=src.pool)
        until("rooms that wait", lambda: load_of(prefill)["rooms"]["waiting"] == 5)
        for room in range(1, 4):
            open_push(prefill, decode, src, dst, room, PAGES, PAGES, TOKENS)
            decode.until(room, "recv", SUCCESS)
            prefill.until(room, "send", SUCCESS)
        load = until("a time to the first byte",
                     lambda: (x := load_of(prefill)) and "ttfb_us" in x and x)
        assert load["ttfb_us"] > 0 and load["failed"] == 0, load
        for room in range(100, 105):
            prefill.cmd("room.abort", room=str(room), role="send")
        until("rooms that failed", lambda: load_of(prefill)["failed"] == 5)
        assert load_of(prefill)["rooms"]["waiting"] == 0


if __name__ == "__main__":
    run([engine_load_is_published_until_engine_ends,
         values_out_of_range_are_refused_and_ignored,
         rooms_are_counted_as_they_wait_move_and_fail])
