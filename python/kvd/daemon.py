# SPDX-License-Identifier: Apache-2.0
"""The daemon: the socket of this node's daemon, the programs, and a private daemon for tests
and laptops.

KVD_SOCKET       path of the control socket
KVD_AUTOSTART=1  if no daemon answers, start one that lives as long as this process
KVD_DAEMON       the program to start; default this package's, else `kvd` in PATH"""
import atexit
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref

from . import _kvd
from .errors import ConnectionError, Error

log = logging.getLogger("kvd.daemon")
_lock = threading.Lock()
_private = None
_started = weakref.WeakSet()

# a wheel contains the programs, an install from the source tree does not
_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")

_CONFIG = """[daemon]
name = kvd
run_dir = %s
log_level = warn
log_format = plain
[control]
sessions = 1024
session_regions = 4096
"""

# the daemon and its folder end with this process, however that ends: its shell reads from
# a pipe of ours; and the shell ends with the daemon
_SHELL = ('exec 3<&0; "$@" </dev/null 3<&- & kvd=$!; '
          '{ read -r never <&3; kill $kvd; } 2>/dev/null & reader=$!; exec 3<&-; '
          'wait $kvd; why=$?; kill $reader 2>/dev/null; rm -rf -- "$0"; exit $why')


_BASE_MAX = 80  # bytes: a socket's path is limited to 107, and names follow


def _folder():
    """A new folder; a job's TMPDIR may be too long for a socket."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="kvd-",
                            dir=base if len(os.fsencode(base)) <= _BASE_MAX else "/tmp")


def program(name):
    """Path of the program "kvd" or "kvd-ctl": this package's own, which has its version, else
    the one in PATH; None if there is none."""
    own = os.path.join(_OWN, name)
    return own if os.path.exists(own) else shutil.which(name)


class PrivateDaemon:
    """A daemon that ends with this process, however that ends."""

    def __init__(self):
        kvd = os.environ.get("KVD_DAEMON") or program("kvd")
        if not kvd:
            raise ConnectionError("KVD_AUTOSTART: no program kvd in this package or in PATH, "
                                  "and KVD_DAEMON is not set", "ENODAEMON", 513, "session",
                                  True)
        self.pid = os.getpid()
        self.dir = _folder()
        self.socket = os.path.join(self.dir, "kvd.sock")
        config = os.path.join(self.dir, "kvd.conf")
        with open(config, "w") as out:
            out.write(_CONFIG % self.dir)
        self.shell = subprocess.Popen(["/bin/sh", "-c", _SHELL, self.dir, kvd, "--config",
                                       config], stdin=subprocess.PIPE)
        _started.add(self)
        atexit.register(self.stop)
        self._wait()
        log.info("started %s for this process: %s", kvd, self.socket)

    def _wait(self):
        end, pause, why = time.monotonic() + 20, 0.001, "no answer in 20 s"
        while time.monotonic() < end:
            if os.path.exists(self.socket):
                try:
                    return _kvd.Client(self.socket, None, "autostart", None, None).close()
                except Error as error:
                    why = error.message
            if not self.alive():
                why = "it ended with status %d" % self.shell.returncode
                break
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        self.stop()
        raise ConnectionError("KVD_AUTOSTART: the daemon did not start: %s" % why,
                              "ENODAEMON", 513, "session", True)

    def alive(self):
        """Whether it is running."""
        return self.shell.poll() is None

    def stop(self):
        """Stop it and remove its folder. Does nothing in a child of fork()."""
        if self.pid != os.getpid():
            return
        self.shell.stdin.close()
        try:
            self.shell.wait(5)
        except subprocess.TimeoutExpired:
            self.shell.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


def _in_child():
    """After fork(): the child must not keep its parent's daemons alive, nor wait for a thread
    that only its parent has."""
    global _lock
    _lock = threading.Lock()
    for one in list(_started):
        one.shell.stdin.close()


os.register_at_fork(after_in_child=_in_child)


def private_socket():
    """The socket of this process's own daemon, which is started if needed."""
    global _private
    with _lock:
        if _private is None or _private.pid != os.getpid() or not _private.alive():
            _private = PrivateDaemon()
        return _private.socket


def caller():
    """The name of this process for people: its script or module, else "python"."""
    path = sys.argv[0] if getattr(sys, "argv", None) else ""
    name = os.path.basename(path)
    if name in ("__main__.py", "__init__.py"):  # python -m PACKAGE
        name = os.path.basename(os.path.dirname(path))
    name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40]
    return "python" if name in ("", "-c", "-m", "-") else name


def session(socket, name, client, role, timeout):
    """The extension's client, for kvd.Client. If the caller names no daemon and none answers:
    a private daemon's (KVD_AUTOSTART), or ConnectionError with a remedy."""
    try:
        return _kvd.Client(socket, name, client, role, timeout)
    except ConnectionError as error:
        if error.code != "ENODAEMON" or socket is not None or name is not None:
            raise
        if os.environ.get("KVD_AUTOSTART", "0") in ("1", "yes", "on"):
            return _kvd.Client(private_socket(), None, client, role, timeout)
        raise ConnectionError(
            "%s (start kvd on this node, point KVD_SOCKET at its control socket, or set "
            "KVD_AUTOSTART=1 for a private one)" % error.message, error.code, error.number,
            error.scope, True) from None
