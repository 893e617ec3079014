# SPDX-License-Identifier: Apache-2.0
"""A run's records as a page of docs/runs: one line for each way and kind of rows.

What a limit is held against is measured cold, what a peer is held against in the peer's
own conditions (bench_works.CACHES); a line takes each figure from where it belongs.
"""
import os
import textwrap

WAYS = {"memfd": "same host", "adopt": "same host, adopted", "vm": "same host, `vm`",
        "tcp": "tcp", "ucx": "ucx over tcp"}


def pair(values, form):
    """Of write and read; "" when neither was measured."""
    if not any(value is not None for value in values):
        return ""
    return " / ".join("–" if value is None else form % value for value in values)


def of(record, sort, name, field):
    for one in record[sort] if record else []:
        if one["name"] == name:
            return one[field]
    return None


def names(records, sort):
    return list(dict.fromkeys(one["name"] for r in records if r for one in r[sort]))


def line(kind, work, by):
    cold = [by.get((kind, "cold", work, op)) for op in ("write", "read")]
    warm = [by.get((kind, "warm", work, op)) for op in ("write", "read")]
    limits = ["%s of %s" % (pair([of(r, "limits", name, "ratio") for r in cold], "%.2f"), name)
              for name in names(cold, "limits")]
    peers = ["%s× %s" % (pair([of(r, "peers", name, "ratio") for r in warm], "%.1f"), name)
             for name in names(warm, "peers")]
    return "| %s | %s | %s | %s | %s | %s |" % (
        kind, work, pair([r and r["kvd_gbps"] for r in cold], "%.2f"),
        pair([r and r["first_gbps"] for r in cold], "%.2f"), ", ".join(limits),
        ", ".join(peers))


def transfers(records):
    by = {(WAYS[r["memory"] if r["transport"] == "shm" else r["transport"]], r["caches"],
           r["work"], r["op"]): r for r in records if "kvd_gbps" in r}
    if not by:
        return []
    lines = ["| way | rows | kvd GB/s, W / R | first pass | of the limit, W / R | "
             "peers, W / R |", "|---|---|---|---|---|---|"]
    for kind, work in dict.fromkeys((key[0], key[2]) for key in by):
        lines.append(line(kind, work, by))
    return lines + [""]


def figures(records):
    """Of one work over several transports: one line."""
    found = {}
    for r in records:
        if "value" in r:
            found.setdefault((r["work"], r["op"], r["unit"]), []).append(r)
    if not found:
        return []
    lines = ["| what | figure | at most |", "|---|---|---|"]
    for (work, op, unit), rs in found.items():
        told = ", ".join("%.4g %s%s" % (r["value"], unit, " (%s)" % r["transport"]
                                        if len(rs) > 1 else "") for r in rs)
        bound = ["%.4g" % g["at_most"] for r in rs for g in r["goals"]]
        lines.append("| %s, %s | %s | %s |" % (work, op, told, bound[0] if bound else ""))
    return lines + [""]


def missed_words(record, goal):
    if "value" in record:
        return "%s %s (%s): %.4g, at most %.4g" % (record["work"], record["op"],
                                                  record["transport"], record["value"],
                                                  goal["at_most"])
    return "%s, %s, %s: %.2f of %s, at least %g" % (
        record["kind"], record["work"], record["op"], goal["ratio"], goal["against"],
        goal["at_least"])


def goals(records):
    judged = [(r, g) for r in records for g in r["goals"]]
    missed = [missed_words(r, g) for r, g in judged if not g["met"]]
    words = "%d of %d goals are met." % (len(judged) - len(missed), len(judged))
    return ["\n- ".join([words + " Not met:\n"] + missed) if missed else words, ""]


def section(records):
    first = records[0]
    head = ("%s, kvd %s, %d cores (%s), Linux %s: medians of one run in which all "
            "took turns (`make bench PEERS=1`). W: the source posts, R: the destination does. "
            "Limits: the same cold rows without kvd, on as many threads. Peers: in the "
            "conditions of their own benches (dense, warm)." % (
                first["date"][:10], first["commit"], first["cores"], first["cpu"],
                first["kernel"]))
    return "\n".join([textwrap.fill(head, 116, break_on_hyphens=False), ""] +
                     transfers(records) + figures(records) + goals(records))


def page(folder, date, commit, name, title, text):
    """A file of this run in the folder; its path."""
    path = os.path.join(folder, "%s-%s-%s.md" % (date[:10], commit, name))
    with open(path, "w", encoding="utf-8") as out:
        out.write("# %s\n\n%s\n" % (title, text.rstrip("\n")))
    return path


def write(records, folder):
    first = records[0]
    return page(folder, first["date"], first["commit"], "bench", "Transfers and requests",
                section(records))
