/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.publish, group.query, cluster.show: the directory as control commands. Each
 * request waits in its own groups_call, which owns it until the reply. If the session
 * ends first, the call fails with ERR_SESSION and the reply is discarded.
 *
 * The numbers of a rank are flat fields (tp_rank, tp_size, …); an axis that a group does
 * not have is omitted and means rank 0 of 1. A query with `since` is answered at once
 * from this daemon's cache, with the entries that changed. A query without it is sent to
 * the directory.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/commands_group.h"
#include "daemon/cluster/groups.h"
#include "daemon/cluster/loads.h"
#include "daemon/cluster/record.h"
#include "proto/out.h"
#include "daemon/request/reply_walk.h"
#include "daemon/session/session.h"
#include "proto/json.h"

#define SHOWN_MAX 1024u /* maximum of places and of watches in cluster.show */

struct group_call {
	struct groups_call call;
	struct request *req;
	bool loads;
};

static const char *const rank_names[PLACE_AXES] = {"tp_rank", "pp_rank", "dp_rank",
						   "cp_rank"};
static const char *const size_names[PLACE_AXES] = {"tp_size", "pp_size", "dp_size",
						   "cp_size"};

/* ---- the ranks of an answer: made piece by piece, of copies ---- */

/* One block has them all, their texts behind them: memory that is touched for the first
 * time takes most of the time. */
struct reply_rank {
	uint32_t rank[PLACE_AXES];
	const char *worker;
	const char *record; /* NULL: removed */
	const char *load;   /* or "" */
};

struct ranks_walk {
	struct reply_walk reply;
	struct roster roster;	       /* of a query of its own: not copied */
	const struct roster_entry *at; /* in it; NULL: in */
	struct reply_rank *ranks;      /* present ranks first, then removed ones */
	size_t bytes;
	unsigned int count, gone, next;
	uint64_t revision;
	bool complete, synced, whole;
	struct record record; /* of the entry being written */
};

static void put_place(struct text *text, const char *worker,
		      const uint32_t rank[PLACE_AXES])
{
	out_text(text, "worker", worker);
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		out_number(text, rank_names[i], rank[i]);
}

static void put_record(struct text *text, const struct record *record)
{
	char endpoint[LINK_ENDPOINT_MAX];

	record_dial(record, endpoint);
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		out_number(text, size_names[i], record->size[i]);
	record_put(text, record);
	out_text(text, "endpoint", endpoint);
	out_text(text, "pool", record->pool_count ? record->pools[0].name : "");
	out_text(text, "summary", record->summary);
	out_array(text, "pools");
	for (unsigned int i = 0; i < record->pool_count; i++)
		record_put_pool(text, &record->pools[i]);
	out_close(text, ']');
}

/* The directory stores the load as text. It is copied if it is exactly one object
 * without a newline, since a reply is one line. */
static void put_load(struct text *text, const char *load)
{
	if (*load != '{' || strpbrk(load, "\t\n\r") ||
	    json_check(load, strlen(load), 4) < 0) {
		err_clear();
		return;
	}
	out_json(text, "load", load);
}

static int put_rank(struct ranks_walk *walk, const struct reply_rank *rank)
{
	struct text *text = &walk->reply.text;
	int r;

	out_object(text, NULL);
	put_place(text, rank->worker, rank->rank);
	if (rank->record) {
		r = record_read(rank->record, &walk->record); /* checked when it was
							       * copied */
		if (r < 0)
			return err_pass(r);
		put_record(text, &walk->record);
		put_load(text, rank->load);
	}
	out_close(text, '}');
	return 0;
}

static void walk_skip_removed(struct ranks_walk *walk)
{
	while (walk->at && !walk->at->record) /* at most 256: ROSTER_GONE_MAX */
		walk->at = roster_next(&walk->roster, walk->at);
}

static struct reply_rank walk_rank(struct ranks_walk *walk)
{
	const struct roster_entry *entry = walk->at;
	struct reply_rank rank;

