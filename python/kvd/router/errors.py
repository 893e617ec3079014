# SPDX-License-Identifier: Apache-2.0
"""How a request ends without an answer of an engine, and how a try ends."""
import json

JSON = "application/json"
KINDS = {404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error",
         501: "not_implemented_error", 504: "timeout_error"}


def error_body(status, message):
    """A JSON text in the form of OpenAI's API."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return json.dumps({"error": {"message": message, "param": None, "code": status,
                                 "type": kind}}).encode()


class Refused(Exception):
    """The client's answer, before anything was sent."""

    def __init__(self, status, message, retry_after=None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Answered(Exception):
    """An engine's complete answer, which is passed to the client unchanged."""

    def __init__(self, status, kind, body):
        super().__init__("HTTP %d" % status)
        self.status, self.kind, self.body = status, kind, body


class Failed(Exception):
    """A try that may be followed by another.

    member: the one that failed. broken: it did not answer as an HTTP server does; otherwise it
    reported an error, which may be its partner's. hung: it answered no other request either, for as
    long as it may. answer: its reply, an Answered. status: 504 if it gave no answer in time."""

    def __init__(self, member, why, *, status=502, broken=False, busy=False, hung=False,
                 answer=None):
        super().__init__("%s: %s" % (member.label, why))
        self.member, self.why, self.status, self.broken = member, why, status, broken
        self.busy, self.hung, self.answer = busy, hung, answer
