# SPDX-License-Identifier: Apache-2.0
"""What SGLang's CPU engine needs so that it can disaggregate at all, put in by its own
plugins in every process. Its files stay as they are.

- The early send of a cached prefix records a CUDA event; here work is done when the call
  returns, so the event has always happened.
- Its NIXL backend calls all memory VRAM, and both nixls refuse host memory as VRAM.
- HiCache copies between a device and the host by CUDA kernels (KVD_ENGINES_HICACHE=1).

KVD_ENGINES_TOKEN_US is the time to compute a token in a layer, instead of the measured one."""
import importlib
import os


class HostEvent:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    synchronize = wait = record

    def query(self):
        return True


def load():
    import torch
    if not torch.cuda.is_available():
        torch.cuda.Event = HostEvent
    if os.environ.get("KVD_ENGINES_TOKEN_US"):
        token_takes(float(os.environ["KVD_ENGINES_TOKEN_US"]))
    if os.environ.get("KVD_ENGINES_HICACHE"):
        host_copies()
        return
    import nixl._api as api
    if not hasattr(api.nixl_agent, "host_only"):
        api.nixl_agent = host_agent(api.nixl_agent)


def token_takes(us):
    from kvd.stores.choice import Prices

    def ended(prices):
        prices.token_us = us
    Prices.ended = ended


def host(kind):
    return "DRAM" if kind in ("VRAM", "cuda") else kind


def host_agent(base):
    class nixl_agent(base):
        host_only = True

        def register_memory(self, descs, mem_type=None, *args, **kwargs):
            return super().register_memory(descs, host(mem_type), *args, **kwargs)

        def get_xfer_descs(self, descs, mem_type=None, *args, **kwargs):
            return super().get_xfer_descs(descs, host(mem_type), *args, **kwargs)

        def prep_xfer_dlist(self, name, descs, mem_type=None, *args, **kwargs):
            return super().prep_xfer_dlist(name, descs, host(mem_type), *args, **kwargs)
    return nixl_agent


# ---- HiCache: its copies between a device and the host are CUDA kernels -------------------

def by_tokens(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for src, dst in zip(src_layers, dst_layers):
        dst[dst_indices] = src[src_indices]


def to_device(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    page, token = src_indices // page_size, src_indices % page_size
    for src, dst in zip(src_ptrs, dst_ptrs):
        dst[dst_indices] = src[page, layer_id, token]


def to_host(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    page, token = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        dst_ptrs[i // layers][page, i % layers, token] = src[src_indices]


def unpinned(dims, dtype, device, pin_memory, allocator, *args, **kwargs):
    return allocator.allocate(dims, dtype=dtype, device=device)


def host_copies():
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.mem_cache.pool_host.common as common
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    common.ALLOC_MEMORY_FUNCS["cpu"] = unpinned
    for name in ("mha", "mla"):
        module = importlib.import_module("sglang.srt.mem_cache.pool_host." + name)
        module.transfer_kv_direct = by_tokens
        module.transfer_kv_per_layer_direct_pf_lf = to_device
        module.transfer_kv_all_layer_direct_lf_pf = to_host
