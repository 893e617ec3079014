#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py BUILD [CASE…]: RDMA between two virtual machines.

Makes the guests' image when it is missing or old (image.sh), puts the programs of
BUILD into it, boots two guests and runs the cases. Ends with "N passed, N failed".
"""
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rig  # noqa: E402

MIB = 1 << 20
HERE = os.path.dirname(os.path.abspath(__file__))
CASES = []
FAILED, SUCCESS = 0, 4  # states of a post
ABORTS = int(os.environ.get("RDMA_VM_ABORTS", "12"))  # rooms each way
GIB_ABORTS = int(os.environ.get("RDMA_VM_GIB_ABORTS", "100"))


def case(function):
    CASES.append(function)
    return function


class Failure(Exception):
    """What is tested does not hold."""


def check(condition, words):
    if not condition:
        raise Failure(words)


# ---- the guests themselves ----

@case
def rig_devices(pair):
    """each guest has one active Soft-RoCE port"""
    for guest in pair.guests:
        text = guest.must("ibv_devinfo -d rxe0")
        check("PORT_ACTIVE" in text, f"{guest.name}: {text}")


@case
def rig_connection_manager(pair):
    """rping between the guests, through librdmacm"""
    server = pair[0].start(f"rping -s -a {pair[0].address} -C 10 -v")
    pair[0].until("rdma resource show cm_id | grep -q LISTEN")
    pair[1].must(f"rping -c -a {pair[0].address} -C 10 -v", 60)
    check(server.wait(20) == 0, server.text)


@case
def rig_bandwidth(pair):
    """ib_write_bw between the guests"""
    server = pair[0].start("ib_write_bw -x 1 -s 65536 -n 200")
    pair[0].until("netstat -ltn | grep -q 18515")
    text = pair[1].must(f"ib_write_bw -x 1 -s 65536 -n 200 {pair[0].address}", 120)
    check(server.wait(20) == 0, server.text)
    print("# " + text.splitlines()[-2].strip())


# ---- two daemons ----

CONFIG = """[daemon]
name = kvd
run_dir = /tmp/kvd
log_level = info
[peer]
listen = tcp://%s:7400
insecure = yes
dead_after = 3 s
[rooms]
transfer_stall_timeout = 30 s
[transport]
transports = %s
verbs_rails = %s
verbs_ack_timeout = 17
"""
ROOM_S = 240
PORT = 7500  # of a conformance keeper
ASAN = "allocator_may_return_null=1:detect_stack_use_after_return=1:exitcode=97"
LSAN = "suppressions=/asan/asan.supp:print_suppressions=0:use_tls=0"


def run_in(build, program):
    """A guest's words that run a program of one of the two builds."""
    if build == "/kvd":
        return f"/kvd/{program}"
    return (f"env LD_LIBRARY_PATH={build}:$LD_LIBRARY_PATH ASAN_OPTIONS={ASAN} "
            f"LSAN_OPTIONS={LSAN} {build}/{program}")


class Daemons:
    """One in each guest; ends them and looks at their words."""

    def __init__(self, pair, rails="rxe0", build="/kvd", extra="", transport="verbs"):
        self.pair, self.rails, self.build, self.extra = pair, rails, build, extra
        self.transport = transport
        self.running = [None] * len(pair.guests)

    def __enter__(self):
        try:
            for i in range(len(self.running)):
                self.start(i)
        except BaseException as fault:
            self.__exit__(type(fault))
            raise
        return self

    def start(self, i):
        guest = self.pair[i]
        require = "require = rdma\n" if self.transport.startswith("verbs") else ""
        lines = (CONFIG % (guest.address, self.transport, self.rails) + require
                 + self.extra).splitlines()
        guest.must("mkdir -p /tmp/kvd; rm -f /tmp/kvd.conf; "
                   + "; ".join(f"echo '{line}' >> /tmp/kvd.conf" for line in lines))
        self.running[i] = guest.start("echo $$ > /tmp/kvd.pid; "
                                      f"exec {run_in(self.build, 'kvd')} --config /tmp/kvd.conf")
        guest.until("/kvd/kvd-ctl --socket /tmp/kvd/kvd.sock ping > /dev/null 2>&1")

    def ctl(self, i, words):
        return self.pair[i].must(f"/kvd/kvd-ctl --socket /tmp/kvd/kvd.sock {words}")

    def kill(self, i):
        self.pair[i].must("kill -9 $(cat /tmp/kvd.pid)")
        self.running[i].wait(20)
        self.running[i] = None

    def __exit__(self, kind, *what):
        for guest, command in zip(self.pair.guests, self.running):
            if not command:
                continue
            try:
                guest.run("kill $(cat /tmp/kvd.pid)", 60)
                status = command.wait(60)
            except rig.Fault as fault:
                status = str(fault).splitlines()[0]
            if kind is not None or status != 0:
                print(f"# {guest.name}'s daemon ended with {status}:\n#   "
                      + "\n#   ".join(command.lines[-30:]))
            check(kind is not None or status == 0, f"{guest.name}: see above")


