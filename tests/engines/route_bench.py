#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a prefix at another daemon costs in vLLM on a CPU, by each way in which it is used.

route_bench.py [--reps 7] [--tokens 512 2048 8192] [--transport NAME]

Columns: here, the prefix is in the engine's own cache: what the other ways add to; stock, vLLM with
its own kernels computes it; local, fetch, route: kvd's engine always does this; auto: it chooses, and
may fetch while it routes. Rows: tokens of the prefix, and of the answer. Each is the median of so
many requests, one at a time, the ways in turn; a question has 16 tokens.

Prints tables for docs/runs; results/route-bench.json has all values.
Last line: N passed, N failed; a goal that is missed does not fail."""
import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace as Some

import vllm_layouts
import vllm_route
from rig import FOLDER, Tally, equal
from vllm_pd import Engine as Plain

RULES = {"here": "fetches", "local": "computes", "fetch": "fetches", "route": "routes", "auto": None}
WAYS = ("stock", *RULES)
ANSWERS, QUESTION, CHUNK = (1, 4, 16, 64, 256), 16, 256
MORE = ("--block-size", "32", "--max-model-len", "8704")


class Bench(vllm_route.Case):
    """Without prompts of its own."""

    def __init__(self, args, tally):
        args = Some(case="gqa", prompts=0, requests=0, transport=args.transport, name="route-bench",
                    reps=args.reps, tokens=args.tokens)
        self.reps, self.tokens = args.reps, args.tokens
        super().__init__(args, tally)
        self.kind = self.args.kind = "long"
        self.more = MORE
        vllm_layouts.model("long")
        rng = random.Random(11)
        self.some = lambda n: [rng.randrange(3, 512) for _ in range(n)]
        self.documents = {count: self.some(count) for count in self.tokens}

    def reference(self):
        return []

    def run(self):
        there = self.node("there", "attention_threads = 1\n")
        A = self.engine("A", there, {"chunk_tokens": CHUNK})
        self.store(A, self.documents.values())
        A.stop()
        here = self.node("here", "chunk_peers = %s\n" % vllm_route.endpoint(there))
        vllm_route.connected(here)
        self.B = self.engine("B", here, {"chunk_tokens": CHUNK, "remote": 0.3, "route": "auto"},
                             role="kv_consumer")
        self.stock = Plain(self.args, "stock", more=MORE)
        self.stack.callback(self.stock.stop)
        self.stock.wait()
        self.tally.check("prices are known", self.known)
        return {(count, answer): self.row(count, answer) for count in self.tokens
                for answer in ANSWERS}

    def known(self):
        def ask():
            self.asked("auto", self.some(min(self.tokens)), 1)
            self.B.complete(self.documents[max(self.tokens)] + self.some(QUESTION), 1)
            cost = vllm_route.ctl(self.B.node, "cost")
            peers = {peer["instance"] for peer in cost["peers"]}
            return any(speed["instance"] in peers for speed in cost["speeds"])
        assert vllm_route.until(ask, 60, 0.5), "the holder was not measured"

    def asked(self, way, prompt, answer):
        """(seconds to the first token, and to the last one, tokens)"""
        engine = self.stock if way == "stock" else self.B
        rule = RULES.get(way)
        if rule:
            engine.look("break", rule)
        try:
            begin = time.monotonic()
            got = engine.complete(prompt, answer)
            last = time.monotonic() - begin
        finally:
            if rule:
                engine.look("mend")
        if got["error"]:
            raise RuntimeError("%s: %s" % (way, got["error"]))
        return got["first"], last, got["tokens"]

    def row(self, count, answer):
        """{way: ([seconds to the first token], [to the last one])}"""
        out = {way: ([], []) for way in WAYS}
        for rep in range(self.reps):
            prompt, tokens = self.documents[count] + self.some(QUESTION), {}
            for way in WAYS[rep % len(WAYS):] + WAYS[:rep % len(WAYS)]:
                if way != "stock":
                    self.B.settled()
                    self.B.forget()
                    if way == "here":
                        self.asked(way, self.documents[count] + self.some(QUESTION), 1)
                        self.B.settled()
                first, last, tokens[way] = self.asked(way, prompt, answer)
                out[way][0].append(first)
                out[way][1].append(last)
            for way, one in tokens.items():
                equal(one, tokens["stock"], "tokens of %s" % way)
        return out


def tables(rows, tokens):
    """The medians, and ratios with their goals."""
    mid = {(*key, way, i): 1e3 * statistics.median(values[i]) for key, row in rows.items()
           for way, values in row.items() for i in (0, 1)}
    for title, i in (("ms to the first token, of answers of 1 token", 0),
                     ("ms to the last token", 1)):
        print("\n%s\n| tokens, answer | %s |\n|---|%s" % (title, " | ".join(WAYS),
                                                        "---|" * len(WAYS)))
        for count, answer in rows:
            if i or answer == 1:
                print("| %d, %d | %s |" % (count, answer, " | ".join(
                    "%.1f" % mid[count, answer, way, i] for way in WAYS)))

    def each(way, count):
        """ms of a later token"""
        few, many = ANSWERS[0], ANSWERS[-1]
        return (mid[count, many, way, 1] - mid[count, few, way, 1]) / (many - few)
    ratios = [mid[count, answer, "auto", 1] / min(
        mid[count, answer, way, 1] for way in ("route", "fetch", "local"))
        for count, answer in rows]
    least, most = min(tokens), max(tokens)
    print("\n| ratio | measured | goal |\n|---|---|---|")
    for words, value, goal in (
            ("auto / the best other way, median of all rows", statistics.median(ratios), 1.3),
            ("auto / the best other way, largest", max(ratios), 2.0),
            ("first token, route / fetch, %d tokens" % most,
             mid[most, 1, "route", 0] / mid[most, 1, "fetch", 0], 0.7),
            ("a later token, routed, %d / %d tokens" % (most, least),
             each("route", most) / each("route", least), None),
            ("a later token, here / stock, %d tokens" % least,
             each("here", least) / each("stock", least), 1.3),
            ("first token, local / stock, %d tokens" % most,
             mid[most, 1, "local", 0] / mid[most, 1, "stock", 0], 1.5)):
        print("| %s | %.2f | %s |" % (words, value, "" if goal is None else "<= %g %s" % (
            goal, "yes" if value <= goal else "no")))
    print("\nms of a later token: %s" % ", ".join("%s %d: %.2f" % (
        way, count, each(way, count)) for way in ("here", "stock", "route") for count in tokens))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--transport", choices=["shm", "tcp"])
    args = parser.parse_args()
    tally = Tally()
    try:
        bench = Bench(args, tally)
        with contextlib.ExitStack() as bench.stack:
            rows = bench.run()
        tables(rows, args.tokens)
        os.makedirs(os.path.join(FOLDER, "results"), exist_ok=True)
        with open(os.path.join(FOLDER, "results", "route-bench.json"), "w") as out:
            json.dump([[*key, row] for key, row in rows.items()], out)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close("route-bench")


if __name__ == "__main__":
    sys.exit(main())
