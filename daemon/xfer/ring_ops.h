/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_ops: what an entry of the submission ring does (proto/kvd_ring.h has the
 * words). Loop thread.
 */
#ifndef KVD_RING_OPS_H
#define KVD_RING_OPS_H

#include <stdint.h>

#include "daemon/xfer/ring.h"
#include "daemon/xfer/xfer_op.h"

enum { RING_OP_LATER = XFER_OP_LATER };

/*
 * Do it; `arena` is where its payload lies. RING_OP_LATER: not done yet, and no
 * other entry of this ring may be begun; ring_resume() follows: the entry is done,
 * after ring_entry_done(), or to be tried again. Negative: it breaks the protocol
 * (ERR_PROTO). What is merely refused shows in its slot, and is 0.
 */
int ring_op(struct ring *ring, const struct kvd_ring_entry *entry,
	    struct xfer_payload *arena);
/* For ring_ops.c: the oldest entry of the shared ring is done. */
void ring_entry_done(struct ring *ring);

/* The slot, which the entry claimed, fails, for err_last(). */
void ring_ops_refuse(struct ring *ring, uint32_t slot, uint64_t id);
/* A slot that was claimed, and is nobody's any more. */
void ring_ops_forget(struct ring *ring, uint64_t id);

/* The texts of what was refused under this number; NULL: none are kept. */
const struct err *ring_fault_of(const struct ring *ring, uint64_t id);
void ring_faults_free(struct ring *ring);

#endif
