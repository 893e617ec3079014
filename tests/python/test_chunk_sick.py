# SPDX-License-Identifier: Apache-2.0
"""Two daemons hold the same chunks, and only the data port of one is dead: it is alive to its
peers, and a query on the control line waits for a message that never arrives on the data line.
And the only holder is stopped: then a connector's fetch has its own timeout."""
import contextlib
import os
import sys
import tempfile

import pytest

import kvd
from conftest import ROOT, Stopwatch, until
from kvd.stores import hicache
from kvd.vllm import store_worker
from kvd_daemon import Daemon
from test_chunk_remote import daemons
from test_chunk_hedge import late
from test_chunks import T, Rank, chain
from test_sglang_store import MHA, Engine, keys_of, pool_of
from test_vllm_store import T as TOKENS, Side, ids_of, step_of, words_of

sys.path.append(os.path.join(ROOT, "tests", "integration", "faults"))
from world import Net, may_partition  # noqa: E402

FETCHES, WARM, EACH = int(os.environ.get("KVD_SICK_FETCHES", "5")), 10, 4
REMOTE_S = 2
CONFIG = """[daemon]
log_level = info
[peer]
listen = tcp://10.77.%d.2:7400
insecure = yes
[transport]
transports = shm tcp
require = tcp
tcp_listen = tcp://10.77.%d.2:7401
[chunks]
chunk_memory = 128 MiB
"""


@pytest.fixture
def net():
    why = may_partition()
    if why:
        pytest.skip(why)
    one = Net(3, True)
    yield one
    one.close()


@contextlib.contextmanager
def world(net):
    """-> clients: the daemon that asks, the one that gets sick, the healthy one"""
    with contextlib.ExitStack() as stack:
        clients = []
        for i in (1, 2, 0):
            more = "" if i else "chunk_peers = tcp://10.77.1.2:7400 tcp://10.77.2.2:7400\n"
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-test-"))
            daemon = stack.enter_context(Daemon(CONFIG % (i, i) + more, wrapper=net.wrapper(i),
                                                log_dir=folder, patient=False))
            daemon.expect("")
            clients.append(stack.enter_context(kvd.Client(daemon.socket_path)))
        sick, healthy, own = clients
        until(lambda: own.command("chunk.list")["remote"]["up"] == 2)
        yield own, sick, healthy


def silence(net):
    """All packets to and from the second host's data port are dropped."""
    net.ip(net.router, ["rule add %s 10.77.1.2 ipproto tcp %s 7401 blackhole" % way for way in (
        ("to", "dport"), ("from", "sport"), ("from", "dport"), ("to", "sport"))])


def test_dead_data_port_delays_by_one_threshold(net):
    with world(net) as (own, sick, healthy):
        sets = [chain(EACH + 1, b"sick %d" % i) for i in range(WARM + FETCHES)]
        for client, n in ((sick, EACH + 1), (healthy, EACH)):  # so the sick one is asked first
            rank = Rank(client, pages=128)
            with rank.space() as space:
                for ids in sets:
                    rank.put(space, ids[:n])
        here, held, took = Rank(own, pages=128), [], []
        with here.space() as space:
            for i, ids in enumerate(sets):
                if i == WARM:
                    silence(net)
                if i > WARM and FETCHES > 5:  # one a second, where that is what is measured
                    until(lambda last=watch: last.seconds() > 1)
                watch, pages = Stopwatch(), here.some_pages(T * EACH, i)
                with space.hold(ids[:EACH], remote=REMOTE_S) as hold:
                    held.append(watch.seconds())
                    assert hold.remote == EACH
                    hold.fetch({"kv": kvd.View(pages, tokens=(0, T * EACH))}).wait(timeout=60)
                    took.append(watch.seconds())
                    assert here.holds(pages, ids[:EACH])
        remote = own.command("chunk.list")["remote"]
        print("%d fetches: the worst took %.2f s; a hold after the first %.2f s; %s"
              % (FETCHES, max(took[WARM:]), max(held[WARM + 1:]), remote))
        assert max(took[WARM:]) <= 1.5
        assert max(held[WARM + 1:]) <= 0.2
        assert remote["hedges_won"] == 1
        assert remote["suspended"] == 1


@contextlib.contextmanager
def alone(monkeypatch):
    """A daemon, and the only other one that has what is asked for. -> both; connectors' fetches
    have a second"""
    monkeypatch.setattr(store_worker, "FETCH_S", 1.0)
    monkeypatch.setattr(hicache, "FETCH_S", 1.0)
    with daemons(1, "tcp") as (own, _, (holder,), _):
        yield own, holder


def test_load_of_vllm_ends_in_time(monkeypatch):
    words, ids, blocks = words_of("sick"), ids_of("sick", 2), list(range(8))
    with alone(monkeypatch) as (own, holder), Side(holder) as there, Side(own) as here:
        there.write(blocks, 1)
        there.save(words, ids, blocks)
        assert there.results() == ({"a"}, set())
        hold = here.spaces.ask(words, lambda space: space.hold(ids, remote=10))
        assert hold.remote == 2
        with late(holder):
            watch = Stopwatch()
            here.rank.take(step_of(words, hold, blocks, 0, 2 * TOKENS))
            assert here.results() == (set(), {"a"})
            assert 0.5 < watch.seconds() < 3
            assert here.rank.bad_blocks() == set(blocks)


def test_load_of_sglang_ends_in_time(monkeypatch):
    keys = keys_of(6, "sick")
    with alone(monkeypatch) as (own, holder), Engine(holder, pool_of(MHA)) as there, \
            Engine(own, pool_of(MHA), remote=1) as here:
        assert all(there.put(keys))
        assert here.exists(keys) == 6
        with late(holder):
            watch = Stopwatch()
            assert here.get(keys) == 0
            assert watch.seconds() < 5
