/* SPDX-License-Identifier: Apache-2.0 */
/* gpu/attend.cu on fibers: attention against fp64 in two passes, what it may not read,
 * every number of parts and splits, merge and splice against daemon/math bit by bit, what
 * is refused. With a word: cases whose name has it.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/math/merge.h"
#include "gpu/attend_image.h"
#include "gpu/attend_plan.h"
#include "tests/gpu/attend_fiber.h"
#include "tests/lib/attend_case.h"

#define PARTS_MOST 7u

/* ---- running ---- */

struct memory {
	const struct attend_case *c;
	struct attend_plan_bytes bytes;
	uint8_t *image, *planes, *scratch;
};

static bool within(uint64_t address, uint64_t bytes, const void *base, uint64_t all)
{
	return address >= (uintptr_t)base && address + bytes <= (uintptr_t)base + all;
}

/* Of the chunk nothing but tokens: what is none is 0xff. */
static void *reach(void *arg, uint64_t address, uint64_t bytes, bool writing)
{
	const struct memory *m = arg;
	const struct attend_kv *kv = &m->c->kv;
	uint8_t *p = (uint8_t *)(uintptr_t)address;
	uint64_t i, poison = 0;

	if (within(address, bytes, m->planes, m->bytes.planes))
		return p;
	if (writing)
		return NULL;
	if (within(address, bytes, m->image, m->bytes.image))
		return p;
	if (kv->pages && within(address, bytes, kv->pages,
				((uint64_t)kv->first + kv->tokens + kv->page_tokens - 1) /
					kv->page_tokens * 4))
		return p;
	if (!within(address, bytes, m->c->memory, m->c->memory_bytes - 4096))
		return NULL;
	for (i = 0; i < bytes; i++)
		poison += p[i] == 0xff;
	return poison == bytes ? NULL : p;
}

static void *area(size_t bytes, int fill)
{
	void *p = NULL;

	assert_int_equal(posix_memalign(&p, 64, bytes + 64), 0);
	memset(p, fill, bytes + 64);
	return p;
}

static void launch(const char *kernel, uint32_t x, uint32_t y, const void *arg,
		   const struct kernels_reach *by)
{
	const char *fault = attend_fiber_run(kernel, x, y, arg, by);

	if (fault)
		fail_msg("%s: %s", kernel, fault);
}

/* Some of its spans as one job. */
static void run_spans(struct attend_case *c, const struct attend_span *spans,
		      uint32_t count, uint32_t splits)
{
	const struct attend_job job = {.shape = &c->shape,
				       .kv = &c->kv,
				       .rope = &c->rope,
				       .spans = spans,
				       .span_count = count};
	struct memory m = {.c = c, .bytes = attend_plan_size(&job, splits)};
	const struct kernels_reach by = {reach, &m};
	struct attend_plan plan;
	size_t bytes;

	assert_null(attend_job_fault(&job));
	assert_null(attend_plan_fault(&job));
	m.image = area(m.bytes.image, 0xee);
	m.planes = area(m.bytes.planes, 0xff);
	m.scratch = area(m.bytes.scratch, 0xff);
	attend_plan_make(&plan, &job, splits, m.image, (uintptr_t)m.image,
			 (uintptr_t)m.planes, m.scratch);
	if (plan.tiles) {
		launch(plan.kernel, plan.tiles, splits, &plan.kern, &by);
		if (splits > 1)
			launch("kvd_merge", 3, 1, &plan.merge, &by);
		attend_plan_take(&plan, m.planes + attend_plan_result(&plan, &bytes));
	}
	free(m.image);
	free(m.planes);
	free(m.scratch);
}

static void run(struct attend_case *c, uint32_t splits)
{
	run_spans(c, c->spans, c->span_count, splits);
}

static struct case_error right(const struct attend_case *c, const char *what)
{
	struct case_error error = case_compare(c);

	print_message("%s: rms %.1e, worst %.1e of %.2f, m %.1e, l %.1e\n", what,
		      error.rms, error.worst, error.most, error.m, error.l);
	assert_true(error.rms <= 2e-3); /* weights in bf16 */
	assert_true(error.worst <= 2e-2 * error.most);
	assert_true(error.m <= 2e-5);
	assert_true(error.l <= 2e-5);
	return error;
}

