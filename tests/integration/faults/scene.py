# SPDX-License-Identifier: Apache-2.0
"""One room, driven to a phase and, after the fault, on to its end.

A phase is two lists of steps: what leads there, and what is left to do. S is the
source's side, D the destination's; T a second destination of the same source
(phase "half": D has succeeded, T's pages may not be written yet)."""
from world import FAILED, SUCCESS, TRANSFERRING, WAITING, Side, Wrong

SMALL, LARGE, POOL_PAGES = 4, 480, 1024
WORD = 1  # passed by Scene.pass_word

PUSH = {
    "receiver-alone": ("open_d bind_d told_d", "open_s ready send_all"),
    "sender-alone": ("open_s", "open_d bind_d ready send_all"),
    "unbound": ("open_d open_s asks_d", "bind_d ready send_all"),
    "waiting": ("open_d bind_d open_s ready known", "send_all"),
    "word": ("open_d bind_d open_s ready known send_first_word", "pass_word send_second"),
    "between": ("open_d bind_d open_s ready known send_first landed", "send_second"),
    "moving": ("open_d bind_d open_s ready known send_all moves", ""),
    "half": ("open_d open_t open_s bind_d bind_t_word ready send_all d_done", "pass_word"),
    "ended": ("open_d bind_d open_s ready send_all all_done", ""),
}
PULL = {
    "offer-alone": ("open_s", "open_d"),
    "pull-alone": ("open_d asks_d", "open_s"),
    "held": ("open_s open_d_word known", "pass_word"),
    "moving": ("open_s open_d moves", ""),
    "half": ("open_s open_d open_t_word known_t d_done", "pass_word"),
    "ended": ("open_s open_d all_done", ""),
}
PHASES = {"push": PUSH, "pull": PULL}
# query rows (rows.py): they wait for the holder's thread, are attended there, were
# answered, and what came back waits to be merged
ROWS_PHASES = "queued", "attended", "answered", "merging"


class Scene:
    def __init__(self, world, way, phase, source, targets):
        """`targets`: the engines of D and T."""
        self.world, self.way, self.phase = world, way, phase
        self.before, self.after = (steps.split() for steps in PHASES[way][phase])
        number = world.new_number()
        count = LARGE if phase == "moving" else SMALL
        roles = ("send", "recv") if way == "push" else ("offer", "pull")
        both = 2 if phase == "half" else 1
        self.s = Side(source, number, roles[0], count, None, both if way == "pull" else 0)
        self.d, self.t = (Side(e, number, roles[1], count, source, both if way == "push" else 0)
                          for e in targets)
        self.sides = [self.s, self.d] + ([self.t] if phase == "half" else [])
        self.count, self.half = count, count // 2

    def enter(self):
        for side in self.sides:
            side.engine.do("zero")
        for step in self.before:
            getattr(self, step)()

    def go_on(self):
        for step in self.after:
            getattr(self, step)()

    # ---- steps

    def open_s(self):
        self.s.open()

    def open_d(self):
        self.d.open()

    def open_t(self):
        self.t.open()

    def open_d_word(self):
        self.d.open(WORD)

    def open_t_word(self):
        self.t.open(WORD)

    def bind_d(self):
        self.d.bind()

    def bind_t_word(self):
        self.t.bind(WORD)

    def ready(self):
        """A target that fails before it told the source leaves that one waiting."""
        self.world.until(lambda: self.s.state == WAITING or self.failed(),
                         lambda: "%s: %s instead of %d" % (self.s, self.s.now, WAITING))
        if self.s.state != WAITING:
            raise Wrong("%s failed" % self.failed()[0])

    def failed(self):
        return [side for side in self.sides if side.state == FAILED]

    def known(self):
        self.peer_known(self.d)

    def known_t(self):
        self.peer_known(self.t)

    def peer_known(self, side):
        """Until the other side's room has answered: it will say why it ends."""
        self.world.until(lambda: all(p["generation"] != "0" for p in side.show()["peers"]),
                         "%s: the other side did not answer" % side)

    def told_d(self):
        """Its request is on its way to a room that does not exist."""
        self.world.until(lambda: self.d.show()["peers"][0]["requested"], "nothing is requested")

    def asks_d(self):
        """It was told that its source is there."""
        self.d.until(WAITING)

    def send_all(self):
        self.s.send(0, 0, self.count, True)

    def send_first(self):
        self.s.send(0, 0, self.half, False)

    def send_first_word(self):
        self.s.send(0, 0, self.half, False, WORD)

    def send_second(self):
        self.s.send(1, self.half, self.count, True)

    def landed(self):
        """A word while transferring comes with the bytes: the room says how many."""
        self.world.until(lambda: self.d.show()["bytes"] * 2 >= self.expected(),
                         "the first chunk did not land")
        self.d.until(TRANSFERRING)

    def expected(self):
        return self.d.show()["expected_bytes"]

    def moves(self):
        self.d.engine.do("watch", self.d.number, self.d.role, 1)

    def d_done(self):
        self.d.until(SUCCESS)

    def all_done(self):
        for side in self.sides:
            side.until(SUCCESS)

    def pass_word(self):
        for side in self.sides:
            side.engine.do("word", WORD)

    # ---- after it

    def close(self):
        for side in self.sides:
            if side.opened:
                if not side.ended:
                    raise Wrong("%s has not ended: %s" % (side, side.now))
                side.close()
