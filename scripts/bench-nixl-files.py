#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvd's nixl beside the real one: bytes between an agent's memory and a file.

bench-nixl-files.py [--reps N] [--peers VENV] [--folder DIR] [--out FILE]

Both modules have a file of their own in DIR and take turns. NIXL's plugin runs with each of
its queues that it has (Linux AIO, io_uring). A ratio above 1 says that kvd is faster.
make bench-nixl-files."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for part in ("bench", "bench/python", "lib"):
    sys.path.insert(0, os.path.join(ROOT, "tests", part))

from bench_parts import Gone, Obeyer  # noqa: E402
from bench_report import median  # noqa: E402
from kvd_daemon import Daemon  # noqa: E402
from nixl_files import ROWS  # noqa: E402

WORKER = os.path.join(ROOT, "tests", "bench", "python", "nixl_files.py")


def queues(peers):
    """NIXL's, by name: the program and its environment."""
    if not peers:
        return {}
    python = os.path.join(peers, "bin", "python")
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                          capture_output=True, text=True, check=True).stdout.strip()
    libs = ":".join(os.path.join(site, "nvidia", part, "lib")
                    for part in ("cufile", "cuda_runtime"))
    env = dict(os.environ, LD_LIBRARY_PATH=libs, NIXL_LOG_LEVEL="ERROR")
    return {word: ([python, WORKER, "nixl_cu12"], env, "use_%s=true" % word)
            for word in ("aio", "uring")}


def name_of(row):
    op, size, count, direct = row
    return "%s %d x %s%s" % (op.lower(), count, "4 KiB" if size == 4096 else "1 MiB",
                             ", O_DIRECT" if direct else "")


def measured(workers, reps):
    """Medians of each worker, by row; they take turns."""
    figures = {name: [] for name in workers}
    for which in range(len(ROWS)):
        took = {name: [] for name in workers}
        for turn in range(reps):
            for name, worker in workers.items():
                took[name] += worker.ask("row %d %d" % (which, 1 if turn else 2))[
                    "seconds"][0 if turn else 1:]
        for name in workers:
            figures[name].append(median(took[name]))
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--peers")
    parser.add_argument("--folder", default="/var/tmp")
    parser.add_argument("--out")
    args = parser.parse_args()
    env = dict(os.environ, NIXL_LOG_LEVEL="ERROR")
    workers = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, Daemon() as daemon:
        programs = {"kvd": ([sys.executable, WORKER, "nixl"],
                            dict(env, KVD_SOCKET=daemon.socket_path), None)}
        programs.update(queues(args.peers))
        try:
            for name, (argv, its, param) in programs.items():
                argv = argv + [os.path.join(folder, name)] + ([param] if param else [])
                worker = Obeyer(argv, its)
                try:
                    worker.hello()
                    workers[name] = worker
                except Gone as why:
                    print("%s: not here: %s" % (name, str(why).strip()[-200:]))
            figures = measured(workers, args.reps)
        finally:
            for worker in workers.values():
                worker.close()
    print("%-32s" % "" + "".join("%16s" % name for name in figures))
    for i, row in enumerate(ROWS):
        nbytes = row[1] * row[2]
        cells = ["%.2f GB/s" % (nbytes / figures[name][i] / 1e9) for name in figures]
        ratio = min([figures[n][i] for n in figures if n != "kvd"], default=0) / \
            figures["kvd"][i]
        print("%-32s" % name_of(row) + "".join("%16s" % cell for cell in cells) +
              ("   %.2fx of the better" % ratio if ratio else ""))
    if args.out:
        with open(args.out, "w") as out:
            json.dump({"rows": [name_of(row) for row in ROWS], "seconds": figures}, out)


if __name__ == "__main__":
    main()
