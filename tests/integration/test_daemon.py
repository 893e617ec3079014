#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The program kvd as an operator and systemd meet it."""
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import DEADLINE_S, Daemon, kvd, run  # noqa: E402
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
    assert status == 0 and "\n[rooms]\n" in out and "#lease = 30 s" in out


def config_check_tells_every_problem():
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
        conf.write("[rooms]\nlease = 5\nleaze = 5 s\n[peer]\nping = 10 min\n")
        conf.flush()
        status, out, err = kvd("--check-config", "--config", conf.name)
        assert status == 78 and out == "", (status, out)
        for words in (":2: lease", "the unit is missing", ":3: leaze", ":5: ping",
                      "5 ms to 1 min"):
            assert words in err, (words, err)
        status, _, _ = kvd("--config", conf.name)
        assert status == 78, status


def config_check_of_a_good_file_is_fine():
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
        conf.write("[rooms]\nlease = 5 s\n")
        conf.flush()
        status, out, err = kvd("--check-config", env={"KVD_CONFIG": conf.name})
        assert (status, out, err) == (0, conf.name + ": fine\n", ""), (status, out, err)


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


def daemon_of_a_test_goes_with_it():
    """Where a case failed and nobody stopped its daemons they stayed for ever."""
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


def daemon_killed_leaves_nothing_in_the_way():
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
    assert d.wait() == 1
    assert "/nonexistent/run" in d.log(), d.log()
    d.notify.close()
    d.tmp.cleanup()


def hangup_takes_what_it_may_and_names_the_rest():
    with Daemon("[rooms]\nlease = 5 s\n") as d:
        d.expect("change needs a restart option=rooms.rooms")
        d.write_config("[daemon]\nlog_level = debug\n[rooms]\nlease = 7 s\nrooms = 9\n")
        d.states.clear()
        d.proc.send_signal(signal.SIGHUP)
        d.wait_state("RELOADING=1").wait_ready()
        assert "reloaded changed=2" in d.log(), d.log()
        assert "option=rooms.rooms" in d.log(), d.log()


def hangup_with_a_bad_file_keeps_serving():
    with Daemon() as d:
        d.expect("not reloaded")
        d.write_config("[daemon]\n[rooms]\nlease = 1 parsec\n")
        d.states.clear()
        d.proc.send_signal(signal.SIGHUP)
        d.wait_ready()
        assert ": lease = 1 parsec: not a unit" in d.log(), d.log()
        assert d.proc.poll() is None


def watchdog_is_fed_twice_an_interval():
    with Daemon(env={"WATCHDOG_USEC": "200000"}) as d:
        for _ in range(3):
            d.states.clear()
            d.wait_state("WATCHDOG=1")


def watchdog_off_by_option_is_silent():
    with Daemon("[daemon]\nwatchdog = no\n", env={"WATCHDOG_USEC": "1000"}) as d:
        assert d.stop() == 0
        d.wait_state("STOPPING=1")
        assert "WATCHDOG=1" not in d.states


def with_handed_over(sock, count="1"):
    """A daemon started as systemd does with `sock` as fd 3."""
    # LISTEN_PID must be the daemon's own: a shell sets it and becomes kvd
    shell = 'exec 3<&%d; LISTEN_PID=$$ LISTEN_FDS=%s exec "$@"' % (sock.fileno(), count)
    return Daemon(wrapper=["/bin/sh", "-c", shell, "sh"], pass_fds=[sock.fileno()])


def socket_handed_over_is_taken():
    with tempfile.TemporaryDirectory() as where:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(where + "/s")
        sock.listen(4)
        with with_handed_over(sock):
            pass
        # it is systemd's socket: its file stays
        assert os.path.exists(where + "/s")
        sock.close()


def socket_handed_over_that_does_not_listen_is_refused():
    sock = socket.socket(socket.AF_UNIX)
    d = with_handed_over(sock).start()
    assert d.wait() == 1
    assert "not a listening Unix stream socket" in d.log(), d.log()
    d.notify.close()
    d.tmp.cleanup()
    sock.close()


if __name__ == "__main__":
    run([
        arguments_wrong_are_refused_with_64,
        help_version_and_sample_are_printed,
        config_check_tells_every_problem,
        config_check_of_a_good_file_is_fine,
        term_drains_and_ends_with_0,
        interrupt_ends_with_0,
        daemon_of_a_test_goes_with_it, second_daemon_of_a_name_is_refused_by_pid,
        daemon_killed_leaves_nothing_in_the_way,
        run_dir_missing_is_named,
        hangup_takes_what_it_may_and_names_the_rest,
        hangup_with_a_bad_file_keeps_serving,
        watchdog_is_fed_twice_an_interval,
        watchdog_off_by_option_is_silent,
        socket_handed_over_is_taken,
        socket_handed_over_that_does_not_listen_is_refused,
    ])
