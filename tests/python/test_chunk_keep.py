# SPDX-License-Identifier: Apache-2.0
"""Memory of chunks that outlives its daemon: systemd's part is played by the test. Every byte is
judged by its id."""
import contextlib
import mmap
import os
import random
import select
import threading

import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from test_chunks import Rank, T, chain

NAMES = ("kvd-chunks", "kvd-chunks-index")


class Keeper:
    """As systemd does: fds passed by a daemon are available to the next one."""

    def __init__(self):
        self.kept = {}

    def daemon(self, config="[chunks]\nchunk_memory = 64 MiB\n"):
        given = list(self.kept.items())
        shell = "".join("exec %d<&%d; " % (3 + i, fd) for i, (_, fd) in enumerate(given))
        shell += "LISTEN_PID=$$ LISTEN_FDS=%d LISTEN_FDNAMES=%s exec \"$@\"" % (
            len(given), ":".join(name for name, _ in given))
        d = Daemon(config, wrapper=["bash", "-c", shell, "kvd"],
                   pass_fds=[fd for _, fd in given])
        d.kept = self.kept
        return d

    @contextlib.contextmanager
    def life(self, end, config="[chunks]\nchunk_memory = 64 MiB\n"):
        d = self.daemon(config)
        d.start().wait_ready()
        try:
            with kvd.Client(d.socket_path) as c:
                yield d, c
            if end == "stop":
                d.stop()
                assert d.proc.returncode == 0, d.log()
        finally:
            d.proc.kill()
            d.proc.wait()
            d.tmp.cleanup()

    def close(self):
        for fd in self.kept.values():
            os.close(fd)


@pytest.fixture
def keeper():
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_chunks_outlive_their_daemon(keeper, end):
    ids = [chain(6, b"keep%d" % i) for i in range(4)]
    for i in range(4):
        with keeper.life(end) as (_, c):
            rank = Rank(c)
            with rank.space() as space:
                for one in ids[:i]:
                    assert space.find(one).chunks == 6
                    rank.fetch(space, one, seed=i)
                rank.put(space, ids[i])
    assert sorted(keeper.kept) == sorted(NAMES)


def test_ranks_and_spaces_stay_apart(keeper):
    ids = chain(6, b"apart")
    with keeper.life("kill") as (_, c):
        for r in range(2):
            rank = Rank(c, tp=2, rank=r, order=kvd.HND)
            rank.put(rank.space(), ids)
        other = Rank(c, layers=3)
        other.put(other.space(model="n"), ids[:2])
    with keeper.life("kill") as (_, c):
        whole, other = Rank(c, page=32, pages=32), Rank(c, layers=3)
        whole.fetch(whole.space(), ids)
        assert whole.space(model="o").find(ids).chunks == 0
        with other.space(model="n") as space:
            assert space.find(ids).chunks == 2
            other.fetch(space, ids[:2])
        assert whole.space(revision="b").find(ids).chunks == 0


def test_chunks_dropped_or_evicted_are_not_restored(keeper):
    ids = chain(8, b"drop")
    with keeper.life("kill") as (_, c):
        rank = Rank(c, pages=256, layers=4)
        space = rank.space()
        rank.put(space, ids)
        space.drop(ids[3:], first=3)
        for i in range(20):
            rank.put(space, chain(20, b"flood%d" % i), seed=i)
        there = [space.find(chain(20, b"flood%d" % i)).chunks for i in range(20)]
        kept = space.find(ids).chunks
    with keeper.life("kill") as (_, c):
        rank = Rank(c, pages=256, layers=4)
        space = rank.space()
        assert space.find(ids).chunks == kept
        assert [space.find(chain(20, b"flood%d" % i)).chunks for i in range(20)] == there
        for i in range(20):
            if there[i]:
                rank.fetch(space, chain(20, b"flood%d" % i)[:there[i]])


