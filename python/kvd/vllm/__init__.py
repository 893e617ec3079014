# SPDX-License-Identifier: Apache-2.0
"""kvd as KV connectors of vLLM:

    --kv-transfer-config '{"kv_connector": "KvdConnector",
                           "kv_connector_module_path": "kvd.vllm", "kv_role": …}'

KvdConnector transfers a request from prefill to decode; KvdStoreConnector keeps prompts in the
daemon's chunks. With its option `route`, RouteScheduler is the engine's scheduler, and plugin.py
chooses its attention backend.

vLLM imports this in each of its processes; no daemon or GPU is used before the caches are
registered."""


def check(part):
    """Refuse a vLLM without the interfaces that a part of this package uses (needs.py)."""
    import vllm

    from .. import fit
    from .needs import PARTS
    fit.check(PARTS[part], vllm.__version__)


def __getattr__(name):
    if name == "KvdConnector":
        check("connectors")
        from .connector import KvdConnector
        return KvdConnector
    if name == "KvdStoreConnector":
        check("connectors")
        from .store import KvdStoreConnector
        return KvdStoreConnector
    if name == "RouteScheduler":
        check("route")
        from .route_scheduler import RouteScheduler
        return RouteScheduler
    raise AttributeError(name)