static bool same_span(const struct attend_case *c, const struct attend_span *x,
		      const struct attend_span *y)
{
	return memcmp(x->o, y->o, x->rows * c->shape.dv * sizeof(float)) == 0 &&
	       memcmp(x->m, y->m, x->rows * sizeof(float)) == 0 &&
	       memcmp(x->l, y->l, x->rows * sizeof(float)) == 0;
}

/* ---- attention ---- */

static void dense_equals_fp64(void **state)
{
	struct case_pool pool = {
		.tokens = 131, .page_tokens = 16, .scattered = true, .first = 5};
	struct attend_shape shapes[] = {case_mla(16), case_gqa(32, 8, 128),
					case_gqa(8, 2, 64)};
	static const char *const names[] = {"MLA", "GQA of 128", "GQA of 64"};
	struct attend_case c;

	(void)state;
	for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
		pool.heads_first = i == 2;
		case_make(&c, &shapes[i], &pool, 1 + i);
		case_span(&c, shapes[i].heads * 2u + 3, 7, 0, 131);
		run(&c, 1);
		right(&c, names[i]);
		case_free(&c);
	}
}

/* Each number of tokens up to three steps, the last of them where memory ends. */
static void tail_of_any_length_is_exact(void **state)
{
	struct attend_shape shapes[] = {case_mla(2), case_gqa(4, 2, 64)};
	struct attend_case c;

	(void)state;
	for (uint32_t i = 0; i < 2; i++)
		for (uint32_t tokens = 1; tokens <= 36; tokens++) {
			struct case_pool pool = {.tokens = tokens, .page_tokens = 1};

			case_make(&c, &shapes[i], &pool, 13);
			case_span(&c, 4, 0, 0, tokens);
			run(&c, 1);
			right(&c, "tail");
			case_free(&c);
		}
}

static void selection_equals_fp64(void **state)
{
	struct case_pool pool = {.tokens = 300, .page_tokens = 16, .scattered = true};
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 64)};
	struct attend_case c;

	(void)state;
	for (uint32_t i = 0; i < 2; i++) {
		case_make(&c, &shapes[i], &pool, 3);
		case_selected(&c, 2, 61);
		case_selected(&c, 1, 1);
		case_span(&c, 5, 0, 3, 44);
		case_selected(&c, 2, 33);
		run(&c, 1 + i);
		right(&c, "selected");
		case_free(&c);
	}
}

/* Rows of many spans, each with tokens and a delta of its own, in one launch; each gets
 * the bits that it gets alone. */
static void limits_and_deltas_are_of_each_row(void **state)
{
	static const int32_t deltas[] = {0, 0, 1, -513, 131072, INT32_MIN};
	struct case_pool pool = {.tokens = 70, .page_tokens = 16, .first = 5};
	struct attend_shape shapes[] = {case_mla(16), case_gqa(6, 2, 128)};
	struct attend_case c, alone;

	(void)state;
	for (uint32_t i = 0; i < 4; i++) {
		struct attend_case *both[] = {&c, &alone};

		for (uint32_t j = 0; j < 2; j++) {
			case_make(both[j], &shapes[i / 2], &pool, 10);
			both[j]->rope.pairs = i % 2;
			if (i == 3) { /* some values of a head */
				both[j]->rope.first = 16;
				both[j]->rope.dims = 64;
			}
			for (uint32_t k = 0; k < 9; k++)
				case_span(both[j], 1 + k * 3 % 8, k, k % 4 ? 0 : 3 * k,
					  k % 2 ? 70 : 69 - k)
					->delta = deltas[k % ARRAY_LEN(deltas)];
			case_selected(both[j], 1, 20);
		}
		run(&c, 1);
		right(&c, i % 2 ? "interleaved" : "halves");
		for (uint32_t k = 0; k < alone.span_count; k++) {
			run_spans(&alone, &alone.spans[k], 1, 1);
			assert_true(same_span(&c, &c.spans[k], &alone.spans[k]));
		}
		case_free(&c);
		case_free(&alone);
	}
}

