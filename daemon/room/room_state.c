/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state machine that all roles share.
 *
 * A room never acts inside an event: any change (a message, a peer, a finished move)
 * schedules it, and its step runs once in the loop's next turn and examines everything
 * again. Steps are therefore idempotent, and no callback can destroy an object that its
 * caller holds.
 *
 * Failure has one path: room_fail() records the first error, moves to ABORTING, notifies
 * the parties, and stops operations in flight. `busy` counts operations that have not
 * ended; at zero the step makes the room FAILED. If a transport cannot prove the end
 * within fence_timeout, the connection to its peer is cut; the end is never assumed.
 */
#include "daemon/room/room.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/rooms.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"

static const struct sm_state states[ROOM_STATES] = {
	[ROOM_BOOT] = {"bootstrapping", SM_TO(ROOM_WAITING) | SM_TO(ROOM_ABORTING)},
	[ROOM_WAITING] = {"waiting_for_input", SM_TO(ROOM_MOVING) | SM_TO(ROOM_SUCCESS) |
						       SM_TO(ROOM_ABORTING)},
	[ROOM_MOVING] = {"transferring", SM_TO(ROOM_SUCCESS) | SM_TO(ROOM_ABORTING)},
	[ROOM_ABORTING] = {"aborting", SM_TO(ROOM_FAILED)},
	[ROOM_FAILED] = {"failed", 0},
	[ROOM_SUCCESS] = {"success", 0},
};

/* Invariant 1, where it can be seen: nothing is in flight in a terminal room. */
static bool room_quiesced_when_terminal(const struct sm *sm, unsigned int from)
{
	const struct room *room = container_of(sm, struct room, sm);

	(void)from;
	return !room_terminal(room) || room->busy == 0;
}

const struct sm_table room_table = {.name = "room",
				    .states = states,
				    .count = ROOM_STATES,
				    .invariant = room_quiesced_when_terminal};

unsigned int room_poll_state(const struct room *room)
{
	static const unsigned int poll[ROOM_STATES] = {
		[ROOM_BOOT] = KVD_BOOTSTRAPPING,  [ROOM_WAITING] = KVD_WAITING_FOR_INPUT,
		[ROOM_MOVING] = KVD_TRANSFERRING, [ROOM_ABORTING] = KVD_TRANSFERRING,
		[ROOM_FAILED] = KVD_FAILED,	  [ROOM_SUCCESS] = KVD_SUCCESS,
	};

	return poll[sm_state(&room->sm)];
}

unsigned int room_flags(const struct room *room)
{
	unsigned int flags = sm_state(&room->sm) == ROOM_ABORTING ? KVD_FLAG_ABORTING : 0;
	const struct party *party;
	bool wanted = false;

	list_foreach(party, &room->parties, link)
		wanted = wanted || party->want_count > 0;
	if (room->role == ROOM_SEND && room->party_count > 0 && !wanted)
		flags |= KVD_FLAG_IDLE;
	if (room->used.staged)
		flags |= KVD_FLAG_STAGED;
	if (room->fail_requested)
		flags |= KVD_FLAG_REMOTE;
	return flags;
}

void room_figures(struct room *room)
{
	struct status_room figures = {
		.bytes = room->bytes,
		.total = room->expected,
		.first_token = room_first_token(room),
		.rows = room->used.rows,
		.moved_us =
			room->moving_ns ? (room->moved_ns - room->moving_ns) / 1000 : 0,
	};

	if (room->role == ROOM_SEND)
		figures.done = room->send.chunks_given - room->send.chunks_open;
	if (room->slot != ROOM_NO_SLOT)
		status_slot_room(room->session->status, room->slot, &figures);
}

static void room_publish(struct room *room)
{
	room->version = ++room->rooms->version;
	room_cursors_pass(room->rooms, &room->session_link);
	list_remove(&room->session_link); /* the latest change is last */
	list_push_back(&room_session(room->session)->rooms, &room->session_link);
	if (room->slot == ROOM_NO_SLOT)
		return;
	room_figures(room);
	status_slot_set(room->session->status, room->slot, room_poll_state(room),
			room_flags(room), room->error->code);
}

void room_progress(struct room *room)
{
	room->moved_ns = loop_now_ns(room->session->kvd->loop);
	room_figures(room);
}

static void room_finish(struct room *room)
{
	struct room_leg *leg = room->leg;
	struct party *party;

	loop_timer_stop(&room->timer);
	list_foreach(party, &room->parties, link) {
		if (party->pool)
			handshake_pool_unuse(party->pool);
		party->pool = NULL;
	}
	room->rooms->on_terminal(room);
	if (!leg)
		return;
	leg->room = NULL;
	leg->on_end(leg, room);
	room_kick(room);
}

