/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_pool: registered memory of the daemon, in slots, for packed transfers: one pool
 * for sending (movers' buffers), and one for each peer (the slots that it may write; its
 * key opens no other peer's bytes).
 */
#ifndef KVD_TRANSPORT_VERBS_POOL_H
#define KVD_TRANSPORT_VERBS_POOL_H

#include <stdatomic.h>

#include "daemon/loop/offload.h"
#include "daemon/memory/copy.h"
#include "daemon/transport/verbs/verbs_impl.h"

#define VERBS_SLOTS 8u
#define VERBS_SLOT_BYTES (UINT64_C(256) << 10)
#define VERBS_POOL_BYTES (VERBS_SLOTS * VERBS_SLOT_BYTES)

/* A slot at the receiver, or a buffer at the mover, and the copy that it is in. */
struct slice {
	struct copy_job job;
	struct verbs_xfer *xfer; /* NULL: free */
	struct list link;	 /* pack.cut, in the stream's order */
	uint64_t length;
	uint32_t index; /* of this */
	uint32_t slot;	/* mover: the peer's */
	bool copying, packed, posted;
};

struct verbs_pool {
	struct verbs_transport *transport;
	struct verbs_peer *peer; /* the peer of the slots; NULL: movers' buffers, or
				  * closed */
	struct memory *memory;
	struct xp_reg *reg;
	struct slice slices[VERBS_SLOTS];
	uint32_t free;	     /* bits */
	struct list waiting; /* verbs_pack.wait_link: receivers without a slot */
	bool ready;	     /* its memory is registered */
	struct offload_job open, close;
	atomic_int phase; /* of `open`: which side releases the pool */
};

/* Synchronously: when a transport opens. */
int verbs_pool_open(struct verbs_transport *transport, struct verbs_pool **pool_p);
/* On a helper. When it is `ready` the peer is kicked; when that fails, the peer has no
 * pool any more, its waiting transfers are stopped, and the peer is kicked, too. */
int verbs_pool_order(struct verbs_peer *peer);
/* Every slot is free. A helper releases the memory. NULL is allowed. */
void verbs_pool_close(struct verbs_pool *pool);

uint8_t *verbs_pool_at(const struct verbs_pool *pool, uint32_t index);
void verbs_pool_free(struct verbs_pool *pool, struct slice *slice);

#endif
