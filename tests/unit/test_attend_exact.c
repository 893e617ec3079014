/* SPDX-License-Identifier: Apache-2.0 */
/* What routing claims: a chunk's parts attended to apart and merged are the chunk
 * attended to at once, also when o crosses as bf16; a query turned back is a chunk
 * spliced; and chosen tokens must keep their positions. For each kernel, against fp64.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/math/merge.h"
#include "tests/lib/attend_case.h"
#include "tests/lib/sweep.h"

#define PARTS_MOST 7u
#define ROWS 32u
#define TOKENS 420u

/* Spans 0 … parts - 1 merged in an order that begins with `from`, into span `parts`. */
static void merge_spans(struct attend_case *c, uint32_t parts, uint32_t from)
{
	struct merge_part part[PARTS_MOST];
	struct attend_span *out = &c->spans[parts];
	uint32_t i;

	for (i = 0; i < parts; i++) {
		const struct attend_span *span = &c->spans[(i + from) % parts];

		part[i] = (struct merge_part){span->o, span->m, span->l};
	}
	merge_rows(out->o, out->m, out->l, part, parts, out->rows, c->shape.dv);
}

/* The error of span `parts` alone. */
static struct case_error error_of(struct attend_case *c, uint32_t parts)
{
	struct attend_span first = c->spans[0];
	uint32_t count = c->span_count;
	struct case_error error;

	c->spans[0] = c->spans[parts];
	c->span_count = 1;
	error = case_compare(c);
	c->spans[0] = first;
	c->span_count = count;
	return error;
}

static void same_q(struct attend_case *c, uint32_t parts)
{
	size_t bytes = (size_t)ROWS * c->shape.dqk * value_bytes(c->shape.q_type);
	uint32_t i;

	for (i = 0; i < parts; i++)
		memcpy((void *)(uintptr_t)c->spans[i].q, c->spans[parts].q, bytes);
}

/* A chunk in `parts` contiguous pieces of different lengths, then the whole. */
static void make_contiguous(struct attend_case *c, const struct attend_shape *shape,
			    uint32_t parts)
{
	struct case_pool pool = {.tokens = TOKENS, .page_tokens = 16, .scattered = true};
	uint32_t i, begin = 0, end;

	case_make(c, shape, &pool, 100 + parts);
	for (i = 0; i < parts; i++, begin = end) {
		end = i + 1 == parts ? TOKENS
				     : TOKENS * (i + 1) * (i + 2) / parts / (parts + 1);
		case_span(c, ROWS, 0, begin, end);
	}
	case_span(c, ROWS, 0, 0, TOKENS);
	same_q(c, parts);
}

/* Each token belongs to any of the parts; the whole is a selection of all. */
static void make_scattered(struct attend_case *c, const struct attend_shape *shape,
			   uint32_t parts)
{
	struct case_pool pool = {.tokens = TOKENS, .page_tokens = 16};
	uint32_t i, j, t, owner[TOKENS];

	case_make(c, shape, &pool, 200 + parts);
	for (t = 0; t < TOKENS; t++)
		owner[t] = (uint32_t)case_random(&c->seed, parts);
	for (i = 0; i <= parts; i++) {
		struct attend_span *span = case_selected(c, ROWS / shape->heads, TOKENS);
		uint32_t *select = (uint32_t *)(uintptr_t)span->select;

		for (j = 0; j < ROWS / shape->heads; j++)
			for (t = 0; t < TOKENS; t++)
				select[j * TOKENS + t] =
					i == parts || owner[t] == i ? t : ATTEND_NONE;
	}
	same_q(c, parts);
}

typedef void (*maker)(struct attend_case *c, const struct attend_shape *shape,
		      uint32_t parts);

