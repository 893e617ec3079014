#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench_daemons.py [DAEMONS [PAIRS]]: many real daemons on this machine (200), members of
one cluster whose directory is an etcd; in so many pairs (25) an engine sends rooms
to another, which names it by its group and worker. What an idle daemon and one with traffic
take of memory and of a core, and how long rooms take beside all the others."""
import json
import os
import select
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import Daemon, need_fds, until  # noqa: E402
from kvd_engine import SUCCESS, WAITING, Cache, Engine  # noqa: E402
from kvd_etcd import Etcd  # noqa: E402

SECONDS = 20
PAGES, TOKENS = [1, 2, 3, 4], 64


def memory(pid):
    """Resident and proportional, MiB."""
    with open("/proc/%d/smaps_rollup" % pid) as lines:
        got = {w[0]: int(w[1]) / 1024 for w in map(str.split, lines) if w[-1] == "kB"}
    return got["Rss:"], got["Pss:"]


def cpu(pid):
    with open("/proc/%d/stat" % pid) as line:
        words = line.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def shares(daemons, seconds, begun):
    return [(cpu(d.proc.pid) - at) / seconds for d, at in zip(daemons, begun)]


class Pair:
    def __init__(self, number, a, b):
        self.worker, self.room, self.times = "w%d" % number, 0, []
        self.prefill, self.decode = Engine(a, "prefill"), Engine(b, "decode")
        self.src, self.dst = Cache(self.prefill), Cache(self.decode)
        self.prefill.cmd("group.publish", group="prefill", worker=self.worker, pool="kv")

    def send(self):
        self.room += 1
        view, room = {"kv": dict(pages=PAGES, tokens=[0, TOKENS])}, str(self.room)
        self.src.fill(PAGES, TOKENS)
        begun = time.monotonic()
        self.decode.cmd("room.open", room=room, role="recv", pool=self.dst.pool,
                        sources=[dict(group="prefill", worker=self.worker)])
        self.decode.cmd("room.bind", room=room, views=view)
        self.prefill.cmd("room.open", room=room, role="send", pool=self.src.pool)
        self.prefill.until(self.room, "send", WAITING)
        self.prefill.cmd("room.send", room=room, seq=0, last=True, views=view)
        self.decode.until(self.room, "recv", SUCCESS)
        self.times.append(time.monotonic() - begun)
        self.dst.check(PAGES, TOKENS)
        self.prefill.until(self.room, "send", SUCCESS)
        self.decode.cmd("room.close", room=room, role="recv")
        self.prefill.cmd("room.close", room=room, role="send")

    def close(self):
        self.prefill.close()
        self.decode.close()


def say(phase, **figures):
    print(json.dumps(dict(phase=phase, **{k: round(v, 4) if isinstance(v, float) else v
                                          for k, v in figures.items()})), flush=True)


def of(daemons, begun, seconds):
    rss, pss = zip(*[memory(d.proc.pid) for d in daemons])
    return dict(rss_mib=statistics.median(rss), pss_mib=statistics.median(pss),
                core=statistics.mean(shares(daemons, seconds, begun)))


def measure(daemons, pairs):
    requester = Engine(daemons[0], "requester")
    begun = time.monotonic()
    until("all daemons in the directory", lambda: len(
        requester.cmd("group.query", group="kvd.daemons")["ranks"]) == len(daemons), 120)
    say("all known", daemons=len(daemons), seconds=time.monotonic() - begun)
    at, begun = [cpu(d.proc.pid) for d in daemons], time.monotonic()
    select.select([], [], [], SECONDS)
    say("idle", daemons=len(daemons), **of(daemons, at, time.monotonic() - begun))
    working = [Pair(i, daemons[2 * i + 1], daemons[2 * i + 2]) for i in range(pairs)]
    for pair in working:
        pair.send()
        pair.times.clear()  # the first one dials
    at, begun = [cpu(d.proc.pid) for d in daemons], time.monotonic()
    while time.monotonic() - begun < SECONDS:
        for pair in working:
            pair.send()
    seconds = time.monotonic() - begun
    busy, idle = daemons[1:2 * pairs + 1], daemons[2 * pairs + 1:]
    times = [t * 1e3 for pair in working for t in pair.times]
    say("with traffic", daemons=len(busy), rooms=len(times),
        p50_ms=statistics.median(times), p99_ms=statistics.quantiles(times, n=100)[98],
        **of(busy, at[1:2 * pairs + 1], seconds))
    say("idle beside them", daemons=len(idle), **of(idle, at[2 * pairs + 1:], seconds))
    for pair in working:
        pair.close()
    requester.close()


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 25
    need_fds(count * 8)
    with Etcd() as etcd:
        run(count, pairs, "[cluster]\ncluster = %s\n" % etcd.url)


def run(count, pairs, config):
    daemons, begun = [], time.monotonic()
    try:
        for i in range(count):
            daemons.append(Daemon(config, name="d%d" % i).start())
        for daemon in daemons:
            daemon.wait_ready()
        say("started", daemons=count, seconds=time.monotonic() - begun)
        measure(daemons, pairs)
    finally:
        for daemon in daemons:
            daemon.proc.terminate()
        for daemon in daemons:
            daemon.wait()


if __name__ == "__main__":
    main()
