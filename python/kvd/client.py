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
INT64 = (1 << 63) - 1  # limit of addresses, lengths and offsets


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
    """Registered regions with a layout, made by Client.pool()."""

    def __init__(self, client, layout, regions, name=None, timeout=None):
        self._pool = _kvd.Pool(client._kvd, _check.text("name", name), _layout_text(layout),
                               _parts(regions), _check.seconds("timeout", timeout))

    @property
    def id(self):
        """Pool id in the daemon; 0 while the pool is not registered."""
        return self._pool.id

    def unregister(self, timeout=None):
        """Unregister the pool. BusyError while rooms use it."""
        self._pool.unregister(_check.seconds("timeout", timeout))


class Client:
    """A session with a daemon. All threads may share it; a child of fork() may not use it.

    socket: path of the control socket. name: instance name. Without either, KVD_SOCKET, then
    KVD_NAME, then the only socket in KVD_RUN_DIR or /run/kvd is used. If no daemon answers and
    KVD_AUTOSTART=1, a private daemon is started (kvd.daemon). client: name of this engine in
    logs and kvd-ctl, default the program's name. role: "prefill", "decode" or None. timeout:
    default timeout of a call, in seconds.

    After a restart of the daemon the next call opens a new session and registers the same
    regions and pools again. It waits at most its timeout and then raises ConnectionError (ELOST,
    retryable). Rooms of the old session have failed."""

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
        """End the session: abort its rooms and moves, release its regions."""
        self._kvd.close()

    @property
    def closed(self):
        """Whether close() was called."""
        return self._kvd.closed

    @property
    def lost(self):
        """Whether the session is lost; the next call opens a new one."""
        return self._kvd.lost()

    @property
    def info(self):
        """The daemon's reply to hello: endpoint, instance, session, epoch…"""
        return self._kvd.info()

    @property
    def endpoint(self):
        """Address at which other daemons reach this daemon."""
        return self.info["endpoint"]

    @property
    def session(self):
        """Id of this engine among the sessions of its daemon, for Source(session=). It changes
        when the daemon restarts."""
        return self.info["epoch"]

    def command(self, cmd, timeout=None, **args):
        """Send any command of the control protocol. -> the reply as a dict"""
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
            raise ValueError("address: %#x + nbytes %d exceeds user memory"
                             % (address, nbytes))
        return _kvd.Region(
            self._kvd, kind, nbytes, address, _check.integer("fd", fd, -1, (1 << 31) - 1),
            _check.integer("offset", offset, 0, INT64), _check.text("shm_name", shm_name),
            _check.text("name", name), keep, _check.seconds("timeout", timeout),
            device=_check.text("device", device), handle=handle,
            allocation=_check.integer("allocation", allocation, 0, INT64))

    def register(self, memory, *, name=None, adopt_memory=True, timeout=None):
        """Register memory with the daemon: a numpy array, a torch tensor, a Memory, a writable
        buffer, or an object with CUDA's array interface. It must be contiguous. The object is
        kept alive until the region is unregistered."""
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
        """Register memory by address. It is adopted (moved behind a memfd) where that is safe;
        else the daemon copies it through the kernel (`vm`)."""
        nbytes = _check.integer("nbytes", nbytes, 1, INT64)
        address = _check.integer("address", address, 1, INT64 - nbytes)
        _check.text("name", name)
        _check.seconds("timeout", timeout)
        why = adopt(address, nbytes) if _check.flag("adopt_memory", adopt_memory) \
            else "not asked for"
        if why:
            log.info("%d bytes at %#x not adopted, registered as vm: %s", nbytes, address, why)
        return self._region("vm", nbytes, address, name=name, keep=keep, timeout=timeout)

    def register_fd(self, fd, nbytes, *, offset=0, address=0, name=None, keep=None,
                    seal=True, timeout=None):
        """Register a memfd. address: where this process maps it, for transfers by address.
        seal=False: the memfd cannot be sealed, or is a file on tmpfs; RDMA cannot use it."""
        return self._region("memfd" if seal else "shm", nbytes, address, _check.integer("fd", fd, 0, (1 << 31) - 1),
                            offset, name=name, keep=keep, timeout=timeout)

    def register_gpu(self, address, nbytes, *, name=None, keep=None, timeout=None):
        """Register GPU memory by address: memory of cudaMalloc or cuMemAlloc, or a part of it
        from an allocator."""
        nbytes = _check.integer("nbytes", nbytes, 1, INT64)
        address = _check.integer("address", address, 1, INT64 - nbytes)
        piece = cuda.describe(address, nbytes)
        return self._region("cuda_ipc", nbytes, address, offset=piece.offset, name=name,
                            keep=keep, timeout=timeout, device=piece.device,
                            handle=piece.handle)

    def register_gpu_fd(self, fd, nbytes, *, device, allocation, offset=0, address=0,
                        name=None, keep=None, timeout=None):
        """Register memory of cuMemCreate, exported as an fd. device: the GPU's UUID
        ("GPU-…") or PCI id; allocation: size given to cuMemCreate, in bytes."""
        return self._region("cuda_vmm", nbytes, address,
                            _check.integer("fd", fd, 0, (1 << 31) - 1), offset, name=name,
                            keep=keep, timeout=timeout,
                            device=_check.instance("device", device, str, "a str"),
                            allocation=allocation)

    def register_shm(self, shm_name, nbytes, *, offset=0, address=0, name=None, timeout=None):
        """Register POSIX shared memory by name."""
        return self._region("shm", nbytes, address, offset=offset,
                            shm_name=_check.instance("shm_name", shm_name, str, "a str"),
                            name=name, timeout=timeout)

    def pool(self, layout, regions, *, name=None, timeout=None):
        """Register a pool: one region, or (region, offset), for each buffer of the layout (a
        kvd.Layout, a dict, or JSON text). Pools with equal names match; None: "kv"."""
        return Pool(self, layout, regions, name, timeout)

    def states(self, rooms, out):
        """Write the states of a list of rooms to `out`, a writable int32 buffer with one entry
        per room: out[i] is rooms[i].state, kvd.CLOSED if the room is closed. One call, without
        an object per room. -> number of rooms that have ended or are closed"""
        if not isinstance(rooms, list):
            raise _check.wrong("rooms", rooms, "a list of kvd.Room")
        at = out if isinstance(out, np.ndarray) else np.asarray(memoryview(out))
        if at.dtype != np.int32 or at.ndim != 1 or not at.flags.c_contiguous:
            raise _check.wrong("out", out, "contiguous memory of int32")
        if not at.flags.writeable or len(at) < len(rooms):
            raise ValueError("out: %d int32%s; %d rooms need a writable int32 each" % (
                len(at), "" if at.flags.writeable else ", read-only", len(rooms)))
        return _kvd.states(rooms, at.__array_interface__["data"][0])

    # ---- chunks ----

    def space(self, pool, *, model, scheme, tokens, revision=None, rope=None, views=None,
              timeout=None):
        """Open a space for chunks of `tokens` tokens, with the layout of a pool or a Layout
        alone. Engines share chunks if these are equal: model, revision (of weights and adapters),
        scheme (how ids are computed: hash, seed, block size), rope (position encoding, if the
        model does not imply it), tokens, and the kinds of fields. views: names of the views that
        a chunk has; None: all but "aux". BusyError: the chunk memory is being prepared.
        -> kvd.Space"""
        return Space(self, pool, model=model, scheme=scheme, tokens=tokens,
                     revision=revision, rope=rope, views=views, timeout=timeout)

    def attend(self, *, rows, heads, dqk, dv, kind, q_type, kv_type, scale, key, value=None,
               key_scale=None, value_scale=None, seats=1, kv_heads=1, first_head=0, softcap=0.0,
               view=None, rope=None, out_type="fp32", timeout=None):
        """Open buffers ("seats") for query rows that attend to chunks in place. rows: rows of a
        seat, query tokens x heads; kind: "mla" (one latent per token, its first dv values are v)
        or "gqa"; q_type, kv_type: "bf16", "fp16", "fp32" or "fp8_e4m3" (scales of K and V of a
        tensor or of a KV head are the caller's: times q and o); dqk, dv: values of a query row or
        key, and of a v row; key, value: fields of the layout; key_scale, value_scale: those with
        a scale of fp8 for each head of a token, float32 (mla: key_scale alone); rope: a kvd.Rope,
        to attend to chunks at positions other than those they were computed at; out_type: "fp32"
        or "bf16", in which other daemons send the output. -> kvd.Attend"""
        return Attend(self, rows=rows, heads=heads, dqk=dqk, dv=dv, kind=kind, q_type=q_type,
                      kv_type=kv_type, scale=scale, key=key, value=value,
                      key_scale=key_scale, value_scale=value_scale, seats=seats,
                      kv_heads=kv_heads, first_head=first_head, softcap=softcap, view=view,
                      rope=rope, out_type=out_type, timeout=timeout)

    def cost_page(self, timeout=None):
        """The daemon's measurements of its peers, as input of decisions. -> kvd.cost.Page, a
        live view that follows the daemon's updates"""
        return Page(_kvd.cost_open(self._kvd, _check.seconds("timeout", timeout)))

    def chunk_events(self):
        """Changes of this user's chunks, in all of its spaces, for publication to routers.
        -> kvd.ChunkEvents; its read() never blocks"""
        return ChunkEvents(self)

    # ---- rooms: the number is the router's; *_ms: 0 means the daemon's default.
    # request_id (1 to 128 visible ASCII characters without " and \) and traceparent (W3C)
    # appear in kvd-ctl and in the log; those of recv and pull also at the other side.
    # ticket: a secret of the room, equal on both sides, from the process that chose the number
    # (secrets.token_hex(16)); requests without it are refused. peers: only these daemons, by
    # their names in curve_allow_file. With neither: daemons of this daemon's user.
    # post: this room's calls never wait; see Room.

    def send(self, room, pool, *, bootstrap_ms=0, waiting_ms=0, stall_ms=0, request_id=None,
             traceparent=None, ticket=None, peers=(), timeout=None, post=False):
        """Push, prefill side: wait for WAITING_FOR_INPUT, then Room.send() chunks."""
        return Room(self, room, SEND, pool, bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms,
                    stall_ms=stall_ms, request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)

    def recv(self, room, pool, sources, *, receivers=0, bootstrap_ms=0, waiting_ms=0,
             stall_ms=0, request_id=None, traceparent=None,
             ticket=None, peers=(), timeout=None, post=False):
        """Push, decode side: then Room.bind() pages. sources: a list of endpoints or
        kvd.Source, one for each prefill rank; receivers: number of decode ranks that each of
        them serves, 0: one."""
        return Room(self, room, RECV, pool, sources=sources, receivers=receivers,
                    bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms, stall_ms=stall_ms,
                    request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)

    def offer(self, room, pool, views, *, receivers=0, receivers_from_pullers=False, aux=None,
              wait=None, lease_ms=0, bootstrap_ms=0,
              waiting_ms=0, stall_ms=0, request_id=None, traceparent=None,
              ticket=None, peers=(), timeout=None, post=False):
        """Pull, prefill side: pages that may be fetched for lease_ms. receivers: number of
        pullers, 0: one; receivers_from_pullers: the pullers send that number. wait: as in Room.bind();
        no page is read before."""
        return Room(self, room, OFFER, pool, views=views, receivers=receivers,
                    receivers_from_pullers=receivers_from_pullers, wait=wait, aux=aux,
                    lease_ms=lease_ms, bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms,
                    stall_ms=stall_ms, request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)

    def pull(self, room, pool, sources, views=None, *, receivers=0, aux=None,
             wait=None, bootstrap_ms=0, waiting_ms=0, stall_ms=0, request_id=None, traceparent=None,
             ticket=None, peers=(), timeout=None, post=False):
        """Pull, decode side: fetch the pages that sources (an endpoint, a kvd.Source, or a list
        of them) offer as this room into the pages of views. Without views the leases are kept
        until Room.bind(). receivers: number of pullers, 0: unknown. wait: as in
        Room.bind()."""
        return Room(self, room, PULL, pool, sources=pull_sources(sources), views=views,
                    receivers=receivers, aux=aux, wait=wait,
                    bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms, stall_ms=stall_ms,
                    request_id=request_id, traceparent=traceparent,
                    ticket=ticket, peers=peers, timeout=timeout, post=post)
