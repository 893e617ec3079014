# SPDX-License-Identifier: Apache-2.0
"""What SGLang's CPU engine needs so that it can disaggregate at all, put in by its own
plugins in every process. Its files stay as they are.

- The early send of a cached prefix records a CUDA event; here work is done when the call
  returns, so the event has always happened.
- Its NIXL backend calls all memory VRAM, and both nixls refuse host memory as VRAM."""


class HostEvent:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    synchronize = wait = record

    def query(self):
        return True


def load():
    import torch
    if not torch.cuda.is_available():
        torch.cuda.Event = HostEvent
    import nixl._api as api
    if not hasattr(api.nixl_agent, "host_only"):
        api.nixl_agent = host_agent(api.nixl_agent)


def host(kind):
    return "DRAM" if kind in ("VRAM", "cuda") else kind


def host_agent(base):
    class nixl_agent(base):
        host_only = True

        def register_memory(self, descs, mem_type=None, *args, **kwargs):
            return super().register_memory(descs, host(mem_type), *args, **kwargs)

        def get_xfer_descs(self, descs, mem_type=None, *args, **kwargs):
            return super().get_xfer_descs(descs, host(mem_type), *args, **kwargs)

        def prep_xfer_dlist(self, name, descs, mem_type=None, *args, **kwargs):
            return super().prep_xfer_dlist(name, descs, host(mem_type), *args, **kwargs)
    return nixl_agent
