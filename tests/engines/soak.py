#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many requests through one prefill and one decode engine on kvd's own backend, with clients
that leave at any time and a prefill engine that is killed three times.

soak.py ENGINE [--requests 20000] [--clients 8] [--seed 1] [--control lost|wrong|grow]

ENGINE is vllm or sglang. This script is the proxy. At the end every request must be accounted
for: its tokens are those of a plain engine, or its client left, or it failed with words and
around a kill. Nothing may be left of any: rooms of both daemons, blocks, memory and file
descriptors are compared with those after the first tenth of the requests. --control does one
harm, and passes when it is noticed, and nothing else.
Last line: N passed, N failed."""
import argparse
import collections
import hashlib
import http.client
import itertools
import json
import os
import random
import re
import sys
import threading
import time
import urllib.parse
import uuid
from types import SimpleNamespace as Some

import sglang_pd
import vllm_pd
from rig import FOLDER, HOST, Node, Tally, equal, free_ports, pause, until

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_engine import Cache, Engine as Session  # noqa: E402

PROMPTS, TOKENS, LEASE_S, ANSWER_S, KILLS = 96, 4, 10, 120, 3
GRACE_S = 15.0  # after a restart, until both sides know of it
LEFT_S = 90  # for the last leases to end
LEAVES = ("prefill", "between", "loading", "decoding")  # when a client leaves
DAEMON_MIB, ENGINE_MIB, FDS = 8, 48, 8
HARMS = {"lost": ["no room is open", "as many rooms ended as were opened"],
         "wrong": ["every answer has the plain engine's tokens"],
         "grow": ["memory of daemon D is as before, within %d MiB" % DAEMON_MIB,
                 "file descriptors of the daemons and of decode are as before"]}


class Left(Exception):
    """The client went."""


class Failed(Exception):
    """With an error that the client sees."""


def events(port, path, body, head=(), leave=None):
    """What an answer says, piece by piece; leave: seconds until the client goes if nothing
    has come."""
    line, answer = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S), None
    try:
        line.request("POST", path, json.dumps(body),
                     dict(head, **{"Content-Type": "application/json"}))
        sock = line.sock
        if leave is not None:
            sock.settimeout(leave)
        answer = line.getresponse()
        if answer.status != 200:
            raise Failed("HTTP %d: %s" % (answer.status, answer.read(300).decode("utf-8",
                                                                                 "replace")))
        for event in answer:
            text = event.strip()
            if text.startswith(b"data:") and not text.endswith(b"[DONE]"):
                said = json.loads(text[5:])
                if "error" in said:
                    raise Failed(json.dumps(said["error"])[:300])
                yield said
                sock.settimeout(ANSWER_S)
            elif text.startswith(b"{"):
                yield json.loads(text)
    except TimeoutError:
        if leave is None:
            raise Failed("no answer within %d s" % ANSWER_S)
        raise Left()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed("%s: %s" % (type(error).__name__, error))
    finally:
        if answer is not None:
            answer.close()
        line.close()


def usage(server, metric):
    """Sum of a metric; None: it is not there."""
    found = [float(line.rsplit(" ", 1)[-1]) for line in
             server.call("GET", "/metrics")[1].decode().splitlines()
             if re.match(re.escape(metric) + r"(\{| )", line)]
    return sum(found) if found else None


# ---- the engines -----------------------------------------------------------------------

class VllmEngine(vllm_pd.Engine):
    @staticmethod
    def connector(args, role, side_port):
        out = vllm_pd.Engine.connector(args, role, side_port)
        config = dict(json.loads(out[1]), kv_connector_extra_config={
            "kv_lease_duration": LEASE_S})
        return [out[0], json.dumps(config), "--num-gpu-blocks-override", "768"] + out[2:]


class Vllm:
    """Prefill answers first, and decode is asked with what it said."""

    def __init__(self, name):
        self.args = vllm_pd.arguments(["--nixl", "native", "--name", name])

    def plain(self):
        return vllm_pd.Engine(self.args, "plain")

    def tokens_of(self, server, prompt):
        return server.complete(prompt, TOKENS)["tokens"]

    def start(self, nodes):
        self.nodes = nodes
        self.D = VllmEngine(self.args, "D", nodes[1])
        self.prefill()
        self.D.wait()
        self.P.wait()

    def prefill(self):
        self.P = VllmEngine(self.args, "P", self.nodes[0])

    def answer(self, prompt, salt, leave, rng):
        """The tokens."""
        head = {"X-Request-Id": uuid.uuid4().hex}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0,
                "ignore_eos": True, "kv_transfer_params": {
                    "do_remote_decode": True, "do_remote_prefill": False}}
        if salt:
            body["cache_salt"] = salt
        delay = rng.uniform(0.0005, 0.06)
        said = list(events(self.P.port, "/v1/completions", body, head,
                           delay if leave == "prefill" else None))
        params = said[0].get("kv_transfer_params") if said else None
        if not params:
            raise Failed("prefill told nothing: %s" % said)
        if leave == "between":
            raise Left()
        body.update(max_tokens=TOKENS, kv_transfer_params=params, stream=True,
                    return_token_ids=True)
        tokens = []
        for said in events(self.D.port, "/v1/completions", body, head,
                           delay if leave == "loading" else None):
            choice = said["choices"][0]
            tokens += choice.get("token_ids") or []
            if choice.get("finish_reason") == "error":
                raise Failed("finish_reason error")
            if leave == "decoding" and tokens:
                raise Left()
        return tokens

    def held(self):
        """Of the engines' memory by requests."""
        return {name: usage(server, "vllm:kv_cache_usage_perc")
                for name, server in (("P", self.P), ("D", self.D))}

    def moved(self):
        """Requests whose bytes came, as decode counts them."""
        return int(usage(self.D, "vllm:kvd_bytes_transferred_count") or 0)


