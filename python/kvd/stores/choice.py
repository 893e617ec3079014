# SPDX-License-Identifier: Apache-2.0
"""Fetch a prefix from other daemons' chunks, or compute it again: whichever is cheaper, by the
measurements of the daemon (kvd.cost) and the engine's own: the time to compute a token."""
import math
import time

from ..cost import Holder, Model
from ..errors import BusyError, NotFoundError
from ..layout import Layout
from .space_client import CALL_S

HOLDERS_MAX = 8  # of a decision
TIMED_TOKENS = 64  # fewer tokens in a step do not tell the time of one
SHARE = 0.25  # of a measurement in the average


def model_of(layout):
    """Of a layout's text, for prices of fetches: the heads are unknown."""
    views = Layout.parse(layout).views.values()
    layers = sum(len(view["layers"]) for view in views)
    nbytes = sum(f["unit_bytes"] * f["total_units"] for view in views
                 for fields in view["layers"].values() for f in fields)
    return Model.gqa(layers, 1, 1, 1, 1, token_bytes=math.ceil(nbytes / layers))


def surely(local, fetch, errors):
    """Whether computing is cheaper by twice the error: a fetch costs other requests nothing."""
    return local + 2 * math.hypot(*errors) < fetch < math.inf


class Prices:
    """timed: whether the engine's steps follow one another, so that their times can be measured;
    else the time of a token is unknown, and nothing is computed that can be fetched."""

    def __init__(self, timed, clock=time.monotonic):
        self.timed, self.clock = timed, clock
        self.model = self.client = self.opened = self.step = None
        self.token_us = 0.0  # to compute a token in one layer; 0: unknown

    # ---- the engine's own measurement ----

    def began(self, tokens):
        """A step that computes so many, none of which attends to other daemons' chunks; 0: others."""
        self.step = (self.clock(), tokens) if self.timed and tokens >= TIMED_TOKENS else None

    def ended(self):
        if self.step is None or self.model is None:
            return
        (began, tokens), self.step = self.step, None
        us = 1e6 * (self.clock() - began) / tokens / self.model.layers
        self.token_us += (us - self.token_us) * (SHARE if self.token_us else 1)

    # ---- decisions ----

    def page(self, client):
        """Of this client's daemon, which measures its peers from now on."""
        if client is not self.client:
            self.opened, self.client = client.cost_page(CALL_S), client
        return self.opened

    def decide(self, page, holders, query_tokens, **more):
        """A kvd.cost.Choice. None: there is no price, or none now. holders: {(instance, gpu):
        tokens}, as of chunks.holders_of()"""
        if not 0 < len(holders) <= HOLDERS_MAX:
            return None
        try:
            return page.decide(self.model, [Holder(tokens=tokens, peer=peer, gpu=gpu)
                                            for (peer, gpu), tokens in holders.items()],
                               query_tokens=query_tokens, recompute_us=self.token_us, **more)
        except (BusyError, NotFoundError):
            return None

    def computes(self, page, holders):
        """Whether these tokens are surely cheaper to compute than to fetch. Attention to them is the
        same afterwards: any price of it will do."""
        choice = self.decide(page, holders, 1, steps=1, attend_us=1)
        return choice is not None and surely(
            choice.local.us, choice.fetch.us, (choice.local.error_us, choice.fetch.error_us))
