#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The program kvd as an operator and systemd meet it."""
import contextlib
import json
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import (BUILD, DEADLINE_S, Daemon, Skip, for_everyone, kvd,  # noqa: E402
                        need_users, run, until)
from kvd_engine import WAITING, Cache, Engine  # noqa: E402


def arguments_wrong_are_refused_with_64():
    for args in (["--bogus"], ["--name"], ["stray"]):
        status, out, err = kvd(*args)
        assert status == 64 and out == "" and "--help" in err, (args, status, out, err)


def help_version_and_sample_are_printed():
    status, out, _ = kvd("--help")
    assert status == 0 and "--check-config" in out
    status, out, _ = kvd("--version")
    assert status == 0 and out.startswith("kvd ") and "transports:" in out
    status, out, _ = kvd("--print-config")
    assert status == 0 and "\n[rooms]\n" in out and "#offer_lease = 30 s" in out


def config_check_reports_every_problem():
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
        conf.write("[rooms]\noffer_lease = 5\nleaze = 5 s\n[peer]\nping = 10 min\n")
        conf.flush()
        status, out, err = kvd("--check-config", "--config", conf.name)
        assert status == 78 and out == "", (status, out)
        for words in (":2: offer_lease", "the unit is missing", ":3: leaze", ":5: ping",
                      "5 ms to 1 min"):
            assert words in err, (words, err)
        status, _, _ = kvd("--config", conf.name)
        assert status == 78, status


def in_run_dir(where, text=""):
    """A configuration file with its run_dir in the directory `where`."""
    path = where + "/kvd.conf"
    with open(path, "w") as conf:
        conf.write("[daemon]\nrun_dir = %s\n%s" % (where, text))
    return path


def config_check_of_a_good_file_is_fine():
    with tempfile.TemporaryDirectory() as where:
        path = in_run_dir(where, "[peer]\nlisten = tcp://127.0.0.1:7400\n")
        status, out, err = kvd("--check-config", env={"KVD_CONFIG": path})
        assert (status, out) == (0, path + ": ok\n"), (status, out, err)
        assert err == path + ":4: warning: listen = tcp://127.0.0.1:7400: loopback address: " \
            "other hosts cannot reach this daemon\n", err
        in_run_dir(where, "[peer]\nlisten = tcp://0.0.0.0:0\ninsecure = yes\n"
                          "advertise = tcp://host:0\n")
        status, out, err = kvd("--check-config", "--config", path)
        assert status == 0 and ":4: warning: listen" in err and "port 0" in err, err
        assert ":5: warning: insecure" in err and "loopback" not in err, err


def config_check_opens_named_files():
    """All at once, each with its line, in the form of compilers; and start ends with 78."""
    with tempfile.TemporaryDirectory() as where:
        with open(where + "/key", "w") as key:
            key.write("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\n")
        os.chmod(where + "/key", 0o644)
        with open(where + "/peers", "w") as peers:
            peers.write("# list\nnonsense\n")
        keys = "[peer]\ncurve_secret_file = %s/key\ncurve_allow_file = %s/peers\n" % \
            (where, where)
        path = in_run_dir(where, keys + "[transport]\nucx_library = /none/ucp.so\n"
                          "cuda_library = libnone.so.7\ngpu_kernels = /none/kernels\n")
        status, out, err = kvd("--check-config", "--config", path)
        lines = [line for line in err.splitlines() if "warning" not in line]
        assert status == 78 and out == "" and len(lines) == 5, (status, out, err)
        for n, words in ((4, "mode 0644"), (5, where + "/peers:2: expected: NAME"),
                         (7, "/none/ucp.so"), (8, "libnone.so.7"), (9, "/none/kernels")):
            assert any(line.startswith("%s:%d: " % (path, n)) and words in line
                       for line in lines), (n, words, lines)
        in_run_dir(where, keys)
        for missing in (None, "/peers"):
            if missing:
                os.chmod(where + "/key", 0o600)
                os.unlink(where + missing)
            status, _, err = kvd("--config", path)
            assert status == 78 and (missing or "mode 0644") in err, (status, err)
        with open(path, "w") as conf:
            conf.write("[daemon]\nrun_dir = /nonexistent/run\n[transport]\ngpus = off\n")
        status, out, err = kvd("--check-config", "--config", path)
        assert status == 78 and path + ":2: run_dir: /nonexistent/run: No such" in err, err
        in_run_dir(where, "[transport]\ngpus = 0\n")
        status, out, err = kvd("--check-config", "--config", path)
        assert status == 78 and path + ":4: gpus = 0: allowed: auto, off" in err, err


