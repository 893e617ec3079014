/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of rooms, and the start and end of a room. A room is found by three keys: by
 * its engine (session, role, number), by a partner that knows only pool and number, and
 * by generation, which is unique for each instance of the daemon.
 */
#include "daemon/room/rooms.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"
#include "daemon/base/share.h"
#include "daemon/session/status.h"
#include "daemon/session/wait.h"

static void on_terminal(struct room *room);
static void on_over(struct room *room);

int rooms_new(struct kvd *kvd, void **part_p)
{
	struct rooms *rooms = mem_zalloc(sizeof(*rooms));
	int r;

	if (!rooms)
		return err_pass(-ENOMEM);
	rooms->kvd = kvd;
	list_init(&rooms->all);
	for (unsigned int i = 0; i < ROOM_STATES; i++)
		list_init(&rooms->in_state[i]);
	list_init(&rooms->cursors);
	rooms->on_terminal = on_terminal;
	rooms->on_over = on_over;
	rooms->on_clock = room_on_clock;
	answer_init(rooms);
	msg_init(rooms);
	strmap_init(&rooms->by_key);
	strmap_init(&rooms->by_pool);
	strmap_init(&rooms->by_slot);
	idmap_init(&rooms->by_gen);
	early_init(rooms);
	deferred_aborts_init(rooms);
	r = late_init(rooms);
	if (r >= 0)
		r = trace_ring_init(&rooms->trace);
	if (r >= 0)
		r = waits_new(kvd->loop, &rooms->waits);
	if (r < 0) {
		rooms_free(rooms);
		return err_pass(r);
	}
	*part_p = rooms;
	return 0;
}

void rooms_free(void *part)
{
	struct rooms *rooms = part;

	room_sweep_stop(&rooms->change);
	room_sweep_stop(&rooms->loss);
	assert(list_empty(&rooms->all) && list_empty(&rooms->cursors));
	answer_fini(rooms);
	history_fini(&rooms->history);
	trace_ring_fini(&rooms->trace);
	early_fini(rooms);
	deferred_aborts_fini(rooms);
	late_fini(rooms);
	waits_free(rooms->waits);
	strmap_fini(&rooms->by_key);
	strmap_fini(&rooms->by_pool);
	strmap_fini(&rooms->by_slot);
	idmap_fini(&rooms->by_gen);
	mem_free(rooms);
}

/* ---- opening ---- */

static const struct role_ops *const roles[ROOM_ROLES] = {
	[ROOM_SEND] = &room_send_ops,
	[ROOM_RECV] = &room_recv_ops,
	[ROOM_OFFER] = &room_offer_ops,
	[ROOM_PULL] = &room_pull_ops,
};

static int may_open(struct rooms *rooms, const struct room_args *args)
{
	const struct config *config = rooms->kvd->config;
	const struct account *account = args->session->account;
	uint64_t own = account->objects[ACCOUNT_ROOMS];
	size_t open = idmap_count(&rooms->by_gen);
	int r = handshake_transports_ok(rooms->kvd->handshake);

	if (r < 0)
		return err_pass(r);
	if (rooms->kvd->draining && !args->leg) /* a move that runs may end */
		return err_raise(ERR_DRAIN, "no new rooms: the daemon is draining");
	if (!share_allows(config->rooms_max, open, own))
		return err_raise(
			ERR_LIMIT,
			"%zu rooms open, %llu of them of %s (limit %u, option rooms%s)",
			open, (unsigned long long)own, account->name, config->rooms_max,
			open < config->rooms_max ? "; the last are reserved for users "
						   "with few"
						 : "");
	if (args->session->ending)
		return err_raise(ERR_SESSION, "the session is ending");
	if (args->pool->closing)
		return err_raise(ERR_STATE, "pool %llu is being unregistered",
				 (unsigned long long)args->pool->id);
	if (rooms_find(rooms, args->session, args->role, args->number))
		return err_raise(ERR_EXIST, "room %llu (%s) is open already",
				 (unsigned long long)args->number,
				 room_role_names[args->role]);
	return 0;
}

/* Engines cannot name internal rooms of the daemon by number. */
static struct number_key session_key(const struct room *room)
{
	return (struct number_key){room->session->id,
				   room->role + (room->leg ? ROOM_ROLES : 0),
				   room->number};
}

static void leave_numbers(struct rooms *rooms, const struct room *room)
{
	struct number_key key = session_key(room);
	struct number_key pool_key = {room->pool->id, room->role, room->number};

	strmap_remove_bytes(&rooms->by_key, &key, sizeof(key));
	strmap_remove_bytes(&rooms->by_pool, &pool_key, sizeof(pool_key));
}

