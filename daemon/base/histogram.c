/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/histogram.h"

#include <assert.h>

void histogram_put(struct histogram *h, uint64_t value, uint64_t first)
{
	uint64_t over = value ? (value - 1) / first : 0;
	unsigned int bucket = over ? 64 - (unsigned int)__builtin_clzll(over) : 0;

	if (bucket >= HISTOGRAM_BUCKETS)
		bucket = HISTOGRAM_BUCKETS - 1;
	h->buckets[bucket]++;
	h->count++;
	h->sum += value;
	if (value > h->max)
		h->max = value;
}

uint64_t histogram_end(unsigned int bucket, uint64_t first)
{
	assert(first <= UINT64_MAX >> HISTOGRAM_BUCKETS);
	return bucket + 1 < HISTOGRAM_BUCKETS ? first << bucket : UINT64_MAX;
}

uint64_t histogram_quantile(const struct histogram *h, unsigned int permille,
			    uint64_t first)
{
	/* rounded up: with ten samples, the 950 per mille value is the slowest */
	uint64_t rank = (h->count * permille + 999) / 1000, seen = 0, end;

	for (unsigned int i = 0; i < HISTOGRAM_BUCKETS && h->count; i++) {
		seen += h->buckets[i];
		end = histogram_end(i, first);
		if (seen >= rank)
			return end < h->max ? end : h->max;
	}
	return 0;
}
