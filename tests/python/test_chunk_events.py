# SPDX-License-Identifier: Apache-2.0
"""Events of chunks: a reader's view equals the actual state, for any missed events."""
import kvd
import pytest
from conftest import until
from kvd_daemon import Daemon
from test_chunk_files import conf, durable, folder, scanned  # noqa: F401
from test_chunks import Rank, chain

CONF = "[chunks]\nchunk_memory = 64 MiB\n"


class Known:
    """A router's picture: tiers of each id."""

    def __init__(self, client):
        self.reader, self.there, self.wholes = client.chunk_events(), {}, 0

    def read(self):
        whole, events = self.reader.read()
        if whole:
            self.there, self.wholes = {}, self.wholes + 1
        last = 0
        for e in events:
            assert whole or e.seq > last
            last = e.seq
            tiers = self.there.setdefault(e.id, set())
            if e.put:
                tiers.add(e.tier)
            else:
                tiers.remove(e.tier)  # it was there
            if not tiers:
                del self.there[e.id]
        return self.there


def snapshot(client, **args):
    chunks, at = [], 0
    while True:
        page = client.command("chunk.snapshot", at=at, **args)
        chunks, at = chunks + page["chunks"], page["next"]
        if not at:
            return chunks


@pytest.fixture
def client():
    with Daemon(CONF) as d, kvd.Client(d.socket_path) as c:
        yield c


def test_chunks_added_and_removed_make_events(client):
    ids = chain(9, b"events")
    rank = Rank(client)
    with rank.space() as space:
        known = Known(client)
        assert known.read() == {} and known.wholes == 1
        rank.put(space, ids)
        whole, events = known.reader.read()
        assert not whole
        assert [(e.id, e.first, e.tokens, e.tier, e.put) for e in events] == \
            [(one, i, space.tokens, "memory", True) for i, one in enumerate(ids)]
        spaces = client.command("chunk.list")["spaces"]
        assert {e.space for e in events} == {s["digest"] for s in spaces}
        assert known.reader.read() == (False, [])
        space.drop(ids[4:], first=4)
        whole, events = known.reader.read()
        assert not whole and {e.id for e in events} == set(ids[4:])
        assert not any(e.put for e in events)
        rank.put(space, ids)
        again = Known(client)
        assert set(again.read()) == set(ids) and again.wholes == 1
        assert len(known.reader.read()[1]) == 5


def test_events_of_one_space_are_selected(client):
    ids = chain(3, b"one")
    rank = Rank(client)
    with rank.space() as space, rank.space(model="n") as other:
        number = client.command("space.open", pool=rank.pool.id, model="n",
                                scheme="sha256", tokens=space.tokens)["space"]
        seq = client.command("chunk.events")["seq"]
        rank.put(space, ids)
        rank.put(other, ids[:2])
        told = client.command("chunk.events", since=seq, space=number)
        assert [e["id"] for e in told["events"]] == [i.hex() for i in ids[:2]]
        assert len(snapshot(client)) == 5
        assert len(snapshot(client, space=number)) == 2
        with pytest.raises(kvd.NotFoundError):
            client.command("chunk.events", space=number + 77)
        with pytest.raises(kvd.InvalidError):
            client.command("chunk.events", instance="ab")


def test_reader_behind_lists_all(client):
    rank = Rank(client, pages=256)
    with rank.space() as space:
        known = Known(client)
        known.read()
        for i in range(70):  # 8192 events and more
            ids = chain(64, b"behind%d" % i)
            rank.put(space, ids)
            space.drop(ids)
        for i in range(6):
            rank.put(space, chain(60, b"stay%d" % i))
        assert known.wholes == 1
        assert set(known.read()) == {
            one for i in range(6) for one in chain(60, b"stay%d" % i)}
        assert known.wholes == 2
        space.drop(chain(60, b"stay0"))
        assert len(known.read()) == 300 and known.wholes == 2


def test_numbers_of_another_time_are_lost(client):
    rank = Rank(client)
    with rank.space() as space:
        known = Known(client)
        known.read()
        rank.put(space, chain(4, b"time"))
        assert len(known.read()) == 4
        space.drop(chain(4, b"time"))
    until(lambda: not client.command("chunk.list")["spaces"])
    told = client.command("chunk.events", since=known.reader._since)
    assert told["lost"] and not told["events"]  # the log was removed with the last space
    for since in (1, 2**53 - 1):
        assert client.command("chunk.events", since=since)["lost"]
    with rank.space() as space:
        rank.put(space, chain(2, b"time"))
        assert set(known.read()) == set(chain(2, b"time")) and known.wholes == 2


def test_files_and_a_new_daemon(folder):  # noqa: F811
    ids = chain(6, b"tiers")
    with Daemon(conf(folder)) as d:
        with kvd.Client(d.socket_path) as c:
            rank, known = Rank(c), Known(c)
            with rank.space() as space:
                known.read()
                durable(rank, space, ids)
                assert known.read() == {one: {"memory", "file"} for one in ids}
                reader = known.reader
    with Daemon(conf(folder)) as d, kvd.Client(d.socket_path) as c:
        scanned(c)
        reader._client = c
        assert known.read() == {one: {"file"} for one in ids} and known.wholes == 2
        rank = Rank(c)
        with rank.space() as space:
            space.hold(ids).close()
            until(lambda: known.read() == {one: {"memory", "file"} for one in ids})
            assert known.wholes == 2


def test_read_failed_loses_no_event(client):
    rank = Rank(client, pages=256)

    class Door:
        """The daemon's first answers, then none."""
        answers = 0

        def command(self, *args, **words):
            if self.answers == 0:
                raise kvd.TimeoutError("none")
            self.answers -= 1
            return client.command(*args, **words)

    with rank.space() as space:
        known = Known(client)
        known.reader._client = door = Door()
        for ids in (chain(64, b"fails%d" % i) for i in range(5)):
            rank.put(space, ids)
        for door.answers in (0, 1):  # the log starts, its list is not available
            with pytest.raises(kvd.TimeoutError):
                known.read()
        door.answers = 100
        assert len(known.read()) == 320 and known.wholes == 1
        for ids in (chain(64, b"fails%d" % i) for i in range(5)):
            space.drop(ids)
        door.answers = 1  # the first page of two
        with pytest.raises(kvd.TimeoutError):
            known.read()
        door.answers = 100
        assert known.read() == {} and known.wholes == 1
