/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over a chunk where it lies in GPU memory, the merge of partials, and the
 * splice. Their arguments are in attend_kern.h. The text is C and C++ at once: nvcc makes
 * it for devices, and tests run it on a CPU, a fiber a thread.
 *
 * A block of four warps takes a tile of 16 rows and walks over its tokens, 16 at a time:
 *
 *   find    a thread a token: its address, by the page table or the selection; 0: none
 *   stage   K (and V) to shared memory; rows without an address become zeros, unread
 *   logits  S = Q K^T: a warp takes 8 of the tokens and every other step of 16 values
 *   weights eight lanes a row: online softmax in fp32; l sums P before it is rounded to
 *           bf16. A token without address gets no logit, so no weight
 *   outputs O += P V: a warp takes a quarter of the values, in registers
 *
 * with a barrier before each but the first. Masks are addresses: tokens that a row may
 * not see are never loaded, so a NaN there is multiplied by nothing. The maker of tiles
 * ensures that all rows of a tile see the same tokens.
 *
 * q turned by a delta is not bf16: its rounding error is rounded, too, and multiplied
 * with the same K, as in attend_amx.c. With the same limit: an infinite rope value in K
 * is a NaN for all rows of a tile in which some row is turned.
 *
 * Two neighbouring values of V belong to two products, so that a lane reads 32-bit words:
 * column g of the one is value 2g, of the other 2g + 1; and then a lane's outputs are
 * four values in a row.
 *
 * Not done for speed: copies that overlap the products, more than 16 rows a block.
 * Compiled without contraction, for the merge's and the splice's bits.
 */
#include <math.h>

#include "gpu/attend_kern.h"

#define INLINE static __device__ __forceinline__
#ifdef __cplusplus
#define KERNEL extern "C" __global__
#define UNROLL _Pragma("unroll")
#else
#define KERNEL __global__
#define UNROLL
#endif

#define ROWS ATTEND_KERN_ROWS
#define TOKENS ATTEND_KERN_TOKENS
#define THREADS ATTEND_KERN_THREADS
#define WARPS (THREADS / KERN_LANES)

/* ---- addresses, turns ---- */

INLINE uint64_t token_at(const struct attend_kern_field *field,
			 const struct attend_kern_pages *in, uint32_t head, uint32_t token)
{
	const uint64_t at = (uint64_t)in->first + token;
	uint64_t page = at / in->page_tokens;

	if (in->pages)
		page = *(const uint32_t *)kern_at(in->pages + 4 * page, 4, false);
	return field->base + page * field->page_stride +
	       at % in->page_tokens * field->token_stride + head * field->head_stride;
}

INLINE float half_at(uint64_t row, uint32_t d)
{
	return value_from_bf16(*(const KERN_V2 *)kern_at(row + 2 * d, 2, false));
}

/* Value d of a row of bf16, as rope_turn_apply() makes it. */
INLINE float turned(const struct attend_kern_turns *turns, uint32_t number, uint64_t row,
		    uint32_t d)
{
	const uint32_t n = turns->dims / 2, at = d - turns->first;
	const bool halves = turns->pairs == ROPE_HALVES;
	const uint32_t pair = halves ? at % (n ? n : 1) : at / 2;
	const bool second = halves ? at >= n : at & 1;
	const float x = half_at(row, d);
	float cosine, sine, other;
	uint64_t turn;

	if (number == ATTEND_KERN_NONE || d < turns->first || at >= turns->dims)
		return x;
	turn = turns->at + 4 * ((uint64_t)number * turns->dims + pair);
	cosine = *(const float *)kern_at(turn, 4, false);
	sine = *(const float *)kern_at(turn + 4 * n, 4, false);
	if (second) {
		other = half_at(row, halves ? d - n : d - 1);
		return x * cosine + other * sine;
	}
	other = half_at(row, halves ? d + n : d + 1);
	return x * cosine - other * sine;
}

/* ---- splice ---- */

