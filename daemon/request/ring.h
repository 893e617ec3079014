/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring: the daemon's end of a session's submission ring (proto/kvd_ring.h): its
 * memory, the wake-up, taking entries in turn with everybody else's.
 *
 * A session has one from the first session.share or xfer.submit on. Entries are
 * copied out before they are looked at; whoever breaks the protocol loses the
 * session (ERR_PROTO), nobody else notices. What an entry means: ring_ops.c.
 */
#ifndef KVD_RING_H
#define KVD_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/session/session.h"
#include "proto/kvd_ring.h"

struct kvd;
struct rings;
struct ring_verb;

#define RING_ENTRIES_MAX 4096u
#define RING_ENTRIES_DEFAULT 512u
#define RING_ARENA_MAX (UINT64_C(256) << 20) /* pages count once they are written */
#define RING_ARENA_DEFAULT (UINT64_C(64) << 20)
#define RING_FDS 3u	 /* ring, arena, eventfd: in this order */
#define RING_OPS_MAX 32u /* numbers of ops are below */

struct ring {
	struct list link; /* in the daemon's, while it has something to do */
	struct rings *rings;
	const struct ring_verb *const *verbs; /* of RING_OPS_MAX; NULL: unknown */
	struct session *session;
	struct kvd_ring_header *shared; /* NULL: only by xfer.submit */
	uint32_t entries;
	uint64_t arena_bytes;
	int fds[RING_FDS]; /* ours; -1 without shared memory */
	struct loop_fd watch;
	uint64_t head; /* ours: what the shared one says is for the engine */
	uint64_t gate; /* a line waits until head is here */
	bool gated, gate_open;
	bool stopped;
	void *work;	    /* an entry that a helper has; all others wait */
	struct list faults; /* struct ring_fault: texts of what was refused */
	unsigned int fault_count;
};

/* The session's; NULL: it has none. */
static inline struct ring *ring_of(const struct session *session)
{
	return session->part[MODULE_REQUEST];
}
/* Made if need be. NULL: ERR_NOMEM. */
struct ring *ring_need(struct session *session);
/* Every session's: request_module's part. */
int rings_new(struct kvd *kvd, void **part_p);
void rings_free(void *part);
/* Give it memory; once. `entries` a power of two. */
int ring_share(struct ring *ring, uint32_t entries, uint64_t arena_bytes);
/* No entry is taken any more. Idempotent; NULL is fine. */
void ring_stop(struct ring *ring);
void ring_free(struct ring *ring); /* stopped, without work; NULL is fine */

/* May the next line of the session's socket be taken? Not before the entries
 * that were given before it: session->conn_ops->resume() comes then. NULL is fine. */
bool ring_gate_passed(struct ring *ring);
bool ring_gate_shut(const struct ring *ring);

/* Look at the ring again (its work is done). */
void ring_resume(struct ring *ring);

#endif
