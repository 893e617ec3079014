/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "tests/sim/sim.h"

static const struct {
	const char *name, *words;
	unsigned int weight;
	bool trouble;
} kinds[] = {
#define SIM_KIND(NAME, weight, trouble, words) {#NAME, words, weight, trouble},
	SIM_EVENTS(SIM_KIND)
#undef SIM_KIND
};

uint64_t sim_next(struct sim_draw *d)
{
	uint64_t z = d->state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

unsigned int sim_below(struct sim_draw *d, unsigned int n)
{
	return (unsigned int)(sim_next(d) % n);
}

bool sim_chance(struct sim_draw *d, unsigned int percent)
{
	return sim_below(d, 100) < percent;
}

bool sim_is_trouble(unsigned int kind)
{
	return kinds[kind].trouble;
}

static void add(struct sim_script *s, struct sim_draw *d, unsigned int kind,
		uint32_t after_us)
{
	s->events[s->count++] = (struct sim_event){after_us, kind, sim_next(d)};
}

static unsigned int ranks_of(struct sim_draw *d)
{
	unsigned int k = sim_below(d, 10);

	return k < 5 ? 1 : k < 8 ? 2 : 4;
}

/* Some kinds of trouble only. In every eighth script engines give rooms up and nothing
 * else goes wrong: only then is it certain how soon the others have to know. */
static void choose_kinds(struct sim_script *s, struct sim_draw *d, unsigned int *weights)
{
	unsigned int keep = 20 + sim_below(d, 80);

	for (unsigned int k = 0; k < SIM_ROWS; k++) {
		weights[k] = kinds[k].weight;
		if (kinds[k].trouble && (s->calm || !sim_chance(d, keep)))
			weights[k] = 0;
		if (kinds[k].trouble && !s->calm && s->seed % 8 == 3)
			weights[k] = k == SIM_ABORT ? kinds[k].weight : 0;
	}
	if (s->liars)
		weights[SIM_LIE] = 120;
	if (!s->calm && !s->liars && !weights[SIM_ABORT] && !weights[SIM_RULE])
		weights[SIM_RULE] = kinds[SIM_RULE].weight;
}

/* A draw of their own: scripts without requesters are as they would be without these. */
static void choose_asks(const struct sim_script *s, unsigned int *weights)
{
	static const unsigned int each[] = {260, 130, 12, 16, 60};
	struct sim_draw d = {s->seed ^ 0xa5ced};

	for (unsigned int k = SIM_ROWS; k < SIM_KINDS; k++) {
		weights[k] = s->asks ? each[k - SIM_ROWS] : 0;
		if (kinds[k].trouble && (s->calm || !sim_chance(&d, 60)))
			weights[k] = 0;
	}
}

static unsigned int pick(struct sim_draw *d, const unsigned int *weights,
			 unsigned int sum)
{
	unsigned int k = 0, at = sim_below(d, sum);

	while (at >= weights[k])
		at -= weights[k++];
	return k;
}

void sim_script_write(struct sim_script *s, uint64_t seed, bool liars)
{
	struct sim_draw d = {seed};
	unsigned int weights[SIM_KINDS], sum = 0, knobs, events, pause_us;

	s->seed = seed;
	s->liars = liars;
	s->calm = !liars && sim_chance(&d, 6);
	s->asks = sim_asks_built && seed % 4 == 2;
	s->count = 0;
	s->sources = ranks_of(&d);
	s->sinks = ranks_of(&d);
	s->places = 2 + sim_below(&d, s->sources + s->sinks > 4 ? 7 : 3);
	choose_kinds(s, &d, weights);
	choose_asks(s, weights);
	for (unsigned int k = 0; k < SIM_KINDS; k++)
		sum += weights[k];
	knobs = 4 + sim_below(&d, s->calm ? 4 : 9);
	for (unsigned int i = 0; i < knobs; i++)
		add(s, &d, SIM_KNOB, 0);
	events = 200 + sim_below(&d, SIM_EVENTS_MAX - 220);
	pause_us = 1 + sim_below(&d, s->calm ? 4000 : 9000);
	for (unsigned int i = 0; i < events; i++)
		add(s, &d, pick(&d, weights, sum), sim_below(&d, pause_us) + 1);
}

void sim_script_print(const struct sim_script *s)
{
	uint64_t at_us = 0;

	printf("  seed %llu%s: %u places, %u source ranks, %u sink ranks, %u events\n",
	       (unsigned long long)s->seed,
	       s->calm	  ? " (calm)"
	       : s->liars ? " (liars)"
			  : "",
	       s->places, s->sources, s->sinks, s->count);
	for (unsigned int i = 0; i < s->count && i < 60; i++) {
		at_us += s->events[i].after_us;
		printf("  %10.3f ms  %-9s %016llx  %s\n", (double)at_us / 1000,
		       kinds[s->events[i].kind].name,
		       (unsigned long long)s->events[i].draw,
		       kinds[s->events[i].kind].words);
	}
}
