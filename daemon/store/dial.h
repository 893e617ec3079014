/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dial: connects to the daemons of chunk_peers and chunk_index, from the start to the
 * end. After a transient failure it tries again, after a permanent one it does not;
 * either is logged once.
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
	struct remote *remote; /* held; NULL: not dialled */
	bool later;	       /* a retry is due */
};

/* `lack`: the log line while it cannot be dialled. True: it is dialled. */
bool dial_reach(struct store *store, struct dial *dial, const char *endpoint,
		const char *lack);
/* It is never dialled again: the fault that was raised is the reason. */
void dial_refuse(struct dial *dial, const char *endpoint, const char *lack);
void dial_end(struct dial *dial);

/* With CURVE keys a peer must be known to the allow-list or this host, and at a permitted
 * host. */
bool dial_is_allowed(const struct kvd *kvd, const char *endpoint);

#endif
