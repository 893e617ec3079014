/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of CUDA that gpu/attend.cu uses, as C; and the machine. A fiber goes on until
 * it has to wait: for all threads of its block at a barrier, for its warp at a shuffle or
 * a product. A warp is taken by chance and its lanes in turn, so one warp runs ahead of
 * the others from barrier to barrier: a barrier that is missing is seen by what it reads.
 *
 * The product is written from the tables of the PTX manual element by element, not from
 * attend_mma()'s comment: a kernel and a machine with one wrong map would agree.
 */
#define KERN_FIBERS 1
#include "tests/gpu/attend_fiber.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

/* ---- the language ---- */

#define __device__
#define __global__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
/* found by the linker, as __start_kern_shared */
#define __shared__ static __attribute__((section("kern_shared"), aligned(16)))

struct place3 {
	uint32_t x, y, z;
};
static struct place3 threadIdx, blockIdx, gridDim;

static void block_wait(void);
static float warp_swap(float value, uint32_t far);

#define __syncthreads() block_wait()
#define __shfl_xor_sync(mask, value, far) warp_swap(value, far)

#ifndef ATTEND_CU /* tests of the tests: one with a mistake in it */
#define ATTEND_CU "gpu/attend.cu"
#endif
#include ATTEND_CU

extern char __start_kern_shared[], __stop_kern_shared[];

/* ---- the machine ---- */

#define STACK_BYTES (128u << 10)

enum meeting { BARRIER, SHUFFLE, PRODUCT };

/* Threads that wait for each other: a warp, or the block. */
struct meet {
	uint32_t size, come;
	uint64_t times; /* all came */
	enum meeting what;
};

struct given { /* by a lane, to its warp */
	float value;
	uint32_t a[4], b[2];
};

struct fiber {
	ucontext_t context;
	struct meet *at; /* waits there … */
	uint64_t until;	 /* … for so many times */
	struct given given[2];
	bool ended;
#ifdef __SANITIZE_THREAD__
	void *tsan;
#endif
};

static struct machine {
	struct fiber fibers[THREADS];
	struct meet warps[WARPS], block;
	ucontext_t outside;
	uint32_t running;
	uint64_t seed;
	const char *fault;
	const struct kernels_reach *reach;
	void (*run)(const void *arg);
	const void *arg;
#ifdef __SANITIZE_THREAD__
	void *tsan;
#endif
} * machine;
static pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;

static uint32_t draw(uint32_t below)
{
	machine->seed = machine->seed * UINT64_C(6364136223846793005) +
			UINT64_C(1442695040888963407);
	return (uint32_t)((machine->seed >> 33) % below);
}

static void leave_fiber(void)
{
	struct fiber *own = &machine->fibers[machine->running];

#ifdef __SANITIZE_THREAD__
	__tsan_switch_to_fiber(machine->tsan, 0);
#endif
	swapcontext(&own->context, &machine->outside);
}

static void enter_fiber(uint32_t i)
{
	machine->running = i;
	threadIdx.x = i;
#ifdef __SANITIZE_THREAD__
	__tsan_switch_to_fiber(machine->fibers[i].tsan, 0);
#endif
	swapcontext(&machine->outside, &machine->fibers[i].context);
}

/* It does not come back: the launch ends. */
static void wrong(const char *what)
{
	machine->fault = what;
	leave_fiber();
	abort();
}

static void meet(struct meet *at, enum meeting what)
{
	struct fiber *own = &machine->fibers[machine->running];

	if (at->come && at->what != what)
		wrong("threads of a warp wait for different things");
	at->what = what;
	if (++at->come == at->size) {
		at->come = 0;
		at->times++;
		return;
	}
	own->at = at;
	own->until = at->times + 1;
	leave_fiber();
	own->at = NULL;
}

static void block_wait(void)
{
	meet(&machine->block, BARRIER);
}

/* What all lanes give; each lane's is there until its warp has met twice more. */
static const struct fiber *warp_give(const struct given *given, enum meeting what,
				     uint32_t *which_p)
{
	const uint32_t warp = machine->running / KERN_LANES;
	struct meet *at = &machine->warps[warp];

	*which_p = at->times % 2;
	machine->fibers[machine->running].given[*which_p] = *given;
	meet(at, what);
	return &machine->fibers[warp * KERN_LANES];
}

