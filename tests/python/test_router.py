# SPDX-License-Identifier: Apache-2.0
"""kvd.router between fake engines: the request to each of them, streams, failures before and
after the start of an answer, clients that disconnect."""
import asyncio
import json

import aiohttp
import pytest

from router_rig import ASK, HOST, SAID, World, aio, routed, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 4}


def message(text):
    return json.loads(text)["error"]["message"]


# ---- vLLM ----

@aio
async def test_request_is_sent_to_prefill_and_decode():
    async with routed() as (router, (prefill,), (decode,)):
        for path, body in (("/v1/completions", dict(ASK, min_tokens=4, echo=True)),
                           ("/v1/chat/completions", dict(CHAT, max_completion_tokens=9))):
            status, headers, said = await router.ask(body, path, headers={
                "X-Request-Id": "mine-7", "Authorization": "Bearer x", "X-Other": "y"})
            assert status == 200, said
            assert json.loads(said)["choices"][0]["text"] == "".join(SAID)
            assert headers["X-Request-Id"] == "mine-7"
            way, first, head = prefill.asked.pop()
            assert way == path and first["max_tokens"] == 1 and first["stream"] is False
            assert first.get("max_completion_tokens", 1) == 1
            assert not {"min_tokens", "echo"} & set(first)
            assert first["kv_transfer_params"] == {
                "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                "remote_block_ids": None, "remote_host": None, "remote_port": None}
            assert {k: v for k, v in first.items() if k in body and
                    k not in ("max_tokens", "max_completion_tokens")} == \
                {k: v for k, v in body.items()
                 if k not in ("max_tokens", "max_completion_tokens", "min_tokens", "echo")}
            way, second, other = decode.asked.pop()
            assert way == path and {k: v for k, v in second.items()
                                    if k != "kv_transfer_params"} == body
            assert second["kv_transfer_params"]["remote_block_ids"]
            for one in (head, other):
                assert one["X-Request-Id"] == "mine-7" and one["Authorization"] == "Bearer x"
                assert "X-Other" not in one
        assert [line.split()[3] for line in await router.lines(2)] == ["id=mine-7"] * 2


@aio
async def test_push_by_a_bootstrap_server():
    from router_rig import FAST, Fake, Router
    world = World()
    prefill, decode = [await Fake(world, role).start() for role in ("prefill", "decode")]
    router = await Router(["--prefill", prefill.url + ",bootstrap=10.0.0.1:8998", "--decode",
                           decode.url, *FAST]).start()
    rooms = set()
    for _ in range(8):
        status, _, said = await router.ask(dict(ASK, stream=True))
        assert status == 200 and said == decode.stream_of("/v1/completions")
        first, second = (f.asked.pop()[1]["kv_transfer_params"] for f in (prefill, decode))
        room = first.pop("bootstrap_room")
        assert first == {"do_remote_decode": True} and 0 < room < 1 << 63
        assert second == {"do_remote_prefill": True, "bootstrap_host": "10.0.0.1",
                          "bootstrap_port": 8998, "bootstrap_room": room}
        rooms.add(room)
    assert len(rooms) == 8
    assert await router.end() == 0
    for fake in (prefill, decode):
        await fake.runner.cleanup()


@pytest.mark.parametrize("more", [{"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}, {"n": 2}, {"n": "2"}, {"n": 2.0},
                                  {"use_beam_search": True}], ids=str)
def test_several_sequences_are_computed_on_decode(more):
    @aio
    async def run():
        async with routed() as (router, (prefill,), (decode,)):
            assert (await router.ask(dict(ASK, **more)))[0] == 200
            assert prefill.asked == []
            assert decode.asked[0][1] == dict(ASK, kv_transfer_params=None, **more)
    run()


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@aio
async def test_prompts_with_prompt_logprobs_are_computed_on_decode():
    """vLLM uses no cache for these, so that prefill would compute them for nothing."""
    async with routed() as (router, (prefill,), (decode,)):
        for more in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0},
                     {"prompt_logprob_token_ids": [[1]]}, {"echo": True, "logprobs": 1},
                     {"echo": True, "logprobs": 0}, dict(CHAT, prompt_logprobs=0),
                     dict(CHAT, echo=True)):
            path = "/v1/chat/completions" if "messages" in more else "/v1/completions"
            assert (await router.ask(dict(ASK, **more), path))[0] == 200
            assert prefill.asked == [], more
            assert decode.asked.pop()[1]["kv_transfer_params"] is None
        for more in ({"echo": True}, {"logprobs": 1}, {"prompt_logprobs": None},
                     {"echo": False, "logprobs": 1}):
            assert (await router.ask(dict(ASK, **more)))[0] == 200
            assert len(prefill.asked) == 1, more
            prefill.asked.clear()


