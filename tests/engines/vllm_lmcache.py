#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a prompt's first token costs real vLLM engines on the CPU, with KvdStoreConnector and with
LMCache (its server and LMCacheMPConnector), on the same prompts.

vllm_lmcache.py [--reps N] [--only WORD] [--name NAME]

    computed      without a connector
    saved         computed and saved, with one
    memory        loaded from the store's memory, by the engine that saved it
    next engine   loaded from the store's memory by another engine, after that one was killed
    files         loaded from files alone: the store and the engine are new processes

Engines run one after another: beside each other they would share too few cores. Both stores have
chunks of 256 tokens, both presets, and write past the page cache. Tokens must be those of the plain
engine, and what was loaded is vLLM's own count.
Last line: N passed, N failed."""
import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import types

import vllm_pd
import vllm_store
from rig import FOLDER, HERE, HOST, Process, Tally, equal, free_ports, logs, python, until

CHUNK, ANSWER = 256, 8
LENGTHS = (300, 800, 1900)
SITE = os.path.join(FOLDER, "lmcache", "site")
ROWS = ("saved", "memory", "next engine", "files")


class LmServer(Process):
    """LMCache's server. folder: of its files, or None."""

    def __init__(self, log, folder):
        self.folder, self.port = folder, free_ports()
        env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        env.update(PYTHONPATH=SITE, CUDA_VISIBLE_DEVICES="", DO_NOT_TRACK="1",
                   LMCACHE_TRACK_USAGE="false", PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
        more = ["--l2-adapter", json.dumps({"type": "fs", "base_path": folder,
                                            "use_odirect": True})] if folder else []
        super().__init__([python("vllm"), "-m", "lmcache.v1.multiprocess.server", "--host", HOST,
                          "--port", str(self.port), "--chunk-size", str(CHUNK),
                          "--l1-size-gb", "0.5", "--no-l1-use-lazy", "--eviction-policy", "LRU",
                          "--supported-transfer-mode", "auto", "--shm-name",
                          "lmcache-%d" % self.port, "--disable-metrics", *more], env, log)

    def wait(self):
        def ready():
            with open(self.log, errors="replace") as f:
                return "cache server is running on" in f.read() or self.proc.poll() is not None
        if not until(ready, 120) or self.proc.poll() is not None:
            raise RuntimeError("LMCache's server is not up; %s\n%s" % (self.log, self.words()))
        return self


class LmEngine(vllm_pd.Engine):
    def __init__(self, args, name, server):
        self.server = server
        super().__init__(args, name, server, role="kv_both", path=[HERE, vllm_store.PLAIN, SITE])
        self.metrics = {"usage": "kv_cache_usage_perc"}

    def environment(self, args, node):
        return dict(super().environment(args, None), VLLM_SERVER_DEV_MODE="1",
                    LMCACHE_TRACK_USAGE="false")

    def connector(self, args, role, side_port):
        return ["--kv-transfer-config", json.dumps({
            "kv_connector": "LMCacheMPConnector", "kv_role": role,
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://" + HOST,
                                          "lmcache.mp.port": self.server.port}})]

    forget = vllm_store.Engine.forget


class Lmcache:
    name = "LMCache"

    def __init__(self, args):
        self.args, self.server = args, None

    def start(self, folder):
        log = os.path.join(logs(self.args.name), "lmcache.log")
        self.server = LmServer(log, folder).wait()

    def stop(self):
        if self.server is not None:
            self.server.stop()
            self.server = None

    def engine(self, name):
        return LmEngine(self.args, "lmcache-" + name, self.server)

    def written(self):
        """Chunks in files."""
        return sum(name.endswith(".data") for name in os.listdir(self.server.folder))


class Kvd:
    name = "kvd"

    def __init__(self, args):
        self.args, self.node = args, None

    def start(self, folder):
        more = "chunk_dir = %s\nchunk_dir_size = 1 GiB\n" % folder if folder else ""
        self.node = vllm_store.StoreNode("store", more)
        self.node.__enter__()
        self.node.ready()
        if folder:
            assert until(lambda: self.node.chunks()["files"]["scanned"], 20), "files unread"

    def stop(self):
        if self.node is not None:
            self.node.__exit__(None, None, None)
            self.node = None

    def engine(self, name):
        return vllm_store.Engine(types.SimpleNamespace(args=self.args), "kvd-" + name, self.node,
                                 {"chunk_tokens": CHUNK})

    def written(self):
        return self.node.chunks()["files"]["bytes"] // (CHUNK * vllm_store.TOKEN)


