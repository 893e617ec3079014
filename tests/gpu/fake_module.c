/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake driver's kernels: kvd's own. kvd_rows by its reference on the CPU, those of
 * attend.cu as they are, on fibers.
 *
 * An image is known by what it is: a fatbin that holds the code of a kernel under
 * its name, as nvcc makes it of a .cu, or, for builds without nvcc, a file that
 * begins with the words below. Anything else is refused.
 *
 * A launch runs when its turn comes on the stream and reads its list then, so a
 * list that was used again too early is seen. It touches device memory through
 * the fake's aliases, of another device only where its context or the memory was opened
 * to this one, and host memory only where that is pinned: all else is an illegal
 * address, and the context's end.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/attend_fiber.h"
#include "tests/gpu/kernels_ref.h"
#include "tests/gpu/fake_cuda.h"

#define FATBIN_MAGIC 0xba55ed50u
#define FAKE_IMAGE "kvd fake kernels\n"

static const char *const names[] = {"kvd_rows",		"kvd_attend_mla",
				    "kvd_attend_gqa64", "kvd_attend_gqa128",
				    "kvd_merge",	"kvd_splice"};
#define NAMES (sizeof(names) / sizeof(names[0]))

struct cu_function {
	struct cu_module *module;
	const char *name; /* NULL: the image has none */
};

struct cu_module {
	struct list link;
	struct cu_ctx *ctx;
	struct cu_function functions[NAMES];
};

