# SPDX-License-Identifier: Apache-2.0
"""Layouts from engines' own terms: what they are, and what is refused."""
import json

import pytest

import kvd


def same(ours, theirs):
    assert json.loads(ours.text()) == json.loads(theirs.text())


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
    same(kvd.Layout.sglang_mha(**mha, **tp), wanted)
    mla = dict(page_size=2, pages=64, layers=layers, latent_bytes=1152)
    wanted = by_hand(["latent"], layers, kvd.NHD, 1, 0, 1, 1152, 2, 64, rank, "swa")
    same(kvd.Layout.sglang_mla(tp_rank=rank, view="swa", **mla), wanted)
    for order in (kvd.HND, kvd.NHD):
        wanted = by_hand("kv", layers, order, units, first, heads, 128, 32, 10, rank,
                         one_buffer=True)
        made = kvd.Layout.vllm_attention(block_size=32, blocks=10, layers=layers,
                                         kv_heads=heads, head_bytes=128, order=order, **tp)
        same(made, wanted)
    latent = kvd.Layout.vllm_attention(block_size=32, blocks=10, layers=layers, kv_heads=0,
                                       head_bytes=1152)
    wanted = by_hand(["latent"], layers, kvd.NHD, 1, 0, 1, 1152, 32, 10, 0)
    same(latent, wanted)


@pytest.mark.parametrize("wrong", [
    dict(layers=[0, 0]), dict(page_size=0), dict(head_bytes=1 << 63), dict(pages=-1),
    dict(layers=[1 << 40]), dict(kv_heads=1 << 40), dict(layers=1 << 21), dict(tp_rank=1)])
def test_shapes_impossible_are_refused(wrong):
    good = dict(page_size=16, pages=4, layers=2, kv_heads=4, head_bytes=128)
    with pytest.raises(ValueError):
        kvd.Layout.sglang_mha(**dict(good, **wrong))
    with pytest.raises(kvd.InvalidError, match="ranks"):
        kvd.Layout.sglang_mha(tp_size=3, **good)
    with pytest.raises(ValueError, match="block_len"):
        kvd.Layout.vllm_attention(block_size=16, blocks=4, layers=1, kv_heads=4,
                                  head_bytes=128, block_len=16)


def test_shards_and_formats_survive_the_text():
    layout = kvd.Layout(3).view("kv", 16, 4, shard=(2, 1, 16))
    layout.heads("kv", 0, "k", buffer=layout.buffer(16 * 4 * 64), unit_bytes=64, format="bf16")
    text = json.loads(layout.text())
    assert text["views"]["kv"]["shard"] == {"size": 2, "rank": 1, "run": 16}
    assert text["views"]["kv"]["layers"][0]["fields"][0]["format"] == "bf16"
    assert json.loads(kvd.Layout.parse(layout.text()).text()) == text
