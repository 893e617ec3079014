#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A cluster whose directory is the board of one daemon: what kvd-ctl shows, rooms by name,
keys by the directory, and what happens while the board is away."""
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, free_port, run, until  # noqa: E402
from kvd_engine import (BOOTSTRAPPING, FAILED, SUCCESS, WAITING, Cache, Engine,  # noqa: E402
                        open_push)

LEASE = "cluster_lease = 2 s\n"
MORTAL = "[peer]\nping = 50 ms\ndead_after = 3000 ms\n"


def config(board=None, peer="", cluster=""):
    where = "cluster = kvd://%s\n" % board.removeprefix("tcp://") if board else ""
    return MORTAL + peer + "[cluster]\n" + LEASE + where + cluster


@contextlib.contextmanager
def three(board_config=None, **more):
    """A board's daemon at a port of its own, and two of its members."""
    port = "listen = tcp://127.0.0.1:%d\n" % free_port()
    with Daemon(board_config or config(peer=port), name="d0") as d0:
        engine = Engine(d0, "board")
        at = engine.endpoint
        engine.close()
        with Daemon(config(at, **more), name="d1") as d1, \
                Daemon(config(at, **more), name="d2") as d2:
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


def commands_show_daemons_and_groups():
    with three() as (d0, d1, d2):
        prefill = Engine(d1, "prefill")
        prefill.cmd("group.publish", group="prefill", worker="w0", pool="kv", engine="vllm",
                    url="http://10.0.0.1:8000", model="m")
        until("all are there", lambda: len(ctl_json(d2, "cluster")["daemons"]) == 3)
        text = ctl(d2, "cluster")
        assert "directory board, kvd://127.0.0.1:" in text and "; up for " in text, text
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
        assert "the directory kvd://127.0.0.1:" in doctor, doctor
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


def board_that_is_away_stops_nothing():
    with three() as (d0, d1, d2):
        prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
        src, dst = Cache(prefill), Cache(decode)
        src.fill([1, 2, 3], 48)
        prefill.cmd("group.publish", group="prefill", worker="w0", pool="kv")
        send_room(prefill, decode, src, dst, 1, group="prefill")
        first = decode.cmd("group.query", group="prefill", since=0)
        for d in d1, d2:
            d.expect("the directory is away")
            d.expect("peer lost")
        d0.proc.kill()
        d0.wait()
        d0.check_end = lambda: None
        until("health says so",
              lambda: ctl_json(d2, "health")["state"] == "degraded")
        assert "degraded" in ctl(d2, "health")  # and its status is 0
        # what is known goes on: by name and by endpoint
        send_room(prefill, decode, src, dst, 2, group="prefill", worker="w0")
        open_push(prefill, decode, src, dst, 3, [3], [3], 16)
        decode.until(3, "recv", SUCCESS)
        told = decode.cmd("group.query", group="prefill", since=first["revision"])
        assert not told["synced"] and not told["whole"] and not told["gone"], told
        doctor = subprocess.run([BUILD + "/kvd-ctl", "-s", d2.socket_path, "doctor"],
                                capture_output=True, text=True).stdout
        assert "is away for" in doctor, doctor
        with open(d0.config_path, encoding="utf-8") as f:
            text = "[daemon]\n" + f.read().split("log_format = journal\n", 1)[1]
        with Daemon(text, run_dir=d0.run_dir, name="d0") as again:
            until("it is back", lambda: ctl_json(d2, "health")["state"] == "serving")
            until("and has all", lambda: len(ctl_json(again, "cluster")["daemons"]) == 3)
            told = decode.cmd("group.query", group="prefill")
            assert told["synced"] and [r["worker"] for r in told["ranks"]] == ["w0"], told


def one_session_has_its_share():
    with Daemon() as d:
        greedy, other = Engine(d, "greedy"), Engine(d, "other")
        for rank in range(1024):
            greedy.cmd("group.publish", group="g", tp_rank=rank, tp_size=65536)
        for rank in range(1024, 3000):
            message = greedy.refused("ELIMIT", "group.publish", group="g", tp_rank=rank,
                                     tp_size=65536)
        assert "the cap" in message, message
        other.cmd("group.publish", group="h")
        assert len(other.cmd("group.query", group="g")["ranks"]) == 1024
        greedy.close()
        until("they are gone", lambda: "ENOTFOUND" in subprocess.run(
            [BUILD + "/kvd-ctl", "-s", d.socket_path, "group", "g"], capture_output=True,
            text=True).stderr)


def keygen(path):
    return subprocess.run([BUILD + "/kvd-ctl", "keygen", path], capture_output=True,
                          text=True, check=True).stdout.strip()


def keys_count_as_cluster_trust_says():
    for trust in ("listed", "directory"):
        with tempfile.TemporaryDirectory(prefix="kvd-test-") as tmp:
            keys = [keygen("%s/%d" % (tmp, i)) for i in range(3)]

            def allow(name, *who):
                with open("%s/%s" % (tmp, name), "w") as out:
                    out.writelines("node%d %s\n" % (i, keys[i]) for i in who)
                return "curve_allow_file = %s/%s\n" % (tmp, name)

            def secret(i):
                return "curve_secret_file = %s/%d\n" % (tmp, i)

            by = "cluster_trust = %s\n" % trust
            board, member = allow("board", 1, 2), allow("member", 0)
            with Daemon(config(peer=board + secret(0), cluster=by), name="d0") as d0:
                at = Engine(d0, "board").endpoint
                with Daemon(config(at, member + secret(1), by), name="d1") as d1, \
                        Daemon(config(at, member + secret(2), by), name="d2") as d2:
                    prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
                    src, dst = Cache(prefill), Cache(decode)
                    src.fill([1], 16)
                    prefill.cmd("group.publish", group="prefill", pool="kv")
                    if trust == "directory":
                        # such daemons are of other users
                        send_room(prefill, decode, src, dst, 1, group="prefill",
                                  more=dict(ticket=secrets.token_hex(16)))
                        dst.check([1], 16)
                        continue
                    decode.cmd("group.query", group="prefill", since=0)
                    until("it is known", lambda: decode.cmd(
                        "group.query", group="prefill", since=0)["ranks"])
                    message = decode.refused("EAUTH", "room.open", room="1", role="recv",
                                             pool=dst.pool, sources=[dict(group="prefill")])
                    assert "curve_allow_file" in message and keys[1] in message, message


if __name__ == "__main__":
    assert FAILED == 0
    run([commands_show_daemons_and_groups, rooms_find_their_source_by_name,
         board_that_is_away_stops_nothing, one_session_has_its_share,
         keys_count_as_cluster_trust_says])