def config_check_covers_disk_space_and_memory():
    """Insufficient disk or control group limits are reported in advance; more memory than the
    limit fails the start."""
    chunks = "[chunks]\nchunk_memory = 64 MiB\n"
    with tempfile.TemporaryDirectory() as where:
        path = in_run_dir(where, chunks + "chunk_dir = %s/none\n" % where)
        status, _, err = kvd("--check-config", "--config", path)
        assert status == 78 and ":5: chunk_dir: %s/none: No such" % where in err, err
        in_run_dir(where, chunks + "chunk_dir = %s\nchunk_dir_size = 1 MiB\n" % where)
        status, _, err = kvd("--check-config", "--config", path)
        assert status == 0 and "chunk_dir" not in err, err
        in_run_dir(where, chunks + "chunk_dir = %s\nchunk_dir_size = 1048576 GiB\n" % where)
        status, _, err = kvd("--check-config", "--config", path)
        assert status == 0 and ":6: warning: chunk_dir_size: 1073741824 MiB, but the file system" \
            in err, err
        in_run_dir(where, "[chunks]\nchunk_memory = 1024 GiB\n")
        status, _, err = kvd("--check-config", "--config", path)
        assert status == 0 and ":4: warning: chunk_memory: 1048576 MiB exceed" in err, err
        status, _, err = kvd("--config", path)
        assert status == 78 and "chunk_memory: 1048576 MiB exceed" in err, err
        assert not os.path.exists(where + "/kvd.sock")


def without_sanitizer():
    if os.path.basename(BUILD) != "rel":
        raise Skip("a build without sanitizer: it has memory of its own, and looks for leaks "
                   "as nobody else")


def config_check_has_the_rights_of_the_user():
    need_users(65534)
    without_sanitizer()
    user = pwd.getpwuid(65534).pw_name
    with tempfile.TemporaryDirectory() as where:
        path = in_run_dir(where)
        os.chmod(where, 0o755)
        assert kvd("--check-config", "--config", path)[0] == 0
        status, out, err = kvd("--check-config", "--user", user, "--config", path)
        assert status == 78 and "run_dir: " + where + ": not writable for uid 65534" in err, err
        os.chmod(path, 0o600)
        status, out, err = kvd("--check-config", "--user", user, "--config", path)
        assert status == 78 and err == path + ": Permission denied\n", err
    assert kvd("--check-config", "--user", "no-such-user")[0] == 64
    assert kvd("--user", user)[0] == 64


def effective_configuration_names_its_origins():
    with tempfile.TemporaryDirectory() as where:
        path = in_run_dir(where, "[rooms]\noffer_lease = 7 s\n")
        status, out, err = kvd("--print-effective", "--config", path, "--name", "gpu0")
        assert status == 0 and err == "", err
        for words in ("# %s:4\noffer_lease = 7 s\n" % path, "# --name or KVD_NAME\nname = gpu0\n",
                      "# default\nwaiting_timeout = 5 min\n", "# default: (empty)\nsocket_path = "
                      + where + "/gpu0.sock\n"):
            assert words in out, (words, out)
        with open(path, "w") as again:  # it is a file that means the same
            again.write(out)
        same = kvd("--print-effective", "--config", path)[1]
        assert [line for line in same.splitlines() if line[:1] != "#"] == \
            [line for line in out.splitlines() if line[:1] != "#"], same


def log_uses_journal_if_stderr_is_journal():
    with tempfile.TemporaryDirectory() as where:
        path = in_run_dir(where, "[peer]\nlisten = tcp://127.0.0.1:x\n")
        assert kvd("--config", path)[2].startswith(path + ":4: listen"), kvd("--config", path)
        with open(where + "/log", "w") as log:
            st = os.fstat(log.fileno())
            env = dict(os.environ, JOURNAL_STREAM="%d:%d" % (st.st_dev, st.st_ino))
            subprocess.run([BUILD + "/kvd", "--config", path], stderr=log, env=env)
            in_run_dir(where, "[control]\nsocket_path = /nonexistent/s\n")
            subprocess.run([BUILD + "/kvd", "--config", path], stderr=log, env=env)
        with open(where + "/log") as log:
            lines = log.read().splitlines()
        assert len(lines) > 1 and all(re.match("<[0-7]>", line) for line in lines), lines
        status, _, err = kvd("--config", path)
        assert status == 1 and err and not re.search("^<", err, re.M), (status, err)


