#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl pick and kvd-ctl scale as they are run, on groups from files."""
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, run  # noqa: E402


def ctl(*args, lines=None, env=None):
    given = None if lines is None else "".join(json.dumps(line) + "\n" for line in lines)
    return subprocess.run([BUILD + "/kvd-ctl", *args], capture_output=True, text=True,
                          input=given, timeout=DEADLINE_S, env=env)


def rank(worker, state="serving", seq=1, **engine):
    return {"worker": worker, "tp_rank": 0, "tp_size": 1, "endpoint": "tcp://10.0.0.1:18515",
            "state": state, "load": {"v": 1, "seq": seq, "gbps": 10, "engine": engine}}


def look(prefill, decode=(), **more):
    return {"groups": {"prefill": {"revision": 1, "ranks": list(prefill)},
                       "decode": {"revision": 1, "ranks": list(decode)}}, **more}


def busy(count, tokens_s, waiting=0, seq=1):
    """Prefill workers that compute so much each; decode workers of which half is in use."""
    return look([rank("p%d" % i, seq=seq, prompt_tokens_s=tokens_s,
                      prompt_tokens_waiting=waiting / count) for i in range(count)],
                [rank("d0", seq=seq, kv_total_tokens=1000, kv_free_tokens=500, running=5)],
                at=seq * 10)


PAIRS = look([rank("p0", prompt_tokens_waiting=9000, prompt_tokens_s=10000),
              rank("p1", prompt_tokens_waiting=100, prompt_tokens_s=10000),
              rank("p2", "draining", prompt_tokens_waiting=0)],
             [rank("d0", kv_total_tokens=10000, kv_free_tokens=100),
              rank("d1", kv_total_tokens=10000, kv_free_tokens=9000)])


def pick_names_the_pair_and_why():
    done = ctl("--json", "pick", "--from", "-", "--prompt", "1000", lines=[look([]), PAIRS])
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert told["prefill"]["worker"] == "p1" and told["decode"]["worker"] == "d1", told
    rows = told["scores"]["prefill"]
    assert [r["worker"] for r in rows] == ["p1", "p0", "p2"], rows
    assert rows[2]["state"] == "draining" and abs(rows[0]["compute_s"] - 0.1) < 1e-6, rows
    assert [r["last_resort"] for r in told["scores"]["decode"]] == [False, True], told
    text = ctl("pick", "--from", "-", "--prompt", "1000", lines=[PAIRS])
    assert text.returncode == 0 and "prefill  p1" in text.stdout, text
    assert re.search(r"d0 .*no room for its KV", text.stdout), text.stdout
    near = ctl("--json", "pick", "--from", "-", "--prompt", "20000", "--near", "p0=18000",
               lines=[PAIRS])
    assert json.loads(near.stdout)["prefill"]["worker"] == "p0", near


def pick_without_a_worker_fails():
    done = ctl("--json", "pick", "--from", "-", lines=[look([rank("p0", "draining")])])
    assert done.returncode == 1 and "no worker" in done.stderr, done
    told = json.loads(done.stdout)
    assert told["prefill"] is None and told["scores"]["prefill"][0]["worker"] == "p0", told


def other_groups_are_named():
    lines = [{"groups": {"a": {"ranks": [rank("x")]}, "b": {"ranks": [rank("y\x1b[2J")]}}}]
    done = ctl("pick", "a", "b", "--from", "-", lines=lines)
    assert done.returncode == 0 and "prefill  x" in done.stdout, done
    assert "\x1b" not in done.stdout, done


def what_is_not_an_answer_is_refused():
    for lines in ([], [7], [{}], [{"groups": {"prefill": {"ranks": []}}}],
                  [{"groups": {"prefill": {"ranks": [5]}, "decode": {"ranks": []}}}]):
        for command in ("pick", "scale"):
            done = ctl(command, "--from", "-", lines=lines)
            assert done.returncode == 1 and "kvd-ctl: -:1:" in done.stderr.replace(
                "-: no line", "-:1:"), (lines, done)
    assert ctl("pick", "--from", "/nowhere/at/all").returncode == 1
    assert ctl("pick", "a", "--from", "-").returncode == 2
    for words in (["pick", "--near", "x"], ["pick", "--near", "=1"], ["pick", "--near", "x=1y"],
                  ["scale", "--prefill", "3:2"], ["scale", "--decode", "0:2"],
                  ["scale", "--start", "soon"], ["scale", "--interval", "1ms"],
                  ["scale", "--busy", "101"], ["scale", "--hook", "/nowhere"],
                  ["pick", "--hook", "/bin/true"], ["scale", "--prompt", "7"]):
        done = ctl(*words)
        assert done.returncode == 2 and "--" in done.stderr, (words, done)
    with tempfile.TemporaryDirectory() as empty:
        for command in ("pick", "scale"):
            assert ctl(command, env={"KVD_RUN_DIR": empty}).returncode == 3


