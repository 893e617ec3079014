/* SPDX-License-Identifier: Apache-2.0 */
/* Each attention kernel that this machine runs, against fp64 in two passes: shapes,
 * pages, selections, deltas, empty rows, NaNs, poison, batches, stops; and what is
 * refused.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/attend_case.h"

#define FUZZ 60u

/* They take nothing but bf16: other types are for the next slower kernel. */
static bool rounds(enum pick_isa isa, const struct attend_shape *shape)
{
	return isa >= PICK_BF16 && shape->q_type == VALUE_BF16 &&
	       shape->kv_type == VALUE_BF16 && shape->dqk % 32 == 0 &&
	       shape->dv % 32 == 0;
}

/* rms and not the worst is what weights in bf16 are judged by: 2e-3. */
static struct case_error right(const struct attend_case *c, enum pick_isa isa)
{
	struct case_error error = case_compare(c);

	if (rounds(isa, &c->shape)) {
		assert_true(error.rms <= 2e-3);
		assert_true(error.worst <= 2e-2 * error.most);
	} else {
		assert_true(error.rms <= 1e-6);
		assert_true(error.worst <= 4e-6 * error.most);
	}
	assert_true(error.m <= 2e-5);
	assert_true(error.l <= 2e-5);
	return error;
}

static void tell(const char *what, enum pick_isa isa, const struct case_error *error)
{
	print_message("%s, %s: rms %.1e, worst %.1e of %.2f, m %.1e, l %.1e\n",
		      pick_name(isa), what, error->rms, error->worst, error->most,
		      error->m, error->l);
}

static void run_and_tell(struct attend_case *c, enum pick_isa isa, const char *what)
{
	struct case_error error;

	case_run(c, isa);
	error = right(c, isa);
	tell(what, isa, &error);
	case_free(c);
}

static void mla_equals_fp64(void **state)
{
	struct case_pool pool = {.tokens = 700, .page_tokens = 64};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case c;

	case_make(&c, &shape, &pool, 1);
	case_span(&c, 48, 0, 0, 700);
	run_and_tell(&c, isa, "MLA dense");
}

static void gqa_equals_fp64(void **state)
{
	struct case_pool pool = {.tokens = 333, .page_tokens = 16, .scattered = true};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(32, 8, 128);
	struct attend_case c;
	int d;

	for (d = 128; d >= 64; d -= 64) {
		shape = case_gqa(32, 8, (uint16_t)d);
		pool.heads_first = d == 64;
		case_make(&c, &shape, &pool, 2);
		case_span(&c, 96, 0, 0, 333);
		run_and_tell(&c, isa, d == 64 ? "GQA of 64" : "GQA of 128");
	}
}

static void selection_equals_fp64(void **state)
{
	struct case_pool pool = {.tokens = 500, .page_tokens = 16, .scattered = true};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case c;

	case_make(&c, &shape, &pool, 3);
	case_selected(&c, 3, 200);
	case_selected(&c, 2, 1);
	run_and_tell(&c, isa, "MLA selected");
	shape = case_gqa(8, 2, 64);
	case_make(&c, &shape, &pool, 4);
	case_selected(&c, 2, 131);
	run_and_tell(&c, isa, "GQA selected");
}

static void types_equal_fp64(void **state)
{
	static const char *const names[] = {"bf16", "fp16", "fp32", "e4m3"};
	struct case_pool pool = {.tokens = 150, .page_tokens = 32};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case c;
	char what[32];
	uint8_t q, kv;

	for (q = 0; q < VALUE_TYPES; q++)
		for (kv = 0; kv < VALUE_TYPES; kv++) {
			shape.q_type = q;
			shape.kv_type = kv;
			case_make(&c, &shape, &pool, 5);
			case_span(&c, 20, 0, 0, 150)->delta = 77;
			snprintf(what, sizeof(what), "q %s, kv %s", names[q], names[kv]);
			run_and_tell(&c, isa, what);
		}
}

