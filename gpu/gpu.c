/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding devices, and the common part of driver calls in a device's context: entering
 * it, and its faults. gpu_life.c makes and ends contexts.
 */
#include "gpu/gpu.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "daemon/base/log.h"

/* ---- finding ---- */

static bool device_named(const struct gpu_device *device, const char *name)
{
	struct cu_uuid uuid;
	const char *pci = device->pci;

	if (cudrv_uuid_parse(name, &uuid))
		return memcmp(&uuid, &device->uuid, sizeof(uuid)) == 0;
	if (strcasecmp(pci, name) == 0)
		return true;
	/* sysfs and nvidia-smi write domains of another length */
	while (*pci == '0')
		pci++;
	while (*name == '0')
		name++;
	return *name && strcasecmp(pci, name) == 0;
}

static bool device_allowed(const struct gpu *gpu, const struct gpu_device *device)
{
	char words[GPU_ALLOWED_MAX], *word, *rest = NULL;

	if (strcmp(gpu->allowed, "auto") == 0)
		return true;
	memcpy(words, gpu->allowed, sizeof(words));
	for (word = strtok_r(words, " \t,", &rest); word;
	     word = strtok_r(NULL, " \t,", &rest))
		if (device_named(device, word))
			return true;
	return false;
}

static int attribute(const struct cudrv *drv, int which, int handle, int *value_p)
{
	int result = drv->device_attribute(value_p, which, handle);

	if (result == CU_SUCCESS)
		return 0;
	return cudrv_raise(drv, result, ERR_REQUIRE, "cuDeviceGetAttribute %d", which);
}

static int device_look(struct gpu *gpu, int ordinal, struct gpu_device *device)
{
	const struct cudrv *drv = &gpu->drv;
	int major = 0, minor = 0, pitch = 0, host_pointers = 1, r;
	size_t bytes = 0;
	int result = drv->device_get(&device->handle, ordinal);

	if (result == CU_SUCCESS)
		result = drv->device_uuid(&device->uuid, device->handle);
	if (result == CU_SUCCESS)
		result =
			drv->device_pci(device->pci, sizeof(device->pci), device->handle);
	if (result == CU_SUCCESS)
		result = drv->device_name(device->name, sizeof(device->name),
					  device->handle);
	if (result == CU_SUCCESS)
		result = drv->device_bytes(&bytes, device->handle);
	if (result != CU_SUCCESS)
		return cudrv_raise(drv, result, ERR_REQUIRE, "querying GPU %d", ordinal);
	r = attribute(drv, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device->handle,
		      &major);
	if (r == 0)
		r = attribute(drv, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
			      device->handle, &minor);
	if (r == 0)
		r = attribute(drv, CU_DEVICE_ATTRIBUTE_MAX_PITCH, device->handle, &pitch);
	if (r < 0)
		return err_pass(r);
	/* a driver that does not know the question is of before the exception (Windows)
	 */
	result = drv->device_attribute(&host_pointers,
				       CU_DEVICE_ATTRIBUTE_HOST_POINTER_FOR_REGISTERED,
				       device->handle);
	device->host_pointers = result != CU_SUCCESS || host_pointers;
	cudrv_uuid_text(&device->uuid, device->id);
	device->bytes = bytes;
	device->compute = 10 * major + minor;
	device->max_pitch = pitch > 0 ? (size_t)pitch : 0;
	return 0;
}

static int devices_look(struct gpu *gpu)
{
	int count = 0, r = 0;
	int result = gpu->drv.device_count(&count);

	if (result != CU_SUCCESS)
		return cudrv_raise(&gpu->drv, result, ERR_REQUIRE, "cuDeviceGetCount");
	if (count > (int)GPU_DEVICES_MAX)
		count = (int)GPU_DEVICES_MAX;
	for (int i = 0; i < count && r == 0; i++) {
		struct gpu_device *device = &gpu->devices[i];

		*device = (struct gpu_device){.gpu = gpu, .number = (unsigned int)i};
		r = device_look(gpu, i, device);
		device->allowed = r == 0 && device_allowed(gpu, device);
	}
	for (int i = 0; i < count && r == 0; i++) {
		pthread_mutex_init(&gpu->devices[i].lock, NULL);
		list_init(&gpu->devices[i].lanes);
		pthread_mutex_init(&gpu->devices[i].imports_lock, NULL);
		list_init(&gpu->devices[i].imports);
		pthread_mutex_init(&gpu->devices[i].keep.lock, NULL);
		list_init(&gpu->devices[i].keep.lists);
		gpu->device_count++;
	}
	return err_pass(r);
}

bool gpu_started(const struct gpu *gpu)
{
	return atomic_load(&gpu->ready);
}

