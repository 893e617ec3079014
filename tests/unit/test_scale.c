/* SPDX-License-Identifier: Apache-2.0 */
/* How many workers are wanted: steps, dwell times, limits, and what cannot be told. */
#include "lib/kvd_pick.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define SEC UINT64_C(1000000000)

static struct kvd_scale_state scale;
static struct kvd_scale_options options;
static struct kvd_scale_wanted wanted;
static uint64_t now;

static int setup(void **state)
{
	(void)state;
	memset(&scale, 0, sizeof(scale));
	memset(&options, 0, sizeof(options));
	now = 5 * SEC;
	return 0;
}

/* Prompt tokens served and waiting, of workers of 10 000 a second; decode has half its KV
 * in use on each of four. */
static struct kvd_scale_sample sample_of(double served, double waiting)
{
	return (struct kvd_scale_sample){
		.side = {{.workers = 4,
			  .speed = 10000,
			  .served = served,
			  .waiting = waiting},
			 {.workers = 4, .speed = 100000, .served = 200000}}};
}

static unsigned int step(double served, double waiting)
{
	struct kvd_scale_sample sample = sample_of(served, waiting);

	now += 10 * SEC;
	assert_int_equal(kvd_scale_step(&scale, &options, &sample, now, &wanted), 0);
	return wanted.workers[KVD_PICK_PREFILL];
}

static unsigned int steps(unsigned int count, double served, double waiting)
{
	unsigned int last = 0;

	while (count--)
		last = step(served, waiting);
	return last;
}

static void first_step_wants_what_is_there_or_needed(void **state)
{
	(void)state;
	assert_int_equal(step(1000, 0), 4); /* less is not believed before down_s */
	assert_true(wanted.changed && wanted.known[0] && wanted.known[1]);
	assert_int_equal(wanted.workers[KVD_PICK_DECODE], 4);
	assert_true(fabs(wanted.need[KVD_PICK_DECODE] - 8 / 3.) < 1e-6);
	setup(NULL);
	assert_int_equal(step(56000, 0), 9); /* 56 / 7, and a band */
}

static void queue_asks_for_workers(void **state)
{
	(void)state;
	steps(10, 28000, 0);
	assert_int_equal(wanted.workers[0], 4);
	assert_true(steps(3, 28000, 6e6) >= 14); /* 100 s of work to do within 60 s */
}

static void step_up_dwells(void **state)
{
	unsigned int first, count = 0;

	(void)state;
	options.up_s = 100;
	first = step(60000, 0);
	for (unsigned int i = 0; i < 20; i++) {
		count += wanted.changed && i;
		step(60000 + 20000 * i, 0);
	}
	assert_true(wanted.workers[0] > first);
	assert_in_range(count, 1, 2); /* in 200 s */
}

static void step_down_waits_for_all_of_the_window(void **state)
{
	(void)state;
	assert_int_equal(steps(6, 70000, 0), 11);
	/* 900 s after the last of it, and not before */
	assert_int_equal(steps(85, 7000, 0), 11);
	assert_in_range(steps(60, 7000, 0), 2, 3);
}

/* Noise within the band moves nothing, in hours. */
static void noise_is_not_followed(void **state)
{
	uint64_t random = 3;
	unsigned int changes = 0;

	(void)state;
	for (unsigned int i = 0; i < 6 * 60 * 8; i++) {
		random = random * UINT64_C(6364136223846793005) + 1;
		step(50000 * (0.9 + 0.2 * (double)(random >> 40) / 0x1p24), 0);
		changes += i > 200 && wanted.changed;
	}
	assert_in_range(changes, 0, 2);
}

static void limits_hold(void **state)
{
	(void)state;
	options.min[0] = 2;
	options.max[0] = 6;
	assert_int_equal(steps(20, 1e6, 1e9), 6);
	assert_int_equal(steps(300, 0, 0), 2);
	options.max[0] = 1;
	options.min[0] = 1;
	assert_int_equal(step(1e6, 0), 1); /* changed limits hold at once */
}

static void what_is_not_known_keeps_what_is_wanted(void **state)
{
	static const double wrong[] = {0, -1, NAN, INFINITY, 1e300};

	(void)state;
	steps(20, 60000, 0);
	for (unsigned int i = 0; i < 5; i++) {
		struct kvd_scale_sample sample = sample_of(60000, 0);
		unsigned int before = wanted.workers[0];

		sample.side[0].speed = wrong[i];
		if (i) {
			sample.side[0].speed = 10000;
			sample.side[0].waiting = wrong[i];
			sample.side[1].served = wrong[i];
		}
		now += 2000 * SEC;
		assert_int_equal(kvd_scale_step(&scale, &options, &sample, now, &wanted),
				 0);
		assert_int_equal(wanted.workers[0], before);
		assert_false(wanted.known[0]);
	}
	assert_int_equal(steps(1, 60000, 0), wanted.workers[0]);
}

