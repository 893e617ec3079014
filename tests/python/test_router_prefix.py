# SPDX-License-Identifier: Apache-2.0
"""Prefixes of prompts in kvd.router: chains, the index, picks; and false engines: which are
asked, with --policy prefix, --alone-below, --alone-uncached and --affinity. How much time it saves
is judged by test_router_sim.py."""
import asyncio
import json
import os
import random
import sys

import pytest

from conftest import ROOT
from kvd.router import config, engines, policy, prefix, sessions
from router_rig import ASK, FAST, SAID, Fake, Router, aio, routed, until
from router_rig import World as Engines

sys.path.insert(0, os.path.join(ROOT, "tests", "pick"))
import prefix_play  # noqa: E402

KEY = b"k" * 16
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SPEED = 8000  # tokens a second
LONG = 40000  # bytes of a prompt that takes so long that it decides


def chain(body, path=TEXT):
    return prefix.chain(path, body, KEY)


def words(seed, size=LONG):
    """Text of its own."""
    return "".join(random.Random(seed).choices("abcdefgh ", k=size))


def said(role, text):
    return {"role": role, "content": text}


# ---- chains ----

def test_longer_conversation_begins_with_the_shorter_one():
    messages = [said("system", words(1, 3000)), said("user", words(2, 5000))]
    body = {"model": "m", "messages": messages, "tools": [{"name": words(3, 2000)}]}
    first = chain(body, CHAT)
    assert len(first) == 9 and len(set(first)) == 9
    more = dict(body, stream=True, max_tokens=7, messages=messages + [
        said("assistant", words(4, 3000)), said("user", "and?")])
    second = chain(more, CHAT)
    assert second[:9] == first and len(second) == 12
    ordered = json.loads(json.dumps(body, sort_keys=True))
    assert list(ordered["messages"][0]) != list(messages[0])
    assert chain(ordered, CHAT) == first, "the order of members is nothing"
    other = dict(body, messages=[messages[0], said("user", "x" + words(2, 5000))])
    assert chain(other, CHAT)[:4] == first[:4] and chain(other, CHAT)[5] != first[5]
    assert chain(dict(body, tools=[{"name": "x"}]), CHAT)[0] != first[0]


def test_text_is_the_same_only_for_the_same_model():
    """An engine's cache of another model, adapter or salt is another one."""
    body = {"model": "m", "prompt": words(1, 5000)}
    first = chain(body)
    assert len(first) == 4 and chain(dict(body, max_tokens=9, user="x")) == first
    others = [chain(dict(body, **{name: "n"})) for name in (
        "model", "lora_path", "cache_salt", "extra_key", "chat_template", "chat_template_kwargs",
        "documents")]
    others += [chain({"model": "m", "messages": [said("user", words(1, 5000))]}, CHAT),
               prefix.chain(TEXT, body, b"l" * 16)]
    heads = [first[0]] + [one[0] for one in others]
    assert len(set(heads)) == len(heads)
    messages = [said("user", words(1, 5000))]
    text = json.dumps(messages[0], sort_keys=True, separators=(",", ":")) + "\n"
    assert chain({"messages": messages}, CHAT)[0] != chain({"prompt": text})[0]


def test_block_is_another_one_after_another_text():
    """Its tokens attend to all before them."""
    one, other = (chain({"prompt": first * 1024 + words(1, 5000)}) for first in "ab")
    assert len(one) == len(other) == 5 and not set(one) & set(other)


def test_token_ids_are_read_as_they_are():
    ids = list(range(1000))
    assert len(chain({"prompt": ids})) == 3
    assert chain({"prompt": [ids]}) == chain({"prompt": ids}) == \
        chain({"input_ids": ids}, GENERATE)
    assert chain({"prompt": ids[:700]}) == chain({"prompt": ids})[:2]
    assert chain({"text": words(1, 3000)}, GENERATE) == chain({"prompt": words(1, 3000)}) == \
        chain({"prompt": [words(1, 3000)]})
    assert chain({"prompt": "é水" * 1000}) and chain({"prompt": "\ud800" * 1000})


@pytest.mark.parametrize("body, path", [
    ({}, TEXT), ({"prompt": None}, TEXT), ({"prompt": 7}, TEXT), ({"prompt": "short"}, TEXT),
    ({"prompt": []}, TEXT), ({"prompt": ["a" * 3000, "b" * 3000]}, TEXT),
    ({"prompt": [[1] * 600, [2] * 600]}, TEXT), ({"prompt": {"a": "x" * 3000}}, TEXT),
    ({"messages": "x" * 3000}, CHAT), ({"messages": {"0": "x" * 3000}}, CHAT),
    ({"prompt": "x" * 3000}, CHAT), ({"input_ids": [1] * 600}, TEXT)], ids=repr)
