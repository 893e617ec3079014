# SPDX-License-Identifier: Apache-2.0
"""Publishes an engine in the directory, in the group of its role, until this process ends.

A flip adds it to the other role's group before it is removed from its old one, so it is always
known to routers."""
import argparse
import asyncio
import logging
import os
import signal

from aiohttp import web

from ..aio import AsyncClient
from ..errors import Error
from . import engines
from .admin import guard, serve
from .config import ENGINES, ROLES, base_url, checked, host_port
from .errors import Refused

log = logging.getLogger("kvd.router")
LOOK_S = 1
TIMEOUT_S = 5


class Publisher:
    def __init__(self, args):
        self.args, self.role, self.client = args, args.role, None
        self.lock = asyncio.Lock()
        self.epoch = None

    def place(self, role):
        args = self.args
        out = {"group": getattr(args, role + "_group"), "worker": args.worker, "url": args.url,
               "engine": args.engine}
        if args.bootstrap:
            out["bootstrap"] = "%s:%d" % args.bootstrap
        return out

    async def _enter(self, role):
        """The session that has published; its end withdraws the entry."""
        client = AsyncClient(self.args.socket, client="kvd.router", timeout=TIMEOUT_S)
        await client.__aenter__()
        try:
            await client.command("group.publish", **self.place(role))
        except BaseException:
            await client.__aexit__()
            raise
        return client

    async def keep(self):
        """Checks each second whether the session is the one that published."""
        while True:
            try:
                async with self.lock:
                    await self._look()
            except (Error, OSError) as why:
                log.warning("not published: %s", why)
            await asyncio.sleep(LOOK_S)

    async def _look(self):
        if self.client is None:
            self.client = await self._enter(self.role)
        else:
            await self.client.command("ping")
            if self.client.info["epoch"] == self.epoch:
                return
            await self.client.command("group.publish", **self.place(self.role))
        self.epoch = self.client.info["epoch"]
        log.info("published worker=%s group=%s", self.args.worker, self.place(self.role)["group"])

    async def flip(self, role):
        async with self.lock:
            if role == self.role:
                return
            client = await self._enter(role)
            before, self.client, self.role = self.client, client, role
            self.epoch = client.info["epoch"]
            if before is not None:
                await before.__aexit__()
        log.info("flip worker=%s role=%s", self.args.worker, role)

    async def on_flip(self, request):
        body = engines.parse(await request.read())
        if body.get("role") not in ROLES:
            raise Refused(400, "role: prefill or decode")
        if body.get("url") not in (None, self.args.url):
            raise Refused(404, "url: %.100r; this is %s" % (body["url"], self.args.url))
        if self.args.engine == "sglang":
            raise Refused(400, "SGLang's role is fixed at its start (--disaggregation-mode): "
                          "restart it in the other role")
        try:
            await self.flip(body["role"])
        except (Error, OSError) as why:
            raise Refused(502, "the directory: %s" % why) from None
        return web.json_response({"url": self.args.url, "role": body["role"]})

    async def run(self):
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        runner = None
        if self.args.admin:
            app = web.Application(middlewares=[guard])
            app.router.add_post("/flip", self.on_flip)
            runner = web.AppRunner(app, access_log=None)
            await serve(runner, self.args.admin)
        task = asyncio.ensure_future(self.keep())
        await stop.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if runner:
            await runner.cleanup()
            os.unlink(self.args.admin)
        if self.client is not None:
            await self.client.__aexit__()


def parser():
    out = argparse.ArgumentParser(prog="python -m kvd.router publish", allow_abbrev=False,
                                  description=__doc__.split("\n\n")[0])
    out.add_argument("--socket", required=True, metavar="PATH", help="control socket of the kvd")
    out.add_argument("--role", required=True, choices=ROLES)
    out.add_argument("--worker", required=True, metavar="NAME", help="name of this engine, unique "
                                                                     "in its group")
    out.add_argument("--url", required=True, type=checked(base_url), help="URL of its HTTP server")
    out.add_argument("--engine", choices=ENGINES, default="vllm")
    out.add_argument("--bootstrap", type=checked(host_port), metavar="HOST:PORT",
                     help="address of its bootstrap server")
    for role in ROLES:
        out.add_argument("--%s-group" % role, default=role, metavar="GROUP")
    out.add_argument("--admin", metavar="PATH", help="Unix socket to create, for the command flip")
    return out


def main(argv):
    args = parser().parse_args(argv)
    asyncio.run(_run(args))
    return 0


async def _run(args):
    await Publisher(args).run()
