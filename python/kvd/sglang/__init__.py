# SPDX-License-Identifier: Apache-2.0
"""kvd as a transfer backend of SGLang: --disaggregation-transfer-backend kvd; and as the storage
of its HiCache (store.py), which SGLang imports by its module name.

SGLang finds load() by the entry point group sglang.srt.plugins and calls it in each of its
processes, before the command line is parsed. No module of SGLang is imported before that."""
import math
import os

NAME = "kvd"
STORE = "kvd.sglang.store"


def load():
    """Register the backend. An SGLang that it does not support is reported when it is chosen:
    SGLang only logs the exceptions of a plugin."""
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_disagg_transfer_backend_choices
    add_disagg_transfer_backend_choices([NAME])
    add_member(TransferBackend, NAME)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", kv_class,
                          HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.storage.mmap.alloc_shm", host_memory,
                          HookType.AROUND)


def add_member(enum, value):
    """Add a member to a closed Enum."""
    if value in enum._value2member_map_:
        return
    member = object.__new__(enum)
    member._name_, member._value_ = value.upper(), value
    enum._member_map_[member._name_] = member
    enum._member_names_.append(member._name_)
    enum._value2member_map_[value] = member
    type.__setattr__(enum, member._name_, member)


def check(part):
    """Refuse an SGLang without the interfaces that a part of this package uses (needs.py)."""
    import sglang

    from .. import fit
    from .needs import PARTS
    fit.check(PARTS[part], sglang.__version__)


def host_memory(original, dims, dtype):
    """SGLang's alloc_shm() for the store: its own memory prevents the seals without which a
    daemon maps no memory."""
    from sglang.srt.runtime_context import get_memory
    if STORE not in (get_memory().hicache_storage_backend_extra_config or ""):
        return original(dims, dtype)
    import torch
    from ..memory import Memory
    nbytes = math.prod(dims) * dtype.itemsize
    memory = Memory(nbytes, "kvd-hicache")
    tensor = torch.from_numpy(memory.array()[:nbytes]).view(dtype).reshape(dims)
    return tensor, os.dup(memory.fd), None


def kv_class(original, transfer_backend, class_type):
    """SGLang's get_kv_class() for this backend."""
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    check("transfer")
    from . import bootstrap, conn
    return {"manager": conn.KVManager, "sender": conn.KVSender,
            "receiver": conn.KVReceiver,
            "bootstrap_server": bootstrap.BootstrapServer}[class_type.value]
