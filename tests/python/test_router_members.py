# SPDX-License-Identifier: Apache-2.0
"""Which members kvd.router asks: dead lists, health, circuits, files, the directory, flips, slow
ones."""
import asyncio
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types

import pytest

import kvd
from kvd.router import admin, bulk, config, directory, engines, policy, stream
from kvd.router import members as router_members
from kvd.router.directory import Group
from kvd.router.errors import Refused
from kvd.router.exchange import Exchange
from kvd.router.members import Circuit, Members
from kvd.router.metrics import Histogram, Metrics
from kvd_daemon import Daemon, free_port
from router_daemon import Directory
from router_rig import ASK, FAST, Fake, Router, World, aio, members, pause, routed, spawn, until

STREAM = dict(ASK, stream=True)


def message(text):
    return json.loads(text)["error"]["message"]


# ---- parts ----

def test_circuit():
    one = Circuit(3, 5)
    for _ in range(2):
        one.failed(0)
    assert one.permits(0)
    one.succeeded()
    for _ in range(3):
        one.failed(10)
    assert not one.permits(14.9) and one.permits(15)
    one.taken()
    assert not one.permits(15), "one request goes first"
    one.released()
    assert one.permits(15), "it said nothing"
    one.taken()
    one.failed(15)
    assert not one.permits(24.9) and one.permits(25), "twice as long"
    one.taken()
    one.succeeded()
    assert one.permits(25)
    for _ in range(20):
        one.refused(100)
    assert one.permits(160), "at most a minute"


def test_circuit_distinguishes_failures():
    one = Circuit(3, 5)
    for _ in range(8):
        one.failed(0, "prefill 1", others=True)
    assert one.permits(0), "all were with one partner"
    many = Circuit(3, 5)
    for _ in range(9):
        many.failed(0, "prefill 1", others=True)
    assert not many.permits(0)
    one.failed(0, "prefill 2", others=False)
    assert not one.permits(0)
    two = Circuit(3, 5)
    for _ in range(3):
        two.failed(0, "prefill 1", others=False)
    assert not two.permits(0), "there is no other partner"


@pytest.mark.parametrize("text", [
    "10.0.0.1:8000", "ftp://a:1", "http://a", "http://a:0", "http://a:65536", "http://a:1/x",
    "http://u:p@a:1", "http://a:1?x", "http://a:1#x", "http://:1", "http://a b:1", "http://[::1:1",
    "http://a:1,boot=a:1", "http://a:1,bootstrap=a", "http://a:1,bootstrap=a:99999", ""])
def test_invalid_members_are_refused(text):
    with pytest.raises(ValueError):
        config.member_spec(text, "prefill", "vllm")


def test_members_and_their_bootstrap_servers():
    spec = config.member_spec("http://[fd00::1]:8000,bootstrap=[fd00::2]:9", "prefill", "vllm")
    assert spec.url == "http://[fd00::1]:8000" and spec.bootstrap == ("fd00::2", 9)
    assert config.member_spec("http://a:1", "prefill", "vllm").bootstrap is None
    assert config.member_spec("https://a:1/", "prefill", "sglang").bootstrap == ("a", 8998)
    assert config.member_spec("http://a:1", "decode", "sglang").bootstrap is None


@pytest.mark.parametrize("argv", [
    [], ["--prefill", "http://a:1"], ["--prefill", "x", "--decode", "http://a:1"],
    ["--prefill", "@/nonexistent", "--decode", "http://a:1"], ["--listen", "x"],
    ["--retries", "-1"], ["--idle-timeout", "0"], ["--max-body", "x"], ["--policy", "best"],
    ["--socket", "/x", "--health-path", "health"]], ids=" ".join)
def test_invalid_options_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as end:
        config.read(argv)
    assert end.value.code == 2 and "kvd.router: error:" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["__version__ = '3.8.4'", "raise ImportError('none')"])
def test_old_or_missing_aiohttp_is_refused(text):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "aiohttp.py"), "w") as out:
            out.write(text)
        done = subprocess.run([sys.executable, "-m", "kvd.router", "--help"], text=True,
                              env=dict(os.environ, PYTHONPATH=folder), capture_output=True)
        assert done.returncode == 1 and "aiohttp 3.10" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and "aiohttp>=3.10" in done.stderr


