#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench_scale.py PROGRAM N …: bench_cluster with so many daemons each, as one table; and
with which power of their number each figure of a daemon grows (least squares of logs)."""
import json
import math
import subprocess
import sys

FIGURES = ("messages", "cpu_us", "resident_kib", "seconds")


def run(program, daemons):
    lines = subprocess.run([program, str(daemons)], check=True, text=True,
                           stdout=subprocess.PIPE).stdout.splitlines()
    return [json.loads(line) for line in lines]


def exponent(points):
    """Of y = a * n^x; None where a figure is nothing."""
    points = [(math.log(n), math.log(y)) for n, y in points if y > 0]
    if len(points) < 2:
        return None
    mean_n = sum(n for n, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return (sum((n - mean_n) * (y - mean_y) for n, y in points)
            / sum((n - mean_n) ** 2 for n, _ in points))


def main():
    program, counts = sys.argv[1], [int(n) for n in sys.argv[2:]]
    runs = {n: {row["phase"]: row for row in run(program, n)} for n in counts}
    phases = list(next(iter(runs.values())))
    head = "| phase, of each daemon | figure | " + " | ".join(str(n) for n in counts)
    print(head + " | grows with |")
    print("|" + "---|" * (3 + len(counts)))
    for phase in phases:
        for figure in FIGURES:
            values = [runs[n][phase].get(figure) for n in counts]
            if None in values or not any(values):
                continue
            power = exponent(list(zip(counts, values)))
            print(f"| {phase} | {figure} | "
                  + " | ".join(f"{v:.4g}" for v in values)
                  + (f" | n^{power:.2f} |" if power is not None else " | |"))


if __name__ == "__main__":
    main()
