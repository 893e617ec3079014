/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy: every kind of memory to every other, checked byte by byte against the
 * plan's own walk; bounds; fairness, cancel and faults.
 */
#include "daemon/memory/copy.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/copy_rig.h"
#include "tests/lib/gates.h"
#include "tests/lib/tmp.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)

static bool builder_takes(const struct plan_run *run)
{
	struct plan_builder *builder = NULL;
	bool takes;

	assert_int_equal(plan_builder_new(&builder), 0);
	takes = plan_builder_add(builder, run) == 0;
	plan_builder_free(builder);
	return takes;
}

static struct memory *linear(uint64_t bytes)
{
	struct memory *m = NULL;

	assert_int_equal(memory_new_linear(bytes, &m), 0);
	return m;
}

static struct memory *vm_of(pid_t pid, const uint8_t *at, uint64_t bytes)
{
	struct memory *m = NULL;

	assert_int_equal(vm_import_pid(pid, (uintptr_t)at, bytes, &m), 0);
	return m;
}

/* Memory that this process knows as `own` and the copier as another's. */
static struct memory *vm(uint8_t *own, uint64_t bytes)
{
	return vm_of(getpid(), own, bytes);
}

static uint8_t *heap(uint64_t bytes, bool filled)
{
	uint8_t *p = test_malloc(bytes);

	for (uint64_t i = 0; i < bytes; i++)
		p[i] = filled ? copy_rig_pattern(i) : 0xee;
	return p;
}

/* What the destination must be, by the slow way. */
static uint8_t *expected(const struct plan *plan, const uint8_t *src, uint64_t dst_bytes,
			 uint64_t begin, uint64_t end)
{
	uint8_t *dst = heap(dst_bytes, false);
	struct plan_walk walk;
	struct plan_span span;

	assert_int_equal(plan_walk_seek(&walk, plan, begin), 0);
	while (begin < end && plan_walk_next(&walk, end - begin, &span)) {
		memcpy(dst + span.dst, src + span.src, span.len);
		begin += span.len;
	}
	return dst;
}

static const struct plan_run mixed_runs[] = {
	{.src = 7, .dst = 100, .len = 3, .count = 5, .src_stride = 11, .dst_stride = 3},
	{.src = 4096,
	 .dst = 1000,
	 .len = 16,
	 .count = 300,
	 .src_stride = 48,
	 .dst_stride = 16},
	{.src = 60000,
	 .dst = 8000,
	 .len = 32,
	 .count = 200,
	 .src_stride = -64,
	 .dst_stride = 32},
	{.src = 0,
	 .dst = 16384,
	 .len = 64,
	 .count = 100,
	 .src_stride = 64,
	 .dst_stride = 64},
	{.src = 1,
	 .dst = 30001,
	 .len = 128,
	 .count = 70,
	 .src_stride = 200,
	 .dst_stride = 129},
	{.src = 512,
	 .dst = 80000,
	 .len = 256,
	 .count = 90,
	 .src_stride = 512,
	 .dst_stride = -300},
	{.src = 20000, .dst = 90000, .len = 20000, .count = 1},
	{.src = 3,
	 .dst = 115000,
	 .len = 1000,
	 .count = 11,
	 .src_stride = 0,
	 .dst_stride = 1000},
};
#define SRC_BYTES (64 * KIB)
#define DST_BYTES (128 * KIB)