/* A warp a row of a head; a lane reads and writes both values of a pair. */
INLINE void splice_row(const struct attend_kern_splice *a, uint64_t dst, uint64_t src)
{
	const uint32_t n = a->turn.dims / 2, lane = threadIdx.x % KERN_LANES;
	const bool halves = a->turn.pairs == ROPE_HALVES;

	for (uint32_t d = lane; dst != src && d < a->values; d += KERN_LANES)
		if (!a->turn.at || d - a->turn.first >= a->turn.dims)
			*(KERN_V2 *)kern_at(dst + 2 * d, 2, true) =
				*(const KERN_V2 *)kern_at(src + 2 * d, 2, false);
	for (uint32_t i = lane; a->turn.at && i < n; i += KERN_LANES) {
		const uint32_t x = a->turn.first + (halves ? i : 2 * i);
		const uint32_t y = halves ? x + n : x + 1;
		const float p = turned(&a->turn, 0, src, x), q = turned(&a->turn, 0, src, y);

		*(KERN_V2 *)kern_at(dst + 2 * x, 2, true) = value_to_bf16(p);
		*(KERN_V2 *)kern_at(dst + 2 * y, 2, true) = value_to_bf16(q);
	}
}

KERNEL void __launch_bounds__(ATTEND_KERN_THREADS)
	kvd_splice(const struct attend_kern_splice a)
{
	const uint64_t rows = (uint64_t)a.tokens * a.heads;

	for (uint64_t i = blockIdx.x * WARPS + threadIdx.x / KERN_LANES; i < rows;
	     i += gridDim.x * WARPS) {
		const uint32_t token = (uint32_t)(i / a.heads);
		const uint32_t head = (uint32_t)(i % a.heads);

		splice_row(&a, token_at(&a.dst, &a.to, head, token),
			   token_at(&a.src, &a.from, head, token));
	}
}

#ifndef SPLICE_ALONE /* libkvd's image has no more */

#define PAD 8u /* halves behind a row: lanes that read a column have no bank conflicts */
#define PER_ROW (THREADS / ROWS)

/* Halves of a block's matrices, each row padded. */
#define MATRIX(dims) (ROWS * ((dims) + PAD))
#define ARENA(dqk, dv, low, gqa)                                                  \
	((2 * MATRIX(dqk) + MATRIX(low) + MATRIX(TOKENS) + (gqa) * MATRIX(dv)) * \
	 sizeof(uint16_t) / sizeof(KERN_V16))

struct block {
	KERN_V2 *q, *low; /* [ROWS]: bf16 of q, and of the rounding error of its last
			   * values */
	KERN_V2 *k, *v;	  /* [TOKENS] */
	KERN_V2 *p;	  /* [ROWS]: weights */
	float *s;	  /* [2][ROWS][TOKENS] */
	float *scale;	  /* [ROWS]: the factor of o */
	uint64_t *k_at, *v_at;
};

/* ---- tokens ---- */

/* Which token the tile has at a place; one that is not in the chunk: none. */
INLINE uint32_t token_of(const struct attend_kern_tile *tile, uint32_t place)
{
	if (!tile->select)
		return place;
	return *(const uint32_t *)kern_at(tile->select + 4 * (uint64_t)place, 4, false);
}

INLINE void find(const struct attend_kern *a, const struct attend_kern_tile *tile,
		 const struct block *b, uint32_t place, uint32_t end, bool gqa)
{
	const uint32_t i = threadIdx.x;
	uint32_t token = ATTEND_KERN_NONE;

	if (i >= TOKENS)
		return;
	if (place + i < end)
		token = token_of(tile, place + i);
	b->k_at[i] = token < a->in.tokens ? token_at(&a->k, &a->in, tile->head, token) : 0;
	if (gqa)
		b->v_at[i] = token < a->in.tokens
				     ? token_at(&a->v, &a->in, tile->head, token)
				     : 0;
}

INLINE void stage(KERN_V2 *to, const uint64_t *at, uint32_t dims)
{
	const uint32_t vectors = dims / 8;

	UNROLL
	for (uint32_t i = threadIdx.x; i < TOKENS * vectors; i += THREADS) {
		const uint32_t token = i / vectors, d = i % vectors * 8;
		KERN_V16 x = {0, 0};

		if (at[token])
			x = *(const KERN_V16 *)kern_at(at[token] + 2 * d, 16, false);
		*(KERN_V16 *)(to + token * (dims + PAD) + d) = x;
	}
}

/* ---- q ---- */

