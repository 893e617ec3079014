# SPDX-License-Identifier: Apache-2.0
"""kvd.vllm without vLLM: blocks as pages, what travels in kv_transfer_params, and requests by
two daemons."""
import json
import os
import types

import numpy as np
import pytest

import kvd
from conftest import ROOT, until
from kvd import engine
from kvd.layout import Layout
from kvd.rooms import FAILED, SUCCESS
from kvd.vllm import params, pools, sleep

class AsleepBase:
    """vLLM's class, as far as it asks about sleep mode."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        return True

    def unregister_kv_caches(self):
        pass


KV = pools.Group("kv0", "kv", 32, 1, 1, 0, 0)
TICKET = "c0ffee" * 5 + "ab"
RANKS = {(0, 0): {"endpoint": "tcp://a:1", "pool": "m.p", "rank": 0, "layers": {"kv": [0, 2]}},
         (0, 1): {"endpoint": "tcp://b:1", "pool": "m.q", "rank": 1, "layers": {"kv": [0, 2]}}}


def group(**kw):
    return KV._replace(**kw)


def plain(view):
    return list(view.pages), view.first_token, view.tokens


# ---- blocks ------------------------------------------------------------------------------

def test_whole_prompt_is_all_its_blocks():
    assert plain(KV.offered([5, 6, 7], 70)) == ([5, 6, 7], 0, (0, 70))
    assert plain(KV.wanted([5, 6, 7], 0, 70)) == ([5, 6, 7], 0, (0, 70))


def test_blocks_behind_the_prompt_are_not_offered():
    assert plain(KV.offered([5, 6, 7, 8], 64)) == ([5, 6], 0, (0, 64))


def test_local_prefix_is_not_requested():
    assert plain(KV.wanted([5, 6, 7], 64, 70)) == ([7], 64, (64, 70))
    assert plain(KV.wanted([5, 6, 7], 40, 70)) == ([6, 7], 32, (40, 70))
    assert KV.wanted([5, 6, 7], 70, 70) is None


def test_blocks_of_several_kernel_blocks():
    two = group(ratio=2)
    assert plain(two.wanted([3, 9], 32, 60)) == ([18, 19], 32, (32, 60))


def test_on_the_cpu_a_kernel_block_is_a_token():
    cpu = group(grain=32)
    assert plain(cpu.offered([5, 6, 7], 65)) == ([5, 6, 7], 0, (0, 3))
    assert plain(cpu.wanted([5, 6, 7], 64, 65)) == ([7], 2, (2, 3))
    half = group(ratio=2, grain=16)
    assert plain(half.wanted([5, 6], 32, 49)) == ([12, 13], 2, (2, 4))


@pytest.mark.parametrize("tokens", [1, 99, 100, 101, 128, 129, 500])
def test_window_is_requested_exactly(tokens):
    """The next token sees itself and window - 1 before it."""
    swa = group(name="swa0", kind="swa", window=100)
    blocks = list(range(1, 1 + -(-tokens // 32)))
    view = swa.wanted(blocks, 0, tokens)
    assert view.tokens == (max(0, tokens + 1 - 100), tokens)
    assert view.first_token == view.tokens[0] // 32 * 32
    assert list(view.pages) == blocks[view.tokens[0] // 32:]


def test_window_is_within_blocks_kept_by_vllm():
    """As vLLM clips a window's list (tests/golden), wherever the last block ends."""
    with open(os.path.join(ROOT, "tests", "golden", "vllm_block_ids.json")) as text:
        cases = [c for c in json.load(text)["cases"] if "sliding_window" in c["in"]]
    assert cases
    for case in cases:
        given, kept = case["in"], case["expect"]["clipped"]
        size, blocks = given["block_size"], given["blocks"]
        swa = group(name="swa0", kind="swa", tokens=size, window=given["sliding_window"])
        wanted = [list(swa.wanted(blocks, 0, len(blocks) * size - i).pages)
                  for i in range(size)]
        assert all(pages == kept[-len(pages):] for pages in wanted), case["id"]
        assert kept in wanted or len(kept) == len(wanted[0]) + 1, case["id"]


def test_blocks_outside_the_window_are_not_offered():
    swa = group(kind="swa", window=40)
    assert plain(swa.offered([0, 0, 7, 8], 120)) == ([7, 8], 64, (64, 120))
    assert plain(swa.offered([4, 0, 7, 8], 120)) == ([7, 8], 64, (64, 120))
    assert swa.offered([0, 0], 64) is None


def test_state_is_its_current_slot():
    one = group(kind="state", spec_blocks=2)
    assert plain(one.offered([0, 4, 5, 6], 100)) == ([4], 0, (0, 1))
    assert plain(one.wanted([4], 0, 100)) == ([4], 0, (0, 1))
    assert one.offered([], 100) is None


