/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the kernels for products of bf16: included by attend_amx.c and
 * attend_bf16.c, which define the products. bf16 with fp32 sums, in tiles of 16 rows by
 * 64 bytes.
 *
 * The second factor of a product has its values in pairs along the sum ("VNNI": dword j
 * of row i holds values 2i and 2i + 1 of column j). Logits are computed transposed,
 * tokens by rows, because then K is the first factor and is read in place, and Q, which
 * is small, is packed once. Softmax runs down columns, so its maxima and sums are plain
 * vectors of 16 rows. Weights are rounded to bf16, transposed in 16x16 blocks and become
 * the first factor of the second product; V is packed in pairs of tokens, once for a
 * block of up to 256 rows.
 *
 * Placement: a batch's V (TOKENS x dv) and the packed q and o of a block are in L2
 * together; o is kept as tiles, so that 16 rows of it do not map to two sets of L1.
 *
 * Fewer than 16 tokens in the last tile, or tokens at uneven distances (another page, a
 * selection), have their K copied. So have tokens that are not adjacent, if many rows
 * read them: rows that are 2 KiB apart share two sets of L1. Logits of the copy's other
 * rows are not read: their weight is 0, and their V is packed as 0. Memory outside the
 * chunk is not read.
 *
 * A row whose chunk has moved has q rotated in fp32. It is used as two bf16, the number
 * and its rest, each with the same K: a rounding of q would be of the size of a rounding
 * of K, which routing must avoid. That costs two or three steps for 64 rope values; and
 * an infinite rope value in K is a NaN for the whole block, because most rests are 0.
 */
#ifndef KVD_MATH_ATTEND_TILE_H
#define KVD_MATH_ATTEND_TILE_H

#include <immintrin.h>
#include <string.h>

#include "daemon/math/attend_impl.h"

#define TOKENS 128u /* a batch; a multiple of 64 */
#define GROUPS 16u  /* of 16 rows, in a block */
#define TILE 1024u  /* bytes */
#define PAST_BYTES (1u << 20)

struct tile_rows { /* 16 tokens' K */
	const uint8_t *at;
	int64_t stride;
};

struct tile_block {
	const struct attend_shape *shape;
	uint32_t count, groups;			   /* rows, and 16 of them each */
	uint32_t steps;				   /* of 32 values, rests included */
	uint32_t outs;				   /* tiles of 16 values of o */
	uint16_t column[2 * ATTEND_DIMS_MAX / 32]; /* of a step: bytes in a row of K */
	uint32_t rest_first, rest_steps;
	uint16_t *rows[2]; /* 16 rows of q as bf16, and their rests */
	float *wide;	   /* one row of q */
	uint8_t *q;	   /* [groups][steps] tiles */
	uint8_t *o;	   /* [groups][outs] */
	uint8_t *k;	   /* [TOKENS][dqk], that is copied */
	uint8_t *v;	   /* [TOKENS / 32][outs] */
	float *s;	   /* [2][TOKENS][16] logits, then weights */
	uint8_t *p;	   /* [2][TOKENS / 32] tiles */
	bool first;	   /* batch */
	bool past;	   /* caches: o is too large to stay in L2 with the rest */
	struct tile_rows tiles[TOKENS / 16];
	__m512 m[GROUPS], l[GROUPS];
};

/* Of the kernel: before and after its products. */
static void tile_begin(void);
static void tile_finish(void);
/* Logits of `groups` groups from `g` on, 1 or 2, to block->s. */
static void tile_logits(const struct tile_block *block, uint32_t g, uint32_t groups,
			uint32_t padded);
/* o += weights * v of these groups. */
static void tile_outputs(const struct tile_block *block, uint32_t g, uint32_t groups,
			 const struct attend_batch *batch, uint32_t padded);
/* Packs V of a batch, if all groups read the same. */
static void tile_values(struct tile_block *block, const struct attend_batch *batch,
			uint32_t padded);

/* 16 rows of 16 dwords. */
static inline void tile_transpose(__m512i *r)
{
	__m512i t[16];
	uint32_t i;

	for (i = 0; i < 16; i += 4) {
		__m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]);
		__m512i b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
		__m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
		__m512i d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);

		t[i] = _mm512_unpacklo_epi64(a, c);
		t[i + 1] = _mm512_unpackhi_epi64(a, c);
		t[i + 2] = _mm512_unpacklo_epi64(b, d);
		t[i + 3] = _mm512_unpackhi_epi64(b, d);
	}
	for (i = 0; i < 4; i++) {
		__m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
		__m512i b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
		__m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
		__m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);

		r[i] = _mm512_shuffle_i32x4(a, c, 0x88);
		r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
		r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
		r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
	}
}

