/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A picker: who may be picked, what reservations and results do, what liars cannot. How
 * good picks are is judged by tests/pick.
 */
#include "lib/kvd_pick.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

#define SEC UINT64_C(1000000000)

static struct kvd_picker *picker;
static uint64_t now;

static int setup(void **state)
{
	struct kvd_pick_options o = {.seed = 7, .results = true};

	(void)state;
	now = 100 * SEC;
	return kvd_picker_new(&o, &picker);
}

static int teardown(void **state)
{
	(void)state;
	kvd_picker_free(picker);
	return 0;
}

static int no_results(void **state)
{
	struct kvd_pick_options o = {.seed = 7};

	(void)state;
	now = 100 * SEC;
	return kvd_picker_new(&o, &picker);
}

static uint64_t random_state = 1;

static unsigned int below(unsigned int limit)
{
	random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407;
	return (unsigned int)(random_state >> 33) % limit;
}

static const char *name_of(unsigned int i)
{
	static char names[4][KVD_PICK_NAME_MAX];
	static unsigned int at;

	at = (at + 1) % 4;
	snprintf(names[at], sizeof(names[at]), "w%u", i);
	return names[at];
}

static unsigned int number_of(const struct kvd_pick_result *r, enum kvd_pick_side side)
{
	assert_int_equal(r->worker[side][0], 'w');
	return (unsigned int)strtoul(r->worker[side] + 1, NULL, 10);
}

static void set(enum kvd_pick_side side, unsigned int i, enum kvd_pick_state state,
		const struct kvd_pick_load *load)
{
	assert_int_equal(kvd_picker_set(picker, side, name_of(i), state, load, now, now),
			 0);
}

static void serve(unsigned int count)
{
	for (unsigned int i = 0; i < count; i++) {
		set(KVD_PICK_PREFILL, i, KVD_PICK_SERVING, NULL);
		set(KVD_PICK_DECODE, i, KVD_PICK_SERVING, NULL);
	}
}

/* A load of this many prompt tokens, at a speed of 10 000. */
static struct kvd_pick_load waiting(double tokens)
{
	static uint64_t seq;
	struct kvd_pick_load load;

	kvd_pick_load_unknown(&load);
	load.seq = ++seq;
	load.prompt_tokens_waiting = tokens;
	load.prompt_tokens_s = 10000;
	return load;
}

/* That it has so much to do, and had nothing. */
static struct kvd_pick_load unserved(double tokens)
{
	struct kvd_pick_load load = waiting(tokens);

	load.prompt_tokens_s = 0;
	return load;
}

/* A prefill worker of that speed, which has nothing to do, nor had. */
static void idle(unsigned int i)
{
	struct kvd_pick_load load = waiting(0);

	set(KVD_PICK_PREFILL, i, KVD_PICK_SERVING, &load);
	now += 600 * SEC;
	load = unserved(0);
	set(KVD_PICK_PREFILL, i, KVD_PICK_SERVING, &load);
}

static struct kvd_pick_result pick(double tokens)
{
	struct kvd_pick_args args = {.prompt_tokens = tokens};
	struct kvd_pick_result r;

	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	return r;
}

/* ---- who may be picked ---- */

#define MANY 100u

static double hostile_number(void)
{
	static const double values[] = {0,   1,	  1e5,	    1e15,      1e300, -1,
					-0., NAN, INFINITY, -INFINITY, 5e-324};

	return values[below(sizeof(values) / sizeof(values[0]))];
}

static struct kvd_pick_load hostile_load(void)
{
	return (struct kvd_pick_load){
		below(4),	  hostile_number(), hostile_number(), hostile_number(),
		hostile_number(), hostile_number(), hostile_number(), hostile_number(),
		hostile_number(), hostile_number(), hostile_number(), hostile_number(),
		hostile_number()};
}

struct model {
	enum kvd_pick_state state[KVD_PICK_SIDES][MANY];
	uint64_t ids[64];
};

