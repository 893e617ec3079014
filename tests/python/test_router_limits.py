# SPDX-License-Identifier: Apache-2.0
"""kvd.router against hostile clients; its queue, its end, many streams."""
import asyncio
import gzip
import json
import os
import re
import signal
import socket

import aiohttp
import pytest

from kvd_daemon import need_fds
from router_rig import ASK, SAID, aio, routed, until

STREAM = dict(ASK, stream=True)


def message(text):
    return json.loads(text)["error"]["message"]


def post(body, head="", path="/v1/completions"):
    return ("POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            "Content-Type: application/json\r\n%s\r\n%s" % (path, head, body)).encode()


# ---- requests that are none ----

@aio
async def test_bad_bodies_reach_no_engine():
    async with routed() as (router, (prefill,), (decode,)):
        for text in (b"{", b"[]", b'[["model", "m"]]', b"7", b'"ab"', b"\xff", b"", b"[" * 200000,
                     b'{"prompt": "x", "a": NaN}', b'{"prompt": "x", "a": 1e999}',
                     b'{"prompt": "x", "a": %s}' % (b"9" * 5000)):
            status, headers, said = await router.ask(text)
            assert status == 400 and "JSON" in message(said), (text[:20], said)
            assert headers["Content-Type"] == "application/json"
        assert prefill.asked == decode.asked == []
        status, _, said = await router.ask(b'{"prompt": "\\ud800", "max_tokens": 2}')
        assert status == 200, said


@aio
async def test_bodies_and_headers_above_the_limits():
    async with routed(options=["--max-body", "1000", "--max-header", "2000"]) as (
            router, (prefill,), _):
        status, _, said = await router.ask(dict(ASK, prompt="x" * 1000))
        assert status == 413 and "max-body" in message(said)

        async def parts():
            for _ in range(3):
                yield b" " * 500
        async with router.session.post(router.url + "/v1/completions", data=parts(),
                                       headers={"Content-Type": "application/json"}) as resp:
            assert resp.status == 413 and "max-body" in message(await resp.read())
        for headers in ({"X-Long": "x" * 2100},
                        {"X-%d" % i: "x" * 90 for i in range(25)}):
            status, _, said = await router.ask(headers=headers)
            assert status in (400, 431), said
        said = await router.raw(post("", "Content-Length: 0\r\n", "/" + "x" * 9000))
        assert " 400 " in said.split("\r\n")[0] or " 414 " in said.split("\r\n")[0], said
        assert prefill.asked == []
        assert (await router.ask())[0] == 200


@aio
async def test_one_request_is_not_parsed_as_two():
    body = json.dumps(ASK)
    inner = post("{}", "Content-Length: 2\r\n", "/v1/chat/completions").decode()
    async with routed() as (router, (prefill,), (decode,)):
        for head, text in (
                ("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(body),
                 "0\r\n\r\n" + inner),
                ("Content-Length: 5\r\nContent-Length: %d\r\n" % len(body), body + inner),
                ("Transfer-Encoding: chunked, identity\r\n", "0\r\n\r\n" + inner),
                ("Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n" % len(body),
                 body + inner),
                ("Transfer-Encoding : chunked\r\n", "0\r\n\r\n" + inner),
                ("Content-Length: +%d\r\n" % len(body), body),
                ("Content-Length: x\r\n", body), ("Content-Length: -1\r\n", body)):
            said = await router.raw(post(text, head))
            assert said.split(" ")[1] == "400", (head, said)
            assert said.count("HTTP/1.") == 1, (head, said)
        assert prefill.asked == decode.asked == []
        # what is passed on is written anew, with headers of the router's own
        said = await router.raw(post(body, "Content-Length: %d\r\nX-Request-Id: a b\r\n"
                                     "Connection: X-Foo\r\nX-Foo: 1\r\n" % len(body)))
        assert " 200 " in said, said
        assert "X-Foo" not in prefill.asked[0][2] and " " not in \
            prefill.asked[0][2]["X-Request-Id"]


@aio
async def test_compressed_body_is_refused():
    """What it takes would not be known before it is read."""
    body = gzip.compress(json.dumps(dict(ASK, prompt="x" * 1000000)).encode())
    async with routed(options=["--max-body", "2000000"]) as (router, (prefill,), (decode,)):
        for name in ("gzip", "deflate", "br", "zstd", "identity, gzip"):
            status, _, said = await router.ask(body, headers={"Content-Encoding": name})
            assert status == 415 and "Content-Encoding" in message(said), (name, said)
        assert prefill.asked == decode.asked == []
        assert (await router.ask(headers={"Content-Encoding": "identity"}))[0] == 200


@aio
async def test_headers_not_text_are_refused():
    body = json.dumps(ASK)
    async with routed() as (router, (prefill,), (decode,)):
        for value in (b"Bearer \xff", b"Bearer \xc3\xa4", b"Bearer \xed\xa0\x80"):
            said = await router.raw(post(body, "Content-Length: %d\r\nAuthorization: @\r\n" %
                                         len(body)).replace(b"@", value))
            assert " 400 " in said and "Authorization" in said, said
            said = await router.raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                                    b"Authorization: %s\r\n\r\n" % value)
            assert " 400 " in said and "Authorization" in said, said
        assert prefill.asked == decode.asked == []


