/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A day of kvd_scale_step(): prompts arrive at a rate that follows the hours, with noise
 * and one spike; a worker that is wanted works after start_s, one that is not leaves at
 * once (it had drained). The queue is a fluid: what arrives above what the workers
 * compute waits for waiting / capacity seconds. Each request brings KV to decode workers
 * for residence_s.
 */
#include "tests/pick/scale_day.h"

#include <math.h>
#include <string.h>

#define STEP_S 10.0
#define SPEED 20000.0 /* prompt tokens a second of a worker */
#define KV_TOTAL 400000.0
#define KV_TOKENS 1.125 /* a token of the prompt, with the answer */
#define FLAP_S 600.0	/* a step back after less is a flap */
#define STARTS 512u

static uint64_t day_random(uint64_t *state)
{
	uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

static double day_normal(uint64_t *state)
{
	double a = ((double)(day_random(state) >> 11) + 0.5) * 0x1p-53;
	double b = ((double)(day_random(state) >> 11) + 0.5) * 0x1p-53;

	return sqrt(-2 * log(a)) * cos(2 * M_PI * b);
}

/* Tokens a second at a time of the day, without noise. */
static double day_rate(const struct day *day, double at)
{
	double hours = pow((1 - cos(2 * M_PI * (at / 86400 - 0.1))) / 2, 1.3);
	double rate = day->peak * (0.15 + 0.85 * hours);

	if (at >= day->spike_at && at < day->spike_at + day->spike_s)
		rate *= day->spike;
	return rate;
}

struct pool {
	unsigned int working, starting, last;
	double ready[STARTS]; /* when each that starts works */
	double step_at;
	int direction; /* of the last step: 1 up, -1 down */
	struct day_side *told;
};

static void pool_follow(struct pool *pool, unsigned int wanted, double at, double start_s)
{
	unsigned int kept = 0;

	if (pool->last && wanted != pool->last) {
		int direction = wanted > pool->last ? 1 : -1;

		pool->told->steps++;
		pool->told->turns += pool->direction && direction != pool->direction;
		pool->told->flaps += pool->direction && direction != pool->direction &&
				     at - pool->step_at < FLAP_S;
		pool->direction = direction;
		pool->step_at = at;
	}
	pool->last = wanted;
	for (unsigned int i = 0; i < pool->starting; i++) {
		if (pool->ready[i] <= at)
			pool->working++;
		else
			pool->ready[kept++] = pool->ready[i];
	}
	pool->starting = kept;
	while (pool->working + pool->starting < wanted && pool->starting < STARTS)
		pool->ready[pool->starting++] = at + start_s;
	while (pool->working + pool->starting > wanted && pool->starting)
		pool->starting--;
	if (pool->working > wanted)
		pool->working = wanted;
	pool->told->hours += (pool->working + pool->starting) * STEP_S / 3600;
	pool->told->most = pool->told->most > wanted ? pool->told->most : wanted;
}

void day_play(const struct day *day, struct day_result *result)
{
	struct kvd_scale_options o = day->options;
	struct kvd_scale_state state = {.side[0].wanted = 0};
	struct pool pool[KVD_PICK_SIDES] = {{.working = day->first},
					    {.working = day->first}};
	double waiting = 0, noise = 0, kv = 0, rate_most = 0, in_bound = 0;
	double all = 0;
	uint64_t random = day->seed;

	memset(result, 0, sizeof(*result));
	pool[0].told = &result->side[0];
	pool[1].told = &result->side[1];
	for (double at = STEP_S; at < 86400; at += STEP_S) {
		struct kvd_scale_sample sample = {.side[0].workers = 0};
		struct kvd_scale_wanted wanted;
		double rate, capacity = pool[0].working * SPEED, served, room;

		noise = 0.97 * noise + 0.24 * day->noise * day_normal(&random);
		rate = fmax(0,
			    day_rate(day, at) * (1 + noise + 0.05 * day_normal(&random)));
		rate_most = fmax(rate_most, rate);
		served = fmin(rate + waiting / STEP_S, capacity);
		waiting = fmax(0, waiting + (rate - served) * STEP_S);
		kv += (1 - exp(-STEP_S / day->residence_s)) *
		      (served * KV_TOKENS * day->residence_s - kv);
		room = pool[1].working * KV_TOTAL;
		all += rate;
		if (waiting <= day->bound_s * capacity && kv <= room)
			in_bound += rate;
		result->worst_s = fmax(result->worst_s, waiting / fmax(capacity, 1));
		sample.side[0] = (struct kvd_scale_side){
			.workers = pool[0].working,
			.speed = SPEED,
			.served = served,
			.waiting = waiting,
		};
		sample.side[1] = (struct kvd_scale_side){
			.workers = pool[1].working,
			.speed = KV_TOTAL,
			.served = fmin(kv, room),
			.waiting = fmax(0, kv - room),
		};
		result->code = kvd_scale_step(&state, &o, &sample, (uint64_t)(at * 1e9),
					      &wanted);
		if (result->code)
			return;
		for (unsigned int i = 0; i < KVD_PICK_SIDES; i++)
			pool_follow(&pool[i], wanted.workers[i], at,
				    o.start_s > 0 ? o.start_s : 180);
	}
	result->kept = in_bound / all;
	result->side[0].fixed_hours =
		24 *
		ceil(rate_most / (SPEED * (o.prefill_busy > 0 ? o.prefill_busy : 0.7)));
	result->side[1].fixed_hours =
		24 * ceil(rate_most * KV_TOKENS * day->residence_s /
			  (KV_TOTAL * (o.decode_full > 0 ? o.decode_full : 0.75)));
}