def test_estimates():
    assert engines.estimate({"prompt": [1] * 77}, 9) == 77
    assert engines.estimate({"input_ids": [[1] * 7, [2]]}, 9) == 8
    assert engines.estimate({"prompt": "x" * 400}, 440) == 110
    assert engines.estimate({}, 2) == 1


@pytest.mark.parametrize("cuts", [1, 3, 1000])
def test_opening(cuts):
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    token = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    lost = b'data: {"error": {"message": "lost", "code": 500}}\n\n'
    abort = b'data: {"meta_info": {"finish_reason": {"type": "abort", "status_code": 503, ' \
            b'"message": "m"}}}\n\n'
    for text, error in ((role + token, None), (role + lost, ("lost", 500)), (lost, ("lost", 500)),
                        (b": ping\n\n" + role + abort, ("m", 503)), (token + lost, None),
                        (b"data: [DONE]\n\n", None), (b"data: {\n\n", None),
                        (b"data: " + b"[" * 5000 + b"\n\n", None), (b"event: x\r\n\r\n", None)):
        one = stream.Opening(True, 0)
        for at in range(0, len(text), cuts):
            if one.done:
                break
            one.feed(text[at:at + cuts])
        assert one.done and one.error == error, text
        assert text.startswith(bytes(one.data)), "nothing is lost or changed"
    one = stream.Opening(True, 0)
    one.feed(role)
    assert not one.done
    one.feed(b"")
    assert one.done and one.error is None
    one = stream.Opening(True, 0)
    one.feed(b"data: " + b"x" * stream.HELD_MAX)
    assert one.done, "what never ends is passed on"


def test_random_bytes_are_an_opening():
    rng = random.Random(7)
    for _ in range(2000):
        text = bytes(rng.choice(b'data: {}[]"error\n\\\r:,1') for _ in range(rng.randrange(200)))
        one = stream.Opening(True, 0)
        for at in range(0, len(text), 5):
            one.feed(text[at:at + 5])
        one.feed(b"")
        assert one.done and bytes(one.data) == text


def specs(*ranks, gone=(), whole=False, revision=1):
    group = Group("prefill", "prefill", "vllm")
    group.take({"ranks": list(ranks), "gone": list(gone), "whole": whole, "revision": revision})
    return group.specs()


def test_entries_of_the_directory():
    url = "http://10.0.0.1:8000"
    one, = specs({"worker": "a", "tp_rank": 0, "url": url, "engine": "sglang",
                  "bootstrap": "10.0.0.1:9"}, {"worker": "a", "tp_rank": 1})
    assert (one.url, one.engine, one.bootstrap, one.worker) == (url, "sglang", ("10.0.0.1", 9), "a")
    assert not one.draining
    one, = specs({"worker": "a", "url": url}, {"worker": "a", "tp_rank": 1, "state": "draining"})
    assert one.draining and one.engine == "vllm"
    for wrong in ({"worker": "a"}, {"worker": "a", "url": 7}, {"worker": "a", "url": "file:///etc"},
                  {"worker": "a", "url": url, "engine": "x"},
                  {"worker": "a", "url": url, "bootstrap": "x"}, {"worker": "a", "url": url + "/x"}):
        assert [s.worker for s in specs(wrong, {"worker": "b", "url": url})] == ["b"], wrong
    for wrong in ({"worker": 7}, {"worker": "a", "tp_rank": "0"}, {"worker": "a", "tp_rank": True}):
        with pytest.raises(ValueError):
            specs(wrong)
    for answer in ({"ranks": 7}, {"ranks": [7]}, {"gone": {}}, {"ranks": [], "gone": [None]}):
        with pytest.raises(ValueError):
            Group("g", "prefill", "vllm").take(answer)


def test_changes_of_the_directory():
    url, group = "http://10.0.0.1:%d", Group("g", "prefill", "vllm")

    def after(**answer):
        group.take(answer)
        return {s.worker for s in group.specs()}
    assert after(revision=5, whole=True, ranks=[
        {"worker": w, "url": url % (i + 1)} for i, w in enumerate("abc")]) == {"a", "b", "c"}
    assert after(revision=6, ranks=[], gone=[{"worker": "b"}]) == {"a", "c"}
    assert after(revision=7, ranks=[{"worker": "d", "url": url % 9}]) == {"a", "c", "d"}
    assert after(revision=8, whole=True, ranks=[{"worker": "e", "url": url % 9}]) == {"e"}


