#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""make bench in small: one work, its table, its JSON, beside an earlier run."""
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path[:0] = [os.path.join(ROOT, "tests", "lib"), os.path.join(ROOT, "tests", "bench")]
import bench_page  # noqa: E402
import bench_report  # noqa: E402
import bench_works  # noqa: E402
from kvd_daemon import BUILD, run  # noqa: E402

OUT = tempfile.TemporaryDirectory(prefix="kvd-bench-test-")


def bench(*words):
    done = subprocess.run([ROOT + "/scripts/bench.py", "--out", OUT.name, "--reps", "1"] +
                          list(words), capture_output=True, text=True, timeout=300,
                          env=dict(os.environ, KVD_BUILD=BUILD))
    return done.returncode, done.stdout, done.stderr


def latest():
    with open(OUT.name + "/latest.json") as f:
        return json.load(f)


def work_measured_is_in_table_and_json():
    status, out, err = bench("memfd", "256", "write", "cold")
    assert status == 0, err
    record, = latest()
    assert (record["transport"], record["op"], record["size"]) == ("shm", "write", 256), record
    assert record["rows"] == 10485760 // 256 and record["samples"] == 4, record
    assert record["limit"] == "memcpy" and record["kvd_gbps"] > 0, record
    low, high = record["spread"]
    assert 0 < low <= record["kvd_gbps"] <= high, record
    assert abs(record["ratio"] - record["kvd_gbps"] / record["limit_gbps"]) < 0.05, record
    goal, = record["goals"]
    assert goal["at_least"] == 0.7 and goal["met"] == (record["ratio"] >= 0.7), record
    assert "256 B rows, scattered" in out and "goals: " in out, out


def earlier_faster_run_is_reported():
    records = latest()
    earlier = OUT.name + "/earlier.json"
    for record in records:
        record["kvd_gbps"] *= 1000
        record["ratio"] *= 1000
    with open(earlier, "w") as f:
        json.dump(records, f)
    status, out, err = bench("memfd", "256", "write", "cold", "--against", earlier)
    assert status == 0, err
    line, = [line for line in out.splitlines() if "->" in line]
    assert "SLOWER" in line and re.search(r"-(9[0-9]|100)\.\d %", line), line


def request_costs_are_figures_with_goals():
    status, out, err = bench("poll", "memfd")
    assert status == 0, err
    by = {record["op"]: record for record in latest()}
    assert set(by) == {"status page", "JSON"}, by
    for record in by.values():
        goal, = record["goals"]
        assert record["value"] > 0 and goal["met"] == (record["value"] <= goal["at_most"])
    assert out.count("≤ ") == 2, out


def run_is_a_page_of_its_own():
    bench("memfd", "256", "read", "cold")
    record, = latest()
    for _ in range(2):  # the same again is the same
        status, out, err = bench("--from", OUT.name + "/latest.json", "--doc", OUT.name)
        assert status == 0, err
    path = "%s/%s-%s-bench.md" % (OUT.name, record["date"][:10], record["commit"])
    assert out.strip() == path, out
    with open(path) as f:
        text = f.read()
    assert text.startswith("# Transfers and requests\n\n%s, kvd " % record["date"][:10]), text
    line, = [line for line in text.splitlines() if "256 B rows, scattered |" in line]
    assert "| – / %.2f |" % record["kvd_gbps"] in line, line
    assert "– / %.2f of memcpy" % record["limits"][0]["ratio"] in line, line
    assert "of 1 goals are met." in text, text
    assert ("Not met" in text) == (not record["goals"][0]["met"]), text


def time_exhausted_leaves_two_repetitions():
    status, out, err = bench("memfd", "256", "write", "cold", "--reps", "9", "--minutes", "0")
    assert status == 0 and "only 2 repetitions" in err, err
    record, = latest()
    assert record["samples"] == 8, record


def unknown_word_is_refused():
    status, out, err = bench("memfd", "65k")
    assert status != 0 and "65k" in err and out == "", (status, out, err)


def goal_with_alternatives_takes_the_better():
    goals = [[("memcpy", 0.9), ("NIXL", 1.2)], [("Mooncake", 15)]]
    judged, = bench_report.judge(goals, {"memcpy": 0.5, "NIXL": 1.3})
    assert judged["met"] and judged["against"] == "NIXL", judged
    judged, = bench_report.judge(goals, {"memcpy": 0.5})
    assert not judged["met"] and judged["against"] == "memcpy", judged


def words_choose_parts():
    chosen = bench_works.Chosen(["tcp", "64k"])
    assert (chosen.kinds, chosen.rows, chosen.control) == (["tcp"], ["64k"], [])
    chosen = bench_works.Chosen(["latency", "tcp"])
    assert (chosen.kinds, chosen.control, chosen.control_kinds) == ([], ["latency"], ["tcp"])
    chosen = bench_works.Chosen(["latency", "ucx"])
    assert (chosen.control, chosen.control_kinds) == (["latency"], ["ucx"])
    chosen = bench_works.Chosen([])
    assert chosen.kinds == list(bench_works.KINDS_USUAL) and chosen.control
    assert "ucx" not in chosen.kinds + chosen.control_kinds
    chosen = bench_works.Chosen(["aes128gcm", "256"])
    assert (chosen.kinds, chosen.rows) == (["aes128gcm"], ["256"]), chosen.kinds


if __name__ == "__main__":
    run([work_measured_is_in_table_and_json, earlier_faster_run_is_reported,
         request_costs_are_figures_with_goals, run_is_a_page_of_its_own,
         time_exhausted_leaves_two_repetitions, unknown_word_is_refused,
         goal_with_alternatives_takes_the_better, words_choose_parts])