static void partition(enum pick_isa isa, const struct attend_shape *shape, maker make,
		      const char *what)
{
	struct case_error single, merged;
	struct attend_case c;
	uint32_t parts;

	for (parts = 1; parts <= PARTS_MOST; parts++) {
		if (sweep_leaves_out(parts, 3))
			continue;
		make(&c, shape, parts);
		case_run(&c, isa);
		single = error_of(&c, parts);
		merge_spans(&c, parts, 0);
		merged = error_of(&c, parts);
		print_message("%s, %s, K = %u: merged %.1e, single %.1e of %.2f\n",
			      pick_name(isa), what, parts, merged.worst, single.worst,
			      single.most);
		assert_true(merged.worst <= 2 * single.worst + 1e-6 * single.most);
		assert_true(merged.m <= single.m + 1e-6);
		assert_true(merged.l <= 2 * single.l + 1e-6);
		case_free(&c);
	}
}

static void partition_is_exact(void **state)
{
	enum pick_isa isa = case_isa(state);
	struct attend_shape mla = case_mla(16), gqa = case_gqa(16, 4, 128);

	partition(isa, &mla, make_contiguous, "MLA contiguous");
	partition(isa, &mla, make_scattered, "MLA scattered");
	partition(isa, &gqa, make_contiguous, "GQA contiguous");
	partition(isa, &gqa, make_scattered, "GQA scattered");
}

/* sum of w_i |o_i| / l of a value, in fp64. */
static double weighted(const struct attend_case *c, uint32_t parts, uint32_t row,
		       uint32_t d)
{
	double m = -INFINITY, l = 0, sum = 0, w;
	uint32_t i;

	for (i = 0; i < parts; i++)
		m = fmax(m, (double)c->spans[i].m[row]);
	for (i = 0; i < parts; i++) {
		w = (double)c->spans[i].l[row] * exp((double)c->spans[i].m[row] - m);
		l += w;
		sum += w * fabs((double)c->spans[i].o[row * c->shape.dv + d]);
	}
	return sum / l;
}

static void bf16_on_the_wire_is_within_its_bound(void **state)
{
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	uint32_t parts, i, n = ROWS * shape.dv;
	struct attend_case c;
	float *exact = malloc(n * sizeof(*exact));
	uint16_t *wire = malloc(n * sizeof(*wire));

	for (parts = 1; parts <= PARTS_MOST; parts++) {
		double worst = 0, off, sums[2] = {0};

		if (sweep_leaves_out(parts, 3))
			continue;
		make_contiguous(&c, &shape, parts);
		case_run(&c, isa);
		merge_spans(&c, parts, 0);
		memcpy(exact, c.spans[parts].o, n * sizeof(*exact));
		for (i = 0; i < parts; i++) {
			value_narrow(VALUE_BF16, wire, c.spans[i].o, n);
			value_widen(VALUE_BF16, c.spans[i].o, wire, n);
		}
		merge_spans(&c, parts, 0);
		for (i = 0; i < n; i++) {
			off = fabs((double)c.spans[parts].o[i] - (double)exact[i]);
			sums[0] += off * off;
			sums[1] += (double)exact[i] * (double)exact[i];
			off /= weighted(&c, parts, i / shape.dv, i % shape.dv) * 0x1p-8;
			worst = fmax(worst, off);
		}
		print_message("%s, K = %u: o in bf16 has %.2f of its bound, rms %.1e\n",
			      pick_name(isa), parts, worst, sqrt(sums[0] / sums[1]));
		assert_true(worst <= 1 + 1e-4); /* the bound is of rounded o, too */
		assert_true(sqrt(sums[0] / sums[1]) <= 2e-3);
		case_free(&c);
	}
	free(exact);
	free(wire);
}

/* Any order is within 2^-21 of the weighted |o|. */
static void any_order_is_within_its_bound(void **state)
{
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	uint32_t from, i, n = ROWS * shape.dv;
	float *first = malloc(n * sizeof(*first));
	struct attend_case c;
	double worst = 0, off;

	make_scattered(&c, &shape, PARTS_MOST);
	case_run(&c, isa);
	merge_spans(&c, PARTS_MOST, 0);
	memcpy(first, c.spans[PARTS_MOST].o, n * sizeof(*first));
	for (from = 1; from < PARTS_MOST; from++) {
		merge_spans(&c, PARTS_MOST, from);
		for (i = 0; i < n; i++) {
			off = fabs((double)c.spans[PARTS_MOST].o[i] - (double)first[i]);
			off /= weighted(&c, PARTS_MOST, i / shape.dv, i % shape.dv) *
			       0x1p-21;
			worst = fmax(worst, off);
		}
	}
	print_message("%s: orders differ by %.2f of the bound\n", pick_name(isa), worst);
	assert_true(worst <= 1);
	case_free(&c);
	free(first);
}

