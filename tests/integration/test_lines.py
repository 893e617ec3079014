#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two daemons in two network namespaces that reach each other's `listen`, but not each
other's data port: which side dials is no matter of chance, and where neither can, the
room, `peers` and the doctor name address, option and error on both sides, in time."""
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
sys.path.insert(0, os.path.join(HERE, "faults"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, Skip, run, until  # noqa: E402
from kvd_engine import FAILED, SUCCESS, Cache, Engine  # noqa: E402
from world import Net, may_partition  # noqa: E402

TIMEOUT_S = 3
CONFIG = """[peer]
listen = tcp://10.77.%d.2:7400
insecure = yes
connect_timeout = %d s
[transport]
transports = tcp
tcp_listen = tcp://%s:7401
"""
VIEWS = {"kv": dict(pages=[1, 2], tokens=[0, 32])}


@contextlib.contextmanager
def two(apart):
    """Daemons whose data ports are on a network of their own, those of `apart`."""
    net = Net(2, True)
    try:
        net.ip(net.router, ["route add blackhole 10.99.0.0/16"])
        places = []
        for i in range(2):
            net.ip(net.holders[i].pid, [
                "link add d0 type veth peer name d1", "address add 10.99.%d.2/24 dev d0" % i,
                "link set d0 up", "link set d1 up"])
            places.append("10.99.%d.2" % i if i in apart else "10.77.%d.2" % i)
        with contextlib.ExitStack() as all_:
            daemons = []
            for i in range(2):
                daemon = Daemon(CONFIG % (i, TIMEOUT_S, places[i]), name="n%d" % i,
                                wrapper=net.wrapper(i),
                                log_dir=all_.enter_context(tempfile.TemporaryDirectory()))
                daemon.expect("insecure: ")
                daemon.expect("not connected yet")
                daemons.append(all_.enter_context(daemon))
            yield daemons, [place + ":7401" for place in places]
    finally:
        net.close()


def ctl(daemon, *args):
    done = subprocess.run([BUILD + "/kvd-ctl", "--socket", daemon.socket_path] + list(args),
                          capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout


def pull(prefill, decode, src, dst, room):
    prefill.cmd("room.open", room=str(room), role="offer", pool=src.pool, views=VIEWS,
                lease_ms=20000)
    decode.cmd("room.open", room=str(room), role="pull", pool=dst.pool,
               sources=[prefill.endpoint], views=VIEWS)


def port_unreachable_from_one_side_is_dialled_from_the_other():
    for apart in (0, 1):
        with two([apart]) as (daemons, _):
            engines = [Engine(d, "e") for d in daemons]
            caches = [Cache(e) for e in engines]
            pull(*engines, *caches, 1)
            seconds, _ = engines[1].until(1, "pull", SUCCESS)
            assert seconds < TIMEOUT_S, seconds
            for engine in engines:
                engine.close()


def unreachable_ports_are_named_on_both_sides():
    with two([0, 1]) as (daemons, places):
        engines = [Engine(d, "e") for d in daemons]
        caches = [Cache(e) for e in engines]
        pull(*engines, *caches, 1)
        # the pusher of a room learns it from the receiver
        engines[0].cmd("room.open", room="2", role="send", pool=caches[0].pool)
        engines[1].cmd("room.open", room="2", role="recv", pool=caches[1].pool,
                       sources=[engines[0].endpoint])
        words = [r"no data connection to %s \(tcp_listen\): timed out" % re.escape(place)
                 for place in places]
        for role, engine in (("pull", 1), ("recv", 1), ("send", 0)):
            seconds, error = engines[engine].until(2 if role != "pull" else 1, role, FAILED)
            assert seconds < TIMEOUT_S + 1, (role, seconds)
            assert error["code"] == "EPEER", error
            for one in words:
                assert re.search(one, error["message"]), (role, error)
        for i, daemon in enumerate(daemons):
            until("unresolved", lambda d=daemon: "no data connection" in ctl(d, "peers"))
            assert "resolved" not in ctl(daemon, "peers"), ctl(daemon, "peers")
            peer = json.loads(ctl(daemon, "--json", "peers"))["peers"][0]
            assert peer["state"] == "up" and peer["why_code"] == "EPEER", peer
            for one in words:
                assert re.search(one, peer["why"]), peer
            line, = [x for x in ctl(daemon, "doctor").splitlines() if "data connection failed" in x]
            assert re.search(words[not i], line) and "firewall" in line, line
            assert "require" not in line, line
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    cases = [port_unreachable_from_one_side_is_dialled_from_the_other,
             unreachable_ports_are_named_on_both_sides]

    def skipped():
        raise Skip(may_partition())
    run([c for c in cases if not sys.argv[1:] or c.__name__ in sys.argv[1:]]
        if not may_partition() else [skipped])
