# SPDX-License-Identifier: Apache-2.0
"""Time to the first token by round robin, least-loaded and prefix, on traces of prompts with common
beginnings. Judged: prefix is at most 0.85 of least-loaded at p50, and not above it at p99.

  prefix_sim.py [--doc] [TRACE …]

Without files: two synthetic traces. TRACE: a file as Mooncake's public traces are (prefix_play.py).
--doc: more cases, which are not judged, as a page of docs/runs. `make test` has a share of it
(test_router_sim.py)."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from prefix_play import Case, play, read, synthetic  # noqa: E402

NAMES = ("round-robin", "least-loaded", "prefix")
P50, P99 = 0.85, 1.0  # of least-loaded
JUDGED = [Case(cache=cache, loads=loads) for cache in (500_000, 2_000_000)
          for loads in (False, True)]
SHOWN = {
    "6 servers": Case(workers=6), "0.2 M, size not reported": Case(cache=200_000, known=False),
    "0.06 M, size not reported": Case(cache=60_000, known=False), "2 routers": Case(routers=2), "4 routers": Case(routers=4),
    "4 routers, with loads": Case(routers=4, loads=True)}
SESSIONS = {
    "4 routers, by session": Case(routers=4, hashed=True),
    "4 routers, by session, with loads": Case(routers=4, hashed=True, loads=True)}
LARGE = (64, 256)  # servers: of these the picker evaluates some


INTRO = """
Virtual time: seconds to the first token, p50 / p90 / p99, by policies of [the router](../router.md#prefixes). Each
prefill server computes 8000 tokens a second, one prompt after another, without the tokens that its cache has. The cache
is an LRU of 0.5 M tokens, unless said otherwise. The router learns from its own requests. "With loads": the servers
also publish loads, each second. "By session": a session always uses the same of several routers. Cached: share of the
tokens. Judged are the first four rows of a trace. Traces in files are Mooncake's (FAST25-release); they have no
sessions.
"""


def cell(result):
    return "%.2f / %.2f / %.1f" % result[:3]


def compared(trace, case):
    """(results by name, p50 and p99 of prefix by those of least-loaded)"""
    got = {name: play(case, name, trace) for name in NAMES}
    least, prefix = got["least-loaded"], got["prefix"]
    return got, prefix.p50 / least.p50, prefix.p99 / least.p99


def row(words, got, p50, p99):
    print("| %s | %s | %.2f, %.2f | %.0f, %.0f %% |" % (
        words, " | ".join(cell(got[name]) for name in NAMES), p50, p99,
        *(100 * got[name].hits for name in NAMES[1:])), flush=True)


def stated(trace):
    seen, common = set(), 0
    for prompt in trace:
        common += sum(one in seen for one in prompt.ids)
        seen.update(prompt.ids)
    lengths = sorted(prompt.tokens for prompt in trace)
    return "%d prompts in %.0f s, of %.0f tokens on average (p50 %d, p90 %d), %.0f %% of blocks " \
        "seen before" % (len(trace), trace[-1].at, sum(lengths) / len(lengths),
                         lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10],
                         100 * common / sum(len(prompt.ids) for prompt in trace))


def judged(name, trace):
    """Failures."""
    out = []
    print("\n**%s**: %s.\n\n| 8 servers, cache of each | %s | prefix / least-loaded, p50, p99 "
          "| cached, least-loaded, prefix |\n|---|---|---|---|---|---|" % (
              name, stated(trace), " | ".join(NAMES)))
    for case in JUDGED:
        got, p50, p99 = compared(trace, case)
        words = "%g M%s" % (case.cache / 1e6, ", with loads" if case.loads else "")
        row(words, got, p50, p99)
        if p50 > P50 or p99 > P99:
            out.append("%s, %s: %.3f at p50, %.3f at p99" % (name, words, p50, p99))
    return out


def shown(trace):
    for words, case in SHOWN.items():
        row(words, *compared(trace, case))
    if trace[0].session is None:
        return
    for words, case in SESSIONS.items():
        row(words, *compared(trace, case))
    print("\n| sessions kept by --affinity, slack | least-loaded | prefix |\n|---|---|---|")
    for slack in (0.5, 1, 2, 4):
        case = Case(affinity=True, slack=slack)
        print("| %g s | %s | %s |" % (slack, *(cell(play(case, name, trace))
                                               for name in NAMES[1:])), flush=True)


def large():
    print("\n| servers, synthetic at a rate for them | %s | prefix / least-loaded, p50, p99 "
          "| cached, least-loaded, prefix |\n|---|---|---|---|---|---|" % " | ".join(NAMES))
    for workers in LARGE:
        trace = synthetic(1, rate=3.4 * workers / 8, seconds=300)
        row("%d" % workers, *compared(trace, Case(workers=workers)))


def main():
    doc, paths = "--doc" in sys.argv, [word for word in sys.argv[1:] if word != "--doc"]
    traces = [("synthetic %d" % seed, synthetic(seed)) for seed in (1, 2)] + \
        [(os.path.basename(path), read(path)) for path in paths]
    failures = []
    if doc:
        print(INTRO.strip())
    for name, trace in traces:
        failures += judged(name, trace)
        if doc:
            shown(trace)
    if doc:
        large()
    for failure in failures:
        print("FAILED: " + failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
