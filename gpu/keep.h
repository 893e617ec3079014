/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep: lists for the kernel (list.h) that stay on a device with the plan that they were
 * made from, for when it is posted again: then its rows cost a launch.
 *
 * A list holds addresses, so it is known by the plan, by the list's start in it, and by
 * the address of each buffer of the plan. The result of its check is not kept: the finder
 * of a list has checked the plan against the buffers, as for any other post.
 *
 * For threads that are users of the device with its context current; all is freed with
 * the context.
 */
#ifndef KVD_GPU_KEEP_H
#define KVD_GPU_KEEP_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"

struct gpu_device;
struct gpu_list;
struct cu_stream;

#define GPU_KEEP_BYTES (UINT64_C(16) << 20) /* of one device's memory */
#define GPU_KEEP_LISTS 256u
#define GPU_KEEP_PLANS 64u   /* last seen */
#define GPU_KEEP_BASES 1024u /* plans of more buffers are not kept */

/* in struct gpu_device */
struct gpu_keep {
	pthread_mutex_t lock; /* of all this, and of `uses` and `ready` */
	struct list lists;    /* last used last */
	unsigned int count;
	uint64_t bytes;
	uint64_t seen[GPU_KEEP_PLANS];
	unsigned int next;
};

struct gpu_keep_key {
	uint64_t plan, begin;
	const uint64_t *bases; /* of the sources, then of the destinations */
	uint32_t src_count, base_count;
};

struct gpu_kept {
	struct list link;
	uint64_t plan, begin, end;
	uint64_t *bases;
	uint32_t src_count, base_count;
	unsigned int uses; /* launches that may be reading it, or its making */
	bool ready;	   /* complete, for all streams */
	uint64_t address;  /* places, then entries */
	uint64_t bytes, entries_at;
	uint32_t count;
};

/* Was the plan seen recently? Records it. */
bool gpu_keep_seen(struct gpu_device *device, uint64_t plan);
/* A list that is ready, with one more use; NULL: none. */
struct gpu_kept *gpu_keep_find(struct gpu_device *device, const struct gpu_keep_key *key);
/* One to be made, used by its maker. NULL: it exists, or there is no space. */
struct gpu_kept *gpu_keep_new(struct gpu_device *device, const struct gpu_keep_key *key);
/* Memory for an ended list, and the list copied there on the stream. The driver's result:
 * on failure nothing of it remains. */
int gpu_keep_copy(struct gpu_device *device, struct gpu_kept *kept,
		  const struct gpu_list *list, struct cu_stream *stream);
/* A use has ended. `good`: and if it was the maker's, the list is complete. NULL is
 * allowed. */
void gpu_keep_release(struct gpu_device *device, struct gpu_kept *kept, bool good);

/* For gpu.c: the context is being released, nothing is in flight. */
void gpu_keep_drop(struct gpu_device *device);

#endif
