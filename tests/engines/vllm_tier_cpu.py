# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiers of host memory on its CPU platform, for which it has no worker: the scheduler's side,
memory and tiers are vLLM's own, blocks are copied by torch. It loads this itself (spec_module_path)."""
import time

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTiers(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks,
                rank=self.config.parallel.rank, kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker)
            self._worker = Copies(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class Copies(OffloadingWorker):
    """Each copy is done when it is submitted, behind the step that wrote its blocks."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self.caches, self.ratio, self.region, self.done = kv_caches, blocks_per_chunk, region, []
        self.rows = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk)
                     for t in kv_caches.tensors]

    def pairs(self, engine, host):
        """(block of the engine's, slice of a row of the host's) of every tensor of a job."""
        at = first = 0
        for group, count in enumerate(engine.group_sizes):
            skip = engine.block_indices[group] % self.ratio
            for i in range(count):
                row, part = divmod(skip + i, self.ratio)
                for ref in self.caches.group_data_refs[group]:
                    tensor = self.caches.tensors[ref.tensor_idx]
                    page = tensor.page_size_bytes
                    yield (tensor.tensor[engine.block_ids[at + i]],
                           self.rows[ref.tensor_idx][host.block_ids[first + row]]
                           [part * page:(part + 1) * page])
            at += count
            first += -(-(skip + count) // self.ratio) if count else 0

    def copy(self, job_id, pairs):
        begin, nbytes = time.monotonic(), 0
        for to, what in pairs:
            to.copy_(what)
            nbytes += what.numel()
        self.done.append(TransferResult(job_id, True, nbytes, time.monotonic() - begin))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, ((host, block) for block, host in self.pairs(src_spec, dst_spec)))

    def submit_load(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, self.pairs(dst_spec, src_spec))

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.rows.clear()
        self.region.cleanup()