def term_drains_and_ends_with_0():
    with Daemon() as d:
        assert "STATUS=serving" in d.states
        with open(d.lock_path) as lock:
            assert int(lock.read()) == d.proc.pid
        assert d.stop() == 0
        d.wait_state("STOPPING=1")
        assert not os.path.exists(d.lock_path)


def interrupt_ends_with_0():
    with Daemon() as d:
        assert d.stop(signal.SIGINT) == 0


def daemon_of_a_test_ends_with_it():
    """Where a case failed without stopping its daemons they ran forever."""
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys\nsys.path.insert(0, %r)\n"
         "from kvd_daemon import Daemon\nd = Daemon().start().wait_ready()\n"
         "print(d.proc.pid, flush=True)\nos.kill(os.getpid(), 9)" % sys.path[0]],
        capture_output=True, text=True, timeout=DEADLINE_S)
    end = time.monotonic() + DEADLINE_S
    while os.path.exists("/proc/%d/exe" % int(done.stdout)):
        assert time.monotonic() < end, "it lives"


def second_daemon_of_a_name_is_refused_by_pid():
    with Daemon() as first:
        second = Daemon(run_dir=first.run_dir, name="kvd").start()
        assert second.wait() == 1
        assert "pid %d" % first.proc.pid in second.log(), second.log()
        second.notify.close()
        with Daemon(run_dir=first.run_dir, name="other"):
            pass
        assert first.proc.poll() is None


def socket_of_a_living_daemon_is_not_taken_over():
    with Daemon() as first:
        with tempfile.TemporaryDirectory() as where:
            path = in_run_dir(where, "name = other\n[control]\nsocket_path = %s\n"
                              % first.socket_path)
            status, _, err = kvd("--config", path)
            assert status == 78, (status, err)
            assert "socket_path = %s: pid %d listens" % (first.socket_path, first.proc.pid) \
                in err, err
        client = Engine(first, "engine")
        client.cmd("ping")
        client.close()
        # one that took the name over by force keeps it after the end of the first one
        os.unlink(first.socket_path)
        other = socket.socket(socket.AF_UNIX)
        other.bind(first.socket_path)
        assert first.stop() == 0
        assert os.path.exists(first.socket_path)
        other.close()


def closed_standard_descriptors_are_replaced():
    for redirect in "<&-", ">&-", "2>&-", "<&- >&- 2>&-":
        script = 'exec "$@" ' + redirect
        with Daemon(wrapper=["sh", "-c", script, "sh"]) as d:
            for fd in range(3):
                link = os.readlink("/proc/%d/fd/%d" % (d.proc.pid, fd))
                assert link == "/dev/null" or "socket" not in link and "eventfd" not in link, link
            Engine(d, "engine").sock.close()
    # as a hook may run it; its answer is not read
    with Daemon() as d:
        done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", BUILD + "/kvd-ctl",
                               "--socket", d.socket_path, "ping"], stderr=subprocess.PIPE)
        assert done.returncode == 0 and not done.stderr, done


def too_few_descriptors_are_refused_by_name():
    for count in 20, 40, 127:
        d = Daemon(preexec=lambda n=count: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)))
        assert d.start().wait() == 78, d.log()
        assert "RLIMIT_NOFILE: %d descriptors (at least 128)" % count in d.log(), d.log()
        d.notify.close()
        d.tmp.cleanup()


def removed_files_are_created_again():
    with Daemon() as d:
        d.expect("file was removed; recreated")
        engine = Engine(d, "engine")
        for path in d.socket_path, d.lock_path:
            before = os.stat(path).st_mode
            os.unlink(path)
            until("%s is made again" % path, lambda p=path: os.path.exists(p))
            until("%s has its mode" % path, lambda p=path, m=before: os.stat(p).st_mode == m)
        Engine(d, "another").sock.close()
        engine.cmd("ping")
        engine.close()
        two = Daemon(run_dir=d.run_dir).start()
        assert two.wait() == 1 and "held by the kvd of this name" in two.log(), two.log()
        two.notify.close()


def daemon_without_its_name_keeps_files_of_its_successor():
    with Daemon() as d:
        engine = Engine(d, "engine")
        d.expect("clients cannot connect")
        d.freeze()
        os.unlink(d.lock_path)
        os.unlink(d.socket_path)
        shutil.rmtree(d.run_dir + "/keys-%d" % os.geteuid())
        with Daemon(run_dir=d.run_dir) as two:
            d.proc.send_signal(signal.SIGCONT)
            until("it is told", lambda: engine.cmd("health")["state"] == "degraded")
            assert "held by the kvd of this name" in engine.cmd("health")["why"]
            engine.close()
            assert d.stop() == 0
            for name in "kvd.lock", "kvd.sock", "kvd.shm":
                assert os.path.exists(os.path.join(d.run_dir, name)), os.listdir(d.run_dir)
            Engine(two, "engine").close()


