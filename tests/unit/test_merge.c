/* SPDX-License-Identifier: Apache-2.0 */
/* Merging partials: the own exp, identities, symmetry to the bit, orders, and rows that
 * hold what is no number.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/math/merge.h"
#include "daemon/math/merge_row.h"
#include "daemon/math/value.h"
#include "tests/lib/attend_case.h"

#define ROWS 9u
#define DV 37u /* some lanes, and some values beside them */
#define PARTS 7u

struct partial {
	float o[ROWS * DV], m[ROWS], l[ROWS];
};

static void any_partial(struct partial *p, uint64_t *seed)
{
	uint32_t i;

	for (i = 0; i < ROWS * DV; i++)
		p->o[i] = (float)case_normal(seed);
	for (i = 0; i < ROWS; i++) {
		p->m[i] = (float)(5 * case_normal(seed));
		p->l[i] = (float)(1 + (double)case_random(seed, 1000) / 7);
	}
}

static void empty_partial(struct partial *p, float o, float m)
{
	uint32_t i;

	for (i = 0; i < ROWS * DV; i++)
		p->o[i] = o;
	for (i = 0; i < ROWS; i++) {
		p->m[i] = m;
		p->l[i] = 0;
	}
}

static struct partial merged(const struct partial *const *parts, uint32_t count)
{
	struct merge_part part[PARTS];
	struct partial out;
	uint32_t i;

	memset(&out, 0x5a, sizeof(out));
	for (i = 0; i < count; i++)
		part[i] = (struct merge_part){parts[i]->o, parts[i]->m, parts[i]->l};
	merge_rows(out.o, out.m, out.l, part, count, ROWS, DV);
	return out;
}

static struct partial of_two(const struct partial *a, const struct partial *b)
{
	const struct partial *parts[] = {a, b};

	return merged(parts, 2);
}

static void exp_is_within_two_ulp(void **state)
{
	double worst = 0;
	float x;

	(void)state;
	for (x = 0; x > -87.3f; x -= 0.00037f) {
		double right = exp((double)x);
		double ulp = (double)nextafterf((float)right, 2) - (double)(float)right;

		worst = fmax(worst, fabs((double)merge_exp_of(x) - right) / ulp);
	}
	print_message("exp: %.2f ulp\n", worst);
	assert_true(worst <= 2);
	assert_true(merge_exp_of(0) == 1 && merge_exp_of(-0.0f) == 1);
	assert_true(merge_exp_of(-87.4f) == 0 && merge_exp_of(-INFINITY) == 0);
	assert_true(isnan(merge_exp_of(NAN)));
}

/* An empty part holds what it likes. */
static void empty_part_changes_no_bit(void **state)
{
	static const float anything[] = {0, NAN, INFINITY, -INFINITY, 1e30f};
	struct partial a, empty, out;
	uint64_t seed = 1;
	uint32_t i, j;

	(void)state;
	any_partial(&a, &seed);
	a.o[3] = -0.0f;
	a.o[4] = 1e-42f;
	for (i = 0; i < 5; i++)
		for (j = 0; j < 5; j++) {
			empty_partial(&empty, anything[i], anything[j]);
			out = of_two(&a, &empty);
			assert_memory_equal(&out, &a, sizeof(a));
			out = of_two(&empty, &a);
			assert_memory_equal(&out, &a, sizeof(a));
		}
	out = of_two(&empty, &empty);
	for (i = 0; i < ROWS * DV; i++)
		assert_int_equal(value_bits(out.o[i]), 0);
	for (i = 0; i < ROWS; i++)
		assert_true(out.m[i] == -INFINITY && out.l[i] == 0);
}

static void two_in_both_orders_are_the_same_bits(void **state)
{
	struct partial a, b, ab, ba;
	uint64_t seed;

	(void)state;
	for (seed = 1; seed < 200; seed++) {
		uint64_t dice = seed;

		any_partial(&a, &dice);
		any_partial(&b, &dice);
		a.m[0] = b.m[0];
		b.l[1] = 0;
		ab = of_two(&a, &b);
		ba = of_two(&b, &a);
		assert_memory_equal(&ab, &ba, sizeof(ab));
	}
}

/* The result may be written over a part. */
static void result_may_be_a_part(void **state)
{
	struct partial a, b, right;
	struct merge_part parts[2];
	uint64_t seed = 5;

	(void)state;
	any_partial(&a, &seed);
	any_partial(&b, &seed);
	right = of_two(&a, &b);
	parts[0] = (struct merge_part){a.o, a.m, a.l};
	parts[1] = (struct merge_part){b.o, b.m, b.l};
	merge_rows(b.o, b.m, b.l, parts, 2, ROWS, DV);
	assert_memory_equal(&b, &right, sizeof(b));
}

