#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers with HiCache on the daemon's chunks: prompts that one has computed are loaded
by itself, by the next one, and from another daemon.

sglang_store.py lives|ranks|ends|prices [--nixl native] [--name NAME]

    lives   a server that forgets, one that is killed and its successor with another memory layout,
            one at another daemon
    ranks   one rank writes and two read, and the other way round
    ends    the daemon dies, stands still, is empty again; new weights; SGLang's admin API
    prices  pages of another daemon that are dear to compute, and cheap

SGLang's servers, tree, host pools, storage threads and hashes are its own; its CUDA kernels that
copy between a device and the host are stand-ins (shim/). Greedy tokens must be those of a server
without HiCache. That they come of chunks is seen from the daemon's figures and from where SGLang
says that tokens came from, both to the token. Last line: N passed, N failed."""
import argparse
import contextlib
import json
import os
import random
import subprocess
import sys

import sglang_pd
from rig import CONFIG, Daemon, Node, Tally, equal, logs, pause, until
from sglang_pd import PAGE, prompt, request

BUILD = os.environ.get("KVD_BUILD") or os.path.join(os.path.dirname(__file__), "../../build/rel")
TOKEN = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, head, float32
OUT = 8  # tokens of an answer
ADMIN = "admin"  # its key
SHARED = 100  # tokens of len200 that branch starts with
PROMPTS = {"len15": 15, "len16": 16, "len33": 33, "len200": 200, "len777": 777, "len1900": 1900}
EXTRA = {"backend_name": "kvd", "module_path": "kvd.sglang.store", "class_name": "KvdStore",
         "interface_v1": 1, "prefetch_threshold": PAGE}
METRIC = "sglang:kvd_store_"
DIRECT = {"layer_first": "layer_first", "page_first": "page_first_direct"}


class StoreNode(Node):
    def __init__(self, name, stores=()):
        self.nixl = "native"
        more = "chunk_peers = %s\n" % " ".join(stores) if stores else ""
        self.daemon = Daemon(CONFIG + "[chunks]\nchunk_memory = 64 MiB\n" + more, name=name)

    def call(self, *words):
        done = subprocess.run([BUILD + "/kvd-ctl", "-s", self.daemon.socket_path, "-j", *words],
                              capture_output=True, text=True, timeout=60, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def chunks(self):
        return self.call("chunks")

    def ready(self):
        assert until(lambda: (self.chunks() or {}).get("ready"), 20), "no memory for chunks"
        return self


class Engine(sglang_pd.Engine):
    def __init__(self, case, name, node, extra=None, layout="layer_first", tp=1, store=True,
                 policy="wait_complete", more=(), env=()):
        self.node, self.env = node, dict(env)
        more = ["--tp", str(tp), *more]
        if store:
            more += ["--enable-hierarchical-cache", "--hicache-ratio", "2",
                     "--hicache-io-backend", "direct", "--hicache-mem-layout", layout,
                     "--hicache-storage-backend", "dynamic",
                     "--hicache-storage-prefetch-policy", policy, "--admin-api-key", ADMIN,
                     "--hicache-storage-backend-extra-config",
                     json.dumps(dict(EXTRA, **(extra or {})))]
        super().__init__(case.args, name, node, *more)

    def environment(self, args, node):
        return dict(super().environment(args, node), KVD_ENGINES_HICACHE="1", **self.env)

    def call(self, method, path, body=None, seconds=60, head=None):
        head = dict(head or {}, Authorization="Bearer " + ADMIN)
        return super().call(method, path, body, seconds, head)

    def forget(self):
        """Its device's and its host's caches, and not the store."""
        def flushed():
            status, said = self.call("POST", "/flush_cache")
            return status == 200 and b"flushed" in said
        assert until(flushed, 20), "the cache is not flushed"

    def metrics(self):
        """The store's, without their prefix."""
        out = {}
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            name = line.partition("{")[0]
            if name.startswith(METRIC):
                out[name[len(METRIC):]] = float(line.rsplit(" ", 1)[-1])
        return out

    def said(self, words):
        with open(self.log, errors="replace") as f:
            return words in f.read()


