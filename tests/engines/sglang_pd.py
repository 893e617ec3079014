#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Three real SGLang servers on the CPU: a plain one, and prefill and decode by its own
backend `nixl`, or by kvd's (native). Each request goes to both, as a router sends it; the
decode server's greedy tokens must be the plain one's.

sglang_pd.py [--nixl kvd|native|nixl] [--prefill-tp N]
Last line: N passed, N failed."""
import argparse
import concurrent.futures
import itertools
import json
import os
import random
import sys

from rig import (FOLDER, HERE, HOST, Node, Server, Tally, equal, free_ports, kvd_paths, logs,
                 pause, python)

PAGE, CHUNK = 16, 64
BACKEND = {"kvd": "nixl", "nixl": "nixl", "native": "kvd"}


def environment(nixl, node):
    path = kvd_paths(nixl) + [os.path.join(HERE, "shim")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(path), SGLANG_USE_CPU_ENGINE="1",
                SGLANG_HOST_IP=HOST, SGLANG_CPU_OMP_THREADS_BIND="0|1",
                SGLANG_NCCL_SO_PATH="none", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo", UCX_NET_DEVICES="lo",
                TOKENIZERS_PARALLELISM="false",
                SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="8", **node.env())


class Engine(Server):
    def __init__(self, args, name, node, *more):
        port = free_ports()
        argv = [python("sglang"), "-m", "sglang.launch_server", "--port", str(port),
                "--model-path", os.path.join(FOLDER, "sglang", "bytes"), "--device", "cpu",
                "--attention-backend", "torch_native", "--host", HOST, "--dtype", "float32",
                "--mem-fraction-static", "0.1", "--max-total-tokens", "8192",
                "--max-running-requests", "16", "--page-size", str(PAGE),
                "--chunked-prefill-size", str(CHUNK), "--skip-server-warmup",
                "--watchdog-timeout", "900"] + list(more)
        log = os.path.join(logs(args.name), name + ".log")
        super().__init__(name, argv, self.environment(args, node), log, port, "/model_info")

    def environment(self, args, node):
        return environment(args.nixl, node)

    def generate(self, body, seconds=120):
        status, said = self.call("POST", "/generate", body, seconds)
        if status != 200:
            raise RuntimeError("%s: %d %s" % (self.name, status, said[:200]))
        return json.loads(said)

    def moved(self):
        """What it reports of its transfers: how many, bytes, seconds from the first one's
        place in the queue to the last one's end, over all requests."""
        sums = {}
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            name = line.partition("{")[0]
            if name.startswith("sglang:kv_transfer_"):
                sums[name[19:]] = sums.get(name[19:], 0) + float(line.rsplit(" ", 1)[-1])
        return {"xfers": sums.get("latency_ms_count", 0),
                "bytes": sums.get("total_mb_sum", 0) * (1 << 20),
                "xfer_s": sums.get("latency_ms_sum", 0) / 1e3}


def request(ids, n=8, **more):
    return dict(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": n,
                                                "ignore_eos": True}, **more)


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


def numbers(nested):
    """All floats of nested lists, in order."""
    if isinstance(nested, (list, tuple)):
        return [x for one in nested for x in numbers(one)]
    return [nested] if isinstance(nested, float) else []


