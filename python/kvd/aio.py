# SPDX-License-Identifier: Apache-2.0
"""The same client for asyncio: no call blocks the loop.

Requests are sent at once; the loop watches the daemon's socket and completes the futures. A
room's state is read from shared memory, so waiting for one costs a timer. Without a session
calls raise ConnectionError (ELOST, retryable); the client reconnects by itself."""
import asyncio
import json

from . import _check, _kvd
from .client import Client
from .errors import Error
from .rooms import (BOOTSTRAPPING, FAILED, NOREPLY, OFFER, PULL, RECV, ROLES, SEND, SILENT,
                    SUCCESS, Silence, Status, aux_pack, pull_sources, room_error, room_pack,
                    sources_pack, views_pack, wait_pack)


class AsyncRoom:
    """Made by AsyncClient.send(), recv(), offer() or pull(): a kvd.Room with awaitable
    calls."""

    def __init__(self, client, number, role, pool, *, sources=(), receivers=0, views=None,
                 aux=None, wait=None, lease_ms=0, bootstrap_ms=0, waiting_ms=0, stall_ms=0,
                 request_id=None, traceparent=None, ticket=None, peers=(), timeout=None,
                 receivers_from_pullers=False):
        times = {"lease_ms": lease_ms, "bootstrap_ms": bootstrap_ms,
                 "waiting_ms": waiting_ms, "stall_ms": stall_ms}
        names = {"request_id": request_id, "traceparent": traceparent, "ticket": ticket}
        self._args, self._kwargs = room_pack(
            client._client._kvd, number, role, pool, sources_pack(sources), receivers, views,
            aux, wait, times, names, peers, timeout, receivers_from_pullers)
        self._client, self.number, self._role = client, self._args[1], role
        self._room = None

    async def open(self):
        """Used by the client's calls, which return an open room."""
        def make(on_done):
            self._room = _kvd.Room(*self._args, on_done=on_done, **self._kwargs)
        await self._client._ask(make)
        return self

    async def bind(self, views, aux=None, wait=None):
        """recv, pull: set the destination of the bytes; see kvd.Room.bind()."""
        args = views_pack(views), aux_pack(aux), wait_pack(wait)
        await self._client._ask(lambda f: self._room.bind(*args, on_done=f))

    async def extend(self, lease_ms):
        """offer: restart the lease; see kvd.Room.extend()."""
        lease_ms = _check.integer("lease_ms", lease_ms, 1, _check.U32)
        await self._client._ask(lambda f: self._room.extend(lease_ms, on_done=f))

    async def send(self, views, seq=0, last=True, aux=None, wait=None):
        """send: post one chunk; see kvd.Room.send()."""
        args = (_check.integer("seq", seq), views_pack(views), _check.flag("last", last),
                aux_pack(aux), wait_pack(wait))
        await self._client._ask(lambda f: self._room.send(*args, on_done=f))

    async def abort(self, reason="aborted"):
        """Abort the room. The state becomes FAILED once no byte of it can move."""
        _check.text("reason", reason)
        await self._client._ask(lambda f: self._room.abort(reason, on_done=f))

    async def close(self):
        """Close a room that has ended."""
        await self._client._ask(lambda f: self._room.close(on_done=f))

    @property
    def state(self):
        """The state: a read of shared memory, without a system call."""
        return self._room.state()

    def read(self):
        """State and counters, from shared memory."""
        return Status(*self._room.read())

    async def error(self):
        """Why the room failed or is aborting, as an exception; None otherwise."""
        status = self.read()
        if not status.error:
            return None
        if status.error == NOREPLY:
            return room_error(self.number, status, {"message": SILENT})
        try:
            record = await self._client.command("room.show", room=str(self.number),
                                                role=ROLES[self._role])
        except Error:  # the session has ended, and its record with it
            record = {}
        return room_error(self.number, status, record.get("error"))

    async def wait(self, state=SUCCESS):
        """Wait until the state is reached or passed. Raises error() if the room failed. A
        daemon that does not answer is logged."""
        state = _check.integer("state", state, BOOTSTRAPPING, SUCCESS)
        pause, silence = 50e-6, Silence(self)
        while True:
            now = self.state
            if now >= state:
                return now
            if now == FAILED:
                raise await self.error()
            silence.look()
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 2e-3)


