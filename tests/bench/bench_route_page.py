# SPDX-License-Identifier: Apache-2.0
"""What bench_route.py has measured: goals with their floors, break-evens and crowds as a page of
docs/runs, and the break-evens as a plot."""
import datetime
import os
import platform
import statistics
import subprocess
import textwrap

import bench_page
import bench_svg
from bench_svg import Axis, Panel

ROWS_BYTES = 1152 + 2056  # of a row, there and back: q in bf16; o, m and l in fp32
TOKEN_BYTES = 1152


def about():
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True,
                            text=True, check=False).stdout.strip()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        cpu = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {"date": datetime.date.today().isoformat(), "commit": commit or "unknown",
            "cores": os.cpu_count(), "cpu": cpu[0] if cpu else platform.machine(),
            "kernel": platform.release().partition("-")[0]}


# ---- sweep ----

def median(cell, field):
    return statistics.median(p[field] for p in cell["passes"])


def grid(sweep):
    """{(rows, tokens): {"route", "fetch", prices}}: medians of the passes, us."""
    return {(c["rows"], c["tokens"]): {
        "route": median(c, "route"), "pull": median(c, "pull"), "home": median(c, "home"),
        "fetch": statistics.median(p["pull"] + p["home"] for p in c["passes"]),
        "price_route": median(c, "price_route"), "price_fetch": median(c, "price_fetch"),
        "passes": c["passes"]} for c in sweep["cells"]}


def break_even(cells, tokens):
    """Rows from which fetching is less, between the two sizes of which that is true at best; as
    (rows, ""), or (the least or the most, "<" or ">")."""
    sizes = sorted(m for m, c in cells if c == tokens)
    over = [cells[m, tokens]["route"] / cells[m, tokens]["fetch"] - 1 for m in sizes]
    wrong = [sum(max(d, 0) for d in over[:i]) + sum(max(-d, 0) for d in over[i:])
             for i in range(len(sizes) + 1)]
    at = wrong.index(min(wrong))
    if at == 0:
        return sizes[0], "<"
    if at == len(sizes):
        return sizes[-1], ">"
    low, high = over[at - 1], over[at]
    share = -low / (high - low) if low < 0 < high else 0.5
    return sizes[at - 1] * (sizes[at] / sizes[at - 1]) ** share, ""


def predicted(sweep, tokens):
    """(surely routed below, even at, surely fetched from): medians of the passes."""
    return [statistics.median(border) for border in zip(*sweep["borders"][str(tokens)])]


def right(cells):
    """(right, all) of the decisions that were sure."""
    sure = [(p["way"], "route" if c["route"] < c["fetch"] else "fetch")
            for c in cells.values() for p in c["passes"] if p["sure"]]
    return sum(a == b for a, b in sure), len(sure)


def price_errors(cells, way):
    return [abs(c["price_" + way] / c[way] - 1) for (m, _), c in cells.items() if m >= 64]


# ---- goals ----

def goal(what, way, measured, floor, unit, ratio, bound, at_most=True, words=None):
    met = ratio <= bound if at_most else ratio >= bound
    return {"what": what, "way": way, "measured": measured, "floor": floor, "unit": unit,
            "ratio": ratio, "goal": words or ("≤ %g" if at_most else "≥ %g") % bound, "met": met}


def echo_goals(figures):
    return [goal("echo of %s rows / bare ping-pong, %s" % (
                rows, "awake" if mode == "spinning" else "asleep"),
                 way, us, bare, "µs", us / bare, 3 if rows == "16" else 2)
            for mode in ("sleeping", "spinning") for rows in ("16", "128", "1024")
            for way, of in figures.items() for us, bare in [of[mode][rows]]]


def worst(cells, what, way, wanted):
    chosen = {k: c for k, c in cells.items() if wanted(*k)}
    key = max(chosen, key=lambda k: chosen[k]["route"] / chosen[k]["fetch"])
    cell = chosen[key]
    below = sum(c["route"] < c["fetch"] for c in chosen.values())
    one = goal("%s: the worst of %d, M = %d, C = %d" % (what, len(chosen), *key), way,
               cell["route"], cell["fetch"], "µs", cell["route"] / cell["fetch"], 1,
               words="< 1")
    one["note"] = "%d of %d" % (below, len(chosen))
    return one