static void check_empty(const struct attend_case *c, const struct attend_span *span)
{
	for (uint32_t row = 0; row < span->rows; row++) {
		assert_int_equal(value_bits(span->l[row]), 0);
		assert_true(span->m[row] == -INFINITY);
	}
	for (uint32_t i = 0; i < span->rows * c->shape.dv; i++)
		assert_int_equal(value_bits(span->o[i]), 0);
}

static void row_without_tokens_is_empty(void **state)
{
	struct case_pool pool = {.tokens = 40, .page_tokens = 16};
	struct attend_shape shape = case_mla(16);
	struct attend_span *span;
	struct attend_case c;

	(void)state;
	for (uint32_t splits = 1; splits <= 3; splits++) {
		case_make(&c, &shape, &pool, 9);
		case_span(&c, 16, 0, 0, 40);
		case_span(&c, 0, 0, 0, 40); /* no rows */
		case_span(&c, 5, 0, 17, 17);
		case_selected(&c, 1, 0);
		span = case_selected(&c, 1, 33);
		for (uint32_t i = 0; i < 33; i++)
			((uint32_t *)(uintptr_t)span->select)[i] = ATTEND_NONE;
		run(&c, splits);
		right(&c, "empty rows");
		for (uint32_t i = 2; i < 5; i++)
			check_empty(&c, &c.spans[i]);
		case_free(&c);
	}
}

/* All that a row does not attend to becomes NaN and infinite: the same bits. */
static void poison_changes_no_bit(void **state)
{
	struct case_pool pool = {.tokens = 90, .page_tokens = 16, .scattered = true};
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 64)};
	struct attend_case c, clean;

	(void)state;
	for (uint32_t i = 0; i < 2; i++) {
		struct attend_case *both[] = {&c, &clean};

		for (uint32_t j = 0; j < 2; j++) {
			struct attend_span *span;

			case_make(both[j], &shapes[i], &pool, 12);
			case_span(both[j], 16, 0, 0, 50);
			case_span(both[j], 16, 0, 20, 51);
			span = case_selected(both[j], 1, 40);
			for (uint32_t t = 0; t < 40; t++) /* some none, none behind 50 */
				if (span->select[t] > 50)
					((uint32_t *)(uintptr_t)span->select)[t] =
						ATTEND_NONE;
			case_span(both[j], 3, 0, 0, 90); /* sees the poison */
		}
		for (uint32_t t = 51; t < 90; t++)
			for (uint32_t h = 0; h < c.shape.kv_heads; h++)
				for (uint32_t d = 0; d < c.shape.dv; d++) {
					const double x =
						t % 2 ? (double)NAN : (double)INFINITY;

					case_put(VALUE_BF16, case_at(&c, false, t, h), d,
						 x);
					case_put(VALUE_BF16, case_at(&c, true, t, h), d,
						 x);
				}
		run(&c, 2);
		run(&clean, 2);
		right(&clean, "before the poison");
		assert_true(isnan(c.spans[3].o[0]));
		for (uint32_t k = 0; k < 3; k++)
			assert_true(same_span(&c, &c.spans[k], &clean.spans[k]));
		case_free(&c);
		case_free(&clean);
	}
}

static void nan_in_a_row_stays_in_it(void **state)
{
	struct case_pool pool = {.tokens = 50, .page_tokens = 16};
	struct attend_shape shape = case_mla(16);
	struct attend_case c, clean;

	(void)state;
	case_make(&c, &shape, &pool, 14);
	case_make(&clean, &shape, &pool, 14);
	case_span(&c, 20, 0, 0, 50);
	case_span(&clean, 20, 0, 0, 50);
	case_put(VALUE_BF16, (void *)(uintptr_t)c.spans[0].q, 17 * 576 + 3, (double)NAN);
	run(&c, 1);
	run(&clean, 1);
	assert_true(isnan(c.spans[0].l[17]));
	for (uint32_t d = 0; d < 512; d++) {
		assert_true(isnan(c.spans[0].o[17 * 512 + d]));
		c.spans[0].o[17 * 512 + d] = clean.spans[0].o[17 * 512 + d];
	}
	c.spans[0].l[17] = clean.spans[0].l[17];
	c.spans[0].m[17] = clean.spans[0].m[17];
	assert_true(same_span(&c, c.spans, clean.spans));
	case_free(&c);
	case_free(&clean);
}