/* One plan between two memories, [begin, end) of it. */
static void copy_and_check(unsigned int threads, uint64_t slice, bool src_vm, bool dst_vm,
			   uint64_t begin, uint64_t end)
{
	struct plan *plan = copy_rig_plan(mixed_runs, ARRAY_LEN(mixed_runs));
	uint8_t *src = heap(SRC_BYTES, true), *dst = heap(DST_BYTES, false), *want;
	struct copy_buffer sb = {.length = SRC_BYTES}, db = {.length = DST_BYTES};
	struct copy_rig_job tj = {0};
	struct copy_rig t;

	copy_rig_setup(&t, threads, slice);
	sb.memory = src_vm ? vm(src, SRC_BYTES) : linear(SRC_BYTES);
	db.memory = dst_vm ? vm(dst, DST_BYTES) : linear(DST_BYTES);
	if (!src_vm)
		memcpy(sb.memory->base, src, SRC_BYTES);
	if (!dst_vm)
		memcpy(db.memory->base, dst, DST_BYTES);
	if (end > plan->bytes)
		end = plan->bytes;
	tj.rig = &t;
	tj.job = (struct copy_job){.plan = plan,
				   .begin = begin,
				   .end = end,
				   .src = {.buffers = &sb, .buffer_count = 1},
				   .dst = {.buffers = &db, .buffer_count = 1},
				   .on_done = copy_rig_on_done};
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	assert_int_equal(tj.calls, 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.result, 0);
	assert_int_equal(tj.calls, 1);
	assert_int_equal(atomic_load(&tj.job.copied), end - begin);
	want = expected(plan, src, DST_BYTES, begin, end);
	assert_memory_equal(dst_vm ? dst : db.memory->base, want, DST_BYTES);
	copy_rig_teardown(&t);
	memory_unref(sb.memory);
	memory_unref(db.memory);
	plan_free(plan);
	test_free(src);
	test_free(dst);
	test_free(want);
}

static void copy_each_kind_to_each_is_exact(void **state)
{
	(void)state;
	for (int kinds = 0; kinds < 4; kinds++) {
		copy_and_check(1, 0, kinds & 1, kinds & 2, 0, UINT64_MAX);
		copy_and_check(3, 1000, kinds & 1, kinds & 2, 0, UINT64_MAX);
		copy_and_check(2, 7, kinds & 1, kinds & 2, 13, 20011);
	}
}

static void copy_parts_of_the_stream_are_exact(void **state)
{
	(void)state;
	for (uint64_t begin = 0; begin < 70000; begin += 4999)
		copy_and_check(1, 4096, false, false, begin, begin + 9001);
	copy_and_check(1, 0, false, false, 5, 5);
}

/* Gather into linear memory, scatter out of it: the transports' pack. */
static void copy_through_linear_memory_is_exact(void **state)
{
	struct plan *plan = copy_rig_plan(mixed_runs, ARRAY_LEN(mixed_runs));
	uint8_t *src = heap(SRC_BYTES, true), *want;
	uint8_t *packed = heap(plan->bytes, false), *dst = heap(DST_BYTES, false);
	struct copy_buffer sb = {.length = SRC_BYTES}, db = {.length = DST_BYTES};
	struct copy_rig_job tj = {0};
	struct copy_rig t;
	unsigned int jobs = 0;

	(void)state;
	copy_rig_setup(&t, 2, 3000);
	sb.memory = vm(src, SRC_BYTES);
	db.memory = linear(DST_BYTES);
	memcpy(db.memory->base, dst, DST_BYTES);
	tj.rig = &t;
	for (uint64_t begin = 0; begin < plan->bytes; begin += 10007) {
		uint64_t end = begin + 10007 < plan->bytes ? begin + 10007 : plan->bytes;

		tj.job = (struct copy_job){.plan = plan,
					   .begin = begin,
					   .end = end,
					   .on_done = copy_rig_on_done,
					   .src = {.buffers = &sb, .buffer_count = 1},
					   .dst = {.linear = packed + begin}};
		assert_int_equal(copier_submit(t.copier, &tj.job), 0);
		copy_rig_wait(&t, ++jobs);
		tj.job = (struct copy_job){.plan = plan,
					   .begin = begin,
					   .end = end,
					   .on_done = copy_rig_on_done,
					   .src = {.linear = packed + begin},
					   .dst = {.buffers = &db, .buffer_count = 1}};
		assert_int_equal(copier_submit(t.copier, &tj.job), 0);
		copy_rig_wait(&t, ++jobs);
		assert_int_equal(tj.job.result, 0);
	}
	want = expected(plan, src, DST_BYTES, 0, plan->bytes);
	assert_memory_equal(db.memory->base, want, DST_BYTES);
	copy_rig_teardown(&t);
	memory_unref(sb.memory);
	memory_unref(db.memory);
	plan_free(plan);
	test_free(src);
	test_free(packed);
	test_free(dst);
	test_free(want);
}