/* The whole chunk's k turned by `delta`, in place. */
static void splice_case(struct attend_case *c, int64_t delta)
{
	struct rope_turn turn;
	uint32_t t, h;
	struct splice splice = {&turn, c->shape.kv_type, c->shape.dqk, 0, 0};

	rope_turn_make(&turn, &c->rope, delta);
	for (t = 0; t < c->kv.tokens; t++)
		for (h = 0; h < c->shape.kv_heads; h++)
			splice_rows(&splice, case_at(c, false, t, h),
				    case_at(c, false, t, h), 1);
}

static double rms_between(const struct attend_case *a, const struct attend_case *b)
{
	double sums[2] = {0}, x, y;
	uint32_t i;

	for (i = 0; i < a->spans[0].rows * a->shape.dv; i++) {
		x = (double)a->spans[0].o[i];
		y = (double)b->spans[0].o[i];
		sums[0] += (x - y) * (x - y);
		sums[1] += x * x;
	}
	return sqrt(sums[0] / sums[1]);
}

/* YaRN (arXiv 2309.00071, and its reference code): low frequencies divided by the factor,
 * high ones kept, a ramp between; the keys in the cache are longer by mscale, which no
 * turn changes. */
static void yarn(struct attend_case *c, double factor, double original)
{
	double turns[2] = {32, 1}, edge[2];
	uint32_t i, n = c->rope.dims / 2;

	for (i = 0; i < 2; i++)
		edge[i] = c->rope.dims * log(original / (turns[i] * 2 * M_PI)) /
			  (2 * log(10000));
	edge[0] = fmax(floor(edge[0]), 0);
	edge[1] = fmin(ceil(edge[1]), c->rope.dims - 1);
	for (i = 0; i < n; i++) {
		double ramp = (i - edge[0]) / (edge[1] - edge[0]);

		ramp = fmin(fmax(ramp, 0), 1);
		c->inv_freq[i] *= ramp / factor + (1 - ramp);
	}
}

static void splice_is_a_turned_query(void **state)
{
	static const char *const orders[] = {"halves", "interleaved"};
	struct case_pool pool = {.tokens = 256, .page_tokens = 64};
	static const int32_t deltas[] = {1, -300, 4096, 131072};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 128)};
	struct attend_case turned, spliced;
	uint32_t i, j, pairs, scaled;
	double rms;

	for (i = 0; i < 16; i++)
		for (j = 0; j < 4; j++) {
			struct attend_case *both[] = {&turned, &spliced};
			uint32_t k;

			pairs = i & 1;
			scaled = i >> 1 & 1;
			if (i >> 3)
				continue;
			for (k = 0; k < 2; k++) {
				case_make(both[k], &shapes[i >> 2 & 1], &pool, 30 + i);
				both[k]->rope.pairs = (uint8_t)pairs;
				if (scaled)
					yarn(both[k], 40, 4096);
				case_span(both[k], ROWS, 0, 0, 256);
			}
			turned.spans[0].delta = deltas[j];
			splice_case(&spliced, deltas[j]);
			case_run(&turned, isa);
			case_run(&spliced, isa);
			rms = rms_between(&turned, &spliced);
			print_message("%s, %s, %s%s, delta %d: rms %.1e\n",
				      pick_name(isa), i >> 2 & 1 ? "GQA" : "MLA",
				      orders[pairs], scaled ? " of YaRN" : "", deltas[j],
				      rms);
			assert_true(rms > 0 && rms <= 4e-3);
			case_free(&turned);
			case_free(&spliced);
		}
}

