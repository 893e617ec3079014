/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two sizes of the same record: brief for polls, which an engine makes thousands of times
 * a second, and full for people. The record of a failed room (party, reason, complete
 * pages) is all that an engine or an operator gets, so no fact is in the log alone.
 */
#include "daemon/room/room_record.h"

#include <stdio.h>

#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_cover.h"
#include "daemon/room/room_waits.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "proto/json.h"
#include "proto/kvd_status.h"

static bool add_error(cJSON *obj, const struct err *err)
{
	cJSON *e;

	if (err->code == ERR_OK)
		return true;
	e = cJSON_AddObjectToObject(obj, "error");
	return e && cJSON_AddStringToObject(e, "code", err_name(err->code)) &&
	       cJSON_AddStringToObject(e, "message", err->text) &&
	       cJSON_AddBoolToObject(e, "retryable", err->retryable) &&
	       cJSON_AddStringToObject(e, "scope", err_scope_name(err->scope));
}

bool room_record_names(cJSON *obj, const struct room_names *names)
{
	if (!names)
		return true;
	return (!names->request_id[0] ||
		cJSON_AddStringToObject(obj, "request_id", names->request_id)) &&
	       (!names->traceparent[0] ||
		cJSON_AddStringToObject(obj, "traceparent", names->traceparent)) &&
	       cJSON_AddBoolToObject(obj, "named_by_peer", names->from_peer);
}

static int or_nomem(bool ok)
{
	return ok ? 0 : err_raise(ERR_NOMEM, "no memory for the record of a room");
}

static bool add_first_token(cJSON *obj, const struct room *room)
{
	uint64_t first = room_first_token(room);

	return first == UINT64_MAX ||
	       cJSON_AddNumberToObject(obj, "first_token", (double)first);
}

static void text_error(struct text *out, const struct err *err)
{
	text_puts(out, ",\"error\":{\"code\":\"");
	text_puts(out, err_name(err->code));
	text_puts(out, "\",\"message\":");
	text_json(out, err->text);
	text_puts(out, err->retryable ? ",\"retryable\":true,\"scope\":\""
				      : ",\"retryable\":false,\"scope\":\"");
	text_puts(out, err_scope_name(err->scope));
	text_puts(out, "\"}");
}

static void text_member(struct text *out, const char *name, uint64_t value)
{
	text_puts(out, name);
	text_u64(out, value);
}

int room_record_text(const struct room *room, struct text *out)
{
	text_member(out, "{\"room\":\"", room->number);
	text_puts(out, "\",\"role\":\"");
	text_puts(out, room_role_names[room->role]);
	text_member(out, "\",\"gen\":\"", room->slot_gen);
	text_member(out, "\",\"state\":", room_poll_state(room));
	text_member(out, ",\"flags\":", room_flags(room));
	text_member(out, ",\"bytes\":", room->bytes);
	if (room_first_token(room) != UINT64_MAX)
		text_member(out, ",\"first_token\":", room_first_token(room));
	if (room->error->code != ERR_OK)
		text_error(out, room->error);
	text_puts(out, "}");
	return or_nomem(!out->failed);
}

static int record_brief(const struct room *room, cJSON *obj)
{
	char gen[16];

	snprintf(gen, sizeof(gen), "%u", room->slot_gen);
	return or_nomem(
		obj && json_add_u64(obj, "room", room->number) >= 0 &&
		cJSON_AddStringToObject(obj, "role", room_role_names[room->role]) &&
		cJSON_AddStringToObject(obj, "gen", gen) &&
		cJSON_AddNumberToObject(obj, "state", room_poll_state(room)) &&
		cJSON_AddNumberToObject(obj, "flags", room_flags(room)) &&
		cJSON_AddNumberToObject(obj, "bytes", (double)room->bytes) &&
		add_first_token(obj, room) && add_error(obj, room->error));
}

int room_record_missing(const cJSON *asked, const struct err *why, struct text *out)
{
	const cJSON *number = cJSON_IsObject(asked)
				      ? cJSON_GetObjectItemCaseSensitive(asked, "room")
				      : asked;
	char *text = number ? cJSON_PrintUnformatted(number) : NULL;
	bool filled = !number || text;

	if (text) {
		text_puts(out, "{\"room\":");
		text_puts(out, text);
	} else {
		text_puts(out, "{\"room\":null");
	}
	cJSON_free(text);
	text_error(out, why);
	text_puts(out, "}");
	return or_nomem(filled && !out->failed);
}

/* Row by row or packed, and why: the cost of a row on either path, or `staged`: no
 * adapter can access the memory. */
static bool add_way(cJSON *obj, const struct xp_way *way)
{
	cJSON *w;

	if (!way->row_bytes)
		return true; /* no choice, or nothing moved yet */
	w = cJSON_AddObjectToObject(obj, "way");
	return w && cJSON_AddBoolToObject(w, "packed", way->packed) &&
	       cJSON_AddBoolToObject(w, "staged", way->staged) &&
	       cJSON_AddNumberToObject(w, "row_bytes", way->row_bytes) &&
	       (!way->request_ns ||
		cJSON_AddNumberToObject(w, "request_ns", way->request_ns)) &&
	       cJSON_AddNumberToObject(w, "copy_ns", way->copy_ns);
}

