# SPDX-License-Identifier: Apache-2.0
"""kvd.sglang without the engine: layouts of its buffers, the record of its metadata, and
rooms on a scheduler's one thread, over two daemons."""
import json
import time
import types

import numpy as np
import pytest

import kvd
from conftest import until
from kvd import engine, records, route
from kvd.rooms import FAILED, RECV, SUCCESS, WAITING_FOR_INPUT
from kvd.sglang import pools, slots

PAGE, PAGES, TICKET = 4, 64, "5" * 32


def ranks(size=1, rank=0, pool_rank=None):
    return pools.Ranks(size, rank, size, rank, rank if pool_rank is None else pool_rank)


def args(item_lens, *, pages=PAGES, draft=0, ids=(), states=(), page_size=PAGE, **more):
    """KVArgs as SGLang makes them. states: (type, item_lens, dims, groups, outer, ids)."""
    at = iter(range(1 << 20, 1 << 40, 1 << 20))
    lists = list(zip(*states)) or [()] * 6
    lens = [[pages * n for n in one] for one in lists[1]]
    return types.SimpleNamespace(
        kv_data_ptrs=[next(at) for _ in item_lens], kv_item_lens=list(item_lens),
        kv_data_lens=[pages * n for n in item_lens], num_draft_entries=draft,
        kv_layer_ids=list(ids), page_size=page_size, state_types=list(lists[0]),
        state_data_ptrs=[[next(at) for _ in one] for one in lens], state_data_lens=lens,
        state_item_lens=[list(one) for one in lists[1]], state_dim_per_tensor=list(lists[2]),
        state_conv_shard_groups=list(lists[3]), state_slice_outer_counts=list(lists[4]),
        state_layer_ids=list(lists[5]), **more)


def state(kind, item_lens, dims=(), groups=(), outer=(), ids=()):
    return kind, list(item_lens), list(dims), list(groups), list(outer), list(ids)


def told(layout):
    return json.loads(layout.text())


# ---- layouts ----

