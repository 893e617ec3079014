#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Planted bugs, each of which the simulation's judge must find.

A mutant is one edit of the daemon. The tree is copied, edited and built with
asserts compiled out, so that it is the judge that finds it and not a check of
the daemon's own; then the simulation runs from a fixed seed until it fails.

Some edits of what the transports have in common (net) break what no engine sees: the
simulation may then fail in any way (a crash, a session that never ends), or, where the
daemon above makes up for it, the conformance suite on the simulation's transport must.

    tests/sim/mutants.py [NAME...]      (MUTANT_S: seconds a mutant, default 60)
    tests/sim/mutants.py --places       only: does each have its place in the source?
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

# name, file, what stands there, what shall stand there (of each, if they are several), who
# finds it if not the judge
MUTANTS = [
    ("failed-shown-while-aborting", "daemon/room/room_state.c",
     "[ROOM_ABORTING] = KVD_TRANSFERRING",
     "[ROOM_ABORTING] = KVD_FAILED"),
    ("success-a-chunk-early", "daemon/room/room_recv.c",
     "if (party->due.got == party->due.expected)\n\t\t\tcontinue;",
     "if (party->due.got * 2 >= party->due.expected)\n\t\t\tcontinue;"),
    ("a-source-forgotten", "daemon/room/room_recv.c",
     "if (party->due.got == party->due.expected)\n\t\t\tcontinue;",
     "if (party->due.got == party->due.expected || party->link.next == &room->parties)\n"
     "\t\t\tcontinue;"),
    ("bytes-counted-twice", "daemon/room/room_recv.c",
     "party->due.got += move->plan->bytes;",
     "party->due.got += 2 * move->plan->bytes;"),
    ("landed-says-too-much", "daemon/room/room_recv.c",
     "} else if (move->reserved) {",
     "} else if (move->reserved && !err) {"),
    ("sender-does-not-wait-for-receivers", "daemon/room/room_send.c",
     "first_waiting(room) == &room->send.chunks && room_parties_done(room)",
     "first_waiting(room) == &room->send.chunks"),
    ("abort-told-to-nobody", "daemon/room/room_state.c",
     "if (party_lost(party) || party_done(party) ||\n\t    (!party_asked(party) && "
     "!party->gen && !early))",
     "if (party)"),
    ("receiver-that-cannot-start-tells-nobody", "daemon/room/room_state.c",
     "return room->role == ROOM_RECV && party->line != PARTY_POOL_GOING &&",
     "return room->role == ROOM_ROLES && party &&"),
    ("peer-loss-fails-nobody", "daemon/room/room_state.c",
     "if (room_live(room) && !room->ops->without(party, why))\n\t\troom_fail(room, why, NULL);",
     "if (room_live(room))\n\t\treturn;"),
    ("lease-never-ends", "daemon/room/room_offer.c",
     "if (loop_now_ns(room->session->kvd->loop) < room->offer.lease_end_ns)\n\t\treturn;",
     "if (room)\n\t\treturn;"),
    ("ticket-of-a-stranger-taken", "daemon/room/room_admit.c",
     "\t    !mem_equal(admit->ticket, ticket, TICKET_BYTES))",
     "\t    !mem_equal(ticket, ticket, TICKET_BYTES))"),
    ("source-of-another-engine-taken", "daemon/handshake/handshake_choice.c",
     ("(wanted->session && pool->session != wanted->session) ||",
      "return err_pass(choice_several(remote, found, pool));"),
     ("(wanted->session && !pool) ||", "break;")),
    ("early-message-lost", "daemon/room/rooms_late.c",
     "void orphans_take(struct rooms *rooms, struct room *room)\n{",
     "void orphans_take(struct rooms *rooms, struct room *room)\n{\n"
     "\tif (room->number % 4 == 1)\n\t\treturn;"),
    ("waiting-has-no-end", "daemon/room/room_clock.c",
     "if (idle_ns < room->limits_ns[LIMIT_WAITING])\n\t\treturn;\n\tover_limit",
     "if (room)\n\t\treturn;\n\tover_limit"),
    ("one-party-speaks-for-all", "daemon/room/room_party.c",
     "\t\tif (!party_done(party))\n\t\t\treturn false;\n\t}\n\treturn true;",
     "\t\tif (party_done(party))\n\t\t\treturn true;\n\t}\n\treturn false;"),
    ("success-told-to-one-source", "daemon/room/room_recv.c",
     "err_clear(); /* its peer is going down: its room fails there */",
     "err_clear();\n\t\tbreak;"),
    ("abort-told-to-one", "daemon/room/room_state.c",
     "if (party != but)\n\t\t\ttell_abort(room, party);",
     "if (party != but && party->link.prev == &room->parties)\n"
     "\t\t\ttell_abort(room, party);"),
    ("tokens-shifted", "daemon/room/room_map.c",
     ".dst_first_token = d->first_token,",
     ".dst_first_token = d->first_token && d->token_end > s->token_end\n"
     "\t\t\t\t? d->first_token - 1 : d->first_token,"),
    ("dead-engine-leaves-its-partners", "daemon/room/module.c",
     "if (room->session != session || room->hold != ROOM_HELD)",
     "if (session)"),
    ("transfer-over-while-bytes-move", "daemon/transport/net_xfer.c",
     "if (!ops_of(xfer)->is_over(xfer))\n\t\treturn;",
     "if (!ops_of(xfer)->is_over(xfer) && sm_state(&xfer->sm) != NET_XFER_STOPPING)\n"
     "\t\treturn;"),
    ("stopped-inbound-succeeds", "daemon/transport/net_xfer.c",
     "bool ok = sm_state(&xfer->sm) != NET_XFER_STOPPING;",
     "bool ok = true;"),
    ("canceled-op-succeeds", "daemon/transport/net_xfer.c",
     "if (xfer->answered && !xfer->refused && ops_of(xfer)->is_whole(xfer)) {",
     "if (xfer->answered) {"),
    ("canceled-op-forgotten", "daemon/transport/net_xfer.c",
     "\top->used = xfer->used;\n",
     "\tif (op->err.code == ERR_ABORTED && xfer->bytes)\n\t\treturn;\n"
     "\top->used = xfer->used;\n", "any"),
    ("op-done-twice", "daemon/transport/net_xfer.c",
     "\top->on_done(op);",
     "\top->on_done(op);\n\top->on_done(op);", "any"),
    ("op-done-inside-cancel", "daemon/transport/net_xfer.c",
     "if (op->impl)\n\t\tnet_xfer_stop(op->impl, why);",
     "struct net_xfer *xfer = op->impl;\n"
     "\tstruct net_peer *peer = xfer ? xfer->peer : NULL;\n\n"
     "\tif (!xfer)\n\t\treturn;\n"
     "\tnet_xfer_stop(xfer, why);\n\tnet_peer_tell(peer);", "any"),
    ("plan-of-any-size-lands", "daemon/transport/net_xfer.c",
     "if (bytes != xfer->bytes)",
     "if (!sides)", "conform"),
    ("requests-out-of-order", "daemon/transport/net_xfer.c",
     "list_push_back(&peer->queued, &xfer->queue_link);",
     "list_push_front(&peer->queued, &xfer->queue_link);"),
    ("answer-told-but-not-kept", "daemon/transport/net_xfer.c",
     "\tif (xfer->asked && !xfer->answered && net_peer_live(xfer->peer)) {",
     "\tif (!xfer) {", "conform"),
    ("lost-peer-keeps-its-transfers", "daemon/transport/net_peer.c",
     "\t\t\t  peer->err.text);\n\tnet_xfers_stop(peer);",
     "\t\t\t  peer->err.text);", "any"),
    ("peer-lost-twice", "daemon/transport/net_peer.c",
     "\t\tup->on_peer_lost(up->owner, (struct xp_peer *)peer, &peer->err);",
     "\t\tup->on_peer_lost(up->owner, (struct xp_peer *)peer, &peer->err);\n"
     "\t\tup->on_peer_lost(up->owner, (struct xp_peer *)peer, &peer->err);", "conform"),
    ("peer-lost-told-to-nobody", "daemon/transport/net_peer.c",
     "} else if (!peer->told) {",
     "} else if (!peer->told && peer->dial) {", "conform"),
    ("rows-answered-behind-the-deadline", "daemon/attend/ask.c",
     "\t\tpost->open);\n\tpost_fail(post, &why);",
     "\t\tpost->open);\n\tpost->on_failed(post->attend->session, post->slot, post->id, "
     "&why);"),
    ("rows-for-ever", "daemon/attend/ask.c",
     "if (args->deadline_ns)\n\t\tloop_timer_start",
     "if (!args->deadline_ns)\n\t\tloop_timer_start"),
    ("a-refused-leg-is-an-empty-one", "daemon/attend/leg.c",
     "\t\t\tmsg->text);\n\t\tpost_fail(leg->post, &why);",
     "\t\t\tmsg->text);\n"
     "\t\tleg->values = mem_zalloc(values_count(leg->rows, dv) * sizeof(float));\n"
     "\t\tpost_step(leg->post, leg, &(struct post_figures){0});"),
    ("dropped-leg-still-counted", "daemon/attend/leg.c",
     "\t\tleg_stop(leg);\n\t\treturn;\n\t}\n\tif (leg->sent)\n\t\tleg_unsend(leg);",
     "\t\tleg_session(leg)->legs_sent--;\n\t}"),
    ("answer-of-anybody", "daemon/attend/leg.c",
     "if (!leg || leg->remote != remote || !leg->sent)", "if (!leg || !leg->sent)"),
    ("answer-of-any-length", "daemon/attend/leg.c",
     "if (leg->post && msg.code == ERR_OK &&\n\t    msg.values.len !=",
     "if (leg->post && msg.code == ERR_OK && !leg->attends &&\n\t    msg.values.len !="),
    ("lost-holder-answers-nothing", "daemon/attend/leg.c",
     "if (leg->in)\n\t\t\tcontinue; /* its", "if (leg->in || leg->post)\n\t\t\tcontinue; /* its"),
    ("rows-read-where-they-were", "daemon/attend/leg.c",
     "leg->item.q = leg->q;",
     "leg->item.q = post_seat(leg->post, leg->post->attend->facts.q +\n"
     "\t\t\tform_q_bytes(&leg->post->attend->form, leg->row));"),
    ("seat-written-by-each-leg", "daemon/attend/leg.c",
     "\ttold = gather_is_of(leg->post, leg);\n",
     "\tmemcpy(post_seat(leg->post, leg->post->attend->facts.o), msg->values.data, 4);\n"
     "\ttold = gather_is_of(leg->post, leg);\n"),
    ("delta-not-told", "daemon/attend/ask.c",
     ".delta = (uint32_t)part->delta,", ".delta = 0,"),
    ("rows-behind-the-last-written", "daemon/attend/gather.c",
     "merge->rows = post->rows;", "merge->rows = attend->rows;"),
    ("maxima-left-behind-o-in-bf16", "daemon/attend/compute.c",
     "memmove((uint8_t *)item->o", "memmove((uint8_t *)item->m"),
    ("chosen-tokens-shifted", "daemon/attend/ask.c",
     ".skip = skip};", ".skip = skip ? skip - 1 : 0};"),
    ("piece-not-at-the-holder-s-place", "daemon/attend/ask.c",
     "head->first -= far_hold_first(side->far);", ""),
    ("rows-charged-for-ever", "daemon/attend/ask.c",
     "post_data_drop(post);\n\tcharge_drop(&post->charge);", "post_data_drop(post);"),
    ("rows-of-all-layers-together", "daemon/attend/compute.c",
     ("return a->layer == b->layer && store_kv_same", "\t\t\t\t  item->layer,\n"),
     ("return store_kv_same", "")),
    ("stop-ignored", "daemon/attend/serve.c",
     "if (!attends)\n\t\treturn 0;\n\terr_set(&why, ERR_CANCELED",
     "if (attends)\n\t\treturn 0;\n\terr_set(&why, ERR_CANCELED"),
    ("stop-of-anybody", "daemon/attend/serve.c",
     "list_foreach_safe(serve, &attend_remote(remote)->serves, peer) {\n\t\tif",
     "list_foreach_safe(serve, &attends->serving, link) {\n\t\tif"),
    ("hold-without-its-key", "daemon/store/remote_hold.c",
     "return idmap_get(&store_remote(remote)->asks, ask);",
     "struct remote_hold *hold = NULL;\n"
     "\tstruct remote *other;\n\n"
     "\tlist_foreach(other, handshake_remotes(remote->kvd->handshake), link)\n"
     "\t\thold = hold ? hold : idmap_get(&store_remote(other)->asks, ask);\n"
     "\treturn hold;"),
    ("pin-gone-before-the-kernel", "daemon/store/store_kv.c",
     ("\tstore_chunk_pin(chunk);\n", "store_chunk_unpin(kv->chunks[--kv->count]);"),
     ("", "kv->count--;")),
    ("pin-kept", "daemon/store/store_kv.c",
     "store_chunk_unpin(kv->chunks[--kv->count]);", "kv->count--;"),
]
PROMISES = ("still", "all", "landed", "confirm", "learn", "start", "end", "admit")


