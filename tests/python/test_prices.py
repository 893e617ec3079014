# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.prices as it is run, and the table of docs/route.md: each number computed again."""
import json
import os
import re

import pytest

from conftest import ROOT
from kvd import prices

MODELS = {"DeepSeek-V2-Lite": "v2-lite", "DeepSeek-V3": "v3", "Llama 8B": "llama-8b",
          "Llama 70B": "llama-70b"}


@pytest.fixture
def told(capsys):
    def run(*args):
        assert prices.main(["--json", "--preset", "h100-ibgda", *args]) == 0
        return json.loads(capsys.readouterr().out)
    return run


def test_table_of_the_document_matches_the_model(told):
    with open(os.path.join(ROOT, "docs", "route.md"), encoding="utf-8") as f:
        table = re.search(r"<!-- even-steps -->\n(.*?)<!-- end -->", f.read(), re.S).group(1)
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in table.splitlines()]
    sizes = rows[0][1:]
    assert len(rows) == 8
    for title, *cells in rows[2:]:
        name, query, splice = re.fullmatch(
            r"([^,(]+?)(?: \([^)]*\))?, (\d+) tokens? a step, (spliced|in place)", title).groups()
        got = told("--model", MODELS[name], "--query", query, "--tokens", ",".join(sizes),
                   *["--shifted"] * (splice == "spliced"))
        even = [price["even_steps"] for price in got["prices"]]
        want = ["%.1f" % n if n < 9.95 else "%.0f" % n for n in even]
        assert cells == want, (title, cells, want)


def test_json_has_each_way(told):
    got = told("--tokens", "100,32k", "--steps", "2", "--recompute", "0.2", "--shifted",
               "--heads", "32", "--layers", "10")
    assert got["rows"] == 32 and got["steps"] == 2 and got["model"]["layers"] == 10
    small, large = got["prices"]
    assert small["tokens"] == 100 and large["tokens"] == 32768
    assert small["way"] == "local" and large["way"] == "route" and large["sure"] is True
    assert small["local_us"] < small["fetch_us"]  # a splice costs more than 100 tokens
    assert large["local_us"] > large["fetch_us"]
    assert abs(small["local_us"] - 0.2 * 100 * 10 - 2 * 10 * small["attend_us"]) < 1e-6


def test_price_without_a_number_is_null(told):
    got = told("--selected", "2048", "--holders", "4", "--tokens", "32k")
    price = got["prices"][0]
    assert price["local_us"] is None and price["even_steps"] is None
    assert price["once_us"] == 0 and got["holders"] == 4


def test_text_is_a_table(capsys):
    assert prices.main(["--preset", "a40-pcie4", "--model", "llama-8b", "--steps", "1000",
                        "--tokens", "2k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fabric   a40-pcie4", lines
    assert lines[-2].split()[0] == "TOKENS" and lines[-1].split()[-1] == "fetch", lines
    assert len(lines[-2].split()) == len(lines[-1].split()) == 9


@pytest.mark.parametrize("args, words", [
    (("--model", "v3"), "h100-nvlink4"),
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
     "at most the number of heads")])
def test_wrong_arguments_are_refused(capsys, args, words):
    with pytest.raises(SystemExit) as end:
        prices.main(args)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and words in err and not out
