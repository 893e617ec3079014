# SPDX-License-Identifier: Apache-2.0
"""What is measured, and the goals it is held against. Tables only.

A goal is a list of (who, at least what ratio); one of them is enough. `who` is
the name of a limit or peer (bench_parts.py).
"""
MIB = 1 << 20

# name: (words, bytes a row, bytes a transfer, scattered)
ROWS = {
    "64k": ("64 KiB pages, scattered", 65536, 128 * MIB, True),
    "4k": ("4 KiB pages, scattered", 4096, 64 * MIB, True),
    "256": ("256 B rows, scattered", 256, 10 * MIB, True),
    "flat": ("64 KiB pages, contiguous", 65536, 128 * MIB, False),
    # only when named
    "one": ("one 64 KiB page", 65536, 65536, True),
    "room": ("64 KiB pages, 4 MiB, scattered", 65536, 4 * MIB, True),
    "256l": ("256 B rows, 64 MiB, scattered", 256, 64 * MIB, True),
    "512": ("512 B rows, scattered", 512, 10 * MIB, True),
    "64": ("64 B rows, scattered", 64, 4 * MIB, True),
}
ROWS_USUAL = ("64k", "4k", "256", "flat")

# name: (words, transport of the daemons, memory of the engines)
KINDS = {
    "memfd": ("same host", "shm", "memfd"),
    "adopt": ("same host, adopted", "shm", "adopt"),
    "vm": ("same host, vm", "shm", "vm"),
    "tcp": ("tcp", "tcp", "memfd"),
    # only when named
    "ucx": ("ucx over tcp", "ucx", "memfd"),
    "aes128gcm": ("tcp, AES-128-GCM", "tcp", "memfd"),
}
KINDS_USUAL = ("memfd", "adopt", "vm", "tcp")
CRYPTO = ("aes128gcm",)  # options `tcp_crypto` of these kinds
# what a work takes, in about tens of seconds
WEIGHTS = {"host": 1, "net": 1.5, "latency": 2.5, "rate": 0.5, "pages": 0.3, "poll": 0.5, "open": 1,
           "idle": 0.6}
GROUPS = {"host": ("memfd", "adopt", "vm"), "net": ("tcp", "ucx", "aes128gcm")}
OPS = ("write", "read")
CONTROL = ("latency", "rate", "pages", "poll", "open", "idle")

# cold: rows anywhere in 256 MiB on both sides, caches swept before each transfer: for
#       the limits, since a request's pages are in no cache
# warm: rows side by side, shuffled at the destination only, caches as they are: for the
#       peers, since their own benches measure that
CACHES = ("cold", "warm")

MEMCPY = {"64k": [[("memcpy", 0.9)]], "4k": [[("memcpy", 0.9)]], "256": [[("memcpy", 0.7)]],
          "flat": [[("memcpy", 0.9), ("NIXL", 1.2)]]}
PROC_MEM = {rows: [[("proc_mem", 0.9)]] for rows in ROWS_USUAL}
NIXL = {"64k": [[("NIXL", 3)]], "4k": [[("NIXL", 10)]], "256": [[("NIXL", 80)]],
        "flat": [[("NIXL", 1.2), ("memcpy", 0.9)]]}
GOALS = {
    "cold": {
        "memfd": MEMCPY,
        "adopt": MEMCPY,
        "vm": PROC_MEM,
        "tcp": {"64k": [[("tcp_floor", 0.9)], [("iperf3", 0.9)]],
                "4k": [[("tcp_floor", 0.9)], [("iperf3", 0.7)]],
                "256": [[("tcp_floor", 0.9)], [("iperf3", 0.7)]],
                "flat": [[("tcp_floor", 0.9)], [("iperf3", 0.9)]]},
        "ucx": {},
        **{kind: {rows: [[("tcp_floor", 0.85)]] for rows in ("64k", "4k", "256l", "flat")}
           for kind in CRYPTO},
    },
    "warm": {
        "memfd": NIXL,
        "adopt": NIXL,
        "vm": {"256": [[("NIXL", 3)]]},
        "tcp": {"64k": [[("NIXL", 2.2)], [("Mooncake", 1.6)]],
                "4k": [[("NIXL", 8)], [("Mooncake", 15)]],
                "256": [[("NIXL", 40)]]},
        "ucx": {},
        "aes128gcm": {},
    },
}


def row_args(rows, caches):
    """As bench_xfer, tcp_floor and nixl_peer.py want them: SIZE TOTAL PLACES."""
    _, size, total, scattered = ROWS[rows]
    places = "flat" if not scattered else "scattered" if caches == "cold" else "dense"
    return [str(size), str(total), places]


# Figures that are not GB/s: (what, unit, at most)
ROOM_LATENCY_RATIO = 1.5   # of ZeroMQ one way + 64 KiB TCP one way + two socket hops
ROOM_BESIDE_P99_US = 2000
RATE_US = 50               # 20 000 rooms a second
STATUS_PAGE_NS = 20
JSON_POLL_US = 3
OPEN_ROOM_BYTES = 2048
IDLE_CPU_PERCENT = 0.05
IDLE_WAKE_UPS = 12         # a second, all threads


class Chosen:
    """What the words of BENCH= choose; no word of a sort chooses all of that sort."""

    def __init__(self, words):
        known = set(ROWS) | set(KINDS) | set(GROUPS) | set(OPS) | set(CONTROL) | set(
            CACHES) | {"control"}
        for word in words:
            if word not in known:
                raise SystemExit("bench: %s: not one of %s" % (word, " ".join(sorted(known))))
        kinds = [k for k in KINDS if k in words]
        for name, members in GROUPS.items():
            kinds += [k for k in members
                      if name in words and k not in kinds and k in KINDS_USUAL]
        rows = [r for r in ROWS if r in words]
        ops = [o for o in OPS if o in words]
        control = [c for c in CONTROL if c in words or "control" in words]
        only_control = control and not (kinds or rows or ops)
        # `latency tcp` is the latency over tcp, not that and all transfers over it
        self.control_kinds = kinds or list(KINDS_USUAL)
        if control:
            kinds, rows, ops = ([], [], []) if only_control or not rows else (kinds, rows, ops)
            self.kinds = kinds
        else:
            self.kinds = kinds or list(KINDS_USUAL)
        self.rows = rows or list(ROWS_USUAL)
        self.ops = ops or list(OPS)
        self.caches = [c for c in CACHES if c in words] or list(CACHES)
        self.control = control if words else list(CONTROL)
