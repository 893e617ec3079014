# SPDX-License-Identifier: Apache-2.0
"""The same client for asyncio: nothing blocks the loop.

Requests are written at once; the loop watches the daemon's socket and completes the
futures. A room's state is read from shared memory, so waiting for one costs a timer."""
import asyncio
import json

from . import _kvd
from .client import Client
from .errors import error_make
from .rooms import (FAILED, OFFER, PULL, RECV, SEND, SUCCESS, Status, sources_pack,
                    views_pack)


class AsyncRoom:
    def __init__(self, client, number, role, pool, sources=None, views=None, **args):
        self._client, self.number = client, number
        self._args = (client._client._kvd, number, role, pool._pool)
        self._kwargs = dict(args, sources=sources_pack(sources), views=views_pack(views))
        self._room = None

    async def open(self):
        def make(on_done):
            self._room = _kvd.Room(*self._args, on_done=on_done, **self._kwargs)
        await self._client._ask(make)
        return self

    async def bind(self, views, aux=None, wait=None):
        await self._client._ask(lambda f: self._room.bind(views_pack(views), aux, wait,
                                                         on_done=f))

    async def send(self, views, seq=0, last=True, aux=None, wait=None):
        await self._client._ask(lambda f: self._room.send(seq, views_pack(views), last, aux,
                                                         wait, on_done=f))

    async def abort(self, reason="aborted"):
        await self._client._ask(lambda f: self._room.abort(reason, on_done=f))

    async def close(self):
        await self._client._ask(lambda f: self._room.close(on_done=f))

    @property
    def state(self):
        return self._room.state()

    def read(self):
        return Status(*self._room.read())

    async def wait(self, state=SUCCESS):
        pause = 50e-6
        while True:
            now = self.state
            if now >= state:
                return now
            if now == FAILED:
                status = self.read()
                raise error_make(status.error, _kvd.code_name(status.error),
                                 status.retryable, "room", "room %d failed" % self.number)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 2e-3)


class AsyncClient:
    """async with kvd.AsyncClient() as client: …"""

    def __init__(self, *args, **kwargs):
        self._args, self._kwargs, self._client = args, kwargs, None
        self._loop = self._fd = self._timer = None
        self._writing = False
        self._futures = set()

    async def __aenter__(self):
        self._loop = asyncio.get_running_loop()
        self._client = await self._loop.run_in_executor(
            None, lambda: Client(*self._args, **self._kwargs))
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
        """libkvd's socket, and what it waits to write, may be another after each call."""
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
            raise
        self._watch()
        return await future

    @property
    def info(self):
        return self._client.info

    @property
    def endpoint(self):
        return self._client.endpoint

    async def command(self, cmd, **args):
        text = json.dumps(args) if args else None
        answer = await self._ask(lambda f: self._client._kvd.command(cmd, text, on_done=f))
        return json.loads(answer) if answer else {}

    async def register(self, memory, **args):
        """Populating and adopting memory takes long: on a thread of the loop's executor."""
        return await self._loop.run_in_executor(
            None, lambda: self._client.register(memory, **args))

    async def pool(self, layout, regions, **args):
        return await self._loop.run_in_executor(
            None, lambda: self._client.pool(layout, regions, **args))

    async def send(self, room, pool, **args):
        return await AsyncRoom(self, room, SEND, pool, **args).open()

    async def recv(self, room, pool, sources, **args):
        return await AsyncRoom(self, room, RECV, pool, sources, **args).open()

    async def offer(self, room, pool, views, **args):
        return await AsyncRoom(self, room, OFFER, pool, views=views, **args).open()

    async def pull(self, room, pool, source, views, **args):
        return await AsyncRoom(self, room, PULL, pool, [source], views, **args).open()
