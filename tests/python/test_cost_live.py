# SPDX-License-Identifier: Apache-2.0
"""The cost page of live daemons: measured by echoes, by pulls and by rows sent and returned;
used for decisions; and the refusal of a peer that sends too many requests."""
import json
import os
import socket
import subprocess

import pytest

import kvd
from conftest import until
from kvd import cost
from kvd_daemon import BUILD, Daemon
from test_attend import ATTENDS, MEMORY, Engine, Model, T, daemons, ids_of

HEADS, DQK, DV = 4, 96, 64
SHAPE = cost.Model.mla(layers=2, heads=HEADS, dqk=DQK, dv=DV, out_bytes=4)


def instance(client, endpoint):
    for peer in client.command("peer.list")["peers"]:
        if peer["endpoint"] == endpoint:
            return bytes.fromhex(peer["instance"])
    return None


def measured(client, speeds=2):
    return until(lambda: len(client.command("cost.show")["speeds"]) >= speeds and
                 client.command("cost.show"))


def line_up(client, count=1):
    until(lambda: sum(p["data_line"] and not p["self"]
                      for p in client.command("peer.list")["peers"]) >= count)


def test_page_is_measured_when_it_is_opened():
    with daemons(1) as (_, client, _, clients):
        assert client.command("cost.show")["peers"] == []
        page = client.cost_page()
        shown = measured(client)
        peer, = shown["peers"]
        assert peer["endpoint"] == clients[0].endpoint and not peer["stale"]
        link, = peer["links"]
        assert link["probe_us"]["value"] > 0 and link["bytes_per_us"]["value"] > 1
        assert link["pull_us"]["count"] > 0  # priced like echoes, with doubt
        assert shown["home"]["merge_row_us"]["value"] > 0
        assert {s["instance"] for s in shown["speeds"]} == {
            "0" * 32, instance(client, clients[0].endpoint).hex()}
        holder = cost.Holder(2048, 0, instance(client, clients[0].endpoint))
        choice = page.decide(cost.Model.mla(layers=27, heads=16, out_bytes=4), [holder], steps=1)
        assert choice.route.us > 0 and choice.fetch.us < float("inf")
        assert choice.transport == link["transport"]
        with pytest.raises(kvd.NotFoundError):
            page.decide(SHAPE, [cost.Holder(2048, 0, b"?" * 16)])


def test_open_geometry_is_measured_and_rounds_and_pulls_count():
    model = Model(T * 8, heads=HEADS, dqk=DQK, dv=DV)
    with daemons(1) as (_, client, _, clients):
        ids = ids_of(8, b"live")
        far, near = Engine(clients[0], model), Engine(client, model, rows=8)
        far.put(ids)
        client.cost_page()
        shown = measured(client)
        assert {(s["heads"], s["dqk"], s["dv"]) for s in shown["speeds"]} == {(HEADS, DQK, DV)}
        hold = near.space.hold(ids, remote=10)
        for layer in (0, 1, 0, 1):
            near.ask(0, layer, [kvd.Part(hold)])
            near.attend.wait(0, timeout=60)
        peer, = client.command("cost.show")["peers"]
        link, = peer["links"]
        assert link["congestion"]["count"] == 4 and link["turn_us"]["value"] >= 0
        assert peer["wait_us"]["count"] == 4 and peer["requesters"] == 1
        there, = (s["attend"] for s in client.command("cost.show")["speeds"]
                  if s["instance"] == peer["instance"])
        assert there["count"] == 4 and there["value"] > 0
        hold.fetch({"kv": kvd.View(list(range(8)), tokens=(0, T * 8))}).wait(timeout=60)
        link, = client.command("cost.show")["peers"][0]["links"]
        assert link["pull_us"]["count"] >= 1 and link["pull_bytes_per_us"]["value"] > 0
        hold.close()


def test_calibrate_reports_bytes_within_its_limit():
    with daemons(1) as (_, client, holders, clients):
        line_up(client)
        told = client.command("cost.calibrate", 600, endpoint=clients[0].endpoint)
        assert [e["bytes"] for e in told["echoes"]] == [0, 2304, 36864, 294912]
        assert all(e["us"] > 0 and e["count"] > 0 for e in told["echoes"])
        assert told["bytes"] <= 3 << 20
        again = client.command("cost.calibrate", 600, endpoint=clients[0].endpoint.partition("#")[0],
                               rows=300, rounds=3)  # of several messages
        assert again["echoes"] == [dict(again["echoes"][0], bytes=2 * 300 * 1152, count=3)]
        with pytest.raises(kvd.NotFoundError):
            client.command("cost.calibrate", 600, endpoint="tcp://nobody:1")
        if os.path.basename(BUILD) != "thread":  # there echoes take longer than the share lasts
            with pytest.raises(kvd.BusyError, match="echoes"):
                for _ in range(20):  # the holder's share for a peer ends
                    client.command("cost.calibrate", 600, endpoint=clients[0].endpoint, rows=2048,
                                   rounds=400)
        clients[0].close()
        holders[0].stop()
        until(lambda: not client.command("cost.show")["peers"])
        with pytest.raises(kvd.Error):
            client.command("cost.calibrate", 600, endpoint=clients[0].endpoint)


