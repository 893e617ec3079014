/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_op: operations of an engine on its rooms, for both entries: the members of a
 * command (commands_room.c) and entries of the submission ring (ring_room.c). The entry
 * has parsed its input; all checks are made here. Loop thread.
 */
#ifndef KVD_ROOM_OP_H
#define KVD_ROOM_OP_H

#include "daemon/room/room_map.h"
#include "daemon/session/wait.h"
#include "proto/fields.h"

struct room;
struct session;

#define ROOM_MS_MAX INT64_C(86400000) /* a day */

/* The name of a room for an engine. */
struct room_key {
	uint64_t number;
	int role; /* enum room_role; -1: not given: the only room of this number */
};

/* The pages of a command, and the condition for their use. */
struct pages_args {
	const cJSON *views;
	int64_t aux; /* slot of view "aux"; -1: none */
	const cJSON *wait;
};

/* The same, read. */
struct room_pages {
	struct room_maps maps;
	struct wait_spec wait;
};

/* room.open's members. */
struct room_open_args {
	struct room_key key;
	uint64_t pool;
	const cJSON *sources, *remote;
	uint32_t receivers, lease_ms;
	bool receivers_from_pullers;
	const cJSON *timeouts;
	const char *request_id, *traceparent;
	const char *ticket;
	const cJSON *peers;
	struct pages_args pages;
};
extern const struct field room_open_fields[];

/* A slot of the status page that the engine chose and status_slot_claim() has claimed. */
struct room_slot {
	uint32_t slot, gen;
};

#define F_ROOM(s) \
	F_U64("room", s, key.number, REQUIRED, "the router's number, a decimal string")
#define F_ROLE(s)                                                                    \
	F_CHOICE("role", s, key.role, DEFAULT(-1), room_role_names,                  \
		 "send, recv, offer or pull; required when the session has several " \
		 "rooms of this number")
#define F_VIEWS(s, text) F_OBJECT("views", s, pages.views, OPTIONAL, text)
#define F_AUX(s, text) F_INT("aux", s, pages.aux, DEFAULT(-1), 0, INT32_MAX, text)
#define F_WAIT(s)                                                                   \
	F_OBJECT("wait", s, pages.wait, OPTIONAL,                                   \
		 "{kind:\"seq\", region, offset, value}: start when this word has " \
		 "reached the value")

/* Parse the pages for a pool's layout; `lands`: bytes are written to them. Negative:
 * there is nothing to undo. */
int room_pages_parse(struct session *session, const struct pages_args *args,
		     const struct layout *layout, bool lands, struct room_pages *pages_p);
void room_pages_fini(struct room_pages *pages);

/*
 * Open a room by `line`, which filled `args`. `maps` (NULL: the views are in the line):
 * the checked pages, always taken. `slot`: NULL takes one of the daemon's.
 */
int room_op_open(struct session *session, const cJSON *line,
		 const struct room_open_args *args, struct room_maps *maps,
		 const struct room_slot *slot, struct room **room_p);
/* Both always take `pages`. A repeated chunk (seq) is accepted once. */
int room_op_bind(struct room *room, struct room_pages *pages);
int room_op_send(struct room *room, uint64_t seq, bool last, struct room_pages *pages);
/* Is the room of this role, or of one that binds? ERR_STATE. */
int room_op_want(const struct room *room, int role);
int room_op_binds(const struct room *room);
int room_op_extend(struct room *room, uint64_t lease_ms); /* offer */
/* Abort on behalf of its engine, with a reason or NULL; `who`: "its engine". */
void room_op_abort(struct room *room, const char *who, const struct session *by,
		   const char *reason);

#endif
