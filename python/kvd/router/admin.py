# SPDX-License-Identifier: Apache-2.0
"""The admin's Unix socket, and the commands that use it."""
import argparse
import asyncio
import json
import logging
import os
import socket
import stat
import sys

import aiohttp
from aiohttp import web

from .config import ROLES, base_url, checked
from .errors import JSON, Refused, error_body

log = logging.getLogger("kvd.router")
TIMEOUT_S = 10


def refusal(why):
    headers = {"Content-Type": JSON}
    if why.retry_after is not None:
        headers["Retry-After"] = str(why.retry_after)
    return web.Response(status=why.status, body=error_body(why.status, str(why)),
                        headers=headers)


@web.middleware
async def guard(request, handler):
    """Errors as JSON, also for requests that are invalid."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        why = Refused(404, "%s %.100s: no such endpoint" % (request.method, request.path))
    except web.HTTPMethodNotAllowed as error:
        why = Refused(405, "%s %.100s: allowed: %s" % (request.method, request.path, ", ".join(
            sorted(error.allowed_methods))))
    except web.HTTPException as error:
        why = Refused(error.status, error.reason)
    except Refused as refused:
        why = refused
    except Exception:  # a bug of the router
        log.exception("%s %.100s", request.method, request.path)
        why = Refused(500, "internal error of the router; see its log")
    response = refusal(why)
    if request.can_read_body:
        response.force_close()  # the rest is not read
    return response


async def serve(runner, path):
    """Listens on a path that only its user can access, from the first moment on."""
    _unlink_stale(path)
    await runner.setup()
    mask = os.umask(0o177)
    try:
        await web.UnixSite(runner, path).start()
    finally:
        os.umask(mask)


def _unlink_stale(path):
    """A socket without a listener; bind() reports all other errors."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


async def ask(path, method, target, body=None):
    """(status, reply)"""
    async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=path),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        async with session.request(method, "http://admin" + target, json=body) as resp:
            return resp.status, await resp.json()


def _asked(path, *request):
    """Its reply; exits with the message if it is an error."""
    try:
        status, said = asyncio.run(ask(path, *request))
    except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as why:
        sys.exit("%s: %s" % (path, why or type(why).__name__))
    if status != 200:
        sys.exit("%s: %s" % (path, said["error"]["message"]))
    return said


def flip(argv):
    out = argparse.ArgumentParser(
        prog="python -m kvd.router flip", allow_abbrev=False,
        description="Switch an engine that serves both roles (vLLM's kv_both) to the other role.")
    out.add_argument("--admin", required=True, metavar="PATH",
                     help="admin socket of the router, or of the engine's publish")
    out.add_argument("url", type=checked(base_url), help="URL of the engine")
    out.add_argument("role", choices=ROLES)
    args = out.parse_args(argv)
    said = _asked(args.admin, "POST", "/flip", {"url": args.url, "role": args.role})
    print("%s: %s%s" % (said["url"], said["role"], "; %d requests finish in the old role" %
                        said["running"] if said.get("running") else ""))
    return 0


def members(argv):
    out = argparse.ArgumentParser(prog="python -m kvd.router members", allow_abbrev=False,
                                  description="List a router's members.")
    out.add_argument("--admin", required=True, metavar="PATH", help="admin socket of the router")
    out.add_argument("--json", action="store_true")
    args = out.parse_args(argv)
    said = _asked(args.admin, "GET", "/members")
    if args.json:
        print(json.dumps(said, indent=1))
        return 0
    for m in said["members"]:
        print("%-8s %-32s %-7s %-5s running %d, served %d, failed %d%s" % (
            m["role"], m["url"], m["engine"], "up" if m["up"] else "out", m["requests"],
            m["served"], m["failed"], "" if m["up"] else "; " + m["why"]))
    return 0
