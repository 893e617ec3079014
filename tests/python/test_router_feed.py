# SPDX-License-Identifier: Apache-2.0
"""Answers of group.query in a picker: ranks put together, changes, and what is not an answer."""
import json
import random

import pytest

import kvd
from kvd.router import pick, pick_feed


class World(pick.Picker):
    def __init__(self):
        super().__init__(seed=3, results=False)
        self.clock = 100

    def take(self, ranks, *gone, **more):
        """Ranks by name or as they are; with `gone` these are the changes."""
        ranks = [{"worker": r} if isinstance(r, str) else r for r in ranks]
        if gone:
            more["gone"] = [g for g in gone if g]
        self.feed("prefill", {"ranks": ranks, **more}, now=self.clock)
        return self.count("prefill")

    def queue(self, worker):
        """None: its load is not trusted."""
        row, = (row for row in self.scores("prefill", prompt_tokens=1, now=self.clock)
                if row.worker == worker)
        return row.score.queue if row.score.fresh else None


def test_full_answer_replaces_cached_state():
    p = World()
    # the one without a name is the group's only one: "-"
    assert p.take(["a", {"worker": "b", "state": "draining"}, {"endpoint": "x"}],
                  revision=1) == (2, 3)
    assert p.take([{"worker": "b", "state": "serving"}]) == (1, 1)
    assert p.take([]) == (0, 0)


def test_change_leaves_the_others():
    p = World()
    assert p.take(["a", "b"]) == (2, 2)
    assert p.take(["c"], {"worker": "a"}, {"worker": "never"}) == (2, 2)
    assert p.take([{"worker": "b", "state": "draining"}], None) == (1, 2)
    assert p.take(["d"], None, whole=True) == (1, 1)


def test_answer_as_text_is_taken():
    p = World()
    p.feed("prefill", json.dumps({"ranks": [{"worker": "a"}, {"worker": "b"}]}))
    p.feed("prefill", b'{"ranks": [], "gone": [{"worker": "a"}]}')
    assert p.count("prefill") == (1, 1) and p.count("decode") == (0, 0)


def test_member_set_by_hand_is_kept_after_an_answer():
    p = World()
    p.set("prefill", "own")
    assert p.take(["a"]) == (2, 2)
    assert p.take([]) == (1, 1)


def test_worker_without_all_its_ranks_is_not_picked():
    p = World()
    two = [{"worker": "a", "tp_rank": i, "tp_size": 2} for i in range(2)]
    assert p.take(two[:1]) == (0, 1)
    assert p.take(two) == (1, 1)
    assert p.take([{**two[1], "state": "draining"}], None) == (0, 1)
    assert p.take(two) == (1, 1)
    assert p.take([], {"worker": "a", "tp_rank": 0}) == (0, 1)
    assert p.take([], {"worker": "a", "tp_rank": 1}) == (0, 0)


def rank(dp, tp, seq, waiting):
    return {"worker": "a", "dp_rank": dp, "dp_size": 2, "tp_rank": tp, "tp_size": 2,
            "load": {"v": 1, "seq": seq, "bytes": {"queued": 10 ** 9},
                     "engine": {"prompt_tokens_waiting": waiting, "prompt_tokens_s": 0}}}


def test_loads_of_ranks_are_put_together():
    """Of tensor ranks the one that was published last counts; data-parallel ones add up."""
    p = World()
    assert p.take([rank(0, 0, 1, 1000), rank(0, 1, 1, 1000), rank(1, 0, 1, 3000),
                   rank(1, 1, 1, 3000)]) == (1, 1)
    assert p.queue("a") == pytest.approx(0.4)  # of 10 000 a second
    assert p.prefill.members["a"].load.bytes_queued == 4e9
    p.clock += 1
    p.take([rank(0, 1, 2, 8000)], None)
    assert p.queue("a") == pytest.approx(1.1)
    p.clock += 1
    p.take([rank(0, 0, 2, 500)], None)
    assert p.queue("a") == pytest.approx(0.35)
    # the same number: the same load, which is drained since
    p.clock += 0.1
    p.take([rank(0, 0, 2, 9999)], None)
    assert p.queue("a") == pytest.approx(0.25)


def test_synced_answer_keeps_loads_fresh():
    """What the directory vouches for does not age; what it does not, does."""
    p = World()
    p.take([{"worker": "a", "load": {"seq": 1, "engine": {"prompt_tokens_waiting": 0}}}])
    p.clock += 60
    assert p.queue("a") is None
    p.take([], None, synced=False)
    assert p.queue("a") is None
    p.take([], None, synced=True)
    assert p.queue("a") == 0


@pytest.mark.parametrize("bad", [
    "", "{", "[]", "null", "[" * 100000, b"\xff", {"ranks": {}}, {"gone": []},
    {"ranks": [], "gone": {}}, {"ranks": [1]}, {"ranks": [{"worker": 7}]},
    {"ranks": [{"worker": "c"}, {"worker": "d", "tp_rank": -1}]},
    {"ranks": [{"worker": "d", "tp_size": 1e99}]}, {"ranks": [{"worker": "d", "pp_rank": "0"}]},
    {"ranks": [{"worker": "d", "dp_rank": True}]}, {"ranks": [{"worker": "d" * 64}]},
    {"ranks": [{"worker": "d", "cp_rank": float("nan")}]}], ids=lambda bad: repr(bad)[:20])
def test_answer_of_another_form_changes_nothing(bad):
    p = World()
    p.take(["a"])
    with pytest.raises(kvd.Error, match="EPROTO: not an answer of group.query"):
        p.feed("prefill", bad, now=p.clock)
    assert p.count("prefill") == (1, 1)


def test_wrong_figures_are_not_known():
    p = World()
    assert p.take([
        {"worker": "a", "load": {"seq": "x", "gbps": -1, "bytes": 7, "rooms": {"waiting": 1e308},
                                 "engine": [{}], "failed": {}}},
        {"worker": "b", "load": []},
        {"worker": "c", "load": {"seq": float("inf"), "engine": {
            "prompt_tokens_waiting": 10 ** 400, "prompt_tokens_s": None,
            "running": True}}}]) == (3, 3)
    assert all(row.score.queue < 1
               for row in p.scores("prefill", prompt_tokens=100, now=p.clock))


def test_ranks_of_a_worker_have_a_limit(monkeypatch):
    monkeypatch.setattr(pick_feed, "RANKS_MAX", 10)
    p = World()
    with pytest.raises(kvd.LimitError, match="more than 10 ranks"):
        p.take([{"worker": "a", "dp_rank": 11 - i, "dp_size": 11} for i in range(11)] + ["b"])
    assert p.count("prefill") == (1, 2)  # what there is room for is taken


def test_mangled_answers_are_harmless():
    """Characters that are changed at random."""
    p, rnd = World(), random.Random(5)
    good = json.dumps({"revision": 9, "ranks": [rank(0, 0, 1, 1000), rank(1, 1, 7, 1e3)],
                       "gone": [{"worker": "b", "tp_rank": 0}], "whole": False, "synced": True})
    for _ in range(4000):
        text = list(good)
        for _ in range(3):
            text[rnd.randrange(len(text))] = chr(rnd.randrange(32, 127))
        p.clock += 0.01
        for call in (lambda: p.feed("prefill", "".join(text), now=p.clock),
                     lambda: p.pick(prompt_tokens=5, only="prefill", now=p.clock)):
            try:
                call()
            except (kvd.InvalidError, kvd.NotFoundError):
                pass
