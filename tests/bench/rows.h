/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows: what all benches of one work move: rows of one length at places of two
 * regions. The same arguments make the same rows in every process.
 */
#ifndef KVD_BENCH_ROWS_H
#define KVD_BENCH_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#define ROWS_REGION_BYTES (UINT64_C(256) << 20)

/* `count` rows of `bytes` each; row i lies at from[i] and to[i] of its region. */
struct rows {
	uint64_t bytes, count;
	uint64_t *from, *to;
};

enum rows_places {
	ROWS_FLAT,	/* one behind the other */
	ROWS_SCATTERED, /* anywhere in the region, in no order, on both sides */
	ROWS_DENSE,	/* one behind the other at the source, shuffled at the
			   destination; nothing between them */
};

/* `total` bytes in rows of `bytes`. Ends the program when there is no memory. */
void rows_make(struct rows *rows, uint64_t bytes, uint64_t total,
	       enum rows_places places);
void rows_free(struct rows *rows);

/* Write over a memory twice as large as the last level of cache. */
void caches_sweep(void);

#endif
