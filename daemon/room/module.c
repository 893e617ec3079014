/* SPDX-License-Identifier: Apache-2.0 */
/* Rooms as a module: the hooks for sessions and peers. The rest of the folder does not
 * use this file. */
#include <assert.h>

#include "daemon/base/context.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/commands.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"

/* A room of an engine that has ended. */
static void on_session_room(struct room_sweep *sweep, struct room *room)
{
	struct session *session = container_of(sweep, struct room_session, end)->session;
	struct err why;

	if (room->session != session || room->hold != ROOM_HELD)
		return;
	rooms_catch_up(room); /* the earlier event is the reason */
	err_set(&why, ERR_SESSION, "engine '%.40s' (pid %d) has ended", session->client,
		(int)session->pid);
	rooms_keep_session(room, ROOM_CLOSING);
	room_fail(room, &why, NULL);
	room_kick(room); /* closes it, now or when its operations have ended */
}

static void on_session_swept(struct room_sweep *sweep)
{
	session_end_next(container_of(sweep, struct room_session, end)->session,
			 MODULE_ROOM);
}

/* Every room of the session fails, and closes when its operations have ended; the
 * session is held (session_drain_begin) until the last one is removed. The next module
 * follows when all have been failed, in later turns when they are many. */
static int rooms_session_end(struct session *session)
{
	struct room_session *part = room_session(session);

	assert(session->ending);
	if (list_empty(&part->rooms))
		return 0;
	/* failing moves a room to the end of the session's list: iterate over that of
	 * all */
	part->end.visit = on_session_room;
	part->end.done = on_session_swept;
	room_sweep_begin(rooms_of(session->kvd), &part->end);
	return 1;
}

void rooms_drain(void *rooms)
{
	struct err why;

	err_set(&why, ERR_DRAIN, "no new rooms: the daemon is draining");
	orphans_refuse(rooms, &why);
}

static unsigned int rooms_live_now(const void *part)
{
	return rooms_live(part);
}

static void rooms_session_init(struct session *session)
{
	room_session(session)->session = session;
	list_init(&room_session(session)->rooms);
}

static void rooms_remote_init(struct remote *remote)
{
	list_init(&room_remote(remote)->orphans);
	list_init(&room_remote(remote)->early);
}

static bool rooms_remote_idle(const struct remote *remote)
{
	return list_empty(&room_remote(remote)->orphans) &&
	       list_empty(&room_remote(remote)->early);
}

static const struct command *const room_tables[] = {room_commands, NULL};

const struct module room_module = {
	.id = MODULE_ROOM,
	.name = "room",
	.owner = WIRE_OWNER_ROOM,
	.commands = room_tables,
	.verbs = room_verbs,
	.new = rooms_new,
	.drain = rooms_drain,
	.live = rooms_live_now,
	.close = rooms_fail_all,
	.free = rooms_free,
	.session_bytes = sizeof(struct room_session),
	.session_init = rooms_session_init,
	.session_end = rooms_session_end,
	.ring_has = rooms_ring_has,
	.ring_cancel = rooms_ring_cancel,
	.ring_release = rooms_ring_release,
	.remote_bytes = sizeof(struct room_remote),
	.remote_init = rooms_remote_init,
	.remote_idle = rooms_remote_idle,
	.remote_up = rooms_on_up,
	.remote_change = rooms_on_change,
	.remote_down = rooms_on_down,
	.remote_pool_going = rooms_on_pool_going,
	.message = rooms_on_message,
	.request = rooms_on_request,
};
