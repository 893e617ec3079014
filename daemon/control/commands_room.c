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

/* Which pages a command means, and when they may be touched. */
struct pages_args {
	const cJSON *views;
	int64_t aux; /* slot of view "aux"; -1: none */
	const cJSON *wait;
};

#define F_ROOM(s) \
	F_U64("room", s, key.number, REQUIRED, "the router's number, a decimal string")
#define F_ROLE(s)                                                                  \
	F_CHOICE("role", s, key.role, DEFAULT(-1), room_role_names,                \
		 "send, recv, offer or pull; needed when the session has several " \
		 "of this number")
#define F_VIEWS(s, text) F_OBJECT("views", s, pages.views, OPTIONAL, text)
#define F_AUX(s, text) F_INT("aux", s, pages.aux, DEFAULT(-1), 0, INT32_MAX, text)
#define F_WAIT(s)                                                                     \
	F_OBJECT("wait", s, pages.wait, OPTIONAL,                                     \
		 "{kind:\"seq\", region, offset, value}: not before this word; or "   \
		 "{kind:\"event\", device, handle}: not before this CUDA IPC event, " \
		 "recorded before")

struct room *room_asked(struct session *session, const struct room_key *key,
			struct rooms *rooms)
{
	uint64_t number = key->number;
	struct room *found = NULL;

	if (key->role >= 0)
		found = rooms_find(rooms, session, (enum room_role)key->role, number);
	for (unsigned int i = 0; i < ROOM_ROLES && key->role < 0; i++) {
		struct room *room = rooms_find(rooms, session, (enum room_role)i, number);

		if (room && found) {
			err_raise(ERR_INVAL,
				  "role: room %llu is both %s and %s here: say which",
				  (unsigned long long)number,
				  room_role_names[found->role], room_role_names[i]);
			return NULL;
		}
		found = room ? room : found;
	}
	if (!found)
		err_raise(ERR_NOTFOUND, "room: no %s room %llu in this session",
			  key->role >= 0 ? room_role_names[key->role] : "open",
			  (unsigned long long)number);
	return found;
}

/* ---- room.open ---- */

struct open_args {
	struct room_key key;
	uint64_t pool;
	const cJSON *sources, *remote;
	uint32_t receivers, lease_ms;
	bool receivers_told;
	const cJSON *timeouts;
	const char *request_id, *traceparent;
	const char *ticket;
	const cJSON *peers;
	struct pages_args pages;
};

/* One entry of "sources": "tcp://…" or {endpoint, pool, rank, room}. */
#define MALLOC_BYTES 16u /* what an allocation costs besides */

struct source_args {
	const char *endpoint, *pool;
	int64_t rank;
	uint64_t room;
};
static const struct field source_fields[] = {
	F_STR("endpoint", source_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1, ""),
	F_STR("pool", source_args, pool, OPTIONAL, POOL_NAME_MAX - 1, ""),
	F_INT("rank", source_args, rank, DEFAULT(ROOM_ANY_RANK), 0, UINT32_MAX, ""),
	F_U64("room", source_args, room, OPTIONAL, ""),
	F_END,
};

/* A page number of two characters is a node of 64 bytes. */
static size_t json_nodes(const cJSON *json)
{
	size_t nodes = 1;
	const cJSON *it = NULL;

	cJSON_ArrayForEach(it, json)
		nodes += it->child ? json_nodes(it) : 1;
	return nodes;
}

static int add_source(struct room *room, const cJSON *item, const cJSON *theirs,
		      size_t index)
{
	struct handshake *hs = rooms_kvd(room->rooms)->handshake;
	struct source_args source = {.endpoint = cJSON_GetStringValue(item),
				     .rank = ROOM_ANY_RANK};
	const struct peer_client client = {.uid = room->session->uid,
					   .session = room->session->id};
	struct remote *remote;
	struct party *party;
	int r = source.endpoint ? 0 : fields_read_all(source_fields, item, &source);

	if (r >= 0)
		r = handshake_reach(hs, source.endpoint, &client, &remote);
	if (r < 0)
		return err_prefix(r, "sources[%zu]", index);
	party = room_party_add(room, remote);
	handshake_release(hs, remote); /* the party holds it */
	if (!party)
		return err_pass(-ENOMEM);
	snprintf(party->pool_name, sizeof(party->pool_name), "%s",
		 source.pool ? source.pool : "");
	party->rank = source.rank;
	party->room_there = cJSON_GetObjectItemCaseSensitive(item, "room") ? source.room
									   : room->number;
	if (!theirs)
		return 0;
	party->json_bytes = json_nodes(theirs) * (sizeof(cJSON) + MALLOC_BYTES);
	r = charge_more(&room->charge, party->json_bytes);
	if (r < 0) {
		party->json_bytes = 0;
		return err_pass(r);
	}
	party->theirs_json =
		cJSON_Duplicate(theirs, true); /* read when its pool is known */
	return party->theirs_json ? 0 : err_raise(ERR_NOMEM, "no memory for remote");
}

