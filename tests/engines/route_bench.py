#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a prefix at another daemon costs in vLLM on a CPU, by each way in which it is used, beside
floors that are measured in the same run.

route_bench.py [--quick] [--reps N] [--transport NAME] [--part NAME ...] [--json FILE] [--doc FOLDER]
               [--from FILE]

Ways: here, the prefix is in the engine's own cache: what the others add to; stock, vLLM with its own
kernels computes it; local, fetch, route: kvd's engine always does this; auto: it chooses, and may
fetch while it routes.

    rows      times to the first, 4th, … 256th token, of prefixes of 512 to 8192 tokens and questions
              of 16 and 256; bytes between the daemons, CPU of daemons and engine; floors: requests
              for attention with the same rows and chunks, without the engine's steps, a millisecond
              of such work apart and at once
    holders   1792 tokens at one to seven daemons
    clients   one to eight at the same time, with one document, and with one each
    pool      16 clients with a document each, and 66 free blocks

Each figure is the median of so many requests, the ways in turn, in which all answers have equal
tokens, up to a tie of two. One engine, one thread; all daemons are of this host. Prints tables, and goals with their
floors. --doc writes them as a page of docs/runs; --from: of an earlier --json.
Last line: N passed, N failed; a goal that is missed does not fail."""
import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import sys
import time
from types import SimpleNamespace as Some

import route_bench_page as page
import vllm_layouts
import vllm_route_case
from figures import cpu_of
from rig import FOLDER, Tally, equal, until
from route_bench_page import MARKS
from vllm_ends import ctl
from vllm_pd import Engine as Plain

RULES = {"here": "fetches", "local": "computes", "fetch": "fetches", "route": "routes", "auto": None}
WAYS = ("stock", *RULES)
CHUNK, BLOCK, DAEMONS = 256, 32, 7
MORE = ("--block-size", str(BLOCK), "--max-model-len", "8704")
ROUNDS = 12  # of a floor, of one repetition
APART_S = (1e-3, 0)  # of an engine's work between its requests, about as long as a layer's; none
WIRE = {"route": "attention_request_bytes_total", "fetch": "chunk_remote_bytes_total"}
SPREAD = 1792  # tokens at several holders: a chunk for each of seven
COMMON, CLIENTS, ANSWER = 2048, 8, 64  # of clients: tokens of a document, tokens of an answer
SMALL, CROWD, FREE = 512, 16, 66  # of the pool: tokens of a document, clients, blocks
QUESTION = 16
TIE = 1e-3  # of two logits: rounding may choose either


class Sizes:
    def __init__(self, quick, reps):
        self.reps = reps or (3 if quick else 7)
        self.tokens = (512, 2048) if quick else (512, 2048, 8192)
        self.holders = (1, DAEMONS) if quick else (1, 2, 4, DAEMONS)
        self.clients = (1, CLIENTS) if quick else (1, 2, 4, CLIENTS)


class Bench(vllm_route_case.Case):
    """Without prompts of its own."""

    def __init__(self, sizes, transport, tally):
        args = Some(case="gqa", prompts=0, requests=0, transport=transport, name="route-bench")
        self.sizes = sizes
        super().__init__(args, tally)
        self.kind = self.args.kind = "long"
        self.more = MORE
        vllm_layouts.model("long")
        rng, self.ties = random.Random(11), 0
        self.some = lambda n: [rng.randrange(3, 512) for _ in range(n)]
        self.documents = {count: self.some(count) for count in sizes.tokens}
        self.spread = {count: self.some(SPREAD) for count in sizes.holders}
        self.common = [self.some(COMMON) for _ in range(CLIENTS)]
        self.small = [self.some(SMALL) for _ in range(CROWD)]

    def reference(self):
        return []

    # ---- engines ----

    def start(self):
        there = [self.node("there%d" % i, "attention_threads = 1\n") for i in range(DAEMONS)]
        self.there = there[0]
        here = self.node("here", "chunk_peers = %s\n" % " ".join(map(vllm_route_case.endpoint, there)))
        vllm_route_case.connected(here, DAEMONS)
        A = vllm_route_case.Engine(self, "A", self.there, {"chunk_tokens": CHUNK})
        self.B = vllm_route_case.Engine(self, "B", here, {
            "chunk_tokens": CHUNK, "remote": 0.3, "route": "auto"}, role="kv_consumer")
        self.stock = Plain(self.args, "stock", more=MORE)
        for engine in (A, self.B, self.stock):  # they start side by side
            self.stack.callback(engine.stop)
        for engine in (A, self.B, self.stock):
            engine.wait()
        for count, document in self.spread.items():
            self.store_at(A, there[:count], [document])
        self.store_at(A, there[:1], [*self.documents.values(), *self.common, *self.small])
        A.stop()
        self.tally.check("prices are known", self.known)

    def store_at(self, engine, nodes, documents):
        """An equal share of the chunks at each of these daemons."""
        engine.look("scatter", [node.daemon.socket_path for node in nodes],
                    -(-SPREAD // CHUNK // len(nodes)))
        self.store(engine, documents)

    def known(self):
        """It takes several requests, and the others are the same in each run."""
        rng = random.Random(13)

        def ask():
            self.asked("auto", [rng.randrange(3, 512) for _ in range(min(self.sizes.tokens))], 1)
            self.B.complete(self.documents[max(self.sizes.tokens)] + [5] * QUESTION, 1)
            cost = ctl(self.B.node, "cost")
            peers = {peer["instance"] for peer in cost["peers"]}
            return any(speed["instance"] in peers for speed in cost["speeds"])
        assert until(ask, 60, 0.5), "the holder was not measured"

    # ---- requests ----

    @contextlib.contextmanager
    def way(self, name, documents=()):
        """The engine uses these documents in this way, which it had not before. -> who answers"""
        if name == "stock":
            yield self.stock
            return
        self.B.settled()
        self.B.forget()
        rule = RULES[name]
        if rule:
            self.B.look("break", rule)
        try:
            if name == "here":
                for document in documents:
                    self.B.complete(document + self.some(QUESTION), 1)
                self.B.settled()
            yield self.B
        finally:
            if rule:
                self.B.look("mend")

    def asked(self, way, prompt, answer, documents=()):
        """{each: seconds to each token, tokens}"""
        with self.way(way, documents) as engine:
            return self.one(engine, prompt, answer)

    def one(self, engine, prompt, answer):
        got = engine.complete(prompt, answer)
        if got["error"]:
            raise RuntimeError("%s: %s" % (engine.name, got["error"]))
        return got

    def together(self, engine, prompts, answer):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.one(engine, prompt, answer), prompts))

    def same(self, prompt, tokens):
        """{way: tokens} are equal, up to one for which another is as good."""
        (first, wanted), *others = tokens.items()
        for name, got in others:
            at = next((i for i, pair in enumerate(zip(got, wanted)) if len(set(pair)) > 1), None)
            if at is None:
                equal(len(got), len(wanted), "tokens of %s" % name)
                continue
            gap = self.gap(prompt + wanted[:at])
            assert gap < TIE, "token %d of %s is not that of %s, and the two best are %g apart" % (
                at, name, first, gap)
            self.ties += 1

    def gap(self, prompt):
        """Between the logits of the two best next tokens."""
        status, said = self.stock.call("POST", "/v1/completions", {
            "model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 2,
            "return_tokens_as_token_ids": True})
        equal(status, 200, said[:300])
        (best,) = json.loads(said)["choices"][0]["logprobs"]["top_logprobs"]
        first, second = sorted(best.values(), reverse=True)[:2]
        return first - second

    # ---- rows ----

    def rows(self):
        return [self.row(count, question) for count in self.sizes.tokens
                for question in page.QUESTIONS]

    def row(self, count, question):
        """times: to the tokens of MARKS, s; cpu: of daemons and engine in all, s; wire: bytes of
        rows, and of chunks, between daemons, of one request; floors: us."""
        document, ways = self.documents[count], {name: [] for name in WAYS}
        cpu = {name: [0.0, 0.0, 0.0] for name in RULES}
        wire, floors, hold = {}, {rows: [] for rows in (1, question)}, []
        prices = []
        for rep in range(self.sizes.reps):
            prompt, tokens = document + self.some(question), {}
            for name in turned(WAYS, rep):
                with self.way(name, [document]) as engine:
                    before = self.used(rep == 0)
                    got = self.one(engine, prompt, MARKS[-1])
                    if engine is self.B:
                        self.B.settled()
                        after = self.used(rep == 0)
                        cpu[name] = [x + b - a for x, a, b in zip(cpu[name], before[0], after[0])]
                        if rep == 0:
                            wire[name] = {k: after[1][k] - before[1][k] for k in WIRE}
                tokens[name] = got["tokens"]
                ways[name].append([got["each"][mark - 1] for mark in MARKS])
            self.same(prompt, tokens)
            for rows in floors:
                some, kernel = zip(*(self.floor(rows, count, apart) for apart in APART_S))
                hold.append(some[0][0])
                floors[rows].append([*(page.median(us[1:]) for us in some), kernel[0]])
            prices.append(self.B.look("prices", count // CHUNK, question)[0])
        return {"tokens": count, "question": question, "times": ways, "cpu": cpu, "wire": wire,
                "floors": floors, "hold_us": hold, "prices": prices}

    def used(self, counters):
        """(seconds of the engine's daemon, of the holder, of the engine; figures of the first)"""
        pids = self.B.node.daemon.proc.pid, self.there.daemon.proc.pid, self.B.proc.pid
        return [cpu_of(pid) for pid in pids], self.figures_of(self.B.node, WIRE) if counters else {}

    @staticmethod
    def figures_of(node, names):
        rows = {row["name"]: row["value"] for row in ctl(node, "stats")["metrics"]}
        return {word: rows[name] for word, name in names.items()}

    def floor(self, tokens, count, apart):
        """([us of a hold, of requests for attention], us of the holder's kernel for one): rows of so
        many tokens, over so many of the last prompt."""
        names = {"s": "attention_compute_seconds_total", "n": "attention_batches_total"}
        begin = self.figures_of(self.there, names)
        (us,) = self.B.look("posts", tokens * self.heads, count // CHUNK, ROUNDS,
                           apart)
        end = self.figures_of(self.there, names)
        return us, 1e6 * (end["s"] - begin["s"]) / max(1, end["n"] - begin["n"])

    # ---- several holders ----

    def holders(self):
        """[{holders, times: {way: [seconds to the first token, to the last]}}]"""
        out = [{"holders": count, "times": {"route": [], "fetch": []}} for count in self.spread]
        for rep in range(self.sizes.reps):
            for at in turned(out, rep):
                prompt, tokens = self.spread[at["holders"]] + self.some(QUESTION), []
                for name, times in at["times"].items():
                    got = self.asked(name, prompt, ANSWER)
                    times.append([got["each"][0], got["each"][-1]])
                    tokens.append(got["tokens"])
                self.same(prompt, dict(zip(at["times"], tokens)))
        return out

    # ---- several clients ----

    def clients(self):
        """[{clients, documents, ways: {way: [[first, last] of each client]}}]"""
        out = [{"clients": count, "documents": documents, "ways": {
            name: [] for name in ("here", "fetch", "route")}}
            for count in self.sizes.clients for documents in sorted({1, count})]
        for rep in range(self.sizes.reps):
            for at in turned(out, rep):
                some = self.common[:at["documents"]]
                prompts, tokens = [some[i % len(some)] + self.some(QUESTION)
                                   for i in range(at["clients"])], []
                for name, times in at["ways"].items():
                    with self.way(name, some) as engine:
                        got = self.together(engine, prompts, ANSWER)
                    times.append([[one["each"][0], one["each"][-1]] for one in got])
                    tokens.append([one["tokens"] for one in got])
                for prompt, *some in zip(prompts, *tokens):
                    self.same(prompt, dict(zip(at["ways"], some)))
        return out

    def pool(self):
        """{way: [[requests at the same time, seconds until all were answered]]}"""
        out, prompts = {"fetch": [], "route": []}, [one + self.some(QUESTION) for one in self.small]
        for _ in range(self.sizes.reps):
            tokens = []
            for name, found in out.items():
                with self.way(name) as engine:
                    self.B.look("crowd")
                    self.B.look("shrink", FREE)
                    try:
                        begin = time.monotonic()
                        got = self.together(engine, prompts, ANSWER)
                        took = time.monotonic() - begin
                    finally:
                        self.B.look("widen")
                        self.B.complete([5] * BLOCK, 1)  # vLLM counts its blocks in a step
                    found.append([int(self.B.look("crowd")[0]), took])
                    tokens.append([one["tokens"] for one in got])
            for prompt, *some in zip(prompts, *tokens):
                self.same(prompt, dict(zip(out, some)))
        own = -(-(QUESTION + ANSWER) // BLOCK)
        return {"ways": out, "clients": CROWD, "blocks": FREE, "tokens": SMALL, "own": own,
                "whole": own + SMALL // BLOCK}


def turned(items, by):
    at = by % len(items)
    return items[at:] + items[:at]


PARTS = {"rows": Bench.rows, "holders": Bench.holders, "clients": Bench.clients, "pool": Bench.pool}


def measure(bench, parts):
    told = {"about": page.about(), "loads": [os.getloadavg()[0]], "reps": bench.sizes.reps,
            "layers": vllm_route_case.LAYERS, "heads": vllm_route_case.HEADS["llama"], "chunk": CHUNK,
            "answer": ANSWER, "transport": bench.transport or "shm"}
    with contextlib.ExitStack() as bench.stack:
        begin = time.monotonic()
        bench.start()
        for name in parts:
            said = time.monotonic()
            told[name] = PARTS[name](bench)
            told["loads"].append(os.getloadavg()[0])
            bench.tally.add(name, True, "%.0f s" % (time.monotonic() - said))
        bench.tally.check("nothing is kept", bench.B.idle)
        bench.tally.note("answers that differ from a tie on", bench.ties)
        told["seconds"] = time.monotonic() - begin
    return json.loads(json.dumps(told))  # as it is read again: keys of JSON are words


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="without 8192 tokens, medians of 3")
    parser.add_argument("--reps", type=int)
    parser.add_argument("--transport", choices=["shm", "tcp"], help="between the daemons")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", default=os.path.join(FOLDER, "results", "route-bench.json"))
    parser.add_argument("--from", dest="source", help="measure nothing: figures of --json")
    parser.add_argument("--doc", help="a folder: the page of this run is written there")
    args = parser.parse_args()
    tally = Tally()
    try:
        if args.source:
            with open(args.source, encoding="utf-8") as file:
                figures = json.load(file)
        else:
            bench = Bench(Sizes(args.quick, args.reps), args.transport, tally)
            figures = measure(bench, args.part)
            os.makedirs(os.path.dirname(os.path.abspath(args.json)), exist_ok=True)
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(figures, file)
        print(page.text(figures))
        if args.doc:
            print(page.write(figures, args.doc))
        tally.add("goals are judged", True)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close("route-bench")


if __name__ == "__main__":
    sys.exit(main())
