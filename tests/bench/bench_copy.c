/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a copy of rows through the copy threads costs, against two limits measured in the
 * same run, in turn with it: one memcpy a row in a plain loop over the same rows, and one
 * memcpy of as many bytes in one piece. The rows are strided, or scattered over 512 MiB
 * at both ends. Medians of the rounds; first touch is not in them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "daemon/plan/plan.h"
#include "daemon/memory/copy.h"

#define TOTAL (UINT64_C(64) << 20) /* bytes copied a round */
#define SCATTERED (UINT64_C(512) << 20)
#define ROUNDS 9

struct bench {
	struct loop *loop;
	struct copier *copier;
	struct copy_buffer src, dst;
	bool done;
	int result;
};

struct bench_job {
	struct copy_job job;
	struct bench *bench;
};

static void die(const char *what)
{
	fprintf(stderr, "bench_copy: %s: %s\n", what, err_last()->text);
	exit(1);
}

static void on_done(struct copy_job *job)
{
	struct bench *b = container_of(job, struct bench_job, job)->bench;

	b->done = true;
	b->result = job->result;
}

static double threads_s(struct bench *b, const struct plan *plan)
{
	struct bench_job bj = {.bench = b};
	uint64_t begin = loop_clock_ns(b->loop);

	bj.job = (struct copy_job){.plan = plan,
				   .end = plan->bytes,
				   .src = {.buffers = &b->src, .buffer_count = 1},
				   .dst = {.buffers = &b->dst, .buffer_count = 1},
				   .on_done = on_done};
	b->done = false;
	if (copier_submit(b->copier, &bj.job) < 0)
		die("submit");
	while (!b->done)
		loop_turn(b->loop, LOOP_NS_PER_S);
	if (b->result < 0)
		die("copy");
	return (double)(loop_clock_ns(b->loop) - begin) / 1e9;
}

static double loop_s(struct bench *b, const struct plan_run *runs, uint64_t count)
{
	uint64_t begin = loop_clock_ns(b->loop);

	for (const struct plan_run *run = runs; run < runs + count; run++)
		for (uint64_t i = 0; i < run->count; i++)
			memcpy(b->dst.memory->base + run->dst +
				       i * (uint64_t)run->dst_stride,
			       b->src.memory->base + run->src +
				       i * (uint64_t)run->src_stride,
			       run->len);
	return (double)(loop_clock_ns(b->loop) - begin) / 1e9;
}

static double flat_s(struct bench *b)
{
	uint64_t begin = loop_clock_ns(b->loop);

	memcpy(b->dst.memory->base, b->src.memory->base, TOTAL);
	return (double)(loop_clock_ns(b->loop) - begin) / 1e9;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *v)
{
	qsort(v, ROUNDS, sizeof(*v), by_value);
	return v[ROUNDS / 2];
}

static void bench_runs(struct bench *b, const char *how, const struct plan_run *runs,
		       uint64_t count)
{
	double threads[ROUNDS], plain[ROUNDS], flat[ROUNDS], t, p, f;
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;
	int r = plan_builder_new(&builder);

	for (uint64_t i = 0; r >= 0 && i < count; i++)
		r = plan_builder_add(builder, &runs[i]);
	if (r < 0 || plan_builder_finish(builder, &plan) < 0)
		die("plan");
	plan_builder_free(builder);
	for (int i = 0; i < ROUNDS; i++) {
		threads[i] = threads_s(b, plan);
		plain[i] = loop_s(b, runs, count);
		flat[i] = flat_s(b);
	}
	t = median(threads);
	p = median(plain);
	f = median(flat);
	printf("%7" PRIu64 " %-9s  %6.2f GB/s  %6.2f GB/s  %6.2f GB/s   %5.2f  %5.2f\n",
	       runs->len, how, (double)TOTAL / t / 1e9, (double)TOTAL / p / 1e9,
	       (double)TOTAL / f / 1e9, p / t, f / t);
	plan_free(plan);
}

/* Rows of `len`, two rows apart at the source, three at the destination. */
static void bench_rows(struct bench *b, uint64_t len)
{
	struct plan_run run = {.len = len,
			       .count = TOTAL / len,
			       .src_stride = (int64_t)(2 * len),
			       .dst_stride = (int64_t)(3 * len)};

	bench_runs(b, "strided", &run, 1);
}

/* By odd multipliers, so that each place is used once. */
static void bench_scattered(struct bench *b, uint64_t len)
{
	uint64_t count = TOTAL / len, places = SCATTERED / len;
	struct plan_run *runs = calloc(count, sizeof(*runs));

	if (!runs)
		die("memory");
	for (uint64_t i = 0; i < count; i++)
		runs[i] = (struct plan_run){.len = len,
					    .count = 1,
					    .src = i * 0x9e3779b1 % places * len,
					    .dst = i * 0x85ebca6b % places * len};
	bench_runs(b, "scattered", runs, count);
	free(runs);
}

int main(int argc, char **argv)
{
	static const uint64_t lens[] = {64 << 10, 4 << 10, 1 << 10, 256, 128, 64, 32, 16};
	unsigned int threads = argc > 1 ? (unsigned int)strtoul(argv[1], NULL, 10) : 1;
	struct bench b = {.src = {.length = SCATTERED}, .dst = {.length = SCATTERED}};

	if (loop_new(&b.loop) < 0 || copier_new(b.loop, threads, 0, &b.copier) < 0 ||
	    memory_new_linear(SCATTERED, &b.src.memory) < 0 ||
	    memory_new_linear(SCATTERED, &b.dst.memory) < 0)
		die("set-up");
	memset(b.src.memory->base, 1, SCATTERED);
	memset(b.dst.memory->base, 2, SCATTERED);
	printf("%u copy thread(s), %d MiB a round, median of %d\n", threads,
	       (int)(TOTAL >> 20), ROUNDS);
	printf("    row                threads    loop of memcpy  one memcpy   /loop  "
	       "/one\n");
	for (size_t i = 0; i < ARRAY_LEN(lens); i++)
		bench_rows(&b, lens[i]);
	for (size_t i = 0; i < ARRAY_LEN(lens) && lens[i] >= 64; i++)
		bench_scattered(&b, lens[i]);
	copier_free(b.copier);
	loop_free(b.loop);
	memory_unref(b.src.memory);
	memory_unref(b.dst.memory);
	return 0;
}
