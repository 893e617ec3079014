/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy threads with memory of GPUs, where something ends or fails: cancel, a device
 * that fails, each call of the driver failed once, kernels that are refused, buffers
 * that cannot be pinned, memory that only adapters reach.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/memory/memory.h"
#include "gpu/pin.h"
#include "tests/lib/copy_rig.h"
#include "tests/lib/gpu_copy.h"

/* ---- the end before the end ---- */

static struct plan *plan_whole(void)
{
	const struct plan_run run = {.len = 512,
				     .count = GC_BYTES / 1024,
				     .src_stride = 1024,
				     .dst_stride = 1024};

	return copy_rig_plan(&run, 1);
}

static void copy_canceled_is_quiesced_when_done(void **state)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct gc *t = *state;
	struct plan *plan = plan_whole();
	struct gc_tables tables;
	uint8_t *seen = malloc(GC_BYTES);

	assert_non_null(seen);
	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	GC_FAKE(fake_cuda_pace)(20000);
	t->done = false;
	t->job = (struct copy_job){
		.plan = plan,
		.end = plan->bytes,
		.src = {.buffers = tables.buffers[0], .buffer_count = 1},
		.dst = {.buffers = tables.buffers[1], .buffer_count = 1},
		.on_done = gc_on_done};
	assert_int_equal(copier_submit(t->copier, &t->job), 0);
	while (t->spots[1][PLACE_GPU0].view[0] == 0xee)
		loop_turn(t->loop, LOOP_NS_PER_MS);
	copier_cancel(t->copier, &t->job);
	while (!t->done)
		loop_turn(t->loop, 100 * LOOP_NS_PER_MS);
	memcpy(seen, t->spots[1][PLACE_GPU0].view, GC_BYTES);
	GC_FAKE(fake_cuda_pace)(0);
	gc_tables_free(&tables); /* waits for whatever the fake still does */
	assert_memory_equal(seen, t->spots[1][PLACE_GPU0].view, GC_BYTES);
	free(seen);
	plan_free(plan);
}

static void copy_on_failed_device_fails_and_recovers(void **state)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct gc *t = *state;
	struct plan *plan = gc_plan_mixed(1);
	struct gc_tables tables;

	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	GC_FAKE(fake_cuda_fail)("execute", 2, CU_ERROR_ECC_UNCORRECTABLE);
	assert_int_equal(gc_job_run(t, plan, &tables, 1), -err_errno(ERR_IO));
	assert_int_equal(t->job.err.scope, ERR_SCOPE_DEVICE);
	assert_non_null(strstr(t->job.err.text, "GPU-fafafafa"));
	assert_false(memory_owner_alive(tables.memories[0][0]));
	assert_true(gc_job_run(t, plan, &tables, 1) < 0);
	err_clear();
	gc_tables_free(&tables);
	gc_settle(t); /* before that the device is not reset */
	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	assert_int_equal(gc_job_run(t, plan, &tables, 1), 0);
	gc_assert_moved(t, plan, places, false);
	gc_tables_free(&tables);
	plan_free(plan);
}

static int whole_way(struct gc *t, const struct plan *plan, const enum place places[2])
{
	struct gc_tables tables;
	struct err why = {0};
	int r = gc_tables_make(t, places, false, &tables);

	if (r == 0)
		r = gc_job_run(t, plan, &tables, 1);
	if (r < 0)
		err_take(&why);
	gc_tables_free(&tables);
	gc_settle(t);
	return r < 0 ? err_reraise(&why) : 0;
}

static void fail_each(struct gc *t, const enum place places[2])
{
	static const int codes[] = {CU_ERROR_OUT_OF_MEMORY, CU_ERROR_UNKNOWN,
				    CU_ERROR_LAUNCH_FAILED};
	struct plan *plan = gc_plan_mixed(1);
	unsigned int counts[64], count = 0;
	const char *names[64];

	if (whole_way(t, plan, places) < 0)
		fail_msg("%s", err_last()->text);
	GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
	if (whole_way(t, plan, places) < 0)
		fail_msg("%s", err_last()->text);
	for (; GC_FAKE(fake_cuda_called)(count) && count < 64; count++) {
		names[count] = GC_FAKE(fake_cuda_called)(count);
		counts[count] = GC_FAKE(fake_cuda_calls)(names[count]);
	}
	for (unsigned int i = 0; i < count * ARRAY_LEN(codes); i++) {
		unsigned int n = counts[i % count];

		/* the first, the last and one between */
		for (unsigned int at = 1; at <= n; at += n > 3 ? (n - 1) / 2 : 1) {
			GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
			GC_FAKE(fake_cuda_fail)(names[i % count], at, codes[i / count]);
			gc_wipe(t);
			if (whole_way(t, plan, places) == 0)
				gc_assert_moved(t, plan, places, false);
			err_clear();
			GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
			gc_wipe(t);
			if (whole_way(t, plan, places) < 0)
				fail_msg("after %s %u, code %d: %s", names[i % count], at,
					 codes[i / count], err_last()->text);
			gc_assert_moved(t, plan, places, false);
		}
	}
	plan_free(plan);
}

