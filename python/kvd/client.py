# SPDX-License-Identifier: Apache-2.0
"""Client: one session with the daemon of this node."""
import json
import logging
import os
from collections.abc import Iterable, Mapping

import numpy as np

from . import _check, _kvd, cuda, daemon
from .attend import Attend
from .cost import Page
from .chunks import ChunkEvents, Space
from .layout import Layout
from .memory import Memory, adopt, memory_of
from .rooms import OFFER, PULL, RECV, SEND, Room, pull_sources

log = logging.getLogger("kvd.client")
INT64 = (1 << 63) - 1  # of addresses, lengths and offsets


def _layout_text(layout):
    if isinstance(layout, Layout):
        return layout.text()
    if isinstance(layout, Mapping):
        return json.dumps(layout)
    return _check.instance("layout", layout, str, "a kvd.Layout, a dict or JSON text")


def _parts(regions):
    if isinstance(regions, (str, bytes, Mapping)) or not isinstance(regions, Iterable):
        raise _check.wrong("regions", regions, "a list of kvd.Region or (kvd.Region, offset)")
    parts = []
    for i, part in enumerate(regions):
        region, offset = part if isinstance(part, tuple) and len(part) == 2 else (part, 0)
        parts.append((_check.instance("regions[%d]" % i, region, _kvd.Region,
                                      "a kvd.Region or (kvd.Region, offset)"),
                      _check.integer("regions[%d][1]" % i, offset, 0, INT64)))
    return tuple(parts)


class Pool:
    """Regions with a layout. Of Client.pool()."""

    def __init__(self, client, layout, regions, name=None, timeout=None):
        self._pool = _kvd.Pool(client._kvd, _check.text("name", name), _layout_text(layout),
                               _parts(regions), _check.seconds("timeout", timeout))

    @property
    def id(self):
        """The daemon's number of it; 0: not registered now."""
        return self._pool.id

    def unregister(self, timeout=None):
        """BusyError while rooms use it."""
        self._pool.unregister(_check.seconds("timeout", timeout))


