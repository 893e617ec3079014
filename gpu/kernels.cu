/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels. kern.h has the work of a lane; this file assigns parts to threads.
 *
 * The list of kvd_rows lies in pinned host memory, or on the device where it is kept
 * for a plan that is posted again. A block fetches its entries together, in one
 * stretch, into shared memory: the bus is crossed once for each, in full transactions,
 * while other blocks move bytes. Entries have about equal work (the host cuts them),
 * so a warp takes every KERN_WARPSth of its block. Places are fetched by the lanes of
 * the warp that needs them, a place each, and handed round by shuffles.
 *
 * No barrier, flag or order between blocks: the stream's event signals completion, and
 * makes stores to host memory visible to the CPU.
 */
#include "gpu/kern.h"

/* The work of one warp. All its lanes stay together: each may hold a place that others
 * need. */
struct warp_rows {
	const struct kern_rows *rows;
	uint32_t lane, lanes, groups, group, total;
	struct kern_place place; /* of row `lane`, if there are places */
};

/* The address of row `i`, for the lanes that copy it; src 0: no row. */
static __device__ __forceinline__ void row_find(const struct warp_rows *w, uint32_t i,
						uint64_t *dst_p, uint64_t *src_p)
{
	if (kern_has_places(w->rows)) {
		*dst_p = __shfl_sync(~0u, w->place.dst, i % KERN_LANES);
		*src_p = __shfl_sync(~0u, w->place.src, i % KERN_LANES);
	} else {
		kern_row_at(w->rows, i, dst_p, src_p);
	}
	if (i >= w->total)
		*src_p = 0;
}

static __device__ __forceinline__ void rows_short(const struct warp_rows *w)
{
	for (uint32_t i = 0; i < w->total; i += KERN_AT_ONCE * w->groups) {
		uint8_t *to[KERN_AT_ONCE];
		const uint8_t *from[KERN_AT_ONCE];

#pragma unroll
		for (uint32_t k = 0; k < KERN_AT_ONCE; k++) {
			uint64_t dst, src;

			row_find(w, i + k * w->groups + w->group, &dst, &src);
			to[k] = (uint8_t *)dst;
			from[k] = (const uint8_t *)src;
		}
		kern_rows_short(to, from, w->rows->len, w->lane % w->lanes);
	}
}

static __device__ __forceinline__ void rows_long(const struct warp_rows *w)
{
	for (uint32_t i = 0; i < w->total; i += w->groups) {
		uint64_t dst, src;

		row_find(w, i + w->group, &dst, &src);
		if (src)
			kern_row((uint8_t *)dst, (const uint8_t *)src, w->rows->len,
				 w->lane % w->lanes, w->lanes);
	}
}

static __device__ __forceinline__ void entry_move(const struct kern_rows *r,
						  const struct kern_place *places,
						  uint32_t lane)
{
	const uint32_t lanes = kern_lanes(r->len);
	struct warp_rows w = {
		r,     lane, lanes, KERN_LANES / lanes, lane / lanes, r->count * r->outer,
		{0, 0}};

	if (kern_has_places(r) && lane < w.total)
		w.place = places[r->dst + lane];
	if (kern_short(r))
		rows_short(&w);
	else
		rows_long(&w);
}

extern "C" __global__ void __launch_bounds__(KERN_THREADS)
	kvd_rows(const struct kern_rows *rows, const struct kern_place *places,
		 uint32_t count, uint32_t per_block)
{
	__shared__ KERN_V16
		words[KERN_PER_BLOCK_MAX * sizeof(struct kern_rows) / sizeof(KERN_V16)];
	const uint32_t vectors = sizeof(struct kern_rows) / sizeof(KERN_V16);
	const struct kern_rows *mine = (const struct kern_rows *)words;

#pragma unroll 1
	for (uint32_t first = blockIdx.x * per_block; first < count;
	     first += gridDim.x * per_block) {
		__syncthreads(); /* the entries before were read */
		for (uint32_t i = threadIdx.x;
		     i < per_block * vectors && first + i / vectors < count;
		     i += KERN_THREADS)
			words[i] = ((const KERN_V16 *)(rows + first))[i];
		__syncthreads();
		for (uint32_t e = threadIdx.x / KERN_LANES;
		     e < per_block && first + e < count; e += KERN_WARPS)
			entry_move(&mine[e], places, threadIdx.x % KERN_LANES);
	}
}
