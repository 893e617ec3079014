/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy threads with memory of GPUs: every pair of kinds, tables that mix
 * them, cancel, a device that fails, and each call of the driver failed once; with
 * copy engines alone, and with kernels for the short rows.
 */
#include "daemon/memory/copy.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "gpu/gpu.h"
#include "gpu/pin.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"

#define MIB (UINT64_C(1) << 20)
#define BYTES (2 * MIB)
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

/* The kinds of memory that an engine may have. */
enum place {
	PLACE_GPU0,
	PLACE_GPU1,
	PLACE_VMM,
	PLACE_MEMFD,
	PLACE_SHM,
	PLACE_VM,
	PLACES
};

/* engine memory, and the test's way to see it */
struct spot {
	struct gpu_owner owner;
	uint8_t *view;
	int fd;
};

struct test {
	struct gpu *gpu;
	struct loop *loop;
	struct copier *copier;
	struct spot spots[2][PLACES]; /* source and destination of each kind */
	struct copy_job job;
	bool done;
	bool kernels;
	int image; /* what the fake driver takes for kernels */
};

static void spot_make(struct spot *spot, enum place place)
{
	spot->fd = -1;
	if (place <= PLACE_VMM) {
		assert_true(gpu_owner_start(&spot->owner,
					    place == PLACE_VMM ? GPU_HANDLE_VMM
							       : GPU_HANDLE_IPC,
					    place == PLACE_GPU1, BYTES));
		spot->view = spot->owner.view;
		return;
	}
	spot->fd = memfd_create("spot", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(ftruncate(spot->fd, BYTES), 0);
	spot->view = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
			  place == PLACE_VM ? MAP_PRIVATE : MAP_SHARED, spot->fd, 0);
	assert_ptr_not_equal(spot->view, MAP_FAILED);
}

static void spot_end(struct spot *spot, enum place place)
{
	if (place <= PLACE_VMM) {
		gpu_owner_end(&spot->owner);
		return;
	}
	munmap(spot->view, BYTES);
	close(spot->fd);
}

static int spot_import(struct test *t, struct spot *spot, enum place place, bool writable,
		       struct memory **memory_p)
{
	switch (place) {
	case PLACE_MEMFD:
		return err_pass(
			memory_import_memfd(spot->fd, 0, BYTES, writable, memory_p));
	case PLACE_SHM:
		return err_pass(
			memory_import_shm_fd(spot->fd, 0, BYTES, writable, memory_p));
	case PLACE_VM:
		return err_pass(memory_import_vm(getpid(), (uintptr_t)spot->view, BYTES,
						 memory_p));
	default:
		return err_pass(memory_import_device(t->gpu, 1, &spot->owner.handle, 0,
						     BYTES, writable, memory_p));
	}
}

static uint8_t pattern(uint64_t i)
{
	return (uint8_t)((i * 2654435761u) >> 11);
}

static void image_make(struct test *t, char path[64])
{
	static const char words[] = "kvd fake kernels\n";

	t->image = memfd_create("image", MFD_CLOEXEC);
	assert_int_equal(write(t->image, words, sizeof(words)), sizeof(words));
	snprintf(path, 64, "/proc/self/fd/%d", t->image);
}

static int begin(void **state, bool kernels)
{
	struct test *t = mem_zalloc(sizeof(*t));
	char path[256], image[64] = "off";

	assert_non_null(t);
	t->kernels = kernels;
	t->image = -1;
	if (kernels)
		image_make(t, image);
	assert_int_equal(gpu_new(gpu_fake_path("", path), "auto", &t->gpu), 0);
	assert_int_equal(gpu_tune(t->gpu, image, 1024, kernels ? 3 : 1), 0);
	assert_int_equal(loop_new(&t->loop), 0);
	assert_int_equal(copier_new(t->loop, 1, 4096, &t->copier), 0);
	for (unsigned int side = 0; side < 2; side++)
		for (enum place place = 0; place < PLACES; place++)
			spot_make(&t->spots[side][place], place);
	for (enum place place = 0; place < PLACES; place++)
		for (uint64_t i = 0; i < BYTES; i++)
			t->spots[0][place].view[i] = pattern(i + place);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	*state = t;
	return 0;
}

