/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver, devices, imports and lanes, over the fake driver: with memory of
 * other processes, and with every call of the driver failed in turn.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "gpu/gpu.h"
#include "gpu/import.h"
#include "gpu/lane.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"

#define MIB (UINT64_C(1) << 20)
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

static char fake_path[256];

static struct gpu *new_gpu(const char *allowed)
{
	struct gpu *gpu = NULL;

	assert_int_equal(gpu_new(fake_path, allowed, &gpu), 0);
	return gpu;
}

static void assert_error(int r, enum err_code code, const char *words)
{
	assert_true(r < 0);
	if (err_last()->code != code || !strstr(err_last()->text, words))
		fail_msg("%s: %s (wanted %s, \"%s\")", err_name(err_last()->code),
			 err_last()->text, err_name(code), words);
	err_clear();
}

/* ---- the driver ---- */

static void driver_absent_is_refused_by_name(void **state)
{
	struct gpu *gpu = NULL;

	(void)state;
	assert_int_equal(gpu_new("libno-such-driver.so.1", "auto", &gpu), 0);
	assert_error(gpu_start(gpu), ERR_REQUIRE, "libno-such-driver.so.1");
	gpu_free(gpu);
	assert_int_equal(gpu_new("libm.so.6", "auto", &gpu), 0);
	assert_error(gpu_start(gpu), ERR_REQUIRE, "has no cuInit");
	gpu_free(gpu);
	gpu = new_gpu("off");
	assert_error(gpu_start(gpu), ERR_REQUIRE, "switched off");
	gpu_free(gpu);
}

static void driver_of_old_lacks_its_features(void **state)
{
	struct gpu_handle handle = {.kind = GPU_HANDLE_VMM, .bytes = 2 * MIB};
	struct gpu_import *im;
	struct gpu *gpu = NULL;
	char path[256];

	(void)state;
	assert_int_equal(gpu_new(gpu_fake_path("old/", path), "auto", &gpu), 0);
	assert_int_equal(gpu_start(gpu), 0);
	assert_false(gpu->drv.has[CUDRV_VMM]);
	assert_false(gpu->drv.has[CUDRV_BATCH]);
	assert_true(gpu->drv.has[CUDRV_PEER]);
	assert_string_equal(gpu->drv.missing[CUDRV_BATCH], "cuMemcpyBatchAsync_v2");
	snprintf(handle.device, sizeof(handle.device), "%s", gpu->devices[0].id);
	assert_error(gpu_import(gpu, 1, &handle, true, &im), ERR_IMPORT,
		     "no cuMemImportFromShareableHandle");
	gpu_free(gpu);
}

static void driver_failed_is_retried(void **state)
{
	static const char *const calls[] = {
		"cuInit",	   "cuDriverGetVersion",  "cuDeviceGetCount",
		"cuDeviceGet",	   "cuDeviceGetUuid_v2",  "cuDeviceGetPCIBusId",
		"cuDeviceGetName", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute",
	};
	struct gpu *gpu = new_gpu("auto");

	(void)state;
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		FAKE(fake_cuda_fail)(calls[i], 1, CU_ERROR_UNKNOWN);
		assert_error(gpu_start(gpu), ERR_REQUIRE, "CUDA_ERROR_UNKNOWN");
	}
	FAKE(fake_cuda_fail)("cuInit", 1, CU_ERROR_NO_DEVICE);
	assert_error(gpu_start(gpu), ERR_REQUIRE, "no CUDA-capable device");
	assert_int_equal(gpu_start(gpu), 0);
	assert_int_equal(gpu->device_count, 2);
	assert_int_equal(gpu->devices[1].compute, 90);
	gpu_free(gpu);
}

/* cuda.h 13.0 says of these, in one way or another, that the process or the context is
 * of no use any more. One that is not known would leave a drain waiting for ever. */
