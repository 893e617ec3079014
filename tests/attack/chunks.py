# SPDX-License-Identifier: Apache-2.0
"""Chunks of several users in one daemon: no user sees, evicts, slows or times those of
another."""
import hashlib
import json
import statistics
import time

import rig
from rig import ENGINE, ROOT, Engine, Forked, Refused, attack
from kvd_engine import (FAILED, PAGES, PAGE_TOKENS, RING_ENTRY, RING_FIND, RING_IDS, SUCCESS, Cache,
                        Ring, ring_entry)

CONFIG = "[chunks]\nchunk_memory = 16 MiB\n"  # 512 chunks of PAGE_TOKENS tokens
WORDS = dict(model="attacked", scheme="by hand", tokens=PAGE_TOKENS)
ALICE_S = 20
GROWN_MIB = 64  # in addition to the queues of one connection


def chain(name, count=PAGES):
    return [hashlib.sha256(b"%s %d" % (name.encode(), n)).hexdigest() for n in range(count)]


class Rank:
    """An engine with a pool and a space."""

    def __init__(self, daemon, name):
        self.engine = Engine(daemon, name)
        end = time.monotonic() + ALICE_S
        while not self.engine.cmd("chunk.list")["ready"]:
            assert time.monotonic() < end, "the store is not ready"
            rig.rest(0.01)
        self.cache = Cache(self.engine)
        self.space = self.engine.cmd("space.open", pool=self.cache.pool, **WORDS)["space"]

    def cmd(self, verb, **args):
        return self.engine.cmd("chunk." + verb, **args)

    def views(self, count):
        return {"kv": dict(pages=list(range(count)), tokens=[0, count * PAGE_TOKENS])}

    def ended(self, move):
        end = time.monotonic() + ALICE_S
        while True:
            told = self.cmd("move", move=move["move"])
            if told["state"] in (SUCCESS, FAILED):
                self.cmd("close", move=move["move"])
                return told
            assert time.monotonic() < end, "a move does not end: %s" % told

    def put(self, ids):
        return self.ended(self.cmd("put", space=self.space, ids=ids, pool=self.cache.pool,
                                   views=self.views(len(ids))))

    def found(self, ids):
        return self.engine.find(self.space, ids)

    def fetch(self, ids):
        hold = self.engine.hold(self.space, ids, LEASE_MS)
        assert hold["chunks"] == len(ids), "%d of %d chunks" % (hold["chunks"], len(ids))
        told = self.ended(self.cmd("fetch", hold=hold["hold"], pool=self.cache.pool,
                                   views=self.views(len(ids))))
        self.engine.release(hold["hold"])
        assert told["state"] == SUCCESS, told


def alice_puts(house, secret=True):
    """-> a hold's secret, which is hers alone."""
    alice = Rank(house.a, "alice")
    alice.cache.fill(list(range(PAGES)), PAGES * PAGE_TOKENS)
    told = alice.put(chain("alice"))
    assert told["state"] == SUCCESS and told["left_out"] == 0, told
    if not secret:
        return ""
    return alice.engine.hold(alice.space, chain("alice"), LEASE_MS)["secret"].hex()


def alice_has(house):
    """Her chunks, and their bytes."""
    alice = Rank(house.a, "alice")
    alice.fetch(chain("alice"))
    alice.cache.check(list(range(PAGES)), PAGES * PAGE_TOKENS)
    return True


def as_alice(work, *args):
    said = Forked(work, *args, role="alice").result(3 * ALICE_S)
    assert said and "value" in said, "alice: %s" % (said or {}).get("error", "nothing")
    return said["value"]


@attack("chunks", "another user's chunks are not found, held, joined, dropped or listed", by=ROOT,
        config=CONFIG, quick=True)
def chunks_of_another(house):
    secret = as_alice(alice_puts, house)
    said = Forked(strange_user, house, secret, role=ENGINE).result(ALICE_S)
    assert said and "value" in said, "mallory: %s" % (said or {}).get("error", "nothing")
    return said["value"] or (None if as_alice(alice_has, house) else "alice's chunks are gone")


