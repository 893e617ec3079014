#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A cluster whose directory is a real etcd: names, loads, and what happens while etcd is
stopped, loses its disk, stands still, compacts or is full. Rooms between two daemons that
know each other run all the time, and none may fail. Each case prints how long it took
until a daemon said degraded, until it was up, and until the entries were complete.
KVD_LONG=1: etcd stands still for 60 s instead of 8 s."""
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, Daemon, kvd, run, until  # noqa: E402
from kvd_engine import BOOTSTRAPPING, SUCCESS, WAITING, Cache, Engine  # noqa: E402
from kvd_etcd import Etcd  # noqa: E402
from test_cluster import MORTAL, ctl, ctl_json, send_room  # noqa: E402

LEASE_S = 3
STILL_S = 60 if os.environ.get("KVD_LONG") else 8
AWAY = ("directory unavailable", "connection lost", "lease lost",
        "the store was reset", "no lease", "publishing failed",
        "the group cannot be read")


def config(etcd, more="", lease_s=LEASE_S):
    return MORTAL + "[cluster]\ncluster = %s\ncluster_lease = %d s\n%s" % (
        etcd.url, lease_s, more)


class Rooms(threading.Thread):
    """Pushes from one daemon to another whose source is named by its group, one after the
    other, on sessions of their own, until finish()."""

    def __init__(self, source, sink):
        super().__init__(daemon=True)
        self.prefill, self.decode = Engine(source, "prefill"), Engine(sink, "decode")
        self.src, self.dst = Cache(self.prefill), Cache(self.decode)
        self.src.fill([1], 16)
        self.prefill.cmd("group.publish", group="running", worker="w0", pool="kv")
        self.enough, self.count, self.why, self.longest = threading.Event(), 0, None, 0
        self.last = 1 << 32

    def run(self):
        try:
            while not self.enough.wait(0.02):
                begin = time.monotonic()
                self.last += 1
                self.one(self.last)
                self.longest = max(self.longest, time.monotonic() - begin)
                self.count += 1
        except BaseException as why:
            self.why = why

    def one(self, room):
        view = {"kv": dict(pages=[1], tokens=[0, 16])}
        self.decode.cmd("room.open", room=str(room), role="recv", pool=self.dst.pool,
                        sources=[dict(group="running", worker="w0")])
        self.decode.cmd("room.bind", room=str(room), views=view)
        self.prefill.cmd("room.open", room=str(room), role="send", pool=self.src.pool)
        self.prefill.until(room, "send", WAITING)
        self.prefill.cmd("room.send", room=str(room), seq=0, last=True, views=view)
        self.decode.until(room, "recv", SUCCESS)

    def progress(self):
        """Some more are done."""
        now = self.count
        until("rooms go on", lambda: self.why or self.count > now + 3)
        assert not self.why, self.why

    def finish(self):
        self.enough.set()
        self.join()
        assert not self.why, self.why
        self.dst.check([1], 16)
        return self.count


def ctl_doctor(daemon):
    return subprocess.run([BUILD + "/kvd-ctl", "-s", daemon.socket_path, "doctor"],
                          capture_output=True, text=True).stdout


class World:
    """etcd and two daemons, between which rooms run."""

    def __init__(self, etcd, d1, d2):
        self.etcd, self.daemons, self.d1, self.d2 = etcd, (d1, d2), d1, d2
        for d in self.daemons:
            for words in AWAY:
                d.expect(words)
        self.told, self.began = [], 0.0

    def health(self, state):
        return all(ctl_json(d, "health")["state"] == state for d in self.daemons)

    def names(self, at=None):
        return sorted(d["name"] for d in ctl_json(at or self.d2, "cluster")["daemons"])

    def clock(self):
        self.began = time.monotonic()

    def mark(self, what, check):
        value = until(what, check)
        self.told.append("%s %.2f s" % (what, time.monotonic() - self.began))
        return value

    def complete(self):
        """What a daemon that knew nothing would be told, too."""
        return all("name" in d for d in ctl_json(self.d1, "cluster")["daemons"]) and \
            self.names() == ["d1", "d2"] == self.names(self.d1) and self.workers(
                self.d1) == self.workers(self.d2) == ["w0"]

    def workers(self, at, group="running"):
        told = json.loads(ctl(at, "--json", "group", group))
        return sorted(r["worker"] for r in told["ranks"])

    def back(self):
        self.mark("up after", lambda: self.health("serving"))
        self.mark("complete after", self.complete)
        entries = self.etcd.ctl("get", "--prefix", "/kvd/groups/", "--keys-only").split()
        assert len(entries) == 3, entries


@contextlib.contextmanager
def world(what, quota=0):
    with Etcd(quota) as etcd, Daemon(config(etcd), name="d1") as d1, \
            Daemon(config(etcd), name="d2") as d2:
        it = World(etcd, d1, d2)
        rooms = it.rooms = Rooms(d1, d2)
        until("the first entries", it.complete)
        rooms.start()
        try:
            rooms.progress()
            yield it
            rooms.progress()
        finally:
            rooms.enough.set()
        count = rooms.finish()
        print("     %s: %s; %d rooms, the longest %.2f s" % (
            what, ", ".join(it.told), count, rooms.longest), flush=True)


def names_and_loads_are_published_by_etcd():
    with Etcd() as etcd, Daemon(config(etcd), name="d1") as d1, \
            Daemon(config(etcd), name="d2") as d2:
        prefill, decode = Engine(d1, "prefill"), Engine(d2, "decode")
        src, dst = Cache(prefill), Cache(decode)
        src.fill([1], 16)
        # who asks for a name that nobody has yet waits for it
        decode.cmd("room.open", room="9", role="recv", pool=dst.pool,
                   sources=[dict(group="prefill", worker="w/0")])
        assert decode.state(9, "recv")[0] == BOOTSTRAPPING
        prefill.cmd("group.publish", group="prefill", worker="w/0", pool="kv", engine="vllm",
                    url="http://10.0.0.1:8000", model="m")
        prefill.cmd("room.open", room="9", role="send", pool=src.pool)
        decode.until(9, "recv", WAITING)
        decode.cmd("room.abort", room="9", role="recv")
        send_room(prefill, decode, src, dst, 1, group="prefill")
        dst.check([1], 16)
        prefill.cmd("session.report", running=12, waiting=3)
        load = until("a load", lambda: decode.cmd(
            "group.query", group="prefill", loads=True)["ranks"][0].get("load", {}).get("engine"))
        assert load == dict(running=12, waiting=3), load
        text = ctl(d2, "cluster")
        assert "directory etcd, " + etcd.url in text and "; up for " in text, text
        until("both are told", lambda: sorted(
            d["name"] for d in ctl_json(d2, "cluster")["daemons"]) == ["d1", "d2"])
        row = ctl(d2, "group", "prefill").splitlines()[-1].split()
        assert row[:3] == ["w/0", "0.0.0.0", "serving"], row
        assert "prefill" in ctl(d1, "group")
        message = decode.refused("EEXIST", "group.publish", group="prefill", worker="w/0")
        assert "another member" in message, message
        decode.refused("EINVAL", "group.query", group="a\tb")
        # the end of a session and of a daemon are told at once
        first = decode.cmd("group.query", group="prefill", since=0)["revision"]
        prefill.close()
        until("it is gone", lambda: [r["worker"] for r in decode.cmd(
            "group.query", group="prefill", since=first)["gone"]] == ["w/0"])
        d1.stop()
        until("the daemon is gone", lambda: [
            d["name"] for d in ctl_json(d2, "cluster")["daemons"]] == ["d2"], 2)


def etcd_stopped_and_started():
    with world("stopped and started") as w:
        w.clock()
        w.etcd.stop()
        w.mark("degraded after", lambda: w.health("degraded"))
        w.rooms.progress()
        assert "has been unreachable for" in ctl_doctor(w.d2)
        told = Engine(w.d2, "asks").cmd("group.query", group="running", since=0)
        assert not told["synced"] and [r["worker"] for r in told["ranks"]] == ["w0"], told
        w.clock()
        w.etcd.start()
        w.back()


def etcd_restarted_without_its_disk():
    with world("killed, empty disk") as w:
        w.clock()
        w.etcd.stop(signal.SIGKILL)
        w.mark("degraded after", lambda: w.health("degraded"))
        w.etcd.wipe()
        w.clock()
        w.etcd.start()
        w.back()


def etcd_stalled():
    with world("stood still for %d s" % STILL_S) as w, \
            Daemon(config(w.etcd), name="d3") as d3:
        for words in AWAY:
            d3.expect(words)
        doomed = Engine(d3, "doomed")
        doomed.cmd("group.publish", group="running", worker="doomed")
        until("it is known", lambda: w.workers(w.d2) == ["doomed", "w0"])
        w.clock()
        w.etcd.freeze()
        d3.proc.kill()  # nobody can say so
        d3.wait()
        d3.check_end = lambda: None
        w.mark("degraded after", lambda: w.health("degraded"))
        until("it stands still", lambda: time.monotonic() - w.began > STILL_S, STILL_S + 60)
        w.rooms.progress()
        w.clock()
        w.etcd.thaw()
        w.back()


def watches_with_compacted_revision():
    with world("compacted") as w:
        # whoever follows has come to a revision that is older than this
        for _ in range(5):
            w.etcd.ctl("put", "/elsewhere", "x")
        w.etcd.ctl("compact", str(w.etcd.revision()), "--physical")
        w.clock()
        w.etcd.stop()
        w.mark("degraded after", lambda: w.health("degraded"))
        w.clock()
        w.etcd.start()
        w.back()
        until("watches ended", lambda: "a watch was canceled" in w.d2.log())
        # and while the stream is read
        for n in range(20):
            w.rooms.prefill.cmd("group.publish", group="more", worker="w%d" % n)
            w.etcd.ctl("compact", str(w.etcd.revision()), check=False)
        until("all are known", lambda: len(w.workers(w.d2, "more")) == 20)
        w.etcd.ctl("defrag")
        assert w.health("serving")


def etcd_full():
    with world("full", quota=16 << 20) as w:
        w.clock()
        big = base64.b64encode(os.urandom(700000))
        until("it is full", lambda: w.etcd.ctl("put", "/big", stdin=big, check=False) is None)
        assert "NOSPACE" in w.etcd.ctl("alarm", "list")
        w.rooms.prefill.cmd("session.report", running=1)
        asks = Engine(w.d2, "asks")
        w.mark("degraded after", lambda: ctl_json(w.d1, "health")["state"] == "degraded")
        assert "etcd is full" in json.dumps(ctl_json(w.d1, "cluster")), ctl(w.d1, "cluster")
        # its leases live, what was there is offered
        until("leases live", lambda: time.monotonic() - w.began > 2 * LEASE_S)
        assert [r["worker"] for r in asks.cmd("group.query", group="running")["ranks"]] == ["w0"]
        w.rooms.progress()
        w.etcd.ctl("del", "/big", check=False)
        w.etcd.ctl("compact", str(w.etcd.revision()), "--physical")
        w.etcd.ctl("defrag")
        w.clock()
        w.etcd.ctl("alarm", "disarm")
        w.mark("up after", lambda: w.health("serving"))
        w.mark("load after", lambda: asks.cmd("group.query", group="running", loads=True)[
            "ranks"][0].get("load", {}).get("engine") == dict(running=1))
        w.mark("complete after", w.complete)


def daemon_killed_is_not_offered():
    with world("a daemon killed") as w, Daemon(config(w.etcd), name="d3") as d3:
        doomed = Engine(d3, "doomed")
        doomed.cmd("group.publish", group="running", worker="doomed")
        until("it is known", lambda: w.workers(w.d2) == ["doomed", "w0"])
        w.clock()
        d3.proc.kill()
        d3.wait()
        d3.check_end = lambda: None
        w.mark("not offered after", w.complete)
        assert time.monotonic() - w.began < 3 * LEASE_S + 5, w.told


def daemon_restarted_has_its_place():
    with Etcd() as etcd:
        text = config(etcd, lease_s=60)
        with Daemon(text, name="d1") as d1, Daemon(text, name="d2") as d2:
            prefill = Engine(d1, "prefill")
            prefill.cmd("group.publish", group="prefill", worker="w0")
            assert os.path.exists(os.path.join(d1.run_dir, "d1.lease"))
            d1.proc.kill()
            d1.wait()
            d1.check_end = lambda: None
            with Daemon(text, name="d1", run_dir=d1.run_dir) as again:
                begin = time.monotonic()
                prefill = Engine(again, "prefill")
                prefill.cmd("group.publish", group="prefill", worker="w0")
                took = time.monotonic() - begin
                print("     the place was free after %.2f s" % took, flush=True)
                assert took < 10, took
                until("one of each", lambda: sorted(
                    d["name"] for d in ctl_json(d2, "cluster")["daemons"]) == ["d1", "d2"])
            assert not os.path.exists(os.path.join(d1.run_dir, "d1.lease"))


def foreign_keys_and_forged_records_are_harmless():
    with world("strangers' keys") as w:
        lease, etcd = w.etcd.lease(), w.etcd
        for d in w.daemons:
            d.expect("ignored a foreign entry")
            d.expect("ignored a directory entry")
        record = json.loads(etcd.ctl("get", "--print-value-only",
                                     "/kvd/groups/running/w0/0.0.0.0"))
        groups, loads = "/kvd/groups/running/%s/0.0.0.0", "/kvd/load/running/%s/0.0.0.0"

        def put(key, value):
            if isinstance(value, str):
                value = value.encode()
            etcd.ctl("put", "--lease", lease, key, *([] if value else [""]), stdin=value)
        for n, value in enumerate(["", "{", "[]", "null", "{}", '{"v":2}', "x" * 4096,
                                   "x" * 1000000, b"\xff\xfe", b"\0" * 32, '{"v":1' * 600,
                                   "[" * 4000, '{"v":1,"instance":7}']):
            put(groups % ("bad%d" % n), value)
        etcd.ctl("put", groups % "unleased", json.dumps(record))
        put("/kvd/groups/running/", "x")
        put("/kvd/groups/running/w/0.0.0.99999", "x")
        put("/kvd/groups/kvd.daemons/x/0.0.0.0", "{")
        # this one lies: its record is well, its loads are not
        lies = ['{"v":1,"rooms":{"waiting":1e999,"running":-1}}', '{"v":1,"gbps":NaN}',
                '{"v":1,"gbps":"much"}', "null", "[1]", "{" * 500,
                '{"v":1,\n"id":99,"error":{"code":"EIO","message":"forged"}}',
                '{"x":\n{"id":2,"ok":true,"ranks":[]}\n}', '{"x":\r\n1}', "{}\n{}"]
        asks = Engine(w.d2, "asks")
        put(groups % "liar", json.dumps(record))
        for lie in lies:
            put(loads % "liar", lie)
            put(loads % "after", lie)
            put(groups % "after", json.dumps(record))
            until("it is told", lambda: "after" in [r["worker"] for r in asks.cmd(
                "group.query", group="running", loads=True)["ranks"]])
            answer = asks.cmd("group.query", group="running", loads=True)
            assert {"w0", "liar", "after"} == {r["worker"] for r in answer["ranks"]}, answer
            assert all(isinstance(r.get("load", {}), dict) for r in answer["ranks"]), answer
            etcd.ctl("del", groups % "after")
            until("it is gone", lambda: "after" not in [r["worker"] for r in asks.cmd(
                "group.query", group="running")["ranks"]])
        ctl(w.d2, "group", "running")
        etcd.ctl("lease", "revoke", lease)
        w.clock()
        w.mark("complete after", w.complete)


def foreign_cluster_id_is_accepted():
    """Who may write the prefix may write this key, too."""
    with Etcd() as etcd:
        etcd.ctl("put", "/kvd/store", stdin=b"\0" * 32)
        with Daemon(config(etcd), name="d1") as d1:
            until("it is up", lambda: ctl_json(d1, "cluster")["up"])


def etcd_by_tls():
    with Etcd(tls=True) as etcd:
        files = "cluster_tls_ca = %s\ncluster_tls_cert = %s\ncluster_tls_key = %s\n" % (
            etcd.path("ca.pem"), etcd.path("client.pem"), etcd.path("client.key"))
        with Daemon(config(etcd, files), name="d1") as d1, \
                Daemon(config(etcd, files), name="d2") as d2:
            prefill = Engine(d1, "prefill")
            prefill.cmd("group.publish", group="prefill", worker="w0")
            asks = Engine(d2, "asks")
            assert [r["worker"] for r in asks.cmd("group.query", group="prefill")[
                "ranks"]] == ["w0"]
        # another's authority: nothing is told, and why is said
        with Etcd(tls=True) as other, Daemon(config(
                etcd, files.replace(etcd.path("ca.pem"), other.path("ca.pem"))),
                name="d3") as d3:
            d3.expect("directory unavailable")
            until("it says why", lambda: "certificate" in ctl_json(
                d3, "cluster").get("why", ""))


def users_with_long_tokens_are_accepted():
    with Etcd(jwt=True) as etcd:
        etcd.users()
        with open(etcd.path("user"), "w") as out:
            os.fchmod(out.fileno(), 0o600)
            out.write("kvd:pass\n")
        text = config(etcd, "cluster_user_file = %s\n" % etcd.path("user"))
        with Daemon(text, name="d1") as d1, Daemon(text, name="d2") as d2:
            prefill, asks = Engine(d1, "prefill"), Engine(d2, "asks")
            prefill.cmd("group.publish", group="prefill", worker="w0")
            assert [r["worker"] for r in asks.cmd("group.query", group="prefill")[
                "ranks"]] == ["w0"]


def invalid_options_are_reported_by_check_and_start():
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as tmp:
        path = os.path.join(tmp, "kvd.conf")
        for lines, words in (
                ("cluster = etcd://127.0.0.1:99999/kvd", "must be 1 to 65535"),
                ("cluster = etcd://u:p@host:1/kvd", "cluster"),
                ("cluster = http://127.0.0.1:2379", "etcd://HOST:PORT"),
                ("cluster = kvd://127.0.0.1:7400", "file:/PATH"),
                ("cluster_trust = directory", "in etcd only"),
                ("[chunks]\nchunk_memory = 1 MiB\nchunk_index = cluster", "in etcd only"),
                ("cluster = etcds://127.0.0.1:1/kvd", "cluster_tls_ca"),
                ("cluster = etcd://127.0.0.1:1/kvd\ncluster_lease = 1 s", "cluster_lease"),
                ("cluster = etcd://127.0.0.1:1/kvd\ncluster_user_file = %s/none" % tmp,
                 "cluster_user_file")):
            with open(path, "w") as out:
                out.write("[daemon]\nrun_dir = %s\nname = kvd\n[cluster]\n%s\n" % (tmp, lines))
            for args in ["--check-config"], []:
                status, _, err = kvd("--config", path, *args)
                assert status != 0 and words in err, (lines, args, status, err)


def daemon_stops_soon_while_etcd_is_away():
    with Etcd() as etcd:
        for how in "frozen", "killed", "never there":
            with Daemon(config(etcd), name="d1") as d1:
                for words in AWAY:
                    d1.expect(words)
                prefill = Engine(d1, "prefill")
                if how == "never there":
                    prefill.sock.sendall(b'{"id":9,"cmd":"group.publish","group":"g"}\n')
                else:
                    prefill.cmd("group.publish", group="g")
                if how == "frozen":
                    etcd.freeze()
                elif how == "killed":
                    etcd.stop(signal.SIGKILL)
                begin = time.monotonic()
                assert d1.stop() == 0
                took = time.monotonic() - begin
                print("     %s: stopped after %.2f s" % (how, took), flush=True)
                assert took < 5, (how, took)
            if how == "frozen":
                etcd.thaw()


if __name__ == "__main__":
    run([names_and_loads_are_published_by_etcd, etcd_stopped_and_started,
         etcd_restarted_without_its_disk, etcd_stalled,
         watches_with_compacted_revision, etcd_full,
         daemon_killed_is_not_offered, daemon_restarted_has_its_place,
         foreign_keys_and_forged_records_are_harmless,
         foreign_cluster_id_is_accepted, etcd_by_tls,
         users_with_long_tokens_are_accepted,
         invalid_options_are_reported_by_check_and_start,
         daemon_stops_soon_while_etcd_is_away])
