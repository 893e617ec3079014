# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm without vLLM: which way a prefix of other daemons is used, by the prices of a published
fabric, and documents that are fetched while they are routed to."""
import math
import types

import pytest

import kvd
from conftest import until
from kvd.chunks import Holder
from kvd.cost import SELF, Model
from kvd.errors import error_make
from kvd.stores.choice import HOLDERS_MAX, TIMED_TOKENS, model_of
from kvd.vllm.choice import FETCH, LOCAL, ROUTE, Ways
from kvd.vllm.route import RENT_AGAIN_S, RENT_STEPS, Routes
from kvd.vllm.store_plan import Step
from kvd.vllm.store_worker import over
from kvd_daemon import Daemon
from test_vllm_plan import BLOCK, T, Request, Store, layout_text, output, plan_of
from test_vllm_route import RATIO, nulls, step_of
from test_vllm_store import CHUNKS, Side, held, ids_of, words_of

LLAMA = Model.gqa(32, 32, 8, value_bytes=2)
PAGE = kvd.cost.preset("h100-ibgda")
HERE = (SELF, False)  # not in GPU memory
CHEAP, DEAR = 0.001, 1000.0  # to compute a token in a layer, µs


def prices(token_us=0.0, model=LLAMA, timed=True):
    made = Ways(timed)
    made.model, made.token_us = model, token_us
    return made


def choose(made, tokens=32768, steps=1, page=PAGE, **more):
    given = dict(query_tokens=16, no_pages=False)
    given.update(more)
    return made.choose(page, {HERE: tokens} if tokens else {}, steps, **given)


# ---- prices ----------------------------------------------------------------------------------

@pytest.mark.parametrize("token_us, more, way", [
    (DEAR, {}, ROUTE), (DEAR, dict(steps=2000), FETCH), (DEAR, dict(tokens=64), FETCH),
    (DEAR, dict(query_tokens=16384), FETCH), (CHEAP, dict(tokens=64), LOCAL),
    (CHEAP, dict(query_tokens=16384), LOCAL), (0.0, dict(tokens=64), FETCH),
    (CHEAP, dict(no_pages=True), ROUTE), (DEAR, dict(steps=2000, no_pages=True), ROUTE),
    (CHEAP, dict(tokens=0), FETCH)])
def test_the_cheapest_way_is_chosen(token_us, more, way):
    assert choose(prices(token_us), **more) == way


@pytest.mark.parametrize("token_us, tokens, computes", [
    (DEAR, 32768, False), (CHEAP, 32768, True), (0.0, 32768, False), (CHEAP, 0, False)])
def test_an_engine_that_cannot_route_computes_what_is_cheaper_to_compute(token_us, tokens, computes):
    holders = {HERE: tokens} if tokens else {}
    assert prices(token_us).computes(PAGE, holders) == computes


def test_the_choice_changes_where_the_sum_of_prices_does():
    """Against the closed form of all steps together."""
    for query_tokens in (1, 8, 64):
        even = PAGE.decide(LLAMA, [kvd.cost.Holder(32768)], query_tokens=1, steps=1)
        many = PAGE.decide(LLAMA, [kvd.cost.Holder(32768)], query_tokens=query_tokens, steps=1)
        more = LLAMA.layers * (even.round.us - even.attend.us)
        first = LLAMA.layers * (many.round.us - many.attend.us)
        last = (even.once.us - first) / more
        assert last > 20
        made = prices(DEAR)
        assert choose(made, query_tokens=query_tokens, steps=math.floor(last)) == ROUTE
        assert choose(made, query_tokens=query_tokens, steps=math.ceil(last)) == FETCH
        steps = made.steps_of(PAGE, {HERE: 32768}, query_tokens)
        assert steps == int(first / more)
        assert not made.turned(PAGE, {HERE: 32768}, int(even.even_steps) - 1)
        assert made.turned(PAGE, {HERE: 32768}, int(even.even_steps) + 1)


@pytest.mark.parametrize("code", ["EBUSY", "ENOTFOUND"])
def test_without_prices_it_is_fetched(code):
    def decide(*args, **kw):
        raise error_make(5, code, code == "EBUSY", "op", "no")
    made, page = prices(CHEAP), types.SimpleNamespace(decide=decide)
    assert choose(made, page=page) == FETCH and not made.computes(page, {HERE: 1})
    assert not made.turned(page, {HERE: 1}, 10 ** 6) and made.steps_of(page, {HERE: 1}, 8) == 0


def test_more_holders_than_a_decision_takes_are_fetched_from():
    many = {bytes([i]) * 16: 64 for i in range(HOLDERS_MAX + 1)}
    made = prices(CHEAP)
    assert made.choose(PAGE, many, 1, query_tokens=1, no_pages=False) == FETCH
    assert not made.computes(PAGE, many)
    assert not made.turned(PAGE, many, 10 ** 6) and made.steps_of(PAGE, many, 4) == 0


def test_a_stock_engine_has_the_bytes_of_its_layout():
    assert model_of(layout_text()) == Model.gqa(1, 1, 1, 1, 1, token_bytes=64)


def test_time_of_a_token_is_that_of_large_steps():
    made, now = prices(), [0.0]
    made.clock = lambda: now[0]
    for tokens, seconds, wanted in ((TIMED_TOKENS - 1, 9, 0), (64, 0.064, 1000 / 32),
                                    (1, 9, 1000 / 32), (128, 0.256, 1250 / 32)):
        made.began(tokens)
        now[0] += seconds
        made.ended()
        made.ended()
        assert made.token_us == pytest.approx(wanted)
    idle = prices(timed=False)
    idle.began(1000), idle.ended()
    assert idle.token_us == 0


# ---- a request -------------------------------------------------------------------------------

class Held:
    def __init__(self, chunks, own, secret, peer):
        self.chunks, self.remote, self.secret, self.peer = chunks, chunks - own, secret, peer

    def holders(self, timeout):
        at = self.chunks - self.remote
        return (Holder(self.peer, at, self.remote, self.remote * T, False),) if self.remote else ()


class Stores(Store):
    """there: chunks of any prompt, of which the first `own` are the own daemon's."""
    status, page = {"attention": "x"}, PAGE

    def __init__(self, there, own):
        super().__init__(there)
        self.own, self.client, self.opened, self.made = own, self, 0, 0

    def command(self, name, timeout):
        return self.status

    def cost_page(self, timeout):
        self.opened += 1
        return self.page

    def hold(self, ids, first, lease, remote, timeout):
        count, self.made = max(0, min(len(ids), self.there - first)), self.made + 1
        return Held(count, min(self.own, count), b"%d" % self.made, SELF)