def daemon_killed_does_not_block_its_successor():
    def offer(daemon):
        engine = Engine(daemon, "engine")
        engine.cmd("room.open", room="1", role="offer", pool=Cache(engine).pool,
                   views={"kv": dict(pages=[3])})
        engine.until(1, "offer", WAITING)
        return engine
    with tempfile.TemporaryDirectory() as run_dir:
        with Daemon(run_dir=run_dir):
            pass
        clean = set(os.listdir(run_dir))
        d = Daemon(run_dir=run_dir).start().wait_ready()
        engine = offer(d)
        with open("/proc/%d/maps" % d.proc.pid) as maps:
            assert "/dev/shm/" not in maps.read(), "it makes names in shared memory"
        d.stop(signal.SIGKILL)
        d.notify.close()
        assert os.path.exists(d.lock_path) and os.path.exists(d.socket_path)
        engine.close()
        with Daemon(run_dir=run_dir) as again:
            engine = offer(again)
            engine.cmd("room.abort", room="1", role="offer")
            engine.close()
        assert set(os.listdir(run_dir)) == clean, (clean, os.listdir(run_dir))


def run_dir_missing_is_named():
    d = Daemon()
    d.write_config("[daemon]\n")
    d.env["KVD_NAME"] = "x"
    with open(d.config_path, "w") as out:
        out.write("[daemon]\nrun_dir = /nonexistent/run\n")
    d.start()
    assert d.wait() == 78
    assert "/nonexistent/run" in d.log() and "systemd-tmpfiles" in d.log(), d.log()
    d.notify.close()
    d.tmp.cleanup()


def hangup_applies_allowed_options_and_names_others():
    with Daemon("[rooms]\noffer_lease = 5 s\n") as d:
        d.expect("change needs a restart option=rooms.rooms")
        d.write_config("[daemon]\nlog_level = debug\n[rooms]\noffer_lease = 7 s\nrooms = 9\n")
        d.states.clear()
        d.proc.send_signal(signal.SIGHUP)
        d.wait_state("RELOADING=1").wait_ready()
        assert "reloaded changed=2" in d.log(), d.log()
        assert "option=rooms.rooms" in d.log(), d.log()


def keygen(path):
    done = subprocess.run([BUILD + "/kvd-ctl", "keygen", path], capture_output=True,
                          text=True, check=True)
    return done.stdout.strip()


def hangup_counts_the_keys_of_the_list():
    with tempfile.TemporaryDirectory() as where:
        keys = [keygen(where + "/key%d" % n) for n in range(3)]
        with open(where + "/peers", "w") as peers:
            peers.write("a %s\nb %s\n" % (keys[0], keys[1]))
        with Daemon("[peer]\ncurve_secret_file = %s/key0\ncurve_allow_file = %s/peers\n"
                    % (where, where)) as d:
            with open(where + "/peers", "w") as peers:
                peers.write("a %s\nc %s\n" % (keys[0], keys[2]))
            d.states.clear()
            d.proc.send_signal(signal.SIGHUP)
            d.wait_ready()
            assert "allow-list reloaded keys=2 added=1 removed=1" in d.log(), d.log()
            # hosts whose daemons have one name: one user, possibly unintended
            d.expect("several keys with one name")
            with open(where + "/peers", "w") as peers:
                peers.write("a %s\na %s\n" % (keys[0], keys[2]))
            d.states.clear()
            d.proc.send_signal(signal.SIGHUP)
            d.wait_ready()
            assert "name='a' keys=2" in d.log(), d.log()
            out = kvd("--check-config", "--config", d.config_path)[2]
            assert "'a' has 2 keys: daemons with one name count as one user" in out, out
            told = subprocess.run([BUILD + "/kvd-ctl", "--socket", d.socket_path, "doctor"],
                                  capture_output=True, text=True).stdout
            assert "'a' has several keys in curve_allow_file" in told, told


