/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.history: rooms that have ended, the latest first. Long lists are returned in
 * pages, each with the position of the next one. That position stays valid while more
 * rooms end, because a room keeps its place until the ring drops it.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/room/commands_room.h"
#include "daemon/base/context.h"
#include "daemon/request/reply_walk.h"
#include "daemon/room/room_record.h"
#include "daemon/room/rooms.h"
#include "daemon/room/rooms_history.h"
#include "daemon/session/session.h"

#define PASS_MAX 256u /* records skipped in one step */

struct history_args {
	bool all, failed;
	uint32_t limit;
	uint64_t room, before; /* UINT64_MAX: not given */
	uint64_t since_ms;
	const char *code;
};
const struct field room_history_fields[] = {
	F_BOOL("all", history_args, all,
	       "Include the rooms of all sessions (administrators only)"),
	F_BOOL("failed", history_args, failed, "Only failed rooms"),
	F_STR("code", history_args, code, OPTIONAL, 32,
	      "Only rooms that failed with this error code"),
	F_INT("since_ms", history_args, since_ms, OPTIONAL, 0, JSON_INT_MAX,
	      "Only rooms that ended within this many milliseconds"),
	F_U64("room", history_args, room, DEFAULT(-1), "Only rooms of this number"),
	F_INT("limit", history_args, limit, DEFAULT(500), 1, HISTORY_ROOMS,
	      "Maximum number of records; default 500"),
	F_U64("before", history_args, before, DEFAULT(-1),
	      "`next` of an earlier reply: continue there"),
	F_END,
};

struct history_walk {
	struct reply_walk reply;
	const struct history *history;
	uint64_t at; /* the record before it is next */
	uint32_t left;
	bool any;
	uint64_t now_ns;
};

static struct history_walk *history_walk_of(struct reply_walk *reply)
{
	return container_of(reply, struct history_walk, reply);
}

static void history_walk_end(struct reply_walk *reply)
{
	mem_free(history_walk_of(reply));
}

static bool is_asked(const struct ended_room *ended, const struct request *req)
{
	const struct history_args *args = request_args(req);

	return (args->all || ended->session == req->session->id) &&
	       (!args->failed || ended->code != ERR_OK) &&
	       (!args->code || strcmp(args->code, err_name(ended->code)) == 0) &&
	       (args->room == UINT64_MAX || args->room == ended->number);
}

/* Age in milliseconds. */
static bool add_age(cJSON *obj, const char *name, uint64_t at_ns, uint64_t now_ns)
{
	return !at_ns ||
	       cJSON_AddNumberToObject(obj, name, (double)(now_ns - at_ns) / 1e6);
}

static bool add_phase(cJSON *times, const char *name, uint64_t from, uint64_t to)
{
	return cJSON_AddNumberToObject(times, name,
				       from && to > from ? (double)(to - from) / 1e6 : 0);
}

static bool add_times(cJSON *obj, const struct ended_room *e, uint64_t now_ns)
{
	uint64_t waiting = e->waiting_ns ? e->waiting_ns : e->ended_ns;
	uint64_t moving = e->moving_ns ? e->moving_ns : e->ended_ns;
	cJSON *t = cJSON_AddObjectToObject(obj, "timings_ms");

	return t && add_phase(t, "bootstrap", e->opened_ns, waiting) &&
	       add_phase(t, "waiting", e->waiting_ns, moving) &&
	       add_phase(t, "transfer", e->moving_ns, e->ended_ns) &&
	       add_phase(t, "total", e->opened_ns, e->ended_ns) &&
	       add_age(obj, "opened_ms", e->opened_ns, now_ns) &&
	       add_age(obj, "started_ms", e->moving_ns, now_ns) &&
	       add_age(obj, "ended_ms", e->ended_ns, now_ns);
}

static bool add_error(cJSON *obj, const struct ended_room *e)
{
	cJSON *error;

	if (e->code == ERR_OK)
		return true;
	error = cJSON_AddObjectToObject(obj, "error");
	return error && cJSON_AddStringToObject(error, "code", err_name(e->code)) &&
	       cJSON_AddStringToObject(error, "message", e->text) &&
	       cJSON_AddBoolToObject(error, "retryable", e->retryable) &&
	       cJSON_AddStringToObject(error, "scope", err_scope_name(e->scope));
}

