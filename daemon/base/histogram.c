/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/histogram.h"

void histogram_add(struct histogram *h, uint64_t ns)
{
	uint64_t us = ns / 1000;
	unsigned int bucket = us ? 64 - (unsigned int)__builtin_clzll(us) : 0;

	if (bucket >= HISTOGRAM_BUCKETS)
		bucket = HISTOGRAM_BUCKETS - 1;
	h->buckets[bucket]++;
	h->count++;
	h->sum_ns += ns;
	if (ns > h->max_ns)
		h->max_ns = ns;
}

uint64_t histogram_bucket_us(unsigned int bucket)
{
	return bucket + 1 < HISTOGRAM_BUCKETS ? UINT64_C(1) << bucket : UINT64_MAX;
}

double histogram_quantile_us(const struct histogram *h, unsigned int permille)
{
	double max_us = (double)h->max_ns / 1000, end;
	/* rounded up: the slowest of ten is what 950 of 1000 were not longer than */
	uint64_t rank = (h->count * permille + 999) / 1000, seen = 0;

	for (unsigned int i = 0; i < HISTOGRAM_BUCKETS && h->count; i++) {
		seen += h->buckets[i];
		end = (double)histogram_bucket_us(i);
		if (seen >= rank)
			return end < max_us ? end : max_us;
	}
	return 0;
}
