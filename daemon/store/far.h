/* SPDX-License-Identifier: Apache-2.0 */
/*
 * far: chunks of other daemons, this one asking. Those of chunk_peers are asked all at
 * once for what the own memory has not, and the few that homes name (homes.h) once they
 * have; the two that have most of it, without a gap, hold it, the others let go. What
 * comes late, or from one that is lost, is a miss.
 */
#ifndef KVD_STORE_FAR_H
#define KVD_STORE_FAR_H

#include <stdbool.h>
#include <stdint.h>

struct cursor;
struct far;
struct far_hold;
struct remote;
struct store;
struct store_far;
struct store_handle;
struct store_hold;

#define FAR_LEASE_MORE_MS 60000u /* a holder's lease ends behind ours */

/* Dials them. *far_p NULL: there are none. */
int far_new(struct store *store, struct far **far_p);
/* How many daemons are asked, are up, are left out. NULL is fine. */
void far_count(const struct far *far, struct store_far *figures_p);
void far_close(struct far *far); /* nobody is asked any more; NULL is fine */
void far_free(struct far *far);

/* Ask for what follows the hold's own chunks: hold->far_ids, `count`, for at most
 * `wait_ns`.
 * on_done(arg) once, in a later turn, unless far_cancel() came: hold->far is what was
 * found, or NULL. */
struct far_query;
int far_ask(struct far *far, struct store_hold *hold, uint32_t count, uint64_t lease_ns,
	    uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	    struct far_query **query_p);
void far_cancel(struct far_query *query);

/* What other daemons hold for a hold of ours, and its rank: the one with most of it, and
 * another behind it that goes on when that one fails. */
uint32_t far_hold_chunks(const struct far_hold *far); /* NULL: 0 */
uint64_t far_hold_tokens(const struct far_hold *far);
/* The first of them that has not failed and serves chunk i, one that was late last; NULL:
 * none does. */
struct far_hold *far_hold_at(struct far_hold *far, uint32_t i);
bool far_hold_serves(const struct far_hold *far, uint32_t i);
/* Another one of them that is up and serves as many chunks from i on; NULL: none does. */
struct far_hold *far_hold_other(struct far_hold *all, const struct far_hold *far,
				uint32_t i, uint32_t count);
/* The one behind it, of as many chunks or fewer; NULL: there is none. */
struct far_hold *far_hold_next(const struct far_hold *far);
void far_hold_fail(struct far_hold *far);
void far_hold_late(struct far_hold *far);
struct remote *far_hold_remote(const struct far_hold *far);
uint64_t far_hold_ask(const struct far_hold *far);
/* Which pools of the holder's serve its chunk i, as bits. */
uint64_t far_hold_sources(const struct far_hold *far, uint32_t i);
uint64_t far_hold_pool(const struct far_hold *far, unsigned int bit);
/* The same chunks for another handle of the space, as far as they serve it: *far_p, or
 * NULL. */
int far_hold_join(const struct far_hold *other, const struct store_handle *handle,
		  struct far_hold **far_p);
/* All of them; a holder's last one tells it. NULL is fine. */
void far_hold_free(struct far_hold *far);

int far_on_told(struct store *store, struct remote *remote, struct cursor *body);
/* Its bytes, or an answer, were late: it is left out for a while. NULL is fine, as below.
 */
void far_late(struct far *far, const struct remote *remote, const char *what);
bool far_is_left_out(struct far *far, const struct remote *remote);
void far_serves(struct far *far, const struct remote *remote); /* bytes came from it */
void far_on_down(struct far *far, const struct remote *remote);
/* A peer came up, was refused, or told of a pool. NULL is fine. */
void far_on_change(struct far *far, struct remote *remote);

#endif