def test_empty_or_partial_directory(monkeypatch):
    """Just after its start: members stay. Later: they go at once."""
    now, listed = [0.0], []
    monkeypatch.setattr(directory.time, "monotonic", lambda: now[0])
    options = config.read(["--socket", "/x"])
    one = directory.Directory(options, types.SimpleNamespace(
        source=lambda name, specs: listed.append([s.worker for s in specs])))
    answers = []

    class Client:
        async def command(self, cmd, **args):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    def ask(answer, at):
        now[0] = at
        answers.append(answer)
        asyncio.run(one.ask(Client(), one.groups[0]))
        return listed[-1] if listed else None
    ranks = [{"worker": "a", "url": "http://10.0.0.1:1"}, {"worker": "b", "url": "http://10.0.0.1:2"}]
    empty = kvd.NotFoundError("nobody")
    one.begin = 1
    assert ask({"revision": 1, "ranks": ranks, "whole": True, "synced": False}, 1) == ["a", "b"], \
        "what is known of a directory that is away"
    assert ask(empty, 2) == ["a", "b"]
    assert ask({"revision": 1, "ranks": [], "whole": True}, 10.5) == ["a", "b"]
    for gone in ({"gone": [{"worker": "a"}]}, {"whole": True, "ranks": ranks[:1]}):
        assert ask(dict({"revision": 2, "ranks": []}, synced=False, **gone), 10.6) == ["a", "b"]
    assert ask({"revision": 3, "ranks": [], "gone": [{"worker": "a"}], "synced": True}, 10.7) == ["b"]
    assert ask({"revision": 4, "ranks": [], "gone": [{"worker": "b"}], "synced": True}, 10.8) == []
    assert ask({"revision": 5, "ranks": ranks, "whole": True, "synced": True}, 12) == ["a", "b"]
    assert ask(empty, 12.1) == []
    assert ask({"revision": 1, "ranks": ranks, "whole": True, "synced": True}, 13) == ["a", "b"]
    assert ask({"revision": 2, "ranks": [], "whole": True, "synced": True}, 13.1) == []
    assert ask({"revision": 3, "ranks": ranks, "whole": True, "synced": True}, 14) == ["a", "b"]
    one.begin = 15  # another daemon
    assert ask(empty, 16) == ["a", "b"]
    assert ask({"revision": 1, "ranks": ranks[:1], "whole": True, "synced": True}, 17) == ["a"]
    assert ask(empty, 25.1) == []


def test_policies():
    """By the real members, without servers."""
    options = config.read(["--prefill", *["http://p:%d" % i for i in range(1, 5)], "--decode",
                           *["http://d:%d" % i for i in range(1, 5)]])

    async def run():
        async def well(member):
            return None
        for name, kind in policy.BY_NAME.items():
            all_of = Members(options, well)
            await all_of.start()
            pick = kind(all_of).pick
            assert pick(policy.Request(10)) is None, "no health is known"
            await until(lambda: len(all_of.usable("prefill")) == len(all_of.usable("decode")) == 4)
            held = [pick(policy.Request(10)) for _ in range(40)]
            counts = sorted(m.requests for m in all_of.of("prefill"))
            if name != "random":
                assert counts == [10] * 4, (name, counts)
            assert sum(counts) == 40 and sum(m.tokens for m in all_of.of("decode")) == 400
            bad = held[0][0]
            assert all(pick(policy.Request(1), {bad})[0] is not bad for _ in range(20))
            prefill, decode, one = pick(policy.Request(1, alone=True))
            assert prefill is None and decode.role == "decode"
            for _, _, reservation in held:
                reservation.prefilled()
                reservation.prefilled()
                reservation.release()
                reservation.release()
            assert sum(m.requests for m in all_of.of("prefill")) == 20
            await all_of.stop()
    asyncio.run(run())


