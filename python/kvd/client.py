# SPDX-License-Identifier: Apache-2.0
"""Client: one session with the daemon of this node."""
import json
import logging

from . import _kvd, cuda
from .layout import Layout
from .memory import Memory, adopt, memory_of
from .rooms import OFFER, PULL, RECV, SEND, Room

log = logging.getLogger("kvd.client")


class Pool:
    """Regions with a layout."""

    def __init__(self, client, layout, regions, name=None, timeout=None,
                 on_done=None):
        text = layout.text() if isinstance(layout, Layout) else layout
        if not isinstance(text, str):
            text = json.dumps(text)
        parts = tuple(r if isinstance(r, tuple) else (r, 0) for r in regions)
        self._pool = _kvd.Pool(client._kvd, name, text, parts, timeout, on_done)

    @property
    def id(self):
        return self._pool.id

    def unregister(self, timeout=None):
        self._pool.unregister(timeout)


class Client:
    """A session. Any number of threads may use it; a child of fork() may not.

    socket: path of the control socket; name: of the instance. Neither: KVD_SOCKET, else
    the only socket in KVD_RUN_DIR or /run/kvd. timeout: seconds, of every call."""

    def __init__(self, socket=None, *, name=None, client="python", role=None, timeout=None):
        self._kvd = _kvd.Client(socket, name, client, role, timeout)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        """End the session: what runs is aborted, regions are dropped."""
        self._kvd.close()

    @property
    def closed(self):
        return self._kvd.closed

    @property
    def lost(self):
        """There is no session now; libkvd makes another as soon as it can."""
        return self._kvd.lost()

    @property
    def info(self):
        """What the daemon told of itself: endpoint, instance, session, epoch…"""
        return self._kvd.info()

    @property
    def endpoint(self):
        return self.info["endpoint"]

    def command(self, cmd, timeout=None, **args):
        """Any command of the control protocol; its answer as a dict."""
        answer = self._kvd.command(cmd, json.dumps(args) if args else None, timeout)
        return json.loads(answer) if answer else {}

    # ---- memory ----

    def register(self, memory, *, name=None, adopt_memory=True, timeout=None):
        """Hand memory to the daemon: a numpy array, a tensor of torch, a Memory, or what
        has CUDA's array interface. The object is kept alive until it is unregistered."""
        if isinstance(memory, Memory):
            return _kvd.Region(self._kvd, "memfd", memory.nbytes, memory.address, memory.fd,
                               0, None, name, memory, timeout)
        address, nbytes, gpu = memory_of(memory)
        if gpu:
            return self.register_gpu(address, nbytes, name=name, keep=memory, timeout=timeout)
        return self.register_address(address, nbytes, name=name, keep=memory,
                                     adopt_memory=adopt_memory, timeout=timeout)

    def register_address(self, address, nbytes, *, name=None, keep=None, adopt_memory=True,
                         timeout=None):
        """The same by address: adopted where that is safe, else copied through the
        kernel (`vm`)."""
        why = adopt(address, nbytes) if adopt_memory else "not asked for"
        if why:
            log.info("%d bytes at %#x stay where they are (vm): %s", nbytes, address, why)
        return _kvd.Region(self._kvd, "vm", nbytes, address, -1, 0, None, name, keep, timeout)

    def register_fd(self, fd, nbytes, *, offset=0, address=0, name=None, keep=None,
                    timeout=None):
        """A memfd."""
        return _kvd.Region(self._kvd, "memfd", nbytes, address, fd, offset, None, name, keep,
                           timeout)

    def register_gpu(self, address, nbytes, *, name=None, keep=None, timeout=None):
        """Memory of a GPU, by its address: of cudaMalloc, cuMemAlloc, or of an allocator
        that cut it out of such."""
        piece = cuda.describe(address, nbytes)
        return _kvd.Region(self._kvd, "cuda_ipc", nbytes, address, -1, piece.offset, None,
                           name, keep, timeout, device=piece.device, handle=piece.handle)

    def register_gpu_fd(self, fd, nbytes, *, device, allocation, offset=0, address=0,
                        name=None, keep=None, timeout=None):
        """Memory of cuMemCreate, by the fd that it was exported as. device: its UUID
        ("GPU-…") or PCI id; allocation: what cuMemCreate was given."""
        return _kvd.Region(self._kvd, "cuda_vmm", nbytes, address, fd, offset, None, name,
                           keep, timeout, device=device, allocation=allocation)

    def register_shm(self, shm_name, nbytes, *, offset=0, address=0, name=None, timeout=None):
        """POSIX shared memory, by its name."""
        return _kvd.Region(self._kvd, "shm", nbytes, address, -1, offset, shm_name, name,
                           None, timeout)

    def pool(self, layout, regions, *, name=None, timeout=None):
        """Regions, or (region, offset), one for each buffer of the layout."""
        return Pool(self, layout, regions, name, timeout)

    # ---- rooms ----

    def send(self, room, pool, **args):
        """Push, the prefill side."""
        return Room(self, room, SEND, pool, **args)

    def recv(self, room, pool, sources, **args):
        """Push, the decode side. sources: endpoints, or kvd.Source."""
        return Room(self, room, RECV, pool, sources=sources, **args)

    def offer(self, room, pool, views, **args):
        """Pull, the prefill side: pages that may be fetched."""
        return Room(self, room, OFFER, pool, views=views, **args)

    def pull(self, room, pool, source, views, **args):
        """Pull, the decode side."""
        return Room(self, room, PULL, pool, sources=[source], views=views, **args)