static void results_permanent_are_cached(void **state)
{
	static const int lasting[] = {214, 220, 226, 700, 702, 709, 710, 714,
				      715, 716, 717, 718, 719, 721, 810, 911},
			 passing[] = {CU_SUCCESS,
				      CU_ERROR_INVALID_VALUE,
				      CU_ERROR_OUT_OF_MEMORY,
				      CU_ERROR_NOT_READY,
				      CU_ERROR_NOT_PERMITTED,
				      CU_ERROR_NOT_SUPPORTED,
				      CU_ERROR_UNKNOWN};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(lasting); i++)
		if (!cudrv_sticky(lasting[i]))
			fail_msg("%d passes", lasting[i]);
	for (size_t i = 0; i < ARRAY_LEN(passing); i++)
		assert_false(cudrv_sticky(passing[i]));
}

static void uuid_read_and_written_is_the_same(void **state)
{
	static const char *const bad[] = {"",
					  "GPU-",
					  "0",
					  "GPU-12345678-1234-1234-1234",
					  "GPU-12345678-1234-1234-1234-12345678901g",
					  "GPU-12345678x1234-1234-1234-123456789012"};
	const char *text = "GPU-0123abcd-4567-89ab-cdef-0123456789ff";
	char back[CUDRV_UUID_TEXT];
	struct cu_uuid uuid;

	(void)state;
	assert_true(cudrv_uuid_parse(text, &uuid));
	cudrv_uuid_text(&uuid, back);
	assert_string_equal(back, text);
	assert_true(cudrv_uuid_parse(text + 4, &uuid));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_false(cudrv_uuid_parse(bad[i], &uuid));
}

/* ---- devices ---- */

static void device_is_found_by_uuid_and_pci_id(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	struct gpu_device *device = NULL;

	(void)state;
	assert_int_equal(gpu_start(gpu), 0);
	assert_int_equal(gpu_device_find(gpu, gpu->devices[1].id, &device), 0);
	assert_ptr_equal(device, &gpu->devices[1]);
	assert_int_equal(gpu_device_find(gpu, "00000000:3b:00.0", &device), 0);
	assert_ptr_equal(device, &gpu->devices[0]);
	assert_error(gpu_device_find(gpu, "1", &device), ERR_IMPORT, gpu->devices[0].id);
	assert_error(gpu_device_find(gpu, "MIG-0123abcd", &device), ERR_IMPORT, "MIG");
	gpu_free(gpu);
}

static void device_not_allowed_is_refused(void **state)
{
	struct gpu *gpu =
		new_gpu("0000:3b:00.0, GPU-fafafafa-fafa-fafa-fafa-fafafafafa07");
	struct gpu_device *device = NULL;

	(void)state;
	assert_int_equal(gpu_device_find(gpu, "0000:3B:00.0", &device), 0);
	assert_error(gpu_device_find(gpu, "0000:3c:00.0", &device), ERR_PERM,
		     "not enabled for this daemon");
	gpu_free(gpu);
}

static void device_context_exists_while_used(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	int before = FAKE(fake_cuda_live)();

	(void)state;
	assert_int_equal(gpu_start(gpu), 0);
	assert_int_equal(gpu_device_get(&gpu->devices[0]), 0);
	assert_int_equal(FAKE(fake_cuda_live)(), before + 1);
	assert_int_equal(gpu_device_get(&gpu->devices[0]), 0);
	gpu_device_put(&gpu->devices[0]);
	assert_int_equal(FAKE(fake_cuda_live)(), before + 1);
	gpu_device_put(&gpu->devices[0]);
	assert_int_equal(FAKE(fake_cuda_live)(), before);
	gpu_free(gpu);
}

/* ---- imports ---- */

static void device_without_context_names_remedy(void **state)
{
	static const struct {
		int code;
		const char *words;
	} cases[] = {{CU_ERROR_DEVICE_UNAVAILABLE, "exclusive compute mode"},
		     {CU_ERROR_ILLEGAL_ADDRESS, "restart kvd"},
		     {CU_ERROR_UNKNOWN, "making a context"}};
	struct gpu *gpu = new_gpu("auto");
	struct gpu_device *device = &gpu->devices[0];

	(void)state;
	assert_int_equal(gpu_start(gpu), 0);
	assert_true(device->host_pointers);
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		FAKE(fake_cuda_fail)("cuDevicePrimaryCtxRetain", 1, cases[i].code);
		assert_error(gpu_device_get(device), ERR_IO, cases[i].words);
		assert_int_equal(gpu_device_get(device), 0);
		gpu_device_put(device);
	}
	gpu_free(gpu);
}

