# SPDX-License-Identifier: Apache-2.0
"""kvd: move KV cache between engines through the kvd daemon of this node.

    import kvd, numpy as np

    with kvd.Client() as client:
        cache = np.zeros((64, 4096), np.uint8)
        region = client.register(cache)
        pool = client.pool(kvd.Layout(0).heads(...), [region])
        room = client.recv(7, pool, sources=["tcp://10.0.0.2:7400"])
        room.bind({"kv": range(4)})
        room.wait()

Logging goes to the logger "kvd". torch is never imported here."""
import logging

try:
    from . import _kvd
except ImportError as error:
    if error.name != __name__:
        raise  # _kvd exists, but something that it imports does not
    raise ImportError(
        "kvd: no extension module _kvd for this Python in %s: a source tree, or a build for "
        "another Python. Install the package (pip install ./python in the source tree, or "
        "make wheel), and leave the tree off PYTHONPATH" % __path__[0], name=__name__) from None

from .errors import (AbortedError, BusyError, CanceledError, ConnectionError, DaemonError,
                     Error, InvalidError, LimitError, MemoryImportError, NotFoundError,
                     PeerError, PermissionDenied, RETRY, StateError, TimeoutError,
                     error_make)

_kvd.set_error_maker(error_make)

from .aio import AsyncClient, AsyncRoom  # noqa: E402
from .attend import Attend, AttendFacts, AttendStream, Part, Rope  # noqa: E402
from .chunks import (ChunkEvent, ChunkEvents, Facts, Found, Hold, Move,  # noqa: E402
                     Space)
from .client import Client, Pool  # noqa: E402
from .layout import HND, NHD, Layout  # noqa: E402
from .memory import Memory, Region  # noqa: E402
from .rooms import (BOOTSTRAPPING, CLOSED, FAILED, SUCCESS, TRANSFERRING,  # noqa: E402
                    WAITING_FOR_INPUT, Room, Source, Status, View)
from . import cost, shards  # noqa: E402
from .timeline import Timeline  # noqa: E402

__version__ = _kvd.version()
logging.getLogger("kvd").addHandler(logging.NullHandler())

__all__ = [
    "Attend", "AttendFacts", "AttendStream", "Part", "Rope",
    "AbortedError", "AsyncClient", "AsyncRoom", "BOOTSTRAPPING", "BusyError", "CLOSED",
    "CanceledError", "ChunkEvent", "ChunkEvents", "Client", "ConnectionError", "DaemonError", "Error",
    "FAILED", "Facts", "Found", "HND", "Hold", "InvalidError", "Layout", "LimitError", "Memory",
    "MemoryImportError", "Move", "NHD", "NotFoundError", "PeerError", "PermissionDenied", "Pool", "RETRY", "Region", "Room",
    "SUCCESS", "Source", "Space", "StateError", "Status", "TRANSFERRING", "TimeoutError",
    "Timeline", "View", "WAITING_FOR_INPUT", "cost", "shards",
]