def strange_user(house, secret):
    mallory, ids = Rank(house.a, "mallory"), chain("alice")
    if mallory.found(ids) or mallory.engine.hold(mallory.space, ids, LEASE_MS)["chunks"]:
        return "chunks of another user are found"
    if mallory.cmd("drop", space=mallory.space, ids=ids)["chunks"]:
        return "chunks of another user are dropped"
    spaces = mallory.cmd("list")["spaces"]
    if any(one["chunks"] for one in spaces):
        return "another user's spaces are listed: %s" % spaces
    for what, call in (("join", lambda: mallory.engine.join(mallory.space, bytes.fromhex(secret),
                                                            LEASE_MS)),
                       ("list", lambda: mallory.cmd("list", all=True))):
        try:
            return "%s: %s" % (what, call())
        except Refused:
            pass
    told = mallory.cmd("snapshot")["chunks"] + mallory.cmd("events", since=0)["events"]
    if told:
        return "another user's chunks are told: %s" % told[0]
    # ids that are another's already: they are this user's, with this user's bytes
    put = mallory.put(ids)
    return "of a put %s were there" % put["there"] if put["there"] or put["left_out"] else None


@attack("chunks", "puts without end take the share of no other user", by=ROOT, config=CONFIG,
        quick=True)
def puts_without_end(house):
    as_alice(alice_puts, house, False)
    said = Forked(flood_of_puts, house, role=ENGINE).result(2 * ALICE_S)
    assert said and "value" in said, "mallory: %s" % (said or {}).get("error", "nothing")
    return None if as_alice(alice_has, house) else "alice's chunks are gone"


def flood_of_puts(house):
    """Five times the memory, and all that is left of it held for as long as may be."""
    mallory = Rank(house.a, "mallory")
    for n in range(40):
        ids = chain("flood %d" % n)
        told = mallory.put(ids)
        assert told["state"] == SUCCESS, told
        try:
            mallory.engine.hold(mallory.space, ids, 600000)
        except Refused as why:
            assert why.code == "ELIMIT", why
    alice_too = Rank(house.a, "mallory")
    return alice_too.put(chain("last"))["left_out"]


class Finds:
    """Lines that find these ids, each by an entry of the ring in one slot."""

    def __init__(self, rank):
        self.space, self.slot, self.gen = rank.space, rank.engine.slot(), 0

    def lines(self, ids, count):
        data, lines = b"".join(map(bytes.fromhex, ids)), []
        for _ in range(count):
            self.gen += 1
            entry = ring_entry(RING_FIND, slot=self.slot, a=self.space, n0=len(ids),
                               size=len(data), data=data, gen=self.gen)
            lines.append(json.dumps(dict(entry, id=1, cmd="xfer.submit")).encode() + b"\n")
        return lines


def answers(sock, lines, batch=500):
    """Sends them all, and counts the received lines: at the rate of the daemon."""
    count = 0
    for at in range(0, len(lines), batch):
        some = lines[at:at + batch]
        sock.sendall(b"".join(some))
        got = 0
        while got < len(some):
            got += sock.recv(1 << 20).count(b"\n")
        count += got
    return count


@attack("chunks", "finds as fast as they are answered keep nobody waiting", config=CONFIG,
        quick=True)
def finds_without_end(house):
    mallory, begin, count = Rank(house.a, "mallory"), time.monotonic(), 0
    finds = Finds(mallory)
    while count < 200000 and time.monotonic() - begin < 4:
        count += answers(mallory.engine.sock, finds.lines(chain("nobody", 1), 5000))
    while time.monotonic() - begin < 6:
        answers(mallory.engine.sock, finds.lines(chain("nobody", 1) * 4096, 4), 4)
    return None if count else "no find was answered"


@attack("chunks", "finding what another user has takes what finding nothing takes", by=ROOT,
        config=CONFIG)
def finds_by_the_clock(house):
    as_alice(alice_puts, house, False)
    said = Forked(times_of_finds, house, role=ENGINE).result(2 * ALICE_S)
    assert said and "value" in said, "mallory: %s" % (said or {}).get("error", "nothing")
    return said["value"]


