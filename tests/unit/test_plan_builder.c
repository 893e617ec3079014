/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The builder, which makes runs of appended rows, and the walk, which makes the stream of
 * bytes out of runs.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/plan.h"

static struct plan_run row(uint64_t src, uint64_t dst, uint64_t len)
{
	return (struct plan_run){.src = src, .dst = dst, .len = len, .count = 1};
}

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

static void rows_adjacent_merge_and_equal_strides_fold(void **state)
{
	const struct plan_run rows[] = {
		row(0, 100, 10), row(10, 110, 10), /* merge */
		row(40, 200, 8), row(50, 210, 8),
		row(60, 220, 8), row(70, 230, 8), /* fold */
	};
	struct plan *plan = built(rows, ARRAY_LEN(rows));

	(void)state;
	assert_int_equal(plan->run_count, 2);
	assert_int_equal(plan->rows, 5);
	assert_int_equal(plan->runs[0].len, 20);
	assert_int_equal(plan->runs[1].count, 4);
	assert_int_equal(plan->runs[1].src_stride, 10);
	assert_int_equal(plan->bytes, 52);
	assert_int_equal(plan->row_median, 8);
	plan_free(plan);
}

static void ends_have_last_byte_of_each_buffer(void **state)
{
	struct plan_run runs[] = {
		{.src = 500,
		 .dst = 0,
		 .len = 8,
		 .count = 3,
		 .src_stride = -100,
		 .dst_stride = 50,
		 .src_buffer = 2,
		 .dst_buffer = 1},
		{.src = 90,
		 .dst = 90,
		 .len = 9,
		 .count = 1,
		 .src_buffer = 0,
		 .dst_buffer = 1},
	};
	struct plan *plan = built(runs, ARRAY_LEN(runs));

	(void)state;
	assert_int_equal(plan->src_ends_count, 3);
	assert_int_equal(plan->src_ends[0], 99);
	assert_int_equal(plan->src_ends[1], 0);
	assert_int_equal(plan->src_ends[2], 508);
	assert_int_equal(plan->dst_ends_count, 2);
	assert_int_equal(plan->dst_ends[0], 0);
	assert_int_equal(plan->dst_ends[1], 108);
	plan_free(plan);
}

static void ends_beyond_table_are_left_out(void **state)
{
	struct plan_run rows[] = {row(0, 0, 8), row((UINT64_C(1) << 63) + 8, 100, 8)};
	struct plan *plan = built(rows, 2); /* one run, its stride is negative */

	(void)state;
	assert_null(plan->src_ends);
	assert_int_equal(plan->dst_ends_count, 0);
	plan_free(plan);
	rows[1].dst_buffer = PLAN_ENDS_MAX;
	plan = built(rows + 1, 1);
	assert_null(plan->src_ends);
	plan_free(plan);
}

static void rows_fold_late_when_the_stride_shows_late(void **state)
{
	const struct plan_run rows[] = {row(0, 0, 4), row(100, 50, 4), row(110, 60, 4),
					row(120, 70, 4)};
	struct plan *plan = built(rows, ARRAY_LEN(rows));

	(void)state;
	assert_int_equal(plan->run_count, 2);
	assert_int_equal(plan->runs[0].count, 1);
	assert_int_equal(plan->runs[0].src_stride, 0);
	assert_int_equal(plan->runs[1].count, 3);
	assert_int_equal(plan->runs[1].src, 100);
	plan_free(plan);
}

/* Order, overlaps and repeats are the caller's: they are kept. */
static void rows_keep_their_order(void **state)
{
	const struct plan_run rows[] = {row(50, 50, 10), row(50, 50, 10), row(0, 45, 10),
					row(100, 0, 10)};
	struct plan *plan = built(rows, ARRAY_LEN(rows));
	struct plan_walk walk;
	struct plan_span s;
	size_t i = 0;

	(void)state;
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &s)) {
		assert_int_equal(s.src, rows[i].src);
		assert_int_equal(s.dst, rows[i].dst);
		assert_int_equal(s.len, rows[i].len);
		i++;
	}
	assert_int_equal(i, 4);
	plan_free(plan);
}

static void rows_descending_are_one_run(void **state)
{
	const struct plan_run rows[] = {row(90, 900, 5), row(80, 800, 5),
					row(70, 700, 5)};
	struct plan *plan = built(rows, ARRAY_LEN(rows));

	(void)state;
	assert_int_equal(plan->run_count, 1);
	assert_int_equal(plan->runs[0].src_stride, -10);
	assert_int_equal(plan->runs[0].dst_stride, -100);
	plan_free(plan);
}

/* A row that continues a folded run takes that run's last row. */
static void row_after_a_run_merges_with_its_last_row(void **state)
{
	const struct plan_run rows[] = {
		{.src = 0,
		 .dst = 0,
		 .len = 4,
		 .count = 5,
		 .src_stride = 8,
		 .dst_stride = 8},
		row(36, 36, 4),
		{.src = 40,
		 .dst = 40,
		 .len = 4,
		 .count = 2,
		 .src_stride = 8,
		 .dst_stride = 8},
	};
	struct plan *plan = built(rows, ARRAY_LEN(rows));

	(void)state;
	assert_int_equal(plan->rows, 6);
	assert_int_equal(plan->run_count, 3);
	assert_int_equal(plan->runs[0].count, 4);
	assert_int_equal(plan->runs[1].src, 32);
	assert_int_equal(plan->runs[1].len, 12);
	assert_int_equal(plan->runs[2].src, 48);
	plan_free(plan);
}