static void model_pick(struct model *m, unsigned int members)
{
	char avoided[KVD_PICK_NAME_MAX], nearest[KVD_PICK_NAME_MAX];
	const char *avoid[1] = {avoided};
	struct kvd_pick_near near = {nearest, below(5000)};
	struct kvd_pick_args args = {.prompt_tokens = below(20000),
				     .bytes = below(1 << 30),
				     .output_tokens = below(1000),
				     .near = &near,
				     .near_count = below(2),
				     .avoid = avoid,
				     .avoid_count = below(2)};
	struct kvd_pick_result r;
	int code;

	strcpy(avoided, name_of(below(members)));
	strcpy(nearest, name_of(below(members)));
	code = kvd_pick(picker, &args, now, &r);
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		bool some = false;

		for (unsigned int i = 0; i < members; i++)
			some |= m->state[side][i] == KVD_PICK_SERVING &&
				!(args.avoid_count && !strcmp(avoid[0], name_of(i)));
		assert_int_equal(some, r.worker[side][0] != 0);
		if (!some) {
			assert_int_equal(code, -KVD_E_NOTFOUND);
			continue;
		}
		assert_int_equal(m->state[side][number_of(&r, side)], KVD_PICK_SERVING);
		assert_false(args.avoid_count && !strcmp(avoid[0], r.worker[side]));
		assert_true(isfinite(r.score[side].total_s) &&
			    r.score[side].total_s >= 0);
	}
	if (!code)
		m->ids[below(64)] = r.id;
}

/* Against a model of states, with loads that no worker can have. */
static void picked_is_who_serves(void **state)
{
	struct model m = {.state = {{0}}};

	(void)state;
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++)
		for (unsigned int i = 0; i < MANY; i++)
			m.state[side][i] = KVD_PICK_GONE;
	for (unsigned int step = 0; step < 40000; step++) {
		/* few members, then so many that they are drawn */
		unsigned int members = step < 20000 ? 5 : MANY;
		unsigned int side = below(2), i = below(members);
		struct kvd_pick_load load = hostile_load();

		now += below(50) * (SEC / 1000);
		switch (below(step < 20000 ? 5 : 12)) {
		case 0:
			m.state[side][i] = (enum kvd_pick_state)below(3);
			set(side, i, m.state[side][i], below(2) ? &load : NULL);
			break;
		case 1:
			kvd_pick_settle(picker, m.ids[below(64)], hostile_number(),
					below(4), now);
			break;
		case 2:
			kvd_pick_release(picker, m.ids[below(64)], now - below(2) * SEC);
			break;
		default:
			model_pick(&m, members);
		}
	}
}

static void names_and_amounts_have_limits(void **state)
{
	struct kvd_pick_args args = {.prompt_tokens = -1};
	struct kvd_pick_near near = {"w0", NAN};
	struct kvd_pick_options o = {.stale_s = NAN};
	struct kvd_picker *none;
	struct kvd_pick_result r;
	char name[KVD_PICK_NAME_MAX + 1];

	(void)state;
	memset(name, 'x', sizeof(name));
	name[KVD_PICK_NAME_MAX] = 0;
	assert_int_equal(kvd_picker_set(picker, KVD_PICK_PREFILL, name, KVD_PICK_SERVING,
					NULL, 0, now),
			 -KVD_E_INVAL);
	name[KVD_PICK_NAME_MAX - 1] = 0;
	assert_int_equal(kvd_picker_set(picker, KVD_PICK_PREFILL, name, KVD_PICK_SERVING,
					NULL, 0, now),
			 0);
	assert_int_equal(kvd_picker_set(picker, KVD_PICK_PREFILL, "", KVD_PICK_SERVING,
					NULL, 0, now),
			 -KVD_E_INVAL);
	assert_int_equal(kvd_picker_set(picker, (enum kvd_pick_side)2, "a",
					KVD_PICK_SERVING, NULL, 0, now),
			 -KVD_E_INVAL);
	assert_int_equal(kvd_pick(picker, &args, now, &r), -KVD_E_INVAL);
	args.prompt_tokens = INFINITY;
	assert_int_equal(kvd_pick(picker, &args, now, &r), -KVD_E_INVAL);
	args = (struct kvd_pick_args){.near = &near, .near_count = 1};
	assert_int_equal(kvd_pick(picker, &args, now, &r), -KVD_E_INVAL);
	assert_int_equal(kvd_picker_new(&o, &none), -KVD_E_INVAL);
	assert_null(none);
}

