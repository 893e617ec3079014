# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.router pick: which pair a request would get, and the prediction of each worker.

It reads the loads once, so speeds are what workers have computed lately, and reservations of
routers are not known here: a router that starts now would choose so."""
import argparse
import json

from .pick import DECODE, PREFILL, SERVING, STATES, worker_name
from .sides import Failed, Sides, clean, parsed, parser, table

FIELDS = ("total_s", "queue_s", "compute_s", "transfer_s", "penalty_s", "last_resort", "fresh")


def _near(text):
    worker, equals, tokens = text.rpartition("=")
    if not equals or not tokens.isascii() or not tokens.isdigit():
        raise argparse.ArgumentTypeError("WORKER=TOKENS, not %.80r" % text)
    return worker_name(worker), int(tokens)


def _count(most):
    def of(text):
        if not text.isascii() or not text.isdigit() or int(text) > most:
            raise argparse.ArgumentTypeError("%.40r is not a number of 0 to %d" % (text, most))
        return int(text)
    return of


def _milliseconds(seconds):
    return ("%.2f ms" if seconds < 0.01 else "%.0f ms" if seconds < 10 else "%.0f s") % (
        seconds if seconds >= 10 else seconds * 1e3)


def _order(row):
    return STATES.index(row.state), row.score.last_resort, row.score.total, row.worker


def _print(side, best, rows):
    print("%s  %s" % (side, clean(best.worker) if best else "none serves"))
    if rows:
        table("WORKER STATE >FIRST_TOKEN >QUEUE >COMPUTE >TRANSFER >PENALTY NOTE", (
            (row.worker, row.state, *map(_milliseconds, row.score[:5]),
             "no room for its KV" if row.score.last_resort else
             "" if row.score.fresh else "no load is known") for row in rows))


def _object(row):
    return {"worker": row.worker, **dict(zip(FIELDS, row.score))}


def main(argv):
    out = parser("pick", "Which workers a request would get, and why: predicted times to the first "
                 "token by the workers' loads; of a file by its last line. docs/pick.md has the "
                 "function.")
    out.add_argument("--prompt", type=_count(10 ** 9), default=0, metavar="N",
                     help="tokens of the prompt")
    out.add_argument("--output", type=_count(10 ** 9), default=0, metavar="N",
                     help="tokens that are expected")
    out.add_argument("--bytes", type=_count(10 ** 15), default=0, metavar="N", help="of KV")
    out.add_argument("--near", type=_near, action="append", default=[],
                     metavar="WORKER=TOKENS", help="a worker holds so much of the prompt; may be repeated")
    args = parsed(out, argv)
    sides = Sides(args)
    if not sides.look():
        raise Failed("%s: no line" % args.path)
    while sides.file and sides.look():
        pass
    rows = {side: sorted(sides.picker.scores(
        side, prompt_tokens=args.prompt, bytes=args.bytes, output_tokens=args.output,
        near=args.near, now=sides.now), key=_order) for side in (PREFILL, DECODE)}
    best = {side: next((row for row in rows[side] if row.state == SERVING), None) for side in rows}
    if args.json:
        print(json.dumps({
            **{side: row and _object(row) for side, row in best.items()},
            "scores": {side: [{**_object(row), "state": row.state} for row in rows[side]]
                       for side in rows}}))
    else:
        for side in rows:
            _print(side, best[side], rows[side])
    if not all(best.values()):
        raise Failed("pick: no worker of a group serves: kvd-ctl group")
    return 0
