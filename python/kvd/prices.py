# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.prices: what routing query rows to a holder, fetching its KV and recomputing it
cost on a published fabric, by the closed form of kvd.cost. No daemon is needed."""
import argparse
import json
import math
import sys

from . import cost

PRESETS = ("h100-ibgda", "h100-nvlink4", "a100-nvlink3", "rtx6000-pcie5", "a40-pcie4")
MODELS = {"v2-lite": cost.Model.mla(27, 16), "v3": cost.Model.mla(61, 128),
          "llama-8b": cost.Model.gqa(32, 32, 8), "llama-70b": cost.Model.gqa(80, 64, 8)}
DIMENSIONS = ("layers", "heads", "kv_heads", "dqk", "dv")
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
HEAD = "%8s" + "%11s" * 7 + "  BEST"


def _count(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _tokens(text):
    return [_count(word[:-1]) * UNITS[word[-1].lower()] if word[-1:].lower() in UNITS
            else _count(word) for word in text.split(",")]


def _micros(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def _parser():
    parser = argparse.ArgumentParser(prog="python -m kvd.prices", description=__doc__)
    add = parser.add_argument
    add("--preset", required=True, choices=PRESETS, help="the fabric")
    add("--model", default="v2-lite", choices=MODELS, help="default v2-lite")
    for name in DIMENSIONS:
        add("--" + name.replace("_", "-"), type=_count, metavar="N",
            help="override it in the model, as one rank has it")
    add("--tokens", type=_tokens, default=_tokens("2k,32k,128k"), metavar="LIST",
        help="context lengths; default 2k,32k,128k")
    add("--query", type=_count, default=1, metavar="N",
        help="query tokens per step; default 1")
    add("--steps", type=_count, default=1, metavar="N", help="remaining steps; default 1")
    add("--holders", type=int, default=1, choices=range(1, 9),
        help="holders of equal parts of the context; default 1")
    add("--selected", type=_count, default=0, metavar="N",
        help="tokens that a query token attends to, selected in each step")
    add("--shifted", action="store_true",
        help="the KV moves to another position: a fetch rotates it")
    add("--recompute", type=_micros, default=0, metavar="MICROS",
        help="time to compute the KV of a token and layer; without it, recomputing is not "
        "considered")
    add("--json", action="store_true", help="print JSON")
    return parser


def _model(parser, args):
    given = {name: getattr(args, name) for name in DIMENSIONS if getattr(args, name)}
    model = MODELS[args.model]._replace(**given)
    if model.kind and args.kv_heads:
        parser.error("--kv-heads: %s has one KV row for all heads" % args.model)
    if model.kv_heads > model.heads:
        parser.error("--kv-heads: at most the number of heads")
    return model


def price(args, model, tokens):
    """One row: times in microseconds, None where something is not possible."""
    holder = cost.Holder(tokens // args.holders, min(args.selected, tokens) // args.holders)
    choice = cost.preset(args.preset).decide(
        model, [holder] * args.holders, query_tokens=args.query, steps=args.steps,
        selected=args.selected > 0, shifted=args.shifted, recompute_us=args.recompute)
    row = {name + "_us": getattr(choice, name).us
           for name in ("round", "attend", "once", "route", "fetch", "local")}
    row.update(even_steps=choice.even_steps, route_error_us=choice.route.error_us,
               fetch_error_us=choice.fetch.error_us)
    row = {name: value if value < math.inf else None for name, value in row.items()}
    return {"tokens": tokens, **row, "way": choice.way, "sure": choice.sure}


def _print(told):
    model = told["model"]
    print("fabric   %s\nmodel    %s: %d layers, %d rows per step; steps: %d, holders: %d" % (
        told["preset"], model["name"], model["layers"], told["rows"], told["steps"],
        told["holders"]))
    print("         times in ms; ROUND, ATTEND: per layer and step; S*: steps from which a fetch is "
          "cheaper\n")
    print(HEAD % ("TOKENS", "ROUND", "ATTEND", "FETCH_ONCE", "S*", "ROUTE", "FETCH", "LOCAL"))
    for row in told["prices"]:
        ms = {name: "-" if row[name + "_us"] is None else "%.3f" % (row[name + "_us"] / 1000)
              for name in ("round", "attend", "once", "route", "fetch", "local")}
        even = "never" if row["even_steps"] is None else "%.1f" % row["even_steps"]
        print((HEAD[:-4] + "%s%s") % (
            row["tokens"], ms["round"], ms["attend"], ms["once"], even, ms["route"], ms["fetch"],
            ms["local"], row["way"], "" if row["sure"] else ", uncertain"))


def main(argv):
    """Exit status of `python -m kvd.prices ARGV`."""
    parser = _parser()
    args = parser.parse_args(argv)
    model = _model(parser, args)
    dimensions = {name: getattr(model, name) for name in DIMENSIONS}
    told = {"preset": args.preset, "model": {"name": args.model, **dimensions},
            "query_tokens": args.query, "rows": args.query * model.heads, "steps": args.steps,
            "holders": args.holders, "selected": args.selected, "shifted": args.shifted,
            "prices": [price(args, model, tokens) for tokens in args.tokens]}
    if args.json:
        print(json.dumps(told, indent=1))
    else:
        _print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
