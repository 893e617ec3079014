/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu/kernels.cu on a CPU (tests/integration/test_kernels_host.sh): every thread of a
 * block a fiber, barriers and shuffles where they wait for each other, in an order that
 * is another one each time. What kern.h says a lane does is tested elsewhere
 * (test_kernels.c), against loops over bytes; here is the rest, which else only a GPU
 * would run: who takes which entry, the list's way through shared memory, places handed
 * round a warp, the ends of lists. Held against the reference, over lists by chance.
 *
 * A warp whose lanes do not all come to a shuffle, and a block whose threads do not all
 * come to a barrier, is told as such; accesses that are not aligned end the program
 * (-fsanitize=alignment).
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

/* ---- the language ---- */

#define __CUDACC__ 1
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)

struct alignas(16) ulonglong2 {
	unsigned long long x, y;
};
struct place3 {
	unsigned int x, y, z;
};
static place3 threadIdx, blockIdx, blockDim, gridDim;

static void block_wait();
static uint64_t warp_hand(uint64_t value, unsigned int from);

#define __syncthreads() block_wait()
#define __shfl_sync(mask, value, from) warp_hand(value, from)

#include KERNELS_CU

extern "C" {
#include "tests/gpu/kernels_ref.h"
}

/* ---- the machine ---- */

#define STACK_BYTES (64u << 10)

static uint64_t seed = 1;

static uint64_t draw(uint64_t below)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (seed >> 33) % below;
}

[[noreturn]] static void wrong(const char *what)
{
	printf("FAILED: %s\n", what);
	exit(1);
}

struct fiber {
	ucontext_t context;
	bool ended;
	uint64_t barriers, shuffles; /* come to so far */
	uint64_t given[2];	     /* by the last two shuffles */
};

static fiber fibers[KERN_THREADS];
static std::vector<char> stacks(STACK_BYTES *KERN_THREADS);
static ucontext_t outside;
static unsigned int running;
static bool moved; /* somebody went on */
static void (*body)(void *);
static void *body_arg;

static void pause()
{
	const unsigned int own = running;

	swapcontext(&fibers[own].context, &outside);
	running = own;
	threadIdx.x = own;
}

static void block_wait()
{
	const uint64_t here = ++fibers[running].barriers;

	for (unsigned int i = 0; i < KERN_THREADS;) {
		if (fibers[i].barriers >= here)
			i++;
		else if (fibers[i].ended)
			wrong("a thread left before a barrier of its block");
		else
			pause();
	}
	moved = true;
}

static uint64_t warp_hand(uint64_t value, unsigned int from)
{
	fiber *const warp = &fibers[running / KERN_LANES * KERN_LANES];
	const uint64_t here = ++fibers[running].shuffles;

	fibers[running].given[here % 2] = value;
	for (unsigned int i = 0; i < KERN_LANES;) {
		if (warp[i].shuffles >= here)
			i++;
		else if (warp[i].ended)
			wrong("a lane left before a shuffle of its warp");
		else
			pause();
	}
	moved = true;
	/* who gave it cannot be two further: that one waits for this lane */
	return warp[from % KERN_LANES].given[here % 2];
}

static void fiber_main()
{
	threadIdx.x = running;
	body(body_arg);
	fibers[running].ended = true;
	moved = true;
	swapcontext(&fibers[running].context, &outside);
}

static void block_run()
{
	unsigned int left = KERN_THREADS, first;

	for (unsigned int i = 0; i < KERN_THREADS; i++) {
		fibers[i] = fiber{};
		getcontext(&fibers[i].context);
		fibers[i].context.uc_stack.ss_sp = &stacks[(size_t)i * STACK_BYTES];
		fibers[i].context.uc_stack.ss_size = STACK_BYTES;
		makecontext(&fibers[i].context, fiber_main, 0);
	}
	while (left > 0) {
		moved = false;
		first = (unsigned int)draw(KERN_THREADS);
		for (unsigned int i = 0; i < KERN_THREADS; i++) {
			running = (first + (seed & 1 ? i : KERN_THREADS - i)) % KERN_THREADS;
			threadIdx.x = running;
			if (fibers[running].ended)
				continue;
			swapcontext(&outside, &fibers[running].context);
			left -= fibers[running].ended;
		}
		if (left > 0 && !moved)
			wrong("all threads of a block wait");
	}
}

static void launch(unsigned int blocks, void (*what)(void *), void *arg)
{
	body = what;
	body_arg = arg;
	gridDim = {blocks, 1, 1};
	blockDim = {KERN_THREADS, 1, 1};
	/* in any order */
	for (unsigned int i = 0, at = (unsigned int)draw(blocks); i < blocks; i++) {
		blockIdx = {(at + i) % blocks, 0, 0};
		block_run();
	}
}

