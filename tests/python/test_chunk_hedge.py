# SPDX-License-Identifier: Apache-2.0
"""Fetches from a daemon that is late, with another one that holds the same. Every byte is judged
by its id. A holder is late because it is stopped: its peers take it for alive for 20 s."""
import contextlib
import os
import signal
import subprocess
import tempfile

import pytest

import kvd
from conftest import until
from kvd_daemon import BUILD, Daemon
from test_chunk_remote import PLAIN, asking, daemons, lent
from test_chunk_files import killed
from test_chunks import T, Rank, chain

# less than until the peering with a stopped daemon ends, but for sanitizers
SOON_S = 15 if os.path.basename(BUILD) == "rel" else 60


@contextlib.contextmanager
def late(daemon):
    daemon.freeze()
    try:
        yield
    finally:
        daemon.proc.send_signal(signal.SIGCONT)


def remote(client):
    return client.command("chunk.list")["remote"]


def put_all(clients, ids, **shape):
    """The first has a chunk more, so it is asked first. -> the ids that all have"""
    for i, h in enumerate(clients):
        rank = Rank(h, **shape)
        rank.put(rank.space(), ids[:len(ids) - i])
    return ids[:len(ids) - len(clients) + 1]


@pytest.mark.parametrize("ways", ["shm", "tcp"])
def test_late_chunks_are_read_from_other_holder(ways):
    ids = chain(13, b"late")
    with daemons(2, ways) as (_, c, (first, _), clients):
        both, here = put_all(clients, ids), Rank(c, page=32, pages=32)
        with here.space() as reader:
            pages = here.some_pages(T * len(both))
            with reader.hold(ids, remote=10) as hold, late(first):
                assert hold.remote == 13
                hold.fetch({"kv": kvd.View(pages, tokens=(0, T * len(both)))}).wait(
                    timeout=SOON_S)
                assert here.holds(pages, both)
                told = remote(c)
                assert (told["hedges"], told["hedges_won"], told["retries"]) == (1, 1, 0)
                here.bytes[:] = 0x5A  # the pages are the engine's
            until(lambda: not any(lent(h) for h in clients))
            assert (here.bytes == 0x5A).all(), "written behind the end"
            here.fetch(reader, both)  # they have stayed here


def test_late_amid_a_leg():
    """Stopped when some has landed: more legs than one, of which some are late."""
    ids, big = chain(561, b"amid"), PLAIN.replace("64", "512")
    with daemons(2, "tcp", holder=big, own=big) as (_, c, (first, _), clients):
        both, here = put_all(clients, ids, pages=2244, layers=4), Rank(c, pages=2244, layers=4)
        with here.space() as reader, reader.hold(ids, remote=10) as hold:
            pages = here.some_pages(T * len(both))
            move = hold.fetch({"kv": kvd.View(pages, tokens=(0, T * len(both)))})
            until(lambda: move.show().done or move.state == kvd.SUCCESS)
            with late(first):
                move.wait(timeout=SOON_S)
                assert here.holds(pages, both)
                here.bytes[:] = 0x5A
            hold.close()
            until(lambda: not any(lent(h) for h in clients))
            assert (here.bytes == 0x5A).all(), "written behind the end"


def test_both_are_late():
    ids = chain(13, b"both")
    with daemons(2, "tcp") as (_, c, holders, clients):
        both, here = put_all(clients, ids), Rank(c)
        views = {"kv": kvd.View(here.some_pages(T * len(both)), tokens=(0, T * len(both)))}
        with here.space() as reader, reader.hold(ids, remote=10) as hold:
            with late(holders[0]), late(holders[1]):
                move = hold.fetch(views, deadline=2)
                with pytest.raises(kvd.Error, match="deadline"):
                    move.wait(timeout=SOON_S)
                assert move.show().prefix_tokens == 0
                assert (remote(c)["hedges"], remote(c)["hedges_won"]) == (1, 0)
            hold.fetch(views).wait(timeout=60)  # both serve on
            assert here.holds(views["kv"].pages, both)
            assert remote(c)["retries"] == 0


@pytest.mark.parametrize("dies", [0, 1])
def test_holder_killed_during_hedge(dies):
    ids = chain(13, b"dies%d" % dies)
    with daemons(2, "tcp", kind=killed) as (own, c, holders, clients):
        own.expect("its chunks are fetched from another")
        both, here = put_all(clients, ids), Rank(c)
        pages = here.some_pages(T * len(both))
        with here.space() as reader, reader.hold(ids, remote=10) as hold:
            with late(holders[0]), late(holders[1]):
                move = hold.fetch({"kv": kvd.View(pages, tokens=(0, T * len(both)))})
                until(lambda: remote(c)["hedges"] == 1)
                holders[dies].proc.kill()
                holders[dies].proc.wait()
            move.wait(timeout=SOON_S)
            assert here.holds(pages, both)
            assert remote(c)["hedges_won"] == 0