static void groups_have_a_limit(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < KVD_PICK_WORKERS_MAX; i++)
		set(KVD_PICK_PREFILL, i, KVD_PICK_SERVING, NULL);
	assert_int_equal(kvd_picker_set(picker, KVD_PICK_PREFILL, "more",
					KVD_PICK_SERVING, NULL, 0, now),
			 -KVD_E_LIMIT);
	for (unsigned int i = 0; i < KVD_PICK_WORKERS_MAX; i += 2)
		set(KVD_PICK_PREFILL, i, KVD_PICK_GONE, NULL);
	for (unsigned int i = 0; i < KVD_PICK_WORKERS_MAX; i++)
		set(KVD_PICK_PREFILL, i, KVD_PICK_DRAINING, NULL);
	assert_int_equal(kvd_picker_count(picker, KVD_PICK_PREFILL, NULL), 0);
}

/* ---- reservations ---- */

static void reservation_counts_at_once(void **state)
{
	unsigned int had[4] = {0};

	(void)state;
	serve(4);
	for (unsigned int i = 0; i < 40; i++) {
		struct kvd_pick_result r = pick(1000);

		had[number_of(&r, KVD_PICK_PREFILL)]++;
	}
	for (unsigned int i = 0; i < 4; i++)
		assert_int_equal(had[i], 10);
}

static double queue_of(unsigned int i)
{
	struct kvd_pick_args args = {.prompt_tokens = 1};
	struct kvd_pick_score score;
	enum kvd_pick_state is;
	char name[KVD_PICK_NAME_MAX];
	size_t all;

	kvd_picker_count(picker, KVD_PICK_PREFILL, &all);
	for (size_t k = 0; k < all; k++) {
		assert_int_equal(kvd_picker_score(picker, KVD_PICK_PREFILL, k, &args, now,
						  name, &is, &score),
				 0);
		if (strcmp(name, name_of(i)) == 0)
			return score.queue_s;
	}
	fail();
	return 0;
}

/* A load that was sampled before the pick, or that is not new, shows nothing of it. */
static void load_shows_what_was_picked_before_it(void **state)
{
	struct kvd_pick_load load;

	(void)state;
	idle(0);
	set(KVD_PICK_DECODE, 0, KVD_PICK_SERVING, NULL);
	now += SEC;
	pick(5000);
	assert_float_equal(queue_of(0), 0.5, 1e-6);
	load = unserved(0); /* as of a moment before the pick */
	assert_int_equal(kvd_picker_set(picker, KVD_PICK_PREFILL, "w0", KVD_PICK_SERVING,
					&load, now - SEC / 100, now),
			 0);
	assert_float_equal(queue_of(0), 0.5, 1e-6);
	load = unserved(9000); /* older than what is known: not taken */
	assert_int_equal(kvd_picker_set(picker, KVD_PICK_PREFILL, "w0", KVD_PICK_SERVING,
					&load, now - SEC / 2, now),
			 0);
	assert_float_equal(queue_of(0), 0.5, 1e-6);
	now += SEC / 2; /* it has had the time, too */
	load = unserved(0);
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &load);
	assert_float_equal(queue_of(0), 0, 1e-6);
}

