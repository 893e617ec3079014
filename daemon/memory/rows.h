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

/* Pending rows: of one length, to be copied in parallel, and a long one, while its page
 * table entries are fetched. Zeroed at first. */
#define ROWS_LANES 4u
struct rows_lanes {
	unsigned int count;
	uint64_t len;
	uint8_t *dst[ROWS_LANES];
	const uint8_t *src[ROWS_LANES];
	struct rows next; /* its count 0: none */
};

/* In all of these rows may overlap; their bytes are then undefined, and the order of rows
 * is unspecified. `streaming`: bypassing the caches, for copies larger than they are;
 * rows_fence() must follow before completion is reported. */
void rows_copy(const struct rows *rows, bool streaming);
void rows_fence(void);

/* As rows_copy(rows, true), but rows may wait in `lanes` for later calls:
 * rows_stream_end() copies the remaining ones. */
void rows_stream(const struct rows *rows, struct rows_lanes *lanes);
void rows_stream_end(struct rows_lanes *lanes);

/* For tests: use only features that every machine of this architecture has. */
void rows_use_baseline(bool baseline);

#endif
