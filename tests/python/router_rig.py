# SPDX-License-Identifier: Apache-2.0
"""kvd.router as a process, before fake engines, which refuse the same requests as vLLM's and
SGLang's servers, and record their requests."""
import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys

import aiohttp
from aiohttp import web

from kvd_daemon import DEADLINE_S, free_port

# of this process: a router of another one may still know a port that was an engine's before
HOST = "127.%d.%d.1" % (1 + os.getpid() % 250, os.getpid() // 250 % 250)
ASK = {"model": "m", "prompt": "Once upon", "max_tokens": 4}
SAID = ["One", " füñf", " 水", " 🙂\n", " end"]
FAST = ["--health-interval", "0.1", "--health-timeout", "2", "--circuit-open", "0.3",
        "--member-wait", "0.5", "--connect-timeout", "2"]


async def pause(seconds):
    """Work of this duration, or the time between two checks of a condition."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


_libc = ctypes.CDLL(None)


async def spawn(*argv, **more):
    """python -m kvd.router ARGV; it ends with the tests in any case."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvd.router", *argv, stdin=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: _libc.prctl(1, signal.SIGKILL), **more)  # PR_SET_PDEATHSIG


class World:
    """Shared by prefill and decode engines: caches by name, each read once, and rooms."""

    def __init__(self):
        self.caches, self.rooms, self.serial = set(), {}, 0

    def offer(self):
        self.serial += 1
        self.caches.add(self.serial)
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e",
                "remote_block_ids": [[self.serial]], "remote_request_id": "r",
                "remote_host": "10.0.0.2", "remote_port": 5600, "tp_size": 1}

    def take(self, params):
        """Whether the cache exists; it is not given out again."""
        try:
            (serial,), = params["remote_block_ids"]
            self.caches.remove(serial)
            return True
        except (KeyError, TypeError, ValueError):
            return False

    def room(self, number):
        return self.rooms.setdefault(number, asyncio.get_running_loop().create_future())


