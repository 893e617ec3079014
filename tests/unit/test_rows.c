/* SPDX-License-Identifier: Apache-2.0 */
/* rows: every length, alignment and stride gives the bytes that a plain loop
 * gives, and touches none besides. */
#include "daemon/memory/rows.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/memory/copy.h"

#define BYTES (256u << 10)

static uint8_t src[BYTES], dst[BYTES], want[BYTES];

static void want_rows(const struct rows *rows, size_t n)
{
	memset(want, 0xee, BYTES);
	for (; n > 0; n--, rows++)
		for (uint64_t i = 0; i < rows->count; i++)
			memcpy(want + (rows->dst - dst) + (int64_t)i * rows->dst_stride,
			       rows->src + (int64_t)i * rows->src_stride, rows->len);
}

enum way { WARM, FETCHED, STREAMED, WAYS };

static void copy_rows(const struct rows *rows, enum way way)
{
	struct rows_lanes lanes = {.streaming = way == STREAMED};

	if (way == WARM)
		rows_copy(rows);
	else
		rows_put(rows, &lanes);
	rows_end(&lanes);
	rows_fence();
}

static void compare(const struct rows *rows)
{
	want_rows(rows, 1);
	for (enum way way = WARM; way < WAYS; way++) {
		memset(dst, 0xee, BYTES);
		copy_rows(rows, way);
		if (memcmp(dst, want, BYTES) != 0)
			fail_msg("len %zu count %zu strides %zd %zd dst %zu way %d",
				 (size_t)rows->len, (size_t)rows->count,
				 (ssize_t)rows->src_stride, (ssize_t)rows->dst_stride,
				 (size_t)(rows->dst - dst), (int)way);
	}
}

static void lengths_and_alignments_are_exact(void **state)
{
	static const uint64_t lens[] = {0,    1,    3,	  15,	16,   17,    31,
					32,   33,   63,	  64,	65,   100,   127,
					128,  192,  255,  256,	257,  512,   960,
					1023, 1024, 1025, 4096, 5000, 16384, 20000};
	static const unsigned int shifts[] = {0, 1, 8, 16, 63, 64};

	(void)state;
	for (size_t l = 0; l < ARRAY_LEN(lens); l++)
		for (size_t a = 0; a < ARRAY_LEN(shifts); a++)
			for (size_t gap = 0; gap < 4; gap++) {
				static const int64_t gaps[] = {0, 1, 64, 100};
				struct rows rows = {
					.dst = dst + 64 + shifts[a],
					.src = src + 7 * shifts[a],
					.len = lens[l],
					.count = lens[l] < 1024 ? 37 : 11,
					.dst_stride = (int64_t)lens[l] + gaps[gap],
					.src_stride = (int64_t)lens[l] + gaps[3 - gap]};

				compare(&rows);
			}
}

/* Rows wait for more of their length, and until their lines are fetched; all of them
 * arrive. */
static void rows_of_many_calls_are_exact(void **state)
{
	static const uint64_t lens[] = {256, 1024, 2048, 1000, 4096, 20480};

	(void)state;
	for (unsigned int seed = 1; seed <= 600; seed++) {
		struct rows_lanes lanes = {.streaming = seed % 4 < 2};
		struct rows rows[40];
		uint64_t at = 0;

		srand(seed);
		for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
			uint64_t len = lens[rand() % (seed % 2 ? 6 : 2)];

			rows[i] = (struct rows){.dst = dst + at,
						.src = src + rand() % (BYTES / 2),
						.dst_stride = (int64_t)(len + 64),
						.src_stride = (int64_t)(len / 2),
						.len = len,
						.count = 1 + (uint64_t)(rand() % 3)};
			if (rows[i].count * (len + 64) > BYTES / 2)
				rows[i].count = 1;
			if (at + rows[i].count * (len + 64) > BYTES)
				rows[i].count = 0;
			at += rows[i].count * (len + 64);
		}
		memset(dst, 0xee, BYTES);
		want_rows(rows, ARRAY_LEN(rows));
		for (size_t i = 0; i < ARRAY_LEN(rows); i++)
			rows_put(&rows[i], &lanes);
		rows_end(&lanes);
		rows_fence();
		if (memcmp(dst, want, BYTES) != 0)
			fail_msg("seed %u", seed);
	}
}

static void strides_may_fall_or_stand(void **state)
{
	static const uint64_t lens[] = {16, 64, 100, 256, 2000};

	(void)state;
	for (size_t l = 0; l < ARRAY_LEN(lens); l++)
		for (uint64_t count = 9; count <= 18; count *= 2) {
			struct rows rows = {.dst = dst + 128 * 1024,
					    .src = src + 128 * 1024,
					    .len = lens[l],
					    .count = count,
					    .dst_stride = -(int64_t)(lens[l] + 64),
					    .src_stride = 0};

			compare(&rows);
			rows.src_stride = -(int64_t)lens[l];
			compare(&rows);
			rows.dst_stride = 3 * (int64_t)lens[l];
			compare(&rows);
			rows.count = 0;
			compare(&rows);
			/* strides of one row are not used */
			rows.count = 1;
			rows.dst_stride = INT64_MIN;
			rows.src_stride = INT64_MAX;
			compare(&rows);
		}
}

static void overlapping_rows_do_no_harm(void **state)
{
	(void)state;
	for (uint64_t len = 16; len <= 8192; len *= 2) {
		struct rows rows = {.dst = dst + 1024 + 8,
				    .src = dst + 1024,
				    .len = len,
				    .count = 5,
				    .dst_stride = 16,
				    .src_stride = 16};

		memset(dst, 0xee, BYTES);
		for (enum way way = WARM; way < WAYS; way++)
			copy_rows(&rows, way);
		for (unsigned int i = 0; i < 1024; i++)
			assert_int_equal(dst[i], 0xee);
		for (uint64_t i = 1032 + 4 * 16 + len; i < BYTES; i++)
			assert_int_equal(dst[i], 0xee);
	}
}

static void rows_fit_is_overflow_safe(void **state)
{
	(void)state;
	assert_true(copy_rows_fit(0, 10, 10, 10, 100));
	assert_false(copy_rows_fit(0, 10, 10, 10, 99));
	assert_true(copy_rows_fit(90, 10, 10, -10, 100));
	assert_false(copy_rows_fit(89, 10, 10, -10, 100));
	assert_true(copy_rows_fit(UINT64_MAX, 0, 9, 1, 0));
	assert_false(copy_rows_fit(UINT64_MAX, 1, 1, 0, UINT64_MAX));
	assert_false(copy_rows_fit(UINT64_MAX, UINT64_MAX, 1, 0, UINT64_MAX));
	assert_false(copy_rows_fit(0, 1, UINT64_MAX, INT64_MAX, UINT64_MAX));
	assert_false(copy_rows_fit(UINT64_MAX, 1, UINT64_MAX, INT64_MIN, UINT64_MAX));
	assert_true(copy_rows_fit(3, 1, UINT64_MAX, 0, 4));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rows_fit_is_overflow_safe),
		cmocka_unit_test(lengths_and_alignments_are_exact),
		cmocka_unit_test(strides_may_fall_or_stand),
		cmocka_unit_test(overlapping_rows_do_no_harm),
		cmocka_unit_test(rows_of_many_calls_are_exact),
	};
	int failed;

	for (unsigned int i = 0; i < BYTES; i++)
		src[i] = (uint8_t)(i * 31 + i / 253);
	failed = cmocka_run_group_tests_name("rows", tests, NULL, NULL);
	rows_use_baseline(true);
	return failed + cmocka_run_group_tests_name("rows, baseline", tests, NULL, NULL);
}
