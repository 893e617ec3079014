/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spans: the received bytes of a stream, so that each counts once.
 *
 * A sorted array of half-open intervals. Slices arrive nearly in order, so there are one
 * or two intervals; a peer that scatters them past SPANS_MAX breaks the protocol.
 */
#ifndef KVD_TRANSPORT_SPANS_H
#define KVD_TRANSPORT_SPANS_H

#include <stddef.h>
#include <stdint.h>

#define SPANS_MAX 256u

struct spans {
	struct span {
		uint64_t begin, end;
	} * items;
	size_t count, cap;
	uint64_t bytes; /* in all intervals */
};

void spans_fini(struct spans *spans); /* a zeroed one is allowed */
/* ERR_PROTO when a byte of [begin, begin + length) was received before or there would be
 * too many intervals; ERR_NOMEM. The caller has checked for overflow. */
int spans_add(struct spans *spans, uint64_t begin, uint64_t length);

#endif
