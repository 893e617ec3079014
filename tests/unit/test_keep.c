/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists that stay on a device: of which plans, for how long, how many; and that what
 * is launched from them moves the bytes of today between the memory of today.
 */
#include "gpu/keep.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/copy.h"
#include "gpu/gpu.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"
#include "tests/lib/limits.h"
#include "tests/gpu/module_wait.h"

#define BYTES (UINT64_C(2) << 20)
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

enum { SRC, DST, ELSEWHERE, OWNERS };

struct test {
	struct gpu *gpu;
	struct loop *loop;
	struct copier *copier;
	struct gpu_owner owners[OWNERS];
	struct memory *memories[OWNERS]; /* imported, or NULL */
	struct copy_job job;
	bool done;
};

static int start(void **state)
{
	struct test *t = mem_zalloc(sizeof(*t));
	char path[256];

	assert_non_null(t);
	assert_int_equal(gpu_new(gpu_fake_path("", path), "auto", &t->gpu), 0);
	assert_int_equal(gpu_tune(t->gpu, gpu_fake_kernels(), 1024, 3), 0);
	assert_int_equal(loop_new(&t->loop), 0);
	assert_int_equal(copier_new(t->loop, 1, 1024, &t->copier), 0);
	for (unsigned int i = 0; i < OWNERS; i++)
		assert_true(gpu_owner_start(
			&t->owners[i], i == ELSEWHERE ? GPU_HANDLE_VMM : GPU_HANDLE_IPC,
			0, BYTES));
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	*state = t;
	return 0;
}

static bool settled(struct test *t)
{
	unsigned int users;

	pthread_mutex_lock(&t->gpu->devices[0].lock);
	users = t->gpu->devices[0].users;
	pthread_mutex_unlock(&t->gpu->devices[0].lock);
	return users == 0;
}

/* All memory is let go of; with the last user the context goes. */
static void leave(struct test *t)
{
	uint64_t until = loop_clock_ns(t->loop) + 60 * LOOP_NS_PER_S;

	for (unsigned int i = 0; i < OWNERS; i++)
		memory_unref(mem_steal(t->memories[i]));
	while (!settled(t)) {
		assert_true(loop_clock_ns(t->loop) < until);
		loop_turn(t->loop, LOOP_NS_PER_MS);
	}
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
}

static int stop(void **state)
{
	struct test *t = *state;

	copier_free(t->copier);
	leave(t);
	loop_free(t->loop);
	for (unsigned int i = 0; i < OWNERS; i++)
		gpu_owner_end(&t->owners[i]);
	gpu_free(t->gpu);
	mem_free(t);
	return 0;
}

/* Imported, and the kernels are there. */
static void enter(struct test *t)
{
	struct gpu_device *device;

	for (unsigned int i = 0; i < OWNERS; i++)
		assert_int_equal(memory_import_device(t->gpu, 1, &t->owners[i].handle, 0,
						      BYTES, i != SRC, &t->memories[i]),
				 0);
	device = &t->gpu->devices[0];
	assert_int_equal(gpu_device_get(device), 0);
	assert_true(gpu_module_wait(device));
	gpu_device_put(device);
}

static void on_done(struct copy_job *job)
{
	container_of(job, struct test, job)->done = true;
}

/* From the first `src_count` of three buffers to the others. */
static int post_tables(struct test *t, const struct plan *plan,
		       const unsigned int owners[OWNERS], uint32_t src_count)
{
	struct copy_buffer buffers[OWNERS];
	int r;

	for (uint32_t i = 0; i < OWNERS; i++)
		buffers[i] = (struct copy_buffer){.memory = t->memories[owners[i]],
						  .length = BYTES};
	t->done = false;
	t->job = (struct copy_job){.plan = plan,
				   .end = plan->bytes,
				   .src = {.buffers = buffers, .buffer_count = src_count},
				   .dst = {.buffers = buffers + src_count,
					   .buffer_count = OWNERS - src_count},
				   .on_done = on_done};
	r = copier_submit(t->copier, &t->job);
	if (r < 0)
		return err_pass(r);
	while (!t->done)
		loop_turn(t->loop, 100 * LOOP_NS_PER_MS);
	return t->job.result < 0 ? err_reraise(&t->job.err) : 0;
}