/* The other order of pairs, or no turn, is not nearly right: the test above can fail. */
static void wrong_turn_differs(void **state)
{
	struct case_pool pool = {.tokens = 256, .page_tokens = 64};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(8, 2, 128);
	struct attend_case turned, spliced;
	double rms;

	case_make(&turned, &shape, &pool, 50);
	case_make(&spliced, &shape, &pool, 50);
	case_span(&turned, ROWS, 0, 0, 256)->delta = 300;
	case_span(&spliced, ROWS, 0, 0, 256);
	turned.rope.pairs = ROPE_INTERLEAVED;
	splice_case(&spliced, 300);
	case_run(&turned, isa);
	case_run(&spliced, isa);
	rms = rms_between(&turned, &spliced);
	print_message("%s: the other order of pairs, rms %.2f\n", pick_name(isa), rms);
	assert_true(rms >= 0.1);
	case_free(&turned);
	case_free(&spliced);
}

/* delta 0 and a query or chunk that was never touched are the same bits. */
static void delta_of_zero_is_bit_identity(void **state)
{
	struct case_pool pool = {.tokens = 100, .page_tokens = 64};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_mla(16);
	struct attend_case a, b;

	case_make(&a, &shape, &pool, 60);
	case_make(&b, &shape, &pool, 60);
	case_span(&a, ROWS, 0, 0, 100);
	case_span(&b, ROWS, 0, 0, 100)->delta = 0;
	splice_case(&b, 0);
	assert_memory_equal(a.memory, b.memory, a.memory_bytes - 4096);
	case_run(&a, isa);
	case_run(&b, isa);
	assert_memory_equal(a.spans[0].o, b.spans[0].o, ROWS * 512 * sizeof(float));
	case_free(&a);
	case_free(&b);
}

/* Chosen tokens re-rotated to lie one behind the other: another answer, so the API takes
 * no delta with a selection (test_attend). */
static void rehomed_selection_differs(void **state)
{
	struct case_pool pool = {.tokens = 2000, .page_tokens = 64};
	enum pick_isa isa = case_isa(state);
	struct attend_shape shape = case_gqa(8, 2, 128);
	struct attend_case own, moved;
	struct rope_turn turn;
	struct splice splice = {&turn, VALUE_BF16, 128, 0, 0};
	uint32_t i, t, h, select[64];
	double rms;

	shape.scale *= 2;
	case_make(&own, &shape, &pool, 70);
	case_make(&moved, &shape, &pool, 70);
	for (i = 0; i < 64; i++)
		select[i] = i * 31 + (uint32_t)case_random(&own.seed, 31);
	moved.seed = own.seed;
	for (i = 0; i < 2; i++) {
		struct attend_case *c = i ? &moved : &own;
		struct attend_span *span = case_selected(c, 4, 64);

		for (t = 0; t < 4; t++)
			memcpy((uint32_t *)(uintptr_t)span->select + t * 64, select,
			       sizeof(select));
	}
	for (i = 0; i < 64; i++) {
		t = select[i];
		rope_turn_make(&turn, &moved.rope, (int64_t)i - t);
		for (h = 0; h < 2; h++)
			splice_rows(&splice, case_at(&moved, false, t, h),
				    case_at(&own, false, t, h), 1);
	}
	case_run(&own, isa);
	case_run(&moved, isa);
	rms = rms_between(&own, &moved);
	print_message("%s: a re-homed selection, rms %.2f\n", pick_name(isa), rms);
	assert_true(rms >= 0.3);
	case_free(&own);
	case_free(&moved);
}

#define PER_KERNEL(X)                           \
	X(partition_is_exact)                   \
	X(bf16_on_the_wire_is_within_its_bound) \
	X(any_order_is_within_its_bound)        \
	X(splice_is_a_turned_query)             \
	X(wrong_turn_differs)                   \
	X(delta_of_zero_is_bit_identity)        \
	X(rehomed_selection_differs)

int main(void)
{
	const struct CMUnitTest tests[] = {PER_KERNEL(CASE_PER_ISA)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
