/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How rows become driver calls:
 *
 *   - short rows (gpu->kernel_row_bytes), where there are kernels: entries of a
 *     list in pinned memory, one launch for all of them at the next mark. A copy
 *     engine takes about a microsecond for any row, a warp as long as its bytes
 *     take. An entry is what one warp does; rows that follow each other at equal
 *     distances, at two levels, share one;
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
#include "gpu/kern.h"

#define LANE_BATCH 512u
#define LANE_LIST 10240u /* entries of a list, 640 KiB */
#define LANE_PITCHED_MIN 2u /* rows from which a pitched copy is one call less */
#define DRAIN_TRIES 10u
#define DRAIN_PAUSE_NS 10000000

struct gpu_lane {
	struct list link; /* device->lanes while idle */
	struct gpu_device *device;
	struct cu_stream *stream;
	struct cu_event *events[GPU_LANE_MARKS];
	uint64_t marks, waited;
	void *bounces[GPU_LANE_SETS];
	struct kern_rows *lists[GPU_LANE_SETS];
	bool begun;		/* the stretch that is being queued: */
	uint64_t kernel_below;	/* rows for the kernel; 0: none */
	struct kern_rows *list; /* where they go, LANE_LIST entries */
	uint32_t list_count;	/* entries of the stretch that is being queued … */
	struct kern_rows entry; /* … and the one after them, while it can grow */
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

	for (unsigned int i = 0; i < GPU_LANE_SETS; i++) {
		if (lane->bounces[i])
			(void)drv->host_free(lane->bounces[i]);
		if (lane->lists[i])
			(void)drv->host_free(lane->lists[i]);
	}
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
	lane->begun = false;
	lane->list_count = 0;
	lane->entry.count = 0;
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

static int engine_copy(struct gpu_lane *lane, const struct gpu_rows *rows)
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

/* ---- the kernel's list ---- */

/* The list of the stretch that is being queued; NULL: the kernel must do without. */
static struct kern_rows *list_of(struct gpu_lane *lane)
{
	struct kern_rows **list_p = &lane->lists[lane->marks % GPU_LANE_SETS];
	void *list = *list_p;
	int result;

