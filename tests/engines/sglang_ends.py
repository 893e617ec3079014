#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How requests of SGLang end on kvd's own backend: given up in every state, with daemons
that stand still or die, on one of two ranks, before an event has happened. Its managers,
pools and processes are sglang_manager.py's.

sglang_ends.py [--nixl native] [--name NAME]
Last line: N passed, N failed."""
import logging
import os
import statistics
import sys
import threading
import time
from types import SimpleNamespace as Some

from rig import HOST, Node, Tally, equal, pause, until
from sglang_manager import (CANARY, FAILED, HEAD, PAGE, PAGES, ROWS, SUCCESS, WAITING, Group,
                            Rank, every, inside)

ABORTS, KNOWN_S, FROZEN_S, SILENT_S, CALL_S = 500, 0.1, 2.0, 6.5, 0.5
NOISE, SLOTS = 0x0bad0bad, 8


class Event:
    """Of a stream that has not come so far: the bytes are there when it has happened."""

    def __init__(self, seconds, before):
        self.at, self.before = time.monotonic() + seconds, before

    def query(self):
        if time.monotonic() < self.at:
            return False
        if self.before:
            self.before()
            self.before = None
        return True


class EndRank(Rank):
    def poll(self, room):
        return int(self.handles[room].poll())

    def poll_for(self, room, seconds):
        """As the event loop: every state shown, and the longest call."""
        seen, worst, end = set(), 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.monotonic()
            seen.add(self.poll(room))
            worst = max(worst, time.monotonic() - begin)
            pause(0.001)
        return sorted(seen), worst

    def timed(self, name, *args):
        begin = time.monotonic()
        answer = getattr(self, name)(*args)
        return time.monotonic() - begin, answer

    def wait_stages(self, room, status, seconds=30):
        """What the first stage shows for all."""
        end = time.monotonic() + seconds
        while True:
            now = int(self.handles[room].poll_pp_consensus())
            if now in (status, FAILED) or time.monotonic() > end:
                return now
            pause(0.001)

    def ended(self, room):
        """(state, when it was shown)"""
        return self.wait(room, SUCCESS), time.monotonic()

    def turn(self):
        self.manager.desk.turn(True)

    def now(self):
        return time.monotonic()

    def give_up(self, room, scribble=()):
        """As the scheduler: the pages are another request's right after."""
        begin = time.monotonic()
        self.abort(room)
        for page in scribble:
            for cells in self.cells:
                cells[page * PAGE:(page + 1) * PAGE] = NOISE
        return begin

    def restore(self, pages):
        for i, cells in enumerate(self.cells):
            pattern = self.pattern(i)
            for page in pages:
                cells[page * PAGE:(page + 1) * PAGE] = pattern[page * PAGE:(page + 1) * PAGE]

    def take(self):
        """Its pages are this rank's again: what stands in them now must stay."""
        self.kept = [cells.copy() for cells in self.cells]

    def kept_whole(self):
        return sum(int((a != b).sum()) for a, b in zip(self.cells, self.kept))

    def clean(self):
        for cells in self.cells:
            cells[...] = CANARY

    def true_bytes(self, src, dst):
        """Whether pages hold prefill's."""
        return all((cells[d * PAGE:(d + 1) * PAGE] ==
                    self.pattern(i)[s * PAGE:(s + 1) * PAGE]).all()
                   for i, cells in enumerate(self.cells) for s, d in zip(src, dst))

    def send_early(self, room, pages, last, seconds):
        """A chunk whose bytes come late."""
        for page in pages:
            for cells in self.cells:
                cells[page * PAGE:(page + 1) * PAGE] = NOISE
        self.handles[room]._early_send_wait_event = Event(seconds,
                                                          lambda: self.restore(pages))
        self.send(room, pages, last)

    def send_early_on_a_gpu(self, room, pages, last, seconds):
        """The same, with an event of a stream of the tests' driver that writes the bytes."""
        for page in pages:
            for cells in self.cells:
                cells[page * PAGE:(page + 1) * PAGE] = NOISE
        self.stream.do(lambda: (pause(seconds), self.restore(pages)))
        self.handles[room]._early_send_wait_event = self.stream.record()
        self.send(room, pages, last)
        return not self.manager.desk.parked

    def follow_a_gpu(self):
        import fake_gpu
        os.environ["KVD_CUDA_LIBRARY"] = fake_gpu.LIBRARY
        self.stream = fake_gpu.Stream(fake_gpu.Gpu())
        self.manager.desk.follow_cuda()
        return self.manager.desk.timeline is not None

    def ignore_events(self, on):
        """As an adapter without them."""
        if on:
            self.manager.desk.behind = lambda events: (None, [])
        else:
            del self.manager.desk.behind

    def send_unlisted(self, room, pages, last, seconds):
        """Page numbers that the GPU tells late."""
        import numpy as np
        numbers = np.zeros(len(pages), np.int32)

        def tell():
            numbers[:] = pages
        self.handles[room].send(numbers, None, indices_event=Event(seconds, tell))

    def left(self):
        """What this rank still has of its rooms."""
        desk = self.manager.desk
        until(lambda: desk.turn(True) or not desk.left, 10)
        return {"rooms": len(desk.live), "parked": len(desk.parked), "left": len(desk.left),
                "slots": self.manager.slots.count - self.manager.slots.free,
                "states": len(self.manager.request_status)}

    def fail_by_sibling(self, room):
        """As the scheduler's minimum over ranks makes it."""
        handle = self.handles[room]
        words = ""
        try:
            handle.failure_exception()
        except Exception as error:
            words = str(error)
        handle.ensure_abort_notified(force_arm=True)
        return words

    def refusals(self):
        """What is said to options that it does not serve."""
        from kvd.sglang import conn
        from sglang.srt.disaggregation.utils import DisaggregationMode
        said, told = {}, []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        conn.logger.addHandler(handler)
        for device in (None, "mlx5_0"):
            conn.warn_unused(Some(ib_device=device))
        conn.logger.removeHandler(handler)
        said["rails"] = told
        for option in REFUSED:
            try:
                os.environ.update({option: "1"} if option.isupper() else {})
                conn.refuse_unsupported(Some(**{option: True}), DisaggregationMode.DECODE, False)
            except ValueError as error:
                said[option] = str(error)
            finally:
                os.environ.pop(option, None)
        try:
            self.manager.match(Some(attn_tp_size=1), [{"rank_ip": HOST}])
        except ValueError as error:
            said["another backend"] = str(error)
        return said

    def memory_goes_and_comes(self):
        self.manager.deregister_buffer_to_engine()
        gone = len(self.manager._made)
        self.manager.register_buffer_to_engine()
        return gone

    def patience(self, seconds):
        """How long it waits for the other side."""
        self.manager.bootstrap_timeout = seconds

    def landed(self, room):
        """Bytes, as the daemon counts them."""
        return self.handles[room]._room.bytes

    def record_bytes(self):
        return self.manager.slots.record_bytes

    def release_safe(self, room):
        return self.manager.is_abort_release_safe(room, 1)

    def reason(self, room):
        try:
            self.handles[room].failure_exception()
        except Exception as error:
            return str(error)
        return None


