/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices and their primary contexts.
 *
 * The primary context is the one that an engine's own runtime would use in this process;
 * there is no engine here, so only kvd uses it, and there can be only one: a handle may
 * be opened by one context of a process only.
 *
 * Two locks: the gpu's, for loading the driver, and each device's, for its context and
 * its lists. A device's lock is held while the driver makes or releases the context (a
 * second), which only other users of the same device wait for. None is held while bytes
 * move. (Imports have one more, so that copies do not wait for a large allocation that is
 * being registered.)
 *
 * A broken context is useless: every call in it returns the first error. So `broken` is
 * set by the first caller that gets such a result, memory on the device counts as dead
 * from then on, its regions' rooms fail, sessions close, and with the last user the
 * context is reset. (Rejected: resetting at once, which would pull addresses from under
 * other threads' calls.)
 */
#include "gpu/gpu.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "gpu/lane.h"
#include "gpu/pin.h"

#define STACK_BYTES 16u

int gpu_new(const char *library, const char *allowed, struct gpu **gpu_p)
{
	struct gpu *gpu;

	if (strlen(library) >= sizeof(gpu->library) ||
	    strlen(allowed) >= sizeof(gpu->allowed))
		return err_raise(ERR_TOOBIG, "gpu: a name is too long");
	gpu = mem_zalloc(sizeof(*gpu));
	if (!gpu)
		return err_pass(-ENOMEM);
	memcpy(gpu->library, library, strlen(library) + 1);
	memcpy(gpu->allowed, allowed, strlen(allowed) + 1);
	pthread_mutex_init(&gpu->lock, NULL);
	pthread_mutex_init(&gpu->pins_lock, NULL);
	list_init(&gpu->pins);
	(void)gpu_tune(gpu, "auto", GPU_KERNEL_ROW_BYTES, GPU_STREAMS);
	*gpu_p = gpu;
	return 0;
}

int gpu_tune(struct gpu *gpu, const char *kernels, uint64_t kernel_row_bytes,
	     unsigned int streams)
{
	if (strlen(kernels) >= sizeof(gpu->kernels))
		return err_raise(ERR_TOOBIG, "gpu_kernels: a path is too long");
	assert(streams > 0 && streams <= GPU_STREAMS_MAX);
	memcpy(gpu->kernels, kernels, strlen(kernels) + 1);
	gpu->kernel_row_bytes = kernel_row_bytes;
	gpu->streams = streams;
	return 0;
}

void gpu_free(struct gpu *gpu)
{
	if (!gpu)
		return;
	for (unsigned int i = 0; i < gpu->device_count; i++) {
		gpu_module_fini(&gpu->devices[i]);
		assert(gpu->devices[i].users == 0);
		pthread_mutex_destroy(&gpu->devices[i].keep.lock);
		pthread_mutex_destroy(&gpu->devices[i].imports_lock);
		pthread_mutex_destroy(&gpu->devices[i].lock);
	}
	assert(list_empty(&gpu->pins));
	pthread_mutex_destroy(&gpu->pins_lock);
	pthread_mutex_destroy(&gpu->lock);
	mem_free(gpu);
}

/* ---- contexts ---- */

static int ctx_look(struct gpu_device *device)
{
	const struct cudrv *drv = &device->gpu->drv;
	int least = 0, greatest = 0;
	int result;

	/* The driver keeps a stack for each thread that the device can run, 1 KiB by
	 * default: half of a context. Kvd's kernels use none. */
	(void)drv->ctx_limit(CU_LIMIT_STACK_SIZE, STACK_BYTES);
	result = drv->ctx_priorities(&least, &greatest);

	if (result != CU_SUCCESS)
		return cudrv_raise(drv, result, ERR_IO, "%s: cuCtxGetStreamPriorityRange",
				   device->id);
	device->priority = least;
	return 0;
}

static void ctx_down(struct gpu_device *device)
{
	const struct cudrv *drv = &device->gpu->drv;
	int result = CU_SUCCESS;

	gpu_lanes_free(device);
	gpu_keep_drop(device);
	gpu_pins_drop(device);
	gpu_module_drop(device);
	if (atomic_load(&device->broken))
		result = drv->ctx_reset(device->handle);
	if (result == CU_SUCCESS)
		result = drv->ctx_release(device->handle);
	device->held = result != CU_SUCCESS;
	device->ctx = NULL;
	device->peers = 0;
	memset(device->peer_turns, 0, sizeof(device->peer_turns));
	if (result == CU_SUCCESS) {
		atomic_store(&device->broken, false);
		return;
	}
	(void)cudrv_raise(drv, result, ERR_IO, "%s: releasing the context", device->id);
	log_warn("gpu", device->id, "the context stays", "why=\"%s\"", err_last()->text);
	err_clear();
}

static int broken_raise(const struct gpu_device *device)
{
	return err_raise(ERR_IO, "%s has failed and is not reset yet: %s", device->id,
			 device->why.text);
}

/* The two results with a known remedy. */
static int ctx_refused(const struct gpu_device *device, int result)
{
	int r = cudrv_raise(&device->gpu->drv, result, ERR_IO, "%s: making a context",
			    device->id);

	if (result == CU_ERROR_DEVICE_UNAVAILABLE)
		return err_prefix(r, "another process has the GPU to itself (nvidia-smi "
				     "-c 0 ends exclusive compute mode)");
	if (cudrv_sticky(result)) /* the reset was not enough: cuda.h warns of that */
		return err_prefix(r, "the driver does not recover in this process: "
				     "restart kvd");
	return err_pass(r);
}

static int ctx_up(struct gpu_device *device)
{
	const struct cudrv *drv = &device->gpu->drv;
	int result, r;

	if (device->held) /* it could not be released when its last user left */
		ctx_down(device);
	if (atomic_load(&device->broken))
		return err_pass(broken_raise(device));
	result = drv->ctx_retain(&device->ctx, device->handle);
	if (result != CU_SUCCESS) {
		device->ctx = NULL;
		return err_pass(ctx_refused(device, result));
	}
	atomic_fetch_add(&device->turn, 1);
	r = gpu_enter(device);
	if (r == 0) {
		r = ctx_look(device);
		gpu_leave(device);
	}
	if (r < 0) {
		struct err why;

		err_take(&why);
		ctx_down(device);
		return err_reraise(&why);
	}
	return 0;
}

int gpu_device_get(struct gpu_device *device)
{
	int r = 0;

	pthread_mutex_lock(&device->lock);
	if (device->users == 0)
		r = ctx_up(device);
	else if (atomic_load(&device->broken))
		r = broken_raise(device);
	if (r == 0 && device->users++ == 0)
		log_debug("gpu", device->id, "in use", "name=\"%s\" pci=%s", device->name,
			  device->pci);
	pthread_mutex_unlock(&device->lock);
	return err_pass(r);
}

void gpu_device_put(struct gpu_device *device)
{
	pthread_mutex_lock(&device->lock);
	assert(device->users > 0);
	if (--device->users == 0) {
		ctx_down(device);
		log_debug("gpu", device->id, "no longer in use", "name=\"%s\"",
			  device->name);
	}
	pthread_mutex_unlock(&device->lock);
}

bool gpu_device_used(struct gpu_device *device)
{
	bool used;

	pthread_mutex_lock(&device->lock);
	used = device->users > 0;
	pthread_mutex_unlock(&device->lock);
	return used;
}