static int post(struct test *t, const struct plan *plan, unsigned int dst)
{
	const unsigned int owners[OWNERS] = {SRC, dst, dst == DST ? ELSEWHERE : DST};

	return err_pass(post_tables(t, plan, owners, 1));
}

#define SCATTERED 9001u

static struct plan *plan_scattered(void)
{
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (uint64_t i = 0; i < SCATTERED; i++) {
		const struct plan_run run = {.src = i * 3301 % SCATTERED * 80,
					     .dst = i * 1207 % SCATTERED * 96,
					     .len = 64,
					     .count = 1};

		assert_int_equal(plan_builder_add(builder, &run), 0);
	}
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

/* Which row of the source becomes the destination's row `to`. */
static uint64_t row_of(uint64_t to)
{
	for (uint64_t i = 0; i < SCATTERED; i++)
		if (i * 1207 % SCATTERED == to)
			return i * 3301 % SCATTERED;
	return UINT64_MAX;
}

/* The source's bytes are others each time. */
static void post_and_check(struct test *t, const struct plan *plan, unsigned int dst,
			   uint8_t salt)
{
	uint8_t *from = t->owners[SRC].view, *to = t->owners[dst].view;

	for (uint64_t i = 0; i < SCATTERED * 80; i++)
		from[i] = (uint8_t)((i * 2654435761u >> 11) ^ salt);
	memset(to, 0xee, SCATTERED * 96);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	assert_int_equal(post(t, plan, dst), 0);
	for (uint64_t i = 0; i < SCATTERED; i++) {
		assert_memory_equal(to + i * 1207 % SCATTERED * 96,
				    from + i * 3301 % SCATTERED * 80, 64);
		assert_int_equal(to[i * 96 + 64], 0xee);
	}
}

/* Seen, kept, and from then on launched from where it is kept, with the same result;
 * and only with the same memory. */
static void list_of_plan_posted_again_is_kept(void **state)
{
	struct test *t = *state;
	struct plan *plan = plan_scattered(), *another = plan_scattered();
	int live;

	enter(t);
	post_and_check(t, plan, DST, 1);
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemAlloc_v2"), 0);
	live = FAKE(fake_cuda_live)();
	post_and_check(t, plan, DST, 2);
	assert_true(FAKE(fake_cuda_calls)("cuMemAlloc_v2") > 1);
	assert_true(FAKE(fake_cuda_live)() > live);
	for (uint8_t i = 3; i < 6; i++) {
		post_and_check(t, plan, DST, i);
		assert_int_equal(FAKE(fake_cuda_calls)("cuMemcpyAsync"), 0);
		assert_true(FAKE(fake_cuda_calls)("cuLaunchKernel") > 1);
	}
	post_and_check(t, plan, ELSEWHERE, 6);
	assert_true(FAKE(fake_cuda_calls)("cuMemAlloc_v2") > 1);
	post_and_check(t, another, DST, 7); /* equal, and another */
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemAlloc_v2"), 0);
	post_and_check(t, plan, DST, 8);
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemAlloc_v2"), 0);
	leave(t); /* the lists go with the context … */
	enter(t);
	post_and_check(t, plan, DST, 9); /* … and are not looked for */
	assert_int_equal(t->gpu->devices[0].keep.count, 0);
	plan_free(plan);
	plan_free(another);
}

/* The same buffers in the same order, but another one is the first that is written. */
static void list_is_of_one_division_of_its_buffers(void **state)
{
	static const unsigned int owners[OWNERS] = {SRC, ELSEWHERE, DST};
	struct test *t = *state;
	struct plan *plan = plan_scattered();

	enter(t);
	for (uint8_t i = 1; i < 4; i++)
		post_and_check(t, plan, ELSEWHERE, i);
	memset(t->owners[ELSEWHERE].view, 0x11, BYTES);
	memset(t->owners[DST].view, 0xee, BYTES);
	assert_int_equal(post_tables(t, plan, owners, 2), 0);
	assert_memory_equal(t->owners[DST].view, t->owners[SRC].view + row_of(0) * 80,
			    64);
	assert_int_equal(t->owners[ELSEWHERE].view[0], 0x11);
	plan_free(plan);
}

/* No memory for it, or no copy, or no launch: the rows go as ever, or the fault is
 * told; nothing stays that was not there. */
static void list_not_kept_has_no_effect(void **state)
{
	static const struct {
		const char *name;
		int code;
		bool harmless;
	} faults[] = {{"cuMemAlloc_v2", CU_ERROR_OUT_OF_MEMORY, true},
		      {"cuMemcpyAsync", CU_ERROR_UNKNOWN, true},
		      {"cuMemcpyAsync", CU_ERROR_LAUNCH_FAILED, false},
		      {"cuLaunchKernel", CU_ERROR_UNKNOWN, true},
		      {"cuEventRecord", CU_ERROR_UNKNOWN, false},
		      {"execute", CU_ERROR_ILLEGAL_ADDRESS, false}};
	struct test *t = *state;

	for (size_t i = 0; i < ARRAY_LEN(faults) * 3; i++) {
		struct plan *plan = plan_scattered();
		int r;

		enter(t);
		post_and_check(t, plan, DST, 1);
		if (i % 3 == 2) /* what is kept already */
			post_and_check(t, plan, DST, 2);
		FAKE(fake_cuda_fail)(NULL, 0, 0);
		FAKE(fake_cuda_fail)
		(faults[i / 3].name, 1 + i % 3 % 2, faults[i / 3].code);
		r = post(t, plan, DST);
		err_clear();
		assert_true(r == 0 || !faults[i / 3].harmless);
		if (!gpu_device_broken(&t->gpu->devices[0])) {
			post_and_check(t, plan, DST, 3);
			post_and_check(t, plan, DST, 4);
		}
		leave(t);
		plan_free(plan);
	}
}

/* More plans than there is room for: the oldest lists go. */
static void lists_kept_are_bounded(void **state)
{
	struct test *t = *state;
	struct gpu_kept *newest;
	struct gpu_keep *keep;
	struct plan *plans[GPU_KEEP_PLANS - 4];

	need_fds(1024);
	enter(t);
	keep = &t->gpu->devices[0].keep;
	for (size_t i = 0; i < ARRAY_LEN(plans); i++)
		plans[i] = plan_scattered();
	for (size_t i = 0; i < ARRAY_LEN(plans) * 6; i++) {
		post_and_check(t, plans[i / 3 % ARRAY_LEN(plans)], DST, (uint8_t)i);
		assert_true(keep->count <= GPU_KEEP_LISTS);
		assert_true(keep->bytes <= GPU_KEEP_BYTES);
	}
	assert_true(keep->count > GPU_KEEP_LISTS - 20); /* full … */
	newest = list_entry(keep->lists.prev, struct gpu_kept, link);
	assert_int_equal(newest->plan,
			 plans[ARRAY_LEN(plans) - 1]->serial); /* … of them */
	assert_int_not_equal(list_first(&keep->lists, struct gpu_kept, link)->plan,
			     plans[0]->serial);
	for (size_t i = 0; i < ARRAY_LEN(plans); i++)
		plan_free(plans[i]);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		CASE(list_of_plan_posted_again_is_kept),
		CASE(list_is_of_one_division_of_its_buffers),
		CASE(list_not_kept_has_no_effect),
		CASE(lists_kept_are_bounded),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
