/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys in GPU memory are rotated by a kernel (kvd_splice of gpu/attend.cu) in the
 * engine's process, in the context that has the memory: the daemon's kernels would take
 * turns with the engine's. One launch a field, in a stream of its own, for which this
 * thread waits.
 *
 * The driver is the one that the engine has loaded. Nothing is kept between calls, as
 * contexts end without notice: the image is loaded and unloaded each time.
 */
#include <stddef.h>

#include "daemon/base/err.h"
#include "gpu/attend_kern.h"
#include "gpu/cudrv.h"
#include "lib/client_splice.h"

#define BLOCKS_MAX 4096u
#define WARPS (ATTEND_KERN_THREADS / KERN_LANES) /* rows of a block */

#ifdef SPLICE_FILE /* of nvcc */
__asm__(".pushsection .rodata, \"a\", %progbits\n"
	".balign 16\n"
	"kvd_splice_image:\n"
	".incbin \"" SPLICE_FILE "\"\n"
	".popsection\n");

extern const unsigned char kvd_splice_image[];
static const void *const image = kvd_splice_image;
#else
static const void *const image = NULL;
#endif

struct run {
	struct cudrv drv;
	struct cu_ctx *ctx;
	int device;
	bool primary; /* the device's context */
	struct cu_module *module;
	uint64_t memory; /* cos, sin, pages of all views */
	struct cu_stream *stream;
	unsigned int made; /* of these three */
	struct cu_function *kernel;
};

/* Unless something failed before. */
#define TRY(name, call) ((void)(r >= 0 && (r = run_check(run, run->drv.call, name)) >= 0))

static int run_check(const struct run *run, int result, const char *name)
{
	return result == CU_SUCCESS ? 0
				    : cudrv_raise(&run->drv, result, ERR_IO, "%s", name);
}

/* Memory of cuMemCreate has no context: it is open to the device's. */
static int run_enter(struct run *run, const struct attend_kern_splice *fields,
		     size_t count)
{
	int device, r = cudrv_load("libcuda.so.1", &run->drv);

	if (r >= 0 && !(run->drv.has[CUDRV_KERNELS] && image))
		r = err_raise(ERR_REQUIRE, "%s",
			      image ? "the CUDA driver cannot load kernels"
				    : "this libkvd was built without nvcc");
	for (size_t i = 0; i < count && r >= 0; i++) {
		TRY("pool: cuPointerGetAttribute",
		    pointer_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
				      fields[i].src.base));
		if (r >= 0 && i > 0 && device != run->device)
			r = err_raise(ERR_REQUIRE, "pool: its keys are on several GPUs");
		run->device = device;
	}
	if (r < 0)
		return err_pass(r);
	run->primary = run->drv.pointer_attribute(&run->ctx, CU_POINTER_ATTRIBUTE_CONTEXT,
						  fields[0].src.base) != CU_SUCCESS ||
		       !run->ctx;
	if (run->primary)
		TRY("cuDevicePrimaryCtxRetain", ctx_retain(&run->ctx, run->device));
	if (r < 0)
		return err_pass(r);
	TRY("cuCtxPushCurrent", ctx_push(run->ctx));
	if (r < 0 && run->primary)
		(void)run->drv.ctx_release(run->device);
	return err_pass(r);
}

static int run_make(struct run *run, size_t bytes)
{
	int r = 0;

	TRY("cuModuleLoadData", module_load(&run->module, image));
	run->made += r >= 0;
	TRY("cuMemAlloc", mem_alloc(&run->memory, bytes));
	run->made += r >= 0;
	TRY("cuStreamCreateWithPriority",
	    stream_create(&run->stream, CU_STREAM_NON_BLOCKING, 0));
	run->made += r >= 0;
	TRY("cuModuleGetFunction",
	    module_function(&run->kernel, run->module, "kvd_splice"));
	return err_pass(r);
}

static void run_leave(struct run *run)
{
	if (run->made > 2) {
		(void)run->drv.stream_sync(run->stream); /* if something failed before */
		(void)run->drv.stream_destroy(run->stream);
	}
	if (run->made > 1)
		(void)run->drv.mem_free(run->memory);
	if (run->made > 0)
		(void)run->drv.module_unload(run->module);
	(void)run->drv.ctx_pop(&run->ctx);
	if (run->primary)
		(void)run->drv.ctx_release(run->device);
}

/* So many bytes at *at_p, which is advanced. */
static int run_put(const struct run *run, uint64_t *at_p, const void *data, size_t bytes)
{
	int r = 0;

	TRY("cuMemcpyAsync", copy(*at_p, (uintptr_t)data, bytes, run->stream));
	*at_p += bytes;
	return err_pass(r);
}

static int run_fields(const struct run *run, struct attend_kern_splice *fields,
		      size_t count, bool *written_p)
{
	int r = 0;

	for (size_t i = 0; i < count && r >= 0; i++) {
		uint64_t blocks =
			(uint64_t)fields[i].tokens * fields[i].heads / WARPS + 1;
		unsigned int x = blocks < BLOCKS_MAX ? (unsigned int)blocks : BLOCKS_MAX;
		void *params[] = {&fields[i]};

		fields[i].turn.at = run->memory;
		fields[i].to.pages += run->memory;
		fields[i].from = fields[i].to;
		*written_p = true;
		TRY("cuLaunchKernel", launch(run->kernel, x, 1, 1, ATTEND_KERN_THREADS, 1,
					     1, 0, run->stream, params, NULL));
	}
	TRY("cuStreamSynchronize", stream_sync(run->stream));
	return err_pass(r);
}

int splice_gpu(const struct kvd_splice *splice, const struct rope_turn *turn,
	       struct attend_kern_splice *fields, size_t count, size_t pages,
	       bool *written_p)
{
	const size_t half = turn->dims / 2 * sizeof(float);
	struct run run = {.made = 0};
	uint64_t at;
	int r = run_enter(&run, fields, count);

	if (r < 0)
		return err_pass(r);
	r = run_make(&run, 2 * half + pages * sizeof(uint32_t));
	at = run.memory;
	if (r >= 0)
		r = run_put(&run, &at, turn->cos, half);
	if (r >= 0)
		r = run_put(&run, &at, turn->sin, half);
	for (size_t i = 0; i < splice->view_count && r >= 0; i++)
		r = run_put(&run, &at, splice->views[i].pages,
			    splice->views[i].page_count * sizeof(uint32_t));
	if (r >= 0)
		r = run_fields(&run, fields, count, written_p);
	run_leave(&run);
	return err_pass(r);
}
