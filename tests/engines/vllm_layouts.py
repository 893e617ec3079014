#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines whose caches are not alike, by KvdConnector: with the cache of vLLM's GPU
backends (vllm_plain), where a token is a token, between engines with blocks of other sizes,
other ranks and other groups of layers. (vLLM's CPU runner has no pipeline stages: those are in
tests/python/test_vllm_layouts.py.)

vllm_layouts.py blocks|hybrid|swa|mla [--name NAME]

Greedy tokens must be those of one plain engine of vLLM's own kernels. Bytes that moved are
counted to the byte: what each token of each layer takes, and of a window only what the next
token sees. A prompt that is given the blocks of another must answer as the other.
Last line: N passed, N failed."""
import argparse
import contextlib
import os
import subprocess
import sys
import types

from rig import FOLDER, HERE, Node, Tally, equal, python, until
from vllm_pd import TOKENS, Engine, Run

LENGTHS = ("len1", "len31", "len33", "len64", "len65", "len257", "len777")
PLAIN = os.path.join(HERE, "vllm_plain")
TOKEN = 2 * 4 * 32 * 4  # of a layer: K and V, heads, head, float32
WINDOW = 96
STATE = 4 * ((512 + 2 * 64) * 3 + 8 * 64 * 64) * 4  # layers, conv and temporal, float32
SHARED = 4 * 2 * 64 * 3 * 4  # of it B and C, one group's: each rank has them
LATENT = (512 + 64) * 4
FRESH = "--no-enable-prefix-caching"  # so that D has nothing of what it gave before
MLA_BLOCK = 16
MLA = ("--attention-backend", "CPU_MLA", "--block-size", str(MLA_BLOCK),
       "--worker-extension-cls", "vllm_look.Look")


def bytes_of(kind, n):
    """That a prompt of n tokens takes."""
    if kind == "swa":  # two layers see all, four the window, of which one is the next token
        return TOKEN * (2 * n + 4 * min(n, WINDOW - 1))
    if kind == "mla":
        return LATENT * 4 * n
    if kind == "hybrid":  # the state of the last token but one
        return TOKEN * 4 * (n - 1) + STATE if n > 1 else TOKEN * 4 * n + STATE
    return TOKEN * 4 * n


class Case(Run):
    def __init__(self, kind, args, tally):
        self.kind = kind
        super().__init__(types.SimpleNamespace(
            nixl="native", kind=kind, connector="", tp_d=1, push=False, name=args.name), tally)

    def reference(self):
        return {} if self.kind == "mla" else super().reference()

    def engine(self, stack, name, *more, tp=1, role="kv_both", plain=True,
               env=()):
        node = stack.enter_context(Node("native", name.lower()))
        engine = Engine(self.args, name, node, tp=tp, role=role, more=more,
                        path=[PLAIN, HERE] if plain else [], env=env)
        stack.callback(engine.stop)
        engine.ranks = tp
        return engine

    def ready(self, *engines):
        for engine in engines:
            engine.wait()
        self.tally.add("engines are up", True, ", ".join(
            "%s %.0f s" % (e.name, e.took) for e in engines))

    def pair(self, P, D):
        """Prompts of P's blocks on D."""
        self.P, self.D = P, D
        label = "%s to %s" % (P.name, D.name)
        begin = D.counters()
        for name in LENGTHS:
            self.tally.check("%s: %s" % (label, name), self.told, name)
        wanted = sum(bytes_of(self.kind, len(self.prompts[name])) for name in LENGTHS)
        if self.kind == "mla":
            wanted *= D.ranks
        if self.kind == "hybrid":
            wanted += len(LENGTHS) * (D.ranks - 1) * SHARED
        moved = "%s: bytes are those of the tokens" % label

        def bytes_moved():
            return D.counters()["bytes"] - begin["bytes"]
        until(lambda: bytes_moved() >= wanted, 10)
        self.tally.check(moved, equal, bytes_moved(), wanted, "bytes")
        self.tally.add("%s: nothing failed" % label, D.counters()["failed"] == begin["failed"])
        if self.kind == "mla":
            self.tally.check("%s: another prompt's blocks" % label, self.blocks_moved,
                             "swap_b", "swap_a")
        else:
            self.tally.check("%s: another prompt's blocks give its tokens" % label, self.swap)
        self.tally.note(moved, {"bytes": wanted, "rows": D.counters()["descs"] -
                                begin["descs"]})

    def told(self, name):
        if self.kind == "mla":
            self.blocks_moved(name)
        else:
            self.same(name)

    def blocks_moved(self, name, of=None):
        """vLLM's CPU_MLA gives a token that is computed alone another key than it gives it
        among others, so that no two engines have the same tokens; blocks are judged."""
        def seen(engine):
            return [[set(layer) for layer in rank] for rank in engine.look("blocks_of")]
        before = seen(self.P), seen(self.D)
        params = self.P.prefill(self.prompts[of or name])
        got = self.D.complete(self.prompts[name], 1, params)
        assert got["tokens"], got["error"]
        (there,), here = seen(self.P), seen(self.D)
        for rank, (now, old) in enumerate(zip(here, before[1])):
            for layer, blocks in enumerate(there):
                came = (blocks - before[0][0][layer]) - (now[layer] - old[layer])
                # decode computes the last token, and writes its block
                assert len(came) <= 1, "rank %d, layer %d: %d blocks are not there" % (
                    rank, layer, len(came))
                full = len(self.prompts[name]) // MLA_BLOCK
                assert len(now[layer] - old[layer]) >= full, (rank, layer)

    def prefix(self, P, D):
        """D has a prefix in blocks of its size."""
        self.P, self.D = P, D
        for name in ("prefix", "longer"):
            self.same(name)

    def refused(self, P, D):
        got = D.complete(self.prompts["again"], TOKENS, P.prefill(self.prompts["again"]))
        assert not got["tokens"] and got["error"], got
        with open(D.log, errors="replace") as f:
            assert "ELAYOUT" in f.read(), "no ELAYOUT in %s" % D.log


