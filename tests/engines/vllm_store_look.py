# SPDX-License-Identifier: Apache-2.0
"""A worker extension of vLLM (--worker-extension-cls), called by its /collective_rpc: holds up
what KvdStoreConnector's workers have begun, and tells what they have under way."""
import kvd
from kvd import chunks
from vllm.distributed.kv_transfer import get_kv_transfer_group


class Look:
    def kvd_watch(self):
        group = get_kv_transfer_group()
        own = getattr(group, "sub_connectors", [group])[-1]
        self.kvd_worker = own._worker
        self.kvd_held, self.kvd_settled, self.kvd_late = set(), 0, 0
        self.kvd_memory = kvd.Memory(4096, "look")
        self.kvd_word = self.kvd_memory.array((512,), "uint64")
        self.kvd_region = self.kvd_worker.rank.spaces.client.register(self.kvd_memory)
        self.kvd_patch("put", chunks.Space, "put")
        self.kvd_patch("load", chunks.Hold, "fetch")
        begin, join = self.kvd_worker.rank.begin, chunks.Space.join

        def begun(step):
            puts = self.kvd_worker.rank.puts
            self.kvd_settled += sum(len(puts.get(name, ())) for name in step.settles)
            begin(step)

        def joined(space, secret, **kw):
            if "join" in self.kvd_held:
                try:
                    while True:  # until the scheduler's lease has ended
                        join(space, secret, **kw)
                except kvd.Error:
                    self.kvd_late += 1
            return join(space, secret, **kw)
        self.kvd_worker.rank.begin, chunks.Space.join = begun, joined

    def kvd_patch(self, kind, cls, name):
        call = getattr(cls, name)

        def held(own, *args, **kw):
            if kind in self.kvd_held:
                kw["wait"] = self.kvd_region, 0, int(self.kvd_word[0]) + 1
            return call(own, *args, **kw)
        setattr(cls, name, held)

    def kvd_hold(self, kind):
        """put, load: these wait until let_go(); join: until the lease has ended."""
        self.kvd_held.add(kind)

    def kvd_let_go(self):
        self.kvd_held.clear()
        self.kvd_word[0] += 1

    def kvd_left(self):
        rank = self.kvd_worker.rank
        return {"loads": len(rank.loads) + len(rank.rents), "puts": sum(map(len, rank.puts.values())),
                "ending": len(rank.ending), "settled": self.kvd_settled, "late": self.kvd_late}
