# SPDX-License-Identifier: Apache-2.0
"""Layouts from engines' own terms: what they are, what the plan library refuses, and that
the daemon takes what it made."""
import json

import numpy as np
import pytest

import kvd
from kvd import shapes


def same(ours, theirs):
    assert json.loads(ours.text()) == json.loads(theirs.text())
    assert json.loads(ours.layout().text()) == json.loads(ours.text())


def by_hand(fields, layers, order, units, first, total, unit_bytes, tokens, pages, rank,
            view="kv", one_buffer=False):
    """Dense attention from its strides."""
    layout = kvd.Layout(rank).view(view, tokens, pages)
    layers = range(layers) if isinstance(layers, int) else layers
    size = units * unit_bytes * tokens
    if one_buffer:  # [block][K or V]
        for layer in layers:
            buffer = layout.buffer(size * pages * len(fields))
            for i, name in enumerate(fields):
                layout.heads(view, layer, name, order, buffer=buffer, offset=i * size,
                             page_stride=size * len(fields), unit_bytes=unit_bytes,
                             units=units, first_unit=first, total_units=total)
        return layout
    for name in fields:
        for layer in layers:
            layout.heads(view, layer, name, order, buffer=layout.buffer(size * pages),
                         unit_bytes=unit_bytes, units=units, first_unit=first,
                         total_units=total)
    return layout


@pytest.mark.parametrize("size, rank, heads", [(1, 0, 8), (2, 1, 8), (4, 3, 4), (8, 5, 2)])
@pytest.mark.parametrize("layers", [3, [1, 4, 9]])
def test_shapes_follow_from_strides(size, rank, heads, layers):
    tp = dict(tp_size=size, tp_rank=rank)
    units = max(heads // size, 1)
    first = rank * units if heads >= size else rank // (size // heads)
    wanted = by_hand("kv", layers, kvd.NHD, units, first, heads, 256, 16, 64, rank)
    mha = dict(page_size=16, pages=64, layers=layers, kv_heads=heads, head_bytes=256)
    same(shapes.Shapes(**tp).sglang_mha(**mha), wanted)
    assert json.loads(kvd.Layout.sglang_mha(**mha, **tp).text()) == \
        json.loads(wanted.text())
    mla = dict(page_size=2, pages=64, layers=layers, latent_bytes=1152)
    wanted = by_hand(["latent"], layers, kvd.NHD, 1, 0, 1, 1152, 2, 64, rank, "swa")
    same(shapes.Shapes(**tp).sglang_mla("swa", **mla), wanted)
    assert json.loads(kvd.Layout.sglang_mla(tp_rank=rank, view="swa", **mla).text()) == \
        json.loads(wanted.text())
    for order in (kvd.HND, kvd.NHD):
        wanted = by_hand("kv", layers, order, units, first, heads, 128, 32, 10, rank,
                         one_buffer=True)
        made = kvd.Layout.vllm_attention(block_size=32, blocks=10, layers=layers,
                                         kv_heads=heads, head_bytes=128, order=order, **tp)
        assert json.loads(made.text()) == json.loads(wanted.text())
    latent = kvd.Layout.vllm_attention(block_size=32, blocks=10, layers=layers, kv_heads=0,
                                       head_bytes=1152)
    wanted = by_hand(["latent"], layers, kvd.NHD, 1, 0, 1, 1152, 32, 10, 0)
    assert json.loads(latent.text()) == json.loads(wanted.text())


def test_shapes_refused_by_the_plan_library(pair):
    good = dict(page_size=16, pages=4, layers=2, kv_heads=4, head_bytes=128)
    with pytest.raises(kvd.InvalidError, match="ranks"):
        shapes.Shapes(tp_size=3).sglang_mha(**good)
    for wrong in (dict(layers=[0, 0]), dict(layers=[1, 0]), dict(page_size=0),
                  dict(head_bytes=1 << 63), dict(pages=-1), dict(layers=[1 << 40]),
                  dict(kv_heads=1 << 40), dict(layers=1 << 20)):
        with pytest.raises(ValueError):
            shapes.Shapes().sglang_mha(**dict(good, **wrong))
    twice = shapes.Shapes().sglang_mha(**good)
    with pytest.raises(ValueError):
        twice.sglang_mha(**good)
    same(twice, kvd.Shapes().sglang_mha(**good))  # as it was before
    with pytest.raises(ValueError):
        twice.buffer(4096)
    made = shapes.Shapes()
    made.buffer(1 << 20)
    attention = dict(block_size=16, blocks=4, layers=1, kv_heads=4, head_bytes=128)
    for wrong in (dict(buffers=[1]), dict(buffers=[0, 0]), dict(buffers=[0], packing=9)):
        with pytest.raises(ValueError):
            made.vllm_attention(**dict(attention, **wrong))
    with pytest.raises(ValueError):
        kvd._kvd.shapes(0, (("nothing",),))
    with pytest.raises(ValueError):
        kvd._kvd.shapes(0, (7,))


def test_daemon_takes_states_and_metadata(pair):
    """A hybrid model of SGLang's with its metadata, and vLLM's state-space pages."""
    made = (shapes.Shapes(tp_size=2, tp_rank=1)
            .sglang_mha(page_size=16, pages=8, layers=[0, 2], kv_heads=4, head_bytes=128)
            .sglang_state("conv", slots=4, layers=[1, 3], full_dim=96, groups=[32, 32, 32],
                          unit_bytes=8)
            .sglang_state("temporal", slots=4, layers=[1, 3], full_dim=64, unit_bytes=256)
            .sglang_aux(slots=4, hidden_size=64))
    pages = shapes.Shapes()
    index = [pages.buffer(64 << 10) for _ in range(2)]
    pages.vllm_ssm("ssm", kind=shapes.MAMBA2, pages=4, page_len=16 << 10, layers=2,
                   buffers=index, conv_dim=128, conv_rows=3, conv_elem=2,
                   temporal=(4, 8, 8), ssm_elem=4)
    with kvd.Client(pair[0].socket_path) as client:
        for one in (made, pages):
            layout = one.layout()
            memory = np.zeros(sum(layout.buffers), np.uint8)
            region, begin, parts = client.register(memory), 0, []
            for nbytes in layout.buffers:
                parts.append((region, begin))
                begin += nbytes
            pool = client.pool(layout, parts)
            assert pool.id
            pool.unregister()
    assert set(made.layout().views) == {"kv", "conv", "temporal", "aux"}


def test_shards_and_formats_survive_the_text():
    layout = kvd.Layout(3).view("kv", 16, 4, shard=(2, 1, 16))
    layout.heads("kv", 0, "k", buffer=layout.buffer(16 * 4 * 64), unit_bytes=64, format="bf16")
    text = json.loads(layout.text())
    assert text["views"]["kv"]["shard"] == {"size": 2, "rank": 1, "run": 16}
    assert text["views"]["kv"]["layers"][0]["fields"][0]["format"] == "bf16"
    assert json.loads(kvd.Layout.parse(layout.text()).text()) == text
