/* SPDX-License-Identifier: Apache-2.0 */
/* attend_case: pools with nothing but NaNs around their tokens, and an oracle that knows
 * neither blocks nor groups. */
#include "tests/lib/attend_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

uint64_t case_random(uint64_t *seed, uint64_t below)
{
	uint64_t z = *seed += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return (z ^ z >> 31) % below;
}

/* Four uniform numbers, of variance 1 / 12 each: normal enough. */
double case_normal(uint64_t *seed)
{
	uint64_t bits = case_random(seed, UINT64_MAX);
	double sum = 0;
	int i;

	for (i = 0; i < 4; i++, bits >>= 16)
		sum += (double)(bits & 0xffff) / 0x1p16 - 0.5;
	return sum * sqrt(3);
}

static void *case_get(size_t bytes)
{
	void *p = NULL;

	assert_int_equal(posix_memalign(&p, 64, bytes ? bytes : 1), 0);
	return p;
}

struct attend_shape case_mla(uint16_t heads)
{
	return (struct attend_shape){.kind = ATTEND_MLA,
				     .heads = heads,
				     .kv_heads = 1,
				     .dqk = 576,
				     .dv = 512,
				     .scale = 1.5f / 24};
}

struct attend_shape case_gqa(uint16_t heads, uint16_t kv_heads, uint16_t d)
{
	return (struct attend_shape){.kind = ATTEND_GQA,
				     .heads = heads,
				     .kv_heads = kv_heads,
				     .dqk = d,
				     .dv = d,
				     .scale = (float)(1.5 / sqrt(d))};
}

double case_value(enum value_type type, const void *src, uint32_t i)
{
	uint16_t h;
	float f;

	if (type == VALUE_FP32) {
		memcpy(&f, (const uint8_t *)src + 4 * (size_t)i, 4);
		return f;
	}
	if (type == VALUE_E4M3)
		return value_from_e4m3(((const uint8_t *)src)[i]);
	memcpy(&h, (const uint8_t *)src + 2 * (size_t)i, 2);
	return type == VALUE_BF16 ? value_from_bf16(h) : value_from_fp16(h);
}

void case_put(enum value_type type, void *dst, uint32_t i, double x)
{
	float f = (float)x;

	value_narrow(type, (uint8_t *)dst + (size_t)i * value_bytes(type), &f, 1);
}

static uint8_t *case_in(const struct attend_case *c, const struct attend_field *field,
			uint32_t token, uint32_t head)
{
	uint32_t at = c->kv.first + token, page = at / c->kv.page_tokens;

	if (c->pages)
		page = c->pages[page];
	return (uint8_t *)(uintptr_t)field->base + page * field->page_stride +
	       at % c->kv.page_tokens * field->token_stride + head * field->head_stride;
}

uint8_t *case_at(const struct attend_case *c, bool v, uint32_t token, uint32_t head)
{
	return case_in(c, v && c->shape.kind == ATTEND_GQA ? &c->kv.v : &c->kv.k, token,
		       head);
}

uint8_t *case_scale_at(const struct attend_case *c, bool v, uint32_t token, uint32_t head)
{
	const struct attend_field *field = v ? &c->kv.v_scale : &c->kv.k_scale;

	return field->base ? case_in(c, field, token, head) : NULL;
}

static double case_scale(const struct attend_case *c, bool v, uint32_t token,
			 uint32_t head)
{
	const uint8_t *at = case_scale_at(c, v, token, head);

	return at ? case_value(VALUE_FP32, at, 0) : 1;
}

/* One field's pool of `pages` pages from `base` on; bytes of it. */
static uint64_t case_field(struct attend_case *c, struct attend_field *field,
			   uintptr_t base, uint64_t row, uint64_t pages)
{
	field->base = (const uint8_t *)base;
	field->token_stride = c->heads_first ? row : row * c->shape.kv_heads;
	field->head_stride = c->heads_first ? row * c->kv.page_tokens : row;
	field->page_stride = row * c->shape.kv_heads * c->kv.page_tokens;
	return pages * field->page_stride;
}

static void case_put_scale(struct attend_case *c, uint8_t *at)
{
	double x;

	if (!at)
		return;
	x = ldexp(0.5 + (double)case_random(&c->seed, 64) / 64,
		  -(int)case_random(&c->seed, 3));
	case_put(VALUE_FP32, at, 0, case_random(&c->seed, 4) ? x : -x);
}

