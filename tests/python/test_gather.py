# SPDX-License-Identifier: Apache-2.0
"""Gathers: fetches of selected tokens. Each is compared with a whole fetch, and nothing else
changes."""
import contextlib
import os
import signal
import threading

import numpy as np
import pytest

import kvd
from conftest import until
from kvd_daemon import Daemon
from kvd_space import space_of
from test_attend import ids_of
from test_chunk_files import killed
from test_chunk_pieces import instances
from test_chunk_remote import asking
from test_chunks import T, Rank, chain
from test_gpu import gpu  # noqa: F401 (a fixture)
from test_splice import LAYERS, PAGE, PAGES, Cache

import fake_gpu

CHUNKS = 9
TOKENS = CHUNKS * PAGE
WAYS = ["shm", "tcp"]


@contextlib.contextmanager
def daemons(holders=1, ways="shm", kind=Daemon):
    """A requesting daemon and its holders, each with a client."""
    plain = "[chunks]\nchunk_memory = 64 MiB\n"
    more = "[transport]\nrequire = %s\n%s" % (ways, fake_gpu.CONFIG)
    with contextlib.ExitStack() as stack:
        there = [stack.enter_context(kind(plain)) for _ in range(holders)]
        clients = [stack.enter_context(kvd.Client(d.socket_path)) for d in there]
        own = stack.enter_context(Daemon(asking(*(c.endpoint for c in clients), more=more,
                                                own=plain)))
        client = stack.enter_context(kvd.Client(own.socket_path))
        until(lambda: sum(p["state"] == "up" for p in client.command("peer.list")["peers"])
              >= holders)
        yield client, clients, there


def stored(client, ids, shape="gqa", seed=1, **more):
    """A cache whose pages 2, 3, … were put."""
    cache = Cache(client, shape, "bf16", **more)
    cache.fill(seed)
    cache.put(ids, list(range(2, 2 + len(ids))))
    return cache


def whole(cache, hold):
    """{(layer, field): [token, head, value]}, by a fetch of all."""
    pages = list(range(hold.chunks))
    hold.fetch({"kv": kvd.View(pages, tokens=(0, hold.tokens))}).wait(timeout=60)
    return {key: array[pages].reshape((-1,) + array.shape[2:]).copy()
            for key, array in cache.arrays.items()}