def test_request_without_one_prompt_has_no_chain(body, path):
    assert chain(body, path) == []


def test_hostile_prompts_have_a_bounded_chain():
    assert len(chain({"prompt": "x" * 100_000_000})) == prefix.CHAIN_MAX
    assert len(chain({"prompt": "水" * 9_000_000})) == prefix.CHAIN_MAX
    assert len(chain({"prompt": [7] * 5_000_000})) == prefix.CHAIN_MAX
    many = [said("user", "x" * 5000)] * 2000
    assert len(chain({"messages": many}, CHAT)) == prefix.CHAIN_MAX
    assert len(chain({"messages": [said("user", "x" * 20_000_000)] * 2}, CHAT)) == prefix.CHAIN_MAX
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert chain({"messages": [deep]}, CHAT) == chain({"prompt": "x" * 3000, "model": deep}) == []


# ---- the index ----

def some(length, seed=0):
    return [seed << 32 | i for i in range(length)]


def index(blocks=1000, ttl=600):
    """With room for so many that were answered, and for as many that are under way."""
    one = prefix.PrefixIndex(blocks * prefix.ENTRY_BYTES, ttl)
    one.most = one.most_under_way = blocks
    return one


def last_of(one):
    return {block: url for shard in one.last for block, url in shard.items()}


def tokens(blocks):
    return blocks * prefix.BLOCK_TOKENS


def test_member_has_what_it_answered():
    one = index()
    one.answered("a", some(9), 0)
    assert one.find("a", some(9), 1) == 9 and one.find("b", some(9), 1) == 0
    assert one.find("a", some(20), 1) == 9 and one.find("a", some(4), 1) == 4
    assert one.find("a", some(4) + some(9, 1), 1) == 4 and one.find("a", [], 1) == 0
    assert one.holders(some(20)) == ["a"] and one.holders(some(9, 1)) == []
    one.forget("a")
    one.forget("a")
    assert one.find("a", some(9), 1) == one.blocks == 0 and not last_of(one) and not one.members


def test_oldest_are_dropped_from_their_ends():
    one = index()
    one.answered("a", some(10), 0, tokens(32))
    one.answered("a", some(10, 1), 1, tokens(32))
    one.answered("a", some(10), 2, tokens(32))  # used again
    one.answered("a", some(15, 2), 3, tokens(32))
    found = [one.find("a", some(15, seed), 3) for seed in range(3)]
    assert found == [10, 5, 15], "3 too many, and a sixteenth"
    one.answered("a", some(100, 3), 4, tokens(32))
    assert one.find("a", some(100, 3), 4) == 30 and one.blocks == 30, "no more than it can have"


def test_old_blocks_do_not_count():
    one = index(ttl=100)
    one.answered("a", some(10), 0)
    one.answered("a", some(5), 50)
    assert one.find("a", some(10), 99) == 10
    assert one.find("a", some(10), 101) == 5 and one.find("a", some(10), 151) == 0
    one.handed("a", some(10))
    assert one.find("a", some(10), 152) == 10, "it is computed again"


def test_request_under_way_counts_until_its_end():
    one = index()
    one.answered("a", some(4), 0)
    counts = one.handed("a", some(9))
    assert one.find("a", some(9), 1e9) == 9 and one.holders(some(9)) == ["a"]
    one.ended("a", some(9), counts)
    assert one.find("a", some(9), 1) == 4 and one.blocks == 4 and not one.under_way
    assert one.holders(some(9)) == ["a"] and len(last_of(one)) == 4
    counts = one.handed("b", some(9))
    one.ended("b", some(9), counts)
    assert one.holders(some(9)) == ["a"] and one.blocks_under_way == 0
    counts = one.handed("a", some(9))
    one.answered("a", some(9), 2)
    one.ended("a", some(9), counts)
    assert one.find("a", some(9), 2) == 9, "it was answered meanwhile"


def test_end_of_a_request_leaves_a_second_one_with_its_prompt():
    one = index()
    first, second = one.handed("a", some(9)), one.handed("a", some(12))
    one.ended("a", some(9), first)
    assert one.find("a", some(12), 1) == 12 and one.holders(some(9)) == ["a"]
    one.forget("a")
    assert one.find("a", some(12), 1) == one.blocks_under_way == 0 and not last_of(one)
    third = one.handed("a", some(12))
    one.ended("a", some(12), second)
    assert one.find("a", some(12), 1) == 12, "the second one's server has lost it, not this one's"
    one.ended("a", some(12), third)
    assert not one.under_way and not last_of(one)


