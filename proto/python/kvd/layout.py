# SPDX-License-Identifier: Apache-2.0
"""Layouts of pools: where byte 0 of (page, token, unit) of each field lies.

    offset + page * page_stride + token * token_stride + (unit - first_unit) * unit_stride
"""
import json

NHD = "NHD"  # in a page: token, head, dim
HND = "HND"  # in a page: head, token, dim


class Layout:
    """Build a pool's layout. Every method returns self or an index."""

    def __init__(self, rank=0):
        self.rank, self.buffers, self.views = int(rank), [], {}

    def buffer(self, nbytes):
        """A piece of registered memory; its index."""
        self.buffers.append(int(nbytes))
        return len(self.buffers) - 1

    def view(self, name, page_tokens, pages):
        """Pages of page_tokens tokens, numbered from 0."""
        if name in self.views:
            raise ValueError("view %r is there already" % name)
        self.views[name] = {"page_tokens": int(page_tokens), "pages": int(pages),
                            "layers": {}}
        return self

    def field(self, view, layer, name, *, buffer, offset=0, page_stride, token_stride,
              unit_stride, unit_bytes, units=1, first_unit=0, total_units=None):
        """One field of one layer, with all of its strides."""
        self.views[view]["layers"].setdefault(int(layer), []).append({
            "name": name, "buffer": int(buffer), "offset": int(offset),
            "page_stride": int(page_stride), "token_stride": int(token_stride),
            "unit_stride": int(unit_stride), "unit_bytes": int(unit_bytes),
            "first_unit": int(first_unit), "units": int(units),
            "total_units": int(units if total_units is None else total_units)})
        return self

    def heads(self, view, layer, name, order=NHD, *, buffer, unit_bytes, units=1, offset=0,
              first_unit=0, total_units=None, page_stride=None):
        """Dense attention: pages one after another, one head of one token a unit."""
        tokens = self.views[view]["page_tokens"]
        if order not in (NHD, HND):
            raise ValueError("order: kvd.NHD or kvd.HND")
        hnd = order == HND
        return self.field(
            view, layer, name, buffer=buffer, offset=offset,
            page_stride=page_stride or unit_bytes * units * tokens,
            token_stride=unit_bytes if hnd else unit_bytes * units,
            unit_stride=unit_bytes * tokens if hnd else unit_bytes,
            unit_bytes=unit_bytes, units=units, first_unit=first_unit,
            total_units=total_units)

    def text(self):
        views = {name: {"page_tokens": v["page_tokens"], "pages": v["pages"],
                        "layers": [{"layer": n, "fields": v["layers"][n]}
                                   for n in sorted(v["layers"])]}
                 for name, v in self.views.items()}
        return json.dumps({"rank": self.rank, "buffers": self.buffers, "views": views})

    # ---- shapes of engines --------------------------------------------------------

    @classmethod
    def sglang_mha(cls, *, page_size, pages, layers, kv_heads, head_bytes, tp_size=1,
                   tp_rank=0, view="kv"):
        """SGLang's MHA cache: K of all layers, then V; slot rows [slot][head][dim]."""
        units, first = _share(kv_heads, tp_size, tp_rank)
        layout = cls(tp_rank).view(view, page_size, pages)
        for name in ("k", "v"):
            for layer in _layers(layers):
                buffer = layout.buffer(units * head_bytes * page_size * pages)
                layout.heads(view, layer, name, NHD, buffer=buffer, unit_bytes=head_bytes,
                             units=units, first_unit=first, total_units=kv_heads)
        return layout

    @classmethod
    def sglang_mla(cls, *, page_size, pages, layers, latent_bytes, tp_rank=0, view="kv"):
        """SGLang's MLA cache: one latent a token, the same on every rank."""
        layout = cls(tp_rank).view(view, page_size, pages)
        for layer in _layers(layers):
            buffer = layout.buffer(latent_bytes * page_size * pages)
            layout.heads(view, layer, "kv", NHD, buffer=buffer, unit_bytes=latent_bytes)
        return layout

    @classmethod
    def vllm_attention(cls, *, block_size, blocks, layers, kv_heads, head_bytes, tp_size=1,
                       tp_rank=0, order=HND, block_len=None, view="kv"):
        """vLLM's attention cache: a buffer a layer, [block][K or V] and in it tokens and
        heads by `order`; kv_heads 0: MLA, one latent of head_bytes a token."""
        units, first = _share(kv_heads, tp_size, tp_rank) if kv_heads else (1, 0)
        parts = ("k", "v") if kv_heads else ("kv",)
        half = units * head_bytes * block_size
        stride = block_len or half * len(parts)
        layout = cls(tp_rank).view(view, block_size, blocks)
        for layer in _layers(layers):
            buffer = layout.buffer(stride * blocks)
            for i, name in enumerate(parts):
                layout.heads(view, layer, name, order, buffer=buffer, offset=i * half,
                             page_stride=stride, unit_bytes=head_bytes, units=units,
                             first_unit=first, total_units=kv_heads or 1)
        return layout


def _layers(layers):
    return range(layers) if isinstance(layers, int) else layers


def _share(heads, size, rank):
    """(heads of this rank, its first): replicated when there are fewer than ranks."""
    if heads >= size:
        if heads % size:
            raise ValueError("%d heads do not divide over %d ranks" % (heads, size))
        return heads // size, rank * (heads // size)
    if size % heads:
        raise ValueError("%d ranks do not divide over %d heads" % (size, heads))
    return 1, rank // (size // heads)
