# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers whose document lies in chunks of other daemons: every way to
attend to it against the same model with all of its KV at home, 64 greedy tokens each.

    make transformers      torch and transformers from PyPI; without them these are skipped"""
import contextlib
import copy
import os
import signal

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # products of 64 x 64

import kvd  # noqa: E402
import kvd.transformers as kt  # noqa: E402
from test_attend import ATTENDS, daemons  # noqa: E402
from test_chunk_files import killed  # noqa: E402

T, DOCUMENT, TOKENS = 16, 200, 64  # of a chunk; of a document: the last chunk is not full
QUESTION = [7, 3, 250, 12, 99, 41]
PREFIX = [5, 200, 17, 80, 33]
SMALL = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
             num_attention_heads=4, max_position_embeddings=4096, initializer_range=0.15,
             bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=True)
MLA = dict(SMALL, num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=48, qk_rope_head_dim=16,
           qk_nope_head_dim=32, v_head_dim=32, moe_intermediate_size=32, n_routed_experts=4,
           n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
           first_k_dense_replace=2)
KINDS = {
    "v2": ("DeepseekV2", dict(MLA, topk_method="greedy")),
    "v3": ("DeepseekV3", MLA),
    "v32": ("DeepseekV32", dict(MLA, index_topk=48, index_head_dim=32, index_n_heads=8)),
    "llama": ("Llama", dict(SMALL, num_key_value_heads=2, head_dim=32)),
}
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of logits, by the largest


def document(seed=1, tokens=DOCUMENT):
    return torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class World:
    """A model with kvd's attention, the same one without, and a document's KV as it was computed
    by the latter."""

    def __init__(self, kind, dtype=torch.float32, **more):
        name, words = KINDS[kind]
        torch.manual_seed(3)
        config = getattr(transformers, name + "Config")(**{**words, **more})
        self.model = getattr(transformers, name + "ForCausalLM")(config).to(dtype).eval()
        self.plain = copy.deepcopy(self.model)
        self.plain.set_attn_implementation("eager")
        self.model.set_attn_implementation("kvd")
        self.geometry = kt.Geometry(self.model)
        self.limit = LIMIT[dtype]
        self.document = document()
        self.cache = transformers.DynamicCache(config=config)
        self.call(self.document, self.cache)

    def call(self, tokens, cache):
        with torch.no_grad():
            return self.plain(input_ids=torch.tensor([list(tokens)]), past_key_values=cache,
                              use_cache=True).logits[0]

    def home(self, prefix=()):
        """A cache of transformers with the prefix's KV and, behind that, the document's."""
        cache = transformers.DynamicCache(config=self.plain.config)
        if prefix:
            self.call(prefix, cache)
        for i, was in enumerate(self.cache.layers):
            rows = self.geometry.splice(self.geometry.pack(was.keys, was.values), len(prefix))
            cache.update(*self.geometry.unpack(rows), i)
            if self.geometry.index:
                cache.update_indexer(was.indexer_keys, i)
        return cache

    def truth(self, question=QUESTION, prefix=()):
        """(tokens, logits of each), with everything at home."""
        cache, tokens, out, seen = self.home(prefix), question, [], []
        while len(out) < TOKENS:
            seen.append(self.call(tokens, cache)[-1])
            tokens = [int(seen[-1].argmax())]
            out += tokens
        return out, seen

    def judge(self, reader, truth, question=QUESTION, tell=""):
        """The same tokens, given those before. Who is within a hair of another may be it."""
        worst, tokens, differ = 0.0, question, 0
        for token, want in zip(*truth):
            got, want = reader.step(tokens)[-1].double(), want.double()
            size = float(want.abs().max())
            worst = max(worst, float((got - want).abs().max()) / size)
            best = want.topk(2).values
            if self.limit < 1e-3 or best[0] - best[1] > 4 * self.limit * size:
                assert int(got.argmax()) == token, "token %d" % len(reader.steps)
            differ += int(got.argmax()) != token
            tokens = [token]
        print("%s: logits within %.1e of the largest, %d of %d tokens differ"
              % (tell, worst, differ, TOKENS))
        assert worst <= self.limit


def place(world, client):
    return kt.Place(client, world.model, tokens=DOCUMENT + 64, chunk=T)


def spread(world, clients):
    """The document's chunks, in as many runs as there are holders."""
    chunks = -(-DOCUMENT // T)
    cuts = [i * chunks // len(clients) for i in range(len(clients) + 1)]
    for client, a, b in zip(clients, cuts, cuts[1:]):
        place(world, client).put(world.document, world.cache, a * T, min(b * T, DOCUMENT))


@pytest.fixture(scope="module")
def fleet():
    """Seven holders, and a daemon that knows them."""
    with daemons(7) as (_, client, _, clients):
        yield client, clients


WAYS = [(way, prefix) for way in kt.WAYS for prefix in ((), PREFIX)]


@pytest.mark.parametrize("dtype", list(LIMIT), ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_same_tokens(kind, dtype):
    world = World(kind, dtype)
    truths = {prefix: world.truth(prefix=prefix) for prefix in ((), tuple(PREFIX))}
    with daemons(1) as (_, client, _, (far,)):
        place(world, far).put(world.document, world.cache)
        here = place(world, client)
        for way, prefix in WAYS:
            if prefix and kind == "v32":
                with pytest.raises(ValueError, match="selected"):
                    kt.Reader(here, world.document, way=way, prefix=prefix)
                continue
            with kt.Reader(here, world.document, way=way, prefix=prefix,
                           recover=False) as reader:
                world.judge(reader, truths[tuple(prefix)],
                            tell="%s %s at %d" % (kind, way, len(prefix)))
                ways = {step.way for step in reader.steps}
                assert ways == ({"route", "fetch"} if way == "rent" else {way})
