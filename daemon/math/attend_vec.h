/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector kernel, in the compiler's vector types: included by attend_vec.c (the
 * baseline of the build), attend_avx2.c and attend_avx512.c, which define VEC_BYTES, the
 * bytes of a register, and VEC_ROWS, the rows processed at a time.
 *
 * STEP tokens at a time are widened to fp32, in a buffer that fits in L1, together with q
 * and o of these rows: values of each type are then the same loops, and MLA widens rows
 * that are both k and v once. Logits: a register holds values of one token (q . k is a
 * sum over the register at the end, four tokens at once). Outputs: a register holds
 * values of one row, kept over all STEP tokens. A group of many rows is processed in
 * blocks of BLOCK rows, whose q and o stay in L2, each with a pass over all tokens.
 *
 * The last step has fewer tokens: only their logits are computed, the rest of the weights
 * is not read.
 *
 * Scales of tokens multiply logits and weights, which are fewer than values. Without them
 * the factors are the shape's scale and 1, so rows have no branch for it.
 */
#ifndef KVD_MATH_ATTEND_VEC_H
#define KVD_MATH_ATTEND_VEC_H

#include <string.h>

#include "daemon/math/attend_impl.h"

#define STEP 16u
#define BLOCK VEC_BYTES /* rows: a step of them takes far less than 200 us */
#define LANES (VEC_BYTES / 4u)
#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vec __attribute__((vector_size(VEC_BYTES), may_alias));
typedef int32_t veci __attribute__((vector_size(VEC_BYTES), may_alias)); /* masks */
typedef uint32_t vecu __attribute__((vector_size(VEC_BYTES), may_alias));
typedef uint16_t vech __attribute__((vector_size(VEC_BYTES / 2), may_alias));
typedef uint8_t vecb __attribute__((vector_size(VEC_BYTES / 4), may_alias));
typedef float vec4 __attribute__((vector_size(16), may_alias));

struct vec_block {
	float *q;	/* [BLOCK][dqk] */
	float *o;	/* [BLOCK][dv] */
	float *k;	/* [STEP][dqk] */
	float *v;	/* [STEP][dv]; MLA: k */
	uint32_t v_row; /* values from v's row to row */
	uint32_t rows;
	const float *scale, *v_scale; /* of a step's tokens: factors of logits and v */
	float m[BLOCK], l[BLOCK];
	/* Of a step: logits, then weights; their sum; the factor of earlier sums */
	float p[BLOCK][STEP], sum[BLOCK], again[BLOCK];
};

INLINE vec vec_load(const float *p)
{
	vec v;

	memcpy(&v, p, sizeof(v));
	return v;
}

INLINE void vec_store(float *p, vec v)
{
	memcpy(p, &v, sizeof(v));
}

INLINE vec vec_all(float x)
{
	return x - (vec){0}; /* no operation: compilers know that x - 0 is x */
}

/* Bits of a where the mask is set, of b elsewhere. */
INLINE vec vec_choose(veci mask, vec a, vec b)
{
	return (vec)((mask & (veci)a) | (~mask & (veci)b));
}

INLINE vec vec_from_half(enum value_type type, const uint8_t *src)
{
	vecu bits, wide;
	vech half;
	vec f;

	memcpy(&half, src, sizeof(half));
	wide = __builtin_convertvector(half, vecu);
	if (type == VALUE_BF16)
		return (vec)(wide << 16);
	/* value_from_fp16(), lane by lane */
	f = (vec)((wide & 0x7fff) << 13) * 0x1p112f;
	bits = (vecu)f | ((vecu)((wide & 0x7c00) == 0x7c00) & 0x7f800000);
	return (vec)(bits | (wide & 0x8000) << 16);
}

/* value_from_e4m3(), lane by lane. */
INLINE vec vec_from_e4m3(const uint8_t *src)
{
	vecu bits, wide;
	vecb byte;
	vec f;

	memcpy(&byte, src, sizeof(byte));
	wide = __builtin_convertvector(byte, vecu);
	f = (vec)((wide & 0x7f) << 20) * 0x1p120f;
	bits = (vecu)f | ((vecu)((wide & 0x7f) == 0x7f) & 0x7fc00000);
	return (vec)(bits | (wide & 0x80) << 24);
}

