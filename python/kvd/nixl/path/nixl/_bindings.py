# SPDX-License-Identifier: Apache-2.0
"""NIXL's binding layer on kvd.

An agent is a session with the node's daemon. Its handles are numbers that are never reused, so a
released one is distinguished from one in use. Lists and requests that NIXL refuses at creation are
refused here, in this process, by the registrations of both agents; the daemons check all of it
again before a byte moves."""
import datetime
import itertools
import operator
import os
import re
import struct
import threading
import time

import numpy as np

from kvd import _kvd, cuda
from kvd.client import Client
from kvd.errors import Error
from kvd.memory import adopt

from . import _files, _metadata
from ._args import (LONG_NAME, bytes_of, index_pack, plain_abi, telemetry_wanted, text_of,
                    wire_name)
from ._descs import (nixlRegDList, nixlRemoteDList,  # noqa: F401
                     nixlXferDList, strided)
from ._listen import Listener
from ._remote import MEM_TYPES, Remote, within
from ._status import (from_code, from_error, nixl_cost_t, nixl_mem_t,  # noqa: F401
                      nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t, nixlBackendError,
                      nixlCancelledError, nixlInvalidParamError, nixlMismatchError,
                      nixlNotAllowedError, nixlNotFoundError, nixlNotPostedError,
                      nixlNotSupportedError, nixlNoTelemetryError,
                      nixlRemoteDisconnectError, nixlRepostActiveError, nixlUnknownError)
from .logging import get_logger

logger = get_logger("bindings")

DEFAULT_COMM_PORT = 8888
NIXL_INIT_AGENT = ""
HAVE_UCX_GPU_DEVICE_API = False
DRAM_SEG, VRAM_SEG = nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG
FILE_SEG = nixl_mem_t.FILE_SEG
_waiting, _Xfer = _kvd.notif_waiting, _kvd.Xfer
_EXPORTED = (nixl_mem_t, nixl_xfer_op_t, nixl_thread_sync_t, nixl_cost_t, nixl_status_t)
for _kind in _EXPORTED:
    globals().update(_kind.__members__)
__all__ = sorted(
    {word for kind in _EXPORTED for word in kind.__members__} |
    {kind.__name__ for kind in _EXPORTED} |
    {word for word in globals() if re.fullmatch("nixl.*(Error|DList)", word)} |
    {"DEFAULT_COMM_PORT", "HAVE_UCX_GPU_DEVICE_API", "NIXL_INIT_AGENT", "nixlAgent",
     "nixlAgentConfig", "nixlXferTelemetry"})
SUCCESS, IN_PROG = nixl_status_t.NIXL_SUCCESS, nixl_status_t.NIXL_IN_PROG

# transfers between agents, and transfers between an agent's memory and its files
PLUGINS = {"POSIX": (_files.PARAMS, ["DRAM_SEG", "FILE_SEG"]),
           "UCX": ({"ucx_error_handling_mode": "peer", "num_workers": "1",
                    "ucx_devices": ""}, ["DRAM_SEG", "VRAM_SEG"])}
ATTACH_S = 10.0
NOTIF_MAX = 1 << 20
RETRY_S = 1.0  # between attempts to attach to a session that was lost
LOOK_S = 0.5  # between queries to the own daemon whether a session exists
TIMEOUT_S = 1.0  # of calls to the own daemon, and of a first connection
DEVICES_MAX = 1 << 32
GRANT_REGIONS_MAX = 4096  # the daemon's limit of regions per secret
_OWN = {"EDEAD": ": this agent's daemon ended", "ELOST": ": this agent's daemon ended it",
        "ENOREPLY": ": this agent's daemon does not answer"}
_NOT_MEMORY = ("EINVAL", "ERANGE", "ENOTFOUND")  # of a daemon that should register it


class nixlXferTelemetry:
    """Times in µs; startTime on the monotonic clock."""

    startTime = postDuration = xferDuration = totalBytes = descCount = 0
    backendName = ""  # as in NIXL after 1.5

    def __repr__(self):
        return "nixlXferTelemetry(startTime=%d, postDuration=%d, xferDuration=%d, " \
            "totalBytes=%d, descCount=%d)" % (self.startTime, self.postDuration,
                                              self.xferDuration, self.totalBytes,
                                              self.descCount)


