/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.open … room.show (room.poll and room.list: commands_room_list.c). The schema has
 * checked types and limits; what is left here is the meaning: which members go with which
 * role, and the engine's own objects (pool, regions) by session.
 *
 * All are idempotent where an engine may retry: the same room.open again is
 * EEXIST with the room untouched, the same chunk (seq) again is accepted once,
 * abort and close of what has ended say so.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/control/brief.h"
#include "daemon/control/commands.h"
#include "daemon/control/commands_room.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/room_cover.h"
#include "daemon/room/room_record.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "daemon/session/wait.h"
#include "proto/json.h"

#define SOURCES_MAX 1024
#define MS_MAX INT64_C(86400000) /* a day */

#define F_ROOM                                                                         \
	{                                                                              \
		"room", FIELD_U64, true, 0, 0, "the router's number, a decimal string" \
	}
#define F_ROLE                                                                    \
	{                                                                         \
		"role", FIELD_STR, false, 0, 8,                                   \
			"send, recv, offer or pull; needed when the session has " \
			"several of this number"                                  \
	}
#define F_VIEWS(required, text)                             \
	{                                                   \
		"views", FIELD_OBJECT, required, 0, 0, text \
	}
#define F_WAIT                                                                          \
	{                                                                               \
		"wait", FIELD_OBJECT, false, 0, 0,                                      \
			"{kind:\"seq\", region, offset, value}: not before this word; " \
			"or "                                                           \
			"{kind:\"event\", device, handle}: not before this CUDA IPC "   \
			"event, recorded before"                                        \
	}
#define F_END                                      \
	{                                          \
		NULL, FIELD_ANY, false, 0, 0, NULL \
	}

static int role_of(const char *s, enum room_role *role_p)
{
	for (unsigned int i = 0; i < ROOM_ROLES; i++) {
		if (strcmp(s, room_role_names[i]) == 0) {
			*role_p = (enum room_role)i;
			return 0;
		}
	}
	return err_raise(ERR_INVAL, "role: '%.16s' is not send, recv, offer or pull", s);
}

/* The session's room by "room" and "role"; without a role the only one. */
struct room *room_asked(struct session *session, const cJSON *args, struct rooms *rooms)
{
	const char *role_name = NULL;
	struct room *found = NULL;
	enum room_role role = ROOM_SEND;
	uint64_t number = 0;

	if (json_get_u64(args, "room", true, &number) < 0 ||
	    json_get_str(args, "role", false, 8, &role_name) < 0)
		return NULL;
	if (role_name) {
		if (role_of(role_name, &role) < 0)
			return NULL;
		found = rooms_find(rooms, session, role, number);
	}
	for (unsigned int i = 0; i < ROOM_ROLES && !role_name; i++) {
		struct room *room = rooms_find(rooms, session, (enum room_role)i, number);

		if (room && found) {
			err_raise(ERR_INVAL,
				  "role: room %llu is both %s and %s here: say "
				  "which",
				  (unsigned long long)number,
				  room_role_names[found->role], room_role_names[i]);
			return NULL;
		}
		found = room ? room : found;
	}
	if (!found)
		err_raise(ERR_NOTFOUND, "room: no %s room %llu in this session",
			  role_name ? role_name : "open", (unsigned long long)number);
	return found;
}

/* ---- room.open ---- */

/* One entry of "sources": "tcp://…" or {endpoint, pool, rank, room}. */
static int add_source(struct room *room, const cJSON *item, const cJSON *theirs,
		      size_t index)
{
	static const char *const names[] = {"endpoint", "pool", "rank", "room", NULL};
	const char *endpoint = cJSON_GetStringValue(item), *pool = NULL;
	struct handshake *hs = rooms_kvd(room->rooms)->handshake;
	uint64_t number = room->number;
	int64_t rank = ROOM_ANY_RANK;
	struct remote *remote;
	struct party *party;
	int r = 0;

	if (!endpoint) {
		r = json_only(item, names);
		if (r >= 0)
			r = json_get_str(item, "endpoint", true, LINK_ENDPOINT_MAX - 1,
					 &endpoint);
		if (r >= 0)
			r = json_get_str(item, "pool", false, POOL_NAME_MAX - 1, &pool);
		if (r >= 0)
			r = json_get_int(item, "rank", false, 0, UINT32_MAX, &rank);
		if (r >= 0)
			r = json_get_u64(item, "room", false, &number);
	}
	if (r >= 0)
		r = handshake_reach(hs, endpoint, &remote);
	if (r < 0)
		return err_prefix(r, "sources[%zu]", index);
	party = room_party_add(room, remote);
	handshake_release(hs, remote); /* the party holds it */
	if (!party)
		return err_pass(-ENOMEM);
	snprintf(party->pool_name, sizeof(party->pool_name), "%s", pool ? pool : "");
	party->rank = rank;
	party->room_there = number;
	if (!theirs)
		return 0;
	party->theirs_json =
		cJSON_Duplicate(theirs, true); /* read when its pool is known */
	return party->theirs_json ? 0 : err_raise(ERR_NOMEM, "no memory for remote");
}

