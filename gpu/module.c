/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading kernels takes from milliseconds to half a minute (a driver that has no code for
 * its device in the image compiles the PTX), so neither the loop nor a copy waits for it:
 * a thread does it, as a user of the device, and signals by one atomic store. Copy
 * engines do copies that are queued before.
 *
 * The image is the program's own, or, where an administrator names one, a file's: for a
 * device newer than this build, or code of another compiler.
 *
 * A kernel that cannot be launched is given up for this context, not the copy: copy
 * engines copy its rows. A fault of a running kernel breaks the context, as a copy's
 * fault does.
 */
#include "gpu/module.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/cpu.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "gpu/gpu.h"
#include "gpu/kern.h"
#include "gpu/kernels_image.h"

#define IMAGE_MAX (64u << 20)
#define MANY_ENTRIES 8192u /* from here on, full blocks keep every processor busy */
/* This number saturates the bus, summed over streams; if an engine's kernels run at the
 * same time (MPS), more would take multiprocessors from them only to wait. */
#define HOST_BLOCKS 4u

/* ---- the image ---- */

static int file_read(const char *path, void **image_p)
{
	uint8_t *image = NULL;
	struct stat st = {0};
	size_t got = 0;
	ssize_t n = 1;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return err_raise_errno(errno, "gpu_kernels: %.200s", path);
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 &&
	    st.st_size <= IMAGE_MAX)
		image = mem_zalloc((size_t)st.st_size + 1); /* PTX ends with a 0 */
	while (image && n > 0 && got < (size_t)st.st_size) {
		n = read(fd, image + got, (size_t)st.st_size - got);
		got += n > 0 ? (size_t)n : 0;
	}
	close(fd);
	if (!image || got < (size_t)st.st_size) {
		mem_free(image);
		return err_raise(ERR_INVAL,
				 "gpu_kernels: %.200s: must be a file of 1 to %u bytes",
				 path, IMAGE_MAX);
	}
	*image_p = image;
	return 0;
}

/* *own_p is to be freed. */
static int image_take(const struct gpu *gpu, const void *built, const void **image_p,
		      void **own_p)
{
	int r;

	*own_p = NULL;
	if (strcmp(gpu->kernels, "off") == 0)
		return err_raise(ERR_REQUIRE, "kernels are switched off "
					      "(gpu_kernels = off)");
	if (strcmp(gpu->kernels, "auto") != 0) {
		r = file_read(gpu->kernels, own_p);
		*image_p = *own_p;
		return err_pass(r);
	}
	*image_p = built;
	if (!built)
		return err_raise(ERR_REQUIRE, "this kvd was built without nvcc");
	return 0;
}

int gpu_module_check(const struct gpu *gpu, const void *built)
{
	const void *image;
	void *own = NULL;
	int r;

	if (!gpu->drv.has[CUDRV_KERNELS])
		return err_raise(ERR_REQUIRE, "the driver has no %s",
				 gpu->drv.missing[CUDRV_KERNELS]);
	r = image_take(gpu, built, &image, &own);
	mem_free(own);
	return err_pass(r);
}

/* ---- loading ---- */

static int function_get(struct gpu_device *device)
{
	struct gpu_module *module = &device->module;
	int result = device->gpu->drv.module_function(&module->rows, module->handle,
						      "kvd_rows");

	if (result != CU_SUCCESS)
		return gpu_raise(device, result, ERR_REQUIRE,
				 "cuModuleGetFunction kvd_rows");
	return 0;
}

int gpu_module_load(struct gpu_device *device, const void *built,
		    struct cu_module **module_p)
{
	const struct cudrv *drv = &device->gpu->drv;
	const void *image = NULL;
	void *own = NULL;
	int r, result;

	if (!drv->has[CUDRV_KERNELS])
		return err_raise(ERR_REQUIRE, "the driver has no %s",
				 drv->missing[CUDRV_KERNELS]);
	r = image_take(device->gpu, built, &image, &own);
	if (r < 0)
		return err_pass(r);
	result = drv->module_load(module_p, image);
	mem_free(own);
	if (result == CU_SUCCESS)
		return 0;
	*module_p = NULL;
	return gpu_raise(device, result, ERR_REQUIRE,
			 "cuModuleLoadData (compute capability %d.%d)",
			 device->compute / 10, device->compute % 10);
}

static int module_load(struct gpu_device *device)
{
	size_t bytes;
	int r = gpu_module_load(device, kernels_image(&bytes), &device->module.handle);

	return r < 0 ? err_pass(r) : err_pass(function_get(device));
}

/* Neither these kernels nor those of attention. */
static void load_off(struct gpu_device *device)
{
	const struct err why = *err_last();

	gpu_module_off(device);
	if (!device->gpu->attends)
		return;
	(void)err_reraise(&why);
	device->gpu->attends(device, false);
}