static void softcap_equals_fp64(void **state)
{
	struct case_pool pool = {.tokens = 150, .page_tokens = 32};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(8, 2, 128);
	struct attend_case c;

	shape.softcap = 2;
	case_make(&c, &shape, &pool, 6);
	case_span(&c, 16, 0, 0, 150);
	run_and_tell(&c, isa, "softcap 2");
	shape.softcap = 50;
	shape.scale = -shape.scale;
	case_make(&c, &shape, &pool, 6);
	case_span(&c, 16, 0, 0, 150);
	run_and_tell(&c, isa, "softcap 50, a scale below 0");
	shape.softcap = 0.02f; /* exp(2 * logit / cap) would overflow */
	case_make(&c, &shape, &pool, 6);
	case_span(&c, 16, 0, 0, 150);
	run_and_tell(&c, isa, "softcap 0.02");
	case_make(&c, &shape, &pool, 6);
	case_span(&c, 16, 0, 0, 150);
	case_put(VALUE_BF16, (void *)(uintptr_t)c.spans[0].q, 3 * 128, NAN);
	case_run(&c, isa);
	assert_true(isnan(c.spans[0].l[3]) && isnan(c.spans[0].o[3 * 128]));
	assert_true(isfinite(c.spans[0].l[2]) && isfinite(c.spans[0].o[4 * 128]));
	case_free(&c);
}

/* Infinities and NaNs of each type are what they are in fp32. */
static void types_keep_nan_and_infinity(void **state)
{
	struct case_pool pool = {.tokens = 20, .page_tokens = 32};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(1, 1, 64);
	struct attend_case c;
	uint8_t type;
	float *o;

	for (type = 0; type < VALUE_TYPES; type++) {
		bool has_inf = type != VALUE_E4M3; /* it is a NaN there */

		shape.q_type = shape.kv_type = type;
		if (has_inf) {
			case_make(&c, &shape, &pool, 6);
			case_span(&c, 1, 0, 0, 20);
			case_put(type, (void *)(uintptr_t)c.spans[0].q, 5, 1);
			case_put(type, case_at(&c, false, 7, 0), 5, -INFINITY);
			run_and_tell(&c, isa, "a logit of -inf");
		}
		case_make(&c, &shape, &pool, 6);
		case_span(&c, 1, 0, 0, 20);
		case_put(type, case_at(&c, true, 3, 0), 9, NAN);
		case_put(type, case_at(&c, true, 4, 0), 10, INFINITY);
		case_put(type, case_at(&c, true, 5, 0), 11, -INFINITY);
		case_run(&c, isa);
		o = c.spans[0].o;
		assert_true(isnan(o[9]) && isfinite(o[12]));
		assert_true(has_inf ? o[10] == INFINITY : isnan(o[10]));
		assert_true(has_inf ? o[11] == -INFINITY : isnan(o[11]));
		case_free(&c);
	}
}

/* Rows with deltas of their own beside rows without, both orders of pairs. */
static void delta_equals_fp64(void **state)
{
	struct case_pool pool = {.tokens = 200, .page_tokens = 64};
	static const int32_t deltas[] = {0, 1, -513, 131072, -1000000, INT32_MIN};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case c;
	uint32_t i, pairs;

	for (pairs = ROPE_HALVES; pairs <= ROPE_INTERLEAVED; pairs++) {
		case_make(&c, &shape, &pool, 7);
		c.rope.pairs = (uint8_t)pairs;
		for (i = 0; i < sizeof(deltas) / sizeof(deltas[0]); i++)
			case_span(&c, 7, 0, 0, 200)->delta = deltas[i];
		run_and_tell(&c, isa, pairs ? "deltas, interleaved" : "deltas, halves");
	}
}

/* How much of the turned q is lost: less than one rounding of it to bf16 would. */
static void delta_rounds_q_no_second_time(void **state)
{
	struct case_pool pool = {.tokens = 64, .page_tokens = 64};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct case_error error;
	struct attend_case c;

	case_make(&c, &shape, &pool, 8);
	case_span(&c, 64, 0, 0, 64)->delta = 4321;
	case_run(&c, isa);
	error = case_compare(&c);
	print_message("%s: logits of a turned q: %.1e\n", pick_name(isa), error.m);
	assert_true(error.m <= 2e-5);
	case_free(&c);
}