static void import_shares_one_opening(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	struct gpu_import *a = NULL, *b = NULL, *other = NULL;
	struct gpu_owner owner;
	int before = FAKE(fake_cuda_live)();

	(void)state;
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_IPC, 0, 3 * MIB));
	assert_int_equal(gpu_import(gpu, 7, &owner.handle, true, &a), 0);
	assert_int_equal(gpu_import(gpu, 7, &owner.handle, true, &b), 0);
	assert_ptr_equal(a, b);
	assert_int_equal(a->bytes, 3 * MIB);
	/* another engine does not get this one's: the driver counts */
	assert_int_equal(gpu_import(gpu, 8, &owner.handle, true, &other), 0);
	assert_ptr_not_equal(other, a);
	assert_int_equal(other->address, a->address);
	gpu_import_unref(other);
	gpu_import_unref(a);
	assert_int_equal(FAKE(fake_cuda_live)(), before + 2); /* context, mapping */
	gpu_import_unref(b);
	assert_int_equal(FAKE(fake_cuda_live)(), before);
	gpu_owner_end(&owner);
	gpu_free(gpu);
}

/* So do drivers of before CUDA 11, and newer ones with a new handle for a place at which
 * something is open. */
static void import_where_one_is_open_is_refused_by_name(void **state)
{
	struct gpu_import *a = NULL, *other = NULL;
	struct gpu *gpu = NULL;
	struct gpu_owner owner;
	char path[256];

	(void)state;
	assert_int_equal(gpu_new(gpu_fake_path("old/", path), "auto", &gpu), 0);
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_IPC, 0, MIB));
	assert_int_equal(gpu_import(gpu, 7, &owner.handle, true, &a), 0);
	assert_error(gpu_import(gpu, 8, &owner.handle, true, &other), ERR_IMPORT,
		     "is already open");
	gpu_import_unref(a);
	assert_int_equal(gpu_import(gpu, 8, &owner.handle, true, &other), 0);
	gpu_import_unref(other);
	gpu_owner_end(&owner);
	gpu_free(gpu);
}

/* How long an allocation is must be known: of what engines say nothing is trusted. */
static void import_of_unknown_length_is_queried_twice(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	struct gpu_import *im = NULL;
	struct gpu_owner owner;

	(void)state;
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_IPC, 0, 3 * MIB));
	FAKE(fake_cuda_fail)("cuMemGetAddressRange_v2", 1, CU_ERROR_NOT_FOUND);
	assert_int_equal(gpu_import(gpu, 7, &owner.handle, true, &im), 0);
	assert_int_equal(im->bytes, 3 * MIB);
	gpu_import_unref(im);
	FAKE(fake_cuda_fail)("cuMemGetAddressRange_v2", 1, CU_ERROR_NOT_FOUND);
	FAKE(fake_cuda_fail)("cuPointerGetAttribute", 3, CU_ERROR_INVALID_VALUE);
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_IMPORT,
		     "cuMemGetAddressRange");
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	gpu_owner_end(&owner);
	gpu_free(gpu);
}

/* Where a device can map for both alone. */
static void import_for_reading_takes_device_length(void **state)
{
	static const int codes[] = {CU_ERROR_NOT_SUPPORTED, CU_ERROR_INVALID_VALUE};
	struct gpu *gpu = new_gpu("auto");
	struct gpu_import *im = NULL;
	struct gpu_owner owner;

	(void)state;
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_VMM, 0, 2 * MIB));
	for (size_t i = 0; i < ARRAY_LEN(codes); i++) {
		FAKE(fake_cuda_fail)("cuMemSetAccess", 1, codes[i]);
		assert_int_equal(gpu_import(gpu, 7, &owner.handle, false, &im), 0);
		assert_int_equal(im->access, CU_MEM_ACCESS_READWRITE);
		gpu_import_unref(im);
	}
	assert_int_equal(gpu_import(gpu, 7, &owner.handle, false, &im), 0);
	assert_int_equal(im->access, CU_MEM_ACCESS_READ);
	gpu_import_unref(im);
	FAKE(fake_cuda_fail)("cuMemSetAccess", 1, CU_ERROR_INVALID_VALUE);
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_IMPORT,
		     "cuMemSetAccess");
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_owner_end(&owner);
	gpu_free(gpu);
}

