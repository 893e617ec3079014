# SPDX-License-Identifier: Apache-2.0
"""Layouts of pools: the position of byte 0 of (page, token, unit) of each field.

    offset + page * page_stride + token * token_stride + (unit - first_unit) * unit_stride
"""
import hashlib
import json

from . import _check, shards

NHD = "NHD"  # in a page: token, head, dim
HND = "HND"  # in a page: head, token, dim
INT64 = (1 << 63) - 1  # of bytes
SHARD_SIZE, SHARD_RUN = 256, 1 << 20
FORMAT_MAX = 15  # characters of a field's format
FORMATS = {"bf16": "bfloat16", "half": "float16", "float": "float32", "fp8": "fp8_e4m3",
           "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def format_of(dtype):
    """Format of a field, from a torch dtype or an engine's name for one. Equal bytes have one
    name for all engines, others differ (float8_e4m3fnuz has another exponent)."""
    word = str(dtype).rsplit(".", 1)[-1]
    word = FORMATS.get(word, word)
    if len(word) <= FORMAT_MAX:
        return word
    # names that differ only after the cut are distinct formats
    return word[:6] + "~" + hashlib.sha256(word.encode()).hexdigest()[:FORMAT_MAX - 7]


class Layout:
    """Builder of a pool's layout. Methods return self or an index."""

    def __init__(self, rank=0):
        self.rank = _check.integer("rank", rank, 0, _check.U32)
        self.buffers, self.views = [], {}

    def buffer(self, nbytes):
        """Add a piece of registered memory. -> its index"""
        self.buffers.append(_check.integer("nbytes", nbytes, 1, INT64))
        return len(self.buffers) - 1

    def view(self, name, page_tokens, pages, shard=None):
        """Add a view: pages of page_tokens tokens, numbered from 0. shard: (size, rank, run), the
        pages hold token t of a request only if (t // run) % size == rank."""
        _check.instance("name", name, str, "a str")
        if name in self.views:
            raise ValueError("view %r already exists" % name)
        self.views[name] = {
            "page_tokens": _check.integer("page_tokens", page_tokens, 1, _check.U32),
            "pages": _check.integer("pages", pages, 1, _check.U32), "layers": {}}
        if shard is not None:
            size, rank, run = shard
            self.views[name]["shard"] = {
                "size": _check.integer("shard size", size, 1, SHARD_SIZE),
                "rank": _check.integer("shard rank", rank, 0, size - 1),
                "run": _check.integer("shard run", run, 1, SHARD_RUN)}
        return self

    def _view(self, name):
        if name not in self.views:
            raise ValueError("view: %s is not in this layout (%s)"
                             % (_check.came(name), ", ".join(map(repr, self.views)) or "none"))
        return self.views[name]

    def field(self, view, layer, name, *, buffer, offset=0, page_stride, token_stride,
              unit_stride, unit_bytes, units=1, first_unit=0, total_units=None, format=None):
        """Add one field of one layer, with all of its strides, in bytes. format: type of the
        values ("bf16", at most 15 characters); rooms between different formats fail."""
        last = len(self.buffers) - 1
        if last < 0:
            raise ValueError("buffer: the layout has none; call buffer() first")
        sizes = {"offset": offset, "page_stride": page_stride, "token_stride": token_stride,
                 "unit_stride": unit_stride, "unit_bytes": unit_bytes}
        counts = {"first_unit": first_unit, "units": units,
                  "total_units": units if total_units is None else total_units}
        row = {"name": _check.instance("name", name, str, "a str"),
               "buffer": _check.integer("buffer", buffer, 0, last)}
        row.update((k, _check.integer(k, v, 0, INT64)) for k, v in sizes.items())
        row.update((k, _check.integer(k, v, 0, _check.U32)) for k, v in counts.items())
        if format is not None:
            row["format"] = _check.instance("format", format, str, "a str")
        layers = self._view(view)["layers"]
        fields = layers.setdefault(_check.integer("layer", layer, 0, _check.U32), [])
        if any(one["name"] == name for one in fields):
            raise ValueError("layer %d of view %r already has field %r" % (layer, view, name))
        fields.append(row)
        return self

    def heads(self, view, layer, name, order=NHD, *, buffer, unit_bytes, units=1, offset=0,
              first_unit=0, total_units=None, page_stride=None, format=None):
        """Add dense attention: consecutive pages; a unit is one head of one token."""
        tokens = self._view(view)["page_tokens"]
        unit_bytes = _check.integer("unit_bytes", unit_bytes, 1, INT64)
        units = _check.integer("units", units, 1, _check.U32)
        if order not in (NHD, HND):
            raise ValueError("order: kvd.NHD or kvd.HND")
        hnd = order == HND
        return self.field(
            view, layer, name, buffer=buffer, offset=offset,
            page_stride=page_stride or unit_bytes * units * tokens,
            token_stride=unit_bytes if hnd else unit_bytes * units,
            unit_stride=unit_bytes * tokens if hnd else unit_bytes,
            unit_bytes=unit_bytes, units=units, first_unit=first_unit,
            total_units=total_units, format=format)

    def text(self):
        """The JSON text that the daemon takes."""
        views = {name: dict(v, layers=[{"layer": n, "fields": v["layers"][n]}
                                       for n in sorted(v["layers"])])
                 for name, v in self.views.items()}
        return json.dumps({"rank": self.rank, "buffers": self.buffers, "views": views})

    @classmethod
    def parse(cls, text):
        """Parse a layout's JSON text."""
        told = json.loads(text)
        layout = cls(told.get("rank", 0))
        layout.buffers = [int(n) for n in told["buffers"]]
        for name, view in told["views"].items():
            shard = view.get("shard")
            layout.view(name, view["page_tokens"], view["pages"],
                        shard and (shard["size"], shard["rank"], shard["run"]))
            layout.views[name]["layers"] = {one["layer"]: one["fields"]
                                            for one in view["layers"]}
        return layout

    # ---- shapes of engines ------------------------------------------------------------

    @classmethod
    def sglang_mha(cls, *, page_size, pages, layers, kv_heads, head_bytes, tp_size=1,
                   tp_rank=0, view="kv"):
        """SGLang's MHA cache: K of all layers, then V; slots are rows [slot][head][dim].
        layers: a number, or kv_layer_ids; kv_heads: of the whole model."""
        layout = cls(tp_rank)._view_of(view, page_size=page_size, pages=pages)
        return layout._rows(view, ("k", "v"), layers, head_bytes, kv_heads,
                            shards.units(kv_heads, tp_size, tp_rank))

    @classmethod
    def sglang_mla(cls, *, page_size, pages, layers, latent_bytes, tp_rank=0, view="kv"):
        """SGLang's MLA cache: one latent per token, equal on all ranks."""
        layout = cls(tp_rank)._view_of(view, page_size=page_size, pages=pages)
        return layout._rows(view, ("latent",), layers, latent_bytes, 1, (0, 1))

    @classmethod
    def vllm_attention(cls, *, block_size, blocks, layers, kv_heads, head_bytes, tp_size=1,
                       tp_rank=0, order=HND, block_len=None, view="kv"):
        """vLLM's attention cache: a buffer per layer, [block][K or V], then tokens and heads in
        `order`; kv_heads 0: MLA, one latent of head_bytes per token."""
        layout = cls(tp_rank)._view_of(view, block_size=block_size, blocks=blocks)
        if _check.integer("kv_heads", kv_heads, 0, _check.U32):
            names, total = ("k", "v"), kv_heads
            first, units = shards.units(kv_heads, tp_size, tp_rank)
        else:
            names, total, first, units, order = ("latent",), 1, 0, 1, NHD
        part = _check.integer("head_bytes", head_bytes, 1, _check.U32) * units * block_size
        stride = part * len(names) if block_len is None else \
            _check.integer("block_len", block_len, part * len(names), INT64)
        for layer in _check.numbers("layers", layers):
            buffer = layout.buffer(stride * blocks)
            for i, name in enumerate(names):
                layout.heads(view, layer, name, order, buffer=buffer, offset=i * part,
                             unit_bytes=head_bytes, units=units, first_unit=first,
                             total_units=total, page_stride=stride)
        return layout

    def _view_of(self, name, **counts):
        """Add a view; counts: page size and pages, by their names of the engine."""
        return self.view(name, *(_check.integer(key, value, 1, _check.U32)
                                 for key, value in counts.items()))

    def _rows(self, view, names, layers, unit_bytes, total, share):
        """Add a buffer of rows [slot][unit] for each name and layer."""
        first, units = share
        one = self.views[view]
        slots = one["page_tokens"] * one["pages"]
        layers = _check.numbers("layers", layers)
        _check.integer("bytes of a unit", unit_bytes, 1, INT64)
        for name in names:
            for layer in layers:
                self.heads(view, layer, name, buffer=self.buffer(slots * units * unit_bytes),
                           unit_bytes=unit_bytes, units=units, first_unit=first,
                           total_units=total)
        return self