static void row_without_tokens_is_empty(void **state)
{
	struct case_pool pool = {.tokens = 40, .page_tokens = 16};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_span *span;
	struct attend_case c;
	uint32_t i;

	case_make(&c, &shape, &pool, 9);
	case_span(&c, 16, 0, 0, 40);
	case_span(&c, 5, 0, 17, 17);
	case_span(&c, 0, 0, 0, 40);
	case_selected(&c, 1, 0);
	span = case_selected(&c, 2, 3);
	for (i = 0; i < 3; i++)
		((uint32_t *)(uintptr_t)span->select)[i] = ATTEND_NONE;
	case_run(&c, isa);
	right(&c, isa);
	assert_true(span->l[0] == 0 && span->l[16] > 0);
	case_free(&c);
}

/* Each row sees its own tokens, whatever the others see, in any order of spans. */
static void limits_are_of_each_row(void **state)
{
	struct case_pool pool = {.tokens = 321, .page_tokens = 16, .first = 5};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case c;
	uint32_t i, begin;

	case_make(&c, &shape, &pool, 10);
	for (i = 0; i < 20; i++) {
		begin = i % 3 ? 0 : (uint32_t)case_random(&c.seed, 300);
		case_span(&c, 1 + i % 5, i, begin,
			  begin + (uint32_t)case_random(&c.seed, 322 - begin));
	}
	run_and_tell(&c, isa, "20 spans");
}

/* More rows than any kernel works on at a time, and more of o than L2 holds. */
static void many_rows_equal_fp64(void **state)
{
	struct case_pool pool = {.tokens = 40, .page_tokens = 16};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct case_error error;
	struct attend_case c;

	case_make(&c, &shape, &pool, 21);
	case_span(&c, 333, 0, 0, 40)->delta = 3;
	case_span(&c, 270, 0, 0, 40);
	c.spans[1].rows--;
	c.spans[1].o++; /* not aligned */
	case_run(&c, isa);
	error = right(&c, isa);
	tell("602 rows", isa, &error);
	c.spans[1].o--;
	case_free(&c);
}

static bool same_outputs(const struct attend_case *a, const struct attend_case *b)
{
	uint32_t i;

	for (i = 0; i < a->span_count; i++) {
		const struct attend_span *x = &a->spans[i], *y = &b->spans[i];

		if (memcmp(x->o, y->o, x->rows * a->shape.dv * sizeof(float)) ||
		    memcmp(x->m, y->m, x->rows * sizeof(float)) ||
		    memcmp(x->l, y->l, x->rows * sizeof(float)))
			return false;
	}
	return true;
}

/* Requesters of all kinds in one call get the bits that each gets alone. */
static void batch_changes_no_bit(void **state)
{
	struct case_pool pool = {.tokens = 300, .page_tokens = 16, .scattered = true};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 128)};
	struct attend_case c, alone;
	uint32_t i, j;

	for (i = 0; i < 2; i++) {
		struct attend_case *both[] = {&c, &alone};

		for (j = 0; j < 2; j++) {
			case_make(both[j], &shapes[i], &pool, 11);
			case_span(both[j], 16, 0, 0, 300);
			case_span(both[j], 8, 0, 0, 300)->delta = 99;
			case_selected(both[j], 2, 50);
			case_span(both[j], 17, 3, 0, 300)->delta = -5;
			case_span(both[j], 1, 9, 0, 300);
			case_span(both[j], 64, 0, 10, 299);
		}
		case_run(&c, isa);
		right(&c, isa);
		case_run_each(&alone, isa);
		assert_true(same_outputs(&c, &alone));
		case_free(&c);
		case_free(&alone);
	}
}

/* Everything in the chunk that a row does not attend to becomes NaN and infinite: the
 * same bits. What lies around the chunk is so from the start. */
