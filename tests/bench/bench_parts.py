# SPDX-License-Identifier: Apache-2.0
"""Who takes turns in a bench: kvd, its limits, its peers.

Each part is made once for a work, with fresh memory, and then asked for a few
transfers at a time, so that all see the same machine. turn(n) appends GB/s (1e9)
to `samples`. A part that polls while it has nothing to do is stopped between its
turns.
"""
import glob
import json
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time

from bench_works import ROWS, row_args
from kvd_daemon import BUILD, Daemon

HERE = os.path.dirname(os.path.abspath(__file__))
ANSWER_S = 300


class Gone(Exception):
    """A part ended or does not answer: its words."""


class Child:
    """A process group of its own; stderr is kept for the words of Gone."""

    def __init__(self, argv, env=None, stdin=subprocess.DEVNULL):
        self.argv, self.said = argv, b""
        self.errors = tempfile.TemporaryFile()
        self.proc = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE,
                                     stderr=self.errors, start_new_session=True,
                                     env=dict(os.environ, **(env or {})))

    def signal(self, number):
        try:
            os.killpg(self.proc.pid, number)
        except ProcessLookupError:
            pass

    def gone(self, words):
        self.errors.seek(0)
        last = self.errors.read().decode("utf-8", "replace").strip().splitlines()[-3:]
        return Gone("%s %s%s" % (os.path.basename(self.argv[0]), words,
                                 ": " + " | ".join(last) if last else ""))

    def line(self, wanted=None, seconds=ANSWER_S):
        """The next line of its stdout (that holds `wanted`)."""
        end = time.monotonic() + seconds
        while True:
            while b"\n" in self.said:
                line, self.said = self.said.split(b"\n", 1)
                line = line.decode("utf-8", "replace")
                if wanted is None or wanted in line:
                    return line
            left = max(0, end - time.monotonic())
            if not select.select([self.proc.stdout], [], [], left)[0]:
                raise self.gone("does not answer")
            more = os.read(self.proc.stdout.fileno(), 1 << 16)
            if not more:
                raise self.gone("ended")
            self.said += more

    def close(self):
        if self.proc.stdin:
            self.proc.stdin.close()
        self.proc.stdout.close()
        self.signal(signal.SIGCONT)
        try:
            if self.proc.stdin:
                self.proc.wait(30)
        except subprocess.TimeoutExpired:
            pass
        self.signal(signal.SIGKILL)
        self.proc.wait()
        self.errors.close()


class Obeyer(Child):
    """A program that answers lines with lines of JSON."""

    def __init__(self, argv, env=None, frozen=False):
        super().__init__(argv, env, subprocess.PIPE)
        self.frozen = frozen

    def ask(self, line):
        if self.frozen:
            self.signal(signal.SIGCONT)
        try:
            self.proc.stdin.write((line + "\n").encode())
            self.proc.stdin.flush()
        except BrokenPipeError:
            raise self.gone("ended") from None
        answer = json.loads(self.line())
        if self.frozen:
            self.signal(signal.SIGSTOP)
        return answer

    def hello(self):
        answer = json.loads(self.line())
        if self.frozen:
            self.signal(signal.SIGSTOP)
        return answer


class Pair:
    """Two daemons of one run dir that have one transport."""

    def __init__(self, transport, threads, more=""):
        self.transport = transport
        self.dir = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        # a machine that others use, too, measures badly, but to the end
        config = "log_level = warn\n[peer]\ndead_after = 10 s\n[transport]\n" \
            "transports = %s\ncopy_threads = %d\n%s\n%s\n" % (
                transport, threads, more, os.environ.get("KVD_BENCH_OPTIONS", "").replace(";", "\n"))
        self.daemons = [Daemon(config, run_dir=self.dir.name, name=name)
                        for name in ("prefill", "decode")]
        for daemon in self.daemons:
            daemon.start().wait_ready()
        self.sockets = [daemon.socket_path for daemon in self.daemons]

    def path(self):
        """What the daemons say that they move bytes by."""
        out = subprocess.run([BUILD + "/kvd-ctl", "--socket", self.sockets[0], "--json",
                              "peers"], capture_output=True, text=True, check=True).stdout
        return {(peer["transport"], peer["path"]) for peer in json.loads(out)["peers"]
                if peer["data_line"] and not peer["self"]}

    def close(self):
        for daemon in self.daemons:
            try:
                daemon.__exit__(None, None, None)
            except AssertionError as why:
                print("bench: %s: %s" % (daemon.name, why))
        self.dir.cleanup()