def test_picker_gets_results():
    options = config.read(["--prefill", "http://p:1", "--decode", "http://d:1"])

    async def run():
        async def well(member):
            return None
        all_of = Members(options, well)
        await all_of.start()
        await until(lambda: all_of.missing() is None)
        least = policy.LeastLoaded(all_of)

        def blamed():
            return [row.worker for role in config.ROLES for row in least.picker.scores(role)
                    if row.score.penalty > 0]
        prefill, decode, held = least.pick(policy.Request(10))
        held.began(0.1)
        held.failed(prefill)
        assert blamed() == [], "it had answered"
        least.pick(policy.Request(10))[2].failed(decode)
        assert blamed() == [decode.name]
        await all_of.stop()
    asyncio.run(run())


def test_loads_of_the_directory_decide():
    options = config.read(["--socket", "/x", "--decode", "http://d:1"])

    def ranks(**waiting):
        return specs(*({"worker": name, "url": "http://%s:1" % name, "load": {
            "seq": tokens, "engine": {"prompt_tokens_waiting": tokens, "prompt_tokens_s": 1000}}}
            for name, tokens in waiting.items()))

    async def run():
        async def well(member):
            return None
        all_of = Members(options, well)
        await all_of.start()
        least = policy.LeastLoaded(all_of)
        for waiting, free in ((dict(a=90000, b=0), "b"), (dict(a=1, b=90000), "a")):
            all_of.source(("directory", "prefill"), ranks(**waiting))
            await until(lambda: len(all_of.usable("prefill")) == 2 and all_of.usable("decode"))
            for _ in range(5):
                prefill, _, held = least.pick(policy.Request(10))
                assert prefill.spec.worker == free
                held.release()
        await all_of.stop()
    asyncio.run(run())


def test_second_role_of_a_healthy_server_is_up_at_once(caplog):
    """A flip publishes the new role before the old one goes: a poll in between sees both."""
    caplog.set_level(logging.INFO, "kvd.router")
    options = config.read(["--socket", "/x", "--prefill", "http://p:1"])

    async def run():
        async def well(member):
            return None
        all_of = Members(options, well)
        await all_of.start()
        await until(lambda: all_of.usable("prefill"))
        prefill, = specs({"worker": "p", "url": "http://p:1"})
        all_of.source(("directory", "decode"), [prefill._replace(role="decode")])
        await all_of.stop()
    asyncio.run(run())
    told = [line for line in caplog.messages if line.startswith("member up")]
    assert told == ["member up role=%s url=http://p:1" % role for role in config.ROLES]


def test_more_members_than_are_taken(monkeypatch):
    monkeypatch.setattr(router_members, "ROLE_MAX", 3)
    options = config.read(["--prefill", *["http://p:%d" % i for i in range(1, 9)], "--decode",
                           "http://d:1"])

    async def run():
        async def well(member):
            return None
        all_of = Members(options, well)
        await all_of.start()
        assert len(all_of.of("prefill")) == 3 and len(all_of.of("decode")) == 1
        all_of.source("more", [config.member_spec("http://d:2", "decode", "vllm")])
        assert len(all_of.of("prefill")) == 3 and len(all_of.of("decode")) == 2
        await all_of.stop()
    asyncio.run(run())


def test_decode_server_of_another_engine_computes_nothing_alone():
    one, released = Exchange.__new__(Exchange), []
    one.request = types.SimpleNamespace(path="/v1/completions")
    one.facts = bulk.facts(one.request.path, {"n": 2}, 8)
    held = types.SimpleNamespace(release=lambda: released.append(True))
    for engine, fits in (("vllm", True), ("sglang", False)):
        decode = types.SimpleNamespace(label="d", spec=types.SimpleNamespace(engine=engine))
        if fits:
            one._fits((None, decode, held))
            continue
        with pytest.raises(Refused) as why:
            one._fits((None, decode, held))
        assert why.value.status == 503 and released


def test_fault_of_the_router_is_json():
    async def run():
        async def bad(request):
            raise KeyError("x")
        request = types.SimpleNamespace(method="POST", path="/x", can_read_body=False)
        answer = await admin.guard(request, bad)
        assert answer.status == 500 and "router" in message(answer.body)
    asyncio.run(run())


# ---- lists and health ----