static void poison_changes_no_bit(void **state)
{
	struct case_pool pool = {.tokens = 203, .page_tokens = 16, .scattered = true};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 64)};
	struct attend_case c, clean;
	uint32_t i, j, t, h, d;

	for (i = 0; i < 2; i++) {
		struct attend_case *both[] = {&c, &clean};

		for (j = 0; j < 2; j++) {
			case_make(both[j], &shapes[i], &pool, 12);
			case_span(both[j], 16, 0, 0, 100);
			case_span(both[j], 16, 0, 0, 101);
			case_span(both[j], 16, 0, 40, 90);
			case_span(both[j], 3, 0, 0, 203); /* sees the poison */
		}
		for (t = 101; t < 203; t++)
			for (h = 0; h < c.shape.kv_heads; h++)
				for (d = 0; d < c.shape.dv; d++) {
					case_put(VALUE_BF16, case_at(&c, false, t, h), d,
						 t % 2 ? NAN : INFINITY);
					case_put(VALUE_BF16, case_at(&c, true, t, h), d,
						 t % 2 ? NAN : INFINITY);
				}
		case_run(&c, isa);
		case_run(&clean, isa);
		right(&clean, isa);
		assert_true(isnan(c.spans[3].o[0]));
		c.span_count = clean.span_count = 3;
		assert_true(same_outputs(&c, &clean));
		c.span_count = clean.span_count = 4;
		case_free(&c);
		case_free(&clean);
	}
}

/* Where K and V begin at one address, each goes on by a stride of its own. */
static void fields_at_one_address_have_own_strides(void **state)
{
	struct case_pool pool = {.tokens = 40, .page_tokens = 40};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(4, 1, 64);
	struct attend_case c;

	case_make(&c, &shape, &pool, 12);
	case_span(&c, 16, 0, 0, 20);
	c.kv.v = c.kv.k;
	c.kv.v.token_stride *= 2;
	case_run(&c, isa);
	right(&c, isa);
	case_free(&c);
}

/* The last token ends where memory ends, and the first begins where it begins. */
static void memory_after_the_last_token_is_not_read(void **state)
{
	enum pick_isa isa = case_isa(state);
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 8, 64)};
	struct attend_case c;
	uint32_t i, tokens;

	for (i = 0; i < 2; i++)
		for (tokens = 1; tokens < 70; tokens += 1 + tokens / 8) {
			struct case_pool pool = {.tokens = tokens, .page_tokens = 1};

			case_make(&c, &shapes[i], &pool, 13);
			case_span(&c, 16, 0, 0, tokens);
			case_run(&c, isa);
			right(&c, isa);
			case_free(&c);
		}
}

static void nan_in_a_row_stays_in_it(void **state)
{
	struct case_pool pool = {.tokens = 100, .page_tokens = 16};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case c, clean;
	uint32_t d, row;

	case_make(&c, &shape, &pool, 14);
	case_make(&clean, &shape, &pool, 14);
	case_span(&c, 40, 0, 0, 100);
	case_span(&clean, 40, 0, 0, 100);
	case_put(VALUE_BF16, (void *)(uintptr_t)c.spans[0].q, 17 * 576 + 3, NAN);
	case_put(VALUE_BF16, (void *)(uintptr_t)c.spans[0].q, 18 * 576 + 570, INFINITY);
	case_run(&c, isa);
	case_run(&clean, isa);
	for (row = 17; row <= 18; row++) {
		assert_true(isnan(c.spans[0].l[row]));
		for (d = 0; d < 512; d++) {
			assert_true(isnan(c.spans[0].o[row * 512 + d]));
			c.spans[0].o[row * 512 + d] = clean.spans[0].o[row * 512 + d];
		}
		c.spans[0].l[row] = clean.spans[0].l[row];
		c.spans[0].m[row] = clean.spans[0].m[row];
	}
	assert_true(same_outputs(&c, &clean));
	case_free(&c);
	case_free(&clean);
}

