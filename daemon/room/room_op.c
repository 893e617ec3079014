/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening of a room, its pages and chunks. The schema, or the reader of a ring entry, has
 * checked types and limits; here the meaning is checked: which members are allowed for
 * which role, and the engine's own objects (pool, regions) by session.
 *
 * All are idempotent where an engine may retry: the same room again is EEXIST and leaves
 * the room untouched, the same chunk (seq) again is accepted once.
 */
#include "daemon/room/room_op.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>

#include "daemon/base/context.h"
#include "daemon/base/idmap.h"
#include "daemon/base/mem.h"
#include "daemon/room/room_source.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"

#define SOURCES_MAX 1024
/* key of a source: its texts, with a separator byte, and numbers */
#define SOURCE_WORDS_MAX \
	(LINK_ENDPOINT_MAX + PLACE_GROUP_MAX + PLACE_WORKER_MAX + POOL_NAME_MAX + 128)

/* ---- open ---- */

/* One entry of "sources": "tcp://…" or an object. */
static const struct field source_fields[] = {
	F_STR("endpoint", source_args, endpoint, OPTIONAL, LINK_ENDPOINT_MAX - 1, ""),
	F_STR("group", source_args, group, OPTIONAL, PLACE_GROUP_MAX - 1, ""),
	F_STR("worker", source_args, worker, OPTIONAL, PLACE_WORKER_MAX - 1, ""),
	F_INT("tp_rank", source_args, place[PLACE_TP], OPTIONAL, 0, PLACE_SIZE_MAX - 1,
	      ""),
	F_INT("pp_rank", source_args, place[PLACE_PP], OPTIONAL, 0, PLACE_SIZE_MAX - 1,
	      ""),
	F_INT("dp_rank", source_args, place[PLACE_DP], OPTIONAL, 0, PLACE_SIZE_MAX - 1,
	      ""),
	F_INT("cp_rank", source_args, place[PLACE_CP], OPTIONAL, 0, PLACE_SIZE_MAX - 1,
	      ""),
	F_STR("pool", source_args, pool, OPTIONAL, POOL_NAME_MAX - 1, ""),
	F_INT("rank", source_args, rank, DEFAULT(ROOM_ANY_RANK), 0, UINT32_MAX, ""),
	F_U64("session", source_args, session, OPTIONAL, ""),
	F_U64("room", source_args, room, OPTIONAL, ""),
	F_END,
};

/* Equal fields select the same pool, for any of its rooms; different fields for one
 * pool are detected after the look-up (room_cover.c). */
static int source_once(struct strmap *named, const struct source_args *args)
{
	const char *const texts[] = {args->endpoint, args->group, args->worker,
				     args->pool};
	char key[SOURCE_WORDS_MAX];
	size_t n = (size_t)snprintf(key, sizeof(key), "%lld %llu", (long long)args->rank,
				    (unsigned long long)args->session);
	int r;

	for (unsigned int i = 0; i < PLACE_AXES; i++)
		n += (size_t)snprintf(key + n, sizeof(key) - n, " %u", args->place[i]);
	for (size_t i = 0; i < ARRAY_LEN(texts); i++)
		n += (size_t)snprintf(key + n, sizeof(key) - n, "\n%.*s",
				      LINK_ENDPOINT_MAX, texts[i] ? texts[i] : "");
	assert(n < sizeof(key));
	r = strmap_put(named, key, named);
	if (r == -err_errno(ERR_EXIST))
		return err_raise(ERR_DUP, "repeats an earlier source; name each once");
	return err_pass(r);
}

static int add_source(struct room *room, struct strmap *named, const cJSON *item,
		      cJSON *theirs, size_t index)
{
	struct source_args source = {.endpoint = cJSON_GetStringValue(item),
				     .rank = ROOM_ANY_RANK};
	int r = source.endpoint ? 0 : fields_read_all(source_fields, item, &source);

	if (!cJSON_GetObjectItemCaseSensitive(item, "room"))
		source.room = room->number;
	if (r >= 0)
		r = source_once(named, &source);
	if (r >= 0)
		r = room_source_add(room, &source, theirs);
	return r < 0 ? err_prefix(r, "sources[%zu]", index) : 0;
}

