#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""contrib/: alerts and the board ask for what a daemon exports, with labels that it has;
promtool finds no fault, and each alert fires when it shall and not before."""
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import Skip, run  # noqa: E402
from rig import Pair  # noqa: E402

CONTRIB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib")
BOARD = os.path.join(CONTRIB, "grafana", "kvd.json")
ROUTER = os.path.join(CONTRIB, "..", "python", "kvd", "router", "metrics.py")
RULES = os.path.join(CONTRIB, "prometheus", "rules.yml")
OF_PROMETHEUS = {"job", "instance"}


MODULES = """[chunks]
chunk_memory = 8 MiB
chunk_dir = %s
chunk_dir_size = 64 MiB
attention_threads = 1
[cluster]
cluster = file:%s
"""


@functools.cache
def exported():
    """{sample's name: {its labels: their values}} of daemons with all modules, and of the
    router."""
    samples = {"up": {}}
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        members = os.path.join(folder, "members")
        with open(members, "w"):
            pass
        with Pair(MODULES % (folder, members)) as p:
            p.push(1)
            for d in p.daemons:
                for family in d.scrape().values():
                    for name, pairs in family.samples:
                        add_labels(samples, name, pairs)
    for name, pairs in exported_by_the_router():
        add_labels(samples, name, pairs)
    return samples


def add_labels(samples, name, pairs):
    labels = samples.setdefault(name, {})
    for label, value in pairs:
        labels.setdefault(label, set()).add(value)


def exported_by_the_router():
    spec = importlib.util.spec_from_file_location("router_metrics", ROUTER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    metrics, member = module.Metrics(), types.SimpleNamespace(
        role="decode", url="http://d:1", requests=1, failed=0, late=0, blocked=lambda now: None)
    metrics.ended("/v1/completions", 200, 1.0)
    metrics.tried(None, member, "done")
    text = metrics.text(types.SimpleNamespace(running=0, queue=[]),
                        types.SimpleNamespace(by_key={1: member}), False)
    return [(name, re.findall(r'(\w+)="(.*?)"', pairs)) for name, pairs in
            re.findall(r"^([a-z_]+)(?:\{(.*)\})? ", text, re.M)]


def board():
    with open(BOARD) as f:
        return json.load(f)


def board_queries():
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def rule_queries():
    with open(RULES) as f:
        text = f.read()
    for alert in re.split(r"\n  - alert: ", text)[1:]:
        name = alert.split("\n", 1)[0]
        yield name, re.search(r"expr: (.*?)\n    (?:for|labels):", alert, re.S).group(1), ""


CLOSED = {"state", "result", "role", "phase", "direction"}  # all their values are exported


def check_query(labels, where, query, legend):
    used = set()
    names = re.findall(r"\b((?:kvd|process)_[a-z_]+|up)\b", query)
    assert names, (where, query)
    for name in names:
        assert name in labels, "%s: nothing exports %s" % (where, name)
        used |= set(labels[name])
    for name, selector in re.findall(r"\b((?:kvd|process)_[a-z_]+)\s*\{([^}]*)\}", query):
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", selector):
            assert label in set(labels[name]) | OF_PROMETHEUS, (where, name, label)
        for label, values in re.findall(r"(\w+)\s*[=!]~?\s*\"([^\"]*)\"", selector):
            if label in CLOSED:
                assert set(values.split("|")) <= labels[name][label], (where, name, values)
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        for label in re.split(r",\s*", group):
            assert label in used | OF_PROMETHEUS, (where, label, used)
    for label in re.findall(r"{{(\w+)}}", legend):
        assert label in used | OF_PROMETHEUS, (where, label)


def panels_have_descriptions_units_and_legends():
    for panel in board()["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        targets = panel["targets"]
        assert panel["type"] == "stat" or all(t["legendFormat"] for t in targets), panel["title"]
        assert len({t["legendFormat"] for t in targets}) == len(targets), panel["title"]


def panels_do_not_overlap():
    taken = set()
    for panel in board()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def boards_queries_name_what_is_exported():
    labels = exported()
    for where, query, legend in board_queries():
        check_query(labels, where, query, legend)
    rows = [p["title"] for p in board()["panels"] if p["type"] == "row"]
    assert rows == ["Overview", "Peers", "Latency", "Failures", "Event loop", "Chunks", "Attention",
                    "Cluster", "Router"], rows
    ids = [p["id"] for p in board()["panels"]]
    assert len(set(ids)) == len(ids)


def alerts_name_what_is_exported():
    labels = exported()
    for where, query, legend in rule_queries():
        check_query(labels, where, query, legend)


def each_alert_is_tested_to_fire_and_to_be_quiet():
    with open(os.path.join(os.path.dirname(RULES), "rules_test.yml")) as f:
        text = f.read()
    for name, _, _ in rule_queries():
        assert "alertname: %s, exp_alerts: []}" % name in text, name
        assert "alertname: %s\n    exp_alerts:\n    - exp_labels" % name in text, name


def promtool(*args):
    program = shutil.which("promtool")
    if not program:
        raise Skip("promtool (Debian: prometheus)")
    done = subprocess.run([program, *args], capture_output=True, text=True,
                          cwd=os.path.dirname(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def promtool_reads_the_rules():
    promtool("check", "rules", "rules.yml")


def alerts_fire_when_they_shall():
    promtool("test", "rules", "rules_test.yml")


def promtool_reads_the_boards_queries():
    """As rules, which must parse: Grafana's words stand for what it puts there."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        path = os.path.join(folder, "board.yml")
        with open(path, "w") as f:
            f.write("groups:\n- name: board\n  rules:\n")
            for n, (_, query, _) in enumerate(board_queries()):
                f.write("  - {record: 'r%d', expr: %s}\n" % (
                    n, json.dumps(query.replace("$__rate_interval", "1m"))))
        promtool("check", "rules", path)


if __name__ == "__main__":
    run([panels_have_descriptions_units_and_legends, panels_do_not_overlap,
         boards_queries_name_what_is_exported, alerts_name_what_is_exported,
         each_alert_is_tested_to_fire_and_to_be_quiet, promtool_reads_the_rules, alerts_fire_when_they_shall,
         promtool_reads_the_boards_queries])