/* What the builder does not refuse by itself, the copier must. */
static void copy_out_of_bounds_is_refused(void **state)
{
	static const struct plan_run bad[] = {
		{.src = 4095, .dst = 0, .len = 2, .count = 1},
		{.src = 0, .dst = 4095, .len = 2, .count = 1},
		{.src = UINT64_MAX, .dst = 0, .len = 2, .count = 1},
		{.src = 0, .dst = 0, .len = 1, .count = 2, .src_stride = -1},
		{.src = 0, .dst = 1, .len = 1, .count = 3, .dst_stride = -1},
		{.src = 0, .dst = 0, .len = 1, .count = 4097, .src_stride = 1},
		{.src = 0, .dst = 0, .len = 1, .count = 2, .src_stride = INT64_MAX},
		{.src = 1, .dst = 0, .len = 1, .count = 2, .src_stride = INT64_MIN},
		{.src = 2, .dst = 2, .len = 1, .count = 5, .src_stride = INT64_MIN / 2},
		{.src = 8, .dst = 0, .len = 8, .count = 3, .src_stride = 2041},
		{.src = 0, .dst = 0, .len = 1, .count = 1, .src_buffer = 1},
		{.src = 0, .dst = 0, .len = 1, .count = 1, .dst_buffer = UINT32_MAX},
	};
	struct copy_buffer b = {.length = 4096};
	struct copy_rig_job tj = {0};
	unsigned int reached = 0;
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 0);
	b.memory = linear(4096);
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		struct plan *plan;

		if (!builder_takes(&bad[i]))
			continue;
		plan = copy_rig_plan(&bad[i], 1);
		reached++;

		tj.rig = &t;
		tj.job = (struct copy_job){.plan = plan,
					   .end = plan->bytes,
					   .src = {.buffers = &b, .buffer_count = 1},
					   .dst = {.buffers = &b, .buffer_count = 1},
					   .on_done = copy_rig_on_done};
		assert_int_equal(copier_submit(t.copier, &tj.job), -err_errno(ERR_RANGE));
		plan_free(plan);
	}
	assert_true(reached >= 6);
	assert_int_equal(t.done, 0);
	copy_rig_teardown(&t);
	memory_unref(b.memory);
}

static void copy_bad_job_is_refused(void **state)
{
	static const struct plan_run run = {.len = 100, .count = 1};
	struct plan *plan = copy_rig_plan(&run, 1);
	struct copy_buffer b = {.length = 4096}, longer = {.length = 4097},
			   shifted = {.length = 4096, .offset = 1}, ro = {.length = 4096},
			   nowhere = {.length = 4096}, unused = {.length = 0};
	struct copy_rig_job tj = {0};
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 0);
	b.memory = longer.memory = shifted.memory = linear(4096);
	assert_int_equal(memory_import_memfd(b.memory->fd, 0, 4096, false, &ro.memory),
			 0);
	const struct {
		struct copy_buffer *src, *dst;
		uint64_t begin, end;
		enum err_code code;
	} cases[] = {
		{&b, &b, 0, 101, ERR_RANGE},	   {&b, &b, 5, 4, ERR_RANGE},
		{&longer, &b, 0, 100, ERR_RANGE},  {&b, &longer, 0, 100, ERR_RANGE},
		{&shifted, &b, 0, 100, ERR_RANGE}, {&b, &ro, 0, 100, ERR_PERM},
		{NULL, &b, 0, 100, ERR_INVAL},	   {&b, NULL, 0, 100, ERR_INVAL},
		{&nowhere, &b, 0, 100, ERR_INVAL}, {&unused, &b, 0, 100, ERR_RANGE},
	};
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		tj.rig = &t;
		tj.job = (struct copy_job){.plan = plan,
					   .begin = cases[i].begin,
					   .end = cases[i].end,
					   .on_done = copy_rig_on_done};
		tj.job.src =
			(struct copy_end){.buffers = cases[i].src, .buffer_count = 1};
		tj.job.dst =
			(struct copy_end){.buffers = cases[i].dst, .buffer_count = 1};
		assert_int_equal(copier_submit(t.copier, &tj.job),
				 -err_errno(cases[i].code));
	}
	assert_int_equal(t.done, 0);
	copy_rig_teardown(&t);
	memory_unref(b.memory);
	memory_unref(ro.memory);
	plan_free(plan);
}

