#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl trace: both sides of a room on one clock, as text and for Perfetto; what
engines call their requests, on both sides and in the log."""
import json
import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, run  # noqa: E402
import kvd_engine  # noqa: E402
from kvd_engine import (Cache, Engine, FAILED, SUCCESS, TRANSFERRING, WAITING,  # noqa: E402
                        open_pull, open_push)

SRC, DST, TOKENS = [5, 6, 7, 60, 1], [9, 3, 33, 2, 50], 77
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Pair(kvd_engine.Pair):
    """Two daemons of one run directory, as on one host."""

    def __init__(self, more=""):
        self.tmp = tempfile.TemporaryDirectory(prefix="kvd-test-")
        super().__init__([Daemon(more, name=name, run_dir=self.tmp.name)
                          for name in ("p0", "d0")], ("vllm", "sglang"))

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.tmp.cleanup()

    def ctl(self, name, *args, alone=False):
        """alone: as if the other daemon were on another host."""
        env = dict(os.environ, KVD_RUN_DIR="/nonexistent" if alone else self.tmp.name)
        done = subprocess.run(
            [BUILD + "/kvd-ctl", "--socket", "%s/%s.sock" % (self.tmp.name, name)]
            + list(args), capture_output=True, text=True, timeout=DEADLINE_S, env=env)
        return done.returncode, done.stdout, done.stderr

    def shown(self, name, *args, **more):
        status, out, err = self.ctl(name, *args, **more)
        assert status == 0 and not err, (args, out, err)
        return out

    def file(self, name, text=None):
        path = os.path.join(self.tmp.name, name)
        if text is not None:
            with open(path, "w") as out:
                out.write(text)
        return path

    def json(self, name):
        with open(self.file(name)) as text:
            return json.load(text)

    def open(self, room, role, **more):
        engine, cache = ((self.prefill, self.src) if role in ("send", "offer")
                         else (self.decode, self.dst))
        engine.cmd("room.open", room=str(room), role=role, pool=cache.pool, **more)

    def push(self, room):
        self.src.fill(SRC, TOKENS)
        open_push(self.prefill, self.decode, self.src, self.dst, room, SRC, DST, TOKENS)
        self.decode.until(room, "recv", SUCCESS)
        self.prefill.until(room, "send", SUCCESS)


def steps(out):
    """(ms, daemon, role, event) of the last table."""
    lines = out.split("\n\n")
    table = next(t for t in lines if t.startswith("      MS") or " +MS" in t.split("\n")[0])
    head = table.split("\n")[0]
    at = [head.index(w) for w in ("DAEMON", "ROLE", "EVENT", "PARTY")]
    return [(float(row.split()[0]), row[at[0]:at[1]].strip(), row[at[1]:at[2]].strip(),
             row[at[2]:at[3]].strip()) for row in table.split("\n")[1:] if row]


def in_order(found, wanted):
    """Each of `wanted` (daemon, role, event) comes, in this order."""
    rest = iter(found)
    for want in wanted:
        assert any(step[1:] == want for step in rest), (want, found)


PUSHED = [("d0", "recv", "info sent"), ("p0", "send", "info received"),
          ("p0", "send", "chunk given"), ("p0", "send", "chunk planning"),
          ("p0", "send", "chunk queued"), ("p0", "send", "chunk posted"),
          ("d0", "recv", "chunk arrived"), ("d0", "recv", "chunk admitted"),
          ("d0", "recv", "chunk first byte"), ("d0", "recv", "chunk moved"), ("d0", "recv", "done sent"),
          ("p0", "send", "done received"), ("p0", "send", "success")]


def push_is_seen_from_both_sides():
    with Pair() as p:
        p.push(42)
        out = p.shown("d0", "trace", "42", "--pages")
        found = steps(out)
        in_order(found, [("d0", "recv", "opened"), ("d0", "recv", "pool known")])
        in_order(found, PUSHED)
        times = [step[0] for step in found]
        assert times[0] == 0 and times == sorted(times), times
        sent = [s[3] for s in found if s[1] == "p0" and s[3].startswith("chunk")]
        assert sent[-4:] == ["chunk posted", "chunk first byte", "chunk moved",
                             "chunk over"], found
        assert out.count(" longest ") == 1 and "missing" not in out, out
        assert " 0-77 " in out and "9,3,33,2,50" in out, out
        # the other daemon tells the same
        assert [s[1:] for s in steps(p.shown("p0", "trace", "42"))] == [s[1:] for s in found]


def pull_and_ended_rooms_are_traced():
    with Pair() as p:
        p.src.fill(SRC, TOKENS)
        open_pull(p.prefill, p.decode, p.src, p.dst, 7, SRC, DST, TOKENS)
        p.decode.until(7, "pull", SUCCESS)
        p.prefill.until(7, "offer", SUCCESS)
        p.decode.cmd("room.close", room="7")
        p.prefill.cmd("room.close", room="7")
        out = p.shown("d0", "trace", "7")
        in_order(steps(out), [("d0", "pull", "info sent"), ("p0", "offer", "info received"),
                              ("d0", "pull", "ack received"), ("d0", "pull", "chunk moved"),
                              ("d0", "pull", "done sent"), ("p0", "offer", "done received"),
                              ("d0", "pull", "success")])
        # a number that is used again joins its own rooms only
        p.push(7)
        out = p.shown("d0", "trace", "7")
        in_order(steps(out), PUSHED)
        assert "pull" not in out and "1 more room of this number" in out, out
        assert "offer" in p.shown("d0", "trace", "7", "--role", "pull")


def hanging_room_is_shown_until_now():
    with Pair() as p:
        p.open(5, "recv", sources=[p.prefill.endpoint])
        p.decode.cmd("room.bind", room="5", views={"kv": {"pages": [3, 4]}})
        p.open(5, "send")
        p.decode.until(5, "recv", WAITING)
        out = p.shown("d0", "trace", "5")
        assert {"now", "opened"} <= {s[3] for s in steps(out)}, out
        assert "the next chunk of peer p0" in out, out
        p.prefill.cmd("room.abort", room="5", reason="enough")
        p.decode.until(5, "recv", FAILED)
        p.prefill.until(5, "send", FAILED)
        out = p.shown("d0", "trace", "5")
        in_order(steps(out), [("p0", "send", "aborting"), ("p0", "send", "abort sent"),
                              ("d0", "recv", "abort received"), ("d0", "recv", "failed")])
        assert "enough" in out and not [s for s in steps(out) if s[3] == "now"], out


def unopened_other_side_is_reported():
    with Pair() as p:
        p.open(5, "recv", sources=[p.prefill.endpoint])
        p.decode.cmd("room.bind", room="5", views={"kv": {"pages": [3, 4]}})
        p.decode.until(5, "recv", WAITING)
        wants = "an engine here to open it, as requested by peer d0"
        end = time.monotonic() + DEADLINE_S
        while not p.prefill.cmd("room.list", all=True, state="unopened")["rooms"]:
            assert time.monotonic() < end
        out = p.shown("d0", "trace", "5")
        assert "The other side, p0, is unopened: it waits for " + wants in out, out
        assert "missing" not in out, out
        assert "events are missing" in p.shown("d0", "trace", "5", alone=True)
        # on the side where it is to be opened
        status, out, err = p.ctl("p0", "trace", "5")
        assert status == 1 and "room 5: unopened: it waits for " + wants in err, err
        status, _, err = p.ctl("p0", "trace", "6")
        assert status == 1 and "room 6: not open here" in err, err


def other_host_is_joined_and_its_clock_aligned():
    with Pair() as p:
        p.push(9)
        truth = steps(p.shown("d0", "trace", "9"))
        alone = p.shown("d0", "trace", "9", alone=True)
        assert {s[1] for s in steps(alone)} == {"d0"}, alone
        assert "kvd-ctl --json trace 9 > FILE, then pass --join FILE" in alone, alone
        theirs = json.loads(p.shown("p0", "--json", "trace", "9", alone=True))
        side = theirs["sides"][0]
        side["boot_id"] = "0" * 32
        for obj in side["rooms"] + [side]:
            for member in {"opened_ns", "clock_ns"} & obj.keys():
                obj[member] = str(int(obj[member]) + 5000000000)
        joined = p.shown("d0", "trace", "9", "--join",
                         p.file("p0.json", json.dumps(theirs)), alone=True)
        assert "aligned to within " in joined, joined
        error = float(joined.split("aligned to within ")[1].split(" ms")[0])
        found = steps(joined)
        assert len(found) == len(truth), (found, truth)
        left = list(truth)
        for step in found:
            near = [t for t in left if t[1:] == step[1:]
                    and abs(t[0] - step[0]) <= 2 * error + 0.01]
            assert near, (step, left, error)
            left.remove(near[0])
        side["rooms"][0].update(role="send\x1b[2J", left_out=7, views_cut=True)
        joined = p.shown("d0", "trace", "9", "--join",
                         p.file("p0.json", json.dumps(theirs)), alone=True)
        assert "send?[2J: 7 events omitted" in joined and "\x1b" not in joined, joined
        assert "send?[2J: more views or receivers were omitted" in joined, joined
        for text in ("", "[]", '{"sides":[{"rooms":[{"events":[7,{"what":3}]}]},4]}'):
            status, out, err = p.ctl("d0", "trace", "9", "--join", p.file("bad", text),
                                     alone=True)
            assert status in (0, 1) and "core" not in err, (text, out, err)
        hostile_figures_are_refused(p, theirs)
        status, out, err = p.ctl("d0", "trace", "9", "--join", "/nonexistent")
        assert status == 1 and "/nonexistent" in err, err


def hostile_figures_are_refused(p, theirs):
    text = json.dumps(theirs)
    for where, member, value in (
            ("event", "ns", "1e300"), ("event", "ns", "-1"), ("event", "ns", "1e999"),
            ("event", "ns", '"18446744073709551615"'), ("event", "party", "1e10"),
            ("event", "seq", "-1e300"), ("event", "bytes", '"1x"'),
            ("event", "generation", '""'), ("room", "opened_ns", '"9223372036854775807"'),
            ("room", "now_ns", "9e18"), ("room", "generation", '"18446744073709551616"'),
            ("side", "unix_ns", '"-5"'), ("side", "unix_ns", '"1"'),
            ("side", "clock_ns", '"9223372036854775807"'), ("side", "clock_ns", "true")):
        bad = json.loads(text)
        side = bad["sides"][0]
        obj = {"side": side, "room": side["rooms"][0],
               "event": side["rooms"][0]["events"][0]}[where]
        obj[member] = "HERE"
        path = p.file("bad", json.dumps(bad).replace('"HERE"', value))
        status, out, err = p.ctl("d0", "trace", "9", "--join", path, alone=True)
        assert status == 1 and "trace of p0: %s is" % member in err, (member, value, err)
        assert "kvd-ctl --json trace" in err or "18 years" in err, err


def request_id_of_engine_is_shown_on_both_sides():
    with Pair("[daemon]\nlog_rooms = all\n") as p:
        p.open(3, "recv", sources=[p.prefill.endpoint], request_id="cmpl-8a.1/2",
               traceparent=TRACEPARENT)
        p.open(3, "send")
        p.decode.cmd("room.bind", room="3", views={"kv": {"pages": [3]}})
        p.prefill.until(3, "send", WAITING)
        here = p.decode.cmd("room.show", room="3")
        there = p.prefill.cmd("room.show", room="3")
        for record, by_peer in (here, False), (there, True):
            assert record["request_id"] == "cmpl-8a.1/2", record
            assert record["traceparent"] == TRACEPARENT, record
            assert record["named_by_peer"] is by_peer, record
        p.decode.cmd("room.abort", room="3")
        p.prefill.until(3, "send", FAILED)
        p.decode.until(3, "recv", FAILED)
        for d in p.a, p.b:
            line = next(x for x in d.log().splitlines() if "room 3: failed" in x)
            assert 'request="cmpl-8a.1/2" traceparent="%s"' % TRACEPARENT in line, line
        p.decode.cmd("room.close", room="3")
        past = json.loads(p.shown("d0", "--json", "history"))["rooms"]
        assert past[0]["request_id"] == "cmpl-8a.1/2", past
        assert "cmpl-8a.1/2" in p.shown("d0", "trace", "3")
        # an engine's own name stays
        p.open(4, "offer", views={"kv": {"pages": [3]}}, request_id="mine")
        p.open(4, "pull", views={"kv": {"pages": [3]}}, sources=[p.prefill.endpoint],
               request_id="theirs")
        p.decode.until(4, "pull", SUCCESS)
        assert p.prefill.cmd("room.show", room="4")["request_id"] == "mine"


def invalid_names_are_refused():
    bad = {"request_id": ["", "x" * 129, "a b", "tab\t", 'quo"te', "back\\slash", "é", "\x7f"],
           "traceparent": ["", "garbage", TRACEPARENT + "0", TRACEPARENT[:-1],
                           TRACEPARENT.upper(), TRACEPARENT.replace("-", "_"),
                           "ff" + TRACEPARENT[2:], "00-" + "0" * 32 + TRACEPARENT[35:],
                           TRACEPARENT[:36] + "0" * 16 + "-01", "\n" * 55]}
    with Pair() as p:
        for field, texts in bad.items():
            for text in texts:
                code = "ERANGE" if (field == "request_id" and len(text) in (0, 129)) or (
                    field == "traceparent" and len(text) != 55) else "EINVAL"
                message = p.prefill.refused(code, "room.open", room="1", role="send",
                                            pool=p.src.pool, **{field: text})
                assert message.startswith(field + ":"), (text, message)
        assert json.loads(p.shown("p0", "--json", "rooms"))["total"] == 0


def only_own_rooms_are_shown():
    with Pair() as p:
        p.push(11)
        stranger = Engine(p.b, "stranger")
        assert stranger.cmd("room.trace", room="11")["rooms"] == []
        assert len(p.decode.cmd("room.trace", room="11")["rooms"]) == 1
        stranger.close()
        status, out, err = p.ctl("d0", "trace", "12")
        assert status == 1 and "room 12: not open here" in err, err


def room_with_many_chunks_keeps_its_first_and_its_end():
    with Pair() as p:
        p.src.fill(SRC, TOKENS)
        p.open(2, "recv", sources=[p.prefill.endpoint])
        p.decode.cmd("room.bind", room="2", views={"kv": {"pages": list(range(64))}})
        p.open(2, "send")
        p.prefill.until(2, "send", WAITING)
        for token in range(1000):
            p.prefill.cmd("room.send", room="2", seq=token,
                          views={"kv": {"pages": [token // 16], "first_token": token // 16
                                        * 16, "tokens": [token, token + 1]}})
        begin, landed = time.monotonic(), None
        while landed != 1000:  # all have landed, of the 1024 that are bound
            assert time.monotonic() - begin < DEADLINE_S
            room = p.decode.cmd("room.show", room="2")
            landed = room["bytes"] * 1024 / room["expected_bytes"]
        p.prefill.until(2, "send", TRANSFERRING)
        p.prefill.cmd("room.abort", room="2")
        p.prefill.until(2, "send", FAILED)
        p.decode.until(2, "recv", FAILED)
        room = p.prefill.cmd("room.trace", room="2")["rooms"][0]
        assert len(room["events"]) <= 4096 + 8 and room["left_out"] > 0, room["left_out"]
        assert room["events"][0]["what"] == "failed" and not room["forgotten"]
        assert [e for e in room["events"] if e.get("seq") == 0]


def layouts_are_shown_and_can_be_planned():
    with Pair() as p:
        out = p.shown("p0", "pools", "--layout")
        there = p.shown("d0", "pools", "--layout")
        head, rows = out.split("\n")[0], out.strip().split("\n")[1:]
        assert len({line[head.index("DIGEST"):][:16] for line in rows + there.strip().split(
            "\n")[1:]}) == 1, (out, there)
        pool = json.loads(p.shown("p0", "--json", "pools", "--layout"))["pools"][0]
        assert pool["layout"]["views"]["kv"] == Cache.layout(0)["views"]["kv"]
        view = {"view": "kv", "src_pages": [5, 6], "dst_pages": [7, 9]}
        plan = {"src": pool["layout"], "dst": pool["layout"], "map": [view]}
        with open(p.file("plan.json"), "w") as text:
            json.dump(plan, text)
        assert json.loads(p.shown("p0", "plan", p.file("plan.json")))["bytes"] > 0
        for args in ([], ["a", "b"], ["--room", "4"], ["--nothing", "file"]):
            status, out, err = p.ctl("d0", "plan", *args)
            assert status == 2 and err and not out, (args, status, out, err)
        assert p.prefill.cmd("pool.layout", pool=p.src.pool)["digest"] == pool["digest"]
        apart = Cache.layout(0)
        for layer in apart["views"]["kv"]["layers"]:
            layer["layer"] *= 2
        p.prefill.cmd("pool.register", name="apart", layout=apart,
                      regions=[{"region": p.src.region}])
        head, *rows = p.shown("p0", "pools", "--layout").strip().split("\n")
        shown = [row[head.index("LAYERS"):].split()[0] for row in rows if " apart " in row]
        assert set(shown) == {str(layer["layer"])
                              for layer in apart["views"]["kv"]["layers"]}, rows
        other = p.prefill.refused("ENOTFOUND", "pool.layout", pool=10 ** 15)
        assert "no pool 1000000000000000" in other, other


run([layouts_are_shown_and_can_be_planned, push_is_seen_from_both_sides,
     pull_and_ended_rooms_are_traced, hanging_room_is_shown_until_now,
     unopened_other_side_is_reported, other_host_is_joined_and_its_clock_aligned,
     request_id_of_engine_is_shown_on_both_sides, invalid_names_are_refused,
     only_own_rooms_are_shown, room_with_many_chunks_keeps_its_first_and_its_end])