class Raw:
    """A decode server that answers each POST with these bytes."""

    def __init__(self, text):
        self.text = text

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return "http://127.0.0.1:%d" % self.server.sockets[0].getsockname()[1]

    async def serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
            await reader.readexactly(length)
            writer.write(self.text)
        await writer.drain()
        writer.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


@pytest.mark.parametrize("text", [
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK + b"secret words\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nsecret words\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK + CHUNK[:-2] + b"secret words\r\n",
    b"secret words\r\n\r\n", b"HTTP/1.1 200 OK\r\nsecret words\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: secret words\r\n\r\n", b"",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/\xff\xfe; a=secret\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 400 No\r\nContent-Type: \xff\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: \xff\r\nContent-Type: text/event-stream\r\n\r\n" + EVENT,
    b"HTTP/1.1 200 OK\r\nContent-Type: " + b"x" * 9000 + b"\r\nContent-Length: 2\r\n\r\n{}",
], ids=range(11))
def test_engine_with_other_protocol(text):
    """An answer or an error in JSON, and nothing of it in the log."""
    @aio
    async def run():
        server = Raw(text)
        url = await server.start()
        async with routed(1, 0, options=["--decode", url, "--retries", "0"]) as (router, _, _):
            for ask in (ASK, STREAM):
                try:
                    status, headers, said = await router.ask(ask)
                except aiohttp.ClientPayloadError:
                    continue  # it had begun
                assert status in (200, 400, 502), said
                if status == 502:
                    assert message(said)
            await router.lines(2)
            assert "secret" not in router.log and " status=500" not in router.log, router.log
            assert await router.metric("kvd_router_in_flight") == 0
        server.server.close()
    run()


@aio
async def test_other_endpoints_are_refused():
    async with routed() as (router, (prefill,), (decode,)):
        for path in ("/sleep", "/v1/embeddings", "/v1/completions/../sleep", "/members", "/flip",
                     "http://203.0.113.9/v1/completionsx", "@127.0.0.1:1/v1/completions"):
            said = await router.raw(post("{}", "Content-Length: 2\r\n", path))
            assert said.split("\r\n")[0].split()[1] in ("404", "400"), (path, said)
        status, said = await router.get("/v1/completions")
        assert status == 405 and "POST" in message(said)
        status, said = await router.get("/nothing")
        assert status == 404 and "/nothing" in message(said)
        assert prefill.asked == decode.asked == []


@aio
async def test_missing_body_times_out():
    async with routed(options=["--client-timeout", "0.3"]) as (router, _, _):
        said = await router.raw(post("{", "Content-Length: 100\r\n"))
        assert " 408 " in said and "client-timeout" not in said
        assert await router.metric("kvd_router_in_flight") == 0


