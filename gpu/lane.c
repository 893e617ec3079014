/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How rows become driver calls:
 *
 *   - rows at equal distances, both of them forward and not overlapping: one
 *     pitched copy (cuMemcpy2DAsync), as long as the pitch is one the device
 *     takes;
 *   - everything else is single copies, gathered up to LANE_BATCH and given to
 *     the driver in one call (cuMemcpyBatchAsync of CUDA 13), or one by one
 *     where the driver has no such call.
 *
 * A batch refuses the legacy stream and is not ordered within itself; the lane's
 * stream is its own, and rows of a plan do not depend on each other.
 *
 * Streams do not synchronise with the legacy stream (CU_STREAM_NON_BLOCKING):
 * nothing else in this process could be waiting there. They have the lowest
 * priority, so that an engine's kernels in the same context group go first;
 * between processes the driver decides by time slices.
 *
 * Marks are events that block the waiting thread instead of spinning: copy
 * threads are many hundred microseconds long here and cores belong to engines.
 *
 * Drain is the fence. A stream that cannot be synchronised is tried again; when
 * the driver calls the context dead, nothing runs in it any more. While it says
 * neither, drain does not return: a transfer stays aborting, its memory held, the
 * device begins nothing new and the log says why. (Rejected: resetting the
 * context, which ends all its work, but under the calls of other threads.)
 */
#include "gpu/lane.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <time.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "gpu/gpu.h"

#define LANE_BATCH 512u
#define LANE_PITCHED_MIN 2u /* rows from which a pitched copy is one call less */
#define DRAIN_TRIES 10u
#define DRAIN_PAUSE_NS 10000000

struct gpu_lane {
	struct list link; /* device->lanes while idle */
	struct gpu_device *device;
	struct cu_stream *stream;
	struct cu_event *events[GPU_LANE_MARKS];
	uint64_t marks, waited;
	void *bounces[GPU_LANE_BOUNCES];
	size_t batch_count;
	uint64_t dsts[LANE_BATCH], srcs[LANE_BATCH];
	size_t sizes[LANE_BATCH];
};

static const struct cudrv *drv_of(const struct gpu_lane *lane)
{
	return &lane->device->gpu->drv;
}

/* ---- taking ---- */

static void lane_free(struct gpu_lane *lane)
{
	const struct cudrv *drv = drv_of(lane);

	for (unsigned int i = 0; i < GPU_LANE_BOUNCES; i++)
		if (lane->bounces[i])
			(void)drv->host_free(lane->bounces[i]);
	for (unsigned int i = 0; i < GPU_LANE_MARKS; i++)
		if (lane->events[i])
			(void)drv->event_destroy(lane->events[i]);
	if (lane->stream)
		(void)drv->stream_destroy(lane->stream);
	mem_free(lane);
}

static int lane_fill(struct gpu_lane *lane)
{
	const struct cudrv *drv = drv_of(lane);
	int result = drv->stream_create(&lane->stream, CU_STREAM_NON_BLOCKING,
					lane->device->priority);

	if (result != CU_SUCCESS) {
		lane->stream = NULL;
		return gpu_raise(lane->device, result, ERR_IO, "making a stream");
	}
	for (unsigned int i = 0; i < GPU_LANE_MARKS; i++) {
		result = drv->event_create(&lane->events[i], CU_EVENT_BLOCKING_SYNC |
						   CU_EVENT_DISABLE_TIMING);
		if (result == CU_SUCCESS)
			continue;
		lane->events[i] = NULL;
		return gpu_raise(lane->device, result, ERR_IO, "making an event");
	}
	return 0;
}

int gpu_lane_take(struct gpu_device *device, struct gpu_lane **lane_p)
{
	struct gpu_lane *lane;
	struct list *idle;
	int r;

	pthread_mutex_lock(&device->lock);
	idle = list_pop_front(&device->lanes);
	pthread_mutex_unlock(&device->lock);
	if (idle) {
		*lane_p = list_entry(idle, struct gpu_lane, link);
		return 0;
	}
	lane = mem_zalloc(sizeof(*lane));
	if (!lane)
		return err_pass(-ENOMEM);
	list_init(&lane->link);
	lane->device = device;
	r = lane_fill(lane);
	if (r < 0) {
		lane_free(lane);
		return err_pass(r);
	}
	*lane_p = lane;
	return 0;
}

void gpu_lane_give(struct gpu_lane *lane)
{
	struct gpu_device *device = lane->device;

	lane->batch_count = 0;
	lane->waited = lane->marks;
	pthread_mutex_lock(&device->lock);
	list_push_front(&device->lanes, &lane->link);
	pthread_mutex_unlock(&device->lock);
}

void gpu_lanes_free(struct gpu_device *device)
{
	struct list *idle;
	bool entered;

	if (list_empty(&device->lanes))
		return;
	entered = gpu_enter(device) == 0;
	if (!entered)
		err_clear();
	while ((idle = list_pop_front(&device->lanes)))
		lane_free(list_entry(idle, struct gpu_lane, link));
	if (entered)
		gpu_leave(device);
}

/* ---- queueing ---- */

static int flush_singly(struct gpu_lane *lane)
{
	int result = CU_SUCCESS;

	for (size_t i = 0; i < lane->batch_count && result == CU_SUCCESS; i++)
		result = drv_of(lane)->copy(lane->dsts[i], lane->srcs[i], lane->sizes[i],
					    lane->stream);
	lane->batch_count = 0;
	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuMemcpyAsync");
	return 0;
}

