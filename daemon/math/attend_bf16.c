/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel for AVX512-BF16 (attend_tile.h): a register holds 16 sums, and a product
 * adds two values of bf16 times two to each.
 *
 * Each sum is added to in one order for any number of rows, which decides only which
 * of them are in registers together. Of few rows, logits are computed with 16 tokens in a
 * register instead of 16 rows: transposing K costs less than products of rows that are
 * not there. Products take denormals as 0 (Intel SDM, VDPBF16PS).
 */
#include "daemon/math/attend_impl.h"

#if defined(__AVX512BF16__)
#include "daemon/math/attend_tile.h"

#define FEW 8u
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* sum += pairs * one pair, which all lanes have in common. */
INLINE __m512 bf16_add(__m512 sum, __m512i pairs, __m512i one)
{
	return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)one);
}

INLINE __m512i bf16_all(const uint8_t *pair)
{
	int32_t bits;

	memcpy(&bits, pair, sizeof(bits));
	return _mm512_set1_epi32(bits);
}

/* Logits of `tokens` tokens and some groups: in all 16 registers. */
INLINE void bf16_logits(const struct tile_block *block, const struct tile_rows *k,
			uint32_t at, const uint8_t *q, float *s, const uint32_t tokens,
			const uint32_t groups)
{
	__m512 sum[2][16];
	uint32_t step, pair, t, g;

	UNROLL
	for (g = 0; g < groups; g++)
		UNROLL
	for (t = 0; t < tokens; t++)
		sum[g][t] = _mm512_setzero_ps();
	for (step = 0; step < block->steps; step++, q += TILE) {
		const uint8_t *from = k->at + at * k->stride + block->column[step];

		for (pair = 0; pair < 16; pair++) {
			__m512i to[2];

			UNROLL
			for (g = 0; g < groups; g++)
				to[g] = _mm512_load_si512(
					q + (size_t)g * block->steps * TILE + 64 * pair);
			UNROLL
			for (t = 0; t < tokens; t++) {
				__m512i one = bf16_all(from + t * k->stride + 4 * pair);

				UNROLL
				for (g = 0; g < groups; g++)
					sum[g][t] = bf16_add(sum[g][t], to[g], one);
			}
		}
	}
	UNROLL
	for (g = 0; g < groups; g++)
		UNROLL
	for (t = 0; t < tokens; t++)
		_mm512_store_ps(s + g * TOKENS * 16 + 16 * (at + t), sum[g][t]);
}

/* Logits of some times 16 tokens and the first rows of a group. */
INLINE void bf16_logits_few(const struct tile_block *block, const struct tile_rows *k,
			    const uint8_t *q, float *s, const uint32_t tiles,
			    const uint32_t rows)
{
	__m512 sum[2][FEW];
	__m512i t[16];
	uint32_t step, pair, tile, i;

	UNROLL
	for (tile = 0; tile < tiles; tile++)
		UNROLL
	for (i = 0; i < rows; i++)
		sum[tile][i] = _mm512_setzero_ps();
	for (step = 0; step < block->steps; step++, q += TILE)
		UNROLL
	for (tile = 0; tile < tiles; tile++) {
		const uint8_t *from = k[tile].at + block->column[step];

		for (i = 0; i < 16; i++)
			t[i] = _mm512_loadu_si512(from + i * k[tile].stride);
		tile_transpose(t);
		UNROLL
		for (pair = 0; pair < 16; pair++)
			UNROLL
		for (i = 0; i < rows; i++)
			sum[tile][i] = bf16_add(sum[tile][i], t[pair],
						bf16_all(q + 64 * pair + 4 * i));
	}
	UNROLL
	for (tile = 0; tile < tiles; tile++, s += 16 * 16) {
		UNROLL
		for (i = 0; i < 16; i++)
			t[i] = i < rows ? _mm512_castps_si512(sum[tile][i])
					: _mm512_setzero_si512();
		tile_transpose(t);
		for (i = 0; i < 16; i++)
			_mm512_store_si512(s + 16 * (size_t)i, t[i]);
	}
}

/* Rows of a group that are there. */
static uint32_t bf16_rows(const struct tile_block *block, uint32_t g)
{
	uint32_t left = block->count - 16 * g;

	return left < 16 ? left : 16;
}

