# SPDX-License-Identifier: Apache-2.0
"""Layouts in an engine's own terms, made and checked by kvd's plan library.

    layout = (kvd.Shapes(tp_size=2, tp_rank=1)
              .sglang_mha("kv", page_size=16, pages=4096, layers=32, kv_heads=8, head_bytes=256)
              .sglang_aux("aux", slots=128, hidden_size=4096).layout())

The rules of layouts are the daemon's: the same code checks them there."""
from . import _check, _kvd
from .layout import Layout

PACKED, HND, NHD, MLA = range(4)  # packings of vLLM's blocks
MAMBA1, MAMBA2, GDN = range(3)  # kinds of vLLM's state-space models


def _u32(name, numbers):
    """A count means 0, 1, …"""
    return _check.u32s(name, _check.numbers(name, numbers))


def _checked(low=0, **numbers):
    """Numbers of 32 bits, except numbers of bytes."""
    for name, value in numbers.items():
        wide = name in ("nbytes", "page_len", "unit_bytes", "block_len")
        _check.integer(name, value, low, (1 << 63) - 1 if wide else _check.U32)


class Shapes:
    """Collects shapes; layout() makes a Layout of them. Each call adds a view; SGLang's also add
    their buffers, vLLM's use buffers that buffer() names."""

    def __init__(self, tp_size=1, tp_rank=0, rank=None):
        self._tp = (_check.integer("tp_size", tp_size, 1, _check.U32),
                    _check.integer("tp_rank", tp_rank, 0, _check.U32))
        self._rank = self._tp[1] if rank is None else \
            _check.integer("rank", rank, 0, _check.U32)
        self._steps, self._buffers = [], 0

    def _add(self, *step):
        _check.instance("view", step[1] if step[0] != "buffer" else "", str, "a str")
        try:
            _kvd.shapes(self._rank, tuple(self._steps) + (step,))
        except OverflowError as error:
            raise ValueError("%s: %s" % (step[0], error)) from error
        self._steps.append(step)
        return self

    def buffer(self, nbytes):
        """Add a piece of registered memory. -> its index"""
        if any(step[0] != "buffer" and step[0].startswith("sglang") for step in self._steps):
            raise ValueError("buffer() is for vLLM's shapes; SGLang's add their own")
        _checked(1, nbytes=nbytes)
        self._add("buffer", nbytes)
        self._buffers += 1
        return self._buffers - 1

    # ---- SGLang ----

    def sglang_mha(self, view="kv", *, page_size, pages, layers, kv_heads, head_bytes):
        """K of all layers, then V: two buffers per layer of slot rows [slot][head][dim].
        layers: a number, or kv_layer_ids; kv_heads: of the whole model."""
        _checked(page_size=page_size, pages=pages, kv_heads=kv_heads, head_bytes=head_bytes)
        return self._add("sglang_mha", view, page_size, pages, _u32("layers", layers),
                         kv_heads, *self._tp, head_bytes)

    def sglang_mla(self, view="kv", *, page_size, pages, layers, latent_bytes):
        """One latent per token, on every rank; also swa and c128. A page of dsa's index has all
        values before all scales: it is a state (sglang_state), one slot per page."""
        _checked(page_size=page_size, pages=pages, latent_bytes=latent_bytes)
        return self._add("sglang_mla", view, page_size, pages, _u32("layers", layers), 1,
                         *self._tp, latent_bytes)

    def sglang_state(self, view, *, slots, layers, full_dim, unit_bytes, groups=(), outer=1):
        """A state tensor with one slot per request (conv or temporal); groups: parts of the
        sharded dimension that are sharded separately."""
        _checked(slots=slots, full_dim=full_dim, unit_bytes=unit_bytes, outer=outer)
        return self._add("sglang_state", view, slots, _u32("layers", layers), full_dim,
                         _check.u32s("groups", tuple(groups)), unit_bytes, outer, *self._tp)

    def sglang_aux(self, view="aux", *, slots, hidden_size=0, hidden_elem_bytes=2,
                   top_logprobs=128, sampling_mask=0, dsa_dim=0):
        """MetadataBuffers, in the order of aux_data_ptrs."""
        _checked(slots=slots, hidden_size=hidden_size, hidden_elem_bytes=hidden_elem_bytes,
                 top_logprobs=top_logprobs, sampling_mask=sampling_mask, dsa_dim=dsa_dim)
        return self._add("sglang_aux", view, slots, hidden_size, hidden_elem_bytes,
                         top_logprobs, sampling_mask, dsa_dim)

    # ---- vLLM ----

    def vllm_attention(self, view="kv", *, block_size, blocks, layers, buffers, kv_heads,
                       head_bytes, packing=HND, block_len=0):
        """buffers: one per layer, by buffer(); block_len: bytes from block to block, 0: no
        padding."""
        _checked(block_size=block_size, blocks=blocks, kv_heads=kv_heads,
                 head_bytes=head_bytes, packing=packing, block_len=block_len)
        return self._add("vllm_attention", view, block_size, blocks, _u32("layers", layers),
                         _u32("buffers", buffers), block_len, kv_heads, head_bytes, packing,
                         *self._tp)

    def vllm_ssm(self, view, *, kind, pages, page_len, layers, buffers, conv_dim, conv_rows,
                 conv_elem, temporal, ssm_elem):
        """Conv and temporal state in one page per request; dimensions of the whole model."""
        _checked(kind=kind, pages=pages, page_len=page_len, conv_dim=conv_dim,
                 conv_rows=conv_rows, conv_elem=conv_elem, ssm_elem=ssm_elem)
        temporal = tuple(_check.numbers("temporal", tuple(temporal))) + (1, 1)
        temporal = temporal[:3]
        return self._add("vllm_ssm", view, kind, pages, page_len, _u32("layers", layers),
                         _u32("buffers", buffers), conv_dim, conv_rows, conv_elem, temporal,
                         ssm_elem, *self._tp)

    # ---- the end ----

    def text(self):
        """The JSON text that the daemon takes."""
        return _kvd.shapes(self._rank, tuple(self._steps))

    def layout(self):
        """A Layout; further views may be added to it."""
        return Layout.parse(self.text())
