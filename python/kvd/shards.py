# SPDX-License-Identifier: Apache-2.0
"""The heads that a tensor-parallel rank holds, as SGLang and vLLM divide them."""
from . import _check, _kvd


def units(total, size, rank):
    """(first, count) of the heads, channels or groups of one of `size` ranks."""
    return _kvd.shard_units(*(_check.integer(name, value, 0, _check.U32) for name, value in
                              (("total", total), ("size", size), ("rank", rank))))
