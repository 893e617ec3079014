#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attacks by other daemons: with a key that the attacked one knows, and with one that it
does not."""
import ctypes
import os
import socket
import struct
import threading
import time

import dataline
import hostile
import rig
from hostile import (ABORT, ATTACH, ATTACH_NAK, BYE, HELLO, LINE, OFFER_QUERY, PART, PING,
                     REGISTER, REGISTER_ACK, REGISTER_NAK, TRANSFER_INFO, TRANSFER_INFO_ACK,
                     TRANSFER_INFO_NAK, UNREGISTER, UNREGISTER_ACK, blob, known, peered, text)
from rig import (MIB, STRANGER, Engine, Lingering, Skip, attack, free_port, grown_mib, raw,
                 rest)
from kvd_engine import LAYERS as CACHE_LAYERS, PAGE_TOKENS as CACHE_PAGE, PAGES as CACHE_PAGES
from kvd_engine import Cache

HOLD_S, ELIMIT = 2, 9
SMALL = "[daemon]\nmemory_limit = 64 MiB\n"
KEPT_MIB = 96  # overhead of the allocator, and messages in transit, above that ceiling


def metric(house, name, kind=None):
    """kind: of a metric by class."""
    watch = Engine(house.a, "watch")
    one = next(m for m in watch.cmd("stats")["metrics"] if m["name"] == name)
    watch.close()
    if kind is None:
        return one["value"]
    return sum(row["value"] for row in one["series"] if row["class"] == kind)


def over_ceiling(house):
    """The sum of all accounts is under the ceiling, which was reached."""
    held, limit = (metric(house, "account_" + n) for n in ("bytes", "limit_bytes"))
    if held > limit:
        return "%d of %d bytes are held" % (held, limit)
    assert metric(house, "account_refused_total"), "%d of %d bytes, nothing refused" % (
        held, limit)
    return None


def need_plain():
    if not rig.PLAIN:
        raise Skip("memory is measured without sanitizers only")


def alive(house):
    """Does a accept a new engine, and are its peers up?"""
    Engine(house.a, "after").cmd("ping")


# ---- descriptors ----

def shm_line(house, peer):
    """The data line of a peer of this host, which dialled it."""
    welcome = peer.welcome
    token = welcome[36:52]
    s = raw(next(n for n in house.shm["a"] if n.startswith("\0")))
    body = struct.pack("<IHH", 0x6d68736b, 2, 0) + token
    s.sendall(struct.pack("<IBBHQ", len(body), 1, 0, 0, 0) + body)
    s.settimeout(2)
    return s if s.recv(4096)[4:5] == b"\2" else None


@attack("V1", "descriptors that a peer of this host passes stop nobody", keyed=True)
def shm_descriptors_of_a_peer(house):
    with peered(house, shm=True) as peer:
        peer.line("shm")
        rest(0.3)
        s = shm_line(house, peer)
        assert s, "no data line"
        lingering = Lingering()
        for frame in (struct.pack("<IBBHQ", 8, 11, 0, 0, 1) + struct.pack("<Q", 1 << 20),
                      struct.pack("<IBBHQ", 17, 13, 0, 0, 1) + bytes(17), b"x"):
            lingering.send(s, frame)
        rest(HOLD_S)
        s.close()
        rest(HOLD_S)


# ---- fences ----

def let_go_of(config, transport, least, most):
    """For a pool that its peer uses forever: the duration of unregistering, and other faults.
    SIGTERM arrives while another is held."""
    with rig.House(keyed=True, config=config) as own:
        with peered(own, transport=transport) as peer:
            engine = Engine(own.a, "victim")
            engine.sock.settimeout(20)
            cache = Cache(engine, name="kept")
            assert str(peer.pool()) == str(cache.pool)
            begin = time.monotonic()
            engine.cmd("pool.unregister", pool=cache.pool)
            took = time.monotonic() - begin
            assert took >= least, "it took %.1f s: the peer held nothing" % took
            lost = peer.saw(BYE, 1)
            if least and (not lost or b"is not released" not in lost):
                return "the peer is told %s" % lost
            with peered(own, transport=transport) as again:
                Cache(engine, name="kept2")
                assert again.pool()
                begin = time.monotonic()
                wrong = own.end()
                ended = time.monotonic() - begin
        if wrong or took > most or ended > 15:
            return "pool.unregister took %.1f s, SIGTERM %.1f s; %s" % (took, ended, wrong)
    return None


@attack("V5", "a peer that lets go of nothing keeps no memory and no engine", keyed=True,
        by=rig.ROOT)
def a_peer_that_never_lets_go(house):
    return let_go_of("", "tcp", 0, 1)


@attack("V5", "nor does one that could reach the memory by itself, when its time is over",
        keyed=True, by=rig.ROOT)
def a_peer_that_never_lets_go_by_ucx(house):
    hostile.library("libucp.so.0")
    return let_go_of("[rooms]\nfence_timeout = 1 s\n[transport]\ntransports = ucx\n", "ucx", 2, 5)


# ---- kept memory ----

def session(number, regions, key=b"k" * 26):
    row = b"".join(struct.pack("<QQQB", i + 1, 4096 * i, 4096, 0) + blob(key)
                   for i in range(regions))
    return (struct.pack("<QBQ", number, 1, number) + text("s") + text("tcp") + blob(b"") +
            blob(struct.pack("<I", regions) + row) + blob(struct.pack("<I", 0)))


@attack("V7", "sessions and regions that a peer tells are charged to it and refused",
        keyed=True, config=SMALL)
def registers_without_end(house):
    need_plain()
    with peered(house) as peer:
        peer.line()

        def tell():
            for number in range(1, 1200):
                if not peer.say(REGISTER, session(number, 4000)):
                    break
        grown = grown_mib(house.a, tell, 1)
        refused = peer.saw(REGISTER_NAK, 2)
        over = over_ceiling(house)
    if grown > KEPT_MIB:
        return "%d MiB of sessions" % grown
    return over if refused else "none of them was refused by name"


def info(room, runs=1000, generation=1, ticket=bytes(16), pool=1, source=None, pages=1):
    """A TRANSFER_INFO to a pool of theirs (None: of the same number) from pool. Each run is
    of so many pages, from the first on."""
    view = text("kv") + struct.pack("<QQQIII", 0, 0, CACHE_PAGE * pages * runs, 0, CACHE_LAYERS,
                                    runs)
    return (struct.pack("<QQQQIB", room, generation, source or pool, pool, 1, 5) +
            blob(struct.pack("<I", 1) + view + struct.pack("<II", 0, pages) * runs) +
            blob(struct.pack("<I", 0)) + text("") + text("") + ticket)


@attack("V7", "requests for rooms that nobody opened are few bytes, and the peer's own",
        keyed=True, config=SMALL)
def requests_for_no_room(house):
    need_plain()
    with peered(house) as peer:
        pool = peer.pool()

        def ask():
            for room in range(6000):
                if not peer.say(TRANSFER_INFO, info(room, 4000, pool=pool)):
                    break
        grown = grown_mib(house.a, ask, 1)
        assert metric(house, "early_requests") > 100, "they are not kept"
        over = over_ceiling(house)
    return "%d MiB of requests" % grown if grown > KEPT_MIB else over


TICKET = bytes(range(16))


@attack("V7", "pages that a receiver names, again and again, are charged to it", keyed=True,
        config=SMALL)
def pages_of_open_rooms(house):
    """Eight bytes of TRANSFER_INFO name all pages of its pool once more."""
    need_plain()
    engine = Engine(house.a, "victim")
    cache = Cache(engine, name="victim")
    for room in range(1, 61):
        engine.cmd("room.open", room=str(room), role="send", pool=cache.pool,
                   ticket=TICKET.hex())
    with peered(house) as peer:
        pool = peer.pool()

        def ask(room, runs):
            return peer.say(TRANSFER_INFO, info(room, runs, 1, TICKET, pool, int(cache.pool),
                                                CACHE_PAGES))
        assert ask(1, 1) and peer.saw(TRANSFER_INFO_ACK), "not even one page list is taken: %s" % (
            [k for k in peer.heard])
        grown = Grown(house.a)
        for room in range(2, 61):
            ask(room, (1 << 20) // CACHE_PAGES)
        said = peer.saw(TRANSFER_INFO_NAK, 30)
        rest(1)
        most = grown.end()
        over = over_ceiling(house)
    if most > KEPT_MIB:
        return "%d MiB of pages" % most
    return over if said else "none is refused"


@attack("V7", "parts of a message that never ends are not kept", keyed=True, config=SMALL)
def parts_without_end(house):
    """All but the last byte of a message, of as many daemons as one key may be."""
    need_plain()
    body, step, crowd = 1048000, 131000, []

    def tell():
        for _ in range(240):
            crowd.append(known(house))
            if not crowd[-1].up():
                break
            for at in range(0, body - step, step):
                crowd[-1].say(PART, struct.pack("<HII", REGISTER, body, at) + blob(bytes(step)))
    grown = grown_mib(house.a, tell, 1)
    up = sum(one.theirs != 0 for one in crowd)
    refused = metric(house, "account_refused_total", "parts")
    over = over_ceiling(house)
    for one in crowd:
        one.alive = False
    if grown > KEPT_MIB:
        return "%d MiB of parts of %d daemons of one key" % (grown, up)
    return over if refused else "%d daemons, %d MiB, none of them was refused" % (up, grown)


# ---- requests between sessions ----

LEAST = 64  # bytes of every other row


def offset_of(i):
    return 3 * LEAST * i


def bytes_of(i):
    return LEAST << (i & 1)


def attached(house, peer):
    """(its data line, an engine's memory at a, (session, secret)): as of an agent that has the
    secret, and with its own session that has some memory, too."""
    engine = Engine(house.a, "victim")
    cache = Cache(engine, name="victim")
    own = next(s for s in engine.cmd("session.list")["sessions"] if "secret" in s)
    peer.line()
    region = struct.pack("<QQQB", 1, MIB, 64 * MIB, 0) + blob(dataline.KEY)
    peer.say(REGISTER, struct.pack("<QBQ", 1, 1, 1) + text("s") + text("tcp") + blob(b"") +
             blob(struct.pack("<I", 1) + region) + blob(struct.pack("<I", 0)))
    assert peer.saw(REGISTER_ACK), "its session is not taken"
    line = dataline.DataLine(peer)  # then answers arrive there, which peer.saw() does not read
    return line, cache, (int(own["epoch"]), bytes.fromhex(own["secret"]))


def lists(line, cache, target, count):
    """Of both sides' rows. They are neighbours neither in place nor in length: none is
    folded into another."""
    for gid, base, ours in ((1, MIB, 0), (2, cache.address, 1)):
        rows = b"".join(struct.pack("<QQQQ", base + offset_of(i), bytes_of(i), 0, 1)
                        for i in range(count))
        assert line.answer(line.ask(dataline.dlist(gid, rows, ours, 1, target))) == (0, b"")


def read_rows(line, target, rows, picks, planned=True):
    """Ask for rows; the request's number. planned: as it will be planned there."""
    length, digest = sum(bytes_of(i) for i in rows), 0
    if planned:
        plan = b"".join(struct.pack("<QQQQqqII", offset_of(i), offset_of(i), bytes_of(i), 1,
                                    0, 0, 0, 0) for i in rows)
        digest = line.xx.XXH3_64bits(plan, ctypes.c_size_t(len(plan)))
    return line.ask(dataline.xfer(dataline.READ, 1, target, 1, 2, length, [picks] * 2, digest),
                    length, dataline.READ)


def reads(line, cache, target):
    """The reference: some requested rows arrive."""
    cache.mem[:LEAST] = bytes(range(LEAST))
    said = line.answer(read_rows(line, target, range(8), dataline.runs(0, 8, 1)))
    assert said and said[0] == 0 and said[1][:LEAST] == bytes(range(LEAST)), said


class Grown:
    """Maximum growth, checked every few milliseconds."""

    def __init__(self, daemon):
        self.daemon, self.begin, self.most, self.goes = daemon, rig.rss_mib(daemon), 0, True
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()

    def look(self):
        while self.goes:
            self.most = max(self.most, rig.rss_mib(self.daemon) - self.begin)
            rest(0.002)

    def end(self):
        self.goes = False
        self.thread.join()
        return self.most


@attack("V7", "a plan is no larger while it is made than its account has room for", keyed=True,
        config=SMALL)
def plan_of_repeated_rows(house):
    need_plain()
    with peered(house) as peer:
        line, cache, target = attached(house, peer)
        lists(line, cache, target, 1024)
        reads(line, cache, target)
        grown = Grown(house.a)
        said = [line.answer(read_rows(line, target, (), dataline.runs(0, 1024, times), False))
                for times in (1 << 12, 1 << 14)]
        most = grown.end()
        reads(line, cache, target)
        over = over_ceiling(house)
    if most > KEPT_MIB:
        return "%d MiB" % most
    if not all(one and one[0] == ELIMIT and b"peer:mallory: plans" in one[1] for one in said):
        return "the answers are %s" % said
    return over


@attack("V7", "plans of reads that are never read are charged to who asks", keyed=True,
        config=SMALL)
def plans_that_are_held(house):
    need_plain()
    with peered(house) as peer:
        line, cache, target = attached(house, peer)
        lists(line, cache, target, 8192)
        reads(line, cache, target)
        grown = Grown(house.a)
        rows = list(range(8192)) * 4
        asked = [read_rows(line, target, rows, dataline.runs(0, 8192, 4)) for _ in range(300)]
        last = line.answer(asked[-1])
        most = grown.end()
        held = sum(number not in line.done for number in asked)
        over = over_ceiling(house)
    if most > KEPT_MIB:
        return "%d MiB, %d plans" % (most, held)
    assert held > 8, "%d are held" % held
    if not last or last[0] != ELIMIT:
        return "the last is answered by %s" % (last,)
    return over


@attack("V7", "lists that a peer prepares without end are charged to it", keyed=True,
        config=SMALL)
def lists_without_end(house):
    need_plain()
    with peered(house) as peer:
        line, cache, target = attached(house, peer)
        row = struct.pack("<QQQQ", cache.address, LEAST, 0, 1)
        grown = Grown(house.a)
        said = [line.answer(line.ask(dataline.dlist(gid, row * 30000, 1, 1, target,
                                                    total=total)))
                for gid, total in enumerate([30000] * 20 + [1 << 22] * 20, 1)]
        most = grown.end()
        over = over_ceiling(house)
    assert said[0] == (0, b""), "none is taken: %s" % (said[0],)
    if most > KEPT_MIB:
        return "%d MiB" % most
    if not said[-1] or said[-1][0] != ELIMIT:
        return "the last is answered by %s" % (said[-1],)
    return over


@attack("V7", "the beginnings of requests are charged", keyed=True, config=SMALL)
def requests_without_end(house):
    """All but the last byte of a request's header, of as many daemons as one key may be."""
    need_plain()
    crowd, whole = [], 2 << 20

    def tell():
        for _ in range(100):
            peer = known(house)
            if not peer.up():
                break
            peer.line()
            line = dataline.DataLine(peer)
            crowd.append((peer, line))
            line.control.sendall(line.head(dataline.REQUEST, 1, header=bytes(whole)) +
                                 bytes(whole - 1))
    grown = grown_mib(house.a, tell, 1)
    refused = metric(house, "account_refused_total", "parts")
    last = crowd[-1][1].answer(1)
    for peer, _ in crowd:
        peer.alive = False
    if grown > KEPT_MIB:
        return "%d MiB of %d daemons of one key" % (grown, len(crowd))
    if not refused or not last or last[0] != ELIMIT:
        return "of %d daemons %d are refused, the last is told %s" % (len(crowd), refused, last)
    return None


# ---- tables, dials ----

@attack("V8", "thousands of HELLOs of one key leave room for another's", keyed=True,
        by=rig.ROOT, config="[peer]\npeers = 64\n")
def hellos_fill_the_table(house):
    peer = known(house)
    for i in range(4000):
        peer.id = b"\1" + os.urandom(15)
        peer.epoch = i + 1
        peer.put(peer.frame(HELLO, peer.hello_body(
            endpoint="tcp://127.0.0.1:%d#%s" % (1024 + i, peer.keys[1]))))
    other = hostile.Daemon(house.endpoints["a"], hostile.keys_of(house, "b"))
    return None if other.up(6) else "no WELCOME for another key"


@attack("V8", "HELLOs of one key without end keep no other key waiting", keyed=True,
        by=rig.ROOT)
def hellos_without_end(house):
    peer, ended = known(house), threading.Event()

    def flood():
        while not ended.is_set():
            for _ in range(10):
                peer.id, peer.epoch = b"\1" + os.urandom(15), peer.epoch + 1
                peer.put(peer.frame(HELLO, peer.hello_body(endpoint="tcp://127.0.0.1:%d#%s" % (
                    1024 + peer.epoch % 50000, peer.keys[1]))))
            rest(0.01)
    thread = threading.Thread(target=flood)
    thread.start()
    rest(HOLD_S)  # more than a second's worth
    other = hostile.Daemon(house.endpoints["a"], hostile.keys_of(house, "b"))
    begin = time.monotonic()
    up = other.up(6)
    took = time.monotonic() - begin
    ended.set()
    thread.join()
    return None if up and took < 1 else "the WELCOME of another key takes %.1f s" % took


@attack("V11", "a HELLO makes it dial its sender once, and nobody else", keyed=True)
def hello_makes_it_dial_others(house):
    door, other = (socket.create_server(("127.0.0.1", 0)) for _ in "12")
    for d in (door, other):
        d.setblocking(False)
    peer = known(house)
    for _ in range(3):
        peer.put(peer.frame(HELLO, peer.hello_body(
            endpoint="tcp://127.0.0.1:%d#%s" % (door.getsockname()[1], peer.keys[1]))))
    # a key that is not the sender's
    peer.put(peer.frame(HELLO, peer.hello_body(endpoint="tcp://127.0.0.1:%d#%s" % (
        other.getsockname()[1], house.keys["b"]))))
    counts, kept, end = [0, 0], [], time.monotonic() + 4
    while time.monotonic() < end:
        for i, d in enumerate((door, other)):
            try:
                kept.append(d.accept()[0])
                counts[i] += 1
            except BlockingIOError:
                rest(0.01)
    assert counts[0], "no HELLO was heard"
    return "it dialled %d and %d times" % tuple(counts) if counts != [1, 0] else None


# ---- rooms of others ----

@attack("V4", "rooms of others are not taken, ended or asked for in advance by number",
        keyed=True)
def rooms_of_others_by_number(house):
    first = 1 << 50  # the bystander's
    with peered(house) as peer:
        pool = peer.pool()  # its, too
        end = time.monotonic() + HOLD_S
        for again in range(8):
            end_of = again + 1 + again % 2 * 100  # of its own rooms, or of none: those stay
            for room in range(first, first + 300):
                peer.say(TRANSFER_INFO, info(room, 1, again + 1, pool=pool))
                peer.say(OFFER_QUERY, struct.pack("<QQQQIB", room, again + 1, pool, pool, 0, 5) +
                         text("") + text("") + bytes(16))
                for role in (0, 1):
                    peer.say(ABORT, struct.pack("<QBQQQQI", room, role, end_of, 0, 0, 0, 1) +
                             text("forged") + bytes(24))
            if time.monotonic() > end:
                break
        rest(0.5)
        assert metric(house, "room_messages_unauthorized_total"), "no room was asked for"


@attack("V4", "secrets of sessions are not guessed, and guessing is cheap to refuse",
        keyed=True)
def secrets_guessed(house):
    with peered(house) as peer:
        peer.line()
        for session_id in range(3000):
            peer.say(ATTACH, struct.pack("<QQ", session_id, session_id % 20) +
                     os.urandom(16))
        assert peer.saw(ATTACH_NAK), "none is answered"
        rest(1)
        if any(kind == hostile.ATTACH_ACK for kind, _ in peer.heard):
            return "attached"
    return None


# ---- lies ----

def instance_of(house, name):
    peers = Engine(house.a, "watch").cmd("peer.list")["peers"]
    return next((bytes.fromhex(p["instance"]) for p in peers if p["name"] == name), None)


@attack("lies", "another daemon's name ends no peering of its", keyed=True)
def frames_in_another_daemons_name(house):
    b = instance_of(house, "b")
    assert b, "b is no peer"
    with peered(house) as peer:
        for kind, body in ((BYE, struct.pack("<I", 1) + text("gone")), (LINE, b""),
                           (UNREGISTER, struct.pack("<Q", 1)),
                           (HELLO, peer.hello_body()), (hostile.WELCOME, peer.hello_body()),
                           (ABORT, struct.pack("<QBQQQQI", 1 << 50, 1, 1, 1, 0, 0, 1) + text("x") +
                            bytes(24))):
            for epoch in (0, 1, peer.theirs):
                for _ in range(50):
                    peer.put(peer.frame(kind, body, 1, sender=b, epoch=epoch))
        rest(1)
        if instance_of(house, "b") != b:
            return "b is another now"
    return None


BENDS = [dict(version=0), dict(version=0xffff), dict(target=os.urandom(16)),
         dict(sender=bytes(16)), dict(epoch=0), dict(epoch=(1 << 64) - 1), dict(mine=7),
         dict(length=0xffffffff), dict(length=0), dict(magic=0), dict(kind=0),
         dict(kind=0xffff), dict(sequence=0), dict(sequence=(1 << 64) - 1)]


def registered(house, seconds, **bend):
    """Is a session accepted that a new peering announces?"""
    with peered(house) as peer:
        peer.line()
        rest(0.05)
        peer.say(REGISTER, session(1, 4), **bend)
        return peer.saw(REGISTER_ACK, seconds) is not None


@attack("lies", "versions, epochs, lengths and sequences that lie end the liar's peering only",
        keyed=True)
def headers_that_lie(house):
    assert registered(house, 5), "not even the truth is taken"
    for bend in BENDS:
        if registered(house, 0.15, **bend):
            return "a session was taken from a frame with %s" % bend
    peer = known(house)
    for bend in BENDS:
        if not {"sender", "target", "length", "magic", "kind"} & set(bend):
            continue  # the others are a HELLO's own to choose
        peer.id, peer.epoch = b"\1" + os.urandom(15), peer.epoch + 1
        peer.put(peer.frame(HELLO, peer.hello_body(), **bend))
        while (said := peer.hear()):
            if said[0] == hostile.WELCOME:
                return "a HELLO with %s is answered" % bend
    for low, high in ((2, 1), (0, 0), (9, 9), (0xffff, 0xffff), (0, 0xffff)):
        peer.put(peer.frame(HELLO, peer.hello_body(low, high)))
    for cut in range(0, 96, 5):
        peer.put(peer.frame(PING, bytes(8))[:cut])
    assert peer.up(), "the truth is not answered any more"
    return None


@attack("lies", "what was said to one daemon counts nothing at another, nor twice, nor later",
        keyed=True)
def frames_replayed(house):
    """With the next sequence number: only instance and epoch are old."""
    peer = known(house)
    truth, frames = told_anew(peer), []
    for kind, body, answer in truth:
        with peer.lock:
            peer.sequence += 1
            frames.append(peer.frame(kind, body, peer.sequence))
            peer.put(frames[-1])
        assert peer.saw(answer), "%d was not taken the first time: %s" % (
            kind, list(peer.heard))
    if replayed(peer, frames):
        return "it was taken twice"
    other = hostile.Daemon(house.endpoints["b"], hostile.keys_of(house))
    other.id, other.epoch = peer.id, peer.epoch
    peer.afresh(peer.epoch + 1)
    for again, who in ((other, "another daemon took it"), (peer, "it was taken in a later epoch"),
                       (known(house), "it was taken from another daemon of its key")):
        truth = told_anew(again)
        assert again.sequence == HELLO_AND_POOL, "other frames are due: %d" % again.sequence
        if replayed(again, frames):
            return who
        for kind, body, answer in truth:
            again.say(kind, body)
            assert again.saw(answer), "nor is %d taken when it is new" % kind
        again.alive = False
    return None


HELLO_AND_POOL = 4  # PING, LINE, and two of pool()


def told_anew(peer):
    """A peering with a pool; possible messages then, and their answers."""
    peer.pongs = False  # they have numbers, too
    assert peer.up(), "no WELCOME"
    pool = peer.pool()
    peer.heard.clear()
    return ((REGISTER, session(pool + 1, 4), REGISTER_ACK),
            (UNREGISTER, struct.pack("<Q", pool), UNREGISTER_ACK))


def replayed(peer, frames):
    """Is one of the earlier messages answered?"""
    peer.heard.clear()
    for frame in frames * 20:
        peer.put(frame)
    rest(0.3)
    return any(kind in (REGISTER_ACK, UNREGISTER_ACK) for kind, _ in peer.heard)


@attack("lies", "a daemon that speaks one byte at a time keeps nobody waiting", by=STRANGER)
def one_byte_at_a_time(house):
    port = int(house.endpoints["a"].split("#")[0].rsplit(":", 1)[1])
    greeting = b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
    kept = [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
    for at in range(len(greeting)):
        for s in kept:
            try:
                s.send(greeting[at:at + 1])
            except OSError:
                pass
        rest(0.03)


@attack("lies", "a key that nobody knows gets no word through", keyed=True)
def unknown_key(house):
    peer = hostile.Daemon(house.endpoints["a"])
    if peer.up(3):
        return "it was welcomed"
    kept = [hostile.Daemon(house.endpoints["a"]) for _ in range(20)]
    for one in kept:
        one.put(one.frame(HELLO, one.hello_body()), flags=hostile.DONTWAIT)
    rest(HOLD_S)
    alive(house)
    return None


@attack("lies", "a peer that ends and begins all the time costs the others nothing", keyed=True)
def peerings_without_rest(house):
    end = time.monotonic() + 5
    peer = known(house)
    while time.monotonic() < end:
        peer.afresh(peer.epoch + 1, b"\1" + os.urandom(15))
        if peer.up(1):
            peer.line()
            peer.say(REGISTER, session(1, 100))
            peer.say(BYE, struct.pack("<I", 1) + text("bye"), sequence=0)
    peer.alive = False


if __name__ == "__main__":
    rig.main("peer")
