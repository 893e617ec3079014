/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pick_sim: the picker beside an oracle, round robin and chance; what a liar and a dead
 * worker do; a day of scaling. Judged against bounds.
 *
 *   pick_sim          short runs, as make test has them
 *   pick_sim --long   longer ones, of more seeds
 *   pick_sim --doc    these, as the section of docs/performance.md, on standard output
 *
 * What is judged: one router is within a tenth of the oracle (and a millisecond: where
 * the oracle's mean wait is a few, a hundredth of a prompt's time is many tenths of it).
 * Four that share nothing cannot be: what the others picked since a load was sampled is
 * not known to anybody. They are held to bounds of their own. Unequal workers by turns or
 * by chance are beyond what the slow ones can do: their queues grow as long as the run
 * is.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/pick/pick_sim.h"
#include "tests/pick/scale_day.h"

#define CLOSE 1.1    /* of the oracle, with one router */
#define CLOSE_S 1e-3 /* beside that, of a prompt of 0.2 s; in proportion */
#define SEEDS_MAX 5u

static unsigned int passed, failed;
static bool doc;
static double seconds = 200;
static unsigned int seeds = 1;

static void judge(bool good, const char *what, double value, double bound)
{
	if (good)
		passed++;
	else
		failed++;
	if (!good)
		fprintf(stderr, "FAILED: %s: %.4g, bound %.4g\n", what, value, bound);
}

/* Means over the seeds. */
static struct sim_result play(const struct sim_case *c, enum sim_policy policy)
{
	struct sim_result sum = {.requests = 0};

	for (unsigned int s = 0; s < seeds; s++) {
		struct sim_result r;

		sim_play(c, policy, s + 1, &r);
		sum.wait_mean += r.wait_mean / seeds;
		sum.wait_p99 += r.wait_p99 / seeds;
		sum.ttft_mean += r.ttft_mean / seeds;
		sum.ttft_p99 += r.ttft_p99 / seeds;
		sum.share += r.share / seeds;
		sum.wait_most = fmax(sum.wait_most, r.wait_most);
		sum.lost += r.lost;
		sum.to_gone += r.to_gone;
		sum.requests += r.requests;
	}
	return sum;
}

static struct sim_case a_case(void)
{
	return (struct sim_case){.workers = 16,
				 .routers = 1,
				 .speed = 20000,
				 .prompt = 4000,
				 .spread = 0.8,
				 .use = 0.7,
				 .period = 1,
				 .delay = 0.1,
				 .seconds = seconds,
				 .liar = -1,
				 .dies = -1};
}

/* ---- beside the oracle ---- */

static const char *times(double ratio)
{
	static char text[4][16];
	static unsigned int at;

	at = (at + 1) % 4;
	snprintf(text[at], sizeof(text[at]), ratio < 100 ? "%.1f" : "> 100", ratio);
	return text[at];
}

static void beside_judge(const struct sim_case *c, const char *name,
			 const struct sim_result *o, const struct sim_result *p,
			 const struct sim_result *turns, const struct sim_result *chance)
{
	double slack = CLOSE_S * c->prompt / c->speed / 0.2;
	char what[160];

	snprintf(what, sizeof(what), "%s: mean wait", name);
	if (c->routers == 1)
		judge(p->wait_mean <= CLOSE * o->wait_mean + slack, what, p->wait_mean,
		      CLOSE * o->wait_mean + slack);
	snprintf(what, sizeof(what), "%s: p99 wait", name);
	if (c->routers == 1)
		judge(p->wait_p99 <= CLOSE * o->wait_p99 + slack, what, p->wait_p99,
		      CLOSE * o->wait_p99 + slack);
	snprintf(what, sizeof(what), "%s: mean time to first token", name);
	judge(p->ttft_mean <= (c->routers == 1 ? CLOSE : 1.6) * o->ttft_mean, what,
	      p->ttft_mean, (c->routers == 1 ? CLOSE : 1.6) * o->ttft_mean);
	snprintf(what, sizeof(what), "%s: p99 wait by turns, by chance", name);
	judge(turns->wait_p99 > 1.5 * p->wait_p99 && chance->wait_p99 > 1.5 * p->wait_p99,
	      what, turns->wait_p99 / p->wait_p99, 1.5);
}

static void beside(struct sim_case c)
{
	struct sim_result o = play(&c, SIM_ORACLE), p = play(&c, SIM_PICK);
	struct sim_result turns = play(&c, SIM_ROUND_ROBIN);
	struct sim_result chance = play(&c, SIM_RANDOM);
	char name[128];

	snprintf(name, sizeof(name), "%s, %s, %.1f s, %.0f %%, %u",
		 c.unequal ? "unequal" : "equal", c.bursty ? "bursts" : "Poisson",
		 c.prompt / c.speed, c.use * 100, c.routers);
	beside_judge(&c, name, &o, &p, &turns, &chance);
	if (doc)
		printf("| %s | %s | %.1f s | %.0f %% | %u | %.0f / %.0f ms | %.2f / %.2f "
		       "| %.2f / %.2f | %s / %s |\n",
		       c.unequal ? "1, 2, 1, 4×" : "equal",
		       c.bursty ? "bursts" : "Poisson", c.prompt / c.speed, c.use * 100,
		       c.routers, o.wait_mean * 1e3, o.wait_p99 * 1e3,
		       p.wait_mean / o.wait_mean, p.wait_p99 / o.wait_p99,
		       p.ttft_mean / o.ttft_mean, p.ttft_p99 / o.ttft_p99,
		       times(turns.wait_p99 / p.wait_p99),
		       times(chance.wait_p99 / p.wait_p99));
}