def test_two_calibrations_of_a_peer_are_one_too_many():
    with daemons(1) as (daemon, client, _, clients):
        line_up(client)
        asked = b"".join(json.dumps({"id": n, "cmd": "cost.calibrate", "rounds": 200,
                                     "endpoint": clients[0].endpoint}).encode() + b"\n"
                         for n in (1, 2))
        with socket.socket(socket.AF_UNIX) as other, other.makefile("rb") as told:
            other.connect(daemon.socket_path)
            other.sendall(b'{"id":0,"cmd":"hello","proto":1,"client":"two"}\n' + asked)
            # the second one is there before any echo is back
            told = {answer["id"]: answer for answer in
                    (json.loads(told.readline()) for _ in range(3))}
        assert told[2]["error"]["code"] == "EBUSY" and told[1]["bytes"] > 0, told
        assert client.command("health")["state"] == "serving"


def test_holder_without_attention_has_path_but_no_speed():
    with daemons(1, holder=MEMORY) as (_, client, _, clients):
        page = client.cost_page()
        measured(client, 1)  # its own
        until(lambda: instance(client, clients[0].endpoint))
        holder = cost.Holder(2048, 0, instance(client, clients[0].endpoint))
        choice = page.decide(SHAPE, [holder], steps=1, attend_us=10)
        assert choice.way == cost.FETCH and choice.route.us == float("inf")


def test_daemon_without_chunks_has_no_page():
    with Daemon("") as daemon, kvd.Client(daemon.socket_path) as client:
        with pytest.raises(kvd.StateError, match="chunk_memory"):
            client.cost_page()


def test_ctl_prints_the_page_and_calibrates():
    with daemons(1) as (daemon, client, _, clients):
        line_up(client)

        def ctl(*args):
            return subprocess.run([BUILD + "/kvd-ctl", "-t", "600", "-s", daemon.socket_path, *args],
                                  capture_output=True, text=True, timeout=600)
        assert "no measurements" in ctl("cost").stdout
        told = ctl("calibrate", clients[0].endpoint)
        assert told.returncode == 0, told
        assert "294912" in told.stdout and "this daemon" in told.stdout
        assert json.loads(ctl("--json", "calibrate", clients[0].endpoint).stdout)["bytes"] > 0
        assert len(json.loads(ctl("--json", "cost").stdout)["peers"]) == 1
        shown = ctl("cost").stdout
        assert "GFLOP/s" in shown and "TURN US" in shown and "REQUESTERS" in shown
        assert ctl("calibrate", "nobody").returncode == 1
        metrics = ctl("stats").stdout
        assert "cost_calibrations_total" in metrics and "attention_requests_total" in metrics


def looks(client):
    return next(int(m["value"]) for m in client.command("stats")["metrics"]
                if m["name"] == "attention_busy_polls_total")


def test_awake_daemons_answer_equally():
    spin = ATTENDS + "attention_busy_poll = 300\n"
    model = Model(T * 2, heads=HEADS, dqk=DQK, dv=DV)
    with daemons(1, holder=spin, own=spin) as (_, client, _, clients):
        ids = ids_of(2, b"awake")
        far, near = Engine(clients[0], model), Engine(client, model, rows=8)
        far.put(ids)
        hold = near.space.hold(ids, remote=10)
        first = None
        for _ in range(50):  # small batches are computed by the loop from the second on
            near.ask(0, 1, [kvd.Part(hold)])
            near.attend.wait(0, timeout=60)
            got = [x.tobytes() for x in near.got(0)]
            assert first in (None, got)
            first = got
        assert looks(client) > 0 and looks(clients[0]) > 0
        hold.close()


def test_idle_daemons_sleep():
    sleep = ATTENDS + "attention_busy_poll = off\n"
    model = Model(T * 2, heads=HEADS, dqk=DQK, dv=DV)
    with daemons(1, holder=sleep, own=sleep) as (_, client, _, clients):
        ids = ids_of(2, b"sleep")
        far, near = Engine(clients[0], model), Engine(client, model, rows=8)
        far.put(ids)
        with near.space.hold(ids, remote=10) as hold:
            near.ask(0, 1, [kvd.Part(hold)])
            near.attend.wait(0, timeout=60)
        assert looks(client) == 0 and looks(clients[0]) == 0
