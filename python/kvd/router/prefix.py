# SPDX-License-Identifier: Apache-2.0
"""Prefixes of prompts that members have cached, as far as this router knows: from the requests that
it has sent to them. No tokenizer, no message of an engine.

A prompt is a chain of hashes, one for each whole block of its text (a kibibyte) or of its token
ids (256 of them). A hash covers its block and all before it, and the fields by which engines
distinguish equal texts: model, adapter, salt, template. So the length of a common prefix
is the number of common hashes. The text is canonical JSON: tools, then messages, one after another,
so a conversation with one more turn is the same bytes, and more.

Each member has its hashes in the order of their last use, the deepest of a chain first. The oldest
are dropped first, so the rest of a chain is always its first part, as in an engine's cache, and its
length is found by bisection. Among many members only those are searched that a block names as
its last user. A block has none once that member has lost it, until its next use, though others may
have it: the blocks after it name them.

A request that is under way counts: a second one with the same prompt should follow it. Such blocks
are kept apart, in a part of the memory: only an answer may drop others, or a client with prompts
that engines refuse could empty the index."""
import json
import math
from hashlib import blake2b
from itertools import chain as chained, islice

BLOCK_BYTES, BLOCK_TOKENS = 1024, 256
HASH_BITS = 60  # those have the smallest objects
CHAIN_MAX = 4096  # blocks; the rest of a longer prompt counts as not cached
MEMBER_MAX = 1 << 14  # blocks of one member, or it takes tens of milliseconds to forget them
SHARDS_BITS = 12  # of `last`: one table of a million blocks takes as long to grow
TOKENS_USUAL = 500_000  # KV of a member that does not report its size
ENTRY_BYTES = 200  # memory of a block of a member, as measured by bench_prefix.py
DROPPED = 16  # a full member loses this part, as each search for the oldest takes some time
UNDER_WAY = 8  # the part of the memory for requests without an answer
TTL_S = 600
HOLDERS_MAX, SEARCHED = 8, 64  # members, and blocks in which they are searched

# SGLang has lora_path and extra_key; vLLM's adapters are models
FIELDS = ("model", "lora_path", "cache_salt", "extra_key", "chat_template", "chat_template_kwargs",
          "documents")


# ---- a prompt's chain ----