/* A job that writes one memory from another, over and over: `times` can make it
 * outlast any test, so that what must happen before its end does. */
struct bulk {
	struct copy_buffer src, dst;
	struct plan *plan;
	struct copy_rig_job tj;
};

#define ENDLESS (UINT64_C(1) << 40)

static void bulk_init(struct bulk *b, struct copy_rig *t, uint64_t bytes, uint64_t times)
{
	struct plan_run run = {.len = bytes, .count = times};

	*b = (struct bulk){.src = {.length = bytes}, .dst = {.length = bytes}};
	b->src.memory = linear(bytes);
	b->dst.memory = linear(bytes);
	memset(b->src.memory->base, 1, bytes);
	b->plan = copy_rig_plan(&run, 1);
	b->tj.rig = t;
	b->tj.job = (struct copy_job){.plan = b->plan,
				      .end = b->plan->bytes,
				      .src = {.buffers = &b->src, .buffer_count = 1},
				      .dst = {.buffers = &b->dst, .buffer_count = 1},
				      .on_done = copy_rig_on_done};
}

static void bulk_fini(struct bulk *b)
{
	memory_unref(b->src.memory);
	memory_unref(b->dst.memory);
	plan_free(b->plan);
}

/* Submitted, and seen in a slice; who was kept from looking until it was over tries
 * again. */
static void submit_and_see(struct copy_rig *t, struct copy_job *job)
{
	const unsigned int before = t->done;

	do {
		t->done = before;
		assert_int_equal(copier_submit(t->copier, job), 0);
		while (t->done == before && atomic_load(&job->slices_running) == 0)
			loop_turn(t->loop, 0);
	} while (t->done != before);
}

/* One thread: a small job behind an endless one has its turn. */
static void jobs_take_turns(void **state)
{
	struct bulk large, small;
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 4 * KIB);
	bulk_init(&large, &t, 64 * KIB, ENDLESS);
	bulk_init(&small, &t, 64 * KIB, 4);
	assert_int_equal(copier_submit(t.copier, &large.tj.job), 0);
	assert_int_equal(copier_submit(t.copier, &small.tj.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(small.tj.order, 1);
	assert_int_equal(small.tj.job.result, 0);
	copier_cancel(t.copier, &large.tj.job);
	copy_rig_wait(&t, 2);
	assert_int_equal(large.tj.order, 2);
	assert_int_equal(large.tj.job.result, -ECANCELED);
	copy_rig_teardown(&t);
	bulk_fini(&large);
	bulk_fini(&small);
}

/* After on_done of a canceled job nothing of it is written. */
static void cancel_leaves_memory_quiesced(void **state)
{
	struct bulk b, other;
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 64 * KIB); /* two would write the same bytes at once */
	bulk_init(&b, &t, 1 * MIB, ENDLESS);
	bulk_init(&other, &t, 1 * MIB, 16);
	assert_int_equal(copier_submit(t.copier, &b.tj.job), 0);
	while (atomic_load(&b.tj.job.copied) < 2 * MIB)
		loop_turn(t.loop, 0);
	assert_int_equal(t.done, 0);
	copier_cancel(t.copier, &b.tj.job);
	copier_cancel(t.copier, &b.tj.job);
	copy_rig_wait(&t, 1);
	assert_int_equal(b.tj.job.result, -ECANCELED);
	assert_int_equal(b.tj.job.err.code, ERR_CANCELED);
	memset(b.dst.memory->base, 0, 1 * MIB);
	/* the threads are alive: another job runs, and only its bytes appear */
	assert_int_equal(copier_submit(t.copier, &other.tj.job), 0);
	copy_rig_wait(&t, 2);
	assert_int_equal(other.tj.job.result, 0);
	for (uint64_t i = 0; i < 1 * MIB; i++)
		if (b.dst.memory->base[i])
			fail_msg("byte %ju was written after on_done", (uintmax_t)i);
	assert_int_equal(b.tj.calls, 1);
	copy_rig_teardown(&t);
	bulk_fini(&b);
	bulk_fini(&other);
}

