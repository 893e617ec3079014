/* SPDX-License-Identifier: Apache-2.0 */
/*
 * homes: the daemons of chunk_index, this one telling them what it has and asking them
 * who has what. A chunk has one home (members.h). Nothing waits for a home, and what one
 * says is a hint.
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
#define HOMES_PROBES_MAX 32u /* chunks that a query asks about */
#define HOMES_HOLDERS_MAX 8u /* that a home tells of a chunk */

/* *homes_p NULL: chunk_index is empty. */
int homes_new(struct store *store, struct homes **homes_p);
void homes_close(struct homes *homes); /* nobody is told any more; NULL is fine */
void homes_free(struct homes *homes);
struct members *homes_members(struct homes *homes);

void homes_on_up(struct homes *homes, const struct remote *remote);
void homes_on_down(struct homes *homes, const struct remote *remote);
/* CHUNK_FOUND, CHUNK_SUM_ACK */
int homes_on_message(struct homes *homes, const struct remote *remote,
		     const struct wire_header *h, struct cursor *body);

/* The chunk can be found here from now on, or no longer. */
void homes_tell(struct homes *homes, const struct store_chunk *chunk, bool put);

/*
 * Who has chunks of these names, which follow each other? The first, the last and some
 * between them are asked about. on_done(arg) once, in a later turn, when all that were
 * asked have answered or wait_ns is over; then the caller ends the query. Outcome 1:
 * nobody can be asked.
 */
int homes_find(struct homes *homes, const struct store_space *space, const uint8_t *ids,
	       uint32_t count, uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	       struct homes_query **query_p);
/* Endpoints of those that seem to have most, the best first; valid while the query is. */
unsigned int homes_query_best(struct homes_query *query, const char **endpoints,
			      unsigned int most);
/* Which of `count` chunks are asked about, in order. */
unsigned int homes_probes(uint32_t count, uint32_t at[HOMES_PROBES_MAX]);
void homes_query_end(struct homes_query *query);

struct store_homes {
	unsigned int homes, up;
	uint64_t notes, resyncs; /* told; how often all was, to a home */
	uint64_t asks, late;	 /* of homes; those that were not answered in time */
	uint64_t dials, dials_refused; /* of holders that were no peers */
};
void homes_figures(const struct homes *homes, struct store_homes *figures_p);

#endif