@aio
async def test_client_not_reading():
    """Its stream is cut, and the engine's with it."""
    async with routed(options=["--idle-timeout", "0.5"]) as (router, _, (decode,)):
        decode.tokens = ["x" * 100000] * 1000
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1)
        body = json.dumps(STREAM)
        writer.write(post(body, "Content-Length: %d\r\n" % len(body)))
        await until(lambda: decode.running, router)
        await until(lambda: not decode.running, router)
        assert decode.left == 1
        writer.close()


@aio
async def test_client_not_reading_the_end():
    """All that it was sent waits in the router: it is cut as well."""
    async with routed(options=["--idle-timeout", "0.5"]) as (router, _, (decode,)):
        lines, fds = [], "/proc/%d/fd" % router.proc.pid
        before = len(os.listdir(fds))
        for size, ask in [(n * 16000, STREAM) for n in range(1, 40)] + [(900000, ASK)] * 20:
            decode.tokens = ["x" * size]
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # little is on its way
            sock.connect(("127.0.0.1", router.port))
            body = json.dumps(ask)
            sock.sendall(post(body, "Content-Length: %d\r\n" % len(body)))
            lines.append(sock)
            await until(lambda: len(decode.asked) == len(lines), router)
        await until(lambda: not decode.running, router)

        async def none():
            return await router.metric("kvd_router_in_flight") == 0
        await until(none, router)
        await until(lambda: len(os.listdir(fds)) < before + 20, router)
        for sock in lines:
            sock.close()


@aio
async def test_models_are_queried_within_the_limits():
    async with routed(options=["--max-in-flight", "1", "--max-queued", "0"]) as (
            router, _, (decode,)):
        decode.pause = asyncio.Event()
        running = asyncio.ensure_future(router.ask(STREAM))
        await until(lambda: decode.running, router)
        status, said = await router.get("/v1/models")
        assert status == 429 and "max-in-flight" in message(said)
        decode.pause.set()
        assert (await running)[0] == 200
        for _ in range(3):
            assert (await router.get("/v1/models"))[0] == 200


# ---- the queue ----

@aio
async def test_queue():
    options = ["--max-in-flight", "2", "--max-queued", "2", "--queue-timeout", "30"]
    async with routed(options=options) as (router, _, (decode,)):
        decode.silent = asyncio.Event()
        running = [asyncio.ensure_future(router.ask()) for _ in range(2)]
        await until(lambda: decode.running == 2, router)
        waiting = [asyncio.ensure_future(router.ask()) for _ in range(2)]

        async def queued(count):
            async def holds():
                return await router.metric("kvd_router_queued") == count
            await until(holds, router)
        await queued(2)
        status, headers, said = await router.ask()
        assert status == 429 and headers["Retry-After"] and "max-queued" in message(said)
        waiting.pop().cancel()  # a client that leaves gives its place up
        await queued(1)
        waiting.append(asyncio.ensure_future(router.ask()))
        await queued(2)
        decode.silent.set()
        assert [a[0] for a in await asyncio.gather(*running, *waiting)] == [200] * 4
        assert decode.most == 2
        assert await router.metric("kvd_router_in_flight") == 0
        assert await router.metric("kvd_router_refused_total") == 1


@aio
async def test_queue_has_an_end():
    options = ["--max-in-flight", "1", "--queue-timeout", "0.3"]
    async with routed(options=options) as (router, _, (decode,)):
        decode.silent = asyncio.Event()
        first = asyncio.ensure_future(router.ask())
        await until(lambda: decode.running, router)
        status, headers, said = await router.ask()
        assert status == 503 and headers["Retry-After"] and "queue-timeout" in message(said)
        decode.silent.set()
        assert (await first)[0] == 200


@aio
async def test_bodies_together_have_a_limit():
    async with routed(options=["--max-bodies", "2000"]) as (router, _, (decode,)):
        decode.pause, decode.silent = asyncio.Event(), asyncio.Event()
        body = dict(STREAM, prompt="x" * 1000)
        first = asyncio.ensure_future(router.ask(body))
        await until(lambda: decode.running, router)
        status, headers, said = await router.ask(body)
        assert status == 429 and headers["Retry-After"] and "max-bodies" in message(said)
        decode.silent.set()  # the first one's answer begins: its body is forgotten

        async def begun():
            return await router.metric("kvd_router_first_token_seconds_count") == 1
        await until(begun, router)
        second = asyncio.ensure_future(router.ask(body))
        await until(lambda: decode.running == 2, router)
        decode.pause.set()
        assert (await first)[0] == (await second)[0] == 200
        assert (await router.ask(dict(ASK, prompt="x" * 3000)))[0] == 200, "alone it may"