static void import_from_dead_exporter_is_refused(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	struct gpu_import *im = NULL;
	struct gpu_owner owner;

	(void)state;
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_IPC, 0, MIB));
	gpu_owner_kill(&owner);
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_IMPORT,
		     "the exporting process has exited");
	gpu_owner_end(&owner);
	gpu_free(gpu);
}

static void import_under_wrong_name_is_refused(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	struct gpu_import *im = NULL;
	struct gpu_owner owner, vmm;
	char right[sizeof(owner.handle.device)];

	(void)state;
	/* the engine sees the devices the other way round */
	assert_int_equal(setenv("CUDA_VISIBLE_DEVICES", "1,0", 1), 0);
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_IPC, 0, MIB));
	assert_true(gpu_owner_start(&vmm, GPU_HANDLE_VMM, 0, 2 * MIB));
	assert_int_equal(unsetenv("CUDA_VISIBLE_DEVICES"), 0);
	assert_int_equal(gpu_start(gpu), 0);
	assert_string_equal(owner.handle.device, gpu->devices[1].id);
	memcpy(right, owner.handle.device, sizeof(right));
	memcpy(owner.handle.device, gpu->devices[0].id, sizeof(gpu->devices[0].id));
	memcpy(vmm.handle.device, gpu->devices[0].id, sizeof(gpu->devices[0].id));
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_IMPORT,
		     gpu->devices[1].id);
	assert_error(gpu_import(gpu, 7, &vmm.handle, true, &im), ERR_IMPORT,
		     "not on GPU");
	memcpy(owner.handle.device, right, sizeof(right));
	assert_int_equal(gpu_import(gpu, 7, &owner.handle, true, &im), 0);
	gpu_import_unref(im);
	gpu_owner_end(&owner);
	gpu_owner_end(&vmm);
	gpu_free(gpu);
}

static void import_by_fd_of_anything_else_is_refused(void **state)
{
	struct gpu *gpu = new_gpu("auto");
	struct gpu_handle handle = {.kind = GPU_HANDLE_VMM, .bytes = 2 * MIB, .fd = 0};
	struct gpu_import *im = NULL;
	struct gpu_owner owner;

	(void)state;
	assert_int_equal(gpu_start(gpu), 0);
	memcpy(handle.device, gpu->devices[0].id, sizeof(gpu->devices[0].id));
	assert_error(gpu_import(gpu, 7, &handle, true, &im), ERR_IMPORT,
		     "not a handle from cuMemExportToShareableHandle");
	handle.fd = -1;
	assert_error(gpu_import(gpu, 7, &handle, true, &im), ERR_IO, "fd");
	assert_true(gpu_owner_start(&owner, GPU_HANDLE_VMM, 0, 2 * MIB));
	owner.handle.bytes = 4 * MIB;
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_IMPORT, "size");
	owner.handle.bytes = 3 * MIB;
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_IMPORT,
		     "not a multiple");
	owner.handle.bytes = 0;
	assert_error(gpu_import(gpu, 7, &owner.handle, true, &im), ERR_RANGE, "0 bytes");
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_owner_end(&owner);
	gpu_free(gpu);
}

/* ---- lanes ---- */

/* two allocations of engines, imported */
struct bench {
	struct gpu *gpu;
	struct gpu_owner from, to;
	struct gpu_import *src, *dst;
	struct gpu_device *device;
	struct gpu_lane *lane;
};

static int bench_open(struct bench *b, enum gpu_handle_kind kind, bool dst_writable)
{
	int r = gpu_import(b->gpu, 7, &b->from.handle, false, &b->src);

	(void)kind;
	if (r == 0)
		r = gpu_import(b->gpu, 7, &b->to.handle, dst_writable, &b->dst);
	if (r == 0)
		r = gpu_enter(b->dst->device);
	if (r == 0) {
		b->device = b->dst->device;
		r = gpu_lane_take(b->device, &b->lane);
	}
	return err_pass(r);
}

