#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""contrib/container/proxy.py between two engines of this file, which refuse what vLLM refuses
and note what they were asked."""
import contextlib
import http.client
import http.server
import json
import os
import select
import socket
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TREE, "tests", "lib"))
from kvd_daemon import DEADLINE_S, free_port, run  # noqa: E402

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e",
          "remote_block_ids": [[3, 9]], "remote_request_id": "r", "remote_host": "10.0.0.2",
          "remote_port": 5600, "tp_size": 1}
ASK = {"model": "m", "prompt": "Once", "max_tokens": 16}


class Engine(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked, self.say, self.go_on = [], None, threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return "http://127.0.0.1:%d" % self.server_address[1]


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["X-Request-Id"]))
        most = body.get("max_completion_tokens", body.get("max_tokens", 16))
        if "stream_options" in body and not body.get("stream"):
            self.say(400, b'{"error": "stream_options without stream"}')
        elif body.get("min_tokens", 0) > most:
            self.say(400, b'{"error": "min_tokens is above max_tokens"}')
        elif self.server.say is not None:
            self.say(*self.server.say)
        elif (body["kv_transfer_params"] or {}).get("do_remote_decode"):
            self.say(200, json.dumps({"kv_transfer_params": PARAMS}).encode())
        elif body.get("stream"):
            self.stream()
        else:
            self.say(200, b'{"choices": [{"text": " upon a time"}]}')

    def say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self):
        """The second event after the test has read the first."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.server.go_on.wait(DEADLINE_S)
        self.wfile.write(b"data: [DONE]\n\n")


