/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two sizes of the same record: brief for polls, which an engine makes thousands of times
 * a second, and full for people. The record of a failed room (party, reason, complete
 * pages) is all that an engine or an operator gets, so no fact is in the log alone.
 */
#include "daemon/room/room_record.h"

#include <stdio.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/room/room_cover.h"
#include "daemon/room/room_waits.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"

void room_record_names(const struct room_names *names, struct text *out)
{
	if (!names)
		return;
	out_filled(out, "request_id", names->request_id);
	out_filled(out, "traceparent", names->traceparent);
	out_bool(out, "named_by_peer", names->from_peer);
}

void room_record_brief(const struct room *room, struct text *out)
{
	uint64_t first = room_first_token(room);

	out_id(out, "room", room->number);
	out_text(out, "role", room_role_names[room->role]);
	out_id(out, "gen", room->slot_gen);
	out_number(out, "state", room_poll_state(room));
	out_number(out, "flags", room_flags(room));
	out_number(out, "bytes", room->bytes);
	if (first != UINT64_MAX)
		out_number(out, "first_token", first);
	if (room->error->code != ERR_OK)
		out_error(out, room->error);
}

void room_record_missing(const cJSON *asked, const struct err *why, struct text *out)
{
	const cJSON *number = cJSON_IsObject(asked)
				      ? cJSON_GetObjectItemCaseSensitive(asked, "room")
				      : asked;
	char *text = number ? cJSON_PrintUnformatted(number) : NULL;

	out_object(out, NULL);
	out_json(out, "room", text ? text : "null");
	out_error(out, why);
	out_close(out, '}');
	out->failed |= number && !text;
	cJSON_free(text);
}

/* Row by row or packed, and why: the cost of a row on either path, or `staged`: no
 * adapter can access the memory. */
static void put_way(struct text *out, const struct xp_way *way)
{
	if (!way->row_bytes)
		return; /* no choice, or nothing moved yet */
	out_object(out, "way");
	out_bool(out, "packed", way->packed);
	out_bool(out, "staged", way->staged);
	out_number(out, "row_bytes", way->row_bytes);
	out_some(out, "request_ns", way->request_ns);
	out_number(out, "copy_ns", way->copy_ns);
	out_close(out, '}');
}

/* Bytes moved, and their direction; `staged`: some of them used a buffer. */
static void put_used(struct text *out, const struct room *room,
		     const struct room_used *used)
{
	out_bool(out, "staged", used->staged > 0);
	out_object(out, room_sends(room) ? "sent" : "received");
	out_number(out, "bytes", used->bytes);
	out_number(out, "staged_bytes", used->staged);
	out_double(out, "staged_share",
		   used->bytes ? (double)used->staged / (double)used->bytes : 0.0);
	out_number(out, "rows", used->rows);
	out_number(out, "descriptors", used->descriptors);
	out_close(out, '}');
}

static void put_party(struct text *out, const struct party *party)
{
	const struct remote *remote = party->remote;
	bool sends = room_sends(party->room);

	out_object(out, NULL);
	out_text(out, "name", remote->peer->name);
	out_text(out, "endpoint", remote->peer->endpoint);
	out_text(out, "known_as", remote->peer->known_as);
	out_text(out, "instance", remote->peer->instance_text);
	out_text(out, "transport",
		 remote->transport ? remote->transport->ops->name : "none");
	out_text(out, "path", party->path);
	put_used(out, party->room, &party->used);
	put_way(out, &party->way);
	out_text(out, "pool", party->pool_name);
	out_number(out, "rank", party->rank);
	out_id(out, "generation", party->gen);
	out_number(out, "wants", party->want_count);
	out_number(out, "bytes", sends ? party->used.bytes : party->due.got);
	out_number(out, "expected_bytes", sends ? 0 : party->due.expected);
	out_bool(out, "requested", party_asked(party));
	out_bool(out, "done", party_done(party));
	out_bool(out, "lost", party_lost(party));
	out_bool(out, "quiesced", party->abort & PARTY_QUIESCED);
	out_close(out, '}');
}

/* A failed room reports its complete pages, so that an engine recomputes or fetches
 * only the rest: hex digits, page 0 of the list is bit 0 of byte 0. */
static void put_landed(struct text *out, const struct room *room)
{
	if (sm_state(&room->sm) != ROOM_FAILED ||
	    (room->role != ROOM_RECV && room->role != ROOM_PULL))
		return;
	out_object(out, "landed");
	for (size_t i = 0; i < room->pages.maps.count; i++) {
		const struct room_map *map = &room->pages.maps.maps[i];
		cleanup_free uint8_t *bits = NULL;

		if (map->select)
			continue; /* of some tokens of a page */
		if (room_landed_pages(room, i, &bits) < 0) {
			err_clear();
			out->failed = true;
			return;
		}
		out_hex(out, map->view, bits, (map->page_count + 7) / 8);
	}
	out_close(out, '}');
}

