#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fair sharing: requests of 1 MiB, alone and beside one large room.

    scripts/bench_fair.py [TRANSPORT [MIB [ROOMS]]]

Two daemons, four engines; the large room is one chunk of MIB megabytes (10240, or
half of the memory that is free) between the same two daemons as the small ones; then
another session has ROOMS (10000) rooms of the same 1 MiB under way, beside which each
request is the only one of its session. What a request waits for then is its share of
the same copy threads or the same connection: as a yardstick stands what it would wait
for if all the other bytes had to be moved first. Where more than one in a hundred took
longer than a tenth of that, small rooms wait in line: exit status 1.
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests", "lib"))
import kvd_daemon  # noqa: E402

PAGES = 16  # of 64 KiB
REQUESTS = 400
REQUESTS_CROWD = 40  # each takes a good part of a second there


def memory_free_mib():
    with open("/proc/meminfo") as f:
        words = dict(line.split(":") for line in f)
    return int(words["MemAvailable"].split()[0]) // 1024


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


class Rooms:
    """bench_rooms between two daemons."""

    def __init__(self, sockets):
        program = os.path.join(kvd_daemon.BUILD, "bench", "bench_rooms")
        self.proc = subprocess.Popen([program] + sockets, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.proc.stdin.write(line + "\n")
        self.proc.stdin.flush()
        return json.loads(self.proc.stdout.readline())

    def close(self):
        self.proc.stdin.close()
        return self.proc.wait()


def row(name, seconds, note=""):
    print("  %-22s %9.0f %9.0f %9.0f   %s" % (
        name, *(1e6 * quantile(seconds, q) for q in (0.5, 0.99, 1.0)), note), flush=True)


def beside(what, said, mib):
    other_s = mib * 1048576 / (said["big_gbps"] * 1e9)
    row(what, said["seconds"], "%.2f GB/s, %.0f us in all" %
        (said["big_gbps"], other_s * 1e6))
    return quantile(said["seconds"], 0.99) < other_s / 10


def measure(transport, mib, crowd):
    config = "[transport]\ntransports = %s\nrequire = %s\n" % (transport, transport)
    with kvd_daemon.Daemon(config, name="prefill") as one, \
            kvd_daemon.Daemon(config, name="decode") as two:
        rooms = Rooms([one.socket_path, two.socket_path])
        alone = rooms.ask("latency %d %d" % (REQUESTS, PAGES))
        said = rooms.ask("beside %d %d %d" % (REQUESTS, mib, PAGES))
        many = rooms.ask("crowd %d %d %d" % (REQUESTS_CROWD, crowd, PAGES))
        status = rooms.close()
    print("%s, a request of %d KiB, us %9s %9s %9s" % (
        transport, PAGES * 64, "p50", "p99", "worst"))
    row("alone", alone)
    fair = [beside("%d MiB in a room" % mib, said, mib),
            beside("%d other rooms" % crowd, many, crowd * PAGES / 16)]
    return status == 0 and all(fair)


def main():
    transports = sys.argv[1:2] or ["shm", "ucx", "tcp"]
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else min(10240, memory_free_mib() // 2)
    crowd = int(sys.argv[3]) if len(sys.argv) > 3 else 10000
    fair = [measure(t, mib, crowd) for t in transports]
    return 0 if all(fair) else 1


if __name__ == "__main__":
    sys.exit(main())