static void call_failed_once_fails_one_copy(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_GPU0, PLACE_GPU0});
}

static void call_failed_once_fails_one_copy_in(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_VM, PLACE_GPU0});
}

static void call_failed_once_fails_one_copy_out(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_GPU1, PLACE_SHM});
}

static void call_failed_once_fails_one_copy_across(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_VMM, PLACE_GPU1});
}

/* ---- kernels ---- */

static int copy_once(struct gc *t)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct plan *plan = gc_plan_mixed(1);
	struct gc_tables tables;

	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	assert_int_equal(gc_job_run(t, plan, &tables, 1), 0);
	gc_assert_moved(t, plan, places, false);
	gc_tables_free(&tables);
	plan_free(plan);
	gc_settle(t);
	return (int)GC_FAKE(fake_cuda_calls)("cuLaunchKernel");
}

static void image_refused_leaves_the_engines(void **state)
{
	struct gc *t = *state;
	char words[128];

	assert_int_equal(pwrite(t->image, "x", 1, 0), 1);
	assert_int_equal(copy_once(t), 0);
	assert_int_equal(pwrite(t->image, "k", 1, 0), 1);
	GC_FAKE(fake_cuda_fail)("cuModuleLoadData", 1, CU_ERROR_NO_BINARY_FOR_GPU);
	assert_int_equal(copy_once(t), 0);
	GC_FAKE(fake_cuda_fail)("cuModuleGetFunction", 1, CU_ERROR_NOT_FOUND);
	assert_int_equal(copy_once(t), 0);
	gpu_module_text(t->gpu, words, sizeof(words));
	assert_string_equal(words, "yes"); /* the context is gone, and its fault */
	assert_true(copy_once(t) > 0);
	assert_int_equal(gpu_tune(t->gpu, "/no/such/image", 1024, 1), 0);
	gpu_module_text(t->gpu, words, sizeof(words));
	assert_non_null(strstr(words, "no: gpu_kernels: /no/such/image"));
}

static void launch_refused_fails_no_copy(void **state)
{
	struct gc *t = *state;
	char words[128];
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct plan *plan = gc_plan_mixed(1);
	struct gc_tables tables;

	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	GC_FAKE(fake_cuda_fail)("cuLaunchKernel", 1, CU_ERROR_INVALID_VALUE);
	assert_int_equal(gc_job_run(t, plan, &tables, 1), 0);
	gc_assert_moved(t, plan, places, false);
	gpu_module_text(t->gpu, words, sizeof(words));
	assert_non_null(strstr(words, "no: GPU-fafafafa"));
	assert_non_null(strstr(words, "cuLaunchKernel"));
	assert_int_equal(GC_FAKE(fake_cuda_calls)("cuLaunchKernel"), 1);
	gc_tables_free(&tables);
	plan_free(plan);
}

/* A buffer between memory and the wire: offered, it is registered once and then
 * written by the device itself. */