/* A row of a cache; the first line of a row of a later step, and its other lines. */
INLINE void vec_widen(enum value_type type, float *dst, const uint8_t *src,
		      const uint8_t *later, uint32_t count)
{
	uint32_t i;

	for (i = 0; i < count; i += LANES) {
		if (type == VALUE_FP32) {
			vec_store(dst + i,
				  vec_load((const float *)(const void *)src + i));
			__builtin_prefetch(later + 4 * (size_t)i);
			continue;
		}
		if (type == VALUE_E4M3) {
			vec_store(dst + i, vec_from_e4m3(src + i));
			if (i % 64 == 0)
				__builtin_prefetch(later + i);
			continue;
		}
		vec_store(dst + i, vec_from_half(type, src + 2 * (size_t)i));
		if (i % 32 == 0)
			__builtin_prefetch(later + 2 * (size_t)i);
	}
}

static void vec_widen_row(const struct attend_shape *shape, float *dst,
			  const uint8_t *src, const uint8_t *later, uint32_t count)
{
	if (shape->kv_type == VALUE_BF16)
		vec_widen(VALUE_BF16, dst, src, later, count);
	else if (shape->kv_type == VALUE_FP16)
		vec_widen(VALUE_FP16, dst, src, later, count);
	else if (shape->kv_type == VALUE_E4M3)
		vec_widen(VALUE_E4M3, dst, src, later, count);
	else
		vec_widen(VALUE_FP32, dst, src, later, count);
}

/* The sum of a register in four places. */
INLINE vec4 vec_fold(vec v)
{
	vec4 part[VEC_BYTES / 16], sum;

	memcpy(part, &v, sizeof(v));
	sum = part[0];
#if VEC_BYTES == 32
	sum += part[1];
#elif VEC_BYTES == 64
	sum = (sum + part[1]) + (part[2] + part[3]);
#endif
	return sum;
}

/* Sums of four registers. */
INLINE vec4 vec_sums(vec a, vec b, vec c, vec d)
{
	vec4 w = vec_fold(a), x = vec_fold(b), y = vec_fold(c), z = vec_fold(d);
	vec4 wx = __builtin_shufflevector(w, x, 0, 4, 1, 5) +
		  __builtin_shufflevector(w, x, 2, 6, 3, 7);
	vec4 yz = __builtin_shufflevector(y, z, 0, 4, 1, 5) +
		  __builtin_shufflevector(y, z, 2, 6, 3, 7);

	return __builtin_shufflevector(wx, yz, 0, 1, 4, 5) +
	       __builtin_shufflevector(wx, yz, 2, 3, 6, 7);
}

/* Logits, not scaled yet, of `rows` rows and four tokens. */
INLINE void vec_logits(struct vec_block *block, uint32_t dqk, uint32_t row,
		       uint32_t token, const uint32_t rows)
{
	const float *q = block->q + (size_t)row * dqk,
		    *k = block->k + (size_t)token * dqk;
	vec sum[VEC_ROWS][4];
	uint32_t d, r, t;
	vec4 four;

	UNROLL
	for (r = 0; r < rows; r++)
		UNROLL
	for (t = 0; t < 4; t++)
		sum[r][t] = (vec){0};
	for (d = 0; d < dqk; d += LANES) {
		vec kt[4];

		UNROLL
		for (t = 0; t < 4; t++)
			kt[t] = vec_load(k + (size_t)t * dqk + d);
		UNROLL
		for (r = 0; r < rows; r++) {
			vec qr = vec_load(q + (size_t)r * dqk + d);

			UNROLL
			for (t = 0; t < 4; t++)
				sum[r][t] += qr * kt[t];
		}
	}
	UNROLL
	for (r = 0; r < rows; r++) {
		four = vec_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
		memcpy(block->p[row + r] + token, &four, sizeof(four));
	}
}

