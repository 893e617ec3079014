/* SPDX-License-Identifier: Apache-2.0 */
/* ring_attend: posts of query rows, as entries of the ring. */
#ifndef KVD_RING_ATTEND_H
#define KVD_RING_ATTEND_H

#include "daemon/xfer/ring.h"

struct xfer_payload;

/* KVD_RING_ATTEND */
int ring_attend(struct ring *ring, const struct kvd_ring_entry *e,
		const struct xfer_payload *arena);

#endif
