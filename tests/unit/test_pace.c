/* SPDX-License-Identifier: Apache-2.0 */
/* When a pull is late, and how many may be hedged. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdlib.h>

#include "daemon/cost/pace.h"

#define MS UINT64_C(1000000)
#define MIB (UINT64_C(1) << 20)

static void unknown_peer_has_a_second(void **state)
{
	struct pace pace = {.count = 0};

	(void)state;
	assert_int_equal(pace_late_ns(&pace, 1), 1000 * MS);
	for (unsigned int i = 0; i < 7; i++)
		pace_add(&pace, 64 * MIB, 64 * MS);
	assert_int_equal(pace_late_ns(&pace, 64 * MIB), 1000 * MS);
	pace_add(&pace, 64 * MIB, 64 * MS);
	assert_in_range(pace_late_ns(&pace, 64 * MIB), 192 * MS, 193 * MS);
}

/* What is slow from the beginning is not late by that. */
static void pace_of_unknown_peer_allows_more(void **state)
{
	struct pace pace = {.count = 0};

	(void)state;
	pace_add(&pace, 64 * MIB, 6400 * MS);
	assert_in_range(pace_late_ns(&pace, 64 * MIB), 19200 * MS, 19300 * MS);
}

static void pace_limit_scales_with_bytes_above_a_floor(void **state)
{
	struct pace pace = {.count = 0};

	(void)state;
	for (unsigned int i = 0; i < 64; i++)
		pace_add(&pace, 64 * MIB, 64 * MS);
	assert_in_range(pace_late_ns(&pace, 32 * MIB), 96 * MS, 97 * MS);
	assert_int_equal(pace_late_ns(&pace, 4 * MIB), 20 * MS);
	assert_int_equal(pace_late_ns(&pace, 0), 20 * MS);
}

/* A round trip is not the time of a large pull's part. */
static void pace_of_small_pulls_has_little_weight_for_large(void **state)
{
	struct pace pace = {.count = 0};

	(void)state;
	for (unsigned int i = 0; i < 64; i++)
		pace_add(&pace, 100, 2 * MS);
	assert_in_range(pace_late_ns(&pace, 64 * MIB), 96 * MS, 97 * MS);
}

static int falling(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x < y) - (x > y);
}

/* Against sorting, of every count and beyond the memory of it. */
static void pace_p95_is_of_recent_pulls(void **state)
{
	struct pace pace = {.count = 0};
	uint64_t seen[300];

	(void)state;
	srand(7);
	for (unsigned int n = 0; n < 300; n++) {
		uint64_t last[PACE_PULLS], count, ms = 10 + (uint64_t)(rand() % 1000);
		uint64_t late, p95;

		seen[n] = ms;
		pace_add(&pace, 4 * MIB, ms * MS);
		count = n + 1 < PACE_PULLS ? n + 1 : PACE_PULLS;
		for (unsigned int i = 0; i < count; i++)
			last[i] = seen[n - i];
		qsort(last, count, sizeof(*last), falling);
		p95 = last[count / 20];
		late = pace_late_ns(&pace, 4 * MIB);
		if (n < 7 && 3 * p95 < 1000)
			assert_int_equal(late, 1000 * MS);
		else
			assert_in_range(late, 3 * p95 * MS, (3 * p95 + 1) * MS);
	}
}

/* Three of 64 that stall change nothing, the fourth does. */
static void stalls_beyond_the_share_are_expected(void **state)
{
	struct pace pace = {.count = 0};

	(void)state;
	for (unsigned int i = 0; i < 60; i++)
		pace_add(&pace, 4 * MIB, 10 * MS);
	for (unsigned int i = 0; i < 3; i++)
		pace_add(&pace, 4 * MIB, 5000 * MS);
	assert_in_range(pace_late_ns(&pace, 4 * MIB), 30 * MS, 31 * MS);
	pace_add(&pace, 4 * MIB, 5000 * MS);
	assert_in_range(pace_late_ns(&pace, 4 * MIB), 15000 * MS, 15001 * MS);
}

static void times_without_an_end_do_not_wrap(void **state)
{
	struct pace pace = {.count = 0};

	(void)state;
	for (unsigned int i = 0; i < 64; i++)
		pace_add(&pace, 0, UINT64_MAX);
	assert_int_equal(pace_late_ns(&pace, 1), 3600 * 1000 * MS);
	assert_int_equal(pace_late_ns(&pace, UINT64_MAX), 3600 * 1000 * MS);
}

/* Eight at once take eight times as long, whichever ends first. */
static void pulls_sharing_a_link_are_not_late(void **state)
{
	struct pace pace = {.count = 0};
	uint64_t seen[8];

	(void)state;
	for (unsigned int i = 0; i < 8; i++) {
		seen[i] = pace_begin(&pace, 64 * MIB);
		assert_int_equal(seen[i], (i + 1) * 64 * MIB);
	}
	for (unsigned int i = 0; i < 8; i++)
		pace_add(&pace, seen[i], 512 * MS); /* 1 ms a MiB of all */
	assert_in_range(pace_late_ns(&pace, seen[0]), 3 * 512 * MS, 3 * 513 * MS);
	for (unsigned int i = 0; i < 8; i++)
		pace_end(&pace, 64 * MIB);
	assert_int_equal(pace.flying, 0);
	assert_in_range(pace_late_ns(&pace, 64 * MIB), 3 * 64 * MS, 3 * 65 * MS);
}

static void budget_is_a_burst_and_one_of_twenty(void **state)
{
	struct pace_budget budget = {.spent = 0};
	unsigned int hedges = 0;

	(void)state;
	pace_budget_earn(&budget); /* it is not more than whole */
	for (unsigned int i = 0; i < 100; i++)
		hedges += pace_budget_spend(&budget);
	assert_int_equal(hedges, 8);
	for (unsigned int i = 0; i < 10000; i++) {
		pace_budget_earn(&budget);
		hedges += pace_budget_spend(&budget);
	}
	assert_int_equal(hedges, 8 + 10000 / 20);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(unknown_peer_has_a_second),
		cmocka_unit_test(pace_of_unknown_peer_allows_more),
		cmocka_unit_test(pace_limit_scales_with_bytes_above_a_floor),
		cmocka_unit_test(pace_of_small_pulls_has_little_weight_for_large),
		cmocka_unit_test(pace_p95_is_of_recent_pulls),
		cmocka_unit_test(stalls_beyond_the_share_are_expected),
		cmocka_unit_test(times_without_an_end_do_not_wrap),
		cmocka_unit_test(pulls_sharing_a_link_are_not_late),
		cmocka_unit_test(budget_is_a_burst_and_one_of_twenty),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
