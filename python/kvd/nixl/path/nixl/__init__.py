# SPDX-License-Identifier: Apache-2.0
"""NIXL's Python API, served by the kvd daemon of this node. As in NIXL's own package, the
exports of its modules are available here, too: nixl_thread_sync_t is the agent's."""
from . import _api, _bindings, _utils, logging
from ._bindings import *  # noqa: F401,F403
from ._utils import ba_buf, free_passthru, malloc_passthru, verify_transfer
from .logging import LOGGING_CONFIG, get_logger, set_log_level_by_env, setup_logging
from ._api import (nixl_agent, nixl_agent_config,  # noqa: I100 (after _bindings)
                   nixl_backend_handle, nixl_prepped_dlist_handle, nixl_thread_sync_t,
                   nixl_xfer_handle)

__all__ = _bindings.__all__ + [
    "LOGGING_CONFIG", "_api", "_bindings", "_utils", "ba_buf", "free_passthru", "get_logger",
    "logging", "malloc_passthru", "nixl_agent", "nixl_agent_config", "nixl_backend_handle",
    "nixl_prepped_dlist_handle", "nixl_xfer_handle", "set_log_level_by_env", "setup_logging",
    "verify_transfer"]