class nixlAgentConfig:
    """Checks the type of each field when it is set, as NIXL does."""

    __slots__ = ("useProgThread", "useListenThread", "listenPort", "syncMode", "pthrDelay",
                 "lthrDelay", "captureTelemetry", "etcdWatchTimeout")
    _FLAGS = ("useProgThread", "useListenThread", "captureTelemetry")

    def __init__(self, useProgThread=False, useListenThread=False,
                 listenPort=DEFAULT_COMM_PORT,
                 syncMode=nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT, pthrDelay=0,
                 lthrDelay=100000, captureTelemetry=False, etcdWatchTimeout=5000000):
        self.useProgThread, self.useListenThread = useProgThread, useListenThread
        self.listenPort, self.syncMode = listenPort, syncMode
        self.pthrDelay, self.lthrDelay = pthrDelay, lthrDelay
        self.captureTelemetry = captureTelemetry
        if not isinstance(etcdWatchTimeout, datetime.timedelta):
            etcdWatchTimeout = datetime.timedelta(microseconds=etcdWatchTimeout)
        self.etcdWatchTimeout = etcdWatchTimeout

    def __setattr__(self, field, value):
        if field in self._FLAGS and (value is None or hasattr(value, "__bool__")):
            value = bool(value)
        elif field == "listenPort":
            value = operator.index(value)
            if not 0 <= value < 1 << 16:
                raise TypeError("listenPort: %d is not a port" % value)
        elif field == "syncMode" and not isinstance(value, nixl_thread_sync_t) or \
                field in self._FLAGS:
            raise TypeError("%s: not %s" % (field, type(value).__name__))
        object.__setattr__(self, field, value)


