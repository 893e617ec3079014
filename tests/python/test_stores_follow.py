# SPDX-License-Identifier: Apache-2.0
"""kvd.stores.follow: what an engine publishes of its chunks equals what the daemon has of them, for any
missed events."""
import threading
from collections import namedtuple

import pytest

import kvd
from conftest import until
from kvd.stores import follow
from kvd.stores.follow import FILE, MEMORY, Contents, Follower, Watch
from kvd.stores.space_client import SpaceClient
from kvd_daemon import Daemon
from test_chunk_files import conf, durable, folder, scanned  # noqa: F401
from test_chunks import HEADS, T, UNIT, Rank, chain
from test_vllm_plan import Clock

MEDIA = (), ("mem",), ("disk",), ("mem", "disk")
Event = namedtuple("Event", "id tier put")
Change = namedtuple("Change", "id tier put space")
Names = namedtuple("Names", "model revision scheme rope tokens", defaults=("m", None, "sha256", None, T))


# ---- contents ------------------------------------------------------------------------------

def contents_of(most=9, media=MEDIA, **kw):
    return Contents(media, most, [], **kw)


def took(contents):
    """Its changes, as text"""
    changes, contents.changes[:] = list(contents.changes), []
    return ["%s%s %s" % ("+" if stored else "-", chunk, medium)
            for stored, chunk, medium in changes]


def named(text):
    """[(id, chunk)] of letters"""
    return [(one.encode(), one) for one in text]


def test_known_chunks_alone_are_reported():
    one = contents_of()
    one.know(named("ab"))
    one.read(False, [Event(b"a", "memory", True), Event(b"x", "memory", True)])
    assert took(one) == ["+a mem"]
    one.read(False, [Event(b"b", "file", True), Event(b"a", "memory", False),
                     Event(b"x", "memory", False)])
    assert took(one) == ["+b disk", "-a mem"]


def test_chunk_known_later_is_reported_where_it_is():
    one = contents_of()
    one.read(True, [Event(b"a", "memory", True), Event(b"a", "file", True),
                    Event(b"b", "file", True)])
    assert took(one) == []
    one.know(named("abc"))
    assert took(one) == ["+a mem", "+a disk", "+b disk"]
    one.know(named("abc"))
    assert took(one) == []


def test_media_of_one_name_are_reported_once():
    one = contents_of(media=((), ("s",), ("s",), ("s",)))
    one.know(named("a"))
    one.read(False, [Event(b"a", "memory", True)])
    one.read(False, [Event(b"a", "file", True)])
    one.read(False, [Event(b"a", "memory", False)])
    assert took(one) == ["+a s"]
    one.read(False, [Event(b"a", "file", False)])
    assert took(one) == ["-a s"]


def test_chunk_of_no_text_is_one_that_was_known():
    one = contents_of(most=2)
    one.read(True, [Event(i, "memory", True) for i in (b"a", b"b", b"c")])
    one.know(named("ab"))
    one.know([(b"b", None), (b"x", None)])
    assert took(one) == ["+a mem", "+b mem"] and list(one.known) == [b"a", b"b"]
    one.know(named("c"))
    assert took(one) == ["+c mem", "-a mem"]
    one.know([(b"a", None)])
    assert took(one) == [] and list(one.known) == [b"b", b"c"]


def test_list_is_reported_as_difference_and_parents_first():
    one = contents_of()
    one.know(named("abc"))
    one.read(False, [Event(b"a", "memory", True), Event(b"b", "memory", True)])
    took(one)
    one.read(True, [Event(b"c", "memory", True), Event(b"a", "memory", True)])
    assert took(one) == ["-b mem", "+c mem"]
    one.read(True, ())
    assert took(one) == ["-a mem", "-c mem"]
    one.read(True, [Event(i, "memory", True) for i in (b"c", b"b", b"a")])
    assert took(one) == ["+a mem", "+b mem", "+c mem"]


