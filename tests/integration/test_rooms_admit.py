#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rooms of others over a real wire: a third daemon, whose engine knows pools and numbers,
requests them in advance and while they are open, and gets nothing; the admitted peers do not
wait."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lib"))
from kvd_daemon import Daemon, run  # noqa: E402
from kvd_engine import (BOOTSTRAPPING, BYTES, Cache, Engine, FAILED, SUCCESS,  # noqa: E402
                        WAITING)

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77
SQUATTED = 3500


class Three:
    def __init__(self, transport):
        self.daemons = [Daemon("[transport]\ntransports = %s\n" % transport, name=name)
                        for name in ("prefill", "decode", "thief")]

    def __enter__(self):
        for daemon in self.daemons:
            daemon.__enter__()
        self.prefill, self.decode, self.thief = (
            Engine(d, d.name) for d in self.daemons)
        self.daemons[0].expect("unauthorized peer")
        self.src, self.dst, self.loot = map(Cache, (self.prefill, self.decode, self.thief))
        self.src.fill(SRC, TOKENS)
        return self

    def __exit__(self, *why):
        for engine in (self.prefill, self.decode, self.thief):
            engine.close()
        for daemon in self.daemons:
            daemon.__exit__(*why)

    def ask(self, engine, cache, room, role="recv", **more):
        view = {"kv": dict(pages=DST, tokens=[0, TOKENS])}
        if role == "pull":
            more["views"] = view
        engine.cmd("room.open", room=str(room), role=role, pool=cache.pool,
                   sources=[self.prefill.endpoint], **more)
        if role == "recv":
            engine.cmd("room.bind", room=str(room), views=view)

    def give(self, room, ticket):
        self.prefill.cmd("room.open", room=str(room), role="send", pool=self.src.pool,
                         ticket=ticket)

    def handed_over(self, room):
        self.prefill.until(room, "send", WAITING)
        self.prefill.cmd("room.send", room=str(room), seq=0, last=True,
                         views={"kv": dict(pages=SRC, tokens=[0, TOKENS])})
        self.decode.until(room, "recv", SUCCESS)
        self.prefill.until(room, "send", SUCCESS)
        self.dst.check(DST, TOKENS)
        assert self.loot.mem[:] == bytes(BYTES), "the thief has bytes"

    def refused(self, room, role="recv"):
        error = self.thief.until(room, role, FAILED)[1]
        assert error["code"] == "EAUTH" and "room %d" % room in error["message"], error


def open_room_is_not_read_by_other_user():
    for transport in ("shm", "tcp"):
        with Three(transport) as t:
            ticket = os.urandom(16).hex()
            t.give(42, ticket)
            t.ask(t.thief, t.loot, 42)
            t.refused(42)
            t.thief.cmd("room.close", room="42")
            t.ask(t.thief, t.loot, 42, ticket=os.urandom(16).hex())
            t.refused(42)
            assert t.prefill.state(42, "send")[0] == BOOTSTRAPPING
            shown = str(t.prefill.cmd("room.show", room="42"))
            assert "'ticket': True" in shown and ticket not in shown
            t.ask(t.decode, t.dst, 42, ticket=ticket)
            t.handed_over(42)


def offer_is_not_pulled_by_other_user():
    with Three("shm") as t:
        ticket = os.urandom(16).hex()
        t.prefill.cmd("room.open", room="42", role="offer", pool=t.src.pool, ticket=ticket,
                      views={"kv": dict(pages=SRC, tokens=[0, TOKENS])})
        t.ask(t.thief, t.loot, 42, "pull")
        t.refused(42, "pull")
        t.ask(t.decode, t.dst, 42, "pull", ticket=ticket)
        t.decode.until(42, "pull", SUCCESS)
        t.dst.check(DST, TOKENS)
        assert t.loot.mem[:] == bytes(BYTES), "the thief has bytes"


def numbers_requested_in_advance_stay_with_their_owner():
    with Three("shm") as t:
        for room in range(1, SQUATTED + 1):
            t.ask(t.thief, t.loot, room)
        t.thief.until(SQUATTED, "recv", WAITING)
        ticket = os.urandom(16).hex()
        t.ask(t.decode, t.dst, 1234, ticket=ticket)  # before the room is, as they
        t.decode.until(1234, "recv", WAITING)
        t.give(1234, ticket)
        t.handed_over(1234)
        t.refused(1234)
        t.decode.cmd("room.close", room="1234")
        t.dst.mem[:] = bytes(BYTES)
        t.give(77, ticket)
        t.refused(77)
        t.ask(t.decode, t.dst, 77, ticket=ticket)  # and after
        t.handed_over(77)


if __name__ == "__main__":
    run([open_room_is_not_read_by_other_user, offer_is_not_pulled_by_other_user,
         numbers_requested_in_advance_stay_with_their_owner])