def test_only_answers_drop_others():
    one = index(100)
    one.answered("a", some(60), 0)
    for seed in range(1, 50):  # of a client with prompts that are refused
        counts = [(url, own, one.handed(url, own)) for url, own in (
            ("a", some(60, seed)), ("b", some(30, seed)), ("c", some(30, seed)))]
        assert one.blocks_under_way == 90 and counts[-1][2] is None, "there is no room"
        one.answered("d", some(1), seed)
        for each in counts:
            one.ended(*each)
    assert one.find("a", some(60), 50) == 60 and one.blocks == 61


def test_requests_under_way_take_no_room_of_a_member():
    """The oldest are dropped first, and those are the answered ones."""
    one = index(100_000)
    one.answered("a", some(1900), 0)
    counts = one.handed("a", some(4096, 1))
    one.answered("a", some(1, 2), 1)
    one.ended("a", some(4096, 1), counts)
    assert one.find("a", some(1900), 1) == 1900 and one.find("a", some(1, 2), 1) == 1


def test_requests_under_way_have_bounds():
    """A member's, or those of a hot one would take long to forget; and all."""
    one = index(1_000_000)
    counts = [one.handed("a", some(4096, seed)) for seed in range(128)]
    assert counts.count(None) == 124 and one.blocks_under_way == prefix.MEMBER_MAX
    assert one.handed("b", some(4096)) is not None
    one = prefix.PrefixIndex(1000 * prefix.ENTRY_BYTES)
    one.answered("a", some(900), 0)
    assert one.find("a", some(900), 0) == 0, "an eighth is for others"
    one.answered("a", some(875), 0)
    assert one.handed("b", some(126)) is None is not one.handed("b", some(125))
    assert one.handed("c", some(1)) is None and one.find("a", some(875), 1) == 875


def test_memory_is_taken_of_who_answered_longest_ago():
    one = index(100)
    one.answered("a", some(40, 1), 1)
    one.answered("b", some(40, 2), 2)
    one.answered("a", some(10, 1), 3)
    one.answered("c", some(30, 3), 4)
    assert one.blocks == 100 and one.find("b", some(40, 2), 4) == 30
    assert one.find("a", some(40, 1), 4) == 40 and one.find("c", some(30, 3), 4) == 30
    one.answered("c", some(101, 4), 5)
    assert one.find("a", some(40, 1), 5) == 40, "more than there is at all is not kept"
    none = prefix.PrefixIndex(0)
    none.answered("a", some(5), 1)
    none.handed("a", some(5))
    assert none.blocks == none.find("a", some(5), 1) == 0


