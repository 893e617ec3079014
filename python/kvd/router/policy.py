# SPDX-License-Identifier: Apache-2.0
"""Choice of the pair for a request: Policy.pick(). It counts until it is released.

Decode is chosen first: whether it should compute the prompt itself, without a prefill server,
depends on its own cache."""
import itertools
import random
import secrets
import time
from collections import namedtuple
from collections.abc import Mapping

from ..errors import NotFoundError
from . import engines
from .config import ROLES
from .pick import DRAINING, GONE, SERVING, Picker
from .prefix import BLOCK_TOKENS, TOKENS_USUAL, PrefixIndex
from .sessions import NONE, Sessions

ALONE_SLACK_S = 0.05  # later than the best: a decode server that has the prompt; half a full batch

# tokens: estimated, of the prompt; alone: decode must compute it, without a prefill server; chain:
# of kvd.router.prefix; session: of kvd.router.sessions, or None
Request = namedtuple("Request", "tokens alone chain session", defaults=(False, (), None))


class Reservation:
    """The share of a request in the load of its members. Calls may be repeated. A policy that
    learns from outcomes has its own class.

    why_alone: why decode computes a prompt that it need not: "short", "cached", or None. cached:
    tokens of the prompt that the member that computes it is expected to have. kept: whether the
    pair is the session's last one; None: it has none."""
    why_alone = kept = None
    cached = 0

    def __init__(self, tokens, prefill, decode):
        self.tokens, self._held = tokens, [m for m in (prefill, decode) if m is not None]
        self._prefill = prefill
        for member in self._held:
            member.requests += 1
            member.tokens += tokens
            member.circuit.taken()

    def prefilled(self):
        """The prefill server has finished."""
        self._free(self._prefill)

    def began(self, seconds):
        """The first part of the answer was received, so long after the pick."""

    def failed(self, member):
        """There will be none, by this member's fault."""

    def release(self):
        for member in list(self._held):
            self._free(member)

    def _free(self, member):
        if member in self._held:
            self._held.remove(member)
            member.requests -= 1
            member.tokens -= self.tokens
            member.circuit.released()


class Policy:
    """members: of kvd.router.members. A policy chooses one of some members of a role."""
    key = None  # of chains; None: they are not used
    indexes = {}  # {role: PrefixIndex}
    sessions = None

    def __init__(self, members):
        self.members, self.config = members, members.config

    def choose(self, role, members, request):
        raise NotImplementedError

    def cached(self, member, request):
        """Tokens of the prompt that it has."""
        return 0

    def lost(self, member):
        """It has lost its cache."""

    def why_alone(self, request, decode):
        """Why decode should compute the prompt; None: it should not."""
        if request.alone or not engines.BY_NAME[decode.spec.engine].decode_computes:
            return None
        if request.tokens < self.config.alone_below:
            return "short"
        if request.tokens - self.cached(decode, request) < self.config.alone_uncached:
            return "cached"
        return None

    def pick(self, request, avoid=()):
        """(prefill, decode, Reservation), prefill None for a request served by decode alone; None:
        no pair is available. avoid: members that are used only if there is no other."""
        decode = self._one_of("decode", request, avoid)
        if decode is None:
            return None
        why, prefill = self.why_alone(request, decode), None
        if not (request.alone or why):
            prefill = self._one_of("prefill", request, avoid)
            if prefill is None:
                return None
        held = Reservation(request.tokens, prefill, decode)
        held.why_alone = why
        return prefill, decode, held

    def _one_of(self, role, request, avoid):
        usable = self.members.usable(role)
        usable = [m for m in usable if m not in avoid] or usable
        return self.choose(role, usable, request) if usable else None


class Random(Policy):
    def choose(self, role, members, request):
        return random.choice(members)


class RoundRobin(Policy):
    def __init__(self, members):
        super().__init__(members)
        self.turns = {"prefill": itertools.count(), "decode": itertools.count()}

    def choose(self, role, members, request):
        return members[next(self.turns[role]) % len(members)]


class PickerReservation(Reservation):
    def __init__(self, policy, got, request, prefill, decode):
        super().__init__(request.tokens, prefill, decode)
        self._policy, self._id, self._decode = policy, got.id, decode
        self._session = request.session
        if self._session is not None:
            last = policy.sessions.last(self._session, policy.clock())
            if last != NONE:
                self.kept = all(None in (member, url) or member.url == url
                                for member, url in zip((prefill, decode), last))

    def began(self, seconds):
        policy, now = self._policy, self._policy.clock()
        policy.picker.settle(self._id, ttft=seconds, now=now)
        if self._session is not None:
            policy.sessions.answered(self._session, self._prefill and self._prefill.url,
                                     self._decode.url, now)

    def failed(self, member):
        self._policy.picker.settle(self._id, failed=member.role, now=self._policy.clock())

    def release(self):
        super().release()
        if self._id is not None:
            self._policy.picker.release(self._id, now=self._policy.clock())
        self._id = None