# ---- kv_transfer_params --------------------------------------------------------------------

def written(**kw):
    told = json.loads(json.dumps(params.write(2 ** 63 - 1, TICKET, 70, 2, 1, RANKS)))
    told["kvd"].update(kw)
    return told


def test_params_roundtrip_is_equal():
    got = params.read(written())
    assert got.room == 2 ** 63 - 1 and got.tokens == 70 and got.ticket == TICKET
    assert [(s.endpoint, s.pool, s.rank) for s in got.sources] == \
        [("tcp://a:1", "m.p", 0), ("tcp://b:1", "m.q", 1)]


def test_layers_are_those_of_all_stages():
    rows = {(1, 0): dict(RANKS[0, 0], layers={"kv": [3], "swa0": [2]}),
            (0, 0): dict(RANKS[0, 0], layers={"kv": [1], "swa0": [0]})}
    told = json.loads(json.dumps(params.write(1, TICKET, 70, 1, 2, rows)))
    assert params.read(told).layers == {"kv": [1, 3], "swa0": [0, 2]}


@pytest.mark.parametrize("field, value", [
    ("room", 5), ("room", "-5"), ("room", str(2 ** 63)), ("room", "9" * 40), ("room", "٣"),
    ("ticket", None), ("ticket", "x" * 300), ("ticket", "a\nb"), ("tokens", 0), ("tokens", True),
    ("tokens", "70"), ("tp", 0), ("tp", 10 ** 9), ("pp", 2.0), ("sources", {}), ("sources", []),
    ("sources", [["tcp://a:1", "m", 0]]), ("sources", [["tcp://a:1", "m", 0], ["x", "y", -1]]),
    ("sources", [["tcp://a:1", "m", 0], ["tcp://b:1", "m q", 1]]), ("layers", None),
    ("layers", {"kv": 3}), ("layers", {"kv": ["x"]}), ("layers", {"kv": [0] * 2000})])
def test_untrusted_params_are_refused_by_field(field, value):
    with pytest.raises(ValueError, match="kvd." + field):
        params.read(written(**{field: value}))
    assert params.read(written())


def test_params_of_another_connector_are_refused():
    with pytest.raises(ValueError, match="KvdConnector"):
        params.read({"do_remote_prefill": True, "remote_host": "h"})


@pytest.mark.parametrize("there, here, rank, ranks, receivers", [
    (1, 1, 0, [0], 1), (4, 2, 1, [2, 3], 1), (2, 4, 3, [1], 2), (1, 8, 5, [0], 8)])
def test_rank_queries_its_counterparts(there, here, rank, ranks, receivers):
    sources = ["s%d.%d" % (stage, r) for stage in range(2) for r in range(there)]
    remote = params.Remote(1, "t", 1, there, 2, sources)
    assert params.sources_of(remote, here, rank) == \
        (["s%d.%d" % (stage, r) for stage in range(2) for r in ranks], receivers)


def grouped(client, name, rank, groups):
    """A pool of a rank with these groups, {view: layers}, a page of 16 tokens each."""
    made = pools.Buffers(rank)
    for view, layers in groups.items():
        made.add(group(name=view, tokens=16), 8)
        for layer in layers:
            made.layout.field(view, layer, "kv", buffer=made.layout.buffer(8 * 256),
                              page_stride=256, token_stride=16, unit_stride=16, unit_bytes=16)
    regions = [client.register(kvd.Memory(n)) for n in made.layout.buffers]
    return made, client.pool(made.layout, regions, name=name)


@pytest.mark.parametrize("here, like", [
    ({"kv": [0, 2], "kv1": [1, 3]}, True), ({"kv": [0, 1], "kv1": [2, 3]}, False),
    ({"kv": [0, 2]}, True), ({"kv": [0, 2], "kv1": [1, 3, 4]}, False), ({"swa0": [0]}, False)])
def test_groups_of_other_layers_are_refused(pair, here, like):
    """Two pipeline stages on prefill; decode's groups are like theirs, or not. What is not
    refused moves; what is would fail in its room."""
    stages = [{"kv": [0], "kv1": [1]}, {"kv": [2], "kv1": [3]}]
    clients = [kvd.Client(d.socket_path, timeout=60) for d in (pair[0], pair[0], pair[1])]
    rows, rooms = {}, []
    for i, groups in enumerate(stages):
        made, pool = grouped(clients[i], "stages", i, groups)
        rows[i, 0] = {"endpoint": clients[i].endpoint, "pool": "stages", "rank": i,
                      "layers": made.layers()}
        rooms.append(clients[i].offer(60, pool, {v: [3] for v in groups}, lease_ms=60000))
    remote = params.read(params.write(60, TICKET, 16, 1, 2, rows))
    made, pool = grouped(clients[2], "decode", 0, here)
    why = pools.unlike(remote.layers, made.layers())
    assert (why is None) == like
    if not like:
        pair[1].expect("room")
        pair[0].expect("room")
        assert "its group" in why and "--pipeline-parallel-size" in why
    pull = clients[2].pull(60, pool, remote.sources, {view: [5] for view in here})
    if like:
        assert pull.wait(timeout=60) == SUCCESS
    else:
        with pytest.raises(kvd.InvalidError):
            pull.wait(timeout=60)
    for client in clients:
        client.close()