static int batch_flush(struct gpu_lane *lane)
{
	struct cu_copy_attributes attributes = {.src_order = CU_MEMCPY_SRC_ORDER_STREAM,
						.flags = CU_MEMCPY_PREFER_OVERLAP};
	size_t first = 0;
	int result;

	if (lane->batch_count == 0)
		return 0;
	if (lane->batch_count == 1 || !drv_of(lane)->has[CUDRV_BATCH])
		return err_pass(flush_singly(lane));
	result = drv_of(lane)->copy_batch(lane->dsts, lane->srcs, lane->sizes,
					  lane->batch_count, &attributes, &first, 1,
					  lane->stream);
	lane->batch_count = 0;
	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuMemcpyBatchAsync");
	return 0;
}

static int single_add(struct gpu_lane *lane, uint64_t dst, uint64_t src, uint64_t len)
{
	size_t last = lane->batch_count - 1;

	if (lane->batch_count > 0 && lane->dsts[last] + lane->sizes[last] == dst &&
	    lane->srcs[last] + lane->sizes[last] == src) {
		lane->sizes[last] += len;
		return 0;
	}
	if (lane->batch_count == LANE_BATCH) {
		int r = batch_flush(lane);

		if (r < 0)
			return err_pass(r);
	}
	lane->dsts[lane->batch_count] = dst;
	lane->srcs[lane->batch_count] = src;
	lane->sizes[lane->batch_count] = len;
	lane->batch_count++;
	return 0;
}

static bool pitched(const struct gpu_lane *lane, const struct gpu_rows *rows)
{
	uint64_t most = lane->device->max_pitch;

	return !rows->flat && rows->count >= LANE_PITCHED_MIN && rows->dst_stride > 0 &&
	       rows->src_stride > 0 && (uint64_t)rows->dst_stride >= rows->len &&
	       (uint64_t)rows->src_stride >= rows->len &&
	       (uint64_t)rows->dst_stride <= most && (uint64_t)rows->src_stride <= most;
}

static int pitched_copy(struct gpu_lane *lane, const struct gpu_rows *rows)
{
	const struct cu_copy2d copy = {.src_type = CU_MEMORYTYPE_UNIFIED,
				       .src_device = rows->src,
				       .src_pitch = (size_t)rows->src_stride,
				       .dst_type = CU_MEMORYTYPE_UNIFIED,
				       .dst_device = rows->dst,
				       .dst_pitch = (size_t)rows->dst_stride,
				       .width = rows->len,
				       .height = rows->count};
	int result = drv_of(lane)->copy2d(&copy, lane->stream);

	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuMemcpy2DAsync");
	return 0;
}

int gpu_lane_copy(struct gpu_lane *lane, const struct gpu_rows *rows)
{
	uint64_t dst = rows->dst, src = rows->src;
	int r = 0;

	if (rows->dst_stride == (int64_t)rows->len &&
	    rows->src_stride == (int64_t)rows->len)
		return err_pass(single_add(lane, dst, src, rows->len * rows->count));
	if (pitched(lane, rows))
		return err_pass(pitched_copy(lane, rows));
	for (uint64_t i = 0; i < rows->count && r == 0; i++) {
		r = single_add(lane, dst, src, rows->len);
		dst += (uint64_t)rows->dst_stride;
		src += (uint64_t)rows->src_stride;
	}
	return err_pass(r);
}

/* ---- marks ---- */

int gpu_lane_mark(struct gpu_lane *lane, uint64_t *mark_p)
{
	int r = batch_flush(lane), result;

	if (r < 0)
		return err_pass(r);
	assert(lane->marks - lane->waited < GPU_LANE_MARKS);
	result = drv_of(lane)->event_record(lane->events[lane->marks % GPU_LANE_MARKS],
					    lane->stream);
	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuEventRecord");
	*mark_p = lane->marks++;
	return 0;
}

int gpu_lane_wait(struct gpu_lane *lane, uint64_t mark)
{
	int result = drv_of(lane)->event_sync(lane->events[mark % GPU_LANE_MARKS]);

	assert(mark >= lane->waited && mark < lane->marks);
	lane->waited = mark + 1;
	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuEventSynchronize");
	return 0;
}

int gpu_lane_bounce(struct gpu_lane *lane, unsigned int index, void **bounce_p)
{
	int result;

	assert(index < GPU_LANE_BOUNCES);
	if (!lane->bounces[index]) {
		result = drv_of(lane)->host_alloc(&lane->bounces[index],
						  GPU_LANE_BOUNCE_BYTES,
						  CU_MEMHOSTALLOC_PORTABLE);
		if (result != CU_SUCCESS) {
			lane->bounces[index] = NULL;
			return gpu_raise(lane->device, result, ERR_NOMEM,
					 "cuMemHostAlloc");
		}
	}
	*bounce_p = lane->bounces[index];
	return 0;
}

void gpu_lane_drain(struct gpu_lane *lane)
{
	const struct timespec pause = {.tv_nsec = DRAIN_PAUSE_NS};
	int result;

	lane->batch_count = 0;
	for (unsigned int tries = 1;; tries++) {
		result = drv_of(lane)->stream_sync(lane->stream);
		if (result == CU_SUCCESS)
			return;
		(void)gpu_raise(lane->device, result, ERR_IO, "cuStreamSynchronize");
		if (cudrv_sticky(result))
			break;
		if (tries == DRAIN_TRIES)
			gpu_device_break(lane->device);
		(void)nanosleep(&pause, NULL);
	}
	err_clear();
}