static int start(void **state)
{
	return begin(state, false);
}

static int start_kernels(void **state)
{
	return begin(state, true);
}

static bool settled(struct gpu_device *device)
{
	unsigned int users;

	pthread_mutex_lock(&device->lock);
	users = device->users;
	pthread_mutex_unlock(&device->lock);
	return users == 0;
}

/* Threads let go of the device a moment after the last job, and with the last of them
 * the context goes. */
static void settle_device(struct test *t, unsigned int device)
{
	uint64_t until = loop_clock_ns(t->loop) + 60 * LOOP_NS_PER_S;

	while (!settled(&t->gpu->devices[device])) {
		/* a case that failed has left its memory behind */
		if (loop_clock_ns(t->loop) > until)
			abort();
		loop_turn(t->loop, LOOP_NS_PER_MS);
	}
}

static void settle(struct test *t)
{
	for (unsigned int i = 0; i < t->gpu->device_count; i++)
		settle_device(t, i);
}

static int stop(void **state)
{
	struct test *t = *state;

	copier_free(t->copier);
	settle(t);
	loop_free(t->loop);
	for (unsigned int side = 0; side < 2; side++)
		for (enum place place = 0; place < PLACES; place++)
			spot_end(&t->spots[side][place], place);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_free(t->gpu);
	if (t->image >= 0)
		close(t->image);
	mem_free(t);
	return 0;
}

/* ---- jobs ---- */

/* Rows in many forms, each buffer of the tables in turn. */
static struct plan *plan_mixed(uint32_t buffers)
{
	static const struct plan_run forms[] = {
		{.src = 11,
		 .dst = 70000,
		 .len = 300,
		 .count = 90,
		 .src_stride = 311,
		 .dst_stride = 400},
		{.src = 500000,
		 .dst = 30,
		 .len = 64,
		 .count = 200,
		 .src_stride = -64,
		 .dst_stride = 64},
		{.src = 600000, .dst = 600001, .len = 700001, .count = 1},
		{.src = 40000,
		 .dst = 300000,
		 .len = 1,
		 .count = 3000,
		 .src_stride = 3,
		 .dst_stride = 2},
	};
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (uint32_t i = 0; i < buffers * ARRAY_LEN(forms); i++) {
		struct plan_run run = forms[i % ARRAY_LEN(forms)];

		run.src_buffer = i % buffers;
		run.dst_buffer = (i * 5 + 1) % buffers;
		if (i % buffers == run.dst_buffer && buffers > 1)
			run.dst_buffer = (run.dst_buffer + 1) % buffers;
		run.src += i * 7;
		run.dst += i / buffers % 2 ? 5 : 0;
		assert_int_equal(plan_builder_add(builder, &run), 0);
	}
	for (uint32_t i = 0; i < buffers * 100; i++) { /* without order on either side */
		const struct plan_run run = {.src = 1500001 + i * 37 % 100 * 90,
					     .dst = 1400000 + i * 71 % 100 * 80,
					     .src_buffer = i / 100,
					     .dst_buffer = (i / 100 + 1) % buffers,
					     .len = i % 100 < 60 ? 48 : 77,
					     .count = 1};

		assert_int_equal(plan_builder_add(builder, &run), 0);
	}
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

static void on_done(struct copy_job *job)
{
	container_of(job, struct test, job)->done = true;
}

struct tables {
	struct memory *memories[2][PLACES];
	struct copy_buffer buffers[2][PLACES];
};

static void tables_free(struct tables *tables)
{
	for (unsigned int side = 0; side < 2; side++)
		for (enum place i = 0; i < PLACES; i++)
			memory_unref(tables->memories[side][i]);
}

static int tables_make(struct test *t, const enum place places[2], bool all,
		       struct tables *tables)
{
	int r = 0;

