#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""For compose.yaml's first request, not for production: a request goes to the prefill engine
for one token, and with what that answers to the decode engine, whose answer is passed on as
it comes.

proxy.py PORT PREFILL_URL DECODE_URL"""
import http.client
import http.server
import json
import signal
import sys
import urllib.parse
import uuid

PATHS = "/v1/completions", "/v1/chat/completions"
LONGEST = 1 << 20
ENGINE_S, CLIENT_S = 600, 60
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
         "remote_block_ids": None, "remote_host": None, "remote_port": None}
NOT_FIRST = "stream_options", "min_tokens"  # contradict one token that is not streamed


class Refused(Exception):
    """(status, words) of the answer."""


def ask(url, path, body, name):
    """The engine's answer, its body not read yet."""
    # not urllib, which heeds http_proxy and follows redirects
    line = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=ENGINE_S)
    try:
        line.request("POST", path, json.dumps(body), {
            "Content-Type": "application/json", "X-Request-Id": name, "Connection": "close"})
        return line.getresponse()
    except (OSError, http.client.HTTPException) as why:
        line.close()
        raise Refused(502, "%s: %s" % (url, why)) from None


def params_of(answer):
    """What the decode engine is to be told; None: nothing is there to fetch."""
    try:
        params = json.loads(answer.read()).get("kv_transfer_params")
        if params is None or isinstance(params, dict):
            return params
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        pass
    raise Refused(502, "the prefill engine's answer has no kv_transfer_params")


class Handler(http.server.BaseHTTPRequestHandler):
    timeout = CLIENT_S

    def do_POST(self):
        try:
            answer = self.through(self.body())
        except Refused as why:
            status, words = why.args
            self.begin(status, "application/json")
            self.wfile.write(json.dumps({"error": {"message": words, "code": status}}).encode())
            return
        with answer:
            self.begin(answer.status, answer.getheader("Content-Type", "application/json"))
            try:
                while data := answer.read1(LONGEST):
                    self.wfile.write(data)
            except (OSError, http.client.HTTPException) as why:
                self.log_error("%s", why)  # the client sees an answer that ends too early

    def begin(self, status, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def body(self):
        if self.path not in PATHS:
            raise Refused(404, "%s: not one of %s" % (self.path, ", ".join(PATHS)))
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 < size <= LONGEST:
                raise ValueError
        except ValueError:
            raise Refused(400, "Content-Length: 1 to %d bytes" % LONGEST) from None
        try:
            body = json.loads(self.rfile.read(size))
        except (OSError, ValueError, RecursionError) as why:
            raise Refused(400, "the body is not JSON: %s" % why) from None
        if not isinstance(body, dict):
            raise Refused(400, "the body is not a JSON object")
        return body

    def through(self, body):
        name = uuid.uuid4().hex  # the engines know the request by it
        first = {k: v for k, v in body.items() if k not in NOT_FIRST}
        first.update(max_tokens=1, stream=False, kv_transfer_params=FIRST)
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        answer = ask(PREFILL, self.path, first, name)
        if answer.status != 200:
            return answer
        with answer:
            params = params_of(answer)
        return ask(DECODE, self.path, dict(body, kv_transfer_params=params), name)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # PID 1 has no default for it
    PREFILL, DECODE = sys.argv[2:]
    http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
