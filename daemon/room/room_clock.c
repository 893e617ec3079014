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
#include "daemon/room/rooms.h"
#include "daemon/room/room_source.h"

enum { LIMIT_BOOTSTRAP, LIMIT_WAITING, LIMIT_STALL };

static unsigned long long ms(uint64_t ns)
{
	return (unsigned long long)(ns / LOOP_NS_PER_MS);
}

/* ---- when ---- */

/* Until when does the room wait for a connection to the party's daemon? UINT64_MAX: it
 * does not wait. A daemon with only a control line is not connected, however often
 * that line is lost and up again. */
static uint64_t connected_until(const struct party *party)
{
	const struct room *room = party->room;

	if (room->role != ROOM_RECV && room->role != ROOM_PULL)
		return UINT64_MAX;
	return handshake_patience(party->remote, party->joined_ns);
}

static uint64_t left_of(uint64_t since_ns, uint64_t limit_ns, uint64_t now)
{
	return now - since_ns < limit_ns ? since_ns + limit_ns - now : 0;
}

static uint64_t look_at_boot_after(const struct room *room)
{
	const struct kvd *kvd = rooms_kvd(room->rooms);
	uint64_t now = loop_now_ns(kvd->loop);
	uint64_t after = left_of(room->opened_ns, room->limits_ns[LIMIT_BOOTSTRAP], now);
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		uint64_t until = connected_until(party);

		if (until < now + after)
			after = until > now ? until - now : 0;
	}
	return after;
}

static uint64_t look_after(const struct room *room)
{
	const uint64_t *limits = room->limits_ns;

	switch ((enum room_state)sm_state(&room->sm)) {
	case ROOM_BOOT:
		return look_at_boot_after(room);
	case ROOM_WAITING:
		return limits[LIMIT_WAITING];
	case ROOM_MOVING:
		return (limits[LIMIT_STALL] < limits[LIMIT_WAITING]
				? limits[LIMIT_STALL]
				: limits[LIMIT_WAITING]) /
			       4 +
		       1;
	case ROOM_ABORTING:
		return rooms_kvd(room->rooms)->config->fence_timeout_ns;
	default:
		return 0;
	}
}

void room_clock_set(struct room *room)
{
	uint64_t after = look_after(room);

	if (room_terminal(room))
		return;
	if (room->role == ROOM_OFFER && room_live(room))
		after = room->offer.lease_ns / 4 + 1;
	loop_timer_start(&room->timer, after);
}

/* ---- texts of the reasons ---- */

static const char *why_no_source(const struct party *party, char text[ERR_TEXT_MAX])
{
	const struct remote *remote = party->remote;

	if (!remote->ready)
		return handshake_why_not(remote, text);
	if (party->pool)
		return "its keys are not ready";
	return remote->listed ? "no such pool" : "its list of pools is incomplete";
}

static void room_clock_bootstrap_text(const struct room *room, char *text, size_t size)
{
	const struct party *party;
	char label[300], why[ERR_TEXT_MAX];

	if (room->role == ROOM_SEND) {
		snprintf(text, size, "%u of %u receivers have bound pages",
			 room->party_count, room->receivers ? room->receivers : 1);
		return;
	}
	if (!list_empty(&room->bind.sources)) {
		room_sources_text(room, text, size);
		return;
	}
	list_foreach(party, &room->parties, link) {
		if (room->role == ROOM_PULL && party_asked(party) &&
		    party_state(party) < PARTY_ANSWERED) {
			snprintf(text, size, "source %.200s did not offer the room",
				 party_label(party, label, sizeof(label)));
			return;
		}
	}
	snprintf(text, size, "its sources are not ready");
	list_foreach(party, &room->parties, link) {
		if (sm_state(&party->remote->peer->sm) == PEER_UP && party->pool &&
		    party->pool->ready && party->remote->ready)
			continue;
		snprintf(text, size, "source %.110s: %.190s",
			 party_label(party, label, sizeof(label)),
			 why_no_source(party, why));
		return;
	}
}