def size(n):
    return "--block-size", str(n)


def blocks(case, stack):
    """Those of b64 are four of its kernel's."""
    b16, b32 = (case.engine(stack, "b%d" % n, FRESH, *size(n)) for n in (16, 32))
    b64 = case.engine(stack, "b64", *size(64), env={"KVD_PLAIN_KERNEL_BLOCKS": "16"})
    case.ready(b16, b32, b64)
    for P, D in ((b32, b64), (b64, b32), (b16, b32)):
        case.pair(P, D)
    case.tally.check("a prefix that D has", case.prefix, b16, b64)
    b16.stop()
    own = case.engine(stack, "own", *size(32), plain=False)
    case.ready(own)
    case.tally.check("vLLM's CPU kernels, whose blocks are in another order, refuse",
                     case.refused, b32, own)


def hybrid(case, stack):
    """Blocks of 160 and of 192 tokens: what a state takes, in the asked blocks."""
    one = case.engine(stack, "one", *size(32))
    two = case.engine(stack, "two", *size(64), tp=2)
    case.ready(one, two)
    case.pair(one, two)
    case.pair(two, one)


def swa(case, stack):
    b16, b32 = (case.engine(stack, "b%d" % n, FRESH, *size(n)) for n in (16, 32))
    case.ready(b16, b32)
    case.pair(b16, b32)
    case.pair(b32, b16)


def mla(case, stack):
    """Each rank has all of the latent."""
    look = {"VLLM_SERVER_DEV_MODE": "1"}
    P, one = (case.engine(stack, name, *MLA, env=look) for name in ("P", "one"))
    two = case.engine(stack, "two", *MLA, tp=2, env=look)
    case.ready(P, one, two)
    case.pair(P, one)
    case.pair(P, two)


CASES = {"blocks": ("llama", blocks), "hybrid": ("hybrid", hybrid), "swa": ("swa", swa),
         "mla": ("mla", mla)}


def model(kind):
    folder = os.path.join(FOLDER, "vllm", kind)
    if not os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        subprocess.run([python("vllm"), os.path.join(HERE, "model.py"), kind, folder],
                       check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-layouts")
    args = parser.parse_args()
    kind, case = CASES[args.case]
    tally = Tally()
    try:
        model(kind)
        with contextlib.ExitStack() as stack:
            case(Case(kind, args, tally), stack)
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