/* Nobody tells outcomes, and no load comes: it counts for some seconds. */
static void reservation_ends_by_itself(void **state)
{
	struct kvd_pick_load load = waiting(0);
	struct kvd_pick_args args = {.prompt_tokens = 50000, .bytes = 1000000000};
	struct kvd_pick_result r;

	(void)state;
	idle(0);
	load = unserved(0);
	load.gbps = 1;
	load.kv_total_tokens = load.kv_free_tokens = 60000;
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &load);
	set(KVD_PICK_DECODE, 0, KVD_PICK_SERVING, &load);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_true(r.score[KVD_PICK_DECODE].last_resort);
	assert_float_equal(r.score[KVD_PICK_DECODE].transfer_s, 2, 1e-6);
	now += 6 * SEC;
	load.seq++;
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &load);
	set(KVD_PICK_DECODE, 0, KVD_PICK_SERVING, &load);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_false(r.score[KVD_PICK_DECODE].last_resort);
	assert_float_equal(r.score[KVD_PICK_DECODE].transfer_s, 1, 1e-6);
	assert_float_equal(r.score[KVD_PICK_PREFILL].queue_s, 0, 1e-6);
}

/* What was picked and has not answered is there, whatever the worker says. */
static void unanswered_requests_outweigh_a_load(void **state)
{
	struct kvd_pick_load load;
	struct kvd_pick_result r;

	(void)state;
	idle(0);
	set(KVD_PICK_DECODE, 0, KVD_PICK_SERVING, NULL);
	pick(10000);
	r = pick(10000);
	now += SEC / 2;
	load = unserved(0);
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &load);
	assert_float_equal(queue_of(0), 1.5, 1e-6);
	now += SEC / 2;
	kvd_pick_settle(picker, r.id, 1, 0, now); /* the later one: so is the first */
	assert_float_equal(queue_of(0), 0, 1e-6);
	kvd_pick_settle(picker, r.id, 1, 0, now);
	kvd_pick_release(picker, r.id, now);
	kvd_pick_release(picker, r.id, now);
	kvd_pick_release(picker, UINT64_MAX, now);
}

static void reservations_have_a_limit(void **state)
{
	struct kvd_pick_args args = {.prompt_tokens = 1};
	struct kvd_pick_result r;
	unsigned int count = 0;
	int code;

	(void)state;
	serve(1);
	while ((code = kvd_pick(picker, &args, now, &r)) == 0)
		count++;
	assert_int_equal(code, -KVD_E_LIMIT);
	assert_int_equal(count, KVD_PICK_HELD_MAX);
	now += 121 * SEC; /* nobody told of them: they are forgotten */
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
}

/* An id names its reservation only, not who has its place later. */
static void ids_are_used_once(void **state)
{
	struct kvd_pick_result a, b;

	(void)state;
	serve(1);
	a = pick(10000);
	kvd_pick_release(picker, a.id, now);
	b = pick(10000);
	assert_true(a.id != b.id);
	kvd_pick_release(picker, a.id, now);
	assert_true(queue_of(0) > 0.5);
	/* the worker goes and comes again: what it had is not the new one's */
	set(KVD_PICK_PREFILL, 0, KVD_PICK_GONE, NULL);
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, NULL);
	assert_float_equal(queue_of(0), 0, 1e-9);
	kvd_pick_settle(picker, b.id, 0.1, 0, now);
}

/* ---- the score ---- */

static void ties_are_drawn(void **state)
{
	unsigned int had[8] = {0};

	(void)state;
	serve(8);
	for (unsigned int i = 0; i < 8000; i++) {
		struct kvd_pick_result r = pick(1000);

		had[number_of(&r, KVD_PICK_DECODE)]++;
		kvd_pick_release(picker, r.id, now);
		now += SEC;
	}
	for (unsigned int i = 0; i < 8; i++)
		assert_in_range(had[i], 850, 1150);
}

static void seed_decides_ties(void **state)
{
	char first[2][64];

	(void)state;
	for (unsigned int run = 0; run < 2; run++) {
		struct kvd_pick_options o = {.seed = 99};

		kvd_picker_free(picker);
		assert_int_equal(kvd_picker_new(&o, &picker), 0);
		serve(8);
		for (unsigned int i = 0; i < 63; i++) {
			struct kvd_pick_result r = pick(10);

			first[run][i] = r.worker[0][1];
			now += SEC;
		}
		first[run][63] = 0;
	}
	assert_string_equal(first[0], first[1]);
}

