/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel for AMX: products of tiles of 16 rows by 64 bytes, bf16 with fp32 sums.
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
 * together; o is kept as tiles, so that 16 rows of it do not map to two sets of L1. Two
 * groups of 16 rows at a time share each load (four products for four loads); one group
 * alone waits for memory anyway, and V is then packed piece by piece. The processor
 * prefetches well enough: explicit prefetches made nothing faster.
 *
 * Fewer than 16 tokens in the last tile, or tokens at uneven distances (another page, a
 * selection), have their K copied. Logits of the copy's other rows are not read: their
 * weight is 0, and their V is packed as 0. Memory outside the chunk is not read.
 *
 * A row whose chunk has moved has q rotated in fp32. It is used as two bf16, the number
 * and its rest, each with the same K: a rounding of q would be of the size of a rounding
 * of K, which routing must avoid. That costs two or three steps for 64 rope values; and
 * an infinite rope value in K is a NaN for the whole block, because most rests are 0.
 *
 * Linux saves tile registers for a process that requested it
 * (Documentation/arch/x86/xstate.rst: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA is 18);
 * without, the first tile instruction is a SIGILL. Products take denormals as 0 (Intel
 * SDM, TDPBF16PS).
 */
#include "daemon/math/attend_impl.h"

/* clang 14 has the name without the underscore */
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

#define TOKENS 128u /* a batch; a multiple of 64 */
#define GROUPS 16u  /* of 16 rows, in a block */
#define TILE 1024u  /* bytes */
#define PAST_BYTES (1u << 20)
#define STEPS 9u /* of q that stay in L1 while K passes */

struct amx_tile_rows { /* 16 tokens' K */
	const uint8_t *at;
	int64_t stride;
};

struct amx_block {
	const struct attend_shape *shape;
	uint32_t groups;
	uint32_t steps;				   /* of 32 values, rests included */
	uint32_t outs;				   /* tiles of 16 values of o */
	uint16_t column[2 * ATTEND_DIMS_MAX / 32]; /* of a step: bytes in a row of K */
	uint32_t rest_first, rest_steps;
	uint16_t *rows[2]; /* 16 rows of q as bf16, and their rests */
	float *wide;	   /* one row of q */
	uint8_t *q;	   /* [groups][steps] tiles */
	uint8_t *o;	   /* [groups][outs] */
	uint8_t *k;	   /* [TOKENS][dqk], for tokens at uneven distances */
	uint8_t *v;	   /* [TOKENS / 32][outs] */
	float *s;	   /* [2][TOKENS][16] logits, then weights */
	uint8_t *p;	   /* [2][TOKENS / 32] tiles */
	bool first;	   /* batch */
	bool past;	   /* caches: o is too large to stay in L2 with the rest */
	struct amx_tile_rows tiles[TOKENS / 16];
	__m512 m[GROUPS], l[GROUPS];
};

/* Palette 1: all eight tiles are whole. */
static void amx_configure(void)
{
	struct {
		uint8_t palette, start, reserved[14];
		uint16_t columns[16];
		uint8_t rows[16];
	} config = {.palette = 1};
	uint32_t i;

	for (i = 0; i < 8; i++) {
		config.columns[i] = 64;
		config.rows[i] = 16;
	}
	_tile_loadconfig(&config);
}

/* 16 rows of 16 dwords. */
static inline void amx_transpose(__m512i *r)
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

/* merge_exp() in lanes, but for the term r^7; of x > 0 (tanh's, up to 40), too. */
static inline __m512 amx_exp(__m512 x)
{
	__m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
	__m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x), p;

	r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
	p = _mm512_set1_ps(1.38888889e-3f);
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.33333333e-3f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666667e-2f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666667e-1f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
	p = _mm512_scalef_ps(p, n);
	/* -inf: inf - inf above */
	return _mm512_mask_mov_ps(
		p, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ),
		_mm512_setzero_ps());
}