static void tile_logits(const struct tile_block *block, uint32_t g, uint32_t groups,
			uint32_t padded)
{
	const uint8_t *q = block->q + (size_t)g * block->steps * TILE;
	uint32_t rows = groups == 2 ? 32 : bf16_rows(block, g), t;

	for (t = 0; t < padded; t += 32) { /* at most TOKENS */
		const struct tile_rows *k = &block->tiles[t / 16];
		float *s = block->s + 16 * (size_t)t, *s2 = s + 16 * 16;

		if (rows <= 2) {
			bf16_logits_few(block, k, q, s, 2, 2);
		} else if (rows <= 4) {
			bf16_logits_few(block, k, q, s, 2, 4);
		} else if (rows <= FEW) {
			bf16_logits_few(block, k, q, s, 1, FEW);
			bf16_logits_few(block, k + 1, q, s2, 1, FEW);
		} else if (groups == 1) {
			bf16_logits(block, k, 0, q, s, 16, 1);
			bf16_logits(block, k + 1, 0, q, s2, 16, 1);
		} else {
			bf16_logits(block, k, 0, q, s, 8, 2);
			bf16_logits(block, k, 8, q, s, 8, 2);
			bf16_logits(block, k + 1, 0, q, s2, 8, 2);
			bf16_logits(block, k + 1, 8, q, s2, 8, 2);
		}
	}
}

/* o of some rows of a group and `wide` tiles of 16 values. */
INLINE void bf16_outputs(const struct tile_block *block, uint8_t *o, const uint8_t *p,
			 const uint8_t *v, uint32_t padded, const uint32_t rows,
			 const uint32_t wide)
{
	__m512 sum[8][4];
	uint32_t t, pair, r, w;

	UNROLL
	for (r = 0; r < rows; r++)
		UNROLL
	for (w = 0; w < wide; w++)
		sum[r][w] = block->first ? _mm512_setzero_ps()
					 : _mm512_load_ps(o + w * TILE + 64 * r);
	for (t = 0; t < padded; t += 32, p += TILE, v += (size_t)block->outs * TILE)
		for (pair = 0; pair < 16; pair++) {
			__m512i to[4];

			UNROLL
			for (w = 0; w < wide; w++)
				to[w] = _mm512_load_si512(v + w * TILE + 64 * pair);
			UNROLL
			for (r = 0; r < rows; r++) {
				__m512i one = bf16_all(p + 64 * r + 4 * pair);

				UNROLL
				for (w = 0; w < wide; w++)
					sum[r][w] = bf16_add(sum[r][w], to[w], one);
			}
		}
	UNROLL
	for (r = 0; r < rows; r++)
		UNROLL
	for (w = 0; w < wide; w++)
		_mm512_store_ps(o + w * TILE + 64 * r, sum[r][w]);
}

static void bf16_outputs_of(const struct tile_block *block, uint32_t rows, uint8_t *o,
			    const uint8_t *p, uint32_t padded)
{
	uint32_t outs = block->outs, i = 0;
	const uint8_t *v = block->v;

	for (; rows <= 2 && i + 4 <= outs; i += 4)
		bf16_outputs(block, o + i * TILE, p, v + i * TILE, padded, 2, 4);
	for (; rows <= 4 && i + 4 <= outs; i += 4)
		bf16_outputs(block, o + i * TILE, p, v + i * TILE, padded, 4, 4);
	for (; i < outs; i += 2) {
		bf16_outputs(block, o + i * TILE, p, v + i * TILE, padded, 8, 2);
		if (rows > 8)
			bf16_outputs(block, o + i * TILE + TILE / 2, p + TILE / 2,
				     v + i * TILE, padded, 8, 2);
	}
}

static void tile_outputs(const struct tile_block *block, uint32_t g, uint32_t groups,
			 const struct attend_batch *batch, uint32_t padded)
{
	(void)batch;
	for (uint32_t i = 0; i < groups; i++)
		bf16_outputs_of(block, bf16_rows(block, g + i),
				block->o + (size_t)(g + i) * block->outs * TILE,
				block->p + (size_t)i * (TOKENS / 32) * TILE, padded);
}

static void tile_values(struct tile_block *block, const struct attend_batch *batch,
			uint32_t padded)
{
	tile_pack_v(block, batch, padded);
}

static void tile_begin(void)
{
}

static void tile_finish(void)
{
}

static const struct attend_kernel kernel = TILE_TABLE("avx512_bf16");
const struct attend_kernel *const attend_bf16 = &kernel;

#else
const struct attend_kernel *const attend_bf16 = NULL;
#endif
