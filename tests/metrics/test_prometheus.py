#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes two daemons under load, and is asked for what boards and
alerts are made of."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import DEADLINE_S, Skip, free_port, run  # noqa: E402
from rig import Load, Pair  # noqa: E402

CONFIG = """
global: {scrape_interval: 500ms, scrape_timeout: 500ms}
scrape_configs:
- {job_name: kvd, static_configs: [{targets: [%s]}]}
"""
QUERIES = {  # each has two daemons, each is above zero under load
    "rooms": 'sum by (instance) (rate(kvd_rooms_ended_total{result="success"}[5s]))',
    "bytes": 'sum by (instance) (rate(kvd_transferred_bytes_total{transport="shm"}[5s]))',
    "peers": "sum by (instance) (rate(kvd_peer_bytes_total[5s]))",
    "p99": 'histogram_quantile(0.99, sum by (instance, le)'
           ' (rate(kvd_room_phase_seconds_bucket{phase="total"}[5s])))',
    "late": "histogram_quantile(0.99, sum by (instance, le)"
            " (rate(kvd_loop_late_seconds_bucket[5s])))",
    "up": "up",
    "state": 'kvd_state{state="serving"} == 1',
    "build": "count by (instance) (kvd_build_info)",
}


class Prometheus:
    def __init__(self, daemons):
        self.program = shutil.which("prometheus")
        if not self.program:
            raise Skip("prometheus (Debian: prometheus)")
        self.targets = ", ".join('"127.0.0.1:%d"' % d.port for d in daemons)

    def __enter__(self):
        self.dir = tempfile.TemporaryDirectory(prefix="kvd-test-")
        config = os.path.join(self.dir.name, "prometheus.yml")
        with open(config, "w") as f:
            f.write(CONFIG % self.targets)
        self.url = "http://127.0.0.1:%d/api/v1/" % free_port()
        self.log = open(os.path.join(self.dir.name, "log"), "w+")
        self.proc = subprocess.Popen(
            [self.program, "--config.file=" + config, "--log.level=warn",
             "--storage.tsdb.path=" + os.path.join(self.dir.name, "data"),
             "--web.listen-address=" + self.url[len("http://"):].split("/")[0]],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        return self

    def __exit__(self, *exc):
        self.proc.terminate()
        self.proc.wait()
        self.log.close()
        self.dir.cleanup()

    def ask(self, what, **args):
        """Of its API; None: it is not up yet."""
        assert self.proc.poll() is None, open(self.log.name).read()
        try:
            with urllib.request.urlopen(self.url + what + "?" + urllib.parse.urlencode(args),
                                        timeout=DEADLINE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as why:
            if why.code == 503:
                return None
            raise AssertionError("%s %s: %s" % (what, args, why.read().decode()))
        except OSError:
            return None

    def values(self, query):
        data = self.ask("query", query=query) or {"result": []}
        return {r["metric"]["instance"]: float(r["value"][1]) for r in data["result"]}


def prometheus_has_rates_of_both_daemons():
    with Pair() as p, Prometheus(p.daemons) as prometheus, Load(p):
        end = time.monotonic() + DEADLINE_S
        for name, query in QUERIES.items():
            values = {}
            while len(values) < 2 or not all(v > 0 for v in values.values()):
                assert time.monotonic() < end, (name, values)
                values = prometheus.values(query)
            assert set(values) == {"127.0.0.1:%d" % d.port for d in p.daemons}, values
        for target in prometheus.ask("targets")["activeTargets"]:
            assert target["health"] == "up" and not target["lastError"], target
        known = prometheus.ask("metadata")
        assert known["kvd_room_phase_seconds"][0]["type"] == "histogram", known
        assert known["kvd_room_phase_seconds"][0]["help"].startswith("duration of completed phases")


if __name__ == "__main__":
    run([prometheus_has_rates_of_both_daemons])
