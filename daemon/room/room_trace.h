/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_trace: the timed events of rooms. All rooms of a daemon write into one ring of
 * fixed size. Each event has the distance to the previous event of its room. So a room
 * needs one number, open or ended, and the ring has the latest events of all rooms,
 * including ended ones. The same events are logged at level trace.
 *
 * In addition a room has names: the engine's request id and trace context (struct
 * room_names). The requesting side sends them to the other, in TRANSFER_INFO and
 * OFFER_QUERY.
 */
#ifndef KVD_ROOM_TRACE_H
#define KVD_ROOM_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire.h"

struct party;
struct room;

#define TRACE_EVENTS 65536u	/* of all rooms: 2 MiB, touched as they are used */
#define TRACE_ROOM_EVENTS 4096u /* of one room, except its states */

/* X(NAME, "name in records", "text in the log") */
#define TRACE_WHATS(X)                                                         \
	X(STATE, "state", "state changed")                                     \
	X(BOUND, "bound", "pages bound by the engine")                         \
	X(POOL, "pool_known", "pool of a source known")                        \
	X(INFO_OUT, "info_sent", "pages sent to a party")                      \
	X(INFO_IN, "info_received", "pages received from a party")             \
	X(ACK_OUT, "ack_sent", "answer sent to a party")                       \
	X(ACK_IN, "ack_received", "answer received from a party")              \
	X(DONE_OUT, "done_sent", "completion sent to a party")                 \
	X(DONE_IN, "done_received", "completion received from a party")        \
	X(LEASE_OUT, "lease_confirmed", "state of the lease sent to a puller") \
	X(LEASE_IN, "lease_answered", "state of the lease received")           \
	X(ABORT_OUT, "abort_sent", "abort sent to a party")                    \
	X(ABORT_IN, "abort_received", "abort received from a party")           \
	X(GIVEN, "chunk_given", "chunk given")                                 \
	X(ARRIVED, "chunk_arrived", "chunk announced")                         \
	X(PLANNED, "chunk_planning", "chunk being planned")                    \
	X(WAITS, "chunk_waits", "chunk waiting")                               \
	X(QUEUED, "chunk_queued", "chunk queued")                              \
	X(POSTED, "chunk_posted", "chunk posted")                              \
	X(ADMITTED, "chunk_admitted", "chunk admitted")                        \
	X(FIRST, "chunk_first_byte", "first bytes of a chunk moved")           \
	X(MOVED, "chunk_moved", "chunk moved")                                 \
	X(OVER, "chunk_over", "chunk finished")

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
	uint32_t seq;	/* of the chunk; above 2^32 - 1 shown as that */
	uint32_t back;	/* distance in events to this room's previous one; 0: none */
	uint16_t party; /* in the order of joining */
	uint8_t what;
	bool has_party;
};

struct trace_ring {
	struct trace_event *events;
	uint64_t count; /* so far; also the position of the next one */
};
int trace_ring_init(struct trace_ring *ring);
void trace_ring_fini(struct trace_ring *ring);
/* Part of a room. */
struct room_trace {
	struct trace_ring *ring; /* the daemon's */
	uint64_t last;		 /* position of its latest event, plus one. 0: none */
	uint32_t events;	 /* except states; including dropped ones */
	uint16_t parties;	 /* that joined */
};
/* The event at `place`; NULL: overwritten. */
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
/* Check names given by an engine; either may be NULL: ERR_INVAL, ERR_RANGE name field,
 * fault and remedy. *names_p is heap, NULL when neither was given. */
int room_names_make(const char *request_id, const char *traceparent,
		    struct room_names **names_p);
/* For a message to the other side. */
void room_names_tell(const struct room_names *names, char request_id[WIRE_STR_MAX],
		     char traceparent[WIRE_STR_MAX]);
/* Set names sent by a peer, for a room without own names. Invalid ones are ignored. */
void room_names_hear(struct room *room, const char *request_id, const char *traceparent);

#endif
