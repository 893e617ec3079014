# SPDX-License-Identifier: Apache-2.0
"""kvd.cost: the closed form from Python."""
import math

import pytest

import kvd
from kvd import cost

LITE = cost.Model.mla(layers=27, heads=16)


def test_choice_follows_the_steps():
    page = cost.preset("h100-ibgda")
    few = page.decide(LITE, [cost.Holder(32768)], steps=1, shifted=True)
    assert few.way == cost.ROUTE and few.sure and not few.replicate
    assert abs(few.even_steps - 51.66) < 0.1 and few.transport == "preset"
    assert few.route.us < few.fetch.us and few.local == cost.Price(math.inf, 0)
    many = page.decide(LITE, [cost.Holder(32768)], steps=500, shifted=True)
    assert many.way == cost.FETCH and many.even_steps == few.even_steps
    rented = page.decide(LITE, [cost.Holder(32768)], steps_made=100, shifted=True,
                         last=cost.ROUTE)
    assert rented.way == cost.FETCH


def test_close_call_keeps_the_last_choice():
    page = cost.preset("h100-ibgda")
    for last in (cost.ROUTE, cost.FETCH):
        choice = page.decide(LITE, [cost.Holder(32768)], steps=52, shifted=True, last=last)
        assert choice.way == last and not choice.sure


def test_selection_of_several_holders_and_gqa():
    page = cost.preset("a40-pcie4")
    choice = page.decide(cost.Model.gqa(32, 32, 8), [cost.Holder(8192, 512)] * 4, steps=10,
                         selected=True, recompute_us=1)
    assert choice.once.us == 0 and choice.local.us < math.inf
    full = page.decide(cost.Model.gqa(32, 32, 8), [cost.Holder(8192)], steps=1, no_pages=True)
    assert full.way == cost.ROUTE and full.fetch.us == math.inf


def test_wrong_arguments_are_refused():
    page = cost.preset("h100-ibgda")
    with pytest.raises(kvd.NotFoundError, match="tin-cans"):
        cost.preset("tin-cans")
    with pytest.raises(TypeError):
        cost.preset(3)
    for wrong, error in ((dict(steps=-1), ValueError), (dict(steps=True), TypeError),
                         (dict(shifted=1), TypeError), (dict(last="fax"), ValueError),
                         (dict(hidden_us=-1), ValueError), (dict(attend_us="1"), TypeError),
                         (dict(recompute_us=math.nan), ValueError)):
        with pytest.raises(error):
            page.decide(LITE, [cost.Holder(1)], **wrong)
    for holders in ([], [cost.Holder(1)] * 9, [cost.Holder(1, 0, b"short")],
                    [cost.Holder(1 << 70)]):
        with pytest.raises(ValueError):
            page.decide(LITE, holders)
    with pytest.raises(kvd.InvalidError):
        page.decide(LITE, [cost.Holder(1, 2)])
    with pytest.raises(kvd.InvalidError):
        page.decide(LITE._replace(heads=0), [cost.Holder(1)])
    with pytest.raises(kvd.NotFoundError, match="no way"):
        page.decide(LITE, [cost.Holder(1, 0, b"x" * 16)])
    with pytest.raises(TypeError):
        page.decide("v3", [cost.Holder(1)])
