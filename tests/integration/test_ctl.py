#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl as an operator and a script meet it."""
import json
import os
import stat
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, for_everyone, need_users, run  # noqa: E402


def ctl(*args, env=None, stdin=None, program=BUILD + "/kvd-ctl", **ids):
    """Run kvd-ctl: (status, stdout, stderr). No environment but `env`."""
    done = subprocess.run([program] + list(args), capture_output=True, text=True,
                          input=stdin or "", timeout=DEADLINE_S, **ids,
                          env=dict({"PATH": os.environ["PATH"]}, **(env or {})))
    return done.returncode, done.stdout, done.stderr


def at(d, *args, **kw):
    return ctl("--socket", d.socket_path, *args, **kw)


def command_line_wrong_is_2():
    for args in ([], ["bogus"], ["room"], ["room", "1", "2"], ["status", "extra"],
                 ["--bogus"], ["status", "--bogus"], ["ping", "--role", "send"],
                 ["rooms", "--limit", "0"], ["rooms", "--limit", "x"],
                 ["--timeout", "-1", "ping"], ["call", "ping", "[1]"], ["call", "ping", "{"]):
        status, out, err = ctl(*args)
        assert status == 2 and out == "" and err, (args, status, out, err)


def help_is_there_for_every_command():
    status, out, _ = ctl("--help")
    assert status == 0
    lines = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    names = [line.split()[0] for line in lines]
    assert len(names) >= 15 and "keygen" in names, names
    for name in names:
        status, out, err = ctl("help", name)
        assert status == 0 and out.startswith("Usage: kvd-ctl [OPTIONS] " + name), (out, err)
        assert ctl(name, "--help")[1] == out, name


def no_daemon_is_3_and_names_the_path():
    with tempfile.TemporaryDirectory() as empty:
        for args, env, words in (
                (["--socket", empty + "/x.sock"], {}, empty + "/x.sock"),
                (["--name", "gpu7"], {"KVD_RUN_DIR": empty}, empty + "/gpu7.sock"),
                ([], {"KVD_RUN_DIR": empty}, empty),
                ([], {"KVD_SOCKET": empty + "/y.sock"}, empty + "/y.sock")):
            status, out, err = ctl(*args, "status", env=env)
            assert status == 3 and out == "", (args, status, out)
            assert words in err and "is it running?" in err, err


def socket_is_found_by_environment_name_and_alone():
    with Daemon(name="solo") as d:
        for args, env in ((["--name", "solo"], {"KVD_RUN_DIR": d.run_dir}),
                          ([], {"KVD_RUN_DIR": d.run_dir}),
                          ([], {"KVD_SOCKET": d.socket_path})):
            status, out, err = ctl(*args, "status", env=env)
            assert status == 0 and "\nname         solo\n" in out, (args, out, err)


def permission_refused_names_the_group():
    need_users(65534)
    with Daemon() as d:
        os.chmod(d.run_dir, 0o755)
        status, _, err = at(d, "status", user=65534, group=65534, extra_groups=[],
                            program=for_everyone("kvd-ctl"))
        assert status == 3 and "permission denied" in err and "usermod -aG" in err, err


def text_and_json_tell_the_same():
    with Daemon() as d:
        status, text, _ = at(d, "status")
        assert status == 0
        status, out, _ = at(d, "status", "--json")
        told = json.loads(out)
        assert status == 0 and told["pid"] == d.proc.pid, told
        for key in ("daemon", "name", "instance", "endpoint", "state"):
            assert told[key] in text, key
        for noun in ("rooms", "peers", "regions", "pools", "sessions"):
            status, out, err = at(d, "-j", noun)
            assert status == 0 and isinstance(json.loads(out)[noun], list), (noun, err)
            status, out, err = at(d, noun)
            assert status == 0 and out.splitlines()[0].isupper(), (noun, out, err)
        status, out, _ = at(d, "stats")
        assert status == 0 and out.startswith("NAME")
        status, out, _ = at(d, "sessions")
        assert out.count("this one") == 1, out


def health_is_fit_for_a_probe():
    with Daemon() as d:
        status, out, _ = at(d, "health")
        assert status == 0 and "serving" in out, out
    assert at(d, "health")[0] == 3