def edits(mutant):
    old, new = mutant[2:4]
    return [(old, new)] if isinstance(old, str) else list(zip(old, new))


def plant(tree, mutant):
    path = os.path.join(tree, mutant[1])
    with open(path) as f:
        text = planted = f.read()
    for old, new in edits(mutant):
        if text.count(old) != 1:
            return None
        planted = planted.replace(old, new)
    with open(path, "w") as f:
        f.write(planted)
    return path, text


def finder(mutant):
    return mutant[4] if len(mutant) > 4 else "judge"


def build(tree, program):
    make = subprocess.run(["make", "-s", "-j2", "build/rel/" + program, "WARN=-w"],
                          cwd=tree, env=dict(os.environ, CPPFLAGS="-DNDEBUG"),
                          capture_output=True, text=True)
    return make.stderr if make.returncode else None


def conform(tree):
    run = subprocess.run(["build/rel/conform", "--backend", "fake"], cwd=tree,
                         capture_output=True, text=True, errors="replace")
    lines = [line for line in run.stdout.splitlines() if line.startswith("not ok")]
    if run.returncode < 0:
        return True, "conform ends with signal %d" % -run.returncode
    return bool(lines), "conform: " + (lines + ["not found"])[0]


def hunt(tree, seconds, anyhow):
    """The promise that was broken and after how many rooms, or why not."""
    run = subprocess.run(["build/rel/sim", "--seconds", str(seconds), "--seed", "1",
                          "--first", "1"], cwd=tree, capture_output=True, text=True,
                         errors="replace")
    found = re.search(r"^FAILED: seed (\d+): (\w+): (.*)$", run.stdout, re.M)
    rooms = re.search(r"(\d+) rooms", run.stdout)
    if found and found.group(2) in PROMISES:
        return True, "%s, seed %s, %s rooms: %s" % (found.group(2), found.group(1),
                                                    rooms.group(1), found.group(3)[:80])
    lines = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    return bool(lines) and anyhow, (lines + ["not found in %d s" % seconds])[0]


