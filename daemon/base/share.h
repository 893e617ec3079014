/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share: may an owner take more of a shared resource, a table or bytes. The last eighth
 * is reserved for small owners (less than a 256th of all), so that one greedy owner does
 * not exclude all others. A table too small to share so is first come, first served.
 */
#ifndef KVD_SHARE_H
#define KVD_SHARE_H

#include <stdbool.h>
#include <stddef.h>

#define SHARE_FROM 256u

/* How many may be in use, of `cap`, before an owner of `own` may take another. */
static inline size_t share_cap(size_t cap, size_t own)
{
	if (cap < SHARE_FROM || own < cap / SHARE_FROM)
		return cap;
	return cap - cap / 8;
}

/* How many more an owner of `own` may have and remain a small owner. */
static inline size_t share_few(size_t cap, size_t own)
{
	if (cap < SHARE_FROM)
		return cap;
	return own + 1 < cap / SHARE_FROM ? cap / SHARE_FROM - 1 - own : 0;
}

static inline bool share_allows(size_t cap, size_t used, size_t own)
{
	return used < share_cap(cap, own);
}

#endif