/* The only thread is busy with a slice of 1 GiB. */
static void cancel_before_a_slice_began_is_done(void **state)
{
	struct bulk large, waiting;
	struct copy_rig t;
	bool busy;

	(void)state;
	copy_rig_setup(&t, 1, 1024 * MIB);
	bulk_init(&large, &t, 1 * MIB, 1024);
	bulk_init(&waiting, &t, 128 * KIB, 1);
	do { /* until the thread was busy all the time that this takes */
		t.done = waiting.tj.calls = 0;
		submit_and_see(&t, &large.tj.job);
		assert_int_equal(copier_submit(t.copier, &waiting.tj.job), 0);
		copier_cancel(t.copier, &waiting.tj.job);
		assert_int_equal(waiting.tj.calls, 0); /* never from inside cancel */
		busy = atomic_load(&large.tj.job.slices_running) > 0;
		copy_rig_wait(&t, 2);
	} while (!busy);
	assert_int_equal(waiting.tj.order, 1);
	assert_int_equal(waiting.tj.job.result, -ECANCELED);
	assert_int_equal(atomic_load(&waiting.tj.job.copied), 0);
	assert_int_equal(large.tj.job.result, 0);
	copy_rig_teardown(&t);
	bulk_fini(&large);
	bulk_fini(&waiting);
}

/* Its last slice has begun: the job succeeds, every byte is there. */
static void cancel_after_the_last_slice_began_is_success(void **state)
{
	struct bulk b;
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 256 * MIB);
	bulk_init(&b, &t, 1 * MIB, 256);
	submit_and_see(&t, &b.tj.job);
	copier_cancel(t.copier, &b.tj.job);
	copy_rig_wait(&t, 1);
	assert_int_equal(b.tj.job.result, 0);
	assert_int_equal(atomic_load(&b.tj.job.copied), b.plan->bytes);
	copy_rig_teardown(&t);
	bulk_fini(&b);
}

static void free_with_jobs_calls_each_on_done(void **state)
{
	struct bulk b[4];
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 4 * KIB);
	for (size_t i = 0; i < ARRAY_LEN(b); i++) {
		bulk_init(&b[i], &t, 64 * KIB, ENDLESS);
		assert_int_equal(copier_submit(t.copier, &b[i].tj.job), 0);
	}
	copy_rig_teardown(&t);
	for (size_t i = 0; i < ARRAY_LEN(b); i++) {
		assert_int_equal(b[i].tj.calls, 1);
		assert_int_equal(b[i].tj.job.result, -ECANCELED);
		bulk_fini(&b[i]);
	}
}

/* The most threads that were seen in the job's slices, which is `want` some time. */
static int threads_seen(struct copy_rig *t, struct copy_job *job, int want)
{
	unsigned int before = t->done;
	int most = 0;

	assert_int_equal(copier_submit(t->copier, job), 0);
	while (t->done == before && most < want) {
		int now = atomic_load(&job->slices_running);

		most = now > most ? now : most;
		loop_turn(t->loop, 0);
	}
	copier_cancel(t->copier, job);
	copy_rig_wait(t, before + 1);
	return most;
}

/* A slice of the copier's would hold all of it. */
static void job_of_short_vm_rows_has_short_slices(void **state)
{
	static const struct plan_run run = {
		.len = 16, .count = 64 * KIB, .src_stride = 16, .dst_stride = 32};
	struct plan *plan = copy_rig_plan(&run, 1);
	uint8_t *far = heap(2 * MIB, false);
	struct copy_buffer src = {.length = MIB, .memory = linear(MIB)};
	struct copy_buffer dst = {.length = 2 * MIB, .memory = vm(far, 2 * MIB)};
	struct copy_rig t;
	struct copy_rig_job tj = {.rig = &t,
				  .job = {.plan = plan,
					  .end = plan->bytes,
					  .src = {.buffers = &src, .buffer_count = 1},
					  .dst = {.buffers = &dst, .buffer_count = 1},
					  .on_done = copy_rig_on_done}};
	int most = 0;

	(void)state;
	copy_rig_setup(&t, 2, 64 * MIB);
	for (int i = 0; most < 2; i++, most = threads_seen(&t, &tj.job, 2))
		assert_in_range(i, 0, 1000);
	copy_rig_teardown(&t);
	memory_unref(src.memory);
	memory_unref(dst.memory);
	test_free(far);
	plan_free(plan);
}