static int enter_numbers(struct rooms *rooms, struct room *room)
{
	struct number_key key = session_key(room);
	struct number_key pool_key = {room->pool->id, room->role, room->number};
	int r = strmap_put_bytes(&rooms->by_key, &key, sizeof(key), room);

	if (r < 0)
		return err_pass(r);
	r = strmap_put_bytes(&rooms->by_pool, &pool_key, sizeof(pool_key), room);
	if (r >= 0)
		r = idmap_put(&rooms->by_gen, room->gen, room);
	if (r >= 0)
		return 0;
	leave_numbers(rooms, room);
	return err_pass(r);
}

/* A slot given by the engine stays with the engine when this fails. */
static int enter_slot(struct rooms *rooms, struct room *room,
		      const struct room_args *args)
{
	struct status_page *page = room->session->status;
	struct slot_key key = {room->session->id, args->slot};
	uint32_t slot = args->slot;
	int r = 0;

	if (room->leg)
		return 0;
	room->slot_gen = args->slot_gen;
	if (!args->slotted)
		r = status_slot_take(page, room->number, &slot, &room->slot_gen);
	if (r < 0)
		return err_pass(r);
	key.slot = slot;
	r = strmap_put_bytes(&rooms->by_slot, &key, sizeof(key), room);
	if (r < 0 && !args->slotted)
		status_slot_release(page, slot);
	if (r >= 0)
		room->slot = slot;
	return r < 0 ? err_pass(r) : 0;
}

/* keep: it stays with its engine, which reads there why there is no room. */
static void leave_slot(struct rooms *rooms, struct room *room, bool keep)
{
	struct slot_key key = {room->session->id, room->slot};

	if (room->slot == ROOM_NO_SLOT)
		return;
	strmap_remove_bytes(&rooms->by_slot, &key, sizeof(key));
	if (!keep)
		status_slot_release(room->session->status, room->slot);
	room->slot = ROOM_NO_SLOT;
}

static int enter_tables(struct rooms *rooms, struct room *room,
			const struct room_args *args)
{
	int r = enter_numbers(rooms, room);

	if (r < 0)
		return err_pass(r);
	r = enter_slot(rooms, room, args);
	if (r >= 0)
		return 0;
	leave_numbers(rooms, room);
	idmap_remove(&rooms->by_gen, room->gen);
	return err_pass(r);
}

static void set_limits(struct room *room, const struct room_args *args,
		       const struct config *config)
{
	const uint64_t defaults[3] = {config->bootstrap_timeout_ns,
				      config->waiting_timeout_ns,
				      config->transfer_stall_timeout_ns};

	for (size_t i = 0; i < ARRAY_LEN(defaults); i++)
		room->limits_ns[i] =
			args->limits_ns[i] ? args->limits_ns[i] : defaults[i];
	room->receivers = args->receivers;
	if (room->receivers == 0 && !args->receivers_from_pullers &&
	    (args->role == ROOM_RECV || args->role == ROOM_OFFER))
		room->receivers = 1;
	if (room->role != ROOM_OFFER)
		return;
	room->offer.receivers_from_pullers = args->receivers_from_pullers;
	room->offer.lease_ns = args->lease_ns ? args->lease_ns : config->lease_ns;
	room->offer.lease_end_ns = room->opened_ns + room->offer.lease_ns;
}

int rooms_open(struct rooms *rooms, const struct room_args *args, struct room **room_p)
{
	struct room *room;
	int r = may_open(rooms, args);

	assert(args->role < ROOM_ROLES && args->pool->session == args->session);
	if (r < 0)
		return err_pass(r);
	room = mem_zalloc(sizeof(*room));
	if (!room)
		return err_pass(-ENOMEM);
	room->rooms = rooms;
	room->session = args->session;
	room->role = args->role;
	room->number = args->number;
	room->leg = args->leg;
	room->pool = args->pool;
	room->losses_seen = rooms->losses;
	room->trace.ring = &rooms->trace;
	do
		room->gen = loop_random_u64(rooms->kvd->loop);
	while (idmap_get(&rooms->by_gen, room->gen));
	room->ops = roles[room->role];
	room_init(room);
	set_limits(room, args, rooms->kvd->config);
	r = charge_take(&room->charge, args->session->account, ACCOUNT_ROOMS,
			sizeof(*room));
	if (r >= 0)
		r = enter_tables(rooms, room, args);
	if (r < 0) {
		charge_drop(&room->charge);
		mem_free(room);
		return err_pass(r);
	}
	list_push_back(&rooms->all, &room->all_link);
	pool_use(room->pool);
	rooms->live++;
	room_counts_enter(room, room->opened_ns);
	*room_p = room;
	return 0;
}

/* This receiver, which opens a number again, revokes the ABORT that its last
 * generation sent to sources before they knew it. */
