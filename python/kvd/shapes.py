# SPDX-License-Identifier: Apache-2.0
"""Layouts from an engine's own terms, made and checked by kvd's plan library.

    layout = (kvd.Shapes(tp_size=2, tp_rank=1)
              .sglang_mha("kv", page_size=16, pages=4096, layers=32, kv_heads=8, head_bytes=256)
              .sglang_aux("aux", slots=128, hidden_size=4096).layout())

What a layout is, and what it may not be, is the daemon's: the same code checks it there."""
import json
from array import array

from . import _kvd
from .layout import Layout

PACKED, HND, NHD, MLA = range(4)  # packings of vLLM's blocks
MAMBA1, MAMBA2, GDN = range(3)  # kinds of vLLM's state-space models


def _u32(numbers):
    """A count means 0, 1, …"""
    if isinstance(numbers, int):
        numbers = range(numbers)
    try:
        packed = array("I", numbers)
    except (OverflowError, TypeError) as error:
        raise ValueError("numbers of 32 bits are wanted: %s" % error) from error
    if packed.itemsize != 4:
        raise ValueError("no type of 32 bits")
    return packed.tobytes()


class Shapes:
    """Collects shapes; layout() makes a Layout of them. Each adds a view; SGLang's add
    their buffers, vLLM's lie in buffers that buffer() names."""

    def __init__(self, tp_size=1, tp_rank=0, rank=None):
        self._tp = int(tp_size), int(tp_rank)
        self._rank = self._tp[1] if rank is None else int(rank)
        self._steps, self._buffers = [], 0

    def _add(self, *step):
        try:
            _kvd.shapes(self._rank, tuple(self._steps) + (step,))
        except OverflowError as error:
            raise ValueError("%s: %s" % (step[0], error)) from error
        self._steps.append(step)
        return self

    def buffer(self, nbytes):
        """A piece of registered memory; its index."""
        if any(step[0] != "buffer" and step[0].startswith("sglang") for step in self._steps):
            raise ValueError("the shapes of SGLang number their buffers themselves")
        self._add("buffer", nbytes)
        self._buffers += 1
        return self._buffers - 1

    # ---- SGLang ----

    def sglang_mha(self, view="kv", *, page_size, pages, layers, kv_heads, head_bytes):
        """K of all layers, then V: two buffers a layer of slot rows [slot][head][dim].
        layers: a number, or kv_layer_ids; kv_heads: of the model."""
        return self._add("sglang_mha", view, page_size, pages, _u32(layers), kv_heads,
                         *self._tp, head_bytes)

    def sglang_mla(self, view="kv", *, page_size, pages, layers, latent_bytes):
        """One latent a token, held by every rank; also swa, dsa and c128."""
        return self._add("sglang_mla", view, page_size, pages, _u32(layers), 1, *self._tp,
                         latent_bytes)

    def sglang_state(self, view, *, slots, layers, full_dim, unit_bytes, groups=(), outer=1):
        """A state tensor of one slot a request (conv or temporal); groups: what of the
        sharded dimension is sharded by itself."""
        return self._add("sglang_state", view, slots, _u32(layers), full_dim, _u32(groups),
                         unit_bytes, outer, *self._tp)

    def sglang_aux(self, view="aux", *, slots, hidden_size=0, hidden_elem_bytes=2,
                   top_logprobs=128, sampling_mask=0, dsa_dim=0):
        """MetadataBuffers, in the order of aux_data_ptrs."""
        return self._add("sglang_aux", view, slots, hidden_size, hidden_elem_bytes,
                         top_logprobs, sampling_mask, dsa_dim)

    # ---- vLLM ----

    def vllm_attention(self, view="kv", *, block_size, blocks, layers, buffers, kv_heads,
                       head_bytes, packing=HND, block_len=0):
        """buffers: of each layer, by buffer(); block_len: bytes from block to block, 0:
        without padding."""
        return self._add("vllm_attention", view, block_size, blocks, _u32(layers),
                         _u32(buffers), block_len, kv_heads, head_bytes, packing, *self._tp)

    def vllm_ssm(self, view, *, kind, pages, page_len, layers, buffers, conv_dim, conv_rows,
                 conv_elem, temporal, ssm_elem):
        """Conv and temporal state in one page a request; dimensions of the whole model."""
        temporal = (tuple(temporal) + (1, 1))[:3]
        return self._add("vllm_ssm", view, kind, pages, page_len, _u32(layers),
                         _u32(buffers), conv_dim, conv_rows, conv_elem, temporal, ssm_elem,
                         *self._tp)

    # ---- the end ----

    def text(self):
        return _kvd.shapes(self._rank, tuple(self._steps))

    def layout(self):
        """A Layout, to which other views may be added by hand."""
        return Layout.parse(self.text())
