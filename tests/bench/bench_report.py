# SPDX-License-Identifier: Apache-2.0
"""A run's records as a table, as JSON, as a plot, and beside an earlier run's."""
import json
import os
import shutil
import subprocess


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


def median(values):
    return quantile(values, 0.5)


def spread(values):
    return [round(quantile(values, 0.1), 3), round(quantile(values, 0.9), 3)]


def against(part, kvd):
    """One limit or peer beside kvd: the ratio of medians, and that of the best, which
    a busy machine disturbs least."""
    gbps = median(part.samples)
    one = {"name": part.name, "gbps": round(gbps, 3), "best_gbps": round(max(part.samples), 3),
           "spread": spread(part.samples), "ratio": round(median(kvd.samples) / gbps, 3),
           "best_ratio": round(max(kvd.samples) / max(part.samples), 3)}
    if part.cpu and kvd.cpu:
        one["cpu_s_gb"] = round(median(part.cpu), 3)
    return one


def judge(goals, ratios):
    """Goals whose limits or peers were measured, with met or not. Of a goal with
    alternatives the best is told."""
    judged = []
    for goal in goals:
        known = [(ratios[who] >= least, ratios[who] / least, who, least)
                 for who, least in goal if who in ratios]
        if known:
            met, _, who, least = max(known)
            judged.append({"against": who, "at_least": least, "ratio": round(ratios[who], 3),
                           "met": met})
    return judged


def transfer_record(row, kind, op, caches, kvd, limits, peers, goals):
    """`row` of bench_works.ROWS, `kind` of KINDS; `limits`, `peers`: parts."""
    mid = median(kvd.samples)
    limits = [against(part, kvd) for part in limits if part.samples]
    peers = [against(part, kvd) for part in peers if part.samples]
    record = {"work": row[0], "kind": kind[0], "op": op, "transport": kind[1],
              "memory": kind[2], "caches": caches, "size": row[1], "rows": kvd.rows,
              "bytes": row[2], "samples": len(kvd.samples),
              "kvd_gbps": round(mid, 3), "kvd_best_gbps": round(max(kvd.samples), 3),
              "spread": spread(kvd.samples), "first_gbps": round(kvd.first, 3),
              "kvd_cpu_s_gb": round(median(kvd.cpu), 3)}
    if limits:
        record.update(limit=limits[0]["name"], limit_gbps=limits[0]["gbps"],
                      ratio=limits[0]["ratio"])
    if peers:
        record.update(peer=peers[0]["name"], peer_gbps=peers[0]["gbps"],
                      peer_ratio=peers[0]["ratio"])
    record.update(limits=limits, peers=peers, goals=judge(
        goals, {one["name"]: one["ratio"] for one in limits + peers}))
    return record


def figure(work, transport, what, value, unit, at_most=None, **more):
    """A record of one figure that is not GB/s; smaller is better. The goal is judged by
    the value that is shown."""
    value = round(value, 3)
    record = {"work": work, "op": what, "transport": transport, "value": value, "unit": unit}
    record.update(more)
    record["goals"] = [] if at_most is None else [
        {"against": "at most", "at_most": at_most, "met": value <= at_most}]
    return record


# ---- the table ----

def goal_words(record, name):
    for goal in record["goals"]:
        if goal["against"] == name:
            return "≥ %g %s" % (goal["at_least"], "met" if goal["met"] else "NOT MET")
    return ""


def transfer_lines(record):
    head = "%-30s %-5s %6.2f [%5.2f %5.2f] %6.2f" % (
        record["work"], record["op"], record["kvd_gbps"], *record["spread"],
        record["first_gbps"])
    for i, one in enumerate(record["limits"] + record["peers"]):
        sign = "×" if one in record["peers"] else " "
        yield "%s   %-12s %6.2f [%5.2f %5.2f] %6.2f%s %6.2f%s  %s" % (
            head if i == 0 else " " * len(head), one["name"], one["gbps"], *one["spread"],
            one["ratio"], sign, one["best_ratio"], sign, goal_words(record, one["name"])) + (
                "   (cpu s/GB: %.2f, it %.2f)" % (record["kvd_cpu_s_gb"], one["cpu_s_gb"])
                if "cpu_s_gb" in one else "")
    if not record["limits"] + record["peers"]:
        yield head


def figure_line(record):
    goal = record["goals"][0] if record["goals"] else None
    return "%-46s %-12s %9.2f %-9s %s%s" % (
        record["work"] + (", " + record["op"] if record["op"] else ""), record["transport"],
        record["value"], record["unit"],
        "≤ %g %s" % (goal["at_most"], "met" if goal["met"] else "NOT MET") if goal else "",
        "   (%s)" % record["note"] if record.get("note") else "")


def table(records):
    lines, last = [], None
    for record in records:
        if "kvd_gbps" not in record:
            continue
        if (record["kind"], record["caches"]) != last:
            last = (record["kind"], record["caches"])
            lines += ["", "%-36s   kvd [10 %%   90 %%]  first   limit, peer    GB/s [10 %%   90 %%] "
                      "kvd/it  best/best"
                      % (", ".join(last))]
        lines += transfer_lines(record)
    figures = [figure_line(record) for record in records if "value" in record]
    if figures:
        lines += ["", "control"] + figures
    goals = [(record, goal) for record in records for goal in record["goals"]]
    if goals:
        met = sum(goal["met"] for _, goal in goals)
        lines += ["", "goals: %d of %d met" % (met, len(goals))]
    return "\n".join(lines)


