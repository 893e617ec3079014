#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/internals/fences.md, on real daemons: the other daemon is frozen
with a request of ours unanswered, its silence is no death yet (dead_after is
long), and the engine here gives up. How long until its room is still, and who
pays? And what the frozen one does when it runs on changes no byte here."""
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lib"))
from kvd_daemon import DEADLINE_S, Daemon, Skip, kvd, run  # noqa: E402
import kvd_engine  # noqa: E402
from kvd_engine import (BYTES, FAILED, SUCCESS, WAITING,  # noqa: E402
                        open_pull, open_push)

FENCE_S = 3  # what is still at once is so long before it, on a slow machine, too
CONFIG = """[peer]
ping = 200 ms
dead_after = 60 s
[rooms]
fence_timeout = %d s
transfer_stall_timeout = 120 s
[transport]
transports = %%s
""" % FENCE_S
PAGES, TOKENS = [3, 4, 9, 1], 64


class Pair(kvd_engine.Pair):
    def __init__(self, transport):
        if transport not in kvd("--version")[1]:
            raise Skip("needs the transport " + transport)
        super().__init__([Daemon(CONFIG % transport), Daemon(CONFIG % transport)])

    def __enter__(self):
        super().__enter__()
        for d in self.daemons:
            d.expect("lost")
            d.expect("not reached")
        self.src.fill(PAGES, TOKENS)
        return self

    def __exit__(self, *exc):
        for d in self.daemons:
            d.thaw()
        super().__exit__(*exc)


def give_up(pair, engine, frozen, room, role, bystander):
    """Abort `room` while the other daemon is frozen: seconds until it is still,
    and whether the bystander's room outlived it."""
    begin = time.monotonic()
    engine.cmd("room.abort", room=str(room), role=role, reason="the test gives up")
    engine.until(room, role, FAILED)
    took = time.monotonic() - begin
    error = engine.state(room, role)[1]
    assert error["code"] == "EABORTED", error
    state, why, _ = engine.state(*bystander)
    frozen.thaw()
    return took, state, why


def begun(engine, room, role):
    """Wait until a transfer of the room is under way, and by then posted."""
    time_limit = time.monotonic() + DEADLINE_S
    while engine.cmd("room.show", room=str(room), role=role)["in_flight"] == 0:
        assert time.monotonic() < time_limit
    for _ in range(50):
        engine.cmd("room.show", room=str(room), role=role)


def until_posted(unanswered):
    """Again where a slow machine let us give up before the request was posted:
    then the room is still at once, and nobody pays."""
    for _ in range(5):
        took, state, why, _ = unanswered("ucx")
        if took >= FENCE_S * 0.5 or state != WAITING:
            break
    return took, state, why


def push_unanswered(transport):
    """The receiver's daemon is frozen before the chunk reaches it."""
    with Pair(transport) as p:
        for room in (1, 2):
            open_push(p.prefill, p.decode, p.src, p.dst, room, PAGES, [7, 2, 8, 12],
                      TOKENS, send=False)
        p.b.freeze()
        p.prefill.cmd("room.send", room="1", seq=0, last=True,
                      views={"kv": dict(pages=PAGES, tokens=[0, TOKENS])})
        begun(p.prefill, 1, "send")
        before = bytes(p.src.mem[:])
        found = give_up(p, p.prefill, p.b, 1, "send", (2, "send"))
        p.decode.until(1, "recv", FAILED)
        assert bytes(p.src.mem[:]) == before
        return found + (next_room_works(p),)