def test_change_and_its_reverse_in_one_read_are_none():
    one = contents_of()
    one.know(named("a"))
    one.read(False, [Event(b"a", "memory", True), Event(b"a", "memory", False)])
    assert took(one) == []


def test_pages_of_an_engine_are_not_reported():
    one = contents_of()
    one.know(named("a"))
    one.read(False, [Event(b"a", "pages", True)])
    assert took(one) == [] and not one.there


def test_most_recent_prompts_are_known_and_their_first_chunks_longest():
    one = contents_of(most=4)
    one.read(True, [Event(i, "memory", True) for i in (b"a", b"b", b"c", b"d", b"e")])
    one.know(named("abc"))
    one.know(named("d"))
    one.know(named("ab"))
    took(one)
    one.know(named("e"))
    assert took(one) == ["+e mem", "-c mem"] and list(one.known) == [b"d", b"b", b"a", b"e"]
    one.read(False, [Event(b"c", "memory", False)])
    assert took(one) == []


def test_chunks_in_the_daemon_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(follow, "PRESENT", 2)
    one = contents_of()
    one.read(True, [Event(i, "memory", True) for i in (b"a", b"b", b"c")])
    one.read(False, [Event(b"a", "file", True)])
    one.know(named("abc"))
    assert took(one) == ["+a mem", "+a disk", "+b mem"] and one.there == {
        b"a": MEMORY | FILE, b"b": MEMORY}


def test_all_is_reported_again():
    one = contents_of()
    one.know(named("ab"))
    one.read(False, [Event(b"b", "file", True), Event(b"a", "memory", True)])
    took(one)
    one.again()
    assert took(one) == ["+a mem", "+b disk"]


def test_reader_that_may_lose_all_is_told_each_time():
    one = contents_of(forgets=True)
    one.read(True, [Event(b"a", "memory", True)])
    one.know(named("ab"))
    assert took(one) == ["+a mem"]
    one.know(named("ab"))
    assert took(one) == ["+a mem"]
    one.read(False, [Event(b"b", "memory", True), Event(b"a", "file", True)])
    assert took(one) == ["+b mem", "+a disk"]


@pytest.mark.parametrize("whole", [False, True])
def test_engine_that_forgets_removed_chunks_has_to_make_them_known_again(whole):
    def there():
        return [Event(b"a", "memory", True)]

    def gone():
        return [] if whole else [Event(b"a", "memory", False)]
    one = contents_of(forgets=True)
    one.know(named("ab"))
    one.read(False, there())
    one.read(whole, gone())
    assert took(one) == ["+a mem", "-a mem"]
    one.read(whole, there())
    assert took(one) == [] and b"a" not in one.known, "another engine's"
    one.know(named("a"))
    assert took(one) == ["+a mem"]
    one.read(False, [Event(b"a", "file", True), Event(b"a", "memory", False)])
    assert took(one) == ["+a disk", "-a mem"] and b"a" in one.known, "it is in a file"


# ---- a daemon that fails -------------------------------------------------------------------

class Failing:
    """A SpaceClient, and its Watch. fails: an exception of each read; there: ids in memory; news:
    events since the last read."""

    def __init__(self, there):
        self.fails, self.there, self.news = None, there, []

    def ask(self, key, call):
        try:
            return call(self)
        except kvd.Error:
            return None

    def digest(self, layout, names):
        return layout

    def read(self, anew):
        if self.fails is not None:
            raise self.fails
        events, self.news = self.news, []
        return anew, [Change(one, "memory", True, "space") for one in self.there] if anew \
            else events

    def tell(self, words):
        pass

    def close(self):
        pass


def failing(there=(b"a", b"b")):
    """(follower, its daemon), with a known chunk."""
    daemon = Failing(there)
    one = Follower(daemon, MEDIA, clock=Clock(), run=False)
    one.know(("space", None), [b"a"], "a".__getitem__)
    one.step()
    assert one.take() == [(True, "a", "mem")]
    return one, daemon