class Pool:
    """vLLM's blocks."""
    caches = True

    def __init__(self, count=10000):
        self.count, self.cached, self.given = count, [], []

    def free(self):
        return self.count

    def take(self, count):
        return list(range(5000, 5000 + count)) if count <= self.count // 2 else None

    numbers = staticmethod(list)

    def cache(self, request, first, blocks):
        self.cached.append((request.request_id, first, list(blocks)))

    def give(self, blocks):
        self.given.append(list(blocks))


def auto(there, own, token_us=DEAR, **kw):
    plan, _, clock = plan_of(routes=Routes(BLOCK), remote=0.3, prices=Ways(True), **kw)
    plan.prices.model, plan.prices.token_us = LLAMA, token_us
    plan.spaces, plan.routes.pool = Stores(there, own), Pool()
    return plan, plan.spaces, clock


def arrive(plan, tokens, name="a", answer=64):
    request = Request(tokens, name)
    request.num_prompt_tokens, request.max_tokens = tokens, answer
    plan.arrived(request)
    return request


LONG = 32 * T + 16  # of 32 chunks and a question


def test_a_short_answer_is_routed_and_a_short_document_fetched():
    plan, _, _ = auto(600, 0)
    assert plan.matched(arrive(plan, 600 * T + 16), 0) == (600 * T, False)
    plan, _, _ = auto(1, 0)
    request = arrive(plan, 100)
    assert plan.matched(request, 0) == (T, True) and plan.routes.away == {}
    plan.allocated(request, lambda: (list(range(1000, 1040)),), T)
    assert plan.take(output({})).loads == [("a", b"1", [1000, 1001, 1002, 1003], 0, T)]


def test_an_engine_without_a_prefix_cache_decides_for_the_longest_answer():
    for answer, routed in ((8, True), (100000, False)):
        plan, _, _ = auto(600, 0)
        plan.routes.pool.caches = False
        request = arrive(plan, 600 * T + 16, answer=answer)
        assert plan.matched(request, 0) == (600 * T, not routed)


def test_what_is_at_the_own_daemon_has_no_price():
    plan, store, _ = auto(600, 600)
    assert plan.matched(arrive(plan, 600 * T + 16), 0) == (600 * T, True) and not store.opened


def test_an_engine_without_free_blocks_routes():
    plan, _, _ = auto(2, 0, token_us=CHEAP)
    plan.routes.pool.count = 2 * RATIO - 1
    assert plan.matched(arrive(plan, 2 * T + 5), 0) == (2 * T, False)


