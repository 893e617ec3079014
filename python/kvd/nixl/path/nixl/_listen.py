# SPDX-License-Identifier: Apache-2.0
"""Metadata over TCP between agents with a listen thread.

A message is u32 kind, u32 length, bytes; one per connection, and SEND is answered by one LOAD.
Metadata permits reading and writing memory, and the requester is not authenticated, so the listener
binds to loopback; KVD_NIXL_LISTEN names another address."""
import os
import queue
import select
import socket
import struct
import threading

from .logging import get_logger

logger = get_logger("listen")

LOAD, SEND, INVALIDATE = 0x4b564401, 0x4b564402, 0x4b564403
LENGTH_MAX = 64 << 20
TIMEOUT_S = 5.0
_HEAD = struct.Struct("<II")


def _read(sock, n):
    parts = []
    while n:
        part = sock.recv(min(n, 1 << 16))
        if not part:
            raise ConnectionError("the peer closed the connection")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _receive(sock):
    kind, length = _HEAD.unpack(_read(sock, _HEAD.size))
    if kind not in (LOAD, SEND, INVALIDATE) or length > LENGTH_MAX:
        raise ValueError("not a message of a kvd agent")
    return kind, _read(sock, length)


def _send(sock, kind, data=b""):
    sock.sendall(_HEAD.pack(kind, len(data)) + data)


class Listener:
    """Two threads: a server and a client; both end with the agent."""

    def __init__(self, agent, port):
        import weakref
        self._agent = weakref.ref(agent)
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = os.environ.get("KVD_NIXL_LISTEN", "127.0.0.1")
        try:
            self._sock.bind((address, port))
            self._sock.listen(64)
        except OSError as error:
            self._sock.close()
            raise RuntimeError("listening on %s:%d: %s" % (address, port, error)) from error
        self.port = self._sock.getsockname()[1]
        self._wake, self._end = os.pipe()
        self._jobs = queue.SimpleQueue()
        for run in (self._serve, self._work):
            threading.Thread(target=run, name="nixl-listen", daemon=True).start()

    def stop(self):
        self._jobs.put(None)
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def send(self, ip, port, blob):
        self._jobs.put((ip, port, LOAD, blob))

    def fetch(self, ip, port):
        self._jobs.put((ip, port, SEND, b""))

    def invalidate(self, ip, port, name):
        self._jobs.put((ip, port, INVALIDATE, name.encode("utf-8", "surrogateescape")))

    # ---- threads ----

    def _serve(self):
        while True:
            ready = select.select([self._sock, self._wake], [], [])[0]
            if self._wake in ready:
                break
            peer = self._sock.accept()[0]
            # one slow peer must not delay the others
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()
        self._sock.close()
        os.close(self._wake)

    def _answer(self, peer):
        try:
            with peer:
                peer.settimeout(TIMEOUT_S)
                kind, data = _receive(peer)
                agent = self._agent()
                if agent is None:
                    return
                if kind == SEND:
                    _send(peer, LOAD, agent.getLocalMD())
                else:
                    self._take(agent, kind, data)
        except Exception as error:
            logger.error("a peer's message: %s", error)

    @staticmethod
    def _take(agent, kind, data):
        if kind == LOAD:
            agent.loadRemoteMD(data)
            return
        agent.invalidateRemoteMD(data)

    def _work(self):
        while True:
            job = self._jobs.get()
            if job is None:
                return
            ip, port, kind, data = job
            try:
                with socket.create_connection((ip, port), TIMEOUT_S) as peer:
                    peer.settimeout(TIMEOUT_S)
                    _send(peer, kind, data)
                    if kind == SEND:
                        answer, blob = _receive(peer)
                        agent = self._agent()
                        if agent is not None and answer == LOAD:
                            agent.loadRemoteMD(blob)
            except Exception as error:
                logger.error("metadata with %s:%d: %s", ip, port, error)
