#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on KvdStoreConnector: prompts that one engine has computed are loaded by
another, or by itself, from the daemon's chunks.

vllm_store.py lives|ends|shapes|pd|remote [--nixl native] [--name NAME]

    lives   one engine computes and is killed, the next one has its chunks; the daemon dies
    ends    clients that leave, leases that end, puts that take long, a cache that is full
    shapes  engines with blocks of other sizes and other ranks share chunks
    pd      prefill and decode, each with both connectors
    remote  chunks of another daemon's, which dies

Greedy tokens must be those of one plain engine of vLLM. That they come of chunks, and not of
computing again, is seen from the daemon's figures and from where vLLM's prompt tokens came from,
both to the token. `own` cases run vLLM's own kernels, whose blocks are whole, the others the
cache of its GPU backends (vllm_plain).
Last line: N passed, N failed."""
import argparse
import concurrent.futures
import contextlib
import json
import os
import sys
import types

import vllm_ends
import vllm_pd
from rig import HERE, Node, Tally, equal, until
from vllm_ends import Asked, ctl
from vllm_pd import BLOCK, TOKENS, Run

sys.path.insert(0, os.path.join(HERE, "..", "lib"))
from kvd_daemon import Daemon  # noqa: E402

T = 64
TOKEN = 4 * 2 * 4 * 32 * 4  # layers, K and V, heads, head, float32
NAMES = ("len31", "len64", "len65", "len257", "len777", "len1900")
AT_ONCE = tuple("at_once%d" % i for i in range(8))
PLAIN = os.path.join(HERE, "vllm_plain")
STORE = {"asked": "kvd_store_num_chunks_asked_total", "found": "kvd_store_num_chunks_found_total",
         "loaded": "kvd_store_load_bytes_sum", "saved": "kvd_store_saved_bytes_total",
         "failed_loads": "kvd_store_num_failed_loads_total",
         "failed_saves": "kvd_store_num_failed_saves_total", "usage": "kv_cache_usage_perc",
         "preemptions": "num_preemptions_total"}
OWN = {"kv_connector_module_path": "kvd.vllm", "kv_role": "kv_both"}


class StoreNode(Node):
    def __init__(self, name, more=""):
        self.nixl = "native"
        # a chunk of whole blocks takes 2 MiB, and at most a 128th of it
        self.daemon = Daemon("log_level = info\n[peer]\ndead_after = 5 s\n"
                             "[chunks]\nchunk_memory = 320 MiB\n" + more, name=name)

    def chunks(self):
        return ctl(self, "chunks")

    def ready(self):
        assert until(lambda: (self.chunks() or {}).get("ready"), 20), "no memory for chunks"


class Engine(vllm_pd.Engine):
    body = vllm_ends.Engine.body

    def __init__(self, case, name, node, extra=(), both=False, own=False,
                 look="vllm_store_look.Look", **kw):
        """extra: kv_connector_extra_config; both: KvdConnector, too; own: vLLM's kernels."""
        self.node, self.extra, self.both = node, dict(extra), both
        kw.setdefault("more", ())
        kw["more"] = (*kw["more"], "--worker-extension-cls", look)
        super().__init__(case.args, name, node, role="kv_both",
                         path=[HERE] + ([] if own else [PLAIN]), **kw)
        self.metrics = STORE

    def environment(self, args, node):
        return dict(super().environment(args, node), VLLM_SERVER_DEV_MODE="1")

    def connector(self, args, role, side_port):
        config = dict(OWN, kv_connector="KvdStoreConnector", kv_connector_extra_config=self.extra)
        if self.both:
            config = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
                          "connectors": [dict(OWN, kv_connector="KvdConnector"), config]}}
        more = [] if "ids" in self.extra else ["--prefix-caching-hash-algo", "sha256_cbor"]
        return ["--kv-transfer-config", json.dumps(config)] + more

    def wait(self):
        super().wait()
        self.look("watch")
        return self

    def forget(self):
        """Its own cache of prefixes."""
        assert until(lambda: self.call("POST", "/reset_prefix_cache")[0] == 200, 10)

    def put(self):
        """Chunks of the daemon's that are whole."""
        return sum(space["bytes"] for space in self.node.chunks()["spaces"]) // (T * TOKEN)

    @contextlib.contextmanager
    def held(self, kind):
        self.look("hold", kind)
        try:
            yield
        finally:
            self.look("let_go")

    def settled(self):
        """Once nothing of it is under way."""
        def quiet():
            return not any(one[k] for one in self.look("left")
                           for k in ("loads", "puts", "ending"))
        assert until(quiet, 10), self.look("left")
        assert until(lambda: self.counters()["usage"] == 0, 10), "blocks are not free"


