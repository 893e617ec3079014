/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A call of the driver takes a microsecond or two, so the shape of the rows decides
 * which one:
 *
 *   - rows at equal distances, both of them forward and not overlapping, are one
 *     pitched copy (cuMemcpy2DAsync), as long as the pitch is one the device takes;
 *   - as many such rows again at a distance that is a whole number of pitches, on both
 *     sides: planes of one volume (cuMemcpy3DAsync), a call for all of them. The pages of
 *     each layer of a cache in one allocation are of this form. The volume waits for the
 *     next rows until other rows follow;
 *   - everything else is single copies, gathered and given to the driver together
 *     (cuMemcpyBatchAsync of CUDA 13), or one by one where it has no such call.
 *
 * A batch refuses the legacy stream and is not ordered within itself; the lane's
 * stream is its own, and rows of a plan do not depend on each other.
 *
 * cuda.h states that pitched copies within a device "may fail for pitches not computed by
 * cuMemAllocPitch", and an engine's strides are fixed. Such a refusal (an invalid value,
 * where nothing was queued) costs the one call: the rows are copied singly.
 */
#include "gpu/engines.h"

#include <assert.h>

#include "daemon/base/err.h"
#include "gpu/gpu.h"

#define PITCHED_MIN 2u /* rows from which a pitched copy is one call less */

/* ---- single copies ---- */

static int flush_singly(struct gpu_engines *e)
{
	int result = CU_SUCCESS;

	for (size_t i = 0; i < e->count && result == CU_SUCCESS; i++)
		result = e->device->gpu->drv.copy(e->dsts[i], e->srcs[i], e->sizes[i],
						  e->stream);
	e->count = 0;
	if (result != CU_SUCCESS)
		return gpu_raise(e->device, result, ERR_IO, "cuMemcpyAsync");
	return 0;
}

static int engines_batch_flush(struct gpu_engines *e)
{
	const struct cudrv *drv = &e->device->gpu->drv;
	struct cu_copy_attributes attributes = {.src_order = CU_MEMCPY_SRC_ORDER_STREAM,
						.flags = CU_MEMCPY_PREFER_OVERLAP};
	size_t first = 0;
	int result;

	if (e->count == 0)
		return 0;
	if (e->count == 1 || !drv->has[CUDRV_BATCH])
		return err_pass(flush_singly(e));
	result = drv->copy_batch(e->dsts, e->srcs, e->sizes, e->count, &attributes,
				 &first, 1, e->stream);
	e->count = 0;
	if (result != CU_SUCCESS)
		return gpu_raise(e->device, result, ERR_IO, "cuMemcpyBatchAsync");
	return 0;
}

static int single_add(struct gpu_engines *e, uint64_t dst, uint64_t src, uint64_t len)
{
	size_t last = e->count - 1;

	if (e->count > 0 && e->dsts[last] + e->sizes[last] == dst &&
	    e->srcs[last] + e->sizes[last] == src) {
		e->sizes[last] += len;
		return 0;
	}
	if (e->count == GPU_ENGINES_BATCH) {
		int r = engines_batch_flush(e);

		if (r < 0)
			return err_pass(r);
	}
	e->dsts[e->count] = dst;
	e->srcs[e->count] = src;
	e->sizes[e->count] = len;
	e->count++;
	return 0;
}

static int singly(struct gpu_engines *e, const struct gpu_rows *rows)
{
	uint64_t dst = rows->dst, src = rows->src;
	int r = 0;

	for (uint64_t i = 0; i < rows->count && r == 0; i++) {
		r = single_add(e, dst, src, rows->len);
		dst += (uint64_t)rows->dst_stride;
		src += (uint64_t)rows->src_stride;
	}
	return err_pass(r);
}

/* ---- pitched copies ---- */

static bool pitched(const struct gpu_engines *e, const struct gpu_rows *rows)
{
	uint64_t most = e->device->max_pitch;

	return !rows->flat && rows->count >= PITCHED_MIN && rows->dst_stride > 0 &&
	       rows->src_stride > 0 && (uint64_t)rows->dst_stride >= rows->len &&
	       (uint64_t)rows->src_stride >= rows->len &&
	       (uint64_t)rows->dst_stride <= most && (uint64_t)rows->src_stride <= most;
}

uint64_t gpu_engines_at_once(const struct gpu_engines *e, const struct gpu_rows *rows)
{
	return pitched(e, rows) ? rows->len * rows->count : rows->len;
}