def markdown(records):
    """The same, shorter, as Markdown."""
    lines = ["| work | op | kvd GB/s | of the limit | peers |", "|---|---|---|---|---|"]
    for r in records:
        if "kvd_gbps" in r:
            lines.append("| %s, %s, %s | %s | %.2f | %s | %s |" % (
                r["kind"], r["caches"], r["work"], r["op"], r["kvd_gbps"],
                ", ".join("%.2f %s" % (one["ratio"], one["name"]) for one in r["limits"]),
                ", ".join("%.1f× %s" % (one["ratio"], one["name"]) for one in r["peers"])))
    figures = [r for r in records if "value" in r]
    if figures:
        lines += ["", "| what | transport | figure | goal |", "|---|---|---|---|"]
    for r in figures:
        goal = ["≤ %g %s" % (g["at_most"], "met" if g["met"] else "not met")
                for g in r["goals"]]
        lines.append("| %s, %s | %s | %.4g %s | %s |" % (
            r["work"], r["op"], r["transport"], r["value"], r["unit"], "".join(goal)))
    return "\n".join(lines) + "\n"


# ---- an earlier run ----

def key(record):
    return tuple(record.get(name) for name in ("kind", "caches", "work", "op",
                                               "transport"))


def compare(records, path):
    """Beside an earlier run: kvd's own figure and its ratio to the first limit, which
    leaves the machine's mood out."""
    with open(path) as stream:
        earlier = {key(record): record for record in json.load(stream)}
    lines = ["", "against %s" % path]
    for record in records:
        old = earlier.get(key(record))
        if not old:
            continue
        name = "kvd_gbps" if "kvd_gbps" in record else "value"
        if name not in old:
            continue
        words = "%-22s %-36s %-6s %8.2f -> %8.2f  %+6.1f %%" % (
            record.get("kind", record["transport"]), record["work"], record["op"], old[name],
            record[name], 100 * (record[name] / old[name] - 1) if old[name] else 0)
        if "ratio" in record and "ratio" in old and name == "kvd_gbps":
            words += "   of the limit %.2f -> %.2f" % (old["ratio"], record["ratio"])
            if record["ratio"] < 0.9 * old["ratio"]:
                words += "  SLOWER"
        lines.append(words)
    return "\n".join(lines)


# ---- the plot ----

def plot(records, path):
    """Bars by gnuplot: kvd, its limits and peers, one block for each kind and
    operation. False when there is no gnuplot or nothing to show."""
    shown = [r for r in records if "kvd_gbps" in r]
    if not shown or not shutil.which("gnuplot"):
        return False
    names = ["kvd"]
    for r in shown:
        names += [one["name"] for one in r["limits"] + r["peers"] if one["name"] not in names]
    blocks = []
    for kind in dict.fromkeys((r["kind"], r["caches"], r["op"]) for r in shown):
        rows = []
        for r in shown:
            if (r["kind"], r["caches"], r["op"]) == kind:
                by = {one["name"]: one["gbps"] for one in r["limits"] + r["peers"]}
                by["kvd"] = r["kvd_gbps"]
                rows.append('"%s" %s' % (r["work"].replace(", ", "\\n"),
                                         " ".join(str(by.get(n, "?")) for n in names)))
        blocks.append((kind, rows))
    script = ['set terminal svg size 1200,%d dynamic background "white" font "sans,11"'
              % (330 * ((len(blocks) + 1) // 2)), 'set output "%s"' % path,
              "set multiplot layout %d,2" % ((len(blocks) + 1) // 2),
              "set style data histogram", "set style histogram clustered gap 1",
              "set style fill solid 0.8 noborder", "set logscale y", "set yrange [0.02:50]",
              "set grid ytics", 'set ylabel "GB/s"', 'set datafile missing "?"',
              "set key outside right top", "set boxwidth 0.9", "set bmargin 4"]
    for number, (kind, rows) in enumerate(blocks):
        data = "$d%d" % number
        script += [data + " << END"] + rows + ["END", 'set title "%s, %s, %s"' % kind]
        used = [i for i in range(len(names))
                if any(row.rsplit('"', 1)[1].split()[i] != "?" for row in rows)]
        script.append("plot " + ", ".join(
            '%s using %d%s title "%s" linecolor %d' % (
                data, i + 2, ":xtic(1)" if i == used[0] else "", names[i].replace("_", "\\_"),
                i + 1) for i in used))
    script.append("unset multiplot")
    done = subprocess.run(["gnuplot"], input="\n".join(script) + "\n", text=True,
                          capture_output=True)
    if done.returncode:
        print("bench: gnuplot: " + done.stderr.strip()[:300])
    return done.returncode == 0


def write(records, folder):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "latest.json")
    with open(path + ".new", "w") as out:
        json.dump(records, out, indent=1)
        out.write("\n")
    os.replace(path + ".new", path)
    with open(os.path.join(folder, "latest.md"), "w") as out:
        out.write(markdown(records))
    return path