@pytest.mark.parametrize("seed", range(4))
def test_index_is_consistent_whatever_comes(seed):
    """Members are added and removed, chains share prefixes, answers come in any order. Exactly the
    blocks that are under way are found, and of those that were answered no more than a member may
    have; and the counts are right."""
    rnd, one = random.Random(seed), index(300, 50)
    answered, under_way = {}, []  # {(url, block): time}, [(url, chain, counts)]
    for now in range(3000):
        url = "m%d" % rnd.randrange(12)
        length = rnd.randrange(1, 60)
        common = rnd.randrange(0, 8)  # a block is always after the same ones
        own = some(common, 1) + some(length, 2 + common + 8 * rnd.randrange(5))
        kind = rnd.randrange(6)
        if kind == 0:
            one.forget(url)
            under_way = [each for each in under_way if each[0] != url]
            answered = {key: at for key, at in answered.items() if key[0] != url}
        elif kind == 1 and under_way:
            one.ended(*under_way.pop(rnd.randrange(len(under_way))))
        elif kind == 2:
            counts = one.handed(url, own)
            if counts is not None:
                under_way.append((url, own, counts))
        elif kind < 5:
            size = rnd.choice((16, 40, 1000))
            one.answered(url, own, now, tokens(size))
            answered.update(((url, block), now) for block in own)
            assert one.find(url, own, now) >= min(len(own), size - size // 16)
        assert one.blocks == sum(map(len, one.members.values())) <= 300
        assert one.blocks_under_way == sum(map(len, one.under_way.values())) == len(
            {(url, block) for url, chain, _ in under_way for block in chain}) <= 300
        assert all(one.members.values()) and all(one.under_way.values())
        for holder in one.holders(own):
            waiting = {block for url, chain, _ in under_way for block in chain if url == holder}
            found = own[:one.find(holder, own, now)]
            assert not waiting.intersection(own[len(found):])
            assert all(block in waiting or answered[holder, block] >= now - 50 for block in found)
        assert all(block in one.members.get(url, ()) or block in one.under_way[url]
                   for block, url in last_of(one).items())
    assert under_way and answered


def test_holders_are_the_last_users_and_few():
    one = index(100_000)
    for i in range(200):
        one.answered("m%d" % i, some(64) + some(9, i + 1), i)
    assert one.holders(some(64)) == ["m199"]
    assert one.holders(some(64) + some(9, 7)) == ["m6", "m199"]
    for i in range(200):
        one.answered("m%d" % i, some(64 - i % 60), 200 + i)
    assert len(one.holders(some(64))) == prefix.HOLDERS_MAX


def test_holder_of_later_blocks_is_found_without_the_last_user_of_the_first():
    one = index()
    one.answered("b", some(12), 1)
    one.answered("a", some(10), 2)
    one.forget("a")
    assert one.holders(some(12)) == one.holders(some(20)) == ["b"]


def test_no_table_of_the_index_is_large():
    """A large one stops all streams while it grows. Hashes are those of prompts."""
    one = index(200_000)
    for seed in range(40):
        prompt = chain({"prompt": "%d " % seed + "x" * (4 << 20)})
        one.answered("m%d" % seed, prompt, seed, 1e9)
    assert one.blocks > 150_000 and max(map(len, one.last)) < 100


def test_many_sessions_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 5000)
    one = sessions.Sessions()
    for i in range(100_000):
        one.answered(one.name("session %d" % i), "p%d" % (i % 7), "d", i * 1e-3)
        assert len(one.pairs) <= 5000
    assert one.last(one.name("session 99999"), 100) == ("p4", "d")
    assert one.last(one.name("session 1"), 100) == (None, None)
    assert one.last(one.name("session 99999"), 100 + sessions.SESSION_S) == (None, None)
    one.answered(one.name("x" * 10000), "p", "d", 1)
    one.answered(one.name("x" * 10000), None, "e", 2)
    assert one.last(one.name("x" * 10000), 3) == ("p", "e"), "decode alone changes no prefill"
    assert one.name("") is one.name(None) is None and one.name("\udcff") is not None
    assert one.name("a") != sessions.Sessions().name("a")


# ---- picks ----

class World:
    """A policy, its members, and a clock."""

    def __init__(self, prefills=2, decodes=2, name="prefix", **more):
        self.members = prefix_play.Members(prefix_play.Case(workers=prefills))
        vars(self.members.config).update(more)
        for i in range(1, decodes):
            made = prefix_play.Member("decode", "d%d" % i, prefix_play.Case())
            self.members.roles["decode"].append(made)
            self.members.by_key["decode", made.url] = made
        self.now = 100.0
        self.policy = policy.BY_NAME[name](self.members)
        self.policy.clock = lambda: self.now

    def pick(self, prompt=(), count=None, session=None, avoid=()):
        prompt = list(prompt)
        return self.policy.pick(policy.Request(
            tokens(len(prompt)) if count is None else count, False, prompt, session), avoid)

    def serve(self, *args, **more):
        """Names of the pair. It answers at the speed of its loads."""
        prefill, decode, held = self.pick(*args, **more)
        seconds = max(held.tokens - held.cached, 100) / SPEED
        self.now += seconds
        if prefill is not None:
            held.prefilled()
        held.began(seconds)
        held.release()
        return prefill and prefill.name, decode.name

    def load(self, name, waiting):
        for member in self.members.by_key.values():
            if member.name == name:
                member.spec.load = member.spec.load._replace(
                    seq=member.spec.load.seq + 1, prompt_tokens_waiting=waiting,
                    prompt_tokens_s=SPEED)
                member.spec.sampled = self.now


def test_prompt_follows_its_beginning():
    world = World(8)
    first = {seed: world.serve(some(40, seed))[0] for seed in range(20)}
    assert len(set(first.values())) > 3
    for turn in range(1, 4):
        for seed, prefill in first.items():
            assert world.serve(some(40 + turn, seed))[0] == prefill
    assert world.pick(some(50, 3))[2].cached == tokens(43)


@pytest.mark.parametrize("waiting, stays", [(0, True), (4000, True), (40000, False)])
def test_queue_counts_as_much_as_the_cache(waiting, stays):
    """A cache saves 40 blocks, 10240 tokens, and is worth no longer wait than these."""
    world = World(2)
    holder = world.serve(some(40))[0]
    for name in ("p0", "p1"):
        world.load(name, waiting if name == holder else 0)
    assert (world.pick(some(41))[0].name == holder) == stays


