# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.router pick and scale as they are run, on groups from files, and on a daemon's."""
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, until
from kvd.router.__main__ import main
from kvd_daemon import DEADLINE_S
from router_daemon import Directory

ROUTER = [sys.executable, "-m", "kvd.router"]


class Done:
    """The end of a command that ran in this process."""

    def __init__(self, status, out):
        self.returncode, self.stdout, self.stderr = status, out.out, out.err


@pytest.fixture
def run(capfd, monkeypatch):
    """run(ARGV…, lines=…) -> Done; lines: its standard input."""
    def of(*args, lines=()):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            status = main(list(args))
        except SystemExit as end:
            status = end.code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return Done(status, capfd.readouterr())
    return of


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


def test_pick_names_the_pair_and_why(run):
    done = run("pick", "--json", "--from", "-", "--prompt", "1000", lines=[look([]), PAIRS])
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert told["prefill"]["worker"] == "p1" and told["decode"]["worker"] == "d1", told
    rows = told["scores"]["prefill"]
    assert [r["worker"] for r in rows] == ["p1", "p0", "p2"], rows
    assert rows[2]["state"] == "draining" and abs(rows[0]["compute_s"] - 0.1) < 1e-6, rows
    assert [r["last_resort"] for r in told["scores"]["decode"]] == [False, True], told
    text = run("pick", "--from", "-", "--prompt", "1000", lines=[PAIRS])
    assert text.returncode == 0 and "prefill  p1" in text.stdout, text
    assert re.search(r"d0 .*no room for KV", text.stdout), text.stdout
    near = run("pick", "--json", "--from", "-", "--prompt", "20000", "--near", "p0=18000",
               lines=[PAIRS])
    assert json.loads(near.stdout)["prefill"]["worker"] == "p0", near


def test_pick_without_a_worker_fails(run):
    done = run("pick", "--json", "--from", "-", lines=[look([rank("p0", "draining")])])
    assert done.returncode == 1 and "no worker" in done.stderr, done
    told = json.loads(done.stdout)
    assert told["prefill"] is None and told["scores"]["prefill"][0]["worker"] == "p0", told


def test_groups_of_other_names_are_read(run):
    lines = [{"groups": {"a": {"ranks": [rank("x")]}, "b": {"ranks": [rank("y\x1b[2J")]}}}]
    done = run("pick", "a", "b", "--from", "-", lines=lines)
    assert done.returncode == 0 and "prefill  x" in done.stdout, done
    assert "\x1b" not in done.stdout, done


@pytest.mark.parametrize("command", ["pick", "scale"])
@pytest.mark.parametrize("lines", [
    [], [7], [[]], [{}], [{"groups": {"prefill": {"ranks": []}}}], [{"groups": 5}],
    [{"groups": {"prefill": {"ranks": [5]}, "decode": {"ranks": []}}}]])
def test_line_without_an_answer_is_refused(run, command, lines):
    done = run(command, "--from", "-", lines=lines)
    assert done.returncode == 1
    assert done.stderr.startswith("kvd.router: -:1: " if lines else "kvd.router: -: empty")


@pytest.mark.parametrize("words", [
    ["pick", "a", "--from", "-"], ["pick", "--near", "x"], ["pick", "--near", "=1"],
    ["pick", "--near", "x=1y"], ["pick", "--prompt", "-1"], ["pick", "--hook", "/bin/true"],
    ["scale", "--prefill", "3:2"], ["scale", "--decode", "0:2"], ["scale", "--start", "soon"],
    ["scale", "--interval", "1ms"], ["scale", "--interval", "2h"], ["scale", "--busy", "101"],
    ["scale", "--hook", "/nowhere"], ["scale", "--prompt", "7"], ["scale", "--count", "0"]])
def test_wrong_option_is_refused(run, words):
    done = run(*words)
    assert done.returncode == 2 and "error: " in done.stderr


def test_missing_file_or_daemon_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVD_RUN_DIR", str(tmp_path))
    for command in ("pick", "scale"):
        done = run(command, "--from", "/nowhere/at/all")
        assert done.returncode == 1 and "/nowhere/at/all: No such file" in done.stderr
        done = run(command)
        assert done.returncode == 1 and "ENODAEMON" in done.stderr