/* o = o * again + weights * v, for some rows and registers of values. */
INLINE void vec_outputs(struct vec_block *block, uint32_t dv, uint32_t row,
			uint32_t value, uint32_t tokens, const uint32_t rows,
			const uint32_t wide)
{
	float *o = block->o + (size_t)row * dv + value;
	const float *v = block->v + value;
	vec sum[VEC_ROWS][4];
	uint32_t r, w, t;

	UNROLL
	for (r = 0; r < rows; r++)
		UNROLL
	for (w = 0; w < wide; w++)
		sum[r][w] = vec_load(o + (size_t)r * dv + w * LANES) *
			    vec_all(block->again[row + r]);
	for (t = 0; t < tokens; t++, v += block->v_row) {
		vec vw[4];

		UNROLL
		for (w = 0; w < wide; w++)
			vw[w] = vec_load(v + w * LANES);
		UNROLL
		for (r = 0; r < rows; r++) {
			vec p = vec_all(block->p[row + r][t]);

			UNROLL
			for (w = 0; w < wide; w++)
				sum[r][w] += p * vw[w];
		}
	}
	UNROLL
	for (r = 0; r < rows; r++)
		UNROLL
	for (w = 0; w < wide; w++)
		vec_store(o + (size_t)r * dv + w * LANES, sum[r][w]);
}

/* exp: merge_exp_of() in lanes; of x > 0 (tanh's, up to 40), too. */
INLINE vec vec_exp(vec x)
{
	const vec shift = vec_all(0x1.8p23f); /* added: to nearest, in the lowest bits */
	vec n = x * 1.44269504f + shift, r, p;
	vecu k = (vecu)n - (vecu)shift;

	n -= shift;
	r = x - n * 0.693359375f;
	r = r - n * -2.12194440e-4f;
	p = r * 1.98412698e-4f + 1.38888889e-3f;
	p = p * r + 8.33333333e-3f;
	p = p * r + 4.16666667e-2f;
	p = p * r + 1.66666667e-1f;
	p = p * r + 0.5f;
	p = p * r + 1.0f;
	p = p * r + 1.0f;
	p = p * (vec)((k + 127) << 23);
	return vec_choose(x < vec_all(-87.3f), vec_all(0), p);
}

/* cap * tanh(x / cap). tanh is 1 - 2 / (exp(2y) + 1), and 1 from 20 on; near 0, where
 * that would cancel most digits, it is the Taylor series to y^9. exp of a large negative
 * value is 0. */
INLINE vec vec_cap(vec x, float cap)
{
	vec y = x * vec_all(1 / cap), far = y, y2 = y * y, near;
	vec edge = vec_all(0.25f);

	near = y2 * (62.0f / 2835) - 17.0f / 315;
	near = near * y2 + 2.0f / 15;
	near = near * y2 - 1.0f / 3;
	near = near * y2 * y + y;
	far = vec_choose(far > vec_all(20), vec_all(20), far);
	far = 1.0f - 2.0f / (vec_exp(far + far) + 1.0f);
	return vec_choose((y < edge) & (y > -edge), near, far) * cap;
}

/* The largest and the sum over a register. */
INLINE float vec_most(vec v)
{
	float lane[LANES];
	uint32_t i, n;

	vec_store(lane, v);
	UNROLL
	for (n = LANES / 2; n > 0; n /= 2)
		UNROLL
	for (i = 0; i < n; i++)
		lane[i] = lane[i] > lane[i + n] ? lane[i] : lane[i + n];
	return lane[0];
}

INLINE float vec_total(vec v)
{
	vec4 four = vec_fold(v);

	return (four[0] + four[1]) + (four[2] + four[3]);
}