def used_s(pid):
    """CPU time of all threads; times that one went to sleep."""
    ns = switches = 0
    for path in glob.glob("/proc/%d/task/*" % pid):
        try:
            with open(path + "/schedstat") as f:
                ns += int(f.read().split()[0])
            with open(path + "/status") as f:
                switches += [int(line.split()[1]) for line in f
                             if line.startswith("voluntary_ctxt")][0]
        except OSError:
            pass  # a thread that ended meanwhile
    return ns / 1e9, switches


class Part:
    """`cpu`: what the cores of both sides worked for a GB, in seconds, a turn each, where
    that can be told. A busy machine falsifies it less than the clock."""

    def __init__(self, name, total):
        self.name, self.total, self.samples, self.cpu = name, total, [], []

    def seconds(self, times):
        self.samples += [self.total / s / 1e9 for s in times]

    def close(self):
        pass


class Xfer(Part):
    """kvd, and (limit) the same rows on the same memory without it."""

    def __init__(self, pair, memory, op, rows, caches, threads):
        super().__init__("kvd", ROWS[rows][2])
        self.pids = [daemon.proc.pid for daemon in pair.daemons]
        self.obeyer = Obeyer([BUILD + "/bench/bench_xfer"] + pair.sockets + [memory, op] +
                             row_args(rows, caches) + [caches, str(threads)])
        try:
            hello = self.obeyer.hello()
        except Gone:
            self.obeyer.close()
            raise
        self.rows, self.first = hello["rows"], self.total / hello["first_s"] / 1e9

    def turn(self, n):
        before = sum(used_s(pid)[0] for pid in self.pids)
        self.seconds(took for took, _ in self.obeyer.ask("kvd %d" % n))
        after = sum(used_s(pid)[0] for pid in self.pids)
        self.cpu.append((after - before) / n / self.total * 1e9)

    def close(self):
        self.obeyer.close()


class Limit(Part):
    def __init__(self, xfer, name):
        super().__init__(name, xfer.total)
        self.xfer = xfer

    def turn(self, n):
        said = self.xfer.obeyer.ask("limit %d" % n)
        self.seconds(took for took, _ in said)
        self.cpu += [cpu / self.total * 1e9 for _, cpu in said]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run(argv, env=None, seconds=60):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds,
                          env=dict(os.environ, **(env or {})))
    if done.returncode:
        raise Gone("%s: %s" % (os.path.basename(argv[0]),
                               (done.stdout + done.stderr).strip()[-200:]))
    return done.stdout


class TcpFloor(Part):
    """The bare program of ours: the same cold rows between two processes."""

    def __init__(self, op, rows, threads, how="auto"):
        super().__init__("tcp_floor", ROWS[rows][2])
        self.how = how
        self.argv = [BUILD + "/bench/tcp_floor", op] + row_args(rows, "cold") + [str(threads)]

    @staticmethod
    def there():
        return os.path.exists(BUILD + "/bench/tcp_floor")

    def turn(self, n):
        said = json.loads(run(self.argv + [str(n), self.how]))
        self.seconds(said["seconds"])
        self.cpu += [s / self.total * 1e9 for s in said.get("cpu_s", [])]


class Iperf(Part):
    """One hot buffer over one stream: two samples a turn."""

    def __init__(self):
        super().__init__("iperf3", 0)
        self.port = free_port()
        self.server = Child(["iperf3", "--server", "--port", self.port, "--forceflush"])
        self.server.line("Server listening", 10)

    def turn(self, n):
        argv = ["iperf3", "--client", "127.0.0.1", "--port", self.port, "--bytes", "512M",
                "--json"]
        for attempt in range(10):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
            said = json.loads(done.stdout or "{}")
            if said.get("end", {}).get("sum_received"):
                self.samples.append(said["end"]["sum_received"]["bits_per_second"] / 8e9)
                n -= 2
            elif attempt == 9:
                raise Gone("iperf3: %s" % said.get("error", "no answer"))
            else:
                select.select([], [], [], 0.05)  # its server listens anew after each
            if n <= 0:
                return

    def close(self):
        self.server.close()


