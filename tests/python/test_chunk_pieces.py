# SPDX-License-Identifier: Apache-2.0
"""A prompt in pieces at several daemons: one hold finds all of it, and a fetch reads each piece from
its daemon. Every byte is verified by its id."""
import contextlib
import threading

import pytest

import kvd
from conftest import until
from test_chunk_files import killed
from test_chunk_remote import PLAIN, daemons, lent
from test_chunks import UNIT, T, Rank, chain

PIECES_MAX = 8


def cuts_of(chunks, count):
    """Ends of `count` pieces of unequal length."""
    return [0, *(chunks * (i + 1) // count - (count - 1 - i) % 2 for i in range(count))]


def spread(clients, ids, cuts, **shape):
    """Chunks [cuts[i], cuts[i + 1]) are put at daemon i."""
    for i, client in enumerate(clients):
        rank = Rank(client, **shape)
        rank.put(rank.space(), ids[cuts[i]:cuts[i + 1]], first=cuts[i])


def instances(client, clients):
    peers = {p["endpoint"]: p["instance"] for p in client.command("peer.list")["peers"]}
    return [bytes.fromhex(peers[c.endpoint]) for c in clients]


def fetch(rank, hold, ids, begin, end, seed=3):
    rank.bytes[:] = 0xEE
    pages = rank.some_pages(end - begin, seed)
    first = begin // rank.page * rank.page
    hold.fetch({"kv": kvd.View(pages, first_token=first, tokens=(begin, end))}).wait(timeout=60)
    assert begin % T == 0 and rank.holds(pages, ids[begin // T:-(-end // T)], end - begin)


@pytest.mark.parametrize("count, ways", [(2, "shm"), (2, "tcp"), (3, "tcp"), (7, None)])
def test_pieces_at_several_daemons_are_one_hold(count, ways):
    ids = chain(29, b"pieces %d" % count)
    with contextlib.ExitStack() as stack:
        _, c, _, clients = stack.enter_context(daemons(count, ways))
        cuts = cuts_of(29, count)
        spread(clients, ids, cuts)
        here = Rank(c, page=32, pages=64)
        reader = stack.enter_context(here.space())
        with reader.hold(ids, remote=10) as hold:
            assert (hold.chunks, hold.remote, hold.tokens) == (29, 29, 29 * T)
            assert hold.holders() == tuple(
                kvd.chunks.Holder(peer, a, b - a, (b - a) * T, False)
                for peer, a, b in zip(instances(c, clients), cuts, cuts[1:]))
            assert kvd.chunks.holders_of(hold) == {
                (peer, False): (b - a) * T
                for peer, a, b in zip(instances(c, clients), cuts, cuts[1:])}
            fetch(here, hold, ids, 0, 29 * T)
            middle = cuts[1] - 1
            fetch(here, hold, ids, middle * T, (middle + 2) * T)
            fetch(here, hold, ids, cuts[-2] * T, 29 * T - 7)
        until(lambda: [lent(h) for h in clients] == [0] * count)


@pytest.mark.parametrize("own, there", [
    ((0, 3), ((3, 7), (7, 12))), ((4, 9), ((0, 4), (9, 12))), ((9, 12), ((0, 5), (5, 9)))],
    ids=["first", "middle", "last"])
def test_own_chunks_are_a_piece_at_any_place(own, there):
    ids = chain(12, b"own %d" % own[0])
    with contextlib.ExitStack() as stack:
        _, c, _, clients = stack.enter_context(daemons(2))
        for client, (begin, end) in zip(clients, there):
            rank = Rank(client)
            rank.put(rank.space(), ids[begin:end], first=begin)
        here = Rank(c)
        reader = stack.enter_context(here.space())
        here.put(reader, ids[own[0]:own[1]], first=own[0])
        with reader.hold(ids, remote=10) as hold:
            assert (hold.chunks, hold.remote) == (12, 12 if own[0] else 12 - own[1])
            assert [(h.first, h.first + h.chunks) for h in hold.holders()] == list(there)
            fetch(here, hold, ids, 0, 12 * T)
            away = sum(h.tokens for h in hold.holders())
            assert c.command("chunk.list")["remote"]["bytes"] == \
                away * 2 * here.layers * here.heads * UNIT


def test_gap_ends_the_hold():
    ids = chain(12, b"gap")
    with contextlib.ExitStack() as stack:
        _, c, _, clients = stack.enter_context(daemons(3))
        spread(clients, ids, [0, 4, 8, 12])
        here = Rank(c)
        reader = stack.enter_context(here.space())
        Rank(clients[1]).space().drop(ids[5:6], 5)
        with reader.hold(ids, remote=10) as hold:
            assert (hold.chunks, hold.remote) == (5, 5) and len(hold.holders()) == 2
            fetch(here, hold, ids, 0, 5 * T)
            with pytest.raises(kvd.Error) as told:
                fetch(here, hold, ids, 0, 6 * T)
            assert told.value.code == "ERANGE"
        until(lambda: [lent(h) for h in clients] == [0, 0, 0])


def test_more_pieces_than_a_hold_has_are_left_out():
    ids = chain(12, b"striped")
    with contextlib.ExitStack() as stack:
        _, c, _, clients = stack.enter_context(daemons(2))
        for i, client in enumerate(clients):
            rank = Rank(client)
            space = stack.enter_context(rank.space())
            for n in range(i, 12, 2):
                rank.put(space, ids[n:n + 1], first=n)
        here = Rank(c)
        reader = stack.enter_context(here.space())
        with reader.hold(ids, remote=10) as hold:
            assert (hold.chunks, len(hold.holders())) == (PIECES_MAX, PIECES_MAX)
            fetch(here, hold, ids, 0, PIECES_MAX * T)
        until(lambda: [lent(h) for h in clients] == [0, 0])


def test_piece_is_chosen_when_all_have_replied():
    ids = chain(9, b"slow reply")
    with contextlib.ExitStack() as stack:
        _, c, holders, clients = stack.enter_context(daemons(2))
        for client, count in zip(clients, (3, 9)):
            rank = Rank(client)
            rank.put(rank.space(), ids[:count])
        here, got = Rank(c), []
        reader = stack.enter_context(here.space())
        holders[1].freeze()
        asks = threading.Thread(target=lambda: got.append(reader.hold(ids, remote=20)))
        asks.start()
        try:
            until(lambda: lent(clients[0]) == 1)
        finally:
            holders[1].thaw()
            asks.join()
        assert got[0].chunks == 9
        assert [there.chunks for there in got[0].holders()] == [9, 3]


def test_other_session_joins_all_pieces():
    """The halves of the heads are two ranks', at each daemon."""
    ids = chain(9, b"join pieces")
    with contextlib.ExitStack() as stack:
        own, c, _, clients = stack.enter_context(daemons(2))
        for rank in range(2):
            spread(clients, ids, [0, 4, 9], tp=2, rank=rank, order=kvd.HND)
        other = stack.enter_context(kvd.Client(own.socket_path))
        here = Rank(other)
        with Rank(c).space() as reader, here.space() as joiner:
            with reader.hold(ids, remote=10) as hold:
                with joiner.join(hold.secret) as joined:
                    assert (joined.chunks, joined.remote, joined.tokens) == (9, 9, 9 * T)
                    assert joined.holders() == hold.holders()
                    hold.close()
                    fetch(here, joined, ids, 0, 9 * T)


def test_lease_over_ends_all_pieces():
    ids = chain(8, b"lease pieces")
    with contextlib.ExitStack() as stack:
        _, c, _, clients = stack.enter_context(daemons(2))
        spread(clients, ids, [0, 4, 8])
        here = Rank(c)
        reader = stack.enter_context(here.space())
        with reader.hold(ids, remote=10, lease=0.2) as hold:
            until(lambda: [lent(h) for h in clients] == [0, 0])
            with pytest.raises(kvd.Error) as told:
                fetch(here, hold, ids, 0, 8 * T)
            assert told.value.code == "ELEASE"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_holder_killed_loses_its_piece_alone(lost):
    """The pieces before it are fetched, and it has another holder or none."""
    ids, big = chain(540, b"lost piece"), PLAIN.replace("64", "512")
    shape = {"pages": 2240, "layers": 4}
    with contextlib.ExitStack() as stack:
        own, c, holders, clients = stack.enter_context(
            daemons(3, "tcp", holder=big, kind=killed))
        cuts = [0, 180, 360, 540]
        spread(clients, ids, cuts, **shape)
        here = Rank(c, **shape)
        reader = stack.enter_context(here.space())
        pages = here.some_pages(540 * T)
        views = {"kv": kvd.View(pages, tokens=(0, 540 * T))}
        with reader.hold(ids, remote=10) as hold:
            assert hold.chunks == 540
            holders[lost].proc.kill()
            holders[lost].proc.wait()
            move = hold.fetch(views)
            with pytest.raises(kvd.Error):
                move.wait(timeout=60)
            assert move.show().prefix_tokens == cuts[lost] * T
            assert here.holds(pages, ids[:cuts[lost]], cuts[lost] * T) or not lost


def test_piece_of_a_killed_holder_is_read_from_the_other():
    ids = chain(12, b"second holder")
    with contextlib.ExitStack() as stack:
        own, c, holders, clients = stack.enter_context(daemons(3, "tcp", kind=killed))
        for client, (a, b) in zip(clients, ((0, 4), (4, 12), (4, 10))):
            rank = Rank(client)
            rank.put(rank.space(), ids[a:b], first=a)
        here = Rank(c)
        reader = stack.enter_context(here.space())
        with reader.hold(ids, remote=10) as hold:
            assert [(there.first, there.chunks) for there in hold.holders()] == [
                (0, 4), (4, 8), (4, 6)]
            holders[1].proc.kill()
            holders[1].proc.wait()
            fetch(here, hold, ids, 0, 10 * T)
            fetch(here, hold, ids, 5 * T, 9 * T)
