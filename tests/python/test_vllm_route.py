# SPDX-License-Identifier: Apache-2.0
"""Routing in kvd.vllm without vLLM: what is routed, null blocks, rows of a step, lost steps."""
import gc
import importlib
import sys
import types

import numpy as np
import pytest

import kvd
from kvd.chunks import Holder
from kvd.errors import Error, error_make
from kvd.errors import TimeoutError as KvdTimeout
from kvd.vllm import route_worker
from kvd.vllm.route import (LEASE_S, LOSSES_MAX, RENEW_S, Route, Routes, own_blocks, spoiled,
                            written)
from kvd.vllm.route_worker import Batch, Cut, Router, batch
from kvd_daemon import Daemon
from test_vllm_plan import BLOCK, T, Request, Store, computes, output, plan_of
from vllm_stub import Vllm

RATIO = T // BLOCK


class Hold:
    """Chunks of two daemons; own: those that are the own daemon's."""

    def __init__(self, chunks, secret, own):
        self.chunks, self.tokens, self.secret = chunks, chunks * T, secret
        self.away = [i for i in range(chunks) if i not in own]
        self.remote = chunks - self.away[0] if self.away else 0

    def holders(self, timeout):
        return [Holder(bytes([i % 2] * 16), i, 1, T, False) for i in self.away]


class Stores(Store):
    """The first `there` chunks of any prompt."""

    own = ()
    status = {"attention": "avx512"}

    def __init__(self, there):
        super().__init__(there)
        self.made, self.client, self.told = 0, self, 0

    def command(self, name, timeout):
        assert name == "health"
        self.told += 1
        return self.status

    def hold(self, ids, first, lease, remote, timeout):
        self.asked.append((first, len(ids)))
        self.made += 1
        return Hold(max(0, min(len(ids), self.there - first)), b"%d" % self.made, self.own)


def routing(there, **kw):
    plan, _, clock = plan_of(routes=Routes(BLOCK), remote=0.3, **kw)
    plan.spaces = Stores(there)
    return plan, plan.spaces, clock


def arrive(plan, tokens, name="a", seed=0):
    request = Request(tokens, name, seed=seed)
    plan.arrived(request)
    return request