# ---- its end ----

def workers(router):
    """Of a router's process: those that read large bodies."""
    with open("/proc/%d/task/%d/children" % ((router.proc.pid,) * 2)) as children:
        pids = [int(pid) for pid in children.read().split()]
    out = []
    for pid in pids:
        with open("/proc/%d/cmdline" % pid) as words:
            out += [pid] if "spawn_main" in words.read() else []
    return out


@aio
async def test_large_bodies_are_read_off_the_loop():
    """By processes that are frozen here: everything else continues."""
    numbers = dict(STREAM, prompt=[7] * 100000)
    async with routed() as (router, (prefill,), (decode,)):
        status, _, said = await router.ask(numbers)
        assert status == 200 and said == decode.stream_of("/v1/completions")
        assert len(prefill.asked[0][1]["prompt"]) == 100000
        status, _, said = await router.ask(b'{"prompt": [%s' % (b"7," * 100000))
        assert status == 400 and "JSON" in message(said)
        pids = workers(router)
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        large = asyncio.ensure_future(router.ask(numbers))

        async def runs():
            return await router.metric("kvd_router_in_flight") == 1
        await until(runs, router)
        assert (await router.ask())[0] == 200 and (await router.get("/healthz"))[0] == 200
        assert not large.done()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert (await large)[0] == 200
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not set(pids) & set(workers(router)), router)

        async def again():
            return (await router.ask(numbers))[0] == 200
        await until(again, router)


@aio
async def test_announced_bodies_take_no_memory():
    """A client that announces a length, and sends nothing, excludes no other."""
    options = ["--max-bodies", "100000", "--max-in-flight", "2", "--max-queued", "0"]
    async with routed(options=options) as (router, _, _):
        silent = []
        for _ in range(8):
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(post("", "Content-Length: 90000\r\n"))
            await writer.drain()
            silent.append(writer)
        for _ in range(3):
            status, _, said = await router.ask()
            assert status == 200, said
        silent[0].write(b" " * 89000)  # this one is there
        await silent[0].drain()

        async def refused():
            return (await router.ask(dict(ASK, prompt="x" * 20000)))[0] == 429
        await until(refused, router)
        assert (await router.ask())[0] == 200
        for writer in silent:
            writer.close()


@aio
async def test_bodies_of_another_type_are_refused():
    async with routed() as (router, (prefill,), (decode,)):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, _, said = await router.ask(headers={"Content-Type": kind})
            assert status == 415 and kind in message(said), said
        said = await router.raw(post("{}", "Content-Length: 2\r\n").replace(
            b"Content-Type: application/json\r\n", b""))
        assert " 415 " in said, said
        assert prefill.asked == decode.asked == []
        kind = "application/json; charset=utf-8"
        assert (await router.ask(headers={"Content-Type": kind}))[0] == 200


@aio
async def test_drain_under_load():
    async with routed(2, 2) as (router, _, decodes):
        for decode in decodes:
            decode.pause = asyncio.Event()
        asked = [asyncio.ensure_future(router.ask(STREAM)) for _ in range(20)]
        await until(lambda: sum(d.running for d in decodes) == 20, router)
        router.proc.send_signal(signal.SIGTERM)
        await router.until_health(wanted=503)
        status, headers, said = await router.ask()
        assert status == 503 and headers["Retry-After"] and "draining" in message(said)
        assert (await router.get("/healthz"))[0] == 200
        for decode in decodes:
            decode.pause.set()
        wanted = decodes[0].stream_of("/v1/completions")
        for status, _, said in await asyncio.gather(*asked):
            assert status == 200 and said == wanted
        assert await router.end(0) == 0


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_drain_has_an_end(how):
    @aio
    async def run():
        options = ["--drain-timeout", "0.5" if how == "deadline" else "60"]
        async with routed(options=options) as (router, (prefill,), (decode,)):
            decode.pause = asyncio.Event()
            streamed = asyncio.ensure_future(router.ask(STREAM))
            await until(lambda: decode.running, router)
            await until(lambda: "first" in router.log or decode.running, router)
            prefill.silent = asyncio.Event()
            waiting = asyncio.ensure_future(router.ask())
            await until(lambda: prefill.running, router)
            router.proc.send_signal(signal.SIGTERM)
            if how != "deadline":
                await until(lambda: "draining" in router.log, router)
                router.proc.send_signal(signal.SIGTERM)
            status, _, said = await streamed
            assert "router shuts down" in message(said.split(b"\n\n")[-2][6:] if status == 200
                                            else said), said
            status, _, said = await waiting
            assert status == 503 and "router shuts down" in message(said)
            await until(lambda: not decode.running + prefill.running, router)
            assert await router.end(0) == 0
    run()