class Fake:
    """One server. Knobs: say (status, text[, content type]) instead; tokens; cuts: bytes of a piece; pause: event
    before the second token; slow: seconds a request, one after another; healthy."""

    def __init__(self, world, role, kind="vllm"):
        self.world, self.role, self.kind = world, role, kind
        self.asked, self.left, self.running, self.most = [], 0, 0, 0
        self.say, self.tokens, self.cuts, self.pause = None, SAID, 0, None
        self.slow, self.healthy, self.error_at, self.silent = 0, True, None, None
        self.turn, self.runner, self.port = asyncio.Lock(), None, 0

    @property
    def url(self):
        return "http://%s:%d" % (HOST, self.port)

    @property
    def label(self):
        return "%s:%d" % (HOST, self.port)

    async def start(self):
        app = web.Application(client_max_size=64 << 20)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            app.router.add_post(path, self.serve)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True,
                                    shutdown_timeout=0.1)
        await self.runner.setup()
        self.port = self.port or free_port()
        sock = socket.create_server((HOST, self.port), backlog=2048)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)  # of its connections, too
        await web.SockSite(self.runner, sock).start()
        return self

    async def kill(self):
        """As SIGKILL: connections end in the middle, and the port is closed."""
        for line in list(self.runner.server.connections):
            if line.transport:
                line.transport.abort()
        await self.runner.cleanup()

    async def health(self, request):
        return web.Response(status=200 if self.healthy else 503)

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def serve(self, request):
        body = json.loads(await request.read())
        self.asked.append((request.path, body, request.headers.copy()))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.silent is not None:
                await self.silent.wait()
            if self.slow:
                async with self.turn:
                    await pause(self.slow)
            if self.say is not None:
                return web.Response(status=self.say[0], text=self.say[1],
                                    content_type=(*self.say, "application/json")[2])
            wrong = self.refuses(request.path, body)
            if wrong:
                return self.error(400, wrong)
            return await (self.vllm if self.kind == "vllm" else self.sglang)(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.running -= 1

    @staticmethod
    def error(status, words):
        return web.json_response({"error": {"message": words, "code": status}}, status=status)

    def refuses(self, path, body):
        if "stream_options" in body and not body.get("stream"):
            return "stream_options without stream"
        if body.get("min_tokens", 0) > body.get("max_completion_tokens",
                                                body.get("max_tokens", 16)):
            return "min_tokens is above max_tokens"
        if self.kind == "vllm" and path == "/generate":
            return "no such path"
        if path == "/v1/chat/completions" and not isinstance(body.get("messages"), list):
            return "messages: Field required"
        return None

    # ---- vLLM's ----

    async def vllm(self, request, body):
        params = body.get("kv_transfer_params") or {}
        if self.role == "prefill":
            if not params.get("do_remote_decode") or body["max_tokens"] != 1 or body["stream"]:
                return self.error(400, "not a request for prefill: %s" % body)
            if "bootstrap_room" in params:
                self.world.room(params["bootstrap_room"]).set_result(True)
                return web.json_response({"choices": []})
            return web.json_response({"choices": [{"text": "x"}],
                                      "kv_transfer_params": self.world.offer()})
        if params.get("bootstrap_room"):
            await self.world.room(params["bootstrap_room"])
        elif params.get("do_remote_prefill") and not self.world.take(params):
            # as kv_load_failure_policy = fail
            return await self.broken(request, body, "Internal server error")
        return await self.answer(request, body)

    async def broken(self, request, body, words):
        if not body.get("stream"):
            return self.error(500, words)
        out = await self.begin(request)
        if request.path == "/v1/chat/completions":
            await out.write(self.event(request, ""))
        await out.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(
            {"error": {"message": words, "code": 500}}).encode())
        return out

    # ---- SGLang's ----

    async def sglang(self, request, body):
        rooms, hosts, ports = (body.get("bootstrap_" + n) for n in ("room", "host", "port"))
        sampling = body.get("sampling_params") or {}
        if sampling.get("n", body.get("n", 1)) != 1:
            return self.error(400, "n")
        prompts = body.get("text", body.get("input_ids", body.get("prompt")))
        batch = isinstance(prompts, list) and not isinstance(prompts[0], int)
        if batch != isinstance(rooms, list) or (batch and not len(rooms) == len(hosts) ==
                                                len(ports) == len(prompts)):
            return self.error(400, "bootstrap_room does not fit the batch")
        rooms = rooms if batch else [rooms]
        if not all(isinstance(r, int) and 0 < r < 1 << 63 for r in rooms):
            return self.error(400, "bootstrap_room")
        if self.role == "prefill":
            for room in rooms:
                if self.world.room(room).done():
                    return self.error(400, "room %d again" % room)
                self.world.room(room).set_result(True)
            self.tokens = SAID[:1]
        else:
            await asyncio.wait([self.world.room(r) for r in rooms])
        return await self.answer(request, body)

    # ---- answers ----

    def event(self, request, token):
        if request.path == "/generate":
            said = {"text": token, "meta_info": {"finish_reason": None}}
        elif request.path == "/v1/completions":
            said = {"choices": [{"index": 0, "text": token, "finish_reason": None}]}
        else:
            delta = {"content": token} if token else {"role": "assistant", "content": ""}
            said = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        return b"data: %s\n\n" % json.dumps(said, ensure_ascii=False).encode()

    def stream_of(self, path, tokens=None):
        """All bytes of a streamed answer."""
        class Request:
            pass
        Request.path = path
        first = [self.event(Request, "")] if path == "/v1/chat/completions" else []
        return b"".join(first + [self.event(Request, t) for t in tokens or self.tokens] +
                        [b"data: [DONE]\n\n"])

    @staticmethod
    async def begin(request):
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        return out

    async def answer(self, request, body):
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "".join(self.tokens)}]})
        out = await self.begin(request)
        if self.cuts:
            text = self.stream_of(request.path)
            for at in range(0, len(text), self.cuts):
                await out.write(text[at:at + self.cuts])
                await pause(0)
            return out
        if request.path == "/v1/chat/completions":
            await out.write(self.event(request, ""))
        for i, token in enumerate(self.tokens):
            if i == 1 and self.pause is not None:
                await self.pause.wait()
            if i == self.error_at:
                await out.write(self.event(request, token)[:9])
                await asyncio.Event().wait()  # until it is killed
            await out.write(self.event(request, token))
        await out.write(b"data: [DONE]\n\n")
        return out