def times_of_finds(house):
    """In turns, lines alike but for the digits of their ids. In a store of one user for all 64
    of them would be found, or none."""
    mallory = Rank(house.a, "mallory")
    finds, ways = Finds(mallory), [chain("alice"), chain("nobody")]
    ratios = []
    for _ in range(1000):
        took = []
        for way in ways:
            lines = finds.lines(way, 20)
            begin = time.perf_counter()
            answers(mallory.engine.sock, lines)
            took.append(time.perf_counter() - begin)
        ratios.append(took[0] / took[1])
        ways.reverse()
        ratios[-1] = ratios[-1] if len(ratios) % 2 else 1 / ratios[-1]
    middle = statistics.median(ratios)
    spread = statistics.median(abs(r - middle) for r in ratios) / len(ratios) ** 0.5
    return "%.4f of the time (error %.4f)" % (middle, spread) \
        if abs(middle - 1) > 5 * spread else None


@attack("chunks", "forged ids, numbers and views are refused, each by its name", config=CONFIG,
        quick=True)
def forged_chunks(house):
    mallory = Rank(house.a, "mallory")
    space, pool, good = mallory.space, mallory.cache.pool, chain("forged", 2)
    view = mallory.views(2)["kv"]

    def put(**changed):
        return "put", dict(dict(space=space, ids=good, pool=pool, views={"kv": view}), **changed)
    forged = [
        put(ids=["ab"]), put(ids=["x" * 64]), put(ids=[7]), put(ids=good * 2049),
        put(space=space + 1), put(space=-1), put(first=-1), put(first=1 << 40),
        ("move", dict(move=1 << 50)),
        ("fetch", dict(hold=1 << 50, pool=pool, views={"kv": view})),
        put(pool=1 << 50), put(views={}), put(views={"vk": view}),
        put(views={"kv": dict(view, pages=[0, PAGES])}),
        put(views={"kv": dict(view, pages=[0])}),
        put(views={"kv": dict(view, tokens=[0, 1 << 62])}),
        put(views={"kv": dict(view, tokens=[5, 3])}),
        put(views={"kv": dict(view, first_token=-4)}),
        put(wait=dict(kind="seq", region=1 << 50, offset=0, value=1)),
        ("space", dict(WORDS, pool=pool, tokens=0)), ("space", dict(WORDS, pool=pool, tokens=-16)),
        ("space", dict(WORDS, pool=pool, tokens=1 << 31)),
        ("space", dict(WORDS, pool=pool, views=["none"])),
        ("space", dict(WORDS, pool=pool, model="m" * 201)),
    ]
    taken = []
    for verb, args in forged:
        try:
            taken.append("chunk.%s %s: %s" % (verb, str(args)[:80], mallory.cmd(verb, **args)))
        except Refused as why:
            if why.code in ("EINTERNAL", "EIO"):
                taken.append("chunk.%s: %s" % (verb, why))
    told = mallory.put(good)
    if told["state"] != SUCCESS or mallory.found(good) != 2:
        taken.append("afterwards nothing can be put: %s" % told)
    return "; ".join(taken[:3]) if taken else None


# ---- by the submission ring (proto/kvd_ring.h) ----

RELEASE, HOLD_REMOTE, REMOTE_MS, LEASE_MS = 5, 21, 1000, 60000


class Holds(Ring):
    """With payload at the arena's beginning: a secret, then ids."""

    def taken(self):
        end = time.monotonic() + ALICE_S
        while not self.all_taken():
            assert time.monotonic() < end, "entries are not taken"
            rig.rest(0.0002)

    def refusal(self, slot):
        try:
            self.engine.cmd("xfer.state", xfer=RING_IDS + self.first + slot)
        except Refused as why:
            return why.code
        return None

    def hold(self, space, slot=0, gen=1, ids=1, **changed):
        """An entry. changed: fields that lie."""
        words = dict(op=HOLD_REMOTE, flags=0, slot=self.first + slot, gen=gen, a=space, b=LEASE_MS,
                     offset=0, n0=ids, n1=REMOTE_MS, bytes=16 + 32 * ids, n2=0, c=0)
        words["slot"] = changed.pop("slot_is", words["slot"])
        words.update(changed)
        return RING_ENTRY.pack(*words.values())

    def release(self, slot=0):
        return RING_ENTRY.pack(RELEASE, 0, 0, 0, RING_IDS + self.first + slot, 0, 0, 0, 0, 0, 0, 0)


