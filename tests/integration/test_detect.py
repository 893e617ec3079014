#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Detection of dead processes: engines that are killed with gigabytes mapped, killed while a
forked child keeps their socket, stopped; and a daemon that is killed and back at the same
endpoint. The notification of the other side and its time, from the moment the engine's memory
is freed."""
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, Skip, child_of, free_port, run  # noqa: E402
from kvd_engine import (FAILED, SUCCESS, WAITING, Cache, Engine, open_push)  # noqa: E402

SLOW = 1 if os.path.basename(BUILD) == "rel" else 5
GIB = os.environ.get("KVD_TEST_GIB")  # of the engine that is killed; else 2, where they are
PAGES, THERE, TOKENS = [3, 4, 9, 1], [7, 2, 8, 12], 64
VIEW = {"kv": dict(pages=PAGES, tokens=[0, TOKENS])}


class Child:
    """A process that runs body(say, hear): lines to and from the test."""

    def __init__(self, body):
        here, there = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            here.close()
            lines = there.makefile("rw")

            def say(text):
                lines.write(text + "\n")
                lines.flush()
            try:
                body(say, lambda: lines.readline().strip())
            except BaseException as why:  # noqa: B902 a child must not continue as the test
                say("failed: %r" % why)
            os._exit(0)
        there.close()
        here.settimeout(DEADLINE_S)
        self.lines = here.makefile("rw")

    def hear(self):
        return self.lines.readline().strip()

    def say(self, text):
        self.lines.write(text + "\n")
        self.lines.flush()

    def signal(self, number):
        os.kill(self.pid, number)

    def memory_gone(self):
        """Wait until the kernel has taken its memory (it may not be dead yet)."""
        with open("/proc/%d/statm" % self.pid) as statm:
            end = time.monotonic() + DEADLINE_S
            while True:
                statm.seek(0)
                if statm.read().startswith("0 "):
                    return time.monotonic()
                assert time.monotonic() < end, "its memory does not go"

    def wait(self):
        os.waitpid(self.pid, 0)
        return time.monotonic()


def stat(engine, name):
    return int([m for m in engine.cmd("stats")["metrics"] if m["name"] == name][0]["value"])


def until(what, holds, deadline_s=None):
    end = time.monotonic() + (deadline_s or DEADLINE_S)
    while not holds():
        assert time.monotonic() < end, what
    return time.monotonic()


def spare_mib():
    """A third of the free memory of the machine: only the victim may die of this."""
    with open("/proc/meminfo") as lines:
        left = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail")]
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            with open("/sys/fs/cgroup/" + limit) as one, open("/sys/fs/cgroup/" + used) as other:
                left.append(int(one.read()) - int(other.read()))
        except (OSError, ValueError):  # not there, or "max"
            pass
    return min(left) // 3 >> 20


def prefill_child(a, ballast_mib, fork_keeper):
    def body(say, hear):
        engine = Engine(a, "victim")
        cache = Cache(engine)
        engine.cmd("room.open", room="1", role="send", pool=cache.pool)
        engine.cmd("room.open", room="2", role="offer", pool=cache.pool, views=VIEW)
        ballast = mmap.mmap(-1, max(1, ballast_mib << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, len(ballast), 4096):
            ballast[at] = 1
        if fork_keeper:
            pid = os.fork()
            if not pid:  # with the socket and the memory of its parent
                signal.alarm(2 * DEADLINE_S)  # for any result of the test
                signal.pause()
                os._exit(0)
            say("%d" % pid)
        say("ready")
        hear()
    return Child(body)


def victim_killed(ballast_mib, fork_keeper):
    with Daemon() as a, Daemon() as b:
        decode, witness = Engine(b, "decode"), Engine(a, "witness")
        dst = Cache(decode)
        child = prefill_child(a, ballast_mib, fork_keeper)
        keeper = int(child.hear()) if fork_keeper else 0
        assert child.hear() == "ready"
        decode.cmd("room.open", room="1", role="recv", pool=dst.pool,
                   sources=[witness.endpoint])
        decode.cmd("room.bind", room="1", views={"kv": dict(pages=THERE, tokens=[0, TOKENS])})
        decode.until(1, "recv", WAITING)
        decode.acknowledged(1)
        child.signal(signal.SIGKILL)
        gone = child.memory_gone()
        told = until("the other side is not told",
                     lambda: decode.state(1, "recv")[2]["state"] == FAILED or
                     decode.state(1, "recv")[2]["flags"] & 1)
        unmapped = until("its regions are still mapped", lambda: stat(witness, "regions") == 0)
        dead = child.wait()
        decode.until(1, "recv", FAILED)
        error = decode.state(1, "recv")[1]
        print("     %d MiB%s: told after %.0f ms, unmapped after %.0f ms, its process took "
              "%.0f ms more" % (ballast_mib, ", child keeps the socket" if keeper else "",
                                (told - gone) * 1000, (unmapped - gone) * 1000,
                                (dead - gone) * 1000))
        if keeper:
            os.kill(keeper, signal.SIGKILL)
        assert error["code"] == "ESESSION" and "victim" in error["message"], error
        assert error["retryable"], error
        assert told - gone < 1 * SLOW, told - gone
        assert unmapped - gone < 2 * SLOW, unmapped - gone
        decode.close()
        witness.close()


def engine_killed_with_gigabytes_is_reported_and_unmapped_in_time():
    victim_killed(int(GIB) << 10 if GIB else min(2048, spare_mib()), False)


def engine_killed_while_its_child_keeps_the_socket_is_dead():
    victim_killed(0, True)


def engine_in_other_pid_namespace_exit_is_detected():
    """The daemon is in its own PID namespace, as in a side car: the engine has no number there,
    and its child keeps the socket."""
    wrapper = ("unshare", "--pid", "--fork")
    if subprocess.run(wrapper + ("true",), stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skip("needs a PID namespace (CAP_SYS_ADMIN)")
    with socket.socketpair()[0] as probe:
        try:
            os.close(probe.getsockopt(socket.SOL_SOCKET, 77))  # SO_PEERPIDFD
        except OSError:
            raise Skip("needs SO_PEERPIDFD (Linux 6.5)")
    daemon = Daemon(wrapper=wrapper)
    with daemon:
        inside = child_of(daemon.proc.pid)
        daemon.proc.send_signal = lambda number: os.kill(inside, number)
        witness = Engine(daemon, "witness")
        child = prefill_child(daemon, 0, True)
        keeper = int(child.hear())
        assert child.hear() == "ready"
        assert stat(witness, "sessions") == 2
        child.signal(signal.SIGKILL)
        gone = child.memory_gone()
        ended = until("its session lives", lambda: stat(witness, "sessions") == 1)
        os.kill(keeper, signal.SIGKILL)
        child.wait()
        assert ended - gone < 2 * SLOW, ended - gone
        witness.close()


def engine_stopped_still_receives():
    """A stopped engine is not dead: its requests continue and complete."""
    with Daemon() as a, Daemon() as b:
        prefill = Engine(a, "prefill")
        src = Cache(prefill)
        src.fill(PAGES, TOKENS)

        def body(say, hear):
            engine = Engine(b, "stopped")
            cache = Cache(engine)
            engine.cmd("room.open", room="1", role="recv", pool=cache.pool,
                       sources=[prefill.endpoint])
            engine.cmd("room.bind", room="1",
                       views={"kv": dict(pages=THERE, tokens=[0, TOKENS])})
            # unread answers are bounded, and no reason to die; in one piece: a socket
            # takes 277 small ones that the daemon does not read yet
            engine.sock.sendall(b"".join(b'{"cmd":"help","id":%d}\n' % (engine.last + i)
                                         for i in range(1, 301)))
            engine.last += 300
            say("ready")
            hear()
            for i in range(300):
                engine.lines.readline()
            cache.check(THERE, TOKENS)
            say("state %d" % engine.state(1, "recv")[0])
        prefill.cmd("room.open", room="1", role="send", pool=src.pool)
        child = Child(body)
        assert child.hear() == "ready"
        prefill.until(1, "send", WAITING)
        child.signal(signal.SIGSTOP)
        prefill.cmd("room.send", room="1", seq=0, last=True, views=VIEW)
        prefill.until(1, "send", SUCCESS)  # all landed, and confirmed, without it
        witness = Engine(b, "witness")
        looks = stat(witness, "commands_total")
        until("time passes", lambda: stat(witness, "commands_total") > looks + 200)
        assert stat(witness, "sessions") == 2
        child.signal(signal.SIGCONT)
        child.say("go on")
        assert child.hear() == "state %d" % SUCCESS
        child.wait()
        prefill.close()
        witness.close()


class Watch(threading.Thread):
    """Waits for the end of a room, in parallel with other waits of its owner; the engine has no
    other user."""

    def __init__(self, engine, room, role):
        super().__init__(daemon=True)
        self.engine, self.key, self.ended, self.error = engine, (room, role), None, None
        self.start()

    def run(self):
        _, self.error = self.engine.until(*self.key, FAILED)
        self.ended = time.monotonic()

    def end(self):
        self.join()
        assert self.ended, "room %d (%s) did not fail" % self.key
        return self.ended, self.error


def daemon_back_at_its_endpoint_is_a_new_instance():
    """Killed and started again at once: the rooms of the old one fail, with a reason that names
    it, and new ones work without any configuration."""
    config = "[peer]\nlisten = tcp://127.0.0.1:%d\n" % free_port()
    with Daemon(patient=False) as b:
        decode = Engine(b, "decode")
        dst = Cache(decode)
        a = Daemon(config, patient=False)
        with a:
            prefill = Engine(a, "prefill")
            src = Cache(prefill)
            open_push(prefill, decode, src, dst, 1, PAGES, THERE, TOKENS, send=False)
            old = prefill.info["instance"]
            watch = Watch(decode, 1, "recv")  # to start again may take its time
            a.proc.kill()
            begin = time.monotonic()
            a.wait()
            prefill.close()
            a.notify.close()
            a.start().wait_ready()
            ended, error = watch.end()
            took = ended - begin
            assert error["code"] in ("EPEER", "ERESTART"), error
            assert old[:8] in error["message"] and error["retryable"], error
            assert took < 1.2 * SLOW, took
            prefill = Engine(a, "prefill")
            assert prefill.info["instance"] != old
            src = Cache(prefill)
            src.fill(PAGES, TOKENS)
            open_push(prefill, decode, src, dst, 2, PAGES, THERE, TOKENS)
            decode.until(2, "recv", SUCCESS)
            dst.check(THERE, TOKENS)
            peers = [p for p in decode.cmd("peer.list")["peers"] if not p["self"]]
            assert [p["instance"] for p in peers] == [prefill.info["instance"]], peers
            prefill.close()
        decode.close()


def daemon_stopping_with_rooms_reports_reason_on_both_sides():
    """The drain's deadline expires with a room that waits for its engine."""
    with Daemon() as b:
        decode = Engine(b, "decode")
        dst = Cache(decode)
        with Daemon("[daemon]\ndrain_timeout = 3 s\n") as a:
            a.expect("drain deadline passed")
            prefill = Engine(a, "prefill")
            src = Cache(prefill)
            open_push(prefill, decode, src, dst, 1, PAGES, THERE, TOKENS, send=False)
            begin = time.monotonic()
            a.proc.send_signal(signal.SIGTERM)
            until("drain refuses", lambda: prefill.cmd("health")["state"] != "serving")
            words = prefill.refused("EDRAIN", "room.open", room="2", role="send",
                                    pool=src.pool)
            assert "draining" in words, words
            decode.until(1, "recv", FAILED)
            took = time.monotonic() - begin
            error = decode.state(1, "recv")[1]
            assert error["code"] == "EDRAIN" and error["retryable"], error
            assert "stopping" in error["message"] and "instance" in error["message"], error
            assert 3 <= took < 3 + 1 * SLOW, took
            assert a.wait() == 0
            prefill.close()
        decode.close()


