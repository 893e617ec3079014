#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvd.router before two real prefill and two real decode servers on the CPU, of vLLM or of SGLang,
with a daemon each.

router_pd.py --engine vllm|sglang [--requests N]

Tokens are those of a plain engine. One prefill server is slowed by stopping it for nine tenths of the
time; the time to the first token by least-loaded and by round-robin, side by side. A
prefill and then a decode server are killed under load: what had not begun is answered by another,
the rest end with an error, none hangs. Last line: N passed, N failed."""
import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import rig
from rig import HOST, Node, Process, Tally, equal, free_ports, kvd_paths, logs, until

ROLES = ("prefill", "decode")
SLOW_RUN_S, SLOW_STOP_S = 0.02, 0.18
ANSWER_S = 120
TOKENS = 6


def engines_of(args, nodes):
    """{name: Server} of two prefill and two decode servers; options of the router for each."""
    if args.engine == "vllm":
        import vllm_pd
        args.connector, args.kind, args.tp_d, args.push = "KvdConnector", "llama", 1, False
        args.layerwise = False
        return {name: vllm_pd.Engine(args, name, node, role="kv_both")
                for name, node in nodes.items()}, {}
    import sglang_pd
    made, more = {}, {}
    for name, node in nodes.items():
        role = name[:-1]
        own = ["--disaggregation-transfer-backend", "kvd", "--disaggregation-mode", role]
        if role == "prefill":
            port = free_ports()
            more[name] = ",bootstrap=%s:%d" % (HOST, port)
            own += ["--disaggregation-bootstrap-port", str(port)]
        else:
            own += ["--disaggregation-decode-retraction-backup", "none"]
        made[name] = sglang_pd.Engine(args, name, node, *own)
    return made, more


class Router(Process):
    def __init__(self, args, engines, more, policy):
        self.port = free_ports()
        self.admin = "/tmp/kvd-router-%d.sock" % os.getpid()
        argv = [rig.python(args.engine), "-m", "kvd.router", "--listen",
                "%s:%d" % (HOST, self.port), "--admin", self.admin, "--engine", args.engine,
                "--policy", policy, "--health-interval", "1", "--health-timeout", "20", "--health-path",
                "/health" if args.engine == "vllm" else "/model_info"]
        for role in ROLES:
            argv += ["--" + role] + ["http://%s:%d%s" % (HOST, e.port, more.get(n, ""))
                                     for n, e in engines.items() if n.startswith(role)]
        self.argv = argv
        self.env = dict(os.environ, PYTHONPATH=os.pathsep.join(kvd_paths("native")))
        super().__init__(argv, self.env, os.path.join(logs(args.name), "router-%s.log" % policy))

    def command(self, name, *words):
        subprocess.run([*self.argv[:3], name, "--admin", self.admin, *words], env=self.env,
                       check=True, timeout=60, stdout=subprocess.DEVNULL)

    def get(self, path):
        try:
            with urllib.request.urlopen("http://%s:%d%s" % (HOST, self.port, path),
                                        timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def wait(self):
        if not until(lambda: self.get("/health"), 120):
            raise RuntimeError("the router is not up: %s" % self.words())
        return self

    def __enter__(self):
        return self.wait()

    def __exit__(self, *exc):
        self.stop()


def body_of(args, ids, n=TOKENS, stream=True):
    if args.engine == "vllm":
        return "/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": n,
                                   "temperature": 0, "ignore_eos": True, "stream": stream,
                                   "return_token_ids": True}
    return "/generate", {"input_ids": ids, "stream": stream, "sampling_params": {
        "temperature": 0, "max_new_tokens": n, "ignore_eos": True}}


def read_stream(args, answer, out, begin):
    for line in answer:
        text = line.strip()
        if not text.startswith(b"data:") or text.endswith(b"[DONE]"):
            continue
        said = json.loads(text[5:])
        if "error" in said:
            out["error"] = said["error"]["message"][:200]
            return
        out["first"] = out["first"] or time.monotonic() - begin
        if args.engine == "vllm":
            out["tokens"] += said["choices"][0].get("token_ids") or []
        else:
            out["tokens"] = said["output_ids"]


def ask(args, port, ids, n=TOKENS):
    """{tokens, error, status, first: seconds}; never raises."""
    path, body = body_of(args, ids, n)
    out, begin = {"tokens": [], "error": None, "first": None, "status": None}, time.monotonic()
    request = urllib.request.Request("http://%s:%d%s" % (HOST, port, path), json.dumps(
        body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            out["status"] = answer.status
            read_stream(args, answer, out, begin)
    except urllib.error.HTTPError as error:
        out.update(status=error.code, error=error.read().decode(errors="replace")[:200])
    except (OSError, ValueError) as error:
        out["error"] = "no clear error: %s: %s" % (type(error).__name__, error)
    return out


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


class Slowed:
    """An engine's processes run for a tenth of the time."""

    def __init__(self, engine):
        self.engine, self.over = engine, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        pids = self.engine.pids()  # they have all begun
        while not self.over.wait(SLOW_RUN_S):
            for number, seconds in ((signal.SIGSTOP, SLOW_STOP_S), (signal.SIGCONT, 0)):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                self.over.wait(seconds)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *exc):
        self.over.set()
        self.thread.join()
        self.engine.signal_all(signal.SIGCONT)