/* A logit of -inf is no weight; logits that are far apart neither overflow nor vanish. */
static void extreme_logits_are_exact(void **state)
{
	struct case_pool pool = {.tokens = 90, .page_tokens = 16};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct case_error error;
	struct attend_case c;
	uint32_t t;

	shape.scale = 60.0f / 24; /* weights from 1 to 0 */
	case_make(&c, &shape, &pool, 15);
	case_span(&c, 33, 0, 0, 90);
	case_run(&c, isa);
	error = case_compare(&c);
	tell("logits of 60", isa, &error);
	assert_true(error.rms <= (rounds(isa, &shape) ? 2e-3 : 1e-4));
	for (t = 0; t < 90; t++)
		if (t != 33)
			case_put(VALUE_BF16, case_at(&c, false, t, 0), 575, -INFINITY);
	for (t = 0; t < 33; t++)
		case_put(VALUE_BF16, (void *)(uintptr_t)c.spans[0].q, t * 576 + 575, 1);
	case_run(&c, isa);
	for (t = 0; t < 512; t++)
		assert_true(fabs((double)c.spans[0].o[t] -
				 case_value(VALUE_BF16, case_at(&c, true, 33, 0), t)) <
			    1e-6);
	if (isa == PICK_REF) /* beside an m that is rounded */
		assert_true(fabsf(c.spans[0].l[0] - 1) < 1e-5f);
	else
		assert_true(c.spans[0].l[0] == 1);
	case_put(VALUE_BF16, case_at(&c, false, 33, 0), 575, -INFINITY);
	case_run(&c, isa);
	assert_true(c.spans[0].l[0] == 0 && c.spans[0].m[0] == -INFINITY &&
		    c.spans[0].o[0] == 0);
	case_free(&c);
}

/* A merge weighs parts by l and m together. The reference's logits are fp64, and what its
 * m loses by rounding is in its l. */
static void reference_l_matches_m(void **state)
{
	struct case_pool pool = {.tokens = 20, .page_tokens = 16};
	struct attend_shape shape = case_mla(16);
	double o[512], m, l, off;
	struct attend_case c;
	uint32_t row;

	(void)state;
	shape.scale = 100;
	case_make(&c, &shape, &pool, 15);
	case_span(&c, 16, 0, 0, 20);
	case_run(&c, PICK_REF);
	for (row = 0; row < 16; row++) {
		case_oracle(&c, &c.spans[0], row, o, &m, &l);
		off = (double)c.spans[0].m[row] - m + log(c.spans[0].l[row]) - log(l);
		assert_true(fabs(off) < 2e-7);
	}
	c.shape.scale = 1e25f;
	case_run(&c, PICK_REF);
	for (row = 0; row < 16; row++)
		assert_true(c.spans[0].l[row] >= 1 && c.spans[0].l[row] <= 20);
	case_free(&c);
}

struct countdown {
	uint32_t asked, stop_at;
};

static bool on_stop(void *arg)
{
	struct countdown *count = arg;

	return ++count->asked >= count->stop_at;
}

/* Stopped wherever it asks; and it asks at least once for so many rows and tokens as are
 * 200 us of work on a slow core. */
static void stop_ends_it_within_a_slice(void **state)
{
	struct case_pool pool = {.tokens = 600, .page_tokens = 64};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	uint32_t slice = isa == PICK_REF ? 16 : isa >= PICK_BF16 ? 32 * 128 : 64 * 16;
	struct countdown count = {.stop_at = UINT32_MAX};
	struct attend_job job = {.shape = &shape, .stop = on_stop, .stop_arg = &count};
	struct attend_case c;
	uint32_t all, i;

	case_make(&c, &shape, &pool, 16);
	case_span(&c, 80, 0, 0, 600);
	case_run(&c, isa);
	job.kv = &c.kv;
	job.spans = c.spans;
	job.span_count = 1;
	assert_int_equal(attend_run(isa, &job, c.scratch), ATTEND_DONE);
	all = count.asked;
	print_message("%s asks %u times in %u rows and tokens\n", pick_name(isa), all,
		      80 * 600);
	assert_true(all * slice >= 80 * 600);
	for (i = 1; i <= 4; i++) {
		count = (struct countdown){.stop_at = 1 + (all - 1) * i / 4};
		assert_int_equal(attend_run(isa, &job, c.scratch), ATTEND_STOPPED);
		assert_int_equal(count.asked, count.stop_at);
	}
	case_run(&c, isa);
	right(&c, isa);
	case_free(&c);
}

/* Rows are gathered for each head, which takes as long as many of them are, whatever
 * there is to attend to. */