static float warp_swap(float value, uint32_t far)
{
	const struct given given = {.value = value};
	uint32_t which;
	const struct fiber *warp = warp_give(&given, SHUFFLE, &which);

	return warp[(machine->running % KERN_LANES) ^ far].given[which].value;
}

static float half_of(uint32_t word, uint32_t upper)
{
	return value_from_bf16((uint16_t)(upper ? word >> 16 : word));
}

/* Element (row, column) of a, where the manual has it: for a_i, i = 0 … 7, row = group
 * for i < 2 and 4 <= i < 6, else group + 8; column = 2 * thread + (i & 1), + 8 for i >=
 * 4. */
static float element_a(const struct fiber *warp, uint32_t which, uint32_t row,
		       uint32_t column)
{
	const uint32_t lane = row % 8 * 4 + column % 8 / 2;
	const uint32_t i = (column >= 8) * 4 + (row >= 8) * 2 + (column & 1);

	return half_of(warp[lane].given[which].a[i / 2], i & 1);
}

/* b_i, i = 0 … 3: row = 2 * thread + (i & 1), + 8 for i >= 2; column = group. */
static float element_b(const struct fiber *warp, uint32_t which, uint32_t row,
		       uint32_t column)
{
	const uint32_t lane = column * 4 + row % 8 / 2;
	const uint32_t i = (row >= 8) * 2 + (row & 1);

	return half_of(warp[lane].given[which].b[i / 2], i & 1);
}

/* c_i, i = 0 … 3: row = group, + 8 for i >= 2; column = 2 * thread + (i & 1). */
void kern_mma(float c[4], const uint32_t a[4], const uint32_t b[2])
{
	const uint32_t lane = machine->running % KERN_LANES;
	struct given given;
	const struct fiber *warp;
	uint32_t which, i, k;

	memcpy(given.a, a, sizeof(given.a));
	memcpy(given.b, b, sizeof(given.b));
	warp = warp_give(&given, PRODUCT, &which);
	for (i = 0; i < 4; i++) {
		const uint32_t row = lane / 4 + (i >= 2) * 8,
			       column = lane % 4 * 2 + i % 2;

		for (k = 0; k < 16; k++)
			c[i] += element_a(warp, which, row, k) *
				element_b(warp, which, k, column);
	}
}

void *kern_at(uint64_t address, uint32_t bytes, bool writing)
{
	void *p = (void *)(uintptr_t)address;

	if (address % (bytes < 16 ? bytes : 16))
		wrong("an address that is not aligned");
	if (machine->reach)
		p = machine->reach->at(machine->reach->arg, address, bytes, writing);
	if (!p)
		wrong("an address that is not there");
	return p;
}

/* ---- launches ---- */

static void fiber_main(void)
{
	machine->run(machine->arg);
	machine->fibers[machine->running].ended = true;
	leave_fiber();
}

static void fibers_begin(char *stacks)
{
	uint32_t i;

	memset(__start_kern_shared, 0xff,
	       (size_t)(__stop_kern_shared - __start_kern_shared));
	for (i = 0; i < WARPS; i++)
		machine->warps[i] = (struct meet){.size = KERN_LANES};
	machine->block = (struct meet){.size = THREADS};
	for (i = 0; i < THREADS; i++) {
		struct fiber *fiber = &machine->fibers[i];

		fiber->at = NULL;
		fiber->ended = false;
		getcontext(&fiber->context);
		fiber->context.uc_stack.ss_sp = stacks + (size_t)i * STACK_BYTES;
		fiber->context.uc_stack.ss_size = STACK_BYTES;
		makecontext(&fiber->context, fiber_main, 0);
#ifdef __SANITIZE_THREAD__
		fiber->tsan = __tsan_create_fiber(0);
#endif
	}
}

static void fibers_end(void)
{
#ifdef __SANITIZE_THREAD__
	for (uint32_t i = 0; i < THREADS; i++)
		__tsan_destroy_fiber(machine->fibers[i].tsan);
#endif
}