static void beside_all(void)
{
	if (doc)
		printf("| 16 workers | arrivals | a prompt | use | routers | "
		       "oracle waits, "
		       "mean / p99 | wait beside it | first token beside it | "
		       "p99 wait by "
		       "turns / by chance |\n|---|---|---|---|---|---|---|---|---|\n");
	for (unsigned int i = 0; i < 24; i++) {
		struct sim_case c = a_case();

		c.unequal = i & 1;
		c.bursty = i & 2;
		c.prompt = (i >> 2) % 3 == 0 ? 4000 : (i >> 2) % 3 == 1 ? 16000 : 64000;
		c.seconds *= (i >> 2) % 3 == 2 ? 3 : 1; /* long prompts are few */
		c.routers = i >= 12 ? 4 : 1;
		c.use = c.bursty ? 0.7 : 0.8;
		beside(c);
	}
}

/* How long a prompt takes is not what its length says, by 30 %. The oracle knows it; the
 * picker is held to a quarter more. */
static void doubtful(void)
{
	struct sim_case c = a_case();
	struct sim_result o, p;

	c.doubt = 0.3;
	c.use = 0.8;
	o = play(&c, SIM_ORACLE);
	p = play(&c, SIM_PICK);
	judge(p.ttft_mean <= 1.25 * o.ttft_mean, "doubt: mean time to first token",
	      p.ttft_mean, 1.25 * o.ttft_mean);
	if (doc)
		printf("\nWith prompts that take 30 %% more or less time than "
		       "their length "
		       "says (equal workers, Poisson, 0.2 s, 80 %%, 1 router): "
		       "first token "
		       "%.2f / %.2f of the oracle's, which knows.\n",
		       p.ttft_mean / o.ttft_mean, p.ttft_p99 / o.ttft_p99);
}

/* ---- many workers, many routers ---- */

static void herd(struct sim_case c)
{
	struct sim_result o = play(&c, SIM_ORACLE), p = play(&c, SIM_PICK);
	struct sim_result chance = play(&c, SIM_RANDOM);
	/* of many routers two draws are only not worse */
	double share = c.routers < 32 ? 0.5 : 1;

	if (c.routers < 32 || c.sample == 2) {
		judge(p.wait_p99 <= share * chance.wait_p99,
		      "herd: p99 wait beside chance", p.wait_p99,
		      share * chance.wait_p99);
		judge(p.wait_most <= chance.wait_most, "herd: the longest wait",
		      p.wait_most, chance.wait_most);
	}
	if (doc)
		printf("| %u of %u | %u | %.1f s | %.2f / %.2f | %.2f / %.2f | "
		       "%.1f / %.1f "
		       "|\n",
		       c.sample, c.workers, c.routers, c.prompt / c.speed,
		       p.ttft_mean / o.ttft_mean, p.ttft_p99 / o.ttft_p99, p.wait_p99,
		       chance.wait_p99, p.wait_most, chance.wait_most);
}

/* With many routers and short prompts, each worker gets many requests between two of its
 * loads: more looks make the same worker best for more routers. */
static void herds(void)
{
	static const unsigned int routers[] = {1, 4, 8, 32};

	if (doc)
		printf("\n| looks at | routers | a prompt | first token beside the "
		       "oracle | p99 wait / by chance, s | longest / by chance, s |\n"
		       "|---|---|---|---|---|---|\n");
	for (unsigned int r = 0; r < 4; r++)
		for (unsigned int sample = 2; sample <= 8; sample *= 2) {
			struct sim_case c = a_case();

			c.use = 0.8;
			c.sample = sample;
			c.routers = routers[r];
			c.workers = c.routers < 32 ? 512 : 256;
			c.prompt = c.routers < 32 ? 8000 : 2000;
			c.seconds = c.routers < 32 ? seconds / 8 : 32;
			herd(c);
		}
}

/* ---- who lies, who dies ---- */

