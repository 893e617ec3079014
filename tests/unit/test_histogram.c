/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/histogram.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void buckets_double_from_one_microsecond(void **state)
{
	struct histogram h = {0};

	(void)state;
	histogram_add(&h, 0);
	histogram_add(&h, 1000); /* up to 1 us */
	histogram_add(&h, 1001); /* up to 2 */
	histogram_add(&h, 2000);
	histogram_add(&h, 2001);   /* up to 4 */
	histogram_add(&h, 256000); /* up to 256 */
	histogram_add(&h, 256001); /* up to 512 */
	histogram_add(&h, UINT64_MAX);
	assert_int_equal(h.buckets[0], 2);
	assert_int_equal(h.buckets[1], 2);
	assert_int_equal(h.buckets[2], 1);
	assert_int_equal(h.buckets[8], 1);
	assert_int_equal(h.buckets[9], 1);
	assert_int_equal(h.buckets[HISTOGRAM_BUCKETS - 1], 1);
	assert_int_equal(h.count, 8);
	assert_true(h.max == UINT64_MAX);
	assert_int_equal(histogram_end(0, 1000), 1000);
	assert_int_equal(histogram_end(8, 1000), 256000);
	assert_true(histogram_end(HISTOGRAM_BUCKETS - 1, 1000) == UINT64_MAX);
}

/* A bucket holds its own end: what Prometheus calls "le". */
static void size_at_bucket_limit_is_below_it(void **state)
{
	struct histogram h = {0};

	(void)state;
	for (unsigned int i = 0; i + 1 < HISTOGRAM_BUCKETS; i++)
		histogram_put(&h, histogram_end(i, 4096), 4096);
	for (unsigned int i = 0; i + 1 < HISTOGRAM_BUCKETS; i++)
		assert_int_equal(h.buckets[i], 1);
	assert_int_equal(h.buckets[HISTOGRAM_BUCKETS - 1], 0);
}

static void quantile_is_never_above_the_longest(void **state)
{
	struct histogram h = {0};

	(void)state;
	assert_true(histogram_quantile(&h, 500, 1000) == 0);
	for (int i = 0; i < 990; i++)
		histogram_add(&h, 3000);
	for (int i = 0; i < 10; i++)
		histogram_add(&h, 150000);
	assert_int_equal(histogram_quantile(&h, 500, 1000), 4000);
	assert_int_equal(histogram_quantile(&h, 990, 1000), 4000);
	assert_int_equal(histogram_quantile(&h, 991, 1000), 150000); /* not 256 us */
	assert_int_equal(histogram_quantile(&h, 1000, 1000), 150000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(buckets_double_from_one_microsecond),
		cmocka_unit_test(size_at_bucket_limit_is_below_it),
		cmocka_unit_test(quantile_is_never_above_the_longest),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
