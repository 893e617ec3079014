# SPDX-License-Identifier: Apache-2.0
"""The engines' servers: the list, their health, and whether they may be used now.

A member is one URL in one role. It is used if its source lists it and does not drain it, its
health check succeeded, and its circuit is closed. A member that was removed from its source
finishes its requests; nothing waits for it."""
import asyncio
import itertools
import logging
import os
import time
import urllib.parse

from .config import ROLES, file_specs

log = logging.getLogger("kvd.router")
OPEN_MAX_S = 60
FILES_S = 0.5
NAMES_MAX = 8
MANY = 3
ROLE_MAX = 4096  # members; a Picker takes no more


class Circuit:
    """No requests for a while after failures; then a single one as a probe.

    A member that does not answer as a server is distinguished from one that answers with an error,
    which may be its partner's: such failures count if they occurred with more than one partner, if
    there is no other, or if there are many."""

    def __init__(self, threshold, open_s):
        self.threshold, self.open_s = threshold, open_s
        self.opened = 0
        self.until = None  # open or half open
        self.probing = False
        self.reset()

    def reset(self):
        self.failures, self.partners = 0, set()

    def permits(self, now):
        return self.until is None or (now >= self.until and not self.probing)

    def taken(self):
        if self.until is not None:
            self.probing = True

    def released(self):
        """A request ended, perhaps without evidence about the member."""
        self.probing = False

    def succeeded(self):
        self.reset()
        self.probing, self.until, self.opened = False, None, 0

    def failed(self, now, partner=None, others=False):
        """partner: the other member of the pair; others: there is a partner without such a
        failure."""
        self.failures += 1
        self.partners.add(partner)
        blamed = None in self.partners or len(self.partners) > 1 or not others or \
            self.failures >= MANY * self.threshold
        if self.until is not None or (self.failures >= self.threshold and blamed):
            self.until = now + min(self.open_s * 2 ** min(self.opened, 8), OPEN_MAX_S)
            self.opened += 1
            self.reset()
        self.probing = False

    def refused(self, now):
        """The address refuses connections."""
        self.failures = self.threshold
        self.failed(now)


class Member:
    _serial = itertools.count(1)

    def __init__(self, spec, config):
        self.name = "m%d" % next(self._serial)  # unique
        self.spec, self.role, self.url = spec, spec.role, spec.url
        self.label = urllib.parse.urlsplit(spec.url).netloc
        self.circuit = Circuit(config.circuit_failures, config.circuit_open)
        self.healthy, self.misses, self.why = None, 0, "no health check has finished"
        self.listed, self.task = True, None
        self.requests = self.tokens = 0  # reserved by requests of this router
        self.served = self.failed = self.late = 0
        self.answered = 0.0  # time of its last answer, to any request
        self.fault = None  # its last failure

    def blocked(self, now):
        """Why it may not be used; None: it may."""
        if not self.listed:
            return "removed"
        if self.spec.draining:
            return "draining"
        if not self.healthy:
            return self.why
        if not self.circuit.permits(now):
            return "failed %s: %s" % ("and being probed" if self.circuit.probing else "lately",
                                         self.fault)
        return None

    def told(self, now):
        """For the admin socket."""
        why = self.blocked(now)
        return {"role": self.role, "url": self.url, "engine": self.spec.engine,
                "worker": self.spec.worker, "up": why is None, "why": why,
                "requests": self.requests, "tokens": self.tokens, "served": self.served,
                "failed": self.failed}


