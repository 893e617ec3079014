/* SPDX-License-Identifier: Apache-2.0 */
/* ring_room: what the submission ring's entries about rooms do. For ring_ops.c. */
#ifndef KVD_RING_ROOM_H
#define KVD_RING_ROOM_H

#include "daemon/xfer/ring.h"
#include "daemon/xfer/xfer_op.h"

/* OPEN, BIND, SEND: as ring_op(). */
int ring_room_pages(struct ring *ring, const struct kvd_ring_entry *entry,
		    struct xfer_payload *arena);
int ring_room_abort(struct ring *ring, const struct kvd_ring_entry *entry,
		    const struct xfer_payload *arena);
int ring_room_extend(struct ring *ring, const struct kvd_ring_entry *entry);
int ring_room_close(struct ring *ring, const struct kvd_ring_entry *entry);
/* CANCEL and RELEASE of a number that is no transfer's; false: no room's either. */
bool ring_room_cancel(struct ring *ring, uint64_t id);
bool ring_room_release(struct ring *ring, uint64_t id);

#endif