@aio
async def test_client_kv_params_are_not_passed_on():
    """vLLM gives its scheduler what is in vllm_xargs, and reads kv_transfer_params of it."""
    async with routed() as (router, (prefill,), (decode,)):
        for more, asked in (({}, 2), ({"n": 2}, 1)):
            body = dict(ASK, ec_transfer_params={"peer": "203.0.113.9"}, **more, vllm_xargs={
                "kv_transfer_params": "203.0.113.9", "ec_transfer_params": 7, "mine": 1})
            assert (await router.ask(body))[0] == 200
            bodies = [one[1] for one in prefill.asked + decode.asked]
            assert [b["vllm_xargs"] for b in bodies] == [{"mine": 1}] * asked
            assert not any("ec_transfer_params" in b for b in bodies)
            prefill.asked.clear()
            decode.asked.clear()
        assert (await router.ask(dict(ASK, vllm_xargs="x")))[0] == 200
        assert decode.asked[0][1]["vllm_xargs"] == "x", "vLLM refuses it"


@aio
async def test_clients_own_transfer_parameters_reach_no_engine():
    forged = {"do_remote_prefill": True, "remote_host": "203.0.113.9", "remote_block_ids": [[1]]}
    async with routed() as (router, (prefill,), (decode,)):
        assert (await router.ask(dict(ASK, kv_transfer_params=forged)))[0] == 200
        text = b'{"kv_transfer_params": {"a": 1}, "prompt": "x", "max_tokens": 2, ' \
               b'"kv_transfer_params": {"remote_host": "203.0.113.9"}}'
        assert (await router.ask(text))[0] == 200
        for _, body, _ in prefill.asked + decode.asked:
            assert "203.0.113.9" not in json.dumps(body)


@aio
async def test_nothing_to_fetch_is_passed_on():
    async with routed() as (router, (prefill,), (decode,)):
        prefill.say = 200, '{"choices": [{"finish_reason": "stop"}]}'
        assert (await router.ask())[0] == 200
        assert decode.asked[0][1]["kv_transfer_params"] is None


# ---- SGLang ----

@aio
async def test_sglang_gets_the_same_body_twice():
    async with routed(kind="sglang") as (router, (prefill,), (decode,)):
        for path, body, size in (
                ("/v1/completions", ASK, None), ("/v1/chat/completions", CHAT, None),
                ("/generate", {"text": "a", "sampling_params": {"n": 1}}, None),
                ("/generate", {"input_ids": [1, 2, 3]}, None),
                ("/generate", {"input_ids": [[1], [2, 3]]}, 2),
                ("/generate", {"text": ["a", "b", "c"]}, 3),
                ("/v1/completions", dict(ASK, prompt=["a"]), 1)):
            forged = dict(body, bootstrap_host="203.0.113.9", bootstrap_room=7,
                          disagg_prefill_dp_rank=3)
            status, _, said = await router.ask(forged, path)
            assert status == 200, said
            (_, first, _), (_, second, _) = prefill.asked.pop(), decode.asked.pop()
            assert first == second
            host, port, rooms = (first.pop("bootstrap_" + n) for n in ("host", "port", "room"))
            assert first == body
            if size is None:
                host, port, rooms = [host], [port], [rooms]
            assert host == [HOST] * (size or 1) and port == [8998] * (size or 1)
            assert len(set(rooms)) == (size or 1)
        assert json.loads((await router.get("/v1/models"))[1])["data"] == [{"id": "m"}]


