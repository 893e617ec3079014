/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a room's parties hold: their peer from joining to leaving, a pool of it from when
 * it is known until nothing of the room moves to or from it any more.
 */
#include "daemon/room/room_party.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"

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
		if (!party->done)
			return false;
	}
	return true;
}

struct party *room_party_add(struct room *room, struct remote *remote)
{
	struct party *party;

	assert(remote->hs && room_live(room));
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
	party->joined_ns = loop_now_ns(rooms_kvd(room->rooms)->loop);
	party->rank = ROOM_ANY_RANK;
	party->index = room->trace.parties++;
	list_init(&party->ack_link);
	remote->reaches++;
	sched_flow_init(&party->flow, &remote->line, room->session->id);
	list_push_back(&room->parties, &party->link);
	room->party_count++;
	return party;
}

void party_use_pool(struct party *party, struct remote_pool *pool)
{
	assert(!party->pool && pool->remote == party->remote);
	party->pool = pool;
	party->withdrawn = false;
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
	for (size_t i = 0; party->coverage && i < room->maps.count; i++)
		coverage_fini(&party->coverage[i]);
	mem_free(party->coverage);
	room_maps_fini(&party->theirs);
	mem_free(party->wants);
	charge_drop(&party->wants_charge);
	cJSON_Delete(party->theirs_json);
	if (party->ack_pending)
		rooms_ack(party);
	list_remove(&party->link);
	room->party_count--;
	handshake_release(rooms_kvd(room->rooms)->handshake, party->remote);
	charge_less(&room->charge, sizeof(*party) + party->json_bytes);
	mem_free(party);
}

const char *party_label(const struct party *party, char *buf, size_t size)
{
	snprintf(buf, size, "%.190s pool '%.63s'", party->remote->label,
		 party->pool_name);
	return buf;
}
