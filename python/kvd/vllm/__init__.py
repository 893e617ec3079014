# SPDX-License-Identifier: Apache-2.0
"""kvd as KV connectors of vLLM:

    --kv-transfer-config '{"kv_connector": "KvdConnector",
                           "kv_connector_module_path": "kvd.vllm", "kv_role": …}'

KvdConnector hands a request over from prefill to decode; KvdStoreConnector keeps prompts in the
daemon's chunks.

vLLM imports this in each of its processes; nothing of a daemon or a GPU is touched before the
caches are registered."""

TESTED = ("0.32.0",)  # releases of vLLM


def check_release(version):
    if version.split("+")[0] not in TESTED:
        raise RuntimeError(
            "kvd.vllm: vLLM %s is none of the releases that it was tested with: %s. Install one "
            "of these, or use vLLM's NixlConnector on kvd (docs/engines/nixl.md)"
            % (version, ", ".join(TESTED)))


def __getattr__(name):
    if name == "KvdConnector":
        from .connector import KvdConnector
        return KvdConnector
    if name == "KvdStoreConnector":
        from .store import KvdStoreConnector
        return KvdStoreConnector
    raise AttributeError(name)
