# SPDX-License-Identifier: Apache-2.0
"""make demo-route: agents ask about one long document whose KV lies on another daemon.

Two daemons and a process for each agent; a small model of random weights. Every agent
decides for itself, step by step: its rows go to the document until that has cost as much as
bringing the document would, then it is brought. Every second agent goes by what the daemon has
measured, the others by the prices of a published fabric. And the last half of them has a prompt
of its own before the document, which stands elsewhere then than where it was computed. All
tokens are compared with those of one process that has everything at home."""
import argparse
import copy
import multiprocessing
import queue
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))

import torch  # noqa: E402
import transformers  # noqa: E402

import kvd  # noqa: E402
import kvd.transformers as kt  # noqa: E402
from kvd_daemon import Daemon, until  # noqa: E402
from turned import turned  # noqa: E402

CHUNK = 64
CHUNKS = "[chunks]\nchunk_memory = 256 MiB\nattention_threads = 1\n"
VOCABULARY = 512


def words(seed, count):
    return torch.randint(VOCABULARY, (count,),
                         generator=torch.Generator().manual_seed(seed)).tolist()


SMALL = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
             num_attention_heads=8, max_position_embeddings=1 << 17, initializer_range=0.12,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
MODELS = {
    "llama": ("Llama", dict(SMALL, num_key_value_heads=2, head_dim=32)),
    "v2": ("DeepseekV2", dict(
        SMALL, num_key_value_heads=8, kv_lora_rank=128, q_lora_rank=None, qk_rope_head_dim=32,
        qk_nope_head_dim=32, v_head_dim=32, moe_intermediate_size=64, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, topk_method="greedy"))}


def make_model(args):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    name, config = MODELS[args.model]
    config = getattr(transformers, name + "Config")(**config)
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    model.set_attn_implementation("kvd")
    return model


def place_of(client, model, args):
    return kt.Place(client, model, tokens=args.tokens + CHUNK, chunk=CHUNK)


def prompt_of(number, args):
    """(tokens before the document, the question)"""
    prefix = 37 if number >= args.agents // 2 else 0
    return words(100 + number, prefix), words(200 + number, 6 + number)


def pages_of(number, client, args, price):
    """A Reader's words for prices."""
    if number % 2 == 0:
        return dict(page=client.cost_page(), price=price)
    return dict(page=kvd.cost.preset(args.preset), holders=[kvd.cost.Holder(args.tokens)],
                price={"recompute_us": price["recompute_us"]})


def agent(number, socket, args, price, told):
    model = make_model(args)
    prefix, tokens = prompt_of(number, args)
    with kvd.Client(socket) as client, place_of(client, model, args) as place, \
            kt.Reader(place, words(1, args.tokens), way="rent", prefix=prefix,
                      **pages_of(number, client, args, price)) as reader:
        told.put((number, None))
        for _ in range(args.steps):
            prices = reader.prices(len(tokens))
            tokens = [int(reader.step(tokens)[-1].argmax())]
            step = reader.steps[-1]
            # what this step alone takes, and what comes before a first one
            told.put((number, dict(
                by="fabric" if number % 2 else "here", token=tokens[0], way=step.way, us=step.us, waited=step.routed_us,
                route=prices.round.us * model.config.num_hidden_layers,
                home=prices.attend.us * model.config.num_hidden_layers,
                fetch=prices.once.us,
                local=price.get("recompute_us", 0) * args.tokens *
                model.config.num_hidden_layers)))


def priced(client, place, document):
    """-> a Reader's price, once the daemon has measured all others."""
    price = kt.home_price(place, document)
    with kt.Reader(place, document, page=client.cost_page(), price=price) as reader:
        until("the holder is measured", lambda: reader.prices() and
              reader.prices().route.us < float("inf"))
        link, = client.command("cost.show")["peers"][0]["links"]
        print("measured here: %s, %s; %s" % (
            link["transport"], ", ".join("%s %.4g" % (name, link[name]["value"]) for name in (
                "probe_us", "bytes_per_us", "pull_us", "pull_bytes_per_us")),
            ", ".join("%s %.4g" % one for one in price.items())))
    return price


