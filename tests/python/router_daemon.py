# SPDX-License-Identifier: Apache-2.0
"""A kvd's control socket as far as kvd.router needs it: sessions, a directory of groups. Used
by test_router_members.py, so that answers of a daemon can be wrong."""
import json
import os
import socket
import struct
import threading
import time

import fcntl

MAGIC, SLOTS, SLOT_BYTES, HEADER_BYTES = 0x3130535441445644, 64, 64, 64
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


def page():
    """A status page; a descriptor."""
    fd = os.memfd_create("fake", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    size = HEADER_BYTES + SLOTS * SLOT_BYTES
    os.ftruncate(fd, size)
    os.pwrite(fd, struct.pack("<Q16sQIIQQII", MAGIC, b"fakefakefakefake", 1 << 62, SLOTS,
                              SLOT_BYTES, 1 << 40, 0, SLOTS // 2, 0), 0)
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    return fd, size


class Directory:
    """Daemon at a path. groups: {group: {place: entry}}; changes after `since` are sent."""

    def __init__(self, path):
        self.path, self.groups, self.log, self.revision = path, {}, [], 1
        self.lock, self.epoch, self.asked, self.answer = threading.Lock(), 0, [], None
        self.lines, self.sock = [], None

    def start(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(self.path)
        self.sock.listen(16)
        threading.Thread(target=self._accept, args=(self.sock,), daemon=True).start()
        return self

    def stop(self):
        """As a daemon that is killed."""
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        os.unlink(self.path)
        for line in self.lines:
            try:
                line.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        with self.lock:
            self.groups, self.log, self.revision = {}, [], 1

    def put(self, group, worker, entry, rank=0):
        """An entry; None: it is removed."""
        with self.lock:
            place = (worker, rank)
            self.revision += 1
            entries = self.groups.setdefault(group, {})
            if entry is None:
                entries.pop(place, None)
            else:
                entries[place] = dict(entry, worker=worker, tp_rank=rank)
            self.log.append((self.revision, group, place, entries.get(place)))

    def _accept(self, sock):
        while True:
            try:
                line, _ = sock.accept()
            except OSError:
                return
            self.lines.append(line)
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line):
        with self.lock:
            self.epoch += 1
            mine = self.epoch
        published = []
        try:
            for text in line.makefile("r"):
                said = json.loads(text)
                with self.lock:
                    self.asked.append(said)
                self._reply(line, said, mine, published)
        except (OSError, ValueError):
            pass
        line.close()
        for group, worker in published:
            self.put(group, worker, None)

    def _reply(self, line, said, mine, published):
        fds, out = [], {"id": said["id"], "ok": True}
        if said["cmd"] == "hello":
            fd, size = page()
            fds = [fd]
            out.update(daemon="fake", name="fake", instance="66" * 16, session=mine, epoch=mine,
                       time_ns=str(time.monotonic_ns()),
                       endpoint="tcp://127.0.0.1:1", status={"slots": SLOTS, "bytes": size})
        elif said["cmd"] == "group.query":
            with self.lock:
                out.update(self.answer or self._query(said))
        elif said["cmd"] == "group.publish":
            self.put(said["group"], said["worker"], {
                k: said[k] for k in ("url", "engine", "bootstrap") if k in said})
            published.append((said["group"], said["worker"]))
        text = json.dumps(out).encode() + b"\n"
        if fds:
            socket.send_fds(line, [text], fds)
            os.close(fds[0])
        else:
            line.sendall(text)

    def _query(self, said):
        group, since = said["group"], said.get("since")
        out = {"revision": self.revision, "complete": True, "synced": True}
        if since is None or since > self.revision:
            return dict(out, whole=True, ranks=list(self.groups.get(group, {}).values()))
        last = {place: entry for revision, name, place, entry in self.log
                if name == group and revision > since}
        return dict(out, ranks=[e for e in last.values() if e], gone=[
            {"worker": w, "tp_rank": r} for (w, r), e in last.items() if not e])
