/* SPDX-License-Identifier: Apache-2.0 */
/*
 * list: rows for the kernel, as kern.h has them, built up in memory that the device
 * reads: entries, and the places that some of them name. A list is one launch, in any
 * order; it does not depend on its own address, so a copy of it works as well.
 *
 * Lists do not check addresses: the caller must have checked the rows.
 */
#ifndef KVD_GPU_LIST_H
#define KVD_GPU_LIST_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu/kern.h"

struct gpu_rows;

#define GPU_LIST_ENTRIES 10240u
#define GPU_LIST_PLACES 16384u
#define GPU_LIST_BYTES                                 \
	(GPU_LIST_ENTRIES * sizeof(struct kern_rows) + \
	 GPU_LIST_PLACES * sizeof(struct kern_place))

struct gpu_list {
	struct kern_rows *entries; /* NULL: no list */
	struct kern_place *places;
	uint32_t count, place_count;
	struct kern_rows open; /* the entry after them, while it can grow */
};

/* An empty list in GPU_LIST_BYTES of `memory`, aligned to 16. */
void gpu_list_begin(struct gpu_list *list, void *memory);
static inline bool gpu_list_empty(const struct gpu_list *list)
{
	return list->count == 0 && list->open.count == 0;
}

/* Add rows at equal distances. False: the list is full, the remaining rows are in
 * *rows. */
bool gpu_list_rows(struct gpu_list *list, struct gpu_rows *rows);

/* Space for the caller to write the places of irregular rows: *room_p of them at most,
 * which may be none. */
struct kern_place *gpu_list_places(struct gpu_list *list, uint64_t len, uint32_t *room_p);
/* The caller wrote this many, of rows of `len` bytes; `bits`: all their addresses, by
 * OR. */
void gpu_list_placed(struct gpu_list *list, uint64_t len, uint32_t count, uint64_t bits);

/* Ends the list; returns its number of entries. */
uint32_t gpu_list_end(struct gpu_list *list);

/* All of an ended list's rows to `take`, in turn, until it fails. */
int gpu_list_each(const struct gpu_list *list,
		  int (*take)(void *arg, const struct gpu_rows *rows), void *arg);

#endif
