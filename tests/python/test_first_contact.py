# SPDX-License-Identifier: Apache-2.0
"""First contacts of two daemons, one of which serves two engines with pools of one name and
rooms of one number: which engine's pages arrive, by what the source is named.

KVD_FIRST_CONTACTS=1000: so many, instead of some."""
import collections
import itertools
import os
import secrets

import numpy as np
import pytest

import kvd
from kvd.place import Place
from kvd_daemon import Daemon, Skip
from kvd_etcd import Etcd

CONTACTS = int(os.environ.get("KVD_FIRST_CONTACTS", "12"))
TOGETHER = 25  # contacts of one source daemon
LAYOUT = kvd.Layout.sglang_mha(page_size=4, pages=4, layers=1, kv_heads=1, head_bytes=64)
WAYS = list(itertools.product(("endpoint", "worker", "session"), (False, True), (False, True)))


class Engine:
    """Its bytes are all of one value."""

    def __init__(self, daemon, name, value):
        self.client, self.value = kvd.Client(daemon.socket_path, client=name), value
        self.memory = np.full(sum(LAYOUT.buffers), value, np.uint8)
        region = self.client.register(self.memory)
        offsets = np.cumsum([0, *LAYOUT.buffers[:-1]])
        self.pool = self.client.pool(LAYOUT, [(region, int(o)) for o in offsets])
        if value:
            self.name = "w%d" % value
            Place(self.client, "prefill", self.name).keep()

    def offers(self, room, ticket):
        return self.client.offer(room, self.pool, {"kv": [2]}, ticket=ticket)


def source(engine, by):
    if by == "worker":
        return kvd.Source(group="prefill", worker=engine.name)
    return kvd.Source(engine.client.endpoint,
                      session=engine.client.session if by == "session" else None)


def contact(daemon, engines, room, meant, way):
    """The result: a value of bytes, or the error's code."""
    by, with_ticket, late = way
    tickets = [secrets.token_hex(16) if with_ticket else None for _ in engines]
    if not late:
        offers = [e.offers(room, t) for e, t in zip(engines, tickets)]
    decode = Engine(daemon, "decode", 0)
    pull = decode.client.pull(room, decode.pool, source(engines[meant], by), {"kv": [1]},
                              ticket=tickets[meant])
    if late:
        offers = [e.offers(room, t) for e, t in zip(engines, tickets)]
    try:
        pull.wait(timeout=60)
        got = set(decode.memory[decode.memory != 0])
        assert len(got) == 1
        return int(got.pop())
    except kvd.Error as why:
        if by == "endpoint":
            assert "matching pools" in str(why)
            assert "field session, or its group and worker" in str(why)
        return why.code
    finally:
        for offer in offers:
            offer.abort()
        for offer in offers:
            offer.close()
        decode.client.close()


@pytest.fixture
def config():
    try:
        with Etcd() as etcd:
            yield "[cluster]\ncluster = %s\n" % etcd.url
    except Skip as why:
        pytest.skip(str(why))


def test_first_contact_never_mixes_engines(config):
    counts = collections.Counter()
    for begin in range(0, CONTACTS, TOGETHER):
        with Daemon(config, name="p") as p:
            values = (1, 2) if begin // TOGETHER % 2 else (2, 1)
            engines = [Engine(p, "prefill%d" % v, v) for v in values]
            for n in range(begin, min(begin + TOGETHER, CONTACTS)):
                way, meant = WAYS[n % len(WAYS)], n // len(WAYS) % 2
                with Daemon(config, name="d") as d:
                    came = contact(d, engines, 100 + n, meant, way)
                right = "EINVAL" if way[0] == "endpoint" else engines[meant].value
                counts[way[0], "ticket" if way[1] else "no ticket",
                       "right" if came == right else came] += 1
            for engine in engines:
                engine.client.close()
    for key, count in sorted(counts.items(), key=str):
        print("first contacts: by %s, %s: %s: %d" % (*key, count))
    assert {key[2] for key in counts} == {"right"}, counts
