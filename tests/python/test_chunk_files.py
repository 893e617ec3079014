# SPDX-License-Identifier: Apache-2.0
"""Chunks in files: they survive the daemon, and any damage of the directory. A chunk that
cannot be verified is a miss."""
import contextlib
import os
import random
import shutil
import tempfile

import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from test_chunks import Rank, T, chain

SLAB = 1 << 20  # of 128 MiB


def conf(path, memory="32 MiB", size="128 MiB"):
    return "[chunks]\nchunk_memory = %s\nchunk_dir = %s\nchunk_dir_size = %s\n" % (
        memory, path, size)


@pytest.fixture
def folder():
    path = tempfile.mkdtemp(prefix="kvd-chunks-")
    yield path
    shutil.rmtree(path)


def files(client):
    return client.command("chunk.list")["files"]


def durable(rank, space, ids, seed=0):
    pages = rank.some_pages(T * len(ids), seed)
    rank.fill(pages, ids)
    move = space.put(ids, {"kv": pages}, durable=True)
    move.wait(timeout=60)
    move.close()


def found(space, ids, count):
    """The start's reading of headers is waited for."""
    return until(lambda: space.find(ids).chunks == count)


def scanned(client):
    until(lambda: files(client)["scanned"])


@contextlib.contextmanager
def killed(text):
    """A daemon that is ended by SIGKILL."""
    d = Daemon(text)
    d.start().wait_ready()
    try:
        yield d
    finally:
        d.proc.kill()
        d.proc.wait()
        d.tmp.cleanup()


def slabs(folder):
    return sorted(os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(".slab"))


def test_durable_chunks_outlive_the_daemon(folder):
    """Also a killed one: durable chunks survive."""
    ids = [chain(6, b"%d" % i) for i in range(4)]
    for i in range(4):
        with (killed if i % 2 else Daemon)(conf(folder)) as d, \
                kvd.Client(d.socket_path) as c:
            rank = Rank(c, order=kvd.HND if i % 2 else kvd.NHD, page=16 << i % 3)
            space = rank.space()
            for known in ids[:i]:
                found(space, known, 6)
                rank.fetch(space, known)
            scanned(c)
            durable(rank, space, ids[i])


def test_only_chunks_requested_again_are_written(folder):
    once, again = chain(4, b"once"), chain(4, b"again")
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c)
        space = rank.space()
        scanned(c)
        rank.put(space, once)
        rank.put(space, again)
        assert space.find(again).chunks == 4
        until(lambda: files(c)["written"] == 4)
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c)
        space = rank.space()
        found(space, again, 4)
        assert space.find(once).chunks == 0
        rank.fetch(space, again)


def test_chunk_evicted_from_memory_is_read_from_file(folder):
    """Four times as much as the memory holds."""
    with Daemon(conf(folder, memory="16 MiB")) as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c, pages=128)  # 128 KiB a chunk
        space = rank.space()
        scanned(c)
        lots = [chain(16, b"lot%d" % i) for i in range(30)]
        for ids in lots:
            durable(rank, space, ids)
        listed = c.command("chunk.list")
        assert listed["evicted"] > 200
        for i, ids in enumerate(lots):
            assert space.find(ids).chunks == 16
            rank.fetch(space, ids, seed=i)
        assert files(c)["read"] > 300 and files(c)["bad"] == 0
        # of a chunk that is in a file alone half the tokens are fetched, too
        with space.hold(lots[0]) as hold:
            pages = list(range(32))
            rank.bytes[:] = 0
            hold.fetch({"kv": kvd.View(pages, tokens=(0, 3 * T + 5))}).wait(timeout=60)
            assert rank.holds(pages, lots[0], 3 * T + 5)


def test_full_files_are_replaced(folder):
    with Daemon(conf(folder, memory="16 MiB", size="32 MiB")) as d, \
            kvd.Client(d.socket_path) as c:
        rank = Rank(c, pages=128)
        space = rank.space()
        scanned(c)
        for i in range(40):
            durable(rank, space, chain(16, b"full%d" % i))
        assert files(c)["evicted"] > 300
        assert sum(os.path.getsize(s) for s in slabs(folder)) <= 32 << 20
        last = chain(16, b"full39")
        assert space.find(last).chunks == 16
    with Daemon(conf(folder, memory="16 MiB", size="32 MiB")) as d, \
            kvd.Client(d.socket_path) as c:
        rank = Rank(c, pages=128)
        space = rank.space()
        found(space, last, 16)
        rank.fetch(space, last)
    # with another size the files are given up, and all works
    with Daemon(conf(folder, memory="16 MiB", size="64 MiB")) as d, \
            kvd.Client(d.socket_path) as c:
        rank = Rank(c, pages=128)
        space = rank.space()
        scanned(c)
        assert space.find(last).chunks == 0
        durable(rank, space, last)


