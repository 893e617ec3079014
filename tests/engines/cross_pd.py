#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One engine prefills, the other decodes: vLLM pushes to SGLang, SGLang to vLLM, with pages of
32 and 16 tokens, by kvd's own backends on the CPU.

cross_pd.py [--nixl native] [--only vllm-sglang|sglang-vllm] [--prefill-tp N]

vLLM runs with the cache layout of its GPU backends (vllm_plain). Greedy tokens must be those
that vLLM gives alone."""
import argparse
import concurrent.futures
import itertools
import os
import random
import sys

import sglang_pd
import vllm_pd
from rig import FOLDER, HERE, HOST, Node, Tally, equal, free_ports, until

MODEL = os.path.join(FOLDER, "sglang", "bytes")
BLOCK = 32
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, elements, bytes
LENGTHS = (1, 7, 16, 31, 32, 33, 53, 64, 277, 700)
OUT = 8
prompt = sglang_pd.prompt


def vllm(args, name, node, role):
    """A vLLM engine; a prefill one has a bootstrap server."""
    made = argparse.Namespace(nixl="native", kind="llama", connector="", tp_d=1, push=True,
                              layerwise=args.layerwise, name=args.name)
    tp = args.prefill_tp if role == "kv_producer" else 1
    return vllm_pd.Engine(made, name, node, tp=tp, role=role,
                          more=["--model", MODEL, "--block-size", str(BLOCK)],
                          path=[os.path.join(HERE, "vllm_plain")])


def sglang(args, name, node, *more):
    made = argparse.Namespace(nixl="native", name=args.name)
    return sglang_pd.Engine(made, name, node, "--disaggregation-transfer-backend", "kvd",
                            "--disaggregation-mode", *more)


class Way:
    """One direction. both(ids) is a request as a proxy sends it to both."""

    def __init__(self, args, tally, nodes):
        self.args, self.tally, self.nodes = args, tally, nodes
        self.pool = concurrent.futures.ThreadPoolExecutor(32)
        self.rooms = itertools.count(random.getrandbits(40))

    def alone(self, ids, n=OUT):
        return self.vllm.complete(ids, n)["tokens"]

    def same(self, ids, n=OUT):
        got = self.both(ids, n)
        wanted = self.alone(ids, n)
        assert len(wanted) == n, "vLLM alone"
        equal(got, wanted, "%d tokens in" % len(ids))

    def mixed(self):
        """The cache of another prompt gives other tokens: this is no check of nothing."""
        a, b = prompt(90, "a"), prompt(90, "b")
        got = self.both(b, OUT, first=a)
        assert got != self.alone(b), "the cache does not count"

    def prefix(self):
        ids = prompt(150, "prefix")
        self.same(ids)
        self.same(ids + prompt(40, "tail"))
        self.same(ids)

    def at_once(self):
        many = [prompt(5 + 29 * i, "many%d" % i) for i in range(10)]
        got = list(self.pool.map(self.both, many))
        equal(got, [self.alone(ids) for ids in many], "tokens")

    def run(self):
        check, before = self.tally.check, self.tally.failed
        for server in (self.vllm, self.sglang):
            check("%s: %s is up" % (self.name, server.name),
                  lambda s=server: "%.0f s" % s.wait().took)
        if self.tally.failed > before:
            return
        for n in LENGTHS:
            check("%s: %d tokens" % (self.name, n), self.same, prompt(n, n))
        check("%s: the other prompt's cache" % self.name, self.mixed)
        check("%s: prefixes that are there" % self.name, self.prefix)
        check("%s: 10 at once" % self.name, self.at_once)
        self.more(check)

    def stop(self):
        self.vllm.stop()
        self.sglang.stop()


class VllmSglang(Way):
    name = "vllm-sglang"

    def start(self):
        self.vllm = vllm(self.args, "P", self.nodes[0], "kv_producer")
        self.sglang = sglang(self.args, "decode", self.nodes[1], "decode",
                             "--disaggregation-decode-retraction-backup", "none")
        return self

    def prefill(self, ids, room):
        return self.vllm.ask_prefill(ids, {"bootstrap_room": room}, "room%d" % room)

    def decode(self, ids, n, room, **more):
        return self.sglang.generate(sglang_pd.request(
            ids, n, bootstrap_host=HOST, bootstrap_port=self.vllm.side_port,
            bootstrap_room=room, **more))

    def both(self, ids, n=OUT, first=None):
        room = next(self.rooms)
        other = self.pool.submit(self.prefill, first or ids, room)
        got = self.decode(ids, n, room)["output_ids"]
        equal(other.result(120)[0], 200, "prefill's status")
        return got

    def logprobs(self):
        """Of the first token vLLM's are not known here, and not 0."""
        ids, room = prompt(60, "lp"), next(self.rooms)
        other = self.pool.submit(self.prefill, ids, room)
        got = self.decode(ids, 4, room, return_logprob=True)
        other.result(120)
        first, *rest = [x[0] for x in got["meta_info"]["output_token_logprobs"]]
        assert first is None or first != first, first
        assert all(x < 0 for x in rest), rest

    def nobody(self):
        """A room that prefill does not know ends with an error."""
        try:
            said = self.decode(prompt(20, "x"), 4, next(self.rooms))
            equal(said["meta_info"]["finish_reason"]["type"], "abort", "its end")
        except RuntimeError as error:
            assert "500" in str(error) or "kvd" in str(error), error

    def freed(self):
        assert until(lambda: self.vllm.counters()["usage"] == 0, 40), "prefill keeps blocks"

    def more(self, check):
        check("vllm-sglang: logprob of the first token", self.logprobs)
        check("vllm-sglang: a room that nobody prefills", self.nobody)
        check("vllm-sglang: prefill has all its blocks back", self.freed)
        check("vllm-sglang: and goes on", self.same, prompt(99, "on"))


