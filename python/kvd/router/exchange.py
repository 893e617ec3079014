# SPDX-License-Identifier: Apache-2.0
"""One client's request: a pair, its two requests, its answer.

Until a part of an answer has been sent to the client, a failed try is followed by one with
another pair. After that the stream ends with an event that has the error. When the client
disconnects, the handler is cancelled, and each connection that it has open is closed: engines
take that as an abort."""
import asyncio
import logging
import re
import secrets
import time

from aiohttp import web

from . import engines
from .bulk import Body
from .errors import JSON, Answered, Failed, Refused, error_body
from .policy import Request
from .stream import Opening, Watchdog
from .upstream import ANSWER_MAX, BROKEN, PART, Unreachable, kind_of, words
from .waits import ended, within

log = logging.getLogger("kvd.router")
access = logging.getLogger("kvd.router.access")
EVENTS = "text/event-stream"
WHOLE_HELD = 1 << 20  # of an answer that is not a stream; longer ones are sent early
PASSED_ON = ("Authorization", "traceparent", "tracestate")
STEP_S = 0.2
PREFILL_TOKENS_S = 1000  # of a prompt, computed by the slowest prefill server
TAIL_S = 5  # for prefill's answer after the end of decode's


def request_id(headers):
    """The client's id, if it is one word; else a new one."""
    given = headers.get("X-Request-Id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else secrets.token_hex(16)


def passed_on(headers):
    """The client's headers that are passed to engines; Refused."""
    out = {name: headers[name] for name in PASSED_ON if name in headers}
    for name, value in out.items():
        if not re.fullmatch(r"[\t -~]*", value):
            raise Refused(400, "%s: only printable ASCII is allowed" % name)
    return out


class Exchange:
    def __init__(self, router, request):
        self.router, self.request = router, request
        self.config, self.members = router.config, router.members
        self.id = request_id(request.headers)
        self.begin = time.monotonic()
        self.until = self.begin + self.config.deadline
        self.pair, self.tries, self.first = (None, None), 0, None
        self.out, self.bytes, self.tail, self.broke = None, 0, b"", False
        self.body = self.facts = self.held = self.picked = None
        self.size = 0  # of the body, as counted
        self.headers = {}  # for the engines
        self.session = None
        self.cut = None  # reason why the router itself ends it
        self.told = False  # its end was logged

    # ---- frame ----

    async def run(self):
        """The response. CancelledError: the client has disconnected."""
        try:
            try:
                return await self._served()
            except Refused as why:
                return await self._sent(self._refuse(why))
            except Answered as said:
                return await self._sent(self._whole(said))
            except Failed as why:
                return await self._sent(self._give_up(why))
        except asyncio.CancelledError:
            if self.told:  # its end was under way
                raise
            if self.cut is None:
                self.router.metrics.left += 1
                self._log(499, "the client disconnected")
                raise
            return await self._cut_short()

    async def _served(self):
        router = self.router
        self.headers = dict(passed_on(self.request.headers), **{"X-Request-Id": self.id})
        if self.config.affinity:
            self.session = router.policy.sessions.name(
                self.request.headers.get(self.config.affinity))
        try:
            # before it counts as running: the body may never arrive
            self.body = Body(router.bulk, self.request.path, await self._read())
            try:
                await router.gate.enter()
            except Refused:
                router.metrics.refused += 1
                raise
            try:
                self.facts = await self.body.facts(router.policy.key)
                return await self._sent(await self._try_pairs())
            finally:
                router.gate.leave()
        finally:
            self._forget_body()

    def _forget_body(self):
        self.body = self.facts = None
        self.router.gate.give(self.size)
        self.size = 0

    async def _read(self):
        """The received bytes count, not the announced ones."""
        try:
            return await within(self.config.client_timeout, self._parts())
        except asyncio.TimeoutError:
            raise Refused(408, "body: not received within %g s" %
                          self.config.client_timeout) from None

    async def _parts(self):
        text = bytearray()
        while True:
            part = await self.request.content.readany()
            if not part:
                return bytes(text)
            if len(text) + len(part) > self.config.max_body:
                raise Refused(413, "body: more than %d bytes (max-body)" % self.config.max_body)
            try:
                self.router.gate.take(len(part), self.size)
            except Refused:
                self.router.metrics.refused += 1
                raise
            self.size += len(part)
            text += part

    def _answer(self, status, body, kind=JSON, retry_after=None, why=""):
        """A complete answer, which ends the request."""
        headers = {"Content-Type": kind, "X-Request-Id": self.id}
        if retry_after is not None:
            headers["Retry-After"] = str(retry_after)
        self.bytes = len(body)
        self._log(status, why)
        return web.Response(status=status, body=body, headers=headers)

    async def _sent(self, response):
        """Sends a complete answer. A client that does not read is not waited for."""
        async def send():
            await response.prepare(self.request)
            await response.write_eof()
            await self.request.writer.drain()
        try:
            if response is not self.out:
                await within(self.config.idle_timeout, send())
        except asyncio.TimeoutError:
            self._abort()
        except ConnectionError:
            raise asyncio.CancelledError from None
        return response

    def _refuse(self, why):
        return self._answer(why.status, error_body(why.status, str(why)),
                            retry_after=why.retry_after, why=str(why))

    def _whole(self, said):
        return self._answer(said.status, said.body, said.kind, why="from the engine")

    def _give_up(self, why):
        """After the last try."""
        if why.answer is not None:
            return self._answer(why.answer.status, why.answer.body, why.answer.kind,
                                why=str(why))
        return self._answer(why.status, error_body(why.status, "%s (%d tries)" % (
            why, self.tries)), why=str(why))

    def _log(self, status, why=""):
        self.told = True
        now = time.monotonic()
        prefill, decode = (m.label if m else "-" for m in self.pair)
        self.router.metrics.ended(self.request.path, status, now - self.begin)
        access.info("id=%s path=%s status=%d prefill=%s decode=%s tries=%d first_ms=%s ms=%d "
                    "bytes=%d%s%s", self.id, self.request.path, status, prefill, decode,
                    self.tries,
                    "-" if self.first is None else "%d" % (1e3 * (self.first - self.begin)),
                    1e3 * (now - self.begin), self.bytes, self._choice(),
                    " why=%r" % why if why else "")

    def _choice(self):
        """The reasons for the pair."""
        out, held = "", self.held
        if held is not None and self.router.policy.indexes:
            out += " cached=%d" % held.cached
        if held is not None and held.why_alone:
            out += " alone=" + held.why_alone
        return out

    # ---- tries ----

    async def _try_pairs(self):
        avoid, failure = set(), None
        while True:
            prefill, decode, held = await self._pick(avoid, failure)
            self.pair, self.tries = (prefill, decode), self.tries + 1
            self.held, self.picked = held, time.monotonic()
            result = "left"
            try:
                out = await self._try(prefill, decode, held)
                result = "cut" if self.broke else "answered"
                return out
            except Failed as why:
                result, failure = "failed", why
                held.failed(why.member)
                avoid |= self._blame(why)
                if self.tries > self.config.retries or time.monotonic() >= self.until:
                    raise
            except Answered:
                result = "refused"
                raise
            finally:
                held.release()
                self.router.metrics.tried(prefill, decode, result)
                self.members.changed()
            self.router.metrics.retries += 1
            log.info("retry id=%s try=%d why=%r", self.id, self.tries, str(failure))

    def _blame(self, why):
        """Counts a failure; updates the members to avoid."""
        other = next((m for m in self.pair if m is not None and m is not why.member), None)
        if isinstance(why, Unreachable):
            self.members.unreachable(why)
        else:
            self.members.failed(why, other)
        return {why.member} if why.broken or other is None else {why.member, other}

    async def _pick(self, avoid, failure):
        wait = min(self.until, time.monotonic() + self.config.member_wait)
        alone = self.facts.alone[self.router.engine()]
        request = Request(self.facts.tokens, alone, () if alone else self.facts.chain,
                          self.session)
        while True:
            pair = self.router.policy.pick(request, avoid)
            if pair is not None:
                self._fits(pair)
                return pair
            left = wait - time.monotonic()
            if left <= 0:
                break
            await self.members.change(min(left, STEP_S))
        if failure is not None:
            raise failure
        roles = ("decode",) if alone else ("prefill", "decode")
        raise Refused(503, self.members.missing(roles) or "no pair is available",
                      retry_after=1)

    def _fits(self, pair):
        """Both have one engine, which serves this path."""
        prefill, decode, held = pair
        try:
            if prefill is not None and prefill.spec.engine != decode.spec.engine:
                raise Refused(503, "%s is %s, %s is %s: a pair must have one engine" % (
                    prefill.label, prefill.spec.engine, decode.label, decode.spec.engine))
            name = decode.spec.engine
            if prefill is None and not engines.BY_NAME[name].decode_computes:
                raise Refused(503, "%s is %s, others are not: all members of a router must have "
                                   "one engine" %
                              (decode.label, decode.spec.engine))
            if self.request.path not in engines.BY_NAME[name].paths:
                raise Refused(501, "%s: not served by %s" % (self.request.path, name))
            if self.facts.wrong[name]:
                raise Refused(*self.facts.wrong[name])
        except Refused:
            held.release()
            raise

    def _left(self, most):
        return max(0.001, min(most, self.until - time.monotonic()))

    async def _post(self, member, body, seconds):
        return await self.router.upstream.post(member, self.request.path, body, self.headers,
                                               self._left(seconds))

    async def _post_prefill(self, member, body):
        """A member that answers other requests meanwhile has a queue, and is waited for; one that
        answers none hangs."""
        quiet = self.config.prefill_timeout + self.facts.tokens / PREFILL_TOKENS_S
        begin = time.monotonic()
        asked = asyncio.ensure_future(self._post(member, body, self.config.first_timeout))
        try:
            while not asked.done():
                left = max(begin, member.answered) + quiet - time.monotonic()
                if left <= 0:
                    raise Failed(member, "no answer within %.3g s" % quiet, status=504,
                                 broken=True, hung=True)
                await asyncio.wait((asked,), timeout=left)
        except BaseException:
            await ended(asked)
            raise
        return asked.result()

    async def _try(self, prefill, decode, held):
        engine = decode.spec.engine
        if prefill is None:
            lone = await self.body.ask("lone", engine)
            return await self._relay(*await self._open(decode, lone), decode)
        first, second = await self.body.ask("bodies", engine, prefill.spec)
        if second is not None:
            return await self._try_both(prefill, first, decode, second, held)
        second = await self._prefilled(engine, prefill, first)
        held.prefilled()
        self.members.succeeded(prefill)
        return await self._relay(*await self._open(decode, second), decode)

    async def _prefilled(self, engine, prefill, body):
        """Decode's body, from prefill's complete answer."""
        resp = await self._post_prefill(prefill, body)
        try:
            text = await self.router.upstream.whole(prefill, resp, ANSWER_MAX,
                                                    self._left(self.config.first_timeout))
            return await self.body.ask("follow", engine, text)
        except ValueError as why:
            raise Failed(prefill, "invalid answer: %.200s" % why, broken=True) from None
        finally:
            resp.close()  # no effect on a connection that was read to its end

    async def _try_both(self, prefill, first, decode, second, held):
        """Both at once. The contents of prefill's answer are dropped; that it answers counts."""
        asked = asyncio.ensure_future(self._drained(prefill, first, held))
        opened = asyncio.ensure_future(self._open(decode, second))
        try:
            await asyncio.wait((asked, opened), return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                asked.result()
                await asyncio.wait((opened,))
            failed = opened.exception()
            if isinstance(failed, Failed) and not failed.broken:
                await asyncio.wait((asked,), timeout=STEP_S)  # which member failed?
                if asked.done():
                    asked.result()
            out = await self._relay(*opened.result(), decode)
            await asyncio.wait((asked,), timeout=TAIL_S)
            return out
        finally:
            asked.cancel()
            opened.cancel()
            ends = await asyncio.gather(asked, opened, return_exceptions=True)
            if isinstance(ends[1], tuple):
                ends[1][0].close()

    async def _drained(self, prefill, body, held):
        resp = await self._post_prefill(prefill, body)
        try:
            opening, data = Opening(resp.content_type == EVENTS, 0), None
            while data != b"":  # no part may take longer
                data = await self.router.upstream.part(prefill, resp, self.config.first_timeout)
                if not opening.done:
                    opening.feed(data)
        finally:
            resp.close()
        if opening.error is None:
            held.prefilled()
        self.members.succeeded(prefill)

    # ---- the answer ----

    async def _open(self, decode, body):
        """(response, Opening): it has started, without an error."""
        resp = await self._post(decode, body, self.config.first_timeout)
        try:
            events = resp.content_type == EVENTS
            opening = Opening(events, WHOLE_HELD)
            while not opening.done:
                opening.feed(await self.router.upstream.part(
                    decode, resp, self._left(self.config.first_timeout)))
            if events and not opening.data:
                raise Failed(decode, "an empty stream", broken=True)
            if opening.error and opening.error[1] >= 500:
                text, code = opening.error  # the engine's message is for the client only
                raise Failed(decode, "an error event, code %d" % code, answer=Answered(
                    502, JSON, error_body(502, "%s: %s" % (decode.label, text))))
            return resp, opening
        except BaseException:
            resp.close()
            raise

    async def _relay(self, resp, opening, decode):
        try:
            self._forget_body()  # no other try follows
            self.first = time.monotonic()
            if opening.error is None:  # else it is the engine's refusal, in a stream
                self.router.metrics.first.add(self.first - self.begin)
                self.held.began(self.first - self.picked)
                self.router.metrics.chose(self.held)
            if not opening.events and resp.content.at_eof():
                self.members.succeeded(decode)
                return self._answer(200, bytes(opening.data), kind_of(resp))
            return await self._stream(resp, opening, decode)
        except ConnectionError:  # to the client
            raise asyncio.CancelledError from None
        finally:
            resp.close()

    async def _stream(self, resp, opening, decode):
        self.out = web.StreamResponse(headers={
            "Content-Type": kind_of(resp), "X-Request-Id": self.id, "Cache-Control": "no-cache"})
        if "Content-Encoding" in resp.headers:
            self.out.headers["Content-Encoding"] = resp.headers["Content-Encoding"]
        await self.out.prepare(self.request)
        loop, writing, failure = asyncio.get_running_loop(), True, None

        def still():
            if writing:
                self._abort()
            else:
                resp.content.set_exception(asyncio.TimeoutError("no data for %g s" %
                                                                self.config.idle_timeout))
        dog = Watchdog(loop, self.config.idle_timeout, still)
        try:
            data = bytes(opening.data)
            while data:
                writing = True
                await self._write(data)
                writing = False
                dog.touch()
                try:
                    data = await resp.content.read(PART)
                except BROKEN as error:
                    failure = Failed(decode, "answer broken off: %s" % words(error), broken=True)
                    break
                dog.touch()
            if failure is None:
                self.members.succeeded(decode)
                writing = True
                await self.out.write_eof()
                await self.request.writer.drain()
                self._log(200)
        finally:
            dog.stop()
        if failure is not None:
            self.members.failed(failure, None)
            await self._end_broken(502, str(failure))
        return self.out

    async def _write(self, data):
        await self.out.write(data)
        self.bytes += len(data)
        self.tail = (self.tail + data)[-2:]

    async def _end_broken(self, status, why):
        """The answer has started and cannot be completed: the client is sent an error."""
        self.router.metrics.cut += 1
        self.broke = True
        self._log(status, why)
        if not self.out.content_type == EVENTS or "Content-Encoding" in self.out.headers:
            self._abort()
            return
        try:
            event = b"data: " + error_body(status, why) + b"\n\n"
            await within(TAIL_S, self._write(event if self.tail == b"\n\n" else
                                             b"\n\n" + event))
            await within(TAIL_S, self.out.write_eof())
        except (asyncio.TimeoutError, ConnectionError):
            self._abort()

    def _abort(self):
        """Close without a proper end: an incomplete answer must not look complete."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def _cut_short(self):
        """The router ends the request: the time of its drain is over."""
        if self.out is None:
            return self._answer(503, error_body(503, self.cut), retry_after=1, why=self.cut)
        await self._end_broken(503, self.cut)
        return self.out