@aio
async def test_dead_list_is_refused_with_names_and_recovers():
    world = World()
    prefill, decode = Fake(world, "prefill"), Fake(world, "decode")
    prefill.port, decode.port = free_port(), free_port()
    router = await Router(members([prefill], [decode])).start(ready=False)
    begin = time.monotonic()
    answers = await asyncio.gather(*(router.ask() for _ in range(50)))
    assert time.monotonic() - begin < 20
    for status, headers, said in answers:
        assert status == 503 and headers["Retry-After"], said
        assert prefill.label in message(said) and decode.label in message(said)
    status, said = await router.get("/health")
    assert status == 503 and prefill.label in message(said)
    status, said = await router.get("/v1/models")
    assert status == 503 and decode.label in message(said)
    assert (await router.get("/healthz"))[0] == 200
    await decode.start()
    await until(lambda: "member up role=decode" in router.log, router)
    status, _, said = await router.ask()
    assert status == 503 and decode.label not in message(said)
    asked = asyncio.ensure_future(router.ask())  # who waits is served when it comes up
    await prefill.start()
    assert (await asked)[0] in (200, 503)
    await router.until_health()
    assert (await router.ask())[0] == 200
    assert await router.end() == 0
    for fake in (prefill, decode):
        await fake.runner.cleanup()


@aio
async def test_unhealthy_member_is_not_picked():
    async with routed(2, 1) as (router, (sick, well), _):
        sick.healthy = False
        await until(lambda: "member down" in router.log, router)
        for _ in range(6):
            assert (await router.ask())[0] == 200
        assert sick.asked == [] and len(well.asked) == 6
        sick.healthy = True
        await until(lambda: router.log.count("member up") == 4, router)
        for _ in range(30):
            assert (await router.ask())[0] == 200
        assert sick.asked


@aio
async def test_failing_member_is_suspended():
    """Its health is well, and it answers nothing but errors."""
    options = ["--circuit-open", "30", "--policy", "round-robin"]
    async with routed(2, 2, options=options) as (router, _, (bad, good)):
        bad.say = 500, '{"error": "broken"}'
        for _ in range(20):
            assert (await router.ask())[0] == 200
        assert 3 <= len(bad.asked) <= 9 and len(good.asked) == 20
        assert "circuit open role=decode url=%s" % bad.url in router.log


@aio
async def test_file_of_members():
    world = World()
    fakes = [await Fake(world, role).start() for role in ("prefill", "prefill", "decode")]
    first, second, decode = fakes
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "prefills")

        def write(*lines):
            with open(path + ".new", "w") as out:
                out.write("\n".join(lines) + "\n")
            os.rename(path + ".new", path)
        write("# ours", "", first.url + "  # the first")
        router = await Router(["--prefill", "@" + path, "--decode", decode.url, *FAST]).start()
        decode.pause = asyncio.Event()
        running = asyncio.ensure_future(router.ask(STREAM))
        await until(lambda: decode.running, router)
        write(second.url)
        await until(lambda: "member removed" in router.log, router)
        await until(lambda: "member up role=prefill url=" + second.url in router.log, router)
        decode.pause.set()
        assert (await running)[0] == 200
        assert (await router.ask())[0] == 200
        assert len(first.asked) == len(second.asked) == 1
        write("nonsense")
        await until(lambda: "are kept: " in router.log, router)
        os.unlink(path)
        await until(lambda: router.log.count("are kept: ") == 2, router)
        assert (await router.ask())[0] == 200 and len(second.asked) == 2
        assert await router.end() == 0
    for fake in fakes:
        await fake.runner.cleanup()


@aio
async def test_slow_member_among_others():
    """Round robin gives half of all to the slow one. One after another on each engine."""
    def quantile(times, q):
        return sorted(times)[min(len(times) - 1, int(q * len(times)))]
    firsts, slow = {}, {}
    for name in ("least-loaded", "round-robin"):
        def setup(prefills, decodes):
            prefills[0].slow, prefills[1].slow = 0.2, 0.02
        async with routed(2, 2, options=["--policy", name], setup=setup) as (router, prefills, _):
            async def one(i):
                await pause(0.03 * i)
                begin = time.monotonic()
                async with router.session.post(router.url + "/v1/completions",
                                               json=STREAM) as resp:
                    assert resp.status == 200
                    await resp.content.readany()
                    firsts.setdefault(name, []).append(time.monotonic() - begin)
                    await resp.read()
            await asyncio.gather(*(one(i) for i in range(60)))
            slow[name] = len(prefills[0].asked)
    p50, p99 = ({n: quantile(t, q) for n, t in firsts.items()} for q in (.5, .99))
    print("first token, ms: " + ", ".join("%s p50 %.0f p99 %.0f" % (
        n, 1e3 * p50[n], 1e3 * p99[n]) for n in firsts))
    means = {n: statistics.mean(t) for n, t in firsts.items()}
    print("round robin over least loaded, mean: %.1f" % (
        means["round-robin"] / means["least-loaded"]))
    assert means["least-loaded"] < means["round-robin"]
    assert slow["round-robin"] == 30 and slow["least-loaded"] <= 20, slow


