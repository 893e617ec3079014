/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.history: rooms that have ended, the latest first. Long lists are returned in
 * pages, each with the position of the next one. That position stays valid while more
 * rooms end, because a room keeps its place until the ring drops it.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/room/commands_room.h"
#include "daemon/base/context.h"
#include "daemon/request/reply_walk.h"
#include "daemon/room/room_record.h"
#include "daemon/room/rooms_set.h"
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
	uint64_t now_ns;
};

static bool is_asked(const struct ended_room *ended, const struct request *req)
{
	const struct history_args *args = request_args(req);

	return (args->all || ended->session == req->session->id) &&
	       (!args->failed || ended->code != ERR_OK) &&
	       (!args->code || strcmp(args->code, err_name(ended->code)) == 0) &&
	       (args->room == UINT64_MAX || args->room == ended->number);
}

/* Age in milliseconds. */
static void put_age(struct text *out, const char *name, uint64_t at_ns, uint64_t now_ns)
{
	if (at_ns)
		out_double(out, name, (double)(now_ns - at_ns) / 1e6);
}

void room_history_put(const struct ended_room *e, uint64_t now_ns, struct text *out)
{
	struct err why = {.code = e->code, .retryable = e->retryable, .scope = e->scope};

	out_id(out, "room", e->number);
	out_text(out, "role", room_role_names[e->role]);
	out_text(out, "state_name", e->code == ERR_OK ? "success" : "failed");
	snprintf(why.text, sizeof(why.text), "%s", e->text);
	if (e->code != ERR_OK)
		out_error(out, &why);
	room_record_timings(out, e->opened_ns, e->waiting_ns, e->moving_ns, e->ended_ns);
	put_age(out, "opened_ms", e->opened_ns, now_ns);
	put_age(out, "started_ms", e->moving_ns, now_ns);
	put_age(out, "ended_ms", e->ended_ns, now_ns);
	out_number(out, "bytes", e->bytes);
	out_number(out, "expected_bytes", e->expected);
	out_number(out, "tokens", e->tokens);
	out_number(out, "surplus_tokens", e->surplus);
	out_number(out, "session", e->session);
	out_text(out, "engine", e->engine);
	out_number(out, "peer_count", e->peers);
	out_text(out, "peer", e->peer);
	out_text(out, "transport", e->transport);
	room_record_names(e->names, out);
}

/* `next`: start of the next page, if there is one. */
static int history_over(struct history_walk *walk, bool more)
{
	struct text *out = &walk->reply.text;

	out_close(out, ']');
	if (more)
		out_id(out, "next", walk->at);
	out_number(out, "total", walk->history->count);
	return 0;
}

static int history_piece(struct reply_walk *reply)
{
	struct history_walk *walk = container_of(reply, struct history_walk, reply);
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
		if (!is_asked(ended, reply->req))
			continue;
		walk->left--;
		out_object(&reply->text, NULL);
		room_history_put(ended, walk->now_ns, &reply->text);
		out_close(&reply->text, '}');
		return 1;
	}
	return 1;
}

int room_history_run(struct request *req)
{
	const struct history_args *args = request_args(req);
	const struct history *history = &rooms_of(req->kvd)->history;
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
	walk->reply.list = "rooms";
	reply_walk_begin(&walk->reply, req);
	return 0;
}
