# SPDX-License-Identifier: Apache-2.0
"""Index nodes: daemons that receive the list of held chunks, and are queried. Their answers are
hints: the holder itself is queried, and every byte is verified by its id."""
import contextlib

import kvd
from conftest import until
from kvd_daemon import Daemon, free_port
from test_chunk_remote import PLAIN, fetched, lent
from test_chunk_files import killed
from test_chunks import T, Rank, chain


CHAIN = 40  # chunks


class Net:
    """Daemons, of which some are index nodes; all but these send them their chunks."""

    def __init__(self, stack, homes=2, kind=Daemon, more=""):
        self.stack, self.text = stack, ""
        self.homes = [self.daemon(kind, more) for _ in range(homes)]
        self.text = "chunk_index = %s\n" % " ".join(c.endpoint for _, c in self.homes)

    def daemon(self, kind=Daemon, more=""):
        d = self.stack.enter_context(kind(PLAIN + self.text + more))
        client = self.stack.enter_context(kvd.Client(d.socket_path))
        if self.text:
            until(lambda: figure(client, "index_nodes", "up") == len(self.homes))
        return d, client

    def holdings(self):
        return sum(figure(c, "index", "entries") for _, c in self.homes)


def figure(client, which, name):
    return client.command("chunk.list").get(which, {}).get(name, 0)


def stored(stack, client, ids, **words):
    rank = Rank(client, pages=256)
    space = stack.enter_context(rank.space(**words))
    rank.put(space, ids)
    return rank, space


def reader_of(stack, client, **words):
    rank = Rank(client, pages=256)
    return rank, stack.enter_context(rank.space(**words))


def test_chunks_are_found_by_index_nodes():
    ids = chain(CHAIN, b"homes")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (_, a), (_, b), (_, c) = (net.daemon() for _ in range(3))
        stored(stack, a, ids[:13])
        _, writer = stored(stack, b, ids)
        until(lambda: net.holdings() == 13 + CHAIN)
        here, reader = reader_of(stack, c)
        with reader.hold(ids) as hold:
            assert hold.chunks == 0, "nobody was to be asked"
        fetched(here, reader, ids, CHAIN, remote=CHAIN)
        assert figure(c, "index_nodes", "dials") == 2
        here.put(reader, ids[:7])  # chunks after the own ones, from known peers
        fetched(here, reader, ids, CHAIN, remote=CHAIN - 7)
        assert figure(c, "index_nodes", "dials") == 2
        until(lambda: lent(a) == lent(b) == 0)
        writer.drop(ids[20:], first=20)
        until(lambda: net.holdings() == 13 + 20 + 7)
        fetched(here, reader, ids, 20, remote=13)


def test_another_space_is_no_match():
    ids = chain(4, b"space")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (_, a), (_, c) = net.daemon(), net.daemon()
        stored(stack, a, ids, model="n")
        until(lambda: net.holdings() == 4)
        here, reader = reader_of(stack, c)
        fetched(here, reader, ids, 0, remote=0)
        assert figure(c, "index_nodes", "queries") > 0
        assert figure(c, "index_nodes", "dials") == 0


def test_home_is_a_daemon_like_others():
    ids = chain(CHAIN, b"own")
    ports = [free_port() for _ in range(2)]
    with contextlib.ExitStack() as stack:
        # keys have to be known before the daemons are: without them it is simpler
        text = PLAIN + "chunk_index = %s\n" % " ".join(
            "tcp://127.0.0.1:%d" % port for port in ports)
        text += "[peer]\ninsecure = yes\nlisten = tcp://127.0.0.1:%d\n"
        both = [stack.enter_context(Daemon(text % port)) for port in ports]
        for d in both:
            d.expect("insecure: ")
        a, b = (stack.enter_context(kvd.Client(d.socket_path)) for d in both)
        until(lambda: all(figure(c, "index_nodes", "up") == 2 for c in (a, b)))
        stored(stack, a, ids)
        until(lambda: sum(figure(c, "index", "entries") for c in (a, b)) == CHAIN)
        here, reader = reader_of(stack, b)
        fetched(here, reader, ids, CHAIN, remote=CHAIN)
        assert figure(b, "index_nodes", "dials") == 0
        other, again = reader_of(stack, a)  # it receives its own entries, and does not query
        with again.hold(ids + chain(3, b"more"), remote=10) as hold:
            assert (hold.chunks, hold.remote) == (CHAIN, 0)


def test_entries_of_dead_holder_are_removed():
    ids = chain(CHAIN, b"dies")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (one, a), (_, b), (_, c) = net.daemon(killed), net.daemon(), net.daemon()
        stored(stack, b, ids[:25])
        rank = Rank(a, pages=256)
        rank.put(rank.space(), ids)
        until(lambda: net.holdings() == CHAIN + 25)
        one.proc.kill()
        until(lambda: net.holdings() == 25)
        here, reader = reader_of(stack, c)
        fetched(here, reader, ids, 25, remote=25)