/* Does anything wait for a point of its engine's stream? */
static bool waits_for_point(const struct room *room)
{
	const struct move *move;

	list_foreach(move, &room->moves, link) {
		if (move_phase(move) == MOVE_WAITING)
			return true;
	}
	return room_awaits_point(room);
}

static void room_clock_waiting_text(const struct room *room, char *text, size_t size)
{
	const struct party *party;
	const char *own = room->role == ROOM_SEND ? "its engine sent nothing more"
						  : "its engine bound no pages";
	char label[300];

	if (waits_for_point(room))
		own = "its wait point was not reached";
	snprintf(text, size, "%s", own);
	if (waits_for_point(room) || !room_bound(room))
		return;
	list_foreach(party, &room->parties, link) {
		bool answered = party_state(party) >= PARTY_ANSWERED;
		const char *what =
			answered ? "sent nothing more" : "did not open the room";

		if (answered &&
		    (room->role == ROOM_PULL || party->due.got == party->due.expected))
			continue;
		snprintf(text, size, "%.200s %s",
			 party_label(party, label, sizeof(label)), what);
		return;
	}
}

static void room_clock_stall_text(const struct room *room, char *text, size_t size)
{
	const struct move *move;
	char label[300];

	snprintf(text, size, "nothing is in flight");
	list_foreach(move, &room->moves, link) {
		if (move_phase(move) != MOVE_POSTED)
			continue;
		snprintf(text, size, "%.200s",
			 party_label(move->party, label, sizeof(label)));
		return;
	}
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

static void look_at_waiting(const struct room *room, uint64_t idle_ns, struct err *why)
{
	char text[ERR_TEXT_MAX];

	if (idle_ns < room->limits_ns[LIMIT_WAITING])
		return;
	room_clock_waiting_text(room, text, sizeof(text));
	err_set(why, ERR_TIMEOUT, "room %llu: nothing for %llu ms: %s",
		(unsigned long long)room->number, ms(room->limits_ns[LIMIT_WAITING]),
		text);
	room_count(room, METRIC_WAITING_TIMEOUTS, 1);
}

static void look_at_moving(struct room *room, uint64_t now, struct err *why)
{
	uint64_t progress = progress_of(room), since = posted_since(room, now);
	char text[ERR_TEXT_MAX];

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
	room_clock_stall_text(room, text, sizeof(text));
	err_set(why, ERR_STALL, "room %llu: no byte moved for %llu ms: %s",
		(unsigned long long)room->number, ms(room->limits_ns[LIMIT_STALL]), text);
	room_count(room, METRIC_STALLS, 1);
}

static void look_at_connecting(const struct room *room, uint64_t now, struct err *why)
{
	const struct party *party;
	char text[ERR_TEXT_MAX];

	list_foreach(party, &room->parties, link) {
		uint64_t since = party->remote->lineless_ns;

		if (now < connected_until(party))
			continue;
		if (since < party->joined_ns)
			since = party->joined_ns;
		err_set(why, ERR_PEER, "room %llu: %.250s (tried for %llu ms)",
			(unsigned long long)room->number, why_no_source(party, text),
			ms(now - since));
		return;
	}
}

static void bootstrap_over(const struct room *room, struct err *why)
{
	char text[ERR_TEXT_MAX];

	room_clock_bootstrap_text(room, text, sizeof(text));
	err_set(why, ERR_TIMEOUT, "room %llu: bootstrapping took longer than %llu ms: %s",
		(unsigned long long)room->number, ms(room->limits_ns[LIMIT_BOOTSTRAP]),
		text);
	room_count(room, METRIC_BOOTSTRAP_TIMEOUTS, 1);
}

static void look_at_boot(const struct room *room, uint64_t now, struct err *why)
{
	if (now - room->opened_ns >= room->limits_ns[LIMIT_BOOTSTRAP])
		bootstrap_over(room, why);
	else
		look_at_connecting(room, now, why);
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
	unsigned long long limit = ms(rooms_kvd(room->rooms)->config->fence_timeout_ns);
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