static int add_sources(struct room *room, const struct room_open_args *args)
{
	const cJSON *sources = args->sources, *remote = args->remote, *item;
	cJSON *theirs;
	struct strmap named mem_cleanup(strmap_fini) = {0};
	size_t n = 0;
	int r;

	if (!sources)
		return err_raise(ERR_INVAL, "sources: missing");
	if (cJSON_GetArraySize(sources) == 0)
		return err_raise(ERR_INVAL, "sources: empty; at least one is required");
	if (remote && cJSON_GetArraySize(remote) != cJSON_GetArraySize(sources))
		return err_raise(ERR_INVAL, "remote: %d entries for %d sources",
				 cJSON_GetArraySize(remote), cJSON_GetArraySize(sources));
	theirs = remote ? remote->child : NULL;
	cJSON_ArrayForEach(item, sources) { /* at most 1024: SOURCES_MAX */
		if (remote &&
		    !cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(theirs, "views")))
			return err_raise(ERR_INVAL, "remote[%zu].views: missing", n);
		r = add_source(room, &named, item, theirs, n++);
		if (r < 0)
			return err_pass(r);
		theirs = theirs ? theirs->next : NULL;
	}
	return 0;
}

struct timeouts_args {
	uint32_t ms[3];
};
static const struct field timeouts_fields[] = {
	F_INT("bootstrap_ms", timeouts_args, ms[0], OPTIONAL, 1, ROOM_MS_MAX, ""),
	F_INT("waiting_ms", timeouts_args, ms[1], OPTIONAL, 1, ROOM_MS_MAX, ""),
	F_INT("stall_ms", timeouts_args, ms[2], OPTIONAL, 1, ROOM_MS_MAX, ""),
	F_END,
};

static int parse_open(struct session *session, const struct room_open_args *args,
		      struct room_args *out)
{
	struct timeouts_args limits = {0};
	int r = fields_read_all(timeouts_fields, args->timeouts, &limits);

	if (r < 0)
		return err_prefix(r, "timeouts");
	*out = (struct room_args){
		.session = session,
		.role = (enum room_role)args->key.role,
		.number = args->key.number,
		.pool = pool_find(session, args->pool),
		.receivers = args->receivers,
		.receivers_from_pullers = args->receivers_from_pullers,
		.lease_ns = args->lease_ms * LOOP_NS_PER_MS,
	};
	for (size_t i = 0; i < ARRAY_LEN(limits.ms); i++)
		out->limits_ns[i] = limits.ms[i] * LOOP_NS_PER_MS;
	return out->pool ? 0 : err_pass(-ENOENT);
}

/* Members without meaning for this role are a mistake of the caller. */
static int check_members(const cJSON *args, enum room_role role)
{
	static const struct {
		const char *name;
		unsigned int roles;
	} rules[] = {
		{"sources", 1u << ROOM_RECV | 1u << ROOM_PULL},
		{"receivers", 1u << ROOM_RECV | 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"receivers_from_pullers", 1u << ROOM_OFFER},
		{"views", 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"aux", 1u << ROOM_OFFER | 1u << ROOM_PULL},
		{"lease_ms", 1u << ROOM_OFFER},
		{"remote", 1u << ROOM_PULL},
		{"wait", 1u << ROOM_OFFER | 1u << ROOM_PULL},
	};
	const cJSON *told =
		cJSON_GetObjectItemCaseSensitive(args, "receivers_from_pullers");

	for (size_t i = 0; i < ARRAY_LEN(rules); i++) {
		if (cJSON_GetObjectItemCaseSensitive(args, rules[i].name) &&
		    !(rules[i].roles & 1u << role))
			return err_raise(ERR_INVAL, "%s: not for role %s", rules[i].name,
					 room_role_names[role]);
	}
	if (cJSON_IsTrue(told) && cJSON_GetObjectItemCaseSensitive(args, "receivers"))
		return err_raise(
			ERR_INVAL,
			"receivers: set by the pullers (receivers_from_pullers); omit "
			"it");
	return 0;
}

int room_pages_parse(struct session *session, const struct pages_args *args,
		     const struct layout *layout, bool lands, struct room_pages *pages_p)
{
	struct room_pages pages = {0};
	int r = room_maps_parse(args->views, args->aux, layout, session->account,
				&pages.maps);

	if (r >= 0 && lands)
		r = room_maps_check_once(&pages.maps);
	if (r >= 0)
		r = wait_spec_parse(args->wait, session, &pages.wait);
	if (r < 0)
		room_pages_fini(&pages);
	else
		*pages_p = pages;
	return r < 0 ? err_pass(r) : 0;
}

void room_pages_fini(struct room_pages *pages)
{
	room_maps_fini(&pages->maps);
	wait_spec_fini(&pages->wait);
}

/* Pages given by the caller, or read from the line. */
static int open_pages(struct session *session, const struct room_open_args *in,
		      const struct room_args *args, struct room_maps *maps,
		      struct room_pages *pages_p)
{
	struct pages_args said = in->pages;
	int r;

