# SPDX-License-Identifier: Apache-2.0
"""Keys for other positions by numpy, without kvd's code: what a splice is compared with."""
import numpy as np


def turned(keys, delta, first, dims, pairs, inv_freq):
    """A copy of keys [..., values], in fp64: their values [first, first + dims) are rotated by
    delta * inv_freq, pair by pair."""
    out = np.array(keys, np.float64)
    rope = out[..., first:first + dims]
    x, y = (rope[..., 0::2], rope[..., 1::2]) if pairs == "interleaved" else \
        (rope[..., :dims // 2], rope[..., dims // 2:])
    angle = delta * np.asarray(inv_freq, np.float64)
    x[...], y[...] = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
    return out