class Sglang:
    """Both are asked at once."""

    def __init__(self, name):
        self.args = Some(nixl="native", name=name)
        self.rooms = itertools.count(random.getrandbits(40))

    def engine(self, name, node, *more):
        return sglang_pd.Engine(self.args, name, node, "--enable-metrics", *more)

    def plain(self):
        return self.engine("plain", Node("nixl", "none"))

    def tokens_of(self, server, prompt):
        return server.generate(sglang_pd.request(prompt, TOKENS))["output_ids"]

    def start(self, nodes):
        self.nodes, self.bootstrap = nodes, free_ports()
        self.prefill()
        self.D = self.engine("decode", nodes[1], "--disaggregation-transfer-backend", "kvd",
                             "--disaggregation-mode", "decode",
                             "--disaggregation-decode-retraction-backup", "none")
        self.D.wait()
        self.P.wait()

    def prefill(self):
        self.P = self.engine("prefill", self.nodes[0], "--disaggregation-transfer-backend",
                             "kvd", "--disaggregation-mode", "prefill",
                             "--disaggregation-bootstrap-port", str(self.bootstrap))

    def answer(self, prompt, salt, leave, rng):
        body = sglang_pd.request(prompt, TOKENS, bootstrap_host=HOST, stream=True,
                                 bootstrap_port=self.bootstrap, bootstrap_room=next(self.rooms))
        if salt:
            body["extra_key"] = salt
        delay, words = rng.uniform(0.0005, 0.06), []
        other = threading.Thread(target=self._leg, daemon=True, args=(
            body, delay if leave in ("prefill", "between") else None, words))
        other.start()
        try:
            tokens = self._decode(body, delay if leave in ("loading", "prefill") else None,
                                  leave)
        except (Left, Failed) as why:
            other.join(ANSWER_S)
            raise Left() if leave in ("prefill", "between") and "Left" in words else why
        other.join(ANSWER_S)
        if other.is_alive():
            raise Failed("prefill does not answer")
        return tokens

    def _leg(self, body, delay, words):
        try:
            for _ in events(self.P.port, "/generate", body, leave=delay):
                pass
        except (Left, Failed) as why:
            words.append(type(why).__name__)

    def _decode(self, body, delay, leave):
        tokens = []
        for said in events(self.D.port, "/generate", body, leave=delay):
            end = said.get("meta_info", {}).get("finish_reason") or {}
            if end.get("type") == "abort":
                raise Failed(str(end.get("message") or "aborted")[:300])
            tokens = said["output_ids"]  # all so far
            if leave == "decoding" and tokens:
                raise Left()
        return tokens

    def held(self):
        """A cache is flushed when no request holds any of it."""
        return {name: server.call("POST", "/flush_cache")[0] != 200
                for name, server in (("P", self.P), ("D", self.D))}

    def moved(self):
        return None


