# SPDX-License-Identifier: Apache-2.0
"""The way in which a request uses its prefix in chunks of other daemons: query rows are sent to
them (route), the KV is fetched, or it is computed again (local)."""
import math

from ..cost import FETCH, LOCAL, ROUTE
from ..stores.choice import Prices, surely


class Ways(Prices):
    """The cheapest way, with route among them."""

    def choose(self, page, holders, steps, *, query_tokens, no_pages):
        """holders: as of Prices.decide(); steps: of one token each, behind the query_tokens; no_pages:
        whether the engine has no blocks for the prefix: a fetch waits for some."""
        first = self.decide(page, holders, query_tokens, steps=1, no_pages=no_pages)
        later = self.decide(page, holders, 1, steps=steps, no_pages=no_pages)
        if first is None or later is None:
            return FETCH
        route = first.route.us + later.route.us
        fetch, local = first.fetch.us, first.local.us
        if later.fetch.us < math.inf:  # what is fetched or computed is so only once
            fetch += later.fetch.us - later.once.us
        if later.local.us < math.inf:
            local += later.local.us - sum(holders.values()) * self.model.layers * self.token_us
        if route <= fetch and route <= local and route < math.inf:
            return ROUTE
        errors = first.fetch.error_us, first.local.error_us
        return LOCAL if surely(local, fetch, errors) else FETCH

    def turned(self, page, holders, steps):
        """Whether fetching would have been cheaper from the start, after routing so many steps of
        one token (ski rental: both together cost at most twice the better one)."""
        choice = self.decide(page, holders, 1, steps_made=steps)
        return choice is not None and choice.way != ROUTE

    def steps_of(self, page, holders, query_tokens):
        """Steps of one token each in which routing costs as much more than attention here as in
        one of so many tokens."""
        one, many = (self.decide(page, holders, count, steps=1) for count in (1, query_tokens))
        if one is None or many is None:
            return 0
        more = one.round.us - one.attend.us
        there = many.round.us - many.attend.us
        return int(there / more) if 0 < more and there < math.inf else 0