static void case_fill_scales(struct attend_case *c)
{
	uint32_t t, h;

	for (t = 0; t < c->kv.tokens; t++)
		for (h = 0; h < c->shape.kv_heads; h++) {
			case_put_scale(c, case_scale_at(c, false, t, h));
			if (c->shape.kind == ATTEND_GQA)
				case_put_scale(c, case_scale_at(c, true, t, h));
		}
}

static void case_fill(struct attend_case *c)
{
	uint32_t t, h, d;

	for (t = 0; t < c->kv.tokens; t++)
		for (h = 0; h < c->shape.kv_heads; h++) {
			for (d = 0; d < c->shape.dqk; d++)
				case_put(c->shape.kv_type, case_at(c, false, t, h), d,
					 case_normal(&c->seed));
			for (d = 0; c->shape.kind == ATTEND_GQA && d < c->shape.dv; d++)
				case_put(c->shape.kv_type, case_at(c, true, t, h), d,
					 case_normal(&c->seed));
		}
}

static void case_pages(struct attend_case *c, uint64_t needed, uint64_t pages)
{
	uint32_t *all = case_get(pages * sizeof(*all)), i, j, swap;

	for (i = 0; i < pages; i++)
		all[i] = i;
	for (i = 0; i < needed; i++) {
		j = i + (uint32_t)case_random(&c->seed, pages - i);
		swap = all[i];
		all[i] = all[j];
		all[j] = swap;
	}
	c->kv.pages = c->pages = case_get(needed * sizeof(*c->pages));
	memcpy(c->pages, all, needed * sizeof(*c->pages));
	free(all);
}

/* All fields, one behind the other, from `base` on; their bytes. */
static uint64_t case_fields(struct attend_case *c, const struct case_pool *pool,
			    uintptr_t base, uint64_t pages)
{
	const uint32_t value = value_bytes(c->shape.kv_type);
	const bool gqa = c->shape.kind == ATTEND_GQA;
	uint64_t bytes = case_field(c, &c->kv.k, base, c->shape.dqk * value, pages);

	if (gqa)
		bytes +=
			case_field(c, &c->kv.v, base + bytes, c->shape.dv * value, pages);
	if (pool->k_scaled)
		bytes +=
			case_field(c, &c->kv.k_scale, base + bytes, sizeof(float), pages);
	if (pool->v_scaled && gqa)
		bytes +=
			case_field(c, &c->kv.v_scale, base + bytes, sizeof(float), pages);
	else if (pool->v_scaled)
		c->kv.v_scale = c->kv.k_scale;
	return bytes;
}

