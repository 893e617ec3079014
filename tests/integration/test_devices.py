#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a host without RDMA says: it starts, names why, and `require = rdma` fails
loudly. (With RDMA: make rdma-vm.)"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, Skip, run  # noqa: E402
from kvd_engine import Cache, Engine  # noqa: E402


def ask(daemon, *words):
    return subprocess.run([BUILD + "/kvd-ctl", "--socket", daemon.socket_path, *words],
                          capture_output=True, text=True, timeout=60)


def ctl(daemon, *words):
    done = ask(daemon, *words)
    assert done.returncode == 0, done
    return done.stdout


def needs_none():
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        raise Skip("a host without RDMA")


def devices_of_a_host_without_rdma_name_it():
    needs_none()
    with Daemon() as daemon:
        assert ctl(daemon, "devices").startswith("verbs: "), ctl(daemon, "devices")
        told = json.loads(ctl(daemon, "--json", "devices"))
        assert told["rdma"] == [] and "verbs: " in told["rdma_error"], told
        assert "serving" in ctl(daemon, "health")
        assert "transport verbs: not usable" in daemon.log()


def require_rdma_without_rdma_refuses_rooms_by_name():
    needs_none()
    with Daemon("[transport]\nrequire = rdma\n") as daemon:
        daemon.expect("none of its transports is usable")
        assert "transport require: none of its transports is usable" in daemon.log()
        engine = Engine(daemon, "prefill")
        pool = Cache(engine).pool
        why = engine.refused("EREQUIRE", "room.open", room="1", role="send", pool=pool)
        assert "verbs: " in why, why
        health = engine.cmd("health")
        assert health["state"] == "refusing" and "verbs: " in health["why"], health
        probe = ask(daemon, "health")
        assert probe.returncode == 1 and "refusing" in probe.stdout, probe
        assert any("STATUS=refusing rooms: " in s for s in daemon.states), daemon.states
        engine.close()


def require_of_present_transport_is_silent():
    with Daemon("[transport]\nrequire = tcp rdma\n") as daemon:
        engine = Engine(daemon, "prefill")
        engine.cmd("room.open", room="1", role="send", pool=Cache(engine).pool)
        assert "none of its transports" not in daemon.log()
        engine.close()


run([devices_of_a_host_without_rdma_name_it, require_rdma_without_rdma_refuses_rooms_by_name,
     require_of_present_transport_is_silent])
