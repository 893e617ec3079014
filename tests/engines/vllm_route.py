#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines that attend to prompts where they are: KvdStoreConnector with "route".

vllm_route.py CASE [--nixl native] [--prompts N] [--requests N] [--transport NAME] [--name NAME]

    gqa, mla  one holder, prompts alone and up to 16 at once
    many      documents at 1 to 7 holders; many-mla: of a model with MLA
    scattered the same, each chunk at another holder than the one before
    two       two engines with one holder
    ranks     one or two ranks attend to chunks that one or two ranks have stored; ranks-mla: of a
              model with MLA
    cross     chunks that SGLang has stored
    bf16      tokens of an engine that routes, and of the same one before there were chunks
    auto      each prompt by the way that is cheapest, or by a given one; documents that are fetched
              while they are routed to
    load      200 prompts while one of two holders is killed, or stands still, each second; the engine's
              own daemon is killed before every 20; soak: as many as --requests
    ends      a holder stands still or dies between any two layers; controls, which must be wrong
    controls  more of them: what null blocks, other documents, other weights and lost steps would do

Engine A computes documents and stores them in its daemon. Engine B, with another daemon, gets
prompts that begin with these documents, has no copy of them, and must answer with the greedy tokens
of one plain engine of vLLM's own kernels. That B attends to them at A's daemon, and neither fetches
nor computes them, is seen from vLLM's counters and from both daemons' figures, to the token and the
row.
Last line: N passed, N failed."""
import argparse
import concurrent.futures
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import namedtuple

import sglang_pd
import sglang_store
import vllm_store
from rig import Tally, equal, free_ports, until
from vllm_ends import ctl
from vllm_route_case import (LAYERS, T, Case, asker, attention, connected, endpoint, sides)

HOLDERS = 7
PIECES = 8  # of a hold, at other daemons
LOAD = 200  # prompts
CLOSE = 2e-2  # of logits in bf16, by the largest
ANSWER_S = 40  # a step that is lost twice, each with its deadline, and vLLM's queue


def always(case):
    tally = case.tally
    there, B = sides(case)
    for i in range(min(case.count, 10)):
        tally.check("prompt %d attends to its document at A's daemon" % i, case.one, B, there, i)
    tally.check("all, up to 16 at once", case.many, B, there, 16)
    tally.check("nothing is kept", B.idle)


# ---- two engines ----------------------------------------------------------------------------

def two(case):
    tally = case.tally
    there, B = sides(case)
    engines = B, asker(case, "C", there)
    tally.check("both attend to the documents at the same time", both, case, engines, there)
    for engine in engines:
        tally.check("%s keeps nothing" % engine.name, engine.idle)


def both(case, engines, there):
    """Neither looks at figures while the other one asks."""
    gate, some = threading.Barrier(len(engines), timeout=600), range(case.count)

    def asks(engine):
        def ask():
            gate.wait()
            case.at_once(engine, some, 8)
            gate.wait()
        try:
            return case.routed(engine, there, ask, some, len(engines))
        except BaseException:
            gate.abort()
            raise
    for engine in engines:
        engine.forget()
    with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool:
        got = list(pool.map(asks, engines))
    return "%s requests for attention" % " and ".join("%d" % one["posts"] for one in got)


# ---- ranks ----------------------------------------------------------------------------------

def ranks(case):
    """Those of an engine attend each with its own heads, and all of them to the same hold."""
    tally = case.tally
    for holders, askers in ((2, (1, 2)), (1, (2,))):
        there = case.node("there%d" % holders, "attention_threads = 1\n")
        A = case.engine("A%d" % holders, there, tp=holders)
        tally.check("%d ranks compute and store documents" % holders, case.store, A)
        A.stop()
        for count in askers:
            B = asker(case, "B%d%d" % (count, holders), there, tp=count)
            words = "%d ranks attend to the parts of %d" % (count, holders)
            for i in range(min(case.count, 10)):
                tally.check("%s, prompt %d" % (words, i), case.one, B, there, i)
            tally.check(words + ", all, up to 16 at once", case.many, B, there, 16)
            if count == 2:
                for sends in (3, 20):
                    tally.check("the holder stands still before request %d of a rank" % sends,
                                stops, case, B, there, range(case.count), sends)
            tally.check("nothing is kept", B.idle)
            B.stop()


# ---- chunks of SGLang -------------------------------------------------------------------------

def cross(case):
    """The engines have other ids and names. vLLM's scheduler gets SGLang's, to see that its rows can
    attend to SGLang's pages as they are."""
    tally, there = case.tally, case.node("there", "attention_threads = 1\n")
    A = sglang_store.Engine(case, "A", there, more=("--page-size", str(T)))
    case.stack.callback(A.stop)
    A.wait()
    tally.check("SGLang computes and stores documents", pages, case, A)
    A.stop()
    B = asker(case, "B", there)
    B.complete([5] * T, 1)  # the workers have told of their layout
    (space,) = there.chunks()["spaces"]
    B.look("sglang", [space[word] for word in ("model", "revision", "scheme", "rope", "tokens")])
    for i in range(min(case.count, 10)):
        tally.check("prompt %d attends to SGLang's pages" % i, case.one, B, there, i)
    tally.check("all, up to 16 at once", case.many, B, there, 16)
    tally.check("nothing is kept", B.idle)