/* ---- rows ---- */

#define AREA (UINT64_C(512) << 10)
#define ENTRIES 80u

struct rows_args {
	const kern_rows *rows;
	const kern_place *places;
	uint32_t count, per_block;
};

static void rows_body(void *arg)
{
	const rows_args *a = (const rows_args *)arg;

	kvd_rows(a->rows, a->places, a->count, a->per_block);
}

alignas(64) static uint8_t source[AREA], moved_to[AREA], wanted[AREA];
alignas(16) static kern_rows list[ENTRIES];
alignas(16) static kern_place places[ENTRIES * KERN_PLACES_MAX];

struct maker {
	uint64_t at; /* free in the destination from here on */
	uint32_t place_count;
};

static uint32_t length()
{
	static const uint32_t lens[] = {1,  2,	 3,   8,   15,	16,  17,   32,	 48,   64,
					100, 128, 255, 256, 272, 512, 528, 1000, 1024, 4096};

	return lens[draw(sizeof(lens) / sizeof(lens[0]))];
}

/* Rows at distances, apart in the destination. */
static kern_rows rows_regular(maker *m, uint32_t len, bool even)
{
	kern_rows r = {};
	const uint64_t unit = even ? 16 : 1, gap = draw(3) * unit;

	r.len = len;
	r.count = (uint32_t)(1 + draw(8192 / len < 9 ? 8192 / len : 9));
	r.outer = (uint32_t)(1 + draw(4));
	r.dst = (uintptr_t)moved_to + m->at;
	r.src = (uintptr_t)source + AREA / 2 + draw(64) * unit;
	r.dst_stride = (int64_t)(len + gap);
	r.dst_outer = r.dst_stride * r.count;
	r.src_stride = ((int64_t)draw(500) - 250) * (int64_t)unit;
	r.src_outer = ((int64_t)draw(500) - 250) * (int64_t)unit;
	m->at += (uint64_t)r.dst_outer * r.outer;
	return r;
}

static kern_rows rows_placed(maker *m, uint32_t len, bool even)
{
	kern_rows r = {};
	const uint64_t unit = even ? 16 : 1;

	r.len = len;
	r.count = (uint32_t)(1 + draw(KERN_PLACES_MAX));
	r.outer = 1;
	r.flags = KERN_ROWS_PLACES;
	r.dst = m->place_count;
	for (uint32_t i = 0; i < r.count; i++) {
		places[m->place_count + i].dst = (uintptr_t)moved_to + m->at;
		places[m->place_count + i].src =
			(uintptr_t)source + draw((AREA - len) / unit) * unit;
		m->at += len + (even ? 0 : draw(20));
	}
	m->place_count += r.count;
	return r;
}

static void places_to(uint8_t *from, uint8_t *to, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		places[i].dst += (uintptr_t)to - (uintptr_t)from;
}

static uint32_t list_make(maker *m)
{
	uint32_t n = 0;
	const uint32_t most = (uint32_t)(1 + draw(ENTRIES));

	while (n < most && m->at + 4 * 9 * 5000 < AREA) {
		const bool even = draw(2);
		uint32_t len = length();
		kern_rows r;

		if (even) {
			len = (len + 15) / 16 * 16;
			m->at = (m->at + 15) / 16 * 16;
		}
		r = draw(2) ? rows_regular(m, len, even) : rows_placed(m, len, even);
		if (even)
			r.flags |= KERN_ROWS_ALIGNED;
		list[n++] = r;
	}
	return n;
}

static void rows_once()
{
	maker m = {draw(64), 0};
	const uint32_t count = list_make(&m);
	const uint32_t per_block = draw(2) ? KERN_WARPS : KERN_PER_BLOCK_MAX;
	rows_args args = {list, places, count, per_block};

	memset(moved_to, 0xee, AREA);
	memset(wanted, 0xee, AREA);
	launch((uint32_t)(1 + draw((count + per_block - 1) / per_block)), rows_body, &args);
	for (uint32_t i = 0; i < count; i++)
		if (!kern_has_places(&list[i]))
			list[i].dst += (uintptr_t)wanted - (uintptr_t)moved_to;
	places_to(moved_to, wanted, m.place_count);
	if (!kernels_ref_rows(list, places, count, nullptr))
		wrong("the reference");
	if (memcmp(moved_to, wanted, AREA) != 0)
		wrong("rows differ from the reference's");
}

int main(int argc, char **argv)
{
	const int times = argc > 1 ? atoi(argv[1]) : 60;

	for (uint64_t i = 0; i < AREA; i++)
		source[i] = (uint8_t)draw(256);
	for (int i = 0; i < times; i++) {
		seed = (uint64_t)i + 1;
		rows_once();
	}
	printf("%d lists\n", times);
	return 0;
}
