/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy threads with memory of GPUs: every pair of kinds, tables that mix them,
 * devices apart, an import beside; with copy engines alone, and with kernels for the
 * short rows.
 */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/memory/memory.h"
#include "tests/lib/gpu_copy.h"

static void copy_between_each_pair_of_kinds_is_exact(void **state)
{
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(1);
	unsigned int launches;

	for (enum place src = 0; src < PLACES; src++) {
		for (enum place dst = 0; dst < PLACES; dst++) {
			enum place places[2] = {src, dst};
			struct gc_tables tables;

			gc_wipe(t);
			assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
			assert_int_equal(gc_job_run(t, plan, &tables, 1), 0);
			gc_assert_moved(t, plan, places, false);
			assert_int_equal(atomic_load(&t->job.copied), plan->bytes);
			gc_tables_free(&tables);
			launches = GC_FAKE(fake_cuda_calls)("cuLaunchKernel");
			GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
			assert_true((launches > 0) == (t->kernels && (src <= PLACE_VMM ||
								      dst <= PLACE_VMM)));
		}
	}
	plan_free(plan);
}

static void copy_between_mixed_tables_is_exact(void **state)
{
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(PLACES);
	struct gc_tables tables;

	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, NULL, true, &tables), 0);
	assert_int_equal(gc_job_run(t, plan, &tables, PLACES), 0);
	gc_assert_moved(t, plan, NULL, true);
	gc_tables_free(&tables);
	plan_free(plan);
}

/* A kernel that stepped on memory of the other device would end its context. */
static void copy_between_devices_apart_is_exact(void **state)
{
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(PLACES);
	struct gc_tables tables;

	assert_int_equal(setenv("FAKE_CUDA_NO_PEER", "1", 1), 0);
	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, NULL, true, &tables), 0);
	for (unsigned int i = 0; i < 3; i++) /* kernels come with the first or later */
		assert_int_equal(gc_job_run(t, plan, &tables, PLACES), 0);
	gc_assert_moved(t, plan, NULL, true);
	assert_int_equal(unsetenv("FAKE_CUDA_NO_PEER"), 0);
	gc_tables_free(&tables);
	plan_free(plan);
}

/* The one device stays, the other's context goes with its last memory and comes again:
 * as another one, to which access has to be asked for anew. */
static void copy_after_device_reset_is_exact(void **state)
{
	const enum place places[2] = {PLACE_GPU1, PLACE_GPU0};
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(1);
	struct memory *stays = NULL;
	struct gc_tables tables;

	assert_int_equal(
		gc_spot_import(t, &t->spots[1][PLACE_VMM], PLACE_VMM, true, &stays), 0);
	for (unsigned int i = 0; i < 3; i++) {
		gc_wipe(t);
		GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
		assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
		assert_int_equal(gc_job_run(t, plan, &tables, 1), 0);
		gc_assert_moved(t, plan, places, false);
		assert_true(GC_FAKE(fake_cuda_calls)("cuLaunchKernel") > 0);
		gc_tables_free(&tables);
		gc_settle_device(t, 1);
	}
	memory_unref(stays);
	plan_free(plan);
}

struct opening {
	struct gc *t;
	struct memory *memory;
	pthread_t thread;
	atomic_bool over;
};

static void *opening_main(void *arg)
{
	struct opening *opening = arg;
	struct gc *t = opening->t;

	assert_int_equal(gc_spot_import(t, &t->spots[0][PLACE_VMM], PLACE_VMM, true,
					&opening->memory),
			 0);
	atomic_store(&opening->over, true);
	return NULL;
}

/* The driver may take its time over a large allocation; bytes move meanwhile. */
static void copy_during_slow_import_does_not_wait(void **state)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct opening opening = {.t = *state};
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(1);
	struct gc_tables tables;

	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	GC_FAKE(fake_cuda_slow)("cuMemImportFromShareableHandle", 5000);
	assert_int_equal(pthread_create(&opening.thread, NULL, opening_main, &opening),
			 0);
	while (GC_FAKE(fake_cuda_calls)("cuMemImportFromShareableHandle") == 0)
		sched_yield();
	assert_int_equal(gc_job_run(t, plan, &tables, 1), 0);
	assert_false(atomic_load(&opening.over));
	GC_FAKE(fake_cuda_slow)(NULL, 0);
	pthread_join(opening.thread, NULL);
	gc_assert_moved(t, plan, places, false);
	memory_unref(opening.memory);
	gc_tables_free(&tables);
	plan_free(plan);
}

static void copy_here_and_now_packs_and_unpacks(void **state)
{
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(PLACES);
	uint8_t *packed = malloc(plan->bytes);
	struct copy_hand *hand = NULL;
	struct gc_tables tables;

	assert_non_null(packed);
	gc_wipe(t);
	assert_int_equal(copy_hand_new(&hand), 0);
	assert_int_equal(gc_tables_make(t, NULL, true, &tables), 0);
	for (uint64_t at = 0; at < plan->bytes; at += 100003) {
		struct copy_job job = {
			.plan = plan,
			.begin = at,
			.end = at + 100003 < plan->bytes ? at + 100003 : plan->bytes,
			.src = {.buffers = tables.buffers[0], .buffer_count = PLACES},
			.dst = {.linear = packed + at}};

		assert_int_equal(copy_now(hand, &job), 0);
		job.src = job.dst;
		job.dst = (struct copy_end){.buffers = tables.buffers[1],
					    .buffer_count = PLACES};
		assert_int_equal(copy_now(hand, &job), 0);
	}
	gc_assert_moved(t, plan, NULL, true);
	gc_tables_free(&tables);
	copy_hand_free(hand);
	free(packed);
	plan_free(plan);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, gc_start, gc_stop)
#define KERNELS(name)                                                        \
	{                                                                    \
#name "_with_kernels", name, gc_start_kernels, gc_stop, NULL \
	}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		CASE(copy_between_each_pair_of_kinds_is_exact),
		CASE(copy_between_mixed_tables_is_exact),
		CASE(copy_between_devices_apart_is_exact),
		CASE(copy_during_slow_import_does_not_wait),
		CASE(copy_here_and_now_packs_and_unpacks),
		KERNELS(copy_between_each_pair_of_kinds_is_exact),
		KERNELS(copy_between_mixed_tables_is_exact),
		KERNELS(copy_between_devices_apart_is_exact),
		KERNELS(copy_after_device_reset_is_exact),
		KERNELS(copy_here_and_now_packs_and_unpacks),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	if (memory_guard_install() < 0)
		return 2;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
