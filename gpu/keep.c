/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transfer that an engine has prepared is posted many times, and its plan is made
 * once. To write a list of 40960 rows without order takes a processor 100 us and the
 * bus 15 us, while the GPU copies their 10 MiB in five.
 *
 * A plan seen once is not worth keeping: rooms make a plan each. With the second post the
 * list that is written anyway is copied to the device first and launched from there;
 * later posts launch it as it is. It counts as present only when the first launch from it
 * was waited for, since later ones are on other streams.
 *
 * Bounded in bytes and in number; the least recently used list is evicted, never one that
 * a launch may be reading.
 */
#include "gpu/keep.h"

#include <assert.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "gpu/gpu.h"
#include "gpu/list.h"

bool gpu_keep_seen(struct gpu_device *device, uint64_t plan)
{
	struct gpu_keep *keep = &device->keep;
	bool seen = false;

	pthread_mutex_lock(&keep->lock);
	for (unsigned int i = 0; i < GPU_KEEP_PLANS && !seen; i++)
		seen = keep->seen[i] == plan;
	if (!seen) {
		keep->seen[keep->next] = plan;
		keep->next = (keep->next + 1) % GPU_KEEP_PLANS;
	}
	pthread_mutex_unlock(&keep->lock);
	return seen;
}

static bool same(const struct gpu_kept *kept, const struct gpu_keep_key *key)
{
	return kept->plan == key->plan && kept->begin == key->begin &&
	       kept->src_count == key->src_count && kept->base_count == key->base_count &&
	       memcmp(kept->bases, key->bases, key->base_count * sizeof(*key->bases)) ==
		       0;
}

static struct gpu_kept *keep_find(struct gpu_keep *keep, const struct gpu_keep_key *key)
{
	struct gpu_kept *kept;

	list_foreach(kept, &keep->lists, link)
		if (same(kept, key))
			return kept;
	return NULL;
}

struct gpu_kept *gpu_keep_find(struct gpu_device *device, const struct gpu_keep_key *key)
{
	struct gpu_kept *kept;

	pthread_mutex_lock(&device->keep.lock);
	kept = keep_find(&device->keep, key);
	if (kept && kept->ready) {
		kept->uses++;
		list_remove(&kept->link);
		list_push_back(&device->keep.lists, &kept->link);
	} else {
		kept = NULL;
	}
	pthread_mutex_unlock(&device->keep.lock);
	return kept;
}

/* The device's memory is given back by the caller's context, if it lives. */
static void keep_kept_free(struct gpu_device *device, struct gpu_kept *kept)
{
	if (kept->address && !gpu_device_broken(device))
		(void)device->gpu->drv.mem_free(kept->address);
	list_remove(&kept->link);
	device->keep.count--;
	device->keep.bytes -= kept->bytes;
	mem_free(kept->bases);
	mem_free(kept);
}

/* False: all lists are in use. */
static bool room_make(struct gpu_device *device, uint64_t bytes)
{
	struct gpu_keep *keep = &device->keep;
	struct gpu_kept *kept;

	list_foreach_safe(kept, &keep->lists, link) {
		if (keep->bytes + bytes <= GPU_KEEP_BYTES && keep->count < GPU_KEEP_LISTS)
			return true;
		if (kept->uses == 0)
			keep_kept_free(device, kept);
	}
	return keep->bytes + bytes <= GPU_KEEP_BYTES && keep->count < GPU_KEEP_LISTS;
}

static struct gpu_kept *kept_new(const struct gpu_keep_key *key)
{
	struct gpu_kept *kept = mem_zalloc(sizeof(*kept));

	if (kept)
		kept->bases = mem_dup(key->bases, key->base_count * sizeof(*key->bases));
	if (!kept || !kept->bases) {
		mem_free(kept);
		err_clear(); /* slower, no fault */
		return NULL;
	}
	kept->plan = key->plan;
	kept->begin = key->begin;
	kept->src_count = key->src_count;
	kept->base_count = key->base_count;
	kept->uses = 1;
	list_init(&kept->link);
	return kept;
}

struct gpu_kept *gpu_keep_new(struct gpu_device *device, const struct gpu_keep_key *key)
{
	struct gpu_kept *kept = NULL;

	pthread_mutex_lock(&device->keep.lock);
	if (!keep_find(&device->keep, key) && room_make(device, 0))
		kept = kept_new(key);
	if (kept) {
		list_push_back(&device->keep.lists, &kept->link);
		device->keep.count++;
	}
	pthread_mutex_unlock(&device->keep.lock);
	return kept;
}

/* The lock is held. */
static int memory_take(struct gpu_device *device, struct gpu_kept *kept, uint64_t bytes)
{
	int result;

	if (!room_make(device, bytes))
		return CU_ERROR_OUT_OF_MEMORY;
	result = device->gpu->drv.mem_alloc(&kept->address, bytes);
	if (result != CU_SUCCESS) {
		kept->address = 0;
		return result;
	}
	kept->bytes = bytes;
	device->keep.bytes += bytes;
	return CU_SUCCESS;
}

int gpu_keep_copy(struct gpu_device *device, struct gpu_kept *kept,
		  const struct gpu_list *list, struct cu_stream *stream)
{
	const struct cudrv *drv = &device->gpu->drv;
	uint64_t places = list->place_count * sizeof(*list->places);
	uint64_t entries = list->count * sizeof(*list->entries);
	int result;

	assert(kept->uses > 0 && !kept->ready);
	pthread_mutex_lock(&device->keep.lock);
	result = memory_take(device, kept, places + entries);
	pthread_mutex_unlock(&device->keep.lock);
	if (result != CU_SUCCESS)
		return result;
	kept->entries_at = kept->address + places;
	kept->count = list->count;
	if (places > 0)
		result =
			drv->copy(kept->address, (uintptr_t)list->places, places, stream);
	if (result == CU_SUCCESS)
		result = drv->copy(kept->entries_at, (uintptr_t)list->entries, entries,
				   stream);
	if (result != CU_SUCCESS)
		kept->count = 0;
	return result;
}

void gpu_keep_release(struct gpu_device *device, struct gpu_kept *kept, bool good)
{
	if (!kept)
		return;
	pthread_mutex_lock(&device->keep.lock);
	assert(kept->uses > 0);
	kept->uses--;
	kept->ready = kept->ready || (good && kept->count > 0);
	if (kept->uses == 0 && !kept->ready)
		keep_kept_free(device, kept);
	pthread_mutex_unlock(&device->keep.lock);
}

void gpu_keep_drop(struct gpu_device *device)
{
	struct gpu_kept *kept;
	bool entered = false;

	if (!list_empty(&device->keep.lists)) {
		entered = gpu_enter(device) == 0;
		if (!entered)
			err_clear();
	}
	list_foreach_safe(kept, &device->keep.lists, link)
		keep_kept_free(device, kept);
	if (entered)
		gpu_leave(device);
	memset(device->keep.seen, 0, sizeof(device->keep.seen));
}
