#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A cluster whose directory is an etcd: what kvd-ctl shows, rooms by name, keys by the
directory. What happens while etcd is away: test_cluster_etcd."""
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, run, until  # noqa: E402
from kvd_engine import (BOOTSTRAPPING, FAILED, SUCCESS, WAITING, Cache,  # noqa: E402
                        Engine)
from kvd_etcd import Etcd  # noqa: E402

LEASE = "cluster_lease = 2 s\n"
MORTAL = "[peer]\nping = 50 ms\ndead_after = 3000 ms\n"


def config(etcd, peer="", cluster=""):
    return MORTAL + peer + "[cluster]\n" + LEASE + "cluster = %s\n" % etcd.url + cluster


@contextlib.contextmanager
def three():
    with Etcd() as etcd:
        text = config(etcd)
        with Daemon(text, name="d0") as d0, Daemon(text, name="d1") as d1, \
                Daemon(text, name="d2") as d2:
            yield d0, d1, d2


def ctl(daemon, *words, status=0):
    done = subprocess.run([BUILD + "/kvd-ctl", "-s", daemon.socket_path, *words],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == status, (words, done)
    return done.stdout


def ctl_json(daemon, *words):
    return json.loads(ctl(daemon, "--json", *words))


def send_room(prefill, decode, src, dst, room, more=None, **source):
    """A push whose source is named by its group."""
    view = lambda pages: {"kv": dict(pages=pages, tokens=[0, 16])}  # noqa: E731
    more = more or {}
    decode.cmd("room.open", room=str(room), role="recv", pool=dst.pool, sources=[source],
               **more)
    decode.cmd("room.bind", room=str(room), views=view([room]))
    prefill.cmd("room.open", room=str(room), role="send", pool=src.pool, **more)
    prefill.until(room, "send", WAITING)
    prefill.cmd("room.send", room=str(room), seq=0, last=True, views=view([room]))
    decode.until(room, "recv", SUCCESS)


def figures(engine):
    """The cluster's metrics, without the prefix."""
    return {m["name"].partition("_")[2]: m["value"] for m in engine.cmd("stats")["metrics"]
            if m["name"].startswith("cluster_")}


def metrics_show_the_directory():
    with Etcd() as etcd, Daemon(config(etcd), name="d1") as d1, \
            Daemon(config(etcd), name="d2") as d2:
        prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
        for d in (d1, d2):
            d.expect("connection lost")
            d.expect("directory unavailable")
        prefill.cmd("group.publish", group="prefill", pool="kv")
        until("it is known", lambda: decode.cmd("group.query", group="prefill", since=0)["ranks"])
        published, queried = figures(prefill), figures(decode)
        assert (published["places"], published["puts_total"]) == (2, 2), published  # and its daemon
        assert (queried["places"], queried["watches"], queried["entries"]) == (1, 1, 1), queried
        assert queried["events_total"] >= 1 and not queried["watches_unsynced"], queried
        assert (queried["directory_up"], queried["directory_down_seconds"]) == (1, 0), queried
        etcd.stop()
        until("it is down", lambda: not figures(decode)["directory_up"])
        until("for a while", lambda: figures(decode)["directory_down_seconds"] > 0)
        assert figures(decode)["watches_unsynced"] == 1, figures(decode)
        etcd.start()
        until("it is up", lambda: figures(decode)["directory_up"])
        assert figures(decode)["reconnects_total"] == 1


def commands_show_daemons_and_groups():
    with three() as (d0, d1, d2):
        prefill = Engine(d1, "prefill")
        prefill.cmd("group.publish", group="prefill", worker="w0", pool="kv", engine="vllm",
                    url="http://10.0.0.1:8000", model="m")
        until("all are there", lambda: len(ctl_json(d2, "cluster")["daemons"]) == 3)
        text = ctl(d2, "cluster")
        assert "directory etcd, etcd://127.0.0.1:" in text and "; up for " in text, text
        for name in ("d0", "d1", "d2"):
            assert any(line.startswith(name + " ") for line in text.splitlines()), text
        told = ctl_json(d2, "cluster")
        assert told["up"] and told["trust"] == "listed" and len(told["daemons"]) == 3, told
        assert {d["state"] for d in told["daemons"]} == {"serving"}, told
        text = ctl(d2, "group", "prefill")
        row = text.splitlines()[-1].split()
        assert row[:3] == ["w0", "0.0.0.0", "serving"] and "http://10.0.0.1:8000" in row, text
        rank = ctl_json(d2, "group", "prefill")["ranks"][0]
        assert rank["engine"] == "vllm" and rank["pools"] == [
            dict(name="kv", model="m", pages=0, page_tokens=0)], rank
        assert "prefill" in ctl(d1, "group")
        assert "no rank is published" in subprocess.run(
            [BUILD + "/kvd-ctl", "-s", d2.socket_path, "group", "nobody"],
            capture_output=True, text=True).stderr
        doctor = subprocess.run([BUILD + "/kvd-ctl", "-s", d2.socket_path, "doctor"],
                                capture_output=True, text=True).stdout
        assert "the directory etcd://127.0.0.1:" in doctor, doctor
        # a pool is in the daemon's entry soon after it is there
        cache = Cache(prefill)
        until("the pool is told", lambda: any(
            p["name"] == "kv" and p["pages"] == 64 for d in ctl_json(d2, "cluster")["daemons"]
            for p in d["pools"]))
        # a drain is told at once, and the room that is open runs on
        prefill.cmd("room.open", room="1", role="send", pool=cache.pool)
        ctl(d1, "drain")
        until("draining is told", lambda: ctl_json(d2, "group", "prefill")["ranks"][0]["state"]
              == "draining")
        assert prefill.state(1, "send")[0] == BOOTSTRAPPING
        prefill.cmd("room.abort", room="1", role="send")
        # and its end at once, without a lease
        d1.wait()
        daemons = ctl_json(d2, "cluster")["daemons"]
        assert sorted(d["name"] for d in daemons) == ["d0", "d2"], daemons