def pages(case, A):
    documents = case.told_prompts.documents
    for document in documents:
        A.generate(sglang_pd.request(document, 1))
    count = sum(map(len, documents)) // T
    assert until(lambda: A.node.chunks()["chunks"] == count, 20), A.node.chunks()["chunks"]
    return "%d pages" % count


# ---- bf16 -----------------------------------------------------------------------------------

def bf16(case):
    """Rounding changes a token where another one is about as good, and with it all that follow: up
    to there they are compared."""
    tally, there = case.tally, case.node("there", "attention_threads = 1\n")
    B = asker(case, "B", there)
    truth = [best_two(case, B, i) for i in range(case.count)]
    A = case.engine("A", there)
    tally.check("A computes and stores documents", case.store, A)
    A.stop()
    B.forget()
    tally.check("tokens are those of the engine without chunks", rounded, case, B, there, truth)
    tally.check("nothing is kept", B.idle)


def best_two(case, engine, i):
    """The tokens of an answer, and the two largest logits of each."""
    asked = case.told_prompts
    status, said = engine.call("POST", "/v1/completions", {
        "model": "tiny", "prompt": asked.prompt(i), "max_tokens": asked.asked[i][2], "logprobs": 2,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "return_tokens_as_token_ids": True}, 120)
    equal(status, 200, said[:300])
    (choice,) = json.loads(said)["choices"]
    return choice["token_ids"], [sorted(one.values(), reverse=True)[:2]
                                 for one in choice["logprobs"]["top_logprobs"]]


def rounded(case, B, there, truth):
    figures = {"compared": 0, "ended": 0, "worst": 0.0}

    def judge(i):
        tokens, logits = best_two(case, B, i)
        for token, (best, _), wanted, (first, second) in zip(tokens, logits, *truth[i]):
            size = abs(first)
            figures["compared"] += 1
            figures["worst"] = max(figures["worst"], abs(best - first) / size)
            if token != wanted:
                assert first - second <= 4 * CLOSE * size, "prompt %d: token %d instead of %d" % (
                    i, token, wanted)
                figures["ended"] += 1
                break

    def ask():
        for i in range(case.count):
            judge(i)
    case.routed(B, there, ask, range(case.count))
    assert figures["worst"] <= CLOSE, figures
    return "%(compared)d tokens, logits within %(worst).1e, %(ended)d answers go on otherwise" % figures


# ---- several holders ------------------------------------------------------------------------

