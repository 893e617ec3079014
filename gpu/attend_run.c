/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job is one stretch of a lane: its image and page table go to the device in one copy,
 * one launch (and a merge, if the tokens are split), one copy back. The lane's streams
 * have the lowest priority, so an engine's kernels of the same context group run first;
 * between processes the driver divides the time.
 *
 * Few tiles would leave most of the device idle, so their tokens are split, as far as
 * the planes of all splits fit.
 *
 * The kernels are loaded behind the copies' by module.c's thread, when memory of the
 * device is first imported: a driver that has no code for its device in the image
 * compiles the PTX, for up to half a minute. A job waits for them for a second; then it
 * is refused, and may be tried again. They are unloaded with the context.
 */
#include "gpu/attend_run.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/base/log.h"
#include "daemon/math/attend.h"
#include "gpu/attend_image.h"
#include "gpu/attend_plan.h"
#include "gpu/gpu.h"
#include "gpu/lane.h"

#define PLANES_BYTES_MAX ((size_t)24 << 20)
#define SPLIT_TOKENS 256u /* a split has at least so many */
#define COMPUTE_MIN 80	  /* products of bf16 */
#define ALIGN 64u
#define LOAD_TRIES 1000u
#define LOAD_PAUSE_NS 1000000

static const char *const names[GPU_ATTEND_KERNELS] = {
	"kvd_attend_mla", "kvd_attend_gqa64", "kvd_attend_gqa128", "kvd_merge"};

/* ---- loading ---- */

static int attend_functions(struct gpu_device *device, struct gpu_attend *attend)
{
	const struct cudrv *drv = &device->gpu->drv;
	struct cu_module *module;
	size_t bytes;
	int r = gpu_module_load(device, attend_image(&bytes), &module);
	int result = CU_SUCCESS;

	if (r < 0)
		return err_pass(r);
	for (unsigned int i = 0; i < GPU_ATTEND_KERNELS && result == CU_SUCCESS; i++)
		result = drv->module_function(&attend->kernels[i], module, names[i]);
	if (result != CU_SUCCESS) {
		(void)drv->module_unload(module);
		return gpu_raise(device, result, ERR_REQUIRE,
				 "cuModuleGetFunction kvd_attend");
	}
	result = drv->device_attribute(&attend->processors,
				       CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
				       device->handle);
	if (result != CU_SUCCESS || attend->processors < 1)
		attend->processors = 1;
	return 0;
}

static void attend_load(struct gpu_device *device, bool entered)
{
	struct gpu_attend *attend = &device->attend;
	int r = entered ? 0 : -EIO;

	if (r >= 0 && device->compute < COMPUTE_MIN)
		r = err_raise(ERR_REQUIRE,
			      "compute capability %d.%d: kernels of attention need 8.0",
			      device->compute / 10, device->compute % 10);
	if (r >= 0)
		r = attend_functions(device, attend);
	if (r >= 0) {
		atomic_store(&attend->state, GPU_MODULE_READY);
		return;
	}
	snprintf(attend->why, sizeof(attend->why), "%.150s", err_last()->text);
	atomic_store(&attend->state, GPU_MODULE_OFF);
	log_info("gpu", device->id, "no attention in its memory", "why=\"%s\"",
		 err_last()->text);
	err_clear();
}

void gpu_attends(struct gpu *gpu)
{
	gpu->attends = attend_load;
}

int gpu_attend_ready(struct gpu_device *device, bool (*stop)(void *arg), void *arg)
{
	const struct timespec pause = {.tv_nsec = LOAD_PAUSE_NS};
	size_t bytes;
	int r;

	for (unsigned int i = 0; i < LOAD_TRIES; i++) {
		switch (atomic_load(&device->attend.state)) {
		case GPU_MODULE_READY:
			return 0;
		case GPU_MODULE_OFF:
			return err_raise(ERR_REQUIRE, "%s; use fetch",
					 device->attend.why);
		case GPU_MODULE_NONE: /* perhaps there is no image */
			r = gpu_module_check(device->gpu, attend_image(&bytes));
			if (r < 0)
				return err_pass(r);
			break;
		default:
			break;
		}
		if (stop && stop(arg))
			return err_raise(ERR_CANCELED, "canceled");
		(void)nanosleep(&pause, NULL);
	}
	return err_raise(ERR_BUSY,
			 "%s: its attention kernels are still being loaded; try again",
			 device->id);
}

struct gpu_device *gpu_attend_device(struct gpu *gpu)
{
	for (unsigned int i = 0; gpu_started(gpu) && i < gpu->device_count; i++) {
		int state = atomic_load(&gpu->devices[i].attend.state);

		if (state == GPU_MODULE_READY || state == GPU_MODULE_LOADING)
			return &gpu->devices[i];
	}
	return NULL;
}

static struct cu_function *kernel_find(const struct gpu_device *device, const char *name)
{
	unsigned int i = 0;

	while (strcmp(names[i], name) != 0) /* the plan's is among them */
		i++;
	return device->attend.kernels[i];
}

/* ---- a job ---- */