# ---- the directory ----

def directory_options(path):
    return ["--socket", path, *FAST]


@aio
async def test_members_of_a_directory():
    world = World()
    fakes = [await Fake(world, role).start() for role in ("prefill", "decode", "decode")]
    prefill, decode, other = fakes
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kvd.sock")
        router = await Router(directory_options(path)).start(ready=False)
        await until(lambda: "members are kept" in router.log, router)
        daemon = Directory(path).start()
        daemon.put("prefill", "p", {"url": prefill.url, "engine": "vllm"})
        daemon.put("prefill", "p", {}, rank=1)
        daemon.put("prefill", "bad", {"url": "http://x"})
        daemon.put("decode", "d", {"url": decode.url})
        await router.until_health()
        assert (await router.ask())[0] == 200 and len(decode.asked) == 1
        assert "worker 'bad'" in router.log or "url: 'http://x'" in router.log

        daemon.put("decode", "e", {"url": other.url})
        daemon.put("decode", "d", {"url": decode.url, "state": "draining"})
        await until(lambda: "member up role=decode url=" + other.url in router.log, router)

        async def drained():
            return await router.metric("kvd_router_member_up") == 2
        await until(drained, router)
        for _ in range(5):
            assert (await router.ask())[0] == 200
        assert len(decode.asked) == 1 and len(other.asked) == 5
        daemon.put("decode", "d", None)
        await until(lambda: "member removed role=decode url=" + decode.url in router.log, router)
        # the daemon dies: what is known goes on, and what it says wrong is not believed
        daemon.stop()
        await until(lambda: router.log.count("members are kept") == 2, router)
        assert (await router.ask())[0] == 200
        daemon.answer = {"ranks": [{"worker": 7}], "revision": 3}
        daemon.start()
        await until(lambda: len([a for a in daemon.asked if a["cmd"] == "hello"]) >= 3, router)
        assert (await router.ask())[0] == 200
        daemon.put("prefill", "p", {"url": prefill.url})
        daemon.put("decode", "d", {"url": decode.url})
        daemon.answer = None
        await until(lambda: "member listed role=decode url=" + decode.url in
                    router.log.split("members are kept")[-1], router)
        await until(lambda: "member removed role=decode url=" + other.url in router.log, router)
        await router.until_health()
        assert (await router.ask())[0] == 200 and len(decode.asked) == 2
        daemon.put("decode", "d", None)
        assert await router.end() == 0
        daemon.stop()
    for fake in fakes:
        await fake.runner.cleanup()