def test_scale_matches_the_load(run):
    done = run("scale", "--json", "--from", "-", "--prefill", "2:20",
               lines=[busy(4, 10000, 1e6, seq) for seq in range(1, 30)])
    assert done.returncode == 0, done
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 29 and told[0]["changed"]
    # 40 000 a second of workers of 10 000, of which 70 % are to be used; and a queue
    assert 6 <= told[-1]["prefill"]["wanted"] <= 10, told[-1]
    assert told[-1]["decode"]["wanted"] == 1 and told[-1]["prefill"]["workers"] == 4, told[-1]
    up = [t["prefill"]["wanted"] for t in told]
    assert up == sorted(up), up
    most = run("scale", "--json", "--from", "-", "--prefill", "2:5",
               lines=[busy(4, 10000, 1e6, seq) for seq in range(1, 30)])
    assert json.loads(most.stdout.splitlines()[-1])["prefill"]["wanted"] == 5, most
    text = run("scale", "--from", "-", lines=[busy(4, 10000, 0, seq) for seq in range(1, 30)])
    assert text.returncode == 0 and text.stdout.count("WANTED") in (1, 2), text.stdout
    assert len(run("scale", "--json", "--from", "-", "--count", "3", lines=[
        busy(4, 10000, 0, seq) for seq in range(1, 30)]).stdout.splitlines()) == 3


def test_metrics_are_a_file_for_the_collector(run, tmp_path):
    folder = str(tmp_path)
    path = os.path.join(folder, "kvd.prom")
    lines = [{"groups": {'a"\\': {"ranks": [rank("x", prompt_tokens_s=1000)]},
                         "b": {"ranks": []}}}]
    done = run("scale", 'a"\\', "b", "--from", "-", "--metrics", path, lines=lines)
    assert done.returncode == 0, done
    with open(path) as file:
        text = file.read()
    assert 'kvd_scale_wanted{group="a\\"\\\\"} 2\n' in text, text
    assert 'kvd_scale_known{group="b"} 0\n' in text and text.count("# TYPE") == 6, text
    assert os.listdir(folder) == ["kvd.prom"]
    done = run("scale", "--from", "-", "--metrics", folder + "/no/where", lines=[busy(1, 1)])
    assert done.returncode == 1 and "no/where" in done.stderr, done


