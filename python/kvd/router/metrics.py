# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format: counters kept here, and gauges that are queried."""
import time

TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PAIRS_MAX = 10000


def _escaped(value):
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _line(name, labels, value):
    text = ",".join('%s="%s"' % (k, _escaped(v)) for k, v in labels)
    return "%s%s %r\n" % (name, "{%s}" % text if text else "", value)


class Histogram:
    def __init__(self):
        self.counts, self.sum, self.count = [0] * len(BUCKETS), 0.0, 0

    def add(self, value):
        self.sum, self.count = self.sum + value, self.count + 1
        for i, most in enumerate(BUCKETS):
            if value <= most:
                self.counts[i] += 1

    def text(self, name):
        rows = [("%g" % most, n) for most, n in zip(BUCKETS, self.counts)]
        rows.append(("+Inf", self.count))
        return "".join(_line(name + "_bucket", [("le", le)], n) for le, n in rows) + \
            _line(name + "_sum", (), self.sum) + _line(name + "_count", (), self.count)


class Metrics:
    def __init__(self):
        self.requests = {}  # {(path, status): n}
        self.pairs = {}  # {(prefill, decode, result): n}
        self.gone = {}  # {(role, url): [failed, late]}, of removed members
        self.retries = self.cut = self.left = self.refused = 0
        self.prompt = {"cached": 0, "uncached": 0}  # tokens
        self.alone = {"short": 0, "cached": 0}
        self.affinity = {"kept": 0, "moved": 0}
        self.first, self.whole = Histogram(), Histogram()
        self.begin = time.time()

    def ended(self, path, status, seconds):
        self.requests[path, status] = self.requests.get((path, status), 0) + 1
        self.whole.add(seconds)

    def tried(self, prefill, decode, result):
        key = (prefill.url if prefill else "", decode.url, result)
        if key not in self.pairs and len(self.pairs) >= PAIRS_MAX:
            self._forget()
        if key in self.pairs or len(self.pairs) < PAIRS_MAX:
            self.pairs[key] = self.pairs.get(key, 0) + 1

    def chose(self, held):
        """The Reservation of an answered request."""
        self.prompt["cached"] += int(held.cached)
        self.prompt["uncached"] += int(held.tokens - held.cached)
        if held.why_alone:
            self.alone[held.why_alone] += 1
        if held.kept is not None:
            self.affinity["kept" if held.kept else "moved"] += 1

    def keep(self, member):
        """A member was removed, perhaps into the other role: its counters must not decrease."""
        if len(self.gone) >= PAIRS_MAX:
            self._forget()
        failed = self.gone.setdefault((member.role, member.url), [0, 0])
        failed[0] += member.failed
        failed[1] += member.late

    def _forget(self):
        """Too many are kept: drop the members that were removed first."""
        self.pairs = {k: n for k, n in self.pairs.items() if ("prefill", k[0]) not in self.gone
                      and ("decode", k[1]) not in self.gone}
        self.gone.clear()

    def text(self, gate, members, draining, indexes=()):
        out = []

        def family(name, kind, words, rows):
            name = "kvd_router_" + name
            out.append("# HELP %s %s\n# TYPE %s %s\n" % (name, words, name, kind))
            out.append(rows.text(name) if isinstance(rows, Histogram) else
                       "".join(_line(name, labels, value) for labels, value in rows))
        family("requests_total", "counter", "finished requests, by HTTP status", [
            ((("path", path), ("status", status)), n)
            for (path, status), n in sorted(self.requests.items())])
        family("pair_requests_total", "counter", "tries by pair; prefill is empty for requests "
               "that decode serves alone", [
                   ((("prefill", p), ("decode", d), ("result", r)), n)
                   for (p, d, r), n in sorted(self.pairs.items())])
        for name, value, words in (
                ("retries_total", self.retries, "tries after a request's first one"),
                ("streams_cut_total", self.cut, "answers that were started but not completed"),
                ("clients_left_total", self.left, "clients that disconnected before the end of "
                                                  "their answer"),
                ("refused_total", self.refused, "requests refused by limits: 429, or 503 of the "
                 "queue")):
            family(name, "counter", words, [((), value)])
        for name, label, counts, words in (
                ("prompt_tokens_total", "state", self.prompt, "estimated tokens of answered "
                 "prompts; cached: expected to be in the prefix cache of the member that computes "
                 "the prompt"),
                ("alone_total", "why", self.alone, "prompts that decode computed by choice: short, "
                 "or cached there"),
                ("affinity_total", "result", self.affinity, "requests of sessions with an earlier "
                 "pair")):
            family(name, "counter", words, [(((label, value),), n) for value, n in counts.items()])
        if indexes:
            family("prefix_blocks", "gauge", "blocks of prompts in the index of prefixes", [
                ((("role", role),), index.blocks) for role, index in indexes.items()])
        family("in_flight", "gauge", "running requests", [((), gate.running)])
        family("queued", "gauge", "queued requests", [((), len(gate.queue))])
        family("draining", "gauge", "1 while draining: no new requests are accepted",
           [((), int(draining))])
        family("start_time_seconds", "gauge", "start time of the process since 1970",
           [((), self.begin)])
        family("first_token_seconds", "histogram", "time from a request to the first part of its "
               "answer", self.first)
        family("request_seconds", "histogram", "time from a request to its end", self.whole)
        now = time.monotonic()
        rows = [((("role", m.role), ("url", m.url)), m) for m in
                sorted(members.by_key.values(), key=lambda m: (m.role, m.url))]
        family("member_up", "gauge", "1 if the member may be used",
               [(labels, int(m.blocked(now) is None)) for labels, m in rows])
        family("member_requests", "gauge", "running requests of this router",
               [(labels, m.requests) for labels, m in rows])
        failed = {key: list(counts) for key, counts in self.gone.items()}
        for _, m in rows:
            counts = failed.setdefault((m.role, m.url), [0, 0])
            counts[0] += m.failed
            counts[1] += m.late
        for at, name, words in (
                (0, "member_failures_total", "failed tries"),
                (1, "member_late_total", "failed tries without an answer in time")):
            family(name, "counter", words, [((("role", role), ("url", url)), counts[at])
                                            for (role, url), counts in sorted(failed.items())])
        return "".join(out)
