# SPDX-License-Identifier: Apache-2.0
"""Puts and fetches that the daemon does not answer in time: their pages may be in use, and the
handle reports until when."""
import hashlib

import pytest

import kvd
from conftest import judging_deaths, until
from kvd.rooms import ABORTING
from kvd_daemon import Daemon
from kvd_space import space_of

T = 64
CHUNKS = "[chunks]\nchunk_memory = 16 MiB\n"
IDS = [hashlib.sha256(b"%d" % i).digest() for i in range(2)]


class Cache:
    """64 pages of 16 tokens, 64 bytes each."""

    def __init__(self, daemon):
        self.client = kvd.Client(daemon.socket_path)
        memory = kvd.Memory(64 * 16 * 64)
        self.bytes = memory.array()
        self.bytes[:] = 7
        layout = kvd.Layout()
        layout.buffer(memory.nbytes)
        layout.view("kv", 16, 64).heads("kv", 0, "k", buffer=0, unit_bytes=64)
        pool = self.client.pool(layout, [self.client.register(memory)])
        self.space = space_of(self.client, pool, model="m", scheme="s", tokens=T)

    def pages(self, first):
        return {"kv": list(range(first, first + 8))}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.client.close()


def in_doubt(daemon, call):
    """A call that the daemon, which is stopped, does not answer."""
    daemon.freeze()
    try:
        move = call()
        assert move.state == kvd.TRANSFERRING and move.read().flags & ABORTING
    finally:
        daemon.thaw()
    return move


def ended(cache, move):
    def over():
        cache.client._kvd.poll()  # the late answer arrives with a turn
        try:
            return move.state in (kvd.FAILED, kvd.SUCCESS)
        except kvd.Error as error:  # its slot is another's already
            return error.code == "EGONE"
    until(over)


@judging_deaths
def test_move_without_reply_is_kept_until_quiesced():
    with Daemon(CHUNKS, patient=False) as daemon, Cache(daemon) as cache:
        move = in_doubt(daemon, lambda: cache.space.put(IDS, cache.pages(0), timeout=0.05))
        ended(cache, move)
        until(lambda: cache.client.command("chunk.list")["moves"] == 0)
        cache.space.put(IDS, cache.pages(0)).wait(timeout=60)
        hold = cache.space.hold(IDS)
        assert hold.chunks == 2
        move = in_doubt(daemon, lambda: hold.fetch(cache.pages(16), timeout=0.05))
        ended(cache, move)
        hold.fetch(cache.pages(32)).wait(timeout=60)
        assert (cache.bytes[32 * 1024:40 * 1024] == 7).all()


@judging_deaths
def test_move_in_doubt_fails_with_its_daemon():
    with Daemon(CHUNKS, patient=False) as daemon, Cache(daemon) as cache:
        daemon.freeze()
        move = cache.space.put(IDS, cache.pages(0), timeout=0.05)
        assert move.state == kvd.TRANSFERRING
        daemon.proc.kill()
        daemon.proc.wait()
        ended(cache, move)
        daemon.notify.close()
        daemon.start().wait_ready()
        with Cache(daemon) as again:  # its memory for chunks is made
            assert again.space.find(IDS).chunks == 0


@judging_deaths
def test_hold_without_reply_fails_and_is_released():
    with Daemon(CHUNKS, patient=False) as daemon, Cache(daemon) as cache:
        cache.space.put(IDS, cache.pages(0)).wait(timeout=60)
        secret = cache.space.hold(IDS).secret
        daemon.freeze()
        try:
            for call in (lambda: cache.space.hold(IDS, timeout=0.05),
                         lambda: cache.space.join(secret, timeout=0.05),
                         lambda: cache.space.find(IDS, timeout=0.05)):
                with pytest.raises(kvd.Error) as told:
                    call()
                assert told.value.code == "ENOREPLY", told.value
        finally:
            daemon.thaw()
        until(lambda: cache.client.command("chunk.list")["holds"] == 0)
