/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels. What a lane does is in kern.h; here is who does which part.
 *
 * The list of kvd_rows lies in pinned host memory. A block fetches its entries
 * together, in one stretch, into shared memory: the bus is crossed once for each,
 * in full transactions, while other blocks move bytes. Entries have about equal
 * work (the host cuts them), so a warp takes every KERN_WARPSth of its block.
 *
 * No barrier, flag or order between blocks: the stream's event says that all is
 * done, and makes stores to host memory visible to the CPU.
 */
#include "gpu/kern.h"

extern "C" __global__ void __launch_bounds__(KERN_THREADS)
	kvd_rows(const struct kern_rows *rows, uint32_t count, uint32_t per_block)
{
	__shared__ KERN_V16 words[KERN_PER_BLOCK_MAX * sizeof(struct kern_rows) /
				  sizeof(KERN_V16)];
	const uint32_t vectors = sizeof(struct kern_rows) / sizeof(KERN_V16);
	const struct kern_rows *mine = (const struct kern_rows *)words;
	const uint32_t first = blockIdx.x * per_block;
	const uint32_t lane = threadIdx.x % KERN_LANES;
	uint32_t n = count - first;

	if (n > per_block)
		n = per_block;
	for (uint32_t i = threadIdx.x; i < n * vectors; i += KERN_THREADS)
		words[i] = ((const KERN_V16 *)(rows + first))[i];
	__syncthreads();
	for (uint32_t e = threadIdx.x / KERN_LANES; e < n; e += KERN_WARPS) {
		const struct kern_rows *r = &mine[e];
		const uint32_t lanes = kern_lanes(r->len), total = r->count * r->outer;

		for (uint32_t i = lane / lanes; i < total; i += KERN_LANES / lanes) {
			uint64_t dst, src;

			kern_row_at(r, i, &dst, &src);
			kern_row((uint8_t *)dst, (const uint8_t *)src, r->len,
				 lane % lanes, lanes);
		}
	}
}

extern "C" __global__ void kvd_fill(uint8_t *at, uint64_t bytes, uint64_t seed,
				    uint64_t origin)
{
	const uint64_t step = (uint64_t)gridDim.x * blockDim.x;

	for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < bytes;
	     i += step)
		at[i] = kern_byte(seed, origin + i);
}

extern "C" __global__ void kvd_verify(const uint8_t *at, uint64_t bytes, uint64_t seed,
				      uint64_t origin, unsigned long long *found)
{
	const uint64_t step = (uint64_t)gridDim.x * blockDim.x;
	unsigned long long wrong = 0, least = ~0ull;

	for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < bytes;
	     i += step) {
		if (at[i] == kern_byte(seed, origin + i))
			continue;
		wrong++;
		if (origin + i < least)
			least = origin + i;
	}
	if (wrong) {
		atomicAdd(&found[0], wrong);
		atomicMin(&found[1], least);
	}
}
