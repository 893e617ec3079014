/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring: the daemon's end of a session's submission ring (proto/kvd_ring.h): its memory,
 * the wake-up, and fair processing of entries. A session has one from the first
 * session.share or xfer.submit on.
 *
 * Entries are copied before they are checked. An engine that breaks the protocol loses
 * its session (ERR_PROTO); other sessions are not affected. ring_ops.c executes the
 * entries.
 */
#ifndef KVD_RING_H
#define KVD_RING_H

#include <stdbool.h>
#include <stdint.h>

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
	int fds[RING_FDS]; /* local copy; -1 without shared memory */
	struct loop_fd watch;
	uint64_t head; /* local copy: the shared counter is for the engine */
	uint64_t gate; /* a line waits until head is here */
	bool gated, gate_open;
	bool stopped;
	void *work;	    /* an entry is on a helper; all others wait */
	struct list faults; /* struct ring_fault: texts of refused entries */
	unsigned int fault_count;
};

/* The ring of the session; NULL: none. */
static inline struct ring *ring_of(const struct session *session)
{
	return session->part[MODULE_REQUEST];
}
/* Created if necessary. NULL: ERR_NOMEM. */
struct ring *ring_need(struct session *session);
/* Rings of all sessions: the part of request_module. */
int rings_new(struct kvd *kvd, void **part_p);
void rings_free(void *part);
/* Allocate its shared memory, once. `entries` is a power of two. */
int ring_share(struct ring *ring, uint32_t entries, uint64_t arena_bytes);
/* No further entry is processed. Idempotent; NULL is allowed. */
void ring_stop(struct ring *ring);
void ring_free(struct ring *ring); /* stopped, without work in progress; NULL is
				    * allowed */

/* May the next line of the session's socket be processed? Not before the entries that
 * precede it: session->conn_ops->resume() follows then. NULL is allowed. */
bool ring_gate_passed(struct ring *ring);
bool ring_gate_shut(const struct ring *ring);

/* Check the ring again (its work has finished). */
void ring_resume(struct ring *ring);

#endif
