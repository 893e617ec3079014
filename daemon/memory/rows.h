/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows: copying rows of equal length and distance, fast. Pure: memory of this
 * process, checked by the caller.
 */
#ifndef KVD_TRANSPORT_ROWS_H
#define KVD_TRANSPORT_ROWS_H

#include <stdbool.h>
#include <stdint.h>

struct rows {
	uint8_t *dst;
	const uint8_t *src;
	int64_t dst_stride, src_stride;
	uint64_t len, count;
};

/* Pending rows. Zeroed at first, but for `streaming`: stores bypass the caches, for
 * copies larger than they are; rows_fence() must follow before completion is reported. */
#define ROWS_LANES 4u
#define ROWS_LATE 16u
struct rows_lanes {
	bool streaming;
	/* of one length, to be copied in parallel */
	unsigned int count;
	uint64_t len;
	uint8_t *dst[ROWS_LANES];
	const uint8_t *src[ROWS_LANES];
	/* a long one, while its page table entries are fetched; its count 0: none */
	struct rows next;
	/* short ones, while they are fetched */
	struct rows_late {
		uint8_t *dst;
		const uint8_t *src;
		uint64_t len; /* 0: none */
	} late[ROWS_LATE];
	unsigned int turn; /* in late */
};

/* In all of these rows may overlap; their bytes are then undefined, and the order of rows
 * is unspecified. rows_copy(): of warm memory, at once. rows_put(): rows may wait in
 * `lanes` for later calls, until rows_end(). */
void rows_copy(const struct rows *rows);
void rows_put(const struct rows *rows, struct rows_lanes *lanes);
void rows_end(struct rows_lanes *lanes);
void rows_fence(void);

/* For tests: use only features that every machine of this architecture has. */
void rows_use_baseline(bool baseline);

#endif
