#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""For compose.yaml's first request, not for production: a request goes to the prefill engine
for one token, and with what that answers to the decode engine, whose answer is passed on.

proxy.py PORT PREFILL_URL DECODE_URL"""
import http.server
import json
import sys
import urllib.error
import urllib.request
import uuid

PREFILL, DECODE = sys.argv[2:]
LONGEST = 1 << 20
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
         "remote_block_ids": None, "remote_host": None, "remote_port": None}


def ask(url, body, name):
    """(status, body) of an engine."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {
        "Content-Type": "application/json", "X-Request-Id": name})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read()
    except OSError as why:
        return 502, json.dumps({"error": "%s: %s" % (url, why)}).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        status, said = self.through()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def through(self):
        try:
            size = int(self.headers.get("Content-Length", 0))
            if not 0 < size <= LONGEST:
                raise ValueError("a body of 1 to %d bytes" % LONGEST)
            body = dict(json.loads(self.rfile.read(size)), stream=False)
        except (ValueError, TypeError) as why:
            return 400, json.dumps({"error": str(why)}).encode()
        name = uuid.uuid4().hex
        first = dict(body, max_tokens=1, kv_transfer_params=FIRST)
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        status, said = ask(PREFILL + self.path, first, name)
        if status != 200:
            return status, said
        params = json.loads(said).get("kv_transfer_params")
        return ask(DECODE + self.path, dict(body, kv_transfer_params=params), name)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