def test_other_size_starts_empty(keeper):
    ids = chain(6, b"size")
    with keeper.life("stop") as (_, c):
        rank = Rank(c)
        rank.put(rank.space(), ids)
    old = dict(keeper.kept)
    with keeper.life("stop", "[chunks]\nchunk_memory = 128 MiB\n") as (_, c):
        rank = Rank(c)
        assert rank.space().find(ids).chunks == 0
        rank.put(rank.space(), ids)
    assert old.keys() == keeper.kept.keys()
    with keeper.life("stop", "[chunks]\nchunk_memory = 128 MiB\n") as (_, c):
        rank = Rank(c)
        rank.fetch(rank.space(), ids)


def test_index_of_rubbish_is_none(keeper):
    """Flipped bits, anywhere in the index: a chunk is right or missing."""
    rng, ids = random.Random(7), chain(12, b"rubbish")
    for turn in range(12):
        with keeper.life("kill") as (d, c):
            d.expect("not used")
            rank = Rank(c)
            space = rank.space()
            there = space.find(ids).chunks
            if there:
                rank.fetch(space, ids[:there])
            rank.put(space, ids)
        fd = keeper.kept["kvd-chunks-index"]
        with mmap.mmap(fd, os.fstat(fd).st_size) as index:
            for begin, end in data_of(fd):
                for _ in range(1 + turn * 40):
                    index[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)


def data_of(fd):
    """Where the file is no hole."""
    at = 0
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        yield at, end
        at = end


def tries_of(index):
    """Number of consecutive daemons that took it without restoring its memory."""
    return int.from_bytes(index[12:16], "little")


def dies_of_it(keeper, index):
    """A daemon that takes the kept memory, and is killed before it is restored. False: it was
    restored."""
    before = tries_of(index)
    d = keeper.daemon()
    d.start()
    try:
        while tries_of(index) == before and "READY=1" not in d.states:
            assert d.proc.poll() is None, d.log()
            if select.select([d.notify], [], [], 0)[0]:
                d.heard()
    finally:
        d.proc.kill()
        d.proc.wait()
        d.notify.close()
        d.tmp.cleanup()
    return tries_of(index) == before + 1


def test_kept_memory_that_crashes_the_daemon_is_not_taken_again(keeper):
    ids = chain(6, b"dies")
    with keeper.life("kill") as (_, c):
        rank = Rank(c)
        rank.put(rank.space(), ids)
    fd = keeper.kept["kvd-chunks-index"]
    with mmap.mmap(fd, os.fstat(fd).st_size) as index:
        def dead(times):
            until(lambda: dies_of_it(keeper, index) and tries_of(index) == times, pause=0)
        dead(1)
        with keeper.life("kill") as (_, c):  # at the second time it lives, and that counts
            rank = Rank(c)
            rank.fetch(rank.space(), ids)
        assert tries_of(index) == 0
        dead(2)
    with keeper.life("stop") as (d, c):
        d.expect("not used")
        rank = Rank(c)
        assert rank.space().find(ids).chunks == 0
        assert "tries=2" in d.log()


def test_kills_at_random(keeper):
    """Running puts, drops and evictions: existing chunks are right."""
    rng, found = random.Random(11), 0
    prompts = [chain(12, b"random%d" % i) for i in range(40)]
    for _ in range(12):
        with keeper.life("kill") as (d, c):
            rank = Rank(c, pages=256, layers=4)
            space = rank.space()
            for ids in prompts:
                there = space.find(ids).chunks
                if there:
                    rank.fetch(space, ids[:there], seed=there)
                found += there
            dead = threading.Event()

            def kill():
                dead.set()
                d.proc.kill()
            timer = threading.Timer(rng.random() * 0.2, kill)
            timer.start()
            try:
                while True:
                    busy(rank, space, rng, prompts)
            except kvd.Error:  # of a call that the kill met, or that came behind it
                assert dead.is_set()
            timer.join()
    assert found > 0, "nothing was there after any kill"


def busy(rank, space, rng, prompts):
    ids, count = rng.choice(prompts), rng.randint(1, 12)
    if rng.random() < 0.2:
        space.drop(ids[count - 1:], first=count - 1)
    else:
        pages = rank.some_pages(T * count, rng.randrange(1 << 30))
        rank.fill(pages, ids[:count])
        space.put(ids[:count], {"kv": pages}, timeout=1).wait(timeout=1)


