# SPDX-License-Identifier: Apache-2.0
"""Chunks of other daemons: the holders are queried, their chunks are fetched, and a fetch ends
when they die. Every byte is verified by its id."""
import contextlib
import os
import signal

import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from test_chunk_files import killed
from test_chunks import T, Rank, chain

PLAIN = "[chunks]\nchunk_memory = 64 MiB\n"


def asking(*holders, more="", own=PLAIN):
    return "%schunk_peers = %s\n%s" % (own, " ".join(holders), more)


@contextlib.contextmanager
def daemons(count, ways=None, holder=PLAIN, kind=Daemon, own=PLAIN):
    """A requesting daemon, and its holders, each with a client; ways: the transports between
    them."""
    more = "[transport]\nrequire = %s\n" % ways if ways else ""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(kind(holder)) for _ in range(count)]
        clients = [stack.enter_context(kvd.Client(d.socket_path)) for d in holders]
        own = stack.enter_context(Daemon(asking(*(c.endpoint for c in clients), more=more,
                                                own=own)))
        client = stack.enter_context(kvd.Client(own.socket_path))
        until(lambda: sum(p["state"] == "up" for p in client.command("peer.list")["peers"])
              >= count)
        yield own, client, holders, clients


def fetched(rank, space, ids, chunks, remote):
    pages = rank.some_pages(T * len(ids), seed=3)
    with space.hold(ids, remote=10) as hold:
        assert (hold.chunks, hold.remote) == (chunks, remote)
        assert hold.tokens == chunks * T
        if chunks:
            hold.fetch({"kv": kvd.View(pages, tokens=(0, hold.tokens))}).wait(timeout=60)
            assert rank.holds(pages, ids[:chunks])


def lent(client):
    return client.command("chunk.list")["remote"]["holds"]


@pytest.mark.parametrize("ways", ["shm", "tcp"])
def test_chunks_of_another_daemon_are_fetched(ways):
    ids = chain(12, b"remote")
    with daemons(1, ways) as (_, c, _, (h,)):
        there, here = Rank(h), Rank(c, page=32, pages=32)
        with there.space() as writer, here.space() as reader:
            there.put(writer, ids)
            assert reader.find(ids).chunks == 0
            with reader.hold(ids) as hold:
                assert (hold.chunks, hold.remote) == (0, 0), "nobody was to be asked"
            fetched(here, reader, ids, 12, remote=12)
            if ways == "shm":  # own chunks first, then the following ones
                here.put(reader, ids[:5])
                fetched(here, reader, ids, 12, remote=7)
            until(lambda: lent(h) == 0)


def test_chunks_without_a_place_are_fetched():
    ids, anywhere = chain(12, b"remote anywhere"), kvd.chunks.ANYWHERE
    with daemons(1) as (_, c, _, (h,)):
        there, here = Rank(h), Rank(c, page=32, pages=32)
        with there.space() as writer, here.space() as reader:
            there.fill(pages := there.some_pages(12 * T), ids)
            writer.put(ids, {"kv": pages}, anywhere).wait(timeout=60)
            here.fill(pages := here.some_pages(2 * T), ids[3:5])
            reader.put(ids[3:5], {"kv": pages}, anywhere).wait(timeout=60)
            here.bytes[:] = 0xEE
            with reader.hold(ids[3:11], anywhere, remote=10) as hold:
                assert (hold.chunks, hold.remote) == (8, 6)
                pages = here.some_pages(7 * T, seed=3)
                hold.fetch({"kv": kvd.View(pages, tokens=(T, 8 * T), first_token=T)}).wait(
                    timeout=60)
                assert here.holds(pages, ids[4:11])
            with reader.hold(ids, remote=10) as hold:
                assert hold.chunks == 0


def test_two_ranks_there_fill_one_here():
    ids = chain(6, b"ranks")
    with daemons(1) as (_, c, _, (h,)):
        halves = [Rank(h, tp=2, rank=r, order=kvd.HND) for r in range(2)]
        here = Rank(c)
        with halves[0].space() as w0, halves[1].space() as w1, here.space() as reader:
            halves[0].put(w0, ids)
            fetched(here, reader, ids, 0, remote=0)  # one half of the heads is no chunk
            halves[1].put(w1, ids[:4])
            fetched(here, reader, ids, 4, remote=4)


def test_holder_with_most_chunks_is_kept_and_others_released():
    ids = chain(9, b"most")
    with daemons(3) as (_, c, _, clients):
        here = Rank(c)
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(here.space())
            for h, n in zip(clients, (3, 9, 5)):
                rank = Rank(h)
                rank.put(stack.enter_context(rank.space()), ids[:n])
            with reader.hold(ids, remote=10) as hold:
                assert (hold.chunks, hold.remote) == (9, 9)
                peers = {p["endpoint"]: p["instance"] for p in c.command("peer.list")["peers"]}
                assert [(h.peer.hex(), h.chunks, h.tokens) for h in hold.holders()] == [
                    (peers[clients[i].endpoint], n, n * T) for i, n in ((1, 9), (2, 5))]
                until(lambda: [lent(h) for h in clients] == [0, 1, 1])
            until(lambda: [lent(h) for h in clients] == [0, 0, 0])


def test_hold_there_keeps_chunks_until_it_ends():
    ids = chain(8, b"keep")
    with daemons(1) as (_, c, _, (h,)):
        there, here = Rank(h, pages=256, layers=4), Rank(c, pages=256, layers=4)
        with there.space() as writer, here.space() as reader:
            there.put(writer, ids)
            with reader.hold(ids, remote=10) as hold:
                for i in range(20):  # more than the memory there
                    there.put(writer, chain(20, b"flood%d" % i), seed=i)
                pages = here.some_pages(8 * T)
                hold.fetch({"kv": kvd.View(pages, tokens=(0, 8 * T))}).wait(timeout=60)
                assert here.holds(pages, ids)