INLINE void stage_q(const struct attend_kern *a, const struct attend_kern_tile *tile,
		    const struct block *b, uint32_t dqk, uint32_t low)
{
	for (uint32_t i = threadIdx.x; i < ROWS * dqk; i += THREADS) {
		const uint32_t row = i / dqk, d = i % dqk, number = tile->first + row;
		uint32_t turn = ATTEND_KERN_NONE;
		uint16_t near = 0;
		float x = 0;

		if (row < tile->rows) {
			if (tile->turned)
				turn = *(const uint32_t *)kern_at(
					a->turn_of + 4 * (uint64_t)number, 4, false);
			x = turned(&a->turns, turn, a->q + 2 * (uint64_t)number * dqk, d);
			near = value_to_bf16(x);
		}
		b->q[row * (dqk + PAD) + d] = near;
		if (d >= dqk - low)
			b->low[row * (low + PAD) + d - (dqk - low)] =
				turn == ATTEND_KERN_NONE
					? (uint16_t)0
					: value_to_bf16(x - value_from_bf16(near));
	}
}

/* ---- products ---- */

INLINE void load_a(uint32_t a[4], const KERN_V2 *matrix, uint32_t stride, uint32_t column)
{
	const uint32_t lane = threadIdx.x % KERN_LANES, g = lane / 4, t = lane % 4;

	UNROLL
	for (uint32_t i = 0; i < 4; i++)
		a[i] = *(const KERN_V4 *)(matrix + (g + i % 2 * 8) * stride + column +
					  2 * t + i / 2 * 8);
}

/* c += rows of x times rows of y, `dims` long, from this warp's start. */
INLINE void product(float c[4], const KERN_V2 *x, const KERN_V2 *y, uint32_t dims,
		    uint32_t y_stride)
{
	const uint32_t lane = threadIdx.x % KERN_LANES, warp = threadIdx.x / KERN_LANES;
	const KERN_V2 *token = y + (warp % 2 * 8 + lane / 4) * y_stride + lane % 4 * 2;

	UNROLL
	for (uint32_t d = warp / 2 * 16; d < dims; d += 32) {
		uint32_t a[4], b[2];

		load_a(a, x, dims + PAD, d);
		b[0] = *(const KERN_V4 *)(token + d);
		b[1] = *(const KERN_V4 *)(token + d + 8);
		attend_mma(c, a, b);
	}
}

INLINE void logits(const struct block *b, const struct attend_kern_tile *tile,
		   uint32_t dqk, uint32_t low)
{
	const uint32_t lane = threadIdx.x % KERN_LANES, warp = threadIdx.x / KERN_LANES;
	float c[4] = {0, 0, 0, 0};

	product(c, b->q, b->k, dqk, dqk + PAD);
	if (tile->turned)
		product(c, b->low, b->k + dqk - low, low, dqk + PAD);
	UNROLL
	for (uint32_t i = 0; i < 4; i++)
		b->s[(warp / 2 * ROWS + lane / 4 + i / 2 * 8) * TOKENS + warp % 2 * 8 +
		     lane % 4 * 2 + i % 2] = c[i];
}

INLINE float larger(float x, float y)
{
	return y > x ? y : x;
}

/* PER_ROW lanes of a row, all with its m and l. */
INLINE void weights(const struct attend_kern *a, const struct block *b, float *m_p,
		    float *l_p)
{
	const uint32_t row = threadIdx.x / PER_ROW, token = threadIdx.x % PER_ROW * 2;
	float x[2], most = *m_p, safe, sum = 0;

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t at = row * TOKENS + token + i;

		x[i] = (b->s[at] + b->s[ROWS * TOKENS + at]) * a->scale;
		if (a->softcap != 0)
			x[i] = a->softcap * tanhf(x[i] / a->softcap);
		if (!b->k_at[token + i])
			x[i] = -INFINITY;
		most = larger(most, x[i]);
	}
	UNROLL
	for (uint32_t far = 1; far < PER_ROW; far *= 2)
		most = larger(most, __shfl_xor_sync(~0u, most, far));
	safe = most == -INFINITY ? 0 : most; /* -inf - -inf would be a NaN */
	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		x[i] = merge_exp_of(x[i] - safe);
		b->p[row * (TOKENS + PAD) + token + i] = value_to_bf16(x[i]);
		sum = sum + x[i];
	}
	UNROLL
	for (uint32_t far = 1; far < PER_ROW; far *= 2)
		sum = sum + __shfl_xor_sync(~0u, sum, far);
	x[0] = merge_exp_of(*m_p - safe);
	*l_p = *l_p * x[0] + sum;
	*m_p = most;
	if (token == 0)
		b->scale[row] = x[0];
}