class nixlAgent:
    def __init__(self, name, config):
        name = text_of(name)
        if not 0 < len(name.encode("utf-8", "surrogateescape")) < 1 << 16:
            raise ValueError("an agent needs a name, of at most 65535 bytes")
        if not isinstance(config, nixlAgentConfig):
            raise TypeError("not a nixlAgentConfig")
        self._name, self._config = name, config
        wire, self._prefix = wire_name(name)
        try:
            self._client = Client(client=wire)
            self._kvd = self._client._kvd
            self._kvd.prepare()
        except Error as error:
            raise RuntimeError("no kvd daemon: %s" % error) from error
        self._granting, self._grant = threading.Lock(), None
        self._lock = threading.Lock()  # of the fields below; never held while waiting
        self._numbers = itertools.count(0x1000)
        self._backends, self._regions = {}, {}
        self._spans, self._packed, self._blob = {}, {}, None
        self._ranges = _files.Ranges()
        self._files = {}  # device: [(offset, bytes, address)]
        self._paths = set()  # among _regions: files that were opened here
        self._of_files = set()  # lists and requests
        self._changes = 1  # of the regions
        self._remotes, self._dlists = {}, {}
        self._requests = {}  # by handle: the transfer, and its partner
        self._failures = {}  # by handle, until the next post: the exception's class and text
        self._self = None
        self._require = [w for w in os.environ.get("KVD_REQUIRE", "").replace(",", " ")
                         .split() if w]
        self._telemetry = telemetry_wanted(config)
        self._listener = None
        if config.useListenThread:
            self._listener = Listener(self, config.listenPort)

    def __del__(self):
        listener, client = getattr(self, "_listener", None), getattr(self, "_client", None)
        if listener:
            listener.stop()
        if client is not None:
            client.close()  # requests in progress hold the client, and it holds them

    # ---- plugins and backends ----

    def getAvailPlugins(self):
        return list(PLUGINS)

    def getPluginParams(self, plugin):
        if plugin not in PLUGINS:
            raise nixlNotFoundError("no plugin '%s'" % plugin)
        params, mems = PLUGINS[plugin]
        return dict(params), list(mems)

    def getBackendParams(self, backend):
        plugin, params = self._backend(backend)
        return dict(params), list(PLUGINS[plugin][1])

    def createBackend(self, plugin, params):
        if plugin not in PLUGINS:
            raise nixlNotFoundError("no plugin '%s'" % plugin)
        if any(p == plugin for p, _ in self._backends.values()):
            raise nixlInvalidParamError("backend '%s' already exists" % plugin)
        handle = next(self._numbers)
        self._backends[handle] = (plugin, dict(params))
        return handle

    def _backend(self, handle):
        found = self._backends.get(handle)
        if found is None:
            raise nixlInvalidParamError("no backend %r" % (handle,))
        return found

    def _need_backend(self, handles=(), error=nixlNotFoundError):
        for handle in handles:
            self._backend(handle)
        if not self._backends:
            raise error("no backend was created")

    # ---- memory ----

    @plain_abi
    def registerMem(self, descs, backends=[]):
        if not isinstance(descs, nixlRegDList):
            raise TypeError("not a nixlRegDList")
        self._need_backend(backends)
        mem = descs.getType()
        if mem is FILE_SEG:
            self._need_posix(backends)
        elif mem is not DRAM_SEG and mem is not VRAM_SEG:
            raise nixlNotFoundError("%s: kvd supports memory and files" % mem.name)
        if descs.isEmpty():
            raise nixlBackendError("the list is empty")
        made, paths = [], set()
        try:
            for i, (address, nbytes, device) in enumerate(descs.table().tolist()):
                key = mem, address, nbytes, device
                made.append((key, self._file(key, descs[i][3], paths) if mem is FILE_SEG
                             else self._region(*key)))
        except BaseException as error:
            for _, region in made:
                self._unregister(region)
            if isinstance(error, Error) and error.code in _NOT_MEMORY:
                raise nixlBackendError("%s (kvd: %s)" % (error.message, error.code)) \
                    from error
            raise
        with self._lock:
            for key, region in made:  # in the order of registration: the newest counts
                self._regions[key] = self._regions.pop(key, []) + [region]
            self._paths |= paths
            self._changed()
        return SUCCESS

    def _need_posix(self, backends):
        if not any(self._backend(handle)[0] == "POSIX"
                   for handle in backends or self._backends):
            raise nixlNotFoundError("files need the backend POSIX: create_backend('POSIX')")

    def _file(self, key, meta, paths):
        _, offset, nbytes, device = key
        if device >= DEVICES_MAX:
            raise nixlBackendError("a file's device is its descriptor, or a number of 32 "
                                   "bits, not %d" % device)
        fd = _files.opened(meta)
        try:
            if fd is not None:
                if device in self._files or any(device == k[3] for k in paths):
                    raise nixlBackendError("device %d names another file already" % device)
                paths.add(key)
            elif any(device == k[3] for k in itertools.chain(self._paths, paths)):
                raise nixlBackendError("device %d names a file that was opened by its path"
                                       % device)
            nbytes = nbytes or max(0, _files.WHOLE - offset)
            if not nbytes or nbytes > _files.WHOLE or device >= 1 << 31 and fd is None:
                raise nixlBackendError("[%d, +%d) of file %d cannot be registered"
                                       % (offset, nbytes, device))
            at = self._ranges.take(nbytes)
            try:
                return _kvd.Region(self._kvd, "file", nbytes, at,
                                   device if fd is None else fd, offset, None,
                                   self._name[:40])
            except BaseException:
                self._ranges.drop(at)
                raise
        finally:
            if fd is not None:
                os.close(fd)  # the region has a duplicate

    def _unregister(self, region):
        if region:
            region.unregister()
            self._ranges.drop(region.address)

    def _region(self, mem, address, nbytes, device):
        if not address or device >= DEVICES_MAX:
            raise nixlBackendError("memory [%#x, +%d) of device %d cannot be registered"
                                   % (address, nbytes, device))
        if not nbytes:
            return None  # legal, and not sent to the daemon
        if mem is VRAM_SEG:
            piece = cuda.describe(address, nbytes)
            return _kvd.Region(self._kvd, "cuda_ipc", nbytes, address, -1, piece.offset,
                               None, self._name[:40], device=piece.device,
                               handle=piece.handle)
        why = adopt(address, nbytes)
        region = _kvd.Region(self._kvd, "vm", nbytes, address, name=self._name[:40])
        if why:
            logger.debug("%d bytes at %#x are copied through the kernel (vm): %s", nbytes,
                         address, why)
        return region

    @plain_abi
    def deregisterMem(self, descs, backends=[]):
        if not isinstance(descs, nixlRegDList):
            raise TypeError("not a nixlRegDList")
        self._need_backend(backends)
        taken = []
        with self._lock:
            for row in descs.table().tolist():
                key = (descs.getType(), *row)
                if not self._regions.get(key):
                    for other, region in taken:
                        self._regions.setdefault(other, []).append(region)
                    raise nixlNotFoundError("[%#x, +%d) of device %d is not registered"
                                            % tuple(row))
                taken.append((key, self._regions[key].pop()))
                if not self._regions[key]:
                    del self._regions[key]
                    self._paths.discard(key)
            self._changed()
        for _, region in taken:
            self._unregister(region)
        return SUCCESS

    def _changed(self):
        """Own regions were added or removed. With the lock."""
        spans = {}
        for mem, *span in self._regions:
            spans.setdefault(mem, []).append(span)
        self._spans = spans
        self._packed = {m: np.array(s, np.uint64).tobytes() for m, s in spans.items()
                        if m is not FILE_SEG}
        files = [(key[3], key[1], region.bytes, region.address)
                 for key, regions in self._regions.items() if key[0] is FILE_SEG
                 for region in regions]
        self._files = {}
        for device, *place in files:
            self._files.setdefault(device, []).append(tuple(place))
        self._packed[FILE_SEG] = np.array(
            [(address, nbytes, device) for device, _, nbytes, address in files],
            np.uint64).tobytes()
        self._changes += 1
        self._blob = None

    def queryMem(self, descs, backend):
        if not isinstance(descs, nixlRegDList):
            raise TypeError("not a nixlRegDList")
        if self._backend(backend)[0] != "POSIX":
            raise nixlNotSupportedError("only files can be queried: the backend POSIX")
        return [_files.queried(descs[i][3]) for i in range(descs.descCount())]

    # ---- metadata ----

    def _secret(self, regions):
        """(epoch, secret) for metadata of these regions (numbers), None: of all. An agent has one
        secret, which gives access to the regions in its metadata and no others; it is not the
        session's. A daemon's restart ends it."""
        bounds = {} if regions is None else {"regions": regions}
        told = None if regions is None else frozenset(regions)
        with self._granting:
            grant = self._grant
            epoch, _ = self._kvd.key()  # waits for a session
            if grant is None or grant[0] != epoch:
                got = self._client.command("secret.create", access="read-write", **bounds)
                self._grant = grant = (int(got["session"]), got["secret"], got["grant"],
                                       told)
            elif grant[3] is not None and (told is None or not grant[3] >= told):
                self._client.command("secret.extend", grant=grant[2], **bounds)
                self._grant = grant = grant[:3] + (told and grant[3] | told,)
            return grant[:2]

    def _head(self, regions=None, own=False):
        epoch, secret = self._kvd.key() if own else self._secret(regions)
        info = self._kvd.info()
        return {"name": self._name, "endpoint": info["endpoint"],
                "instance": info["instance"], "epoch": epoch, "secret": secret}

    @plain_abi
    def getLocalMD(self):
        if not self._backends:
            raise nixlInvalidParamError("no backend was created")
        _waiting(self._kvd)  # the daemon may have been replaced
        if self._kvd.lost():
            self._kvd.key()  # waits for the next session: the last one's secret is void
        blob, change = self._blob, self._changes
        if blob and blob[:2] == (self._kvd.epoch, change):
            return blob[2]
        head = dict(self._head(), full=change)
        rows = [(m + d * MEM_TYPES, a, n) for m, spans in self._spans.items()
                if m is not FILE_SEG for a, n, d in spans]
        packed = _metadata.pack(head, np.array(rows, np.uint64).reshape(-1, 3))
        self._blob = (head["epoch"], change, packed)
        return packed

    @plain_abi
    def getLocalPartialMD(self, descs, inc_conn_info=False, backends=[]):
        if not isinstance(descs, nixlRegDList):
            raise TypeError("not a nixlRegDList")
        self._need_backend(backends, nixlInvalidParamError)
        rows, numbers = [], []
        mem = descs.getType()
        if mem is FILE_SEG:
            raise nixlBackendError("files can be accessed by their own agent only")
        for address, nbytes, device in descs.table().tolist():
            if (mem, address, nbytes, device) not in self._regions:
                raise nixlNotFoundError("[%#x, +%d) of device %d is not registered"
                                        % (address, nbytes, device))
            rows.append((mem + device * MEM_TYPES, address, nbytes))
            numbers += [region.id for region in self._regions[mem, address, nbytes, device]
                        if region]
        if len(numbers) > GRANT_REGIONS_MAX:
            numbers = None
        head = self._head(numbers)  # all holders of the secret may use regions in the metadata
        if rows and not inc_conn_info:
            head = {"name": self._name}
        return _metadata.pack(head, np.array(rows, np.uint64).reshape(-1, 3))

    @plain_abi
    def loadRemoteMD(self, blob):
        head, regions = _metadata.unpack(blob)
        name = head["name"]
        if name == self._name:
            raise nixlInvalidParamError("the metadata is this agent's own")
        since = self._kvd.info()["instance"]
        with self._lock:
            remote = self._remotes.get(name)
            if "endpoint" in head and (remote is None or not remote.same(head)):
                if remote is not None:
                    remote.gone = True
                remote = self._remotes[name] = Remote(name, head, since)
            elif remote is None:
                raise nixlNotFoundError("regions of '%s', whose connection information is "
                                        "unknown" % name)
            more = remote.learn(regions, head.get("full", 0))
        known = remote.attach
        self._reach(remote)
        if more and known is not None and known is remote.attach:
            known.refresh(ATTACH_S)  # the daemons get the regions, too
        return name.encode("utf-8", "surrogateescape")

    def _attach(self, remote):
        remote.tried = remote.asked = time.monotonic()
        return _kvd.Attach(self._kvd, remote.endpoint, remote.epoch, remote.secret, ATTACH_S)

    def _reach(self, remote):
        """Its attachment. A dead one is made again in the background, once a second, because a link
        may recover while an engine does not."""
        if remote.attach is None:
            remote.attach = self._attach(remote)
            if self._require:
                self._require_check(remote)
        elif remote.attach.state() < 0:
            if remote.again is not None and remote.again.state() == 1:
                remote.attach, remote.again = remote.again, None
                if self._require:  # the transport may have changed
                    self._require_check(remote)
            elif (remote.again is None or remote.again.state() < 0) and \
                    time.monotonic() - remote.tried > RETRY_S:
                remote.again = self._attach(remote)
        return remote.attach

    def _look(self, remote, age=LOOK_S):
        """Query the own daemon for the end of that session: one round trip, if the last query is
        older than `age` seconds."""
        attach, now = self._reach(remote), time.monotonic()
        if attach.state() == 1 and now - remote.asked > age:
            remote.asked = now
            try:
                attach.check(TIMEOUT_S)
            except Error as error:
                if error.number >= 512 or error.code == "EBUSY":
                    raise  # the own daemon does not answer, or has only just started again
                attach.refuse(error.number, error.message)
                attach = self._reach(remote)
        return attach

    def _require_check(self, remote):
        """KVD_REQUIRE: wait for the transport to the peer, and refuse one that is not listed."""
        self._await(remote)
        for peer in self._client.command("peer.list")["peers"]:
            if peer.get("endpoint") != remote.endpoint:
                continue
            used = peer.get("transport", "none")
            if used in self._require or ("rdma" in self._require and peer.get("rdma")):
                return
            remote.attach, remote.gone = None, True
            self._remotes.pop(remote.name, None)
            if remote is self._self:
                self._self = None
            raise nixlBackendError("KVD_REQUIRE=%s: the transport to '%s' is %s"
                                   % (",".join(self._require), remote.name, used))

    def _await(self, remote, seconds=ATTACH_S):
        end, pause = time.monotonic() + seconds, 20e-6
        while True:
            attach = remote.attach
            state = attach.state()
            if state == 1:
                return attach
            if state < 0:
                raise self._with_remedy(remote, _kvd.code_name(state), attach.error())
            if time.monotonic() > end:
                raise nixlRemoteDisconnectError("'%s' does not answer" % remote.name)
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def _remote(self, name):
        if name == self._name:
            return self._loopback()
        remote = self._remotes.get(name)
        if remote is None:
            raise nixlNotFoundError("no agent '%s'" % name)
        if remote.beside:
            self._usable(remote)
        return remote

    def _usable(self, remote):
        """A session of the own daemon ended with it: its metadata is out of date."""
        if remote.failed:
            _waiting(self._kvd)  # the daemon may have been replaced
        if remote.beside and self._restarted(remote):
            raise nixlRemoteDisconnectError(self._restarted(remote))

    def _restarted(self, remote):
        """Nothing, or that the own daemon was restarted after the metadata was loaded, and the
        remedy."""
        if remote.since is None or self._kvd.info()["instance"] == remote.since:
            return ""
        who = "the daemon of both agents was restarted:" if remote.beside else \
            "this agent's daemon was restarted; if the other's was, too:"
        return "%s add_remote_agent() with new metadata of '%s' (its get_agent_metadata())" % (
            who, remote.name)

    def _with_remedy(self, remote, code, why):
        """kvd's error about another agent as NIXL's."""
        remedy = self._restarted(remote)
        return from_code(code, "%s; %s" % (why, remedy) if remedy and why else why or remedy)

    def _loopback(self):
        epoch = self._kvd.epoch
        if self._self is None or self._self.epoch != epoch:
            head = self._head(own=True)
            self._self = Remote(self._name, head)
            self._self.attach = self._attach(self._self)
            if self._require:
                self._require_check(self._self)
        return self._self

    def invalidateRemoteMD(self, name):
        """A status, not an exception."""
        name = text_of(name)
        if name == self._name:
            return nixl_status_t.NIXL_ERR_INVALID_PARAM
        with self._lock:
            remote = self._remotes.pop(name, None)
            if remote is None:
                return nixl_status_t.NIXL_ERR_NOT_FOUND
            remote.gone = True
        return SUCCESS

    def checkRemoteMD(self, name, descs):
        name = text_of(name)
        if not isinstance(descs, (nixlXferDList, nixlRegDList)):
            raise TypeError("not a nixlXferDList")
        if name == self._name:
            spans = self._spans.get(descs.getType(), ())
        else:
            remote = self._remotes.get(name)
            if remote is None:
                return nixl_status_t.NIXL_ERR_NOT_FOUND
            spans = remote.spans.get(int(descs.getType()), ())
        return SUCCESS if within(spans, descs.table()) else nixl_status_t.NIXL_ERR_NOT_FOUND

    @plain_abi
    def makeConnection(self, name, backends=[]):
        self._need_backend(backends)
        remote = self._remote(text_of(name))
        self._reach(remote)
        self._await(remote)
        return SUCCESS

    # ---- metadata by a peer's listener ----

    def _courier(self, ip_addr, port):
        if not isinstance(ip_addr, (str, bytes)) or not hasattr(port, "__index__"):
            raise TypeError("needs an address (str) and a port (int)")
        if not ip_addr:
            raise nixlInvalidParamError("needs an IP address: kvd's directory (option "
                                        "cluster) keeps no metadata of NIXL")
        return self._listener

    def getListenPort(self):
        if self._listener is None:
            raise nixlInvalidParamError("the agent has no listen thread")
        return self._listener.port

    def sendLocalMD(self, ip_addr="", port=DEFAULT_COMM_PORT):
        courier = self._courier(ip_addr, port)
        if courier:
            courier.send(ip_addr, port, self.getLocalMD())

    def sendLocalPartialMD(self, descs, inc_conn_info=False, backends=[], ip_addr="",
                           port=DEFAULT_COMM_PORT, label=""):
        courier = self._courier(ip_addr, port)
        if courier:
            courier.send(ip_addr, port,
                         self.getLocalPartialMD(descs, inc_conn_info, backends))

    def fetchRemoteMD(self, remote_agent, ip_addr="", port=DEFAULT_COMM_PORT, label=""):
        text_of(remote_agent)
        courier = self._courier(ip_addr, port)
        if courier:
            courier.fetch(ip_addr, port)

    def invalidateLocalMD(self, ip_addr="", port=DEFAULT_COMM_PORT):
        courier = self._courier(ip_addr, port)
        if courier:
            courier.invalidate(ip_addr, port, self._name)

    # ---- prepared lists ----

    @plain_abi
    def prepXferDlist(self, agent_name, *args, **kwargs):
        """(agent, nixlXferDList, backends=[]) or (agent, mem, Nx5 array, backends=[])"""
        name = text_of(agent_name)
        names = ["descs", "backends"]
        if args and isinstance(args[0], nixl_mem_t):
            names.insert(0, "mem")
        given = dict(zip(names, args))
        given.update(kwargs)
        descs, mem = given.pop("descs", None), given.pop("mem", None)
        self._need_backend(given.pop("backends", None) or given.pop("backend", ()))
        if mem is not None and isinstance(descs, np.ndarray):
            table, columns = strided(descs), 5
        elif isinstance(descs, nixlXferDList):
            mem, table, columns = descs.getType(), descs.table(), 3
        else:
            raise TypeError("prepXferDlist: needs a nixlXferDList, or a memory type with an Nx5 "
                            "array")
        return self._prepare(name, mem, table, columns)

    def _prepare(self, name, mem, table, columns):
        remote, attach = None, None
        spans = self._packed.get(mem, b"")
        if mem is FILE_SEG:
            table = _files.addresses(table, self._files)
        if name != NIXL_INIT_AGENT:
            remote = self._remote(name)
            if name != self._name:
                spans = remote.packed(mem)
                self._look(remote) if remote.failed else self._reach(remote)
            attach = remote.attach
        if not len(table):
            raise nixlNotFoundError("an empty list")
        try:
            dlist = _kvd.Dlist(self._kvd, attach, table.__array_interface__["data"][0],
                               len(table), columns, spans)
        except Error as error:
            if error.code == "EINVAL" and columns == 5:
                raise nixlNotFoundError(error.message) from error
            if remote is not None:
                raise self._with_remedy(remote, error.code, error.message) from error
            raise
        handle = next(self._numbers)
        self._dlists[handle] = (dlist, remote)
        if mem is FILE_SEG:
            self._of_files.add(handle)
        return handle

    def releasedDlistH(self, handle):
        self._dlists.pop(handle, None)
        self._of_files.discard(handle)
        return SUCCESS

    def _dlist(self, handle):
        found = self._dlists.get(handle)
        if found is None:
            raise nixlInvalidParamError("no prepared list %r: it was released" % (handle,))
        return found

    # ---- requests ----

    def _message(self, notif):
        data = notif if type(notif) is bytes else bytes_of(notif)
        if not data:
            return None
        if len(data) > NOTIF_MAX:
            raise nixlInvalidParamError("notification of %d bytes (limit %d)"
                                        % (len(data), NOTIF_MAX))
        return self._prefix + data

    def makeXferReq(self, operation, local_side, local_indices, remote_side, remote_indices,
                    notif_msg=b"", backend=(), skip_desc_merge=False):
        for handle in backend:
            self._backend(handle)
        local, ours = self._dlists.get(local_side) or self._dlist(local_side)
        target, remote = self._dlists.get(remote_side) or self._dlist(remote_side)
        if ours is not None or remote is None:
            raise nixlInvalidParamError("the sides are swapped")
        if remote.gone:
            raise nixlNotFoundError("agent '%s' was removed" % remote.name)
        keep_a = keep_b = None
        message = self._message(notif_msg)
        try:
            if type(local_indices) is not list:
                local_indices, keep_a = index_pack(local_indices)
            if type(remote_indices) is not list:
                remote_indices, keep_b = index_pack(remote_indices)
            xfer = _Xfer(operation, local, local_indices, target, remote_indices, message,
                         -1 if skip_desc_merge else 0)
        except Error as error:
            raise from_error(error) from error
        except TypeError as error:  # NIXL's layer cannot cast it
            raise RuntimeError("indices: %s" % error) from error
        handle = next(self._numbers)
        self._requests[handle] = xfer, remote
        if local_side in self._of_files or remote_side in self._of_files:
            self._of_files.add(handle)
        return handle

    @plain_abi
    def createXferReq(self, operation, local_descs, remote_descs, remote_agent, notif_msg=b"",
                      backend=[]):
        for descs in (local_descs, remote_descs):
            if not isinstance(descs, nixlXferDList):
                raise TypeError("not a nixlXferDList")
        name = text_of(remote_agent)
        remote = self._remote(name)
        self._need_backend(backend)
        files = FILE_SEG in (local_descs.getType(), remote_descs.getType())
        if files:
            self._need_posix(backend)
        if local_descs.descCount() != remote_descs.descCount():
            raise nixlInvalidParamError("%d local and %d remote descriptors"
                                        % (local_descs.descCount(),
                                           remote_descs.descCount()))
        message = self._message(notif_msg)
        local = self._prepare(NIXL_INIT_AGENT, local_descs.getType(), local_descs.table(), 3)
        try:
            target = self._prepare(name, remote_descs.getType(), remote_descs.table(), 3)
        except BaseException:
            self.releasedDlistH(local)
            raise
        # only the request holds them
        mine, theirs = self._dlists[local][0], self._dlists[target][0]
        self.releasedDlistH(local), self.releasedDlistH(target)
        xfer = _Xfer(operation, mine, None, theirs, None, message, local_descs.descCount())
        handle = next(self._numbers)
        self._requests[handle] = xfer, remote
        if files:
            self._of_files.add(handle)
        return handle

    def _request(self, handle):
        found = self._requests.get(handle)
        if found is None:
            raise nixlInvalidParamError("no request %r: it was released" % (handle,))
        return found

    def postXferReq(self, reqh, notif_msg=b""):
        xfer, remote = self._requests.get(reqh) or self._request(reqh)
        if remote.gone:
            raise nixlNotFoundError("agent '%s' was removed" % remote.name)
        if remote.failed:
            self._usable(remote)
            self._heal(xfer, remote)
        try:
            code = xfer.post(self._message(notif_msg))
        except Error as error:
            if error.code == "EBUSY":
                raise nixlRepostActiveError(error.message) from error
            raise from_error(error) from error
        self._failures.pop(reqh, None)
        if code < 0:
            raise self._failed(reqh, code)
        return IN_PROG

    @plain_abi
    def _heal(self, xfer, remote):
        """Over a new attachment, if there is one: the link may have recovered."""
        try:
            xfer.rebind(self._look(remote))
        except Error as error:
            raise self._with_remedy(remote, error.code, error.message) from error

    def getXferStatus(self, handle):
        xfer, remote = self._requests.get(handle) or self._request(handle)
        code = xfer.poll()
        if code == 0:
            return SUCCESS
        if code == 1:
            if remote.gone:
                raise nixlNotFoundError("agent '%s' was removed" % remote.name)
            return IN_PROG
        if code == 2:
            raise nixlNotPostedError("the request was not posted")
        raise self._failed(handle, code)

    def _failed(self, handle, code):
        """The exception of a failed transfer: a new one with the same text each time, because
        raising one repeatedly collects tracebacks."""
        told = self._failures.get(handle)
        if told is None:
            xfer, remote = self._requests[handle]
            remote.failed, remote.asked = True, 0.0
            code = _kvd.code_name(code)
            why = xfer.error()[1] or "transfer with '%s'%s" % (remote.name, _OWN.get(code, ""))
            remedy = self._restarted(remote)
            told = code, "%s; %s" % (why, remedy) if remedy else why
            self._failures[handle] = told
        return from_code(*told)

    def getXferTelemetry(self, reqh):
        xfer, _ = self._request(reqh)
        if not self._telemetry:
            raise nixlNoTelemetryError("neither captureTelemetry nor NIXL_TELEMETRY_ENABLE "
                                       "is on")
        told = xfer.telemetry()
        if told is None:
            if not xfer.posted:
                raise nixlNotPostedError("the request was not posted")
            if xfer.poll() == 0:
                told = xfer.telemetry()
        if told is None:
            raise nixlNoTelemetryError("the request has not finished")
        out = nixlXferTelemetry()
        out.backendName = self._backends[self._backend_of(reqh)][0]
        out.startTime, out.postDuration = told[0] // 1000, told[1]
        out.xferDuration, out.totalBytes = max(told[1], told[2]), told[3]
        out.descCount = told[4]
        return out

    def estimateXferCost(self, req_handle):
        self._request(req_handle)
        return 0, 0, -1

    def queryXferBackend(self, handle):
        self._request(handle)
        return self._backend_of(handle)

    def _backend_of(self, request):
        files = request in self._of_files
        return next((handle for handle, (plugin, _) in self._backends.items()
                     if files == (plugin == "POSIX")), next(iter(self._backends)))

    @plain_abi
    def releaseXferReq(self, handle):
        """In flight: starts the cancel, and raises until the memory is quiesced."""
        if not self._request(handle)[0].stop():
            raise nixlBackendError("the request is being canceled, and its memory may still "
                                   "move: release it again")
        self._abandon(handle)
        return SUCCESS

    def _abandon(self, handle):
        """Its handle is unreferenced: the daemon cancels it and frees it when it has quiesced."""
        self._requests.pop(handle, None)
        self._failures.pop(handle, None)
        self._of_files.discard(handle)

    def prepMemView(self, *args, **kwargs):
        raise nixlBackendError("memory views need a GPU")

    def releaseMemView(self, view):
        raise nixlBackendError("memory views need a GPU")

    # ---- notifications ----

    def genNotif(self, remote_agent, msg, backends=()):
        name, data = text_of(remote_agent), bytes_of(msg)
        if len(data) > NOTIF_MAX:
            raise nixlInvalidParamError("notification of %d bytes (limit %d)"
                                        % (len(data), NOTIF_MAX))
        self._need_backend(backends, nixlBackendError)
        remote = self._remote(name)
        try:
            attach = self._look(remote)
            if attach.state() != 1:
                attach = self._await(remote, TIMEOUT_S)
            _kvd.notif_send(self._kvd, attach, self._prefix + data)
        except Error as error:
            raise from_error(error) from error
        return SUCCESS

    def getNotifs(self, notif_map, backends=()):
        if not self._backends:
            raise nixlBackendError("no backend was created")
        if type(notif_map) is not dict:
            raise TypeError("not a dict of notifications")
        # existing entries are kept, as with NIXL
        out = {name: list(told) for name, told in notif_map.items()} if notif_map else {}
        try:
            left = _waiting(self._kvd)  # a reply has some of them
            while left > 0 and (taken := self._take(out)):
                left -= taken
        except Error as error:
            raise from_error(error) from error
        return out

    def _take(self, notif_map):
        told = _kvd.notif_drain(self._kvd)
        for name, data in told:
            if name.startswith(LONG_NAME) and len(data) >= 2:
                size = struct.unpack_from("<H", data)[0]
                name = data[2:2 + size].decode("utf-8", "surrogateescape")
                data = data[2 + size:]
            notif_map.setdefault(name, []).append(data)
        return len(told)