def endpoint(guest):
    return f"tcp://{guest.address}:7400"


def demo(pair, build, transport="verbs"):
    with Daemons(pair, build=build, transport=transport) as daemons:
        prefill = pair[0].start(f"KVD_DEMO_SHRINK=8 {run_in(build, 'demo-prefill')} "
                                "/tmp/kvd/kvd.sock")
        decode = pair[1].start(f"KVD_DEMO_SHRINK=8 {run_in(build, 'demo-decode')} "
                               f"/tmp/kvd/kvd.sock {endpoint(pair[0])} {transport}")
        status = decode.wait(ROOM_S)
        peers = daemons.ctl(1, "peers")
        bounds = json.loads(daemons.ctl(1, "--json health"))["sandbox"]
        print("# " + decode.text.replace("\n", "\n# "))
        check(status == 0, f"decode ended with {status}: {decode.text}; "
              f"prefill: {prefill.text}")
        check(prefill.wait(60) == 137, f"prefill ended with {prefill.status}: "
              + prefill.text)
        check(build != "/kvd" or ("seccomp" in bounds and "landlock" in bounds),
              f"the adapter's libraries were not in the sandbox: {bounds}")
        return peers


@case
def rooms_of_the_demo(pair):
    """push, pull, abort and a killed engine; every byte verified by the engines"""
    demo(pair, "/kvd")


@case
def asan_rooms_of_the_demo(pair):
    """the same, all of it built with the address sanitizer"""
    demo(pair, "/asan")


# ---- tcp, sealed ----

@case
def sealed_rooms_of_the_demo(pair):
    """the demo over tcp: encrypted between hosts without being asked"""
    peers = demo(pair, "/kvd", "tcp")
    print("# " + peers.replace("\n", "\n# "))
    check("tcp+aes128gcm" in peers, peers)


