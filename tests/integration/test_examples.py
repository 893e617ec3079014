#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""examples/ as they stand there, between two daemons; those in Python with the package of
tests/python's virtual environment."""
import json
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, Skip, run  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, "build", "python")
DECODED = "tokens %d to 47 are in pages 3, 9 and 4\n"
WHY = "the user closed the window"
AGAIN = ("room %d: open\n", "room %d: open, after other tries\n")


def c(name):
    return [os.path.join(BUILD, "examples", name)]


def python(name):
    """The interpreter that has the package, or the test is skipped by name."""
    interpreter = os.path.join(VENV, "venv", "bin", "python")
    if not os.path.exists(os.path.join(VENV, "installed")):
        raise Skip("the Python package in build/python (Python's headers and PyPI)")
    return [interpreter, os.path.join(ROOT, "examples", name + ".py")]


def start(command, *args, socket=None, **pipes):
    env = dict(os.environ, KVD_SOCKET=socket) if socket else os.environ
    env = dict(env, PYTHONDONTWRITEBYTECODE="1")
    return subprocess.Popen(command + list(args), text=True, env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes)


def said(process):
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, (process.args, out, err)
    return out


def both(command):
    """Of an example that holds both engines."""
    with Daemon() as a, Daemon() as b:
        return said(start(command, a.socket_path, b.socket_path))


def reconnected(command, first):
    """A line of its input is a request: the third one finds another daemon."""
    with Daemon() as daemon:
        engine = start(command, daemon.socket_path, stdin=subprocess.PIPE)

        def request():
            engine.stdin.write("\n")
            engine.stdin.flush()

        def answered(number):
            line = engine.stdout.readline()
            assert line in [words % number for words in AGAIN], line or said(engine)
        for number in (first, first + 1):
            request()
            answered(number)
        daemon.stop(signal.SIGKILL)
        daemon.notify.close()
        request()
        daemon.start().wait_ready()
        answered(first + 2)
        assert said(engine) == ""


def push_in_c():
    for has in (0, 16):
        with Daemon() as a, Daemon() as b:
            endpoint = json.loads(said(start(
                [BUILD + "/kvd-ctl", "--socket", a.socket_path, "--json", "status"])))
            endpoint = endpoint["endpoint"]
            ticket = os.urandom(16).hex()
            prefill = start(c("prefill"), ticket, socket=a.socket_path)
            decode = start(c("decode"), endpoint, str(has), ticket,
                           socket=b.socket_path)
            assert said(decode) == DECODED % has
            assert said(prefill) == "sent tokens %d to 47\n" % has


def pull_in_c():
    assert both(c("pull")) == "pages 7 and 8 are in pages 30 and 31\n"


def abort_in_c():
    told, sent = both(c("abort")).splitlines()
    assert told.startswith("prefill: ") and WHY in told, told
    assert sent.startswith("send: EABORTED: room 44 failed: EABORTED: "), sent
    assert WHY in sent, sent


def reconnect_in_c():
    reconnected(c("reconnect"), 45)


def push_in_python():
    assert both(python("push")) == "%d bytes in two chunks\n" % (3 * 16 * 8 * 256 * 4)


def pull_in_python():
    assert both(python("pull")) == "pages 7 and 8 are in pages 30 and 31\n"


def prefix_hit_in_python():
    assert both(python("prefix")) == "sent tokens 16 to 47\n"


def abort_in_python():
    decode, prefill, sent = both(python("abort")).splitlines()
    for side, line in (("decode", decode), ("prefill", prefill)):
        assert line.startswith(side + ": EABORTED: ") and WHY in line, line
        assert line.endswith("(retry: another room; the same peers are possible)"), line
    assert sent.startswith("send: EABORTED: room 53 failed: EABORTED: "), sent


def reconnect_in_python():
    reconnected(python("reconnect"), 54)


def asyncio_in_python():
    assert both(python("async_push")) == "32 rooms\n"


def every_example_is_run():
    with open(__file__) as text:
        tested = text.read()
    for name in os.listdir(os.path.join(ROOT, "examples")):
        stem, kind = os.path.splitext(name)
        if stem not in ("engine", "__pycache__") and kind in (".c", ".py"):
            assert '%s("%s")' % ("c" if kind == ".c" else "python", stem) in tested, name


if __name__ == "__main__":
    cases = [push_in_c, pull_in_c, abort_in_c, reconnect_in_c, push_in_python,
             pull_in_python, prefix_hit_in_python, abort_in_python, reconnect_in_python,
             asyncio_in_python, every_example_is_run]
    run([c for c in cases if not sys.argv[1:] or c.__name__ in sys.argv[1:]])