#define SLOW_NS LOOP_NS_PER_S /* log_rooms = slow */

#define ROOM_ENDED_ID "250106853cfa484ebc6139ccb2bce124" /* MESSAGE_ID, for ever */

/* Failures have their own call site, and so their own rate limit. */
static void log_end_line(const struct room *room, enum log_level level,
			 const char *number, const char *about, const char *peer)
{
	bool ok = sm_state(&room->sm) == ROOM_SUCCESS;
	const struct log_field fields[] = {
		{"MESSAGE_ID", ROOM_ENDED_ID},
		{"KVD_ROOM", number},
		{"KVD_ROLE", room_role_names[room->role]},
		{"KVD_PEER", peer},
		{"KVD_CODE", ok ? "OK" : err_name(room->error->code)},
		{"KVD_ENGINE", room->session->client},
		{"KVD_REQUEST", room->names ? room->names->request_id : ""},
		{NULL, NULL},
	};

	if (ok)
		LOG_FIELDS_AT(level, fields, "room", number, "success", "%s", about);
	else
		LOG_FIELDS_AT(level, fields, "room", number, "failed",
			      "%s code=%s why=\"%s\"", about, err_name(room->error->code),
			      room->error->text);
}

/* One line a room. */
static void log_end(const struct room *room)
{
	const struct config *config = room->session->kvd->config;
	const struct party *first = list_first(&room->parties, struct party, link);
	const struct transport *transport = first ? first->remote->transport : NULL;
	bool ok = sm_state(&room->sm) == ROOM_SUCCESS;
	uint64_t took = room->ended_ns - room->opened_ns;
	bool told = !room->leg && /* else its owner logs it */
		    (!ok || config->log_rooms == LOG_ROOMS_ALL ||
		     (config->log_rooms == LOG_ROOMS_SLOW && took >= SLOW_NS));
	/* A room that an engine gave up, for example because its client disconnected, is
	 * not a fault. */
	bool fault = sm_state(&room->sm) != ROOM_SUCCESS &&
		     room->error->code != ERR_ABORTED &&
		     room->error->code != ERR_CANCELED;
	enum log_level level = !told   ? LOG_LEVEL_DEBUG
			       : fault ? LOG_LEVEL_WARN
				       : LOG_LEVEL_INFO;
	const struct room_names *names = room->names;
	char number[24], peer[96] = "none", about[560];

	if ((int)level > log_threshold)
		return;
	if (first)
		room_peer_name(first->remote, peer, sizeof(peer));
	snprintf(number, sizeof(number), "%llu", (unsigned long long)room->number);
	snprintf(about, sizeof(about),
		 "role=%s bytes=%llu ms=%.1f transport=%s peers=%u peer=\"%s\" "
		 "engine=\"%.63s\" request=\"%s\" traceparent=\"%s\"",
		 room_role_names[room->role], (unsigned long long)room->bytes,
		 (double)took / 1e6, transport ? transport->ops->name : "none",
		 room->party_count, peer, room->session->client,
		 names ? names->request_id : "", names ? names->traceparent : "");
	log_end_line(room, level, number, about, peer);
}

static void count_at_peers(const struct room *room)
{
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		struct peer *peer = party->remote->peer;

		peer->totals.rooms++;
		if (sm_state(&room->sm) != ROOM_FAILED)
			continue;
		peer->totals.rooms_failed++;
		peer_note_error(peer, room->error);
	}
}

/* There are no waits any more: engines may destroy events, and unregister the regions
 * of words. */
static void forget_waits(struct room *room)
{
	struct chunk *chunk;

	if (room->role != ROOM_SEND) {
		wait_stop(&room->pages.wait_bind);
		wait_spec_fini(&room->pages.wait);
		return;
	}
	list_foreach(chunk, &room->send.chunks, link)
		wait_spec_fini(&chunk->wait);
}

void room_bind_pages(struct room *room, struct room_maps *maps, struct wait_spec *wait)
{
	assert(room->role != ROOM_SEND && room->pages.phase == PAGES_UNBOUND);
	room->pages.maps = room_maps_steal(maps);
	room->pages.wait = *wait;
	*wait = (struct wait_spec){0};
	room->pages.phase = PAGES_BOUND;
}

/* ---- its next check: room_clock.c ---- */

uint64_t party_connected_until(const struct party *party)
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
	const struct kvd *kvd = room->session->kvd;
	uint64_t now = loop_now_ns(kvd->loop);
	uint64_t after = left_of(room->opened_ns, room->limits_ns[LIMIT_BOOTSTRAP], now);
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		uint64_t until = party_connected_until(party);

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
		return room->session->kvd->config->fence_timeout_ns;
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