def test_chunk_without_space_is_not_hedged():
    """Two legs of 128 chunks each: as many as fit the memory, but for those that are held."""
    ids, near = chain(257, b"room"), chain(50, b"near")
    with daemons(2, "tcp", holder=PLAIN.replace("64", "256"),
                 own=PLAIN.replace("64", "32")) as (_, c, (first, _), clients):
        shape = {"pages": 1028, "layers": 4}
        both, here = put_all(clients, ids, **shape), Rank(c, **shape)
        with here.space() as reader:
            here.put(reader, near)
            with reader.hold(near), reader.hold(ids, remote=10) as hold, late(first):
                pages = here.some_pages(T * len(both))
                move = hold.fetch({"kv": kvd.View(pages, tokens=(0, T * len(both)))})
                with pytest.raises(kvd.Error):
                    move.wait(timeout=3)
                assert remote(c)["hedges"] == 0
                assert reader.find(near).chunks == 50
                first.proc.send_signal(signal.SIGCONT)
                move.wait(timeout=60)
                assert here.holds(pages, both)
                here.fetch(reader, near)


def test_no_hedge_where_it_is_not_wanted():
    ids = chain(13, b"unwanted")
    with daemons(2, "tcp", own=PLAIN + "chunk_hedge = no\n") as (_, c, (first, _), clients):
        both, here = put_all(clients, ids), Rank(c)
        pages = here.some_pages(T * len(both))
        with here.space() as reader, reader.hold(ids, remote=10) as hold, late(first):
            move = hold.fetch({"kv": kvd.View(pages, tokens=(0, T * len(both)))}, deadline=3)
            with pytest.raises(kvd.Error, match="deadline"):
                move.wait(timeout=SOON_S)
            assert remote(c)["hedges"] == 0


# ---- a link that is slow ----

IN = ("nsenter", "--net=/proc/%d/ns/net", "--")


def inside(pid, *command):
    done = subprocess.run((IN[0], IN[1] % pid, IN[2], *command), capture_output=True, text=True,
                          check=False)
    if done.returncode:
        pytest.skip("network namespaces with a veth and tc tbf: %s" % done.stderr.strip())


@contextlib.contextmanager
def namespace():
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as cat:
        try:
            cat.stdin.write(b"there\n")
            cat.stdin.flush()
            if cat.stdout.readline() != b"there\n":
                pytest.skip("root, for network namespaces")
            yield cat.pid
        finally:
            cat.kill()


@contextlib.contextmanager
def slow_link():
    """Two namespaces; the second sends at two megabits a second. -> their pids"""
    with namespace() as a, namespace() as b:
        inside(a, "ip", "link", "add", "name", "e0", "type", "veth", "peer", "name", "e0", "netns",
               str(b))
        for pid, address in ((a, "10.77.9.1/24"), (b, "10.77.9.2/24")):
            inside(pid, "ip", "link", "set", "lo", "up")
            inside(pid, "ip", "address", "add", address, "dev", "e0")
            inside(pid, "ip", "link", "set", "e0", "up")
        inside(b, "tc", "qdisc", "add", "dev", "e0", "root", "tbf", "rate", "2mbit", "burst",
               "32k", "latency", "400ms")
        yield a, b


def test_slow_link_is_passed_by():
    ids = chain(25, b"link")
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(slow_link())

        def daemon(pid, host, port, chunks):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-test-"))
            text = "[peer]\nlisten = tcp://10.77.9.%d:%d\ninsecure = yes\n%s" % (host, port, chunks)
            own = stack.enter_context(Daemon(
                text + "[transport]\nrequire = tcp\n", run_dir=folder, log_dir=folder,
                wrapper=(IN[0], IN[1] % pid, IN[2])))
            own.expect("insecure: any host that can connect")
            return stack.enter_context(kvd.Client(own.socket_path))

        clients = [daemon(b, 2, 7400, PLAIN), daemon(a, 1, 7400, PLAIN)]
        both = put_all(clients, ids, pages=100, layers=4)
        c = daemon(a, 1, 7401, asking(*(h.endpoint for h in clients)))
        until(lambda: sum(p["state"] == "up" for p in c.command("peer.list")["peers"]) >= 2)
        here = Rank(c, pages=100, layers=4)
        with here.space() as reader, reader.hold(ids, remote=10) as hold:
            assert hold.remote == len(ids)
            pages = here.some_pages(T * len(both))
            hold.fetch({"kv": kvd.View(pages, tokens=(0, T * len(both)))}).wait(timeout=SOON_S)
            assert here.holds(pages, both)
            assert (remote(c)["hedges"], remote(c)["hedges_won"]) == (1, 1)
            here.bytes[:] = 0x5A
            hold.close()
            until(lambda: not any(lent(h) for h in clients))
            assert (here.bytes == 0x5A).all(), "written behind the end"
