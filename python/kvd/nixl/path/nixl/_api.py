# SPDX-License-Identifier: Apache-2.0
"""nixl_agent and its handles: NIXL's Python API.

Names, defaults, return values and exceptions are NIXL 1.5's, because engines depend on them.
docs/engines/nixl.md lists the intended differences."""
import io
import pickle
import sys
from enum import Enum

import numpy as np

from . import _bindings as nixlBind
from .logging import get_logger

logger = get_logger("api")

DEFAULT_COMM_PORT = nixlBind.DEFAULT_COMM_PORT
_SUCCESS, _IN_PROG = nixlBind.NIXL_SUCCESS, nixlBind.NIXL_IN_PROG
# names of the number of threads in plugins that have one
_THREADS = {"UCX": "num_threads", "OBJ": "num_threads", "LIBFABRIC": "num_threads",
            "GDS_MT": "thread_count", "UCCL": "num_cpus"}

nixl_backend_handle = int


class _Unpickler(pickle.Unpickler):
    """Lists only: pickled data of another agent must not call anything else."""

    KINDS = (nixlBind.nixlXferDList, nixlBind.nixlRegDList)

    def find_class(self, module, name):
        for kind in self.KINDS:
            if (module, name) == (kind.__module__, kind.__qualname__):
                return kind
        raise pickle.UnpicklingError("descs: %s.%s is not a descriptor list" % (module, name))


def _is_tensor(thing):
    """An object can be a tensor only if torch was imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


class _Handle:
    """A number of the agent's, released once: by release(), or with the object."""

    __slots__ = ("_handle", "_agent", "_released", "__weakref__")

    def __init__(self, agent, value):
        self._handle, self._agent, self._released = value, agent, False

    def __repr__(self):
        return "%s(0x%x, released=%s)" % (type(self).__name__, self._handle, self._released)

    def release(self):
        if not self._released:
            self._give_back()
            self._released = True


class nixl_prepped_dlist_handle(_Handle):
    """From prep_xfer_dlist(). Requests that use it stay valid when it is released."""

    __slots__ = ()

    def _give_back(self):
        self._agent.releasedDlistH(self._handle)

    def __del__(self):
        try:
            self.release()
        except Exception:
            pass


class nixl_xfer_handle(_Handle):
    """From make_prepped_xfer() or initialize_xfer(). release() of one in flight starts the cancel
    and raises until the memory is quiesced; the daemon cancels and drains an unreferenced one."""

    __slots__ = ()

    def _give_back(self):
        self._agent.releaseXferReq(self._handle)

    def __del__(self):
        if getattr(self, "_released", True):
            return
        try:
            self._agent._abandon(self._handle)
        except Exception:
            pass


