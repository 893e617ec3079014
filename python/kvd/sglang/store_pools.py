# SPDX-License-Identifier: Apache-2.0
"""SGLang's host pools (HiCache) as pools of kvd: one view, pages of page_size tokens. No module
of SGLang is imported here.

SGLang's layout        order of a token's heads of one layer
layer_first            [K or V][layer][token][head]
page_first             [K or V][token][layer][head]
page_first_direct      [K or V][page][layer][token][head]
page_head              [K or V][page][head][token][layer]
page_unified           [page][group of heads][layer][K or V][token][head]

Models whose K and V have different widths have two such tensors; MLA has one, without K or V and
heads. Layers have the model's numbers, heads are counted over all ranks, so engines with another
layout or number of ranks share the chunks. Drafts that SGLang packs after the model's layers are
layers from DRAFT on."""
from collections import namedtuple

from .. import shards
from ..layout import Layout, format_of

DRAFT = 1 << 16
VIEW = "kv"
KINDS = {"MHATokenToKVPoolHost": "heads", "AsymmetricMHATokenToKVPoolHost": "heads",
         "MLATokenToKVPoolHost": "latent", "DSAIndexerPoolHost": "index"}
OTHERS = "attention, sliding windows, MLA and its index"

Ranks = namedtuple("Ranks", "size rank number")
Ranks.__doc__ = "Ranks of attention; number: this rank's among those of all stages."

Made = namedtuple("Made", "layout parts page_size drafts")
Made.__doc__ = """parts: the memory of each buffer, (address, bytes, fd or None, object to keep
alive); drafts: layers of a draft model's."""


def refuse(words, *args):
    raise ValueError("kvd.sglang: " + words % args)


def kind_of(pool):
    """Exactly this class: a derived one may store its pages elsewhere."""
    kind = KINDS.get(type(pool).__name__)
    if kind is None:
        refuse("host pool %s is not supported by the store, only pools of %s: drop "
               "--hicache-storage-backend for this model", type(pool).__name__, OTHERS)
    for name, remedy in (("_is_dummy", "a pool without memory"),
                         ("_layer_shard_enabled", "a pool with layers split over ranks")):
        if getattr(pool, name, False):
            refuse("%s is not supported by the store: drop --hicache-storage-backend", remedy)
    if getattr(pool, "dcp_size", 1) > 1:
        refuse("decode context parallelism is not supported by the store; --dcp-size 1")
    return kind


def strides(layout, pages, layers, page, heads, row, groups=1):
    """(bytes of a page, of a token, of a head, of a layer) of one tensor, row bytes per head."""
    token = heads * row
    if layout == "layer_first":
        return page * token, token, row, pages * page * token
    if layout == "page_first":
        return page * layers * token, layers * token, row, token
    if layout == "page_first_direct":
        return layers * page * token, token, row, page * token
    if layout == "page_head":
        return heads * page * layers * row, layers * row, page * layers * row, row
    if layout == "page_unified":
        each = heads // groups
        if groups > 1 and each > 1:
            refuse("page_unified with groups of %d heads is not supported by the store; "
                   "--hicache-storage-head-group 1, or --hicache-mem-layout page_first", each)
        cell = 2 * page * each * row
        return groups * layers * cell, each * row, layers * cell if groups > 1 else row, cell
    return refuse("--hicache-mem-layout %s is not supported by the store; page_first", layout)


def pages_of(pool):
    """Number of pages, all of them complete."""
    pages, rest = divmod(pool.size, pool.page_size)
    if rest or not pages:
        refuse("host pool of %d tokens is not a multiple of its page, %d tokens", pool.size,
               pool.page_size)
    return pages


def memory_of(tensor, fds):
    """The memory of a tensor that fills a mapping. fds: of the allocator, by bytes."""
    nbytes = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous():
        refuse("host pool is not contiguous")
    return tensor.data_ptr(), nbytes, fds.get(nbytes), tensor


def fds_of(pool, tensors):
    """{bytes: fd} of memory of SGLang's allocator `shm`, which keeps them in order."""
    fds = list(getattr(getattr(pool, "allocator", None), "fds", None) or [])
    sizes = [t.numel() * t.element_size() for t in tensors]
    if len(fds) != len(sizes) or len(set(sizes)) != len(sizes):
        return {}
    return dict(zip(sizes, fds))


def layer_of(pool, i):
    target = getattr(pool, "target_layer_num", pool.layer_num)
    if i >= target:
        return DRAFT + i - target
    # some layers have no index, a hybrid model's MLA neither
    own = getattr(pool, "_live_target_layers", None) or \
        getattr(pool, "_target_layer_indices", None)
    return pool.start_layer + (own[i] if own else i)


def heads_of(pool, ranks, total):
    """(first, units, total) of this rank. total: of the model, None: unknown, then each rank has
    others."""
    units = pool.head_num
    if total and units == shards.units(total, ranks.size, ranks.rank)[1]:
        return shards.units(total, ranks.size, ranks.rank) + (total,)
    return ranks.rank * units, units, ranks.size * units


