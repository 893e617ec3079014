/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One run of a case: arrivals, a policy, and what requests waited.
 *
 * A worker computes prompts in turn, each in tokens / speed, so the moment at which it is
 * free tells all of its queue. It samples its load each `period`, from a phase of its
 * own; routers have it `delay` later. The same seed gives all policies the same requests
 * at the same times.
 *
 * The oracle sees every queue at the moment and takes the worker with the least real work
 * left once the request is there: (tokens that it has not computed + the request's) / its
 * true speed. Of equals one by chance. Among equal workers that is the shortest queue.
 */
#include "tests/pick/pick_sim.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NS 1e9
#define START_S 1.0
#define WARM 0.1 /* of the run is not counted */

struct request {
	double at, tokens, work; /* what is told, and what it really is */
	uint8_t router;
};

struct worker {
	char name[16];
	double speed, free_at, assigned, told_done, told_at;
	unsigned long requests;
	uint64_t seq;
	bool dead, gone;
};

enum event_kind { EVENT_ANSWER, EVENT_SAMPLE, EVENT_LOAD, EVENT_GONE };

struct event {
	double at, value, sampled;
	uint64_t id;
	enum event_kind kind;
	int worker, router;
	struct kvd_pick_load load;
};

struct play {
	const struct sim_case *c;
	enum sim_policy policy;
	uint64_t random;
	struct request *requests;
	double *waits, *ttfts;
	size_t count, counted;
	struct worker workers[SIM_WORKERS_MAX];
	struct kvd_picker *pickers[SIM_ROUTERS_MAX];
	unsigned int next[SIM_ROUTERS_MAX];
	struct event *events; /* a heap */
	size_t event_count, event_room;
	struct sim_result *result;
};

/* ---- chance ---- */

static uint64_t play_random(uint64_t *state)
{
	uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

static double play_share(uint64_t *state)
{
	return ((double)(play_random(state) >> 11) + 0.5) * 0x1p-53;
}

static double play_exponential(uint64_t *state, double mean)
{
	return -log(play_share(state)) * mean;
}

static double play_normal(uint64_t *state)
{
	return sqrt(-2 * log(play_share(state))) * cos(2 * M_PI * play_share(state));
}

/* ---- requests ---- */

static double worker_speed(const struct sim_case *c, unsigned int i)
{
	static const double factor[] = {1, 2, 1, 4};

	return c->unequal ? c->speed * factor[i % 4] : c->speed;
}

/* Of the two states one brings three times as many requests as the other, each for some
 * seconds. */
static void requests_make(struct play *play, uint64_t seed)
{
	const struct sim_case *c = play->c;
	double capacity = 0, rate, at = START_S, change = 0;
	uint64_t random = seed * 77 + 1;
	bool high = false;
	size_t room = 0;

	for (unsigned int i = 0; i < c->workers; i++)
		capacity += worker_speed(c, i);
	rate = c->use * capacity / c->prompt;
	while (at < START_S + c->seconds) {
		double now = !c->bursty ? rate : high ? 1.5 * rate : 0.5 * rate;
		struct request *r;

		at += play_exponential(&random, 1 / now);
		if (c->bursty && at > change) {
			high = !high;
			at = change > START_S ? change : START_S;
			change = at + play_exponential(&random, 5);
			continue;
		}
		if (play->count == room) {
			room = room ? 2 * room : 4096;
			play->requests =
				realloc(play->requests, room * sizeof(*play->requests));
			assert(play->requests);
		}
		r = &play->requests[play->count++];
		*r = (struct request){.at = at, .tokens = c->prompt};
		if (c->spread > 0)
			r->tokens = c->prompt * exp(c->spread * play_normal(&random) -
						    c->spread * c->spread / 2);
		r->tokens = fmin(fmax(r->tokens, 16), 40 * c->prompt);
		r->work = r->tokens * exp(c->doubt * play_normal(&random));
		r->router = (uint8_t)(play_random(&random) % c->routers);
	}
	play->waits = calloc(play->count + 1, sizeof(double));
	play->ttfts = calloc(play->count + 1, sizeof(double));
	assert(play->waits && play->ttfts);
}

/* ---- events ---- */

static void event_add(struct play *play, struct event event)
{
	size_t i = play->event_count++;

	if (play->event_count > play->event_room) {
		play->event_room = play->event_room ? 2 * play->event_room : 1024;
		play->events =
			realloc(play->events, play->event_room * sizeof(*play->events));
		assert(play->events);
	}
	while (i && play->events[(i - 1) / 2].at > event.at) {
		play->events[i] = play->events[(i - 1) / 2];
		i = (i - 1) / 2;
	}
	play->events[i] = event;
}

static struct event event_take(struct play *play)
{
	struct event first = play->events[0];
	struct event last = play->events[--play->event_count];
	size_t i = 0;

	for (;;) {
		size_t child = 2 * i + 1;

		if (child >= play->event_count)
			break;
		if (child + 1 < play->event_count &&
		    play->events[child + 1].at < play->events[child].at)
			child++;
		if (play->events[child].at >= last.at)
			break;
		play->events[i] = play->events[child];
		i = child;
	}
	play->events[i] = last;
	return first;
}

static uint64_t ns_of(double at)
{
	return (uint64_t)(at * NS);
}

/* What a worker says of itself. */
static struct kvd_pick_load worker_load(struct play *play, unsigned int i, double at)
{
	struct worker *worker = &play->workers[i];
	double left = fmax(0, worker->free_at - at) * worker->speed;
	double done = worker->assigned - left;
	struct kvd_pick_load load;

	kvd_pick_load_unknown(&load);
	if (play->c->liar == (int)i)
		load = play->c->lie;
	else {
		load.prompt_tokens_waiting = left;
		if (at > worker->told_at)
			load.prompt_tokens_s =
				(done - worker->told_done) / (at - worker->told_at);
	}
	worker->told_done = done;
	worker->told_at = at;
	load.seq = ++worker->seq;
	return load;
}

static void event_play(struct play *play, const struct event *e)
{
	const struct sim_case *c = play->c;
	struct event more = *e;

	switch (e->kind) {
	case EVENT_ANSWER:
		if (c->no_results)
			break;
		kvd_pick_settle(play->pickers[e->router], e->id, e->value,
				e->value < 0 ? KVD_PICK_FAILED_PREFILL : 0, ns_of(e->at));
		kvd_pick_release(play->pickers[e->router], e->id, ns_of(e->at));
		break;
	case EVENT_SAMPLE:
		if (play->workers[e->worker].dead)
			break;
		more.load = worker_load(play, (unsigned int)e->worker, e->at);
		more.kind = EVENT_LOAD;
		more.sampled = e->at;
		more.at = e->at + c->delay;
		event_add(play, more);
		more = *e;
		more.at = e->at + c->period;
		event_add(play, more);
		break;
	case EVENT_LOAD:
	case EVENT_GONE:
		if (e->kind == EVENT_GONE)
			play->workers[e->worker].gone = true;
		for (unsigned int i = 0; i < c->routers; i++)
			kvd_picker_set(play->pickers[i], KVD_PICK_PREFILL,
				       play->workers[e->worker].name,
				       e->kind == EVENT_GONE ? KVD_PICK_GONE
							     : KVD_PICK_SERVING,
				       e->kind == EVENT_GONE ? NULL : &e->load,
				       ns_of(e->sampled), ns_of(e->at));
		break;
	}
}

/* ---- policies ---- */

static unsigned int choose_oracle(struct play *play, const struct request *r)
{
	double least = INFINITY;
	unsigned int best = 0, ties = 0;

	for (unsigned int i = 0; i < play->c->workers; i++) {
		double left = fmax(0, play->workers[i].free_at - r->at) +
			      r->work / play->workers[i].speed;

		if (play->workers[i].dead)
			continue;
		if (left > least ||
		    (left == least && play_random(&play->random) % ++ties))
			continue;
		if (left < least)
			ties = 1;
		least = left;
		best = i;
	}
	return best;
}

static unsigned int choose_pick(struct play *play, const struct request *r,
				uint64_t *id_p)
{
	struct kvd_pick_args args = {.prompt_tokens = r->tokens, .only_prefill = true};
	struct kvd_pick_result result;
	int code = kvd_pick(play->pickers[r->router], &args, ns_of(r->at), &result);

	assert(code == 0);
	*id_p = result.id;
	return (unsigned int)strtoul(result.worker[KVD_PICK_PREFILL] + 1, NULL, 10);
}

static unsigned int choose(struct play *play, const struct request *r, uint64_t *id_p)
{
	switch (play->policy) {
	case SIM_ORACLE:
		return choose_oracle(play, r);
	case SIM_RANDOM:
		return (unsigned int)(play_random(&play->random) % play->c->workers);
	case SIM_ROUND_ROBIN:
		return play->next[r->router]++ % play->c->workers;
	case SIM_PICK:
		break;
	}
	return choose_pick(play, r, id_p);
}

static void request_play(struct play *play, const struct request *r)
{
	uint64_t id = 0;
	unsigned int i = choose(play, r, &id);
	struct worker *worker = &play->workers[i];
	struct event answer = {.kind = EVENT_ANSWER, .id = id, .router = r->router};
	double wait = fmax(0, worker->free_at - r->at);

	worker->requests++;
	if (worker->gone)
		play->result->to_gone++;
	if (worker->dead) {
		play->result->lost++;
		answer.at = r->at + 0.002;
		answer.value = -1;
		if (play->policy == SIM_PICK && play->c->answers_failures)
			event_add(play, answer);
		return;
	}
	worker->free_at = r->at + wait + r->work / worker->speed;
	worker->assigned += r->work;
	answer.at = worker->free_at;
	answer.value = worker->free_at - r->at;
	if (play->policy == SIM_PICK)
		event_add(play, answer);
	if (r->at < START_S + WARM * play->c->seconds)
		return;
	play->waits[play->counted] = wait;
	play->ttfts[play->counted++] = answer.value;
	play->result->wait_most = fmax(play->result->wait_most, wait);
}

/* ---- the run ---- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void summarise(double *values, size_t count, double *mean_p, double *p99_p)
{
	double sum = 0;

	for (size_t i = 0; i < count; i++)
		sum += values[i];
	qsort(values, count, sizeof(double), by_value);
	*mean_p = count ? sum / (double)count : 0;
	*p99_p = count ? values[(size_t)(0.99 * (double)count)] : 0;
}

static void play_start(struct play *play, uint64_t seed)
{
	const struct sim_case *c = play->c;

	for (unsigned int r = 0; r < c->routers; r++) {
		struct kvd_pick_options o = {.seed = seed * 1000 + r,
					     .results = !c->no_results,
					     .lag_s = 1e-6,
					     .sample = c->sample};

		int code = kvd_picker_new(&o, &play->pickers[r]);

		assert(code == 0);
		play->next[r] = (unsigned int)(play_random(&play->random) % c->workers);
	}
	for (unsigned int i = 0; i < c->workers; i++) {
		struct worker *worker = &play->workers[i];
		double phase = play_share(&play->random);

		snprintf(worker->name, sizeof(worker->name), "w%u", i);
		worker->speed = worker_speed(c, i);
		for (unsigned int r = 0; r < c->routers; r++)
			kvd_picker_set(play->pickers[r], KVD_PICK_PREFILL, worker->name,
				       KVD_PICK_SERVING, NULL, 0, ns_of(START_S / 2));
		event_add(play, (struct event){.at = START_S - c->period * phase,
					       .kind = EVENT_SAMPLE,
					       .worker = (int)i});
	}
}

void sim_play(const struct sim_case *c, enum sim_policy policy, uint64_t seed,
	      struct sim_result *result)
{
	struct play *play = calloc(1, sizeof(*play));
	bool dead = c->dies < 0;

	assert(play && c->workers <= SIM_WORKERS_MAX && c->routers <= SIM_ROUTERS_MAX);
	*result = (struct sim_result){.requests = 0};
	play->c = c;
	play->policy = policy;
	play->random = seed * 31 + 7;
	play->result = result;
	requests_make(play, seed);
	play_start(play, seed);
	for (size_t i = 0; i < play->count; i++) {
		const struct request *r = &play->requests[i];

		if (!dead && r->at >= c->dies_at) {
			struct worker *worker = &play->workers[c->dies];

			dead = worker->dead = true;
			event_add(play, (struct event){.at = c->dies_at + c->gone_after,
						       .kind = EVENT_GONE,
						       .worker = c->dies});
		}
		while (play->event_count && play->events[0].at <= r->at) {
			struct event event = event_take(play);

			if (policy == SIM_PICK)
				event_play(play, &event);
		}
		request_play(play, r);
	}
	result->requests = play->count;
	if (c->liar >= 0)
		result->share =
			(double)play->workers[c->liar].requests / (double)play->count;
	summarise(play->waits, play->counted, &result->wait_mean, &result->wait_p99);
	summarise(play->ttfts, play->counted, &result->ttft_mean, &result->ttft_p99);
	for (unsigned int r = 0; r < c->routers; r++)
		kvd_picker_free(play->pickers[r]);
	free(play->requests);
	free(play->waits);
	free(play->ttfts);
	free(play->events);
	free(play);
}