class Client:
    """A session. Any number of threads may use it; a child of fork() may not.

    socket: path of the control socket; name: of the instance. Neither: KVD_SOCKET, KVD_NAME, else
    the only socket in KVD_RUN_DIR or /run/kvd; with KVD_AUTOSTART=1, when none answers, a
    daemon of this process's own (kvd.daemon). client: what this engine calls itself, the
    program's name if absent; role: "prefill", "decode" or None. timeout: seconds, of every
    call.

    When the daemon is restarted the next call makes a new session and registers the same
    regions and pools again, waiting for it at most its timeout; ConnectionError (ELOST,
    retryable) when there is none by then. Rooms of the old session have failed."""

    def __init__(self, socket=None, *, name=None, client=None, role=None, timeout=None):
        if isinstance(socket, os.PathLike):
            socket = os.fspath(socket)
        self._kvd = daemon.session(_check.text("socket", socket), _check.text("name", name),
                                   _check.text("client", client) or daemon.caller(),
                                   _check.text("role", role),
                                   _check.seconds("timeout", timeout))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        """End the session: what runs is aborted, regions are dropped."""
        self._kvd.close()

    @property
    def closed(self):
        """close() was called."""
        return self._kvd.closed

    @property
    def lost(self):
        """There is no session now; the next call makes another."""
        return self._kvd.lost()

    @property
    def info(self):
        """What the daemon told of itself: endpoint, instance, session, epoch…"""
        return self._kvd.info()

    @property
    def endpoint(self):
        """What other daemons dial to reach this one's."""
        return self.info["endpoint"]

    @property
    def session(self):
        """Names this engine among those of its daemon, for Source(session=); another one
        after the daemon was restarted."""
        return self.info["epoch"]

    def command(self, cmd, timeout=None, **args):
        """Any command of the control protocol; its answer as a dict."""
        _check.instance("cmd", cmd, str, "a str")
        answer = self._kvd.command(cmd, json.dumps(args) if args else None,
                                   _check.seconds("timeout", timeout))
        return json.loads(answer) if answer else {}

    # ---- memory ----

    def _region(self, kind, nbytes, address=0, fd=-1, offset=0, shm_name=None, name=None,
                keep=None, timeout=None, device=None, handle=None, allocation=0):
        nbytes = _check.integer("nbytes", nbytes, 1, INT64)
        address = _check.integer("address", address, 0, INT64)
        if address > INT64 - nbytes:
            raise ValueError("address: %#x + nbytes %d is beyond user memory"
                             % (address, nbytes))
        return _kvd.Region(
            self._kvd, kind, nbytes, address, _check.integer("fd", fd, -1, (1 << 31) - 1),
            _check.integer("offset", offset, 0, INT64), _check.text("shm_name", shm_name),
            _check.text("name", name), keep, _check.seconds("timeout", timeout),
            device=_check.text("device", device), handle=handle,
            allocation=_check.integer("allocation", allocation, 0, INT64))

    def register(self, memory, *, name=None, adopt_memory=True, timeout=None):
        """Hand memory to the daemon: a numpy array, a tensor of torch, a Memory, writable
        memory with the buffer protocol, or what has CUDA's array interface. It must be
        contiguous. The object is kept alive until it is unregistered."""
        if isinstance(memory, Memory):
            return self._region("memfd", memory.nbytes, memory.address, memory.fd, name=name,
                                keep=memory, timeout=timeout)
        address, nbytes, gpu = memory_of(memory)
        if gpu:
            return self.register_gpu(address, nbytes, name=name, keep=memory, timeout=timeout)
        return self.register_address(address, nbytes, name=name, keep=memory,
                                     adopt_memory=adopt_memory, timeout=timeout)

    def register_address(self, address, nbytes, *, name=None, keep=None, adopt_memory=True,
                         timeout=None):
        """The same by address: adopted where that is safe, else copied through the
        kernel (`vm`)."""
        nbytes = _check.integer("nbytes", nbytes, 1, INT64)
        address = _check.integer("address", address, 1, INT64 - nbytes)
        _check.text("name", name)
        _check.seconds("timeout", timeout)
        why = adopt(address, nbytes) if _check.flag("adopt_memory", adopt_memory) \
            else "not asked for"
        if why:
            log.info("%d bytes at %#x stay where they are (vm): %s", nbytes, address, why)
        return self._region("vm", nbytes, address, name=name, keep=keep, timeout=timeout)

    def register_fd(self, fd, nbytes, *, offset=0, address=0, name=None, keep=None,
                    seal=True, timeout=None):
        """A memfd. address: where this process has it mapped, for transfers by address.
        seal=False: one that cannot be sealed, or other memory on tmpfs: no RDMA adapter has it."""
        return self._region("memfd" if seal else "shm", nbytes, address, _check.integer("fd", fd, 0, (1 << 31) - 1),
                            offset, name=name, keep=keep, timeout=timeout)

    def register_gpu(self, address, nbytes, *, name=None, keep=None, timeout=None):
        """Memory of a GPU, by its address: of cudaMalloc, cuMemAlloc, or of an allocator
        that cut it out of such."""
        nbytes = _check.integer("nbytes", nbytes, 1, INT64)
        address = _check.integer("address", address, 1, INT64 - nbytes)
        piece = cuda.describe(address, nbytes)
        return self._region("cuda_ipc", nbytes, address, offset=piece.offset, name=name,
                            keep=keep, timeout=timeout, device=piece.device,
                            handle=piece.handle)

    def register_gpu_fd(self, fd, nbytes, *, device, allocation, offset=0, address=0,
                        name=None, keep=None, timeout=None):
        """Memory of cuMemCreate, by the fd that it was exported as. device: its UUID
        ("GPU-…") or PCI id; allocation: what cuMemCreate was given."""
        return self._region("cuda_vmm", nbytes, address,
                            _check.integer("fd", fd, 0, (1 << 31) - 1), offset, name=name,
                            keep=keep, timeout=timeout,
                            device=_check.instance("device", device, str, "a str"),
                            allocation=allocation)

    def register_shm(self, shm_name, nbytes, *, offset=0, address=0, name=None, timeout=None):
        """POSIX shared memory, by its name."""
        return self._region("shm", nbytes, address, offset=offset,
                            shm_name=_check.instance("shm_name", shm_name, str, "a str"),
                            name=name, timeout=timeout)

    def pool(self, layout, regions, *, name=None, timeout=None):
        """Regions, or (region, offset), one for each buffer of the layout (a kvd.Layout, a
        dict, or JSON text). Pools of one name are meant to match; None: "kv"."""
        return Pool(self, layout, regions, name, timeout)

    def states(self, rooms, out):
        """The states of a list of rooms into `out`, writable memory of at least as many
        int32: out[i] is rooms[i].state, kvd.CLOSED where the room is closed. One call and
        no object per room. How many have ended or are closed."""
        if not isinstance(rooms, list):
            raise _check.wrong("rooms", rooms, "a list of kvd.Room")
        at = out if isinstance(out, np.ndarray) else np.asarray(memoryview(out))
        if at.dtype != np.int32 or at.ndim != 1 or not at.flags.c_contiguous:
            raise _check.wrong("out", out, "contiguous memory of int32")
        if not at.flags.writeable or len(at) < len(rooms):
            raise ValueError("out: %d int32%s, %d rooms want as many that can be written" % (
                len(at), "" if at.flags.writeable else ", read-only", len(rooms)))
        return _kvd.states(rooms, at.__array_interface__["data"][0])

    # ---- chunks ----

    def space(self, pool, *, model, scheme, tokens, revision=None, rope=None, views=None,
              timeout=None):
        """Chunks of `tokens` tokens, with the layout of a pool, or a Layout alone. Engines
        share them whose model, revision (of weights and adapters), scheme (how ids are made:
        hash, seed, block size), rope (how positions are encoded, where the model does not
        say it), tokens and kinds of fields are equal. views: names of those that a chunk
        has, None: all but "aux". BusyError: the daemon's memory for chunks is being made.
        -> kvd.Space"""
        return Space(self, pool, model=model, scheme=scheme, tokens=tokens,
                     revision=revision, rope=rope, views=views, timeout=timeout)

    def attend(self, *, rows, heads, dqk, dv, kind, q_type, kv_type, scale, key, value=None,
               seats=1, kv_heads=1, first_head=0, softcap=0.0, view=None, rope=None,
               timeout=None):
        """Seats for query rows that attend to chunks where they are. rows: of a seat, query
        tokens x heads; kind: "mla" (one latent a token, whose first dv values are v) or
        "gqa"; q_type, kv_type: "bf16", "fp16", "fp32"; dqk, dv: values of a query row and
        key, and of a v; key, value: the layout's fields; rope: a kvd.Rope, for chunks at
        other places than where they were computed. -> kvd.Attend"""
        return Attend(self, rows=rows, heads=heads, dqk=dqk, dv=dv, kind=kind, q_type=q_type,
                      kv_type=kv_type, scale=scale, key=key, value=value, seats=seats,
                      kv_heads=kv_heads, first_head=first_head, softcap=softcap, view=view,
                      rope=rope, timeout=timeout)

    def cost_page(self, timeout=None):
        """What the daemon measures of its peers, to decide by. -> kvd.cost.Page, which goes on
        changing with it"""
        return Page(_kvd.cost_open(self._kvd, _check.seconds("timeout", timeout)))

    def chunk_events(self):
        """Which chunks of this user, in all of its spaces, came and went: for who tells
        routers what can be had here. -> kvd.ChunkEvents, whose read() never waits for any"""
        return ChunkEvents(self)

    # ---- rooms: the number is the router's; *_ms: 0 means the daemon's default.
    # request_id (1 to 128 visible ASCII characters without " and \) and traceparent (W3C)
    # are shown by kvd-ctl and in the log; those of recv and pull also at the other side.
    # ticket (secrets.token_hex(16), of whoever chose the number): the same on both sides;
    # who asks for the room without it is refused. peers: no daemon but these, by their
    # names in curve_allow_file. With neither: daemons of the own daemon's user.
    # post: this room's calls never wait; see Room.

    def send(self, room, pool, *, bootstrap_ms=0, waiting_ms=0, stall_ms=0, request_id=None,
             traceparent=None, ticket=None, peers=(), timeout=None, post=False):
        """Push, the prefill side: wait for WAITING_FOR_INPUT, then Room.send() chunks."""
        return Room(self, room, SEND, pool, bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms,
                    stall_ms=stall_ms, request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)

    def recv(self, room, pool, sources, *, receivers=0, bootstrap_ms=0, waiting_ms=0,
             stall_ms=0, request_id=None, traceparent=None,
             ticket=None, peers=(), timeout=None, post=False):
        """Push, the decode side: then Room.bind() pages. sources: a list of endpoints or
        kvd.Source, one for each prefill rank; receivers: how many decode ranks each of
        them serves, 0: one."""
        return Room(self, room, RECV, pool, sources=sources, receivers=receivers,
                    bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms, stall_ms=stall_ms,
                    request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)

    def offer(self, room, pool, views, *, receivers=0, receivers_told=False, aux=None,
              wait=None, lease_ms=0, bootstrap_ms=0,
              waiting_ms=0, stall_ms=0, request_id=None, traceparent=None,
              ticket=None, peers=(), timeout=None, post=False):
        """Pull, the prefill side: pages that may be fetched, for lease_ms. receivers: how
        many pullers, 0: one; receivers_told: they say it. wait: as in Room.bind(), nobody
        reads before."""
        return Room(self, room, OFFER, pool, views=views, receivers=receivers,
                    receivers_told=receivers_told, wait=wait, aux=aux,
                    lease_ms=lease_ms, bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms,
                    stall_ms=stall_ms, request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)

    def pull(self, room, pool, sources, views=None, *, receivers=0, aux=None,
             wait=None, bootstrap_ms=0, waiting_ms=0, stall_ms=0, request_id=None, traceparent=None,
             ticket=None, peers=(), timeout=None, post=False):
        """Pull, the decode side: what sources (an endpoint, a kvd.Source, or a list of them)
        offered as this room, into the pages of views. Without views the leases are kept
        until Room.bind(). receivers: how many pullers there are, 0: not told. wait: as in
        Room.bind()."""
        return Room(self, room, PULL, pool, sources=pull_sources(sources), views=views,
                    receivers=receivers, aux=aux, wait=wait,
                    bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms, stall_ms=stall_ms,
                    request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)
