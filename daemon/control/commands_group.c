/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.publish and group.query: what engines say to the bootstrap. Each waits
 * for the meeting point in a bootstrap_call of its own, which holds the request
 * until it is answered; when the session ends first, the call is ended with
 * ERR_SESSION and the answer goes nowhere.
 *
 * The eight numbers of a rank are flat fields (tp_rank, tp_size, …): an axis that
 * a group does not have is left out and is 0 of 1.
 */
#include "daemon/control/commands.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/bootstrap/bootstrap.h"
#include "daemon/base/context.h"
#include "daemon/control/reply_walk.h"
#include "daemon/session/session.h"
#include "proto/json.h"

struct group_call {
	struct bootstrap_call call;
	struct request *req;
};

static const char *const rank_names[BOOTSTRAP_AXES] = {"tp_rank", "pp_rank", "dp_rank",
						       "cp_rank"};
static const char *const size_names[BOOTSTRAP_AXES] = {"tp_size", "pp_size", "dp_size",
						       "cp_size"};

/* A group has up to BOOTSTRAP_RANKS_MAX of them: the answer is made piece by piece. */
struct ranks_walk {
	struct reply_walk reply;
	struct bootstrap_rank *ranks; /* a copy */
	unsigned int count, next;
	bool complete;
};

static void put_rank(struct text *text, const struct bootstrap_rank *rank)
{
	text_puts(text, "{");
	for (unsigned int i = 0; i < BOOTSTRAP_AXES; i++) {
		text_json(text, rank_names[i]);
		text_puts(text, ":");
		text_u64(text, rank->rank[i]);
		text_puts(text, ",");
		text_json(text, size_names[i]);
		text_puts(text, ":");
		text_u64(text, rank->size[i]);
		text_puts(text, ",");
	}
	text_puts(text, "\"endpoint\":");
	text_json(text, rank->endpoint);
	text_puts(text, ",\"pool\":");
	text_json(text, rank->pool);
	text_puts(text, ",\"summary\":");
	text_json(text, rank->summary);
	text_puts(text, "}");
}

static int ranks_piece(struct reply_walk *reply)
{
	struct ranks_walk *walk = container_of(reply, struct ranks_walk, reply);
	struct text *text = &reply->text;

	if (walk->next == 0) {
		text_puts(text, ",\"complete\":");
		text_puts(text, walk->complete ? "true" : "false");
		text_puts(text, ",\"ranks\":[");
	}
	if (walk->next == walk->count) {
		text_puts(text, "]");
		return 0;
	}
	if (walk->next > 0)
		text_puts(text, ",");
	put_rank(text, &walk->ranks[walk->next++]);
	return 1;
}

static void ranks_end(struct reply_walk *reply)
{
	struct ranks_walk *walk = container_of(reply, struct ranks_walk, reply);

	mem_free_large(walk->ranks, walk->count * sizeof(*walk->ranks));
	mem_free(walk);
}

static void answer_ranks(struct request *req, const struct bootstrap_rank *ranks,
			 unsigned int count)
{
	struct ranks_walk *walk = mem_zalloc(sizeof(*walk));

	if (walk)
		walk->ranks = mem_dup(ranks, count * sizeof(*ranks));
	if (!walk || !walk->ranks) {
		mem_free(walk);
		request_fail_last(req);
		return;
	}
	walk->reply.piece = ranks_piece;
	walk->reply.end = ranks_end;
	walk->count = count;
	walk->complete = bootstrap_complete(ranks, count);
	reply_walk_begin(&walk->reply, req);
}

static void commands_group_on_done(struct bootstrap_call *call, const struct err *err,
				   const struct bootstrap_rank *ranks, unsigned int count)
{
	struct group_call *gc = container_of(call, struct group_call, call);

	if (err)
		request_fail(gc->req, err);
	else if (!gc->req->session)
		request_drop(gc->req);
	else if (call->query)
		answer_ranks(gc->req, ranks, count);
	else
		request_reply(gc->req, NULL);
	mem_free(gc);
}