async def command(*argv):
    """(status, all that it says)"""
    proc = await spawn(*argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    out, _ = await proc.communicate()
    return proc.returncode, out.decode()


class Load:
    """Requests one after another, a few at a time, until it is told to end."""

    def __init__(self, router, wide=6):
        self.stop, self.statuses = False, []
        self.tasks = [asyncio.ensure_future(self.one(router)) for _ in range(wide)]

    async def one(self, router):
        while not self.stop:
            status, _, said = await router.ask(STREAM)
            self.statuses.append(status if b"error" not in said else said)

    async def end(self):
        self.stop = True
        await asyncio.gather(*self.tasks)
        assert set(self.statuses) == {200} and len(self.statuses) > 20, self.statuses[-3:]


def serves_both(fake):
    """vLLM's kv_both."""
    serve = fake.vllm

    async def either(request, body):
        params = body.get("kv_transfer_params") or {}
        fake.role = "prefill" if params.get("do_remote_decode") else "decode"
        return await serve(request, body)
    fake.vllm = either


@aio
async def test_flip_loses_no_request():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "admin.sock")
        async with routed(2, 1, options=["--admin", path]) as (router, (a, b), (c,)):
            serves_both(b)
            assert os.stat(path).st_mode & 0o777 == 0o600
            load = Load(router)
            for role in ("decode", "prefill", "decode"):
                before = len(load.statuses)
                status, said = await command("flip", "--admin", path, b.url, role)
                assert status == 0 and role in said, said
                await until(lambda: len(load.statuses) > before + 20, router)
                told = json.loads((await command("members", "--admin", path, "--json"))[1])
                assert [m["role"] for m in told["members"] if m["url"] == b.url] == [role]
            await load.end()
            status, said = await command("flip", "--admin", path, a.url, "decode")
            assert status == 1 and "only prefill" in said, said
            status, said = await command("flip", "--admin", path, "http://1.1.1.1:1", "decode")
            assert status == 1 and "not a member" in said
            status, said = await command("members", "--admin", path)
            assert status == 0 and said.count(" up ") == 3, said
            assert {body["kv_transfer_params"].get("do_remote_decode") for _, body, _ in b.asked
                    } == {True, False}
            assert c.asked
        assert not os.path.exists(path)
        status, said = await command("members", "--admin", path)
        assert status == 1 and path in said and "Traceback" not in said


@aio
async def test_flip_of_sglang_is_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "admin.sock")
        async with routed(2, 1, "sglang", ["--admin", path]) as (router, (a, _), _):
            status, said = await command("flip", "--admin", path, a.url, "decode")
            assert status == 1 and "SGLang" in said and "--disaggregation-mode" in said


@aio
async def test_flip_by_the_directory():
    """publish keeps the place; two routers follow it."""
    world = World()
    fakes = [await Fake(world, role).start() for role in ("prefill", "prefill", "decode")]
    a, b, c = fakes
    serves_both(b)
    with tempfile.TemporaryDirectory() as folder:
        path, admin = os.path.join(folder, "kvd.sock"), os.path.join(folder, "b.sock")
        daemon = Directory(path).start()
        daemon.put("prefill", "a", {"url": a.url})
        daemon.put("decode", "c", {"url": c.url})
        publisher = await spawn(
            "publish", "--socket", path, "--role", "prefill",
            "--worker", "b", "--url", b.url, "--admin", admin,
            stderr=asyncio.subprocess.DEVNULL)
        routers = [await Router(directory_options(path)).start() for _ in range(2)]
        loads = [Load(router, 3) for router in routers]
        line = "member %s role=%s url=" + b.url
        for router in routers:
            await until(lambda: line % ("listed", "prefill") in router.log, router)
        for old, new, times in (("prefill", "decode", 1), ("decode", "prefill", 2)):
            status, said = await command("flip", "--admin", admin, b.url, new)
            assert status == 0, said
            for router in routers:
                await until(lambda: router.log.count(line % ("listed", new)) == times, router)
                await until(lambda: line % ("removed", old) in router.log, router)
        for load in loads:
            await load.end()
        # the daemon is restarted: it is published again
        daemon.stop()
        daemon.start()
        await until(lambda: "b" in {w for w, _ in daemon.groups.get("prefill", {})})
        publisher.send_signal(signal.SIGTERM)
        assert await publisher.wait() == 0
        await until(lambda: not daemon.groups["prefill"])
        assert not os.path.exists(admin)
        for router in routers:
            assert await router.end() == 0
        daemon.stop()
    for fake in fakes:
        await fake.runner.cleanup()


