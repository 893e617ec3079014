#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's push by layers, and the order marks that its chunks wait for, with real engines.

vllm_order.py [--nixl native]
Last line: N passed, N failed."""
import argparse
import json
import random
import sys
import threading

import vllm_pd
from rig import HERE, Node, Tally, equal, pause, until

ANSWER_S = 60


class Engine(vllm_pd.Engine):
    def environment(self, args, node):
        env = super().environment(args, node)
        return dict(env, VLLM_SERVER_DEV_MODE="1")

    def late(self, what, *args):
        return self.look(what, *args)[0]


class Run:
    def __init__(self, args, tally, nodes):
        made = argparse.Namespace(nixl="native", kind="llama", connector="", tp_d=1, push=True,
                                  layerwise=True, name=args.name)
        more = ["--worker-extension-cls", "vllm_late.Late"]
        self.P = Engine(made, "P", nodes[0], more=more, path=[HERE])
        self.D = Engine(made, "D", nodes[1])
        self.tally, self.rng = tally, random.Random(5)

    def prompt(self, n):
        return [self.rng.randrange(3, 512) for _ in range(n)]

    def through(self, ids):
        """Decode first, so that its blocks are named when prefill starts."""
        room, box = str(random.getrandbits(63)), []
        asked = threading.Thread(target=lambda: box.append(self.D.complete(ids, 8, dict(
            self.P.pushed(room), request_id="o" + room))))
        asked.start()
        pause(0.5)
        status, said = self.P.ask_prefill(ids, {"bootstrap_room": room}, "p" + room)
        equal(status, 200, "prefill: %s" % said[:200])
        asked.join(ANSWER_S)
        assert box and not box[0]["error"], box
        return box[0]["tokens"]

    def same(self, mode, n):
        """Right tokens in this mode, and what had moved before the last layer."""
        ids = self.prompt(n)
        self.P.late("set", mode)
        got = self.through(ids)
        moved = self.P.late("set", "plain")
        wanted = self.P.complete(ids, 8)["tokens"]
        equal(len(wanted), 8, "tokens of prefill alone")
        return got == wanted, moved

    def layers(self):
        right, moved = self.same("plain", 1900)
        assert right, "the tokens differ"
        assert moved and max(moved) > 0, moved
        return "%d bytes" % max(moved)

    def steps(self):
        """The same prompt's length without layers: the instrument says 0."""
        right, moved = self.same("steps", 1900)
        assert right and moved and not any(moved), (right, moved)

    def late(self):
        for n in (33, 500, 1900):
            right, _ = self.same("late", n)
            assert right, "%d tokens: they differ" % n

    def ignored(self):
        """Chunks that wait for nothing take the bytes from before."""
        right, _ = self.same("ignored", 500)
        assert not right, "late bytes make no difference: the check is none"

    def run(self):
        check = self.tally.check
        for engine in (self.P, self.D):
            check("%s is up" % engine.name, lambda e=engine: "%.0f s" % e.wait().took)
        self.P.late("watch")
        check("layers move before the last one is computed", self.layers)
        check("control: steps do not", self.steps)
        check("bytes that come 300 ms behind each layer are waited for", self.late)
        check("control: without marks the tokens are wrong", self.ignored)
        check("prefill has all its blocks back",
              lambda: until(lambda: self.P.counters()["usage"] == 0, 40) or 1 / 0)

    def stop(self):
        self.P.stop()
        self.D.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nixl", default="native", choices=["native"])
    parser.add_argument("--name", default="vllm-order")
    args = parser.parse_args()
    tally = Tally()
    try:
        with Node("native", "p") as p, Node("native", "d") as d:
            run = Run(args, tally, (p, d))
            try:
                run.run()
            finally:
                run.stop()
    except Exception as error:
        tally.add("the run", False, "%s: %s" % (type(error).__name__, str(error)[:1500]))
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
