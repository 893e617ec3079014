/* SPDX-License-Identifier: Apache-2.0 */
/* ring_chunk: what the submission ring's entries about chunks do, but for those with
 * pages (ring_room.c). For ring_ops.c. */
#ifndef KVD_RING_CHUNK_H
#define KVD_RING_CHUNK_H

#include "daemon/xfer/ring.h"
#include "daemon/xfer/xfer_op.h"

/* FIND, HOLD, HOLD_FAR: as ring_op(). */
int ring_chunk_ids(struct ring *ring, const struct kvd_ring_entry *entry,
		   const struct xfer_payload *arena);
/* CANCEL and RELEASE of a number that is no transfer's and no room's; false: nothing of
 * chunks has it either, and the slot may be nobody's. A move that is released keeps its
 * slot until it has ended. */
bool ring_chunk_cancel(struct ring *ring, uint64_t id);
bool ring_chunk_release(struct ring *ring, uint64_t id);

#endif
