/* SPDX-License-Identifier: Apache-2.0 */
/* commands_room: what the rooms' commands share. */
#ifndef KVD_COMMANDS_ROOM_H
#define KVD_COMMANDS_ROOM_H

#include <stdint.h>

#include "daemon/room/room_op.h"
#include "proto/fields.h"

struct ended_room;
struct request;
struct room;
struct rooms;
struct session;
struct text;

#define ROOM_LIST_MAX 65536 /* rooms of one command */

struct room_key_args {
	struct room_key key;
};
extern const struct field room_key_fields[];

/* The session's room; NULL: raised. */
struct room *room_asked(struct session *session, const struct room_key *key,
			struct rooms *rooms);

/* The same, and for an administrator any session's. */
struct room *room_asked_any(struct request *req, const struct room_key *key);

/* ---- the commands that have files of their own ---- */
int room_poll_run(struct request *req);
extern const struct field room_poll_fields[];
int room_list_run(struct request *req);
extern const struct field room_list_fields[];
int room_history_run(struct request *req);
extern const struct field room_history_fields[];
/* The members of an ended room's record, as of `now_ns`. */
void room_history_put(const struct ended_room *e, uint64_t now_ns, struct text *out);
int room_trace_run(struct request *req);
extern const struct field room_trace_fields[];

#endif
