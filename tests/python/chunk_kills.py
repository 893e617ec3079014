#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A daemon with chunks in files is killed at random moments and started again.

chunk_kills.py [--kills N] [--seed N] [--dir FOLDER]

Engines put, put durably, hold, fetch, drop and evict meanwhile. After each start: what was
told to last is there, unless it was dropped or may have been evicted, and whatever is there
is right, byte by byte (tests/python/test_chunks.py: an id says what its bytes are). make
chunk-kills."""
import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from conftest import until  # noqa: E402
import kvd  # noqa: E402
from kvd_daemon import Daemon  # noqa: E402
from test_chunks import T, Rank, chain  # noqa: E402

LONGEST = 12     # chunks of a prompt
PROMPTS = 24     # that are known at a time
KEEPS = 256      # MiB of files: all of them stay
EVICTS = 32      # MiB: they do not
WORKERS = 3


class Prompt:
    def __init__(self, number):
        self.ids = chain(LONGEST, b"kills%d" % number)
        self.lasts = 0  # chunks that must be there
        self.lock = threading.Lock()


class Works(threading.Thread):
    """An engine, until its daemon is gone."""

    def __init__(self, path, prompts, seed, evicts):
        super().__init__()
        self.path, self.prompts, self.evicts = path, prompts, evicts
        self.random, self.wrong, self.done = random.Random(seed), None, 0
        self.over = threading.Event()
        self.start()

    def run(self):
        try:
            with kvd.Client(self.path, timeout=0.5) as client:
                rank = Rank(client, pages=LONGEST * 4)
                space = rank.space()
                while True:
                    prompt = self.random.choice(self.prompts)
                    if prompt.lock.acquire(timeout=0.01):
                        try:
                            self.one(rank, space, prompt)
                        finally:
                            prompt.lock.release()
                        self.done += 1
        except kvd.Error:
            pass  # killed
        except Exception as why:  # told by the main thread
            self.wrong = why

    def ended(self, move):
        while move.state not in (kvd.SUCCESS, kvd.FAILED):
            if self.over.wait(0.0005):
                raise kvd.Error("killed", "ELOST", 0, "op", False)
        move.wait()

    def one(self, rank, space, prompt):
        what, count = self.random.random(), self.random.randint(1, LONGEST)
        if what < 0.5:
            pages = rank.some_pages(T * count, self.random.randrange(1 << 30))
            rank.fill(pages, prompt.ids[:count])
            durable = self.random.random() < 0.6
            move = space.put(prompt.ids[:count], {"kv": pages}, durable=durable)
            self.ended(move)
            if durable and move.show().left_out == 0:
                prompt.lasts = max(prompt.lasts, count)
            move.close()
        elif what < 0.9:
            checked(rank, space, prompt.ids[:count], self.ended)
        else:
            # forgotten from somewhere on: what lasts may come back after a kill
            prompt.lasts = min(prompt.lasts, count - 1)
            space.drop(prompt.ids[count - 1:], first=count - 1)


def checked(rank, space, ids, ended=lambda move: move.wait(timeout=30)):
    """What is there of these is right. -> how many"""
    with space.hold(ids) as hold:
        if not hold.chunks:
            return 0
        pages = rank.some_pages(T * hold.chunks, hold.chunks)
        ended(hold.fetch({"kv": kvd.View(pages, tokens=(0, hold.tokens))}))
        assert rank.holds(pages, ids[:hold.chunks]), "wrong bytes"
        return hold.chunks


def look(daemon, prompts, evicts):
    with kvd.Client(daemon.socket_path) as client:
        until(lambda: client.command("chunk.list")["files"]["scanned"])
        rank = Rank(client, pages=LONGEST * 4)
        space, there = rank.space(), 0
        for prompt in prompts:
            got = checked(rank, space, prompt.ids)
            there += got
            if not evicts and got < prompt.lasts:
                raise AssertionError("%d chunks of %s are there, %d were told to last"
                                     % (got, prompt.ids[0].hex()[:8], prompt.lasts))
        files = client.command("chunk.list")["files"]
        assert not files["faults"] and not files["readonly"], files
        return there, files["bad"]


def ends(works, wait):
    """Calls of a client wait some seconds for another daemon: meanwhile the next round goes on.
    Prompts of such engines are locked, and left alone. -> ops"""
    done = 0
    for one in list(works):
        if wait:
            one.join()
        if not one.is_alive():
            works.remove(one)
            done += one.done
            if one.wrong:
                raise one.wrong
    return done


def kill(daemon):
    daemon.proc.kill()
    daemon.proc.wait()
    daemon.tmp.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--dir", default=".")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="kvd-chunk-kills-", dir=os.path.abspath(args.dir))
    rng, began = random.Random(args.seed), time.monotonic()
    found = bad = done = 0
    print("seed %d" % args.seed)
    try:
        for mib in (KEEPS, EVICTS):
            path, prompts, number, ended = os.path.join(folder, str(mib)), [], 0, []
            os.mkdir(path, 0o700)
            for _ in range(args.kills // 2):
                while len(prompts) < PROMPTS:
                    prompts.append(Prompt(number))
                    number += 1
                if mib == EVICTS:
                    prompts[rng.randrange(PROMPTS)] = Prompt(number)
                    number += 1
                daemon = Daemon("[chunks]\nchunk_memory = 32 MiB\nchunk_dir = %s\n"
                                "chunk_dir_size = %d MiB\n" % (path, mib))
                daemon.start().wait_ready()
                try:
                    there, wrong = look(daemon, prompts, mib == EVICTS)
                    works = [Works(daemon.socket_path, prompts, rng.random(), mib == EVICTS)
                             for _ in range(WORKERS)]
                    threading.Event().wait(rng.random() * rng.choice((0.05, 0.3, 1)))
                finally:
                    kill(daemon)
                for one in works:
                    one.over.set()
                found, bad = found + there, bad + wrong
                ended += works
                done += ends(ended, wait=False)
            done += ends(ended, wait=True)
    finally:
        shutil.rmtree(folder)
    print("%d kills, %d ops, %d chunks found again and right, %d parts refused for their "
          "sums, %.0f s" % (args.kills // 2 * 2, done, found, bad, time.monotonic() - began))


if __name__ == "__main__":
    main()
