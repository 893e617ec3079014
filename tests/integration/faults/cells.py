# SPDX-License-Identifier: Apache-2.0
"""The matrix: victims x faults x phases, what has no meaning and why, and what each
side must come to see.

A side's fate:
  gone     its engine is the victim
  fails    `aborting` within the bound, then `failed`, with words that match
  held     its own daemon is frozen: `aborting`, and no more until it thaws or dies
  lives    nothing happens to it; the room goes on to success afterwards
  sticky   it had ended, and stays as it was
  ends     success or failure, but in time and said truly (bytes were moving)
  succeeds it goes on to success by itself
"""
from collections import namedtuple

from scene import PHASES, ROWS_PHASES

Cell = namedtuple("Cell", "transport way phase victim fault")
Fate = namedtuple("Fate", "kind words")

ENGINES = {"source-engine": "s", "target-engine": "d"}
# phase "half" only: the target that has succeeded, the other one is the target then
DONE_ENGINE = "done-engine"
DAEMONS = {"source-daemon": 0, "target-daemon": 1}
ENGINE_FAULTS = ("kill", "stop", "leave", "fds", "memory")
DAEMON_FAULTS = ("kill", "stop", "stop-kill", "pause", "term", "fds", "memory", "disk")
LINK_FAULTS = ("cut", "cut-to", "cut-from", "blink", "reset")
LIMITS = ("fds", "memory", "disk")
ATTEND = "attend"  # the way of query rows: s is at the holder, d asks
ROWS_FAULTS = [("source-daemon", f) for f in ("kill", "stop", "term")] + \
    [("target-engine", "kill"), ("target-daemon", "kill")] + \
    [("link", f) for f in LINK_FAULTS]
# phases in which source and target do not know of each other
ALONE = {"receiver-alone", "sender-alone", "offer-alone", "pull-alone"}


def victims():
    for victim in ENGINES:
        yield from ((victim, fault) for fault in ENGINE_FAULTS)
    yield from ((DONE_ENGINE, fault) for fault in ENGINE_FAULTS)
    for victim in DAEMONS:
        yield from ((victim, fault) for fault in DAEMON_FAULTS)
    yield from (("link", fault) for fault in LINK_FAULTS)


def table(transports):
    for transport in transports:
        for way, phases in PHASES.items():
            for phase in phases:
                for victim, fault in victims():
                    yield Cell(transport, way, phase, victim, fault)
        for phase in ROWS_PHASES if transport in ("shm", "tcp") else ():
            for victim, fault in ROWS_FAULTS:
                yield Cell(transport, ATTEND, phase, victim, fault)


def name(cell):
    return " ".join(cell)


def opened(cell):
    """Which of s, d, t are open when the fault comes."""
    if cell.way == ATTEND:
        return ["d"]
    if cell.phase in ("sender-alone", "offer-alone"):
        return ["s"]
    if cell.phase in ("receiver-alone", "pull-alone"):
        return ["d"]
    return ["s", "d", "t"] if cell.phase == "half" else ["s", "d"]


def excluded(cell, no_mount, no_partition):
    """Why a cell has no meaning, or cannot be had here; "" if it can."""
    if cell.victim == DONE_ENGINE and cell.phase != "half":
        return "one of two targets is done in phase half only"
    if cell.victim == "link" and no_partition:
        return no_partition
    if cell.fault == "disk" and no_mount:
        return no_mount  # a small tmpfs is the full disk
    if cell.victim == "source-engine" and opened(cell) == ["d"] and cell.fault == "stop":
        return "it has no room yet: nothing is asked of it"
    if cell.victim == "target-engine" and opened(cell) == ["s"] and cell.fault == "stop":
        return "it has no room yet: nothing is asked of it"
    return ""


# ---- what must become of a side -------------------------------------------

LIVES, STICKY, ENDS, GONE = (Fate(k, "") for k in ("lives", "sticky", "ends", "gone"))


def linked(cell, side):
    """Does its daemon depend on the other one? A target names its source; a source
    knows its targets once they have bound, or read."""
    return side != "s" or cell.phase not in ("sender-alone", "offer-alone", "unbound")


def victim_side(cell):
    """The side whose engine is the victim, or None."""
    if cell.phase == "half" and cell.victim == "target-engine":
        return "t"
    return dict(ENGINES, **{DONE_ENGINE: "d"}).get(cell.victim)


