#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Planted bugs, each of which the simulation's judge must find.

A mutant is one edit of the daemon. The tree is copied, edited and built with
asserts compiled out, so that it is the judge that finds it and not a check of
the daemon's own; then the simulation runs from a fixed seed until it fails.

    tests/sim/mutants.py [NAME...]      (MUTANT_S: seconds a mutant, default 60)
    tests/sim/mutants.py --places       only: does each have its place in the source?
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

# name, file, what stands there, what shall stand there
MUTANTS = [
    ("failed-shown-while-aborting", "daemon/room/room.c",
     "[ROOM_ABORTING] = KVD_TRANSFERRING",
     "[ROOM_ABORTING] = KVD_FAILED"),
    ("success-a-chunk-early", "daemon/room/room_recv.c",
     "if (party->got == party->expected)\n\t\t\tcontinue;",
     "if (party->got * 2 >= party->expected)\n\t\t\tcontinue;"),
    ("a-source-forgotten", "daemon/room/room_recv.c",
     "if (party->got == party->expected)\n\t\t\tcontinue;",
     "if (party->got == party->expected || party->link.next == &room->parties)\n"
     "\t\t\tcontinue;"),
    ("bytes-counted-twice", "daemon/room/room_recv.c",
     "party->got += move->plan->bytes;",
     "party->got += 2 * move->plan->bytes;"),
    ("landed-says-too-much", "daemon/room/room_recv.c",
     "} else if (move->reserved) {",
     "} else if (move->reserved && !err) {"),
    ("sender-does-not-wait-for-receivers", "daemon/room/room_send.c",
     "newest->dispatched && all_confirmed(room)",
     "newest->dispatched"),
    ("abort-told-to-nobody", "daemon/room/room.c",
     "if (party_lost(party) || party->done || (!party->told && !party->gen))",
     "if (party)"),
    ("peer-loss-fails-nobody", "daemon/room/rooms_loss.c",
     "if (room_live(room) && !room_without(party, why))\n\t\troom_fail(room, why, NULL);",
     "(void)why;"),
    ("lease-never-ends", "daemon/room/room_offer.c",
     "if (loop_now_ns(rooms_kvd(room->rooms)->loop) < room->lease_end_ns)\n\t\treturn;",
     "if (room)\n\t\treturn;"),
    ("early-message-lost", "daemon/room/rooms_late.c",
     "void orphans_take(struct rooms *rooms, struct room *room)\n{",
     "void orphans_take(struct rooms *rooms, struct room *room)\n{\n"
     "\tif (room->number % 4 == 1)\n\t\treturn;"),
    ("waiting-has-no-end", "daemon/room/room_clock.c",
     "if (idle_ns < room->limits_ns[LIMIT_WAITING])\n\t\treturn;\n\twaiting_words",
     "if (room)\n\t\treturn;\n\twaiting_words"),
    ("one-receiver-speaks-for-all", "daemon/room/room_send.c",
     "\t\tif (!party->done)\n\t\t\treturn false;\n\t}\n\treturn true;",
     "\t\tif (party->done)\n\t\t\treturn true;\n\t}\n\treturn false;"),
    ("success-told-to-one-source", "daemon/room/room_recv.c",
     "err_clear(); /* its peer is going down: its room fails there */",
     "err_clear();\n\t\tbreak;"),
    ("abort-told-to-one", "daemon/room/room.c",
     "if (party != but)\n\t\t\ttell_abort(room, party);",
     "if (party != but && party->link.prev == &room->parties)\n"
     "\t\t\ttell_abort(room, party);"),
    ("tokens-shifted", "daemon/room/room_map.c",
     ".dst_first_token = d->first_token,",
     ".dst_first_token = d->first_token && d->token_end > s->token_end\n"
     "\t\t\t\t? d->first_token - 1 : d->first_token,"),
    ("dead-engine-leaves-its-partners", "daemon/room/rooms.c",
     "if (room->session != session || room->close_when_terminal)",
     "if (session)"),
]
PROMISES = ("still", "all", "landed", "confirm", "learn", "end")


def plant(tree, mutant):
    name, path, old, new = mutant
    path = os.path.join(tree, path)
    with open(path) as f:
        text = f.read()
    if text.count(old) != 1:
        return None
    with open(path, "w") as f:
        f.write(text.replace(old, new))
    return path, text


def build(tree):
    make = subprocess.run(["make", "-s", "-j2", "build/rel/sim", "WARN=-w"], cwd=tree,
                          env=dict(os.environ, CPPFLAGS="-DNDEBUG"),
                          capture_output=True, text=True)
    return make.stderr if make.returncode else None


def hunt(tree, seconds):
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
    return False, lines[0] if lines else "not found in %d s" % seconds


def places(root):
    lost = []
    for name, path, old, _ in MUTANTS:
        with open(os.path.join(root, path)) as f:
            if f.read().count(old) != 1:
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
                words = build(tree)
                ok, words = (False, words) if words else hunt(tree, seconds)
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
