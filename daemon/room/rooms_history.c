/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room/rooms_history.h"

#include <assert.h>
#include <stdio.h>

#include "daemon/base/mem.h"
#include "daemon/session/session.h"

static uint64_t longest(const struct room_maps *maps)
{
	uint64_t most = 0;

	for (size_t i = 0; i < maps->count; i++) {
		const struct room_map *map = &maps->maps[i];
		uint64_t tokens = map->select ? map->select_count
					      : map->token_end - map->token_begin;

		most = tokens > most ? tokens : most;
	}
	return most;
}

static uint64_t tokens_of(const struct room *room)
{
	const struct party *party;
	uint64_t most = 0;

	if (room->role != ROOM_SEND)
		return longest(&room->pages.maps);
	list_foreach(party, &room->parties, link) {
		uint64_t tokens = longest(&party->theirs);

		most = tokens > most ? tokens : most;
	}
	return most;
}

void history_put(struct history *history, const struct room *room)
{
	const struct party *first = list_first(&room->parties, struct party, link);
	struct ended_room *ended;

	assert(room_terminal(room));
	if (!history->ring)
		history->ring = mem_calloc(HISTORY_ROOMS, sizeof(*history->ring));
	if (!history->ring) {
		err_clear();
		return;
	}
	ended = &history->ring[history->count++ % HISTORY_ROOMS];
	mem_free(ended->names);
	*ended = (struct ended_room){
		.number = room->number,
		.session = room->session->id,
		.bytes = room->bytes,
		.expected = room->expected,
		.tokens = tokens_of(room),
		.surplus = room->surplus,
		.opened_ns = room->opened_ns,
		.waiting_ns = room->waiting_ns,
		.moving_ns = room->moving_ns,
		.ended_ns = room->ended_ns,
		.role = room->role,
		.code = room->error->code,
		.scope = room->error->scope,
		.retryable = room->error->retryable,
		.peers = room->party_count,
		.gen = room->gen,
		.layout = room->pool->digest,
		.trace = room->trace,
	};
	if (room->names && !(ended->names = mem_dup(room->names, sizeof(*room->names))))
		err_clear();
	snprintf(ended->engine, sizeof(ended->engine), "%.39s", room->session->client);
	if (first) {
		room_peer_name(first->remote, ended->peer, sizeof(ended->peer));
		snprintf(ended->transport, sizeof(ended->transport), "%s",
			 first->remote->transport ? first->remote->transport->ops->name
						  : "");
	}
	snprintf(ended->text, sizeof(ended->text), "%.199s", room->error->text);
}

const struct ended_room *history_at(const struct history *history, uint64_t seq)
{
	if (seq >= history->count || history->count - seq > HISTORY_ROOMS)
		return NULL;
	return &history->ring[seq % HISTORY_ROOMS];
}

void history_fini(struct history *history)
{
	for (uint64_t i = 0; history->ring && i < HISTORY_ROOMS; i++)
		mem_free(history->ring[i].names);
	mem_free(history->ring);
	*history = (struct history){0};
}