def fate_of_engine(cell, side):
    victim = victim_side(cell)
    if cell.fault == "stop" or cell.victim == DONE_ENGINE:
        return LIVES
    if cell.fault in LIMITS:
        return Fate("limited", r"(ENOMEM|ELIMIT): ")
    if victim == "s":
        # who was not told of the room sees the pool go
        told = cell.phase not in ALONE and cell.phase != "unbound"
        return Fate("fails", r"ESESSION: .*victim-s" if told else
                    r"ESESSION: .*(victim-s|{peer}.*withdrew pool 'v': its engine)")
    return Fate("fails", r"ESESSION: .*victim-" + victim) if linked(cell, side) else LIVES


def fate_of_daemon(cell, side):
    own = (side == "s") == (cell.victim == "source-daemon")
    if cell.fault == "pause":
        return LIVES
    if cell.fault in LIMITS:
        return Fate("limited", r"(ENOMEM|ELIMIT|EIO|ETRANSPORT|EPEER|EIMPORT): ")
    if not own and not linked(cell, side):
        return LIVES
    if cell.fault == "kill":
        return Fate("fails", r"EDEAD" if own else r"(EPEER|ETRANSPORT|ERESTART): .*{peer}")
    if cell.fault == "term":
        if own:
            return Fate("fails", r"EDEAD|EDRAIN")
        told = cell.phase not in ALONE and cell.phase != "unbound"
        return Fate("fails", r"(EDRAIN|EPEER): .*{peer}" if told else
                    r"(EDRAIN|EPEER|ESESSION): .*{peer}.*(stop|drain)")
    if own:
        words = r"(EPEER|ETRANSPORT|ERESTART): .*{peer}"
        if cell.fault == "stop-kill":
            words = r"EDEAD"
        elif not linked(cell, side):
            words = ""  # nobody misses it: it goes on when it thaws
        return Fate("held", words)
    return Fate("fails", r"EPEER: .*{peer}.*missed")


def fate_of_link(cell, side):
    if cell.fault == "blink" or not linked(cell, side):
        return LIVES
    if cell.fault == "reset" and cell.transport == "shm":
        return LIVES  # the control line connects again, the data line is no TCP
    # one way: who hears nothing tells the other one, in its own words
    return Fate("fails", r"(EPEER|ETRANSPORT|ERESTART): .*({peer}|{own}.*missed)")


def fate_of_rows(cell):
    """All that the holder does for them is done while they are merged."""
    if cell.victim == "target-daemon":
        return Fate("fails", r"EDEAD")
    if cell.phase == "merging" or cell.fault == "blink":
        return Fate("succeeds", "")
    words = r"(EPEER|ETRANSPORT|ERESTART|EDRAIN): "
    # what was told may be there before the fault is seen; a line that was reset comes again
    told = cell.phase == "answered" or cell.fault in ("cut-from", "reset")
    return Fate("ends" if told else "fails", words)


def fate(cell, side):
    if side == victim_side(cell) and cell.fault in ("kill", "leave"):
        return GONE
    if cell.way == ATTEND:
        return fate_of_rows(cell)
    if cell.phase == "ended" or (cell.phase == "half" and side == "d"):
        return STICKY
    if cell.victim == DONE_ENGINE or cell.victim in ENGINES:
        found = fate_of_engine(cell, side)
    elif cell.victim in DAEMONS:
        found = fate_of_daemon(cell, side)
    else:
        found = fate_of_link(cell, side)
    if cell.phase == "moving" and found.kind in ("fails", "held"):
        return Fate("ends", found.words)
    return found


def subset(cell):
    """What `make test` plays: each victim and fault once on each transport, the
    phases and ways dealt out so that each comes with many of them."""
    if cell.way == ATTEND:  # each fault once, but for two cuts; the phases in turn
        at = ROWS_FAULTS.index((cell.victim, cell.fault))
        return cell.fault not in ("cut", "cut-to") and ROWS_PHASES[at % 4] == cell.phase and \
            ("tcp", "shm")[at // 2 % 2] == cell.transport
    every = list(victims())
    phases = [("push", p) for p in PHASES["push"]] + [("pull", p) for p in PHASES["pull"]]
    turn = sum(map(ord, cell.transport))
    index = every.index((cell.victim, cell.fault))
    if cell.victim == DONE_ENGINE:
        return cell.phase == "half" and cell.fault == "kill" and cell.way == "push"
    return phases[(index * 4 + turn) % len(phases)] == (cell.way, cell.phase)


def spared(cell):
    """Witness rooms (source, target) that the fault must not touch."""
    rooms = [(0, 1), (2, 1), (2, 0)]
    if cell.victim in DAEMONS and cell.fault in ("kill", "stop", "stop-kill", "term"):
        hurt = DAEMONS[cell.victim]
        return [r for r in rooms if hurt not in r]
    if cell.victim == "link" and cell.fault != "blink":
        return [r for r in rooms if set(r) != {0, 1}]
    return rooms
