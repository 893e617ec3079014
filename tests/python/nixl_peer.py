# SPDX-License-Identifier: Apache-2.0
"""Another process with an agent: it runs the functions that it is sent by name.

    with Peer(daemon, "b") as b:
        b.alloc(1 << 20); b.metadata()"""
import os
import pickle
import struct
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def agent_of(socket, name, **config):
    """A nixl_agent on the daemon with that socket."""
    from nixl._api import nixl_agent, nixl_agent_config
    before = os.environ.get("KVD_SOCKET")
    os.environ["KVD_SOCKET"] = socket
    try:
        return nixl_agent(name, nixl_agent_config(**config))
    finally:
        if before is None:
            del os.environ["KVD_SOCKET"]
        else:
            os.environ["KVD_SOCKET"] = before


def np_view(memory, at, size):
    import numpy as np
    return np.frombuffer(memory[at:at + size].tobytes(), np.uint64)


class Worker:
    """The commands of a peer; each method is one."""

    def __init__(self, socket, name, config):
        self.agent = agent_of(socket, name, **config)
        self.buffers, self.handles = [], []

    def alloc(self, nbytes, fill=0):
        import numpy as np
        memory = np.full(nbytes, fill, np.uint8)
        self.buffers.append(memory)
        address = memory.ctypes.data
        self.handles.append(self.agent.register_memory([(address, nbytes, 0, "")], "DRAM"))
        return address

    def alloc_malloc(self, nbytes):
        """Memory of malloc alone: nothing of Python's lies over it."""
        from nixl import _utils
        address = _utils.malloc_passthru(nbytes)
        self.handles.append(self.agent.register_memory([(address, nbytes, 0, "")], "DRAM"))
        self.buffers.append(None)
        return address

    def replace(self, address, nbytes, fill):
        """Unmap whole pages of it, and map others there."""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + \
            [ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        at = (address + 4095) & ~4095
        assert libc.munmap(at, nbytes) == 0
        assert libc.mmap(at, nbytes, 3, 0x32, -1, 0) == at  # private, fixed, anonymous
        ctypes.memset(at, fill, nbytes)

    def peek(self, address, nbytes):
        """The bytes that occur there, but for a page at either end."""
        import ctypes
        return set(ctypes.string_at(address + 4096, nbytes - 8192))

    def free(self, i):
        self.agent.deregister_memory(self.handles[i])

    def read(self, i, begin=0, end=None):
        return self.buffers[i][begin:end].tobytes()

    def write(self, i, data, begin=0):
        import numpy as np
        self.buffers[i][begin:begin + len(data)] = np.frombuffer(data, np.uint8)

    def metadata(self):
        return self.agent.get_agent_metadata()

    def add(self, blob):
        return self.agent.add_remote_agent(blob)

    def notifs(self):
        return self.agent.get_new_notifs()

    def own_name(self):
        return self.agent.name

    def tell_ready(self, i, to):
        """Buffer i may be written: its metadata and its list, as a notification."""
        reg = self.handles[i]
        lists = self.agent.get_serialized_descs(reg.trim())
        partial = self.agent.get_partial_agent_metadata(reg, inc_conn_info=False, backends=[])
        self.agent.send_notif(to, pickle.dumps((i, partial, lists)))

    def consume(self, base, slots, size, total, to):
        """In a thread: take `total` numbers from buffer 0, each slot's in its turn."""
        import threading
        memory = self.buffers[0]

        def work():
            for i in range(total):
                at = base + i % slots * size
                while not (np_view(memory, at, size) == i).all():
                    threading.Event().wait(0.0001)
                if i % 2:
                    self.agent.send_notif(to, b"P:%d" % (i + 1))
            self.taken = total
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def consumed(self):
        self.thread.join(60)
        return self.taken

    def call(self, name, *args, **kwargs):
        return getattr(self.agent, name)(*args, **kwargs)


def _send(pipe, thing):
    data = pickle.dumps(thing)
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def _receive(pipe):
    head = pipe.read(4)
    if len(head) < 4:
        raise EOFError("the peer is gone")
    return pickle.loads(pipe.read(struct.unpack("<I", head)[0]))


class Peer:
    def __init__(self, daemon, name, **config):
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), NIXL_LOG_LEVEL="ERROR")
        self.proc = subprocess.Popen([sys.executable, os.path.join(HERE, "nixl_peer.py")],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        _send(self.proc.stdin, (daemon.socket_path, name, config))
        self._answer()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.proc.poll() is None:
            self.proc.stdin.close()
            assert self.proc.wait(60) == 0, "the peer did not end cleanly"
        self.proc.stdout.close()

    def kill(self):
        self.proc.kill()
        self.proc.wait()
        self.proc.stdin.close()

    def _answer(self):
        kind, value = _receive(self.proc.stdout)
        if kind == "raised":
            raise value
        return value

    def __getattr__(self, name):
        def call(*args, **kwargs):
            _send(self.proc.stdin, (name, args, kwargs))
            return self._answer()
        return call


def main():
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library must not be taken for an answer
    worker = None
    while True:
        try:
            got = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if worker is None:
                worker = Worker(*got)
                value = ("value", None)
            else:
                value = ("value", getattr(worker, got[0])(*got[1], **got[2]))
        except Exception as error:
            value = ("raised", RuntimeError("%s: %s" % (type(error).__name__, error)))
        _send(out, value)


if __name__ == "__main__":
    main()