	*tables = (struct tables){0};
	for (unsigned int side = 0; side < 2 && r == 0; side++) {
		for (enum place i = 0; i < (all ? PLACES : 1) && r == 0; i++) {
			enum place place = all ? i : places[side];

			r = spot_import(t, &t->spots[side][place], place, side == 1,
					&tables->memories[side][i]);
			tables->buffers[side][i] = (struct copy_buffer){
				.memory = tables->memories[side][i], .length = BYTES};
			if (r == 0 && place <= PLACE_VMM && t->kernels)
				(void)gpu_module_wait(
					tables->memories[side][i]->gpu->device);
		}
	}
	return err_pass(r);
}

static int job_run(struct test *t, const struct plan *plan, struct tables *tables,
		   uint32_t buffers)
{
	int r;

	t->done = false;
	t->job = (struct copy_job){
		.plan = plan,
		.end = plan->bytes,
		.src = {.buffers = tables->buffers[0], .buffer_count = buffers},
		.dst = {.buffers = tables->buffers[1], .buffer_count = buffers},
		.on_done = on_done};
	r = copier_submit(t->copier, &t->job);
	if (r < 0)
		return err_pass(r);
	while (!t->done)
		loop_turn(t->loop, 100 * LOOP_NS_PER_MS);
	return t->job.result < 0 ? err_reraise(&t->job.err) : 0;
}

static void assert_moved(struct test *t, const struct plan *plan,
			 const enum place places[2], bool all)
{
	uint32_t buffers = all ? PLACES : 1;
	struct plan_span span;
	struct plan_walk walk;
	uint8_t *want[PLACES];

	for (uint32_t i = 0; i < buffers; i++) {
		want[i] = malloc(BYTES);
		assert_non_null(want[i]);
		memset(want[i], 0xee, BYTES);
	}
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		for (uint64_t i = 0; i < span.len; i++)
			want[span.dst_buffer][span.dst + i] = pattern(
				span.src + i + (all ? span.src_buffer : places[0]));
	for (uint32_t i = 0; i < buffers; i++) {
		assert_memory_equal(t->spots[1][all ? i : places[1]].view, want[i],
				    BYTES);
		free(want[i]);
	}
}

static void wipe(struct test *t)
{
	for (enum place place = 0; place < PLACES; place++)
		memset(t->spots[1][place].view, 0xee, BYTES);
}

static void copy_between_each_pair_of_kinds_is_exact(void **state)
{
	struct test *t = *state;
	struct plan *plan = plan_mixed(1);
	unsigned int launches;

	for (enum place src = 0; src < PLACES; src++) {
		for (enum place dst = 0; dst < PLACES; dst++) {
			enum place places[2] = {src, dst};
			struct tables tables;

			wipe(t);
			assert_int_equal(tables_make(t, places, false, &tables), 0);
			assert_int_equal(job_run(t, plan, &tables, 1), 0);
			assert_moved(t, plan, places, false);
			assert_int_equal(atomic_load(&t->job.copied), plan->bytes);
			tables_free(&tables);
			launches = FAKE(fake_cuda_calls)("cuLaunchKernel");
			FAKE(fake_cuda_fail)(NULL, 0, 0);
			assert_true((launches > 0) == (t->kernels && (src <= PLACE_VMM ||
								      dst <= PLACE_VMM)));
		}
	}
	plan_free(plan);
}

static void copy_between_mixed_tables_is_exact(void **state)
{
	struct test *t = *state;
	struct plan *plan = plan_mixed(PLACES);
	struct tables tables;

	wipe(t);
	assert_int_equal(tables_make(t, NULL, true, &tables), 0);
	assert_int_equal(job_run(t, plan, &tables, PLACES), 0);
	assert_moved(t, plan, NULL, true);
	tables_free(&tables);
	plan_free(plan);
}

/* A kernel that stepped on memory of the other device would end its context. */
static void copy_between_devices_apart_is_exact(void **state)
{
	struct test *t = *state;
	struct plan *plan = plan_mixed(PLACES);
	struct tables tables;

	assert_int_equal(setenv("FAKE_CUDA_NO_PEER", "1", 1), 0);
	wipe(t);
	assert_int_equal(tables_make(t, NULL, true, &tables), 0);
	for (unsigned int i = 0; i < 3; i++) /* kernels come with the first or later */
		assert_int_equal(job_run(t, plan, &tables, PLACES), 0);
	assert_moved(t, plan, NULL, true);
	assert_int_equal(unsetenv("FAKE_CUDA_NO_PEER"), 0);
	tables_free(&tables);
	plan_free(plan);
}

/* The one device stays, the other's context goes with its last memory and comes again:
 * as another one, to which access has to be asked for anew. */
static void copy_from_a_device_that_left_and_came_again_is_exact(void **state)
{
	const enum place places[2] = {PLACE_GPU1, PLACE_GPU0};
	struct test *t = *state;
	struct plan *plan = plan_mixed(1);
	struct memory *stays = NULL;
	struct tables tables;

	assert_int_equal(spot_import(t, &t->spots[1][PLACE_VMM], PLACE_VMM, true, &stays),
			 0);
	for (unsigned int i = 0; i < 3; i++) {
		wipe(t);
		FAKE(fake_cuda_fail)(NULL, 0, 0);
		assert_int_equal(tables_make(t, places, false, &tables), 0);
		assert_int_equal(job_run(t, plan, &tables, 1), 0);
		assert_moved(t, plan, places, false);
		assert_true(FAKE(fake_cuda_calls)("cuLaunchKernel") > 0);
		tables_free(&tables);
		settle_device(t, 1);
	}
	memory_unref(stays);
	plan_free(plan);
}

struct opening {
	struct test *t;
	struct memory *memory;
	pthread_t thread;
	atomic_bool over;
};

static void *opening_main(void *arg)
{
	struct opening *opening = arg;
	struct test *t = opening->t;

	assert_int_equal(spot_import(t, &t->spots[0][PLACE_VMM], PLACE_VMM, true,
				     &opening->memory),
			 0);
	atomic_store(&opening->over, true);
	return NULL;
}

/* The driver may take its time over a large allocation; bytes move meanwhile. */
static void copy_beside_a_slow_import_does_not_wait(void **state)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct opening opening = {.t = *state};
	struct test *t = *state;
	struct plan *plan = plan_mixed(1);
	struct tables tables;

