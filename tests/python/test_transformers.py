# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers whose document lies in chunks of other daemons: every way to
attend to it against the same model with all of its KV at home, 64 greedy tokens each.

    make transformers      torch and transformers from PyPI; without them these are skipped"""
import copy
import multiprocessing
import os
import signal

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # products of 64 x 64

import kvd  # noqa: E402
import kvd.transformers as kt  # noqa: E402
from conftest import until  # noqa: E402
from test_attend import ATTENDS, daemons  # noqa: E402
from test_chunk_files import killed  # noqa: E402
from turned import turned  # noqa: E402

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


def spliced(geometry, rows, delta):
    """Rows of a layer, for tokens that are used so many positions later."""
    keys = rows[geometry.key]
    if not delta:
        return rows
    return {**rows, geometry.key: torch.from_numpy(turned(
        keys.double().numpy(), delta, *geometry.rope)).to(keys.dtype)}


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

    def home(self, prefix=(), carve=0):
        """A cache of transformers with the prefix's KV and, behind that, the document's; the latter's
        first tokens are computed behind the prefix."""
        cache = transformers.DynamicCache(config=self.plain.config)
        if prefix or carve:
            self.call([*prefix, *self.document[:carve]], cache)
        for i, was in enumerate(self.cache.layers):
            rows = spliced(self.geometry, self.geometry.pack(was.keys, was.values), len(prefix))
            rows = {name: some[carve:] for name, some in rows.items()}
            cache.update(*self.geometry.unpack(rows), i)
            if self.geometry.index:
                cache.update_indexer(was.indexer_keys, i)
        return cache

    def truth(self, question=QUESTION, prefix=(), carve=0):
        """(tokens, logits of each), with everything at home."""
        cache, tokens, out, seen = self.home(prefix, carve), question, [], []
        while len(out) < TOKENS:
            seen.append(self.call(tokens, cache)[-1])
            tokens = [int(seen[-1].argmax())]
            out += tokens
        return out, seen

    def judge(self, reader, truth, question=QUESTION, tell=""):
        """The same tokens, given those before. Who is within a hair of another may be it."""
        worst, tokens, differ, wrong = 0.0, question, 0, []
        for token, want in zip(*truth):
            got, want = reader.step(tokens)[-1].double(), want.double()
            size = float(want.abs().max())
            worst = max(worst, float((got - want).abs().max()) / size)
            best = want.topk(2).values
            if int(got.argmax()) != token:
                differ += 1
                if self.limit < 1e-3 or best[0] - best[1] > 4 * self.limit * size:
                    wrong.append(len(reader.steps))
            tokens = [token]
        print("%s: logits within %.1e of the largest, %d of %d tokens differ"
              % (tell, worst, differ, TOKENS))
        assert worst <= self.limit and not wrong, wrong


def place(world, client):
    return kt.Place(client, world.model, tokens=DOCUMENT + 64, chunk=T)


def test_models_of_one_architecture_have_chunks_of_their_own():
    """By their parameters as they are, whatever they are called."""
    world, other = World("llama"), World("llama")
    first = kt.revision_of(world.model)
    assert kt.revision_of(other.model) == first, "the same configuration and parameters"
    weight = other.model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]].clone()  # equal sums
    assert kt.revision_of(other.model) != first
    config = World("llama", rms_norm_eps=1e-3)
    assert kt.revision_of(config.model) not in (first, kt.revision_of(other.model))
    assert kt.revision_of(World("llama", torch.bfloat16).model) != first


def spread(world, clients):
    """The document's chunks, in as many runs as there are holders."""
    chunks = -(-DOCUMENT // T)
    cuts = [i * chunks // len(clients) for i in range(len(clients) + 1)]
    for client, a, b in zip(clients, cuts, cuts[1:]):
        with place(world, client) as there:
            there.put(world.document, world.cache, a * T, min(b * T, DOCUMENT))


@pytest.fixture(scope="module")
def fleet():
    """Seven holders, and a daemon that knows them."""
    with daemons(7) as (_, client, _, clients):
        yield client, clients


WAYS = [(way, prefix) for way in kt.WAYS for prefix in ((), PREFIX)]
# In bf16 a router or a selection turns by a rounding, of transformers' own eager and sdpa
# attention as well, and sharp attention makes more of each: layers without the one, and gentle.
GENTLE = dict(initializer_range=0.08, num_hidden_layers=2)


def gentle(kind):
    return World(kind, torch.bfloat16, **GENTLE,
                 **({} if kind == "llama" else {"first_k_dense_replace": 2}))


class Chosen:
    """What the plain model's indexers select is what the other one's do."""

    def __init__(self, world):
        self.plain = [layer.self_attn.indexer for layer in world.plain.model.layers]
        self.model = [layer.self_attn.indexer for layer in world.model.model.layers]
        self.told = [[] for _ in self.plain]

    def record(self):
        for one, told in zip(self.plain, self.told):
            def forward(*args, was=one.forward, told=told, **kwargs):
                told.append(was(*args, **kwargs))
                return told[-1]
            one.forward = forward

    def replay(self, reader):
        for one, told in zip(self.model, self.told):
            def forward(*args, was=type(one).forward.__get__(one), told=iter(told), **kwargs):
                got = was(*args, **kwargs)
                return next(told) if kwargs["past_key_values"] is reader.cache else got
            one.forward = forward


@pytest.mark.parametrize("kind,dtype", [(k, d) for k in KINDS for d in LIMIT],
                         ids=["%s-%s" % (k, d) for k in KINDS for d in ("fp32", "bf16")])
def test_every_path_gives_the_same_tokens(kind, dtype):
    world = gentle(kind) if dtype == torch.bfloat16 else World(kind)
    chosen = Chosen(world) if kind == "v32" and dtype == torch.bfloat16 else None
    if chosen:
        chosen.record()
    truths = {prefix: world.truth(prefix=prefix)
              for prefix in ((), tuple(PREFIX))[:1 if kind == "v32" else 2]}
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
                if chosen:
                    chosen.replay(reader)
                world.judge(reader, truths[tuple(prefix)],
                            tell="%s %s at %d" % (kind, way, len(prefix)))
                ways = {step.way for step in reader.steps}
                assert ways == ({"route", "fetch"} if way == "rent" else {way})


@pytest.mark.parametrize("way", kt.WAYS)
@pytest.mark.parametrize("kind", ["v3", "llama"])
def test_first_tokens_are_computed_behind_the_prefix(kind, way):
    """The same with and without a transfer; the more of them, the closer to a model that computes
    all of it."""
    world, apart = World(kind), {}
    cache = transformers.DynamicCache(config=world.plain.config)
    world.call(PREFIX + world.document, cache)
    whole = world.call(QUESTION, cache)[-1]
    with daemons(1) as (_, client, _, (far,)):
        place(world, far).put(world.document, world.cache)
        here = place(world, client)
        for carve in (0, 2 * T, 12 * T):
            truth = world.truth(prefix=PREFIX, carve=carve)
            apart[carve] = float((truth[1][0] - whole).abs().max())
            with kt.Reader(here, world.document, way=way, prefix=PREFIX, carve=carve,
                           recover=False) as reader:
                world.judge(reader, truth, tell="%s %s carved %d" % (kind, way, carve))
                assert way == "local" or sum(held.tokens for held in reader._held) in (
                    0, DOCUMENT - carve)
        for carve in (T - 1, -T, DOCUMENT, 13 * T):
            with pytest.raises(ValueError, match="carve"):
                kt.Reader(here, world.document, prefix=PREFIX, carve=carve)
    print("%s: logits from those of the whole: %s" % (kind, apart))
    assert apart[12 * T] < apart[0] / 2


@pytest.mark.parametrize("kind", ["v2", "v3", "llama"])
def test_turned_keys_are_the_models_own(kind):
    """A first layer's keys depend on tokens and positions alone: at another position they are
    what the model itself computes there."""
    world = World(kind)
    cache = transformers.DynamicCache(config=world.plain.config)
    world.call(PREFIX + world.document, cache)
    was = world.cache.layers[0]
    rows = spliced(world.geometry, world.geometry.pack(was.keys, was.values), len(PREFIX))
    for got, want in zip(world.geometry.unpack(rows), (cache.layers[0].keys,
                                                       cache.layers[0].values)):
        error = float((got - want[..., len(PREFIX):, :]).abs().max() / want.abs().max())
        print("%s: first layer within %.1e" % (kind, error))
        assert error < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_one_to_seven_holders(fleet, kind):
    """Of V3.2 each holder has some of the selected tokens, or none of them."""
    client, clients = fleet
    world = World(kind)
    prefix = () if kind == "v32" else PREFIX
    here = place(world, client)
    for count in range(1, 8):
        world.document = document(count)  # another one: nobody has its chunks
        world.cache = transformers.DynamicCache(config=world.plain.config)
        world.call(world.document, world.cache)
        truth = world.truth(prefix=prefix)
        spread(world, clients[:count])
        with kt.Reader(here, world.document, prefix=prefix, recover=False) as reader:
            assert sum(held.tokens for held in reader._held) == DOCUMENT
            world.judge(reader, truth, tell="%s, %d holders" % (kind, count))
    here.close()


def test_long_questions_are_split_into_posts():
    """More rows than the seats have, and a document's tokens that a question fills up."""
    world, question = World("v2"), document(9, 100)
    truth = world.truth(question, PREFIX)
    with daemons(1) as (_, client, _, (far,)):
        place(world, far).put(world.document, world.cache)
        with kt.Reader(place(world, client), world.document, prefix=PREFIX, rows=64,
                       recover=False) as reader:
            world.judge(reader, truth, question, "100 tokens at once")


def test_fetching_begins_when_routing_has_cost_as_much():
    world = World("v2")
    truth = world.truth()
    page = kvd.cost.preset("h100-ibgda")
    with daemons(1) as (_, client, _, (far,)):
        place(world, far).put(world.document, world.cache)
        holders = [kvd.cost.Holder(tokens=65536)]  # as if it were long: 59 steps
        with kt.Reader(place(world, client), world.document, way="rent", page=page,
                       holders=holders, recover=False) as reader:
            world.judge(reader, truth, tell="ski rental")
        choices = [step.choice for step in reader.steps]
        turn = [choice.way for choice in choices if choice].index("fetch")
        assert 2 < turn and abs(turn - choices[1].even_steps) <= 2, choices[1]
        routed = [step.way for step in reader.steps].index("fetch")
        assert turn < routed < TOKENS


def test_prices_are_those_of_the_daemons_own_page():
    """Of the holder that is asked; as long as nobody has measured it there are none. What was
    routed counts in the page that the next step is priced by."""
    world = World("v2")
    truth = world.truth()
    with daemons(1) as (_, client, _, (far,)):
        place(world, far).put(world.document, world.cache)
        here = place(world, client)
        page = client.cost_page()
        with kt.Reader(here, world.document, page=page, holders=[
                kvd.cost.Holder(DOCUMENT, peer=b"?" * 16)]) as reader:
            assert reader.prices() is None
        price = kt.home_price(here, world.document)
        assert price["attend_us"] > 0 and price["recompute_us"] > 0
        with kt.Reader(here, world.document, way="rent", page=page, price=price,
                       recover=False) as reader:
            asked, = reader.holders
            until(lambda: reader.prices() and reader.prices().route.us < float("inf"))
            assert asked == kvd.cost.Holder(DOCUMENT, 0, reader._held[0].hold.holders()[0].peer)
            world.judge(reader, truth, tell="by the daemon's page")
        first = reader.steps[0].choice
        assert first.local.us < float("inf") and first.attend.us == pytest.approx(
            len(QUESTION) * price["attend_us"])
        shown, = client.command("cost.show")["peers"]
        assert shown["instance"] == asked.peer.hex()
        assert first.transport == shown["links"][0]["transport"]
        routed = sum(step.way == "route" for step in reader.steps)
        with kt.Reader(here, world.document, way="route", page=page, recover=False) as reader:
            world.judge(reader, truth, tell="routed")
            assert reader.prices().round.us > 0
        there, = (s["attend"] for s in client.command("cost.show")["speeds"]
                  if s["instance"] == shown["instance"] and s["dqk"] == world.geometry.dqk)
        assert there["count"] == (routed + TOKENS) * world.geometry.layers


def test_local_chunks_have_no_price():
    world = World("v2")
    truth = world.truth()
    with daemons(1) as (_, client, _, _):
        here = place(world, client)
        here.put(world.document, world.cache)
        with kt.Reader(here, world.document, way="rent", page=client.cost_page(),
                       recover=False) as reader:
            assert reader.holders == [] and reader.prices() is None
            world.judge(reader, truth, tell="here")
        assert {step.way for step in reader.steps[2:]} == {"fetch"}


class Failing:
    """A hold whose fetch does not begin."""

    def __init__(self, error):
        self.error = error

    def fetch(self, views, deadline):
        raise self.error


def test_pages_are_returned_after_any_failure(monkeypatch):
    world = World("llama")
    with daemons(2) as (_, client, _, clients):
        spread(world, clients)
        with place(world, client) as here:
            pages, (whole,) = len(here._free), here.hold(world.document)
            held = [whole._replace(tokens=6 * T),
                    whole._replace(begin=6 * T, tokens=DOCUMENT - 6 * T)]
            for error in (kvd.BusyError("full", "EBUSY", 0, "op", True), KeyboardInterrupt()):
                with pytest.raises(type(error)):
                    here.fetch([held[0], held[1]._replace(hold=Failing(error))], "kv")
                assert len(here._free) == pages
            moves = here.fetch(held, "kv")
            with monkeypatch.context() as patched:
                patched.setattr(here, "read", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    here.fetched(moves, held, "kv")
            assert len(here._free) == pages
            taken = here.take((pages - 4) * T)
            with kt.Reader(here, world.document, way="fetch") as reader:
                assert reader.now == "local" and reader.lost.code == "EBUSY"
            with pytest.raises(kvd.BusyError, match="free"):
                kt.Reader(here, world.document, way="fetch", recover=False)
            here.give(taken)
            assert len(here._free) == pages
            whole.hold.close()


def test_pages_of_interrupted_put_are_freed_after_readers(monkeypatch):
    world = World("llama")
    with daemons(0) as (_, client, _, _), place(world, client) as here:
        pages, moves = len(here._free), []

        def interrupted(move, *_):
            moves.append(move)
            raise KeyboardInterrupt
        give = here.give

        def checked(back):
            with pytest.raises(kvd.StateError, match="closed"):  # it ended, and was closed
                moves[-1].state
            give(back)
        monkeypatch.setattr(here, "give", checked)
        with monkeypatch.context() as patched:
            patched.setattr(kvd.chunks.Move, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                here.put(world.document, world.cache)
        assert len(moves) == 1 and len(here._free) == pages


def agent(socket, kind, question):
    """In a process of its own: tokens, and the logits' bits."""
    world = World(kind)
    with kvd.Client(socket) as client, kt.Reader(place(world, client), world.document,
                                                 recover=False) as reader:
        tokens, logits = reader.generate(question, TOKENS)
        assert {step.way for step in reader.steps} == {"route"}
    return tokens, torch.stack(logits).numpy().tobytes()


def test_four_processes_on_one_holder_equal_their_solo_runs():
    world, questions = World("v2"), [document(20 + i, 5 + i) for i in range(4)]
    with daemons(1) as (daemon, client, _, (far,)):
        place(world, far).put(world.document, world.cache)
        with multiprocessing.get_context("spawn").Pool(4) as pool:
            asked = [pool.apply_async(agent, (daemon.socket_path, "v2", q)) for q in questions]
            together = [one.get(300) for one in asked]
        for question, (tokens, logits) in zip(questions, together):
            alone = agent(daemon.socket_path, "v2", question)
            assert (tokens, logits) == alone
            assert tokens == world.truth(question)[0]


@pytest.mark.parametrize("recover", [True, False])
@pytest.mark.parametrize("kind", ["v2", "v32"])
def test_holder_killed_during_answer(kind, recover):
    """Between two layers of a step, one of two holders."""
    world = World(kind)
    truth = world.truth()
    with daemons(2, kind=killed) as (_, client, holders, clients):
        spread(world, clients)
        with kt.Reader(place(world, client), world.document, recover=recover) as reader:
            ask = reader.ask

            def asked(layer, rows, chosen):
                if layer == 1 and len(reader.steps) == 10:
                    os.kill(holders[1].proc.pid, signal.SIGKILL)
                return ask(layer, rows, chosen)
            reader.ask = asked
            if recover:
                world.judge(reader, truth, tell="%s, a holder killed" % kind)
                assert [s.way for s in reader.steps] == ["route"] * 10 + ["local"] * 54
                assert isinstance(reader.lost, kvd.Error)
            else:
                with pytest.raises(kvd.Error) as lost:
                    world.judge(reader, truth)
                assert lost.value.retryable and len(reader.steps) == 10, lost.value
