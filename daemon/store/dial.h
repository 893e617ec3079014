/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dial: the daemons that chunk_peers and chunk_index name are reached from the start to
 * the end. One that cannot be for want of something is tried again, one that never can be
 * is not; either is logged once.
 */
#ifndef KVD_STORE_DIAL_H
#define KVD_STORE_DIAL_H

#include <stdbool.h>

#include "daemon/loop/loop.h"

struct kvd;
struct remote;
struct store;

#define DIAL_AGAIN_NS (30 * LOOP_NS_PER_S)

struct dial {
	struct remote *remote; /* held; NULL: it is not */
	bool later;	       /* it may be, later */
};

/* `lack`: what it is not while it is not reached. True: it is. */
bool dial_reach(struct store *store, struct dial *dial, const char *endpoint,
		const char *lack);
/* It shall not be, whatever comes: the fault that was raised says why. */
void dial_refuse(struct dial *dial, const char *endpoint, const char *lack);
void dial_end(struct dial *dial);

/* Keys decide who may be a peer: then it is one that the allow-list or this host knows,
 * at a host where that one may be. */
bool dial_is_allowed(const struct kvd *kvd, const char *endpoint);

#endif