@contextlib.contextmanager
def effective(uid):
    """Any process that connects here belongs to that user."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def reload_ends_sessions_of_removed_users():
    need_users(65534)
    admitted = "[control]\nsocket_mode = 0666\nallow_uids = 0, %s\nadmin_uids = 0%s\n"
    with Daemon(admitted % ("65534", ", 65534")) as d:
        os.chmod(d.run_dir, 0o755)
        with effective(65534):
            engine = Engine(d, "engine")
        admin = Engine(d, "admin")
        engine.cmd("log.level")
        # no longer an administrator, but still a user
        d.write_config(admitted % ("65534", ""))
        assert admin.cmd("config.reload")["ended"] == {"peerings": 0, "sessions": 0}
        engine.refused("EPERM", "log.level")
        engine.cmd("ping")
        d.write_config(admitted % ("1", ""))
        d.expect("connection closed")
        assert admin.cmd("config.reload")["ended"] == {"peerings": 0, "sessions": 1}
        told = json.loads(engine.lines.readline())["error"]
        assert told["code"] == "EPERM" and "uid 65534 is not admitted" in told["message"], told
        assert engine.lines.readline() == ""
        engine.sock.close()
        admin.cmd("ping")
        admin.close()
        assert "uid 65534 is not admitted" in d.log(), d.log()


def sessions_without_memory_are_not_logged():
    with Daemon() as d:
        asking = Engine(d, "asking")
        asking.cmd("ping")
        asking.close()
        owning = Engine(d, "owning")
        Cache(owning)
        owning.close()
        assert d.stop() == 0
        assert "asking" not in d.log() and "session owning: has memory" in d.log(), d.log()
        assert "session owning: ends" in d.log(), d.log()


def insecure_is_logged():
    for word in "yes", "no":
        with Daemon("[peer]\ninsecure = %s\n" % word) as d:
            d.expect("insecure: ")
            assert ("<4>daemon kvd: insecure: " in d.log()) == (word == "yes"), d.log()
            engine = Engine(d, "engine")
            assert engine.cmd("health")["insecure"] is (word == "yes")
            assert ("#" in engine.endpoint) == (word == "no"), engine.endpoint
            assert bool(engine.cmd("keys")["public_key"]) == (word == "no")
            engine.close()
            for command in "status", "health", "doctor", "stats":
                shown = subprocess.run([BUILD + "/kvd-ctl", "--socket", d.socket_path, command],
                                       capture_output=True, text=True).stdout
                said = re.search("^insecure +1 |insecure = yes|^insecure +yes", shown, re.M)
                assert bool(said) == (word == "yes"), (command, shown)


def hangup_with_a_bad_file_keeps_serving():
    with Daemon() as d:
        d.expect("not reloaded")
        d.write_config("[daemon]\n[rooms]\noffer_lease = 1 parsec\n")
        d.states.clear()
        d.proc.send_signal(signal.SIGHUP)
        d.wait_ready()
        assert ": offer_lease = 1 parsec: not a unit" in d.log(), d.log()
        assert d.proc.poll() is None


def watchdog_is_fed_twice_an_interval():
    with Daemon(env={"WATCHDOG_USEC": "200000"}) as d:
        for _ in range(3):
            d.states.clear()
            d.wait_state("WATCHDOG=1")


def with_handed_over(sock, count="1"):
    """A daemon started as systemd does with `sock` as fd 3."""
    # LISTEN_PID must be the daemon's own: a shell sets it and becomes kvd
    shell = 'exec 3<&%d; LISTEN_PID=$$ LISTEN_FDS=%s exec "$@"' % (sock.fileno(), count)
    return Daemon(wrapper=["/bin/sh", "-c", shell, "sh"], pass_fds=[sock.fileno()])


def passed_socket_is_used():
    with tempfile.TemporaryDirectory() as where:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(where + "/s")
        sock.listen(4)
        with with_handed_over(sock):
            pass
        # it is systemd's socket: its file stays
        assert os.path.exists(where + "/s")
        sock.close()


def as_user(uid, config="", **args):
    """A daemon of a user with no other group than its own."""
    daemon = Daemon(config, wrapper=["setpriv", "--reuid", str(uid), "--regid", str(uid),
                                     "--clear-groups"], program=for_everyone("kvd"), **args)
    for path in (daemon.run_dir, daemon.config_path):
        os.chown(path, uid, uid)
    return daemon


def connects_as(uid, gid, path):
    """Is that user of that group alone let in? False: EACCES."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            sock.sendall(b'{"cmd":"ping","id":1}\n')
            sock.recv(1)  # it has checked this process
            os._exit(0)
        except PermissionError:
            os._exit(13)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 13), status
    return status == 0


