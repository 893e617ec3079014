# SPDX-License-Identifier: Apache-2.0
"""Enums and exceptions of NIXL's binding layer, and the mapping from kvd's errors."""
import enum


class _Enum(enum.IntEnum):
    def __bool__(self):
        return True  # as NIXL's: DRAM, READ and SUCCESS are not "nothing"

    def __str__(self):
        return "%s.%s" % (type(self).__name__, self.name)

    def __repr__(self):
        return "<%s.%s: %d>" % (type(self).__name__, self.name, self.value)


class nixl_mem_t(_Enum):
    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(_Enum):
    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_thread_sync_t(_Enum):
    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_cost_t(_Enum):
    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_status_t(_Enum):
    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


def _exception(name, status):
    def __str__(self):
        return ": ".join([status] + [str(arg) for arg in self.args])
    return type(name, (Exception,), {"__str__": __str__, "__module__": "nixl._bindings",
                                     "__doc__": status})


nixlNotPostedError = _exception("nixlNotPostedError", "NIXL_ERR_NOT_POSTED")
nixlInvalidParamError = _exception("nixlInvalidParamError", "NIXL_ERR_INVALID_PARAM")
nixlBackendError = _exception("nixlBackendError", "NIXL_ERR_BACKEND")
nixlNotFoundError = _exception("nixlNotFoundError", "NIXL_ERR_NOT_FOUND")
nixlMismatchError = _exception("nixlMismatchError", "NIXL_ERR_MISMATCH")
nixlNotAllowedError = _exception("nixlNotAllowedError", "NIXL_ERR_NOT_ALLOWED")
nixlRepostActiveError = _exception("nixlRepostActiveError", "NIXL_ERR_REPOST_ACTIVE")
nixlUnknownError = _exception("nixlUnknownError", "NIXL_ERR_UNKNOWN")
nixlNotSupportedError = _exception("nixlNotSupportedError", "NIXL_ERR_NOT_SUPPORTED")
nixlRemoteDisconnectError = _exception("nixlRemoteDisconnectError",
                                       "NIXL_ERR_REMOTE_DISCONNECT")
nixlCancelledError = _exception("nixlCancelledError", "NIXL_ERR_CANCELED")
nixlNoTelemetryError = _exception("nixlNoTelemetryError", "NIXL_ERR_NO_TELEMETRY")

_BY_CODE = {
    "EINVAL": nixlInvalidParamError, "ETOOBIG": nixlInvalidParamError,
    "ELAYOUT": nixlInvalidParamError, "ENOTFOUND": nixlNotFoundError,
    "EREVOKED": nixlNotFoundError, "ERANGE": nixlNotFoundError,
    "EPERM": nixlNotAllowedError,
    "ECANCELED": nixlCancelledError, "EABORTED": nixlCancelledError,
    # the remote engine, its daemon, or the connection; EBUSY: not connected again yet
    "EBUSY": nixlRemoteDisconnectError,
    "EPEER": nixlRemoteDisconnectError, "ESESSION": nixlRemoteDisconnectError,
    "ERESTART": nixlRemoteDisconnectError, "EAUTH": nixlRemoteDisconnectError,
    "ETRANSPORT": nixlRemoteDisconnectError, "ETIMEOUT": nixlRemoteDisconnectError,
    "ESTALL": nixlRemoteDisconnectError, "EFENCE": nixlRemoteDisconnectError,
    "EVERSION": nixlRemoteDisconnectError,
}


def from_code(code, why=""):
    """The exception for one of kvd's codes; all others are the backend's."""
    text = "%s (kvd: %s)" % (why, code) if why else "kvd: " + code
    return _BY_CODE.get(code, nixlBackendError)(text)


def from_error(error):
    return from_code(error.code, error.message)