def test_a_daemon_that_computes_nothing_for_its_own_chunks_has_all_fetched():
    plan, store, _ = auto(600, 10)
    store.status = {}
    request = arrive(plan, 600 * T + 16)
    assert plan.matched(request, 0) == (600 * T, True)
    plan.allocated(request, lambda: (list(range(1, 600 * RATIO + 2)),), 600 * T)
    ((_, secret, blocks, begin, end),) = plan.take(output({})).loads
    assert secret == b"1" and (begin, end) == (0, 600 * T)
    assert len(blocks) == 600 * RATIO


def test_a_prefix_that_is_cheaper_to_compute_is_not_fetched():
    for own, wanted in ((0, (0, False)), (3, (3 * T, True))):
        plan, _, _ = auto(8, own, token_us=CHEAP)
        request = arrive(plan, 8 * T + 16)
        assert plan.matched(request, 0) == wanted
        assert plan.requests["a"].saved == own, "what it computes is stored"


def test_a_stock_engine_computes_what_is_cheaper_to_compute():
    for token_us, wanted in ((CHEAP, (0, False)), (DEAR, (8 * T, True)), (0.0, (8 * T, True))):
        plan, _, _ = auto(8, 0, token_us=token_us)
        plan.routes = None
        assert plan.matched(arrive(plan, 8 * T + 16), 0) == wanted


def test_without_a_page_it_is_fetched():
    plan, store, _ = auto(600, 0)
    plan._page = lambda: None
    assert plan.matched(arrive(plan, 600 * T + 16), 0) == (600 * T, True)


def test_a_queued_request_is_priced_once_a_hold():
    plan, store, clock = auto(600, 0)
    request, calls = arrive(plan, 600 * T + 16), []
    choose = plan.prices.choose
    plan.prices.choose = lambda *args, **kw: calls.append(1) or choose(*args, **kw)
    for _ in range(5):
        assert plan.matched(request, 0) == (600 * T, False)
    assert len(calls) == 1 and store.opened == 1
    clock.now += plan.routes.lease
    plan.matched(request, 0)
    assert len(calls) == 2 and store.opened == 1


# ---- a document that is fetched while it is routed to ----------------------------------------

DOCUMENT = 600 * T


def admit(plan, name="a", tokens=DOCUMENT + 16):
    request = arrive(plan, tokens, name, 4096)
    assert plan.matched(request, 0) == (DOCUMENT, False)
    table = nulls(0, DOCUMENT, 600 * RATIO + 40)
    plan.allocated(request, lambda: (table,), DOCUMENT)
    request.num_computed_tokens = DOCUMENT
    return request, table


def routed(plan, table, counts, most=2000):
    """Steps until one has a rent -> (steps, Step)"""
    for i in range(most):
        step = step_of(plan, table, **counts)
        if step.rents:
            return i + 1, step
    return most, None


def even_steps():
    return PAGE.decide(LLAMA, [kvd.cost.Holder(DOCUMENT)], query_tokens=1, steps=1).even_steps


def test_a_document_is_fetched_when_routing_has_cost_as_much():
    plan, _, _ = auto(600, 0)
    request, table = admit(plan)
    own = plan.prices.steps_of(PAGE, {HERE: DOCUMENT}, 16)
    assert 0 < own == plan.routes.ways["a"].document.steps
    steps, step = routed(plan, table, {"a": 1})
    assert 0 <= own + steps - even_steps() <= RENT_STEPS
    ((number, secret, blocks, begin, end),) = step.rents
    assert secret == b"1" and (begin, end) == (0, DOCUMENT)
    assert blocks == list(range(5000, 5000 + 600 * RATIO)) and step.routes, "it is still routed"
    assert routed(plan, table, {"a": 1}, 3 * RENT_STEPS)[1] is None, "once"
    plan.heard((), set(), {number: [True]})
    assert plan.routes.pool.cached == [("a", 0, blocks)] and plan.routes.pool.given == [blocks]
    assert plan.routes.take_landed() == {"a"} and plan.routes.take_landed() == set()
    plan.again(request, False)
    assert not plan.routes.ways and not plan.routes.away and not plan.routes.losses
    assert plan.matched(request, DOCUMENT) == (0, False)