class AsyncClient:
    """async with kvd.AsyncClient() as client: … Arguments as of kvd.Client."""

    def __init__(self, socket=None, *, name=None, client=None, role=None, timeout=None):
        self._args = (socket, name, client, role, timeout)
        self._client = None
        self._loop = self._fd = self._timer = None
        self._writing = False
        self._futures = set()

    async def __aenter__(self):
        socket, name, client, role, timeout = self._args
        self._loop = asyncio.get_running_loop()
        self._client = await self._loop.run_in_executor(
            None, lambda: Client(socket, name=name, client=client, role=role,
                                 timeout=timeout))
        self._watch()
        return self

    async def __aexit__(self, *exc):
        self._forget()
        if self._timer:
            self._timer.cancel()
        await self._loop.run_in_executor(None, self._client.close)
        for future in list(self._futures):
            future.cancel()

    def _forget(self):
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)
        self._fd, self._writing = None, False

    def _watch(self):
        """Each call may replace libkvd's socket and change the events that it waits for."""
        fd, events, ms = self._client._kvd.wants()
        writing = bool(events & 4) and fd >= 0
        if fd != (-1 if self._fd is None else self._fd) or writing != self._writing:
            self._forget()
            if fd >= 0:
                self._fd, self._writing = fd, writing
                self._loop.add_reader(fd, self._turn)
                if writing:
                    self._loop.add_writer(fd, self._turn)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if ms >= 0 or fd < 0:
            wait = max(ms, 1) / 1000 if ms >= 0 else 0.01
            self._timer = self._loop.call_later(min(wait, 1), self._turn)

    def _turn(self):
        if not self._client.closed:
            self._client._kvd.poll()
            self._watch()

    async def _ask(self, start):
        future = self._loop.create_future()
        self._futures.add(future)

        def done(answer, error):
            def settle():
                self._futures.discard(future)
                if future.done():
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(answer)
            self._loop.call_soon_threadsafe(settle)
        try:
            start(done)
        except BaseException:
            self._futures.discard(future)
            self._watch()  # the call may have started to connect
            raise
        self._watch()
        return await future

    @property
    def info(self):
        """The daemon's reply to hello: endpoint, instance, session, epoch…"""
        return self._client.info

    @property
    def endpoint(self):
        """Address at which other daemons reach this daemon."""
        return self._client.endpoint

    @property
    def session(self):
        """Id of this engine among the sessions of its daemon, for Source(session=)."""
        return self._client.session

    async def command(self, cmd, **args):
        """Send any command of the control protocol. -> the reply as a dict"""
        _check.instance("cmd", cmd, str, "a str")
        text = json.dumps(args) if args else None
        answer = await self._ask(lambda f: self._client._kvd.command(cmd, text, on_done=f))
        return json.loads(answer) if answer else {}

    async def register(self, memory, *, name=None, adopt_memory=True, timeout=None):
        """As kvd.Client.register(). Populating and adopting memory takes long, so it runs on a
        thread of the loop's executor."""
        return await self._loop.run_in_executor(
            None, lambda: self._client.register(memory, name=name, adopt_memory=adopt_memory,
                                                timeout=timeout))

    async def pool(self, layout, regions, *, name=None, timeout=None):
        """As kvd.Client.pool(), on a thread of the loop's executor."""
        return await self._loop.run_in_executor(
            None, lambda: self._client.pool(layout, regions, name=name, timeout=timeout))

    async def send(self, room, pool, *, bootstrap_ms=0, waiting_ms=0, stall_ms=0,
                   request_id=None, traceparent=None,
                   ticket=None, peers=()):
        """Push, prefill side; see kvd.Client.send()."""
        return await AsyncRoom(self, room, SEND, pool, bootstrap_ms=bootstrap_ms,
                               waiting_ms=waiting_ms, stall_ms=stall_ms, request_id=request_id,
                               traceparent=traceparent, ticket=ticket, peers=peers).open()

    async def recv(self, room, pool, sources, *, receivers=0, bootstrap_ms=0, waiting_ms=0,
                   stall_ms=0, request_id=None, traceparent=None,
                   ticket=None, peers=()):
        """Push, decode side; see kvd.Client.recv()."""
        return await AsyncRoom(self, room, RECV, pool, sources=sources, receivers=receivers,
                               bootstrap_ms=bootstrap_ms, waiting_ms=waiting_ms,
                               stall_ms=stall_ms, request_id=request_id,
                               traceparent=traceparent, ticket=ticket, peers=peers).open()

    async def offer(self, room, pool, views, *, receivers=0, receivers_from_pullers=False, aux=None,
                    wait=None, lease_ms=0,
                    bootstrap_ms=0, waiting_ms=0, stall_ms=0, request_id=None, traceparent=None,
                    ticket=None, peers=()):
        """Pull, prefill side; see kvd.Client.offer()."""
        return await AsyncRoom(self, room, OFFER, pool, views=views, receivers=receivers,
                               receivers_from_pullers=receivers_from_pullers, wait=wait,
                               aux=aux, lease_ms=lease_ms, bootstrap_ms=bootstrap_ms,
                               waiting_ms=waiting_ms, stall_ms=stall_ms, request_id=request_id,
                               traceparent=traceparent, ticket=ticket, peers=peers).open()

    async def pull(self, room, pool, sources, views=None, *, receivers=0, aux=None,
                   wait=None, bootstrap_ms=0, waiting_ms=0, stall_ms=0, request_id=None, traceparent=None,
                   ticket=None, peers=()):
        """Pull, decode side; see kvd.Client.pull()."""
        return await AsyncRoom(self, room, PULL, pool, sources=pull_sources(sources), views=views,
                               receivers=receivers,
                               aux=aux, wait=wait, bootstrap_ms=bootstrap_ms,
                               waiting_ms=waiting_ms, stall_ms=stall_ms, request_id=request_id,
                               traceparent=traceparent, ticket=ticket, peers=peers).open()
