# SPDX-License-Identifier: Apache-2.0
from . import _api as _api, _bindings as _bindings, _utils as _utils, logging as logging
from ._bindings import *
from ._utils import (
    ba_buf as ba_buf, free_passthru as free_passthru, malloc_passthru as malloc_passthru,
    verify_transfer as verify_transfer)
from .logging import (
    LOGGING_CONFIG as LOGGING_CONFIG, get_logger as get_logger,
    set_log_level_by_env as set_log_level_by_env, setup_logging as setup_logging)
from ._api import (  # type: ignore[assignment]
    nixl_agent as nixl_agent, nixl_agent_config as nixl_agent_config,
    nixl_backend_handle as nixl_backend_handle,
    nixl_prepped_dlist_handle as nixl_prepped_dlist_handle,
    nixl_thread_sync_t as nixl_thread_sync_t, nixl_xfer_handle as nixl_xfer_handle)