class Case:
    def __init__(self, args, tally):
        self.args, self.tally, self.stack = args, tally, None
        self.prompts = {name: prompt(n, name) for name, n in PROMPTS.items()}
        self.prompts["branch"] = self.prompts["len200"][:SHARED] + prompt(60, "branch")
        self.wanted = {}

    def node(self, name, stores=()):
        return self.stack.enter_context(StoreNode(name, stores)).ready()

    def engine(self, name, node, **kw):
        engine = Engine(self, name, node, **kw)
        self.stack.callback(engine.stop)
        engine.wait()
        self.tally.add("engine %s is up" % name, True, "%.0f s" % engine.took)
        return engine

    def plain(self):
        """What is right."""
        engine = self.engine("plain", Node("nixl", "none"), store=False)
        for name, ids in self.prompts.items():
            self.wanted[name] = engine.generate(request(ids, OUT))["output_ids"]
        engine.stop()

    # ---- what is expected ----

    def length(self, name):
        return len(self.prompts[name])

    def found(self, name):
        """Tokens that can be loaded: one at least is computed."""
        return (self.length(name) - 1) // PAGE * PAGE

    def saved(self, name):
        """Pages of the prompt and its answer, whose last token is not computed."""
        return (self.length(name) + OUT - 1) // PAGE

    # ---- requests ----

    def ask(self, engine, name):
        """{where: cached tokens}; the answer must be right."""
        got = engine.generate(request(self.prompts[name], OUT))
        equal(got["output_ids"], self.wanted[name], "tokens of " + name)
        told = got["meta_info"]["cached_tokens_details"] or {}
        return {where: told.get(where, 0) for where in ("device", "host", "storage")}

    def figures(self, node):
        told = node.chunks()
        return {"put": told["put_bytes"], "fetched": told["fetched_bytes"],
                "chunks": told["chunks"]}

    def one(self, engine, name, storage, device=0, put=None):
        """`storage` tokens of it are loaded; put: so many pages are stored."""
        node = engine.node
        begin = self.figures(node)
        cached = self.ask(engine, name)
        equal(cached, {"device": device, "host": 0, "storage": storage}, "cached tokens")
        wanted = {"fetched": storage * TOKEN}
        if put is not None:
            wanted.update(put=put * PAGE * TOKEN, chunks=put)

        def came():
            end = self.figures(node)
            return {k: end[k] - begin[k] for k in wanted}
        until(lambda: came() == wanted, 10)
        equal(came(), wanted, "figures of the daemon")
        return "%d tokens" % storage

    def fresh(self, engine, name, storage, put=None):
        """A prompt that the server itself does not have."""
        engine.forget()
        return self.one(engine, name, storage, put=put)


# ---- lives -------------------------------------------------------------------------------

def lives(case):
    tally, node = case.tally, case.node("store")
    case.plain()
    A = case.engine("A", node)
    for name in PROMPTS:
        tally.check("A computes and stores %s" % name, case.fresh, A, name, 0, case.saved(name))
    for name in PROMPTS:
        tally.check("A has forgotten %s, and loads it" % name, case.fresh, A, name,
                    case.found(name), 0)
    A.kill()
    B = case.engine("B", node, layout="page_first_direct")
    for name in PROMPTS:
        tally.check("B loads %s of A" % name, case.fresh, B, name, case.found(name), 0)
    tally.check("B loads what follows its own pages", behind, case, B)
    B.stop()
    away = beside(case, "away", node)
    C = case.engine("C", away, extra={"remote": 5})
    for name in PROMPTS:
        tally.check("C loads %s of A from the other daemon" % name, remote, case, C, name)
    D = case.engine("D", away, extra={"revision": "another"})
    tally.check("D has other weights, and finds nothing", case.fresh, D, "len777", 0,
                case.saved("len777"))


def beside(case, name, node):
    """A daemon that reads chunks of this one."""
    away = case.node(name, [node.call("status")["endpoint"]])
    assert until(lambda: any(p["state"] == "up" for p in away.call("peers")["peers"]), 20)
    return away


