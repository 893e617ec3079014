#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl doctor: each fault is a line with a remedy. Faults of the host are trees of
files; those of daemons are provoked."""
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import (BUILD, DEADLINE_S, Daemon, Skip, for_everyone, free_port,  # noqa: E402
                        need_users, run, until)
from kvd_engine import Cache, Engine, FAILED  # noqa: E402

CTL = BUILD + "/kvd-ctl"
RANK = {"ok": 0, "note": 0, "warn": 1, "FAIL": 2}


def ctl(*args, run_dir=None):
    return subprocess.run([CTL] + list(args), capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
                          env={"PATH": os.environ["PATH"],
                               **({"KVD_RUN_DIR": run_dir} if run_dir else {})})


def lines_of(report, status):
    """[(result, check, fact, remedy)]: each is told once, and has a remedy unless it is ok."""
    lines = [tuple(line[k] for k in ("result", "check", "fact", "remedy"))
             for line in report["checks"]]
    for result, check, fact, remedy in lines:
        assert bool(remedy) == (result != "ok"), (check, fact, remedy)
    assert len(set(lines)) == len(lines), lines
    worst = max(RANK[line[0]] for line in lines)
    assert status == worst == RANK[report["result"]], (status, lines)
    return lines


def doctor(daemon, *args):
    done = ctl("--socket", daemon.socket_path, "-j", "doctor", *args,
               run_dir=daemon.run_dir)
    return lines_of(json.loads(done.stdout), done.returncode)


def has(lines, result, check, *words):
    found = [line for line in lines
             if line[:2] == (result, check) and all(w in line[2] + line[3] for w in words)]
    assert found, "no %s %s %s in %s" % (result, check, words, lines)
    return found[0]


class Tree:
    """A false host: paths and contents. A path that ends with / is a directory, -> a link."""

    def __init__(self, files):
        self.dir = tempfile.TemporaryDirectory(prefix="kvd-test-host-")
        for path, content in dict({"proc/sys/kernel/osrelease": "6.1.0"}, **files).items():
            path = os.path.join(self.dir.name, path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if content.startswith("->"):
                os.symlink(content[2:], path)
            elif not path.endswith("/"):
                with open(path, "w") as out:
                    out.write(content + "\n")

    def __enter__(self):
        return self.dir.name

    def __exit__(self, *exc):
        self.dir.cleanup()


def host(files, daemon=None):
    """What doctor says of that host."""
    with Tree(files) as root, tempfile.TemporaryDirectory() as empty:
        if daemon:
            return doctor(daemon, "--root", root)
        done = ctl("-j", "doctor", "--root", root, run_dir=empty)
        return lines_of(json.loads(done.stdout), done.returncode)


def rdma(device, net, mtu="9000", state="4: ACTIVE", gid="fe80::1", kind="RoCE v2"):
    port = "sys/class/infiniband/%s/ports/1/" % device
    return {port + "state": state, port + "rate": "100 Gb/sec (4X EDR)",
            port + "link_layer": "Ethernet", port + "gid_attrs/ndevs/0": net,
            port + "gids/0": gid, port + "gid_attrs/types/0": kind,
            "sys/class/net/%s/mtu" % net: mtu}


def host_is_checked_without_a_daemon():
    with tempfile.TemporaryDirectory() as empty:
        done = ctl("doctor", run_dir=empty)
        assert done.returncode == 2 and not done.stderr, done
        assert re.match(r"FAIL  daemon +ENODAEMON: .+ -> systemctl start", done.stdout), done
        assert "  kernel " in done.stdout and "  gpu " in done.stdout, done
        lines = lines_of(json.loads(ctl("-j", "doctor", run_dir=empty).stdout), 2)
        assert not {"peers", "loop", "rooms"} & {line[1] for line in lines}, lines
        for wrong in (["--root", "there"], ["--stuck", "x"], ["extra"]):
            assert ctl("doctor", *wrong, run_dir=empty).returncode == 2, wrong


def adapters_are_judged_by_sysfs():
    lines = host(dict(rdma("mlx5_0", "eth0"), **rdma("mlx5_1", "eth1")))
    assert "100 Gb/sec" in has(lines, "ok", "rdma", "mlx5_0:1 is active")[2]
    assert not [line for line in lines if line[1] == "rdma" and line[0] != "ok"], lines
    lines = host(dict(rdma("mlx5_0", "eth0"), **rdma("mlx5_1", "eth1", mtu="1500")))
    has(lines, "warn", "rdma", "mlx5_1:1 has MTU 1500, mlx5_0:1 has 9000")
    lines = host(dict(rdma("mlx5_0", "eth0"), **rdma("mlx5_1", "eth1", state="1: DOWN")))
    has(lines, "warn", "rdma", "mlx5_1:1 is not active: 1: DOWN")
    assert not [line for line in lines if line[0] == "FAIL" and line[1] == "rdma"], lines
    has(host(rdma("mlx5_0", "eth0", state="1: DOWN")), "FAIL", "rdma", "no port is active")
    lines = host(rdma("mlx5_0", "eth0", gid="0000:0000:0000:0000:0000:0000:0000:0000"))
    has(lines, "FAIL", "rdma", "mlx5_0:1 has no GID", "eth0")
    has(host(rdma("mlx5_0", "eth0", kind="IB/RoCE v1")), "warn", "rdma", "RoCE v1 only")
    has(host({}), "ok", "rdma", "no adapter")


def gpus_are_judged_by_procfs():
    nvidia = "proc/driver/nvidia/"
    closed = {nvidia + "version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54",
              "dev/nvidiactl": ""}
    lines = host(closed)
    has(lines, "ok", "gpu", "550.54")
    assert len([line for line in lines if line[1] == "gpu"]) == 1, lines
    has(host({**closed, nvidia + "capabilities/gpu0/mig/gi1/access": ""}), "warn", "gpu",
        "gpu0 has MIG enabled")
    has(host({nvidia + "version": "NVRM version: x  550.54"}), "FAIL", "gpu", "nvidiactl")
    with_rdma = {**closed, **rdma("mlx5_0", "eth0")}
    has(host(with_rdma), "warn", "gpu", "adapters cannot reach GPU memory", "nvidia-peermem")
    for fine in ({"sys/module/nvidia_peermem/": ""},
                 {nvidia + "version": "NVRM version: NVIDIA UNIX Open Kernel Module  560"}):
        lines = host({**with_rdma, **fine})
        assert not [line for line in lines if line[1] == "gpu" and line[0] != "ok"], lines
    has(host({}), "ok", "gpu", "no NVIDIA driver")


def kernel_and_memory_are_judged():
    release = "proc/sys/kernel/osrelease"
    for text, result in (("5.10.0-8", "FAIL"), ("5.15.1", "warn"), ("6.1.0", "ok"),
                         ("10.0", "ok")):
        has(host({release: text}), result, "kernel", text)
    pages = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    has(host({pages: "always never [deny] force"}), "warn", "huge-pages", "deny")
    has(host({pages: "always [never] deny force"}), "ok", "huge-pages")
    has(host({}), "warn", "huge-pages", "small pages")
    fault = "proc/sys/vm/unprivileged_userfaultfd"
    has(host({fault: "0"}), "warn", "userfaultfd", "sysctl")
    has(host({fault: "1"}), "ok", "userfaultfd")
    has(host({fault: "0", "dev/userfaultfd": ""}), "ok", "userfaultfd")
    has(host({}), "warn", "shm", "/dev/shm")


def process_is_judged_by_its_own_files():
    with Daemon("[chunks]\nchunk_memory = 64 MiB\n") as d, contextlib.closing(Engine(d, "vllm")):
        mine = "proc/%d/" % d.proc.pid
        files = {mine + "limits": "Limit   Soft Limit  Hard Limit  Units\n"
                 "Max open files            40                   524288               files\n"
                 "Max locked memory         65536                65536                bytes",
                 mine + "status": "Name:\tkvd\nUid:\t997\t997\t997\t997\n"
                 "CapEff:\t0000000000000000\nSeccomp:\t2"}
        lines = host(files, d)
        has(lines, "warn", "limits", "RLIMIT_NOFILE is 40", "LimitNOFILE=65536")
        has(lines, "ok", "rights", "uid 997 without capabilities, seccomp filter")
        files[mine + "limits"] = files[mine + "limits"].replace(" 40 ", " 65536 ")
        has(host(files, d), "ok", "limits", "RLIMIT_NOFILE 65536, RLIMIT_MEMLOCK 64.0 KiB")
        files[mine + "status"] = files[mine + "status"].replace("0000000", "0000008", 1)
        has(host(files, d), "warn", "rights", "capabilities", "(8")
        files[mine + "status"] = files[mine + "status"].replace("997", "0")
        has(host(files, d), "warn", "rights", "runs as root")
        has(host({mine + "exe": "->/usr/bin/kvd (deleted)"}, d), "warn", "version", "replaced")
        # the engine is this process
        theirs = "proc/%d/ns/" % os.getpid()
        apart = {mine + "ns/pid": "->pid:[1]", theirs + "pid": "->pid:[2]"}
        has(host(apart, d), "ok", "namespaces", "1 engine ('vllm')", "memfd works")
        apart["proc/driver/nvidia/version"] = "x"
        has(host(apart, d), "warn", "namespaces", "--ipc=host")
        has(host({mine + "ns/pid": "->pid:[1]", theirs + "pid": "->pid:[1]"}, d), "ok",
            "namespaces", "1 engine in the daemon's")


def link_of_the_address_is_judged():
    """A daemon that has an address of its own, in a network namespace."""
    address = "10.201.7.3"
    wrapper = ["unshare", "-n", "sh", "-c", "ip link set lo up && ip address add %s/24 dev lo "
               "&& exec \"$@\"" % address, "sh"]
    if subprocess.run(wrapper + ["true"], capture_output=True).returncode:
        raise Skip("a network namespace (unshare -n, ip)")
    text = "[peer]\nlisten = tcp://%s:7400\ninsecure = yes\n" \
        "[transport]\ntcp_listen = tcp://%s:7401\n" % (address, address)
    route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n" \
        "eth1\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\n" \
        "eth9\t0007C90A\t00000000\t0001\t0\t0\t0\t00FFFFFF"
    with tempfile.TemporaryDirectory() as tmp, \
            Daemon(text, wrapper=wrapper, log_dir=tmp) as d:
        d.expect("insecure")
        mine = "proc/%d/net/" % d.proc.pid
        link = {"sys/class/net/eth9/mtu": "1500", "sys/class/net/eth9/operstate": "up",
                "sys/class/net/eth9/speed": "25000"}
        # the daemon's network is ours
        net = dict(link, **{mine[:-1]: "->../net", "proc/net/dev": "", "proc/net/route": route})
        lines = host(net, d)
        has(lines, "ok", "network", "eth9 is up, MTU 1500, 25000 Mb/s, has " + address)
        has(lines, "ok", "listen", "tcp://%s:7400" % address)
        has(lines, "warn", "listen", "insecure = yes")
        has(host(dict(net, **{"sys/class/net/eth9/operstate": "down"}), d), "FAIL", "network",
            "eth9, which has %s, is down" % address)
        bare = {mine + "dev": "", mine + "route": route.rsplit("\n", 1)[0]}
        has(host(bare, d), "FAIL", "network", "no interface has a subnet with " + address)
        for kind, result in ("host LOCAL", "ok"), ("link UNICAST", "FAIL"):
            trie = "Local:\n  |-- %s\n     /32 %s\n  |-- 127.0.0.1\n     /32 host LOCAL"
            has(host({**bare, mine + "fib_trie": trie % (address, kind)}, d), result,
                "network", address)
        # of its own: what this program's says of the address counts for nothing
        other = {"proc/net/dev": "", "proc/net/route": route}
        has(host({**bare, **other, **link}, d), "FAIL", "network", "no interface has a subnet")
        has(host({mine + "dev": "", mine + "route": route, "proc/net/dev": "", **link}, d), "ok",
            "network", "eth9 has %s, in the daemon's own network namespace" % address)
        # out of reach
        lines = host({**other, **link}, d)
        has(lines, "warn", "network", "not readable: %s is checked in" % address)
        has(lines, "ok", "network", "eth9 is up")
        # the real one
        has(doctor(d), "ok", "network", "%s is an address of this host" % address)


def every_check_names_its_daemon():
    with Daemon() as d:
        lines = doctor(d)
        has(lines, "ok", "daemon", "kvd serves, pid %d" % d.proc.pid)
        # right for a single host: no warning
        has(lines, "note", "listen", "not reachable from other hosts")
        has(lines, "note", "listen", "the port changes at each start")
        for check in ("version", "config", "keys", "transports", "limits", "sockets", "rdma",
                      "gpu", "peers", "rooms", "failures"):
            has(lines, "ok", check)
        assert {"kernel", "shm", "loop"} <= {line[1] for line in lines}, lines
        text = ctl("--socket", d.socket_path, "doctor", run_dir=d.run_dir).stdout
        for line in text.splitlines():
            assert re.match(r"(ok  |note|warn|FAIL)  [a-z-]+ +\S", line), line


def different_configuration_is_reported():
    with Daemon("[rooms]\noffer_lease = 5 s\n") as d:
        d.expect("config")
        d.write_config("[rooms]\noffer_lease = 7 s\n")
        assert has(doctor(d), "warn", "config", "lease 5 s -> 7 s")[3] == "kvd-ctl reload"
        d.write_config("[rooms]\nrooms = 9\n")
        assert "restart" in has(doctor(d), "warn", "config", "rooms 65536 -> 9")[3]
        d.write_config("[rooms]\nrooms = many\n")
        has(doctor(d), "FAIL", "config", "rooms = many")


def keys_are_judged():
    with tempfile.TemporaryDirectory() as tmp:
        keys = {n: ctl("keygen", tmp + "/" + n).stdout.strip() for n in "ab"}
        with open(tmp + "/allow", "w") as allow:
            allow.write("a %s\n" % keys["a"])
        text = "[peer]\ncurve_secret_file = %s/%s\ncurve_allow_file = %s/allow\n"
        with Daemon(text % (tmp, "a", tmp), name="a") as a, \
                Daemon(text % (tmp, "b", tmp), name="b") as b:
            a.expect("refused")
            b.expect("refuses this daemon's key")
            has(doctor(a), "ok", "keys", "1 daemon may connect")
            endpoint = json.loads(ctl("--socket", a.socket_path, "-j", "status").stdout)
            lines = doctor(b, "--peer", endpoint["endpoint"])
            has(lines, "FAIL", "peers", "EAUTH", "kvd-ctl keys")
            assert len([line for line in lines if line[1] == "peers"]) == 1, lines
            has(doctor(b), "warn", "peers", ": unreached for", "EAUTH", "kvd-ctl keys")
            has(doctor(a), "warn", "keys", "was refused", "curve_allow_file")
            os.chmod(tmp + "/a", 0o644)
            has(doctor(a), "FAIL", "keys", "has mode 0644", "chmod 600")
            os.chmod(tmp + "/a", 0o600)
            os.chmod(tmp + "/allow", 0o666)
            has(doctor(a), "FAIL", "keys", "has mode 0666", "chmod go-w")
            os.unlink(tmp + "/allow")
            has(doctor(a), "FAIL", "keys", "No such file")


def wrong_key_on_other_host_is_corrected_there():
    with tempfile.TemporaryDirectory() as tmp:
        keys = {n: ctl("keygen", tmp + "/" + n).stdout.strip() for n in "ab"}
        with open(tmp + "/allow", "w") as allow:
            allow.write("a %s\nb %s\n" % (keys["a"], keys["b"]))
        text = "[peer]\ncurve_secret_file = %s/%s\ncurve_allow_file = %s/allow\n"
        with Daemon(text % (tmp, "a", tmp), name="a") as a, \
                Daemon(text % (tmp, "b", tmp), name="b") as b:
            a.expect("refused")
            b.expect("does not have the expected CURVE key")
            endpoint = json.loads(ctl("--socket", a.socket_path, "-j", "status").stdout)
            wrong = endpoint["endpoint"].split("#")[0] + "#" + keys["b"]
            has(doctor(b, "--peer", wrong), "FAIL", "peers", "EAUTH")
            told = has(doctor(a), "warn", "keys", "expects another CURVE key")
            assert told[3].startswith("on that host: "), told


def missing_administrator_rights_are_reported():
    need_users(65534)
    with Daemon("[control]\nsocket_mode = 0666\nallow_uids = 65534\n") as d:
        os.chmod(d.run_dir, 0o755)
        who = dict(user=65534, group=65534, extra_groups=[], capture_output=True, text=True,
                   timeout=DEADLINE_S)
        base = [for_everyone("kvd-ctl"), "--socket", d.socket_path, "-j"]
        done = subprocess.run(base + ["doctor"], **who)
        lines = lines_of(json.loads(done.stdout), done.returncode)
        has(lines, "warn", "daemon", "uid 65534 has no permission", "admin_uids")
        assert not {"rooms", "failures", "namespaces"} & {line[1] for line in lines}, lines
        done = subprocess.run(base[:-1] + ["top", "--count", "1", "--interval", "100ms"],
                              **who)
        assert done.returncode == 0 and "EPERM" in done.stdout, done


def stale_sockets_and_twins_are_reported():
    with tempfile.TemporaryDirectory() as run_dir:
        text = "[peer]\nadvertise = tcp://127.0.0.1:7999\n"
        with Daemon(text, run_dir=run_dir, name="a") as a:
            dead = socket.socket(socket.AF_UNIX)
            dead.bind(run_dir + "/dead.sock")
            dead.close()
            open(run_dir + "/dead.lock", "w").close()
            has(doctor(a), "warn", "sockets", "dead.sock: no process listens")
            with Daemon(text, run_dir=run_dir, name="b"):
                has(doctor(a), "FAIL", "sockets", "a and b both advertise "
                    "tcp://127.0.0.1:7999")


def peers_and_failures_have_remedies():
    with open("docs/reference.md") as page:
        remedies = dict(re.findall(r"^\| (E\w+) \|.*\| ([^|]+) \|$", page.read(), re.M))
    with Daemon(name="p0") as a, Daemon(name="d0") as b:
        prefill, decode = Engine(a, "vllm"), Engine(b, "sglang")
        src, dst = Cache(prefill), Cache(decode)
        lines = doctor(b, "--peer", prefill.endpoint, "--peer", prefill.endpoint, "--peer",
                       "tcp://127.0.0.1:%d" % free_port(), "--stuck", "10ms")
        has(lines, "ok", "peers", prefill.endpoint.split("#")[0] + ": connected, transport shm")
        has(lines, "FAIL", "peers", "ETIMEOUT", "check that its daemon runs")
        assert len([line for line in lines if line[1] == "peers"]) == 3, lines
        # no room wanted it
        has(doctor(b), "note", "peers", ": unreached for")
        has(lines, "ok", "peers", "p0: up for", "kvd 0.")
        has(lines, "ok", "rooms", "none waiting longer than 10ms")
        decode.cmd("room.open", room="5000", role="recv", pool=dst.pool,
                   sources=[prefill.endpoint])
        decode.cmd("room.bind", room="5000", views={"kv": {"pages": [3, 4]}})
        prefill.cmd("room.open", room="7", role="send", pool=src.pool)
        prefill.cmd("room.abort", room="7", reason="a reason")
        prefill.until(7, "send", FAILED)
        lines = doctor(b, "--stuck", "1ms")
        has(lines, "warn", "rooms", "room 5000 (recv) has waited", "an engine of peer p0")
        line = until("it is told", lambda: [line for line in doctor(a, "--stuck", "1ms")
                                            if "5000 (send)" in line[2]])[0]
        assert line[0] == "warn" and "the router" in line[3], line
        found = has(doctor(a), "warn", "failures", "1 room failed with EABORTED", "a reason")
        assert found[3] == remedies["EABORTED"], found
        prefill.close()
        a.stop()
        b.expect("down")
        line = until("it is told", lambda: [
            line for line in doctor(b)
            if re.search("p0: (dialing|down|lost) for", line[2])])[0]
        assert line[0] != "ok" and line[3] in remedies.values(), line
        decode.close()


def index_nodes_are_judged():
    conf = "[chunks]\nchunk_memory = 64 MiB\nchunk_index = tcp://127.0.0.1:%d\n"
    with Daemon(conf % free_port() + "[peer]\ninsecure = yes\n") as d:
        d.expect("insecure: ")
        until("memory for chunks", lambda: ("ok", "chunks") in [l[:2] for l in doctor(d)])
        has(doctor(d), "warn", "chunks", "0 of 1 daemons of chunk_index are up",
            "kvd-ctl peers")


def all_instances_are_checked_and_the_worst_is_reported():
    with tempfile.TemporaryDirectory() as run_dir:
        with Daemon(run_dir=run_dir, name="a") as a, Daemon(run_dir=run_dir, name="b") as b:
            for command in ("health", "status", "rooms", "peers", "stats", "history"):
                done = ctl(command, "--all", run_dir=run_dir)
                assert done.returncode == 0 and not done.stderr, (command, done)
                assert done.stdout.startswith("a:\n") and "\n\nb:\n" in done.stdout, done
                told = json.loads(ctl("-j", command, "--all", run_dir=run_dir).stdout)
                assert sorted(told) == ["a", "b"] and told["a"], (command, told)
            done = ctl("doctor", "--all", "-j", run_dir=run_dir)
            told = json.loads(done.stdout)
            assert done.returncode == 1 and told["b"]["result"] == "warn", done
            held = socket.socket(socket.AF_UNIX)
            held.bind(run_dir + "/c.sock")
            held.listen(1)
            done = ctl("-j", "health", "--all", run_dir=run_dir)
            told = json.loads(done.stdout)
            assert done.returncode == 3 and told["a"]["state"] == "serving", done
            assert "stopped" in told["c"]["error"]["message"], told
            held.setblocking(False)
            try:
                held.accept()
                raise AssertionError("it connected")
            except BlockingIOError:
                pass
            held.close()
            done = ctl("health", run_dir=run_dir)
            assert done.returncode == 3 and "for all instances: --all" in done.stderr, done
            assert "--all" not in ctl("drain", run_dir=run_dir).stderr
            for wrong in (["--name", "a", "health", "--all"], ["drain", "--all"],
                          ["stats", "--prometheus", "--all", "--name", "a"]):
                assert ctl(*wrong, run_dir=run_dir).returncode == 2, wrong
            assert ctl("stats", "--prometheus", "--all", run_dir=run_dir).returncode >= 2
            for d in (a, b):
                assert d.proc.poll() is None
    with tempfile.TemporaryDirectory() as empty:
        assert ctl("health", "--all", run_dir=empty).returncode == 3


run([host_is_checked_without_a_daemon, adapters_are_judged_by_sysfs, gpus_are_judged_by_procfs,
     kernel_and_memory_are_judged, process_is_judged_by_its_own_files,
     link_of_the_address_is_judged, every_check_names_its_daemon,
     missing_administrator_rights_are_reported, different_configuration_is_reported,
     keys_are_judged, wrong_key_on_other_host_is_corrected_there,
     stale_sockets_and_twins_are_reported, peers_and_failures_have_remedies,
     index_nodes_are_judged, all_instances_are_checked_and_the_worst_is_reported])
