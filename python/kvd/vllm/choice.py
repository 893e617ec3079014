# SPDX-License-Identifier: Apache-2.0
"""The way in which a request uses its prefix in chunks of other daemons: query rows are sent to
them (route), the KV is fetched, or it is computed again (local). The cheapest one, by the
measurements of the daemon (kvd.cost) and the engine's own: the time to compute a token."""
import math
import time

from ..cost import FETCH, LOCAL, ROUTE, Holder, Model
from ..errors import BusyError, NotFoundError
from ..layout import Layout
from ..stores.space_client import CALL_S

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

    def _decide(self, page, holders, query_tokens, **more):
        """None: there is no price, or none now."""
        if not 0 < len(holders) <= HOLDERS_MAX:
            return None
        try:
            return page.decide(self.model, [Holder(tokens=tokens, peer=peer)
                                            for peer, tokens in holders.items()],
                               query_tokens=query_tokens, recompute_us=self.token_us, **more)
        except (BusyError, NotFoundError):
            return None

    def choose(self, page, holders, steps, *, query_tokens, routable, no_pages):
        """holders: {instance: tokens}; steps: of one token each, behind the query_tokens; routable:
        whether the engine can send query rows; no_pages: whether it has no blocks for the prefix."""
        # with few blocks, a fetch waits for some; a price of attention here is in fetch and local
        more = {"no_pages": no_pages} if routable else {"attend_us": 1}
        first = self._decide(page, holders, query_tokens, steps=1, **more)
        later = self._decide(page, holders, 1, steps=steps, **more)
        if first is None or later is None:
            return FETCH
        route = first.route.us + later.route.us if routable else math.inf
        fetch, local = first.fetch.us, first.local.us
        if later.fetch.us < math.inf:  # what is fetched or computed is so only once
            fetch += later.fetch.us - later.once.us
        if later.local.us < math.inf:
            local += later.local.us - sum(holders.values()) * self.model.layers * self.token_us
        if route <= fetch and route <= local and route < math.inf:
            return ROUTE
        # surely: a fetch costs other requests nothing
        error = math.hypot(first.fetch.error_us, first.local.error_us)
        return LOCAL if local + 2 * error < fetch < math.inf else FETCH

    def turned(self, page, holders, steps):
        """Whether fetching would have been cheaper from the start, after routing so many steps of
        one token (ski rental: both together cost at most twice the better one)."""
        choice = self._decide(page, holders, 1, steps_made=steps)
        return choice is not None and choice.way != ROUTE

    def steps_of(self, page, holders, query_tokens):
        """Steps of one token each in which routing costs as much more than attention here as in
        one of so many tokens."""
        one, many = (self._decide(page, holders, count, steps=1) for count in (1, query_tokens))
        if one is None or many is None:
            return 0
        more = one.round.us - one.attend.us
        there = many.round.us - many.attend.us
        return int(there / more) if 0 < more and there < math.inf else 0