	if (!entry)
		return walk->ranks[walk->next];
	rank = (struct reply_rank){.worker = entry->place.worker,
				   .record = entry->record,
				   .load = entry->load ? entry->load : ""};
	memcpy(rank.rank, entry->place.rank, sizeof(rank.rank));
	walk->at = roster_next(&walk->roster, entry);
	walk_skip_removed(walk);
	return rank;
}

static int ranks_piece(struct reply_walk *reply)
{
	struct ranks_walk *walk = container_of(reply, struct ranks_walk, reply);
	struct text *text = &reply->text;
	struct reply_rank rank;
	int r;

	if (walk->next == 0) {
		out_number(text, "revision", walk->revision);
		out_bool(text, "complete", walk->complete);
		out_bool(text, "synced", walk->synced);
		out_bool(text, "whole", walk->whole);
		out_array(text, "ranks");
	}
	if (walk->next == walk->count) {
		out_close(text, ']');
		out_array(text, "gone");
	}
	if (walk->next == walk->count + walk->gone) {
		out_close(text, ']');
		return 0;
	}
	rank = walk_rank(walk);
	walk->next++;
	r = put_rank(walk, &rank);
	return r < 0 ? err_pass(r) : 1;
}

static void walk_free(struct ranks_walk *walk)
{
	roster_discard(&walk->roster, walk->reply.req->kvd->offload);
	mem_free_large(walk->ranks, walk->bytes);
	mem_free(walk);
}

static void ranks_end(struct reply_walk *reply)
{
	walk_free(container_of(reply, struct ranks_walk, reply));
}

/* ---- contents of a reply ---- */

struct since {
	uint64_t revision; /* 0: all */
	bool loads;
};

/* Has the entry changed since revision `since`? */
static bool is_new(const struct roster_entry *entry, const struct since *since)
{
	return entry->record_rev > since->revision ||
	       (since->loads && entry->load_rev > since->revision);
}

static const char *load_of(const struct roster_entry *entry, const struct since *since)
{
	return since->loads && entry->load ? entry->load : "";
}

static const char *text_copy(char **at_p, const char *text)
{
	char *copy = *at_p;

	*at_p = stpcpy(copy, text) + 1;
	return copy;
}

/* Copies an entry, its texts to *at_p. */
static void rank_copy(const struct roster_entry *entry, const struct since *since,
		      struct reply_rank *rank, char **at_p)
{
	memcpy(rank->rank, entry->place.rank, sizeof(rank->rank));
	rank->worker = text_copy(at_p, entry->place.worker);
	rank->record = entry->record ? text_copy(at_p, entry->record) : NULL;
	rank->load = entry->record ? text_copy(at_p, load_of(entry, since)) : "";
}

static int walk_fill(struct ranks_walk *walk, const struct roster *roster,
		     const struct since *since)
{
	const struct roster_entry *entry;
	unsigned int at = 0, gone = 0;
	char *texts;

	for (entry = roster_after(roster, since->revision); entry;
	     entry = roster_next(roster, entry)) {
		if (!is_new(entry, since) || (!entry->record && walk->whole))
			continue;
		walk->count += entry->record != NULL;
		walk->gone += !entry->record;
		walk->bytes += sizeof(*walk->ranks) + strlen(entry->place.worker) + 1;
		if (entry->record)
			walk->bytes += strlen(entry->record) + 1 +
				       strlen(load_of(entry, since)) + 1;
	}
	walk->ranks = mem_alloc(walk->bytes);
	if (!walk->ranks)
		return err_pass(-ENOMEM);
	texts = (char *)(walk->ranks + walk->count + walk->gone);
	for (entry = roster_after(roster, since->revision); entry;
	     entry = roster_next(roster, entry)) {
		if (!is_new(entry, since) || (!entry->record && walk->whole))
			continue;
		rank_copy(entry, since,
			  &walk->ranks[entry->record ? at++ : walk->count + gone++],
			  &texts);
	}
	return 0;
}