static void linear_end(struct gc *t, bool pinnable)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct plan *plan = gc_plan_mixed(1);
	uint64_t bytes = (plan->bytes + 4095) & ~UINT64_C(4095);
	uint8_t *line = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct copy_hand *hand = NULL;
	struct gpu_pin *pin = NULL;
	struct gc_tables tables;

	assert_ptr_not_equal(line, MAP_FAILED);
	assert_int_equal(copy_hand_new(&hand), 0);
	assert_int_equal(gpu_pin_new(t->gpu, line, bytes, false, &pin), 0);
	gc_wipe(t);
	assert_int_equal(gc_tables_make(t, places, false, &tables), 0);
	t->gpu->devices[0].host_pointers = pinnable;
	for (unsigned int i = 0; i < 2; i++) {
		struct copy_job job = {
			.plan = plan,
			.end = plan->bytes,
			.src = {.buffers = tables.buffers[0], .buffer_count = 1},
			.dst = {.linear = line}};

		assert_int_equal(copy_now(hand, &job), 0);
		job.src = job.dst;
		job.dst = (struct copy_end){.buffers = tables.buffers[1],
					    .buffer_count = 1};
		assert_int_equal(copy_now(hand, &job), 0);
	}
	gc_assert_moved(t, plan, places, false);
	assert_int_equal(GC_FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), pinnable);
	/* one set of lists, no bounce buffers */
	assert_true(!pinnable ||
		    GC_FAKE(fake_cuda_calls)("cuMemHostAlloc") <= (t->kernels ? 2 : 0));
	gpu_pin_free(pin);
	gc_tables_free(&tables);
	copy_hand_free(hand);
	munmap(line, bytes);
	plan_free(plan);
}

static void linear_end_is_pinned_once(void **state)
{
	linear_end(*state, true);
}

/* Where a GPU has another address for it, it passes through buffers of the lane. */
static void linear_end_of_two_addresses_is_not_pinned(void **state)
{
	linear_end(*state, false);
}

/* The context goes before the pin does. */
static void pin_outlives_the_context(void **state)
{
	struct gc *t = *state;
	struct gpu_device *device = NULL;
	uint8_t *line = mmap(NULL, 8192, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct gpu_pin *pin = NULL;

	assert_ptr_not_equal(line, MAP_FAILED);
	assert_int_equal(gpu_start(t->gpu), 0);
	device = &t->gpu->devices[0];
	assert_int_equal(gpu_pin_new(t->gpu, line, 8192, false, &pin), 0);
	for (unsigned int i = 1; i <= 2; i++) {
		assert_int_equal(gpu_device_get(device), 0);
		assert_int_equal(gpu_enter(device), 0);
		assert_true(gpu_pin_ready(device, line + 4000, 192));
		assert_false(gpu_pin_ready(device, line + 8000, 193));
		assert_int_equal(GC_FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), i);
		gpu_leave(device);
		gpu_device_put(device);
		assert_int_equal(GC_FAKE(fake_cuda_live)(), 0);
	}
	GC_FAKE(fake_cuda_fail)("cuMemHostRegister_v2", 1, CU_ERROR_OUT_OF_MEMORY);
	assert_int_equal(gpu_device_get(device), 0);
	assert_int_equal(gpu_enter(device), 0);
	assert_false(gpu_pin_ready(device, line, 8192));
	assert_false(gpu_pin_ready(device, line, 8192)); /* not asked again */
	assert_int_equal(GC_FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), 3);
	gpu_leave(device);
	gpu_device_put(device);
	gpu_pin_free(pin);
	munmap(line, 8192);
}

/* Much memory is pinned behind copies' backs: whoever comes meanwhile takes a step more,
 * and neither the pin nor the context goes under the thread that is at it. */
static void much_is_pinned_by_a_thread(void **state)
{
	const uint64_t bytes = (UINT64_C(64) << 20) + 4096;
	struct gc *t = *state;
	struct gpu_device *device = NULL;
	uint8_t *line = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	assert_ptr_not_equal(line, MAP_FAILED);
	assert_int_equal(gpu_start(t->gpu), 0);
	device = &t->gpu->devices[0];
	for (unsigned int round = 0; round < 4; round++) {
		bool fails = round == 2, ready;
		struct gpu_pin *pin = NULL;

		GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
		if (fails)
			GC_FAKE(fake_cuda_fail)
		("cuMemHostRegister_v2", 1, CU_ERROR_OUT_OF_MEMORY);
		assert_int_equal(gpu_pin_new(t->gpu, line, bytes, false, &pin), 0);
		assert_int_equal(gpu_device_get(device), 0);
		assert_int_equal(gpu_enter(device), 0);
		do {
			ready = gpu_pin_here(pin, device);
		} while (round != 3 && !ready &&
			 !(fails && GC_FAKE(fake_cuda_calls)("cuMemHostRegister_v2")));
		if (fails)
			assert_false(gpu_pin_here(pin, device));
		gpu_leave(device);
		if (round % 2) { /* the context goes first, or the thread is the last */
			gpu_device_put(device);
			gpu_pin_free(pin);
		} else {
			gpu_pin_free(pin);
			gpu_device_put(device);
		}
		assert_int_equal(GC_FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), 1);
		assert_int_equal(GC_FAKE(fake_cuda_live)(), 0);
	}
	munmap(line, bytes);
}