static void stop_is_seen_between_heads(void **state)
{
	struct case_pool pool = {.tokens = 16, .page_tokens = 16};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(8, 8, 64);
	struct countdown count = {.stop_at = UINT32_MAX};
	struct attend_job job = {.shape = &shape, .stop = on_stop, .stop_arg = &count};
	struct attend_case c;

	case_make(&c, &shape, &pool, 16);
	case_span(&c, 80, 0, 0, 0);
	case_run(&c, isa);
	job.kv = &c.kv;
	job.spans = c.spans;
	job.span_count = 1;
	assert_int_equal(attend_run(isa, &job, c.scratch), ATTEND_DONE);
	assert_true(count.asked >= shape.kv_heads);
	count = (struct countdown){.stop_at = 3};
	assert_int_equal(attend_run(isa, &job, c.scratch), ATTEND_STOPPED);
	assert_int_equal(count.asked, 3);
	case_free(&c);
}

static struct attend_shape any_shape(uint64_t *seed)
{
	static const float caps[] = {0, 0, 0, 5};
	uint16_t kv_heads = (uint16_t)(1 + case_random(seed, 3));
	struct attend_shape shape =
		case_gqa((uint16_t)(kv_heads * (1 + case_random(seed, 6))), kv_heads, 16);

	shape.dqk = (uint16_t)(16 * (1 + case_random(seed, 12)));
	shape.dv = (uint16_t)(16 * (1 + case_random(seed, 12)));
	if (case_random(seed, 2)) {
		shape.kind = ATTEND_MLA;
		shape.kv_heads = 1;
		shape.dv = shape.dv < shape.dqk ? shape.dv : shape.dqk;
	}
	if (case_random(seed, 3)) { /* of AMX's */
		shape.dqk = (uint16_t)((shape.dqk + 31) / 32 * 32);
		shape.dv = (uint16_t)((shape.dv + 31) / 32 * 32);
		if (shape.kind == ATTEND_MLA && shape.dv > shape.dqk)
			shape.dv = shape.dqk;
	} else {
		shape.q_type = (uint8_t)case_random(seed, VALUE_TYPES);
		shape.kv_type = (uint8_t)case_random(seed, VALUE_TYPES);
	}
	shape.scale = (float)(1 / sqrt(shape.dqk));
	shape.softcap = caps[case_random(seed, 4)];
	return shape;
}

static void any_spans(struct attend_case *c, uint32_t tokens)
{
	uint32_t i, n = 1 + (uint32_t)case_random(&c->seed, 6), begin, end;
	struct attend_span *span;

	c->rope.first = (uint16_t)case_random(&c->seed, c->shape.dqk);
	c->rope.dims = (uint16_t)((c->shape.dqk - c->rope.first) / 2 * 2);
	c->rope.pairs = (uint8_t)case_random(&c->seed, 2);
	for (i = 0; i < n; i++) {
		if (case_random(&c->seed, 4) == 0) {
			case_selected(c, 1 + (uint32_t)case_random(&c->seed, 3),
				      (uint32_t)case_random(&c->seed, 150));
			continue;
		}
		begin = case_random(&c->seed, 2)
				? 0
				: (uint32_t)case_random(&c->seed, tokens + 1);
		end = case_random(&c->seed, 2)
			      ? tokens
			      : begin + (uint32_t)case_random(&c->seed,
							      tokens - begin + 1);
		span = case_span(c, (uint32_t)case_random(&c->seed, 40),
				 (uint32_t)case_random(&c->seed, 50), begin, end);
		if (case_random(&c->seed, 2))
			span->delta = (int32_t)case_random(&c->seed, 5000) - 2500;
	}
}