	if (lane->marks - lane->waited >= GPU_LANE_SETS)
		return NULL; /* a launch may still read it */
	if (list)
		return list;
	result = drv_of(lane)->host_alloc(&list, LANE_LIST * sizeof(**list_p),
					  CU_MEMHOSTALLOC_PORTABLE);
	if (result == CU_SUCCESS) {
		*list_p = list;
		return list;
	}
	(void)gpu_raise(lane->device, result, ERR_NOMEM, "cuMemHostAlloc");
	gpu_module_off(lane->device);
	return NULL;
}

/* Make `e` part of the last entry, if the two together are of one form. */
static bool entry_join(struct kern_rows *last, const struct kern_rows *e)
{
	int64_t dst = (int64_t)(e->dst - last->dst), src = (int64_t)(e->src - last->src);
	uint64_t rows = (uint64_t)last->count * last->outer + e->count;

	if (last->count == 0 || last->len != e->len || rows * e->len > KERN_ENTRY_BYTES)
		return false;
	if (last->outer == 1 && e->count == 1 &&
	    (last->count == 1 || (dst == last->dst_stride * last->count &&
				  src == last->src_stride * last->count))) {
		if (last->count == 1) {
			last->dst_stride = dst;
			last->src_stride = src;
		}
		last->count++;
		return true;
	}
	if (last->count != e->count || last->count == 1 ||
	    last->dst_stride != e->dst_stride || last->src_stride != e->src_stride)
		return false;
	if (last->outer > 1 && (dst != last->dst_outer * last->outer ||
				src != last->src_outer * last->outer))
		return false;
	if (last->outer == 1) {
		last->dst_outer = dst;
		last->src_outer = src;
	}
	last->outer++;
	return true;
}

/* False: the list is full. */
static bool entry_add(struct gpu_lane *lane, struct kern_rows *list,
		      const struct kern_rows *e)
{
	if (entry_join(&lane->entry, e))
		return true;
	if (lane->list_count + 1 >= LANE_LIST)
		return false;
	if (lane->entry.count > 0)
		list[lane->list_count++] = lane->entry;
	lane->entry = *e;
	return true;
}

/* Entries of about KERN_ENTRY_BYTES. False: the list is full, the rest of the rows
 * is in *rows. */
static bool rows_add(struct gpu_lane *lane, struct kern_rows *list, struct gpu_rows *rows)
{
	uint64_t most = rows->count;

	if (most * rows->len > KERN_ENTRY_BYTES) /* else: a division is a row's time */
		most = KERN_ENTRY_BYTES / rows->len;
	while (rows->count > 0) {
		struct kern_rows e = {.dst = rows->dst,
				      .src = rows->src,
				      .dst_stride = rows->dst_stride,
				      .src_stride = rows->src_stride,
				      .len = (uint32_t)rows->len,
				      .count = (uint32_t)(rows->count < most ? rows->count
									     : most),
				      .outer = 1};

		if (!entry_add(lane, list, &e))
			return false;
		rows->dst += (uint64_t)rows->dst_stride * e.count;
		rows->src += (uint64_t)rows->src_stride * e.count;
		rows->count -= e.count;
	}
	return true;
}

/* A row that is longer than an entry: parts of it are rows, too. */
static bool row_add(struct gpu_lane *lane, struct kern_rows *list, uint64_t dst,
		    uint64_t src, uint64_t len)
{
	struct gpu_rows parts = {.dst = dst,
				 .src = src,
				 .len = KERN_ENTRY_BYTES,
				 .count = len / KERN_ENTRY_BYTES,
				 .dst_stride = KERN_ENTRY_BYTES,
				 .src_stride = KERN_ENTRY_BYTES};
	struct gpu_rows rest = {.dst = dst + parts.count * KERN_ENTRY_BYTES,
				.src = src + parts.count * KERN_ENTRY_BYTES,
				.len = len % KERN_ENTRY_BYTES,
				.count = 1};

	/* moved twice where the list ends in between: by the kernel and an engine */
	return rows_add(lane, list, &parts) && (rest.len == 0 || rows_add(lane, list, &rest));
}

/* *rows: what is left for the engines. */
static void kernel_copy(struct gpu_lane *lane, struct gpu_rows *rows)
{
	if (rows->len <= KERN_ENTRY_BYTES) {
		(void)rows_add(lane, lane->list, rows);
		return;
	}
	while (rows->count > 0 &&
	       row_add(lane, lane->list, rows->dst, rows->src, rows->len)) {
		rows->dst += (uint64_t)rows->dst_stride;
		rows->src += (uint64_t)rows->src_stride;
		rows->count--;
	}
}

/* What does not change before the next mark is looked up once: a plan of short rows
 * comes here ten thousands of times, and the device waits for it. */
static void stretch_begin(struct gpu_lane *lane)
{
	const struct gpu *gpu = lane->device->gpu;

	lane->begun = true;
	lane->kernel_below = 0;
	if (gpu->kernel_row_bytes == 0 || !gpu_module_ready(lane->device))
		return;
	lane->list = list_of(lane);
	if (lane->list)
		lane->kernel_below = gpu->kernel_row_bytes;
}

int gpu_lane_copy(struct gpu_lane *lane, const struct gpu_rows *rows)
{
	struct gpu_rows left = *rows;

	if (!lane->begun)
		stretch_begin(lane);
	if (left.count > 1 && left.dst_stride == (int64_t)left.len &&
	    left.src_stride == (int64_t)left.len) {
		left.len *= left.count;
		left.dst_stride = left.src_stride = (int64_t)left.len;
		left.count = 1;
	}
	if (left.len < lane->kernel_below && left.len > 0 && !left.engines)
		kernel_copy(lane, &left);
	return left.count > 0 ? err_pass(engine_copy(lane, &left)) : 0;
}

/* The kernel was not to be launched: its rows go by the engines. */
static int list_by_engines(struct gpu_lane *lane, const struct kern_rows *list)
{
	int r = 0;

	for (uint32_t i = 0; i < lane->list_count && r == 0; i++) {
		const struct kern_rows *e = &list[i];

		for (uint32_t o = 0; o < e->outer && r == 0; o++) {
			struct gpu_rows rows = {
				.dst = e->dst + (uint64_t)e->dst_outer * o,
				.src = e->src + (uint64_t)e->src_outer * o,
				.len = e->len,
				.count = e->count,
				.dst_stride = e->dst_stride,
				.src_stride = e->src_stride};

			r = engine_copy(lane, &rows);
		}
	}
	return err_pass(r);
}

static int list_launch(struct gpu_lane *lane)
{
	struct kern_rows *list = lane->list;
	int result, r = 0;

	lane->begun = false;
	if (lane->entry.count == 0)
		return 0;
	list[lane->list_count++] = lane->entry;
	lane->entry.count = 0;
	result = gpu_module_ready(lane->device)
			 ? gpu_module_rows(lane->device, (uintptr_t)list,
					   lane->list_count, lane->stream)
			 : CU_ERROR_NOT_FOUND; /* given up by another lane */
	if (result != CU_SUCCESS) {
		r = gpu_raise(lane->device, result, ERR_IO, "cuLaunchKernel");
		if (!cudrv_sticky(result)) {
			gpu_module_off(lane->device);
			r = list_by_engines(lane, list);
		}
	}
	lane->list_count = 0;
	return err_pass(r);
}

/* ---- marks ---- */

int gpu_lane_mark(struct gpu_lane *lane, uint64_t *mark_p)
{
	int r = list_launch(lane), result;

	if (r == 0)
		r = batch_flush(lane);
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

	assert(index < GPU_LANE_SETS);
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
	lane->begun = false;
	lane->list_count = 0;
	lane->entry.count = 0;
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
