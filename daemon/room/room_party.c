/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holds of a room's parties: their peer from joining to leaving, and its pool from the
 * time it is known until no bytes of the room move to or from it any more.
 */
#include "daemon/room/room_party.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/room/room.h"
#include "daemon/session/session.h"

/* The same names for all roles, and the allowed transitions. */
#define PARTY_TABLE(role, from_new, asked, reading, taken, answered) \
	static const struct sm_state role##_states[PARTY_STATES] = { \
		[PARTY_NEW] = {"new", from_new},                     \
		[PARTY_ASKED] = {"asked", asked},                    \
		[PARTY_READING] = {"reading", reading},              \
		[PARTY_TAKEN] = {"taken", taken},                    \
		[PARTY_ANSWERED] = {"answered", answered},           \
		[PARTY_CLOSING] = {"closing", SM_TO(PARTY_DONE)},    \
		[PARTY_DONE] = {"done", 0},                          \
		[PARTY_AWAY] = {"away", 0},                          \
	};                                                           \
	static const struct sm_table role##_table = {                \
		.name = #role "_party", .states = role##_states, .count = PARTY_STATES}

#define CLOSING_OR_DONE (SM_TO(PARTY_CLOSING) | SM_TO(PARTY_DONE))

/* A chunk may overtake the acknowledgement, and a source that sends nothing is done
 * with or without it. */
PARTY_TABLE(recv, SM_TO(PARTY_ASKED), SM_TO(PARTY_ANSWERED) | CLOSING_OR_DONE, 0, 0,
	    CLOSING_OR_DONE);
PARTY_TABLE(pull, SM_TO(PARTY_ASKED), SM_TO(PARTY_READING) | SM_TO(PARTY_ANSWERED),
	    SM_TO(PARTY_ANSWERED), 0, SM_TO(PARTY_CLOSING));
PARTY_TABLE(send, 0, 0, SM_TO(PARTY_TAKEN), SM_TO(PARTY_ANSWERED) | SM_TO(PARTY_DONE),
	    SM_TO(PARTY_DONE));
PARTY_TABLE(offer, SM_TO(PARTY_ANSWERED) | SM_TO(PARTY_DONE) | SM_TO(PARTY_AWAY), 0, 0, 0,
	    SM_TO(PARTY_DONE) | SM_TO(PARTY_AWAY));

static const struct sm_table *const party_tables[ROOM_ROLES] = {
	[ROOM_SEND] = &send_table,
	[ROOM_RECV] = &recv_table,
	[ROOM_OFFER] = &offer_table,
	[ROOM_PULL] = &pull_table,
};

bool party_asked(const struct party *party)
{
	return !room_sends(party->room) && party_state(party) != PARTY_NEW;
}

bool party_done(const struct party *party)
{
	return party_state(party) == PARTY_DONE ||
	       (party_state(party) == PARTY_TAKEN && party->want_count == 0);
}

struct party *room_party_by_pool(struct room *room, const struct remote *remote,
				 uint64_t pool)
{
	struct party *party;

	list_foreach(party, &room->parties, link) {
		if (party->remote == remote && party->pool && party->pool->id == pool)
			return party;
	}
	return NULL;
}

struct party *room_party_by_gen(struct room *room, const struct remote *remote,
				uint64_t gen)
{
	struct party *party;

	list_foreach(party, &room->parties, link) {
		if (party->remote == remote && party->gen == gen)
			return party;
	}
	return NULL;
}

bool room_parties_done(const struct room *room)
{
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		if (!party_done(party))
			return false;
	}
	return true;
}

struct party *room_party_add(struct room *room, struct remote *remote)
{
	struct party *party;

	assert(room_live(room));
	if (room->party_count >= ROOM_PARTIES_MAX) {
		err_raise(ERR_LIMIT, "more than %u parties in a room", ROOM_PARTIES_MAX);
		return NULL;
	}
	if (charge_more(&room->charge, sizeof(*party)) < 0)
		return NULL;
	party = mem_zalloc(sizeof(*party));
	if (!party) {
		charge_less(&room->charge, sizeof(*party));
		return NULL;
	}
	party->room = room;
	party->room_there = room->number;
	party->remote = remote;
	party->downs = remote->downs;
	party->joined_ns = loop_now_ns(room->session->kvd->loop);
	party->rank = ROOM_ANY_RANK;
	party->index = room->trace.parties++;
	sm_init(&party->sm, party_tables[room->role],
		room->role == ROOM_SEND ? PARTY_READING : PARTY_NEW);
	if (room->role == ROOM_SEND)
		list_init(&party->send.ack_link);
	remote->reaches++;
	sched_flow_init(&party->flow, &remote->line, room->session->id);
	list_push_back(&room->parties, &party->link);
	room->party_count++;
	return party;
}

int room_parties_act(struct room *room, bool (*due)(const struct party *party),
		     int (*act)(struct party *party))
{
	struct party *party;
	bool enough = false;

	list_foreach(party, &room->parties, link) {
		int r;

		if (!due(party))
			continue;
		if (enough) {
			room_kick(room);
			return 1;
		}
		r = act(party);
		if (r < 0 || !room_live(room))
			return err_pass(r);
		enough = loop_enough(room->session->kvd->loop);
	}
	return 0;
}

void party_use_pool(struct party *party, struct remote_pool *pool)
{
	assert(!party->pool && pool->remote == party->remote);
	party->pool = pool;
	handshake_pool_use(pool);
	snprintf(party->pool_name, sizeof(party->pool_name), "%s", pool->name);
	party->rank = pool->layout->rank;
	party->session = pool->session;
	memcpy(party->instance, party->remote->peer->instance, sizeof(party->instance));
	party->pool_id = pool->id;
	if (!room_sends(party->room))
		room_trace(party->room, TRACE_POOL, party, 0);
}

void party_release_pool(struct party *party)
{
	const struct move *move;

	assert(party->room);
	list_foreach(move, &party->room->moves, link) {
		if (move->party == party)
			return; /* the room's end releases it */
	}
	if (party->pool)
		handshake_pool_unuse(party->pool);
	party->pool = NULL;
}

void party_drop(struct party *party)
{
	struct room *room = party->room;

	assert(party->room->party_count > 0);
	if (party->pool)
		handshake_pool_unuse(party->pool);
	if (room->ops->party_fini)
		room->ops->party_fini(party);
	room_maps_fini(&party->theirs);
	mem_free(party->wants);
	list_remove(&party->link);
	room->party_count--;
	handshake_release(party->remote);
	charge_less(&room->charge, sizeof(*party));
	mem_free(party);
}