class Proxy:
    def __init__(self, prefill, decode, env=None):
        self.port = free_port()
        self.proc = subprocess.Popen(
            [sys.executable, TREE + "/contrib/container/proxy.py", str(self.port), prefill, decode],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=dict(os.environ, **(env or {})))
        while True:  # until it listens
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.port), DEADLINE_S).close()
                return
            assert self.proc.poll() is None, self.proc.stderr.read()
            select.select([], [], [], 0.02)

    def ask(self, body, path="/v1/completions"):
        """(status, answer)."""
        with self.post(json.dumps(body).encode(), path) as answer:
            return answer.status, json.loads(answer.read())

    def post(self, text, path="/v1/completions"):
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        line.request("POST", path, text)
        return line.getresponse()

    def raw(self, text):
        """What comes back to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as line:
            line.sendall(text)
            return b"".join(iter(lambda: line.recv(65536), b"")).decode()

    def end(self):
        """Its log."""
        self.proc.terminate()
        try:
            log = self.proc.communicate(timeout=DEADLINE_S)[1].decode()
        finally:
            self.proc.kill()
        assert self.proc.returncode == 0, self.proc.returncode
        return log


@contextlib.contextmanager
def proxy(env=None):
    prefill, decode = Engine(), Engine()
    one = Proxy(prefill.url, decode.url, env)
    try:
        yield one, prefill, decode
    finally:
        log = one.end()
        for engine in (prefill, decode):
            engine.shutdown()
            engine.server_close()
    assert "Traceback" not in log, log


# ---- cases ----

def request_takes_its_way_by_prefill_to_decode():
    for path, more in (("/v1/completions", {}),
                       ("/v1/chat/completions", {"max_completion_tokens": 16})):
        with proxy() as (one, prefill, decode):
            body = dict(ASK, min_tokens=4, **more)
            status, said = one.ask(body, path)
            assert status == 200 and said["choices"][0]["text"] == " upon a time", said
            (way, first, name), = prefill.asked
            assert way == path and first["max_tokens"] == 1 and first["stream"] is False, first
            assert first.get("max_completion_tokens", 1) == 1 and "min_tokens" not in first
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert first["kv_transfer_params"]["do_remote_prefill"] is False
            assert len(name) == 32
            assert decode.asked == [(path, dict(body, kv_transfer_params=PARAMS), name)]


def stream_comes_event_by_event():
    with proxy() as (one, prefill, decode):
        body = dict(ASK, stream=True, stream_options={"include_usage": True})
        with one.post(json.dumps(body).encode()) as answer:
            assert answer.status == 200
            assert answer.getheader("Content-Type") == "text/event-stream"
            assert answer.readline() == b"data: 1\n"
            decode.go_on.set()
            assert answer.read() == b"\ndata: [DONE]\n\n"
        assert "stream_options" not in prefill.asked[0][1]


def nothing_to_fetch_is_passed_on_and_the_clients_own_words_are_not():
    with proxy() as (one, prefill, decode):
        prefill.say = 200, b'{"choices": [{"finish_reason": "stop"}]}'
        forged = dict(PARAMS, remote_host="203.0.113.9")
        assert one.ask(dict(ASK, kv_transfer_params=forged))[0] == 200
        assert decode.asked[0][1]["kv_transfer_params"] is None


def refusals_of_either_engine_reach_the_client():
    with proxy() as (one, prefill, decode):
        decode.say = 503, b'{"error": "full"}'
        assert one.ask(ASK) == (503, {"error": "full"})
        prefill.say = 404, b'{"error": "no such model"}'
        assert one.ask(ASK) == (404, {"error": "no such model"})
        assert len(decode.asked) == 1
        for text in (b"not JSON", b"[]", b'{"kv_transfer_params": 7}', b""):
            prefill.say = 200, text
            status, said = one.ask(ASK)
            assert status == 502 and "kv_transfer_params" in said["error"]["message"], said
        assert len(decode.asked) == 1


def engine_that_is_not_there_is_named():
    gone = "http://127.0.0.1:%d" % free_port()
    prefill = Engine()
    for urls in ((gone, prefill.url), (prefill.url, gone)):
        one = Proxy(*urls)
        try:
            status, said = one.ask(ASK)
            assert status == 502 and gone in said["error"]["message"], said
        finally:
            log = one.end()
        assert "Traceback" not in log, log
    prefill.shutdown()
    prefill.server_close()


def bad_requests_reach_no_engine():
    long = b"[" * 200000
    with proxy() as (one, prefill, decode):
        for text in (b"{", b"[]", b'[["model", "m"]]', b"7", b'"ab"', b"\xff", long):
            with one.post(text) as answer:
                assert answer.status == 400, (text[:20], answer.status)
                assert "JSON" in json.loads(answer.read())["error"]["message"]
        for head in ("", "Content-Length: x\r\n", "Content-Length: -1\r\n",
                     "Content-Length: 0\r\n", "Content-Length: 1048577\r\n",
                     "Transfer-Encoding: chunked\r\n"):
            said = one.raw(("POST /v1/completions HTTP/1.1\r\n%s\r\n" % head).encode())
            assert " 400 " in said and "1 to 1048576 bytes" in said, said
        # the path is no way to another host, nor to the engines' other commands
        for path in ("@127.0.0.1:1/v1/completions", "/sleep", "http://x/v1/completions",
                     "/v1/completions/../sleep"):
            said = one.raw(("POST %s HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}" % path).encode())
            assert " 404 " in said and "/v1/chat/completions" in said, said
        assert prefill.asked == decode.asked == []


def client_that_leaves_costs_nobody_else():
    with proxy() as (one, _, decode):
        answer = one.post(json.dumps(dict(ASK, stream=True)).encode())
        answer.readline()
        answer.close()
        decode.go_on.set()
        assert one.ask(ASK)[0] == 200


def engines_are_asked_directly():
    """A proxy of the environment is for the world, not for engines of this host."""
    away = "http://127.0.0.1:%d" % free_port()
    with proxy({"http_proxy": away, "HTTP_PROXY": away, "no_proxy": ""}) as (one, _, _):
        assert one.ask(ASK)[0] == 200


if __name__ == "__main__":
    run([request_takes_its_way_by_prefill_to_decode, stream_comes_event_by_event,
         nothing_to_fetch_is_passed_on_and_the_clients_own_words_are_not,
         refusals_of_either_engine_reach_the_client, engine_that_is_not_there_is_named,
         bad_requests_reach_no_engine, client_that_leaves_costs_nobody_else,
         engines_are_asked_directly])