int gpu_start(struct gpu *gpu)
{
	int r = 0;

	if (gpu_started(gpu))
		return 0;
	if (strcmp(gpu->allowed, "off") == 0)
		return err_raise(ERR_REQUIRE, "GPUs are switched off (gpu = off)");
	pthread_mutex_lock(&gpu->lock);
	if (!gpu->started) {
		r = cudrv_load(gpu->library, &gpu->drv);
		if (r == 0)
			r = devices_look(gpu);
		gpu->started = r == 0;
		atomic_store(&gpu->ready, r == 0);
	}
	pthread_mutex_unlock(&gpu->lock);
	return err_pass(r);
}

static void devices_text(const struct gpu *gpu, char *text, size_t size)
{
	size_t at = 0;

	text[0] = '\0';
	for (unsigned int i = 0; i < gpu->device_count && at < size; i++)
		at += (size_t)snprintf(text + at, size - at, "%s%s", i ? ", " : "",
				       gpu->devices[i].id);
}

int gpu_device_find(struct gpu *gpu, const char *name, struct gpu_device **device_p)
{
	char known[160];
	int r;

	if (strncmp(name, "MIG-", 4) == 0)
		return err_raise(ERR_IMPORT,
				 "%.60s: memory of a MIG instance cannot be shared with "
				 "another process by CUDA IPC: use the whole GPU, or a "
				 "host memory pool",
				 name);
	r = gpu_start(gpu);
	if (r < 0)
		return err_pass(r);
	for (unsigned int i = 0; i < gpu->device_count; i++) {
		if (!device_named(&gpu->devices[i], name))
			continue;
		if (!gpu->devices[i].allowed)
			return err_raise(ERR_PERM,
					 "%s: not enabled for this daemon (gpu = %.80s)",
					 gpu->devices[i].id, gpu->allowed);
		*device_p = &gpu->devices[i];
		return 0;
	}
	devices_text(gpu, known, sizeof(known));
	return err_raise(
		ERR_IMPORT,
		"no GPU %.48s here: kvd sees %s%s. Name it by UUID or PCI id, not "
		"by number; CUDA_VISIBLE_DEVICES of kvd must not hide it",
		name, gpu->device_count ? "" : "none", known);
}

/* ---- in a context ---- */

int gpu_enter(struct gpu_device *device)
{
	int result = device->gpu->drv.ctx_push(device->ctx);

	if (result != CU_SUCCESS)
		return gpu_raise(device, result, ERR_IO, "cuCtxPushCurrent");
	return 0;
}

void gpu_leave(struct gpu_device *device)
{
	struct cu_ctx *ctx;

	(void)device->gpu->drv.ctx_pop(&ctx);
}

/* ---- faults ---- */

void gpu_device_break(struct gpu_device *device)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;

	pthread_mutex_lock(&once);
	if (!atomic_load(&device->broken)) {
		device->why = *err_last();
		atomic_store(&device->broken, true);
		log_error("gpu", device->id,
			  "the device has failed; memory on it is lost", "why=\"%s\"",
			  device->why.text);
	}
	pthread_mutex_unlock(&once);
}

int gpu_raise(struct gpu_device *device, int result, enum err_code code, const char *fmt,
	      ...)
{
	char words[200];
	struct err why;
	va_list args;
	int r;

	assert(result != CU_SUCCESS);
	va_start(args, fmt);
	vsnprintf(words, sizeof(words), fmt, args);
	va_end(args);
	r = cudrv_raise(&device->gpu->drv, result, code, "%s: %s", device->id, words);
	if (cudrv_sticky(result)) {
		gpu_device_break(device);
	} else if (err_last()->scope == ERR_SCOPE_DEVICE) {
		err_take(&why); /* the device continues: only the requester fails */
		why.scope = ERR_SCOPE_ROOM;
		r = err_reraise(&why);
	}
	return err_pass(r);
}

bool gpu_device_broken(const struct gpu_device *device)
{
	return atomic_load(&device->broken);
}

static bool peer_enable(struct gpu_device *device, const struct gpu_device *other)
{
	const struct cudrv *drv = &device->gpu->drv;
	int possible = 0, result;

	if (!drv->has[CUDRV_PEER] ||
	    drv->peer_possible(&possible, device->handle, other->handle) != CU_SUCCESS ||
	    !possible)
		return false;
	if (gpu_enter(device) < 0) {
		err_clear();
		return false;
	}
	result = drv->peer_enable(other->ctx, 0);
	gpu_leave(device);
	return result == CU_SUCCESS || result == CU_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

bool gpu_device_pair(struct gpu_device *device, const struct gpu_device *other)
{
	uint32_t bit = UINT32_C(1) << other->number;
	unsigned int turn = atomic_load(&other->turn); /* it has a user: this one stays */
	bool near;

	assert(device->gpu == other->gpu);
	if (device == other)
		return true;
	pthread_mutex_lock(&device->lock);
	if (device->peer_turns[other->number] != turn) {
		device->peer_turns[other->number] = turn;
		device->peers &= ~bit;
		if (peer_enable(device, other))
			device->peers |= bit;
		else
			log_info("gpu", device->id,
				 "copies pass through host memory: no peer access",
				 "other=%s", other->id);
	}
	near = device->peers & bit;
	pthread_mutex_unlock(&device->lock);
	return near;
}
