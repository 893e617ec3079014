#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The page at / in a real browser, under load: what it shows is what happens, and nothing
that others named becomes part of the document."""
import base64
import http.server
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import DEADLINE_S, Skip, run, until  # noqa: E402
from rig import Load, Observed, Pair  # noqa: E402

EVIL = '<img src=x onerror="document.title=1"></td><script>document.title="owned"</script>'
CHUNKS = "[chunks]\nchunk_memory = 8 MiB\n"
PICTURE = os.environ.get("KVD_PAGE_PICTURE", "")  # keep it there


class Browser:
    """Chromium without a screen, steered by its debugging pipe."""

    def __init__(self, url):
        self.program, self.url, self.last, self.said = shutil.which("chromium"), url, 0, []
        if not self.program:
            raise Skip("chromium (Debian: chromium)")

    def __enter__(self):
        self.home = tempfile.TemporaryDirectory(prefix="kvd-test-", ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.back, from_write = os.pipe()

        def place():  # it reads 3 and writes 4
            os.dup2(os.dup(to_read), 3)
            os.dup2(os.dup(from_write), 4)

        self.proc = subprocess.Popen(
            [self.program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-dev-shm-usage", "--user-data-dir=" + self.home.name,
             "--window-size=1200,1500", "--remote-debugging-pipe", "about:blank"],
            close_fds=False, preexec_fn=place, env=dict(os.environ, HOME=self.home.name),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.got = b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target,
                                flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            self.ask(part + ".enable")
        self.ask("Page.navigate", url=self.url)
        return self

    def __exit__(self, *exc):
        os.close(self.to)
        self.proc.terminate()
        self.proc.wait()
        os.close(self.back)
        self.home.cleanup()

    def message(self):
        while b"\0" not in self.got:
            assert select.select([self.back], [], [], DEADLINE_S)[0], "no answer"
            more = os.read(self.back, 1 << 16)
            assert more, "the browser ended"
            self.got += more
        text, _, self.got = self.got.partition(b"\0")
        return json.loads(text)

    def ask(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if hasattr(self, "session"):
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            got = self.message()
            if got.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.said.append(got["params"])
            if got.get("id") == self.last:
                assert "error" not in got, got
                return got["result"]

    def value(self, script):
        return self.ask("Runtime.evaluate", expression=script,
                        returnByValue=True)["result"].get("value")

    def text(self, id):
        return self.value("(document.getElementById('%s') || {}).textContent || ''" % id)

    def until(self, script):
        end = time.monotonic() + DEADLINE_S
        while not self.value(script):
            assert time.monotonic() < end, (script, self.said,
                                            self.value("document.body.textContent"))


def opened(p, room, **more):
    """A room of the decode daemon, which waits for its engine to bind pages."""
    p.decode.cmd("room.open", room=str(room), role="recv", pool=p.dst.pool,
                 sources=[dict(endpoint=p.prefill.endpoint, pool=p.src.name)], **more)


def page_shows_what_happens():
    with Pair(CHUNKS, rooms=True) as p, Load(p), \
            Browser("http://127.0.0.1:%d/" % p.daemons[1].port) as b:
        b.until("document.getElementById('state').textContent == 'serving'")
        b.until("parseFloat((document.getElementById('tile-ok') || {}).textContent) > 0")
        b.until("document.querySelectorAll('path[d*=L]').length == 8")
        assert b.text("tile-failed") == "0" and "E" not in b.text("codes")
        assert re.match(r"[\d.]+ (us|ms|s)$", b.text("tile-p50")), b.text("tile-p50")
        assert re.match(r"[\d.]+ [KMG]?i?B$", b.text("tile-in")), b.text("tile-in")
        assert not b.text("tile-in").startswith("0 "), b.text("tile-in")
        peer = "prefill@" + p.prefill.endpoint[len("tcp://"):].split("#")[0]
        assert b.text("peers").count(peer) == 1, b.text("peers")
        assert peer + "upshm" in b.text("peers"), b.text("peers")
        assert "pull" in b.text("phases") and "timer delay" in b.text("loop")
        assert b.text("name") == "decode" and "1 up" in b.text("peer-states")
        assert b.value("[...document.querySelectorAll('.x')].every(a => "
                       "a.textContent.endsWith('now')) && document.querySelector('.x') != null")
        assert re.search(r"[\d.]+ [KM]iB0 B$", b.value("document.querySelectorAll('.y')[1]"
                                                       ".textContent"))
        b.until("document.getElementById('parts').textContent.includes('of 8 MiB')")
        assert "Cluster" not in b.text("parts") and "Attention" not in b.text("parts")
        opened(p, 9998)
        b.until("document.getElementById('open').textContent.includes("
                "\"engine 'decode' to bind pages\")")
        p.decode.cmd("room.abort", room="9998", reason=EVIL)
        b.until("document.getElementById('codes').textContent.includes('EABORTED')")
        b.until("document.getElementById('failed').textContent.includes(%s)" % json.dumps(EVIL))
        b.until("document.getElementById('peers').textContent.includes(%s)" % json.dumps(EVIL))
        assert b.value("document.querySelectorAll('table img, table script').length") == 0
        picture = base64.b64decode(b.ask("Page.captureScreenshot")["data"])
        assert picture.startswith(b"\x89PNG") and len(picture) > 10000, len(picture)
        if PICTURE:
            with open(PICTURE, "wb") as f:
                f.write(picture)
        assert not b.said, b.said


def rooms_and_errors_are_shown_only_if_they_shall():
    with Pair() as p, Browser("http://127.0.0.1:%d/" % p.daemons[1].port) as b:
        d = p.daemons[1]
        opened(p, 1)
        assert d.status() == {"shown": False}
        b.until("document.getElementById('open-note').textContent.includes('metrics_rooms = no')")
        b.until("document.getElementById('peers').textContent.includes('prefill@')")
        assert not b.text("open") + b.text("failed")
        with open(d.config_path, "r+") as f:
            text = f.read().replace("metrics_rooms = no", "metrics_rooms = yes")
            f.seek(0)
            f.write(text)
        d.proc.send_signal(signal.SIGHUP)
        b.until("document.getElementById('open').textContent.includes('to bind pages')")
        assert not b.said, b.said


MEMBERS = {
    "rooms": {"room", "role", "state", "state_name", "bytes", "expected_bytes", "waits_for",
              "peers"},
    "failed": {"room", "role", "state_name", "bytes", "expected_bytes", "error", "peer",
               "transport", "ended_ms"},
    "peers": {"endpoint", "name", "state", "transport", "self", "why", "known_as", "since_ms",
              "rooms_ended", "rooms_failed", "downs", "last_error"}}


def status_is_bounded_and_holds_no_secrets():
    with Pair(rooms=True) as p:
        ticket = os.urandom(16).hex()
        for room in range(100, 130):
            opened(p, room, ticket=ticket, request_id="chat-17")
        for room in range(200, 225):
            p.decode.cmd("room.open", room=str(room), role="recv", pool=p.dst.pool,
                         sources=[dict(endpoint="tcp://127.0.0.1:%d" % room, pool="kv")])
        for room in range(300, 325):
            opened(p, room)
            p.decode.cmd("room.abort", room=str(room))
        d = p.daemons[1]
        until("the status is old", lambda: len(d.status()["failed"]["rooms"]) == 20)
        status, text = d.status(), d.get("/status.json")[2]
        rooms, peers = status["rooms"]["rooms"], status["peers"]["peers"]
        assert [r["room"] for r in rooms] == [str(n) for n in range(100, 120)], rooms
        assert len(status["failed"]["rooms"]) == 20 == len(peers)
        assert {p["state"] for p in peers} == {"dialing"}, peers  # 25 of them, and one that is up
        for name, allowed in MEMBERS.items():
            for record in status[name]["peers" if name == "peers" else "rooms"]:
                assert set(record) <= allowed, (name, set(record) - allowed)
        keys = [e.endpoint.split("#")[1] for e in (p.prefill, p.decode)]
        for secret in [ticket, "chat-17", *keys]:
            assert secret not in text, (secret, text)
        p.prefill.cmd("room.open", room="1", role="send", pool=p.src.pool)
        some = p.decode.cmd("peer.list", limit=2)
        assert len(some["peers"]) == 2 and some["peers"][0]["state"] == "dialing", some
        for room in list(range(100, 130)) + list(range(200, 225)):
            p.decode.cmd("room.abort", room=str(room))


def page_lets_nothing_in_from_outside():
    with Observed() as d:
        seen = set()
        for _ in range(2):
            status, headers, text = d.get("/")
            policy = headers["Content-Security-Policy"]
            nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'", policy).group(1)
            seen.add(nonce)
            assert status == 200 and "default-src 'none'" in policy, policy
            assert re.findall(r"<(?:script|style)[^>]*>", text) == [
                '<style nonce="%s">' % nonce, '<script nonce="%s">' % nonce]
            assert "@NONCE@" not in text
            urls = re.findall(r"[a-z]+://[^\s\"']+", text)
            assert urls == ["http://www.w3.org/2000/svg"], urls  # a name, not a source
        assert len(seen) == 2, "the same number twice"
        assert not re.search(r"\.(innerHTML|outerHTML|insertAdjacentHTML)|document\.write|eval\(",
                             text)


def hostile_names_are_text():
    """The page of a daemon over figures and a status with names that nobody should have."""
    evil = EVIL + '\\"'
    error = {"code": evil, "message": evil, "age_ms": 5}
    room = dict.fromkeys(("room", "role", "state_name", "peer"), evil) | {
        "error": error, "waits_for": {"what": evil}, "peers": [{"name": evil}] * 2}
    other = {"name": evil, "endpoint": evil, "state": evil, "transport": evil, "last_error": error}
    status = {"shown": True, "peers": {"peers": [other], "lost": [other]},
              **{name: {"rooms": [room]} for name in ("rooms", "failed")}}
    with Observed() as d:
        _, headers, page = d.get("/")
        figures = d.get("/metrics")[2]
        label = evil.replace("\\", "\\\\").replace('"', '\\"')
        figures += 'kvd_peer_bytes_total{peer="%s",direction="in"} 5\n' % label

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = {"/metrics": figures, "/status.json": json.dumps(status)}.get(self.path, page).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if self.path == "/" else "text/plain")
                if self.path == "/":
                    self.send_header("Content-Security-Policy", headers["Content-Security-Policy"])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Browser("http://127.0.0.1:%d/" % server.server_port) as b:
                b.until("document.getElementById('peers').textContent.includes('onerror')")
                assert b.value("document.title").endswith(": serving"), b.value("document.title")
                assert b.value("document.querySelectorAll('table img, table script').length") == 0
                for table, cells in (("open", 7), ("failed", 6), ("peers", 8)):
                    shown = b.value("[...document.querySelectorAll('#%s td')].filter(c => "
                                    "c.textContent.includes('onerror')).length" % table)
                    assert shown >= cells - 2, (table, shown, b.text(table))
                status["rooms"] = status["failed"] = {"rooms": []}  # the page keeps what failed
                b.until("document.getElementById('open').textContent === ''")
                assert evil in b.text("failed")
                assert not b.said, b.said
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


if __name__ == "__main__":
    run([page_shows_what_happens, rooms_and_errors_are_shown_only_if_they_shall,
         status_is_bounded_and_holds_no_secrets, page_lets_nothing_in_from_outside,
         hostile_names_are_text])
