#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real engines on kvd's own backends (native), on kvd's nixl (kvd), and on the real one beside
them (nixl).

run.py [--only BACKEND] [WORD ...]: the runs whose names hold a word (all), one after another,
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
# what a backend of kvd's own is run with
NATIVE = {
    "vllm": ["vllm_pd.py"],
    "vllm-hybrid": ["vllm_pd.py", "--kind", "hybrid"],
    "vllm-tp": ["vllm_pd.py", "--tp-d", "2"],
    "vllm-kill": ["vllm_pd.py", "--kill"],
    "vllm-ends": ["vllm_ends.py"],
    "vllm-async": ["vllm_async.py"],
    "vllm-push": ["vllm_pd.py", "--push"],
    "vllm-push-kill": ["vllm_pd.py", "--push", "--kill"],
    "vllm-push-hybrid": ["vllm_pd.py", "--push", "--kind", "hybrid"],
    "vllm-push-layers": ["vllm_pd.py", "--push", "--layerwise", "--tp-d", "2"],
    "vllm-order": ["vllm_order.py"],
    "vllm-blocks": ["vllm_layouts.py", "blocks"],
    "vllm-hybrid-tp": ["vllm_layouts.py", "hybrid"],
    "vllm-swa": ["vllm_layouts.py", "swa"],
    "vllm-mla": ["vllm_layouts.py", "mla"],
    "vllm-store": ["vllm_store.py", "lives"],
    "vllm-store-ends": ["vllm_store.py", "ends"],
    "vllm-store-shapes": ["vllm_store.py", "shapes"],
    "vllm-store-pd": ["vllm_store.py", "pd"],
    "vllm-store-remote": ["vllm_store.py", "remote"],
    "vllm-store-async": ["vllm_store_async.py"],
    "vllm-multi-async": ["vllm_multi_async.py"],
    "vllm-route": ["vllm_route.py", "gqa"],
    "vllm-route-mla": ["vllm_route.py", "mla"],
    "vllm-route-many": ["vllm_route.py", "many"],
    "vllm-route-many-mla": ["vllm_route.py", "many-mla"],
    "vllm-route-scattered": ["vllm_route.py", "scattered"],
    "vllm-route-two": ["vllm_route.py", "two"],
    "vllm-route-ranks": ["vllm_route.py", "ranks"],
    "vllm-route-ranks-mla": ["vllm_route.py", "ranks-mla"],
    "cross-sglang-vllm-route": ["vllm_route.py", "cross"],
    "vllm-route-bf16": ["vllm_route.py", "bf16"],
    "vllm-route-controls": ["vllm_route.py", "controls"],
    "vllm-route-load": ["vllm_route.py", "load"],
    "vllm-route-auto": ["vllm_route.py", "auto"],
    "vllm-route-ends": ["vllm_route.py", "ends"],
    "vllm-tier": ["vllm_tier.py", "lives"],
    "vllm-tier-ranks": ["vllm_tier.py", "ranks"],
    "vllm-tier-windows": ["vllm_tier.py", "windows"],
    "dynamo": ["dynamo_index.py"],
    "vllm-events": ["vllm_events_forms.py"],
    "vllm-dynamo": ["vllm_events.py", "lives"],
    "vllm-dynamo-tier": ["vllm_events.py", "tier"],
    "cross-vllm-sglang": ["cross_pd.py", "--only", "vllm-sglang"],
    "cross-sglang-vllm": ["cross_pd.py", "--only", "sglang-vllm"],
    "sglang-manager": ["sglang_manager.py"],
    "sglang-ends": ["sglang_ends.py"],
    "sglang": ["sglang_pd.py"],
    "sglang-tp": ["sglang_pd.py", "--prefill-tp", "2"],
    "router-vllm": ["router_pd.py", "--engine", "vllm"],
    "router-sglang": ["router_pd.py", "--engine", "sglang"],
    "sglang-store": ["sglang_store.py", "lives"],
    "sglang-store-ranks": ["sglang_store.py", "ranks"],
    "sglang-store-ends": ["sglang_store.py", "ends"],
    "sglang-store-prices": ["sglang_store.py", "prices"],
}
BACKENDS = {"native": NATIVE, "kvd": RUNS, "nixl": RUNS}


def run(name, nixl):
    """What it left in results/; a run that ends without is one failure."""
    full = "%s-%s" % (name, nixl)
    result = os.path.join(FOLDER, "results", full + ".json")
    if os.path.exists(result):
        os.unlink(result)
    print("---- " + full, flush=True)
    script, *more = BACKENDS[nixl][name]
    argv = [sys.executable, os.path.join(HERE, script)] + more
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
    parser.add_argument("--only", choices=sorted(BACKENDS))
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    chosen = [(name, nixl) for name in dict.fromkeys([*NATIVE, *RUNS]) for nixl in BACKENDS
              if name in BACKENDS[nixl] and args.only in (None, nixl) and
              (not args.words or any(w in name for w in args.words))]
    results = {}
    for engine in sorted({e for name, _ in chosen for e in ("vllm", "sglang", "dynamo")
                          if e in name.split("-")}):
        subprocess.run([os.path.join(HERE, "setup.sh"), engine, FOLDER], check=True)
    for name, nixl in chosen:
        results[name, nixl] = run(name, nixl)
    for (name, nixl), result in results.items():
        print("%-16s %-6s %s" % (name, nixl, told(result)))
    failed = sum(r["failed"] for (_, nixl), r in results.items() if nixl != "nixl")
    print("%d passed, %d failed" % (sum(r["passed"] for r in results.values()), failed))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
