/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room/room_cursor.h"

#include <assert.h>

#include "daemon/base/context.h"
#include "daemon/room/rooms_impl.h"

#define ROOMS_A_LOOK 4u /* at the clock */

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

static void sweep_on(struct room_sweep *sweep)
{
	struct rooms *rooms = sweep->rooms;
	unsigned int visited = 0;

	while (sweep->cursor.at != &rooms->all) {
		struct room *room = list_entry(sweep->cursor.at, struct room, all_link);

		sweep->cursor.at = room->all_link.next;
		sweep->visit(sweep, room);
		if (++visited % ROOMS_A_LOOK == 0 && loop_enough(rooms->kvd->loop)) {
			loop_defer(rooms->kvd->loop, &sweep->go);
			return;
		}
	}
	if (sweep->again) {
		sweep->again = false;
		sweep->cursor.at = rooms->all.next;
		loop_defer(rooms->kvd->loop, &sweep->go);
		return;
	}
	room_sweep_stop(sweep);
	if (sweep->done)
		sweep->done(sweep);
}

static void room_cursor_on_go(struct loop_defer *defer)
{
	sweep_on(container_of(defer, struct room_sweep, go));
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
	loop_defer_init(&sweep->go, room_cursor_on_go);
	room_cursor_begin(rooms, &sweep->cursor, rooms->all.next, false);
	sweep_on(sweep);
}

void room_sweep_stop(struct room_sweep *sweep)
{
	if (!sweep->running)
		return;
	sweep->running = false;
	loop_defer_cancel(&sweep->go);
	room_cursor_end(&sweep->cursor);
}
