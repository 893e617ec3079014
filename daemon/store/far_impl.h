/* SPDX-License-Identifier: Apache-2.0 */
/* far_impl: shared by far.c (queries) and far_hold.c (remote holds). */
#ifndef KVD_STORE_FAR_IMPL_H
#define KVD_STORE_FAR_IMPL_H

#include "daemon/loop/loop.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"

struct wire_chunk_lookup_ack;

struct far_run {
	uint32_t end;  /* chunks before this one are in this run, or in earlier ones */
	uint64_t mask; /* pools, as bits */
};

/* The chunks that the holder reported, and holds until they are released here. */
struct far_grant {
	unsigned int refs;
	struct store *store;
	struct remote *remote; /* held */
	struct loop_timer renew;
	uint64_t ask, tokens;
	uint8_t space[16];
	uint64_t pools[STORE_CLASSES_MAX];
	unsigned int pool_count;
	struct far_run *runs;
	uint32_t run_count, chunks;
};

/* A queried daemon, and its query. */
struct far_asked {
	const struct store_space *space;
	struct remote *remote;
	uint64_t ask, lease_ms;
	uint32_t chunks;
};

bool far_up(const struct remote *remote); /* it may have chunks */
void far_release(struct remote *remote, uint64_t ask);
/* The chunks it holds, by its reply: a reference. On failure they are released. */
int far_grant_new(const struct far_asked *asked, const struct wire_chunk_lookup_ack *msg,
		  struct far_grant **grant_p);
void far_grant_unref(struct far_grant *grant);
/* As much of its first `most` chunks as serves the handle: *far_p, or NULL. They are a
 * hold's from its chunk `first` on. */
int far_hold_new(struct far_grant *grant, const struct store_handle *handle,
		 uint32_t first, uint32_t most, struct far_hold **far_p);
/* Of the last piece, the two that have most; the others are released. */
void far_hold_add(struct far_hold **first_p, struct far_hold *far);

#endif