def rooms_find_their_source_by_name():
    with three() as (d0, d1, d2):
        prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
        src, dst = Cache(prefill), Cache(decode)
        src.fill([1], 16)
        decode.cmd("room.open", room="9", role="recv", pool=dst.pool,
                   sources=[dict(group="prefill")])
        assert decode.state(9, "recv")[0] == BOOTSTRAPPING
        what = decode.cmd("room.show", room="9", role="recv")["waits_for"]["what"]
        assert "not in the directory" in what, what
        prefill.cmd("group.publish", group="prefill", worker="w0", pool="kv")
        send_room(prefill, decode, src, dst, 1, group="prefill")
        dst.check([1], 16)
        prefill.cmd("room.open", room="9", role="send", pool=src.pool)
        decode.until(9, "recv", WAITING)
        decode.cmd("room.abort", room="9", role="recv")
        message = decode.refused("EINVAL", "room.open", room="8", role="recv", pool=dst.pool,
                                 sources=[dict(group="prefill", endpoint=prefill.endpoint)])
        assert "endpoint or group" in message, message


def one_session_has_its_share():
    with Daemon() as d:
        greedy, other = Engine(d, "greedy"), Engine(d, "other")
        for rank in range(1024):
            greedy.cmd("group.publish", group="g", tp_rank=rank, tp_size=65536)
        for rank in range(1024, 3000):
            message = greedy.refused("ELIMIT", "group.publish", group="g", tp_rank=rank,
                                     tp_size=65536)
        assert "(limit)" in message, message
        other.cmd("group.publish", group="h")
        assert len(other.cmd("group.query", group="g")["ranks"]) == 1024
        greedy.close()
        until("they are gone", lambda: "ENOTFOUND" in subprocess.run(
            [BUILD + "/kvd-ctl", "-s", d.socket_path, "group", "g"], capture_output=True,
            text=True).stderr)


def keygen(path):
    return subprocess.run([BUILD + "/kvd-ctl", "keygen", path], capture_output=True,
                          text=True, check=True).stdout.strip()


def key_that_an_engine_names_is_looked_up(etcd, tmp, prefill, src):
    """By a daemon that has dialled no entry of the directory."""
    keygen(tmp + "/new")
    text = config(etcd, "curve_allow_file = %s/allow\ncurve_secret_file = %s/new\n" % (tmp, tmp),
                  "cluster_trust = directory\n")
    with Daemon(text, name="d3") as d3:
        decode = Engine(d3, "decode")
        dst, plain = Cache(decode), prefill.endpoint.partition("#")[0]
        src.fill([2], 16)
        send_room(prefill, decode, src, dst, 2, endpoint=prefill.endpoint,
                  more=dict(ticket=secrets.token_hex(16)))
        dst.check([2], 16)
        message = decode.refused("ETIMEOUT", "peer.connect", timeout_ms=1000,
                                 endpoint=plain + "#" + keygen(tmp + "/other"))
        assert "nor, so far, in the directory" in message, message
        known = figures(decode)
        assert (known["keys"], known["keys_unknown"]) == (2, 1), known


def keys_are_trusted_per_cluster_trust():
    for trust in ("listed", "directory"):
        with Etcd() as etcd, tempfile.TemporaryDirectory(prefix="kvd-test-") as tmp:
            keys = [keygen("%s/%d" % (tmp, i)) for i in range(3)]
            with open(tmp + "/allow", "w", encoding="utf-8") as out:
                out.write("another %s\n" % keys[2])
            d1, d2 = (Daemon(config(
                etcd, "curve_allow_file = %s/allow\ncurve_secret_file = %s/%d\n" % (tmp, tmp, i),
                "cluster_trust = %s\n" % trust), name="d%d" % i) for i in range(2))
            with d1, d2:
                prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
                src, dst = Cache(prefill), Cache(decode)
                src.fill([1], 16)
                prefill.cmd("group.publish", group="prefill", pool="kv")
                if trust == "directory":
                    # such daemons are of other users
                    send_room(prefill, decode, src, dst, 1, group="prefill",
                              more=dict(ticket=secrets.token_hex(16)))
                    dst.check([1], 16)
                    key_that_an_engine_names_is_looked_up(etcd, tmp, prefill, src)
                    continue
                decode.cmd("group.query", group="prefill", since=0)
                until("it is known", lambda: decode.cmd(
                    "group.query", group="prefill", since=0)["ranks"])
                message = decode.refused("EAUTH", "room.open", room="1", role="recv",
                                         pool=dst.pool, sources=[dict(group="prefill")])
                assert "curve_allow_file" in message and keys[0] in message, message


if __name__ == "__main__":
    assert FAILED == 0
    run([metrics_show_the_directory, commands_show_daemons_and_groups, rooms_find_their_source_by_name,
         one_session_has_its_share, keys_are_trusted_per_cluster_trust])
