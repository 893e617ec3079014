/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack: the slices that ucx makes of a plan.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/plan/pack.h"

#define LONG PACK_DIRECT_MIN
#define APART(n, bytes)                                                              \
	{                                                                            \
		.src = 1 << 30, .len = (bytes), .count = (n), .src_stride = 1 << 20, \
		.dst_stride = 1 << 20                                                \
	}

struct slice {
	uint64_t length;
	bool in_place;
};

static struct plan *built(const struct plan_run *runs, size_t count)
{
	struct plan_builder *builder;
	struct plan *plan;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (size_t i = 0; i < count; i++)
		assert_int_equal(plan_builder_add(builder, &runs[i]), 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

/* Its slices, one after the other, until `wants` says no more. */
static void assert_slices(struct plan *plan, uint64_t most, unsigned int rows_max,
			  const struct slice *wants)
{
	uint64_t at = 0, length;

	for (; wants->length; wants++, at += length) {
		uint64_t left = plan->bytes - at;
		bool in_place = pack_slice(plan, at, left < most ? left : most, rows_max,
					   &length);

		assert_int_equal(length, wants->length);
		assert_int_equal(in_place, wants->in_place);
		/* what it says is so */
		assert_true(!in_place ||
			    pack_few_rows(plan, true, at, at + length, rows_max));
	}
	assert_int_equal(at, plan->bytes);
	plan_free(plan);
}

static void slice_takes_as_many_long_rows_as_it_may(void **state)
{
	const struct plan_run five = APART(5, LONG);

	(void)state;
	assert_slices(built(&five, 1), 8 * LONG, 1,
		      (struct slice[]){{LONG, true},
				       {LONG, true},
				       {LONG, true},
				       {LONG, true},
				       {LONG, true},
				       {0}});
	assert_slices(
		built(&five, 1), 8 * LONG, 2,
		(struct slice[]){{2 * LONG, true}, {2 * LONG, true}, {LONG, true}, {0}});
	assert_slices(built(&five, 1), 8 * LONG, 32,
		      (struct slice[]){{5 * LONG, true}, {0}});
}

/* What is left of one that is cut could be short, and would be packed. */
static void slice_takes_whole_rows_behind_the_first(void **state)
{
	const struct plan_run three = APART(3, 3 * LONG);

	(void)state;
	assert_slices(built(&three, 1), 5 * LONG, 32,
		      (struct slice[]){
			      {3 * LONG, true}, {3 * LONG, true}, {3 * LONG, true}, {0}});
	assert_slices(built(&three, 1), 2 * LONG, 32, /* a row is longer than a slice */
		      (struct slice[]){{2 * LONG, true},
				       {LONG, true},
				       {2 * LONG, true},
				       {LONG, true},
				       {2 * LONG, true},
				       {LONG, true},
				       {0}});
}

static void slice_of_short_rows_ends_at_a_long_one(void **state)
{
	const struct plan_run mixed[] = {
		APART(6, 512),
		{.src = 5, .dst = 5, .len = LONG, .count = 1},
		{.src = 3 * LONG, .dst = 9 * LONG, .len = LONG, .count = 1},
		{.src = 2 * LONG + 7, .dst = 1, .len = 512, .count = 1},
	};

	(void)state;
	assert_slices(
		built(mixed, ARRAY_LEN(mixed)), 8 * LONG, 32,
		(struct slice[]){{6 * 512, false}, {2 * LONG, true}, {512, true}, {0}});
	assert_slices(built(mixed, 1), 1024, 32, /* full before */
		      (struct slice[]){{1024, false}, {1024, false}, {1024, false}, {0}});
}

/* Apart where they go, together where they come from. */
static void neighbours_count_as_one_row(void **state)
{
	const struct plan_run together[] = {
		{.len = LONG, .count = 4, .src_stride = LONG, .dst_stride = 1 << 20},
		{.src = 4 * LONG, .len = 512, .dst = 8 << 20, .count = 1},
		{.src = 4 * LONG + 512, .len = 512, .dst = 9 << 20, .count = 1},
	};

	(void)state;
	assert_slices(built(together, ARRAY_LEN(together)), 16 * LONG, 1,
		      (struct slice[]){{4 * LONG, true}, {1024, true}, {0}});
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(slice_takes_as_many_long_rows_as_it_may),
		cmocka_unit_test(slice_takes_whole_rows_behind_the_first),
		cmocka_unit_test(slice_of_short_rows_ends_at_a_long_one),
		cmocka_unit_test(neighbours_count_as_one_row),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
