/* SPDX-License-Identifier: Apache-2.0 */
/* Counters that are updated when the state of a room changes: so the number of rooms
 * per state, and the oldest of each, are known without a scan. */
#include "daemon/base/context.h"
#include "daemon/room/rooms_set.h"

static struct metrics *counts_of(const struct room *room)
{
	return &room->rooms->kvd->metrics;
}

static void room_counts_work(struct room *room, unsigned int state, int change)
{
	struct pool_work *work = &room->pool->work;

	if (state == ROOM_BOOT || state == ROOM_WAITING)
		work->waiting += (uint32_t)change;
	else if (state == ROOM_MOVING)
		work->running += (uint32_t)change;
}

void room_counts_enter(struct room *room, uint64_t now_ns)
{
	unsigned int state = sm_state(&room->sm);

	room_counts_work(room, state, 1);
	metrics_add(counts_of(room), METRIC_AT(ROOMS, room->role, state), 1);
	list_push_back(&room->rooms->in_state[state], &room->state_link);
	room->state_ns = now_ns;
}

void room_counts_leave(struct room *room, unsigned int state)
{
	room_counts_work(room, state, -1);
	metrics_sub(counts_of(room), METRIC_AT(ROOMS, room->role, state), 1);
	list_remove(&room->state_link);
}

/* The phase that the change completes, if it does. */
static void room_counts_phase(const struct room *room, unsigned int from, uint64_t now_ns)
{
	static const enum metric_phase phases[] = {
		[ROOM_BOOT] = METRIC_PHASE_BOOTSTRAP,
		[ROOM_WAITING] = METRIC_PHASE_WAITING,
		[ROOM_MOVING] = METRIC_PHASE_TRANSFER,
	};

	if (from > ROOM_MOVING || sm_state(&room->sm) == ROOM_ABORTING)
		return;
	METRICS_OBSERVE(counts_of(room), ROOM_PHASE, room->role, phases[from],
			now_ns - room->state_ns);
}

void room_counts_move(struct room *room, unsigned int from, uint64_t now_ns)
{
	struct metrics *m = counts_of(room);
	unsigned int state = sm_state(&room->sm);

	room_counts_phase(room, from, now_ns);
	room_counts_leave(room, from);
	room_counts_enter(room, now_ns);
	if (state == ROOM_SUCCESS) {
		METRICS_OBSERVE(m, ROOM_PHASE, room->role, METRIC_PHASE_TOTAL,
				now_ns - room->opened_ns);
		METRICS_OBSERVE(m, ROOM_SIZE, 0, 0, room->bytes);
		metrics_add(m, METRIC_AT(ROOMS_ENDED, room->role, ERR_OK), 1);
	} else if (state == ROOM_FAILED) {
		room->pool->work.failed++;
		metrics_add(m, METRIC_AT(ROOMS_ENDED, room->role, room->error->code), 1);
	}
}

void room_counts_bytes(struct room *room, uint64_t bytes)
{
	struct pool_work *work = &room->pool->work;

	if (room->bytes == 0 && bytes > 0) {
		work->firsts++;
		work->first_ns += loop_now_ns(room->rooms->kvd->loop) - room->opened_ns;
	}
	room->bytes += bytes;
	work->moved += bytes;
}

uint64_t rooms_oldest_ns(const struct rooms *rooms, enum room_state state)
{
	const struct list *in = &rooms->in_state[state];

	return list_empty(in) ? 0 : list_first(in, struct room, state_link)->state_ns;
}

unsigned int rooms_moving(const struct rooms *rooms)
{
	uint64_t count = 0;

	for (unsigned int role = 0; role < ROOM_ROLES; role++)
		count += metrics_get(&rooms->kvd->metrics,
				     METRIC_AT(ROOMS, role, ROOM_MOVING));
	return (unsigned int)count;
}

unsigned int rooms_orphans(const struct rooms *rooms)
{
	return rooms->orphan_count;
}
