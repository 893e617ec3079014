#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl cost as it is run, and the table of docs/route.md: each number computed again."""
import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, run  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
MODELS = {"DeepSeek-V2-Lite": "v2-lite", "DeepSeek-V3": "v3", "Llama 8B": "llama-8b",
          "Llama 70B": "llama-70b"}


def ctl(*args):
    return subprocess.run([BUILD + "/kvd-ctl", "cost", *args], capture_output=True, text=True,
                          timeout=DEADLINE_S)


def prices(*args):
    done = ctl("--json", "--preset", "h100-ibgda", *args)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def cost_table_of_the_document_matches_the_model():
    with open(os.path.join(ROOT, "docs", "route.md"), encoding="utf-8") as f:
        table = re.search(r"<!-- even-steps -->\n(.*?)<!-- end -->", f.read(), re.S).group(1)
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in table.splitlines()]
    sizes = rows[0][1:]
    assert len(rows) == 8
    for title, *cells in rows[2:]:
        name, query, splice = re.fullmatch(
            r"([^,(]+?)(?: \([^)]*\))?, (\d+) tokens? a step, (spliced|in place)", title).groups()
        told = prices("--model", MODELS[name], "--query", query, "--tokens", ",".join(sizes),
                      *["--shifted"] * (splice == "spliced"))
        even = [price["even_steps"] for price in told["prices"]]
        want = ["%.1f" % n if n < 9.95 else "%.0f" % n for n in even]
        assert cells == want, (title, cells, want)


def cost_json_has_each_way():
    told = prices("--tokens", "100,32k", "--steps", "2", "--recompute", "0.2", "--shifted",
                  "--heads", "32", "--layers", "10")
    assert told["rows"] == 32 and told["steps"] == 2 and told["model"]["layers"] == 10
    small, large = told["prices"]
    assert small["tokens"] == 100 and large["tokens"] == 32768
    assert small["way"] == "local" and large["way"] == "route" and large["sure"] is True
    assert small["local_us"] < small["fetch_us"]  # a splice costs more than 100 tokens
    assert large["local_us"] > large["fetch_us"]
    assert abs(small["local_us"] - 0.2 * 100 * 10 - 2 * 10 * small["attend_us"]) < 1e-6


def cost_without_a_number_is_null():
    told = prices("--selected", "2048", "--holders", "4", "--tokens", "32k")
    price = told["prices"][0]
    assert price["local_us"] is None and price["even_steps"] is None
    assert price["once_us"] == 0 and told["holders"] == 4


def cost_text_is_a_table():
    done = ctl("--preset", "a40-pcie4", "--model", "llama-8b", "--steps", "1000", "--tokens", "2k")
    assert done.returncode == 0 and not done.stderr, done
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fabric   A40"), lines
    assert lines[-2].split()[0] == "TOKENS" and lines[-1].split()[-1] == "fetch", lines


def cost_invalid_arguments_are_refused():
    for args, words in ((("--model", "v3"), "h100-nvlink4"),
                        (("--preset", "tin-cans"), "h100-nvlink4"),
                        (("--preset", "a40-pcie4", "--model", "x"), "llama-8b"),
                        (("--preset", "a40-pcie4", "--tokens", "2k,"), "--tokens"),
                        (("--preset", "a40-pcie4", "--tokens", "-1"), "--tokens"),
                        (("--preset", "a40-pcie4", "--tokens", "1q"), "--tokens"),
                        (("--preset", "a40-pcie4", "--recompute", "-1"), "--recompute"),
                        (("--preset", "a40-pcie4", "--recompute", "inf"), "--recompute"),
                        (("--preset", "a40-pcie4", "--holders", "9"), "--holders"),
                        (("--preset", "a40-pcie4", "--kv-heads", "8"), "one KV row for all"),
                        (("--preset", "a40-pcie4", "--model", "llama-8b", "--kv-heads", "64"),
                         "at most the number of heads")):
        done = ctl(*args)
        assert done.returncode == 2 and words in done.stderr and not done.stdout, (args, done)


if __name__ == "__main__":
    run([cost_table_of_the_document_matches_the_model,
         cost_json_has_each_way,
         cost_without_a_number_is_null,
         cost_text_is_a_table,
         cost_invalid_arguments_are_refused])