def test_second_prompt_follows_one_under_way():
    world = World(4)
    for seed in range(8):
        prefill, _, held = world.pick(some(40, seed))
        assert world.pick(some(40, seed))[0] is prefill
        world.now += 60
        held.release()


def test_failed_prompt_leaves_nothing():
    world = World(2)
    _, _, held = world.pick(some(40))
    held.release()
    assert world.policy.indexes["prefill"].blocks == 0
    prefill, _, held = world.pick(some(40))
    held.prefilled()
    held.release()
    assert world.policy.cached(prefill, policy.Request(1e6, chain=some(40))) == tokens(40), \
        "prefill had answered"


def test_stream_holds_no_chain():
    """A thousand streams of the longest prompts would hold 160 MB."""
    world = World(1, 1)
    _, _, held = world.pick(some(40))
    held.began(0.1)
    assert held._chain, "prefill may answer later, as SGLang's does"
    held.prefilled()
    assert not held._chain and world.policy.indexes["prefill"].blocks == 40
    held.prefilled()
    held.release()
    assert world.policy.indexes["prefill"].blocks == 40


def test_holder_to_avoid_is_avoided():
    world = World(2)
    world.serve(some(40))
    holder = world.pick(some(40))[0]
    assert world.pick(some(40), avoid={holder})[0] is not holder


def test_member_that_was_down_has_no_cache():
    world = World(2)
    world.serve(some(40))
    prefill = world.pick(some(40))[0]
    world.policy.lost(prefill)
    assert world.pick(some(40))[2].cached == 0


def test_holder_is_found_in_a_large_group():
    """The picker draws two of them, and would find it by chance once in a hundred."""
    world = World(300)
    prefill = world.serve(some(40))[0]
    assert all(world.serve(some(41))[0] == prefill for _ in range(5))


def test_size_of_the_cache_is_that_of_the_load():
    world = World(1)
    for member in world.members.roles["prefill"]:
        member.spec.load = member.spec.load._replace(seq=2, kv_total_tokens=tokens(32))
    world.serve(some(20, 1))
    world.serve(some(20, 2))
    assert world.policy.indexes["prefill"].blocks == 30
    assert world.pick(some(20, 1))[2].cached == tokens(10)


# ---- decode alone ----

@pytest.mark.parametrize("name", policy.BY_NAME)
def test_short_prompts_are_computed_on_decode(name):
    world = World(2, 2, name, alone_below=1000)
    for count, why in ((999, "short"), (1000, None)):
        prefill, decode, held = world.pick((), count)
        assert (prefill is None) == (why == "short") and held.why_alone == why
        assert decode.name in ("d0", "d1")
        held.release()


def test_prompt_that_decode_has_is_computed_there():
    world = World(2, 4, alone_uncached=tokens(4))
    prefill, decode = world.serve(some(40))
    assert prefill is not None
    for length, alone in ((40, True), (43, True), (44, False)):
        for _ in range(4):
            prefill, chosen, held = world.pick(some(length))
            assert (prefill is None) == alone, length
            if alone:
                assert chosen.name == decode and held.why_alone == "cached"
                assert held.cached == tokens(40)
            held.release()
    assert world.serve(some(43)) == (None, decode)
    assert world.serve(some(46))[0] is None, "its own prompts count"


def test_decode_with_much_load_is_not_asked_for_its_cache():
    """That is another one's cache then, and prefill computes the prompt."""
    world = World(2, 2, alone_uncached=tokens(4))
    decode = world.serve(some(40))[1]
    others = {m for m in world.members.roles["decode"] if m.name != decode}
    for _ in range(60):
        assert world.pick((), 5000, avoid=others)[1].name == decode
    prefill, chosen, _ = world.pick(some(40))
    assert prefill is not None and chosen.name != decode


@pytest.mark.parametrize("more", [{}, {"alone_below": 1 << 30}])
def test_nothing_is_computed_alone_unless_asked_for(more):
    """Decode has all of the prompt, but the options are zero; or it is SGLang's."""
    world = World(2, 1, **more)
    for member in world.members.roles["decode"]:
        member.spec.engine = "sglang" if more else "vllm"
    for _ in range(3):
        assert world.serve(some(40))[0] is not None
    assert world.policy.indexes["decode"].blocks == 0
    assert not engines.BY_NAME["sglang"].decode_computes


