#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Memory of hugetlbfs: its owner can give a page back that a daemon has mapped, and take
it by another mapping, so that the next touch is SIGBUS. The transfer fails; the daemon
lives. Needs huge pages: root reserves some for the time of the test."""
import ctypes
import mmap
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import Daemon, Skip, run  # noqa: E402
from kvd_engine import (BYTES, FAILED, Pair, SUCCESS, open_pull,  # noqa: E402
                        open_push)

POOL = "/proc/sys/vm/nr_hugepages"
SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77
KEEP_SIZE_PUNCH_HOLE = 1 | 2
MAP_HUGETLB = 0x40000


class HugePages:
    """Some more than there are, of the size that a cache has."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        with open("/proc/meminfo") as f:
            about = dict(line.split(":") for line in f)
        with open(POOL) as f:
            self.before = f.read()
        if int(about["Hugepagesize"].split()[0]) << 10 != BYTES:
            raise Skip("needs huge pages of 2 MiB")
        try:
            with open(POOL, "w") as f:
                f.write("%d" % (int(self.before) + self.count))
        except OSError as why:
            raise Skip("needs root, to reserve huge pages (%s)" % why) from why
        if free_pages() < self.count:
            self.__exit__()
            raise Skip("needs %d huge pages, the kernel has none" % self.count)
        return self

    def __exit__(self, *exc):
        with open(POOL, "w") as f:
            f.write(self.before)


def free_pages():
    with open("/proc/meminfo") as f:
        about = dict(line.split(":") for line in f)
    return int(about["HugePages_Free"]) - int(about["HugePages_Rsvd"])


def take_all():
    """Mappings of every free page."""
    taken = []
    while free_pages() > 0:
        taken.append(mmap.mmap(-1, BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS |
                               MAP_HUGETLB))
        taken[-1][0] = 1
    return taken


def take_back(cache):
    """The cache's page, out of its file and away."""
    libc = ctypes.CDLL(None, use_errno=True)
    r = libc.fallocate(cache.fd, KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0),
                       ctypes.c_long(BYTES))
    assert r == 0, os.strerror(ctypes.get_errno())
    return take_all()


def over(transport, kinds, opened, tokens=TOKENS):
    src, dst = SRC[:(tokens + 15) // 16], DST[:(tokens + 15) // 16]
    with HugePages(4), Pair([Daemon("[transport]\ntransports = %s\n" % transport)
                             for _ in range(2)], kinds=kinds) as p:
        p.src.fill(src, tokens)
        roles = ("send", "recv") if opened is open_push else ("offer", "pull")
        args = (p.prefill, p.decode, p.src, p.dst)
        opened(*args, 1, src, dst, tokens)
        p.decode.until(1, roles[1], SUCCESS)
        p.dst.check(dst, tokens)
        # another's cache is no matter of it
        lost = p.src if kinds[0] == "huge" else p.dst
        taken = take_back(lost)
        opened(*args, 2, src, dst, tokens)
        p.decode.until(2, roles[1], FAILED)
        for engine in (p.prefill, p.decode):
            engine.cmd("ping")
        for m in taken:
            m.close()
        p.prefill.close()
        p.decode.close()


def source_reclaimed_fails_a_push_over_tcp():
    over("tcp", ("huge", "memfd"), open_push)


def source_reclaimed_fails_a_small_push_over_tcp():
    over("tcp", ("huge", "memfd"), open_push, tokens=1)


def source_reclaimed_fails_a_small_push_over_ucx():
    over("ucx", ("huge", "memfd"), open_push, tokens=1)


def destination_reclaimed_fails_a_small_push_over_tcp():
    over("tcp", ("memfd", "huge"), open_push, tokens=1)


def source_reclaimed_fails_a_push_over_shm():
    over("shm", ("huge", "memfd"), open_push)


def source_reclaimed_fails_a_push_over_ucx():
    over("ucx", ("huge", "memfd"), open_push)


def source_reclaimed_fails_a_pull_over_tcp():
    over("tcp", ("huge", "memfd"), open_pull)


def destination_reclaimed_fails_a_push_over_tcp():
    over("tcp", ("memfd", "huge"), open_push)


def destination_reclaimed_fails_a_push_over_shm():
    over("shm", ("memfd", "huge"), open_push)


def status_word_in_huge_pages_is_refused():
    with HugePages(4), Pair([Daemon("") for _ in range(2)],
                            kinds=("huge", "memfd")) as p:
        p.prefill.cmd("room.open", room="1", role="send", pool=p.src.pool)
        message = p.prefill.refused(
            "EINVAL", "room.send", room="1", seq=0, last=True,
            views={"kv": dict(pages=SRC, tokens=[0, TOKENS])},
            wait=dict(kind="seq", region=p.src.region, offset=0, value="1"))
        assert "MFD_HUGETLB" in message and "ordinary" in message, message


if __name__ == "__main__":
    run([source_reclaimed_fails_a_push_over_tcp,
         source_reclaimed_fails_a_small_push_over_tcp,
         source_reclaimed_fails_a_small_push_over_ucx,
         destination_reclaimed_fails_a_small_push_over_tcp,
         source_reclaimed_fails_a_push_over_shm,
         source_reclaimed_fails_a_push_over_ucx,
         source_reclaimed_fails_a_pull_over_tcp,
         destination_reclaimed_fails_a_push_over_tcp,
         destination_reclaimed_fails_a_push_over_shm,
         status_word_in_huge_pages_is_refused])
