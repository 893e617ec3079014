# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM (--worker-extension-cls) that makes a prefill engine which pushes
by layers look like one whose GPU is late: when the engine says that a layer is saved, its
blocks hold other bytes, and the true ones are written LATE_S later, just before the mark is
passed."""
import concurrent.futures
import threading
import time

import kvd
from vllm.distributed.kv_transfer import get_kv_transfer_group

LATE_S, OTHER = 0.3, -7.0


class Late:
    def kvd_watch(self):
        self.kvd_group = get_kv_transfer_group()
        worker = self.kvd_worker = self.kvd_group._worker
        self.kvd_saved, self.kvd_begun = worker.layer_saved, worker.begin
        self.kvd_mode, self.kvd_moved = "plain", []
        memory = kvd.Memory(4096, "late")
        self.kvd_word = memory.array((512,), "uint64")
        self.kvd_region, self.kvd_marks = worker.client.register(memory), 0
        self.kvd_pool, self.kvd_tasks = concurrent.futures.ThreadPoolExecutor(1), []
        worker.layer_saved, worker.begin = self.kvd_layer_saved, self.kvd_begin
        worker.mark = self.kvd_mark

    def kvd_set(self, mode):
        """plain; late, or late without that anybody waits: ignored; steps: not by layers."""
        self.kvd_mode = mode
        self.kvd_group._layerwise = mode != "steps"
        moved, self.kvd_moved = self.kvd_moved, []
        return moved

    def kvd_mark(self):
        if self.kvd_mode != "late":
            return None
        return self.kvd_region, 0, self.kvd_marks

    def kvd_begin(self, step):
        for task in self.kvd_tasks:
            task.result()
        self.kvd_tasks.clear()
        self.kvd_begun(step)
        if step.computed and self.kvd_mode == "steps":
            self.kvd_note(step)

    def kvd_layer_saved(self, step, layer):
        if layer == len(self.model_runner.kv_caches) - 1:
            self.kvd_note(step)
        if self.kvd_mode in ("late", "ignored"):
            self.kvd_hide(step, layer)
        self.kvd_saved(step, layer)

    def kvd_note(self, step):
        """What the daemon has moved of these requests by now."""
        for name, _, _ in step.computed:
            push = self.kvd_worker.pushes.get(name)
            if push is not None and push.handle._room is not None:
                self.kvd_moved.append(push.handle._room.read()[4])

    def kvd_hide(self, step, layer):
        pushes = [self.kvd_worker.pushes[n] for n, _, _ in step.computed
                  if n in self.kvd_worker.pushes]
        size = self.kvd_worker.made.groups[0].tokens
        blocks = sorted({b for p in pushes for b in p.blocks[0][p.sent // size:]})
        if not blocks:
            return
        cache = self.model_runner.kv_caches[layer]
        true = cache[blocks].clone()
        cache[blocks] = OTHER
        self.kvd_marks += 1
        self.kvd_tasks.append(self.kvd_pool.submit(
            self.kvd_show, cache, blocks, true, self.kvd_marks, time.monotonic() + LATE_S))

    def kvd_show(self, cache, blocks, true, mark, when):
        threading.Event().wait(max(0.0, when - time.monotonic()))
        cache[blocks] = true
        self.kvd_word[0] = mark