static void any_shape_equals_fp64(void **state)
{
	enum pick_isa isa = case_isa(state);
	struct case_error error, most = {0};
	uint64_t seed;

	for (seed = 0; seed < FUZZ; seed++) {
		uint64_t dice = seed * 1000 + 17;
		struct attend_shape shape = any_shape(&dice);
		struct case_pool pool = {
			.tokens = (uint32_t)case_random(&dice, 4)
					  ? (uint32_t)case_random(&dice, 400)
					  : (uint32_t)case_random(&dice, 20),
			.page_tokens = 1 + (uint32_t)case_random(&dice, 40),
			.first = (uint32_t)case_random(&dice, 30),
			.scattered = case_random(&dice, 2),
			.heads_first = case_random(&dice, 2),
			.k_scaled = shape.kv_type == VALUE_E4M3,
			.v_scaled = shape.kv_type == VALUE_E4M3,
		};
		struct attend_case c;

		case_make(&c, &shape, &pool, seed);
		any_spans(&c, pool.tokens);
		case_run(&c, isa);
		error = right(&c, isa);
		most.rms = fmax(most.rms, error.rms);
		most.worst = fmax(most.worst, error.worst);
		most.most = fmax(most.most, error.most);
		most.m = fmax(most.m, error.m);
		most.l = fmax(most.l, error.l);
		case_free(&c);
	}
	tell("any shapes", isa, &most);
}

static void shape_out_of_limits_is_refused(void **state)
{
	struct attend_shape good = case_gqa(8, 2, 64), shape;

	(void)state;
	assert_null(attend_shape_fault(&good));
#define REFUSED(member, value)                               \
	do {                                                 \
		shape = good;                                \
		shape.member = (value);                      \
		assert_non_null(attend_shape_fault(&shape)); \
	} while (0)
	REFUSED(kind, 2);
	REFUSED(q_type, VALUE_TYPES);
	REFUSED(kv_type, 255);
	REFUSED(heads, 0);
	REFUSED(heads, 9);
	REFUSED(kv_heads, 0);
	REFUSED(dqk, 0);
	REFUSED(dqk, 65);
	REFUSED(dqk, 1040);
	REFUSED(dv, 8);
	REFUSED(scale, NAN);
	REFUSED(softcap, -1);
	REFUSED(softcap, INFINITY);
	REFUSED(softcap, NAN);
	REFUSED(softcap, 1e-39f);
	REFUSED(scale, INFINITY);
	REFUSED(kind, ATTEND_MLA); /* two KV heads */
	good = case_mla(16);
	assert_null(attend_shape_fault(&good));
	REFUSED(dv, 592);
#undef REFUSED
}

static void job_out_of_limits_is_refused(void **state)
{
	struct case_pool pool = {.tokens = 50, .page_tokens = 16};
	struct attend_shape shape = case_mla(16);
	struct attend_case c;
	struct attend_job job;
	struct attend_span span;
	uint32_t select[] = {0, 49, ATTEND_NONE, 7};

	(void)state;
	case_make(&c, &shape, &pool, 20);
	span = (struct attend_span){.rows = 16, .end = 50};
	job = (struct attend_job){
		.shape = &c.shape, .kv = &c.kv, .spans = &span, .span_count = 1};
	assert_null(attend_job_fault(&job));
	span.end = 51;
	assert_non_null(attend_job_fault(&job));
	span.end = 5;
	span.begin = 6;
	assert_non_null(attend_job_fault(&job));
	span.begin = 0;
	span.delta = 1;
	assert_non_null(attend_job_fault(&job)); /* no rope */
	job.rope = &c.rope;
	assert_null(attend_job_fault(&job));
	span.select = select;
	span.per_token = 4;
	assert_non_null(attend_job_fault(&job)); /* a delta */
	span.delta = 0;
	assert_null(attend_job_fault(&job));
	select[1] = 50;
	assert_non_null(attend_job_fault(&job));
	span.select = NULL;
	span.rows = ATTEND_ROWS_MAX + 1;
	assert_non_null(attend_job_fault(&job));
	span.rows = 1;
	c.rope.dims = 66;
	assert_non_null(attend_job_fault(&job));
	c.rope.dims = 64;
	c.rope.pairs = 2;
	assert_non_null(attend_job_fault(&job));
	c.rope.pairs = 0;
	c.shape.dqk = 2 * ROPE_PAIRS_MAX + 64;
	c.rope.first = 0;
	c.rope.dims = 2 * ROPE_PAIRS_MAX;
	assert_null(attend_job_fault(&job));
	c.rope.dims += 2;
	assert_non_null(attend_job_fault(&job));
	c.rope.dims = 64;
	c.kv.v_scale = c.kv.k;
	assert_non_null(attend_job_fault(&job)); /* of bf16 */
	c.shape.kv_type = VALUE_E4M3;
	assert_null(attend_job_fault(&job));
	c.kv.page_tokens = 0;
	assert_non_null(attend_job_fault(&job));
	case_free(&c);
}

