/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events: additions and removals of a user's chunks, for clients that publish them
 * (routers). Each user's events have a log of their own, so other users cannot observe
 * them. The log starts with the first request, and keeps the last EVENTS_MAX.
 *
 * A reader that receives `lost` lists all chunks (store_snapshot(), from the first page
 * to the last), and continues after the number that it received: an event that is already
 * in the list changes nothing.
 */
#ifndef KVD_STORE_EVENTS_H
#define KVD_STORE_EVENTS_H

#include <stdbool.h>
#include <stdint.h>

struct session;
struct store_chunk;
struct store_events;
struct store_handle;

#define EVENTS_MAX 8192u
#define EVENTS_PAGE 256u /* scanned in one call */
#define EVENTS_BUCKETS 4096u

struct store_event {
	uint64_t seq;
	uint8_t space[16], id[32];
	uint64_t first;
	uint32_t tokens;
	uint8_t tiers; /* STORE_IN_…; of an event one of them */
	bool put;
};

struct store_reader {
	struct session *session;
	const struct store_handle *handle; /* its space alone; NULL: all of the user's */
	void (*each)(void *arg, const struct store_event *event);
	void *arg;
};

struct store_events_facts {
	uint8_t instance[16]; /* of the daemon: its numbers are valid for this instance
				 only */
	uint64_t seq;	      /* `since` of the next call */
	bool lost, more;
	bool begun; /* this call created the log */
};
/* Events after `since`, 0: from the start of the log. instance NULL: this one's.
 * ERR_NOMEM, ERR_LIMIT, those of store_ready(). */
int store_events_read(const struct store_reader *reader, uint64_t since,
		      const uint8_t *instance, struct store_events_facts *facts_p);
/* Undoes `begun`: the reply could not be sent. */
void store_events_undo(struct session *session);
/* A page of the present chunks, from `at` on (0: the first). *next_p 0: the last page. */
int store_snapshot(const struct store_reader *reader, uint64_t at, uint64_t *next_p);

/* Called by the store: the chunk's tiers differ from `before`. */
void store_events_add(struct store_events *events, const struct store_chunk *chunk,
		      uint8_t before);
void store_events_free(struct store_events *events); /* NULL is fine */

#endif
