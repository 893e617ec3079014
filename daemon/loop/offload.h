/* SPDX-License-Identifier: Apache-2.0 */
/*
 * offload: work that would block the loop runs on helper threads: registration,
 * populating maps, opening devices, long JSON, large plans.
 *
 * A job is embedded in its owner and submitted from the loop; `work` runs on a helper and
 * touches only data owned by the job; `done` runs on the loop. A simulation uses
 * offload_new_inline(): work runs in offload_submit(), done as a deferred call, so the
 * order is deterministic.
 *
 * A job carries the principal that it is done for: the user of a session, a peer, or the
 * daemon itself (0). Those with jobs take turns, and one of them has at most half of the
 * helpers (at least one), so long jobs of one do not delay another's.
 */
#ifndef KVD_OFFLOAD_H
#define KVD_OFFLOAD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"

struct loop;
struct offload;

struct offload_job {
	struct list link;
	void (*work)(struct offload_job *job); /* helper thread; sets result, err */
	void (*done)(struct offload_job *job); /* loop thread; may free the job */
	int result;			       /* 0 or negative, as work left it */
	struct err err;	    /* the fault of a negative result (err_take in work) */
	uint64_t principal; /* offload_uid(), offload_peer(); 0: the daemon */
	struct list behind; /* of the same principal, in order (private to offload) */
	bool submitted;	    /* between submit and done */
	bool started;	    /* a helper runs it (private to offload) */
};

static inline uint64_t offload_uid(uid_t uid)
{
	return UINT64_C(1) << 62 | uid;
}

/* The object that represents the peer where the job is created. */
static inline uint64_t offload_peer(const void *peer)
{
	return UINT64_C(1) << 63 | (uintptr_t)peer;
}

int offload_new(struct loop *loop, unsigned int threads, struct offload **offload_p);
int offload_new_inline(struct loop *loop, struct offload **offload_p);
/* The inline kind: until it is resumed, submitted jobs count as started and their `done`
 * is not called, like a slow helper. */
void offload_hold(struct offload *offload, bool hold);
/* Completes queued jobs first; `done`s are called. */
void offload_free(struct offload *offload);

/* Never fails, never blocks; jobs of a principal start in order of submission. */
void offload_submit(struct offload *offload, struct offload_job *job);
/* True: it had not started and never will; `done` is not called. False: it has started
 * (or is not submitted); `done` will be called. */
bool offload_cancel(struct offload *offload, struct offload_job *job);
/* free(owned) on a helper; here, if there is no memory to tell one. Leaves the error
 * record as it is. */
void offload_discard(struct offload *offload, void (*free)(void *owned), void *owned);
/* A block, for mem_large_to(); arg: the offload. */
void offload_discard_block(void *arg, void *owned);
unsigned int offload_pending(const struct offload *offload);

#endif
