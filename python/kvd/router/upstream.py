# SPDX-License-Identifier: Apache-2.0
"""Requests to members. Each wait has a limit; an error is a Failed, or an Answered that is passed
to the client."""
import asyncio
import re

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from .errors import JSON, Answered, Failed
from .waits import within

ANSWER_MAX = 64 << 20  # of a prefill server, and of an error
ERROR_MAX = 1 << 20
# other statuses are passed to the client
AGAIN = frozenset((408, 429, 500, 502, 503, 504))
BUSY = frozenset((429, 503))
PART = 16 << 10  # bytes of a stream that are read at a time; a few of them are buffered
# below the 5 s after which uvicorn closes an idle connection
KEEPALIVE_S = 2


BROKEN = (aiohttp.ClientError, HttpProcessingError, asyncio.TimeoutError, OSError)


def words(error):
    """Without the answer's text, which an error of HTTP itself contains in part."""
    told = isinstance(error, (OSError, asyncio.TimeoutError)) and str(error)
    return type(error).__name__ + (": %s" % told if told else "")


def kind_of(resp):
    """Its Content-Type, if it is valid."""
    kind = resp.headers.get("Content-Type", JSON)
    return kind if re.fullmatch(r"[ -~]{1,256}", kind) else "application/octet-stream"


class Unreachable(Failed):
    """No connection, so the request was not sent."""


class Upstream:
    def __init__(self, config):
        self.config, self.session = config, None

    async def start(self):
        # a proxy of the environment is not used for members, and no cookie is kept
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False,
            read_bufsize=PART,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout))

    async def stop(self):
        await self.session.close()

    async def _bounded(self, member, seconds, call):
        try:
            return await within(seconds, call)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(member, words(error), broken=True) from None
        except asyncio.TimeoutError:
            raise Failed(member, "no answer within %.3g s" % seconds, status=504,
                         broken=True) from None
        except BROKEN as error:
            raise Failed(member, words(error), broken=True) from None

    async def post(self, member, path, body, headers, seconds):
        """Sends a request, reads the answer's head. Failed, Answered; the caller closes it."""
        head = dict(headers, **{"Content-Type": JSON, "Accept-Encoding": "identity"})
        resp = await self._bounded(member, seconds, self.session.post(
            member.url + path, data=body, headers=head, allow_redirects=False))
        if resp.status == 200:
            return resp
        try:
            text = await self.whole(member, resp, ERROR_MAX, seconds)
        finally:
            resp.close()
        answer = Answered(resp.status, kind_of(resp), text)
        if resp.status in AGAIN:
            raise Failed(member, "HTTP %d" % resp.status, status=502, answer=answer,
                         busy=resp.status in BUSY)
        if not 400 <= resp.status < 600:
            raise Failed(member, "HTTP %d, which is not an answer" % resp.status, broken=True)
        raise answer

    async def whole(self, member, resp, most, seconds):
        """All of its body."""
        async def read():
            parts, size = [], 0
            while True:
                data = await resp.content.read(PART)
                if not data:
                    return b"".join(parts)
                size += len(data)
                if size > most:
                    raise Failed(member, "answer of more than %d bytes" % most, broken=True)
                parts.append(data)
        return await self._bounded(member, seconds, read())

    async def part(self, member, resp, seconds):
        """A part of its body; b"": the end."""
        return await self._bounded(member, seconds, resp.content.read(PART))

    async def get(self, member, path, headers, seconds, most=ERROR_MAX):
        """(status, content type, body)"""
        async def ask():
            async with self.session.get(member.url + path, headers=headers,
                                        allow_redirects=False) as resp:
                body = await self.whole(member, resp, most, seconds)
                return resp.status, kind_of(resp), body
        return await self._bounded(member, seconds, ask())

    async def health(self, member):
        """None, or why the health check failed."""
        try:
            status, _, _ = await self.get(member, self.config.health_path, {},
                                          self.config.health_timeout)
        except Failed as why:
            return str(why).partition(": ")[2]
        return None if status == 200 else "HTTP %d from %s" % (status, self.config.health_path)