def test_other_session_joins_remote_hold():
    ids = chain(4, b"join")
    with daemons(1) as (own, c, _, (h,)):
        there, here = Rank(h), Rank(c)
        with there.space() as writer, here.space() as reader:
            there.put(writer, ids)
            hold = reader.hold(ids, remote=10)
            with kvd.Client(own.socket_path) as other:
                rank = Rank(other)
                with rank.space() as space, space.join(hold.secret) as joined:
                    assert (joined.chunks, joined.remote) == (4, 4)
                    assert joined.holders() == hold.holders() != ()
                    hold.close()
                    pages = rank.some_pages(4 * T)
                    joined.fetch({"kv": kvd.View(pages, tokens=(0, 4 * T))}).wait(timeout=60)
                    assert rank.holds(pages, ids)
            until(lambda: lent(h) == 0)


def test_part_in_a_file_there_is_read_for_others(tmp_path):
    ids = chain(8, b"file")
    holder = PLAIN + "chunk_dir = %s\nchunk_dir_size = 256 MiB\n" % tmp_path
    with daemons(1, holder=holder) as (_, c, _, (h,)):
        there, here = Rank(h, pages=256, layers=4), Rank(c, pages=256, layers=4)
        with there.space() as writer, here.space() as reader:
            there.fill(pages := there.some_pages(8 * T), ids)
            writer.put(ids, {"kv": pages}, durable=True).wait(timeout=60)
            for i in range(20):
                there.put(writer, chain(20, b"push%d" % i), seed=i)
            before = h.command("chunk.list")["files"]["read"]
            fetched(here, reader, ids, 8, remote=8)
            assert h.command("chunk.list")["files"]["read"] > before


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_holder_killed_is_replaced_by_the_other(when):
    """The first has one more chunk, so it is queried first; common chunks are fetched."""
    ids, big = chain(560, b"kill"), PLAIN.replace("64", "512")
    with daemons(2, "tcp", holder=big, kind=killed) as (own, c, holders, clients):
        here = Rank(c, pages=2240, layers=4)
        with here.space() as reader:
            for i, h in enumerate(clients):
                rank = Rank(h, pages=2240, layers=4)
                rank.put(rank.space(), ids[:560 - i])
            whole = ids.pop()
            pages, views = here.some_pages(559 * T), {}
            views["kv"] = kvd.View(pages, tokens=(0, 559 * T))
            with reader.hold([*ids, whole], remote=10) as hold:
                assert hold.remote == 560
                own.expect("its chunks are fetched from another")
                if when == "before":
                    holders[0].proc.kill()
                move = hold.fetch(views)
                if when == "meanwhile":
                    until(lambda: move.show().done or move.state == kvd.SUCCESS)
                    holders[0].proc.kill()
                move.wait(timeout=60)
                assert here.holds(pages, ids)
                here.bytes[:] = 0
                holders[1].proc.kill()
                with pytest.raises(kvd.Error):
                    hold.fetch(views).wait(timeout=60)
                assert not here.bytes.any()
            with reader.hold(ids, remote=1) as hold:
                assert hold.chunks == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_only_holder_gone_fails_fetch_at_once(end):
    """The known state of the peer ends the fetch, not the 10 minutes of connect_timeout."""
    ids = chain(4, b"lone")
    own = "[peer]\nconnect_timeout = 10 min\ndead_after = 5 s\n" + PLAIN
    kind = killed if end == signal.SIGKILL else Daemon
    with daemons(1, "tcp", own=own, kind=kind) as (_, c, (there,), (h,)):
        rank, here = Rank(h), Rank(c)
        with here.space() as reader:
            rank.put(rank.space(), ids)
            pages = here.some_pages(T * len(ids))
            here.bytes[:] = 0
            views = {"kv": kvd.View(pages, tokens=(0, T * len(ids)))}
            with reader.hold(ids, remote=10) as hold:
                assert hold.remote == len(ids)
                os.kill(there.proc.pid, end)
                try:
                    move = hold.fetch(views)
                    with pytest.raises(kvd.Error):
                        move.wait(timeout=120)
                    assert move.state == kvd.FAILED
                    assert not here.bytes.any()
                finally:
                    if end == signal.SIGSTOP:
                        os.kill(there.proc.pid, signal.SIGCONT)


def test_daemon_silent_is_a_miss():
    ids = chain(4, b"still")
    with daemons(1) as (_, c, (there,), (h,)):
        rank, here = Rank(h), Rank(c)
        with here.space() as reader:
            rank.put(rank.space(), ids)
            os.kill(there.proc.pid, signal.SIGSTOP)
            try:
                with reader.hold(ids, remote=0.2) as hold:
                    assert hold.chunks == 0
            finally:
                os.kill(there.proc.pid, signal.SIGCONT)
            # its later answers are released
            until(lambda: h.command("chunk.list")["remote"]["holds_total"] > 0 and lent(h) == 0)


def test_another_model_s_chunks_are_no_match():
    ids = chain(4, b"model")
    with daemons(1) as (_, c, _, (h,)):
        there, here = Rank(h), Rank(c)
        with there.space(model="n") as writer, here.space() as reader:
            there.put(writer, ids)
            fetched(here, reader, ids, 0, remote=0)


def test_engine_closed_releases_remote_hold():
    ids = chain(4, b"leave")
    with daemons(1) as (own, _, _, (h,)):
        there = Rank(h)
        there.put(there.space(), ids)
        with kvd.Client(own.socket_path) as c:
            here = Rank(c)
            hold = here.space().hold(ids, remote=10)
            assert hold.remote == 4
            assert lent(h) == 1
        until(lambda: lent(h) == 0)
