# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each has the daemon's code ("EBUSY"), the scope of the fault, and whether the
same call may succeed later (retryable)."""


class Error(Exception):
    """A call failed. code: "EBUSY"…; number: its number in kvd.h; scope: op, room, peer,
    session, device or daemon."""

    def __init__(self, message, code="EINTERNAL", number=37, scope="op", retryable=False):
        super().__init__(message)
        self.message, self.code, self.number = message, code, number
        self.scope, self.retryable = scope, retryable

    def __str__(self):
        return "%s: %s" % (self.code, self.message) if self.message else self.code

    def __reduce__(self):
        return (type(self), (self.message, self.code, self.number, self.scope,
                             self.retryable))


class InvalidError(Error, ValueError):
    """An argument is outside its limits."""


class NotFoundError(Error, LookupError):
    """No such object, or no registered memory at that address."""


class StateError(Error):
    """The object's state does not permit the call."""


class BusyError(StateError):
    """In use; retry later."""


class LimitError(Error):
    """A limit is reached, or memory ran out."""


class PermissionDenied(Error):
    """This caller has no permission."""


class MemoryImportError(Error):
    """Memory of this kind cannot be used, or was freed."""


class PeerError(Error):
    """The remote daemon or engine ended, or the connection to it failed."""


class TimeoutError(PeerError):  # noqa: A001 (kvd.TimeoutError)
    """A phase of a room took longer than allowed."""


class AbortedError(Error):
    """Aborted by an engine."""


class CanceledError(AbortedError):
    """Canceled by its owner."""


class ConnectionError(Error):  # noqa: A001 (kvd.ConnectionError)
    """The own daemon cannot be reached, or does not answer."""


class DaemonError(Error):
    """The daemon refused the call."""


_CLASSES = {
    "EINVAL": InvalidError, "EPROTO": InvalidError, "ETOOBIG": InvalidError,
    "ENOCMD": DaemonError, "EPERM": PermissionDenied, "ENOTFOUND": NotFoundError,
    "EEXIST": StateError, "EBUSY": BusyError, "ELIMIT": LimitError, "ENOMEM": LimitError,
    "ESTATE": StateError, "ELAYOUT": InvalidError, "ECOVER": InvalidError,
    "ERANGE": InvalidError, "EDUP": StateError, "ESHORT": StateError,
    "EABORTED": AbortedError, "EPEER": PeerError, "ESESSION": PeerError,
    "ETIMEOUT": TimeoutError, "ESTALL": TimeoutError, "ELEASE": TimeoutError,
    "ETRANSPORT": PeerError, "EREQUIRE": PeerError, "EIMPORT": MemoryImportError,
    "EFAULT": MemoryImportError, "EFENCE": PeerError, "EDRAIN": DaemonError,
    "ERESTART": PeerError, "EVERSION": PeerError, "EAUTH": PermissionDenied,
    "ECANCELED": CanceledError, "EPLAN": PeerError, "EREVOKED": NotFoundError,
    "EGONE": StateError, "ENODAEMON": ConnectionError, "ELOST": ConnectionError,
    "ENOREPLY": ConnectionError, "EFULL": BusyError, "EFORKED": ConnectionError,
    "EDEAD": ConnectionError,
}


_LATER = "the same call later"
_ROOM = "another room; the same peers are possible"
_ELSEWHERE = "another room, from other peers if possible"
#: What to do about errors that are retryable, by code. All others come again.
RETRY = {
    "ELOST": "the same call; libkvd reconnects",
    "ENODAEMON": "the same call, when a daemon runs",
    "ENOREPLY": "check first: the daemon may have done it",
    "EFULL": _LATER, "EBUSY": _LATER, "ELIMIT": _LATER, "ENOMEM": _LATER, "EIO": _LATER,
    "EDEAD": "another room, with the next session",
    "EABORTED": _ROOM, "ECANCELED": _ROOM, "ESTALL": _ROOM, "ELEASE": _ROOM,
    "ETRANSPORT": _ROOM, "EFENCE": _ROOM, "ERESTART": _ROOM,
    "EPEER": _ELSEWHERE, "ESESSION": _ELSEWHERE, "ETIMEOUT": _ELSEWHERE,
    "EDRAIN": _ELSEWHERE,
}


def error_make(number, code, retryable, scope, message):
    """The exception for a code."""
    return _CLASSES.get(code, DaemonError)(message, code, number, scope, bool(retryable))