# ---- the run ---------------------------------------------------------------------------

def prompts(engine):
    rng = random.Random(engine)
    return [[rng.randrange(3, 512) for _ in range(rng.randrange(2, 160))]
            for _ in range(PROMPTS)]


def reference(pair, engine, asked, tally):
    """Tokens of a plain engine; kept by what they depend on."""
    model = os.path.join(FOLDER, engine, {"vllm": "llama", "sglang": "bytes"}[engine],
                         "model.safetensors")
    with open(model, "rb") as f:
        mark = hashlib.sha256(f.read() + json.dumps([asked, TOKENS]).encode()).hexdigest()
    kept = os.path.join(FOLDER, "results", "soak-%s-%s.json" % (engine, mark[:16]))
    if os.path.exists(kept):
        with open(kept) as f:
            return json.load(f)
    plain = pair.plain()
    try:
        plain.wait()
        out = [pair.tokens_of(plain, prompt) for prompt in asked]
    finally:
        plain.stop()
    assert all(len(tokens) == TOKENS for tokens in out), "the plain engine"
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    with open(kept, "w") as f:
        json.dump(out, f)
    return out


def sizes(pids):
    """{resident bytes of a kind, file descriptors}, over processes."""
    out = collections.Counter()
    for pid in pids:
        with open("/proc/%d/status" % pid) as f:
            for word, kb in re.findall(r"^(VmRSS|RssAnon|RssShmem):\s+(\d+) kB", f.read(), re.M):
                out[word] += int(kb) << 10
        out["fds"] += len(os.listdir("/proc/%d/fd" % pid))
    return out


def family(pid):
    """A process and its children."""
    with open("/proc/%d/task/%d/children" % (pid, pid)) as f:
        return [pid] + [p for child in f.read().split() for p in family(int(child))]


