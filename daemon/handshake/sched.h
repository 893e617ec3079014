/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched: admits ops to transports. Each peer has a window (ops and bytes). Sessions take
 * turns in it, and within a session its flows (a room, or the transfers of an
 * attachment). A flow with nothing posted is admitted regardless of the bytes, so a large
 * room does not starve a small one. A session may have a limited number of such flows, so
 * many rooms of one session do not starve another. Inside the window the transport
 * schedules slices.
 */
#ifndef KVD_SCHED_H
#define KVD_SCHED_H

#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/transport.h"

struct sched;
struct sched_flow;

#define SCHED_BUCKETS 16u

/* the flows of sessions of a line: by session id */
struct sched_bucket {
	struct list link;  /* in line->turns when ops wait */
	struct list flows; /* with queued ops, in turn order */
	unsigned int posted;
	uint64_t bytes;
};

/* one data line; embedded in struct remote */
struct sched_line {
	struct sched *sched;
	struct xp_peer *xp; /* NULL: not usable, ops wait */
	const struct transport_ops *ops;
	struct list turns; /* struct sched_bucket.link */
	struct sched_bucket buckets[SCHED_BUCKETS];
	unsigned int ops_posted;
	uint64_t bytes_posted;
	struct loop_defer pump;
};

/* embedded in its owner; one line only */
struct sched_flow {
	struct sched_line *line;
	struct sched_bucket *bucket;
	struct list link;   /* in bucket->flows when ops wait */
	struct list queued; /* struct sched_op.link */
	unsigned int posted;
};

enum sched_state {
	SCHED_QUEUED,
	SCHED_POSTED,  /* the transport has it */
	SCHED_DROPPED, /* never will: on_done follows */
	SCHED_DONE,
};

struct sched_op {
	struct list link;
	struct sched_flow *flow;
	struct xp_op xp;
	/* xp.result and xp.err hold the outcome; never called from submit/cancel */
	void (*on_done)(struct sched_op *op);
	void (*on_posted)(struct sched_op *op); /* observer; NULL: none */
	void *owner;
	struct sm sm;		  /* enum sched_state; valid once submitted */
	struct loop_defer finish; /* a queued op's cancel completes here */
};

int sched_new(struct loop *loop, unsigned int max_ops, uint64_t max_bytes,
	      struct sched **sched_p);
void sched_free(struct sched *sched);
/* Sum over all data lines: queued bytes, and bytes posted to the transports. */
void sched_bytes(const struct sched *sched, uint64_t *queued_p, uint64_t *posted_p);

void sched_line_init(struct sched_line *line, struct sched *sched);
/* The data line came up (xp) or was lost (NULL): queued ops then fail with why. */
void sched_line_set(struct sched_line *line, struct xp_peer *xp,
		    const struct transport_ops *ops, const struct err *why);
void sched_line_fini(struct sched_line *line);

/* session: the session that the flow shares turns with; sessions with equal lowest
 * bits share, too. */
void sched_flow_init(struct sched_flow *flow, struct sched_line *line, uint64_t session);

/* Fill op->xp's kind, sides, header; the op belongs to the caller until on_done. */
void sched_submit(struct sched_flow *flow, struct sched_op *op);
/* on_done follows when the op has ended. Idempotent. */
void sched_cancel(struct sched_op *op, const struct err *why);

#endif