static void bench_close(struct bench *b)
{
	if (b->lane)
		gpu_lane_give(b->lane);
	if (b->device)
		gpu_leave(b->device);
	gpu_import_unref(b->dst);
	gpu_import_unref(b->src);
	b->lane = NULL;
	b->device = NULL;
	b->src = b->dst = NULL;
}

static void bench_start(struct bench *b, enum gpu_handle_kind kind, unsigned int src,
			unsigned int dst)
{
	*b = (struct bench){.gpu = new_gpu("auto")};
	assert_true(gpu_owner_start(&b->from, kind, src, 4 * MIB));
	assert_true(gpu_owner_start(&b->to, kind, dst, 4 * MIB));
	for (uint64_t i = 0; i < 4 * MIB; i++)
		b->from.view[i] = (uint8_t)(i * 2654435761u >> 13);
	memset(b->to.view, 0xee, 4 * MIB);
}

static void bench_end(struct bench *b)
{
	bench_close(b);
	gpu_owner_end(&b->from);
	gpu_owner_end(&b->to);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_free(b->gpu);
}

static int lane_run(struct bench *b, const struct gpu_rows *rows, size_t count)
{
	uint64_t mark;
	int r = 0;

	for (size_t i = 0; i < count && r == 0; i++) {
		struct gpu_rows at = rows[i];

		at.src += b->src->address;
		at.dst += b->dst->address;
		at.flat = b->src->device != b->dst->device;
		r = gpu_lane_copy(b->lane, &at);
	}
	if (r == 0)
		r = gpu_lane_mark(b->lane, &mark);
	if (r == 0)
		r = gpu_lane_wait(b->lane, mark);
	if (r < 0) {
		struct err err;

		err_take(&err);
		gpu_lane_drain(b->lane);
		return err_reraise(&err);
	}
	return 0;
}

/* 20 rows of 100 bytes, a plane of a volume whose planes have 25 and 21 such rows. */
#define VOLUME(dst_at, src_at, plane)                                                   \
	{                                                                               \
		.dst = (dst_at) + (plane)*25 * 128, .src = (src_at) + (plane)*21 * 200, \
		.len = 100, .count = 20, .dst_stride = 128, .src_stride = 200           \
	}

static const struct gpu_rows some_rows[] = {
	{.dst = 100, .src = 3, .len = 1000, .count = 1, .dst_stride = 1, .src_stride = 7},
	{.dst = 5000,
	 .src = 2000,
	 .len = 64,
	 .count = 500,
	 .dst_stride = 80,
	 .src_stride = 64}, /* pitched */
	{.dst = 100000,
	 .src = 90000,
	 .len = 32,
	 .count = 700,
	 .dst_stride = 32,
	 .src_stride = -48}, /* backwards */
	{.dst = 200000,
	 .src = 300000,
	 .len = 4096,
	 .count = 100,
	 .dst_stride = 4096,
	 .src_stride = 4096}, /* one piece */
	{.dst = 1000000,
	 .src = 1000,
	 .len = 16,
	 .count = 1000,
	 .dst_stride = 24,
	 .src_stride = 8}, /* source rows overlap */
	VOLUME(2000000, 1500000, 0),
	VOLUME(2000000, 1500000, 1), /* planes … */
	VOLUME(2000000, 1500000, 2),
	VOLUME(2100000, 1600000, 0), /* … of two volumes, the second … */
	VOLUME(2100000, 1600000, 2),
	{.dst = 2200000,
	 .src = 1700000,
	 .len = 100,
	 .count = 20,
	 .dst_stride = 128,
	 .src_stride = 200}, /* … and one that is a plane of none: not at a pitch */
	{.dst = 2300001,
	 .src = 1800000,
	 .len = 100,
	 .count = 20,
	 .dst_stride = 128,
	 .src_stride = 200},
};
#define ROWS (sizeof(some_rows) / sizeof(some_rows[0]))

