/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.layout: the layout of a pool in the form of pool.register, to compare it with
 * another or to pass it to kvd-ctl plan. It may be long, so it is written as text, one
 * layer per step. The pool is not referenced between steps, so its engine may unregister
 * it: each step finds it again, and the command fails if it has been removed.
 */
#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/control/commands_pool.h"
#include "daemon/plan/layout_text.h"
#include "daemon/request/reply_walk.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"

const struct field pool_layout_fields[] = {
	F_ID("pool", request_id_args, id, REQUIRED,
	     "Pool of this session; administrators may name any pool"),
	F_END,
};

struct layout_walk {
	struct reply_walk reply;
	uint64_t pool;
	struct layout_writer writer;
};

static const struct pool *find_any(const struct session *asking, uint64_t id)
{
	const struct session *session;
	const struct pool *pool;

	list_foreach(session, &asking->kvd->sessions, link) {
		if (session != asking && !asking->admin)
			continue;
		pool = idmap_get(&session->pools, id);
		if (pool && !pool->closing)
			return pool;
	}
	err_raise(ERR_NOTFOUND, "pool: no pool %ju%s", (uintmax_t)id,
		  asking->admin ? "" : " in this session");
	return NULL;
}

static int layout_piece(struct reply_walk *reply)
{
	struct layout_walk *walk = container_of(reply, struct layout_walk, reply);
	struct text *out = &walk->reply.text;
	const struct pool *pool = find_any(reply->req->session, walk->pool);

	if (!pool)
		return err_pass(-ENOENT);
	if (!walk->writer.begun) {
		out_number(out, "pool", pool->id);
		out_text(out, "name", pool->name);
		out_number(out, "session", pool->session->id);
		out_digest(out, "digest", pool->digest);
	}
	return layout_write_some(&walk->writer, pool->layout, out);
}

int pool_layout_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct layout_walk *walk;

	if (!find_any(req->session, args->id))
		return err_pass(-ENOENT);
	walk = mem_zalloc(sizeof(*walk));
	if (!walk)
		return err_pass(-ENOMEM);
	walk->pool = args->id;
	walk->writer.name = "layout";
	walk->reply.piece = layout_piece;
	reply_walk_begin(&walk->reply, req);
	return 0;
}