def places(root):
    lost = []
    for mutant in MUTANTS:
        name, path = mutant[:2]
        with open(os.path.join(root, path)) as f:
            text = f.read()
            if any(text.count(old) != 1 for old, _ in edits(mutant)):
                lost.append("%s: its place in %s is not there, or not alone" % (name, path))
    print("\n".join(lost), end="\n" if lost else "")
    return bool(lost)


def main():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if sys.argv[1:] == ["--places"]:
        return places(root)
    seconds = int(os.environ.get("MUTANT_S", "60"))
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m[0] in sys.argv[1:]]
    work = tempfile.mkdtemp(prefix="kvd-mutants.")
    tree = os.path.join(work, "tree")
    passed = failed = 0
    try:
        shutil.copytree(root, tree, symlinks=True,
                        ignore=shutil.ignore_patterns("build", ".git", "core"))
        for mutant in chosen:
            undo = plant(tree, mutant)
            if not undo:
                ok, words = False, "its place in %s is not there, or not alone" % mutant[1]
            else:
                who = finder(mutant)
                words = build(tree, "conform" if who == "conform" else "sim")
                if words:
                    ok = False
                elif who == "conform":
                    ok, words = conform(tree)
                else:
                    ok, words = hunt(tree, seconds, who == "any")
                with open(undo[0], "w") as f:
                    f.write(undo[1])
            passed += ok
            failed += not ok
            print("%-4s %-36s %s" % ("ok" if ok else "FAIL", mutant[0], words), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("%d passed, %d failed" % (passed, failed))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
