# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM (--worker-extension-cls): the daemon's chunks, by the engine's session."""
import vllm_store_look


class Look(vllm_store_look.Look):
    def kvd_chunks(self):
        """[id, first, whether it is in memory, in a file] of each."""
        client, found, at = self.kvd_worker.rank.spaces.client, [], 0
        while True:
            page = client.command("chunk.snapshot", at=at)
            found += [[c["id"], c["first"], c["memory"], c["file"]] for c in page["chunks"]]
            at = page["next"]
            if not at:
                return found

    def kvd_drop(self, count):
        """Delete so many chunks. -> those that are deleted"""
        (space,) = self.kvd_worker.rank.spaces.spaces.values()
        chunks = self.kvd_chunks()[:count]
        for one, first, _, _ in chunks:
            space.drop([bytes.fromhex(one)], first)
        return [one for one, *_ in chunks]
