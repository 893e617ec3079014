# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM (vllm.general_plugins), which vLLM loads in each of its processes before a
model: names kvd's attention backends for the CPU platform in place of vLLM's. The choice is made
when a model asks for one: vLLM's own, unless the configuration has "route"."""
NAMES = {"CPU_ATTN": "Attention", "CPU_MLA": "Latent", "AMX_MLA": "Latent"}


def load():
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    for name in NAMES:
        member = getattr(AttentionBackendEnum, name, None)
        if current_platform.is_cpu() and member is not None:
            register_backend(member, "%s.%s" % (__name__, name))


def routes(transfer):
    """Whether a KvdStoreConnector of this KVTransferConfig has "route"."""
    return transfer.get_from_extra_config("route", "off") != "off"


def __getattr__(name):
    if name not in NAMES:
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config
    transfer = get_current_vllm_config().kv_transfer_config
    if transfer is not None and transfer.kv_connector == "KvdStoreConnector" and routes(transfer):
        from . import route_cpu
        return getattr(route_cpu, NAMES[name])
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