def test_indivisible_sizes_are_refused():
    with pytest.raises(ValueError, match="3 tensor-parallel ranks, decode 2"):
        params.sources_of(params.Remote(1, "t", 1, 3, 1, []), 2, 0)


# ---- sleep mode --------------------------------------------------------------------------------

class Connector(sleep.Awake, AsleepBase):
    """As ours are made."""


def test_sleep_mode_is_refused_by_name():
    """vLLM 0.33 takes a connector for able to follow that does not say otherwise."""
    assert AsleepBase.supports_sleep_mode(None) and not Connector.supports_sleep_mode(None)
    with pytest.raises(RuntimeError, match="without sleep mode"):
        Connector().unregister_kv_caches()

    def refused(**given):
        model = types.SimpleNamespace(**given)
        return [what for no, what, _ in sleep.refusals(types.SimpleNamespace(model_config=model))
                if no]
    assert refused(enable_sleep_mode=False) == []
    assert "sleep mode" in refused(enable_sleep_mode=True)[0]
    assert "cuMem" in refused(enable_sleep_mode=False, enable_cumem_allocator=True)[0]


# ---- by two daemons -------------------------------------------------------------------------

class Side:
    def __init__(self, daemon, role, fill):
        self.client = kvd.Client(daemon.socket_path, client="vllm", role=role)
        self.cache = np.full((64, 32, 16), fill, np.uint8)
        layout = Layout(0)
        layout.buffer(self.cache.nbytes)
        layout.view("kv0", 32, 64)
        layout.field("kv0", 0, "kv", buffer=0, page_stride=512, token_stride=16, unit_stride=16,
                     unit_bytes=16)
        self.pool = self.client.pool(layout, [self.client.register(self.cache)], name="m." + role)
        self.desk = engine.Desk(self.client)

    def offer(self, room, blocks, tokens, lease_ms=30000):
        return self.desk.offer(room, self.pool, {"kv0": KV.offered(blocks, tokens)},
                               ticket=TICKET, lease_ms=lease_ms)

    def pull(self, room, source, receivers=1):
        return self.desk.pull(room, self.pool, [source], receivers=receivers, open_s=10,
                              ticket=TICKET)


@pytest.fixture(scope="module")
def sides(pair):
    p, d = Side(pair[0], "prefill", 1), Side(pair[1], "decode", 2)
    p.cache[:] = np.arange(64, dtype=np.uint8)[:, None, None]
    yield p, d, kvd.Source(p.client.endpoint, "m.prefill", None, 0)
    p.client.close()
    d.client.close()


def ends(handle, state):
    def look():
        handle.desk.turn()
        return handle.look() in (FAILED, SUCCESS)
    until(look)
    assert handle.end == state, handle.reason
    return handle.reason


def test_request_queried_before_its_blocks_are_known(sides):
    p, d, source = sides
    pull = d.pull(101, source)
    offer = p.offer(101, [10, 11, 12], 70)
    pull.bind({"kv0": KV.wanted([20, 21, 22], 32, 70)})
    ends(pull, SUCCESS)
    ends(offer, SUCCESS)
    assert (d.cache[20] == 2).all() and (d.cache[21] == 11).all()
    assert (d.cache[22, :6] == 12).all() and (d.cache[22, 6:] == 2).all()
    assert pull.bytes == 38 * 16 and pull.rows and pull.code is None


def test_full_hit_releases_the_offer(sides):
    p, d, source = sides
    offer = p.offer(102, [10], 32)
    pull = d.pull(102, source)
    pull.bind({})
    ends(pull, SUCCESS)
    ends(offer, SUCCESS)
    assert pull.bytes == 0


def test_request_abandoned_before_it_has_blocks(sides):
    p, d, source = sides
    offer = p.offer(103, [10], 32)
    pull = d.pull(103, source)
    pull.stop("the client left")
    assert "the client left" in ends(pull, FAILED)
    assert "the client left" in ends(offer, FAILED)


