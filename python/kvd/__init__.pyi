# SPDX-License-Identifier: Apache-2.0
from .aio import AsyncClient as AsyncClient, AsyncRoom as AsyncRoom
from .attend import (Attend as Attend, AttendFacts as AttendFacts, AttendStream as AttendStream,
                     Part as Part, Rope as Rope)
from .chunks import (
    ChunkEvent as ChunkEvent, ChunkEvents as ChunkEvents, Facts as Facts, Found as Found,
    Hold as Hold, Move as Move, Space as Space)
from .client import Client as Client, Pool as Pool
from .errors import (
    AbortedError as AbortedError, BusyError as BusyError, CanceledError as CanceledError,
    ConnectionError as ConnectionError, DaemonError as DaemonError, Error as Error,
    InvalidError as InvalidError, LimitError as LimitError,
    MemoryImportError as MemoryImportError, NotFoundError as NotFoundError,
    PeerError as PeerError, PermissionDenied as PermissionDenied, RETRY as RETRY,
    StateError as StateError, TimeoutError as TimeoutError)
from .layout import HND as HND, Layout as Layout, NHD as NHD
from .memory import Memory as Memory, Region as Region
from .rooms import (
    BOOTSTRAPPING as BOOTSTRAPPING, CLOSED as CLOSED, FAILED as FAILED,
    Room as Room, SUCCESS as SUCCESS,
    Source as Source, Status as Status, TRANSFERRING as TRANSFERRING, View as View,
    WAITING_FOR_INPUT as WAITING_FOR_INPUT)
from .timeline import Timeline as Timeline
from . import cost as cost, shards as shards

__version__: str