static void take_abort_back(const struct room *room, uint64_t gen)
{
	struct wire_abort msg = {.room = room->number,
				 .from_role = (uint8_t)room->role,
				 .from_gen = gen,
				 .code = ERR_OK};
	const struct party *party;

	assert(room->role == ROOM_RECV);
	deferred_abort_revoke(room->rooms, gen);
	list_foreach(party, &room->parties, link) {
		/* one that is not up has dropped it */
		if (sm_state(&party->remote->peer->sm) == PEER_UP &&
		    handshake_send_abort(party->remote, &msg) < 0)
			err_clear(); /* it is going down */
	}
}

void rooms_begin(struct room *room)
{
	struct rooms *rooms = room->rooms;
	struct number_key key = {room->pool->id, room->role, room->number};
	const struct tombstone *tomb = tomb_find(rooms, &key);

	assert(sm_state(&room->sm) == ROOM_BOOT);
	metrics_add(&rooms->kvd->metrics, METRIC_ROOMS_OPENED, 1);
	room_open_done(room);
	if (room->role == ROOM_RECV && tomb)
		take_abort_back(room, tomb->gen);
	orphans_take(rooms, room);
	if (room->role == ROOM_SEND)
		early_take(rooms, room, tomb);
	room_kick(room);
}

/* ---- the end ---- */

static void on_terminal(struct room *room)
{
	struct rooms *rooms = room->rooms;
	struct party *party;

	assert(room_terminal(room) && rooms->live > 0);
	rooms->live--;
	if (!room->leg)
		history_put(&rooms->history, room);
	list_foreach(party, &room->parties, link) {
		if ((party->abort & PARTY_ABORT_RECEIVED) && !party_lost(party))
			answer_abort(party->remote, party->room_there, party->gen);
	}
}

/* Remove it from every table, then free it. */
static void room_free(struct room *room, bool keep_slot)
{
	struct rooms *rooms = room->rooms;

	assert(room->busy == 0);
	room_counts_leave(room, sm_state(&room->sm));
	if (room->hold != ROOM_DROPPED) /* else they may be in use by another */
		leave_numbers(rooms, room);
	idmap_remove(&rooms->by_gen, room->gen);
	room_cursors_pass(rooms, &room->all_link);
	room_cursors_pass(rooms, &room->session_link);
	list_remove(&room->all_link);
	list_remove(&room->session_link);
	loop_defer_cancel(&room->step);
	leave_slot(rooms, room, keep_slot);
	mails_drop(room, NULL);
	room_fini(room);
	mem_free(room->names);
	room_admit_fini(&room->admit);
	pool_unuse(room->pool);
	charge_drop(&room->charge);
	mem_free(room);
}

void rooms_discard(struct room *room)
{
	struct rooms *rooms = room->rooms;

	assert(rooms->live > 0 && list_empty(&room->moves));
	rooms->live--;
	room_free(room, room->slot != ROOM_NO_SLOT &&
				status_slot_claimed(room->session->status, room->slot));
}

int rooms_close(struct room *room)
{
	struct rooms *rooms = room->rooms;
	struct session *session = room->hold == ROOM_HELD ? NULL : room->session;
	struct number_key key = {room->pool->id, room->role, room->number};

	if (!room_terminal(room))
		return err_raise(ERR_STATE, "room %llu is %s: abort it first",
				 (unsigned long long)room->number,
				 room_state_names[sm_state(&room->sm)]);
	/* one that succeeded had all its partners: no request follows */
	if (room->error->code == ERR_OK)
		tomb_remove(rooms, &key);
	else if (room->role != ROOM_PULL && room->hold != ROOM_DROPPED && !room->leg)
		tomb_put(rooms, room);
	room_free(room, false);
	if (session)
		session_drain_end(session);
	return 0;
}

void rooms_keep_session(struct room *room, enum room_hold how)
{
	room->hold = how;
	session_drain_begin(room->session);
}

static void on_over(struct room *room)
{
	rooms_close(room);
}

void rooms_drop(struct room *room)
{
	struct rooms *rooms = room->rooms;
	struct err why;

	if (room->hold != ROOM_HELD)
		return;
	rooms_catch_up(room);
	if (room_terminal(room)) {
		rooms_close(room);
		return;
	}
	err_set(&why, ERR_ABORTED,
		"closed by its engine '%.40s' (pid %d) while in progress",
		room->session->client, (int)room->session->pid);
	room_fail(room, &why, NULL);
	/* Later requests for it are answered as if it were closed; its partners report
	 * their own end by its generation. */
	leave_numbers(rooms, room);
	rooms_keep_session(room, ROOM_DROPPED);
	if (room->role != ROOM_PULL)
		tomb_put(rooms, room);
	room_kick(room);
}