void case_make(struct attend_case *c, const struct attend_shape *shape,
	       const struct case_pool *pool, uint64_t seed)
{
	uint64_t needed = ((uint64_t)pool->first + pool->tokens + pool->page_tokens - 1) /
			  pool->page_tokens;
	uint64_t pages = pool->scattered ? 2 * needed : needed, bytes, edge;
	uint32_t i;

	*c = (struct attend_case){
		.shape = *shape, .seed = seed, .heads_first = pool->heads_first};
	c->kv.tokens = pool->tokens;
	c->kv.page_tokens = pool->page_tokens;
	c->kv.first = pool->first;
	bytes = case_fields(c, pool, 0, pages);
	edge = (bytes + 4095) / 4096 * 4096;
	c->memory_bytes = edge + 4096;
	c->memory = mmap(NULL, c->memory_bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_true(c->memory != MAP_FAILED);
	assert_int_equal(mprotect(c->memory + edge, 4096, PROT_NONE), 0);
	memset(c->memory, 0xff, edge);
	case_fields(c, pool, (uintptr_t)c->memory + edge - bytes, pages);
	if (pool->scattered)
		case_pages(c, needed, pages);
	case_fill(c);
	case_fill_scales(c);
	c->rope = (struct rope){.first = shape->kind == ATTEND_MLA ? shape->dv : 0,
				.inv_freq = c->inv_freq};
	c->rope.dims = (uint16_t)(shape->dqk - c->rope.first);
	for (i = 0; i < c->rope.dims / 2u; i++)
		c->inv_freq[i] = pow(10000, -2.0 * i / c->rope.dims);
}

void case_free(struct attend_case *c)
{
	uint32_t i;

	for (i = 0; i < c->span_count; i++) {
		free((void *)(uintptr_t)c->spans[i].q);
		free(c->spans[i].o);
		free(c->spans[i].m);
		free(c->spans[i].l);
		free((void *)(uintptr_t)c->spans[i].select);
	}
	free(c->pages);
	free(c->scratch);
	munmap(c->memory, c->memory_bytes);
}

struct attend_span *case_span(struct attend_case *c, uint32_t rows, uint32_t first,
			      uint32_t begin, uint32_t end)
{
	struct attend_span *span = &c->spans[c->span_count++];
	void *q = case_get((size_t)rows * c->shape.dqk * value_bytes(c->shape.q_type));
	uint32_t i;

	assert_true(c->span_count <= CASE_SPANS);
	for (i = 0; i < rows * c->shape.dqk; i++)
		case_put(c->shape.q_type, q, i, case_normal(&c->seed));
	*span = (struct attend_span){.q = q,
				     .o = case_get((size_t)rows * c->shape.dv * 4),
				     .m = case_get((size_t)rows * 4),
				     .l = case_get((size_t)rows * 4),
				     .rows = rows,
				     .first = first,
				     .begin = begin,
				     .end = end};
	case_poison_outputs(c);
	return span;
}

struct attend_span *case_selected(struct attend_case *c, uint32_t query_tokens,
				  uint32_t per_token)
{
	struct attend_span *span = case_span(c, query_tokens * c->shape.heads, 0, 0, 0);
	uint32_t *select = case_get((size_t)query_tokens * per_token * sizeof(*select)),
		 i;

	for (i = 0; i < query_tokens * per_token; i++)
		select[i] = case_random(&c->seed, 8) && c->kv.tokens
				    ? (uint32_t)case_random(&c->seed, c->kv.tokens)
				    : ATTEND_NONE;
	span->select = select;
	span->per_token = per_token;
	return span;
}

enum pick_isa case_isas[PICK_ISAS] = {
	[PICK_REF] = PICK_REF,	     [PICK_VECTOR] = PICK_VECTOR, [PICK_AVX2] = PICK_AVX2,
	[PICK_AVX512] = PICK_AVX512, [PICK_BF16] = PICK_BF16,	  [PICK_AMX] = PICK_AMX,
};

enum pick_isa case_isa(void **state)
{
	enum pick_isa isa = *(enum pick_isa *)*state;

	if (!pick_has(isa)) {
		print_message("this machine or process has no %s\n", pick_name(isa));
		skip();
	}
	return isa;
}

void case_poison_outputs(struct attend_case *c)
{
	float untouched = value_of_bits(CASE_UNTOUCHED);
	uint32_t i, j;

	for (i = 0; i < c->span_count; i++) {
		for (j = 0; j < c->spans[i].rows * c->shape.dv; j++)
			c->spans[i].o[j] = untouched;
		for (j = 0; j < c->spans[i].rows; j++)
			c->spans[i].m[j] = c->spans[i].l[j] = untouched;
	}
}

static void case_call(struct attend_case *c, enum pick_isa isa,
		      const struct attend_span *spans, uint32_t count)
{
	struct attend_job job = {.shape = &c->shape,
				 .kv = &c->kv,
				 .rope = &c->rope,
				 .spans = spans,
				 .span_count = count};
	uint32_t rows = 0, i;
	size_t bytes;

	for (i = 0; i < count; i++)
		rows += spans[i].rows;
	bytes = attend_scratch_bytes(&c->shape, rows);
	if (bytes > c->scratch_bytes) {
		free(c->scratch);
		c->scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
		c->scratch_bytes = bytes;
		assert_non_null(c->scratch);
	}
	memset(c->scratch, 0xff, bytes);
	assert_null(attend_job_fault(&job));
	assert_int_equal(attend_run(isa, &job, c->scratch), ATTEND_DONE);
}

void case_run(struct attend_case *c, enum pick_isa isa)
{
	case_call(c, isa, c->spans, c->span_count);
}

void case_run_each(struct attend_case *c, enum pick_isa isa)
{
	uint32_t i;

	for (i = 0; i < c->span_count; i++)
		case_call(c, isa, &c->spans[i], 1);
}

/* q of a row, its rope values turned by -delta. */
static void case_q(const struct attend_case *c, const struct attend_span *span,
		   uint32_t row, double *q)
{
	uint32_t n = c->rope.dims / 2, i, d;

	for (d = 0; d < c->shape.dqk; d++)
		q[d] = case_value(c->shape.q_type, span->q, row * c->shape.dqk + d);
	for (i = 0; span->delta && i < n; i++) {
		bool halves = c->rope.pairs == ROPE_HALVES;
		double *x = q + c->rope.first + (halves ? i : 2 * i);
		double *y = halves ? x + n : x + 1, was = *x;
		double angle = -(double)span->delta * c->inv_freq[i];

		*x = was * cos(angle) - *y * sin(angle);
		*y = *y * cos(angle) + was * sin(angle);
	}
}

static double case_logit(const struct attend_case *c, const double *q, uint32_t token,
			 uint32_t head)
{
	const uint8_t *k = case_at(c, false, token, head);
	double sum = 0;
	uint32_t d;

	for (d = 0; d < c->shape.dqk; d++)
		sum += q[d] * case_value(c->shape.kv_type, k, d);
	sum *= (double)c->shape.scale * case_scale(c, false, token, head);
	if (c->shape.softcap != 0)
		sum = c->shape.softcap * tanh(sum / c->shape.softcap);
	return sum;
}

void case_oracle(const struct attend_case *c, const struct attend_span *span,
		 uint32_t row, double *o, double *m, double *l)
{
	uint32_t number = span->first + row, heads = c->shape.heads, i, d;
	uint32_t head = number % heads / (heads / c->shape.kv_heads);
	uint32_t token = number / heads - span->first / heads;
	uint32_t count = span->select ? span->per_token : span->end - span->begin;
	double *logits = case_get(count * sizeof(*logits)), q[ATTEND_DIMS_MAX];
	uint32_t *tokens = case_get(count * sizeof(*tokens)), used = 0;

	case_q(c, span, row, q);
	for (i = 0; i < count; i++) {
		tokens[used] =
			span->select ? span->select[token * count + i] : span->begin + i;
		used += tokens[used] != ATTEND_NONE;
	}
	*m = -INFINITY;
	*l = 0;
	for (i = 0; i < used; i++) {
		logits[i] = case_logit(c, q, tokens[i], head);
		*m = fmax(*m, logits[i]);
	}
	memset(o, 0, c->shape.dv * sizeof(*o));
	for (i = 0; i < used; i++) {
		double p = exp(logits[i] - *m);

		*l += p;
		p *= case_scale(c, true, tokens[i], head);
		for (d = 0; d < c->shape.dv; d++)
			o[d] += p * case_value(c->shape.kv_type,
					       case_at(c, true, tokens[i], head), d);
	}
	for (d = 0; used && d < c->shape.dv; d++)
		o[d] /= *l;
	free(logits);
	free(tokens);
}

static void case_compare_row(const struct attend_case *c, const struct attend_span *span,
			     uint32_t row, struct case_error *error, double *sums)
{
	double o[ATTEND_DIMS_MAX], m, l, off;
	uint32_t d;

	case_oracle(c, span, row, o, &m, &l);
	for (d = 0; d < c->shape.dv; d++) {
		off = fabs((double)span->o[row * c->shape.dv + d] - o[d]);
		if (!(off <= error->worst)) /* a NaN, too */
			error->worst = off;
		error->most = fmax(error->most, fabs(o[d]));
		sums[0] += off * off;
		sums[1] += o[d] * o[d];
	}
	if (l == 0) {
		assert_true(span->l[row] == 0 && span->m[row] == -INFINITY);
		for (d = 0; d < c->shape.dv; d++)
			assert_int_equal(value_bits(span->o[row * c->shape.dv + d]), 0);
		return;
	}
	off = fabs((double)span->m[row] - m);
	if (!(off <= error->m))
		error->m = off;
	off = fabs((double)span->l[row] * exp((double)span->m[row] - m) - l) / l;
	if (!(off <= error->l))
		error->l = off;
}

struct case_error case_compare(const struct attend_case *c)
{
	struct case_error error = {0};
	double sums[2] = {0};
	uint32_t i, row;

	for (i = 0; i < c->span_count; i++)
		for (row = 0; row < c->spans[i].rows; row++)
			case_compare_row(c, &c->spans[i], row, &error, sums);
	error.rms = sums[1] > 0 ? sqrt(sums[0] / sums[1]) : 0;
	return error;
}