/* o = o * scale, for a lane's two rows. */
INLINE void rescale(const struct block *b, float (*o)[4], uint32_t columns)
{
	const uint32_t g = threadIdx.x % KERN_LANES / 4;
	const float scale[2] = {b->scale[g], b->scale[g + 8]};

	UNROLL
	for (uint32_t j = 0; j < columns; j++)
		UNROLL
	for (uint32_t i = 0; i < 4; i++)
		o[j][i] = o[j][i] * scale[i / 2];
}

INLINE void outputs(const struct block *b, float (*o)[4], uint32_t dv, uint32_t v_stride)
{
	const uint32_t lane = threadIdx.x % KERN_LANES, warp = threadIdx.x / KERN_LANES;
	const KERN_V2 *v =
		b->v + lane % 4 * 2 * v_stride + warp * (dv / WARPS) + lane / 4 * 2;
	uint32_t a[4];

	load_a(a, b->p, TOKENS + PAD, 0);
	UNROLL
	for (uint32_t j = 0; j < dv / WARPS / 16; j++) {
		uint32_t w[4], even[2], odd[2];

		UNROLL
		for (uint32_t i = 0; i < 4; i++)
			w[i] = *(const KERN_V4 *)(v + (i % 2 + i / 2 * 8) * v_stride +
						  16 * j);
		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			even[i] = (w[2 * i] & 0xffff) | w[2 * i + 1] << 16;
			odd[i] = w[2 * i] >> 16 | (w[2 * i + 1] & 0xffff0000);
		}
		attend_mma(o[2 * j], a, even);
		attend_mma(o[2 * j + 1], a, odd);
	}
}

/* A lane's two rows, four values of each product of 16. */
INLINE void leave(const struct attend_kern *a, const struct attend_kern_tile *tile,
		  const float (*o)[4], uint32_t dv)
{
	const uint32_t lane = threadIdx.x % KERN_LANES, warp = threadIdx.x / KERN_LANES;

	UNROLL
	for (uint32_t j = 0; j < dv / WARPS / 16; j++)
		UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		const uint32_t row = lane / 4 + 8 * i;
		const uint64_t at = (uint64_t)(tile->first + row) * dv +
				    warp * (dv / WARPS) + 16 * j + lane % 4 * 4;
		float *to;

		if (row >= tile->rows)
			continue;
		to = (float *)kern_at(a->o + blockIdx.y * a->plane + 4 * at, 16, true);
		to[0] = o[2 * j][2 * i];
		to[1] = o[2 * j + 1][2 * i];
		to[2] = o[2 * j][2 * i + 1];
		to[3] = o[2 * j + 1][2 * i + 1];
	}
}

INLINE void leave_sums(const struct attend_kern *a, const struct attend_kern_tile *tile,
		       float m, float l)
{
	const uint32_t row = threadIdx.x / PER_ROW;
	const uint64_t at =
		blockIdx.y * a->plane + 4 * (uint64_t)(tile->first + row);

	if (threadIdx.x % PER_ROW != 0 || row >= tile->rows)
		return;
	*(float *)kern_at(a->m + at, 4, true) = m;
	*(float *)kern_at(a->l + at, 4, true) = l;
}

/* ---- attention ---- */

/* This block's places of the tile's: whole steps, but at the end. */
INLINE void part_of(const struct attend_kern_tile *tile, uint32_t *place_p, uint32_t *end_p)
{
	const uint32_t steps = (tile->end - tile->begin + TOKENS - 1) / TOKENS;
	const uint64_t from = (uint64_t)steps * blockIdx.y / gridDim.y;
	const uint64_t to = (uint64_t)steps * (blockIdx.y + 1) / gridDim.y;

	*place_p = tile->begin + (uint32_t)from * TOKENS;
	*end_p = to == steps ? tile->end : tile->begin + (uint32_t)to * TOKENS;
}