static void least_work_by_speed_is_picked(void **state)
{
	struct kvd_pick_load slow = waiting(1000), fast = waiting(3000);
	struct kvd_pick_result r;

	(void)state;
	slow.prompt_tokens_s = 5000;
	fast.prompt_tokens_s = 40000;
	serve(2);
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &slow);
	set(KVD_PICK_PREFILL, 1, KVD_PICK_SERVING, &fast);
	r = pick(4000);
	assert_string_equal(r.worker[0], "w1");
	assert_float_equal(r.score[0].queue_s, 3000. / 40000, 1e-6);
	assert_float_equal(r.score[0].compute_s, 0.1, 1e-6);
}

static void prefix_is_not_computed_again(void **state)
{
	struct kvd_pick_load load = waiting(0), busy = waiting(9000);
	struct kvd_pick_near near = {"w1", 8000};
	struct kvd_pick_args args = {
		.prompt_tokens = 10000, .near = &near, .near_count = 1};
	struct kvd_pick_result r;

	(void)state;
	serve(2);
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &load);
	set(KVD_PICK_PREFILL, 1, KVD_PICK_SERVING, &load);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_string_equal(r.worker[0], "w1");
	assert_float_equal(r.score[0].compute_s, 0.2, 1e-6);
	/* but where it waits longer than it takes elsewhere */
	set(KVD_PICK_PREFILL, 1, KVD_PICK_SERVING, &busy);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_string_equal(r.worker[0], "w0");
}

static void decode_without_room_is_the_last_choice(void **state)
{
	struct kvd_pick_load full = waiting(0), slow = waiting(0);
	struct kvd_pick_args args = {
		.prompt_tokens = 8000, .output_tokens = 1000, .bytes = 1e9};
	struct kvd_pick_result r;

	(void)state;
	serve(2);
	full.kv_total_tokens = slow.kv_total_tokens = 100000;
	full.kv_free_tokens = 8500;
	full.gbps = slow.gbps = 10;
	slow.kv_free_tokens = 9500;
	slow.bytes_queued = 100e9; /* ten seconds */
	set(KVD_PICK_DECODE, 0, KVD_PICK_SERVING, &full);
	set(KVD_PICK_DECODE, 1, KVD_PICK_SERVING, &slow);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_string_equal(r.worker[1], "w1");
	assert_false(r.score[1].last_resort);
	/* its own reservation fills it */
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_true(r.score[1].last_resort);
}

static void failing_worker_is_tried_seldom(void **state)
{
	unsigned int had = 0;
	struct kvd_pick_result r;

	(void)state;
	serve(4);
	for (unsigned int i = 0; i < 600; i++) { /* a minute; it refuses at once */
		r = pick(1000);
		now += SEC / 10;
		had += number_of(&r, KVD_PICK_PREFILL) == 2;
		if (number_of(&r, KVD_PICK_PREFILL) == 2)
			kvd_pick_settle(picker, r.id, -1, KVD_PICK_FAILED_PREFILL, now);
		else
			kvd_pick_settle(picker, r.id, 0.1, 0, now);
		kvd_pick_release(picker, r.id, now);
	}
	assert_in_range(had, 1, 20);
	now += 300 * SEC; /* it is forgiven */
	for (unsigned int i = 0; i < 200; i++) {
		r = pick(1000);
		now += SEC / 10;
		had += number_of(&r, KVD_PICK_PREFILL) == 2;
		kvd_pick_settle(picker, r.id, 0.1, 0, now);
		kvd_pick_release(picker, r.id, now);
	}
	assert_true(had > 40);
}

static void silent_worker_is_expected_to_be_late(void **state)
{
	unsigned int had = 0;

	(void)state;
	serve(4);
	for (unsigned int i = 0; i < 600; i++) {
		struct kvd_pick_result r = pick(1000);

		now += SEC / 10;
		if (number_of(&r, KVD_PICK_PREFILL) == 1) {
			had++;
			continue; /* it never answers */
		}
		kvd_pick_settle(picker, r.id, 0.1, 0, now);
		kvd_pick_release(picker, r.id, now);
	}
	assert_in_range(had, 1, 8);
}

