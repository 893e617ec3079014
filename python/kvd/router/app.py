# SPDX-License-Identifier: Apache-2.0
"""The router as a whole: its HTTP server, its members, and its shutdown."""
import asyncio
import logging
import os
import signal
import time

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from . import engines, policy
from .admin import guard, serve
from .bulk import Bulk
from .config import ROLES
from .directory import Directory
from .errors import JSON, Failed, Refused
from .exchange import Exchange, passed_on
from .gate import Gate
from .members import Members
from .metrics import TYPE, Metrics
from .upstream import Upstream

log = logging.getLogger("kvd.router")
http_log = logging.getLogger("kvd.router.http")
LINE_MAX = 4096
MODELS_S = 10
LINGER_S = 1


def _quiet(record):
    """A client that does not speak HTTP is not an error of the router, and its data is not
    logged."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


http_log.addFilter(_quiet)


class Router:
    def __init__(self, config):
        self.config = config
        self.upstream = Upstream(config)
        self.members = Members(config, self.upstream.health)
        self.policy = policy.BY_NAME[config.policy](self.members)
        self.gate = Gate(config.max_in_flight, config.max_queued, config.queue_timeout,
                         config.max_bodies)
        self.bulk = Bulk()
        self.metrics = Metrics()
        self.members.on_gone, self.members.on_down = self._gone, self.policy.lost
        self.draining, self.running = False, {}  # {Exchange: task}
        self.idle = asyncio.Event()
        self.idle.set()
        self.directory = Directory(config, self.members) if config.socket else None
        self.runners = []

    def engine(self):
        """The served model's name, from the members; all members of a router have one engine."""
        return next((m.spec.engine for m in self.members.of("decode")), self.config.engine)

    def _gone(self, member):
        self.metrics.keep(member)
        self.policy.lost(member)

    # ---- lifetime ----

    async def start(self):
        await self.upstream.start()
        await self.members.start()
        if self.directory:
            self.directory.start()
        host, port = self.config.listen
        runner = self._runner(self._public())
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=1024, reuse_address=True).start()
        if self.config.admin:
            await serve(self._runner(self._private()), self.config.admin)
        log.info("listening on %s:%d policy=%s", host, runner.addresses[0][1],
                 self.config.policy)

    def _runner(self, app):
        runner = web.AppRunner(
            app, handle_signals=False, access_log=None, handler_cancellation=True,
            auto_decompress=False, max_line_size=LINE_MAX, max_field_size=self.config.max_header,
            lingering_time=LINGER_S, shutdown_timeout=LINGER_S,
            logger=http_log)
        self.runners.append(runner)
        return runner

    def _public(self):
        app = web.Application(client_max_size=self.config.max_body, middlewares=[guard, self._head])
        for path in sorted({p for e in engines.BY_NAME.values() for p in e.paths}):
            app.router.add_post(path, self._serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        return app

    def _private(self):
        app = web.Application(middlewares=[guard])
        app.router.add_get("/members", self._told)
        app.router.add_post("/flip", self._flip)
        return app

    async def run(self):
        """Until SIGTERM or SIGINT and the drain; a second signal ends it at once."""
        loop, stop, now = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def on_signal():
            (now if stop.is_set() else stop).set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await self.start()
        try:
            await stop.wait()
            await self.drain(now)
        finally:
            await self.stop()

    async def drain(self, now):
        self.draining = True
        log.info("draining running=%d timeout=%g", len(self.running), self.config.drain_timeout)
        waits = [asyncio.ensure_future(e.wait()) for e in (self.idle, now)]
        await asyncio.wait(waits, timeout=self.config.drain_timeout,
                           return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.running:
            log.warning("cutting running=%d", len(self.running))
        for exchange, task in list(self.running.items()):
            exchange.cut = "the router shuts down"
            task.cancel()
        if self.running:
            await asyncio.wait(list(self.running.values()), timeout=2 * LINGER_S)

    async def stop(self):
        if self.directory:
            await self.directory.stop()
        await self.members.stop()
        for runner in self.runners:
            await runner.cleanup()
        await self.upstream.stop()
        self.bulk.stop()
        if self.config.admin and os.path.exists(self.config.admin):
            os.unlink(self.config.admin)

    # ---- requests ----

    @web.middleware
    async def _head(self, request, handler):
        if sum(len(k) + len(v) for k, v in request.raw_headers) > self.config.max_header:
            raise Refused(431, "header: more than %d bytes (max-header)" % self.config.max_header)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(415, "Content-Encoding: compressed bodies are not supported; send it "
                               "uncompressed")
        return await handler(request)

    async def _serve(self, request):
        if self.draining:
            raise Refused(503, "the router is draining", retry_after=1)
        if (request.content_length or 0) > self.config.max_body:
            raise Refused(413, "body: more than %d bytes (max-body)" % self.config.max_body)
        if request.content_type != JSON:
            raise Refused(415, "Content-Type: %.100s; send %s" % (request.content_type, JSON))
        exchange = Exchange(self, request)
        task = asyncio.ensure_future(exchange.run())
        self.running[exchange] = task
        self.idle.clear()
        try:
            return await task
        finally:
            del self.running[exchange]
            if not self.running:
                self.idle.set()

    async def _models(self, request):
        """The reply of a decode server, of the first that answers."""
        headers = passed_on(request.headers)
        await self.gate.enter()
        try:
            return await self._asked(headers)
        finally:
            self.gate.leave()

    async def _asked(self, headers):
        why = self.members.missing(("decode",))
        for member in self.members.usable("decode")[:1 + self.config.retries]:
            try:
                status, kind, body = await self.upstream.get(member, "/v1/models", headers,
                                                             MODELS_S)
            except Failed as failure:
                why = str(failure)
                continue
            return web.Response(status=status, body=body, headers={"Content-Type": kind})
        raise Refused(503, why or "no decode server", retry_after=1)

    async def _health(self, request):
        """Whether a request would be accepted."""
        why = "the router is draining" if self.draining else self.members.missing()
        if why:
            raise Refused(503, why, retry_after=1)
        return web.json_response({"status": "ok"})

    async def _healthz(self, request):
        """Whether this process answers."""
        return web.json_response({"status": "ok"})

    async def _metrics(self, request):
        text = self.metrics.text(self.gate, self.members, self.draining,
                                 self.policy.indexes)
        return web.Response(body=text.encode(), headers={"Content-Type": TYPE})

    # ---- admin socket ----

    async def _told(self, request):
        now = time.monotonic()
        return web.json_response({"draining": self.draining, "members": [
            m.told(now) for m in self.members.by_key.values()]})

    async def _flip(self, request):
        body = engines.parse(await request.read())
        url, role = body.get("url"), body.get("role")
        if role not in ROLES:
            raise Refused(400, "role: prefill or decode")
        found = [m for m in self.members.by_key.values() if m.url == url]
        if not found:
            raise Refused(404, "url: %.100r is not a member; list them with 'members'" % (url,))
        if found[0].spec.engine == "sglang":
            raise Refused(400, "%s: SGLang's role is fixed at its start "
                          "(--disaggregation-mode): restart it in the other role" % url)
        from_role = ROLES[1 - ROLES.index(role)]
        others = [m for m in self.members.of(from_role) if m.url != url]
        if any(m.role != role for m in found) and not others:
            raise Refused(409, "%s is the only %s server" % (url, from_role))
        running = sum(m.requests for m in found if m.role != role)
        self.members.flip(url, role)
        log.info("flip url=%s role=%s running=%d", url, role, running)
        return web.json_response({"url": url, "role": role, "running": running})