/* `dv` values of o, `low` of dqk that may be turned; constants wherever it is used. */
INLINE void attend(const struct attend_kern *a, const struct block *b, const uint32_t dqk,
		   const uint32_t dv, const uint32_t low, const bool gqa)
{
	const struct attend_kern_tile tile = *(const struct attend_kern_tile *)kern_at(
		a->tiles + blockIdx.x * sizeof(tile), sizeof(tile), false);
	float o[512 / WARPS / 8][4], m = -INFINITY, l = 0;
	uint32_t place, end;

	UNROLL
	for (uint32_t j = 0; j < dv / WARPS / 8; j++)
		UNROLL
	for (uint32_t i = 0; i < 4; i++)
		o[j][i] = 0;
	part_of(&tile, &place, &end);
	stage_q(a, &tile, b, dqk, low);
	for (; place < end; place += TOKENS) {
		find(a, &tile, b, place, end, gqa);
		__syncthreads();
		stage(b->k, b->k_at, dqk);
		if (gqa)
			stage(b->v, b->v_at, dv);
		__syncthreads();
		logits(b, &tile, dqk, low);
		__syncthreads();
		weights(a, b, &m, &l);
		__syncthreads();
		rescale(b, o, dv / WARPS / 8);
		outputs(b, o, dv, gqa ? dv + PAD : dqk + PAD);
	}
	leave_sums(a, &tile, m, l);
	__syncthreads(); /* all have read their scale */
	if (threadIdx.x % PER_ROW == 0)
		b->scale[threadIdx.x / PER_ROW] = l == 0 ? 0 : 1 / l;
	__syncthreads();
	rescale(b, o, dv / WARPS / 8);
	leave(a, &tile, o, dv);
}

#define ATTEND(name, dqk, dv, low, gqa)                                              \
	KERNEL void __launch_bounds__(ATTEND_KERN_THREADS)                           \
		name(const struct attend_kern a)                                     \
	{                                                                            \
		__shared__ KERN_V16 arena[ARENA(dqk, dv, low, gqa)];                 \
		__shared__ float s[2 * ROWS * TOKENS], scale[ROWS];                  \
		__shared__ uint64_t k_at[TOKENS], v_at[TOKENS];                      \
		KERN_V2 *const q = (KERN_V2 *)arena, *const k = q + MATRIX(dqk);     \
		KERN_V2 *const small = k + MATRIX(dqk), *const p = small + MATRIX(low); \
		const struct block b = {q, small, k, (gqa) ? p + MATRIX(TOKENS) : k, \
					p, s,	  scale, k_at, v_at};                \
                                                                                     \
		attend(&a, &b, dqk, dv, low, gqa);                                   \
	}

ATTEND(kvd_attend_mla, 576, 512, ATTEND_KERN_TURN_DIMS, 0)
ATTEND(kvd_attend_gqa64, 64, 64, 64, 1)
ATTEND(kvd_attend_gqa128, 128, 128, 128, 1)

/* ---- merge ---- */

/* A block a row: its shares by one thread, in the order of the parts. The inputs of the
 * next row's shares may be stored before all threads are done with these: that is other
 * memory, and its barrier precedes new shares. */
KERNEL void __launch_bounds__(ATTEND_KERN_THREADS) kvd_merge(const struct attend_kern_merge a)
{
	__shared__ float m[MERGE_PARTS_MAX], l[MERGE_PARTS_MAX], share[MERGE_PARTS_MAX];
	__shared__ double exact[MERGE_PARTS_MAX];
	__shared__ uint32_t used[MERGE_PARTS_MAX], count;

	for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
		const uint64_t at = 4 * (uint64_t)row;

		if (threadIdx.x < a.parts) {
			const uint64_t part = at + threadIdx.x * a.part_plane;

			m[threadIdx.x] = *(const float *)kern_at(a.m + part, 4, false);
			l[threadIdx.x] = *(const float *)kern_at(a.l + part, 4, false);
		}
		__syncthreads();
		if (threadIdx.x == 0)
			count = merge_weights(m, l, a.parts, used, exact, share,
					      (float *)kern_at(a.out_m + at, 4, true),
					      (float *)kern_at(a.out_l + at, 4, true));
		__syncthreads();
		for (uint32_t d = threadIdx.x; d < a.dv; d += THREADS) {
			const uint64_t o = 4 * ((uint64_t)row * a.dv + d);
			float sum = 0;

			for (uint32_t i = 0; i < count; i++) {
				const float x = *(const float *)kern_at(
					a.o + used[i] * a.part_plane + o, 4, false);

				sum = i ? sum + x * share[i] : x * share[i];
			}
			*(float *)kern_at(a.out_o + o, 4, true) = sum;
		}
	}
}
#endif