def pull_unanswered(transport):
    """The offerer's daemon is frozen before it serves, or confirms, the read."""
    with Pair(transport) as p:
        open_push(p.prefill, p.decode, p.src, p.dst, 2, PAGES, [20, 21, 22, 23], TOKENS,
                  send=False)
        # known, mapped and warm, so that the read alone is what hangs
        open_pull(p.prefill, p.decode, p.src, p.dst, 3, PAGES, [30, 31, 32, 33], TOKENS)
        p.decode.until(3, "pull", SUCCESS)
        p.prefill.cmd("room.open", room="1", role="offer", pool=p.src.pool,
                      views={"kv": dict(pages=PAGES, tokens=[0, TOKENS])})
        # its pages must not be written before the word is passed: the read waits
        p.decode.cmd("room.open", room="1", role="pull", pool=p.dst.pool,
                     sources=[p.prefill.endpoint],
                     views={"kv": dict(pages=[7, 2, 8, 12], tokens=[0, TOKENS])},
                     wait=dict(kind="seq", region=p.dst.region, offset=BYTES - 8,
                               value="1"))
        time_limit = time.monotonic() + DEADLINE_S
        while p.decode.cmd("room.show", room="1", role="pull")["peers"][0]["generation"] == "0":
            assert time.monotonic() < time_limit
        p.a.freeze()
        p.dst.mem[BYTES - 8:] = (1).to_bytes(8, "little")
        begun(p.decode, 1, "pull")
        found = give_up(p, p.decode, p.a, 1, "pull", (2, "recv"))
        still = bytes(p.dst.mem[:])
        works = next_room_works(p, check=False)
        # the frozen daemon ran on: not a byte of the ended room's pages moved
        now = bytearray(p.dst.mem[:])
        for page in (7, 2, 8, 12):
            for field in range(8):
                at = field * (BYTES // 8) + page * 16 * 256
                assert now[at:at + 16 * 256] == still[at:at + 16 * 256], page
        return found + (works,)


def next_room_works(p, check=True):
    pages = [40, 41, 42, 43]
    open_push(p.prefill, p.decode, p.src, p.dst, 9, PAGES, pages, TOKENS)
    p.decode.until(9, "recv", SUCCESS)
    p.prefill.until(9, "send", SUCCESS)
    return True


def told(name, took, state, why):
    print("     %s: still after %.0f ms, bystander %s" %
          (name, took * 1000, "cut" if state == FAILED else "lives"))
    return took, state, why


def shm_push_is_quiesced_at_once_without_losing_peers():
    took, state, why, _ = push_unanswered("shm")
    told("shm push", took, state, why)
    assert took < FENCE_S and state == WAITING, (took, state, why)


def shm_pull_is_quiesced_at_once_without_losing_peers():
    took, state, why, _ = pull_unanswered("shm")
    told("shm pull", took, state, why)
    assert took < FENCE_S and state == WAITING, (took, state, why)


def ucx_push_is_cut_at_the_fence():
    took, state, why = told("ucx push", *until_posted(push_unanswered))
    assert FENCE_S * 0.5 < took < FENCE_S + 2, (took, state, why)
    assert state == FAILED and "instance" in why["message"], why
    assert why["retryable"], why


def ucx_pull_is_cut_at_the_fence():
    took, state, why = told("ucx pull", *until_posted(pull_unanswered))
    assert FENCE_S * 0.5 < took < FENCE_S + 2, (took, state, why)
    assert state == FAILED and "instance" in why["message"], why


def tcp_push_is_quiesced_at_once_without_losing_peers():
    took, state, why, _ = push_unanswered("tcp")
    told("tcp push", took, state, why)
    assert took < FENCE_S and state == WAITING, (took, state, why)


def tcp_pull_is_quiesced_at_once_without_losing_peers():
    took, state, why, _ = pull_unanswered("tcp")
    told("tcp pull", took, state, why)
    assert took < FENCE_S and state == WAITING, (took, state, why)


def gone(engine, count):
    """Until only so many sessions are there: what others had is given back."""
    end = time.monotonic() + DEADLINE_S
    begin = time.monotonic()
    while len(engine.cmd("session.list")["sessions"]) > count:
        assert time.monotonic() < end
    return time.monotonic() - begin


def memory_goes(transport):
    """The other daemon knows three pools, is frozen and never answers, and is not taken
    for dead. How long until a pool and its region are unregistered, the memory of an
    engine that has died is let go of, and SIGTERM has ended the daemon."""
    took = {}
    with Pair(transport) as p:
        open_push(p.prefill, p.decode, p.src, p.dst, 1, PAGES, [7, 2, 8, 12], TOKENS)
        p.decode.until(1, "recv", SUCCESS)
        p.prefill.until(1, "send", SUCCESS)
        dies, stays = kvd_engine.Engine(p.a, "dies"), kvd_engine.Engine(p.a, "stays")
        kvd_engine.Cache(dies, name="dies")
        kvd_engine.Cache(stays, name="stays")
        next_room_works(p)  # it has read what came before
        for room in (1, 9):
            p.prefill.cmd("room.close", room=str(room), role="send")
        p.b.freeze()
        begin = time.monotonic()
        p.prefill.cmd("pool.unregister", pool=p.src.pool)
        p.prefill.cmd("region.unregister", region=p.src.region)
        took["unregistered"] = time.monotonic() - begin
        dies.close()
        took["dead engine"] = gone(p.prefill, 2)
        begin = time.monotonic()
        p.a.proc.terminate()
        assert p.a.wait() == 0, p.a.log()
        took["SIGTERM"] = time.monotonic() - begin
        p.b.thaw()
        stays.close()
    print("     %s: %s" % (transport, ", ".join("%s %.0f ms" % (what, 1e3 * s)
                                                for what, s in took.items())))
    return took


def memory_goes_at_once(transport):
    took = memory_goes(transport)
    assert all(seconds < FENCE_S for seconds in took.values()), took


def shm_memory_is_released_with_any_peer():
    memory_goes_at_once("shm")


def tcp_memory_is_released_with_any_peer():
    memory_goes_at_once("tcp")


def ucx_memory_is_released_when_the_peer_is_lost():
    took = memory_goes("ucx")
    assert all(seconds < 2 * FENCE_S + 2 for seconds in took.values()), took


run([shm_push_is_quiesced_at_once_without_losing_peers,
     shm_pull_is_quiesced_at_once_without_losing_peers, ucx_push_is_cut_at_the_fence,
     ucx_pull_is_cut_at_the_fence, tcp_push_is_quiesced_at_once_without_losing_peers,
     tcp_pull_is_quiesced_at_once_without_losing_peers, shm_memory_is_released_with_any_peer,
     tcp_memory_is_released_with_any_peer, ucx_memory_is_released_when_the_peer_is_lost])
