# SPDX-License-Identifier: Apache-2.0
"""What the examples share: an engine with a cache of 64 pages of 16 tokens."""
import kvd

LAYOUT = kvd.Layout.sglang_mha(page_size=16, pages=64, layers=2, kv_heads=8, head_bytes=256)


class Engine:
    def __init__(self, socket, role):
        self.client = kvd.Client(socket, role=role)
        self.memory = [kvd.Memory(n) for n in LAYOUT.buffers]
        self.pool = self.client.pool(LAYOUT, [self.client.register(m) for m in self.memory])

    def pages(self, numbers):
        """A view of each buffer's pages: read them, or assign to [:]."""
        return [m.pages(64)[i] for m in self.memory for i in numbers]

    def fill(self, numbers):
        """The model runs."""
        for count, page in enumerate(self.pages(numbers)):
            page[:] = count + 1


def same(a, b):
    """Whether all of these pages hold the same bytes."""
    return all((x == y).all() for x, y in zip(a, b))