class Soak:
    def __init__(self, args, pair, nodes, wanted, asked, tally):
        self.args, self.pair, self.nodes, self.tally = args, pair, nodes, tally
        self.wanted, self.asked = wanted, asked
        self.lock, self.up = threading.Lock(), threading.Event()
        self.next = self.ended = self.salted = 0
        self.ends, self.errors, self.strange = collections.Counter(), [], []
        self.leases = []  # when clients left that had an offer
        self.down = []  # [begin, end of grace] of kills
        self.hold_at = max(args.requests // 10, 20)
        self.step = max(args.requests // 20, 50) if args.requests < 20000 else 1000

    # ---- clients ----

    def client(self):
        while True:
            self.up.wait()
            with self.lock:
                number = self.next
                if number >= self.limit:
                    return
                self.next += 1
            end, words = self.one(number)
            with self.lock:
                self.ended += 1
                self.ends[end] += 1
                if end == "left between":
                    self.leases.append(time.monotonic())
                if end == "failed":
                    self.errors.append((time.monotonic(), words))
                if end in ("wrong", "short"):
                    self.strange.append("request %d: %s" % (number, words))
                if self.ended % self.step == 0:
                    self.tell()

    def one(self, number):
        rng = random.Random("%d.%d" % (self.args.seed, number))
        which = rng.randrange(PROMPTS)
        leave = rng.choice(LEAVES) if rng.random() < self.args.leave else None
        salt = uuid.uuid4().hex if rng.random() < 0.8 else None
        try:
            tokens = list(self.pair.answer(self.asked[which], salt, leave, rng))
        except Left:
            return "left " + leave, None
        except Failed as why:
            return "failed", str(why)
        if self.args.control == "wrong" and number == self.args.requests // 2:
            tokens[-1] += 1
        if tokens != self.wanted[which]:
            kind = "short" if tokens == self.wanted[which][:len(tokens)] else "wrong"
            return kind, "prompt %d: %s, wanted %s" % (which, tokens, self.wanted[which])
        if salt:
            with self.lock:
                self.salted += 1
        return "right", None

    def tell(self):
        now, rss = time.monotonic(), [s["VmRSS"] >> 20 for s in self.sizes().values()]
        print("%6d  %5.1f a second  %s  resident MiB: daemons %d %d, decode %d" % (
            self.ended, self.step / (now - self.told), dict(sorted(self.ends.items())), *rss),
            flush=True)
        self.told = now

    def play(self, limit):
        """Requests up to this number, and the kills that are due meanwhile."""
        self.limit = limit
        clients = [threading.Thread(target=self.client, daemon=True)
                   for _ in range(self.args.clients)]
        for thread in clients:
            thread.start()
        while any(thread.is_alive() for thread in clients):
            if self.kills and self.ended >= self.kills[0]:
                self.kills.pop(0)
                self.kill()
            pause(0.05)

    def kill(self):
        """Clients that find no prefill wait for it, as with a proxy that asks for health."""
        begin = time.monotonic()
        self.down.append([begin, float("inf")])
        self.up.clear()
        self.pair.P.kill()
        self.pair.prefill()
        self.pair.P.wait()
        self.down[-1][1] = time.monotonic() + GRACE_S
        print("        prefill killed after %d requests, back after %.0f s" % (
            self.ended, time.monotonic() - begin), flush=True)
        self.up.set()

    # ---- what is left ----

    def stats(self, node):
        """All metrics of a daemon by name."""
        session = Session(node.daemon, "soak")
        try:
            return {m["name"]: m["value"] for m in session.cmd("stats")["metrics"]
                    if "value" in m}
        finally:
            session.close()

    def sizes(self):
        out = {"daemon " + name: sizes(family(node.daemon.proc.pid))
               for name, node in zip("PD", self.nodes)}
        return dict(out, decode=sizes(self.pair.D.pids()))

    def quiet(self):
        """Whether no room is open, and no block is held."""
        self.open = [self.stats(node)["rooms"] for node in self.nodes]
        self.held = self.pair.held()
        return not any(self.open) and not any(self.held.values())

    def settle(self):
        until(self.quiet, 2 * LEASE_S if self.args.control else LEFT_S, 1)
        return self.sizes()

    def harm(self):
        if self.args.control == "lost":
            self.session = Session(self.nodes[1].daemon, "lost")
            self.session.cmd("room.open", room="77", role="send",
                             pool=Cache(self.session).pool)
        elif self.args.control == "grow":
            self.session = [Cache(Session(self.nodes[1].daemon, "grow%d" % i))
                            for i in range(12)]

    # ---- the whole ----

    def run(self):
        args = self.args
        begin = self.told = time.monotonic()
        self.kills = [args.requests * (i + 1) // (KILLS + 1) for i in range(args.kills)]
        self.up.set()
        self.play(self.hold_at)
        before = self.settle()
        before_stats = self.stats_all()
        self.harm()
        self.told = time.monotonic()
        self.play(args.requests)
        took = time.monotonic() - begin
        after = self.settle()
        self.tally.note("requests", "%d in %.0f s, %.1f a second" % (
            args.requests, took, args.requests / took))
        self.judge(before, after, before_stats)

    def stats_all(self):
        return [self.stats(node) for node in self.nodes]

    def judge(self, before, after, before_stats):
        tally, ends, stats = self.tally, self.ends, self.stats_all()
        tally.note("ends", dict(sorted(ends.items())))
        tally.check("every request has ended", equal, sum(ends.values()), self.args.requests,
                    "ends")
        tally.add("every answer has the plain engine's tokens", not self.strange,
                  "; ".join(self.strange[:3]))
        stray = [w for at, w in self.errors
                 if not any(b <= at <= e for b, e in self.down)]
        tally.add("no request failed but around a kill", not stray, "; ".join(stray[:3]))
        most = self.args.clients * 8 * len(self.down)
        tally.add("requests that failed are few, and say why", len(self.errors) <= most and
                  all(w.strip() for _, w in self.errors), "%d of at most %d%s" % (
                      len(self.errors), most, ", " + self.errors[0][1][:90]
                      if self.errors else ""))
        tally.add("no room is open", self.open == [0, 0], self.open)
        tally.add("as many rooms ended as were opened", all(
            s["rooms_opened_total"] == s["rooms_ended_total"] > 0 for s in stats),
            ", ".join("%d of %d" % (s["rooms_ended_total"], s["rooms_opened_total"])
                      for s in stats))
        tally.add("no block is held", self.held and not any(self.held.values()), self.held)
        moved = self.pair.moved()
        if moved is not None:
            more = sum(ends["left " + w] for w in ("loading", "decoding")) + len(self.errors)
            tally.add("each request moved its bytes once", self.salted <= moved <=
                      ends["right"] + more, "%d of at least %d" % (moved, self.salted))
            expired = stats[0]["leases_expired_total"]
            least = sum(not any(at <= killed <= at + LEASE_S + 1 for killed, _ in self.down)
                        for at in self.leases)
            most = len(self.leases) + ends["left prefill"] + len(self.errors)
            tally.add("the leases of offers that nobody fetched have ended",
                      least <= expired <= most, "%d, of %d to %d" % (expired, least, most))
        self.compare(before, after)

    def compare(self, before, after):
        tally = self.tally
        for name, bound in (("daemon P", DAEMON_MIB), ("daemon D", DAEMON_MIB),
                            ("decode", ENGINE_MIB)):
            grown = {w: (after[name][w] - before[name][w]) / (1 << 20)
                     for w in ("VmRSS", "RssAnon", "RssShmem")}
            tally.add("memory of %s is as before, within %d MiB" % (name, bound),
                      grown["VmRSS"] <= bound, "resident %d MiB, %s" % (
                          after[name]["VmRSS"] >> 20,
                          ", ".join("%s %+.1f" % one for one in grown.items())))
        fds = {name: (before[name]["fds"], after[name]["fds"]) for name in after}
        tally.add("file descriptors of the daemons and of decode are as before", all(
            b - FDS <= a <= b + FDS for b, a in fds.values()), fds)


def judge_control(control, tally):
    """What the harm must break is broken, and nothing else."""
    missed = [name for name in HARMS[control] if tally.ok.get(name)]
    more = [name for name, fine in tally.ok.items() if not fine and name not in HARMS[control]]
    noticed = not missed and not more
    print("%s    control %s: %s" % ("ok  " if noticed else "FAIL", control, "noticed" if noticed
                                    else "not noticed: %s; also failed: %s" % (missed, more)))
    tally.passed, tally.failed = int(noticed), int(not noticed)


class Checks(Tally):
    def __init__(self):
        super().__init__()
        self.ok = {}

    def add(self, name, ok, note=""):
        self.ok[name] = bool(ok)
        super().add(name, ok, note)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--leave", type=float, default=0.12, help="share of clients that leave")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=sorted(HARMS))
    parser.add_argument("--name")
    args = parser.parse_args()
    args.name = args.name or "soak-" + args.engine
    tally = Checks()
    pair = {"vllm": Vllm, "sglang": Sglang}[args.engine](args.name)
    try:
        asked = prompts(args.engine)
        wanted = reference(pair, args.engine, asked, tally)
        with Node("native", "p") as p, Node("native", "d") as d:
            try:
                pair.start((p, d))
                tally.add("engines are up", True)
                Soak(args, pair, (p, d), wanted, asked, tally).run()
            finally:
                for server in (getattr(pair, n, None) for n in "PD"):
                    if server:
                        server.stop()
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    if args.control:
        judge_control(args.control, tally)
    code = tally.close(args.name)
    sys.stdout.flush()
    os._exit(code)  # requests that hang have threads


if __name__ == "__main__":
    main()
