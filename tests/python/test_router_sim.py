# SPDX-License-Identifier: Apache-2.0
"""How good picks and scaling are: a share of tests/pick, all of which is `make bench-pick` and
`make bench-prefix`."""
import os
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "tests", "pick"))
import pick_sim  # noqa: E402
import prefix_play  # noqa: E402
import prefix_sim  # noqa: E402


@pytest.mark.parametrize("call, args", [
    ("beside", (0,)), ("beside", (7,)), ("beside", (17,)), ("herd", (1, 8)),
    ("liar", ("0 waits, for ever",)), ("death", (1, True)), ("day", (0.05, 2))])
def test_pick_compared_to_an_oracle_is_within_bounds(call, args):
    sim = pick_sim.Sim(seconds=64 if call == "herd" else 200)
    getattr(sim, call)(*args)
    assert not sim.failures and sim.passed


@pytest.mark.parametrize("seed, case", [(1, prefix_play.Case()), (2, prefix_play.Case(loads=True)),
                                        (3, prefix_play.Case(cache=2_000_000))])
def test_prefix_beside_least_loaded_is_sooner(seed, case):
    got, p50, p99 = prefix_sim.compared(prefix_play.synthetic(seed), case)
    assert p50 <= prefix_sim.P50 and p99 <= prefix_sim.P99, got
    assert got["prefix"].hits > 1.5 * got["least-loaded"].hits
    assert got["least-loaded"].p50 < got["round-robin"].p50


def test_session_kept_beside_least_loaded_is_sooner():
    trace = prefix_play.synthetic(1)
    least, kept = (prefix_play.play(prefix_play.Case(affinity=affinity), "least-loaded", trace)
                   for affinity in (False, True))
    assert kept.p50 <= 0.9 * least.p50 and kept.p99 <= least.p99


def test_trace_of_a_file_is_played(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(
        '{"timestamp": %d, "input_length": 1300, "output_length": 5, "hash_ids": [%d, %d, %d]}\n' %
        (1000 * i, i % 4, 100 + i % 4, 200 + i) for i in range(50)))
    trace = prefix_play.read(path)
    assert trace[1] == prefix_play.Prompt(1.0, 1300, 5, (1, 101))
    got = prefix_play.play(prefix_play.Case(), "prefix", trace)
    assert got.p50 == pytest.approx((1300 - 1024) / 8000) and got.hits > 0.7