static void old_load_is_not_trusted(void **state)
{
	struct kvd_pick_load none = waiting(0), some = waiting(20000);
	struct kvd_pick_result r;

	(void)state;
	serve(3);
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &none);
	now += 10 * SEC;
	set(KVD_PICK_PREFILL, 1, KVD_PICK_SERVING, &some);
	set(KVD_PICK_PREFILL, 2, KVD_PICK_SERVING, &some);
	/* it said that it was idle, ten seconds ago: it counts as the others */
	assert_float_equal(queue_of(0), 2, 0.01);
	none.seq++;
	set(KVD_PICK_PREFILL, 0, KVD_PICK_SERVING, &none);
	r = pick(1000);
	assert_string_equal(r.worker[0], "w0");
	assert_true(r.score[0].fresh);
}

/* Where it is not slower than the others, a late answer says nothing of it; answers of
 * who has no part in its side say nothing, either. */
static void slow_group_has_no_overdue_worker(void **state)
{
	struct kvd_pick_args alone = {.prompt_tokens = 10, .only_decode = true};
	struct kvd_pick_result first, r;
	unsigned int had[2] = {0};
	uint64_t other = 0;

	(void)state;
	serve(2);
	first = pick(10);
	now += 10 * SEC;
	assert_int_equal(kvd_pick(picker, &alone, now, &r), 0);
	kvd_pick_settle(picker, r.id, 0.01, 0, now);
	kvd_pick_release(picker, r.id, now);
	for (unsigned int i = 0; i < 100; i++) {
		r = pick(1000);
		had[number_of(&r, KVD_PICK_PREFILL)]++;
		if (number_of(&r, KVD_PICK_PREFILL) !=
		    number_of(&first, KVD_PICK_PREFILL))
			other = r.id;
	}
	assert_in_range(had[0], 45, 55);
	kvd_pick_settle(picker, other, 0.1, 0, now);
	for (unsigned int i = 0; i < 20; i++) {
		r = pick(1000);
		assert_int_not_equal(number_of(&r, KVD_PICK_PREFILL),
				     number_of(&first, KVD_PICK_PREFILL));
	}
}

/* ---- bursts ---- */

#define BURST 300u

/* Small requests to equal workers that tell no loads. Times in microseconds. */
struct burst {
	const char *what;
	unsigned int first, pause_us; /* so many come before the others */
	unsigned int apart_us;	      /* between two requests */
	unsigned int base_us;	      /* of an answer */
	unsigned int each_us;	      /* of a worker's time, more or less */
	unsigned int tick_us;	      /* answers come together, so often */
};

struct burst_event {
	uint64_t at_ns, id;
	double ttft_s; /* negative: its end */
};

static struct burst_event burst_events[2 * BURST];
static unsigned int burst_count;

/* Answers and ends that have come by now, in their order. */
static void burst_answers(uint64_t until_ns)
{
	for (;;) {
		struct burst_event *next = NULL, e;

		for (unsigned int i = 0; i < burst_count; i++)
			if (!next || burst_events[i].at_ns < next->at_ns)
				next = &burst_events[i];
		if (!next || next->at_ns > until_ns)
			return;
		e = *next;
		*next = burst_events[--burst_count];
		now = e.at_ns;
		if (e.ttft_s < 0)
			kvd_pick_release(picker, e.id, now);
		else
			kvd_pick_settle(picker, e.id, e.ttft_s, 0, now);
	}
}