/* The same time again, or one from the past, is no step. */
static void time_that_stands_is_no_step(void **state)
{
	struct kvd_scale_sample sample = sample_of(1e6, 1e9);

	(void)state;
	steps(5, 28000, 0);
	assert_int_equal(kvd_scale_step(&scale, &options, &sample, now, &wanted), 0);
	assert_false(wanted.known[0]);
	assert_int_equal(wanted.workers[0], 4);
	assert_int_equal(kvd_scale_step(&scale, &options, &sample, SEC, &wanted), 0);
	assert_int_equal(wanted.workers[0], 4);
}

static void options_have_limits(void **state)
{
	struct kvd_scale_sample sample = sample_of(0, 0);
	struct kvd_scale_options o[] = {
		{.min = {3, 0}, .max = {2, 0}},
		{.prefill_busy = 1.1},
		{.decode_full = NAN},
		{.start_s = -1},
		{.down_s = INFINITY},
		{.max = {4097, 0}},
		{.wait_s = 1e9},
		{.band = 11},
		{.up_s = -0.5},
	};

	(void)state;
	for (unsigned int i = 0; i < sizeof(o) / sizeof(o[0]); i++)
		assert_int_equal(kvd_scale_step(&scale, &o[i], &sample, now, &wanted),
				 -KVD_E_INVAL);
}

/* ---- what loads say ---- */

static void loads_are_measured(void **state)
{
	struct kvd_scale_sample sample;
	struct kvd_picker *picker;
	struct kvd_pick_load load;

	(void)state;
	assert_int_equal(kvd_picker_new(NULL, &picker), 0);
	kvd_pick_load_unknown(&load);
	load.prompt_tokens_s = 10000;
	load.prompt_tokens_waiting = 5000;
	load.kv_total_tokens = 1000;
	load.kv_free_tokens = 400;
	load.running = 6;
	load.waiting = 1;
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		kvd_picker_set(picker, side, "a", KVD_PICK_SERVING, &load, now, now);
		kvd_picker_set(picker, side, "b", KVD_PICK_SERVING, NULL, now, now);
		kvd_picker_set(picker, side, "c", KVD_PICK_DRAINING, &load, now, now);
	}
	load.seq = 1; /* a lie: one of three, and far from the others */
	load.prompt_tokens_s = 1e12;
	load.prompt_tokens_waiting = 1e15;
	kvd_picker_set(picker, 0, "d", KVD_PICK_DRAINING, &load, now, now);
	kvd_scale_measure(picker, now, &sample);
	assert_int_equal(sample.side[0].workers, 2);
	assert_float_equal(sample.side[0].speed, 10000, 1);
	assert_true(sample.side[0].served <= 2 * (20000 + 80000));
	assert_true(sample.side[0].waiting <= 600. * 80000 + 10000);
	assert_int_equal(sample.side[1].workers, 2);
	assert_float_equal(sample.side[1].speed, 1000, 1e-6);
	assert_float_equal(sample.side[1].served, 2400, 1e-6); /* b is as the others */
	assert_float_equal(sample.side[1].waiting, 200, 1e-6); /* two, of 100 each */
	now += 60 * SEC;
	kvd_scale_measure(picker, now, &sample);
	assert_float_equal(sample.side[0].speed, 0, 0); /* nothing is known any more */
	kvd_picker_free(picker);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(first_step_wants_what_is_there_or_needed, setup),
		cmocka_unit_test_setup(queue_asks_for_workers, setup),
		cmocka_unit_test_setup(step_up_dwells, setup),
		cmocka_unit_test_setup(step_down_waits_for_all_of_the_window, setup),
		cmocka_unit_test_setup(noise_is_not_followed, setup),
		cmocka_unit_test_setup(limits_hold, setup),
		cmocka_unit_test_setup(what_is_not_known_keeps_what_is_wanted, setup),
		cmocka_unit_test_setup(time_that_stands_is_no_step, setup),
		cmocka_unit_test_setup(options_have_limits, setup),
		cmocka_unit_test_setup(loads_are_measured, setup),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
