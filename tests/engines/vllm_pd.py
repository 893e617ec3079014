#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM engines on the CPU, prefill P and decode D, by vLLM's own NIXL connector, or
by kvd's (native).

vllm_pd.py [--nixl native|kvd|nixl] [--kind llama|hybrid] [--connector NAME] [--tp-d N] [--kill]
           [--push [--layerwise]]

Greedy tokens must be those of one plain engine. That they come of bytes that moved, and
not of computing again on D, is seen from D's counters (transfers, bytes, where prompt
tokens came from) and by a swap: D is given one prompt with the blocks of another, and must
answer as the other. --kill ends P before, during and between reads, and starts it again.
Last line: N passed, N failed."""
import argparse
import concurrent.futures
import hashlib
import http.client
import json
import os
import random
import re
import signal
import sys
import threading
import time
import uuid

from rig import (FOLDER, HERE, HOST, Node, Server, Tally, equal, free_ports, kvd_paths, logs,
                 pause, python, until)

BLOCK, TOKENS = 32, 24
BLOCK_BYTES = 4 * 2 * BLOCK * 4 * 32 * 4  # layers, K and V, tokens, heads, head, float32
LENGTHS = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 257, 511, 777, 1024, 1900)
ANSWER_S = 120
COUNTERS = {"xfers": "nixl_bytes_transferred_count", "bytes": "nixl_bytes_transferred_sum",
            "descs": "nixl_num_descriptors_sum", "xfer_s": "nixl_xfer_time_seconds_sum",
            "post_s": "nixl_post_time_seconds_sum",
            "failed": "nixl_num_failed_transfers_total",
            "notifs_failed": "nixl_num_failed_notifications_total",
            "expired": "nixl_num_kv_expired_reqs_total", "usage": "kv_cache_usage_perc"}
NATIVE = dict(COUNTERS, xfers="kvd_bytes_transferred_count", bytes="kvd_bytes_transferred_sum",
              descs="kvd_num_rows_sum", xfer_s="kvd_xfer_time_seconds_sum",
              failed="kvd_num_failed_transfers_total", expired="kvd_num_kv_expired_reqs_total")


def prompts():
    """By name, the same in each run."""
    rng = random.Random(99)

    def some(n):
        return [rng.randrange(3, 512) for _ in range(n)]
    out = {"len%d" % n: some(n) for n in LENGTHS}
    out.update(swap_a=some(300), prefix=some(200), alive=some(40), again=some(333))
    out["swap_b"] = some(299) + out["swap_a"][-1:]
    out["longer"] = out["prefix"] + some(150)
    out.update(("at_once%d" % i, some(180 + 61 * i)) for i in range(8))
    out.update(("kill%d" % i, some(1500 + i)) for i in range(3))
    return out


# vLLM 0.31: a request that fails before its first token streams nothing, and no error
NO_ERRORS_STREAMED = os.environ.get("VLLM_VERSION", "").startswith("0.31.")


class Engine(Server):
    def __init__(self, args, name, node=None, side_port=None, tp=None, role=None, more=(),
                 path=(), env=()):
        """node None: a plain one, without a connector. more: of its command line; path: of
        its Python's; env: of its environment."""
        self.metrics = NATIVE if args.nixl == "native" else COUNTERS
        self.side_port, port = side_port or free_ports(4), free_ports()
        self.push = args.push
        tp = tp or (args.tp_d if name == "D" else 1)
        self.path = list(path) + ([os.path.join(HERE, "vllm_calm")] if tp > 1 else [])
        env = dict(self.environment(args, node), **dict(env))
        if tp == 1 and "--pipeline-parallel-size" not in more:
            # one process less; what a GPU's engine does, too
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        argv = [python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model",
                os.path.join(FOLDER, "vllm", args.kind), "--served-model-name", "tiny",
                "--host", HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager",
                "--max-model-len", "2048", "--max-num-seqs", "16",
                "--tensor-parallel-size", str(tp)]
        if args.kind == "llama":
            argv += ["--block-size", str(BLOCK)]
        if node is None or args.kind == "hybrid":  # the CPU's mixer cannot cache prefixes
            argv.append("--no-enable-prefix-caching")
        if node is not None:
            argv += self.connector(args, role or (
                "kv_producer" if name == "P" else "kv_consumer"), self.side_port)
        log = os.path.join(logs(args.name), "%s.log" % name)
        super().__init__(name, argv + list(more), env, log, port, "/health")

    def environment(self, args, node):
        env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        path = self.path + (kvd_paths(args.nixl) if node is not None else [])
        env.update(PYTHONPATH=os.pathsep.join(path), HF_HUB_OFFLINE="1", DO_NOT_TRACK="1",
                   VLLM_NO_USAGE_STATS="1", CUDA_VISIBLE_DEVICES="", VLLM_HOST_IP=HOST,
                   VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1",
                   VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
                   GLOO_SOCKET_IFNAME="lo", UCX_NET_DEVICES="lo", PYTHONUNBUFFERED="1",
                   VLLM_SSM_CONV_STATE_LAYOUT="DS", VLLM_NIXL_SIDE_CHANNEL_HOST=HOST,
                   VLLM_NIXL_SIDE_CHANNEL_PORT=str(self.side_port))
        env.update(node.env() if node is not None else {})
        return env

    @staticmethod
    def connector(args, role, side_port):
        which = {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.vllm"} \
            if args.nixl == "native" else {"kv_connector": args.connector}
        if args.push and role == "kv_producer":
            which["kv_connector_extra_config"] = {"bootstrap": "%s:%d" % (HOST, side_port),
                                                  "layerwise": args.layerwise}
        out = ["--kv-transfer-config", json.dumps(dict(
            which, kv_role=role, kv_buffer_device="cpu", kv_load_failure_policy="fail"))]
        return out + (["--no-disable-hybrid-kv-cache-manager"] if args.kind == "hybrid" else [])

    def complete(self, prompt, n=TOKENS, params=None):
        """{tokens, error, first: seconds to the first token, each: to each}; never raises."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": n, "temperature": 0,
                "ignore_eos": True, "stream": True, "return_token_ids": True}
        out = {"tokens": [], "error": None, "first": None, "each": []}
        head, begin = {"Content-Type": "application/json"}, time.monotonic()
        if params:
            params = dict(params)
            head["X-Request-Id"] = params.pop("request_id")
            body["kv_transfer_params"] = params
        line = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        try:
            line.request("POST", "/v1/completions", json.dumps(body), head)
            self._stream(line.getresponse(), out, begin)
        except (OSError, http.client.HTTPException, ValueError) as error:
            out["error"] = "%s: %s" % (type(error).__name__, error)
        finally:
            line.close()
        out["took"] = time.monotonic() - begin
        return out

    @staticmethod
    def _stream(answer, out, begin):
        if answer.status != 200:
            out["error"] = answer.read().decode(errors="replace")[:300]
            return
        for event in answer:
            text = event.strip()
            if not text.startswith(b"data:") or text.endswith(b"[DONE]"):
                continue
            said = json.loads(text[5:])
            if "error" in said:
                out["error"] = json.dumps(said["error"])[:300]
                return
            choice = said["choices"][0]
            if choice.get("token_ids"):
                seconds = time.monotonic() - begin
                out["first"] = out["first"] or seconds
                out["tokens"] += choice["token_ids"]
                out.setdefault("each", []).extend([seconds] * len(choice["token_ids"]))
            if choice.get("finish_reason") == "error":
                out["error"] = "finish_reason error"
        if not out["tokens"] and NO_ERRORS_STREAMED:
            out["error"] = "an empty stream"

    def prefill(self, prompt):
        """The parameters for D: what a proxy carries. Both requests have one id."""
        request_id = uuid.uuid4().hex
        if self.push:
            return dict(self.prefill_begin(prompt, request_id), request_id=request_id)
        status, said = self.ask_prefill(prompt, {
            "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None}, request_id)
        params = json.loads(said).get("kv_transfer_params") if status == 200 else None
        if not params:
            raise RuntimeError("prefill: %d %s" % (status, said[:300]))
        return dict(params, request_id=request_id)

    def prefill_begin(self, prompt, request_id):
        """Prefill that pushes goes on beside D."""
        room = str(random.getrandbits(63))
        threading.Thread(target=self.ask_prefill, args=(prompt, {"bootstrap_room": room},
                                                        request_id), daemon=True).start()
        return self.pushed(room)

    def pushed(self, room):
        """The parameters for D of what this engine pushes."""
        return {"do_remote_prefill": True, "bootstrap_host": HOST,
                "bootstrap_port": self.side_port, "bootstrap_room": room}

    def ask_prefill(self, prompt, params, request_id):
        """Status and body of a proxy's request to prefill."""
        return self.call("POST", "/v1/completions", {
            "model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0,
            "ignore_eos": True, "kv_transfer_params": dict(params, do_remote_decode=True)},
            ANSWER_S, {"X-Request-Id": request_id})

    def look(self, what, *args):
        """Of the worker extension, with VLLM_SERVER_DEV_MODE: an answer of each rank."""
        status, said = self.call("POST", "/collective_rpc",
                                 {"method": "kvd_" + what, "args": list(args)}, ANSWER_S)
        if status != 200:
            raise RuntimeError("collective_rpc %s: %d %s" % (what, status, said[:200]))
        return json.loads(said)["results"]

    def counters(self):
        sums, sources = dict.fromkeys(self.metrics, 0.0), {}
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            name, _, rest = line.partition("{")
            value = line.rsplit(" ", 1)[-1]
            for word, metric in self.metrics.items():
                if name.split(" ")[0] == "vllm:" + metric:
                    sums[word] += float(value)
            source = re.search('source="([^"]*)"', rest)
            if name.startswith("vllm:prompt_tokens_by_source") and source and \
                    "_created" not in name:
                sources[source[1]] = sources.get(source[1], 0) + float(value)
        return dict(sums, sources=sources)


class Run:
    def __init__(self, args, tally):
        self.args, self.tally, self.prompts = args, tally, prompts()
        self.wanted = self.reference()

    def reference(self):
        """Tokens of a plain engine; kept by what they depend on."""
        args = self.args
        with open(os.path.join(FOLDER, "vllm", args.kind, "model.safetensors"), "rb") as f:
            mark = hashlib.sha256(f.read() + json.dumps(self.prompts).encode()).hexdigest()
        kept = os.path.join(FOLDER, "vllm", "tokens-%s-%s.json" % (args.kind, mark[:16]))
        if os.path.exists(kept):
            with open(kept) as f:
                return json.load(f)
        plain = Engine(args, "plain")
        try:
            plain.wait()
            out = {name: plain.complete(p)["tokens"] for name, p in self.prompts.items()}
        finally:
            plain.stop()
        assert all(len(tokens) == TOKENS for tokens in out.values()), "the plain engine"
        with open(kept, "w") as f:
            json.dump(out, f)
        return out

    def through(self, name, n=TOKENS):
        """One request as a proxy passes it on."""
        params = self.P.prefill(self.prompts[name])
        return params, self.D.complete(self.prompts[name], n, params)

    def same(self, name):
        params, got = self.through(name)
        if got["tokens"] != self.wanted[name]:
            raise AssertionError("%s: %s" % (name, got["error"] or "the tokens differ"))
        return params, got

    @property
    def mover(self):
        """Who posts the transfers."""
        return self.P if "Push" in self.args.connector else self.D

    def movers(self):
        return 1 if self.mover is self.P else self.args.tp_d

    def settled(self, xfers, seconds=10):
        """Its counters, once they tell of so many transfers: it reports with a delay."""
        until(lambda: self.mover.counters()["xfers"] >= xfers, seconds)
        return self.mover.counters()

    def handshake(self):
        """vLLM gives its side channel 5 s, and does not try again: a busy machine may."""
        for tries in range(1, 6):
            try:
                got = self.D.complete([17 + tries] * 40, 2, self.P.prefill([17 + tries] * 40))
                if len(got["tokens"]) == 2:
                    return "%.2f s, try %d" % (got["took"], tries)
            except RuntimeError as error:
                got = {"error": str(error)}
            pause(1)
        raise AssertionError(got["error"])

    def lengths(self):
        """Every length, and the counters after them."""
        begin = self.settled(self.movers())
        blocks, firsts, before = 0, [], self.D.counters()["sources"]
        for n in LENGTHS:
            def one(n=n):
                nonlocal blocks
                params, got = self.same("len%d" % n)
                blocks += -(-n // BLOCK) if self.args.nixl == "native" else \
                    sum(len(group) for group in params["remote_block_ids"] or [])
                firsts.append(got["first"])
            self.tally.check("tokens %d" % n, one)
        wanted = begin["xfers"] + len(LENGTHS) * self.movers()
        end = self.settled(wanted)
        moved = {word: end[word] - begin[word] for word in COUNTERS}
        self.tally.add("every request moved bytes", end["xfers"] == wanted,
                       "%d transfers, %d descriptors" % (moved["xfers"], moved["descs"]))
        if self.args.kind == "llama":
            self.tally.add("as many bytes as blocks", moved["bytes"] == blocks * BLOCK_BYTES,
                           "%d, %d blocks" % (moved["bytes"], blocks))
        self.tally.add("no transfer or notification failed, none expired", not any(
            moved[word] for word in ("failed", "notifs_failed", "expired")))
        local = self.D.counters()["sources"].get("local_compute", 0) - \
            before.get("local_compute", 0)
        self.tally.add("D computed no prompt but for one token", local <= len(LENGTHS),
                       "%d tokens" % local)
        self.tally.add("P freed its blocks when it was told",
                       until(lambda: self.P.counters()["usage"] == 0, 10))
        self.tally.note("moved", {word: round(value, 6) for word, value in moved.items()})
        self.tally.note("first token on D, ms, median and most", [
            round(1e3 * x, 1) for x in (sorted(firsts)[len(firsts) // 2], max(firsts))]
            if firsts else None)

    def swap(self):
        params = self.P.prefill(self.prompts["swap_a"])
        got = self.D.complete(self.prompts["swap_b"], TOKENS, params)
        equal(got["tokens"], self.wanted["swap_a"], "the tokens of whose blocks it has")

    def cached(self):
        """D has the prefix, or all of it: less is read, or nothing."""
        for name in ("prefix", "prefix", "longer"):
            self.same(name)

    def at_once(self):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: self.same("at_once%d" % i), range(8)))

    def alive(self):
        equal(self.D.complete(self.prompts["alive"])["tokens"], self.wanted["alive"], "tokens")

    def right_or_error(self, name, got):
        if got["tokens"] != self.wanted[name] and (got["tokens"] or not got["error"]):
            raise AssertionError("neither right nor an error: %s" % got)
        return "%s after %.2f s" % (got["error"] and "an error" or "right", got["took"])

    def kills(self, node):
        ready = [self.P.prefill(self.prompts["kill%d" % i]) for i in range(3)]
        self.P.signal_all(signal.SIGSTOP)
        box = []
        asked = threading.Thread(target=lambda: box.append(
            self.D.complete(self.prompts["kill0"], TOKENS, ready[0])))
        asked.start()
        asked.join(3)
        self.P.kill()
        asked.join(ANSWER_S)
        self.tally.check("P frozen and killed during a read",
                         lambda: self.right_or_error("kill0", box[0]))
        for i in (1, 2):
            name = "kill%d" % i
            self.tally.check("P dead before a read", lambda: self.right_or_error(
                name, self.D.complete(self.prompts[name], TOKENS, ready[i])))
        self.tally.check("D serves on", self.alive)
        self.P = Engine(self.args, "P", node, self.P.side_port)
        self.P.wait()
        self.tally.check("P is back on its port", self.back)
        self.tally.check("P killed under load, nobody hangs", self.killed_under_load)
        self.tally.check("D serves on after it", self.alive)

    def back(self):
        def works():
            try:
                return self.same("again")
            except (AssertionError, RuntimeError):
                return None
        assert until(works, 60, 1), "not within a minute"

    def killed_under_load(self):
        stop, ended = threading.Event(), {"right": 0, "error": 0}

        def load(i):
            while not stop.is_set():
                try:
                    self.same("kill%d" % i)
                    ended["right"] += 1
                except (AssertionError, RuntimeError, OSError, http.client.HTTPException):
                    ended["error"] += 1
                    stop.wait(0.2)
        threads = [threading.Thread(target=load, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: ended["right"] >= 3, 60)
        self.P.kill()
        stop.wait(2)
        stop.set()
        for thread in threads:
            thread.join(ANSWER_S)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        assert ended["right"] >= 3, "no request was right before the kill"
        return str(ended)

    def run(self, nodes):
        tally = self.tally
        self.P, self.D = Engine(self.args, "P", nodes[0]), Engine(self.args, "D", nodes[1])
        try:
            self.P.wait()
            self.D.wait()
            tally.add("engines are up", True, "P %.0f s, D %.0f s" % (self.P.took, self.D.took))
            tally.check("first request, with the handshake", self.handshake)
            self.lengths()
            tally.check("another prompt's blocks give its tokens", self.swap)
            tally.check("prefixes that D has", self.cached)
            tally.check("8 at once", self.at_once)
            if self.args.kill:
                self.kills(nodes[0])
            tally.add("bytes went by the daemons", all(node.used() for node in nodes))
        finally:
            self.P.stop()
            self.D.stop()


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="kvd", choices=["native", "kvd", "nixl"])
    parser.add_argument("--kind", default="llama", choices=["llama", "hybrid"])
    parser.add_argument("--connector", default="NixlConnector")
    parser.add_argument("--tp-d", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--push", action="store_true", help="native: by a bootstrap server")
    parser.add_argument("--layerwise", action="store_true")
    parser.add_argument("--name", default="vllm")
    return parser.parse_args(argv)


def main():
    args, tally = arguments(), Tally()
    try:
        with Node(args.nixl, "p") as p, Node(args.nixl, "d") as d:
            Run(args, tally).run((p, d))
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
