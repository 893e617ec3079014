# SPDX-License-Identifier: Apache-2.0
"""Prompts whose documents are at other daemons (vllm_route.py)."""
import random


class Prompts:
    """Documents, and prompts that begin with one: (document, own tokens, length of the answer). The
    last two differ in their documents alone, which have one length."""

    def __init__(self, count, seed=5, documents=12):
        rng = random.Random(seed)

        def some(n):
            return [rng.randrange(3, 512) for _ in range(n)]
        self.documents = [some(rng.choice((256, 320, 640, 1024, 1344)))
                          for _ in range(documents)]
        self.asked = []
        for i in range(count):
            document = rng.randrange(documents)
            own = some(rng.choice((1, 2, 17, 40, 63, 64, 65, 100, 257, 400)))
            self.asked.append((document, own, rng.choice((1, 2, 8, 24, 48))))
        self.near = {}  # tokens of a document that are routed, if not all are
        one, other = next((i, j) for j in range(documents) for i in range(j)
                          if len(self.documents[i]) == len(self.documents[j]))
        own = some(100)
        self.asked[-2:] = [(one, own, 24), (other, own, 24)][:count]

    def prompt(self, i):
        document, own, _ = self.asked[i]
        return self.documents[document] + own

    def routed(self, i):
        """Tokens of its document: whole chunks."""
        document = self.asked[i][0]
        return self.near.get(document, len(self.documents[document]))

    def own(self, i):
        """Its other tokens."""
        return len(self.prompt(i)) - self.routed(i)

    def computed(self, i):
        """Tokens that attend to the document: its own, and its answer but the last one."""
        return self.own(i) + self.asked[i][2] - 1