# ---- many ----

def memory(pid):
    with open("/proc/%d/status" % pid) as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


# a thousand take a minute of a busy machine: `make test` opens a part of them
STREAMS = 200 if os.environ.get("KVD_SWEEP") else 1000
WHOLE, PART, PARTS = 10, 16384, 256


@aio
async def test_streams_take_bounded_memory():
    """Each has 4 MiB for a client that does not read yet, and takes little into its socket."""
    need_fds(8192)
    options = ["--max-in-flight", str(STREAMS), "--connect-timeout", "60", "--health-timeout", "60",
               "--prefill-timeout", "60"]
    async with routed(options=options) as (router, _, (decode,)):
        decode.tokens = ["x" * PART] * PARTS
        before, body = memory(router.proc.pid), json.dumps(STREAM)
        loop, lines = asyncio.get_running_loop(), []

        async def client():
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # loopback's segments of 64 KiB give the other side 1.3 MiB to send from
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", router.port))
            lines.append(sock)
            await loop.sock_sendall(sock, post(
                body, "Content-Length: %d\r\n" % len(body)))

        async def whole(sock):
            size, tail = 0, b""
            while data := await loop.sock_recv(sock, 1 << 16):
                size, tail = size + len(data), (tail + data)[-40:]
            assert size > PART * PARTS and tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"), tail
        for _ in range(STREAMS // 50):
            await asyncio.gather(*(client() for _ in range(50)))
        await until(lambda: decode.running == STREAMS, router)
        assert await router.metric("kvd_router_in_flight") == STREAMS
        seen = []

        def settled():
            seen.append(memory(router.proc.pid))
            return len(seen) > 100 and seen[-1] - seen[-100] < 1 << 20
        await until(settled, router)
        assert decode.running == STREAMS, router.log[-2000:]
        most = max(seen) - before
        print("%d streams: %.0f KiB each" % (STREAMS, most / STREAMS / 1024))
        assert most < STREAMS * 512 << 10, "%d MiB" % (most >> 20)
        await asyncio.gather(*(whole(sock) for sock in lines[:WHOLE]))
        for sock in lines:
            sock.close()
        await until(lambda: not decode.running, router)
        assert decode.left == STREAMS - WHOLE

        async def none():
            return await router.metric("kvd_router_in_flight") == 0
        await until(none, router)


@aio
async def test_many_at_once_all_end():
    need_fds(4096)
    async with routed(3, 3) as (router, prefills, decodes):
        answers = await asyncio.gather(*(router.ask(dict(ASK, stream=i % 2 == 0))
                                         for i in range(300)))
        assert [a[0] for a in answers] == [200] * 300
        assert all(SAID[2].strip().encode() in a[2] or b"\\u6c34" in a[2] for a in answers)
        for fakes in (prefills, decodes):
            served = sorted(len(f.asked) for f in fakes)
            assert sum(served) == 300 and served[0] >= 75, served


@aio
async def test_connections_of_the_client_are_kept():
    async with routed() as (router, _, _):
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for path in ("/v1/completions", "/nothing", "/v1/completions"):
                async with session.post(router.url + path, json=ASK) as resp:
                    assert resp.status == (404 if path == "/nothing" else 200)
                    await resp.read()