/* As far as a warp can go; true: some lane went on. */
static bool warp_go(uint32_t warp, uint32_t *left_p)
{
	bool moved = false, again = true;

	while (again && !machine->fault) {
		uint32_t i, first = draw(KERN_LANES);

		for (again = false, i = 0; i < KERN_LANES && !machine->fault; i++) {
			const uint32_t number =
				warp * KERN_LANES + (first + i) % KERN_LANES;
			const struct fiber *fiber = &machine->fibers[number];

			if (fiber->ended ||
			    (fiber->at && fiber->at->times < fiber->until))
				continue;
			enter_fiber(number);
			*left_p -= fiber->ended;
			moved = again = true;
		}
	}
	return moved;
}

static void block_run(char *stacks)
{
	uint32_t left = THREADS;

	fibers_begin(stacks);
	while (left > 0 && !machine->fault) {
		const uint32_t first = draw(WARPS);
		bool moved = false;

		for (uint32_t i = 0; i < WARPS && !machine->fault; i++)
			moved |= warp_go((first + i) % WARPS, &left);
		if (!moved)
			machine->fault = "threads wait for others that do not come";
	}
	fibers_end();
}

static void run_mla(const void *arg)
{
	kvd_attend_mla(*(const struct attend_kern *)arg);
}

static void run_gqa64(const void *arg)
{
	kvd_attend_gqa64(*(const struct attend_kern *)arg);
}

static void run_gqa128(const void *arg)
{
	kvd_attend_gqa128(*(const struct attend_kern *)arg);
}

static void run_merge(const void *arg)
{
	kvd_merge(*(const struct attend_kern_merge *)arg);
}

static void run_splice(const void *arg)
{
	kvd_splice(*(const struct attend_kern_splice *)arg);
}

static const struct kernel {
	const char *name;
	void (*run)(const void *arg);
	uint32_t arg_bytes;
} kernels[] = {
	{"kvd_attend_mla", run_mla, sizeof(struct attend_kern)},
	{"kvd_attend_gqa64", run_gqa64, sizeof(struct attend_kern)},
	{"kvd_attend_gqa128", run_gqa128, sizeof(struct attend_kern)},
	{"kvd_merge", run_merge, sizeof(struct attend_kern_merge)},
	{"kvd_splice", run_splice, sizeof(struct attend_kern_splice)},
};
#define KERNELS (sizeof(kernels) / sizeof(kernels[0]))

static const struct kernel *kernel_find(const char *name)
{
	for (uint32_t i = 0; i < KERNELS; i++)
		if (strcmp(kernels[i].name, name) == 0)
			return &kernels[i];
	return NULL;
}

uint32_t attend_fiber_arg(const char *kernel)
{
	const struct kernel *found = kernel_find(kernel);

	return found ? found->arg_bytes : 0;
}

static const char *launch(const struct kernel *kernel, uint32_t x, uint32_t y,
			  const void *arg, const struct kernels_reach *reach,
			  char *stacks)
{
	const uint32_t blocks = x * y;

	machine->reach = reach;
	machine->run = kernel->run;
	machine->arg = arg;
	machine->seed = blocks;
#ifdef __SANITIZE_THREAD__
	machine->tsan = __tsan_get_current_fiber();
#endif
	gridDim = (struct place3){x, y, 1};
	for (uint32_t i = 0, first = draw(blocks); i < blocks && !machine->fault; i++) {
		const uint32_t number = (first + i) % blocks;

		blockIdx = (struct place3){number % x, number / x, 0};
		block_run(stacks);
	}
	return machine->fault;
}

const char *attend_fiber_run(const char *kernel, uint32_t x, uint32_t y, const void *arg,
			     const struct kernels_reach *reach)
{
	const struct kernel *found = kernel_find(kernel);
	const char *fault = "no memory";
	char *stacks;

	if (!found || !x || !y)
		return "no such kernel, or no blocks";
	pthread_mutex_lock(&one_launch);
	machine = calloc(1, sizeof(*machine));
	stacks = malloc((size_t)THREADS * STACK_BYTES);
	if (machine && stacks)
		fault = launch(found, x, y, arg, reach, stacks);
	free(stacks);
	free(machine);
	pthread_mutex_unlock(&one_launch);
	return fault;
}