def ping_counts():
    with Daemon() as d:
        status, out, _ = at(d, "ping", "--count", "50")
        assert status == 0 and out.startswith("50 round trips"), out
        told = json.loads(at(d, "ping", "--json")[1])
        assert told["count"] == 1 and told["min_us"] <= told["max_us"], told


def call_passes_any_command():
    with Daemon() as d:
        status, out, _ = at(d, "call", "help", '{"command": "ping"}')
        told = json.loads(out)
        assert status == 0 and told["commands"][0]["name"] == "ping", told
        assert "id" not in told and "ok" not in told
        status, out, _ = at(d, "call", "help", "-", stdin='{"command":"hello"}\n')
        assert status == 0 and json.loads(out)["commands"][0]["name"] == "hello"


def error_answer_is_1_with_its_code():
    with Daemon() as d:
        status, out, err = at(d, "call", "no.such")
        assert status == 1 and out == "" and "ENOCMD" in err, (out, err)
        status, out, err = at(d, "--json", "call", "no.such")
        assert status == 1 and json.loads(out)["error"]["code"] == "ENOCMD", out
        status, _, err = at(d, "room", "17")
        assert status == 1 and "room 17: not open" in err, err
        status, _, err = at(d, "abort", "17", "--reason", "test")
        assert status == 1 and "ENOTFOUND" in err, err
        status, _, err = at(d, "room", "minus one")
        assert status == 1 and "EINVAL" in err, err


def log_level_is_shown_and_set():
    with Daemon() as d:
        assert at(d, "log")[1] == "info\n"
        assert at(d, "log", "debug")[1] == "debug, was info\n"
        assert at(d, "log")[1] == "debug\n"
        status, _, err = at(d, "log", "loud")
        assert status == 1 and "EINVAL" in err, err


def drain_ends_an_idle_daemon():
    with Daemon() as d:
        status, out, err = at(d, "drain")
        assert status == 0 and "draining" in out, (out, err)
        assert d.wait() == 0


def keygen_writes_a_secret_once():
    alphabet = set("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                   ".-:+=^!/*?&<>()[]{}@%$#")
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "secret")
        status, public, _ = ctl("keygen", path)
        with open(path) as f:
            secret = f.read()
        assert status == 0 and stat.S_IMODE(os.stat(path).st_mode) == 0o600
        for key in (public, secret):
            assert len(key) == 41 and key[-1] == "\n" and set(key[:-1]) <= alphabet, key
            assert key[0] != "#"
        status, out, err = ctl("keygen", path)
        assert status == 1 and out == "" and "exists" in err, err
        with open(path) as f:
            assert f.read() == secret
    status, out, _ = ctl("keygen", "--json")
    keys = json.loads(out)
    assert status == 0 and len(keys["public"]) == len(keys["secret"]) == 40


def keys_of_keygen_let_two_daemons_meet():
    with tempfile.TemporaryDirectory() as tmp:
        with open(tmp + "/allow", "w") as allow:
            for name in ("a", "b"):
                allow.write("%s %s" % (name, ctl("keygen", tmp + "/" + name)[1]))
        options = "[peer]\ncurve_secret_file = %s/%s\ncurve_allow_file = %s/allow\n"
        with Daemon(options % (tmp, "a", tmp), name="a") as a, \
                Daemon(options % (tmp, "b", tmp), name="b") as b:
            endpoint = json.loads(at(b, "-j", "status")[1])["endpoint"]
            status, out, err = at(a, "call", "peer.connect",
                                  json.dumps({"endpoint": endpoint}))
            assert status == 0 and json.loads(out)["state"] == "up", (out, err)
            status, out, _ = at(a, "peers")
            assert status == 0 and " up " in out, out


if __name__ == "__main__":
    run([
        command_line_wrong_is_2,
        help_is_there_for_every_command,
        no_daemon_is_3_and_names_the_path,
        socket_is_found_by_environment_name_and_alone,
        permission_refused_names_the_group,
        text_and_json_tell_the_same,
        health_is_fit_for_a_probe,
        ping_counts,
        call_passes_any_command,
        error_answer_is_1_with_its_code,
        log_level_is_shown_and_set,
        drain_ends_an_idle_daemon,
        keygen_writes_a_secret_once,
        keys_of_keygen_let_two_daemons_meet,
    ])