class StateRank(EndRank):
    """With a window's cache of heads, and a state of three groups of channels and a whole
    part, as a hybrid model has them."""

    def make_manager(self):
        import sglang.srt.disaggregation.decode as decode
        import sglang.srt.disaggregation.prefill as prefill
        for module in (prefill, decode):
            module.setup_state_kv_args = self.with_state(module.setup_state_kv_args)
        return super().make_manager()

    def with_state(self, original):
        import numpy as np
        import torch
        from sglang.srt.disaggregation.base.conn import StateType
        from sglang.srt.disaggregation.utils import append_state_component
        tp, rank = self.spec.tp, self.spec.rank
        heads = self.spec.heads // tp
        window = [((t * 4096 + np.arange(PAGES * PAGE).reshape(-1, 1, 1)) * 64 + rank * heads +
                   np.arange(heads).reshape(1, -1, 1)) * HEAD + np.arange(HEAD)
                  for t in (7, 8)]
        channels = np.concatenate([np.arange(first + n * rank // tp, first + n * (rank + 1) // tp)
                                   for first, n in ((0, 4), (100, 4), (200, 8))])
        conv = 10000 * np.arange(SLOTS).reshape(-1, 1) + channels
        whole = 10000 * np.arange(SLOTS).reshape(-1, 1) + 500 + np.arange(6)
        self.truth = [torch.from_numpy(x.astype(np.int32)) for x in window + [conv, whole]]
        self.state = [t.clone() if self.spec.mode == "prefill" else torch.full_like(t, CANARY)
                      for t in self.truth]

        def setup(kv_args, *args, **kwargs):
            original(kv_args, *args, **kwargs)
            kv_args.swa_kv_cache_layout = "nhd"
            for kind, tensors, entry, more in (
                    (StateType.SWA, self.state[:2], PAGE, {}),
                    (StateType.MAMBA, self.state[2:], 1, dict(
                        dim_per_tensor=[16 // tp, 0], conv_shard_groups=[[4, 4, 8], None],
                        slice_outer_counts=[1, 1]))):
                append_state_component(
                    kv_args, kind, [t.data_ptr() for t in tensors], [t.nbytes for t in tensors],
                    [t[0].nbytes * entry for t in tensors], **more)
        return setup

    def metadata_with(self, room, pages, row, state, prefix):
        import numpy as np
        self.meta.clear_slot(row)
        self.handles[room].send_metadata(np.array(pages, np.int32), row, state,
                                         decode_prefix_len=prefix)

    def send_with(self, room, pages, state):
        import numpy as np
        self.handles[room].send(np.array(pages, np.int32), state)

    def state_bytes(self, pages):
        """Of so many pages of the window, and of one slot."""
        return sum(t[0].nbytes for t in self.state[2:]) + \
            pages * PAGE * sum(t[0].nbytes for t in self.state[:2])

    def state_wrong(self, pages, slot):
        """Cells that are not what they must be: [(source, destination page)], slots."""
        wanted = [t.clone().fill_(CANARY) for t in self.truth]
        for t in (0, 1):
            for s, d in pages:
                wanted[t][d * PAGE:(d + 1) * PAGE] = self.truth[t][s * PAGE:(s + 1) * PAGE]
        for t in (2, 3):
            wanted[t][slot[1]] = self.truth[t][slot[0]]
        return [int((a != b).sum()) for a, b in zip(self.state, wanted)]


def control(what, check, *args):
    """What breaks the property that a check is about must break the check."""
    try:
        check(*args)
    except AssertionError:
        return
    raise RuntimeError("not noticed: " + what)


NOTHING_LEFT = {"rooms": 0, "parked": 0, "left": 0, "slots": 0, "states": 0}


def nothing_left(group):
    equal([r.left() for r in group.prefill + group.decode], [NOTHING_LEFT] * 2, "left over")


REFUSED = {"enable_hisparse": "--enable-hisparse",
           "enable_unified_memory": "--enable-unified-memory",
           "enable_pd_role_switch": "--enable-pd-role-switch",
           "SGLANG_DISAGG_STAGING_BUFFER": "SGLANG_DISAGG_STAGING_BUFFER"}
STATES = ("alone", "opened", "bound", "begun", "part", "all")


def reach(group, room, state, src, dst, row):
    """Both sides as far as this state; who is there."""
    p, d = group.prefill[0], group.decode[0]
    if state == "alone":
        who = (p, d)[room // len(STATES) % 2]
        (p.sender if who is p else d.receiver)(room)
        return [who]
    p.sender(room)
    d.receiver(room)
    if state == "opened":
        return [p, d]
    d.metadata(room, dst, row)
    equal(p.wait(room, WAITING), WAITING, "sender")
    if state == "bound":
        return [p, d]
    p.begin(room, len(src), row)
    if state != "begun":
        p.send(room, src[:1], False)
    if state == "all":
        p.send(room, src[1:], True)
    return [p, d]


def given_up(group, room, state, times):
    """One request that one side gives up; times: until both know."""
    p, d = group.prefill[0], group.decode[0]
    src, dst = [3 + room % 20, 40 + room % 20], [70 + room % 40, 115 + room % 40]
    row = room % ROWS
    there = reach(group, room, state, src, dst, row)
    who = there[room // len(STATES) % len(there)]
    begin = who.give_up(room, src if who is p else ())
    if state == "opened" and who is p:  # a receiver without pages has told nobody of itself
        begin = d.now()
        d.metadata(room, dst, row)
    shown = [rank.ended(room) for rank in there]
    states = [s for s, _ in shown]
    if state != "all":
        equal(states, [FAILED] * len(there), "states of %s room %d" % (state, room))
    if d in there and states[-1] == SUCCESS:  # it was there before
        assert d.true_bytes(src, dst), "room %d: wrong bytes in a room that succeeded" % room
    times.append(max(when for _, when in shown) - begin)
    for rank, shown_state in zip(there, states):
        if shown_state == FAILED:
            words = rank.reason(room)
            assert "Aborted by AbortReq" in words, "room %d: %s" % (room, words)
    if d in there:
        d.take()
        if state in ("part", "all"):
            pause(0.01)
        equal(d.kept_whole(), 0, "cells written after the end of room %d" % room)
    for rank in there:
        rank.clear(room)
    p.restore(src)


def aborts(group, tally):
    times = []
    for room in range(1, ABORTS + 1):
        given_up(group, room, STATES[room % len(STATES)], times)
    times.sort()
    worst = times[-1]
    tally.note("aborts known after", "%.1f ms median, %.1f ms p99, %.1f ms worst of %d" % (
        1e3 * statistics.median(times), 1e3 * times[len(times) * 99 // 100], 1e3 * worst,
        len(times)))
    assert times[len(times) * 99 // 100] < KNOWN_S, "p99 %.0f ms" % (1e3 * times[-6])
    nothing_left(group)
    not_given_up(group)
    group.decode[0].clean()
    group.room(9001, [3, 4], [5, 6])


def not_given_up(group):
    """The controls of it: a request that goes on is not failed, is seen in what is left, and
    writes pages that decode took without saying so."""
    p, d = group.prefill[0], group.decode[0]
    reach(group, 9002, "part", [3, 4], [60, 61], 3)
    shown = [r.wait(9002, SUCCESS, KNOWN_S) for r in (p, d)]
    control("a request that nobody gave up", equal, shown, [FAILED] * 2, "states")
    control("a room that is open", nothing_left, group)
    d.take()
    p.send(9002, [4], True)
    equal([r.ended(9002)[0] for r in (p, d)], [SUCCESS] * 2, "room")
    control("pages that were written", equal, d.kept_whole(), 0, "cells")
    every([p, d], "clear", 9002)


def too_late(group):
    """Prefill waits its time and no longer: who comes a second later gets an error and no
    byte; who is in decode's queue for most of it gets all."""
    p, d = group.prefill[0], group.decode[0]
    try:
        p.patience(1.0)
        p.sender(9110)
        equal(p.ended(9110)[0], FAILED, "a sender that nobody came to")
        p.give_up(9110, [3, 4])
        pause(1.0)
        d.receiver(9110)
        d.clean()
        d.take()
        d.metadata(9110, [60, 61], 3)
        equal(d.ended(9110)[0], FAILED, "a receiver that came late")
        words = d.reason(9110)
        assert "within" in words or "timed out" in words or "ETIMEOUT" in words, words
        equal(d.kept_whole(), 0, "cells that were written")
        every([p, d], "clear", 9110)
        p.restore([3, 4])
        p.patience(4.0)
        p.sender(9111)
        d.receiver(9111)
        seen, _ = d.poll_for(9111, 3.0)
        equal(seen, [WAITING], "a receiver in the queue")
        d.metadata(9111, [62, 63], 3)
        equal(p.wait(9111, WAITING), WAITING, "sender")
        p.begin(9111, 2, 3)
        p.send(9111, [3, 4], True)
        equal([r.ended(9111)[0] for r in (p, d)], [SUCCESS] * 2, "room")
        assert d.true_bytes([3, 4], [62, 63]), "bytes"
        control("bytes that came", equal, d.kept_whole(), 0, "cells")
        every([p, d], "clear", 9111)
    finally:
        p.patience(8)


def late_decode(group):
    """Prefill gave it up before decode was there: it hears at once, not at a timeout."""
    p, d = group.prefill[0], group.decode[0]
    p.sender(9100)
    p.abort(9100)
    equal(p.ended(9100)[0], FAILED, "sender")
    p.turn()  # of other requests
    d.receiver(9100)
    begin = d.now()
    d.metadata(9100, [7], 2)
    state, when = d.ended(9100)
    equal(state, FAILED, "receiver")
    assert when - begin < KNOWN_S and "Aborted" in d.reason(9100)
    every([p, d], "clear", 9100)
    return "%.1f ms" % (1e3 * (when - begin))


def frozen(group, nodes, who):
    """Every call and every queue while daemons stand still; then all goes on."""
    p, d = group.prefill[0], group.decode[0]
    rooms = {s: 9200 + i + 10 * who for i, s in enumerate(STATES[1:])}
    src, dst = [3, 4], {r: [60 + 3 * i, 61 + 3 * i] for i, r in enumerate(rooms.values())}
    for state, room in rooms.items():
        reach(group, room, state, src, dst[room], room % ROWS)
    fresh = 9290 + who
    still = [n.daemon for i, n in enumerate(nodes) if who >> i & 1]
    for daemon in still:
        daemon.freeze()
    try:
        took = [p.timed("sender", fresh)[0], d.timed("receiver", fresh)[0],
                d.timed("metadata", fresh, [90], 0)[0],
                p.timed("begin", rooms["bound"], 2, 1)[0],
                p.timed("send", rooms["begun"], src[:1], False)[0]]
        assert max(took) < CALL_S, "a call took %.2f s" % max(took)
        for room in list(rooms.values()) + [fresh]:
            for rank in (p, d):
                seen, worst = rank.poll_for(room, FROZEN_S / 2 / (len(rooms) + 1))
                assert FAILED not in seen and worst < CALL_S, (room, seen, worst)
                if rank is p and room in (fresh, rooms["opened"]):
                    assert set(seen) <= {1, 2}, (room, seen)
                if rank is d and room == rooms["opened"]:
                    equal(seen, [WAITING], "a receiver without pages")
    finally:
        for daemon in still:
            daemon.thaw()
    d.metadata(rooms["opened"], dst[rooms["opened"]], rooms["opened"] % ROWS)
    for state, room in rooms.items():
        if state == "opened":
            equal(p.wait(room, WAITING), WAITING, "opened room")
            p.begin(room, 2, room % ROWS)
        if state in ("opened", "bound"):
            p.send(room, src[:1], False)
        if state != "all":
            p.send(room, src[1:], True)
        equal([r.ended(room)[0] for r in (p, d)], [SUCCESS] * 2, "%s room %d" % (state, room))
        assert d.true_bytes(src, dst[room]), "bytes of the %s room" % state
    equal(p.wait(fresh, WAITING), WAITING, "the room that was opened meanwhile")
    p.begin(fresh, 1, 0)
    p.send(fresh, [9], True)
    equal([r.ended(fresh)[0] for r in (p, d)], [SUCCESS] * 2, "room %d" % fresh)
    for room in list(rooms.values()) + [fresh]:
        every([p, d], "clear", room)


def silent(group, nodes):
    """So long that the engines themselves miss their daemons: what a queue does not know is
    not shown, and nothing is given back. Then they take each other for dead, or not."""
    p, d = group.prefill[0], group.decode[0]
    rooms = {s: 9300 + i for i, s in enumerate(STATES[1:])}
    for i, (state, room) in enumerate(rooms.items()):
        reach(group, room, state, [3, 4], [60 + 3 * i, 61 + 3 * i], room % ROWS)
    for node in nodes:
        node.daemon.expect("peer")
        node.daemon.freeze()
    try:
        pause(SILENT_S)
        for state, room in rooms.items():
            seen, _ = p.poll_for(room, 0.1)
            assert set(seen) <= ({1, 2} if state in ("opened", "bound") else {2, 3}), (state, seen)
            seen, _ = d.poll_for(room, 0.1)
            assert set(seen) <= ({2} if state == "opened" else {2, 3}), (state, seen)
    finally:
        for node in nodes:
            node.daemon.thaw()
    for room in rooms.values():
        for rank in (p, d):
            rank.give_up(room)
            rank.ended(room)
        every([p, d], "clear", room)
    assert any(again(group, 9310 + i) for i in range(3)), "no request works after it"


def frozen_abort(group, nodes):
    """Given up while the own daemon stands still: pages stay until it is still for sure."""
    p, d = group.prefill[0], group.decode[0]
    reach(group, 9400, "part", [3, 4], [60, 61], 3)
    nodes[1].daemon.freeze()
    try:
        took = d.timed("abort", 9400)[0]
        assert took < CALL_S, "abort() took %.2f s" % took
        seen, _ = d.poll_for(9400, 0.5)
        assert FAILED not in seen, "given back while the daemon may write: %s" % seen
        assert not d.release_safe(9400)
    finally:
        nodes[1].daemon.thaw()
    equal([r.ended(9400)[0] for r in (p, d)], [FAILED] * 2, "room")
    assert until(lambda: d.release_safe(9400), 5)
    every([p, d], "clear", 9400)
    reach(group, 9401, "part", [3, 4], [62, 63], 3)
    nodes[0].daemon.freeze()
    thaw = threading.Timer(1.0, nodes[0].daemon.thaw)
    thaw.start()
    took = p.timed("abort", 9401)[0]
    thaw.join()
    assert took > 0.9, "prefill's pages were given back after %.2f s" % took
    equal([r.ended(9401)[0] for r in (p, d)], [FAILED] * 2, "room")
    every([p, d], "clear", 9401)


def killed(group, nodes):
    """The room fails on both sides; the next request works once there is a daemon again."""
    p, d = group.prefill[0], group.decode[0]
    for i, node in enumerate(nodes):
        room = 9500 + i
        reach(group, room, "part", [3, 4], [60, 61], 3)
        for other in nodes:
            other.daemon.expect("peer")
            other.daemon.expect("room")
        node.daemon.proc.kill()
        node.daemon.wait()
        equal([r.ended(room)[0] for r in (p, d)], [FAILED] * 2, "rooms of a killed daemon")
        tokens = [r.reason(room) for r in (p, d)]
        assert all(tokens), tokens
        node.daemon.start().wait_ready()
        for _ in range(5):  # what decode knew of prefill is out of date once
            room += 10
            if again(group, room):
                break
            pause(0.5)
        else:
            raise AssertionError("no request works after the daemon's restart")


def again(group, room):
    p, d = group.prefill[0], group.decode[0]
    p.sender(room)
    if d.receiver(room) == FAILED:
        print("      room %d: %s" % (room, d.reason(room)))
        p.abort(room)
        return False
    d.metadata(room, [62, 63], 3)
    fine = p.wait(room, WAITING, 15) == WAITING
    if fine:
        p.begin(room, 2, 4)
        p.send(room, [5, 6], True)
        fine = [r.ended(room)[0] for r in (p, d)] == [SUCCESS] * 2 and \
            d.true_bytes([5, 6], [62, 63])
    else:
        for rank in (p, d):
            rank.give_up(room)
            print("      room %d: %s, %s" % (room, rank.ended(room)[0], rank.reason(room)))
    every([p, d], "clear", room)
    return fine


def resumed(group):
    """The engine's memory is given back and comes again; what moved is ended before."""
    p, d = group.prefill[0], group.decode[0]
    reach(group, 9650, "part", [10, 11], [60, 61], 3)
    equal([r.memory_goes_and_comes() for r in (p, d)], [0, 0], "pools")
    equal([r.ended(9650)[0] for r in (p, d)], [FAILED] * 2, "room")
    every([p, d], "clear", 9650)
    d.clean()
    p.restore([3, 4])
    assert again(group, 9651), "no request works after it"


def early(group):
    """The bytes come a second after the chunk was given, with its event."""
    p, d = group.prefill[0], group.decode[0]
    reach(group, 9600, "begun", [10, 11], [60, 61], 3)
    begin = time.monotonic()
    p.send_early(9600, [10], False, 1.0)
    p.send(9600, [11], True)
    equal([r.ended(9600)[0] for r in (p, d)], [SUCCESS] * 2, "room")
    assert time.monotonic() - begin >= 1.0, "it did not wait"
    assert d.true_bytes([10, 11], [60, 61]), "the bytes before the event were sent"
    every([p, d], "clear", 9600)
    reach(group, 9601, "begun", [10, 11], [60, 61], 3)
    p.send_unlisted(9601, [10], False, 0.2)
    p.send(9601, [11], True)
    equal([r.ended(9601)[0] for r in (p, d)], [SUCCESS] * 2, "room with late page numbers")
    assert d.true_bytes([10, 11], [60, 61]), "page numbers were read before the event"
    every([p, d], "clear", 9601)


def early_on_a_gpu(group):
    """The daemon waits, not the scheduler: nobody calls prefill until decode has it all. An
    adapter that ignores the event is caught."""
    p, d = group.prefill[0], group.decode[0]
    assert p.follow_a_gpu(), "no timeline"
    for room in (9610, 9611):
        reach(group, room, "begun", [10, 11], [60, 61], 3)
        begin = time.monotonic()
        assert p.send_early_on_a_gpu(room, [10], False, 1.0), "the chunk was not posted at once"
        p.send(room, [11], True)
        equal(d.ended(room)[0], SUCCESS, "decode's room")
        took = time.monotonic() - begin
        equal(p.ended(room)[0], SUCCESS, "prefill's room")
        true = d.true_bytes([10, 11], [60, 61])
        every([p, d], "clear", room)
        d.clean()
        if room == 9610:
            assert took >= 1.0 and true, "sent after %.3f s, true bytes: %s" % (took, true)
            p.ignore_events(True)
    p.ignore_events(False)
    assert took < 1.0 and not true, "an ignored event goes unseen: %.3f s" % took


def sibling(name, nodes):
    """One of two ranks fails: the other's pages stay until its own room is still. In the
    control none fails, and the same chunk is written."""
    with Group(name, nodes, 2, 2, 4, EndRank) as group:
        for room in (3, 1):
            group.open(room, [90, 91], 3)
            if room == 1:
                break
            every(group.prefill, "begin", 3, 2, 3)
            every(group.prefill, "send", 3, [8], False)
            every(group.decode, "take")
            every(group.prefill, "send", 3, [9], True)
            group.all_are(group.decode, 3, SUCCESS)
            control("a room that none of them stopped", equal,
                    every(group.decode, "kept_whole"), [0, 0], "cells")
            group.all_are(group.prefill, 3, SUCCESS)
            group.clear(3)
        every(group.prefill, "begin", 1, 2, 3)
        every(group.prefill, "send", 1, [8], False)
        nodes[1].daemon.freeze()
        try:
            first, second = group.decode
            second.fail_by_sibling(1)
            pause(0.2)
            assert not second.release_safe(1), "released while its daemon may still write"
        finally:
            nodes[1].daemon.thaw()
        assert until(lambda: second.release_safe(1), 5)
        first.fail_by_sibling(1)
        assert until(lambda: first.release_safe(1), 5)
        every(group.decode, "take")
        every(group.prefill, "send", 1, [9], True)
        pause(0.05)
        equal(every(group.decode, "kept_whole"), [0, 0], "cells written after the release")
        # the scheduler sees the minimum over its ranks: each of them gives it up
        equal([r.ended(1)[0] for r in group.prefill], [FAILED] * 2, "prefill")
        every(group.decode, "clean")
        group.room(2, [3, 4], [5, 6])


def states(name, nodes, prefill, decode):
    """Window and state beside the cache, behind a prefix, cut by heads and channels."""
    with Group(name, nodes, prefill, decode, 4, StateRank) as group:
        every(group.decode, "receiver", 1)
        every(group.prefill, "sender", 1)
        every(group.decode, "metadata_with", 1, [60, 61, 62], 3, [[31, 33], [[5]]], 2 * PAGE)
        group.all_are(group.prefill, 1, WAITING)
        every(group.prefill, "begin", 1, 3, 3)
        every(group.prefill, "send", 1, [4], False)
        every(group.prefill, "send_with", 1, [7, 6], [[21, 20], [[2]]])
        group.all_are(group.prefill, 1, SUCCESS)
        group.all_are(group.decode, 1, SUCCESS)
        every(group.decode, "expect", [4, 7, 6], [60, 61, 62])
        group.intact()
        equal(every(group.decode, "state_wrong", [(21, 31), (20, 33)], (2, 5)),
              [[0] * 4] * decode, "cells of state that are wrong")
        for pages, slot in (([(21, 31)], (2, 5)), ([(21, 31), (20, 33)], (2, 6))):
            control("one page more, another slot", equal, every(
                group.decode, "state_wrong", pages, slot), [[0] * 4] * decode, "cells")
        wanted = [3 * r.page_bytes() + r.state_bytes(2) + r.record_bytes()
                  for r in group.decode]
        equal(every(group.decode, "landed", 1), wanted, "bytes of pages, window and state")
        group.clear(1)


def refused(group, name, nodes):
    said = group.decode[0].refusals()
    for what, words in REFUSED.items():
        assert words in said.get(what, ""), (what, said.get(what))
    assert "--disaggregation-transfer-backend kvd" in said["another backend"]
    assert len(said["rails"]) == 1 and "mlx5_0 has no effect" in said["rails"][0], said["rails"]
    with Group(name, nodes, 2, 3, 6, EndRank) as uneven:
        equal(every(uneven.decode, "receiver", 1), [FAILED] * 3, "2 ranks to 3")
        assert "one must divide the other" in uneven.decode[0].reason(1)


def stages(name, nodes):
    """Two pipeline stages on prefill, one on decode: each sends its layers, the last one the
    metadata; what one of them sees, all do."""
    with Group(name, nodes, 1, 1, 2, EndRank, 2) as group:
        (first, second), d = group.prefill, group.decode[0]
        for room in (1, 2, 3):
            src, dst = [room, room + 10], [50 + room, 60 + room]
            d.receiver(room)
            every(group.prefill, "sender", room)
            equal(first.wait_stages(room, WAITING, 0.2), 1, "before decode has pages")
            d.metadata(room, dst, room)
            equal(first.wait_stages(room, WAITING), WAITING, "all stages")
            every(group.prefill, "begin", room, 2, room)
            if room == 2:
                second.abort(room)
                equal(first.wait_stages(room, FAILED), FAILED, "what the second stage gave up")
                equal([r.ended(room)[0] for r in (first, d)], [FAILED] * 2, "the others")
                d.clear(room)
                every(group.prefill, "clear", room)
                continue
            every(group.prefill, "send", room, src[:1], False)
            first.send(room, src[1:], True)
            if room == 1:
                control("a stage that has not sent its last chunk", equal,
                        d.wait(room, SUCCESS, KNOWN_S), SUCCESS, "decode")
            second.send(room, src[1:], True)
            group.all_are(group.prefill, room, SUCCESS)
            group.all_are(group.decode, room, SUCCESS)
            equal(d.row(room)[:2], [room, room % 1000], "the metadata row")
            d.expect(src, dst)
            group.intact()
            group.clear(room)


def main():
    args = inside(__doc__, "sglang-ends", ["native"])
    tally = Tally()
    with Node(args.nixl, "p") as p, Node(args.nixl, "d") as d:
        nodes = (p, d)
        with Group(args.name, nodes, kind=EndRank) as group:
            tally.check("%d requests given up in every state" % ABORTS, aborts, group, tally)
            tally.check("prefill gave it up before decode was there", late_decode, group)
            tally.check("decode comes too late, and nearly too late", too_late, group)
            for who, name in ((1, "prefill's daemon"), (2, "decode's daemon"), (3, "both")):
                tally.check("%s frozen in every queue" % name, frozen, group, nodes, who)
            tally.check("daemons silent in every queue", silent, group, nodes)
            tally.check("given up while the daemon is frozen", frozen_abort, group, nodes)
            tally.check("an event that comes a second late", early, group)
            tally.check("a CUDA event that comes a second late", early_on_a_gpu, group)
            tally.check("what is refused is named", refused, group, args.name, nodes)
            tally.check("memory released and resumed", resumed, group)
            tally.check("nothing is left of them", nothing_left, group)
            tally.check("daemons killed", killed, group, nodes)
        tally.check("one of two ranks fails", sibling, args.name, nodes)
        for tp in ((1, 1), (2, 1), (1, 2)):
            tally.check("window and state, prefill TP %d, decode TP %d" % tp, states, args.name,
                        nodes, *tp)
        tally.check("prefill PP 2, decode PP 1", stages, args.name, nodes)
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