class LeastLoaded(Policy):
    """The pair with the earliest first token by a Picker's prediction: from this router's picks and
    their outcomes, and from the loads of the directory. A session keeps its members where they are
    at most affinity-slack later."""
    reservation = PickerReservation

    def __init__(self, members):
        super().__init__(members)
        self.clock = time.monotonic
        self.picker, self.fed = Picker(), {}  # {Member: the picker's knowledge of it}
        self.sessions = Sessions()

    def _feed(self):
        """{name: member} of those that may be used."""
        now = self.clock()
        for member in [m for m in self.fed if not m.listed]:
            self.picker.set(member.role, member.name, GONE, now=now)
            del self.fed[member]
        usable = {m.name: m for role in ROLES for m in self.members.usable(role)}
        for member in self.members.by_key.values():
            known = (SERVING if member.name in usable else DRAINING, member.spec.load,
                     member.spec.sampled)
            if self.fed.get(member) != known:
                self.picker.set(member.role, member.name, *known, now=now)
                self.fed[member] = known
        return usable

    def _near(self, request, usable):
        """Cached tokens of the members, for the picker."""
        return ()

    def _prefer(self, request, usable):
        """{name: seconds}, for the picker"""
        if request.session is None:
            return {}
        last = zip(ROLES, self.sessions.last(request.session, self.clock()))
        return {self.members.by_key[key].name: self.config.affinity_slack
                for key in last if key in self.members.by_key}

    def pick(self, request, avoid=()):
        usable, why = self._feed(), None
        near, prefer = self._near(request, usable), self._prefer(request, usable)

        def alone(name):
            nonlocal why
            why = self.why_alone(request, usable[name])
            return why
        for names in ([m.name for m in avoid if m.name in usable], ()):
            try:
                got = self.picker.pick(prompt_tokens=request.tokens, near=near, avoid=names,
                                       only="decode" if request.alone else None, alone=alone,
                                       prefer=prefer, now=self.clock())
            except NotFoundError:
                continue
            prefill, decode = usable.get(got.prefill), usable[got.decode]
            held = self.reservation(self, got, request, prefill, decode)
            held.why_alone = why
            return prefill, decode, held
        return None


class _Near(Mapping):
    """{name: tokens of the prompt that it has}, computed for each prefill server that the picker
    evaluates. Its names are those that it should evaluate in a large group."""

    def __init__(self, policy, request, usable):
        self.policy, self.request, self.usable = policy, request, usable

    def __getitem__(self, name):
        member = self.usable[name]
        return self.policy.cached(member, self.request) if member.role == "prefill" else 0

    def __iter__(self):
        return (m.name for m in self.policy.holders("prefill", self.request))

    def __len__(self):
        return len(list(iter(self)))


class PrefixReservation(PickerReservation):
    def __init__(self, policy, got, request, prefill, decode):
        super().__init__(policy, got, request, prefill, decode)
        self._chain, self._computes = request.chain, prefill or decode
        self._left = {m for m in (prefill, decode) if m is not None}  # without an answer
        self.cached = policy.cached(self._computes, request)
        self._counts = self._index(self._computes).handed(self._computes.url, self._chain)

    def _index(self, member):
        return self._policy.indexes[member.role]

    def _answered(self, member):
        load = member.spec.load
        known = load is not None and load.kv_total_tokens > 0
        if member.listed:  # else another server may have its URL later
            self._index(member).answered(member.url, self._chain, self._policy.clock(),
                                         load.kv_total_tokens if known else TOKENS_USUAL)
        if member is self._computes:
            self._ended()
        self._left.discard(member)
        if not self._left:  # a stream may be long, and there may be many
            self._chain = ()

    def _ended(self):
        member = self._computes
        self._index(member).ended(member.url, self._chain, self._counts)
        self._counts = None

    def prefilled(self):
        super().prefilled()
        self._answered(self._prefill)

    def began(self, seconds):
        super().began(seconds)
        self._answered(self._decode)

    def release(self):
        self._ended()
        super().release()


class Prefix(LeastLoaded):
    """LeastLoaded, with the prompt tokens that each prefill server need not compute. The
    caches of decode servers are of use only if they compute prompts."""
    reservation = PrefixReservation

    def __init__(self, members):
        super().__init__(members)
        self.key = secrets.token_bytes(16)
        memory = self.config.prefix_memory
        decode = memory // 2 if self.config.alone_uncached else 0
        self.indexes = {"prefill": PrefixIndex(memory - decode), "decode": PrefixIndex(decode)}

    def lost(self, member):
        self.indexes[member.role].forget(member.url)

    def cached(self, member, request):
        blocks = self.indexes[member.role].find(member.url, request.chain, self.clock())
        return min(blocks * BLOCK_TOKENS, request.tokens)

    def holders(self, role, request):
        """Some members of a role that may have most of the prompt."""
        keys = ((role, url) for url in self.indexes[role].holders(request.chain))
        return [self.members.by_key[key] for key in keys if key in self.members.by_key]

    def _near(self, request, usable):
        return _Near(self, request, usable) if request.chain else ()

    def _prefer(self, request, usable):
        out = super()._prefer(request, usable)
        for member in self.holders("decode", request):
            if member.name in usable and self.why_alone(request, member) == "cached":
                out.setdefault(member.name, ALONE_SLACK_S)
        return out


BY_NAME = {"least-loaded": LeastLoaded, "prefix": Prefix, "round-robin": RoundRobin,
           "random": Random}
