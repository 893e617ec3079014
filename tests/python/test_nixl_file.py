# SPDX-License-Identifier: Apache-2.0
"""NIXL's FILE section: between an agent's memory and its files. Every byte is verified, those
around the rows too; and wrong or malicious arguments of an engine."""
import contextlib
import gc
import os
import random
import socket
import subprocess
import tempfile
import threading

import numpy as np
import pytest

from conftest import until
from kvd_daemon import Daemon
from nixl_peer import agent_of
from test_nixl import B, name  # noqa: F401 (B is a fixture)

MIB = 1 << 20


@pytest.fixture
def folder():
    """Of a file system that a daemon takes files of."""
    with tempfile.TemporaryDirectory(prefix="kvd-file-", dir="/dev/shm") as shm, \
            tempfile.TemporaryDirectory(prefix="kvd-file-") as disk:
        kind = subprocess.run(["stat", "-f", "-c", "%T", disk], capture_output=True,
                              text=True).stdout.strip()
        yield disk if kind in ("ext2/ext3", "xfs", "btrfs", "f2fs", "tmpfs") else shm


def words(count, seed=7):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


class Store:
    """An agent with memory and a file, both full of bytes that identify positions."""

    def __init__(self, daemon, folder, size=MIB, flags=os.O_RDWR, **config):
        self.daemon = daemon
        self.agent = agent_of(daemon.socket_path, name("store"), backends=["POSIX"], **config)
        self.memory = words(size, 1)
        self.at = self.memory.ctypes.data
        self.agent.register_memory([(self.at, size, 0, "")], "DRAM")
        self.path = os.path.join(folder, name("file"))
        self.bytes = words(size, 2)
        self.bytes.tofile(self.path)
        self.fd = os.open(self.path, flags | os.O_CLOEXEC)
        self.reg = self.agent.register_memory([(0, size, self.fd, "")], "FILE")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        os.close(self.fd)

    def content(self):
        with open(self.path, "rb") as file:
            return np.frombuffer(file.read(), np.uint8)

    def start(self, op, rows, fd=None):
        """Rows of (offset in memory, offset in the file, bytes)."""
        fd = self.fd if fd is None else fd
        local = self.agent.get_xfer_descs([(self.at + m, n, 0) for m, _, n in rows], "DRAM")
        remote = self.agent.get_xfer_descs([(f, n, fd) for _, f, n in rows], "FILE")
        return self.agent.initialize_xfer(op, local, remote, self.agent.name)

    def finish(self, handle):
        return until(lambda: self.agent.check_xfer_state(handle) == "DONE", pause=0.0002)

    def run(self, op, rows, fd=None):
        handle = self.start(op, rows, fd)
        if self.agent.transfer(handle) != "DONE":
            self.finish(handle)
        return handle

    def still(self, handle):
        """Release it, and again until that is over."""
        def released():
            try:
                self.agent.release_xfer_handle(handle)
                return True
            except Exception as error:
                assert type(error).__name__ == "nixlBackendError"
                return False
        until(released)


@pytest.fixture
def store(pair, folder):
    with Store(pair[0], folder) as made:
        yield made


# ---- bytes -------------------------------------------------------------------------------