def scale_wants_what_the_load_needs():
    done = ctl("--json", "scale", "--from", "-", "--prefill", "2:20",
               lines=[busy(4, 10000, 1e6, seq) for seq in range(1, 30)])
    assert done.returncode == 0, done
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 29 and told[0]["changed"]
    # 40 000 a second of workers of 10 000, of which 70 % are to be used; and a queue
    assert 6 <= told[-1]["prefill"]["wanted"] <= 10, told[-1]
    assert told[-1]["decode"]["wanted"] == 1 and told[-1]["prefill"]["workers"] == 4, told[-1]
    up = [t["prefill"]["wanted"] for t in told]
    assert up == sorted(up), up
    most = ctl("--json", "scale", "--from", "-", "--prefill", "2:5",
               lines=[busy(4, 10000, 1e6, seq) for seq in range(1, 30)])
    assert json.loads(most.stdout.splitlines()[-1])["prefill"]["wanted"] == 5, most
    text = ctl("scale", "--from", "-", lines=[busy(4, 10000, 0, seq) for seq in range(1, 30)])
    assert text.returncode == 0 and text.stdout.count("WANTED") in (1, 2), text.stdout
    assert len(ctl("--json", "scale", "--from", "-", "--count", "3", lines=[
        busy(4, 10000, 0, seq) for seq in range(1, 30)]).stdout.splitlines()) == 3


def metrics_are_a_file_for_the_collector():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kvd.prom")
        lines = [{"groups": {'a"\\': {"ranks": [rank("x", prompt_tokens_s=1000)]},
                             "b": {"ranks": []}}}]
        done = ctl("scale", 'a"\\', "b", "--from", "-", "--metrics", path, lines=lines)
        assert done.returncode == 0, done
        with open(path) as file:
            text = file.read()
        assert 'kvd_scale_wanted{group="a\\"\\\\"} 2\n' in text, text
        assert 'kvd_scale_known{group="b"} 0\n' in text and text.count("# TYPE") == 6, text
        assert os.listdir(folder) == ["kvd.prom"]
        done = ctl("scale", "--from", "-", "--metrics", folder + "/no/where", lines=[busy(1, 1)])
        assert done.returncode == 1 and "no/where" in done.stderr, done


