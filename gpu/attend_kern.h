/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_kern: the arguments of attend.cu, for nvcc and a C compiler. Attention, merge
 * and splice are defined in daemon/math/{attend,merge,splice}.h; q, K and V are bf16
 * here.
 *
 * A *tile* is up to 16 rows of one KV head that attend to the same tokens. A block takes
 * a tile and one of `splits` parts of its tokens, and writes a partial: a plane of o, m
 * and l for each split, which kvd_merge makes into one. attend_plan.h makes tiles.
 *
 * Addresses are of the device. In tests the same text runs on a CPU
 * (tests/gpu/attend_fiber.c), so each address is reached by kern_at(), and the product
 * of fragments is attend_mma() alone.
 */
#ifndef KVD_GPU_ATTEND_KERN_H
#define KVD_GPU_ATTEND_KERN_H

#include <stdint.h>

#include "daemon/math/merge_row.h"
#include "daemon/math/splice.h"
#include "gpu/kern.h"

#define ATTEND_KERN_THREADS 128u
#define ATTEND_KERN_ROWS 16u	    /* of a tile */
#define ATTEND_KERN_TOKENS 16u	    /* worked on at a time */
#define ATTEND_KERN_TURN_DIMS 64u   /* of MLA: the last values, which deltas may rotate */
#define ATTEND_KERN_NONE UINT32_MAX /* of a row: no turn */

/* struct attend_field and struct attend_kv, with addresses in the place of pointers. */
struct attend_kern_field {
	uint64_t base, page_stride, token_stride, head_stride;
};
struct attend_kern_pages {
	uint64_t pages; /* uint32_t[]; 0: page n is the n-th */
	uint32_t page_tokens, first, tokens;
	uint32_t unused;
};

/* Turns by one delta each: cos[pairs], then sin[pairs]; fp32, of rope_turn_make(). */
struct attend_kern_turns {
	uint64_t at;
	uint32_t first, dims, pairs; /* as struct rope */
	uint32_t unused;
};

struct attend_kern_tile {
	uint64_t select;     /* uint32_t[]; 0: dense */
	uint32_t begin, end; /* tokens, or places in select */
	uint32_t head;	     /* of K and V */
	uint32_t first, rows;
	uint32_t turned; /* some row has a turn */
};

/* kvd_attend_mla, _gqa64, _gqa128 (one argument): a grid of tiles by splits. */
struct attend_kern {
	struct attend_kern_field k, v; /* MLA: v is ignored */
	struct attend_kern_pages in;
	struct attend_kern_turns turns;
	uint64_t tiles;
	uint64_t q;	  /* [rows][dqk], in the order of the tiles */
	uint64_t turn_of; /* uint32_t[rows]: number of a turn, or none */
	uint64_t o, m, l; /* fp32 [rows][dv], [rows], [rows] */
	uint64_t plane;	  /* bytes from split to split of each */
	float scale, softcap;
};

/* kvd_merge: a grid of any size. merge_rows(), bit by bit except for a NaN's payload. */
struct attend_kern_merge {
	uint64_t o, m, l;    /* of the first part, and from part to part … */
	uint64_t part_plane; /* … so many bytes */
	uint64_t out_o, out_m, out_l;
	uint32_t parts, rows, dv;
	uint32_t unused;
};

/* kvd_splice: a grid of any size. splice_rows() of bf16, bit by bit, for the tokens and
 * heads of one field; in place, or between fields that are apart. */
struct attend_kern_splice {
	struct attend_kern_field dst, src;
	struct attend_kern_pages to, from;
	struct attend_kern_turns turn; /* at 0: bytes are copied */
	uint32_t tokens, heads, values;
	uint32_t unused;
};

#if defined(KERN_FIBERS)
void *kern_at(uint64_t address, uint32_t bytes, bool writing);
void kern_mma(float c[4], const uint32_t a[4], const uint32_t b[2]);
#elif defined(__CUDACC__)
KERN_FN void *kern_at(uint64_t address, uint32_t bytes, bool writing)
{
	(void)bytes;
	(void)writing;
	return (void *)address;
}
#endif

#if defined(KERN_FIBERS) || defined(__CUDACC__)
/*
 * c += a * b of a warp: 16 rows by 8 columns, 16 long. Which lane holds which value is
 * the PTX manual's ("Matrix Fragments for mma.m16n8k16", floating point): with g = lane /
 * 4 and t = lane % 4, two values in a word, the lower first,
 *   a[i]  row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next
 *   b[i]  rows 2t + 8 i and the next, column g
 *   c[i]  row g + 8 (i / 2), column 2t + i % 2
 */
KERN_FN void attend_mma(float c[4], const uint32_t a[4], const uint32_t b[2])
{
#if defined(KERN_FIBERS)
	kern_mma(c, a, b);
#elif defined(__CUDA_ARCH__)
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
		     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
#endif

#endif
