# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm's push without vLLM: chunks as steps and layers compute them, by two daemons, and the
bootstrap server."""
import json
import threading
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest

import kvd
from conftest import until
from kvd import engine, records
from kvd.layout import Layout
from kvd.rooms import FAILED, SUCCESS, WAITING_FOR_INPUT, View
from kvd.vllm import params, pools
from kvd.vllm.bootstrap import Lookups, Server, fetch
from kvd.vllm.push import Push

LAYERS, BLOCKS, TOKENS, UNIT = 3, 64, 16, 32
KV = pools.Group("kv", "kv", TOKENS, 1, 1, 0, 0)
STATE = pools.Group("state0", "state", TOKENS, 1, 1, 0, 0)
TICKET = "c0ffee" * 5 + "ab"


class Side:
    """One rank: a cache of three layers, a state, and records."""

    zeroed = False

    def __init__(self, daemon, role):
        self.client = kvd.Client(daemon.socket_path, client="vllm", role=role)
        self.cache = np.zeros((LAYERS, BLOCKS, TOKENS, UNIT), np.uint8)
        self.state = np.zeros((BLOCKS, UNIT), np.uint8)
        self.slots = records.Slots(4, records.LINE)
        self.made = pools.Buffers(0)
        layout = self.made.layout
        cache, state = (layout.buffer(x.nbytes) for x in (self.cache, self.state))
        self.made.groups = [KV, STATE]
        layout.view("kv", TOKENS, BLOCKS)
        for layer in range(LAYERS):
            layout.field("kv", layer, "kv", buffer=cache, offset=layer * self.cache[0].nbytes,
                         page_stride=TOKENS * UNIT, token_stride=UNIT, unit_stride=UNIT,
                         unit_bytes=UNIT)
        layout.view("state0", 1, BLOCKS)
        layout.field("state0", 0, "s", buffer=state, page_stride=UNIT, token_stride=UNIT,
                     unit_stride=UNIT, unit_bytes=UNIT)
        records.views_add(layout, layout.buffer(self.slots.memory.nbytes), 4, records.LINE)
        regions = [self.client.register(x) for x in (self.cache, self.state,
                                                     self.slots.memory)]
        self.pool = self.client.pool(layout, regions, name="push." + role)
        self.desk = engine.Desk(self.client)

    def push(self, room, open_s=20):
        handle = self.desk.send(room, self.pool, open_s=open_s, ticket=TICKET)
        return Push(self, "request %d" % room, handle)

    def recv(self, room, source):
        return self.desk.recv(room, self.pool, [source], receivers=1, open_s=20, ticket=TICKET)


@pytest.fixture(scope="module")
def sides(pair):
    p, d = Side(pair[0], "prefill"), Side(pair[1], "decode")
    p.cache[:] = (np.arange(BLOCKS, dtype=np.uint8)[:, None, None] +
                  100 * np.arange(LAYERS, dtype=np.uint8)[:, None, None, None])
    p.state[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 1
    yield p, d, kvd.Source(p.client.endpoint, "push.prefill", None, 0)
    p.client.close()
    d.client.close()


def no_mark():
    return None


def bound(d, room, source, pages, tokens, aux=None):
    recv = d.recv(room, source)
    views = {"kv": View(pages, 0, (0, tokens)), "state0": View([pages[0]], 0, (0, 1))}
    recv.bind(views, aux)
    return recv


def opened(p, push):
    until(lambda: p.desk.turn(True) or push.handle.look() >= WAITING_FOR_INPUT)


def ends(side, handle, state):
    until(lambda: side.desk.turn(True) or handle.look() in (FAILED, SUCCESS))
    assert handle.end == state, handle.reason


def whole(p, d, theirs, ours, tokens):
    for at in range(tokens):
        page, slot = divmod(at, TOKENS)
        assert (d.cache[:, ours[page], slot] == p.cache[:, theirs[page], slot]).all(), at


def landed(d, page, layer):
    return until(lambda: bool(d.cache[layer, page].any()))


def still_nothing(d, pages, turn, seconds=0.1):
    end = time.monotonic() + seconds
    until(lambda: turn() or time.monotonic() > end)
    assert not d.cache[:, pages].any()


# ---- steps -------------------------------------------------------------------------------

def test_chunks_are_sent_as_computed_and_the_rest_at_the_end(sides):
    p, d, source = sides
    push, recv = p.push(201), bound(d, 201, source, [1, 2, 3], 40, aux=0)
    opened(p, push)
    push.computed(([11], []), 16)
    push.advance(no_mark)
    landed(d, 1, 2)
    assert not d.cache[:, 2].any() and recv.look() != SUCCESS
    push.computed(([11, 12, 13], []), 40)
    push.advance(no_mark)
    push.advance(no_mark)  # a step of others
    landed(d, 3, 2)
    assert push.handle.given == 2 and not push.ended
    push.finish(([11, 12, 13], [5]), 40, 77)
    push.advance(no_mark)
    ends(p, push.handle, SUCCESS)
    ends(d, recv, SUCCESS)
    assert push.ended and push.handle.given == 3
    whole(p, d, [11, 12, 13], [1, 2, 3], 40)
    assert not d.cache[:, 3, 8:].any()
    assert (d.state[1] == p.state[5]).all()
    assert records.head_read(d.slots.record(0), 201) == (0, 77, None)
    assert p.slots.free == p.slots.count


def test_nothing_is_sent_before_decode_has_named_its_blocks(sides):
    p, d, source = sides
    push = p.push(202)
    for end in (16, 32, 40):
        push.computed(([14, 15, 16][:-(-end // TOKENS)], []), end)
        push.advance(no_mark)
    push.finish(([14, 15, 16], [6]), 40, None)
    push.advance(no_mark)
    assert push.handle.given == 0 and not push.ended
    recv = bound(d, 202, source, [4, 5, 6], 40)
    opened(p, push)
    push.advance(no_mark)
    assert push.handle.given == 1
    ends(d, recv, SUCCESS)
    whole(p, d, [14, 15, 16], [4, 5, 6], 40)


def test_layers_are_sent_during_the_pass(sides):
    p, d, source = sides
    push, recv = p.push(203), bound(d, 203, source, [7], 16)
    opened(p, push)
    push.computed(([17], []), 16)
    push.layer_saved(0, no_mark)
    landed(d, 7, 0)
    assert not d.cache[1:, 7].any()
    push.layer_saved(1, no_mark)
    landed(d, 7, 1)
    assert not d.cache[2, 7].any()
    push.advance(no_mark)  # layers without a hook
    landed(d, 7, 2)
    push.finish(([17], [7]), 16, None)
    push.advance(no_mark)
    ends(d, recv, SUCCESS)
    whole(p, d, [17], [7], 16)
    assert recv.bytes == LAYERS * 16 * UNIT + UNIT  # nothing twice


def test_room_opened_during_a_pass_gets_earlier_layers(sides):
    p, d, source = sides
    push = p.push(204)
    push.computed(([18], []), 16)
    push.layer_saved(0, no_mark)
    assert push.handle.given == 0
    recv = bound(d, 204, source, [8], 16)
    opened(p, push)
    push.layer_saved(1, no_mark)
    assert push.handle.given == 1
    landed(d, 8, 1)
    assert d.cache[0, 8].any() and not d.cache[2, 8].any()
    push.advance(no_mark)
    push.finish(([18], [8]), 16, None)
    push.advance(no_mark)
    ends(d, recv, SUCCESS)
    whole(p, d, [18], [8], 16)


class Late:
    """A mark that is passed by hand: a word in registered memory."""

    def __init__(self, side):
        memory = kvd.Memory(4096, "mark")
        self.word = memory.array((512,), np.uint64)
        self.region = side.client.register(memory)

    def __call__(self):
        return self.region, 0, 1


@pytest.mark.parametrize("waits", [True, False])
def test_chunk_is_read_behind_its_mark(sides, waits):
    """And without one at once: what shows that the first half can fail."""
    p, d, source = sides
    room, page, theirs = 205 + waits, 9 + waits, 19 + waits
    mark = Late(p)
    push, recv = p.push(room), bound(d, room, source, [page], 16)
    opened(p, push)
    truth, p.cache[:, theirs] = p.cache[:, theirs].copy(), 255
    push.computed(([theirs], []), 16)
    push.layer_saved(0, mark if waits else no_mark)
    if waits:
        still_nothing(d, page, lambda: p.desk.turn(True))
    else:
        landed(d, page, 0)
    p.cache[:, theirs] = truth
    mark.word[0] = 1
    push.advance(no_mark)
    push.finish(([theirs], [7]), 16, None)
    push.advance(no_mark)
    ends(d, recv, SUCCESS)
    ends(p, push.handle, SUCCESS)
    assert (d.cache[0, page] == (truth[0] if waits else 255)).all()
    assert (d.cache[1:, page] == truth[1:]).all()
    mark.region.unregister()


@pytest.mark.parametrize("waits", [True, False])
def test_offer_is_read_behind_its_mark(sides, waits):
    """And without one at once."""
    p, d, source = sides
    room, page, theirs = 240 + waits, 42 + waits, 52 + waits
    mark = Late(p)
    offer = p.desk.offer(room, p.pool, {"kv": View([theirs], 0, (0, 16))}, lease_ms=20000,
                         ticket=TICKET, wait=mark() if waits else None)
    pull = d.desk.pull(room, d.pool, [source], receivers=1, open_s=20, ticket=TICKET)
    pull.bind({"kv": View([page], 0, (0, 16))})
    if waits:
        still_nothing(d, page, lambda: p.desk.turn(True))
        assert pull.look() < SUCCESS
    mark.word[0] = 1
    ends(d, pull, SUCCESS)
    ends(p, offer, SUCCESS)
    assert (d.cache[0, page] == p.cache[0, theirs]).all()
    mark.region.unregister()


def test_preemption_waits_for_chunks_being_read(sides):
    p, d, source = sides
    push, recv = p.push(207), bound(d, 207, source, [11, 12], 32)
    opened(p, push)
    push.computed(([21], []), 16)
    push.advance(no_mark)
    push.settle()
    assert push.handle.end is None
    p.cache[:, 21] = 254  # another request's
    push.computed(([23], []), 16)  # computed again, elsewhere
    push.advance(no_mark)
    push.computed(([23, 24], []), 32)
    push.advance(no_mark)
    push.finish(([23, 24], [7]), 32, None)
    push.advance(no_mark)
    ends(d, recv, SUCCESS)
    assert (d.cache[:, 11] != 254).all()
    assert (d.cache[0, 11] == 21).all() and (d.cache[0, 12] == 24).all()


def test_preemption_ends_possibly_zeroed_pushes(sides, monkeypatch):
    """A runner that zeroes the blocks of others before it tells of the preemption."""
    p, d, source = sides
    monkeypatch.setattr(p, "zeroed", True)
    for room, given in ((230, False), (231, True)):
        push, recv = p.push(room), bound(d, room, source, [40], 16)
        opened(p, push)
        push.computed(([25], []), 16 if given else 0)
        push.advance(no_mark)
        push.settle()
        assert push.handle.end == (FAILED if given else None)
        push.give_up("enough", True)
        ends(d, recv, FAILED)


def test_preemption_ends_pushes_not_read_in_time(sides, monkeypatch):
    p, d, source = sides
    monkeypatch.setattr("kvd.vllm.push.PREEMPT_S", 0.05)
    mark = Late(p)
    push, recv = p.push(208), bound(d, 208, source, [13], 16)
    opened(p, push)
    push.computed(([25], []), 16)
    push.advance(mark)
    push.settle()
    assert push.handle.end == FAILED and "preempted" in push.handle.reason
    ends(d, recv, FAILED)
    mark.word[0] = 1
    still_nothing(d, 13, lambda: None, 0.05)
    mark.region.unregister()


def test_abandoned_request_fails_on_both_sides(sides):
    p, d, source = sides
    push, recv = p.push(209), bound(d, 209, source, [14], 16)
    opened(p, push)
    push.give_up("aborted by prefill", True)
    ends(d, recv, FAILED)
    assert "aborted by prefill" in recv.reason
    until(lambda: p.desk.turn(True) or push.ended)


def test_absent_decode_returns_the_blocks(sides):
    p, d, source = sides
    push = p.push(211, open_s=0.3)
    push.finish(([28], [7]), 16, 5)
    push.advance(no_mark)
    until(lambda: p.desk.turn(True) or push.ended)
    assert push.handle.end == FAILED and push.handle.code == "ETIMEOUT" and not push.handle.given
    late = bound(d, 211, source, [16], 16)
    ends(d, late, FAILED)
    assert not d.cache[:, 16].any()


def test_used_room_number_is_refused(sides):
    """Two requests of one number: the first one goes on."""
    p, d, source = sides
    push, other = p.push(212), p.push(212, open_s=0.2)
    recv = bound(d, 212, source, [17], 16)
    opened(p, push)
    until(lambda: p.desk.turn(True) or other.handle.look() == FAILED)
    assert "in use by an abandoned transfer" in other.handle.reason
    push.finish(([29], [7]), 16, None)
    push.advance(no_mark)
    ends(d, recv, SUCCESS)
    whole(p, d, [29], [17], 16)


def test_no_free_record_ends_the_request(sides):
    p, d, source = sides
    taken = [p.slots.take() for _ in range(p.slots.count)]
    push, recv = p.push(210), bound(d, 210, source, [15], 16)
    opened(p, push)
    push.finish(([27], [7]), 16, 5)
    push.advance(no_mark)
    ends(d, recv, FAILED)
    assert "no free record" in recv.reason
    for slot in taken:
        p.slots.give(slot)


def test_blocks_left_of_the_window_are_not_sent():
    swa = KV._replace(name="swa0", kind="swa", window=40)
    view = swa.pushed([0, 0, 7, 8], 0, 60)
    assert (list(view.pages), view.first_token, view.tokens) == ([7, 8], 32, (32, 60))
    assert swa.pushed([0, 0], 0, 32) is None
    view = KV.pushed([5, 6, 7], 20, 48)
    assert (list(view.pages), view.first_token, view.tokens) == ([6, 7], 16, (20, 48))


def test_whole_blocks_wait_until_full():
    sent = []
    whole_blocks = pools.Buffers(0)
    whole_blocks.groups = [KV._replace(grain=TOKENS)]
    handle = types.SimpleNamespace(stopped=False, look=lambda: WAITING_FOR_INPUT, number=1,
                                   send=lambda views, *a, **kw: sent.append(views))
    push = Push(types.SimpleNamespace(made=whole_blocks, slots=None), "r", handle)
    push.computed(([3, 4],), 20)
    push.advance(no_mark)
    push.finish(([3, 4],), 20, None)
    push.advance(no_mark)
    assert [(list(v["kv"].pages), v["kv"].tokens) for v in sent] == [([3], (0, 1)),
                                                                    ([4], (1, 2))]


# ---- where prefill is ----------------------------------------------------------------------

ROW = {"endpoint": "tcp://a:1", "pool": "m.p", "rank": 0, "heads": 2, "views": ["kv"],
       "states": [], "aux": 64}
SECRET = "ab" * 32


@pytest.fixture
def server():
    pytest.importorskip("aiohttp")
    from kvd_daemon import free_port
    port = free_port()
    rows = {(0, 0): ROW, (0, 1): dict(ROW, rank=1)}
    made = Server("127.0.0.1", port, 2, 1, lambda: rows, SECRET)
    yield "127.0.0.1:%d" % port, rows
    made.close()


def test_decode_finds_all_ranks(server):
    address, _ = server
    found, dp = fetch(address, 5)
    assert (found.tp, found.pp, dp) == (2, 1, 1)
    assert [row["rank"] for row in found.rows] == [0, 1]
    assert found.rows[0]["secret"] == SECRET and found.rows[0]["heads"] == 2


def status(address, path):
    try:
        return urllib.request.urlopen("http://%s%s" % (address, path), timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("path, answer", [
    ("/health", 200), ("/route", 400), ("/other", 404),
    ("/route?prefill_dp_rank=x&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", 400),
    ("/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=2&target_pp_rank=0", 404),
    ("/route?prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", 404),
    ("/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0", 200)])
def test_bootstrap_server_answers(server, path, answer):
    assert status(server[0], path) == answer


def test_server_end_frees_its_port(server):
    address = server[0]
    with pytest.raises(RuntimeError, match="no bootstrap server on 127.0.0.1"):
        Server("127.0.0.1", int(address.rsplit(":")[1]), 1, 1, dict, SECRET)


def test_lookup_does_not_wait(server):
    lookups = Lookups()
    begun = time.monotonic()
    assert lookups.of(server[0], 1) is None and time.monotonic() - begun < 1
    assert until(lambda: lookups.of(server[0], 1)).tp == 2
    server[1][0, 0] = dict(ROW, endpoint="tcp://b:2")
    assert lookups.of(server[0], 1).rows[0]["endpoint"] == "tcp://a:1"
    lookups.forget()
    assert until(lambda: lookups.of(server[0], 1)).rows[0]["endpoint"] == "tcp://b:2"


def answering(body):
    """A server of anybody's."""
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass
    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made, "127.0.0.1:%d" % made.server_address[1]