static void copy_of_truncated_memory_fails_its_job_only(void **state)
{
	static const struct plan_run run = {.len = 1 * MIB, .count = 1};
	struct plan *plan = copy_rig_plan(&run, 1);
	int fd = memfd_create("cut", MFD_CLOEXEC);
	struct copy_buffer cut = {.length = 1 * MIB}, whole = {.length = 1 * MIB},
			   dst = {.length = 1 * MIB};
	struct copy_rig_job bad = {0}, good = {0};
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 2, 64 * KIB);
	whole.memory = linear(MIB);
	dst.memory = linear(MIB);
	assert_int_equal(write(fd, dst.memory->base, MIB), MIB);
	assert_int_equal(memory_import_shm_fd(fd, 0, MIB, true, &cut.memory), 0);
	memset(whole.memory->base, 5, MIB);
	assert_int_equal(ftruncate(fd, 300 << 10), 0);
	bad.rig = good.rig = &t;
	bad.job = good.job =
		(struct copy_job){.plan = plan,
				  .end = MIB,
				  .on_done = copy_rig_on_done,
				  .dst = {.buffers = &dst, .buffer_count = 1}};
	bad.job.src = (struct copy_end){.buffers = &cut, .buffer_count = 1};
	good.job.src = (struct copy_end){.buffers = &whole, .buffer_count = 1};
	assert_int_equal(copier_submit(t.copier, &bad.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(bad.job.result, -EFAULT);
	assert_int_equal(bad.job.err.code, ERR_FAULT);
	assert_int_equal(copier_submit(t.copier, &good.job), 0);
	copy_rig_wait(&t, 2);
	assert_int_equal(good.job.result, 0);
	for (uint64_t i = 0; i < MIB; i++)
		assert_int_equal(dst.memory->base[i], 5);
	/* and it stays dead, although zero pages lie there now */
	assert_int_equal(copier_submit(t.copier, &bad.job), 0);
	copy_rig_wait(&t, 3);
	assert_int_equal(bad.job.err.code, ERR_FAULT);
	copy_rig_teardown(&t);
	memory_unref(cut.memory);
	memory_unref(whole.memory);
	memory_unref(dst.memory);
	plan_free(plan);
	close(fd);
}

static void copy_of_a_dead_process_fails(void **state)
{
	static const struct plan_run run = {.len = 64 * KIB, .count = 1};
	static uint8_t bytes[64 * KIB];
	struct plan *plan = copy_rig_plan(&run, 1);
	struct copy_buffer src = {.length = 64 * KIB}, dst = {.length = 64 * KIB};
	struct copy_rig_job tj = {0};
	int p[2], status;
	struct copy_rig t;
	pid_t pid;
	char c;

	(void)state;
	assert_int_equal(pipe(p), 0);
	pid = fork();
	if (pid == 0) {
		close(p[1]);
		(void)!read(p[0], &c, 1);
		_exit(0);
	}
	copy_rig_setup(&t, 1, 0);
	src.memory = vm_of(pid, bytes, sizeof(bytes));
	dst.memory = linear(64 * KIB);
	tj.rig = &t;
	tj.job = (struct copy_job){.plan = plan,
				   .end = plan->bytes,
				   .src = {.buffers = &src, .buffer_count = 1},
				   .dst = {.buffers = &dst, .buffer_count = 1},
				   .on_done = copy_rig_on_done};
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.result, 0);
	close(p[1]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 2);
	assert_int_equal(tj.job.err.code, ERR_FAULT);
	assert_non_null(strstr(tj.job.err.text, "has exited"));
	copy_rig_teardown(&t);
	memory_unref(src.memory);
	memory_unref(dst.memory);
	plan_free(plan);
	close(p[0]);
}