/* Bytes moved, and their direction; `staged`: some of them used a buffer. */
static bool room_record_add_used(cJSON *obj, const struct room *room,
				 const struct room_used *used)
{
	double share = used->bytes ? (double)used->staged / (double)used->bytes : 0.0;
	cJSON *m;

	if (!cJSON_AddBoolToObject(obj, "staged", used->staged > 0))
		return false;
	m = cJSON_AddObjectToObject(obj, room_sends(room) ? "sent" : "received");
	return m && cJSON_AddNumberToObject(m, "bytes", (double)used->bytes) &&
	       cJSON_AddNumberToObject(m, "staged_bytes", (double)used->staged) &&
	       cJSON_AddNumberToObject(m, "staged_share", share) &&
	       cJSON_AddNumberToObject(m, "rows", (double)used->rows) &&
	       cJSON_AddNumberToObject(m, "descriptors", (double)used->descriptors);
}

static bool add_party(cJSON *list, const struct party *party)
{
	const struct remote *remote = party->remote;
	bool sends = room_sends(party->room);
	cJSON *p = cJSON_CreateObject();

	return p && cJSON_AddItemToArray(list, p) &&
	       cJSON_AddStringToObject(p, "name", remote->peer->name) &&
	       cJSON_AddStringToObject(p, "endpoint", remote->peer->endpoint) &&
	       cJSON_AddStringToObject(p, "known_as", remote->peer->known_as) &&
	       cJSON_AddStringToObject(p, "instance", remote->peer->instance_text) &&
	       cJSON_AddStringToObject(p, "transport",
				       remote->transport ? remote->transport->ops->name
							 : "none") &&
	       cJSON_AddStringToObject(p, "path", party->path) &&
	       room_record_add_used(p, party->room, &party->used) &&
	       add_way(p, &party->way) &&
	       cJSON_AddStringToObject(p, "pool", party->pool_name) &&
	       cJSON_AddNumberToObject(p, "rank", (double)party->rank) &&
	       json_add_u64(p, "generation", party->gen) >= 0 &&
	       cJSON_AddNumberToObject(p, "wants", (double)party->want_count) &&
	       cJSON_AddNumberToObject(
		       p, "bytes",
		       (double)(sends ? party->used.bytes : party->due.got)) &&
	       cJSON_AddNumberToObject(p, "expected_bytes",
				       sends ? 0.0 : (double)party->due.expected) &&
	       cJSON_AddBoolToObject(p, "requested", party_asked(party)) &&
	       cJSON_AddBoolToObject(p, "done", party_done(party)) &&
	       cJSON_AddBoolToObject(p, "lost", party_lost(party)) &&
	       cJSON_AddBoolToObject(p, "quiesced", party->abort & PARTY_QUIESCED);
}

/* A failed room reports its complete pages, so that an engine recomputes or fetches
 * only the rest: hex digits, page 0 of the list is bit 0 of byte 0. */
static bool add_landed(cJSON *obj, const struct room *room)
{
	cJSON *landed;

	if (sm_state(&room->sm) != ROOM_FAILED ||
	    (room->role != ROOM_RECV && room->role != ROOM_PULL))
		return true;
	landed = cJSON_AddObjectToObject(obj, "landed");
	for (size_t i = 0; landed && i < room->pages.maps.count; i++) {
		size_t bytes = (room->pages.maps.maps[i].page_count + 7) / 8;
		cleanup_free uint8_t *bits = NULL;
		cleanup_free char *hex = mem_zalloc(HEX_CHARS(bytes) + 1);

		if (!hex || room_landed_pages(room, i, &bits) < 0)
			return false;
		hex_write(bits, bytes, hex);
		if (!cJSON_AddStringToObject(landed, room->pages.maps.maps[i].view, hex))
			return false;
	}
	return landed;
}

static double ms_between(uint64_t a, uint64_t b)
{
	return a && b > a ? (double)(b - a) / 1e6 : 0.0;
}

static bool add_timings(cJSON *obj, const struct room *room)
{
	uint64_t now = loop_now_ns(rooms_kvd(room->rooms)->loop);
	uint64_t end = room->ended_ns ? room->ended_ns : now;
	cJSON *t = cJSON_AddObjectToObject(obj, "timings_ms");

	return t &&
	       cJSON_AddNumberToObject(
		       t, "bootstrap",
		       ms_between(room->opened_ns,
				  room->waiting_ns ? room->waiting_ns : end)) &&
	       cJSON_AddNumberToObject(
		       t, "waiting",
		       ms_between(room->waiting_ns,
				  room->moving_ns ? room->moving_ns : end)) &&
	       cJSON_AddNumberToObject(t, "transfer", ms_between(room->moving_ns, end)) &&
	       cJSON_AddNumberToObject(t, "total", ms_between(room->opened_ns, end));
}

