#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Goals, tables and figures of routing, from measurements that are made up."""
import copy
import os
import re
import sys
import tempfile
import xml.dom.minidom

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path[:0] = [os.path.join(ROOT, "tests", folder) for folder in ("lib", "bench", "engines")]
import route_bench_page as page  # noqa: E402
import route_figures  # noqa: E402
from kvd_daemon import run  # noqa: E402

ABOUT = {"date": "2026-11-30", "commit": "abc", "cores": 2, "cpu": "a CPU", "kernel": "6"}
STEP_MS = {"stock": 3.0, "here": 3.3, "local": 3.3, "fetch": 3.3, "route": 4.4, "auto": 3.4}
FIRST_MS = {"stock": 300, "here": 8, "local": 320, "fetch": 40, "route": 13, "auto": 13}


def row(tokens, question):
    """The floor of a step is 1 ms, of a first token 4 ms, a hold takes 1 ms."""
    return {"tokens": tokens, "question": question, "times": {
        way: [[(FIRST_MS[way] + STEP_MS[way] * (mark - 1)) / 1e3 for mark in page.MARKS]] * 3
        for way in STEP_MS}, "cpu": {way: [0.01, 0.02, 0.9] for way in STEP_MS if way != "stock"},
        "wire": {way: {"route": 256e3 if way == "route" else 0,
                       "fetch": 4096 * tokens if way == "fetch" else 0}
                 for way in STEP_MS if way != "stock"},
        "floors": {"1": [[250, 200, 100 + tokens / 50]] * 3,
                   str(question): [[1000, 900, 500]] * 3},
        "hold_us": [1000] * 3,
        "prices": [{"fetch_us": 33e3, "first_us": 5e3, "later_us": 1e3, "sure": True}] * 3}


ENGINE = {
    "about": ABOUT, "loads": [1.0, 2.0], "reps": 3, "layers": 4, "heads": 8, "chunk": 256, "answer": 64,
    "transport": "shm", "rows": [row(tokens, question) for tokens in (512, 2048)
                                 for question in page.QUESTIONS],
    "holders": [{"holders": n, "times": {"route": [[0.012, 0.012 + 63 * 0.0044 * (1 + n / 50)]],
                                         "fetch": [[0.03 + n / 100, 0.3]]}} for n in (1, 7)],
    "clients": [{"clients": n, "documents": documents, "ways": {
        way: [[[0.01, 0.01 + 63 * 0.004 * documents]] * n] for way in ("here", "fetch", "route")}}
        for n, documents in ((1, 1), (8, 1), (8, 8))],
    "pool": {"ways": {"fetch": [[3, 2.0]], "route": [[16, 0.7]]}, "clients": 16, "blocks": 66,
             "tokens": 512, "own": 3, "whole": 19}}
FAN = {"shm": {str(n): {"crowd": {"each_us": 100, "p50_us": 100 * n},
                        "alone": {"each_us": 300, "p50_us": 300}} for n in (1, 8, 32)}}
ROUTE = {
    "about": ABOUT, "fan": FAN,
    "echo": {"shm": {mode: {"16": [17, 6], "1024": [900, 300]} for mode in ("sleeping", "spinning")}},
    "sweep": {"shm": {"cells": [{"rows": m, "tokens": c, "passes": [{
        "route": 100 + m, "pull": 50 + c / 8, "home": 10, "price_route": 100, "price_fetch": 100}]}
        for m in (1, 16, 256) for c in (256, 2048)],
        "borders": {"256": [[4, 8, 16]], "2048": [[100, 200, 400]]}}}}


def goals(figures):
    return {"%s, %s" % (one["work"], one["op"]): one for one in page.goals(figures)}


def met(figures, name):
    (goal,) = goals(figures)[name]["goals"]
    return goal["met"]


def changed(change):
    figures = copy.deepcopy(ENGINE)
    change(figures)
    return figures


def all_goals_of_a_fast_machine_are_met():
    missed = [name for name, one in goals(ENGINE).items()
              for goal in one["goals"] if not goal["met"]]
    assert not missed, missed
    assert len(goals(ENGINE)) > 15


