# SPDX-License-Identifier: Apache-2.0
"""An attention backend for vLLM's CPU platform with the cache of its GPU backends: tensors
[blocks, heads, tokens, K and V], each token's K and V of a head side by side, in the memory
order that vLLM chooses (VLLM_KV_CACHE_LAYOUT). vLLM loads it by its own plugins in every
process; its files stay as they are. MLA keeps its backend.

KVD_PLAIN_KERNEL_BLOCKS: block sizes of the kernel, "16,32"; larger blocks are split, as
FlashInfer's are. Not set: multiples of 16, as FlashAttention's."""
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionMetadataBuilder,
                                       MultipleOf)


def load():
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    register_backend(AttentionBackendEnum.CUSTOM, __name__ + ".Plain")
    platform = type(current_platform)
    chosen = platform.get_attn_backend_cls.__func__

    def plain(cls, selected_backend, attn_selector_config, num_heads=None):
        if attn_selector_config.use_mla:
            return chosen(cls, selected_backend, attn_selector_config, num_heads)
        return AttentionBackendEnum.CUSTOM.get_path()
    platform.get_attn_backend_cls = classmethod(plain)


class Plain(AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name():
        return "TRITON_ATTN"  # whose rows of tokens this has

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        sizes = os.environ.get("KVD_PLAIN_KERNEL_BLOCKS")
        return [int(size) for size in sizes.split(",")] if sizes else [MultipleOf(16)]

    @classmethod
    def supports_sliding_window(cls):
        return True

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


@dataclass
class Metadata:
    requests: list  # (first token of the batch, tokens, length with what is cached)
    block_table: torch.Tensor


class Builder(AttentionMetadataBuilder):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        starts = common.query_start_loc.tolist()
        lengths = common.seq_lens.tolist()
        return Metadata([(starts[i], starts[i + 1] - starts[i], lengths[i])
                         for i in range(common.num_reqs)], common.block_table_tensor)


class Impl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                 kv_cache_dtype, logits_soft_cap=None, attn_type="decoder",
                 kv_sharing_target_layer_name=None, sinks=None):
        if alibi_slopes is not None or logits_soft_cap or sinks is not None or \
                attn_type != "decoder":
            raise NotImplementedError("plain causal attention only")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.window = float(scale), sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        there = slot_mapping >= 0
        slots = slot_mapping[there]
        rows = torch.cat((key, value), -1)[:slot_mapping.shape[0]][there]
        size = kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = rows.to(kv_cache.dtype)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        if attn_metadata is None:  # a run to measure memory
            return output.fill_(0)
        size = kv_cache.shape[2]
        for i, (start, n, length) in enumerate(attn_metadata.requests):
            if not n:
                continue
            oldest = length - n - self.window + 1 if self.window else 0
            first = max(oldest, 0) // size  # blocks before it may have been given up
            blocks = attn_metadata.block_table[i, first:-(-length // size)].long()
            rows = kv_cache[blocks].transpose(0, 1).flatten(1, 2)  # heads, tokens, K and V
            rows = rows[:, :length - first * size]
            k, v = rows.split(self.head_size, -1)
            at = torch.arange(length - n, length)[:, None]
            of = torch.arange(first * size, length)[None]
            seen = of <= at
            if self.window:
                seen &= of > at - self.window
            q = query[start:start + n].view(n, self.num_heads, self.head_size).transpose(0, 1)
            got = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen,
                                                 scale=self.scale, enable_gqa=True)[0]
            output[start:start + n].view(n, self.num_heads, -1).copy_(got.transpose(0, 1))
        return output
