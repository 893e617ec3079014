#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl as an operator and a script meet it."""
import contextlib
import json
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import (BUILD, DEADLINE_S, Daemon, Skip, for_everyone,  # noqa: E402
                        free_port, kvd, need_users, run)
from screen import Screen  # noqa: E402


def ctl(*args, env=None, stdin=None, program=BUILD + "/kvd-ctl", **ids):
    """Run kvd-ctl: (status, stdout, stderr). No environment but `env`."""
    done = subprocess.run([program] + list(args), capture_output=True, text=True,
                          input=stdin or "", timeout=DEADLINE_S, **ids,
                          env=dict({"PATH": os.environ["PATH"]}, **(env or {})))
    return done.returncode, done.stdout, done.stderr


def at(d, *args, **kw):
    return ctl("--socket", d.socket_path, *args, **kw)


def invalid_command_line_exits_with_2():
    for args in ([], ["bogus"], ["room"], ["room", "1", "2"], ["status", "extra"],
                 ["--bogus"], ["status", "--bogus"], ["ping", "--role", "send"],
                 ["rooms", "--limit", "0"], ["rooms", "--limit", "x"],
                 ["--timeout", "-1", "ping"], ["call", "ping", "[1]"], ["call", "ping", "{"]):
        status, out, err = ctl(*args)
        assert status == 2 and out == "" and err, (args, status, out, err)


def help_exists_for_every_command():
    status, out, _ = ctl("--help")
    assert status == 0
    lines = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    names = [line.split()[0] for line in lines]
    assert len(names) >= 15 and "keygen" in names, names
    for name in names:
        status, out, err = ctl("help", name)
        assert status == 0 and out.startswith("Usage: kvd-ctl [OPTIONS] " + name), (out, err)
        assert ctl(name, "--help")[1] == out, name