static int copy2d(const struct gpu_engines *e)
{
	const struct cu_copy2d copy = {.src_type = CU_MEMORYTYPE_UNIFIED,
				       .src_device = e->group.src,
				       .src_pitch = (size_t)e->group.src_stride,
				       .dst_type = CU_MEMORYTYPE_UNIFIED,
				       .dst_device = e->group.dst,
				       .dst_pitch = (size_t)e->group.dst_stride,
				       .width = e->group.len,
				       .height = e->group.count};

	return e->device->gpu->drv.copy2d(&copy, e->stream);
}

static int copy3d(const struct gpu_engines *e)
{
	const struct cu_copy3d copy = {
		.src_type = CU_MEMORYTYPE_UNIFIED,
		.src_device = e->group.src,
		.src_pitch = (size_t)e->group.src_stride,
		.src_height = (size_t)(e->src_outer / e->group.src_stride),
		.dst_type = CU_MEMORYTYPE_UNIFIED,
		.dst_device = e->group.dst,
		.dst_pitch = (size_t)e->group.dst_stride,
		.dst_height = (size_t)(e->dst_outer / e->group.dst_stride),
		.width = e->group.len,
		.height = e->group.count,
		.depth = e->depth};

	return e->device->gpu->drv.copy3d(&copy, e->stream);
}

static int group_singly(struct gpu_engines *e, uint64_t depth)
{
	struct gpu_rows plane = e->group;
	int r = 0;

	for (uint64_t i = 0; i < depth && r == 0; i++) {
		r = singly(e, &plane);
		plane.dst += (uint64_t)e->dst_outer;
		plane.src += (uint64_t)e->src_outer;
	}
	return err_pass(r);
}

static int group_flush(struct gpu_engines *e)
{
	uint64_t depth = e->depth;
	int result;

	if (depth == 0)
		return 0;
	result = depth > 1 ? copy3d(e) : copy2d(e);
	e->depth = 0;
	if (result == CU_SUCCESS)
		return 0;
	if (result == CU_ERROR_INVALID_VALUE || result == CU_ERROR_NOT_SUPPORTED)
		return err_pass(group_singly(e, depth));
	return gpu_raise(e->device, result, ERR_IO, "%s",
			 depth > 1 ? "cuMemcpy3DAsync" : "cuMemcpy2DAsync");
}

/* Is a plane at this distance part of the same volume? */
static bool plane_fits(int64_t outer, int64_t stride, uint64_t count)
{
	return outer > 0 && outer % stride == 0 && (uint64_t)(outer / stride) >= count;
}

static bool group_join(struct gpu_engines *e, const struct gpu_rows *rows)
{
	const struct gpu_rows *g = &e->group;
	int64_t dst = (int64_t)(rows->dst - g->dst), src = (int64_t)(rows->src - g->src);

	if (e->depth == 0 || !e->device->gpu->drv.has[CUDRV_COPY3D] ||
	    g->len != rows->len || g->count != rows->count ||
	    g->dst_stride != rows->dst_stride || g->src_stride != rows->src_stride)
		return false;
	if (e->depth > 1)
		return (uint64_t)dst == (uint64_t)e->dst_outer * e->depth &&
		       (uint64_t)src == (uint64_t)e->src_outer * e->depth;
	if (!plane_fits(dst, g->dst_stride, g->count) ||
	    !plane_fits(src, g->src_stride, g->count))
		return false;
	e->dst_outer = dst;
	e->src_outer = src;
	return true;
}

static int group_add(struct gpu_engines *e, const struct gpu_rows *rows)
{
	int r;

	if (group_join(e, rows)) {
		e->depth++;
		return 0;
	}
	r = group_flush(e);
	if (r < 0)
		return err_pass(r);
	e->group = *rows;
	e->depth = 1;
	return 0;
}

/* ---- both ---- */

int gpu_engines_copy(struct gpu_engines *e, const struct gpu_rows *rows)
{
	assert(rows->count > 0 && rows->len > 0);
	e->used = true;
	if (rows->dst_stride == (int64_t)rows->len &&
	    rows->src_stride == (int64_t)rows->len)
		return err_pass(
			single_add(e, rows->dst, rows->src, rows->len * rows->count));
	if (pitched(e, rows))
		return err_pass(group_add(e, rows));
	return err_pass(singly(e, rows));
}

int gpu_engines_flush(struct gpu_engines *e)
{
	int r = group_flush(e);

	if (r == 0)
		r = engines_batch_flush(e);
	return err_pass(r);
}

void gpu_engines_drop(struct gpu_engines *e)
{
	e->used = false;
	e->count = 0;
	e->depth = 0;
}
