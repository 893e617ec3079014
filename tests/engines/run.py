#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real engines on kvd's nixl, and on the real one beside it.

run.py [--only-kvd] [WORD ...]: the runs whose names hold a word (all), one after another,
because each takes most of a machine's memory. Results lie in results/, logs in logs/ of
the folder KVD_ENGINES (build/engines)."""
import argparse
import json
import os
import subprocess
import sys

from rig import FOLDER, HERE

RUNS = {
    "vllm": ["vllm_pd.py"],
    "vllm-hybrid": ["vllm_pd.py", "--kind", "hybrid"],
    "vllm-push": ["vllm_pd.py", "--connector", "NixlPushConnector"],
    "vllm-tp": ["vllm_pd.py", "--tp-d", "2"],
    "vllm-kill": ["vllm_pd.py", "--kill"],
    "sglang-manager": ["sglang_manager.py"],
    "sglang": ["sglang_pd.py"],
    "sglang-tp": ["sglang_pd.py", "--prefill-tp", "2"],
}


def run(name, nixl):
    """What it left in results/; a run that ends without is one failure."""
    full = "%s-%s" % (name, nixl)
    result = os.path.join(FOLDER, "results", full + ".json")
    if os.path.exists(result):
        os.unlink(result)
    print("---- " + full, flush=True)
    argv = [sys.executable, os.path.join(HERE, RUNS[name][0])] + RUNS[name][1:]
    subprocess.run(["nice", "-n", "5"] + argv + ["--nixl", nixl, "--name", full], check=False)
    try:
        with open(result) as f:
            return json.load(f)
    except FileNotFoundError:
        return {"passed": 0, "failed": 1, "notes": {}}


def told(result):
    moved = result["notes"].get("moved")
    out = "%d passed, %d failed" % (result["passed"], result["failed"])
    if moved:
        out += "; %d transfers, %.1f MB in %.1f ms" % (moved["xfers"], moved["bytes"] / 1e6,
                                                       moved["xfer_s"] * 1e3)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only-kvd", action="store_true")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    chosen = [n for n in RUNS if not args.words or any(w in n for w in args.words)]
    results = {}
    for engine in sorted({n.split("-")[0] for n in chosen}):
        subprocess.run([os.path.join(HERE, "setup.sh"), engine, FOLDER], check=True)
    for name in chosen:
        for nixl in ("kvd",) if args.only_kvd else ("kvd", "nixl"):
            results[name, nixl] = run(name, nixl)
    for (name, nixl), result in results.items():
        print("%-16s %-5s %s" % (name, nixl, told(result)))
    failed = sum(r["failed"] for (_, nixl), r in results.items() if nixl == "kvd")
    print("%d passed, %d failed" % (sum(r["passed"] for r in results.values()), failed))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