/* own: the roster, if it may be moved; it has no loads that are not wanted. */
static int walk_begin(struct ranks_walk *walk, const struct roster *roster,
		      struct roster *own, const struct since *since)
{
	if (!own)
		return err_pass(walk_fill(walk, roster, since));
	roster_move(&walk->roster, own);
	walk->count = walk->roster.count;
	walk->at = roster_after(&walk->roster, 0);
	walk_skip_removed(walk);
	return 0;
}

static void answer_ranks(struct request *req, const struct roster *roster,
			 struct roster *own, const struct since *since, bool synced)
{
	struct ranks_walk *walk = mem_zalloc(sizeof(*walk));
	struct since from = *since;

	if (walk) {
		walk->reply.req = req;
		roster_init(&walk->roster, 0);
		walk->whole = !since->revision || !roster_knows(roster, since->revision);
		from.revision = walk->whole ? 0 : since->revision;
		walk->revision = roster->rev;
		walk->complete = groups_complete(roster);
		walk->synced = synced;
	}
	if (!walk || walk_begin(walk, roster, own, &from) < 0) {
		if (walk)
			walk_free(walk);
		request_fail_last(req);
		return;
	}
	walk->reply.piece = ranks_piece;
	walk->reply.end = ranks_end;
	reply_walk_begin(&walk->reply, req);
}

/* ---- group.publish, group.query ---- */

static void commands_group_on_done(struct groups_call *call, const struct err *err,
				   const struct roster *roster)
{
	struct group_call *gc = container_of(call, struct group_call, call);
	const struct since all = {.loads = gc->loads};

	if (err)
		request_fail(gc->req, err);
	else if (!gc->req->session)
		request_drop(gc->req);
	else if (roster)
		answer_ranks(gc->req, roster, call->own, &all, call->fresh);
	else
		request_reply(gc->req);
	mem_free(gc);
}

static struct group_call *group_call_new(struct request *req, bool loads)
{
	struct group_call *gc = mem_zalloc(sizeof(*gc));

	if (!gc)
		return NULL;
	gc->call.on_done = commands_group_on_done;
	gc->req = req;
	gc->loads = loads;
	return gc;
}

struct publish_args {
	const char *group, *worker;
	uint32_t rank[PLACE_AXES], size[PLACE_AXES];
	const char *endpoint, *pool, *model, *url, *engine, *bootstrap;
	const char *summary; /* NULL: "" */
};

static int get_record(const struct publish_args *args, struct record *record)
{
	record_init(record);
	memcpy(record->size, args->size, sizeof(record->size));
	if (args->pool || args->model) {
		field_copy(record->pools[0].name, sizeof(record->pools[0].name),
			   args->pool);
		field_copy(record->pools[0].model, sizeof(record->pools[0].model),
			   args->model);
		record->pool_count = 1;
	}
	field_copy(record->url, sizeof(record->url), args->url);
	field_copy(record->engine, sizeof(record->engine), args->engine);
	field_copy(record->bootstrap, sizeof(record->bootstrap), args->bootstrap);
	field_copy(record->summary, sizeof(record->summary), args->summary);
	return args->endpoint ? err_pass(record_reach(record, args->endpoint)) : 0;
}

static int run_publish(struct request *req)
{
	const struct publish_args *args = request_args(req);
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	struct group_call *gc = group_call_new(req, false);
	struct place place = {.worker = ""};
	int r = gc && record ? get_record(args, record) : -ENOMEM;

	if (r == 0) {
		field_copy(place.group, sizeof(place.group), args->group);
		field_copy(place.worker, sizeof(place.worker), args->worker);
		memcpy(place.rank, args->rank, sizeof(place.rank));
		r = groups_publish(groups_of(req->kvd), req->session->id, &place, record,
				   &gc->call);
	}
	if (r < 0)
		mem_free(gc);
	else if (loads_of(req->kvd))
		loads_begin(loads_of(req->kvd), req->session->id);
	return err_pass(r);
}

struct query_args {
	const char *group;
	int64_t since; /* -1: not given */
	bool loads;
};

/* Answer from the cache if it is complete, with changes only; otherwise query the
 * directory. */