/* Two rows are of two query tokens where the first is a token's last head. */
static void spans_out_of_limits_are_refused(void **state)
{
	static struct attend_span spans[ATTEND_ROWS_MAX + 1];
	const uint32_t select[] = {0, 49, 7, 50};
	struct attend_shape shape = case_mla(16);
	struct attend_kv kv = {.tokens = 50, .page_tokens = 16};
	struct attend_job job = {
		.shape = &shape, .kv = &kv, .spans = spans, .span_count = 1};

	(void)state;
	spans[0] = (struct attend_span){
		.rows = 2, .first = 14, .select = select, .per_token = 2};
	assert_null(attend_job_fault(&job));
	spans[0].first = 15;
	assert_non_null(attend_job_fault(&job));
	spans[0] = (struct attend_span){.rows = 1, .first = UINT32_MAX - ATTEND_ROWS_MAX};
	assert_null(attend_job_fault(&job));
	spans[0].first++;
	assert_non_null(attend_job_fault(&job));
	spans[0].first = 0;
	job.span_count = ATTEND_ROWS_MAX;
	assert_null(attend_job_fault(&job));
	job.span_count++;
	assert_non_null(attend_job_fault(&job));
}

static void pick_falls_to_the_next_slower(void **state)
{
	struct attend_shape shape = case_mla(16);
	enum pick_isa isa, fastest = PICK_AUTO;
	uint32_t i;

	(void)state;
	for (i = 0; i < PICK_ISAS; i++) {
		assert_true(pick_by_name(pick_name((enum pick_isa)i), &isa));
		assert_int_equal(isa, i);
		if (pick_has(isa))
			fastest = isa;
		print_message("%s: %s\n", pick_name(isa), pick_has(isa) ? "yes" : "no");
	}
	assert_false(pick_by_name("sse9", &isa));
	assert_true(pick_has(PICK_REF) && pick_has(PICK_VECTOR));
	assert_ptr_equal(pick_kernel(PICK_AUTO, &shape), pick_kernel(fastest, &shape));
	shape.kv_type = VALUE_FP16;
	assert_ptr_equal(pick_kernel(PICK_AMX, &shape), pick_kernel(PICK_AVX512, &shape));
}

#define PER_KERNEL(X)                              \
	X(mla_equals_fp64)                         \
	X(gqa_equals_fp64)                         \
	X(selection_equals_fp64)                   \
	X(types_equal_fp64)                        \
	X(softcap_equals_fp64)                     \
	X(types_keep_nan_and_infinity)             \
	X(delta_equals_fp64)                       \
	X(delta_rounds_q_no_second_time)           \
	X(row_without_tokens_is_empty)             \
	X(limits_are_of_each_row)                  \
	X(many_rows_equal_fp64)                    \
	X(batch_changes_no_bit)                    \
	X(poison_changes_no_bit)                   \
	X(fields_at_one_address_have_own_strides)  \
	X(memory_after_the_last_token_is_not_read) \
	X(nan_in_a_row_stays_in_it)                \
	X(extreme_logits_are_exact)                \
	X(stop_ends_it_within_a_slice)             \
	X(stop_is_seen_between_heads)              \
	X(any_shape_equals_fp64)

int main(void)
{
	const struct CMUnitTest tests[] = {
		PER_KERNEL(CASE_PER_ISA) cmocka_unit_test(reference_l_matches_m),
		cmocka_unit_test(shape_out_of_limits_is_refused),
		cmocka_unit_test(job_out_of_limits_is_refused),
		cmocka_unit_test(spans_out_of_limits_are_refused),
		cmocka_unit_test(pick_falls_to_the_next_slower),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