	wipe(t);
	assert_int_equal(tables_make(t, places, false, &tables), 0);
	FAKE(fake_cuda_slow)("cuMemImportFromShareableHandle", 5000);
	assert_int_equal(pthread_create(&opening.thread, NULL, opening_main, &opening),
			 0);
	while (FAKE(fake_cuda_calls)("cuMemImportFromShareableHandle") == 0)
		sched_yield();
	assert_int_equal(job_run(t, plan, &tables, 1), 0);
	assert_false(atomic_load(&opening.over));
	FAKE(fake_cuda_slow)(NULL, 0);
	pthread_join(opening.thread, NULL);
	assert_moved(t, plan, places, false);
	memory_unref(opening.memory);
	tables_free(&tables);
	plan_free(plan);
}

static void copy_here_and_now_packs_and_unpacks(void **state)
{
	struct test *t = *state;
	struct plan *plan = plan_mixed(PLACES);
	uint8_t *packed = malloc(plan->bytes);
	struct copy_hand *hand = NULL;
	struct tables tables;

	assert_non_null(packed);
	wipe(t);
	assert_int_equal(copy_hand_new(&hand), 0);
	assert_int_equal(tables_make(t, NULL, true, &tables), 0);
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
	assert_moved(t, plan, NULL, true);
	tables_free(&tables);
	copy_hand_free(hand);
	free(packed);
	plan_free(plan);
}

/* ---- the end before the end ---- */

static struct plan *plan_whole(void)
{
	const struct plan_run run = {.len = 512,
				     .count = BYTES / 1024,
				     .src_stride = 1024,
				     .dst_stride = 1024};
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;