class Plain(vllm_pd.Engine):
    def __init__(self, args):
        super().__init__(args, "plain", path=[HERE, vllm_store.PLAIN])


class Bench:
    def __init__(self, args, tally):
        self.args, self.tally, self.wanted, self.times = args, tally, {}, {}
        rng = random.Random(7)
        self.prompts = {(n, i): [rng.randrange(3, 512) for _ in range(n)]
                        for n in LENGTHS for i in range(args.reps + 1)}

    def chunks(self):
        return sum(len(p) // CHUNK for p in self.prompts.values())

    @contextlib.contextmanager
    def up(self, engine):
        try:
            engine.wait()
            # whatever an engine does only once
            engine.complete([5] * 40, ANSWER)
            yield engine
        finally:
            engine.stop()

    def ask(self, engine, loaded, row=None, column=None):
        """Every prompt; loaded: from the store. The first of each length is not counted."""
        before = engine.counters()["sources"]
        for (n, i), prompt in self.prompts.items():
            got = engine.complete(prompt, ANSWER)
            equal(got["tokens"], self.wanted.setdefault((n, i), got["tokens"]),
                  got["error"] or "tokens of %d, %d" % (n, i))
            if row and i:
                self.times.setdefault((column, row, n), []).append(1e3 * got["first"])
        wanted = sum(len(p) // CHUNK * CHUNK for p in self.prompts.values()) if loaded else 0

        def came():
            return engine.counters()["sources"].get("external_kv_transfer", 0) - \
                before.get("external_kv_transfer", 0)
        until(lambda: came() == wanted, 10)
        equal(came(), wanted, "tokens from the store")

    def forget(self, engine):
        """Its own cache of prefixes, which vLLM keeps while a block is in use."""
        assert until(lambda: engine.counters()["usage"] == 0, 30), "blocks are not free"
        engine.forget()

    def plain(self):
        with self.up(Plain(self.args)) as engine:
            self.ask(engine, False, "computed", "-")

    def memory(self, system):
        system.start(None)
        with self.up(system.engine("A")) as engine:
            self.ask(engine, False, "saved", system.name)
            self.forget(engine)
            self.ask(engine, True, "memory", system.name)
            engine.kill()
        with self.up(system.engine("B")) as engine:
            self.ask(engine, True, "next engine", system.name)
        system.stop()

    def files(self, system, folder):
        system.start(folder)
        with self.up(system.engine("C")) as engine:
            self.ask(engine, False)
            self.forget(engine)
            self.ask(engine, True)  # kvd writes what is asked for again
            assert until(lambda: system.written() >= self.chunks(), 60), \
                "%d of %d chunks in files" % (system.written(), self.chunks())
        system.stop()
        system.start(folder)
        with self.up(system.engine("D")) as engine:
            self.ask(engine, True, "files", system.name)
        system.stop()

    def run(self):
        self.tally.check("plain: computed", self.plain)
        for system in (Kvd(self.args), Lmcache(self.args)):
            if self.args.only not in system.name.lower():
                continue
            folder = tempfile.mkdtemp(prefix="chunks-", dir=FOLDER)
            try:
                self.tally.check(system.name + ": memory, next engine", self.memory, system)
                system.stop()
                self.tally.check(system.name + ": files", self.files, system, folder)
            finally:
                system.stop()
                shutil.rmtree(folder)

    def table(self):
        def cell(column, row, n):
            got = self.times.get((column, row, n))
            return "%.1f (%.1f)" % (statistics.median(got), max(got)) if got else "-"
        print("first token, ms, median (most) of %d:" % self.args.reps)
        print("| tokens | computed | |%s" % "".join(" %s |" % row for row in ROWS))
        print("|---|---|---|%s" % ("---|" * len(ROWS)))
        for n in LENGTHS:
            for column in ("kvd", "LMCache"):
                print("| %d | %s | %s |%s" % (n, cell("-", "computed", n), column, "".join(
                    " %s |" % cell(column, row, n) for row in ROWS)))
        self.tally.notes["ms"] = {" ".join(map(str, key)): values
                                  for key, values in self.times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--only", default="", choices=["", "kvd", "lmcache"])
    parser.add_argument("--name", default="lmcache")
    given = parser.parse_args()
    args = argparse.Namespace(nixl="native", kind="llama", connector="", tp_d=1, push=False,
                              **vars(given))
    tally = Tally()
    bench = Bench(args, tally)
    bench.run()
    bench.table()
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
