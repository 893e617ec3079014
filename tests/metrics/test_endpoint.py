#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The metrics endpoint: both formats are well formed and tell what happened; the probes;
what is refused; clients that mean no good."""
import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import prom_text  # noqa: E402
from kvd_daemon import BUILD, Daemon, Skip, free_port, kvd, run, until  # noqa: E402
from kvd_engine import FAILED, WAITING  # noqa: E402
from rig import Load, Observed, Pair  # noqa: E402


def rooms_are_counted_by_role_state_and_end():
    with Pair() as p:
        a, b = p.daemons
        for n in range(3):
            p.push(n)
        p.pull(10)
        p.prefill.cmd("room.open", room="20", role="send", pool=p.src.pool)
        p.decode.cmd("room.open", room="20", role="recv", pool=p.dst.pool,
                     sources=[dict(endpoint=p.prefill.endpoint, pool=p.src.name)])
        p.decode.cmd("room.bind", room="20", views={"kv": dict(pages=[1], tokens=[0, 16])})
        p.prefill.until(20, "send", WAITING)
        m = a.scrape()
        assert m["kvd_rooms"].get(role="send", state="waiting_for_input") == 1
        assert m["kvd_rooms"].sum() == 1
        assert m["kvd_rooms_ended_total"].get(role="send", result="success", code="OK") == 3
        assert m["kvd_rooms_ended_total"].get(role="offer", result="success", code="OK") == 1
        assert m["kvd_rooms_ended_total"].sum(result="failed") == 0
        assert m["kvd_room_oldest_seconds"].get(state="waiting_for_input") > 0
        assert m["kvd_room_oldest_seconds"].get(state="transferring") == 0
        p.prefill.cmd("room.abort", room="20", role="send", reason="a test")
        p.prefill.until(20, "send", FAILED)
        p.decode.until(20, "recv", FAILED)
        m = a.scrape()
        assert m["kvd_rooms"].get(role="send", state="failed") == 1
        assert m["kvd_rooms_ended_total"].get(role="send", result="failed",
                                              code="EABORTED") == 1
        for d, role in ((a, "send"), (b, "recv")):
            m = d.scrape()
            phases = m["kvd_room_phase_seconds"]
            assert phases.get("_count", role=role, phase="total") == 3
            assert phases.get("_count", role=role, phase="bootstrap") == 4  # and the aborted
            assert 0 < phases.get("_sum", role=role, phase="total") < 60
            assert m["kvd_room_size_bytes"].get("_count") == 4
        wire = a.scrape()["kvd_room_sent_bytes_total"].get()
        assert wire > 0 and b.scrape()["kvd_room_size_bytes"].get("_sum") == wire


def peers_bytes_and_commands_are_counted():
    with Pair() as p:
        a, b = p.daemons
        p.push(1)
        there = "prefill@" + p.prefill.endpoint[len("tcp://"):].split("#")[0]
        m = b.scrape()
        wire = m["kvd_room_received_bytes_total"].get()
        assert m["kvd_transferred_bytes_total"].get(direction="in", transport="shm") == wire
        assert m["kvd_peer_bytes_total"].get(peer=there, direction="in") == wire > 0
        assert m["kvd_peers"].get(state="up") == 1
        until("no round trip", lambda: b.scrape()["kvd_peer_rtt_seconds"].samples)
        assert 0 < b.scrape()["kvd_peer_rtt_seconds"].get(peer=there) < 60
        assert b.scrape()["kvd_peer_inflight_bytes"].get(peer=there) == 0
        assert m["kvd_region_bytes"].get(kind="memfd") > 0
        assert m["kvd_commands_total"].get(command="room.open", result="success") == 1
        p.decode.refused("ENOTFOUND", "room.show", room="999", role="recv")
        assert b.scrape()["kvd_commands_total"].get(command="room.show",
                                                    result="failed") == 1
        b.expect("peer")
        p.prefill.close()
        a.stop()
        until("the peer is not lost",
              lambda: b.scrape()["kvd_peer_disconnects_total"].get(peer=there) == 1)
        m = b.scrape()
        assert m["kvd_peer_bytes_total"].get(peer=there, direction="in") == wire
        assert not m["kvd_peer_rtt_seconds"].samples, "of a peer that is gone"


def figures_of_the_process_are_the_kernels():
    with Observed() as d:
        m = d.scrape()
        with open("/proc/%d/stat" % d.proc.pid) as f:
            fields = f.read().rsplit(")", 1)[1].split()
        assert m["process_threads"].get() == int(fields[17])
        rss = int(fields[21]) * os.sysconf("SC_PAGESIZE")
        assert 0.5 * rss < m["process_resident_memory_bytes"].get() < 2 * rss
        fds = len(os.listdir("/proc/%d/fd" % d.proc.pid))
        assert abs(m["process_open_fds"].get() - fds) <= 2, fds
        assert abs(m["process_start_time_seconds"].get() - time.time()) < 600
        assert m["kvd_build_info"].sum() == m["kvd_build_info"].sum(name=d.name) == 1
        assert m["kvd_state"].get(state="serving") == 1 and m["kvd_state"].sum() == 1


def control_tool_prints_the_same_families():
    with Observed() as d:
        done = subprocess.run([BUILD + "/kvd-ctl", "-s", d.socket_path, "stats",
                               "--prometheus"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told = prom_text.parse(done.stdout)
        assert set(told) == set(d.scrape())
        shown = subprocess.run([BUILD + "/kvd-ctl", "-s", d.socket_path, "stats"],
                               capture_output=True, text=True).stdout
        assert "state=serving" in shown and "command=hello result=success" in shown, shown


def promtool_finds_nothing():
    promtool = shutil.which("promtool")
    if not promtool:
        raise Skip("promtool (Debian: prometheus)")
    with Pair() as p:
        p.push(1)
        p.prefill.cmd("room.open", room="5", role="send", pool=p.src.pool)
        text = p.daemons[0].get("/metrics")[2]
        done = subprocess.run([promtool, "check", "metrics"], input=text,
                              capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def probes_tell_the_state():
    with Pair() as p:
        d = p.daemons[0]
        assert d.get("/livez")[::2] == (200, "ok\n")
        assert d.get("/readyz")[::2] == (200, "serving\n")
        p.prefill.cmd("room.open", room="1", role="send", pool=p.src.pool)
        p.prefill.cmd("drain", timeout_ms=60000)
        until("it does not drain", lambda: d.get("/readyz")[::2] == (503, "draining\n"))
        assert d.get("/livez")[0] == 200
        assert d.scrape()["kvd_state"].get(state="draining") == 1
        p.prefill.cmd("room.abort", room="1", role="send", reason="a test")


def ready_probe_tells_why_rooms_are_refused():
    config = "[transport]\ntransports = tcp, verbs\nrequire = rdma\n"
    with Observed(config) as d:
        for words in ("not usable", "none of its transports"):
            d.expect(words)
        status, _, text = d.get("/readyz")
        if status == 200:
            raise Skip("a machine without RDMA")
        assert status == 503 and text.startswith("refusing: no allowed transport"), text


def what_is_not_there_is_refused():
    with Observed() as d:
        for path in ("/", "/metric", "/metrics/", "/../metrics", "/metrics%2f", "//"):
            assert d.get(path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "METRICS"):
            status, headers, _ = d.get("/metrics", method=method)
            assert status == 405 and headers["Allow"] == "GET, HEAD", (method, status)
        status, headers, text = d.get("/metrics", method="HEAD")
        assert status == 200 and not text and int(headers["Content-Length"]) > 1000
        assert d.get("/metrics?name=x")[0] == 200


def unix_socket_has_the_control_sockets_rights():
    with Observed("[control]\nsocket_mode = 0640\n", unix=True) as d:
        d.scrape()
        mode = os.stat(d.http_path)
        assert stat.S_ISSOCK(mode.st_mode) and mode.st_mode & 0o777 == 0o640, oct(mode.st_mode)
        assert mode.st_gid == os.stat(d.socket_path).st_gid
        path = d.http_path
    assert not os.path.exists(path)


def left_socket_is_taken_over_and_a_living_one_is_not():
    with Observed(unix=True) as d:
        other = Observed(unix=True, name="other", run_dir=d.run_dir)
        with open(other.config_path) as f:
            text = f.read().replace("other.metrics", "kvd.metrics")
        with open(other.config_path, "w") as f:
            f.write(text)
        status, _, err = kvd("--config", other.config_path)
        assert status == 78 and "metrics_listen = %s: pid %d listens there" % (
            d.http_path, d.proc.pid) in err, (status, err)
        d.scrape()
        d.proc.kill()
        d.wait()
        assert os.path.exists(d.http_path)
        again = Observed(unix=True, run_dir=d.run_dir)
        with again:
            again.scrape()
        d.proc = None


def only_loopback_and_unix_sockets_are_allowed():
    for listen, words in (("tcp://0.0.0.0:9464", "has no authentication"),
                          ("tcp://10.0.0.2:9464", "use an authenticating proxy"),
                          ("tcp://*:9464", "has no authentication"),
                          ("tcp://[::]:9464", "has no authentication"),
                          ("tcp://example.org:9464", "has no authentication"),
                          ("tcp://127.0.0.1:0", "a port of 1 to 65535"),
                          ("127.0.0.1:9464", "allowed: tcp://127.0.0.1:PORT"),
                          ("unix:kvd.metrics", "an absolute path"),
                          ("unix:/" + 110 * "x", "of at most 107 bytes")):
        d = Daemon("[metrics]\nmetrics_listen = %s\n" % listen)
        status, out, err = kvd("--config", d.config_path)
        assert status == 78 and words in out + err, (listen, status, out, err)
        d.tmp.cleanup()


def taken_port_is_told():
    with socket.socket() as s:
        port = free_port()
        s.bind(("127.0.0.1", port))
        s.listen()
        d = Daemon("[metrics]\nmetrics_listen = tcp://127.0.0.1:%d\n" % port)
        status, _, err = kvd("--config", d.config_path)
        assert status == 1 and "metrics_listen = tcp://127.0.0.1:%d: Address already" % port \
            in err, err
        d.tmp.cleanup()


# ---- clients that mean no good


def hold(d, data=b""):
    s = socket.create_connection(("127.0.0.1", d.port))
    s.settimeout(60)
    with contextlib.suppress(OSError):
        s.sendall(data)
    return s


def slow_clients_keep_nobody_out():
    with Observed() as d:
        held = []
        for n in range(200):
            half = (b"", b"G", b"GET /metrics HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nA: ")[n % 4]
            held.append(hold(d, half))
            if n % 50 == 0:
                d.scrape_once()
        d.scrape_once()
        for s in held[-8:]:
            with contextlib.suppress(OSError):
                s.sendall(b"x")
        d.scrape()
        until("connections pile up", lambda: d.scrape()["process_open_fds"].get() < 100)
        for s in held:
            s.close()


def clients_that_do_not_read_keep_nobody_out():
    with Observed() as d:
        held = []
        for _ in range(64):
            s = socket.socket()
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            s.connect(("127.0.0.1", d.port))
            s.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            held.append(s)
        begin = time.monotonic()
        for _ in range(5):
            d.scrape()
        assert time.monotonic() - begin < 20
        for s in held:
            s.close()


def idle_client_is_closed():
    with Observed() as d:
        begin = time.monotonic()
        with hold(d, b"GET /metrics HTTP/1.1\r\n") as s:
            with contextlib.suppress(ConnectionError):
                while s.recv(4096):
                    pass
        assert time.monotonic() - begin < 30


def garbage_is_refused():
    with Observed() as d:
        rss = d.scrape()["process_resident_memory_bytes"].get()
        for data in (b"\0" * 100000, os.urandom(65536), b"GET\r\n\r\n", b"\r\n\r\n\r\n",
                     b"GET /metrics HTTP/9.9\r\n\r\n", b"GET " + b"/" * 100000 + b" HTTP/1.1\r\n\r\n",
                     b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 100000 + b"\r\n",
                     b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 1000000 + b"\r\n\r\n",
                     b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"z" * 100000,
                     b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
                     b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 50):
            with hold(d, data) as s:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_WR)
                    s.recv(100)
            d.scrape()
        grown = d.scrape()["process_resident_memory_bytes"].get() - rss
        assert grown < 16 << 20, grown
        assert d.get("/livez")[0] == 200


def scraping_under_load_disturbs_no_room():
    with Pair() as p:
        with Load(p):
            for n in range(200):
                p.daemons[n % 2].scrape_once()
        m = p.daemons[0].scrape()
        assert m["kvd_rooms_ended_total"].sum(result="failed") == 0
        ended = m["kvd_rooms_ended_total"].sum(result="success")
        assert ended == m["kvd_rooms_opened_total"].get() > 0


if __name__ == "__main__":
    run([rooms_are_counted_by_role_state_and_end,
         peers_bytes_and_commands_are_counted, figures_of_the_process_are_the_kernels,
         control_tool_prints_the_same_families, promtool_finds_nothing,
         probes_tell_the_state,
         ready_probe_tells_why_rooms_are_refused, what_is_not_there_is_refused,
         unix_socket_has_the_control_sockets_rights,
         left_socket_is_taken_over_and_a_living_one_is_not,
         only_loopback_and_unix_sockets_are_allowed, taken_port_is_told,
         slow_clients_keep_nobody_out, clients_that_do_not_read_keep_nobody_out,
         idle_client_is_closed, garbage_is_refused,
         scraping_under_load_disturbs_no_room])