/* exp, also of x > 0 (tanh's, up to 40); relative errors of 3e-7 from -10 on, of 2e-6 at
 * -87. 2^n times a polynomial of 2^r for -0.5 <= r <= 0.5, which is 1 at 0 and has the
 * least error relative to 2^r. Below -104 it is 0, of -inf too; max returns its second
 * operand for a NaN. */
static inline __m512 tile_exp(__m512 x)
{
	const __m512 log2e = _mm512_set1_ps(1.44269504f);
	__m512 n, r, p = _mm512_set1_ps(1.32647273e-3f);

	x = _mm512_max_ps(_mm512_set1_ps(-110), x);
	n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), 8);
	r = _mm512_fmsub_ps(x, log2e, n);
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.67151299e-3f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55073358e-2f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40222424e-1f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147004e-1f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
	return _mm512_scalef_ps(p, n);
}

/* cap * tanh(x / cap). tanh is 1 - 2 / (exp(2y) + 1), and 1 from 20 on; near 0, where
 * that would cancel most digits, it is the Taylor series to y^9. exp of a large negative
 * value is 0. min gives its second operand for a NaN. */
static inline __m512 tile_cap(__m512 x, float cap)
{
	const __m512 one = _mm512_set1_ps(1);
	__m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1 / cap)), y2 = _mm512_mul_ps(y, y);
	__m512 near = _mm512_set1_ps(62.0f / 2835), far;

	near = _mm512_fmadd_ps(near, y2, _mm512_set1_ps(-17.0f / 315));
	near = _mm512_fmadd_ps(near, y2, _mm512_set1_ps(2.0f / 15));
	near = _mm512_fmadd_ps(near, y2, _mm512_set1_ps(-1.0f / 3));
	near = _mm512_fmadd_ps(_mm512_mul_ps(near, y2), y, y);
	far = _mm512_min_ps(_mm512_set1_ps(20), y);
	far = _mm512_add_ps(tile_exp(_mm512_add_ps(far, far)), one);
	far = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2), far));
	far = _mm512_mask_mov_ps(
		far,
		_mm512_cmp_ps_mask(_mm512_abs_ps(y), _mm512_set1_ps(0.25f), _CMP_LT_OQ),
		near);
	return _mm512_mul_ps(far, _mm512_set1_ps(cap));
}

/* 16 rows of bf16, `step` of 32 values, become a second factor. */
static void tile_pack_step(uint8_t *tile, const uint16_t *rows, uint32_t dqk, uint32_t at)
{
	__m512i r[16];
	uint32_t i;

	for (i = 0; i < 16; i++)
		r[i] = _mm512_loadu_si512(rows + (size_t)i * dqk + at);
	tile_transpose(r);
	for (i = 0; i < 16; i++)
		_mm512_store_si512(tile + 64 * (size_t)i, r[i]);
}

/* A row of q as bf16, with the remainder of a rotation. */
static void tile_row(struct tile_block *block, struct attend_work *work,
		     const struct attend_row *row, uint32_t at)
{
	uint32_t dqk = block->shape->dqk, d;
	uint16_t *near = block->rows[0] + (size_t)at * dqk;
	uint16_t *rest = block->rows[1] + (size_t)at * dqk;

	memcpy(near, row->q, dqk * sizeof(*near));
	if (block->rest_steps)
		memset(rest, 0, dqk * sizeof(*rest));
	if (!row->delta)
		return;
	attend_q(work, row, block->wide);
	for (d = 32 * block->rest_first; d < 32 * (block->rest_first + block->rest_steps);
	     d++) {
		near[d] = value_to_bf16(block->wide[d]);
		rest[d] = value_to_bf16(block->wide[d] - value_from_bf16(near[d]));
	}
}