static void assert_copied(struct bench *b, const struct gpu_rows *rows, size_t count)
{
	uint8_t *want = malloc(4 * MIB);

	assert_non_null(want);
	memset(want, 0xee, 4 * MIB);
	for (size_t i = 0; i < count; i++)
		for (uint64_t row = 0; row < rows[i].count; row++)
			memcpy(want + rows[i].dst + row * (uint64_t)rows[i].dst_stride,
			       b->from.view + rows[i].src +
				       row * (uint64_t)rows[i].src_stride,
			       rows[i].len);
	assert_memory_equal(b->to.view, want, 4 * MIB);
	free(want);
}

static void lane_copies(enum gpu_handle_kind kind, unsigned int src, unsigned int dst)
{
	struct bench b;

	bench_start(&b, kind, src, dst);
	assert_int_equal(bench_open(&b, kind, true), 0);
	assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
	assert_copied(&b, some_rows, ROWS);
	bench_end(&b);
}

static void lane_moves_rows_of_each_form(void **state)
{
	(void)state;
	lane_copies(GPU_HANDLE_IPC, 0, 0);
	lane_copies(GPU_HANDLE_VMM, 1, 1);
}

/* How many calls of either kind for the rows of each form. */
static void lane_moves_planes_by_one_call(void **state)
{
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_IPC, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
	assert_copied(&b, some_rows, ROWS);
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemcpy3DAsync_v2"), 2);
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemcpy2DAsync_v2"), 3);
	bench_end(&b);
}

/* "may fail for pitches not computed by cuMemAllocPitch": the rows then go singly, and
 * whatever else the driver says of such a call is the copy's fault. */
static void lane_refused_pitched_copy_copies_rows_singly(void **state)
{
	static const char *const names[] = {"cuMemcpy2DAsync_v2", "cuMemcpy3DAsync_v2"};
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_IPC, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		memset(b.to.view, 0xee, b.to.bytes);
		FAKE(fake_cuda_fail)(NULL, 0, 0);
		FAKE(fake_cuda_fail)(names[i], 1, CU_ERROR_INVALID_VALUE);
		assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
		assert_copied(&b, some_rows, ROWS);
		FAKE(fake_cuda_fail)(names[i], 1, CU_ERROR_UNKNOWN);
		assert_error(lane_run(&b, some_rows, ROWS), ERR_IO, "DAsync");
	}
	bench_end(&b);
}

static void lane_moves_rows_between_devices(void **state)
{
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_IPC, 0, 1);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	assert_true(gpu_device_pair(b.dst->device, b.src->device));
	assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
	assert_copied(&b, some_rows, ROWS);
	bench_close(&b);
	assert_int_equal(setenv("FAKE_CUDA_NO_PEER", "1", 1), 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	assert_false(gpu_device_pair(b.dst->device, b.src->device));
	assert_int_equal(unsetenv("FAKE_CUDA_NO_PEER"), 0);
	bench_end(&b);
}

/* One row more than a batch, so that there are two. */
static void lane_moves_more_rows_than_a_batch(void **state)
{
	struct gpu_rows rows[600];
	struct bench b;

	(void)state;
	for (size_t i = 0; i < 600; i++)
		rows[i] = (struct gpu_rows){
			.dst = i * 1000, .src = (600 - i) * 900, .len = 500, .count = 1};
	bench_start(&b, GPU_HANDLE_IPC, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	assert_int_equal(lane_run(&b, rows, 600), 0);
	assert_copied(&b, rows, 600);
	assert_int_equal(FAKE(fake_cuda_calls)("cuMemcpyBatchAsync_v2"), 2);
	bench_end(&b);
}

static void lane_outlives_the_exporter(void **state)
{
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_IPC, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	gpu_owner_kill(&b.from);
	assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
	assert_copied(&b, some_rows, ROWS);
	bench_end(&b);
}

/* A write where only reading is allowed kills the context, as a bad address
 * would; the device can be used again when its users have left. */
static void device_broken_is_reset_by_last_user(void **state)
{
	struct gpu_import *im = NULL;
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_VMM, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_VMM, false), 0);
	assert_error(lane_run(&b, some_rows, 1), ERR_IO, "CUDA_ERROR_ILLEGAL_ADDRESS");
	assert_true(gpu_device_broken(b.dst->device));
	assert_int_equal(b.to.view[100], 0xee);
	assert_error(gpu_import(b.gpu, 9, &b.from.handle, false, &im), ERR_IO,
		     "not reset yet");
	bench_close(&b);
	assert_int_equal(bench_open(&b, GPU_HANDLE_VMM, true), 0);
	assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
	assert_copied(&b, some_rows, ROWS);
	bench_end(&b);
}

