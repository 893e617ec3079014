# SPDX-License-Identifier: Apache-2.0
"""Chunks that stay in their engine's pages: found and read there, and no byte of a withdrawn
page is taken for a chunk's. A chunk's bytes follow from its id."""
import contextlib
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from test_chunk_events import Known, snapshot
from test_chunk_remote import PLAIN, daemons, fetched, lent
from test_chunk_files import conf, durable, folder, found, killed  # noqa: F401
from test_chunks import T, Rank, _refused, chain


@pytest.fixture(scope="module")
def daemon():
    with Daemon(PLAIN) as d:
        yield d


@pytest.fixture
def client(daemon):
    with kvd.Client(daemon.socket_path) as c:
        yield c


@contextlib.contextmanager
def engine(daemon, **args):
    with kvd.Client(daemon.socket_path) as c:
        rank = Rank(c, **args)
        with rank.space() as space:
            yield rank, space


class Stream:
    """A word that a stream would write."""

    def __init__(self, client):
        memory = kvd.Memory(4096)
        self.word, self.region = memory.array().view(np.uint64), client.register(memory)

    def until(self, value):
        return self.region, 0, value

    def signal(self, value):
        self.word[0] = value


def publish(rank, space, ids, seed=0, first=0):
    """-> pages"""
    pages = rank.some_pages(T * len(ids), seed)
    rank.fill(pages, ids)
    move = space.publish(ids, {"kv": kvd.View(pages, first_token=first * T)}, first)
    move.wait(timeout=60)
    facts = move.show()
    assert (facts.chunks, facts.done, facts.left_out) == (len(ids), len(ids), 0)
    move.close()
    return pages


def withdraw(space, ids, **args):
    """-> how many were published"""
    move = space.withdraw(ids, **args)
    move.wait(timeout=60)
    facts = move.show()
    move.close()
    return facts.chunks


def overwrite(rank, pages):
    for at in rank.fields.values():
        at[pages] = 0xDD


def published(client):
    return client.command("chunk.list")["published"]


