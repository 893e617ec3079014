/* SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/works/works.h"

struct cuda cuda;

struct hold {
	sem_t go;
};

const char *cuda_library(void)
{
	const char *named = getenv("KVD_CUDA_LIB");

	return named && *named ? named : "libcuda.so.1";
}

void cu(int result, const char *what)
{
	const char *name = NULL;

	if (result == CU_SUCCESS)
		return;
	if (cuda.drv.error_name(result, &name) || !name)
		name = "?";
	die("%s: %s (%d)", what, name, result);
}

static void symbol(const char *name, void *to)
{
	void *address = dlsym(cuda.drv.library, name);

	if (!address)
		die("%s has no %s", cuda_library(), name);
	memcpy(to, &address, sizeof(address));
}

static void symbols(void)
{
	symbol("cuMemAlloc_v2", &cuda.mem_alloc);
	symbol("cuMemFree_v2", &cuda.mem_free);
#define TAKE(function, name, parameters) symbol(#name, &cuda.function);
	ENGINE_CALLS(TAKE)
	cuda.fake = dlsym(cuda.drv.library, "fake_cuda_live") != NULL;
}

void cuda_start(void)
{
	const char *number = getenv("KVD_GPU_DEVICE");
	struct cu_ctx *ctx = NULL;
	struct cu_uuid uuid;

	if (cudrv_load(cuda_library(), &cuda.drv) < 0)
		skip("%s", err_last()->text);
	symbols();
	cu(cuda.drv.device_get(&cuda.device, number ? atoi(number) : 0), "cuDeviceGet");
	cu(cuda.drv.device_uuid(&uuid, cuda.device), "cuDeviceGetUuid");
	cu(cuda.drv.device_name(cuda.name, sizeof(cuda.name), cuda.device), "the name");
	cudrv_uuid_text(&uuid, cuda.uuid);
	cu(cuda.drv.ctx_retain(&ctx, cuda.device), "cuDevicePrimaryCtxRetain");
	cu(cuda.drv.ctx_push(ctx), "cuCtxPushCurrent");
	cu(cuda.drv.stream_create(&cuda.stream, CU_STREAM_NON_BLOCKING, 0), "a stream");
}

uint64_t cuda_alloc(uint64_t bytes)
{
	uint64_t address = 0;

	cu(cuda.mem_alloc(&address, bytes), "cuMemAlloc");
	return address;
}

void cuda_sync(void)
{
	cu(cuda.drv.stream_sync(cuda.stream), "cuStreamSynchronize");
}

static void on_hold(void *arg)
{
	struct hold *hold = arg;

	while (sem_wait(&hold->go) < 0)
		continue;
}

struct hold *hold_begin(struct cu_stream *stream)
{
	struct hold *hold = need(calloc(1, sizeof(*hold)));

	sem_init(&hold->go, 0, 0);
	cu(cuda.host_func(stream, on_hold, hold), "cuLaunchHostFunc");
	return hold;
}

/* It is not freed: the stream may be looking at it still. */
void hold_end(struct hold *hold)
{
	sem_post(&hold->go);
}