class Router:
    """The process, and a client of it."""

    def __init__(self, options, env=None):
        self.port, self.log = free_port(), ""
        self.options, self.env = [str(o) for o in options], env
        self.proc = self.session = None

    @property
    def url(self):
        return "http://127.0.0.1:%d" % self.port

    async def start(self, ready=True):
        self.proc = await spawn(
            "--listen", "127.0.0.1:%d" % self.port, *self.options, stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ, PYTHONUNBUFFERED="1", **(self.env or {})))
        self.reader = asyncio.ensure_future(self._read())
        self.session = aiohttp.ClientSession(
            auto_decompress=False, connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S))
        await self.until_health("/health" if ready else "/healthz")
        return self

    async def _read(self):
        while True:
            line = await self.proc.stderr.readline()
            if not line:
                return
            self.log += line.decode()

    async def until_health(self, path="/health", wanted=200):
        async def holds():
            assert self.proc.returncode is None, self.log[-3000:]
            try:
                async with self.session.get(self.url + path) as resp:
                    return resp.status == wanted
            except aiohttp.ClientError:
                return False
        await until(holds, self)

    async def ask(self, body=None, path="/v1/completions", **more):
        """(status, headers, bytes)"""
        body = json.dumps(ASK if body is None else body) if not isinstance(body, bytes) else body
        more["headers"] = dict({"Content-Type": "application/json"}, **more.get("headers", {}))
        async with self.session.post(self.url + path, data=body, **more) as resp:
            return resp.status, resp.headers, await resp.read()

    async def get(self, path):
        async with self.session.get(self.url + path) as resp:
            return resp.status, await resp.read()

    async def metric(self, name):
        """The sum of all with that name and labels."""
        text = (await self.get("/metrics"))[1].decode()
        rows = re.findall(r"^%s(?:[{].*)? (\S+)$" % re.escape(name).replace(r"\.\*", ".*"), text,
                          re.M)
        return sum(map(float, rows))

    async def raw(self, text):
        """The answer to these bytes until the router closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text)
        got = await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        return got.decode("latin-1")

    async def lines(self, count=1):
        """So many of the access log."""
        def told():
            return [x for x in self.log.splitlines() if " id=" in x and " status=" in x]
        await until(lambda: len(told()) >= count, self)
        assert len(told()) == count, self.log[-3000:]
        return told()

    async def end(self, number=signal.SIGTERM):
        await self.session.close()
        if self.proc.returncode is None:
            self.proc.send_signal(number)
        try:
            await asyncio.wait_for(self.proc.wait(), DEADLINE_S)
            await self.reader
        except BaseException:
            self.proc.kill()
            raise
        return self.proc.returncode


async def until(holds, router=None, seconds=DEADLINE_S):
    """holds: a plain or a coroutine function."""
    async def loop():
        while True:
            got = holds()
            got = await got if asyncio.iscoroutine(got) else got
            if got:
                return got
            await pause(0.01)
    try:
        return await asyncio.wait_for(loop(), seconds)
    except asyncio.TimeoutError:
        log = router.log if router else ""
        told = "\n".join(line for line in log.splitlines() if " status=" not in line)
        raise AssertionError("not within %g s; %s\n...\n%s" % (
            seconds, told[-3000:], log[-1000:])) from None


def members(prefills, decodes, kind="vllm"):
    return ["--engine", kind, *(["--prefill"] if prefills else []), *[p.url for p in prefills],
            *(["--decode"] if decodes else []), *[d.url for d in decodes], *FAST]


@contextlib.asynccontextmanager
async def routed(prefills=1, decodes=1, kind="vllm", options=(), env=None, setup=None):
    """(router, prefill fakes, decode fakes). setup(prefills, decodes): before it starts."""
    world = World()
    fakes = [[Fake(world, role, kind) for _ in range(n)]
             for role, n in (("prefill", prefills), ("decode", decodes))]
    for fake in sum(fakes, []):
        await fake.start()
    if setup:
        setup(*fakes)
    router = Router(members(*fakes, kind) + list(options), env)
    try:
        await router.start()
        yield (router, *fakes)
        if router.proc.returncode is None:
            assert await router.end() == 0, router.log[-3000:]
        assert "Traceback" not in router.log, router.log[router.log.index("Traceback"):][:3000]
        assert "Once upon" not in router.log, "a prompt's text is in the log"
    except BaseException:
        sys.stderr.write(router.log[-4000:])
        raise
    finally:
        if router.session and not router.session.closed:
            await router.session.close()
        if router.proc and router.proc.returncode is None:
            router.proc.kill()
            await router.proc.wait()
        for fake in sum(fakes, []):
            await fake.runner.cleanup()


def aio(test):
    """A test that is a coroutine function."""
    def run():
        asyncio.run(asyncio.wait_for(test(), 2 * DEADLINE_S))
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
