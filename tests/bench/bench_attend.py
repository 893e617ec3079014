#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The attention kernels beside the limit of memory and, with torch, beside oneDNN.

bench_attend.py [--json FILE] [TOKENS]

Runs bench_attend (KVD_BUILD names the build folder), then, where torch can be imported,
the two matrix products that MLA attention contains (logits and outputs; without softmax,
pages or selection) in bf16 on one thread, which torch gives to oneDNN. Each figure is the
shortest of its repetitions, in the thread's own time: others may use the core.
Ratios are of the same run; "of peak" is the fastest kernel's share of what the core's
products reach without loads. This is a benchmark: it judges nothing.
"""
import argparse
import json
import os
import subprocess
import sys
import time

BUILD = os.environ.get("KVD_BUILD", "build/rel")
ROWS = (1, 16, 64, 256, 1024)
KERNELS = ("ref", "vector", "avx2", "avx512", "avx512_bf16", "amx", "cold")
DIMS = {"mla": 576 + 512, "gqa": 128 + 128}  # products of a row and a token
SPEND_S = 0.3


def kernels(tokens):
    """{shape: {(kernel, rows): us}}"""
    out = subprocess.run([f"{BUILD}/bench/bench_attend", str(tokens)], check=True,
                         stdout=subprocess.PIPE, text=True).stdout
    figures = {}
    for line in out.splitlines():
        shape, kernel, rows, best, _ = line.split()
        figures.setdefault(shape, {})[kernel, int(rows)] = float(best)
    return figures


def shortest(work):
    work()
    times = []
    while len(times) < 5 or sum(times) < SPEND_S and len(times) < 400:
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times) * 1e6


def pair(torch, tokens, rows):
    """Two products of MLA's shape."""
    kv = torch.randn(tokens, 576, dtype=torch.bfloat16)
    q = torch.randn(rows, 576, dtype=torch.bfloat16)
    p = torch.rand(rows, tokens, dtype=torch.bfloat16)
    keys, values = kv.t(), kv[:, :512]
    logits = torch.empty(rows, tokens, dtype=torch.bfloat16)
    out = torch.empty(rows, 512, dtype=torch.bfloat16)

    def work():
        torch.mm(q, keys, out=logits)
        torch.mm(p, values, out=out)
    return shortest(work)


def onednn(tokens):
    """{rows: us}, or why there is none."""
    try:
        import torch  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        return None, f"no oneDNN beside it: {error}"
    torch.set_num_threads(1)
    return {rows: pair(torch, tokens, rows) for rows in ROWS}, f"torch {torch.__version__}"


def table(shape, figures, pairs, tokens, peaks):
    floor = figures["memory", 0]
    print(f"\n{shape}: microseconds of one call; memory is read in {floor:.0f}")
    names = [k for k in KERNELS if any((k, r) in figures for r in range(ROWS[-1] + 1))]
    fast = [k for k in names if k in peaks][-1:]
    heads = ["rows"] + names + ["of peak"] * len(fast) + (["oneDNN pair", "ratio"] if pairs else [])
    print("".join(f"{h:>12}" for h in heads))
    for rows in sorted({r for k, r in figures if k in KERNELS}):
        cells = [figures.get((k, rows)) for k in names]
        line = [f"{rows:>12}"] + [f"{c:>12.0f}" if c else f"{'–':>12}" for c in cells]
        for kernel in fast:
            flops = 2 * rows * tokens * DIMS[shape]
            line.append(f"{flops / figures[kernel, rows] / 1e3 / peaks[kernel]:>12.2f}")
        if pairs:
            best = min(c for k, c in zip(names, cells) if c and k not in ("cold", "ref"))
            line += [f"{pairs[rows]:>12.0f}", f"{best / pairs[rows]:>12.2f}"]
        print("".join(line))
    print("longest slice: " + ", ".join(
        f"{k[6:]} {us:.0f} us" for (k, _), us in figures.items() if k.startswith("slice-")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", nargs="?", type=int, default=2048)
    parser.add_argument("--json", help="write the figures there")
    args = parser.parse_args()
    figures = kernels(args.tokens)
    pairs, words = onednn(args.tokens)
    print(f"{args.tokens} tokens, bf16, one core; {words}")
    peaks = {k[5:]: gflops for (k, _), gflops in figures.pop("core", {}).items()}
    print("peak of products: " + ", ".join(f"{k} {v:.0f} GFLOP/s" for k, v in peaks.items()))
    for shape, of_shape in figures.items():
        table(shape, of_shape, pairs if shape == "mla" else None, args.tokens, peaks)
    mla = figures["mla"]
    print("\nmerge of two partials: " + ", ".join(
        f"{us:.0f} us for {rows} rows" for (k, rows), us in mla.items() if k == "merge"))
    print(f"splice of a layer: {mla['splice', 0]:.0f} us")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"tokens": args.tokens, "onednn": pairs, "kernels": {
                shape: {f"{k} {r}": us for (k, r), us in of.items()}
                for shape, of in figures.items()}}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
