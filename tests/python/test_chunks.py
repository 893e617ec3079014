# SPDX-License-Identifier: Apache-2.0
"""The chunk store of a real daemon, with engines of numpy: a chunk's bytes follow from its id,
so any reader verifies every byte, whoever wrote it."""
import contextlib
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon, Skip, need_users
from kvd_space import space_of

T = 64  # tokens of a chunk
UNIT = 64  # bytes of a head of a token
HEADS = 8


def chain(count, seed=b""):
    """Ids as engines make them: each of the one before."""
    ids, last = [], hashlib.sha256(b"chain" + seed).digest()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        ids.append(last)
    return ids


def head_bytes(ids, layer, field, head):
    """The bytes of ids: [token][byte] of one head of their chunks, one after another."""
    at = ((layer * 2 + (field == "v")) * HEADS + head) * T * UNIT // 8
    words = np.arange(at + 1, at + 1 + T * UNIT // 8, dtype=np.uint64)
    words = words * np.uint64(0x9E3779B97F4A7C15) + \
        np.frombuffer(b"".join(one[:8] for one in ids), np.uint64)[:, None]
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8).reshape(-1, UNIT)


class Rank:
    """One rank's cache: K and V of each layer, pages one after another."""

    def __init__(self, client, page=16, pages=64, layers=2, tp=1, rank=0, order=kvd.NHD,
                 fmt="bf16", adopt=None):
        self.client, self.page, self.layers, self.order = client, page, layers, order
        self.heads, self.first = HEADS // tp, rank * (HEADS // tp)
        self.pages, self.rank = pages, rank
        field = pages * page * self.heads * UNIT
        self.memory = kvd.Memory(2 * layers * field)
        self.bytes = self.memory.array()
        self.bytes[:] = 0xEE
        self.layout = kvd.Layout(rank)
        self.layout.buffer(2 * layers * field)
        self.layout.view("kv", page, pages)
        self.fields = {}
        for n, (layer, name) in enumerate((la, f) for la in range(layers) for f in "kv"):
            self.layout.heads("kv", layer, name, order, buffer=0, offset=n * field,
                              unit_bytes=UNIT, units=self.heads, first_unit=self.first,
                              total_units=HEADS, format=fmt)
            at = self.bytes[n * field:(n + 1) * field]
            self.fields[layer, name] = at.reshape(
                (pages, self.heads, page, UNIT)).transpose(0, 2, 1, 3) \
                if order == kvd.HND else at.reshape((pages, page, self.heads, UNIT))
        self.pool = client.pool(self.layout, [client.register(self.memory)],
                                name="kv.%d.%d" % (id(self), rank))

    def some_pages(self, tokens, seed=0):
        return [int(p) for p in np.random.default_rng(seed).permutation(self.pages)
                [:-(-tokens // self.page)]]

    def _each(self, ids):
        for (layer, name), at in self.fields.items():
            for h in range(self.heads):
                yield at[:, :, h, :], head_bytes(ids, layer, name, self.first + h)

    def fill(self, pages, ids):
        whole, rest = divmod(T * len(ids), self.page)
        for at, said in self._each(ids):
            at[pages[:whole]] = said[:whole * self.page].reshape(whole, self.page, UNIT)
            if rest:
                at[pages[whole], :rest] = said[-rest:]

    def holds(self, pages, ids, tokens=None):
        """Do these pages have the bytes of the ids, for so many tokens?"""
        tokens = T * len(ids) if tokens is None else tokens
        return all((at[pages].reshape(-1, UNIT)[:tokens] == said[:tokens]).all()
                   for at, said in self._each(ids))

    def space(self, **words):
        words = {"model": "m", "scheme": "sha256", "tokens": T, **words}
        return space_of(self.client, self.pool, **words)

    def put(self, space, ids, seed=0, first=0):
        pages = self.some_pages(T * len(ids), seed)
        self.fill(pages, ids)
        move = space.put(ids, {"kv": kvd.View(pages, first_token=first * T)}, first)
        move.wait(timeout=60)
        facts = move.show()
        move.close()
        return facts

    def fetch(self, space, ids, seed=1):
        """Every byte judged."""
        pages = self.some_pages(T * len(ids), seed)
        with space.hold(ids) as hold:
            assert hold.chunks == len(ids)
            move = hold.fetch({"kv": kvd.View(pages, tokens=(0, hold.tokens))})
            move.wait(timeout=60)
            move.close()
        assert self.holds(pages, ids)


@pytest.fixture(scope="module")
def daemon():
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d:
        yield d


@pytest.fixture
def client(daemon):
    with kvd.Client(daemon.socket_path) as c:
        yield c


def test_chunks_outlive_their_engine(daemon):
    ids = chain(8, b"outlive")
    with kvd.Client(daemon.socket_path) as c:
        rank = Rank(c)
        with rank.space() as space:
            assert space.find(ids) == (0, 0)
            assert rank.put(space, ids)[:4] == (8, 8, 0, 0)
            assert space.find(ids) == (8, 8 * T)
            assert rank.put(space, ids, seed=2)[:4] == (8, 8, 8, 0), "they are there already"
    with kvd.Client(daemon.socket_path) as c:
        rank = Rank(c, page=32)
        with rank.space() as space:
            assert space.find(ids + chain(1, b"another")) == (8, 8 * T)
            rank.fetch(space, ids)


@pytest.mark.parametrize("tp,page,order", [(1, 16, kvd.NHD), (1, 128, kvd.HND), (2, 16, kvd.HND),
                                           (4, 8, kvd.NHD), (8, 1, kvd.NHD), (4, 64, kvd.HND)])
def test_two_ranks_write_and_others_read(client, tp, page, order):
    """Of another tensor parallelism, page size and head order; none is whole before both
    halves are there."""
    ids = chain(5, b"%d.%d.%s" % (tp, page, order.encode()))
    writers = [Rank(client, tp=2, rank=r, order=kvd.HND) for r in range(2)]
    readers = [Rank(client, page=page, pages=2048 // page, tp=tp, rank=r, order=order)
               for r in range(tp)]
    half = writers[0].space()
    assert writers[0].put(half, ids).done == 5
    assert half.find(ids).chunks == 5
    if tp == 1:
        assert readers[0].space().find(ids).chunks == 0
    writers[1].put(writers[1].space(), ids)
    for reader in readers:
        reader.fetch(reader.space(), ids)


def test_any_difference_is_another_space(client):
    ids = chain(2, b"identity")
    rank = Rank(client)
    rank.put(rank.space(revision="1", rope="yarn"), ids)
    assert rank.space(revision="1", rope="yarn").find(ids).chunks == 2
    for words in ({"revision": "2", "rope": "yarn"}, {"revision": "1"}, {"scheme": "x"},
                  {"model": "n"}, {"tokens": 2 * T}):
        words = {"revision": "1", **words}
        assert rank.space(**words).find(ids).chunks == 0, words
    other = Rank(client, fmt="fp8_e4m3")
    assert other.space(revision="1", rope="yarn").find(ids).chunks == 0


def test_id_at_another_place_is_not_it(client):
    ids = chain(4, b"place")
    rank = Rank(client)
    space = rank.space()
    rank.put(space, ids, first=3)
    assert space.find(ids, 3).chunks == 4
    assert space.find(ids).chunks == 0
    move = space.put(ids, {"kv": rank.some_pages(T * len(ids))})
    move.wait(timeout=60)
    assert (move.show().chunks, move.show().left_out) == (0, 4)
    assert space.find(ids, 3).chunks == 4


def test_ids_without_a_place(daemon, client):
    """Any run of them is found, whichever calls stored them; tokens start with a call's."""
    ids, anywhere = chain(9, b"anywhere"), kvd.chunks.ANYWHERE
    rank = Rank(client)
    space = rank.space()
    for part, seed in ((ids[:4], 0), (ids[3:9], 1)):
        pages = rank.some_pages(T * len(part), seed)
        rank.fill(pages, part)
        move = space.put(part, {"kv": pages}, anywhere)
        move.wait(timeout=60)
        assert (move.show().done, move.show().there) == (len(part), seed)
    for run in (ids, ids[2:6], ids[8:]):
        assert space.find(run, anywhere).chunks == len(run)
        assert space.find(run).chunks == space.find(run, 1).chunks == 0
        with space.hold(run, anywhere) as hold:
            assert (hold.chunks, hold.first) == (len(run), 0)
            rank.bytes[:] = 0xEE
            pages = rank.some_pages(T * len(run), 2)
            hold.fetch({"kv": pages}).wait(timeout=60)
            assert rank.holds(pages, run)
            with kvd.Client(daemon.socket_path) as other:
                joined = Rank(other).space().join(hold.secret)
                assert (joined.chunks, joined.first) == (len(run), 0)
    with pytest.raises(kvd.Error, match="must be those of"):
        space.put(ids[:1], {"kv": kvd.View(pages, first_token=T)}, anywhere)
    space.drop(ids[4:], anywhere)
    assert space.find(ids, anywhere).chunks == 4


def test_last_chunk_may_be_short(client):
    ids = chain(3, b"short")
    rank = Rank(client)
    space = rank.space()
    pages = rank.some_pages(3 * T)
    rank.fill(pages, ids)
    tokens = 2 * T + 10
    move = space.put(ids, {"kv": kvd.View(pages, tokens=(0, tokens))})
    move.wait(timeout=60)
    with space.hold(ids) as hold:
        assert (hold.chunks, hold.tokens) == (3, tokens)
        into = rank.some_pages(3 * T, 7)
        rank.bytes[:] = 0xEE
        hold.fetch({"kv": kvd.View(into, tokens=(0, tokens))}).wait(timeout=60)
        assert rank.holds(into, ids, tokens)
        assert (rank.fields[0, "k"][into[-1]][-1] == 0xEE).all(), "nothing behind its end"
        with pytest.raises(kvd.Error, match="exceed the hold's"):
            hold.fetch({"kv": into})
        # from inside a chunk to inside another
        rank.bytes[:] = 0xEE
        hold.fetch({"kv": kvd.View(into, tokens=(T - 5, T + 5))}).wait(timeout=60)
        got = np.concatenate([rank.fields[1, "v"][p] for p in into])
        want = head_bytes(ids, 1, "v", 0)
        assert (got[T - 5:T + 5, 0] == want[T - 5:T + 5]).all()
        assert (got[:T - 5] == 0xEE).all() and (got[T + 5:] == 0xEE).all()


def test_hold_keeps_and_lease_ends(daemon, client):
    ids = chain(4, b"lease")
    rank = Rank(client)
    space = rank.space()
    rank.put(space, ids)
    hold = space.hold(ids, lease=0.05)
    until(lambda: _refused(lambda: hold.fetch({"kv": rank.some_pages(4 * T)}), "ELEASE"))
    hold.close()
    hold = space.hold(ids, lease=60)
    space.drop(ids)
    assert space.find(ids).chunks == 0
    pages = rank.some_pages(4 * T, 3)
    hold.fetch({"kv": pages}).wait(timeout=60)
    assert rank.holds(pages, ids), "what is held is there though it was dropped"
    hold.close()
    with pytest.raises(kvd.Error, match="closed"):
        hold.fetch({"kv": pages})


def _refused(call, code):
    try:
        call().wait(timeout=60)
    except kvd.Error as error:
        assert error.code == code, error
        return True
    return False


def test_another_session_joins_by_the_secret(daemon, client):
    ids = chain(3, b"join")
    whole = Rank(client)
    whole.put(whole.space(), ids)
    scheduler = client.space(whole.layout, model="m", scheme="sha256", tokens=T)
    hold = scheduler.hold(ids)
    with pytest.raises(ValueError, match="layout alone"):
        hold.fetch({"kv": [0]})
    with kvd.Client(daemon.socket_path) as c:
        worker = Rank(c, tp=2, rank=1)
        space = worker.space()
        with pytest.raises(kvd.NotFoundError):
            space.join(bytes(16))
        joined = space.join(hold.secret)
        assert (joined.chunks, joined.first) == (3, 0)
        hold.close()
        scheduler.drop(ids)
        pages = worker.some_pages(3 * T)
        joined.fetch({"kv": pages}).wait(timeout=60)
        assert worker.holds(pages, ids)


def test_eviction_removes_unrequested_chunks(client):
    """Far more than fits: the repeatedly requested working set stays, and no put ever fails or
    gives wrong bytes."""
    rank = Rank(client, pages=256, layers=4)  # 64 KiB a chunk and head pair: 256 KiB
    space = rank.space(model="eviction")
    hot = chain(20, b"hot")
    rank.put(space, hot)
    for i in range(60):
        assert rank.put(space, chain(8, b"cold%d" % i)).left_out == 0
        if i % 3 == 0:
            assert space.find(hot).chunks == len(hot), i
    rank.fetch(space, hot)
    listed = client.command("chunk.list")
    assert listed["evicted"] > 200 and listed["free_bytes"] < listed["memory_bytes"] / 8


def test_put_with_all_chunks_held_is_left_out(client):
    rank = Rank(client, pages=256, layers=4)
    space = rank.space(model="held")
    with contextlib.ExitStack() as stack:
        held = 0
        while True:
            ids = chain(8, b"held%d" % held)
            rank.put(space, ids)
            try:
                stack.enter_context(space.hold(ids, lease=300))
            except kvd.LimitError as error:
                assert "half of its share" in str(error)
                break
            held += 1
            assert held < 64
        assert held > 8
        for i in range(held):
            assert space.find(chain(8, b"held%d" % i)).chunks == 8
    assert space.hold(chain(8, b"held0")).chunks == 8, "given back"


def test_abort_returns_pages_and_chunks_are_not_found(client):
    ids = chain(8, b"abort")
    rank = Rank(client)
    space = rank.space()
    timeline = kvd.Memory(4096)
    word = timeline.array().view(np.uint64)
    region = client.register(timeline)
    pages = rank.some_pages(8 * T)
    rank.fill(pages, ids)
    move = space.put(ids, {"kv": pages}, wait=(region, 0, 1))
    assert space.find(ids).chunks == 0
    move.abort()
    with pytest.raises(kvd.Error) as why:
        move.wait(timeout=60)
    assert why.value.code == "EABORTED"
    assert space.find(ids).chunks == 0 and move.show().prefix_tokens == 0
    move = space.put(ids, {"kv": pages}, wait=(region, 0, 1))
    assert move.state == kvd.WAITING_FOR_INPUT
    word[0] = 1
    move.wait(timeout=60)
    assert space.find(ids).chunks == 8


def test_posted_moves_and_refusals(client):
    ids = chain(6, b"posted")
    rank = Rank(client)
    space = rank.space()
    pages = rank.some_pages(6 * T)
    rank.fill(pages, ids)
    space.put(ids, {"kv": pages}, post=True).wait(timeout=60)
    with space.hold(ids) as hold:
        into = rank.some_pages(6 * T, 5)
        rank.bytes[:] = 0xEE
        move = hold.fetch({"kv": into}, post=True)
        move.wait(timeout=60)
        assert rank.holds(into, ids)
        assert move.show()[:2] == (6, 6)
        move.close()
        for refused, words in ((hold.fetch({"kv": [0, 0]}, post=True), "twice"),
                               (hold.fetch({"kv": [999]}, post=True), "outside the view"),
                               (space.put(ids, {"kv": pages[:16]}, post=True), "may be short")):
            with pytest.raises(kvd.Error, match=words):
                refused.wait(timeout=60)
            refused.close()
    late = hold_of_closed(space, ids)
    with pytest.raises(kvd.Error):
        late().wait(timeout=60)


def hold_of_closed(space, ids):
    hold = space.hold(ids)
    fetch = hold.fetch
    hold.close()
    return lambda: fetch({"kv": [0]}, post=True)


def test_deadline_of_a_fetch(client):
    ids = chain(2, b"deadline")
    rank = Rank(client)
    space = rank.space()
    rank.put(space, ids)
    timeline = kvd.Memory(4096)
    region = client.register(timeline)
    with space.hold(ids) as hold:
        move = hold.fetch({"kv": rank.some_pages(2 * T)}, wait=(region, 0, 1), deadline=0.05)
        with pytest.raises(kvd.TimeoutError, match="deadline"):
            move.wait(timeout=60)


def test_writer_killed_leaves_no_partial_chunk(daemon, client):
    """Killed at different moments of its put: chunks are there whole or not at all."""
    reader = Rank(client)
    space = reader.space(model="killed")
    for n in range(6):
        child = subprocess.Popen(
            [sys.executable, __file__, daemon.socket_path, str(n)], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        child.stdout.readline()
        threading.Event().wait(0.001 * n)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        until(lambda: client.command("chunk.list")["moves"] == 0)
        for k in range(16):
            ids = chain(12, b"killed%d.%d" % (n, k))
            found = space.find(ids).chunks
            if found:
                reader.fetch(space, ids[:found])


def writer(path, n):
    """Puts until it is killed."""
    with kvd.Client(path) as c:
        rank = Rank(c, pages=1024)
        space = rank.space(model="killed")
        moves = []
        for k in range(16):
            ids = chain(12, b"killed%s.%d" % (n.encode(), k))
            pages = list(range(k * 48, k * 48 + 48))
            rank.fill(pages, ids)
            moves.append((ids, pages))
        print("ready", flush=True)
        while True:
            for ids, pages in moves:
                space.put(ids, {"kv": pages})


def test_many_at_a_time(client):
    """Concurrent puts of the same and of other chunks, and fetches."""
    ranks = [Rank(client, pages=128) for _ in range(4)]
    space = ranks[0].space(model="many")
    spaces = [r.space(model="many") for r in ranks]
    moves = []
    for i in range(12):
        ids = chain(8, b"many%d" % (i % 5))
        rank = ranks[i % 4]
        pages = list(range(32 * (i // 4), 32 * (i // 4) + 32))
        rank.fill(pages, ids)
        moves.append(spaces[i % 4].put(ids, {"kv": pages}))
    for move in moves:
        move.wait(timeout=60)
    for i in range(5):
        ids = chain(8, b"many%d" % i)
        assert space.find(ids).chunks == 8
        ranks[i % 4].fetch(spaces[i % 4], ids, seed=i)


@pytest.mark.parametrize("change,words", [
    (dict(ids=b"x" * 31), "31 bytes"),
    (dict(ids=[b"x" * 31]), r"ids\[0\]"),
    (dict(ids=[]), "ids: 0 bytes"),
    (dict(ids=chain(4097)), "4096"),
    (dict(views={"kv": [0, 1, 2]}), "last may be short"),
    (dict(views={"kv": kvd.View(list(range(8)), first_token=1)}), "last may be short"),
    (dict(views={"kv": kvd.View(list(range(8)), layers=(0, 1))}), "must be all layers"),
    (dict(views={}), "views"),
    (dict(views={"kv": [0, 1, 2, 3, 4, 5, 6, 999]}), "not below the pool"),
    (dict(views={"other": list(range(8))}), "no such view"),
])
def test_invalid_puts_name_the_field(client, change, words):
    rank = Rank(client)
    space = rank.space()
    args = {"ids": chain(2, b"bad"), "views": {"kv": list(range(8))}, **change}
    with pytest.raises((kvd.Error, ValueError, TypeError), match=words):
        space.put(args["ids"], args["views"])
    assert space.find(chain(2, b"bad")).chunks == 0


def test_last_number_of_a_chunk_is_as_files_have_it(client):
    rank = Rank(client)
    space = rank.space()
    last, ids = kvd.chunks.ANYWHERE - 1, chain(2, b"last")
    for count in (2, 1):
        pages = kvd.View(list(range(4 * count)), first_token=last * T)
        with contextlib.ExitStack() as stack:
            if count == 2:
                stack.enter_context(pytest.raises(kvd.Error, match="from chunk 4294967294"))
            space.put(ids[:count], {"kv": pages}, last).wait(timeout=60)
    assert space.find(ids[:1], last).chunks == 1


def test_invalid_spaces_name_the_field(client):
    rank = Rank(client)
    for words, text in (({"tokens": 15}, "16 … 4096"), ({"tokens": 5000}, "16 … 4096"),
                        ({"model": ""}, "model: missing"), ({"model": "a\nb"}, "control"),
                        ({"scheme": "s" * 201}, "scheme"), ({"views": ["no"]}, "no view"),
                        ({"views": ["kv", "kv"]}, "twice")):
        with pytest.raises((kvd.Error, ValueError), match=text):
            rank.space(**words)
    big = Rank(client, page=16, pages=1024, layers=40)
    with pytest.raises(kvd.Error, match="chunk_memory"):
        big.space(tokens=4096)
    other = Rank(client, page=32)
    space = rank.space()
    with pytest.raises(kvd.Error, match="layout differs from"):
        space.put(chain(2), {"kv": [0, 1, 2, 3]}, pool=other.pool)


def test_daemon_without_memory_names_option():
    with Daemon() as d, kvd.Client(d.socket_path) as c:
        with pytest.raises(kvd.StateError, match="set chunk_memory"):
            Rank(c).space(scheme="s")


def test_daemon_ends_while_its_memory_is_made():
    with open("/proc/meminfo") as facts:
        free = next(int(line.split()[1]) for line in facts if line.startswith("MemAvailable"))
    if free < 6 << 20:
        pytest.skip("6 GiB of free memory")
    with Daemon("[chunks]\nchunk_memory = 4 GiB\n") as d, kvd.Client(d.socket_path) as c:
        Rank(c)  # an engine of the same user is served meanwhile


def test_two_users_are_isolated():
    try:
        need_users(65534)
    except Skip as why:
        pytest.skip(str(why))
    with Daemon("[chunks]\nchunk_memory = 32 MiB\n[control]\nsocket_mode = 0666\n"
                "allow_uids = 65534\n") as d:
        os.chmod(d.run_dir, 0o755)
        ids = chain(40, b"users")
        with kvd.Client(d.socket_path) as c:
            rank = Rank(c, pages=256, layers=2)  # 128 KiB a chunk
            space = rank.space()
            rank.put(space, ids)
            child = multiprocessing.get_context("fork").Process(
                target=stranger, args=(d.socket_path,))
            child.start()
            child.join()
            assert child.exitcode == 0
            assert space.find(ids).chunks == 40, "5 of 32 MiB are within a half"
            rank.fetch(space, ids)


def stranger(path):
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with kvd.Client(path) as c:
        rank = Rank(c, pages=256, layers=2)
        space = rank.space()
        assert space.find(chain(40, b"users")).chunks == 0
        assert len(c.command("chunk.list")["spaces"]) == 1
        for i in range(20):
            rank.put(space, chain(30, b"flood%d" % i))


if __name__ == "__main__":
    writer(sys.argv[1], sys.argv[2])
