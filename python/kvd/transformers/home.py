# SPDX-License-Identifier: Apache-2.0
"""Costs that no daemon can measure: attention and computation in this client. All others are in a
daemon's page (Client.cost_page())."""
import time
from statistics import median

import torch

from .attention import Cache, own_part

REPEAT = 5
COMPUTED = 256  # tokens, at most


def _us(work, repeat):
    took = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        took.append(1e6 * (time.perf_counter() - begin))
    return median(took)


def _attend(model, g, rows):
    """One query token and local tokens; transformers expands all latents for it."""
    keys, values = g.unpack(rows)
    if g.mla:
        with torch.no_grad():
            keys, values = model.model.layers[0].self_attn.expand_kv(keys, values)
    query = torch.zeros(1, g.heads, 1, keys.shape[-1], dtype=g.dtype)
    seen = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool)
    own_part(query, keys, values, seen, g.scale)


def home_price(place, document):
    """-> a Reader's price, for a document."""
    g, tokens, part = place.geometry, len(document), document[:COMPUTED]
    rows = {name: torch.zeros(tokens, g.kv_heads, dims, dtype=g.dtype)
            for name, dims in g.fields.items()}

    def compute():
        with torch.no_grad():
            place.model(input_ids=torch.tensor([part]), past_key_values=Cache(g),
                        use_cache=True)
    return {"attend_us": _us(lambda: _attend(place.model, g, rows), REPEAT),
            "recompute_us": _us(compute, 3) / (len(part) * g.layers)}