static int add_sources(struct room *room, const struct open_args *args)
{
	const cJSON *sources = args->sources, *remote = args->remote, *item;
	size_t n = 0;
	int r;

	if (!sources)
		return err_raise(ERR_INVAL, "sources: missing");
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

struct timeouts_args {
	uint32_t ms[3];
};
static const struct field timeouts_fields[] = {
	F_INT("bootstrap_ms", timeouts_args, ms[0], OPTIONAL, 1, MS_MAX, ""),
	F_INT("waiting_ms", timeouts_args, ms[1], OPTIONAL, 1, MS_MAX, ""),
	F_INT("stall_ms", timeouts_args, ms[2], OPTIONAL, 1, MS_MAX, ""),
	F_END,
};

static int parse_open(struct request *req, struct room_args *out)
{
	const struct open_args *args = request_args(req);
	struct timeouts_args limits = {0};
	int r = fields_read_all(timeouts_fields, args->timeouts, &limits);

	if (r < 0)
		return err_prefix(r, "timeouts");
	*out = (struct room_args){
		.session = req->session,
		.role = (enum room_role)args->key.role,
		.number = args->key.number,
		.pool = pool_find(req->session, args->pool),
		.receivers = args->receivers,
		.receivers_told = args->receivers_told,
		.lease_ns = args->lease_ms * LOOP_NS_PER_MS,
	};
	for (size_t i = 0; i < ARRAY_LEN(limits.ms); i++)
		out->limits_ns[i] = limits.ms[i] * LOOP_NS_PER_MS;
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
		{"receivers", 1u << ROOM_RECV | 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"receivers_told", 1u << ROOM_OFFER},
		{"views", 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"aux", 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"lease_ms", 1u << ROOM_OFFER},
		{"remote", 1u << ROOM_PULL},
		{"wait", 1u << ROOM_OFFER | 1u << ROOM_PULL},
	};
	const cJSON *told = cJSON_GetObjectItemCaseSensitive(args, "receivers_told");

	for (size_t i = 0; i < ARRAY_LEN(rules); i++) {
		if (cJSON_GetObjectItemCaseSensitive(args, rules[i].name) &&
		    !(rules[i].roles & 1u << role))
			return err_raise(ERR_INVAL, "%s: not for role %s", rules[i].name,
					 room_role_names[role]);
	}
	if (cJSON_IsTrue(told) && cJSON_GetObjectItemCaseSensitive(args, "receivers"))
		return err_raise(ERR_INVAL,
				 "receivers: the pullers say it (receivers_told)");
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

/* Nothing is left to undo when it fails. */
static int parse_pages(struct request *req, const struct pages_args *args,
		       const struct layout *layout, bool lands, struct room_maps *maps,
		       struct wait_spec *wait)
{
	int r = room_maps_parse(args->views, args->aux, layout, req->session->account,
				maps);

	if (r < 0)
		return err_pass(r);
	if (lands)
		r = room_maps_check_once(maps);
	if (r >= 0)
		r = wait_spec_parse(rooms_waits(req->kvd->rooms), args->wait,
				    req->session, wait);
	if (r < 0)
		room_maps_fini(maps);
	return r < 0 ? err_pass(r) : 0;
}

static int run_open(struct request *req)
{
	const struct open_args *in = request_args(req);
	struct room_args args = {0};
	struct room_maps maps = {0};
	struct wait_spec wait = {0};
	struct room_names *names mem_cleanup(mem_freep) = NULL;
	struct room_admit admit mem_cleanup(room_admit_fini) = {0};
	struct room *room = NULL;
	int r = parse_open(req, &args);

	if (r >= 0)
		r = check_members(req->line, args.role);
	if (r >= 0)
		r = room_names_make(in->request_id, in->traceparent, &names);
	if (r >= 0)
		r = room_admit_parse(in->ticket, in->peers, &admit);
	if (r >= 0)
		r = check_target(&args);
	if (r >= 0)
		r = parse_pages(req, &in->pages, args.pool->layout,
				args.role == ROOM_PULL, &maps, &wait);
	if (r < 0)
		return err_pass(r);
	if (args.role == ROOM_OFFER && maps.count == 0)
		r = err_raise(ERR_INVAL, "views: missing");
	if (args.role == ROOM_PULL && maps.count == 0 && in->pages.wait)
		r = err_raise(ERR_INVAL, "wait: comes with the pages, in room.bind");
	if (r >= 0)
		r = rooms_open(req->kvd->rooms, &args, &room);
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
	room->names = mem_steal(names);
	room->admit = admit;
	admit = (struct room_admit){0};
	if (args.role == ROOM_RECV || args.role == ROOM_PULL)
		r = add_sources(room, in);
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
static struct room *find_as(struct request *req, const struct room_key *key,
			    enum room_role role)
{
	struct rooms *rooms = req->kvd->rooms;
	struct room *room =
		key->role < 0 ? rooms_find(rooms, req->session, role, key->number) : NULL;

	return room ? room : room_asked(req->session, key, rooms);
}

static void commands_room_reply_state(struct request *req, const struct room *room)
{
	struct brief brief;

	brief_init(&brief);
	brief_number(&brief, "state", room_poll_state(room));
	request_reply_brief(req, &brief);
}

struct bind_args {
	struct room_key key;
	struct pages_args pages;
};

static int run_bind(struct request *req)
{
	const struct bind_args *args = request_args(req);
	struct room *room = args->key.role < 0 ? rooms_find(req->kvd->rooms, req->session,
							    ROOM_PULL, args->key.number)
					       : NULL;
	struct room_maps maps;
	struct wait_spec wait;
	int r;

	if (!room ||
	    rooms_find(req->kvd->rooms, req->session, ROOM_RECV, args->key.number))
		room = find_as(req, &args->key, ROOM_RECV);
	r = !room ? -ENOENT : room->role == ROOM_PULL ? 0 : want_role(room, ROOM_RECV);

	if (r >= 0)
		r = parse_pages(req, &args->pages, room->pool->layout, true, &maps,
				&wait);
	if (r < 0)
		return err_pass(r);
	r = recv_bind(room, &maps, &wait);
	if (r < 0)
		wait_spec_fini(&wait);
	room_maps_fini(&maps);
	if (r < 0)
		return err_pass(r);
	commands_room_reply_state(req, room);
	return 0;
}

struct extend_args {
	struct room_key key;
	uint32_t lease_ms;
};

static int run_extend(struct request *req)
{
	const struct extend_args *args = request_args(req);
	struct room *room = find_as(req, &args->key, ROOM_OFFER);
	int r = room ? want_role(room, ROOM_OFFER) : -ENOENT;

	if (r >= 0)
		r = offer_extend(room, args->lease_ms * LOOP_NS_PER_MS);
	if (r < 0)
		return err_pass(r);
	commands_room_reply_state(req, room);
	return 0;
}

struct send_args {
	struct room_key key;
	uint64_t seq;
	bool last;
	struct pages_args pages;
};

static int run_send(struct request *req)
{
	const struct send_args *args = request_args(req);
	struct room *room = find_as(req, &args->key, ROOM_SEND);
	struct chunk *chunk;
	int r = room ? want_role(room, ROOM_SEND) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	chunk = mem_zalloc(sizeof(*chunk));
	if (!chunk)
		return err_pass(-ENOMEM);
	chunk->seq = args->seq;
	chunk->last = args->last;
	r = parse_pages(req, &args->pages, room->pool->layout, false, &chunk->maps,
			&chunk->wait);
	/* a retry of what was taken is answered as it was */
	if (r >= 0 && !send_was_given(room, chunk->seq)) {
		if (!room_live(room))
			r = room_refuse_over(room);
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
	commands_room_reply_state(req, room);
	return 0;
}

/* ---- room.abort, room.close ---- */

struct room *room_asked_any(struct request *req, const struct room_key *key)
{
	struct room *room = room_asked(req->session, key, req->kvd->rooms), *it;

	if (room || !req->session->admin)
		return room;
	list_foreach(it, rooms_all(req->kvd->rooms), all_link) {
		if (it->number == key->number &&
		    (key->role < 0 || (enum room_role)key->role == it->role)) {
			err_clear();
			return it;
		}
	}
	err_raise(ERR_NOTFOUND, "room: no %s room %llu in any session",
		  key->role >= 0 ? room_role_names[key->role] : "open",
		  (unsigned long long)key->number);
	return NULL;
}

struct abort_args {
	struct room_key key;
	const char *reason;
};

static int run_abort(struct request *req)
{
	const struct abort_args *args = request_args(req);
	struct room *room = room_asked_any(req, &args->key);
	struct err why;

	if (!room)
		return err_pass(-ENOENT);
	err_set(&why, ERR_ABORTED, "aborted by %s '%.40s' (pid %d)%s%.200s",
		room->session == req->session ? "its engine" : "an administrator",
		req->session->client, (int)req->session->pid, args->reason ? ": " : "",
		args->reason ? args->reason : "");
	room_fail(room, &why, NULL);
	commands_room_reply_state(req, room);
	return 0;
}

static int run_close(struct request *req)
{
	const struct room_key_args *args = request_args(req);
	struct room *room = room_asked(req->session, &args->key, req->kvd->rooms);
	int r = room ? rooms_close(room) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	request_reply(req, NULL);
	return 0;
}

/* ---- room.show, room.list ---- */

static int run_show(struct request *req)
{
	const struct room_key_args *args = request_args(req);
	struct room *room = room_asked_any(req, &args->key);
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

static const struct field open_fields[] = {
	F_ROOM(open_args),
	F_CHOICE("role", open_args, key.role, REQUIRED, room_role_names,
		 "send, recv, offer or pull"),
	F_ID("pool", open_args, pool, REQUIRED, "of this session"),
	F_ARRAY("sources", open_args, sources, OPTIONAL, SOURCES_MAX,
		"recv, pull: endpoints, or {endpoint, pool, rank, room}"),
	F_ARRAY("remote", open_args, remote, OPTIONAL, SOURCES_MAX,
		"pull: {views} a source, when the engine knows the pages; else the "
		"offer's"),
	F_INT("receivers", open_args, receivers, OPTIONAL, 1, ROOM_PARTIES_MAX,
	      "recv: how many receivers each source waits for; offer, pull: how many "
	      "pullers there are"),
	F_BOOL("receivers_told", open_args, receivers_told,
	       "offer: the pullers say how many they are"),
	F_VIEWS(open_args, "offer, pull: {name: {pages, first_token, tokens, layers}}; a "
			   "pull without any asks for the offers, keeps their leases and "
			   "reads after room.bind"),
	F_AUX(open_args, "offer, pull: slot of view \"aux\""),
	F_INT("lease_ms", open_args, lease_ms, OPTIONAL, 1, MS_MAX,
	      "offer: how long without a heartbeat"),
	F_OBJECT("timeouts", open_args, timeouts, OPTIONAL,
		 "{bootstrap_ms, waiting_ms, stall_ms}"),
	F_WAIT(open_args),
	F_STR("request_id", open_args, request_id, OPTIONAL, 0,
	      "what the engine calls its request: 1 to 128 bytes of visible ASCII "
	      "without \" and \\; for records and logs here and, of recv and pull, at "
	      "the other side"),
	F_STR("traceparent", open_args, traceparent, OPTIONAL, 0,
	      "its span, as in W3C Trace Context: 00-TRACE-PARENT-FLAGS, 55 characters"),
	F_STR("ticket", open_args, ticket, OPTIONAL, 0,
	      "32 hex digits, random, of the router or the decode side: who asks for the "
	      "room must show the same, else it is refused (EAUTH). With neither ticket "
	      "nor peers only daemons of this one's user may ask"),
	F_ARRAY("peers", open_args, peers, OPTIONAL, ADMIT_PEERS_MAX,
		"names of curve_allow_file: no other daemon may take part"),
	F_END,
};
static const struct field bind_fields[] = {
	F_ROOM(bind_args),
	F_ROLE(bind_args),
	F_VIEWS(bind_args,
		"where the bytes shall land: {name: {pages, first_token, tokens}}"),
	F_AUX(bind_args, "slot of view \"aux\" for the aux bytes"),
	F_WAIT(bind_args),
	F_END,
};
static const struct field extend_fields[] = {
	F_ROOM(extend_args),
	F_ROLE(extend_args),
	F_INT("lease_ms", extend_args, lease_ms, REQUIRED, 1, MS_MAX,
	      "the lease from now on, and each time a puller extends it"),
	F_END,
};
static const struct field send_fields[] = {
	F_ROOM(send_args),
	F_ROLE(send_args),
	F_ID("seq", send_args, seq, REQUIRED, "the chunk's number: a retry is one chunk"),
	F_VIEWS(send_args, "what is ready: {name: {pages, first_token, tokens, layers}}"),
	F_BOOL("last", send_args, last, "no chunk comes after this one"),
	F_AUX(send_args, "slot of view \"aux\" to send from"),
	F_WAIT(send_args),
	F_END,
};
static const struct field abort_fields[] = {
	F_ROOM(abort_args),
	F_ROLE(abort_args),
	F_STR("reason", abort_args, reason, OPTIONAL, 200, "for the other side"),
	F_END,
};
const struct field room_key_fields[] = {
	F_ROOM(room_key_args),
	F_ROLE(room_key_args),
	F_END,
};

const struct command room_commands[] = {
	{"room.open", "open one side of a request's handover", open_fields, 0, run_open,
	 "room, gen and slot of the status page, generation, state"},
	{"room.bind", "give a recv room, or a pull without any, its pages", bind_fields,
	 0, run_bind, "state"},
	{"room.extend", "extend the lease of an offer", extend_fields, 0, run_extend,
	 "state"},
	{"room.send", "send a chunk of a send room", send_fields, 0, run_send, "state"},
	{"room.poll", "states of rooms, by list or since a version", room_poll_fields, 0,
	 room_poll_run, "rooms: {room, role, gen, state, flags, bytes, error}; version"},
	{"room.abort", "fail a room on both sides", abort_fields, 0, run_abort, "state"},
	{"room.close", "forget a room that has ended", room_key_fields, 0, run_close,
	 "nothing"},
	{"room.show", "everything about one room", room_key_fields, 0, run_show,
	 "the record. `ticket`: it has one (which is told to nobody); `admits`: its "
	 "`peers`. `waits_for`, until it has ended: {what, who, since_ms, until_ms "
	 "(then it ends otherwise)}; `surplus_tokens`: of chunks, that nobody had bound. "
	 "What it did is in `sent` or `received`, of the room and of each of its peers: "
	 "{bytes, staged_bytes (by way of a buffer of this daemon's), staged_share, "
	 "rows, descriptors (iovecs, work requests, messages or copies; 0: the other "
	 "side's daemon moved them)}; `staged`: some were; a peer's `path`: by what they "
	 "went, \"\": nothing did yet"},
	{"room.list", "records of rooms", room_list_fields, 0, room_list_run,
	 "rooms: records, and for each request of a peer for a room that is not open "
	 "here {room, role, state_name: \"unopened\", pool, peers, waits_for}; total: "
	 "the open rooms'"},
	{"room.history", "rooms that have ended, the latest first", room_history_fields,
	 0, room_history_run,
	 "rooms: {room, role, state_name, error, opened_ms, started_ms, ended_ms (ago), "
	 "timings_ms, bytes, expected_bytes, tokens (bound or offered, whatever came of "
	 "them), surplus_tokens, session, engine, peer_count, peer (the first), "
	 "transport}; next: if there are more; total: ended so far. The last 4096 are "
	 "kept"},
	{"room.trace", "what happened to the rooms of a number, and when",
	 room_trace_fields, 0, room_trace_run,
	 "rooms: {what room.show or room.history says; generation, opened_ns "
	 "(CLOCK_MONOTONIC), layout (its digest), open, now_ns (of one that has not "
	 "ended), views: {view, party, first_token, tokens, layers, pages, runs, "
	 "runs_cut}, views_cut: there are more than 64 views or receivers, "
	 "events, the latest first: {ns (since it was opened), what, party, seq, bytes, "
	 "generation}, left_out: events past 4096, forgotten: the first are "
	 "overwritten}; name, instance, boot_id, clock_ns. The latest 65536 events of "
	 "all rooms are kept"},
	{"room.plan", "what the planner is given for a room", room_plan_fields, 0,
	 room_plan_run,
	 "role, party, peer, pool (its), parties; src, dst, map, wants: as plan takes "
	 "them. Of a push the source's pages come with its chunks and are not kept: its "
	 "maps have no src_pages"},
	{"room.digest", "XXH3 of what a room's pages hold, by block of tokens",
	 room_digest_fields, 0, room_digest_run,
	 "role, block, units: {view, layer, field, unit, blocks: [first token, the one "
	 "behind the last, page of the first, digest]}, next: if there are over 4096 "
	 "blocks. Of what the pages hold now; one at a time in a session"},
	{.name = NULL},
};