	if (maps) {
		if (said.views)
			return err_raise(ERR_INVAL, "views: given twice");
		if (args->role != ROOM_OFFER && args->role != ROOM_PULL)
			return err_raise(ERR_INVAL, "views: not for role %s",
					 room_role_names[args->role]);
		said.aux = -1; /* it is among the maps */
	}
	r = room_pages_parse(session, &said, args->pool->layout, args->role == ROOM_PULL,
			     pages_p);
	if (r >= 0 && maps) {
		room_maps_fini(&pages_p->maps);
		pages_p->maps = room_maps_steal(maps);
	}
	return r < 0 ? err_pass(r) : 0;
}

static int open_check(const cJSON *line, const struct room_open_args *in,
		      const struct room_args *args, struct room_names **names_p,
		      struct room_admit *admit)
{
	int r = check_members(line, args->role);

	if (r >= 0)
		r = room_names_make(in->request_id, in->traceparent, names_p);
	if (r >= 0)
		r = room_admit_parse(in->ticket, in->peers, admit);
	if (r >= 0 && (args->role == ROOM_RECV || args->role == ROOM_PULL))
		r = pool_check_target(args->pool);
	return r < 0 ? err_pass(r) : 0;
}

static int open_room(struct session *session, const cJSON *line,
		     const struct room_open_args *in, struct room_args *args,
		     struct room_maps *maps, struct room **room_p)
{
	struct room_pages pages = {0};
	struct room_names *names mem_cleanup(mem_freep) = NULL;
	struct room_admit admit mem_cleanup(room_admit_fini) = {0};
	struct room *room = NULL;
	int r = open_check(line, in, args, &names, &admit);

	if (r >= 0)
		r = open_pages(session, in, args, maps, &pages);
	if (r < 0)
		return err_pass(r);
	if (args->role == ROOM_OFFER && pages.maps.count == 0)
		r = err_raise(ERR_INVAL, "views: missing");
	if (args->role == ROOM_PULL && pages.maps.count == 0 && in->pages.wait)
		r = err_raise(ERR_INVAL, "wait: belongs in room.bind, with the pages");
	if (r >= 0)
		r = rooms_open(rooms_of(session->kvd), args, &room);
	if (r < 0) {
		room_pages_fini(&pages);
		return err_pass(r);
	}
	if (pages.maps.count > 0)
		room_bind_pages(room, &pages.maps, &pages.wait);
	room_pages_fini(&pages);
	room->names = mem_steal(names);
	room->admit = admit;
	admit = (struct room_admit){0};
	if (args->role == ROOM_RECV || args->role == ROOM_PULL)
		r = add_sources(room, in);
	if (r < 0) {
		rooms_discard(room);
		return err_pass(r);
	}
	rooms_begin(room);
	*room_p = room;
	return 0;
}

int room_op_open(struct session *session, const cJSON *line,
		 const struct room_open_args *in, struct room_maps *maps,
		 const struct room_slot *slot, struct room **room_p)
{
	struct room_args args = {0};
	int r = parse_open(session, in, &args);

	if (slot) {
		args.slot = slot->slot;
		args.slot_gen = slot->gen;
		args.slotted = true;
	}
	if (r >= 0)
		r = open_room(session, line, in, &args, maps, room_p);
	if (maps)
		room_maps_fini(maps);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- bind, send, abort ---- */

int room_op_want(const struct room *room, int role)
{
	if ((int)room->role == role)
		return 0;
	return err_raise(ERR_STATE, "room %llu is a %s room, not a %s one",
			 (unsigned long long)room->number, room_role_names[room->role],
			 room_role_names[role]);
}

int room_op_binds(const struct room *room)
{
	return room->role == ROOM_PULL ? 0 : err_pass(room_op_want(room, ROOM_RECV));
}

int room_op_bind(struct room *room, struct room_pages *pages)
{
	int r = room_op_binds(room);

	if (r >= 0)
		r = recv_bind(room, &pages->maps, &pages->wait);
	if (r < 0)
		wait_spec_fini(&pages->wait);
	room_maps_fini(&pages->maps);
	return r < 0 ? err_pass(r) : 0;
}

static int chunk_give(struct room *room, struct chunk *chunk)
{
	if (!room_live(room))
		return err_pass(room_refuse_over(room));
	if (room->send.last_given)
		return err_raise(ERR_STATE, "seq: %llu is after the last chunk",
				 (unsigned long long)chunk->seq);
	return err_pass(send_chunk(room, chunk));
}

int room_op_send(struct room *room, uint64_t seq, bool last, struct room_pages *pages)
{
	int r = room_op_want(room, ROOM_SEND);
	struct chunk *chunk = NULL;

	/* a retry of an accepted chunk gets the same answer */
	if (r >= 0 && !send_was_given(room, seq)) {
		chunk = mem_zalloc(sizeof(*chunk));
		r = chunk ? 0 : -ENOMEM;
		if (chunk) {
			chunk->seq = seq;
			chunk->last = last;
			chunk->maps = room_maps_steal(&pages->maps);
			chunk->wait = pages->wait;
			pages->wait = (struct wait_spec){0};
			r = chunk_give(room, chunk);
		}
	}
	if (r < 0 && chunk) {
		room_maps_fini(&chunk->maps);
		wait_spec_fini(&chunk->wait);
		mem_free(chunk);
	}
	room_pages_fini(pages);
	return r < 0 ? err_pass(r) : 0;
}

void room_op_abort(struct room *room, const char *who, const struct session *by,
		   const char *reason)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "aborted by %s '%.40s' (pid %d)%s%s", who, by->client,
		(int)by->pid, reason ? ": " : "", reason ? reason : "");
	room_fail(room, &why, NULL);
}

