#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""contrib/: alerts and the board ask for what a daemon exports, with labels that it has;
promtool finds no fault, and each alert fires when it shall and not before."""
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


def exported():
    """{sample's name: its labels} of a daemon in which everything has happened."""
    labels = {}
    with Pair() as p:
        p.push(1)
        for d in p.daemons:
            for family in d.scrape().values():
                for name, pairs in family.samples:
                    labels.setdefault(name, set()).update(n for n, _ in pairs)
    labels["up"] = set()
    labels.update(exported_by_the_router())
    return labels


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
    return {name: set(re.findall(r"(\w+)=", pairs)) for name, pairs in
            re.findall(r"^([a-z_]+)(?:\{(.*)\})? ", text, re.M)}


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


def check_query(labels, where, query, legend):
    used = set()
    names = re.findall(r"\b((?:kvd|process)_[a-z_]+|up)\b", query)
    assert names, (where, query)
    for name in names:
        assert name in labels, "%s: nothing exports %s" % (where, name)
        used |= labels[name]
    for name, selector in re.findall(r"\b((?:kvd|process)_[a-z_]+)\s*\{([^}]*)\}", query):
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", selector):
            assert label in labels[name] | OF_PROMETHEUS, (where, name, label)
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        for label in re.split(r",\s*", group):
            assert label in used | OF_PROMETHEUS, (where, label, used)
    for label in re.findall(r"{{(\w+)}}", legend):
        assert label in used | OF_PROMETHEUS, (where, label)


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
    alerts = [name for name, _, _ in rule_queries()]
    assert alerts == ["KvdDown", "KvdRefusing", "KvdRoomFailures", "KvdRoomOldest",
                      "KvdPeerFlapping", "KvdLoopLate", "KvdOrphansGrow",
                      "KvdChunkFiles", "KvdChunkDiskFull", "KvdChunkDiskStands", "KvdChunkHomes",
                      "KvdAttendsRefused", "KvdDegraded", "KvdInsecure", "KvdPeersUnreached",
                      "KvdChunkHolders", "KvdRouterMember", "KvdRouterErrors",
                      "KvdRouterCut"], alerts
    for where, query, legend in rule_queries():
        check_query(labels, where, query, legend)


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
    run([boards_queries_name_what_is_exported, alerts_name_what_is_exported,
         promtool_reads_the_rules, alerts_fire_when_they_shall,
         promtool_reads_the_boards_queries])