class Alone:
    """One process that has the document's KV."""

    def __init__(self, args):
        self.args, self.model = args, make_model(args)
        self.model.set_attn_implementation("eager")
        self.document = transformers.DynamicCache(config=self.model.config)
        for begin in range(0, args.tokens, 512):
            self.call(words(1, args.tokens)[begin:begin + 512], self.document)

    def call(self, tokens, cache):
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens]), past_key_values=cache,
                              use_cache=True).logits[0, -1]

    def tokens(self, number):
        geometry, (prefix, tokens) = kt.Geometry(self.model), prompt_of(
            number, self.args)
        cache = transformers.DynamicCache(config=self.model.config)
        if prefix:
            self.call(prefix, cache)
        for i, layer in enumerate(copy.deepcopy(self.document).layers):
            rows = geometry.pack(layer.keys, layer.values)
            rows[geometry.key] = torch.from_numpy(turned(
                rows[geometry.key].numpy(), len(prefix), *geometry.rope)).float()
            cache.update(*geometry.unpack(rows), i)
        out = []
        for _ in range(self.args.steps):
            tokens = [int(self.call(tokens, cache).argmax())]
            out += tokens
        return out


HEAD = "agent prices step token  way      took |  route a step | fetch once  + a step | local once + a step"
ROW = "%5d %-6s %4d %5d   %-5s %7.0f | %13.0f | %10.0f %9.0f | %10.0f %9.0f"


def show(told, processes, args):
    """-> {agent: [its steps]}"""
    steps = {number: [] for number in range(args.agents)}
    print("\nµs. took: here, the whole step; the rest are prices, of the document alone, here or "
          "of %s\n%s" % (args.preset, HEAD))
    while any(len(s) < args.steps for s in steps.values()):
        try:
            number, s = told.get(timeout=5)
        except queue.Empty:
            if any(p.exitcode for p in processes):
                raise SystemExit("an agent has failed") from None
            continue
        if s is None:
            continue
        steps[number].append(s)
        print(ROW % (number, s["by"], len(steps[number]), s["token"], s["way"], s["us"], s["route"],
                     s["fetch"], s["home"], s["local"], s["home"]), flush=True)
    return steps


def summary(steps, alone):
    """-> did all tokens agree?"""
    good = True
    print("\nms in all, of the document alone:  by the prices of each way; by what was chosen")
    for number, its in steps.items():
        count = len(its)
        routed = sum(s["way"] == "route" for s in its)
        home = sum(s["home"] for s in its)
        route = sum(s["route"] for s in its)
        fetch, local = its[0]["fetch"] + home, its[0]["local"] + home
        chosen = sum(s["route"] if s["way"] == "route" else s["home"] for s in its)
        if routed < count:
            chosen += its[0]["local" if its[-1]["way"] == "local" else "fetch"]
        want = alone.tokens(number)
        equal = sum(s["token"] == w for s, w in zip(its, want))
        good = good and equal == count
        print("agent %d: route %.2f, fetch %.2f, local %.2f; %d steps routed%s: %.2f; "
              "%d of %d tokens as in a single process"
              % (number, route / 1e3, fetch / 1e3, local / 1e3, routed,
                 ", then " + its[-1]["way"] if routed < count else "", chosen / 1e3, equal,
                 count))
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--preset", default="h100-ibgda", help="the published fabric")
    args = parser.parse_args()
    document, alone = words(1, args.tokens), Alone(args)
    with Daemon(CHUNKS) as holder, kvd.Client(holder.socket_path) as far, \
            Daemon(CHUNKS + "chunk_peers = %s\n" % far.endpoint) as daemon, \
            kvd.Client(daemon.socket_path) as client:
        with place_of(far, alone.model, args) as there:
            there.put(document, alone.document)
        until("the holder is known", lambda: any(
            p["state"] == "up" for p in client.command("peer.list")["peers"]))
        print("%d tokens of a document are at %s" % (args.tokens, far.endpoint))
        with place_of(client, make_model(args), args) as here:
            price = priced(client, here, document)
        context = multiprocessing.get_context("spawn")
        told = context.Queue()
        agents = [context.Process(target=agent, args=(
            number, daemon.socket_path, args, price, told))
            for number in range(args.agents)]
        for one in agents:
            one.start()
        try:
            steps = show(told, agents, args)
        finally:
            for one in agents:
                one.join(60)
    if not summary(steps, alone):
        raise SystemExit("tokens differ")
    print("all tokens are as in a single process")


if __name__ == "__main__":
    main()