struct fatbin {
	uint32_t magic;
	uint16_t version, header_bytes;
	uint64_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct list modules = {&modules, &modules};

/* ---- modules ---- */

static bool image_has(const void *image, const char *name)
{
	char section[64];
	struct fatbin head;

	memcpy(&head, image, sizeof(head));
	if (head.magic != FATBIN_MAGIC)
		return strncmp(image, FAKE_IMAGE, strlen(FAKE_IMAGE)) == 0;
	snprintf(section, sizeof(section), ".text.%s", name);
	return memmem(image, head.header_bytes + head.bytes, section,
		      strlen(section) + 1) != NULL;
}

static int image_look(struct cu_module *module, const void *image)
{
	bool has = false;

	for (size_t i = 0; i < NAMES; i++) {
		module->functions[i].module = module;
		if (image_has(image, names[i]))
			module->functions[i].name = names[i];
		has |= module->functions[i].name != NULL;
	}
	if (!has)
		return CU_ERROR_INVALID_IMAGE;
	return fake_env("FAKE_CUDA_NO_BINARY", 0) ? CU_ERROR_NO_BINARY_FOR_GPU
						  : CU_SUCCESS;
}

int cuModuleLoadData(struct cu_module **module_p, const void *image)
{
	struct cu_module *module;
	int result;

	ENTER(cuModuleLoadData);
	module = calloc(1, sizeof(*module));
	if (!module)
		return CU_ERROR_OUT_OF_MEMORY;
	result = image_look(module, image);
	if (result) {
		free(module);
		return result;
	}
	module->ctx = fake_current();
	pthread_mutex_lock(&lock);
	list_push_back(&modules, &module->link);
	pthread_mutex_unlock(&lock);
	fake_count(1);
	*module_p = module;
	return CU_SUCCESS;
}

/* The lock is held. */
static void module_free(struct cu_module *module)
{
	list_remove(&module->link);
	free(module);
	fake_count(-1);
}

int cuModuleUnload(struct cu_module *module)
{
	ENTER(cuModuleUnload);
	fake_streams_drain(module->ctx);
	pthread_mutex_lock(&lock);
	module_free(module);
	pthread_mutex_unlock(&lock);
	return CU_SUCCESS;
}

void fake_modules_drop(struct cu_ctx *ctx)
{
	struct cu_module *module;

	pthread_mutex_lock(&lock);
	list_foreach_safe(module, &modules, link)
		if (module->ctx == ctx)
			module_free(module);
	pthread_mutex_unlock(&lock);
}

int cuModuleGetFunction(struct cu_function **function_p, struct cu_module *module,
			const char *name)
{
	ENTER(cuModuleGetFunction);
	for (size_t i = 0; i < NAMES; i++) {
		*function_p = &module->functions[i];
		if (strcmp(names[i], name) == 0 && module->functions[i].name)
			return CU_SUCCESS;
	}
	return CU_ERROR_NOT_FOUND;
}

/* ---- launches ---- */

struct launch {
	const struct cu_ctx *ctx;
	uint64_t at, places; /* at: the list */
	uint32_t count, per_block;
};

static void *reach(void *arg, uint64_t address, uint64_t bytes, bool writing)
{
	const struct cu_ctx *ctx = arg;

	if (fake_is_device(address) ? !fake_open_to(ctx, address)
				    : !fake_is_mapped(address, bytes, writing))
		return NULL;
	return fake_reach(address, bytes, writing);
}

static int launch_run(void *arg)
{
	const struct launch *l = arg;
	const struct kernels_reach by = {.at = reach, .arg = (void *)(uintptr_t)l->ctx};

	for (uint32_t i = 0; i < l->count; i++) {
		struct kern_rows entry;
		const void *list;
		bool done = false;

		fake_memory_lock();
		list = reach((void *)(uintptr_t)l->ctx, l->at + i * sizeof(entry),
			     sizeof(entry), false);
		if (list) {
			memcpy(&entry, list, sizeof(entry));
			done = kernels_ref_entry(&entry, l->places, &by);
		}
		fake_memory_unlock();
		if (!done)
			return CU_ERROR_ILLEGAL_ADDRESS;
		fake_pace((uint64_t)entry.len * entry.count * entry.outer);
	}
	return CU_SUCCESS;
}

struct attend_launch {
	const struct cu_ctx *ctx;
	const char *name;
	uint32_t x, y;
	union {
		struct attend_kern attend;
		struct attend_kern_merge merge;
		struct attend_kern_splice splice;
	} arg;
};

static int attend_run(void *arg)
{
	const struct attend_launch *l = arg;
	const struct kernels_reach by = {.at = reach, .arg = (void *)(uintptr_t)l->ctx};
	const char *fault;

	fake_drag("attend");
	fake_memory_lock();
	fault = attend_fiber_run(l->name, l->x, l->y, &l->arg, &by);
	fake_memory_unlock();
	if (fault)
		fprintf(stderr, "%s: %s\n", l->name, fault);
	return fault ? CU_ERROR_ILLEGAL_ADDRESS : CU_SUCCESS;
}

static int attend_take(const char *name, uint32_t x, uint32_t y, struct cu_stream *stream,
		       void **params)
{
	struct attend_launch *l = calloc(1, sizeof(*l));

	if (!l)
		return CU_ERROR_OUT_OF_MEMORY;
	l->ctx = fake_current();
	l->name = name;
	l->x = x;
	l->y = y;
	memcpy(&l->arg, params[0], attend_fiber_arg(name));
	return fake_queue_call(stream, attend_run, l);
}

static void params_take(struct launch *l, void **params)
{
	memcpy(&l->at, params[0], sizeof(l->at));
	memcpy(&l->places, params[1], sizeof(l->places));
	memcpy(&l->count, params[2], sizeof(l->count));
	memcpy(&l->per_block, params[3], sizeof(l->per_block));
}

int cuLaunchKernel(struct cu_function *function, unsigned int grid_x, unsigned int grid_y,
		   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
		   unsigned int block_z, unsigned int shared_bytes,
		   struct cu_stream *stream, void **params, void **extra)
{
	struct launch *l;
	bool rows;

	ENTER(cuLaunchKernel);
	if (!function || !grid_x || !grid_y || grid_z != 1 || block_y != 1 ||
	    block_z != 1 || shared_bytes || !params || extra)
		return CU_ERROR_INVALID_VALUE;
	if (function->module->ctx != fake_current())
		return CU_ERROR_INVALID_HANDLE;
	rows = attend_fiber_arg(function->name) == 0;
	if (block_x != (rows ? KERN_THREADS : ATTEND_KERN_THREADS))
		return CU_ERROR_INVALID_VALUE;
	if (!rows)
		return attend_take(function->name, grid_x, grid_y, stream, params);
	if (grid_y != 1)
		return CU_ERROR_INVALID_VALUE;
	l = calloc(1, sizeof(*l));
	if (!l)
		return CU_ERROR_OUT_OF_MEMORY;
	l->ctx = fake_current();
	params_take(l, params);
	/* blocks without any entry */
	if (!l->per_block || l->per_block > KERN_PER_BLOCK_MAX ||
	    (uint64_t)(grid_x - 1) * l->per_block >= l->count) {
		free(l);
		return CU_ERROR_INVALID_VALUE;
	}
	return fake_queue_call(stream, launch_run, l);
}