def _canonical(value):
    return json.dumps(value, ensure_ascii=False, sort_keys=True,
                      separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


def _single(prompt):
    """The only prompt of a list of one; None: there are several, or it is none."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0] if len(prompt) == 1 else None
    return prompt if isinstance(prompt, (str, list)) else None


def _text_blocks(pieces):
    """The whole blocks of these bytes."""
    rest = b""
    for piece in pieces:
        rest += piece[:CHAIN_MAX * BLOCK_BYTES]
        whole = len(rest) - len(rest) % BLOCK_BYTES
        for at in range(0, whole, BLOCK_BYTES):
            yield rest[at:at + BLOCK_BYTES]
        rest = rest[whole:]


def _blocks(path, body):
    """(kind, blocks)"""
    if path == "/v1/chat/completions":
        messages = body.get("messages")
        pieces = map(_canonical, messages if isinstance(messages, list) else ())
        tools = body.get("tools")
        return b"chat", _text_blocks(chained([_canonical(tools)] if tools else [], pieces))
    text = body.get("text") if path == "/generate" else None
    prompt = _single(text if text is not None else body.get(
        "input_ids" if path == "/generate" else "prompt"))
    if isinstance(prompt, str):
        text = prompt[:CHAIN_MAX * BLOCK_BYTES].encode("utf-8", "surrogatepass")
        return b"text", _text_blocks([text])
    ids = prompt or []
    return b"ids", (_canonical(ids[at:at + BLOCK_TOKENS])
                    for at in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS))


def chain(path, body, key):
    """The hashes of a request's prompt. Empty: it is shorter than a block, or there are several
    prompts. key: a secret, against clients that would construct prompts of equal hashes."""
    try:
        kind, blocks = _blocks(path, body)
        last = blake2b(_canonical([body.get(name) for name in FIELDS]) + kind, digest_size=8,
                       key=key).digest()
        out = []
        for block in islice(blocks, CHAIN_MAX):
            last = blake2b(last + block, digest_size=8, key=key).digest()
            out.append(int.from_bytes(last, "little") >> 64 - HASH_BITS)
        return out
    except (ValueError, RecursionError):  # nested as deep as the parser accepts
        return []


# ---- the index ----

class PrefixIndex:
    """Members by URL. Times are seconds of any clock."""

    def __init__(self, memory, ttl=TTL_S):
        """memory: bytes; 0: nothing is kept. ttl: seconds after which a block without another use
        is not counted."""
        blocks = memory // ENTRY_BYTES
        self.most_under_way = blocks // UNDER_WAY
        self.most, self.ttl = blocks - self.most_under_way, ttl
        # {url: {hash: time of the last answer}}; the member without one for the longest time first
        self.members, self.blocks = {}, 0
        # {url: {hash: number of requests without an answer}}
        self.under_way, self.blocks_under_way = {}, 0
        # {hash: URL of its last user}, by the first bits of the hash
        self.last = [{} for _ in range(1 << SHARDS_BITS)]

    def find(self, url, chain, now):
        """Number of the chain's blocks that a member has."""
        has, counts = self.members.get(url, {}), self.under_way.get(url, {})
        since, low, high = now - self.ttl, 0, len(chain) if has or counts else 0
        while low < high:
            middle = (low + high) // 2
            block = chain[middle]
            if block in counts or has.get(block, -math.inf) >= since:
                low = middle + 1
            else:
                high = middle
        return low

    def holders(self, chain):
        """Members that may have most of it: the last users of its deepest known blocks."""
        out, searched = {}, 0
        for block in reversed(chain):
            url = self._shard(block).get(block)
            if url is not None:
                out[url] = None
                searched += 1
                if len(out) == HOLDERS_MAX or searched == SEARCHED:
                    break
        return list(out)

    def _shard(self, block):
        return self.last[block >> HASH_BITS - SHARDS_BITS]

    def handed(self, url, chain):
        """A request with this prompt was sent to the member. Returns an argument of ended(); None:
        there is no room to count it."""
        counts = self.under_way.get(url, {})
        if not chain or len(counts) + len(chain) > MEMBER_MAX or \
                self.blocks_under_way + len(chain) > self.most_under_way:
            return None
        self.under_way[url], before = counts, len(counts)
        for block in chain:
            counts[block] = counts.get(block, 0) + 1
            self._shard(block).setdefault(block, url)
        self.blocks_under_way += len(counts) - before
        return counts

    def ended(self, url, chain, counts):
        """It is not under way any more. Without answered(), there will be no answer."""
        if counts is None or self.under_way.get(url) is not counts:  # it was forgotten
            return
        has, before = self.members.get(url, {}), len(counts)
        for block in chain:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                if block not in has:
                    self._unused(url, block)
        self.blocks_under_way += len(counts) - before
        if not counts:
            del self.under_way[url]

    def answered(self, url, chain, now, tokens=TOKENS_USUAL):
        """The member has the prompt. tokens: size of its KV."""
        if not 0 < len(chain) <= self.most:
            return
        has = self.members.pop(url, {})
        self.members[url], before = has, len(has)
        for block in reversed(chain):
            has.pop(block, None)
            has[block] = now
            self._shard(block)[block] = url
        self.blocks += len(has) - before
        most = min(max(1, int(tokens) // BLOCK_TOKENS), MEMBER_MAX)
        if len(has) > most:
            self._remove_oldest(url, len(has) - most + most // DROPPED)
        while self.blocks > self.most:
            url, has = next(iter(self.members.items()))
            self._remove_oldest(url, max(self.blocks - self.most, len(has) // DROPPED))

    def forget(self, url):
        """The member has lost its cache."""
        counts = self.under_way.pop(url, {})
        self.blocks_under_way -= len(counts)
        for block in counts:
            self._unused(url, block)
        if url in self.members:
            self._remove_oldest(url, len(self.members[url]))

    def _remove_oldest(self, url, count):
        has, counts = self.members[url], self.under_way.get(url, {})
        blocks = list(islice(has, count))
        for block in blocks:
            del has[block]
            if block not in counts:
                self._unused(url, block)
        self.blocks -= len(blocks)
        if not has:
            del self.members[url]

    def _unused(self, url, block):
        """The member has it no more."""
        shard = self._shard(block)
        if shard.get(block) == url:
            del shard[block]