@aio
async def test_sglang_refuses_unsupported_requests():
    async with routed(kind="sglang") as (router, (prefill,), (decode,)):
        for path, body in (("/v1/completions", dict(ASK, n=2)),
                           ("/generate", {"text": "a", "sampling_params": {"n": 3}}),
                           ("/generate", {"text": ["a"] * 1025})):
            status, _, said = await router.ask(body, path)
            assert status == 400 and message(said), said
        assert prefill.asked == decode.asked == []


@aio
async def test_generate_is_sglangs():
    async with routed() as (router, (prefill,), _):
        status, _, said = await router.ask({"text": "a"}, "/generate")
        assert status == 501 and "vllm" in message(said) and prefill.asked == []


# ---- streams ----

@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_stream_is_passed_on_byte_for_byte(kind):
    @aio
    async def run():
        async with routed(kind=kind) as (router, _, (decode,)):
            paths = [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)]
            if kind == "sglang":
                paths.append(("/generate", {"text": "a"}))
            for path, body in paths:
                wanted = decode.stream_of(path)
                assert "水".encode() in wanted
                for decode.cuts in (0, 1, 7, 4096):
                    status, headers, said = await router.ask(dict(body, stream=True), path)
                    assert status == 200 and said == wanted, (path, decode.cuts)
                    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    run()


@aio
async def test_stream_is_passed_on_as_produced():
    async with routed() as (router, _, (decode,)):
        decode.pause = asyncio.Event()
        async with router.session.post(router.url + "/v1/completions", json=dict(
                ASK, stream=True, stream_options={"include_usage": True})) as resp:
            first = await resp.content.readuntil(b"\n\n")
            assert b"One" in first and not decode.pause.is_set()
            decode.pause.set()
            rest = await resp.read()
        assert first + rest == decode.stream_of("/v1/completions")


@aio
async def test_long_answer_without_stream():
    async with routed() as (router, _, (decode,)):
        decode.tokens = ["x" * 100000] * 30
        status, _, said = await router.ask()
        assert status == 200 and json.loads(said)["choices"][0]["text"] == "x" * 3000000


# ---- failures before the start of an answer ----

def failing(router):
    return [line for line in router.log.splitlines() if " retry id=" in line]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_killed_engine_is_avoided(kind, role):
    """Until its health is reported, requests detect it by themselves; none fails."""
    @aio
    async def run():
        async with routed(2, 2, kind, ["--health-interval", "30", "--policy", "round-robin"]) as (
                router, prefills, decodes):
            dead = (prefills if role == "prefill" else decodes)[0]
            await dead.kill()
            for stream in (False, True, False, True):
                status, _, said = await router.ask(dict(ASK, stream=stream))
                assert status == 200, said
            assert failing(router) and dead.label in failing(router)[0]
            assert len(failing(router)) == 1, "its circuit is open after one refused connection"
            assert await router.metric("kvd_router_retries_total") == 1
    run()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_engine_killed_while_it_works(kind, role, stream):
    @aio
    async def run():
        async with routed(2, 2, kind, ["--policy", "round-robin"]) as (router, prefills, decodes):
            victim = (prefills if role == "prefill" else decodes)[0]
            victim.silent = asyncio.Event()
            asked = asyncio.ensure_future(router.ask(dict(ASK, stream=stream)))
            await until(lambda: victim.running, router)
            await victim.kill()
            status, _, said = await asked
            assert status == 200 and b"One" in said, said
            line, = await router.lines()
            assert "tries=2" in line, line
    run()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_lost_cache_is_computed_by_another_pair(path, stream):
    """Prefill died after its answer: decode's stream starts with an error."""
    @aio
    async def run():
        async with routed(2, 2) as (router, prefills, decodes):
            take, lost = decodes[0].world.take, []

            def once(params):
                return bool(lost) and take(params) or lost.append(1)
            decodes[0].world.take = once
            body = dict(ASK if path == "/v1/completions" else CHAT, stream=stream)
            status, _, said = await router.ask(body, path)
            assert status == 200 and b"error" not in said, said
            if stream:
                assert said == decodes[0].stream_of(path)
            assert sum(len(f.asked) for f in prefills) == 2
            assert "Internal server error" not in router.log, "an engine's words"
            assert await router.metric("kvd_router_retries_total") == 1
    run()


