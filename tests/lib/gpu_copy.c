/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each kind of memory is a pair of spots, filled with bytes that tell their place at
 * the source's end and with 0xee at the destination's: what a plan should have moved
 * is computed from the plan alone and compared as a whole, so that a byte beside a row
 * is seen, too. GPU memory is another process's, as an engine's is.
 */
#include "tests/lib/file.h"
#include "tests/lib/gpu_copy.h"

#include <assert.h>
#include <pthread.h>
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

#include "daemon/base/mem.h"
#include "tests/gpu/module_wait.h"
#include "tests/lib/gates.h"

static void spot_make(struct gc_spot *spot, enum place place)
{
	spot->fd = -1;
	if (place <= PLACE_VMM) {
		assert_true(gpu_owner_start(&spot->owner,
					    place == PLACE_VMM ? GPU_HANDLE_VMM
							       : GPU_HANDLE_IPC,
					    place == PLACE_GPU1, GC_BYTES));
		spot->view = spot->owner.view;
		return;
	}
	spot->fd = memfd_create("spot", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(file_fill(spot->fd, GC_BYTES), 0);
	spot->view = mmap(NULL, GC_BYTES, PROT_READ | PROT_WRITE,
			  place == PLACE_VM ? MAP_PRIVATE : MAP_SHARED, spot->fd, 0);
	assert_ptr_not_equal(spot->view, MAP_FAILED);
}

static void spot_end(struct gc_spot *spot, enum place place)
{
	if (place <= PLACE_VMM) {
		gpu_owner_end(&spot->owner);
		return;
	}
	munmap(spot->view, GC_BYTES);
	close(spot->fd);
}

int gc_spot_import(struct gc *t, struct gc_spot *spot, enum place place, bool writable,
		   struct memory **memory_p)
{
	switch (place) {
	case PLACE_MEMFD:
		return err_pass(
			memory_import_memfd(spot->fd, 0, GC_BYTES, writable, memory_p));
	case PLACE_SHM:
		return err_pass(
			memory_import_shm_fd(spot->fd, 0, GC_BYTES, writable, memory_p));
	case PLACE_VM:
		return err_pass(vm_import_pid(getpid(), (uintptr_t)spot->view, GC_BYTES,
					      memory_p));
	default:
		return err_pass(memory_import_device(t->gpu, 1, &spot->owner.handle, 0,
						     GC_BYTES, writable, memory_p));
	}
}

static uint8_t pattern(uint64_t i)
{
	return (uint8_t)((i * 2654435761u) >> 11);
}

static void image_make(struct gc *t, char path[64])
{
	static const char words[] = "kvd fake kernels\n";

	t->image = memfd_create("image", MFD_CLOEXEC);
	assert_int_equal(write(t->image, words, sizeof(words)), sizeof(words));
	snprintf(path, 64, "/proc/self/fd/%d", t->image);
}

static int begin(void **state, bool kernels)
{
	struct gc *t = mem_zalloc(sizeof(*t));
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
		for (uint64_t i = 0; i < GC_BYTES; i++)
			t->spots[0][place].view[i] = pattern(i + place);
	GC_FAKE(fake_cuda_fail)(NULL, 0, 0);
	*state = t;
	return 0;
}

int gc_start(void **state)
{
	return begin(state, false);
}

int gc_start_kernels(void **state)
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
void gc_settle_device(struct gc *t, unsigned int device)
{
	uint64_t until = loop_clock_ns(t->loop) + 60 * LOOP_NS_PER_S;

	while (!settled(&t->gpu->devices[device])) {
		/* a case that failed has left its memory behind */
		if (loop_clock_ns(t->loop) > until)
			abort();
		loop_turn(t->loop, LOOP_NS_PER_MS);
	}
}

void gc_settle(struct gc *t)
{
	for (unsigned int i = 0; i < t->gpu->device_count; i++)
		gc_settle_device(t, i);
}

int gc_stop(void **state)
{
	struct gc *t = *state;

	copier_free(t->copier);
	gc_settle(t);
	loop_free(t->loop);
	for (unsigned int side = 0; side < 2; side++)
		for (enum place place = 0; place < PLACES; place++)
			spot_end(&t->spots[side][place], place);
	assert_int_equal(GC_FAKE(fake_cuda_live)(), 0);
	gpu_free(t->gpu);
	if (t->image >= 0)
		close(t->image);
	mem_free(t);
	return 0;
}

/* ---- jobs ---- */

/* Rows in many forms, each buffer of the tables in turn. */
struct plan *gc_plan_mixed(uint32_t buffers)
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

	assert(buffers > 0);
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

void gc_on_done(struct copy_job *job)
{
	container_of(job, struct gc, job)->done = true;
}

void gc_tables_free(struct gc_tables *tables)
{
	for (unsigned int side = 0; side < 2; side++)
		for (enum place i = 0; i < PLACES; i++)
			memory_unref(tables->memories[side][i]);
}

int gc_tables_make(struct gc *t, const enum place places[2], bool all,
		   struct gc_tables *tables)
{
	int r = 0;

	*tables = (struct gc_tables){0};
	for (unsigned int side = 0; side < 2 && r == 0; side++) {
		for (enum place i = 0; i < (all ? PLACES : 1) && r == 0; i++) {
			enum place place = all ? i : places[side];

			r = gc_spot_import(t, &t->spots[side][place], place, side == 1,
					   &tables->memories[side][i]);
			tables->buffers[side][i] = (struct copy_buffer){
				.memory = tables->memories[side][i], .length = GC_BYTES};
			if (r == 0 && place <= PLACE_VMM && t->kernels)
				(void)gpu_module_wait(
					tables->memories[side][i]->gpu->device);
		}
	}
	return err_pass(r);
}

int gc_job_run(struct gc *t, const struct plan *plan, struct gc_tables *tables,
	       uint32_t buffers)
{
	int r;

	t->done = false;
	t->job = (struct copy_job){
		.plan = plan,
		.end = plan->bytes,
		.src = {.buffers = tables->buffers[0], .buffer_count = buffers},
		.dst = {.buffers = tables->buffers[1], .buffer_count = buffers},
		.on_done = gc_on_done};
	r = copier_submit(t->copier, &t->job);
	if (r < 0)
		return err_pass(r);
	while (!t->done)
		loop_turn(t->loop, 100 * LOOP_NS_PER_MS);
	return t->job.result < 0 ? err_reraise(&t->job.err) : 0;
}

void gc_assert_moved(struct gc *t, const struct plan *plan, const enum place places[2],
		     bool all)
{
	uint32_t buffers = all ? PLACES : 1;
	struct plan_span span;
	struct plan_walk walk;
	uint8_t *want[PLACES];

	for (uint32_t i = 0; i < buffers; i++) {
		want[i] = malloc(GC_BYTES);
		assert_non_null(want[i]);
		memset(want[i], 0xee, GC_BYTES);
	}
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		for (uint64_t i = 0; i < span.len; i++)
			want[span.dst_buffer][span.dst + i] = pattern(
				span.src + i + (all ? span.src_buffer : places[0]));
	for (uint32_t i = 0; i < buffers; i++) {
		assert_memory_equal(t->spots[1][all ? i : places[1]].view, want[i],
				    GC_BYTES);
		free(want[i]);
	}
}

void gc_wipe(struct gc *t)
{
	for (enum place place = 0; place < PLACES; place++)
		memset(t->spots[1][place].view, 0xee, GC_BYTES);
}