def test_request_abandoned_before_it_is_offered(sides):
    p, d, source = sides
    pull = d.pull(106, source)
    pull.stop("the client left")
    d.desk.turn(True)
    offer = p.offer(106, [10], 32)
    assert "the client left" in ends(pull, FAILED)
    assert "the client left" in ends(offer, FAILED)


def test_slow_daemon_is_not_queried_for_the_reason(sides):
    p, d, source = sides
    offer = p.offer(107, [10], 32)
    pull = d.pull(107, source)
    p.desk._mute_s = p.desk.clock() + 60
    pull.stop("the client left")
    ends(pull, FAILED)
    assert ends(offer, FAILED) == "room failed (EABORTED)"
    p.desk._mute_s = 0


@pytest.mark.parametrize("field, value", [
    *(("endpoint", e) for e in ("x", "tcp://", "tcp://x", "tcp://h:0", "tcp://h:99999",
                                "tcp://127.0.0.1:1#k", "ipc://x", "%s", "x" * 256, "[::1]:1")),
    *(("pool", p) for p in ("x", "p" * 64, "p" * 256, "%n", '"', "\\")),
    ("rank", 2 ** 32 - 1), ("ticket", "x"), ("ticket", "0" * 32), ("ticket", "g" * 32),
    ("ticket", "a" * 256), ("room", "0"), ("room", str(2 ** 63 - 1))])
def test_untrusted_params_end_in_a_failed_room(sides, field, value):
    _, d, source = sides
    row = [source.endpoint, "m.prefill", 0]
    kvd_ = {"room": "300", "ticket": TICKET, "tokens": 5, "tp": 1, "pp": 1, "sources": [row],
            "layers": {"kv": [0]}}
    if field in kvd_:
        kvd_[field] = value
    else:
        row[("endpoint", "pool", "rank").index(field)] = value
    remote = params.read({"kvd": json.loads(json.dumps(kvd_))})
    there, receivers = params.sources_of(remote, 1, 0)
    pull = d.desk.pull(remote.room, d.pool, there, receivers=receivers, open_s=0.5,
                       ticket=remote.ticket)
    pull.bind({"kv": KV.wanted([40], 0, 32)})
    until(lambda: d.desk.turn() or pull.stop("not offered") or pull.look() == FAILED)


def test_unrenewed_lease_ends_and_late_puller_gets_nothing(sides, pair):
    p, d, source = sides
    offer = p.offer(104, [10], 32, lease_ms=300)
    ends(offer, FAILED)
    assert offer.code == "ELEASE"
    pull = d.pull(104, source)
    pull.bind({"kv0": KV.wanted([30], 0, 32)})
    until(lambda: d.desk.turn() or pull.look() == FAILED)
    assert (d.cache[30] == 2).all()


def test_end_is_seen_without_looking_at_each_room(sides):
    p, d, source = sides
    offers = [p.offer(200 + i, [10 + i], 32) for i in range(5)]
    pull = d.pull(203, source)
    p.desk.turn(True)
    last = p.desk.version()
    pull.stop("the client left")
    until(lambda: d.desk.turn() or p.desk.live[engine.OFFER, 203].peek() == FAILED)
    p.desk.turn(True)
    assert p.desk.version() > last
    last = p.desk.version()
    assert [o.look() == FAILED for o in offers] == [False] * 3 + [True, False]
    assert p.desk.version() > last  # it was closed meanwhile
    for offer in offers:
        last = p.desk.version()
        offer.stop("enough")
        assert p.desk.version() > last
        assert offer.wait_still(5)
    assert not p.desk.live
    ends(pull, FAILED)


def test_polling_each_version_misses_nothing(sides, monkeypatch):
    p, d, source = sides
    for desk in (p.desk, d.desk):
        monkeypatch.setattr(desk, "_refresh_s", float("inf"))
    seen = {}

    def looked(*handles):
        for handle in handles:
            if handle.desk.version() != seen.get(handle):
                seen[handle] = handle.desk.changes
                handle.look()
        return all(handle.end is not None for handle in handles)
    for desk in (p.desk, d.desk):
        desk.turn(True)
        desk.turn(True)
        last = desk.version()
        desk.turn(True)
        assert desk.version() == last
    for n in range(301, 320):
        offer, pull = p.offer(n, [n % 60], 32), d.pull(n, source)
        looked(offer, pull)
        pull.bind({"kv0": KV.wanted([n % 60], 0, 32)})
        until(lambda: looked(offer, pull))
        assert offer.end == pull.end == SUCCESS


def test_unknown_room_has_failed(sides):
    _, d, _ = sides
    handle = d.desk.refused(engine.PULL, 105, "3 ranks, 2 ranks")
    assert handle.end == FAILED and handle.reason == "3 ranks, 2 ranks"
    handle.bind({})
    assert not d.desk.parked and not d.desk.live and not d.desk.left
