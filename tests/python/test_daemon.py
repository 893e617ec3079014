# SPDX-License-Identifier: Apache-2.0
"""The daemon's program, a private daemon for kvd.Client, and `python -m kvd`."""
import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

import kvd
import kvd.daemon

BUILD = os.path.abspath(os.environ["KVD_BUILD"])


def module(*args, **env):
    return subprocess.run([sys.executable, "-m", "kvd"] + list(args), capture_output=True,
                          text=True, env=dict(os.environ, **env), timeout=60)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No daemon answers, and no program is there to be started."""
    monkeypatch.setenv("KVD_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("KVD_SOCKET", "KVD_NAME", "KVD_DAEMON", "KVD_AUTOSTART"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kvd.daemon, "_OWN", str(tmp_path / "own"))
    return tmp_path


def program(folder):
    folder.mkdir(exist_ok=True)
    path = folder / "kvd"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_program_of_the_package_precedes_path(nowhere):
    assert kvd.daemon.program("kvd") is None
    in_path = program(nowhere)
    assert kvd.daemon.program("kvd") == in_path
    own = program(nowhere / "own")
    assert kvd.daemon.program("kvd") == own
    assert kvd.daemon.program("kvd-ctl") is None


@pytest.mark.parametrize("argv0, name", [
    ("/opt/x/serve.py", "serve.py"), ("/lib/vllm/__main__.py", "vllm"), ("-c", "python"),
    ("", "python"), ("/x/a b\n", "a_b_")])
def test_client_without_a_name_has_its_programs(argv0, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [argv0])
    assert kvd.daemon.caller() == name


def test_child_of_fork_waits_for_no_thread_of_its_parent():
    with kvd.daemon._lock:  # as while a thread starts a daemon
        pid = os.fork()
        if pid == 0:
            os._exit(0 if kvd.daemon._lock.acquire(blocking=False) else 1)
    assert os.waitpid(pid, 0)[1] == 0


FORKS = """
import os, signal, sys, kvd.daemon
one = kvd.daemon.PrivateDaemon()
pid = os.fork()
if pid == 0:
    one.stop()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
kvd.Client(one.socket).close()
forked = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(forked[1], b"x")
    signal.pause()
os.read(forked[0], 1)
print(one.shell.pid, pid, one.dir, flush=True)
sys.stdin.read()
os._exit(0)
"""


def ended(pid):
    """A descriptor that is readable once it has ended."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        pytest.skip("pidfd_open: %s" % error)


def test_child_of_fork_neither_ends_nor_keeps_its_parents_daemon():
    env = dict(os.environ, KVD_DAEMON=os.path.join(BUILD, "kvd"))
    with subprocess.Popen([sys.executable, "-c", FORKS], env=env, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as parent:
        shell, child, folder = parent.stdout.readline().split()
        shell, child = ended(int(shell)), ended(int(child))
        try:
            assert os.path.isdir(folder)
            parent.stdin.close()
            assert parent.wait(60) == 0
            assert select.select([shell], [], [], 60)[0], "a child keeps it"
            assert not os.path.exists(folder)
            assert not select.select([child], [], [], 0)[0], "the child has ended"
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(shell)
            os.close(child)


def test_client_starts_a_daemon_where_it_is_wanted(nowhere, monkeypatch):
    with pytest.raises(kvd.ConnectionError, match="KVD_AUTOSTART=1"):
        kvd.Client()
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    with pytest.raises(kvd.ConnectionError, match="no program kvd in this package or in PATH"):
        kvd.Client()
    monkeypatch.setenv("KVD_DAEMON", os.path.join(BUILD, "kvd"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # of the shell that ends it
    try:
        with kvd.Client() as one, kvd.Client() as two:
            assert one.info["pid"] == two.info["pid"]

            async def third():
                async with kvd.AsyncClient() as three:
                    return three.info["pid"]
            assert asyncio.run(third()) == one.info["pid"]
            assert os.readlink("/proc/%d/exe" % one.info["pid"]) == \
                os.path.realpath(os.path.join(BUILD, "kvd"))
    finally:
        kvd.daemon._private.stop()


def test_client_of_a_named_daemon_starts_none(nowhere, monkeypatch):
    monkeypatch.setenv("KVD_AUTOSTART", "1")
    monkeypatch.setenv("KVD_DAEMON", os.path.join(BUILD, "kvd"))
    for named in ({"socket": str(nowhere / "kvd.sock")}, {"name": "gpu0"}):
        with pytest.raises(kvd.ConnectionError) as told:
            kvd.Client(**named)
        assert told.value.code == "ENODAEMON"


def test_module_runs_the_programs():
    path = BUILD + ":" + os.environ["PATH"]
    for word in ("daemon", "ctl"):
        done = module(word, "--version", PATH=path)
        assert done.returncode == 0 and "0." in done.stdout, done.stderr
    done = module("ctl", "no-such-command", PATH=path)
    assert done.returncode == 2 and "no-such-command" in done.stderr


def test_module_names_missing_program(tmp_path):
    if kvd.daemon.program("kvd") and os.path.exists(kvd.daemon._OWN):
        pytest.skip("a package without programs")
    done = module("daemon", PATH=str(tmp_path))
    assert done.returncode == 127 and "nor in PATH" in done.stderr
    for args in ([], ["serve"]):
        done = module(*args)
        assert done.returncode == 2 and "daemon ARGS" in done.stderr