static struct group_call *group_call_new(struct request *req)
{
	struct group_call *gc = mem_zalloc(sizeof(*gc));

	if (!gc)
		return NULL;
	gc->call.on_done = commands_group_on_done;
	gc->req = req;
	return gc;
}

struct group_args {
	const char *group, *at;
};

struct publish_args {
	const char *group, *at;
	uint32_t rank[BOOTSTRAP_AXES], size[BOOTSTRAP_AXES];
	const char *endpoint, *pool, *summary; /* NULL: "" */
};

static void get_rank(const struct publish_args *args, struct bootstrap_rank *rank)
{
	memcpy(rank->rank, args->rank, sizeof(rank->rank));
	memcpy(rank->size, args->size, sizeof(rank->size));
	snprintf(rank->endpoint, sizeof(rank->endpoint), "%s",
		 args->endpoint ? args->endpoint : "");
	snprintf(rank->pool, sizeof(rank->pool), "%s", args->pool ? args->pool : "");
	snprintf(rank->summary, sizeof(rank->summary), "%s",
		 args->summary ? args->summary : "");
}

static int run_publish(struct request *req)
{
	const struct publish_args *args = request_args(req);
	struct bootstrap_rank rank;
	struct group_call *gc = group_call_new(req);
	int r;

	if (!gc)
		return err_pass(-ENOMEM);
	get_rank(args, &rank);
	r = bootstrap_publish(req->kvd->bootstrap, req->session->id, args->group,
			      args->at, &rank, &gc->call);
	if (r < 0)
		mem_free(gc);
	return err_pass(r);
}

static int run_query(struct request *req)
{
	const struct group_args *args = request_args(req);
	struct group_call *gc = group_call_new(req);
	int r;

	if (!gc)
		return err_pass(-ENOMEM);
	r = bootstrap_query(req->kvd->bootstrap, req->session->id, args->group, args->at,
			    &gc->call);
	if (r < 0)
		mem_free(gc);
	return err_pass(r);
}

#define F_GROUP(s) \
	F_STR("group", s, group, REQUIRED, BOOTSTRAP_GROUP_MAX - 1, "the group's name")
#define F_AT(s)                                             \
	F_STR("at", s, at, OPTIONAL, LINK_ENDPOINT_MAX - 1, \
	      "endpoint of the meeting point; this daemon if absent")
#define F_RANK(axis, i)                                                                 \
	F_INT(axis "_rank", publish_args, rank[i], OPTIONAL, 0, BOOTSTRAP_SIZE_MAX - 1, \
	      "0 if absent"),                                                           \
		F_INT(axis "_size", publish_args, size[i], DEFAULT(1), 1,               \
		      BOOTSTRAP_SIZE_MAX, "1 if absent")

static const struct field publish_fields[] = {
	F_GROUP(publish_args),
	F_AT(publish_args),
	F_RANK("tp", BOOTSTRAP_TP),
	F_RANK("pp", BOOTSTRAP_PP),
	F_RANK("dp", BOOTSTRAP_DP),
	F_RANK("cp", BOOTSTRAP_CP),
	F_STR("endpoint", publish_args, endpoint, OPTIONAL, LINK_ENDPOINT_MAX - 1,
	      "where the rank is reached; this daemon if absent"),
	F_STR("pool", publish_args, pool, OPTIONAL, BOOTSTRAP_POOL_MAX - 1,
	      "name of its pool"),
	F_STR("summary", publish_args, summary, OPTIONAL, BOOTSTRAP_SUMMARY_MAX - 1,
	      "what others should know of it; handed on as it is"),
	F_END,
};
static const struct field query_fields[] = {F_GROUP(group_args), F_AT(group_args), F_END};

const struct command group_commands[] = {
	{"group.publish",
	 "say at a meeting point which rank of a group this engine serves",
	 publish_fields, 0, run_publish, "nothing; the rank goes with the session"},
	{"group.query", "ask a meeting point for the ranks of a group", query_fields, 0,
	 run_query, "complete, ranks: {tp_rank, tp_size, …, endpoint, pool, summary}"},
	{.name = NULL},
};