def test_index_node_restarted_gets_full_update():
    ids = chain(CHAIN, b"back")
    with contextlib.ExitStack() as stack:
        more = "[peer]\nlisten = tcp://127.0.0.1:%d\n" % free_port()
        net = Net(stack, 1, killed, more)
        home, client = net.homes[0]
        (own, a), (_, c) = net.daemon(), net.daemon()
        stored(stack, a, ids)
        until(lambda: net.holdings() == CHAIN)
        here, reader = reader_of(stack, c)
        home.proc.kill()
        home.wait()
        until(lambda: figure(c, "index_nodes", "up") == 0)
        fetched(here, reader, ids, 0, remote=0)
        home.start().wait_ready()
        client = stack.enter_context(kvd.Client(home.socket_path))
        until(lambda: figure(client, "index", "entries") == CHAIN)
        until(lambda: figure(c, "index_nodes", "up") == 1)
        fetched(here, reader, ids, CHAIN, remote=CHAIN)
        assert figure(a, "index_nodes", "resyncs") == 2


def test_stale_index_entry_is_a_miss():
    ids = chain(CHAIN, b"stale")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (_, a), (_, c) = net.daemon(), net.daemon()
        _, writer = stored(stack, a, ids)
        until(lambda: net.holdings() == CHAIN)
        here, reader = reader_of(stack, c)
        writer.drop(ids[5:], first=5)  # its notes wait for more
        fetched(here, reader, ids, 5, remote=5)
        writer.drop(ids[:5])
        fetched(here, reader, ids, 0, remote=0)


def test_index_node_silent_is_not_awaited():
    ids = chain(CHAIN, b"mute")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (_, a), (_, c) = net.daemon(), net.daemon()
        stored(stack, a, ids)
        until(lambda: net.holdings() == CHAIN)
        here, reader = reader_of(stack, c)
        net.homes[0][0].freeze()
        try:
            with reader.hold(ids, remote=2) as hold:  # the other one names it, too
                assert hold.remote == CHAIN
            assert figure(c, "index_nodes", "timeouts") == 1
        finally:
            net.homes[0][0].thaw()


def test_holder_silent_is_a_miss():
    ids = chain(CHAIN, b"deaf")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (one, a), (_, c) = net.daemon(), net.daemon()
        stored(stack, a, ids)
        until(lambda: net.holdings() == CHAIN)
        here, reader = reader_of(stack, c)
        one.freeze()
        try:
            with reader.hold(ids, remote=0.4) as hold:
                assert hold.chunks == 0
        finally:
            one.thaw()


def test_peers_and_index_nodes_are_queried_together():
    ids = chain(CHAIN, b"both")
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (_, a), (_, b) = net.daemon(), net.daemon()
        _, c = net.daemon(more="chunk_peers = %s\n" % a.endpoint)
        stored(stack, a, ids[:11])
        stored(stack, b, ids)
        until(lambda: net.holdings() == 11 + CHAIN)
        here, reader = reader_of(stack, c)
        with reader.hold(ids, remote=10) as hold:
            assert hold.remote == CHAIN
            until(lambda: (lent(a), lent(b)) == (1, 1))
        assert figure(c, "index_nodes", "dials") == 1


def test_chunks_in_files_are_published_after_start(tmp_path):
    ids = chain(8, b"files")
    text = "chunk_dir = %s\nchunk_dir_size = 256 MiB\n" % tmp_path
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        _, c = net.daemon()
        with contextlib.ExitStack() as first:
            d = first.enter_context(Daemon(PLAIN + text))
            there = Rank(first.enter_context(kvd.Client(d.socket_path)), pages=256)
            writer = first.enter_context(there.space())
            there.fill(pages := there.some_pages(8 * T), ids)
            writer.put(ids, {"kv": pages}, durable=True).wait(timeout=60)
        net.daemon(more=text)
        until(lambda: net.holdings() == 8)
        here, reader = reader_of(stack, c)
        until(lambda: reader.hold(ids, remote=10).remote == 8)
        fetched(here, reader, ids, 8, remote=8)


def test_chunks_without_a_place_are_found():
    ids, anywhere = chain(12, b"no place"), kvd.chunks.ANYWHERE
    with contextlib.ExitStack() as stack:
        net = Net(stack)
        (_, a), (_, c) = net.daemon(), net.daemon()
        rank = Rank(a, pages=256)
        space = stack.enter_context(rank.space())
        pages = rank.some_pages(12 * T)
        rank.fill(pages, ids)
        space.put(ids, {"kv": pages}, first=anywhere).wait(timeout=60)
        until(lambda: net.holdings() == 12)
        here, reader = reader_of(stack, c)
        with reader.hold(ids[5:], first=anywhere, remote=10) as hold:
            assert hold.remote == 7
            got = here.some_pages(7 * T, seed=3)
            hold.fetch({"kv": got}).wait(timeout=60)
            assert here.holds(got, ids[5:])
        with reader.hold(ids, remote=10) as hold:  # named, and not there
            assert (hold.chunks, hold.remote) == (0, 0)