def many(case, scattered=False):
    tally, asked = case.tally, case.told_prompts
    there = [case.node("there%d" % i, "attention_threads = 1\n") for i in range(HOLDERS)]
    A = case.engine("A", there[0])
    held = [None] * len(asked.documents)
    by_length = sorted(range(len(held)), key=lambda i: len(asked.documents[i]))
    for rank, i in enumerate(by_length):  # a long one at more of them
        chunks = len(asked.documents[i]) // T
        count = 1 + rank * HOLDERS // len(held)
        run = 1 if scattered else -(-chunks // count)
        nodes = there[:min(count, -(-chunks // run))]
        held[i] = nodes  # a node for each hold
        if scattered and count > 1:
            asked.near[i] = min(chunks, PIECES) * T
            held[i] = [nodes[c % count] for c in range(min(chunks, PIECES))]
        A.look("scatter", [node.daemon.socket_path for node in nodes], run)
        case.store(A, [asked.documents[i]])
    A.stop()
    here = case.node("here", "chunk_peers = %s\n" % " ".join(map(endpoint, there)))
    connected(here, HOLDERS)
    B = case.engine("B", here, {"remote": 0.5}, role="kv_consumer")
    for document in by_length[::2]:
        some = [i for i in range(case.count) if asked.asked[i][0] == document][:2]
        tally.check("prompts attend to a document at %d daemons" % len(set(held[document])),
                    pieces, case, B, there, held, some, 1)
    tally.check("all, up to 16 at once", pieces, case, B, there, held, range(case.count), 16)
    tally.check("nothing is kept", B.idle)


def pieces(case, B, there, held, some, width):
    """Each holder attends for the rows of its documents, whatever part of them it has, once for each
    hold."""
    B.forget()
    asked = case.told_prompts
    wanted = {"external_kv_transfer": sum(map(asked.routed, some)), "fetched": 0, "loaded": 0,
              "local_compute": sum(map(asked.own, some)), "lost": 0,
              "rows": sum(map(asked.computed, some)) * case.heads * LAYERS,
              "own_attention_requests_failed_total": 0}
    for node in there:
        wanted[node.daemon.name] = case.heads * LAYERS * sum(
            asked.computed(i) * held[asked.asked[i][0]].count(node) for i in some)

    def figures():
        out = case.figures(B, there[0])
        out.update((node.daemon.name, attention(node)["attention_served_rows_total"]) for node in there)
        return out
    begin = figures()
    case.at_once(B, some, width)

    def came():
        end = figures()
        return {k: end.get(k, 0) - begin.get(k, 0) for k in wanted}
    until(lambda: came() == wanted, 10)
    equal(came(), wanted, "figures")
    return "%d prompts, %d rows" % (len(some), wanted["rows"])


# ---- ways that are chosen -------------------------------------------------------------------

def auto(case):
    tally = case.tally
    there, B = sides(case, "auto")
    tally.check("the daemon has measured A's", measured, case, B)
    tally.check("each prompt alone, by its cheapest way", ways, case, B, 1)
    tally.check("all, up to 16 at once", ways, case, B, 16)
    for rule, figures in (("fetches", ("loaded", "fetched")), ("computes", ("local_compute",)),
                          ("rents", ("rents", "rows", "fetched"))):
        for width in (1, 16):
            tally.check("all are to be: %s, %d at once" % (rule, width), given, case, B, rule,
                        width, figures)
    for sends in (41, 43, 47):
        tally.check("a document is fetched, the holder stands still before request %d" % sends,
                    rent_stops, case, B, there, sends)
    tally.check("control: blocks to which nothing was loaded give wrong tokens", rent_wrong, case, B)
    tally.check("each prompt again, by its cheapest way", ways, case, B, 16)
    tally.check("nothing is kept", B.idle)


def measured(case, B):
    """It starts with the first request, by which the engine opens the daemon's prices."""
    case.ask(B, 0)

    def has():
        cost = ctl(B.node, "cost")
        peers = {peer["instance"] for peer in cost["peers"]}
        return any(speed["instance"] in peers for speed in cost["speeds"])
    assert until(has, 60, 0.5), ctl(B.node, "cost")


def ways(case, B, width):
    B.forget()
    begin = B.counters()
    case.at_once(B, range(case.count), width)
    B.settled()
    end = B.counters()
    got = {k: end[k] - begin[k] for k in ("posts", "rows", "rents", "lost", "loaded")}
    assert not got["lost"], got
    return "%(rows)d rows routed in %(posts)d requests, %(rents)d documents fetched meanwhile, " \
        "%(loaded)d bytes fetched" % got


def given(case, B, rule, width, figures):
    B.look("break", rule)
    try:
        B.forget()
        begin, fetched = B.counters(), B.node.chunks()["fetched_bytes"]
        case.at_once(B, range(case.count), width)
        B.settled()
        end = B.counters()
        end.update(end["sources"], fetched=B.node.chunks()["fetched_bytes"] - fetched)
        begin.update(begin["sources"], fetched=0)
        got = {k: end[k] - begin.get(k, 0) for k in ("rents", "rows", "fetched", "loaded",
                                                     "local_compute")}
        assert all(got[name] for name in figures), got
        if rule != "rents":
            assert not got["rows"] and not got["rents"], got
        if rule == "computes":
            assert not got["fetched"], got
        return str(got)
    finally:
        B.look("mend")


def rent_stops(case, B, there, sends):
    """Tokens are right, and the blocks are given back."""
    B.look("break", "rents")
    try:
        routes_again(case, B)
        B.forget()
        B.look("tap", signal.SIGSTOP, there.daemon.proc.pid, sends)
        try:
            case.at_once(B, range(min(case.count, 16)), 16)
        finally:
            there.daemon.thaw()
            connected(B.node)
        B.settled()
    finally:
        B.look("mend")
    B.idle()


@contextlib.contextmanager
def broken(B, *words):
    """A rule of the engine is broken, or its chunks are exchanged; then it is as before."""
    B.look(*words)
    try:
        yield
    finally:
        B.look("mend")
        B.settled()
        B.forget()


def rent_wrong(case, B):
    with broken(B, "break", "rents"):
        routes_again(case, B)
        B.look("break", "loads")
        B.forget()
        return are_wrong(lambda: case.at_once(B, range(case.count), 16))


def are_wrong(*calls):
    """One of these calls has wrong tokens."""
    for i, call in enumerate(calls):
        try:
            call()
        except AssertionError as error:
            assert "tokens of prompt" in str(error), error
            return "%d: %s" % (i, str(error)[:60])
    raise AssertionError("its tokens are right")


# ---- a holder that stands still, or dies -----------------------------------------------------

def ends(case):
    tally = case.tally
    there, B = sides(case)
    long = max(range(case.count), key=case.told_prompts.computed)
    for sends in (1, 2, 3, 4, 5, 8, 21, 4 * case.told_prompts.asked[long][2]):
        tally.check("the holder stands still before request %d for attention" % sends,
                    stops, case, B, there, [long], sends)
    width = range(min(case.count, 16))
    for sends in (1, 6, 40):
        tally.check("and %d prompts are at it, request %d" % (len(width), sends), stops, case, B,
                    there, width, sends)
    for rule in ("lost", "evict"):
        tally.check("control: without %s tokens are wrong" % rule, wrong, case, B, there, rule,
                    width)
    tally.check("it routes again", routes_again, case, B)
    tally.check("all is right again", case.many, B, there, 16)
    for sends in (3,):
        tally.check("the holder is killed before request %d for attention" % sends, killed, case,
                    B, there, width, sends)
    tally.check("nothing is kept", B.idle)


def routes_again(case, B):
    """A daemon that was away is suspended: 10 s, and twice as long each time."""
    assert until(lambda: routes(case, B), 100, 0.5), "nothing is routed"


def routes(case, B):
    B.forget()
    begin = B.counters()["posts"]
    case.ask(B, 0)
    B.settled()
    return until(lambda: B.counters()["posts"] > begin, 2)


def stopped(case, B, there, some, sends):
    """These prompts while the holder stands still; it goes on afterwards."""
    routes_again(case, B)
    B.forget()
    begin = B.counters()["lost"]
    B.look("tap", signal.SIGSTOP, there.daemon.proc.pid, sends)
    try:
        case.at_once(B, some, len(some))
    finally:
        there.daemon.thaw()
        connected(B.node)
        B.settled()
    until(lambda: B.counters()["lost"] > begin, 10)
    return B.counters()["lost"] - begin


def stops(case, B, there, some, sends):
    lost = stopped(case, B, there, some, sends)
    assert lost > 0, "no step was lost"
    case.at_once(B, some, len(some))  # of what its cache has
    B.idle()
    return "%d lost" % lost


def wrong(case, B, there, rule, some):
    """Such an engine gives wrong tokens, at once or from its cache."""
    def ask(sends):
        stopped(case, B, there, some, sends)
        case.at_once(B, some, len(some))
    B.look("break", rule)
    try:
        return are_wrong(*(lambda n=sends: ask(n) for sends in (2, 7, 30)))
    finally:
        B.look("mend")
        B.settled()
        B.forget()


def killed(case, B, there, some, sends):
    routes_again(case, B)
    B.forget()
    begin = B.counters()["lost"]
    B.look("tap", signal.SIGKILL, there.daemon.proc.pid, sends)
    case.at_once(B, some, len(some))
    there.daemon.proc.wait()
    assert until(lambda: B.counters()["lost"] > begin, 10), "no step was lost"
    case.at_once(B, some, len(some))
    there.daemon.notify.close()
    there.daemon.start().wait_ready()  # it is to end well
    return "%d lost" % (B.counters()["lost"] - begin)


# ---- controls -------------------------------------------------------------------------------

def controls(case):
    tally = case.tally
    there, B = sides(case)
    tally.check("blocks that nothing was written to are not numbers", poisoned, case, B, there)
    tally.check("control: with null blocks among its own, tokens are wrong", nulls, case, B)
    tally.check("another document's chunks under the same hold give its tokens", swap, case, B, there)
    tally.check("nothing is kept", B.idle)
    R = case.engine("R", B.node, {"remote": 0.3}, role="kv_consumer", more=(
        "--hf-overrides", json.dumps({"rope_parameters": ROPE})))
    tally.check("with other positions no chunk is found", other_rope, case, R, False)
    R.look("rename", *B.look("names"))
    tally.check("control: with B's names they are, and tokens are wrong", other_rope, case, R, True)
    R.stop()
    B.stop()
    S = case.engine("S", B.node, {"remote": 0.3})
    C = case.engine("C", B.node, {"remote": 0.3, "route": "auto"}, role="kv_consumer")
    C.look("break", "fetches")
    some, others = ([i for i, (document, own, answer) in enumerate(case.told_prompts.asked)
                     if document % 2 == odd and len(own) > T and answer >= SURE]
                    for odd in (0, 1))
    tally.check("steps of S are lost", lost_first, case, S, C, there, some)
    tally.check("C has right tokens from S's chunks", from_chunks, case, C, some)
    S.look("break", "saves")
    tally.check("steps of S are lost whose chunks are stored", lost_first, case, S, C, there, others,
                AssertionError)
    tally.check("control: C has wrong tokens from them",
                lambda: are_wrong(lambda: from_chunks(case, C, others)))


SURE = 24  # tokens of an answer that depends on each part of its prompt
ROPE = {"rope_type": "default", "rope_theta": 300000.0}


def poisoned(case, B, there):
    B.forget()
    B.settled()
    B.look("poison")
    return case.many(B, there, 16)


def nulls(case, B):
    with broken(B, "break", "nulls"):
        B.forget()
        return are_wrong(lambda: case.at_once(B, range(case.count), 16))


def swap(case, B, there):
    """The last but one prompt is asked with the chunks of the last one's document."""
    asked, one, other = case.told_prompts, case.count - 2, case.count - 1
    assert case.wanted[one] != case.wanted[other], "the documents make no difference"
    B.forget()
    case.ask(B, one)
    document = asked.documents[asked.asked[other][0]]
    B.complete(document + [5], 1)

    def ask():
        got = B.complete(asked.prompt(one), asked.asked[one][2])
        equal(got["tokens"], case.wanted[other], got["error"] or "tokens of the other document")
    with broken(B, "swap", len(document) // T):
        B.forget()
        case.routed(B, there, ask, [one])


def other_rope(case, R, found):
    """Its own tokens are those without chunks."""
    prompt = case.told_prompts.prompt(case.count - 1)
    begin = R.counters()
    R.forget()
    tokens = R.complete(prompt, 24)["tokens"]
    R.settled()
    until(lambda: R.counters()["asked"] > begin["asked"], 5)
    got = {k: R.counters()[k] - begin[k] for k in ("asked", "found", "posts")}
    assert got["asked"] > 0 and bool(got["found"]) == bool(got["posts"]) == found, got
    if not found:
        case.rope = tokens
    else:
        assert tokens != case.rope, "its tokens are right"
    return str(got)


def lost_first(case, S, C, there, some, *wrong):
    """The first step of one of these prompts is lost with its first layer, then all are answered,
    and each of their chunks is stored. S may have stored their documents afterwards, and does not
    route to them any more. wrong: errors that may be S's, too."""
    assert until(lambda: loads(case, C, some[:1]), 100, 0.5), "the holder is not used"
    begin = S.counters()
    S.forget()
    S.look("tap", signal.SIGSTOP, there.daemon.proc.pid, 1)
    try:
        with contextlib.suppress(*wrong):
            case.at_once(S, some, len(some))
    finally:
        there.daemon.thaw()
        connected(S.node)
        S.settled()

    def came():
        end = S.counters()
        return {k: end[k] - begin[k] for k in ("lost", "posts", "saved", "failed_saves")}
    assert until(lambda: came()["lost"] > 0, 10), "no step was lost"
    return str(came())


def loads(case, C, some):
    C.forget()
    begin = C.counters()["loaded"]
    case.at_once(C, some, 8)
    C.settled()
    return until(lambda: C.counters()["loaded"] > begin, 2)


def from_chunks(case, C, some):
    """It computes only what is in no whole chunk."""
    C.forget()
    lengths = [len(case.told_prompts.prompt(i)) for i in some]
    wanted = sum(length - (length - 1) // T * T for length in lengths)
    begin = C.counters()["sources"]["local_compute"]
    try:
        case.at_once(C, some, 8)
    finally:
        C.settled()

    def computed():
        return C.counters()["sources"]["local_compute"] - begin
    until(lambda: computed() >= wanted, 5)
    equal(computed(), wanted, "computed tokens")
    return "%d tokens of %d are loaded" % (sum(lengths) - wanted, sum(lengths))


# ---- many prompts, and holders that end all the time -----------------------------------------

Rounds = namedtuple("Rounds", "prompts width answer kill_s")
Rounds.__doc__ = """prompts: of a round; width: at the same time; answer: tokens, at most; kill_s:
between ends of holders."""
LOADED, SOAKED = Rounds(20, 8, None, 1.0), Rounds(200, 16, 6, 3.0)


def load(case, kind):
    """Each round starts without an engine's cache, and with a new daemon of its own."""
    tally, rng = case.tally, random.Random(7)
    there, B = endangered(case)
    free = B.look("free")
    counts = dict.fromkeys(("posts", "lost", "ends"), 0)
    begin = time.monotonic()
    for first in range(0, case.requests, kind.prompts):
        some = [rng.randrange(case.count) for _ in range(min(kind.prompts, case.requests - first))]
        tally.check("requests %d to %d, a holder ends each %g s" % (
            first, first + len(some), kind.kill_s), around, case, B, there, rng, counts, kind, some)
    took = time.monotonic() - begin
    tally.note("requests", "%d in %.0f s, %.2f a second" % (case.requests, took, case.requests / took))
    tally.check("steps were routed and lost", lambda: (equal(
        {k: v > 0 for k, v in counts.items()}, dict.fromkeys(counts, True), counts),
        str(counts))[1])
    tally.check("nothing is kept", B.idle)
    tally.check("all of its blocks are free", lambda: equal(B.look("free"), free, "free blocks"))
    for node in (B.node, *there):
        tally.check("nothing is held at %s" % node.daemon.name, nothing_held, node)
    B.stop()
    C = case.engine("C", B.node)
    C.look("break", "fetches")
    tally.check("another engine has right tokens from what was stored meanwhile", case.at_once, C,
                range(case.count), 8)


def endangered(case):
    """Two daemons that keep the same documents in files, and an engine."""
    own = case.node("own", "attention_threads = 1\n")
    A = case.engine("A", own)
    port = free_ports(2)
    there = [case.node("there%d" % i, "attention_threads = 1\n" + FILES % (
        case.stack.enter_context(tempfile.TemporaryDirectory()), port + i)) for i in range(2)]
    for node in there:
        A.look("scatter", [node.daemon.socket_path], 1)
        A.forget()
        case.store(A)
    A.stop()
    here = case.node("here", "chunk_peers = %s\n" % " ".join(map(endpoint, there)))
    connected(here, 2)
    return there, case.engine("B", here, {"remote": 0.3})


FILES = "chunk_dir = %s\nchunk_dir_size = 1 GiB\n[peer]\nlisten = tcp://127.0.0.1:%d\n"


def nothing_held(node):
    def figures():
        told = node.chunks()
        return {"holds": told["holds"], "moves": told["moves"], "of others": told["remote"]["holds"]}
    assert until(lambda: not any(figures().values()), 20), figures()


def again(node):
    node.daemon.proc.kill()
    node.daemon.proc.wait()
    node.daemon.notify.close()
    node.daemon.start().wait_ready()


def around(case, B, there, rng, counts, kind, some):
    def fresh():
        """Its daemon has no chunks then, which B would find before those of holders that are
        reading theirs from files, and has suspended nobody."""
        again(B.node)
        connected(B.node, 2)

        def sessions():
            """Of B's scheduler and worker, which come with the next prompts."""
            B.complete([rng.randrange(3, 512) for _ in range(T + 1)], 1)
            return len(ctl(B.node, "sessions")["sessions"]) >= 2
        assert until(sessions, 30, 0.3), ctl(B.node, "sessions")
        return any(routes(case, B) for _ in range(3))
    assert until(fresh, 60, 1), "nothing is routed"
    B.forget()
    begin, over, ended = B.counters(), threading.Event(), []

    def ends():
        while not over.wait(kind.kill_s):
            node = rng.choice(there)
            if rng.random() < 0.5:
                again(node)
            else:
                node.daemon.freeze()
                over.wait(rng.choice((0.3, 2.0)))
                node.daemon.thaw()
            ended.append(node.daemon.name)
    killer = threading.Thread(target=ends)
    killer.start()
    times = []

    def one(i):
        start = time.monotonic()
        case.ask(B, i, kind.answer)
        times.append(time.monotonic() - start)
    try:
        with concurrent.futures.ThreadPoolExecutor(kind.width) as pool:
            list(pool.map(one, some))
    finally:
        over.set()
        killer.join()
        connected(B.node, 2)
        B.settled()
    assert max(times) < ANSWER_S, "%.1f s for an answer" % max(times)
    until(lambda: B.counters()["posts"] > begin["posts"], 10)
    got = {k: B.counters()[k] - begin[k] for k in ("posts", "lost")}
    for k, count in dict(got, ends=len(ended)).items():
        counts[k] += count
    return "%d ends, %d lost steps, %d requests for attention, longest %.1f s" % (
        len(ended), got["lost"], got["posts"], max(times))


CASES = {"gqa": always, "mla": always, "many": many, "many-mla": many,
         "scattered": lambda case: many(case, True), "two": two, "ranks": ranks, "ranks-mla": ranks,
         "cross": cross, "bf16": bf16, "auto": auto, "ends": ends, "controls": controls,
         "load": lambda case: load(case, LOADED), "soak": lambda case: load(case, SOAKED)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--requests", type=int, default=LOAD, help="of load and soak")
    parser.add_argument("--transport", choices=["shm", "tcp"], help="between the daemons")
    parser.add_argument("--name", default="vllm-route")
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