static uint32_t splits_of(const struct gpu_device *device, const struct attend_job *job,
			  uint32_t rows)
{
	uint32_t tiles = rows / ATTEND_KERN_ROWS + 1;
	uint32_t splits = (uint32_t)device->attend.processors / tiles;
	uint32_t most = job->kv->tokens / SPLIT_TOKENS;

	splits = splits < most ? splits : most;
	splits = splits < MERGE_PARTS_MAX ? splits : MERGE_PARTS_MAX;
	while (splits > 1 && attend_plan_size(job, splits).planes > PLANES_BYTES_MAX)
		splits /= 2;
	return splits ? splits : 1;
}

/* What is copied to the device: the plan's image, then the page table. */
struct input {
	size_t image, pages, bytes;
};

static struct input input_of(const struct attend_job *job, size_t image)
{
	const struct attend_kv *kv = job->kv;
	uint64_t tokens = (uint64_t)kv->first + kv->tokens;
	struct input in = {.image = (image + ALIGN - 1) / ALIGN * ALIGN};

	if (kv->pages)
		in.pages = (tokens + kv->page_tokens - 1) / kv->page_tokens *
			   sizeof(*kv->pages);
	in.bytes = (in.image + in.pages + ALIGN - 1) / ALIGN * ALIGN;
	return in;
}

static int plan_launch(struct gpu_lane *lane, struct gpu_device *device,
		       struct attend_plan *plan)
{
	int r = gpu_lane_launch(lane, kernel_find(device, plan->kernel), plan->tiles,
				plan->splits, ATTEND_KERN_THREADS, &plan->kern);

	if (r >= 0 && plan->splits > 1)
		r = gpu_lane_launch(lane, kernel_find(device, "kvd_merge"), plan->rows, 1,
				    ATTEND_KERN_THREADS, &plan->merge);
	return err_pass(r);
}

static int run_on(struct gpu_lane *lane, struct gpu_device *device,
		  const struct attend_job *job, uint32_t rows, void *scratch)
{
	const uint32_t splits = splits_of(device, job, rows);
	const struct attend_plan_bytes size = attend_plan_size(job, splits);
	const struct input in = input_of(job, size.image);
	struct attend_kv kv = *job->kv;
	struct attend_job there = *job;
	struct attend_plan plan;
	uint64_t at, mark, planes_at;
	uint8_t *host;
	size_t result;
	int r;

	/* the result is not larger than a plane */
	r = gpu_lane_room(lane, in.bytes + size.planes / splits, in.bytes + size.planes,
			  (void **)&host, &at);
	if (r < 0)
		return err_pass(r);
	planes_at = at + in.bytes;
	if (in.pages) {
		memcpy(host + in.image, job->kv->pages, in.pages);
		kv.pages = (const uint32_t *)(uintptr_t)(at + in.image);
	}
	there.kv = &kv;
	attend_plan_make(&plan, &there, splits, host, at, planes_at, scratch);
	if (plan.tiles == 0)
		return 0;
	planes_at += attend_plan_result(&plan, &result);
	r = gpu_lane_bytes(lane, at, (uintptr_t)host, in.bytes);
	if (r >= 0)
		r = plan_launch(lane, device, &plan);
	if (r >= 0)
		r = gpu_lane_bytes(lane, (uintptr_t)(host + in.bytes), planes_at, result);
	if (r >= 0)
		r = gpu_lane_mark(lane, &mark);
	if (r >= 0)
		r = gpu_lane_wait(lane, mark);
	if (r >= 0)
		attend_plan_take(&plan, host + in.bytes);
	return err_pass(r);
}

static int run_entered(struct gpu_device *device, const struct attend_job *job,
		       void *scratch)
{
	struct gpu_lane *lane;
	uint32_t rows = 0;
	struct err why;
	int r = gpu_lane_take(device, &lane);

	if (r < 0)
		return err_pass(r);
	for (uint32_t i = 0; i < job->span_count; i++)
		rows += job->spans[i].rows;
	r = run_on(lane, device, job, rows, scratch);
	if (r < 0) {
		err_take(&why);
		gpu_lane_drain(lane);
	}
	gpu_lane_give(lane);
	return r < 0 ? err_reraise(&why) : 0;
}

size_t gpu_attend_scratch(const struct attend_job *job)
{
	return attend_plan_size(job, 1).scratch;
}

int gpu_attend_run(struct gpu_device *device, const struct attend_job *job, void *scratch)
{
	const char *fault = attend_plan_fault(job);
	int r;

	if (fault)
		return err_raise(ERR_REQUIRE, "%s; use fetch", fault);
	r = gpu_enter(device);
	if (r < 0)
		return err_pass(r);
	r = run_entered(device, job, scratch);
	gpu_leave(device);
	return err_pass(r);
}

/* ---- memory ---- */

int gpu_attend_memory(struct gpu_device *device, size_t bytes, uint64_t *address_p)
{
	int result, r = gpu_enter(device);

	if (r < 0)
		return err_pass(r);
	result = device->gpu->drv.mem_alloc(address_p, bytes);
	gpu_leave(device);
	return result == CU_SUCCESS ? 0
				    : gpu_raise(device, result, ERR_NOMEM, "cuMemAlloc");
}

void gpu_attend_memory_free(struct gpu_device *device, uint64_t address)
{
	if (gpu_enter(device) < 0) {
		err_clear(); /* freed with the context */
		return;
	}
	(void)device->gpu->drv.mem_free(address);
	gpu_leave(device);
}