class SglangVllm(Way):
    name = "sglang-vllm"

    def start(self):
        self.bootstrap = free_ports()
        self.sglang = sglang(self.args, "prefill", self.nodes[0], "prefill", "--tp",
                             str(self.args.prefill_tp), "--disaggregation-bootstrap-port",
                             str(self.bootstrap))
        self.vllm = vllm(self.args, "D", self.nodes[1], "kv_consumer")
        return self

    def both(self, ids, n=OUT, first=None):
        where = {"bootstrap_host": HOST, "bootstrap_port": self.bootstrap,
                 "bootstrap_room": next(self.rooms)}
        other = self.pool.submit(self.sglang.generate,
                                 sglang_pd.request(first or ids, n, **where))
        got = self.vllm.complete(ids, n, dict(where, do_remote_prefill=True,
                                              request_id="r%d" % where["bootstrap_room"]))
        other.result(120)
        assert not got["error"], got["error"]
        return got["tokens"]

    def bytes_moved(self):
        """As many as the tokens that decode did not have."""
        before = self.vllm.counters()["bytes"]
        self.both(prompt(333, "bytes"))
        moved = until(lambda: self.vllm.counters()["bytes"] - before, 10)
        equal(moved, 333 * TOKEN_BYTES, "bytes")

    def nobody(self):
        got = self.vllm.complete(prompt(20, "x"), 4, {
            "do_remote_prefill": True, "bootstrap_host": HOST, "bootstrap_port": self.bootstrap,
            "bootstrap_room": next(self.rooms), "request_id": "nobody"})
        assert got["error"] and not got["tokens"], got

    def more(self, check):
        check("sglang-vllm: bytes", self.bytes_moved)
        check("sglang-vllm: a room that nobody prefills", self.nobody)
        check("sglang-vllm: decode has all its blocks back",
              lambda: until(lambda: self.vllm.counters()["usage"] == 0, 20) or 1 / 0)
        check("sglang-vllm: and goes on", self.same, prompt(99, "on"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--only", choices=["vllm-sglang", "sglang-vllm"])
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--layerwise", action="store_true")
    parser.add_argument("--name", default="cross")
    args = parser.parse_args()
    tally = Tally()
    for way in (VllmSglang, SglangVllm):
        if args.only not in (None, way.name):
            continue
        try:
            with Node("native", "p") as p, Node("native", "d") as d:
                made = way(args, tally, (p, d)).start()
                try:
                    made.run()
                    tally.add("%s: bytes went by the daemons" % way.name,
                              p.used() and d.used())
                finally:
                    made.stop()
        except Exception as error:
            tally.add("%s: the run" % way.name, False, "%s: %s" % (type(error).__name__,
                                                                   str(error)[:1500]))
    code = tally.close(args.name)
    sys.stdout.flush()
    os._exit(code)  # requests that hang have threads


if __name__ == "__main__":
    main()
