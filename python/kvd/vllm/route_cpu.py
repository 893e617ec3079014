# SPDX-License-Identifier: Apache-2.0
"""Attention backends of vLLM's CPU platform whose attention can be merged with the answers of
holders.

vLLM's own kernels for CPUs return no log-sum-exp, and keep a cache whose order of bytes depends on
the instruction set, to which no holder can attend. These have the cache of GPU backends, where a
token is a row of bytes, and the holders' kernels (kvd.math). They replace the platform's where the
configuration has "route" (plugin.py)."""
from typing import ClassVar

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention.mla_attention import (MLACommonDecodeMetadata,
                                                                MLACommonMetadata)
from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionMetadataBuilder,
                                       MultipleOf)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from .. import math
from .route_worker import SEATS, batch


# ---- attention over own blocks -------------------------------------------------

def own_part(q, cache, rows, scale):
    """Causal attention over each request's own blocks. q [tokens, heads, dqk]; cache: a
    kvd.math.Cache; rows: a kvd.math.Batch; -> o [tokens, heads, dv], log-sum-exp [tokens, heads],
    in fp32."""
    out = [torch.empty(shape, dtype=torch.float32)
           for shape in ((rows.tokens, q.shape[1], cache.dv), (rows.tokens, q.shape[1]))]
    return math.attend(q[:rows.tokens], cache, rows, scale=scale, out=out,
                       threads=min(torch.get_num_threads(), math.THREADS_MAX))


class Caches:
    """kvd.math.Cache of a layer's tensor."""

    def __init__(self):
        self.tensor = self.made = None

    def of(self, tensor, dv):
        if self.tensor is not tensor:
            self.tensor, self.made = tensor, math.Cache(tensor, dv)
        return self.made


# ---- a step ----------------------------------------------------------------------------------