def test_short_prompt_needs_no_prefill_server():
    world = World(2, 2, alone_below=1000)
    for member in world.members.roles["prefill"]:
        member.listed = False
    world.members.roles["prefill"] = []
    assert world.pick((), 10)[0] is None and world.pick((), 1000) is None


# ---- sessions ----

@pytest.mark.parametrize("name", ["least-loaded", "prefix"])
def test_session_keeps_its_pair(name):
    world = World(8, 4, name)
    pairs = {session: world.serve((), 1000, session) for session in range(1, 9)}
    assert len(set(pairs.values())) > 3
    for _ in range(3):
        for session, pair in pairs.items():
            _, _, held = world.pick((), 1000, session)
            assert held.kept is True
            held.release()
            assert world.serve((), 1000, session) == pair
    assert world.pick((), 1000, 99)[2].kept is None


@pytest.mark.parametrize("waiting, stays", [(0.9 * SPEED, True), (1.1 * SPEED, False)])
def test_session_moves_when_its_member_is_late(waiting, stays):
    """By one second at most."""
    world = World(2, 1, "least-loaded")
    prefill = world.serve((), 100, 7)[0]
    for name in ("p0", "p1"):
        world.load(name, waiting if name == prefill else 0)
    got, _, held = world.pick((), 100, 7)
    assert (got.name == prefill) == stays == held.kept
    world.now += 0.1
    held.began(0.1)
    held.release()
    world.load(prefill, 0)
    assert world.pick((), 100, 7)[0] is got, "it stays there"


def test_session_leaves_a_member_that_is_gone():
    world = World(2, 1, "least-loaded")
    prefill = world.serve((), 100, 7)[0]
    lost, = [m for m in world.members.roles["prefill"] if m.name == prefill]
    world.members.roles["prefill"].remove(lost)
    got, _, held = world.pick((), 100, 7)
    assert got is not lost and held.kept is False
    del world.members.by_key["prefill", lost.url]
    lost.listed = False
    assert world.pick((), 100, 7)[0] is got


# ---- options ----

@pytest.mark.parametrize("more", [
    ["--affinity", "a b"], ["--affinity", "X-S", "--policy", "random"],
    ["--affinity", "X-S", "--policy", "round-robin"], ["--alone-uncached", "9"],
    ["--engine", "sglang", "--alone-below", "9"], ["--prefix-memory", "1000"],
    ["--engine", "sglang", "--policy", "prefix", "--alone-uncached", "9"],
    ["--alone-below", "-1"], ["--affinity-slack", "0"]], ids=" ".join)
def test_options_that_do_not_fit_are_refused(more, capsys):
    both = ["--prefill", "http://a:1", "--decode", "http://b:1"]
    with pytest.raises(SystemExit):
        config.read(both + more)
    assert more[-2].strip("-").split()[0] in capsys.readouterr().err
    assert config.read(both + ["--affinity", "X-S"]).affinity == "X-S"
    assert config.read(both + ["--policy", "prefix", "--alone-uncached", "9"]).alone_uncached == 9


# ---- between false engines ----

def asked(fakes):
    """Index of the one that was asked; its requests are taken."""
    found = [i for i, fake in enumerate(fakes) for _ in fake.asked]
    for fake in fakes:
        fake.asked.clear()
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_turns_are_sent_where_the_conversation_was(kind):
    @aio
    async def run():
        async with routed(3, 1, kind, ["--policy", "prefix"]) as (router, prefills, decodes):
            told = []
            for seed in range(2):
                messages, first = [said("user", words(seed))], None
                for turn in range(3):
                    body = {"model": "m", "messages": messages, "max_tokens": 4, "stream": True}
                    assert (await router.ask(body, CHAT))[0] == 200
                    first = first if turn else [p.asked != [] for p in prefills].index(True)
                    assert asked(prefills) == first, (seed, turn)
                    told.append(turn)
                    messages = messages + [said("assistant", "".join(SAID)),
                                           said("user", words(seed + 10 * turn + 10, 2000))]
            lines = await router.lines(6)
            cached = [int(line.split(" cached=")[1]) for line in lines]
            assert [c > 0 for c in cached] == [turn > 0 for turn in told], cached
            assert cached[1] == LONG // 1024 * 256 and "alone=" not in "".join(lines)
            metric = 'kvd_router_prompt_tokens_total{state="%scached"}'
            assert await router.metric(metric % "") == sum(cached)
            assert await router.metric(metric % "un") > 2 * LONG // 4
            assert await router.metric('kvd_router_prefix_blocks{role="prefill"}') > 78
            assert await router.metric('kvd_router_prefix_blocks{role="decode"}') == 0
    run()