void room_move(struct room *room, enum room_state to)
{
	uint64_t now = loop_now_ns(room->session->kvd->loop);
	unsigned int from = sm_state(&room->sm);

	sm_move(&room->sm, to);
	room_trace(room, TRACE_STATE, NULL, to);
	room_counts_move(room, from, now);
	if (to == ROOM_WAITING)
		room->waiting_ns = now;
	if (to == ROOM_MOVING)
		room->moving_ns = room->moved_ns = now;
	/* only now a sender knows that no receiver wants more */
	if (to == ROOM_SUCCESS && room->expected == 0)
		room->expected = room->bytes;
	if (room_terminal(room)) {
		forget_waits(room);
		room->ended_ns = now;
		log_end(room);
	}
	room_publish(room);
	room_clock_set(room);
	if (room_terminal(room)) {
		count_at_peers(room);
		room_finish(room);
	}
}

/* ---- failing ---- */

/* A source that has no message from this receiver yet waits for one, now or later: it
 * cannot know that none will follow. A source whose pool was withdrawn has no room any
 * more, and a later one of that number is another's. */
static bool early_source(const struct room *room, const struct party *party)
{
	return room->role == ROOM_RECV && party->line != PARTY_POOL_GOING &&
	       !party_asked(party) && !party->gen;
}

static void tell_abort(struct room *room, const struct party *party)
{
	struct wire_abort msg = {.room = party->room_there,
				 .from_role = (uint8_t)room->role,
				 .from_gen = room->gen,
				 .to_gen = party->gen,
				 .pool = party->pool ? party->pool->id : 0,
				 .session = party->session,
				 .code = room->error->code,
				 .from_pool = room->pool->id};
	bool early = early_source(room, party);

	if (party_lost(party) || party_done(party) ||
	    (!party_asked(party) && !party->gen && !early))
		return;
	if (room->role == ROOM_PULL && party_state(party) >= PARTY_ANSWERED)
		return; /* PULL_DONE reports it; an ABORT would end the offer */
	if (room_admit_source(&room->admit, party->remote->peer) >= 0)
		memcpy(msg.ticket, room->admit.ticket, sizeof(msg.ticket));
	else
		err_clear(); /* it may learn the end, but not the ticket */
	snprintf(msg.text, sizeof(msg.text), "%.300s", room->error->text);
	if (early && sm_state(&party->remote->peer->sm) != PEER_UP) {
		/* a room that ends for a failed connection does not retry */
		if (party->remote->peer->why.code != room->error->code)
			rooms_defer_abort(room->rooms, party->remote, &msg,
					  room->session->account);
		return;
	}
	room_trace(room, TRACE_ABORT_OUT, party, party->gen);
	if (handshake_send_abort(party->remote, &msg) < 0)
		err_clear(); /* a peer that accepts no message is going down */
}

static void room_on_wait_over(struct wait *wait)
{
	struct room *room = container_of(wait, struct room, pages.wait_bind);

	wait_spec_fini(&room->pages.wait);
	room_kick(room);
}

bool room_await(struct room *room)
{
	struct wait_spec *wait = &room->pages.wait;

	if (room_awaits_point(room))
		return false;
	if (!wait_passed(wait)) {
		wait_start(rooms_waits(room->rooms), &room->pages.wait_bind, wait,
			   room_on_wait_over);
		return false;
	}
	wait_spec_fini(wait);
	return true;
}

int room_refuse_over(const struct room *room)
{
	struct err why = *room->error;

	assert(!room_live(room));
	if (why.code == ERR_OK)
		return err_raise(ERR_STATE, "room %llu is %s",
				 (unsigned long long)room->number,
				 room_state_names[sm_state(&room->sm)]);
	snprintf(why.text, sizeof(why.text), "room %llu failed: %s: %.250s",
		 (unsigned long long)room->number, err_name(room->error->code),
		 room->error->text);
	return err_reraise(&why);
}

static const struct err no_error = {.code = ERR_OK};
/* The reason when there is no memory for it. */
static const struct err error_lost = {.code = ERR_NOMEM,
				      .scope = ERR_SCOPE_ROOM,
				      .retryable = true,
				      .text = "failed; no memory for the reason"};

void room_fail(struct room *room, const struct err *why, const struct party *but)
{
	struct party *party;

	assert(why->code != ERR_OK);
	if (!room_live(room))
		return;
	room->error = mem_dup(why, sizeof(*why));
	if (!room->error)
		room->error = &error_lost;
	room_move(room, ROOM_ABORTING);
	list_foreach(party, &room->parties, link) {
		if (party != but)
			tell_abort(room, party);
	}
	room->ops->stop(room, room->error);
	forget_waits(room);
	room_kick(room);
}