def test_dropped_chunks_stay_dropped(folder):
    ids = chain(5, b"drop")
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c)
        space = rank.space()
        scanned(c)
        durable(rank, space, ids)
        space.drop(ids)
        until(lambda: c.command("chunk.list")["chunks"] == 0)
        durable(rank, space, ids[:1])
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        space = Rank(c).space()
        scanned(c)
        assert space.find(ids).chunks == 1


@pytest.mark.parametrize("where", ["header", "payload", "zeros", "swapped", "short", "class"])
def test_chunk_with_corrupt_file_is_a_miss(folder, where):
    """Flipped bits and worse: wrong bytes are never given to an engine."""
    ids = chain(12, where.encode())
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c)
        space = rank.space()
        scanned(c)
        durable(rank, space, ids)
    rng = random.Random(where)
    (path,) = slabs(folder)[:1]
    slot = int(os.path.basename(path).split(".")[1])
    harm(folder, where, path, slot, rng)
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        d.expect("differs from the written one")
        d.expect("is shorter than")
        d.expect("content differs from its digest")
        rank = Rank(c)
        space = rank.space()
        scanned(c)
        whole = 0
        for i in range(12):
            if space.find([ids[i]], i).chunks == 0:
                continue
            with space.hold([ids[i]], i) as hold:
                pages = rank.some_pages(T, i)
                rank.bytes[:] = 0
                move = hold.fetch({"kv": kvd.View(pages, first_token=i * T)})
                try:
                    move.wait(timeout=60)
                except kvd.Error as error:
                    assert error.code == "ENOTFOUND"
                    assert space.find([ids[i]], i).chunks == 0, "it is forgotten"
                    continue
                assert rank.holds(pages, [ids[i]])
                whole += 1
        assert whole == {"header": 11, "payload": 11, "zeros": 5, "swapped": 10, "short": 5,
                         "class": 0}[where]
        durable(rank, space, ids)
        assert space.find(ids).chunks == 12


def harm(folder, where, path, slot, rng):
    if where == "class":
        (name,) = [n for n in os.listdir(folder) if n.startswith("class-")]
        path, slot, where = os.path.join(folder, name), os.path.getsize(
            os.path.join(folder, name)), "header"
    with open(path, "r+b") as f:
        if where == "header":
            at = rng.randrange(min(slot, 4096))
        elif where == "payload":
            at = 4096 + rng.randrange(slot - 4096)
        elif where == "zeros":
            f.truncate(0)
            f.truncate(SLAB)
            return
        elif where == "short":
            f.truncate(100)
            return
        else:  # two slots change their payloads
            f.seek(4096)
            one = f.read(slot - 4096)
            f.seek(slot + 4096)
            other = f.read(slot - 4096)
            f.seek(4096)
            f.write(other)
            f.seek(slot + 4096)
            f.write(one)
            return
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << rng.randrange(8)]))


def test_strange_files_do_no_harm(folder):
    for name, data in (("class-" + "0" * 32 + ".desc", b"x" * 5000), ("notes", b"mine"),
                       ("99999.8192.slab", b"y" * 10000), ("00001.4097.slab", b""),
                       ("00002.8192.slab", os.urandom(SLAB))):
        with open(os.path.join(folder, name), "wb") as f:
            f.write(data)
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        d.expect("content differs from its digest")
        rank = Rank(c)
        space = rank.space()
        scanned(c)
        durable(rank, space, chain(3))
        assert open(os.path.join(folder, "notes"), "rb").read() == b"mine"


def test_two_daemons_do_not_share_a_directory(folder):
    ids = chain(3, b"two")
    with Daemon(conf(folder)) as a, Daemon(conf(folder)) as b:
        b.expect("another daemon")
        with kvd.Client(a.socket_path) as c, kvd.Client(b.socket_path) as other:
            scanned(c)
            rank = Rank(c)
            durable(rank, rank.space(), ids)
            until(lambda: files(other)["readonly"])
            assert "another daemon" in files(other)["why"]
            stranger = Rank(other)
            space = stranger.space()
            assert space.find(ids).chunks == 0
            stranger.put(space, ids)  # memory alone
            stranger.fetch(space, ids)
            with pytest.raises(kvd.LimitError, match="durable"):
                durable(stranger, space, chain(1, b"no"))


def test_durable_needs_files():
    with Daemon("[chunks]\nchunk_memory = 16 MiB\n") as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c)
        with pytest.raises(kvd.StateError, match="set chunk_dir"):
            durable(rank, rank.space(), chain(1))


def test_kill_at_any_time_leaves_no_wrong_byte(folder):
    """A writer's daemon is killed again and again in the middle of its writes."""
    known = []
    for n in range(8):
        with killed(conf(folder, memory="16 MiB", size="32 MiB")) as d, \
                kvd.Client(d.socket_path) as c:
            rank = Rank(c, pages=128)
            space = rank.space()
            scanned(c)
            for ids in known:
                count = space.find(ids).chunks
                if count:
                    rank.fetch(space, ids[:count])
            for k in range(12):
                ids = chain(16, b"kill%d.%d" % (n, k))
                known.append(ids)
                rank.put(space, ids)
                space.find(ids)  # to be written, some time