/* A softcap; logits far apart, the largest of them at the end; and of -inf, no weight. */
static void logits_of_any_size_are_exact(void **state)
{
	struct case_pool pool = {.tokens = 60, .page_tokens = 32};
	struct attend_shape shape = case_gqa(8, 2, 128);
	struct attend_case c;

	(void)state;
	shape.softcap = 2;
	case_make(&c, &shape, &pool, 6);
	case_span(&c, 16, 0, 0, 60);
	run(&c, 1);
	right(&c, "softcap 2");
	case_free(&c);
	shape = case_mla(16);
	shape.scale = 40.0f / 24;
	case_make(&c, &shape, &pool, 15);
	case_span(&c, 16, 0, 0, 60);
	run(&c, 1);
	assert_true(case_compare(&c).rms <= 2e-3);
	for (uint32_t t = 0; t < 59; t++)
		case_put(VALUE_BF16, case_at(&c, false, t, 0), 575, -(double)INFINITY);
	for (uint32_t t = 0; t < 16; t++)
		case_put(VALUE_BF16, (void *)(uintptr_t)c.spans[0].q, t * 576 + 575, 1);
	run(&c, 1);
	assert_true(c.spans[0].l[0] == 1);
	for (uint32_t t = 0; t < 512; t++)
		assert_true(fabs((double)c.spans[0].o[t] -
				 case_value(VALUE_BF16, case_at(&c, true, 59, 0), t)) <
			    1e-6);
	c.spans[0].end = 59;
	run(&c, 1);
	check_empty(&c, &c.spans[0]);
	case_free(&c);
}

/* ---- parts ---- */

#define TOKENS_ALL 150u

/* A chunk in `parts` pieces of tokens, contiguous or scattered; the whole behind them. */
static void make_parts(struct attend_case *c, const struct attend_shape *shape,
		       uint32_t parts, bool scattered)
{
	struct case_pool pool = {
		.tokens = TOKENS_ALL, .page_tokens = 16, .scattered = true};
	uint32_t i, t, owner[TOKENS_ALL], end = 0;

	case_make(c, shape, &pool, 100 + parts);
	for (t = 0; t < TOKENS_ALL; t++)
		owner[t] = (uint32_t)case_random(&c->seed, parts);
	for (i = 0; i <= parts; i++) {
		struct attend_span *span;
		uint32_t *select, begin = i == parts ? 0 : end;

		end = i + 1 >= parts
			      ? TOKENS_ALL
			      : TOKENS_ALL * (i + 1) * (i + 2) / parts / (parts + 1);
		if (!scattered) {
			case_span(c, 16, 0, begin, end);
			continue;
		}
		span = case_selected(c, 16u / shape->heads, TOKENS_ALL);
		select = (uint32_t *)(uintptr_t)span->select;
		for (t = 0; t < 16u / shape->heads * TOKENS_ALL; t++)
			select[t] = i == parts || owner[t % TOKENS_ALL] == i
					    ? t % TOKENS_ALL
					    : ATTEND_NONE;
	}
	for (i = 0; i < parts; i++)
		memcpy((void *)(uintptr_t)c->spans[i].q, c->spans[parts].q,
		       16u * shape->dqk * 2u);
}

/* Of the last span alone. */
static struct case_error error_of_last(struct attend_case *c, uint32_t parts)
{
	struct attend_case last = *c;

	last.spans[0] = c->spans[parts];
	last.span_count = 1;
	return case_compare(&last);
}

static void merge_on_host(struct attend_case *c, uint32_t parts)
{
	struct merge_part part[PARTS_MOST];

	for (uint32_t i = 0; i < parts; i++)
		part[i] =
			(struct merge_part){c->spans[i].o, c->spans[i].m, c->spans[i].l};
	merge_rows(c->spans[parts].o, c->spans[parts].m, c->spans[parts].l, part, parts,
		   16, c->shape.dv);
}

