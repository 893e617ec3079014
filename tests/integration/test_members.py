#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A cluster whose members are lines of a file: rooms by name between two daemons, places of
engines at their lines, and what a reload takes."""
import contextlib
import os
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, run, until  # noqa: E402
from kvd_engine import (BOOTSTRAPPING, SUCCESS, WAITING, Cache, Engine)  # noqa: E402


class Members:
    """The file, which two daemons read."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "members")
        self.write()
        self.config = "[cluster]\ncluster = file:%s\n" % self.path

    def write(self, *lines):
        with open(self.path, "w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in lines)

    def reload(self, daemon, *lines):
        self.write(*lines)
        daemon.states.clear()
        daemon.proc.send_signal(signal.SIGHUP)
        daemon.wait_ready()


@contextlib.contextmanager
def two():
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        members = Members(folder)
        with Daemon(members.config, name="d1") as d1, \
                Daemon(members.config, name="d2") as d2:
            yield members, d1, d2


def ranks(engine, group):
    return {r["worker"]: r for r in engine.cmd("group.query", group=group)["ranks"]}


def view(pages):
    return {"kv": dict(pages=pages, tokens=[0, 16])}


def push(room, prefill, decode, src, dst):
    """Of a room that waits for its source."""
    decode.cmd("room.bind", room=str(room), views=view([room]))
    prefill.cmd("room.open", room=str(room), role="send", pool=src.pool)
    prefill.until(room, "send", WAITING)
    prefill.cmd("room.send", room=str(room), seq=0, last=True, views=view([room]))
    decode.until(room, "recv", SUCCESS)


def lines_name_the_sources_of_rooms():
    with two() as (members, d1, d2):
        prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
        src, dst = Cache(prefill), Cache(decode)
        src.fill([1, 2], 32)
        decode.cmd("room.open", room="1", role="recv", pool=dst.pool,
                   sources=[dict(group="prefill")])
        assert decode.state(1, "recv")[0] == BOOTSTRAPPING
        # the line comes, and the room that waits for it goes on
        line = "prefill w0 0.0.0.0 %s pool=kv url=http://10.0.0.1:8000" % prefill.endpoint
        members.reload(d2, line)
        push(1, prefill, decode, src, dst)
        dst.check([1], 16)
        rank = ranks(decode, "prefill")["w0"]
        assert rank["endpoint"] == prefill.endpoint and rank["url"] == "http://10.0.0.1:8000"
        assert rank["pool"] == "kv" and "instance" not in rank, rank
        text = subprocess.run([BUILD + "/kvd-ctl", "-s", d2.socket_path, "group", "prefill"],
                              capture_output=True, text=True, check=True).stdout
        assert text.splitlines()[-1].split()[:3] == ["w0", "0.0.0.0", "serving"], text
        # one that goes leaves what is open
        decode.cmd("room.open", room="2", role="recv", pool=dst.pool,
                   sources=[dict(group="prefill", worker="w0")])
        members.reload(d2)
        decode.refused("ENOTFOUND", "group.query", group="prefill")
        push(2, prefill, decode, src, dst)


def engine_publishes_at_its_daemons_line():
    with two() as (members, d1, d2):
        mine, other = Engine(d1, "mine"), Engine(d2, "other")
        lines = ["g a 0.0.0.0 " + mine.endpoint, "g b 0.0.0.0 " + other.endpoint]
        members.reload(d1, *lines)
        mine.cmd("group.publish", group="g", worker="a", summary="here")
        message = mine.refused("EEXIST", "group.publish", group="g", worker="b")
        assert "the members file has it at " + other.endpoint in message, message
        mine.cmd("group.publish", group="g", worker="c")
        assert {w: r["summary"] for w, r in ranks(mine, "g").items()} == {
            "a": "here", "b": "", "c": ""}
        mine.close()
        mine = Engine(d1, "mine")
        until("the lines are what is left", lambda: {
            w: r["summary"] for w, r in ranks(mine, "g").items()} == {"a": "", "b": ""})


def invalid_file_is_ignored():
    with two() as (members, d1, _):
        engine = Engine(d1, "engine")
        members.reload(d1, "g a 0.0.0.0 tcp://10.0.0.9:7400")
        d1.expect("not reloaded")
        members.reload(d1, "g b 0.0.0.0 tcp://10.0.0.9:7400", "g c 0.0 tcp://10.0.0.9:7400")
        assert list(ranks(engine, "g")) == ["a"]
        done = subprocess.run([BUILD + "/kvd-ctl", "-s", d1.socket_path, "reload"],
                              capture_output=True, text=True)
        assert done.returncode and members.path + ":2: place 'g c 0.0'" in done.stderr, done
        done = subprocess.run([BUILD + "/kvd", "--check-config", "--config", d1.config_path],
                              capture_output=True, text=True)
        assert done.returncode and members.path + ":2: " in done.stderr, done
        members.reload(d1, "g b 0.0.0.0 tcp://10.0.0.9:7400")
        assert list(ranks(engine, "g")) == ["b"]
        os.chmod(members.path, 0o666)
        members.reload(d1, "g d 0.0.0.0 tcp://10.0.0.9:7400")
        assert list(ranks(engine, "g")) == ["b"]
        os.chmod(members.path, 0o644)


if __name__ == "__main__":
    run([lines_name_the_sources_of_rooms, engine_publishes_at_its_daemons_line,
         invalid_file_is_ignored])