@aio
async def test_salt_is_another_prompt():
    """A temperature is not. The prompt is parsed by another process."""
    async with routed(1, 1, options=["--policy", "prefix"]) as (router, _, _):
        text = words(1, 200_000)
        for more in ({}, {"temperature": 1}, {"cache_salt": "a"}, {"model": "n"}):
            assert (await router.ask(dict(ASK, prompt=text, **more)))[0] == 200
        cached = [int(line.split(" cached=")[1]) > 0 for line in await router.lines(4)]
        assert cached == [False, True, False, False]


@aio
async def test_refused_prompts_fill_no_index():
    async with routed(1, 1, options=["--policy", "prefix"]) as (router, (prefill,), _):
        prefill.say = 400, '{"error": "too long"}'
        for seed in range(5):
            assert (await router.ask(dict(ASK, prompt=words(seed))))[0] == 400
        assert await router.metric("kvd_router_prefix_blocks") == 0
        prefill.say = None
        for text in (b'{"messages": %s%s}' % (b"[" * 900, b"]" * 900), b'{"messages": [[[]]]}'):
            assert (await router.ask(text, CHAT))[0] == 200
        assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
        assert await router.metric("kvd_router_prefix_blocks") == LONG // 1024 + 1


REFUSAL = (200, 'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n',
           "text/event-stream")


@aio
async def test_refusal_in_a_stream_is_no_answer():
    """SGLang's way, with HTTP 200: the server has nothing of the prompt, and no token was sent."""
    options = ["--policy", "prefix", "--alone-uncached", "1000000"]
    async with routed(1, 1, options=options) as (router, _, (decode,)):
        decode.say = REFUSAL
        status, _, text = await router.ask(dict(ASK, prompt=words(1), stream=True))
        assert status == 200 and text.decode() == REFUSAL[1]
        for name in ("prefix_blocks", "prompt_tokens_total", "alone_total",
                     "first_token_seconds_count"):
            assert await router.metric("kvd_router_" + name) == 0, name


@aio
async def test_refusal_in_the_stream_of_prefill_is_no_answer():
    async with routed(1, 1, "sglang", ["--policy", "prefix"]) as (router, (prefill,), (decode,)):
        decode.say = 200, "{}"
        prefill.say = REFUSAL
        assert (await router.ask(dict(ASK, prompt=words(1), stream=True)))[0] == 200
        assert await router.metric("kvd_router_prefix_blocks") == 0
        prefill.say = 200, "".join(SAID)
        assert (await router.ask(dict(ASK, prompt=words(1), stream=True)))[0] == 200
        assert await router.metric("kvd_router_prefix_blocks") > 0


@aio
async def test_server_that_was_down_is_not_expected_to_have_a_cache():
    async with routed(1, 1, options=["--policy", "prefix", "--health-failures", "1"]) as (
            router, (prefill,), _):
        assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
        assert await router.metric("kvd_router_prefix_blocks") > 0
        prefill.healthy = False
        await router.until_health(wanted=503)
        prefill.healthy = True
        await router.until_health()
        assert await router.metric("kvd_router_prefix_blocks") == 0
        assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
        assert " cached=0" in (await router.lines(2))[1]


def test_server_that_was_removed_is_not_expected_to_have_a_cache(tmp_path):
    """Also not by the answer of a request that it runs meanwhile: another may have its URL now."""
    path = tmp_path / "prefills"

    @aio
    async def run():
        world = Engines()
        fakes = [await Fake(world, role).start() for role in ("prefill", "prefill", "decode")]
        first, second, decode = fakes

        async def listed(fake, count):
            (tmp_path / "new").write_text(fake.url + "\n")
            os.rename(tmp_path / "new", path)
            line = "member up role=prefill url=" + fake.url
            await until(lambda: router.log.count(line) == count, router)
        path.write_text(first.url + "\n")
        router = await Router(["--prefill", "@%s" % path, "--decode", decode.url, *FAST,
                               "--policy", "prefix"]).start()
        assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
        first.silent = asyncio.Event()
        running = asyncio.ensure_future(router.ask(dict(ASK, prompt=words(2))))
        await until(lambda: first.running, router)
        assert await router.metric("kvd_router_prefix_blocks") > 0
        await listed(second, 1)
        assert await router.metric("kvd_router_prefix_blocks") == 0
        await listed(first, 2)
        first.silent.set()
        assert (await running)[0] == 200
        assert await router.metric("kvd_router_prefix_blocks") == 0
        for seed in (1, 2):
            assert (await router.ask(dict(ASK, prompt=words(seed))))[0] == 200
        assert all(" cached=0" in line for line in await router.lines(4))
        assert await router.end() == 0
        for fake in fakes:
            await fake.runner.cleanup()
    run()


