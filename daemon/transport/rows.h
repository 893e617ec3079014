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

/* Rows may overlap; their bytes are then undefined. `streaming`: past the
 * caches, for copies larger than they are; rows_fence() must follow before
 * anybody is told. */
void rows_copy(const struct rows *rows, bool streaming);
void rows_fence(void);

#endif
