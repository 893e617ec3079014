#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The wall clock jumps by years, forth and back, under two daemons with rooms and
an offer's lease between them (tests/lib/preload/clock_jump.c): nobody decides
anything by it."""
import mmap
import os
import struct
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, Skip, run  # noqa: E402
from kvd_engine import SUCCESS, WAITING, Cache, Engine, open_push  # noqa: E402

YEARS_S = 3 * 366 * 86400
CONFIG = """[daemon]
log_format = plain
log_level = debug
[rooms]
bootstrap_timeout = 600 s
waiting_timeout = 600 s
transfer_stall_timeout = 600 s
[transport]
transports = %s
"""
PAGES, THERE, TOKENS = [3, 4, 9, 1], [7, 2, 8, 12], 64


def heard(engine, more, deadline_s=DEADLINE_S):
    """Until `more` pings have left since now, and as many silences could end."""
    def now():
        peer, = [p for p in engine.cmd("peer.list")["peers"] if not p.get("self")]
        return peer
    first, end = now(), time.monotonic() + deadline_s
    while now()["messages_out"] < first["messages_out"] + more:
        assert time.monotonic() < end, now()
    return now()


def rooms_live_through_jumps(transport):
    if os.path.basename(BUILD) != "rel":
        raise Skip("a preload, which sanitizers do not like to come second to")
    with tempfile.NamedTemporaryFile() as clock:
        clock.write(struct.pack("=q", 0))
        clock.flush()
        offset = mmap.mmap(clock.fileno(), 8)
        env = {"LD_PRELOAD": os.path.join(BUILD, "clock-jump.so"),
               "KVD_CLOCK_FILE": clock.name}
        config = CONFIG % transport
        with Daemon(config, env=env) as a, Daemon(config, env=env) as b:
            prefill, decode = Engine(a, "prefill"), Engine(b, "decode")
            src, dst = Cache(prefill), Cache(decode)
            src.fill(PAGES, TOKENS)
            open_push(prefill, decode, src, dst, 1, PAGES, THERE, TOKENS, send=False)
            view = {"kv": dict(pages=PAGES, tokens=[0, TOKENS])}
            prefill.cmd("room.open", room="2", role="offer", pool=src.pool, views=view,
                        lease_ms=600000)
            before = heard(decode, 2)
            for jump in (YEARS_S, -YEARS_S, 0):
                offset[:] = struct.pack("=q", jump)
                after = heard(decode, 10)
                heard(prefill, 10)
                assert after["instance"] == before["instance"]
                assert after["state"] == "up" and after["rtt_us"] < 60e6, after
                assert prefill.state(1, "send")[0] == WAITING
                assert decode.state(1, "recv")[0] == WAITING
                assert prefill.state(2, "offer")[0] == WAITING
                Engine(a, "witness %d" % jump).close()  # writes a line to the log
                health = prefill.cmd("health")
                assert health["uptime_ms"] < 600000, health
            prefill.cmd("room.send", room="1", seq=0, last=True, views=view)
            decode.until(1, "recv", SUCCESS)
            prefill.until(1, "send", SUCCESS)
            dst.check(THERE, TOKENS)
            prefill.cmd("room.abort", room="2", role="offer", reason="the test is over")
            log = a.log()
            years = {line[:4] for line in log.splitlines() if "witness" in line}
            assert len(years) == 3, "the clock did not jump: %s" % log
            assert " down " not in log and "down" not in b.log(), log + b.log()
            prefill.close()
            decode.close()


def shm_rooms_live_through_jumps_of_the_wall_clock():
    rooms_live_through_jumps("shm")


def tcp_rooms_live_through_jumps_of_the_wall_clock():
    rooms_live_through_jumps("tcp")


def ucx_rooms_live_through_jumps_of_the_wall_clock():
    rooms_live_through_jumps("ucx")


run([shm_rooms_live_through_jumps_of_the_wall_clock,
     ucx_rooms_live_through_jumps_of_the_wall_clock,
     tcp_rooms_live_through_jumps_of_the_wall_clock])
