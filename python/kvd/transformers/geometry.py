# SPDX-License-Identifier: Apache-2.0
"""Shape of a model's KV and attention for kvd: rows and tokens, encoding of positions, layout of
pages.

transformers caches two tensors per layer, [batch, heads, tokens, values]: K and V, or for MLA the
latent and the rotated key, which kvd stores as one row per token. DeepSeek-V3.2 also has index
keys, by which it selects tokens: they are a separate view, because they are always needed here."""
import torch

from .. import cost
from ..attend import Rope
from ..layout import Layout, format_of

# Order of pairs of rotated values in the model's cache, which its configuration does not contain.
# V3's function for interleaved weights leaves halves behind.
PAIRS = {"deepseek_v2": "interleaved", "deepseek_v3": "halves", "deepseek_v32": "halves",
         "llama": "halves"}
ROPE_FIXED = ("default", "linear", "yarn", "llama3")  # frequencies independent of the length
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Geometry:
    def __init__(self, model):
        config = model.config
        if config.model_type not in PAIRS:
            raise ValueError("model: %r is not supported (%s)"
                             % (config.model_type, ", ".join(PAIRS)))
        self.name, self.dtype = config.model_type, model.dtype
        self.type = TYPES[model.dtype]
        self.value_bytes = model.dtype.itemsize
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.mla = hasattr(config, "kv_lora_rank")
        self.index = getattr(config, "index_head_dim", 0)
        if self.mla:
            self.kv_heads, self.dv = 1, config.kv_lora_rank
            self.dqk = config.kv_lora_rank + config.qk_rope_head_dim
            self.key, self.fields = "kv", {"kv": self.dqk}
        else:
            self.kv_heads = config.num_key_value_heads
            self.dqk = self.dv = model.model.layers[0].self_attn.head_dim
            self.key, self.fields = "k", {"k": self.dqk, "v": self.dv}
        self.scale = float(model.model.layers[0].self_attn.scaling)
        self.rope = self._rope(model.model.rotary_emb)

    def _rope(self, rotary):
        freq = [float(f) for f in rotary.inv_freq.double()]
        if rotary.rope_type not in ROPE_FIXED:
            return None  # chunks can only be used at their original position
        first = self.dv if self.mla else 0
        return Rope(first, 2 * len(freq), PAIRS[self.name], freq)

    def layout(self, page_tokens, pages):
        """One buffer: layer after layer, field after field, consecutive pages."""
        layout = Layout()
        layout.buffers, at = [0], 0
        views = {"kv": [(n, self.kv_heads, d) for n, d in self.fields.items()]}
        if self.index:
            views["index"] = [("index", 1, self.index)]
        for view, fields in views.items():
            layout.view(view, page_tokens, pages)
            for layer in range(self.layers):
                for name, heads, dims in fields:
                    unit = dims * self.value_bytes
                    layout.heads(view, layer, name, buffer=0, offset=at, unit_bytes=unit,
                                 units=heads, format=format_of(self.dtype))
                    at += pages * page_tokens * heads * unit
        layout.buffers = [at]
        return layout

    def attend(self, client, rows, seats):
        """Buffers for this model's rows."""
        return client.attend(
            rows=rows, seats=seats, heads=self.heads, kv_heads=self.kv_heads, dqk=self.dqk,
            dv=self.dv, kind="mla" if self.mla else "gqa", q_type=self.type, kv_type=self.type,
            scale=self.scale, view="kv", rope=self.rope, key=self.key,
            value=None if self.mla else "v")

    def cost_model(self):
        sizes = dict(value_bytes=self.value_bytes, out_bytes=4)
        if self.mla:
            return cost.Model.mla(self.layers, self.heads, self.dqk, self.dv, **sizes)
        return cost.Model.gqa(self.layers, self.heads, self.kv_heads, self.dqk, self.dv,
                              **sizes)

    # ---- transformers' cache, and rows of tokens ----

    def pack(self, keys, values):
        """A layer's cached tensors -> each field's rows [tokens, heads, values]."""
        keys, values = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        if self.mla:
            return {"kv": torch.cat((keys, values), -1)}
        return {"k": keys, "v": values}

    def unpack(self, rows):
        """The inverse of pack()."""
        if self.mla:
            kv = rows["kv"].transpose(0, 1)[None]
            return kv[..., :self.dv], kv[..., self.dv:]
        return rows["k"].transpose(0, 1)[None], rows["v"].transpose(0, 1)[None]
