# SPDX-License-Identifier: Apache-2.0
"""What a request costs beside its bytes: latency of a room, polls, memory of open
rooms, an idle daemon. Each gives records (bench_report.figure)."""
import json
import select
import subprocess
import time

from bench_parts import BUILD, Obeyer, used_s
from bench_report import figure, median, quantile
from bench_works import (IDLE_CPU_PERCENT, IDLE_WAKE_UPS, JSON_POLL_US, OPEN_ROOM_BYTES, RATE_US,
                         ROOM_BESIDE_P99_US, ROOM_LATENCY_RATIO, STATUS_PAGE_NS)

ROOMS = 10000
BIG_MIB = 4096
REPS_MIN = 2
IDLE_S = 10
QUIET_S = 3  # after the last message; pings become rarer


def mem_available_mib():
    with open("/proc/meminfo") as lines:
        return [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")][0] >> 10


def us(times):
    return [t * 1e6 for t in times]


def loop_stats(socket):
    """Turns of a daemon's loop: all, slow, by bucket of the time that it had a core for, by
    bucket of the clock (others had the core, too); bucket i is below 2^i us."""
    said = json.loads(subprocess.run([BUILD + "/kvd-ctl", "--socket", socket, "--json", "stats"],
                                     capture_output=True, text=True, check=True).stdout)
    metrics = {row["name"]: row["value"] for row in said["metrics"]}
    return metrics["loop_iterations_total"], metrics["loop_slow_iterations_total"], \
        said["loop"]["cpu_us"]["buckets"], said["loop"]["busy_us"]["buckets"]


def loop_turns(transport, before, after):
    """Of both daemons: turns that were longer than they may be."""
    turns = sum(a[0] - b[0] for a, b in zip(after, before))
    slow = sum(a[1] - b[1] for a, b in zip(after, before))
    core, clock = (2 ** max(i for a, b in zip(after, before)
                            for i, n in enumerate(a[which]) if n > b[which][i])
                   for which in (2, 3))
    return figure("loop turns over 200 us, both daemons", transport, "beside", slow, "turns",
                  0, turns=turns, note="of %d; all below %d us, by the clock below %d us" % (
                      turns, core, clock))


def latency(rooms, pair, reps, until):
    """A room of one 64 KiB page, idle and beside a large one; the limit is taken in
    turn with it."""
    transport, times = pair.transport, []
    hops = Obeyer([BUILD + "/bench/bench_hops"])
    parts = {"zmq": [], "tcp": [], "socket": []}
    begin = time.monotonic()
    try:
        for done in range(reps):
            if done >= REPS_MIN and time.monotonic() > begin + (until - begin) / 3:
                reps = done
                break
            times += us(rooms.ask("latency 200"))
            for name, seconds in hops.ask("200").items():
                parts[name] += us(seconds)
    finally:
        hops.close()
    limit = sum(median(parts[name]) for name in parts)
    ratio = median(times) / limit
    goal = ROOM_LATENCY_RATIO if transport == "tcp" else None
    work = "room, one 64 KiB page"
    yield figure(work, transport, "p50", median(times), "us", goal and goal * limit,
                 limit="ZeroMQ + 64 KiB TCP one way + two socket hops", limit_us=round(limit, 1),
                 ratio=round(ratio, 2), samples=len(times),
                 note="%.2f of ZeroMQ %.0f + TCP %.0f + two hops %.0f us" % (
                     (ratio,) + tuple(median(parts[n]) for n in ("zmq", "tcp", "socket"))))
    yield figure(work, transport, "p99", quantile(times, 0.99), "us", samples=len(times))
    mib = BIG_MIB if mem_available_mib() > 2 * BIG_MIB else BIG_MIB // 8
    # each repetition's requests fit into about one such room
    before = [loop_stats(socket) for socket in pair.sockets]
    said = rooms.ask("beside %d %d" % (40 * reps, mib))
    after = [loop_stats(socket) for socket in pair.sockets]
    times = us(said["seconds"])
    note = "beside a room of %d MiB at %.2f GB/s" % (mib, said["big_gbps"])
    yield figure(work, transport, "p50 beside", median(times), "us", note=note)
    yield figure(work, transport, "p99 beside", quantile(times, 0.99), "us",
                 ROOM_BESIDE_P99_US if transport == "tcp" else None, samples=len(times),
                 note=note)
    yield loop_turns(transport, before, after)
    said = rooms.ask("asleep %d %d" % (10 * reps, mib))
    times = us(said["seconds"])
    note = "the engine sleeps 20 us and more between looks; %.2f GB/s" % said["big_gbps"]
    yield figure(work, transport, "p50 beside, asleep", median(times), "us", note=note)
    yield figure(work, transport, "p99 beside, asleep", quantile(times, 0.99), "us",
                 samples=len(times), note=note)


def pages(rooms, pair, reps, until):
    """A room of 4 MiB from its chunk to success, beside memcpy of the same rows."""
    kvd, limit = [], []
    for _ in range(reps):
        said = rooms.ask("pages 10")
        kvd += us(said["kvd"])
        limit += us(said["limit"])
    ratio = median(limit) / median(kvd)
    yield figure("room of 64 scattered 64 KiB pages", pair.transport, "p50", median(kvd), "us",
                 limit="memcpy, 1 thread", limit_us=round(median(limit), 1),
                 ratio=round(ratio, 3),
                 note="%.2f of memcpy on 1 thread, %.0f us" % (ratio, median(limit)))


def poll(rooms, pair, reps, until):
    said = [rooms.ask("poll %d" % ROOMS) for _ in range(3)]
    work = "poll of %d rooms, a room" % ROOMS
    yield figure(work, pair.transport, "status page", median([s["page_ns"] for s in said]),
                 "ns", STATUS_PAGE_NS)
    yield figure(work, pair.transport, "JSON", median([s["json_us"] for s in said]), "us",
                 JSON_POLL_US)


def open_rooms(rooms, pair, reps, until):
    """By a fresh pair: what an earlier work left free would hide what these take."""
    said = rooms.ask("open %d" % ROOMS)
    for side in ("sender", "receiver"):
        yield figure("memory of %d open rooms, a room" % ROOMS, pair.transport, side,
                     said[side + "_bytes"], "bytes", OPEN_ROOM_BYTES)


def idle(rooms, pair, reps, until):
    """A session, a pool and a peer, and nothing to do."""
    pid = pair.daemons[0].proc.pid
    select.select([], [], [], QUIET_S)
    before = used_s(pid)
    select.select([], [], [], IDLE_S)
    after = used_s(pid)
    work = "idle daemon with a session and a peer"
    yield figure(work, pair.transport, "CPU", 100 * (after[0] - before[0]) / IDLE_S, "%",
                 IDLE_CPU_PERCENT)
    yield figure(work, pair.transport, "wake-ups", (after[1] - before[1]) / IDLE_S, "/s",
                 IDLE_WAKE_UPS)


def rate(rooms, pair, reps, until):
    """Rooms of one 64 KiB page, posted, so many of them open at a time."""
    for flight, count in ((1, 2000), (8, 6000), (64, 12000)):
        rooms.ask("rate %d %d" % (count // 10, flight))
        best = max(rooms.ask("rate %d %d" % (count, flight)) for _ in range(min(reps, 3)))
        yield figure("time of a room, %d in flight" % flight, pair.transport, "best", 1e6 / best,
                     "us", RATE_US if flight == 64 else None,
                     note="%.0f rooms a second" % best)


WORKS = {"latency": latency, "rate": rate, "pages": pages, "poll": poll, "open": open_rooms, "idle": idle}
FRESH = ("open", "idle")


def run(work, pair, reps, until):
    rooms = Obeyer([BUILD + "/bench/bench_rooms"] + pair.sockets)
    try:
        rooms.ask("latency 1")  # the peers know each other
        return list(WORKS[work](rooms, pair, reps, until))
    finally:
        rooms.close()
