#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two daemons that cannot talk: keys, addresses and names that are wrong. The room that
waits fails with the cause, in a time far below bootstrap_timeout, and the other daemon,
where there is one, says it too."""
import os
import select
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lib"))
from kvd_daemon import BUILD, Daemon, free_port, run  # noqa: E402
from kvd_engine import FAILED, WAITING, Cache, Engine  # noqa: E402

SOON_S = 8  # a tenth of a second is needed
SHM = "[transport]\ntransports = shm\n"


class Keys:
    """A folder with the keys of p0, d0 and x0, and allow-lists."""

    def __enter__(self):
        self.tmp = tempfile.TemporaryDirectory(prefix="kvd-test-keys-")
        self.public = {name: self.keygen(name) for name in ("p0", "d0", "x0")}
        return self

    def __exit__(self, *why):
        self.tmp.cleanup()

    def keygen(self, name):
        return subprocess.run([BUILD + "/kvd-ctl", "keygen", self.path(name)], check=True,
                              capture_output=True, text=True).stdout.strip()

    def path(self, name):
        return os.path.join(self.tmp.name, name)

    def allow(self, of, lines):
        """`lines`: {name: (key's name, hosts)}."""
        with open(self.path(of + ".allow"), "w") as out:
            for name, (key, hosts) in lines.items():
                out.write("%s %s %s\n" % (name, self.public[key], hosts))

    def daemon(self, name, port=0):
        return Daemon("[peer]\nlisten = tcp://127.0.0.1:%d\ncurve_secret_file = %s\n"
                      "curve_allow_file = %s\n%s" %
                      (port, self.path(name), self.path(name + ".allow"), SHM), name=name)


def auto(name, port=0, more=""):
    """With a key that it makes itself."""
    return Daemon("[peer]\nlisten = tcp://127.0.0.1:%d\n%s%s" % (port, more, SHM), name=name)


def plain(name):
    """Without keys."""
    daemon = auto(name, more="insecure = yes\n")
    daemon.expect("insecure: ")
    return daemon


def recv(engine, source, room=1):
    """A room that waits for `source`; (its error's code and words, the seconds)."""
    if not hasattr(engine, "pool"):
        engine.pool = Cache(engine)
    engine.cmd("room.open", room=str(room), role="recv", pool=engine.pool.pool,
               sources=[source])
    seconds, error = engine.until(room, "recv", FAILED)
    engine.cmd("room.close", room=str(room), role="recv")
    return error["code"], error["message"], seconds


def ctl(daemon, command):
    return subprocess.run([BUILD + "/kvd-ctl", command], capture_output=True, text=True,
                          check=True, env=dict(os.environ, KVD_SOCKET=daemon.socket_path)
                          ).stdout


def has(text, *words):
    for word in words:
        assert word in text, "'%s' is not in: %s" % (word, text)


def failed(engine, source, code, *words):
    what, message, seconds = recv(engine, source)
    assert what == code, (what, message)
    has(message, *words)
    assert seconds < SOON_S, seconds
    return message


def until_logged(daemon, *words):
    end = time.monotonic() + SOON_S
    while not all(word in daemon.log() for word in words):
        assert time.monotonic() < end, "%s: not in the log:\n%s" % (words, daemon.log())
        select.select([daemon.notify], [], [], 0.01)


def key_not_allowed_is_reported_on_both_sides_until_allowed():
    with Keys() as keys:
        keys.allow("p0", {"x0": ("x0", "")})
        keys.allow("d0", {"p0": ("p0", "")})
        with keys.daemon("p0") as p, keys.daemon("d0") as d:
            p.expect("connection refused")
            d.expect("not reached")
            decode, prefill = Engine(d, "d"), Engine(p, "p")
            message = failed(decode, prefill.endpoint, "EAUTH", "peer p0 tcp://127.0.0.1:",
                             "refuses this daemon's key", ".d0 %s 127.0.0.1:" % keys.public["d0"],
                             "curve_allow_file", "reload")
            assert keys.public["p0"] not in message, message
            until_logged(p, "127.0.0.1", "its key is not in curve_allow_file",
                         keys.public["d0"])
            for room in range(2, 6):
                assert recv(decode, prefill.endpoint, room)[0] == "EAUTH"
            assert p.log().count("its key is not in curve_allow_file") == 1, p.log()
            assert d.log().count(": not reached code=") == 1, d.log()
            keys_of_p = prefill.cmd("keys")
            assert keys_of_p["public_key"] == keys.public["p0"], keys_of_p
            assert keys_of_p["allowed"] == [{"name": "x0", "key": keys.public["x0"]}], keys_of_p
            refused, = keys_of_p["refused"]
            assert refused["key"] == keys.public["d0"] and refused["count"] >= 5 and \
                refused["address"] == "127.0.0.1", refused
            shown = ctl(p, "keys")
            has(shown, "own key: " + keys.public["p0"], "REFUSED", keys.public["d0"], "x0")
            # the room and its peer are gone, and the cause is still there
            lost, = decode.cmd("peer.list")["lost"]
            assert lost["known_as"] == "p0" and lost["last_error"]["code"] == "EAUTH" and \
                lost["state"] == "unreached" and not lost["last_error"]["resolved"], lost
            shown = ctl(d, "peers")
            has(shown, "p0", "unreached", "EAUTH: ", "refuses this daemon's key", "LAST-ERROR")
            assert "resolved" not in shown, shown
            assert keys.public["p0"] not in shown, shown
            # as the message says
            keys.allow("p0", {"d0": ("d0", "")})
            p.proc.send_signal(1)
            until_logged(p, "reloaded")
            source = Cache(prefill)
            decode.cmd("room.open", room="9", role="recv", pool=decode.pool.pool,
                       sources=[prefill.endpoint])
            decode.until(9, "recv", WAITING)
            assert source.pool
            up, = decode.cmd("peer.list")["peers"]
            assert up["state"] == "up" and up["known_as"] == "p0" and \
                up["rooms_failed"] == 5 and up["version"].startswith("kvd "), up
            assert up["last_error"]["resolved"], up
            has(ctl(d, "peers"), " up ", "p0", "(connected since)", "EAUTH: ")
            decode.close()
            prefill.close()


def plain_daemon_dialling_keys_is_reported_on_both_sides():
    with Keys() as keys:
        keys.allow("p0", {"d0": ("d0", "")})
        with keys.daemon("p0") as p, plain("d0") as d:
            p.expect("connection refused")
            d.expect("not reached")
            decode, prefill = Engine(d, "d"), Engine(p, "p")
            bare = prefill.endpoint.split("#")[0]
            failed(decode, bare, "EAUTH", "peer " + bare, "has CURVE keys",
                   "this daemon has none", "insecure = no")
            until_logged(p, "127.0.0.1", "the peer has no CURVE keys, this daemon has")
            has(decode.refused("EAUTH", "peer.connect", endpoint=prefill.endpoint),
                "has a CURVE key", "has none")
            decode.close()
            prefill.close()


def daemon_with_keys_dialling_plain_is_reported_on_both_sides():
    with Keys() as keys, plain("p0") as p:
        prefill = Engine(p, "p")
        keys.allow("d0", {"p0": ("p0", prefill.endpoint[6:])})
        with keys.daemon("d0") as d:
            p.expect("connection refused")
            d.expect("not reached")
            decode = Engine(d, "d")
            failed(decode, prefill.endpoint, "EAUTH", "peer p0 " + prefill.endpoint,
                   "has no CURVE keys", "this daemon has")
            until_logged(p, "127.0.0.1", "the peer has CURVE keys, this daemon has none")
            decode.close()
        prefill.close()


def server_with_other_key_is_reported_on_both_sides():
    with Keys() as keys:
        keys.allow("p0", {"d0": ("d0", "")})
        keys.allow("d0", {"p0": ("x0", "127.0.0.1")})
        with keys.daemon("p0") as p, keys.daemon("d0") as d:
            p.expect("connection refused")
            d.expect("not reached")
            decode, prefill = Engine(d, "d"), Engine(p, "p")
            failed(decode, prefill.endpoint.split("#")[0], "EAUTH", "peer p0 ",
                   "does not have the expected CURVE key", keys.public["x0"])
            until_logged(p, "127.0.0.1", "the peer expects another CURVE key of this daemon")
            decode.close()
            prefill.close()


def missing_daemon_fails_the_room_and_can_start_later():
    port = free_port()
    endpoint = "tcp://127.0.0.1:%d" % port
    with auto("d0", more="connect_timeout = 700 ms\n") as d:
        decode = Engine(d, "d")
        message = failed(decode, endpoint, "EPEER", "room 1:", "peer " + endpoint,
                         "cannot be reached: 127.0.0.1:%d: Connection refused" % port,
                         "tried for 7")
        assert "tried for" in message
        has(decode.refused("ETIMEOUT", "peer.connect", endpoint=endpoint, timeout_ms=300),
            "Connection refused")
        with auto("p0", port) as p:
            prefill = Engine(p, "p")
            source = Cache(prefill)
            decode.cmd("room.open", room="2", role="recv", pool=decode.pool.pool,
                       sources=[endpoint])
            decode.until(2, "recv", WAITING)
            assert source.pool
            prefill.close()
            decode.close()


def host_dropping_packets_is_reported_with_firewall_hint():
    """A listener whose queue is full takes no SYN."""
    with socket.socket() as silent, plain("d0") as d:
        d.expect("not reached")
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        decode = Engine(d, "d")
        has(decode.refused("ETIMEOUT", "peer.connect", timeout_ms=6000,
                           endpoint="tcp://127.0.0.1:%d" % silent.getsockname()[1]),
            "Connection timed out: a firewall")
        decode.close()
        for one in waiting:
            one.close()


def unknown_host_name_is_in_the_room_error():
    with auto("d0", more="connect_timeout = 700 ms\n") as d:
        d.expect("name has no address")
        decode = Engine(d, "d")
        code, message, seconds = recv(decode, "tcp://nobody.invalid:7400")
        assert code == "EPEER", (code, message)
        has(message, "peer tcp://nobody.invalid:7400", "cannot be reached")
        # a resolver that answers at all has words for it
        try:
            socket.getaddrinfo("nobody.invalid", 7400)
        except socket.gaierror as why:
            if seconds < SOON_S and "nobody.invalid: " in message:
                has(message, why.strerror)
        decode.close()


def other_service_on_the_port_is_reported():
    with socket.socket() as other, auto("d0", more="connect_timeout = 700 ms\n") as d:
        d.expect("not reached")
        other.bind(("127.0.0.1", 0))
        other.listen(16)
        decode = Engine(d, "d")
        # it takes connections, and says nothing
        has(recv(decode, "tcp://127.0.0.1:%d" % other.getsockname()[1])[1],
            "cannot be reached")
        decode.close()


if __name__ == "__main__":
    cases = [key_not_allowed_is_reported_on_both_sides_until_allowed,
             plain_daemon_dialling_keys_is_reported_on_both_sides,
             daemon_with_keys_dialling_plain_is_reported_on_both_sides,
             server_with_other_key_is_reported_on_both_sides,
             missing_daemon_fails_the_room_and_can_start_later,
             host_dropping_packets_is_reported_with_firewall_hint,
             unknown_host_name_is_in_the_room_error,
             other_service_on_the_port_is_reported]
    run([c for c in cases if not sys.argv[1:] or c.__name__ in sys.argv[1:]])