/* false: stopped */
static bool tile_pack_q(struct tile_block *block, struct attend_work *work,
			const struct attend_row *rows, uint32_t count)
{
	uint32_t dqk = block->shape->dqk, whole = dqk / 32, g, i, n;
	uint8_t *tile = block->q;

	for (g = 0; g < block->groups; g++) {
		if (attend_stop(work)) /* separate deltas cost 2 us a row */
			return false;
		n = count - 16 * g < 16 ? count - 16 * g : 16;
		for (i = 0; i < n; i++)
			tile_row(block, work, &rows[16 * g + i], i);
		if (n < 16)
			for (i = 0; i < 2; i++)
				memset(block->rows[i] + (size_t)n * dqk, 0,
				       (size_t)(16 - n) * dqk * sizeof(uint16_t));
		for (i = 0; i < block->steps; i++, tile += TILE)
			tile_pack_step(tile, block->rows[i >= whole], dqk,
				       block->column[i] / 2);
	}
	return true;
}

/* The addresses of K of each 16 tokens; `count` becomes a multiple of 32. */
static uint32_t tile_place_k(struct tile_block *block, const struct attend_batch *batch)
{
	uint32_t bytes = block->shape->dqk * 2u, padded = (batch->count + 31) / 32 * 32;
	uint32_t i, j, n;

	for (i = 0; i < padded; i += 16) {
		struct tile_rows *tile = &block->tiles[i / 16];
		const uint8_t *const *k = batch->k + i;
		uint8_t *copy = block->k + (size_t)i * bytes;

		n = batch->count < i ? 0 : batch->count - i < 16 ? batch->count - i : 16;
		*tile = (struct tile_rows){copy, bytes};
		if (n == 16) {
			int64_t stride = k[1] - k[0];

			for (j = 2; j < 16 && k[j] - k[j - 1] == stride; j++)
				;
			if (j == 16 && (stride == bytes || block->groups <= 2)) {
				*tile = (struct tile_rows){k[0], stride};
				continue;
			}
		}
		for (j = 0; j < n; j++)
			memcpy(copy + (size_t)j * bytes, k[j], bytes);
	}
	return padded;
}

/* A pair of tokens' V from value `at` on, 32 of them, interleaved: a row of two tiles.
 * ATTEND_NONE is zeros. */
static inline void tile_pack_pair(uint8_t *to, const struct attend_batch *batch,
				  uint32_t token, uint32_t at)
{
	const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42,
					     10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
					     35, 3, 34, 2, 33, 1, 32, 0);
	const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
	__m512i x = _mm512_setzero_si512(), y = x;

	if (token < batch->count)
		x = _mm512_loadu_si512(batch->v[token] + 2 * (size_t)at);
	if (token + 1 < batch->count)
		y = _mm512_loadu_si512(batch->v[token + 1] + 2 * (size_t)at);
	_mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
	_mm512_store_si512(to + TILE, _mm512_permutex2var_epi16(x, high, y));
}

static void tile_pack_v(struct tile_block *block, const struct attend_batch *batch,
			uint32_t padded)
{
	uint32_t i, d;

	for (i = 0; i < padded; i += 2) {
		uint8_t *to = block->v + (size_t)(i / 32) * block->outs * TILE +
			      i % 32 / 2 * 64;

		for (d = 0; d < block->outs; d += 2, to += 2 * TILE)
			tile_pack_pair(to, batch, i, 16 * d);
	}
}

/* One group's logits become weights, as tiles; returns the factor of o. */
static __m512 tile_weights(struct tile_block *block, uint32_t g, float *s, uint8_t *p,
			   uint32_t tokens)
{
	const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26,
					       10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
					       4, 19, 3, 18, 2, 17, 1, 16, 0);
	const __m512 scale = _mm512_set1_ps(block->shape->scale);
	__m512 m = block->m[g], safe, again, sum = _mm512_setzero_ps(), x[2];
	float cap = block->shape->softcap;
	__m512i pair[16];
	uint32_t t, i, j;

	for (t = 0; t < tokens; t++) {
		x[0] = _mm512_mul_ps(_mm512_load_ps(s + 16 * (size_t)t), scale);
		if (cap != 0)
			x[0] = tile_cap(x[0], cap);
		_mm512_store_ps(s + 16 * (size_t)t, x[0]);
		m = _mm512_max_ps(x[0], m); /* a NaN: m stays */
	}
	/* -inf - -inf would be a NaN */
	safe = _mm512_mask_mov_ps(
		m, _mm512_cmp_ps_mask(m, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ),
		_mm512_setzero_ps());
	again = tile_exp(_mm512_sub_ps(block->m[g], safe));
	for (t = 0; t < tokens; t += 32, p += TILE) {
		for (i = 0; i < 16; i++) {
			for (j = 0; j < 2; j++) {
				x[j] = _mm512_setzero_ps();
				if (t + 2 * i + j < tokens)
					x[j] = tile_exp(_mm512_sub_ps(
						_mm512_load_ps(
							s + 16 * (size_t)(t + 2 * i + j)),
						safe));
				sum = _mm512_add_ps(sum, x[j]);
			}
			pair[i] = _mm512_permutexvar_epi16(
				pairs, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
		}
		tile_transpose(pair);
		for (i = 0; i < 16; i++)
			_mm512_store_si512(p + 64 * (size_t)i, pair[i]);
	}
	block->m[g] = m;
	block->l[g] = _mm512_fmadd_ps(block->l[g], again, sum);
	return again;
}