static int query_since(struct request *req, const struct query_args *args, bool *done_p)
{
	const struct since since = {.revision = (uint64_t)args->since,
				    .loads = args->loads};
	struct names_user user = {.on_change = NULL};
	int r = groups_use(groups_of(req->kvd), args->group, args->loads, &user);

	if (r < 0)
		return err_pass(r);
	*done_p = groups_known(&user);
	if (*done_p)
		answer_ranks(req, groups_roster(&user), NULL, &since,
			     groups_synced(&user));
	groups_unuse(&user);
	return 0;
}

static int run_query(struct request *req)
{
	const struct query_args *args = request_args(req);
	struct group_call *gc;
	bool done = false;
	int r = args->since >= 0 ? query_since(req, args, &done) : 0;

	if (r < 0 || done)
		return err_pass(r);
	gc = group_call_new(req, args->loads);
	if (!gc)
		return err_pass(-ENOMEM);
	r = groups_query(groups_of(req->kvd), req->session->id, args->group, args->loads,
			 &gc->call);
	if (r < 0)
		mem_free(gc);
	return err_pass(r);
}

/* ---- cluster.show ---- */

struct show_walk {
	struct text *out;
	const struct session *session; /* NULL: all */
	unsigned int count;
};

static bool put_shown(void *arg, uint64_t session, const struct place *place,
		      const char *record, bool taken)
{
	struct show_walk *walk = arg;
	struct text *out = walk->out;

	(void)record;
	if (walk->session && session && session != walk->session->id)
		return true;
	if (walk->count++ >= SHOWN_MAX)
		return false;
	out_object(out, NULL);
	out_text(out, "group", place->group);
	put_place(out, place->worker, place->rank);
	out_number(out, "session", session);
	out_bool(out, "taken", taken);
	out_close(out, '}');
	return true;
}

static bool put_watch(void *arg, const char *group, unsigned int entries, bool synced)
{
	struct show_walk *walk = arg;
	struct text *out = walk->out;

	if (walk->count++ >= SHOWN_MAX)
		return false;
	out_object(out, NULL);
	out_text(out, "group", group);
	out_number(out, "entries", entries);
	out_bool(out, "synced", synced);
	out_close(out, '}');
	return true;
}

static void put_state(struct text *out, const struct kvd *kvd)
{
	struct groups_state state;
	uint64_t now_ns = loop_now_ns(kvd->loop);
	bool listed = groups_trust(groups_of(kvd)) == GROUPS_TRUST_LISTED;

	groups_state(groups_of(kvd), &state);
	out_text(out, "kind", state.kind);
	out_text(out, "where", state.where);
	out_bool(out, "up", state.directory.up);
	out_number(out, "since_ms", (now_ns - state.directory.since_ns) / LOOP_NS_PER_MS);
	if (!state.directory.up)
		out_text(out, "why", state.directory.why.text);
	out_number(out, "lease_ms", state.lease_ns / LOOP_NS_PER_MS);
	out_text(out, "trust", listed ? "listed" : "directory");
	out_id(out, "refused", state.directory.refused);
	out_id(out, "puts", state.directory.puts);
	out_id(out, "events", state.directory.events);
	out_id(out, "reconnects", state.directory.reconnects);
}

static int run_cluster(struct request *req)
{
	struct reply reply;
	struct text *out = reply_begin(&reply, req);
	struct show_walk places = {.out = out,
				   .session = req->session->admin ? NULL : req->session};
	struct show_walk watches = {.out = out};

	put_state(out, req->kvd);
	out_array(out, "places");
	groups_each_place(groups_of(req->kvd), put_shown, &places);
	out_close(out, ']');
	out_array(out, "watches");
	groups_each_watch(groups_of(req->kvd), put_watch, &watches);
	out_close(out, ']');
	return reply_end(&reply);
}

#define F_GROUP(s) \
	F_STR("group", s, group, REQUIRED, PLACE_GROUP_MAX - 1, "Name of the group")