def behind(case, engine):
    """The beginning is in its device's cache, of another prompt."""
    shared = SHARED // PAGE * PAGE
    case.fresh(engine, "len200", case.found("len200"))
    case.one(engine, "branch", 0, device=shared, put=case.saved("branch") - shared // PAGE)
    case.fresh(engine, "len200", case.found("len200"))
    return case.one(engine, "branch", case.found("branch") - shared, device=shared, put=0)


def remote(case, engine, name):
    """All of it is there, and nothing is kept of it here before it is put."""
    return case.fresh(engine, name, case.found(name))


# ---- ranks -------------------------------------------------------------------------------

def ranks(case):
    tally, node = case.tally, case.node("store")
    case.plain()
    names = [name for name in PROMPTS if case.found(name)]
    one = case.engine("one", node)
    for name in names[:-1]:
        tally.check("one rank stores %s" % name, case.fresh, one, name, 0, case.saved(name))
    one.stop()
    two = case.engine("two", node, tp=2, layout="page_first_direct")
    for name in names[:-1]:
        tally.check("two ranks load %s" % name, case.fresh, two, name, case.found(name))
    tally.check("two ranks store %s" % names[-1], case.fresh, two, names[-1], 0,
                case.saved(names[-1]))
    two.stop()
    again = case.engine("again", node)
    for name in names:
        tally.check("one rank loads %s" % name, case.fresh, again, name, case.found(name))


# ---- ends --------------------------------------------------------------------------------

def ends(case):
    tally, node = case.tally, case.node("store")
    case.plain()
    E = case.engine("E", node, extra={"allocator": "shm"})
    tally.check("E stores len777", case.fresh, E, "len777", 0, case.saved("len777"))
    tally.check("memory that is shared by its file", shared, case, node)
    tally.check("the daemon stands still: computed", frozen, case, E)
    tally.check("and serves again", served, case, E, "len777")
    tally.check("the daemon dies: computed", gone, case, E)
    tally.check("an empty one is used again", back, case, E)
    tally.check("clearing is refused, with the reason", cleared, E)
    tally.check("new weights: nothing of before is found", weights, case, E)
    tally.check("attached again with a revision", attached, case, E)
    F = case.engine("F", node, policy="timeout")
    tally.check("another one still finds what is of the first weights", case.fresh, F, "len777",
                case.found("len777"))


def shared(case, node):
    kinds = {one["kind"] for one in node.call("regions")["regions"] if one["bytes"] > 1 << 20}
    equal(len(kinds), 1, "kinds of memory: %s" % kinds)
    equal(kinds - {"memfd", "shm"}, set(), "kinds of memory that are copied through the kernel")


def frozen(case, E):
    """A call is waited for, and the next ones are not made."""
    E.forget()
    E.node.daemon.freeze()
    try:
        for name in ("len777", "len200", "len33"):
            equal(case.ask(E, name)["storage"], 0, "tokens of a daemon that stands still")
    finally:
        E.node.daemon.thaw()


def served(case, E, name):
    def loads():
        E.forget()
        return case.ask(E, name)["storage"] == case.found(name)
    assert until(loads, 60, 0.5), "the store is not used again"


def gone(case, E):
    E.forget()
    E.node.daemon.proc.kill()
    E.node.daemon.proc.wait()
    for name in ("len777", "len1900"):
        equal(case.ask(E, name)["storage"], 0, "tokens of no daemon")
    assert E.proc.poll() is None


def back(case, E):
    E.node.daemon.notify.close()
    E.node.daemon.start().wait_ready()
    E.node.ready()
    until(lambda: pause(0.2) or stored(case, E), 30, 0)
    served(case, E, "len777")


def stored(case, E):
    E.forget()
    case.ask(E, "len777")
    return E.node.chunks()["chunks"] >= case.saved("len777")


def cleared(E):
    status, said = E.call("POST", "/hicache/storage-backend/clear")
    assert E.said("evicted automatically"), "%d %s" % (status, said[:200])


def weights(case, E):
    status, said = E.call("POST", "/update_weights_from_disk",
                          {"model_path": os.path.join(sglang_pd.FOLDER, "sglang", "bytes")}, 120)
    equal(status, 200, said[:300])
    begin = case.figures(E.node)
    equal(case.fresh(E, "len777", 0), "0 tokens", "loaded")
    case.ask(E, "len200")
    pause(1)
    equal(case.figures(E.node), begin, "figures")
    assert E.said("the weights (or adapters) change")


def attached(case, E):
    status, said = E.call("DELETE", "/hicache/storage-backend", seconds=60)
    equal(status, 200, said[:300])
    status, said = E.call("PUT", "/hicache/storage-backend", {
        "hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config_json": json.dumps(dict(EXTRA, revision="2"))}, 60)
    equal(status, 200, said[:300])
    case.fresh(E, "len777", 0, case.saved("len777"))
    return case.fresh(E, "len777", case.found("len777"), 0)


# ---- prices ------------------------------------------------------------------------------

STEPS = ("--disable-overlap-schedule", "--enable-metrics")  # so that a token's time is known


def prices(case):
    tally, node = case.tally, case.node("store")
    case.plain()
    names = [name for name in case.prompts if case.found(name)]
    A = case.engine("A", node)
    for name in names:
        tally.check("A computes and stores %s" % name, fresh_branch, case, A, name)
    A.stop()
    E = case.engine("E", beside(case, "dear", node), extra={"remote": 5}, more=STEPS)
    case.ask(E, "len15")
    for name in names:
        tally.check("tokens take their time: E loads %s" % name, case.fresh, E, name,
                    case.found(name))
    tally.check("metrics of E", told, case, E, names)
    E.stop()
    F = case.engine("F", beside(case, "cheap", node), extra={"remote": 5}, more=STEPS,
                    env={"KVD_ENGINES_TOKEN_US": "1e-6"})
    tally.check("a token takes no time: once pulls are measured, F computes len777", turned, case, F)
    for name in ("len200", "len1900"):
        tally.check("F computes and stores %s" % name, case.fresh, F, name, 0, case.saved(name))
    shared = SHARED // PAGE * PAGE
    tally.check("F loads its own pages of a prompt, and computes the rest", case.fresh, F, "branch",
                shared, case.saved("branch") - shared // PAGE)
    for name in ("len200", "len777", "len1900", "branch"):
        tally.check("F loads %s, which it has computed" % name, case.fresh, F, name,
                    case.found(name), 0)


def fresh_branch(case, engine, name):
    """It starts as another prompt, whose pages are stored."""
    shared = SHARED // PAGE if name == "branch" else 0
    return case.fresh(engine, name, shared * PAGE, case.saved(name) - shared)


def turned(case, F):
    """Unmeasured pages are fetched, and are not kept by the own daemon."""
    def computes():
        F.forget()
        storage = case.ask(F, "len777")["storage"]
        assert storage in (0, case.found("len777")), "%d tokens are loaded" % storage
        return not storage
    assert until(computes, 120, 0), "it is always fetched"
    assert until(lambda: case.figures(F.node)["chunks"] == case.saved("len777"), 10)


def told(case, E, names):
    got, loaded = E.metrics(), sum(map(case.found, names))
    equal(got["load_bytes_sum"], loaded * TOKEN, "bytes")
    assert got["num_chunks_found_total"] >= loaded // PAGE and got["load_seconds_sum"] > 0, got
    assert got["num_chunks_asked_total"] >= got["num_chunks_found_total"], got
    return str(got["num_chunks_found_total"])


CASES = {"lives": lives, "ranks": ranks, "ends": ends, "prices": prices}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="sglang-store")
    args = parser.parse_args()
    tally = Tally()
    logs(args.name)
    random.seed(1)
    try:
        case = Case(args, tally)
        with contextlib.ExitStack() as case.stack:
            CASES[args.case](case)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    code = tally.close(args.name)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
