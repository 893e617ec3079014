# SPDX-License-Identifier: Apache-2.0
"""Real engines that route, and what they and their daemons count: the parts of vllm_route.py and
route_bench.py."""
import concurrent.futures
import hashlib
import json
import os

import vllm_layouts
import vllm_store
from rig import FOLDER, equal, until
from vllm_ends import ctl
from vllm_pd import Engine as Plain
from vllm_route_prompts import Prompts

T = 64
LAYERS, HEADS = 4, {"llama": 8, "yarn": 8, "bytes": 4}
COUNTERS = {"posts": "kvd_store_routed_posts_total", "rows": "kvd_store_routed_rows_total",
            "steps": "kvd_store_routed_steps_total", "lost": "kvd_store_lost_steps_total",
            "rents": "kvd_store_rents_total"}
SERVED = ("attention_served_rows_total", "attention_requests_total",
          "attention_requests_failed_total")
LLAMA = "llama", ("--block-size", "32")
YARN = "yarn", ("--attention-backend", "CPU_MLA", "--block-size", "16")
BF16 = "llama", (*LLAMA[1], "--dtype", "bfloat16", "--logprobs-mode", "raw_logits")
BYTES = os.path.join(FOLDER, "sglang", "bytes")  # SGLang's model
KINDS = {"mla": YARN, "many-mla": YARN, "ranks-mla": YARN, "bf16": BF16,
         "cross": ("bytes", ("--model", BYTES, "--block-size", "32"))}  # of the others: LLAMA


class Engine(vllm_store.Engine):
    def __init__(self, case, name, node, extra, more=(), role="kv_both", **kw):
        self.role, self.ranks = role, kw.get("tp") or 1
        super().__init__(case, name, node, dict({"chunk_tokens": T, "route": "always"}, **extra),
                         own=True, more=(
                             *case.more, "--scheduler-cls", "kvd.vllm.RouteScheduler", *more),
                         look="vllm_route_look.Look", **kw)
        self.metrics = dict(vllm_store.STORE, **COUNTERS)

    def connector(self, args, role, side_port):
        return [word.replace('"kv_role": "kv_both"', '"kv_role": "%s"' % self.role)
                for word in super().connector(args, role, side_port)]

    def idle(self):
        """Nothing of a request that has ended is kept. Workers of several ranks cannot look into
        the scheduler's process: of them, no block and no transfer."""
        self.settled()
        assert self.ranks > 1 or until(lambda: self.look("kept")[0][:2] == [0, 0], 5), self.look("kept")


