# SPDX-License-Identifier: Apache-2.0
"""NIXL's Python API, served by the kvd daemon of this node."""
from ._api import (DEFAULT_COMM_PORT, nixl_agent, nixl_agent_config, nixl_backend_handle,
                   nixl_prepped_dlist_handle, nixl_thread_sync_t, nixl_xfer_handle)

__all__ = ["DEFAULT_COMM_PORT", "nixl_agent", "nixl_agent_config", "nixl_backend_handle",
           "nixl_prepped_dlist_handle", "nixl_thread_sync_t", "nixl_xfer_handle"]
