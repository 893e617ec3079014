# SPDX-License-Identifier: Apache-2.0
"""The attention function that transformers calls for each layer, and a cache that counts tokens
which are stored elsewhere.

A model is called with its cache and with kvd=reader, which reaches this function unchanged. The
cache holds the conversation's own tokens; the document's are included in the lengths that
transformers queries, so masks and positions are right without more. In the function

    o, m, l         own attention, fp32
    o', m', l'      the document's, from the reader: its rows were sent before own attention
    w = l exp(m - max), w' = l' exp(m' - max); (w o + w' o') / (w + w')

For MLA the rows are absorbed: q_nope is multiplied by the K part of kv_b_proj, so a row is compared
with the cached latent itself; the result is a mean of latents, which is multiplied by the V
part."""
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as BaseCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer
from transformers.masking_utils import sdpa_mask

NONE = 0xFFFFFFFF  # in a selection: no token


class Away:
    """Tokens of a document that are stored elsewhere, before own token `at`."""

    def __init__(self):
        self.tokens, self.at = 0, 0


class Layer(DynamicLayer):
    def __init__(self, away):
        super().__init__()
        self.away = away

    def get_seq_length(self):
        return super().get_seq_length() + self.away.tokens

    def own(self):
        return super().get_seq_length()

    def insert(self, keys, values, at):
        """Insert KV of tokens that are local now."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if not self.own():
            self.keys, self.values = keys.contiguous(), values.contiguous()
            return
        self.keys, self.values = (
            torch.cat((old[..., :at, :], new, old[..., at:, :]), -2)
            for old, new in ((self.keys, keys), (self.values, values)))


class IndexedLayer(Layer, DynamicIndexedLayer):
    """Index keys cover all tokens."""

    def __init__(self, away):
        DynamicIndexedLayer.__init__(self)
        self.away = away


class Cache(BaseCache):
    def __init__(self, geometry):
        self.away = Away()
        kind = IndexedLayer if geometry.index else Layer
        super().__init__(layers=[kind(self.away) for _ in range(geometry.layers)])

    def cut(self, length):
        """Remove own tokens, so that `length` remain in all; some layers may have more than
        others."""
        for layer in self.layers:
            more = layer.get_seq_length() - length
            if more > 0:
                layer.keys = layer.keys[..., :-more, :]
                layer.values = layer.values[..., :-more, :]
            if isinstance(layer, IndexedLayer) and layer.is_indexer_initialized:
                layer.indexer_keys = layer.indexer_keys[:, :length]


def mask(*args, **kwargs):
    """True: may be attended to. Always created, because selections and documents need it."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def visible(attention_mask, indices, tokens):
    """Whether each token may be attended to: [batch, heads or 1, queries, tokens]."""
    seen = attention_mask[..., :tokens]
    if indices is None:
        return seen
    chosen = torch.zeros_like(seen[:, 0]).scatter_(-1, indices.long(), True)
    return seen & chosen[:, None]


def own_part(query, key, value, seen, scale):
    """-> o [batch, heads, queries, values], m, l [batch, heads, queries]; fp32."""
    batch, heads, queries, dims = query.shape
    # heads that share K and V together, so that none is copied for each
    query = query.float().view(batch, key.shape[1], -1, queries, dims).flatten(2, 3)
    scores = torch.matmul(query, key.float().transpose(2, 3)) * scale
    scores = scores.view(batch, heads, queries, -1).masked_fill(~seen, -torch.inf)
    m = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = torch.exp(scores - m.clamp(min=-3e38)[..., None])
    total = weights.sum(-1)
    o = torch.matmul(weights.view(batch, key.shape[1], -1, key.shape[2]), value.float())
    return o.view(batch, heads, queries, -1) / total.clamp(min=1e-38)[..., None], m, total


def merge(a, b):
    """Merge attention over two disjoint sets of tokens."""
    (oa, ma, la), (ob, mb, lb) = a, b
    m = torch.maximum(ma, mb).clamp(min=-3e38)
    wa, wb = la * torch.exp(ma - m), lb * torch.exp(mb - m)
    return (oa * wa[..., None] + ob * wb[..., None]) / (wa + wb)[..., None]


def rows_of(module, query, geometry):
    """Query rows in the form of the document's KV: [queries * heads, dqk], of the KV's type."""
    q = query[0].transpose(0, 1).float()  # [queries, heads, values]
    if geometry.mla:
        up = module.kv_b_proj.weight.view(geometry.heads, -1, geometry.dv).float()
        nope = module.qk_nope_head_dim
        latent = torch.einsum("shd,hdc->shc", q[..., :nope], up[:, :nope])
        q = torch.cat((latent, q[..., nope:]), -1)
    return q.flatten(0, 1).to(geometry.dtype).contiguous()


def part_of(module, o, m, l, geometry):
    """Returned rows, in the form of own_part()."""
    o, m, l = (t.view(-1, geometry.heads, *t.shape[1:]) for t in (o, m, l))
    if geometry.mla:
        up = module.kv_b_proj.weight.view(geometry.heads, -1, geometry.dv).float()
        o = torch.einsum("shc,hdc->shd", o, up[:, module.qk_nope_head_dim:])
    return tuple(t.transpose(0, 1)[None] for t in (o, m, l))


def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, kvd=None,
              indices=None, **_):
    """Registered as "kvd"; see transformers' AttentionInterface. Without kvd=reader, or with one
    whose document is local, it is ordinary attention."""
    away = kvd.cache.away if kvd is not None else Away()
    own, total = key.shape[2], key.shape[2] + away.tokens
    seen = visible(attention_mask, indices, total)
    if not away.tokens:
        o, _, _ = own_part(query, key, value, seen, scaling)
        return o.to(query.dtype).transpose(1, 2).contiguous(), None
    if query.shape[0] != 1:
        raise ValueError("kvd: batch of %d: a reader has one conversation" % query.shape[0])
    geometry = kvd.place.geometry
    at, end = away.at, away.at + away.tokens
    asked = kvd.ask(module.layer_idx, rows_of(module, query, geometry),
                    None if indices is None else seen[0, 0, :, at:end])
    seen = torch.cat((seen[..., :at], seen[..., end:]), -1)
    assert seen.shape[-1] == own
    mine = own_part(query, key, value, seen, scaling)
    o = merge(mine, part_of(module, *kvd.answer(asked), geometry))
    return o.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("kvd", attention)
AttentionMaskInterface.register("kvd", mask)