class Case(Run):
    def __init__(self, args, tally):
        super().__init__(types.SimpleNamespace(
            nixl="native", kind="llama", connector="", tp_d=1, push=False, name=args.name), tally)
        self.chunk, self.stack = T, None

    def node(self, name, more=""):
        node = self.stack.enter_context(StoreNode(name, more))
        node.ready()
        return node

    def engine(self, name, node, extra=None, **kw):
        engine = Engine(self, name, node, {"chunk_tokens": self.chunk} if extra is None else extra,
                        **kw)
        self.stack.callback(engine.stop)
        engine.wait()
        self.tally.add("engine %s is up" % name, True, "%.0f s" % engine.took)
        return engine

    # ---- what is expected ----

    def length(self, name):
        return len(self.prompts[name])

    def found(self, name):
        """Tokens that are loaded: one at least is computed."""
        return (self.length(name) - 1) // self.chunk * self.chunk

    def saved(self, name, answer=TOKENS):
        """Chunks of the prompt and its answer, whose last token is not computed."""
        return (self.length(name) + answer - 1) // self.chunk

    # ---- requests ----

    def right(self, engine, name, n=TOKENS):
        got = engine.complete(self.prompts[name], n)
        equal(got["tokens"], self.wanted[name][:n], got["error"] or "tokens of " + name)
        return got

    def seen(self, engine):
        """vLLM's counters and the daemon's figures, once they have come to rest."""
        engine.settled()
        counts = engine.counters()
        return dict(counts["sources"], **{k: v for k, v in counts.items() if k != "sources"},
                    **{"daemon_" + k: v for k, v in engine.node.chunks().items()
                       if isinstance(v, (int, float))})

    def judged(self, engine, what, tokens, loaded, chunks=None):
        """A call of so many prompt tokens, so many of which are loaded; chunks: so many are
        new in the store."""
        begin = self.seen(engine)
        what()
        wanted = {"external_kv_transfer": loaded, "local_compute": tokens - loaded,
                  "loaded": loaded * TOKEN, "daemon_fetched_bytes": loaded * TOKEN,
                  "failed_loads": 0, "failed_saves": 0}
        if chunks is not None:
            wanted.update(daemon_chunks=chunks, daemon_put_bytes=chunks * self.chunk * TOKEN)

        def came():
            end = self.seen(engine)
            return {k: end.get(k, 0) - begin.get(k, 0) for k in wanted}
        until(lambda: came() == wanted, 10)  # vLLM reports with a delay
        equal(came(), wanted, "figures")

    def one(self, engine, name, loaded, chunks=None, times=None):
        """A prompt that the engine itself does not have."""
        engine.forget()

        def ask():
            got = self.right(engine, name)
            if times is not None:
                times[name] = got["first"]
        self.judged(engine, ask, self.length(name), loaded, chunks)

    def at_once(self, engine):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self.right(engine, name), AT_ONCE))

    def told(self, cold, warm):
        for name in cold:
            if name in warm:
                self.tally.note("first token of %s, cold and from chunks" % name,
                                "%.1f and %.1f ms" % (1e3 * cold[name], 1e3 * warm[name]))