static int add_sources(struct room *room, const cJSON *args)
{
	const cJSON *sources = NULL, *remote = NULL, *item;
	size_t n = 0;
	int r = json_get_array(args, "sources", true, SOURCES_MAX, &sources);

	if (r >= 0)
		r = json_get_array(args, "remote", false, SOURCES_MAX, &remote);
	if (r < 0)
		return err_pass(r);
	if (cJSON_GetArraySize(sources) == 0)
		return err_raise(ERR_INVAL, "sources: empty, at least one is wanted");
	if (remote && cJSON_GetArraySize(remote) != cJSON_GetArraySize(sources))
		return err_raise(ERR_INVAL, "remote: %d entries for %d sources",
				 cJSON_GetArraySize(remote), cJSON_GetArraySize(sources));
	cJSON_ArrayForEach(item, sources) {
		const cJSON *views =
			remote ? cJSON_GetObjectItemCaseSensitive(
					 cJSON_GetArrayItem(remote, (int)n), "views")
			       : NULL;

		if (remote && !cJSON_IsObject(views))
			return err_raise(ERR_INVAL, "remote[%zu].views: missing", n);
		r = add_source(room, item, views, n++);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static int parse_limits(const cJSON *args, struct room_args *out)
{
	static const char *const names[] = {"bootstrap_ms", "waiting_ms", "stall_ms",
					    NULL};
	const cJSON *obj = NULL;
	int64_t ms;
	int r = json_get_object(args, "timeouts", false, &obj);

	if (r < 0 || !obj)
		return r < 0 ? err_pass(r) : 0;
	r = json_only(obj, names);
	for (size_t i = 0; i < 3 && r >= 0; i++) {
		ms = 0;
		r = json_get_int(obj, names[i], false, 1, MS_MAX, &ms);
		out->limits_ns[i] = (uint64_t)ms * LOOP_NS_PER_MS;
	}
	return r < 0 ? err_prefix(r, "timeouts") : 0;
}

static int parse_open(struct request *req, struct room_args *out)
{
	const char *role = NULL;
	int64_t pool = 0, receivers = 0, lease = 0;
	int r = json_get_u64(req->args, "room", true, &out->number);

	out->session = req->session;
	if (r >= 0)
		r = json_get_str(req->args, "role", true, 8, &role);
	if (r >= 0)
		r = role_of(role, &out->role);
	if (r >= 0)
		r = json_get_int(req->args, "pool", true, 0, JSON_INT_MAX, &pool);
	if (r >= 0)
		r = json_get_int(req->args, "receivers", false, 1, ROOM_PARTIES_MAX,
				 &receivers);
	if (r >= 0)
		r = json_get_int(req->args, "lease_ms", false, 1, MS_MAX, &lease);
	if (r >= 0)
		r = parse_limits(req->args, out);
	if (r < 0)
		return err_pass(r);
	out->receivers = (uint32_t)receivers;
	out->lease_ns = (uint64_t)lease * LOOP_NS_PER_MS;
	out->pool = pool_find(req->session, (uint64_t)pool);
	return out->pool ? 0 : err_pass(-ENOENT);
}

/* Members that this role has no use for are a mistake of the caller. */
static int check_members(const cJSON *args, enum room_role role)
{
	static const struct {
		const char *name;
		unsigned int roles;
	} rules[] = {
		{"sources", 1u << ROOM_RECV | 1u << ROOM_PULL},
		{"receivers", 1u << ROOM_RECV | 1u << ROOM_OFFER},
		{"views", 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"aux", 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"lease_ms", 1u << ROOM_OFFER},
		{"remote", 1u << ROOM_PULL},
		{"wait", 1u << ROOM_PULL},
	};

	for (size_t i = 0; i < ARRAY_LEN(rules); i++) {
		if (cJSON_GetObjectItemCaseSensitive(args, rules[i].name) &&
		    !(rules[i].roles & 1u << role))
			return err_raise(ERR_INVAL, "%s: not for role %s", rules[i].name,
					 room_role_names[role]);
	}
	return 0;
}

/* Bytes land in this pool: no field of a view may lie on another. */
static int check_target(const struct room_args *args)
{
	struct pool *pool = args->pool;
	int r;

	if (pool->can_receive || args->role == ROOM_SEND || args->role == ROOM_OFFER)
		return 0;
	r = layout_check_target(pool->layout);
	pool->can_receive = r == 0;
	return r < 0 ? err_prefix(r, "pool %llu", (unsigned long long)pool->id) : 0;
}

static int parse_maps(const cJSON *args, const struct layout *layout,
		      struct room_maps *maps)
{
	const cJSON *views = NULL;
	int64_t aux = -1;
	int r = json_get_object(args, "views", false, &views);

	if (r >= 0)
		r = json_get_int(args, "aux", false, 0, INT32_MAX, &aux);
	return r < 0 ? err_pass(r) : room_maps_parse(views, aux, layout, maps);
}

static void open_reply(struct request *req, const struct room *room)
{
	char number[24], gen[16], generation[24];
	struct brief brief;

	snprintf(number, sizeof(number), "%ju", (uintmax_t)room->number);
	snprintf(gen, sizeof(gen), "%u", room->slot_gen);
	snprintf(generation, sizeof(generation), "%ju", (uintmax_t)room->gen);
	brief_init(&brief);
	brief_text(&brief, "room", number);
	brief_text(&brief, "gen", gen);
	brief_text(&brief, "generation", generation);
	brief_number(&brief, "slot", room->slot);
	brief_number(&brief, "state", room_poll_state(room));
	request_reply_brief(req, &brief);
}

static int parse_wait(struct request *req, struct wait_spec *wait)
{
	return wait_spec_parse(rooms_waits(req->kvd->rooms),
			       cJSON_GetObjectItemCaseSensitive(req->args, "wait"),
			       req->session, wait);
}

static int run_open(struct request *req)
{
	struct rooms *rooms = req->kvd->rooms;
	struct room_args args = {0};
	struct room_maps maps = {0};
	struct wait_spec wait = {0};
	struct room *room = NULL;
	int r = parse_open(req, &args);

	if (r >= 0)
		r = check_members(req->args, args.role);
	if (r >= 0)
		r = check_target(&args);
	if (r >= 0)
		r = parse_maps(req->args, args.pool->layout, &maps);
	if (r >= 0)
		r = parse_wait(req, &wait);
	if (r >= 0 && (args.role == ROOM_OFFER || args.role == ROOM_PULL) &&
	    maps.count == 0)
		r = err_raise(ERR_INVAL, "views: missing");
	if (r >= 0)
		r = rooms_open(rooms, &args, &room);
	if (r < 0) {
		room_maps_fini(&maps);
		wait_spec_fini(&wait);
		return err_pass(r);
	}
	room->bound = maps.count > 0;
	if (room->bound)
		room->maps = maps;
	else
		room_maps_fini(&maps);
	room->wait = wait;
	if (args.role == ROOM_RECV || args.role == ROOM_PULL)
		r = add_sources(room, req->args);
	if (r < 0) {
		rooms_discard(room);
		return err_pass(r);
	}
	rooms_begin(room);
	open_reply(req, room);
	return 0;
}

/* ---- room.bind, room.send ---- */

static int want_role(const struct room *room, enum room_role role)
{
	if (room->role == role)
		return 0;
	return err_raise(ERR_STATE, "room %llu is a %s room, not a %s one",
			 (unsigned long long)room->number, room_role_names[room->role],
			 room_role_names[role]);
}

/* The room of this role, whatever else has its number; "role" may say so. */
static struct room *find_as(struct request *req, enum room_role role)
{
	uint64_t number = 0;
	struct room *room = NULL;

	if (!cJSON_GetObjectItemCaseSensitive(req->args, "role") &&
	    json_get_u64(req->args, "room", true, &number) >= 0)
		room = rooms_find(req->kvd->rooms, req->session, role, number);
	return room ? room : room_asked(req->session, req->args, req->kvd->rooms);
}

static int not_over(const struct room *room)
{
	if (room_live(room))
		return 0;
	return err_raise(ERR_STATE, "room %llu is %s%s%.200s",
			 (unsigned long long)room->number,
			 room_state_names[sm_state(&room->sm)],
			 room->error.code ? ": " : "", room->error.text);
}

static void reply_state(struct request *req, const struct room *room)
{
	struct brief brief;

	brief_init(&brief);
	brief_number(&brief, "state", room_poll_state(room));
	request_reply_brief(req, &brief);
}

static int run_bind(struct request *req)
{
	struct room *room = find_as(req, ROOM_RECV);
	struct room_maps maps;
	struct wait_spec wait;
	int r = room ? want_role(room, ROOM_RECV) : -ENOENT;

	if (r >= 0)
		r = parse_maps(req->args, room->pool->layout, &maps);
	if (r < 0)
		return err_pass(r);
	r = parse_wait(req, &wait);
	if (r >= 0) {
		r = recv_bind(room, &maps, &wait);
		if (r < 0)
			wait_spec_fini(&wait);
	}
	room_maps_fini(&maps);
	if (r < 0)
		return err_pass(r);
	reply_state(req, room);
	return 0;
}

static int parse_chunk(struct request *req, struct room *room, struct chunk *chunk)
{
	int64_t seq = 0;
	int r = json_get_int(req->args, "seq", true, 0, JSON_INT_MAX, &seq);

	if (r >= 0)
		r = json_get_bool(req->args, "last", false, &chunk->last);
	if (r >= 0)
		r = parse_maps(req->args, room->pool->layout, &chunk->maps);
	if (r >= 0)
		r = parse_wait(req, &chunk->wait);
	chunk->seq = (uint64_t)seq;
	return r;
}

static int run_send(struct request *req)
{
	struct room *room = find_as(req, ROOM_SEND);
	struct chunk *chunk;
	int r = room ? want_role(room, ROOM_SEND) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	chunk = mem_zalloc(sizeof(*chunk));
	if (!chunk)
		return err_pass(-ENOMEM);
	r = parse_chunk(req, room, chunk);
	/* a retry of what was taken is answered as it was */
	if (r >= 0 && !idmap_get(&room->chunk_by_seq, chunk->seq)) {
		r = not_over(room);
		if (r >= 0 && room->last_given)
			r = err_raise(ERR_STATE, "seq: %llu comes after the last chunk",
				      (unsigned long long)chunk->seq);
		if (r >= 0)
			r = send_chunk(room, chunk);
		if (r >= 0)
			chunk = NULL;
	}
	if (chunk) {
		room_maps_fini(&chunk->maps);
		wait_spec_fini(&chunk->wait);
		mem_free(chunk);
	}
	if (r < 0)
		return err_pass(r);
	reply_state(req, room);
	return 0;
}

/* ---- room.abort, room.close ---- */

/* A foreign room: by an administrator, by number over all sessions. */
static struct room *find_any(struct request *req)
{
	struct room *room = room_asked(req->session, req->args, req->kvd->rooms), *it;
	uint64_t number = 0;

	if (room || !req->session->admin ||
	    json_get_u64(req->args, "room", true, &number) < 0)
		return room;
	list_foreach(it, rooms_all(req->kvd->rooms), all_link) {
		const char *role = NULL;

		json_get_str(req->args, "role", false, 8, &role);
		if (it->number == number &&
		    (!role || strcmp(role, room_role_names[it->role]) == 0)) {
			err_clear();
			return it;
		}
	}
	return NULL;
}

static int run_abort(struct request *req)
{
	struct room *room = find_any(req);
	const char *reason = NULL;
	struct err why;
	int r = room ? json_get_str(req->args, "reason", false, 200, &reason) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	err_set(&why, ERR_ABORTED, "aborted by %s '%.40s' (pid %d)%s%.200s",
		room->session == req->session ? "its engine" : "an administrator",
		req->session->client, (int)req->session->pid, reason ? ": " : "",
		reason ? reason : "");
	room_fail(room, &why, NULL);
	reply_state(req, room);
	return 0;
}

static int run_close(struct request *req)
{
	struct room *room = room_asked(req->session, req->args, req->kvd->rooms);
	int r = room ? rooms_close(room) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	request_reply(req, NULL);
	return 0;
}

/* ---- room.show, room.list ---- */

static int run_show(struct request *req)
{
	struct room *room = find_any(req);
	cJSON *result;
	int r;

	if (!room)
		return err_pass(-ENOENT);
	result = request_result();
	if (!result)
		return err_pass(-ENOMEM);
	r = room_record_full(room, result);
	if (r < 0) {
		cJSON_Delete(result);
		return err_pass(r);
	}
	request_reply(req, result);
	return 0;
}

static const struct command_field open_fields[] = {
	F_ROOM,
	{"role", FIELD_STR, true, 0, 8, "send, recv, offer or pull"},
	{"pool", FIELD_INT, true, 0, JSON_INT_MAX, "of this session"},
	{"sources", FIELD_ARRAY, false, 0, SOURCES_MAX,
	 "recv, pull: endpoints, or {endpoint, pool, rank, room}"},
	{"remote", FIELD_ARRAY, false, 0, SOURCES_MAX,
	 "pull: {views} a source, when the engine knows the pages; else the offer's"},
	{"receivers", FIELD_INT, false, 1, ROOM_PARTIES_MAX,
	 "recv: how many receivers each source waits for; offer: how many pullers"},
	F_VIEWS(false, "offer, pull: {name: {pages, first_token, tokens, layers}}"),
	{"aux", FIELD_INT, false, 0, INT32_MAX, "offer, pull: slot of view \"aux\""},
	{"lease_ms", FIELD_INT, false, 1, MS_MAX, "offer: how long without a heartbeat"},
	{"timeouts", FIELD_OBJECT, false, 0, 0, "{bootstrap_ms, waiting_ms, stall_ms}"},
	F_WAIT,
	F_END,
};
static const struct command_field bind_fields[] = {
	F_ROOM,
	F_ROLE,
	F_VIEWS(false,
		"where the bytes shall land: {name: {pages, first_token, tokens}}"),
	{"aux", FIELD_INT, false, 0, INT32_MAX, "slot of view \"aux\" for the aux bytes"},
	F_WAIT,
	F_END,
};
static const struct command_field send_fields[] = {
	F_ROOM,
	F_ROLE,
	{"seq", FIELD_INT, true, 0, JSON_INT_MAX,
	 "the chunk's number: a retry is one chunk"},
	F_VIEWS(false, "what is ready: {name: {pages, first_token, tokens, layers}}"),
	{"last", FIELD_BOOL, false, 0, 0, "no chunk comes after this one"},
	{"aux", FIELD_INT, false, 0, INT32_MAX, "slot of view \"aux\" to send from"},
	F_WAIT,
	F_END,
};
static const struct command_field poll_fields[] = {
	{"rooms", FIELD_ARRAY, false, 0, ROOM_LIST_MAX, "numbers, or {room, role}"},
	{"since", FIELD_U64, false, 0, 0, "a version: only what changed after it"},
	F_END,
};
static const struct command_field abort_fields[] = {
	F_ROOM,
	F_ROLE,
	{"reason", FIELD_STR, false, 0, 200, "for the other side"},
	F_END};
static const struct command_field room_fields[] = {F_ROOM, F_ROLE, F_END};
static const struct command_field list_fields[] = {
	{"all", FIELD_BOOL, false, 0, 0, "every session's (administrators)"},
	{"limit", FIELD_INT, false, 1, ROOM_LIST_MAX, "at most so many, 1000 if absent"},
	F_END,
};

const struct command room_commands[] = {
	{"room.open", "open one side of a request's handover", open_fields, 0, run_open,
	 "room, gen and slot of the status page, generation, state"},
	{"room.bind", "give a recv room its pages", bind_fields, 0, run_bind, "state"},
	{"room.send", "send a chunk of a send room", send_fields, 0, run_send, "state"},
	{"room.poll", "states of rooms, by list or since a version", poll_fields, 0,
	 room_poll_run, "rooms: {room, role, gen, state, flags, bytes, error}; version"},
	{"room.abort", "fail a room on both sides", abort_fields, 0, run_abort, "state"},
	{"room.close", "forget a room that has ended", room_fields, 0, run_close,
	 "nothing"},
	{"room.show", "everything about one room", room_fields, 0, run_show,
	 "the record"},
	{"room.list", "records of all rooms", list_fields, 0, room_list_run,
	 "rooms: records; total"},
	{NULL, NULL, NULL, 0, NULL, NULL},
};