static void check_partition(const struct case_error *merged,
			    const struct case_error *single, const char *what,
			    uint32_t parts)
{
	print_message("%s, K = %u: merged %.1e, single %.1e of %.2f\n", what, parts,
		      merged->worst, single->worst, single->most);
	assert_true(merged->worst <= 2 * single->worst + 1e-6 * single->most);
	assert_true(merged->m <= single->m + 1e-6);
	assert_true(merged->l <= 2 * single->l + 1e-6);
}

static void partition_is_exact(void **state)
{
	struct attend_shape shapes[] = {case_mla(16), case_gqa(8, 2, 128)};
	struct case_error single, merged;
	struct attend_case c;

	(void)state;
	for (uint32_t i = 0; i < 4; i++)
		for (uint32_t parts = 1; parts <= PARTS_MOST; parts++) {
			make_parts(&c, &shapes[i / 2], parts, i % 2);
			run(&c, 1);
			single = error_of_last(&c, parts);
			assert_true(single.rms <= 2e-3);
			merge_on_host(&c, parts);
			merged = error_of_last(&c, parts);
			check_partition(&merged, &single,
					i % 2 ? "scattered" : "contiguous", parts);
			case_free(&c);
		}
}

/* The kernel's own splits, whose parts kvd_merge makes into one. */
static void splits_are_exact(void **state)
{
	struct case_pool pool = {.tokens = 100, .page_tokens = 16};
	struct attend_shape shape = case_mla(16);
	struct case_error single, merged;
	struct attend_case c;

	(void)state;
	case_make(&c, &shape, &pool, 30);
	case_span(&c, 5, 0, 0, 9); /* less than a step */
	run(&c, 3);
	right(&c, "splits of nine tokens");
	case_free(&c);
	case_make(&c, &shape, &pool, 31);
	case_span(&c, 20, 0, 0, 100);
	run(&c, 1);
	single = right(&c, "one split");
	for (uint32_t splits = 2; splits <= 9; splits++) { /* more than there are steps */
		case_poison_outputs(&c);
		run(&c, splits);
		merged = right(&c, "splits");
		check_partition(&merged, &single, "splits", splits);
	}
	case_free(&c);
}

/* ---- merge ---- */

static bool same_floats(const float *a, const float *b, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		if (value_bits(a[i]) != value_bits(b[i]) && !(isnan(a[i]) && isnan(b[i])))
			return false;
	return true;
}

static void merge_is_merge_rows_bit_by_bit(void **state)
{
	enum { ROWS_ALL = 9, DV = 37, PLANE = ROWS_ALL * (DV + 2) };
	static const float odd[] = {-INFINITY, INFINITY, NAN, -200, 80};
	static float planes[(MERGE_PARTS_MAX + 1) * PLANE], want[PLANE];
	struct merge_part part[MERGE_PARTS_MAX];
	float *out = planes + MERGE_PARTS_MAX * PLANE;
	uint64_t seed = 5;

	(void)state;
	for (uint32_t round = 0; round < 60; round++) {
		const uint32_t parts =
			round < 10 ? round : 1 + (uint32_t)case_random(&seed, 64);
		struct attend_kern_merge arg = {
			.parts = parts, .rows = ROWS_ALL, .dv = DV};

		for (uint32_t i = 0; i < parts * PLANE; i++)
			planes[i] = (float)(3 * case_normal(&seed));
		for (uint32_t i = 0; i < parts; i++) {
			float *o = planes + i * PLANE, *m = o + ROWS_ALL * DV;
			float *l = m + ROWS_ALL;

			part[i] = (struct merge_part){o, m, l};
			for (uint32_t row = 0; row < ROWS_ALL; row++) {
				l[row] = (float)(1 + (double)case_random(&seed, 99) / 7);
				if (case_random(&seed, 12) == 0)
					m[row] = odd[case_random(&seed, ARRAY_LEN(odd))];
				if (case_random(&seed, 4) == 0 || row == round % 20) {
					l[row] = 0;
					o[row * DV] = m[row] = NAN;
				}
			}
		}
		arg.o = (uintptr_t)planes;
		arg.m = arg.o + ROWS_ALL * DV * 4;
		arg.l = arg.m + ROWS_ALL * 4;
		arg.part_plane = PLANE * 4;
		arg.out_o = (uintptr_t)out;
		arg.out_m = arg.out_o + ROWS_ALL * DV * 4;
		arg.out_l = arg.out_m + ROWS_ALL * 4;
		memset(out, 0xee, PLANE * 4);
		merge_rows(want, want + ROWS_ALL * DV, want + ROWS_ALL * (DV + 1), part,
			   parts, ROWS_ALL, DV);
		launch("kvd_merge", 1 + round % 5, 1, &arg, NULL);
		assert_true(same_floats(out, want, PLANE));
	}
}