def socket_group_need_not_be_the_daemons():
    """A user that is no member may not chown; an access list does it."""
    uid, group, other = 64101, 64102, 64103
    need_users(uid, group, other)
    with as_user(uid, "[control]\nsocket_group = %d\n" % group) as d:
        os.chmod(d.run_dir, 0o755)
        for gid, admitted in ((group, True), (uid, False), (64104, False)):
            assert connects_as(other, gid, d.socket_path) == admitted, gid


def users_see_no_paths_and_no_others_errors():
    need_users(64103)
    with Daemon("[control]\nsocket_mode = 0666\nallow_uids = 64103\n") as d:
        os.chmod(d.run_dir, 0o755)
        admin = Engine(d, "admin")
        admin.refused("ETIMEOUT", "peer.connect", endpoint="tcp://127.0.0.1:1")
        shown = json.dumps([admin.cmd("config.show"), admin.cmd("peer.list")])
        assert "64103" in shown and d.config_path in shown and ":1\"" in shown, shown
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(64103, 64103, 64103)
                os.setresuid(64103, 64103, 64103)
                user = Engine(d, "user")
                shown = json.dumps([user.cmd("config.show"), user.cmd("peer.list")])
                with open(write, "w") as out:
                    out.write(shown)
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as f:
            seen = f.read()
        os.waitpid(pid, 0)
        assert "settings" in seen and "64103" not in seen and d.run_dir not in seen, seen
        assert json.loads(seen)[1]["lost"] == [], seen
        admin.close()


def memory_of_the_daemon_is_not_readable():
    need_users(64101)
    for dumps in ("no", "yes"):
        with as_user(64101, "[daemon]\ncore_dumps = %s\n" % dumps) as d:
            folder = "/proc/%d" % d.proc.pid
            with open(folder + "/limits") as f:
                soft, hard = [line.split()[4:6] for line in f
                              if line.startswith("Max core file size")][0]
            # files of processes that are not dumpable belong to root
            owner = os.stat(folder + "/mem").st_uid
            assert owner == (64101 if dumps == "yes" else 0), (dumps, owner)
            assert dumps == "yes" or (soft, hard) == ("0", "0"), (soft, hard)


def idle_daemon_is_small():
    """The machine's libraries may add to this."""
    without_sanitizer()
    with Daemon() as d:
        with open("/proc/%d/status" % d.proc.pid) as f:
            kib = {line.split(":")[0]: int(line.split()[1]) for line in f
                   if line.startswith("Rss")}
    assert kib["RssAnon"] + kib["RssShmem"] < 12 << 10, kib


def passed_socket_not_listening_is_refused():
    sock = socket.socket(socket.AF_UNIX)
    d = with_handed_over(sock).start()
    assert d.wait() == 78
    assert "not a listening Unix stream socket" in d.log(), d.log()
    d.notify.close()
    d.tmp.cleanup()
    sock.close()


if __name__ == "__main__":
    cases = [
        arguments_wrong_are_refused_with_64,
        help_version_and_sample_are_printed,
        config_check_reports_every_problem,
        config_check_of_a_good_file_is_fine,
        config_check_opens_named_files,
        config_check_covers_disk_space_and_memory,
        config_check_has_the_rights_of_the_user,
        effective_configuration_names_its_origins,
        log_uses_journal_if_stderr_is_journal,
        term_drains_and_ends_with_0,
        interrupt_ends_with_0,
        daemon_of_a_test_ends_with_it, second_daemon_of_a_name_is_refused_by_pid,
        socket_of_a_living_daemon_is_not_taken_over,
        closed_standard_descriptors_are_replaced,
        too_few_descriptors_are_refused_by_name,
        removed_files_are_created_again,
        daemon_without_its_name_keeps_files_of_its_successor,
        daemon_killed_does_not_block_its_successor,
        run_dir_missing_is_named,
        hangup_applies_allowed_options_and_names_others,
        hangup_with_a_bad_file_keeps_serving,
        hangup_counts_the_keys_of_the_list,
        reload_ends_sessions_of_removed_users,
        sessions_without_memory_are_not_logged,
        insecure_is_logged,
        watchdog_is_fed_twice_an_interval,
        passed_socket_is_used,
        passed_socket_not_listening_is_refused,
        socket_group_need_not_be_the_daemons,
        users_see_no_paths_and_no_others_errors,
        memory_of_the_daemon_is_not_readable,
        idle_daemon_is_small,
    ]
    run([c for c in cases if not sys.argv[1:] or c.__name__ in sys.argv[1:]])
