# SPDX-License-Identifier: Apache-2.0
"""Choice of the pair for a request: Policy.pick(). It counts until it is released."""
import itertools
import random
from collections import namedtuple

from ..errors import NotFoundError
from .config import ROLES
from .pick import DRAINING, GONE, SERVING, Picker

# tokens: estimated, of the prompt; alone: decode computes it, without a prefill server
Request = namedtuple("Request", "tokens alone", defaults=(False,))


class Reservation:
    """The share of a request in the load of its members. Calls may be repeated. A policy that
    learns from outcomes has its own class."""

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

    def __init__(self, members):
        self.members = members

    def choose(self, role, members, request):
        raise NotImplementedError

    def pick(self, request, avoid=()):
        """(prefill, decode, Reservation), prefill None for a request served by decode alone; None:
        no pair is available. avoid: members that are used only if there is no other."""
        pair = []
        for role in ROLES:
            if role == "prefill" and request.alone:
                pair.append(None)
                continue
            usable = self.members.usable(role)
            usable = [m for m in usable if m not in avoid] or usable
            if not usable:
                return None
            pair.append(self.choose(role, usable, request))
        return (*pair, Reservation(request.tokens, *pair))


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
    def __init__(self, picker, got, tokens, prefill, decode):
        super().__init__(tokens, prefill, decode)
        self._picker, self._id = picker, got.id

    def began(self, seconds):
        self._picker.settle(self._id, ttft=seconds)

    def failed(self, member):
        self._picker.settle(self._id, failed=member.role)

    def release(self):
        super().release()
        if self._id is not None:
            self._picker.release(self._id)
        self._id = None


class LeastLoaded(Policy):
    """The pair with the earliest first token by a Picker's prediction: from this router's picks and
    their outcomes, and from the loads of the directory."""

    def __init__(self, members):
        super().__init__(members)
        self.picker, self.fed = Picker(), {}  # {Member: the picker's knowledge of it}

    def _feed(self):
        for member in [m for m in self.fed if not m.listed]:
            self.picker.set(member.role, member.name, GONE)
            del self.fed[member]
        usable = set(self.members.usable("prefill")) | set(self.members.usable("decode"))
        for member in self.members.by_key.values():
            state = SERVING if member in usable else DRAINING
            now = state, member.spec.load, member.spec.sampled
            if self.fed.get(member) != now:
                self.picker.set(member.role, member.name, *now)
                self.fed[member] = now
        return usable

    def pick(self, request, avoid=()):
        by_name = {m.name: m for m in self._feed()}
        only = "decode" if request.alone else None
        tried = [m.name for m in avoid if m.name in by_name]
        for names in (tried, ()):
            try:
                got = self.picker.pick(prompt_tokens=request.tokens, avoid=names, only=only)
            except NotFoundError:
                continue
            pair = by_name.get(got.prefill), by_name[got.decode]
            return (*pair, PickerReservation(self.picker, got, request.tokens, *pair))
        return None


BY_NAME = {"least-loaded": LeastLoaded, "round-robin": RoundRobin, "random": Random}