class Members:
    """All members. check(member): its health; None, or why it failed."""

    def __init__(self, config, check):
        self.config, self.check = config, check
        self.sources = {"arguments": list(config.static)}
        self.roles = {}  # {url: role}, of flips
        self.by_key = {}  # {(role, url): Member}
        self.waiters = set()
        self.tasks = []
        self.on_gone = self.on_down = lambda member: None

    async def start(self):
        marks = {}
        for role, path in self.config.files:
            marks[role, path] = _mark(path)  # before reading, so that a change in between is seen
            self.sources[role, path] = file_specs(path, role, self.config.engine)
        self.rebuild()
        if marks:
            self.tasks.append(asyncio.ensure_future(self._watch_files(marks)))

    async def stop(self):
        tasks = self.tasks + [m.task for m in self.by_key.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the list ----

    def source(self, name, specs):
        """The current list of a source."""
        if self.sources.get(name) != specs:
            self.sources[name] = specs
            self.rebuild()

    def flip(self, url, role):
        """This URL has that role from now on, whatever its source lists."""
        self.roles[url] = role
        self.rebuild()

    def rebuild(self):
        wanted, counts = {}, dict.fromkeys(ROLES, 0)
        for specs in self.sources.values():
            for spec in specs:
                spec = spec._replace(role=self.roles.get(spec.url, spec.role))
                if (spec.role, spec.url) not in wanted:
                    counts[spec.role] += 1
                    if counts[spec.role] <= ROLE_MAX:
                        wanted[spec.role, spec.url] = spec
        for role, count in counts.items():
            if count > ROLE_MAX:
                log.warning("%d %s servers are listed, only %d are used", count, role, ROLE_MAX)
        for key, spec in wanted.items():  # before removals: a flip keeps the known state
            if key in self.by_key:
                self.by_key[key].spec = spec
            else:
                self._add(key, Member(spec, self.config))
        for key in [k for k in self.by_key if k not in wanted]:
            member = self.by_key.pop(key)
            member.listed = False
            member.task.cancel()
            self.on_gone(member)
            log.info("member removed role=%s url=%s running=%d", *key, member.requests)
        self.changed()

    def _add(self, key, member):
        twin = any(m.url == member.url and m.healthy for m in self.by_key.values())
        self.by_key[key] = member
        member.task = asyncio.ensure_future(self._look(member))
        log.info("member listed role=%s url=%s engine=%s", *key, member.spec.engine)
        if twin:  # one server in two roles
            self.seen(member, None)

    def of(self, role):
        return [m for (r, _), m in self.by_key.items() if r == role]

    def usable(self, role):
        now = time.monotonic()
        return [m for m in self.of(role) if m.blocked(now) is None]

    def missing(self, roles=ROLES):
        """Why a role has no member, with names; None: each has some."""
        now, out = time.monotonic(), []
        for role in roles:
            members = self.of(role)
            whys = [(m.label, m.blocked(now)) for m in members]
            if all(why for _, why in whys):
                names = ", ".join("%s (%s)" % one for one in whys[:NAMES_MAX]) or "none is listed"
                more = len(whys) - NAMES_MAX
                out.append("no %s server: %s%s" % (role, names, ", %d more" % more
                                                   if more > 0 else ""))
        return "; ".join(out) or None

    # ---- waiting for a member ----

    def changed(self):
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self, seconds):
        """Waits for a change, at most so long."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            self.waiters.discard(waiter)

    # ---- health ----

    async def _look(self, member):
        while member.listed:
            try:
                why = await self.check(member)
            except Exception as error:  # a bug here must not end the checks
                log.exception("health of %s", member.label)
                why = str(error)
            self.seen(member, why)
            await asyncio.sleep(self.config.health_interval)

    def seen(self, member, why):
        """Its health check succeeded (why None) or failed."""
        was = member.healthy
        member.misses = member.misses + 1 if why else 0
        if not why:
            member.healthy, member.why = True, None
        elif was is not True or member.misses >= self.config.health_failures:
            member.healthy, member.why = False, why
            if was:
                self.on_down(member)
        if member.healthy != was:
            log.log(logging.INFO if member.healthy else logging.WARNING,
                    "member %s role=%s url=%s%s", "up" if member.healthy else "down", member.role,
                    member.url, "" if member.healthy else " why=%r" % why)
            self.changed()

    def succeeded(self, member):
        member.served += 1
        member.answered = time.monotonic()
        was = member.circuit.until
        member.circuit.succeeded()
        if was is not None:
            log.info("circuit closed role=%s url=%s", member.role, member.url)
            self.changed()

    def failed(self, failure, partner):
        """A try ended. partner: the pair's other member, or None."""
        member, now = failure.member, time.monotonic()
        member.failed += 1
        if failure.busy or (partner is not None and not failure.broken and partner.blocked(now)):
            return  # no evidence about this one
        was = member.circuit.until
        member.fault = failure.why
        member.late += failure.status == 504
        if failure.hung:
            member.circuit.refused(now)
        elif failure.broken or partner is None:
            member.circuit.failed(now)
        else:
            seen = member.circuit.partners | {partner.url}
            others = any(m.url not in seen for m in self.usable(partner.role))
            member.circuit.failed(now, partner.url, others)
        self._opened(member, was, failure)

    def unreachable(self, failure):
        """Its address refuses connections."""
        failure.member.failed += 1
        failure.member.fault = failure.why
        was = failure.member.circuit.until
        failure.member.circuit.refused(time.monotonic())
        self._opened(failure.member, was, failure)

    def _opened(self, member, was, failure):
        if member.circuit.until is not None and member.circuit.until != was:
            log.warning("circuit open role=%s url=%s why=%r", member.role, member.url,
                        str(failure))

    # ---- files ----

    async def _watch_files(self, marks):
        while True:
            for role, path in self.config.files:
                mark = _mark(path)
                if marks[role, path] != mark:
                    marks[role, path] = mark
                    self._reread(role, path)
            await asyncio.sleep(FILES_S)

    def _reread(self, role, path):
        try:
            self.source((role, path), file_specs(path, role, self.config.engine))
        except (OSError, ValueError) as why:
            log.warning("members of %s are kept: %s", path, why)


def _mark(path):
    try:
        stat = os.stat(path)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
    except OSError:
        return None
