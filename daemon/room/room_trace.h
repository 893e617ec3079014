/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_trace: what happened to a room, and when. All rooms of a daemon write into one
 * ring of fixed size, in which each event knows how far back the one before it of its
 * room lies. So a room costs one number, open or ended, and the latest events of all
 * rooms are there, whichever have ended since. The same events are the log's, at level
 * trace.
 *
 * Beside the events stand names: what an engine calls its request (struct room_names).
 * The side that asks tells them to the other, in TRANSFER_INFO and OFFER_QUERY.
 */
#ifndef KVD_ROOM_TRACE_H
#define KVD_ROOM_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire.h"

struct party;
struct room;

#define TRACE_EVENTS 65536u	/* of all rooms: 2 MiB, touched as they are used */
#define TRACE_ROOM_EVENTS 4096u /* of one room, beside its states */

/* X(NAME, "name in records", "words of the log") */
#define TRACE_WHATS(X)                                                               \
	X(STATE, "state", "its state changes")                                       \
	X(BOUND, "bound", "its engine has bound pages")                              \
	X(POOL, "pool_known", "a source's pool is known")                            \
	X(INFO_OUT, "info_sent", "its pages are told")                               \
	X(INFO_IN, "info_received", "a party's pages are here")                      \
	X(ACK_OUT, "ack_sent", "a party is answered")                                \
	X(ACK_IN, "ack_received", "a party has answered")                            \
	X(DONE_OUT, "done_sent", "a party is told that all is here")                 \
	X(DONE_IN, "done_received", "a party says that it has all")                  \
	X(LEASE_OUT, "lease_confirmed", "a puller is told whether the lease held")   \
	X(LEASE_IN, "lease_answered", "the offerer has said whether the lease held") \
	X(ABORT_OUT, "abort_sent", "a party is told to abort")                       \
	X(ABORT_IN, "abort_received", "a party has aborted")                         \
	X(GIVEN, "chunk_given", "a chunk is given")                                  \
	X(ARRIVED, "chunk_arrived", "a chunk has arrived")                           \
	X(PLANNED, "chunk_planning", "a chunk is planned")                           \
	X(WAITS, "chunk_waits", "a chunk waits")                                     \
	X(QUEUED, "chunk_queued", "a chunk is queued")                               \
	X(POSTED, "chunk_posted", "a chunk is posted")                               \
	X(ADMITTED, "chunk_admitted", "a chunk is admitted")                         \
	X(FIRST, "chunk_first_byte", "a chunk's first bytes have moved")             \
	X(MOVED, "chunk_moved", "a chunk has moved")                                 \
	X(OVER, "chunk_over", "a chunk is over")

enum trace_what {
#define TRACE_ENUM(name, record, words) TRACE_##name,
	TRACE_WHATS(TRACE_ENUM)
#undef TRACE_ENUM
		TRACE_WHAT_END,
};
extern const char *const trace_names[TRACE_WHAT_END];

struct trace_event {
	uint64_t at_ns;
	uint64_t value; /* of a chunk: bytes; a state; else the party's generation */
	uint32_t seq;	/* of the chunk; one past 2^32 - 1 shows as that */
	uint32_t back;	/* so many events before it: this room's previous; 0: none */
	uint16_t party; /* in the order of joining */
	uint8_t what;
	bool has_party;
};

struct trace_ring {
	struct trace_event *events;
	uint64_t count; /* so far; the next one's place */
};
int trace_ring_init(struct trace_ring *ring);
void trace_ring_fini(struct trace_ring *ring);
/* What a room keeps: its latest event's place, plus one. 0: there is none. */
struct room_trace {
	uint64_t last;
	uint32_t events;  /* but states; also those that were left out */
	uint16_t parties; /* that joined */
};
/* The event at `place`; NULL: it is overwritten. */
const struct trace_event *trace_at(const struct trace_ring *ring, uint64_t place);
bool trace_is_chunk(enum trace_what what);

/* party may be NULL. */
void room_trace(struct room *room, enum trace_what what, const struct party *party,
		uint64_t value);
struct trace_chunk {
	uint64_t seq, bytes, rows;
	uint64_t at_ns; /* 0: now */
};
void room_trace_chunk(struct room *room, enum trace_what what, const struct party *party,
		      const struct trace_chunk *chunk);

/* ---- names ---- */

#define REQUEST_ID_MAX 128u   /* bytes, without its NUL */
#define TRACEPARENT_CHARS 55u /* 00-<32>-<16>-<2> */

struct room_names {
	char request_id[REQUEST_ID_MAX + 1];	 /* "" = none */
	char traceparent[TRACEPARENT_CHARS + 1]; /* "" = none */
	bool from_peer; /* the engine here gave none: they are the other side's */
};
/* Of an engine's words, either may be NULL: ERR_INVAL, ERR_RANGE name field, fault and
 * remedy. *names_p is heap, NULL when neither was given. */
int room_names_make(const char *request_id, const char *traceparent,
		    struct room_names **names_p);
/* For a message to the other side. */
void room_names_tell(const struct room_names *names, char request_id[WIRE_STR_MAX],
		     char traceparent[WIRE_STR_MAX]);
/* A peer's, for a room that has none. What is not as it should be is left out. */
void room_names_hear(struct room *room, const char *request_id, const char *traceparent);

#endif
