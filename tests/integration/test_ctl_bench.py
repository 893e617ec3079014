#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvd-ctl bench between two live daemons, as an operator runs it."""
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, run  # noqa: E402

CTL = BUILD + "/kvd-ctl"
SMALL = ("--count", "3", "--size", "64K,256")


class Two:
    """Two daemons of one run dir."""

    def __init__(self, transport="shm"):
        self.transport = transport

    def __enter__(self):
        self.dir = tempfile.TemporaryDirectory(prefix="kvd-test-")
        self.near, self.far = (
            Daemon("[transport]\ntransports = %s\n" % self.transport,
                   run_dir=self.dir.name, name=name)
            for name in ("near", "far"))
        for daemon in (self.near, self.far):
            daemon.__enter__()
        return self

    def __exit__(self, *why):
        self.near.__exit__(*why)
        if self.far.proc.poll() is None:
            self.far.__exit__(*why)
        self.dir.cleanup()

    def bench(self, *args, stdin=""):
        done = subprocess.run([CTL, "--socket", self.near.socket_path, "bench"] + list(args),
                              capture_output=True, text=True, input=stdin,
                              timeout=3 * DEADLINE_S)
        return done.returncode, done.stdout, done.stderr

    def serve(self):
        return subprocess.Popen([CTL, "--socket", self.far.socket_path, "bench", "--serve",
                                 "--memory", "4M"], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    @contextlib.contextmanager
    def ticket(self):
        lender = self.serve()
        yield lender.stdout.readline().strip()
        lender.stdout.close()
        assert lender.wait(DEADLINE_S) == 0, lender.stderr.read()


def sound(result, size, op):
    assert (result["size"], result["op"], result["repetitions"]) == (size, op, 3), result
    assert result["rows"] == min(65536, (4 << 20) // size // 2), result
    low, high = result["spread"]
    assert 0 < low <= result["gbps"] <= high and result["first_gbps"] > 0, result
    moved = result["size"] * result["rows"] / result["us"] / 1e3
    assert abs(moved - result["gbps"]) < 0.01 * moved, result


def two_daemons_of_a_host_are_measured():
    with Two() as two, two.ticket() as ticket:
        status, out, err = two.bench(ticket, "--json", *SMALL)
        assert status == 0, err
        said = json.loads(out)
        assert said["peer"]["transport"] == "shm" and said["peer"]["name"] == "far", said
        assert "id" not in said["peer"] and len(said["results"]) == 4, said
        for result, (size, op) in zip(said["results"], [
                (65536, "push"), (65536, "pull"), (256, "push"), (256, "pull")]):
            sound(result, size, op)


def requested_transport_is_measured():
    with Two("tcp") as two, two.ticket() as ticket:
        status, out, err = two.bench(ticket, "--json", "--transport", "tcp", *SMALL)
        assert status == 0, err
        said = json.loads(out)
        assert said["peer"]["transport"] == "tcp" and len(said["results"]) == 4, said


def ticket_by_argument_and_by_input_measures():
    with Two() as two:
        lender = two.serve()
        ticket = lender.stdout.readline()
        status, out, err = two.bench(ticket.strip(), "--count", "2", "--op", "pull",
                                     "--flat", "--size", "4K", "--rows", "7")
        assert status == 0 and "bytes verified" in out, (out, err)
        line, = [line for line in out.splitlines() if line.startswith("pull")]
        assert "push" not in out and line.split()[3] == "7", out
        status, out, err = two.bench("-", "--count", "2", "--size", "4K", "--gather",
                                     stdin=ticket)
        assert status == 0 and "push" in out and "pull" in out, (out, err)
        # nobody reads the ticket any more: the lender goes, and its memory with it
        lender.stdout.close()
        assert lender.wait(DEADLINE_S) == 0, lender.stderr.read()
        status, out, err = two.bench(ticket.strip(), "--count", "1")
        assert status == 1 and out == "" and "no session" in err, (out, err)


def lender_ends_with_its_daemon():
    with Two() as two:
        lender = two.serve()
        assert lender.stdout.readline()
        two.far.stop()
        assert lender.wait(DEADLINE_S) == 3 and "daemon has exited" in lender.stderr.read()
        lender.stdout.close()


def silent_peer_is_refused():
    with Two() as two, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and nobody listens there
        endpoint = "tcp://127.0.0.1:%d" % deaf.getsockname()[1]
        status, out, err = two.bench("%s,1,%s,4096,4194304" % (endpoint, "ab" * 16),
                                     "--timeout", "1")
        assert status == 1 and out == "", (status, out)
        assert endpoint in err and "cannot be reached" in err, err


def other_transport_than_wanted_is_refused():
    with Two() as two, two.ticket() as ticket:
        status, out, err = two.bench(ticket, "--transport", "verbs", *SMALL)
        assert status == 1 and out == "" and "by shm, not by verbs" in err, (out, err)


def ticket_of_another_key_is_refused():
    with Two() as two:
        lender = two.serve()
        endpoint, epoch, secret, address, size = lender.stdout.readline().strip().split(",")
        for wrong, words in (((endpoint, epoch, "0" * 32, address, size), "EAUTH"),
                             ((endpoint, epoch, secret, str(int(address) + (1 << 40)), size),
                              "is not registered")):
            status, out, err = two.bench(",".join(wrong), "--count", "1", "--size", "4K")
            assert status == 1 and out == "" and words in err, (out, err)
        lender.stdout.close()
        assert lender.wait(DEADLINE_S) == 0


def invalid_command_line_is_refused_before_any_command():
    with Two() as two, two.ticket() as served:
        for args in ((), ("--serve", served), (served, "--size", "0"),
                     (served, "--size", "4K,"), (served, "--size", "x"),
                     (served, "--op", "sideways"), (served, "--rows", "0"),
                     (served, "--memory", "4M"), ("--serve", "--memory", "1K"),
                     (served, "--count", "10001"),
                     (served, "--size", "4K", "--rows", "1025")):
            status, out, err = two.bench(*args)
            assert status == 2 and out == "" and err, (args, status, out, err)
        for ticket in ("", "x", "tcp://127.0.0.1:9,1,zz,0,4194304",
                       "tcp://127.0.0.1:9,1,%s,0,4194304,more" % ("ab" * 16),
                       "tcp://127.0.0.1:9,1,%s,0,99999999999999999" % ("ab" * 16)):
            status, out, err = two.bench("-", stdin=ticket)
            assert status == 1 and out == "" and "ticket" in err, (ticket, status, err)


if __name__ == "__main__":
    run([two_daemons_of_a_host_are_measured, requested_transport_is_measured,
         ticket_by_argument_and_by_input_measures,
         lender_ends_with_its_daemon, silent_peer_is_refused,
         other_transport_than_wanted_is_refused, ticket_of_another_key_is_refused,
         invalid_command_line_is_refused_before_any_command])
