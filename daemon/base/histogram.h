/* SPDX-License-Identifier: Apache-2.0 */
/*
 * histogram: how long things took, in buckets that double: below 1 us, 2 us, 4 us …
 * One writer; whoever reads in another thread reads each figure whole, not all of
 * one moment.
 */
#ifndef KVD_BASE_HISTOGRAM_H
#define KVD_BASE_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_BUCKETS 24u /* the last has no upper end: over 4 s */

struct histogram {
	uint64_t count, sum_ns, max_ns;
	uint64_t buckets[HISTOGRAM_BUCKETS]; /* i: below 2^i us, not below half of it */
};

void histogram_add(struct histogram *h, uint64_t ns);
/* Upper end of a bucket in us; UINT64_MAX for the last. */
uint64_t histogram_bucket_us(unsigned int bucket);
/* A time that `permille` of all were not longer than, in us: the upper end of its
 * bucket, or the longest of all where that is less. 0 when empty. */
double histogram_quantile_us(const struct histogram *h, unsigned int permille);

#endif
