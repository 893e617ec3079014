/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/coverage.h"

#define TOKENS 200u
#define LAYER_COUNT 5u

static const uint32_t layers[LAYER_COUNT] = {0, 1, 4, 7, 9};
static const struct plan_layers all = {0, UINT32_MAX};

static void add_overlap_is_refused_and_changes_nothing(void **state)
{
	struct coverage cov;

	(void)state;
	assert_int_equal(coverage_init(&cov, layers, LAYER_COUNT), 0);
	assert_int_equal(coverage_add(&cov, all, 0, 10), 0);
	assert_int_equal(coverage_add(&cov, all, 20, 30), 0);
	assert_int_equal(coverage_add(&cov, all, 9, 12), -err_errno(ERR_DUP));
	assert_int_equal(coverage_add(&cov, (struct plan_layers){4, 5}, 25, 26),
			 -err_errno(ERR_DUP));
	assert_false(coverage_whole(&cov, 0, 12));
	assert_int_equal(coverage_add(&cov, all, 10, 20), 0);
	assert_true(coverage_whole(&cov, 0, 30));
	coverage_fini(&cov);
}

static void layers_in_any_order_are_whole_together(void **state)
{
	struct coverage cov;

	(void)state;
	assert_int_equal(coverage_init(&cov, layers, LAYER_COUNT), 0);
	for (uint32_t i = LAYER_COUNT; i-- > 0;) {
		assert_false(coverage_whole(&cov, 0, 16));
		assert_int_equal(
			coverage_add(&cov, (struct plan_layers){layers[i], layers[i] + 1},
				     0, 16),
			0);
	}
	assert_true(coverage_whole(&cov, 0, 16));
	coverage_fini(&cov);
}

static void cover_of_no_wants_is_complete(void **state)
{
	struct coverage cov;

	(void)state;
	assert_int_equal(coverage_init(&cov, layers, 0), 0);
	assert_true(coverage_whole(&cov, 0, 1000));
	assert_int_equal(coverage_add(&cov, all, 0, 5), 0);
	coverage_fini(&cov);
}

/* Against a bitmap a layer: what was added and not removed, no more, no less. */
static void random_adds_and_removes_match_a_bitmap(void **state)
{
	(void)state;
	for (unsigned int seed = 0; seed < 300; seed++) {
		static uint8_t bits[LAYER_COUNT][TOKENS];
		struct coverage cov;

		srand(seed);
		memset(bits, 0, sizeof(bits));
		assert_int_equal(coverage_init(&cov, layers, LAYER_COUNT), 0);
		for (int step = 0; step < 120; step++) {
			uint32_t a = (uint32_t)rand() % TOKENS, n = (uint32_t)rand() % 20;
			uint32_t lo = (uint32_t)rand() % 11,
				 b = a + n < TOKENS ? a + n : TOKENS;
			struct plan_layers range = {rand() % 3 ? 0 : lo,
						    rand() % 3 ? 10 : lo + 3};
			bool clash = false, held = a < b;
			int r;

			for (uint32_t l = 0; l < LAYER_COUNT; l++)
				for (uint32_t t = a; t < b; t++)
					if (layers[l] >= range.begin &&
					    layers[l] < range.end) {
						clash |= bits[l][t];
						held &= bits[l][t];
					}
			if (held && rand() % 2) {
				assert_int_equal(coverage_remove(&cov, range, a, b), 0);
				r = 0;
			} else {
				r = coverage_add(&cov, range, a, b);
				assert_int_equal(r, clash ? -err_errno(ERR_DUP) : 0);
				held = false;
			}
			for (uint32_t l = 0; l < LAYER_COUNT && r == 0; l++)
				for (uint32_t t = a; t < b; t++)
					if (layers[l] >= range.begin &&
					    layers[l] < range.end)
						bits[l][t] = !held;
		}
		for (uint32_t t = 0; t < TOKENS; t++) {
			bool whole = true;

			for (uint32_t l = 0; l < LAYER_COUNT; l++)
				whole &= bits[l][t];
			assert_int_equal(coverage_whole(&cov, t, t + 1), whole);
		}
		coverage_fini(&cov);
	}
}

static void add_without_memory_changes_nothing(void **state)
{
	(void)state;
	for (uint64_t n = 1; n < 12; n++) {
		struct coverage cov;
		int r;

		assert_int_equal(coverage_init(&cov, layers, LAYER_COUNT), 0);
		assert_int_equal(coverage_add(&cov, all, 0, 1), 0);
		mem_fail_at(n);
		r = coverage_add(&cov, (struct plan_layers){4, 8}, 10, 20);
		mem_fail_at(0);
		assert_true(r == 0 || r == -err_errno(ERR_NOMEM));
		if (r < 0) /* the same again is no overlap */
			assert_int_equal(
				coverage_add(&cov, (struct plan_layers){4, 8}, 10, 20),
				0);
		coverage_fini(&cov);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(add_overlap_is_refused_and_changes_nothing),
		cmocka_unit_test(layers_in_any_order_are_whole_together),
		cmocka_unit_test(cover_of_no_wants_is_complete),
		cmocka_unit_test(random_adds_and_removes_match_a_bitmap),
		cmocka_unit_test(add_without_memory_changes_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
