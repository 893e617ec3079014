#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""group.publish and group.query through the public socket, and daemons with CURVE keys
that meet or do not; keys and ping intervals change on SIGHUP."""
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, run  # noqa: E402

FAST = "[peer]\nping = 50 ms\ndead_after = %d ms\n"


class Client:
    def __init__(self, daemon):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(daemon.socket_path)
        self.lines, self.last = self.sock.makefile("r"), 0
        self.endpoint = self.ask("hello", proto=1, client="test")["endpoint"]

    def ask(self, cmd, **args):
        self.last += 1
        line = json.dumps(dict(args, cmd=cmd, id=self.last)) + "\n"
        self.sock.sendall(line.encode())
        answer = json.loads(self.lines.readline())
        assert answer["id"] == self.last, answer
        return answer

    def ok(self, cmd, **args):
        answer = self.ask(cmd, **args)
        assert "error" not in answer, answer
        return answer

    def refused(self, code, cmd, **args):
        answer = self.ask(cmd, **args)
        assert answer.get("error", {}).get("code") == code, answer
        return answer["error"]["message"]

    def close(self):
        self.lines.close()
        self.sock.close()


def places(answer):
    return sorted((r["tp_rank"], r["endpoint"]) for r in answer["ranks"])


def large_group_is_listed_during_other_queries():
    """Its answer is made over several turns of the loop."""
    size = 1000
    with Daemon() as d:
        c = Client(d)
        for rank in range(size):
            c.ok("group.publish", group="g", tp_rank=rank, tp_size=size, pool="kv",
                 summary='"%d"\\' % rank)
        # two answers under way, and a line behind them that is taken in its turn
        lines = [dict(cmd="group.query", group="g", id="a"),
                 dict(cmd="group.query", group="g", id="b"), dict(cmd="ping", id="c")]
        c.sock.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())
        said = {answer["id"]: answer for answer in
                (json.loads(c.lines.readline()) for _ in lines)}
        assert said["c"]["ok"], said["c"]
        for answer in said["a"], said["b"]:
            assert answer["complete"] and places(answer) == [
                (rank, c.endpoint) for rank in range(size)], answer
            for rank in answer["ranks"]:
                assert rank["summary"] == '"%d"\\' % rank["tp_rank"], rank
                assert rank["pool"] == "kv" and rank["tp_size"] == size, rank
                assert rank["pp_rank"] == 0 and rank["dp_size"] == 1, rank
        # who asks and leaves costs nothing
        gone = Client(d)
        gone.sock.sendall(b'{"id":1,"cmd":"group.query","group":"g"}\n')
        gone.close()
        assert len(c.ok("group.query", group="g")["ranks"]) == size


def commands_check_their_fields():
    with Daemon() as d:
        c = Client(d)
        c.refused("EINVAL", "group.publish", tp_rank=0)
        c.refused("ERANGE", "group.publish", group="g" * 128)
        c.refused("EINVAL", "group.publish", group="g", tp_rank=2, tp_size=2)
        c.refused("EINVAL", "group.publish", group="g", endpoint="nowhere")
        c.refused("EINVAL", "group.query", group="g", extra=1)
        c.ok("group.publish", group="g")
        rank = c.ok("group.query", group="g")["ranks"][0]
        assert rank["endpoint"] == c.endpoint and rank["cp_size"] == 1, rank


def keygen(path):
    done = subprocess.run([BUILD + "/kvd-ctl", "keygen", path], capture_output=True,
                          text=True, check=True)
    return done.stdout.strip()


def daemons_with_keys_connect_and_others_do_not():
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as tmp:
        keys = [keygen("%s/%d.secret" % (tmp, i)) for i in range(3)]
        allow = tmp + "/allow"

        def write_allow(count):
            with open(allow, "w") as out:
                out.writelines("node%d %s\n" % (i, keys[i]) for i in range(count))

        def config(i):
            return FAST % 20000 + "curve_secret_file = %s/%d.secret\n" \
                "curve_allow_file = %s\n" % (tmp, i, allow)

        write_allow(2)
        with Daemon(config(0)) as d0, Daemon(config(1)) as d1, Daemon(config(2)) as d2:
            c0, c1, c2 = Client(d0), Client(d1), Client(d2)
            at = c0.endpoint
            assert at.endswith("#" + keys[0]), at
            c1.ok("peer.connect", endpoint=at)
            # nobody gets in without a line; d2 itself allows d0, d0 not d2
            d0.expect("connection refused: its key is not in curve_allow_file")
            d2.expect("refuses this daemon's key")
            begun = time.monotonic()
            c2.refused("EAUTH", "peer.connect", endpoint=at)
            assert time.monotonic() - begun < 9  # unlike a daemon that is not there
            # now it may
            write_allow(3)
            for d in (d0, d1, d2):
                d.states.clear()
                d.proc.send_signal(signal.SIGHUP)
                d.wait_ready()
            c2.ok("peer.connect", endpoint=at)
            # and a broken list changes nothing
            with open(allow, "w") as out:
                out.write("node0\n")
            d0.expect("not reloaded")
            d0.states.clear()
            d0.proc.send_signal(signal.SIGHUP)
            d0.wait_ready()
            c2.ok("peer.connect", endpoint=at)


if __name__ == "__main__":
    run([large_group_is_listed_during_other_queries, commands_check_their_fields,
         daemons_with_keys_connect_and_others_do_not])