def test_requests_of_one_document_pay_together_and_go_over_together():
    plan, _, _ = auto(600, 0)
    (_, table), _, (other, _) = admit(plan), admit(plan, "b"), admit(plan, "c")
    own = 3 * plan.prices.steps_of(PAGE, {HERE: DOCUMENT}, 16)
    steps, step = routed(plan, table, {"a": 1, "b": 1, "c": 1})
    assert 0 <= own + 3 * steps - even_steps() <= 3 * RENT_STEPS
    plan.finished(other, (table,))
    plan.heard((), set(), {step.rents[0][0]: [True]})
    assert plan.routes.take_landed() == {"a", "b"}


@pytest.mark.parametrize("second", [True, False])
def test_a_fetch_by_two_ranks_ends_with_the_later_one(second):
    plan, _, _ = auto(600, 0)
    plan.routes.ranks = 2
    _, table = admit(plan)
    number = routed(plan, table, {"a": 1})[1].rents[0][0]
    plan.heard((), set(), {number: [True]})
    assert not plan.routes.pool.given and not plan.routes.pool.cached, "the other one still writes"
    plan.heard((), set(), {number: [second]})
    assert len(plan.routes.pool.given) == 1 and len(plan.routes.pool.cached) == second
    assert plan.routes.take_landed() == ({"a"} if second else set())


def test_a_fetch_that_failed_is_tried_again_later():
    plan, _, clock = auto(600, 0)
    _, table = admit(plan)
    pause = RENT_AGAIN_S
    for _ in range(3):
        number = routed(plan, table, {"a": 1})[1].rents[0][0]
        plan.heard((), set(), {number: [False]})
        assert plan.routes.take_landed() == set() and not plan.routes.pool.cached
        assert not plan.routes.rents and len(plan.routes.pool.given) == number
        clock.now += pause / 2
        assert routed(plan, table, {"a": 1}, 3 * RENT_STEPS)[1] is None
        clock.now += pause
        pause *= 2


def test_blocks_of_an_earlier_model_are_not_cached():
    plan, _, _ = auto(600, 0)
    _, table = admit(plan)
    number = routed(plan, table, {"a": 1})[1].rents[0][0]
    plan.reset()
    plan.heard((), set(), {number: [True]})
    assert not plan.routes.pool.cached and len(plan.routes.pool.given) == 1
    assert plan.routes.take_landed() == set()


@pytest.mark.parametrize("change", [dict(caches=False), dict(count=600 * RATIO)])
def test_nothing_is_fetched_without_a_place_for_it(change):
    plan, _, _ = auto(600, 0)
    _, table = admit(plan)
    vars(plan.routes.pool).update(change)
    assert routed(plan, table, {"a": 1})[1] is None


def test_a_request_that_ends_leaves_its_fetch_to_later_ones():
    plan, _, _ = auto(600, 0)
    request, table = admit(plan)
    number = routed(plan, table, {"a": 1})[1].rents[0][0]
    plan.finished(request, (table,))
    plan.heard((), set(), {number: [True]})
    assert len(plan.routes.pool.cached) == 1 and plan.routes.take_landed() == set()


# ---- workers, and vLLM's blocks --------------------------------------------------------------

@pytest.fixture(scope="module")
def daemon():
    with Daemon(CHUNKS) as d:
        yield d


def stored(side, test):
    """A prompt of four chunks -> (words, its hold)"""
    words, ids, blocks = words_of(test), ids_of(test, 4), list(range(3, 3 + 4 * RATIO))
    side.write(blocks, 5)
    side.save(words, ids, blocks)
    assert side.results() == ({"a"}, set())
    return words, held(side, words, ids)


@pytest.mark.parametrize("whole", [True, False])
def test_a_rent_is_reported_by_its_number_alone(daemon, whole):
    with Side(daemon) as side:
        words, hold = stored(side, "rent %s" % whole)
        if not whole:
            hold.close()
        into = list(range(40, 40 + 4 * RATIO))
        side.rank.take(Step(words=words, rents=[(7, hold.secret, into, 0, 4 * T)]))
        until(lambda: side.rank.results() == (set(), set()) and not side.rank.rents)
        assert side.rank.take_rented() == {7: [whole]} and side.rank.take_rented() == {}
        assert not side.rank.bad_blocks() and side.total("rents") == whole
        assert side.holds(into, 5, 0, 4 * T) == whole


def test_quiet_stops_rents(daemon):
    with Side(daemon) as side:
        words, hold = stored(side, "quiet")
        side.rank.take(Step(words=words, rents=[(1, hold.secret, list(range(40, 40 + 4 * RATIO)),
                                                 0, 4 * T)]))
        side.rank.quiet()
        assert over(side.rank.rents[1].move)
