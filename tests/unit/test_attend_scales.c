/* SPDX-License-Identifier: Apache-2.0 */
/* fp8 with a scale for each token and head: each attention kernel that this machine runs,
 * against fp64; and scales that are no numbers.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "tests/lib/attend_case.h"

static void right(struct attend_case *c, enum pick_isa isa)
{
	struct case_error error;

	case_run(c, isa);
	error = case_compare(c);
	assert_true(error.rms <= 1e-6 && error.worst <= 4e-6 * error.most);
	assert_true(error.m <= 2e-5 && error.l <= 2e-5);
}

/* Of K, of V, of both; MLA has one for both. */
static void scales_of(enum pick_isa isa, const struct attend_shape *of, uint32_t rows,
		      uint32_t tokens)
{
	struct attend_shape shape = *of;
	struct case_pool pool = {.tokens = tokens,
				 .page_tokens = 16,
				 .first = rows,
				 .scattered = rows % 2,
				 .heads_first = tokens % 2};
	struct attend_case c;
	uint32_t which;

	shape.kv_type = VALUE_E4M3;
	for (which = 1; which <= 3; which++) {
		pool.k_scaled = which & 1;
		pool.v_scaled = which & 2;
		if (shape.kind == ATTEND_MLA && !pool.k_scaled)
			continue;
		case_make(&c, &shape, &pool, which);
		case_span(&c, rows, 0, 0, tokens);
		right(&c, isa);
		case_free(&c);
	}
}

/* For few rows and tokens, and for full steps of a kernel and the ends of one. */
static void scales_equal_fp64(void **state)
{
	static const uint32_t rows[] = {1, 2, 4, 48}, tokens[] = {1, 3, 16, 131};
	enum pick_isa isa = case_isa(state);
	const struct attend_shape shapes[] = {case_mla(16), case_gqa(1, 1, 64),
					      case_gqa(32, 8, 128)};
	uint32_t i, j, n;

	for (i = 0; i < ARRAY_LEN(shapes); i++)
		for (j = 0; j < ARRAY_LEN(rows); j++)
			for (n = 0; n < ARRAY_LEN(tokens); n++)
				scales_of(isa, &shapes[i], rows[j], tokens[n]);
}

/* With all else that changes a logit or the order of tokens. */
static void scales_and_more_equal_fp64(void **state)
{
	struct case_pool pool = {.tokens = 203,
				 .page_tokens = 16,
				 .first = 5,
				 .scattered = true,
				 .k_scaled = true,
				 .v_scaled = true};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 64)};
	struct attend_case c;
	uint32_t i;

	for (i = 0; i < 2; i++) {
		shapes[i].kv_type = VALUE_E4M3;
		shapes[i].softcap = 3;
		case_make(&c, &shapes[i], &pool, 31);
		case_span(&c, 17, 3, 0, 203)->delta = -513;
		case_span(&c, 40, 0, 7, 120);
		case_selected(&c, 3, 77);
		right(&c, isa);
		case_free(&c);
	}
}

/* Rows 0 to 3 attend to all tokens, 4 to 7 to those before the 17th. With a scale of
 * token 17 and KV head 1 that is `x`; NULL: as case_make() has them. */
static void run_with(struct attend_case *c, enum pick_isa isa, bool v, const float *x)
{
	const struct case_pool pool = {
		.tokens = 40, .page_tokens = 16, .k_scaled = true, .v_scaled = true};
	struct attend_shape shape = case_gqa(4, 2, 64);

	shape.kv_type = VALUE_E4M3;
	case_make(c, &shape, &pool, 32);
	case_span(c, 4, 0, 0, 40);
	case_span(c, 4, 0, 0, 17);
	if (x)
		case_put(VALUE_FP32, case_scale_at(c, v, 17, 1), 0, (double)*x);
	case_run(c, isa);
}

/* The first rows of two spans. */
static void same_rows(const struct attend_span *a, const struct attend_span *b,
		      uint32_t rows)
{
	assert_memory_equal(a->o, b->o, (size_t)rows * 64 * sizeof(float));
	assert_memory_equal(a->m, b->m, rows * sizeof(float));
	assert_memory_equal(a->l, b->l, rows * sizeof(float));
}

/* A scale spoils the rows that attend to its token with its head, as a value of K or V
 * does, and no other row. */
static void hostile_scales_stay_in_their_rows(void **state)
{
	static const float hostile[] = {NAN,   INFINITY, -INFINITY, 0,
					-0.0f, 3e38f,	 -1e-45f};
	enum pick_isa isa = case_isa(state);
	struct attend_case c, clean;
	uint32_t i, row;

	run_with(&clean, isa, false, NULL);
	for (i = 0; i < 2 * ARRAY_LEN(hostile); i++) {
		const struct attend_span *s = c.spans;
		float x = hostile[i / 2];
		bool v = i % 2;

		run_with(&c, isa, v, &x);
		same_rows(&s[0], &clean.spans[0], 2); /* of KV head 0 */
		same_rows(&s[1], &clean.spans[1], 4);
		for (row = 2; row < 4; row++) {
			float l = s->l[row];

			assert_true(!isnan(x) || isnan(s->o[row * 64]));
			assert_true(!(fabsf(x) < 1) || isfinite(s->o[row * 64]));
			assert_true(v ? l == clean.spans[0].l[row]
				      : isinf(x) || x == 3e38f || isnan(l) == isnan(x));
		}
		case_free(&c);
	}
	case_free(&clean);
}

#define PER_KERNEL(X)                 \
	X(scales_equal_fp64)          \
	X(scales_and_more_equal_fp64) \
	X(hostile_scales_stay_in_their_rows)

int main(void)
{
	const struct CMUnitTest tests[] = {PER_KERNEL(CASE_PER_ISA)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
