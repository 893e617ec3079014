# SPDX-License-Identifier: Apache-2.0
"""nixl where the caller, or who speaks to him, is careless or means harm: metadata that
was cut or changed, threads that all use one agent, forks, exits and collections in odd
moments; and a daemon that is not asked when it need not be."""
import os
import signal
import threading

import numpy as np

from kvd_daemon import Daemon
from nixl_peer import agent_of
from test_nixl import name


def within(seconds, call):
    """What call() gives, if it gives it in time; it is left alone otherwise."""
    got = []
    thread = threading.Thread(target=lambda: got.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else None


def test_first_list_asks_the_daemon_nothing():
    """What lists and transfers share with the daemon is made with the agent."""
    with Daemon("[peer]\ndead_after = 10 s\n") as own:
        agent = agent_of(own.socket_path, name())
        memory = np.zeros(1 << 16, np.uint8)
        at = memory.ctypes.data
        agent.register_memory([(at, memory.size, 0, "")], "DRAM")
        os.kill(own.proc.pid, signal.SIGSTOP)
        try:
            made = within(0.9, lambda: agent.prep_xfer_dlist(
                "", [(at, 256, 0), (at + 512, 256, 0)], "DRAM"))
        finally:
            os.kill(own.proc.pid, signal.SIGCONT)
        assert made is not None
        agent.release_dlist_handle(made)