	assert_int_equal(plan_builder_new(&builder), 0);
	assert_int_equal(plan_builder_add(builder, &run), 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

static void copy_canceled_is_still_when_done(void **state)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct test *t = *state;
	struct plan *plan = plan_whole();
	struct tables tables;
	uint8_t *seen = malloc(BYTES);

	assert_non_null(seen);
	wipe(t);
	assert_int_equal(tables_make(t, places, false, &tables), 0);
	FAKE(fake_cuda_pace)(20000);
	t->done = false;
	t->job = (struct copy_job){
		.plan = plan,
		.end = plan->bytes,
		.src = {.buffers = tables.buffers[0], .buffer_count = 1},
		.dst = {.buffers = tables.buffers[1], .buffer_count = 1},
		.on_done = on_done};
	assert_int_equal(copier_submit(t->copier, &t->job), 0);
	while (t->spots[1][PLACE_GPU0].view[0] == 0xee)
		loop_turn(t->loop, LOOP_NS_PER_MS);
	copier_cancel(t->copier, &t->job);
	while (!t->done)
		loop_turn(t->loop, 100 * LOOP_NS_PER_MS);
	memcpy(seen, t->spots[1][PLACE_GPU0].view, BYTES);
	FAKE(fake_cuda_pace)(0);
	tables_free(&tables); /* waits for whatever the fake still does */
	assert_memory_equal(seen, t->spots[1][PLACE_GPU0].view, BYTES);
	free(seen);
	plan_free(plan);
}

static void copy_on_failed_device_fails_and_recovers(void **state)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct test *t = *state;
	struct plan *plan = plan_mixed(1);
	struct tables tables;

	assert_int_equal(tables_make(t, places, false, &tables), 0);
	FAKE(fake_cuda_fail)("execute", 2, CU_ERROR_ECC_UNCORRECTABLE);
	assert_int_equal(job_run(t, plan, &tables, 1), -err_errno(ERR_IO));
	assert_int_equal(t->job.err.scope, ERR_SCOPE_DEVICE);
	assert_non_null(strstr(t->job.err.text, "GPU-fafafafa"));
	assert_false(memory_owner_alive(tables.memories[0][0]));
	assert_true(job_run(t, plan, &tables, 1) < 0);
	err_clear();
	tables_free(&tables);
	settle(t); /* before that the device is not reset */
	wipe(t);
	assert_int_equal(tables_make(t, places, false, &tables), 0);
	assert_int_equal(job_run(t, plan, &tables, 1), 0);
	assert_moved(t, plan, places, false);
	tables_free(&tables);
	plan_free(plan);
}

static int whole_way(struct test *t, const struct plan *plan, const enum place places[2])
{
	struct tables tables;
	struct err why = {0};
	int r = tables_make(t, places, false, &tables);

	if (r == 0)
		r = job_run(t, plan, &tables, 1);
	if (r < 0)
		err_take(&why);
	tables_free(&tables);
	settle(t);
	return r < 0 ? err_reraise(&why) : 0;
}

static void fail_each(struct test *t, const enum place places[2])
{
	static const int codes[] = {CU_ERROR_OUT_OF_MEMORY, CU_ERROR_UNKNOWN,
				    CU_ERROR_LAUNCH_FAILED};
	struct plan *plan = plan_mixed(1);
	unsigned int counts[64], count = 0;
	const char *names[64];

	assert_int_equal(whole_way(t, plan, places), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	assert_int_equal(whole_way(t, plan, places), 0);
	for (; FAKE(fake_cuda_called)(count) && count < 64; count++) {
		names[count] = FAKE(fake_cuda_called)(count);
		counts[count] = FAKE(fake_cuda_calls)(names[count]);
	}
	for (unsigned int i = 0; i < count * ARRAY_LEN(codes); i++) {
		unsigned int n = counts[i % count];

		/* the first, the last and one between */
		for (unsigned int at = 1; at <= n; at += n > 3 ? (n - 1) / 2 : 1) {
			FAKE(fake_cuda_fail)(NULL, 0, 0);
			FAKE(fake_cuda_fail)(names[i % count], at, codes[i / count]);
			wipe(t);
			if (whole_way(t, plan, places) == 0)
				assert_moved(t, plan, places, false);
			err_clear();
			FAKE(fake_cuda_fail)(NULL, 0, 0);
			wipe(t);
			if (whole_way(t, plan, places) < 0)
				fail_msg("after %s %u, code %d: %s", names[i % count], at,
					 codes[i / count], err_last()->text);
			assert_moved(t, plan, places, false);
		}
	}
	plan_free(plan);
}

static void call_that_fails_once_costs_one_copy(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_GPU0, PLACE_GPU0});
}

