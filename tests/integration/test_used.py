#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What a room's record says that the room did: the path, how many of its bytes passed a
buffer of the daemon, how many rows and descriptors; in each direction, for each transport
and kind of memory that needs no adapter. (verbs: test_verbs_stage, test_verbs_pack.)"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import Daemon, run  # noqa: E402
from kvd_engine import BYTES, Cache, Engine, SUCCESS, open_pull, open_push  # noqa: E402
import fake_gpu  # noqa: E402

STAGED = 2  # KVD_FLAG_STAGED
# pages apart: rows of a page; more of them; eight that follow each other: rows of 32 KiB
APART = [5, 60, 7, 33, 1], [9, 3, 30, 2, 50], 77
SPARSE = [5, 60, 7, 33, 1, 12], [9, 4, 30, 2, 50, 20], 96
CLOSE = list(range(8, 16)), list(range(40, 48)), 128
FEW = [5], [9], 16
PUSH, PULL = ("send", "recv"), ("offer", "pull")


class Pair:
    """Two daemons, an engine with a cache at each."""

    def __init__(self, transport, kinds, more=""):
        gpu = fake_gpu.CONFIG if any(k.startswith("cuda") for k in kinds) else ""
        config = "[transport]\ntransports = %s\n%s\n%s" % (transport, more, gpu)
        self.daemons, self.kinds = [Daemon(config) for _ in range(2)], kinds

    def __enter__(self):
        for d in self.daemons:
            d.__enter__()
        self.engines = [Engine(d, n) for d, n in zip(self.daemons, ("prefill", "decode"))]
        self.caches = [Cache(e, kind) for e, kind in zip(self.engines, self.kinds)]
        return self

    def __exit__(self, *exc):
        for engine in self.engines:
            engine.close()
        for d in self.daemons:
            d.__exit__(*exc)

    def hand_over(self, room, begin, roles, pages):
        """The records of both sides, once every byte is where it belongs."""
        self.caches[1].mem[:BYTES] = bytes(BYTES)
        self.caches[0].fill(pages[0], pages[2])
        begin(*self.engines, *self.caches, room, *pages)
        for engine, role in reversed(list(zip(self.engines, roles))):
            engine.until(room, role, SUCCESS)
        self.caches[1].check(pages[1], pages[2])
        return [e.cmd("room.show", room=str(room), role=role)
                for e, role in zip(self.engines, roles)]


def said(room, role):
    """(path, share of bytes that passed a buffer, rows, descriptors), once that agrees
    with all the rest of the record."""
    party = room["peers"][0]
    member = "sent" if role in ("send", "offer") else "received"
    other = "received" if member == "sent" else "sent"
    used = room[member]
    assert party[member] == used and other not in room and other not in party, room
    assert used["bytes"] == room["bytes"] == party["bytes"] > 0, room
    assert used["staged_share"] == used["staged_bytes"] / used["bytes"], room
    assert room["staged"] == party["staged"] == (used["staged_bytes"] > 0), room
    assert bool(room["flags"] & STAGED) == room["staged"], room
    return party["path"], used["staged_share"], used["rows"], used["descriptors"]


def used(transport, kinds, pages, source, destination, offer=None, more=""):
    """Each of the sides' wants: (beginning of the path, share, rows, descriptors)."""
    with Pair(transport, kinds, more) as pair:
        for room, begin, roles in ((1, open_push, PUSH), (2, open_pull, PULL)):
            wants = (source if roles == PUSH else offer or source), destination
            shown = pair.hand_over(room, begin, roles, pages)
            for record, role, want in zip(shown, roles, wants):
                got = said(record, role)
                assert got[0].startswith(want[0]) and got[1:] == want[1:], (role, got, want)
                assert record["peers"][0]["transport"] == transport, record


# ---- shm: the destination's daemon does all; an offerer only says that it was valid ----

READ = "read by the peer", 0, 0, 0


def shm_memfd_is_copied_once():
    used("shm", ("memfd", "memfd"), APART, ("memfd", 0, 40, 0), ("memfd", 0, 40, 40), READ)


def shm_posix_shm_is_copied_once():
    used("shm", ("shm", "shm"), APART, ("shared file", 0, 40, 0),
         ("shared file", 0, 40, 40), READ)


def shm_vm_at_one_end_is_copied_once():
    used("shm", ("vm", "memfd"), APART, ("vm", 0, 40, 0), ("vm", 0, 40, 40), READ)
    used("shm", ("memfd", "vm"), APART, ("memfd", 0, 40, 0), ("memfd", 0, 40, 40), READ)


def shm_vm_at_both_ends_is_staged():
    used("shm", ("vm", "vm"), APART, ("vm", 0, 40, 0), ("vm", 1, 40, 40), READ)


def shm_vm_by_the_ring_is_staged_on_both_sides():
    ring = "bounce ring", 1, 40, 1
    used("shm", ("vm", "memfd"), APART, ring, ring, more="vm_direct = no")


def shm_device_by_the_ring_is_staged_on_both_sides():
    ring = "bounce ring", 1, 40, 1
    used("shm", ("cuda_ipc", "memfd"), APART, ring, ring)


# ---- local ----

def local_device_to_device_is_copied_once():
    used("local", ("cuda_ipc", "cuda_vmm"), APART, ("device", 0, 40, 0),
         ("device", 0, 40, 40), READ)