static void liars(void)
{
	static const struct {
		const char *name;
		double waiting, speed;
	} lies[] = {
		{"0 waits, for ever", 0, -1},
		{"and a speed of 10^9", 0, 1e9},
		{"NaN", NAN, NAN},
		{"-10^300, inf", -1e300, INFINITY},
		{"10^15 wait", 1e15, -1},
	};

	if (doc)
		printf("\n| one of 8 workers says | share with 1 router | with 4 "
		       "| p99 wait, s | oracle | share without results, 1 router "
		       "| 4 |\n|---|---|---|---|---|---|---|\n");
	for (unsigned int i = 0; i < 5; i++) {
		struct sim_result one, four, o, blind[2];
		struct sim_case c = a_case();

		c.workers = 8;
		c.prompt = 8000;
		c.liar = 2;
		kvd_pick_load_unknown(&c.lie);
		c.lie.prompt_tokens_waiting = lies[i].waiting;
		c.lie.prompt_tokens_s = lies[i].speed;
		o = play(&c, SIM_ORACLE);
		one = play(&c, SIM_PICK);
		c.routers = 4;
		four = play(&c, SIM_PICK);
		c.no_results = true;
		blind[1] = play(&c, SIM_PICK);
		c.routers = 1;
		blind[0] = play(&c, SIM_PICK);
		judge(one.share < 0.25, lies[i].name, one.share, 0.25);
		judge(four.share < 0.25, lies[i].name, four.share, 0.25);
		judge(four.wait_p99 < 6, lies[i].name, four.wait_p99, 6);
		judge(fmax(blind[0].share, blind[1].share) < 0.6, "without results",
		      fmax(blind[0].share, blind[1].share), 0.6);
		if (doc)
			printf("| %s | %.3f | %.3f | %.2f, %.2f | %.2f | %.3f | %.3f "
			       "|\n",
			       lies[i].name, one.share, four.share, one.wait_p99,
			       four.wait_p99, o.wait_p99, blind[0].share, blind[1].share);
	}
}

static void deaths(void)
{
	if (doc)
		printf("\n| one of 8 dies, gone 15 s later | routers | requests "
		       "a second | "
		       "lost |\n|---|---|---|---|\n");
	for (unsigned int i = 0; i < 4; i++) {
		struct sim_case c = a_case();
		struct sim_result r;

		c.workers = 8;
		c.prompt = 8000;
		c.dies = 3;
		c.dies_at = seconds / 2;
		c.gone_after = 15;
		c.answers_failures = i & 1;
		c.routers = i & 2 ? 4 : 1;
		r = play(&c, SIM_PICK);
		judge(r.to_gone == 0, "picked after it was gone", (double)r.to_gone, 0);
		judge((double)r.lost / seeds < 8.0 * c.routers, "lost by a death",
		      (double)r.lost / seeds, 8.0 * c.routers);
		if (doc)
			printf("| %s | %u | %.0f | %.1f |\n",
			       i & 1 ? "its requests fail at once" : "they hang",
			       c.routers, (double)r.requests / seeds / seconds,
			       (double)r.lost / seeds);
	}
}

/* ---- scaling ---- */

static void days(void)
{
	static const struct {
		double noise, spike;
	} cases[] = {{0, 1}, {0.05, 1.5}, {0.05, 2}, {0.1, 1.5}};

	if (doc)
		printf("\n| slow noise | spike | prompts in bound | longest wait "
		       "| steps | "
		       "turns, flaps | prefill hours, of a fixed pool's | decode |\n"
		       "|---|---|---|---|---|---|---|---|\n");
	for (unsigned int i = 0; i < 4; i++) {
		struct day day = {.peak = 560000,
				  .noise = cases[i].noise,
				  .spike = cases[i].spike,
				  .spike_at = 54000,
				  .spike_s = 1200,
				  .residence_s = 20,
				  .bound_s = 2,
				  .first = 6,
				  .seed = 1};
		const struct day_side *s;
		struct day_result r;

		day_play(&day, &r);
		s = r.side;
		judge(r.code == 0 && r.kept >= (day.spike < 2 ? 0.99 : 0.98),
		      "a day: prompts in bound", r.kept, 0.98);
		judge(s[0].flaps + s[1].flaps <= (day.noise < 0.1 ? 0 : 8),
		      "a day: flaps", s[0].flaps + s[1].flaps, 0);
		judge(s[0].turns <= 24 && s[1].turns <= 24, "a day: turns", s[0].turns,
		      24);
		judge(s[0].hours < 0.7 * s[0].fixed_hours &&
			      s[1].hours < 0.7 * s[1].fixed_hours,
		      "a day: hours", s[0].hours / s[0].fixed_hours, 0.7);
		if (doc)
			printf("| %.0f %% | %.1f× | %.2f %% | %.1f s | %u, %u | "
			       "%u, %u; %u, "
			       "%u | %.0f of %.0f | %.0f of %.0f |\n",
			       day.noise * 100, day.spike, r.kept * 100, r.worst_s,
			       s[0].steps, s[1].steps, s[0].turns, s[1].turns, s[0].flaps,
			       s[1].flaps, s[0].hours, s[0].fixed_hours, s[1].hours,
			       s[1].fixed_hours);
	}
}

int main(int argc, char **argv)
{
	doc = argc > 1 && strcmp(argv[1], "--doc") == 0;
	if (doc || (argc > 1 && strcmp(argv[1], "--long") == 0)) {
		seconds = 1000;
		seeds = SEEDS_MAX;
	}
	beside_all();
	doubtful();
	herds();
	liars();
	deaths();
	days();
	fprintf(doc ? stderr : stdout, "%u passed, %u failed\n", passed, failed);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
