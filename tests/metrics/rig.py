# SPDX-License-Identifier: Apache-2.0
"""What the tests of metrics share: daemons with an endpoint, HTTP by hand, load."""
import http.client
import os
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import DEADLINE_S, Daemon, free_port  # noqa: E402
import kvd_engine  # noqa: E402
from kvd_engine import SUCCESS, open_pull, open_push  # noqa: E402
import prom_text  # noqa: E402

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=DEADLINE_S)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(self.path)


class Observed(Daemon):
    """A daemon with a metrics endpoint at a port of its own, or at a Unix socket."""

    def __init__(self, config="", unix=False, **args):
        super().__init__("", **args)
        self.port = 0 if unix else free_port()
        self.http_path = os.path.join(self.run_dir, self.name + ".metrics")
        self.write_config(config + "[metrics]\nmetrics_listen = %s\n" % (
            "unix:" + self.http_path if unix else "tcp://127.0.0.1:%d" % self.port))

    def get(self, path, method="GET", **headers):
        """(status, headers, text)"""
        c = UnixConnection(self.http_path) if not self.port else \
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            c.request(method, path, headers=headers)
            r = c.getresponse()
            return r.status, r.headers, r.read().decode()
        finally:
            c.close()

    def scrape_once(self):
        # as Prometheus asks, which prefers another format
        status, headers, text = self.get("/metrics", Accept=(
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"))
        kind = "text/plain; version=0.0.4; charset=utf-8"
        assert status == 200 and headers["Content-Type"] == kind, (status, headers)
        return prom_text.parse(text)

    def scrape(self):
        """Of now: the endpoint may tell for a moment what it told before."""
        def turns(families):
            return families["kvd_loop_iterations_total"].sum()
        first = self.scrape_once()
        end = time.monotonic() + DEADLINE_S
        while True:
            families = self.scrape_once()
            if turns(families) > turns(first):
                return families
            assert time.monotonic() < end, "figures stand still"


class Pair(kvd_engine.Pair):
    """Two observed daemons, an engine with a cache at each."""

    def __init__(self, more="", **args):
        config = "[transport]\ntransports = shm\n" + more
        super().__init__([Observed(config, name=name, **args)
                          for name in ("prefill", "decode")])

    def __enter__(self):
        super().__enter__()
        self.src.fill(SRC, TOKENS)
        return self

    def finish(self, room, roles):
        for engine, role in zip((self.prefill, self.decode), roles):
            engine.until(room, role, SUCCESS)
            engine.cmd("room.close", room=str(room), role=role)

    def push(self, room):
        open_push(self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS)
        self.finish(room, ("send", "recv"))

    def pull(self, room):
        open_pull(self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS)
        self.finish(room, ("offer", "pull"))


class Load:
    """Rooms without end, in a thread of their own; some fail."""

    def __init__(self, pair):
        self.pair, self.stop, self.rooms, self.why = pair, threading.Event(), 0, None
        self.thread = threading.Thread(target=self.run)

    def run(self):
        try:
            while not self.stop.is_set():
                self.rooms += 1
                self.pair.push(2 * self.rooms)
                self.pair.pull(2 * self.rooms + 1)
        except BaseException as why:  # told by __exit__
            self.why = why

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.stop.set()
        self.thread.join()
        if self.why and not exc[0]:
            raise self.why
