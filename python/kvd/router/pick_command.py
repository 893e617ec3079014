# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.router pick: the pair that a request would get, and the prediction of each worker.

It reads the loads once, so speeds are those of recent work, and reservations of routers are not
known: a router that starts now would choose the same."""
import argparse
import json

from .pick import DECODE, PREFILL, SERVING, STATES, worker_name
from .sides import Failed, Sides, clean, parsed, parser, table

FIELDS = ("total_s", "queue_s", "compute_s", "transfer_s", "penalty_s", "last_resort", "fresh")


def _near(text):
    worker, equals, tokens = text.rpartition("=")
    if not equals or not tokens.isascii() or not tokens.isdigit():
        raise argparse.ArgumentTypeError("%.80r is not WORKER=TOKENS" % text)
    return worker_name(worker), int(tokens)


def _count(most):
    def of(text):
        if not text.isascii() or not text.isdigit() or int(text) > most:
            raise argparse.ArgumentTypeError("%.40r is not an integer from 0 to %d" % (text, most))
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
             "no room for KV" if row.score.last_resort else
             "" if row.score.fresh else "no load known") for row in rows))


def _object(row):
    return {"worker": row.worker, **dict(zip(FIELDS, row.score))}


def main(argv):
    out = parser("pick", "Show which workers a request would get: predicted times to the first "
                 "token, from the workers' loads; with a file, from its last line. docs/pick.md "
                 "has the "
                 "function.")
    out.add_argument("--prompt", type=_count(10 ** 9), default=0, metavar="N",
                     help="tokens of the prompt")
    out.add_argument("--output", type=_count(10 ** 9), default=0, metavar="N",
                     help="expected output tokens")
    out.add_argument("--bytes", type=_count(10 ** 15), default=0, metavar="N", help="size of the "
                                                                                    "prompt's KV, "
                                                                                    "in bytes")
    out.add_argument("--near", type=_near, action="append", default=[],
                     metavar="WORKER=TOKENS", help="tokens of the prompt that a worker holds; may "
                                                   "be repeated")
    args = parsed(out, argv)
    sides = Sides(args)
    if not sides.look():
        raise Failed("%s: empty" % args.path)
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
        raise Failed("pick: a group has no worker that serves; see kvd-ctl group")
    return 0