static void copy_of_an_unmapped_page_fails_after_its_part(void **state)
{
	static const struct plan_run run = {.len = 8192, .count = 1};
	struct plan *plan = copy_rig_plan(&run, 1);
	int fd = memfd_create("cut", MFD_CLOEXEC);
	uint8_t *pages;
	struct copy_buffer src = {.length = 8192}, dst = {.length = 8192};
	struct copy_rig_job tj = {0};
	struct copy_rig t;

	(void)state;
	copy_rig_setup(&t, 1, 0);
	assert_int_equal(ftruncate(fd, 8192), 0);
	pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(pages, MAP_FAILED);
	src.memory = vm(pages, 8192);
	dst.memory = linear(8192);
	/* as good as unmapped, and no other thread's mmap can take the place */
	assert_int_equal(ftruncate(fd, 4096), 0);
	close(fd);
	tj.rig = &t;
	tj.job = (struct copy_job){.plan = plan,
				   .end = plan->bytes,
				   .src = {.buffers = &src, .buffer_count = 1},
				   .dst = {.buffers = &dst, .buffer_count = 1},
				   .on_done = copy_rig_on_done};
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.err.code, ERR_FAULT);
	copy_rig_teardown(&t);
	memory_unref(src.memory);
	memory_unref(dst.memory);
	plan_free(plan);
	munmap(pages, 8192);
}

/* 2 MiB between two processes' memories; one side's ends in the middle. */
static void copy_between_processes_names_the_side_that_fails(void **state)
{
	enum { BYTES = 2 << 20 };
	static const struct plan_run run = {.len = 65536,
					    .src_stride = 65536,
					    .dst_stride = 65536,
					    .count = BYTES / 65536};
	struct plan *plan = copy_rig_plan(&run, 1);

	(void)state;
	for (unsigned int side = 0; side < 2; side++) {
		int fd = memfd_create("cut", MFD_CLOEXEC);
		uint8_t *cut, *whole;
		struct copy_buffer ends[2] = {{.length = BYTES}, {.length = BYTES}};
		struct copy_rig_job tj = {0};
		struct copy_rig t;

		copy_rig_setup(&t, 1, 0);
		assert_int_equal(ftruncate(fd, BYTES), 0);
		cut = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		whole = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		assert_true(cut != MAP_FAILED && whole != MAP_FAILED);
		ends[side].memory = vm(cut, BYTES);
		ends[!side].memory = vm(whole, BYTES);
		assert_int_equal(ftruncate(fd, BYTES / 2), 0);
		close(fd);
		tj.rig = &t;
		tj.job =
			(struct copy_job){.plan = plan,
					  .end = plan->bytes,
					  .src = {.buffers = &ends[0], .buffer_count = 1},
					  .dst = {.buffers = &ends[1], .buffer_count = 1},
					  .on_done = copy_rig_on_done};
		assert_int_equal(copier_submit(t.copier, &tj.job), 0);
		copy_rig_wait(&t, 1);
		assert_int_equal(tj.job.err.code, ERR_FAULT);
		assert_non_null(strstr(tj.job.err.text, side ? "writing" : "reading"));
		copy_rig_teardown(&t);
		memory_unref(ends[0].memory);
		memory_unref(ends[1].memory);
		munmap(cut, BYTES);
		munmap(whole, BYTES);
	}
	plan_free(plan);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(copy_each_kind_to_each_is_exact),
		cmocka_unit_test(copy_parts_of_the_stream_are_exact),
		cmocka_unit_test(copy_through_linear_memory_is_exact),
		cmocka_unit_test(copy_out_of_bounds_is_refused),
		cmocka_unit_test(copy_bad_job_is_refused),
		cmocka_unit_test(jobs_take_turns),
		cmocka_unit_test(cancel_leaves_memory_quiesced),
		cmocka_unit_test(cancel_before_a_slice_began_is_done),
		cmocka_unit_test(cancel_after_the_last_slice_began_is_success),
		cmocka_unit_test(free_with_jobs_calls_each_on_done),
		cmocka_unit_test(job_of_short_vm_rows_has_short_slices),
		cmocka_unit_test(copy_of_truncated_memory_fails_its_job_only),
		cmocka_unit_test(copy_of_a_dead_process_fails),
		cmocka_unit_test(copy_of_an_unmapped_page_fails_after_its_part),
		cmocka_unit_test(copy_between_processes_names_the_side_that_fails),
	};

	return cmocka_run_group_tests_name("copy", tests, NULL, NULL);
}