@pytest.mark.parametrize("forgets", [False, True])
def test_known_chunks_are_not_built_again(forgets):
    """The scheduler's thread builds them. Those that may be forgotten meanwhile are built."""
    one = Follower(Failing([b"a", b"b"]), MEDIA, forgets=forgets, clock=Clock(), run=False)
    built = []

    def chunk(i):
        built.append(i)
        return "ab"[i]
    one.know(("space", None), [b"a"], chunk)
    one.step()
    one.know(("space", None), [b"a", b"b"], chunk)
    one.step()
    assert built == ([0, 0, 1] if forgets else [0, 1])
    assert [change[1] for change in one.take()] == (["a", "a", "b"] if forgets else ["a", "b"])


def test_full_queue_builds_no_chunks(monkeypatch):
    one, _ = failing()
    monkeypatch.setattr(follow, "QUEUED", 0)
    one.know(("space", None), [b"b"], lambda i: pytest.fail("built"))
    assert not one.calls


def test_another_space_does_not_defer_removal():
    one, daemon = failing()
    daemon.fails = kvd.Error("it dies", "ELOST")
    one.know(("other", None), [b"x"], "x".__getitem__)
    one.step()
    one.clock.now += follow.AWAY_S + 1
    one.step()
    assert one.take() == [(False, "a", "mem")]
    daemon.fails = None
    one.step()
    assert one.take() == [(True, "a", "mem")]


def test_events_of_a_failed_step_are_not_lost(monkeypatch):
    one, daemon = failing()
    one.know(("space", None), [b"b"], "b".__getitem__)
    daemon.there, daemon.news = [b"b"], [Change(b"a", "memory", False, "space")]
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(Contents, "read", lambda self, whole, events: 1 / 0)
        one.step()
    one.step()
    assert one.take() == [(True, "b", "mem"), (False, "a", "mem")]


def test_daemon_whose_answers_cannot_be_read_is_away():
    one, daemon = failing()
    daemon.fails = ValueError("no answer")
    for _ in range(2):
        with pytest.raises(ValueError):
            one.step()
        assert one.take() == []
        one.clock.now += follow.AWAY_S / 2
    one.clock.now += 0.1
    with pytest.raises(ValueError):
        one.step()
    assert one.take() == [(False, "a", "mem")]


def test_daemon_that_is_not_asked_is_not_away(monkeypatch):
    one, daemon = failing()
    monkeypatch.setattr(follow, "QUEUED", 0)
    one.clock.now += 60
    one.step()
    monkeypatch.undo()
    daemon.fails = kvd.Error("it was busy", "ENOREPLY")
    one.step()
    assert one.take() == [], "of a daemon that did not answer once"
    one.clock.now += follow.AWAY_S + 0.1
    one.step()
    assert one.take() == [(False, "a", "mem")]


# ---- with a daemon -------------------------------------------------------------------------

def layout_text():
    """Of Rank's space."""
    layout = kvd.Layout()
    layout.buffer(1 << 20)
    layout.view("kv", 16, 4)
    for layer in range(2):
        for name in "kv":
            layout.heads("kv", layer, name, buffer=0, unit_bytes=UNIT, units=HEADS, format="bf16")
    return layout.text()


class Index:
    """A reader of what is published: media of each chunk."""

    def __init__(self, socket, run=False, **kw):
        self.clock, self.there = Clock(), {}
        self.spaces = SpaceClient(lambda: kvd.Client(socket), Watch, clock=self.clock)
        self.follower = Follower(self.spaces, MEDIA, clock=self.clock, run=run, **kw)
        self.layout = layout_text()

    def know(self, ids, names=Names()):
        self.follower.know((self.layout, names), ids, ids.__getitem__)

    def step(self):
        self.follower.step()
        self.take()
        return self.there

    def take(self):
        for stored, chunk, medium in self.follower.take():
            media = self.there.setdefault(chunk, set())
            assert (medium in media) is not stored, "reported twice"
            (media.add if stored else media.remove)(medium)
            if not media:
                del self.there[chunk]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.follower.close()


