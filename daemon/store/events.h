/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events: which of a user's chunks came and went, for who publishes it (routers). A
 * user's events have a log of their own, so nobody learns of others' by them; it begins
 * when they are asked for first, and keeps the last EVENTS_MAX.
 *
 * A reader that is told `lost` lists what there is (store_snapshot(), from the first
 * page to the last), and goes on behind the number that it was told: an event that the
 * list had in it already changes nothing.
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
#define EVENTS_PAGE 256u /* looked at in one call */
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
	uint8_t instance[16]; /* of the daemon: numbers of another one mean nothing */
	uint64_t seq;	      /* since, of the next call */
	bool lost, more;
	bool begun; /* the log, by this call */
};
/* Events behind `since`, 0: none is known. instance NULL: this one's. ERR_NOMEM,
 * ERR_LIMIT, those of store_ready(). */
int store_events_read(const struct store_reader *reader, uint64_t since,
		      const uint8_t *instance, struct store_events_facts *facts_p);
/* `begun` is taken back: the answer did not get away. */
void store_events_undo(struct session *session);
/* A page of what there is, from `at` on (0: the first). *next_p 0: it was the last. */
int store_snapshot(const struct store_reader *reader, uint64_t at, uint64_t *next_p);

/* The store's: the chunk's tiers are others than `before`. */
void store_events_add(struct store_events *events, const struct store_chunk *chunk,
		      uint8_t before);
void store_events_free(struct store_events *events); /* NULL is fine */

#endif