def sweep_goals(figures):
    found, by = [], {way: grid(of) for way, of in figures.items()}
    for way, cells in by.items():
        found.append(worst(cells, "route / (pull + kernel at home), C = 512 … 8192, M ≤ C/8", way,
                           lambda m, c: 512 <= c <= 8192 and m <= c // 8))
    for way, cells in by.items():
        found.append(worst(cells, "the same, C = 256, M ≤ 16", way,
                           lambda m, c: c == 256 and m <= 16))
    for way, cells in by.items():
        errors = price_errors(cells, "route") + price_errors(cells, "fetch")
        error = statistics.median(errors)
        found.append(goal("price beside what it took, M ≥ 64: median error", way, 100 * error, None,
                          "%", error, 0.15, words="≤ 0.15"))
    for way, cells in by.items():
        good, count = right(cells)
        one = goal("sure decisions that were right, of %d" % count, way,
                          100 * good / max(1, count), None, "%", good / max(1, count), 0.95, at_most=False)
        found.append(one if count else {**one, "met": None})
    for way, of in figures.items():
        turns, slow = of["turns"]
        found.append(goal("turns of both loops > 200 µs of a core beside M = 1024, of %d" % turns,
                          way, slow, None, "", slow, 0, words="0"))
    return found


def fan_goals(figures):
    found = []
    for n, bound in (("8", 1.3), ("32", 2)):
        for way, of in figures.items():
            us, one = of[n]["crowd"]["each_us"] * int(n), of["1"]["crowd"]["each_us"]
            found.append(goal("fan-in: M = 1, each of %s served once / one" % n, way, us, one, "µs",
                              us / one, bound))
        for way, of in figures.items():
            us, one = of[n]["crowd"]["call_us"], of["1"]["crowd"]["call_us"]
            found.append({**goal("– of that the holder's kernel: a call of %s's rows / of one's" % n,
                                 way, us, one, "µs", us / one, bound), "goal": "", "met": None})
    for way, of in figures.items():
        us, alone = of["16"]["crowd"]["each_us"], of["16"]["alone"]["each_us"]
        found.append(goal("fan-in: N = 16, an attend / one behind the other: times as many", way, us,
                          alone, "µs", alone / us, 6, at_most=False))
    return found


def out_goals(figures):
    found = []
    for way, of in figures.items():
        found.append(goal("fan-out: 2048 tokens of 7 holders / of one", way, of["seven"],
                          of["one"], "µs", of["seven"] / of["one"], 1.5))
    for way, of in figures.items():
        found.append({**goal("– beside: pulling them from the 7", way, of["gather"], of["one"],
                             "µs", of["gather"] / of["one"], 1.5), "goal": "", "met": None})
    return found


def goals(figures):
    by = {"echo": echo_goals, "sweep": sweep_goals, "fan": fan_goals, "out": out_goals}
    return [one for part, of in by.items() if part in figures for one in of(figures[part])]


# ---- the section ----

def number(value):
    return "" if value is None else "%.0f" % value if value >= 100 else "%.3g" % value


def goals_table(figures):
    lines = ["| what | way | measured | floor | ratio | goal | met |",
             "|---|---|---|---|---|---|---|"]
    for one in goals(figures):
        unit = " " + one["unit"] if one["unit"] else ""
        lines.append("| %s | %s | %s | %s | %s | %s | %s |" % (
            one["what"], one["way"], number(one["measured"]) + unit,
            number(one["floor"]) + unit if one["floor"] is not None else "", number(one["ratio"])
            if one["unit"] != "" else "", one["goal"], "" if one["met"] is None else
            ("yes" if one["met"] else "**no**") + (", " + one["note"] if "note" in one else "")))
    judged = [one for one in goals(figures) if one["met"] is not None]
    return lines + ["", "%d of %d goals are met." % (sum(one["met"] for one in judged),
                                                     len(judged)), ""]


def even_table(figures):
    lines = ["| C | bytes alone | shm, measured | predicted (sure below … above) | tcp, measured | "
             "predicted (sure below … above) |", "|---|---|---|---|---|---|"]
    grids = {way: grid(of) for way, of in figures.items()}
    for tokens in sorted({c for cells in grids.values() for _, c in cells}):
        cells = []
        for way, of in figures.items():
            rows, sign = break_even(grids[way], tokens)
            low, even, high = predicted(of, tokens)
            cells += ["%s%.0f" % (sign, rows), "%.0f (%.0f … %.0f)" % (even, low, high)]
        lines.append("| %d | %.0f | %s |" % (tokens, tokens * TOKEN_BYTES / ROWS_BYTES,
                                            " | ".join(cells)))
    return lines + [""]


def crowd_table(figures):
    lines = ["| 16 rows each | rows/s | p50 ms | p99 ms | rows a call | holder, cores | "
             "engine's step ms | with a core of its own |", "|---|---|---|---|---|---|---|---|"]
    for name, of in figures.items():
        asks = name != "nobody"
        lines.append("| %s | %s | %s | %s | %s | %.2f | %.2f | %.2f |" % (
            name, "%.0f" % of["rows_a_s"] if asks else "",
            "%.2f" % (of["p50_us"] / 1e3) if asks else "",
            "%.2f" % (of["p99_us"] / 1e3) if asks else "",
            "%.0f" % of["rows_a_call"] if asks else "", of["holder_cores"], of["step_ms"],
            of["step_own_ms"]))
    return lines + [""]


def beside_table(figures):
    nobody = figures["nobody"]
    lines = ["| beside the engine | multiplying | times | copying | times | holder, cores |",
             "|---|---|---|---|---|---|"]
    for name, of in figures.items():
        cells = ["%.2f ms | %.2f" % (of[kind], of[kind] / nobody[kind])
                 for kind in ("multiply", "copy")]
        lines.append("| %s | %s | %.2f |" % (name, " | ".join(cells), of["cores"]))
    return lines + [""]


def words(text):
    return textwrap.fill(text, 116, break_on_hyphens=False, break_long_words=False)


def section(figures):
    where, loads = figures["about"], figures["loads"]
    lines = [words(
        "%s, kvd %s, %d cores (%s), Linux %s: one run of `make bench-route`, load %.1f to %.1f before "
        "its parts (other work of the machine in it). All daemons are of one host, and what those "
        "that ask take of its two cores is in each figure. M rows, C tokens of one layer of MLA "
        "(576 and 512 values, bf16)." % (
            where["date"], where["commit"], where["cores"], where["cpu"], where["kernel"],
            min(loads), max(loads))), ""]
    lines += goals_table(figures)
    if "sweep" in figures:
        lines += [words("Rows from which pulling one layer and attending at home once is less than "
                        "routing once: measured, and by kvd_decide() on the daemon's own page "
                        "([plot](../route-break-even.svg))."), ""] + even_table(figures["sweep"])
    if "crowd" in figures:
        of = figures["crowd"]["shm"]
        lines += [words(
            "32 daemons ask one holder with `attention_threads = 1` about 2048 tokens (shm), 16 rows "
            "each; beside it an engine of one thread on the same two cores: wherever there is one, "
            "and alone on one of them while all others share the second. *unbatched*: one attend "
            "behind the other. The flood is a daemon that asks for 512 rows four times at once. Of "
            "the answers to the 32, %.0f %% advised to replicate the chunks; when the median call "
            "began %.0f daemons had rows for them." % (100 * of["batched"]["replicate"],
                                           of["batched"]["together"])), ""] + crowd_table(of)
    if "beside" in figures:
        of = figures["beside"]
        lines += [words(
            "A step of an engine that has one of two cores, while the holder (`attention_threads = 1`), "
            "those that ask it and this program share the other: multiplying matrices of 147 KB, "
            "and copying 16 MiB. The flood without a window sends messages of 256 rows as fast as it "
            "can over the control line; %.0f of them were refused in a second. Of the cores' "
            "memory and last cache all have the same." % of["a flood without a window"]["refused"]),
            ""] + beside_table(of)
    return "\n".join(lines)


def write(figures, folder):
    where = figures["about"]
    return bench_page.page(folder, where["date"], where["commit"], "attends", "Attends",
                           section(figures))


# ---- the plot ----

def beside(figures):
    """Of the run, below a plot."""
    where = figures["about"]
    return "%s, kvd %s, %d cores (%s)." % (where["date"], where["commit"], where["cores"],
                                           where["cpu"])


def plot(figures, path):
    """Points: measured; triangles: beyond the sizes that were tried. Line and band: predicted, and
    where no decision is sure."""
    panels = []
    for i, (way, of) in enumerate(figures["sweep"].items()):
        panel = Panel(i, "%s: rows from which a fetch is less" % way,
                      Axis(256, 32768, [1 << power for power in range(8, 16)]),
                      Axis(1, 4096, [1 << power for power in range(0, 13, 2)]),
                      "" if i else "tokens of context")
        cells = grid(of)
        tokens = sorted({c for _, c in cells})
        told = [predicted(of, c) for c in tokens]
        panel.line("band", [(c, t[0]) for c, t in zip(tokens, told)] +
                   [(c, t[2]) for c, t in reversed(list(zip(tokens, told)))], closed=True)
        panel.line("bytes", [(c, c * TOKEN_BYTES / ROWS_BYTES) for c in tokens])
        panel.line("told", [(c, t[1]) for c, t in zip(tokens, told)])
        for c in tokens:
            panel.mark(c, *break_even(cells, c))
        panels.append(panel)
    bench_svg.write(path, panels, beside(figures) + " Points: measured (a triangle: beyond 1 … 1024). "
                    "Line: kvd_decide(); band: not sure. Dashes: bytes alone.")