class Case(vllm_store.Case):
    def __init__(self, args, tally):
        self.count, self.transport, self.requests = args.prompts, args.transport, args.requests
        self.kind, self.more = KINDS.get(args.case, LLAMA)
        self.heads = HEADS.get(self.kind)
        self.told_prompts = Prompts(args.prompts)
        if self.kind != "bytes":
            vllm_layouts.model(self.kind)
        super().__init__(args, tally)
        self.args.kind = self.kind

    def reference(self):
        """Tokens of a plain engine; kept by what they depend on."""
        asked = self.told_prompts
        if (self.kind, self.more) == BF16:
            return []
        folder = BYTES if self.kind == "bytes" else os.path.join(FOLDER, "vllm", self.kind)
        with open(os.path.join(folder, "model.safetensors"), "rb") as f:
            mark = hashlib.sha256(f.read() + json.dumps(
                [asked.documents, asked.asked]).encode()).hexdigest()
        kept = os.path.join(FOLDER, "vllm", "route-%s-%s.json" % (self.kind, mark[:16]))
        if os.path.exists(kept):
            with open(kept) as f:
                return json.load(f)
        self.args.kind = self.kind
        plain = Plain(self.args, "plain", more=self.more)
        try:
            plain.wait()
            out = [plain.complete(asked.prompt(i), asked.asked[i][2])["tokens"]
                   for i in range(self.count)]
        finally:
            plain.stop()
        assert all(len(tokens) == a[2] for tokens, a in zip(out, asked.asked)), "the plain engine"
        with open(kept, "w") as f:
            json.dump(out, f)
        return out

    def node(self, name, more=""):
        if self.transport:
            more += "[transport]\ntransports = shm tcp\nrequire = %s\n" % self.transport
        return super().node(name, more)

    def engine(self, name, node, extra=(), **kw):
        engine = Engine(self, name, node, dict(extra), **kw)
        self.stack.callback(engine.stop)
        engine.wait()
        self.tally.add("engine %s is up" % name, True, "%.0f s" % engine.took)
        return engine

    # ---- requests ----

    def store(self, engine, documents=None):
        """Documents into the daemon of this engine, whose own prompts leave no chunk behind."""
        for document in self.told_prompts.documents if documents is None else documents:
            got = engine.complete(document, 1)
            assert not got["error"], got
        engine.settled()

    def ask(self, engine, i, most=None):
        """most: tokens of the answer."""
        wanted = self.wanted[i][:most]
        got = engine.complete(self.told_prompts.prompt(i), len(wanted))
        equal(got["tokens"], wanted, got["error"] or "tokens of prompt %d" % i)

    def at_once(self, engine, some, width):
        with concurrent.futures.ThreadPoolExecutor(width) as pool:
            list(pool.map(lambda i: self.ask(engine, i), some))

    def figures(self, engine, there):
        """Of vLLM, and of both daemons, once they have come to rest."""
        engine.settled()
        counts = engine.counters()
        out = dict(counts["sources"], **{k: v for k, v in counts.items() if k != "sources"})
        out["fetched"] = engine.node.chunks()["fetched_bytes"]
        for who, node in (("own", engine.node), ("there", there)):
            out.update(("%s_%s" % (who, k), v) for k, v in attention(node).items())
        return out

    def routed(self, engine, there, what, some, engines=1):
        """These prompts have all attended at their holder's, where so many engines have done so."""
        begin, asked = self.figures(engine, there), self.told_prompts
        what()
        rows = sum(map(asked.computed, some)) * self.heads * LAYERS
        wanted = {"external_kv_transfer": sum(map(asked.routed, some)), "fetched": 0, "loaded": 0,
                  "local_compute": sum(map(asked.own, some)), "rows": rows,
                  "lost": 0, "own_attention_requests_failed_total": 0,
                  "there_attention_served_rows_total": engines * rows}

        def came():
            end = self.figures(engine, there)
            return {k: end.get(k, 0) - begin.get(k, 0) for k in end}
        until(lambda: {k: came().get(k, 0) for k in wanted} == wanted, 10)
        got = came()
        equal({k: got.get(k, 0) for k in wanted}, wanted, "figures")
        equal(got["own_attention_requests_total"], got["posts"], "requests that its daemon had")
        return got

    def one(self, engine, there, i):
        """A step has the rows of one document: a request for each layer."""
        engine.forget()
        got = self.routed(engine, there, lambda: self.ask(engine, i), [i])
        equal(got["posts"], LAYERS * got["steps"], "requests for attention")
        assert got["steps"] >= self.told_prompts.asked[i][2], got["steps"]

    def many(self, engine, there, width):
        engine.forget()
        some = range(self.count)
        got = self.routed(engine, there, lambda: self.at_once(engine, some, width), some)
        assert LAYERS * got["steps"] <= got["posts"], got
        return "%d prompts, %d steps, %d requests for attention, %d rows" % (
            self.count, got["steps"], got["posts"], got["rows"])


def attention(node):
    """Figures of a daemon's attention."""
    rows = {row["name"]: int(row["value"]) for row in ctl(node, "stats")["metrics"]}
    return {name: rows[name] for name in SERVED}


def endpoint(node):
    return ctl(node, "health")["endpoint"]


def connected(here, count=1):
    assert until(lambda: here.chunks()["remote"]["up"] == count, 20), "the other daemon is not up"


def sides(case, route="always"):
    """A's daemon, which has the documents, and B."""
    there = case.node("there", "attention_threads = 1\n")
    A = case.engine("A", there)
    case.tally.check("A computes and stores documents", case.store, A)
    A.stop()
    return there, asker(case, "B", there, route)


def asker(case, name, there, route="always", **kw):
    """An engine at another daemon. It only loads: what it stored it would find at its own daemon,
    and the other one would have less to do."""
    here = case.node("of" + name, "chunk_peers = %s\n" % endpoint(there))
    connected(here)
    return case.engine(name, here, {"remote": 0.3, "route": route}, role="kv_consumer", more=(
        "--max-num-batched-tokens", "256") if case.kind == "llama" else (), **kw)
