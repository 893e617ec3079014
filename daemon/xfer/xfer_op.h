/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xfer_op: operations of an engine on the transfer layer, by an entry of the submission
 * ring (ring_xfer.c), or by dlist.prep (commands_xfer.c), which fills it in and receives
 * the result; all checks are made here. Loop thread.
 */
#ifndef KVD_XFER_OP_H
#define KVD_XFER_OP_H

#include "daemon/xfer/xfer_impl.h"

/* Heap; ERR_TOOBIG. */
int payload_notif(const struct ring_payload *payload, uint64_t offset, uint32_t bytes,
		  uint8_t **notif_p);

enum xfer_op_kind {
	XFER_OP_LIST, /* prepare a list */
	XFER_OP_MOVE, /* make a transfer of two lists, and optionally post it */
	XFER_OP_NOTE, /* send a notification */
};

struct xfer_op {
	enum xfer_op_kind kind;
	struct xfer_session *xs; /* held */
	/* Once. Negative: refused, with err_last(); a transfer that was made
	 * nevertheless could not be posted. The op is freed afterwards. */
	void (*on_done)(struct xfer_op *op, int r);
	void *owner;
	/* the new object's number, with its claimed slot; LIST, 0: the session's next one
	 */
	uint64_t id;
	uint32_t slot, gen;
	struct ring_payload payload; /* taken */
	uint64_t offset;

	/* LIST: rows of u64 in the payload, 2 … 4 columns as in proto/kvd_ring.h */
	uint64_t attach; /* 0: own memory; NOTE: the receiver */
	uint32_t rows, columns;

	/* MOVE */
	enum xp_kind moves;
	uint64_t lists[2];
	uint32_t reads[2]; /* u32 in the payload for each index list; 0: all rows */
	bool posts, has_notif;
	size_t notif_len; /* behind the indices; NOTE: the payload */

	/* result */
	struct prepared *list;
	struct transfer *transfer;
	bool later; /* continues on a helper */

	/* private */
	struct offload_job job;
	struct charge charge; /* while it is read */
	uint64_t gid;
	struct dlist *dlist;
	struct search *search;
	struct prepared *sides[2]; /* held */
	uint32_t *index[2];	   /* heap; NULL: all rows */
	uint64_t count[2];
	uint8_t *notif; /* heap */
	struct note *note;
};

enum { XFER_OP_LATER = RING_OP_LATER };

/* NULL: ERR_NOMEM. */
struct xfer_op *xfer_op_new(struct xfer_session *xs, enum xfer_op_kind kind,
			    void (*on_done)(struct xfer_op *op, int r), void *owner);
void xfer_op_drop(struct xfer_op *op); /* it was not run */
/* Takes the op. 0: on_done was called; XFER_OP_LATER: it follows. */
int xfer_op_run(struct xfer_op *op);

#endif
