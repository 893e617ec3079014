# SPDX-License-Identifier: Apache-2.0
"""The picker beside an oracle, turns and chance; the effect of a liar and of a dead worker; a day of
scaling. Judged against bounds.

  pick_sim.py          short runs of all cases; `make test` has an eighth of them (test_router_sim.py)
  pick_sim.py --doc    longer ones, of more seeds, as a page of docs/runs

What is judged: one router is within a tenth of the oracle (and a millisecond: where the oracle's
mean wait is a few, a hundredth of a prompt's time is many tenths of it). Four that share nothing
cannot be: the picks of the others since a load was sampled are known to none. They are held to
bounds of their own. Unequal workers by turns or by chance are beyond what the slow ones can do:
their queues grow as long as the run is."""
import concurrent.futures
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import scale_day  # noqa: E402
from kvd.router.pick import Load  # noqa: E402
from pick_play import CHANCE, ORACLE, PICK, TURNS, Case, Result, play  # noqa: E402

CLOSE = 1.1  # of the oracle, with one router
CLOSE_S = 1e-3  # and so much more, of a prompt of 0.2 s; in proportion


class Sim:
    """seconds: of a run; seeds: runs of a case. doc: rows of tables are printed."""

    def __init__(self, seconds=200, seeds=1, doc=False):
        self.seconds, self.seeds, self.doc = seconds, range(1, seeds + 1), doc
        self.passed, self.failures = 0, []
        self.pool = concurrent.futures.ProcessPoolExecutor() if seeds > 1 else None

    def judge(self, good, name, value, bound):
        if good:
            self.passed += 1
        else:
            self.failures.append("%s: %.4g, bound %.4g" % (name, value, bound))

    def most(self, name, value, bound):
        self.judge(value <= bound, name, value, bound)

    def say(self, text):
        if self.doc:
            print(text, flush=True)

    def play(self, case, *policies):
        """Of each policy a Result, means over the seeds."""
        run = self.pool.map if self.pool else map
        jobs = [(case, policy, seed) for policy in policies for seed in self.seeds]
        results, n = list(run(play, *zip(*jobs))), len(self.seeds)
        return [self._mean(results[i * n:(i + 1) * n]) for i in range(len(policies))]

    @staticmethod
    def _mean(results):
        out = Result._make(sum(column) / len(results) for column in zip(*results))
        return out._replace(wait_most=max(r.wait_most for r in results))

    # ---- beside the oracle ----

    def beside(self, number):
        kind, prompt = number >> 2, (4000, 16000, 64000)[(number >> 2) % 3]
        bursty = bool(number & 2)
        case = Case(unequal=bool(number & 1), bursty=bursty, prompt=prompt,
                    seconds=self.seconds * (3 if prompt == 64000 else 1),  # long prompts are few
                    routers=4 if kind >= 3 else 1, use=0.7 if bursty else 0.8)
        oracle, pick, turns, chance = self.play(case, ORACLE, PICK, TURNS, CHANCE)
        name = "case %d: " % number
        close = CLOSE if case.routers == 1 else 1.6
        if case.routers == 1:
            slack = CLOSE_S * case.prompt / case.speed / 0.2
            self.most(name + "mean wait", pick.wait_mean, CLOSE * oracle.wait_mean + slack)
            self.most(name + "p99 wait", pick.wait_p99, CLOSE * oracle.wait_p99 + slack)
        self.most(name + "mean time to first token", pick.ttft_mean, close * oracle.ttft_mean)
        for other in (turns, chance):
            self.most(name + "p99 wait beside turns, chance", pick.wait_p99, other.wait_p99 / 1.5)
        self.say("| %s | %s | %.1f s | %.0f %% | %d | %.0f / %.0f ms | %.2f / %.2f | %.2f / %.2f "
                 "| %s / %s |" % (
                     "1, 2, 1, 4×" if case.unequal else "equal", "bursts" if bursty else "Poisson",
                     case.prompt / case.speed, case.use * 100, case.routers,
                     oracle.wait_mean * 1e3, oracle.wait_p99 * 1e3,
                     pick.wait_mean / oracle.wait_mean, pick.wait_p99 / oracle.wait_p99,
                     pick.ttft_mean / oracle.ttft_mean, pick.ttft_p99 / oracle.ttft_p99,
                     _times(turns.wait_p99 / pick.wait_p99),
                     _times(chance.wait_p99 / pick.wait_p99)))

    def doubtful(self):
        """How long a prompt takes deviates from its length by 30 %. The oracle knows it; the
        picker is held to a quarter more."""
        oracle, pick = self.play(Case(doubt=0.3, use=0.8, seconds=self.seconds), ORACLE, PICK)
        self.most("doubt: mean time to first token", pick.ttft_mean, 1.25 * oracle.ttft_mean)
        self.say("\nWith prompts that take 30 %% more or less time than their length says (equal "
                 "workers, Poisson, 0.2 s, 80 %%, 1 router): first token %.2f / %.2f of the "
                 "oracle's, which knows." % (pick.ttft_mean / oracle.ttft_mean,
                                             pick.ttft_p99 / oracle.ttft_p99))

    # ---- many workers, many routers ----

    def herd(self, routers, sample):
        """With many routers and short prompts, each worker gets many requests between two of its
        loads: larger samples make the same worker best for more routers."""
        many = routers >= 32
        case = Case(use=0.8, sample=sample, routers=routers, workers=256 if many else 512,
                    prompt=2000 if many else 8000, seconds=32 if many else self.seconds / 8)
        oracle, pick, chance = self.play(case, ORACLE, PICK, CHANCE)
        if not many or sample == 2:  # of many routers two draws are only not worse
            self.most("herd of %d: p99 wait beside chance" % routers, pick.wait_p99,
                      (1 if many else 0.5) * chance.wait_p99)
            self.most("herd of %d: the longest wait" % routers, pick.wait_most, chance.wait_most)
        self.say("| %d of %d | %d | %.1f s | %.2f / %.2f | %.2f / %.2f | %.1f / %.1f |" % (
            sample, case.workers, routers, case.prompt / case.speed,
            pick.ttft_mean / oracle.ttft_mean, pick.ttft_p99 / oracle.ttft_p99, pick.wait_p99,
            chance.wait_p99, pick.wait_most, chance.wait_most))

    # ---- lies, a death ----

    LIES = {"0 waits, for ever": (0, -1), "and a speed of 10^9": (0, 1e9),
            "NaN": (math.nan, math.nan), "-10^300, inf": (-1e300, math.inf),
            "10^15 wait": (1e15, -1)}

    def liar(self, name):
        waiting, speed = self.LIES[name]
        case = Case(workers=8, prompt=8000, seconds=self.seconds, liar=2, lie=Load(
            prompt_tokens_waiting=waiting, prompt_tokens_s=speed))
        (oracle, one), (four,) = self.play(case, ORACLE, PICK), self.play(
            case._replace(routers=4), PICK)
        blind, = self.play(case._replace(results=False), PICK)
        blind_four, = self.play(case._replace(results=False, routers=4), PICK)
        for share in (one.share, four.share):
            self.most(name, share, 0.25)
        self.most(name + ": p99 wait", four.wait_p99, 6)
        self.most(name + ", without results", max(blind.share, blind_four.share), 0.6)
        self.say("| %s | %.3f | %.3f | %.2f, %.2f | %.2f | %.3f | %.3f |" % (
            name, one.share, four.share, one.wait_p99, four.wait_p99, oracle.wait_p99,
            blind.share, blind_four.share))

    def death(self, routers, answers):
        case = Case(workers=8, prompt=8000, seconds=self.seconds, dies=3, routers=routers,
                    answers_failures=answers)
        pick, = self.play(case, PICK)
        self.most("picked after it was gone", pick.to_gone, 0)
        self.most("lost by a death", pick.lost, 8 * routers)
        self.say("| %s | %d | %.0f | %.1f |" % (
            "its requests fail at once" if answers else "they hang", routers,
            pick.requests / self.seconds, pick.lost))

    # ---- scaling ----

    def day(self, noise, spike):
        got = scale_day.play(noise, spike)
        sides = got.prefill, got.decode
        bound = 0.99 if spike < 2 else 0.98
        self.judge(got.kept >= bound, "a day: prompts in bound", got.kept, bound)
        self.most("a day: flaps", sum(s.flaps for s in sides), 0 if noise < 0.1 else 8)
        self.most("a day: turns", max(s.turns for s in sides), 24)
        self.most("a day: hours", max(s.hours / s.fixed_hours for s in sides), 0.7)
        self.say("| %.0f %% | %.1f× | %.2f %% | %.1f s | %d, %d | %d, %d; %d, %d | %.0f of %.0f "
                 "| %.0f of %.0f |" % (
                     noise * 100, spike, got.kept * 100, got.worst_s, *(s.steps for s in sides),
                     *(s.turns for s in sides), *(s.flaps for s in sides), sides[0].hours,
                     sides[0].fixed_hours, sides[1].hours, sides[1].fixed_hours))