/* o of one group times `again`, which is 1 for most rows: of b batches, the b-th has the
 * largest logit of a row in one of b cases. */
static void tile_again(const struct tile_block *block, uint32_t g, __m512 again)
{
	uint8_t *o = block->o + (size_t)g * block->outs * TILE;
	uint32_t rows = _mm512_cmp_ps_mask(again, _mm512_set1_ps(1), _CMP_NEQ_UQ), i;
	float by[16];

	_mm512_storeu_ps(by, again);
	for (; rows; rows &= rows - 1) {
		uint32_t row = (uint32_t)__builtin_ctz(rows);
		uint8_t *at = o + 64 * (size_t)row;
		__m512 factor = _mm512_set1_ps(by[row]);

		for (i = 0; i < block->outs; i++, at += TILE)
			_mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
	}
}

/* One or two groups meet a batch. */
static void tile_meet(struct tile_block *block, uint32_t g,
		      const struct attend_batch *batch, uint32_t padded)
{
	uint32_t groups = block->groups - g < 2 ? 1 : 2, i;
	__m512 again;

	tile_logits(block, g, groups, padded);
	for (i = 0; i < groups; i++) {
		again = tile_weights(block, g + i, block->s + (size_t)i * TOKENS * 16,
				     block->p + (size_t)i * (TOKENS / 32) * TILE,
				     batch->count);
		if (!block->first)
			tile_again(block, g + i, again);
	}
	tile_outputs(block, g, groups, batch, padded);
}

/* The steps along dqk: K's columns once, and those with rope values again for rests. */
static void tile_steps(struct tile_block *block, const struct attend_work *work,
		       const struct attend_row *rows, uint32_t count)
{
	const struct rope *rope = work->job->rope;
	uint32_t i;

	block->steps = block->shape->dqk / 32;
	for (i = 0; i < block->steps; i++)
		block->column[i] = (uint16_t)(64 * i);
	block->rest_first = block->rest_steps = 0;
	for (i = 0; i < count && !rows[i].delta; i++)
		;
	if (i == count || !rope->dims)
		return;
	block->rest_first = rope->first / 32;
	block->rest_steps = (rope->first + rope->dims + 31u) / 32 - block->rest_first;
	for (i = 0; i < block->rest_steps; i++)
		block->column[block->steps++] = (uint16_t)(64 * (block->rest_first + i));
}

/* One row of o, which lies in `outs` tiles, times `share`. */
static void tile_end_row(const struct tile_block *block, float *out, const uint8_t *o,
			 float share)
{
	__m512 by = _mm512_set1_ps(share);
	uint32_t i;

	if (share == 0) /* of no token: o may be anything */
		memset(out, 0, block->outs * 16 * sizeof(*out));
	else if (block->past && (uintptr_t)out % 64 == 0)
		for (i = 0; i < block->outs; i++, o += TILE)
			_mm512_stream_ps(out + 16 * (size_t)i,
					 _mm512_mul_ps(_mm512_load_ps(o), by));
	else
		for (i = 0; i < block->outs; i++, o += TILE)
			_mm512_storeu_ps(out + 16 * (size_t)i,
					 _mm512_mul_ps(_mm512_load_ps(o), by));
}