class nixl_thread_sync_t(Enum):
    """kvd's agents may be used by all threads in each of these modes."""

    NIXL_THREAD_SYNC_NONE = nixlBind.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = nixlBind.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = nixlBind.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = nixlBind.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:
    """Configuration of an agent. num_threads and enable_prog_thread are accepted without effect:
    the daemon moves the bytes."""

    def __init__(self, enable_prog_thread=True, enable_listen_thread=False,
                 listen_port=DEFAULT_COMM_PORT, capture_telemetry=False, num_threads=0,
                 backends=["UCX"], sync_mode=None):
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError("sync_mode must be a nixl_thread_sync_t (got %r)"
                            % type(sync_mode).__name__)
        self.backends = backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """One engine's end of transfers: a session with the kvd daemon of this node."""

    def __init__(self, agent_name, nixl_conf=None, instantiate_all=False):
        if nixl_conf and instantiate_all:
            instantiate_all = False
            logger.warning("instantiate_all is ignored: a config is given")
        conf = nixl_conf or nixl_agent_config()
        self._leaked_xfer_handles = []
        self.agent = nixlBind.nixlAgent(agent_name, self._config(conf))
        self.name = agent_name
        self.notifs = {}
        self.backends, self.backend_mems, self.backend_options = {}, {}, {}
        self.plugin_b_options, self.plugin_mem_types = {}, {}
        self.nixl_mems = {
            "DRAM": nixlBind.DRAM_SEG, "VRAM": nixlBind.VRAM_SEG,
            "FILE": nixlBind.FILE_SEG, "BLOCK": nixlBind.BLK_SEG, "OBJ": nixlBind.OBJ_SEG,
            "cpu": nixlBind.DRAM_SEG, "cuda": nixlBind.VRAM_SEG}
        self.nixl_ops = {"WRITE": nixlBind.NIXL_WRITE, "READ": nixlBind.NIXL_READ}
        self.plugin_list = self.agent.getAvailPlugins()
        if not self.plugin_list:
            raise RuntimeError("No plugins available for NIXL, cannot start transfers!")
        self._make_backends(self.plugin_list if instantiate_all else conf.backends,
                            conf.num_threads)
        logger.info("Initialized NIXL agent: %s", agent_name)

    @staticmethod
    def _config(conf):
        sync = conf.sync_mode
        if sync is None:
            sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if conf.enable_listen \
                else nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        config = nixlBind.nixlAgentConfig()
        config.useProgThread = conf.enable_pthread
        config.useListenThread = conf.enable_listen
        config.listenPort = conf.port
        config.syncMode = sync.value
        config.captureTelemetry = conf.capture_telemetry
        return config

    def _make_backends(self, wanted, threads):
        for name in wanted:
            if name not in self.plugin_list:
                logger.warning("Skipping backend registration %s due to the missing plugin.",
                               name)
                continue
            given = {}
            if threads > 0 and name in _THREADS:
                given[_THREADS[name]] = str(threads)
            self.create_backend(name, given)

    def __del__(self):
        for handle in getattr(self, "_leaked_xfer_handles", ()):
            try:
                self.agent.releaseXferReq(handle)
            except Exception:
                pass

    def _handles(self, backends):
        return [self.backends[name] for name in backends] if backends else []

    # ---- plugins and backends ----

    def get_plugin_list(self):
        return self.plugin_list

    def _load_plugin(self, backend):
        if backend in self.plugin_mem_types or backend not in self.plugin_list:
            return
        options, mems = self.agent.getPluginParams(backend)
        self.plugin_b_options[backend], self.plugin_mem_types[backend] = options, mems

    def get_plugin_mem_types(self, backend):
        self._load_plugin(backend)
        if backend not in self.plugin_mem_types:
            logger.warning("Plugin %s is not available to get its supported mem types.",
                           backend)
            return []
        return self.plugin_mem_types[backend]

    def get_plugin_params(self, backend):
        self._load_plugin(backend)
        if backend not in self.plugin_b_options:
            logger.warning("Plugin %s is not available to get its parameters.", backend)
            return {}
        return self.plugin_b_options[backend]

    def get_backend_mem_types(self, backend):
        if backend not in self.backend_mems:
            logger.warning("Backend %s not instantiated to get its supported mem types.",
                           backend)
            return []
        return self.backend_mems[backend]

    def get_backend_params(self, backend):
        if backend not in self.backend_options:
            logger.warning("Backend %s not instantiated to get its parameters.", backend)
            return {}
        return self.backend_options[backend]

    def create_backend(self, backend, initParams={}):
        self.backends[backend] = self.agent.createBackend(backend, initParams)
        options, mems = self.agent.getBackendParams(self.backends[backend])
        self.backend_mems[backend], self.backend_options[backend] = mems, options
        logger.info("Backend %s was instantiated", backend)

    # ---- memory ----

    def register_memory(self, reg_list, mem_type=None, backends=[]):
        descs = self.get_reg_descs(reg_list, mem_type)
        self.agent.registerMem(descs, self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list, backends=[]):
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(self, reg_list, backend, mem_type=None):
        descs = self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError("Backend '%s' not found. Available backends: %s"
                             % (backend, list(self.backends)))
        return self.agent.queryMem(descs, self.backends[backend])

    def make_connection(self, remote_agent, backends=[]):
        self.agent.makeConnection(remote_agent, self._handles(backends))

    # ---- descriptors ----

    def _from_tensors(self, tensors, kind):
        """None, with a log line, if it cannot be described."""
        rows = []
        for tensor in tensors:
            if tensor.device != tensors[0].device:
                return None
            if not tensor.is_contiguous():
                logger.error("Please use a list of contiguous Tensors")
                return None
            rows.append((tensor.data_ptr(), tensor.numel() * tensor.element_size(),
                         max(tensor.get_device(), 0)))
        mem = "DRAM" if tensors[0].get_device() == -1 else "VRAM"
        return kind(self.nixl_mems[mem], np.array(rows, np.uint64).reshape(-1, 3))

    def _descs(self, descs, mem_type, kind, wrong, width):
        if isinstance(descs, kind):
            return descs
        if isinstance(descs, wrong):
            logger.error("%s type detected, please use %s", wrong.__name__, kind.__name__)
            return None
        if _is_tensor(descs):
            return self._from_tensors([descs], kind)
        if not isinstance(descs, np.ndarray) and _is_tensor(descs[0]):
            return self._from_tensors(descs, kind)
        is_array = isinstance(descs, np.ndarray)
        if not is_array and not isinstance(descs[0], tuple):
            return None
        if is_array and not len(descs):
            raise IndexError("an empty array has no descriptors")
        if mem_type is None:
            logger.error("Please specify a mem type if not using Tensors")
            return None
        if is_array and (descs.ndim != 2 or descs.shape[1] != 3):
            logger.error("Nx3 shape required for a descriptor list from a numpy array")
            return None
        if not is_array and len(descs[0]) != width:
            logger.error("%d-tuple list needed", width)
            return None
        return kind(self.nixl_mems[mem_type], descs)

    def get_xfer_descs(self, descs, mem_type=None):
        """From 3-tuples, tensors, an Nx3 array, or a list, which is returned unchanged."""
        return self._descs(descs, mem_type, nixlBind.nixlXferDList, nixlBind.nixlRegDList, 3)

    def get_reg_descs(self, descs, mem_type=None):
        """From 4-tuples, tensors, an Nx3 array, or a list, which is returned unchanged."""
        return self._descs(descs, mem_type, nixlBind.nixlRegDList, nixlBind.nixlXferDList, 4)

    def get_remote_descs(self, descs, mem_type=None):
        """From 4-tuples with an agent's name, or a list, which is returned unchanged."""
        if isinstance(descs, nixlBind.nixlRemoteDList):
            return descs
        if not isinstance(descs[0], tuple):
            return None
        if mem_type is None or len(descs[0]) != 4:
            logger.error("4-tuples with an agent's name, and a mem type, are needed")
            return None
        return nixlBind.nixlRemoteDList(self.nixl_mems[mem_type], descs)

    def get_serialized_descs(self, descs):
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs):
        return _Unpickler(io.BytesIO(serialized_descs)).load()

    # ---- transfers ----

    def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, backends=[]):
        """agent "" or "NIXL_INIT_AGENT": own memory, the local side; own name: as the remote side.
        An Nx5 array is (address, length, device, stride, count)."""
        if agent_name == "NIXL_INIT_AGENT" or agent_name == b"NIXL_INIT_AGENT":
            agent_name = nixlBind.NIXL_INIT_AGENT
        handles = self._handles(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and \
                xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("Please specify a mem type for strided descriptors")
            number = self.agent.prepXferDlist(agent_name, self.nixl_mems[mem_type], xfer_list,
                                              handles)
        else:
            number = self.agent.prepXferDlist(
                agent_name, self.get_xfer_descs(xfer_list, mem_type), handles)
        return nixl_prepped_dlist_handle(self.agent, number)

    def make_prepped_xfer(self, operation, local_xfer_side, local_indices, remote_xfer_side,
                          remote_indices, notif_msg=b"", backends=[], skip_desc_merge=False):
        return nixl_xfer_handle(self.agent, self.agent.makeXferReq(
            self.nixl_ops[operation], local_xfer_side._handle, local_indices,
            remote_xfer_side._handle, remote_indices, notif_msg,
            self._handles(backends) if backends else (), skip_desc_merge))

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent,
                        notif_msg=b"", backends=[]):
        return nixl_xfer_handle(self.agent, self.agent.createXferReq(
            self.nixl_ops[operation], local_descs, remote_descs, remote_agent, notif_msg,
            self._handles(backends)))

    def transfer(self, handle, notif_msg=b""):
        """"DONE" or "PROC"; other states raise."""
        status = self.agent.postXferReq(handle._handle, notif_msg)
        return "DONE" if status == _SUCCESS else "PROC" if status == _IN_PROG else "ERR"

    def check_xfer_state(self, handle):
        """"DONE" or "PROC"; a failure raises, each time with the same text."""
        status = self.agent.getXferStatus(handle._handle)
        if status is _SUCCESS:
            return "DONE"
        if status is _IN_PROG:
            return "PROC"
        return "DONE" if status == _SUCCESS else "PROC" if status == _IN_PROG else "ERR"

    def get_xfer_telemetry(self, handle):
        return self.agent.getXferTelemetry(handle._handle)

    def estimate_xfer_cost(self, req_handle):
        duration, margin, method = self.agent.estimateXferCost(req_handle._handle)
        return duration, margin, "ANALYTICAL_BACKEND" \
            if method == nixlBind.NIXL_COST_ANALYTICAL_BACKEND else "UNKNOWN"

    def query_xfer_backend(self, handle):
        number = self.agent.queryXferBackend(handle._handle)
        return next(name for name, backend in self.backends.items() if backend == number)

    def release_xfer_handle(self, handle):
        handle.release()

    def release_dlist_handle(self, handle):
        handle.release()

    def prep_mem_view(self, dlist, *, backends=None):
        return self.agent.prepMemView(dlist, self._handles(backends))

    def release_mem_view(self, mvh):
        self.agent.releaseMemView(mvh)

    # ---- notifications ----

    def get_new_notifs(self, backends=[]):
        """{agent: [bytes]}; removes them."""
        return self.agent.getNotifs({}, self._handles(backends) if backends else ())

    def update_notifs(self, backends=[]):
        """self.notifs, with the new ones added."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(self, remote_agent_name, lookup_tag, backends=[],
                               tag_is_prefix=True):
        """Whether a notification with the tag was received; removes it."""
        self.update_notifs(backends)
        if not isinstance(lookup_tag, (bytes, bytearray)):
            raise TypeError("lookup_tag: bytes, not %s" % type(lookup_tag).__name__)
        if isinstance(remote_agent_name, bytes):
            remote_agent_name = remote_agent_name.decode("utf-8", "surrogateescape")
        waiting = self.notifs.get(remote_agent_name, [])
        for i, message in enumerate(waiting):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del waiting[i]
                return True
        return False

    def send_notif(self, remote_agent_name, notif_msg, backend=None):
        self.agent.genNotif(remote_agent_name, notif_msg,
                            () if backend is None else [self.backends[backend]])

    # ---- metadata ----

    def get_agent_metadata(self):
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(self, descs, inc_conn_info=False, backends=[]):
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata):
        """The agent's name, as bytes. Metadata of a restarted agent replaces the old."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent):
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr="", port=DEFAULT_COMM_PORT):
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(self, descs, inc_conn_info=False, backends=[],
                                    ip_addr="", port=DEFAULT_COMM_PORT, label=""):
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr,
                                      port, label)

    def fetch_remote_metadata(self, remote_agent, ip_addr="", port=DEFAULT_COMM_PORT,
                              label=""):
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def get_listen_port(self):
        """The listener's port, which the system chose if it was 0."""
        return self.agent.getListenPort()

    def invalidate_local_metadata(self, ip_addr="", port=DEFAULT_COMM_PORT):
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent, descs=None):
        """Whether its metadata, and that of descs, is loaded; not whether the agent is alive."""
        if descs is None:
            descs = nixlBind.nixlXferDList(nixlBind.DRAM_SEG)
        return self.agent.checkRemoteMD(agent, descs) == _SUCCESS