/* One row's logits become weights. */
INLINE void vec_softmax(struct vec_block *block, const struct attend_shape *shape,
			uint32_t row, uint32_t tokens)
{
	vec sum = {0}, most = vec_all(block->m[row]), x;
	const float *scale = block->scale, *v_scale = block->v_scale;
	float *p = block->p[row], m, safe;
	uint32_t t;

	for (t = 0; t < STEP; t += LANES) {
		x = vec_load(p + t) * vec_load(scale + t);
		if (shape->softcap != 0)
			x = vec_cap(x, shape->softcap);
		vec_store(p + t, x);
	}
	for (t = tokens; t < STEP; t++)
		p[t] = -INFINITY;
	for (t = 0; t < STEP; t += LANES) {
		x = vec_load(p + t);
		most = vec_choose(x > most, x, most);
	}
	m = vec_most(most);
	safe = m == -INFINITY ? 0 : m; /* -inf - -inf would be a NaN */
	for (t = 0; t < STEP; t += LANES) {
		x = vec_exp(vec_load(p + t) - vec_all(safe));
		vec_store(p + t, x * vec_load(v_scale + t));
		sum += x;
	}
	block->sum[row] = vec_total(sum);
	block->again[row] = block->m[row] - safe;
	block->m[row] = m;
}

/* Not inline: gcc 12 has too few registers for the loops above in one function. */
static __attribute__((noinline)) void vec_weights(struct vec_block *block,
						  const struct attend_shape *shape,
						  uint32_t tokens)
{
	uint32_t row;

	for (row = 0; row < block->rows; row++)
		vec_softmax(block, shape, row, tokens);
	for (row = 0; row < block->rows; row += LANES) {
		vec again = vec_exp(vec_load(block->again + row));

		vec_store(block->again + row, again);
		vec_store(block->l + row,
			  vec_load(block->l + row) * again + vec_load(block->sum + row));
	}
}

/* Logits of a step: up to three of them are of rows of an earlier step. */
INLINE void vec_row_logits(struct vec_block *block, uint32_t dqk, uint32_t row,
			   uint32_t tokens, const uint32_t rows)
{
	for (uint32_t token = 0; token < tokens; token += 4)
		vec_logits(block, dqk, row, token, rows);
}

INLINE void vec_row_outputs(struct vec_block *block, uint32_t dv, uint32_t row,
			    uint32_t tokens, const uint32_t rows)
{
	uint32_t value = 0;

	for (; value + 4 * LANES <= dv; value += 4 * LANES)
		vec_outputs(block, dv, row, value, tokens, rows, 4);
	for (; value + 2 * LANES <= dv; value += 2 * LANES)
		vec_outputs(block, dv, row, value, tokens, rows, 2);
	for (; value < dv; value += LANES)
		vec_outputs(block, dv, row, value, tokens, rows, 1);
}

static void vec_step(struct vec_block *block, const struct attend_shape *shape,
		     uint32_t tokens)
{
	uint32_t row, dqk = shape->dqk, dv = shape->dv;

	for (row = 0; row + VEC_ROWS <= block->rows; row += VEC_ROWS)
		vec_row_logits(block, dqk, row, tokens, VEC_ROWS);
	for (; row + 2 <= block->rows; row += 2)
		vec_row_logits(block, dqk, row, tokens, 2);
	for (; row < block->rows; row++)
		vec_row_logits(block, dqk, row, tokens, 1);
	vec_weights(block, shape, tokens);
	for (row = 0; row + VEC_ROWS <= block->rows; row += VEC_ROWS)
		vec_row_outputs(block, dv, row, tokens, VEC_ROWS);
	for (; row + 2 <= block->rows; row += 2)
		vec_row_outputs(block, dv, row, tokens, 2);
	for (; row < block->rows; row++)
		vec_row_outputs(block, dv, row, tokens, 1);
}

/* Tokens [at, at + tokens) of the batch become fp32. */
static void vec_gather(struct vec_block *block, const struct attend_shape *shape,
		       const struct attend_batch *batch, uint32_t at, uint32_t tokens)
{
	uint32_t i, later;

	for (i = at; i < at + tokens; i++) {
		later = i + STEP < batch->count ? i + STEP : i;
		vec_widen_row(shape, block->k + (size_t)(i - at) * shape->dqk,
			      batch->k[i], batch->k[later], shape->dqk);
		if (shape->kind != ATTEND_MLA)
			vec_widen_row(shape, block->v + (size_t)(i - at) * shape->dv,
				      batch->v[i], batch->v[later], shape->dv);
	}
}

