# SPDX-License-Identifier: Apache-2.0
"""Attention over fp8 with a scale for each token and head: fields that are checked, and scales
that are no numbers. That the results are right: test_attend.py, by its shapes."""
import copy

import numpy as np
import pytest

import kvd
from test_attend import SHAPES, T, Engine, Model, close, daemons, ids_of


@pytest.mark.parametrize("far", [False, True])
def test_scales_of_tokens_are_checked(far):
    model = Model(2 * T, **SHAPES["gqa of scaled fp8"])
    ids = ids_of(2, b"scales")
    with daemons(1) as (_, client, _, (other,)):
        Engine(other if far else client, model).put(ids)
        for names, why in (
                ({"key_scale": "none"}, "no field 'none'"),
                ({"value_scale": "v"}, "field v: a head of a token has 64 bytes, but 1 .* 4"),
                ({"key_scale": "n" * 31, "value_scale": "m" * 31}, "no field 'n{31}'")):
            here = Engine(client, model, **names)
            with here.space.hold(ids, remote=10) as hold:
                here.ask(0, 0, [kvd.Part(hold)])
                with pytest.raises(kvd.Error, match=why):
                    here.attend.wait(0, timeout=30)
        # an engine that has the scale of K alone in o, and none: 1
        for names in ({"key_scale": None}, {"value_scale": None}):
            one = copy.copy(model)
            one.k = model.k / model.k_scale if "key_scale" in names else model.k
            one.v = model.v / model.v_scale if "value_scale" in names else model.v
            here = Engine(client, one, **names)
            with here.space.hold(ids, remote=10) as hold:
                q = here.ask(0, 1, [kvd.Part(hold)])
                here.attend.wait(0, timeout=30)
                close(here.got(0), one.attend(1, q, np.arange(2 * T)))
        for wrong, why in (
                ({"kv_type": "bf16"}, "key_scale, value_scale: need the kv_type fp8_e4m3"),
                ({"kind": "mla", "kv_heads": 1}, "value_scale: mla has key_scale alone"),
                ({"key_scale": "n" * 32}, "key_scale")):
            with pytest.raises(kvd.Error, match=why):
                Engine(client, model, **wrong)
        for scale in (1, b"k_scale"):
            with pytest.raises(TypeError):
                Engine(client, model, key_scale=scale)


def test_scale_of_another_format_is_refused():
    model = Model(2 * T, **SHAPES["gqa of scaled fp8"])
    parts = model.parts
    model.parts = lambda: [[(name, values, "int32" if name == "k_scale" else format)
                            for name, values, format in parts()[0]]]
    ids = ids_of(2, b"int32")
    with daemons(0) as (_, client, _, _):
        engine = Engine(client, model)
        engine.put(ids)
        with engine.space.hold(ids) as hold:
            engine.ask(0, 0, [kvd.Part(hold)])
            with pytest.raises(kvd.Error, match="field k_scale: its format is int32.*fp32"):
                engine.attend.wait(0, timeout=30)


def test_scales_that_are_no_numbers_end_in_their_rows():
    """As NaNs of K or V do."""
    model = Model(2 * T, **SHAPES["gqa of scaled fp8"])
    model.k_scale[0, 5, 1] = np.inf
    model.v_scale[1, 7, 0] = np.nan
    ids = ids_of(2, b"nan")
    with daemons(1) as (_, client, _, (far,)):
        Engine(far, model).put(ids)
        here = Engine(client, model)
        with here.space.hold(ids, remote=10) as hold:
            for layer, spoilt in ((0, [2, 3, 6, 7]), (1, [0, 1, 4, 5])):
                q = here.ask(0, layer, [kvd.Part(hold)])
                here.attend.wait(0, timeout=30)
                o = here.got(0)[0]
                rest = np.setdiff1d(np.arange(8), spoilt)
                want = model.attend(layer, q, np.arange(2 * T))
                assert np.abs(o[rest] - want[0][rest]).max() < 2e-2
                assert layer == 0 or np.isnan(o[spoilt]).all()