static void run_without_gaps_is_one_row(void **state)
{
	const struct plan_run run = {.src = 7,
				     .dst = 9,
				     .len = 16,
				     .count = 1000,
				     .src_stride = 16,
				     .dst_stride = 16};
	struct plan *plan = built(&run, 1);

	(void)state;
	assert_int_equal(plan->rows, 1);
	assert_int_equal(plan->runs[0].len, 16000);
	plan_free(plan);
}

static void rows_overflowing_are_refused(void **state)
{
	static const struct plan_run bad[] = {
		{.len = 0, .count = 1},
		{.len = 1, .count = 0},
		{.src = UINT64_MAX, .len = 1, .count = 1},
		{.dst = UINT64_MAX - 3, .len = 4, .count = 1},
		{.src = 10, .len = 1, .count = 3, .src_stride = -6},
		{.len = 1, .count = UINT64_MAX, .src_stride = 2},
		{.len = 1, .count = 2, .src_stride = INT64_MIN, .src = 5},
		{.dst = UINT64_MAX - 10, .len = 4, .count = 3, .dst_stride = 4},
	};
	struct plan_builder *builder;
	struct plan *plan;

	(void)state;
	assert_int_equal(plan_builder_new(&builder), 0);
	for (size_t i = 0; i < ARRAY_LEN(bad); i++)
		assert_true(plan_builder_add(builder, &bad[i]) < 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	assert_int_equal(plan->rows, 0);
	assert_int_equal(plan->row_median, 0);
	plan_free(plan);
	/* each row fits, all of them together do not */
	for (int i = 0; i < 2; i++) {
		const struct plan_run big = {.len = 1ull << 63, .count = 1};

		assert_int_equal(plan_builder_add(builder, &big), 0);
	}
	assert_true(plan_builder_finish(builder, &plan) < 0);
	assert_int_equal(err_last()->code, ERR_RANGE);
	plan_builder_free(builder);
}

static void median_of_many_lengths_is_by_rows(void **state)
{
	struct plan_builder *builder;
	struct plan *plan;

	(void)state;
	assert_int_equal(plan_builder_new(&builder), 0);
	for (uint64_t i = 1; i <= 101; i++) {
		struct plan_run r = row(i * 1000, i * 2000, 102 - i);

		assert_int_equal(plan_builder_add(builder, &r), 0);
	}
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	assert_int_equal(plan->row_median, 51);
	plan_free(plan);
	plan_builder_free(builder);
}

/* ---- walk ---- */

/* From every position, in steps of every size: the bytes of the stream. */
static void walk_from_any_byte_gives_the_same_stream(void **state)
{
	const struct plan_run rows[] = {
		{.src = 90,
		 .dst = 0,
		 .len = 3,
		 .count = 4,
		 .src_stride = -10,
		 .dst_stride = 5},
		row(500, 100, 7),
		{.src = 600,
		 .dst = 200,
		 .len = 2,
		 .count = 3,
		 .src_stride = 4,
		 .dst_stride = 9},
	};
	struct plan *plan = built(rows, ARRAY_LEN(rows));
	uint64_t src[64], dst[64], n = 0;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(rows); i++)
		for (uint64_t j = 0; j < rows[i].count; j++)
			for (uint64_t k = 0; k < rows[i].len; k++, n++) {
				src[n] = rows[i].src + j * (uint64_t)rows[i].src_stride +
					 k;
				dst[n] = rows[i].dst + j * (uint64_t)rows[i].dst_stride +
					 k;
			}
	assert_int_equal(n, plan->bytes);
	for (uint64_t from = 0; from <= n; from++) {
		for (uint64_t step = 1; step < 9; step++) {
			struct plan_walk walk;
			struct plan_span s;
			uint64_t at = from;

			assert_int_equal(plan_walk_seek(&walk, plan, from), 0);
			while (plan_walk_next(&walk, step, &s)) {
				assert_true(s.len > 0 && s.len <= step);
				for (uint64_t k = 0; k < s.len; k++, at++) {
					assert_int_equal(s.src + k, src[at]);
					assert_int_equal(s.dst + k, dst[at]);
				}
			}
			assert_int_equal(at, n);
			assert_false(plan_walk_next(&walk, step, &s));
		}
	}
	assert_true(plan_walk_seek(&(struct plan_walk){0}, plan, n + 1) < 0);
	assert_int_equal(err_last()->code, ERR_RANGE);
	plan_free(plan);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rows_adjacent_merge_and_equal_strides_fold),
		cmocka_unit_test(ends_have_last_byte_of_each_buffer),
		cmocka_unit_test(ends_beyond_table_are_left_out),
		cmocka_unit_test(rows_fold_late_when_the_stride_shows_late),
		cmocka_unit_test(rows_keep_their_order),
		cmocka_unit_test(rows_descending_are_one_run),
		cmocka_unit_test(row_after_a_run_merges_with_its_last_row),
		cmocka_unit_test(run_without_gaps_is_one_row),
		cmocka_unit_test(rows_overflowing_are_refused),
		cmocka_unit_test(median_of_many_lengths_is_by_rows),
		cmocka_unit_test(walk_from_any_byte_gives_the_same_stream),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