static void vec_begin(struct vec_block *block, struct attend_work *work,
		      const struct attend_row *rows, uint32_t count)
{
	const struct attend_shape *shape = work->job->shape;
	uint32_t i;

	block->rows = count;
	for (i = 0; i < count; i++)
		attend_q(work, &rows[i], block->q + (size_t)i * shape->dqk);
	for (i = 0; i < BLOCK; i++) {
		block->m[i] = -INFINITY;
		block->l[i] = block->sum[i] = block->again[i] = 0;
	}
	memset(block->p, 0, sizeof(block->p));
	memset(block->o, 0, (size_t)count * shape->dv * sizeof(float));
	/* the last tokens of the first step, when they are fewer: computed, not used */
	memset(block->k, 0, (size_t)STEP * shape->dqk * sizeof(float));
}

static void vec_end(const struct vec_block *block, const struct attend_shape *shape,
		    const struct attend_row *rows)
{
	uint32_t i, d;

	for (i = 0; i < block->rows; i++) {
		const float *o = block->o + (size_t)i * shape->dv;
		float l = block->l[i], share = l == 0 ? 0 : 1 / l;

		for (d = 0; d < shape->dv; d += LANES)
			vec_store(rows[i].o + d, vec_load(o + d) * vec_all(share));
		*rows[i].m = block->m[i];
		*rows[i].l = l;
	}
}

static void vec_place(struct vec_block *block, const struct attend_work *work)
{
	const struct attend_shape *shape = work->job->shape;
	uint8_t *at = work->kernel;

	block->q = attend_carve(&at, (size_t)BLOCK * shape->dqk * sizeof(float));
	block->o = attend_carve(&at, (size_t)BLOCK * shape->dv * sizeof(float));
	block->v = block->k =
		attend_carve(&at, (size_t)STEP * shape->dqk * sizeof(float));
	block->v_row = shape->dqk;
	if (shape->kind == ATTEND_MLA)
		return;
	block->v = attend_carve(&at, (size_t)STEP * shape->dv * sizeof(float));
	block->v_row = shape->dv;
}

static bool vec_group(struct attend_work *work, const struct attend_group *group)
{
	const struct attend_shape *shape = work->job->shape;
	struct attend_batch batch;
	struct vec_block block;
	uint32_t row, at, n;

	vec_place(&block, work);
	for (n = 0; n < ATTEND_BATCH; n++) {
		batch.k_scale[n] = shape->scale;
		batch.v_scale[n] = 1;
	}
	for (row = 0; row < group->count; row += n) {
		n = group->count - row < BLOCK ? group->count - row : BLOCK;
		vec_begin(&block, work, group->rows + row, n);
		batch.next = group->begin;
		while (attend_next(work, group, &batch, ATTEND_BATCH)) {
			for (at = 0; work->job->kv->k_scale.base && at < batch.count;
			     at++)
				batch.k_scale[at] *= shape->scale;
			for (at = 0; at < batch.count; at += STEP) {
				uint32_t tokens = batch.count - at;

				if (attend_stop(work))
					return false;
				tokens = tokens < STEP ? tokens : STEP;
				block.scale = batch.k_scale + at;
				block.v_scale = batch.v_scale + at;
				vec_gather(&block, shape, &batch, at, tokens);
				vec_step(&block, shape, tokens);
			}
		}
		vec_end(&block, shape, group->rows + row);
	}
	return true;
}

static bool vec_takes(const struct attend_shape *shape)
{
	(void)shape;
	return true;
}

static size_t vec_scratch_bytes(const struct attend_shape *shape)
{
	return (size_t)(BLOCK + STEP) * (shape->dqk + shape->dv) * sizeof(float) + 4 * 64;
}

#define VEC_TABLE(text)                                                               \
	{                                                                             \
		.name = text, .takes = vec_takes, .scratch_bytes = vec_scratch_bytes, \
		.group = vec_group,                                                   \
	}

#endif
