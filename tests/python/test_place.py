# SPDX-License-Identifier: Apache-2.0
"""Engines' places in the directory, and sources by name, through the Python package."""
import logging
import types

import numpy as np
import pytest

import kvd
from kvd import place
from kvd.rooms import source_pack


def client(daemon, name):
    return kvd.Client(daemon.socket_path, client=name)


def ranks(of, group):
    return of.command("group.query", group=group)["ranks"]


def test_place_is_published_once_and_again_for_a_new_session(pair):
    mine = client(pair[0], "engine")
    one = place.Place(mine, "prefill", "w0", {"tp": (1, 2), "pp": (0, 1)}, pool="kv",
                      url="http://10.0.0.1:8000", engine="vllm", model="m", summary=None)
    one.keep()
    told = ranks(mine, "prefill")
    assert [(r["worker"], r["tp_rank"], r["tp_size"], r["url"], r["engine"]) for r in told] == \
        [("w0", 1, 2, "http://10.0.0.1:8000", "vllm")]
    mine.command("group.publish", group="prefill", worker="w0", tp_rank=1, tp_size=2)
    one.keep()  # the same session: not again
    assert "url" not in ranks(mine, "prefill")[0]
    one.epoch = None  # as of another one
    one.keep()
    assert ranks(mine, "prefill")[0]["url"] == "http://10.0.0.1:8000"
    mine.close()


def test_load_is_reported_and_refused_load_is_a_warning(pair, caplog):
    mine = client(pair[0], "engine")
    one = place.Place(mine, "loaded", "w0")
    one.keep()
    one.load({"running": 3})
    with caplog.at_level(logging.WARNING, logger="kvd.place"):
        one.load({"running": -3})
    assert "load is not reported" in caplog.text and "running" in caplog.text
    mine.close()


def test_refused_place_is_a_warning(pair, caplog):
    first, second = client(pair[0], "first"), client(pair[0], "second")
    place.Place(first, "g").keep()
    with caplog.at_level(logging.WARNING, logger="kvd.place"):
        place.Place(second, "g").keep()
    assert "is not in the directory" in caplog.text and "another session" in caplog.text
    first.close()
    second.close()


@pytest.mark.parametrize("bad", [{"xp": (0, 1)}, {"tp": (2, 2)}, {"tp": (-1, 1)}])
def test_ranks_are_checked(bad):
    with pytest.raises(ValueError, match="ranks: "):
        place.Place(types.SimpleNamespace(), "g", ranks=bad)


def test_environment_names_the_place(pair, monkeypatch):
    for name in ("KVD_GROUP", "KVD_WORKER", "KVD_URL"):
        monkeypatch.delenv(name, raising=False)
    mine = client(pair[0], "engine")
    assert place.from_environment(mine, "sglang", {}) is None
    monkeypatch.setenv("KVD_GROUP", "decode")
    monkeypatch.setenv("KVD_WORKER", "w7")
    monkeypatch.setenv("KVD_URL", "http://[fe80::1]:30000")
    place.from_environment(mine, "sglang", {"tp": (0, 1)}, 8998, pool="kv").keep()
    rank = ranks(mine, "decode")[0]
    assert (rank["worker"], rank["bootstrap"], rank["pool"], rank["engine"]) == \
        ("w7", "[fe80::1]:8998", "kv", "sglang")
    mine.close()


def side(daemon, name):
    layout = kvd.Layout.sglang_mha(page_size=4, pages=4, layers=1, kv_heads=1, head_bytes=64,
                                   tp_rank=0)
    mine, memory = client(daemon, name), np.zeros(sum(layout.buffers), np.uint8)
    region = mine.register(memory)
    offsets = np.cumsum([0, *layout.buffers[:-1]])
    return mine, memory, mine.pool(layout, [(region, int(o)) for o in offsets], name="kv")


def test_source_is_found_by_its_group(pair):
    """Both engines at one daemon."""
    (prefill, source, pool), (decode, target, into) = [side(pair[0], n) for n in "pd"]
    source[:] = 7
    rx = decode.recv(1, into, [kvd.Source(group="by-name", ranks=(0,))])
    rx.bind({"kv": [1]})
    place.Place(prefill, "by-name", "w0", pool="kv").keep()
    tx = prefill.send(1, pool)
    tx.send({"kv": [2]}, last=True)
    rx.wait()
    assert np.count_nonzero(target == 7) == 2 * 4 * 64  # k and v of a page
    prefill.close()
    decode.close()


def test_source_is_packed_as_it_was_named():
    packed = source_pack(kvd.Source(group="g", worker="w", ranks=(1, 0, 3)), "sources[0]")
    assert packed[0] is None and packed[5:] == ("g", "w", (1, 0, 3, 0), 0)
    packed = source_pack(kvd.Source("tcp://a:1", session=2 ** 64 - 1), "sources[0]")
    assert packed[0] == "tcp://a:1" and packed[8] == 2 ** 64 - 1
    with pytest.raises((TypeError, ValueError)):
        source_pack(kvd.Source(group="g", ranks=(1, 2, 3, 4, 5)), "sources[0]")
    with pytest.raises((TypeError, ValueError)):
        source_pack(kvd.Source(group="g", ranks=(-1,)), "sources[0]")
    with pytest.raises(TypeError):
        source_pack(kvd.Source(group=7), "sources[0]")
    with pytest.raises(TypeError):
        source_pack(kvd.Source("tcp://a:1", session="7"), "sources[0]")