#define F_RANK(axis, i)                                                             \
	F_INT(axis "_rank", publish_args, rank[i], OPTIONAL, 0, PLACE_SIZE_MAX - 1, \
	      "default 0"),                                                         \
		F_INT(axis "_size", publish_args, size[i], DEFAULT(1), 1,           \
		      PLACE_SIZE_MAX, "default 1")

static const struct field publish_fields[] = {
	F_GROUP(publish_args),
	F_STR("worker", publish_args, worker, OPTIONAL, PLACE_WORKER_MAX - 1,
	      "Name of the engine within the group; default: the group has only one"),
	F_RANK("tp", PLACE_TP),
	F_RANK("pp", PLACE_PP),
	F_RANK("dp", PLACE_DP),
	F_RANK("cp", PLACE_CP),
	F_STR("endpoint", publish_args, endpoint, OPTIONAL, LINK_ENDPOINT_MAX - 1,
	      "Endpoint of the rank's daemon; default: this daemon"),
	F_STR("pool", publish_args, pool, OPTIONAL, 63, "Name of the rank's pool"),
	F_STR("model", publish_args, model, OPTIONAL, 127,
	      "Model that the engine serves"),
	F_STR("url", publish_args, url, OPTIONAL, RECORD_URL_MAX - 1,
	      "URL of the engine's HTTP server"),
	F_STR("engine", publish_args, engine, OPTIONAL, 31,
	      "Engine type: vllm, sglang, …"),
	F_STR("bootstrap", publish_args, bootstrap, OPTIONAL, 127,
	      "Address of SGLang's bootstrap server, HOST:PORT"),
	F_STR("summary", publish_args, summary, OPTIONAL, RECORD_SUMMARY_MAX - 1,
	      "Text for other daemons and routers; passed on unchanged"),
	F_END,
};
static const struct field query_fields[] = {
	F_GROUP(query_args),
	F_INT("since", query_args, since, DEFAULT(-1), 0, JSON_INT_MAX,
	      "`revision` of an earlier reply: return only the changes since then, "
	      "from this daemon's cache"),
	F_BOOL("loads", query_args, loads, "Include the load of each rank"),
	F_END,
};

static int session_load_run(struct request *req)
{
	loads_report(req->session, request_args(req));
	return request_reply(req);
}

static const struct field session_load_fields[] = {
#define SESSION_LOAD_FIELD(name, help)                                   \
	F_INT(#name, engine_load, name, DEFAULT(ENGINE_LOAD_UNKNOWN), 0, \
	      ENGINE_LOAD_MOST, help),
	ENGINE_LOADS(SESSION_LOAD_FIELD)
#undef SESSION_LOAD_FIELD
		F_END,
};

const struct command group_commands[] = {
	{"group.publish",
	 "Publish in the directory which rank of a group this engine serves",
	 publish_fields, 0, run_publish,
	 "nothing; the entry is removed when the session ends"},
	{"group.query", "List the ranks of a group", query_fields, 0, run_query,
	 "ranks: {worker, tp_rank, tp_size, …, endpoint (with its key), pool, summary, "
	 "state (serving, draining), instance, name, key, version, session, url, "
	 "engine, bootstrap, transports, pools, load}; complete: every worker has all "
	 "of its ranks; revision: the value of `since` for the next query; gone: "
	 "{worker, tp_rank, …} of removed ranks; whole: the reply replaces all earlier "
	 "ones; synced: the cache is complete since the last connection to the "
	 "directory"},
	{"cluster.show", "Show the directory and this daemon's entries and watches in it",
	 NULL, 0, run_cluster,
	 "kind (local, etcd), where (its address), up, since_ms, why (while not up), "
	 "lease_ms, trust, refused (entries of other daemons that were invalid), puts, "
	 "events, reconnects, places: {group, worker, tp_rank, …, session (0: the "
	 "daemon's own), taken: the directory has it}, of this session, or all for an "
	 "administrator, watches: {group, entries, synced}; at most 1024 of each"},
	{"session.report", "Publish the load of the engine, by which routers choose",
	 session_load_fields, 0, session_load_run,
	 "nothing; omitted values become unknown at once, and all values after ten "
	 "seconds"},
	{.name = NULL},
};