void room_fail_remote(struct room *room, const struct err *why, const struct party *but)
{
	if (!room_live(room))
		return;
	room->fail_requested = true;
	room_fail(room, why, but);
}

void room_fail_moving(struct room *room, const struct party *party, const struct err *why)
{
	const char *label = party->remote->label;
	struct err named = *why;

	assert(party->room == room && why->code != ERR_OK);
	if ((why->scope == ERR_SCOPE_PEER || why->code == ERR_DRAIN) &&
	    !strstr(why->text, label))
		snprintf(named.text, sizeof(named.text), "%.110s: %.200s", label,
			 why->text);
	room_fail(room, &named, NULL);
}

void room_fail_last(struct room *room)
{
	struct err why;

	err_take(&why);
	room_fail(room, &why, NULL);
}

/* ---- losses: rooms_loss.c ---- */

static void see_down(struct party *party)
{
	struct room *room = party->room;
	const struct err *why = &party->remote->down;

	if (party->downs == party->remote->downs)
		return;
	party->downs = party->remote->downs;
	party->line = PARTY_LOST;
	if (room_live(room) && !room->ops->without(party, why))
		room_fail(room, why, NULL);
	if (room_live(room))
		party_release_pool(party);
	if (sm_state(&room->sm) == ROOM_BOOT)
		room_clock_set(room); /* connect_timeout starts */
}

/* Its engine ended before its room there had a message from us (else an ABORT would
 * have arrived first); or it unregistered the pool. A party that has received, or
 * sent, everything is not needed any more; no other engine's pool can replace it. */
static void see_withdrawal(struct party *party)
{
	struct room *room = party->room;
	struct err why;

	if (!party->pool || !party->pool->going || party->line != PARTY_UP ||
	    !room_live(room))
		return;
	party->line = PARTY_POOL_GOING;
	err_set(&why, ERR_SESSION,
		"%.150s withdrew pool '%.63s': its engine ended or unregistered it, or "
		"its daemon is stopping",
		party->remote->label, party->pool->name);
	if (room->ops->without(party, &why))
		party_release_pool(party);
	else
		room_fail(room, &why, NULL);
}

bool rooms_behind(const struct room *room)
{
	return room->losses_seen != room->rooms->losses && !room_terminal(room);
}

void rooms_catch_up(struct room *room)
{
	const struct rooms *rooms = room->rooms;
	struct party *party;

	if (!rooms_behind(room))
		return;
	room->losses_seen = rooms->losses;
	list_foreach(party, &room->parties, link) {
		see_down(party);
		see_withdrawal(party);
	}
	if (rooms->stopping.code != ERR_OK)
		room_fail(room, &rooms->stopping, NULL);
}

/* ---- stepping ---- */

static void on_step(struct loop_defer *defer)
{
	struct room *room = container_of(defer, struct room, step);

	room->ops->free_ended(room);
	rooms_catch_up(room);
	if (sm_state(&room->sm) == ROOM_ABORTING && room->busy == 0)
		room_move(room, ROOM_FAILED);
	if (room_live(room))
		room->ops->step(room);
	if (room->ops->stepped)
		room->ops->stepped(room);
	if (room_terminal(room) && (room->hold != ROOM_HELD || room->leg))
		room->rooms->on_over(room);
}

void room_kick(struct room *room)
{
	loop_defer(room->session->kvd->loop, &room->step);
}

void room_init(struct room *room)
{
	struct loop *loop = room->session->kvd->loop;

	sm_init(&room->sm, &room_table, ROOM_BOOT);
	list_init(&room->session_link);
	list_init(&room->all_link);
	list_init(&room->state_link);
	list_init(&room->parties);
	list_init(&room->moves);
	list_init(&room->ended);
	list_init(&room->mails);
	loop_defer_init(&room->step, on_step);
	loop_timer_init(&room->timer, loop, room->rooms->on_clock);
	room->opened_ns = loop_now_ns(loop);
	room->slot = ROOM_NO_SLOT;
	room->error = &no_error;
	room->ops->init(room);
}

void room_fini(struct room *room)
{
	struct party *party;

	assert(list_empty(&room->mails));
	list_foreach_safe(party, &room->parties, link)
		party_drop(party);
	room->ops->fini(room);
	if (room->error != &no_error && room->error != &error_lost)
		mem_free((void *)(uintptr_t)room->error);
}

void room_open_done(struct room *room)
{
	assert(sm_state(&room->sm) == ROOM_BOOT);
	room_publish(room);
	room_clock_set(room);
}

void room_count(const struct room *room, enum metric metric, uint64_t n)
{
	metrics_add(&room->session->kvd->metrics, metric, n);
}