@aio
async def test_engines_errors():
    async with routed(2, 2) as (router, prefills, decodes):
        for fake in prefills:
            fake.say = 404, '{"error": "no such model"}'
        status, _, said = await router.ask()
        assert (status, said) == (404, b'{"error": "no such model"}')
        assert sum(len(f.asked) for f in prefills) == 1, "the client's fault is not tried again"
        for fake in prefills:
            fake.say = 503, '{"error": "full"}'
        status, _, said = await router.ask()
        assert (status, said) == (503, b'{"error": "full"}')
        assert sum(len(f.asked) for f in prefills) == 4
        for fake in prefills:
            fake.say = None
        for fake in decodes:
            fake.say = 400, '{"error": "too long"}'
        assert (await router.ask())[0] == 400
        assert sum(len(f.asked) for f in decodes) == 1


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"kv_transfer_params": 7}', "", "[" * 100000],
                         ids=["text", "list", "number", "empty", "deep"])
def test_prefills_nonsense_is_an_error(text):
    @aio
    async def run():
        async with routed() as (router, (prefill,), (decode,)):
            prefill.say = 200, text
            status, _, said = await router.ask()
            assert status == 502 and prefill.label in message(said)
            assert decode.asked == [] and "3 tries" in message(said)
    run()


@aio
async def test_silent_engine_is_abandoned():
    async with routed(options=["--first-timeout", "0.3", "--prefill-timeout", "0.3",
                               "--deadline", "5"]) as (router, (prefill,), (decode,)):
        prefill.silent = asyncio.Event()
        status, _, said = await router.ask()
        assert status == 504 and prefill.label in message(said), said
        await until(lambda: not prefill.running, router)
        prefill.silent = None
        decode.silent = asyncio.Event()
        await router.until_health()
        status, _, said = await router.ask(dict(ASK, stream=True))
        assert status == 504 and decode.label in message(said), said


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_hanging_prefill_is_left_out(kind):
    """Its health answers. The first request that it holds goes to another after seconds, and the
    next ones go there at once."""
    @aio
    async def run():
        options = ["--prefill-timeout", "0.5", "--circuit-open", "60", "--policy", "round-robin"]
        async with routed(2, 1, kind, options) as (router, (hung, well), _):
            hung.silent = asyncio.Event()
            for _ in range(6):
                status, _, said = await router.ask(dict(ASK, stream=True))
                assert status == 200 and b"One" in said, said
            assert len(hung.asked) == 1 and len(well.asked) == 6
            labels = '{role="prefill",url="%s"}' % hung.url
            assert await router.metric("kvd_router_member_up" + labels) == 0
            assert await router.metric("kvd_router_member_late_total" + labels) == 1
            await well.kill()
            await router.until_health(wanted=503)
            assert "%s (failed lately: no answer within" % hung.label in \
                message((await router.get("/health"))[1])
    run()


@pytest.mark.parametrize("role", [0, 1])
def test_member_with_short_deadline_is_not_left_out(role):
    """The request's deadline was near: that tells little of the member."""
    @aio
    async def run():
        async with routed(options=["--deadline", "0.5", "--circuit-open", "60"]) as (
                router, (prefill,), (decode,)):
            slow = (prefill, decode)[role]
            slow.silent = asyncio.Event()
            status, _, said = await router.ask()
            assert status == 504 and slow.label in message(said), said
            labels = '{role="%s",url="%s"}' % (slow.role, slow.url)
            assert await router.metric("kvd_router_member_late_total" + labels) == 1
            assert await router.metric("kvd_router_member_up" + labels) == 1
    run()