class Run:
    def __init__(self, args, tally, nodes):
        self.args, self.tally = args, tally
        self.engines, self.more = engines_of(args, nodes)

    def router(self, policy="least-loaded"):
        return Router(self.args, self.engines, self.more, policy)

    def references(self, prompts):
        """Tokens of the first decode server alone, which computes all of it (vLLM); SGLang's need
        both, so they are compared with each other."""
        return [self.alone(ids) for ids in prompts] if self.args.engine == "vllm" else None

    def alone(self, ids):
        return ask(self.args, self.engines["decode1"].port, ids)["tokens"]

    def tokens(self, router):
        lengths = (1, 33, 100, 400)
        prompts = [prompt(n, n) for n in lengths]
        wanted = self.references(prompts)
        for i, ids in enumerate(prompts):
            got = [ask(self.args, router.port, ids) for _ in range(3)]
            for one in got:
                equal(one["error"], None, "%d tokens in" % len(ids))
                equal(one["tokens"], wanted[i] if wanted else got[0]["tokens"],
                      "%d tokens in" % len(ids))
                equal(len(one["tokens"]), TOKENS, "how many")

    def load(self, router, seed, count, gap_s, n=TOKENS, on=lambda i: None):
        """Poisson arrivals; all answers."""
        rng = random.Random(5)
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            asked = []
            for i in range(count):
                rig.pause(rng.expovariate(1 / gap_s))
                on(i)
                asked.append(pool.submit(ask, self.args, router.port,
                                         prompt(rng.choice((64, 128, 256)), "%s %d" % (seed, i)),
                                         n))
            return [one.result() for one in asked]

    def slow(self):
        """One prefill server has a tenth of its time."""
        policies = ("round-robin", "least-loaded")
        figures, shares = {p: [] for p in policies}, {p: [0, 0] for p in policies}
        with Slowed(self.engines["prefill1"]):
            for policy in policies * self.args.rounds:
                with self.router(policy) as router:
                    # in turns, because a machine changes
                    got = self.load(router, "%s%d" % (policy, len(figures[policy])),
                                    self.args.requests, self.args.gap)
                    for i in (0, 1):
                        shares[policy][i] += self.prefilled(router, "prefill%d" % (i + 1))
                errors = [g["error"] for g in got if g["error"]]
                if errors:
                    raise AssertionError("%s: %d errors: %s" % (policy, len(errors), errors[0]))
                figures[policy] += [1e3 * g["first"] for g in got]
        for policy, times in figures.items():
            times.sort()
            self.tally.note("first token by %s, ms" % policy, {
                "p50": round(times[len(times) // 2]), "p99": round(times[int(.99 * len(times))]),
                "mean": round(sum(times) / len(times)), "on the slow and the other": shares[policy]})
        both = [figures[p] for p in reversed(policies)]
        return "p50 %.2f, p99 %.2f of round-robin's" % tuple(
            both[0][at] / both[1][at] for at in (len(both[0]) // 2, int(.99 * len(both[0]))))

    def prefilled(self, router, name):
        """Requests that it was given."""
        url = 'prefill="http://%s:%d"' % (HOST, self.engines[name].port)
        return sum(int(line.split()[-1]) for line in router.get("/metrics").splitlines()
                   if line.startswith("kvd_router_pair_requests_total") and url in line)

    def killed(self, router, name, n):
        """A server is killed in the middle of the load."""
        count = 24

        def on(i):
            if i == count // 2:
                self.engines[name].kill()
        begin = time.monotonic()
        got = self.load(router, "kill" + name, count, 0.25, n, on)
        ends = {"answered": 0, "cut": 0, "refused": 0}
        for one in got:
            if not one["error"]:
                equal(len(one["tokens"]), n, "tokens of a whole answer")
                ends["answered"] += 1
            elif one["error"].startswith("no clear error"):
                raise AssertionError(one["error"])
            else:
                ends["cut" if one["status"] == 200 else "refused"] += 1
        assert not ends["refused"], "one that had not begun: %s" % [
            g["error"] for g in got if g["status"] != 200][:2]
        assert ends["answered"] >= count // 2, ends
        assert time.monotonic() - begin < ANSWER_S, "a request hung"
        again = ask(self.args, router.port, prompt(50, name), n)
        equal(again["error"], None, "after it")
        return "%s, %s tries more" % (ends, self.metric(router, "kvd_router_retries_total"))

    @staticmethod
    def metric(router, name):
        return next((line.split()[-1] for line in (router.get("/metrics") or "").splitlines()
                     if line.startswith(name)), None)

    def flip(self, router):
        """vLLM's kv_both: a decode server becomes a prefill server and back, under load."""
        url = "http://%s:%d" % (HOST, self.engines["decode2"].port)

        pairs = []

        def on(i):
            if i == 18:
                pairs.append(self.prefilled(router, "decode2"))
            if i in (6, 18):
                router.command("flip", url, "prefill" if i == 6 else "decode")
        got = self.load(router, "flip", 24, 0.3, on=on)
        equal([g["error"] for g in got if g["error"]], [], "errors")
        assert pairs[0], "it has prefilled nothing"
        return "%d prefilled by it, 24 answered" % pairs[0]

    def run(self):
        check = self.tally.check
        for name, engine in self.engines.items():
            check("%s is up" % name, lambda e=engine: "%.0f s" % e.wait().took)
        if self.tally.failed:
            return
        with self.router() as router:
            check("tokens through the router", self.tokens, router)
            if self.args.engine == "vllm":
                check("a decode server flipped under load", self.flip, router)
        check("one prefill server is slow", self.slow)
        with self.router() as router:
            check("a prefill server killed under load", self.killed, router, "prefill1", TOKENS)
            check("a decode server killed under load", self.killed, router, "decode1", 40)

    def stop(self):
        for engine in self.engines.values():
            engine.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--engine", required=True, choices=["vllm", "sglang"])
    parser.add_argument("--requests", type=int, default=40, help="of a policy and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gap", type=float, default=0.4, help="seconds between two, on average")
    parser.add_argument("--name", default="router")
    args, tally = parser.parse_args(), Tally()
    nodes = {role + n: Node("native", role[0] + n) for role in ROLES for n in "12"}
    try:
        for node in nodes.values():
            node.__enter__()
        run = Run(args, tally, nodes)
        try:
            run.run()
            tally.add("bytes went by the daemons", all(n.used() for n in nodes.values()))
        finally:
            run.stop()
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    for node in nodes.values():
        try:
            node.__exit__(None, None, None)
        except Exception as error:
            tally.add("the daemons end well", False, str(error)[:600])
    code = tally.close(args.name)
    sys.stdout.flush()
    os._exit(code)  # requests that hang have threads


if __name__ == "__main__":
    main()
