/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_cursor: a position in the list of all rooms, or of a session's, that stays valid
 * while rooms are added, moved and removed; and sweeps: an operation on all rooms, some
 * of them in each turn of the loop.
 */
#ifndef KVD_ROOM_CURSOR_H
#define KVD_ROOM_CURSOR_H

#include <stdbool.h>

#include "daemon/base/list.h"
#include "daemon/loop/work.h"
#include "daemon/session/session.h"

struct room;
struct rooms;

struct room_cursor {
	struct list link;
	struct list *at;
	bool back; /* it walks backwards */
};
void room_cursor_begin(struct rooms *rooms, struct room_cursor *cursor, struct list *at,
		       bool back);
void room_cursor_end(struct room_cursor *cursor);
/* `leaving` is about to be removed from its list. */
void room_cursors_pass(struct rooms *rooms, const struct list *leaving);

struct room_sweep {
	void (*visit)(struct room_sweep *sweep, struct room *room); /* may free it */
	void (*done)(struct room_sweep *sweep); /* after the last; may be NULL */
	/* private */
	struct rooms *rooms;
	struct room_cursor cursor;
	struct loop_work work;
	bool running, again;
};
/* The first rooms are visited before this returns, all when they are few. A running
 * sweep continues to its end and then starts again, so that frequent starts do not
 * keep it from the last rooms. */
void room_sweep_begin(struct rooms *rooms, struct room_sweep *sweep);
void room_sweep_stop(struct room_sweep *sweep); /* without `done`; idempotent */

/* session->part[MODULE_ROOM] */
struct room_session {
	struct session *session;
	struct list rooms; /* struct room.session_link, the latest change last */
	struct room_sweep end;
};

static inline struct room_session *room_session(const struct session *session)
{
	return session->part[MODULE_ROOM];
}

#endif
