/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the processor does for copies that a GPU makes, without a GPU: over the tests'
 * driver, whose queued work is left out (fake_cuda_idle()), so that a transfer costs
 * what is spent on finding its rows, listing them and calling the driver. On hardware
 * the GPU waits for that: at 256 bytes a row it moves one in a tenth of a nanosecond.
 *
 * Nanoseconds of this thread's own time, a row; the driver's calls are in it, at the
 * fake's price (about a microsecond each, which is a real one's, too). `again` is the
 * same plan posted once more through the copy threads, from the call to its end.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "daemon/plan/plan.h"
#include "daemon/memory/copy.h"
#include "gpu/gpu.h"
#include "gpu/import.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"
#include "tests/gpu/module_wait.h"

#define AREA (UINT64_C(256) << 20)
#define ROUNDS 15
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

struct bench {
	struct gpu *gpu;
	struct loop *loop;
	struct copier *copier;
	struct copy_hand *hand;
	struct gpu_owner owners[2];
	struct copy_buffer ends[2];
	bool done;
	int result;
};

struct bench_job {
	struct copy_job job;
	struct bench *bench;
};

static void die(const char *what)
{
	fprintf(stderr, "bench_gpu: %s: %s\n", what, err_last()->text);
	exit(1);
}

/* ---- plans ---- */

enum form { SCATTERED, REGULAR, GRID, HEADS, FORMS };

static uint64_t seed = 88172645463325252u;

static uint64_t draw(uint64_t below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed % below;
}

static uint64_t *places(uint64_t len, uint64_t count)
{
	uint64_t slots = AREA / len, *at = mem_calloc(slots, sizeof(*at));

	if (!at)
		die("places");
	for (uint64_t i = 0; i < slots; i++)
		at[i] = i * len;
	for (uint64_t i = 0; i < count; i++) {
		uint64_t j = i + draw(slots - i), t = at[i];

		at[i] = at[j];
		at[j] = t;
	}
	return at;
}

static void row_add(struct plan_builder *builder, uint64_t src, uint64_t dst,
		    uint64_t len)
{
	const struct plan_run run = {.src = src, .dst = dst, .len = len, .count = 1};

	if (plan_builder_add(builder, &run) < 0)
		die("a row");
}

static struct plan *plan_of(enum form form, uint64_t len, uint64_t count)
{
	uint64_t *src = places(len, count), *dst = places(len, count);
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;

	if (plan_builder_new(&builder) < 0)
		die("plan");
	for (uint64_t i = 0; i < count; i++) {
		if (form == SCATTERED) /* no order on either side */
			row_add(builder, src[i], dst[i], len);
		else if (form == REGULAR) /* one distance a side */
			row_add(builder, 2 * i * len, 3 * i * len, len);
		else if (form == GRID) /* tokens of pages: 16 rows, a gap, 16 rows */
			row_add(builder, 2 * i * len, (3 * i + i / 16 * 7) * len, len);
		else /* pages in any order, of which 16 heads are taken */
			row_add(builder,
				src[i / 16] / (64 * len) * 64 * len + i % 16 * 4 * len,
				dst[i / 16] / (64 * len) * 64 * len + i % 16 * 2 * len,
				len);
	}
	if (plan_builder_finish(builder, &plan) < 0)
		die("plan");
	plan_builder_free(builder);
	mem_free(src);
	mem_free(dst);
	return plan;
}

/* ---- copies ---- */

static void on_done(struct copy_job *job)
{
	struct bench *b = container_of(job, struct bench_job, job)->bench;

	b->done = true;
	b->result = job->result;
}

static struct copy_job job_of(struct bench *b, const struct plan *plan)
{
	return (struct copy_job){.plan = plan,
				 .end = plan->bytes,
				 .src = {.buffers = &b->ends[0], .buffer_count = 1},
				 .dst = {.buffers = &b->ends[1], .buffer_count = 1},
				 .on_done = on_done};
}

