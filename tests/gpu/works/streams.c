/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many copy streams the driver needs: copies of one size, dealt out to 1 to 8
 * streams, within the device, to pinned host memory, from it, and both of these at once.
 * The daemon copies by one stream of a thread; a ratio well over 1 says that it should
 * use more.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/gpu/works/works.h"

#define STREAMS 8u
#define TIMES 5
#define LONGEST (16 * MIB)

static uint64_t total(void)
{
	uint64_t bytes = 256 * MIB / shrink();

	return bytes > LONGEST ? bytes : LONGEST;
}

enum way { WITHIN, TO_HOST, FROM_HOST, BOTH };

struct places {
	uint64_t device, other; /* total() bytes each */
	void *host;		/* pinned, twice as many */
	struct cu_stream *streams[STREAMS];
};

static void copy_one(const struct places *p, enum way way, uint64_t at, uint64_t bytes,
		     unsigned int number, struct cu_stream *stream)
{
	uint64_t host = (uintptr_t)p->host + at;
	bool out = way == TO_HOST || (way == BOTH && number % 2);
	uint64_t dst = way == WITHIN ? p->other + at : out ? host : p->device + at;
	uint64_t src = way == WITHIN || out ? p->device + at : host;

	if (way == BOTH && !out) { /* its own bytes on both sides */
		dst = p->other + at;
		src = host + total();
	}
	cu(cuda.drv.copy(dst, src, bytes, stream), "cuMemcpyAsync");
}

/* Best GB/s of all bytes, in copies of so many. */
static double dealt(const struct places *p, enum way way, uint64_t bytes,
		    unsigned int streams)
{
	uint64_t count = total() / bytes;
	double best = 1e9;

	for (int i = 0; i < TIMES; i++) {
		double begin = clock_s(), s;

		for (uint64_t k = 0; k < count; k++)
			copy_one(p, way, k * bytes, bytes, (unsigned int)k,
				 p->streams[k % streams]);
		for (unsigned int k = 0; k < streams; k++)
			cu(cuda.drv.stream_sync(p->streams[k]), "cuStreamSynchronize");
		s = clock_s() - begin;
		best = s < best ? s : best;
	}
	return (double)(count * bytes) / best * 1e-9;
}

static void way_bench(const struct places *p, enum way way, const char *name)
{
	static const uint64_t sizes[] = {4 * KIB, 64 * KIB, MIB, LONGEST};

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		double one = dealt(p, way, sizes[i], 1);

		printf("  %-12s %5ju KiB: %7.2f GB/s by 1 stream", name,
		       (uintmax_t)(sizes[i] / KIB), one);
		for (unsigned int n = 2; n <= STREAMS; n *= 2)
			printf(", %.2f by %u", dealt(p, way, sizes[i], n) / one, n);
		printf("\n");
	}
}

void streams_bench(void)
{
	struct places p = {.device = cuda_alloc(total()), .other = cuda_alloc(total())};

	cu(cuda.drv.host_alloc(&p.host, 2 * total(), 0), "cuMemHostAlloc");
	memset(p.host, 1, 2 * total());
	for (unsigned int i = 0; i < STREAMS; i++)
		cu(cuda.drv.stream_create(&p.streams[i], CU_STREAM_NON_BLOCKING, 0),
		   "a stream");
	way_bench(&p, WITHIN, "within");
	way_bench(&p, TO_HOST, "to host");
	way_bench(&p, FROM_HOST, "from host");
	way_bench(&p, BOTH, "both at once");
	for (unsigned int i = 0; i < STREAMS; i++)
		cu(cuda.drv.stream_destroy(p.streams[i]), "cuStreamDestroy");
	cu(cuda.drv.host_free(p.host), "cuMemFreeHost");
	cu(cuda.mem_free(p.device), "cuMemFree");
	cu(cuda.mem_free(p.other), "cuMemFree");
}