def judge(cache, exact, before, pages, select, layers=(0, LAYERS), key=None):
    """The selected tokens are in the first places of the pages, and all else is as before."""
    places = [(pages[i // PAGE], i % PAGE) for i in range(len(select))]
    page, slot = (np.array(one) for one in zip(*places))
    for (layer, name), array in cache.arrays.items():
        want = before[layer, name].copy()
        if layers[0] <= layer < layers[1]:
            want[page, slot] = exact[layer, name][np.asarray(select)]
        assert (array.view(np.uint16) == want.view(np.uint16)).all(), (layer, name, len(select))


def some(seed, count, end=TOKENS):
    return np.sort(np.random.default_rng(seed).choice(end, count, replace=False))


SELECTIONS = [[0], [TOKENS - 1], [5, 6, 7, 8], list(range(TOKENS)), list(range(3, TOKENS, 17)),
              [15, 16, 31, 32, 143], some(1, 60), some(2, 100), some(3, 7)]


@pytest.mark.parametrize("order", [kvd.NHD, kvd.HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("shape", ["gqa", "mla"])
@pytest.mark.parametrize("ways", WAYS)
def test_a_gather_has_the_bytes_of_a_fetch(ways, shape, order):
    ids = ids_of(CHUNKS, b"gather")
    with daemons(ways=ways) as (client, (far,), _):
        stored(far, ids, shape)
        here = Cache(client, shape, "bf16", order)
        with here.space.hold(ids, remote=10) as hold:
            assert (hold.chunks, hold.remote) == (CHUNKS, CHUNKS)
            exact = whole(here, hold)
            here.fill(seed=9)
            for i, select in enumerate(SELECTIONS):
                layers = [None, (1, 2), (0, 2), (2, 9)][i % 4]
                pages = np.random.default_rng(i).permutation(PAGES)[:-(-len(select) // PAGE)]
                before = here.copy()
                move = hold.fetch({"kv": kvd.View(pages, layers=layers, select=select)})
                move.wait(timeout=60)
                judge(here, exact, before, pages, select, layers or (0, LAYERS))
                facts, status = move.show(), move.read()
                assert facts.done == facts.chunks and status.bytes == status.total
                rows = len(select) * sum(layers is None or layers[0] <= at < layers[1]
                                         for at in range(LAYERS))
                assert status.total == rows * sum(array[0, 0].nbytes for key, array
                                                  in here.arrays.items() if key[0] == 0)


@pytest.mark.parametrize("ways", WAYS)
def test_a_gather_of_chunks_here_and_at_two_daemons(ways):
    ids = ids_of(CHUNKS, b"pieces")
    with daemons(2, ways) as (client, (one, other), _):
        pieces = [(one, slice(2, 5)), (other, slice(5, CHUNKS))]
        for far, part in pieces:
            cache = Cache(far, "gqa", "bf16")
            cache.fill(seed=part.start)
            at = part.start * PAGE, part.stop * PAGE
            cache.space.put(ids[part], {"kv": kvd.View(list(range(part.stop - part.start)),
                                                       at[0], at)}, part.start).wait(timeout=60)
        here = Cache(client, "gqa", "bf16")
        here.fill(seed=7)
        here.put(ids[:2], [20, 21])
        with here.space.hold(ids, remote=10) as hold:
            assert (hold.chunks, hold.remote) == (CHUNKS, CHUNKS - 2)
            exact = whole(here, hold)
            for select in SELECTIONS:
                pages, before = [19, 3, 8, 1, 5, 9, 11, 14, 17], here.copy()
                hold.fetch({"kv": kvd.View(pages, select=select)}).wait(timeout=60)
                judge(here, exact, before, pages, select)


def test_a_gather_from_many_chunks(monkeypatch):
    """More than a subtransfer has: each of the later ones starts anywhere in a page, and chunks
    without a selected token lie between them."""
    monkeypatch.setattr("test_splice.PAGES", 620)
    ids, end = ids_of(600, b"many"), 600 * PAGE
    few = [3, 40, 41, 4801, 4803, end - 1]
    with daemons() as (client, (far,), _):
        stored(far, ids, "mla")
        here = Cache(client, "mla", "bf16")
        with here.space.hold(ids, remote=10) as hold:
            assert hold.chunks == 600
            exact = whole(here, hold)
            for select in (some(4, 2000, end), few, [3, end - 1], [end - 2, end - 1]):
                pages, before = list(range(400, 401 + len(select) // PAGE)), here.copy()
                move = hold.fetch({"kv": kvd.View(pages, select=select)})
                move.wait(timeout=60)
                judge(here, exact, before, pages, select)
                facts = move.show()
                assert facts.done == facts.chunks and facts.prefix_tokens == \
                    select[-1] + 1 - select[0]


def test_a_failed_gather_names_what_it_has_read():
    ids = ids_of(CHUNKS, b"prefix")
    with daemons(kind=killed) as (client, (far,), (there,)):
        stored(far, ids)
        here = Cache(client, "gqa", "bf16")
        with here.space.hold(ids, remote=10) as hold:
            exact = whole(here, hold)
            here.put(ids[:4], [0, 1, 2, 3])
        with here.space.hold(ids, remote=10, lease=300) as hold:
            assert (hold.chunks, hold.remote) == (CHUNKS, CHUNKS - 4)
            before, select = here.copy(), list(range(5, TOKENS, 3))
            read = [t for t in select if t < 4 * PAGE]
            with waiting(client, hold, select, [20, 22, 21]) as (move, resume):
                os.kill(there.proc.pid, signal.SIGKILL)
                resume()
                with pytest.raises(kvd.Error):
                    move.wait(timeout=60)
            assert move.show().prefix_tokens == 4 * PAGE - 5
            judge(here, exact, before, [20, 22, 21], read)


def test_layers_with_other_tokens_are_fetched_at_once():
    """A request for each layer, posted at once."""
    ids = ids_of(CHUNKS, b"layers")
    with daemons() as (client, (far,), _):
        stored(far, ids)
        here = Cache(client, "gqa", "bf16")
        with here.space.hold(ids, remote=10) as hold:
            exact, before = whole(here, hold), here.copy()
            selects = [some(layer, 40) for layer in range(LAYERS)]
            moves = [hold.fetch({"kv": kvd.View([10, 12, 11], layers=(layer, layer + 1),
                                                select=select)})
                     for layer, select in enumerate(selects)]
            for move in moves:
                move.wait(timeout=60)
            for layer, select in enumerate(selects):
                only = {key: array for key, array in here.arrays.items() if key[0] == layer}
                part = Cache.__new__(Cache)
                part.arrays = only
                judge(part, exact, before, [10, 12, 11], select, (layer, layer + 1))


@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 2), (2, 4)])
def test_a_gather_from_parts_of_other_ranks(writers, readers):
    ids = chain(CHUNKS, b"ranks")
    select = some(6, 70, CHUNKS * T)
    with daemons() as (client, (far,), _):
        for rank in range(writers):
            there = Rank(far, tp=writers, rank=rank, page=32, pages=32)
            there.put(there.space(), ids)
        for rank in range(readers):
            here = Rank(client, tp=readers, rank=rank)
            pages = here.some_pages(len(select))
            with here.space() as space, space.hold(ids, remote=10) as hold:
                hold.fetch({"kv": kvd.View(pages, select=select)}).wait(timeout=60)
            for at, told in here._each(ids):
                assert (at[pages].reshape(-1, at.shape[2])[:len(select)] == told[select]).all()


class Indexed:
    """Latents, and the keys of an indexer in a view of their own, with other pages."""

    def __init__(self, client):
        layout, self.at = kvd.Layout(), {}
        layout.buffer(LAYERS * 24 * PAGE * (96 + 32))
        self.memory, offset = kvd.Memory(layout.buffers[0]), 0
        for view, page, size in (("kv", PAGE, 96), ("index", 2 * PAGE, 32)):
            layout.view(view, page, 24 * PAGE // page)
            for layer in range(LAYERS):
                layout.heads(view, layer, "row", buffer=0, offset=offset, unit_bytes=size, units=1)
                end = offset + 24 * PAGE * size
                self.at[view, layer] = self.memory.array()[offset:end].reshape(-1, page, size)
                offset = end
        self.space = kvd_space(client, client.pool(layout, [client.register(self.memory)]))


@pytest.mark.parametrize("view", ["kv", "index"])
def test_one_of_several_views_is_gathered(view):
    ids = ids_of(CHUNKS, b"views")
    with daemons() as (client, (far,), _):
        there, here = Indexed(far), Indexed(client)
        there.memory.array()[:] = np.random.default_rng(1).integers(0, 256, there.memory.nbytes)
        tokens = (0, TOKENS)
        there.space.put(ids, {"kv": kvd.View(list(range(CHUNKS)), tokens=tokens),
                              "index": kvd.View([5, 3, 1, 2, 4], tokens=tokens)}).wait(timeout=60)
        where = {"kv": list(range(CHUNKS)), "index": [5, 3, 1, 2, 4]}[view]
        select, before = some(3, 30), here.memory.array().copy()
        pages = [9, 7][:1 + (view == "kv")]
        with here.space.hold(ids, remote=10) as hold:
            hold.fetch({view: kvd.View(pages, layers=(1, 3), select=select)}).wait(timeout=60)
            with pytest.raises(kvd.Error, match="a selection is of one"):
                hold.fetch({"kv": kvd.View([1, 2], select=select),
                            "index": kvd.View([1], select=select)}).wait(timeout=60)
        for layer in (1, 2):
            got = here.at[view, layer][pages].reshape(-1, here.at[view, layer].shape[2])
            exact = there.at[view, layer][where].reshape(-1, got.shape[1])
            assert (got[:30] == exact[select]).all()
            assert not got[30:].any()
            here.at[view, layer][pages] = 0
        assert (here.memory.array() == before).all()


def test_any_place_by_pages_of_one_token():
    ids = ids_of(CHUNKS, b"places")
    with daemons() as (client, (far,), _):
        stored(far, ids)
        here = Cache(client, "gqa", "bf16")
        layout, size = kvd.Layout(), here.memory.nbytes // (LAYERS * 2)
        layout.buffer(here.memory.nbytes)
        layout.view("kv", 1, PAGES * PAGE)
        for i, (layer, name) in enumerate(here.arrays):
            layout.heads("kv", layer, name, kvd.NHD, buffer=0, offset=i * size,
                         unit_bytes=here.values * 2, units=here.heads)
        pool = client.pool(layout, [client.register(here.memory)])
        space = kvd_space(client, pool)
        with here.space.hold(ids, remote=10) as hold, space.hold(ids, remote=10) as own:
            exact, before = whole(here, hold), here.copy()
            select = some(5, 50)
            places = np.random.default_rng(6).permutation(PAGES * PAGE)[:50]
            own.fetch({"kv": kvd.View(places, select=select)}).wait(timeout=60)
            for key, array in here.arrays.items():
                want = before[key].copy()
                want.reshape((-1,) + want.shape[2:])[places] = exact[key][select]
                assert (array == want).all()


def kvd_space(client, pool):
    return space_of(client, pool, model="m", scheme="splice gqabf16", tokens=PAGE)


def test_a_gather_into_gpu_memory(gpu):  # noqa: F811
    ids = ids_of(CHUNKS, b"vram")
    with daemons() as (client, (far,), _):
        stored(far, ids)
        here, there = Cache(client, "gqa", "bf16"), Cache(client, "gqa", "bf16", gpu=gpu)
        with here.space.hold(ids, remote=10) as hold:
            exact = whole(here, hold)
        with there.space.hold(ids, remote=10) as hold:
            for select in SELECTIONS:
                before = there.copy()
                pages = [4, 3, 2, 1, 8, 7, 6, 5, 9]
                hold.fetch({"kv": kvd.View(pages, select=select)}).wait(timeout=60)
                judge(there, exact, before, pages, select)


@pytest.mark.parametrize("wrong, code, words", [
    (dict(select=[3, 2]), "ERANGE", "not ascending"),
    (dict(select=[3, 3]), "ERANGE", "not ascending"),
    (dict(select=[0, TOKENS]), "ERANGE", "exceed the hold's"),
    (dict(select=[TOKENS + 5]), "ERANGE", "exceed the hold's"),
    (dict(select=[0xffffffff]), "ERANGE", "exceed the hold's"),
    (dict(select=range(33)), "ERANGE", "33 tokens, the pages have 32 places"),
    (dict(select=[]), "EINVAL", "select: empty"),
    (dict(select=range(16), pages=[3, 3]), "EDUP", "bound twice"),
    (dict(select=[1], pages=[PAGES]), "ERANGE", "outside the view"),
    (dict(select=[1], tokens=(0, 16)), "EINVAL", "excludes first_token and tokens"),
    (dict(select=[1], first_token=1), "EINVAL", "excludes first_token and tokens"),
    (dict(select=[1], layers=(7, 9)), "EINVAL", "or no layer"),
    (dict(select=np.arange(65537)), "ERANGE", "limits")])
def test_wrong_selections_are_refused_and_change_nothing(wrong, code, words):
    ids = ids_of(CHUNKS, b"wrong")
    with daemons() as (client, _, _):
        here = stored(client, ids)
        with here.space.hold(ids) as hold:
            before = here.copy()
            with pytest.raises(kvd.Error, match=words) as told:
                hold.fetch({"kv": kvd.View(**{"pages": [20, 21], **wrong})}).wait(timeout=60)
            assert told.value.code == code
            assert all((array == before[key]).all() for key, array in here.arrays.items())
            hold.fetch({"kv": kvd.View([20], select=[4])}).wait(timeout=60)


def test_a_selection_is_for_fetches_only():
    ids = ids_of(2, b"only")
    with daemons() as (client, _, _):
        here = stored(client, ids)
        view = {"kv": kvd.View([20], select=[4])}
        for post in (False, True):
            with pytest.raises(kvd.Error, match="select") as told:
                here.space.put(ids, view, post=post).wait(timeout=60)
            assert told.value.code == "EINVAL"
            with pytest.raises(kvd.Error, match="select"):
                room = client.recv(77 + post, here.pool, [client.endpoint], post=post)
                room.bind(view)
                room.wait(timeout=60)
        with here.space.hold(ids) as hold:
            move = hold.fetch(view)
            move.wait(timeout=60)
            with pytest.raises(kvd.Error, match="keep their positions") as told:
                move.splice(5, here.rope(), key="k", type="bf16")
            assert told.value.code == "EINVAL"


# ---- ends: a gather that waits for a word of its engine ----

@contextlib.contextmanager
def waiting(client, hold, select, pages):
    """(move, resume): it moves nothing before resume()."""
    word = kvd.Memory(4096)
    region = client.register(word)
    move = hold.fetch({"kv": kvd.View(pages, select=select)}, wait=(region, 0, 1))

    def resume():
        word.array(dtype=np.uint64)[0] = 1
    yield move, resume


def test_a_hold_that_is_closed_meanwhile_keeps_its_gather():
    ids = ids_of(CHUNKS, b"closed")
    with daemons() as (client, (far,), _):
        stored(far, ids)
        here = Cache(client, "gqa", "bf16")
        hold = here.space.hold(ids, remote=10)
        exact, before, select = whole(here, hold), here.copy(), some(8, 30)
        with waiting(client, hold, select, [20, 22]) as (move, resume):
            hold.close()
            resume()
            move.wait(timeout=60)
        judge(here, exact, before, [20, 22], select)


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_stopped_gather_writes_nothing(how):
    ids = ids_of(CHUNKS, b"stop")
    with daemons() as (client, (far,), _):
        stored(far, ids)
        here = Cache(client, "gqa", "bf16")
        with here.space.hold(ids, remote=10) as hold:
            before = here.copy()
            with waiting(client, hold, some(8, 30), [20, 22]) as (move, resume):
                getattr(move, how)()
                if how == "abort":
                    until(lambda: move.state == kvd.FAILED)
                resume()
            hold.fetch({"kv": kvd.View([5], select=[7])}).wait(timeout=60)
            pages = [p for p in range(PAGES) if p != 5]
            assert all((array[pages] == before[key][pages]).all()
                       for key, array in here.arrays.items())


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("spare", [False, True], ids=["alone", "spare"])
def test_a_holder_that_dies_is_replaced_or_named(ways, spare):
    ids = ids_of(CHUNKS, b"dies")
    with daemons(1 + spare, ways, killed) as (client, clients, there):
        for far in clients:
            stored(far, ids)
        here = Cache(client, "gqa", "bf16")
        with here.space.hold(ids, remote=10, lease=300) as hold:
            exact, before, select = whole(here, hold), here.copy(), some(9, 40)
            first = hold.holders()[0].peer
            with waiting(client, hold, select, [20, 22, 21]) as (move, resume):
                os.kill(there[instances(client, clients).index(first)].proc.pid, signal.SIGKILL)
                resume()
                if spare:
                    move.wait(timeout=60)
                    judge(here, exact, before, [20, 22, 21], select)
                else:
                    with pytest.raises(kvd.Error):
                        move.wait(timeout=60)
                    assert move.show().prefix_tokens == 0
                    assert all((array == before[key]).all() for key, array in here.arrays.items())


def test_a_late_gather_is_not_hedged():
    """A whole fetch is: so there is a holder, and the delay is enough."""
    ids = ids_of(CHUNKS, b"late")
    with daemons(2) as (client, clients, there):
        for far in clients:
            stored(far, ids)
        here = Cache(client, "gqa", "bf16")

        def hedges():
            return client.command("chunk.list")["remote"]["hedges"]
        with here.space.hold(ids, remote=10, lease=300) as hold:
            exact, select = whole(here, hold), some(9, 40)
            views = {"kv": kvd.View(list(range(CHUNKS)), tokens=(0, TOKENS))}
            for _ in range(20):
                hold.fetch(views).wait(timeout=60)
            at = there[instances(client, clients).index(hold.holders()[0].peer)]
            for view, hedged in (({"kv": kvd.View([20, 22, 21], select=select)}, False),
                                 (views, True)):
                before, was = here.copy(), hedges()
                at.freeze()
                timer = threading.Timer(0.5, at.thaw)
                timer.start()
                hold.fetch(view).wait(timeout=60)
                timer.join()
                assert (hedges() > was) == hedged
                if not hedged:
                    judge(here, exact, before, [20, 22, 21], select)


def test_published_pages_that_are_withdrawn_end_their_gather():
    ids = ids_of(CHUNKS, b"pages")
    with daemons() as (client, (far,), _):
        there = Cache(far, "gqa", "bf16")
        there.fill()
        pages = list(range(2, 2 + CHUNKS))
        there.space.publish(ids, {"kv": kvd.View(pages, tokens=(0, TOKENS))}).wait(timeout=60)
        here = Cache(client, "gqa", "bf16")
        with here.space.hold(ids, remote=10) as hold:
            exact, before, select = whole(here, hold), here.copy(), some(9, 40)
            hold.fetch({"kv": kvd.View([20, 22, 21], select=select)}).wait(timeout=60)
            judge(here, exact, before, [20, 22, 21], select)
            before = here.copy()
            with waiting(client, hold, select, [12, 13, 14]) as (move, resume):
                there.space.withdraw(ids).wait(timeout=60)
                resume()
                with pytest.raises(kvd.Error) as told:
                    move.wait(timeout=60)
            assert told.value.code == "ENOTFOUND"
            assert all((array == before[key]).all() for key, array in here.arrays.items())