/* Without a proof that nothing moves, drain waits; and nothing new begins. */
static void lane_drains_until_it_is_quiesced(void **state)
{
	struct gpu_import *im = NULL;
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_IPC, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	for (unsigned int n = 1; n <= 12; n++)
		FAKE(fake_cuda_fail)("cuStreamSynchronize", n, CU_ERROR_UNKNOWN);
	FAKE(fake_cuda_pace)(2000);
	assert_int_equal(gpu_lane_copy(b.lane, &(struct gpu_rows){.dst = b.dst->address,
								  .src = b.src->address,
								  .len = 4 * MIB,
								  .count = 1}),
			 0);
	assert_int_equal(gpu_lane_mark(b.lane, &(uint64_t){0}), 0);
	gpu_lane_drain(b.lane);
	FAKE(fake_cuda_pace)(0);
	assert_int_equal(FAKE(fake_cuda_calls)("cuStreamSynchronize"), 13);
	assert_memory_equal(b.to.view, b.from.view, 4 * MIB);
	assert_true(gpu_device_broken(b.device));
	assert_error(gpu_import(b.gpu, 9, &b.from.handle, false, &im), ERR_IO,
		     "not reset yet");
	bench_close(&b);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	bench_end(&b);
}

/* A result that kvd does not know, to whatever is asked: a GPU that has fallen off its
 * bus. Nothing runs there any more, and nobody waits for it. */
static void lane_of_dead_context_is_drained(void **state)
{
	struct bench b;

	(void)state;
	bench_start(&b, GPU_HANDLE_IPC, 0, 0);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	for (unsigned int n = 1; n <= 40; n++) {
		FAKE(fake_cuda_fail)("cuStreamSynchronize", n, CU_ERROR_UNKNOWN);
		/* once it answers: that does not count as dead */
		if (n != 5)
			FAKE(fake_cuda_fail)("cuMemGetInfo_v2", n, CU_ERROR_UNKNOWN);
	}
	gpu_lane_drain(b.lane);
	assert_true(FAKE(fake_cuda_calls)("cuStreamSynchronize") < 40);
	assert_true(FAKE(fake_cuda_calls)("cuMemGetInfo_v2") > 10);
	assert_true(gpu_device_broken(b.device));
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	bench_close(&b);
	assert_int_equal(bench_open(&b, GPU_HANDLE_IPC, true), 0);
	assert_int_equal(lane_run(&b, some_rows, ROWS), 0);
	assert_copied(&b, some_rows, ROWS);
	bench_end(&b);
}

/* ---- every call fails once ---- */

static int whole_way(struct bench *b, enum gpu_handle_kind kind)
{
	int r = bench_open(b, kind, true);
	struct err err;

	if (r == 0)
		(void)gpu_device_pair(b->dst->device, b->src->device);
	if (r == 0)
		r = lane_run(b, some_rows, ROWS);
	err_take(&err);
	bench_close(b);
	return r < 0 ? err_reraise(&err) : 0;
}

static bool closes(const char *name)
{
	return !strcmp(name, "cuIpcCloseMemHandle") || !strcmp(name, "cuMemUnmap") ||
	       !strcmp(name, "cuMemAddressFree") || !strcmp(name, "cuMemRelease") ||
	       !strcmp(name, "cuDevicePrimaryCtxRelease_v2");
}

/* Fail the n-th call of `name`: the fault is told or does no harm, nothing stays,
 * nothing hangs, and the next time all is well. */
