# SPDX-License-Identifier: Apache-2.0
"""vLLM's sleep mode frees the cache's physical memory and maps other memory at the same addresses.
That memory is of cuMemCreate, without a handle by which a daemon could map it, so kvd cannot
follow: engines with sleep mode are refused. From release 0.33 on vLLM queries a connector, and
assumes that one without an answer supports it; before that it does not query."""


class Awake:
    """The answer of both connectors."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        return False

    def unregister_kv_caches(self):
        """Before the memory changes. A vLLM that was refused does not reach this: continuing would
        move memory that is no longer the cache's."""
        raise RuntimeError("kvd.vllm: the memory of the cache cannot be replaced while kvd moves "
                           "it; start without sleep mode")

    def restore_kv_caches(self):
        """Nothing was unregistered."""


def refusals(config):
    """(refused, what, remedy)"""
    model = config.model_config
    yield model.enable_sleep_mode, "sleep mode (its memory of cuMemCreate has no handle to " \
        "share)", "drop --enable-sleep-mode"
    yield getattr(model, "enable_cumem_allocator", False), "the cuMem allocator (its memory has " \
        "no handle to share)", "drop --enable-cumem-allocator"
