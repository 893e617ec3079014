# SPDX-License-Identifier: Apache-2.0
"""What route_bench.py has measured: goals with their floors, and tables, as a page of docs/runs."""
import os
import statistics
import sys
import textwrap

from rig import ROOT

sys.path.insert(0, os.path.join(ROOT, "tests", "bench"))
import bench_page  # noqa: E402
from bench_report import figure, figure_line  # noqa: E402
from bench_route_page import about  # noqa: E402, F401

MARKS = (1, 4, 16, 64, 256)  # tokens of an answer
QUESTIONS = (16, 256)
LONG = 2048  # tokens of a prefix from which routing is to be faster than fetching
median = statistics.median


class Row:
    """Of `rows`: a prefix and a question. Times are ms."""

    def __init__(self, row, layers):
        self.tokens, self.question, self.layers = row["tokens"], row["question"], layers
        self.times, self.row = row["times"], row

    def ms(self, way, mark):
        at = MARKS.index(mark)
        return 1e3 * median(times[at] for times in self.times[way])

    def first(self, way):
        return self.ms(way, MARKS[0])

    def step(self, way):
        """Of a later token."""
        return 1e3 * median((times[-1] - times[0]) / (MARKS[-1] - MARKS[0])
                            for times in self.times[way])

    def floor(self, tokens):
        """Requests for attention with the rows of so many tokens, one for each layer, with an engine's
        work between them."""
        return self._floors(tokens, 0)

    def together(self, tokens):
        """The same, one right after another."""
        return self._floors(tokens, 1)

    def kernel(self, tokens):
        return self._floors(tokens, 2)

    def _floors(self, tokens, which):
        return self.layers * median(one[which] for one in self.row["floors"][str(tokens)]) / 1e3

    def hold(self):
        return median(self.row["hold_us"]) / 1e3

    def even(self):
        """(tokens of an answer from which fetching is less, as measured; as the prices say;
        whether these are sure). None: never."""
        def meet(at, more):
            return None if more <= 0 else max(1.0, 1 + at / more)
        price = {word: median(one[word] for one in self.row["prices"])
                 for word in ("fetch_us", "first_us", "later_us")}
        return (meet(self.first("fetch") - self.first("route"), self.step("route") -
                     self.step("fetch")),
                meet(price["fetch_us"] - price["first_us"], price["later_us"]),
                all(one["sure"] for one in self.row["prices"]))


def rows_of(figures):
    return [Row(row, figures["layers"]) for row in figures.get("rows", ())]


# ---- goals ----

def goals(figures):
    """Records of bench_report."""
    found, way = [], figures["transport"]

    def add(work, what, value, at_most=None, unit="times", note=""):
        found.append(figure(work, way, what, value, unit, at_most, note=note))
    rows = rows_of(figures)
    short = [row for row in rows if row.question == QUESTIONS[0]]
    for row in short:
        more, floor = row.step("route") - row.step("here"), row.floor(1)
        add("a later token, route - here / floor", "%d tokens" % row.tokens, more / floor, 1.25,
            note="%.2f ms, floor %.2f ms" % (more, floor))
    for row in short:
        more = row.first("route") - row.first("here")
        floor = row.floor(row.question) + row.hold()
        add("first token, route - here / floor", "%d tokens" % row.tokens, more / floor, 1.4,
            note="%.2f ms, floor %.2f ms, of which a hold %.2f ms" % (more, floor, row.hold()))
    for row in short:
        if row.tokens >= LONG:
            add("first token, route / fetch", "%d tokens" % row.tokens,
                row.first("route") / row.first("fetch"), 0.7, note="%.1f ms, fetch %.1f ms" % (
                    row.first("route"), row.first("fetch")))
    if len(short) > 1:
        least, most = short[0], short[-1]
        kernel = most.kernel(1) / least.kernel(1)
        ratio = most.step("route") / least.step("route")
        add("a later token, routed, %d / %d tokens" % (most.tokens, least.tokens),
            "beside the kernel's ratio", ratio / kernel, 1.15, note="%.2f, the kernel %.2f" % (
                ratio, kernel))
    found += holders_goals(figures, way)
    for row in short:
        measured, told, sure = row.even()
        note = "measured %s, predicted %s%s" % (*("never" if one is None else "%.0f" % one
                                                  for one in (measured, told)),
                                                "" if sure else ", not sure")
        if measured and told:
            add("tokens from which fetching is less, error", "%d tokens" % row.tokens,
                max(measured / told, told / measured), 1.5 if sure else None, note=note)
    if rows:
        ratios = [row.ms("auto", mark) / min(row.ms(other, mark)
                                             for other in ("route", "fetch", "local"))
                  for row in rows for mark in MARKS]
        add("auto / the best way", "largest", max(ratios), 2.0, note="of %d" % len(ratios))
        add("auto / the best way", "median", median(ratios), 1.3)
    found += clients_goals(figures, way) + pool_goals(figures, way)
    for row in short:
        add("a later token, here / stock", "%d tokens" % row.tokens,
            row.step("here") / row.step("stock"), 1.3, note="%.2f ms, stock %.2f ms" % (
                row.step("here"), row.step("stock")))
    for row in short:
        add("first token, local / stock", "%d tokens" % row.tokens,
            row.first("local") / row.first("stock"), 1.5, note="%.1f ms, stock %.1f ms" % (
                row.first("local"), row.first("stock")))
    return found