/* Milliseconds relative to now. */
static bool add_waits(cJSON *obj, const struct room *room)
{
	uint64_t now = loop_now_ns(rooms_kvd(room->rooms)->loop);
	struct room_waits waits;
	cJSON *w;

	if (!room_waits(room, &waits))
		return true;
	w = cJSON_AddObjectToObject(obj, "waits_for");
	return w && cJSON_AddStringToObject(w, "what", waits.what) &&
	       cJSON_AddStringToObject(w, "who", waits.who) &&
	       cJSON_AddNumberToObject(w, "since_ms", ms_between(waits.since_ns, now)) &&
	       cJSON_AddNumberToObject(w, "until_ms", ms_between(now, waits.until_ns));
}

static bool add_counts(cJSON *obj, const struct room *room)
{
	const struct move *move;
	unsigned int moves = 0;

	list_foreach(move, &room->moves, link)
		moves++;
	return cJSON_AddNumberToObject(obj, "chunks",
				       room->role == ROOM_SEND ? room->send.chunks_given
							       : 0) &&
	       cJSON_AddNumberToObject(obj, "in_flight", moves) &&
	       cJSON_AddNumberToObject(obj, "expected_bytes", (double)room->expected) &&
	       cJSON_AddNumberToObject(obj, "surplus_tokens", (double)room->surplus) &&
	       cJSON_AddNumberToObject(obj, "receivers", room->receivers) &&
	       cJSON_AddBoolToObject(obj, "bound", room_bound(room));
}

static bool add_sizes(cJSON *obj, const struct layout *layout)
{
	cJSON *sizes = cJSON_AddObjectToObject(obj, "page_tokens");
	bool ok = sizes;

	for (uint32_t v = 0; ok && v < layout->view_count; v++)
		ok = cJSON_AddNumberToObject(sizes, layout->views[v].name,
					     layout->views[v].page_tokens);
	return ok;
}

int room_record_full(const struct room *room, cJSON *obj)
{
	const struct party *party;
	cJSON *peers;
	int r = record_brief(room, obj);

	if (r < 0)
		return err_pass(r);
	if (!cJSON_AddStringToObject(obj, "state_name",
				     room_state_names[sm_state(&room->sm)]) ||
	    !cJSON_AddBoolToObject(obj, "aborting",
				   sm_state(&room->sm) == ROOM_ABORTING) ||
	    json_add_u64(obj, "generation", room->gen) < 0 ||
	    !cJSON_AddNumberToObject(obj, "session", (double)room->session->id) ||
	    !cJSON_AddNumberToObject(obj, "pool", (double)room->pool->id) ||
	    !cJSON_AddStringToObject(obj, "engine", room->session->client) ||
	    !cJSON_AddNumberToObject(obj, "pid", session_pid(room->session)) ||
	    !cJSON_AddStringToObject(obj, "pool_name", room->pool->name) ||
	    !room_record_names(obj, room->names) ||
	    !room_admit_record(obj, &room->admit) || !add_waits(obj, room) ||
	    !add_counts(obj, room) || !room_record_add_used(obj, room, &room->used) ||
	    !add_timings(obj, room) || !add_landed(obj, room) ||
	    !add_sizes(obj, room->pool->layout))
		return or_nomem(false);
	peers = cJSON_AddArrayToObject(obj, "peers");
	list_foreach(party, &room->parties, link) {
		if (!peers || !add_party(peers, party))
			return or_nomem(false);
	}
	return or_nomem(peers);
}

int room_record_request(const struct room_request *asked, uint64_t now_ns, cJSON *obj)
{
	const struct remote *remote = asked->remote;
	char peer[96], what[200];
	cJSON *w, *peers, *p;

	room_peer_name(remote, peer, sizeof(peer));
	snprintf(what, sizeof(what), "an engine here to %s it, as requested by %.90s",
		 asked->role == ROOM_OFFER ? "offer" : "open", peer);
	if (json_add_u64(obj, "room", asked->number) < 0 ||
	    !cJSON_AddStringToObject(obj, "role", room_role_names[asked->role]) ||
	    !cJSON_AddStringToObject(obj, "state_name", "unopened") ||
	    !cJSON_AddNumberToObject(obj, "pool", (double)asked->pool))
		return or_nomem(false);
	w = cJSON_AddObjectToObject(obj, "waits_for");
	peers = cJSON_AddArrayToObject(obj, "peers");
	p = cJSON_CreateObject();
	return or_nomem(
		p && cJSON_AddItemToArray(peers, p) &&
		cJSON_AddStringToObject(p, "name", remote->peer->name) &&
		cJSON_AddStringToObject(p, "endpoint", remote->peer->endpoint) &&
		cJSON_AddStringToObject(p, "instance", remote->peer->instance_text) &&
		w && cJSON_AddStringToObject(w, "what", what) &&
		cJSON_AddStringToObject(w, "who", "an engine") &&
		cJSON_AddNumberToObject(w, "since_ms",
					ms_between(asked->since_ns, now_ns)) &&
		cJSON_AddNumberToObject(w, "until_ms",
					ms_between(now_ns, asked->until_ns)));
}