def _times(ratio):
    return "%.1f" % ratio if ratio < 100 else "> 100"


def main():
    sim = Sim(1000, 5, True) if sys.argv[1:] == ["--doc"] else Sim()
    sim.say("| 16 workers | arrivals | a prompt | use | routers | oracle waits, mean / p99 | wait "
            "beside it | first token beside it | p99 wait by turns / by chance |\n"
            "|---|---|---|---|---|---|---|---|---|")
    for number in range(24):
        sim.beside(number)
    sim.doubtful()
    sim.say("\n| sample | routers | a prompt | first token beside the oracle | p99 wait / by "
            "chance, s | longest / by chance, s |\n|---|---|---|---|---|---|")
    for routers in (1, 4, 8, 32):
        for sample in (2, 4, 8):
            sim.herd(routers, sample)
    sim.say("\n| one of 8 workers reports | share with 1 router | with 4 | p99 wait, s | oracle "
            "| share without results, 1 router | 4 |\n|---|---|---|---|---|---|---|")
    for name in sim.LIES:
        sim.liar(name)
    sim.say("\n| one of 8 dies, gone 15 s later | routers | requests a second | lost |\n"
            "|---|---|---|---|")
    for routers in (1, 4):
        for answers in (False, True):
            sim.death(routers, answers)
    sim.say("\n| slow noise | spike | prompts in bound | longest wait | steps | turns, flaps "
            "| prefill hours, of a fixed pool's | decode |\n|---|---|---|---|---|---|---|---|")
    for noise, spike in ((0, 1), (0.05, 1.5), (0.05, 2), (0.1, 1.5)):
        sim.day(noise, spike)
    for failure in sim.failures:
        print("FAILED: " + failure, file=sys.stderr)
    print("%d passed, %d failed" % (sim.passed, len(sim.failures)), file=sys.stderr)
    return bool(sim.failures)


if __name__ == "__main__":
    sys.exit(main())
