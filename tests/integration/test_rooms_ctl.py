#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Rooms as an operator sees them: what each is blocked on, requests of peers, ended rooms, and
rooms that delay a drain."""
import json
import os
import re
import select
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, run, until  # noqa: E402
import kvd_engine  # noqa: E402
from kvd_engine import Cache, FAILED, SUCCESS, WAITING, open_push  # noqa: E402

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77


def ctl(daemon, *args):
    done = subprocess.run([BUILD + "/kvd-ctl", "--socket", daemon.socket_path] + list(args),
                          capture_output=True, text=True, timeout=DEADLINE_S)
    return done.returncode, done.stdout, done.stderr


def shown(daemon, *args):
    status, out, err = ctl(daemon, *args)
    assert status == 0, (args, out, err)
    return out


class Pair(kvd_engine.Pair):
    def __init__(self, more=""):
        super().__init__([Daemon(more, name=name) for name in ("p0", "d0")],
                         ("vllm", "sglang"))

    def recv(self, room):
        self.decode.cmd("room.open", room=str(room), role="recv", pool=self.dst.pool,
                        sources=[self.prefill.endpoint])

    def send(self, room):
        self.prefill.cmd("room.open", room=str(room), role="send", pool=self.src.pool)

    def bind(self, room, pages=(3, 4), first=0):
        self.decode.cmd("room.bind", room=str(room),
                        views={"kv": {"pages": list(pages), "first_token": first}})

    def push(self, room):
        self.src.fill(SRC, TOKENS)
        open_push(self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS)
        self.decode.until(room, "recv", SUCCESS)
        self.prefill.until(room, "send", SUCCESS)


def hanging_room_names_awaited_peer_on_both_sides():
    with Pair() as p:
        p.recv(5000)
        p.bind(5000)
        p.recv(5001)
        p.send(5001)
        p.decode.until(5001, "recv", WAITING)
        until("asked", lambda: "unopened" in shown(p.a, "rooms"))
        out = shown(p.b, "rooms")
        assert out.splitlines()[0].endswith("AGE  WAITS FOR"), out
        assert "an engine of peer p0 (pool 'kv') to open room 5000" in out, out
        assert "engine 'sglang' to bind pages" in out, out
        out = shown(p.a, "rooms")
        assert "as requested by peer d0" in out, out
        assert "a receiver to bind its pages (0 of 1)" in out, out
        out = shown(p.a, "rooms", "--state", "unopened")
        assert "5000" in out and "5001" not in out, out
        # blocked rooms, and one that is not
        assert len(shown(p.b, "rooms", "--stuck").splitlines()) == 1
        until("stuck", lambda: len(shown(p.b, "rooms", "--stuck", "100ms").splitlines()) == 3)
        assert "5000" in shown(p.b, "rooms", "--stuck=100ms", "--peer", "p0")
        assert len(shown(p.b, "rooms", "--peer", "nobody").splitlines()) == 1
        for wrong in (["--stuck=x"], ["--state"], ["--stuck", "3x"]):
            assert ctl(p.b, "rooms", *wrong)[0] == 2, wrong
        status, _, err = ctl(p.b, "rooms", "--state", "asleep")
        assert status == 1 and "unopened" in err, err
        # one room, whosever it is
        out = shown(p.b, "room", "5000")
        assert "waits for    an engine of peer p0" in out and "'sglang'" in out, out
        out = shown(p.a, "room", "5000")
        assert "unopened" in out, out
        told = json.loads(shown(p.a, "-j", "room", "5001"))
        assert told["rooms"][0]["waits_for"]["who"] == "a receiver", told


def room_not_startable_fails_there_at_once():
    with Pair() as p:
        p.send(7)
        p.recv(7)
        p.decode.until(7, "recv", WAITING)
        p.decode.cmd("room.abort", room="7", reason="no pages")
        p.prefill.until(7, "send", FAILED, deadline_s=5)
        error = p.prefill.state(7, "send")[1]
        assert error["code"] == "EABORTED" and "no pages" in error["message"], error
        assert "7" in shown(p.a, "rooms", "--failed")
        # ... and where it opens later
        p.recv(8)
        p.decode.until(8, "recv", WAITING)
        p.decode.cmd("room.abort", room="8", reason="no pages")
        p.decode.until(8, "recv", FAILED)
        p.recv(9)  # behind it on the line
        p.bind(9)
        until("asked", lambda: "unopened" in shown(p.a, "rooms"))
        p.send(8)
        p.prefill.until(8, "send", FAILED, deadline_s=5)
        assert "no pages" in p.prefill.state(8, "send")[1]["message"]


def ended_rooms_are_in_the_history():
    with Pair() as p:
        p.push(1)
        p.prefill.cmd("room.close", room="1")
        p.send(2)
        p.prefill.cmd("room.abort", room="2", reason="a reason")
        p.prefill.until(2, "send", FAILED)
        p.prefill.cmd("room.close", room="2")
        out = shown(p.a, "history")
        assert len(out.splitlines()) == 3 and "success" in out and "EABORTED" in out, out
        out = shown(p.a, "history", "--failed", "--since", "10m")
        assert len(out.splitlines()) == 2 and "a reason" in out, out
        assert len(shown(p.a, "history", "--code", "ESHORT").splitlines()) == 1
        ended = json.loads(shown(p.a, "-j", "history", "--room", "1"))["rooms"]
        assert len(ended) == 1, ended
        assert ended[0]["tokens"] == TOKENS and ended[0]["peer"] == "peer d0", ended
        assert ended[0]["engine"] == "vllm" and ended[0]["bytes"] > 0, ended
        assert 0 <= ended[0]["ended_ms"] <= ended[0]["opened_ms"] < 100000, ended
        out = shown(p.a, "room", "2")
        assert "room 2 is not open; it has ended" in out and "a reason" in out, out
        status, _, err = ctl(p.a, "room", "3")
        assert status == 1 and "not open" in err, err
        assert ctl(p.a, "history", "--since", "soon")[0] == 2
        # of a failed one: received tokens, of the bound ones
        p.recv(4)
        p.bind(4, (3, 4))
        p.send(4)
        p.prefill.until(4, "send", WAITING)
        p.prefill.cmd("room.send", room="4", seq=0, last=True,
                      views={"kv": {"pages": [1], "tokens": [0, 16]}})
        p.decode.until(4, "recv", FAILED)
        out = shown(p.b, "history", "--room", "4")
        assert "TOKENS-BOUND" in out and re.search(
            r"ESHORT +32\.0 KiB of 64\.0 KiB +32 ", out), out


def ended_rooms_are_logged_per_option():
    for value, success in (("failed", 0), ("all", 1)):
        with Pair("[daemon]\nlog_rooms = %s\n" % value) as p:
            p.push(1)
            p.send(2)
            p.prefill.cmd("room.abort", room="2")
            p.prefill.until(2, "send", FAILED)
            log = p.a.log()
            lines = [line for line in log.splitlines() if "room 1: success" in line]
            assert len(lines) == success, log
            for line in lines:
                for word in ("bytes=", "ms=", "transport=shm", 'peer="peer d0"',
                             'engine="vllm"'):
                    assert word in line, line
            lines = [line for line in log.splitlines() if "room 2: failed" in line]
            assert len(lines) == 1 and "code=EABORTED" in lines[0], log
            assert lines[0].startswith("<6>"), "its engine gave it up: " + lines[0]
            p.prefill.cmd("room.open", room="3", role="offer", pool=p.src.pool,
                          views={"kv": {"pages": [3]}}, lease_ms=1)
            p.prefill.until(3, "offer", FAILED)
            line = next(x for x in p.a.log().splitlines() if "room 3: failed" in x)
            assert line.startswith("<4>") and "code=ELEASE" in line and "why=" in line, line


def until_status(daemon, begins):
    """Wait until it sends systemd a line that starts so."""
    until(begins, lambda: any(line.startswith("STATUS=" + begins) for line in daemon.states)
          or select.select([daemon.notify], [], [], 0)[0]
          and daemon.states.extend(daemon.notify.recv(4096).decode().split("\n")))


def drain_names_awaited_sessions():
    with Pair("[daemon]\ndrain_timeout = 60 s\n") as p:
        p.send(1)
        p.send(2)
        p.a.proc.send_signal(signal.SIGTERM)
        until_status(p.a, "draining: 2 rooms open, 0 of them transferring, 0 transfers; "
                     "at most 60 s more")
        p.prefill.cmd("room.abort", room="1")
        until_status(p.a, "draining: 1 rooms open")
        p.prefill.cmd("room.abort", room="2")
        assert p.a.wait() == 0


def source_with_several_pools_names_option():
    with Pair() as p:
        rooms = iter(range(1, 1 << 30))

        def told(words):
            """Once the other daemon knows of both pools."""
            room = next(rooms)
            p.recv(room)
            until("an end", lambda: p.decode.state(room, "recv")[0] in (FAILED, WAITING))
            state, error, _ = p.decode.state(room, "recv")
            if state == WAITING:
                p.decode.cmd("room.abort", room=str(room))
                p.decode.until(room, "recv", FAILED)
            return state == FAILED and words in error["message"]

        def says(words):
            until(words, lambda: told(words))

        other = Cache(p.prefill, rank=1)
        says("('kv' rank 0, 'kv' rank 1); set the source's field rank")
        p.prefill.cmd("pool.unregister", pool=other.pool)
        other = Cache(p.prefill, name="draft")
        says("('kv' rank 0, 'draft' rank 0); set the source's field pool")
        p.prefill.cmd("pool.unregister", pool=other.pool)
        Cache(p.prefill)
        says("('kv' rank 0, 'kv' rank 0); give each pool its own name there (pool.register, "
             "field name), and set the source's field pool")


def process_owning_a_room_is_named_with_its_state():
    with Pair() as p:
        end, ready = os.pipe()
        pid = os.fork()
        if pid == 0:  # an engine of another process
            engine = kvd_engine.Engine(p.daemons[0], "vllm")
            engine.cmd("room.open", room="5100", role="send", pool=Cache(engine).pool)
            os.write(ready, b"1")
            signal.pause()
        try:
            os.close(ready)
            assert os.read(end, 1) == b"1"
            line, = [x for x in shown(p.daemons[0], "rooms").splitlines() if "5100" in x]
            assert re.search(r"vllm +%d +-" % pid, line) and "stopped" not in line, line
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            line, = [x for x in shown(p.daemons[0], "rooms").splitlines() if "5100" in x]
            assert re.search(r"vllm +%d stopped" % pid, line), line
            out = shown(p.daemons[0], "room", "5100")
            assert re.search(r"'vllm' \(session \d+, process %d, stopped\)" % pid, out), out
            out = shown(p.daemons[0], "sessions")
            assert re.search(r"vllm .* %d .*stopped" % pid, out), out
        finally:
            os.close(end)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


run([process_owning_a_room_is_named_with_its_state,
     source_with_several_pools_names_option,
     hanging_room_names_awaited_peer_on_both_sides,
     room_not_startable_fails_there_at_once, ended_rooms_are_in_the_history,
     ended_rooms_are_logged_per_option, drain_names_awaited_sessions])