/* Against fp64, and pair by pair in a random tree. */
static void any_order_and_tree_is_within_its_bound(void **state)
{
	struct partial parts[PARTS], tree[PARTS], out;
	const struct partial *all[PARTS];
	double worst[2] = {0};
	uint64_t seed = 9;
	uint32_t round, i, j, n;

	(void)state;
	for (round = 0; round < 50; round++) {
		for (i = 0; i < PARTS; i++) {
			any_partial(&parts[i], &seed);
			tree[i] = parts[i];
			all[i] = &parts[i];
		}
		out = merged(all, PARTS);
		for (n = PARTS; n > 1; n--) {
			i = (uint32_t)case_random(&seed, n);
			j = (i + 1 + (uint32_t)case_random(&seed, n - 1)) % n;
			tree[i] = of_two(&tree[i], &tree[j]);
			tree[j] = tree[n - 1];
			if (i == n - 1)
				tree[j] = tree[i];
		}
		for (i = 0; i < ROWS * DV; i++) {
			double m = -INFINITY, l = 0, sum = 0, size = 0;
			uint32_t row = i / DV;

			for (j = 0; j < PARTS; j++)
				m = fmax(m, (double)parts[j].m[row]);
			for (j = 0; j < PARTS; j++) {
				double w = (double)parts[j].l[row] *
					   exp((double)parts[j].m[row] - m);

				l += w;
				sum += w * (double)parts[j].o[i];
				size += w * fabs((double)parts[j].o[i]);
			}
			worst[0] = fmax(worst[0],
					fabs((double)out.o[i] - sum / l) / (size / l));
			worst[1] = fmax(worst[1], fabs((double)tree[0].o[i] - sum / l) /
							  (size / l));
		}
	}
	print_message("at once: %.2f of 2^-21; in pairs: %.2f\n", worst[0] * 0x1p21,
		      worst[1] * 0x1p21);
	assert_true(worst[0] <= 0x1p-21);
	assert_true(worst[1] <= 0x1p-21);
}

static void nan_stays_in_its_row(void **state)
{
	struct partial a, b, clean, out;
	uint64_t seed = 13;
	uint32_t i;

	(void)state;
	any_partial(&a, &seed);
	any_partial(&b, &seed);
	clean = of_two(&a, &b);
	a.l[2] = NAN;
	b.m[4] = NAN;
	a.o[6 * DV + 1] = NAN;
	out = of_two(&a, &b);
	for (i = 0; i < ROWS * DV; i++) {
		uint32_t row = i / DV;

		if (row == 2 || row == 4 || i == 6 * DV + 1)
			assert_true(isnan(out.o[i]));
		else
			assert_int_equal(value_bits(out.o[i]), value_bits(clean.o[i]));
	}
	assert_true(isnan(out.l[2]) && isnan(out.m[4]) && isnan(out.l[4]));
}

/* Parts whose m is the same infinity are weighed by l. */
static void equal_infinities_are_equal(void **state)
{
	struct partial a, b, out;
	uint64_t seed = 19;
	uint32_t i;

	(void)state;
	any_partial(&a, &seed);
	any_partial(&b, &seed);
	for (i = 0; i < ROWS; i++) {
		a.m[i] = b.m[i] = i % 2 ? INFINITY : -INFINITY;
		a.l[i] = 1;
		b.l[i] = 3;
	}
	out = of_two(&a, &b);
	for (i = 0; i < ROWS * DV; i++)
		assert_true(fabsf(out.o[i] - (a.o[i] + 3 * b.o[i]) / 4) <= 1e-6f);
	assert_true(out.l[0] == 4 && out.m[0] == -INFINITY && out.m[1] == INFINITY);
}

/* A sink: a logit that has no value, told as a part with m = sink, l = 1, o = 0. */
static void sink_only_takes_weight(void **state)
{
	struct partial a, sink, out;
	uint64_t seed = 17;
	uint32_t i;

	(void)state;
	any_partial(&a, &seed);
	empty_partial(&sink, 0, 0);
	for (i = 0; i < ROWS; i++) {
		sink.l[i] = 1;
		sink.m[i] = a.m[i];
	}
	out = of_two(&a, &sink);
	for (i = 0; i < ROWS * DV; i++) {
		double share = (double)a.l[i / DV] / ((double)a.l[i / DV] + 1);

		assert_true(fabs((double)out.o[i] - share * (double)a.o[i]) <= 1e-6);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(exp_is_within_two_ulp),
		cmocka_unit_test(empty_part_changes_no_bit),
		cmocka_unit_test(two_in_both_orders_are_the_same_bits),
		cmocka_unit_test(result_may_be_a_part),
		cmocka_unit_test(any_order_and_tree_is_within_its_bound),
		cmocka_unit_test(nan_stays_in_its_row),
		cmocka_unit_test(equal_infinities_are_equal),
		cmocka_unit_test(sink_only_takes_weight),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
