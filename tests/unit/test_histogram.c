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
	histogram_add(&h, 999);	 /* below 1 us */
	histogram_add(&h, 1000); /* below 2 */
	histogram_add(&h, 1999);
	histogram_add(&h, 2000);   /* below 4 */
	histogram_add(&h, 200000); /* below 256 */
	histogram_add(&h, 256000); /* below 512 */
	histogram_add(&h, UINT64_MAX);
	assert_int_equal(h.buckets[0], 2);
	assert_int_equal(h.buckets[1], 2);
	assert_int_equal(h.buckets[2], 1);
	assert_int_equal(h.buckets[8], 1);
	assert_int_equal(h.buckets[9], 1);
	assert_int_equal(h.buckets[HISTOGRAM_BUCKETS - 1], 1);
	assert_int_equal(h.count, 8);
	assert_true(h.max_ns == UINT64_MAX);
	assert_int_equal(histogram_bucket_us(0), 1);
	assert_int_equal(histogram_bucket_us(8), 256);
	assert_true(histogram_bucket_us(HISTOGRAM_BUCKETS - 1) == UINT64_MAX);
}

static void quantile_is_never_above_the_longest(void **state)
{
	struct histogram h = {0};

	(void)state;
	assert_true(histogram_quantile_us(&h, 500) == 0);
	for (int i = 0; i < 990; i++)
		histogram_add(&h, 3000);
	for (int i = 0; i < 10; i++)
		histogram_add(&h, 150000);
	assert_true(histogram_quantile_us(&h, 500) == 4);
	assert_true(histogram_quantile_us(&h, 990) == 4);
	assert_true(histogram_quantile_us(&h, 991) == 150); /* not 256 */
	assert_true(histogram_quantile_us(&h, 1000) == 150);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(buckets_double_from_one_microsecond),
		cmocka_unit_test(quantile_is_never_above_the_longest),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
