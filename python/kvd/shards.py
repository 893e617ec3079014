# SPDX-License-Identifier: Apache-2.0
"""The heads that a tensor-parallel rank holds, as SGLang and vLLM divide them."""
from . import _check
from .errors import InvalidError


def units(total, size, rank):
    """(first, count) of the heads, channels or groups of one of `size` ranks: an equal share
    each, or one each that several neighbouring ranks hold."""
    _check.integer("total", total, 1, _check.U32)
    _check.integer("size", size, 1, _check.U32)
    _check.integer("rank", rank, 0, size - 1)
    if total % size == 0:
        return rank * (total // size), total // size
    if size % total == 0:
        # a division, not a remainder: ranks that share a head are neighbours
        # (sglang #19086, #30997, #31295)
        return rank // (size // total), 1
    raise InvalidError("shard: %d units not divisible over %d ranks, nor ranks over units"
                       % (total, size), "EINVAL", 1)