def right(rank, pages, ids, tokens):
    """Of a failed fetch: the chunks it reports as complete."""
    n = -(-tokens // T)
    return not tokens or rank.holds(pages[:-(-tokens // rank.page)], ids[:n], tokens)


def test_two_ranks_publish_and_one_reads(daemon):
    """Nothing is copied: memory stays free; withdrawn chunks are no longer found."""
    ids = chain(9, b"pages")
    with engine(daemon, tp=2, rank=0, order=kvd.HND) as (r0, s0), \
            engine(daemon, tp=2, rank=1, order=kvd.HND) as (r1, s1), \
            engine(daemon, page=32, pages=32) as (reader, space):
        before = reader.client.command("chunk.list")
        publish(r0, s0, ids)
        assert space.find(ids).chunks == 0, "half of the heads are no chunk"
        assert s0.find(ids).chunks == 9
        pages = publish(r1, s1, ids)
        after = reader.client.command("chunk.list")
        assert after["published"] == 18 and after["put_bytes"] == before["put_bytes"]
        assert after["free_bytes"] == before["free_bytes"]
        assert space.find(ids).chunks == 9
        reader.fetch(space, ids)
        with space.hold(ids) as hold:
            assert withdraw(s1, ids[4:], first=4) == 5
            overwrite(r1, pages[16:])
            assert space.find(ids).chunks == 4
            into = reader.some_pages(9 * T)
            assert _refused(lambda: hold.fetch({"kv": into}), "ENOTFOUND")
            hold.fetch({"kv": kvd.View(into[:8], tokens=(0, 4 * T))}).wait(timeout=60)
            assert reader.holds(into[:8], ids[:4])
        assert withdraw(s1, ids) == 4
        assert withdraw(s1, ids) == 0
        assert withdraw(s0, ids) == 9
        assert published(reader.client) == 0


def test_chunk_waiting_for_stream_is_absent_before(daemon, client):
    ids = chain(3, b"wait")
    rank = Rank(client)
    pages = rank.some_pages(3 * T)
    stream = Stream(client)
    with rank.space() as space:
        move = space.publish(ids, {"kv": pages}, wait=stream.until(1))
        assert space.find(ids).chunks == 0
        assert withdraw(space, ids) == 0
        rank.fill(pages, ids)
        stream.signal(1)
        move.wait(timeout=60)
        assert space.find(ids).chunks == 3
        with engine(daemon) as (reader, other):
            reader.fetch(other, ids)
        more = chain(2, b"posted")
        posted = space.publish(more, {"kv": pages[:8]}, post=True)
        posted.wait(timeout=60)
        assert posted.show().done == 2 and withdraw(space, more) == 2
        aborted = space.publish(chain(2, b"never"), {"kv": pages[:8]}, wait=stream.until(2))
        aborted.abort()
        until(lambda: aborted.state == kvd.FAILED)
        assert published(client) == 3
        # dropped while it waits: it would be found by nobody, also not to be withdrawn
        gone = chain(2, b"gone")
        move = space.publish(gone, {"kv": pages[:8]}, wait=stream.until(3))
        space.drop(gone)
        stream.signal(3)
        move.wait(timeout=60)
        assert move.show().left_out == 2 and published(client) == 3
        assert withdraw(space, ids) == 3


def test_put_of_published_chunk_is_a_copy(daemon):
    ids = chain(6, b"copy")
    with engine(daemon) as (rank, space), engine(daemon) as (reader, other):
        pages = publish(rank, space, ids)
        move = space.put(ids, {"kv": pages})
        move.wait(timeout=60)
        assert (move.show().done, move.show().there) == (6, 0)
        assert withdraw(space, ids) == 6
        overwrite(rank, pages)
        reader.fetch(other, ids)
        # and in the other order: both exist, the copy is read
        pages = publish(rank, space, ids)
        overwrite(rank, pages)
        reader.fetch(other, ids)
        space.drop(ids)
        assert other.find(ids).chunks == published(rank.client) == 0
        # each of the two kinds alone, for who knows both
        for kind in (space.publish, space.put, space.publish):
            rank.fill(pages, ids)
            kind(ids, {"kv": pages}).wait(timeout=60)
            reader.fetch(other, ids)
            withdraw(space, ids)
            space.drop(ids)


def test_published_chunks_are_not_in_files(tmp_path):
    """Published chunks are not written to files, also with a durable put; a copy that was moved
    from memory to a file is read again when the pages are withdrawn."""
    ids = chain(6, b"files")
    text = PLAIN + "chunk_dir = %s\nchunk_dir_size = 256 MiB\n" % tmp_path
    with Daemon(text) as d, engine(d, pages=256, layers=4) as (rank, space), \
            engine(d, pages=256, layers=4) as (reader, other):
        written = lambda: rank.client.command("chunk.list")["files"]["written"]  # noqa: E731
        until(lambda: rank.client.command("chunk.list")["files"]["scanned"])
        pages = publish(rank, space, ids)
        for _ in range(3):
            reader.fetch(other, ids)
        with pytest.raises(kvd.Error, match="durable"):
            rank.client.command("chunk.publish", durable=True)
        assert written() == 0
        space.put(ids, {"kv": pages}, durable=True).wait(timeout=60)
        assert written() == 6
        for i in range(20):  # all that is in memory leaves it
            flood = chain(20, b"flood%d" % i)
            space.put(flood, {"kv": list(range(80))}).wait(timeout=60)
        known = {c["id"]: c for c in snapshot(rank.client)}
        assert all(known[one.hex()]["pages"] and known[one.hex()]["file"] for one in ids)
        with other.hold(ids) as hold:
            assert hold.chunks == 6
        assert withdraw(space, ids) == 6
        overwrite(rank, pages)
        reader.fetch(other, ids)


def test_publish_of_invalid_pages_is_refused(daemon):
    ids = chain(4, b"refused")
    with engine(daemon) as (rank, space), engine(daemon, page=128) as (_, long):
        pages = rank.some_pages(4 * T)
        for views, words in (({"kv": pages[:-1] + [rank.pages]}, "page 64 is not below"),
                             ({"kv": pages[:4]}, "must be those of"),
                             ({"kv": kvd.View(pages + [60], tokens=(8, 8 + 4 * T))},
                              "must be those of"),
                             ({"other": pages}, "views")):
            with pytest.raises(kvd.Error, match=words):
                space.publish(ids, views)
        with pytest.raises(kvd.Error, match="inside a page"):
            space.publish(ids[1:], {"kv": kvd.View(pages, first_token=T - 8,
                                                   tokens=(T, 4 * T))}, 1)
        with pytest.raises(kvd.Error, match="EREQUIRE.*one chunk only"):
            long.publish(ids[:2], {"kv": [0]})
        with pytest.raises(kvd.Error, match="ids"):
            space.publish([ids[0], ids[0]], {"kv": pages[:8]}).wait(timeout=60)
        with pytest.raises(ValueError):
            space.withdraw(ids, grace=-1)
        assert published(rank.client) == 0
        # once more the same: it stays where it was
        kept = publish(rank, space, ids)
        move = space.publish(ids, {"kv": rank.some_pages(4 * T, seed=9)})
        move.wait(timeout=60)
        assert (move.show().there, move.show().done) == (4, 4)
        with engine(daemon) as (reader, other):
            reader.fetch(other, ids)
            assert withdraw(other, ids) == 0, "another session's"
            reader.fetch(other, ids)
        overwrite(rank, [p for p in range(rank.pages) if p not in kept])
        assert withdraw(space, ids) == 4


def test_more_than_the_limit_is_left_out(daemon):
    """10^5 are requested: those over the limit of one user are left out, and all are removed
    with their engine."""
    with engine(daemon) as (reader, other):
        with engine(daemon, pages=8192, layers=1) as (rank, space):
            pages, left_out = list(range(8192)), 0
            for n in range(50):
                ids = chain(2048, b"many%d" % n)
                move = space.publish(ids, {"kv": pages})
                move.wait(timeout=60)
                left_out += move.show().left_out
                move.close()
            there = published(rank.client)
            assert there + left_out == 50 * 2048
            assert there == 16384 * 7 // 8  # a bucket of the index for each 4 KiB of memory
            assert withdraw(space, chain(2048, b"many0")) == 2048
        until(lambda: published(reader.client) == 0)
        publish(reader, other, chain(3, b"afterwards"))


@pytest.mark.parametrize("ends", ["unregister", "close"])
def test_pool_removed_removes_its_chunks(daemon, ends):
    ids = chain(8, b"pool")
    with engine(daemon) as (reader, other):
        with engine(daemon) as (rank, space):
            publish(rank, space, ids)
            with other.hold(ids) as hold:
                into = reader.some_pages(8 * T)
                if ends == "close":
                    rank.client.close()
                    until(lambda: not published(reader.client))
                else:
                    rank.pool.unregister()
                    assert not published(reader.client)
                overwrite(rank, list(range(rank.pages)))
                assert _refused(lambda: hold.fetch({"kv": into}), "ENOTFOUND")
                assert not other.find(ids).chunks
                assert (reader.bytes == 0xEE).all()


def test_published_chunks_make_events(client):
    ids = chain(4, b"events")
    rank = Rank(client)
    with rank.space() as space:
        known = Known(client)
        known.read()
        pages = publish(rank, space, ids)
        assert known.read() == {one: {"pages"} for one in ids}
        space.put(ids[:2], {"kv": pages[:8]}).wait(timeout=60)
        assert known.read()[ids[1]] == {"pages", "memory"}
        assert {c["id"]: c["pages"] for c in snapshot(client)} == {
            one.hex(): True for one in ids}
        withdraw(space, ids)
        assert known.read() == {one: {"memory"} for one in ids[:2]}
        space.drop(ids)
        assert known.read() == {}


class Readers:
    """Sessions that hold and fetch without a pause, and verify the result."""

    def __init__(self, path, ids, count=2, remote=None, **args):
        self.path, self.ids, self.args, self.remote = path, ids, args, remote
        self.stop, self.whole, self.less, self.wrong = threading.Event(), 0, 0, []
        self.threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *exc):
        self.stop.set()
        for t in self.threads:
            t.join()
        assert not self.wrong, self.wrong[0]

    def _run(self):
        try:
            with kvd.Client(self.path) as c:
                rank = Rank(c, **self.args)
                with rank.space() as space:
                    while not self.stop.is_set():
                        self.one(rank, space)
        except Exception as error:  # pylint: disable=broad-except
            self.wrong.append(error)

    def one(self, rank, space):
        with space.hold(self.ids, remote=self.remote) as hold:
            if not hold.chunks:
                self.less += 1
                return
            pages = rank.some_pages(hold.tokens)
            move = hold.fetch({"kv": kvd.View(pages, tokens=(0, hold.tokens))})
            failed = None
            try:
                move.wait(timeout=60)
            except kvd.Error as error:
                failed = error
            got = move.show().prefix_tokens
            assert right(rank, pages, self.ids, got), (got, failed)
            if failed or got < T * len(self.ids):
                self.less += 1
            else:
                self.whole += 1
            if failed and failed.code != "ENOTFOUND" and not self.remote:
                raise failed


@pytest.mark.parametrize("grace", [0, 0.1])
def test_pages_are_written_right_behind_a_withdrawal(daemon, grace):
    """While others fetch them as fast as they can, with drops now and then."""
    ids = chain(64, b"race%d" % bool(grace))
    words = {"pages": 512, "layers": 4}
    with engine(daemon, **words) as (rank, space), \
            Readers(daemon.socket_path, ids, **words) as readers, \
            engine(daemon) as (_, other):
        rounds, pages = 0, rank.some_pages(64 * T)
        while rounds < 30 or not (readers.whole > 20 and readers.less > 5):
            rank.fill(pages, ids)
            space.publish(ids, {"kv": pages}).wait(timeout=60)
            seen = readers.whole + readers.less
            if rounds % 3 == 1:
                other.drop(ids[20:30], 20)
            elif rounds % 3:
                until(lambda: readers.whole + readers.less > seen or readers.wrong)
            withdraw(space, ids, grace=grace)
            overwrite(rank, pages)
            rounds += 1
            assert not readers.wrong, readers.wrong[0]
        assert published(rank.client) == 0


def engine_of(path, ids, words, pipe):
    """Another process: publishes on request, until it is killed."""
    client = kvd.Client(path)
    rank = Rank(client, **words)
    space = rank.space()
    pages = rank.some_pages(T * len(ids))
    rank.fill(pages, ids)
    stream = Stream(client)
    moves = []
    pipe.send("up")
    while True:
        what = pipe.recv()
        if what == "wait":
            moves.append(space.publish(ids, {"kv": pages}, wait=stream.until(1)))
        elif what == "publish":
            space.publish(ids, {"kv": pages}).wait(timeout=60)
        elif what == "withdraw":
            moves.append(space.withdraw(ids, grace=60))
        pipe.send(what)


@contextlib.contextmanager
def engine_process(path, ids, **words):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine_of, args=(path, ids, words, theirs))
    process.start()

    def tell(what):
        ours.send(what)
        assert ours.poll(60) and ours.recv() == what
    try:
        assert ours.poll(60) and ours.recv() == "up"
        yield process, tell
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("phase", ["wait", "publish", "fetch", "withdraw"])
def test_engine_killed_removes_its_chunks(daemon, phase):
    ids = chain(256, b"kill" + phase.encode())
    words = {"pages": 1024, "layers": 2}
    with engine(daemon, **words) as (rank, space), \
            engine_process(daemon.socket_path, ids, **words) as (process, tell):
        tell("wait" if phase == "wait" else "publish")
        assert space.find(ids).chunks == (0 if phase == "wait" else 256)
        with space.hold(ids) as hold:
            pages = rank.some_pages(256 * T)
            move = None
            if phase in ("fetch", "withdraw"):
                move = hold.fetch({"kv": kvd.View(pages, tokens=(0, 256 * T))})
            if phase == "withdraw":
                tell("withdraw")
            process.kill()
            process.join()
            if move:
                until(lambda: move.state in (kvd.SUCCESS, kvd.FAILED))
                assert right(rank, pages, ids, move.show().prefix_tokens)
        until(lambda: not published(rank.client))
        assert space.find(ids).chunks == 0
        publish(rank, space, ids)
        assert withdraw(space, ids) == 256


@pytest.mark.parametrize("ways", ["shm", "tcp"])
def test_published_chunks_are_fetched_by_other_daemons(ways):
    ids = chain(12, b"remote")
    with daemons(1, ways) as (own, c, (there,), (h,)):
        there_rank, here = Rank(h), Rank(c, page=32, pages=32)
        with there_rank.space() as writer, here.space() as reader:
            pages = publish(there_rank, writer, ids)
            fetched(here, reader, ids, 12, remote=12)
            with reader.hold(ids, remote=10) as hold:
                assert withdraw(writer, ids) == 12
                overwrite(there_rank, pages)
                here.bytes[:] = 0xEE
                with pytest.raises(kvd.Error):
                    hold.fetch({"kv": here.some_pages(12 * T)}).wait(timeout=60)
                assert (here.bytes == 0xEE).all()
            fetched(here, reader, ids, 0, remote=0)
            until(lambda: lent(h) == 0)
            # written at once, while they are read
            with Readers(own.socket_path, ids, remote=1) as readers:
                rounds = 0
                while rounds < 20 or not readers.whole > 5:
                    pages = publish(there_rank, writer, ids)
                    seen = readers.whole + readers.less
                    until(lambda: readers.whole + readers.less > seen or readers.wrong)
                    withdraw(writer, ids, grace=0 if rounds % 2 else 0.05)
                    overwrite(there_rank, pages)
                    rounds += 1
                    assert not readers.wrong, readers.wrong[0]


def test_several_at_another_daemon_have_the_same():
    """Two engines' pages of one rank, and a copy: any of them may be removed."""
    ids = chain(6, b"several")
    with daemons(1) as (_, c, (there,), (h,)):
        here, first = Rank(c), Rank(h)
        with here.space() as reader, first.space() as one, engine(there) as (second, two):
            publish(first, one, ids)
            publish(second, two, ids)
            fetched(here, reader, ids, 6, remote=6)
            assert withdraw(one, ids) == 6
            fetched(here, reader, ids, 6, remote=6)
            two.put(ids, {"kv": second.some_pages(6 * T)}).wait(timeout=60)
            with reader.hold(ids, remote=10) as hold:
                assert withdraw(two, ids) == 6
                overwrite(second, list(range(second.pages)))
                pages = here.some_pages(6 * T)
                hold.fetch({"kv": pages}).wait(timeout=60)
                assert here.holds(pages, ids)


def test_fetch_continues_with_another_holder():
    """The first withdraws while it is read; common chunks are fetched nevertheless."""
    ids, big = chain(560, b"next"), PLAIN.replace("64", "512")
    words = {"pages": 2240, "layers": 4}
    with daemons(2, "tcp", holder=big) as (_, c, _, clients):
        here = Rank(c, **words)
        ranks = [Rank(h, **words) for h in clients]
        with here.space() as reader, ranks[0].space() as first:
            pages = publish(ranks[0], first, ids)
            ranks[1].put(ranks[1].space(), ids[:-1])
            into = here.some_pages(559 * T)
            with reader.hold(ids, remote=10) as hold:
                assert hold.remote == 560
                move = hold.fetch({"kv": kvd.View(into, tokens=(0, 559 * T))})
                until(lambda: move.show().done or move.state == kvd.SUCCESS)
                assert withdraw(first, ids, grace=0) == 560
                overwrite(ranks[0], pages)
                move.wait(timeout=60)
                assert here.holds(into, ids[:-1])


@pytest.mark.parametrize("ways", ["shm", "tcp"])
def test_reader_stalled_delays_withdrawal_until_grace(ways):
    ids, big = chain(560, b"stop"), PLAIN.replace("64", "512")
    words = {"pages": 2240, "layers": 4}
    with daemons(1, ways, holder=big, kind=killed) as (own, c, _, (h,)):
        there, here = Rank(h, **words), Rank(c, **words)
        with there.space() as writer, here.space() as reader:
            pages = publish(there, writer, ids)
            into = here.some_pages(560 * T)
            with reader.hold(ids, remote=10) as hold:
                move = hold.fetch({"kv": kvd.View(into, tokens=(0, 560 * T))})
                until(lambda: h.command("chunk.list")["remote"]["holds"])
                os.kill(own.proc.pid, signal.SIGSTOP)
                try:
                    withdraw(writer, ids, grace=0.01)
                    overwrite(there, pages)
                finally:
                    os.kill(own.proc.pid, signal.SIGCONT)
                until(lambda: move.state in (kvd.SUCCESS, kvd.FAILED))
                assert right(here, into, ids, move.show().prefix_tokens)


def test_withdrawn_chunk_in_file_is_read_from_file(folder):  # noqa: F811
    """The hold was of the pages, and had no need of the file."""
    ids = chain(6, b"file behind")
    with Daemon(conf(folder)) as d, engine(d) as (rank, space):
        durable(rank, space, ids)
    with Daemon(conf(folder)) as d, engine(d) as (rank, space), engine(d) as (reader, other):
        found(other, ids, 6)
        pages = publish(rank, space, ids)
        read = reader.client.command("chunk.list")["files"]["read"]
        with other.hold(ids) as hold:
            assert hold.chunks == 6
            assert reader.client.command("chunk.list")["files"]["read"] == read
            assert withdraw(space, ids) == 6
            overwrite(rank, pages)
            into = reader.some_pages(6 * T, seed=5)
            hold.fetch({"kv": into}).wait(timeout=60)
            assert reader.holds(into, ids)