static void call_that_fails_once_costs_one_copy_in(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_VM, PLACE_GPU0});
}

static void call_that_fails_once_costs_one_copy_out(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_GPU1, PLACE_SHM});
}

static void call_that_fails_once_costs_one_copy_across(void **state)
{
	fail_each(*state, (const enum place[2]){PLACE_VMM, PLACE_GPU1});
}

/* ---- kernels ---- */

static int copy_once(struct test *t)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct plan *plan = plan_mixed(1);
	struct tables tables;

	wipe(t);
	assert_int_equal(tables_make(t, places, false, &tables), 0);
	assert_int_equal(job_run(t, plan, &tables, 1), 0);
	assert_moved(t, plan, places, false);
	tables_free(&tables);
	plan_free(plan);
	settle(t);
	return (int)FAKE(fake_cuda_calls)("cuLaunchKernel");
}

static void image_refused_leaves_the_engines(void **state)
{
	struct test *t = *state;
	char words[128];

	assert_int_equal(pwrite(t->image, "x", 1, 0), 1);
	assert_int_equal(copy_once(t), 0);
	assert_int_equal(pwrite(t->image, "k", 1, 0), 1);
	FAKE(fake_cuda_fail)("cuModuleLoadData", 1, CU_ERROR_NO_BINARY_FOR_GPU);
	assert_int_equal(copy_once(t), 0);
	FAKE(fake_cuda_fail)("cuModuleGetFunction", 2, CU_ERROR_NOT_FOUND);
	assert_int_equal(copy_once(t), 0);
	gpu_module_words(t->gpu, words, sizeof(words));
	assert_string_equal(words, "yes"); /* the context is gone, and its fault */
	assert_true(copy_once(t) > 0);
	assert_int_equal(gpu_tune(t->gpu, "/no/such/image", 1024, 1), 0);
	gpu_module_words(t->gpu, words, sizeof(words));
	assert_non_null(strstr(words, "no: gpu_kernels: /no/such/image"));
}

static void launch_refused_costs_no_copy(void **state)
{
	struct test *t = *state;
	char words[128];
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct plan *plan = plan_mixed(1);
	struct tables tables;

	wipe(t);
	assert_int_equal(tables_make(t, places, false, &tables), 0);
	FAKE(fake_cuda_fail)("cuLaunchKernel", 1, CU_ERROR_INVALID_VALUE);
	assert_int_equal(job_run(t, plan, &tables, 1), 0);
	assert_moved(t, plan, places, false);
	gpu_module_words(t->gpu, words, sizeof(words));
	assert_non_null(strstr(words, "no: GPU-fafafafa"));
	assert_non_null(strstr(words, "cuLaunchKernel"));
	assert_int_equal(FAKE(fake_cuda_calls)("cuLaunchKernel"), 1);
	tables_free(&tables);
	plan_free(plan);
}

/* A buffer between memory and the wire: offered, it is registered once and then
 * written by the device itself. */
static void linear_end(struct test *t, bool pinnable)
{
	const enum place places[2] = {PLACE_GPU0, PLACE_GPU0};
	struct plan *plan = plan_mixed(1);
	uint64_t bytes = (plan->bytes + 4095) & ~UINT64_C(4095);
	uint8_t *line = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct copy_hand *hand = NULL;
	struct gpu_pin *pin = NULL;
	struct tables tables;

	assert_ptr_not_equal(line, MAP_FAILED);
	assert_int_equal(copy_hand_new(&hand), 0);
	assert_int_equal(gpu_pin_new(t->gpu, line, bytes, false, &pin), 0);
	wipe(t);
	assert_int_equal(tables_make(t, places, false, &tables), 0);
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
	assert_moved(t, plan, places, false);
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), pinnable);
	/* one set of lists, no bounce buffers */
	assert_true(!pinnable ||
		    FAKE(fake_cuda_calls)("cuMemHostAlloc") <= (t->kernels ? 2 : 0));
	gpu_pin_free(pin);
	tables_free(&tables);
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
	struct test *t = *state;
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
		assert_int_equal(FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), i);
		gpu_leave(device);
		gpu_device_put(device);
		assert_int_equal(FAKE(fake_cuda_live)(), 0);
	}
	FAKE(fake_cuda_fail)("cuMemHostRegister_v2", 1, CU_ERROR_OUT_OF_MEMORY);
	assert_int_equal(gpu_device_get(device), 0);
	assert_int_equal(gpu_enter(device), 0);
	assert_false(gpu_pin_ready(device, line, 8192));
	assert_false(gpu_pin_ready(device, line, 8192)); /* not asked again */
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemHostRegister_v2"), 3);
	gpu_leave(device);
	gpu_device_put(device);
	gpu_pin_free(pin);
	munmap(line, 8192);
}

