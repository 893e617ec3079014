#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl top: frames, on a terminal in place."""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, run  # noqa: E402
import kvd_engine  # noqa: E402
from kvd_engine import FAILED, SUCCESS, WAITING, open_push  # noqa: E402
from screen import Screen  # noqa: E402

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77
HOSTILE = "de\x1b[2Jco\x9b31mde\u202e\x07"
CTL = BUILD + "/kvd-ctl"
FAST = ["--interval", "200ms"]


class Pair(kvd_engine.Pair):
    """Daemons p0 and d0; room 5000 of d0 waits for an engine of p0."""

    def __init__(self, run_dir=None):
        super().__init__([Daemon(run_dir=run_dir, name=name) for name in ("p0", "d0")],
                         ("vllm", HOSTILE))

    def __enter__(self):
        super().__enter__()
        self.decode.cmd("room.open", room="5000", role="recv", pool=self.dst.pool,
                        sources=[self.prefill.endpoint])
        self.decode.cmd("room.bind", room="5000", views={"kv": {"pages": [3, 4]}})
        self.decode.until(5000, "recv", WAITING)
        self.pushed = 0
        return self

    def push(self):
        self.pushed += 1
        open_push(self.prefill, self.decode, self.src, self.dst, self.pushed, SRC, DST, TOKENS)
        self.decode.until(self.pushed, "recv", SUCCESS)
        self.prefill.until(self.pushed, "send", SUCCESS)
        self.prefill.cmd("room.close", room=str(self.pushed), role="send")
        self.decode.cmd("room.close", room=str(self.pushed), role="recv")


def top(daemon, *args, **kw):
    return Screen([CTL, "--socket", daemon.socket_path, "top"] + FAST + list(args), **kw)


def frames_show_rates_between_samples():
    with Pair() as p:
        proc = subprocess.Popen([CTL, "--socket", p.b.socket_path, "top", "--count", "8"] + FAST,
                                stdout=subprocess.PIPE, text=True)
        told = []
        reader = threading.Thread(target=lambda: told.append(proc.communicate(
            timeout=DEADLINE_S)[0]))
        reader.start()
        while reader.is_alive():
            p.push()
        reader.join()
        heads = re.findall(r"^d0 .* ok (\S+)/s +failed 0/s +in (\S+) .*out 0 B/s +cpu [1-9]",
                           told[0], re.M)
        peers = re.findall(r"^\S*p0 +up +\S+ +\d+ us +(\S+) \w*B/s +0 B/s ", told[0], re.M)
        # this process may have stood still in any one of them
        assert proc.returncode == 0 and told[0].count("WAITS FOR") == 8, told
        assert any(float(ok) > 0 and float(moved) > 0 for ok, moved in heads), told
        assert any(float(moved) > 0 for moved in peers), told
        assert re.search("^5000 +recv +waiting_for_input .*an engine of peer", told[0], re.M), told


def tables_without_a_terminal_are_whole():
    with Pair() as p:
        done = subprocess.run([CTL, "--socket", p.b.socket_path, "top", "--count", "2"] +
                              FAST, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done
        assert len(re.findall("NAME +STATE +TRANSPORT", done.stdout)) == 2 and "5000" in done.stdout, done
        assert "\x1b" not in done.stdout and "\u202e" not in done.stdout, done.stdout
        for wrong in (["top", "--interval", "soon"], ["top", "--interval", "1ms"],
                      ["--json", "top"], ["status", "--count", "1"]):
            done = subprocess.run([CTL, "--socket", p.b.socket_path] + wrong,
                                  capture_output=True, text=True, stdin=subprocess.DEVNULL,
                                  timeout=DEADLINE_S)
            assert done.returncode == 2 and not done.stdout, (wrong, done)


def frame_on_a_terminal_replaces_the_one_before():
    with Pair() as p, top(p.b) as s:
        shown = s.until("an engine of peer p0")
        assert re.search(r"^d0 +kvd [\d.]+ +serving +up ", shown), shown
        assert "WAITS FOR" in shown and "LAST ERROR" in shown, shown
        assert "5000" in shown and "\u202e" not in shown, shown
        p.decode.cmd("room.abort", room="5000", role="recv")
        p.decode.until(5000, "recv", FAILED)
        shown = s.until("5000", shown=False)
        assert shown.count("WAITS FOR") == 1, shown
        assert s.end(signal.SIGINT) == -signal.SIGINT and s.restored()


def small_terminal_has_whole_frames():
    with Pair() as p, top(p.b, rows=12, columns=50) as s:
        s.until("5000")
        for rows, columns in ((6, 30), (3, 10), (1, 1), (24, 90)):
            s.size(rows, columns)
            s.raw = b""
            while s.raw.count(b"\x1b[H") < 3:
                s.read(0.05)
        s.until("5000")


def rows_beyond_the_screen_are_counted():
    with Pair() as p:
        for room in range(6000, 6030):
            p.prefill.cmd("room.open", room=str(room), role="send", pool=p.src.pool)
        with top(p.a, rows=20) as s:
            shown = s.until(" more").splitlines()
            listed = [line for line in shown if re.match(r"(50|60)\d\d +send", line)]
            more = [int(line.split()[1]) for line in shown if line.startswith("\u2026")]
            assert len(listed) + sum(more) == 31 and len(shown) <= 20, shown


def lost_daemon_is_reported_and_reconnected():
    with tempfile.TemporaryDirectory() as run_dir:
        with Daemon(run_dir=run_dir, name="d0") as d:
            with Screen([CTL, "-n", "d0", "--timeout", "1", "top"] + FAST,
                        env={"KVD_RUN_DIR": run_dir}) as s:
                s.until_raw("serving")
                assert d.stop() == 0
                s.until_raw("no reply")
                # its socket in the hands of a service manager: to look must not start it
                held = socket.socket(socket.AF_UNIX)
                held.bind(run_dir + "/d0.sock")
                held.listen(1)
                held.setblocking(False)
                s.until_raw("stopped")
                s.raw = b""
                while s.raw.count(b"no reply") < 4:
                    s.read_raw(0.05)
                try:
                    held.accept()
                    raise AssertionError("it connected")
                except BlockingIOError:
                    pass
                held.close()
                os.unlink(run_dir + "/d0.sock")
                d.start().wait_ready()
                for step in (lambda: None, d.freeze, d.thaw):
                    step()
                    s.raw = b""
                    s.until_raw("no reply" if step == d.freeze else "serving")


def drain_waits_and_names_the_reason():
    with Pair() as p:
        with Screen([CTL, "--socket", p.b.socket_path, "drain", "--wait"]) as s:
            while b"room 5000 waits for" not in s.raw:
                assert s.proc.poll() is None, s.raw
                s.read_raw(0.05)
            p.decode.cmd("room.abort", room="5000", role="recv")
            while s.proc.poll() is None:
                s.read_raw(0.05)
            s.read_raw(0.05)
            assert s.proc.returncode == 0 and b"stopped" in s.raw, s.raw
        assert p.b.wait() == 0


run([frames_show_rates_between_samples, tables_without_a_terminal_are_whole,
     frame_on_a_terminal_replaces_the_one_before, small_terminal_has_whole_frames,
     rows_beyond_the_screen_are_counted, lost_daemon_is_reported_and_reconnected,
     drain_waits_and_names_the_reason])