int room_op_extend(struct room *room, uint64_t lease_ms)
{
	int r = room_op_want(room, ROOM_OFFER);

	if (r >= 0 && (lease_ms == 0 || lease_ms > ROOM_MS_MAX))
		r = err_raise(ERR_RANGE, "lease_ms: %llu is not in 1 to %lld",
			      (unsigned long long)lease_ms, (long long)ROOM_MS_MAX);
	return r < 0 ? err_pass(r)
		     : err_pass(offer_extend(room, lease_ms * LOOP_NS_PER_MS));
}

/* ---- room.open's members ---- */

const struct field room_open_fields[] = {
	F_ROOM(room_open_args),
	F_CHOICE("role", room_open_args, key.role, REQUIRED, room_role_names,
		 "send, recv, offer or pull"),
	F_ID("pool", room_open_args, pool, REQUIRED, "of this session"),
	F_ARRAY("sources", room_open_args, sources, OPTIONAL, SOURCES_MAX,
		"recv, pull: endpoints, or {endpoint, pool, rank, session, room}; "
		"session: the epoch in the hello of the engine that owns the pool. "
		"Exactly one pool of that daemon must match, else EINVAL. {group, "
		"worker, tp_rank, pp_rank, dp_rank, cp_rank} instead of endpoint and "
		"session selects the engine registered in the directory"),
	F_ARRAY("remote", room_open_args, remote, OPTIONAL, SOURCES_MAX,
		"pull: {views} for each source, if the engine knows the pages; "
		"default: the pages of the offer"),
	F_INT("receivers", room_open_args, receivers, OPTIONAL, 1, ROOM_PARTIES_MAX,
	      "recv: number of receivers that each source waits for; offer, pull: "
	      "number of pullers"),
	F_BOOL("receivers_from_pullers", room_open_args, receivers_from_pullers,
	       "offer: the pullers set their number"),
	F_VIEWS(room_open_args,
		"offer, pull: {name: {pages, first_token, tokens, layers}}; a pull "
		"without views queries the offers, renews their leases and reads after "
		"room.bind"),
	F_AUX(room_open_args, "offer, pull: slot of view \"aux\""),
	F_INT("lease_ms", room_open_args, lease_ms, OPTIONAL, 1, ROOM_MS_MAX,
	      "offer: lifetime without a heartbeat"),
	F_OBJECT("timeouts", room_open_args, timeouts, OPTIONAL,
		 "{bootstrap_ms, waiting_ms, stall_ms}"),
	F_WAIT(room_open_args),
	F_STR("request_id", room_open_args, request_id, OPTIONAL, 0,
	      "the engine's request id: 1 to 128 bytes of visible ASCII without \" and "
	      "\\; shown in records and logs here and, for recv and pull, on the other "
	      "side"),
	F_STR("traceparent", room_open_args, traceparent, OPTIONAL, 0,
	      "span of the request, as in W3C Trace Context: 00-TRACE-PARENT-FLAGS, 55 "
	      "characters"),
	F_STR("ticket", room_open_args, ticket, OPTIONAL, 0,
	      "32 random hex digits, from the router or the decode side. A daemon that "
	      "requests the room must present the same, else it is refused (EAUTH). "
	      "Without ticket and peers, only daemons of the same user may request it"),
	F_ARRAY("peers", room_open_args, peers, OPTIONAL, ADMIT_PEERS_MAX,
		"names of curve_allow_file: only these daemons may take part"),
	F_END,
};
