/* SPDX-License-Identifier: Apache-2.0 */
/*
 * histogram: counts of durations or sizes, in buckets that double: of times up to 1 us, 2
 * us, 4 us … One writer; a reader in another thread reads each value atomically, but not
 * all at one moment.
 */
#ifndef KVD_BASE_HISTOGRAM_H
#define KVD_BASE_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_BUCKETS 24u /* the last has no upper end: times, over 4 s */

struct histogram {
	uint64_t count, sum, max;
	uint64_t buckets[HISTOGRAM_BUCKETS]; /* i: up to first * 2^i, over half of it */
};

/* `first`: the end of the first bucket, the same at each call. */
void histogram_put(struct histogram *h, uint64_t value, uint64_t first);
/* Times in ns, from 1 us on. */
static inline void histogram_add(struct histogram *h, uint64_t ns)
{
	histogram_put(h, ns, 1000);
}
/* Upper end of a bucket; UINT64_MAX for the last. */
uint64_t histogram_end(unsigned int bucket, uint64_t first);
/* The value that `permille` of all samples do not exceed: the upper end of its bucket, or
 * the maximum where that is less. 0 when empty. */
uint64_t histogram_quantile(const struct histogram *h, unsigned int permille,
			    uint64_t first);

#endif