def local_memfd_to_device_is_staged_by_the_copier():
    used("local", ("memfd", "cuda_ipc"), APART, ("memfd", 0, 40, 0), ("memfd", 1, 40, 40),
         READ)


# ---- tcp: rows named to the kernel; two pages are neighbours at the destination ----

def tcp_rows_are_named():
    used("tcp", ("memfd", "memfd"), APART, ("tcp ", 0, 40, 40), ("tcp ", 0, 40, 32))
    used("tcp", ("memfd", "memfd"), CLOSE, ("tcp ", 0, 8, 8), ("tcp ", 0, 8, 8))


def tcp_small_transfer_is_copied_into_its_request():
    used("tcp", ("memfd", "memfd"), FEW, ("tcp ", 1, 8, 1), ("tcp ", 1, 8, 1))


def tcp_vm_is_packed_posix_shm_is_not():
    used("tcp", ("vm", "shm"), APART, ("tcp ", 1, 40, 1), ("tcp ", 0, 40, 32))
    used("tcp", ("shm", "vm"), APART, ("tcp ", 0, 40, 40), ("tcp ", 1, 40, 1))


def tcp_device_is_packed():
    used("tcp", ("cuda_ipc", "memfd"), APART, ("tcp ", 1, 40, 1), ("tcp ", 0, 40, 32))
    used("tcp", ("memfd", "cuda_vmm"), APART, ("tcp ", 0, 40, 40), ("tcp ", 1, 40, 1))


def chunks_of_both_kinds_add_up():
    """16 tokens travel inside their request, the rest are named rows."""
    def two_chunks(prefill, decode, src, dst, room, src_pages, dst_pages, tokens):
        open_push(prefill, decode, src, dst, room, src_pages, dst_pages, tokens, send=False)
        for seq, pages, begin, end in ((0, src_pages[:1], 0, 16),
                                       (1, src_pages[1:], 16, tokens)):
            prefill.cmd("room.send", room=str(room), seq=seq, last=seq == 1, views={
                "kv": dict(pages=pages, first_token=begin, tokens=[begin, end])})

    with Pair("tcp", ("memfd", "memfd")) as pair:
        shown = pair.hand_over(1, two_chunks, PUSH, APART)
        assert [said(r, role)[1:] for r, role in zip(shown, PUSH)] == \
            [(16 / 77, 40, 33), (16 / 77, 40, 25)], shown


# ---- ucx by tcp: a slice of rows of 16 KiB and more from where they lie, and into 32 ----

def ucx_long_rows_are_sent_in_place():
    used("ucx", ("memfd", "memfd"), CLOSE, ("", 0, 8, 1), ("", 0, 8, 1))


def ucx_short_rows_are_packed():
    used("ucx", ("memfd", "memfd"), SPARSE, ("", 1, 48, 1), ("", 1, 48, 1))


def ucx_few_short_rows_land_at_their_places():
    used("ucx", ("memfd", "memfd"), APART, ("", 1, 40, 1), ("", 0, 40, 1))


def ucx_inaccessible_memory_is_packed():
    used("ucx", ("vm", "shm"), CLOSE, ("", 1, 8, 1), ("", 1, 8, 1))
    used("ucx", ("cuda_ipc", "cuda_vmm"), CLOSE, ("", 1, 8, 1), ("", 1, 8, 1))


# ---- trace ----

LIFE = ["chunk given", "chunk being planned", "chunk queued", "chunk posted",
        "first bytes of a chunk moved", "chunk moved", "chunk finished"]
LIFE_THERE = ["chunk announced", "chunk being planned", "chunk admitted",
              "first bytes of a chunk moved", "chunk moved", "chunk finished"]


def trace_follows_a_chunk():
    with Pair("tcp", ("memfd", "memfd")) as pair:
        for d, e in zip(pair.daemons, pair.engines):
            e.cmd("log.level", level="trace")
        pair.hand_over(7, open_push, PUSH, APART)
        logs = [d.log().splitlines() for d in pair.daemons]
    for log, role, life in zip(logs, PUSH, (LIFE, LIFE_THERE)):
        lines = [line for line in log if "room 7: " in line and " seq=" in line]
        assert [line.split("room 7: ")[1].split(" role=")[0] for line in lines] == life, log
        assert all("role=%s seq=0 " % role in line for line in lines), lines
        assert "bytes=157696 rows=40 " in lines[-1], lines


if __name__ == "__main__":
    cases = [
        shm_memfd_is_copied_once, shm_posix_shm_is_copied_once,
        shm_vm_at_one_end_is_copied_once, shm_vm_at_both_ends_is_staged,
        shm_vm_by_the_ring_is_staged_on_both_sides,
        shm_device_by_the_ring_is_staged_on_both_sides,
        local_device_to_device_is_copied_once,
        local_memfd_to_device_is_staged_by_the_copier, tcp_rows_are_named,
        tcp_small_transfer_is_copied_into_its_request, tcp_vm_is_packed_posix_shm_is_not,
        tcp_device_is_packed, chunks_of_both_kinds_add_up,
        ucx_long_rows_are_sent_in_place, ucx_short_rows_are_packed,
        ucx_few_short_rows_land_at_their_places,
        ucx_inaccessible_memory_is_packed, trace_follows_a_chunk]
    run([c for c in cases if not sys.argv[1:] or c.__name__ in sys.argv[1:]])
