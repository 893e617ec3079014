/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows become driver calls in two forms: short ones (gpu->kernel_row_bytes), if kernels
 * are loaded, are put into a list in pinned memory (list.h), one launch for all of them
 * at the next mark; the others by copy engine (engines.h). A copy engine takes about a
 * microsecond for any row, a warp as long as its bytes take.
 *
 * Streams do not synchronise with the legacy stream (CU_STREAM_NON_BLOCKING): nothing
 * else in this process could be waiting there. They have the lowest priority, so that an
 * engine's kernels in the same context group have priority; between processes the driver
 * decides by time slices.
 *
 * Marks are events that block the waiting thread, for cores belong to engines. But a
 * wake-up takes many times as long as a kernel for a request's pages: so the thread polls
 * for about that long first.
 *
 * Drain is the fence. A stream that cannot be synchronised is tried again; when the
 * driver reports the context dead, nothing runs in it any more. It does so by a result
 * that is known to be permanent, or by repeating one result for a query that is unrelated
 * to the stream ("any further CUDA work will return the same error"). Until it reports
 * either, drain does not return: a transfer stays aborting, its memory held, the device
 * starts nothing new and the log has the reason. (Rejected: resetting the context, which
 * ends all its work, but under the calls of other threads.)
 */
#include "gpu/lane.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "gpu/gpu.h"
#include "gpu/list.h"

#define DRAIN_TRIES 10u
#define DRAIN_PAUSE_NS 10000000
#define ASK_NS 50000

struct gpu_lane {
	struct list link; /* device->lanes while idle */
	struct gpu_device *device;
	struct cu_stream *stream;
	struct cu_event *events[GPU_LANE_MARKS];
	uint64_t marks, waited;
	void *bounces[GPU_LANE_SETS];
	void *lists[GPU_LANE_SETS];
	void *room;	  /* gpu_lane_room()'s: pinned, … */
	uint64_t room_at; /* … and of the device */
	size_t room_bytes, room_at_bytes;
	bool begun; /* the stretch that is being queued: */
	/* for the kernel: rows within the device, calls of others; 0: none */
	uint64_t kernel_below, kernel_host_below;
	bool host;	       /* some of the list's are others */
	struct gpu_list list;  /* their destination */
	struct gpu_kept *kept; /* where to keep the list; NULL: not kept */
	struct gpu_engines engines;
};

static const struct cudrv *drv_of(const struct gpu_lane *lane)
{
	return &lane->device->gpu->drv;
}

/* ---- taking ---- */

static void room_free(struct gpu_lane *lane)
{
	if (lane->room)
		(void)drv_of(lane)->host_free(lane->room);
	lane->room = NULL;
	lane->room_bytes = 0;
}

static void room_at_free(struct gpu_lane *lane)
{
	if (lane->room_at)
		(void)drv_of(lane)->mem_free(lane->room_at);
	lane->room_at = lane->room_at_bytes = 0;
}

