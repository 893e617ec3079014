#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How requests end on vLLM's KvdConnector: two real engines, prefill P and decode D, whose
clients leave, whose daemons stand still or die, whose parameters are wrong, whose caches are
full. What lies inside an engine is seen by vllm_look.py.

vllm_ends.py [--nixl native] [--name NAME] [WORD ...]   (only the checks with a word)
Last line: N passed, N failed."""
import argparse
import concurrent.futures
import contextlib
import copy
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from types import SimpleNamespace as Some

import vllm_pd
from rig import HERE, HOST, Node, Tally, equal, free_ports, pause, until
from vllm_pd import BLOCK, BLOCK_BYTES, TOKENS

sys.path.insert(0, os.path.join(HERE, "..", "lib"))
from kvd_daemon import BUILD, Daemon  # noqa: E402

LEASE_S, BLOCKS, ABORTS = 4, 100, 500
KNOWN_S, FREE_S, FROZEN_S = 0.1, 0.1, 2.0
FAILED, WAITING, MOVING = 0, 2, 3
LONG, WINDOW = "kill0", 96
vllm_pd.ANSWER_S = ANSWER_S = 45


class Engine(vllm_pd.Engine):
    """With a small cache, prefill in chunks, and a window to look through."""

    def __init__(self, args, name, node=None, policy="fail", env=(), window=False):
        """window: each layer has one, behind a MultiConnector."""
        self.policy, self.own_env, self.window = policy, dict(env), window
        super().__init__(args, name, node)

    def environment(self, *given):
        env = super().environment(*given)
        env.update(self.own_env, VLLM_SERVER_DEV_MODE="1",
                   PYTHONPATH=env["PYTHONPATH"] + os.pathsep + HERE)
        return env

    def connector(self, args, role, *_):
        config = {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.vllm",
                  "kv_role": role, "kv_load_failure_policy": self.policy,
                  "kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
        more = []
        if self.window:
            config = {"kv_connector": "MultiConnector", "kv_role": role,
                      "kv_load_failure_policy": self.policy,
                      "kv_connector_extra_config": {"connectors": [config]}}
            more = ["--hf-overrides", json.dumps({
                "layer_types": ["sliding_attention"] * 4, "sliding_window": WINDOW})]
        return ["--kv-transfer-config", json.dumps(config), "--num-gpu-blocks-override",
                str(BLOCKS), "--max-num-batched-tokens", "256", "--enable-prefix-caching",
                "--worker-extension-cls", "vllm_look.Look"] + more

    def forget(self):
        """Its prefix cache."""
        assert until(lambda: self.call("POST", "/reset_prefix_cache")[0] == 200, 5)

    def usage(self):
        return self.counters()["usage"]

    def alive(self):
        return self.proc.poll() is None and self.answers()

    def body(self, prompt, n, params, stream=True):
        return {"model": "tiny", "prompt": prompt, "max_tokens": n, "temperature": 0,
                "ignore_eos": True, "stream": stream, "return_token_ids": True,
                "kv_transfer_params": params}


REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}


class Asked:
    """A request whose client may leave."""

    def __init__(self, engine, prompt, n, params, stream=True):
        params = dict(params or {})
        head = {"Content-Type": "application/json"}
        if "request_id" in params:
            head["X-Request-Id"] = params.pop("request_id")
        self.line = http.client.HTTPConnection(HOST, engine.port, timeout=ANSWER_S)
        self.line.request("POST", "/v1/completions",
                          json.dumps(engine.body(prompt, n, params or None, stream)), head)
        self.begin = time.monotonic()

    def leave(self):
        with contextlib.suppress(OSError, AttributeError):  # it has been answered
            self.line.sock.shutdown(socket.SHUT_RDWR)
        self.line.close()
        return time.monotonic()

    def answer(self):
        out = {"tokens": [], "error": None, "first": None}
        try:
            vllm_pd.Engine._stream(self.line.getresponse(), out, self.begin)
        except (OSError, http.client.HTTPException, ValueError) as error:
            out["error"] = "%s: %s" % (type(error).__name__, error)
        finally:
            self.line.close()
        out["took"] = time.monotonic() - self.begin
        return out


def ctl(node, *words):
    """kvd-ctl's answer; None: it failed."""
    done = subprocess.run([BUILD + "/kvd-ctl", "-s", node.daemon.socket_path, "-j", *words],
                          capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 else None


def rooms(node):
    return ctl(node, "rooms")["rooms"]


class TcpNode(Node):
    """Bytes go by tcp, so a daemon that is frozen holds up a read of its peer's."""

    def __init__(self, name):
        self.nixl = "native"
        self.daemon = Daemon("log_level = info\n[peer]\ndead_after = 5 s\n"
                             "[transport]\ntransports = tcp\n", name=name)


class Ends:
    def __init__(self, args, tally, nodes):
        self.args, self.tally, self.nodes = args, tally, nodes
        self.p, self.d = nodes
        self.reference = vllm_pd.Run(Some(**dict(vars(args), kind="llama")), tally)
        self.prompts, self.wanted = self.reference.prompts, self.reference.wanted

    # ---- engines ----

    def start(self, policy, tp=1, env=(), window=False):
        args = Some(**dict(vars(self.args), tp_d=tp))
        if not hasattr(self, "P"):
            self.P = Engine(args, "P", self.p, window=window)
        self.D = Engine(args, "D", self.d, policy, env, window)
        for engine in (self.P, self.D):
            engine.wait()
        for engine in (self.P, self.D):
            engine.look("watch")
        self.tally.add("engines are up, %s, decode TP %d" % (policy, tp), True,
                       "P %.0f s, D %.0f s" % (self.P.took, self.D.took))
        if window:
            self.wanted = {name: self.D.complete(self.prompts[name])["tokens"]
                           for name in ("len5", "again", "kill1", LONG)}
        self.through("len5")

    def stop(self):
        for engine in (getattr(self, "P", None), getattr(self, "D", None)):
            if engine is not None:
                engine.stop()

    # ---- requests ----

    def prefill(self, name):
        return self.P.prefill(self.prompts[name])

    def through(self, name, n=TOKENS):
        """As a proxy; right, or it raises."""
        got = self.D.complete(self.prompts[name], n, self.prefill(name))
        equal(got["tokens"], self.wanted[name][:n], got["error"] or "tokens of " + name)
        return got

    def next_request_works(self, tries=1):
        for left in reversed(range(tries)):
            self.D.forget()
            try:
                return self.through("again")
            except (AssertionError, RuntimeError):
                if not left:
                    raise
                pause(0.5)

    def right_or_error(self, name, got, allowed=("right", "error")):
        right = got["tokens"] == self.wanted[name][:len(got["tokens"])] and not got["error"] \
            and len(got["tokens"]) in (8, TOKENS)
        if not right and (got["tokens"] or not got["error"]):
            raise AssertionError("%s: neither right nor an error: %s" % (name, got))
        came = "right" if right else "error"
        assert came in allowed, "%s: %s, %s" % (name, came, got)
        return came

    def quiet(self, seconds=20):
        """Nothing is left of anything."""
        def left():
            both = [one for engine in (self.P, self.D) for one in engine.look("left")]
            return {"usage": [self.P.usage(), self.D.usage()],
                    "handles": sum(sum(one.values()) for one in both),
                    "rooms": [r["room"] for node in self.nodes for r in rooms(node)]}
        nothing = {"usage": [0, 0], "handles": 0, "rooms": []}
        until(lambda: left() == nothing, seconds)
        equal(left(), nothing, "left over")
        assert self.P.alive() and self.D.alive()

    def events(self, engine, what, seconds=10, n=1):
        """The first so many of a kind, of each rank."""
        found = []

        def more():
            for seen in engine.look("events"):
                found.extend(e for e in seen if e["what"] in what)
            return len(found) >= n
        until(more, seconds, 0.01)
        assert len(found) >= n, "%s of %s: %s" % (what, engine.name, found)
        return found

    def clear(self):
        for engine in (self.P, self.D):
            engine.look("events")
            engine.look("canary")

    def held(self, name=LONG, n=TOKENS):
        """A request that D has blocks for, and whose daemon does not know them yet."""
        self.D.forget()
        params = self.prefill(name)
        self.clear()
        self.D.look("hold")
        asked = Asked(self.D, self.prompts[name], n, params)
        assert until(lambda: all(h[0] for h in self.D.look("hold")), 10), "no blocks"
        assert until(lambda: all(rank and all(s[1] == WAITING for s in rank)
                                 for rank in self.D.look("states")), 10), self.D.look("states")
        return asked, params

    def reading(self, name=LONG):
        """A request of which bytes are asked for and do not come: prefill's daemon is
        frozen."""
        asked, params = self.held(name)
        self.p.daemon.freeze()
        self.D.look("let_go")
        assert until(lambda: any(s[1] == MOVING for s in self.D.look("states")[0]), 5), \
            self.D.look("states")
        return asked, params

    # ---- 1: one side gives up ----

    def prefill_gives_up(self, where, alone=True):
        asked, params = (self.held if where == "offered" else self.reading)()
        if where == "reading":
            self.d.daemon.freeze()
            self.p.daemon.thaw()
        assert ctl(self.p, "abort", params["kvd"]["room"], "--role", "offer", "--reason",
                   "prefill has had enough") is not None
        begin = time.monotonic()
        if where == "reading":
            self.d.daemon.thaw()
        else:
            self.D.look("let_go")
        got = asked.answer()
        came = self.right_or_error(LONG, got, self.allowed if where == "offered" else
                                   ("error", "right"))
        seen = self.events(self.D, ("failed", "received"))[0]
        assert seen["s"] - begin < 1, "after %.2f s" % (seen["s"] - begin)
        note = came
        if where == "offered" or seen["what"] == "failed":
            # two ranks take the daemon's core, and a scheduler waits 50 ms for its words
            words = "EABORTED" if hasattr(self, "others") else "prefill has had enough"
            assert words in seen["why"], seen
            note = seen["why"]
        if alone:
            self.quiet()
        return "%s; after %.0f ms" % (note, 1e3 * (seen["s"] - begin))

    def offered_before_the_pass(self):
        """What has finished waits for no pass of those that are computed beside it."""
        self.P.look("events")
        params = self.prefill(LONG)
        offered = self.events(self.P, ("offered",))[0]
        equal(offered["room"], params["kvd"]["room"], "room")
        self.right_or_error(LONG, self.D.complete(self.prompts[LONG], TOKENS, params), ("right",))

    def decode_gives_up(self, where):
        """The client leaves; P's blocks are free at once, and nothing comes into D's."""
        times, reads = [], 0
        for i in range(30):
            asked, params = self.held()
            if where == "reading":
                self.D.look("let_go")
                pause(i % 6 * 0.001)
            asked.leave()
            gone = self.events(self.D, ("failed", "received"))[0]
            sent = self.events(self.P, ("sent",))[0]
            times.append(sent["s"] - gone["s"])
            reads += gone["end"] == FAILED
            self.D.look("let_go")
            bad, of = self.D.look("canary")[0]
            equal(bad, 0, "blocks written after they were free, of %d" % of)
        times.sort()
        self.tally.note("P's blocks free after D's end (%s)" % where,
                        "%.1f ms median, %.1f ms worst of %d" % (
                            1e3 * statistics.median(times), 1e3 * times[-1], len(times)))
        assert times[-1] < FREE_S, "%.0f ms" % (1e3 * times[-1])
        self.quiet()
        return "%d of %d before all bytes were there" % (reads, len(times))

    def canary(self, fault):
        """The client leaves while bytes are on their way."""
        self.D.look("break", fault)
        asked, _ = self.reading()
        try:
            self.d.daemon.freeze()  # it cannot say that nothing moves any more
            self.p.daemon.thaw()
            asked.leave()
            early = self.freed_within(1)
            self.d.daemon.thaw()
            if not early:
                self.events(self.D, ("failed", "received"))
            pause(0.5)
            bad, of = self.D.look("canary")[0]
        finally:
            for node in self.nodes:
                node.daemon.thaw()
            self.D.look("break", "")
        if fault:
            self.next_request_works()  # the rooms that were forgotten are closed in a step
        self.quiet()
        return early, bad, of

    def freed_within(self, seconds):
        return bool(until(lambda: self.D.look("canary_peek")[0][1], seconds))

    def canary_holds(self):
        early, bad, of = self.canary("")
        assert not early, "freed while its daemon could not know"
        equal(bad, 0, "blocks written after they were free, of %d" % of)
        assert of, "no block was given back"
        return "%d blocks" % of

    def canary_sees(self, fault):
        """The check above, on a connector that reports too early, and does not even tell the
        daemon."""
        early, bad, of = self.canary(fault)
        assert early, "nothing was freed early"
        assert bad or fault == "early", "no block was written"
        return "freed early; %d of %d blocks written after" % (bad, of)

    # ---- 2: leases ----

    def late(self, allowed):
        self.D.forget()
        params = self.prefill(LONG)
        assert until(lambda: not rooms(self.p), LEASE_S + 5), "the lease does not end"
        pause(1)
        before = self.D.counters()
        got = self.D.complete(self.prompts[LONG], TOKENS, params)
        came = self.right_or_error(LONG, got, allowed)
        equal(self.D.counters()["bytes"], before["bytes"], "bytes that moved")
        return "%s after %.2f s" % (came, got["took"])

    def queued(self):
        """D's cache is full of others for three leases."""
        self.D.forget()
        params = self.prefill(LONG)
        hogs = [Asked(self.D, self.prompts["kill1"][7 * i:] + self.prompts["kill1"][:7 * i], 500,
                      None) for i in range(16)]
        assert until(lambda: self.D.usage() > 0.9, 30), "D's cache is not full"
        begin = time.monotonic()
        asked = Asked(self.D, self.prompts[LONG], TOKENS, params)
        try:
            until(lambda: time.monotonic() - begin > 3 * LEASE_S, 4 * LEASE_S)
            waits = self.D.look("left")[0]["pulls"]
        finally:
            for hog in hogs:
                hog.leave()
        got = asked.answer()
        equal(waits, 1, "requests that wait for blocks after 3 leases")
        self.right_or_error(LONG, got, ("right",))
        self.quiet()
        return "after %.1f s, a lease of %d" % (got["took"], LEASE_S)

    # ---- 11: daemons ----

    def frozen(self, who):
        """For 2 s, with a request in each state."""
        node = self.nodes[who]
        asked, _ = self.held("at_once0")
        offered = self.prefill("at_once1")
        node.daemon.freeze()
        begin = time.monotonic()
        try:
            self.D.look("let_go")  # it is asked for while one of both is frozen
            fresh = Asked(self.D, self.prompts["at_once1"], TOKENS, offered)
            more = self.prefill("at_once2")
            again = Asked(self.D, self.prompts["at_once2"], TOKENS, more)
            local = self.D.complete(self.prompts["alive"])
            equal(local["tokens"], self.wanted["alive"], "tokens meanwhile")
            until(lambda: time.monotonic() - begin > FROZEN_S, FROZEN_S)
            assert self.P.alive() and self.D.alive()
        finally:
            node.daemon.thaw()
        for name, one in (("at_once0", asked), ("at_once1", fresh), ("at_once2", again)):
            self.right_or_error(name, one.answer(), ("right",))
        self.quiet()

    def frozen_sees(self):
        """The check above, on a connector that gives up after a second."""
        self.D.look("break", "impatient")
        try:
            self.frozen(1)
        except (AssertionError, RuntimeError, OSError) as error:
            seen = str(error)
        else:
            raise AssertionError("it is not noticed")
        finally:
            self.D.look("break", "")
        self.next_request_works(20)
        self.quiet()
        return "seen: " + seen[:120]

    def killed(self, who):
        """Its rooms fail, and the next request works."""
        node = self.nodes[who]
        for other in self.nodes:
            for words in ("peer", "room", "session", "engine"):
                other.daemon.expect(words)
        asked, _ = self.held()
        offered = self.prefill("at_once1")
        node.daemon.proc.kill()
        node.daemon.wait()
        self.D.look("let_go")
        one = self.right_or_error(LONG, asked.answer(), self.allowed)
        node.daemon.start().wait_ready()
        two = self.right_or_error("at_once1", self.D.complete(
            self.prompts["at_once1"], TOKENS, offered), self.allowed + ("right",))
        begin = time.monotonic()
        self.next_request_works(20)
        took = time.monotonic() - begin
        self.quiet()
        return "%s, %s; works again after %.1f s" % (one, two, took)

    # ---- 12 ----

    def aborts(self):
        """Clients leave at random moments, on P and on D, whose peer is slow by turns."""
        rng, stop = random.Random(5), threading.Event()
        names = ["at_once%d" % i for i in range(8)] + ["len777", "len1024"]

        def slow():
            while not stop.is_set():
                daemon = rng.choice(self.nodes).daemon
                daemon.freeze()
                stop.wait(rng.random() * 0.15)
                daemon.thaw()
                stop.wait(rng.random() * 0.3)
        counts = {"P": 0, "D": 0, "served": 0, "refused": 0}
        lock = threading.Lock()

        def one(i):
            mine = random.Random(i)
            name = mine.choice(names)
            if i % 4 == 0:
                asked = Asked(self.P, self.prompts[name], 1, REMOTE, False)
                pause(mine.random() * 0.15)
                asked.leave()
                return "P"
            params = self.prefill(name)
            asked = Asked(self.D, self.prompts[name], TOKENS, params)
            if i % 16 == 1:
                got = asked.answer()
                return "served" if self.right_or_error(name, got) == "right" else "refused"
            pause(mine.random() ** 2 * 0.2)
            asked.leave()
            return "D"

        def counted(i):
            came = one(i)
            with lock:
                counts[came] += 1
        thread = threading.Thread(target=slow)
        thread.start()
        try:
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                list(pool.map(counted, range(ABORTS)))
        finally:
            stop.set()
            thread.join()
        self.quiet(30)
        self.next_request_works()
        return str(counts)

    def known(self):
        """How long after one side gave it up the other side's room ended: each daemon's own
        record, by one clock."""
        times = []
        for i in range(40):
            name = "at_once%d" % (i % 8)
            asked, params = self.held(name)
            room = params["kvd"]["room"]
            self.clear()
            if i % 2:
                asked.leave()
            else:
                ctl(self.p, "abort", room, "--role", "offer", "--reason", "enough")
                self.D.look("let_go")
            self.events(self.D, ("failed", "received"))
            self.events(self.P, ("sent",))
            self.D.look("let_go")
            if not i % 2:
                asked.answer()
            ends = []
            for node in self.nodes:
                told = ctl(node, "call", "room.trace", json.dumps({"room": room, "all": True}))
                one = max(told["rooms"], key=lambda r: r["opened_ns"])
                ends.append((int(one["opened_ns"]) + max(int(e["ns"]) for e in one["events"]
                                                    if e["what"] in ENDS)) / 1e9)
            times.append(abs(ends[0] - ends[1]))
        times.sort()
        self.tally.note("aborts known to the other daemon after",
                        "%.1f ms median, %.1f ms p99, %.1f ms worst of %d" % (
                            1e3 * statistics.median(times),
                            1e3 * times[len(times) * 99 // 100], 1e3 * times[-1], len(times)))
        assert times[-1] < KNOWN_S
        self.quiet()

    # ---- what a proxy may get wrong ----

    def garbage(self):
        good = self.prefill("at_once3")
        base = {k: v for k, v in good.items() if k != "request_id"}
        wrong = [("kvd", v) for v in (None, 5, "x", [], {})]
        wrong += [("room", v) for v in (None, 7, "", "-1", "x", "9" * 19, str(2 ** 63), [], {})]
        wrong += [("ticket", v) for v in (None, "", 5, "x" * 300, "a b", "ä")]
        wrong += [("tokens", v) for v in (None, 0, -1, "5", 1e9, True, 2 ** 41)]
        wrong += [("tp", v) for v in (None, 0, 3, "1", -1, 10 ** 9)]
        wrong += [("pp", v) for v in (None, 0, 2, 10 ** 6)]
        source = base["kvd"]["sources"][0]
        wrong += [("sources", v) for v in (
            None, [], {}, "x", [[]], [None], [source + [1]], [[1, 2, 3]],
            [["", source[1], 0]], [["not an endpoint", source[1], 0]],
            [["tcp://", source[1], 0]], [["tcp://127.0.0.1:99999", source[1], 0]],
            [["x" * 200, source[1], 0]], [[source[0], "p" * 200, 0]],
            [[source[0], source[1], 10 ** 12]], [[source[0], "m\x00", 0]])]
        wrong += [("layers", v) for v in (None, [], {}, {"kv": None}, {"kv": [99]}, {"x": [0]},
                                          {"kv": ["0"]})]
        wrong += [("do_remote_prefill", v) for v in ("x", [], 0, 1e300)]
        seen = {"right": 0, "error": 0}
        for field, value in wrong:
            params = copy.deepcopy(base)
            if field in ("kvd", "do_remote_prefill"):
                params[field] = value
            else:
                params["kvd"][field] = value
            if field == "do_remote_prefill" and value:
                params["kvd"] = None
            self.D.forget()
            got = self.D.complete(self.prompts["at_once3"], 8, dict(params, request_id="g"))
            seen[self.right_or_error("at_once3", got)] += 1
            assert got["took"] < 5, "%s %r: after %.1f s" % (field, value, got["took"])
        assert self.D.alive()
        self.right_or_error("at_once3", self.D.complete(
            self.prompts["at_once3"], TOKENS, dict(self.prefill("at_once3"))), ("right",))
        self.quiet(LEASE_S + 10)
        return "%d kinds: %s" % (len(wrong), seen)

    def garbage_on_prefill(self):
        for value in (None, 1, "x", [], {"do_remote_decode": [1]}, {"do_remote_decode": "no"},
                      {"do_remote_decode": True, "kvd": 5},
                      {"do_remote_decode": True, "do_remote_prefill": True},
                      {"do_remote_decode": True, "do_remote_prefill": True, "kvd": {}}):
            status, _ = self.P.call("POST", "/v1/completions", self.P.body(
                self.prompts["len33"], 1, value, False), ANSWER_S)
            assert status == 200 or 400 <= status < 500, (value, status)
        assert self.P.alive()
        self.quiet(LEASE_S + 10)

    def nobody(self, what):
        """A room that nobody offers, a ticket that is wrong, a daemon that is not there."""
        self.D.forget()
        params = self.prefill("at_once3")
        if what == "room":
            params["kvd"]["room"] = str(int(params["kvd"]["room"]) ^ 1)
        elif what == "ticket":
            params["kvd"]["ticket"] = params["kvd"]["ticket"][::-1]
        elif what == "pool":
            params["kvd"]["sources"][0][1] += "x"
        else:
            params["kvd"]["sources"][0][0] = "tcp://%s:%d" % (HOST, free_ports())
        self.d.daemon.expect("peer")
        self.clear()
        got = self.D.complete(self.prompts["at_once3"], TOKENS, params)
        came = self.right_or_error("at_once3", got, self.allowed)
        why = self.events(self.D, ("failed",))[-1]["why"]
        assert got["took"] < 12, "after %.1f s" % got["took"]
        self.quiet(LEASE_S + 10)
        return "%s after %.1f s: %s" % (came, got["took"], why)

    def other_length(self, p_has, d_has):
        """vllm#50558: D's prompt is longer than P's, or shorter."""
        self.D.forget()
        before = self.D.counters()["xfers"]
        got = self.D.complete(self.prompts[d_has], TOKENS, self.prefill(p_has))
        self.right_or_error(d_has, got, ("right",))
        assert until(lambda: self.D.counters()["xfers"] == before + 1, 10), "nothing moved"
        self.quiet()

    def twice(self, order):
        """Two decode requests for one prefill: at once, or one after the other."""
        self.D.forget()
        params = self.prefill("at_once4")
        if order == "at once":
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                both = list(pool.map(lambda i: self.D.complete(
                    self.prompts["at_once4"], TOKENS, dict(params, request_id="twice%d" % i)),
                    range(2)))
        else:
            both = []
            for i in range(2):
                both.append(self.D.complete(self.prompts["at_once4"], TOKENS, params))
                self.D.forget()
        came = sorted(self.right_or_error("at_once4", got) for got in both)
        assert "right" in came, both
        assert max(got["took"] for got in both) < 12, [got["took"] for got in both]
        self.quiet()
        return "%s; %.1f s" % (came, max(got["took"] for got in both))

    def samples(self):
        """Two of vLLM's requests in one of a client's."""
        self.D.forget()
        params = self.prefill("at_once5")
        del params["request_id"]
        body = self.D.body([self.prompts["at_once5"]] * 2, 8, params, False)
        begin = time.monotonic()
        status, said = self.D.call("POST", "/v1/completions", body, ANSWER_S)
        took = time.monotonic() - begin
        equal(status, 200, said[:300])
        got = [c["token_ids"] for c in json.loads(said)["choices"]]
        equal(got, [self.wanted["at_once5"][:8]] * 2, "tokens of both")
        assert took < 5, "%.1f s" % took
        self.quiet()

    def hits(self):
        """D has so many blocks of it already."""
        name = "len257"
        prompt = self.prompts[name]
        for blocks in range(9):
            self.D.forget()
            if blocks:
                self.D.complete(prompt[:blocks * BLOCK], 1)
            before = self.D.counters()
            self.through(name)
            wanted = (9 - blocks) * BLOCK_BYTES
            until(lambda: self.D.counters()["xfers"] > before["xfers"], 10)
            equal(self.D.counters()["bytes"] - before["bytes"], wanted,
                  "bytes behind %d blocks" % blocks)
        self.quiet()

    def full_hit(self):
        """Nothing is missing: P's blocks are free at once."""
        self.D.forget()
        self.D.complete(self.prompts["len64"], 8)
        params = self.prefill("len64")
        self.clear()
        before = self.D.counters()["bytes"]
        got = self.D.complete(self.prompts["len64"] + self.wanted["len64"][:8], 8, params)
        equal(got["tokens"], self.wanted["len64"][8:16], got["error"] or "tokens")
        self.events(self.P, ("sent",))
        equal(self.D.counters()["bytes"], before, "bytes")
        self.quiet()

    # ---- scheduling ----

    def more_tokens(self):
        """P may be asked for more than one."""
        name = "at_once6"
        first = self.wanted[name][0]
        status, said = self.P.call("POST", "/v1/completions", dict(self.P.body(
            self.prompts[name], 50, REMOTE, False), stop_token_ids=[first]), ANSWER_S)
        equal(status, 200, said[:300])
        params = json.loads(said)["kv_transfer_params"]
        equal(params["kvd"]["tokens"], len(self.prompts[name]), "tokens that are offered")
        self.D.forget()
        self.right_or_error(name, self.D.complete(
            self.prompts[name], TOKENS, dict(params, request_id="more")), ("right",))
        self.quiet()

    def preemptions(self, engine):
        return sum(float(line.rsplit(" ", 1)[1])
                   for line in engine.call("GET", "/metrics")[1].decode().splitlines()
                   if line.startswith("vllm:num_preemptions_total"))

    def preempted(self):
        """Caches that are too small for all that runs, on both."""
        names = ["at_once%d" % i for i in range(8)]
        long = {name: self.D.complete(self.prompts[name], 200)["tokens"] for name in names}
        before = [self.preemptions(e) for e in (self.P, self.D)]
        self.D.forget()
        self.P.forget()
        hogs = [Asked(self.P, self.prompts["at_once%d" % i], 250, None) for i in range(6)]

        def one(name):
            got = self.D.complete(self.prompts[name], 200, self.prefill(name))
            equal(got["tokens"], long[name], got["error"] or "tokens of " + name)
        try:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(one, names))
            hogs_right = [hog.answer()["tokens"][:200] for hog in hogs]
        finally:
            for hog in hogs:
                hog.leave()
        for i, tokens in enumerate(hogs_right):
            equal(tokens, long["at_once%d" % i], "P's own")
        after = [self.preemptions(e) for e in (self.P, self.D)]
        assert after[0] > before[0] and after[1] > before[1], "nothing was preempted"
        self.quiet()
        return "P %d, D %d times" % tuple(b - a for a, b in zip(before, after))

    def prefill_left(self):
        """The client leaves while its prompt is computed, in chunks."""
        for i in range(12):
            asked = Asked(self.P, self.prompts["kill%d" % (i % 3)], 1, REMOTE, False)
            pause(0.02 * i)
            asked.leave()
        self.quiet(LEASE_S + 10)
        self.through("kill1")

    def window(self):
        """Loads of a window; one that fails is computed again, and what runs beside it
        stays as it is."""
        alone = self.D.complete(self.prompts["kill1"], TOKENS * 10)["tokens"]
        self.D.forget()
        before = self.D.counters()
        self.through(LONG)
        assert until(lambda: self.D.counters()["xfers"] == before["xfers"] + 1, 10), "metrics"
        moved = self.D.counters()["bytes"] - before["bytes"]
        assert moved <= (WINDOW // BLOCK + 1) * BLOCK_BYTES, "%d bytes of a window" % moved
        self.D.forget()  # while nothing runs: later it cannot
        beside = Asked(self.D, self.prompts["kill1"], TOKENS * 10, None)
        assert until(lambda: self.D.usage() > 0, 10)
        self.prefill_gives_up("offered", False)
        got = beside.answer()
        equal(got["tokens"], alone, got["error"] or "what ran beside it")
        self.quiet()
        return "%d bytes" % moved

    def window_control(self):
        """The check above, on a connector that reports blocks, not requests."""
        self.D.look("break", "blocks")
        try:
            self.window()
        except (AssertionError, RuntimeError, OSError) as error:
            return "seen: %s" % str(error)[:120]
        raise AssertionError("it is not noticed")

    # ---- 10: ranks ----

    def rank_fails(self, fault):
        """The room of rank 0 fails while rank 1's daemon stands still."""
        self.D.look("break", fault)
        asked, params = self.held()
        other = self.others[0]
        self.p.daemon.freeze()
        self.D.look("let_go")
        assert until(lambda: all(any(s[1] == MOVING for s in rank)
                                 for rank in self.D.look("states")), 5)
        other.daemon.freeze()
        try:
            ctl(self.d, "abort", params["kvd"]["room"], "--role", "pull", "--reason", "rank 0")
            self.p.daemon.thaw()
            if fault:
                asked.leave()
            seen = self.events(self.D, ("failed", "received"), n=2 if fault else 1)
            pause(0.5)
            held = self.D.usage() > 0
        finally:
            other.daemon.thaw()
            self.p.daemon.thaw()
            self.D.look("break", "")
        if not fault:
            came = self.right_or_error(LONG, asked.answer(), self.allowed)
            rest = self.events(self.D, ("failed", "received"))
            self.quiet()
            assert held, "blocks were free before rank 1's room had ended"
            equal([e["rank"] for e in seen + rest], [0, 1], "ranks, as they ended")
            return came
        assert not held, "the check does not see blocks that are free too early"
        self.next_request_works()
        self.quiet()
        return "seen"


ENDS = ("succeeded", "failed", "aborted")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-ends")
    parser.add_argument("--part", choices=["one_rank", "two_ranks", "windows"])
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    args.kind, args.connector, args.tp_d = "llama", None, 1
    args.push = args.layerwise = args.kill = False
    tally = Tally()

    def check(name, call, *more):
        if not args.words or any(word in name for word in args.words):
            begin = time.monotonic()
            tally.check(name, call, *more)
            print("      %.1f s" % (time.monotonic() - begin), flush=True)
    for part in (one_rank, two_ranks, windows):
        if args.part in (None, part.__name__):
            tally.check(part.__name__, of_part, part, args, tally, check)
    return tally.close(args.name)


def of_part(part, args, tally, check):
    with TcpNode("p") as p, TcpNode("d") as d:
        ends = Ends(args, tally, (p, d))
        try:
            part(ends, check)
        finally:
            ends.stop()


def one_rank(ends, check):
    ends.start("fail")
    ends.allowed = ("error",)
    check("an offer is made before the forward pass", ends.offered_before_the_pass)
    for where in ("offered", "reading"):
        check("P gives up, %s" % where, ends.prefill_gives_up, where)
        check("D gives up, %s" % where, ends.decode_gives_up, where)
    check("blocks of a request whose client left are not written", ends.canary_holds)
    check("control: blocks given back early are noticed", ends.canary_sees, "early")
    check("control: blocks written after are noticed", ends.canary_sees, "untold")
    check("aborts are known", ends.known)
    check("a read after the lease", ends.late, ("error",))
    check("a queue of 3 leases", ends.queued)
    check("garbage from a proxy", ends.garbage)
    check("garbage on P", ends.garbage_on_prefill)
    for what in ("room", "ticket", "pool", "daemon"):
        check("a wrong %s" % what, ends.nobody, what)
    check("D's prompt is longer", ends.other_length, "prefix", "longer")
    check("D's prompt is shorter", ends.other_length, "longer", "prefix")
    for order in ("at once", "one after the other"):
        check("asked for twice, %s" % order, ends.twice, order)
    check("two samples of one prompt", ends.samples)
    check("prefixes of all lengths", ends.hits)
    check("a full hit", ends.full_hit)
    check("more tokens on P", ends.more_tokens)
    check("preemption on both", ends.preempted)
    check("P's client leaves while it computes", ends.prefill_left)
    for who, name in enumerate(("P's daemon", "D's daemon")):
        check("%s frozen" % name, ends.frozen, who)
    check("control: a connector that gives up is noticed", ends.frozen_sees)
    check("%d aborts" % ABORTS, ends.aborts)
    for who, name in enumerate(("P's daemon", "D's daemon")):
        check("%s killed" % name, ends.killed, who)


def windows(ends, check):
    ends.allowed = ("right",)
    ends.start("recompute", window=True)
    check("a window, behind a MultiConnector", ends.window)
    check("control: failed loads told by blocks", ends.window_control)


def two_ranks(ends, check):
    """Decode with two ranks, a daemon for each, that computes again what is not loaded."""
    with TcpNode("d1") as other:
        ends.others, ends.allowed = [other], ("right",)
        ends.start("recompute", 2, {"KVD_SOCKET_1": other.daemon.socket_path})
        ranks(ends, check)
        ends.stop()


def ranks(ends, check):
    check("one of two ranks fails", ends.rank_fails, "")
    check("control: blocks of a rank given back early are noticed", ends.rank_fails, "early")
    check("a read after the lease, computed again", ends.late, ("right",))
    for what in ("room", "pool"):
        check("a wrong %s, computed again" % what, ends.nobody, what)
    check("P gives up, offered, computed again", ends.prefill_gives_up, "offered")
    check("P's daemon killed, computed again", ends.killed, 0)


if __name__ == "__main__":
    sys.exit(main())