/* Mapped for reading alone: as most drivers are, it is not pinned, and is no fault; where
 * one can do that, the device reads it and cannot write it. */
static void pin_to_be_read_is_the_drivers_to_take(void **state)
{
	struct gc *t = *state;
	struct gpu_device *device = NULL;
	uint8_t *line = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	assert_ptr_not_equal(line, MAP_FAILED);
	assert_int_equal(gpu_start(t->gpu), 0);
	device = &t->gpu->devices[0];
	assert_int_equal(gpu_device_get(device), 0);
	assert_int_equal(gpu_enter(device), 0);
	for (int can = 0; can < 2; can++) {
		struct gpu_pin *pin = NULL, *wrong = NULL;

		assert_int_equal(setenv("FAKE_CUDA_READ_ONLY_HOST", can ? "1" : "0", 1),
				 0);
		assert_int_equal(gpu_pin_new(t->gpu, line, 4096, false, &wrong), 0);
		assert_false(gpu_pin_ready(device, line, 4096)); /* it is not writable */
		gpu_pin_free(wrong);
		assert_int_equal(gpu_pin_new(t->gpu, line, 4096, true, &pin), 0);
		assert_int_equal(gpu_pin_ready(device, line, 4096), can);
		gpu_pin_free(pin);
	}
	assert_int_equal(unsetenv("FAKE_CUDA_READ_ONLY_HOST"), 0);
	gpu_leave(device);
	gpu_device_put(device);
	munmap(line, 4096);
}

/* ---- dma-bufs ---- */

static void dmabuf_is_not_for_copy_threads(void **state)
{
	struct gc *t = *state;
	struct memory *memory = NULL;
	struct copy_buffer buffer = {.length = 4096};
	uint8_t out[16];
	struct plan *plan = plan_whole();

	/* any file that tells its length stands for one */
	assert_int_equal(memory_import_dmabuf(t->spots[0][PLACE_MEMFD].fd, 4096,
					      GC_BYTES - 4096, &memory),
			 0);
	assert_int_equal(memory->dmabuf_offset, 4096);
	assert_true(memory_check_copyable(memory) < 0);
	buffer.memory = memory;
	t->job = (struct copy_job){.plan = plan,
				   .end = 16,
				   .src = {.buffers = &buffer, .buffer_count = 1},
				   .dst = {.linear = out},
				   .on_done = gc_on_done};
	assert_int_equal(copier_submit(t->copier, &t->job), -err_errno(ERR_IMPORT));
	memory_unref(memory);
	assert_int_equal(memory_import_dmabuf(t->spots[0][PLACE_MEMFD].fd, 4096, GC_BYTES,
					      &memory),
			 -err_errno(ERR_RANGE));
	assert_int_equal(memory_import_dmabuf(-1, 0, 1, &memory), -err_errno(ERR_IMPORT));
	err_clear();
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
		CASE(copy_canceled_is_quiesced_when_done),
		CASE(copy_on_failed_device_fails_and_recovers),
		CASE(call_failed_once_fails_one_copy),
		CASE(call_failed_once_fails_one_copy_in),
		CASE(call_failed_once_fails_one_copy_out),
		CASE(linear_end_is_pinned_once),
		CASE(linear_end_of_two_addresses_is_not_pinned),
		CASE(pin_outlives_the_context),
		CASE(much_is_pinned_by_a_thread),
		CASE(pin_to_be_read_is_the_drivers_to_take),
		CASE(dmabuf_is_not_for_copy_threads),
		KERNELS(copy_canceled_is_quiesced_when_done),
		KERNELS(copy_on_failed_device_fails_and_recovers),
		KERNELS(call_failed_once_fails_one_copy),
		KERNELS(call_failed_once_fails_one_copy_in),
		KERNELS(call_failed_once_fails_one_copy_out),
		KERNELS(call_failed_once_fails_one_copy_across),
		KERNELS(linear_end_is_pinned_once),
		KERNELS(linear_end_of_two_addresses_is_not_pinned),
		KERNELS(image_refused_leaves_the_engines),
		KERNELS(launch_refused_fails_no_copy),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	if (memory_guard_install() < 0)
		return 2;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