/* cap * tanh(x / cap). tanh is 1 - 2 / (exp(2y) + 1), and 1 from 20 on; near 0, where
 * that would cancel most digits, it is the Taylor series to y^9. exp of a large negative
 * value is 0. min gives its second operand for a NaN. */
static inline __m512 amx_cap(__m512 x, float cap)
{
	const __m512 one = _mm512_set1_ps(1);
	__m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1 / cap)), y2 = _mm512_mul_ps(y, y);
	__m512 near = _mm512_set1_ps(62.0f / 2835), far;

	near = _mm512_fmadd_ps(near, y2, _mm512_set1_ps(-17.0f / 315));
	near = _mm512_fmadd_ps(near, y2, _mm512_set1_ps(2.0f / 15));
	near = _mm512_fmadd_ps(near, y2, _mm512_set1_ps(-1.0f / 3));
	near = _mm512_fmadd_ps(_mm512_mul_ps(near, y2), y, y);
	far = _mm512_min_ps(_mm512_set1_ps(20), y);
	far = _mm512_add_ps(amx_exp(_mm512_add_ps(far, far)), one);
	far = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2), far));
	far = _mm512_mask_mov_ps(
		far,
		_mm512_cmp_ps_mask(_mm512_abs_ps(y), _mm512_set1_ps(0.25f), _CMP_LT_OQ),
		near);
	return _mm512_mul_ps(far, _mm512_set1_ps(cap));
}

/* 16 rows of bf16, `step` of 32 values, become a second factor. */
static void amx_pack_step(uint8_t *tile, const uint16_t *rows, uint32_t dqk, uint32_t at)
{
	__m512i r[16];
	uint32_t i;

	for (i = 0; i < 16; i++)
		r[i] = _mm512_loadu_si512(rows + (size_t)i * dqk + at);
	amx_transpose(r);
	for (i = 0; i < 16; i++)
		_mm512_store_si512(tile + 64 * (size_t)i, r[i]);
}