static void burst_play(const struct burst *b, bool results,
		       unsigned int had[KVD_PICK_SIDES][3])
{
	uint64_t begin = now, free_ns[3] = {0}, tick = b->tick_us * UINT64_C(1000);

	burst_count = 0;
	memset(had, 0, sizeof(unsigned int) * KVD_PICK_SIDES * 3);
	for (unsigned int i = 0; i < BURST; i++) {
		uint64_t at = begin + i * (uint64_t)b->apart_us * 1000, *free_p;
		struct kvd_pick_result r;

		at += i >= b->first ? b->pause_us * UINT64_C(1000) : 0;
		burst_answers(at);
		now = at;
		r = pick(10 + below(40));
		had[0][number_of(&r, KVD_PICK_PREFILL)]++;
		had[1][number_of(&r, KVD_PICK_DECODE)]++;
		if (!results)
			continue;
		free_p = &free_ns[number_of(&r, KVD_PICK_PREFILL)];
		*free_p = *free_p > at ? *free_p : at;
		*free_p += b->each_us * (UINT64_C(500) + below(1000));
		at = *free_p + b->base_us * (UINT64_C(800) + below(400));
		at = tick ? (at / tick + 1) * tick : at;
		burst_events[burst_count++] =
			(struct burst_event){at, r.id, (double)(at - now) * 1e-9};
		burst_events[burst_count++] = (struct burst_event){
			at + (10 + below(200)) * (SEC / 1000), r.id, -1};
	}
	burst_answers(UINT64_MAX);
	now += 60 * SEC;
}

static void bursts_are_shared(bool results)
{
	static const struct burst bursts[] = {
		{"at once", 0, 0, 0, 300000, 1000, 0},
		{"some before the others", 3, 500000, 1000, 2000000, 1000, 0},
		{"two before the others", 2, 500000, 1000, 2000000, 1000, 0},
		{"idle workers", 0, 0, 3000, 20000, 3000, 0},
		{"slow answers", 0, 0, 2000, 300000, 1000, 0},
		{"more than they can", 0, 0, 1000, 20000, 10000, 0},
		{"answers together", 0, 0, 2000, 20000, 1000, 250000},
		{"seldom", 0, 0, 2000, 20000, 1000, 700000},
		{"and a pause", 3, 2000000, 1000, 20000, 1000, 0},
		{"long after the first", 3, 300000, 1000, 400000, 5000, 0},
	};
	bool bad = false;

	for (unsigned int i = 0; i < sizeof(bursts) / sizeof(bursts[0]); i++) {
		for (unsigned int run = 0; run < 10; run++) {
			struct kvd_pick_options o = {.seed = run, .results = results};
			unsigned int had[KVD_PICK_SIDES][3];

			kvd_picker_free(picker);
			assert_int_equal(kvd_picker_new(&o, &picker), 0);
			serve(3);
			for (unsigned int again = 0; again < 3; again++) {
				burst_play(&bursts[i], results, had);
				for (unsigned int k = 0; k < 6; k++) {
					unsigned int n = had[k / 3][k % 3];

					if (n >= BURST / 5 && n <= BURST * 7 / 15)
						continue;
					print_error("%s, run %u.%u: %s w%u had %u\n",
						    bursts[i].what, run, again,
						    k < 3 ? "prefill" : "decode", k % 3,
						    n);
					bad = true;
				}
			}
		}
	}
	assert_false(bad);
}

static void burst_is_shared_by_results(void **state)
{
	(void)state;
	bursts_are_shared(true);
}

static void burst_is_shared_without_results(void **state)
{
	(void)state;
	bursts_are_shared(false);
}

/* ---- many workers ---- */

static void draws_follow_speed(void **state)
{
	unsigned int fast = 0;

	(void)state;
	for (unsigned int i = 0; i < 1000; i++) {
		struct kvd_pick_load load = waiting(0);

		load.prompt_tokens_s = i < 500 ? 10000 : 40000;
		set(KVD_PICK_PREFILL, i, KVD_PICK_SERVING, &load);
		set(KVD_PICK_DECODE, i, KVD_PICK_SERVING, NULL);
	}
	for (unsigned int i = 0; i < 4000; i++) {
		struct kvd_pick_result r = pick(1);

		fast += number_of(&r, KVD_PICK_PREFILL) >= 500;
		kvd_pick_release(picker, r.id, now);
	}
	assert_in_range(fast, 3000, 3900); /* of equal queues, both draws slow: 1 of 25 */
}