def add_fields(layout, pool, tensor_of, names, unit, first, total, row, kind):
    """tensor_of: {name: (buffer, offset)}"""
    groups = getattr(pool, "head_group_num", 1) if pool.layout == "page_unified" else 1
    for name in names:
        buffer, base = tensor_of[name]
        page, token, head, layer = strides(pool.layout, pages_of(pool), pool.layer_num,
                                           pool.page_size, unit, row[name], groups)
        for i in range(pool.layer_num):
            layout.field(VIEW, layer_of(pool, i), name, buffer=buffer,
                         offset=base + i * layer, page_stride=page, token_stride=token,
                         unit_stride=head, unit_bytes=row[name], units=unit,
                         first_unit=first, total_units=total, format=kind)


def build_heads(layout, pool, ranks, total):
    """K and V of all layers; the memory of the buffers."""
    item = pool.dtype.itemsize
    first, units, total = heads_of(pool, ranks, total)
    row = {"k": pool.head_dim * item, "v": pool.v_head_dim * item}
    both = pool.kv_buffer
    tensors = list(both) if isinstance(both, (list, tuple)) else [both]
    if len(tensors) == 1 and row["k"] != row["v"]:
        refuse("K and V have %d and %d bytes in one tensor", row["k"], row["v"])
    fds = fds_of(pool, tensors)
    parts = [memory_of(t, fds) for t in tensors]
    buffers = [layout.buffer(part[1]) for part in parts]
    if len(tensors) == 2:
        where = {"k": (buffers[0], 0), "v": (buffers[1], 0)}
    elif pool.layout == "page_unified":
        group = pool.head_num // pool.head_group_num
        where = {"k": (buffers[0], 0), "v": (buffers[0], pool.page_size * group * row["k"])}
    else:
        where = {"k": (buffers[0], 0), "v": (buffers[0], parts[0][1] // 2)}
    add_fields(layout, pool, where, "kv", units, first, total, row, format_of(pool.dtype))
    wanted = pool.size * pool.layer_num * units * (row["k"] + row["v"])
    return check_bytes(pool, parts, wanted)


def check_bytes(pool, parts, wanted):
    """Checks the computed size against SGLang's allocation."""
    have = sum(part[1] for part in parts)
    if have != wanted:
        refuse("host pool %s has %d bytes instead of %d", type(pool).__name__, have, wanted)
    return parts


def build_latent(layout, pool):
    """Equal on all ranks."""
    row = pool.kv_cache_dim * pool.dtype.itemsize
    if pool.layout not in ("layer_first", "page_first", "page_first_direct", "page_unified"):
        refuse("--hicache-mem-layout %s is not supported by the store for MLA; page_first",
               pool.layout)
    parts = [memory_of(pool.kv_buffer, fds_of(pool, [pool.kv_buffer]))]
    buffer = layout.buffer(parts[0][1])
    kind = "page_first_direct" if pool.layout == "page_unified" else pool.layout  # the same
    page, token, _, layer = strides(kind, pages_of(pool), pool.layer_num, pool.page_size, 1,
                                    row)
    for i in range(pool.layer_num):
        layout.field(VIEW, layer_of(pool, i), "latent", buffer=buffer, offset=i * layer,
                     page_stride=page, token_stride=token, unit_stride=row, unit_bytes=row,
                     format=format_of(pool.dtype))
    return check_bytes(pool, parts, pool.size * pool.layer_num * row)


def build_index(layout, pool):
    """Keys and scales of a page together, moved as one unit."""
    stride, tensor = pool.indexer_page_stride_size, pool.index_k_with_scale_buffer
    token, rest = divmod(stride, pool.page_size)
    if rest:
        refuse("an index page of %d bytes cannot hold %d tokens", stride, pool.page_size)
    parts = [memory_of(tensor, fds_of(pool, [tensor]))]
    buffer = layout.buffer(parts[0][1])
    rows = pool.indexer_page_num
    by_layer = pool.layout == "layer_first"
    if not by_layer and pool.layout not in ("page_first", "page_first_direct"):
        refuse("--hicache-mem-layout %s is not supported by the store for an index; page_first",
               pool.layout)
    for i in range(pool.layer_num):
        layout.field(VIEW, layer_of(pool, i), "index", buffer=buffer,
                     offset=i * stride * (rows if by_layer else 1),
                     page_stride=stride * (1 if by_layer else pool.layer_num),
                     token_stride=token, unit_stride=token, unit_bytes=token, format="index")
    return check_bytes(pool, parts, rows * pool.layer_num * stride)


def build(pool, ranks, heads=None):
    """Made from a host pool. heads: of the model, if known."""
    kind = kind_of(pool)
    layout = Layout(ranks.number)
    layout.view(VIEW, pool.page_size, pages_of(pool))
    if kind == "heads":
        parts = build_heads(layout, pool, ranks, heads)
    else:
        parts = (build_latent if kind == "latent" else build_index)(layout, pool)
    drafts = pool.layer_num - getattr(pool, "target_layer_num", pool.layer_num)
    return Made(layout, parts, pool.page_size, drafts)