def daemon_draining_ends_after_its_rooms():
    """Running rooms end well, without waiting for the drain's deadline."""
    with Daemon() as b:
        decode = Engine(b, "decode")
        dst = Cache(decode)
        with Daemon() as a:
            prefill = Engine(a, "prefill")
            src = Cache(prefill)
            src.fill(PAGES, TOKENS)
            open_push(prefill, decode, src, dst, 1, PAGES, THERE, TOKENS, send=False)
            a.proc.send_signal(signal.SIGTERM)
            until("it does not drain", lambda: prefill.cmd("health")["state"] == "draining")
            assert a.proc.poll() is None
            begin = time.monotonic()
            prefill.cmd("room.send", room="1", seq=0, last=True, views=VIEW)
            decode.until(1, "recv", SUCCESS)
            dst.check(THERE, TOKENS)
            assert a.wait() == 0
            assert time.monotonic() - begin < 5 * SLOW
            prefill.close()
        decode.close()


run([engine_killed_with_gigabytes_is_reported_and_unmapped_in_time,
     engine_killed_while_its_child_keeps_the_socket_is_dead,
     engine_in_other_pid_namespace_exit_is_detected,
     engine_stopped_still_receives, daemon_back_at_its_endpoint_is_a_new_instance,
     daemon_stopping_with_rooms_reports_reason_on_both_sides,
     daemon_draining_ends_after_its_rooms])