class Rows:
    """Requests of a step, as vLLM's metadata has them; `block`: tokens of one."""

    def __init__(self, common, block):
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        table = common.block_table_tensor.numpy()
        self.block, self.made, self.mapping, self.slots = block, None, common.slot_mapping, None
        self.requests = [(starts[i], starts[i + 1] - starts[i], lengths[i],
                          table[i, :-(-lengths[i] // block)])
                         for i in range(common.num_reqs) if starts[i + 1] > starts[i]]

    def store(self, cache, key, value):
        """K and V of the tokens that have a slot, into a layer's [blocks, heads, tokens, values]."""
        if self.slots is None:
            there = self.mapping >= 0
            slots = self.mapping[there]
            self.slots = None if there.all() else there, slots // self.block, slots % self.block
        there, blocks, places = self.slots
        rows = torch.cat((key, value), -1)[:self.mapping.shape[0]]
        if there is not None:
            rows = rows[there]
        cache[blocks, :, places] = rows.to(cache.dtype)

    def batch(self):
        """Made in the first layer: routes may be known after the metadata."""
        if self.made is None:
            self.router = getattr(get_kv_transfer_group(), "router", None) \
                if has_kv_transfer_group() else None
            self.made = self.router.batch(self.requests, self.block) if self.router else \
                batch(self.requests, self.block, {}, 1, None)
            self.order = torch.tensor(self.made.order, dtype=torch.int64)
            self.numbers = np.array(self.made.order, np.uint32)
            rows = self.made.rows
            self.rows = math.Batch([row.count for row in rows], [len(row.blocks) for row in rows],
                                   [block for row in rows for block in row.blocks],
                                   lengths=[row.length for row in rows])
        return self.made


def attend(step, layer, q, cache, scale):
    """Attention of a layer over all tokens, own and elsewhere: [tokens, heads, dv] in fp32.
    cache: a kvd.math.Cache."""
    made, router = step.batch(), step.router
    cuts = made.cuts

    def fill(seat, cut):
        rows = q[step.order[cut.begin:cut.end]].contiguous()
        torch.from_numpy(seat)[:rows.nbytes] = rows.view(-1).view(torch.uint8)

    def send(i):
        return router.send(layer.layer_name, cuts[i], i % SEATS, fill)
    sent = [send(i) for i in range(min(SEATS, len(cuts)))]
    o, lse = own_part(q, cache, step.rows, scale)
    for i, cut in enumerate(cuts):
        there = router.receive(layer.layer_name, cut, i % SEATS) if sent[i] else None
        if there is None:  # the step's result is dropped
            o[step.order[cut.begin:cut.end]] = 0
        else:
            math.merge(o, lse, there, at=step.numbers[cut.begin:cut.end])
        if i + SEATS < len(cuts):
            sent.append(send(i + SEATS))
    return o


# ---- grouped heads -----------------------------------------------------------------------------

class Attention(AttentionBackend):
    """Tensors [blocks, heads, tokens, K and V], in the memory order that vLLM chooses."""
    token_rows = True  # to kvd: a token is a row of bytes
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name():
        return "CUSTOM"  # a name that vLLM knows

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls():
        return AttentionRows

    @staticmethod
    def get_builder_cls():
        return RowsBuilder


class RowsBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return Rows(common_attn_metadata, self.kv_cache_spec.block_size)


class AttentionRows(AttentionImpl):
    kind = "gqa"

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                 kv_cache_dtype, logits_soft_cap=None, attn_type="decoder",
                 kv_sharing_target_layer_name=None, sinks=None):
        for name, given in (("ALiBi", alibi_slopes is not None), ("sinks", sinks is not None),
                            ("a sliding window", sliding_window is not None),
                            ("a soft cap of logits", bool(logits_soft_cap)),
                            ("layers that share a cache", kv_sharing_target_layer_name is not None),
                            ("attention that is not a decoder's", attn_type != "decoder"),
                            ("a head of %d values" % head_size, head_size % 16 != 0)):
            if given:
                raise ValueError("kvd.vllm: \"route\": %s is not supported; set it to \"off\""
                                 % name)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.kv_sharing_target_layer_name = None
        self.dqk = self.dv = head_size
        self.caches = Caches()

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        if attn_metadata is None:  # a run to measure memory
            return output.fill_(0)
        attn_metadata.store(kv_cache, key, value)
        q = query.view(query.shape[0], self.num_heads, self.head_size)
        o = attend(attn_metadata, layer, q, self.caches.of(kv_cache, self.dv), self.scale)
        output.view(-1, self.num_heads, self.dv)[:len(o)] = o
        return output


# ---- MLA -------------------------------------------------------------------------------------

class Latent(CPUMLABackend):
    """All tokens are decode tokens to vLLM, which then multiplies q by the K part of kv_b_proj
    before, and what comes back by its V part: such rows attend to the cached latents as they
    are, here and at holders."""
    token_rows = True

    @staticmethod
    def get_impl_cls():
        return LatentRows

    @staticmethod
    def get_builder_cls():
        return LatentBuilder


class LatentBuilder(RowsBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        m = common_attn_metadata
        made = MLACommonMetadata(
            num_reqs=m.num_reqs, max_query_len=m.max_query_len, max_seq_len=m.max_seq_len,
            num_actual_tokens=m.num_actual_tokens, query_start_loc=m.query_start_loc,
            slot_mapping=m.slot_mapping, num_decodes=m.num_reqs,
            num_decode_tokens=m.num_actual_tokens, num_prefills=0,
            decode=MLACommonDecodeMetadata(m.block_table_tensor, m.seq_lens, None))
        made.kvd = super().build(common_prefix_len, m, fast_build)
        return made


class LatentRows(CPUMLAImpl):
    kind = "mla"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dqk, self.dv = self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank
        self.caches = Caches()

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        o = attend(attn_metadata.kvd, layer, q, self.caches.of(kv_c_and_k_pe_cache, self.dv),
                   self.scale)
        return o.to(q.dtype), None