bool room_history_fill(cJSON *obj, const struct ended_room *e, uint64_t now_ns)
{
	return obj && json_add_u64(obj, "room", e->number) >= 0 &&
	       cJSON_AddStringToObject(obj, "role", room_role_names[e->role]) &&
	       cJSON_AddStringToObject(obj, "state_name",
				       e->code == ERR_OK ? "success" : "failed") &&
	       add_error(obj, e) && add_times(obj, e, now_ns) &&
	       cJSON_AddNumberToObject(obj, "bytes", (double)e->bytes) &&
	       cJSON_AddNumberToObject(obj, "expected_bytes", (double)e->expected) &&
	       cJSON_AddNumberToObject(obj, "tokens", (double)e->tokens) &&
	       cJSON_AddNumberToObject(obj, "surplus_tokens", (double)e->surplus) &&
	       cJSON_AddNumberToObject(obj, "session", (double)e->session) &&
	       cJSON_AddStringToObject(obj, "engine", e->engine) &&
	       cJSON_AddNumberToObject(obj, "peer_count", e->peers) &&
	       cJSON_AddStringToObject(obj, "peer", e->peer) &&
	       cJSON_AddStringToObject(obj, "transport", e->transport) &&
	       room_record_names(obj, e->names);
}

static int put_ended(const struct ended_room *ended, struct history_walk *walk)
{
	struct text *out = &walk->reply.text;
	cJSON *record = cJSON_CreateObject();
	char *text = room_history_fill(record, ended, walk->now_ns)
			     ? cJSON_PrintUnformatted(record)
			     : NULL;

	if (text) {
		text_puts(out, walk->any ? "," : ",\"rooms\":[");
		text_puts(out, text);
		walk->any = true;
		walk->left--;
	}
	cJSON_free(text);
	cJSON_Delete(record);
	return text ? 1 : err_raise(ERR_NOMEM, "out of memory for a room's record");
}

/* `next`: start of the next page, if there is one. */
static int history_over(struct history_walk *walk, bool more)
{
	struct text *out = &walk->reply.text;

	text_puts(out, walk->any ? "]" : ",\"rooms\":[]");
	if (more) {
		text_puts(out, ",\"next\":\"");
		text_u64(out, walk->at);
		text_puts(out, "\"");
	}
	text_puts(out, ",\"total\":");
	text_u64(out, walk->history->count);
	return 0;
}

static int history_piece(struct reply_walk *reply)
{
	struct history_walk *walk = history_walk_of(reply);
	const struct history_args *args = request_args(reply->req);

	for (unsigned int passed = 0; passed < PASS_MAX; passed++) {
		const struct ended_room *ended =
			walk->at ? history_at(walk->history, walk->at - 1) : NULL;

		if (!ended ||
		    (args->since_ms &&
		     (walk->now_ns - ended->ended_ns) / LOOP_NS_PER_MS > args->since_ms))
			return history_over(walk, false);
		if (walk->left == 0)
			return history_over(walk, true);
		walk->at--;
		if (is_asked(ended, reply->req))
			return put_ended(ended, walk);
	}
	return 1;
}

int room_history_run(struct request *req)
{
	const struct history_args *args = request_args(req);
	const struct history *history = rooms_history(rooms_of(req->kvd));
	struct history_walk *walk;

	if (request_all(req, args->all) < 0)
		return err_pass(-EPERM);
	walk = mem_zalloc(sizeof(*walk));
	if (!walk)
		return err_pass(-ENOMEM);
	walk->now_ns = loop_now_ns(req->kvd->loop);
	walk->history = history;
	walk->at = args->before < history->count ? args->before : history->count;
	walk->left = args->limit;
	walk->reply.piece = history_piece;
	walk->reply.end = history_walk_end;
	reply_walk_begin(&walk->reply, req);
	return 0;
}