def scattered(count, size, seed=5):
    """Rows that lie apart, of all lengths; those of the file and of memory in other orders."""
    rng = random.Random(seed)
    cell = size // count
    cells = list(range(count))
    rng.shuffle(cells)
    return [(i * cell + rng.randrange(64), to * cell + rng.randrange(64),
             rng.choice([1, 77, cell // 2, cell - 64])) for i, to in enumerate(cells)]


@pytest.mark.parametrize("size", [MIB, 48 * MIB], ids=["vm", "memfd"])
def test_rows_land_at_their_places(pair, folder, size):
    with Store(pair[0], folder, size) as s:
        rows = scattered(500, size)
        wanted = s.bytes.copy()
        for m, f, n in rows:
            wanted[f:f + n] = s.memory[m:m + n]
        s.run("WRITE", rows)
        assert np.array_equal(s.content(), wanted)
        rows = scattered(300, size, 9)
        mine = s.memory.copy()
        for m, f, n in rows:
            mine[m:m + n] = wanted[f:f + n]
        s.run("READ", rows)
        assert np.array_equal(s.memory, mine)
        assert np.array_equal(s.content(), wanted)


def test_prepared_lists_and_strides(store):
    a, page = store.agent, 4096
    local = a.prep_xfer_dlist("", [(store.at + i * page, page, 0) for i in range(64)], "DRAM")
    remote = a.prep_xfer_dlist(a.name, [(i * page, page, store.fd) for i in range(64)], "FILE")
    picks, places = list(range(0, 64, 3)), list(range(63, -1, -3))
    before = store.memory.copy()
    handle = a.make_prepped_xfer("READ", local, picks, remote, places)
    a.transfer(handle)
    store.finish(handle)
    for to, of in zip(picks, places):
        before[to * page:(to + 1) * page] = store.bytes[of * page:(of + 1) * page]
    assert np.array_equal(store.memory, before)
    strided = a.prep_xfer_dlist(a.name, np.array([(512, 100, store.fd, 1000, 64)], np.uint64),
                                "FILE")
    handle = a.make_prepped_xfer("WRITE", a.prep_xfer_dlist(
        "", [(store.at + i * 100, 100, 0) for i in range(64)], "DRAM"), list(range(64)),
        strided, list(range(64)))
    a.release_dlist_handle(strided)
    for _ in range(2):
        a.transfer(handle)
        store.finish(handle)
        wanted = store.bytes.copy()
        for i in range(64):
            wanted[512 + i * 1000:612 + i * 1000] = store.memory[i * 100:(i + 1) * 100]
        assert np.array_equal(store.content(), wanted)
    assert a.query_xfer_backend(handle) == "POSIX"


def test_many_files_in_one_transfer(pair, folder):
    with Store(pair[0], folder) as s:
        fds = [os.open(os.path.join(folder, "f%d" % i), os.O_RDWR | os.O_CREAT)
               for i in range(40)]
        try:
            s.agent.register_memory([(0, 8192, fd, "") for fd in fds], "FILE")
            local = s.agent.get_xfer_descs([(s.at + i * 8192, 8192, 0) for i in range(40)],
                                           "DRAM")
            remote = s.agent.get_xfer_descs([(0, 8192, fd) for fd in fds], "FILE")
            handle = s.agent.initialize_xfer("WRITE", local, remote, s.agent.name)
            s.agent.transfer(handle)
            s.finish(handle)
            for i, fd in enumerate(fds):
                assert os.pread(fd, 9000, 0) == s.memory[i * 8192:(i + 1) * 8192].tobytes()
        finally:
            for fd in fds:
                os.close(fd)


def test_files_by_path(pair, folder, B):
    with Store(pair[0], folder) as s:
        path = os.path.join(folder, "by,path:x")
        s.agent.register_memory([(0, 0, 7777, "rw,create:" + path)], "FILE")
        s.run("WRITE", [(0, 100, 5000)], 7777)
        with open(path, "rb") as file:
            assert file.read() == bytes(100) + s.memory[:5000].tobytes()
        assert os.stat(path).st_mode & 0o777 & ~0o644 == 0
        s.agent.register_memory([(0, 4096, 7778, b"ro:" + path.encode())], "FILE")
        s.run("READ", [(9000, 100, 2000)], 7778)
        assert np.array_equal(s.memory[9000:11000], s.memory[:2000])
        for device, meta in [(7777, "rw:" + path), (7779, "ro:/nowhere/at/all"),
                             (7779, "rw:" + folder), (7777, "")]:
            with pytest.raises(B.nixlBackendError):
                s.agent.register_memory([(0, 4096, device, meta)], "FILE")
        with pytest.raises(B.nixlBackendError):  # what is no path mode is the device's
            s.agent.register_memory([(0, 4096, 99999, "rw,what:" + path)], "FILE")
        s.agent.deregister_memory(s.agent.get_reg_descs([(0, 0, 7777, "")], "FILE"))
        s.agent.register_memory([(0, 4096, 7777, "rw:" + path)], "FILE")


def test_newest_registration_of_a_number_counts(store, folder):
    """Descriptors are closed, and their numbers are reused."""
    for i in range(3):
        path = os.path.join(folder, "reused%d" % i)
        with open(path, "wb+") as file:
            fd = os.dup2(file.fileno(), 900)
        store.agent.register_memory([(0, MIB + i, fd, "")], "FILE")
        store.run("WRITE", [(i * 100, 0, 100)], fd)
        os.close(fd)
        with open(path, "rb") as file:
            assert file.read() == store.memory[i * 100:i * 100 + 100].tobytes()


def test_registration_outlives_the_descriptor(store):
    fd = os.dup(store.fd)
    store.agent.register_memory([(0, MIB, fd, "")], "FILE")
    os.close(fd)
    store.run("WRITE", [(0, 0, 100)], fd)
    assert np.array_equal(store.content()[:100], store.memory[:100])


def test_writing_past_the_end_makes_it_longer(pair, folder):
    with Store(pair[0], folder) as s:
        s.agent.register_memory([(0, 0, s.fd, "")], "FILE")
        s.run("WRITE", [(0, 3 * MIB, 1000)])
        got = s.content()
        assert got.size == 3 * MIB + 1000 and not got[MIB:3 * MIB].any()
        assert np.array_equal(got[3 * MIB:], s.memory[:1000])


def test_query_of_files_reports_size_and_mode(pair, folder, B):
    a = agent_of(pair[0].socket_path, name(), backends=["POSIX", "UCX"])
    assert "FILE_SEG" in a.get_plugin_mem_types("POSIX")
    path = os.path.join(folder, "asked")
    with open(path, "wb") as file:
        file.write(b"x" * 1234)
    told = a.query_memory([(0, 0, 0, path), (0, 0, 0, path + "no"), (0, 0, 0, ""),
                           (0, 0, 0, "x\0y")], "POSIX", "FILE")
    stat = os.stat(path)
    assert told == [{"size": "1234", "mode": str(stat.st_mode),
                     "mtime": str(int(stat.st_mtime))}, None, None, None]
    assert a.agent.queryMem(B.nixlRegDList(B.FILE_SEG), a.backends["POSIX"]) == []
    with pytest.raises(B.nixlNotSupportedError):
        a.query_memory([(0, 0, 0, path)], "UCX", "FILE")
    with pytest.raises(ValueError):
        a.query_memory([(0, 0, 0, path)], "GDS", "FILE")


def test_files_need_their_backend(pair, folder, B):
    a = agent_of(pair[0].socket_path, name())
    with open(os.path.join(folder, "x"), "wb+") as file:
        with pytest.raises(B.nixlNotFoundError) as told:
            a.register_memory([(0, 4096, file.fileno(), "")], "FILE")
        assert "POSIX" in str(told.value)
        a.create_backend("POSIX")
        a.register_memory([(0, 4096, file.fileno(), "")], "FILE")
        with pytest.raises(B.nixlNotFoundError):
            a.register_memory([(0, 4096, file.fileno(), "")], "FILE", backends=["UCX"])
        assert isinstance(a.get_agent_metadata(), bytes)
        with pytest.raises(B.nixlBackendError):
            a.get_partial_agent_metadata(a.get_reg_descs([(0, 4096, file.fileno(), "")],
                                                         "FILE"), True)


# ---- faults ------------------------------------------------------------------------------

def test_short_file_is_never_done(store, B):
    """And the agent continues, also with the same request."""
    handle = store.start("READ", [(0, 0, MIB)])
    for size in (MIB - 1, 4096, 0):
        os.ftruncate(store.fd, size)
        with pytest.raises(B.nixlBackendError) as told:
            store.agent.transfer(handle)
            store.finish(handle)
        assert "ends at" in str(told.value)
    store.bytes.tofile(store.path)
    store.agent.transfer(handle)
    store.finish(handle)
    assert np.array_equal(store.memory, store.bytes)


def test_file_truncated_during_transfer_is_complete_or_a_fault(pair, folder, B):
    """Its end comes and goes: what was cut off reads as a fault, as what was written again, or,
    between the two, as what a file that is longer again has there."""
    size, last, ended = 16 * MIB, 4096, threading.Event()
    with Store(pair[0], folder, size) as s:
        tail = s.bytes[size - last:]

        def cut():
            while not ended.is_set():
                os.ftruncate(s.fd, size - last)
                os.pwrite(s.fd, tail.tobytes(), size - last)
        thread = threading.Thread(target=cut)
        handle = s.start("READ", [(0, 0, size)])
        thread.start()
        seen = dict.fromkeys(["whole", "fault"], 0)

        def read():
            s.memory[:] = 0x5a
            try:
                s.agent.transfer(handle)
                s.finish(handle)
            except B.nixlBackendError as why:
                assert "ends at" in str(why)
                seen["fault"] += 1
                return
            assert np.array_equal(s.memory[:size - last], s.bytes[:size - last])
            got = s.memory[size - last:]
            assert ((got == tail) | (got == 0)).all()
            seen["whole"] += np.array_equal(got, tail)
        try:
            until(lambda: read() or all(seen.values()), pause=0)
        finally:
            ended.set()
            thread.join()
        s.memory[:] = 0x5a
        s.agent.transfer(handle)
        s.finish(handle)
        assert np.array_equal(s.memory, s.bytes)


def test_rights_of_the_descriptor_count(pair, folder, B):
    with Store(pair[0], folder) as s:
        for flags, refused, taken in [(os.O_RDONLY, "WRITE", "READ"),
                                      (os.O_WRONLY, "READ", "WRITE")]:
            fd = os.open(s.path, flags)
            s.agent.register_memory([(0, MIB, fd, "")], "FILE")
            before = s.content().copy()
            with pytest.raises(B.nixlNotAllowedError):
                s.run(refused, [(0, 0, 4096)], fd)
            assert np.array_equal(s.content(), before)
            s.run(taken, [(0, 0, 4096)], fd)
            os.close(fd)
        sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(sealed, MIB)
        s.agent.register_memory([(0, MIB, sealed, "")], "FILE")
        s.run("WRITE", [(0, 0, 4096)], sealed)
        import fcntl
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(B.nixlNotAllowedError):
            s.run("WRITE", [(0, 4096, 4096)], sealed)
        s.run("READ", [(8192, 0, 4096)], sealed)
        os.close(sealed)


def odd_descriptors(folder):
    path = os.path.join(folder, "odd")
    with open(path, "wb") as file:
        file.write(bytes(MIB))
    near, far = socket.socketpair()
    pipe = os.pipe()
    yield "directory", os.open(folder, os.O_RDONLY)
    yield "O_PATH", os.open(path, os.O_PATH)
    yield "socket", near.detach()
    yield "pipe", pipe[0]
    yield "pipe's end", pipe[1]
    yield "eventfd", os.eventfd(0)
    yield "memory", os.open("/proc/self/mem", os.O_RDWR)
    yield "statm", os.open("/proc/self/statm", os.O_RDONLY)
    yield "proc", os.open("/proc/self/status", os.O_RDONLY)
    yield "sysfs", os.open("/sys/kernel/mm/transparent_hugepage/enabled", os.O_RDONLY)
    yield "device", os.open("/dev/zero", os.O_RDWR)
    yield "pidfd", os.pidfd_open(os.getpid())
    yield "append", os.open(path, os.O_RDWR | os.O_APPEND)
    far.close()


def test_descriptor_of_other_type_is_refused(pair, folder, B):
    with Store(pair[0], folder) as s:
        for what, fd in odd_descriptors(folder):
            with pytest.raises(B.nixlBackendError):
                s.agent.register_memory([(0, 4096, fd, "")], "FILE")
                pytest.fail("%s was taken" % what)
            os.close(fd)
        s.run("READ", [(0, 0, 4096)])


@contextlib.contextmanager
def mounted(folder, *argv):
    """What mount(8) makes there; a skip where it may not."""
    at = os.path.join(folder, "mounted")
    os.mkdir(at)
    done = subprocess.run(["mount", *argv, at], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("root, and %s: %s" % (" ".join(argv[:2]), done.stderr.strip()))
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def test_file_of_an_overlay_is_refused(pair, folder, B):
    """FUSE may lie beneath one, and its server need not answer."""
    lower, upper, work = (os.path.join(folder, word) for word in ("lower", "upper", "work"))
    for path in (lower, upper, work):
        os.mkdir(path)
    with Store(pair[0], folder) as s, mounted(
            folder, "-t", "overlay", "overlay", "-o",
            "lowerdir=%s,upperdir=%s,workdir=%s" % (lower, upper, work)) as at:
        with open(os.path.join(at, "x"), "wb+") as file, \
                pytest.raises(B.nixlBackendError) as told:
            s.agent.register_memory([(0, 4096, file.fileno(), "")], "FILE")
        assert "0x794c7630" in str(told.value)


def test_stalled_disk_delays_its_own_transfers_only(pair, folder, B):
    """A file system that is frozen: writes to it wait in the kernel."""
    image = os.path.join(folder, "image")
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    with contextlib.ExitStack() as stack:
        made = subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True)
        if made.returncode:
            pytest.skip("mkfs.ext4")
        at = stack.enter_context(mounted(folder, "-o", "loop", image))
        slow = stack.enter_context(Store(pair[0], at, 8 * MIB))
        quick = stack.enter_context(Store(pair[0], folder))
        slow.run("WRITE", [(0, 0, MIB)])
        if subprocess.run(["fsfreeze", "-f", at]).returncode:
            pytest.skip("fsfreeze")
        thaw = stack.callback(lambda: subprocess.run(["fsfreeze", "-u", at],
                                                     capture_output=True))
        stuck = [slow.start("WRITE", [(0, 0, 8 * MIB)]) for _ in range(3)]
        for handle in stuck:
            assert slow.agent.transfer(handle) == "PROC"
        for i in range(20):
            quick.run("WRITE", [(0, 4096 * i, 4096)])
            quick.run("READ", [(0, 0, MIB)])
        slow.agent.agent._client.command("ping")
        for handle in stuck:
            assert slow.agent.check_xfer_state(handle) == "PROC"
        with pytest.raises(B.nixlBackendError):
            slow.agent.release_xfer_handle(stuck[0])
        quick.run("WRITE", [(0, 0, MIB)])
        with pytest.raises(B.nixlBackendError):
            slow.agent.release_xfer_handle(stuck[0])
        thaw()
        slow.still(stuck[0])
        for handle in stuck[1:]:
            slow.finish(handle)
        assert np.array_equal(slow.content(), slow.memory)


def test_invalid_file_places_are_refused(store, B):
    a, fd = store.agent, store.fd
    for row in [((1 << 63) - 1, 4096, fd, ""), ((1 << 64) - 1, 1, fd, ""),
                (0, 1 << 63, fd, ""), (0, 4096, 1 << 40, ""), (0, 4096, (1 << 31) + 5, "")]:
        with pytest.raises(B.nixlBackendError):
            a.register_memory([row], "FILE")
    for row in [(MIB - 4095, 4096, fd), ((1 << 64) - 4096, 4096, fd),
                ((1 << 64) - 1, 4096, fd), (0, 4096, fd + 1000), (1, MIB, fd)]:
        with pytest.raises(B.nixlNotFoundError):
            a.prep_xfer_dlist(a.name, [row], "FILE")
    for stride, count in [((1 << 64) - 1, 2), (4096, 257), (4096, (1 << 64) - 1)]:
        with pytest.raises(B.nixlNotFoundError):
            a.prep_xfer_dlist(a.name, np.array([(0, 4096, fd, stride, count)], np.uint64),
                              "FILE")
    with pytest.raises(B.nixlNotFoundError):
        a.prep_xfer_dlist("another", [(0, 4096, fd)], "FILE")


def test_deregistered_file_is_out_of_reach(store, B):
    handle = store.run("WRITE", [(0, 0, 4096)])
    store.memory[:] = 0xaa
    store.agent.deregister_memory(store.reg)
    with pytest.raises(B.nixlNotFoundError):
        store.agent.transfer(handle)
        store.finish(handle)
    with pytest.raises(B.nixlNotFoundError):
        store.start("READ", [(0, 0, 4096)])
    with pytest.raises(B.nixlNotFoundError):
        store.agent.deregister_memory(store.reg)
    assert not (store.content()[:4096] == 0xaa).all()


def test_released_transfer_accesses_no_memory(pair, folder, B):
    """In flight, release raises until that is so."""
    size, met = 64 * MIB, {"WRITE": 0, "READ": 0}
    with Store(pair[0], folder, size) as s:
        def meet(op):
            handle = s.start(op, [(0, 0, size)])
            s.agent.transfer(handle)
            try:
                s.agent.release_xfer_handle(handle)
            except B.nixlBackendError:
                met[op] += 1
                s.still(handle)
            s.memory[:] = 0xa5
            s.agent.agent._client.command("ping")

        for _ in range(30):
            os.pwrite(s.fd, bytes(size), 0)
            s.memory[:] = 0x11
            meet("WRITE")
            assert not (s.content() == 0xa5).any(), "written after the release"
            meet("READ")
            assert (s.memory == 0xa5).all(), "read after the release"
            if all(met.values()):
                return
        assert all(met.values()), "no release met a transfer in flight"


# ---- others ------------------------------------------------------------------------------

def reaches(agent, mine, remote, at, nbytes):
    """The result of a read at addresses by which another agent knows its file."""
    import kvd._kvd as _kvd
    local = _kvd.Dlist(agent.agent._kvd, None, mine.__array_interface__["data"][0], 1, 3,
                       mine.tobytes())
    row = np.array([(at, nbytes, 0)], np.uint64)
    try:
        target = _kvd.Dlist(agent.agent._kvd, remote.attach,
                            row.__array_interface__["data"][0], 1, 3, row.tobytes())
        xfer = _kvd.Xfer(0, local, None, target, None, None, 1)
        xfer.post(None)
        return until(lambda: xfer.poll() != 1 and (xfer.poll(), xfer.error()))
    except Exception as error:
        return type(error).__name__, str(error)


def test_file_is_its_own_agents(pair, folder):
    """Metadata and numbers give no access to it: on the same daemon or another."""
    with Store(pair[0], folder) as s:
        s.agent.create_backend("UCX")
        at = next(iter(s.agent.agent._files.values()))[0][2]
        for daemon in pair:
            other = agent_of(daemon.socket_path, name("other"))
            memory = np.full(8192, 0x5a, np.uint8)
            other.register_memory([(memory.ctypes.data, 8192, 0, "")], "DRAM")
            other.add_remote_agent(s.agent.get_agent_metadata())
            other.make_connection(s.agent.name)
            remote = other.agent._remotes[s.agent.name]
            mine = np.array([(memory.ctypes.data, 4096, 0)], np.uint64)
            good = reaches(other, mine, remote, s.at, 4096)
            assert good[0] == 0 and np.array_equal(memory[:4096], s.memory[:4096]), good
            memory[:] = 0x5a
            bad = reaches(other, mine, remote, at, 4096)
            assert bad[0] != 0, bad
            assert (memory == 0x5a).all()


def test_pool_of_a_file_is_refused(pair, folder):
    with Store(pair[0], folder) as s:
        client = s.agent.agent._client
        regions = [r for r in client.command("region.list")["regions"] if r["kind"] == "file"]
        assert len(regions) == 1 and regions[0]["bytes"] == MIB
        with pytest.raises(Exception) as told:
            client.command("pool.register", layout={}, regions=[
                {"region": regions[0]["region"], "offset": 0}])
        assert "file" in str(told.value)


def test_restarted_daemon_has_the_files_again(folder):
    with Daemon() as own:
        with Store(own, folder) as s:
            s.run("WRITE", [(0, 0, 4096)])
            own.expect("")
            own.proc.kill()
            own.wait()
            own.notify.close()
            own.start().wait_ready()

            def done(handle):
                s.agent.get_new_notifs()  # by which it sees that its daemon is another
                return s.agent.check_xfer_state(handle) == "DONE"

            def again():
                try:
                    handle = s.start("WRITE", [(8192, 0, 4096)])
                    s.agent.transfer(handle)
                    return until(lambda: done(handle))
                except Exception:
                    return False
            until(again, 60)
            assert np.array_equal(s.content()[:4096], s.memory[8192:12288])


def test_registrations_leave_no_descriptors(pair, folder):
    def open_files():
        return len(os.listdir("/proc/%d/fd" % pair[0].proc.pid))

    def own_files():
        return len(os.listdir("/proc/self/fd"))
    with Store(pair[0], folder) as s:
        s.run("READ", [(0, 0, 4096)])
        before, mine = open_files(), own_files()
        for i in range(50):
            reg = s.agent.register_memory(
                [(0, 4096, s.fd, ""), (0, 4096, 5555, "rw,create:%s/n%d" % (folder, i))],
                "FILE")
            s.run("WRITE", [(0, 0, 4096)], 5555)
            s.agent.deregister_memory(reg)
        gc.collect()
        until(lambda: open_files() <= before)
        assert own_files() <= mine
        assert len([r for r in s.agent.agent._client.command("region.list")["regions"]
                    if r["kind"] == "file"]) == 1


def test_killed_engine_leaves_its_files_alone(folder):
    """Its operations end, and the daemon keeps nothing of it."""
    import sys
    with Daemon() as own:
        path = os.path.join(folder, "killed")
        code = ("import sys; sys.path[:0] = %r\n"
                "import os, numpy as np, test_nixl_file as t\n"
                "class D: socket_path = %r\n"
                "s = t.Store(D, %r, 64 << 20)\n"
                "os.rename(s.path, %r)\n"
                "h = s.start('WRITE', [(0, 0, 64 << 20)])\n"
                "s.agent.transfer(h); print('going', flush=True)\n"
                "import signal; signal.pause()\n" % (
                    sys.path, own.socket_path, folder, path))
        engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

        def processes():
            """The daemon's and its helpers'."""
            yield own.proc.pid
            with open("/proc/%d/task/%d/children" % (own.proc.pid, own.proc.pid)) as pids:
                yield from map(int, pids.read().split())

        def holds():
            links = []
            for pid in processes():
                fds = "/proc/%d/fd" % pid
                for fd in os.listdir(fds):
                    with contextlib.suppress(OSError):  # closed meanwhile
                        links.append(os.readlink(os.path.join(fds, fd)))
            return path in links
        assert engine.stdout.readline() == b"going\n"
        assert holds(), "it was registered"
        engine.kill()
        engine.wait()
        engine.stdout.close()
        until(lambda: not holds())
        stat = os.stat(path)
        with Store(own, folder) as s:
            s.run("READ", [(0, 0, 4096)])
        assert os.stat(path).st_mtime_ns == stat.st_mtime_ns