class UcxPerftest(Part):
    """UCX's own figure for messages of 1 MiB over tcp: a sample a turn."""
    ENV = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
    ARGV = ["ucx_perftest", "-t", "tag_bw", "-s", "1048576", "-n", "800", "-w", "50"]

    def __init__(self):
        super().__init__("ucx_perftest", 0)

    def turn(self, n):
        port = free_port()
        server = Child(["stdbuf", "-oL"] + self.ARGV + ["-p", port], self.ENV)
        try:
            server.line("Waiting for connection", 10)
            said = run(self.ARGV + ["127.0.0.1", "-p", port], self.ENV)
        finally:
            server.close()
        # "Final:  iterations  50%ile  average  overall  MB/s average  MB/s overall …"
        self.samples.append(float(re.search(r"Final:(.*)", said)[1].split()[5]) * 2**20 / 1e9)


class Nixl(Part):
    def __init__(self, venv, op, rows, caches, tls):
        super().__init__("NIXL", ROWS[rows][2])
        self.obeyer = Obeyer([venv + "/bin/python", HERE + "/peers/nixl_peer.py", op] +
                             row_args(rows, caches) + [caches, tls], frozen=True)
        try:
            self.obeyer.hello()
        except Gone:
            self.obeyer.close()
            raise

    def turn(self, n):
        self.seconds(self.obeyer.ask("peer %d" % n))

    def close(self):
        self.obeyer.close()


class Mooncake(Part):
    """Its own transfer_engine_bench over tcp, one second a turn."""
    COMMON = ["--protocol=tcp", "--metadata_server=P2PHANDSHAKE", "--auto_discovery=true",
              "--local_server_name=127.0.0.1:0", "--buffer_size=268435456"]
    ENV = {"MC_FORCE_TCP": "1"}

    def __init__(self, venv, op, rows):
        super().__init__("Mooncake", 0)
        site = [name for name in os.listdir(venv + "/lib") if name.startswith("python3")][0]
        program = "%s/lib/%s/site-packages/mooncake/transfer_engine_bench" % (venv, site)
        log = tempfile.TemporaryFile()
        self.target = subprocess.Popen([program, "--mode=target"] + self.COMMON, stdout=log,
                                       stderr=log, env=dict(os.environ, **self.ENV),
                                       start_new_session=True)
        self.argv = [program, "--mode=initiator"] + self.COMMON + [
            "--segment_id=" + self.wait_segment(log), "--block_size=%d" % ROWS[rows][1],
            "--batch_size=128", "--operation=" + op, "--threads=2", "--duration=1"]
        os.killpg(self.target.pid, signal.SIGSTOP)

    def wait_segment(self, log):
        end = time.monotonic() + 20
        while time.monotonic() < end and self.target.poll() is None:
            log.seek(0)
            said = log.read().decode("utf-8", "replace")
            at = re.findall(r"127\.0\.0\.1:\d+", said)
            if at and "DRAM is used" in said:
                return at[-1]
            select.select([], [], [], 0.05)
        self.close()
        raise Gone("mooncake: its target does not start: " + said.strip()[-200:])

    def turn(self, n):
        os.killpg(self.target.pid, signal.SIGCONT)
        done = subprocess.run(self.argv, capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, **self.ENV))
        os.killpg(self.target.pid, signal.SIGSTOP)
        said = re.findall(r"throughput ([0-9.]+)", done.stdout + done.stderr)
        if done.returncode or not said:
            raise Gone("mooncake: " + (done.stdout + done.stderr).strip()[-200:])
        self.samples.append(float(said[-1]))

    def close(self):
        try:
            os.killpg(self.target.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.target.wait()
