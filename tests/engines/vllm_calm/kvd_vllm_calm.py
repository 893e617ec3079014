# SPDX-License-Identifier: Apache-2.0
"""Workers of a tensor-parallel vLLM engine wait for each other by sched_yield() in a loop. On
two cores that keeps all other processes from running, for up to a minute: here they sleep."""
import threading

clock = threading.Event()


def load():
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast
    utils.sched_yield = shm_broadcast.sched_yield = lambda: clock.wait(50e-6)