/* ---- splice ---- */

#define SPLICE_TOKENS 37u

static struct attend_kern_field kern_field(const struct attend_case *c)
{
	const struct attend_field *k = &c->kv.k;

	return (struct attend_kern_field){(uintptr_t)k->base, k->page_stride,
					  k->token_stride, k->head_stride};
}

static struct attend_kern_pages kern_pages(const struct attend_case *c)
{
	return (struct attend_kern_pages){(uintptr_t)c->kv.pages, c->kv.page_tokens,
					  c->kv.first, c->kv.tokens, 0};
}

/* From a chunk to another whose pages are others, or in place. */
static void splice_once(const struct attend_shape *shape, uint8_t pairs, int32_t delta,
			bool in_place)
{
	struct case_pool pool = {.tokens = SPLICE_TOKENS,
				 .page_tokens = 16,
				 .scattered = true,
				 .first = 3};
	struct case_pool other = {.tokens = SPLICE_TOKENS, .page_tokens = 8};
	struct attend_case src, dst, want;
	struct rope_turn turn;
	struct splice splice = {&turn, VALUE_BF16, shape->dqk, 0, 0};
	float table[2 * ROPE_PAIRS_MAX];
	struct attend_kern_splice arg = {.turn = {delta ? (uintptr_t)table : 0}};

	case_make(&src, shape, &pool, 40);
	case_make(&dst, shape, in_place ? &pool : &other, in_place ? 40 : 41);
	case_make(&want, shape, in_place ? &pool : &other, in_place ? 40 : 41);
	src.rope.pairs = pairs;
	if (delta == -300 && shape->kind == ATTEND_GQA) { /* some values of a head */
		src.rope.first = 16;
		src.rope.dims = 64;
	}
	rope_turn_make(&turn, &src.rope, delta);
	for (uint32_t t = 0; t < SPLICE_TOKENS; t++)
		for (uint32_t h = 0; h < shape->kv_heads; h++)
			splice_rows(&splice, case_at(&want, false, t, h),
				    case_at(&src, false, t, h), 1);
	memcpy(table, turn.cos, turn.dims / 2 * sizeof(float));
	memcpy(table + turn.dims / 2, turn.sin, turn.dims / 2 * sizeof(float));
	arg.turn.first = turn.first;
	arg.turn.dims = turn.dims;
	arg.turn.pairs = pairs;
	arg.src = kern_field(in_place ? &dst : &src);
	arg.from = kern_pages(in_place ? &dst : &src);
	arg.dst = kern_field(&dst);
	arg.to = kern_pages(&dst);
	arg.tokens = SPLICE_TOKENS;
	arg.heads = shape->kv_heads;
	arg.values = shape->dqk;
	launch("kvd_splice", 3, 1, &arg, NULL);
	assert_memory_equal(dst.memory, want.memory, dst.memory_bytes - 4096);
	case_free(&src);
	case_free(&dst);
	case_free(&want);
}

static void splice_is_splice_rows_bit_by_bit(void **state)
{
	static const int32_t deltas[] = {0, 1, -300, 131072};
	struct attend_shape shapes[] = {case_mla(4), case_gqa(4, 2, 128)};

	(void)state;
	for (uint32_t i = 0; i < 2; i++)
		for (uint8_t pairs = 0; pairs < 2; pairs++)
			for (uint32_t d = 0; d < ARRAY_LEN(deltas); d++) {
				splice_once(&shapes[i], pairs, deltas[d], false);
				splice_once(&shapes[i], pairs, deltas[d], true);
			}
}