def step_slower_than_floor_is_missed():
    name = "a later token, route - here / floor, 2048 tokens"
    assert met(ENGINE, name) and goals(ENGINE)[name]["value"] == 1.1
    slow = changed(lambda of: of["rows"][2].update(floors=dict(of["rows"][2]["floors"],
                                                               **{"1": [[200, 150, 80]] * 3})))
    assert goals(slow)[name]["value"] == 1.375 and not met(slow, name)


def break_even_is_measured_beside_predicted():
    name = "tokens from which fetching is less, error, 2048 tokens"
    (one,) = [row for row in page.rows_of(ENGINE) if (row.tokens, row.question) == (2048, 16)]
    measured, told, sure = one.even()
    assert abs(measured - (1 + 27 / 1.1)) < 1e-6 and abs(told - 29) < 1e-6 and sure
    assert met(ENGINE, name)

    def cheap(of):
        of["rows"][2]["prices"] = [{"fetch_us": 11e3, "first_us": 5e3, "later_us": 1e3, "sure": True}]
    assert not met(changed(cheap), name)

    def unsure(of):
        cheap(of)
        of["rows"][2]["prices"][0]["sure"] = False
    assert not goals(changed(unsure))[name]["goals"]


def slow_way_of_auto_is_missed():
    def slow(of):
        for times in of["rows"][0]["times"]["auto"]:
            times[:] = [10 * one for one in times]
    assert met(ENGINE, "auto / the best way, largest")
    assert not met(changed(slow), "auto / the best way, largest")


def pool_that_runs_few_is_missed():
    name = "requests at the same time that own tokens allow / measured, 66 free blocks"
    assert met(ENGINE, name)
    assert not met(changed(lambda of: of["pool"]["ways"].update(route=[[8, 1.0]])), name)


def page_has_each_table():
    with tempfile.TemporaryDirectory() as folder:
        path = page.write(ENGINE, folder)
        with open(path, encoding="utf-8") as file:
            text = file.read()
    assert path == folder + "/2026-11-30-abc-vllm-route.md", path
    for line in ("| 2048 | 16 | 256 | 1065.0 | 849.5 | 1161.5 | 881.5 | 1135.0 | 880.0 |",
                 "| 7 | 12.00 | 5.02 | 100.00 |", "| route | 16 | 0.70 |"):
        assert line in text, text
    assert "goals are met" in text and "NOT met" in page.text(changed(
        lambda of: of["pool"]["ways"].update(route=[[8, 1.0]]))).replace("NOT MET", "NOT met")


def figures_are_made_of_what_was_measured():
    with tempfile.TemporaryDirectory() as folder:
        made = route_figures.figures(ROUTE, ENGINE, folder)
        assert [os.path.basename(path)[:-4] for path in made] == list(route_figures.FIGURES), made
        for path in made:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            xml.dom.minidom.parseString(text)
            assert "nan" not in text and ABOUT["commit"] in text, text
        assert not route_figures.figures({}, {}, folder + "/none")
        engine = {k: v for k, v in ENGINE.items() if k in ("about", "answer", "clients", "layers")}
        alone = route_figures.figures({}, engine, folder)
        assert [os.path.basename(path) for path in alone] == ["route-fan.svg"], alone


def cheaper_way_colours_its_cell():
    panel, *_ = route_figures.map_panels(ROUTE, {})
    colors = [re.search('fill="([^"]*)"', part)[1] for part in panel.parts if "opacity" in part]
    ways = [cell["route"] < cell["fetch"]
            for cell in route_figures.grid(ROUTE["sweep"]["shm"]).values()]
    assert colors == [route_figures.ROUTE if way else route_figures.FETCH for way in ways], colors
    assert set(ways) == {True, False}


if __name__ == "__main__":
    run([all_goals_of_a_fast_machine_are_met, step_slower_than_floor_is_missed,
         break_even_is_measured_beside_predicted, slow_way_of_auto_is_missed,
         pool_that_runs_few_is_missed, page_has_each_table, figures_are_made_of_what_was_measured,
         cheaper_way_colours_its_cell])