static void holder_is_looked_at_among_many(void **state)
{
	struct kvd_pick_near near = {"w777", 9000};
	struct kvd_pick_args args = {
		.prompt_tokens = 10000, .near = &near, .near_count = 1};
	struct kvd_pick_result r;

	(void)state;
	serve(1000);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_string_equal(r.worker[0], "w777");
	set(KVD_PICK_PREFILL, 777, KVD_PICK_DRAINING, NULL);
	assert_int_equal(kvd_pick(picker, &args, now, &r), 0);
	assert_string_not_equal(r.worker[0], "w777");
}

/* All but one have no room: draws find only bad ones, so all are looked at. */
static void only_good_one_of_many_is_found(void **state)
{
	struct kvd_pick_load full = waiting(0);
	struct kvd_pick_result r;

	(void)state;
	full.kv_total_tokens = 100000;
	full.kv_free_tokens = 0;
	for (unsigned int i = 0; i < 500; i++) {
		full.seq = i + 1;
		full.kv_free_tokens = i == 321 ? 90000 : 0;
		set(KVD_PICK_PREFILL, i, KVD_PICK_SERVING, NULL);
		set(KVD_PICK_DECODE, i, KVD_PICK_SERVING, &full);
	}
	r = pick(1000);
	assert_string_equal(r.worker[1], "w321");
}

/* ---- want of memory ---- */

static void allocation_failures_cost_a_call(void **state)
{
	static const char answer[] = "{\"ranks\":[{\"worker\":\"a\",\"tp_size\":2},"
				     "{\"worker\":\"a\",\"tp_rank\":1,\"tp_size\":2}]}";
	struct kvd_pick_args args = {.prompt_tokens = 10};
	struct kvd_pick_result r;

	(void)state;
	for (uint64_t n = 1; n < 12; n++) {
		struct kvd_picker *p = NULL;
		int code;

		mem_fail_at(n);
		code = kvd_picker_new(NULL, &p);
		assert_true(code == 0 || (code == -KVD_E_NOMEM && !p));
		if (code)
			continue;
		for (unsigned int side = 0; side < 2; side++) {
			code = kvd_picker_feed(p, side, answer, strlen(answer), now);
			if (code) {
				assert_int_equal(code, -KVD_E_NOMEM);
				/* half a worker is not picked */
				assert_int_equal(kvd_picker_count(p, side, NULL), 0);
			}
		}
		code = kvd_pick(p, &args, now, &r);
		assert_true(code == 0 || code == -KVD_E_NOMEM || code == -KVD_E_NOTFOUND);
		mem_fail_at(0);
		for (unsigned int side = 0; side < 2; side++)
			assert_int_equal(
				kvd_picker_feed(p, side, answer, strlen(answer), now), 0);
		assert_int_equal(kvd_pick(p, &args, now, &r), 0);
		kvd_picker_free(p);
	}
	mem_fail_at(0);
}

int main(void)
{
#define WITH(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		WITH(picked_is_who_serves),
		WITH(names_and_amounts_have_limits),
		WITH(groups_have_a_limit),
		WITH(reservation_counts_at_once),
		cmocka_unit_test_setup_teardown(load_shows_what_was_picked_before_it,
						no_results, teardown),
		cmocka_unit_test_setup_teardown(reservation_ends_by_itself, no_results,
						teardown),
		WITH(unanswered_requests_outweigh_a_load),
		WITH(reservations_have_a_limit),
		WITH(ids_are_used_once),
		WITH(ties_are_drawn),
		WITH(seed_decides_ties),
		WITH(least_work_by_speed_is_picked),
		WITH(prefix_is_not_computed_again),
		WITH(decode_without_room_is_the_last_choice),
		WITH(failing_worker_is_tried_seldom),
		WITH(silent_worker_is_expected_to_be_late),
		WITH(old_load_is_not_trusted),
		WITH(slow_group_has_no_overdue_worker),
		WITH(burst_is_shared_by_results),
		WITH(burst_is_shared_without_results),
		WITH(draws_follow_speed),
		WITH(holder_is_looked_at_among_many),
		WITH(only_good_one_of_many_is_found),
		WITH(allocation_failures_cost_a_call),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