def manual_has_the_options_of_the_help():
    """No option is left out of kvd-ctl(1), and none that was removed is left in it."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "man",
                           "kvd-ctl.1")) as page:
        manual = set(re.findall(r"--[a-z-]+", page.read().replace("\\-", "-")))
    general = ctl("--help")[1]
    names = re.findall(r"^  ([a-z]+) ", general.split("Options:")[0], re.M)
    assert len(names) > 30, names
    helps = [general] + [ctl("help", name)[1] for name in names]
    assert manual == set(re.findall(r"--[a-z-]+", "\n".join(helps)))


def missing_daemon_exits_with_3_and_names_the_path():
    with tempfile.TemporaryDirectory() as empty:
        for args, env, words in (
                (["--socket", empty + "/x.sock"], {}, empty + "/x.sock"),
                (["--name", "gpu7"], {"KVD_RUN_DIR": empty, "KVD_SOCKET": "/x"},
                 empty + "/gpu7.sock"),
                ([], {"KVD_RUN_DIR": empty}, empty),
                ([], {"KVD_SOCKET": empty + "/y.sock"}, empty + "/y.sock")):
            status, out, err = ctl(*args, "status", env=env)
            assert status == 3 and out == "", (args, status, out)
            assert words in err and "is it running?" in err, err


def socket_is_found_by_environment_name_and_alone():
    with Daemon(name="solo") as d:
        for args, env in ((["--name", "solo"], {"KVD_RUN_DIR": d.run_dir, "KVD_SOCKET": "/x"}),
                          (["--socket", d.socket_path], {"KVD_SOCKET": "/x"}),
                          ([], {"KVD_RUN_DIR": d.run_dir}),
                          ([], {"KVD_SOCKET": d.socket_path}),
                          ([], {"KVD_SOCKET": d.socket_path, "KVD_NAME": "x"})):
            status, out, err = ctl(*args, "status", env=env)
            assert status == 0 and "\nname         solo\n" in out, (args, out, err)


def several_daemons_are_named_and_listed():
    with tempfile.TemporaryDirectory() as run_dir:
        env = {"KVD_RUN_DIR": run_dir}
        with Daemon(run_dir=run_dir, name="a") as a, Daemon(run_dir=run_dir, name="b"):
            status, _, err = ctl("status", env=env)
            assert status == 3 and "one of: --name a, b\n" in err, err
            for name in ("a", "b"):  # as the container's health check does
                status, out, _ = ctl("status", env=dict(env, KVD_NAME=name))
                assert status == 0 and "\nname         %s\n" % name in out, out
            held = socket.socket(socket.AF_UNIX)  # by a service manager
            held.bind(run_dir + "/c.sock")
            held.listen(1)
            status, out, _ = ctl("ls", env=env)
            rows = [line.split()[:3] for line in out.splitlines()]
            assert status == 0 and rows[0] == ["NAME", "STATE", "PID"], out
            assert rows[1] == ["a", "serving", str(a.proc.pid)], out
            assert rows[3] == ["c", "stopped", "-"], out
            told = json.loads(ctl("ls", "--json", env=env)[1])["instances"]
            assert [i["name"] for i in told] == ["a", "b", "c"], told
            assert told[1]["daemon"].startswith("kvd ") and told[1]["endpoint"], told
            # a probe does not connect: that would start the daemon
            status, _, err = ctl("--name", "c", "health", env=env)
            assert status == 3 and "c.sock: stopped" in err, err
            held.setblocking(False)
            try:
                held.accept()
                raise AssertionError("it connected")
            except BlockingIOError:
                pass
            held.close()


def other_version_exits_with_4_and_names_both():
    """A daemon that knows another protocol only, and what it answers all the same."""
    asked = []

    def serve(sock):
        while True:
            conn = sock.accept()[0]
            with conn, conn.makefile("rw") as stream:
                line = json.loads(stream.readline() or '{"cmd":"end"}')
                asked.append(line["cmd"])
                if line["cmd"] == "end":
                    return
                answer = {"id": 1, "ok": True, "state": "serving", "daemon": "kvd 9.9",
                          "name": "new", "metrics": [{"name": "x", "value": 7}], "text": "x 7\n"}
                if line["cmd"] == "hello":
                    answer = {"id": 1, "ok": False, "error": {
                        "code": "EVERSION", "scope": "peer", "retryable": False,
                        "message": "proto 1: this daemon, kvd 9.9, speaks 9"}}
                stream.write(json.dumps(answer) + "\n")

    with tempfile.TemporaryDirectory() as tmp, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(tmp + "/s")
        sock.listen(1)
        thread = threading.Thread(target=serve, args=(sock,))
        thread.start()
        for command, words in (("status", "name         new"), ("health", "serving"),
                               ("stats", "x  "), ("stats --prometheus", "x 7")):
            status, out, err = ctl("--socket", tmp + "/s", *command.split())
            assert status == 0 and words in out, (command, status, out, err)
            assert "kvd 9.9, speaks 9" in err and "kvd-ctl is 0." in err, err
        status, _, err = ctl("--socket", tmp + "/s", "rooms")
        assert status == 4 and "kvd 9.9" in err and "kvd-ctl is 0." in err, (status, err)
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(tmp + "/s")
        thread.join()
    assert asked == ["hello", "health"] * 2 + ["hello", "stats"] * 2 + ["hello", "end"], asked
    with Daemon() as d, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(d.socket_path)
        sock.sendall(b'{"id":1,"cmd":"hello","proto":77,"client":"x"}\n')
        assert b"this daemon, kvd " in sock.recv(4096)
        for command in (b"health", b"stats"):
            sock.sendall(b'{"id":2,"cmd":"%s"}\n' % command)
            with sock.makefile("r") as stream:
                assert json.loads(stream.readline())["ok"], command


def configuration_is_shown_compared_and_reloaded():
    with Daemon("[rooms]\noffer_lease = 5 s\n") as d:
        d.expect("change needs a restart option=rooms.rooms")
        status, out, _ = at(d, "config")
        assert status == 0 and "rooms.offer_lease" in out and "5 s" in out, out
        assert json.loads(at(d, "config", "--json")[1])["path"] == d.config_path
        status, out, _ = at(d, "config", "--diff")
        assert (status, out) == (0, d.config_path + ": in effect\n"), out
        d.write_config("[rooms]\noffer_lease = 7 s\nrooms = 9\n")
        diff = at(d, "config", "--diff")[1]
        assert "rooms.offer_lease: 5 s -> 7 s (applied by kvd-ctl reload)\n" in diff, diff
        assert "rooms.rooms: 65536 -> 9 (needs a restart)\n" in diff, diff
        assert at(d, "config", "--diff")[1] == diff, "it took something"
        status, out, _ = at(d, "reload")
        assert status == 0 and "rooms.offer_lease: 5 s -> 7 s\n" in out, out
        status, out, _ = at(d, "config", "--diff", "--json")
        rows = json.loads(out)["options"]
        assert [r["name"] for r in rows] == ["rooms"] and rows[0]["restart"] is True, rows
        d.write_config("[rooms]\noffer_lease = 8 s\nrooms = many\n")
        status, out, err = at(d, "reload")
        assert status == 1 and d.config_path in err and "rooms = many" in err, err
        d.write_config("[rooms]\noffer_lease = 7 s\nrooms = 9\n")
        assert "lease" not in at(d, "config", "--diff")[1], "the bad file was taken in part"


def reload_lists_applied_keys():
    with tempfile.TemporaryDirectory() as tmp:
        keys = [ctl("keygen", tmp + "/" + n)[1].strip() for n in "abc"]

        def allow(*lines):
            with open(tmp + "/allow", "w") as out:
                out.write("\n".join(lines) + "\n")
        allow("a " + keys[0], "b " + keys[1])
        text = "[peer]\ncurve_secret_file = %s/a\ncurve_allow_file = %s/allow\n" % (tmp, tmp)
        with Daemon(text) as d:
            allow("a " + keys[0], "b " + keys[1] + " 10.0.0.3", "c " + keys[2])
            taken = "peer.curve_allow_file: 1 key added, 0 removed, 1 changed"
            assert at(d, "config", "--diff")[1] == taken + " (applied by kvd-ctl reload)\n"
            told = json.loads(at(d, "-j", "doctor")[1])["checks"]
            assert [c for c in told if c["check"] == "config" and c["result"] == "warn" and
                    "1 key added" in c["fact"] and c["remedy"] == "kvd-ctl reload"], told
            assert at(d, "reload")[1] == taken + "\n"  # no peering ends
            assert json.loads(at(d, "keys", "--json")[1])["allowed"][2]["name"] == "c"
            assert at(d, "reload")[1] == d.config_path + ": in effect\n"
            allow("a " + keys[0])
            assert "0 keys added, 2 removed, 0 changed" in at(d, "reload")[1]
            allow("a nothing")
            status, _, err = at(d, "config", "--diff")
            assert status == 1 and "allow:1" in err, err


def reload_is_for_administrators():
    need_users(65534)
    with Daemon("[control]\nsocket_mode = 0666\nallow_uids = 65534\n") as d:
        os.chmod(d.run_dir, 0o755)
        who = dict(user=65534, group=65534, extra_groups=[], program=for_everyone("kvd-ctl"))
        for words in (["reload"], ["config", "--diff"]):
            status, _, err = at(d, *words, **who)
            assert status == 1 and "EPERM" in err, (status, err)
        assert at(d, "config", **who)[0] == 0


def permission_refused_names_the_group():
    need_users(65534)
    with Daemon() as d:
        os.chmod(d.run_dir, 0o755)
        status, _, err = at(d, "status", user=65534, group=65534, extra_groups=[],
                            program=for_everyone("kvd-ctl"))
        assert status == 3 and "permission denied" in err and "usermod -aG" in err, err


def text_and_json_are_equivalent():
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


def health_works_as_a_probe():
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


def error_reply_exits_with_1_and_its_code():
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


def keygen_sets_owner_of_the_key():
    with tempfile.TemporaryDirectory() as tmp:
        status, out, err = ctl("keygen", "--owner", "no-such-user", tmp + "/k")
        assert status == 1 and "no such user" in err and not os.path.exists(tmp + "/k"), err
        assert ctl("keygen", "--owner", "root")[0] == 2
        need_users(65534)
        name = pwd.getpwuid(65534).pw_name
        status, out, err = ctl("keygen", "--owner", name, tmp + "/k")
        st = os.stat(tmp + "/k")
        assert status == 0 and (st.st_uid, stat.S_IMODE(st.st_mode)) == (65534, 0o600), st
        assert "owner " + name in err, err


def of_init(folder, name):
    """A daemon with what init wrote."""
    path = folder + "/%s.conf" % name
    with open(path) as conf:
        text = conf.read().replace("name = %s\n" % name, "")
    status, out, _ = kvd("--check-config", "--config", path, env={"KVD_RUN_DIR": folder}) \
        if os.path.isdir("/run/kvd") else (0, "", "")
    assert status == 0, out
    return Daemon(text, run_dir=folder, name=name)


def init_writes_configurations_that_connect():
    with tempfile.TemporaryDirectory() as tmp:
        env = {"KVD_RUN_DIR": tmp}
        first, second = free_port(), free_port()
        base = ["init", "--dir", tmp]
        for wrong in ([], ["--name", "a"], ["--name", "a", "--listen", "host:7400"],
                      ["--name", ".", "--listen", "127.0.0.1:7400"],
                      ["--name", "a", "--listen", "127.0.0.1:0"],
                      ["--name", "a", "--listen", "127.0.0.1:7400", "--peer", "b"],
                      ["--name", "a", "--listen", "127.0.0.1:7400", "--peer", "b=h:1#short"],
                      ["--name", "a", "--listen", "127.0.0.1:7400", "--peer", "b=h:1",
                       "--peer", "b=i:1"]):
            assert ctl(*base, *wrong)[0] == 2 and not os.listdir(tmp), wrong
        where = ["127.0.0.1:%d" % port for port in (first, second)]
        status, out, err = ctl(*base, "--name", "a", "--listen", where[0],
                               "--peer", "b=" + where[1])
        assert status == 0 and not out and "`kvd-ctl --name a keys`" in err and \
            tmp + "/a.peers:2: replace this line with the one that kvd-ctl keys" in err, err
        assert sorted(os.listdir(tmp)) == ["a.conf", "a.peers"]
        assert stat.S_IMODE(os.stat(tmp + "/a.conf").st_mode) == 0o644
        kept = open(tmp + "/a.peers").read()
        os.unlink(tmp + "/a.conf")
        status, _, err = ctl(*base, "--name", "a", "--listen", where[0])
        assert status == 1 and "exists" in err and os.listdir(tmp) == ["a.peers"], err
        assert open(tmp + "/a.peers").read() == kept
        os.unlink(tmp + "/a.peers")
        assert ctl(*base, "--name", "a", "--listen", where[0], "--peer", "b=" + where[1])[0] == 0
        with contextlib.ExitStack() as stack:
            assert ctl(*base, "--name", "b", "--listen", where[1], "--peer", "a=" + where[0])[0] == 0
            a, b = (stack.enter_context(of_init(tmp, n)) for n in "ab")
            for one, other in ((a, b), (b, a)):
                line = ctl("--name", other.name, "--json", "keys", env=env)[1]
                line = json.loads(line)["line"]
                with open(tmp + "/%s.peers" % one.name) as peers:
                    lines = peers.read().splitlines()
                # as it says
                assert lines[1].startswith("# %s KEY 127.0.0.1:" % other.name), lines
                lines[1] = line
                user = "%s.%s" % (socket.gethostname().split(".")[0], other.name)
                assert line.split()[0] == user, line
                with open(tmp + "/%s.peers" % one.name, "w") as peers:
                    peers.write("\n".join(lines) + "\n")
                assert ctl("--name", one.name, "reload", env=env)[0] == 0
                allowed = json.loads(ctl("--name", one.name, "--json", "keys", env=env)[1])
                assert [k["name"] for k in allowed["allowed"]] == [user], allowed
            status, out, err = ctl("--name", "b", "call", "peer.connect",
                                   json.dumps({"endpoint": "tcp://" + where[0]}), env=env)
            assert status == 0, err


def completion_of_bash_offers_existing_names():
    script = ctl("completion", "bash")[1]

    def offered(*words):
        ask = script + "\nCOMP_WORDS=(kvd-ctl %s); COMP_CWORD=%d; _kvd_ctl; " \
            "printf '%%s\\n' \"${COMPREPLY[@]}\"" % (
                " ".join("'%s'" % w for w in words), len(words))
        return subprocess.run(["bash", "-c", ask], capture_output=True, text=True,
                              env={"KVD_RUN_DIR": run_dir, "PATH": os.environ["PATH"]},
                              check=True).stdout.split()
    with tempfile.TemporaryDirectory() as run_dir:
        for name in ("gpu0", "gpu1"):
            open(run_dir + "/%s.sock" % name, "w").close()
        help_lines = ctl("--help")[1].split("Commands:\n")[1].split("\n\n")[0]
        commands = [line.split()[0] for line in help_lines.splitlines()]
        assert set(commands) <= set(offered("")), offered("")
        assert offered("ro") == ["rooms", "room"], offered("ro")
        assert offered("--name", "g") == ["gpu0", "gpu1"], offered("--name", "g")
        assert offered("-n", "gpu0", "abort", "--r") == ["--role", "--reason"]
        assert "--role" not in offered("status", "--")
    assert ctl("completion", "csh")[0] == 2


def need_shell(name):
    if not shutil.which(name):
        raise Skip(name)


def completion_of_zsh_completes():
    """As an operator types: the file is found in fpath, from the first tab on."""
    need_shell("zsh")
    with tempfile.TemporaryDirectory() as tmp:
        with open(tmp + "/_kvd-ctl", "w") as script:
            script.write(ctl("completion", "zsh")[1])
        open(tmp + "/gpu0.sock", "w").close()
        with Screen(["zsh", "-f", "-i"], env={"KVD_RUN_DIR": tmp, "HOME": tmp,
                                              "TERM": "dumb"}) as s:
            s.type("fpath=(%s $fpath); autoload -Uz compinit; compinit -u -D\n"
                   "kvd-ctl() { print -r -- GOT:$*: }; PS1=READY:; print GO''NE\n" % tmp)
            s.until_raw("GONE")
            for typed, done in (("histo", "history"), ("doctor --roo", "doctor --root"),
                                ("-n gp", "-n gpu0"), ("--name gp", "--name gpu0"),
                                ("-n gpu0 abort --rea", "-n gpu0 abort --reason"),
                                ("comple", "completion")):
                s.until_raw("READY:")
                s.raw = b""
                s.type("kvd-ctl %s\t\n" % typed)
                s.until_raw("GOT:%s:" % done)
        subprocess.run(["zsh", "-n", "/dev/stdin"], input=ctl("completion", "zsh")[1],
                       text=True, check=True)


def completion_of_fish_completes():
    need_shell("fish")
    with tempfile.TemporaryDirectory() as tmp:
        with open(tmp + "/kvd-ctl.fish", "w") as script:
            script.write(ctl("completion", "fish")[1])
        open(tmp + "/gpu0.sock", "w").close()

        def offered(typed):
            out = subprocess.run(
                ["fish", "--no-config", "-c", "source %s/kvd-ctl.fish; complete -C '%s'"
                 % (tmp, typed)], capture_output=True, text=True, check=True,
                env={"PATH": os.environ["PATH"], "HOME": tmp, "KVD_RUN_DIR": tmp}).stdout
            return [line.split("\t")[0] for line in out.splitlines()]
        assert offered("kvd-ctl histo") == ["history"], offered("kvd-ctl histo")
        assert offered("kvd-ctl doctor --roo") == ["--root"], offered("kvd-ctl doctor --roo")
        assert "--root" not in offered("kvd-ctl status --"), offered("kvd-ctl status --")
        assert offered("kvd-ctl -n gp") == ["gpu0"], offered("kvd-ctl -n gp")
        assert "history" in offered("kvd-ctl -n gpu0 "), offered("kvd-ctl -n gpu0 ")


def keys_of_keygen_connect_two_daemons():
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
    run([invalid_command_line_exits_with_2, help_exists_for_every_command,
         manual_has_the_options_of_the_help,
         missing_daemon_exits_with_3_and_names_the_path,
         socket_is_found_by_environment_name_and_alone, several_daemons_are_named_and_listed,
         other_version_exits_with_4_and_names_both, configuration_is_shown_compared_and_reloaded,
         reload_is_for_administrators, permission_refused_names_the_group,
         text_and_json_are_equivalent, health_works_as_a_probe, ping_counts,
         call_passes_any_command, error_reply_exits_with_1_and_its_code, log_level_is_shown_and_set,
         drain_ends_an_idle_daemon, keygen_writes_a_secret_once, keygen_sets_owner_of_the_key,
         init_writes_configurations_that_connect, completion_of_bash_offers_existing_names,
         completion_of_zsh_completes, completion_of_fish_completes,
         keys_of_keygen_connect_two_daemons, reload_lists_applied_keys])
