/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events that may affect every room at once: a lost peer, a withdrawn pool, the stop of
 * the daemon; and changes that bootstrapping rooms wait for.
 *
 * There may be 65 536 rooms of a thousand parties, and failing one of them sends
 * messages: too much work for one turn of the loop. So an event only leaves a mark, at a
 * cost that does not grow with the rooms: the remote counts its losses, the pool is
 * marked as going, the rooms have a reason to stop. Then a sweep visits the rooms, some
 * of them in each turn.
 *
 * Until it has reached a room, the peer may be back, with a new line, the same rooms and
 * numbers. Therefore any action on a room makes it catch up first: its step, its clock, a
 * message or request that names it, the end of a wait, of a plan or of a transfer. So a
 * room never acts between the loss of its peer and the processing of that loss, and no
 * party is taken for that of another epoch: invariants 1 to 4 hold as if all rooms had
 * processed it in the same turn. Its engine learns it with the sweep.
 */
#include "daemon/base/context.h"

#include <assert.h>

#include "daemon/room/rooms.h"
#include "daemon/room/rooms_set.h"

static void on_loss_room(struct room_sweep *sweep, struct room *room)
{
	(void)sweep;
	rooms_catch_up(room);
}

static void begin_sweep(struct rooms *rooms)
{
	rooms->losses++;
	rooms->loss.visit = on_loss_room;
	room_sweep_begin(rooms, &rooms->loss);
}

void rooms_on_down(struct remote *remote, const struct err *why)
{
	struct rooms *rooms = rooms_of(remote->kvd);

	(void)why; /* the remote has it */
	orphans_drop(rooms, remote, 0);
	early_drop(rooms, remote, 0);
	begin_sweep(rooms);
}

void rooms_on_pool_going(struct remote_pool *pool)
{
	if (!pool->is_session) /* a room checks whether it is going */
		begin_sweep(rooms_of(pool->remote->kvd));
}

void rooms_fail_all(void *part, const struct err *why)
{
	struct rooms *rooms = part;

	assert(why->code != ERR_OK);
	rooms->stopping = *why;
	begin_sweep(rooms);
}

/* ---- changes that bootstrapping rooms wait for ---- */

static void on_change_room(struct room_sweep *sweep, struct room *room)
{
	const struct remote *changed = sweep->rooms->changed;
	struct party *party;

	if (sm_state(&room->sm) != ROOM_BOOT)
		return;
	list_foreach(party, &room->parties, link) {
		if (!changed || party->remote == changed)
			room_kick(room);
	}
}

void rooms_on_change(struct remote *remote)
{
	struct rooms *rooms = rooms_of(remote->kvd);

	/* one sweep for all changes in the meantime: a spurious step is harmless */
	rooms->changed =
		rooms->change.running && rooms->changed != remote ? NULL : remote;
	rooms->change.visit = on_change_room;
	room_sweep_begin(rooms, &rooms->change);
}