static double ms_between(uint64_t a, uint64_t b)
{
	return a && b > a ? (double)(b - a) / 1e6 : 0.0;
}

void room_record_timings(struct text *out, uint64_t opened_ns, uint64_t waiting_ns,
			 uint64_t moving_ns, uint64_t end_ns)
{
	out_object(out, "timings_ms");
	out_double(out, "bootstrap",
		   ms_between(opened_ns, waiting_ns ? waiting_ns : end_ns));
	out_double(out, "waiting",
		   ms_between(waiting_ns, moving_ns ? moving_ns : end_ns));
	out_double(out, "transfer", ms_between(moving_ns, end_ns));
	out_double(out, "total", ms_between(opened_ns, end_ns));
	out_close(out, '}');
}

/* Milliseconds relative to now. */
static void put_waits(struct text *out, const char *what, const char *who,
		      uint64_t since_ns, uint64_t until_ns, uint64_t now_ns)
{
	out_object(out, "waits_for");
	out_text(out, "what", what);
	out_text(out, "who", who);
	out_double(out, "since_ms", ms_between(since_ns, now_ns));
	out_double(out, "until_ms", ms_between(now_ns, until_ns));
	out_close(out, '}');
}

static void put_counts(struct text *out, const struct room *room)
{
	const struct move *move;
	unsigned int moves = 0;

	list_foreach(move, &room->moves, link)
		moves++;
	out_number(out, "chunks", room->role == ROOM_SEND ? room->send.chunks_given : 0);
	out_number(out, "in_flight", moves);
	out_number(out, "expected_bytes", room->expected);
	out_number(out, "surplus_tokens", room->surplus);
	out_number(out, "receivers", room->receivers);
	out_bool(out, "bound", room_bound(room));
}

void room_record_full(const struct room *room, struct text *out)
{
	const struct layout *layout = room->pool->layout;
	uint64_t now_ns = loop_now_ns(room->session->kvd->loop);
	const struct party *party;
	struct room_waits waits;

	room_record_brief(room, out);
	out_text(out, "state_name", room_state_names[sm_state(&room->sm)]);
	out_bool(out, "aborting", sm_state(&room->sm) == ROOM_ABORTING);
	out_id(out, "generation", room->gen);
	out_number(out, "session", room->session->id);
	out_number(out, "pool", room->pool->id);
	out_text(out, "engine", room->session->client);
	out_number(out, "pid", session_pid(room->session));
	out_text(out, "pool_name", room->pool->name);
	room_record_names(room->names, out);
	room_admit_record(&room->admit, out);
	if (room_waits(room, &waits))
		put_waits(out, waits.what, waits.who, waits.since_ns, waits.until_ns,
			  now_ns);
	put_counts(out, room);
	put_used(out, room, &room->used);
	room_record_timings(out, room->opened_ns, room->waiting_ns, room->moving_ns,
			    room->ended_ns ? room->ended_ns : now_ns);
	put_landed(out, room);
	out_object(out, "page_tokens");
	for (uint32_t v = 0; v < layout->view_count; v++)
		out_number(out, layout->views[v].name, layout->views[v].page_tokens);
	out_close(out, '}');
	out_array(out, "peers");
	list_foreach(party, &room->parties, link)
		put_party(out, party);
	out_close(out, ']');
}

void room_record_request(const struct room_request *asked, uint64_t now_ns,
			 struct text *out)
{
	const struct remote *remote = asked->remote;
	char peer[96], what[200];

	room_peer_name(remote, peer, sizeof(peer));
	snprintf(what, sizeof(what), "an engine here to %s it, as requested by %.90s",
		 asked->role == ROOM_OFFER ? "offer" : "open", peer);
	out_object(out, NULL);
	out_id(out, "room", asked->number);
	out_text(out, "role", room_role_names[asked->role]);
	out_text(out, "state_name", "unopened");
	out_number(out, "pool", asked->pool);
	put_waits(out, what, "an engine", asked->since_ns, asked->until_ns, now_ns);
	out_array(out, "peers");
	out_object(out, NULL);
	out_text(out, "name", remote->peer->name);
	out_text(out, "endpoint", remote->peer->endpoint);
	out_text(out, "instance", remote->peer->instance_text);
	out_close(out, '}');
	out_close(out, ']');
	out_close(out, '}');
}