static void lane_free(struct gpu_lane *lane)
{
	const struct cudrv *drv = drv_of(lane);

	for (unsigned int i = 0; i < GPU_LANE_SETS; i++) {
		if (lane->bounces[i])
			(void)drv->host_free(lane->bounces[i]);
		if (lane->lists[i])
			(void)drv->host_free(lane->lists[i]);
	}
	room_free(lane);
	room_at_free(lane);
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
		result = drv->event_create(&lane->events[i],
					   CU_EVENT_BLOCKING_SYNC |
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
	lane->engines.device = device;
	lane->engines.stream = lane->stream;
	if (r < 0) {
		lane_free(lane);
		return err_pass(r);
	}
	*lane_p = lane;
	return 0;
}

/* Unqueued rows are never queued. */
static void stretch_drop(struct gpu_lane *lane)
{
	lane->begun = false;
	lane->list.entries = NULL;
	lane->kept = NULL;
	gpu_engines_drop(&lane->engines);
}

void gpu_lane_give(struct gpu_lane *lane)
{
	struct gpu_device *device = lane->device;

	assert(lane->waited <= lane->marks);
	stretch_drop(lane);
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

/* Memory for the list of the stretch that is being queued; NULL: the kernel must do
 * without. */
static void *lane_list_memory(struct gpu_lane *lane)
{
	void **list_p = &lane->lists[lane->marks % GPU_LANE_SETS];
	void *list = *list_p;
	int result;

	if (lane->marks - lane->waited >= GPU_LANE_SETS)
		return NULL; /* a launch may be reading it */
	if (list)
		return list;
	result =
		drv_of(lane)->host_alloc(&list, GPU_LIST_BYTES, CU_MEMHOSTALLOC_PORTABLE);
	if (result == CU_SUCCESS) {
		*list_p = list;
		return list;
	}
	(void)gpu_raise(lane->device, result, ERR_NOMEM, "cuMemHostAlloc");
	gpu_module_off(lane->device);
	return NULL;
}

/* Values that do not change before the next mark are looked up once: a plan of short rows
 * calls this tens of thousands of times, and the device waits for it. */
static void stretch_begin(struct gpu_lane *lane)
{
	const struct gpu *gpu = lane->device->gpu;
	void *memory;

	lane->begun = true;
	lane->kernel_below = lane->kernel_host_below = 0;
	lane->host = false;
	lane->list.entries = NULL;
	if (gpu->kernel_row_bytes == 0 || !gpu_module_ready(lane->device))
		return;
	memory = lane_list_memory(lane);
	if (!memory)
		return;
	gpu_list_begin(&lane->list, memory);
	lane->kernel_below = gpu->kernel_row_bytes;
	lane->kernel_host_below = gpu->kernel_row_bytes < GPU_KERNEL_HOST_BYTES
					  ? gpu->kernel_row_bytes
					  : GPU_KERNEL_HOST_BYTES;
}

static bool for_kernel(const struct gpu_lane *lane, const struct gpu_rows *rows)
{
	if (rows->len == 0 || rows->engines)
		return false;
	if (!rows->host)
		return rows->len < lane->kernel_below;
	return gpu_engines_at_once(&lane->engines, rows) < lane->kernel_host_below;
}

int gpu_lane_copy(struct gpu_lane *lane, const struct gpu_rows *rows)
{
	struct gpu_rows left = *rows;

	assert(rows->count > 0 && rows->len > 0);
	if (!lane->begun)
		stretch_begin(lane);
	if (left.count > 1 && left.dst_stride == (int64_t)left.len &&
	    left.src_stride == (int64_t)left.len) {
		left.len *= left.count;
		left.dst_stride = left.src_stride = (int64_t)left.len;
		left.count = 1;
	}
	if (for_kernel(lane, &left)) {
		lane->host |= left.host;
		(void)gpu_list_rows(&lane->list, &left);
	}
	return left.count > 0 ? err_pass(gpu_engines_copy(&lane->engines, &left)) : 0;
}

struct kern_place *gpu_lane_places(struct gpu_lane *lane, uint64_t len, bool host,
				   uint32_t *room_p)
{
	struct kern_place *places;

	if (!lane->begun)
		stretch_begin(lane);
	if (len >= (host ? lane->kernel_host_below : lane->kernel_below))
		return NULL;
	lane->host |= host;
	places = gpu_list_places(&lane->list, len, room_p);
	return places && *room_p > 0 ? places : NULL;
}

void gpu_lane_placed(struct gpu_lane *lane, uint64_t len, uint32_t count, uint64_t bits)
{
	assert(lane->begun && count > 0);
	gpu_list_placed(&lane->list, len, count, bits);
}

static int take_by_engines(void *arg, const struct gpu_rows *rows)
{
	struct gpu_lane *lane = arg;

	return err_pass(gpu_engines_copy(&lane->engines, rows));
}

/* On the device if it is to stay there, else from where it was written. */
static int list_rows(struct gpu_lane *lane, const struct gpu_list *list)
{
	uint64_t entries = (uintptr_t)list->entries, places = (uintptr_t)list->places;
	int result;

	if (!gpu_module_ready(lane->device))
		return CU_ERROR_NOT_FOUND; /* given up by another lane */
	if (lane->kept && !lane->engines.used) {
		result = gpu_keep_copy(lane->device, lane->kept, list, lane->stream);
		if (cudrv_sticky(result))
			return result;
		if (result == CU_SUCCESS) {
			entries = lane->kept->entries_at;
			places = lane->kept->address;
		}
	}
	return gpu_module_rows(lane->device, entries, places, list->count, lane->host,
			       lane->stream);
}

/* 0; 1: it was not to be launched, and no other will be. */
static int launched(struct gpu_lane *lane, int result)
{
	int r;

	if (result == CU_SUCCESS)
		return 0;
	r = gpu_raise(lane->device, result, ERR_IO, "cuLaunchKernel");
	if (cudrv_sticky(result))
		return err_pass(r);
	gpu_module_off(lane->device);
	return 1;
}

/* Copy engines copy the rows of a kernel that was not to be launched. */
static int list_launch(struct gpu_lane *lane, struct gpu_list *list)
{
	int r;

	if (gpu_list_end(list) == 0)
		return 0;
	r = launched(lane, list_rows(lane, list));
	return err_pass(r > 0 ? gpu_list_each(list, take_by_engines, lane) : r);
}

void gpu_lane_keep(struct gpu_lane *lane, struct gpu_kept *kept)
{
	assert(!kept || !lane->kept);
	lane->kept = kept;
}

int gpu_lane_again(struct gpu_lane *lane, const struct gpu_kept *kept)
{
	assert(kept->count > 0);
	assert(!lane->begun);
	if (!gpu_module_ready(lane->device))
		return 1;
	return launched(lane,
			gpu_module_rows(lane->device, kept->entries_at, kept->address,
					kept->count, false, lane->stream));
}

/* ---- marks ---- */

int gpu_lane_mark(struct gpu_lane *lane, uint64_t *mark_p)
{
	int r = lane->list.entries ? list_launch(lane, &lane->list) : 0, result;

	if (r == 0)
		r = gpu_engines_flush(&lane->engines);
	stretch_drop(lane); /* it is over: its unqueued rows are never queued */
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

static int lane_event_wait(const struct cudrv *drv, struct cu_event *event)
{
	const uint64_t until = clock_ns() + ASK_NS;
	int result;

	do {
		result = drv->event_query(event);
	} while (result == CU_ERROR_NOT_READY && clock_ns() < until);
	return result == CU_ERROR_NOT_READY ? drv->event_sync(event) : result;
}

int gpu_lane_wait(struct gpu_lane *lane, uint64_t mark)
{
	int result = lane_event_wait(drv_of(lane), lane->events[mark % GPU_LANE_MARKS]);

	assert(mark >= lane->waited && mark < lane->marks);
	lane->waited = mark + 1;
	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "waiting for copies");
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

int gpu_lane_room(struct gpu_lane *lane, size_t host_bytes, size_t bytes, void **host_p,
		  uint64_t *address_p)
{
	const struct cudrv *drv = drv_of(lane);
	int result;

	if (lane->room_bytes < host_bytes) {
		room_free(lane);
		result = drv->host_alloc(&lane->room, host_bytes,
					 CU_MEMHOSTALLOC_PORTABLE);
		if (result != CU_SUCCESS) {
			lane->room = NULL;
			return gpu_raise(lane->device, result, ERR_NOMEM,
					 "cuMemHostAlloc");
		}
		lane->room_bytes = host_bytes;
	}
	if (lane->room_at_bytes < bytes) {
		room_at_free(lane);
		result = drv->mem_alloc(&lane->room_at, bytes);
		if (result != CU_SUCCESS) {
			lane->room_at = 0;
			return gpu_raise(lane->device, result, ERR_NOMEM, "cuMemAlloc");
		}
		lane->room_at_bytes = bytes;
	}
	*host_p = lane->room;
	*address_p = lane->room_at;
	return 0;
}

int gpu_lane_bytes(struct gpu_lane *lane, uint64_t dst, uint64_t src, size_t bytes)
{
	int result = drv_of(lane)->copy(dst, src, bytes, lane->stream);

	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuMemcpyAsync");
	return 0;
}

int gpu_lane_launch(struct gpu_lane *lane, struct cu_function *kernel, uint32_t x,
		    uint32_t y, uint32_t threads, void *argument)
{
	void *params[] = {argument};
	int result = drv_of(lane)->launch(kernel, x, y, 1, threads, 1, 1, 0, lane->stream,
					  params, NULL);

	if (result != CU_SUCCESS)
		return gpu_raise(lane->device, result, ERR_IO, "cuLaunchKernel");
	return 0;
}

/* Does the driver return this for the whole context? */
static bool answered_alike(const struct gpu_lane *lane, int result)
{
	size_t free_bytes, bytes;

	return drv_of(lane)->mem_info(&free_bytes, &bytes) == result;
}

void gpu_lane_drain(struct gpu_lane *lane)
{
	const struct timespec pause = {.tv_nsec = DRAIN_PAUSE_NS};
	unsigned int alike = 0;
	int result;

	stretch_drop(lane);
	for (unsigned int tries = 1; alike < DRAIN_TRIES; tries++) {
		result = drv_of(lane)->stream_sync(lane->stream);
		if (result == CU_SUCCESS)
			return;
		(void)gpu_raise(lane->device, result, ERR_IO, "cuStreamSynchronize");
		if (cudrv_sticky(result))
			break;
		if (tries == DRAIN_TRIES)
			gpu_device_break(lane->device);
		if (tries >= DRAIN_TRIES)
			alike = answered_alike(lane, result) ? alike + 1 : 0;
		(void)nanosleep(&pause, NULL);
	}
	err_clear();
}