# ---- lives -------------------------------------------------------------------------------

def lives(case):
    node = case.node("store")
    cold, warm, tally = {}, {}, case.tally
    A = case.engine("A", node, more=("--max-num-batched-tokens", "256"))
    for name in NAMES:
        tally.check("A computes and saves %s" % name, case.one, A, name, 0, case.saved(name))
    tally.check("A saves a prefix", case.one, A, "prefix", 0, case.saved("prefix"))
    shared = case.found("prefix")
    tally.check("A has the prefix of a longer prompt in chunks", case.one, A, "longer", shared,
                case.saved("longer") - shared // T)
    tally.check("A computes 8 at once", case.judged, A, lambda: case.at_once(A),
                sum(map(case.length, AT_ONCE)), 0, sum(map(case.saved, AT_ONCE)))
    tally.check("A is killed while it computes and saves", killed, case, A)
    B = case.engine("B", node)
    for name in (*NAMES, "prefix", "longer"):
        tally.check("B has %s of A" % name, case.one, B, name, case.found(name), 0, warm)
    tally.check("what B has itself it does not load", own_prefix, case, B)
    B.forget()
    tally.check("B has 8 at once of A", case.judged, B, lambda: case.at_once(B),
                sum(map(case.length, AT_ONCE)), sum(map(case.found, AT_ONCE)), 0)
    tally.check("what A had saved when it was killed is right", half_saved, case, B)
    tally.check("the daemon is gone: computed", gone, case, B, node, cold)
    tally.check("control: an empty store has nothing", back, case, B, node, cold)
    tally.check("and again what was saved since", case.one, B, "len777", case.found("len777"), 0)
    case.told(cold, warm)


def killed(case, A):
    """Chunk by chunk: some are there, and A is not."""
    had = A.node.chunks()["chunks"]
    asked = Asked(A, case.prompts["kill0"], TOKENS, None)
    until(lambda: A.node.chunks()["chunks"] > had, 20, 0.005)
    A.kill()
    with contextlib.suppress(OSError):
        asked.line.close()
    assert until(lambda: A.node.chunks()["moves"] == 0, 10), "moves of an engine that is dead"
    case.killed = A.node.chunks()["chunks"] - had
    assert case.killed > 0
    return "%d of %d chunks" % (case.killed, case.saved("kill0"))


def half_saved(case, B):
    loaded = min(case.killed * T, case.found("kill0"))
    case.one(B, "kill0", loaded, case.saved("kill0") - case.killed)


def own_prefix(case, B):
    """"longer" starts with "prefix", of which B's cache has whole blocks, and "longer" is
    loaded from there on."""
    B.forget()
    case.right(B, "prefix")
    here = case.length("prefix") // BLOCK * BLOCK
    begin = case.seen(B)
    case.right(B, "longer")
    end = case.seen(B)
    loaded = case.found("longer") - here
    equal([end[k] - begin[k] for k in ("local_cache_hit", "external_kv_transfer",
                                       "daemon_fetched_bytes", "asked")],
          [here, loaded, loaded * TOKEN, (case.length("longer") - 1) // T - here // T],
          "local, loaded, bytes, asked")


def gone(case, B, node, cold):
    B.forget()
    node.daemon.proc.kill()
    node.daemon.proc.wait()
    for name in ("len64", "len257", "len1900"):
        cold[name] = case.right(B, name)["first"]
    B.settled()
    assert B.proc.poll() is None


def back(case, B, node, cold):
    node.daemon.notify.close()
    node.daemon.start().wait_ready()
    node.ready()

    def served():
        """A second after the daemon is there the engine looks again."""
        B.forget()
        case.right(B, "len31")
        case.right(B, "len65")
        B.settled()
        return node.chunks()["chunks"] > 0
    assert until(served, 20, 0.2), "the store is not used again"
    case.one(B, "len777", 0, case.saved("len777"), cold)


# ---- ends --------------------------------------------------------------------------------

def ends(case):
    node, tally = case.node("store"), case.tally
    E = case.engine("E", node, {"chunk_tokens": T, "lease": 0.4}, more=(
        "--num-gpu-blocks-override", "100", "--max-num-batched-tokens", "256"))
    tally.check("chunks of a prompt that is computed in steps", case.one, E, "len1900", 0,
                case.saved("len1900"))
    tally.check("a client leaves during a load", leaves_loading, case, E)
    tally.check("a load fails and is computed", load_fails, case, E)
    tally.check("and is loaded the next time", case.one, E, "len1900", case.found("len1900"), 0)
    tally.check("blocks are kept until their puts have ended", late_puts, case, E)
    tally.check("a client leaves, and its chunks are saved", leaves_saving, case, E)
    tally.check("the cache is full while puts are under way", preempted, case, E)
    tally.check("what was preempted is right in the store", after_preemption, case, E)
    tally.check("after a reset nothing of before is found", reset, case, E)
    tally.check("the daemon stands still", frozen, case, E)
    tally.check("and serves", served_again, case, E)


def leaves_loading(case, E):
    E.forget()
    with E.held("load"):
        asked = Asked(E, case.prompts["len1900"], TOKENS, None)
        assert until(lambda: E.look("left")[0]["loads"] == 1, 10, 0.01), "it is not loading"
        assert E.counters()["usage"] > 0
        asked.leave()
        E.settled()
        equal(E.node.chunks()["moves"], 0, "moves")
    case.one(E, "len257", 0, case.saved("len257"))


def load_fails(case, E):
    """The lease ends before the worker joins."""
    before = case.seen(E)
    E.forget()
    with E.held("join"):
        case.right(E, "len1900")
    after = case.seen(E)
    until(lambda: E.counters()["failed_loads"] > before["failed_loads"], 10)
    equal([E.counters()["failed_loads"] - before["failed_loads"],
           after["daemon_fetched_bytes"] - before["daemon_fetched_bytes"],
           E.look("left")[0]["late"]], [1, 0, 1], "failed, bytes, late")
    with open(E.log, errors="replace") as f:
        assert "blocks were not loaded and are computed" in f.read()


def late_puts(case, E):
    E.forget()
    had = E.put()
    with E.held("put"):
        case.right(E, "again")
        assert until(lambda: E.look("left")[0]["ending"] == 1, 10, 0.01), E.look("left")
        assert E.counters()["usage"] > 0, "its blocks are given away while they are read"
        equal(E.put() - had, 0, "chunks that are found before they are there")
        case.right(E, "len65")  # others go on
    E.settled()
    equal(E.put() - had, case.saved("again") + case.saved("len65"), "chunks")


def leaves_saving(case, E):
    """What its prompt has computed is there."""
    E.forget()
    had = E.put()
    asked = Asked(E, case.prompts["kill1"], 400, None)
    assert until(lambda: E.put() > had, 20, 0.005)
    asked.leave()
    E.settled()
    saved = E.put() - had
    case.one(E, "kill1", min(saved * T, case.found("kill1")),
             max(0, case.saved("kill1") - saved))
    return "%d chunks" % saved


LONG = ("kill0", "kill2")
ANSWER = 220  # 100 blocks hold the prompts of LONG, and not their answers


def answered(case, E, name):
    got = E.complete(case.prompts[name], ANSWER)
    equal((len(got["tokens"]), got["tokens"][:TOKENS]), (ANSWER, case.wanted[name]),
          got["error"] or "tokens of " + name)
    return got["tokens"]


def preempted(case, E):
    E.forget()
    before = E.counters()
    with E.held("put"), concurrent.futures.ThreadPoolExecutor(len(LONG)) as pool:
        asked = [pool.submit(answered, case, E, name) for name in LONG]
        # one writes what was the other's, whose puts would read it now
        until(lambda: any(one.done() for one in asked), 40, 0.05)
        E.look("let_go")
        case.answers = [one.result() for one in asked]
    E.settled()
    settled = E.look("left")[0]["settled"]
    times = E.counters()["preemptions"] - before["preemptions"]
    assert times > 0 and settled > 0, "%d preemptions, %d puts under way" % (times, settled)
    return "%d preemptions, %d puts under way" % (times, settled)


def after_preemption(case, E):
    """All of it is loaded, and gives the same answers."""
    begin = E.counters()["sources"]["external_kv_transfer"]
    for name, wanted in zip(LONG, case.answers):
        E.forget()
        equal(answered(case, E, name), wanted, "the answer to " + name)
        E.settled()
    equal(E.counters()["sources"]["external_kv_transfer"] - begin, sum(map(case.found, LONG)),
          "tokens that were loaded")


def reset(case, E):
    """As after new weights: chunks are put and found again, and none of before."""
    equal(E.call("POST", "/reset_prefix_cache?reset_external=true")[0], 200, "status")
    case.one(E, "len257", 0, case.saved("len257"))
    case.one(E, "len257", case.found("len257"), 0)


def frozen(case, E):
    """Two calls are waited for, one of the scheduler's and one of the worker's; then none."""
    E.forget()
    E.node.daemon.freeze()
    try:
        took = [case.right(E, name)["took"] for name in ("len257", "len777", "len1900")]
    finally:
        E.node.daemon.thaw()
    E.settled()
    assert max(took) < 10, took
    return "%s s" % ", ".join("%.1f" % t for t in took)


def served_again(case, E):
    def loads():
        E.forget()
        before = E.counters()["loaded"]
        case.right(E, "len1900")
        E.settled()
        return E.counters()["loaded"] > before
    assert until(loads, 20, 0.5), "the store is not used again"


# ---- shapes ------------------------------------------------------------------------------

def shapes(case):
    """Ids of tokens: each engine has what the ones before it have saved."""
    node, tally, case.chunk = case.node("store"), case.tally, 128
    extra = {"chunk_tokens": 128, "ids": "tokens"}
    names = [name for name in NAMES if case.found(name)]
    one = case.engine("b32", node, extra, more=("--block-size", "32"))
    for name in NAMES:
        tally.check("b32 saves %s" % name, case.one, one, name, 0, case.saved(name))
    one.stop()
    two = case.engine("tp2", node, extra, tp=2, more=("--block-size", "16"))
    for name in names:
        tally.check("two ranks, blocks of 16: %s" % name, sharing, case, two, name)
    for name in AT_ONCE:
        tally.check("two ranks save %s" % name, lambda: case.right(two, name) and None)
    two.settled()
    two.stop()
    half = case.engine("b64", node, extra, more=("--block-size", "64"),
                       env={"KVD_PLAIN_KERNEL_BLOCKS": "16"})
    for name in (*names, *AT_ONCE):
        tally.check("blocks of 64: %s" % name, case.one, half, name, case.found(name))


def sharing(case, engine, name):
    """By two ranks: each has half of the bytes, and counts its own."""
    engine.forget()
    begin = case.seen(engine)
    case.right(engine, name)
    end = case.seen(engine)
    equal([end[k] - begin.get(k, 0) for k in ("external_kv_transfer", "daemon_fetched_bytes",
                                              "daemon_put_bytes")],
          [case.found(name), case.found(name) * TOKEN, 0], "tokens, bytes, put")


# ---- beside the other connector ----------------------------------------------------------

def pd(case):
    """vLLM's own kernels: a block is a token there, and a chunk has sixteen."""
    tally, case.chunk = case.tally, 16 * BLOCK
    nodes = [case.node(name) for name in "pd"]
    P, D = (case.engine(name, node, {}, both=True, own=True) for name, node in zip("PD", nodes))
    case.P, case.D = P, D
    for name in ("len257", "len777", "len1900"):
        tally.check("%s from P to D" % name, handed, case, name, 0)
    for name in ("len777", "len1900"):
        tally.check("%s from P's chunks to D" % name, handed, case, name, case.found(name))
    tally.check("D has saved what P gave it", alone, case, D, "len1900")
    for name, again in (("kill1", False), ("kill2", True)):
        tally.check("a client leaves while D reads of P%s" % (
            ", and comes again" if again else ""), left_pulling, case, name, again)


def left_pulling(case, name, again):
    """P's daemon stands still, so that D has blocks and nothing in them. None is saved; the same
    prompt is right later. again: it is asked for before D's room has ended."""
    P, D = case.P, case.D
    for engine in (P, D):
        engine.forget()
    begin, params, second = case.seen(D), P.prefill(case.prompts[name]), None
    P.node.daemon.freeze()
    try:
        asked = Asked(D, case.prompts[name], TOKENS, params)
        assert until(lambda: D.counters()["usage"] > 0, 30, 0.02), "D gave it no blocks"
        asked.leave()
        if again:
            second = Asked(D, case.prompts[name], TOKENS, None)
    finally:
        P.node.daemon.thaw()
    if again:
        equal(second.answer()["tokens"], case.wanted[name], "tokens of the second one")
    assert until(lambda: D.counters()["usage"] == 0, 30), "blocks are not free"
    if not again:
        equal(case.seen(D)["daemon_put_bytes"], begin["daemon_put_bytes"], "bytes that D saved")
    D.forget()
    case.right(D, name)
    # one that stood still for longer than dead_after ends the offer with its lease
    assert until(lambda: P.counters()["usage"] == 0, 40), "P keeps blocks"


def handed(case, name, loaded):
    """P loads what its store has; D has all of P."""
    for engine in (case.P, case.D):
        engine.forget()
    begin = [case.seen(engine) for engine in (case.P, case.D)]
    case.same(name)
    p, d = ({k: v - b.get(k, 0) for k, v in case.seen(engine).items()}
            for b, engine in zip(begin, (case.P, case.D)))
    equal([p["external_kv_transfer"], p["daemon_fetched_bytes"], d["loaded"]],
          [loaded, loaded * TOKEN, 0], "of P's chunks, bytes, of D's chunks")
    assert d["external_kv_transfer"] >= case.length(name) - 1, d


def alone(case, engine, name):
    """As a request that no prefill has seen."""
    case.one(engine, name, case.found(name))


# ---- another daemon's --------------------------------------------------------------------

def remote(case):
    tally, there = case.tally, case.node("there")
    A = case.engine("A", there)
    for name in NAMES:
        tally.check("A saves %s" % name, case.one, A, name, 0, case.saved(name))
    A.stop()
    here = case.node("here", "chunk_peers = %s\n" % ctl(there, "health")["endpoint"])
    assert until(lambda: here.chunks()["remote"]["up"] == 1, 20), "the other daemon is not up"
    B = case.engine("B", here, {"chunk_tokens": T, "remote": 0.3})
    for name in NAMES:
        tally.check("B has %s of A's daemon" % name, case.one, B, name, case.found(name))
    tally.check("the other daemon is killed: computed", lost, case, B, there)


def lost(case, B, there):
    there.daemon.proc.kill()
    there.daemon.proc.wait()
    case.one(B, "prefix", 0, case.saved("prefix"))
    case.one(B, "longer", case.found("prefix"))
    there.daemon.notify.close()
    there.daemon.start().wait_ready()  # it is to end well


CASES = {"lives": lives, "ends": ends, "shapes": shapes, "pd": pd, "remote": remote}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-store")
    args = parser.parse_args()
    tally = Tally()
    try:
        case = Case(args, tally)
        with contextlib.ExitStack() as case.stack:
            CASES[args.case](case)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