def script(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write("#!/bin/sh\n" + text)
    os.chmod(path, 0o755)
    return path


def hook_runs_when_numbers_change():
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        hook = script(folder, "hook", 'echo printed\n'
                      'echo "$KVD_SCALE_PREFILL $KVD_SCALE_PREFILL_BEFORE '
                      '$KVD_SCALE_PREFILL_WORKERS $KVD_SCALE_DECODE $KVD_SCALE_DECODE_GROUP" '
                      '>>%s\n' % out)
        done = ctl("--json", "scale", "--from", "-", "--hook", hook,
                   lines=[busy(4, 10000, 1e6, seq) for seq in range(1, 30)])
        assert done.returncode == 0, done
        assert "printed" not in done.stdout and "printed" in done.stderr, done
        last = json.loads(done.stdout.splitlines()[-1])
        with open(out) as file:
            runs = [line.split() for line in file]
        # it is seen at looks, which a file has at once: the first change, and the last
        assert runs[0][1:] == ["0", "4", "1", "decode"], runs
        assert runs[-1][0] == str(last["prefill"]["wanted"]), (runs, last)


def hook_never_runs_twice_at_a_time():
    with tempfile.TemporaryDirectory() as folder:
        # the first runs until all looks are over: what changed since is of one more
        hook = script(folder, "hook", 'cd %s\necho run >>runs\nmkdir lock || echo twice >>runs\n'
                      'until [ -e over ]; do :; done\nrmdir lock\n' % folder)
        path = os.path.join(folder, "lines")
        with open(path, "w") as file:
            file.writelines(json.dumps(busy(4, 10000, 1e6 * seq, seq)) + "\n"
                            for seq in range(1, 20))
        with subprocess.Popen([BUILD + "/kvd-ctl", "--json", "scale", "--from", path, "--hook", hook,
                               "--up", "1s"], stdout=subprocess.PIPE, text=True) as proc:
            told = [json.loads(proc.stdout.readline()) for _ in range(1, 20)]
            open(os.path.join(folder, "over"), "w").close()
            assert proc.wait(DEADLINE_S) == 0
        assert sum(t["changed"] for t in told) > 2, told
        with open(os.path.join(folder, "runs")) as file:
            assert file.read().split() == ["run", "run"]


def hook_that_hangs_or_fails_is_ended():
    with tempfile.TemporaryDirectory() as folder:
        # a child of it that would go on
        hook = script(folder, "hook", "(read x </dev/zero; echo no) &\nread x </dev/zero\n")
        begun = time.monotonic()
        done = ctl("scale", "--from", "-", "--hook", hook, "--hook-limit", "300ms",
                   lines=[busy(4, 10000)])
        assert done.returncode == 0 and time.monotonic() - begun < 20, done
        # it failed, so it was run once more
        assert done.stderr.count("signal 9, at its time limit") == 2, done.stderr
        failing = script(folder, "failing", "exit 3\n")
        path = os.path.join(folder, "kvd.prom")
        done = ctl("scale", "--from", "-", "--hook", failing, "--metrics", path,
                   lines=[busy(4, 10000), busy(4, 10000, 0, 2)])
        assert "exit status 3" in done.stderr, done.stderr


class Between:
    """A socket before a daemon's, which answers group.query itself: the n-th of a group by the
    n-th of its answers; None ends the connection."""

    def __init__(self, path, daemon, answers):
        self.path, self.daemon, self.answers, self.asked = path, daemon, answers, []
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(path)
        self.sock.listen(8)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            here = self.sock.accept()[0]
            there = socket.socket(socket.AF_UNIX)
            there.connect(self.daemon)
            threading.Thread(target=self.back, args=(here, there), daemon=True).start()
            threading.Thread(target=self.forth, args=(here, there), daemon=True).start()

    @staticmethod
    def back(here, there):
        """What the daemon says, with its descriptors."""
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(there, 65536, 16)
                if not data:
                    break
                socket.send_fds(here, [data], fds)
                for fd in fds:
                    os.close(fd)
        except OSError:
            pass

    def forth(self, here, there):
        text = b""
        while True:
            data = here.recv(65536)
            if not data:
                there.shutdown(socket.SHUT_RDWR)
                return
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                if asked["cmd"] != "group.query":
                    there.sendall(line + b"\n")
                    continue
                self.asked.append(asked)
                of = sum(1 for a in self.asked if a["group"] == asked["group"])
                answers = self.answers[asked["group"]]
                answer = answers[min(of, len(answers)) - 1]
                if answer is None:
                    here.shutdown(socket.SHUT_RDWR)
                    there.shutdown(socket.SHUT_RDWR)
                    return
                here.sendall(json.dumps({"id": asked["id"], "ok": True, **answer}).encode() + b"\n")


def daemon_is_asked_again_and_again():
    """It is lost at the second look; the hook fails at first."""
    with Daemon() as kvd, tempfile.TemporaryDirectory() as folder:
        prefill, decode = (busy(4, 10000)["groups"][side] for side in ("prefill", "decode"))
        between = Between(folder + "/s", kvd.socket_path, {
            "prefill": [prefill, None, prefill], "decode": [decode]})
        path = folder + "/kvd.prom"
        hook = script(folder, "hook", 'cd %s\nif mkdir once; then exit 1; fi\n'
                      'echo "$KVD_SCALE_PREFILL" >>out\n' % folder)
        done = ctl("--json", "--socket", between.path, "scale", "--interval", "1s", "--count", "4",
                   "--metrics", path, "--hook", hook, "--at", "tcp://127.0.0.1:7")
        assert done.returncode == 0, done
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert [t["prefill"]["known"] for t in told] == [True, False, True, True], told
        assert {t["prefill"]["wanted"] for t in told} == {told[0]["prefill"]["wanted"]}, told
        assert [t["changed"] for t in told] == [True, False, False, False], told
        assert "kvd-ctl: E" in done.stderr and "exit status 1" in done.stderr, done.stderr
        assert all(a["loads"] is True and a["at"] == "tcp://127.0.0.1:7" for a in between.asked)
        with open(path) as file:
            text = file.read()
        assert "kvd_scale_lost_total 1\n" in text, text
        assert "kvd_scale_hook_failures_total 1\n" in text, text
        with open(folder + "/out") as file:
            assert file.read().split() == [str(told[0]["prefill"]["wanted"])]
        one = ctl("--json", "--socket", between.path, "pick", "--prompt", "100")
        assert one.returncode == 0 and json.loads(one.stdout)["decode"]["worker"] == "d0", one


def example_hook_starts_and_stops_units():
    example = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib",
                           "scale", "hook.sh")
    with tempfile.TemporaryDirectory() as folder:
        # units that run are files
        fake = script(folder, "systemctl", 'cd %s\ncase $2 in\nstart) : >$3 ;;\nstop) rm $3 ;;\n'
                       'is-active) test -e $3 ;;\n*) exit 9 ;;\nesac\n' % folder)
        for prefill, decode in ((3, 1), (1, 2), (0, 2)):
            subprocess.run([example], check=True, timeout=DEADLINE_S, env={
                **os.environ, "SYSTEMCTL": fake, "KVD_SCALE_PREFILL": str(prefill),
                "KVD_SCALE_DECODE": str(decode)})
            there = sorted(set(os.listdir(folder)) - {"systemctl"})
            assert there == sorted(["prefill@%d" % i for i in range(prefill)] +
                                   ["decode@%d" % i for i in range(decode)]), there


if __name__ == "__main__":
    run([pick_names_the_pair_and_why,
         pick_without_a_worker_fails,
         other_groups_are_named,
         what_is_not_an_answer_is_refused,
         scale_wants_what_the_load_needs,
         metrics_are_a_file_for_the_collector,
         hook_runs_when_numbers_change,
         hook_never_runs_twice_at_a_time,
         hook_that_hangs_or_fails_is_ended,
         daemon_is_asked_again_and_again,
         example_hook_starts_and_stops_units])