@aio
async def test_prefill_slow_for_one_request_is_not_left_out():
    """It answers others meanwhile, and is waited for."""
    async with routed(1, 1, options=["--prefill-timeout", "3", "--retries", "0"]) as (
            router, (prefill,), _):
        serve, go = prefill.vllm, asyncio.Event()

        async def slow(request, body):
            if body["prompt"] == "slow":
                await go.wait()
            return await serve(request, body)
        prefill.vllm = slow
        late = asyncio.ensure_future(router.ask(dict(ASK, prompt="slow")))
        await until(lambda: prefill.running, router)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while loop.time() < begin + 4:
            assert (await router.ask())[0] == 200
        assert not late.done()
        go.set()
        assert (await late)[0] == 200


# ---- failures after it ----

@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("cut", ["between", "within", "still"])
def test_broken_stream_ends_with_an_error(kind, cut):
    @aio
    async def run():
        async with routed(1, 1, kind, ["--idle-timeout", "0.5"]) as (router, _, (decode,)):
            if cut == "within":
                decode.error_at = 2
            else:
                decode.pause = asyncio.Event()
            async with router.session.post(router.url + "/v1/chat/completions",
                                           json=dict(CHAT, stream=True)) as resp:
                said = await resp.content.readuntil(b"One\"}, \"finish_reason\": null}]}\n\n")
                if cut == "within":
                    said += await resp.content.readuntil(b"\n\n") + \
                        await resp.content.readexactly(9)
                if cut != "still":
                    await decode.kill()
                said += await resp.read()  # ends properly
            events = said.split(b"\n\n")
            assert events[-1] == b"" and b"[DONE]" not in said
            error = json.loads(events[-2][6:])["error"]
            assert error["code"] == 502 and decode.label in error["message"], error
            assert await router.metric("kvd_router_streams_cut_total") == 1
            line, = await router.lines()
            assert "status=502" in line and "why=" in line
    run()


@aio
async def test_answer_without_stream_is_not_complete():
    async with routed() as (router, _, (decode,)):
        async def half(request, body):
            out = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json"})
            await out.prepare(request)
            await out.write(b" " * 3000000)
            request.transport.abort()
            return out
        decode.answer = half
        with pytest.raises(aiohttp.ClientError):
            await router.ask()


# ---- clients that leave ----

@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("when", ["prefill", "decode", "stream"])
def test_client_disconnect_cancels_both(kind, when):
    @aio
    async def run():
        async with routed(1, 1, kind) as (router, (prefill,), (decode,)):
            if when == "stream":
                decode.pause = asyncio.Event()
            else:
                (prefill if when == "prefill" else decode).silent = asyncio.Event()
            async with aiohttp.ClientSession() as session:
                asked = asyncio.ensure_future(session.post(router.url + "/v1/completions",
                                                           json=dict(ASK, stream=True)))
                if when == "stream":
                    await (await asked).content.readany()
                else:
                    waits = prefill if when == "prefill" else decode
                    await until(lambda: waits.running, router)
                asked.cancel()
            await until(lambda: not prefill.running + decode.running, router)
            assert prefill.left + decode.left >= 1
            await until(lambda: "status=499" in router.log, router)
            assert await router.metric("kvd_router_member_requests") == 0
            assert await router.metric("kvd_router_in_flight") == 0
            assert await router.metric("kvd_router_clients_left_total") == 1
            prefill.silent = decode.silent = decode.pause = None
            assert (await router.ask())[0] == 200
    run()


@aio
async def test_engines_are_queried_directly():
    """A proxy of the environment is for the world, not for engines."""
    away = "http://127.0.0.1:9"
    env = {"http_proxy": away, "HTTP_PROXY": away, "ALL_PROXY": away, "no_proxy": ""}
    async with routed(env=env) as (router, _, _):
        assert (await router.ask())[0] == 200
