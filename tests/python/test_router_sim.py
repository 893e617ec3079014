# SPDX-License-Identifier: Apache-2.0
"""How good picks and scaling are: a share of tests/pick, all of which is `make bench-pick`."""
import os
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "tests", "pick"))
import pick_sim  # noqa: E402


@pytest.mark.parametrize("call, args", [
    ("beside", (0,)), ("beside", (7,)), ("beside", (17,)), ("herd", (1, 8)),
    ("liar", ("0 waits, for ever",)), ("death", (1, True)), ("day", (0.05, 2))])
def test_pick_compared_to_an_oracle_is_within_bounds(call, args):
    sim = pick_sim.Sim(seconds=64 if call == "herd" else 200)
    getattr(sim, call)(*args)
    assert not sim.failures and sim.passed