@aio
async def test_directory_of_a_real_daemon():
    world = World()
    fakes = [await Fake(world, role).start() for role in ("prefill", "prefill", "decode")]
    for fake in fakes:
        serves_both(fake)
    with Daemon() as daemon, tempfile.TemporaryDirectory() as folder:
        publishers = [await spawn(
            "publish", "--socket", daemon.socket_path, "--role", fake.role, "--worker",
            "w%d" % i, "--url", fake.url, "--admin", os.path.join(folder, "%d.sock" % i),
            stderr=asyncio.subprocess.DEVNULL)
            for i, fake in enumerate(fakes)]
        router = await Router(directory_options(daemon.socket_path)).start()
        flipped, admin = fakes[1].url, os.path.join(folder, "1.sock")
        await until(lambda: "member up role=prefill url=" + flipped in router.log, router)
        load = Load(router)
        status, said = await command("flip", "--admin", admin, flipped, "decode")
        assert status == 0, said
        await until(lambda: "member up role=decode url=" + flipped in router.log, router)
        await until(lambda: "member removed role=prefill url=" + flipped in router.log, router)
        await load.end()
        publishers[1].kill()
        await until(lambda: "member removed role=decode url=" + flipped in router.log, router)
        assert (await router.ask())[0] == 200
        publishers[0].terminate()  # the last of its group
        await until(lambda: "member removed role=prefill url=" + fakes[0].url in router.log, router,
                    seconds=directory.START_S / 2)
        status, said = await router.get("/health")
        assert status == 503 and "no prefill server: none is listed" in message(said)
        assert await router.end() == 0
        for one in publishers:
            if one.returncode is None:
                one.terminate()
            await one.wait()
    for fake in fakes:
        await fake.runner.cleanup()


# ---- what it tells ----

@aio
async def test_metrics_are_prometheus_text():
    async with routed(2, 2) as (router, prefills, _):
        for _ in range(5):
            await router.ask()
        await router.ask(b"{")
        text = (await router.get("/metrics"))[1].decode()
        names, seen = set(), set()
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                names.add(line.split()[2])
                continue
            if line.startswith("# HELP "):
                continue
            name, labels = line.rsplit(" ", 1)[0].partition("{")[::2]
            float(line.rsplit(" ", 1)[1])
            assert not labels or labels.endswith('"}'), line
            assert any(name == n or name in (n + "_bucket", n + "_sum", n + "_count")
                       for n in names), line
            assert line.rsplit(" ", 1)[0] not in seen, line
            seen.add(line.rsplit(" ", 1)[0])
        assert await router.metric('kvd_router_requests_total{path="/v1/completions",status="200"}'
                                   ) == 5
        assert await router.metric('kvd_router_requests_total{path="/v1/completions",status="400"}'
                                   ) == 1
        assert await router.metric("kvd_router_pair_requests_total") == 5
        assert await router.metric("kvd_router_first_token_seconds_count") == 5
        assert await router.metric("kvd_router_member_up") == 4


def test_labels_are_escaped():
    from kvd.router.metrics import Metrics
    metrics = Metrics()
    metrics.ended('a"b\\c\nd', 200, 1)
    gate = types.SimpleNamespace(running=0, queue=())
    text = metrics.text(gate, types.SimpleNamespace(by_key={}), False)
    assert r'path="a\"b\\c\nd"' in text


def value_of(text, name):
    return float(text.split("\n%s " % name)[1].split("\n")[0])


def test_metrics_are_complete():
    """Sums go on where a float has six digits no more, and counters of who has gone stay."""
    times = Histogram()
    for _ in range(5):
        times.add(1234567.25)
    times.add(0.25)
    assert value_of(times.text("x"), "x_sum") == 5 * 1234567.25 + 0.25
    metrics = Metrics()
    rest = types.SimpleNamespace(running=0, queue=()), types.SimpleNamespace(by_key={}), False
    told = value_of(metrics.text(*rest), "kvd_router_start_time_seconds")
    assert abs(told - metrics.begin) < 1e-3
    prefill, decode = (types.SimpleNamespace(role=role, url="http://%s:1" % role, failed=2, late=1)
                       for role in ("prefill", "decode"))
    metrics.tried(prefill, decode, "answered")
    metrics.keep(prefill)
    text = metrics.text(*rest)
    assert 'result="answered"} 1\n' in text
    assert 'member_failures_total{role="prefill",url="http://prefill:1"} 2\n' in text
    assert 'member_late_total{role="prefill",url="http://prefill:1"} 1\n' in text


@aio
async def test_complete_answer_has_bytes_in_the_log():
    async with routed() as (router, _, (decode,)):
        _, _, said = await router.ask()
        _, _, refused = await router.ask(b"{")
        decode.say = 400, '{"error": "too long"}'
        _, _, answered = await router.ask()
        told = [line.split(" bytes=")[1].split(" ")[0] for line in await router.lines(3)]
        assert told == [str(len(text)) for text in (said, refused, answered)]