static void *load_main(void *arg)
{
	struct gpu_device *device = arg;
	int r;

	cpu_bulk();
	r = gpu_enter(device);
	if (r < 0) {
		load_off(device);
	} else {
		if (module_load(device) < 0)
			gpu_module_off(device);
		else
			atomic_store(&device->module.state, GPU_MODULE_READY);
		if (device->gpu->attends)
			device->gpu->attends(device, true);
		gpu_leave(device);
	}
	gpu_device_put(device); /* the last touch: it may release the context */
	return NULL;
}

static int load_start(struct gpu_device *device)
{
	struct err why;
	int r = gpu_device_get(device);

	if (r < 0)
		return err_pass(r);
	r = thread_start("kvd-kernels", load_main, device, &device->module.thread);
	if (r < 0) {
		err_take(&why);
		gpu_device_put(device);
		return err_reraise(&why);
	}
	device->module.started = true;
	return 0;
}

/* Without an image, no thread is needed to find that out. */
static bool image_there(const struct gpu *gpu)
{
	size_t bytes;

	if (strcmp(gpu->kernels, "auto") == 0)
		return kernels_image(&bytes) != NULL;
	return strcmp(gpu->kernels, "off") != 0;
}

void gpu_module_want(struct gpu_device *device)
{
	int none = GPU_MODULE_NONE;

	if (!image_there(device->gpu))
		return;
	if (!atomic_compare_exchange_strong(&device->module.state, &none,
					    GPU_MODULE_LOADING))
		return;
	gpu_module_fini(device); /* of a context before: it has put the device */
	if (device->gpu->attends)
		atomic_store(&device->attend.state, GPU_MODULE_LOADING);
	if (load_start(device) < 0)
		load_off(device);
}

bool gpu_module_ready(const struct gpu_device *device)
{
	return atomic_load(&device->module.state) == GPU_MODULE_READY;
}

void gpu_module_off(struct gpu_device *device)
{
	bool was;

	pthread_mutex_lock(&device->lock);
	was = atomic_exchange(&device->module.state, GPU_MODULE_OFF) == GPU_MODULE_OFF;
	if (!was)
		snprintf(device->module.why, sizeof(device->module.why), "%.150s",
			 err_last()->text);
	pthread_mutex_unlock(&device->lock);
	if (!was)
		log_info("gpu", device->id, "no kernels: copy engines do all copies",
			 "why=\"%s\"", err_last()->text);
	err_clear();
}

void gpu_module_drop(struct gpu_device *device)
{
	struct gpu_module *module = &device->module;

	if (module->handle && !gpu_device_broken(device)) { /* else the reset does it */
		if (gpu_enter(device) == 0) {
			(void)device->gpu->drv.module_unload(module->handle);
			gpu_leave(device);
		} else {
			err_clear();
		}
	}
	module->handle = NULL;
	atomic_store(&module->state, GPU_MODULE_NONE);
	atomic_store(&device->attend.state, GPU_MODULE_NONE); /* unloaded with it */
}

void gpu_module_fini(struct gpu_device *device)
{
	if (device->module.started)
		pthread_join(device->module.thread, NULL);
	device->module.started = false;
}

/* ---- launching ---- */

int gpu_module_rows(struct gpu_device *device, uint64_t entries, uint64_t places,
		    uint32_t count, bool host, struct cu_stream *stream)
{
	uint32_t per_block = count < MANY_ENTRIES ? KERN_WARPS : KERN_PER_BLOCK_MAX;
	uint32_t blocks = (count + per_block - 1) / per_block;
	void *params[] = {&entries, &places, &count, &per_block};

	assert(gpu_module_ready(device) && count > 0);
	if (host && blocks > HOST_BLOCKS)
		blocks = HOST_BLOCKS;
	return device->gpu->drv.launch(device->module.rows, blocks, 1, 1, KERN_THREADS, 1,
				       1, 0, stream, params, NULL);
}

/* ---- reports ---- */

void gpu_module_text(struct gpu *gpu, char *text, size_t size)
{
	size_t bytes;

	if (gpu_module_check(gpu, kernels_image(&bytes)) < 0) {
		snprintf(text, size, "no: %s", err_last()->text);
		err_clear();
		return;
	}
	snprintf(text, size, "yes");
	for (unsigned int i = 0; i < gpu->device_count; i++) {
		struct gpu_device *device = &gpu->devices[i];

		pthread_mutex_lock(&device->lock);
		if (atomic_load(&device->module.state) == GPU_MODULE_OFF)
			snprintf(text, size, "no: %s", device->module.why);
		pthread_mutex_unlock(&device->lock);
	}
}
