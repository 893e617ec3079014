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

    @classmethod
    def parse(cls, text):
        """Of a layout's text."""
        told = json.loads(text)
        layout = cls(told.get("rank", 0))
        layout.buffers = [int(n) for n in told["buffers"]]
        for name, view in told["views"].items():
            layout.view(name, view["page_tokens"], view["pages"])
            layout.views[name]["layers"] = {one["layer"]: one["fields"]
                                            for one in view["layers"]}
        return layout

    # ---- shapes of engines, by the plan library (kvd.Shapes has more) ----------------

    @classmethod
    def sglang_mha(cls, *, page_size, pages, layers, kv_heads, head_bytes, tp_size=1,
                   tp_rank=0, view="kv"):
        """SGLang's MHA cache: K of all layers, then V; slot rows [slot][head][dim]."""
        return _shapes(tp_size, tp_rank).sglang_mha(
            view, page_size=page_size, pages=pages, layers=layers, kv_heads=kv_heads,
            head_bytes=head_bytes).layout()

    @classmethod
    def sglang_mla(cls, *, page_size, pages, layers, latent_bytes, tp_rank=0, view="kv"):
        """SGLang's MLA cache: one latent a token, the same on every rank."""
        return _shapes(1, 0, tp_rank).sglang_mla(
            view, page_size=page_size, pages=pages, layers=layers,
            latent_bytes=latent_bytes).layout()

    @classmethod
    def vllm_attention(cls, *, block_size, blocks, layers, kv_heads, head_bytes, tp_size=1,
                       tp_rank=0, order=HND, block_len=None, view="kv"):
        """vLLM's attention cache: a buffer a layer, [block][K or V] and in it tokens and
        heads by `order`; kv_heads 0: MLA, one latent of head_bytes a token."""
        from .shapes import HND as K_V_HND, MLA, NHD as K_V_NHD
        if order not in (NHD, HND):
            raise ValueError("order: kvd.NHD or kvd.HND")
        packing = MLA if not kv_heads else K_V_HND if order == HND else K_V_NHD
        rows = 2 * max(kv_heads // tp_size, 1) if kv_heads else 1
        made = _shapes(tp_size, tp_rank)
        layers = list(range(layers)) if isinstance(layers, int) else list(layers)
        stride = block_len or rows * head_bytes * block_size
        buffers = [made.buffer(stride * blocks) for _ in layers]
        return made.vllm_attention(
            view, block_size=block_size, blocks=blocks, layers=layers, buffers=buffers,
            kv_heads=kv_heads, head_bytes=head_bytes, packing=packing,
            block_len=block_len or 0).layout()


def _shapes(size, rank, number=None):
    from .shapes import Shapes
    return Shapes(size, rank, number)
