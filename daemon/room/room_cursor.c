/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room/room_cursor.h"

#include <assert.h>

#include "daemon/base/context.h"
#include "daemon/room/rooms_set.h"

void room_cursor_begin(struct rooms *rooms, struct room_cursor *cursor, struct list *at,
		       bool back)
{
	*cursor = (struct room_cursor){.at = at, .back = back};
	list_push_back(&rooms->cursors, &cursor->link);
}

void room_cursor_end(struct room_cursor *cursor)
{
	list_remove(&cursor->link);
}

void room_cursors_pass(struct rooms *rooms, const struct list *leaving)
{
	struct room_cursor *cursor;

	list_foreach(cursor, &rooms->cursors, link) {
		if (cursor->at == leaving)
			cursor->at = cursor->back ? leaving->prev : leaving->next;
	}
}

/* ---- sweeps ---- */

static bool sweep_step(struct loop_work *work)
{
	struct room_sweep *sweep = container_of(work, struct room_sweep, work);
	struct list *all = &sweep->rooms->all;
	struct room *room;

	if (sweep->cursor.at != all) {
		room = list_entry(sweep->cursor.at, struct room, all_link);
		sweep->cursor.at = room->all_link.next;
		sweep->visit(sweep, room);
	}
	if (sweep->cursor.at != all)
		return true;
	if (!sweep->again)
		return false;
	sweep->again = false;
	sweep->cursor.at = all->next;
	return true;
}

static void sweep_done(struct loop_work *work)
{
	struct room_sweep *sweep = container_of(work, struct room_sweep, work);

	room_sweep_stop(sweep);
	if (sweep->done)
		sweep->done(sweep);
}

void room_sweep_begin(struct rooms *rooms, struct room_sweep *sweep)
{
	assert(sweep->visit);
	if (sweep->running) {
		sweep->again = true;
		return;
	}
	sweep->rooms = rooms;
	sweep->again = false;
	sweep->running = true;
	room_cursor_begin(rooms, &sweep->cursor, rooms->all.next, false);
	loop_work_init(&sweep->work, rooms->kvd->loop, sweep_step, sweep_done);
	loop_work_start(&sweep->work);
}

void room_sweep_stop(struct room_sweep *sweep)
{
	if (!sweep->running)
		return;
	sweep->running = false;
	loop_work_stop(&sweep->work);
	room_cursor_end(&sweep->cursor);
}