def aborts(pair, sender, receiver, rounds, page=65536):
    first = 100000 * (1 + sender)
    program = f"KVD_ABORT_PAGE={page} /kvd/rdma-abort"
    with Daemons(pair):
        send = pair[sender].start(f"{program} send /tmp/kvd/kvd.sock {rounds} {first}")
        recv = pair[receiver].start(f"{program} recv /tmp/kvd/kvd.sock "
                                    f"{endpoint(pair[sender])} {rounds} {first}")
        try:
            status = recv.wait(60 + 10 * rounds * (1 + 4 * page // MIB), beside=send)
        except rig.Fault as fault:
            raise Failure(f"{fault}\nsend {send.status}: {send.text}; recv: {recv.text}") from fault
        print("# " + recv.text)
        check(status == 0 and send.wait(60) == 0,
              f"recv {status}: {recv.text}; send {send.status}: {send.text}")


@case
def abort_no_foreign_byte(pair):
    """aborted with requests outstanding, the pages given away at `failed`: first to second"""
    aborts(pair, 0, 1, ABORTS)


@case
def abort_no_foreign_byte_back(pair):
    """the same, second guest to first"""
    aborts(pair, 1, 0, ABORTS)


@case
def abort_in_a_gib(pair):
    """rooms of 1 GiB, aborted in the middle: first to second"""
    aborts(pair, 0, 1, GIB_ABORTS, MIB)


@case
def abort_in_a_gib_back(pair):
    """the same, second guest to first"""
    aborts(pair, 1, 0, GIB_ABORTS, MIB)


# ---- query rows ----

CHUNKS = """[chunks]
chunk_memory = 32 MiB
chunk_peers = %s
attention_threads = 1
"""
# (rows, chunks that they meet): of one message, and of several; a guest is slow at arithmetic
SIZES = ((16, 8), (512, 2), (2048, 1))


class Rows:
    """An engine of a guest that puts, holds and attends (tests/integration/faults/rows.h)."""

    def __init__(self, guest):
        self.guest, self.asks = guest, 0
        guest.must("rm -f /tmp/rows; mkfifo /tmp/rows")
        self.command = guest.start(
            "sleep 100000 > /tmp/rows & echo $! > /tmp/rows.pid; "
            "exec /kvd/faults-engine /tmp/kvd/kvd.sock rows v 16 < /tmp/rows")
        self.command.wait_line('"event":"session"', 60)

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.guest.run("kill $(cat /tmp/rows.pid)")
        self.command.wait(60)

    def say(self, verb, *args):
        self.asks += 1
        self.guest.must(f"echo '{verb} {self.asks} {' '.join(map(str, args))}' > /tmp/rows")
        self.command.wait_line(f'"id":{self.asks},"result"', 60)
        return json.loads(next(line for line in self.command.lines
                               if line.startswith(f'{{"id":{self.asks},')))

    def until(self, verb, *args):
        """The store is made, and the other daemon known, by and by."""
        end = time.monotonic() + 60
        while (told := self.say(verb, *args))["result"] != "OK":
            check(time.monotonic() < end, f"{verb}: {told}")

    def post(self, number, rows, chunks, times=1):
        told = self.say("rows", number, number % 2, rows, chunks, 0, 60000, times)
        check(told["result"] == "OK", str(told))

    def ended(self, number, state, timeout):
        """What was told of its end."""
        words = f'"room":{number},"role":"attend","state":{state},'
        self.command.wait_line(words, timeout)
        return json.loads(next(line for line in self.command.lines if words in line))


def figure(daemons, i, name):
    stats = json.loads(daemons.ctl(i, "--json stats"))
    return next(int(m["value"]) for m in stats["metrics"] if m["name"] == name)


@contextlib.contextmanager
def rows_of(pair, more=""):
    """(daemons, the asking engine): chunks at the first guest, held by the second."""
    extra = CHUNKS % endpoint(pair[0]) + more
    with Daemons(pair, transport="verbs shm", extra=extra) as daemons, Rows(pair[0]) as there:
        there.until("chunks", 0, 8)
        with Rows(pair[1]) as engine:
            engine.until("hold", 0, 8)
            yield daemons, engine


@case
def attends_of_every_size(pair):
    """query rows by verbs: one message and many, every value looked at"""
    with rows_of(pair) as (daemons, engine):
        check("verbs" in daemons.ctl(1, "peers"), daemons.ctl(1, "peers"))
        number = 0
        for rows, chunks in SIZES:
            for _ in range(4):
                number += 1
                engine.post(number, rows, chunks)
                told = engine.ended(number, SUCCESS, 120)
                check(told["wrong"] == 0, f"{rows} rows: {told}")
        served = figure(daemons, 0, "attention_served_total")
        check(served > number, f"{served} messages for {number} posts")
        print(f"# {number} posts, {served} messages")


@case
def attends_of_a_killed_holder(pair):
    """kill -9 of the holder while it attends: the post fails, and nothing is written behind it"""
    with rows_of(pair, "attention_isa = ref\n") as (daemons, engine):
        engine.post(1, 4096, 8, 8)
        pair[0].until("/kvd/kvd-ctl --socket /tmp/kvd/kvd.sock stats | "
                      "grep -q 'attend_waiting  *[1-9]'")
        daemons.kill(0)
        engine.ended(1, FAILED, 60)
        why = engine.say("why", 1, "attend")["words"]
        check("EPEER" in why, why)
        check(engine.say("still", 1, "attend", 3000)["written"] == 0, "its seat was written")
        print("# " + why)


# ---- a push, and what happens to it ----

def daemon_state(guest):
    """Where a daemon that does not do what it should stands."""
    return guest.run("cat /proc/$(cat /tmp/kvd.pid)/stack; for what in status rooms peers; "
                     "do timeout 5 /kvd/kvd-ctl --socket /tmp/kvd/kvd.sock $what; done")[1]


class Push:
    """64 MiB from guest 1's engine to guest 2's, which pulls them if asked to; nobody
    aborts it."""

    number = 500000

    def __init__(self, pair, page=65536, pull=False):
        Push.number += 1
        self.pair = pair
        program = (f"KVD_ABORT_PAGE={page} {'KVD_ABORT_PULL=1 ' if pull else ''}"
                   "/kvd/rdma-abort")
        self.send = pair[0].start(f"{program} send /tmp/kvd/kvd.sock 0 {Push.number}")
        self.recv = pair[1].start(f"{program} recv /tmp/kvd/kvd.sock "
                                  f"{endpoint(pair[0])} 0 {Push.number}")
        self.recv.wait_line("moving", 120)
        self.began = time.monotonic()

    def failed(self, command, within_s, codes):
        """It ends as failed, in time and with one of these codes; how long it took."""
        try:
            command.wait_line("failed", within_s)
        except rig.Fault as fault:
            raise Failure(f"{fault}\n{daemon_state(command.guest)}") from fault
        took = time.monotonic() - self.began
        check(any(code in command.text for code in codes), command.text)
        return took

    def clean(self):
        """No byte was wrong, or came after the end."""
        check(self.recv.wait(120) == 0, self.recv.text)

    def succeeded(self, within_s):
        self.recv.wait_line("success", within_s)
        self.clean()
        check(self.send.wait(60) == 0 and "success" in self.send.text, self.send.text)


def again(pair):
    """The pair works again: a push succeeds."""
    Push(pair).succeeded(240)


def way_of(command):
    """The way in the one peer's record that an engine printed."""
    line = next(line for line in command.lines if line.startswith("record "))
    record = json.loads(line[len("record "):])
    return record.get("result", record)["peers"][0].get("way")


def rows_short_and_scattered(pair, pull):
    """The side that asks for a transfer has its request's cost; both tell the way."""
    with Daemons(pair):
        for _ in range(3):  # the first goes by a published cost, the next by a measured one
            push = Push(pair, 512, pull)
            push.succeeded(120)
            ways = [way_of(command) for command in (push.recv, push.send)]
            print(f"# receiver {ways[0]}, sender {ways[1]}")
        check(all(way and way["packed"] and 512 <= way["row_bytes"] <= 1024
                  for way in ways), str(ways))
        asks = ways[0] if pull else ways[1]
        check(asks["request_ns"] > 2 * asks["copy_ns"], str(ways))
        push = Push(pair, 65536, pull)
        push.succeeded(240)
        way = way_of(push.recv if pull else push.send)
        check(way and not way["packed"], str(way))


@case
def rows_short_pushed(pair):
    """pages of 512 bytes in another order at each side: packed, and the record says so"""
    rows_short_and_scattered(pair, False)


@case
def rows_short_pulled(pair):
    """the same by pull"""
    rows_short_and_scattered(pair, True)


@case
def fault_sender_daemon_killed(pair):
    """kill -9 of the sender's daemon in mid-transfer: the receiver fails, clean"""
    with Daemons(pair) as daemons:
        push = Push(pair)
        daemons.kill(0)
        took = push.failed(push.recv, 60, ["EPEER", "ERESTART"])
        push.failed(push.send, 60, ["E"])
        push.clean()
        print(f"# the receiver failed {took:.1f} s after the kill")
        daemons.start(0)
        again(pair)


@case
def fault_receiver_daemon_killed(pair):
    """kill -9 of the receiver's daemon in mid-transfer: the sender fails"""
    with Daemons(pair) as daemons:
        push = Push(pair)
        daemons.kill(1)
        took = push.failed(push.send, 60, ["EPEER", "ERESTART"])
        push.failed(push.recv, 60, ["E"])
        push.clean()
        print(f"# the sender failed {took:.1f} s after the kill")
        daemons.start(1)
        again(pair)


@case
def fault_link_down(pair):
    """the link goes down in mid-transfer: both fail, clean; up again, they work"""
    with Daemons(pair):
        push = Push(pair)
        pair[0].must("ip link set eth0 down")
        try:
            took = [push.failed(command, 60, ["EPEER", "EIO", "EFENCE", "ETRANSPORT"])
                    for command in (push.recv, push.send)]
        finally:
            pair[0].must("ip link set eth0 up")
        push.clean()
        print("# failed after %.1f and %.1f s" % tuple(took))
    # This kernel's rxe answers no connection request any more, to nobody, after its
    # management queue pair met a port that was down: it is made anew.
    pair[0].must("rdma link delete rxe0; rdma link add rxe0 type rxe netdev eth0")
    with Daemons(pair):
        again(pair)


@case
def fault_lossy_link(pair):
    """1 % loss and 10 ms delay: slower, and right"""
    with Daemons(pair):
        pair[0].must("/bin/tc qdisc add dev eth0 root netem loss 1% delay 10ms limit 10000")
        try:
            Push(pair).succeeded(400)
        finally:
            pair[0].must("/bin/tc qdisc del dev eth0 root")


@case
def fault_receiver_frozen(pair):
    """the receiving guest stands still: the sender fails in time; woken, it is clean"""
    with Daemons(pair):
        push = Push(pair)
        pair[1].freeze()
        try:
            took = push.failed(push.send, 60, ["EPEER", "EFENCE", "ETRANSPORT"])
        finally:
            pair[1].wake()
        push.recv.wait_line("failed", 60)
        push.clean()
        print(f"# the sender failed {took:.1f} s after the freeze")
        again(pair)


@case
def fault_sender_frozen(pair):
    """the sending guest stands still, is given up, and wakes: no byte of it arrives"""
    with Daemons(pair):
        push = Push(pair)
        pair[0].freeze()
        try:
            took = push.failed(push.recv, 60, ["EPEER", "EFENCE", "ETRANSPORT"])
        finally:
            pair[0].wake()  # while the pages are somebody else's, and watched
        push.send.wait_line("failed", 60)
        push.clean()
        print(f"# the receiver failed {took:.1f} s after the freeze")
        again(pair)


@case
def rails_two(pair):
    """a large push goes over two adapters"""
    with Daemons(pair, rails="rxe0 rxe1") as daemons:
        again(pair)
        text = daemons.ctl(0, "devices")
        check("rail 0" in text and "rail 1" in text, text)
        print("# " + text.replace("\n", "\n# "))


@case
def rail_lost(pair):
    """the second of two adapters loses its link under a push: it goes on over the first"""
    with Daemons(pair, rails="rxe0 rxe1") as daemons:
        push = Push(pair)
        pair[0].must("ip link set eth1 down")
        try:
            push.succeeded(240)
            for guest, daemon in zip(pair.guests, daemons.running):
                check(daemon.has("continuing without a lost rail"),
                      f"{guest.name} lost no rail: {daemon.text[-2000:]}")
            took = time.monotonic() - push.began
            print(f"# 64 MiB were there {took:.1f} s after the first byte; over "
                  + daemons.ctl(1, "peers").splitlines()[-1].strip())
        finally:
            pair[0].must("ip link set eth1 up")
    # as in fault_link_down
    pair[0].must("rdma link delete rxe1; rdma link add rxe1 type rxe netdev eth1")


# ---- how fast ----

BENCH_ROUNDS = int(os.environ.get("RDMA_VM_BENCH", "3"))


def perftest(pair, tool, size, count):
    """MB/s (10^6) of ib_write_bw or ib_read_bw between the guests. Soft-RoCE may refuse one
    of perftest's own requests (status 9, no kvd there): then once more, and said."""
    words = f"{tool} -d rxe0 -x 1 -s {size} -n {count}"
    for left in (2, 1, 0):
        server = pair[0].start(words)
        pair[0].until("netstat -ltn | grep -q 18515")
        status, text = pair[1].run(f"{words} {pair[0].address}", 240)
        server.wait(60)
        if status == 0:
            break
        print(f"# {tool} against itself: " + " ".join(text.split()[:14]))
        check(left, text)
    line = [found for found in text.splitlines() if re.match(rf" *{size} ", found)][-1]
    return float(line.split()[3]) * MIB / 1e6


def kvd_bench(pair, ticket, size, rows, op, words=""):
    """MB/s of kvd's second guest to its first (push) or from it (pull)."""
    text = pair[1].must("/kvd/kvd-ctl --json --socket /tmp/kvd/kvd.sock bench "
                        f"--size {size} --rows {rows} --op {op} --count 3 "
                        f"{words} --transport verbs '{ticket}'", 600)
    return json.loads(text[text.index("{"):])["results"][0]["gbps"] * 1e3


def bench_table(pair, rows, extra=""):
    """Ours and theirs take turns; the median of the rounds' ratios."""
    found = {}
    with Daemons(pair, extra=extra):
        lender = pair[0].start("exec /kvd/kvd-ctl --socket /tmp/kvd/kvd.sock bench --serve "
                               "--memory 64M > /tmp/ticket")
        pair[0].until("[ -s /tmp/ticket ]")
        ticket = pair[0].must("cat /tmp/ticket").splitlines()[-1]
        for _ in range(BENCH_ROUNDS):
            for name, ours, theirs in rows:
                a, b = ours(ticket), theirs(ticket)
                found.setdefault(name, []).append((a / b, a, b))
        pair[0].must("kill $(pidof kvd-ctl)")
        lender.wait(20)
    ratios = {}
    for name, samples in found.items():
        ratios[name] = statistics.median(s[0] for s in samples)
        print(f"# {name}: {ratios[name]:.2f} (of "
              + ", ".join(f"{a:.1f}/{b:.1f} MB/s" for _, a, b in samples) + ")")
    return ratios


@case
def bench_against_perftest(pair):
    """kvd's pages against ib_write_bw and ib_read_bw of the same size, in turns"""
    ratios = bench_table(pair, [
        ("push 64 KiB pages / ib_write_bw 64 KiB (goal 0.95)",
         lambda t: kvd_bench(pair, t, "64K", 512, "push"),
         lambda t: perftest(pair, "ib_write_bw", 65536, 512)),
        ("pull 64 KiB pages / ib_read_bw 64 KiB (goal 0.95)",
         lambda t: kvd_bench(pair, t, "64K", 512, "pull"),
         lambda t: perftest(pair, "ib_read_bw", 65536, 512)),
        ("push scattered 4 KiB / ib_write_bw 4 KiB (goal 0.8)",
         lambda t: kvd_bench(pair, t, "4K", 2048, "push"),
         lambda t: perftest(pair, "ib_write_bw", 4096, 2048)),
    ])
    check(min(ratios.values()) > 0.4, str(ratios))  # what a busy machine leaves of a goal


@case
def bench_gathers(pair):
    """one request that gathers 16 rows against 16 requests of a row each"""
    ratios = bench_table(pair, [
        ("16 rows of 64 KiB in a request / in 16",
         lambda t: kvd_bench(pair, t, "64K", 256, "push", "--gather"),
         lambda t: kvd_bench(pair, t, "64K", 256, "push")),
        ("30 rows of 4 KiB in a request / in 30",
         lambda t: kvd_bench(pair, t, "4K", 1920, "push", "--gather"),
         lambda t: kvd_bench(pair, t, "4K", 1920, "push")),
    ], extra="verbs_request_ns = off")  # single requests, not packed ones
    check(min(ratios.values()) > 0.4, str(ratios))


# ---- the suite ----

SUITE = "KVD_CONFORM_RAILS=rxe0 KVD_CONFORM_WAIT_S=120"
PARTS = 4


def conform(pair, words):
    command = pair[0].start(words)
    status = command.wait(1500)
    print("# " + (command.lines[-1] if command.lines else "no output"))
    for line in command.lines:
        if "# SKIP" in line:
            print("# " + line)
    check(status == 0, "\n".join(line for line in command.lines
                                 if not line.startswith("ok"))[-3000:])


def conform_between(pair, build, part):
    """One end in the first guest, the others with a keeper in the second."""
    where = f"{pair[1].address}:{PORT}"
    keeper = pair[1].start(f"echo $$ > /tmp/keeper.pid; exec env {SUITE} "
                           f"{run_in(build, 'conform')} --keeper verbs {where}")
    try:
        keeper.wait_line("listening", 60)
        conform(pair, f"env {SUITE} KVD_CONFORM_FAR={where} "
                f"{run_in(build, 'conform')} --backend verbs --part {part} --seconds 1400")
        check(not keeper.has("ERROR:"), keeper.text)
    finally:
        pair[1].must("kill -9 $(cat /tmp/keeper.pid)")
        keeper.wait(20)


def suite(name, words, function):
    """A case for each part of the suite, so that each is over in some minutes."""
    for i in range(1, PARTS + 1):
        def run(pair, part=f"{i}/{PARTS}"):
            function(pair, part)
        run.__name__ = f"{name}_{i}"
        run.__doc__ = f"{words} (part {i} of {PARTS})"
        case(run)


suite("conform_between_guests", "the transports' suite over verbs: one end here, two there",
      lambda pair, part: conform_between(pair, "/kvd", part))
suite("conform_in_one_guest", "the same suite: three processes, one adapter",
      lambda pair, part: conform(pair, f"env {SUITE} {run_in('/kvd', 'conform')} "
                                 f"--backend verbs --part {part} --seconds 1400"))
suite("asan_conform_between_guests",
      "the suite between the guests, built with the address sanitizer",
      lambda pair, part: conform_between(pair, "/asan", part))


# ---- running ----

def newer(made, sources):
    """Is it there, and younger than all of them?"""
    try:
        age = os.stat(made).st_mtime
    except OSError:
        return False
    return all(os.stat(name).st_mtime < age for name in sources)


def make_image():
    image = os.path.abspath("build/rdma-vm")
    parts = [os.path.join(HERE, name) for name in ("image.sh", "init")]
    if not newer(os.path.join(image, "base.cpio"), parts):
        subprocess.run([parts[0], image], check=True)
    return image


def libraries(program):
    """What ldd names, as the guest will look for it."""
    out = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
    for line in out.stdout.splitlines():
        if "=> /" in line:
            yield line.split("=> ")[1].split()[0]


def put_programs(build, image, folder):
    """A build's programs and the libraries that they need, into a folder."""
    os.makedirs(folder)
    found = {}
    for name in PROGRAMS:
        path = os.path.join(build, name)
        if os.path.exists(path):
            found[os.path.basename(name)] = path
    for path in list(found.values()):
        for library in libraries(path):
            found.setdefault(os.path.basename(library), library)
    base = os.path.join(image, "root", "lib", "x86_64-linux-gnu")
    for name, path in found.items():
        if not os.path.exists(os.path.join(base, name)):
            subprocess.run(["cp", "-L", path, os.path.join(folder, name)], check=True)
            subprocess.run(["strip", "-g", os.path.join(folder, name)], check=True)


def pack_programs(build, image, folder):
    """The programs under test, in both builds, as a cpio archive."""
    tree = os.path.join(folder, "programs")
    put_programs(build, image, os.path.join(tree, "kvd"))
    if SANITIZED:
        put_programs(SANITIZED, image, os.path.join(tree, "asan"))
        subprocess.run(["cp", os.path.join(HERE, "..", "asan.supp"),
                        os.path.join(tree, "asan")], check=True)
    archive = os.path.join(folder, "programs.cpio")
    subprocess.run(f"cd {tree} && find . | {image}/root/bin/busybox cpio -o -H newc "
                   f"> {archive} 2> /dev/null", shell=True, check=True)
    return archive


PROGRAMS = ["kvd", "kvd-ctl", "conform", "demo-prefill", "demo-decode", "rdma-abort",
            "faults-engine"]
SANITIZED = os.environ.get("RDMA_VM_SANITIZED")  # another build, with the address sanitizer


def run_case(pair, function):
    began = time.monotonic()
    try:
        function(pair)
        words = ""
    except (Failure, rig.Fault) as fault:
        words = str(fault) or "failed"
    took = time.monotonic() - began
    name = f"{function.__name__}: {function.__doc__.splitlines()[0]}"
    print(f"{'not ok' if words else 'ok'} {name} ({took:.1f} s)", flush=True)
    for line in words.splitlines():
        print("#   " + line)
    return not words


def main():
    build, wanted = sys.argv[1], sys.argv[2:]
    image = make_image()
    chosen = [c for c in CASES
              if not wanted or any(words in c.__name__ for words in wanted)]
    passed = failed = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvd-rdma-vm.") as folder:
        archives = [os.path.join(image, "base.cpio"),
                    pack_programs(build, image, folder)]
        with rig.Pair(image, archives, folder) as pair:
            print(f"# two guests are up after {time.monotonic() - began:.1f} s")
            for function in chosen:
                if run_case(pair, function):
                    passed += 1
                else:
                    failed += 1
    print(f"# {time.monotonic() - began:.1f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