def nulls(local, end, blocks=40, first=1000):
    """A table of which tokens [local, end) have no blocks."""
    out = list(range(first, first + blocks))
    out[local // BLOCK:end // BLOCK] = [0] * ((end - local) // BLOCK)
    return out


def admit(plan, request, local, end, table=None):
    """As vLLM does it. -> its table"""
    assert plan.matched(request, local) == (end - local, False)
    given = nulls(local, end) if table is None else table
    plan.allocated(request, lambda: (given,), end - local)
    request.num_computed_tokens = end
    return given


def step_of(plan, table, **counts):
    told = output(counts)
    told.kv_connector_block_state.get_block_ids = lambda name: (table,)
    return plan.take(told)


# ---- what is routed ------------------------------------------------------------------------

@pytest.mark.parametrize("tokens, local, held, end", [
    (300, 0, 9, 256), (300, 0, 2, 128), (300, 64, 9, 256), (300, 80, 9, 256), (257, 0, 4, 256),
    (256, 0, 4, 192)])
def test_tokens_that_are_held_have_no_blocks(tokens, local, held, end):
    plan, _, _ = routing(held)
    request = arrive(plan, tokens)
    table = admit(plan, request, local, end)
    assert plan.routes.away == {"a": end - local}
    routes = step_of(plan, table, a=tokens - end).routes
    assert routes == {table[end // BLOCK]: Route("a", local // T * T, local, end, b"1")}


@pytest.mark.parametrize("tokens, local, held", [(64, 0, 9), (300, 256, 9), (300, 0, 0)])
def test_what_is_here_or_nowhere_is_computed(tokens, local, held):
    plan, _, _ = routing(held)
    assert plan.matched(arrive(plan, tokens), local) == (0, False)
    assert plan.routes.away == {} and plan.take(output({"a": 5})).routes == {}


def test_a_request_that_is_not_admitted_leaves_nothing_behind():
    plan, store, _ = routing(9)
    request = arrive(plan, 300)
    assert plan.matched(request, 0) == plan.matched(request, 0) == (256, False)
    assert plan.matched(request, 256) == (0, False) and plan.routes.away == {}
    assert plan.matched(request, 0) == (256, False)
    plan.finished(request, ([],))
    assert plan.routes.away == plan.routes.ways == {}


@pytest.mark.parametrize("table", [
    nulls(0, 192), nulls(64, 256), nulls(0, 256 + BLOCK), list(range(1000, 1040)), [0] * 40,
    nulls(0, 256)[:256 // BLOCK]])
def test_other_null_blocks_end_the_engine(table):
    plan, _, _ = routing(9)
    request = arrive(plan, 300)
    with pytest.raises(RuntimeError, match="cannot be used with \"route\""):
        admit(plan, request, 0, 256, table)


def test_fewer_tokens_than_were_answered_end_the_engine():
    plan, _, _ = routing(9)
    request = arrive(plan, 300)
    plan.matched(request, 0)
    with pytest.raises(RuntimeError, match="vLLM has allocated 192"):
        plan.allocated(request, lambda: (nulls(0, 192),), 192)


def test_a_prompt_at_several_daemons_has_one_hold():
    plan, store, _ = routing(4)
    request = arrive(plan, 300)
    table = admit(plan, request, 0, 256)
    (route,) = step_of(plan, table, a=44).routes.values()
    assert route.secret == b"1" and route.end == 256 and store.asked == [(0, 4)]


@pytest.mark.parametrize("status, own, routed", [
    ({"attention": "x"}, (0,), True), ({"attention": "x"}, (2,), True), ({}, (0,), False),
    ({}, (2,), False), ({}, (3,), False), ({}, (), True)])
def test_chunks_of_the_own_daemon_are_routed_to_if_it_computes(status, own, routed):
    plan, store, _ = routing(4)
    store.own, store.status = own, status
    assert plan.matched(arrive(plan, 300), 0) == (256, not routed)
    plan.matched(arrive(plan, 300, "b", seed=1), 0)
    assert store.told == 1, "it is asked once"


@pytest.mark.parametrize("config, computes", [("attention_threads = 1\n", True), ("", False)])
def test_a_daemon_tells_whether_it_computes(config, computes):
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n" + config) as d, kvd.Client(d.socket_path) as c:
        plan, _, _ = routing(1)
        plan.spaces = types.SimpleNamespace(ask=lambda key, call: call(types.SimpleNamespace(
            client=c)))
        assert plan._computes() is computes


def test_a_prefix_of_an_own_daemon_that_computes_nothing_is_loaded():
    plan, store, _ = routing(4)
    store.own, store.status = (0,), {}
    request = arrive(plan, 300)
    assert plan.matched(request, 0) == (256, True) and plan.routes.away == {}
    plan.allocated(request, lambda: (list(range(1000, 1040)),), 256)
    assert [load[0] for load in plan.take(output({})).loads] == ["a"]


def test_requests_with_one_document_share_its_holds_until_the_last_one_ends():
    plan, store, _ = routing(4)
    first, second = arrive(plan, 300), arrive(plan, 300, "b")
    table = admit(plan, first, 0, 256)
    admit(plan, second, 0, 256)
    assert store.asked == [(0, 4)]
    assert step_of(plan, table, a=44).ended == []
    plan.finished(first, (table,))
    gc.collect()
    assert plan.take(output({})).ended == []
    plan.finished(second, (table,))
    del first, second
    gc.collect()
    assert plan.take(output({})).ended == [b"1"]
    admit(plan, arrive(plan, 300, "c"), 0, 256)
    assert len(store.asked) == 2


def test_another_document_has_its_own():
    plan, store, _ = routing(4)
    admit(plan, arrive(plan, 300), 0, 256)
    admit(plan, arrive(plan, 300, "b", seed=1), 0, 256)
    assert len(store.asked) == 2


def test_documents_of_running_requests_are_held_again_before_their_leases_end():
    plan, store, clock = routing(4)
    request, other = arrive(plan, 300), arrive(plan, 300, "b", seed=1)
    table = admit(plan, request, 0, 256)
    plan.matched(other, 0)  # is not admitted
    clock.now += LEASE_S / 2 - 1
    assert step_of(plan, table, a=44).ended == []
    clock.now += 2
    asked, step = len(store.asked), step_of(plan, table, a=1)
    assert store.asked[asked:] == [(0, 4)]
    assert step.routes[table[256 // BLOCK]].secret == b"3"
    assert step.ended == [b"1"], "what the workers joined is closed after it"
    store.there = 3
    clock.now += LEASE_S / 2
    step = step_of(plan, table, a=1)
    assert step.ended == [] and step.routes[table[256 // BLOCK]].secret == b"3"
    asked = len(store.asked)
    step_of(plan, table, a=1)
    assert len(store.asked) == asked
    store.there, store.away = 4, True
    clock.now += RENEW_S
    store.ask = lambda key, call: None
    assert step_of(plan, table, a=1).ended == [], "without a daemon"


# ---- chunks of routed requests ---------------------------------------------------------------

def test_own_chunks_are_stored_when_the_result_of_their_step_is_valid():
    plan, _, _ = routing(4)
    request = arrive(plan, 500)
    table = admit(plan, request, 0, 256)
    assert step_of(plan, table, a=200).saves == [], "its holder may be lost"
    request.num_computed_tokens += 200
    ((name, first, ids, blocks, _),) = step_of(plan, table, a=44).saves
    assert (name, first, len(ids) // 32) == ("a", 4, 3)
    assert blocks == table[4 * RATIO:7 * RATIO] and 0 not in blocks


def test_a_request_that_is_preempted_and_resumed_in_one_step_stores_no_null_blocks():
    plan, _, _ = routing(4)
    request = arrive(plan, 500)
    admit(plan, request, 0, 256)
    computes(plan, request, 200)
    plan.again(request, True)
    request.num_computed_tokens = 0
    table = admit(plan, request, 0, 256)
    told = output({"a": 200}, preempted=["a"])
    told.kv_connector_block_state.get_block_ids = lambda name: (table,)
    assert plan.take(told).saves == []
    request.num_computed_tokens += 200
    ((_, first, _, blocks, _),) = step_of(plan, table, a=44).saves
    assert first == 4 and 0 not in blocks


def test_a_table_without_its_leading_null_blocks_is_not_stored_from():
    plan, _, _ = routing(4)
    request = arrive(plan, 500)
    table = admit(plan, request, 0, 256)
    step_of(plan, table, a=244)
    request.num_computed_tokens += 244
    assert plan.finished(request, (table[256 // BLOCK:],)) is False
    assert plan.take(output({})).saves == []


# ---- lost steps ------------------------------------------------------------------------------

def test_a_lost_request_is_routed_again_and_then_loaded():
    plan, store, _ = routing(4)
    request, other = arrive(plan, 300), arrive(plan, 300, "b")
    admit(plan, request, 0, 256)
    for made in range(1, LOSSES_MAX):
        computes(plan, request, 44)
        plan.again(request, True)
        request.num_computed_tokens = 0
        admit(plan, request, 0, 256)
        assert len(store.asked) == made + 1, "it does not use the lost hold again"
    admit(plan, other, 0, 256)
    plan.again(request, True)
    request.num_computed_tokens = 0
    assert plan.matched(request, 0) == (256, True)
    plan.allocated(request, lambda: (list(range(1000, 1040)),), 256)
    assert [load[0] for load in plan.take(output({})).loads] == ["a"]
    assert plan.matched(other, 0) == (256, False), "the other one is not lost"


def test_blocks_of_a_step_are_those_from_its_first_token_on():
    assert written([0, 0, 5, 6, 7], 40, 16) == {5, 6, 7}
    assert written([0, 0, 5, 6, 7], 48, 16) == {6, 7}
    assert written([0, 0, 5, 6, 7], 0, 16) == {5, 6, 7}


def test_who_found_the_blocks_of_a_lost_request_in_its_step_is_lost_too():
    rows = {"a": ([0, 0, 5, 6], {5, 6}), "b": ([1, 2, 5, 7], {7}), "c": ([1, 2, 5, 7, 8], {8}),
            "d": ([1, 2, 9], {9})}
    names, blocks = spoiled({"a"}, rows)
    assert set(names) == {"a", "b", "c"} and blocks == {5, 6, 7, 8}
    assert spoiled({"d"}, rows) == (["d"], {9})
    assert spoiled({"gone"}, rows) == ([], set())


# ---- rows of a step ----------------------------------------------------------------------------

def route(name="a", begin=0, local=0, end=2 * BLOCK, secret=b"s"):
    return Route(name, begin, local, end, secret)


def test_own_blocks_leave_out_what_is_elsewhere():
    table = np.array([3, 4, 0, 0, 7, 8])
    assert own_blocks(np.array([3, 4]), BLOCK, {})[1:] == (0, None)
    blocks, away, found = own_blocks(table, BLOCK, {7: route(begin=32, local=32, end=64)})
    assert (blocks.tolist(), away, found.name) == ([3, 4, 7, 8], 32, "a")
    blocks, away, _ = own_blocks(table, BLOCK, {7: route(begin=16, local=32, end=64)})
    assert (blocks.tolist(), away) == ([3, 7, 8], 48), "the holder has all of its chunk"


@pytest.mark.parametrize("table, routes", [
    ([0, 0, 7], {}), ([0, 0, 7], {8: route()}), ([0, 0, 7], {7: route(end=BLOCK)}),
    ([0, 0, 7], {7: route(local=BLOCK)}), ([0, 0], {7: route()}), ([5, 0, 7], {7: route()}),
    ([0, 5, 0, 7], {7: route(end=48)}), ([0, 0, 7, 0], {7: route()})])
def test_unexpected_null_blocks_end_the_engine(table, routes):
    with pytest.raises(RuntimeError, match="cannot be used with \"route\""):
        own_blocks(np.array(table), BLOCK, routes)


def made_batch(most=100, lost=()):
    routes = {7: route("a"), 9: route("b"), 11: route("c", secret=b"t")}
    requests = [(0, 3, 40, np.array([0, 0, 7])), (3, 1, 20, np.array([5, 6])),
                (4, 2, 45, np.array([0, 0, 9])), (6, 1, 41, np.array([0, 0, 11]))]
    return batch(requests, BLOCK, routes, most,
                 lambda r: None if r.secret in lost else r.secret)


def test_rows_of_one_document_are_one_cut():
    made = made_batch()
    assert [(r.start, r.count, r.length, r.blocks.tolist()) for r in made.rows] == [
        (0, 3, 8, [7]), (3, 1, 20, [5, 6]), (4, 2, 13, [9]), (6, 1, 9, [11])]
    assert made.order == [0, 1, 2, 4, 5, 6]
    assert [(c.begin, c.end, c.names, c.hold) for c in made.cuts] == [
        (0, 5, {"a", "b"}, b"s"), (5, 6, {"c"}, b"t")]


def test_rows_beyond_a_seat_are_further_cuts():
    made = made_batch(most=2)
    assert [(c.begin, c.end, c.names) for c in made.cuts] == [
        (0, 2, {"a"}), (2, 4, {"a", "b"}), (4, 5, {"b"}), (5, 6, {"c"})]


def test_a_document_that_cannot_be_joined_has_no_cut():
    made = made_batch(lost={b"s"})
    assert made.order == [6] and [c.names for c in made.cuts] == [{"c"}]
    assert len(made.rows) == 4, "its own attention has a shape all the same"


# ---- answers -----------------------------------------------------------------------------------

def error_of(code, retryable=False):
    return error_make(0, code, retryable, "op", "no")


class Seats:
    """An Attend whose posts end with these errors, None: they succeed."""

    def __init__(self, ends=()):
        self.ends, self.posts, self.closed, self.packs = list(ends), [], False, 0
        self.deadlines = []

    def q(self, seat):
        return np.zeros(4096, np.uint8)

    def pack(self, parts):
        self.packs += 1
        return [part.rows for part in parts]

    def post(self, seat, layer, parts, deadline):
        self.posts.append((seat, layer, parts))
        self.deadlines.append(deadline)

    def wait(self, seat, timeout, why):
        error = self.ends.pop(0) if self.ends else None
        if error is not None:
            raise error

    def error(self, seat, why):
        return None

    def o(self, seat):
        return np.ones((64, 8), np.float32)

    def m(self, seat):
        return np.zeros(64, np.float32)

    l = m

    def close(self, timeout):
        self.closed = True


class Joined(str):
    """A hold's name, and its tokens."""
    def __new__(cls, name, tokens):
        one = super().__new__(cls, name)
        one.tokens, one.closed = tokens, []
        return one

    def close(self, timeout):
        self.closed.append(timeout)


class Door:
    tokens = 1 << 20  # of a hold that is joined

    def __init__(self, joins=True):
        self.joins, self.client, self.why, self.muted, self.joined = joins, None, "away", 0, []

    def ask(self, key, call):
        try:
            return call(self) if self.joins else None
        except kvd.Error as error:
            self.why = str(error)
            return None

    def join(self, secret, lease, timeout):
        self.joined.append(secret)
        return Joined("hold %s" % secret.decode(), self.tokens)

    def tell(self, words, kind):
        pass

    def mute(self):
        self.muted += 1


def router(ends=(), joins=True, routes=None):
    counts, seats = [], Seats(ends)
    made = Router(Door(joins), lambda *args: seats, 4, 64, {"l0": 0, "l1": 1},
                  lambda **values: counts.append(values))
    made.begin(types.SimpleNamespace(
        routes={7: route("a"), 9: route("b", secret=b"t")} if routes is None else routes,
        words="words", ended=[]))
    return made, seats, counts


def cut_of(name="a", begin=0, end=2):
    return Cut(begin, end, {name}, "hold")


def ask(made, layer, cut):
    filled = []
    sent = made.send(layer, cut, 0, lambda seat, cut: filled.append(cut))
    return made.receive(layer, cut, 0) if sent else None


def test_answers_have_the_rows_of_the_cut():
    made, seats, counts = router()
    o, m, l = ask(made, "l1", cut_of())
    assert (o.shape, m.shape, l.shape) == ((8, 8), (8,), (8,))
    assert seats.posts == [(0, 1, [(0, 8)])]
    cut = cut_of()
    ask(made, "l0", cut), ask(made, "l1", cut)
    assert seats.packs == 2, "once a cut"
    assert made.end() == set()
    assert counts == [{"routed_posts": 3, "routed_rows": 24, "routed_steps": 1}]
    assert made.end() == set() and len(counts) == 1


def test_a_hold_that_is_joined_in_part_is_not_used():
    """Attention over fewer tokens than the request leaves out would be a plausible, wrong answer."""
    made, seats, _ = router()
    need = made.routes[7].end - made.routes[7].begin
    made.spaces.tokens = need - 1
    assert made._hold(made.routes[7]) is None
    assert not made.holds and made.lost == {"a"} and "%d of %d" % (need - 1, need) in made.spaces.why
    made.spaces.tokens = need
    assert made._hold(made.routes[7]).tokens == need and b"t" not in made.holds


def test_seats_are_opened_before_the_first_routed_step():
    """By them the daemon knows what to measure, and the first choice needs its prices."""
    made, seats, _ = router(routes={})
    assert made.attend is seats and not seats.posts
    idle, _, _ = router(joins=False)
    assert idle.attend is None and idle.end() == set()


@pytest.mark.parametrize("error", [error_of("EBUSY", True), error_of("ELEASE"),
                                   error_of("ENOTFOUND"), error_of("EREVOKED")])
def test_a_failed_request_is_sent_once_more(error):
    made, seats, _ = router([error, None])
    assert ask(made, "l0", cut_of()) is not None
    assert len(seats.posts) == 2 and made.end() == set()
    made, seats, counts = router([error, error])
    assert ask(made, "l0", cut_of()) is None
    assert len(seats.posts) == 2 and made.end() == {"a"}
    assert {"lost_steps": 1} in counts


def test_a_refusal_is_not_sent_again():
    made, seats, _ = router([error_of("EREQUIRE")])
    assert ask(made, "l0", cut_of()) is None and len(seats.posts) == 1


def test_a_lost_request_sends_no_more_in_its_step_and_others_do():
    made, seats, _ = router([error_of("EREQUIRE")])
    ask(made, "l0", cut_of())
    assert ask(made, "l1", cut_of()) is None and len(seats.posts) == 1
    assert ask(made, "l1", cut_of("b")) is not None
    assert ask(made, "l1", Cut(0, 2, {"a", "b"}, "h")) is not None
    assert made.end() == {"a"}
    made.begin(types.SimpleNamespace(routes={}, words="words", ended=[]))
    assert ask(made, "l0", cut_of()) is not None, "the next step"


def test_no_second_try_after_the_deadline(monkeypatch):
    made, seats, _ = router([error_of("EBUSY", True)])
    now = iter((0.0, 0.0, route_worker.DEADLINE_S + 0.1))
    made.clock = lambda: next(now)
    assert ask(made, "l0", cut_of()) is None and len(seats.posts) == 1


def test_a_holder_has_time_for_the_work_of_a_layer():
    made, seats, _ = router()
    tokens = 2 * BLOCK
    for count, pairs in ((1, tokens), (1000, 1000 * tokens)):
        got = made.batch([(0, count, tokens + count, np.array([0, 0] + [7] * 63))], BLOCK)
        assert got.pairs == pairs
        work = 2 * pairs * 4 * 64
        assert made.seconds == route_worker.DEADLINE_S + work / route_worker.SLOW
        ask(made, "l0", got.cuts[0])
    assert seats.deadlines[0] < seats.deadlines[1] < route_worker.DEADLINE_MOST_S
    made.values = 1 << 30
    made.batch([(0, 9, tokens + 9, np.array([0, 0, 7]))], BLOCK)
    assert made.seconds == route_worker.DEADLINE_MOST_S


@pytest.mark.parametrize("error", [error_of("ELOST", True), error_of("ENODAEMON"),
                                   KvdTimeout("slow", "ENOREPLY", 0, "op", True)])
def test_a_daemon_that_is_gone_loses_all_and_is_not_waited_for(error):
    made, seats, _ = router([error])
    made.holds[b"s"] = "hold"
    assert ask(made, "l0", cut_of()) is None
    assert made.lost == {"a", "b"} and seats.closed and made.attend is None
    assert made.holds == {} and made.spaces.muted == (error.code == "ENOREPLY")
    assert ask(made, "l0", cut_of("b")) is None and len(seats.posts) == 1
    assert made.receive("l0", cut_of("b"), 1) is None, "one that was sent before"


def test_holds_are_joined_once_and_forgotten_when_their_document_ends():
    made, _, _ = router()
    requests = [(0, 1, 40, np.array([0, 0, 7])), (1, 1, 41, np.array([0, 0, 9]))]
    for _ in range(2):
        assert isinstance(made.batch(requests, BLOCK), Batch)
    assert sorted(made.spaces.joined) == [b"s", b"t"] and len(made.holds) == 2
    made.begin(types.SimpleNamespace(routes={}, words="words", ended=[b"s", b"none"]))
    assert list(made.holds) == [b"t"]


def test_requests_whose_hold_cannot_be_joined_are_lost():
    made, seats, _ = router(joins=False)
    made.batch([(0, 1, 40, np.array([0, 0, 7]))], BLOCK)
    assert made.end() == {"a"} and not seats.posts


def test_an_engine_without_routes_sends_nothing():
    made, seats, counts = router(routes={})
    assert made.batch([(0, 1, 20, np.array([5, 6]))], BLOCK).cuts == []
    assert made.end() == set() and not counts and not seats.posts
    assert isinstance(error_of("EBUSY"), Error)


# ---- what is refused, with stand-ins for vLLM ------------------------------------------------

@pytest.fixture(scope="module")
def store():
    with Vllm() as v:
        yield v.load("kvd.vllm.store")


def patch(monkeypatch, module, name, value):
    """A name of vLLM's."""
    monkeypatch.setattr(importlib.import_module(module), name, value, raising=False)


def config_of(**change):
    given = dict(scheduler_cls="kvd.vllm.RouteScheduler", async_scheduling=False,
                 kv_connector="KvdStoreConnector", data_parallel_size=1,
                 use_v2_model_runner=False, is_kv_consumer=True, cache_dtype="auto",
                 dtype="torch.bfloat16", hash_block_size=BLOCK)
    given.update(change)
    some = types.SimpleNamespace(**given)
    some.scheduler_config = some.parallel_config = some.kv_transfer_config = some
    some.cache_config = some.model_config = some
    some.kv_cache_groups = [types.SimpleNamespace(
        kv_cache_spec=types.SimpleNamespace(block_size=BLOCK))]
    return some


def refused(store, monkeypatch, cpu=True, **change):
    platform = types.SimpleNamespace(is_cpu=lambda: cpu, device_name="tpu")
    patch(monkeypatch, "vllm.platforms", "current_platform", platform)
    config = config_of(**change)
    return [what for no, what, _ in store.route_refusals(config, config) if no]


@pytest.mark.parametrize("change, words", [
    (dict(scheduler_cls=None), "vLLM's scheduler"), (dict(scheduler_cls="x.Y"), "vLLM's scheduler"),
    (dict(cpu=False), "an engine on tpu"), (dict(kv_connector="MultiConnector"), "MultiConnector"),
    (dict(async_scheduling=True), "asynchronous"),
    (dict(data_parallel_size=2), "data par"), (dict(use_v2_model_runner=True), "V2 model runner"),
    (dict(is_kv_consumer=False), "kv_producer"), (dict(cache_dtype="fp8"), "--kv-cache-dtype fp8"),
    (dict(dtype="torch.float64"), "float64"), (dict(hash_block_size=8), "parts of a block")])
def test_what_cannot_route_is_refused_by_name(store, monkeypatch, change, words):
    assert refused(store, monkeypatch) == []
    (what,) = refused(store, monkeypatch, **change)
    assert words in what


def test_the_scheduler_may_be_given_as_a_class(store, monkeypatch):
    assert refused(store, monkeypatch, scheduler_cls=type("RouteScheduler", (), {})) == []


@pytest.mark.parametrize("given", ["yes", True, 1, None, "Always"])
def test_other_values_of_the_option_are_refused(store, given):
    transfer = types.SimpleNamespace(kv_connector_extra_config={"route": given, "ids": "tokens"})
    config = types.SimpleNamespace(kv_transfer_config=transfer, cache_config=types.SimpleNamespace(
        prefix_caching_hash_algo="x"))
    with pytest.raises(ValueError, match="route: .* is not one of off, auto, always"):
        store.refuse_options(config)


def layer_of(**change):
    given = dict(kind="gqa", num_heads=8, num_kv_heads=4, dqk=32, dv=32, scale=0.5)
    given.update(change)
    backend = types.SimpleNamespace(token_rows=True, get_name=lambda: "CUSTOM")
    return types.SimpleNamespace(impl=types.SimpleNamespace(**given),
                                 get_attn_backend=lambda: backend)


def router_of(store, layers, grain=1, first_head=0):
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(static_forward_context=layers),
        model_config=types.SimpleNamespace(dtype="torch.float32"))
    group = types.SimpleNamespace(layer_names=list(layers))
    caches = types.SimpleNamespace(kv_cache_groups=[group])
    worker = store.Worker(config, caches)
    worker.row = "layout", grain, None
    fields = [dict(name=name, first_unit=first_head) for name in ("k", "v", "latent")]
    made = worker._router(Door(), types.SimpleNamespace(name="kv", grain=grain),
                          types.SimpleNamespace(views={"kv": {"layers": {0: fields}}}))
    assert worker.row[:2] == ("layout", grain)
    return made, worker.row[2]


def test_seats_have_the_shape_of_the_layers(store, monkeypatch):
    patch(monkeypatch, "vllm.model_executor.models.utils", "extract_layer_index",
          lambda name: int(name[1:]))
    made, model = router_of(store, {"l0": layer_of(), "l1": layer_of()}, first_head=4)
    assert model == kvd.cost.Model.gqa(2, 8, 4, 32, 32, value_bytes=4, out_bytes=4)
    assert (made.layers, made.heads, made.tokens) == ({"l0": 0, "l1": 1}, 8, 512)
    asked = {}
    made.opener(types.SimpleNamespace(attend=lambda **kw: asked.update(kw)), 4096, 4)
    asked.pop("timeout")
    assert asked == dict(rows=4096, seats=4, q_type="fp32", kv_type="fp32", view="kv", kind="gqa",
                         heads=8, kv_heads=4, first_head=4, dqk=32, dv=32, scale=0.5, key="k", value="v")
    made, model = router_of(store, {"l0": layer_of(kind="mla", dqk=576, dv=512)})
    assert model == kvd.cost.Model.mla(1, 8, 576, 512, value_bytes=4, out_bytes=4)
    made.opener(types.SimpleNamespace(attend=lambda **kw: asked.update(kw)), 4096, 4)
    assert (asked["key"], asked["value"], asked["kv_heads"]) == ("latent", None, 1)


def test_layers_of_other_backends_or_shapes_are_refused(store, monkeypatch):
    patch(monkeypatch, "vllm.model_executor.models.utils", "extract_layer_index", lambda name: 0)
    stock = layer_of()
    stock.get_attn_backend = lambda: types.SimpleNamespace(get_name=lambda: "CPU_ATTN")
    with pytest.raises(ValueError, match="layer l0 is CPU_ATTN.*VLLM_PLUGINS"):
        router_of(store, {"l0": stock})
    with pytest.raises(ValueError, match="several shapes"):
        router_of(store, {"l0": layer_of(), "l1": layer_of(dqk=64)})
    with pytest.raises(ValueError, match="several shapes"):
        router_of(store, {"l0": layer_of()}, grain=32)


def test_losses_of_all_ranks_are_lost(store):
    rows = {(0, 0): ("x", 1, None)}, {(0, 1): ("y", 1, None)}
    both = store.StoreRows(rows[0], {"a"}, {6: [True], 7: [False]}).aggregate(
        store.StoreRows(rows[1], {"b"}, {7: [True]}))
    assert both == store.StoreRows({**rows[0], **rows[1]}, {"a", "b"}, {6: [True], 7: [False, True]})


# ---- vLLM's scheduler and block manager ------------------------------------------------------

@pytest.fixture
def scheduler(store):
    """The stand-ins of vLLM's classes do what kvd's are to add to."""
    module = importlib.import_module("kvd.vllm.route_scheduler")
    yield module
    sys.modules.pop("kvd.vllm.route_scheduler", None)


def manager_of(scheduler, monkeypatch, away, running=()):
    base = scheduler.FullAttentionManager
    monkeypatch.setattr(base, "get_num_blocks_to_allocate", lambda self, *a: 20, raising=False)
    monkeypatch.setattr(base, "allocate_external_computed_blocks", lambda self, *a: "vllm",
                        raising=False)
    made = base()
    made.block_size, made.num_cached_block = BLOCK, dict.fromkeys(running, 0)
    made.req_to_blocks, made._null_block = {"a": ["x"], "b": []}, "null"
    manager = types.SimpleNamespace(coordinator=types.SimpleNamespace(
        single_type_managers=(made,)), block_pool=None, enable_caching=True)
    return scheduler.bind(manager, types.SimpleNamespace(away=away, block=BLOCK))


def test_routed_tokens_need_no_blocks(scheduler, monkeypatch):
    made = manager_of(scheduler, monkeypatch, {"a": 4 * BLOCK}, running=("c",))
    assert made.get_num_blocks_to_allocate("a", 1, (), 0, 0, 1) == 16
    assert made.get_num_blocks_to_allocate("b", 1, (), 0, 0, 1) == 20
    made.away["c"] = 4 * BLOCK
    assert made.get_num_blocks_to_allocate("c", 1, (), 0, 0, 1) == 20, "it has its table"


def test_routed_tokens_get_null_blocks(scheduler, monkeypatch):
    made = manager_of(scheduler, monkeypatch, {"a": 3 * BLOCK})
    made.allocate_external_computed_blocks("a", BLOCK, 3 * BLOCK)
    assert made.req_to_blocks["a"] == ["x", "null", "null", "null"]
    assert made.allocate_external_computed_blocks("b", 0, BLOCK) == "vllm"
    for local, external in ((0, 2 * BLOCK), (1, 3 * BLOCK)):
        with pytest.raises(RuntimeError, match="are at other daemons"):
            made.allocate_external_computed_blocks("a", local, external)


def test_caches_of_other_managers_are_refused(scheduler):
    manager = types.SimpleNamespace(coordinator=types.SimpleNamespace(
        single_type_managers=(object(),)))
    with pytest.raises(ValueError, match="a cache of object is not supported"):
        scheduler.bind(manager, None)


def test_a_lost_step_is_evicted_and_preempted_before_vllm_sees_its_output(scheduler, monkeypatch):
    calls, here = [], set()
    monkeypatch.setattr(scheduler, "RequestStatus", types.SimpleNamespace(RUNNING=1),
                        raising=False)
    base = scheduler.Scheduler
    monkeypatch.setattr(base, "update_from_output", lambda self, *a: calls.append("vllm") or "out",
                        raising=False)
    monkeypatch.setattr(base, "_preempt_request", lambda self, request, now, drop_stale_output:
                        calls.append(("preempt", request.request_id, drop_stale_output)),
                        raising=False)
    made = scheduler.RouteScheduler()
    tables = {"a": [0, 0, 5], "b": [1, 2, 6], "c": [1, 3], "d": [0, 0, 8]}
    made.requests = {name: types.SimpleNamespace(request_id=name, status=1, num_computed_tokens=40)
                     for name in "abcd"}
    made.requests["d"].status = 2  # vLLM has preempted it meanwhile
    made.running, made.block_size = [made.requests[name] for name in "abc"], BLOCK
    made.kv_cache_manager = types.SimpleNamespace(
        get_block_ids=lambda name: (tables[name],),
        evict_blocks=lambda blocks: calls.append(("evict", sorted(blocks))))
    made.connector = types.SimpleNamespace(
        again=lambda request, lost: calls.append((request.request_id, lost)),
        take_landed=lambda: here)
    made.prev_step_scheduled_req_ids = set("abcd")
    told = types.SimpleNamespace(lost={"b", "a", "d", "gone"})
    step = types.SimpleNamespace(num_scheduled_tokens=dict(a=8, b=1, c=1, d=1, gone=1))
    result = types.SimpleNamespace(kv_connector_output=types.SimpleNamespace(
        kv_connector_worker_meta=told))
    assert made.update_from_output(step, result) == "out"
    assert calls == [("evict", [5, 6]), ("b", True), ("preempt", "b", True), ("a", True),
                     ("preempt", "a", True), "vllm"]
    assert [r.request_id for r in made.running] == ["c"]
    assert made.prev_step_scheduled_req_ids == {"c", "d"}
    for output in (None, types.SimpleNamespace(kv_connector_worker_meta=None)):
        del calls[:]
        made.update_from_output(step, types.SimpleNamespace(kv_connector_output=output))
        assert calls == ["vllm"]
    here = {"c", "gone"}
    made.update_from_output(step, types.SimpleNamespace(kv_connector_output=None))
    assert calls[1:] == ["vllm", ("c", False), ("preempt", "c", False)], "its output counts"
    assert not made.running


# ---- the plugin ------------------------------------------------------------------------------

def test_the_plugin_names_backends_that_are_chosen_later(store, monkeypatch):
    from kvd.vllm import plugin
    named = {}
    registry = "vllm.v1.attention.backends.registry"
    patch(monkeypatch, registry, "AttentionBackendEnum",
          types.SimpleNamespace(CPU_ATTN=1, CPU_MLA=2))
    patch(monkeypatch, registry, "register_backend", named.__setitem__)
    for cpu, wanted in ((False, {}), (True, {1: "kvd.vllm.plugin.CPU_ATTN",
                                             2: "kvd.vllm.plugin.CPU_MLA"})):
        patch(monkeypatch, "vllm.platforms", "current_platform",
              types.SimpleNamespace(is_cpu=lambda cpu=cpu: cpu))
        plugin.load()
        assert named == wanted
    with pytest.raises(AttributeError):
        plugin.CPU_OTHER


@pytest.mark.parametrize("connector, given, routes", [
    (None, None, False), ("KvdStoreConnector", None, False), ("KvdConnector", "always", False),
    ("KvdStoreConnector", "off", False), ("KvdStoreConnector", "always", True)])
def test_engines_without_the_option_keep_their_backends(store, monkeypatch, connector, given,
                                                        routes):
    from kvd.vllm import plugin
    extra = {"route": given} if given else {}
    transfer = connector and types.SimpleNamespace(
        kv_connector=connector, get_from_extra_config=lambda name, preset: extra.get(name, preset))
    config = types.SimpleNamespace(kv_transfer_config=transfer)
    patch(monkeypatch, "vllm.config", "get_current_vllm_config", lambda: config)
    patch(monkeypatch, "vllm.utils.import_utils", "resolve_obj_by_qualname", lambda path: path)
    enum = {"CPU_ATTN": types.SimpleNamespace(value="vllm's own")}
    patch(monkeypatch, "vllm.v1.attention.backends.registry", "AttentionBackendEnum", enum)
    monkeypatch.setitem(sys.modules, "kvd.vllm.route_cpu", types.SimpleNamespace(Attention="kvd's"))
    assert plugin.CPU_ATTN == ("kvd's" if routes else "vllm's own")