@attack("chunks", "forged holds of the ring end their session or are refused, and hold nothing",
        config=CONFIG, stores=True, quick=True)
def forged_ring_holds(house):
    mallory, wrong = Rank(house.a, "mallory"), []
    broken = [dict(n0=0, bytes=16), dict(n0=4097, bytes=16 + 32 * 4097), dict(n0=1 << 27, bytes=16),
              dict(n0=(1 << 27) + 1, bytes=48), dict(bytes=47), dict(bytes=49), dict(n0=2),
              dict(bytes=(1 << 32) - 1), dict(n0=(1 << 32) - 1, bytes=(1 << 32) - 16),
              dict(offset=1 << 40), dict(offset=(1 << 64) - 1), dict(slot_is=0),
              dict(slot_is=(1 << 32) - 1), dict(gen=0), dict(gen=7), dict(op=20), dict(op=22),
              dict(op=1 << 31)]
    for lie in broken:
        engine = Engine(house.a, "forger")
        ring = Holds(engine, 64)
        ring.give(ring.hold(mallory.space, **lie))
        try:
            engine.cmd("ping")
            wrong.append("%s is taken" % lie)
        except Refused as why:
            if why.code != "ESESSION":
                wrong.append("%s: %s" % (lie, why))
        except (ValueError, OSError):
            pass  # the session has ended, and its connection
        ring.close()
        engine.close()
    ring = Holds(mallory.engine)
    refused = [dict(a=mallory.space + 1), dict(a=1 << 63), dict(c=1 << 32), dict(c=(1 << 64) - 1),
               dict(b=0), dict(b=1 << 60), dict(n1=60001), dict(n1=(1 << 32) - 1)]
    for slot, lie in enumerate(refused):
        ring.give(ring.hold(lie.pop("a", mallory.space), slot, **lie))
        if ring.refusal(slot) in (None, "EINTERNAL", "EIO"):
            wrong.append("%s: %s" % (lie, ring.refusal(slot)))
    ring.give(ring.hold(mallory.space, 100) + ring.hold(mallory.space, 101))
    if ring.refusal(101) != "EEXIST":
        wrong.append("two holds have one secret: %s" % ring.refusal(101))
    ring.give(ring.release(100) + ring.release(101))
    if mallory.cmd("list")["holds"]:
        wrong.append("what was refused is held: %s" % mallory.cmd("list"))
    return "; ".join(wrong[:3]) or None


@attack("chunks", "holds of the ring that ask another daemon, as fast as they are taken, keep "
        "nobody waiting and no memory", config=CONFIG, stores=True, quick=True)
def ring_holds_without_end(house):
    mallory, seen = Rank(house.a, "mallory"), []
    ring, rates = Holds(mallory.engine), []
    slots, gen = ring.entries // 2, 0
    for ids, seconds in ((1, 3), (4096, 2)):
        begin, count = time.monotonic(), 0
        before = [rig.rss_mib(d) for d in house.daemons]
        while time.monotonic() - begin < seconds:
            gen += 1
            ring.give(b"".join(ring.hold(mallory.space, slot, gen, ids) + ring.release(slot)
                               for slot in range(slots)))
            ring.taken()
            count += slots
        rates.append(count / (time.monotonic() - begin))
        for d, mib in zip(house.daemons, before):
            if rig.PLAIN and rig.rss_mib(d) > mib + GROWN_MIB:
                seen.append("%d ids: %s has %d MiB more" % (ids, d.name, rig.rss_mib(d) - mib))
    print("       %d and %d holds a second" % tuple(rates))
    if mallory.cmd("list")["holds"] or mallory.cmd("list")["remote"]["holds"]:
        seen.append("holds are left: %s" % mallory.cmd("list"))
    return "; ".join(seen) or None


if __name__ == "__main__":
    rig.main("chunks")