SIZES = {"attn_tp_size": 1, "pp_size": 1, "dp_size": 1, "follow_bootstrap_room": True}


@pytest.mark.parametrize("told, words", [
    (b"{", "Expecting"), (b"[]", "not an object"), (b"{}", "attn_tp_size"),
    (json.dumps(dict(SIZES, attn_tp_size=10 ** 9)).encode(), "attn_tp_size"),
    (json.dumps(dict(SIZES, attn_tp_size=1024, pp_size=1024)).encode(), "1024 x 1024"),
    (json.dumps(dict(SIZES, dp_size=2, follow_bootstrap_room=False)).encode(), "data-parallel"),
    (json.dumps(SIZES).encode(), "does not use kvd"), (b"x" * (2 << 20), "Expecting")])
def test_invalid_server_answer_is_refused_by_field(told, words):
    made, address = answering(told)
    try:
        with pytest.raises((ValueError, TypeError), match=words):
            fetch(address, 1)
        lookups = Lookups()
        assert lookups.of(address, 1) is None

        def refused():
            try:
                return lookups.of(address, 1)
            except ValueError as error:
                return str(error)
        assert words in until(refused)
    finally:
        made.shutdown()
        made.server_close()


@pytest.mark.parametrize("told, what", [
    ({"bootstrap_room": -1}, "bootstrap_room"), ({"bootstrap_room": 2 ** 63}, "bootstrap_room"),
    ({"bootstrap_room": "1x"}, "bootstrap_room"), ({"bootstrap_room": 1.5}, "bootstrap_room"),
    ({"bootstrap_room": 1}, "bootstrap_host"),
    ({"bootstrap_room": 1, "bootstrap_host": "a/b", "bootstrap_port": 1}, "bootstrap_host"),
    ({"bootstrap_room": 1, "bootstrap_host": "a", "bootstrap_port": 0}, "bootstrap_port"),
    ({"bootstrap_room": 1, "bootstrap_host": "a", "bootstrap_port": None}, "bootstrap_port")])
def test_invalid_proxy_params_are_refused_by_field(told, what):
    with pytest.raises(ValueError, match=what):
        params.room_of(told)
        params.address_of(told)


def test_proxy_params():
    assert params.room_of({}) is None and params.room_of({"bootstrap_room": "12"}) == 12
    assert params.address_of({"bootstrap_host": "::1", "bootstrap_port": "99"}) == "[::1]:99"
    assert params.address_of({"bootstrap_host": "a.b-c", "bootstrap_port": 9}) == "a.b-c:9"
