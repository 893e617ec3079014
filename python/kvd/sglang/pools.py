# SPDX-License-Identifier: Apache-2.0
"""SGLang's buffers (KVArgs) as a pool of kvd. Pure functions, without engine or daemon.

view        pages             contents
kv          page_size tokens  K and V of each layer, or the latent of MLA
draft       page_size tokens  the draft model's, with the same page numbers
swa<i>      page_size tokens  state component i, if it is a cache of heads
state<i>    one entry         any other state component: entries by number
aux         one record        the row of MetadataBuffers (slots.py)

Layers have the model's numbers, so a pipeline stage holds some of them. Heads are split by the
model's number of heads, which decode learns from prefill; a state that cannot be split is whole
on each rank, and refused if the numbers of ranks differ. State is paired by its position in
SGLang's lists, as SGLang does: entry k of a list is token base + k."""
from collections import namedtuple

from .. import records, shards
from ..layout import Layout

GROUP = 4096  # layer number of the k-th tensor of a layer: k * GROUP + layer
SUPPORTED = ("swa", "mamba", "dsa", "qsa_pending", "qsa_compressed", "block_scale",
             "block_scale_swa")

Ranks = namedtuple("Ranks", "size rank state_size state_rank pool_rank")
Ranks.__doc__ = "Ranks of attention, of linear attention's state, and of the pool."


class Buffers:
    """The layout of a rank, and the memory of its buffers."""

    def __init__(self, pool_rank):
        self.layout, self.parts = Layout(pool_rank), []
        self.states = []  # view of each component, None: it has no tensor

    def add(self, address, nbytes):
        self.parts.append((address, nbytes))
        return self.layout.buffer(nbytes)


def refuse(words, *args):
    raise ValueError("kvd.sglang: " + words % args)