class Run:
    def __init__(self, args, tally, nodes):
        self.tally, self.pool = tally, concurrent.futures.ThreadPoolExecutor(32)
        self.rooms = itertools.count(random.getrandbits(40))
        self.bootstrap = free_ports()
        disagg = ["--disaggregation-transfer-backend", BACKEND[args.nixl],
                  "--disaggregation-mode"]
        self.plain = Engine(args, "plain", Node("nixl", "none"))
        self.prefill = Engine(args, "prefill", nodes[0], *disagg, "prefill", "--tp",
                              str(args.prefill_tp), "--disaggregation-bootstrap-port",
                              str(self.bootstrap), "--enable-metrics")
        self.decode = Engine(args, "decode", nodes[1], *disagg, "decode",
                             "--disaggregation-decode-retraction-backup", "none")
        self.all = (self.plain, self.prefill, self.decode)

    def body(self, ids, n=8, **more):
        return request(ids, n, bootstrap_host=HOST, bootstrap_port=self.bootstrap,
                       bootstrap_room=next(self.rooms), **more)

    def both(self, ids, n=8, **more):
        body = self.body(ids, n, **more)
        other = self.pool.submit(self.prefill.generate, body)
        answer = self.decode.generate(body)
        other.result(120)
        return answer

    def same(self, ids, n=8):
        wanted = self.plain.generate(request(ids, n))["output_ids"]
        equal(self.both(ids, n)["output_ids"], wanted, "%d tokens in" % len(ids))

    def logprobs(self):
        """The first token's travel beside the cache, not in it."""
        ids, more = prompt(33, "lp"), dict(return_logprob=True, top_logprobs_num=3)
        wanted = self.plain.generate(request(ids, 4, **more))["meta_info"]
        got = self.both(ids, 4, **more)["meta_info"]
        for word in ("output_token_logprobs", "output_top_logprobs"):
            a, b = numbers(got[word]), numbers(wanted[word])
            assert len(a) == len(b) and all(abs(x - y) < 1e-3 for x, y in zip(a, b)), word

    def prefix(self):
        """The second one's beginning is in prefill's cache, and not in decode's."""
        ids = prompt(90, "prefix")
        self.same(ids)
        ids = ids + prompt(20, "tail")
        wanted = self.plain.generate(request(ids))["output_ids"]
        got = self.both(ids)
        equal(got["output_ids"], wanted, "tokens")
        assert got["meta_info"]["cached_tokens"] > 0, "nothing was cached"

    def at_once(self):
        ids = [prompt(5 + 13 * i, i) for i in range(12)]
        wanted = [self.plain.generate(request(x))["output_ids"] for x in ids]
        equal([x["output_ids"] for x in self.pool.map(self.both, ids)], wanted, "tokens")

    def decode_alone(self):
        """A prefill that never comes; the router gives up."""
        asked = self.pool.submit(self.decode.generate, dict(self.body(prompt(20, "a")),
                                                            rid="alone"))
        pause(1.5)
        self.decode.call("POST", "/abort_request", {"rid": "alone"})
        self.aborted(asked.result)
        self.same(prompt(30, "after"))

    def prefill_alone(self):
        self.aborted(lambda seconds: self.prefill.generate(self.body(prompt(20, "p"))))
        self.same(prompt(30, "after p"))

    @staticmethod
    def aborted(result):
        try:
            equal(result(60)["meta_info"]["finish_reason"]["type"], "abort", "its end")
        except RuntimeError:
            pass  # refused by its HTTP status

    def run(self):
        check = self.tally.check
        for server in self.all:
            check("%s is up" % server.name, lambda s=server: "%.0f s" % s.wait().took)
        if self.tally.failed:
            return
        for what, length, n in (
                ("one token in", 1, 8), ("part of a page", 7, 8), ("a page", PAGE, 8),
                ("some pages", 3 * PAGE + 5, 8), ("a chunk", CHUNK, 8),
                ("five chunks", 4 * CHUNK + 21, 24), ("one token out", 40, 1)):
            check(what, self.same, prompt(length, length), n)
        check("logprobs of every token", self.logprobs)
        check("a prefix in prefill's cache", self.prefix)
        check("12 at once", self.at_once)
        self.tally.note("moved", self.prefill.moved())
        check("decode alone, given up", self.decode_alone)
        check("prefill alone gives up", self.prefill_alone)

    def stop(self):
        for server in self.all:
            server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="kvd", choices=sorted(BACKEND))
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--name", default="sglang")
    args = parser.parse_args()
    tally = Tally()
    try:
        with Node(args.nixl, "p") as p, Node(args.nixl, "d") as d:
            run = Run(args, tally, (p, d))
            try:
                run.run()
                tally.add("bytes went by the daemons", p.used() and d.used())
            finally:
                run.stop()
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    code = tally.close(args.name)
    sys.stdout.flush()
    os._exit(code)  # requests that hang have threads


if __name__ == "__main__":
    main()