def times_of(at, name, answer):
    """(ms to the first token, ms of a later one) of one of several holders."""
    times = at["times"][name]
    return 1e3 * median(first for first, _ in times), \
        1e3 * median((last - first) / (answer - 1) for first, last in times)


def holders_goals(figures, way):
    by = {at["holders"]: at for at in figures.get("holders", ())}
    if len(by) < 2:
        return []
    one, most = min(by), max(by)
    few, many = (times_of(by[count], "route", figures["answer"])[1] for count in (one, most))
    fetched = [times_of(by[count], "fetch", figures["answer"])[0] for count in (one, most)]
    what = "%d holders / one" % most
    return [figure("a later token, routed", way, what, many / few, "times", 1.5,
                   note="%.2f ms, one %.2f ms" % (many, few)),
            figure("first token, fetched", way, what, fetched[1] / fetched[0], "times",
                   note="%.2f ms, one %.2f ms" % (fetched[1], fetched[0]))]


def client_ms(at, name, answer):
    """(to the first token, of a later one): medians of all clients."""
    some = [one for rep in at["ways"][name] for one in rep]
    return 1e3 * median(first for first, _ in some), \
        1e3 * median((last - first) / (answer - 1) for first, last in some)


def clients_goals(figures, way):
    by = {(at["clients"], at["documents"]): at for at in figures.get("clients", ())}
    if not by:
        return []
    most = max(count for count, _ in by)

    def ratio(name, documents):
        one, many = (client_ms(by[at], name, figures["answer"])[1]
                     for at in ((1, 1), (most, documents)))
        return many / one
    found = []
    for words, documents, bound in (("one document", 1, 1.3), ("a document each", most, None)):
        found.append(figure("a later token, routed, %s" % words, way, "%d clients / one" % most,
                            ratio("route", documents), "times", bound,
                            note="here %.2f" % ratio("here", documents)))
    return found


