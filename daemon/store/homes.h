/* SPDX-License-Identifier: Apache-2.0 */
/*
 * homes: the index nodes of chunk_index, from the side that sends them updates and
 * queries. A chunk has one index node (members.h). Nothing waits for an index node, and a
 * reply of it is a hint.
 */
#ifndef KVD_STORE_HOMES_H
#define KVD_STORE_HOMES_H

#include <stdbool.h>
#include <stdint.h>

struct cursor;
struct homes;
struct homes_query;
struct members;
struct remote;
struct store;
struct store_chunk;
struct store_space;
struct wire_header;

#define HOMES_NOTES_MAX 512u /* of a message */
#define HOMES_PROBES_MAX 32u /* chunks in a query */
#define HOMES_HOLDERS_MAX 8u /* reported of a chunk by an index node */

/* *homes_p NULL: chunk_index is empty. */
int homes_new(struct store *store, struct homes **homes_p);
void homes_close(struct homes *homes); /* no more updates; NULL is fine */
void homes_free(struct homes *homes);
struct members *homes_members(struct homes *homes);

void homes_on_up(struct homes *homes, const struct remote *remote);
void homes_on_down(struct homes *homes, const struct remote *remote);
/* INDEX_REPLY, INDEX_DIGEST_ACK */
int homes_on_message(struct homes *homes, const struct remote *remote,
		     const struct wire_header *h, struct cursor *body);

/* The chunk can be found here from now on, or no longer. */
void homes_tell(struct homes *homes, const struct store_chunk *chunk, bool put);

/*
 * Which daemons have chunks of these names, which follow each other? The query names the
 * first, the last and some between them. on_done(arg) is called once, in a later turn,
 * when all replies have arrived or wait_ns is over; then the caller ends the query.
 * Outcome 1: no index node can be queried.
 */
int homes_find(struct homes *homes, const struct store_space *space, const uint8_t *ids,
	       uint32_t count, uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	       struct homes_query **query_p);
/* Endpoints of the daemons that seem to have most, the best first; valid while the query
 * is. */
unsigned int homes_query_best(struct homes_query *query, const char **endpoints,
			      unsigned int most);
/* Which of `count` chunks the query names, in order. */
unsigned int homes_probes(uint32_t count, uint32_t at[HOMES_PROBES_MAX]);
void homes_query_end(struct homes_query *query);

struct store_homes {
	unsigned int homes, up;
	uint64_t notes, resyncs; /* updates; full resyncs, per node */
	uint64_t asks, late; /* queries to index nodes; those without a reply in time */
	uint64_t dials, dials_refused; /* of holders that were not peers yet */
};
void homes_figures(const struct homes *homes, struct store_homes *figures_p);

#endif
