#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Figures of "Move the Query, Not the Cache" in shape, from measurements of this machine.

route_figures.py ROUTE ENGINE FOLDER: the JSON of bench_route.py and of route_bench.py (a missing file:
its panels are left out)

    route-bytes.svg   bytes of a decoded token beside the chunks (its figure 1a); first tokens by the
                      three primitives over the prefix (1b)
    route-map.svg     crossover of route and fetch: rows and tokens; tokens of an answer in vLLM (3)
    route-fan.svg     several holders (4a), several requesters (4b)
    route-load.svg    small messages pay for the probe, large ones for the bandwidth (7); a holder's
                      answers with the number of requesters (8)

Prints the paths of those that could be made."""
import json
import math
import os
import sys

import bench_svg
from bench_route_page import (ROWS_BYTES, TOKEN_BYTES, beside, break_even, grid, predicted)
from bench_svg import COLORS, FETCH, ROUTE, Axis, Panel, edge

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engines"))
import route_bench_page as engine_page  # noqa: E402

MODES = {"sleeping": "asleep", "spinning": "awake"}
FLOOR = "beside: "


def curves(index, title, some, below):
    """A panel with {name: [(x, y)]}. One that starts with FLOOR is dashed, in the colour of the one
    before."""
    xs, ys = zip(*(point for points in some.values() for point in points))
    panel, colors = Panel(index, title, Axis.doubled(xs),
                          Axis.of([*ys, 2 * max(ys)]), below), iter(COLORS)
    for name, points in some.items():
        floor = name.startswith(FLOOR)
        color = color if floor else next(colors)
        panel.curve(name, points, color, floor)
    return panel


def cells(index, title, ratios, below):
    """A panel with {(x, y): time of a route / of a fetch}, one colour for each of them."""
    xs, ys = (sorted({key[i] for key in ratios}) for i in (0, 1))
    panel = Panel(index, title, *(Axis(edge(some, 0), edge(some, len(some)), some)
                                  for some in (xs, ys)), below)
    for (x, y), ratio in ratios.items():
        panel.cell(xs, ys, xs.index(x), ys.index(y), ROUTE if ratio < 1 else FETCH,
                   0.15 + 0.65 * min(1, abs(math.log2(ratio)) / 3))
    return panel


# ---- 1 ----

def bytes_panels(_, engine):
    rows = [row for row in engine_page.rows_of(engine) if row.question == engine_page.QUESTIONS[0]]
    if not rows:
        return []
    tokens = rows[0].question + engine_page.MARKS[-1] - 1  # that are routed in a request
    wire = {row.tokens: row.row["wire"] for row in rows}
    return [
        curves(0, "bytes between daemons: a token's rows, and the chunks", {
            "route, a token, all layers": [(c, of["route"]["route"] / tokens)
                                           for c, of in wire.items()],
            "fetch": [(c, of["fetch"]["fetch"]) for c, of in wire.items()]},
               "tokens of the prefix"),
        curves(1, "ms to the first token", {
            way: [(row.tokens, row.first(way)) for row in rows]
            for way in ("route", "fetch", "local")}, "tokens of the prefix")]


# ---- 3 ----

def map_panels(route, engine):
    panels = []
    for way, of in route.get("sweep", {}).items():
        by = grid(of)
        panel = cells(len(panels), "%s, one step: route (blue) or fetch (red) is less" % way, {
            (c, m): cell["route"] / cell["fetch"] for (m, c), cell in by.items()},
            "" if panels else
                      "tokens of context; rows. Points: equal as measured; line: by kvd_decide()")
        tokens = sorted({c for _, c in by})
        panel.line("told", [(c, predicted(of, c)[1]) for c in tokens])
        panel.line("bytes", [(c, c * TOKEN_BYTES / ROWS_BYTES) for c in tokens])
        for c in tokens:
            panel.mark(c, *break_even(by, c))
        panels.append(panel)
    rows = [row for row in engine_page.rows_of(engine) if row.question == engine_page.QUESTIONS[0]]
    if len(rows) > 1:
        panel = cells(len(panels), "vLLM: tokens of an answer", {
            (row.tokens, mark): row.ms("route", mark) / row.ms("fetch", mark)
            for row in rows for mark in engine_page.MARKS}, "tokens of the prefix; of the answer")
        told = [(row.tokens, row.even()[1]) for row in rows]
        panel.line("told", [(c, n) for c, n in told if n])
        for row in rows:
            if row.even()[0]:
                panel.mark(row.tokens, row.even()[0])
        panels.append(panel)
    return panels


# ---- 4 ----

def fan_panels(route, engine):
    panels, holders = [], engine.get("holders", ())
    if holders:
        answer = engine["answer"]
        one = [engine_page.times_of(holders[0], way, answer)[i]
               for way, i in (("route", 1), ("fetch", 0))]
        panels.append(curves(0, "vLLM, holders of a prefix: times one", {
            "route, a later token": [(at["holders"], engine_page.times_of(
                at, "route", answer)[1] / one[0]) for at in holders],
            "fetch, first token": [(at["holders"], engine_page.times_of(
                at, "fetch", answer)[0] / one[1]) for at in holders]}, "holders"))
    if "fan" in route:
        panels.append(curves(len(panels), "one holder: µs until each requester has been answered", {
            name: [(int(n), one[kind]["each_us"] * int(n)) for n, one in of.items()]
            for way, of in route["fan"].items()
            for name, kind in ((way, "crowd"), (FLOOR + way + ", one after the other", "alone"))},
            "requesters"))
    if engine.get("clients"):
        by = {"%s, %s" % (way, words): [
            (at["clients"], engine_page.client_ms(at, way, engine["answer"])[1])
            for at in engine["clients"] if at["documents"] == (at["clients"] if each else 1)]
            for way in ("route", "here")
            for words, each in (("one document", False), ("one each", True))}
        panels.append(curves(len(panels), "vLLM, clients: ms of a later token", by, "clients"))
    return panels


# ---- 7, 8 ----

def load_panels(route, _):
    panels = []
    for mode, words in MODES.items():
        if "echo" in route:
            panels.append(curves(len(panels), "%s: µs of rows to and fro, nothing computed" % words, {
                name: [(int(rows) * TOKEN_BYTES, us[i]) for rows, us in of[mode].items()]
                for way, of in route["echo"].items()
                for i, name in enumerate((way, FLOOR + "bare socket, " + way))}, "bytes"))
    if "fan" in route:
        panels.append(curves(len(panels), "requests a second that one holder answers", {
            way: [(int(n), 1e6 / one["crowd"]["each_us"]) for n, one in of.items()]
            for way, of in route["fan"].items()}, "requesters"))
        panels.append(curves(len(panels), "µs of a request, median", {
            way: [(int(n), one["crowd"]["p50_us"]) for n, one in of.items()]
            for way, of in route["fan"].items()}, "requesters"))
    return panels


FIGURES = {"route-bytes": bytes_panels, "route-map": map_panels, "route-fan": fan_panels,
           "route-load": load_panels}


def figures(route, engine, folder):
    """Paths of those that could be made. {}: it was not measured."""
    below = " ".join(dict.fromkeys(beside(one) for one in (route, engine) if one))
    made = []
    for name, panels_of in FIGURES.items():
        panels = panels_of(route, engine)
        if panels:
            os.makedirs(folder, exist_ok=True)
            made.append(os.path.join(folder, name + ".svg"))
            bench_svg.write(made[-1], panels, below)
    return made


def read(path):
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    made = figures(read(sys.argv[1]), read(sys.argv[2]), sys.argv[3])
    print("\n".join(made) or "nothing was measured")
    sys.exit(not made)


if __name__ == "__main__":
    main()