def script(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write("#!/bin/sh\n" + text)
    os.chmod(path, 0o755)
    return path


def test_hook_runs_when_numbers_change(run, tmp_path):
    folder = str(tmp_path)
    out = os.path.join(folder, "out")
    hook = script(folder, "hook", 'echo printed\n'
                  'echo "$KVD_SCALE_PREFILL $KVD_SCALE_PREFILL_BEFORE '
                  '$KVD_SCALE_PREFILL_WORKERS $KVD_SCALE_DECODE $KVD_SCALE_DECODE_GROUP" '
                  '>>%s\n' % out)
    done = run("scale", "--json", "--from", "-", "--hook", hook,
               lines=[busy(4, 10000, 1e6, seq) for seq in range(1, 30)])
    assert done.returncode == 0, done
    assert "printed" not in done.stdout and "printed" in done.stderr, done
    last = json.loads(done.stdout.splitlines()[-1])
    with open(out) as file:
        runs = [line.split() for line in file]
    # it is seen at looks, which a file has at once: the first change, and the last
    assert runs[0][1:] == ["0", "4", "1", "decode"], runs
    assert runs[-1][0] == str(last["prefill"]["wanted"]), (runs, last)


def test_hook_never_runs_twice_at_a_time(tmp_path):
    folder = str(tmp_path)
    # the first runs until all looks are over: what changed since is of one more
    hook = script(folder, "hook", 'cd %s\necho run >>runs\nmkdir lock || echo twice >>runs\n'
                  'until [ -e over ]; do :; done\nrmdir lock\n' % folder)
    path = os.path.join(folder, "lines")
    with open(path, "w") as file:
        file.writelines(json.dumps(busy(4, 10000, 1e6 * seq, seq)) + "\n"
                        for seq in range(1, 20))
    with subprocess.Popen([*ROUTER, "scale", "--json", "--from", path, "--hook", hook,
                           "--up", "1s"], stdout=subprocess.PIPE, text=True) as proc:
        told = [json.loads(proc.stdout.readline()) for _ in range(1, 20)]
        open(os.path.join(folder, "over"), "w").close()
        assert proc.wait(DEADLINE_S) == 0
    assert sum(t["changed"] for t in told) > 2, told
    with open(os.path.join(folder, "runs")) as file:
        assert file.read().split() == ["run", "run"]


def test_hanging_or_failing_hook_is_ended(run, tmp_path):
    folder = str(tmp_path)
    # a child of it that would go on
    hook = script(folder, "hook", "(read x </dev/zero; echo no) &\nread x </dev/zero\n")
    begun = time.monotonic()
    done = run("scale", "--from", "-", "--hook", hook, "--hook-limit", "300ms",
               lines=[busy(4, 10000)])
    assert done.returncode == 0 and time.monotonic() - begun < 20, done
    # it failed, so it was run once more
    assert done.stderr.count("signal 9, at its time limit") == 2, done.stderr
    failing = script(folder, "failing", "exit 3\n")
    path = os.path.join(folder, "kvd.prom")
    done = run("scale", "--from", "-", "--hook", failing, "--metrics", path,
               lines=[busy(4, 10000), busy(4, 10000, 0, 2)])
    assert "exit status 3" in done.stderr, done.stderr


class Daemon(Directory):
    """It closes the connection at the second query of the group prefill."""

    def _reply(self, line, said, mine, published):
        if said.get("group") == "prefill" and self.queries("prefill") == 2:
            raise OSError
        super()._reply(line, said, mine, published)

    def queries(self, group):
        return sum(said.get("group") == group for said in self.asked)


def test_lost_daemon_is_queried_again(run, tmp_path):
    """The hook fails at first."""
    folder = str(tmp_path)
    daemon = Daemon(folder + "/s").start()
    for group, answer in busy(4, 10000)["groups"].items():
        for entry in answer["ranks"]:
            daemon.put(group, entry["worker"], entry)
    path = folder + "/kvd.prom"
    hook = script(folder, "hook", 'cd %s\nif mkdir once; then exit 1; fi\n'
                  'echo "$KVD_SCALE_PREFILL" >>out\n' % folder)
    done = run("scale", "--json", "--socket", daemon.path, "--interval", "1s", "--count", "4",
               "--metrics", path, "--hook", hook)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [t["prefill"]["known"] for t in told] == [True, False, True, True], told
    assert {t["prefill"]["wanted"] for t in told} == {told[0]["prefill"]["wanted"]}, told
    assert [t["changed"] for t in told] == [True, False, False, False], told
    assert "kvd.router: E" in done.stderr and "exit status 1" in done.stderr, done.stderr
    assert all(said["loads"] is True for said in daemon.asked if said["cmd"] == "group.query")
    with open(path) as file:
        text = file.read()
    assert "kvd_scale_lost_total 1\n" in text, text
    assert "kvd_scale_hook_failures_total 1\n" in text, text
    with open(folder + "/out") as file:
        assert file.read().split() == [str(told[0]["prefill"]["wanted"])]
    one = run("pick", "--json", "--socket", daemon.path, "--prompt", "100")
    assert one.returncode == 0 and json.loads(one.stdout)["decode"]["worker"] == "d0", one.stderr
    daemon.stop()


def test_command_without_aiohttp_runs(tmp_path):
    """pick and scale run in an image that has only the wheel and numpy."""
    (tmp_path / "aiohttp.py").write_text("raise ImportError")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command, status in (("pick", 1), ("scale", 0), ("members", 1)):
        done = subprocess.run([*ROUTER, command, "--from", "-"], env=env, timeout=DEADLINE_S,
                              input=json.dumps(look([])), capture_output=True, text=True)
        assert done.returncode == status and (
            "aiohttp" in done.stderr) == (command == "members"), done


def test_example_hook_starts_and_stops_units(tmp_path):
    example = os.path.join(ROOT, "contrib", "scale", "hook.sh")
    folder = str(tmp_path)  # units that run are files
    fake = script(folder, "systemctl", 'cd %s\ncase $2 in\nstart) : >$3 ;;\nstop) rm $3 ;;\n'
                   'is-active) test -e $3 ;;\n*) exit 9 ;;\nesac\n' % folder)
    for prefill, decode in ((3, 1), (1, 2), (0, 2)):
        subprocess.run([example], check=True, timeout=DEADLINE_S, env={
            **os.environ, "SYSTEMCTL": fake, "KVD_SCALE_PREFILL": str(prefill),
            "KVD_SCALE_DECODE": str(decode)})
        there = sorted(set(os.listdir(folder)) - {"systemctl"})
        assert there == sorted(["prefill@%d" % i for i in range(prefill)] +
                               ["decode@%d" % i for i in range(decode)]), there


def test_hook_is_killed_with_its_command(tmp_path):
    folder = str(tmp_path)
    hook = script(folder, "hook", "cd %s\nexec 3>pipe\n: >ready\nread x </dev/zero\n" % folder)
    os.mkfifo(folder + "/pipe")
    pipe = os.open(folder + "/pipe", os.O_RDONLY | os.O_NONBLOCK)
    with open(folder + "/lines", "w") as file:
        file.write(json.dumps(busy(4, 10000)))
    with subprocess.Popen([*ROUTER, "scale", "--from", file.name, "--hook", hook]) as proc:
        until(lambda: os.path.exists(folder + "/ready"))
        proc.terminate()
        assert proc.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert select.select([pipe], [], [], DEADLINE_S)[0] and os.read(pipe, 1) == b"", "it writes"
    os.close(pipe)