/* ---- what is refused; the image ---- */

static void kernel_unsupported_input_is_reported(void **state)
{
	struct attend_shape shape = case_mla(16);
	struct attend_kv kv = {.k = {NULL, 64, 32, 16}, .page_tokens = 1, .tokens = 1};
	struct rope rope = {.first = 512, .dims = 64};
	struct attend_job job = {.shape = &shape, .kv = &kv, .rope = &rope};

	(void)state;
	assert_null(attend_plan_fault(&job));
	rope.first = 510;
	assert_non_null(strstr(attend_plan_fault(&job), "rope"));
	job.rope = NULL;
	kv.k.token_stride = 40;
	assert_non_null(strstr(attend_plan_fault(&job), "kv"));
	kv.k.token_stride = 32;
	shape.kv_type = VALUE_FP16;
	assert_non_null(strstr(attend_plan_fault(&job), "kv_type"));
	shape = case_gqa(8, 2, 96);
	assert_non_null(strstr(attend_plan_fault(&job), "dqk"));
	shape = case_gqa(8, 2, 128);
	assert_null(attend_plan_fault(&job));
	kv.v.head_stride = 8;
	assert_non_null(strstr(attend_plan_fault(&job), "kv"));
}

static void *nowhere(void *arg, uint64_t address, uint64_t bytes, bool writing)
{
	(void)address;
	(void)bytes;
	return writing ? NULL : arg;
}

/* What the machine of these tests has to see itself. */
static void wrong_addresses_end_a_launch(void **state)
{
	static float parts[4] __attribute__((aligned(16)));
	const struct kernels_reach by = {nowhere, parts};
	struct attend_kern_merge arg = {.parts = 1, .rows = 1, .dv = 1};

	(void)state;
	arg.o = arg.m = arg.l = arg.out_o = arg.out_m = arg.out_l = (uintptr_t)parts;
	assert_null(attend_fiber_run("kvd_merge", 1, 1, &arg, NULL));
	assert_non_null(
		strstr(attend_fiber_run("kvd_merge", 1, 1, &arg, &by), "not there"));
	arg.m++;
	assert_non_null(
		strstr(attend_fiber_run("kvd_merge", 1, 1, &arg, NULL), "not aligned"));
	assert_non_null(attend_fiber_run("kvd_nothing", 1, 1, &arg, NULL));
}

static void image_holds_code_and_ptx(void **state)
{
	size_t bytes = 0;
	const void *image = attend_image(&bytes);

	(void)state;
	if (!image) {
		print_message("skipped: a build with nvcc\n");
		skip();
	}
	assert_non_null(memmem(image, bytes, ".text.kvd_attend_mla", 20));
	assert_non_null(memmem(image, bytes, ".visible .entry kvd_merge", 25));
	assert_non_null(memmem(image, bytes, "mma.sync.aligned.m16n8k16", 25));
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(dense_equals_fp64),
		cmocka_unit_test(tail_of_any_length_is_exact),
		cmocka_unit_test(selection_equals_fp64),
		cmocka_unit_test(limits_and_deltas_are_of_each_row),
		cmocka_unit_test(row_without_tokens_is_empty),
		cmocka_unit_test(poison_changes_no_bit),
		cmocka_unit_test(nan_in_a_row_stays_in_it),
		cmocka_unit_test(logits_of_any_size_are_exact),
		cmocka_unit_test(partition_is_exact),
		cmocka_unit_test(splits_are_exact),
		cmocka_unit_test(merge_is_merge_rows_bit_by_bit),
		cmocka_unit_test(splice_is_splice_rows_bit_by_bit),
		cmocka_unit_test(kernel_unsupported_input_is_reported),
		cmocka_unit_test(wrong_addresses_end_a_launch),
		cmocka_unit_test(image_holds_code_and_ptx),
	};

	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