def pages_of(lens, item_lens):
    """Number of pages in all buffers."""
    for nbytes, item in zip(lens, item_lens):
        if item <= 0 or nbytes < item:
            refuse("a buffer of %d bytes is not a multiple of its page, %d bytes", nbytes, item)
    return min(n // item for n, item in zip(lens, item_lens))


def cut(item_len, page_size, heads, ranks, mla):
    """(unit_bytes, units, first_unit, total_units) of a token's bytes in a buffer."""
    token, rest = divmod(item_len, page_size)
    if rest:
        refuse("a page of %d bytes cannot hold %d tokens", item_len, page_size)
    if mla or heads is None:
        return token, 1, 0, 1
    first, units = shards.units(heads, ranks.size, ranks.rank)
    if token % units:
        refuse("%d bytes per token cannot hold the %d of %d heads of rank %d of %d: are the "
               "models the same?", token, units, heads, ranks.rank, ranks.size)
    return token // units, units, first, heads


def layer_numbers(count, ids, start, groups):
    """Pages of the first of `groups` equal parts of the entries."""
    n = count // groups
    if not ids:
        return list(range(start, start + n))
    if len(ids) != count or any(ids[g * n:(g + 1) * n] != ids[:n] for g in range(groups)):
        refuse("kv_layer_ids %s do not name each of %d buffers", list(ids)[:8], count)
    return list(ids[:n])


def heads_view(made, name, ptrs, lens, item_lens, layers, page_size, heads, ranks, mla,
               kind=None):
    """K of all layers, then V; or one buffer per layer. kind: format of the bytes."""
    layout = made.layout
    layout.view(name, page_size, pages_of(lens, item_lens))
    for i, (ptr, nbytes, item) in enumerate(zip(ptrs, lens, item_lens)):
        unit, units, first, total = cut(item, page_size, heads, ranks, mla)
        group, at = divmod(i, len(layers))
        field = "latent" if len(ptrs) == len(layers) else ("k", "v")[group]
        layout.field(name, layers[at], field, buffer=made.add(ptr, nbytes), page_stride=item,
                     token_stride=unit * units, unit_stride=unit, unit_bytes=unit,
                     units=units, first_unit=first, total_units=total, format=kind)


def state_fields(item_len, dim, outer, groups, ranks):
    """[(name, offset, unit_bytes, units, first, total)] of one entry of a state tensor. dim:
    this rank's part of the sharded dimension; 0: the entry is whole on each rank."""
    if not dim:
        return [("s0.0", 0, item_len, 1, 0, 1)]
    outer = outer or 1
    unit, rest = divmod(item_len, dim * outer)
    if rest:
        refuse("a state entry of %d bytes has no %d x %d columns", item_len, outer, dim)
    total = dim * ranks.state_size
    parts = list(groups) if groups and sum(groups) == total else [total]
    fields, at = [], 0
    for row in range(outer):
        for g, whole in enumerate(parts):
            first, units = shards.units(whole, ranks.state_size, ranks.state_rank)
            fields.append(("s%d.%d" % (row, g), at, unit, units, first, whole))
            at += unit * units
    if at != item_len:
        refuse("state groups %s make %d bytes of an entry of %d", parts, at, item_len)
    return fields


def state_layers(count, ids, pp_size, kind):
    """A number for each tensor, equal on all pipeline stages."""
    if not ids:
        if pp_size > 1:
            refuse("state %s with pipeline parallelism: SGLang does not report which layers a "
                   "stage has; use --pp-size 1 on prefill", kind)
        return list(range(count))
    seen, numbers = {}, []
    for layer in ids:
        seen[layer] = seen.get(layer, -1) + 1
        numbers.append(seen[layer] * GROUP + layer)
    if len(numbers) != count:
        refuse("state %s: %d layer ids for %d tensors", kind, len(numbers), count)
    return numbers


def state_view(made, args, i, heads, ranks, mla, pp_size, cache=None):
    """State component i of KVArgs."""
    kind = kind_of(args.state_types[i])
    ptrs, lens, items = (args.state_data_ptrs[i], args.state_data_lens[i],
                         args.state_item_lens[i])
    if not ptrs:
        made.states.append(None)
        return
    if swa_heads(args, i, heads, mla) and pp_size == 1:
        heads_view(made, "swa%d" % i, ptrs, lens, items, list(range(len(ptrs) // 2)),
                   args.page_size, heads, ranks, False, cache)
        made.states.append("swa%d" % i)
        return
    name = "state%d" % i
    made.states.append(name)
    made.layout.view(name, 1, pages_of(lens, items))
    dims = _of(args, "state_dim_per_tensor", i) if kind == "mamba" else []
    outer = _of(args, "state_slice_outer_counts", i)
    groups = _of(args, "state_conv_shard_groups", i)
    numbers = state_layers(len(ptrs), _of(args, "state_layer_ids", i), pp_size, kind)
    tensors = zip(numbers, ptrs, lens, items)
    for j, (number, ptr, nbytes, item) in enumerate(tensors):
        buffer = made.add(ptr, nbytes)
        for field, at, unit, units, first, total in state_fields(
                item, _at(dims, j), _at(outer, j), _at(groups, j), ranks):
            made.layout.field(name, number, field, buffer=buffer, offset=at, page_stride=item,
                              token_stride=item, unit_stride=unit, unit_bytes=unit,
                              units=units, first_unit=first, total_units=total)


def kind_of(state_type):
    return getattr(state_type, "value", state_type)


def _of(args, name, i):
    lists = getattr(args, name, None) or []
    return lists[i] if i < len(lists) and lists[i] else []


def _at(values, j):
    return values[j] if j < len(values) else None


def swa_heads(args, i, heads, mla):
    """Whether component i is a cache of heads, which can be split."""
    return kind_of(args.state_types[i]) == "swa" and not mla and heads is not None and \
        getattr(args, "swa_kv_cache_layout", None) == "nhd" and \
        len(args.state_data_ptrs[i]) % 2 == 0 and \
        len(set(args.state_item_lens[i])) == 1 and \
        args.state_item_lens[i][0] % args.page_size == 0


def uncut(args, heads, mla):
    """Names of states that are not split, so both sides need equal numbers of ranks."""
    names = []
    for i, state in enumerate(args.state_types):
        kind = kind_of(state)
        if kind == "mamba" and _of(args, "state_dim_per_tensor", i):
            continue
        if mla and kind in ("dsa", "mamba") or swa_heads(args, i, heads, mla):
            continue
        names.append(kind)
    return names


def check(args, mla):
    """Refuse caches without a view."""
    if getattr(args, "mla_compression_ratios", None):
        refuse("compressed MLA (DeepSeek V4) is not supported: use SGLang's backend nixl on kvd")
    if getattr(args, "kv_layout", None) not in (None, "nhd"):
        refuse("a cache of layout %s is not rows of tokens: use SGLang's backend nixl on kvd",
               args.kv_layout)
    for state in args.state_types:
        if kind_of(state) not in SUPPORTED:
            refuse("state %s is not supported, only %s: use SGLang's backend nixl on kvd",
                   kind_of(state), ", ".join(SUPPORTED))
    own = len(args.kv_data_ptrs) - getattr(args, "num_draft_entries", 0)
    if not mla and own % 2:
        refuse("%d buffers are not pairs of K and V: unified memory is not supported "
               "(--enable-unified-memory)", own)


def build(args, ranks, *, heads, mla, start_layer=0, pp_size=1, slots=None, cache=None):
    """Buffers of KVArgs. heads: of the model's cache, None for MLA; slots: (count, bytes) of
    the aux records, whose buffer is the last one and has no address; cache: format of the
    target's cache (a draft's may differ)."""
    check(args, mla)
    made = Buffers(ranks.pool_rank)
    draft = getattr(args, "num_draft_entries", 0)
    own = len(args.kv_data_ptrs) - draft
    ids = list(getattr(args, "kv_layer_ids", None) or [])[:own]
    if own:
        layers = layer_numbers(own, ids, start_layer, 1 if mla else 2)
        heads_view(made, "kv", args.kv_data_ptrs[:own], args.kv_data_lens[:own],
                   args.kv_item_lens[:own], layers, args.page_size, heads, ranks, mla, cache)
    if draft:
        heads_view(made, "draft", args.kv_data_ptrs[own:], args.kv_data_lens[own:],
                   args.kv_item_lens[own:], list(range(draft)), args.page_size, heads, ranks,
                   mla)
    for i in range(len(args.state_types)):
        state_view(made, args, i, heads, ranks, mla, pp_size, cache)
    if slots:
        records.views_add(made.layout, made.add(None, slots[0] * slots[1]), *slots)
    return made