def all_of(ids, *media):
    return {one: set(media) for one in ids}


def test_put_dropped_and_found_chunks_are_reported():
    ids = chain(9, b"follow")
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c, \
            Index(d.socket_path) as index:
        rank = Rank(c)
        with rank.space() as space, rank.space(model="n") as other:
            rank.put(space, ids[:2])
            index.know(ids[:6])
            assert index.step() == all_of(ids[:2], "mem"), "known after they were put"
            rank.put(space, ids[2:], first=2)
            rank.put(other, ids)
            assert index.step() == all_of(ids[:6], "mem"), "of the known ones of this space"
            space.drop(ids[:3])
            assert index.step() == all_of(ids[3:6], "mem")
            index.know(ids[3:])
            assert index.step() == all_of(ids[3:], "mem"), "another engine's, found"
            index.know(ids[:1], Names(model="n"))
            assert index.step() == {**all_of(ids[3:], "mem"), **all_of(ids[:1], "mem")}
            assert {one["handles"] for one in c.command("chunk.list")["spaces"]} == {1}
            other.drop(ids)
            assert index.step() == all_of(ids[3:], "mem")
            index.follower.forget()
            assert index.step() == {} and not index.follower.contents
            rank.put(space, ids)
            assert index.step() == {}


def test_new_session_lists_all():
    ids = chain(4, b"session")
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c, \
            Index(d.socket_path) as index:
        rank = Rank(c)
        with rank.space() as space:
            rank.put(space, ids[:2])
            index.know(ids)
            assert index.step() == all_of(ids[:2], "mem")
            index.spaces.spaces.clear()  # as a SpaceClient does when its session has ended
            space.drop(ids[:1])
            rank.put(space, ids[2:], first=2)
            assert index.step() == all_of(ids[1:], "mem")


def test_missed_events_are_made_up_for():
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c, \
            Index(d.socket_path) as index:
        rank, stays = Rank(c, pages=256), chain(60, b"stay")
        with rank.space() as space:
            rank.put(space, chain(60, b"goes"))
            index.know(chain(60, b"goes") + stays)
            assert index.step() == all_of(chain(60, b"goes"), "mem")
            space.drop(chain(60, b"goes"))
            for i in range(70):  # 8192 events and more
                ids = chain(64, b"behind%d" % i)
                rank.put(space, ids)
                space.drop(ids)
            rank.put(space, stays)
            assert index.step() == all_of(stays, "mem")


def test_file_is_another_medium_and_outlives_the_daemon(folder):  # noqa: F811
    ids = chain(4, b"disk")
    with Daemon(conf(folder)) as d:
        with kvd.Client(d.socket_path) as c:
            rank = Rank(c)
            with rank.space() as space:
                durable(rank, space, ids)
        with Index(d.socket_path) as index:
            index.know(ids)
            assert index.step() == all_of(ids, "mem", "disk")
            d.proc.kill()
            d.proc.wait()
            index.clock.now += 5
            assert index.step() == all_of(ids, "mem", "disk"), "it may be back soon"
            d.notify.close()
            d.start().wait_ready()
            with kvd.Client(d.socket_path) as c:
                scanned(c)
            index.clock.now += 2

            def disk_alone():
                index.clock.now += 0.5
                return index.step() == all_of(ids, "disk")
            until(disk_alone)


def test_daemon_away_has_no_chunks_until_it_is_back():
    ids = chain(5, b"away")
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c, \
            Index(d.socket_path) as index:
        rank = Rank(c)
        with rank.space() as space:
            rank.put(space, ids)
            index.know(ids)
            assert index.step() == all_of(ids, "mem")
            ask, index.spaces.ask = index.spaces.ask, lambda key, call: None
            for _ in range(2):
                index.clock.now += follow.AWAY_S / 2
                assert index.step() == all_of(ids, "mem")
            index.clock.now += 0.1
            assert index.step() == {}
            assert index.step() == {}
            index.spaces.ask = ask
            assert index.step() == all_of(ids, "mem"), "not only what has changed since"