static void tile_end(const struct tile_block *block, const struct attend_row *rows,
		     uint32_t count)
{
	float m[16], l[16];
	uint32_t i;

	for (i = 0; i < count; i++) {
		const uint8_t *o = block->o + (size_t)(i / 16) * block->outs * TILE +
				   (size_t)(i % 16) * 64;

		if (i % 16 == 0) {
			_mm512_storeu_ps(m, block->m[i / 16]);
			_mm512_storeu_ps(l, block->l[i / 16]);
		}
		*rows[i].m = m[i % 16];
		*rows[i].l = l[i % 16];
		tile_end_row(block, rows[i].o, o, l[i % 16] == 0 ? 0 : 1 / l[i % 16]);
	}
}

static bool tile_rows(struct tile_block *block, struct attend_work *work,
		      const struct attend_group *group, const struct attend_row *rows,
		      uint32_t count)
{
	struct attend_batch batch;
	uint32_t g, padded;

	batch.next = group->begin;
	block->count = count;
	block->groups = (count + 15) / 16;
	tile_steps(block, work, rows, count);
	if (!tile_pack_q(block, work, rows, count))
		return false;
	for (g = 0; g < block->groups; g++) {
		block->m[g] = _mm512_set1_ps(-INFINITY);
		block->l[g] = _mm512_setzero_ps();
	}
	for (block->first = true; attend_next(work, group, &batch, TOKENS);
	     block->first = false) {
		padded = tile_place_k(block, &batch);
		tile_values(block, &batch, padded);
		for (g = 0; g < block->groups; g += 2) {
			if (attend_stop(work))
				return false;
			tile_meet(block, g, &batch, padded);
		}
	}
	tile_end(block, rows, count);
	return true;
}

static uint32_t tile_steps_max(const struct attend_shape *shape)
{
	return 2u * shape->dqk / 32;
}

static void tile_place(struct tile_block *block, const struct attend_work *work)
{
	const struct attend_shape *shape = work->job->shape;
	uint8_t *at = work->kernel;

	block->shape = shape;
	block->outs = shape->dv / 16u;
	block->rows[0] = attend_carve(&at, 16u * shape->dqk * sizeof(uint16_t));
	block->rows[1] = attend_carve(&at, 16u * shape->dqk * sizeof(uint16_t));
	block->wide = attend_carve(&at, shape->dqk * sizeof(float));
	block->q = attend_carve(&at, (size_t)GROUPS * tile_steps_max(shape) * TILE);
	block->o = attend_carve(&at, (size_t)GROUPS * block->outs * TILE);
	block->k = attend_carve(&at, (size_t)TOKENS * shape->dqk * sizeof(uint16_t));
	block->v = attend_carve(&at, (size_t)TOKENS / 32 * block->outs * TILE);
	block->s = attend_carve(&at, 2 * TOKENS * 16 * sizeof(float));
	block->p = attend_carve(&at, (size_t)2 * TOKENS / 32 * TILE);
}

static size_t tile_scratch_bytes(const struct attend_shape *shape)
{
	size_t dqk = shape->dqk, outs = shape->dv / 16u;

	return 64 * dqk + 4 * dqk + GROUPS * (tile_steps_max(shape) + outs) * TILE +
	       TOKENS * 2 * dqk + TOKENS / 32 * outs * TILE + TOKENS * 128 +
	       TOKENS / 16 * TILE + 16 * 64;
}

static bool tile_group(struct attend_work *work, const struct attend_group *group)
{
	struct tile_block block;
	bool going = true;
	uint32_t row, n;

	tile_place(&block, work);
	tile_begin();
	block.past = (size_t)group->count * block.outs * 64 > PAST_BYTES;
	for (row = 0; row < group->count && going; row += n) {
		n = group->count - row < 16 * GROUPS ? group->count - row : 16 * GROUPS;
		going = tile_rows(&block, work, group, group->rows + row, n);
	}
	if (block.past)
		_mm_sfence(); /* streamed stores are not ordered by others' locks */
	tile_finish();
	return going;
}

static bool tile_takes(const struct attend_shape *shape)
{
	return shape->q_type == VALUE_BF16 && shape->kv_type == VALUE_BF16 &&
	       shape->dqk % 32 == 0 && shape->dv % 32 == 0;
}

#define TILE_TABLE(text)                                                                \
	{                                                                               \
		.name = text, .takes = tile_takes, .scratch_bytes = tile_scratch_bytes, \
		.group = tile_group,                                                    \
	}

#endif