/* Mapped for reading alone: as most drivers are, it is not pinned, and is no fault; where
 * one can do that, the device reads it and cannot write it. */
static void pin_to_be_read_is_the_drivers_to_take(void **state)
{
	struct test *t = *state;
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
	struct test *t = *state;
	struct memory *memory = NULL;
	struct copy_buffer buffer = {.length = 4096};
	uint8_t out[16];
	struct plan *plan = plan_whole();

	/* any file that tells its length stands for one */
	assert_int_equal(memory_import_dmabuf(t->spots[0][PLACE_MEMFD].fd, 4096,
					      BYTES - 4096, &memory),
			 0);
	assert_int_equal(memory->dmabuf_offset, 4096);
	assert_true(memory_check_copyable(memory) < 0);
	buffer.memory = memory;
	t->job = (struct copy_job){.plan = plan,
				   .end = 16,
				   .src = {.buffers = &buffer, .buffer_count = 1},
				   .dst = {.linear = out},
				   .on_done = on_done};
	assert_int_equal(copier_submit(t->copier, &t->job), -err_errno(ERR_IMPORT));
	memory_unref(memory);
	assert_int_equal(
		memory_import_dmabuf(t->spots[0][PLACE_MEMFD].fd, 4096, BYTES, &memory),
		-err_errno(ERR_RANGE));
	assert_int_equal(memory_import_dmabuf(-1, 0, 1, &memory), -err_errno(ERR_IMPORT));
	err_clear();
	plan_free(plan);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)
#define KERNELS(name)                                                  \
	{                                                              \
#name "_with_kernels", name, start_kernels, stop, NULL \
	}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		CASE(copy_between_each_pair_of_kinds_is_exact),
		CASE(copy_between_mixed_tables_is_exact),
		CASE(copy_between_devices_apart_is_exact),
		CASE(copy_beside_a_slow_import_does_not_wait),
		CASE(copy_here_and_now_packs_and_unpacks),
		CASE(copy_canceled_is_still_when_done),
		CASE(copy_on_failed_device_fails_and_recovers),
		CASE(call_that_fails_once_costs_one_copy),
		CASE(call_that_fails_once_costs_one_copy_in),
		CASE(call_that_fails_once_costs_one_copy_out),
		CASE(linear_end_is_pinned_once),
		CASE(linear_end_of_two_addresses_is_not_pinned),
		CASE(pin_outlives_the_context),
		CASE(pin_to_be_read_is_the_drivers_to_take),
		CASE(dmabuf_is_not_for_copy_threads),
		KERNELS(copy_between_each_pair_of_kinds_is_exact),
		KERNELS(copy_between_mixed_tables_is_exact),
		KERNELS(copy_between_devices_apart_is_exact),
		KERNELS(copy_from_a_device_that_left_and_came_again_is_exact),
		KERNELS(copy_here_and_now_packs_and_unpacks),
		KERNELS(copy_canceled_is_still_when_done),
		KERNELS(copy_on_failed_device_fails_and_recovers),
		KERNELS(call_that_fails_once_costs_one_copy),
		KERNELS(call_that_fails_once_costs_one_copy_in),
		KERNELS(call_that_fails_once_costs_one_copy_out),
		KERNELS(call_that_fails_once_costs_one_copy_across),
		KERNELS(linear_end_is_pinned_once),
		KERNELS(linear_end_of_two_addresses_is_not_pinned),
		KERNELS(image_refused_leaves_the_engines),
		KERNELS(launch_refused_costs_no_copy),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	if (memory_guard_install() < 0)
		return 2;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
