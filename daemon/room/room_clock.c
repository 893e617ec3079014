/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every phase of a room has a time limit, for each possible cause of delay.
 *
 *   bootstrapping      bootstrap_timeout        the other side does not contact us
 *                      connect_timeout          a source's daemon is not connected
 *                      dead_after               it was, and was lost
 *   waiting_for_input  waiting_timeout          nothing is bound, offered, sent
 *   transferring       transfer_stall_timeout   posted, and no byte moves
 *                      waiting_timeout          nothing posted: an engine computes
 *   aborting           fence_timeout            then the peers that hold it are cut
 *   an offer           its lease                no puller, or a slow one
 *
 * A stall means no byte in that time, not slowness: any byte since the last check
 * restarts the count. An op that waits for other rooms on the same line is not posted, so
 * a large neighbour makes no room stall; neither that wait nor the computing of an engine
 * counts once it is posted.
 *
 * The reason names the missing event. It is all that the engines of both sides and the
 * operator see, and the operator must know which machine to examine.
 *
 * A fence that is not proven in time widens its scope, from the room to the peers'
 * connections; it is never assumed.
 */
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/room.h"
#include "daemon/room/room_waits.h"
#include "daemon/session/session.h"

static unsigned long long ms(uint64_t ns)
{
	return (unsigned long long)(ns / LOOP_NS_PER_MS);
}

/* ---- checks of the phases ---- */

static uint64_t progress_of(const struct room *room)
{
	const struct move *move;
	uint64_t sum = room->bytes;

	list_foreach(move, &room->moves, link)
		sum += move->in ? move->in->moved : move->op.xp.moved;
	return sum;
}

/* Since when is an op in flight? 0: none; an engine, here or there, is computing, or
 * the line is busy with others. That time does not count for a stall. */
static uint64_t posted_since(const struct room *room, uint64_t now)
{
	uint64_t oldest = 0;
	struct move *move;

	list_foreach(move, &room->moves, link) {
		if (move_phase(move) != MOVE_POSTED ||
		    (!move->in && sm_state(&move->op.sm) != SCHED_POSTED))
			continue;
		if (!move->seen_ns)
			move->seen_ns = now;
		if (!oldest || move->seen_ns < oldest)
			oldest = move->seen_ns;
	}
	return oldest;
}

/* The missing event, as it is also shown while the room waits. */
static void over_limit(const struct room *room, enum err_code code, const char *what,
		       uint64_t limit_ns, struct err *why)
{
	struct room_waits waits;

	room_waits(room, &waits);
	err_set(why, code, "room %llu: %s %llu ms: waits for %s",
		(unsigned long long)room->number, what, ms(limit_ns), waits.what);
}

static void look_at_waiting(const struct room *room, uint64_t idle_ns, struct err *why)
{
	if (idle_ns < room->limits_ns[LIMIT_WAITING])
		return;
	over_limit(room, ERR_TIMEOUT, "nothing for", room->limits_ns[LIMIT_WAITING], why);
	room_count(room, METRIC_WAITING_TIMEOUTS, 1);
}

static void look_at_moving(struct room *room, uint64_t now, struct err *why)
{
	uint64_t progress = progress_of(room), since = posted_since(room, now);

	if (progress != room->progress)
		room->moved_ns = now;
	room->progress = progress;
	if (!since) {
		look_at_waiting(room, now - room->moved_ns, why);
		return;
	}
	if (since < room->moved_ns)
		since = room->moved_ns;
	if (now - since < room->limits_ns[LIMIT_STALL])
		return;
	over_limit(room, ERR_STALL, "no byte moved for", room->limits_ns[LIMIT_STALL],
		   why);
	room_count(room, METRIC_STALLS, 1);
}

static void look_at_connecting(const struct room *room, uint64_t now, struct err *why)
{
	const struct party *party;
	char text[ERR_TEXT_MAX];

	list_foreach(party, &room->parties, link) {
		uint64_t since = party->remote->dial.down_ns;

		if (now < party_connected_until(party))
			continue;
		if (since < party->joined_ns)
			since = party->joined_ns;
		err_set(why, ERR_PEER, "room %llu: %.250s (tried for %llu ms)",
			(unsigned long long)room->number,
			handshake_why_not(party->remote, text), ms(now - since));
		return;
	}
}

static void look_at_boot(const struct room *room, uint64_t now, struct err *why)
{
	if (now - room->opened_ns < room->limits_ns[LIMIT_BOOTSTRAP]) {
		look_at_connecting(room, now, why);
		return;
	}
	over_limit(room, ERR_TIMEOUT, "bootstrapping took longer than",
		   room->limits_ns[LIMIT_BOOTSTRAP], why);
	room_count(room, METRIC_BOOTSTRAP_TIMEOUTS, 1);
}

/* ---- the fence ---- */

/* A peer that is up and has operations of the room. */
static struct peer *holder(const struct room *room)
{
	const struct move *move;

	list_foreach(move, &room->moves, link) {
		if (move_phase(move) !=
		    MOVE_POSTED) /* our own helper has it, not a peer */
			continue;
		if (sm_state(&move->party->remote->peer->sm) == PEER_UP)
			return move->party->remote->peer;
	}
	return NULL;
}

/* The fence took too long: cut all peers that still have operations of the room. */
static void widen(struct room *room)
{
	unsigned long long limit = ms(room->session->kvd->config->fence_timeout_ns);
	char number[24];
	struct peer *peer;
	struct err why;
	unsigned int cut = 0;

	while ((peer = holder(room))) {
		err_set(&why, ERR_FENCE,
			"peer %.100s instance %.8s: room %llu not quiesced after %llu ms",
			peer->shown, peer->instance_text,
			(unsigned long long)room->number, limit);
		room_count(room, METRIC_FENCES_WIDENED, 1);
		peer_kill(peer, &why);
		cut++;
	}
	if (cut > 0)
		return;
	snprintf(number, sizeof(number), "%llu", (unsigned long long)room->number);
	log_warn("room", number, "not quiesced yet", "in_flight=%u ms=%llu", room->busy,
		 limit);
}

void room_on_clock(struct loop_timer *timer)
{
	struct room *room = container_of(timer, struct room, timer);
	enum room_state state = (enum room_state)sm_state(&room->sm);
	uint64_t now = loop_now_ns(timer->loop);
	struct err why = {0};

	if (rooms_behind(room)) { /* that may be why nothing has arrived */
		rooms_catch_up(room);
		room_clock_set(room);
		return;
	}
	if (room->ops->on_clock && room_live(room))
		room->ops->on_clock(room);
	else if (state == ROOM_BOOT)
		look_at_boot(room, now, &why);
	else if (state == ROOM_WAITING)
		look_at_waiting(room, now - room->waiting_ns, &why);
	else if (state == ROOM_MOVING)
		look_at_moving(room, now, &why);
	else if (state == ROOM_ABORTING)
		widen(room);
	if (why.code != ERR_OK)
		room_fail(room, &why, NULL);
	else
		room_clock_set(room);
}