def test_engine_takes_a_limited_number_in_a_step(monkeypatch):
    monkeypatch.setattr(follow, "QUEUED", 6)
    ids = chain(30, b"limit")
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c, \
            Index(d.socket_path, step_most=3) as index:
        rank = Rank(c, pages=256)
        with rank.space() as space:
            index.know(ids)
            index.step()
            rank.put(space, ids[:10])
            assert len(index.step()) == 3
            rank.put(space, ids[10:20], first=10)
            index.follower.step()
            assert len(index.follower.changes) == 7, "no events are read above the limit"
            for count in (6, 9, 10):
                index.take()
                assert len(index.there) == count
            until(lambda: index.step() == all_of(ids[:20], "mem"))
            for i in range(20):
                index.know(ids[i:i + 1])
            assert len(index.follower.calls) == 6


def test_engine_is_awake_while_events_are_awaited():
    index = Index("/none")
    assert not index.follower.waits()
    index.know(chain(1))
    assert index.follower.waits()
    index.clock.now += follow.WAKE_S
    assert not index.follower.waits()
    index.follower.changes.append((True, None, "mem"))
    assert index.follower.waits()
    index.follower.close()


def test_absent_daemon_is_no_error_and_nothing_waits_for_it():
    with Index("/none/kvd.sock") as index:
        index.know(chain(3))
        for _ in range(3):
            assert index.step() == {}
            index.clock.now += 60


def test_thread_follows_and_survives_faults(monkeypatch, caplog):
    monkeypatch.setattr(follow, "PERIOD_S", 0.01)
    ids = chain(3, b"thread")
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c:
        rank = Rank(c)
        with rank.space() as space, Index(d.socket_path, run=True) as index:
            faults, step = [1, 2, 3], index.follower.step

            def faulty():
                if faults:
                    faults.pop()
                    raise RuntimeError("a fault")
                step()
            index.follower.step = faulty
            index.know(ids)
            rank.put(space, ids)

            def seen():
                index.take()
                return index.there == all_of(ids, "mem")
            until(seen)
            assert caplog.text.count("cannot be read") == 1
            thread = index.follower.thread
            assert thread in threading.enumerate() and thread.daemon
        assert not thread.is_alive()


def test_end_does_not_wait_for_a_long_list(monkeypatch):
    """A list of all chunks takes many calls, in one turn."""
    monkeypatch.setattr(follow, "PERIOD_S", 0.01)
    monkeypatch.setattr(follow, "CALL_S", 0.01)
    begun, ends, closed = threading.Event(), threading.Event(), threading.Event()

    def listing():
        begun.set()
        ends.wait()
        raise kvd.Error("no session", "ELOST")
    spaces = SpaceClient(listing, Watch)
    close, spaces.close = spaces.close, lambda: (close(), closed.set())
    one = Follower(spaces, MEDIA)
    one.know((layout_text(), Names()), [b"a"], "a".__getitem__)
    until(begun.is_set)
    ended = threading.Thread(target=one.close)
    ended.start()
    ended.join(5)
    waited = ended.is_alive()
    ends.set()
    until(closed.is_set)
    assert not waited


@pytest.mark.parametrize("lost", ["digest", "read"])
def test_failed_call_is_repeated_and_lists_all(lost, monkeypatch):
    ids = chain(3, b"fails")
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, kvd.Client(d.socket_path) as c, \
            Index(d.socket_path) as index:
        rank = Rank(c)
        with rank.space() as space:
            rank.put(space, ids)
            index.know(ids)
            call, fails = getattr(Watch, lost), [1]

            def failing(*args):
                if fails and fails.pop():
                    raise kvd.TimeoutError("none")
                return call(*args)
            monkeypatch.setattr(Watch, lost, failing)
            assert index.step() == {}
            index.clock.now += 60
            assert index.step() == all_of(ids, "mem")