def pool_goals(figures, way):
    pool = figures.get("pool")
    if not pool:
        return []
    at_once = {name: median(count for count, _ in found) for name, found in pool["ways"].items()}
    allowed = min(pool["clients"], pool["blocks"] // pool["own"])
    return [figure("requests at the same time that own tokens allow / measured", way,
                   "%d free blocks" % pool["blocks"], allowed / max(1, at_once["route"]), "times", 1,
                   note="%d, routed %d, fetched %d" % (allowed, at_once["route"],
                                                       at_once["fetch"]))]


# ---- tables ----

def table(head, lines):
    return ["| %s |" % " | ".join(head), "|%s" % ("---|" * len(head)),
            *("| %s |" % " | ".join(line) for line in lines), ""]


def rows_tables(figures):
    rows = rows_of(figures)
    if not rows:
        return []
    ways = list(rows[0].times)
    out = [words("ms from a request to the n-th token of its answer. *Prefix*: tokens that the "
                 "holder has. *Question*: tokens behind them."), ""]
    out += table(["prefix", "question", "n", *ways], [
        ["%d" % row.tokens, "%d" % row.question, "%d" % mark,
         *("%.1f" % row.ms(way, mark) for way in ways)] for row in rows for mark in MARKS])
    out += [words("ms of a later token; floors: requests for attention with one token's rows, one for "
                  "each layer, with a millisecond of an engine's work before each and without, "
                  "and of these the holder's kernel; tokens of an answer from which fetching is "
                  "less."), ""]
    out += table(["prefix", "question", *ways, "floor", "without work", "kernel", "fetch is less",
                  "predicted"], [
        ["%d" % row.tokens, "%d" % row.question, *("%.2f" % row.step(way) for way in ways),
         "%.2f" % row.floor(1), "%.2f" % row.together(1), "%.2f" % row.kernel(1), *even_words(row)] for row in rows])
    out += [words("Bytes between the daemons of one request with %d tokens of answer: query rows and "
                  "their results, and chunks; CPU ms of a request in the engine's daemon, the "
                  "holder and the engine." % MARKS[-1]), ""]
    out += table(["prefix", "question", "way", "rows, MB", "chunks, MB", "its daemon", "holder",
                  "engine"], [
        ["%d" % row.tokens, "%d" % row.question, way,
         *("%.2f" % (wire[kind] / 1e6) for kind in ("route", "fetch")),
         *("%.0f" % (1e3 * s / figures["reps"]) for s in row.row["cpu"][way])]
        for row in rows for way, wire in row.row["wire"].items()])
    return out


def even_words(row):
    measured, told, sure = row.even()
    return ["never" if measured is None else "%.0f" % measured,
            ("never" if told is None else "%.0f" % told) + ("" if sure else ", not sure")]


def other_tables(figures):
    out, answer = [], figures["answer"]
    if "holders" in figures:
        out += table(["holders", "route, first token, ms", "a later one", "fetch, first token, ms"], [
            ["%d" % at["holders"], *("%.2f" % ms for ms in times_of(at, "route", answer)),
             "%.2f" % times_of(at, "fetch", answer)[0]] for at in figures["holders"]])
    if "clients" in figures:
        ways = list(figures["clients"][0]["ways"])
        out += table(["clients", "documents", *("%s, first token, ms" % way for way in ways),
                      *("%s, a later one" % way for way in ways)], [
            ["%d" % at["clients"], "%d" % at["documents"], *(
                "%.2f" % client_ms(at, way, answer)[i] for i in (0, 1) for way in ways)]
            for at in figures["clients"]])
    if "pool" in figures:
        pool = figures["pool"]
        out += [words("%d clients, a document of %d tokens each, %d free blocks. A routed request takes "
                      "%d blocks, another one %d." % (pool["clients"], pool["tokens"], pool["blocks"],
                                                     pool["own"], pool["whole"])), ""]
        out += table(["way", "at the same time", "s until all are answered"], [
            [name, "%d" % median(count for count, _ in found), "%.2f" % median(s for _, s in found)]
            for name, found in pool["ways"].items()])
    return out


def words(text):
    return textwrap.fill(text, 116, break_on_hyphens=False, break_long_words=False)


def section(figures):
    where, loads = figures["about"], figures["loads"]
    head = words(
        "%s, kvd %s, %d cores (%s), Linux %s: one run of `make bench-vllm-route`, load %.1f to %.1f "
        "before its parts (its own included), medians of %d. vLLM 0.32 on a CPU, one engine with one "
        "thread, Llama of %d layers with 8 query and 4 KV heads of 32 values, fp32, chunks of %d "
        "tokens, %s. All daemons are of one host, and the lookup of chunks asks all seven." % (
            where["date"], where["commit"], where["cores"], where["cpu"], where["kernel"],
            min(loads), max(loads), figures["reps"], figures["layers"], figures["chunk"],
            figures["transport"]))
    return "\n".join([head, "", *rows_tables(figures), *other_tables(figures)])


def text(figures):
    records = goals(figures)
    judged = [goal for record in records for goal in record["goals"]]
    return "\n".join([section(figures), *map(figure_line, records), "goals: %d of %d met" % (
        sum(goal["met"] for goal in judged), len(judged))])


def write(figures, folder):
    where, records = figures["about"], goals(figures)
    return bench_page.page(
        folder, where["date"], where["commit"], "vllm-route", "Routing in vLLM", "\n".join(
            [section(figures), *bench_page.figures(records), *bench_page.goals(records)]))