static void fail_one(struct bench *b, enum gpu_handle_kind kind, const char *name,
		     unsigned int n, int code)
{
	int before = FAKE(fake_cuda_live)(), r;

	FAKE(fake_cuda_fail)(NULL, 0, 0);
	FAKE(fake_cuda_fail)(name, n, code);
	memset(b->to.view, 0xee, b->to.bytes);
	r = whole_way(b, kind);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	if (r == 0)
		assert_copied(b, some_rows, ROWS);
	else if (err_last()->code == ERR_OK)
		fail_msg("%s %u: a failure without a record", name, n);
	err_clear();
	/* what could not be closed is the driver's to keep; all else is gone */
	if (!closes(name) && FAKE(fake_cuda_live)() != before)
		fail_msg("%s %u, code %d: %d things stay", name, n, code,
			 FAKE(fake_cuda_live)() - before);
	memset(b->to.view, 0xee, b->to.bytes);
	if (whole_way(b, kind) < 0)
		fail_msg("%s %u, code %d: no recovery: %s", name, n, code,
			 err_last()->text);
	assert_copied(b, some_rows, ROWS);
}

static void fail_each(enum gpu_handle_kind kind, unsigned int src, unsigned int dst)
{
	static const int codes[] = {CU_ERROR_OUT_OF_MEMORY, CU_ERROR_UNKNOWN,
				    CU_ERROR_LAUNCH_FAILED};
	const char *names[64];
	unsigned int counts[64], count = 0;
	struct bench b;

	bench_start(&b, kind, src, dst);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	assert_int_equal(whole_way(&b, kind), 0);
	while (FAKE(fake_cuda_called)(count) && count < 64) {
		names[count] = FAKE(fake_cuda_called)(count);
		counts[count] = FAKE(fake_cuda_calls)(names[count]);
		count++;
	}
	assert_true(count > 15);
	for (unsigned int i = 0; i < count; i++)
		for (unsigned int n = 1; n <= counts[i]; n++)
			for (size_t c = 0; c < sizeof(codes) / sizeof(codes[0]); c++)
				fail_one(&b, kind, names[i], n, codes[c]);
	gpu_owner_end(&b.from);
	gpu_owner_end(&b.to);
	gpu_free(b.gpu);
}

static void call_failed_once_fails_one_use_ipc(void **state)
{
	(void)state;
	fail_each(GPU_HANDLE_IPC, 0, 1);
}

static void call_failed_once_fails_one_use_vmm(void **state)
{
	(void)state;
	fail_each(GPU_HANDLE_VMM, 0, 0);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(driver_absent_is_refused_by_name),
		cmocka_unit_test(driver_of_old_lacks_its_features),
		cmocka_unit_test(driver_failed_is_retried),
		cmocka_unit_test(results_permanent_are_cached),
		cmocka_unit_test(uuid_read_and_written_is_the_same),
		cmocka_unit_test(device_is_found_by_uuid_and_pci_id),
		cmocka_unit_test(device_not_allowed_is_refused),
		cmocka_unit_test(device_context_exists_while_used),
		cmocka_unit_test(device_without_context_names_remedy),
		cmocka_unit_test(import_shares_one_opening),
		cmocka_unit_test(import_where_one_is_open_is_refused_by_name),
		cmocka_unit_test(import_of_unknown_length_is_queried_twice),
		cmocka_unit_test(import_for_reading_takes_device_length),
		cmocka_unit_test(import_from_dead_exporter_is_refused),
		cmocka_unit_test(import_under_wrong_name_is_refused),
		cmocka_unit_test(import_by_fd_of_anything_else_is_refused),
		cmocka_unit_test(lane_moves_rows_of_each_form),
		cmocka_unit_test(lane_moves_planes_by_one_call),
		cmocka_unit_test(lane_refused_pitched_copy_copies_rows_singly),
		cmocka_unit_test(lane_moves_rows_between_devices),
		cmocka_unit_test(lane_moves_more_rows_than_a_batch),
		cmocka_unit_test(lane_outlives_the_exporter),
		cmocka_unit_test(device_broken_is_reset_by_last_user),
		cmocka_unit_test(lane_drains_until_it_is_quiesced),
		cmocka_unit_test(lane_of_dead_context_is_drained),
		cmocka_unit_test(call_failed_once_fails_one_use_ipc),
		cmocka_unit_test(call_failed_once_fails_one_use_vmm),
	};

	gpu_owner_main(argc, argv);
	log_threshold = -1; /* every fault is provoked */
	gpu_fake_path("", fake_path);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
