# SPDX-License-Identifier: Apache-2.0
"""How long an engine's scheduler is in the calls of its KV connector: any connector's, put in
by the engine's own plugins in every process. figures.py reads it.

In the folder KVD_TIMED each process with a connector has two files. PID is of doubles: steps,
seconds in calls, CPU seconds of the thread in calls, calls, then a ring of the seconds of the
last steps. PID.tids lists the threads that came while the connector was made or called."""
import functools
import mmap
import os
import struct
import time

RING = 8192
HEAD = 4
CALLS = {
    "vllm": """on_new_request get_num_new_matched_tokens update_state_after_alloc
        get_loaded_kv_cache_group_ids build_connector_meta update_connector_output
        request_finished request_finished_all_groups handle_preemptions bind_connector_metadata
        start_load_kv wait_for_layer_load save_kv_layer wait_for_save get_finished
        get_transfer_results get_block_ids_with_load_errors get_kv_connector_stats
        build_connector_worker_meta clear_connector_metadata""".split(),
    "SENDER": "poll poll_pp_consensus pop_decode_prefix_len init send abort clear "
              "failure_exception should_send_kv_chunk get_transfer_metric".split(),
    "RECEIVER": "poll init send_metadata abort clear failure_exception "
                "ensure_abort_notified".split(),
    "MANAGER": "is_abort_release_safe try_ensure_parallel_info check_status".split()}
LOOKS = 400  # calls, after which no thread comes any more


class Clock:
    def __init__(self):
        self.folder, self.memory = os.environ.get("KVD_TIMED"), None
        self.steps = self.calls = self.depth = self.looks = 0
        self.wall = self.cpu = self.step = 0.0
        self.tids = set()

    def threads(self):
        return set(os.listdir("/proc/self/task"))

    def open(self):
        path = os.path.join(self.folder, str(os.getpid()))
        with open(path, "w+b") as out:
            out.truncate(8 * (HEAD + RING))
            self.memory = mmap.mmap(out.fileno(), 0)

    def came(self, before):
        """Threads that are new belong to the connector."""
        new = self.threads() - before - self.tids
        if new:
            self.tids |= new
            with open(os.path.join(self.folder, "%d.tids" % os.getpid()), "w") as out:
                out.write(" ".join(sorted(self.tids)))

    def making(self, make):
        """Of the connector: its threads."""
        @functools.wraps(make)
        def call(*args, **kwargs):
            if self.memory is None:
                self.open()
            before = self.threads()
            try:
                return make(*args, **kwargs)
            finally:
                self.came(before)
        return call

    def timed(self, method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            if self.depth or self.memory is None:  # within another one
                return method(*args, **kwargs)
            before = self.threads() if self.looks < LOOKS else None
            self.depth = 1
            cpu, begin = time.thread_time(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.cpu += time.thread_time() - cpu
                self.depth = 0
                self.wall += took
                self.step += took
                self.calls += 1
                if before is not None:
                    self.looks += 1
                    self.came(before)
        return call

    def next_step(self):
        if self.memory is None:
            return
        struct.pack_into("d", self.memory, 8 * (HEAD + self.steps % RING), self.step)
        self.steps, self.step = self.steps + 1, 0.0
        struct.pack_into("4d", self.memory, 0, self.steps, self.wall, self.cpu, self.calls)


clock = Clock()


def vllm():
    if not clock.folder:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    create = KVConnectorFactory.create_connector
    if hasattr(create, "__wrapped__"):
        return

    def wrapped(*args, **kwargs):
        connector = clock.making(create)(*args, **kwargs)
        # on a CPU NixlConnector does that to the thread of the forward pass: so for all
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
        for name in CALLS["vllm"]:
            setattr(connector, name, clock.timed(getattr(connector, name)))
        connector.register_kv_caches = clock.making(connector.register_kv_caches)
        meta = connector.build_connector_meta

        def build_connector_meta(scheduler_output):
            clock.next_step()
            return meta(scheduler_output)
        connector.build_connector_meta = build_connector_meta
        return connector
    KVConnectorFactory.create_connector = functools.wraps(create)(wrapped)


def sglang():
    if not clock.folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    done = set()

    def get_kv_class(original, backend, which):
        cls = original(backend, which)
        kind = getattr(which, "name", "")
        if kind in CALLS and cls not in done:
            done.add(cls)
            for name in CALLS[kind]:
                if hasattr(cls, name):
                    setattr(cls, name, clock.timed(getattr(cls, name)))
            if kind == "MANAGER":
                cls.__init__ = clock.making(cls.__init__)
        return cls

    def ingest_requests(original, *args, **kwargs):
        clock.next_step()
        return original(*args, **kwargs)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", get_kv_class,
                          HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.ingest_requests",
                          ingest_requests, HookType.AROUND)
