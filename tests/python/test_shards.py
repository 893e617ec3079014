# SPDX-License-Identifier: Apache-2.0
"""Heads over ranks, and what is refused."""
import pytest

from kvd import Error, shards


def test_units_are_shared_evenly():
    assert [shards.units(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [shards.units(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("total,size,rank", [(6, 4, 0), (8, 0, 0), (0, 1, 0), (8, 4, 4),
                                             (-1, 1, 0)])
def test_indivisible_sizes_are_refused(total, size, rank):
    with pytest.raises((ValueError, Error)):
        shards.units(total, size, rank)
