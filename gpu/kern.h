/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern: the work of kernels, for nvcc and a C compiler.
 *
 * One kind of work serves gathering, scattering, packing, unpacking and the
 * exchange of tokens and heads: rows at two levels of strides. A list of them
 * is one launch. To pack is to have dst_stride = len, NHD to HND is a page whose
 * inner rows are tokens and whose outer ones are heads, with the strides of
 * source and destination exchanged.
 *
 * The work of one thread of a warp is written only here: kernels.cu runs it on a device,
 * kernels_ref.c runs every lane of it in turn on the CPU. So all of the arithmetic but
 * the launch is tested without a GPU.
 *
 * The other kernels fill memory with a pattern that differs at each position, and count
 * the bytes that differ from it: for tests and benches.
 */
#ifndef KVD_GPU_KERN_H
#define KVD_GPU_KERN_H

#include <stdint.h>

#ifdef __CUDACC__
#define KERN_FN static __device__ __forceinline__
#define KERN_V16 ulonglong2
#define KERN_V8 unsigned long long
#define KERN_V4 unsigned int
#define KERN_V2 unsigned short
#else
#define KERN_FN static inline
struct kern_pair {
	uint64_t x, y;
} __attribute__((aligned(16), may_alias));
typedef uint64_t __attribute__((may_alias)) kern_u64;
typedef uint32_t __attribute__((may_alias)) kern_u32;
typedef uint16_t __attribute__((may_alias)) kern_u16;
#define KERN_V16 struct kern_pair
#define KERN_V8 kern_u64
#define KERN_V4 kern_u32
#define KERN_V2 kern_u16
#endif

/* `outer` times `count` rows of `len` bytes. Row (o, c) is at src + o * src_outer + c *
 * src_stride, and likewise in dst. Rows of one launch are unordered. */
struct kern_rows {
	uint64_t dst, src;
	int64_t dst_stride, src_stride;
	int64_t dst_outer, src_outer;
	uint32_t len, count, outer;
	uint32_t flags; /* KERN_ROWS_… */
};
#define KERN_ROWS_ALIGNED 1u /* all addresses and `len` are multiples of 16 */
/* Row c, of KERN_PLACES_MAX at most, is at places[dst + c]; outer is 1, nothing else is
 * used. */
#define KERN_ROWS_PLACES 2u

/* of one row that has no order with others */
struct kern_place {
	uint64_t dst, src;
} __attribute__((aligned(16)));
#define KERN_PLACES_MAX 16u

/* kvd_rows(rows, places, count, per_block): a block takes `per_block` entries of the
 * list, then as many a grid further on, a warp of it one at a time. */
#define KERN_THREADS 256u
#define KERN_LANES 32u
#define KERN_WARPS (KERN_THREADS / KERN_LANES)
#define KERN_PER_BLOCK_MAX 32u /* a multiple of KERN_WARPS */
/* An entry should have no more: it is the work of one warp. */
#define KERN_ENTRY_BYTES 8192u

/* The number of lanes that share a row: one per 16 bytes. */
KERN_FN uint32_t kern_lanes(uint32_t len)
{
	uint32_t lanes = 1;

	while (lanes < KERN_LANES && lanes * 16 < len)
		lanes *= 2;
	return lanes;
}

/* Four loads are in flight before the first store waits for one. */
#define KERN_MOVE(type)                                        \
	do {                                                   \
		type *to = (type *)dst;                        \
		const type *from = (const type *)src;          \
		uint32_t i = lane;                             \
                                                               \
		for (; i + 3 * lanes < body; i += 4 * lanes) { \
			const type a = from[i];                \
			const type b = from[i + lanes];        \
			const type c = from[i + 2 * lanes];    \
			const type d = from[i + 3 * lanes];    \
                                                               \
			to[i] = a;                             \
			to[i + lanes] = b;                     \
			to[i + 2 * lanes] = c;                 \
			to[i + 3 * lanes] = d;                 \
		}                                              \
		for (; i < body; i += lanes)                   \
			to[i] = from[i];                       \
	} while (0)

/* The part of lane `lane` of `lanes` in one row. The widest access is the one by which
 * both ends can be aligned together; bytes before and after it are copied singly. */
KERN_FN void kern_row(uint8_t *dst, const uint8_t *src, uint32_t len, uint32_t lane,
		      uint32_t lanes)
{
	const uint32_t apart = (uint32_t)((uintptr_t)dst ^ (uintptr_t)src) & 15u;
	const uint32_t width = apart ? apart & (0u - apart) : 16u;
	uint32_t head = (0u - (uint32_t)(uintptr_t)dst) & (width - 1u), body;

	if (head > len)
		head = len;
	for (uint32_t i = lane; i < head; i += lanes)
		dst[i] = src[i];
	dst += head;
	src += head;
	len -= head;
	body = len / width;
	switch (width) {
	case 16:
		KERN_MOVE(KERN_V16);
		break;
	case 8:
		KERN_MOVE(KERN_V8);
		break;
	case 4:
		KERN_MOVE(KERN_V4);
		break;
	case 2:
		KERN_MOVE(KERN_V2);
		break;
	default:
		KERN_MOVE(uint8_t);
		break;
	}
	for (uint32_t i = body * width + lane; i < len; i += lanes)
		dst[i] = src[i];
}

/* The address of row `i` of count * outer; not for rows with places. */
KERN_FN void kern_row_at(const struct kern_rows *rows, uint32_t i, uint64_t *dst_p,
			 uint64_t *src_p)
{
	uint32_t o = 0;

	if (rows->outer > 1) {
		o = i / rows->count;
		i -= o * rows->count;
	}
	*dst_p = rows->dst + (uint64_t)rows->dst_outer * o +
		 (uint64_t)rows->dst_stride * i;
	*src_p = rows->src + (uint64_t)rows->src_outer * o +
		 (uint64_t)rows->src_stride * i;
}

KERN_FN int kern_has_places(const struct kern_rows *rows)
{
	return (rows->flags & KERN_ROWS_PLACES) != 0;
}

/* The number of rows that a group of lanes takes at a time. */
#define KERN_AT_ONCE 4u

/* Rows of which each lane has one vector at most: as many loads are in flight as there
 * are rows, where kern_row() would wait for one before it starts the next. */
KERN_FN int kern_short(const struct kern_rows *rows)
{
	return (rows->flags & KERN_ROWS_ALIGNED) && rows->len <= 16 * KERN_LANES;
}

/* src[k] NULL: no such row. */
KERN_FN void kern_rows_short(uint8_t *const dst[KERN_AT_ONCE],
			     const uint8_t *const src[KERN_AT_ONCE], uint32_t len,
			     uint32_t lane)
{
	const uint32_t at = 16 * lane;
	KERN_V16 v[KERN_AT_ONCE] = {};

	if (at >= len)
		return;
	for (uint32_t k = 0; k < KERN_AT_ONCE; k++)
		if (src[k])
			v[k] = *(const KERN_V16 *)(src[k] + at);
	for (uint32_t k = 0; k < KERN_AT_ONCE; k++)
		if (src[k])
			*(KERN_V16 *)(dst[k] + at) = v[k];
}

#endif
