# SPDX-License-Identifier: Apache-2.0
"""Sleep mode of vLLM gives the cache's physical memory back and maps other memory at the same
addresses. That memory is of cuMemCreate, without a handle by which a daemon could map it, so that
kvd cannot follow: engines with it are refused. From release 0.33 on vLLM asks a connector, and
takes one that does not answer for able to; before that it asks nothing."""


class Awake:
    """What both connectors answer."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config):
        return False

    def unregister_kv_caches(self):
        """Before the memory changes. No vLLM that was refused comes here: going on would move
        memory that is not the cache's any more."""
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
