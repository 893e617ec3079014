/* SPDX-License-Identifier: Apache-2.0 */
/*
 * far: chunks of other daemons, from the requester's side. The daemons of chunk_peers are
 * queried at once for chunks that local memory lacks; the few daemons that index nodes
 * name (homes.h) are queried once they have replied. The two with the longest run,
 * without a gap, keep a hold; the others are released. A late reply, or one from a lost
 * peer, is a miss. The run is a piece of the local hold, and the next query starts behind
 * it.
 */
#ifndef KVD_STORE_FAR_H
#define KVD_STORE_FAR_H

#include <stdbool.h>
#include <stdint.h>

struct cursor;
struct far;
struct far_hold;
struct kvd;
struct layout;
struct remote;
struct store;
struct store_remote_figures;
struct store_handle;
struct store_hold;

#define FAR_LEASE_MORE_MS 60000u /* a holder's lease exceeds ours by this */

/* Dials them. *far_p NULL: none are configured. */
int far_new(struct store *store, struct far **far_p);
/* How many daemons are queried, are up, are paused. NULL is fine. */
void far_count(const struct far *far, struct store_remote_figures *figures_p);
void far_close(struct far *far); /* no more queries; NULL is fine */
void far_free(struct far *far);

/* Queries the chunks that follow those that the hold has: `count`, with these ids, which
 * stay until the end, for at most `wait_ns`. on_done(arg) is called once, in a later
 * turn, unless far_cancel() was called: hold->far has a piece more, or not. */
struct far_query;
int far_ask(struct far *far, struct store_hold *hold, const uint8_t *ids, uint32_t count,
	    uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	    struct far_query **query_p);
void far_cancel(struct far_query *query);

/* The chunks that other daemons hold for a local hold, in pieces, in order: of each the
 * daemon with most of its chunks, and another one as its fallback. Chunks are counted
 * from the hold's first. */
uint32_t far_hold_first(const struct far_hold *far);
uint32_t far_hold_chunks(const struct far_hold *far);
uint64_t far_hold_tokens(const struct far_hold *far);
/* The first that has not failed and serves chunk i, a slow or lost one last; NULL: none.
 */
struct far_hold *far_hold_at(struct far_hold *far, uint32_t i);
bool far_hold_serves(const struct far_hold *far, uint32_t i);
/* Another one that is up and serves as many chunks from i on; NULL: none. */
struct far_hold *far_hold_other(struct far_hold *all, const struct far_hold *far,
				uint32_t i, uint32_t count);
/* The next one; NULL: none. */
struct far_hold *far_hold_next(const struct far_hold *far);
void far_hold_fail(struct far_hold *far);
void far_hold_late(struct far_hold *far);
struct remote *far_hold_remote(const struct far_hold *far);
uint64_t far_hold_ask(const struct far_hold *far);
/* Which pools of the holder's serve chunk i, as bits; 0: it has none of it. */
uint64_t far_hold_sources(const struct far_hold *far, uint32_t i);
uint64_t far_hold_pool(const struct far_hold *far, unsigned int bit);
/* Of its chunks, most are read from memory of the holder's GPUs. */
bool far_hold_in_gpu(const struct far_hold *far);
/* NULL: it is gone. */
const struct layout *far_hold_layout(const struct far_hold *far, unsigned int bit);
/* The piece from chunk `first` on for another handle of the space, as far as it serves
 * that one: it is added to *all_p, of which it is the last. */
int far_hold_join(const struct far_hold *other, uint32_t first,
		  const struct store_handle *handle, struct far_hold **all_p);
/* All of them; the last reference to a holder releases its hold. NULL is fine. */
void far_hold_free(struct far_hold *far);

int far_on_lookup_ack(struct store *store, struct remote *remote, struct cursor *body);
/* Its bytes, or a reply, were late: it is paused for a while. NULL is fine, as below. */
void far_late(struct far *far, const struct remote *remote, const char *what);
bool far_is_left_out(struct far *far, const struct remote *remote);
void far_serves(struct far *far, const struct remote *remote); /* it sent bytes */
/* It answered a request for attention. While it is paused that may be a late one. */
void far_attends(const struct kvd *kvd, const struct remote *remote);
void far_on_down(struct far *far, const struct remote *remote);
/* A peer came up, was refused, or announced a pool. NULL is fine. */
void far_on_change(struct far *far, struct remote *remote);

#endif