@pytest.mark.parametrize("size, rank, heads", [(1, 0, 8), (2, 1, 8), (4, 3, 4), (8, 5, 2)])
def test_attention_is_the_layouts_own_shape(size, rank, heads):
    units = max(heads // size, 1)
    made = pools.build(args([units * 256 * PAGE] * 6), ranks(size, rank), heads=heads,
                       mla=False)
    assert told(made.layout) == told(kvd.Layout.sglang_mha(
        page_size=PAGE, pages=PAGES, layers=3, kv_heads=heads, head_bytes=256, tp_size=size,
        tp_rank=rank))
    made = pools.build(args([1152 * PAGE] * 3), ranks(size, rank), heads=None, mla=True)
    assert told(made.layout) == told(kvd.Layout.sglang_mla(
        page_size=PAGE, pages=PAGES, layers=3, latent_bytes=1152, tp_rank=rank))


def test_k_and_v_may_differ_in_width_and_a_stage_holds_its_layers():
    made = pools.build(args([192 * PAGE] * 2 + [128 * PAGE] * 2), ranks(), heads=2, mla=False,
                       start_layer=5, pp_size=2)
    layers = told(made.layout)["views"]["kv"]["layers"]
    assert [x["layer"] for x in layers] == [5, 6]
    assert [(f["name"], f["unit_bytes"], f["units"]) for f in layers[0]["fields"]] == \
        [("k", 96, 2), ("v", 64, 2)]
    made = pools.build(args([64 * PAGE] * 4, ids=[3, 7, 3, 7]), ranks(), heads=2, mla=False)
    assert [x["layer"] for x in told(made.layout)["views"]["kv"]["layers"]] == [3, 7]
    with pytest.raises(ValueError, match="kv_layer_ids"):
        pools.build(args([64 * PAGE] * 4, ids=[3, 7, 3, 8]), ranks(), heads=2, mla=False)


def test_draft_follows_the_targets_pages():
    made = pools.build(args([64 * PAGE] * 4 + [32 * PAGE] * 2, draft=2), ranks(2, 1), heads=4,
                       mla=False)
    draft = told(made.layout)["views"]["draft"]
    assert draft["page_tokens"] == PAGE and len(draft["layers"]) == 2
    field = draft["layers"][1]["fields"][0]
    assert (field["first_unit"], field["units"], field["total_units"]) == (2, 2, 4)
    assert [p[1] for p in made.parts[4:]] == [PAGES * 32 * PAGE] * 2


def test_layouts_without_token_rows_are_refused():
    pools.check(args([64 * PAGE] * 2, kv_layout="nhd"), False)
    with pytest.raises(ValueError, match="layout uniform_fp8 is not rows of tokens"):
        pools.check(args([64 * PAGE] * 2, kv_layout="uniform_fp8"), False)


def test_state_is_cut_as_sglang_cuts_it():
    """Conv state of three groups, temporal state of one, both in one component."""
    size, rank = 2, 1
    conv, temporal = (8 + 8 + 16) * 6, 16 * 32
    made = pools.build(args([64 * PAGE] * 2, states=[state(
        "mamba", [conv, conv, temporal, temporal], [32, 32, 16, 16],
        [[16, 16, 32], [16, 16, 32], None, None], [1, 1, 1, 1], [1, 4, 1, 4])]),
        ranks(size, rank), heads=2, mla=False)
    view = told(made.layout)["views"]["state0"]
    assert view["page_tokens"] == 1 and made.states == ["state0"]
    found = {x["layer"]: x["fields"] for x in view["layers"]}
    assert sorted(found) == [1, 4, pools.GROUP + 1, pools.GROUP + 4]
    item = 6 * (8 + 8 + 16)
    wanted = [dict(name="s0.%d" % i, buffer=0, offset=at, page_stride=item, token_stride=item,
                   unit_stride=6, unit_bytes=6, first_unit=units, units=units,
                   total_units=2 * units)
              for i, (at, units) in enumerate([(0, 8), (48, 8), (96, 16)])]
    assert [dict(f, buffer=0) for f in found[4]] == wanted
    (whole,) = found[pools.GROUP + 4]
    assert (whole["unit_bytes"], whole["first_unit"], whole["total_units"]) == (32, 16, 32)
    outer = pools.state_fields(3 * 4 * 2, 4, 3, None, ranks(2, 0))
    assert [(f[0], f[1], f[3]) for f in outer] == [("s0.0", 0, 4), ("s1.0", 8, 4),
                                                    ("s2.0", 16, 4)]


def test_window_is_cut_by_heads_where_its_layout_is_known():
    window = state("swa", [2 * 32 * PAGE] * 4)
    flat = args([64 * PAGE] * 2, states=[window], swa_kv_cache_layout="hnd")
    cut = args([64 * PAGE] * 2, states=[window], swa_kv_cache_layout="nhd")
    assert pools.build(flat, ranks(), heads=2, mla=False).states == ["state0"]
    made = pools.build(cut, ranks(), heads=2, mla=False)
    assert made.states == ["swa0"]
    assert told(made.layout)["views"]["swa0"]["page_tokens"] == PAGE
    assert pools.uncut(flat, 2, False) == ["swa"] and pools.uncut(cut, 2, False) == []
    latent = args([64 * PAGE], states=[state("dsa", [128])])
    assert pools.uncut(latent, None, True) == [] and pools.uncut(latent, 2, False) == ["dsa"]


def test_aux_is_the_last_buffer_and_has_no_address():
    made = pools.build(args([64 * PAGE] * 2), ranks(), heads=2, mla=False, slots=(8, 1024))
    assert made.parts[-1] == (None, 8 * 1024)
    head, rest = (told(made.layout)["views"][v]["layers"][0]["fields"][0]
                  for v in ("aux", "meta"))
    assert (head["unit_bytes"], rest["offset"], rest["unit_bytes"]) == (64, 64, 960)
    assert "aux" not in pools.build(args([64] * 2), ranks(), heads=2, mla=False).layout.views


@pytest.mark.parametrize("what, words", [
    (lambda: pools.build(args([64 * PAGE] * 3), ranks(), heads=2, mla=False), "unified memory"),
    (lambda: pools.build(args([63] * 2), ranks(), heads=2, mla=False), "cannot hold 4 tokens"),
    (lambda: pools.build(args([5 * PAGE] * 2), ranks(), heads=2, mla=False), "models the same"),
    (lambda: pools.build(args([64] * 2, states=[state("dsa_tail", [8])]), ranks(), heads=2,
                         mla=False), "dsa_tail is not supported"),
    (lambda: pools.build(args([64] * 2, states=[state("dsa", [8])]), ranks(), heads=2,
                         mla=False, pp_size=2), "--pp-size 1"),
    (lambda: pools.build(args([64], mla_compression_ratios=[4]), ranks(), heads=None,
                         mla=True), "DeepSeek V4"),
    (lambda: pools.state_fields(64, 5, 1, None, ranks()), "columns"),
    (lambda: pools.pages_of([10], [0]), "its page, 0 bytes")])
def test_refusal_names_the_cause(what, words):
    with pytest.raises(ValueError, match=words):
        what()


# ---- what the bootstrap server tells ----

ROW = {"endpoint": "tcp://10.0.0.2:7400", "pool": "model.p", "rank": 1, "heads": 8,
       "views": ["kv", "aux"], "states": [], "aux": 1024, "layers": None, "secret": "0a" * 32,
       "more": 1}


def test_bootstrap_row_makes_a_ticket():
    row = route.row_of({"rank_ip": "10.0.0.2", "kvd": ROW})
    assert row == {k: v for k, v in ROW.items() if k != "more"}
    assert route.row_of({"kvd": dict(ROW, heads=None, aux=None)})["heads"] is None
    assert route.row_of({"kvd": dict(ROW, layers={"kv": [1, 3]})})["layers"] == {"kv": [1, 3]}
    ticket = route.ticket_of(row["secret"], 7)
    assert len(ticket) == 32 and int(ticket, 16)
    assert ticket != route.ticket_of(row["secret"], 8)
    assert ticket != route.ticket_of("0b" * 32, 7)


@pytest.mark.parametrize("name, value", [
    ("endpoint", 7), ("endpoint", ""), ("endpoint", "x" * 300), ("pool", None), ("rank", -1),
    ("rank", "1"), ("rank", True), ("rank", 1 << 32), ("heads", 0), ("heads", 1.5),
    ("views", "kv"), ("views", ["kv"] * 100), ("views", [3]), ("states", None), ("aux", 0),
    ("aux", []), ("secret", "0a" * 31), ("secret", "0A" * 32), ("secret", None)])
def test_invalid_row_is_refused_by_field(name, value):
    with pytest.raises(ValueError, match="GET /route: kvd.%s" % name):
        route.row_of({"kvd": dict(ROW, **{name: value})})
    for wrong in (None, [], {}, {"kvd": 1}):
        with pytest.raises(ValueError, match="does not use kvd"):
            route.row_of(wrong)


# ---- metadata ----

def tensors(count=4):
    """Token ids, hidden states, and the room's number last, as MetadataBuffers has them."""
    made = [np.zeros((count, 16), np.int32), np.zeros((count, 32), np.float32),
            np.zeros((count, 8), np.uint64)]
    return made, slots.Rows([t.ctypes.data for t in made], [t.nbytes for t in made],
                            [t[0].nbytes for t in made], -1)


def test_row_is_sent_whole_with_its_room_last():
    (ids, hidden, numbers), rows = tensors()
    record = np.zeros(rows.record_bytes, np.uint8)
    ids[2, 0], hidden[2], numbers[2, 0] = 99, 0.5, 7
    rows.write(2, 7, record)
    (got, floats, told_room), other = tensors()
    assert other.read(1, 7, record) is None
    assert got[1, 0] == 99 and (floats[1] == 0.5).all() and told_room[1, 0] == 7
    assert not got[0].any() and not got[2:].any()


def test_record_of_something_else_is_not_taken():
    (ids, _, numbers), rows = tensors()
    record = np.zeros(rows.record_bytes, np.uint8)
    assert "not a record of this version" in rows.read(0, 7, record)
    ids[0, 0], numbers[0, 0] = 5, 7
    rows.write(0, 7, record)
    assert "belongs to room 7" in rows.read(1, 8, record)
    record[records.LINE] ^= 1  # the first token
    assert "inconsistent" in rows.read(1, 7, record)
    assert not numbers[1].any()


# ---- rooms ----

class Event:
    def __init__(self, happened=False):
        self.happened = happened

    def query(self):
        return self.happened


class Side:
    """One rank: a cache of 2 layers with one state component, and its metadata."""

    def __init__(self, daemon, role, name, fill):
        self.client = kvd.Client(daemon.socket_path, client="sglang", role=role)
        self.cache = [np.full((PAGES, PAGE * 16), fill, np.uint8) for _ in range(2)]
        self.state = np.full((8, 32), fill, np.uint8)
        kv = args([PAGE * 16] * 2, states=[state("dsa", [32])])
        kv.state_data_lens[0] = [self.state.nbytes]
        self.slots = records.Slots(4, 128)
        made = pools.build(kv, ranks(), heads=1, mla=False, slots=(4, 128))
        regions = [self.client.register(x) for x in self.cache + [self.state,
                                                                  self.slots.memory]]
        self.pool = self.client.pool(made.layout, regions, name=name)
        self.desk = engine.Desk(self.client)


@pytest.fixture(scope="module")
def sides(pair):
    a, b = pair
    p, d = Side(a, "prefill", "model.p", 0x11), Side(b, "decode", "model.d", 0x7a)
    for page in range(PAGES):
        for layer, cache in enumerate(p.cache):
            cache[page] = (page * 2 + layer) & 0xff
    yield p, d
    for side in (p, d):
        side.client.close()


def source(p):
    return [kvd.Source(p.client.endpoint, "model.p", None, 0)]


def opened(sides, number, ticket=TICKET):
    p, d = sides
    recv = d.desk.recv(number, d.pool, source(p), receivers=1, open_s=20, ticket=ticket)
    return p.desk.send(number, p.pool, open_s=20, ticket=TICKET), recv


def ready(p, send):
    def look():
        p.desk.turn()
        return send.look() >= WAITING_FOR_INPUT and send.first_token() is not None
    until(look)


def ends(side, handle, state):
    def look():
        side.desk.turn()
        return handle.look() in (FAILED, SUCCESS)
    until(look)
    assert handle.end == state, handle.reason
    return handle.reason


def nothing_left(*sides):
    for side in sides:
        until(lambda: side.desk.turn() or not side.desk.left)
        assert not side.desk.live and not side.desk.parked and not side.desk.left


def test_prefix_moves_pages_state_and_a_record(sides):
    p, d = sides
    send, recv = opened(sides, 1)
    recv.bind({"kv": kvd.View([5, 6], 8), "state0": kvd.View([3], 8), "meta": [2]}, 2)
    ready(p, send)
    assert send.first_token() == 8
    p.slots.record(1)[:] = 9
    send.send({"kv": kvd.View([10], 8)}, 0, False)
    send.send({"kv": kvd.View([20], 12), "state0": kvd.View([1], 8), "meta": [1]}, 1, True, 1)
    ends(p, send, SUCCESS)
    ends(d, recv, SUCCESS)
    for layer in range(2):
        assert (d.cache[layer][5] == 20 + layer).all() and (d.cache[layer][6] == 40 + layer).all()
        assert (d.cache[layer][7] == 0x7a).all()
    assert (d.state[3] == 0x11).all() and (d.state[2] == 0x7a).all()
    assert (d.slots.record(2) == 9).all()
    assert not p.desk.live and not d.desk.live


def test_full_hit_reports_prefix_and_moves_record(sides):
    p, d = sides
    send, recv = opened(sides, 2)
    recv.bind({"kv": kvd.View([], 40), "meta": [3]}, 3)
    ready(p, send)
    assert send.first_token() == 40
    p.slots.record(0)[:] = 6
    send.send({"meta": [0]}, 0, True, 0)
    ends(p, send, SUCCESS)
    ends(d, recv, SUCCESS)
    assert (d.slots.record(3) == 6).all()


def test_number_is_used_again_while_the_old_room_ends(sides):
    p, d = sides
    send, recv = opened(sides, 3)
    for k in range(3):
        recv.bind({"kv": [30 + k]})
        ready(p, send)
        send2, recv2 = opened(sides, 3)
        assert send2._room is None and recv2._room is None  # parked
        send.send({"kv": [4]}, 0, True)
        ends(p, send, SUCCESS)
        ends(d, recv, SUCCESS)
        assert (d.cache[1][30 + k] == 9).all()
        send, recv = send2, recv2
    recv.stop("enough")
    ends(d, recv, FAILED)
    ends(p, send, FAILED)
    nothing_left(p, d)


def test_abort_reaches_both_sides_and_stops_writes(sides):
    p, d = sides
    for bound in (False, True):
        send, recv = opened(sides, 4)
        if bound:
            recv.bind({"kv": [40]})
            ready(p, send)
        recv.stop("the client left")
        assert ends(d, recv, FAILED) == "the client left"
        assert "the client left" in ends(p, send, FAILED)
        assert d.desk.still(RECV, 4) and send.wait_still(1)
        send.send({"kv": [4]}, 0, True)  # nobody hears it
        assert (d.cache[0][40] == 0x7a).all()


def test_chunk_waits_for_its_event(sides):
    p, d = sides
    send, recv = opened(sides, 5)
    recv.bind({"kv": [32, 33]})
    ready(p, send)
    event = Event()
    p.cache[0][50] = 1
    send.send({"kv": [50]}, 0, False, None, (event, None))
    send.send({"kv": kvd.View([51], PAGE)}, 1, True)
    for _ in range(50):
        p.desk.turn(True)
        assert send.given == 0 and recv.look() not in (FAILED, SUCCESS)
    p.cache[0][50] = 77
    event.happened = True
    ends(p, send, SUCCESS)
    ends(d, recv, SUCCESS)
    assert (d.cache[0][32] == 77).all()


def test_refusal_of_daemon_fails_room_on_both_sides(sides):
    p, d = sides
    send, recv = opened(sides, 6)
    recv.bind({"kv": [PAGES + 1]})
    words = "pages[0]: %d is outside" % (PAGES + 1)
    assert words in ends(d, recv, FAILED) and words in ends(p, send, FAILED)


@pytest.mark.parametrize("number", [-1, 1 << 64, "5", None])
def test_invalid_room_number_fails_its_request(sides, number):
    """It comes from a client where no router stands before the engine; an exception would end
    SGLang's scheduler."""
    p, d = sides
    for handle in (p.desk.send(number, p.pool, open_s=20, ticket=TICKET),
                   d.desk.recv(number, d.pool, source(p), receivers=1, open_s=20, ticket=TICKET)):
        assert handle.look() == FAILED and "room" in handle.reason


def test_another_ticket_is_refused(sides, pair):
    p, d = sides
    for daemon in pair:
        daemon.expect("unauthorized peer")
    send, recv = opened(sides, 7, "6" * 32)
    recv.bind({"kv": [34]})
    assert "EAUTH" in ends(d, recv, FAILED)
    send.stop("enough")
    ends(p, send, FAILED)
    nothing_left(p, d)


def test_late_bind_reports_abandoned_room(sides):
    p, d = sides
    send = p.desk.send(8, p.pool, open_s=20, ticket=TICKET)
    send.stop("no memory")
    ends(p, send, FAILED)
    recv = d.desk.recv(8, d.pool, source(p), receivers=1, open_s=20, ticket=TICKET)
    recv.bind({"kv": [41]})
    assert "no memory" in ends(d, recv, FAILED)


def test_decode_can_be_first_with_a_reused_number(sides):
    """SGLang's rebootstrap: decode binds pages, and only then asks prefill to compute."""
    p, d = sides
    for page in (42, 43):
        recv = d.desk.recv(9, d.pool, source(p), receivers=1, open_s=20, ticket=TICKET)
        recv.bind({"kv": [page]})
        until(lambda: d.desk.turn() or recv.look() >= WAITING_FOR_INPUT)
        end = time.monotonic() + 0.1
        until(lambda: d.desk.turn(True) or recv.look() in (FAILED, SUCCESS) or
              time.monotonic() > end)
        assert recv.end is None, recv.reason
        send = p.desk.send(9, p.pool, open_s=20, ticket=TICKET)
        ready(p, send)
        send.send({"kv": [page - 10]}, 0, True)
        ends(p, send, SUCCESS)
        ends(d, recv, SUCCESS)
        assert (d.cache[0][page] == 2 * (page - 10)).all()