/* A row of q as bf16, with the remainder of a rotation. */
static void amx_row(struct amx_block *block, struct attend_work *work,
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
static bool amx_pack_q(struct amx_block *block, struct attend_work *work,
		       const struct attend_row *rows, uint32_t count)
{
	uint32_t dqk = block->shape->dqk, whole = dqk / 32, g, i, n;
	uint8_t *tile = block->q;

	for (g = 0; g < block->groups; g++) {
		if (attend_stop(work)) /* separate deltas cost 2 us a row */
			return false;
		n = count - 16 * g < 16 ? count - 16 * g : 16;
		for (i = 0; i < n; i++)
			amx_row(block, work, &rows[16 * g + i], i);
		if (n < 16)
			for (i = 0; i < 2; i++)
				memset(block->rows[i] + (size_t)n * dqk, 0,
				       (size_t)(16 - n) * dqk * sizeof(uint16_t));
		for (i = 0; i < block->steps; i++, tile += TILE)
			amx_pack_step(tile, block->rows[i >= whole], dqk,
				      block->column[i] / 2);
	}
	return true;
}

/* The addresses of K of each 16 tokens; `count` becomes a multiple of 32. */
static uint32_t amx_place_k(struct amx_block *block, const struct attend_batch *batch)
{
	uint32_t bytes = block->shape->dqk * 2u, padded = (batch->count + 31) / 32 * 32;
	uint32_t i, j, n;

	for (i = 0; i < padded; i += 16) {
		struct amx_tile_rows *tile = &block->tiles[i / 16];
		const uint8_t *const *k = batch->k + i;
		uint8_t *copy = block->k + (size_t)i * bytes;

		n = batch->count < i ? 0 : batch->count - i < 16 ? batch->count - i : 16;
		*tile = (struct amx_tile_rows){copy, bytes};
		if (n == 16) {
			int64_t stride = k[1] - k[0];

			for (j = 2; j < 16 && k[j] - k[j - 1] == stride; j++)
				;
			if (j == 16) {
				*tile = (struct amx_tile_rows){k[0], stride};
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
static inline void amx_pack_pair(uint8_t *to, const struct attend_batch *batch,
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

static void amx_pack_v(struct amx_block *block, const struct attend_batch *batch,
		       uint32_t padded)
{
	uint32_t i, d;

	for (i = 0; i < padded; i += 2) {
		uint8_t *to = block->v + (size_t)(i / 32) * block->outs * TILE +
			      i % 32 / 2 * 64;

		for (d = 0; d < block->outs; d += 2, to += 2 * TILE)
			amx_pack_pair(to, batch, i, 16 * d);
	}
}

/* The four tiles of results. */
static inline void amx_zero(void)
{
	_tile_zero(0);
	_tile_zero(1);
	_tile_zero(2);
	_tile_zero(3);
}

/* Results of one group, 64 values or 32: tiles one after the other. */
static inline void amx_begin_one(const uint8_t *o, bool first, bool four)
{
	amx_zero();
	if (first)
		return;
	_tile_loadd(0, o, 64);
	_tile_loadd(1, o + TILE, 64);
	if (four) {
		_tile_loadd(2, o + 2 * TILE, 64);
		_tile_loadd(3, o + 3 * TILE, 64);
	}
}

/* The shares p of 32 tokens, times their v. */
static inline void amx_add_one(const uint8_t *p, const uint8_t *v, bool four)
{
	_tile_loadd(4, p, 64);
	_tile_loadd(5, v, 64);
	_tile_loadd(6, v + TILE, 64);
	_tile_dpbf16ps(0, 4, 5);
	_tile_dpbf16ps(1, 4, 6);
	if (four) {
		_tile_loadd(5, v + 2 * TILE, 64);
		_tile_loadd(6, v + 3 * TILE, 64);
		_tile_dpbf16ps(2, 4, 5);
		_tile_dpbf16ps(3, 4, 6);
	}
}

static inline void amx_end_one(uint8_t *o, bool four)
{
	_tile_stored(0, o, 64);
	_tile_stored(1, o + TILE, 64);
	if (four) {
		_tile_stored(2, o + 2 * TILE, 64);
		_tile_stored(3, o + 3 * TILE, 64);
	}
}

/* Logits of 32 tokens and two groups: steps [from, to). */
static void amx_logits_two(const struct amx_block *block, const struct amx_tile_rows *k,
			   const uint8_t *q, float *s, uint32_t from, uint32_t to)
{
	const uint8_t *q2 = q + (size_t)block->steps * TILE;
	float *s2 = s + TOKENS * 16;
	uint32_t i;

	if (from) {
		_tile_loadd(0, s, 64);
		_tile_loadd(1, s + 16 * 16, 64);
		_tile_loadd(2, s2, 64);
		_tile_loadd(3, s2 + 16 * 16, 64);
	} else {
		amx_zero();
	}
	for (i = from; i < to; i++) {
		uint32_t column = block->column[i];

		_tile_loadd(4, k[0].at + column, k[0].stride);
		_tile_loadd(6, q + (size_t)i * TILE, 64);
		_tile_loadd(5, k[1].at + column, k[1].stride);
		_tile_loadd(7, q2 + (size_t)i * TILE, 64);
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 5, 6);
		_tile_dpbf16ps(2, 4, 7);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_stored(0, s, 64);
	_tile_stored(1, s + 16 * 16, 64);
	_tile_stored(2, s2, 64);
	_tile_stored(3, s2 + 16 * 16, 64);
}

/* Logits of 64 tokens and one group; of 32 when k[2] is none. */
static void amx_logits_one(const struct amx_block *block, const struct amx_tile_rows *k,
			   bool four, const uint8_t *q, float *s)
{
	uint32_t i;

	amx_zero();
	for (i = 0; i < block->steps; i++, q += TILE) {
		uint32_t column = block->column[i];

		_tile_loadd(7, q, 64);
		_tile_loadd(4, k[0].at + column, k[0].stride);
		_tile_loadd(5, k[1].at + column, k[1].stride);
		_tile_dpbf16ps(0, 4, 7);
		_tile_dpbf16ps(1, 5, 7);
		if (four) {
			_tile_loadd(4, k[2].at + column, k[2].stride);
			_tile_loadd(5, k[3].at + column, k[3].stride);
			_tile_dpbf16ps(2, 4, 7);
			_tile_dpbf16ps(3, 5, 7);
		}
	}
	_tile_stored(0, s, 64);
	_tile_stored(1, s + 16 * 16, 64);
	if (four) {
		_tile_stored(2, s + 32 * 16, 64);
		_tile_stored(3, s + 48 * 16, 64);
	}
}

static void amx_logits(const struct amx_block *block, uint32_t g, uint32_t groups,
		       uint32_t padded)
{
	const uint8_t *q = block->q + (size_t)g * block->steps * TILE;
	const struct amx_tile_rows *k = block->tiles;
	uint32_t t, step, from, to;

	for (t = 0; groups == 1 && t < padded; t += step) {
		step = padded - t >= 64 ? 64 : 32;
		amx_logits_one(block, k + t / 16, step == 64, q, block->s + 16 * t);
	}
	for (from = 0; groups == 2 && from < block->steps; from = to) {
		to = block->steps - from > STEPS ? from + STEPS : block->steps;
		for (t = 0; t < padded; t += 32)
			amx_logits_two(block, k + t / 16, q, block->s + 16 * t, from, to);
	}
}

/* One group's logits become weights, as tiles; returns the factor of o. */
static __m512 amx_weights(struct amx_block *block, uint32_t g, float *s, uint8_t *p,
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
			x[0] = amx_cap(x[0], cap);
		_mm512_store_ps(s + 16 * (size_t)t, x[0]);
		m = _mm512_max_ps(x[0], m); /* a NaN: m stays */
	}
	/* -inf - -inf would be a NaN */
	safe = _mm512_mask_mov_ps(
		m, _mm512_cmp_ps_mask(m, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ),
		_mm512_setzero_ps());
	again = amx_exp(_mm512_sub_ps(block->m[g], safe));
	for (t = 0; t < tokens; t += 32, p += TILE) {
		for (i = 0; i < 16; i++) {
			for (j = 0; j < 2; j++) {
				x[j] = _mm512_setzero_ps();
				if (t + 2 * i + j < tokens)
					x[j] = amx_exp(_mm512_sub_ps(
						_mm512_load_ps(
							s + 16 * (size_t)(t + 2 * i + j)),
						safe));
				sum = _mm512_add_ps(sum, x[j]);
			}
			pair[i] = _mm512_permutexvar_epi16(
				pairs, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
		}
		amx_transpose(pair);
		for (i = 0; i < 16; i++)
			_mm512_store_si512(p + 64 * (size_t)i, pair[i]);
	}
	block->m[g] = m;
	block->l[g] = _mm512_fmadd_ps(block->l[g], again, sum);
	return again;
}

/* o of one group times `again`, which is 1 for most rows: of b batches, the b-th has the
 * largest logit of a row in one of b cases. */
static void amx_again(const struct amx_block *block, uint32_t g, __m512 again)
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

/* o of two groups and 32 values; tile i of v lies `apart` bytes on. */
static void amx_outputs_two(const struct amx_block *block, uint8_t *o, const uint8_t *v,
			    uint32_t padded)
{
	uint8_t *o2 = o + (size_t)block->outs * TILE;
	size_t apart = (size_t)block->outs * TILE;
	const uint8_t *p = block->p;
	uint32_t t;

	if (block->first) {
		amx_zero();
	} else {
		_tile_loadd(0, o, 64);
		_tile_loadd(1, o + TILE, 64);
		_tile_loadd(2, o2, 64);
		_tile_loadd(3, o2 + TILE, 64);
	}
	for (t = 0; t < padded; t += 32, p += TILE, v += apart) {
		_tile_loadd(4, p, 64);
		_tile_loadd(6, v, 64);
		_tile_loadd(7, v + TILE, 64);
		_tile_loadd(5, p + TOKENS / 32 * TILE, 64);
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 4, 7);
		_tile_dpbf16ps(2, 5, 6);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_stored(0, o, 64);
	_tile_stored(1, o + TILE, 64);
	_tile_stored(2, o2, 64);
	_tile_stored(3, o2 + TILE, 64);
}

/* 32 tokens' V, 64 values or 32. */
static inline void amx_pack_some(uint8_t *to, const struct attend_batch *batch,
				 uint32_t token, uint32_t at, bool four)
{
	uint32_t i;

	for (i = 0; i < 32; i += 2, to += 64) {
		amx_pack_pair(to, batch, token + i, at);
		if (four)
			amx_pack_pair(to + 2 * TILE, batch, token + i, at + 32);
	}
}

/* o of a single group, 64 values from `at` on, or 32. V is packed as it is used, one
 * piece ahead: packing all of it would write it to L2 and back for one use. */
static void amx_outputs_alone(const struct amx_block *block,
			      const struct attend_batch *batch, uint32_t at, bool four,
			      uint32_t padded)
{
	uint8_t *o = block->o + (size_t)at / 16 * TILE, *v = block->v,
		*ahead = v + 4 * TILE;
	const uint8_t *p = block->p;
	uint32_t t;

	amx_begin_one(o, block->first, four);
	amx_pack_some(v, batch, 0, at, four);
	for (t = 0; t < padded; t += 32, p += TILE) {
		uint8_t *now = v;

		if (t + 32 < padded)
			amx_pack_some(ahead, batch, t + 32, at, four);
		amx_add_one(p, now, four);
		v = ahead;
		ahead = now;
	}
	amx_end_one(o, four);
}

/* o of one group and 64 values, or 32. */
static void amx_outputs_one(const struct amx_block *block, uint8_t *o, const uint8_t *v,
			    bool four, uint32_t padded)
{
	size_t apart = (size_t)block->outs * TILE;
	const uint8_t *p = block->p;
	uint32_t t;

	amx_begin_one(o, block->first, four);
	for (t = 0; t < padded; t += 32, p += TILE, v += apart)
		amx_add_one(p, v, four);
	amx_end_one(o, four);
}

/* One or two groups meet a batch. */
static void amx_meet(struct amx_block *block, uint32_t g,
		     const struct attend_batch *batch, uint32_t padded)
{
	uint32_t groups = block->groups - g < 2 ? 1 : 2, i, step;
	uint8_t *o = block->o + (size_t)g * block->outs * TILE;
	__m512 again;

	amx_logits(block, g, groups, padded);
	for (i = 0; i < groups; i++) {
		again = amx_weights(block, g + i, block->s + (size_t)i * TOKENS * 16,
				    block->p + (size_t)i * (TOKENS / 32) * TILE,
				    batch->count);
		if (!block->first)
			amx_again(block, g + i, again);
	}
	for (i = 0; i < block->outs; i += step) {
		step = groups == 1 && block->outs - i >= 4 ? 4 : 2;
		if (block->groups == 1)
			amx_outputs_alone(block, batch, 16 * i, step == 4, padded);
		else if (groups == 2)
			amx_outputs_two(block, o + i * TILE, block->v + i * TILE, padded);
		else
			amx_outputs_one(block, o + i * TILE, block->v + i * TILE,
					step == 4, padded);
	}
}

/* The steps along dqk: K's columns once, and those with rope values again for rests. */
static void amx_steps(struct amx_block *block, const struct attend_work *work,
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
static void amx_end_row(const struct amx_block *block, float *out, const uint8_t *o,
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

static void amx_end(const struct amx_block *block, const struct attend_row *rows,
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
		amx_end_row(block, rows[i].o, o, l[i % 16] == 0 ? 0 : 1 / l[i % 16]);
	}
}

static bool amx_rows(struct amx_block *block, struct attend_work *work,
		     const struct attend_group *group, const struct attend_row *rows,
		     uint32_t count)
{
	struct attend_batch batch = {.next = group->begin};
	uint32_t g, padded;

	block->groups = (count + 15) / 16;
	amx_steps(block, work, rows, count);
	if (!amx_pack_q(block, work, rows, count))
		return false;
	for (g = 0; g < block->groups; g++) {
		block->m[g] = _mm512_set1_ps(-INFINITY);
		block->l[g] = _mm512_setzero_ps();
	}
	for (block->first = true; attend_next(work, group, &batch, TOKENS);
	     block->first = false) {
		padded = amx_place_k(block, &batch);
		if (block->groups > 1)
			amx_pack_v(block, &batch, padded);
		for (g = 0; g < block->groups; g += 2) {
			if (attend_stop(work))
				return false;
			amx_meet(block, g, &batch, padded);
		}
	}
	amx_end(block, rows, count);
	return true;
}

static uint32_t amx_steps_max(const struct attend_shape *shape)
{
	return 2u * shape->dqk / 32;
}

static void amx_place(struct amx_block *block, const struct attend_work *work)
{
	const struct attend_shape *shape = work->job->shape;
	uint8_t *at = work->kernel;

	block->shape = shape;
	block->outs = shape->dv / 16u;
	block->rows[0] = attend_carve(&at, 16u * shape->dqk * sizeof(uint16_t));
	block->rows[1] = attend_carve(&at, 16u * shape->dqk * sizeof(uint16_t));
	block->wide = attend_carve(&at, shape->dqk * sizeof(float));
	block->q = attend_carve(&at, (size_t)GROUPS * amx_steps_max(shape) * TILE);
	block->o = attend_carve(&at, (size_t)GROUPS * block->outs * TILE);
	block->k = attend_carve(&at, (size_t)TOKENS * shape->dqk * sizeof(uint16_t));
	block->v = attend_carve(&at, (size_t)TOKENS / 32 * block->outs * TILE);
	block->s = attend_carve(&at, 2 * TOKENS * 16 * sizeof(float));
	block->p = attend_carve(&at, (size_t)2 * TOKENS / 32 * TILE);
}

static size_t amx_scratch_bytes(const struct attend_shape *shape)
{
	size_t dqk = shape->dqk, outs = shape->dv / 16u;

	return 64 * dqk + 4 * dqk + GROUPS * (amx_steps_max(shape) + outs) * TILE +
	       TOKENS * 2 * dqk + TOKENS / 32 * outs * TILE + TOKENS * 128 +
	       TOKENS / 16 * TILE + 16 * 64;
}

static bool amx_group(struct attend_work *work, const struct attend_group *group)
{
	struct amx_block block;
	bool going = true;
	uint32_t row, n;

	amx_place(&block, work);
	amx_configure();
	block.past = (size_t)group->count * block.outs * 64 > PAST_BYTES;
	for (row = 0; row < group->count && going; row += n) {
		n = group->count - row < 16 * GROUPS ? group->count - row : 16 * GROUPS;
		going = amx_rows(&block, work, group, group->rows + row, n);
	}
	if (block.past)
		_mm_sfence(); /* streamed stores are not ordered by others' locks */
	_tile_release();      /* else each switch of threads saves 8 KiB more */
	return going;
}

static bool amx_takes(const struct attend_shape *shape)
{
	return shape->q_type == VALUE_BF16 && shape->kv_type == VALUE_BF16 &&
	       shape->dqk % 32 == 0 && shape->dv % 32 == 0;
}

static const struct attend_kernel kernel = {
	.name = "amx",
	.takes = amx_takes,
	.scratch_bytes = amx_scratch_bytes,
	.group = amx_group,
};
const struct attend_kernel *const attend_amx = &kernel;

/* CPUID.7.0: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE; CPUID.7.1: EAX bit 5 AVX512_BF16.
 */
bool attend_amx_ready(void)
{
	uint32_t a, b, c, d;

	if (!__builtin_cpu_supports("avx512bf16"))
		return false;
	__asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
	if ((d & 1u << 22) == 0 || (d & 1u << 24) == 0)
		return false;
	return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else
const struct attend_kernel *const attend_amx = NULL;

bool attend_amx_ready(void)
{
	return false;
}
#endif