@aio
async def test_killed_holder_is_replaced():
    async with routed(2, 1, options=["--policy", "prefix", "--health-interval", "30"]) as (
            router, prefills, _):
        assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
        holder = asked(prefills)
        await prefills[holder].kill()
        for _ in range(2):
            assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
            assert asked(prefills) == 1 - holder
        lines = await router.lines(3)
        assert "tries=2" in lines[1] and "tries=1" in lines[2]
        assert int(lines[2].split(" cached=")[1]) == LONG // 1024 * 256


@aio
async def test_decode_is_asked_alone():
    options = ["--policy", "prefix", "--alone-below", "100", "--alone-uncached", "2000"]
    async with routed(1, 3, options=options) as (router, (prefill,), decodes):
        assert (await router.ask())[0] == 200  # short
        assert prefill.asked == []
        alone = [d for d in decodes if d.asked][0]
        assert alone.asked[0][1] == dict(ASK, kv_transfer_params=None)
        asked(decodes)
        assert (await router.ask(dict(ASK, prompt=words(1))))[0] == 200
        assert len(prefill.asked) == 1
        holder = asked(decodes)
        for more in (1000, 4000):  # the second one is continued from the first
            assert (await router.ask(dict(ASK, prompt=words(1) + words(2, more))))[0] == 200
            assert len(prefill.asked) == 1 and asked(decodes) == holder
        assert (await router.ask(dict(ASK, prompt=words(1) + words(3, 9000))))[0] == 200
        assert len(prefill.asked) == 2
        lines = await router.lines(5)
        assert [line.partition(" alone=")[2] for line in lines] == [
            "short", "", "cached", "cached", ""]
        assert [" prefill=- " in line for line in lines] == [True, False, True, True, False]
        for why, count in (("short", 1), ("cached", 2)):
            assert await router.metric('kvd_router_alone_total{why="%s"}' % why) == count


@aio
async def test_session_header_keeps_the_pair():
    async with routed(4, 3, options=["--affinity", "X-Session-ID"]) as (
            router, prefills, decodes):
        for name in ("mine", "yours"):
            pairs = set()
            for _ in range(4):
                status, _, _ = await router.ask(headers={"x-session-id": name})
                assert status == 200
                assert not any("X-Session-ID" in one[2] for f in prefills + decodes
                               for one in f.asked)
                pairs.add((asked(prefills), asked(decodes)))
            assert len(pairs) == 1, pairs
        assert (await router.ask())[0] == 200
        assert await router.metric('kvd_router_affinity_total{result="kept"}') == 6
        assert await router.metric('kvd_router_affinity_total{result="moved"}') == 0
        assert "yours" not in router.log and "cached=" not in router.log


@aio
async def test_session_moves_from_a_killed_server():
    async with routed(2, 1, options=["--affinity", "X-Session-ID"]) as (router, prefills, _):
        mine = {"headers": {"X-Session-ID": "mine"}}
        assert (await router.ask(**mine))[0] == 200
        first = asked(prefills)
        await prefills[first].kill()
        for _ in range(2):
            assert (await router.ask(**mine))[0] == 200
            assert asked(prefills) == 1 - first
        await until(lambda: router.log.count(" status=200") == 3, router)
        assert await router.metric('kvd_router_affinity_total{result="moved"}') == 1
        assert await router.metric('kvd_router_affinity_total{result="kept"}') == 1


def test_near_is_asked_of_evaluated_members_only():
    world, seen = World(300), []
    cached = world.policy.cached

    def spy(member, request):
        seen.append(member.name)
        return cached(member, request)
    world.policy.cached = spy
    world.serve(some(40))
    seen.clear()
    world.pick(some(40))
    assert 0 < len(seen) < 20


def test_roles_have_caches_of_their_own():
    world = World(1, 1, alone_uncached=100)
    request = policy.Request(1e6, chain=some(40))
    prefill, decode, held = world.pick(some(40))
    held.prefilled()
    assert [world.policy.cached(m, request) for m in (prefill, decode)] == [tokens(40), 0]
    held.began(0.1)
    assert world.policy.cached(decode, request) == tokens(40)
    world.policy.lost(prefill)
    assert [world.policy.cached(m, request) for m in (prefill, decode)] == [0, tokens(40)]