/* This thread's own time, of the whole. */
static uint64_t here_ns(struct bench *b, const struct plan *plan)
{
	struct copy_job job = job_of(b, plan);
	uint64_t begin = clock_of(CLOCK_THREAD_CPUTIME_ID);

	if (copy_now(b->hand, &job) < 0)
		die("copy_now");
	return clock_of(CLOCK_THREAD_CPUTIME_ID) - begin;
}

static uint64_t posted_ns(struct bench *b, const struct plan *plan)
{
	struct bench_job bj = {.job = job_of(b, plan), .bench = b};
	uint64_t begin = loop_clock_ns(b->loop);

	b->done = false;
	if (copier_submit(b->copier, &bj.job) < 0)
		die("copier_submit");
	while (!b->done)
		loop_turn(b->loop, LOOP_NS_PER_S);
	if (b->result < 0)
		die("copy");
	return loop_clock_ns(b->loop) - begin;
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void form_bench(struct bench *b, const char *name, enum form form, uint64_t len,
		       uint64_t count)
{
	struct plan *plan = plan_of(form, len, count);
	uint64_t here[ROUNDS], posted[ROUNDS];

	for (int i = 0; i < ROUNDS; i++) {
		here[i] = here_ns(b, plan);
		posted[i] = posted_ns(b, plan);
	}
	qsort(here, ROUNDS, sizeof(*here), by_value);
	qsort(posted, ROUNDS, sizeof(*posted), by_value);
	printf("%-10s %6" PRIu64 " B x %-6" PRIu64 " %7zu runs %8.2f ns a row %8.1f us"
	       " %10.1f us again\n",
	       name, len, plan->rows, plan->run_count,
	       (double)here[ROUNDS / 2] / (double)plan->rows,
	       (double)here[ROUNDS / 2] / 1e3, (double)posted[ROUNDS / 2] / 1e3);
	plan_free(plan);
}

static void start(struct bench *b)
{
	char path[256];

	log_threshold = -1;
	if (gpu_new(gpu_fake_path("", path), "auto", &b->gpu) < 0 ||
	    gpu_tune(b->gpu, gpu_fake_kernels(), GPU_KERNEL_ROW_BYTES, GPU_STREAMS) < 0 ||
	    loop_new(&b->loop) < 0 || copier_new(b->loop, 1, 512 << 10, &b->copier) < 0 ||
	    copy_hand_new(&b->hand) < 0)
		die("set-up");
	for (unsigned int side = 0; side < 2; side++) {
		struct memory *memory = NULL;

		if (!gpu_owner_start(&b->owners[side], GPU_HANDLE_IPC, 0, AREA) ||
		    memory_import_device(b->gpu, 1, &b->owners[side].handle, 0, AREA,
					 side, &memory) < 0)
			die("memory");
		b->ends[side] = (struct copy_buffer){.memory = memory, .length = AREA};
	}
	if (!gpu_module_wait(&b->gpu->devices[0]))
		die("kernels");
	FAKE(fake_cuda_idle)(true);
}

int main(int argc, char **argv)
{
	struct bench b = {0};

	gpu_owner_main(argc, argv);
	start(&b);
	form_bench(&b, "scattered", SCATTERED, 256, 40960);
	form_bench(&b, "scattered", SCATTERED, 4096, 16384);
	form_bench(&b, "scattered", SCATTERED, 65536, 2048);
	form_bench(&b, "regular", REGULAR, 256, 40960);
	form_bench(&b, "grid", GRID, 256, 40960);
	form_bench(&b, "heads", HEADS, 256, 40960);
	for (unsigned int side = 0; side < 2; side++) {
		memory_unref(b.ends[side].memory);
		gpu_owner_end(&b.owners[side]);
	}
	copier_free(b.copier);
	copy_hand_free(b.hand);
	loop_free(b.loop);
	return 0;
}
